"""Lost placeholders and constrained decoding: a candidate is used only if it has all placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from attent.data.formats import placeholders
from attent.data.formats.units import InlineCode
from attent.data.pairs import CorpusError
from attent.data.pretranslate import PretranslateResult, pretranslate_file

ConstrainedTranslate = Callable[[Sequence[str], Sequence[tuple[str, ...]]], Sequence[Sequence[str]]]


def drop_placeholders(texts: Sequence[str]) -> list[str]:
    return [placeholders._PLACEHOLDER.sub("", text).replace("*", "").upper() for text in texts]


def pretranslate(text: str, translate_constrained: ConstrainedTranslate, name: str = "a.txt") -> PretranslateResult:
    return pretranslate_file(text.encode(), name, drop_placeholders, translate_constrained=translate_constrained)


def return_candidates(*candidates: str) -> ConstrainedTranslate:
    return lambda texts, required: [list(candidates) for _ in texts]


def test_only_failed_runs_are_retried_with_their_placeholders() -> None:
    requested: list[tuple[list[str], list[tuple[str, ...]]]] = []

    def translate_constrained(texts: Sequence[str], required: Sequence[tuple[str, ...]]) -> list[list[str]]:
        requested.append((list(texts), list(required)))
        return [[text.upper().replace("%S", "%s").replace("{N}", "{n}")] for text in texts]

    result = pretranslate(
        "all well\n%s at the end: %s\na %s and {n} here\na %s and {n} here\n%s has {n} of it\n", translate_constrained
    )
    assert requested == [(["a %s and {n} here", "has {n} of it"], [("%s", "{n}"), ("{n}",)])]
    assert result.content == (b"ALL WELL\n%s AT THE END: %s\nA %s AND {n} HERE\nA %s AND {n} HERE\n%s HAS {n} OF IT\n")
    assert (result.filled_count, result.skipped) == (5, ())


def test_first_valid_candidate_is_used() -> None:
    offers = return_candidates("B %d C %s D", "B %s C", "", "B %s C %d D", "better not %s %d")
    assert pretranslate("a %s b %d c\n", offers).content == b"B %s C %d D\n"


@pytest.mark.parametrize(
    "offers",
    [(), ("B C",), ("B </b>C<b>",), ("B <b></b> C",), ("B <b> </b> C",), ("B C. <b>D</b>",), ("B <b>C</b> <b>D</b>",)],
)
def test_failed_retry_is_skipped_with_the_first_reason(offers: tuple[str, ...]) -> None:
    result = pretranslate("a <b>b</b> c\n", return_candidates(*offers))
    assert result.content == b"a <b>b</b> c\n"
    assert [unit.reason for unit in result.skipped] == ["its translation lost <b>, </b>"]


def test_wrong_number_of_candidates_is_an_error() -> None:
    with pytest.raises(CorpusError, match="must be 1 translations, but there are 0"):
        pretranslate("a %s b\n", lambda texts, needed: [])


@pytest.mark.parametrize(
    ("source", "offer", "expected_text"),
    [
        ("a <b>b</b> c", "D <b> E </b> F", "D <b>E</b> F"),
        ("a <b>b</b> c", "D<b>E</b>F", "D <b>E</b> F"),
        ("a <b>b</b> c", "<b>E</b>, F", "<b>E</b>, F"),
        ("a <b>%s</b> c", "D <b> %s </b> F", "D <b>%s</b> F"),
        ("a %s c", "D%s F", "D %s F"),
        ("a %s c", "(%s) F", "(%s) F"),
        ("a (%s) c", "D %s F", "D %s F"),
        ("a (%s) c", "D%s.", "D %s."),
        ("a%sb c", "D%sE F", "D%sE F"),
        ("a {x} {y} c", "D {y}{x}, F", "D {y} {x}, F"),
    ],
)
def test_placeholders_are_spaced_as_in_the_source(source: str, offer: str, expected_text: str) -> None:
    assert pretranslate(f"{source}\n", return_candidates(offer)).content == f"{expected_text}\n".encode()


def test_emphasis_has_no_inner_space() -> None:
    result = pretranslate("a **b** c\n", return_candidates("D ** E ** F"), "a.md")
    assert (result.content, result.skipped) == (b"D **E** F\n", ())


def test_codes_stay_codes() -> None:
    opened, closed = InlineCode("<1>", "<g>", "open", "1"), InlineCode("</1>", "</g>", "close", "1")
    restored = placeholders.restore_spacing(("a ", opened, "b", closed, " c"), ("D ", opened, " %s ", closed, "E"))
    assert restored == ("D ", opened, "%s", closed, " E")


def test_no_full_stop_before_a_placeholder_at_the_end() -> None:
    result = pretranslate_file(b"wait for %s.\n", "a.txt", lambda texts: ["WAIT." for _ in texts])
    assert result.content == b"WAIT %s.\n"
