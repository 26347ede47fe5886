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

from attent.data import labeled_text
from attent.data import text_corpus as reading
from attent.data.pairs import CorpusError
from attent.data.text_corpus import TextCorpus, TextLayout
from attent.data.token_store import encode_texts
from attent.models import Model, ModelConfig, build, folder
from attent.nn import StackConfig
from attent.text.bulk_encoder import EncodedSentences
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import train_monolingual_tokenizer
from attent.text.vocabulary import Vocabulary
from attent.training import autoconfig, model_card, task_heads
from attent.training.autoconfig import DataSize
from attent.training.config import Run, Size, TrainConfig, TrainError, UserSettings, get_run_class, get_stack_names
from attent.training.events import EventHandler, Note
from attent.training.loop import StopRequested
from attent.training.tasks.base import BatchLoader, Evaluator, FinalScores, ObjectiveFactory, RunContext, Task
from attent.training.tasks.translation_data import spool_stdin

MAX_STEPS = 300_000
VALID_BATCH_TOKENS = 4096  # tokens of a batch that is only looked at
CPU_SIZE_BY_TOKENS: tuple[tuple[int, Size], ...] = ((0, "tiny"), (50_000_000, "small"))  # larger ones would take weeks
GPU_SIZE_BY_TOKENS: tuple[tuple[int, Size], ...] = ((0, "tiny"), (500_000, "small"), (100_000_000, "base"))
SIZE_BY_WIDTH: tuple[tuple[int, Size], ...] = ((0, "tiny"), (200, "small"), (600, "base"), (900, "big"))


@dataclass(frozen=True, kw_only=True)
class TaskDefaults:
    """What a task takes by itself: each number by the tokens there are, or by the size of the model."""

    size_by_tokens: tuple[tuple[int, Size], ...] = GPU_SIZE_BY_TOKENS
    epochs_by_tokens: tuple[tuple[int, int], ...]
    finetune_epochs: int
    min_steps: int  # updates
    lr_by_size: Mapping[Size, float]
    finetune_lr_by_size: Mapping[Size, float]
    dropout_by_tokens: tuple[tuple[int, float], ...]
    batch_tokens_by_size: Mapping[Size, int]
    warmup_ratio: float = 0.1  # of all updates


@dataclass(frozen=True)
class TextSplits:
    """The texts of a run."""

    train: TextCorpus
    valid: TextCorpus | None
    tests: tuple[TextCorpus, ...]
    held_out: bool


def prepare_text_task(run: Run, tokenizer: Tokenizer | None, context: RunContext) -> Task:
    """The material of a task on text alone."""
    from attent.training.tasks import causal_lm, masked_lm, span_corruption, text_classification

    made: dict[str, Callable[[Run, Tokenizer | None, RunContext], Task]] = {
        "lm": causal_lm.CausalLMTask,
        "mlm": masked_lm.MaskedLMTask,
        "spans": span_corruption.SpanCorruptionTask,
        "classify": text_classification.TextClassificationTask,
    }
    return made[run.task](run, tokenizer, context)


# ---- files -----------------------------------------------------------------------------------------------------------


def load_splits(run: Run, context: RunContext, text_format: TextLayout, *, with_labels: bool = False) -> TextSplits:
    """What was named, what lies beside it, and a part to validate on."""
    suffixes = labeled_text.SUFFIXES if with_labels else reading.SUFFIXES

    def read(paths: Sequence[Path]) -> TextCorpus:
        return labeled_text.read_labeled_texts(paths) if with_labels else reading.read_texts(paths, text_format)

    data = run.data
    found = reading.find_text_files(spool_stdin(data.train, context.data_dir), suffixes)
    train = read(found.train)
    _report_files(train, found, data.train, context)
    named = reading.list_eval_files(data.valid, "valid", suffixes) if data.valid else found.valid
    valid, held_out = read(named) if named else None, False
    if valid is None and data.hold_out != 0:
        train, valid = reading.hold_out_texts(train, data.hold_out, run.train.seed, text_format)
        held_out = True
        context.report(
            Note(text=f"held out {_describe_held_out(valid, train)} for validation (name your own with --valid)")
        )
    tests = tuple(_load_tests(run, found.test, read, suffixes, context))
    for other in (() if valid is None or held_out else (valid,)) + tests:
        _warn_contamination(train, other, text_format, context)
    return TextSplits(train, valid, tests, held_out)


def _report_files(
    train: TextCorpus, text_files: reading.TextFiles, requested_files: Sequence[str], context: RunContext
) -> None:
    """How the files were understood, and what was left out of them."""
    for sentence in train.notes:
        context.report(Note(text=sentence))
    others = {path: part for part in ("valid", "test") for path in getattr(text_files, part)}
    for path in map(Path, requested_files):
        if part := others.get(path.expanduser()):
            what = "validate on" if part == "valid" else "score at the end"
            context.report(Note(text=f"{path.name}: is not trained on: by its name it is there to {what}"))
    if train.skipped:
        told = ", ".join(f"{count:,} {reason}" for reason, count in train.skipped.most_common(4))
        context.report(Note(text=f"lines left out of {train.name}: {told}", level="warning"))


def _describe_held_out(held_out: TextCorpus, train: TextCorpus) -> str:
    """What was really taken."""
    if held_out.name.startswith("last part"):
        of = "" if len(held_out.texts) == 1 else f" of {len(held_out.texts)} documents, the last part of each"
        return f"the last {held_out.char_count:,} characters" if not of else f"{held_out.char_count:,} characters{of}"
    return f"{len(held_out.texts):,} of {len(held_out.texts) + len(train.texts):,} texts"


def _warn_contamination(train: TextCorpus, other: TextCorpus, text_format: TextLayout, context: RunContext) -> None:
    if count := reading.count_shared_texts(train, other, text_format):
        what = f"{count:,} of its {len(other.texts):,} texts" if text_format == "lines" else f"{count:,} of its lines"
        told = f"{other.name}: {what} are in the text to train on, too: its scores are better than they should be"
        context.report(Note(text=told, level="warning"))


def _load_tests(
    run: Run,
    default_files: Sequence[Path],
    read: Callable[[Sequence[Path]], TextCorpus],
    suffixes: Sequence[str],
    context: RunContext,
) -> Iterator[TextCorpus]:
    for path in reading.list_eval_files(run.data.test, "test", suffixes) if run.data.test else default_files:
        try:
            yield read([path])
        except CorpusError as error:
            if run.data.test:
                raise
            context.report(Note(text=f"{error}; it lies beside the data, and is not scored", level="warning"))


def get_tokenizer(
    run: Run,
    texts: TextCorpus,
    tokenizer: Tokenizer | None,
    context: RunContext,
    *,
    add_mask: bool = False,
    num_sentinels: int = 0,
) -> Tokenizer:
    """The tokenizer that there is, or one learned from the texts."""
    if tokenizer is not None:
        return tokenizer
    context.report(Note(text="learning subwords ..."))
    config = run.data.tokenizer
    made = train_monolingual_tokenizer(texts.texts, config, mask=add_mask, sentinels=num_sentinels, seed=run.train.seed)
    what = "characters and bytes" if config.kind == "char" else "subwords"
    context.report(Note(text=f"tokenizer: {config.kind}, {made.source.size:,} {what}"))
    return made


# ---- the material ----------------------------------------------------------------------------------------------------


class TextTask:
    """What is the same for all of them; see `attent.train.task.Material`."""

    text_format: ClassVar[TextLayout] = "lines"
    defaults: ClassVar[TaskDefaults]
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    unit: ClassVar[str] = "text"
    model_class: type[Any]
    objective_class: ObjectiveFactory
    data_size: DataSize

    def __init__(self, run: Run, splits: TextSplits, tokenizer: Tokenizer, context: RunContext) -> None:
        self.splits, self.tokenizer, self.context = splits, tokenizer, context
        self.max_tokens = run.data.max_tokens
        self.data_key = ""
        self._eval_batches: dict[int, BatchLoader] = {}
        if run.train.metric not in self.metrics:
            known = " or ".join(self.metrics)
            raise TrainError(f"`train.metric` must be {known} for --task {run.task}, but is {run.train.metric}")

    @property
    def vocabulary(self) -> Vocabulary:
        return self.tokenizer.source

    @property
    def title(self) -> str:
        return self.splits.train.name

    @property
    def fingerprints(self) -> Mapping[str, str]:
        valid = self.splits.valid
        return {
            "data": self.data_key,
            "labels": hash_texts(self.splits.train.labels),
            "validation part": hash_texts(() if valid is None else (*valid.texts, *valid.labels)),
            "tokenizer": self.tokenizer.fingerprint,
        }

    def encode_texts(self, texts: TextCorpus) -> EncodedSentences:
        """The ids of each text, kept on disk; the key of those to train on is remembered."""
        sentences, key = encode_texts(
            texts.texts,
            self.vocabulary,
            self.tokenizer.fingerprint,
            self.context.data_dir,
            as_documents=self.text_format == "documents",
        )
        if texts is self.splits.train:
            self.data_key = key
        return sentences

    # ---- the model and the recipe ------------------------------------------------------------------------------------

    def build_config(self, size: Size) -> ModelConfig:
        """A model from nothing, of this size."""
        raise NotImplementedError

    def choose_model(self, run: Run, requested: UserSettings) -> tuple[Size, ModelConfig, str]:
        cpu = self.context.device.type == "cpu"
        size = run.size or look_up(
            CPU_SIZE_BY_TOKENS if cpu else self.defaults.size_by_tokens, self.data_size.num_tokens
        )
        told = f"{self.data_size.num_tokens:,} tokens"
        why = "as asked for" if run.size else f"for {told}" + (" on a CPU" if cpu else "")
        said = requested.get("model", {}).get(get_stack_names(get_run_class(requested))[0], {})
        rate = look_up(self.defaults.dropout_by_tokens, self.data_size.num_tokens)
        config = autoconfig.build_any_model_config(
            requested, with_dropout(self.build_config(size), said.get("dropout", rate))
        )
        if "dropout" not in said:
            why += f"; dropout {rate:g}" + (", since little text is soon learned by heart" if rate > 0.1 else "")
        return size, config, why

    def adapt_config(self, model: Any) -> ModelConfig:
        """The config of the model that is trained further, with the heads that this task needs."""
        config: ModelConfig = model.config
        return config

    def build_finetune_config(self, model: Any, requested: UserSettings, origin: str) -> ModelConfig:
        config = autoconfig.build_any_finetune_config(
            self.adapt_config(model), requested, (self.vocabulary.size,), origin
        )
        reach = max_positions(config)
        if reach is not None and reach < self.max_tokens:
            raise TrainError(
                f"`data.max_tokens` must be at most {reach}, the positions that {origin} knows, but is {self.max_tokens}; "
                f"give --max-tokens {reach}"
            )
        return config

    def build_model(self, config: Any, pretrained: Any) -> Model:
        return build(config) if pretrained is None else load_pretrained(config, pretrained)

    def fill_train_config(self, run: Run, size: Size | None, config: Any, *, finetune: bool) -> TrainConfig:
        train, habits = run.train, self.defaults
        size = size or look_up(SIZE_BY_WIDTH, get_stack(config).width)
        batch = train.batch_tokens or (
            autoconfig.CPU_BATCH_TOKENS if self.context.device.type == "cpu" else habits.batch_tokens_by_size[size]
        )
        epochs = habits.finetune_epochs if finetune else look_up(habits.epochs_by_tokens, self.data_size.num_tokens)
        an_epoch = self.data_size.num_tokens / (batch * train.accumulate)
        steps = train.steps or min(MAX_STEPS, max(habits.min_steps, math.ceil(epochs * an_epoch)))
        warmup = train.warmup if train.warmup is not None else max(1, min(4_000, round(steps * habits.warmup_ratio)))
        lr = train.lr or (habits.finetune_lr_by_size if finetune else habits.lr_by_size)[size]
        return autoconfig.fill_defaults(
            train, self.context.device, batch_tokens=batch, steps=steps, warmup=warmup, lr=lr
        )

    def describe_choices(self, run: Run, size_reason: str) -> Iterator[str]:
        assert run.model is not None
        stack = get_stack(run.model)
        vocabulary = getattr(run.model, "vocab", 0)
        yield (
            f"model: {f'{run.size}, ' if run.size else ''}{self.describe_layers(run.model)} layers, width {stack.width}, "
            f"{stack.heads} heads, vocabulary {vocabulary:,}; {size_reason}"
        )
        yield from autoconfig.describe_schedule(run.train, self.data_size)

    def describe_layers(self, config: Any) -> str:
        return f"{get_stack(config).layers}"

    # ---- batches and scores: those who inherit say which -------------------------------------------------------------

    def build_train_batches(self, run: Run) -> BatchLoader:
        raise NotImplementedError

    def build_eval_batches(self, texts: TextCorpus) -> BatchLoader:
        """To look at, each text once."""
        raise NotImplementedError

    def get_eval_batches(self, texts: TextCorpus) -> BatchLoader:
        """The same, made once for each part."""
        if id(texts) not in self._eval_batches:
            self._eval_batches[id(texts)] = self.build_eval_batches(texts)
        return self._eval_batches[id(texts)]

    def build_valid_batches(self, run: Run) -> BatchLoader | None:
        return None if self.splits.valid is None else self.get_eval_batches(self.splits.valid)

    def build_evaluator(self, run: Run) -> Evaluator | None:
        return None

    def score_model(self, model: Any, run: Run) -> Iterator[FinalScores]:
        if self.splits.valid is not None:
            yield self.score_texts(model, self.splits.valid, "validation")
        for texts in self.splits.tests:
            yield self.score_texts(model, texts, "test")

    def score_texts(self, model: Any, texts: TextCorpus, split: Any) -> FinalScores:
        raise NotImplementedError

    def write_analysis(self, model: Any, out: Path) -> None:
        """Nothing more."""

    def compute_loss(self, model: Any, batches: BatchLoader) -> tuple[float, int]:
        """The sum of the cross-entropy, and over how many."""
        objective = self.objective_class(model).eval()
        total, units = 0.0, 0
        with torch.no_grad():
            for batch in self.iter_batches(batches):
                total += float(objective(batch)[1])
                units += batch.units
        return total, units

    def iter_batches(self, batches: BatchLoader) -> Iterator[Any]:
        """Every batch once, on the device."""
        for step in range(batches.num_steps(0)):
            if self.context.should_stop():
                raise StopRequested
            yield batches.get_batch(0, step).to(self.context.device)

    # ---- the card ----------------------------------------------------------------------------------------------------

    def describe_data(self) -> model_card.DataSummary:
        train, valid = self.splits.train, self.splits.valid
        try:
            files = model_card.hash_files([str(path) for path in train.files], train.files)
        except OSError:
            files = tuple((str(path), "") for path in train.files)
        dropped = tuple(train.skipped.items())
        whole = valid is not None and self.splits.held_out and not valid.name.startswith("last part")
        if valid is not None and whole:
            dropped += (("held out for validation", len(valid.texts)),)
        used = len(train.texts)
        origin = model_card.CardCorpus(
            name=train.name, read=used + sum(n for _, n in dropped), used=used, dropped=dropped, files=files
        )
        how = "" if valid is None else f"the {valid.name} of the text" if self.splits.held_out else valid.name
        return model_card.DataSummary(
            corpora=(origin,),
            source_tokens=self.data_size.num_tokens,
            target_tokens=0,
            data_key=self.data_key,
            num_held_out=0 if valid is None else len(valid.texts),
            held_out_method=how,
        )


# ---- small things ----------------------------------------------------------------------------------------------------


def hash_texts(texts: Iterable[str]) -> str:
    """Of texts in their order; nothing for none."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text)} {text}\n".encode(errors="surrogatepass"))
    return found.hexdigest()[:24]


def look_up(thresholds: Sequence[tuple[int, Any]], count: int) -> Any:
    return next(value for least, value in reversed(thresholds) if count >= least)


def limit_to_positions(run: Run, requested: UserSettings, config: ModelConfig, report: EventHandler) -> Run:
    """With texts no longer than a model to begin from knows positions, unless a length was asked for."""
    reach = max_positions(config)
    if reach is None or reach >= run.data.max_tokens or "max_tokens" in requested.get("data", {}):
        return run
    report(Note(text=f"texts of at most {reach} tokens (`longest`): {run.init_from} knows no more positions"))
    return replace(run, data=replace(run.data, max_tokens=reach))


def max_positions(config: ModelConfig) -> int | None:
    """How many positions a model has learned; None: any number will do."""
    reach: int | None = getattr(get_stack(config).positions, "max_length", None)
    return reach


def get_stack(config: Any) -> StackConfig:
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


def load_pretrained(config: ModelConfig, pretrained: Any) -> Model:
    """A model of this config with the weights of another; heads that it lacks begin anew."""
    model = build(config)
    anew, known = set(task_heads.find_new_heads(model, pretrained)), pretrained.state_dict()
    wanted = {name: parameter.shape for name, parameter in model.named_parameters() if name not in anew}
    taken = {name: known[name] for name in wanted if name in known}
    folder.check_tensors(wanted, taken, "--from")
    model.load_state_dict(taken, strict=False)
    return model.train()


def eval_mode(model: Any) -> Any:
    """In eval mode, and as it was afterwards: a context manager."""
    return _EvalMode(model)


class _EvalMode:
    def __init__(self, model: Any) -> None:
        self.model, self.was_training, self.no_grad = model, model.training, torch.no_grad()

    def __enter__(self) -> Any:
        self.model.eval()
        self.no_grad.__enter__()
        return self.model

    def __exit__(self, *_: object) -> None:
        self.no_grad.__exit__(None, None, None)
        self.model.train(self.was_training)


def format_ids(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Ids as a person reads them, masks and sentinels included."""
    pieces = vocabulary.to_pieces(list(ids))
    if any("▁" in piece for piece in pieces):
        return "".join(pieces).replace("▁", " ").strip()
    return " ".join(pieces).replace(" ##", "")
