"""Phrases that must not occur in a target, however the tokenizer splits them and in any case.

The rows of a search run the automaton of `phrase_automaton` on the device. Tokens with incomplete characters are
decoded byte by byte, as UTF-8.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, Constraint, ConstraintSetup, GeneratedTokens
from attent.decoding.constraints.phrase_automaton import (
    HIDDEN,
    OTHER,
    REJECTED,
    UNICODE_SIZE,
    WORD,
    PhraseList,
    TokenSpellings,
    get_char_kinds,
)
from attent.decoding.options import SearchRequest

# An incomplete character as an integer: bits of its code point so far, bytes left, bytes in all.
CODE_MASK, ONE_BYTE_LEFT, LENGTH_SHIFT = (1 << 21) - 1, 1 << 21, 24
MIN_CODE_POINTS = (0, 0, 0x80, 0x800, 0x10000)  # smallest code point that needs this many bytes


class BannedPhrases(Constraint):
    """Generate no phrase of a request's list, except in its prefix.

    State: the automaton's state, the incomplete character, the automaton's start state, and the prefix tokens left. The
    text must not end in a banned phrase either; so that truncation cannot cause it, the last two tokens complete none.
    """

    def __init__(
        self, requests: Sequence[SearchRequest], spellings: TokenSpellings, device: torch.device | str = "cpu"
    ) -> None:
        tables = spellings.get_tables(frozenset(get_banned_list(request) for request in requests))
        self.start_states, self.end = tables.start_states, spellings.end
        self.char_transitions = torch.from_numpy(tables.char_transitions).to(device)
        self.first_class = torch.from_numpy(tables.first_class).to(device).long()
        self.row_index = torch.from_numpy(tables.row_index).to(device)
        self.next_state = torch.from_numpy(tables.next_state).to(device)
        self.banned_tokens = torch.from_numpy(tables.banned_tokens).to(device)
        self.ends_in_match = torch.from_numpy(tables.ends_in_match).to(device)
        self.has_no_whole_char = torch.from_numpy(spellings.lengths == 0).to(device)
        self.partial_char_token_ids = torch.tensor(spellings.partial_char_token_ids, dtype=torch.int64, device=device)
        if not spellings.partial_char_token_ids:
            return
        self.head_bytes = torch.from_numpy(spellings.head_bytes).to(device, torch.int64)
        self.tail_bytes = torch.from_numpy(spellings.tail_bytes).to(device, torch.int64)
        self.has_only_bytes = not spellings.lengths[spellings.partial_char_token_ids].any()  # as in SentencePiece
        self.partial_rows = torch.zeros(spellings.size, dtype=torch.int64, device=device)  # of head_bytes, tail_bytes
        self.partial_rows[self.partial_char_token_ids] = torch.arange(
            1, len(self.partial_char_token_ids) + 1, device=device
        )
        self.char_classes = torch.from_numpy(tables.char_classes).to(device)
        continues_word = np.isin(get_char_kinds(), (WORD, HIDDEN))
        self.word_char_counts = torch.from_numpy(np.concatenate([[0], continues_word.cumsum()])).to(device)
        self.lead_states = torch.tensor([decode_lead_byte(byte) for byte in range(256)], device=device)
        self.min_code_points = torch.tensor(MIN_CODE_POINTS, device=device)

    @classmethod
    def build(cls, setup: ConstraintSetup) -> Self | None:
        if not any(request.banned_phrases for request in setup.requests):
            return None
        return cls(setup.requests, setup.vocabulary.spellings, setup.vocabulary.device)

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        starts = [self.start_states[get_banned_list(request)] for request in requests]
        rows = [[start, 0, start, 0] for start in starts]
        state = torch.tensor(rows, dtype=torch.int64, device=self.char_transitions.device).view(len(requests), 4)
        for i, request in enumerate(requests):
            if request.prefix_ids and request.banned_phrases:
                state[i] = self._advance_prefix(request, state[i : i + 1])
        return state

    def _advance_prefix(self, request: SearchRequest, state: Tensor) -> Tensor:
        """Return the state (1, 4) after the prefix, in advance: a phrase in the prefix is allowed."""
        initial = state
        for token_id in request.prefix_ids:
            token = torch.tensor([token_id], device=state.device)
            state = self.advance_state(state, token)
            if bool(state[0, 0] == initial[0, 0]):  # restarted after a banned phrase: the token may begin another
                state = self.advance_state(initial, token)
        automaton_state, partial_char, start, _ = state.unbind(1)
        if request.prefix_ends_word:  # a banned phrase at its end is complete and stays
            automaton_state = torch.where(self.ends_in_match[automaton_state], start, automaton_state)
        return torch.stack(
            [automaton_state, partial_char, start, torch.full_like(automaton_state, len(request.prefix_ids))], 1
        )

    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        automaton_state, partial_char, _, _ = state.unbind(1)
        near_limit = generated.max_lengths - generated.lengths <= 2
        if not len(self.partial_char_token_ids):
            return logits.masked_fill_(self._get_banned_tokens(automaton_state, near_limit), NEG_INF)
        is_banned = self._get_banned_partials(automaton_state, partial_char, near_limit)
        partial_logits = logits.index_select(1, self.partial_char_token_ids).masked_fill_(is_banned, NEG_INF)
        broken = self._break_character(automaton_state, partial_char > 0)
        logits.masked_fill_(self._get_banned_tokens(broken, near_limit), NEG_INF)
        return logits.index_copy_(1, self.partial_char_token_ids, partial_logits)

    def _get_banned_tokens(self, automaton_state: Tensor, near_limit: Tensor) -> Tensor:
        return self.banned_tokens.index_select(0, automaton_state + near_limit * (len(self.banned_tokens) // 2))

    def is_satisfied(self, state: Tensor) -> Tensor:
        automaton_state, partial_char, _, _ = state.unbind(1)
        return ~self.banned_tokens[self._break_character(automaton_state, partial_char > 0), self.end]

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        automaton_state, partial_char, start, prefix_left = state.unbind(1)
        if len(self.partial_char_token_ids):
            next_automaton_state, next_char = self._advance_token(automaton_state, partial_char, token)
        else:
            next_automaton_state, next_char = self._advance_whole_chars(automaton_state, token), partial_char
        # A banned phrase that was generated nevertheless restarts the automaton.
        next_automaton_state = torch.where(next_automaton_state == REJECTED, start, next_automaton_state)
        in_prefix = prefix_left > 0
        automaton_state = torch.where(in_prefix, automaton_state, next_automaton_state)
        partial_char = torch.where(in_prefix, partial_char, next_char)
        return torch.stack([automaton_state, partial_char, start, (prefix_left - 1).clamp_min(0)], 1)

    def _advance_whole_chars(self, automaton_state: Tensor, token: Tensor) -> Tensor:
        row = self.row_index[automaton_state, self.first_class[token]].long()
        return torch.where(self.has_no_whole_char[token], automaton_state, self.next_state[row, token].long())

    # --- incomplete characters ---

    def _get_banned_partials(self, automaton_state: Tensor, partial_char: Tensor, near_limit: Tensor) -> Tensor:
        automaton_state, partial_char = self._advance_token(
            automaton_state[:, None], partial_char[:, None], self.partial_char_token_ids
        )
        # Code points that an incomplete character can become; does one of them continue a word?
        shift = 6 * (partial_char >> 21 & 7)
        low = (partial_char & CODE_MASK) << shift
        low = torch.maximum(low, self.min_code_points[partial_char >> LENGTH_SHIFT]).clamp_max(UNICODE_SIZE)
        high = (((partial_char & CODE_MASK) + 1) << shift).clamp_max(UNICODE_SIZE)
        can_continue = self.word_char_counts[torch.maximum(low, high)] > self.word_char_counts[low]
        cannot_continue = (partial_char > 0) & ~can_continue
        return (automaton_state == REJECTED) | (
            self.ends_in_match[automaton_state] & (near_limit[:, None] | cannot_continue)
        )

    def _advance_token(self, automaton_state: Tensor, partial_char: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        row, has_text = self.partial_rows[token], ~self.has_no_whole_char[token]
        for byte in self.head_bytes[row].unbind(-1):
            automaton_state, partial_char = self._advance_byte(automaton_state, partial_char, byte)
        if token is self.partial_char_token_ids and self.has_only_bytes:
            return automaton_state, partial_char
        automaton_state = self._break_character(automaton_state, has_text & (partial_char > 0))
        partial_char = partial_char.where(~has_text, 0)
        automaton_state = self._advance_whole_chars(automaton_state, token)
        for byte in self.tail_bytes[row].unbind(-1):
            automaton_state, partial_char = self._advance_byte(automaton_state, partial_char, byte)
        return automaton_state, partial_char

    def _break_character(self, automaton_state: Tensor, mask: Tensor) -> Tensor:
        """An incomplete character is decoded as a replacement character, which is not a letter."""
        return torch.where(mask, self.char_transitions[automaton_state, OTHER].long(), automaton_state)

    def _advance_byte(self, automaton_state: Tensor, partial_char: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state after a byte of 0x80 or more; a byte below 0 is padding."""
        is_trail = (byte >= 0x80) & (byte < 0xC0)
        lead_state = self.lead_states[byte.clamp_min(0)]
        code = (partial_char & CODE_MASK) << 6 | (byte & 63)
        continues = is_trail & (partial_char > 0)
        completes = continues & (partial_char & ~CODE_MASK & ((1 << LENGTH_SHIFT) - 1) == ONE_BYTE_LEFT)
        is_stray = (byte >= 0) & ~continues & (lead_state == 0)
        automaton_state = self._break_character(
            automaton_state, is_stray | ((byte >= 0) & ~is_trail & (partial_char > 0))
        )
        is_valid = completes & (code >= self.min_code_points[partial_char >> LENGTH_SHIFT]) & (code < UNICODE_SIZE)
        char_class = torch.where(is_valid, self.char_classes[code.clamp_max(UNICODE_SIZE - 1)], OTHER).long()
        automaton_state = torch.where(
            completes, self.char_transitions[automaton_state, char_class].long(), automaton_state
        )
        longer = (partial_char & ~CODE_MASK) - ONE_BYTE_LEFT | code
        next_char = torch.where(continues, longer.where(~completes, 0), lead_state)
        return automaton_state, torch.where(byte >= 0, next_char, partial_char)


def get_banned_list(request: SearchRequest) -> PhraseList:
    return tuple(sorted(set(request.banned_phrases)))


def decode_lead_byte(byte: int) -> int:
    """Return the incomplete character that a lead byte starts; 0: it is not a lead byte."""
    for length, low, high in ((2, 0xC2, 0xE0), (3, 0xE0, 0xF0), (4, 0xF0, 0xF5)):
        if low <= byte < high:
            return length << LENGTH_SHIFT | (length - 1) * ONE_BYTE_LEFT | byte & (0x7F >> length)
    return 0
