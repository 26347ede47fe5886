"""Contamination: test sentences in training data, compared with a brute-force search for near duplicates."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attent.data import contamination
from attent.data.contamination import (
    MIN_NEAR_WORDS,
    NEAR_THRESHOLD,
    Contamination,
    ContaminationChecker,
    NearDuplicateIndex,
    fold_texts,
)
from attent.data.pairs import BadLine, Pair

WORDS = (
    "the a dog cat runs sleeps on in water grass red blue big small quickly slowly never always today boston".split()
)
SENTENCES = st.lists(st.sampled_from(WORDS) | st.from_regex("[xyz]{1,2}", fullmatch=True), max_size=14).map(" ".join)


def make_pairs(*texts: tuple[str, str], file: str = "train") -> list[Pair]:
    return [Pair(source, target, file, i) for i, (source, target) in enumerate(texts, start=1)]


@st.composite
def near_misses(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Test sentences, and lines that differ from one of them in a few words."""
    tests = draw(st.lists(st.lists(st.sampled_from(WORDS), min_size=5, max_size=14), min_size=1, max_size=6))
    lines = []
    for _ in range(draw(st.integers(1, 6))):
        tokens = list(draw(st.sampled_from(tests)))
        for _ in range(draw(st.integers(0, 4))):
            tokens[draw(st.integers(0, len(tokens) - 1))] = draw(st.sampled_from([*WORDS, "xx", "yy", ""]))
        lines.append(" ".join(tokens))
    return [" ".join(tokens) for tokens in tests], lines


@settings(max_examples=150, deadline=None)
@given(near_misses() | st.tuples(st.lists(SENTENCES, min_size=1), st.lists(SENTENCES, min_size=1)))
def test_near_duplicates_equal_brute_force(texts: tuple[list[str], list[str]]) -> None:
    tests, lines = ([frozenset(text.split()) for text in side] for side in texts)
    index = NearDuplicateIndex(tests)
    expected: dict[frozenset[str], float] = {}
    for test in (test for test in tests if len(test) >= MIN_NEAR_WORDS):
        overlap = max((len(line & test) / len(line | test) for line in lines), default=0.0)
        if overlap >= NEAR_THRESHOLD:
            expected[test] = overlap
    pairs = make_pairs(*((" ".join(sorted(line)), "") for line in lines))
    index.update(zip(lines, pairs, strict=True))
    assert {test: overlap for test, (overlap, _) in index.closest.items()} == expected
    for test, (overlap, pair) in index.closest.items():
        line = frozenset(pair.source.split())
        assert len(line & test) / len(line | test) == overlap


def test_case_punctuation_and_spacing_are_ignored() -> None:
    checker = ContaminationChecker(
        make_pairs(("The dog runs on the grass.", "Der Hund läuft auf dem Gras."), file="test")
    )
    checker.update(make_pairs(("the  DOG runs – on the grass!", "»Der Hund läuft auf dem Gras«…")))
    result = checker.compute()
    assert (result.same_pair, result.exact_matches, result.near_duplicates) == (1, 1, 0)
    assert result.matches[0].train.line == 1


def test_each_test_sentence_counts_once_by_its_closest_match() -> None:
    test = make_pairs(
        ("The red dog runs on the grass.", "Der rote Hund läuft auf dem Gras."),
        ("The blue cat sleeps in water.", "Die blaue Katze schläft im Wasser."),
        ("A big dog never sleeps here.", "Ein großer Hund schläft hier nie."),
        ("A small cat always runs today.", "Eine kleine Katze rennt heute immer."),
        ("Nothing like this was ever seen before.", "So etwas hat man noch nie gesehen."),
        ("Yes.", "Ja."),
        file="test",
    )
    train = make_pairs(
        ("The red dog runs on the grass.", "Ein anderer Satz."),
        ("The red dog runs on the grass.", "Der rote Hund läuft auf dem Gras."),
        ("The blue cat sleeps in water.", "Die Katze ist blau und schläft."),
        ("Something else entirely.", "Ein großer Hund schläft hier nie."),
        ("A small cat always runs today again.", "Ganz anders."),
        ("Yes!", "Ja!"),
        ("Yes!", "Ja!"),
    )
    checker = ContaminationChecker(test)
    for start in range(0, len(train), 2):
        checker.update(train[start : start + 2])
    result = checker.compute()
    assert result.sentences == 6
    assert (result.same_pair, result.same_source, result.same_target, result.near_duplicates, result.short_matches) == (
        1,
        1,
        1,
        1,
        1,
    )
    assert [(match.kind, match.test.line, match.train.line) for match in result.matches] == [
        ("pair", 1, 2),
        ("source", 2, 3),
        ("target", 3, 4),
        ("near source", 4, 5),
    ]


def test_scripts_without_spaces_are_compared_by_bigrams() -> None:
    checker = ContaminationChecker(
        make_pairs(("人人生而自由在尊严和权利上一律平等", "all are born free and equal"), file="test")
    )
    checker.update(
        make_pairs(("平等上利权和严尊在由自而生人人律一", "y"), ("人人生而自由，在尊严和权利上一律不平等。", "x"))
    )
    result = checker.compute()
    assert [(match.kind, match.train.line) for match in result.matches] == [("near source", 2)]
    assert result.near_duplicates == 1


def test_newlines_in_a_text_do_not_shift_lines() -> None:
    checker = ContaminationChecker(make_pairs(("one two three four five six", "a b c d e f"), file="test"))
    checker.update(make_pairs(("x\ny\nz", "q"), ("one two\nthree four five six", "other")))
    assert checker.compute().matches[0].train.line == 2


# ---- limits of time and memory ---------------------------------------------------------------------------------------


def make_template(numbers: range, file: str) -> list[Pair]:
    texts = [(f"Please open the file number {i} in the main window", f"Bitte Datei {i} öffnen") for i in numbers]
    return make_pairs(*texts, file=file)


def check(test: Iterable[Pair | BadLine], train: Sequence[Pair]) -> Contamination:
    checker = ContaminationChecker(test)
    for start in range(0, len(train), 2_000):
        checker.update(train[start : start + 2_000])
    return checker.compute()


def test_template_lines_are_found_in_bounded_memory() -> None:
    test, train = make_template(range(2_000), "test"), make_template(range(2_000, 6_000), "train")
    tracemalloc.start()
    try:
        result, memory = check(test, train), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (result.sentences, result.near_duplicates, result.exact_matches, result.uncompared_lines) == (
        2_000,
        2_000,
        0,
        0,
    )
    assert memory < 150e6  # all (line, sentence) candidates at once would take 1 GB


def test_repeated_line_is_compared_once() -> None:
    text = "Click OK now please", "Jetzt bitte OK klicken"
    start = time.process_time()
    result = check(make_pairs(*[text] * 3_000, file="test"), make_pairs(*[text] * 12_000))
    assert (result.same_pair, result.near_duplicates) == (3_000, 0)
    assert time.process_time() - start < 5  # comparing all lines with all sentences takes minutes


def test_text_is_retired_after_enough_near_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "one two three four five six seven eight"
    test, train = (
        make_pairs((words, "a b c d"), file="test"),
        make_pairs((f"{words} nine ten", ""), (f"{words} nine", "")),
    )
    assert check(test, train).matches[0].train.line == 2
    monkeypatch.setattr(contamination, "MAX_NEAR_MATCHES", 1)
    result = check(test, train)
    assert (result.near_duplicates, result.matches[0].train.line) == (1, 1)


def test_uncompared_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    openings = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS[:3] if a != b != c != a]
    test = make_pairs(*((f"{text} one two three four five", "x") for text in openings), file="test")
    train = make_pairs(*((f"{text} six seven one two three", "y") for text in openings))
    assert check(test, train).uncompared_lines == 0
    monkeypatch.setattr(contamination, "MAX_COMPARISONS", 500)
    assert 0 < check(test, train).uncompared_lines < len(train)


def test_exact_matches_are_found_in_the_whole_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contamination, "MAX_NEAR_SENTENCES", 3)
    test = [*make_template(range(4), "a.tsv"), *make_template(range(4, 9), "b.tsv")]
    result = check(test, [Pair("Please open the file – number 7 – in the main WINDOW!", "y", "train", 5)])
    assert (result.sentences, result.near_checked, result.same_source, result.near_duplicates) == (9, 3, 1, 3)
    match = result.matches[0]
    assert (match.kind, match.test.file, match.test.line, match.train.line) == ("source", "b.tsv", 4, 5)


def test_bad_lines_of_a_test_set_are_counted() -> None:
    checker = ContaminationChecker(
        [BadLine("one column only", "t", 1, "x"), *make_pairs(("a b c d", "e f g h")), BadLine("x", "t", 3, "")]
    )
    assert (len(checker), checker.bad_lines, checker.compute().sentences) == (1, 2, 1)


def test_empty_inputs_have_no_matches() -> None:
    for test in ([], make_pairs(("", ""), ("...", "!?"), file="test")):
        checker = ContaminationChecker(test)
        checker.update([])
        checker.update(make_pairs(("", ""), ("...", "words here")))
        assert (
            checker.compute().exact_matches == checker.compute().near_duplicates == checker.compute().short_matches == 0
        )


@given(st.lists(st.text(max_size=30), max_size=5))
def test_every_text_folds_to_one_line(texts: list[str]) -> None:
    assert len(fold_texts(texts)) == len(texts)
