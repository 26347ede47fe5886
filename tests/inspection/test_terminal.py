"""Terminal drawings: widths, alignment in any script, and no control characters."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from torch import Tensor

from attent.inspection.attention_trace import build_layer
from attent.inspection.head_stats import measure_document_heads
from attent.inspection.terminal import (
    MAX_LIST_LINES,
    draw_head,
    escape_control_characters,
    format_token,
    split_graphemes,
    summarize_heads,
    truncate_text,
)

PATH = "decoder.blocks.0.cross_attn"
HOSTILE = ["\x1b[31mred", "a\x00b\x07", "\r\n\t", "\x9b2J", "\u202eabc", "\u2028", "\ud800", "\u200f"]


def token(text: str, special: str | None = None) -> dict[str, Any]:
    return {"piece": text, "text": text, "space": True, "special": special}


def document(rows: list[str], columns: list[str], weights: Tensor | None = None, heads: int = 2) -> dict[str, Any]:
    if weights is None:
        weights = torch.rand(heads, len(rows), len(columns)).softmax(-1)
    return {
        "title": "",
        "sides": {
            "target": {"label": "translation", "tokens": [token(text) for text in rows]},
            "source": {"label": "source", "tokens": [token(text) for text in columns]},
        },
        "layers": [build_layer(PATH, ("target", "source"), weights, causal=False, scale=1.0)],
    }


def diagonal(words: list[str]) -> dict[str, Any]:
    return document(words, words, torch.eye(len(words))[None])


# ---- one head --------------------------------------------------------------------------------------------------------


def test_labels_are_above_columns_and_beside_rows() -> None:
    weights = torch.tensor([[[1.0, 0.0], [0.3, 0.7]]])
    assert draw_head(document(["ein", "Hund"], ["a", "dog"], weights), path=PATH, head=0) == (
        "       a   dog\n"  #
        "   ein ███\n"
        "  Hund ░░░ ▓▓▓"
    )


def test_shades() -> None:
    weights = torch.tensor([[[0.1, 0.3, 0.5, 0.7, 1.0]]])
    line = draw_head(document(["x"], list("abcde"), weights), path=PATH, head=0).splitlines()[-1]
    assert line == "  x     ░░░ ▒▒▒ ▓▓▓ ███"


@pytest.mark.parametrize(
    "words",
    [
        ["Hund", "und", "Katze"],
        ["日本語", "の", "犬"],
        ["café", "e\u0301tude", "naïve"],
        ["नमस्ते", "दुनिया"],
        ["שלום", "עולם", "abc"],
        ["🚲", "👩‍🚒", "x"],
    ],
)
@pytest.mark.parametrize("width", [200, 30])
def test_cells_are_below_their_labels_in_every_script(words: list[str], width: int) -> None:
    lines = draw_head(diagonal(words), path=PATH, head=0, width=width).splitlines()
    rows = lines[-len(words) :]
    starts = [cell_len(row[: row.index("█")]) for row in rows]
    widths = [row.count("█") for row in rows]
    assert starts == [starts[0] + sum(widths[:position]) + position for position in range(len(words))]
    header = lines[: -len(words)]
    assert max(map(cell_len, header)) <= starts[-1] + widths[-1]
    assert max(map(cell_len, lines)) <= width


def test_long_labels_are_vertical() -> None:
    words = ["elephant", "giraffe", "crocodile", "hippopotamus", "rhinoceroses"]
    text = draw_head(diagonal(words), path=PATH, head=0, width=40)
    lines = text.splitlines()
    assert len(lines) == 12 + 5  # letters of the longest label, and the rows
    start = cell_len(lines[-5][: lines[-5].index("█")])
    assert "".join(line[start] for line in lines[4:12]) == "elephant"
    assert max(map(cell_len, lines)) <= 40


def test_many_tokens_give_a_list() -> None:
    words = [f"word{position}" for position in range(100)]
    lines = draw_head(diagonal(words), path=PATH, head=0, width=80).splitlines()
    assert lines[0].strip() == "word0 ← word0 100%"
    assert len(lines) == MAX_LIST_LINES + 1
    assert lines[-1].strip() == "… and 40 more"


def test_list_names_the_top_keys() -> None:
    weights = torch.full((1, 3, 60), 0.0)
    weights[0, :, 2], weights[0, :, 5], weights[0, :, 7], weights[0, :, 9] = 0.87, 0.09, 0.03, 0.01
    lines = draw_head(document(list("abc"), [f"w{i}" for i in range(60)], weights), path=PATH, head=0).splitlines()
    assert lines == [f"  {row} ← w2 87%, w5 9%" for row in "abc"]


def test_mean_over_heads_is_the_default() -> None:
    weights = torch.stack([torch.eye(2), torch.eye(2).flip(0)])
    text = document(["a", "b"], ["c", "d"], weights)
    assert draw_head(text, path=PATH) == draw_head(text, path=PATH, head="mean")
    assert draw_head(text, path=PATH).count("▒") == 12
    assert draw_head(text, path=PATH, head=1) != draw_head(text, path=PATH, head=0)


def test_head_indices_are_kept() -> None:
    text = document(["a", "b"], ["c", "d"])
    text["layers"][0]["head_indices"] = [2, 5]
    draw_head(text, path=PATH, head=5)
    with pytest.raises(ValueError, match=r"the heads of decoder\.blocks\.0\.cross_attn are 2, 5, but 1 was requested"):
        draw_head(text, path=PATH, head=1)


def test_invalid_requests_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"there is no layer 'decoder\.cross'; did you mean decoder\.blocks\.0\.cross_attn"
    ):
        draw_head(document(["a"], ["b"]), path="decoder.cross")
    with pytest.raises(ValueError, match="must have tokens on both sides"):
        draw_head(document([], ["b"]), path=PATH)
    with pytest.raises(ValueError, match="has no heads"):
        draw_head(document(["a"], ["b"], heads=0), path=PATH)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [200, 30, 10])
def test_tokens_cannot_control_the_terminal(width: int) -> None:
    text = draw_head(diagonal(HOSTILE), path=PATH, head=0, width=width)
    unsafe = [
        c for c in text.replace("\n", "").replace("\u200e", "") if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl")
    ]
    assert unsafe == []
    assert len(text.splitlines()) == text.count("\n") + 1


def test_control_characters_are_replaced() -> None:
    assert escape_control_characters("\x1b[0m\x00\x7f") == "␛[0m␀␡"
    assert escape_control_characters("a\nb\tc") == "a⏎b⇥c"
    assert escape_control_characters("\x85\u202e\ud800") == "\ufffd" * 3
    assert escape_control_characters("naïve 日本 שלום \u200c") == "naïve 日本 שלום \u200c"


def test_special_tokens_are_marked() -> None:
    assert format_token(token("end", "end")) == "‹end›"
    assert format_token(token("end")) == "end"
    assert format_token(token("")) == "␣"
    assert format_token(token("\u200c")) == "␣"
    assert format_token(token("\u0301")) == "◌\u0301"


def test_graphemes_keep_combining_marks() -> None:
    assert split_graphemes("e\u0301tude") == ["e\u0301", "t", "u", "d", "e"]
    assert split_graphemes("日本") == ["日", "本"]
    assert "".join(split_graphemes("नमस्ते")) == "नमस्ते"


def test_truncated_text_fits() -> None:
    assert truncate_text("elephant", 5) == "elep…"
    assert truncate_text("日本語", 5) == "日本…"
    assert truncate_text("日本語", 4) == "日…"
    assert truncate_text("abc", 3) == "abc"


# ---- summary ---------------------------------------------------------------------------------------------------------


def test_summary_names_the_best_alignment() -> None:
    words = ["a", "b", "c", "d", "e"]
    weights = torch.stack([torch.full((5, 5), 0.2), torch.eye(5)])
    text = document(words, words, weights)
    output = summarize_heads(text)
    assert output.splitlines()[0] == "Top heads, measured on this sentence:"
    best = next(line for line in output.splitlines() if "best alignment" in line)
    assert best.split() == ["best", "alignment", f"{PATH}:1", "100%"]
    text["head_stats"] = measure_document_heads(text) | {"sentences": 500, "dataset": "the \x1bvalidation pairs"}
    assert summarize_heads(text).startswith("Top heads, measured on 500 sentences of the ␛validation pairs:")
    assert summarize_heads({"layers": [], "sides": {}}) == "There are no heads."


@pytest.mark.parametrize(("count", "is_matrix"), [(40, True), (41, False)])
def test_more_than_forty_rows_are_listed(count: int, is_matrix: bool) -> None:
    drawing = draw_head(document(["x"] * count, ["a", "b"]), path=PATH, head=0)
    assert ("←" not in drawing) == is_matrix


@pytest.mark.parametrize(("count", "more"), [(MAX_LIST_LINES, ""), (MAX_LIST_LINES + 1, "  … and 1 more")])
def test_long_lists_are_cut(count: int, more: str) -> None:
    lines = draw_head(document(["x"] * count, ["a"]), path=PATH, head=0).splitlines()
    assert (lines[-1] if more else "") == more
    assert sum("←" in line for line in lines) == MAX_LIST_LINES


def test_listed_keys_have_at_least_a_twentieth() -> None:
    weights = torch.tensor([[[0.9, 0.05, 0.049, 0.001]]]).expand(1, 41, 4)
    lines = draw_head(document(["x"] * 41, list("abcd"), weights), path=PATH, head=0).splitlines()
    assert lines[0] == "  x ← a 90%, b 5%"
    weights = torch.tensor([[[0.03, 0.03, 0.94]]]).expand(1, 41, 3)
    assert draw_head(document(["x"] * 41, list("abc"), weights), path=PATH, head=0).startswith("  x ← c 94%")


def test_words_are_cut_beyond_their_width() -> None:
    assert truncate_text("a" * 16, 16) == "a" * 16
    assert truncate_text("a" * 17, 16) == "a" * 15 + "…"
