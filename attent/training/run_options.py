"""The settings of a run except the model's: data, training, and decoding for the final scores.

The annotations are the help texts of the flags of `attent train` and of the arguments of `attent.train`. Nothing here
imports torch, so that `attent train --help` is fast.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from attent.data.audio import AudioDataConfig
from attent.data.augment import format_rates, parse_rates
from attent.data.batch_plan import Layout
from attent.data.corpus import ReadOptions
from attent.data.filters import FilterConfig
from attent.data.images import ImageDataConfig
from attent.data.in_memory import CorpusInput
from attent.storage.errors import AttentError
from attent.text.tokenizer_training import TokenizerConfig
from attent.training.events import Event
from attent.training.tasks import DATA_HELP, TASK_HELP, TaskName

P = ParamSpec("P")
R = TypeVar("R")

Size = Literal["tiny", "small", "base", "big"]
# Of translation models: `attent.models.presets.ARCHS`.
Arch = Literal["transformer", "lstm", "lstm-no-attention", "conv"]
Schedule = Literal["inverse_sqrt", "cosine"]
Precision = Literal["float32", "bfloat16"]
MINIMUMS = {  # of numbers in `TrainConfig`, if they are set
    0: "seed warmup average patience workers lora valid_sentences clip_norm weight_decay rdrop",
    1: "steps batch_tokens accumulate micro_batch_tokens save_every keep_last valid_every threads",
}
MAX_SAMPLE_PAIRS = 100_000  # every file of a model is read with it
VALID_HELP = "validation corpora [default: those in the folder of the data, else a held-out part]"
TEST_HELP = "test corpora for the final scores [default: those in the folder of the data]"


class TrainError(AttentError):
    """Training cannot start or continue; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    src: Annotated[str | None, "source language, such as en; several separated by commas"] = None
    tgt: Annotated[str | None, "target language; several separated by commas train a multilingual model"] = None
    valid: Annotated[tuple[str, ...], VALID_HELP] = ()
    test: Annotated[tuple[str, ...], TEST_HELP] = ()
    hold_out: Annotated[
        int | None,
        "pairs or texts held out if there is no validation set; of fewer than 20 documents, characters; 0: none",
    ] = None
    tags: Annotated[bool | None, "prefix sources with a tag of the target language, <2de> [default: if several]"] = None
    context: Annotated[int, "preceding source sentences given with each sentence, of corpora in document order"] = 0
    augment: Annotated[
        tuple[str, ...] | None,
        "change training sentences so that the model is robust: capitals, typos, missing punctuation, tags and others "
        "at their usual rates, or as named (upper=0.1 typos=0.05); none [default: on for a new model on a GPU]",
    ] = None
    replay: Annotated[
        tuple[str, ...],
        "general corpora to mix in when a model is fine-tuned, each with a ratio to the new pairs (general.tsv:0.5) "
        "[default: the sample that its folder stores]; none",
    ] = ()
    store_sample: Annotated[int, "training pairs to store in the model folder, which fine-tuning it can replay"] = 0
    max_tokens: Annotated[int, "maximum length of a sentence, per side"] = 256
    too_long: Annotated[Literal["drop", "truncate"], "drop or truncate longer sentences"] = "drop"
    tokenizer_from: Annotated[str | None, "a model whose tokenizer is used [default: a new one is trained]"] = None
    layout: Annotated[
        Layout | None,
        "packed rows (GPU), bucketed by length (CPU), or bucketed in fixed shapes (LSTMs and convolutions on a GPU)",
    ] = None

    def __post_init__(self) -> None:
        if self.augment is not None:  # with the rates, for run.toml
            object.__setattr__(self, "augment", format_rates(parse_rates(self.augment)))
        check_at_least("max_tokens", self.max_tokens, 1)
        check_at_least("context", self.context, 0)
        if not 0 <= self.store_sample <= MAX_SAMPLE_PAIRS:
            raise ValueError(f"`store_sample` must be 0 to {MAX_SAMPLE_PAIRS:,}, but is {self.store_sample}")
        if self.hold_out is not None:
            check_at_least("hold_out", self.hold_out, 0)

    @property
    def augment_rates(self) -> dict[str, float]:
        """The rates by kind of augmentation; none if it is off or not chosen yet."""
        return {} if self.augment is None else parse_rates(self.augment)


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Training pairs of which a model translates one side (`synthetic_pairs`)."""

    mono_target: Annotated[
        tuple[str, ...], "text in the target language, a sentence per line; --reverse adds sources"
    ] = ()
    reverse: Annotated[tuple[str, ...], "model from the target to the source language; several: an ensemble"] = ()
    mono_source: Annotated[
        tuple[str, ...], "text in the source language, a sentence per line; --forward adds targets"
    ] = ()
    forward: Annotated[tuple[str, ...], "model from the source to the target language; several: an ensemble"] = ()
    mono_weight: Annotated[float, "sampling weight of these pairs, as of a corpus"] = 1.0
    mono_sampling: Annotated[bool, "sample the sources of --mono-target, instead of beam search"] = False
    replace_targets: bool = False  # of the training pairs too, by translations of `forward`: distillation
    n_best: int = 1  # of `replace_targets`: hypotheses, of which the one closest to the old target is chosen
    drop_share: float = 0.05  # of the pairs, those to whose tokens the model gives the lowest probability

    def __post_init__(self) -> None:
        check_at_least("n_best", self.n_best, 1)
        check_below_one("drop_share", self.drop_share)
        if not self.mono_weight > 0:
            raise ValueError(f"`mono_weight` must be greater than 0, but is {self.mono_weight}")


@dataclass(frozen=True, kw_only=True)
class DataConfig(TextOptions):
    train: tuple[str, ...] = ()  # corpora, each with an optional weight (own.tmx:3); the flag is --data
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    read_options: ReadOptions = field(default_factory=ReadOptions)
    images: ImageDataConfig | None = None  # for --task images
    audio: AudioDataConfig | None = None  # for --task speech
    synthetic: SyntheticConfig | None = None  # for --task translate

    def __post_init__(self) -> None:
        super().__post_init__()
        made = self.synthetic or SyntheticConfig()
        for name, has_text, model in (
            ("mono_target", made.mono_target, "reverse"),
            ("mono_source", made.mono_source or made.replace_targets, "forward"),
        ):
            if bool(has_text) != bool(getattr(made, model)):
                raise ValueError(
                    f"`{name}` and `{model}` must be given together, a text and the model that translates it"
                )


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
    optimizer: Annotated[Literal["adam", "adamw"], "[default: adam for translation, adamw for other tasks]"] = "adam"
    lr: Annotated[float | None, "peak learning rate, after the warm-up"] = None
    schedule: Annotated[
        Schedule | None, "decay of the learning rate; inverse_sqrt: equation 3 of the paper [default: cosine]"
    ] = None
    warmup: Annotated[int | None, "steps of linear warm-up"] = None
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: Annotated[
        float, "weight decay of matrices, with adamw [default: 0 for translation, 0.01 to 0.1 for other tasks]"
    ] = 0.0
    clip_norm: Annotated[
        float | None,
        "maximum gradient norm; 0: no clipping [default: 0 for translation by Transformers, else 1]",
    ] = None
    label_smoothing: Annotated[
        float, "probability mass spread evenly over the vocabulary [default: 0.1; 0 for lm, mlm, spans and classify]"
    ] = 0.1
    rdrop: Annotated[float | None, "weight of the R-Drop loss; 0: off [default: 5 on a GPU below 100,000 pairs]"] = None
    ctc: Annotated[float | None, "weight of the CTC loss of speech; 0: off [default: 0.3, or 0 for translation]"] = None
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
    valid_sentences: Annotated[
        int, "sentences translated per validation; 0: compute only the loss [default: 500; 200 for speech]"
    ] = 500
    metric: Annotated[str | None, "metric that selects the best model [default: of the task]"] = None
    patience: Annotated[
        int | None,
        "validations without improvement before training stops; 0: never [default: 10; 0 for translation from scratch, "
        "images, speech, captions and --minutes]",
    ] = None
    precision: Annotated[Precision | None, "[default: bfloat16 if the device is faster with it]"] = None
    compile: Annotated[bool | None, "torch.compile [default: on a GPU; translation models from 10,000 steps]"] = None
    device: Annotated[str | None, "cuda, cuda:1, mps or cpu"] = None
    threads: Annotated[int | None, "CPU threads [default: the fastest number, measured at the start]"] = None
    workers: Annotated[int, "threads that prefetch batches"] = 1
    shard: Annotated[bool, "with several processes: shard the weights (FSDP2), not replicate them (DDP)"] = False
    freeze: Annotated[tuple[str, ...], "modules to freeze, such as `encoder` or `*embedding*`"] = ()
    lora: Annotated[int, "rank of LoRA adapters; 0: train all weights"] = 0
    keep_adapter: Annotated[bool, "with --lora: also write the adapter by itself, to OUT/adapter"] = False

    def __post_init__(self) -> None:
        for minimum, names in MINIMUMS.items():
            for name in names.split():
                if getattr(self, name) is not None:
                    check_at_least(name, getattr(self, name), minimum)
        for name in ("label_smoothing", "ctc", "valid_share", "save_share"):
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


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that are not fields of one of `SETTING_TABLES`."""

    data: Annotated[
        CorpusInput,
        f"{DATA_HELP}. In Python also pairs [(source, target), ...], a pandas DataFrame or a datasets.Dataset whose "
        "columns are named by language, for translate",
    ] = field(default=(), kw_only=False)
    out: Annotated[str | Path, "folder of the model; the same folder again resumes the run"]
    task: Annotated[TaskName | None, TASK_HELP] = None
    arch: Annotated[Arch | None, "architecture of a translation model [default: transformer]"] = None
    size: Annotated[Size | None, "model size [default: from the amount of data]"] = None
    init_from: Annotated[str | Path | None, "a model to fine-tune, of attent or Hugging Face"] = None
    tokenizer: Annotated[Literal["bpe", "unigram", "char"] | None, "tokenizer to train [default: bpe]"] = None
    vocab: Annotated[int | None, "vocabulary size [default: from the data]"] = None
    dropout: Annotated[float | None, "dropout probability [default: from the amount of data]"] = None
    config: Annotated[str | Path | None, "a run file, such as the run.toml of a model"] = None


@dataclass(frozen=True, kw_only=True)
class StudentOptions:
    """Options of `attent distil` that are not those of `attent train`."""

    data: Annotated[
        CorpusInput, "source text, a sentence per line, or pairs, whose targets choose among the n best translations"
    ] = field(default=(), kw_only=False)
    teacher: Annotated[str | Path | Sequence[str | Path] | None, "a translation model; several: an ensemble"] = None
    out: Annotated[str | Path, "folder of the student; the same folder again resumes the run"]
    size: Annotated[
        str | None, "layers of encoder and decoder, and width [default: 6+2x384, or a narrower teacher's width]"
    ] = None
    megabytes: Annotated[
        float | None, "instead of --size: the largest known size of at most that many megabytes as int8"
    ] = None
    speed: Annotated[float | None, "instead of --size: the largest with that many sentences/s on this CPU, beam 4"] = (
        None
    )
    n_best: Annotated[int | None, "translations of each pair to choose from [default: 4]"] = None
    vocab: Annotated[int | None, "size of a new vocabulary [default: the teacher's tokenizer is used]"] = None


@dataclass(frozen=True, kw_only=True)
class PythonOptions:
    settings: Annotated[
        Mapping[str, Any] | None, 'any setting of the run file: {"model.dropout": 0.2, "data.filters.script": False}'
    ] = None
    overrides: Annotated[Sequence[str], 'the same as text: ["model.dropout=0.2"]'] = ()
    callbacks: Annotated[
        Callable[[Event], object] | Sequence[Callable[[Event], object]],
        "functions called with each event (`attent.training.events`); if one raises, the run is saved and stops",
    ] = ()
    progress: Annotated[bool, "show progress: in a notebook with curves, elsewhere on stderr"] = True
    should_stop: Annotated[Callable[[], bool] | None, "called often; True stops the run after a checkpoint"] = None
    force_exit: Annotated[bool, "a second Ctrl-C ends the process, instead of raising KeyboardInterrupt"] = False


@dataclass(frozen=True, kw_only=True)
class TrainOptions(
    RunOptions, TextOptions, SyntheticConfig, TrainConfig, DecodeConfig, ImageDataConfig, AudioDataConfig, PythonOptions
):
    """The arguments of `attent.train`, as one declaration for type checkers and `help`. There are no instances."""

    valid: Annotated[CorpusInput, VALID_HELP] = ()  # type: ignore[assignment]
    test: Annotated[CorpusInput, TEST_HELP] = ()  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class DistilOptions(StudentOptions, TextOptions, TrainConfig, DecodeConfig, PythonOptions):
    """The arguments of `attent.distil`."""

    valid: Annotated[CorpusInput, VALID_HELP] = ()  # type: ignore[assignment]
    test: Annotated[CorpusInput, TEST_HELP] = ()  # type: ignore[assignment]


# The tables of a run file whose fields are options, and the paths of other options in it.
SETTING_TABLES: dict[str, type] = {
    "data": TextOptions, "data.synthetic": SyntheticConfig, "train": TrainConfig, "decode": DecodeConfig,
    "data.images": ImageDataConfig, "data.audio": AudioDataConfig,
}  # fmt: skip
OPTION_PATHS = {
    "task": "task", "arch": "arch", "size": "size", "init_from": "init_from", "tokenizer": "data.tokenizer.kind",
    "vocab": "data.tokenizer.vocab", "dropout": "model.dropout",
}  # fmt: skip
OPTION_GROUPS: dict[str, type] = {
    "What to train": RunOptions, "Text": TextOptions, "Monolingual text": SyntheticConfig, "Recipe": TrainConfig,
    "Scores": DecodeConfig, "Images": ImageDataConfig, "Speech": AudioDataConfig, "Python": PythonOptions,
}  # fmt: skip


DISTIL_GROUPS: dict[str, type] = {"Student": StudentOptions} | {
    title: table for title, table in OPTION_GROUPS.items() if issubclass(DistilOptions, table)
}


def accept_options(
    options: Callable[P, object], groups: Mapping[str, type] = OPTION_GROUPS
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Type a function as one that takes the arguments of `options`, and list them in its signature and docstring."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        hints = get_type_hints(options, include_extras=True)
        parameters, lines = [], [inspect.getdoc(function) or ""]
        for group, table in groups.items():
            lines += ["", f"{group}:"]
            for option in fields(table):
                if get_origin(hints[option.name]) is Annotated:
                    default = inspect.Parameter.empty if option.default is MISSING else option.default
                    is_first = option.name == "data"
                    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if is_first else inspect.Parameter.KEYWORD_ONLY
                    parameters.append(inspect.Parameter(option.name, kind, default=default))
                    lines.append(_describe_option(option, *get_args(hints[option.name])))
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__doc__ = "\n".join(lines)
        return function

    return decorate


def _describe_option(option: Field[Any], kind: Any, help_text: str) -> str:
    """`    lr (float): peak learning rate`, with the names of flags as in Python."""
    members = [member for member in get_args(kind) if member is not NoneType] if NoneType in get_args(kind) else [kind]
    type_name = re.sub(r"\b(\w+\.)+(?=\w)", "", " | ".join(map(inspect.formatannotation, members)))
    text = re.sub("--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), help_text)
    if "[default" not in text and option.default not in (None, (), MISSING):
        text += f" [default: {option.default}]"
    return f"    {option.name} ({type_name}): {text}"


def check_at_least(name: str, value: float, minimum: float) -> None:
    if not value >= minimum:
        raise ValueError(f"`{name}` must be {minimum} or more, but is {value}")


def check_below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"`{name}` must be at least 0 and less than 1, but is {value}")
