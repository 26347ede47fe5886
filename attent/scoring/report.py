"""What `attent score` found, as a page, as JSON, as a table of sentences, or as bare numbers.

Lines are never broken or cut: a table can be piped on, and a signature copied.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from attent.cli.score import ScoreFlags
from attent.decoding.alignment import HeadSelection, MeasuredSelection
from attent.decoding.forced_decoding import TargetScores, compute_perplexity
from attent.formatting import escape_invisible
from attent.scoring.alignment import AlignmentReport
from attent.scoring.evaluate import Evaluation, SentenceScore
from attent.scoring.metrics import SENTENCE_METRICS, format_metrics
from attent.scoring.pipeline import ScoreReport

STDOUT = "-"  # in place of a file: on stdout
MAX_LISTED_LINKS = 5  # links by hand that are named
VERDICTS = {True: "better", False: "worse", None: "may be chance"}


def write_report(report: ScoreReport, flags: ScoreFlags) -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console that cannot show a letter shows its number
    if flags.sentences and flags.sentences != STDOUT:
        Path(flags.sentences).expanduser().write_text(
            "\n".join([*list_sentence_rows(report), ""]), encoding="utf-8", newline="\n"
        )
    if flags.json:
        print(json.dumps(report_to_dict(report, flags), indent=2, ensure_ascii=False, allow_nan=False))
    elif flags.score_only:
        print("\n".join(list_numbers(report)))
    elif flags.sentences == STDOUT:
        print("\n".join(list_sentence_rows(report)))
    else:
        console = Console(highlight=False)
        for line in render_page(report, flags):
            console.print(line, soft_wrap=True)


# ---- numbers, rows, JSON ---------------------------------------------------------------------------------------------


def list_numbers(report: ScoreReport) -> Iterator[str]:
    """One a line, in the order of -m."""
    if report.evaluation:
        yield from (f"{each.value:.2f}" for each in report.evaluation.scores)
    if report.forced:
        yield f"{sum_forced(report.forced)['perplexity']:.3f}"
    if report.alignment:
        found = report.alignment
        yield f"{found.agreement:.2f}" if isinstance(found, MeasuredSelection) else f"{found.best.test_aer:.2f}"


def list_sentence_rows(report: ScoreReport) -> Iterator[str]:
    """Each sentence on a line, between tabs; in a text any space is one blank."""
    if report.evaluation:
        yield "\t".join(["number", *SENTENCE_METRICS, "source", "reference", "output"])
        for one in report.evaluation.sentences:
            texts = (" ".join(text.split()) for text in (one.source, one.reference, one.output))
            yield "\t".join([str(one.number), *(f"{value:.2f}" for value in one.metrics.values()), *texts])
    if report.forced is not None:
        yield "number\tlog_prob\ttokens\tperplexity\tpieces"
        for number, each in enumerate(report.forced, 1):
            pieces = " ".join(f"{piece}:{value:.3f}" for piece, value in zip(each.tokens, each.log_probs, strict=True))
            yield f"{number}\t{each.log_prob:.4f}\t{each.length}\t{each.perplexity:.3f}\t{pieces}"


def sum_forced(forced: Sequence[TargetScores]) -> dict[str, float]:
    log_prob, tokens = math.fsum(one.log_prob for one in forced), sum(one.length for one in forced)
    return {
        "log_prob": log_prob,
        "tokens": tokens,
        "log_prob_per_token": log_prob / max(1, tokens),
        "perplexity": compute_perplexity(log_prob, tokens),
    }


def report_to_dict(report: ScoreReport, flags: ScoreFlags) -> dict[str, Any]:
    """Everything, as plain data."""
    told: dict[str, Any] = {
        name: getattr(report, name)
        for name in ("test_set", "num_pairs", "num_skipped", "model", "hypotheses", "search")
    }
    if report.evaluation:
        told |= asdict(report.evaluation)
        told["worst"] = [one.number for one in report.evaluation.find_worst(flags.worst)]
    if report.baseline:
        pairs = [asdict(one) | {"difference": one.difference, "is_better": one.is_better} for one in report.comparisons]
        told |= {"baseline": report.baseline, "comparisons": pairs}
    if report.forced is not None:
        each = [{"log_prob": one.log_prob, "perplexity": one.perplexity, **asdict(one)} for one in report.forced]
        told["forced"] = {**sum_forced(report.forced), "sentences": each}
    if report.alignment:
        told["alignment"] = asdict(report.alignment)
    return {name: replace_non_finite(value) for name, value in told.items()}


def replace_non_finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: replace_non_finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the page --------------------------------------------------------------------------------------------------------


def render_page(report: ScoreReport, flags: ScoreFlags) -> Iterator[Text]:
    yield from render_header(report)
    if report.evaluation:
        yield from render_scores(report.evaluation)
        yield from render_groups(report.evaluation)
        worst = report.evaluation.find_worst(flags.worst)
        if worst:
            yield render_heading("The worst", "by chrF of the sentence alone")
            for one in worst:
                yield from render_sentence(one)
    if report.baseline:
        yield from render_comparison(report)
    if report.forced is not None:
        yield from render_forced(report.forced)
    if isinstance(report.alignment, MeasuredSelection):
        yield from render_agreement(report.alignment)
    elif report.alignment:
        yield from render_alignment(report.alignment)


def render_header(report: ScoreReport) -> Iterator[Text]:
    lines = {
        "test set": f"{report.test_set}: {report.num_pairs:,} pair{'s' * (report.num_pairs != 1)}",
        "left out": f"{report.num_skipped:,} lines that are no pairs" if report.num_skipped else None,
        "model": report.model,
        "hypotheses": report.hypotheses,
        "search": report.search_summary,
    }
    yield from (Text.assemble((f"{name:<12}", "dim"), text) for name, text in lines.items() if text)


def render_heading(title: str, note: str = "") -> Text:
    return Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))


def render_table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), bold_column: int = -1) -> Iterator[Text]:
    """Names on the left, numbers under one another; column `strong` in bold."""
    every = [list(header), *rows] if header else list(rows)
    widths = [max(len(line[i]) for line in every if i < len(line)) for i in range(max(map(len, every)))]
    for number, line in enumerate(every):
        style = "dim" if header and number == 0 else ""
        text = Text(style=style)
        for i, cell in enumerate(line):
            padded = cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])
            text.append(padded + "   ", "bold" if i == bold_column and not style else "")
        text.rstrip()
        yield text


def render_scores(evaluation: Evaluation) -> Iterator[Text]:
    yield render_heading("Scores", "± of a 95% confidence interval by bootstrap; of TER less is better")
    lines = [
        [each.title, f"{each.value:.2f}", "" if each.mean is None else f"{each.mean:.2f} ± {each.ci_half_width:.2f}"]
        for each in evaluation.scores
    ]
    yield from render_table(lines, bold_column=1)
    if evaluation.exact and any(each.title == "BLEU" and each.value == 0 for each in evaluation.scores):
        yield Text("BLEU counts runs of four words, and no output has one that is right: they are too short for it")
    right = f"{evaluation.exact:.1f}% exactly as the reference; {100 * evaluation.length_ratio:.1f}% of its characters"
    yield Text(right + (f"; {evaluation.num_empty:,} empty" if evaluation.num_empty else ""))
    yield from (Text(f"{each.title:<6} {each.signature}", "dim") for each in evaluation.scores)


def render_groups(evaluation: Evaluation) -> Iterator[Text]:
    yield render_heading("By the length of the source")
    header = [evaluation.length_unit, "pairs", *(each.title for each in evaluation.scores)]
    lines = [
        [
            f"over {group.min_length - 1}" if group.max_length is None else f"{group.min_length}-{group.max_length}",
            f"{group.sentences:,}",
            *(f"{each.value:.1f}" for each in group.scores),
        ]
        for group in evaluation.groups
    ]
    yield from render_table(lines, header)


def render_sentence(sentence: SentenceScore) -> Iterator[Text]:
    yield Text(f"pair {sentence.number:,}  {format_metrics(sentence.metrics)}", "cyan")
    for name, text in (("source", sentence.source), ("reference", sentence.reference), ("output", sentence.output)):
        yield Text.assemble((f"  {name:<11}", "dim"), escape_invisible(text))


def render_comparison(report: ScoreReport) -> Iterator[Text]:
    yield render_heading(f"Against {report.baseline}", "paired bootstrap; p: so great a difference by chance alone")
    lines = []
    for each in report.comparisons:
        figures = f"{each.value:.2f}", f"{each.baseline:.2f}", f"{each.difference:+.2f}", f"{each.p_value:.4f}"
        lines.append([each.title, *figures, VERDICTS[each.is_better]])
    yield from render_table(lines, ["", "this", "other", "difference", "p", ""])


def render_forced(forced: Sequence[TargetScores]) -> Iterator[Text]:
    yield render_heading("Forced decoding", "how likely the model holds these translations")
    told = sum_forced(forced)
    lines = [
        ["perplexity", f"{told['perplexity']:.3f}"],
        ["log-probability per token", f"{told['log_prob_per_token']:.4f}"],
        ["log-probability", f"{told['log_prob']:,.2f}"],
        ["tokens, ends included", f"{told['tokens']:,.0f}"],
    ]
    yield from render_table(lines, bold_column=1)
    if cut := sum(one.truncated for one in forced):
        yield Text(f"{cut:,} too long for the model or --batch-tokens: of these only the beginning is scored", "yellow")


def render_alignment(report: AlignmentReport) -> Iterator[Text]:
    yield render_heading(
        "Alignment error rate", f"in percent, of {report.num_sentences:,} pairs; layers and heads from 0"
    )
    for shift, when in ((False, "looking when a token is written"), (True, "looking when it is read, one step later")):
        some = [one for one in report.candidates if one.choice.shift == shift]
        layers = sorted({one.choice.layer for one in some})
        heads = [str(one.choice.heads[0]) for one in some if one.choice.layer == 0 and one.choice.heads]
        yield Text(when)
        lines = [
            [f"layer {layer}", *(f"{one.aer:.1f}" for one in some if one.choice.layer == layer)] for layer in layers
        ]
        yield from render_table(lines, ["", "all heads", *heads])
    yield from render_best_alignment(report)


def render_best_alignment(report: AlignmentReport) -> Iterator[Text]:
    yield render_heading("The best", f"{report.best.choice}; kept in the model folder")
    lines = [
        ["the half of the pairs that chose it", f"{report.best.selection_aer:.1f}", "", ""],
        *(
            [name, f"{one.aer:.1f}", f"{one.precision:.1f}", f"{one.recall:.1f}"]
            for name, one in (("the other half", report.one_way), ("  links that both words agree on", report.mutual))
        ),
        [
            f"  without alignments by hand: {_short_choice(report.by_agreement.choice)}",
            f"{report.by_agreement.test_aer:.1f}",
            "",
            "",
        ],
        [f"  by default: {_short_choice(report.default.choice)}", f"{report.default.test_aer:.1f}", "", ""],
    ]
    yield from render_table(lines, ["", "AER", "precision", "recall"], bold_column=1)
    if report.skipped_links:
        more = (
            f" and {len(report.skipped_links) - MAX_LISTED_LINKS:,} more"
            if len(report.skipped_links) > MAX_LISTED_LINKS
            else ""
        )
        yield Text(
            f"left out, since there is no such word: {', '.join(report.skipped_links[:MAX_LISTED_LINKS])}{more}",
            "yellow",
        )


def _short_choice(choice: HeadSelection) -> str:
    return str(choice).partition(", when")[0]


def render_agreement(selection: MeasuredSelection) -> Iterator[Text]:
    yield render_heading("To align by", f"{selection.selection}; kept in the model folder")
    yield Text(f"{selection.agreement:.1f}% of its links are the best of both their words, more than anywhere else")
