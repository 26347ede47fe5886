"""Loader overhead: training steps fed by the loader, compared with steps on batches that are on the GPU already.

    python -m benchmarks.data_loading [--device cuda] [--tokens 25600] [--steps 200]

The text is synthetic, with the sentence lengths of WMT. A step is forward, backward and Adam of the base model in
bfloat16, compiled once, since all packed batches have one shape. Both variants are interleaved.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F

import attent
from attent.data.batch_plan import BatchConfig
from attent.data.corpus import open_corpora
from attent.data.encode import EncodingConfig
from attent.data.loader import PairBatch, PairLoader
from attent.data.pairs import Pair
from attent.data.token_store import prepare_store
from attent.models import shift_right
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from benchmarks import synthetic_corpus
from benchmarks.timing import describe_machine

PAIRS, WORDS, ROUNDS = 200_000, 22.0, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=25_600)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", default="base", choices=("tiny", "small", "base", "big"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        batches, vocab_size = build_batches(Path(name), args.tokens)
        step = TrainStep(vocab_size, args.size, args.device)
        print(f"{args.size}, {args.tokens} tokens a side; {describe_machine()}", flush=True)
        compare(batches, step, args.steps)


def build_batches(home: Path, tokens: int) -> tuple[PairLoader, int]:
    synthetic_corpus.write_corpus(home / "corpus.tsv", PAIRS, WORDS)
    corpora = open_corpora([str(home / "corpus.tsv")])
    pairs = [entry for entry in corpora[0] if isinstance(entry, Pair)]
    config = TokenizerConfig(vocab=16_384)
    tokenizer = train_tokenizer([pair.source for pair in pairs], [pair.target for pair in pairs], config)
    start = time.perf_counter()
    store = prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), home / "stores")
    print(f"tokenized {len(store) / (time.perf_counter() - start):,.0f} pairs a second")
    return PairLoader(store, BatchConfig(batch_tokens=tokens)), tokenizer.source.size


class TrainStep:
    """One step of training."""

    def __init__(self, vocab_size: int, size: str, device: str) -> None:
        self.device = torch.device(device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = attent.build(getattr(attent.presets, size)(vocab_size)).to(self.device, dtype).train()
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        self.model = torch.compile(model, dynamic=False)

    def __call__(self, batch: PairBatch) -> None:
        target = batch.target
        logits = self.model(batch.source.ids, shift_right(target.ids, 1, target.packing), packing=batch.packing)
        F.cross_entropy(logits.flatten(0, 1), target.ids.flatten(), ignore_index=0).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(batches: PairLoader, step: TrainStep, steps: int) -> None:
    pin = step.device.type == "cuda"
    device_batches = [batches.get_batch(0, i).to(step.device) for i in range(min(64, batches.num_batches(0)))]
    sources: dict[str, Iterator[PairBatch]] = {
        "on the device already": cycle(device_batches),
        "loader, one thread": (b.to(step.device, True) for _, b in batches.iter_batches(workers=1, pin_memory=pin)),
        "loader, no thread": (b.to(step.device, True) for _, b in batches.iter_batches(workers=0, pin_memory=pin)),
    }
    for source in sources.values():
        for _ in range(5):
            step(next(source))
    before = count_compiled_graphs()
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    for _ in range(ROUNDS):
        for name, source in sources.items():
            seconds[name].append(time_steps(step, source, steps))
    baseline = seconds["on the device already"]
    for name, rounds in seconds.items():
        slowdowns = [ours / theirs for ours, theirs in zip(rounds, baseline, strict=True)]
        print(
            f"  {name:26}",
            "  ".join(f"{steps / elapsed:7.2f} steps/s" for elapsed in rounds),
            f"  {sorted(slowdowns)[1]:.3f}x the time",
        )
    print(f"  graphs compiled while iterating: {count_compiled_graphs() - before}")


def time_steps(step: TrainStep, source: Iterator[PairBatch], steps: int) -> float:
    synchronize(step.device)
    start = time.perf_counter()
    for _ in range(steps):
        step(next(source))
    synchronize(step.device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def count_compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    main()
