"""Throughput and latency of `attent serve`, compared with `attent translate` on the same sentences.

    python -m benchmarks.serving                                    base size with random weights, synthetic sentences
    python -m benchmarks.serving --model runs/en-de --texts test.en

    offline       `Translator.translate` of all sentences at once, text to text
    one by one    the server, one client, one sentence per request
    N clients     the server, N clients, one sentence per request, or `--texts-per-request`

All alternate, round by round; the first round warms up. Random weights never end a translation, so that every output
has `--length` tokens. The server runs in processes of its own, and the clients in this one, which costs some of the
same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from attent.decoding.options import SearchOptions
from attent.decoding.translator import Translator
from benchmarks.decode_cpu import prepare_models
from benchmarks.http_load import Answer, run_clients
from benchmarks.timing import describe_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", type=Path, help="one sentence per line")
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--length", type=int, default=16, help="output length in tokens, with random weights")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--texts-per-request", type=int, default=1)
    parser.add_argument("--beam-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as home:
        model, texts, options = arguments.model, list[str](), dict[str, Any]()
        if model is None:
            texts = prepare_models(Path(home), 6, arguments.sentences)
            model, options = Path(home) / "ours", {"max_length": arguments.length, "prevent_loops": False}
        if arguments.texts is not None:
            texts = arguments.texts.read_text(encoding="utf-8").splitlines()[: arguments.sentences]
        measure(model, texts, options, arguments)


def measure(model: Path, texts: list[str], options: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print sentences per second of each way, and latencies of the server."""
    print(f"{len(texts)} sentences, beam {arguments.beam_size}; {describe_machine()}", flush=True)
    translator = Translator.load(model, threads=arguments.threads, device=arguments.device)
    search = SearchOptions(beam_size=arguments.beam_size, max_length=options.get("max_length"))
    rates: dict[str, list[float]] = {}
    latencies: dict[str, list[float]] = {}
    expected: list[str] = []
    different: Counter[bool] = Counter()
    flags = ["--threads", str(max(1, arguments.threads // arguments.workers)), "--workers", str(arguments.workers)]
    flags += ["--device", arguments.device] if arguments.device else []
    with start_server(model, *flags) as url:
        for number in range(arguments.rounds + 1):
            begin = time.perf_counter()
            results = translator.translate(texts, search, prevent_loops=options.get("prevent_loops", True))
            seconds = {"offline": time.perf_counter() - begin}
            expected = [result.text for result in results]
            for clients in arguments.clients:
                name = f"{clients} client{'s' if clients > 1 else ''}"
                begin = time.perf_counter()
                batches = list(batched(texts, arguments.texts_per_request))
                times = asyncio.run(
                    translate_all(url, clients, batches, expected, options, arguments.beam_size, different)
                )
                seconds[name] = time.perf_counter() - begin
                if number:
                    latencies.setdefault(name, []).extend(times)
            if number:
                for name, each in seconds.items():
                    rates.setdefault(name, []).append(len(texts) / each)
    print_rates(rates, latencies)
    print(f"{different[True]} of {different.total()} answers differ from offline: rounding depends on the batch")


def batched(texts: list[str], size: int) -> Iterator[list[str]]:
    yield from (texts[i : i + size] for i in range(0, len(texts), size))


async def translate_all(
    url: str,
    clients: int,
    batches: list[list[str]],
    expected: list[str],
    options: dict[str, Any],
    beam_size: int,
    different: Counter[bool],
) -> list[float]:
    """Send all texts; count in `different` whether each answer differs from the expected one."""
    answers = dict(zip(chain.from_iterable(batches), expected, strict=True))

    def check(answer: Answer, body: Any) -> None:
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {answer.body[:200]!r}")
        translations = [item["text"] for item in answer.json["translations"]]
        different.update(map(operator.ne, translations, map(answers.get, body["text"])))

    common = {"source": "en", "beam_size": beam_size, **options}
    requests = (("/v1/translate", {"text": batch, **common}) for batch in batches)
    return await run_clients(url, clients, requests, check, "X-Forwarded-For: 10.0.0.{client}\r\n")


def print_rates(rates: dict[str, list[float]], latencies: dict[str, list[float]]) -> None:
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates["offline"], strict=True)]
        spread = f"({min(values):,.0f} to {max(values):,.0f})"
        line = f"{name:12} {statistics.median(values):8,.1f} sentences/s {spread}"
        line += f", {statistics.median(ratios):.2f} of offline"
        if name in latencies:
            ordered = sorted(latencies[name])
            p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
            line += f", p50 {1000 * p50:,.0f} ms, p99 {1000 * p99:,.0f} ms"
        print(line, flush=True)


@contextmanager
def start_server(model: Path, *flags: str) -> Iterator[str]:
    """Run `attent serve` without cache and rate limit; yield its address."""
    command = [sys.executable, "-m", "attent", "serve", str(model), "--src", "en", "--tgt", "de", "--port", "0"]
    limits = ["--cache", "0", "--trust-proxy", "--requests-per-minute", "0", "--timeout", "120", *flags]
    process = subprocess.Popen([*command, *limits], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit("the server did not start")
        yield url
    finally:
        process.terminate()
        process.wait(40)


if __name__ == "__main__":
    main()
