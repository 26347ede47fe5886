"""From what a person named to what the loop needs: corpora, a validation part, a tokenizer, token stores.

Everything is kept in the run's own `state/data`, by the contents of the files: the second time it is only opened.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attent.data.batch_plan import BatchConfig
from attent.data.corpus import Corpus, open_corpora
from attent.data.encode import EncodingConfig, learn_tokenizer
from attent.data.filters import FilterConfig
from attent.data.loader import PairLoader
from attent.data.pairs import CorpusError, LanguagePair, Pair
from attent.data.split import default_validation_size, hold_out, summarize_split
from attent.data.token_store import ResampledStores, TokenStore, prepare_store
from attent.text.tokenizer import SubwordSampling, Tokenizer
from attent.training.autoconfig import DataSize
from attent.training.config import DataConfig, TrainConfig, TrainError
from attent.training.events import EventHandler, Note

REPORT_SECONDS = 5.0  # seconds between two words about tokenising
FILTER_OFF_VALUES = {"ratio": "0", "longest": "0", "identical": "false", "script": "false", "control": "false"}


@dataclass(frozen=True, kw_only=True)
class CorpusSplits:
    """The text of a run."""

    train: list[Corpus]
    valid: list[Corpus]
    tests: list[Corpus]
    held_out: bool  # the validation part was taken from the training data
    use_tags: bool

    @property
    def languages(self) -> LanguagePair:
        """Of all, joined by commas; None where no file and nobody said it."""
        sources = dict.fromkeys(corpus.languages.source for corpus in self.train)
        targets = dict.fromkeys(corpus.languages.target for corpus in self.train)
        return LanguagePair(*(",".join(filter(None, side)) or None for side in (sources, targets)))


@dataclass(frozen=True, kw_only=True)
class EvalTexts:
    """Pairs as text, to be translated and compared."""

    name: str
    sources: list[str]
    references: list[str]
    target_languages: list[str | None]  # the language of each target, where sources are tagged with it
    language: str | None  # of the targets, for the metric


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
        share = sum(w * n for w, n in zip(weights, pairs, strict=True)) / max(1, sum(pairs))
        return DataSize(
            num_examples=len(self.store), num_tokens=round(share * max(self.store.meta.token_counts.values()))
        )


def load_corpora(config: DataConfig, data_dir: Path, seed: int, report: EventHandler) -> CorpusSplits:
    """The corpora that the names mean, and the part to validate on."""
    languages = LanguagePair(config.src, config.tgt)
    train = open_corpora(spool_stdin(config.train, data_dir), languages, config.reading)
    targets = {corpus.languages.target for corpus in train}
    tags = len(targets) > 1 if config.tags is None else config.tags
    tests = open_corpora(config.test, languages, config.reading) if config.test else list(_find_beside(train, "test"))
    tests = [corpus for corpus in tests if _is_scorable(corpus, bool(config.test), report)]
    valid = (
        open_corpora(config.valid, languages, config.reading) if config.valid else list(_find_beside(train, "valid"))
    )
    held_out = not valid and config.hold_out != 0
    if held_out:
        train, valid = _split_validation(train, config.hold_out, seed, report)
    return CorpusSplits(train=train, valid=valid, tests=tests, held_out=held_out, use_tags=tags)


def spool_stdin(names: Sequence[str], data_dir: Path) -> list[str]:
    """Standard input can be read once only: it is written to a file first, from which a resumed run goes on."""
    copy = data_dir / "stdin"
    if "-" in names and not copy.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        aside = copy.with_suffix(".part")
        with open(aside, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        aside.rename(copy)
    return [str(copy) if name == "-" else name for name in names]


def _find_beside(train: Sequence[Corpus], split: str) -> Iterator[Corpus]:
    """Each file or pair of files for `split` that lies beside the corpora, once, under its own name."""
    seen = set()
    for corpus in train:
        other = corpus.get_sibling_split(split)
        for part in other.parallel_files if other else ():
            if (part, corpus.languages) not in seen:
                seen.add((part, corpus.languages))
                name = Path(part.files[0].name).name.split(".")[0]
                yield replace(corpus, name=name, weight=1.0, parallel_files=(part,), sibling_files=(), ignored_files=())


def _is_scorable(corpus: Corpus, is_requested: bool, report: EventHandler) -> bool:
    """Whether a test set can be read to its end: told now, and not after hours of training."""
    try:
        pairs = sum(isinstance(entry, Pair) and bool(entry.source.strip()) for entry in corpus)
        problem = None if pairs else f"{', '.join(corpus.file_names)}: there is not one pair in this test set"
    except CorpusError as error:
        problem = str(error)
    if problem and is_requested:
        raise TrainError(problem)
    if problem:
        report(Note(text=f"{problem}; it lies beside the data, and is not scored", level="warning"))
    return problem is None


def _split_validation(
    train: list[Corpus], requested_count: int | None, seed: int, report: EventHandler
) -> tuple[list[Corpus], list[Corpus]]:
    pairs = sum(isinstance(entry, Pair) for corpus in train for entry in corpus)
    if not pairs:
        names = ", ".join(corpus.name for corpus in train)
        raise TrainError(
            f"{names}: there is not one pair to train on: a line needs a source and a target; `attent data` shows more"
        )
    size = default_validation_size(pairs) if requested_count is None else requested_count
    if size >= pairs:
        raise TrainError(
            f"`data.hold_out` must be less than the {pairs:,} pairs there are, but is {size:,}; add pairs, name a "
            "validation set with --valid, or train without one (--hold-out 0)"
        )
    kept, held = hold_out(train, size, seed)
    report(Note(text=f"{summarize_split(kept, held)} (name your own with --valid)"))
    return kept, held


def prepare_tokens(
    splits: CorpusSplits,
    tokenizer: Tokenizer | None,
    config: DataConfig,
    data_dir: Path,
    seed: int,
    report: EventHandler,
) -> PreparedData:
    """The tokenizer, learnt unless there is one, and the stores of both parts."""
    if tokenizer is None:
        report(Note(text="learning subwords ..."))
        tokenizer = learn_tokenizer(splits.train, config.tokenizer, language_tags=splits.use_tags, seed=seed)
        kind = (
            f"{tokenizer.source.size:,}"
            if tokenizer.joint
            else f"{tokenizer.source.size:,} and {tokenizer.target.size:,}"
        )
        report(Note(text=f"tokenizer: {config.tokenizer.kind}, {kind} subwords"))
    _check_tags(splits, tokenizer)
    recipe = EncodingConfig(tokenizer=tokenizer, filters=config.filters, language_tags=splits.use_tags)
    store = prepare_store(splits.train, recipe, data_dir, progress=_throttle_progress(report))
    if not len(store):
        raise _no_pairs_error(store)
    report(Note(text=_describe_store(store)))
    if less := _warn_mostly_dropped(store):
        report(Note(text=less, level="warning"))
    valid = None
    if splits.valid:
        valid = prepare_store(
            splits.valid, replace(recipe, filters=replace(FilterConfig.disabled(), empty=True)), data_dir
        )
        if not len(valid):
            raise TrainError(f"{', '.join(c.name for c in splits.valid)}: there is no pair to validate on")
    return PreparedData(
        splits=splits, tokenizer=tokenizer, encoding=recipe, store=store, valid_store=valid, data_dir=data_dir
    )


def _check_tags(splits: CorpusSplits, tokenizer: Tokenizer) -> None:
    if splits.use_tags:
        for corpus in splits.train:
            if corpus.languages.target is not None and corpus.languages.target not in tokenizer.source.tags:
                known = ", ".join(tokenizer.source.tags) or "none"
                raise TrainError(
                    f"the tokenizer has no tag for `{corpus.languages.target}`: it knows {known}; train one that does"
                )


def _throttle_progress(report: EventHandler) -> Callable[[int], None]:
    last = time.monotonic()

    def progress(pairs: int) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            report(Note(text=f"tokenising: {pairs:,} pairs ..."))

    return progress


def _count_dropped(store: TokenStore) -> Counter[str]:
    return sum((Counter(part.dropped) for part in store.meta.parts), Counter())


def _describe_dropped(store: TokenStore, max_reasons: int | None = None) -> str:
    """How many pairs for which reasons, the most frequent first."""
    return ", ".join(f"{count:,} {why}" for why, count in _count_dropped(store).most_common(max_reasons))


def _warn_mostly_dropped(store: TokenStore) -> str | None:
    """Of translations a filter drops few: one that drops half of a corpus may not be meant for it."""
    why, count = next(iter(_count_dropped(store).most_common(1)), ("", 0))
    if why not in FILTER_OFF_VALUES or count <= len(store):
        return None
    reason = " (texts and their summaries differ in length, for one)" if why == "ratio" else ""
    return (
        f"most pairs were left out by one filter, {count:,} by `{why}`; if they are as they should be{reason}, turn it "
        f"off: --set data.filters.{why}={FILTER_OFF_VALUES[why]}"
    )


def _no_pairs_error(store: TokenStore) -> TrainError:
    counts = _describe_dropped(store) or "the corpus is empty"
    names = " ".join(part.name for part in store.meta.parts)
    example = next((places[0] for part in store.meta.parts for places in part.examples.values()), None)
    such = f" (such as {example})" if example else ""
    return TrainError(
        f"no pairs are left to train on: {counts}{such}; `attent data {names}` shows why, "
        "and `--set data.filters.NAME=false` turns a filter off"
    )


def _describe_store(store: TokenStore) -> str:
    counts = _describe_dropped(store, max_reasons=4)
    less = f"; left out: {counts} (`attent data` shows which)" if counts else ""
    return f"data: {len(store):,} pairs to train on{less}"


def build_train_batches(prepared: PreparedData, data: DataConfig, train: TrainConfig) -> PairLoader:
    """The training batches: every process makes the same, and takes its share of each."""
    assert train.batch_tokens is not None
    assert data.layout is not None
    longest = min(data.max_tokens, train.batch_tokens)
    config = BatchConfig(
        batch_tokens=train.batch_tokens, max_tokens=longest, layout=data.layout, too_long=data.too_long
    )
    resampled = None
    if data.subword_sampling:
        sampled = replace(prepared.encoding, subword_sampling=SubwordSampling(rate=data.subword_sampling))
        resampled = ResampledStores(prepared.splits.train, sampled, prepared.data_dir / "epochs", train.seed)
    weights = [corpus.weight for corpus in prepared.splits.train]
    return PairLoader(prepared.store, config, seed=train.seed, weights=weights, store_for_epoch=resampled)


def build_valid_batches(store: TokenStore, min_length: int) -> PairLoader:
    """Each pair once, whatever its length."""
    longest = max(int(store.source.lengths.max()), int(store.target.lengths.max()), min_length)
    return PairLoader(
        store, BatchConfig(batch_tokens=max(4096, longest), max_tokens=longest, layout="bucketed"), seed=0
    )


def read_eval_texts(corpora: Sequence[Corpus], use_tags: bool, max_pairs: int | None = None) -> EvalTexts:
    """The pairs of corpora as text, or an even choice of `most` of them."""
    found = [(pair, one.languages.target) for one in corpora for pair in one if isinstance(pair, Pair)]
    found = [(pair, to) for pair, to in found if pair.source.strip()]
    if max_pairs is not None and len(found) > max_pairs:
        found = [found[len(found) * i // max_pairs] for i in range(max_pairs)]
    targets = {to for _, to in found}
    return EvalTexts(
        name=", ".join(dict.fromkeys(one.name for one in corpora)),
        sources=[pair.source.strip() for pair, _ in found],
        references=[pair.target.strip() for pair, _ in found],
        target_languages=[to if use_tags else None for _, to in found],
        language=targets.pop() if len(targets) == 1 else None,
    )
