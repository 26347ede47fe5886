"""The report of `attent compare`: Markdown, SVG figures (matplotlib) and one HTML page with the figures in it."""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

from attent.formatting import escape_markdown, format_bytes, format_duration, format_short, markdown_table
from attent.inspection.html_page import compute_csp_hash
from attent.inspection.plots import create_figure, plot_context, plot_head, save_figure
from attent.storage.atomic import write_output
from attent.training.comparison import RESULTS_FOLDER, EntryResult
from attent.training.curves import COLORS, GRID_COLOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_FILE, PAGE_FILE = "report.md", "report.html"
MAX_DETAILED = len(COLORS)  # entries; of more, only the scores are shown
MARKERS = "osD^vP"
SCORE_COLUMNS = (
    "", "model", "runs", "parameters", "steps", "epochs", "time", "training FLOPs", "validation loss", "BLEU", "chrF",
    "training tokens/s", "decoding tokens/s", "peak memory", "precision",
)  # fmt: skip


def write_report(results: Sequence[EntryResult], out: Path, title: str, conditions: str) -> None:
    """Write report.md, report.html and the figures into `out`; without matplotlib, no figures."""
    title = f"{title}: {'; '.join(dict.fromkeys(run.data for result in results for run in result.runs))}"
    has_figures = find_spec("matplotlib") is not None
    if has_figures:
        draw_figures([result for result in results if result.runs], out)
    markdown = "\n\n".join([f"# {escape_markdown(title)}", *build_blocks(results, conditions, has_figures)]) + "\n"
    write_output(out / REPORT_FILE, markdown.encode())
    write_output(out / PAGE_FILE, render_page(title, markdown, out).encode())


def draw_figures(results: Sequence[EntryResult], out: Path) -> None:
    with plot_context(result.entry.label for result in results):
        save_figure(plot_scores(results), out / "scores.svg")
        if len(results) <= MAX_DETAILED:
            save_figure(plot_curves(results), out / "curves.svg")
    for result in results:
        if (attention := result.runs[0].attention) and len(results) <= MAX_DETAILED:
            save_figure(plot_head(**json.loads(attention)), out / f"{RESULTS_FOLDER}/{result.runs[0].name}.svg")


def build_blocks(results: Sequence[EntryResult], conditions: str, has_figures: bool) -> Iterator[str]:
    """Yield headings, paragraphs, tables and figures in Markdown."""
    score_rows, results = [format_entry(result) for result in results], [result for result in results if result.runs]
    yield "## Scores"
    yield escape_markdown(describe_conditions(results, conditions))
    yield markdown_table(SCORE_COLUMNS, score_rows, range(2, len(SCORE_COLUMNS) - 1))
    if has_figures:
        yield "![Test BLEU: each dot is a run, each line a mean](scores.svg)"
    if len(results) > MAX_DETAILED:
        return
    first, labels = results[0].runs[0], [result.entry.label for result in results]
    if has_figures:
        caption = "BLEU against time, FLOPs and sentence length"
        yield f"## {caption}"
        yield "Validations during training (greedy search) against time and FLOPs; the test set by source length."
        yield f"![{caption}](curves.svg)"
    else:
        yield "## BLEU by sentence length"
    by_length = [
        [words, f"{sentences:,}", *(f"{average_by_length(result)[i]:.1f}" for result in results)]
        for i, (words, sentences, _) in enumerate(first.by_length)
    ]
    header = ["words", "sentences", *map(escape_markdown, labels)]
    yield markdown_table(header, by_length, range(1, len(results) + 2))
    yield "## Translations side by side"
    for i, sample in enumerate(first.samples):
        outputs = [[result.entry.label, result.runs[0].samples[i].output] for result in results]
        yield markdown_table(("", ""), [["source", sample.source], ["reference", sample.reference], *outputs])
    shown = [result for result in results if result.runs[0].attention]
    if shown and has_figures:
        yield "## Attention side by side"
        yield "Cross-attention of the head that aligns best, on a test sentence and its reference."
        labels = [escape_markdown(result.entry.label) for result in shown]
        files = [f"{RESULTS_FOLDER}/{result.runs[0].name}.svg" for result in shown]
        images = [f"![{label}]({file})" for label, file in zip(labels, files, strict=True)]
        yield "\n".join(f"| {' | '.join(cells)} |" for cells in (labels, ["---"] * len(shown), images))


def describe_conditions(results: Sequence[EntryResult], conditions: str) -> str:
    runs = [run for result in results for run in result.runs]
    first, jobs = runs[0], sorted({run.jobs for run in runs})
    sentences = [conditions, f"Test set: {first.test_set}; BLEU: {first.signature}."]
    if any(len(result.runs) > 1 for result in results):
        sentences.append("Means over the runs (one per seed), with the lowest and the highest.")
    if jobs != [1]:
        counts = " or ".join(map(str, jobs))
        sentences.append(f"{counts} runs at a time, so that times and speeds are not those of one alone.")
    sentences += [
        "Time is that of the steps, by their median speed: without validations, checkpoints and compilation.",
        "FLOPs are those of matrix products, forward and backward, without padding.",
        "Decoding speed is that of the whole test set at once, the median of three times.",
        *(f"{text}." for text in dict.fromkeys(run.conditions for run in runs)),
    ]
    return " ".join(sentences)


def format_entry(result: EntryResult) -> list[str]:
    runs, num_seeds = result.runs, len(result.runs) + len(result.failures)
    name = "" if result.entry.name == result.entry.label else result.entry.name
    label = "; ".join([result.entry.label, *(f"failed: {error}" for error in dict.fromkeys(result.failures))])
    num_runs = f"{len(runs)} of {num_seeds}" if result.failures else str(num_seeds)
    if not runs:
        return [name, label, num_runs, *[""] * (len(SCORE_COLUMNS) - 3)]
    bleu, memory = [run.bleu for run in runs], [run.peak_memory for run in runs if run.peak_memory]
    losses = [run.valid_loss for run in runs if run.valid_loss is not None]
    return [
        name,
        label,
        num_runs,
        format_short(runs[0].parameters),
        f"{fmean(run.steps for run in runs):,.0f}",
        f"{fmean(run.epochs for run in runs):.1f}",
        format_duration(fmean(run.seconds for run in runs)),
        f"{fmean(run.flops for run in runs):.1e}".replace("e+", "e"),
        f"{fmean(losses):.3f}" if losses else "",
        f"{fmean(bleu):.2f}" + (f" ({min(bleu):.2f}-{max(bleu):.2f})" if len(runs) > 1 else ""),
        f"{fmean(run.chrf for run in runs):.1f}",
        f"{fmean(run.train_tokens_per_second for run in runs):,.0f}",
        f"{fmean(run.decode_tokens_per_second for run in runs):,.0f}",
        format_bytes(max(memory)) if memory else "",
        "; ".join(dict.fromkeys(run.precision for run in runs)),
    ]


def average_by_length(result: EntryResult) -> list[float]:
    return [fmean(bleu for _, _, bleu in group) for group in zip(*(run.by_length for run in result.runs), strict=False)]


def plot_scores(results: Sequence[EntryResult]) -> "Figure":
    figure = create_figure(7, 0.8 + 0.28 * len(results))
    axes = figure.subplots()
    for row, result in enumerate(results):
        bleu = [run.bleu for run in result.runs]
        axes.plot(bleu, [row] * len(bleu), "o", color=COLORS[1], alpha=0.7)
        axes.plot([fmean(bleu)] * 2, [row - 0.35, row + 0.35], color=COLORS[0], linewidth=2)
    axes.set_yticks(range(len(results)), [result.entry.label for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlabel("test BLEU")
    axes.grid(color=GRID_COLOR)
    return figure


def plot_curves(results: Sequence[EntryResult]) -> "Figure":
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


def render_page(title: str, markdown: str, out: Path) -> str:
    """One file without scripts; figures are embedded as images."""
    page = Path(__file__).with_name("comparison.html").read_text(encoding="utf-8")
    style = page.partition("<style>")[2].partition("</style>")[0]
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    body = body.replace('style="text-align:right"', 'class="number"')  # the page's policy forbids inline styles
    body = re.sub(r'src="([^"]+\.svg)"', lambda match: f'src="{embed_image(out / match[1])}"', body)
    for name, content in {"hash": compute_csp_hash(style), "title": escape(title), "body": body}.items():
        page = page.replace(f"<!--{name}-->", content)
    return page


def embed_image(file: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(file.read_bytes()).decode()}"
