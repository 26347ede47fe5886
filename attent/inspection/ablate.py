"""Mask heads, sub-layers or layers, and ablation: mask each part of a translator in turn, and score its translations.

A masked part adds nothing to the residual stream: its output weights are zero until they are restored, the columns of
W^O for a head, W^O and its bias for an attention layer, the second matrix and its bias for a feed-forward layer. So the
mask holds for every engine that reads the weights meanwhile.

Baseline and ablations differ in the mask only: same pairs, search and engine, and plain beam search without loop
prevention, which would hide damage. Results are stored with a digest of the weights.
"""

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from attent.decoding.alignment import compute_fingerprint
from attent.decoding.forced_decoding import BATCH_TOKENS, EncodedPair, encode_pairs, score_token_ids
from attent.decoding.loading import resolve_target_lang
from attent.decoding.options import EngineName, SearchOptions
from attent.decoding.translator import Translator
from attent.formatting import format_count
from attent.models import Seq2Seq
from attent.models.folder import read_side_settings
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import Attention, get_attention_layers
from attent.nn.attention import COMPILED_PREFIX
from attent.nn.block import Block
from attent.nn.feedforward import FeedForward
from attent.scoring.metrics import MetricScore, compare_outputs, compute_metrics
from attent.scoring.pipeline import TestSet, find_language_tag
from attent.storage.errors import AttentError

PartKind = Literal["head", "sublayer", "layer"]
PART_KINDS: tuple[PartKind, ...] = get_args(PartKind)
PART_PATTERN = re.compile(r"(?P<path>[\w.]+)(?::(?P<head>\d{1,6}))?")


@dataclass(frozen=True, order=True)
class ModelPart:
    """A head `decoder.blocks.3.cross_attn:2`, sub-layer `decoder.blocks.3.cross_attn` or layer `decoder.blocks.3`."""

    path: str
    head: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        match = PART_PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise AttentError(f"a part must be like decoder.blocks.0.cross_attn:2, but is {str(text)[:80]!r}")
        return cls(match["path"], None if match["head"] is None else int(match["head"]))

    def __str__(self) -> str:
        return self.path if self.head is None else f"{self.path}:{self.head}"

    @property
    def kind(self) -> PartKind:
        if self.head is not None:
            return "head"
        return "layer" if self.path.rpartition(".")[2].isdigit() else "sublayer"


def list_parts(model: nn.Module, kind: PartKind) -> list[ModelPart]:
    """List a model's heads, sub-layers or layers in module order."""
    if kind == "head":
        return [ModelPart(path, h) for path, layer in get_attention_layers(model).items() for h in range(layer.heads)]
    classes = Block if kind == "layer" else (Attention, FeedForward)
    return [
        ModelPart(path.replace(COMPILED_PREFIX, ""))
        for path, module in model.named_modules()
        if isinstance(module, classes)
    ]


@contextmanager
def mask_heads(model: nn.Module | Translator, *parts: str | ModelPart) -> Iterator[None]:
    """Mask heads, sub-layers or layers inside the `with` block, for every call of the model.

    A masked part adds nothing to the residual stream. Its weights are restored bit-exactly.

    parts  heads such as "decoder.blocks.3.cross_attn:2", sub-layers ("decoder.blocks.3.cross_attn") or layers
           ("decoder.blocks.3")

    >>> translator = attent.Translator.load("runs/en-de")
    >>> with attent.mask_heads(translator, "decoder.blocks.0.cross_attn:0", "decoder.blocks.0.cross_attn:1"):
    ...     print(translator.translate(["A man sings."])[0].text == "Ein Mann singt.")
    False
    >>> print(translator.translate(["A man sings."])[0].text)
    Ein Mann singt.
    """
    module = model.model if isinstance(model, Translator) else model
    if not isinstance(module, nn.Module):
        raise AttentError(f"`model` must be a model or a Translator, but is of type {type(model).__name__}")
    chosen = [part if isinstance(part, ModelPart) else ModelPart.parse(part) for part in parts]
    views = [view for part in chosen for view in iter_output_weights(find_part(module, part), part.head)]
    saved = [(view, view.clone()) for view in views]
    # CTranslate2 translates with its own copy of the weights.
    engines = model.use_torch_engine() if isinstance(model, Translator) else nullcontext()
    try:
        with torch.no_grad():
            for view in views:
                view.zero_()
        with engines:
            yield
    finally:
        with torch.no_grad():
            for view, values in saved:
                view.copy_(values)


def iter_output_weights(module: nn.Module | None, head: int | None = None) -> Iterator[Tensor]:
    """Yield views of the weights through which a layer, sub-layer or head writes to the residual stream."""
    match module:
        case Attention() if head is not None:
            width = module.head_width
            yield module.output.weight.data[:, head * width : (head + 1) * width]
        case Attention(output=linear) | FeedForward(contract=linear):
            yield linear.weight.data
            if linear.bias is not None:
                yield linear.bias.data
        case Block():
            for sublayer in (module.self_attn, module.cross_attn, module.feedforward):
                yield from iter_output_weights(sublayer)


def find_part(model: nn.Module, part: ModelPart) -> Attention | FeedForward | Block:
    kinds = (Attention, FeedForward, Block)
    modules = {path.replace(COMPILED_PREFIX, ""): m for path, m in model.named_modules() if isinstance(m, kinds)}
    module = modules.get(part.path)
    if module is None:
        near = difflib.get_close_matches(part.path, modules)
        hint = f"did you mean {near[0]}?" if near else f"its parts are {', '.join(list(modules)[-3:])}"
        raise AttentError(f"the model has no part {part.path!r}; {hint}")
    if part.head is not None:
        if not isinstance(module, Attention):
            raise AttentError(f"{part}: only attention layers have heads; leave out the number of the head")
        if part.head >= module.heads:
            count = format_count(module.heads, "head")
            raise AttentError(f"{part}: {part.path} has {count}, numbered from 0; give another")
    return module


# --- ablation --------------------------------------------------------------------------------------------------------


ABLATION_FILE = "ablation.json"
GPU_BATCH_TOKENS = 65_536  # source or target tokens per batch; on a CPU smaller batches are as fast

STACK_NAMES, SUBLAYER_NAMES = ("encoder", "decoder"), ("self_attn", "cross_attn", "feedforward")


@dataclass(frozen=True, kw_only=True)
class AblationData:
    name: str
    sources: tuple[str, ...]
    references: tuple[str, ...]
    to: str | None = None  # target language, for models trained with language tags
    language: str | None = None  # of the references, for BLEU's tokenization

    @classmethod
    def from_test_set(
        cls, test_set: TestSet, translator: Translator, folder: Path, *, to: str | None, limit: int | None
    ) -> Self:
        """The first `limit` pairs, translated into `to` or else the language of the references."""
        tags = translator.tokenizer.source.tags
        if to is None and tags and len(set(test_set.languages)) > 1:
            raise AttentError(f"{test_set.name}: must have one target language; name it with --tgt")
        language = test_set.languages[0] if tags else None
        return cls(
            name=test_set.name,
            sources=tuple(test_set.sources[:limit]),
            references=tuple(test_set.references[:limit]),
            to=resolve_target_lang(to, tags, folder) if to else find_language_tag(language, tags, folder),
            language=to or test_set.language,
        )

    @property
    def digest(self) -> str:
        texts = json.dumps([self.sources, self.references, self.to]).encode()
        return hashlib.sha256(texts).hexdigest()


@dataclass(frozen=True, kw_only=True)
class AblationConditions:
    """Everything that must be equal for results to be comparable."""

    dataset: str  # its name
    pairs_digest: str  # of their texts
    sentences: int
    to: str | None
    search: SearchOptions
    engine: str
    signature: str  # of BLEU
    weights_digest: str

    def find_differences(self, other: Self) -> list[str]:
        """Return the names of the fields that differ, except the name of the dataset."""
        return [f.name for f in fields(self) if f.name != "dataset" and getattr(self, f.name) != getattr(other, f.name)]


@dataclass(frozen=True, kw_only=True)
class AblationEffect:
    part: str
    kind: PartKind
    bleu: float
    loss: float  # negative log-likelihood per reference token
    num_changed: int  # number of changed translations
    p_value: float  # of the BLEU difference, by a paired bootstrap


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """`ablation.json`: baseline scores, and scores with each part masked."""

    format: Literal["attent-ablation"] = "attent-ablation"
    version: Literal[1] = 1
    conditions: AblationConditions
    bleu: float
    loss: float
    num_tokens: int  # reference tokens, end tokens included
    effects: tuple[AblationEffect, ...] = ()

    def get_effects(self, *kinds: PartKind) -> list[AblationEffect]:
        """Return the effects of these kinds of parts, the lowest BLEU first."""
        effects = [effect for effect in self.effects if effect.kind in kinds]
        return sorted(effects, key=lambda effect: (effect.bleu, -effect.loss, effect.part))

    def to_document(self) -> dict[str, Any]:
        """Return the section `ablation` of a trace document, sorted by kind, then by position in the model."""
        effects = sorted(self.effects, key=lambda e: (PART_KINDS.index(e.kind), *get_sort_key(ModelPart.parse(e.part))))
        parts = [{key: getattr(effect, key) for key in ("part", "kind", "bleu", "loss")} for effect in effects]
        return {"sentences": self.conditions.sentences, "bleu": self.bleu, "loss": self.loss, "parts": parts}


def get_sort_key(part: ModelPart) -> tuple[int, int, int, int]:
    stack, _, layer, *sublayer = part.path.split(".")
    return STACK_NAMES.index(stack), SUBLAYER_NAMES.index(sublayer[0]) if sublayer else 0, int(layer), part.head or 0


@dataclass(frozen=True, kw_only=True)
class AblationMeasurement:
    outputs: tuple[str, ...]
    bleu: float
    loss: float


@dataclass(kw_only=True, eq=False)
class AblationMeter:
    translator: Translator
    data: AblationData
    search: SearchOptions
    bleu_cache: dict[tuple[str, ...], float] = field(default_factory=dict)  # many masks change no output

    def __post_init__(self) -> None:
        if not isinstance(self.translator.model, Seq2Seq):
            raise AttentError("one model can be ablated at a time, but this is an ensemble; give one folder")
        self.model = self.translator.model
        self.engine: EngineName = self.translator.engine or (  # chosen once, so that all measurements use the same
            "torch" if self.translator._ctranslate2_engine is None else "ctranslate2"
        )

    def ablate(self, parts: Sequence[ModelPart], previous: Ablation | None = None) -> Iterator[Ablation]:
        """Mask each part in turn, and yield all results so far; `previous` ones of equal conditions are reused."""
        if not parts:
            raise AttentError("there must be at least one part to mask; name heads, sub-layers or layers")
        for part in parts:
            find_part(self.model, part)
        if previous is None or previous.conditions.find_differences(self.conditions):
            num_tokens = sum(len(pair.target) for pair in self.encoded_pairs)
            bleu, loss = self.baseline.bleu, self.baseline.loss
            previous = Ablation(conditions=self.conditions, bleu=bleu, loss=loss, num_tokens=num_tokens)
        yield (ablation := previous)
        measured = {effect.part for effect in previous.effects}
        for part in parts:
            if str(part) not in measured:
                ablation = replace(ablation, effects=(*ablation.effects, self.measure_effect(part)))
                yield ablation

    @cached_property
    def conditions(self) -> AblationConditions:
        precision = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        torch_engine = f"torch, {precision} on {self.translator.device.type}"
        return AblationConditions(
            dataset=self.data.name,
            pairs_digest=self.data.digest,
            sentences=len(self.data.sources),
            to=self.data.to,
            search=self.search,
            engine="CTranslate2, int8" if self.engine == "ctranslate2" else torch_engine,
            signature=self.compute_bleu(self.data.references).signature,
            weights_digest=compute_fingerprint(self.model),
        )

    @cached_property
    def baseline(self) -> AblationMeasurement:
        return self.measure_without(())

    def measure_effect(self, part: ModelPart) -> AblationEffect:
        baseline, masked = self.baseline, self.measure_without([part])
        comparison = compare_outputs(
            masked.outputs, baseline.outputs, self.data.references, ("bleu",), self.data.language
        )
        pairs = zip(baseline.outputs, masked.outputs, strict=True)
        return AblationEffect(
            part=str(part),
            kind=part.kind,
            bleu=masked.bleu,
            loss=masked.loss,
            num_changed=sum(before != after for before, after in pairs),
            p_value=comparison[0].p_value,
        )

    def measure_without(self, parts: Sequence[ModelPart]) -> AblationMeasurement:
        with mask_heads(self.model, *parts):
            # A translator of its own converts the masked weights for CTranslate2, for this measurement only.
            translator = copy_translator(self.translator, self.model, engine=self.engine)
            translations = translator.translate(self.data.sources, self.search, to=self.data.to)
            loss = self.compute_loss()
        outputs = tuple(" ".join(translation.text.splitlines()) for translation in translations)
        if outputs not in self.bleu_cache:
            self.bleu_cache[outputs] = self.compute_bleu(outputs).value
        return AblationMeasurement(outputs=outputs, bleu=self.bleu_cache[outputs], loss=loss)

    def compute_bleu(self, outputs: Sequence[str]) -> MetricScore:
        return compute_metrics(outputs, self.data.references, ("bleu",), self.data.language, resamples=0)[0]

    @cached_property
    def encoded_pairs(self) -> list[EncodedPair]:
        data = self.data
        return encode_pairs(self.model, self.translator.tokenizer, data.sources, data.references, data.to)

    def compute_loss(self) -> float:
        """Return the negative log-likelihood per reference token."""
        tokens = BATCH_TOKENS if self.translator.device.type == "cpu" else GPU_BATCH_TOKENS
        suppressed = find_suppressed_tokens(self.model.config, self.translator.tokenizer)
        sources, targets = ([getattr(pair, side) for pair in self.encoded_pairs] for side in ("source", "target"))
        log_probs = score_token_ids(self.model, sources, targets, tokens, suppressed)
        return -math.fsum(value for row in log_probs for value in row) / sum(map(len, log_probs))


def copy_translator(translator: Translator, model: Seq2Seq, *, engine: EngineName | None = None) -> Translator:
    return Translator(
        model,
        translator.tokenizer,
        engine=engine or translator.engine,
        threads=translator.threads,
        batch_tokens=translator.batch_tokens,
        use_gpu_engine=translator._use_gpu_engine,
        notify=translator._notify_once,
    )


def load_ablation(folder: Path) -> Ablation | None:
    return read_side_settings(folder, ABLATION_FILE, Ablation)


def load_matching_ablation(folder: Path, model: nn.Module) -> Ablation | None:
    """Load the folder's ablation if it is of these weights."""
    ablation = load_ablation(folder)
    matches = ablation is not None and ablation.conditions.weights_digest == compute_fingerprint(model)
    return ablation if matches else None
