"""A head as a small picture of letters for the terminal, and what stands out among all of them in a few lines.

Text in, text out: colours, and whether there is a terminal at all, are the command's business. What tokens hold must
not move the cursor: control characters are shown by signs of their own.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from rich.cells import cell_len
from torch import Tensor

from attent.inspection.attention_trace import unpack_weights
from attent.inspection.head_stats import measure_document_heads
from attent.inspection.image_patches import describe_patch_queries, get_key_image, reshape_to_patches

SHADES = " ░▒▓█"
LINE_WIDTH = 80  # cells of a line
COLUMN_GAP = 1  # between two columns
INDENT = 2
VERTICAL_COLUMN_WIDTH = 2  # cells of a column under a word that is written downwards
MAX_WORD_HEIGHT = 12  # letters of such a word
MAX_WORD_WIDTH = 16  # cells of a word at the left
MAX_ROWS = 40  # rows of a picture; of more words there is a list
MAX_LIST_LINES = 60  # lines of a list
TOP_KEYS = 3  # words that a line of it names
MIN_LISTED_WEIGHT = 0.05  # the weight from which on they are named
SPACE_SYMBOL, REPLACEMENT_SYMBOL, DOTTED_CIRCLE = "␣", "\ufffd", "◌"
CONTROL_PICTURES = {chr(code): chr(0x2400 + code) for code in range(0x20)} | {"\x7f": "␡", "\n": "⏎", "\t": "⇥"}
# What turns the direction of all that follows, or breaks a line, though it is no control character.
BIDI_CONTROLS = {*"\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029"}


LEFT_TO_RIGHT_MARK = "\u200e"  # takes no room, runs to the right


class TerminalPlotError(ValueError):
    """A picture that cannot be drawn, in a sentence."""


# ---- words -----------------------------------------------------------------------------------------------------------


def format_token(token: Mapping[str, Any]) -> str:
    """A token as a word on one line: ‹end› for a special one, ␣ for a bare space."""
    text = escape_control_characters(str(token["text"]))
    if token["special"] is not None:
        return f"‹{text}›"
    if text and unicodedata.category(text[0])[0] == "M":
        text = DOTTED_CIRCLE + text  # an accent alone would stand on what is drawn before it
    return text if cell_len(text) else SPACE_SYMBOL


def escape_control_characters(text: str) -> str:
    """Without what a terminal, or a writer of XML, would obey: control characters become their pictures."""
    return "".join(map(escape_character, text))


def escape_character(character: str) -> str:
    if character in CONTROL_PICTURES:
        return CONTROL_PICTURES[character]
    hidden = character in BIDI_CONTROLS or unicodedata.category(character) in ("Cc", "Cs", "Cn", "Co")
    return REPLACEMENT_SYMBOL if hidden else character


def split_graphemes(word: str) -> list[str]:
    """What takes room by itself, with what stands on it: a letter and its accents."""
    found: list[str] = []
    for character in word:
        if found and (cell_len(character) == 0 or found[-1].endswith("\u200d")):
            found[-1] += character
        else:
            found.append(character)
    return found


def truncate_text(word: str, width: int) -> str:
    """As much as fits, with … where something is missing."""
    if cell_len(word) <= width:
        return word
    kept = ""
    for letter in split_graphemes(word):
        if cell_len(kept + letter) > width - 1:
            break
        kept += letter
    return kept + "…"


def pad_text(word: str, width: int, *, align_right: bool = False) -> str:
    room = " " * max(0, width - cell_len(word))
    return room + anchor_direction(word) if align_right else anchor_direction(word) + room


def anchor_direction(word: str) -> str:
    """A word of a script that runs to the left must not turn round what stands beside it."""
    turning = LEFT_TO_RIGHT_MARK not in word and any(
        unicodedata.bidirectional(letter) in ("R", "AL") for letter in word
    )
    return word + LEFT_TO_RIGHT_MARK if turning else word


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw_head(
    document: Mapping[str, Any], *, path: str, head: int | Literal["mean"] | None = None, width: int = LINE_WIDTH
) -> str:
    """Who looks at whom: those who look stand at the left, what they look at above, and dark is much.

    head   its number; "mean" or None: the mean of the layer's heads
    width  cells of a line; where the words do not fit, a list tells for each word what it looks at most
    """
    layer = find_layer(document, path)
    keys = len(document["sides"][layer["keys"]]["tokens"])
    weights = select_head(layer, unpack_weights(layer, keys), head)
    image = get_key_image(document, layer)
    if image is not None and 2 * image["columns"] + INDENT <= width:
        return "\n".join(draw_patches(weights, image))
    rows, columns = (
        [format_token(token) for token in document["sides"][layer[name]]["tokens"]] for name in ("queries", "keys")
    )
    if not rows or not columns:
        raise TerminalPlotError(f"{path} must have tokens on both sides to draw, but has none")
    side = min(MAX_WORD_WIDTH, max(map(cell_len, rows)))
    if len(rows) <= MAX_ROWS:
        for header in (build_horizontal_header(columns), build_vertical_header(columns)):
            widths = [max(map(cell_len, cells)) for cells in zip(*header, strict=True)]
            if INDENT + side + sum(widths) + COLUMN_GAP * len(widths) <= width:
                return "\n".join(draw_matrix(header, widths, [truncate_text(row, side) for row in rows], weights))
    return "\n".join(list_top_keys(rows, columns, weights, max(width, 2 * MAX_WORD_WIDTH)))


def find_layer(document: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    layers = {layer["path"]: layer for layer in document["layers"]}
    if path not in layers:
        near = get_close_matches(path, layers, n=1, cutoff=0.0)
        raise TerminalPlotError(f"there is no layer {path!r}; did you mean {near[0] if near else 'another document'}?")
    return layers[path]


def select_head(layer: Mapping[str, Any], weights: Tensor, head: int | str | None) -> Tensor:
    """(H, Tq, Tk) -> (Tq, Tk)"""
    if not len(weights):
        raise TerminalPlotError(f"{layer['path']} has no heads left to draw; choose another layer")
    if head is None or head == "mean":
        return weights.mean(0)
    numbers = list(layer.get("numbers", range(weights.shape[0])))
    if head not in numbers:
        raise TerminalPlotError(
            f"the heads of {layer['path']} are {', '.join(map(str, numbers))}, but {head} is asked for"
        )
    return weights[numbers.index(head)]


def build_horizontal_header(columns: Sequence[str]) -> list[list[str]]:
    """The words above, each in one piece: lines of cells."""
    return [[pad_text(truncate_text(word, MAX_WORD_WIDTH), VERTICAL_COLUMN_WIDTH + 1) for word in columns]]


def build_vertical_header(columns: Sequence[str]) -> list[list[str]]:
    """The words above, letter by letter, all ending on the last line."""
    words = [split_graphemes(word) for word in columns]
    words = [word if len(word) <= MAX_WORD_HEIGHT else [*word[: MAX_WORD_HEIGHT - 1], "…"] for word in words]
    height = max(map(len, words))
    standing = [[""] * (height - len(word)) + word for word in words]
    return [[pad_text(word[line], VERTICAL_COLUMN_WIDTH) for word in standing] for line in range(height)]


def draw_matrix(
    header: Sequence[Sequence[str]], widths: Sequence[int], rows: Sequence[str], weights: Tensor
) -> Iterator[str]:
    side = max(map(cell_len, rows))
    for cells in header:
        words = (pad_text(cell, width) for cell, width in zip(cells, widths, strict=True))
        yield " " * (INDENT + side) + "".join(" " * COLUMN_GAP + word for word in words).rstrip()
    for row, line in zip(rows, weights.tolist(), strict=True):
        cells = "".join(
            " " * COLUMN_GAP + get_shade(weight) * width for weight, width in zip(line, widths, strict=True)
        )
        yield " " * INDENT + pad_text(row, side, align_right=True) + cells.rstrip()


def draw_patches(weights: Tensor, image: Mapping[str, Any]) -> Iterator[str]:
    """The picture's patches, two cells wide since these are twice as high; dark is what is looked at most."""
    yield f"{' ' * INDENT}{describe_patch_queries(image)}, dark is {100 * float(reshape_to_patches(weights, image).max()):.0f}%"
    lines = reshape_to_patches(weights, image)
    for line in (lines / lines.max().clamp(min=1e-9)).tolist():
        yield f"{' ' * INDENT}|{''.join(2 * get_shade(weight) for weight in line)}|"


def get_shade(weight: float) -> str:
    """Five shades, each for a fifth."""
    return SHADES[min(int(weight * len(SHADES)), len(SHADES) - 1)]


def list_top_keys(rows: Sequence[str], columns: Sequence[str], weights: Tensor, width: int) -> Iterator[str]:
    """`word ← word 87%, word 9%`"""
    side = min(MAX_WORD_WIDTH, max(map(cell_len, rows)))
    best = weights.topk(min(TOP_KEYS, weights.shape[1]), -1)
    for row, values, places in list(zip(rows, best.values.tolist(), best.indices.tolist(), strict=True))[
        :MAX_LIST_LINES
    ]:
        named = [
            f"{anchor_direction(truncate_text(columns[place], MAX_WORD_WIDTH))} {100 * value:.0f}%"
            for number, (value, place) in enumerate(zip(values, places, strict=True))
            if value >= MIN_LISTED_WEIGHT or number == 0
        ]
        line = f"{' ' * INDENT}{pad_text(truncate_text(row, side), side, align_right=True)} ← {', '.join(named)}"
        yield truncate_text(line, width)
    if len(rows) > MAX_LIST_LINES:
        yield f"{' ' * INDENT}… and {len(rows) - MAX_LIST_LINES:,} more"


# ---- what stands out -------------------------------------------------------------------------------------------------

SUMMARY_LABELS = {
    "alignment": "aligns best",
    "previous": "looks most at the previous token",
    "next": "looks most at the next token",
    "end": "looks most at the end",
    "shared": "is most of one mind",
    "confidence": "is the surest",
    "evenness": "spreads most",
}


IMAGE_SUMMARY_LABELS = SUMMARY_LABELS | {
    "previous": "looks most at the patch on the left",
    "next": "looks most at the patch on the right",
    "first": "looks most at the class token",
}


def summarize_heads(document: Mapping[str, Any]) -> str:
    """Which heads stand out, and by what."""
    found = document.get("properties") or measure_document_heads(document)
    picture = any(side.get("image") for side in document["sides"].values())
    of = escape_control_characters(str(found["of"]))
    told = [
        (words, f"{escape_control_characters(best['path'])}:{best['head']}", f"{100 * best['values'][key]:.0f}%")
        for key, words in (IMAGE_SUMMARY_LABELS if picture else SUMMARY_LABELS).items()
        if (best := find_top_head(found["heads"], key)) is not None
    ]
    if not told:
        return "There are no heads to tell of."
    wide, far = (max(len(line[place]) for line in told) for place in (0, 1))
    lines = [f"  {words.ljust(wide)}   {head.ljust(far)}   {share:>4}" for words, head, share in told]
    measured = of if found["sentences"] == 1 else f"{found['sentences']:,} sentences of {of}"
    return "\n".join([f"Of all heads, measured on {measured}:", *lines])


def find_top_head(heads: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any] | None:
    """The greatest. Links are to be believed as far as a head is sure of them: of one that spreads they are chance."""
    measured = [head["values"] for head in heads if head["values"].get(key) is not None]
    sure = key == "alignment"
    best = max(
        measured, key=lambda values: values[key] * ((values.get("confidence") or 0.0) if sure else 1), default=None
    )
    return next((head for head in heads if head["values"] is best), None)
