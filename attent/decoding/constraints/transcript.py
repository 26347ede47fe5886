"""Whisper's rules for transcripts: which tokens may come first, and where timestamps may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, GeneratedTokens
from attent.decoding.constraints.vocabulary import ConstraintSetup
from attent.decoding.options import SearchRequest, TranscriptRules


class TranscriptConstraint:
    """Ban certain tokens at the start and, if there are timestamps, enclose each segment in two that increase.

    A transcript starts with a timestamp, which text follows; after the timestamp at the end of a segment comes that of
    the next segment, at the same time or later, or the end. Where all timestamps together are more probable than each
    of the other tokens, one of them comes next. State: the number of tokens after the prefix (negative inside it),
    whether the last of them and the one before it are timestamps, and the last timestamp.
    """

    def __init__(self, rules: TranscriptRules, vocab: int, end_id: int, device: torch.device | str = "cpu") -> None:
        self.has_timestamps = rules.first_timestamp is not None
        self.first_timestamp = vocab if rules.first_timestamp is None else rules.first_timestamp
        self.ids = torch.arange(vocab, device=device)
        self.is_timestamp, self.is_text = self.ids >= self.first_timestamp, self.ids < end_id  # (V,)
        self.is_banned = self.ids == self.first_timestamp - 1  # <|notimestamps|>, which only a prompt contains
        self.is_banned_first = torch.isin(self.ids, torch.tensor(rules.banned_first, dtype=torch.int64, device=device))
        if self.has_timestamps:
            limit = vocab if rules.max_initial_timestamp is None else self.first_timestamp + rules.max_initial_timestamp
            self.is_banned_first |= ~self.is_timestamp | (self.ids > limit)

    @classmethod
    def build(cls, setup: ConstraintSetup) -> TranscriptConstraint | None:
        rules, vocabulary = setup.options.transcript_rules, setup.vocabulary
        return None if rules is None else cls(rules, vocabulary.size, vocabulary.end_ids[0], vocabulary.device)

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        rows = [[-len(request.prefix_ids), 1, 1, self.first_timestamp - 1] for request in requests]
        return self.ids.new_tensor(rows).view(len(requests), 4)

    def mask_logits(self, logits: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        position, last, previous, last_timestamp = state[:, :, None].unbind(1)  # (R, 1) each
        banned = (position == 0) & self.is_banned_first
        if not self.has_timestamps:
            return logits.masked_fill_(banned, NEG_INF)
        starts_segment, ends_segment = ((position > 0) & (last > 0) & (previous == value) for value in (1, 0))
        lowest = last_timestamp + 1 - ends_segment.long()  # the next segment may start where this one ended
        banned = banned | self.is_banned | (ends_segment & self.is_text)
        banned = banned | (self.is_timestamp & (starts_segment | (self.ids < lowest)))
        logits.masked_fill_(banned & (position >= 0), NEG_INF)
        text, timestamps = logits.tensor_split([self.first_timestamp], 1)
        prefers_timestamp = timestamps.logsumexp(1, keepdim=True) > text.amax(1, keepdim=True)
        text.masked_fill_(prefers_timestamp & (position >= 0), NEG_INF)
        return logits

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        position, last, previous, last_timestamp = state.unbind(1)
        is_timestamp, is_generated = token >= self.first_timestamp, position >= 0
        return torch.stack(
            [
                position + 1,
                torch.where(is_generated, is_timestamp.long(), last),
                torch.where(is_generated, last, previous),
                torch.where(is_generated & is_timestamp, token, last_timestamp),
            ],
            1,
        )
