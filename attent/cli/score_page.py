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

from attent.cli.data import visible
from attent.cli.score import Flags
from attent.cli.scoring import Results
from attent.decode.align import Choice, Measured
from attent.decode.force import Forced, perplexity
from attent.score.alignment import AlignmentReport
from attent.score.evaluate import Evaluation, Sentence

SHOWN = "-"  # in place of a file: on stdout
LEFT_OUT = 5  # links by hand that are named
VERDICTS = {True: "better", False: "worse", None: "may be chance"}


def write(results: Results, flags: Flags) -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console that cannot show a letter shows its number
    if flags.sentences and flags.sentences != SHOWN:
        Path(flags.sentences).expanduser().write_text("\n".join([*rows(results), ""]), encoding="utf-8", newline="\n")
    if flags.json:
        print(json.dumps(facts(results, flags), indent=2, ensure_ascii=False, allow_nan=False))
    elif flags.score_only:
        print("\n".join(numbers(results)))
    elif flags.sentences == SHOWN:
        print("\n".join(rows(results)))
    else:
        console = Console(highlight=False)
        for line in page(results, flags):
            console.print(line, soft_wrap=True)


# ---- numbers, rows, JSON ---------------------------------------------------------------------------------------------


def numbers(results: Results) -> Iterator[str]:
    """One a line, in the order of -m."""
    if results.evaluation:
        yield from (f"{each.value:.2f}" for each in results.evaluation.scores)
    if results.forced:
        yield f"{totals(results.forced)['perplexity']:.3f}"
    if results.alignment:
        found = results.alignment
        yield f"{found.agreement:.2f}" if isinstance(found, Measured) else f"{found.best.held_out:.2f}"


def rows(results: Results) -> Iterator[str]:
    """Each sentence on a line, between tabs; in a text any space is one blank."""
    if results.evaluation:
        yield "number\tbleu\tchrf\tsource\treference\toutput"
        for one in results.evaluation.sentences:
            texts = (" ".join(text.split()) for text in (one.source, one.reference, one.output))
            yield "\t".join([str(one.number), f"{one.bleu:.2f}", f"{one.chrf:.2f}", *texts])
    if results.forced is not None:
        yield "number\tlog_prob\ttokens\tperplexity\tpieces"
        for number, each in enumerate(results.forced, 1):
            pieces = " ".join(f"{piece}:{value:.3f}" for piece, value in zip(each.tokens, each.log_probs, strict=True))
            yield f"{number}\t{each.log_prob:.4f}\t{each.length}\t{each.perplexity:.3f}\t{pieces}"


def totals(forced: Sequence[Forced]) -> dict[str, float]:
    log_prob, tokens = math.fsum(one.log_prob for one in forced), sum(one.length for one in forced)
    return {
        "log_prob": log_prob,
        "tokens": tokens,
        "log_prob_per_token": log_prob / max(1, tokens),
        "perplexity": perplexity(log_prob, tokens),
    }


def facts(results: Results, flags: Flags) -> dict[str, Any]:
    """Everything, as plain data."""
    told: dict[str, Any] = {
        name: getattr(results, name) for name in ("data", "pairs", "no_pairs", "model", "hypotheses", "search")
    }
    if results.evaluation:
        told |= asdict(results.evaluation)
        told["worst"] = [one.number for one in results.evaluation.worst(flags.worst)]
    if results.against:
        pairs = [asdict(one) | {"difference": one.difference, "better": one.better} for one in results.paired]
        told |= {"against": results.against, "paired": pairs}
    if results.forced is not None:
        each = [{"log_prob": one.log_prob, "perplexity": one.perplexity, **asdict(one)} for one in results.forced]
        told["forced"] = {**totals(results.forced), "sentences": each}
    if results.alignment:
        told["alignment"] = asdict(results.alignment)
    return {name: finite(value) for name, value in told.items()}


def finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the page --------------------------------------------------------------------------------------------------------


def page(results: Results, flags: Flags) -> Iterator[Text]:
    yield from head(results)
    if results.evaluation:
        yield from scores_section(results.evaluation)
        yield from groups_section(results.evaluation)
        worst = results.evaluation.worst(flags.worst)
        if worst:
            yield heading("The worst", "by chrF of the sentence alone")
            for one in worst:
                yield from sentence_lines(one)
    if results.against:
        yield from paired_section(results)
    if results.forced is not None:
        yield from forced_section(results.forced)
    if isinstance(results.alignment, Measured):
        yield from agreement_section(results.alignment)
    elif results.alignment:
        yield from alignment_section(results.alignment)


def head(results: Results) -> Iterator[Text]:
    lines = {
        "test set": f"{results.data}: {results.pairs:,} pair{'s' * (results.pairs != 1)}",
        "left out": f"{results.no_pairs:,} lines that are no pairs" if results.no_pairs else None,
        "model": results.model,
        "hypotheses": results.hypotheses,
        "search": results.searched,
    }
    yield from (Text.assemble((f"{name:<12}", "dim"), text) for name, text in lines.items() if text)


def heading(title: str, note: str = "") -> Text:
    return Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))


def table(lines: Sequence[Sequence[str]], header: Sequence[str] = (), strong: int = -1) -> Iterator[Text]:
    """Names on the left, numbers under one another; column `strong` in bold."""
    every = [list(header), *lines] if header else list(lines)
    widths = [max(len(line[i]) for line in every if i < len(line)) for i in range(max(map(len, every)))]
    for number, line in enumerate(every):
        style = "dim" if header and number == 0 else ""
        text = Text(style=style)
        for i, cell in enumerate(line):
            padded = cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])
            text.append(padded + "   ", "bold" if i == strong and not style else "")
        text.rstrip()
        yield text


def scores_section(evaluation: Evaluation) -> Iterator[Text]:
    yield heading("Scores", "± of a 95% confidence interval by bootstrap; of TER less is better")
    lines = [
        [each.title, f"{each.value:.2f}", "" if each.mean is None else f"{each.mean:.2f} ± {each.spread:.2f}"]
        for each in evaluation.scores
    ]
    yield from table(lines, strong=1)
    if evaluation.exact and any(each.title == "BLEU" and each.value == 0 for each in evaluation.scores):
        yield Text("BLEU counts runs of four words, and no output has one that is right: they are too short for it")
    right = f"{evaluation.exact:.1f}% exactly as the reference; {100 * evaluation.ratio:.1f}% of its characters"
    yield Text(right + (f"; {evaluation.empty:,} empty" if evaluation.empty else ""))
    yield from (Text(f"{each.title:<6} {each.signature}", "dim") for each in evaluation.scores)


def groups_section(evaluation: Evaluation) -> Iterator[Text]:
    yield heading("By the length of the source")
    header = [evaluation.unit, "pairs", *(each.title for each in evaluation.scores)]
    lines = [
        [
            f"over {group.least - 1}" if group.most is None else f"{group.least}-{group.most}",
            f"{group.sentences:,}",
            *(f"{each.value:.1f}" for each in group.scores),
        ]
        for group in evaluation.groups
    ]
    yield from table(lines, header)


def sentence_lines(one: Sentence) -> Iterator[Text]:
    yield Text(f"pair {one.number:,}  chrF {one.chrf:.1f}  BLEU {one.bleu:.1f}", "cyan")
    for name, text in (("source", one.source), ("reference", one.reference), ("output", one.output)):
        yield Text.assemble((f"  {name:<11}", "dim"), visible(text))


def paired_section(results: Results) -> Iterator[Text]:
    yield heading(f"Against {results.against}", "paired bootstrap; p: so great a difference by chance alone")
    lines = []
    for each in results.paired:
        figures = f"{each.value:.2f}", f"{each.other:.2f}", f"{each.difference:+.2f}", f"{each.p:.4f}"
        lines.append([each.title, *figures, VERDICTS[each.better]])
    yield from table(lines, ["", "this", "other", "difference", "p", ""])


def forced_section(forced: Sequence[Forced]) -> Iterator[Text]:
    yield heading("Forced decoding", "how likely the model holds these translations")
    told = totals(forced)
    lines = [
        ["perplexity", f"{told['perplexity']:.3f}"],
        ["log-probability per token", f"{told['log_prob_per_token']:.4f}"],
        ["log-probability", f"{told['log_prob']:,.2f}"],
        ["tokens, ends included", f"{told['tokens']:,.0f}"],
    ]
    yield from table(lines, strong=1)
    if cut := sum(one.cut for one in forced):
        yield Text(f"{cut:,} too long for the model or --batch-tokens: of these only the beginning is scored", "yellow")


def alignment_section(report: AlignmentReport) -> Iterator[Text]:
    yield heading("Alignment error rate", f"in percent, of {report.sentences:,} pairs; layers and heads from 0")
    for shift, when in ((False, "looking when a token is written"), (True, "looking when it is read, one step later")):
        some = [one for one in report.candidates if one.choice.shift == shift]
        layers = sorted({one.choice.layer for one in some})
        heads = [str(one.choice.heads[0]) for one in some if one.choice.layer == 0 and one.choice.heads]
        yield Text(when)
        lines = [
            [f"layer {layer}", *(f"{one.all:.1f}" for one in some if one.choice.layer == layer)] for layer in layers
        ]
        yield from table(lines, ["", "all heads", *heads])
    yield from best_section(report)


def best_section(report: AlignmentReport) -> Iterator[Text]:
    yield heading("The best", f"{report.best.choice}; kept in the model folder")
    lines = [
        ["the half of the pairs that chose it", f"{report.best.chosen_by:.1f}", "", ""],
        *(
            [name, f"{one.aer:.1f}", f"{one.precision:.1f}", f"{one.recall:.1f}"]
            for name, one in (("the other half", report.each), ("  links that both words agree on", report.mutual))
        ),
        [f"  without alignments by hand: {_brief(report.agreed.choice)}", f"{report.agreed.held_out:.1f}", "", ""],
        [f"  by default: {_brief(report.default.choice)}", f"{report.default.held_out:.1f}", "", ""],
    ]
    yield from table(lines, ["", "AER", "precision", "recall"], strong=1)
    if report.left_out:
        more = f" and {len(report.left_out) - LEFT_OUT:,} more" if len(report.left_out) > LEFT_OUT else ""
        yield Text(f"left out, since there is no such word: {', '.join(report.left_out[:LEFT_OUT])}{more}", "yellow")


def _brief(choice: Choice) -> str:
    return str(choice).partition(", when")[0]


def agreement_section(found: Measured) -> Iterator[Text]:
    yield heading("To align by", f"{found.choice}; kept in the model folder")
    yield Text(f"{found.agreement:.1f}% of its links are the best of both their words, more than anywhere else")
