"""Figures for papers and slides, by matplotlib (the extra `viz`): heads as heat maps or as lines between words, the
positional encoding, and what each part of a model is worth.

Figures are made of a document and its sections alone; `save` writes one by the ending of its file: PNG at 200 dpi, SVG
with text as text, PDF with fonts inside. What tokens hold is text, whatever it looks like: no formula, no markup.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn

from attent.inspection.attention_trace import unpack_weights
from attent.inspection.image_patches import describe_patch_queries, get_key_image, reshape_to_patches
from attent.inspection.json_arrays import unpack_array
from attent.inspection.position_encodings import describe_positions
from attent.inspection.terminal import escape_control_characters, format_token
from attent.storage.atomic import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 200
MAX_WIDTH, MAX_HEIGHT = 16.0, 30.0  # inches
MAX_CELL_SIZE = 0.27  # inches of one word in a large picture
MAX_PANEL_SIZE = 1.7  # inches of one head among many
MIN_FONT_SIZE = 3.5  # points of a word that can still be read when it is enlarged
MAX_TITLE_LENGTH = 64  # characters of a title in a line
TEXT_COLOR, SPECIAL_TOKEN_COLOR, GRID_COLOR = (
    "#1a1a1a",
    "#8a5a00",
    "#d9d9d9",
)  # special tokens stand out by colour and slant
HEATMAP_COLORS = ("#ffffff", "#d6e6f4", "#8fbcdd", "#3a84bd", "#08417c", "#04203f")
RC_PARAMS: dict[Any, Any] = {
    "text.parse_math": False,  # a token may hold dollar signs
    "text.usetex": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "attent",  # the same figure gives the same file
    "pdf.fonttype": 42,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#9a9a9a",
    "font.size": 9,
}

PlotStyle = Literal["map", "lines"]


QUERY_LABELS = {"target": "while it writes", "read": "having read"}  # what the rows of a decoder are


class PlotError(ValueError):
    """A figure that cannot be drawn, in a sentence."""


class HeadPanel(NamedTuple):
    """One head to draw."""

    layer: Mapping[str, Any]
    head: int
    weights: Tensor  # (Tq, Tk)


# ---- matplotlib ------------------------------------------------------------------------------------------------------


@contextmanager
def plot_context(texts: Iterable[str]) -> Iterator[None]:
    """Our settings while the block lasts, with fonts that have the letters of these texts."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError("figures need matplotlib, which is not installed: pip install 'attent[viz]'") from error
    with matplotlib.rc_context({**RC_PARAMS, "font.family": list(select_fonts(frozenset("".join(texts))))}):
        yield


def create_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(min(width, MAX_WIDTH), min(height, MAX_HEIGHT)), layout="constrained", facecolor="white")
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(w_pad=0.08, h_pad=0.06, wspace=0.01, hspace=0.01)
    FigureCanvasAgg(figure)
    return figure


@cache
def select_fonts(characters: frozenset[str]) -> tuple[str, ...]:
    """Names of fonts that have these characters between them, as far as the machine has such."""
    found, missing = ["DejaVu Sans"], characters - get_font_characters("DejaVu Sans")
    for name in list_fonts() if missing else ():
        if missing & get_font_characters(name):
            found.append(name)
            missing -= get_font_characters(name)
        if not missing:
            break
    return tuple(found)


@cache
def list_fonts() -> dict[str, str]:
    """Upright fonts of usual weight and their files; without serifs, and made for many scripts, before others."""
    from matplotlib.font_manager import fontManager

    usual = {font.name: font.fname for font in fontManager.ttflist if font.style == "normal" and font.weight == 400}
    usual = {name: file for name, file in usual.items() if "Last Resort" not in name}  # it has boxes for everything
    return dict(sorted(usual.items(), key=lambda font: (not font[0].startswith("Noto Sans"), "Serif" in font[0], font)))


@cache
def get_font_characters(name: str) -> frozenset[str]:
    from matplotlib.font_manager import get_font

    try:
        return frozenset(map(chr, get_font(list_fonts()[name]).get_charmap()))
    except (KeyError, RuntimeError, OSError):  # a font that is gone, or that cannot be read
        return frozenset()


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes .png, .svg or .pdf, whole or not at all."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{path}: a figure must end in {', '.join(SUFFIXES)}; change the name")
    texts = collect_texts(figure)
    content = io.BytesIO()
    kind = path.suffix.lower()[1:]
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with plot_context(texts), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(content, format=kind, dpi=DPI, metadata=undated)
    if kind != "svg":
        warn_missing_glyphs(texts)
    write_atomic(path, content.getvalue())


def collect_texts(figure: Figure) -> list[str]:
    from matplotlib.text import Text

    found: list[Any] = figure.findobj(Text)
    return [text.get_text() for text in found]


def warn_missing_glyphs(texts: Iterable[str]) -> None:
    needed = frozenset(letter for text in texts for letter in text if not letter.isspace())
    missing = needed.difference(*(get_font_characters(name) for name in select_fonts(needed)))
    if missing:
        some = "".join(sorted(missing)[:10])
        warnings.warn(
            f"no font of this machine has {some} ({len(missing)} characters): boxes stand in their place. Install one "
            "that has them, such as those of Noto, or write .svg, which is shown with the reader's fonts",
            stacklevel=3,
        )


# ---- heads -----------------------------------------------------------------------------------------------------------


def plot_heads(
    document: Mapping[str, Any],
    *,
    path: str = "*",
    kind: Literal["self", "cross"] | None = None,
    heads: Sequence[int] | None = None,
    style: PlotStyle = "map",
    title: str | None = None,
) -> Figure:
    """One head large, with its words; or several side by side, a row for each layer.

    path   of layers, such as decoder.blocks.1.cross_attn or decoder.*.cross_attn
    kind   those that look at their own text, or at the other
    heads  their numbers; None: all
    style  `map` is a heat map; `lines` goes from word to word, several heads of a layer in colours
    """
    panels = select_panels(document, path, kind, heads)
    tokens = {name: [format_token(token) for token in side["tokens"]] for name, side in document["sides"].items()}
    with plot_context(["".join(words) for words in tokens.values()] + [title or ""]):
        if style == "map" and all(get_key_image(document, panel.layer) for panel in panels):
            return plot_patches(document, panels, title)
        if style == "lines":
            return plot_lines(document, panels, title)
        if len(panels) == 1:
            return plot_heatmap(document, panels[0], title)
        return plot_head_grid(document, panels, title)


def select_panels(
    document: Mapping[str, Any], path: str, kind: str | None, heads: Sequence[int] | None
) -> list[HeadPanel]:
    found = []
    for layer in document["layers"]:
        if fnmatch(layer["path"], path) and kind in (None, layer["kind"]):
            weights = unpack_weights(layer, len(document["sides"][layer["keys"]]["tokens"]))
            numbers = layer.get("numbers", range(weights.shape[0]))
            found += [
                HeadPanel(layer, head, each)
                for head, each in zip(numbers, weights, strict=True)
                if heads is None or head in heads
            ]
    if not found:
        known = ", ".join(layer["path"] for layer in document["layers"]) or "none"
        asked = f"{path!r}" + (f", {kind}-attention" if kind else "") + (f", heads {list(heads)}" if heads else "")
        raise PlotError(f"no head fits what is asked for ({asked}); the layers are: {known}")
    if not all(panel.weights.numel() for panel in found):
        raise PlotError("there must be words on both sides to draw, but there are none; give another sentence")
    return found


def describe_layer(layer: Mapping[str, Any]) -> str:
    what = "cross-attention" if layer["kind"] == "cross" else "self-attention"
    return what if layer["stack"] == "model" else f"{layer['stack']} {what}"


def format_title(text: str) -> str:
    """One line of it, without what would be obeyed."""
    text = " ".join(escape_control_characters(text.replace("\n", " ")).split())
    return text if len(text) <= MAX_TITLE_LENGTH else text[: MAX_TITLE_LENGTH - 1] + "…"


def plot_heatmap(document: Mapping[str, Any], panel: HeadPanel, title: str | None) -> Figure:
    rows, columns = panel.weights.shape
    size = compute_cell_size(max(rows, columns))
    figure = create_figure(columns * size + 2.3, rows * size + 1.9)
    axes = figure.subplots()
    most = max(0.1, float(panel.weights.max()))
    image = draw_heatmap(axes, panel.weights, most)
    label_axes(axes, document, panel.layer, size)
    axes.set_title(
        format_title(title or f"{describe_layer(panel.layer)}, layer {panel.layer['layer']}, head {panel.head}"), pad=12
    )
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 2.5 / (rows * size)), aspect=18, pad=0.02)
    bar.set_label("attention weight")
    bar.outline.set_visible(False)
    return figure


def compute_cell_size(count: int) -> float:
    return min(MAX_CELL_SIZE, (MAX_WIDTH - 3) / count)


def draw_heatmap(axes: Axes, weights: Tensor, vmax: float) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("attent", HEATMAP_COLORS)
    image = axes.imshow(weights.numpy(), cmap=shades, vmin=0, vmax=vmax, aspect="equal", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    return image


def label_axes(axes: Axes, document: Mapping[str, Any], layer: Mapping[str, Any], size: float) -> None:
    """Words at the left and above, and thin lines between their cells."""
    points = min(9.0, size * 72 * 0.62)
    keys, queries = (document["sides"][layer[name]] for name in ("keys", "queries"))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    set_token_ticks(axes.xaxis, keys["tokens"], points, rotation=60)
    set_token_ticks(axes.yaxis, queries["tokens"], points)
    axes.set_xlabel(get_side_label(keys), labelpad=8, color="#555555")
    axes.set_ylabel(get_side_label(queries), labelpad=8, color="#555555")
    axes.tick_params(length=0, pad=3)
    if size > 0.1:
        for axis, tokens in ((axes.xaxis, keys["tokens"]), (axes.yaxis, queries["tokens"])):
            axis.set_ticks([place - 0.5 for place in range(1, len(tokens))], minor=True)
        axes.grid(which="minor", color=GRID_COLOR, linewidth=0.4)
        axes.tick_params(which="minor", length=0)


def get_side_label(side: Mapping[str, Any]) -> str:
    return escape_control_characters(str(side["label"]))


def set_token_ticks(axis: Any, tokens: Sequence[Mapping[str, Any]], font_size: float, rotation: float = 0) -> None:
    """Each word at its place; special tokens slanted. Where they could not be read there are none."""
    if font_size < MIN_FONT_SIZE:
        return
    axis.set_ticks(range(len(tokens)), [format_token(token) for token in tokens], fontsize=font_size)
    for text, token in zip(axis.get_ticklabels(), tokens, strict=True):
        text.set_color(SPECIAL_TOKEN_COLOR if token["special"] else TEXT_COLOR)
        text.set_style("italic" if token["special"] else "normal")
        if rotation:
            text.set(rotation=rotation, ha="left", va="bottom", rotation_mode="anchor")


# ---- many heads ------------------------------------------------------------------------------------------------------


def plot_head_grid(document: Mapping[str, Any], panels: Sequence[HeadPanel], title: str | None) -> Figure:
    """A block for each kind of attention, in it a row for each layer."""
    blocks: dict[str, dict[str, list[HeadPanel]]] = {}
    for panel in panels:
        blocks.setdefault(describe_layer(panel.layer), {}).setdefault(panel.layer["path"], []).append(panel)
    columns = max(len(row) for block in blocks.values() for row in block.values())
    rows = [len(block) * compute_aspect_ratio(block) for block in blocks.values()]
    size = min(MAX_PANEL_SIZE, (MAX_WIDTH - 1.5) / columns, (MAX_HEIGHT - 1.2 * len(blocks)) / sum(rows))
    heights = [count * (size + 0.15) + 0.9 for count in rows]
    figure = create_figure(columns * (size + 0.1) + 1.5, sum(heights) + 0.3)
    parts = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (name, block) in zip(parts, blocks.items(), strict=True):
        draw_layer_group(part, document, name, list(block.values()), size)
    figure.suptitle(format_title(title if title is not None else document.get("title", "")), fontsize=11)
    return figure


def compute_aspect_ratio(block: Mapping[str, Sequence[HeadPanel]]) -> float:
    """Height by width of the panels of a block."""
    rows, columns = next(iter(block.values()))[0].weights.shape
    return min(2.0, max(0.5, rows / columns))


def draw_layer_group(
    part: SubFigure, document: Mapping[str, Any], name: str, rows: Sequence[Sequence[HeadPanel]], size: float
) -> None:
    part.suptitle(name, fontsize=9.5, fontweight="bold", color="#333333")
    grid = part.subplots(len(rows), max(map(len, rows)), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for line, panels in enumerate(rows):
        for place, panel in enumerate(panels):
            axes = grid[line, place]
            axes.set_axis_on()
            image = draw_heatmap(axes, panel.weights, 1.0)
            axes.set_title(f"layer {panel.layer['layer']}, head {panel.head}", fontsize=6.5, pad=2.5, color="#555555")
            label_outer_axes(axes, document, panel, size, left=place == 0, below=line == len(rows) - 1)
    style_colorbar(part.colorbar(image, ax=grid, aspect=30, shrink=min(1.0, 2.0 / (size * len(rows))), pad=0.01))


def label_outer_axes(
    axes: Axes, document: Mapping[str, Any], panel: HeadPanel, size: float, *, left: bool, below: bool
) -> None:
    """Words stand once, at the left of a block and below it: all its panels have the same."""
    points = min(7.0, size / max(panel.weights.shape) * 72 * 0.72)
    sides = document["sides"]
    if left:
        set_token_ticks(axes.yaxis, sides[panel.layer["queries"]]["tokens"], points)
        axes.set_ylabel(QUERY_LABELS.get(panel.layer["queries"], ""), fontsize=6, color="#777777")
    if below:
        set_token_ticks(axes.xaxis, sides[panel.layer["keys"]]["tokens"], points)
        for text in axes.get_xticklabels():
            text.set_rotation(90)
    axes.tick_params(length=0, pad=1.5)


# ---- patches of a picture --------------------------------------------------------------------------------------------

TINT_COLOR = (1.0, 0.48, 0.0)  # to be seen on black and on white
MAX_TINT_ALPHA = 0.82


def plot_patches(document: Mapping[str, Any], panels: Sequence[HeadPanel], title: str | None) -> Figure:
    """The picture once for each head, a row for each layer, tinted where the head looks."""
    rows: dict[str, list[HeadPanel]] = {}
    for panel in panels:
        rows.setdefault(panel.layer["path"], []).append(panel)
    columns = max(map(len, rows.values()))
    size = min(4.0 if len(panels) == 1 else MAX_PANEL_SIZE, (MAX_WIDTH - 0.5) / columns, (MAX_HEIGHT - 1) / len(rows))
    figure = create_figure(columns * (size + 0.1) + 0.4, len(rows) * (size + 0.25) + 0.6)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for line, some in enumerate(rows.values()):
        for place, panel in enumerate(some):
            draw_patches(grid[line, place], document, panel)
    image = get_key_image(document, panels[0].layer) or {}
    name = title if title is not None else f"{document.get('title', '')}: {describe_patch_queries(image)}"
    figure.suptitle(format_title(name), fontsize=11)
    return figure


def draw_patches(axes: Axes, document: Mapping[str, Any], panel: HeadPanel) -> None:
    import numpy as np
    from matplotlib.image import imread

    image = get_key_image(document, panel.layer)
    assert image is not None
    weights = reshape_to_patches(panel.weights, image)
    pixels = imread(io.BytesIO(base64.b64decode(image["src"].partition(",")[2])))
    extent = (0, image["columns"], image["rows"], 0)
    grey = pixels if pixels.ndim == 2 else pixels[..., :3].mean(-1)
    axes.imshow(grey, cmap="gray", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    tint = np.empty((*weights.shape, 4))
    tint[..., :3] = TINT_COLOR
    tint[..., 3] = MAX_TINT_ALPHA * (weights / weights.max().clamp(min=1e-9)).numpy() ** 0.7
    axes.imshow(tint, extent=extent, interpolation="nearest")
    name = f"layer {panel.layer['layer']}, head {panel.head}, up to {100 * float(weights.max()):.0f}%"
    axes.set_title(name, fontsize=6.5, pad=2.5, color="#555555")


# ---- lines -----------------------------------------------------------------------------------------------------------

LINE_COLORS = ("#08519c", "#d94801", "#238b45", "#6a51a3", "#cb181d", "#8c6d31", "#0e7c86", "#ae017e")
MIN_LINE_WEIGHT = 0.04  # weights below it are left out


def plot_lines(document: Mapping[str, Any], panels: Sequence[HeadPanel], title: str | None) -> Figure:
    """Those who look at the left, what they look at at the right, a line as strong as the weight."""
    layer = panels[0].layer
    if any(panel.layer["path"] != layer["path"] for panel in panels):
        paths = ", ".join(sorted({panel.layer["path"] for panel in panels}))
        raise PlotError(f"lines are of one layer, but these are asked for: {paths}; choose one")
    queries, keys = (document["sides"][layer[name]] for name in ("queries", "keys"))
    count = max(len(queries["tokens"]), len(keys["tokens"]))
    size = min(MAX_CELL_SIZE, (MAX_HEIGHT - 2) / count)
    figure = create_figure(5.2, count * size + 1.4)
    axes = figure.subplots()
    places = [center_positions(len(side["tokens"]), count) for side in (queries, keys)]
    for number, panel in enumerate(panels):
        draw_lines(axes, panel.weights, places, LINE_COLORS[number % len(LINE_COLORS)])
    for side, x, at, align in ((queries, -0.03, places[0], "right"), (keys, 1.03, places[1], "left")):
        draw_tokens(axes, side, x, at, align, min(9.0, size * 72 * 0.62))
    axes.set(xlim=(-0.45, 1.45), ylim=(count - 0.3, -1.8))
    axes.set_axis_off()
    names = f"head {panels[0].head}" if len(panels) == 1 else f"{len(panels)} heads"
    axes.set_title(format_title(title or f"{describe_layer(layer)}, layer {layer['layer']}, {names}"))
    if len(panels) > 1:
        draw_legend(axes, panels)
    return figure


def center_positions(count: int, total: int) -> list[float]:
    return [place + (total - count) / 2 for place in range(count)]


def draw_lines(axes: Axes, weights: Tensor, positions: Sequence[Sequence[float]], color: str) -> None:
    from matplotlib.collections import LineCollection

    pairs = [(int(q), int(k)) for q, k in (weights > MIN_LINE_WEIGHT).nonzero()]
    strength = [float(weights[q, k]) for q, k in pairs]
    axes.add_collection(
        LineCollection(
            [[(0, positions[0][q]), (1, positions[1][k])] for q, k in pairs],
            colors=[(color, min(1.0, 0.1 + 0.9 * weight)) for weight in strength],
            linewidths=[0.3 + 2.4 * weight for weight in strength],
            capstyle="round",
        )
    )


def draw_tokens(
    axes: Axes, side: Mapping[str, Any], x: float, positions: Sequence[float], align: Any, font_size: float
) -> None:
    axes.text(x, -1.2, get_side_label(side), ha=align, va="center", fontsize=8, color="#555555")
    for token, y in zip(side["tokens"], positions, strict=True):
        special = bool(token["special"])
        axes.text(
            x,
            y,
            format_token(token),
            ha=align,
            va="center",
            fontsize=font_size,
            color=SPECIAL_TOKEN_COLOR if special else TEXT_COLOR,
            style="italic" if special else "normal",
        )


def draw_legend(axes: Axes, panels: Sequence[HeadPanel]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=LINE_COLORS[number % len(LINE_COLORS)], linewidth=2, label=f"head {panel.head}")
        for number, panel in enumerate(panels)
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4, frameon=False, fontsize=7.5)


# ---- positions -------------------------------------------------------------------------------------------------------


SCHEME_NAMES = {"relative": "T5's relative", "alibi": "ALiBi's"}


def plot_positions(source: nn.Module | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Figure:
    """Of a model, a document or its section `positions`: values at the left, how alike two positions are at the right.
    Stacks that know the same of order are drawn once."""
    entries = group_position_entries(source)
    if not entries:
        raise PlotError("there must be positions to draw, but order enters this model nowhere; give another")
    with plot_context([]):
        figure = create_figure(9.5, 3.7 * len(entries) + 0.2)
        parts = figure.subfigures(len(entries), 1, squeeze=False)[:, 0]
        for part, (stacks, entry) in zip(parts, entries, strict=True):
            part.suptitle(
                f"{' and '.join(stacks)}: {SCHEME_NAMES.get(entry['scheme'], entry['scheme'])} positions", fontsize=10.5
            )
            left, right = part.subplots(1, 2, width_ratios=[1.35, 1])
            if "values" in entry:
                draw_values(part, left, entry)
                draw_pairwise(part, right, unpack_array(entry["dots"]), entry)
            else:
                draw_curves(left, unpack_array(entry["dots"]))
                draw_pairwise(part, right, unpack_array(entry["dots"])[0], entry)
        return figure


def group_position_entries(source: Any) -> list[tuple[list[str], Mapping[str, Any]]]:
    if isinstance(source, nn.Module):
        found: Sequence[Mapping[str, Any]] = describe_positions(source)
    else:
        found = source.get("positions", ()) if isinstance(source, Mapping) else source
    grouped: list[tuple[list[str], Mapping[str, Any]]] = []
    for entry in found:
        like = [names for names, other in grouped if {**other, "stack": ""} == {**entry, "stack": ""}]
        if like:
            like[0].append(entry["stack"])
        else:
            grouped.append(([entry["stack"]], entry))
    return grouped


def draw_values(part: SubFigure, axes: Axes, entry: Mapping[str, Any]) -> None:
    values = unpack_array(entry["values"])
    most = float(values.abs().quantile(0.995)) or 1.0
    image = axes.imshow(values.numpy(), cmap="RdBu", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    axes.set(xlabel="feature", ylabel="position", title="values" if entry["enters"] == "embed" else "cosines and sines")
    axes.title.set_fontsize(9)
    style_colorbar(part.colorbar(image, ax=axes, aspect=25, pad=0.02))


def draw_pairwise(part: SubFigure, axes: Axes, pairwise: Tensor, entry: Mapping[str, Any]) -> None:
    titles = {
        "embed": "dot products between positions",
        "angles": "dot products of ones, turned",
        "bias": "what head 0 adds to its scores",
    }
    image = axes.imshow(pairwise.numpy(), cmap="viridis", interpolation="nearest")
    sides = ("position", "position") if entry["enters"] != "bias" else ("key", "query")
    axes.set(xlabel=sides[0], ylabel=sides[1], title=titles[entry["enters"]])
    axes.title.set_fontsize(9)
    style_colorbar(part.colorbar(image, ax=axes, aspect=25, pad=0.02))


def draw_curves(axes: Axes, bias: Tensor) -> None:
    """What each head adds, by distance: seen from the middle."""
    middle = bias.shape[-1] // 2
    away = [key - middle for key in range(bias.shape[-1])]
    for head, row in enumerate(bias[:, middle].tolist()):
        axes.plot(away, row, linewidth=1.4, color=LINE_COLORS[head % len(LINE_COLORS)], label=f"head {head}")
    axes.axvline(0, color=GRID_COLOR, linewidth=0.8, zorder=0)
    axes.set(xlabel="key - query", ylabel="added to the score", title="by distance")
    axes.title.set_fontsize(9)
    axes.legend(fontsize=6.5, framealpha=0.85, edgecolor="none", ncols=2)


def style_colorbar(bar: Any) -> None:
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2)


# ---- what parts are worth --------------------------------------------------------------------------------------------


def plot_ablation(ablation: Mapping[str, Any]) -> Figure:
    """The section `ablation`: by how much silencing each head, sub-layer and layer changes BLEU, or else the loss."""
    measure = "bleu" if ablation.get("bleu") is not None else "loss"
    whole = ablation[measure]
    changes = {
        each["part"]: (each["kind"], each[measure] - whole)
        for each in ablation["parts"]
        if each.get(measure) is not None
    }
    if not changes:
        raise PlotError("there must be measured parts to draw, but there are none; run attent look --ablate first")
    heads = {part: change for part, (kind, change) in changes.items() if kind == "head"}
    others = {part: change for part, (kind, change) in changes.items() if kind != "head"}
    rows = len({part.partition(":")[0] for part in heads})
    high = max(rows * 0.34 + 1.2 if heads else 0.0, len(others) * 0.24 + 1.2 if others else 0.0)
    with plot_context([]):
        figure = create_figure(bool(heads) * 5.6 + bool(others) * 4.8, high + 0.5)
        axes = figure.subplots(1, bool(heads) + bool(others), squeeze=False)[0]
        if heads:
            draw_head_table(figure, axes[0], heads, measure)
        if others:
            draw_bars(axes[-1], others, measure)
        name = {"bleu": "BLEU", "loss": "loss"}[measure]
        sentences = f"{ablation['sentences']:,} sentences"
        figure.suptitle(
            f"{name} with a part silenced, against {whole:.2f} with all of them ({sentences})", fontsize=10.5
        )
        return figure


def draw_head_table(figure: Figure, axes: Axes, heads: Mapping[str, float], measure: str) -> None:
    """A row for each layer, a column for each head, the change written in each cell."""
    import numpy as np

    places = [(path, int(head)) for path, _, head in (part.partition(":") for part in heads)]
    paths, count = list(dict.fromkeys(path for path, _ in places)), 1 + max(head for _, head in places)
    table = np.full((len(paths), count), np.nan)
    for (path, head), change in zip(places, heads.values(), strict=True):
        table[paths.index(path), head] = change
    most = max(0.1, float(np.nanmax(np.abs(table))))
    colours = "RdBu" if measure == "bleu" else "RdBu_r"  # red is always harm
    image = axes.imshow(table, cmap=colours, vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    for (row, column), change in np.ndenumerate(table):
        if not np.isnan(change):
            colour = "white" if abs(change) > 0.6 * most else TEXT_COLOR
            axes.text(column, row, format_change(change, measure), ha="center", va="center", fontsize=6.5, color=colour)
    axes.set_xticks(range(count))
    axes.set_yticks(range(len(paths)), [shorten_path(path) for path in paths], fontsize=7.5)
    axes.set(xlabel="head", title="each head")
    axes.title.set_fontsize(9)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, aspect=25, pad=0.02)
    bar.set_label(get_change_label(measure), fontsize=8)
    style_colorbar(bar)


def format_change(change: float, measure: str) -> str:
    digits = 1 if measure == "bleu" else 2
    return f"{change:+.{digits}f}" if round(change, digits) else f"{0:.{digits}f}"


def draw_bars(axes: Axes, parts: Mapping[str, float], measure: str) -> None:
    harm = [change < 0 if measure == "bleu" else change > 0 for change in parts.values()]
    axes.barh(
        range(len(parts)), list(parts.values()), color=["#b2182b" if bad else "#2166ac" for bad in harm], height=0.7
    )
    axes.set_yticks(range(len(parts)), [shorten_path(part) for part in parts], fontsize=7.5)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(0, color="#555555", linewidth=0.7)
    axes.set(xlabel=get_change_label(measure), title="each sub-layer and layer")
    axes.title.set_fontsize(9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


def get_change_label(measure: str) -> str:
    return {"bleu": "change of BLEU", "loss": "change of the loss"}[measure]


def shorten_path(path: str) -> str:
    """`decoder 3 cross` for decoder.blocks.3.cross_attn; harmless, as all that comes from a file."""
    names = {"self_attn": "self", "cross_attn": "cross", "feedforward": "feed-forward"}
    return escape_control_characters(" ".join(names.get(name, name) for name in path.split(".") if name != "blocks"))
