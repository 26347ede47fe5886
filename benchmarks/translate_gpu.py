"""`attent translate` compared with its engine alone: lines a second of a long text.

    python -m benchmarks.translate_gpu model text.de --beams 4 --lines 49152
    python -m benchmarks.translate_gpu             beam 4 and greedy; a base model, first trained on random text

The engine maps ids to ids, in this process, in the blocks of the command, one after the other, while nothing else runs.
The command runs as a user runs it, and its output lines are counted while it runs. Its startup (torch, weights,
compilation, graph capture, worker processes) is reported separately: steady is from a third of the lines to the last.
Rounds alternate. This is for a GPU; on a CPU a tiny model is used.
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

from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.pipeline import CPU_BLOCK_LINES, GPU_BLOCK_LINES
from attent.decoding.translator import Translator
from benchmarks import synthetic_corpus
from benchmarks.timing import describe_machine, time_run

NUM_BLOCKS = 12  # searched by the engine


@dataclass(frozen=True, kw_only=True)
class CommandTiming:
    """Timing of the command."""

    startup_seconds: float  # to its first lines
    seconds: float  # total
    steady_lines_per_second: float  # lines a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="model folder; by default one is trained")
    parser.add_argument("text", type=Path, nargs="?", help="text to translate, one sentence per line")
    parser.add_argument("--lines", type=int, help="number of lines; by default all")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.model is not None and arguments.text is None:
        parser.error("give a text to translate with a model")
    with tempfile.TemporaryDirectory() as home:
        if arguments.model is None:
            arguments.model, arguments.text = prepare_model(Path(home), torch.cuda.is_available())
        with open(arguments.text, encoding="utf-8") as text:
            lines = list(itertools.islice(text, arguments.lines))
        run_benchmark(arguments, lines, Path(home) / "text")


def prepare_model(home: Path, gpu: bool) -> tuple[Path, Path]:
    """Train a model for about a minute; return it and its source text."""
    synthetic_corpus.write_corpus(home / "pairs.tsv", 200_000 if gpu else 2_000, mean_words=20 if gpu else 6)
    arguments = ["--size", "base", "--steps", "1500"] if gpu else ["--size", "tiny", "--steps", "20"]
    command_line = [
        "train",
        "--data",
        str(home / "pairs.tsv"),
        "--src",
        "de",
        "--tgt",
        "en",
        "--out",
        str(home / "model"),
    ]
    subprocess.run(
        [sys.executable, "-m", "attent", *command_line, *arguments, "--quiet"], check=True, stdout=sys.stderr
    )
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
    print("| beam | engine, lines/s | command, steady | ratio | command, with startup | first lines after |")
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
    run_engine(translator, rows[:size], size, num_beams)  # compiles and captures
    engine_speeds, runs = [], []
    for _ in range(arguments.rounds):
        engine_speeds.append(len(rows) / time_run(lambda: run_engine(translator, rows, size, num_beams)))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        runs.append(run_command(arguments.model, text, num_lines, num_beams))
    steady = [run.steady_lines_per_second for run in runs]
    print(
        f"| {num_beams} | {format_spread(engine_speeds)} | {format_spread(steady)} "
        f"| {statistics.median(a / b for a, b in zip(steady, engine_speeds, strict=True)):.0%} "
        f"| {format_spread([num_lines / run.seconds for run in runs])} "
        f"| {statistics.median(run.startup_seconds for run in runs):.1f} s |",
        flush=True,
    )


def format_spread(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):,.0f} ({min(numbers):,.0f} to {max(numbers):,.0f})"


def run_engine(translator: Translator, rows: Sequence[Sequence[int]], size: int, num_beams: int) -> None:
    search = SearchOptions(beam_size=num_beams)
    for first in range(0, len(rows), size):
        block = rows[first : first + size]
        jobs = [
            SearchRequest(
                source_ids=row, rng_key=n, max_length=search.compute_max_length(len(row) - 1), forbid_loops=True
            )
            for n, row in enumerate(block, first)
        ]
        translator.search(jobs, search)


def run_command(model: Path, text: Path, num_lines: int, num_beams: int) -> CommandTiming:
    start, num_written = time.perf_counter(), 0
    times: list[tuple[float, int]] = []
    arguments = [sys.executable, "-m", "attent", "translate", str(model), str(text), "--beam-size", str(num_beams)]
    arguments += ["--engine", "torch"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read1(2**20):  # type: ignore[attr-defined]  # a BufferedReader
            num_written += chunk.count(b"\n")
            times.append((time.perf_counter() - start, num_written))
    if process.returncode or num_written != num_lines:
        sys.exit(f"attent translate ended with {process.returncode} and wrote {num_written:,} of {num_lines:,} lines")
    third, before = next(sample for sample in times if sample[1] >= num_lines / 3)
    last, _ = times[-1]
    if last == third:
        sys.exit(f"the text must have more lines, for many blocks, but has {num_lines:,} lines")
    return CommandTiming(
        startup_seconds=times[0][0], seconds=last, steady_lines_per_second=(num_lines - before) / (last - third)
    )


if __name__ == "__main__":
    main()
