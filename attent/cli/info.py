"""`attent info`: describe a model folder on one page: the model, its tokenizer, the progress of its training."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from attent.formatting import escape_invisible, format_bytes, format_count

if TYPE_CHECKING:
    from attent.training.folder_info import FolderInfo, ModelInfo, TokenizerInfo, TrainingInfo

EXIT_FAILED = 1
LABEL_WIDTH, PAGE_WIDTH = 15, 80  # columns
MAX_LABELS = 8


def info(
    model: Annotated[Path, Parameter(help="a model folder of attent or Hugging Face")],
    *,
    json: Annotated[bool, Parameter(help="print everything as one JSON object", negative="")] = False,
) -> int:
    """Describe a model folder, verify its checksums, and show the progress of its training."""
    from attent.training.folder_info import inspect_folder

    folder = inspect_folder(model)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # for consoles that cannot show every character
    as_json = json_module.dumps(asdict(folder), indent=2, ensure_ascii=False, default=str) if json else None
    print(as_json or "\n".join(format_page(folder)))
    return EXIT_FAILED if folder.problems else 0


def format_page(folder: FolderInfo) -> Iterator[str]:
    for problem in folder.problems:
        yield from format_row("PROBLEM", problem)
    yield from format_row("folder", folder.folder)
    state = f", of which {format_bytes(folder.state_bytes)} only for resuming (state/)" if folder.state_bytes else ""
    yield from format_row("on disk", format_bytes(folder.bytes) + state)
    for name in folder.ignored_conversions:
        cache_note = "conversions made from the weights are kept in the user's cache"
        yield from format_row("ignored", f"{name}/, which has no checksum here; {cache_note}")
    yield from _model_rows(folder.model)
    if folder.tokenizer:
        yield from _tokenizer_rows(folder.tokenizer, folder.model)
    elif folder.model and folder.model.vocabulary is not None:
        yield from format_row("tokenizer", "none in this folder")
    if folder.training:
        yield from _training_rows(folder.training)


def _model_rows(model: ModelInfo | None) -> Iterator[str]:
    if model is None:
        yield from format_row("model", "none, or none that can be read")
        return
    yield from format_row("model", f"{model.kind}, saved by {model.saved_by}")
    yield from format_row("", "all checksums match" if model.has_checksums else "no checksums (Hugging Face format)")
    yield from format_row("use with", ", ".join(f"attent {command}" for command in model.commands))
    if model.encoder and model.encoder == model.decoder:
        yield from format_row("both stacks", format_stack(model.encoder))
    else:
        yield from format_row("encoder", format_stack(model.encoder)) if model.encoder else ()
        yield from format_row("decoder", format_stack(model.decoder)) if model.decoder else ()
    yield from _input_rows(model)
    yield from format_row("parameters", f"{model.parameters:,} in {model.precision}")
    yield from format_row("", ", ".join(f"{name} {count:,}" for name, count in model.parts.items()))


def _input_rows(model: ModelInfo) -> Iterator[str]:
    if model.images:
        yield from format_row("images", model.images)
    if model.vocabulary is not None:
        same = model.target_vocabulary in (None, model.vocabulary)
        target = "" if same else f" and {model.target_vocabulary:,}"
        yield from format_row("vocabulary", f"{model.vocabulary:,}{target}")
    if model.labels:
        names = ", ".join(model.labels[:MAX_LABELS]) + (" ..." if len(model.labels) > MAX_LABELS else "")
        yield from format_row("labels", f"{len(model.labels):,}: {names}")


def format_stack(stack: Mapping[str, Any]) -> str:
    if "description" in stack:
        return f"{format_count(stack['layers'], 'layer')}, width {stack['width']:,}, {stack['description']}"
    pruned = f" ({stack['pruned']} pruned in all layers)" if stack["pruned"] else ""
    heads = format_count(stack["heads"], "head") + (" (additive)" if stack["compatibility"] == "additive" else "")
    return (
        f"{format_count(stack['layers'], 'layer')}, width {stack['width']:,}, {heads}{pruned}, "
        f"FFN width {stack['ffn_width']:,}, {stack['activation']}, {stack['positions']} positions, {stack['norm']} norm"
    )


def _tokenizer_rows(tokenizer: TokenizerInfo, model: ModelInfo | None) -> Iterator[str]:
    one_sided = model is not None and model.target_vocabulary is None
    pieces = f"{tokenizer.source_size:,} pieces" + ("" if one_sided else " for both sides")
    if not tokenizer.joint:
        pieces = f"{tokenizer.source_size:,} and {tokenizer.target_size:,} pieces"
    yield from format_row("tokenizer", f"{tokenizer.kind}, {pieces}")
    if tokenizer.languages:
        yield from format_row("", f"target languages: {', '.join(tokenizer.languages)}")
    yield from format_row("", f"SHA-256 {tokenizer.sha256[:16]}…")


def _training_rows(training: TrainingInfo) -> Iterator[str]:
    reasons = {"steps": "complete", "patience": "stopped early, no improvement", "stopped": "stopped by the user"}
    if training.step is not None:
        status = reasons.get(training.stop_reason or "", "running or interrupted")
        yield from format_row("training", f"{format_count(training.step, 'step')}; {status}")
    if training.checkpoints:
        newest = training.checkpoints[-1]
        yield from format_row("checkpoints", f"{len(training.checkpoints):,}, the newest at step {newest:,}")
    elif training.step is not None:
        yield from format_row("checkpoints", "none")
    for label, validation in (("last validated", training.last_validation), ("best", training.best_validation)):
        if validation:
            yield from format_row(label, f"step {validation['step']:,}: {format_metrics(validation)}")
    if training.weights:
        yield from format_row("weights", f"{training.weights}")
    for scores in training.scores:
        count, unit = scores.get("num_examples"), scores.get("unit")
        size = f" of {format_count(count, str(unit))}" if isinstance(count, int) else ""
        name = f"{scores.get('split', 'set')} {scores.get('name', '')}{size}"
        yield from format_row("scores", f"{name}: {format_metrics(scores)}")
    settings = [
        f"{name.removeprefix('train.')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in training.settings.items()
        if value != []
    ]
    if settings:
        yield from format_row("run.toml", ", ".join(settings))


def format_metrics(scores: Mapping[str, Any]) -> str:
    """`loss 2.000, BLEU 31.2, exact 4.1%`"""
    from attent.scoring import metrics as scoring

    metrics = {name: value for name, value in scores.get("metrics", {}).items() if isinstance(value, int | float)}
    losses = {name: scores.get(name, metrics.get(name)) for name in ("loss", "perplexity")}
    parts = [f"{name} {value:.3f}" for name, value in losses.items() if isinstance(value, int | float)]
    return ", ".join([*parts, *filter(None, [scoring.format_metrics(metrics)])])


def format_row(name: str, text: str) -> Iterator[str]:
    """A label and a text, wrapped at spaces to 80 columns."""
    from rich.console import Console
    from rich.text import Text

    for line in Text(escape_invisible(text)).wrap(Console(), PAGE_WIDTH - LABEL_WIDTH) or [Text()]:
        yield f"{name:<{LABEL_WIDTH}}{line.plain}".rstrip()
        name = ""
