"""Alignment error rate (AER) of every layer, head and decoder step against gold alignments, and the best of them.

The best is selected on every other sentence and evaluated on the rest, so that its AER is not that of a lucky choice.
`attent.decoding.alignment` derives alignments from attention.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attent.decoding import alignment as word_alignment
from attent.decoding.forced_decoding import check_pairs, encode_pairs
from attent.models import Seq2Seq
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer

LINK_PATTERN = re.compile(r"(\d{1,9})([-?p])(\d{1,9})")
SELECTION_HALF, TEST_HALF = slice(0, None, 2), slice(1, None, 2)
MAX_OUT_OF_RANGE = 0.05  # of the gold links


@dataclass(frozen=True, kw_only=True)
class GoldAlignment:
    """The gold links (source word, target word) of one pair; `possible` includes `sure`."""

    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class AlignmentScores:
    aer: float
    precision: float  # predicted links that are possible
    recall: float  # sure links that are predicted
    num_links: int  # predicted


@dataclass(frozen=True, kw_only=True)
class AlignmentCandidate:
    """One selection of heads, with its AER on the selection half, the test half, and both."""

    choice: word_alignment.HeadSelection
    selection_aer: float
    test_aer: float
    aer: float


@dataclass(frozen=True, kw_only=True)
class AlignmentReport:
    num_sentences: int
    candidates: tuple[AlignmentCandidate, ...]  # in the order of `list_selections`
    best: AlignmentCandidate
    one_way: AlignmentScores  # of the best on the test half, one link for each target word
    mutual: AlignmentScores  # the same, mutual links only
    skipped_links: tuple[str, ...]  # gold links to missing words
    model_fingerprint: str

    @property
    def selection(self) -> word_alignment.MeasuredSelection:
        """The best selection, to save in the model folder."""
        return word_alignment.MeasuredSelection(
            selection=self.best.choice,
            aer=self.best.test_aer,
            sentences=self.num_sentences // 2,
            fingerprint=self.model_fingerprint,
        )


def read_gold_alignments(path: Path) -> list[GoldAlignment]:
    """Read one pair a line: `0-0 1-2` are sure links, source-target from 0; `1?2` or `1p2` a possible one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AttentError(
            f"{path}: must be a text file of alignments such as `0-0 1-2`, but cannot be read: {reason}"
        ) from error
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise AttentError(f"{path}: holds no alignments; give one line for each pair, such as `0-0 1-2`")
    return [parse_gold_alignment(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def parse_gold_alignment(line: str, location: str = "gold") -> GoldAlignment:
    sure, possible = set(), set()
    for word in line.split():
        match = LINK_PATTERN.fullmatch(word)
        if match is None:
            raise AttentError(
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
    """Drop and return links to missing words, of which published sets have one or two; refuse many: other texts."""
    if len(gold) != len(sources):
        raise AttentError(
            f"{location}: must have a line for each pair, but has {len(gold):,} for {len(sources):,} pairs; "
            "give the text that was aligned"
        )
    in_range, dropped = [], []
    for number, (pair, source, target) in enumerate(zip(gold, sources, targets, strict=True), 1):
        num_source, num_target = len(source.split()), len(target.split())
        valid = frozenset(link for link in pair.possible if link[0] < num_source and link[1] < num_target)
        in_range.append(GoldAlignment(sure=pair.sure & valid, possible=valid))
        dropped += [f"{location}:{number}: {link[0]}-{link[1]}" for link in sorted(pair.possible - valid)]
    if len(dropped) > MAX_OUT_OF_RANGE * sum(len(pair.possible) for pair in gold):
        raise AttentError(
            f"{dropped[0]} must be a link between words of the pair, counted from 0, but is out of range, as are "
            f"{len(dropped) - 1:,} more; give the text that was aligned, with spaces between its words, and --src and "
            "--tgt in that order"
        )
    return in_range, tuple(dropped)


def score_alignments(links: Sequence[word_alignment.Links], gold: Sequence[GoldAlignment]) -> AlignmentScores:
    """Och and Ney's AER: 1 - (|A & S| + |A & P|) / (|A| + |S|)."""
    pairs = [(frozenset(predicted), pair) for predicted, pair in zip(links, gold, strict=True)]
    num_links = sum(len(predicted) for predicted, _ in pairs)
    num_sure = sum(len(pair.sure) for _, pair in pairs)
    sure_hits = sum(len(predicted & pair.sure) for predicted, pair in pairs)
    possible_hits = sum(len(predicted & pair.possible) for predicted, pair in pairs)
    return AlignmentScores(
        aer=compute_aer((sure_hits, possible_hits, num_links), num_sure),
        precision=100 * possible_hits / max(1, num_links),
        recall=100 * sure_hits / max(1, num_sure),
        num_links=num_links,
    )


def compute_aer(hits: Sequence[float], num_sure: float) -> float:
    """`hits`: predicted links that are sure, that are possible, and all of them."""
    sure_hits, possible_hits, num_links = hits
    return 100 * (1 - (sure_hits + possible_hits) / max(1, num_links + num_sure))


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
    """Compute the AER of every layer, head and step; `location` is the file that errors name."""
    check_pairs(sources, targets)
    gold, skipped = drop_out_of_range(gold, sources, targets, location)
    if not all(any(pair.sure for pair in gold[half]) for half in (SELECTION_HALF, TEST_HALF)):
        raise AttentError(
            f"{location}: at least two pairs with sure links are needed: one to select by, one to measure on"
        )
    rows, selections = encode_pairs(model, tokenizer, sources, targets, to), word_alignment.list_selections(model)
    counts = torch.zeros(len(rows), len(selections), 3)  # of sure, possible and all predicted links
    for index, weights in word_alignment.compute_word_weights(model, tokenizer, sources, targets, rows):
        counts[index] = count_pair_hits(weights, gold[index])
    num_sure = [len(pair.sure) for pair in gold]
    parts = [(counts[part].sum(0).tolist(), sum(num_sure[part])) for part in (SELECTION_HALF, TEST_HALF, slice(None))]
    candidates = []
    for i, choice in enumerate(selections):
        selection_aer, test_aer, aer = (compute_aer(sums[i], total) for sums, total in parts)
        candidates.append(AlignmentCandidate(choice=choice, selection_aer=selection_aer, test_aer=test_aer, aer=aer))
    best = min(candidates, key=lambda candidate: candidate.selection_aer)  # the first of equals: means before heads
    alignments = word_alignment.align_rows(model, tokenizer, sources, targets, rows, best.choice)[TEST_HALF]
    return AlignmentReport(
        num_sentences=len(gold),
        candidates=tuple(candidates),
        best=best,
        one_way=score_alignments([alignment.all_links for alignment in alignments], gold[TEST_HALF]),
        mutual=score_alignments([alignment.mutual_links for alignment in alignments], gold[TEST_HALF]),
        skipped_links=skipped,
        model_fingerprint=word_alignment.compute_fingerprint(model),
    )


def count_pair_hits(word_weights: Tensor, gold: GoldAlignment) -> Tensor:
    """Count sure, possible and all predicted links: (..., target words, source words) -> (..., 3)."""
    best, is_linked = word_weights.argmax(-1, keepdim=True), word_weights.amax(-1) > 0
    hits = []
    for links in (gold.sure, gold.possible):
        is_gold = torch.zeros(word_weights.shape[-2:])
        for source, target in links:
            is_gold[target, source] = 1
        hits.append((is_gold.expand_as(word_weights).gather(-1, best)[..., 0] * is_linked).sum(-1))
    return torch.stack([*hits, is_linked.sum(-1).float()], -1)
