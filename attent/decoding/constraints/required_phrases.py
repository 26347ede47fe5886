"""Phrases that must occur in a target, by dynamic beam allocation (Post and Vilar 2018).

A phrase is a sequence of tokens. It is met once its tokens have been generated consecutively and the next token does
not extend its last word: `Hausboot` does not contain `Haus`. One that is required twice must occur twice, without
overlap. Different phrases may overlap (`New York` contains `York`).

A token is allowed only if the missing phrases still fit after it, one after the other. So they are always met, unless
banned phrases or n-grams stand in the way; what can never be met is refused before the search.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, Constraint, ConstraintSetup, GeneratedTokens, ban_tokens
from attent.decoding.constraints.phrase_automaton import find_phrase
from attent.decoding.options import SearchRequest
from attent.storage.errors import AttentError

Phrase = tuple[int, ...]
OTHER_TOKEN, OTHER_CONTINUATION = -1, -2  # stand for tokens that no phrase contains; the second extends a word
TOTAL_NEEDED, HAS_BANS = -2, -1  # columns of a state: the tokens that all phrases need, whether phrases are banned
BAN_RESERVE = 2  # tokens kept free to get around a banned phrase, and one more for each missing phrase


def count_required_phrases(request: SearchRequest) -> Counter[Phrase]:
    return Counter(tuple(phrase) for phrase in request.required_phrases if phrase)


def compute_borders(phrase: Phrase, length: int) -> list[list[bool]]:
    """[n][m]: True if the first m tokens are also the last m of the first n, as in Knuth-Morris-Pratt."""
    return [
        [m <= n <= len(phrase) and m < len(phrase) and phrase[:m] == phrase[n - m : n] for m in range(length)]
        for n in range(length + 1)
    ]


class RequiredPhrases(Constraint):
    """Generate each request's required phrases before the end token.

    State: for each of C phrases its row in the table, how often it is missing, and its tokens matched so far; then the
    tokens that all of them need, and whether the request bans phrases. A phrase whose tokens are all matched counts as
    met unless the next token is one that would extend its last word (`word_continuations` (V,)).
    """

    def __init__(
        self,
        requests: Sequence[SearchRequest],
        *,
        end_id: int,
        word_continuations: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        for request in requests:  # at once: the tables of a phrase grow with the square of its length
            longest = max(map(len, request.required_phrases), default=0)
            if request.max_length and longest >= request.max_length + len(request.prefix_ids):
                raise AttentError(
                    f"the required phrases must fit into max_length={request.max_length} tokens, but one has "
                    f"{longest}; require less or raise max_length"
                )
        counts = [count_required_phrases(request) for request in requests]
        phrases = list(dict.fromkeys(phrase for count in counts for phrase in count))
        length = max(map(len, phrases), default=1)
        self.end_id = end_id
        self.word_continuations = None if word_continuations is None else word_continuations.cpu()
        self.has_bans = any(request.banned_phrases for request in requests)
        self.phrase_rows = {phrase: row for row, phrase in enumerate(phrases, 1)}  # row 0: no phrase
        self.max_phrases = max(map(len, counts), default=0) or 1
        rows: list[Phrase] = [(), *phrases]
        padded = [[*phrase, *[-1] * (length + 1 - len(phrase))] for phrase in rows]
        self.phrase_tokens = torch.tensor(padded)  # (D, L + 1)
        self.phrase_lengths = torch.tensor([len(phrase) for phrase in rows])
        self.borders = torch.tensor([compute_borders(phrase, length) for phrase in rows])  # (D, L + 1, L)
        self.prefix_lengths = torch.arange(1, length + 1)
        # A phrase that starts inside a word cannot follow another one directly: it costs one more token.
        self.separator_costs = self._continues_word(self.phrase_tokens[:, 0]).long()
        self._check_lengths(requests)
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    @classmethod
    def build(cls, setup: ConstraintSetup) -> Self | None:
        _, requests, vocabulary = setup
        if not any(request.required_phrases for request in requests):
            return None
        phrases = {
            (phrase, request.banned_phrases) for request in requests for phrase in count_required_phrases(request)
        }
        for phrase, banned_phrases in phrases:
            text = b"".join(vocabulary.token_bytes[token] for token in phrase).decode(errors="replace").strip()
            if vocabulary.tokenizer_vocabulary is not None and vocabulary.tokenizer_vocabulary.unknown in phrase:
                raise AttentError(
                    f"required phrases must have only characters of the model's vocabulary, but `{text}` has others; "
                    f"leave it out"
                )
            if banned := find_phrase(text, banned_phrases):
                raise AttentError(f"`{text}` is required, but contains the banned `{banned}`; leave one out")
        continuations = vocabulary.word_continuations
        return cls(requests, end_id=vocabulary.end_ids[0], word_continuations=continuations, device=vocabulary.device)

    def _check_lengths(self, requests: Sequence[SearchRequest]) -> None:
        missing = self._count_needed(self.build_initial_state(requests)).tolist()
        for i, request in enumerate(requests):
            prefix, max_length = request.prefix_ids, request.max_length
            if prefix and missing[i]:
                state = self.build_initial_state([request])
                for token in prefix:
                    state = self.advance_state(state, torch.tensor([token]))
                missing[i] = int(self._count_needed(state, at_boundary=request.prefix_ends_word))
            needed = len(prefix) + missing[i] + 1
            if missing[i] and max_length and needed > max_length:
                after_prefix = f" after a prefix of {len(prefix)}" if prefix else ""
                raise AttentError(
                    f"the required phrases must fit into max_length={max_length} tokens, but {missing[i]} tokens"
                    f"{after_prefix} and the end token make {needed}; require less or raise max_length"
                )

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        rows = []
        for request in requests:
            counts = count_required_phrases(request)
            padding = [0] * (self.max_phrases - len(counts))
            table_rows = [self.phrase_rows[phrase] for phrase in counts]
            has_bans = int(bool(request.banned_phrases))
            rows.append([*table_rows, *padding, *counts.values(), *padding, *[0] * self.max_phrases, 0, has_bans])
        state = torch.tensor(rows, dtype=torch.int64, device=self.phrase_lengths.device)
        state = state.view(len(requests), 3 * self.max_phrases + 2)
        state[:, TOTAL_NEEDED] = self._count_needed(state)
        return state

    def _split_state(self, state: Tensor) -> tuple[Tensor, ...]:
        row, missing, matched, _ = state.split([self.max_phrases, self.max_phrases, self.max_phrases, 2], 1)
        lengths = self.phrase_lengths[row]
        return row, missing, matched, lengths, (matched == lengths) & (missing > 0)

    def _continues_word(self, token_ids: Tensor) -> Tensor:
        if self.word_continuations is None:
            return torch.zeros_like(token_ids, dtype=torch.bool)
        return (self.word_continuations[token_ids.clamp_min(0)] & (token_ids >= 0)) | (token_ids == OTHER_CONTINUATION)

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        row, missing, matched, _, is_complete = self._split_state(state)
        is_met = is_complete & ~self._continues_word(token)[:, None]
        missing, matched = missing - is_met.long(), matched.where(~is_met, 0)
        extends = (self.phrase_tokens[row, :-1] == token[:, None, None]) & self.borders[row, matched]  # (R, C, L)
        matched = torch.where(extends, self.prefix_lengths, 0).amax(-1).where(missing > 0, 0)
        return torch.cat([row, missing, matched, state[:, TOTAL_NEEDED:]], 1)

    def get_next_tokens(self, state: Tensor) -> Tensor:
        """Return (R, C) the next token of each phrase that is not met, else -1."""
        row, missing, matched, _, is_complete = self._split_state(state)
        return self.phrase_tokens[row, matched.where(~is_complete, 0)].where(missing > is_complete.long(), -1)

    def _count_needed(self, state: Tensor, *, at_boundary: bool = False) -> Tensor:
        """Return (R,) the fewest tokens that meet all phrases: finish the phrase in progress or drop it, whichever is
        shorter, then append the others. `at_boundary`: no word can be continued here."""
        row, missing, matched, lengths, is_complete = self._split_state(state)
        separator_costs = self.separator_costs[row]
        costs = lengths + separator_costs
        if_lost = (missing * costs).sum(1)  # if the next token extends the word of a complete phrase
        if_met = if_lost - (is_complete * costs).sum(1)
        starts_inside_word = ((missing > is_complete.long()) & (separator_costs > 0)).any(1)
        abandoned = if_met - (starts_inside_word & ~is_complete.any(1) & (not at_boundary)).long()
        extends_word = self._continues_word(self.phrase_tokens[row, matched])
        completed = torch.where(extends_word, if_lost[:, None], if_met[:, None]) - matched - separator_costs
        can_complete = (matched > 0) & ~is_complete & ~(extends_word & at_boundary)
        return torch.minimum(abandoned, completed.where(can_complete, if_lost[:, None]).amin(1))

    def compute_banks(self, state: Tensor) -> Tensor:
        """Return (R,) the number of required tokens generated so far: the bank of Post and Vilar."""
        return state[:, TOTAL_NEEDED] - self._count_needed(state)

    def is_satisfied(self, state: Tensor) -> Tensor:
        _, missing, _, _, is_complete = self._split_state(state)
        return missing.sum(1) == is_complete.sum(1)

    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        """Forbid the end token until all phrases are met, tokens that extend the last word of a complete phrase except
        to continue another one, and tokens after which the missing phrases would not fit."""
        row, missing, matched, _, is_complete = self._split_state(state)
        any_complete = is_complete.any(1, keepdim=True)
        logits[:, self.end_id].masked_fill_(~self.is_satisfied(state), NEG_INF)
        # Tokens that continue a phrase, and those that restart one.
        in_progress = (matched > 0) & ~is_complete
        first = self.phrase_tokens[row, 0].where(missing > is_complete.long(), -1)
        first = first.where(~(any_complete & self._continues_word(first)), -1)
        tokens = torch.cat([self.phrase_tokens[row, matched].where(in_progress, -1), first], 1)
        values = logits.gather(1, tokens.clamp_min(0)).where(tokens >= 0, NEG_INF)
        logits = ban_tokens(logits, tokens, tokens >= 0)
        others = torch.tensor([OTHER_TOKEN, OTHER_CONTINUATION], device=state.device).expand(len(state), 2)
        needed, needed_others = self._count_needed_after(state, tokens), self._count_needed_after(state, others)
        room = (generated.max_lengths - generated.lengths - 2)[:, None]  # after the next token, before the end token

        def keep_fitting(room: Tensor, may_extend: bool = False) -> Tensor:
            is_short, is_short_extended = ((needed_others > room) & (needed_others > 0)).split(1, 1)
            if self.word_continuations is not None:
                is_short_extended = is_short_extended | (any_complete & (not may_extend))
                is_short = torch.where(self.word_continuations, is_short_extended, is_short)
            fitting = values.masked_fill((needed > room) & (needed > 0), NEG_INF)
            return logits.masked_fill(is_short, NEG_INF).scatter_reduce(1, tokens.clamp_min(0), fitting, "amax")

        if not self.has_bans:
            return keep_fitting(room)
        reserve = (BAN_RESERVE + (missing - is_complete.long()).sum(1, keepdim=True)) * state[:, HAS_BANS, None]
        allowed = keep_fitting(room - reserve)
        for relaxed in (keep_fitting(room), keep_fitting(room, may_extend=True)):
            allowed = torch.where(allowed.amax(1, keepdim=True) > NEG_INF, allowed, relaxed)
        return allowed

    def _count_needed_after(self, state: Tensor, tokens: Tensor) -> Tensor:
        repeated = state.repeat_interleave(tokens.shape[1], 0)
        return self._count_needed(self.advance_state(repeated, tokens.flatten())).view_as(tokens)


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
