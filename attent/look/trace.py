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

from attent.look.arrays import pack, unpack
from attent.nn import Look
from attent.nn.attend import share_heads

FORMAT, VERSION = "attent-trace", 1
LAYER_KEYS = ("path", "queries", "keys", "causal", "scale")

Kind = Literal["self", "cross"]
Special = Literal["start", "end", "pad", "unknown", "tag", "byte", "mask", "class"]


class TraceError(ValueError):
    """A document that cannot be made or read, in a sentence."""


@dataclass(frozen=True)
class Token:
    """One token as people look at it."""

    piece: str  # as the tokenizer calls it
    text: str  # without the space before it; "" where it is nothing else
    space: bool = False  # a space stands before it
    special: Special | None = None


@dataclass(frozen=True, kw_only=True)
class Image:
    """A picture whose patches are the tokens of a side, row by row, behind the first `before` of them."""

    src: str  # data:image/png;base64,...
    rows: int
    columns: int
    before: int = 0


@dataclass(frozen=True, kw_only=True)
class Side:
    """What queries or keys stand for."""

    label: str
    tokens: tuple[Token, ...]
    text: str = ""
    language: str | None = None
    image: Image | None = None

    def document(self) -> dict[str, Any]:
        found = asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}
        if self.image is None:
            del found["image"]
        return found

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Side:
        tokens = tuple(Token(**token) for token in found["tokens"])
        image = Image(**found["image"]) if found.get("image") else None
        return cls(
            label=found["label"], text=found.get("text", ""), tokens=tokens, language=found.get("language"), image=image
        )


@dataclass(frozen=True, eq=False)
class Vectors:
    """What one call of a layer made its weights of, and what it weighed."""

    q: Tensor  # (B, H, Tq, D)
    k: Tensor  # (B, Hkv, Tk, D)
    v: Tensor  # (B, Hkv, Tk, D)
    bias: Tensor | None
    scale: float


@dataclass(frozen=True)
class Facts:
    """What stays the same in every call of a layer."""

    causal: bool
    scale: float
    heads: tuple[int, ...] | None = None  # that were recorded; None: all


class Trace(Mapping[str, list[Tensor]]):
    """Attention weights by module path, in the order of the calls.

    vectors  by module path, the queries, keys and values of each call, if they were asked for
    states   the residual stream (B, T, E) of each call, if it was asked for: `encoder` is what enters the first block
             of that stack, `encoder.blocks.0` what leaves its first block
    sides    the tokens, of a trace that comes from JSON
    """

    def __init__(self) -> None:
        self._weights: dict[str, list[Tensor]] = {}
        self.facts: dict[str, Facts] = {}
        self.vectors: dict[str, list[Vectors]] = {}
        self.states: dict[str, list[Tensor]] = {}
        self.sides: dict[str, Side] = {}

    def __getitem__(self, path: str) -> list[Tensor]:
        if path not in self._weights:
            raise KeyError(f"no attention was recorded at {path!r}; recorded: {', '.join(self._weights) or 'nothing'}")
        return self._weights[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def tap(self, path: str, heads: Sequence[int] | None, vectors: bool) -> Callable[[Look], None]:
        def keep(look: Look) -> None:
            weights = look.weights if heads is None else look.weights_of(heads)
            self._weights.setdefault(path, []).append(weights)
            self.facts[path] = Facts(look.mask.causal, look.scale, None if heads is None else tuple(heads))
            if vectors:
                some = slice(None) if heads is None else list(heads)
                made_of = Vectors(look.q[:, some], *keys_of(look, some), look.scale)
                self.vectors.setdefault(path, []).append(made_of)

        return keep

    # --- to JSON and back --------------------------------------------------------------------------------------------

    def document(self, sides: Mapping[str, Side] | None = None, *, title: str = "", row: int = 0) -> dict[str, Any]:
        """Of one row of the batch, in the last call of each layer, with its tokens.

        sides  `source`, `target` (what is written) and `read` (what the decoder has read by then) of a translation; of
               a model that reads one text, or image, that one under any name
        """
        sides = self.sides if sides is None else sides
        layers = []
        for path, calls in self.items():
            queries, keys = sides_of(path, sides)
            shape = (len(sides[queries].tokens), len(sides[keys].tokens))
            weights = fitting(calls[-1], row, shape, path)
            facts = self.facts[path]
            layer = layer_of(path, (queries, keys), weights, causal=facts.causal, scale=facts.scale)
            if facts.heads is not None:
                layer["numbers"] = list(facts.heads)
            if path in self.vectors:
                layer |= packed_vectors(self.vectors[path][-1], row, shape)
            layers.append(layer)
        return document(title, sides, layers)

    def to_json(self, sides: Mapping[str, Side] | None = None, *, title: str = "", row: int = 0) -> str:
        return json.dumps(self.document(sides, title=title, row=row), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """What `to_json` or `attent look --json` wrote; weights to within 0.8e-5, vectors to three digits."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise TraceError(f"a trace must be JSON, but this is not: {error}; get the file again") from error
        return cls.of(found)

    @classmethod
    def of(cls, found: Any) -> Trace:
        check_format(found)
        trace = cls()
        trace.sides = {name: Side.of(side) for name, side in found["sides"].items()}
        for layer in found["layers"]:
            path = layer["path"]
            keys = len(trace.sides[layer["keys"]].tokens)
            trace._weights[path] = [weights_of(layer, keys)[None]]
            heads = layer.get("numbers")
            trace.facts[path] = Facts(layer["causal"], layer["scale"], None if heads is None else tuple(heads))
            if "q" in layer:
                bias = unpack(layer["bias"])[None] if "bias" in layer else None
                q, k, v = (unpack(layer[name])[None] for name in "qkv")
                trace.vectors[path] = [Vectors(q, k, v, bias, layer["scale"])]
        return trace


def check_format(found: Any) -> None:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise TraceError(
            f'a trace must have "format": "{FORMAT}", but this has not; give what attent look --json wrote'
        )
    if found.get("version") != VERSION:
        raise TraceError(
            f"the trace is of version {found.get('version')!r}, and this attent reads {VERSION}; update attent"
        )
    for layer in found.get("layers", ()):
        missing = [key for key in LAYER_KEYS if key not in layer]
        if missing:
            raise TraceError(f"a layer of the trace has no {missing[0]!r}; get the file again")


def keys_of(look: Look, some: slice | list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and bias of some query heads."""
    if isinstance(some, slice):
        return look.k, look.v, look.bias
    k, v = (share_heads(x, look.q.shape[1])[:, some] for x in (look.k, look.v))
    return k, v, None if look.bias is None else look.bias.expand(-1, look.q.shape[1], -1, -1)[:, some]


def fitting(weights: Tensor, row: int, shape: tuple[int, int], path: str) -> Tensor:
    """(B, H, Tq, Tk) -> (H, *shape) of one row; what is longer was padding."""
    if row >= weights.shape[0] or weights.shape[2] < shape[0] or weights.shape[3] < shape[1]:
        raise TraceError(
            f"{path} was recorded with {weights.shape[0]} rows of {weights.shape[2]} x {weights.shape[3]} tokens, and "
            f"row {row} of {shape[0]} x {shape[1]} is asked for; give the tokens of what the model read last"
        )
    return weights[row, :, : shape[0], : shape[1]]


def sides_of(path: str, sides: Mapping[str, Any]) -> tuple[str, str]:
    """The names of what the queries and keys of a layer stand for."""
    if len(sides) == 1:
        return next(iter(sides)), next(iter(sides))
    if path.rpartition(".")[2] == "cross":
        return "target", "source"
    return ("target", "read") if "decoder" in path.split(".") else ("source", "source")


def document(title: str, sides: Mapping[str, Side], layers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "sides": {name: side.document() for name, side in sides.items()},
        "layers": layers,
    }


# --- layers ----------------------------------------------------------------------------------------------------------


def kind_of(path: str) -> Kind:
    return "cross" if path.rpartition(".")[2] == "cross" else "self"


def number_of(path: str) -> int | None:
    """Which layer of its stack: the last number in the path."""
    numbers = [int(name) for name in path.split(".") if name.isdigit()]
    return numbers[-1] if numbers else None


def layer_of(
    path: str, sides: tuple[str, str], weights: Tensor, *, causal: bool, scale: float, most: int | None = None
) -> dict[str, Any]:
    """A layer of a document: all weights (H, Tq, Tk), or of each row only the `most` greatest."""
    stack = path.split(".")[0]
    layer = {
        "path": path,
        "stack": stack if stack in ("encoder", "decoder") else "model",
        "layer": number_of(path) or 0,
        "kind": kind_of(path),
        "heads": weights.shape[0],
        "queries": sides[0],
        "keys": sides[1],
        "causal": causal,
        "scale": scale,
        "silent": [],
    }
    if most is None or most >= weights.shape[-1]:
        return layer | {"weights": pack(weights, "unit16")}
    greatest = weights.topk(most, -1)
    return layer | {"sparse": {"places": pack(greatest.indices, "uint16"), "weights": pack(greatest.values, "unit16")}}


def packed_vectors(vectors: Vectors, row: int, shape: tuple[int, int]) -> dict[str, Any]:
    found = {
        "q": pack(vectors.q[row, :, : shape[0]], "float16", digits=True),
        "k": pack(vectors.k[row, :, : shape[1]], "float16", digits=True),
        "v": pack(vectors.v[row, :, : shape[1]], "float16", digits=True),
    }
    if vectors.bias is not None:
        bias = vectors.bias[row if vectors.bias.shape[0] > 1 else 0, :, : shape[0], : shape[1]]
        found["bias"] = pack(bias.expand(vectors.q.shape[1], -1, -1), "float16")
    return found


def weights_of(layer: Mapping[str, Any], keys: int, rows: Tensor | None = None) -> Tensor:
    """(H, Tq, Tk) of a layer of a document that looks at so many tokens, or some rows of it. Of a long text only the
    greatest are there: the others are 0."""
    if "weights" in layer:
        weights = unpack(layer["weights"])
        return weights if rows is None else weights[:, rows]
    values, places = (unpack(layer["sparse"][name]) for name in ("weights", "places"))
    if rows is not None:
        values, places = values[:, rows], places[:, rows]
    return torch.zeros(*values.shape[:2], keys).scatter(-1, places, values)
