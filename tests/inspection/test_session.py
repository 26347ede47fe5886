"""An inspection in Python: arrays with tokens, tables, figures, and the page in a notebook."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attent
from attent.inspection.session import Inspection
from tests.inspection.conftest import watch_problems
from tests.inspection.documents import read_weights

CROSS = "decoder.blocks.0.cross_attn"


@pytest.fixture(scope="module")
def inspection(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    """Of a translator: one layer of two heads in each stack."""
    folder = tmp_path_factory.mktemp("folder") / "numbers"
    shutil.copytree(Path(__file__).parents[1] / "models" / "saved_model", folder)
    return attent.look(attent.Translator.load(folder), "seven")


def test_attention_is_an_array_with_tokens(inspection: Inspection) -> None:
    weights = inspection.attention[CROSS]
    assert weights.shape == (2, len(weights.queries), len(weights.keys)) == (2, 8, 7)
    assert "".join(weights.queries[1:-1]) == "sieben"
    assert "".join(weights.keys[1:-1]) == "seven"
    assert weights.queries[-1] == weights.keys[-1] == "‹end›"
    assert weights.mean(0).queries == ()
    recorded = read_weights(inspection.document)[CROSS][0]
    np.testing.assert_array_equal(np.asarray(weights), recorded.numpy())


def test_unknown_layer_names_the_recorded_ones(inspection: Inspection) -> None:
    with pytest.raises(KeyError, match=r"no attention was recorded at 'cross'; recorded: encoder\.blocks\.0"):
        inspection.attention["cross"]
    with pytest.raises(
        ValueError, match=r"no head of this layer, number and kind was recorded; recorded: encoder\.blocks\.0"
    ):
        inspection.plot(layer=7)


def test_table_has_every_weight_with_its_tokens(inspection: Inspection) -> None:
    frame = inspection.to_frame()
    assert list(frame.columns) == ["path", "head", "query", "key", "weight", "query_token", "key_token"]
    assert len(frame) == sum(weights.size for weights in inspection.attention.values())
    np.testing.assert_allclose(frame.groupby(["path", "head", "query"])["weight"].sum(), 1, atol=1e-3)
    row = frame[(frame.path == CROSS) & (frame["head"] == 1) & (frame["query"] == 2) & (frame["key"] == 3)].iloc[0]
    weights = inspection.attention[CROSS]
    assert (row.weight, row.query_token, row.key_token) == (weights[1, 2, 3], weights.queries[2], weights.keys[3])


def test_plots_of_a_head_a_layer_and_a_path(inspection: Inspection) -> None:
    pytest.importorskip("matplotlib")
    assert inspection.plot(layer=0, head=1).axes[0].get_title() == "decoder cross-attention, layer 0, head 1"
    path = "encoder.blocks.0.self_attn"
    assert inspection.plot(path, 0).axes[0].get_title() == "encoder self-attention, layer 0, head 0"
    path, best = inspection.select_head()
    for figure in (inspection.plot(), inspection.plot(kind="cross"), inspection.plot(path)):
        assert figure.axes[0].get_title() == f"decoder cross-attention, layer 0, head {best}"
    assert inspection.plot(kind="self", head=1).axes[0].get_title().endswith("self-attention, layer 0, head 1")
    with pytest.raises(ValueError, match="no head of this layer, number and kind was recorded"):
        inspection.plot(head=9)


def test_notebook_shows_a_figure_without_pyplot(inspection: Inspection) -> None:
    pytest.importorskip("matplotlib")
    formatters = pytest.importorskip("IPython.core.formatters")
    shown, _ = formatters.DisplayFormatter().format(inspection.plot(head=0))
    assert shown["image/png"].startswith(b"\x89PNG")


def test_text_is_short_and_names_both_sentences(inspection: Inspection) -> None:
    assert repr(inspection).startswith("Inspection of 'seven' -> 'sieben': 3 attention layers; save_html(path)")
    assert inspection.document["model"]["name"] == "numbers"


def test_page_works_in_a_sandboxed_frame(inspection: Inspection, browser: Any, tmp_path: Path) -> None:
    """It has no storage, and may not change its URL."""
    (tmp_path / "notebook.html").write_text(f"<meta charset=utf-8>{inspection._repr_html_()}", encoding="utf-8")
    page = browser.new_page()
    page.set_default_timeout(10_000)
    problems = watch_problems(page)
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe[sandbox=allow-scripts]")
    for tab in ("Equation", "Decoding", "Heads"):
        frame.get_by_role("tab", name=tab).click()
    frame.get_by_text("dark").click()
    frame.locator(".words.queries .word").nth(1).hover()
    frame.locator("#saying", has_text="attends to").wait_for()
    page.close()
    assert problems == []
