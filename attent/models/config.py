"""The configs of whole models. Those of their parts (`StackConfig`, positions) are in `nn`.

Seq2SeqConfig   encoder and decoder      the paper, Marian, T5; with a front-end: speech, captions
CausalConfig    decoder only             GPT, LLaMA
EncoderConfig   encoder of text          BERT
VisionConfig    encoder of images        ViT
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass, replace
from inspect import signature
from typing import Any, ClassVar, Literal

from attent import settings
from attent.nn import ConvDecoderConfig, ConvEncoderConfig, LSTMDecoderConfig, LSTMEncoderConfig, StackConfig
from attent.nn.argument_checks import check_choice, check_size, is_count
from attent.nn.config import find_changes
from attent.nn.frontends import AudioConfig, FrontEndConfig, ImageConfig

EncoderStackConfig = StackConfig | LSTMEncoderConfig | ConvEncoderConfig  # one config for each architecture
DecoderStackConfig = StackConfig | LSTMDecoderConfig | ConvDecoderConfig


def mirror_encoder(encoder: StackConfig) -> StackConfig:
    """Return the decoder that mirrors an encoder: causal, with cross-attention."""
    return replace(encoder, causal=True, cross_attention=True, remaining_heads=None)


PRESETS: dict[str, Callable[..., Any]] = {}  # the functions of `presets` by name, for `ShortRepr`


class ShortRepr:
    """Writes a config as a preset with changes: the preset that makes this shortest."""

    def __repr__(self) -> str:
        candidates = []
        for name, preset in PRESETS.items():
            arguments = {"vocab": getattr(self, "vocab", None)} if "vocab" in signature(preset).parameters else {}
            with suppress(ValueError):  # a vocabulary without the preset's special tokens
                base, text = preset(**arguments), "".join(f"vocab={vocab}" for vocab in arguments.values())
                if type(base) is type(self):
                    candidates.append((find_changes(self, base), f"presets.{name}({text})"))
        changes, text = min(candidates, key=lambda candidate: len("".join(candidate[0])))
        return f"{text} with {', '.join(changes)}" if changes else text


@dataclass(frozen=True, kw_only=True, repr=False)
class Seq2SeqConfig(ShortRepr):
    """Encoder and decoder (figure 1) with their embeddings (section 3.4). The defaults are the paper's base model."""

    kind: ClassVar[str] = "seq2seq"
    vocab: int  # token ids are 0 .. vocab - 1
    frontend: FrontEndConfig | None = None  # the source is audio or an image, and `vocab` is the target's; None: tokens
    target_vocab: int | None = None  # of the target side, if it has its own; None: the same
    encoder: EncoderStackConfig = field(default_factory=StackConfig)
    decoder: DecoderStackConfig = field(default_factory=lambda: mirror_encoder(StackConfig()))
    share_embeddings: bool = True  # one matrix embeds source and target
    tie_output: bool = True  # the output layer is the target embedding, transposed
    output_bias: bool = False  # a bias on the logits (Marian)
    scale_embeddings: bool = True  # embeddings times sqrt(width)
    scale_output: bool = False  # states divided by sqrt(width) before the output layer (T5 with a tied output)
    output_transform: bool = False  # a layer with activation and norm before the output layer (BERT as a decoder)
    start_id: int = 1  # the decoder's first input token
    end_id: int = 2  # the token that ends a sentence
    ctc: bool = False  # a second output layer, on the encoder's states, for the CTC loss (see `Seq2Seq.ctc_output`)

    def __post_init__(self) -> None:
        check_size("vocab", self.vocab)
        check_size("target_vocab", self.output_vocab)
        if self.share_embeddings and self.frontend is not None:
            raise ValueError("`share_embeddings` must be false with a `frontend`: only the target has token ids")
        if self.share_embeddings and self.output_vocab != self.vocab:
            problem = f"`target_vocab` must be `vocab`={self.vocab} to share embeddings, but is {self.target_vocab}"
            raise ValueError(f"{problem}; give both sides one vocabulary, or set `share_embeddings` to false")
        if self.encoder.width != self.decoder.width and self.frontend is None:
            widths = f"{self.encoder.width} and {self.decoder.width}"
            raise ValueError(f"`encoder.width` must equal `decoder.width`, but they are {widths}")
        if self.ctc and not isinstance(self.frontend, AudioConfig):
            raise ValueError("`ctc` must be false unless the `frontend` is audio")
        check_encoder_stack(self.encoder, "encoder")
        if not (self.decoder.causal and self.decoder.cross_attention):
            raise ValueError("`decoder.causal` and `decoder.cross_attention` must be true in an encoder-decoder model")
        for name, token in (("start_id", self.start_id), ("end_id", self.end_id)):
            if not 0 <= token < self.output_vocab:
                raise ValueError(f"`{name}` must be a token id from 0 to {self.output_vocab - 1}, but is {token}")

    @property
    def stacks(self) -> tuple[StackConfig, StackConfig]:
        """Encoder and decoder of a Transformer; another architecture raises a ValueError."""
        encoder, decoder = self.encoder, self.decoder
        if isinstance(encoder, StackConfig) and isinstance(decoder, StackConfig):
            return encoder, decoder
        name, kind = ("decoder", decoder.kind) if isinstance(encoder, StackConfig) else ("encoder", encoder.kind)
        raise ValueError(f"only a Transformer is supported here, but `{name}.kind` is {kind}")

    @property
    def output_vocab(self) -> int:
        return self.vocab if self.target_vocab is None else self.target_vocab


@dataclass(frozen=True, kw_only=True, repr=False)
class CausalConfig(ShortRepr):
    """A decoder-only language model. The defaults are GPT's."""

    kind: ClassVar[str] = "causal"
    vocab: int
    stack: StackConfig
    tie_output: bool = True  # the output layer is the embedding, transposed
    output_bias: bool = False
    scale_embeddings: bool = False  # embeddings times sqrt(width), as in the paper
    start_id: int | None = None  # the token that begins every text, if any
    end_ids: tuple[int, ...] = ()  # each of these tokens ends a text

    def __post_init__(self) -> None:
        check_size("vocab", self.vocab)
        if not self.stack.causal or self.stack.cross_attention:
            raise ValueError("`stack.causal` must be true and `stack.cross_attention` false in a decoder-only model")
        for name, token in (("start_id", self.start_id), *(("end_ids", end) for end in self.end_ids)):
            if token is not None and not 0 <= token < self.vocab:
                raise ValueError(f"`{name}` must be of token ids from 0 to {self.vocab - 1}, but one is {token}")


@dataclass(frozen=True, kw_only=True, repr=False)
class EncoderConfig(ShortRepr):
    """An encoder-only text model, with optional heads."""

    kind: ClassVar[str] = "encoder"
    vocab: int
    stack: StackConfig
    segments: int = 0  # BERT's token types (2), each with an embedding that is added to its tokens; 0: none
    scale_embeddings: bool = False
    masked_lm: bool = False  # a head that predicts masked tokens
    pooler: bool = False  # a layer on the first token's state, for the whole text
    labels: tuple[str, ...] = ()  # a classifier over these

    def __post_init__(self) -> None:
        check_size("vocab", self.vocab)
        check_encoder_stack(self.stack)
        check_labels(self.labels)
        if not is_count(self.segments):
            raise ValueError(f"`segments` must be 0 or more, but is {self.segments!r}")


@dataclass(frozen=True, kw_only=True, repr=False)
class VisionConfig(ShortRepr, ImageConfig):
    """An encoder-only model of image patches (Dosovitskiy et al. 2021)."""

    kind: ClassVar[str] = "vision"
    stack: StackConfig
    pooling: Literal["class", "mean"] = "class"  # the image's representation: the class token, or the mean patch
    pooler: bool = False  # a layer with tanh after pooling
    labels: tuple[str, ...] = ()  # a classifier over these

    def __post_init__(self) -> None:
        super().__post_init__()
        check_encoder_stack(self.stack)
        check_labels(self.labels)
        check_choice("pooling", self.pooling, Literal["class", "mean"])
        if self.pooling == "class" and not self.class_token:
            raise ValueError("`pooling` must be mean where there is no `class_token`, but is class")


def check_encoder_stack(stack: EncoderStackConfig, name: str = "stack") -> None:
    if stack.causal or stack.cross_attention:
        raise ValueError(f"`{name}.causal` and `{name}.cross_attention` must be false in an encoder")


def check_labels(labels: tuple[str, ...]) -> None:
    if len(set(labels)) != len(labels):
        duplicate = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"`labels` must differ, but {duplicate!r} is there twice")


ModelConfig = Seq2SeqConfig | CausalConfig | EncoderConfig | VisionConfig


def get_stack_configs(config: ModelConfig) -> dict[str, EncoderStackConfig | DecoderStackConfig]:
    """Encoder and decoder by name; some models have only one of them."""
    if isinstance(config, Seq2SeqConfig):
        return {"encoder": config.encoder, "decoder": config.decoder}
    return {"decoder" if isinstance(config, CausalConfig) else "encoder": config.stack}


CONFIG_VERSION = 1
CONFIG_FILE_TYPES: dict[str, Any] = {  # kind -> the dataclass of a config.json
    config.kind: make_dataclass(
        f"{config.__name__}File",
        [
            ("format", Literal["attent"], "attent"),
            ("version", Literal[1], CONFIG_VERSION),
            ("kind", Literal[config.kind], config.kind),
            ("model", config),
        ],
        frozen=True,
        kw_only=True,
    )
    for config in (Seq2SeqConfig, CausalConfig, EncoderConfig, VisionConfig)
}


def to_config_json(config: ModelConfig) -> dict[str, Any]:
    return settings.to_dict(CONFIG_FILE_TYPES[config.kind](model=config))
