"""Does the fast way learn what the plain way learns? The same model, text and order of batches, trained three times:

    fast        as `attent train` trains on this device: on a GPU compiled, in bfloat16, with our own kernels
    reference   uncompiled, in float32, without our kernels, attention by equation 1 as written (`explicit`)
    other draw  what chance alone does: as the reference but with other dropout and, for its time, `fused` attention and
                the precision that the device is fast with

    python -m benchmarks.loss_curve --svg docs/loss-curves.svg              500 updates of a small model, made-up text
    python -m benchmarks.loss_curve --size base --data FOLDER --src en --tgt de --svg FILE --json FILE
    python -m benchmarks.loss_curve --dropout 0                             chance aside: what is left is rounding
    python -m benchmarks.loss_curve --device cpu                            a few updates, to see that it runs

All begin with the same weights. Told is the mean distance between two curves, each smoothed over `WINDOW` updates: if
the fast one is as far from the reference as the other draw is, it follows it within noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

import torch

import attent
from attent.data.batches import Batches
from attent.data.corpus import corpora
from attent.data.encode import Recipe
from attent.data.estimate import Size
from attent.data.pairs import Languages, Pair
from attent.data.plan import BatchConfig
from attent.data.store import Store, prepare
from attent.models import Seq2SeqConfig
from attent.models.presets import with_stacks
from attent.nn import kernels, set_backend
from attent.text.tokenizer import Tokenizer
from attent.text.train import TokenizerConfig, train
from attent.train import chance, loop
from attent.train.choose import Amount, for_tokenizer, recipe
from attent.train.config import Precision, TrainConfig
from attent.train.curves import FONT, GRID, INK, PAPER, QUIET, Scale, number, span, thinned, ticks
from attent.train.curves import Line as Curve
from attent.train.events import Event, Progress
from attent.train.team import Team
from benchmarks import made_up
from benchmarks.measure import machine

WINDOW = 25  # updates over which a curve is smoothed
LONGEST = 256
FAST, REFERENCE, OTHER = "fast", "reference", "other draw"
COLOURS = {FAST: "#d55e00", REFERENCE: "#0072b2", OTHER: "#cbd5e0"}
WIDTHS = {FAST: 1.4, REFERENCE: 3.5, OTHER: 7.0}  # one on the other, all are seen


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run differs from what would be chosen for it."""

    backend: Literal["auto", "explicit", "fused"] = "auto"
    kernels: bool = True  # of our own, where they can run
    seed: int = 1  # of dropout
    precision: Precision | None = None  # None: as the device likes it
    compile: bool | None = None


WAYS = {
    OTHER: Way(backend="fused", kernels=False, seed=2, compile=False),
    REFERENCE: Way(backend="explicit", kernels=False, precision="float32", compile=False),
    FAST: Way(),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all runs share."""

    store: Store
    tokenizer: Tokenizer
    model: Seq2SeqConfig
    size: Size
    steps: int
    tokens: int | None
    device: torch.device


def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    loop.REPORT = 0.0  # seconds between two reports: one for every update
    print(f"{asked.size}, {asked.steps:,} updates; {machine()}", flush=True)
    with tempfile.TemporaryDirectory() as home:
        task = prepared(Path(home), asked)
        curves = {name: learned(task, name, way, Path(home) / name.replace(" ", "-")) for name, way in WAYS.items()}
    print("\n".join(told(curves)))
    if asked.svg:
        Path(asked.svg).write_text(svg(curves, f"{asked.size}, {asked.steps:,} updates"), encoding="utf-8")
    if asked.json:
        facts = {"machine": machine(), "size": asked.size, "curves": curves, "distances": distances(curves)}
        Path(asked.json).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="updates, by default 500; on a CPU 12")
    parser.add_argument("--size", choices=("tiny", "small", "base", "big"))
    parser.add_argument("--tokens", type=int, help="of a batch; by default as `attent train` chooses")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--data", help="parallel text; without it, it is made up")
    parser.add_argument("--src", default="en")
    parser.add_argument("--tgt", default="de")
    parser.add_argument("--pairs", type=int, help="that are made up")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--svg", help="a file for the picture")
    parser.add_argument("--json", help="a file for all numbers")
    asked = parser.parse_args(words)
    gpu = asked.device.startswith("cuda")
    asked.size = asked.size or ("small" if gpu else "tiny")
    asked.steps = asked.steps or (500 if gpu else 12)
    asked.tokens = asked.tokens or (None if gpu else 512)
    asked.pairs = asked.pairs or (50_000 if gpu else 500)
    asked.vocab = asked.vocab or (8_000 if gpu else 500)
    return asked


def prepared(home: Path, asked: argparse.Namespace) -> Task:
    """Text becomes subwords and batches, as in any training."""
    languages = Languages(asked.src, asked.tgt) if asked.data else Languages()
    if asked.data is None:
        made_up.write(home / "corpus.tsv", asked.pairs)
    found = corpora([asked.data or str(home / "corpus.tsv")], languages)
    pairs = [entry for entry in found[0] if isinstance(entry, Pair)]
    tokenizer = train([p.source for p in pairs], [p.target for p in pairs], TokenizerConfig(vocab=asked.vocab))
    store = prepare(found, Recipe(tokenizer=tokenizer), home / "stores")
    preset = for_tokenizer(getattr(attent.presets, asked.size)(tokenizer.source.size), tokenizer)
    return Task(
        store=store,
        tokenizer=tokenizer,
        model=with_stacks(preset, dropout=asked.dropout),
        size=asked.size,
        steps=asked.steps,
        tokens=asked.tokens,
        device=torch.device(asked.device),
    )


def learned(task: Task, name: str, way: Way, out: Path) -> list[float]:
    """The loss of every update."""
    began, never = time.perf_counter(), 10**9
    amount = Amount(pairs=len(task.store), tokens=int(task.store.target.lengths().sum()))
    asked = TrainConfig(
        steps=task.steps, batch_tokens=task.tokens, precision=way.precision, compile=way.compile, seed=way.seed,
        save_every=never, valid_every=never,
    )  # fmt: skip
    config = recipe(asked, task.size, task.model, amount, task.device)
    assert config.batch_tokens
    longest = min(LONGEST, config.batch_tokens)
    batches = Batches(task.store, BatchConfig(tokens=config.batch_tokens, longest=longest), seed=1)
    chance.fix(1, 0)
    model = attent.build(task.model)
    set_backend(model, way.backend)
    events: list[Event] = []
    with own_kernels(way.kernels):
        loop.Training(model, task.tokenizer, config, batches, None, None, out, Team(task.device), events.append).run()
    losses = list(by_update(events))
    taken = f"{way.backend} attention, {'our' if way.kernels else 'no'} kernels"
    how = f"{config.precision}, {'compiled' if config.compile else 'uncompiled'}, {taken}"
    print(f"{name}: {time.perf_counter() - began:.1f} s ({how}, seed {way.seed})", flush=True)
    return losses


@contextmanager
def own_kernels(taken: bool) -> Iterator[None]:
    """Whether they are taken where they can be; without, torch's own do all of it."""
    before = kernels.INSTALLED
    kernels.INSTALLED = before and taken
    try:
        yield
    finally:
        kernels.INSTALLED = before


def by_update(events: Sequence[Event]) -> Iterator[float]:
    """A report speaks of all updates since the one before it."""
    done = 0
    for event in events:
        if isinstance(event, Progress):
            yield from [event.loss] * (event.step - done)
            done = event.step


# ---- how far apart ---------------------------------------------------------------------------------------------------


def smoothed(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """At each update the mean of those up to it, at most `window` of them."""
    return [statistics.fmean(losses[max(0, at - window) : at]) for at in range(1, len(losses) + 1)]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The mean over the updates, the first window aside, where both fall alike from the same weights."""
    pairs = list(zip(smoothed(one), smoothed(other), strict=True))
    return statistics.fmean(abs(a - b) for a, b in pairs[min(WINDOW, len(pairs) - 1) :])


def distances(curves: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """From the reference."""
    return {name: distance(curves[name], curves[REFERENCE]) for name in (FAST, OTHER)}


def told(curves: Mapping[str, Sequence[float]]) -> Iterator[str]:
    far = distances(curves)
    yield f"\n| | mean loss of the last {WINDOW} updates | mean distance to the reference, smoothed |"
    yield "|---|---|---|"
    for name in (REFERENCE, FAST, OTHER):
        yield f"| {name} | {smoothed(curves[name])[-1]:.4f} | {f'{far[name]:.5f}' if name in far else ''} |"
    if far[OTHER]:
        yield f"\nthe fast way is {far[FAST] / far[OTHER]:.2f} times as far from the reference as another draw is"


# ---- the picture -----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT = 820, 500, 62, 24
LOSSES, APART = (74, 316), (388, 462)  # top and bottom of the two panels


def svg(curves: Mapping[str, Sequence[float]], title: str) -> str:
    told = escape(f"Training loss of the fast way, the reference and another draw: {title}")
    body = "\n".join((*losses_panel(curves), *apart_panel(curves)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{told}" font-family="{FONT}" font-size="12">\n<title>{told}</title>\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="{PAPER}" stroke="{GRID}"/>\n'
        f"{text(LEFT, 30, title, size=14, weight='600')}\n{body}\n</svg>\n"
    )


def losses_panel(curves: Mapping[str, Sequence[float]]) -> Iterator[str]:
    lines = [line(name, smoothed(losses)) for name, losses in curves.items()]
    yield text(LEFT, 52, f"Label-smoothed loss, nats per token, smoothed over {WINDOW} updates", colour=QUIET)
    yield from panel(lines, LOSSES)
    for place, name in enumerate((REFERENCE, FAST, OTHER)):
        x = WIDTH - RIGHT - 110 * (3 - place)
        yield f'<path d="M{x} 26h18" stroke="{COLOURS[name]}" stroke-width="{WIDTHS[name]}"/>'
        yield text(x + 24, 30, name)


def apart_panel(curves: Mapping[str, Sequence[float]]) -> Iterator[str]:
    reference = smoothed(curves[REFERENCE])
    lines = [
        line(name, [a - b for a, b in zip(smoothed(curves[name]), reference, strict=True)]) for name in (OTHER, FAST)
    ]
    yield text(LEFT, APART[0] - 22, "The same, less the reference", colour=QUIET)
    yield from panel(lines, APART)


def line(name: str, values: Sequence[float]) -> Curve:
    return Curve(name=name, points=tuple(enumerate(values, 1)))


def panel(lines: Sequence[Curve], between: tuple[int, int]) -> Iterator[str]:
    """Axes and curves; what falls at the very beginning is cut off at the border."""
    end = max(len(line.points) for line in lines)
    marks = ticks(*span(lines, end), 5 if between is LOSSES else 3)
    across, down = Scale(0, end, LEFT, WIDTH - RIGHT), Scale(marks[0], marks[-1], between[1], between[0])
    for mark in marks:
        yield f'<path d="M{LEFT} {down(mark):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>'
        yield text(LEFT - 8, down(mark) + 4, number(mark), anchor="end", colour=QUIET, size=11)
    for step in ticks(0, end, 5):
        if step <= end:
            yield text(across(step), between[1] + 18, number(step), anchor="middle", colour=QUIET, size=11)
    for one in lines:
        points = [(across(x), min(max(down(y), between[0]), between[1])) for x, y in thinned(one.points)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        drawn = f'stroke="{COLOURS[one.name]}" stroke-width="{WIDTHS[one.name] if between is LOSSES else 1.6}"'
        yield f'<path d="M{path}" fill="none" {drawn} stroke-linejoin="round"/>'


def text(
    x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, size: int = 12, weight: str = "400"
) -> str:
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
