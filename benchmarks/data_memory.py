"""Peak memory and time to read, report, tokenize and batch a corpus of ten million pairs.

    python -m benchmarks.data_memory [PAIRS]

Every stage is a separate process; its peak is the resident memory of the process and its descendants, sampled ten times
a second (Linux). `again` is a second run on the existing store: the time to its first batch, with and without starting
Python and importing torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import synthetic_corpus
from benchmarks.timing import get_cpu_name

PAIRS = 10_000_000
LAYOUTS = ("packed", "bucketed")
BATCHES_MEASURED = 2000  # from the middle of the epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=int, nargs="?", default=PAIRS, help="number of synthetic pairs")
    pairs: int = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name) / "corpus.tsv"
        synthetic_corpus.write_corpus(corpus, pairs)
        print(f"{pairs:,} pairs, {corpus.stat().st_size / 2**20:,.0f} MiB, {os.cpu_count()} cores of {get_cpu_name()}")
        measure_stage("report", [sys.executable, "-m", "attent", "data", str(corpus), "--json"])
        for stage in ("tokenizer", "prepare", *LAYOUTS, "again"):
            measure_stage(stage, [sys.executable, "-m", "benchmarks.data_memory", stage, name])


def measure_stage(stage: str, command: list[str]) -> None:
    """Print time and peak memory of a process and its descendants."""
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output, subprocess.Popen(command, stdout=output, text=True) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(get_resident_bytes, list_descendants(process.pid))))
            time.sleep(0.1)
        output.seek(0)
        printed = output.read()
    seconds = time.perf_counter() - start
    summary = printed.strip() if stage != "report" else f"{len(printed):,} characters of JSON"
    print(f"  {stage:10} {seconds:7.1f} s  peak {peak / 2**20:6,.0f} MiB  {summary}", flush=True)
    assert process.returncode == 0, f"{stage} failed"


def list_descendants(pid: int) -> list[int]:
    """Return the ids of a process and its descendants (Linux)."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # the process has ended
        return []
    return [pid, *(descendant for child in children for descendant in list_descendants(int(child)))]


def get_resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def run_stage(name: str, home: Path) -> None:
    from attent.data.corpus import open_corpora
    from attent.data.encode import EncodingConfig, learn_tokenizer
    from attent.data.token_store import prepare_store
    from attent.text import Tokenizer, TokenizerConfig

    start = time.perf_counter()
    corpora = open_corpora([str(home / "corpus.tsv")])
    if name == "tokenizer":
        learn_tokenizer(corpora, TokenizerConfig(vocab=16_000)).save(home / "tokenizer")
        return
    store = prepare_store(corpora, EncodingConfig(tokenizer=Tokenizer.load(home / "tokenizer")), home / "stores")
    if name == "prepare":
        print(f"{len(store):,} pairs kept, {len(store) / (time.perf_counter() - start):,.0f} a second")
    else:
        iterate_batches(store, "packed" if name == "again" else name, 1 if name == "again" else BATCHES_MEASURED, start)


def iterate_batches(store: object, layout: str, count: int, start: float) -> None:
    from attent.data.batch_plan import BatchConfig
    from attent.data.loader import PairLoader

    batches = PairLoader(store, BatchConfig(batch_tokens=25_000, layout=layout))  # type: ignore[arg-type]
    steps = batches.num_batches(0)
    planned = time.perf_counter() - start
    tokens = 0
    for step in range(steps // 2, min(steps, steps // 2 + count)):
        batch = batches.get_batch(0, step)
        tokens += batch.source.num_tokens + batch.target.num_tokens
    seconds = time.perf_counter() - start - planned
    print(f"{steps:,} batches an epoch, planned in {planned:.2f} s, then {tokens / seconds / 1e6:.1f}M tokens a second")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run_stage(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
