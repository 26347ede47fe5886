"""Test sentences found again in training data, held against the plain definition of "near"."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from attent.data.leakage import NEAR, NEAR_WORDS, Against, Index, fold, fold_words
from attent.data.pairs import Pair

WORDS = (
    "the a dog cat runs sleeps on in water grass red blue big small quickly slowly never always today boston".split()
)
SENTENCES = st.lists(st.sampled_from(WORDS) | st.from_regex("[xyz]{1,2}", fullmatch=True), max_size=14).map(" ".join)


def pairs(*texts: tuple[str, str], file: str = "train") -> list[Pair]:
    return [Pair(source, target, file, i) for i, (source, target) in enumerate(texts, start=1)]


@st.composite
def near_misses(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Test sentences, and lines that differ from one of them in a few words."""
    tests = draw(st.lists(st.lists(st.sampled_from(WORDS), min_size=5, max_size=14), min_size=1, max_size=6))
    lines = []
    for _ in range(draw(st.integers(1, 6))):
        words = list(draw(st.sampled_from(tests)))
        for _ in range(draw(st.integers(0, 4))):
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from([*WORDS, "xx", "yy", ""]))
        lines.append(" ".join(words))
    return [" ".join(words) for words in tests], lines


@settings(max_examples=150, deadline=None)
@given(near_misses() | st.tuples(st.lists(SENTENCES, min_size=1), st.lists(SENTENCES, min_size=1)))
def test_near_is_what_comparing_every_line_with_every_sentence_finds(texts: tuple[list[str], list[str]]) -> None:
    tests, lines = texts
    expected = {}
    for i, line in enumerate(lines):
        for j, test in enumerate(tests):
            one, other = set(line.split()), set(test.split())
            if len(other) >= NEAR_WORDS and one and len(one & other) / len(one | other) >= NEAR:
                expected[i, j] = len(one & other) / len(one | other)
    near = Index(tests).near(fold_words(lines))
    found = {(i, j): overlap for i, j, overlap in zip(*(column.tolist() for column in near), strict=True)}
    assert found == expected


def test_case_punctuation_and_spacing_do_not_hide_a_twin() -> None:
    against = Against(pairs(("The dog runs on the grass.", "Der Hund läuft auf dem Gras."), file="test"))
    against.look(pairs(("the  DOG runs – on the grass!", "»Der Hund läuft auf dem Gras«…")))
    found = against.found()
    assert (found.pair, found.exact, found.near) == (1, 1, 0)
    assert found.twins[0].train.line == 1


def test_each_test_sentence_counts_once_by_its_closest_twin() -> None:
    test = pairs(
        ("The red dog runs on the grass.", "Der rote Hund läuft auf dem Gras."),
        ("The blue cat sleeps in water.", "Die blaue Katze schläft im Wasser."),
        ("A big dog never sleeps here.", "Ein großer Hund schläft hier nie."),
        ("A small cat always runs today.", "Eine kleine Katze rennt heute immer."),
        ("Nothing like this was ever seen before.", "So etwas hat man noch nie gesehen."),
        ("Yes.", "Ja."),
        file="test",
    )
    train = pairs(
        ("The red dog runs on the grass.", "Ein anderer Satz."),
        ("The red dog runs on the grass.", "Der rote Hund läuft auf dem Gras."),
        ("The blue cat sleeps in water.", "Die Katze ist blau und schläft."),
        ("Something else entirely.", "Ein großer Hund schläft hier nie."),
        ("A small cat always runs today again.", "Ganz anders."),
        ("Yes!", "Ja!"),
        ("Yes!", "Ja!"),
    )
    against = Against(test)
    for start in range(0, len(train), 2):
        against.look(train[start : start + 2])
    found = against.found()
    assert found.sentences == 6
    assert (found.pair, found.source, found.target, found.near, found.short) == (1, 1, 1, 1, 1)
    assert [(twin.kind, twin.test.line, twin.train.line) for twin in found.twins] == [
        ("pair", 1, 2),
        ("source", 2, 3),
        ("target", 3, 4),
        ("near source", 4, 5),
    ]


def test_a_script_without_spaces_is_compared_by_neighbouring_characters() -> None:
    against = Against(pairs(("人人生而自由在尊严和权利上一律平等", "all are born free and equal"), file="test"))
    against.look(pairs(("平等上利权和严尊在由自而生人人律一", "y"), ("人人生而自由，在尊严和权利上一律不平等。", "x")))
    found = against.found()
    assert [(twin.kind, twin.train.line) for twin in found.twins] == [("near source", 2)]
    assert found.near == 1


def test_line_breaks_inside_a_text_keep_lines_in_step() -> None:
    against = Against(pairs(("one two three four five six", "a b c d e f"), file="test"))
    against.look(pairs(("x\ny\nz", "q"), ("one two\nthree four five six", "other")))
    assert against.found().twins[0].train.line == 2


def test_nothing_to_compare_finds_nothing() -> None:
    for test in ([], pairs(("", ""), ("...", "!?"), file="test")):
        against = Against(test)
        against.look([])
        against.look(pairs(("", ""), ("...", "words here")))
        assert against.found().exact == against.found().near == against.found().short == 0


@given(st.lists(st.text(max_size=30), max_size=5))
def test_any_text_folds_to_one_line_each(texts: list[str]) -> None:
    assert len(fold(texts).split("\n")) == max(len(texts), 1)
