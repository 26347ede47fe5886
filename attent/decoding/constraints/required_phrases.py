"""Phrases that must occur in a target, by dynamic beam allocation (Post and Vilar 2018).

A phrase is a sequence of tokens. It is met once its tokens have been generated consecutively, by the constraint or by
the model; one that is required twice must occur twice, without overlap. Different phrases may overlap (`New York`
contains `York`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, GeneratedTokens, build_continuation_masks, keep_only_tokens
from attent.decoding.constraints.vocabulary import ConstraintSetup
from attent.decoding.options import SearchRequest

Phrase = tuple[int, ...]


class RequiredPhraseError(ValueError):
    """The required phrases do not fit into the maximum length."""


def count_required_phrases(request: SearchRequest) -> Counter[Phrase]:
    return Counter(tuple(phrase) for phrase in request.required_phrases if phrase)


def check_required_length(requests: Iterable[SearchRequest]) -> None:
    for request in requests:
        prefix, max_length = request.prefix_ids, request.max_length
        missing = sum(
            len(phrase) * (count - min(count_occurrences(prefix, phrase), count))
            for phrase, count in count_required_phrases(request).items()
        )
        needed = len(prefix) + missing + 1
        if missing and max_length and needed > max_length:
            after_prefix = f" after a prefix of {len(prefix)}" if prefix else ""
            raise RequiredPhraseError(
                f"the required phrases must fit into max_length={max_length} tokens, but {missing} tokens"
                f"{after_prefix} and the end token make {needed}; require less or raise max_length"
            )


def count_occurrences(tokens: Sequence[int], phrase: Phrase) -> int:
    """Count occurrences without overlap."""
    count, start = 0, 0
    while start + len(phrase) <= len(tokens):
        is_match = tuple(tokens[start : start + len(phrase)]) == phrase
        count, start = count + is_match, start + (len(phrase) if is_match else 1)
    return count


def compute_borders(phrase: Phrase, length: int) -> list[list[bool]]:
    """[n][m]: True if the first m tokens are also the last m of the first n, as in Knuth-Morris-Pratt."""
    return [[m <= n < len(phrase) and phrase[:m] == phrase[n - m : n] for m in range(length)] for n in range(length)]


class RequiredPhrases:
    """Generate each request's required phrases before the end token.

    State: for each of C phrases its row in the table, its remaining count, its tokens matched so far; then the total
    number of required tokens, and whether a phrase has just been met. Right after a met phrase, tokens that would
    extend its last word (`word_continuations` (V,)) are forbidden: `Hausboot` does not contain `Haus`.
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
        counts = [count_required_phrases(request) for request in requests]
        phrases = list(dict.fromkeys(phrase for count in counts for phrase in count))
        length = max(map(len, phrases), default=1)
        self.end = end
        self.continuation_masks = None
        if word_continuations is not None:
            self.continuation_masks = build_continuation_masks(word_continuations.to(device))
        self.phrase_rows = {phrase: row for row, phrase in enumerate(phrases, 1)}  # row 0: no phrase
        self.max_phrases = max(map(len, counts), default=0) or 1
        rows: list[Phrase] = [(), *phrases]
        padded = [[*phrase, *[-1] * (length - len(phrase))] for phrase in rows]
        self.phrase_tokens = torch.tensor(padded, device=device)  # (D, L)
        self.phrase_lengths = torch.tensor([len(phrase) for phrase in rows], device=device)
        self.borders = torch.tensor([compute_borders(phrase, length) for phrase in rows], device=device)  # (D, L, L)
        self.prefix_lengths = torch.arange(1, length + 1, device=device)

    @classmethod
    def build(cls, setup: ConstraintSetup) -> RequiredPhrases | None:
        _, requests, vocabulary = setup
        if not any(request.required_phrases for request in requests):
            return None
        continuations = vocabulary.word_continuations
        return cls(requests, end=vocabulary.end_ids[0], word_continuations=continuations, device=vocabulary.device)

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        rows = []
        for request in requests:
            counts = count_required_phrases(request)
            padding = [0] * (self.max_phrases - len(counts))
            table_rows = [self.phrase_rows[phrase] for phrase in counts]
            total = sum(len(phrase) * count for phrase, count in counts.items())
            rows.append([*table_rows, *padding, *counts.values(), *padding, *[0] * self.max_phrases, total, 0])
        state = torch.tensor(rows, dtype=torch.int64, device=self.phrase_lengths.device)
        return state.view(len(requests), 3 * self.max_phrases + 2)

    def _split_state(self, state: Tensor) -> tuple[Tensor, ...]:
        """Return (R, C) row, remaining count, matched tokens; (R, 1) total tokens, just met."""
        return state.split([self.max_phrases, self.max_phrases, self.max_phrases, 1, 1], 1)

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        row, remaining, matched, total, _ = self._split_state(state)
        extends = (self.phrase_tokens[row] == token[:, None, None]) & self.borders[row, matched]  # (R, C, L)
        matched = torch.where(extends, self.prefix_lengths, 0).amax(-1).where(remaining > 0, 0)
        met = (matched == self.phrase_lengths[row]) & (remaining > 0)
        any_met = met.any(1, keepdim=True).long()
        return torch.cat([row, remaining - met.long(), matched.where(~met, 0), total, any_met], 1)

    def get_next_tokens(self, state: Tensor) -> Tensor:
        """Return (R, C) the next token of each phrase that is not met, else -1."""
        row, remaining, matched, _, _ = self._split_state(state)
        return self.phrase_tokens[row, matched].where(remaining > 0, -1)

    def count_missing(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (R,) the missing tokens if the current phrase is completed, and if it is abandoned."""
        row, remaining, matched, _, _ = self._split_state(state)
        if_abandoned = (remaining * self.phrase_lengths[row]).sum(1)
        return if_abandoned - matched.amax(1), if_abandoned

    def compute_banks(self, state: Tensor) -> Tensor:
        """Return (R,) the number of required tokens generated so far: the bank of Post and Vilar."""
        return state[:, -2] - self.count_missing(state)[0]

    def is_satisfied(self, state: Tensor) -> Tensor:
        return self._split_state(state)[1].sum(1) == 0

    def mask_scores(self, scores: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        """Forbid the end token until all phrases are met, and other tokens once only the missing ones still fit."""
        missing, if_abandoned = self.count_missing(state)
        room = generated.max_lengths - generated.lengths - 2  # tokens after the next one, before the end token
        next_tokens = self.get_next_tokens(state)
        values = scores.gather(1, next_tokens.clamp_min(0))
        helps = self._count_missing_after(state, next_tokens) <= torch.maximum(room, missing - 1)[:, None]
        scores[:, self.end].masked_fill_(missing > 0, NEG_INF)
        if self.continuation_masks is not None:
            scores.masked_fill_(self.continuation_masks.index_select(0, state[:, -1]), NEG_INF)
        must_hurry = (missing > 0) & (if_abandoned > room)
        return keep_only_tokens(scores, must_hurry, next_tokens.where(helps, -1), values)

    def _count_missing_after(self, state: Tensor, next_tokens: Tensor) -> Tensor:
        """Return (R, C) the missing tokens after each of `next_tokens`."""
        repeated = state.repeat_interleave(next_tokens.shape[1], 0)
        return self.count_missing(self.advance_state(repeated, next_tokens.flatten()))[0].view_as(next_tokens)


def allocate_beams(scores: Tensor, banks: Tensor, beam_size: int) -> Tensor:
    """Select (B, k) of N candidates by score and bank (B, N).

    The best of each bank comes first, from the fullest bank down, then the second best of each, and so on; candidates
    with score -inf come last.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, banks.gather(1, order).argsort(dim=1, descending=True, stable=True))
    sorted_banks = banks.gather(1, order)  # bank by bank, each from its best to its worst
    position = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    starts = torch.ones_like(sorted_banks, dtype=torch.bool)
    starts[:, 1:] = sorted_banks[:, 1:] != sorted_banks[:, :-1]
    rank = position - torch.where(starts, position, 0).cummax(1).values  # within its bank
    rank = torch.where(scores.gather(1, order) == NEG_INF, scores.shape[1], rank)
    return order.gather(1, rank.argsort(dim=1, stable=True)[:, :beam_size])
