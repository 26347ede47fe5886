"""Common parts of the tasks on text alone: files, validation set, tokenizer, model and schedule, losses."""

import hashlib
import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from attent.data import text_corpus
from attent.data.batch_plan import BatchConfig
from attent.data.encode import add_special_tokens
from attent.data.text_batches import Labeler, TextLoader
from attent.data.text_corpus import TextCorpus, TextLayout
from attent.data.token_store import EncodedTexts, encode_texts
from attent.models import EncoderConfig, ModelConfig, TextEncoder, presets
from attent.nn import LearnedConfig, StackConfig
from attent.nn.eval_mode import eval_mode
from attent.text.bulk_encoder import EncodedSentences
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import Vocabulary
from attent.training import autoconfig
from attent.training import config as run_config
from attent.training.autoconfig import DataSize, look_up
from attent.training.config import RunConfig, Size, TrainConfig, TrainError, UserSettings
from attent.training.events import EventHandler, Note, StopRequested
from attent.training.tasks import base

CPU_SIZE_BY_TOKENS: tuple[tuple[int, Size], ...] = ((0, "tiny"), (50_000_000, "small"))  # larger would take weeks
GPU_SIZE_BY_TOKENS: tuple[tuple[int, Size], ...] = ((0, "tiny"), (500_000, "small"), (100_000_000, "base"))
SIZE_BY_WIDTH: tuple[tuple[int, Size], ...] = ((0, "tiny"), (200, "small"), (600, "base"), (900, "big"))
# Models with one stack: `base` is GPT-2's and BERT's smallest, `small` nanoGPT's for a few megabytes of text.
STACK_BY_SIZE: dict[Size, dict[str, Any]] = {
    "tiny": {"layers": 4, "width": 128, "heads": 4, "ffn_width": 512},
    "small": {"layers": 6, "width": 384, "heads": 6, "ffn_width": 1536},
    "base": {"layers": 12, "width": 768, "heads": 12, "ffn_width": 3072},
    "big": {"layers": 24, "width": 1024, "heads": 16, "ffn_width": 4096},
}


@dataclass(frozen=True, kw_only=True)
class TaskDefaults:
    size_by_tokens: tuple[tuple[int, Size], ...] = GPU_SIZE_BY_TOKENS
    epochs_by_tokens: tuple[tuple[int, int], ...]
    finetune_epochs: int
    min_steps: int
    lr_by_size: Mapping[Size, float]
    finetune_lr_by_size: Mapping[Size, float]
    dropout_by_tokens: tuple[tuple[int, float], ...]
    batch_tokens_by_size: Mapping[Size, int]
    warmup_ratio: float = 0.1


@dataclass(frozen=True)
class TextSplits:
    train: TextCorpus
    valid: TextCorpus | None
    tests: tuple[TextCorpus, ...]
    held_out: bool  # `valid` was taken from the training data


def load_splits(
    run: RunConfig, context: base.RunContext, layout: TextLayout, *, with_labels: bool = False
) -> TextSplits:
    """Read the named files and those in the same folder, and hold out a validation set if there is none."""
    suffixes = text_corpus.LABELED_SUFFIXES if with_labels else text_corpus.SUFFIXES

    def read(paths: Sequence[Path]) -> TextCorpus:
        return text_corpus.read_labeled_texts(paths) if with_labels else text_corpus.read_texts(paths, layout)

    data = run.data
    files = text_corpus.find_text_files(base.spool_stdin(data.train, context.data_dir), suffixes)
    train = read(files.train)
    _report_files(train, files, data.train, context)
    valid, tests = base.load_eval_sets(data, files, suffixes, read, context)
    held_out = valid is None and data.hold_out != 0
    if held_out:
        train, valid = text_corpus.hold_out_texts(train, data.hold_out, run.train.seed, layout)
        amount = f"{len(valid.texts):,} of {len(valid.texts) + len(train.texts):,} texts"
        if valid.name.startswith("last part"):
            amount = f"the last part of each document, {valid.char_count:,} characters,"
        context.note(f"held out {amount} for validation (name your own with --valid)")
    for other in [*([valid] if valid is not None and not held_out else []), *tests]:
        if count := text_corpus.count_shared_texts(train, other, layout):
            part = f"{count:,} of its {len(other.texts):,} texts" if layout == "lines" else f"{count:,} of its lines"
            context.warn(f"{other.name}: {part} are also in the training data, so its scores are too good")
    return TextSplits(train, valid, tuple(tests), held_out)


def _report_files(
    train: TextCorpus, files: text_corpus.TextFiles, requested: Sequence[str], context: base.RunContext
) -> None:
    for sentence in train.notes:
        context.note(sentence)
    for path in map(Path, requested):
        for split, purpose in (("valid", "validation"), ("test", "testing")):
            if path.expanduser() in getattr(files, split):
                context.note(f"{path.name}: not trained on; its name marks it as a {purpose} set")
    if train.skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in train.skipped.most_common(4))
        context.warn(f"{train.name}: skipped lines: {reasons}")


class TextTask(base.Task):
    text_layout: ClassVar[TextLayout] = "lines"
    has_labels: ClassVar[bool] = False
    needs_mask: ClassVar[bool] = False
    target_noun: ClassVar[str] = "tokens"
    size_defaults: ClassVar[TaskDefaults]
    unit = "text"
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    used_settings = frozenset({"data.tokenizer", "data.max_tokens", "data.layout"})

    tokenizer: Tokenizer
    data_size: DataSize

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None, context: base.RunContext) -> None:
        self.context, self.max_tokens, self.data_key = context, run.data.max_tokens, ""
        self._eval_batches: dict[int, base.BatchLoader] = {}
        self.splits = load_splits(run, context, self.text_layout, with_labels=self.has_labels)
        self.on_splits_loaded(run)
        self.tokenizer = tokenizer or self.train_tokenizer(run)
        self.on_tokenizer_ready(run)
        self.encoded_texts = self.prepare_texts(self.splits.train)
        num_examples = len(self.splits.train.texts)
        self.data_size = DataSize(num_examples=num_examples, num_tokens=len(self.encoded_texts.ids))

    def on_splits_loaded(self, run: RunConfig) -> None:
        """Hook: check the texts, and derive from them what the task needs."""

    def on_tokenizer_ready(self, run: RunConfig) -> None:
        """Hook: check the tokenizer, and derive from it what the task needs."""

    def train_tokenizer(self, run: RunConfig) -> Tokenizer:
        return base.train_text_tokenizer(
            self.splits.train.texts,
            run.data.tokenizer,
            self.context,
            run.train.seed,
            mask=self.needs_mask,
            sentinels=self.count_sentinels(run),
        )

    def count_sentinels(self, run: RunConfig) -> int:
        return 0

    @abstractmethod
    def prepare_texts(self, texts: TextCorpus) -> EncodedTexts:
        """Encode texts, split or truncated to `max_tokens`."""

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
            "validation set": hash_texts(() if valid is None else (*valid.texts, *valid.labels)),
            "tokenizer": self.tokenizer.fingerprint,
        }

    def encode_texts(self, texts: TextCorpus) -> EncodedSentences:
        """Token ids of each text, cached on disk; for the training texts, also set `data_key`."""
        sentences, key = encode_texts(
            texts.texts,
            self.vocabulary,
            self.tokenizer.fingerprint,
            self.context.data_dir,
            as_documents=self.text_layout == "documents",
        )
        if texts is self.splits.train:
            self.data_key = key
        return sentences

    @abstractmethod
    def build_config(self, size: Size) -> ModelConfig:
        """The config of a new model."""

    def choose_model(self, run: RunConfig, requested: UserSettings) -> tuple[Size, ModelConfig, str]:
        on_cpu, tokens = self.context.device.type == "cpu", self.data_size.num_tokens
        sizes = CPU_SIZE_BY_TOKENS if on_cpu else self.size_defaults.size_by_tokens
        size = look_up(sizes, tokens) if run.size is None else run.size
        reason = "as requested" if run.size else f"for {tokens:,} tokens" + " on a CPU" * on_cpu
        stack = requested.get("model", {}).get(run_config.get_stack_names(run_config.get_run_class(requested))[0], {})
        dropout = look_up(self.size_defaults.dropout_by_tokens, tokens)
        preset = with_dropout(self.build_config(size), stack.get("dropout", dropout))
        if "dropout" not in stack:
            reason += f"; dropout {dropout:g}" + (", since little text is easily overfitted" if dropout > 0.1 else "")
        return size, run_config.build_model_config(requested, preset), reason

    def adapt_config(self, model: Any) -> ModelConfig:
        return model.config

    @classmethod
    def adapt_run(cls, run: RunConfig, requested: UserSettings, config: ModelConfig, report: EventHandler) -> RunConfig:
        positions = max_positions(config)
        if positions is None or positions >= run.data.max_tokens or "max_tokens" in requested.get("data", {}):
            return run
        report(Note(text=f"texts are limited to {positions} tokens (`max_tokens`), the positions of {run.init_from}"))
        return replace(run, data=replace(run.data, max_tokens=positions))

    def build_finetune_config(self, model: Any, requested: UserSettings, origin: str) -> ModelConfig:
        sizes = (self.vocabulary.size,)
        config = autoconfig.build_finetune_config(self.adapt_config(model), requested, sizes, origin)
        positions = max_positions(config)
        if positions is not None and positions < self.max_tokens:
            raise TrainError(
                f"`data.max_tokens` must be at most {positions}, the positions of {origin}, but is {self.max_tokens}; "
                f"give --max-tokens {positions}"
            )
        return config

    def fill_train_config(self, run: RunConfig) -> TrainConfig:
        train, defaults, device, finetune = run.train, self.size_defaults, self.context.device, bool(run.init_from)
        key = look_up(SIZE_BY_WIDTH, get_stack(run.model).width) if run.size is None else run.size
        default_batch = autoconfig.CPU_BATCH_TOKENS if device.type == "cpu" else defaults.batch_tokens_by_size[key]
        batch = train.batch_tokens or default_batch
        tokens = self.data_size.num_tokens
        epochs = defaults.finetune_epochs if finetune else look_up(defaults.epochs_by_tokens, tokens)
        estimate = math.ceil(epochs * (tokens / (batch * train.accumulate)))
        steps = train.steps or min(autoconfig.MAX_STEPS, max(defaults.min_steps, estimate))
        warmup = train.warmup if train.warmup is not None else max(1, min(4_000, round(steps * defaults.warmup_ratio)))
        lr = train.lr or (defaults.finetune_lr_by_size if finetune else defaults.lr_by_size)[key]
        return autoconfig.fill_defaults(train, device, batch_tokens=batch, steps=steps, warmup=warmup, lr=lr)

    def describe_choices(self, run: RunConfig, size_reason: str) -> Iterator[str]:
        yield autoconfig.describe_model(run, size_reason)
        yield from autoconfig.describe_schedule(run.train, autoconfig.count_batches(run.train, self.data_size))

    @abstractmethod
    def build_eval_batches(self, texts: TextCorpus) -> base.BatchLoader:
        """Batches for validation and scoring: each text once, the same every time."""

    def get_eval_batches(self, texts: TextCorpus) -> base.BatchLoader:
        if id(texts) not in self._eval_batches:
            self._eval_batches[id(texts)] = self.build_eval_batches(texts)
        return self._eval_batches[id(texts)]

    def build_valid_batches(self, run: RunConfig) -> base.BatchLoader | None:
        return None if self.splits.valid is None else self.get_eval_batches(self.splits.valid)

    def build_evaluator(self, run: RunConfig) -> base.Evaluator | None:
        valid = self.splits.valid
        return None if valid is None else lambda model: self.evaluate(model, valid)

    def evaluate(self, model: Any, texts: TextCorpus) -> base.EvalResult:
        return base.EvalResult()

    def score_texts(self, model: Any, texts: TextCorpus, split: base.Split) -> base.FinalScores:
        return self.build_scores(texts, split, *self.compute_loss(model, self.get_eval_batches(texts)))

    def build_scores(self, texts: TextCorpus, split: base.Split, total: float, num_targets: int) -> base.FinalScores:
        loss = total / max(1, num_targets)
        perplexity = math.exp(min(loss, 50.0))
        return base.FinalScores(
            name=texts.name,
            split=split,
            num_examples=len(texts.texts),
            metrics={"loss": loss, "perplexity": perplexity},
            summary=f"loss {loss:.4f}, perplexity {perplexity:.2f} ({num_targets:,} {self.target_noun})",
            extra_columns=(("Perplexity", f"{perplexity:.2f}"),),
        )

    def score_model(self, model: Any, run: RunConfig) -> Iterator[base.FinalScores]:
        if self.splits.valid is not None:
            yield self.score_texts(model, self.splits.valid, "validation")
        for texts in self.splits.tests:
            yield self.score_texts(model, texts, "test")

    def estimate_scoring_seconds(self, model: Any, run: RunConfig) -> float:
        loaders = [self.get_eval_batches(texts) for texts in (self.splits.valid, *self.splits.tests) if texts]
        if not loaders:
            return 0.0
        start = time.monotonic()
        with eval_mode(model), torch.no_grad():
            self.objective_class(model).eval()(loaders[0].get_batch(0, 0).to(self.context.device))
        # Labels are predicted in a second pass.
        return 2 * (time.monotonic() - start) * sum(loader.num_batches(0) for loader in loaders)

    def compute_loss(self, model: Any, batches: base.BatchLoader) -> tuple[float, int]:
        objective = self.objective_class(model).eval()
        total, num_targets = 0.0, 0
        with torch.no_grad():
            for batch in self.iter_batches(batches):
                total += float(objective(batch)[1])
                num_targets += batch.num_targets
        return total, num_targets

    def iter_batches(self, batches: base.BatchLoader) -> Iterator[Any]:
        for batch_index in range(batches.num_batches(0)):
            if self.context.should_stop():
                raise StopRequested
            yield batches.get_batch(0, batch_index).to(self.context.device)

    def describe_data(self) -> base.DataSummary:
        train, valid = self.splits.train, self.splits.valid
        dropped = dict(train.skipped)
        if valid is not None and self.splits.held_out and not valid.name.startswith("last part"):
            dropped["held out for validation"] = len(valid.texts)
        method = "" if valid is None else f"the {valid.name} of the text" if self.splits.held_out else valid.name
        return base.DataSummary(
            corpora=(base.CorpusStats.from_counts(train.name, len(train.texts), dropped, train.files),),
            source_tokens=self.data_size.num_tokens,
            data_key=self.data_key,
            num_held_out=0 if valid is None else len(valid.texts),
            held_out_method=method,
        )


class EncoderTask(TextTask):
    model_class = TextEncoder
    config_class = EncoderConfig

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> EncoderConfig:
        return encoder_config("tiny", vocab)

    @abstractmethod
    def fit_length(self, texts: TextCorpus, sentences: EncodedSentences, max_tokens: int) -> EncodedSentences:
        """Split or truncate texts of more than `max_tokens` tokens."""

    @abstractmethod
    def build_labeler(self, texts: TextCorpus) -> Labeler:
        """Return the function that adds the labels of these texts to a batch."""

    def prepare_texts(self, texts: TextCorpus) -> EncodedTexts:
        """Encode texts, with the tokenizer's special tokens around each."""
        prefix, suffix = self.vocabulary.prefix_ids, self.vocabulary.suffix_ids
        room = self.max_tokens - len(prefix) - len(suffix)
        if room < 1:
            minimum = len(prefix) + len(suffix) + 1
            raise TrainError(f"`data.max_tokens` must be {minimum} or more, but is {self.max_tokens}")
        sentences = self.fit_length(texts, self.encode_texts(texts), room)
        return EncodedTexts.from_sentences(add_special_tokens(sentences, prefix, suffix), self.data_key)

    def build_train_batches(self, run: RunConfig) -> base.BatchLoader:
        config = base.build_batch_config(run.data, run.train, self.max_tokens)
        labeler = self.build_labeler(self.splits.train)
        return TextLoader(self.encoded_texts, config, labeler, pad=self.vocabulary.pad, seed=run.train.seed)

    def build_eval_batches(self, texts: TextCorpus) -> base.BatchLoader:
        tokens = max(base.VALID_BATCH_TOKENS, self.max_tokens)
        config = BatchConfig(batch_tokens=tokens, max_tokens=self.max_tokens, layout="bucketed", too_long="truncate")
        labeler = self.build_labeler(texts)
        return TextLoader(self.prepare_texts(texts), config, labeler, pad=self.vocabulary.pad, fixed=True)


def encoder_config(size: Size, vocab: int, max_tokens: int = 512) -> EncoderConfig:
    positions = LearnedConfig(max_length=max(512, max_tokens))
    return EncoderConfig(vocab=vocab, stack=replace(presets.BERT, positions=positions, **STACK_BY_SIZE[size]))


def hash_texts(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()[:24]


def max_positions(config: ModelConfig) -> int | None:
    """The number of learned positions; None where any length will do."""
    return getattr(get_stack(config).positions, "max_length", None)


def get_stack(config: Any) -> StackConfig:
    return getattr(config, "stack", None) or config.encoder


def with_dropout(config: Any, rate: float) -> ModelConfig:
    stacks = {}
    for name in ("stack", "encoder", "decoder"):
        if (stack := getattr(config, name, None)) is not None:
            optional = ("attention_dropout", "activation_dropout", "output_dropout")
            rates = dict.fromkeys((field for field in optional if getattr(stack, field)), rate)
            stacks[name] = replace(stack, dropout=rate, **rates)
    return replace(config, **stacks)


def format_ids(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    pieces = vocabulary.to_pieces(list(ids))
    if any("▁" in piece for piece in pieces):
        return "".join(pieces).replace("▁", " ").strip()
    return " ".join(pieces).replace(" ##", "")
