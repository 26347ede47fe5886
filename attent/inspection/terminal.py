"""Draw a head as text for the terminal, and summarize all heads in a few lines.

Tokens must not control the terminal: control characters are replaced by visible symbols.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any, Literal

import torch
from rich.cells import cell_len
from torch import Tensor

from attent.inspection.attention_trace import describe_patch_queries, get_key_image, reshape_to_patches, unpack_weights
from attent.inspection.head_stats import measure_document_heads

SHADES = " ░▒▓█"
LINE_WIDTH = 80  # columns
COLUMN_GAP = 1  # between two columns
INDENT = 2
VERTICAL_COLUMN_WIDTH = 2  # under a vertical word
MAX_WORD_HEIGHT = 12  # of a vertical word
MAX_WORD_WIDTH = 16  # of a row label
MAX_ROWS = 40  # more rows are printed as a list
MAX_LIST_LINES = 60  # of the list
TOP_KEYS = 3  # named per line
MIN_LISTED_WEIGHT = 0.05  # smaller weights are omitted
SPACE_SYMBOL, REPLACEMENT_SYMBOL, DOTTED_CIRCLE = "␣", "\ufffd", "◌"
CONTROL_PICTURES = {chr(code): chr(0x2400 + code) for code in range(0x20)} | {"\x7f": "␡", "\n": "⏎", "\t": "⇥"}
# Characters that change the text direction or break lines, though they are not control characters.
BIDI_CONTROLS = {*"\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029"}
LEFT_TO_RIGHT_MARK = "\u200e"  # zero-width


def format_token(token: Mapping[str, Any]) -> str:
    """Format a token on one line: ‹end› for special tokens, ␣ for a space."""
    text = escape_control_characters(str(token["text"]))
    if token["special"] is not None:
        return f"‹{text}›"
    if text and unicodedata.category(text[0])[0] == "M":
        text = DOTTED_CIRCLE + text  # a lone accent would combine with the character before it
    return text if cell_len(text) else SPACE_SYMBOL


def escape_control_characters(text: str) -> str:
    """Replace characters that a terminal or an XML writer interprets by visible symbols."""

    def is_hidden(character: str) -> bool:
        return character in BIDI_CONTROLS or unicodedata.category(character) in ("Cc", "Cs", "Cn", "Co")

    return "".join(CONTROL_PICTURES.get(c) or (REPLACEMENT_SYMBOL if is_hidden(c) else c) for c in text)


def split_graphemes(word: str) -> list[str]:
    """Split into characters with their combining marks."""
    graphemes: list[str] = []
    for character in word:
        if graphemes and (cell_len(character) == 0 or graphemes[-1].endswith("\u200d")):
            graphemes[-1] += character
        else:
            graphemes.append(character)
    return graphemes


def truncate_text(word: str, width: int) -> str:
    """Truncate to a width in cells, ending in …."""
    if cell_len(word) <= width:
        return word
    prefix = ""
    for letter in split_graphemes(word):
        if cell_len(prefix + letter) > width - 1:
            break
        prefix += letter
    return prefix + "…"


def pad_text(word: str, width: int, *, align_right: bool = False) -> str:
    padding = " " * max(0, width - cell_len(word))
    return padding + anchor_direction(word) if align_right else anchor_direction(word) + padding


def anchor_direction(word: str) -> str:
    """Append a mark to right-to-left words, so that they do not reorder their neighbors."""
    is_rtl = LEFT_TO_RIGHT_MARK not in word and any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in word)
    return word + LEFT_TO_RIGHT_MARK if is_rtl else word


def draw_head(
    document: Mapping[str, Any], *, path: str, head: int | Literal["mean"] | None = None, width: int = LINE_WIDTH
) -> str:
    """Draw queries down, keys across, dark for large weights.

    head   "mean" or None: the mean over the layer's heads
    width  in cells; if the tokens do not fit, a list of the top keys of each query is drawn instead
    """
    layers = {layer["path"]: layer for layer in document["layers"]}
    if path not in layers:
        near = get_close_matches(path, layers, cutoff=0.0)
        raise ValueError(f"there is no layer {path!r}; did you mean {near[0] if near else 'another document'}?")
    layer = layers[path]
    keys = len(document["sides"][layer["keys"]]["tokens"])
    weights = select_head(layer, unpack_weights(layer, keys), head)
    rows, columns = (
        [format_token(token) for token in document["sides"][layer[name]]["tokens"]] for name in ("queries", "keys")
    )
    if not rows or not columns:
        raise ValueError(f"{path} must have tokens on both sides, but has none")
    side = min(MAX_WORD_WIDTH, max(map(cell_len, rows)))
    image, audio = get_key_image(document, layer), document["sides"][layer["keys"]].get("audio")
    if audio is not None:
        cells = min(len(columns), max(MAX_WORD_WIDTH, width - side - INDENT - 3))
        return "\n".join(draw_times(weights, rows, audio["seconds"], cells))
    if image is not None and 2 * image["columns"] + INDENT <= width:
        lines = [*draw_patches(weights, image, is_self=layer["kind"] == "self")]
        top_keys = [] if layer["kind"] == "self" else ["", *list_top_keys(rows, columns, weights, width)]
        return "\n".join([*lines, *top_keys])
    horizontal = [[pad_text(truncate_text(word, MAX_WORD_WIDTH), VERTICAL_COLUMN_WIDTH + 1) for word in columns]]
    if len(rows) <= MAX_ROWS:
        for header in (horizontal, build_vertical_header(columns)):
            widths = [max(map(cell_len, cells)) for cells in zip(*header, strict=True)]
            if INDENT + side + sum(widths) + COLUMN_GAP * len(widths) <= width:
                return "\n".join(draw_matrix(header, widths, [truncate_text(row, side) for row in rows], weights))
    return "\n".join(list_top_keys(rows, columns, weights, max(width, 2 * MAX_WORD_WIDTH)))


def select_head(layer: Mapping[str, Any], weights: Tensor, head: int | str | None) -> Tensor:
    """(H, Tq, Tk) -> (Tq, Tk)"""
    if not len(weights):
        raise ValueError(f"{layer['path']} has no heads; choose another layer")
    if head is None or head == "mean":
        return weights.mean(0)
    head_indices = list(layer.get("head_indices", range(weights.shape[0])))
    if head not in head_indices:
        raise ValueError(
            f"the heads of {layer['path']} are {', '.join(map(str, head_indices))}, but {head} was requested"
        )
    return weights[head_indices.index(head)]


def build_vertical_header(columns: Sequence[str]) -> list[list[str]]:
    """Header with vertical words that end on the last line, as lines of cells."""
    words = [split_graphemes(word) for word in columns]
    words = [word if len(word) <= MAX_WORD_HEIGHT else [*word[: MAX_WORD_HEIGHT - 1], "…"] for word in words]
    height = max(map(len, words))
    columns_of_letters = [[""] * (height - len(word)) + word for word in words]
    return [[pad_text(word[line], VERTICAL_COLUMN_WIDTH) for word in columns_of_letters] for line in range(height)]


def draw_matrix(
    header: Sequence[Sequence[str]], widths: Sequence[int], rows: Sequence[str], weights: Tensor
) -> Iterator[str]:
    side = max(map(cell_len, rows))
    for cells in header:
        words = (pad_text(cell, width) for cell, width in zip(cells, widths, strict=True))
        yield " " * (INDENT + side) + "".join(" " * COLUMN_GAP + word for word in words).rstrip()
    for row, line in zip(rows, weights.tolist(), strict=True):
        shades = (get_shade(weight) * width for weight, width in zip(line, widths, strict=True))
        cells = "".join(" " * COLUMN_GAP + shade for shade in shades)
        yield " " * INDENT + pad_text(row, side, align_right=True) + cells.rstrip()


def draw_times(weights: Tensor, rows: Sequence[str], seconds: float, width: int) -> Iterator[str]:
    """Draw time from left to right, in each row darkest where its weight is largest; long texts are sampled."""
    cells = torch.nn.functional.adaptive_avg_pool1d(weights, width)
    cells = cells / cells.amax(1, keepdim=True).clamp(min=1e-9)
    side, step = min(MAX_WORD_WIDTH, max(map(cell_len, rows))), -(-len(rows) // MAX_LIST_LINES)
    for row, line in zip(rows[::step], cells[::step].tolist(), strict=True):
        label = pad_text(truncate_text(row, side), side, align_right=True)
        yield f"{' ' * INDENT}{label} |{''.join(map(get_shade, line))}|"
    yield f"{' ' * (INDENT + side)} 0 s{f'{seconds:.1f} s'.rjust(width - 2)}"


def draw_patches(weights: Tensor, image: Mapping[str, Any], *, is_self: bool) -> Iterator[str]:
    """Draw patches two cells wide, since cells are twice as high; dark for large weights."""
    lines = reshape_to_patches(weights, image, is_self=is_self)
    yield f"{' ' * INDENT}{describe_patch_queries(image, is_self=is_self)}, maximum {100 * float(lines.max()):.0f}%"
    for line in (lines / lines.max().clamp(min=1e-9)).tolist():
        yield f"{' ' * INDENT}|{''.join(2 * get_shade(weight) for weight in line)}|"


def get_shade(weight: float) -> str:
    return SHADES[min(int(weight * len(SHADES)), len(SHADES) - 1)]


def list_top_keys(rows: Sequence[str], columns: Sequence[str], weights: Tensor, width: int) -> Iterator[str]:
    """`word ← word 87%, word 9%`"""
    side = min(MAX_WORD_WIDTH, max(map(cell_len, rows)))
    best = weights.topk(min(TOP_KEYS, weights.shape[1]), -1)
    lines = zip(rows, best.values.tolist(), best.indices.tolist(), strict=True)
    for row, values, indices in islice(lines, MAX_LIST_LINES):
        keys = [
            f"{anchor_direction(truncate_text(columns[index], MAX_WORD_WIDTH))} {100 * value:.0f}%"
            for rank, (value, index) in enumerate(zip(values, indices, strict=True))
            if value >= MIN_LISTED_WEIGHT or rank == 0
        ]
        line = f"{' ' * INDENT}{pad_text(truncate_text(row, side), side, align_right=True)} ← {', '.join(keys)}"
        yield truncate_text(line, width)
    if len(rows) > MAX_LIST_LINES:
        yield f"{' ' * INDENT}… and {len(rows) - MAX_LIST_LINES:,} more"


SUMMARY_LABELS = {
    "alignment": "best alignment",
    "previous": "most weight on the previous token",
    "next": "most weight on the next token",
    "end": "most weight on the end token",
    "top_key": "most weight on one key",
    "confidence": "highest confidence",
    "normalized_entropy": "most uniform",
}
IMAGE_SUMMARY_LABELS = SUMMARY_LABELS | {
    "previous": "most weight on the patch to the left",
    "next": "most weight on the patch to the right",
    "first": "most weight on the class token",
}


def summarize_heads(document: Mapping[str, Any]) -> str:
    """Return the top head for each of a few statistics."""
    stats = document.get("head_stats") or measure_document_heads(document)
    is_image = [*document["sides"]] == ["image"]
    dataset = escape_control_characters(str(stats["dataset"]))
    rows = [
        (words, f"{escape_control_characters(best['path'])}:{best['head']}", f"{100 * best['values'][key]:.0f}%")
        for key, words in (IMAGE_SUMMARY_LABELS if is_image else SUMMARY_LABELS).items()
        if (best := find_top_head(stats["heads"], key)) is not None
    ]
    if not rows:
        return "There are no heads."
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = [f"  {words.ljust(widths[0])}   {head.ljust(widths[1])}   {share:>4}" for words, head, share in rows]
    measured = dataset if stats["sentences"] == 1 else f"{stats['sentences']:,} sentences of {dataset}"
    return "\n".join([f"Top heads, measured on {measured}:", *lines])


def find_top_head(heads: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any] | None:
    """Return the head with the largest value; alignment weighted by confidence: diffuse heads link at random."""
    measured = [head for head in heads if head["values"].get(key) is not None]

    def rate_head(head: Mapping[str, Any]) -> float:
        value: float = head["values"][key]
        return value * (head["values"].get("confidence") or 0.0) if key == "alignment" else value

    return max(measured, key=rate_head, default=None)
