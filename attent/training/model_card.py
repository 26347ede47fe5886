"""`card.md`: what a trained model is, on one page, for whoever finds its folder later.

The facts are plain dataclasses that a run fills in; the text is made from them alone, so that the same facts give the
same page. Nothing is measured, scored or looked up here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from attent.formatting import (
    code_block,
    escape_markdown,
    format_code,
    format_count,
    format_duration,
    format_short,
    markdown_table,
)
from attent.storage.atomic import write_atomic
from attent.training.events import ValidationSample

CARD_NAME = "card.md"
MAX_SAMPLE_CHARS = 400  # characters of a sample; a paragraph belongs in a file of its own

PYTHON_EXAMPLE = """\
import attent

translator = attent.Translator.load({folder!r})
print(translator.translate(["..."]{to})[0].text)"""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """How one speaks of a model: what it is, what it learned from, and which command is made for it."""

    title: str  # "en-de translator"
    unit: str = "pair"  # of what it learned from
    shell_example: str
    python_example: str
    next_step: str  # "try it: attent translate runs/en-de"
    loss_unit: str = "target token"  # what the loss is a mean over
    note: str = ""  # beneath the scores
    samples_title: str = "Sample translations"
    sample_labels: tuple[str, str, str] = ("Source", "Reference", "Output")  # of a sample
    has_two_sides: bool = True  # what is read has two of them


@dataclass(frozen=True, kw_only=True)
class CardCorpus:
    """One corpus: what was read, and what became of it. `read` is `used` + all of `dropped`."""

    name: str
    read: int
    used: int
    dropped: tuple[tuple[str, int], ...] = ()  # (reason, pairs)
    files: tuple[tuple[str, str], ...] = ()  # (name, SHA-256, "" where it could not be read again)
    weight: float = 1.0  # how often its pairs are seen, beside those of the others


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    corpora: tuple[CardCorpus, ...]
    source_tokens: int
    target_tokens: int  # 0 where there is one side only; both 0: they are not counted in tokens
    data_key: str  # of the token store: the head of a SHA-256 of the text, the filters and the tokenizer
    num_held_out: int  # pairs that were only validated on
    held_out_method: str  # "chosen from the corpus by a hash of ...", "valid.tsv", or "" where there are none


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    size: str  # "tiny", or "" where none was named
    encoder_layers: int
    decoder_layers: int
    width: int
    heads: int
    ffn_width: int
    parameters: int
    trainable_parameters: int  # fewer than `parameters` when some were frozen
    vocab_size: int
    tokenizer: str  # "BPE, joint" and the like
    tokenizer_sha256: str
    base_model: str = ""  # the model that was trained further, if any
    pruned_heads: int = 0  # heads that were removed from it, of all layers together


@dataclass(frozen=True, kw_only=True)
class CardSetting:
    """A setting that matters: its name in run.toml, and why it is so where it was chosen automatically."""

    name: str
    value: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CardScore:
    """One set of sentences, translated by one set of weights."""

    name: str  # "held-out part", "test_2016_flickr"
    num_examples: int
    weights: str  # "best, step 6,800", "average of the last 5", "EMA 0.999"
    decoding: str  # "beam 4, length penalty 0.6"
    loss: float | None = None
    bleu: float | None = None
    chrf: float | None = None
    exact: float | None = None
    signatures: tuple[str, ...] = ()  # sacreBLEU's, in full
    extra_columns: tuple[tuple[str, str], ...] = ()  # other figures, as columns: ("Accuracy", "92.1%")


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    steps: int
    epochs: float
    seconds: float
    tokens_per_second: float  # of both sides, without filler
    hardware: str  # "NVIDIA H200, bfloat16, compiled"
    end_reason: str  # "8,000 updates were done", "no better for 10 validations", "stopped by hand"
    attent_version: str  # versions
    torch_version: str
    python_version: str
    seed: int | None = None
    date: str = ""  # "2026-11-15"


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    folder: str  # as a person would type it
    source_language: str  # language tag, "" where unknown
    target_language: str
    data: DataSummary
    model: ModelSummary
    settings: tuple[CardSetting, ...]
    scores: tuple[CardScore, ...]  # the first is named at the head
    training: TrainingSummary
    samples: tuple[ValidationSample, ...] = ()
    curves_file: str = ""  # the name of the picture beside the card
    target_tag: str | None = None  # what `--to` must say to be given one of its languages; None: it has only one
    description: ModelDescription | None = None  # None: it translates

    @property
    def model_description(self) -> ModelDescription:
        return self.description or describe_translator(
            self.folder, self.source_language, self.target_language, self.target_tag
        )


def describe_translator(
    folder: str, source_language: str, target_language: str, target_tag: str | None
) -> ModelDescription:
    """How one speaks of a model that translates; `to` is what `--to` must say, None where it has one language only."""
    flag = "" if target_tag is None else f" --to {quote_path(target_tag)}"
    return ModelDescription(
        title=f"{source_language}-{target_language} translator"
        if source_language and target_language
        else "A text-to-text model",
        shell_example=f"attent translate {quote_path(folder)}{flag} < input.txt > output.txt",
        python_example=PYTHON_EXAMPLE.format(folder=folder, to=f", to={target_tag!r}" if target_tag else ""),
        next_step="",
        note="Exact is the share of outputs that are the reference.",
    )


def write_card(card: ModelCard, path: Path) -> None:
    """Aside first, then renamed: there is never half a card."""
    write_atomic(path, render_card(card).encode(errors="backslashreplace"))


def render_card(card: ModelCard) -> str:
    sections = (
        _render_head,
        _render_scores,
        _render_usage,
        _render_data,
        _render_model,
        _render_settings,
        _render_training,
        _render_samples,
        _render_limits,
    )
    return "\n\n".join(part for section in sections for part in section(card)) + "\n"


def hash_files(names: Sequence[str], paths: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """The files as a card lists them."""
    return tuple((name, hash_file(path)) for name, path in zip(names, paths, strict=True))


def hash_file(path: Path) -> str:
    """Of the whole file, so that anybody can compare it with their own by `sha256sum`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- sections, in the order in which a person wants them -------------------------------------------------------------


def _render_head(card: ModelCard) -> Iterator[str]:
    yield f"# {escape_markdown(card.model_description.title)}"
    told = next(
        (f"; {figure} on {escape_markdown(score.name)}" for score in card.scores if (figure := format_headline(score))),
        "",
    )
    pairs = format_count(sum(origin.used for origin in card.data.corpora), card.model_description.unit)
    yield f"A Transformer of {format_short(card.model.parameters)} parameters, trained by attent on {pairs}{told}."


def format_headline(score: CardScore) -> str:
    """The figure that says most.

    BLEU counts runs of four words. Where hardly a reference has as many (labels, dates) it is 0 or near it however
    good the outputs are, and then the share of exact ones is the larger of the two.
    """
    if score.extra_columns:
        return f"{score.extra_columns[0][1]} {score.extra_columns[0][0].lower()}"
    if score.exact and score.exact >= (score.bleu or 0.0):
        return f"{score.exact:.1f}% exact"
    if score.chrf and not score.bleu:
        return f"{score.chrf:.1f} chrF"
    return "" if score.bleu is None else f"{score.bleu:.1f} BLEU"


def _render_scores(card: ModelCard) -> Iterator[str]:
    if not card.scores:
        return
    yield "## Scores"
    words = card.model_description
    more = list(dict.fromkeys(name for score in card.scores for name, _ in score.extra_columns))
    head = ("Set", f"{words.unit.capitalize()}s", "Weights", "Decoding", "Loss", "BLEU", "chrF", "Exact", *more)
    rows = [
        (
            *(score.name, f"{score.num_examples:,}", score.weights, score.decoding, *_format_metrics(score)),
            *(dict(score.extra_columns).get(name, "") for name in more),
        )
        for score in card.scores
    ]
    yield markdown_table(head, rows, right_aligned=(1, 4, 5, 6, 7, *range(8, 8 + len(more))))
    has_loss = any(score.loss is not None for score in card.scores)
    told = [f"Loss is cross-entropy in nats per {words.loss_unit}."] if has_loss else []
    told += [words.note] if words.note else []
    if told:
        yield " ".join(told)
    signatures = dict.fromkeys(signature for score in card.scores for signature in score.signatures)
    if signatures:
        yield "sacreBLEU signatures:"
        yield "\n".join(f"- {format_code(signature)}" for signature in signatures)


def _format_metrics(score: CardScore) -> tuple[str, ...]:
    return (
        _format_value(score.loss, 3),
        _format_value(score.bleu, 1),
        _format_value(score.chrf, 1),
        _format_value(score.exact, 1, "%"),
    )


def _format_value(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _render_usage(card: ModelCard) -> Iterator[str]:
    yield "## How to use it"
    yield code_block("sh", card.model_description.shell_example)
    if card.model_description.python_example:
        yield code_block("python", card.model_description.python_example)


def quote_path(path: str) -> str:
    """As a shell takes it."""
    return path if re.fullmatch(r"[\w./+=:@%-]+", path) else "'" + path.replace("'", "'\\''") + "'"


def _render_data(card: ModelCard) -> Iterator[str]:
    data = card.data
    yield "## Data"
    rows = [
        (origin.name, f"{origin.read:,}", f"{origin.used:,}", f"{origin.read - origin.used:,}", f"{origin.weight:g}")
        for origin in data.corpora
    ]
    read = f"{card.model_description.unit.capitalize()}s read"
    yield markdown_table(("Corpus", read, "Used", "Left out", "Weight"), rows, right_aligned=(1, 2, 3, 4))
    reasons = _merge_reasons(reason for origin in data.corpora for reason in origin.dropped)
    if reasons:
        yield "Left out: " + ", ".join(f"{escape_markdown(reason)} ({count:,})" for reason, count in reasons) + "."
    yield "\n".join(
        [
            *_render_tokens(data),
            f"- Held out for validation: {_describe_held_out(data, card.model_description.unit)}.",
            f"- Key of the encoded data: {format_code(data.data_key)}",
        ]
    )
    files = list(dict.fromkeys(file for origin in data.corpora for file in origin.files))  # several may share one
    if files:
        yield markdown_table(("File", "SHA-256"), files, code_columns=(0, 1))


def _render_tokens(data: DataSummary) -> Iterator[str]:
    if data.target_tokens:
        yield f"- Tokens: {data.source_tokens:,} of the source, {data.target_tokens:,} of the target."
    elif data.source_tokens:
        yield f"- Tokens: {data.source_tokens:,}."


def _describe_held_out(data: DataSummary, unit: str) -> str:
    how = f"; {escape_markdown(data.held_out_method)}" if data.held_out_method else ""
    return format_count(data.num_held_out, unit) + how if data.num_held_out else "nothing"


def _merge_reasons(reasons: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same reason of several corpora as one; the most frequent first, equal ones by name."""
    totals: dict[str, int] = {}
    for reason, count in reasons:
        totals[reason] = totals.get(reason, 0) + count
    return sorted(((reason, n) for reason, n in totals.items() if n), key=lambda item: (-item[1], item[0]))


def _render_model(card: ModelCard) -> Iterator[str]:
    model = card.model
    yield "## Model"
    learned = (
        ""
        if model.trainable_parameters == model.parameters
        else f", of which {model.trainable_parameters:,} were trained"
    )
    layers = ((model.encoder_layers, "encoder"), (model.decoder_layers, "decoder"))
    rows = [
        ("Size", model.size),
        ("Layers", ", ".join(f"{n} {name}" for n, name in layers if n)),
        ("Width", f"{model.width:,}, feed-forward {model.ffn_width:,}, {format_count(model.heads, 'head')}"),
        ("Parameters", f"{model.parameters:,}{learned}"),
        ("Vocabulary", f"{model.vocab_size:,}" if model.vocab_size else ""),
        ("Tokenizer", model.tokenizer),
        ("Tokenizer SHA-256", model.tokenizer_sha256),
        ("Trained further from", model.base_model),
        ("Heads pruned before", f"{model.pruned_heads:,}" if model.pruned_heads else ""),
    ]
    yield markdown_table(("", ""), [row for row in rows if row[1]])


def _render_settings(card: ModelCard) -> Iterator[str]:
    if card.settings:
        yield "## Recipe"
        rows = [(one.name, one.value, one.reason) for one in card.settings]
        yield markdown_table(("Setting", "Value", "Why"), rows, code_columns=(0, 1))
        yield "Every setting is in `run.toml` beside this card."


def _render_training(card: ModelCard) -> Iterator[str]:
    ran = card.training
    yield "## Training"
    rows = [
        ("Updates", f"{ran.steps:,} ({ran.epochs:.1f} epochs)"),
        ("Ended because", ran.end_reason),
        ("Time", format_duration(ran.seconds)),
        (
            "Speed",
            f"{ran.tokens_per_second:,.0f} tokens a second{', both sides' * card.model_description.has_two_sides}",
        ),
        ("Hardware", ran.hardware),
        ("Versions", f"attent {ran.attent_version}, torch {ran.torch_version}, Python {ran.python_version}"),
        ("Seed", "" if ran.seed is None else str(ran.seed)),
        ("Date", ran.date),
    ]
    yield markdown_table(("", ""), [row for row in rows if row[1]])
    if card.curves_file:
        yield f"![Losses and scores over the updates]({card.curves_file})"


def _render_samples(card: ModelCard) -> Iterator[str]:
    if card.samples:
        yield f"## {card.model_description.samples_title}"
        yield "Of held-out text, taken as they came and not chosen."
        yield from (_render_sample(sample, card.model_description.sample_labels) for sample in card.samples)


def _render_sample(sample: ValidationSample, labels: Sequence[str]) -> str:
    rows = zip(labels, (sample.source, sample.reference, sample.output), strict=True)
    return "\n".join(f"- **{name}:** {escape_markdown(_truncate(words))}" for name, words in rows if name)


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else text[: MAX_SAMPLE_CHARS - 1] + "…"


def _render_limits(card: ModelCard) -> Iterator[str]:
    yield "## Limits"
    names = ", ".join(escape_markdown(origin.name) for origin in card.data.corpora)
    before = f"what {escape_markdown(card.model.base_model)} had learned, from " if card.model.base_model else ""
    yield (
        f"It has learned from {before}{names} and from nothing else: expect it to be weaker on other subjects, styles "
        f"and lengths, to repeat what is wrong or unfair in that text, and at times to leave out, add or invent. "
        f"Have a person check what matters. The scores hold for the sets above only."
    )
