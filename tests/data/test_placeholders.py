"""Placeholder detection, and checks that a translation keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attent.data import pretranslate as text_runs
from attent.data.formats import placeholders
from attent.data.formats.units import InlineCode, get_display_text
from tests.data.pretranslate_cases import PLACEHOLDERS, pretranslate


@pytest.mark.parametrize(
    "hole",
    [
        *PLACEHOLDERS,
        "%@",
        "%5.2f",
        "%-10s",
        "%lu",
        "%2$d",
        "%{x}",
        "{0:>8}",
        "{% if x %}",
        "%1",
        "%L2",
        "%r",
        "%(x)r",
        "%<x>s",
        "%1%",
    ],
)
@pytest.mark.parametrize("text", ["a {} b", "{} b", "a {}.", "({})", "a:{}"])
def test_placeholders_are_found(hole: str, text: str) -> None:
    assert placeholders.list_placeholders((text.replace("{}", hole),)) == [hole]


@pytest.mark.parametrize(
    "text", ["<b>", "</b>", '<a href="x > y">', "<br/>", "&amp;", "&#160;", "&#xA0;", "me@a.example"]
)
def test_markup_and_addresses_are_placeholders(text: str) -> None:
    assert placeholders.list_placeholders((f"see {text} now",)) == [text]


@pytest.mark.parametrize(
    "text", ["100 % sure", "50% off", "a < b > c", "R&D; more", "a & b", "5 {", "} 6", "x@y", "5%"]
)
def test_ordinary_text_has_no_placeholders(text: str) -> None:
    assert placeholders.list_placeholders((text,)) in ([], ["&D;"])


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        ("a %s", "%s b", ""),
        ("a %s %d", "b %d %s", "in another order"),
        ("a %1$s %2$d", "b %2$d %1$s", ""),
        ("a {x} {y}", "{y} b {x}", ""),
        ("a %(x)s %(y)s", "%(y)s b %(x)s", ""),
        ("a %s", "b", "lost %s"),
        ("a %s", "b %s %s", "gained %s"),
        ("a %s", "b % s", "lost %s"),
        ("a {name}", "b {Name}", "lost {name}"),
        ("<b>a</b> c", "d <b>e</b>", ""),
        ("<b>a</b> c", "</b>e<b>", "badly nested"),
        ("<b>a</b> <i>c</i>", "<b>a <i>c</b></i>", "badly nested"),
        ("<b>a</b> <i>c</i>", "<i>a <b>c</b></i>", ""),
        ("a<br>b", "c<br>d", ""),
        ("</b> a <i>", "</b> c <i>", ""),
        ("</b> a <i>", "<i> c </b>", "badly nested"),
        ("see https://a.example/b.", "https://a.example/b siehe", ""),
    ],
)
def test_translation_must_keep_the_placeholders(source: str, target: str, problem: str) -> None:
    reported = placeholders.find_problem((source,), (target,))
    assert (problem in reported) if problem else not reported


def test_empty_translation_is_skipped() -> None:
    result = pretranslate("a b\n", "a.txt", lambda texts: [" "])
    assert (result.content, result.skipped[0].reason) == (b"a b\n", "its translation is empty")


def test_translation_on_several_lines_is_joined() -> None:
    assert pretranslate("a b\n", "a.txt", lambda texts: ["c\nd "]).content == b"c d\n"


codes = st.builds(
    InlineCode,
    st.just(""),
    st.text("<xyz/>", min_size=1, max_size=4),
    st.sampled_from(["open", "close", "standalone"]),
    st.sampled_from("123"),
    st.booleans(),
)


@given(st.lists(st.one_of(codes, st.text("ab %s{}<>1/\n\t.", max_size=8)), max_size=8))
def test_joined_runs_are_the_content(parts: list[str | InlineCode]) -> None:
    runs = text_runs.split_runs(tuple(parts))
    joined = [part for run in runs for part in (*run.prefix, *run.core, *run.suffix)]
    assert _join_raw(joined) == _join_raw(parts)
    for run in runs:
        assert get_display_text(run.core) == get_display_text(run.core).strip()
        assert "\n" not in run.text


@given(st.lists(st.one_of(codes, st.text("ab <>1/", max_size=8)), max_size=8))
def test_codes_are_restored_from_the_display_text(parts: list[str | InlineCode]) -> None:
    content = text_runs.number_codes(tuple(parts))
    restored = text_runs.restore_codes((get_display_text(content),), content)
    assert _join_raw(restored) == _join_raw(content)
    own_codes = [part for part in content if isinstance(part, InlineCode)]
    assert [part for part in restored if isinstance(part, InlineCode)] == own_codes
    spaced = text_runs.restore_codes((text_runs.format_for_model(content),), content, spaced=True)
    assert [part for part in spaced if isinstance(part, InlineCode)] == own_codes


def _join_raw(parts: Sequence[str | InlineCode]) -> str:
    return "".join(part if isinstance(part, str) else part.raw for part in parts)
