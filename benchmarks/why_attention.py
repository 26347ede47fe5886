"""The whole comparison behind docs/why-attention.md, by one command that can be interrupted and repeated.

    python -m benchmarks.why_attention --out DIR [--data multi30k --src en --tgt de] [--jobs 6] [--quick]

Runs `attent compare` (architectures), `attent compare --table3`, `benchmarks.table1` and `benchmarks.long_range`, each
of which resumes by itself, and collects their reports in DIR/report.md, with date, commit, machine and time.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from attent.formatting import format_duration, markdown_table
from attent.storage.atomic import write_atomic
from benchmarks.timing import describe_machine

INTERRUPTED = 130  # an exit code
REPORTS = {
    "architectures": "report.md",
    "table3": "report.md",
    "table1": "table1.md",
    "long-range": "long-range.md",
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/why-attention"), help="folder of all results")
    parser.add_argument("--data", default="multi30k", help="corpus, with validation and test sets in its folder")
    parser.add_argument("--src", default="en")
    parser.add_argument("--tgt", default="de")
    parser.add_argument("--steps", type=int, default=2500, help="training steps of each architecture")
    parser.add_argument("--table3-steps", type=int, default=2500, help="training steps of each row of table 3")
    parser.add_argument("--seeds", nargs="+", default=["1", "2"], help="of architectures and table 3")
    parser.add_argument("--long-range-seeds", nargs="+", default=["1", "2", "3"], help="of the long-range tasks")
    parser.add_argument(
        "--jobs", type=int, default=1, help="models of table 3 and of the long-range tasks that train at once"
    )
    parser.add_argument("--parts", nargs="+", choices=REPORTS, default=list(REPORTS))
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps, to see that everything runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, failed = arguments.out / "measured.json", []
    measured = json.loads(path.read_text()) if path.exists() else {}
    for part in arguments.parts:
        command = [sys.executable, "-m", *build_command(part, arguments)]
        print(f"== {part}: {' '.join(command[2:])}", flush=True)
        start, before = time.monotonic(), list_results(arguments.out / part)
        code = run_part(command)
        failed += [part] if code else []
        entry = measured.setdefault(part, {"seconds": 0.0, "conditions": []})
        entry["seconds"] = round(entry["seconds"] + time.monotonic() - start, 1)
        if list_results(arguments.out / part) != before:  # otherwise everything was measured before
            entry["conditions"] = list(dict.fromkeys([*entry["conditions"], describe_conditions()]))
        write_atomic(path, json.dumps(measured).encode())
        if code == INTERRUPTED:
            break
    report = collect_reports(arguments.out, measured)
    write_atomic(arguments.out / "report.md", report.encode())
    print(f"report: {arguments.out / 'report.md'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def run_part(command: Sequence[str]) -> int:
    """Return the exit code; Ctrl-C reaches the part too, which saves its run."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        return INTERRUPTED


def build_command(part: str, arguments: argparse.Namespace) -> list[str]:
    """The module and arguments that measure a part."""
    out, jobs = str(arguments.out / part), ["--jobs", str(arguments.jobs)]
    quick = ["--quick"] if arguments.quick else []
    if part == "table1":
        return ["benchmarks.table1", "--out", out, *quick]
    if part == "long-range":
        return ["benchmarks.long_range", "--out", out, "--seeds", *arguments.long_range_seeds, *jobs, *quick]
    steps = arguments.table3_steps if part == "table3" else arguments.steps
    tiny = ["--size", "tiny", "--batch-tokens", "512", "--valid-sentences", "10", "--beam-size", "1"]
    command = ["attent", "compare", "--data", arguments.data, "--src", arguments.src, "--tgt", arguments.tgt]
    command += ["--out", out, "--seeds", *arguments.seeds, "--steps", str(10 if arguments.quick else steps)]
    # One architecture at a time, since their times are compared; 5 checkpoints to average.
    own = ["--table3", *jobs] if part == "table3" else ["--rdrop", "0", "--valid-every", str(max(1, steps // 10))]
    own += ["--augment", "none"]  # as in the published results
    return [*command, *own, *(tiny if arguments.quick else [])]


def list_results(folder: Path) -> dict[Path, int]:
    """The files of measurements with their times of change."""
    paths = [*folder.glob("results.json"), *folder.glob("results/*.json")]
    return {path: path.stat().st_mtime_ns for path in paths}


def describe_conditions() -> str:
    """Date, commit and machine of this call."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    is_installed = shutil.which("git") is not None
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if is_installed else ""
    version = f", commit {commit}" if commit else ""
    return f"{date.today().isoformat()}{version}; {describe_machine()}"


def collect_reports(out: Path, measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Join the reports of all parts that have one; headings move one level down."""
    parts_measured = [(part, measured[part]) for part in REPORTS if part in measured]
    rows = [[part, format_duration(each["seconds"]), "; ".join(each["conditions"])] for part, each in parts_measured]
    rows.append(["together", format_duration(sum(each["seconds"] for _, each in parts_measured)), ""])
    parts = ["# Measurements", markdown_table(["part", "time", "measured"], rows, right_aligned=[1])]
    for part, name in REPORTS.items():
        if (report := out / part / name).exists():
            text = re.sub(r"^#", "##", report.read_text(encoding="utf-8"), flags=re.MULTILINE)
            parts.append(re.sub(r"(!\[[^\]]*\]\()", rf"\1{part}/", text).strip())
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
