"""Augmentation: each kind changes what it says and nothing else, and the seed alone decides."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from attent.data.augment import KINDS, OFF, Augmenter, format_rates, list_aligned_spans, parse_rates
from attent.data.formats.placeholders import GENERIC, INLINE_TAGS, find_problem, list_placeholders
from attent.storage.errors import AttentError
from tests.text.corpus import DOES, lines

SOURCES, TARGETS = (list(side[:200]) for side in lines())


@pytest.fixture(scope="module")
def learned() -> Augmenter:
    return Augmenter.learn(parse_rates(()), zip(*lines(), strict=True))


def change(
    learned: Augmenter, kind: str, sources: list[str], targets: list[str], seed: int = 1
) -> list[tuple[str, str]]:
    augmenter = Augmenter({kind: 1.0}, learned.letters, learned.lexicon)
    return list(zip(*augmenter.augment(sources, targets, seed), strict=True))


def test_capitals_and_punctuation_change_on_both_sides(learned: Augmenter) -> None:
    pair = ["It's a dog, isn't it?"], ["Ist das nicht ein großer Hund?"]
    assert change(learned, "upper", *pair) == [("IT'S A DOG, ISN'T IT?", "IST DAS NICHT EIN GROSSER HUND?")]
    assert change(learned, "title", *pair) == [("It's A Dog, Isn't It?", "Ist Das Nicht Ein Großer Hund?")]
    assert change(learned, "punctuation", *pair) == [("It's a dog, isn't it", "Ist das nicht ein großer Hund")]
    for unchanged in (("No.", "Nein"), ("...", "!"), ("", "")):
        assert change(learned, "punctuation", *([text] for text in unchanged)) == [unchanged]


def test_typos_are_in_the_source_and_of_its_letters(learned: Augmenter) -> None:
    changed = change(learned, "typos", SOURCES, TARGETS)
    assert [target for _, target in changed] == TARGETS
    for source, (typed, _) in zip(SOURCES, changed, strict=True):
        assert typed != source or "l" in source  # two equal letters that are swapped
        assert abs(len(typed) - len(source)) <= 5
        assert set(typed) <= set("".join(SOURCES))
        assert [word[:1] for word in typed.split()] == [word[:1] for word in source.split()]
    assert sum(typed != source for source, (typed, _) in zip(SOURCES, changed, strict=True)) > 190
    assert change(learned, "typos", ["1, 2", ""], ["a", "b"]) == [("1, 2", "a"), ("", "b")]


def test_whitespace_changes_nothing_but_spaces_of_the_source(learned: Augmenter) -> None:
    changed = change(learned, "whitespace", SOURCES, TARGETS)
    assert [(" ".join(source.split()), target) for source, target in changed] == list(
        zip(SOURCES, TARGETS, strict=True)
    )
    assert sum(source not in SOURCES for source, _ in changed) > 150


def test_numbers_change_where_both_sides_have_them(learned: Augmenter) -> None:
    ((source, target),) = change(
        learned, "numbers", ["In 1984, 12 of 30 and 2 a4b55."], ["1984 waren 12 von 31 und 2 da."]
    )
    match = re.fullmatch(r"In (\d{4}), (\d\d) of 30 and 2 a4b55\.", source)
    assert match
    assert target == f"{match[1]} waren {match[2]} von 31 und 2 da."
    assert (match[1], match[2]) != ("1984", "12")


def test_single_words_and_neighbors_replace_the_pair(learned: Augmenter) -> None:
    words = change(learned, "words", SOURCES, TARGETS)
    assert len(words) == len(SOURCES)
    assert set(words) <= set(learned.lexicon.entries)
    joined = change(learned, "long", SOURCES, TARGETS)
    for i, (source, target) in enumerate(joined[:-3]):
        count = source.count(".")
        assert 2 <= count <= 4
        assert (source, target) == (" ".join(SOURCES[i : i + count]), " ".join(TARGETS[i : i + count]))
    assert joined[-1] == (SOURCES[-1], TARGETS[-1])


def test_tags_are_around_aligned_words(learned: Augmenter) -> None:
    changed = change(learned, "tags", *map(list, lines()))
    seen: Counter[str] = Counter()
    spans: Counter[tuple[str, str]] = Counter()
    for source, target in changed:
        tags = [list_placeholders((text,), GENERIC) for text in (source, target)]
        assert sorted(tags[0]) == sorted(tags[1]) != []
        assert not find_problem((source,), (target,))
        seen.update(tags[0])
        spans.update(
            (first[2], second[2])
            for first in re.finditer(r"<(x\d)> (.*?) </\1>", source)
            for second in re.finditer(r"<(x\d)> (.*?) </\1>", target)
            if first[1] == second[1]
        )
    assert set(seen) == set(INLINE_TAGS)
    verbs = [(second, dict(DOES)[first]) for first, second in spans.elements() if first in dict(DOES)]
    assert len(verbs) > 10
    assert sum(second == verb for second, verb in verbs) / len(verbs) > 0.9


def test_tags_without_an_alignment_are_around_the_sentence(learned: Augmenter) -> None:
    braces = "{x} %s"
    for source, target in change(learned, "tags", [braces] * 20, ["什么"] * 20):
        assert re.fullmatch(r"<(x\d)> .* </\1>|<x\d/> .*", source)
        assert re.fullmatch(r"<(x\d)> 什么 </\1>|<x\d/> 什么", target)
    assert change(learned, "tags", [""], [""])


def test_aligned_spans_have_no_links_to_the_outside() -> None:
    spans = list_aligned_spans([(0, 1), (1, 0), (2, 2), (4, 2)])
    assert ((0, 1), (1, 2)) in spans
    assert ((0, 2), (0, 2)) in spans
    assert ((2, 5), (2, 3)) in spans
    assert not {((2, 3), (2, 3)), ((4, 5), (2, 3)), ((0, 4), (0, 3)), ((2, 4), (2, 3))} & set(spans)


def test_the_seed_decides(learned: Augmenter) -> None:
    rates = dict.fromkeys(KINDS, 0.3)
    first, again = (Augmenter(rates, learned.letters, learned.lexicon) for _ in range(2))
    assert first.augment(SOURCES, TARGETS, 1) == again.augment(SOURCES, TARGETS, 1)
    assert first.augment(SOURCES, TARGETS, 1) != again.augment(SOURCES, TARGETS, 2)
    assert len(first.augment(SOURCES, TARGETS, 3)[0]) == len(SOURCES)


def test_rates_hold_on_average(learned: Augmenter) -> None:
    sources, targets = lines()
    changed = Augmenter({"upper": 0.07}, "", learned.lexicon).augment(sources, targets, 1)[0]
    assert sum(map(str.isupper, changed)) / len(sources) == pytest.approx(0.07, abs=0.02)


def test_rates_are_read_and_written() -> None:
    defaults = parse_rates(())
    assert defaults == {name: kind.rate for name, kind in KINDS.items()}
    assert parse_rates(("typos", "upper=.5")) == {"upper": 0.5, "typos": 0.05}
    assert parse_rates((OFF,)) == parse_rates(("upper=0",)) == {}
    assert format_rates({}) == (OFF,)
    for rates in (defaults, {}, {"tags": 1.0}):
        assert parse_rates(format_rates(rates)) == rates


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (("uper",), "did you mean upper"),
        (("xyz=.1",), "the kinds are words, long"),
        (("upper=two",), "rates from 0 to 1, but upper has 'two'"),
        (("upper=1.5",), "rates from 0 to 1, but upper has '1.5'"),
        (("upper", OFF), "leave none out"),
    ],
)
def test_wrong_rates_are_refused(items: tuple[str, ...], message: str) -> None:
    with pytest.raises(AttentError, match=re.escape(message)):
        parse_rates(items)


def test_the_documented_kinds_are_those_of_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(name, f"{kind.rate:g}", kind.help) for name, kind in KINDS.items()]
