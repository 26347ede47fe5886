"""What the tasks on text alone share: files become texts, a validation part and a tokenizer; a model and a recipe are
chosen by the amount; losses are worked out for the scores. What each task makes of it stands in `language`, `masked`,
`corrupted` and `labelled`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from attent.data import labels
from attent.data import texts as reading
from attent.data.encoded import encode
from attent.data.pairs import CorpusError
from attent.data.texts import Form, Texts
from attent.models import Model, ModelConfig, build, folder
from attent.nn import StackConfig
from attent.text.bulk import Sentences
from attent.text.tokenizer import Tokenizer
from attent.text.train import train_one
from attent.text.vocabulary import Vocabulary
from attent.train import card, choose, heads
from attent.train.choose import Amount
from attent.train.config import Asked, Run, Size, TrainConfig, TrainError, kind_of, stacks
from attent.train.events import Note, Tell
from attent.train.loop import Stopping
from attent.train.prepare import spooled
from attent.train.task import Batches, Judge, MakeObjective, Material, Outcome, Place

MOST_STEPS = 300_000
PER_VALIDATION = 4096  # tokens of a batch that is only looked at
CPU_SIZES: tuple[tuple[int, Size], ...] = ((0, "tiny"), (50_000_000, "small"))  # larger ones would take weeks
GPU_SIZES: tuple[tuple[int, Size], ...] = ((0, "tiny"), (500_000, "small"), (100_000_000, "base"))
WIDTHS: tuple[tuple[int, Size], ...] = ((0, "tiny"), (200, "small"), (600, "base"), (900, "big"))


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a task takes by itself: each number by the tokens there are, or by the size of the model."""

    sizes: tuple[tuple[int, Size], ...] = GPU_SIZES
    epochs: tuple[tuple[int, int], ...]
    further_epochs: int
    fewest: int  # updates
    rates: Mapping[Size, float]
    further_rates: Mapping[Size, float]
    dropout: tuple[tuple[int, float], ...]
    batch: Mapping[Size, int]
    warmup: float = 0.1  # of all updates


@dataclass(frozen=True)
class Source:
    """The texts of a run."""

    train: Texts
    valid: Texts | None
    tests: tuple[Texts, ...]
    held_out: bool


def prepare(run: Run, tokenizer: Tokenizer | None, place: Place) -> Material:
    """The material of a task on text alone."""
    from attent.train import corrupted, labelled, language, masked

    made: dict[str, Callable[[Run, Tokenizer | None, Place], Material]] = {
        "lm": language.Language,
        "mlm": masked.Masked,
        "spans": corrupted.Corrupted,
        "classify": labelled.Labelled,
    }
    return made[run.task](run, tokenizer, place)


# ---- files -----------------------------------------------------------------------------------------------------------


def find(run: Run, place: Place, form: Form, *, with_labels: bool = False) -> Source:
    """What was named, what lies beside it, and a part to validate on."""
    suffixes = labels.SUFFIXES if with_labels else reading.SUFFIXES

    def read(paths: Sequence[Path]) -> Texts:
        return labels.read(paths) if with_labels else reading.read(paths, form)

    data = run.data
    found = reading.find(spooled(data.train, place.folder), suffixes)
    train = read(found.train)
    _tell_of(train, found, data.train, place)
    named = reading.listed(data.valid, "valid", suffixes) if data.valid else found.valid
    valid, held_out = read(named) if named else None, False
    if valid is None and data.hold_out != 0:
        train, valid = reading.hold_out(train, data.hold_out, run.train.seed, form)
        held_out = True
        place.tell(Note(text=f"held out {_amount(valid, train)} for validation (name your own with --valid)"))
    tests = tuple(_tests(run, found.test, read, suffixes, place))
    for other in (() if valid is None or held_out else (valid,)) + tests:
        _warn_of_shared(train, other, form, place)
    return Source(train, valid, tests, held_out)


def _tell_of(train: Texts, found: reading.Found, named: Sequence[str], place: Place) -> None:
    """How the files were understood, and what was left out of them."""
    for sentence in train.told:
        place.tell(Note(text=sentence))
    others = {path: part for part in ("valid", "test") for path in getattr(found, part)}
    for path in map(Path, named):
        if part := others.get(path.expanduser()):
            what = "validate on" if part == "valid" else "score at the end"
            place.tell(Note(text=f"{path.name}: is not trained on: by its name it is there to {what}"))
    if train.left_out:
        told = ", ".join(f"{count:,} {reason}" for reason, count in train.left_out.most_common(4))
        place.tell(Note(text=f"lines left out of {train.name}: {told}", weight="warning"))


def _amount(held: Texts, train: Texts) -> str:
    """What was really taken."""
    if held.name.startswith("last part"):
        of = "" if len(held.texts) == 1 else f" of {len(held.texts)} documents, the last part of each"
        return f"the last {held.characters:,} characters" if not of else f"{held.characters:,} characters{of}"
    return f"{len(held.texts):,} of {len(held.texts) + len(train.texts):,} texts"


def _warn_of_shared(train: Texts, other: Texts, form: Form, place: Place) -> None:
    if count := reading.shared(train, other, form):
        what = f"{count:,} of its {len(other.texts):,} texts" if form == "lines" else f"{count:,} of its lines"
        told = f"{other.name}: {what} are in the text to train on, too: its scores are better than they should be"
        place.tell(Note(text=told, weight="warning"))


def _tests(
    run: Run, beside: Sequence[Path], read: Callable[[Sequence[Path]], Texts], suffixes: Sequence[str], place: Place
) -> Iterator[Texts]:
    for path in reading.listed(run.data.test, "test", suffixes) if run.data.test else beside:
        try:
            yield read([path])
        except CorpusError as error:
            if run.data.test:
                raise
            place.tell(Note(text=f"{error}; it lies beside the data, and is not scored", weight="warning"))


def learned(
    run: Run, texts: Texts, tokenizer: Tokenizer | None, place: Place, *, mask: bool = False, sentinels: int = 0
) -> Tokenizer:
    """The tokenizer that there is, or one learned from the texts."""
    if tokenizer is not None:
        return tokenizer
    place.tell(Note(text="learning subwords ..."))
    config = run.data.tokenizer
    made = train_one(texts.texts, config, mask=mask, sentinels=sentinels, seed=run.train.seed)
    what = "characters and bytes" if config.kind == "char" else "subwords"
    place.tell(Note(text=f"tokenizer: {config.kind}, {made.source.size:,} {what}"))
    return made


# ---- the material ----------------------------------------------------------------------------------------------------


class TextTask:
    """What is the same for all of them; see `attent.train.task.Material`."""

    form: ClassVar[Form] = "lines"
    habits: ClassVar[Habits]
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    unit: ClassVar[str] = "text"
    kind: type[Any]
    objective: MakeObjective
    amount: Amount

    def __init__(self, run: Run, source: Source, tokenizer: Tokenizer, place: Place) -> None:
        self.source, self.tokenizer, self.place = source, tokenizer, place
        self.longest = run.data.longest
        self.key = ""
        self._looked_at: dict[int, Batches] = {}
        if run.train.metric not in self.metrics:
            known = " or ".join(self.metrics)
            raise TrainError(f"`train.metric` must be {known} for --task {run.task}, but is {run.train.metric}")

    @property
    def vocabulary(self) -> Vocabulary:
        return self.tokenizer.source

    @property
    def title(self) -> str:
        return self.source.train.name

    @property
    def identity(self) -> Mapping[str, str]:
        valid = self.source.valid
        return {
            "data": self.key,
            "labels": digest(self.source.train.labels),
            "validation part": digest(() if valid is None else (*valid.texts, *valid.labels)),
            "tokenizer": self.tokenizer.fingerprint,
        }

    def encoded(self, texts: Texts) -> Sentences:
        """The ids of each text, kept on disk; the key of those to train on is remembered."""
        sentences, key = encode(
            texts.texts,
            self.vocabulary,
            self.tokenizer.fingerprint,
            self.place.folder,
            running=self.form == "documents",
        )
        if texts is self.source.train:
            self.key = key
        return sentences

    # ---- the model and the recipe ------------------------------------------------------------------------------------

    def fresh(self, size: Size) -> ModelConfig:
        """A model from nothing, of this size."""
        raise NotImplementedError

    def sized(self, run: Run, asked: Asked) -> tuple[Size, ModelConfig, str]:
        cpu = self.place.device.type == "cpu"
        size = run.size or by_amount(CPU_SIZES if cpu else self.habits.sizes, self.amount.tokens)
        told = f"{self.amount.tokens:,} tokens"
        why = "as asked for" if run.size else f"for {told}" + (" on a CPU" if cpu else "")
        said = asked.get("model", {}).get(stacks(kind_of(asked))[0], {})
        rate = by_amount(self.habits.dropout, self.amount.tokens)
        config = choose.model_of_any(asked, with_dropout(self.fresh(size), said.get("dropout", rate)))
        if "dropout" not in said:
            why += f"; dropout {rate:g}" + (", since little text is soon learned by heart" if rate > 0.1 else "")
        return size, config, why

    def further(self, model: Any) -> ModelConfig:
        """The config of the model that is trained further, with the heads that this task needs."""
        config: ModelConfig = model.config
        return config

    def kept(self, model: Any, asked: Asked, where: str) -> ModelConfig:
        config = choose.kept_any(self.further(model), asked, (self.vocabulary.size,), where)
        reach = reach_of(config)
        if reach is not None and reach < self.longest:
            raise TrainError(
                f"`data.longest` must be at most {reach}, the positions that {where} knows, but is {self.longest}; "
                f"give --longest {reach}"
            )
        return config

    def begin(self, config: Any, loaded: Any) -> Model:
        return build(config) if loaded is None else carried(config, loaded)

    def recipe(self, run: Run, size: Size | None, config: Any, *, further: bool) -> TrainConfig:
        train, habits = run.train, self.habits
        size = size or by_amount(WIDTHS, stack_of(config).width)
        batch = train.batch_tokens or (choose.CPU_BATCH if self.place.device.type == "cpu" else habits.batch[size])
        epochs = habits.further_epochs if further else by_amount(habits.epochs, self.amount.tokens)
        an_epoch = self.amount.tokens / (batch * train.accumulate)
        steps = train.steps or min(MOST_STEPS, max(habits.fewest, math.ceil(epochs * an_epoch)))
        warmup = train.warmup if train.warmup is not None else max(1, min(4_000, round(steps * habits.warmup)))
        lr = train.lr or (habits.further_rates if further else habits.rates)[size]
        return choose.filled(train, self.place.device, batch=batch, steps=steps, warmup=warmup, lr=lr)

    def told(self, run: Run, why: str) -> Iterator[str]:
        assert run.model is not None
        stack = stack_of(run.model)
        vocabulary = getattr(run.model, "vocab", 0)
        yield (
            f"model: {f'{run.size}, ' if run.size else ''}{self.layers(run.model)} layers, width {stack.width}, "
            f"{stack.heads} heads, vocabulary {vocabulary:,}; {why}"
        )
        yield from choose.told_recipe(run.train, self.amount)

    def layers(self, config: Any) -> str:
        return f"{stack_of(config).layers}"

    # ---- batches and scores: those who inherit say which -------------------------------------------------------------

    def batches(self, run: Run) -> Batches:
        raise NotImplementedError

    def batches_of(self, texts: Texts) -> Batches:
        """To look at, each text once."""
        raise NotImplementedError

    def looked_at(self, texts: Texts) -> Batches:
        """The same, made once for each part."""
        if id(texts) not in self._looked_at:
            self._looked_at[id(texts)] = self.batches_of(texts)
        return self._looked_at[id(texts)]

    def valid(self, run: Run) -> Batches | None:
        return None if self.source.valid is None else self.looked_at(self.source.valid)

    def judge(self, run: Run) -> Judge | None:
        return None

    def outcomes(self, model: Any, run: Run) -> Iterator[Outcome]:
        if self.source.valid is not None:
            yield self.outcome(model, self.source.valid, "validation")
        for texts in self.source.tests:
            yield self.outcome(model, texts, "test")

    def outcome(self, model: Any, texts: Texts, part: Any) -> Outcome:
        raise NotImplementedError

    def after(self, model: Any, out: Path) -> None:
        """Nothing more."""

    def loss_of(self, model: Any, batches: Batches) -> tuple[float, int]:
        """The sum of the cross-entropy, and over how many."""
        objective = self.objective(model).eval()
        total, units = 0.0, 0
        with torch.no_grad():
            for batch in self.each(batches):
                total += float(objective(batch)[1])
                units += batch.units
        return total, units

    def each(self, batches: Batches) -> Iterator[Any]:
        """Every batch once, on the device."""
        for step in range(batches.steps(0)):
            if self.place.stop():
                raise Stopping
            yield batches.batch(0, step).to(self.place.device)

    # ---- the card ----------------------------------------------------------------------------------------------------

    def data(self) -> card.Data:
        train, valid = self.source.train, self.source.valid
        try:
            files = card.with_checksums([str(path) for path in train.files], train.files)
        except OSError:
            files = tuple((str(path), "") for path in train.files)
        dropped = tuple(train.left_out.items())
        whole = valid is not None and self.source.held_out and not valid.name.startswith("last part")
        if valid is not None and whole:
            dropped += (("held out for validation", len(valid.texts)),)
        used = len(train.texts)
        origin = card.Origin(
            name=train.name, read=used + sum(n for _, n in dropped), used=used, dropped=dropped, files=files
        )
        how = "" if valid is None else f"the {valid.name} of the text" if self.source.held_out else valid.name
        return card.Data(
            origins=(origin,),
            source_tokens=self.amount.tokens,
            target_tokens=0,
            key=self.key,
            held_out=0 if valid is None else len(valid.texts),
            held_out_how=how,
        )


# ---- small things ----------------------------------------------------------------------------------------------------


def digest(texts: Iterable[str]) -> str:
    """Of texts in their order; nothing for none."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text)} {text}\n".encode(errors="surrogatepass"))
    return found.hexdigest()[:24]


def by_amount(table: Sequence[tuple[int, Any]], amount: int) -> Any:
    return next(value for least, value in reversed(table) if amount >= least)


def within_reach(run: Run, asked: Asked, config: ModelConfig, tell: Tell) -> Run:
    """With texts no longer than a model to begin from knows positions, unless a length was asked for."""
    reach = reach_of(config)
    if reach is None or reach >= run.data.longest or "longest" in asked.get("data", {}):
        return run
    tell(Note(text=f"texts of at most {reach} tokens (`longest`): {run.start} knows no more positions"))
    return replace(run, data=replace(run.data, longest=reach))


def reach_of(config: ModelConfig) -> int | None:
    """How many positions a model has learned; None: any number will do."""
    reach: int | None = getattr(stack_of(config).positions, "max_length", None)
    return reach


def stack_of(config: Any) -> StackConfig:
    """The stack, or the first of two."""
    stack: StackConfig = getattr(config, "stack", None) or config.encoder
    return stack


def with_dropout(config: Any, rate: float) -> ModelConfig:
    """On sub-layers, and on whatever else the family drops (attention weights, T5's feed-forwards)."""
    changed = {}
    for name in ("stack", "encoder", "decoder"):
        if (stack := getattr(config, name, None)) is not None:
            more = ("attention_dropout", "activation_dropout", "output_dropout")
            rates = dict.fromkeys((part for part in more if getattr(stack, part)), rate)
            changed[name] = replace(stack, dropout=rate, **rates)
    dropped: ModelConfig = replace(config, **changed)
    return dropped


def carried(config: ModelConfig, loaded: Any) -> Model:
    """A model of this config with the weights of another; heads that it lacks begin anew."""
    model = build(config)
    anew, known = set(heads.new(model, loaded)), loaded.state_dict()
    wanted = {name: parameter.shape for name, parameter in model.named_parameters() if name not in anew}
    taken = {name: known[name] for name in wanted if name in known}
    folder.check_tensors(wanted, taken, "--from")
    model.load_state_dict(taken, strict=False)
    return model.train()


def judging(model: Any) -> Any:
    """In eval mode, and as it was afterwards: a context manager."""
    return _Judging(model)


class _Judging:
    def __init__(self, model: Any) -> None:
        self.model, self.was, self.no_grad = model, model.training, torch.no_grad()

    def __enter__(self) -> Any:
        self.model.eval()
        self.no_grad.__enter__()
        return self.model

    def __exit__(self, *_: object) -> None:
        self.no_grad.__exit__(None, None, None)
        self.model.train(self.was)


def shown(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Ids as a person reads them, masks and sentinels included."""
    pieces = vocabulary.pieces(list(ids))
    if any("▁" in piece for piece in pieces):
        return "".join(pieces).replace("▁", " ").strip()
    return " ".join(pieces).replace(" ##", "")
