"""`card.md`: one page about a trained model. `build_card` collects the facts, `render_card` writes Markdown."""

import datetime
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attent import __version__, formatting
from attent.formatting import escape_markdown, format_count, markdown_table
from attent.models.config import get_stack_configs
from attent.nn import StackConfig
from attent.scoring.metrics import METRICS, format_headline
from attent.storage.atomic import write_atomic
from attent.training.checkpoint import CURVES_FILE
from attent.training.config import RunConfig
from attent.training.events import Ended, ValidationSample
from attent.training.hardware import describe_device
from attent.training.loop import Trainer
from attent.training.tasks.base import DataSummary, FinalScores, ModelDescription, Task

MAX_SAMPLE_CHARS = 400
END_REASONS = {"steps": "all steps were done", "patience": "validation stopped improving", "stopped": "stopped by hand"}
LISTED_SETTINGS = (
    "optimizer", "lr", "schedule", "warmup", "batch_tokens", "accumulate", "label_smoothing", "rdrop", "clip_norm",
    "weight_decay", "precision", "average", "freeze", "lora",
)  # fmt: skip

Rows = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    description: ModelDescription
    unit: str  # of the training data: "pair"
    data: DataSummary
    parameters: int
    model: Rows  # (name, value), "" where unknown
    settings: Rows  # (name in run.toml, value)
    scores: tuple[FinalScores, ...]  # the first is named at the head
    training: Rows
    weights_label: str = ""  # "best, step 6,800", "average of the last 5"
    base_model: str = ""  # the model that was fine-tuned, if any
    samples: tuple[ValidationSample, ...] = ()
    curves_file: str = ""


def build_card(
    task: Task, run: RunConfig, trainer: Trainer, scores: Sequence[FinalScores], ended: Ended, weights_label: str
) -> ModelCard:
    return ModelCard(
        description=task.describe_model(trainer.out),
        unit=task.unit,
        data=task.describe_data(),
        parameters=count_parameters(trainer.parameters),
        model=tuple(_list_model_facts(task, run, trainer)),
        settings=tuple(_list_settings(task, run)),
        scores=tuple(scores),
        training=tuple(_list_training_facts(task, run, trainer, ended)),
        weights_label=weights_label,
        base_model=run.init_from or "",
        samples=next((score.samples for score in reversed(scores) if not score.weights), ()),
        curves_file=CURVES_FILE if (trainer.out / CURVES_FILE).exists() else "",
    )


def count_parameters(parameters: Mapping[str, Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters.values())


def _list_model_facts(task: Task, run: RunConfig, trainer: Trainer) -> Iterator[tuple[str, str]]:
    config, tokenizer = trainer.model.config, task.tokenizer
    stacks = get_stack_configs(config)
    stack = next(iter(stacks.values()))
    yield "Size", run.size or ""
    yield "Layers", ", ".join(f"{stack.layers} {name}" for name, stack in stacks.items())
    if isinstance(stack, StackConfig):
        yield "Width", f"{stack.width:,}, feed-forward {stack.ffn_width:,}, {format_count(stack.heads, 'head')}"
    else:
        yield "Width", f"{stack.width:,}, {' and '.join(config.description for config in stacks.values())}"
    total, trained = count_parameters(trainer.parameters), count_parameters(trainer.trainable_parameters)
    yield "Parameters", f"{total:,}" + (f", of which {trained:,} were trained" if trained < total else "")
    yield "Vocabulary", f"{config.vocab:,}" if hasattr(config, "vocab") else ""
    if tokenizer is not None:
        origin = "of the base model" if run.init_from else f"of {run.data.tokenizer_from}"
        kind = origin if run.init_from or run.data.tokenizer_from else run.data.tokenizer.kind
        sides = ", one for both languages" if tokenizer.joint else ", one for each language"
        yield "Tokenizer", kind + (sides if "data.tokenizer.joint" in task.used_settings else "")
        yield "Tokenizer SHA-256", tokenizer.fingerprint
    yield "Fine-tuned from", run.init_from or ""
    pruned = sum(stack.num_removed_heads for stack in stacks.values() if isinstance(stack, StackConfig))
    yield "Pruned heads", f"{pruned:,}" if pruned else ""


def _list_settings(task: Task, run: RunConfig) -> Iterator[tuple[str, str]]:
    assert run.model is not None
    values: dict[str, object] = {} if run.size is None else {"size": run.size}
    values |= {f"train.{name}": getattr(run.train, name) for name in LISTED_SETTINGS}
    stack = next(iter(get_stack_configs(run.model).values()))
    values["model.dropout"] = stack.dropout
    if isinstance(stack, StackConfig):
        values["model.norm_order"] = stack.norm_order
    if "data.augment" in task.used_settings:
        values["data.augment"] = run.data.augment
    for name, value in values.items():
        if isinstance(value, tuple):
            value = ", ".join(map(str, value)) or "none"
        yield name, f"{value:g}" if isinstance(value, float) else str(value)


def _list_training_facts(task: Task, run: RunConfig, trainer: Trainer, ended: Ended) -> Iterator[tuple[str, str]]:
    state, distributed = trainer.state, trainer.distributed
    assert run.train.precision
    yield "Steps", f"{state.step:,} ({trainer.get_epoch():.1f} epochs)"
    yield "Ended because", END_REASONS[ended.reason]
    yield "Time", formatting.format_duration(state.seconds)
    sides = ", both sides" if task.describe_model(trainer.out).has_two_sides else ""
    yield "Speed", f"{state.tokens / max(1e-9, state.seconds):,.0f} tokens/s{sides}"
    hardware = describe_device(distributed.device, run.train.precision, trainer.compiled)
    yield "Hardware", hardware + (f", {distributed.world_size} processes" if distributed.world_size > 1 else "")
    yield "Versions", f"attent {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    yield "Seed", str(run.train.seed)
    yield "Date", datetime.date.today().isoformat()


def write_card(card: ModelCard, path: Path) -> None:
    write_atomic(path, render_card(card).encode(errors="backslashreplace"))


def render_card(card: ModelCard) -> str:
    sections = (_render_head, _render_scores, _render_data, _render_training, _render_samples, _render_limits)
    return "\n\n".join(part for section in sections for part in section(card)) + "\n"


def _render_head(card: ModelCard) -> Iterator[str]:
    yield f"# {escape_markdown(card.description.title)}"
    headlines = []
    for score in card.scores:  # the most informative metric, else the first of the extra columns
        columns = [f"{value} {name.lower()}" for name, value in score.extra_columns[:1]]
        if headline := format_headline(score.metrics) or "".join(columns):
            headlines.append(f"; {headline} on {escape_markdown(score.name)}")
    examples = format_count(sum(corpus.num_used for corpus in card.data.corpora), card.unit)
    size, result = formatting.format_short(card.parameters), "".join(headlines[:1])
    yield f"A Transformer of {size} parameters, trained by attent on {examples}{result}."


def _render_scores(card: ModelCard) -> Iterator[str]:
    if not card.scores:
        return
    yield "## Scores"
    counts = [f"{score.num_examples:,}" for score in card.scores]
    columns = {"Set": [s.name for s in card.scores], f"{card.unit.capitalize()}s": counts}
    columns |= {
        "Weights": [s.weights or card.weights_label for s in card.scores],
        "Decoding": [s.decoding for s in card.scores],
    }
    columns["Loss"] = [f"{s.metrics['loss']:.3f}" if "loss" in s.metrics else "" for s in card.scores]
    for metric in METRICS.values():
        values = [s.metrics.get(metric.name) for s in card.scores]
        columns[metric.heading] = ["" if value is None else metric.format_value(value) for value in values]
    for name in dict.fromkeys(name for s in card.scores for name, _ in s.extra_columns):
        columns[name] = [dict(s.extra_columns).get(name, "") for s in card.scores]
    rows = list(zip(*columns.values(), strict=True))
    yield markdown_table(list(columns), rows, right_aligned=(1, *range(4, len(columns))))
    loss_note = f"Loss is cross-entropy in nats per {card.description.loss_unit}." if any(columns["Loss"]) else ""
    if notes := " ".join(filter(None, (loss_note, card.description.note))):
        yield notes
    signatures = dict.fromkeys(signature for score in card.scores for signature in score.signatures)
    if signatures:
        yield "Metric signatures:"
        yield "\n".join(f"- {formatting.format_code(signature)}" for signature in signatures)


def _render_data(card: ModelCard) -> Iterator[str]:
    yield "## Usage"
    yield formatting.code_block("sh", card.description.shell_example)
    yield formatting.code_block("python", card.description.python_example)
    data = card.data
    yield "## Data"
    rows = [
        (c.name, f"{c.num_read:,}", f"{c.num_used:,}", f"{c.num_read - c.num_used:,}", f"{c.weight:g}")
        for c in data.corpora
    ]
    header = ("Corpus", f"{card.unit.capitalize()}s read", "Used", "Dropped", "Weight")
    yield markdown_table(header, rows, right_aligned=(1, 2, 3, 4))
    reasons = sum((Counter(dict(corpus.dropped)) for corpus in data.corpora), Counter[str]())
    if reasons:
        ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        yield "Dropped: " + ", ".join(f"{escape_markdown(reason)} ({count:,})" for reason, count in ordered) + "."
    method = f"; {escape_markdown(data.held_out_method)}" if data.held_out_method else ""
    held_out = format_count(data.num_held_out, card.unit) + method if data.num_held_out else "nothing"
    sides = f"{data.source_tokens:,}" + (f" source, {data.target_tokens:,} target" if data.target_tokens else "")
    tokens = f"- Tokens: {sides}.\n" if data.source_tokens else ""
    key = formatting.format_code(data.data_key)
    yield f"{tokens}- Held out for validation: {held_out}.\n- Key of the encoded data: {key}"
    files = list(dict.fromkeys(file for corpus in data.corpora for file in corpus.files))  # corpora may share files
    if files:
        yield markdown_table(("File", "SHA-256"), files, code_columns=(0, 1))


def _render_training(card: ModelCard) -> Iterator[str]:
    yield "## Model"
    yield markdown_table(("", ""), [row for row in card.model if row[1]])
    if card.settings:
        yield "## Settings"
        yield markdown_table(("Setting", "Value"), card.settings, code_columns=(0, 1))
        yield "All settings are in `run.toml` in the same folder."
    yield "## Training"
    yield markdown_table(("", ""), card.training)
    if card.curves_file:
        yield f"![Training curves]({card.curves_file})"


def _render_samples(card: ModelCard) -> Iterator[str]:
    if card.samples:
        yield f"## {card.description.samples_title}"
        yield "From held-out text, evenly spaced and not selected by hand."
    for sample in card.samples:
        texts = dict(zip(card.description.sample_labels, (sample.source, sample.reference, sample.output), strict=True))
        limit = MAX_SAMPLE_CHARS
        shown = {name: text if len(text) <= limit else text[: limit - 1] + "…" for name, text in texts.items() if name}
        yield "\n".join(f"- **{name}:** {escape_markdown(text)}" for name, text in shown.items())


def _render_limits(card: ModelCard) -> Iterator[str]:
    yield "## Limits"
    names = ", ".join(escape_markdown(corpus.name) for corpus in card.data.corpora)
    base_model = escape_markdown(card.base_model)
    base = f" and, before that, on the data of {base_model}" if base_model else ""
    yield (
        f"Trained on {names}{base}, and on nothing else: expect worse results on other domains, styles and lengths, "
        "the errors and biases of that data, and at times omissions, additions and inventions. Have a person check "
        "what matters. The scores hold for the sets above only."
    )
