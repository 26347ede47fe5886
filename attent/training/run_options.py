"""The settings of a run except the model's: data, training, and decoding for the final scores.

The annotations are the help texts of the flags. Nothing here imports torch, so that `attent train --help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from attent.data.audio import AudioDataConfig
from attent.data.batch_plan import Layout
from attent.data.corpus import ReadOptions
from attent.data.filters import FilterConfig
from attent.data.images import ImageDataConfig
from attent.storage.errors import AttentError
from attent.text.tokenizer_training import TokenizerConfig
from attent.training.schedule import Schedule

Size = Literal["tiny", "small", "base", "big"]
# Of translation models: `attent.models.presets.ARCHS`.
Arch = Literal["transformer", "lstm", "lstm-no-attention", "conv"]
Precision = Literal["float32", "bfloat16"]
MINIMUMS = {  # of numbers in `TrainConfig`, if they are set
    0: "seed warmup average patience workers lora valid_sentences clip_norm weight_decay rdrop",
    1: "steps batch_tokens accumulate micro_batch_tokens save_every keep_last valid_every threads",
}


class TrainError(AttentError):
    """Training cannot start or continue; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: tuple[str, ...] = ()  # corpora, each with an optional weight (own.tmx:3); the flag is --data
    src: Annotated[str | None, "source language, such as en; several separated by commas"] = None
    tgt: Annotated[str | None, "target language; several separated by commas train a multilingual model"] = None
    valid: Annotated[
        tuple[str, ...], "validation corpora [default: those in the folder of the data, else a held-out part]"
    ] = ()
    test: Annotated[
        tuple[str, ...], "test corpora for the final scores [default: those in the folder of the data]"
    ] = ()
    hold_out: Annotated[
        int | None, "pairs or texts held out if there is no validation set (characters, of few documents); 0: none"
    ] = None
    tags: Annotated[
        bool | None, "prefix each source with a tag of its target language, <2de> [default: if several]"
    ] = None
    subword_sampling: Annotated[float, "rate of BPE-dropout; 0: off"] = 0.0
    max_tokens: Annotated[int, "maximum length of a sentence, per side"] = 256
    too_long: Annotated[Literal["drop", "truncate"], "drop or truncate longer sentences"] = "drop"
    layout: Annotated[
        Layout | None,
        "packed rows (GPU), bucketed by length (CPU), or bucketed in fixed shapes (LSTMs and convolutions on a GPU)",
    ] = None
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    read_options: ReadOptions = field(default_factory=ReadOptions)
    images: ImageDataConfig | None = None  # for --task images
    audio: AudioDataConfig | None = None  # for --task speech

    def __post_init__(self) -> None:
        check_below_one("subword_sampling", self.subword_sampling)
        check_at_least("max_tokens", self.max_tokens, 1)
        if self.hold_out is not None:
            check_at_least("hold_out", self.hold_out, 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimization, validation and checkpoints. The defaults are those of the paper's section 5."""

    steps: Annotated[int | None, "maximum number of training steps"] = None
    minutes: Annotated[
        float | None,
        "instead of --steps: time for the whole command, from which the steps follow [default: no limit; at most 30 "
        "for a translation model, or one of speech or captions, from scratch on a CPU]",
    ] = None
    seed: Annotated[int, "random seed"] = 1
    batch_tokens: Annotated[int | None, "tokens per batch and side, padding included"] = None
    accumulate: Annotated[int, "batches per step (gradient accumulation)"] = 1
    micro_batch_tokens: Annotated[int | None, "tokens per forward pass; affects only memory and speed"] = None
    optimizer: Annotated[Literal["adam", "adamw"], "adamw: with weight decay"] = "adam"
    lr: Annotated[float | None, "peak learning rate, after the warm-up"] = None
    schedule: Annotated[
        Schedule | None, "of the learning rate [default: cosine]; inverse_sqrt: equation 3 of the paper"
    ] = None
    warmup: Annotated[int | None, "steps of linear warm-up"] = None
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: Annotated[float, "of matrices, with adamw"] = 0.0
    clip_norm: Annotated[
        float | None, "maximum gradient norm; 0: no clipping [default: 0; 1 for LSTMs and convolutions]"
    ] = None
    label_smoothing: Annotated[float, "probability mass spread evenly over the vocabulary"] = 0.1
    rdrop: Annotated[float | None, "weight of the R-Drop loss; 0: off [default: 5 on a GPU below 100,000 pairs]"] = None
    ctc: Annotated[
        float | None,
        "weight of the CTC loss on the encoder of speech; 0: off [default: 0.3, or 0 for translation]",
    ] = None
    ema: Annotated[float, "decay of an exponential moving average of the weights, such as 0.999; 0: off"] = 0.0
    average: Annotated[int, "number of last checkpoints to average at the end"] = 5
    save_every: Annotated[int | None, "steps between checkpoints"] = None
    save_share: Annotated[
        float | None,
        "maximum part of the time for checkpoints; 0: no limit [default: 0.1, or 0 with --save-every or --valid-every]",
    ] = None
    keep_last: Annotated[int, "number of checkpoints to keep"] = 5
    valid_every: Annotated[int | None, "steps between validations"] = None
    valid_share: Annotated[
        float | None, "maximum part of the time for validations; 0: no limit [default: 0.1, or 0 with --valid-every]"
    ] = None
    valid_sentences: Annotated[int, "sentences translated per validation; 0: compute only the loss"] = 500
    metric: Annotated[str | None, "metric that selects the best model [default: of the task]"] = None
    patience: Annotated[
        int | None, "validations without improvement before training stops; 0: never [default: 10; from scratch 0]"
    ] = None
    precision: Annotated[Precision | None, "[default: bfloat16 if the device is faster with it]"] = None
    compile: Annotated[
        bool | None, "use torch.compile [default: on a GPU; translation models from 10,000 steps on]"
    ] = None
    device: Annotated[str | None, "cuda, cuda:1, mps or cpu"] = None
    threads: Annotated[int | None, "CPU threads [default: the fastest number, measured at the start]"] = None
    workers: Annotated[int, "threads that prefetch batches"] = 1
    shard: Annotated[bool, "with several processes: shard the weights (FSDP2) instead of replicating them (DDP)"] = (
        False
    )
    freeze: Annotated[tuple[str, ...], "modules to freeze, such as encoder or *embedding*"] = ()
    lora: Annotated[int, "rank of LoRA adapters; 0: train all weights"] = 0
    tensorboard: Annotated[bool, "write TensorBoard files (pip install tensorboard)"] = False

    def __post_init__(self) -> None:
        for minimum, names in MINIMUMS.items():
            for name in names.split():
                if getattr(self, name) is not None:
                    check_at_least(name, getattr(self, name), minimum)
        for name in ("label_smoothing", "ctc", "ema", "valid_share", "save_share"):
            if getattr(self, name) is not None:
                check_below_one(name, getattr(self, name))
        for beta in self.betas:
            check_below_one("betas", beta)
        for name in ("lr", "eps", "minutes"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be greater than 0, but is {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Search options for the final scores; validations during training are greedy."""

    beam_size: Annotated[int, "beam size"] = 4
    length_penalty: Annotated[float, "scores are divided by length^alpha"] = 0.6

    def __post_init__(self) -> None:
        check_at_least("beam_size", self.beam_size, 1)
        check_at_least("length_penalty", self.length_penalty, 0)


# The tables of a run file whose fields are flags, and flags for fields that are nested deeper.
SETTING_TABLES: dict[str, type] = {
    "data": DataConfig, "data.images": ImageDataConfig, "data.audio": AudioDataConfig, "train": TrainConfig,
    "decode": DecodeConfig,
}  # fmt: skip
SHORT_FLAGS = {"tokenizer": "data.tokenizer.kind", "vocab": "data.tokenizer.vocab", "dropout": "model.dropout"}


def check_at_least(name: str, value: float, minimum: float) -> None:
    if not value >= minimum:
        raise ValueError(f"`{name}` must be {minimum} or more, but is {value}")


def check_below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"`{name}` must be at least 0 and less than 1, but is {value}")
