"""What the loop and `attent train` need of a task, and nothing about any one of them.

A task (translation, next words, masked words, spans, labels of texts, labels of images) is its `Material`: how its data
become batches, which model suits them, what is made small, and how the result is judged. Each is made by a function
`prepare(run, tokenizer, place) -> Material` (see `attent.cli.training.material_of`); the loop sees batches, an
objective and a judge only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from attent.data.arrays import Array
from attent.data.loader import LoaderPosition
from attent.models import Model, ModelConfig
from attent.text.tokenizer import Tokenizer
from attent.training import model_card
from attent.training.config import Run, Size, TrainConfig, UserSettings
from attent.training.events import EventHandler, ValidationSample

# ---- what the loop sees ----------------------------------------------------------------------------------------------


class TrainBatch(Protocol):
    """Some rows of whatever is learned from."""

    @property
    def num_targets(self) -> int:
        """Terms of the loss, over which its mean is taken: target tokens, masked words, texts, images."""

    @property
    def num_tokens(self) -> int:
        """What the model reads, without filler: for the speed."""

    @property
    def num_padded_tokens(self) -> int:
        """The same with filler, of the larger side: for cutting into pieces."""

    @property
    def row_length(self) -> int:
        """Slots of one row."""

    @property
    def example_ids(self) -> Array:
        """Numbers that say which data these are: they go into the digest of the order."""

    def __len__(self) -> int:
        """Rows."""

    def slice_rows(self, start: int, stop: int) -> TrainBatch: ...

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TrainBatch: ...

    def pin_memory(self) -> TrainBatch: ...


class BatchLoader(Protocol):
    """All batches, each a pure function of its epoch, its step and the seed (see `attent.data.drawn.Drawn`)."""

    def num_steps(self, epoch: int) -> int: ...

    def get_batch(self, epoch: int, step: int) -> TrainBatch: ...

    def iter_batches(
        self, start: LoaderPosition = ..., *, workers: int = ..., prefetch: int = ..., pin_memory: bool = ...
    ) -> Iterator[tuple[LoaderPosition, Any]]: ...

    def describe_too_long(self, epoch: int = 0) -> str | None:
        """A sentence about what is left out or cut, if anything is."""


class ObjectiveFactory(Protocol):
    """A class such as `objective.Objective`: of a model it makes the module that turns a batch into
    (sum of the loss, sum of the plain cross-entropy in nats without a gradient), both over `batch.units`."""

    def __call__(
        self,
        model: Any,
        *,
        smoothing: float = ...,
        rdrop: float = ...,
        compile: bool = ...,  # noqa: A002
    ) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """What a validation found beside the loss: figures by name (of `FIGURES`, the more the better)."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[ValidationSample, ...] = ()


ValidationMetric = Literal["bleu", "chrf", "exact", "accuracy"]  # the last two in per cent
VALIDATION_METRICS: tuple[ValidationMetric, ...] = ("bleu", "chrf", "exact", "accuracy")
Evaluator = Callable[[Any], EvalResult]


# ---- what `attent train` sees ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Where a run is prepared, who is told, and whether someone has asked to stop."""

    data_dir: Path  # for what is made once and found again: `state/data` of the run
    device: torch.device
    report: EventHandler
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, kw_only=True)
class FinalScores:
    """What the finished model scores on one set."""

    name: str
    split: Literal["validation", "test"]
    num_examples: int  # pairs, texts, images
    metrics: Mapping[str, float]  # by name: loss, bleu, accuracy ...
    summary: str  # "accuracy 92.1% (90.3 to 93.8)"
    extra_columns: tuple[
        tuple[str, str], ...
    ] = ()  # columns of the card's table beside the usual: ("Accuracy", "92.1%")
    decoding: str = ""  # "beam 4"
    signatures: tuple[str, ...] = ()
    samples: tuple[ValidationSample, ...] = ()


class Task(Protocol):
    """The data of a run, ready to be learned from, and all that is done with them."""

    @property
    def model_class(self) -> type[Any]:
        """Of the model: Seq2Seq, CausalLM, Encoder, Vision."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """It is saved beside the model."""

    @property
    def title(self) -> str:
        """What is learned, in a word or two, for the display: `en-de`."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """What checkpoints must have been made with: {"data": a digest, "tokenizer": another}."""

    @property
    def objective_class(self) -> ObjectiveFactory: ...

    def choose_model(self, run: Run, requested: UserSettings) -> tuple[Size, ModelConfig, str]:
        """For a model from nothing: its size, its config with what was asked for on top (`model_of`), and why."""

    def build_finetune_config(self, model: Any, requested: UserSettings, origin: str) -> ModelConfig:
        """The config with which the model of `--from where` is trained further; what cannot be is refused."""

    def build_model(self, config: Any, pretrained: Any) -> Model:
        """A model of this config, with the weights of `loaded` where it has them (None: from nothing)."""

    def fill_train_config(self, run: Run, size: Size | None, config: Any, *, finetune: bool) -> TrainConfig:
        """Every None of `run.train` filled in, from the amount of data and the machine."""

    def describe_choices(self, run: Run, size_reason: str) -> Iterator[str]:
        """What was chosen, as sentences."""

    def build_train_batches(self, run: Run) -> BatchLoader: ...

    def build_valid_batches(self, run: Run) -> BatchLoader | None: ...

    def build_evaluator(self, run: Run) -> Evaluator | None: ...

    def score_model(self, model: Any, run: Run) -> Iterator[FinalScores]:
        """The scores at the end, by the weights that were kept."""

    def write_analysis(self, model: Any, out: Path) -> None:
        """What else is measured and remembered in the folder of a finished model."""

    def describe_data(self) -> model_card.DataSummary:
        """What it learned from, for the card."""

    def describe_model(self, out: Path) -> model_card.ModelDescription:
        """How the card and the last line speak of such a model."""
