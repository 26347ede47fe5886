"""Figures contain tokens as literal text, are not blank, and errors are reported."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from attent.inspection.attention_trace import build_layer
from attent.inspection.position_encodings import describe_positions
from attent.nn import AlibiConfig, LearnedConfig, Stack, StackConfig
from tests.inspection import toy_translator

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'attent[viz]'")

from attent.inspection import plots
from attent.inspection.plots import plot_ablation, plot_heads, plot_positions, save_figure

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
    labels = draw_texts(plot_heads(document(), path="decoder.blocks.1.cross_attn", heads=[1]), tmp_path)
    assert set(SOURCE) | set(TARGET) | {"‹end›", "source", "translation", "attention weight"} <= set(labels)
    assert "decoder cross-attention, layer 1, head 1" in labels
    assert labels.count(".") == 2


def test_grid_has_every_head_and_labels_once(tmp_path: Path) -> None:
    labels = draw_texts(plot_heads(document()), tmp_path)
    assert sum(bool(re.fullmatch(r"layer \d, head \d", text)) for text in labels) == 8
    assert {"encoder self-attention", "decoder cross-attention", "A man rides a bike."} <= set(labels)
    assert labels.count("Mann") == 2  # on the left of both layers


def test_kinds_layers_and_heads_can_be_selected(tmp_path: Path) -> None:
    labels = draw_texts(plot_heads(document(), kind="cross", heads=[1]), tmp_path)
    assert [text for text in labels if text.startswith("layer")] == [
        f"layer {layer}, head {head}" for layer in (0, 1) for head in (1,)
    ]
    labels = draw_texts(plot_heads(document(), path="encoder.*", heads=[1], title="Mine"), tmp_path)
    assert "Mine" in labels
    assert "decoder cross-attention" not in labels


def test_head_indices_are_kept(tmp_path: Path) -> None:
    subset = document(layers=1)
    for layer in subset["layers"]:
        layer["head_indices"] = [4, 6]
    labels = draw_texts(plot_heads(subset, kind="cross"), tmp_path)
    assert [text for text in labels if text.startswith("layer")] == [f"layer 0, head {head}" for head in (4, 6)]


def test_lines_connect_tokens_of_one_layer(tmp_path: Path) -> None:
    labels = draw_texts(plot_heads(document(), path="decoder.blocks.0.cross_attn", style="lines"), tmp_path)
    assert set(SOURCE) | set(TARGET) | {"head 0", "head 1"} <= set(labels)
    alone = draw_texts(plot_heads(document(), path="decoder.blocks.0.cross_attn", heads=[1], style="lines"), tmp_path)
    assert "decoder cross-attention, layer 0, head 1" in alone
    with pytest.raises(ValueError, match="lines show one layer, but these match: decoder"):
        plot_heads(document(), style="lines")


@pytest.mark.parametrize("style", ["map", "lines"])
def test_tokens_are_literal_text(style: Any, tmp_path: Path) -> None:
    subset = document(HOSTILE, HOSTILE, layers=1)
    subset["title"] = "$\\broken{$ </title> \x1b & <b>"
    labels = draw_texts(plot_heads(subset, path="decoder.blocks.0.cross_attn", heads=[0], style=style), tmp_path)
    for word in ("</text><script>", "$x^2$", "a&b", '"quoted"', "\\frac{1}{2}", "$", "␛[31m"):
        assert labels.count(word) == 2
    assert "$\\broken{$ </title> ␛ & <b>" in draw_texts(plot_heads(subset, kind="cross"), tmp_path)


def test_special_tokens_differ(tmp_path: Path) -> None:
    save_figure(plot_heads(document(), path="decoder.blocks.0.cross_attn", heads=[0]), tmp_path / "a.svg")
    root = ElementTree.fromstring((tmp_path / "a.svg").read_bytes())
    styles = {"".join(e.itertext()): e.get("style", "") for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert plots.SPECIAL_TOKEN_COLOR in styles["‹end›"]
    assert plots.SPECIAL_TOKEN_COLOR not in styles["Mann"]


def test_long_titles_are_truncated_and_long_texts_unlabeled(tmp_path: Path) -> None:
    words = [f"w{position}" for position in range(180)]
    subset = document(words, words, layers=1, heads=1)
    labels = draw_texts(plot_heads(subset, path="encoder.*", title="long " * 40), tmp_path)
    assert "w17" not in labels
    assert max(map(len, labels)) <= plots.MAX_TITLE_LENGTH


def test_titles_are_cut_beyond_their_length() -> None:
    assert plots.format_title("x" * 64) == "x" * 64
    assert plots.format_title("x" * 65) == "x" * 63 + "…"
    assert plots.format_title(" a\n b\x1b ") == "a b␛"


# ---- files -----------------------------------------------------------------------------------------------------------


def test_png_is_not_blank(tmp_path: Path) -> None:
    figure = plot_heads(document(), path="decoder.blocks.0.cross_attn", heads=[0])
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
    figure = plot_heads(subset)
    (image,) = figure.axes[0].images
    assert image.get_array().tolist() == weights[0].tolist()
    dark, light = (sum(image.cmap(image.norm(value))[:3]) for value in (1.0, 0.0))
    assert dark < 0.6 < 2.9 < light


@pytest.mark.parametrize("ending", ["svg", "pdf"])
def test_figures_are_reproducible(ending: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_figure(
            plot_heads(document(), path="decoder.blocks.0.cross_attn", heads=[0]), tmp_path / f"{name}.{ending}"
        )
    assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{ending}", f"b.{ending}"]


def test_unknown_suffix_is_rejected(tmp_path: Path) -> None:
    figure = plot_heads(document(), path="decoder.blocks.0.cross_attn", heads=[0])
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg, \.pdf; change the name"):
        save_figure(figure, tmp_path / "a.gif")
    assert list(tmp_path.iterdir()) == []


def test_missing_glyphs_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plot_heads(document(["日本", "A"], ["B"]), path="decoder.blocks.0.cross_attn", heads=[0])
    plots.select_fonts.cache_clear()
    monkeypatch.setattr(plots, "get_font_characters", lambda name: frozenset(map(chr, range(0x20, 0x2100))))
    with pytest.warns(UserWarning, match=r"no installed font has 日本 \(2 characters\)"):
        save_figure(figure, tmp_path / "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(figure, tmp_path / "a.svg")
    plots.select_fonts.cache_clear()
    assert "日本" in texts(tmp_path / "a.svg")


def test_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'attent\[viz\]'"):
        plot_heads(document())


def test_missing_layers_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"no head matches 'decoder\.9'; the layers are: encoder"):
        plot_heads(document(), path="decoder.9")
    with pytest.raises(ValueError, match=r"no head matches '\*', cross-attention, heads \[7\]"):
        plot_heads(document(), kind="cross", heads=[7])
    empty = document(layers=1)
    empty["layers"] = [
        build_layer("encoder.blocks.0.self_attn", ("source", "source"), torch.zeros(1, 0, 0), causal=False, scale=1)
    ]
    with pytest.raises(ValueError, match="there must be tokens on both sides"):
        plot_heads(empty)


def test_global_settings_are_unchanged() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_heads(document())
    assert dict(matplotlib.rcParams) == before


# ---- positions and parts ---------------------------------------------------------------------------------------------


def test_equal_stacks_are_drawn_once(tmp_path: Path) -> None:
    model = toy_translator.model()
    labels = draw_texts(plot_positions(model), tmp_path)
    assert "encoder and decoder: sinusoidal positions" in labels
    assert {"values", "dot products between positions", "position", "feature"} <= set(labels)
    assert draw_texts(plot_positions({"positions": describe_positions(model)}), tmp_path) == labels


@pytest.mark.parametrize("scheme", [AlibiConfig(), LearnedConfig()], ids=["alibi", "learned"])
def test_every_scheme_can_be_drawn(scheme: Any, tmp_path: Path) -> None:
    stack = Stack(StackConfig(layers=1, width=16, heads=4, ffn_width=8, positions=scheme))
    labels = draw_texts(plot_positions(stack), tmp_path)
    assert any(text in labels for text in ("encoder: ALiBi's positions", "encoder: learned positions"))
    assert ("head 3" in labels) == (scheme.kind == "alibi")
    with pytest.raises(ValueError, match="but this model has none"):
        plot_positions([])


def test_ablation_shows_every_head(tmp_path: Path) -> None:
    parts = [
        {"part": "encoder.blocks.0.self_attn:0", "kind": "head", "bleu": 39.8, "loss": 1.5},
        {"part": "encoder.blocks.0.self_attn:1", "kind": "head", "bleu": 40.09, "loss": 1.4},
        {"part": "decoder.blocks.0.cross_attn:0", "kind": "head", "bleu": 41.6, "loss": 1.39},
        {"part": "decoder.blocks.0.cross_attn", "kind": "sublayer", "bleu": 2.0, "loss": 6.0},
    ]
    section = {"sentences": 1014, "bleu": 40.1, "loss": 1.43, "parts": parts}
    labels = draw_texts(plot_ablation(section), tmp_path)
    assert {"-0.3", "0.0", "+1.5", "encoder 0 self", "decoder 0 cross", "head", "change of BLEU"} <= set(labels)
    assert not {"-0.0", "+0.0"} & set(labels)
    assert any("40.10 unmasked (1,014 sentences)" in text for text in labels)
    by_loss = draw_texts(plot_ablation(section | {"bleu": None}), tmp_path)
    assert {"+0.07", "-0.03", "change of loss"} <= set(by_loss)
    with pytest.raises(ValueError, match="run attent look --ablate first"):
        plot_ablation(section | {"parts": []})
