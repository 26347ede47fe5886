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

from attent.look.patches import image_of, on_patches, who_looks
from attent.look.properties import measure_document
from attent.look.trace import weights_of

SHADES = " ░▒▓█"
WIDTH = 80  # cells of a line
GAP = 1  # between two columns
INDENT = 2
NARROW = 2  # cells of a column under a word that is written downwards
TALLEST = 12  # letters of such a word
WIDEST = 16  # cells of a word at the left
MOST = 40  # rows of a picture; of more words there is a list
LISTED = 60  # lines of a list
NAMED = 3  # words that a line of it names
LEAST = 0.05  # the weight from which on they are named
SPACE, ELSE, CARRIER = "␣", "\ufffd", "◌"
PICTURES = {chr(code): chr(0x2400 + code) for code in range(0x20)} | {"\x7f": "␡", "\n": "⏎", "\t": "⇥"}
# What turns the direction of all that follows, or breaks a line, though it is no control character.
TURNING = {*"\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029"}


MARK = "\u200e"  # takes no room, runs to the right


class PictureError(ValueError):
    """A picture that cannot be drawn, in a sentence."""


# ---- words -----------------------------------------------------------------------------------------------------------


def shown(token: Mapping[str, Any]) -> str:
    """A token as a word on one line: ‹end› for a special one, ␣ for a bare space."""
    text = harmless(str(token["text"]))
    if token["special"] is not None:
        return f"‹{text}›"
    if text and unicodedata.category(text[0])[0] == "M":
        text = CARRIER + text  # an accent alone would stand on what is drawn before it
    return text if cell_len(text) else SPACE


def harmless(text: str) -> str:
    """Without what a terminal, or a writer of XML, would obey: control characters become their pictures."""
    return "".join(map(sign, text))


def sign(character: str) -> str:
    if character in PICTURES:
        return PICTURES[character]
    hidden = character in TURNING or unicodedata.category(character) in ("Cc", "Cs", "Cn", "Co")
    return ELSE if hidden else character


def letters(word: str) -> list[str]:
    """What takes room by itself, with what stands on it: a letter and its accents."""
    found: list[str] = []
    for character in word:
        if found and (cell_len(character) == 0 or found[-1].endswith("\u200d")):
            found[-1] += character
        else:
            found.append(character)
    return found


def clipped(word: str, width: int) -> str:
    """As much as fits, with … where something is missing."""
    if cell_len(word) <= width:
        return word
    kept = ""
    for letter in letters(word):
        if cell_len(kept + letter) > width - 1:
            break
        kept += letter
    return kept + "…"


def padded(word: str, width: int, *, right: bool = False) -> str:
    room = " " * max(0, width - cell_len(word))
    return room + anchored(word) if right else anchored(word) + room


def anchored(word: str) -> str:
    """A word of a script that runs to the left must not turn round what stands beside it."""
    turning = MARK not in word and any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in word)
    return word + MARK if turning else word


# ---- the picture -----------------------------------------------------------------------------------------------------


def picture(
    document: Mapping[str, Any], *, path: str, head: int | Literal["mean"] | None = None, width: int = WIDTH
) -> str:
    """Who looks at whom: those who look stand at the left, what they look at above, and dark is much.

    head   its number; "mean" or None: the mean of the layer's heads
    width  cells of a line; where the words do not fit, a list tells for each word what it looks at most
    """
    layer = layer_at(document, path)
    keys = len(document["sides"][layer["keys"]]["tokens"])
    weights = one_head(layer, weights_of(layer, keys), head)
    image = image_of(document, layer)
    if image is not None and 2 * image["columns"] + INDENT <= width:
        return "\n".join(patches(weights, image))
    rows, columns = (
        [shown(token) for token in document["sides"][layer[name]]["tokens"]] for name in ("queries", "keys")
    )
    if not rows or not columns:
        raise PictureError(f"{path} must have tokens on both sides to draw, but has none")
    side = min(WIDEST, max(map(cell_len, rows)))
    if len(rows) <= MOST:
        for header in (across(columns), downwards(columns)):
            widths = [max(map(cell_len, cells)) for cells in zip(*header, strict=True)]
            if INDENT + side + sum(widths) + GAP * len(widths) <= width:
                return "\n".join(drawn(header, widths, [clipped(row, side) for row in rows], weights))
    return "\n".join(listed(rows, columns, weights, max(width, 2 * WIDEST)))


def layer_at(document: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    layers = {layer["path"]: layer for layer in document["layers"]}
    if path not in layers:
        near = get_close_matches(path, layers, n=1, cutoff=0.0)
        raise PictureError(f"there is no layer {path!r}; did you mean {near[0] if near else 'another document'}?")
    return layers[path]


def one_head(layer: Mapping[str, Any], weights: Tensor, head: int | str | None) -> Tensor:
    """(H, Tq, Tk) -> (Tq, Tk)"""
    if not len(weights):
        raise PictureError(f"{layer['path']} has no heads left to draw; choose another layer")
    if head is None or head == "mean":
        return weights.mean(0)
    numbers = list(layer.get("numbers", range(weights.shape[0])))
    if head not in numbers:
        raise PictureError(f"the heads of {layer['path']} are {', '.join(map(str, numbers))}, but {head} is asked for")
    return weights[numbers.index(head)]


def across(columns: Sequence[str]) -> list[list[str]]:
    """The words above, each in one piece: lines of cells."""
    return [[padded(clipped(word, WIDEST), NARROW + 1) for word in columns]]


def downwards(columns: Sequence[str]) -> list[list[str]]:
    """The words above, letter by letter, all ending on the last line."""
    words = [letters(word) for word in columns]
    words = [word if len(word) <= TALLEST else [*word[: TALLEST - 1], "…"] for word in words]
    height = max(map(len, words))
    standing = [[""] * (height - len(word)) + word for word in words]
    return [[padded(word[line], NARROW) for word in standing] for line in range(height)]


def drawn(
    header: Sequence[Sequence[str]], widths: Sequence[int], rows: Sequence[str], weights: Tensor
) -> Iterator[str]:
    side = max(map(cell_len, rows))
    for cells in header:
        words = (padded(cell, width) for cell, width in zip(cells, widths, strict=True))
        yield " " * (INDENT + side) + "".join(" " * GAP + word for word in words).rstrip()
    for row, line in zip(rows, weights.tolist(), strict=True):
        cells = "".join(" " * GAP + shade(weight) * width for weight, width in zip(line, widths, strict=True))
        yield " " * INDENT + padded(row, side, right=True) + cells.rstrip()


def patches(weights: Tensor, image: Mapping[str, Any]) -> Iterator[str]:
    """The picture's patches, two cells wide since these are twice as high; dark is what is looked at most."""
    yield f"{' ' * INDENT}{who_looks(image)}, dark is {100 * float(on_patches(weights, image).max()):.0f}%"
    lines = on_patches(weights, image)
    for line in (lines / lines.max().clamp(min=1e-9)).tolist():
        yield f"{' ' * INDENT}|{''.join(2 * shade(weight) for weight in line)}|"


def shade(weight: float) -> str:
    """Five shades, each for a fifth."""
    return SHADES[min(int(weight * len(SHADES)), len(SHADES) - 1)]


def listed(rows: Sequence[str], columns: Sequence[str], weights: Tensor, width: int) -> Iterator[str]:
    """`word ← word 87%, word 9%`"""
    side = min(WIDEST, max(map(cell_len, rows)))
    best = weights.topk(min(NAMED, weights.shape[1]), -1)
    for row, values, places in list(zip(rows, best.values.tolist(), best.indices.tolist(), strict=True))[:LISTED]:
        named = [
            f"{anchored(clipped(columns[place], WIDEST))} {100 * value:.0f}%"
            for number, (value, place) in enumerate(zip(values, places, strict=True))
            if value >= LEAST or number == 0
        ]
        line = f"{' ' * INDENT}{padded(clipped(row, side), side, right=True)} ← {', '.join(named)}"
        yield clipped(line, width)
    if len(rows) > LISTED:
        yield f"{' ' * INDENT}… and {len(rows) - LISTED:,} more"


# ---- what stands out -------------------------------------------------------------------------------------------------

REMARKS = {
    "alignment": "aligns best",
    "previous": "looks most at the previous token",
    "next": "looks most at the next token",
    "end": "looks most at the end",
    "shared": "is most of one mind",
    "confidence": "is the surest",
    "evenness": "spreads most",
}


ON_PICTURES = REMARKS | {
    "previous": "looks most at the patch on the left",
    "next": "looks most at the patch on the right",
    "first": "looks most at the class token",
}


def summary(document: Mapping[str, Any]) -> str:
    """Which heads stand out, and by what."""
    found = document.get("properties") or measure_document(document)
    picture = any(side.get("image") for side in document["sides"].values())
    of = harmless(str(found["of"]))
    told = [
        (words, f"{harmless(best['path'])}:{best['head']}", f"{100 * best['values'][key]:.0f}%")
        for key, words in (ON_PICTURES if picture else REMARKS).items()
        if (best := outstanding(found["heads"], key)) is not None
    ]
    if not told:
        return "There are no heads to tell of."
    wide, far = (max(len(line[place]) for line in told) for place in (0, 1))
    lines = [f"  {words.ljust(wide)}   {head.ljust(far)}   {share:>4}" for words, head, share in told]
    measured = of if found["sentences"] == 1 else f"{found['sentences']:,} sentences of {of}"
    return "\n".join([f"Of all heads, measured on {measured}:", *lines])


def outstanding(heads: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any] | None:
    """The greatest. Links are to be believed as far as a head is sure of them: of one that spreads they are chance."""
    measured = [head["values"] for head in heads if head["values"].get(key) is not None]
    sure = key == "alignment"
    best = max(
        measured, key=lambda values: values[key] * ((values.get("confidence") or 0.0) if sure else 1), default=None
    )
    return next((head for head in heads if head["values"] is best), None)
