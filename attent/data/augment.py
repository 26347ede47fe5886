"""Augmentation of training text: capitals, missing punctuation, typos, tags and the like, so that a model is robust.

It changes texts before they are tokenized, differently in each epoch, as a pure function of the seed. A kind of change
is one row of `KINDS`. The rates of capitals, punctuation, typos and tags are those of Mozilla's student models.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice, tee
from typing import NamedTuple, Self

import numpy as np

from attent.data.arrays import Array, concatenate_ranges
from attent.data.formats.placeholders import INLINE_TAG, MAX_INLINE_TAGS
from attent.storage.errors import AttentError

MAX_LINKS = 6_000_000  # of each word of a source with each of its target: half a gigabyte, and a few seconds
MAX_WORDS = 60  # of a sentence to learn from
NUM_ITERATIONS = 5
DIAGONAL = 2.0  # strength of the prior: exp(-DIAGONAL |i / m - j / n|)
MIN_PROBABILITY = 0.02  # of a translation that is stored, both directions multiplied
MIN_ENTRY_PROBABILITY, MIN_ENTRY_COUNT = 0.25, 3  # of a pair of single words
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+(?:[-'’.,]\w+)*|[^\w\s]")
OFF = "none"
MAX_TAGGED_WORDS = 3  # between an opening and a closing tag
MAX_JOINED = 4  # pairs
LETTERS_PER_TYPO = 40
SAMPLE_PAIRS = 20_000  # from which the letters are learned
MIN_TYPO_WORD = 3  # letters
WORD_WITH_CASE = re.compile(r"\w[\w'’]*")
PLAIN_WORD = re.compile(rf"[^\W\d_]{{{MIN_TYPO_WORD},}}")
FINAL_PUNCTUATION = re.compile(r"\s*[.!?…。！？．؟।]+$")
NUMBER = re.compile(r"(?<!\w)\d\d+(?!\w)")  # one digit may decide the grammar: 1 dog, 2 dogs

Pair = tuple[str, str]
Span = tuple[int, int]  # start and stop


@dataclass(frozen=True)
class Lexicon:
    """Word translations learned from parallel text: IBM model 1 in both directions (Brown et al. 1993), with the fixed
    diagonal prior of fast_align (Dyer et al. 2013), in seconds. They serve to place tags and to find pairs of words.

    A link is kept if each word is the best one of the other.
    """

    # (source, target) in lower case -> p(target|source) p(source|target)
    probabilities: dict[tuple[str, str], float] = field(default_factory=dict)
    entries: tuple[tuple[str, str], ...] = ()  # reliable translations of single words, as they are usually written

    @classmethod
    def learn(cls, pairs: Iterable[tuple[str, str]]) -> Self:
        """Learn from the first pairs, up to `MAX_LINKS` possible links."""
        sides: tuple[list[list[str]], list[list[str]]] = ([], [])
        forms: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        num_links = 0
        for pair in pairs:
            words = [WORD.findall(text) for text in pair]
            if all(0 < len(side) <= MAX_WORDS for side in words):
                for side, side_words, side_forms in zip(sides, words, forms, strict=True):
                    side.append([word.lower() for word in side_words])
                    side_forms.update(side_words[1:])  # the first word of a sentence may have a capital
                num_links += len(words[0]) * len(words[1])
            if num_links > MAX_LINKS:
                break
        if not num_links:
            return cls()
        table = _estimate(*sides)
        counts = [Counter(word for sentence in side for word in sentence) for side in sides]
        written = [{word.lower(): word for word, _ in reversed(side.most_common())} for side in forms]
        entries = tuple(
            (written[0][source], written[1][target])
            for (source, target), probability in table.items()
            if probability >= MIN_ENTRY_PROBABILITY
            and min(counts[0][source], counts[1][target]) >= MIN_ENTRY_COUNT
            and all(word.isalpha() and word in side for word, side in zip((source, target), written, strict=True))
        )
        return cls(table, entries)

    def align(self, source: Sequence[str], target: Sequence[str]) -> list[tuple[int, int]]:
        """Return the links of two lists of words by index, in order of the source."""
        scores = np.zeros((len(source), len(target)))
        for i, word in enumerate(map(str.lower, source)):
            for j, other in enumerate(map(str.lower, target)):
                scores[i, j] = 1.0 if word == other else self.probabilities.get((word, other), 0.0)
        if not scores.any():
            return []
        rows, columns = np.indices(scores.shape)
        scores *= np.exp(-DIAGONAL * _diagonal_distance(rows, columns, len(source), len(target)))
        is_best = (scores == scores.max(0)) & (scores == scores.max(1, keepdims=True)) & (scores > 0)
        return [(i, j) for i, j in np.argwhere(is_best).tolist()]


def _diagonal_distance(i: Array, j: Array, source_length: Array | int, target_length: Array | int) -> Array:
    distance: Array = abs((i + 0.5) / source_length - (j + 0.5) / target_length)
    return distance


def _estimate(sources: list[list[str]], targets: list[list[str]]) -> dict[tuple[str, str], float]:
    """Return p(target|source) p(source|target) of the probable word pairs."""
    ids, lengths, words = [], [], []
    for side in (sources, targets):
        words.append(list(dict.fromkeys(word for sentence in side for word in sentence)))
        index = {word: number for number, word in enumerate(words[-1])}
        ids.append(np.fromiter((index[word] for sentence in side for word in sentence), np.int64))
        lengths.append(np.fromiter(map(len, side), np.int64, len(side)))
    starts = [counts.cumsum() - counts for counts in lengths]
    # A link for each source word i and each target word j of its sentence, sorted by i.
    per_word = np.repeat(lengths[1], lengths[0])
    i = np.repeat(np.arange(len(ids[0]), dtype=np.int32), per_word)
    j = concatenate_ranges(np.repeat(starts[1], lengths[0]), per_word).astype(np.int32)
    sentence = np.repeat(np.arange(len(sources)), lengths[0] * lengths[1])
    distance = _diagonal_distance(
        i - starts[0][sentence], j - starts[1][sentence], lengths[0][sentence], lengths[1][sentence]
    )
    prior = np.exp(-DIAGONAL * distance).astype(np.float32)
    keys, links = np.unique(ids[0][i] << 32 | ids[1][j], return_inverse=True)
    product = np.ones(len(keys))
    # A target word is generated by one of the source words, and the reverse.
    for given, position in ((keys >> 32, j), (keys & 0xFFFFFFFF, i)):
        probabilities = np.ones(len(keys))
        for _ in range(NUM_ITERATIONS):
            expected = probabilities[links] * prior
            expected /= np.bincount(position, expected)[position]
            counts = np.bincount(links, expected, len(keys))
            probabilities = counts / np.bincount(given, counts)[given]
        product *= probabilities
    is_probable = product >= MIN_PROBABILITY
    pairs = zip(keys[is_probable].tolist(), product[is_probable].tolist(), strict=True)
    return {(words[0][key >> 32], words[1][key & 0xFFFFFFFF]): probability for key, probability in pairs}


@dataclass(frozen=True)
class Context:
    """Inputs of a change besides the pair."""

    rng: random.Random
    letters: str  # of the sources, the frequent ones more often
    lexicon: Lexicon
    neighbors: Sequence[Pair] = ()  # the next pairs of the corpus


def replace_by_words(context: Context, pair: Pair) -> Pair:
    entries = context.lexicon.entries
    return context.rng.choice(entries) if entries else pair


def join_neighbors(context: Context, pair: Pair) -> Pair:
    pairs = [pair, *context.neighbors[: context.rng.randrange(1, MAX_JOINED)]]
    return " ".join(source for source, _ in pairs), " ".join(target for _, target in pairs)


def change_numbers(context: Context, pair: Pair) -> Pair:
    """Replace the numbers that occur equally often on both sides by others."""
    counts = [Counter(NUMBER.findall(text)) for text in pair]
    shared = (number for number, count in counts[0].items() if counts[1][number] == count)
    new = {number: "".join(context.rng.choice("123456789") for _ in number) for number in shared}
    source, target = (NUMBER.sub(lambda match: new.get(match[0], match[0]), text) for text in pair)
    return source, target


def to_upper_case(context: Context, pair: Pair) -> Pair:
    return pair[0].upper(), pair[1].upper()


def to_title_case(context: Context, pair: Pair) -> Pair:
    source, target = (WORD_WITH_CASE.sub(lambda word: word[0][0].upper() + word[0][1:], text) for text in pair)
    return source, target


def drop_final_punctuation(context: Context, pair: Pair) -> Pair:
    source, target = (FINAL_PUNCTUATION.sub("", text) for text in pair)
    return (source, target) if source and target and source != pair[0] and target != pair[1] else pair


def add_typos(context: Context, pair: Pair) -> Pair:
    """Swap, delete, double, replace or insert letters in words of the source, but not the first letter of a word."""
    rng, source = context.rng, pair[0]
    words = [match.span() for match in PLAIN_WORD.finditer(source)]
    num_letters = sum(end - start for start, end in words)
    count = max(1, round(rng.uniform(0, 2) * num_letters / LETTERS_PER_TYPO))
    for start, end in sorted(rng.sample(words, min(count, len(words))), reverse=True):
        at = rng.randrange(start + 1, end - 1)
        letter, next_letter, other = source[at], source[at + 1], rng.choice(context.letters or "-")
        new = rng.choice((next_letter + letter, next_letter, letter * 2 + next_letter, other + next_letter))
        new = letter + other + next_letter if rng.random() < 0.2 else new
        source = source[:at] + new + source[at + 2 :]
    return source, pair[1]


def add_whitespace(context: Context, pair: Pair) -> Pair:
    """Repeat some spaces of the source, or make them no-break spaces or tabs; add some before it and after it."""
    rng = context.rng
    text = re.sub(" ", lambda _: rng.choice((*" " * 9, "  ", "   ", "\u00a0", "\t")), pair[0])
    return rng.choice(("", " ", "  ")) + text + rng.choice(("", " ", "  ")), pair[1]


def add_tags(context: Context, pair: Pair) -> Pair:
    """Put tags around aligned words, or a standalone tag before a word or in its place, on both sides."""
    rng, words = context.rng, [list(WORD.finditer(text)) for text in pair]
    links = context.lexicon.align([word[0] for word in words[0]], [word[0] for word in words[1]])
    candidates = list_aligned_spans(links) or [((0, len(words[0])), (0, len(words[1])))]
    spans: list[tuple[Span, Span]] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        spans.append(rng.choice(candidates))
        candidates = [other for other in candidates if not any(map(_overlap, other, spans[-1]))]
        if not candidates:
            break
    numbers = sorted(rng.sample(range(1, MAX_INLINE_TAGS + 1), len(spans)))
    edits: tuple[list[tuple[int, int, str]], ...] = ([], [])
    for number, span in zip(numbers, sorted(spans), strict=True):
        tags = {role: form.format(number) for role, form in INLINE_TAG.items()}
        is_word = all(stop - first == 1 for first, stop in span)
        form = rng.choice(("around", "around", "before", "instead" if is_word else "before"))
        for side, (first, stop) in enumerate(span):
            start, end = (words[side][first].start(), words[side][stop - 1].end()) if words[side] else (0, 0)
            text = pair[side][start:end]
            if form == "around":
                edits[side].append((start, end, f"{tags['open']} {text} {tags['close']}"))
            else:
                edits[side].append((start, end, tags["standalone"] + (f" {text}" if form == "before" else "")))
    source, target = map(_apply_edits, pair, edits)
    return source, target


def list_aligned_spans(links: Sequence[tuple[int, int]]) -> list[tuple[Span, Span]]:
    """Return the spans of source and target of which no word is linked to a word outside."""
    spans = []
    for first, _ in links:
        for stop in range(first + 1, first + 1 + MAX_TAGGED_WORDS):
            inside = [j for i, j in links if first <= i < stop]
            target = min(inside), max(inside) + 1
            is_closed = sum(target[0] <= j < target[1] for _, j in links) == len(inside)
            if is_closed and any(i == stop - 1 for i, _ in links) and target[1] - target[0] <= MAX_TAGGED_WORDS:
                spans.append(((first, stop), target))
    return spans


def _overlap(span: Span, other: Span) -> bool:
    return span[0] < other[1] and other[0] < span[1]


def _apply_edits(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


class Kind(NamedTuple):
    apply: Callable[[Context, Pair], Pair]
    rate: float  # the default probability
    help: str
    needs_lexicon: bool = False
    is_tested: bool = False  # by `attent score --robust`
    has_other_subwords: bool = False  # the tokenizer is trained on it too


KINDS = {  # in the order in which they are applied
    "words": Kind(replace_by_words, 0.005, "a single word and its translation instead of the pair", True),
    "long": Kind(join_neighbors, 0.01, f"joined with up to {MAX_JOINED - 1} following pairs"),
    "numbers": Kind(change_numbers, 0.02, "other numbers, where both sides have the same"),
    "upper": Kind(to_upper_case, 0.07, "in capitals", is_tested=True, has_other_subwords=True),
    "title": Kind(to_title_case, 0.05, "in title case", is_tested=True, has_other_subwords=True),
    "punctuation": Kind(drop_final_punctuation, 0.2, "without final punctuation", is_tested=True),
    "typos": Kind(add_typos, 0.05, "with typos in the source", is_tested=True),
    "whitespace": Kind(add_whitespace, 0.02, "with extra whitespace in the source", is_tested=True),
    "tags": Kind(add_tags, 0.005, "with inline tags around or instead of aligned words", True, is_tested=True),
}
TAGS = "tags"


def parse_rates(items: Sequence[str]) -> dict[str, float]:
    """Read `upper=.1 typos` as {"upper": 0.1, "typos": 0.05}; no items are all kinds at their default rates."""
    if OFF in items and len(items) > 1:
        raise AttentError(f"`augment` must be {OFF} or kinds, but is {' '.join(items)}; leave {OFF} out")
    rates = {name: kind.rate for name, kind in KINDS.items()} if not items else {}
    for item in items if OFF not in items else ():
        name, equals, value = item.partition("=")
        if name not in KINDS:
            near = get_close_matches(name, KINDS)
            advice = f"did you mean {near[0]}?" if near else f"the kinds are {', '.join(KINDS)}"
            raise AttentError(f"`augment` must be kinds such as upper or upper=0.1, but one is {item!r}; {advice}")
        try:
            rates[name] = float(value) if equals else KINDS[name].rate
        except ValueError:
            rates[name] = -1.0
        if not 0 <= rates[name] <= 1:
            raise AttentError(f"`augment` must have rates from 0 to 1, but {name} has {value!r}; write {name}=0.1")
    return {name: rates[name] for name in KINDS if rates.get(name)}


def format_rates(rates: dict[str, float]) -> tuple[str, ...]:
    """Return the items that `parse_rates` reads as these rates."""
    return tuple(f"{name}={rate:g}" for name, rate in rates.items()) or (OFF,)


@dataclass(frozen=True)
class Augmenter:
    rates: dict[str, float]
    letters: str = ""  # of typos
    lexicon: Lexicon = field(default_factory=Lexicon)

    @classmethod
    def learn(cls, rates: dict[str, float], pairs: Iterable[Pair]) -> Self:
        """Learn the letters of typos and the alignment of tags from the first pairs."""
        sample, others = tee(pairs)
        letters = Counter(letter for source, _ in islice(sample, SAMPLE_PAIRS) for letter in source if letter.isalpha())
        frequent = [(letter, max(1, round(1000 * count / letters.total()))) for letter, count in letters.items()]
        needs_lexicon = any(KINDS[name].needs_lexicon for name in rates)
        lexicon = Lexicon.learn(others) if needs_lexicon else Lexicon()
        return cls(rates, "".join(letter * count for letter, count in sorted(frequent)), lexicon)

    def augment(self, sources: Sequence[str], targets: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
        """Return a changed copy: a pure function of the arguments, the same in every process."""
        rng, pairs = random.Random(seed), list(zip(sources, targets, strict=True))
        rates, augmented = [(KINDS[name].apply, rate) for name, rate in self.rates.items()], list[Pair]()
        for index, pair in enumerate(pairs):
            changes = [apply for apply, rate in rates if rng.random() < rate]
            if changes:
                context = Context(rng, self.letters, self.lexicon, pairs[index + 1 : index + MAX_JOINED])
                for apply in changes:
                    pair = apply(context, pair)
            augmented.append(pair)
        return [source for source, _ in augmented], [target for _, target in augmented]
