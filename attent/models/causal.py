"""The decoder-only language model (GPT, LLaMA)."""

import torch
from torch import Tensor

from attent.models.config import CausalConfig
from attent.models.output import OutputProjection
from attent.models.weights import SavableModel
from attent.nn import Cache, Packing, Stack
from attent.nn.frontends import TokenEmbedding


class CausalLM(SavableModel):
    """Token ids -> logits over the next token. Rows are padded on the right (lengths) or packed."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.vocab, config.stack.width, scaled=config.scale_embeddings)
        self.decoder = Stack(config.stack)
        tied_to = self.embedding if config.tie_output else None
        self.output = OutputProjection(config.vocab, config.stack.width, tied_to=tied_to, bias=config.output_bias)

    def forward(self, ids: Tensor, lengths: Tensor | None = None, *, packing: Packing | None = None) -> Tensor:
        """(B, T) -> (B, T, V)"""
        return self.output(self.compute_states(ids, lengths, packing=packing))

    def compute_states(self, ids: Tensor, lengths: Tensor | None = None, *, packing: Packing | None = None) -> Tensor:
        """(B, T) -> (B, T, E), the input of `output`."""
        return self.decoder(self.embedding(ids), lengths, packing=packing)

    def init_decoder_state(self, *, rows: int, capacity: int) -> Cache:
        """Create a cache for `capacity` tokens of each row."""
        return self.decoder.new_cache(capacity, rows=rows)

    @torch.no_grad()
    def step(self, ids: Tensor, cache: Cache, lengths: Tensor | None = None) -> Tensor:
        """Decode the next tokens, (B, T), after those in the cache -> logits (B, T, V).

        `lengths` counts the real tokens of each row where these differ, as prompts do. The cache is updated in place,
        so this has no gradient: train with `forward`.
        """
        return self.output(self.decoder(self.embedding(ids), lengths, cache=cache))
