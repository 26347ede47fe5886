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
from attent.decoding.alignment import compute_fingerprint
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.forced_decoding import BATCH_TOKENS, EncodedPair, encode_pairs, score_token_ids
from attent.decoding.options import EngineName, SearchOptions
from attent.decoding.translator import Translator
from attent.inspection.head_masking import ModelPart, find_part, list_parts, mask_parts
from attent.interop.ctranslate2 import ConversionError, check_expressible, find_suppressed_tokens, import_ctranslate2
from attent.models import Seq2Seq

ABLATION_FILE = "ablation.json"
GPU_BATCH_TOKENS = 65_536  # of either side that are read at once; on a CPU fewer are as quick

PartKind = Literal["head", "sublayer", "layer"]
PART_KINDS: tuple[PartKind, ...] = ("head", "sublayer", "layer")
STACK_NAMES, SUBLAYER_NAMES = ("encoder", "decoder"), ("self_attn", "cross_attn", "feedforward")
PartSelection = Literal["heads", "sublayers", "layers", "all"]


class AblationError(ValueError):
    """What cannot be measured, in a sentence."""


# ---- facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AblationData:
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
class BleuScorer:
    """How translations are scored."""

    compute_bleu: Callable[[Sequence[str], Sequence[str]], float]  # outputs, references
    signature: str
    # outputs, those of the whole model, references: how probable such a difference would be by chance
    compute_p_value: Callable[[Sequence[str], Sequence[str], Sequence[str]], float] | None = None


@dataclass(frozen=True, kw_only=True)
class AblationConditions:
    """What all figures must have in common to be compared."""

    dataset: str  # the name of the pairs
    digest: str  # of their texts
    sentences: int
    to: str | None
    search: SearchOptions
    engine: str
    signature: str  # of BLEU
    weights_digest: str  # the mark of the weights

    def find_differences(self, other: AblationConditions) -> list[str]:
        """What is not the same; the name of the pairs may be another, if they are the same pairs."""
        return [f.name for f in fields(self) if f.name != "dataset" and getattr(self, f.name) != getattr(other, f.name)]


@dataclass(frozen=True, kw_only=True)
class AblationEffect:
    """The model without one part."""

    part: str
    kind: PartKind
    bleu: float
    loss: float  # mean negative log-probability of a token of the references
    num_changed: int  # translations that are no longer the same
    p_value: float | None = None  # how probable such a difference of BLEU would be by chance


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """`ablation.json`: the whole model, and the model without each part."""

    format: Literal["attent-ablation"] = "attent-ablation"
    version: Literal[1] = 1
    conditions: AblationConditions
    bleu: float
    loss: float
    num_tokens: int  # of the references, ends included
    effects: tuple[AblationEffect, ...] = ()

    def get_effects(self, *kinds: PartKind) -> list[AblationEffect]:
        """The effects of parts of these kinds, the most harmful silence first."""
        some = [effect for effect in self.effects if effect.kind in kinds]
        return sorted(some, key=lambda effect: (effect.bleu, -effect.loss, effect.part))

    def to_document(self) -> dict[str, Any]:
        """The section of a trace document."""
        rows = sort_effects(self.effects)
        parts = [{"part": one.part, "kind": one.kind, "bleu": one.bleu, "loss": one.loss} for one in rows]
        return {"sentences": self.conditions.sentences, "bleu": self.bleu, "loss": self.loss, "parts": parts}


def sort_effects(effects: Iterable[AblationEffect]) -> list[AblationEffect]:
    """As the model is built: heads, sub-layers, layers; the encoder before the decoder, the first layer first."""
    return sorted(
        effects, key=lambda effect: (PART_KINDS.index(effect.kind), *get_sort_key(ModelPart.parse(effect.part)))
    )


def get_sort_key(part: ModelPart) -> tuple[int, int, int, int]:
    stack, _, layer, *use = part.path.split(".")
    return STACK_NAMES.index(stack), SUBLAYER_NAMES.index(use[0]) if use else 0, int(layer), part.head or 0


@dataclass(frozen=True, kw_only=True)
class AblationProgress:
    """How far it is."""

    done: int
    total: int
    effect: AblationEffect


# ---- the work --------------------------------------------------------------------------------------------------------


def ablate(
    translator: Translator,
    data: AblationData,
    parts: Iterable[ModelPart],
    *,
    search: SearchOptions,
    scorer: BleuScorer,
    previous: Ablation | None = None,
    save: Callable[[Ablation], None] | None = None,
    progress: Callable[[AblationProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Ablation:
    """Silence each part in turn and measure.

    done      what was measured before: it is taken over where the conditions are the same, and dropped where not
    keep      is given all that there is after each part, so that nothing is lost when it is interrupted
    progress  is told how far it is
    stop      asked again and again; if it answers True, `Stopped` is raised
    """
    meter = AblationMeter(translator, data, search=search, scorer=scorer, should_stop=should_stop)
    wanted = list(dict.fromkeys(parts))
    check_parts(meter.model, wanted)
    ablation = previous if previous is not None and not previous.conditions.find_differences(meter.conditions) else None
    known = set() if ablation is None else {effect.part for effect in ablation.effects}
    left = [part for part in wanted if str(part) not in known]
    if ablation is None:
        ablation = meter.measure_baseline()
    for number, part in enumerate(left, len(wanted) - len(left) + 1):
        effect = meter.measure_effect(part)
        ablation = replace(ablation, effects=(*ablation.effects, effect))
        if save is not None:
            save(ablation)
        if progress is not None:
            progress(AblationProgress(done=number, total=len(wanted), effect=effect))
    return ablation


def select_parts(model: nn.Module, selection: PartSelection) -> list[ModelPart]:
    if selection == "all":
        return [part for grain in ("heads", "sublayers", "layers") for part in list_parts(model, grain)]
    return list_parts(model, selection)


def check_parts(model: nn.Module, parts: Collection[ModelPart]) -> None:
    if not parts:
        raise AblationError("there must be parts to silence, but none are named; name heads, sub-layers or layers")
    for part in parts:
        find_part(model, part)


@dataclass(frozen=True, kw_only=True)
class AblationMeasurement:
    """One measurement."""

    outputs: tuple[str, ...]
    bleu: float
    loss: float


class AblationMeter:
    """Translates and scores the same pairs again and again, with this or that part of the model silent."""

    def __init__(
        self,
        translator: Translator,
        data: AblationData,
        *,
        search: SearchOptions,
        scorer: BleuScorer,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        if not isinstance(translator.model, Seq2Seq):
            raise AblationError("one model must be looked at, but this is an ensemble; give one folder")
        self.translator, self.model = translator, translator.model
        self.data, self.search, self.scorer, self.should_stop = data, search, scorer, should_stop
        self.engine = select_engine(translator)
        self.bleu_cache: dict[tuple[str, ...], float] = {}  # many a silence changes nothing: BLEU of equal outputs

    @cached_property
    def conditions(self) -> AblationConditions:
        return AblationConditions(
            dataset=self.data.name,
            digest=self.data.digest,
            sentences=len(self.data.sources),
            to=self.data.to,
            search=self.search,
            engine=describe_engine(self.translator, self.engine),
            signature=self.scorer.signature,
            weights_digest=compute_fingerprint(self.model),
        )

    @cached_property
    def baseline(self) -> AblationMeasurement:
        return self.measure_without(())

    def measure_baseline(self) -> Ablation:
        """The whole model."""
        return Ablation(
            conditions=self.conditions,
            bleu=self.baseline.bleu,
            loss=self.baseline.loss,
            num_tokens=sum(map(len, self.target_ids)),
        )

    def measure_effect(self, part: ModelPart) -> AblationEffect:
        base, figures = self.baseline, self.measure_without([part])
        chance = self.scorer.compute_p_value
        pairs = zip(base.outputs, figures.outputs, strict=True)
        return AblationEffect(
            part=str(part),
            kind=part.kind,
            bleu=figures.bleu,
            loss=figures.loss,
            num_changed=sum(one != other for one, other in pairs),
            p_value=None if chance is None else chance(figures.outputs, base.outputs, self.data.references),
        )

    def measure_without(self, parts: Sequence[ModelPart]) -> AblationMeasurement:
        """The figures while these parts are silent."""
        with mask_parts(self.model, parts):
            outputs = tuple(self.translate_sources())
            loss = self.compute_loss()
        if outputs not in self.bleu_cache:
            self.bleu_cache[outputs] = self.scorer.compute_bleu(outputs, self.data.references)
        return AblationMeasurement(outputs=outputs, bleu=self.bleu_cache[outputs], loss=loss)

    def translate_sources(self) -> list[str]:
        """By the weights as they are now: CTranslate2 is given a conversion of them, which is gone afterwards."""
        if self.should_stop is not None and self.should_stop():
            raise SearchCancelled
        given, sample = self.translator, self.data
        with tempfile.TemporaryDirectory(prefix="attent-", ignore_cleanup_errors=True) as scratch:
            translator = Translator(
                self.model,
                given.tokenizer,
                folder=Path(scratch),
                engine=self.engine,
                threads=given.threads,
                batch_tokens=given.batch_tokens,
                use_cuda_graphs=given.use_cuda_graphs,
                notify=given.notify,
            )
            made = translator.translate(
                sample.sources, self.search, to=sample.to, prevent_loops=False, should_stop=self.should_stop
            )
        return [" ".join(one.text.splitlines()) for one in made]

    @cached_property
    def encoded_pairs(self) -> list[EncodedPair]:
        sample = self.data
        return encode_pairs(self.model, self.translator.tokenizer, sample.sources, sample.references, sample.to)

    @property
    def target_ids(self) -> list[list[int]]:
        return [row.target for row in self.encoded_pairs]

    def compute_loss(self) -> float:
        """Mean negative log-probability of the tokens of the references."""
        tokens = BATCH_TOKENS if self.translator.device.type == "cpu" else GPU_BATCH_TOKENS
        never = find_suppressed_tokens(self.model.config, self.translator.tokenizer)
        sources = [row.source for row in self.encoded_pairs]
        found = score_token_ids(self.model, sources, self.target_ids, tokens, never)
        return -math.fsum(value for row in found for value in row) / sum(map(len, found))


def select_engine(translator: Translator) -> EngineName:
    """The one that the translator takes by itself, once for all measurements: none may be by another."""
    if translator.engine is not None:
        return translator.engine
    if translator.device.type != "cpu":
        return "torch"
    try:
        import_ctranslate2()
        assert isinstance(translator.model, Seq2Seq)
        check_expressible(translator.model.config)
    except ConversionError as error:
        translator.notify(f"{error}; the torch engine is taken, which is slower")
        return "torch"
    return "ctranslate2"


def describe_engine(translator: Translator, engine: EngineName) -> str:
    if engine == "ctranslate2":
        return "CTranslate2, int8"
    precision = str(next(translator.model.parameters()).dtype).removeprefix("torch.")
    return f"torch, {precision} on {translator.device.type}"


# ---- layers and heads as a picture -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AblationGrid:
    """Parts side by side: layers down, heads or sub-layers across; None where nothing was measured."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    effects: tuple[tuple[AblationEffect | None, ...], ...]


GRID_TITLES = {
    ("encoder", "self_attn"): "encoder self-attention",
    ("decoder", "self_attn"): "decoder self-attention",
    ("decoder", "cross_attn"): "decoder cross-attention",
}


def build_grids(ablation: Ablation, kinds: Collection[PartKind] = PART_KINDS) -> list[AblationGrid]:
    """One for the heads of each stack and kind of attention, one for the sub-layers of each stack, one for layers."""
    cells: dict[str, dict[tuple[int, str], AblationEffect]] = {}
    for effect in sort_effects(ablation.get_effects(*kinds)):
        title, layer, column = locate_part(ModelPart.parse(effect.part))
        cells.setdefault(title, {})[layer, column] = effect
    return [build_grid(title, some) for title, some in cells.items()]


def locate_part(part: ModelPart) -> tuple[str, int, str]:
    """In which grid a part stands, in which row and in which column."""
    stack, _, layer, *use = part.path.split(".")
    match part.kind:
        case "head":
            return GRID_TITLES.get((stack, use[0]), f"{stack} {use[0]}"), int(layer), str(part.head)
        case "sublayer":
            return f"{stack} sub-layers", int(layer), use[0]
        case "layer":
            return "layers", int(layer), stack


def build_grid(title: str, cells: dict[tuple[int, str], AblationEffect]) -> AblationGrid:
    layers = sorted({layer for layer, _ in cells})
    columns = dict.fromkeys(column for _, column in cells)
    names = sorted(columns, key=int) if all(name.isdigit() for name in columns) else list(columns)
    rows = tuple(tuple(cells.get((layer, name)) for name in names) for layer in layers)
    return AblationGrid(title=title, rows=tuple(map(str, layers)), columns=tuple(names), effects=rows)


# ---- what a model folder remembers -----------------------------------------------------------------------------------


def save_ablation(folder: Path, ablation: Ablation) -> None:
    settings.write_json(settings.to_dict(ablation), Path(folder) / ABLATION_FILE)


def load_ablation(folder: Path) -> Ablation | None:
    """What the folder has, of whatever weights."""
    path = Path(folder) / ABLATION_FILE
    return settings.from_dict(Ablation, settings.read_json(path), where=str(path)) if path.exists() else None


def load_matching_ablation(folder: Path, model: nn.Module) -> Ablation | None:
    """What the folder has of these very weights."""
    ablation = load_ablation(folder)
    return (
        ablation if ablation is not None and ablation.conditions.weights_digest == compute_fingerprint(model) else None
    )
