"""Which parts of a translator matter: each is silenced in turn, the same text is translated and scored anew.

Base and ablations differ in the silence alone: the same pairs, the same search, the same engine, plain beam search (no
second look at what runs in circles, which would hide the damage). BLEU comes from outside, with its signature. What was
measured is kept in the model folder with a mark of the weights; which heads to remove is left to `prune`.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from attent import settings
from attent.decode.align import mark
from attent.decode.engine import Stopped
from attent.decode.force import BATCH_TOKENS, Row, encoded, log_probs_of_ids
from attent.decode.options import Search
from attent.decode.translator import EngineName, Translator
from attent.interop.ctranslate2 import ConversionError, check_expressible, never_written, package
from attent.look.silence import Part, found, parts_of, silenced
from attent.models import Seq2Seq

NAME = "ablation.json"
GPU_TOKENS = 65_536  # of either side that are read at once; on a CPU fewer are as quick

Kind = Literal["head", "sublayer", "layer"]
KINDS: tuple[Kind, ...] = ("head", "sublayer", "layer")
STACKS, USES = ("encoder", "decoder"), ("own", "cross", "feedforward")
What = Literal["heads", "sublayers", "layers", "all"]


class AblationError(ValueError):
    """What cannot be measured, in a sentence."""


# ---- facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The pairs to measure by."""

    name: str
    sources: tuple[str, ...]
    references: tuple[str, ...]
    to: str | None = None  # the language to ask for, for a model that was trained with tags

    def __post_init__(self) -> None:
        if not self.sources or len(self.sources) != len(self.references):
            counts = f"{len(self.sources):,} sources and {len(self.references):,} references"
            raise AblationError(f"{self.name}: there must be pairs to measure by, but there are {counts}; give others")

    @property
    def digest(self) -> str:
        """By which to know these very texts again."""
        texts = json.dumps([self.sources, self.references, self.to]).encode()
        return hashlib.sha256(texts).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Bleu:
    """How translations are scored."""

    of: Callable[[Sequence[str], Sequence[str]], float]  # outputs, references
    signature: str
    # outputs, those of the whole model, references: how probable such a difference would be by chance
    chance: Callable[[Sequence[str], Sequence[str], Sequence[str]], float] | None = None


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all figures must have in common to be compared."""

    data: str  # the name of the pairs
    digest: str  # of their texts
    sentences: int
    to: str | None
    search: Search
    engine: str
    signature: str  # of BLEU
    model: str  # the mark of the weights

    def differing(self, other: Conditions) -> list[str]:
        """What is not the same; the name of the pairs may be another, if they are the same pairs."""
        return [f.name for f in fields(self) if f.name != "data" and getattr(self, f.name) != getattr(other, f.name)]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The model without one part."""

    part: str
    kind: Kind
    bleu: float
    loss: float  # mean negative log-probability of a token of the references
    changed: int  # translations that are no longer the same
    p: float | None = None  # how probable such a difference of BLEU would be by chance


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """`ablation.json`: the whole model, and the model without each part."""

    format: Literal["attent-ablation"] = "attent-ablation"
    version: Literal[1] = 1
    conditions: Conditions
    bleu: float
    loss: float
    tokens: int  # of the references, ends included
    effects: tuple[Effect, ...] = ()

    def of(self, *kinds: Kind) -> list[Effect]:
        """The effects of parts of these kinds, the most harmful silence first."""
        some = [effect for effect in self.effects if effect.kind in kinds]
        return sorted(some, key=lambda effect: (effect.bleu, -effect.loss, effect.part))

    def document(self) -> dict[str, Any]:
        """The section of a trace document."""
        rows = in_order(self.effects)
        parts = [{"part": one.part, "kind": one.kind, "bleu": one.bleu, "loss": one.loss} for one in rows]
        return {"sentences": self.conditions.sentences, "bleu": self.bleu, "loss": self.loss, "parts": parts}


def in_order(effects: Iterable[Effect]) -> list[Effect]:
    """As the model is built: heads, sub-layers, layers; the encoder before the decoder, the first layer first."""
    return sorted(effects, key=lambda effect: (KINDS.index(effect.kind), *place(Part.parse(effect.part))))


def place(part: Part) -> tuple[int, int, int, int]:
    stack, _, layer, *use = part.path.split(".")
    return STACKS.index(stack), USES.index(use[0]) if use else 0, int(layer), part.head or 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """How far it is."""

    done: int
    all: int
    effect: Effect


# ---- the work --------------------------------------------------------------------------------------------------------


def ablate(
    translator: Translator,
    sample: Sample,
    parts: Iterable[Part],
    *,
    search: Search,
    score: Bleu,
    done: Ablation | None = None,
    keep: Callable[[Ablation], None] | None = None,
    progress: Callable[[Step], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Ablation:
    """Silence each part in turn and measure.

    done      what was measured before: it is taken over where the conditions are the same, and dropped where not
    keep      is given all that there is after each part, so that nothing is lost when it is interrupted
    progress  is told how far it is
    stop      asked again and again; if it answers True, `Stopped` is raised
    """
    meter = Meter(translator, sample, search=search, score=score, stop=stop)
    wanted = list(dict.fromkeys(parts))
    check_parts(meter.model, wanted)
    ablation = done if done is not None and not done.conditions.differing(meter.conditions) else None
    known = set() if ablation is None else {effect.part for effect in ablation.effects}
    left = [part for part in wanted if str(part) not in known]
    if ablation is None:
        ablation = meter.start()
    for number, part in enumerate(left, len(wanted) - len(left) + 1):
        effect = meter.effect(part)
        ablation = replace(ablation, effects=(*ablation.effects, effect))
        if keep is not None:
            keep(ablation)
        if progress is not None:
            progress(Step(done=number, all=len(wanted), effect=effect))
    return ablation


def parts_to_silence(model: nn.Module, what: What) -> list[Part]:
    if what == "all":
        return [part for grain in ("heads", "sublayers", "layers") for part in parts_of(model, grain)]
    return parts_of(model, what)


def check_parts(model: nn.Module, parts: Collection[Part]) -> None:
    if not parts:
        raise AblationError("there must be parts to silence, but none are named; name heads, sub-layers or layers")
    for part in parts:
        found(model, part)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One measurement."""

    outputs: tuple[str, ...]
    bleu: float
    loss: float


class Meter:
    """Translates and scores the same pairs again and again, with this or that part of the model silent."""

    def __init__(
        self,
        translator: Translator,
        sample: Sample,
        *,
        search: Search,
        score: Bleu,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        if not isinstance(translator.model, Seq2Seq):
            raise AblationError("one model must be looked at, but this is an ensemble; give one folder")
        self.translator, self.model = translator, translator.model
        self.sample, self.search, self.score, self.stop = sample, search, score, stop
        self.engine = engine_of(translator)
        self.known: dict[tuple[str, ...], float] = {}  # many a silence changes nothing: BLEU of equal outputs

    @cached_property
    def conditions(self) -> Conditions:
        return Conditions(
            data=self.sample.name,
            digest=self.sample.digest,
            sentences=len(self.sample.sources),
            to=self.sample.to,
            search=self.search,
            engine=engine_in_words(self.translator, self.engine),
            signature=self.score.signature,
            model=mark(self.model),
        )

    @cached_property
    def base(self) -> Figures:
        return self.without(())

    def start(self) -> Ablation:
        """The whole model."""
        return Ablation(
            conditions=self.conditions, bleu=self.base.bleu, loss=self.base.loss, tokens=sum(map(len, self.targets))
        )

    def effect(self, part: Part) -> Effect:
        base, figures = self.base, self.without([part])
        chance = self.score.chance
        pairs = zip(base.outputs, figures.outputs, strict=True)
        return Effect(
            part=str(part),
            kind=part.kind,
            bleu=figures.bleu,
            loss=figures.loss,
            changed=sum(one != other for one, other in pairs),
            p=None if chance is None else chance(figures.outputs, base.outputs, self.sample.references),
        )

    def without(self, parts: Sequence[Part]) -> Figures:
        """The figures while these parts are silent."""
        with silenced(self.model, parts):
            outputs = tuple(self.translated())
            loss = self.loss()
        if outputs not in self.known:
            self.known[outputs] = self.score.of(outputs, self.sample.references)
        return Figures(outputs=outputs, bleu=self.known[outputs], loss=loss)

    def translated(self) -> list[str]:
        """By the weights as they are now: CTranslate2 is given a conversion of them, which is gone afterwards."""
        if self.stop is not None and self.stop():
            raise Stopped
        given, sample = self.translator, self.sample
        with tempfile.TemporaryDirectory(prefix="attent-", ignore_cleanup_errors=True) as scratch:
            translator = Translator(
                self.model,
                given.tokenizer,
                folder=Path(scratch),
                engine=self.engine,
                threads=given.threads,
                batch_tokens=given.batch_tokens,
                record=given.record,
                say=given.say,
            )
            made = translator.translate(sample.sources, self.search, to=sample.to, guard=False, stop=self.stop)
        return [" ".join(one.text.splitlines()) for one in made]

    @cached_property
    def rows(self) -> list[Row]:
        sample = self.sample
        return encoded(self.model, self.translator.tokenizer, sample.sources, sample.references, sample.to)

    @property
    def targets(self) -> list[list[int]]:
        return [row.target for row in self.rows]

    def loss(self) -> float:
        """Mean negative log-probability of the tokens of the references."""
        tokens = BATCH_TOKENS if self.translator.device.type == "cpu" else GPU_TOKENS
        never = never_written(self.model.config, self.translator.tokenizer)
        sources = [row.source for row in self.rows]
        found = log_probs_of_ids(self.model, sources, self.targets, tokens, never)
        return -math.fsum(value for row in found for value in row) / sum(map(len, found))


def engine_of(translator: Translator) -> EngineName:
    """The one that the translator takes by itself, once for all measurements: none may be by another."""
    if translator.engine is not None:
        return translator.engine
    if translator.device.type != "cpu":
        return "torch"
    try:
        package()
        assert isinstance(translator.model, Seq2Seq)
        check_expressible(translator.model.config)
    except ConversionError as error:
        translator.say(f"{error}; the torch engine is taken, which is slower")
        return "torch"
    return "ctranslate2"


def engine_in_words(translator: Translator, engine: EngineName) -> str:
    if engine == "ctranslate2":
        return "CTranslate2, int8"
    precision = str(next(translator.model.parameters()).dtype).removeprefix("torch.")
    return f"torch, {precision} on {translator.device.type}"


# ---- layers and heads as a picture -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Parts side by side: layers down, heads or sub-layers across; None where nothing was measured."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    effects: tuple[tuple[Effect | None, ...], ...]


TITLES = {
    ("encoder", "own"): "encoder self-attention",
    ("decoder", "own"): "decoder self-attention",
    ("decoder", "cross"): "decoder cross-attention",
}


def grids(ablation: Ablation, kinds: Collection[Kind] = KINDS) -> list[Grid]:
    """One for the heads of each stack and kind of attention, one for the sub-layers of each stack, one for layers."""
    cells: dict[str, dict[tuple[int, str], Effect]] = {}
    for effect in in_order(ablation.of(*kinds)):
        title, layer, column = cell_of(Part.parse(effect.part))
        cells.setdefault(title, {})[layer, column] = effect
    return [grid_of(title, some) for title, some in cells.items()]


def cell_of(part: Part) -> tuple[str, int, str]:
    """In which grid a part stands, in which row and in which column."""
    stack, _, layer, *use = part.path.split(".")
    match part.kind:
        case "head":
            return TITLES.get((stack, use[0]), f"{stack} {use[0]}"), int(layer), str(part.head)
        case "sublayer":
            return f"{stack} sub-layers", int(layer), use[0]
        case "layer":
            return "layers", int(layer), stack


def grid_of(title: str, cells: dict[tuple[int, str], Effect]) -> Grid:
    layers = sorted({layer for layer, _ in cells})
    columns = dict.fromkeys(column for _, column in cells)
    names = sorted(columns, key=int) if all(name.isdigit() for name in columns) else list(columns)
    rows = tuple(tuple(cells.get((layer, name)) for name in names) for layer in layers)
    return Grid(title=title, rows=tuple(map(str, layers)), columns=tuple(names), effects=rows)


# ---- what a model folder remembers -----------------------------------------------------------------------------------


def remember(folder: Path, ablation: Ablation) -> None:
    settings.write_json(settings.to_dict(ablation), Path(folder) / NAME)


def recalled(folder: Path) -> Ablation | None:
    """What the folder has, of whatever weights."""
    path = Path(folder) / NAME
    return settings.from_dict(Ablation, settings.read_json(path), where=str(path)) if path.exists() else None


def remembered(folder: Path, model: nn.Module) -> Ablation | None:
    """What the folder has of these very weights."""
    ablation = recalled(folder)
    return ablation if ablation is not None and ablation.conditions.model == mark(model) else None
