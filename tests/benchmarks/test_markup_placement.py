"""Placement of tags against gold alignments."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.markup_placement import Placement, main, place_spans, summarize, tag_span
from tests.serving.translation_server import SAVED_MODEL

GOLD = ((0, 1), (1, 0), (2, 2))


def test_gold_links_place_every_span_exactly() -> None:
    placements = place_spans("a b c", "B A C", GOLD, GOLD, 2)
    assert placements == [
        Placement(True, False, True, True),
        Placement(True, True, True, True),
        Placement(True, False, True, True),
        Placement(True, False, False, False),
        Placement(True, True, True, True),
    ]


def test_wrong_links_are_counted() -> None:
    placements = place_spans("a b c", "B A C", GOLD, ((0, 0), (1, 1), (2, 2)), 1)
    assert [each.is_exact for each in placements] == [False, False, True]
    assert "| all spans | 3" in summarize(placements)
    assert "33.3" in summarize(placements)


def test_span_without_gold_link_is_left_out() -> None:
    assert len(place_spans("a b", "B", ((1, 0),), (), 1)) == 1
    assert [part if isinstance(part, str) else part.raw for part in tag_span("a b c", 1, 2)] == [
        "a ",
        "<b>",
        "b",
        "</b>",
        " c",
    ]


def test_a_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (
        ("s.en", "one two\nthree four\n"),
        ("s.de", "eins zwei\ndrei vier\n"),
        ("s.wa", "0-0 1-1\n0-0 1-1\n"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [f"--{side}={tmp_path / name}" for side, name in (("source", "s.en"), ("target", "s.de"), ("gold", "s.wa"))]
    main([str(SAVED_MODEL), *files, "--translate"])
    printed = capsys.readouterr().out
    assert "| all spans | 6" in printed
    assert "of 500 sources with tags the model keeps both in" in printed
