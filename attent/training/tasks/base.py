"""The interface between a task and the training loop: batches, objective, evaluator, and the `Task` class itself."""

import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from attent.data.arrays import Array, select_evenly
from attent.data.batch_plan import BatchConfig
from attent.data.loader import PrefetchLoader, TensorBatch, TokenBatch
from attent.data.media_store import describe_skipped
from attent.data.pairs import CorpusError
from attent.data.text_corpus import TextFiles, list_eval_files
from attent.formatting import format_duration
from attent.models import Model, ModelConfig, build, folder
from attent.storage.atomic import atomic_path
from attent.storage.manifest import hash_file
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from attent.training.config import DataConfig, RunConfig, Size, TrainConfig, TrainError, UserSettings
from attent.training.events import EventHandler, Note, ValidationSample

T = TypeVar("T")
Split = Literal["validation", "test"]
SPLIT_NAMES = ("train", "valid", "test")  # of data
HEAD_NAMES = ("classifier", "pooler", "masked_lm")  # modules that a pretrained model may lack
REPORT_SECONDS = 5.0  # between two progress notes
VALID_BATCH_TOKENS = 4096  # per validation batch, unless a single row is longer
# Training settings of the tasks that are newer than the paper's recipe: weight decay, a learning rate that falls to
# zero, clipped gradients; label smoothing only where there are few labels.
MODERN_RECIPE: dict[str, Any] = {
    "optimizer": "adamw", "schedule": "cosine", "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.1,
    "clip_norm": 1.0, "label_smoothing": 0.0,
}  # fmt: skip


class TrainBatch(Protocol):
    @property
    def num_targets(self) -> int:
        """Terms of the loss, over which its mean is taken: target tokens, masked tokens, texts, images."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads, without padding; for throughput."""

    @property
    def num_padded_tokens(self) -> int:
        """The same with padding, of the larger side; for splitting into micro-batches."""

    @property
    def row_length(self) -> int: ...

    @property
    def example_ids(self) -> Array:
        """Indices of the examples in the data; the loop hashes them to fingerprint the order."""

    def __len__(self) -> int:
        """Number of rows."""

    def slice_rows(self, start: int, stop: int) -> "TrainBatch": ...

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "TrainBatch": ...

    def pin_memory(self) -> "TrainBatch": ...


@dataclass(frozen=True)
class RowBatch(TensorBatch):
    """A `TrainBatch` whose tensors and arrays have a row for each example; a base of dataclasses."""

    example_ids: Array = field(kw_only=True)

    def __len__(self) -> int:
        return len(self.example_ids)

    @property
    def row_length(self) -> int:
        raise NotImplementedError

    @property
    def num_padded_tokens(self) -> int:
        return len(self) * self.row_length

    def slice_rows(self, start: int, stop: int) -> Self:
        parts: dict[str, Any] = {
            name: value.slice_rows(start, stop) if isinstance(value, TokenBatch) else value[start:stop]
            for name, value in vars(self).items()
            if isinstance(value, Tensor | np.ndarray | TokenBatch)
        }
        return replace(self, **parts)


BatchLoader = PrefetchLoader[Any]  # all batches, each a pure function of the epoch, its index and the seed


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Metrics of a validation besides the loss, by their names in `attent.scoring.metrics.METRICS`."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[ValidationSample, ...] = ()


Evaluator = Callable[[Any], EvalResult]
# (model, *, smoothing, rdrop, compile) -> a module that maps a batch to the sums of the loss and of the plain
# cross-entropy in nats (without a gradient) over `batch.num_targets`.
ObjectiveFactory = Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class RunContext:
    data_dir: Path  # for files that are made once and reused: `state/data` of the run
    device: torch.device
    report: EventHandler
    should_stop: Callable[[], bool] = lambda: False
    is_new: bool = True  # False: the run has a checkpoint

    def note(self, text: str) -> None:
        self.report(Note(text=text))

    def warn(self, text: str) -> None:
        self.report(Note(text=text, level="warning"))

    def warn_of_skipped(self, dataset: Any) -> None:
        if problem := describe_skipped(dataset.name, dataset.skipped):
            self.warn(problem)

    def track_progress(self, action: str, unit: str, total: int | None = None) -> Callable[[int], None]:
        """Return a function that takes the number done and reports it and the time left every few seconds."""
        start = last = time.monotonic()

        def report(done: int) -> None:
            nonlocal last
            if time.monotonic() - last < REPORT_SECONDS:
                return
            if total is None:
                last = time.monotonic()
                self.note(f"{action}: {done:,} {unit} ...")
            elif 0 < done < total:
                last = time.monotonic()
                left = format_duration((last - start) * (total - done) / done)
                self.note(f"{action}: {done:,} of {total:,} {unit}, about {left} left")

        return report


@dataclass(frozen=True, kw_only=True)
class FinalScores:
    name: str
    split: Split
    num_examples: int
    metrics: Mapping[str, float]  # those of `METRICS`, loss, perplexity ...
    summary: str  # "accuracy 92.1% (90.3 to 93.8)"
    extra_columns: tuple[tuple[str, str], ...] = ()  # of the model card's table: ("Perplexity", "4.2")
    decoding: str = ""  # "beam 4"
    weights: str = ""  # of another model than the trained one
    signatures: tuple[str, ...] = ()
    samples: tuple[ValidationSample, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CorpusStats:
    name: str
    num_read: int
    num_used: int
    dropped: tuple[tuple[str, int], ...] = ()  # (reason, count)
    files: tuple[tuple[str, str], ...] = ()  # (name, SHA-256 or "" if it could not be read again)
    weight: float = 1.0  # sampling weight

    @classmethod
    def from_counts(cls, name: str, num_used: int, dropped: Mapping[str, int], files: Sequence[Path]) -> Self:
        return cls(
            name=name,
            num_read=num_used + sum(dropped.values()),
            num_used=num_used,
            dropped=tuple((reason, count) for reason, count in dropped.items() if count),
            files=hash_files([str(path) for path in files], files),
        )


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    corpora: tuple[CorpusStats, ...]
    source_tokens: int = 0
    target_tokens: int = 0  # 0 where there is one side only; both 0: not counted in tokens
    data_key: str  # the first digits of a SHA-256 of the text, the filters and the tokenizer
    num_held_out: int  # examples used for validation only
    held_out_method: str  # "selected by a hash of ...", "valid.tsv", or "" without a validation set


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """How the model card and the last line of a run describe a model."""

    title: str  # "en-de translator"
    shell_example: str
    python_example: str
    next_step: str = ""  # "try it: attent translate runs/en-de"; by default the shell example
    loss_unit: str = "target token"
    note: str = ""  # below the scores
    samples_title: str = "Samples"
    sample_labels: tuple[str, str, str] = ("Source", "Reference", "Output")
    has_two_sides: bool = False  # reads a source and a target

    def __post_init__(self) -> None:
        if not self.next_step:
            object.__setattr__(self, "next_step", f"try it: {self.shell_example}")


class Task(ABC):
    """One kind of training; an instance holds the prepared data of a run."""

    model_class: ClassVar[type[Any]]
    pretrained_classes: ClassVar[tuple[type[Any], ...]] = ()  # other models to start from (--from), without a tokenizer
    config_class: ClassVar[type[Any]]
    objective_class: ClassVar[ObjectiveFactory]
    unit: ClassVar[str]  # of what it is trained on: "pair", "text"
    metrics: ClassVar[tuple[str, ...]]  # that can select the best model; the first is the default
    used_settings: ClassVar[frozenset[str]]  # which of `attent.training.config.TASK_SETTINGS` it reads
    default_settings: ClassVar[dict[str, Any]] = {}  # where they differ from `RunConfig`'s
    cpu_minutes: ClassVar[float | None] = None  # the most that training from scratch takes on a CPU by default
    look_example_input: ClassVar[str] = ""  # of the `attent look` command that is suggested at the end

    held_out_method: ClassVar[str]  # "drawn at random"

    tokenizer: Tokenizer | None  # saved in the model folder
    extra_files: Mapping[str, bytes] = {}  # saved there too
    train_data: Any
    data_files: Sequence[Path]
    validation: Any  # None without one
    is_held_out: bool  # `validation` was taken from the training data

    @abstractmethod
    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None, context: RunContext) -> None:
        """Prepare the data of a run; `tokenizer` is that of the model to start from, or of the run to resume."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A word or two for the progress display: `en-de`."""

    @property
    @abstractmethod
    def fingerprints(self) -> Mapping[str, str]:
        """Hashes that a checkpoint must match: {"data": ..., "tokenizer": ...}."""

    @classmethod
    @abstractmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> ModelConfig:
        """Any config of the requested class, to validate the `model` table before the data are read."""

    @classmethod
    def choose_metric(cls, run: RunConfig) -> str:
        """Return the metric that selects the best model if the user names none."""
        return cls.metrics[0]

    @classmethod
    def adapt_run(cls, run: RunConfig, requested: UserSettings, config: ModelConfig, report: EventHandler) -> RunConfig:
        """Adapt a run to the model that it starts from, before the data are read."""
        return run

    @abstractmethod
    def choose_model(self, run: RunConfig, requested: UserSettings) -> tuple[Size, ModelConfig, str]:
        """Return (size, config with the requested settings applied, reason) for a model from scratch."""

    @abstractmethod
    def build_finetune_config(self, model: Any, requested: UserSettings, origin: str) -> ModelConfig:
        """The config with which the model of `--from origin` is fine-tuned."""

    def build_model(self, config: Any, pretrained: Any) -> Model:
        """A model of this config, with the weights of `pretrained` where it has them (None: from scratch)."""
        return build(config) if pretrained is None else load_pretrained(config, pretrained)

    @abstractmethod
    def fill_train_config(self, run: RunConfig) -> TrainConfig:
        """`run.train` with every None replaced, from the amount of data, the device, `run.size` and `run.model`."""

    @abstractmethod
    def describe_choices(self, run: RunConfig, size_reason: str) -> Iterator[str]:
        """Sentences about the model and the schedule."""

    @abstractmethod
    def build_train_batches(self, run: RunConfig) -> BatchLoader: ...

    @abstractmethod
    def build_valid_batches(self, run: RunConfig) -> BatchLoader | None: ...

    def get_objective_factory(self, run: RunConfig) -> ObjectiveFactory:
        """Return `objective_class` with the settings of the run that only this task has."""
        return self.objective_class

    def build_evaluator(self, run: RunConfig) -> Evaluator | None:
        return None

    @abstractmethod
    def score_model(self, model: Any, run: RunConfig) -> Iterator[FinalScores]:
        """Score the selected weights on the validation set and each test set."""

    def estimate_scoring_seconds(self, model: Any, run: RunConfig) -> float:
        """Time of `score_model`, measured with a sample and an untrained model."""
        return 0.0

    def write_analysis(self, model: Any, out: Path) -> None:  # noqa: B027 - most tasks have none
        """Write further analyses of the finished model, such as head statistics, into its folder."""

    def describe_train_data(self) -> str:
        return str(self.train_data.name)

    def describe_data(self) -> DataSummary:
        train, valid = self.train_data, self.validation
        num_held_out = 0 if valid is None else len(valid)
        dropped = {"not usable": len(train.skipped), "held out for validation": num_held_out * self.is_held_out}
        return DataSummary(
            corpora=(CorpusStats.from_counts(self.describe_train_data(), len(train), dropped, self.data_files),),
            data_key=train.store_key,
            num_held_out=num_held_out,
            held_out_method="" if valid is None else self.held_out_method if self.is_held_out else valid.name,
        )

    @abstractmethod
    def describe_model(self, out: Path) -> ModelDescription: ...


def find_new_head_parameters(model: Model, pretrained: Any) -> tuple[str, ...]:
    """Return the head parameters that `pretrained` lacks. A classifier for other labels is always new."""
    known = pretrained.state_dict()
    labels_differ = getattr(pretrained.config, "labels", ()) != getattr(model.config, "labels", ())
    names = [name for name, _ in model.named_parameters() if name.partition(".")[0] in HEAD_NAMES]
    return tuple(name for name in names if name not in known or (labels_differ and name.startswith("classifier.")))


def load_pretrained(config: ModelConfig, pretrained: Any) -> Model:
    model = build(config)
    new_heads, known = set(find_new_head_parameters(model, pretrained)), pretrained.state_dict()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name not in new_heads}
    weights = {name: known[name] for name in shapes if name in known}
    folder.check_tensors(shapes, weights, "--from")
    model.load_state_dict(weights, strict=False)
    return model.train()


def build_python_example(class_name: str, folder: Path | str, call: str) -> str:
    name = class_name.lower()
    return f"import attent\n\n{name} = attent.{class_name}.load({str(folder)!r})\nprint({name}{call})"


def select_samples(
    sources: Sequence[str], references: Sequence[str], outputs: Sequence[str], max_samples: int
) -> tuple[ValidationSample, ...]:
    samples = select_evenly(list(zip(sources, references, outputs, strict=True)), max_samples)
    return tuple(ValidationSample(source=s, reference=r, output=o) for s, r, o in samples)


def build_batch_config(
    data: DataConfig, train: TrainConfig, max_tokens: int, too_long: Literal["drop", "truncate"] = "truncate"
) -> BatchConfig:
    assert train.batch_tokens
    assert data.layout
    limit = min(max_tokens, train.batch_tokens)
    return BatchConfig(batch_tokens=train.batch_tokens, max_tokens=limit, layout=data.layout, too_long=too_long)


def check_hold_out(count: int, available: int, noun: str) -> None:
    if count >= available:
        raise TrainError(
            f"`data.hold_out` must be less than the {available:,} {noun} there are, but is {count:,}; add {noun}, name "
            "a validation set with --valid, or train without one (--hold-out 0)"
        )


def find_splits(data: DataConfig, find: Callable[[str], Mapping[str, T]], noun: str) -> dict[str, list[tuple[str, T]]]:
    """Return (path, part) by split: of the paths that are named for it, else of those parts of the training data."""
    available = [(path, find(path)) for path in data.train]
    splits = {split: [(path, parts[split]) for path, parts in available if split in parts] for split in SPLIT_NAMES}
    if not splits["train"]:
        names = ", ".join(available[0][1])
        raise TrainError(f"{data.train[0]}: must have training {noun}, but has only its {names} part")
    for split, named in (("valid", data.valid), ("test", data.test)):
        parts = [(path, find(path)) for path in named]
        matches = [(path, part.get(split) or part.get("train") or next(iter(part.values()))) for path, part in parts]
        splits[split] = matches or splits[split]
    return splits


def reject_or_skip_test_set(problem: str, requested: bool, context: RunContext) -> None:
    """Refuse a test set that was named; skip one that was found automatically."""
    if requested:
        raise TrainError(problem)
    context.warn(f"{problem}; this test set was found automatically and is skipped")


def load_eval_sets(
    data: DataConfig,
    files: TextFiles,
    suffixes: Sequence[str],
    read: Callable[[Sequence[Path]], T],
    context: RunContext,
) -> tuple[T | None, list[T]]:
    """Read the validation set, if there is one, and each test set: those that are named, else those of `files`."""
    valid_files = list_eval_files(data.valid, "valid", suffixes) if data.valid else files.valid
    valid, tests = read(valid_files) if valid_files else None, list[T]()
    for path in list_eval_files(data.test, "test", suffixes) if data.test else files.test:
        try:
            tests.append(read([path]))
        except CorpusError as error:
            reject_or_skip_test_set(str(error), bool(data.test), context)
    return valid, tests


def train_text_tokenizer(
    texts: Sequence[str],
    config: TokenizerConfig,
    context: RunContext,
    seed: int,
    *,
    tags: Sequence[str] = (),
    mask: bool = False,
    sentinels: int = 0,
) -> Tokenizer:
    context.note("training the tokenizer ...")
    tokenizer = train_monolingual_tokenizer(texts, config, tags=tags, mask=mask, sentinels=sentinels, seed=seed)
    pieces = "characters and bytes" if config.kind == "char" else "subwords"
    languages = f", {len(tags)} languages" if tags else ""
    context.note(f"tokenizer: {config.kind}, {tokenizer.target.size:,} {pieces}{languages}")
    return tokenizer


def hash_files(names: Sequence[str], paths: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    digests = []
    for path in paths:
        try:
            digests.append(hash_file(path.expanduser()).sha256)
        except OSError:
            digests.append("")
    return tuple(zip(names, digests, strict=True))


def spool_stdin(names: Sequence[str], data_dir: Path) -> list[str]:
    copy = data_dir / "stdin"
    if "-" in names and not copy.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        with atomic_path(copy) as temporary, open(temporary, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    return [str(copy) if name == "-" else name for name in names]
