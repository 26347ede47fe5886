"""Parsing glossary files, and matching terms in texts."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from attent.decoding.glossary import Glossary
from attent.decoding.options import InputError


def find_forms(glossary: Glossary, text: str) -> tuple[str, ...]:
    """The first form of each term of a text, each once."""
    return tuple(dict.fromkeys(match.entry.translations[0] for match in glossary.find_terms(text)))


def build_glossary(*lines: str) -> Glossary:
    return Glossary.from_bytes("\n".join(lines).encode(), "terms.tsv")


def test_comments_empty_lines_bom_and_crlf_are_read(tmp_path: Path) -> None:
    path = tmp_path / "terms.tsv"
    path.write_bytes("\ufeff# ours\r\n\r\ndog\tHund\r\n   \n cat \t Katze | Kater \n#bird\tVogel\nfish\tFisch".encode())
    entries = Glossary.from_file(path).entries
    assert [(entry.term, entry.translations) for entry in entries] == [
        ("dog", ("Hund",)),
        ("cat", ("Katze", "Kater")),
        ("fish", ("Fisch",)),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "dog Hund",
            "separated by |, but is `dog Hund`; correct it",
        ),
        ("dog\t", "but is `dog<TAB>`; correct it"),
        ("\tHund", "but is `<TAB>Hund`; correct it"),
        ("dog\tHund\tnoun", "but is `dog<TAB>Hund<TAB>noun`"),
        ("dog\tHund|", "terms.tsv:2: must be a term, a tab and its translation, or several"),
        ("cat\tKater", "terms.tsv:2: must be a new term, but `cat` has another translation in line 1"),
        ("x" * 60, f"`{'x' * 60}`;"),
        ("x" * 61, f"`{'x' * 60}...`"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(line: str, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        build_glossary("cat\tKatze", line)


def test_invalid_utf8_is_reported_with_its_line_number() -> None:
    with pytest.raises(InputError, match=r"t\.tsv:2: must be UTF-8, but byte 3 is 0xe4; convert the file first"):
        Glossary.from_bytes(b"a\tb\nx\t\xe4", "t.tsv")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a text file, but cannot be read"):
        Glossary.from_file(tmp_path / "none.tsv")


def test_a_duplicate_line_counts_once() -> None:
    assert len(build_glossary("a\tb", "a\tb").entries) == 1


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("the dog sleeps", ("Hund",)),
        ("Dog and dog.", ("Hund",)),
        ("DOG", ()),
        ("dogs hotdog dog_x", ()),
        ("a hot dog, (dog)!", ("Würstchen", "Hund")),
        ("hot   dog\tstand", ("Stand",)),
        ("hot dogs", ()),
        ("the bank of a Bank", ("Ufer", "Institut")),
        ("UN un Un", ("Vereinte Nationen",)),
        ("in C++ or C++11, not C", ("Sprache",)),
        ("cafe\u0301", ("Kaffee",)),
        ("café", ("Kaffee",)),
        ("dog's dog-house", ("Hund",)),
        ("", ()),
    ],
)
def test_terms_match_whole_words_longest_first(text: str, asks: tuple[str, ...]) -> None:
    terms = build_glossary(
        "dog\tHund|Köter", "hot dog\tWürstchen", "hot dog stand\tStand", "bank\tUfer", "Bank\tInstitut",
        "UN\tVereinte Nationen", "C++\tSprache", "cafe\u0301\tKaffee",
    )  # fmt: skip
    assert find_forms(terms, text) == asks


def test_terms_match_anywhere_in_scripts_without_spaces() -> None:
    terms = Glossary.from_terms({"東京": "Tokyo", "東京都": "Tokyo Prefecture", "แมว": "cat", "की": "of"})
    assert find_forms(terms, "私は東京に住む。東京都") == ("Tokyo", "Tokyo Prefecture")
    assert find_forms(terms, "รักแมวมาก") == ("cat",)
    assert find_forms(terms, "की राम की") == ("of",)
    assert find_forms(Glossary.from_terms({"क": "ka"}), "की") == ()  # a vowel sign makes it another letter


def test_an_invalid_mapping_is_reported() -> None:
    with pytest.raises(InputError, match="`dog` of the glossary: must be a term, a tab and its translation"):
        Glossary.from_terms({"dog": " "})


def test_matching_time_does_not_depend_on_the_number_of_terms() -> None:
    """A linear search would take a thousand times as long."""
    text = "the w5 house w77 of w123 words " * 300

    def cost(count: int) -> float:
        terms = Glossary.from_terms({f"w{n} {'x ' * (n % 7)}w": f"W{n}" for n in range(count)} | {"house": "Haus"})
        assert find_forms(terms, "house") == ("Haus",)  # makes the index
        before = time.process_time()
        assert find_forms(terms, text) == ("Haus",)
        return time.process_time() - before

    assert min(cost(10_000) for _ in range(2)) < 30 * max(0.002, min(cost(10) for _ in range(2)))


def test_matching_time_is_linear_in_the_text() -> None:
    terms = Glossary.from_terms({"a a": "b", "a": "c"})

    def cost(size: int) -> float:
        text = "a, " * size
        before = time.process_time()
        terms.find_terms(text)
        return time.process_time() - before

    assert min(cost(40_000) for _ in range(2)) < 30 * max(0.002, min(cost(5_000) for _ in range(2)))
