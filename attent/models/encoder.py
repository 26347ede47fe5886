"""The encoder alone (BERT): a text in, a vector for each token out, and small heads that read these vectors: which
word was masked, and what is to be said of the whole text.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.models import weights
from attent.models.config import EncoderConfig
from attent.models.embedding import Embedding, OutputProjection, check_id_shape
from attent.nn import Packing, Stack, StackConfig
from attent.nn.argument_checks import can_read_values
from attent.nn.block import make_norm
from attent.nn.dropout import Dropout
from attent.nn.feedforward import ACTIVATIONS
from attent.nn.init import init_normal


class TextEncoder(nn.Module):
    """Ids in, states out. Padding is on the right, told by lengths; or rows are packed."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.stack.width
        self.embedding = Embedding(config.vocab, width, scaled=config.scale_embeddings)
        self.segment_embedding = Embedding(config.segments, width, scaled=False) if config.segments else None
        self.encoder = Stack(config.stack)
        self.masked_lm = MaskedLMHead(config.stack, self.embedding) if config.masked_lm else None
        self.pooler = Pooler(width) if config.pooler else None
        self.classifier = Classifier(config.stack, len(config.labels)) if config.labels else None

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | None = None,
        segments: Tensor | None = None,
        *,
        packing: Packing | None = None,
    ) -> Tensor:
        """(B, T) -> (B, T, E). `segments` (B, T) tells to which kind of text each token belongs; None: all to the
        first."""
        x = self.embedding(ids)
        if self.segment_embedding is not None:
            check_segments(segments, self.config.segments)
            x = x + self.segment_embedding(torch.zeros_like(ids) if segments is None else segments)
        elif segments is not None:
            raise ValueError("`segments` must be None for a model with `segments`=0: it does not tell them apart")
        return self.encoder(x, lengths, packing=packing)

    def masked_logits(self, states: Tensor) -> Tensor:
        """(..., E) -> (..., V): which word stands, or stood, at each place."""
        if self.masked_lm is None:
            raise ValueError("this model has no head for masked words (`masked` is false in its config)")
        return self.masked_lm(states)

    def pool(self, states: Tensor, packing: Packing | None = None) -> Tensor:
        """What is said of whole texts: (B, T, E) -> (B, E); in packed rows (B, S, E), one for each place of a text."""
        first = states[:, 0] if packing is None else gather_first_states(states, packing)
        return first if self.pooler is None else self.pooler(first)

    def classify(self, states: Tensor, packing: Packing | None = None) -> Tensor:
        """(B, T, E) -> (B, labels); in packed rows (B, S, labels)."""
        if self.classifier is None:
            raise ValueError("this model has no head that classifies (`labels` is empty in its config)")
        return self.classifier(self.pool(states, packing))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json, model.safetensors and manifest.json; `attent.load(folder)` reads them back."""
        weights.save_model(self, folder)


class MaskedLMHead(nn.Module):
    """A layer with its norm, then the embedding transposed, with a bias for each word."""

    def __init__(self, config: StackConfig, embedding: Embedding) -> None:
        super().__init__()
        self.dense = make_linear(config.width, config.width)
        self.activation = config.activation
        self.norm = make_norm(config)
        self.output = OutputProjection(embedding.weight.shape[0], config.width, tied_to=embedding, bias=True)

    def forward(self, states: Tensor) -> Tensor:
        return self.output(self.transform(states))

    def transform(self, states: Tensor) -> Tensor:
        """(..., E) -> (..., E), which `output` turns into logits."""
        return self.norm(ACTIVATIONS[self.activation](self.dense(states)))


class Pooler(nn.Module):
    """tanh of one more layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = make_linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        return torch.tanh(self.dense(states))


class Classifier(nn.Module):
    """Vectors of whole texts (or images) -> logits over labels. It begins with zeros: no label is likelier."""

    def __init__(self, config: StackConfig, labels: int) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.weight = nn.Parameter(torch.zeros(labels, config.width))
        self.bias = nn.Parameter(torch.zeros(labels))

    def forward(self, vectors: Tensor) -> Tensor:
        return F.linear(self.dropout(vectors), self.weight, self.bias)


def make_linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    init_normal(layer.weight, std=inputs**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def gather_first_states(states: Tensor, packing: Packing) -> Tensor:
    """The state of the first token of every sentence of a row: (B, T, E) -> (B, S, E). Places without a sentence get
    some state or other: `packing.ends` tells which they are."""
    starts = F.pad(packing.ends, (1, 0))[:, :-1].clamp(max=states.shape[1] - 1)  # where the one before has ended
    return states.gather(1, starts[..., None].expand(-1, -1, states.shape[2]))


def check_segments(segments: Tensor | None, count: int) -> None:
    """Values are looked at on CPU only, where that costs nothing."""
    if segments is None:
        return
    check_id_shape(segments, "`segments`")
    if segments.numel() and can_read_values(segments) and not bool(((segments >= 0) & (segments < count)).all()):
        raise ValueError(
            f"`segments` must be from 0 to {count - 1}, as many kinds as the model tells apart, but reach from "
            f"{int(segments.min())} to {int(segments.max())}"
        )
