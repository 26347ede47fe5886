"""Sequences of tokens that must come in a target, and how a beam search makes room for them: dynamic beam allocation
(Post and Vilar 2018).

A sequence is met as soon as its tokens have come one behind the other, whoever chose them; one that is demanded twice
must come twice, without overlap. Different sequences may overlap: `New York` holds `York`. How words become tokens is
left to the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, GeneratedTokens, build_continuation_masks, keep_only_tokens
from attent.decoding.options import SearchRequest

Phrase = tuple[int, ...]


class RequiredPhraseError(ValueError):
    """Demands that cannot be met; the message says why and what to do."""


def count_required_phrases(request: SearchRequest) -> Counter[Phrase]:
    """How often each sequence is demanded."""
    return Counter(tuple(one) for one in request.required_phrases if one)


def check_required_length(requests: Iterable[SearchRequest]) -> None:
    """Is there room for all that is demanded?"""
    for job in requests:
        wanted = count_required_phrases(job)
        there = {one: min(count_occurrences(job.prefix_ids, one), times) for one, times in wanted.items()}
        missing = sum(len(one) * (times - there[one]) for one, times in wanted.items())
        needed = len(job.prefix_ids) + missing + 1
        if missing and job.max_length and needed > job.max_length:
            prefix = f", behind a prefix of {len(job.prefix_ids)}," if job.prefix_ids else ""
            raise RequiredPhraseError(
                f"what is demanded must fit into the {job.max_length} tokens that the translation may have, but {missing} "
                f"tokens{prefix} and the end are {needed}; demand less or raise max_length"
            )


def count_occurrences(tokens: Sequence[int], phrase: Phrase) -> int:
    """How often a sequence comes, without overlap."""
    count, at = 0, 0
    while at + len(phrase) <= len(tokens):
        found = tuple(tokens[at : at + len(phrase)]) == phrase
        count, at = count + found, at + (len(phrase) if found else 1)
    return count


def compute_borders(phrase: Phrase, length: int) -> list[list[bool]]:
    """[n][m]: do the first m tokens also stand at the end of the first n? If n break off, m of them still count."""
    return [[m <= n < len(phrase) and phrase[:m] == phrase[n - m : n] for m in range(length)] for n in range(length)]


class RequiredPhrases:
    """What each job demands comes in its target. A state has, for each of C demanded sequences, which one it is, how
    often it must still come and how many of its tokens have just been written; then how many tokens are demanded in
    all, and whether a sequence has just been met.

    Behind a sequence that has just been met, pieces that would `continues` (V,) a word are not allowed: `Haus` is not
    met by `Hausboot`. None: any may follow.
    """

    def __init__(
        self,
        requests: Sequence[SearchRequest],
        *,
        end: int,
        word_continuations: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_required_length(requests)
        every = list(dict.fromkeys(one for job in requests for one in count_required_phrases(job)))
        length = max(map(len, every), default=1)
        self.end = end
        self.continuation_masks = (
            None if word_continuations is None else build_continuation_masks(word_continuations.to(device))
        )
        self.phrase_rows = {one: place for place, one in enumerate(every, 1)}  # 0 is no sequence
        self.max_phrases = max((len(count_required_phrases(job)) for job in requests), default=0) or 1
        rows: list[Phrase] = [(), *every]
        self.phrase_tokens = torch.tensor(
            [[*one, *[-1] * (length - len(one))] for one in rows], device=device
        )  # (D, L)
        self.phrase_lengths = torch.tensor([len(one) for one in rows], device=device)
        self.borders = torch.tensor([compute_borders(one, length) for one in rows], device=device)  # (D, L, L)
        self.prefix_lengths = torch.arange(1, length + 1, device=device)

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        rows = []
        for job in requests:
            wanted = count_required_phrases(job)
            fill = [0] * (self.max_phrases - len(wanted))
            total = sum(len(one) * times for one, times in wanted.items())
            rows.append(
                [
                    *(self.phrase_rows[one] for one in wanted),
                    *fill,
                    *wanted.values(),
                    *fill,
                    *[0] * self.max_phrases,
                    total,
                    0,
                ]
            )
        return torch.tensor(rows, dtype=torch.int64, device=self.phrase_lengths.device).view(
            len(requests), 3 * self.max_phrases + 2
        )

    def _split_state(self, state: Tensor) -> tuple[Tensor, ...]:
        """(R, C) which, times left, tokens written; (R, 1) tokens in all, just met."""
        return state.split([self.max_phrases, self.max_phrases, self.max_phrases, 1, 1], 1)

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        which, left, done, total, _ = self._split_state(state)
        fits = (self.phrase_tokens[which] == token[:, None, None]) & self.borders[which, done]  # (R, C, L)
        done = torch.where(fits, self.prefix_lengths, 0).amax(-1).where(left > 0, 0)
        met = (done == self.phrase_lengths[which]) & (left > 0)
        return torch.cat([which, left - met.long(), done.where(~met, 0), total, met.any(1, keepdim=True).long()], 1)

    def get_next_tokens(self, state: Tensor) -> Tensor:
        """(R, C) The next token of each sequence that is not met, -1 where there is none."""
        which, left, done, _, _ = self._split_state(state)
        return self.phrase_tokens[which, done].where(left > 0, -1)

    def count_missing(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) Tokens that must still come: if what is begun is finished first, and if it is broken off."""
        which, left, done, _, _ = self._split_state(state)
        anew = (left * self.phrase_lengths[which]).sum(1)
        return anew - done.amax(1), anew

    def compute_banks(self, state: Tensor) -> Tensor:
        """(R,) How many of the demanded tokens have come."""
        return state[:, -2] - self.count_missing(state)[0]

    def is_satisfied(self, state: Tensor) -> Tensor:
        """(R,) Has all come?"""
        return self._split_state(state)[1].sum(1) == 0

    def mask_scores(self, scores: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        """No end before all has come. Any other token only while there is room enough; what is missing goes first."""
        missing, anew = self.count_missing(state)
        room = generated.max_lengths - generated.lengths - 2  # for tokens behind the next one and before the end
        wanted = self.get_next_tokens(state)
        values = scores.gather(1, wanted.clamp_min(0))
        helps = self._count_missing_after(state, wanted) <= torch.maximum(room, missing - 1)[:, None]
        scores[:, self.end].masked_fill_(missing > 0, NEG_INF)
        if self.continuation_masks is not None:
            scores.masked_fill_(self.continuation_masks.index_select(0, state[:, -1]), NEG_INF)
        return keep_only_tokens(scores, (missing > 0) & (anew > room), wanted.where(helps, -1), values)

    def _count_missing_after(self, state: Tensor, next_tokens: Tensor) -> Tensor:
        """(R, C) How many tokens would be missing behind each of those wanted?"""
        each = state.repeat_interleave(next_tokens.shape[1], 0)
        return self.count_missing(self.advance_state(each, next_tokens.flatten()))[0].view_as(next_tokens)


def allocate_beams(scores: Tensor, banks: Tensor, beam_size: int) -> Tensor:
    """(B, N), (B, N) -> (B, k) places: the best of each bank, the fullest bank first, then the second best of each, and
    so on; what has -inf comes behind all others."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, banks.gather(1, order).argsort(dim=1, descending=True, stable=True))
    sorted_banks = banks.gather(1, order)  # bank by bank, each from its best to its worst
    place = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    begins = torch.ones_like(sorted_banks, dtype=torch.bool)
    begins[:, 1:] = sorted_banks[:, 1:] != sorted_banks[:, :-1]
    rank = place - torch.where(begins, place, 0).cummax(1).values  # among its bank
    rank = torch.where(scores.gather(1, order) == NEG_INF, scores.shape[1], rank)
    return order.gather(1, rank.argsort(dim=1, stable=True)[:, :beam_size])
