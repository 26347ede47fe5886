"""Models with one stack: encoders of text (BERT) and of images (ViT), and decoder-only language models (GPT, LLaMA)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.models.config import CausalConfig, EncoderConfig, VisionConfig
from attent.models.output import OutputProjection, OutputTransform, make_linear
from attent.models.weights import SavableModel
from attent.nn import Cache, Packing, Stack, StackConfig
from attent.nn.argument_checks import can_read_values
from attent.nn.dropout import Dropout
from attent.nn.frontends import (
    PatchEmbedding,
    TokenEmbedding,
    add_class_token,
    check_id_shape,
    check_pixels,
    normalize_pixels,
)
from attent.nn.init import init_normal
from attent.storage.errors import AttentError


class TextEncoder(SavableModel):
    """Token ids -> states. Rows are padded on the right (lengths) or packed."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.stack.width
        self.embedding = TokenEmbedding(config.vocab, width, scaled=config.scale_embeddings)
        self.segment_embedding = TokenEmbedding(config.segments, width, scaled=False) if config.segments else None
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
        """(B, T) -> (B, T, E). `segments` (B, T) are BERT's token types; None: all 0."""
        x = self.embedding(ids)
        if self.segment_embedding is not None:
            segments = torch.zeros_like(ids) if segments is None else segments
            check_segments(segments, self.config.segments)
            x = x + self.segment_embedding(segments)
        elif segments is not None:
            raise AttentError("`segments` must be None for a model with `segments`=0, which has no segment embeddings")
        return self.encoder(x, lengths, packing=packing)

    def masked_logits(self, states: Tensor) -> Tensor:
        """(..., E) -> (..., V): logits over the token at each position."""
        if self.masked_lm is None:
            raise AttentError("this model has no head for masked words (`masked_lm` is false in its config)")
        return self.masked_lm(states)

    def pool(self, states: Tensor, packing: Packing | None = None) -> Tensor:
        """Return the representations of whole texts: (B, T, E) -> (B, E), or in packed rows (B, S, E)."""
        first = states[:, 0] if packing is None else gather_first_states(states, packing)
        return first if self.pooler is None else self.pooler(first)

    def classify(self, states: Tensor, packing: Packing | None = None) -> Tensor:
        """(B, T, E) -> (B, labels), or in packed rows (B, S, labels)."""
        if self.classifier is None:
            raise AttentError("this model has no classifier (`labels` is empty in its config)")
        return self.classifier(self.pool(states, packing))


class MaskedLMHead(OutputTransform):
    """A layer with its norm, then the transposed embedding and a bias per token."""

    def __init__(self, config: StackConfig, embedding: TokenEmbedding) -> None:
        super().__init__(config)
        self.output = OutputProjection(embedding.weight.shape[0], config.width, tied_to=embedding, bias=True)

    def forward(self, states: Tensor) -> Tensor:
        return self.output(self.transform(states))


class Pooler(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = make_linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        return torch.tanh(self.dense(states))


class Classifier(nn.Module):
    """Vectors of whole texts or images -> logits over labels. Weights start at zero: all labels are equally likely."""

    def __init__(self, config: StackConfig, labels: int) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.weight = nn.Parameter(torch.zeros(labels, config.width))
        self.bias = nn.Parameter(torch.zeros(labels))

    def forward(self, vectors: Tensor) -> Tensor:
        return F.linear(self.dropout(vectors), self.weight, self.bias)


def gather_first_states(states: Tensor, packing: Packing) -> Tensor:
    """Return each packed sentence's first state, (B, S, E); arbitrary after a row's last (`packing.ends` tells)."""
    starts = F.pad(packing.ends, (1, 0))[:, :-1].clamp(max=states.shape[1] - 1)  # the end of the previous sentence
    return states.gather(1, starts[..., None].expand(-1, -1, states.shape[2]))


def check_segments(segments: Tensor, count: int) -> None:
    check_id_shape(segments, "`segments`")
    if segments.numel() and can_read_values(segments) and not bool(((segments >= 0) & (segments < count)).all()):
        required = f"from 0 to {count - 1}, the segment embeddings of the model"
        actual = f"range from {int(segments.min())} to {int(segments.max())}"
        raise AttentError(f"`segments` must be {required}, but {actual}")


class VisionTransformer(SavableModel):
    """Pixels -> logits over labels."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width = config.stack.width
        self.patch_embedding = PatchEmbedding(config.channels, config.patch_size, width)
        self.class_token = nn.Parameter(torch.empty(width)) if config.class_token else None
        if self.class_token is not None:
            init_normal(self.class_token, std=0.02)
        self.encoder = Stack(config.stack)
        self.pooler = Pooler(width) if config.pooler else None
        self.classifier = Classifier(config.stack, len(config.labels)) if config.labels else None

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, image_size, image_size), normalized (see `normalize`) -> (B, labels)."""
        if self.classifier is None:
            raise AttentError("this model has no classifier (`labels` is empty in its config); see `compute_states`")
        return self.classifier(self.pool(self.compute_states(pixels)))

    def compute_states(self, pixels: Tensor) -> Tensor:
        """-> (B, T, E): the class token, if there is one, then the patches, row by row."""
        check_pixels(pixels, self.config)
        return self.encoder(add_class_token(self.patch_embedding(pixels), self.class_token))

    def pool(self, states: Tensor) -> Tensor:
        """Return the representation of the whole image: (B, T, E) -> (B, E)."""
        first_patch = int(self.config.class_token)
        pooled = states[:, 0] if self.config.pooling == "class" else states[:, first_patch:].mean(1)
        return pooled if self.pooler is None else self.pooler(pooled)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Convert bytes, or values from 0 to 1, to the model's input: (pixel - mean) / std."""
        return normalize_pixels(pixels, self.config, self.patch_embedding.weight)


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
