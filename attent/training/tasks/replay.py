"""General text that is mixed in when a translator is fine-tuned, so that it stays good at what it could do before.

It is named (`--replay`), or it is the sample that the model folder stores of its training data (`--store-sample`).
"""

import gzip
import heapq
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attent.data.augment import OFF
from attent.data.corpus import Corpus, open_corpora
from attent.data.pairs import LanguageMismatchError, LanguagePair, Pair
from attent.models.folder import read_side_file
from attent.storage.atomic import write_atomic
from attent.storage.hub import locate_model
from attent.training.config import DataConfig, TrainError
from attent.training.tasks import base

SAMPLE_FILE = "sample.tsv.gz"


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
