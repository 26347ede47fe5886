"""The tables of a run but for the model's: which text, how it is trained, how its scores are made.

Each field says in a few words what it does; these are the help texts of the flags too. Nothing here imports torch, so
that `attent train --help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from attent.data.batch_plan import Layout
from attent.data.corpus import ReadOptions
from attent.data.filters import FilterConfig
from attent.data.images import ImageDataConfig
from attent.text.tokenizer_training import TokenizerConfig

Size = Literal["tiny", "small", "base", "big"]
Precision = Literal["float32", "bfloat16"]


class TrainError(ValueError):
    """Training that cannot begin or go on; the message is a sentence for the person."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, and what becomes of it before it is batched."""

    train: Annotated[tuple[str, ...], "corpora, each with a weight if you like: own.tmx:3 europarl"] = ()
    src: Annotated[str | None, "language of the source, such as en; several with commas"] = None
    tgt: Annotated[str | None, "language of the target; several with commas make a model for all of them"] = None
    valid: Annotated[
        tuple[str, ...], "corpora to validate on; none given: what lies beside the data, else a part held out"
    ] = ()
    test: Annotated[tuple[str, ...], "corpora to score at the end; none given: what lies beside the data"] = ()
    hold_out: Annotated[
        int | None,
        "pairs or texts to hold out where there is no validation set (of a few documents characters); 0: none",
    ] = None
    tags: Annotated[bool | None, "begin each source with its target language, <2de>; by default when several"] = None
    subword_sampling: Annotated[float, "segment words anew in every epoch, at this rate (subword regularisation)"] = 0.0
    max_tokens: Annotated[int, "tokens of the longest sentence to train on"] = 256
    too_long: Annotated[Literal["drop", "cut"], "what becomes of longer ones"] = "drop"
    layout: Annotated[Layout | None, "packed rows (GPU), or bucketed by length (CPU)"] = None
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    reading: ReadOptions = field(default_factory=ReadOptions)
    images: ImageDataConfig | None = None  # of the task images

    def __post_init__(self) -> None:
        if not 0 <= self.subword_sampling < 1:
            raise ValueError(f"`subword_sampling` must be at least 0 and less than 1, but is {self.subword_sampling}")
        check_at_least("max_tokens", self.max_tokens, 1)
        if self.hold_out is not None:
            check_at_least("hold_out", self.hold_out, 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe. The defaults are the paper's section 5; the rest is what the field has learned since."""

    steps: Annotated[int | None, "updates at which training ends at the latest"] = None
    seed: Annotated[int, "a number that fixes every random choice"] = 1
    batch_tokens: Annotated[int | None, "tokens of a batch, on each side"] = None
    accumulate: Annotated[int, "batches of one update"] = 1
    micro_batch_tokens: Annotated[
        int | None, "tokens that go through the model at once; changes memory and speed only"
    ] = None
    optimizer: Annotated[Literal["adam", "adamw", "muon"], "muon: for the matrices, with adamw for the rest; GPU"] = (
        "adam"
    )
    lr: Annotated[float | None, "the highest learning rate, reached at the end of the warm-up"] = None
    schedule: Annotated[
        Literal["inverse_sqrt", "cosine", "constant"], "how it falls: as in the paper (eq. 3), to zero, or not"
    ] = "inverse_sqrt"
    warmup: Annotated[int | None, "updates over which the learning rate rises"] = None
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: Annotated[float, "of the matrices, with adamw and muon"] = 0.0
    clip_norm: Annotated[float, "gradients longer than this are shortened; 0: never"] = 0.0
    label_smoothing: Annotated[float, "share of probability taken from the right word and spread over all"] = 0.1
    rdrop: Annotated[float | None, "how much two passes with other dropout must agree (R-Drop); 0: one pass"] = None
    ema: Annotated[float, "decay of a running mean of the weights, such as 0.999; 0: none"] = 0.0
    average: Annotated[int, "checkpoints whose mean is tried at the end"] = 5
    save_every: Annotated[int | None, "updates between checkpoints"] = None
    keep_last: Annotated[int, "checkpoints that stay"] = 5
    valid_every: Annotated[int | None, "updates between validations"] = None
    valid_sentences: Annotated[int, "sentences that each validation translates; 0: only the loss is worked out"] = 500
    metric: Annotated[str | None, "metric that selects the best model; by default that of the task"] = None
    patience: Annotated[int, "validations without a better one, after which training ends; 0: never"] = 10
    precision: Annotated[Precision | None, "bfloat16 where the device is fast with it"] = None
    compile: Annotated[bool | None, "compile the model: on a GPU"] = None
    device: Annotated[str | None, "cuda, cuda:1, mps or cpu"] = None
    threads: Annotated[int | None, "of the CPU"] = None
    workers: Annotated[int, "threads that make batches ahead"] = 1
    shard: Annotated[bool, "several processes: spread the weights over them (FSDP2) instead of copies (DDP)"] = False
    freeze: Annotated[tuple[str, ...], "parts that do not learn, such as encoder or *embedding*"] = ()
    lora: Annotated[int, "train only added matrices of this rank beside each matrix (LoRA); 0: all"] = 0
    tensorboard: Annotated[bool, "write TensorBoard files too (pip install tensorboard)"] = False

    def __post_init__(self) -> None:
        for name in ("accumulate", "keep_last", "seed"):
            check_at_least(name, getattr(self, name), 0 if name == "seed" else 1)
        for name in ("steps", "batch_tokens", "micro_batch_tokens", "save_every", "valid_every", "threads"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        for name in ("warmup", "average", "patience", "workers", "lora", "valid_sentences"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 0)
        for name in ("clip_norm", "weight_decay", "rdrop"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 0)
        for name in ("label_smoothing", "ema"):
            check_below_one(name, getattr(self, name))
        for beta in self.betas:
            check_below_one("betas", beta)
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"`lr` must be greater than 0, but is {self.lr}")
        if not self.eps > 0:
            raise ValueError(f"`eps` must be greater than 0, but is {self.eps}")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How the scores at the end are made; validations on the way take the likeliest word at each step."""

    beam_size: Annotated[int, "hypotheses that are followed side by side"] = 4
    length_penalty: Annotated[float, "alpha of length^alpha, by which the scores of hypotheses are divided"] = 0.6

    def __post_init__(self) -> None:
        check_at_least("beam_size", self.beam_size, 1)


# The tables of a run file whose fields are flags, and flags for fields that are nested deeper.
SETTING_TABLES: dict[str, type] = {
    "data": DataConfig, "data.images": ImageDataConfig, "train": TrainConfig, "decode": DecodeConfig,
}  # fmt: skip
SHORT_FLAGS = {"tokenizer": "data.tokenizer.kind", "vocab": "data.tokenizer.vocab", "dropout": "model.dropout"}


def check_at_least(name: str, value: float, minimum: float) -> None:
    if not value >= minimum:
        raise ValueError(f"`{name}` must be {minimum} or more, but is {value}")


def check_below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"`{name}` must be at least 0 and less than 1, but is {value}")
