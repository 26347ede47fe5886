"""The decoder alone (GPT, LLaMA): a text in, and for each place of it what may come next."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from attent.models import weights
from attent.models.config import CausalConfig
from attent.models.embedding import Embedding, OutputProjection
from attent.nn import Cache, Packing, Stack


class CausalLM(nn.Module):
    """Ids in, logits over the next token out. Padding is on the right, told by lengths; or rows are packed."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.stack.width, scaled=config.scale_embeddings)
        self.decoder = Stack(config.stack)
        tied_to = self.embedding if config.tie_output else None
        self.output = OutputProjection(config.vocab, config.stack.width, tied_to=tied_to, bias=config.output_bias)

    def forward(self, ids: Tensor, lengths: Tensor | None = None, *, packing: Packing | None = None) -> Tensor:
        """(B, T) -> (B, T, V): behind each token, what the next may be."""
        return self.output(self.compute_states(ids, lengths, packing=packing))

    def compute_states(self, ids: Tensor, lengths: Tensor | None = None, *, packing: Packing | None = None) -> Tensor:
        """(B, T) -> (B, T, E), which `output` turns into logits."""
        return self.decoder(self.embedding(ids), lengths, packing=packing)

    def begin(self, *, rows: int, capacity: int, beams: int = 1) -> Cache:
        """Room for so many texts of up to `capacity` tokens, each written by so many beams side by side."""
        return self.decoder.new_cache(capacity, rows=rows, beams=beams)

    @torch.no_grad()
    def step(self, ids: Tensor, cache: Cache, lengths: Tensor | None = None) -> Tensor:
        """Read the next tokens, (B, T), behind those in the cache -> logits (B, T, V).

        `lengths` tells how many of them are real where rows differ, as prompts do. In a cache of beams, T is their
        number. A cache is written in place, so there is no gradient here: `forward` is for training.
        """
        return self.output(self.decoder(self.embedding(ids), lengths, cache=cache))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json, model.safetensors and manifest.json; `attent.load(folder)` reads them back."""
        weights.save_model(self, folder)
