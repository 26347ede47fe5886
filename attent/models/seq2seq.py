"""The Transformer (figure 1): an encoder reads the source, a decoder writes the target while looking at it."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.models import weights
from attent.models.config import Seq2SeqConfig
from attent.models.embedding import Embedding, OutputProjection, check_id_shape
from attent.nn import Cache, Memory, Packing, Stack
from attent.nn.argument_checks import check_lengths


class Seq2Seq(nn.Module):
    """Source and target ids in, logits over the next target token out.

    Padding is on the right, told by lengths; or rows hold several sentences, told by a packing of each side.
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        width, scaled = config.encoder.width, config.scale_embeddings
        wide = config.scale_output and config.tie_output
        self.source_embedding = Embedding(config.vocab, width, scaled=scaled, unit_variance=wide)
        self.target_embedding = (
            self.source_embedding
            if config.share_embeddings
            else Embedding(config.output_vocab, width, scaled=scaled, unit_variance=wide)
        )
        self.encoder = Stack(config.encoder)
        self.decoder = Stack(config.decoder)
        tied_to = self.target_embedding if config.tie_output else None
        self.output = OutputProjection(
            config.output_vocab, width, tied_to=tied_to, bias=config.output_bias, scaled=config.scale_output
        )

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        packing: tuple[Packing, Packing] | None = None,
    ) -> Tensor:
        """(B, Ts), (B, Tt) -> (B, Tt, V). `target` is what the decoder reads: already shifted right.

        These are logits, before the paper's softmax: losses and searches take its logarithm in one stable step.
        """
        check_inputs(source, target, source_lengths, target_lengths)
        source_packing, target_packing = packing or (None, None)
        memory = self.encode(source, source_lengths, packing=source_packing)
        states = self.decode(target, memory, target_lengths, packing=target_packing)
        return self.output(states)

    def encode(self, source: Tensor, lengths: Tensor | None = None, *, packing: Packing | None = None) -> Memory:
        """The encoder: (B, Ts) -> what the decoder will look at."""
        states = self.encoder(self.source_embedding(source), lengths, packing=packing)
        return Memory(states, lengths, packing)

    def decode(
        self, target: Tensor, memory: Memory, lengths: Tensor | None = None, *, packing: Packing | None = None
    ) -> Tensor:
        """The decoder: (B, Tt) -> its last states (B, Tt, E), which `output` turns into logits."""
        return self.decoder(self.target_embedding(target), lengths, packing=packing, memory=memory)

    @torch.no_grad()
    def begin(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1) -> Cache:
        """Read the source and make ready to write up to `capacity` target tokens, step by step (in `eval` mode).

        With `beams`, so many targets of each source side by side.
        """
        return self.decoder.new_cache(capacity, memory=self.encode(source, lengths), beams=beams)

    @torch.no_grad()
    def step(self, target: Tensor, cache: Cache, lengths: Tensor | None = None) -> Tensor:
        """Read the next target tokens, (B, T), behind those in the cache -> logits (B, T, V).

        `lengths` tells how many of them are real where rows differ, as forced beginnings do. In a cache of beams, T is
        their number: the next token of each. A cache is written in place, so there is no gradient here: `forward` is
        for training.
        """
        return self.output(self.decoder(self.target_embedding(target), lengths, cache=cache))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json, model.safetensors and manifest.json; `attent.load(folder)` reads them back."""
        weights.save_model(self, folder)


def check_inputs(source: Tensor, target: Tensor, source_lengths: Tensor | None, target_lengths: Tensor | None) -> None:
    """Refuse a mistake in the words of the caller, where the parts would tell it in theirs."""
    check_id_shape(source, "source")
    check_id_shape(target, "target")
    if source.shape[0] != target.shape[0]:
        rows = f"{source.shape[0]} and {target.shape[0]}"
        raise ValueError(f"source and target must have the same number of rows, but have {rows}")
    for name, ids, lengths in (("source", source, source_lengths), ("target", target, target_lengths)):
        if lengths is not None:
            check_lengths(lengths, ids.shape[0], ids.shape[1], ids.device, f"{name}_lengths")


def shift_right(target: Tensor, start: int, packing: Packing | None = None) -> Tensor:
    """What the decoder reads to write `target` (B, T): one place to the right, behind the start token.

    In packed rows every sentence has a start of its own.
    """
    check_id_shape(target, "target")
    shifted = F.pad(target, (1, 0), value=start)[:, :-1]
    return shifted if packing is None else shifted.masked_fill(packing.positions == 0, start)
