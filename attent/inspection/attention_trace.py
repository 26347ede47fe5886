"""What was recorded, with the words on both sides, as JSON and back: what the page, the plots and `--json` share.

A document is plain JSON: sides (texts as tokens, or an image as patches) and layers, each with the sides that its
queries and keys stand for and its weights. docs/looking.md tells the format. What is added to it, such as the film of
a search, is `view`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attent.inspection.json_arrays import pack_array, unpack_array
from attent.nn import AttentionRecord
from attent.nn.dot_product import repeat_kv_heads

FORMAT, VERSION = "attent-trace", 1
REQUIRED_LAYER_KEYS = ("path", "queries", "keys", "causal", "scale")

AttentionKind = Literal["self", "cross"]
SpecialKind = Literal["start", "end", "pad", "unknown", "tag", "byte", "mask", "class"]


class TraceError(ValueError):
    """A document that cannot be made or read, in a sentence."""


@dataclass(frozen=True)
class DisplayToken:
    """One token as people look at it."""

    piece: str  # as the tokenizer calls it
    text: str  # without the space before it; "" where it is nothing else
    space: bool = False  # a space stands before it
    special: SpecialKind | None = None


@dataclass(frozen=True, kw_only=True)
class PatchImage:
    """A picture whose patches are the tokens of a side, row by row, behind the first `before` of them."""

    src: str  # data:image/png;base64,...
    rows: int
    columns: int
    before: int = 0


@dataclass(frozen=True, kw_only=True)
class TraceSide:
    """What queries or keys stand for."""

    label: str
    tokens: tuple[DisplayToken, ...]
    text: str = ""
    language: str | None = None
    image: PatchImage | None = None

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}
        if self.image is None:
            del found["image"]
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TraceSide:
        tokens = tuple(DisplayToken(**token) for token in data["tokens"])
        image = PatchImage(**data["image"]) if data.get("image") else None
        return cls(
            label=data["label"], text=data.get("text", ""), tokens=tokens, language=data.get("language"), image=image
        )


@dataclass(frozen=True, eq=False)
class RecordedQKV:
    """What one call of a layer made its weights of, and what it weighed."""

    q: Tensor  # (B, H, Tq, D)
    k: Tensor  # (B, Hkv, Tk, D)
    v: Tensor  # (B, Hkv, Tk, D)
    bias: Tensor | None
    scale: float


@dataclass(frozen=True)
class LayerInfo:
    """What stays the same in every call of a layer."""

    causal: bool
    scale: float
    head_indices: tuple[int, ...] | None = None  # that were recorded; None: all


class Trace(Mapping[str, list[Tensor]]):
    """Attention weights by module path, in the order of the calls.

    vectors  by module path, the queries, keys and values of each call, if they were asked for
    states   the residual stream (B, T, E) of each call, if it was asked for: `encoder` is what enters the first block
             of that stack, `encoder.blocks.0` what leaves its first block
    sides    the tokens, of a trace that comes from JSON
    """

    def __init__(self) -> None:
        self._weights: dict[str, list[Tensor]] = {}
        self.layer_info: dict[str, LayerInfo] = {}
        self.qkv: dict[str, list[RecordedQKV]] = {}
        self.hidden_states: dict[str, list[Tensor]] = {}
        self.sides: dict[str, TraceSide] = {}

    def __getitem__(self, path: str) -> list[Tensor]:
        if path not in self._weights:
            raise KeyError(f"no attention was recorded at {path!r}; recorded: {', '.join(self._weights) or 'nothing'}")
        return self._weights[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def make_tap(self, path: str, heads: Sequence[int] | None, qkv: bool) -> Callable[[AttentionRecord], None]:
        def keep(look: AttentionRecord) -> None:
            weights = look.weights if heads is None else look.compute_weights(heads)
            self._weights.setdefault(path, []).append(weights)
            self.layer_info[path] = LayerInfo(look.mask.causal, look.scale, None if heads is None else tuple(heads))
            if qkv:
                some = slice(None) if heads is None else list(heads)
                made_of = RecordedQKV(look.q[:, some], *select_keys_values(look, some), look.scale)
                self.qkv.setdefault(path, []).append(made_of)

        return keep

    # --- to JSON and back --------------------------------------------------------------------------------------------

    def to_document(
        self, sides: Mapping[str, TraceSide] | None = None, *, title: str = "", row: int = 0
    ) -> dict[str, Any]:
        """Of one row of the batch, in the last call of each layer, with its tokens.

        sides  `source`, `target` (what is written) and `read` (what the decoder has read by then) of a translation; of
               a model that reads one text, or image, that one under any name
        """
        sides = self.sides if sides is None else sides
        layers = []
        for path, calls in self.items():
            queries, keys = get_side_names(path, sides)
            shape = (len(sides[queries].tokens), len(sides[keys].tokens))
            weights = crop_weights(calls[-1], row, shape, path)
            facts = self.layer_info[path]
            layer = build_layer(path, (queries, keys), weights, causal=facts.causal, scale=facts.scale)
            if facts.head_indices is not None:
                layer["numbers"] = list(facts.head_indices)
            if path in self.qkv:
                layer |= pack_qkv(self.qkv[path][-1], row, shape)
            layers.append(layer)
        return build_document(title, sides, layers)

    def to_json(self, sides: Mapping[str, TraceSide] | None = None, *, title: str = "", row: int = 0) -> str:
        return json.dumps(self.to_document(sides, title=title, row=row), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """What `to_json` or `attent look --json` wrote; weights to within 0.8e-5, vectors to three digits."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise TraceError(f"a trace must be JSON, but this is not: {error}; get the file again") from error
        return cls.from_document(found)

    @classmethod
    def from_document(cls, document: Any) -> Trace:
        check_format(document)
        trace = cls()
        trace.sides = {name: TraceSide.from_dict(side) for name, side in document["sides"].items()}
        for layer in document["layers"]:
            path = layer["path"]
            keys = len(trace.sides[layer["keys"]].tokens)
            trace._weights[path] = [unpack_weights(layer, keys)[None]]
            heads = layer.get("numbers")
            trace.layer_info[path] = LayerInfo(layer["causal"], layer["scale"], None if heads is None else tuple(heads))
            if "q" in layer:
                bias = unpack_array(layer["bias"])[None] if "bias" in layer else None
                q, k, v = (unpack_array(layer[name])[None] for name in "qkv")
                trace.qkv[path] = [RecordedQKV(q, k, v, bias, layer["scale"])]
        return trace


def check_format(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TraceError(
            f'a trace must have "format": "{FORMAT}", but this has not; give what attent look --json wrote'
        )
    if document.get("version") != VERSION:
        raise TraceError(
            f"the trace is of version {document.get('version')!r}, and this attent reads {VERSION}; update attent"
        )
    for layer in document.get("layers", ()):
        missing = [key for key in REQUIRED_LAYER_KEYS if key not in layer]
        if missing:
            raise TraceError(f"a layer of the trace has no {missing[0]!r}; get the file again")


def select_keys_values(record: AttentionRecord, heads: slice | list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and bias of some query heads."""
    if isinstance(heads, slice):
        return record.k, record.v, record.bias
    k, v = (repeat_kv_heads(x, record.q.shape[1])[:, heads] for x in (record.k, record.v))
    return k, v, None if record.bias is None else record.bias.expand(-1, record.q.shape[1], -1, -1)[:, heads]


def crop_weights(weights: Tensor, row: int, shape: tuple[int, int], path: str) -> Tensor:
    """(B, H, Tq, Tk) -> (H, *shape) of one row; what is longer was padding."""
    if row >= weights.shape[0] or weights.shape[2] < shape[0] or weights.shape[3] < shape[1]:
        raise TraceError(
            f"{path} was recorded with {weights.shape[0]} rows of {weights.shape[2]} x {weights.shape[3]} tokens, and "
            f"row {row} of {shape[0]} x {shape[1]} is asked for; give the tokens of what the model read last"
        )
    return weights[row, :, : shape[0], : shape[1]]


def get_side_names(path: str, sides: Mapping[str, Any]) -> tuple[str, str]:
    """The names of what the queries and keys of a layer stand for."""
    if len(sides) == 1:
        return next(iter(sides)), next(iter(sides))
    if path.rpartition(".")[2] == "cross_attn":
        return "target", "source"
    return ("target", "read") if "decoder" in path.split(".") else ("source", "source")


def build_document(title: str, sides: Mapping[str, TraceSide], layers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "sides": {name: side.to_dict() for name, side in sides.items()},
        "layers": layers,
    }


# --- layers ----------------------------------------------------------------------------------------------------------


def get_attention_kind(path: str) -> AttentionKind:
    return "cross" if path.rpartition(".")[2] == "cross_attn" else "self"


def get_layer_index(path: str) -> int | None:
    """Which layer of its stack: the last number in the path."""
    numbers = [int(name) for name in path.split(".") if name.isdigit()]
    return numbers[-1] if numbers else None


def build_layer(
    path: str, sides: tuple[str, str], weights: Tensor, *, causal: bool, scale: float, top_k: int | None = None
) -> dict[str, Any]:
    """A layer of a document: all weights (H, Tq, Tk), or of each row only the `most` greatest."""
    stack = path.split(".")[0]
    layer = {
        "path": path,
        "stack": stack if stack in ("encoder", "decoder") else "model",
        "layer": get_layer_index(path) or 0,
        "kind": get_attention_kind(path),
        "heads": weights.shape[0],
        "queries": sides[0],
        "keys": sides[1],
        "causal": causal,
        "scale": scale,
        "silent": [],
    }
    if top_k is None or top_k >= weights.shape[-1]:
        return layer | {"weights": pack_array(weights, "unit16")}
    greatest = weights.topk(top_k, -1)
    return layer | {
        "sparse": {"places": pack_array(greatest.indices, "uint16"), "weights": pack_array(greatest.values, "unit16")}
    }


def pack_qkv(recorded: RecordedQKV, row: int, shape: tuple[int, int]) -> dict[str, Any]:
    found = {
        "q": pack_array(recorded.q[row, :, : shape[0]], "float16", drop_low_bit=True),
        "k": pack_array(recorded.k[row, :, : shape[1]], "float16", drop_low_bit=True),
        "v": pack_array(recorded.v[row, :, : shape[1]], "float16", drop_low_bit=True),
    }
    if recorded.bias is not None:
        bias = recorded.bias[row if recorded.bias.shape[0] > 1 else 0, :, : shape[0], : shape[1]]
        found["bias"] = pack_array(bias.expand(recorded.q.shape[1], -1, -1), "float16")
    return found


def unpack_weights(layer: Mapping[str, Any], num_keys: int, rows: Tensor | None = None) -> Tensor:
    """(H, Tq, Tk) of a layer of a document that looks at so many tokens, or some rows of it. Of a long text only the
    greatest are there: the others are 0."""
    if "weights" in layer:
        weights = unpack_array(layer["weights"])
        return weights if rows is None else weights[:, rows]
    values, places = (unpack_array(layer["sparse"][name]) for name in ("weights", "places"))
    if rows is not None:
        values, places = values[:, rows], places[:, rows]
    return torch.zeros(*values.shape[:2], num_keys).scatter(-1, places, values)
