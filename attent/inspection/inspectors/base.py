"""The base class of all inspectors: one recorded forward pass, reduced to what a page can hold, as a document."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from attent.decoding.alignment import attach_observers
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import SearchOptions, StopCheck
from attent.inspection import attention_trace as trace
from attent.inspection.ablate import ModelPart, mask_heads
from attent.inspection.head_stats import measure_trace_heads
from attent.models import Model, Seq2Seq
from attent.models.config import get_stack_configs
from attent.nn import Attention, AttentionRecord, ImageConfig, Stack, StackConfig
from attent.nn.attention import COMPILED_PREFIX
from attent.nn.eval_mode import eval_mode
from attent.nn.positions import Angles
from attent.storage.errors import AttentError
from attent.text.vocabulary import Vocabulary

ModelT = TypeVar("ModelT", bound=Model)

TOP_K, LONG_TEXT_TOP_K = 10, 3  # predictions listed per position
LONG_TEXT_STEPS = 300  # texts with more tokens count as long
MAX_DENSE_WEIGHTS = 1_500_000  # attention weights on a page; of more, only the largest of each row are kept
MAX_IMAGE_WEIGHTS = 6_000_000  # the same for patches, which are drawn all at once: enough for ViT-B/16 at 224 pixels
MAX_SPARSE_WEIGHTS = 800_000
MIN_WEIGHTS_PER_ROW = 4
MAX_QKV_VALUES = 1_750_000  # values of queries, keys and values on a page; if there are more, all are omitted
MEDIA_SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
OPTION_USERS = {"target": "translators", "to": "translators", "prefix": "translators", "text_pair": "text encoders"}


class InputTooLongError(AttentError):
    """The input has more tokens than the model or the request allows."""


@dataclass(frozen=True, kw_only=True)
class InspectionRequest:
    text: str  # for models of images or audio: the path of a file
    text_pair: str | None = None  # second segment, for text encoders
    to: str | None = None  # target language, for models trained with language tags
    target: str | None = None  # given translation; None: search for one
    search: SearchOptions = field(default_factory=SearchOptions)
    prefix: tuple[int, ...] = ()  # forced first tokens of the translation
    masked_parts: tuple[ModelPart, ...] = ()
    kind: trace.AttentionKind | None = None  # record only this kind of attention
    layers: tuple[int, ...] | None = None  # record only these layers of each stack
    max_tokens: int | None = None  # of the text; time and memory grow with its square


@dataclass(frozen=True, kw_only=True)
class RecordedPass:
    title: str
    sides: Mapping[str, trace.TraceSide]
    layers: list[dict[str, Any]]
    sections: dict[str, Any]


class Inspector(Generic[ModelT]):
    """Builds trace documents of one model. Sections that do not depend on the input are computed once."""

    model_kind: ClassVar[str]  # for error messages
    supported_options: ClassVar[frozenset[str]] = frozenset()  # of OPTION_USERS
    example_file: ClassVar[str] = ""  # of models whose input is a file
    head_stats: dict[str, Any] | None = None  # of many sentences; None: they are measured on each inspected input
    ablation: dict[str, Any] | None = None  # section `ablation` of the document

    def __init__(self, model: ModelT, *, name: str = "") -> None:
        self.model, self.name = model, name
        length = DEFAULT_LENGTH
        image = model.config.frontend if isinstance(model, Seq2Seq) else model.config
        if isinstance(image, ImageConfig):  # all positions of an image are shown
            length = int(image.class_token) + image.num_patches
        self.positions = describe_positions(model, length=length)

    def inspect(self, request: InspectionRequest, should_stop: StopCheck | None = None) -> dict[str, Any]:
        for option, users in OPTION_USERS.items():
            if getattr(request, option) and option not in self.supported_options:
                raise AttentError(f"`{option}` is for {users}, but this is {self.model_kind}; leave it out")
        with eval_mode(self.model), mask_heads(self.model, *request.masked_parts), torch.no_grad():
            recorded = self._run(request, should_stop)
        check_cancelled(should_stop)
        mark_masked_heads(recorded.layers, request.masked_parts)
        document = trace.build_document(recorded.title, recorded.sides, recorded.layers)
        document |= {"model": self.get_model_info()} | recorded.sections
        measured = self.head_stats or measure_trace_heads(recorded.layers, document["sides"]).to_document()
        document["head_stats"] = measured
        return document | self._get_model_sections()

    def _run(self, request: InspectionRequest, should_stop: StopCheck | None) -> RecordedPass:
        raise NotImplementedError

    def build_model_document(self, title: str) -> dict[str, Any]:
        """Return a document without an input: model, positions, head statistics."""
        document = trace.build_document(title, {}, []) | {"model": self.get_model_info()} | self._get_model_sections()
        return document if self.head_stats is None else document | {"head_stats": self.head_stats}

    def get_model_info(self) -> dict[str, Any]:
        info = {"name": self.name, "kind": self.model.config.kind, "summary": summarize_model(self.model)}
        return {**info, "width": next(iter(get_stack_configs(self.model.config).values())).width}

    def _get_model_sections(self) -> dict[str, Any]:
        sections: dict[str, Any] = {"positions": self.positions}
        return sections if self.ablation is None else sections | {"ablation": self.ablation}

    @contextmanager
    def record_layers(
        self, sides: Mapping[str, trace.TraceSide], request: InspectionRequest, should_stop: StopCheck | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        """Record one forward pass in the `with` block, which fills the list; `should_stop` is polled at every layer."""
        selected = trace.select_attention_layers(self.model, "*", request.kind, request.layers)
        observed = {path: layer for path, layer in selected.items() if layer.heads}  # all heads may be pruned
        budget = PageBudget.from_layers(observed, sides)
        recorded: dict[str, dict[str, Any]] = {}
        layers: list[dict[str, Any]] = []

        def observe(path: str, record: AttentionRecord) -> None:  # the weights of all layers may not fit in memory
            check_cancelled(should_stop)
            recorded[path] = budget.pack_layer(path, sides, record)

        with attach_observers(observed.values(), [partial(observe, path) for path in observed]):
            yield layers
        layers += [recorded[path] for path in observed]


@dataclass(frozen=True, kw_only=True)
class PageBudget:
    dense_layers: frozenset[str]  # paths; of other layers, the largest weights of each row
    weights_per_row: int
    include_qkv: bool

    @classmethod
    def from_layers(cls, layers: Mapping[str, Attention], sides: Mapping[str, trace.TraceSide]) -> Self:
        sizes, rows, num_values = {}, {}, 0
        for path, layer in layers.items():
            queries, keys = (len(sides[name].tokens) for name in trace.get_side_names(path, sides))
            sizes[path], rows[path] = layer.heads * queries * keys, layer.heads * queries
            num_values += layer.heads * layer.head_width * (queries + 2 * keys)
        max_dense = MAX_IMAGE_WEIGHTS if any(side.image for side in sides.values()) else MAX_DENSE_WEIGHTS
        smallest_first = sorted(sizes, key=sizes.__getitem__)
        totals = zip(smallest_first, accumulate(sizes[path] for path in smallest_first), strict=True)
        dense = frozenset(path for path, total in totals if total <= max_dense)
        num_rows = sum(count for path, count in rows.items() if path not in dense)
        per_row = max(MIN_WEIGHTS_PER_ROW, MAX_SPARSE_WEIGHTS // max(1, num_rows))
        is_whole = len(dense) == len(sizes)
        return cls(dense_layers=dense, weights_per_row=per_row, include_qkv=is_whole and num_values <= MAX_QKV_VALUES)

    def pack_layer(self, path: str, sides: Mapping[str, trace.TraceSide], record: AttentionRecord) -> dict[str, Any]:
        names = trace.get_side_names(path, sides)
        shape = (len(sides[names[0]].tokens), len(sides[names[1]].tokens))
        weights = record.weights.float().cpu()
        shown = weights[0, :, : shape[0], : shape[1]]  # without the padding of a front-end
        top_k = None if path in self.dense_layers else self.weights_per_row
        layer = trace.build_layer(path, names, shown, **trace.get_layer_info(record), top_k=top_k)
        has_qkv = record.score_weight is None and self.include_qkv and shown.shape == weights.shape[1:]
        return layer | trace.pack_qkv(record, 0, shape) if has_qkv else layer


def mark_masked_heads(layers: Iterable[dict[str, Any]], parts: Sequence[ModelPart]) -> None:
    for layer in layers:
        path = layer["path"]
        heads = {part.head for part in parts if part.path == path}
        all_masked = None in heads or any(path.startswith(f"{part.path}.") for part in parts)
        masked = range(layer["heads"]) if all_masked else sorted(head for head in heads if head is not None)
        layer["masked_heads"] = list(masked)


def describe_token(vocabulary: Vocabulary, token_id: int) -> dict[str, Any]:
    (piece,) = vocabulary.to_pieces([token_id])
    return {"token": token_id, **asdict(trace.build_display_token(vocabulary, token_id, piece))}


def describe_predictions(
    vocabulary: Vocabulary, token_ids: Sequence[int | None], log_probs: Tensor
) -> list[dict[str, Any]]:
    """Return for each position the actual token (None: there is none) and the most probable ones; log_probs: (N, V)."""
    top_k = TOP_K if len(token_ids) <= LONG_TEXT_STEPS else LONG_TEXT_TOP_K
    best = log_probs.topk(min(top_k, log_probs.shape[1]), -1)
    rows = zip(token_ids, log_probs, best.values.tolist(), best.indices.tolist(), strict=True)
    return [
        {
            "chosen": chosen,
            "p": None if chosen is None else round_for_json(math.exp(float(row[chosen]))),
            "options": [
                describe_token(vocabulary, token_id) | {"p": round_for_json(math.exp(value))}
                for value, token_id in zip(values, indices, strict=True)
                if value > -math.inf
            ],
        }
        for chosen, row, values, indices in rows
    ]


def describe_labels(labels: Sequence[str], logits: Tensor) -> dict[str, Any]:
    best = logits.float().softmax(-1).cpu().topk(min(TOP_K, len(labels)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return {"count": len(labels), "best": [{"label": labels[i], "p": round_for_json(p)} for p, i in pairs]}


def round_for_json(value: float) -> float | None:
    """Five significant digits; None for NaN and infinities, which JSON cannot express."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def summarize_model(model: Model) -> str:
    """`2.6M parameters, 4 + 4 layers of 4 heads, width 128`"""
    configs, count = [*get_stack_configs(model.config).values()], sum(p.numel() for p in model.parameters())
    size = f"{count / 1e6:,.1f}M" if count >= 100_000 else f"{count:,}"
    stacks = [config for config in configs if isinstance(config, StackConfig)]
    if not stacks:
        kinds = " + ".join(f"{config.layers} layers ({config.description})" for config in configs)
        return f"{size} parameters, {kinds}, width {configs[0].width}"
    layers = " + ".join(str(stack.layers) for stack in stacks)
    layers += " layer" if layers == "1" else " layers"
    heads = " or ".join(map(str, sorted({stack.heads for stack in stacks})))
    kv_heads = " or ".join(str(stack.kv_heads) for stack in stacks if stack.kv_heads not in (None, stack.heads))
    heads += f" heads ({kv_heads} KV heads)" if kv_heads else " head" if heads == "1" else " heads"
    num_pruned = sum(stack.num_removed_heads for stack in stacks)
    pruned = f" ({num_pruned} pruned)" if num_pruned else ""
    return f"{size} parameters, {layers} of {heads}{pruned}, width {stacks[0].width}"


def check_length(stack: Any, num_tokens: int, subject: str, max_tokens: int | None = None) -> None:
    for limit, user in ((max_tokens, "page"), (stack.positions.max_length, "model")):
        if limit is not None and num_tokens > limit:
            raise InputTooLongError(
                f"{subject} must have at most {limit:,} tokens for this {user}, but has {num_tokens:,}; shorten it"
            )


def check_is_text(text: str, model_kind: str) -> None:
    path = Path(text.strip())
    if path.suffix.lower() in MEDIA_SUFFIXES and path.expanduser().is_file():
        raise AttentError(f"{path}: this is {model_kind}, which takes a sentence, not a file; give a sentence")


def check_cancelled(should_stop: StopCheck | None) -> None:
    if should_stop is not None and should_stop():
        raise SearchCancelled("the request was cancelled")


# --- positional encodings: the values of each position, and pairwise similarities or biases --------------------------


DEFAULT_LENGTH = 64  # positions shown
SCHEME_DESCRIPTIONS = {  # formula and note
    "sinusoidal": (
        "PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d))",
        "Waves are added to the embeddings; the dot product of two positions depends only on their distance.",
    ),
    "learned": ("x + P[pos]", "Each position has a learned vector, which is added to the embedding."),
    "rotary": (
        "pair i of the features of a query or key is rotated by the angle pos / base^(2i/d)",
        "Queries and keys are rotated by angles proportional to the position: dot products depend on the distance.",
    ),
    "relative": (
        "score + b[head, bucket(key - query)]",
        "Each head adds a learned bias for each bucket of distances to its scores.",
    ),
    "alibi": (
        "score - slope[head] * |query - key|",
        "Each head subtracts a penalty proportional to the distance, with its own slope.",
    ),
}
UNKNOWN_SCHEME = ("", "A custom scheme.")


def describe_positions(model: nn.Module, length: int = DEFAULT_LENGTH) -> list[dict[str, Any]]:
    """Return the section `positions` of a document: an entry for each stack with a positional encoding."""
    stacks = {path.replace(COMPILED_PREFIX, ""): m for path, m in model.named_modules() if isinstance(m, Stack)}
    entries = []
    for path, stack in stacks.items():
        name = path.rstrip(".") or ("decoder" if stack.config.causal else "encoder")
        entries.append(describe_stack_positions(name, stack, length))
    return [entry for entry in entries if entry is not None]


@torch.no_grad()
def describe_stack_positions(name: str, stack: Stack, length: int) -> dict[str, Any] | None:
    scheme, like = stack.positions, next(stack.parameters())
    positions = torch.arange(min(length, scheme.max_length or length), device=like.device)
    bias, angles = scheme.compute_bias(positions, positions), scheme.compute_angles(positions)
    values: Tensor | None
    if bias is not None:
        applied_as, values, pairwise = "bias", None, bias[0]
    elif angles is not None:
        applied_as, (values, pairwise) = "angles", compute_rotary_similarity(angles)
    else:
        applied_as = "embed"
        values = scheme.embed(like.new_zeros(1, len(positions), stack.config.width), positions)[0].float()
        pairwise = values @ values.T
        if not values.any():
            return None
    kind = stack.config.positions.kind
    formula, note = SCHEME_DESCRIPTIONS.get(kind, UNKNOWN_SCHEME)
    entry: dict[str, Any] = {
        "stack": name,
        "scheme": kind,
        "applied_as": applied_as,
        "formula": formula,
        "note": note,
        "width": stack.config.width if values is None else values.shape[-1],
    }
    if values is not None:
        entry["values"] = trace.pack_array(values, "float16")
    return entry | {"pairwise": trace.pack_array(pairwise, "float16")}


def compute_rotary_similarity(angles: Angles) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (T, D) in feature order, and the normalized dot product (T, T) of a vector of ones
    rotated to two positions: the mean over feature pairs of the cosine of the angle between them."""
    cos, sin = (x.reshape(x.shape[-2:]).float() for x in (angles.cos, angles.sin))  # (T, D / 2)
    ordered = torch.cat([cos, sin], -1) if angles.order == "halves" else torch.stack([cos, sin], -1).flatten(-2)
    return ordered, (cos @ cos.T + sin @ sin.T) / cos.shape[-1]
