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

from attent.data.batches import Batches
from attent.data.corpus import Corpus, corpora
from attent.data.encode import Recipe, learn_tokenizer
from attent.data.filters import Filters
from attent.data.holdout import default_size, hold_out, summary
from attent.data.pairs import CorpusError, Languages, Pair
from attent.data.plan import BatchConfig
from attent.data.store import Resampled, Store, prepare
from attent.text.tokenizer import Sampling, Tokenizer
from attent.train.choose import Amount
from attent.train.config import DataConfig, TrainConfig, TrainError
from attent.train.events import Note, Tell

EVERY = 5.0  # seconds between two words about tokenising
TURNED_OFF = {"ratio": "0", "longest": "0", "identical": "false", "script": "false", "control": "false"}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The text of a run."""

    train: list[Corpus]
    valid: list[Corpus]
    tests: list[Corpus]
    held_out: bool  # the validation part was taken from the training data
    tags: bool

    @property
    def languages(self) -> Languages:
        """Of all, joined by commas; None where no file and nobody said it."""
        sources = dict.fromkeys(corpus.languages.source for corpus in self.train)
        targets = dict.fromkeys(corpus.languages.target for corpus in self.train)
        return Languages(*(",".join(filter(None, side)) or None for side in (sources, targets)))


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Pairs as text, to be translated and compared."""

    name: str
    sources: list[str]
    references: list[str]
    to: list[str | None]  # the language of each target, where sources are tagged with it
    language: str | None  # of the targets, for the metric


@dataclass(frozen=True, kw_only=True)
class Prepared:
    found: Found
    tokenizer: Tokenizer
    recipe: Recipe
    store: Store
    valid: Store | None
    folder: Path

    @property
    def amount(self) -> Amount:
        weights = [corpus.weight for corpus in self.found.train]
        pairs = [part.pairs for part in self.store.meta.parts]
        share = sum(w * n for w, n in zip(weights, pairs, strict=True)) / max(1, sum(pairs))
        return Amount(pairs=len(self.store), tokens=round(share * max(self.store.meta.tokens.values())))


def find(config: DataConfig, folder: Path, seed: int, tell: Tell) -> Found:
    """The corpora that the names mean, and the part to validate on."""
    languages = Languages(config.src, config.tgt)
    train = corpora(spooled(config.train, folder), languages, config.reading)
    targets = {corpus.languages.target for corpus in train}
    tags = len(targets) > 1 if config.tags is None else config.tags
    tests = corpora(config.test, languages, config.reading) if config.test else list(_beside(train, "test"))
    tests = [corpus for corpus in tests if _can_be_scored(corpus, bool(config.test), tell)]
    valid = corpora(config.valid, languages, config.reading) if config.valid else list(_beside(train, "valid"))
    held_out = not valid and config.hold_out != 0
    if held_out:
        train, valid = _hold_out(train, config.hold_out, seed, tell)
    return Found(train=train, valid=valid, tests=tests, held_out=held_out, tags=tags)


def spooled(names: Sequence[str], folder: Path) -> list[str]:
    """Standard input can be read once only: it is written to a file first, from which a resumed run goes on."""
    copy = folder / "stdin"
    if "-" in names and not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        aside = copy.with_suffix(".part")
        with open(aside, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        aside.rename(copy)
    return [str(copy) if name == "-" else name for name in names]


def _beside(train: Sequence[Corpus], split: str) -> Iterator[Corpus]:
    """Each file or pair of files for `split` that lies beside the corpora, once, under its own name."""
    seen = set()
    for corpus in train:
        other = corpus.beside(split)
        for part in other.parts if other else ():
            if (part, corpus.languages) not in seen:
                seen.add((part, corpus.languages))
                name = Path(part.files[0].name).name.split(".")[0]
                yield replace(corpus, name=name, weight=1.0, parts=(part,), others=(), ignored=())


def _can_be_scored(corpus: Corpus, asked: bool, tell: Tell) -> bool:
    """Whether a test set can be read to its end: told now, and not after hours of training."""
    try:
        pairs = sum(isinstance(entry, Pair) and bool(entry.source.strip()) for entry in corpus)
        problem = None if pairs else f"{', '.join(corpus.files)}: there is not one pair in this test set"
    except CorpusError as error:
        problem = str(error)
    if problem and asked:
        raise TrainError(problem)
    if problem:
        tell(Note(text=f"{problem}; it lies beside the data, and is not scored", weight="warning"))
    return problem is None


def _hold_out(train: list[Corpus], asked: int | None, seed: int, tell: Tell) -> tuple[list[Corpus], list[Corpus]]:
    pairs = sum(isinstance(entry, Pair) for corpus in train for entry in corpus)
    if not pairs:
        names = ", ".join(corpus.name for corpus in train)
        raise TrainError(
            f"{names}: there is not one pair to train on: a line needs a source and a target; `attent data` shows more"
        )
    size = default_size(pairs) if asked is None else asked
    if size >= pairs:
        raise TrainError(
            f"`data.hold_out` must be less than the {pairs:,} pairs there are, but is {size:,}; add pairs, name a "
            "validation set with --valid, or train without one (--hold-out 0)"
        )
    kept, held = hold_out(train, size, seed)
    tell(Note(text=f"{summary(kept, held)} (name your own with --valid)"))
    return kept, held


def tokens(
    found: Found, tokenizer: Tokenizer | None, config: DataConfig, folder: Path, seed: int, tell: Tell
) -> Prepared:
    """The tokenizer, learnt unless there is one, and the stores of both parts."""
    if tokenizer is None:
        tell(Note(text="learning subwords ..."))
        tokenizer = learn_tokenizer(found.train, config.tokenizer, tags=found.tags, seed=seed)
        kind = (
            f"{tokenizer.source.size:,}"
            if tokenizer.joint
            else f"{tokenizer.source.size:,} and {tokenizer.target.size:,}"
        )
        tell(Note(text=f"tokenizer: {config.tokenizer.kind}, {kind} subwords"))
    _check_tags(found, tokenizer)
    recipe = Recipe(tokenizer=tokenizer, filters=config.filters, tags=found.tags)
    store = prepare(found.train, recipe, folder, progress=_spoken(tell))
    if not len(store):
        raise _nothing_left(store)
    tell(Note(text=_kept(store)))
    if less := _mostly_left_out(store):
        tell(Note(text=less, weight="warning"))
    valid = None
    if found.valid:
        valid = prepare(found.valid, replace(recipe, filters=replace(Filters.none(), empty=True)), folder)
        if not len(valid):
            raise TrainError(f"{', '.join(c.name for c in found.valid)}: there is no pair to validate on")
    return Prepared(found=found, tokenizer=tokenizer, recipe=recipe, store=store, valid=valid, folder=folder)


def _check_tags(found: Found, tokenizer: Tokenizer) -> None:
    if found.tags:
        for corpus in found.train:
            if corpus.languages.target is not None and corpus.languages.target not in tokenizer.source.tags:
                known = ", ".join(tokenizer.source.tags) or "none"
                raise TrainError(
                    f"the tokenizer has no tag for `{corpus.languages.target}`: it knows {known}; train one that does"
                )


def _spoken(tell: Tell) -> Callable[[int], None]:
    last = time.monotonic()

    def progress(pairs: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            tell(Note(text=f"tokenising: {pairs:,} pairs ..."))

    return progress


def _reasons(store: Store) -> Counter[str]:
    return sum((Counter(part.dropped) for part in store.meta.parts), Counter())


def _left_out(store: Store, most: int | None = None) -> str:
    """How many pairs for which reasons, the most frequent first."""
    return ", ".join(f"{count:,} {why}" for why, count in _reasons(store).most_common(most))


def _mostly_left_out(store: Store) -> str | None:
    """Of translations a filter drops few: one that drops half of a corpus may not be meant for it."""
    why, count = next(iter(_reasons(store).most_common(1)), ("", 0))
    if why not in TURNED_OFF or count <= len(store):
        return None
    reason = " (texts and their summaries differ in length, for one)" if why == "ratio" else ""
    return (
        f"most pairs were left out by one filter, {count:,} by `{why}`; if they are as they should be{reason}, turn it "
        f"off: --set data.filters.{why}={TURNED_OFF[why]}"
    )


def _nothing_left(store: Store) -> TrainError:
    counts = _left_out(store) or "the corpus is empty"
    names = " ".join(part.name for part in store.meta.parts)
    example = next((places[0] for part in store.meta.parts for places in part.examples.values()), None)
    such = f" (such as {example})" if example else ""
    return TrainError(
        f"no pairs are left to train on: {counts}{such}; `attent data {names}` shows why, "
        "and `--set data.filters.NAME=false` turns a filter off"
    )


def _kept(store: Store) -> str:
    counts = _left_out(store, most=4)
    less = f"; left out: {counts} (`attent data` shows which)" if counts else ""
    return f"data: {len(store):,} pairs to train on{less}"


def batches_of(prepared: Prepared, data: DataConfig, train: TrainConfig) -> Batches:
    """The training batches: every process makes the same, and takes its share of each."""
    assert train.batch_tokens is not None
    assert data.layout is not None
    longest = min(data.longest, train.batch_tokens)
    config = BatchConfig(tokens=train.batch_tokens, longest=longest, layout=data.layout, too_long=data.too_long)
    resampled = None
    if data.sampling:
        sampled = replace(prepared.recipe, sampling=Sampling(rate=data.sampling))
        resampled = Resampled(prepared.found.train, sampled, prepared.folder / "epochs", train.seed)
    weights = [corpus.weight for corpus in prepared.found.train]
    return Batches(prepared.store, config, seed=train.seed, weights=weights, resampled=resampled)


def valid_batches(store: Store, least: int) -> Batches:
    """Each pair once, whatever its length."""
    longest = max(int(store.source.lengths().max()), int(store.target.lengths().max()), least)
    return Batches(store, BatchConfig(tokens=max(4096, longest), longest=longest, layout="bucketed"), seed=0)


def texts_of(corpus: Sequence[Corpus], tags: bool, most: int | None = None) -> Texts:
    """The pairs of corpora as text, or an even choice of `most` of them."""
    found = [(pair, one.languages.target) for one in corpus for pair in one if isinstance(pair, Pair)]
    found = [(pair, to) for pair, to in found if pair.source.strip()]
    if most is not None and len(found) > most:
        found = [found[len(found) * i // most] for i in range(most)]
    targets = {to for _, to in found}
    return Texts(
        name=", ".join(dict.fromkeys(one.name for one in corpus)),
        sources=[pair.source.strip() for pair, _ in found],
        references=[pair.target.strip() for pair, _ in found],
        to=[to if tags else None for _, to in found],
        language=targets.pop() if len(targets) == 1 else None,
    )
