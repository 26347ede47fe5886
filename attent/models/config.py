"""What a whole model is made of, as frozen facts. The parts have theirs (`StackConfig`, positions) in `nn`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from attent.nn import StackConfig
from attent.nn.checks import check_size


def decoder_of(encoder: StackConfig) -> StackConfig:
    """The decoder that mirrors an encoder: it sees no later token, and looks at the encoder's output."""
    return replace(encoder, causal=True, cross=True, kept=None)


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """Encoder and decoder (figure 1) with their embeddings (section 3.4). The defaults are the paper's base model."""

    vocab: int  # token ids are 0 .. vocab - 1
    target_vocab: int | None = None  # of the target side, where it has one of its own; None: the same
    encoder: StackConfig = field(default_factory=StackConfig)
    decoder: StackConfig = field(default_factory=lambda: decoder_of(StackConfig()))
    share_embeddings: bool = True  # source and target embeddings are one matrix
    tie_output: bool = True  # the layer before the softmax is the target embedding, transposed
    output_bias: bool = False  # a bias on the logits (Marian has one)
    scale_embeddings: bool = True  # embeddings times sqrt(width)
    start: int = 1  # the id that the decoder reads first: outputs are shifted right behind it
    end: int = 2  # the id that ends a sentence

    def __post_init__(self) -> None:
        for name, size in (("vocab", self.vocab), ("target_vocab", self.targets)):
            check_size(name, size)
        if self.share_embeddings and self.targets != self.vocab:
            raise ValueError(
                f"`target_vocab` must be `vocab`={self.vocab} to share embeddings, but is {self.target_vocab}; "
                f"give both sides one vocabulary, or set `share_embeddings` to false"
            )
        if self.encoder.width != self.decoder.width:
            widths = f"{self.encoder.width} and {self.decoder.width}"
            raise ValueError(f"`encoder.width` must equal `decoder.width`, but they are {widths}")
        if self.encoder.causal or self.encoder.cross:
            raise ValueError("`encoder.causal` and `encoder.cross` must be false: the encoder reads the whole source")
        if not (self.decoder.causal and self.decoder.cross):
            raise ValueError(
                "`decoder.causal` and `decoder.cross` must be true: it writes word by word from the source"
            )
        for name, token in (("start", self.start), ("end", self.end)):
            if not 0 <= token < self.targets:
                raise ValueError(f"`{name}` must be a token id from 0 to {self.targets - 1}, but is {token}")

    @property
    def targets(self) -> int:
        return self.vocab if self.target_vocab is None else self.target_vocab


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """What `config.json` of a model folder holds."""

    format: Literal["attent"] = "attent"
    version: Literal[1] = 1
    kind: Literal["seq2seq"] = "seq2seq"
    model: Seq2SeqConfig
