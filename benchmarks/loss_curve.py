"""Does the fast way learn what the plain way learns? The same model, text and order of batches, trained many times:

    fast        as `attent train` trains on this device: on a GPU compiled, in bfloat16, with our own kernels
    reference   uncompiled, in float32, without our kernels, attention by torch's own `fused`

    python -m benchmarks.loss_curve --svg docs/loss-curves.svg              500 updates of a small model, made-up text
    python -m benchmarks.loss_curve --size base --data FOLDER --src en --tgt de --svg FILE --json FILE
    python -m benchmarks.loss_curve --exact                                 the reference's attention as equation 1
    python -m benchmarks.loss_curve --dropout 0                             one run each: what is left is rounding
    python -m benchmarks.loss_curve --device cpu                            a few updates, to see that it runs

All begin with the same weights; a run differs from the next of its way by what dropout draws. When a run leaves the
plateau at its beginning is chance: the least difference moves it by some updates, and the loss there by tenths. So one
run of each says nothing, and `--draws` of each are compared by their means. Two ways that are the same come to means
more than 2 standard errors apart once in eleven times with four draws each, and once in five with two (Student's t).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from attent.train.curves import FONT, GRID, INK, PAPER, QUIET, Point, Scale, number, span, thinned, ticks
from attent.train.curves import Line as Curve
from attent.train.events import Event, Progress
from attent.train.team import Team
from benchmarks import made_up
from benchmarks.measure import machine

WINDOW = 25  # updates over which a curve is smoothed
ERRORS = 2.0  # standard errors of a difference that chance alone makes
LONGEST = 256
FAST, REFERENCE = "fast", "reference"
Losses = Sequence[float]  # of every update of a run
Curves = Mapping[str, Sequence[Losses]]  # of every run of each way


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run differs from what would be chosen for it."""

    backend: Literal["auto", "explicit", "fused"] = "auto"
    kernels: bool = True  # of our own, where they can run
    precision: Precision | None = None  # None: as the device likes it
    compile: bool | None = None


def ways(exact: bool) -> dict[str, Way]:
    backend: Literal["explicit", "fused"] = "explicit" if exact else "fused"
    return {FAST: Way(), REFERENCE: Way(backend=backend, kernels=False, precision="float32", compile=False)}


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
    curves: dict[str, list[Losses]] = {REFERENCE: [], FAST: []}
    with tempfile.TemporaryDirectory() as home:
        task = prepared(Path(home), asked)
        for seed in range(1, asked.draws + 1):
            for name, way in ways(asked.exact).items():
                curves[name].append(learned(task, name, way, seed, Path(home) / "run"))
            write(curves, asked)  # so that a run that is cut short has told something
    print("\n".join(told(curves)))


def write(curves: Curves, asked: argparse.Namespace) -> None:
    """The files that were asked for, of what there is so far."""
    if asked.svg:
        draws = f"{len(curves[FAST])} draw{'s' * (len(curves[FAST]) > 1)} of dropout each" if asked.dropout else ""
        about = [f"{asked.size}, {asked.steps:,} updates", draws or "no dropout", machine().partition(", Python")[0]]
        Path(asked.svg).write_text(svg(curves, "; ".join(about)), encoding="utf-8")
    if asked.json:
        settings = {name: getattr(asked, name) for name in ("size", "steps", "dropout", "exact")}
        found = {figure: asdict(compared(curves, figure)) for figure in FIGURES}
        facts = {"machine": machine(), **settings, "compared": found, "curves": curves}
        Path(asked.json).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="updates, by default 500; on a CPU 12")
    parser.add_argument("--size", choices=("tiny", "small", "base", "big"))
    parser.add_argument("--draws", type=int, help="runs of each way, by default 4; on a CPU 2, and without dropout 1")
    parser.add_argument("--exact", action="store_true", help="the reference's attention by `explicit`, which is slow")
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
    asked.draws = max(1, asked.draws or (4 if gpu else 2)) if asked.dropout else 1
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


class Unsaved(loop.Training):
    """Of which only the losses are wanted."""

    def save(self) -> None:
        pass


def learned(task: Task, name: str, way: Way, seed: int, out: Path) -> Losses:
    """The loss of every update. Models are new, their code is not: only the first run of a way compiles it."""
    began = time.perf_counter()
    config = configured(task, way, seed)
    assert config.batch_tokens
    longest = min(LONGEST, config.batch_tokens)
    batches = Batches(task.store, BatchConfig(tokens=config.batch_tokens, longest=longest), seed=1)
    chance.fix(1, 0)
    model = attent.build(task.model)
    set_backend(model, way.backend)
    events: list[Event] = []
    with own_kernels(way.kernels):
        Unsaved(model, task.tokenizer, config, batches, None, None, out, Team(task.device), events.append).run()
    if task.device.type == "cuda":
        gc.collect()  # a run and its recordings hold on to each other, and to memory
    losses = list(by_update(events))
    ours = way.kernels and kernels.INSTALLED and task.device.type == "cuda"
    attention = f"{way.backend} attention, {'our' if ours else 'no'} kernels"
    how = f"{config.precision}, {'compiled' if config.compile else 'uncompiled'}, {attention}"
    print(f"{name} {seed}: {last(losses):.4f} in {time.perf_counter() - began:.1f} s ({how})", flush=True)
    return losses


def configured(task: Task, way: Way, seed: int) -> TrainConfig:
    """As `attent train` does it, but for what the way says. The seed is that of dropout."""
    never = 10**9
    asked = TrainConfig(
        steps=task.steps, batch_tokens=task.tokens, precision=way.precision, compile=way.compile, seed=seed,
        save_every=never, valid_every=never,
    )  # fmt: skip
    amount = Amount(pairs=len(task.store), tokens=int(task.store.target.lengths().sum()))
    return recipe(asked, task.size, task.model, amount, task.device)


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


def smoothed(losses: Losses, window: int = WINDOW) -> list[float]:
    """At each update the mean of those up to it, at most `window` of them."""
    return [statistics.fmean(losses[max(0, at - window) : at]) for at in range(1, len(losses) + 1)]


def last(losses: Losses) -> float:
    return statistics.fmean(losses[-WINDOW:])


LAST, AREA = f"mean loss of the last {WINDOW} updates", "area under the curve, per update"
FIGURES: dict[str, Callable[[Losses], float]] = {LAST: last, AREA: statistics.fmean}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A number that chance has a part in, as it was drawn several times."""

    mean: float
    spread: float | None  # standard deviation over the draws; of one draw there is none

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.spread:.4f}" if self.spread is not None else "")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A number of the fast way beside that of the reference."""

    fast: Drawn
    reference: Drawn
    difference: float  # of the means, the fast one less the other
    error: float | None  # the standard error of it

    @property
    def within(self) -> bool | None:
        return None if self.error is None else abs(self.difference) <= ERRORS * self.error

    def __str__(self) -> str:
        apart = f"the fast way is at {self.fast.mean:.4f}, the reference at {self.reference.mean:.4f}"
        if self.error is None:
            return f"{apart}, {self.difference:+.4f} apart; one run of each cannot tell how much of it is chance"
        where = "within" if self.within else "more than"
        verdict = "no more than chance alone does" if self.within else "more than chance alone does"
        band = f"{ERRORS:g} standard errors of it ({ERRORS * self.error:.4f})"
        return f"{apart}: {self.difference:+.4f} apart, {where} {band}, {verdict}"


def drawn(values: Sequence[float]) -> Drawn:
    return Drawn(mean=statistics.fmean(values), spread=statistics.stdev(values) if len(values) > 1 else None)


def contrasted(fast: Sequence[float], reference: Sequence[float]) -> Compared:
    """On a GPU our kernels draw dropout by themselves: one seed is another draw in each way, and nothing pairs them."""
    one, other = drawn(fast), drawn(reference)
    error = None
    if one.spread is not None and other.spread is not None:
        error = math.sqrt(one.spread**2 / len(fast) + other.spread**2 / len(reference))
    return Compared(fast=one, reference=other, difference=one.mean - other.mean, error=error)


def compared(curves: Curves, figure: str) -> Compared:
    fast, reference = ([FIGURES[figure](losses) for losses in curves[name]] for name in (FAST, REFERENCE))
    return contrasted(fast, reference)


def along(curves: Curves) -> list[Compared]:
    """The smoothed curves, update by update."""
    fast, reference = (zip(*map(smoothed, curves[name]), strict=True) for name in (FAST, REFERENCE))
    return [contrasted(one, other) for one, other in zip(fast, reference, strict=True)]


def share_within(curves: Curves) -> float | None:
    """Of the updates, once every curve has a whole window behind it."""
    found = along(curves)
    settled = [at.within for at in found[min(WINDOW, len(found)) - 1 :]]
    return None if None in settled else statistics.fmean(map(bool, settled))


def told(curves: Curves) -> Iterator[str]:
    found = {figure: compared(curves, figure) for figure in FIGURES}
    yield f"\n| mean ± standard deviation over the draws | {REFERENCE} | {FAST} | difference | its standard error |"
    yield "|---|---|---|---|---|"
    for figure, both in found.items():
        error = "" if both.error is None else f"{both.error:.4f}"
        yield f"| {figure} | {both.reference} | {both.fast} | {both.difference:+.4f} | {error} |"
    yield ""
    for figure, both in found.items():
        yield f"{figure}: {both}."
    share = share_within(curves)
    if share is not None:
        yield f"Smoothed, the means are within {ERRORS:g} standard errors of each other at {share:.0%} of the updates."


# ---- the picture -----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT = 820, 590, 64, 28
COLOURS = {REFERENCE: "#0072b2", FAST: "#d55e00"}  # of Okabe and Ito: told apart by colour-blind people
WIDTHS = {REFERENCE: 4.0, FAST: 1.7}  # one on the other, both are seen
BAND, DIFFERENCE = "#dfe4ea", INK
MOST = 220  # points of a line: smoothed as they are, more would not show


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A rectangle with two scales."""

    name: str  # of its clip path
    across: Scale
    down: Scale
    marks: Sequence[float]

    @classmethod
    def of(cls, name: str, lines: Sequence[Losses], between: tuple[int, int], marks: int) -> Panel:
        """As high as its lines, the fall at the very beginning aside."""
        end = max(map(len, lines))
        found = ticks(*span([Curve(name=name, points=tuple(enumerate(line, 1))) for line in lines], end), marks)
        top, bottom = between
        return cls(
            name=name,
            across=Scale(0, end, LEFT, WIDTH - RIGHT),
            down=Scale(found[0], found[-1], bottom, top),
            marks=found,
        )

    def places(self, line: Losses) -> list[Point]:
        return [(self.across(x), self.down(y)) for x, y in thinned(list(enumerate(line, 1)), MOST)]

    def axes(self) -> Iterator[str]:
        left, right, top, bottom = LEFT, WIDTH - RIGHT, self.down.end, self.down.start
        for mark in self.marks:
            colour = QUIET if mark == 0 and self.marks[0] < 0 else GRID
            yield f'<path d="M{left} {self.down(mark):.1f}H{right}" stroke="{colour}"/>'
            yield text(left - 9, self.down(mark) + 4, number(mark), anchor="end", colour=QUIET, size=11)
        for step in ticks(0, self.across.high, 5):
            if step <= self.across.high:
                x = self.across(step)
                yield f'<path d="M{x:.1f} {bottom}v5" stroke="{QUIET}"/>'
                yield text(x, bottom + 19, number(step), anchor="middle", colour=QUIET, size=11)
        yield f'<path d="M{left} {bottom}H{right}" stroke="{QUIET}"/>'
        rect = f'<rect x="{left}" y="{top - 3}" width="{right - left + 3}" height="{bottom - top + 6}"/>'
        yield f'<clipPath id="{self.name}">{rect}</clipPath>'

    def line(self, line: Losses, colour: str, width: float, opacity: float = 1.0) -> str:
        drawn = f'stroke="{colour}" stroke-width="{width:g}" stroke-opacity="{opacity:g}" stroke-linejoin="round"'
        return f'<path d="{path(self.places(line))}" clip-path="url(#{self.name})" fill="none" {drawn}/>'

    def band(self, low: Losses, high: Losses) -> str:
        around = [*self.places(low), *reversed(self.places(high))]
        return f'<path d="{path(around)}Z" clip-path="url(#{self.name})" fill="{BAND}"/>'


def svg(curves: Curves, about: str) -> str:
    both = compared(curves, LAST)
    title = "Training loss of the fast way and of the reference"
    words = escape(f"{title}: {about}. {LAST}: {both}.")
    body = "\n".join((*losses_panel(curves), *apart_panel(curves)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{words}" font-family="{FONT}" font-size="12">\n<title>{words}</title>\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="{PAPER}" stroke="{GRID}"/>\n'
        f"{text(LEFT, 34, title, size=16, weight='600')}\n{text(LEFT, 54, about, colour=QUIET)}\n{body}\n</svg>\n"
    )


def losses_panel(curves: Curves) -> Iterator[str]:
    """Every run as a thin line, the mean of each way as a thick one."""
    lines = {name: [smoothed(losses) for losses in curves[name]] for name in (REFERENCE, FAST)}
    panel = Panel.of("losses", [line for each in lines.values() for line in each], (98, 356), 5)
    unit = f"Label-smoothed loss, nats per token, smoothed over {WINDOW} updates"
    yield text(LEFT, 82, unit, weight="600")
    yield from panel.axes()
    for name, each in lines.items():
        if len(each) > 1:
            yield from (panel.line(line, COLOURS[name], 1, 0.45) for line in each)
    for name, each in lines.items():
        mean = [statistics.fmean(at) for at in zip(*each, strict=True)]
        yield panel.line(mean, COLOURS[name], WIDTHS[name])
    yield from legend(curves, panel)


def legend(curves: Curves, panel: Panel) -> Iterator[str]:
    """In the corner that a falling loss leaves free, with where each way has come to."""
    both = compared(curves, LAST)
    several = both.error is not None
    left, right, top = WIDTH - RIGHT - 300, WIDTH - RIGHT - 12, panel.down.end + 14
    yield f'<rect x="{left}" y="{top}" width="{right - left}" height="{76 if several else 58}" rx="6" fill="{PAPER}"/>'
    yield text(
        right, top + 13, f"last {WINDOW} updates{', ± over draws' * several}", anchor="end", colour=QUIET, size=11
    )
    for place, (name, value) in enumerate({REFERENCE: both.reference, FAST: both.fast}.items()):
        y = top + 33 + 20 * place
        yield f'<path d="M{left + 8} {y - 4}h26" stroke="{COLOURS[name]}" stroke-width="{WIDTHS[name]}"/>'
        yield text(left + 44, y, f"{name}{', mean' * several}")
        yield text(right, y, str(value), anchor="end", weight="600")
    if several:
        for row, name in enumerate((REFERENCE, FAST)):
            drawn = f'stroke="{COLOURS[name]}" stroke-opacity="0.6"'
            yield f'<path d="M{left + 8} {top + 67 + 5 * row}h26" {drawn}/>'
        yield text(left + 44, top + 73, "each draw", colour=QUIET)


def apart_panel(curves: Curves) -> Iterator[str]:
    """The difference of the means over what chance may make of it."""
    found = along(curves)
    apart = [at.difference for at in found]
    room = [ERRORS * at.error for at in found if at.error is not None]  # of all, or of none
    low, high = [-each for each in room], room
    panel = Panel.of("apart", [apart, low, high] if room else [apart], (428, 520), 3)
    yield text(LEFT, 412, "Fast less reference", weight="600")
    if room:
        yield panel.band(low, high)
        yield f'<rect x="{LEFT + 148}" y="402" width="22" height="12" rx="2" fill="{BAND}"/>'
        yield text(LEFT + 178, 412, f"within {ERRORS:g} standard errors: what chance alone does", colour=QUIET)
    yield from panel.axes()
    yield panel.line(apart, DIFFERENCE, 1.8)
    yield text(WIDTH - RIGHT, HEIGHT - 22, "updates", anchor="end", colour=QUIET, size=11)
    yield text(LEFT, HEIGHT - 22, verdict(curves), size=12)


def verdict(curves: Curves) -> str:
    """In one line."""
    both, share = compared(curves, LAST), share_within(curves)
    if both.error is None or share is None:
        return f"Last {WINDOW} updates: {both.difference:+.4f}, one run of each."
    where = "within" if both.within else "more than"
    at_end = f"Last {WINDOW} updates: {both.difference:+.4f}, {where} 2 standard errors ({ERRORS * both.error:.4f})"
    return f"{at_end}; within them at {share:.0%} of all updates."


def path(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def text(
    x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, size: int = 12, weight: str = "400"
) -> str:
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
