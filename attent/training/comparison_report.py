"""The report of `attent compare`: Markdown, SVG figures (matplotlib) and one HTML page with the figures in it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from attent import __version__
from attent.formatting import escape_markdown, format_bytes, format_duration, format_short, markdown_table
from attent.inspection.html_page import compute_csp_hash
from attent.inspection.plots import create_figure, draw_heatmap, plot_context, save_figure
from attent.storage.atomic import write_output
from attent.training.comparison import EntryResult
from attent.training.curves import COLORS, GRID_COLOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_FILE, PAGE_FILE = "report.md", "report.html"
MAX_DETAILED = len(COLORS)  # entries; of more, only the scores are shown
MARKERS = "osD^vP"
SCORE_COLUMNS = (
    "", "model", "parameters", "steps", "time", "training FLOPs", "validation loss", "BLEU", "chrF",
    "training tokens/s", "decoding tokens/s", "peak memory",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str = ""
    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    plot: Callable[[Sequence[EntryResult]], Figure] | None = None

    @property
    def figure_name(self) -> str:
        return f"{self.plot.__name__.removeprefix('plot_')}.svg" if self.plot else ""


def write_report(results: Sequence[EntryResult], out: Path, title: str, budget: str) -> None:
    """Write report.md, report.html and the figures into `out`."""
    sections = list(build_sections(results, budget))
    for section in sections:
        if section.plot is not None:
            with plot_context(result.entry.label for result in results):
                save_figure(section.plot(results), out / section.figure_name)
    write_output(out / REPORT_FILE, render_markdown(title, sections).encode())
    write_output(out / PAGE_FILE, render_html(title, sections, out).encode())


def build_sections(results: Sequence[EntryResult], budget: str) -> Iterator[Section]:
    first, seeds = results[0].runs[0], len(results[0].runs)
    means = f" Means of {seeds} seeds, with the lowest and the highest." if seeds > 1 else ""
    text = (
        f"Budget: {budget}. Test set: {first.test_set}; BLEU: {first.signature}.{means} FLOPs are those of matrix "
        "products, forward and backward, without padding. Decoding speed is that of the whole test set at once; in "
        f"brackets, without the GPU engine. {first.device}; attent {__version__}, torch {torch.__version__}, "
        f"{date.today().isoformat()}."
    )
    rows = [format_entry(result) for result in results]
    yield Section(title="Scores", text=text, header=SCORE_COLUMNS, rows=rows)
    yield Section(title="Test BLEU", text="Each dot is a run, each line a mean.", plot=plot_scores)
    if len(results) > MAX_DETAILED:
        return
    text = "Validations during training (greedy search) against time and FLOPs; the test set by source length."
    yield Section(title="BLEU against time, FLOPs and sentence length", text=text, plot=plot_curves)
    header = ("words", "sentences", *(result.entry.label for result in results))
    rows = [
        [words, f"{sentences:,}", *(f"{average_by_length(result)[i]:.1f}" for result in results)]
        for i, (words, sentences, _) in enumerate(first.by_length)
    ]
    yield Section(header=header, rows=rows)
    for i, sample in enumerate(first.samples):
        outputs = [[result.entry.label, result.runs[0].samples[i].output] for result in results]
        rows = [["source", sample.source], ["reference", sample.reference], *outputs]
        yield Section(title="" if i else "Translations side by side", header=("", ""), rows=rows)
    if any(result.runs[0].attention for result in results):
        text = "Cross-attention of the head that aligns best, on a test sentence and its reference."
        yield Section(title="Attention side by side", text=text, plot=plot_attention)


def format_entry(result: EntryResult) -> list[str]:
    """The cells of `SCORE_COLUMNS`."""
    runs, first = result.runs, result.runs[0]
    bleu, memory = [run.bleu for run in runs], [run.peak_memory for run in runs if run.peak_memory]
    return [
        "" if result.entry.name == result.entry.label else result.entry.name,
        result.entry.label,
        format_short(first.parameters),
        f"{fmean(run.steps for run in runs):,.0f}",
        format_duration(fmean(run.seconds for run in runs)),
        f"{fmean(run.flops for run in runs):.1e}".replace("e+", "e"),
        f"{fmean(run.valid_loss for run in runs):.3f}",
        f"{fmean(bleu):.2f}" + (f" ({min(bleu):.2f}-{max(bleu):.2f})" if len(runs) > 1 else ""),
        f"{fmean(run.chrf for run in runs):.1f}",
        f"{fmean(run.train_tokens_per_second for run in runs):,.0f}",
        f"{fmean(run.decode_tokens_per_second for run in runs):,.0f}"
        + (f" ({first.plain_tokens_per_second:,.0f})" if first.plain_tokens_per_second else ""),
        format_bytes(max(memory)) if memory else "",
    ]


def average_by_length(result: EntryResult) -> list[float]:
    """Mean BLEU of each group of source lengths over the seeds."""
    return [fmean(bleu for _, _, bleu in group) for group in zip(*(run.by_length for run in result.runs), strict=False)]


# ---- figures ---------------------------------------------------------------------------------------------------------


def plot_scores(results: Sequence[EntryResult]) -> Figure:
    figure = create_figure(7, 0.8 + 0.28 * len(results))
    axes = figure.subplots()
    for row, result in enumerate(results):
        bleu = [run.bleu for run in result.runs]
        axes.plot(bleu, [row] * len(bleu), "o", color=COLORS[1], alpha=0.7)
        axes.plot([fmean(bleu)] * 2, [row - 0.35, row + 0.35], color=COLORS[0], linewidth=2)
    axes.set_yticks(range(len(results)), [result.entry.label for result in results])
    axes.invert_yaxis()
    axes.set_xlabel("BLEU")
    axes.grid(color=GRID_COLOR)
    return figure


def plot_curves(results: Sequence[EntryResult]) -> Figure:
    figure = create_figure(12, 3.8)
    panels = figure.subplots(1, 3)
    for result, color, marker in zip(results, COLORS, MARKERS, strict=False):
        for run in result.runs:
            for axes, x in zip(panels[:2], (0, 1), strict=True):
                xs, ys = [point[x] for point in run.curve], [point[2] for point in run.curve]
                axes.plot(xs, ys, color=color, marker=marker, markersize=3)
        panels[2].plot(average_by_length(result), label=result.entry.label, color=color, marker=marker, markersize=4)
    words = [group[0] for group in results[0].runs[0].by_length]
    panels[2].set_xticks(range(len(words)), words)
    labels = ("training time (s)", "training FLOPs", "words of the source"), ("validation BLEU", "", "test BLEU")
    for axes, x_label, y_label in zip(panels, *labels, strict=True):
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.grid(color=GRID_COLOR)
    panels[2].legend(frameon=False)
    return figure


def plot_attention(results: Sequence[EntryResult]) -> Figure:
    maps = [(result.entry.label, attention) for result in results if (attention := result.runs[0].attention)]
    figure = create_figure(4 * len(maps), 4.4)
    for axes, (label, attention) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        draw_heatmap(axes, torch.tensor(attention.weights), 1.0)
        axes.set_xticks(range(len(attention.source)), attention.source, rotation=60, ha="right", fontsize=7)
        axes.set_yticks(range(len(attention.target)), attention.target, fontsize=7)
        axes.set_title(f"{label}\n{attention.head}", fontsize=8)
    return figure


# ---- Markdown and HTML -----------------------------------------------------------------------------------------------


def render_markdown(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {escape_markdown(title)}"]
    for section in sections:
        parts += [
            f"## {section.title}" if section.title else "",
            escape_markdown(section.text),
            markdown_table(section.header, section.rows, range(2, len(section.header))) if section.rows else "",
            f"![{section.title}]({section.figure_name})" if section.plot else "",
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def render_html(title: str, sections: Sequence[Section], out: Path) -> str:
    """One file without scripts; figures are embedded as images."""
    body = []
    for section in sections:
        body += [f"<h2>{escape(section.title)}</h2>"] if section.title else []
        body += [f"<p>{escape(section.text)}</p>"] if section.text else []
        cells = [[f"<td>{escape(cell)}</td>" for cell in row] for row in section.rows]
        head = [f"<th>{escape(name)}</th>" for name in section.header] if any(section.header) else []
        rows = "".join(f"<tr>{''.join(row)}</tr>" for row in ([head] if head else []) + cells)
        body += [f'<div class="wide"><table>{rows}</table></div>'] if rows else []
        if section.plot:
            image = base64.b64encode((out / section.figure_name).read_bytes()).decode()
            body.append(f'<div class="wide"><img src="data:image/svg+xml;base64,{image}" alt="{section.title}"></div>')
    page = Path(__file__).with_name("comparison.html").read_text(encoding="utf-8")
    style = page.partition("<style>")[2].partition("</style>")[0]
    for name, block in {"hash": compute_csp_hash(style), "title": escape(title), "body": "\n".join(body)}.items():
        page = page.replace(f"<!--{name}-->", block)
    return page
