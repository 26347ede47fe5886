"""Figures contain tokens as literal text, are not blank, and errors are reported."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from attent.inspection.attention_trace import build_layer

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'attent[viz]'")

from attent.inspection import plots
from attent.inspection.plots import plot_head, save_figure

SOURCE = ["A", "man", "rides", "a", "bike", "."]
TARGET = ["Ein", "Mann", "fährt", "Rad", "."]
HOSTILE = ["</text><script>", "$x^2$", "a&b", "\x1b[31m", "\x00", '"quoted"', "\\frac{1}{2}", "$"]


def side(words: list[str], label: str) -> dict[str, Any]:
    tokens = [{"piece": w, "text": w, "space": True, "special": None} for w in words]
    end = {"piece": "</s>", "text": "end", "space": False, "special": "end"}
    return {"label": label, "text": " ".join(words), "language": None, "tokens": [*tokens, end]}


def document(source: list[str] = SOURCE, target: list[str] = TARGET, layers: int = 2, heads: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    built_layers = []
    for number in range(layers):
        for path, sides, shape in (
            (f"encoder.blocks.{number}.self_attn", ("source", "source"), (len(source), len(source))),
            (f"decoder.blocks.{number}.cross_attn", ("target", "source"), (len(target), len(source))),
        ):
            weights = (4 * torch.rand(heads, shape[0] + 1, shape[1] + 1)).softmax(-1)
            built_layers.append(build_layer(path, sides, weights, causal=False, scale=1.0))
    sides = {"source": side(source, "source"), "target": side(target, "translation")}
    return {"title": "A man rides a bike.", "sides": sides, "layers": built_layers}


def texts(path: Path) -> list[str]:
    """The texts of an SVG, read by a strict parser."""
    root = ElementTree.fromstring(path.read_bytes())
    return ["".join(item.itertext()) for item in root.iter("{http://www.w3.org/2000/svg}text")]


def draw_texts(figure: Any, folder: Path) -> list[str]:
    save_figure(figure, folder / "figure.svg")
    return texts(folder / "figure.svg")


def pixels(path: Path) -> Any:
    from matplotlib.image import imread

    return imread(path)


# ---- heads -----------------------------------------------------------------------------------------------------------


def test_one_head_is_labeled_on_both_sides(tmp_path: Path) -> None:
    labels = draw_texts(plot_head(document(), "decoder.blocks.1.cross_attn", 1), tmp_path)
    assert set(SOURCE) | set(TARGET) | {"‹end›", "source", "translation", "attention weight"} <= set(labels)
    assert "decoder cross-attention, layer 1, head 1" in labels
    assert labels.count(".") == 2


def test_tokens_are_literal_text(tmp_path: Path) -> None:
    labels = draw_texts(plot_head(document(HOSTILE, HOSTILE, layers=1), "decoder.blocks.0.cross_attn", 0), tmp_path)
    for word in ("</text><script>", "$x^2$", "a&b", '"quoted"', "\\frac{1}{2}", "$", "\\x1b[31m"):
        assert labels.count(word) == 2


def test_special_tokens_differ(tmp_path: Path) -> None:
    save_figure(plot_head(document(), "decoder.blocks.0.cross_attn", 0), tmp_path / "a.svg")
    root = ElementTree.fromstring((tmp_path / "a.svg").read_bytes())
    styles = {"".join(e.itertext()): e.get("style", "") for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert plots.SPECIAL_TOKEN_COLOR in styles["‹end›"]
    assert plots.SPECIAL_TOKEN_COLOR not in styles["Mann"]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_png_is_not_blank(tmp_path: Path) -> None:
    figure = plot_head(document(), "decoder.blocks.0.cross_attn", 0)
    save_figure(figure, tmp_path / "a.png")
    image = pixels(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert min(image.shape[:2]) > 400
    assert len({tuple(pixel) for pixel in image[::7, ::7, :3].reshape(-1, 3).tolist()}) > 20
    edges = [image[0], image[-1], image[:, 0], image[:, -1]]
    assert all(float(edge[..., :3].min()) == 1 for edge in edges)  # not truncated


def test_larger_weights_are_darker(tmp_path: Path) -> None:
    subset = document(layers=1, heads=1)
    weights = torch.zeros(1, 6, 7)
    weights[0, :, 0] = 1
    subset["layers"] = [
        build_layer("decoder.blocks.0.cross_attn", ("target", "source"), weights, causal=False, scale=1.0)
    ]
    figure = plot_head(subset, "decoder.blocks.0.cross_attn", 0)
    (image,) = figure.axes[0].images
    assert image.get_array().tolist() == weights[0].tolist()
    dark, light = (sum(image.cmap(image.norm(value))[:3]) for value in (1.0, 0.0))
    assert dark < 0.6 < 2.9 < light


@pytest.mark.parametrize("ending", ["svg", "pdf"])
def test_figures_are_reproducible(ending: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_figure(
            plot_head(document(), "decoder.blocks.0.cross_attn", 0),
            tmp_path / f"{name}.{ending}",
        )
    assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{ending}", f"b.{ending}"]


def test_unknown_suffix_is_rejected(tmp_path: Path) -> None:
    figure = plot_head(document(), "decoder.blocks.0.cross_attn", 0)
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg, \.pdf; change the name"):
        save_figure(figure, tmp_path / "a.gif")
    assert list(tmp_path.iterdir()) == []


def test_missing_glyphs_are_reported_by_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.font_manager import fontManager

    figure = plot_head(document(["日本", "A"], ["B"]), "decoder.blocks.0.cross_attn", 0)
    plots.select_fonts.cache_clear()
    monkeypatch.setattr(fontManager, "ttflist", [font for font in fontManager.ttflist if font.name == "DejaVu Sans"])
    with pytest.warns(UserWarning, match="Glyph"):
        save_figure(figure, tmp_path / "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(figure, tmp_path / "a.svg")
    plots.select_fonts.cache_clear()
    assert "日本" in texts(tmp_path / "a.svg")


def test_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'attent\[viz\]'"):
        plot_head(document(), "decoder.blocks.0.cross_attn", 0)


def test_texts_without_tokens_are_rejected() -> None:
    empty = document(layers=1)
    empty["layers"] = [
        build_layer("encoder.blocks.0.self_attn", ("source", "source"), torch.zeros(1, 0, 0), causal=False, scale=1)
    ]
    with pytest.raises(ValueError, match="there must be tokens on both sides"):
        plot_head(empty, "encoder.blocks.0.self_attn", 0)


def test_global_settings_are_unchanged() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_head(document(), "decoder.blocks.0.cross_attn", 0)
    assert dict(matplotlib.rcParams) == before


# ---- geometry --------------------------------------------------------------------------------------------------------


def test_the_size_of_one_head_follows_its_tokens() -> None:
    figure = plot_head(document(), "decoder.blocks.1.cross_attn", 1)
    assert figure.get_size_inches().tolist() == pytest.approx([7 * 0.27 + 2.3, 6 * 0.27 + 1.9])
    axes, bar = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == [*SOURCE, "‹end›"]
    assert [text.get_text() for text in axes.get_yticklabels()] == [*TARGET, "‹end›"]
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("source", "translation", "attention weight")
    assert (axes.xaxis.get_label_position(), axes.xaxis.get_ticks_position()) == ("top", "top")
    assert {text.get_rotation() for text in axes.get_xticklabels()} == {60.0}
    assert axes.xaxis.get_ticklocs(minor=True).tolist() == [i - 0.5 for i in range(1, 7)]
    assert axes.yaxis.get_ticklocs(minor=True).tolist() == [i - 0.5 for i in range(1, 6)]
    (image,) = axes.images
    weights = image.get_array()
    assert weights.shape == (6, 7)
    assert image.get_clim() == pytest.approx((0, float(weights.max())))
    assert axes.get_title() == "decoder cross-attention, layer 1, head 1"


def test_long_sentences_have_small_cells_without_labels() -> None:
    words = [f"w{i}" for i in range(200)]
    figure = plot_head(document(words, words, layers=1), "decoder.blocks.0.cross_attn", 0)
    size = (16.0 - 3) / 201
    assert figure.get_size_inches().tolist() == pytest.approx([201 * size + 2.3, 201 * size + 1.9])
    axes = figure.axes[0]
    assert axes.get_xticklabels() == axes.get_yticklabels() == []
    assert axes.xaxis.get_ticklocs(minor=True).tolist() == []


def test_figures_have_a_largest_size() -> None:
    assert plots.create_figure(99, 99).get_size_inches().tolist() == [16.0, 30.0]
