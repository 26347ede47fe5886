"""Figures of a head with matplotlib (extra `viz`), drawn from trace documents: PNG, SVG with text as text, or PDF."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attent.formatting import escape_invisible
from attent.inspection.attention_trace import format_token, unpack_weights
from attent.storage.atomic import write_output
from attent.storage.errors import AttentError, import_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 200
MAX_WIDTH, MAX_HEIGHT = 16.0, 30.0  # inches
MAX_CELL_SIZE = 0.27  # inches per token
MIN_FONT_SIZE = 3.5  # points; smaller labels are omitted
TEXT_COLOR, SPECIAL_TOKEN_COLOR, GRID_COLOR = "#1a1a1a", "#8a5a00", "#d9d9d9"
HEATMAP_COLORS = ("#ffffff", "#d6e6f4", "#8fbcdd", "#3a84bd", "#08417c", "#04203f")
RC_PARAMS: dict[Any, Any] = {
    "text.parse_math": False,  # tokens may contain dollar signs
    "text.usetex": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "attent",  # reproducible files
    "pdf.fonttype": 42,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#9a9a9a",
    "font.size": 9,
}


@contextmanager
def plot_context(texts: Iterable[str]) -> Iterator[None]:
    matplotlib = import_package("matplotlib", "a figure", "'attent[viz]'")
    with matplotlib.rc_context({**RC_PARAMS, "font.family": select_fonts(frozenset("".join(texts)))}):
        yield


def create_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.01, hspace=0.01)
    figure = Figure(figsize=(min(width, MAX_WIDTH), min(height, MAX_HEIGHT)), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    vars(figure)["_repr_png_"] = lambda: render_figure(figure, "png", dpi=110)  # notebooks show it without pyplot
    return figure


@cache
def select_fonts(characters: frozenset[str]) -> list[str]:
    """Return installed fonts that together cover these characters, Noto Sans and sans-serif fonts first."""
    from matplotlib.font_manager import fontManager, get_font

    regular = {font.name: font.fname for font in fontManager.ttflist if font.style == "normal" and font.weight == 400}
    names = sorted(regular, key=lambda name: (not name.startswith("Noto Sans"), "Serif" in name, name))
    fonts, missing = ["DejaVu Sans"], frozenset(letter for letter in characters if not letter.isspace())
    for name in ("DejaVu Sans", *names):
        if not missing or "Last Resort" in name:  # which has placeholder glyphs for everything
            continue
        with suppress(RuntimeError, OSError):  # an unreadable file
            covered = missing.intersection(map(chr, get_font(regular[name]).get_charmap()))
            fonts += [name] if covered and name not in fonts else []
            missing -= covered
    return fonts


def save_figure(figure: Figure, path: str | Path) -> None:
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise AttentError(f"{path}: a figure must end in {', '.join(SUFFIXES)}; change the name")
    write_output(path, render_figure(figure, path.suffix.lower()[1:]))


def render_figure(figure: Figure, file_type: str, dpi: int = DPI) -> bytes:
    from matplotlib.text import Text

    texts = [text.get_text() for text in figure.findobj(Text)]
    content = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file_type)
    with plot_context(texts), warnings.catch_warnings():
        if file_type == "svg":  # which uses the viewer's fonts
            warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(content, format=file_type, dpi=dpi, metadata=metadata)
    return content.getvalue()


def plot_head(document: Mapping[str, Any], path: str, head: int) -> Figure:
    """Plot the weights of a head of the layer at this module path, with its tokens."""
    layer = next(layer for layer in document["layers"] if layer["path"] == path)
    sides = {name: document["sides"][layer[name]] for name in ("queries", "keys")}
    weights = unpack_weights(layer, len(sides["keys"]["tokens"]))[head]
    if not weights.numel():
        raise AttentError("there must be tokens on both sides, but there are none; give another sentence")
    kind = "cross-attention" if layer["kind"] == "cross" else "self-attention"
    name = kind if layer["stack"] == "model" else f"{layer['stack']} {kind}"
    rows, columns = weights.shape
    size = min(MAX_CELL_SIZE, (MAX_WIDTH - 3) / max(rows, columns))
    with plot_context(format_token(token) for side in sides.values() for token in side["tokens"]):
        figure = create_figure(columns * size + 2.3, rows * size + 1.9)
        axes = figure.subplots()
        image = draw_heatmap(axes, weights)
        label_axes(axes, sides["keys"], sides["queries"], size)
        axes.set_title(f"{name}, layer {layer['layer']}, head {head}", pad=12)
        bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 2.5 / (rows * size)), aspect=18, pad=0.02)
        bar.set_label("attention weight")
        bar.outline.set_visible(False)
    return figure


def draw_heatmap(axes: Axes, weights: Tensor) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("attent", HEATMAP_COLORS)
    vmax = max(0.1, float(weights.max()))
    image = axes.imshow(weights.numpy(), cmap=shades, vmin=0, vmax=vmax, interpolation="nearest")
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    return image


def label_axes(axes: Axes, keys: Mapping[str, Any], queries: Mapping[str, Any], size: float) -> None:
    font_size = min(9.0, size * 72 * 0.62)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    set_token_ticks(axes.xaxis, keys["tokens"], font_size, rotation=60)
    set_token_ticks(axes.yaxis, queries["tokens"], font_size)
    axes.tick_params(length=0, pad=3)
    for axis, side in ((axes.xaxis, keys), (axes.yaxis, queries)):
        axis.set_label_text(escape_invisible(str(side["label"])), color="#555555")
        axis.labelpad = 8
        if size > 0.1:
            axis.set_ticks([i - 0.5 for i in range(1, len(side["tokens"]))], minor=True)
    if size > 0.1:
        axes.grid(which="minor", color=GRID_COLOR, linewidth=0.4)
        axes.tick_params(which="minor", length=0)


def set_token_ticks(axis: Any, tokens: Sequence[Mapping[str, Any]], font_size: float, rotation: float = 0) -> None:
    """Label an axis with tokens, special ones in italics and another color; no labels if they would be too small."""
    if font_size < MIN_FONT_SIZE:
        return
    axis.set_ticks(range(len(tokens)), [format_token(token) for token in tokens], fontsize=font_size)
    for text, token in zip(axis.get_ticklabels(), tokens, strict=True):
        text.set_color(SPECIAL_TOKEN_COLOR if token["special"] else TEXT_COLOR)
        text.set_style("italic" if token["special"] else "normal")
        if rotation:
            text.set(rotation=rotation, ha="left", va="bottom", rotation_mode="anchor")
