"""The report of `table1`: fitted exponents, tables and plots."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attent.formatting import markdown_table
from benchmarks.table1_layers import LAYERS, PATH_LAYERS, PathSizes, Point, compute_reach, find_flop_crossover

TOLERANCE = 0.15  # of an exponent
# Exponents of table 1 by the size that varies. Those of whole attention layers follow from the two terms.
THEORY = {
    "products explicit": {"length": 2, "width": 1},
    "products fused": {"length": 2, "width": 1},
    "windowed products": {"length": 1, "width": 1, "window": 1},
    "windowed products flex": {"length": 1},
    "recurrent": {"length": 1, "width": 2},
    "LSTM": {"length": 1, "width": 2},
    "convolution": {"length": 1, "width": 2, "kernel": 1},
}
SYMBOLS = {"length": "n", "width": "d", "window": "r", "kernel": "k"}
RECURRENT = ("recurrent", "LSTM")

Series = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Results:
    machine: str
    groups: Mapping[str, Sequence[Point]]
    measured: Mapping[str, Mapping[str, Any]]  # by `Point.key`
    paths: Mapping[str, float]  # "LAYER n=LENGTH"
    width: int  # d where the length varies
    min_fit_length: int
    path: PathSizes

    def get_series(self, group: str, layer: str, size: str, value: str = "seconds") -> Series:
        """Return (size, value of one sequence) of the points of a layer."""
        series = []
        for point in self.groups[group]:
            measurement = self.measured.get(point.key, {}).get(value)
            if point.layer == layer and measurement is not None:
                series.append((float(getattr(point, size)), measurement / point.batch))
        return series

    def get_path_series(self, layer: str) -> Series:
        paths = ((key.rpartition(" n="), value) for key, value in self.paths.items())
        return [(float(length), value) for (name, _, length), value in paths if name == layer]


# --- fits ------------------------------------------------------------------------------------------------------------


def fit_exponent(series: Series) -> float | None:
    """Return the slope in log-log coordinates, by least squares."""
    if len(series) < 2:
        return None
    x, y = zip(*((math.log(a), math.log(b)) for a, b in series), strict=True)
    return statistics.linear_regression(x, y).slope


def fit_two_terms(sizes: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit seconds = a n^2 d + b n d^2 to (n, d), by the least relative squares; return a, b and the worst deviation."""
    terms = np.array([(n * n * d, n * d * d) for n, d in sizes])
    relative = terms / np.array(seconds)[:, None]
    (a, b), *_ = np.linalg.lstsq(relative, np.ones(len(seconds)), rcond=None)
    return float(a), float(b), float(np.abs(relative @ (a, b) - 1).max())


def find_crossover(first: Series, second: Series) -> float:
    """Return the size where the first series rises above the second, by log-log interpolation; 0 if it is above at all
    sizes, infinity if at none."""
    other = dict(second)
    both = [(x, math.log(y / other[x])) for x, y in first if x in other]
    for (x0, y0), (x1, y1) in itertools.pairwise(both):
        if y0 <= 0 < y1:
            return float(x0 * (x1 / x0) ** (-y0 / (y1 - y0)))
    return 0.0 if both and both[-1][1] > 0 else math.inf


def select_fit_series(results: Results, layer: str, size: str, value: str = "seconds") -> Series:
    """Return the points of one exponent. Recurrent layers have a constant batch, explicit products a constant number
    of scores; short sequences are left out where the layer has parts that grow more slowly."""
    if layer in RECURRENT and size in ("length", "width"):
        return results.get_series(f"recurrent {size}", layer, size, value)
    group = "scores length" if layer == "products explicit" and size == "length" else size
    series = results.get_series(group, layer, size, value)
    return [(x, y) for x, y in series if size != "length" or x >= results.min_fit_length]


def compare_exponents(results: Results) -> Iterator[tuple[str, str, int, float]]:
    """Yield layer, size, exponent of theory and fitted exponent."""
    for layer, exponents in THEORY.items():
        for size, expected in exponents.items():
            fitted = fit_exponent(select_fit_series(results, layer, size))
            if fitted is not None:
                yield layer, size, expected, fitted


def get_work_series(results: Results, layer: str) -> Series:
    """Return (n, seconds of one token) on a full device: at constant tokens, or at a constant batch if recurrent."""
    group = "recurrent length" if layer in RECURRENT else "length"
    return [(n, seconds / n) for n, seconds in results.get_series(group, layer, "length")]


# --- tables ----------------------------------------------------------------------------------------------------------


def write_report(results: Results, folder: Path) -> str:
    """Write table1.md and the plots, and return the text."""
    sections = [
        "# Table 1, measured",
        f"One layer, forward and backward. {results.machine}. d = {results.width} where the length varies.",
        "## Exponents",
        format_exponents(results),
        EXPONENTS_NOTE,
        describe_fit_ranges(results),
        "## Whole attention layers",
        format_two_terms(results),
        "## Time per token (µs) at a constant number of tokens",
        format_lengths(results, "seconds", lambda value, n: f"{1e6 * value / n:.3f}"),
        TIME_NOTE,
        "## Peak memory per token (KiB)",
        format_lengths(results, "bytes", lambda value, n: f"{value / n / 2**10:.1f}"),
        "## Where self-attention becomes more expensive",
        format_crossovers(results),
        "## Sequential operations: time of one sequence (ms)",
        format_single(results),
        "## Path length: gradient of the last output with respect to the first input",
        format_paths(results),
    ]
    text = "\n\n".join(sections) + "\n"
    (folder / "table1.md").write_text(text, encoding="utf-8")
    draw_plots(results, folder)
    return text


EXPONENTS_NOTE = (
    "O(n² d) of the paper counts the two products of attention with the softmax between them; the projections around "
    "them are O(n d²), as is every linear layer. So the exponents are those of the products alone; of whole layers, "
    "both terms are fitted below."
)
TIME_NOTE = (
    "Attention computes all positions at once, and so does convolution. A recurrent layer computes one position of all "
    "sequences at a time: with constant tokens its batch falls as 1/n, until a step no longer fills the device."
)


def describe_fit_ranges(results: Results) -> str:
    """State which points are fitted, and the exponent that another choice would give."""
    series = results.get_series("length", "products explicit", "length")
    exponent = fit_exponent([(n, y) for n, y in series if n >= results.min_fit_length])
    other = "" if exponent is None else f"; at constant tokens the exponent is {exponent:.2f}"
    return (
        f"Exponents in n are fitted from n = {results.min_fit_length} on, of recurrent layers at all lengths, with a "
        "constant batch. Explicit products are run with a constant number of scores, n² * batch, since scores that "
        f"outgrow a cache on the way probably bend the curve{other}."
    )


def format_exponents(results: Results) -> str:
    rows = [
        (
            layer,
            f"O({LAYERS[layer].theory})",
            SYMBOLS[size],
            str(expected),
            f"{fitted:.2f}",
            "yes" if abs(fitted - expected) <= TOLERANCE else "no",
        )
        for layer, size, expected, fitted in compare_exponents(results)
    ]
    return markdown_table(("layer", "theory", "in", "exponent", "measured", f"within {TOLERANCE}"), rows, (3, 4))


def format_two_terms(results: Results) -> str:
    rows = []
    for layer in ("attention explicit", "attention fused"):
        points = [point for group in ("length", "width") for point in results.groups[group] if point.layer == layer]
        points = [point for point in points if results.measured.get(point.key, {}).get("seconds")]
        sizes = [(float(point.length), float(point.width)) for point in points]
        seconds = [results.measured[point.key]["seconds"] / point.batch for point in points]
        a, b, deviation = fit_two_terms(sizes, seconds)
        rows.append((layer, f"{1e12 * a:.3f}", f"{1e12 * b:.3f}", f"{100 * deviation:.0f}%", f"{b / a:.2f} d"))
    header = ("layer", "a (ps per n² d)", "b (ps per n d²)", "worst deviation", "terms are equal at n =")
    return "seconds of one sequence = a n² d + b n d²\n\n" + markdown_table(header, rows, (1, 2, 3, 4))


def format_lengths(results: Results, value: str, format_value: Callable[[float, float], str]) -> str:
    """Layers by lengths, and the exponent per sequence of the three longest."""
    columns = {layer: results.get_series("length", layer, "length", value) for layer in LAYERS}
    lengths = sorted({point.length for point in results.groups["length"]})
    rows = []
    for layer, series in columns.items():
        if not series:
            continue
        cells = {n: format_value(y, n) for n, y in series}
        exponent = fit_exponent(series[-3:])
        rows.append((layer, *(cells.get(n, "-") for n in lengths), f"{exponent:.2f}"))
    header = ("layer", *(f"n = {n}" for n in lengths), "exponent in n of the last three")
    return markdown_table(header, rows, range(1, len(lengths) + 2))


def format_crossovers(results: Results) -> str:
    rows = []
    for attention in ("products explicit", "products fused", "attention explicit", "attention fused"):
        for other in (*RECURRENT, "convolution"):
            work = find_flop_crossover(attention, other, results.width)
            measured = find_crossover(get_work_series(results, attention), get_work_series(results, other))
            rows.append((attention, other, *(format_crossover(n, results.width) for n in (work, measured))))
    note = (
        "By FLOPs the crossover is exact. Terms without constants meet at n = d; so do the products of attention (4 n² "
        "d) and a recurrent layer in its smallest form (4 n d²). An LSTM has four gates, a convolution its kernel, and "
        "a whole attention layer four projections. In time, recurrent layers have a constant batch, which suits them."
    )
    return markdown_table(("attention", "other", "by FLOPs", "by time"), rows, (2, 3)) + "\n\n" + note


def format_crossover(length: float, width: int) -> str:
    if length in (0, math.inf):
        return "at no measured length" if length else "at every length"
    return f"n = {length:,.0f} ({length / width:.2f} d)"


def format_single(results: Results) -> str:
    layers = list(dict.fromkeys(point.layer for point in results.groups["batch 1"]))
    series = {layer: dict(results.get_series("batch 1", layer, "length")) for layer in layers}
    lengths = sorted({n for values in series.values() for n in values})
    rows = [
        (
            layer,
            "n" if layer in RECURRENT else "1",
            *(f"{1e3 * values[n]:.3f}" if n in values else "-" for n in lengths),
        )
        for layer, values in series.items()
    ]
    header = ("layer", "sequential operations", *(f"n = {n:.0f}" for n in lengths))
    note = (
        "Where a device has room for all positions at once, the time of a layer with O(1) sequential operations hardly "
        "grows with n, until the device is full; that of a recurrent layer is its n steps. One CPU core has no such "
        "room: there time follows the work."
    )
    return markdown_table(header, rows, range(1, len(lengths) + 2)) + "\n\n" + note


def format_paths(results: Results) -> str:
    path, series = results.path, {layer: dict(results.get_path_series(layer)) for layer in PATH_LAYERS}
    lengths = sorted({n for values in series.values() for n in values})
    rows = []
    for layer, values in series.items():
        reach = compute_reach(layer, path)
        cells = (f"{values[n]:.1e}" if values[n] else "0" for n in lengths)
        rows.append((layer, "any" if reach is None else str(reach), *cells))
    header = ("layer", "reach", *(f"n = {n:.0f}" for n in lengths))
    note = (
        f"{path.layers} layers of width {path.width} at initialization, each with residual connection and layer norm; "
        f"window r = {path.window}, kernel k = {path.kernel}. Beyond the reach of a stack the gradient is 0. In "
        "self-attention each position has about 1/n of the weight, so the gradient falls as 1/n; in a recurrent layer "
        "it passes through n steps and falls exponentially."
    )
    return markdown_table(header, rows, range(1, len(lengths) + 2)) + "\n\n" + note


# --- plots -----------------------------------------------------------------------------------------------------------

# Okabe and Ito's palette, which colour-blind people can tell apart.
COLORS = {
    "attention": "#0072b2",
    "products": "#56b4e9",
    "windowed": "#009e73",
    "recurrent": "#e69f00",
    "LSTM": "#d55e00",
    "convolution": "#8e4585",
    "self-attention": "#0072b2",
}


@dataclass(frozen=True, kw_only=True)
class PlotLine:
    name: str
    series: Series
    style: str = "-"


def draw_plots(results: Results, folder: Path) -> None:
    lengths = [layer for layer in LAYERS if results.get_series("length", layer, "length")]
    time_lines = [
        PlotLine(
            name=f"{layer}, constant tokens" if layer in RECURRENT else layer,
            series=[(n, 1e6 * y / n) for n, y in results.get_series("length", layer, "length")],
            style=":" if layer in RECURRENT else get_style(layer),
        )
        for layer in lengths
    ]
    time_lines += [
        PlotLine(name=f"{layer}, constant batch", series=[(n, 1e6 * y) for n, y in get_work_series(results, layer)])
        for layer in RECURRENT
    ]
    memory_lines = [
        PlotLine(
            name=layer,
            series=[(n, y / n / 2**10) for n, y in results.get_series("length", layer, "length", "bytes")],
            style=get_style(layer),
        )
        for layer in lengths
    ]
    single_layers = dict.fromkeys(point.layer for point in results.groups["batch 1"])
    single_lines = [
        PlotLine(name=layer, series=[(n, 1e3 * y) for n, y in results.get_series("batch 1", layer, "length")])
        for layer in single_layers
    ]
    path_lines = [
        PlotLine(name=layer, series=[(n, y) for n, y in results.get_path_series(layer) if y > MIN_GRADIENT])
        for layer in PATH_LAYERS
    ]
    d = results.width
    draw_plot(folder / "time.svg", "Time per token, forward and backward (µs)", time_lines, results.machine, d)
    draw_plot(folder / "memory.svg", "Peak memory per token (KiB)", memory_lines, results.machine, d)
    draw_plot(folder / "sequential.svg", "Time of one sequence, batch 1 (ms)", single_lines, results.machine)
    title = "Gradient of the last output with respect to the first input"
    draw_plot(folder / "path.svg", title, path_lines, f"{results.path.layers} layers at initialization")


MIN_GRADIENT = 1e-20  # below is not drawn
MAX_LABELED_RATIO = 1e5  # of an axis with labels between the powers of ten


def get_style(layer: str) -> str:
    return "--" if "explicit" in layer or layer in ("windowed attention", "windowed products flex") else "-"


def draw_plot(path: Path, title: str, lines: Sequence[PlotLine], subtitle: str, width: int | None = None) -> None:
    """Write a log-log plot over the length, with a mark at n = d."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(8.4, 5.0), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        if line.series:
            color = COLORS[line.name.replace(",", " ").split()[0]]
            axes.plot(*zip(*line.series, strict=True), line.style, color=color, marker=".", label=line.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    values = [y for line in lines for _, y in line.series]
    if max(values) < MAX_LABELED_RATIO * min(values):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if width is not None:
        axes.axvline(width, color="#616e7c", linestyle=":", linewidth=1)
        axes.annotate("n = d", (width, 1), (3, -10), ("data", "axes fraction"), "offset points")
    axes.set_xlabel("length n")
    axes.set_title(f"{title}\n{subtitle}", fontsize=10)
    axes.grid(color="#e4e7eb")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, metadata={"Date": None})
