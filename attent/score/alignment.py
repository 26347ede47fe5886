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

from attent.decode.align import (
    Choice,
    Links,
    Measured,
    align_rows,
    choices,
    default_choice,
    everywhere,
    mark,
    mutual_links,
)
from attent.decode.force import Row, check_pairs, encoded
from attent.models import Seq2Seq

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer

LINK = re.compile(r"(\d{1,9})([-?p])(\d{1,9})")
CHOSEN_BY, HELD_OUT = slice(0, None, 2), slice(1, None, 2)
MOST_OUTSIDE = 0.05  # of the links by hand


class GoldError(ValueError):
    """Alignments by hand that cannot be used, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Gold:
    """What people drew for one pair: links that must be there, and those that may be, among which are the former."""

    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """In percent."""

    aer: float  # alignment error rate, less is better
    precision: float  # of the links made, those that may be there
    recall: float  # of the links that must be there, those made
    links: int  # made


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One place to look at, by the half that chose and by the other."""

    choice: Choice
    chosen_by: float  # AER
    held_out: float
    all: float


@dataclass(frozen=True, kw_only=True)
class AlignmentReport:
    sentences: int
    candidates: tuple[Candidate, ...]  # in order: when written, when read; layers; mean of the heads, then each
    best: Candidate
    agreed: Candidate  # what would have been chosen without alignments by hand
    default: Candidate  # what an unmeasured model is aligned by
    each: Quality  # of the best on the half held out, a link for each target word
    mutual: Quality  # the same, only links that are the best of both their words
    left_out: tuple[str, ...]  # links by hand to words that are not there
    model: str

    @property
    def measured(self) -> Measured:
        """To remember in the model's folder."""
        return Measured(
            choice=self.best.choice, aer=self.best.held_out, sentences=self.sentences // 2, model=self.model
        )


# ---- what people drew ------------------------------------------------------------------------------------------------


def read_gold(path: Path) -> list[Gold]:
    """One pair a line: `0-0 1-2` are sure links, source-target from 0; `1?2` or `1p2` a possible one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise GoldError(f"{path}: must be a file of alignments, but cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise GoldError(f"{path}: must be a text file of alignments such as `0-0 1-2`, but is none") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise GoldError(f"{path}: holds no alignments; give one line for each pair, such as `0-0 1-2`")
    return [parse_gold(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def parse_gold(line: str, where: str = "gold") -> Gold:
    sure, possible = set(), set()
    for word in line.split():
        match = LINK.fullmatch(word)
        if match is None:
            raise GoldError(
                f"{where}: a link must be two numbers such as 3-4, or 3?4 for a possible one, but is {word[:40]!r}; "
                "correct the line"
            )
        link = int(match[1]), int(match[3])
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return Gold(sure=frozenset(sure), possible=frozenset(possible))


def fitting(
    gold: Sequence[Gold], sources: Sequence[str], targets: Sequence[str], where: str = "gold"
) -> tuple[list[Gold], tuple[str, ...]]:
    """The alignments without the links to words that are not there, and these, such as `gold:63: 12-16`.

    Published sets have one or two of them; many mean that these are alignments of other texts, which are refused.
    """
    if len(gold) != len(sources):
        raise GoldError(
            f"{where}: must have a line for each pair, but has {len(gold):,} for {len(sources):,} pairs; "
            "give the text that was aligned"
        )
    kept, outside = [], []
    for number, (one, source, target) in enumerate(zip(gold, sources, targets, strict=True), 1):
        words = len(source.split()), len(target.split())
        inside = frozenset(link for link in one.possible if link[0] < words[0] and link[1] < words[1])
        kept.append(Gold(sure=one.sure & inside, possible=inside))
        outside += [f"{where}:{number}: {link[0]}-{link[1]}" for link in sorted(one.possible - inside)]
    if len(outside) > MOST_OUTSIDE * sum(len(one.possible) for one in gold):
        raise GoldError(
            f"{outside[0]} must be a link between words of the pair, counted from 0, but is beyond its last, as are "
            f"{len(outside) - 1:,} more; give the text that was aligned, its words between spaces, and --src and --tgt "
            "in that order"
        )
    return kept, tuple(outside)


def quality(links: Sequence[Links], gold: Sequence[Gold]) -> Quality:
    """Och and Ney's AER: 1 - (|A & S| + |A & P|) / (|A| + |S|)."""
    pairs = [(frozenset(made), one) for made, one in zip(links, gold, strict=True)]
    made = sum(len(a) for a, _ in pairs)
    sure = sum(len(one.sure) for _, one in pairs)
    right = sum(len(a & one.sure) for a, one in pairs)
    allowed = sum(len(a & one.possible) for a, one in pairs)
    return Quality(
        aer=error_rate(right, allowed, made, sure),
        precision=100 * allowed / max(1, made),
        recall=100 * right / max(1, sure),
        links=made,
    )


def error_rate(right: float, allowed: float, made: float, sure: float, /) -> float:
    return 100 * (1 - (right + allowed) / max(1, made + sure))


# ---- every place to look at ------------------------------------------------------------------------------------------


def measure(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    gold: Sequence[Gold],
    *,
    to: str | None = None,
    where: str = "gold",
) -> AlignmentReport:
    """The error rate of every layer, head and step; `where` is the file that errors will name."""
    check_pairs(sources, targets)
    gold, left_out = fitting(gold, sources, targets, where)
    if len(gold) < 2 or not any(one.sure for one in gold[CHOSEN_BY]) or not any(one.sure for one in gold[HELD_OUT]):
        raise GoldError(f"{where}: two pairs with sure links are needed at least: one to choose by, one to measure on")
    rows = encoded(model, tokenizer, sources, targets, to)
    counts, shares = counted(model, tokenizer, sources, targets, rows, gold)
    candidates = tuple(told(counts, gold, choices(model)))
    best = min(candidates, key=lambda one: one.chosen_by)  # of equals the first: means before single heads
    made = align_rows(model, tokenizer, sources, targets, rows, best.choice)
    return AlignmentReport(
        sentences=len(gold),
        candidates=candidates,
        best=best,
        agreed=candidates[int((shares[:, 0] / shares[:, 1].clamp(min=1)).argmax())],
        default=next(one for one in candidates if one.choice == default_choice(model)),
        each=quality([one.links for one in made[HELD_OUT]], gold[HELD_OUT]),
        mutual=quality([one.mutual for one in made[HELD_OUT]], gold[HELD_OUT]),
        left_out=left_out,
        model=mark(model),
    )


def counted(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    rows: Sequence[Row],
    gold: Sequence[Gold],
) -> tuple[Tensor, Tensor]:
    """(pairs, choices, 3): links that are sure, possible, made; and (choices, 2): those that are mutual, and all."""
    every = len(choices(model))
    counts, shares = torch.zeros(len(rows), every, 3), torch.zeros(every, 2)
    for place, weights in everywhere(model, tokenizer, sources, targets, rows):
        counts[place] = hits(weights, gold[place])
        shares += mutual_links(weights)
    return counts, shares


def hits(by_word: Tensor, gold: Gold) -> Tensor:
    """(..., target words, source words) -> (..., 3)."""
    best, made = by_word.argmax(-1, keepdim=True), by_word.amax(-1) > 0
    found = []
    for links in (gold.sure, gold.possible):
        right = torch.zeros(by_word.shape[-2:])
        for source, target in links:
            right[target, source] = 1
        found.append((right.expand_as(by_word).gather(-1, best)[..., 0] * made).sum(-1))
    return torch.stack([*found, made.sum(-1).float()], -1)


def told(counts: Tensor, gold: Sequence[Gold], places: Sequence[Choice]) -> Iterator[Candidate]:
    sure = [len(one.sure) for one in gold]
    parts = [(counts[part].sum(0).tolist(), sum(sure[part])) for part in (CHOSEN_BY, HELD_OUT, slice(None))]
    for number, choice in enumerate(places):
        rates = []
        for sums, total in parts:
            right, allowed, made = sums[number]
            rates.append(error_rate(right, allowed, made, total))
        yield Candidate(choice=choice, chosen_by=rates[0], held_out=rates[1], all=rates[2])
