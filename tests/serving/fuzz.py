"""Fuzz the translation server with Schemathesis, in all its phases and with all its checks but one.

    python -m tests.serving.fuzz SCHEMATHESIS [CASES]

A valid request may be for a language that no model has, so `positive_data_acceptance` is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from attent.serving.gateway import ServerOptions
from attent.serving.limits import Limits
from tests.serving.translation_server import start_translation_server

ROOT = Path(__file__).parents[2]
CASES_PER_EXAMPLE = 35  # of a run, measured


def main(schemathesis: str, num_cases: int) -> int:
    """Run until there were so many cases; return the exit status."""
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "tests.serving.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    total = status = seed = 0
    with tempfile.TemporaryDirectory() as name:
        limits = Limits(max_queued=256, requests_per_minute=0)
        options = ServerOptions(limits=limits, suggestions=Path(name) / "suggestions.jsonl")
        with start_translation_server(Path(name), options, generator=True) as client:
            while total < num_cases and not status:
                seed += 1
                examples = min(300, max(1, (num_cases - total) // CASES_PER_EXAMPLE))
                command = [
                    str(Path(schemathesis).absolute()),
                    "run",
                    f"{client.url}/openapi.json",
                    "--seed",
                    str(seed),
                    "-n",
                    str(examples),
                ]
                command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--continue-on-failure"]
                command += [
                    "--warnings",
                    "off",
                    "--request-timeout",
                    "40",
                    "--max-response-time",
                    "40",
                    "--suppress-health-check",
                    "all",
                ]
                done = subprocess.run(command, env=environment, cwd=name, capture_output=True, text=True)
                print(done.stdout, done.stderr, sep="\n")
                status = done.returncode
                total += sum(int(count) for count in re.findall(r"(\d+) generated", done.stdout))
    print(f"{total} cases, {'no failure' if not status else 'with failures'}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10_000))
