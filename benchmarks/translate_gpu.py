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

from attent.cli.translating import CPU_BLOCK, GPU_BLOCK
from attent.decode import Search, Translator
from attent.decode.options import Job
from benchmarks import made_up
from benchmarks.measure import machine, timed

BLOCKS = 12  # that the engine searches for


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the command did."""

    start: float  # seconds to its first lines
    seconds: float  # in all
    steady: float  # lines a second


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
            asked.model, asked.text = made(Path(home), torch.cuda.is_available())
        with open(asked.text, encoding="utf-8") as text:
            lines = list(itertools.islice(text, asked.lines))
        run(asked, lines, Path(home) / "text")


def made(home: Path, gpu: bool) -> tuple[Path, Path]:
    """A model that was trained for about a minute, and what it has read."""
    made_up.write(home / "pairs.tsv", 200_000 if gpu else 2_000, mean_words=20 if gpu else 6)
    asked = ["--size", "base", "--steps", "1500"] if gpu else ["--size", "tiny", "--steps", "20"]
    words = ["train", "--data", str(home / "pairs.tsv"), "--src", "de", "--tgt", "en", "--out", str(home / "model")]
    subprocess.run([sys.executable, "-m", "attent", *words, *asked, "--quiet"], check=True, stdout=sys.stderr)
    pairs = (home / "pairs.tsv").read_text(encoding="utf-8").splitlines()
    (home / "source").write_text("".join(pair.split("\t")[0] + "\n" for pair in pairs), encoding="utf-8")
    return home / "model", home / "source"


def run(asked: argparse.Namespace, lines: Sequence[str], text: Path) -> None:
    text.write_text("".join(lines), encoding="utf-8")
    translator = Translator.load(asked.model, engine="torch")
    size = CPU_BLOCK if translator.device.type == "cpu" else GPU_BLOCK
    rows = translator.tokenizer.encode_source([line.strip() for line in lines[: BLOCKS * size]])
    mean = statistics.mean(map(len, rows))
    print(f"{machine()}; {asked.model.name}, {len(lines):,} lines of {mean:.0f} tokens", flush=True)
    print("| beam | engine, lines/s | command, steady | ratio | command, with its start | first lines after |")
    print("|---|---|---|---|---|---|", flush=True)
    for beams in asked.beams:
        compare(translator, rows, size, text, len(lines), beams, asked)


def compare(
    translator: Translator,
    rows: Sequence[Sequence[int]],
    size: int,
    text: Path,
    count: int,
    beams: int,
    asked: argparse.Namespace,
) -> None:
    engine(translator, rows[:size], size, beams)  # compiles and records
    found, runs = [], []
    for _ in range(asked.rounds):
        found.append(len(rows) / timed(lambda: engine(translator, rows, size, beams)))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        runs.append(command(asked.model, text, count, beams))
    steady = [run.steady for run in runs]
    print(
        f"| {beams} | {spread(found)} | {spread(steady)} "
        f"| {statistics.median(a / b for a, b in zip(steady, found, strict=True)):.0%} "
        f"| {spread([count / run.seconds for run in runs])} | {statistics.median(run.start for run in runs):.1f} s |",
        flush=True,
    )


def spread(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):,.0f} ({min(numbers):,.0f} to {max(numbers):,.0f})"


def engine(translator: Translator, rows: Sequence[Sequence[int]], size: int, beams: int) -> None:
    search = Search(beam_size=beams)
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        jobs = [
            Job(source=row, number=n, limit=search.limit(len(row) - 1), no_loops=True)
            for n, row in enumerate(some, first)
        ]
        translator.search(jobs, search)


def command(model: Path, text: Path, count: int, beams: int) -> Run:
    began, written = time.perf_counter(), 0
    times: list[tuple[float, int]] = []
    asked = [sys.executable, "-m", "attent", "translate", str(model), str(text), "--beam-size", str(beams)]
    asked += ["--engine", "torch"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read1(2**20):  # type: ignore[attr-defined]  # a BufferedReader
            written += chunk.count(b"\n")
            times.append((time.perf_counter() - began, written))
    if process.returncode or written != count:
        sys.exit(f"attent translate ended with {process.returncode} and wrote {written:,} of {count:,} lines")
    third, before = next(one for one in times if one[1] >= count / 3)
    last, _ = times[-1]
    if last == third:
        sys.exit(f"the text must be longer, so that it is done in many blocks; it has {count:,} lines")
    return Run(start=times[0][0], seconds=last, steady=(count - before) / (last - third))


if __name__ == "__main__":
    main()
