"""The page of `attent look` in Chromium: how large it is, how soon it is ready, what pointing at things costs.

    python -m benchmarks.look_page [--layers 6] [--heads 8] [--width 512] [--tokens 60]

The model has random weights: its numbers do not compress, so that a trained one's page is no larger. Ready is the time
from the start of the navigation until everything answers. Pointing: what Chromium counts as script, style and layout
for one move of the pointer to another word, cell or head.
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

from attent.decoding import SearchOptions, Translator
from attent.inspection.html_page import render_page
from attent.inspection.inspectors.translation import InspectionRequest, TranslationInspector
from attent.models import build, presets
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.training.autoconfig import fit_to_tokenizer

TEXT = "every head of every layer looks at some words of a sentence and says something about them to the next layer"
COSTS = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
PLACES = {  # tab -> what is pointed at there
    "heads": {"a word": ".lines [role=option]", "a head": ".grid-cells button"},
    "equation": {"a line": ".eq-table tbody tr"},
    "decoding": {"a node": "#panel-decoding .dec-node"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 6), ("heads", 8), ("width", 512), ("tokens", 60), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    document = made(asked)
    counts = {name: len(side["tokens"]) for name, side in document["sides"].items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "look.html"
        path.write_text(render_page(document), encoding="utf-8")
        print(f"{asked.layers}+{asked.layers} layers x {asked.heads} heads, tokens {counts}")
        print(f"size   {path.stat().st_size / 1e6:.2f} MB, of it the program and style {shell(document) / 1e3:.0f} kB")
        for line in measured(path.as_uri(), asked.rounds):
            print(line)


def made(asked: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    words = TEXT.split()
    tokenizer = train_tokenizer([TEXT] * 20, [TEXT] * 20, TokenizerConfig(vocab=300), tags=())
    base = presets.base(vocab=300)
    stack = replace(base.encoder, layers=asked.layers, heads=asked.heads, width=asked.width)
    config = replace(base, encoder=stack, decoder=replace(stack, causal=True, cross_attention=True))
    translator = Translator(build(fit_to_tokenizer(config, tokenizer)).eval(), tokenizer)
    text = ""
    while len(tokenizer.encode_source([text])[0]) < asked.tokens:
        text = f"{text} {words[len(text.split()) % len(words)]}".strip()
    return TranslationInspector(translator, name="random").inspect(
        InspectionRequest(text=text, search=SearchOptions(max_length=asked.tokens))
    )


def shell(document: dict[str, Any]) -> int:
    return len(render_page({**document, "layers": [], "sides": {}, "decoding": None}).encode())


def measured(url: str, rounds: int) -> Iterator[str]:
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
        for name, places in PLACES.items():
            tab.click(f"#tab-{name}")
            tab.wait_for_timeout(500)
            for what, selector in places.items():
                yield f"point  {name}, {what}: {pointing(tab, counter, selector)}"
        browser.close()


def pointing(tab: Any, counter: Any, selector: str) -> str:
    """Move the pointer from one to the next."""
    boxes = [box for one in tab.locator(selector).all()[:40] if (box := one.bounding_box())]
    boxes = [box for box in boxes if 0 < box["y"] < 880 and 0 < box["x"] < 1380]
    if not boxes:
        return "nothing to point at"
    found = []
    for box in boxes:
        before = cost(counter)
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found.append(1000 * (cost(counter) - before))
    ordered = sorted(found)
    high = ordered[int(0.95 * (len(ordered) - 1))]
    return f"{statistics.median(found):.1f} ms (median of {len(found)}; 95% below {high:.1f}, most {ordered[-1]:.1f})"


def cost(counter: Any) -> float:
    metrics = {one["name"]: one["value"] for one in counter.send("Performance.getMetrics")["metrics"]}
    return sum(metrics[name] for name in COSTS)


if __name__ == "__main__":
    main()
