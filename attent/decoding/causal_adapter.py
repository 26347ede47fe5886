"""Decoder-only models as a search sees them: what a target is begun from is a prompt, not a source.

All tokens of a prompt but its last are read at once, into the cache; the last is what the first step reads. How the
next token is chosen is `search`'s for beams and `flow`'s for a single text; words are left to `generator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attent.models import CausalLM
from attent.nn import Cache

LAST_PROMPT_TOKEN = -1  # where a search would read a start: the last token of the prompt is read instead
NEG_INF = float("-inf")


@torch.no_grad()
def prefill_cache(model: CausalLM, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Fill an empty cache of one beam with all but the last token of each prompt; (B,) those last tokens."""
    device = next(model.parameters()).device
    places = [len(prompt) - 1 for prompt in prompts]
    width = max(places)
    if width:
        rows = [[*prompt[:-1], *[0] * (width - place)] for prompt, place in zip(prompts, places, strict=True)]
        lengths = None if min(places) == width else torch.tensor(places, device=device)
        model.decoder(model.embedding(torch.tensor(rows, device=device)), lengths, cache=cache)
    return torch.tensor([prompt[-1] for prompt in prompts], device=device)


@dataclass(eq=False)
class PromptCache(Cache):
    """A cache in which every row begins with a prompt. Its K beams share the prompt: of the K columns that each place
    has, it is written in the first, and all of them look there."""

    last_prompt_tokens: Tensor = field(kw_only=True)  # (B,) the last token of each prompt
    prompt_lengths: list[int] = field(kw_only=True)  # tokens of each, that one not counted

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        self.last_prompt_tokens = self.last_prompt_tokens.index_select(0, rows)
        self.prompt_lengths = [self.prompt_lengths[row] for row in rows.tolist()]

    def replace_rows(self, rows: Tensor, source: Cache) -> None:
        """Rows get other prompts, none of them longer than what there is room for."""
        assert isinstance(source, PromptCache)
        for layer, other in zip(self.layers, source.layers, strict=True):
            width = other.self_attn.capacity
            layer.self_attn.buffer.keys[rows, :, :width] = other.self_attn.buffer.keys
            layer.self_attn.buffer.values[rows, :, :width] = other.self_attn.buffer.values
        self.last_prompt_tokens = self.last_prompt_tokens.index_copy(0, rows, source.last_prompt_tokens)
        for row, count in zip(rows.tolist(), source.prompt_lengths, strict=True):
            self.prompt_lengths[row] = count
        if self.ancestors is not None:
            shared = torch.arange(self.ancestors.shape[2], device=rows.device) < max(source.prompt_lengths)
            self.ancestors[rows] = torch.where(shared, 0, self.ancestors[rows])

    def rewind(self, lengths: Sequence[int]) -> None:
        """`places` are counted behind the prompts. What beams of an earlier text looked at there is hidden by order."""
        held = [count + place for count, place in zip(self.prompt_lengths, lengths, strict=True)]
        device = self.last_prompt_tokens.device
        self.used_columns = max(held) * self.beams
        self.lengths = None if min(held) == max(held) else torch.tensor(held, device=device) * self.beams


class CausalStepModel:
    """A decoder-only model as a `Writer`: begin from prompts, then logits behind the next tokens.

    A search knows one end. Where a model has several, or none, one more column is the chance that any of them comes.
    """

    def __init__(self, model: CausalLM, end_ids: Sequence[int]) -> None:
        self.model = model
        self.end_ids = torch.tensor(end_ids, dtype=torch.int64, device=next(model.parameters()).device)
        self.end_id = end_ids[0] if len(end_ids) == 1 else model.config.vocab

    def begin(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1) -> PromptCache:
        held = [source.shape[1]] * len(source) if lengths is None else lengths.tolist()
        prompts = [row[:length] for row, length in zip(source.tolist(), held, strict=True)]
        places = [length - 1 for length in held]
        alone = self.model.begin(rows=len(prompts), capacity=max(1, *places))
        first = prefill_cache(self.model, alone, prompts)
        room = self.model.begin(rows=len(prompts), capacity=max(places) + capacity, beams=beams)
        width = max(places)
        for layer, read_once in zip(room.layers, alone.layers, strict=True):
            layer.self_attn.buffer.keys[:, :, : width * beams : beams] = read_once.self_attn.buffer.keys[:, :, :width]
            layer.self_attn.buffer.values[:, :, : width * beams : beams] = read_once.self_attn.buffer.values[
                :, :, :width
            ]
        if room.ancestors is not None:
            room.ancestors[:, :, :width] = 0
        begun = PromptCache(
            room.layers, beams=beams, ancestors=room.ancestors, last_prompt_tokens=first, prompt_lengths=places
        )
        begun.rewind([0] * len(prompts))
        return begun

    def step(self, target: Tensor, state: PromptCache, /) -> Tensor:
        logits = self.model.step(
            torch.where(target == LAST_PROMPT_TOKEN, state.last_prompt_tokens[:, None], target), state
        )
        if len(self.end_ids) == 1:
            return logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        ending = logits.index_select(-1, self.end_ids).logsumexp(-1, keepdim=True)  # of none: -inf
        return torch.cat([logits.index_fill(-1, self.end_ids, NEG_INF), ending], -1)
