"""Placeholders: what counts as one, and when a translation has kept them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attent.data.fill import placeholders, runs
from attent.data.fill.parts import Code, plain
from tests.data.filling import HOLES, filled


@pytest.mark.parametrize(
    "hole", [*HOLES, "%@", "%5.2f", "%-10s", "%lu", "%2$d", "%{x}", "{0:>8}", "{% if x %}", "%1", "%L2"]
)
@pytest.mark.parametrize("text", ["a {} b", "{} b", "a {}.", "({})", "a:{}"])
def test_a_placeholder_is_found_whole(hole: str, text: str) -> None:
    assert placeholders.found(text.replace("{}", hole)) == [hole]


@pytest.mark.parametrize(
    "text", ["<b>", "</b>", '<a href="x > y">', "<br/>", "&amp;", "&#160;", "&#xA0;", "me@a.example"]
)
def test_markup_and_addresses_are_placeholders(text: str) -> None:
    assert placeholders.found(f"see {text} now") == [text]


@pytest.mark.parametrize(
    "text", ["100 % sure", "50% off", "a < b > c", "R&D; more", "a & b", "5 {", "} 6", "x@y", "5%"]
)
def test_ordinary_text_is_none(text: str) -> None:
    assert placeholders.found(text) in ([], ["&D;"])


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
        ("<b>a</b> c", "</b>e<b>", "do not fit"),
        ("<b>a</b> <i>c</i>", "<b>a <i>c</b></i>", "do not fit"),
        ("<b>a</b> <i>c</i>", "<i>a <b>c</b></i>", ""),
        ("a<br>b", "c<br>d", ""),
        ("</b> a <i>", "</b> c <i>", ""),
        ("</b> a <i>", "<i> c </b>", "do not fit"),
        ("see https://a.example/b.", "https://a.example/b siehe", ""),
    ],
)
def test_a_translation_has_what_its_source_has(source: str, target: str, problem: str) -> None:
    found = placeholders.problem((source,), (target,))
    assert (problem in found) if problem else not found


def test_placeholders_at_the_ends_are_put_back_when_a_model_loses_them() -> None:
    asked: list[list[str]] = []

    def forgetful(texts: Sequence[str]) -> list[str]:
        asked.append(list(texts))
        return [" ".join(word.upper() for word in text.split() if "%" not in word) for text in texts]

    result = filled("%s: not found (%d)\nAll is well\nlost %s here\n", "a.txt", forgetful)
    assert result.content == b"%s: NOT FOUND (%d)\nALL IS WELL\nlost %s here\n"
    assert asked == [["%s: not found (%d)", "All is well", "lost %s here"], ["not found"]]
    assert [(one.line, one.source, one.reason) for one in result.left] == [
        (3, "lost %s here", "its translation lost %s")
    ]


def test_an_empty_translation_is_left() -> None:
    result = filled("a b\n", "a.txt", lambda texts: [" "])
    assert (result.content, result.left[0].reason) == (b"a b\n", "its translation is empty")


def test_a_translation_on_several_lines_becomes_one() -> None:
    assert filled("a b\n", "a.txt", lambda texts: ["c\nd "]).content == b"c d\n"


codes = st.builds(
    Code,
    st.just(""),
    st.text("<xyz/>", min_size=1, max_size=4),
    st.sampled_from(["open", "close", "alone"]),
    st.sampled_from("123"),
    st.booleans(),
)


@given(st.lists(st.one_of(codes, st.text("ab %s{}<>1/\n\t.", max_size=8)), max_size=8))
def test_runs_put_together_are_the_content(parts: list[str | Code]) -> None:
    found = runs.runs(tuple(parts))
    again = [part for run in found for part in (*run.before, *run.inside, *run.behind)]
    assert _raw(again) == _raw(parts)
    for run in found:
        assert run.shown == run.shown.strip()
        assert "\n" not in run.shown
        bare = runs.without_ends(run) if run.inside else None
        if bare is not None:
            assert _raw((*bare.before, *bare.inside, *bare.behind)) == _raw((*run.before, *run.inside, *run.behind))
            assert len(bare.shown) < len(run.shown)


@given(st.lists(st.one_of(codes, st.text("ab <>1/", max_size=8)), max_size=8))
def test_codes_are_found_again_in_what_the_model_sees(parts: list[str | Code]) -> None:
    content = runs.numbered(tuple(parts))
    again = runs.split(plain(content), content)
    assert _raw(again) == _raw(content)
    assert [part for part in again if isinstance(part, Code)] == [part for part in content if isinstance(part, Code)]


def _raw(parts: Sequence[str | Code]) -> str:
    return "".join(part if isinstance(part, str) else part.raw for part in parts)
