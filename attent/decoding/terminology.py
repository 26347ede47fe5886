"""Choose translations in which the terms of a glossary stand where the word alignment puts them.

A free translation that has them is kept. Else the segment is searched again with required phrases: the forms that it
has, and each combination of forms of the terms that it lacks. Of all hypotheses the one with the smallest cost wins:
its negative log-probability and a penalty for each term that is not in place. What it lacks is reported.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from attent.decoding.alignment import Alignment
from attent.decoding.glossary import GlossaryEntry, TermMatch, TermPlacement, place_terms
from attent.decoding.options import Hypothesis

MAX_COMBINATIONS = 32  # of the forms of several terms

Phrases = tuple[str, ...]
# From (segment, hypothesis) pairs: the text and the word alignment of each.
AlignHypotheses = Callable[[Sequence[tuple[int, Hypothesis]]], Sequence[tuple[str, Alignment | None]]]
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
