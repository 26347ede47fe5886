"""Seconds from the start of `attent train` until its validations reach given BLEU scores, start-up and compilation
included.

    python -m benchmarks.time_to_bleu                                    Multi30k en-de with the default settings
    python -m benchmarks.time_to_bleu --data FOLDER --targets 41 43 -- --size small --rdrop 5 --schedule cosine
    python -m benchmarks.time_to_bleu --data FOLDER --twice              again with the compile cache of the first run
    python -m benchmarks.time_to_bleu --data FOLDER --targets 35 -- --device cpu --minutes 30

Flags after `--` are those of `attent train`. The command runs in a process of its own and in a temporary folder, unless
`--out` names one; its log is read while it is written. A BLEU score is that of a validation during training: greedy, on
the part of the validation set that `--valid-sentences` selects. The first run has an empty compile cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attent.training.events import LOG_FILE
from attent.training.hardware import INDUCTOR_CACHE_ENV
from benchmarks.timing import describe_machine

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Validation:
    seconds: float  # since the process started
    step: int
    loss: float
    bleu: float


@dataclass
class RunTimes:
    first_report: float | None = None  # seconds until training runs: the first progress report
    validations: list[Validation] = field(default_factory=list)
    total: float = 0.0

    def find_first(self, target: float) -> Validation | None:
        return next((validation for validation in self.validations if validation.bleu >= target), None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="multi30k", help="corpus, with a validation set in its folder")
    parser.add_argument("--src", default="en")
    parser.add_argument("--tgt", default="de")
    parser.add_argument("--targets", type=float, nargs="+", default=[41.0, 43.0], help="BLEU scores to reach")
    parser.add_argument("--out", type=Path, help="folder for the runs, which are kept")
    parser.add_argument("--twice", action="store_true", help="run again with the compile cache of the first run")
    arguments, flags = parser.parse_known_args(argv)
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        home = arguments.out or Path(temporary)
        for number in range(2 if arguments.twice else 1):
            print(f"\n{('first run, nothing compiled', 'second run')[number]}", flush=True)
            out = home / f"run-{number + 1}"
            command = [sys.executable, "-m", "attent", "train", "--data", arguments.data, "--src", arguments.src]
            command += ["--tgt", arguments.tgt, "--out", str(out), *(flag for flag in flags if flag != "--")]
            times, exit_code = run_and_time(command, out / LOG_FILE, Path(temporary) / "compiled")
            print_summary(times, arguments.targets)
            if exit_code:
                return exit_code
    return 0


def run_and_time(command: list[str], log: Path, cache: Path) -> tuple[RunTimes, int]:
    """Run the command, and print each validation as it is logged."""
    environment = {**os.environ, INDUCTOR_CACHE_ENV: str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    start, times = time.monotonic(), RunTimes()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        for event in follow_log(log, process):
            seconds = time.monotonic() - start
            if event["event"] == "progress" and times.first_report is None:
                times.first_report = seconds
                print(f"{seconds:8.1f} s  training runs", flush=True)
            if event["event"] == "validated" and "bleu" in event["metrics"]:
                times.validations.append(Validation(seconds, event["step"], event["loss"], event["metrics"]["bleu"]))
                scores = f"loss {event['loss']:.3f}, BLEU {event['metrics']['bleu']:.2f}"
                print(f"{seconds:8.1f} s  step {event['step']:,}: {scores}", flush=True)
        exit_code = process.wait()
    finally:
        process.kill()
    times.total = time.monotonic() - start
    return times, exit_code


def follow_log(log: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events as they are written, until the process ends."""
    offset = 0
    while True:
        ended = process.poll() is not None
        content = log.read_bytes()[offset:] if log.is_file() else b""
        complete = content[: content.rfind(b"\n") + 1]
        offset += len(complete)
        yield from map(json.loads, complete.splitlines())
        if ended:
            return
        time.sleep(POLL_SECONDS)


def print_summary(times: RunTimes, targets: Sequence[float]) -> None:
    best = max((validation.bleu for validation in times.validations), default=float("nan"))
    for target in targets:
        reached = times.find_first(target)
        result = (
            f"not reached (best: {best:.2f})" if reached is None else f"{reached.seconds:.1f} s, step {reached.step:,}"
        )
        print(f"BLEU {target:g}: {result}")
    print(f"whole command: {times.total:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
