"""Contamination: test sentences in training data."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attent.data.pairs import BadLine, Pair
from attent.data.report import ContaminationChecker, fold_texts


def make_pairs(*texts: tuple[str, str], file: str = "train") -> list[Pair]:
    return [Pair(source, target, file, i) for i, (source, target) in enumerate(texts, start=1)]


def test_case_punctuation_and_spacing_are_ignored() -> None:
    checker = ContaminationChecker(
        make_pairs(("The dog runs on the grass.", "Der Hund läuft auf dem Gras."), file="test")
    )
    checker.update(make_pairs(("the  DOG runs – on the grass!", "»Der Hund läuft auf dem Gras«…")))
    result = checker.compute()
    assert (result.same_pair, result.same_source, result.same_target) == (1, 0, 0)
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
    assert (result.same_pair, result.same_source, result.same_target, result.short_matches) == (1, 1, 1, 1)
    assert [(match.kind, match.test.line, match.train.line) for match in result.matches] == [
        ("pair", 1, 2),
        ("source", 2, 3),
        ("target", 3, 4),
    ]


def test_letters_of_scripts_without_spaces_count_as_words() -> None:
    checker = ContaminationChecker(
        make_pairs(("人人生而自由在尊严和权利上一律平等", "all are born free and equal"), file="test")
    )
    checker.update(
        make_pairs(("平等上利权和严尊在由自而生人人律一", "y"), ("人人生而自由，在尊严和权利上一律平等。", "x"))
    )
    result = checker.compute()
    assert [(match.kind, match.train.line) for match in result.matches] == [("source", 2)]
    assert (result.same_source, result.short_matches) == (1, 0)


def test_newlines_in_a_text_do_not_shift_lines() -> None:
    checker = ContaminationChecker(make_pairs(("one two three four five six", "a b c d e f"), file="test"))
    checker.update(make_pairs(("x\ny\nz", "q"), ("one two\nthree four five six", "other")))
    assert checker.compute().matches[0].train.line == 2


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
        result = checker.compute()
        assert (result.matches, result.short_matches) == ((), 0)


@given(st.lists(st.text(max_size=30), max_size=5))
def test_every_text_folds_to_one_line(texts: list[str]) -> None:
    assert len(fold_texts(texts)) == len(texts)
