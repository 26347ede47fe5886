"""Decoder-only models for `search`: a target starts from a prompt instead of a source.

All tokens of a prompt but the last are read at once, into the cache (prefill); the first step reads the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF
from attent.models import CausalLM
from attent.nn import Cache
from attent.nn.devices import get_device

LAST_PROMPT_TOKEN = -1  # the start token of a search that stands for the last token of each prompt


@torch.no_grad()
def prefill_cache(model: CausalLM, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Fill an empty cache of one beam with all but the last token of each prompt; return those last tokens, (B,)."""
    device = get_device(model)
    lengths = [len(prompt) - 1 for prompt in prompts]
    max_length = max(lengths)
    if max_length:
        rows = [[*prompt[:-1], *[0] * (max_length - length)] for prompt, length in zip(prompts, lengths, strict=True)]
        row_lengths = None if min(lengths) == max_length else torch.tensor(lengths, device=device)
        model.decoder(model.embedding(torch.tensor(rows, device=device)), row_lengths, cache=cache)
    return torch.tensor([prompt[-1] for prompt in prompts], device=device)


@dataclass(eq=False)
class PromptCache(Cache):
    """A cache in which every row begins with a prompt. The K beams of a row share it: of the K columns of a position,
    the prompt fills the first, and all beams attend to that one."""

    last_prompt_tokens: Tensor = field(kw_only=True)  # (B,)
    cached_prompt_lengths: list[int] = field(kw_only=True)  # without the last token

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        self.last_prompt_tokens = self.last_prompt_tokens.index_select(0, rows)
        self.cached_prompt_lengths = [self.cached_prompt_lengths[row] for row in rows.tolist()]

    def replace_sources(self, rows: Tensor, new: Cache) -> None:
        """Give rows other prompts, which must fit into the cache."""
        assert isinstance(new, PromptCache)
        for layer, other in zip(self.layers, new.layers, strict=True):
            layer.self_attn.write_rows(rows, other.self_attn)
        self.last_prompt_tokens = self.last_prompt_tokens.index_copy(0, rows, new.last_prompt_tokens)
        for row, length in zip(rows.tolist(), new.cached_prompt_lengths, strict=True):
            self.cached_prompt_lengths[row] = length
        if self.ancestors is not None:
            shared = torch.arange(self.ancestors.shape[2], device=rows.device) < max(new.cached_prompt_lengths)
            self.ancestors[rows] = torch.where(shared, 0, self.ancestors[rows])

    def set_row_lengths(self, lengths: Sequence[int]) -> None:
        """`lengths` count the tokens after the prompts. The causal mask hides later columns of an earlier text."""
        positions = [prompt + length for prompt, length in zip(self.cached_prompt_lengths, lengths, strict=True)]
        device = self.last_prompt_tokens.device
        self.used_columns = max(positions) * self.beams
        is_even = min(positions) == max(positions)
        self.row_columns = None if is_even else torch.tensor(positions, device=device) * self.beams


class CausalStepModel:
    """A decoder-only model as a `StepModel`.

    A search knows one end token. For a model with several, or none, an extra column of the logits stands for any of
    them.
    """

    def __init__(self, model: CausalLM, end_ids: Sequence[int]) -> None:
        self.model = model
        self.end_ids = torch.tensor(end_ids, dtype=torch.int64, device=get_device(model))
        self.end_id = end_ids[0] if len(end_ids) == 1 else model.config.vocab

    def init_decoder_state(
        self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1
    ) -> PromptCache:
        prompt_lengths = [source.shape[1]] * len(source) if lengths is None else lengths.tolist()
        prompts = [row[:length] for row, length in zip(source.tolist(), prompt_lengths, strict=True)]
        cached_lengths = [length - 1 for length in prompt_lengths]
        max_cached_length = max(cached_lengths)
        single = self.model.init_decoder_state(rows=len(prompts), capacity=max(1, max_cached_length))
        last_tokens = prefill_cache(self.model, single, prompts)
        cache = self.model.init_decoder_state(rows=len(prompts), capacity=max_cached_length + capacity, beams=beams)
        for layer, prefilled in zip(cache.layers, single.layers, strict=True):
            new, old = layer.self_attn, prefilled.self_attn
            new.keys[:, :, : max_cached_length * beams : beams] = old.keys[:, :, :max_cached_length]
            new.values[:, :, : max_cached_length * beams : beams] = old.values[:, :, :max_cached_length]
        if cache.ancestors is not None:
            cache.ancestors[:, :, :max_cached_length] = 0
        state = PromptCache(
            cache.layers,
            beams=beams,
            ancestors=cache.ancestors,
            last_prompt_tokens=last_tokens,
            cached_prompt_lengths=cached_lengths,
        )
        state.set_row_lengths([0] * len(prompts))
        return state

    def step(self, target: Tensor, state: PromptCache, /) -> Tensor:
        target = torch.where(target == LAST_PROMPT_TOKEN, state.last_prompt_tokens[:, None], target)
        logits = self.model.step(target, state)
        if len(self.end_ids) == 1:
            return logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        any_end = logits.index_select(-1, self.end_ids).logsumexp(-1, keepdim=True)  # -inf if there is none
        return torch.cat([logits.index_fill(-1, self.end_ids, NEG_INF), any_end], -1)
