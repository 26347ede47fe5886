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
from attent.data.batches import Position
from attent.models import Model, ModelConfig
from attent.text.tokenizer import Tokenizer
from attent.train import card
from attent.train.config import Asked, Run, Size, TrainConfig
from attent.train.events import Sample, Tell

# ---- what the loop sees ----------------------------------------------------------------------------------------------


class Batch(Protocol):
    """Some rows of whatever is learned from."""

    @property
    def units(self) -> int:
        """Terms of the loss, over which its mean is taken: target tokens, masked words, texts, images."""

    @property
    def tokens(self) -> int:
        """What the model reads, without filler: for the speed."""

    @property
    def slots(self) -> int:
        """The same with filler, of the larger side: for cutting into pieces."""

    @property
    def width(self) -> int:
        """Slots of one row."""

    @property
    def pairs(self) -> Array:
        """Numbers that say which data these are: they go into the digest of the order."""

    def __len__(self) -> int:
        """Rows."""

    def rows(self, start: int, stop: int) -> Batch: ...

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch: ...

    def pinned(self) -> Batch: ...


class Batches(Protocol):
    """All batches, each a pure function of its epoch, its step and the seed (see `attent.data.drawn.Drawn`)."""

    def steps(self, epoch: int) -> int: ...

    def batch(self, epoch: int, step: int) -> Batch: ...

    def walk(
        self, start: Position = ..., *, workers: int = ..., ahead: int = ..., pin: bool = ...
    ) -> Iterator[tuple[Position, Any]]: ...

    def too_long(self, epoch: int = 0) -> str | None:
        """A sentence about what is left out or cut, if anything is."""


class MakeObjective(Protocol):
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
class Judged:
    """What a validation found beside the loss: figures by name (of `FIGURES`, the more the better)."""

    figures: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()


Figure = Literal["bleu", "chrf", "exact", "accuracy"]  # the last two in per cent
FIGURES: tuple[Figure, ...] = ("bleu", "chrf", "exact", "accuracy")
Judge = Callable[[Any], Judged]


# ---- what `attent train` sees ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run is prepared, who is told, and whether someone has asked to stop."""

    folder: Path  # for what is made once and found again: `state/data` of the run
    device: torch.device
    tell: Tell
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the finished model scores on one set."""

    name: str
    part: Literal["validation", "test"]
    count: int  # pairs, texts, images
    figures: Mapping[str, float]  # by name: loss, bleu, accuracy ...
    told: str  # "accuracy 92.1% (90.3 to 93.8)"
    more: tuple[tuple[str, str], ...] = ()  # columns of the card's table beside the usual: ("Accuracy", "92.1%")
    how: str = ""  # "beam 4"
    signatures: tuple[str, ...] = ()
    samples: tuple[Sample, ...] = ()


class Material(Protocol):
    """The data of a run, ready to be learned from, and all that is done with them."""

    @property
    def kind(self) -> type[Any]:
        """Of the model: Seq2Seq, CausalLM, Encoder, Vision."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """It is saved beside the model."""

    @property
    def title(self) -> str:
        """What is learned, in a word or two, for the display: `en-de`."""

    @property
    def identity(self) -> Mapping[str, str]:
        """What checkpoints must have been made with: {"data": a digest, "tokenizer": another}."""

    @property
    def objective(self) -> MakeObjective: ...

    def sized(self, run: Run, asked: Asked) -> tuple[Size, ModelConfig, str]:
        """For a model from nothing: its size, its config with what was asked for on top (`model_of`), and why."""

    def kept(self, model: Any, asked: Asked, where: str) -> ModelConfig:
        """The config with which the model of `--from where` is trained further; what cannot be is refused."""

    def begin(self, config: Any, loaded: Any) -> Model:
        """A model of this config, with the weights of `loaded` where it has them (None: from nothing)."""

    def recipe(self, run: Run, size: Size | None, config: Any, *, further: bool) -> TrainConfig:
        """Every None of `run.train` filled in, from the amount of data and the machine."""

    def told(self, run: Run, why: str) -> Iterator[str]:
        """What was chosen, as sentences."""

    def batches(self, run: Run) -> Batches: ...

    def valid(self, run: Run) -> Batches | None: ...

    def judge(self, run: Run) -> Judge | None: ...

    def outcomes(self, model: Any, run: Run) -> Iterator[Outcome]:
        """The scores at the end, by the weights that were kept."""

    def after(self, model: Any, out: Path) -> None:
        """What else is measured and remembered in the folder of a finished model."""

    def data(self) -> card.Data:
        """What it learned from, for the card."""

    def words(self, out: Path) -> card.Words:
        """How the card and the last line speak of such a model."""
