"""`attent serve` and LibreTranslate with the same model, sentences and machine, in turn.

    python3 -m venv libre && libre/bin/pip install libretranslate
    python -m benchmarks.libretranslate --model runs/en-de --texts test.en --python libre/bin/python

LibreTranslate gets the model as attent exports it for CTranslate2 (int8), as an Argos package with the same tokenizer.
Both search with beam 4 and length penalty 0.2, which LibreTranslate always does, and translate each sentence once per
round, without a cache. LibreTranslate's sentence splitter needs a download; it is replaced by one that returns the
text as it is, which saves LibreTranslate time. "tuned" runs one search per core, each with one thread: `attent serve
--workers CORES --threads 1`, and ARGOS_INTER_THREADS=CORES ARGOS_INTRA_THREADS=1 with `--threads` for all clients.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from attent.interop.export import convert_model
from attent.serving.run import reserve_port
from benchmarks.http_load import Answer, run_clients
from benchmarks.serving import start_server
from benchmarks.timing import describe_machine

OURS = "attent"
START = """
from argostranslate import sbd
sbd.MiniSBDSentencizer.split_sentences = lambda self, text: [text]
from libretranslate.main import main
main()
"""
VERSIONS = (
    "from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in ('libretranslate', 'ctranslate2')))"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="one sentence per line")
    parser.add_argument("--python", required=True, help="of an environment with LibreTranslate")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    texts = list(dict.fromkeys(arguments.texts.read_text(encoding="utf-8").splitlines()))[: arguments.sentences]
    versions = subprocess.run([arguments.python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
    print(f"{len(texts)} sentences, {arguments.rounds} rounds; {versions.strip()}; {describe_machine()}", flush=True)
    cores, threads = os.cpu_count() or 1, str(max(arguments.clients))
    with tempfile.TemporaryDirectory() as home, ExitStack() as servers:
        write_package(arguments.model, Path(home))
        tuned = {"ARGOS_INTER_THREADS": str(cores), "ARGOS_INTRA_THREADS": "1"}
        start_ours = partial(start_server, arguments.model)
        start_theirs = partial(start_libretranslate, arguments.python, Path(home))
        urls = {
            OURS: servers.enter_context(start_ours("--threads", str(cores))),
            "LibreTranslate": servers.enter_context(start_theirs({})),
            f"{OURS}, tuned": servers.enter_context(start_ours("--workers", str(cores), "--threads", "1")),
            "LibreTranslate, tuned": servers.enter_context(start_theirs(tuned, "--threads", threads)),
        }
        for clients in arguments.clients:
            measure(urls, clients, texts, arguments.rounds)


def measure(urls: dict[str, str], clients: int, texts: list[str], rounds: int) -> None:
    """Print sentences per second and latencies of each server, and the ratios within each round."""
    rates: dict[str, list[float]] = {name: [] for name in urls}
    latencies: dict[str, list[float]] = {name: [] for name in urls}
    translations: dict[str, dict[str, str]] = {name: {} for name in urls}
    for number in range(rounds + 1):  # the first warms up
        for name, url in urls.items():
            begin = time.perf_counter()
            seconds = asyncio.run(translate_all(name, url, clients, texts, translations[name]))
            if number:
                rates[name].append(len(texts) / (time.perf_counter() - begin))
                latencies[name] += seconds
    for name, values in rates.items():
        ordered = sorted(latencies[name])
        p50, p99 = (1000 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        line = f"{clients:3} clients  {name:22} {statistics.median(values):7.1f} sentences/s ({min(values):.1f} to "
        line += f"{max(values):.1f}), p50 {p50:.0f} ms, p99 {p99:.0f} ms"
        if not name.startswith(OURS):
            ours = rates[name.replace("LibreTranslate", OURS)]
            ratios = [our / their for our, their in zip(ours, values, strict=True)]
            equal = sum(translations[name][text] == translations[OURS][text] for text in texts) / len(texts)
            line += f"; attent is {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to "
            line += f"{max(ratios):.2f}); {equal:.0%} equal translations"
        print(line, flush=True)


async def translate_all(
    name: str, url: str, clients: int, texts: list[str], translations: dict[str, str]
) -> list[float]:
    """Translate the texts, each in a request; return the seconds of each."""
    is_ours = name.startswith(OURS)

    def keep(answer: Answer, body: dict[str, str]) -> None:
        if answer.status != 200:
            raise SystemExit(f"{name}: status {answer.status}: {answer.body[:200]!r}")
        found = answer.json["translations"][0]["text"] if is_ours else answer.json["translatedText"]
        translations[body.get("text") or body["q"]] = found

    if is_ours:
        options = {"source": "en", "beam_size": 4, "length_penalty": 0.2, "prevent_loops": False}
        requests = [("/v1/translate", {"text": text, **options}) for text in texts]
    else:
        requests = [("/translate", {"q": text, "source": "en", "target": "de"}) for text in texts]
    return await run_clients(url, clients, requests, keep)


def write_package(model: Path, home: Path) -> None:
    """Write the model as two Argos packages: if there is only one, LibreTranslate looks for more on the network."""
    packages = home / "argos-translate" / "packages"
    for source, target in (("en", "de"), ("de", "en")):
        package = packages / f"{source}_{target}"
        package.mkdir(parents=True)
        convert_model(model, package / "model", "ctranslate2", quantization="int8")
        config = json.loads((package / "model" / "config.json").read_text())
        (package / "model" / "config.json").write_text(json.dumps(config | {"add_source_eos": True}))
        shutil.copy(package / "model" / "tokenizer.model", package / "sentencepiece.model")
        names = {"en": "English", "de": "German"}
        facts = {"package_version": "1.0", "argos_version": "1.9", "from_code": source, "to_code": target}
        facts |= {"from_name": names[source], "to_name": names[target]}
        (package / "metadata.json").write_text(json.dumps(facts))


@contextmanager
def start_libretranslate(python: str, home: Path, settings: dict[str, str], *flags: str) -> Iterator[str]:
    """Run LibreTranslate; yield its address."""
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
    command = [python, "-c", START, "--port", str(port), "--disable-web-ui", *flags]
    environment = {**os.environ, **settings, "XDG_DATA_HOME": str(home), "PYTHONPATH": ""}
    output = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, cwd=home, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(40)


if __name__ == "__main__":
    main()
