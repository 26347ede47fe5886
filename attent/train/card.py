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

from attent import settings
from attent.train.events import Sample

NAME = "card.md"
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!$])")
LONGEST = 400  # characters of a sample; a paragraph belongs in a file of its own

PYTHON = """\
import attent

translator = attent.Translator.load({folder!r})
print(translator.translate(["..."]{to})[0].text)"""


@dataclass(frozen=True, kw_only=True)
class Words:
    """How one speaks of a model: what it is, what it learned from, and which command is made for it."""

    title: str  # "en-de translator"
    unit: str = "pair"  # of what it learned from
    shell: str
    python: str
    try_it: str  # "try it: attent translate runs/en-de"
    loss: str = "target token"  # what the loss is a mean over
    note: str = ""  # beneath the scores
    samples: str = "Sample translations"
    parts: tuple[str, str, str] = ("Source", "Reference", "Output")  # of a sample
    both_sides: bool = True  # what is read has two of them


@dataclass(frozen=True, kw_only=True)
class Origin:
    """One corpus: what was read, and what became of it. `read` is `used` + all of `dropped`."""

    name: str
    read: int
    used: int
    dropped: tuple[tuple[str, int], ...] = ()  # (reason, pairs)
    files: tuple[tuple[str, str], ...] = ()  # (name, SHA-256, "" where it could not be read again)
    weight: float = 1.0  # how often its pairs are seen, beside those of the others


@dataclass(frozen=True, kw_only=True)
class Data:
    origins: tuple[Origin, ...]
    source_tokens: int
    target_tokens: int  # 0 where there is one side only; both 0: they are not counted in tokens
    key: str  # of the token store: the head of a SHA-256 of the text, the filters and the tokenizer
    held_out: int  # pairs that were only validated on
    held_out_how: str  # "chosen from the corpus by a hash of ...", "valid.tsv", or "" where there are none


@dataclass(frozen=True, kw_only=True)
class Model:
    size: str  # "tiny", or "" where none was named
    encoder_layers: int
    decoder_layers: int
    width: int
    heads: int
    inner: int
    parameters: int
    trained: int  # fewer than `parameters` when some were frozen
    vocabulary: int
    tokenizer: str  # "BPE, joint" and the like
    tokenizer_sha256: str
    started_from: str = ""  # the model that was trained further, if any
    pruned: int = 0  # heads that were removed from it, of all layers together


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that matters: its name in run.toml, and why it is so where it was chosen automatically."""

    name: str
    value: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One set of sentences, translated by one set of weights."""

    name: str  # "held-out part", "test_2016_flickr"
    pairs: int
    weights: str  # "best, step 6,800", "average of the last 5", "EMA 0.999"
    decoding: str  # "beam 4, length penalty 0.6"
    loss: float | None = None
    bleu: float | None = None
    chrf: float | None = None
    exact: float | None = None
    signatures: tuple[str, ...] = ()  # sacreBLEU's, in full
    more: tuple[tuple[str, str], ...] = ()  # other figures, as columns: ("Accuracy", "92.1%")


@dataclass(frozen=True, kw_only=True)
class Training:
    updates: int
    epochs: float
    seconds: float
    tokens_per_second: float  # of both sides, without filler
    hardware: str  # "NVIDIA H200, bfloat16, compiled"
    ended: str  # "8,000 updates were done", "no better for 10 validations", "stopped by hand"
    attent: str  # versions
    torch: str
    python: str
    seed: int | None = None
    date: str = ""  # "2026-11-15"


@dataclass(frozen=True, kw_only=True)
class Card:
    folder: str  # as a person would type it
    source: str  # language tag, "" where unknown
    target: str
    data: Data
    model: Model
    recipe: tuple[Setting, ...]
    scores: tuple[Score, ...]  # the first is named at the head
    training: Training
    samples: tuple[Sample, ...] = ()
    curves: str = ""  # the name of the picture beside the card
    to: str | None = None  # what `--to` must say to be given one of its languages; None: it has only one
    task: Words | None = None  # None: it translates

    @property
    def words(self) -> Words:
        return self.task or translator(self.folder, self.source, self.target, self.to)


def translator(folder: str, source: str, target: str, to: str | None) -> Words:
    """How one speaks of a model that translates; `to` is what `--to` must say, None where it has one language only."""
    flag = "" if to is None else f" --to {quoted(to)}"
    return Words(
        title=f"{source}-{target} translator" if source and target else "A text-to-text model",
        shell=f"attent translate {quoted(folder)}{flag} < input.txt > output.txt",
        python=PYTHON.format(folder=folder, to=f", to={to!r}" if to else ""),
        try_it="",
        note="Exact is the share of outputs that are the reference.",
    )


def write(card: Card, path: Path) -> None:
    """Aside first, then renamed: there is never half a card."""
    settings.write_aside(path, text(card).encode(errors="backslashreplace"))


def text(card: Card) -> str:
    sections = (_head, _scores, _use, _data, _model, _recipe, _training, _samples, _limits)
    return "\n\n".join(part for section in sections for part in section(card)) + "\n"


def with_section(card: str, title: str, paragraphs: Iterable[str], before: Sequence[str] = ()) -> str:
    """The text of a card with a section of this title: in place of the one that it had, else before the first of the
    sections `before` that it has, else at the end."""
    section = "\n\n".join([f"## {title}", *paragraphs])
    parts = re.split(r"^(?=## )", card, flags=re.MULTILINE)
    titles = [part.partition("\n")[0].removeprefix("## ") if part.startswith("## ") else "" for part in parts]
    kept = [part for part, name in zip(parts, titles, strict=True) if name != title]
    places = [i for i, name in enumerate(titles) if name == title] or [
        i for i, name in enumerate(titles) if name in before
    ]
    at = places[0] if places else len(kept)
    texts = [part.strip("\n") for part in [*kept[:at], section, *kept[at:]]]
    return "\n\n".join(text for text in texts if text) + "\n"


def with_checksums(names: Sequence[str], paths: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """The files as a card lists them."""
    return tuple((name, sha256(path)) for name, path in zip(names, paths, strict=True))


def sha256(path: Path) -> str:
    """Of the whole file, so that anybody can compare it with their own by `sha256sum`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- sections, in the order in which a person wants them -------------------------------------------------------------


def _head(card: Card) -> Iterator[str]:
    yield f"# {plain(card.words.title)}"
    told = next((f"; {figure} on {plain(score.name)}" for score in card.scores if (figure := headline(score))), "")
    pairs = many(sum(origin.used for origin in card.data.origins), card.words.unit)
    yield f"A Transformer of {short(card.model.parameters)} parameters, trained by attent on {pairs}{told}."


def headline(score: Score) -> str:
    """The figure that says most.

    BLEU counts runs of four words. Where hardly a reference has as many (labels, dates) it is 0 or near it however
    good the outputs are, and then the share of exact ones is the larger of the two.
    """
    if score.more:
        return f"{score.more[0][1]} {score.more[0][0].lower()}"
    if score.exact and score.exact >= (score.bleu or 0.0):
        return f"{score.exact:.1f}% exact"
    if score.chrf and not score.bleu:
        return f"{score.chrf:.1f} chrF"
    return "" if score.bleu is None else f"{score.bleu:.1f} BLEU"


def _scores(card: Card) -> Iterator[str]:
    if not card.scores:
        return
    yield "## Scores"
    words = card.words
    more = list(dict.fromkeys(name for score in card.scores for name, _ in score.more))
    head = ("Set", f"{words.unit.capitalize()}s", "Weights", "Decoding", "Loss", "BLEU", "chrF", "Exact", *more)
    rows = [
        (
            *(score.name, f"{score.pairs:,}", score.weights, score.decoding, *_figures(score)),
            *(dict(score.more).get(name, "") for name in more),
        )
        for score in card.scores
    ]
    yield table(head, rows, right=(1, 4, 5, 6, 7, *range(8, 8 + len(more))))
    has_loss = any(score.loss is not None for score in card.scores)
    told = [f"Loss is cross-entropy in nats per {words.loss}."] if has_loss else []
    told += [words.note] if words.note else []
    if told:
        yield " ".join(told)
    signatures = dict.fromkeys(signature for score in card.scores for signature in score.signatures)
    if signatures:
        yield "sacreBLEU signatures:"
        yield "\n".join(f"- {code(signature)}" for signature in signatures)


def _figures(score: Score) -> tuple[str, ...]:
    return (_value(score.loss, 3), _value(score.bleu, 1), _value(score.chrf, 1), _value(score.exact, 1, "%"))


def _value(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _use(card: Card) -> Iterator[str]:
    yield "## How to use it"
    yield fenced("sh", card.words.shell)
    if card.words.python:
        yield fenced("python", card.words.python)


def quoted(path: str) -> str:
    """As a shell takes it."""
    return path if re.fullmatch(r"[\w./+=:@%-]+", path) else "'" + path.replace("'", "'\\''") + "'"


def _data(card: Card) -> Iterator[str]:
    data = card.data
    yield "## Data"
    rows = [
        (origin.name, f"{origin.read:,}", f"{origin.used:,}", f"{origin.read - origin.used:,}", f"{origin.weight:g}")
        for origin in data.origins
    ]
    read = f"{card.words.unit.capitalize()}s read"
    yield table(("Corpus", read, "Used", "Left out", "Weight"), rows, right=(1, 2, 3, 4))
    reasons = _sum(reason for origin in data.origins for reason in origin.dropped)
    if reasons:
        yield "Left out: " + ", ".join(f"{plain(reason)} ({count:,})" for reason, count in reasons) + "."
    yield "\n".join(
        [
            *_tokens(data),
            f"- Held out for validation: {_held_out(data, card.words.unit)}.",
            f"- Key of the encoded data: {code(data.key)}",
        ]
    )
    files = list(dict.fromkeys(file for origin in data.origins for file in origin.files))  # several may share one
    if files:
        yield table(("File", "SHA-256"), files, literal=(0, 1))


def _tokens(data: Data) -> Iterator[str]:
    if data.target_tokens:
        yield f"- Tokens: {data.source_tokens:,} of the source, {data.target_tokens:,} of the target."
    elif data.source_tokens:
        yield f"- Tokens: {data.source_tokens:,}."


def _held_out(data: Data, unit: str) -> str:
    how = f"; {plain(data.held_out_how)}" if data.held_out_how else ""
    return many(data.held_out, unit) + how if data.held_out else "nothing"


def _sum(reasons: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same reason of several corpora as one; the most frequent first, equal ones by name."""
    totals: dict[str, int] = {}
    for reason, count in reasons:
        totals[reason] = totals.get(reason, 0) + count
    return sorted(((reason, n) for reason, n in totals.items() if n), key=lambda item: (-item[1], item[0]))


def _model(card: Card) -> Iterator[str]:
    model = card.model
    yield "## Model"
    learned = "" if model.trained == model.parameters else f", of which {model.trained:,} were trained"
    layers = ((model.encoder_layers, "encoder"), (model.decoder_layers, "decoder"))
    rows = [
        ("Size", model.size),
        ("Layers", ", ".join(f"{n} {name}" for n, name in layers if n)),
        ("Width", f"{model.width:,}, feed-forward {model.inner:,}, {many(model.heads, 'head')}"),
        ("Parameters", f"{model.parameters:,}{learned}"),
        ("Vocabulary", f"{model.vocabulary:,}" if model.vocabulary else ""),
        ("Tokenizer", model.tokenizer),
        ("Tokenizer SHA-256", model.tokenizer_sha256),
        ("Trained further from", model.started_from),
        ("Heads pruned before", f"{model.pruned:,}" if model.pruned else ""),
    ]
    yield table(("", ""), [row for row in rows if row[1]])


def _recipe(card: Card) -> Iterator[str]:
    if card.recipe:
        yield "## Recipe"
        rows = [(one.name, one.value, one.reason) for one in card.recipe]
        yield table(("Setting", "Value", "Why"), rows, literal=(0, 1))
        yield "Every setting is in `run.toml` beside this card."


def _training(card: Card) -> Iterator[str]:
    ran = card.training
    yield "## Training"
    rows = [
        ("Updates", f"{ran.updates:,} ({ran.epochs:.1f} epochs)"),
        ("Ended because", ran.ended),
        ("Time", duration(ran.seconds)),
        ("Speed", f"{ran.tokens_per_second:,.0f} tokens a second{', both sides' * card.words.both_sides}"),
        ("Hardware", ran.hardware),
        ("Versions", f"attent {ran.attent}, torch {ran.torch}, Python {ran.python}"),
        ("Seed", "" if ran.seed is None else str(ran.seed)),
        ("Date", ran.date),
    ]
    yield table(("", ""), [row for row in rows if row[1]])
    if card.curves:
        yield f"![Losses and scores over the updates]({card.curves})"


def _samples(card: Card) -> Iterator[str]:
    if card.samples:
        yield f"## {card.words.samples}"
        yield "Of held-out text, taken as they came and not chosen."
        yield from (_sample(sample, card.words.parts) for sample in card.samples)


def _sample(sample: Sample, names: Sequence[str]) -> str:
    rows = zip(names, (sample.source, sample.reference, sample.output), strict=True)
    return "\n".join(f"- **{name}:** {plain(_cut(words))}" for name, words in rows if name)


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"


def _limits(card: Card) -> Iterator[str]:
    yield "## Limits"
    names = ", ".join(plain(origin.name) for origin in card.data.origins)
    before = f"what {plain(card.model.started_from)} had learned, from " if card.model.started_from else ""
    yield (
        f"It has learned from {before}{names} and from nothing else: expect it to be weaker on other subjects, styles "
        f"and lengths, to repeat what is wrong or unfair in that text, and at times to leave out, add or invent. "
        f"Have a person check what matters. The scores hold for the sets above only."
    )


# ---- Markdown and numbers --------------------------------------------------------------------------------------------


def plain(words: str) -> str:
    """Any text as one line that Markdown shows letter by letter, inside of a line or a cell."""
    return SPECIAL.sub(r"\\\1", _line(words))


def _line(words: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in words).split())


def code(words: str) -> str:
    """A span of code; backticks inside need a longer fence around."""
    line = _line(words)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if len(fence) > 1 else f"`{line}`"


def fenced(language: str, lines: str) -> str:
    return f"```{language}\n{lines}\n```"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), literal: Sequence[int] = ()
) -> str:
    """Without the columns in which no row has anything; `right` and `literal` are columns of numbers and of names."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    rule = ["---:" if i in right else "---" for i in kept]
    body = [[_literal(row[i]) if i in literal else plain(row[i]) for i in kept] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ([head[i] for i in kept], rule, *body))


def _literal(words: str) -> str:
    """As code, where a cell can hold that: a bar in it would end the cell, and a backslash cannot be escaped there."""
    return code(words) if _line(words) and not set(words) & set("|\\") else plain(words)


def many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def short(count: int) -> str:
    """2.6 million, 310 thousand, 980."""
    for size, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= size:
            return f"{count / size:.1f} {name}" if count < 10 * size else f"{count / size:,.0f} {name}"
    return str(count)


def duration(seconds: float) -> str:
    """The two units that matter: 3 h 20 min, 7 min 12 s, 4 s."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 3_600 - 0.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"
