"""Speed of tokenization and batching, compared with Hugging Face's `datasets` and `tokenizers` in the same run.

    python -m benchmarks.data_speed [CORPUS SRC TGT]

Without a corpus the text is synthetic, with sentences as long as those of Multi30k. Two things are timed:

tokenizing   a TSV file -> ids on disk, on all cores. Ours also filters, drops duplicates and stores the line of each
             pair; theirs is `Dataset.from_csv` and `map` with as many processes, with a BPE tokenizer of the same size
batches      ids on disk -> tensors for one epoch, on one core. Ours packs rows or buckets by length; theirs is a
             DataLoader with a length-grouped order and padding
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attent.data.batch_plan import BatchConfig
from attent.data.corpus import Corpus, open_corpora
from attent.data.encode import EncodingConfig
from attent.data.loader import PairLoader
from attent.data.pairs import LanguagePair, Pair
from attent.data.token_store import TokenStore, prepare_store
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from benchmarks import synthetic_corpus
from benchmarks.timing import get_cpu_name

PAIRS = 300_000
VOCAB = 8_000
BATCH_TOKENS = 4096  # per side
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="?", help="by default synthetic")
    parser.add_argument("src", nargs="?", help="source language of the corpus")
    parser.add_argument("tgt", nargs="?", help="target language of the corpus")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        corpus = (
            load_corpus(args.corpus, LanguagePair(args.src, args.tgt), home) if args.corpus else generate_corpus(home)
        )
        pairs = [entry for entry in corpus if isinstance(entry, Pair)]
        config = TokenizerConfig(vocab=VOCAB)
        tokenizer = train_tokenizer([p.source for p in pairs], [p.target for p in pairs], config)
        print(f"{len(pairs):,} pairs of {corpus.name}, {os.cpu_count()} cores of {get_cpu_name()}")
        compare_tokenizing(corpus, tokenizer, len(pairs), home)
        compare_batching(prepare_store([corpus], EncodingConfig(tokenizer=tokenizer), home / "stores"), home)


def load_corpus(name: str, languages: LanguagePair, home: Path) -> Corpus:
    """Copy the corpus to a plain TSV file, which both sides can read."""
    (corpus,) = open_corpora([name], languages)
    with open(home / "corpus.tsv", "w", encoding="utf-8") as file:
        for entry in corpus:
            if isinstance(entry, Pair) and not any(character in entry.source + entry.target for character in '\t\n"'):
                file.write(f"{entry.source}\t{entry.target}\n")
    return open_corpora([str(home / "corpus.tsv")])[0]


def generate_corpus(home: Path) -> Corpus:
    synthetic_corpus.write_corpus(home / "corpus.tsv", PAIRS)
    return open_corpora([str(home / "corpus.tsv")])[0]


# --- tokenizing ------------------------------------------------------------------------------------------------------


def compare_tokenizing(corpus: Corpus, tokenizer: Tokenizer, pairs: int, home: Path) -> None:
    work: dict[str, Callable[[], None]] = {
        "attent": lambda: tokenize_with_attent(corpus, tokenizer, home / "ours"),
        "attent, one thread": lambda: tokenize_with_attent(corpus, tokenizer, home / "ours", workers=1),
    }
    if (theirs := build_hf_tokenizing(Path(corpus.file_names[0]), home / "theirs")) is not None:
        work["datasets + tokenizers"] = theirs
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(ROUNDS):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    print("\ntokenizing to disk, pairs a second (each round)")
    for name, rounds in seconds.items():
        print(f"  {name:24}", "  ".join(f"{pairs / elapsed:10,.0f}" for elapsed in rounds))


def tokenize_with_attent(corpus: Corpus, tokenizer: Tokenizer, root: Path, workers: int | None = None) -> None:
    shutil.rmtree(root, ignore_errors=True)
    fresh = Tokenizer.from_files(tokenizer.files)  # without the caches of the previous round
    prepare_store([corpus], EncodingConfig(tokenizer=fresh), root, workers=workers)


def build_hf_tokenizing(path: Path, root: Path) -> Callable[[], None] | None:
    """Return the same work with Hugging Face's libraries; None if they are not installed."""
    try:
        import datasets
        from tokenizers import Tokenizer as Theirs
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        print(f"(Hugging Face: not measured, {error.name} is not installed)")
        return None
    datasets.disable_progress_bars()
    theirs = Theirs(models.BPE(byte_fallback=True, unk_token="<unk>"))
    theirs.pre_tokenizer, theirs.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    with open(path, encoding="utf-8") as file:
        lines = (side for line in file for side in line.rstrip("\n").split("\t"))
        special = ["<pad>", "<s>", "</s>", "<unk>"]
        trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, show_progress=False)
        theirs.train_from_iterator(lines, trainer)

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {
            side: [[*encoding.ids, 2] for encoding in theirs.encode_batch(rows[side])] for side in ("source", "target")
        }

    def run() -> None:
        shutil.rmtree(root, ignore_errors=True)
        names = {"column_names": ["source", "target"], "delimiter": "\t", "quoting": 3, "keep_in_memory": False}
        text = datasets.Dataset.from_csv(str(path), cache_dir=str(root / "cache"), **names)
        ids = text.map(encode, batched=True, num_proc=os.cpu_count())
        ids.save_to_disk(str(root / "ids"))

    return run


# --- batches ---------------------------------------------------------------------------------------------------------


def compare_batching(store: TokenStore, home: Path) -> None:
    print("\nbatches of one epoch on one core: million tokens a second, tokens of all slots")
    for layout in ("packed", "bucketed"):
        config = BatchConfig(batch_tokens=BATCH_TOKENS, layout=layout)  # type: ignore[arg-type]
        report_speed(f"attent, {layout}", lambda config=config: iterate_attent_epoch(store, config))
    if (home / "theirs" / "ids").exists():
        report_speed("DataLoader, grouped", lambda: iterate_hf_epoch(home / "theirs" / "ids"))


def report_speed(name: str, epoch: Callable[[], Iterator[tuple[int, int]]]) -> None:
    speeds, filled = [], 0.0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        counts = list(epoch())
        tokens, slots = (sum(count[i] for count in counts) for i in range(2))
        speeds.append(tokens / (time.perf_counter() - start) / 1e6)
        filled = tokens / slots
    print(f"  {name:24}", "  ".join(f"{speed:6.2f}" for speed in speeds), f"   {filled:.1%} full")


def iterate_attent_epoch(store: TokenStore, config: BatchConfig) -> Iterator[tuple[int, int]]:
    """Plan an epoch and yield the tokens and slots of each batch."""
    loader = PairLoader(store, config)
    for step in range(loader.num_batches(0)):
        batch = loader.get_batch(0, step)
        sides = (batch.source, batch.target)
        yield sum(side.num_tokens for side in sides), sum(side.ids.numel() for side in sides)


def iterate_hf_epoch(path: Path) -> Iterator[tuple[int, int]]:
    import datasets
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader

    ids = datasets.load_from_disk(str(path)).select_columns(["source", "target"])

    def collate(rows: list[dict[str, list[int]]]) -> tuple[Any, ...]:
        sides = [[torch.tensor(row[side]) for row in rows] for side in ("source", "target")]
        tensors = [pad_sequence(side, batch_first=True) for side in sides]
        return sum(len(row) for side in sides for row in side), *tensors

    for tokens, source, target in DataLoader(ids, batch_sampler=group_by_length(ids), collate_fn=collate):
        yield tokens, source.numel() + target.numel()


def group_by_length(ids: Any) -> list[list[int]]:
    """Return batches of similar lengths within the token budget, in random order."""
    lengths = [(len(t), len(s)) for s, t in zip(ids["source"], ids["target"], strict=True)]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches: list[list[int]] = [[]]
    longest = 0
    for i in order:
        longest = max(longest, *lengths[i])
        if (len(batches[-1]) + 1) * longest > BATCH_TOKENS:
            batches.append([])
            longest = max(lengths[i])
        batches[-1].append(i)
    random.Random(0).shuffle(batches)
    return batches


if __name__ == "__main__":
    main()
