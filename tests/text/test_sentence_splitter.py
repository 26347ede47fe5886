"""Sentence splitting: no text is lost, boundaries are correct, and hostile text takes time linear in its length."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attent.text.abbreviations import LANGUAGES, get_abbreviations
from attent.text.sentence_splitter import (
    CLOSING_MARKS,
    FULL_STOPS,
    WIDE_STOPS,
    SentencePart,
    _is_grapheme_boundary,
    split_by_tokens,
    split_sentences,
)

PIECES_OF_TEXT = st.sampled_from(
    [
        *".!?…,;: \n\t\"'»«()„“”",
        *WIDE_STOPS,
        *"aBß1é中の👩",
        "\u200d",
        "\u0301",
        "\u00a0",
        "\r\n",
        "Dr",
        "z. B.",
        "U.S.",
        "...",
    ]
)


def join_parts(parts: Sequence[SentencePart]) -> str:
    return "".join(part.text + part.gap for part in parts)


def sentences(text: str, language: str | None = None) -> list[str]:
    return [piece.text for piece in split_sentences(text, language)]


@given(st.lists(PIECES_OF_TEXT, max_size=60).map("".join), st.sampled_from([None, "de", "en", "el", "ja"]))
@settings(deadline=None, max_examples=150)
def test_pieces_and_gaps_concatenate_to_the_text(text: str, language: str | None) -> None:
    assert join_parts(split_sentences(text, language)) == text


@given(st.text(max_size=200), st.integers(1, 30))
@settings(deadline=None, max_examples=150)
def test_pieces_and_gaps_concatenate_to_the_text_for_any_limit(text: str, longest: int) -> None:
    pieces = split_sentences(text, max_chars=longest)
    assert join_parts(pieces) == text
    assert all(len(piece.text) <= longest for piece in pieces)


@given(st.lists(PIECES_OF_TEXT, max_size=60).map("".join))
@settings(deadline=None, max_examples=150)
def test_space_around_a_piece_is_in_the_gaps(text: str) -> None:
    pieces = split_sentences(text, max_chars=20)
    assert all(piece.text == piece.text.strip() for piece in pieces)
    assert all(not piece.gap.strip() for piece in pieces)
    assert all(piece.text for piece in pieces[1:])


# Each row is a text with "|" at all sentence boundaries.
@pytest.mark.parametrize(
    ("language", "marked"),
    [
        ("en", "It rains. |It pours! |Does it? |Yes… |It does."),
        ("en", "Mr. Smith met Dr. J. A. Brown of the U.S. Navy. |They spoke, e.g. of ships."),
        ("en", "See No. 5, Fig. 3 and pp. 10-12. |He said no. |Then he left."),
        ("en", "Pi is 3.14 and not 3. |See www.example.com for setup.py and v. 2.0. |Good."),
        ("en", "He lives in the U.S. |The house is old. |It costs $5. |50 people came."),
        ("en", "He waited ... and waited. |Then ... |Nothing."),
        ("en", "He said: “Come in.” |“Why?” she asked. |(It was late.) |They left."),
        ("en", "Wait (!) Really (sic!) He (etc.) Did."),
        ("en", "1. Introduction to it. |2 things are said.\n|A. The first\n|a. First\n|IV. Second\n|10. Tenth"),
        ("en", "This is Scotland's. |It was in 1999. |Labour won. |Yahoo! is a firm."),
        ("en", "We met at 5 p.m. |The talk began. |We met at 5 p.m. Eastern time."),
        (
            "de",
            "Am 3. Mai und am 5. und 6. Juni tagt der 2. Ausschuss. |Dr. Meyer kommt z. B. mit Prof. Weiß, d. h. bald.",
        ),
        (
            "de",
            "Das war 1999. |Danach kam Ludwig XIV. nach Rom. |Es kostet ca. 5 Mio. Euro usw. |Wir zahlen.",
        ),
        ("de", "Siehe Art. 5 Abs. 3 Nr. 2. |Das ist seine Art. |Danach nichts. |„Wirklich?“ |»Ja.« |Gut."),
        ("de", "Sie wohnt u. a. in Köln. |Er ist Nr. 1. |Die anderen folgen."),
        ("fr", "« Oui ! » |Il part avec M. Le Pen et Mme. Roy. |« Où ? » demanda-t-il. |C'est l'art. 5 du code."),
        ("es", "¿Qué? |¡No! |El Sr. López vive en EE. UU. y la Sra. Ruiz también. |Es así."),
        ("cs", "Dne 3. května přišel p. Novák, tj. můj soused. |Bylo pozdě."),
        ("ru", "Это т. е. дом и т. д. и т. п. |Он пришёл. |Ст. 5 и рис. 2 здесь."),
        ("ja", "今日は雨です。|「本当？」と言った。|そうだ！|終わり"),
        ("zh", "你好。|“好！”|再见？ |是。"),
        ("hi", "यह घर है। |वह आया। |क्या?"),
        ("ar", "مرحبا. |كيف حالك؟ |جيد."),
        ("el", "Τι κάνεις; |Καλά. |Εσύ;"),
        (None, "Mr. Smith kam z. B. am 3. Mai. |M. Dupont vint. |The end."),
        ("en", "No stop at all\n|a new line\r\n\r\n|another\u2028|last"),
        ("en", "This is so.\u00a0Dupont and Mr.\u00a0X are here.\u00a0 |Good"),
        ("en", "foo . |Bar . . . baz ! ! |Done"),
    ],
)
def test_sentence_boundaries(language: str | None, marked: str) -> None:
    text = marked.replace("|", "")
    assert "|".join(piece.text + piece.gap for piece in split_sentences(text, language)) == marked


def test_space_before_the_first_sentence_is_the_gap_of_an_empty_piece() -> None:
    assert split_sentences("  A b. C d.\n") == [
        SentencePart("", "  "),
        SentencePart("A b.", " "),
        SentencePart("C d.", "\n"),
    ]
    assert split_sentences(" \n ") == [SentencePart("", " \n ")]
    assert split_sentences("") == []


def test_an_unknown_language_uses_the_abbreviations_of_all() -> None:
    assert get_abbreviations("de-AT") is get_abbreviations("de_CH") is LANGUAGES["de"]
    assert get_abbreviations(None).titles >= LANGUAGES["en"].titles | LANGUAGES["fr"].titles
    assert sentences("Mr. A. Hr. Bo ca. 5", "xx") == ["Mr. A. Hr. Bo ca. 5"]
    assert get_abbreviations("fi").ordinals
    assert not get_abbreviations("xx").ordinals


def test_abbreviations_are_stored_in_lookup_form() -> None:
    for words in LANGUAGES.values():
        assert all(word == word.lower() for word in words.numeric | words.general)
        assert not any(word.endswith(".") for word in words.titles | words.numeric | words.general)


# Length limits.


def test_a_long_sentence_is_split_after_a_clause_or_a_word() -> None:
    text = "the first part of it, " + "word " * 5 + "and the end"
    assert split_sentences(text, max_chars=40)[0] == SentencePart("the first part of it,", " ")
    assert split_sentences("word " * 20 + "end", max_chars=30)[0].text == "word word word word word"
    assert [len(piece.text) for piece in split_sentences("x" * 100, max_chars=30)] == [25] * 4


def test_grapheme_clusters_are_not_split() -> None:
    family, flag, accented = "👩‍👩‍👧‍👦", "🇩🇪", "e\u0301\u0323"
    for sign in (family, accented, "👍🏽", "한".encode().decode(), "\u1112\u1161\u11ab", "क्षि"):
        for longest in range(len(sign), 4 * len(sign)):
            pieces = split_sentences(sign * 9, max_chars=longest)
            assert all(len(piece.text) % len(sign) == 0 for piece in pieces), (sign, longest)
    assert [piece.text for piece in split_sentences(f"a{flag}b", max_chars=2)] == ["a", flag, "b"]


def test_a_very_long_grapheme_cluster_is_split() -> None:
    pieces = split_sentences("e" + "\u0301" * 5000, max_chars=1000)
    assert all(len(piece.text) <= 1000 for piece in pieces)


def count_tokens(texts: Sequence[str]) -> list[int]:
    """A toy token counter: ten tokens per digit, one per other character."""
    return [sum(10 if sign.isdigit() else 1 for sign in text) for text in texts]


def test_windows_preserve_the_text_and_the_limit() -> None:
    text = "One, two, three. " + "123 456, 789 " * 40 + "and words " * 30 + "\n" + "7" * 50
    pieces = split_by_tokens(split_sentences(text), count_tokens, 60)
    assert join_parts(pieces) == text
    assert max(count_tokens([piece.text for piece in pieces])) <= 60


def test_a_text_that_fits_is_one_window() -> None:
    pieces = split_sentences("One two. Three four.")
    assert split_by_tokens(pieces, count_tokens, 12) == pieces


def test_splitting_ends_if_no_window_is_small_enough() -> None:
    assert [piece.text for piece in split_by_tokens([SentencePart("77", " ")], count_tokens, 3)] == ["7", "7"]


@pytest.mark.parametrize(
    "call", [lambda: split_sentences("a", max_chars=0), lambda: split_by_tokens([], count_tokens, 0)]
)
def test_a_limit_of_zero_is_refused(call: object) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        call()  # type: ignore[operator]


# Hostile text.

HOSTILE = {
    "sentences": "a. ", "capitals": "A. B ", "openings": "(", "quotes": '"', "stops": ".", "stops apart": ". ",
    "closings apart": ") ", "spaces": " ", "space and lines": " \n", "letters": "a", "marks": "\u0301", "wide": "。",
    "wide quoted": "。」と", "numbers": "1. ", "commas": ",", "commas apart": ", ", "dashes": "- ", "joiners": "\u200d",
    "a word and stops": "a" + "." * 50, "dots in a word": "a.b", "stops and openings": ". ((((((((((((((((",
    "no break": ".\u00a0", "half": "\ud83d", "line ends": "\r\u2028", "closed": "?!)]\"'", "initials": "J. ",
}  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE.keys())
def test_the_time_is_linear_in_the_length(unit: str) -> None:
    """Eight times the text takes eight times as long; a quadratic step would take 64 times as long."""

    def cost(size: int) -> float:
        text = unit * (size // len(unit)) + "%. B"
        before = time.process_time()
        pieces = split_sentences(text)
        split_by_tokens(pieces, lambda texts: [len(text) for text in texts], 100)
        taken = time.process_time() - before
        assert join_parts(pieces) == text
        return taken

    cost(1_000)
    small = max(min(cost(10_000) for _ in range(3)), 0.001)
    assert cost(80_000) < 30 * small or cost(80_000) < 30 * small


def test_character_classes_do_not_overlap() -> None:
    assert not set(FULL_STOPS) & set(CLOSING_MARKS)
    assert not set(FULL_STOPS) & set(WIDE_STOPS)


def test_a_long_sentence_is_split_in_proportion_to_its_tokens() -> None:
    words = SentencePart("word " * 399 + "word", "")
    parts = split_by_tokens([words], lambda texts: [len(text.split()) for text in texts], 20)
    assert max(len(part.text.split()) for part in parts) <= 20
    assert len(parts) <= 22  # halving it until the parts are short enough would give 32


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("a", "b", True), ("e", "\u0301", False), ("\u200d", "a", False), ("a", "\u200d", False),
        ("\u094d", "\u0915", False), ("\ud83d", "\ude00", False), ("\ud83d", "a", True),
        ("\ud7ff", "\ude00", True), ("\U0001f1e6", "\U0001f1ff", False),
        ("\U0001f1ff", "\U0001f1e6", False), ("a", "\U0001f1e6", True), ("\U0001f1e6", "a", True),
        ("\U0001f44d", "\U0001f3fb", False), ("\U0001f44d", "\U0001f3ff", False), ("a", "\U000e0020", False),
        ("a", "\U000e007f", False), ("\u1100", "\u1160", False), ("\u1100", "\u11ff", False), ("a", "\u1200", True),
    ],
)  # fmt: skip
def test_graphemes_are_not_split(before: str, after: str, expected: bool) -> None:
    assert _is_grapheme_boundary(before, after) is expected
