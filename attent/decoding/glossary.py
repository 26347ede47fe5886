"""A glossary of `term<TAB>translation` lines or a TBX term base: the terms of a text, and where a translation has them.

A term matches as a whole word, the longest first; a lower-case term also matches with a capital, others only as
written. Translations separated by `|` are allowed forms: one must stand where the word alignment puts the term.

`translate_terms` keeps a free translation that has them all. Else the segment is searched again with required phrases:
the forms that it has, and each combination of forms of the terms that it lacks. Of all hypotheses the one with the
smallest cost wins: its negative log-probability and a penalty for each term that is not in place.
"""

import codecs
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Self

from attent.data.formats import tmx
from attent.decoding.input_lines import decode_line
from attent.decoding.options import Hypothesis, InputError
from attent.text.language_tags import is_tag_match
from attent.text.scripts import UNSPACED_CHARS, is_separate_word, is_word_boundary

if TYPE_CHECKING:
    from attent.decoding.alignment import Alignment  # imports torch, which the server's front end does not need

COMMENT_PREFIX = "#"
ALTERNATIVE_SEPARATOR = "|"
LINE_FORMAT = "a term, a tab and its translation"
_WORD = re.compile(rf"(?:(?![{UNSPACED_CHARS}])\w)+|\S")


@dataclass(frozen=True, kw_only=True)
class GlossaryEntry:
    term: str
    translations: tuple[str, ...]
    max_cost: float = math.inf  # log-probability that the term may cost in a sentence


@dataclass(frozen=True)
class TermMatch:
    """An occurrence of a term in a text; words are separated by spaces."""

    entry: GlossaryEntry
    words: range

    @property
    def forms(self) -> tuple[str, ...]:
        """The allowed translations; of the first word also with a capital."""
        forms = self.entry.translations
        return forms if self.words.start else tuple(dict.fromkeys([*forms, *map(_capitalize, forms)]))


@dataclass(frozen=True)
class TermPlacement:
    """The form of a term that a translation has at the aligned place; None if it has none there."""

    match: TermMatch
    form: str | None
    is_elsewhere: bool = False  # the translation has a form, but not where the word alignment puts the term

    def __str__(self) -> str:
        entry, problem = self.match.entry, "stands where the alignment puts it" if self.is_elsewhere else "occurs"
        rule = "must be" if math.isinf(entry.max_cost) else "is elsewhere"
        return f"`{entry.term}` {rule} translated as `{'` or `'.join(entry.translations)}`, but no form {problem}"


@dataclass(frozen=True)
class Glossary:
    entries: tuple[GlossaryEntry, ...]

    @classmethod
    def from_terms(cls, terms: Mapping[str, str]) -> Self:
        """Build a glossary from terms and translations; `|` separates alternatives."""
        return cls(tuple(_build_entry([term, text], f"`{term}` of the glossary") for term, text in terms.items()))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], src: str | None = None, tgt: str | None = None) -> Self:
        """Read a file of lines, or a TBX term base, of which `src` and `tgt` select the languages."""
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise InputError(
                f"{path}: must be a text file, but cannot be read ({error.strerror}); its lines must be {LINE_FORMAT}"
            ) from error
        if tmx.is_tbx(content[:4096].decode(errors="replace").lstrip("\ufeff \t\r\n")):
            return cls.from_tbx(content, str(path), src, tgt)
        return cls.from_bytes(content, str(path))

    @classmethod
    def from_tbx(cls, content: bytes, name: str, src: str | None, tgt: str | None) -> Self:
        """Parse a TBX term base. Concepts that share a term share their translations."""
        if not src or not tgt:
            raise InputError(
                f"{name}: a TBX file needs the languages to read, but they are unknown; name them with --src and --tgt"
            )
        translations: dict[str, dict[str, None]] = {}
        languages: dict[str, None] = {}
        for _, terms in tmx.read_concepts(content, name):
            languages |= dict.fromkeys(language for language, _ in terms)
            targets = [_normalize_text(text) for language, text in terms if is_tag_match(tgt, language)]
            for term in [_normalize_text(text) for language, text in terms if is_tag_match(src, language)]:
                if targets:
                    translations.setdefault(term, {}).update(dict.fromkeys(targets))
        if not translations:
            known = ", ".join(languages) or "none"
            raise InputError(f"{name}: must have terms in {src} and {tgt}, but its languages are {known}")
        entries = translations.items()
        return cls(tuple(GlossaryEntry(term=term, translations=tuple(forms)) for term, forms in entries))

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Self:
        """Parse a file, whose `name` is for messages. Empty lines and lines that start with # are skipped."""
        entries: dict[str, tuple[GlossaryEntry, int]] = {}
        for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
            text = decode_line(line, f"{name}:{number}").strip("\r ")
            if not text.strip() or text.startswith(COMMENT_PREFIX):
                continue
            entry = _build_entry(text.split("\t"), f"{name}:{number}")
            first, first_number = entries.setdefault(entry.term, (entry, number))
            if first != entry:
                raise InputError(
                    f"{name}:{number}: must be a new term, but `{entry.term}` has another translation in line "
                    f"{first_number}; join both with {ALTERNATIVE_SEPARATOR} there, or remove one"
                )
        return cls(tuple(entry for entry, _ in entries.values()))

    def find_terms(self, text: str) -> list[TermMatch]:
        """Return the terms of a text in order; at each position the longest counts."""
        text, start = _normalize_text(text), 0
        matches: list[TermMatch] = []
        counted, first_word = 0, 0
        while word := _WORD.search(text, start):
            entry, start = self._match_longest(text, word)
            if entry is not None:
                first_word += text.count(" ", counted, word.start())
                counted = word.start()
                matches.append(TermMatch(entry, range(first_word, first_word + 1 + text.count(" ", counted, start))))
        return matches

    def _match_longest(self, text: str, word: re.Match[str]) -> tuple[GlossaryEntry | None, int]:
        start = word.start()
        if is_word_boundary(text[max(start - 1, 0) : start], text[start]):
            for length in self._term_lengths.get(word[0], ()):
                entry = self._spellings.get(text[start : start + length])
                if entry is not None and is_word_boundary(
                    text[start + length - 1], text[start + length : start + length + 1]
                ):
                    return entry, start + length
        return None, word.end()

    @cached_property
    def _spellings(self) -> dict[str, GlossaryEntry]:
        lower = [entry for entry in self.entries if entry.term == entry.term.lower()]
        capital = {_capitalize(entry.term): entry for entry in lower}
        return {**capital, **{entry.term: entry for entry in self.entries}}

    @cached_property
    def _term_lengths(self) -> dict[str, list[int]]:
        lengths: dict[str, set[int]] = {}
        for term in self._spellings:
            word = _WORD.match(term)
            assert word is not None  # a term is not empty
            lengths.setdefault(word[0], set()).add(len(term))
        return {word: sorted(sizes, reverse=True) for word, sizes in lengths.items()}


def place_terms(matches: Sequence[TermMatch], text: str, alignment: "Alignment | None" = None) -> list[TermPlacement]:
    """Find a form of each term at the aligned place of a translation; without alignment, anywhere.

    Each occurrence of a term needs a form of its own.
    """
    text = _normalize_text(text)
    used: dict[GlossaryEntry, set[int]] = {}
    placements = []
    for match in matches:
        taken = used.setdefault(match.entry, set())
        places = [(form, words) for form, words in _find_forms(text, match) if taken.isdisjoint(words)]
        aligned = (each for each in places if alignment is None or _is_aligned(match.words, each[1], alignment))
        form, words = next(aligned, (None, ()))
        taken.update(words)
        placements.append(TermPlacement(match, form, form is None and bool(places)))
    return placements


def _find_forms(text: str, match: TermMatch) -> Iterator[tuple[str, range]]:
    """Yield each form in a translation with its words, the longest first; at the start it may have a capital."""
    for form in sorted(match.forms, key=len, reverse=True):
        start = -1
        while (start := text.find(form, start + 1)) >= 0:
            if is_separate_word(text, start, start + len(form)):
                first = text.count(" ", 0, start)
                yield form, range(first, first + 1 + form.count(" "))
        capital = _capitalize(form)
        if capital != form and text.startswith(capital) and is_separate_word(text, 0, len(form)):
            yield capital, range(1 + form.count(" "))


def _is_aligned(source: range, target: range, alignment: "Alignment") -> bool:
    """True if a word of the one side is most aligned with a word of the other."""
    if any(link[0] in source and link[1] in target for link in alignment.all_links):
        return True
    weights = alignment.weights
    return any(max(range(len(weights)), key=lambda row: weights[row][word]) in target for word in source)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _build_entry(columns: list[str], location: str) -> GlossaryEntry:
    term, *translations = columns[0].strip(), *(part.strip() for part in columns[-1].split(ALTERNATIVE_SEPARATOR))
    if len(columns) != 2 or not all((term, *translations)):
        text = "<TAB>".join(columns)
        raise InputError(
            f"{location}: must be {LINE_FORMAT}, or several separated by {ALTERNATIVE_SEPARATOR}, but is "
            f"`{text[:60]}{'...' * (len(text) > 60)}`; correct it, or start the line with #"
        )
    return GlossaryEntry(term=_normalize_text(term), translations=tuple(map(_normalize_text, translations)))


def _normalize_text(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


# --- translations that have the terms --------------------------------------------------------------------------------


MAX_COMBINATIONS = 32  # of the forms of several terms

Phrases = tuple[str, ...]
# From (segment, hypothesis) pairs: the text and the word alignment of each.
AlignHypotheses = Callable[[Sequence[tuple[int, Hypothesis]]], Sequence[tuple[str, "Alignment | None"]]]
# From (segment, required phrases) pairs: the hypotheses of each, none if it cannot be met.
SearchPhrases = Callable[[Sequence[tuple[int, Phrases]]], Sequence[Sequence[Hypothesis]]]


@dataclass(frozen=True)
class PlacedHypothesis:
    """A hypothesis of a segment, and where it has the terms."""

    segment: int
    hypothesis: Hypothesis
    placements: list[TermPlacement]

    @property
    def missed_terms(self) -> tuple[TermPlacement, ...]:
        return tuple(each for each in self.placements if each.form is None)


def translate_terms(
    matches: Sequence[list[TermMatch]],
    free: Sequence[list[Hypothesis]],
    *,
    search: SearchPhrases,
    align: AlignHypotheses,
    compute_penalty: Callable[[TermPlacement], float],
) -> tuple[list[list[Hypothesis]], list[tuple[TermPlacement, ...]]]:
    """Return the hypotheses of each segment, best first, and the terms that the best one lacks.

    `matches` and `free` are the terms and the free hypotheses of each segment; `compute_penalty` says how much
    log-probability it may cost to have a term in place.
    """

    def place(pairs: Sequence[tuple[int, Hypothesis]]) -> list[PlacedHypothesis]:
        aligned = zip(pairs, align(pairs), strict=True)
        return [PlacedHypothesis(i, hypothesis, place_terms(matches[i], *text)) for (i, hypothesis), text in aligned]

    best = place([(index, free[index][0]) for index, terms in enumerate(matches) if terms])
    attempts = [(each.segment, phrases) for each in best if each.missed_terms for phrases in list_phrases(each)]
    results = zip(attempts, search(attempts) if attempts else [], strict=True)
    pairs = [(segment, hypothesis) for (segment, _), n_best in results for hypothesis in n_best]
    candidates = {each.segment: [each] for each in best}
    for candidate in place(pairs):
        candidates[candidate.segment].append(candidate)

    def compute_cost(candidate: PlacedHypothesis) -> float:
        return sum(map(compute_penalty, candidate.missed_terms)) - candidate.hypothesis.log_prob

    hypotheses = list(free)
    missed: list[tuple[TermPlacement, ...]] = [()] * len(free)
    for segment, group in candidates.items():
        ranked = sorted(group, key=compute_cost)
        missed[segment] = ranked[0].missed_terms
        if ranked[0] is not group[0]:
            hypotheses[segment] = list({each.hypothesis.token_ids: each.hypothesis for each in ranked}.values())
    return hypotheses, missed


def list_phrases(free: PlacedHypothesis) -> Iterator[Phrases]:
    """Yield the phrases of each search: the forms in place, and one form of each term that is not."""
    in_place = tuple(each.form for each in free.placements if each.form is not None)
    groups: dict[GlossaryEntry, list[TermMatch]] = {}
    for each in free.missed_terms:
        groups.setdefault(each.match.entry, []).append(each.match)
    choices = [[(form,) * len(group) for form in group[0].forms] for group in groups.values()]
    for combination in islice(product(*choices), MAX_COMBINATIONS):
        yield sum(combination, in_place)
