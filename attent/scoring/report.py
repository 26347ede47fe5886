"""A score report as a page for the terminal (never wrapped), and as JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from attent.decoding.alignment import MeasuredSelection
from attent.decoding.forced_decoding import TargetScores, compute_perplexity
from attent.formatting import escape_invisible, format_count
from attent.scoring.alignment import AlignmentReport
from attent.scoring.evaluate import Evaluation, RobustnessScore, list_robustness_rows
from attent.scoring.metrics import METRICS, MetricScore, PairedComparison, ScoreError, format_metrics

MAX_LISTED_LINKS = 5
NUM_WORST = 5  # sentences that are shown
VERDICTS = {True: "better", False: "worse", None: "not significant"}


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoreReport:
    """The scores of a model on a test set; None for what was not requested. It prints as the page of `attent score`.

    >>> report = attent.score(translator, "test.tsv", metrics=["bleu", "chrf"])
    >>> report["chrf"].value
    100.0
    >>> report["chrf"].interval
    (100.0, 100.0)
    >>> print(report)
    test set    test.tsv: 16 pairs
    model       runs/en-de
    search      beam 4, score = log_prob / length^alpha, alpha = 0.6, at most source + 50 tokens
    <BLANKLINE>
    Scores  ± 95% confidence interval by bootstrap
    BLEU   100.00   100.00 ± 0.00
    chrF   100.00   100.00 ± 0.00
    ...
    """

    test_set: str
    num_pairs: int
    num_skipped: int
    num_unreadable: int = 0  # of these, recordings or images that cannot be read
    model: str | None = None
    hypotheses: str | None = None
    search: dict[str, Any] | None = None
    search_summary: str | None = None
    evaluation: Evaluation | None = None
    baseline: str | None = None
    comparisons: tuple[PairedComparison, ...] = ()
    robustness: tuple[RobustnessScore, ...] = ()
    forced: tuple[TargetScores, ...] | None = None
    alignment: AlignmentReport | MeasuredSelection | None = None

    def __getitem__(self, metric: str) -> MetricScore:
        scores = {score.metric: score for score in (self.evaluation.scores if self.evaluation else ())}
        if metric not in scores:
            raise ScoreError(f"`{metric}` was not computed, only {', '.join(scores) or 'no metric'}; see `metrics`")
        return scores[metric]

    def __repr__(self) -> str:
        return "\n".join(line.plain for line in render_page(self, NUM_WORST))


# ---- JSON ----------------------------------------------------------------------------------------------------------


def sum_forced(forced: Sequence[TargetScores]) -> dict[str, float]:
    log_prob, tokens = math.fsum(scores.log_prob for scores in forced), sum(scores.length for scores in forced)
    return {
        "log_prob": log_prob,
        "tokens": tokens,
        "log_prob_per_token": log_prob / max(1, tokens),
        "perplexity": compute_perplexity(log_prob, tokens),
    }


def report_to_dict(report: ScoreReport, num_worst: int) -> dict[str, Any]:
    names = ("test_set", "num_pairs", "num_skipped", "num_unreadable", "model", "hypotheses", "search")
    data: dict[str, Any] = {name: getattr(report, name) for name in names}
    if report.evaluation:
        data |= asdict(report.evaluation)
        data["worst"] = [sentence.number for sentence in report.evaluation.find_worst(num_worst)]
    if report.baseline:
        comparisons = [asdict(c) | {"difference": c.difference, "is_better": c.is_better} for c in report.comparisons]
        data |= {"baseline": report.baseline, "comparisons": comparisons}
    if report.robustness:
        data["robustness"] = [asdict(score) for score in report.robustness]
    if report.forced is not None:
        sentences = [{"log_prob": s.log_prob, "perplexity": s.perplexity, **asdict(s)} for s in report.forced]
        data["forced"] = {**sum_forced(report.forced), "sentences": sentences}
    if report.alignment:
        data["alignment"] = asdict(report.alignment)
    return {name: replace_non_finite(value) for name, value in data.items()}


def replace_non_finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON has not, by None."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the page --------------------------------------------------------------------------------------------------------


def render_page(report: ScoreReport, num_worst: int) -> Iterator[Text]:
    yield from render_header(report)
    if report.evaluation:
        yield from render_scores(report.evaluation)
        if report.robustness:
            yield render_heading("Robustness", "every pair of the test set changed; differences to the clean one")
            header, *rows = list_robustness_rows(report.evaluation.scores, report.robustness)
            yield from render_table(rows, header)
        if report.evaluation.groups:
            yield from render_groups(report.evaluation)
        worst = report.evaluation.find_worst(num_worst)
        if worst:
            metric = METRICS[report.evaluation.ranking_metric]
            yield render_heading("Worst sentences", f"by {metric.title} of the sentence")
        for sentence in worst:
            yield Text(f"pair {sentence.number:,}  {format_metrics(sentence.metrics)}", "cyan")
            for name in ("source", "reference", "output"):
                yield Text.assemble((f"  {name:<11}", "dim"), escape_invisible(getattr(sentence, name)))
    if report.baseline:
        yield render_heading(f"Compared with {report.baseline}", "paired bootstrap test")
        rows = [list_comparison_cells(comparison) for comparison in report.comparisons]
        yield from render_table(rows, ["", "this", "baseline", "difference", "p", ""])
    if report.forced is not None:
        yield from render_forced(report.forced)
    if isinstance(report.alignment, MeasuredSelection):
        selection, agreement = report.alignment.selection, report.alignment.agreement
        yield render_heading("Heads for alignment", f"{selection}; saved in the model folder")
        yield Text(f"{agreement:.1f}% of their links are mutual, more than for any other choice")
    elif report.alignment:
        yield from render_alignment(report.alignment)


def list_comparison_cells(c: PairedComparison) -> list[str]:
    numbers = (f"{c.value:.2f}", f"{c.baseline:.2f}", f"{c.difference:+.2f}", f"{c.p_value:.4f}")
    return [c.title, *numbers, VERDICTS[c.is_better]]


def render_header(report: ScoreReport) -> Iterator[Text]:
    unreadable = f", {report.num_unreadable:,} because a file cannot be read" if report.num_unreadable else ""
    skipped = f"{format_count(report.num_skipped, 'line')} without a pair{unreadable}"
    lines = {
        "test set": f"{report.test_set}: {format_count(report.num_pairs, 'pair')}",
        "skipped": skipped if report.num_skipped else None,
        "model": report.model,
        "hypotheses": report.hypotheses,
        "search": report.search_summary,
    }
    yield from (Text.assemble((f"{name:<12}", "dim"), text) for name, text in lines.items() if text)


def render_heading(title: str, note: str = "") -> Text:
    return Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))


def render_table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), bold_column: int = -1) -> Iterator[Text]:
    lines = [list(header), *rows] if header else list(rows)
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines)))]
    for number, line in enumerate(lines):
        style = "dim" if header and number == 0 else ""
        text = Text(style=style)
        for i, cell in enumerate(line):
            padded = cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])
            text.append(padded + "   ", "bold" if i == bold_column and not style else "")
        text.rstrip()
        yield text


def render_scores(evaluation: Evaluation) -> Iterator[Text]:
    lower = [score.title for score in evaluation.scores if METRICS[score.metric].lower_is_better]
    note = "".join(f"; {title}: lower is better" for title in lower)
    yield render_heading("Scores", f"± 95% confidence interval by bootstrap{note}")
    rows = [
        [s.title, f"{s.value:.2f}", "" if s.mean is None else f"{s.mean:.2f} ± {s.ci_half_width:.2f}"]
        for s in evaluation.scores
    ]
    yield from render_table(rows, bold_column=1)
    if evaluation.exact and any(score.metric == "bleu" and score.value == 0 for score in evaluation.scores):
        yield Text("BLEU is 0 because no output shares four consecutive words with its reference: they are too short")
    ratio = f"length ratio {evaluation.length_ratio:.3f} (characters of the output to those of the reference)"
    summary = f"{evaluation.exact:.1f}% exact matches; {ratio}"
    yield Text(summary + (f"; {evaluation.num_empty:,} empty" if evaluation.num_empty else ""))
    yield from (Text(f"{score.title:<6} {score.signature}", "dim") for score in evaluation.scores)


def render_groups(evaluation: Evaluation) -> Iterator[Text]:
    yield render_heading("By source length")
    header = [evaluation.length_unit, "pairs", *(score.title for score in evaluation.scores)]
    rows = []
    for group in evaluation.groups:
        first, last = group.min_length, group.max_length
        name = f"over {first - 1}" if last is None else f"{first}-{last}"
        rows.append([name, f"{group.sentences:,}", *(f"{score.value:.1f}" for score in group.scores)])
    yield from render_table(rows, header)


def render_forced(forced: Sequence[TargetScores]) -> Iterator[Text]:
    yield render_heading("Forced decoding", "the probability of these translations under the model")
    sums = sum_forced(forced)
    rows = [
        ["perplexity", f"{sums['perplexity']:.3f}"],
        ["log-probability per token", f"{sums['log_prob_per_token']:.4f}"],
        ["log-probability", f"{sums['log_prob']:,.2f}"],
        ["tokens, with end tokens", f"{sums['tokens']:,.0f}"],
    ]
    yield from render_table(rows, bold_column=1)
    if truncated := sum(scores.truncated for scores in forced):
        yield Text(f"{truncated:,} too long for the model or --batch-tokens: scored in part", "yellow")


def render_alignment(report: AlignmentReport) -> Iterator[Text]:
    note = f"in percent, of {report.num_sentences:,} pairs; layers and heads from 0"
    yield render_heading("Alignment error rate", note)
    for shift, step in ((False, "at the step that writes a token"), (True, "at the next step, which reads it")):
        candidates = [candidate for candidate in report.candidates if candidate.choice.shift == shift]
        layers = sorted({candidate.choice.layer for candidate in candidates})
        heads = [str(c.choice.heads[0]) for c in candidates if c.choice.layer == 0 and c.choice.heads]
        yield Text(step)
        rows = [
            [f"layer {layer}", *(f"{c.aer:.1f}" for c in candidates if c.choice.layer == layer)] for layer in layers
        ]
        yield from render_table(rows, ["", "all heads", *heads])
    yield from render_best_alignment(report)


def render_best_alignment(report: AlignmentReport) -> Iterator[Text]:
    yield render_heading("Best heads", f"{report.best.choice}; saved in the model folder")
    scored = (("test half", report.one_way), ("  mutual links only", report.mutual))
    rows = [
        ["selection half", f"{report.best.selection_aer:.1f}", "", ""],
        *([name, f"{s.aer:.1f}", f"{s.precision:.1f}", f"{s.recall:.1f}"] for name, s in scored),
    ]
    yield from render_table(rows, ["", "AER", "precision", "recall"], bold_column=1)
    if links := report.skipped_links:
        more = f" and {len(links) - MAX_LISTED_LINKS:,} more" if len(links) > MAX_LISTED_LINKS else ""
        yield Text(f"skipped links to missing words: {', '.join(links[:MAX_LISTED_LINKS])}{more}", "yellow")
