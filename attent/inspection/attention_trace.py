"""Record attention weights, in addition to the fast kernel, so that outputs stay bit-identical; and the trace document,
JSON: recorded attention with the tokens of both sides, as docs/inspection.md describes.
"""

from __future__ import annotations

import base64
import fnmatch
import unicodedata
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from rich.cells import cell_len
from torch import Tensor, nn

from attent.decoding.alignment import WORD_START_MARKERS, attach_observers
from attent.formatting import escape_invisible
from attent.nn import Attention, AttentionRecord, get_attention_layers
from attent.storage.errors import AttentError
from attent.text.tokenizer_formats import BYTE_TOKEN
from attent.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pandas import DataFrame

FORMAT, VERSION = "attent-trace", 1

RecordedT = TypeVar("RecordedT")
AttentionKind = Literal["self", "cross"]
SpecialKind = Literal["start", "end", "pad", "unknown", "tag", "byte", "mask", "class"]


@dataclass(frozen=True)
class DisplayToken:
    piece: str  # of the tokenizer
    text: str  # without the leading space
    space: bool = False  # True if a space precedes it
    special: SpecialKind | None = None


@dataclass(frozen=True, kw_only=True)
class PatchImage:
    """An image whose patches, row by row, are the tokens of a side after `num_prefix_tokens` others."""

    src: str  # data:image/png;base64,...
    rows: int
    columns: int
    num_prefix_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SourceAudio:
    """A recording whose tokens are equal steps in time. The image of its side is the spectrogram."""

    src: str  # data:audio/wav;base64,...
    step: float  # seconds of a token
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TraceSide:
    label: str
    tokens: tuple[DisplayToken, ...]
    text: str = ""
    language: str | None = None
    image: PatchImage | None = None
    audio: SourceAudio | None = None

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}
        return {key: value for key, value in data.items() if key not in ("image", "audio") or value is not None}


class LayerMapping(dict[str, RecordedT]):
    def __missing__(self, path: str) -> RecordedT:
        raise KeyError(f"no attention was recorded at {path!r}; recorded: {', '.join(self) or 'nothing'}")


class Trace(LayerMapping[list[Tensor]]):
    """Attention weights (B, H, Tq, Tk) of each call by module path; `qkv`: queries, keys and values, if recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv: dict[str, list[AttentionRecord]] = {}

    def __repr__(self) -> str:
        return f"Trace({', '.join(f'{path}: {len(calls)} x {tuple(calls[0].shape)}' for path, calls in self.items())})"

    def to_frame(self) -> DataFrame:
        """Return a pandas table of all weights: path, call, row (of the batch), head, query, key, weight."""
        import pandas as pd

        frames = [
            build_frame(weights.float().cpu().numpy(), ("row", "head", "query", "key"), path=path, call=call)
            for path, calls in self.items()
            for call, weights in enumerate(calls)
        ]
        return pd.concat(frames, ignore_index=True)

    def add(self, path: str, qkv: bool, record: AttentionRecord) -> None:
        self.setdefault(path, []).append(record.weights)
        if qkv:
            self.qkv.setdefault(path, []).append(record)


@contextmanager
def record(
    model: nn.Module,
    pattern: str = "*",
    *,
    kind: AttentionKind | None = None,
    layers: Sequence[int] | None = None,
    qkv: bool = False,
) -> Iterator[Trace]:
    """Record every attention layer of a model inside the `with` block.

    Calls from other threads are recorded too; recordings may be nested or overlap.

    pattern  glob of module paths, such as "decoder.*.cross_attn"
    kind     "self" or "cross"
    layers   only these layers of each stack, from 0
    qkv      also record queries, keys and values: `trace.qkv`

    >>> model = attent.build(attent.presets.tiny(vocab=100)).eval()
    >>> with attent.record(model, "decoder.*.cross_attn") as trace:
    ...     logits = model(torch.tensor([[5, 6, 7, 2]]), torch.tensor([[1, 8, 9]]))
    >>> trace["decoder.blocks.3.cross_attn"][0].shape  # of the first call: (B, H, Tq, Tk)
    torch.Size([1, 4, 3, 4])
    >>> trace.to_frame().columns.tolist()
    ['path', 'call', 'row', 'head', 'query', 'key', 'weight']
    """
    if not isinstance(model, nn.Module):
        raise AttentError(f"`model` must be a model, but is of type {type(model).__name__}; see `attent.load`")
    trace = Trace()
    chosen = select_attention_layers(model, pattern, kind, layers)
    with attach_observers(chosen.values(), [partial(trace.add, path, qkv) for path in chosen]):
        yield trace


def select_attention_layers(
    model: nn.Module, pattern: str, kind: AttentionKind | None, layers: Sequence[int] | None
) -> dict[str, Attention]:
    all_layers = get_attention_layers(model)
    if not all_layers:
        raise AttentError(
            f"`model` must have an attention layer of attent.nn, but this {type(model).__name__} has none"
        )
    if kind not in (None, *get_args(AttentionKind)):
        raise AttentError(f"`kind` must be self or cross, but is {kind!r}")
    chosen = {
        path: layer
        for path, layer in all_layers.items()
        if fnmatch.fnmatch(path, pattern)
        and kind in (None, get_attention_kind(path))
        and (layers is None or get_layer_index(path) in layers)
    }
    if not chosen:
        selection = {"pattern": pattern, "kind": kind, "layers": layers}
        filters = ", ".join(f"{name} {value}" for name, value in selection.items() if value not in (None, "*"))
        raise AttentError(f"{filters} must select an attention layer, but select none of: {', '.join(all_layers)}")
    return chosen


def get_layer_info(record: AttentionRecord) -> dict[str, Any]:
    return {"causal": record.mask.causal, "scale": record.scale, "additive": record.score_weight is not None}


class AttentionWeights(np.ndarray[Any, np.dtype[np.float32]]):  # since NumPy 2.5, NDArray is no class
    """The weights (heads, queries, keys) of a layer with their tokens; arrays computed from it have none."""

    queries: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @classmethod
    def from_tensor(cls, weights: Tensor, queries: tuple[str, ...], keys: tuple[str, ...]) -> AttentionWeights:
        array = weights.numpy().view(cls)
        array.queries, array.keys = queries, keys
        return array


def build_frame(weights: npt.NDArray[Any], axes: Sequence[str], **constants: Any) -> DataFrame:
    import pandas as pd

    indices = (index.ravel() for index in np.indices(weights.shape))
    return pd.DataFrame({**constants, **dict(zip(axes, indices, strict=True)), "weight": weights.ravel()})


def get_side_names(path: str, sides: Mapping[str, Any]) -> tuple[str, str]:
    if len(sides) == 1:
        return next(iter(sides)), next(iter(sides))
    if path.rpartition(".")[2] == "cross_attn":
        return "target", "source"
    return ("target", "decoder_input") if "decoder" in path.split(".") else ("source", "source")


def build_document(title: str, sides: Mapping[str, TraceSide], layers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "sides": {name: side.to_dict() for name, side in sides.items()},
        "layers": layers,
    }


def get_attention_kind(path: str) -> AttentionKind:
    return "cross" if path.rpartition(".")[2] == "cross_attn" else "self"


def get_layer_index(path: str) -> int | None:
    numbers = [int(name) for name in path.split(".") if name.isdigit()]
    return numbers[-1] if numbers else None


def build_layer(
    path: str,
    sides: tuple[str, str],
    weights: Tensor,
    *,
    causal: bool,
    scale: float,
    additive: bool = False,  # scores are v^T tanh(q + k), which the page does not show step by step
    top_k: int | None = None,
) -> dict[str, Any]:
    """Build a layer of a document from weights (H, Tq, Tk); with `top_k`, only the largest of each row are kept."""
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
        "masked_heads": [],
    } | ({"additive": True} if additive else {})
    if top_k is None or top_k >= weights.shape[-1]:
        return layer | {"weights": pack_array(weights, "unit16")}
    largest = weights.topk(top_k, -1)
    return layer | {
        "sparse": {"indices": pack_array(largest.indices, "uint16"), "weights": pack_array(largest.values, "unit16")}
    }


def pack_qkv(recorded: AttentionRecord, row: int, shape: tuple[int, int]) -> dict[str, Any]:
    lengths = {"q": shape[0], "k": shape[1], "v": shape[1]}
    packed = {
        name: pack_array(getattr(recorded, name)[row, :, :length], "float16", drop_low_bit=True)
        for name, length in lengths.items()
    }
    if recorded.bias is not None:
        bias = recorded.bias[row if recorded.bias.shape[0] > 1 else 0, :, : shape[0], : shape[1]]
        packed["bias"] = pack_array(bias.expand(recorded.q.shape[1], -1, -1), "float16")
    return packed


def unpack_weights(layer: Mapping[str, Any], num_keys: int, rows: Tensor | None = None) -> Tensor:
    """Return the weights (H, Tq, Tk) of a document layer, or selected rows; weights that were not stored are 0."""
    if "weights" in layer:
        weights = unpack_array(layer["weights"])
        return weights if rows is None else weights[:, rows]
    values, indices = (unpack_array(layer["sparse"][name]) for name in ("weights", "indices"))
    if rows is not None:
        values, indices = values[:, rows], indices[:, rows]
    return torch.zeros(*values.shape[:2], num_keys).scatter(-1, indices, values)


# --- compressed arrays in JSON, easy to decode in any language -------------------------------------------------------


ArrayType = Literal["unit16", "uint16", "float16", "float32"]
UNIT16_SCALE = 65535
NUMPY_TYPES: dict[str, str] = {"unit16": "<u2", "uint16": "<u2", "float16": "<f2", "float32": "<f4"}
MAX_FLOAT16 = 65280.0  # fits float16 even after rounding


def pack_array(values: Tensor, array_type: ArrayType, *, drop_low_bit: bool = False) -> dict[str, Any]:
    """Return {"type": "unit16", "shape": [8, 60, 60], "data": "..."}.

    `data` is base64 of zlib of the little-endian bytes in planes: first the lowest byte of every number, then the next,
    which compresses better. `unit16` are integers to be divided by 65535: weights, exact to 0.8e-5.
    `drop_low_bit`: round float16 to three digits, which compresses better.
    """
    exact = values.detach().cpu().double().numpy()
    if array_type == "unit16":
        exact = np.rint(exact * UNIT16_SCALE)
    elif array_type == "float16":
        exact = exact.clip(-MAX_FLOAT16, MAX_FLOAT16)  # includes the -inf of masks
    flat = np.ascontiguousarray(exact, dtype=NUMPY_TYPES[array_type])
    if drop_low_bit and array_type == "float16":
        bits = flat.view(np.uint16)
        flat = ((bits + 1) & 0xFFFE).view(NUMPY_TYPES[array_type])  # to nearest; a carry into the exponent is correct
    planes = flat.reshape(-1).view(np.uint8).reshape(-1, flat.itemsize).T.tobytes()
    data = base64.b64encode(zlib.compress(planes, 6)).decode("ascii")
    return {"type": array_type, "shape": list(flat.shape), "data": data}


def unpack_array(packed: dict[str, Any]) -> Tensor:
    try:
        stored = np.dtype(NUMPY_TYPES[packed["type"]])
        planes = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"], validate=True)), np.uint8)
        flat = planes.reshape(stored.itemsize, -1).T.copy().view(stored).reshape(tuple(packed["shape"]))
        if list(flat.shape) != packed["shape"]:  # NumPy replaces negative numbers
            raise ValueError(f"shape {packed['shape']}")
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise AttentError(f"an array is damaged ({error}); create the file again") from error
    numbers = torch.from_numpy(flat.astype(np.int64 if packed["type"] == "uint16" else np.float32))
    return numbers / UNIT16_SCALE if packed["type"] == "unit16" else numbers


# --- tokens as displayed ---------------------------------------------------------------------------------------------


CONTINUATION_PREFIX = "##"  # WordPiece prefix inside a word
NEWLINE_SYMBOL = "⏎"
REPLACEMENT_CHARACTER = "\ufffd"  # of incomplete UTF-8
SPACE_SYMBOL, DOTTED_CIRCLE = "␣", "◌"


def build_display_tokens(
    vocabulary: Vocabulary, ids: Sequence[int], *, is_decoder_input: bool = False
) -> tuple[DisplayToken, ...]:
    """`is_decoder_input`: the first token is the decoder's start token, whatever else its id means."""
    pieces = vocabulary.to_pieces(ids)
    tokens = [build_display_token(vocabulary, token, piece) for token, piece in zip(ids, pieces, strict=True)]
    if is_decoder_input and tokens:
        tokens[0] = DisplayToken(pieces[0], "start", special="start")
    return tuple(tokens)


def build_display_token(vocabulary: Vocabulary, token_id: int, piece: str) -> DisplayToken:
    special = get_special_kind(vocabulary, token_id, piece)
    if special is not None:
        text = {"tag": piece, "byte": piece.strip("<>").replace("0x", "")}.get(special, special)
        return DisplayToken(piece, text, special=special)
    if token_id in vocabulary.sentinels:
        return DisplayToken(piece, piece.strip("<>"), special="mask")
    text = vocabulary.decode([token_id])
    # WordPiece marks continuations, not word starts: does the decoder put a space before the token?
    space = bool(text.strip()) and f"{text} {text}" == vocabulary.decode([token_id, token_id])
    space = space or piece.startswith(WORD_START_MARKERS)
    if REPLACEMENT_CHARACTER in text:
        return DisplayToken(piece, piece.lstrip("".join(WORD_START_MARKERS)) or piece, space, "byte")
    if piece.startswith(CONTINUATION_PREFIX) and piece != CONTINUATION_PREFIX:
        return DisplayToken(piece, piece.removeprefix(CONTINUATION_PREFIX), False)
    return DisplayToken(piece, text.strip() or NEWLINE_SYMBOL * text.count("\n"), space)


def get_special_kind(vocabulary: Vocabulary, token_id: int, piece: str) -> SpecialKind | None:
    if BYTE_TOKEN.fullmatch(piece):
        return "byte"
    if piece.startswith("<2") and piece[2:-1] in vocabulary.tags:
        return "tag"
    special_ids: tuple[tuple[int | None, SpecialKind], ...] = (
        (vocabulary.mask, "mask"),
        (vocabulary.end, "end"),
        (vocabulary.unknown, "unknown"),
        (vocabulary.pad, "pad"),
        (vocabulary.start, "start"),
    )
    return next((special for special_id, special in special_ids if token_id == special_id), None)


def format_token(token: Mapping[str, Any]) -> str:
    """Format a token on one line: ‹end› for special tokens, ␣ for a space."""
    text = escape_invisible(str(token["text"]))
    if token["special"] is not None:
        return f"‹{text}›"
    if text and unicodedata.category(text[0])[0] == "M":
        text = DOTTED_CIRCLE + text  # a lone accent would combine with the character before it
    return text if cell_len(text) else SPACE_SYMBOL
