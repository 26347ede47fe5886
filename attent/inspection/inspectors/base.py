"""What looking at any model needs: one pass in which every layer is written down, as much of it as a page can hold,
and what is known of the model without a sentence. What there is to read, and what came of it, is told by `view`
(translators), `texts` (a decoder or an encoder of text alone) and `images`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from attent.decoding.options import SearchOptions
from attent.inspection.attention_trace import (
    AttentionKind,
    RecordedQKV,
    TraceSide,
    build_document,
    build_layer,
    get_side_names,
    pack_qkv,
)
from attent.inspection.display_tokens import build_display_token
from attent.inspection.head_masking import ModelPart
from attent.inspection.position_encodings import describe_positions
from attent.inspection.record import attach_taps, select_attention_layers
from attent.models import Model, Seq2Seq, VisionTransformer
from attent.nn import AttentionRecord, StackConfig
from attent.text.vocabulary import Vocabulary

ModelT = TypeVar("ModelT", bound=Model)

TOP_K, LONG_TEXT_TOP_K = 10, 3  # of the likeliest tokens that are told at each step; in a long text
MAX_DENSE_WEIGHTS = 1_500_000  # weights that a page holds; of more, only the greatest of each row
MAX_IMAGE_WEIGHTS = 6_000_000  # of patches, which are seen all at once: those of ViT-B/16 at 224 pixels
MAX_SPARSE_WEIGHTS = 800_000  # of these together
MIN_WEIGHTS_PER_ROW = 4  # of a row, however many rows there are
MAX_QKV_VALUES = 1_750_000  # of queries, keys and values that a page holds; if there are more, it holds none
LONG_TEXT_STEPS = 300  # steps from which on less is told of each


class InspectionError(ValueError):
    """A text or model that cannot be looked at, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class InspectionRequest:
    """What to look at."""

    text: str  # of an image: where it is
    text_pair: str | None = None  # a second text behind the first, for an encoder
    to: str | None = None  # the language to translate into, for a model that was trained with tags
    target: str | None = None  # look at this translation; None: search for one
    search: SearchOptions = field(default_factory=SearchOptions)
    prefix: tuple[int, ...] = ()  # tokens that the translation must begin with
    masked_parts: tuple[ModelPart, ...] = ()  # parts that are off


@dataclass(frozen=True, kw_only=True)
class LayerFilter:
    """Of which layers and heads weights are written down."""

    pattern: str = "*"
    kind: AttentionKind | None = None
    layers: tuple[int, ...] | None = None


class Inspector(Generic[ModelT]):
    """One model that is looked at. What does not depend on what it reads is worked out once."""

    def __init__(
        self,
        model: ModelT,
        *,
        name: str = "",
        head_stats: dict[str, Any] | None = None,
        ablation: dict[str, Any] | None = None,
    ) -> None:
        """
        properties  of the model's heads, measured on many sentences; None: on the one that is looked at
        ablation    what each part is worth, where that was measured
        """
        self.model, self.name = model, name
        self.head_stats, self.ablation = head_stats, ablation
        self.positions = describe_positions(model, length=get_num_positions(model))

    def inspect(
        self,
        request: InspectionRequest,
        layer_filter: LayerFilter | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """The document of what is asked about."""
        raise NotImplementedError

    def build_model_document(self, title: str) -> dict[str, Any]:
        """What is known without a sentence."""
        found = build_document(title, {}, []) | {"model": self.get_model_info()} | self.get_model_sections()
        return found if self.head_stats is None else found | {"properties": self.head_stats}

    def get_model_info(self) -> dict[str, Any]:
        width = get_stack_configs(self.model)[0].width
        return {
            "name": self.name,
            "kind": self.model.config.kind,
            "summary": summarize_model(self.model),
            "width": width,
        }

    def get_model_sections(self) -> dict[str, Any]:
        found: dict[str, Any] = {"positions": self.positions}
        return found if self.ablation is None else found | {"ablation": self.ablation}

    @contextmanager
    def record_layers(
        self, sides: Mapping[str, TraceSide], layer_filter: LayerFilter
    ) -> Iterator[list[dict[str, Any]]]:
        """While the block lasts one pass is made; afterwards the list holds every layer as a page shows it."""
        every = select_attention_layers(self.model, layer_filter.pattern, layer_filter.kind, layer_filter.layers, None)
        tapping = {path: layer for path, layer in every.items() if layer.heads}  # all heads of one may be pruned
        budget = PageBudget.from_layers(
            {path: (layer.heads, layer.head_width) for path, layer in tapping.items()}, sides
        )
        kept: dict[str, dict[str, Any]] = {}
        layers: list[dict[str, Any]] = []
        with attach_taps(tapping, {path: budget.make_tap(path, sides, kept) for path in tapping}):
            yield layers
        layers += [kept[path] for path in tapping]


@dataclass(frozen=True, kw_only=True)
class PageBudget:
    """How much of each layer a page can hold."""

    weights_per_row: int | None  # weights of each row; None: all
    include_qkv: bool

    @classmethod
    def from_layers(cls, layers: Mapping[str, tuple[int, int]], sides: Mapping[str, TraceSide]) -> PageBudget:
        """`layers`: of each its heads and their width."""
        weights = rows = numbers = 0
        for path, (heads, width) in layers.items():
            queries, keys = (len(sides[name].tokens) for name in get_side_names(path, sides))
            weights, rows = weights + heads * queries * keys, rows + heads * queries
            numbers += heads * width * (queries + 2 * keys)
        whole = MAX_IMAGE_WEIGHTS if any(side.image for side in sides.values()) else MAX_DENSE_WEIGHTS
        most = None if weights <= whole else max(MIN_WEIGHTS_PER_ROW, MAX_SPARSE_WEIGHTS // max(1, rows))
        return cls(weights_per_row=most, include_qkv=most is None and numbers <= MAX_QKV_VALUES)

    def make_tap(
        self, path: str, sides: Mapping[str, TraceSide], recorded: dict[str, dict[str, Any]]
    ) -> Callable[[AttentionRecord], None]:
        """Writes a layer down as it will be shown, at once: all weights of a long text would fill the memory."""
        names = get_side_names(path, sides)
        shape = (len(sides[names[0]].tokens), len(sides[names[1]].tokens))

        def keep(look: AttentionRecord) -> None:
            weights = look.compute_weights(range(look.q.shape[1]))[0].float().cpu()
            layer = build_layer(
                path, names, weights, causal=look.mask.causal, scale=look.scale, top_k=self.weights_per_row
            )
            if self.include_qkv:
                layer |= pack_qkv(RecordedQKV(look.q, look.k, look.v, look.bias, look.scale), 0, shape)
            recorded[path] = layer

        return keep


def mark_masked_heads(layers: Iterable[dict[str, Any]], parts: Sequence[ModelPart]) -> None:
    for layer in layers:
        path = layer["path"]
        off = {part.head for part in parts if part.path == path}
        whole = None in off or any(path.startswith(f"{part.path}.") for part in parts)
        layer["silent"] = list(range(layer["heads"])) if whole else sorted(head for head in off if head is not None)


# --- words, and how likely they are ----------------------------------------------------------------------------------


def describe_token(vocabulary: Vocabulary, token_id: int) -> dict[str, Any]:
    (piece,) = vocabulary.to_pieces([token_id])
    return {"token": token_id, **asdict(build_display_token(vocabulary, token_id, piece))}


def describe_predictions(
    vocabulary: Vocabulary, token_ids: Sequence[int | None], log_probs: Tensor
) -> list[dict[str, Any]]:
    """At each place the token that stands there, if one does, and the likeliest ones: (N, V)."""
    best = log_probs.topk(min(TOP_K if len(token_ids) <= LONG_TEXT_STEPS else LONG_TEXT_TOP_K, log_probs.shape[1]), -1)
    rows = zip(token_ids, log_probs, best.values.tolist(), best.indices.tolist(), strict=True)
    return [
        {
            "chosen": token,
            "p": None if token is None else round_for_json(math.exp(float(row[token]))),
            "options": [
                describe_token(vocabulary, other) | {"p": round_for_json(math.exp(value))}
                for value, other in zip(values, tokens, strict=True)
                if value > -math.inf
            ],
        }
        for token, row, values, tokens in rows
    ]


def describe_labels(labels: Sequence[str], logits: Tensor, top_k: int = TOP_K) -> dict[str, Any]:
    """The section `labels` of a document: which label fits, and how well the likeliest do."""
    shares = logits.float().softmax(-1).cpu()
    best = shares.topk(min(top_k, len(labels)))
    found = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return {"count": len(labels), "best": [{"label": labels[i], "p": round_for_json(share)} for share, i in found]}


def round_for_json(value: float) -> float | None:
    """Five digits are enough to look at; JSON has no number for what is none."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


# --- the model in words ----------------------------------------------------------------------------------------------


def get_stack_configs(model: Model) -> tuple[StackConfig, ...]:
    if isinstance(model, Seq2Seq):
        return model.config.encoder, model.config.decoder
    return (model.config.stack,)


def get_num_positions(model: Model) -> int:
    """How many positions are shown: those of an image are all in sight at once."""
    return (
        int(model.config.class_token) + model.config.num_patches
        if isinstance(model, VisionTransformer)
        else DEFAULT_POSITIONS
    )


DEFAULT_POSITIONS = 64


def summarize_model(model: Model) -> str:
    """`2.6M parameters, 4 + 4 layers of 4 heads, width 128`"""
    stacks, count = get_stack_configs(model), sum(p.numel() for p in model.parameters())
    layers = " + ".join(str(stack.layers) for stack in stacks)
    layers += " layer" if layers == "1" else " layers"
    heads = " or ".join(map(str, sorted({stack.heads for stack in stacks})))
    shared = " or ".join(str(stack.kv_heads) for stack in stacks if stack.kv_heads not in (None, stack.heads))
    heads += f" heads ({shared} of keys)" if shared else " head" if heads == "1" else " heads"
    gone = sum(stack.num_removed_heads for stack in stacks)
    pruned = f" ({gone} pruned)" if gone else ""
    size = f"{count / 1e6:,.1f}M" if count >= 100_000 else f"{count:,}"
    return f"{size} parameters, {layers} of {heads}{pruned}, width {stacks[0].width}"


def check_length(stack: Any, num_tokens: int, subject: str) -> None:
    """Is there a place for each token?"""
    most = stack.positions.max_length
    if most is not None and num_tokens > most:
        raise InspectionError(f"the model has places for {most:,} tokens, but {subject} has {num_tokens:,}; shorten it")


def reject_translation_options(request: InspectionRequest, model_kind: str) -> None:
    """What is asked of translators alone has no meaning for a model that reads."""
    asked = {"a translation to look at": request.target, "a language": request.to, "`prefix`": request.prefix}
    extra = next((name for name, value in asked.items() if value), None)
    if extra is not None:
        raise InspectionError(f"{extra} is for translators, and this is {model_kind}; leave it out")


def get_device(model: Model) -> torch.device:
    return next(model.parameters()).device
