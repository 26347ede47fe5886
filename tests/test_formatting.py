"""Numbers and Markdown as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attent.formatting import (
    code_block,
    escape_invisible,
    escape_markdown,
    format_bytes,
    format_code,
    format_count,
    format_duration,
    format_percent,
    format_precise_percent,
    format_short,
    markdown_table,
)


@given(st.text())
def test_any_text_stays_on_its_line_and_in_its_cell(text: str) -> None:
    line = escape_markdown(text)
    assert "\n" not in line
    for code_columns in ((), (0,)):
        row = markdown_table(("a", "b"), [(text, "end"), ("x", "y")], code_columns=code_columns).split("\n")[2]
        assert row.replace("\\\\", "").replace("\\|", "").count("|") == 3
    assert not line.startswith(("#", ">", " "))


@pytest.mark.parametrize("number", ["0.1", "0.0", "0", "1. ", "-1", "+3"])
def test_numbers_are_not_escaped(number: str) -> None:
    assert escape_markdown(number) == number.strip()
    assert markdown_table(("a",), [(number,)]).endswith(f"| {number.strip()} |")


def test_tables_omit_empty_columns() -> None:
    assert markdown_table(("a", "b", "c"), [("1", "", "2"), ("3", "", "")], right_aligned=(2,)) == (
        "| a | c |\n| --- | ---: |\n| 1 | 2 |\n| 3 |  |"
    )


def test_code_spans_hold_backticks() -> None:
    assert format_code("a`b") == "`` a`b ``"
    assert format_code("plain") == "`plain`"
    assert code_block("sh", "ls\npwd") == "```sh\nls\npwd\n```"
    cells = ["plain", "a|b", "a\\b", " ", ""]
    rows = markdown_table(("a", "b"), [(cell, "x") for cell in cells], code_columns=(0,)).split("\n")[2:]
    assert rows == ["| `plain` | x |", "| a\\|b | x |", "| a\\\\b | x |", "|  | x |", "|  | x |"]


def test_invisible_characters_are_escaped() -> None:
    assert escape_invisible("a\tb\nc\x00\u202e\ud800") == "a\\tb\\nc\\x00\\u202e\\ud800"
    assert escape_invisible("naïve 日本語 👩\u200d👧 x\u00a0y") == "naïve 日本語 👩\u200d👧 x\u00a0y"


@pytest.mark.parametrize(
    ("function", "number", "expected"),
    [
        *((format_duration, 0.2, "0 s"), (format_duration, 59.4, "59 s"), (format_duration, 59.7, "1 min 0 s")),
        *((format_duration, 59.5, "1 min 0 s"), (format_duration, 47 * 3600, "47 h 0 min")),
        *((format_duration, 3_599.4, "59 min 59 s"), (format_duration, 3_599.9, "1 h 0 min")),
        *((format_duration, 3_599.5, "1 h 0 min"), (format_duration, 12_000, "3 h 20 min")),
        *((format_duration, 48 * 3600, "2 days 0 h"), (format_duration, 300_000, "3 days 11 h")),
        *(
            (format_short, 980, "980"),
            (format_short, 310_000, "310 thousand"),
            (format_short, 2_634_752, "2.6 million"),
        ),
        *((format_short, 999, "999"), (format_short, 1_000, "1.0 thousand"), (format_short, 10_000, "10 thousand")),
        *((format_short, 10**6, "1.0 million"), (format_short, 10**9, "1.0 billion")),
        *((format_bytes, 12, "12 bytes"), (format_bytes, 1023, "1023 bytes"), (format_bytes, 2**10, "1.0 KiB")),
        *((format_bytes, 2**20, "1.0 MiB"), (format_bytes, 2**30, "1.0 GiB"), (format_percent, 0.124, "12%")),
    ],
)
def test_numbers_have_units(function: Callable[[float], str], number: float, expected: str) -> None:
    assert function(number) == expected


def test_counts_have_plurals() -> None:
    assert format_count(1, "pair") == "1 pair"
    assert (format_count(0, "pair"), format_count(2_000, "entry", "entries")) == ("0 pairs", "2,000 entries")


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0, "0%"),
        (1, "100%"),
        (0.9999, "99.99%"),
        (0.99999, "99.99%"),
        (0.12, "12%"),
        (0.031, "3.1%"),
        (0.0002, "0.020%"),
        (1e-7, "<0.001%"),
        (0.995, "99.50%"),
        (0.994, "99%"),
        (0.1, "10%"),
        (0.001, "0.1%"),
        (0.00001, "0.001%"),
    ],
)
def test_small_fractions_have_more_digits(fraction: float, expected: str) -> None:
    assert format_precise_percent(fraction) == expected
