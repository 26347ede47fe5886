"""Size, load time and pointer latency of the `attent look` page in Chromium.

    python -m benchmarks.look_page [--layers 6] [--heads 8] [--width 512] [--tokens 60]

The model has random weights, which do not compress, so that pages of trained models are no larger. Load time is from
navigation until the page is interactive. Pointer latency is script, style and layout time per pointer move.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attent.decoding.options import SearchOptions
from attent.decoding.translator import Translator
from attent.inspection.html_page import render_page
from attent.inspection.inspectors.base import InspectionRequest
from attent.inspection.inspectors.seq2seq import TranslationInspector
from attent.models import build, presets
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.training.autoconfig import fit_to_tokenizer

TEXT = (
    "every head of every layer attends to some words of a sentence and adds something about them to the residual stream"
)
COSTS = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
TARGETS = {  # tab -> elements to point at
    "heads": {"token": ".lines [role=option]", "head": ".grid-cells button"},
    "equation": {"row": ".eq-table tbody tr"},
    "decoding": {"node": "#panel-decoding .dec-node"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 6), ("heads", 8), ("width", 512), ("tokens", 60), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    document = build_document(arguments)
    counts = {name: len(side["tokens"]) for name, side in document["sides"].items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "look.html"
        path.write_text(render_page(document), encoding="utf-8")
        print(f"{arguments.layers}+{arguments.layers} layers x {arguments.heads} heads, tokens {counts}")
        print(f"size   {path.stat().st_size / 1e6:.2f} MB, script and style {measure_shell(document) / 1e3:.0f} kB")
        for line in measure_page(path.as_uri(), arguments.rounds):
            print(line)


def build_document(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    words = TEXT.split()
    tokenizer = train_tokenizer([TEXT] * 20, [TEXT] * 20, TokenizerConfig(vocab=300), tags=())
    base = presets.base(vocab=300)
    stack = replace(base.encoder, layers=arguments.layers, heads=arguments.heads, width=arguments.width)
    config = replace(base, encoder=stack, decoder=replace(stack, causal=True, cross_attention=True))
    translator = Translator(build(fit_to_tokenizer(config, tokenizer)).eval(), tokenizer)
    text = ""
    while len(tokenizer.encode_source([text])[0]) < arguments.tokens:
        text = f"{text} {words[len(text.split()) % len(words)]}".strip()
    return TranslationInspector(translator, name="random").inspect(
        InspectionRequest(text=text, search=SearchOptions(max_length=arguments.tokens))
    )


def measure_shell(document: dict[str, Any]) -> int:
    return len(render_page({**document, "layers": [], "sides": {}, "decoding": None}).encode())


def measure_page(url: str, rounds: int) -> Iterator[str]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        ready = []
        for _ in range(rounds):
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            tab.goto(url)
            tab.wait_for_selector("#page[aria-busy=false]")
            ready.append(float(tab.evaluate("performance.getEntriesByName('attent-ready')[0].startTime")))
            tab.close()
        yield f"ready  {statistics.median(ready):.0f} ms (median of {rounds}; {min(ready):.0f} to {max(ready):.0f})"
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        tab.goto(url)
        counter = tab.context.new_cdp_session(tab)
        counter.send("Performance.enable")
        for name, targets in TARGETS.items():
            tab.click(f"#tab-{name}")
            tab.wait_for_timeout(500)
            for element, selector in targets.items():
                yield f"point  {name}, {element}: {measure_pointer(tab, counter, selector)}"
        browser.close()


def measure_pointer(tab: Any, counter: Any, selector: str) -> str:
    """Move the pointer over the elements and return the latency."""
    boxes = [box for element in tab.locator(selector).all()[:40] if (box := element.bounding_box())]
    boxes = [box for box in boxes if 0 < box["y"] < 880 and 0 < box["x"] < 1380]
    if not boxes:
        return "no elements"
    latencies = []
    for box in boxes:
        before = read_cost(counter)
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        latencies.append(1000 * (read_cost(counter) - before))
    ordered = sorted(latencies)
    high = ordered[int(0.95 * (len(ordered) - 1))]
    median = statistics.median(latencies)
    return f"{median:.1f} ms (median of {len(latencies)}; 95% below {high:.1f}, max {ordered[-1]:.1f})"


def read_cost(counter: Any) -> float:
    metrics = {metric["name"]: metric["value"] for metric in counter.send("Performance.getMetrics")["metrics"]}
    return sum(metrics[name] for name in COSTS)


if __name__ == "__main__":
    main()
