"""Alignment error rate: a model's word alignments against those that people drew, for every layer and head and for both
steps at which one can look; and the best of them.

It is chosen by one half of the sentences, every other one, and told of the other half, so that the figure is not that
of a lucky choice. How alignments are read off a model is `attent.decode.align`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attent.decoding.alignment import (
    HeadSelection,
    Links,
    MeasuredSelection,
    align_rows,
    compute_fingerprint,
    compute_word_weights,
    count_mutual_links,
    get_default_selection,
    list_selections,
)
from attent.decoding.forced_decoding import EncodedPair, check_pairs, encode_pairs
from attent.models import Seq2Seq

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer

LINK_PATTERN = re.compile(r"(\d{1,9})([-?p])(\d{1,9})")
SELECTION_HALF, TEST_HALF = slice(0, None, 2), slice(1, None, 2)
MAX_OUT_OF_RANGE = 0.05  # of the links by hand


class GoldAlignmentError(ValueError):
    """Alignments by hand that cannot be used, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class GoldAlignment:
    """What people drew for one pair: links that must be there, and those that may be, among which are the former."""

    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class AlignmentScores:
    """In percent."""

    aer: float  # alignment error rate, less is better
    precision: float  # of the links made, those that may be there
    recall: float  # of the links that must be there, those made
    num_links: int  # made


@dataclass(frozen=True, kw_only=True)
class AlignmentCandidate:
    """One place to look at, by the half that chose and by the other."""

    choice: HeadSelection
    selection_aer: float  # AER
    test_aer: float
    aer: float


@dataclass(frozen=True, kw_only=True)
class AlignmentReport:
    num_sentences: int
    candidates: tuple[
        AlignmentCandidate, ...
    ]  # in order: when written, when read; layers; mean of the heads, then each
    best: AlignmentCandidate
    by_agreement: AlignmentCandidate  # what would have been chosen without alignments by hand
    default: AlignmentCandidate  # what an unmeasured model is aligned by
    one_way: AlignmentScores  # of the best on the half held out, a link for each target word
    mutual: AlignmentScores  # the same, only links that are the best of both their words
    skipped_links: tuple[str, ...]  # links by hand to words that are not there
    model_fingerprint: str

    @property
    def selection(self) -> MeasuredSelection:
        """To remember in the model's folder."""
        return MeasuredSelection(
            selection=self.best.choice,
            aer=self.best.test_aer,
            sentences=self.num_sentences // 2,
            fingerprint=self.model_fingerprint,
        )


# ---- what people drew ------------------------------------------------------------------------------------------------


def read_gold_alignments(path: Path) -> list[GoldAlignment]:
    """One pair a line: `0-0 1-2` are sure links, source-target from 0; `1?2` or `1p2` a possible one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise GoldAlignmentError(
            f"{path}: must be a file of alignments, but cannot be read ({error.strerror})"
        ) from error
    except UnicodeDecodeError as error:
        raise GoldAlignmentError(f"{path}: must be a text file of alignments such as `0-0 1-2`, but is none") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise GoldAlignmentError(f"{path}: holds no alignments; give one line for each pair, such as `0-0 1-2`")
    return [parse_gold_alignment(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def parse_gold_alignment(line: str, location: str = "gold") -> GoldAlignment:
    sure, possible = set(), set()
    for word in line.split():
        match = LINK_PATTERN.fullmatch(word)
        if match is None:
            raise GoldAlignmentError(
                f"{location}: a link must be two numbers such as 3-4, or 3?4 for a possible one, but is {word[:40]!r}; "
                "correct the line"
            )
        link = int(match[1]), int(match[3])
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return GoldAlignment(sure=frozenset(sure), possible=frozenset(possible))


def drop_out_of_range(
    gold: Sequence[GoldAlignment], sources: Sequence[str], targets: Sequence[str], location: str = "gold"
) -> tuple[list[GoldAlignment], tuple[str, ...]]:
    """The alignments without the links to words that are not there, and these, such as `gold:63: 12-16`.

    Published sets have one or two of them; many mean that these are alignments of other texts, which are refused.
    """
    if len(gold) != len(sources):
        raise GoldAlignmentError(
            f"{location}: must have a line for each pair, but has {len(gold):,} for {len(sources):,} pairs; "
            "give the text that was aligned"
        )
    kept, outside = [], []
    for number, (one, source, target) in enumerate(zip(gold, sources, targets, strict=True), 1):
        words = len(source.split()), len(target.split())
        inside = frozenset(link for link in one.possible if link[0] < words[0] and link[1] < words[1])
        kept.append(GoldAlignment(sure=one.sure & inside, possible=inside))
        outside += [f"{location}:{number}: {link[0]}-{link[1]}" for link in sorted(one.possible - inside)]
    if len(outside) > MAX_OUT_OF_RANGE * sum(len(one.possible) for one in gold):
        raise GoldAlignmentError(
            f"{outside[0]} must be a link between words of the pair, counted from 0, but is beyond its last, as are "
            f"{len(outside) - 1:,} more; give the text that was aligned, its words between spaces, and --src and --tgt "
            "in that order"
        )
    return kept, tuple(outside)


def score_alignments(links: Sequence[Links], gold: Sequence[GoldAlignment]) -> AlignmentScores:
    """Och and Ney's AER: 1 - (|A & S| + |A & P|) / (|A| + |S|)."""
    pairs = [(frozenset(made), one) for made, one in zip(links, gold, strict=True)]
    made = sum(len(a) for a, _ in pairs)
    sure = sum(len(one.sure) for _, one in pairs)
    right = sum(len(a & one.sure) for a, one in pairs)
    allowed = sum(len(a & one.possible) for a, one in pairs)
    return AlignmentScores(
        aer=compute_aer(right, allowed, made, sure),
        precision=100 * allowed / max(1, made),
        recall=100 * right / max(1, sure),
        num_links=made,
    )


def compute_aer(sure_hits: float, possible_hits: float, num_links: float, num_sure: float, /) -> float:
    return 100 * (1 - (sure_hits + possible_hits) / max(1, num_links + num_sure))


# ---- every place to look at ------------------------------------------------------------------------------------------


def evaluate_alignment(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    gold: Sequence[GoldAlignment],
    *,
    to: str | None = None,
    location: str = "gold",
) -> AlignmentReport:
    """The error rate of every layer, head and step; `where` is the file that errors will name."""
    check_pairs(sources, targets)
    gold, left_out = drop_out_of_range(gold, sources, targets, location)
    if (
        len(gold) < 2
        or not any(one.sure for one in gold[SELECTION_HALF])
        or not any(one.sure for one in gold[TEST_HALF])
    ):
        raise GoldAlignmentError(
            f"{location}: two pairs with sure links are needed at least: one to choose by, one to measure on"
        )
    rows = encode_pairs(model, tokenizer, sources, targets, to)
    counts, shares = count_hits(model, tokenizer, sources, targets, rows, gold)
    candidates = tuple(rank_candidates(counts, gold, list_selections(model)))
    best = min(candidates, key=lambda one: one.selection_aer)  # of equals the first: means before single heads
    made = align_rows(model, tokenizer, sources, targets, rows, best.choice)
    return AlignmentReport(
        num_sentences=len(gold),
        candidates=candidates,
        best=best,
        by_agreement=candidates[int((shares[:, 0] / shares[:, 1].clamp(min=1)).argmax())],
        default=next(one for one in candidates if one.choice == get_default_selection(model)),
        one_way=score_alignments([one.links for one in made[TEST_HALF]], gold[TEST_HALF]),
        mutual=score_alignments([one.mutual_links for one in made[TEST_HALF]], gold[TEST_HALF]),
        skipped_links=left_out,
        model_fingerprint=compute_fingerprint(model),
    )


def count_hits(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    rows: Sequence[EncodedPair],
    gold: Sequence[GoldAlignment],
) -> tuple[Tensor, Tensor]:
    """(pairs, choices, 3): links that are sure, possible, made; and (choices, 2): those that are mutual, and all."""
    every = len(list_selections(model))
    counts, shares = torch.zeros(len(rows), every, 3), torch.zeros(every, 2)
    for place, weights in compute_word_weights(model, tokenizer, sources, targets, rows):
        counts[place] = count_pair_hits(weights, gold[place])
        shares += count_mutual_links(weights)
    return counts, shares


def count_pair_hits(word_weights: Tensor, gold: GoldAlignment) -> Tensor:
    """(..., target words, source words) -> (..., 3)."""
    best, made = word_weights.argmax(-1, keepdim=True), word_weights.amax(-1) > 0
    found = []
    for links in (gold.sure, gold.possible):
        right = torch.zeros(word_weights.shape[-2:])
        for source, target in links:
            right[target, source] = 1
        found.append((right.expand_as(word_weights).gather(-1, best)[..., 0] * made).sum(-1))
    return torch.stack([*found, made.sum(-1).float()], -1)


def rank_candidates(
    counts: Tensor, gold: Sequence[GoldAlignment], choices: Sequence[HeadSelection]
) -> Iterator[AlignmentCandidate]:
    sure = [len(one.sure) for one in gold]
    parts = [(counts[part].sum(0).tolist(), sum(sure[part])) for part in (SELECTION_HALF, TEST_HALF, slice(None))]
    for number, choice in enumerate(choices):
        rates = []
        for sums, total in parts:
            right, allowed, made = sums[number]
            rates.append(compute_aer(right, allowed, made, total))
        yield AlignmentCandidate(choice=choice, selection_aer=rates[0], test_aer=rates[1], aer=rates[2])
