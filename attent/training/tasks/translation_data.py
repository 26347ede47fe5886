"""Data of a translation run: corpora, a held-out validation set, a tokenizer, token stores, batches.

Everything is cached in the run's `state/data` by the contents of the files, so that a resumed run only opens it.
General text may be mixed in when a translator is fine-tuned, so that it stays good at what it could do before: that of
`--replay`, or the sample that the model folder stores of its training data (`--store-sample`).
"""

import gzip
import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from attent.data.augment import KINDS, OFF, TAGS, Augmenter
from attent.data.batch_plan import BatchConfig
from attent.data.corpus import Corpus, describe_wrong_languages, open_corpora
from attent.data.encode import EncodingConfig, learn_tokenizer
from attent.data.filters import FilterConfig
from attent.data.formats import streams
from attent.data.formats.placeholders import INLINE_TAGS
from attent.data.formats.registry import ParallelFile
from attent.data.loader import PairLoader
from attent.data.pairs import BadLine, CorpusError, LanguageMismatchError, LanguagePair, Pair, ReasonTally
from attent.data.split import default_validation_size, hold_out, summarize_split
from attent.data.token_store import EpochStores, TokenStore, prepare_store
from attent.formatting import format_precise_percent
from attent.models.folder import read_side_file
from attent.storage.atomic import write_atomic
from attent.storage.hub import locate_model
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import SEPARATOR, has_separator
from attent.training.autoconfig import DataSize
from attent.training.config import DataConfig, RunConfig, TrainConfig, TrainError
from attent.training.synthetic_pairs import BACK_TRANSLATION_TAG, add_synthetic_corpora
from attent.training.tasks import base
from attent.training.tasks.generation_task import EvalSet

SAMPLE_FILE = "sample.tsv.gz"
LANGUAGE_SAMPLE_SIZE = 2_000  # pairs that are compared with their languages
MAX_DROPPED_SHARE = 0.01  # of the lines, for one reason, without a warning
FILTER_OFF_VALUES = {
    "length_ratio": "0", "max_chars": "0", "identical": "false", "script": "false", "control": "false",
}  # fmt: skip


def fetch_sample(init_from: str | None, context: base.RunContext) -> Path | None:
    """Copy the sample of the pretrained model into a new run, which resumes without that model; None if it has none."""
    path = context.data_dir / SAMPLE_FILE
    if context.is_new:
        content = read_side_file(locate_model(init_from), SAMPLE_FILE) if init_from else None
        path.unlink(missing_ok=True)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
    return path if path.exists() else None


def open_general_corpora(
    config: DataConfig, languages: LanguagePair, sample: Path | None, context: base.RunContext
) -> list[Corpus]:
    """Open the corpora of `--replay`, or the sample; their weights are ratios to the new pairs."""
    if config.replay == (OFF,) or not (config.replay or sample):
        return []
    corpora = open_corpora(config.replay or [str(sample)], languages, config.read_options, context.warn)
    if config.replay:
        return corpora
    try:
        next(iter(corpora[0]), None)
    except LanguageMismatchError as error:
        context.note(f"not replaying the sample that the model's folder stores: {error.problem}")
        return []
    context.note("replaying the sample of its training data that the model's folder stores (--replay none: do not)")
    return corpora


def set_ratio(general: Sequence[Corpus], num_new: float, num_general: int) -> list[Corpus]:
    """Return the general corpora with the weight that gives their ratio to the new pairs in each epoch."""
    if not num_general:
        names = ", ".join(corpus.name for corpus in general)
        raise TrainError(f"`data.replay` must have sentence pairs, but {names} has none; give other text, or none")
    return [replace(corpus, weight=corpus.weight * num_new / num_general) for corpus in general]


def encode_sample(corpora: Sequence[Corpus], count: int, seed: int) -> bytes:
    """Return a sample of the training pairs as compressed TSV; the seed and the corpus weights decide which."""
    languages = {corpus.languages for corpus in corpora}
    (pair_languages, *others) = languages
    if others:
        raise TrainError("`data.store_sample` must be 0 with several language pairs: one file cannot hold them")
    rng = random.Random(seed)
    # Weighted sampling without replacement (Efraimidis and Spirakis 2006).
    keyed = (
        (rng.random() ** (1 / corpus.weight), index, pair)
        for corpus in corpora
        for index, pair in enumerate(corpus)
        if isinstance(pair, Pair)
    )
    sample = [pair for *_, pair in heapq.nlargest(count, keyed, key=lambda item: item[:2])]
    header = "\t".join(pair_languages.tags) if not pair_languages.is_open else ""
    rows = ("\t".join(" ".join(text.split()) for text in (pair.source, pair.target)) for pair in sample)
    return gzip.compress("".join(f"{row}\n" for row in filter(None, (header, *rows))).encode(), mtime=0)


@dataclass(frozen=True, kw_only=True)
class CorpusSplits:
    train: list[Corpus]  # with the general text of `--replay`
    valid: list[Corpus]
    replay_valid: list[Corpus] = field(default_factory=list)  # of the general text
    tests: list[Corpus]
    held_out: bool  # `valid` was taken from the training data
    use_tags: bool
    has_replay: bool = False

    @property
    def languages(self) -> LanguagePair:
        """All languages, joined by commas; None where unknown."""
        sources = dict.fromkeys(corpus.languages.source for corpus in self.train)
        targets = dict.fromkeys(corpus.languages.target for corpus in self.train)
        return LanguagePair(*(",".join(filter(None, side)) or None for side in (sources, targets)))


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    splits: CorpusSplits
    tokenizer: Tokenizer
    encoding: EncodingConfig
    store: TokenStore
    valid_store: TokenStore | None
    data_dir: Path

    @property
    def data_size(self) -> DataSize:
        weights = [corpus.weight for corpus in self.splits.train]
        pairs = [part.pairs for part in self.store.meta.parts]
        mean_weight = sum(w * n for w, n in zip(weights, pairs, strict=True)) / max(1, sum(pairs))
        num_tokens = round(mean_weight * max(self.store.meta.token_counts.values()))
        return DataSize(num_examples=len(self.store), num_tokens=num_tokens)


def prepare_data(run: RunConfig, tokenizer: Tokenizer | None, context: base.RunContext) -> PreparedData:
    if run.init_from is None and run.data.replay not in ((), (OFF,)):
        raise TrainError("`data.replay` needs a model to fine-tune, but there is none; name one with --from")
    splits = load_corpora(run.data, run.train.seed, context, fetch_sample(run.init_from, context))
    return prepare_tokens(splits, tokenizer, run.data, context)


def load_corpora(
    config: DataConfig, seed: int, context: base.RunContext, replay_sample: Path | None = None
) -> CorpusSplits:
    """Open the named corpora and their sibling files, and hold out a validation set if there is none."""
    languages = LanguagePair(config.src, config.tgt)
    general = open_general_corpora(config, languages, replay_sample, context)
    train_names = base.spool_stdin(config.train, context.data_dir)

    def open_in_order(names: Sequence[str]) -> list[Corpus]:
        corpora = open_corpora(names, languages, config.read_options, context.warn)
        return [replace(corpus, context=config.context) for corpus in corpora]

    train = open_in_order(train_names)
    for corpus in train:
        pairs = list(islice((entry for entry in corpus if isinstance(entry, Pair)), LANGUAGE_SAMPLE_SIZE))
        if pairs and (problem := describe_wrong_languages(corpus, pairs, "train")):
            context.warn(problem)
    targets = {corpus.languages.target for corpus in train}
    use_tags = len(targets) > 1 if config.tags is None else config.tags
    tests, valid = (
        open_in_order(names) if names else list(_find_siblings([*train, *general] if split == "test" else train, split))
        for names, split in ((config.test, "test"), (config.valid, "valid"))
    )
    tests = [corpus for corpus in tests if _accept_test_set(corpus, bool(config.test), context)]
    held_out = not valid and config.hold_out != 0
    if held_out and train:
        train, general, valid = _split_validation(train, general, config.hold_out, seed, context)
    train = add_synthetic_corpora(config, train, [*valid, *tests], seed, context)
    if held_out and not valid:
        context.note(
            "the validation pairs are synthetic: scores compare with the model that made them, not with people"
        )
        train, general, valid = _split_validation(train, general, config.hold_out, seed, context)
    replay_valid = list(_find_siblings(general, "valid"))
    if general and not replay_valid and config.hold_out != 0:
        general, train, replay_valid = _split_validation(general, train, config.hold_out, seed, context)
    if general:
        num_new = sum(corpus.weight * _count_pairs([corpus])[0] for corpus in train)
        general = set_ratio(general, num_new, _count_pairs(general)[0])
    return CorpusSplits(
        train=[*train, *general],
        valid=valid,
        replay_valid=replay_valid,
        tests=tests,
        held_out=held_out,
        use_tags=use_tags,
        has_replay=bool(general),
    )


def _find_siblings(train: Sequence[Corpus], split: str) -> Iterator[Corpus]:
    """Yield each sibling file or pair of files of a split once, under its name, with that of its folder if needed."""
    parts: dict[tuple[ParallelFile, LanguagePair], Corpus] = {}
    for corpus in train:
        sibling = corpus.get_sibling_split(split)
        for part in sibling.parallel_files if sibling else ():
            parts.setdefault((part, corpus.languages), corpus)
    paths = {part: Path(part.files[0].name) for part, _ in parts}
    counts = Counter(path.name.split(".")[0] for path in paths.values())
    for (part, _), corpus in parts.items():
        name = paths[part].name.split(".")[0]
        name = name if counts[name] == 1 else f"{paths[part].parent.name}/{name}"
        yield replace(corpus, name=name, weight=1.0, parallel_files=(part,), sibling_files=(), ignored_files=())


def _accept_test_set(corpus: Corpus, requested: bool, context: base.RunContext) -> bool:
    """Read a test set to its end, to report a problem now and not after hours of training; return whether to use it."""
    try:
        num_pairs, bad_lines = _count_pairs([corpus], need_source=True)
        if num_pairs:
            _warn_dropped(f"the test set {corpus.name}", num_pairs, bad_lines, context)
            return True
        reasons = f": {bad_lines.describe()}" if bad_lines.counts else ""
        problem = f"{', '.join(corpus.file_names)}: this test set contains no sentence pairs{reasons}"
    except CorpusError as error:
        problem = str(error)
    base.reject_or_skip_test_set(problem, requested, context)
    return False


def _count_pairs(corpora: Sequence[Corpus], *, need_source: bool = False) -> tuple[int, ReasonTally[str]]:
    """Return the number of pairs, and the lines that are no pairs or, if it is needed, have an empty source."""
    num_pairs, bad_lines = 0, ReasonTally[str]()
    for corpus in corpora:
        for entry in corpus:
            if isinstance(entry, BadLine):
                bad_lines.add(entry.reason, f"{entry.file}:{entry.line}")
            elif need_source and not entry.source.strip():
                bad_lines.add("without a source", f"{entry.file}:{entry.line}")
            else:
                num_pairs += 1
    return num_pairs, bad_lines


def _warn_dropped(name: str, num_pairs: int, dropped: ReasonTally[str], context: base.RunContext) -> None:
    """Warn of every reason for which more than a hundredth of the lines is not used."""
    num_dropped = dropped.counts.total()
    if reasons := dropped.describe(min_count=math.floor(MAX_DROPPED_SHARE * (num_pairs + num_dropped)) + 1):
        share = format_precise_percent(num_dropped / (num_pairs + num_dropped))
        context.warn(
            f"{name}: {num_dropped:,} of {num_pairs + num_dropped:,} lines ({share}) are not used: {reasons}; "
            f"{_advise(dropped)}"
        )


def _advise(dropped: ReasonTally[str]) -> str:
    is_encoding = streams.NOT_UTF8 in dropped.counts
    return "save the file as UTF-8" if is_encoding else "`attent data` shows more"


def _split_validation(
    train: list[Corpus], others: list[Corpus], requested_count: int | None, seed: int, context: base.RunContext
) -> tuple[list[Corpus], list[Corpus], list[Corpus]]:
    """Return the training parts of both lists, which share no text with the third, the held-out part of `train`."""
    num_pairs, bad_lines = _count_pairs(train)
    if not num_pairs:
        names = ", ".join(corpus.name for corpus in train)
        reasons = bad_lines.describe() or "a line needs a source and a target"
        raise TrainError(f"{names}: contains no sentence pairs: {reasons}; {_advise(bad_lines)}")
    size = default_validation_size(num_pairs) if requested_count is None else requested_count
    base.check_hold_out(size, num_pairs, "pairs")
    parts, held_out = hold_out(train, size, seed, others)
    train, others = parts[: len(train)], parts[len(train) :]
    context.note(f"{summarize_split(train, held_out)} (name your own with --valid)")
    return train, others, held_out


def _train_tokenizer(splits: CorpusSplits, config: DataConfig, context: base.RunContext) -> Tokenizer:
    """Train a tokenizer with the symbols of back-translation, inline tags and context, on augmented text.

    It depends on the seed only by the held-out pairs, so that models of several seeds can form an ensemble.
    """
    context.note("training the tokenizer ...")
    symbols = [*config.tokenizer.symbols]
    if config.synthetic is not None and config.synthetic.mono_target:
        symbols.append(BACK_TRANSLATION_TAG)
    if TAGS in config.augment_rates:
        symbols += INLINE_TAGS
    if config.context:
        symbols.append(SEPARATOR)
    settings = replace(config.tokenizer, symbols=tuple(dict.fromkeys(symbols)))
    rates = {name: rate for name, rate in config.augment_rates.items() if KINDS[name].has_other_subwords}
    augmenter = Augmenter(rates) if rates else None
    tokenizer = learn_tokenizer(splits.train, settings, language_tags=splits.use_tags, augmenter=augmenter)
    sides = [tokenizer.source] if tokenizer.joint else [tokenizer.source, tokenizer.target]
    sizes = " and ".join(f"{side.size:,}" for side in sides)
    context.note(f"tokenizer: {config.tokenizer.kind}, {sizes} subwords")
    return tokenizer


def prepare_tokens(
    splits: CorpusSplits, tokenizer: Tokenizer | None, config: DataConfig, context: base.RunContext
) -> PreparedData:
    """Train a tokenizer unless there is one, and encode the training and validation data."""
    if tokenizer is None:
        tokenizer = _train_tokenizer(splits, config, context)
    if config.context and not has_separator(tokenizer.source):
        raise TrainError(
            f"`data.context` needs a tokenizer with {SEPARATOR}, but this one has none; train from scratch, or leave "
            f"it out"
        )
    for corpus in splits.train if splits.use_tags else ():
        target, tags = corpus.languages.target, tokenizer.source.tags
        if target is not None and target not in tags:
            known = ", ".join(tags) or "none"
            raise TrainError(f"the tokenizer has no tag for `{target}`: it has {known}; train one that does")
    encoding = EncodingConfig(tokenizer=tokenizer, filters=config.filters, language_tags=splits.use_tags)
    progress = context.track_progress("encoding", "pairs")
    store = prepare_store(splits.train, encoding, context.data_dir, progress=progress)
    if not len(store):
        reasons = _merge_dropped(store).describe() or "the corpus is empty"
        names = " ".join(part.name for part in store.meta.parts)
        raise TrainError(
            f"no pairs are left to train on: {reasons}; `attent data {names}` shows why, "
            "and `--set data.filters.NAME=false` turns a filter off"
        )
    _report_store(store, context)
    valid_store = None
    if valid := [*splits.valid, *splits.replay_valid]:
        valid_encoding = replace(encoding, filters=replace(FilterConfig.disabled(), empty=True))
        valid_store = prepare_store(valid, valid_encoding, context.data_dir)
        names, dropped = ", ".join(corpus.name for corpus in valid), _merge_dropped(valid_store)
        if not len(valid_store):
            reasons = f": {dropped.describe()}" if dropped.counts else ""
            raise TrainError(f"{names}: there is no pair to validate on{reasons}")
        _warn_dropped(f"the validation set {names}", len(valid_store), dropped, context)
    return PreparedData(
        splits=splits,
        tokenizer=tokenizer,
        encoding=encoding,
        store=store,
        valid_store=valid_store,
        data_dir=context.data_dir,
    )


def _merge_dropped(store: TokenStore) -> ReasonTally[str]:
    dropped = ReasonTally[str]()
    for part in store.meta.parts:
        dropped.counts.update(part.dropped)
        for reason, locations in part.examples.items():
            dropped.examples.setdefault(reason, []).extend(locations)
    return dropped


def _report_store(store: TokenStore, context: base.RunContext) -> None:
    """Report what is used and dropped; a filter that drops half of a corpus may be wrong for it."""
    dropped = _merge_dropped(store)
    counts = ", ".join(f"{count:,} {reason}" for reason, count in dropped.counts.most_common(4))
    dropped_text = f"; dropped: {counts} (`attent data` shows which)" if counts else ""
    context.note(f"data: {len(store):,} pairs for training{dropped_text}")
    _warn_dropped("the training data", len(store), dropped, context)
    reason, count = next(iter(dropped.counts.most_common(1)), ("", 0))
    if reason in FILTER_OFF_VALUES and count > len(store):
        context.warn(
            f"most pairs were dropped by one filter, {count:,} by `{reason}`; if they are correct, turn it "
            f"off: --set data.filters.{reason}={FILTER_OFF_VALUES[reason]}"
        )


def build_train_batches(prepared: PreparedData, data: DataConfig, train: TrainConfig) -> PairLoader:
    """The training batches; every rank makes the same ones and takes its share of each."""
    config = base.build_batch_config(data, train, data.max_tokens, data.too_long)
    stores = None
    if rates := data.augment_rates:
        encoding = replace(prepared.encoding, augmenters=learn_augmenters(prepared.splits.train, rates))
        stores = EpochStores(prepared.splits.train, encoding, prepared.data_dir / "epochs", train.seed)
    weights = [corpus.weight for corpus in prepared.splits.train]
    return PairLoader(prepared.store, config, seed=train.seed, weights=weights, store_for_epoch=stores)


def learn_augmenters(corpora: Sequence[Corpus], rates: dict[str, float]) -> dict[LanguagePair, Augmenter]:
    """Return an augmenter for each language pair."""
    augmenters = {}
    for languages in dict.fromkeys(corpus.languages for corpus in corpora):
        entries = chain.from_iterable(corpus for corpus in corpora if corpus.languages == languages)
        pairs = ((entry.source, entry.target) for entry in entries if isinstance(entry, Pair))
        augmenters[languages] = Augmenter.learn(rates, pairs)
    return augmenters


def build_valid_batches(store: TokenStore, max_tokens: int) -> PairLoader:
    """Batches of every pair once: `max_tokens` is raised to the length of the longest."""
    max_tokens = max(int(store.source.lengths.max()), int(store.target.lengths.max()), max_tokens)
    batch_tokens = max(base.VALID_BATCH_TOKENS, max_tokens)
    config = BatchConfig(batch_tokens=batch_tokens, max_tokens=max_tokens, layout="bucketed")
    return PairLoader(store, config, seed=0)


def read_eval_set(corpora: Sequence[Corpus], use_tags: bool, split: base.Split) -> EvalSet:
    """The pairs of corpora as text, to translate and score."""
    pairs = [
        (pair, corpus.languages.target)
        for corpus in corpora
        for pair in corpus
        if isinstance(pair, Pair) and pair.source.strip()
    ]
    languages = [language for _, language in pairs]
    if not use_tags and len(set(languages)) > 1:
        languages = [None] * len(pairs)
    name = ", ".join(dict.fromkeys(corpus.name for corpus in corpora))
    if use_tags and len(corpora) == 1:  # the same name for each language pair of a file
        name += " " + "-".join(corpora[0].languages.tags)
    return EvalSet(
        name=name,
        split=split,
        data=corpora,
        ids=np.arange(len(pairs)),
        languages=tuple(languages),
        references=tuple(pair.target.strip() for pair, _ in pairs),
        titles=tuple(pair.context + pair.source.strip() for pair, _ in pairs),
    )
