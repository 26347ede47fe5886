"""`attent translate` beside its own engine: lines a second of a long text, with the text and without.

    python -m benchmarks.translate_gpu model text.de --beams 4 --lines 49152
    python -m benchmarks.translate_gpu             beam 4 and greedy; a base model, first trained on made-up text

The engine is given ids and gives ids, in this process, in blocks as the command has them, one after the other; nothing
else runs then. The command is run as a person runs it, and what it writes is counted as it comes. Its start (torch, the
weights, kernels and steps that are recorded, the processes that do the text) is told apart: steady is from a third of
the lines to the last. They take turns. A GPU is what this is for, but it runs on a CPU too (with a tiny model).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attent.decoding import SearchOptions, Translator
from attent.decoding.options import SearchRequest
from attent.decoding.pipeline import CPU_BLOCK_LINES, GPU_BLOCK_LINES
from benchmarks import synthetic_corpus
from benchmarks.timing import describe_machine, time_run

NUM_BLOCKS = 12  # that the engine searches for


@dataclass(frozen=True, kw_only=True)
class CommandTiming:
    """What the command did."""

    startup_seconds: float  # seconds to its first lines
    seconds: float  # in all
    steady_lines_per_second: float  # lines a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a folder; by default one is made")
    parser.add_argument("text", type=Path, nargs="?", help="to translate, a sentence a line")
    parser.add_argument("--lines", type=int, help="of the text; by default all")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if asked.model is not None and asked.text is None:
        parser.error("a model must be given a text to translate")
    with tempfile.TemporaryDirectory() as home:
        if asked.model is None:
            asked.model, asked.text = prepare_model(Path(home), torch.cuda.is_available())
        with open(asked.text, encoding="utf-8") as text:
            lines = list(itertools.islice(text, asked.lines))
        run_benchmark(asked, lines, Path(home) / "text")


def prepare_model(home: Path, gpu: bool) -> tuple[Path, Path]:
    """A model that was trained for about a minute, and what it has read."""
    synthetic_corpus.write_corpus(home / "pairs.tsv", 200_000 if gpu else 2_000, mean_words=20 if gpu else 6)
    asked = ["--size", "base", "--steps", "1500"] if gpu else ["--size", "tiny", "--steps", "20"]
    words = ["train", "--data", str(home / "pairs.tsv"), "--src", "de", "--tgt", "en", "--out", str(home / "model")]
    subprocess.run([sys.executable, "-m", "attent", *words, *asked, "--quiet"], check=True, stdout=sys.stderr)
    pairs = (home / "pairs.tsv").read_text(encoding="utf-8").splitlines()
    (home / "source").write_text("".join(pair.split("\t")[0] + "\n" for pair in pairs), encoding="utf-8")
    return home / "model", home / "source"


def run_benchmark(arguments: argparse.Namespace, lines: Sequence[str], text: Path) -> None:
    text.write_text("".join(lines), encoding="utf-8")
    translator = Translator.load(arguments.model, engine="torch")
    size = CPU_BLOCK_LINES if translator.device.type == "cpu" else GPU_BLOCK_LINES
    rows = translator.tokenizer.encode_source([line.strip() for line in lines[: NUM_BLOCKS * size]])
    mean = statistics.mean(map(len, rows))
    print(f"{describe_machine()}; {arguments.model.name}, {len(lines):,} lines of {mean:.0f} tokens", flush=True)
    print("| beam | engine, lines/s | command, steady | ratio | command, with its start | first lines after |")
    print("|---|---|---|---|---|---|", flush=True)
    for beams in arguments.beams:
        compare_speeds(translator, rows, size, text, len(lines), beams, arguments)


def compare_speeds(
    translator: Translator,
    rows: Sequence[Sequence[int]],
    size: int,
    text: Path,
    num_lines: int,
    num_beams: int,
    arguments: argparse.Namespace,
) -> None:
    run_engine(translator, rows[:size], size, num_beams)  # compiles and records
    found, runs = [], []
    for _ in range(arguments.rounds):
        found.append(len(rows) / time_run(lambda: run_engine(translator, rows, size, num_beams)))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        runs.append(run_command(arguments.model, text, num_lines, num_beams))
    steady = [run.steady_lines_per_second for run in runs]
    print(
        f"| {num_beams} | {format_spread(found)} | {format_spread(steady)} "
        f"| {statistics.median(a / b for a, b in zip(steady, found, strict=True)):.0%} "
        f"| {format_spread([num_lines / run.seconds for run in runs])} | {statistics.median(run.startup_seconds for run in runs):.1f} s |",
        flush=True,
    )


def format_spread(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):,.0f} ({min(numbers):,.0f} to {max(numbers):,.0f})"


def run_engine(translator: Translator, rows: Sequence[Sequence[int]], size: int, num_beams: int) -> None:
    search = SearchOptions(beam_size=num_beams)
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        jobs = [
            SearchRequest(
                source_ids=row, rng_key=n, max_length=search.compute_max_length(len(row) - 1), forbid_loops=True
            )
            for n, row in enumerate(some, first)
        ]
        translator.search(jobs, search)


def run_command(model: Path, text: Path, num_lines: int, num_beams: int) -> CommandTiming:
    began, written = time.perf_counter(), 0
    times: list[tuple[float, int]] = []
    asked = [sys.executable, "-m", "attent", "translate", str(model), str(text), "--beam-size", str(num_beams)]
    asked += ["--engine", "torch"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read1(2**20):  # type: ignore[attr-defined]  # a BufferedReader
            written += chunk.count(b"\n")
            times.append((time.perf_counter() - began, written))
    if process.returncode or written != num_lines:
        sys.exit(f"attent translate ended with {process.returncode} and wrote {written:,} of {num_lines:,} lines")
    third, before = next(one for one in times if one[1] >= num_lines / 3)
    last, _ = times[-1]
    if last == third:
        sys.exit(f"the text must be longer, so that it is done in many blocks; it has {num_lines:,} lines")
    return CommandTiming(
        startup_seconds=times[0][0], seconds=last, steady_lines_per_second=(num_lines - before) / (last - third)
    )


if __name__ == "__main__":
    main()
