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
from attent.data.batch_plan import BatchConfig
from attent.data.corpus import open_corpora
from attent.data.encode import EncodingConfig
from attent.data.loader import PairLoader
from attent.data.pairs import LanguagePair, Pair
from attent.data.token_store import TokenStore, prepare_store
from attent.models import Seq2SeqConfig
from attent.models.presets import replace_stacks
from attent.nn import kernels, set_backend
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.training import loop, rng
from attent.training.autoconfig import DataSize, fill_train_config, fit_to_tokenizer
from attent.training.config import Precision, TrainConfig
from attent.training.curves import (
    BACKGROUND_COLOR,
    FONT,
    GRID_COLOR,
    MUTED_COLOR,
    TEXT_COLOR,
    AxisScale,
    CurvePoint,
    compute_ticks,
    downsample,
    format_number,
    value_range,
)
from attent.training.curves import CurveLine as Curve
from attent.training.distributed import DistributedContext
from attent.training.events import Event, Progress
from attent.training.run_options import Size
from benchmarks import synthetic_corpus
from benchmarks.timing import describe_machine

SMOOTHING_WINDOW = 25  # updates over which a curve is smoothed
MAX_STANDARD_ERRORS = 2.0  # standard errors of a difference that chance alone makes
MAX_LENGTH = 256
FAST, REFERENCE = "fast", "reference"
LossCurve = Sequence[float]  # of every update of a run
CurvesByVariant = Mapping[str, Sequence[LossCurve]]  # of every run of each way


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a run differs from what would be chosen for it."""

    backend: Literal["auto", "explicit", "fused"] = "auto"
    use_kernels: bool = True  # of our own, where they can run
    precision: Precision | None = None  # None: as the device likes it
    compile: bool | None = None


def build_variants(exact: bool) -> dict[str, Variant]:
    backend: Literal["explicit", "fused"] = "explicit" if exact else "fused"
    return {FAST: Variant(), REFERENCE: Variant(backend=backend, use_kernels=False, precision="float32", compile=False)}


@dataclass(frozen=True, kw_only=True)
class SharedSetup:
    """What all runs share."""

    store: TokenStore
    tokenizer: Tokenizer
    model: Seq2SeqConfig
    size: Size
    steps: int
    tokens: int | None
    device: torch.device


def main(words: Sequence[str] | None = None) -> None:
    asked = parse_arguments(words)
    loop.REPORT_INTERVAL = 0.0  # seconds between two reports: one for every update
    print(f"{asked.size}, {asked.steps:,} updates; {describe_machine()}", flush=True)
    curves: dict[str, list[LossCurve]] = {REFERENCE: [], FAST: []}
    with tempfile.TemporaryDirectory() as home:
        task = prepare_setup(Path(home), asked)
        for seed in range(1, asked.draws + 1):
            for name, way in build_variants(asked.exact).items():
                curves[name].append(train_variant(task, name, way, seed, Path(home) / "run"))
            write_outputs(curves, asked)  # so that a run that is cut short has told something
    print("\n".join(format_report(curves)))


def write_outputs(curves: CurvesByVariant, asked: argparse.Namespace) -> None:
    """The files that were asked for, of what there is so far."""
    if asked.svg:
        draws = f"{len(curves[FAST])} draw{'s' * (len(curves[FAST]) > 1)} of dropout each" if asked.dropout else ""
        about = [
            f"{asked.size}, {asked.steps:,} updates",
            draws or "no dropout",
            describe_machine().partition(", Python")[0],
        ]
        Path(asked.svg).write_text(render_svg(curves, "; ".join(about)), encoding="utf-8")
    if asked.json:
        settings = {name: getattr(asked, name) for name in ("size", "steps", "dropout", "exact")}
        found = {figure: asdict(compare_variants(curves, figure)) for figure in SUMMARIES}
        facts = {"machine": describe_machine(), **settings, "compared": found, "curves": curves}
        Path(asked.json).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
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


def prepare_setup(home: Path, asked: argparse.Namespace) -> SharedSetup:
    """Text becomes subwords and batches, as in any training."""
    languages = LanguagePair(asked.src, asked.tgt) if asked.data else LanguagePair()
    if asked.data is None:
        synthetic_corpus.write_corpus(home / "corpus.tsv", asked.pairs)
    found = open_corpora([asked.data or str(home / "corpus.tsv")], languages)
    pairs = [entry for entry in found[0] if isinstance(entry, Pair)]
    tokenizer = train_tokenizer(
        [p.source for p in pairs], [p.target for p in pairs], TokenizerConfig(vocab=asked.vocab)
    )
    store = prepare_store(found, EncodingConfig(tokenizer=tokenizer), home / "stores")
    preset = fit_to_tokenizer(getattr(attent.presets, asked.size)(tokenizer.source.size), tokenizer)
    return SharedSetup(
        store=store,
        tokenizer=tokenizer,
        model=replace_stacks(preset, dropout=asked.dropout),
        size=asked.size,
        steps=asked.steps,
        tokens=asked.tokens,
        device=torch.device(asked.device),
    )


class TrainerWithoutCheckpoints(loop.Trainer):
    """Of which only the losses are wanted."""

    def save_checkpoint(self) -> None:
        pass


def train_variant(task: SharedSetup, name: str, variant: Variant, seed: int, out: Path) -> LossCurve:
    """The loss of every update. Models are new, their code is not: only the first run of a way compiles it."""
    began = time.perf_counter()
    config = build_config(task, variant, seed)
    assert config.batch_tokens
    longest = min(MAX_LENGTH, config.batch_tokens)
    batches = PairLoader(task.store, BatchConfig(batch_tokens=config.batch_tokens, max_tokens=longest), seed=1)
    rng.seed_torch(1, 0)
    model = attent.build(task.model)
    set_backend(model, variant.backend)
    events: list[Event] = []
    with enable_kernels(variant.use_kernels):
        TrainerWithoutCheckpoints(
            model, task.tokenizer, config, batches, None, None, out, DistributedContext(task.device), events.append
        ).run()
    if task.device.type == "cuda":
        gc.collect()  # a run and its recordings hold on to each other, and to memory
    losses = list(iterate_step_losses(events))
    ours = variant.use_kernels and kernels.TRITON_INSTALLED and task.device.type == "cuda"
    attention = f"{variant.backend} attention, {'our' if ours else 'no'} kernels"
    how = f"{config.precision}, {'compiled' if config.compile else 'uncompiled'}, {attention}"
    print(f"{name} {seed}: {mean_last_losses(losses):.4f} in {time.perf_counter() - began:.1f} s ({how})", flush=True)
    return losses


def build_config(task: SharedSetup, variant: Variant, seed: int) -> TrainConfig:
    """As `attent train` does it, but for what the way says. The seed is that of dropout."""
    never = 10**9
    asked = TrainConfig(
        steps=task.steps, batch_tokens=task.tokens, precision=variant.precision, compile=variant.compile, seed=seed,
        save_every=never, valid_every=never,
    )  # fmt: skip
    amount = DataSize(num_examples=len(task.store), num_tokens=int(task.store.target.lengths.sum()))
    return fill_train_config(asked, task.size, task.model, amount, task.device)


@contextmanager
def enable_kernels(enabled: bool) -> Iterator[None]:
    """Whether they are taken where they can be; without, torch's own do all of it."""
    before = kernels.TRITON_INSTALLED
    kernels.TRITON_INSTALLED = before and enabled
    try:
        yield
    finally:
        kernels.TRITON_INSTALLED = before


def iterate_step_losses(events: Sequence[Event]) -> Iterator[float]:
    """A report speaks of all updates since the one before it."""
    done = 0
    for event in events:
        if isinstance(event, Progress):
            yield from [event.loss] * (event.step - done)
            done = event.step


# ---- how far apart ---------------------------------------------------------------------------------------------------


def smooth_losses(losses: LossCurve, window: int = SMOOTHING_WINDOW) -> list[float]:
    """At each update the mean of those up to it, at most `window` of them."""
    return [statistics.fmean(losses[max(0, at - window) : at]) for at in range(1, len(losses) + 1)]


def mean_last_losses(losses: LossCurve) -> float:
    return statistics.fmean(losses[-SMOOTHING_WINDOW:])


LAST_LOSS, AREA = f"mean loss of the last {SMOOTHING_WINDOW} updates", "area under the curve, per update"
SUMMARIES: dict[str, Callable[[LossCurve], float]] = {LAST_LOSS: mean_last_losses, AREA: statistics.fmean}


@dataclass(frozen=True, kw_only=True)
class SampleStats:
    """A number that chance has a part in, as it was drawn several times."""

    mean: float
    std: float | None  # standard deviation over the draws; of one draw there is none

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.std:.4f}" if self.std is not None else "")


@dataclass(frozen=True, kw_only=True)
class VariantComparison:
    """A number of the fast way beside that of the reference."""

    fast: SampleStats
    reference: SampleStats
    difference: float  # of the means, the fast one less the other
    error: float | None  # the standard error of it

    @property
    def is_within(self) -> bool | None:
        return None if self.error is None else abs(self.difference) <= MAX_STANDARD_ERRORS * self.error

    def __str__(self) -> str:
        apart = f"the fast way is at {self.fast.mean:.4f}, the reference at {self.reference.mean:.4f}"
        if self.error is None:
            return f"{apart}, {self.difference:+.4f} apart; one run of each cannot tell how much of it is chance"
        where = "within" if self.is_within else "more than"
        verdict = "no more than chance alone does" if self.is_within else "more than chance alone does"
        band = f"{MAX_STANDARD_ERRORS:g} standard errors of it ({MAX_STANDARD_ERRORS * self.error:.4f})"
        return f"{apart}: {self.difference:+.4f} apart, {where} {band}, {verdict}"


def summarize_samples(values: Sequence[float]) -> SampleStats:
    return SampleStats(mean=statistics.fmean(values), std=statistics.stdev(values) if len(values) > 1 else None)


def compare_samples(fast: Sequence[float], reference: Sequence[float]) -> VariantComparison:
    """On a GPU our kernels draw dropout by themselves: one seed is another draw in each way, and nothing pairs them."""
    one, other = summarize_samples(fast), summarize_samples(reference)
    error = None
    if one.std is not None and other.std is not None:
        error = math.sqrt(one.std**2 / len(fast) + other.std**2 / len(reference))
    return VariantComparison(fast=one, reference=other, difference=one.mean - other.mean, error=error)


def compare_variants(curves: CurvesByVariant, figure: str) -> VariantComparison:
    fast, reference = ([SUMMARIES[figure](losses) for losses in curves[name]] for name in (FAST, REFERENCE))
    return compare_samples(fast, reference)


def compare_by_step(curves: CurvesByVariant) -> list[VariantComparison]:
    """The smoothed curves, update by update."""
    fast, reference = (zip(*map(smooth_losses, curves[name]), strict=True) for name in (FAST, REFERENCE))
    return [compare_samples(one, other) for one, other in zip(fast, reference, strict=True)]


def compute_share_within(curves: CurvesByVariant) -> float | None:
    """Of the updates, once every curve has a whole window behind it."""
    found = compare_by_step(curves)
    settled = [at.is_within for at in found[min(SMOOTHING_WINDOW, len(found)) - 1 :]]
    return None if None in settled else statistics.fmean(map(bool, settled))


def format_report(curves: CurvesByVariant) -> Iterator[str]:
    found = {figure: compare_variants(curves, figure) for figure in SUMMARIES}
    yield f"\n| mean ± standard deviation over the draws | {REFERENCE} | {FAST} | difference | its standard error |"
    yield "|---|---|---|---|---|"
    for figure, both in found.items():
        error = "" if both.error is None else f"{both.error:.4f}"
        yield f"| {figure} | {both.reference} | {both.fast} | {both.difference:+.4f} | {error} |"
    yield ""
    for figure, both in found.items():
        yield f"{figure}: {both}."
    share = compute_share_within(curves)
    if share is not None:
        yield f"Smoothed, the means are within {MAX_STANDARD_ERRORS:g} standard errors of each other at {share:.0%} of the updates."


# ---- the picture -----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT = 820, 590, 64, 28
COLOURS = {REFERENCE: "#0072b2", FAST: "#d55e00"}  # of Okabe and Ito: told apart by colour-blind people
WIDTHS = {REFERENCE: 4.0, FAST: 1.7}  # one on the other, both are seen
BAND, DIFFERENCE = "#dfe4ea", TEXT_COLOR
MAX_POINTS = 220  # points of a line: smoothed as they are, more would not show


@dataclass(frozen=True, kw_only=True)
class PlotPanel:
    """A rectangle with two scales."""

    name: str  # of its clip path
    x_scale: AxisScale
    y_scale: AxisScale
    ticks: Sequence[float]

    @classmethod
    def from_lines(cls, name: str, lines: Sequence[LossCurve], between: tuple[int, int], marks: int) -> PlotPanel:
        """As high as its lines, the fall at the very beginning aside."""
        end = max(map(len, lines))
        found = compute_ticks(
            *value_range([Curve(name=name, points=tuple(enumerate(line, 1))) for line in lines], end), marks
        )
        top, bottom = between
        return cls(
            name=name,
            x_scale=AxisScale(0, end, LEFT, WIDTH - RIGHT),
            y_scale=AxisScale(found[0], found[-1], bottom, top),
            ticks=found,
        )

    def to_points(self, line: LossCurve) -> list[CurvePoint]:
        return [(self.x_scale(x), self.y_scale(y)) for x, y in downsample(list(enumerate(line, 1)), MAX_POINTS)]

    def axes(self) -> Iterator[str]:
        left, right, top, bottom = LEFT, WIDTH - RIGHT, self.y_scale.end, self.y_scale.start
        for mark in self.ticks:
            colour = MUTED_COLOR if mark == 0 and self.ticks[0] < 0 else GRID_COLOR
            yield f'<path d="M{left} {self.y_scale(mark):.1f}H{right}" stroke="{colour}"/>'
            yield render_text(
                left - 9, self.y_scale(mark) + 4, format_number(mark), anchor="end", colour=MUTED_COLOR, size=11
            )
        for step in compute_ticks(0, self.x_scale.high, 5):
            if step <= self.x_scale.high:
                x = self.x_scale(step)
                yield f'<path d="M{x:.1f} {bottom}v5" stroke="{MUTED_COLOR}"/>'
                yield render_text(x, bottom + 19, format_number(step), anchor="middle", colour=MUTED_COLOR, size=11)
        yield f'<path d="M{left} {bottom}H{right}" stroke="{MUTED_COLOR}"/>'
        rect = f'<rect x="{left}" y="{top - 3}" width="{right - left + 3}" height="{bottom - top + 6}"/>'
        yield f'<clipPath id="{self.name}">{rect}</clipPath>'

    def line(self, line: LossCurve, colour: str, width: float, opacity: float = 1.0) -> str:
        drawn = f'stroke="{colour}" stroke-width="{width:g}" stroke-opacity="{opacity:g}" stroke-linejoin="round"'
        return f'<path d="{format_path(self.to_points(line))}" clip-path="url(#{self.name})" fill="none" {drawn}/>'

    def band(self, low: LossCurve, high: LossCurve) -> str:
        around = [*self.to_points(low), *reversed(self.to_points(high))]
        return f'<path d="{format_path(around)}Z" clip-path="url(#{self.name})" fill="{BAND}"/>'


def render_svg(curves: CurvesByVariant, about: str) -> str:
    both = compare_variants(curves, LAST_LOSS)
    title = "Training loss of the fast way and of the reference"
    words = escape(f"{title}: {about}. {LAST_LOSS}: {both}.")
    body = "\n".join((*render_losses(curves), *render_difference(curves)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{words}" font-family="{FONT}" font-size="12">\n<title>{words}</title>\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="{BACKGROUND_COLOR}" stroke="{GRID_COLOR}"/>\n'
        f"{render_text(LEFT, 34, title, size=16, weight='600')}\n{render_text(LEFT, 54, about, colour=MUTED_COLOR)}\n{body}\n</svg>\n"
    )


def render_losses(curves: CurvesByVariant) -> Iterator[str]:
    """Every run as a thin line, the mean of each way as a thick one."""
    lines = {name: [smooth_losses(losses) for losses in curves[name]] for name in (REFERENCE, FAST)}
    panel = PlotPanel.from_lines("losses", [line for each in lines.values() for line in each], (98, 356), 5)
    unit = f"Label-smoothed loss, nats per token, smoothed over {SMOOTHING_WINDOW} updates"
    yield render_text(LEFT, 82, unit, weight="600")
    yield from panel.axes()
    for name, each in lines.items():
        if len(each) > 1:
            yield from (panel.line(line, COLOURS[name], 1, 0.45) for line in each)
    for name, each in lines.items():
        mean = [statistics.fmean(at) for at in zip(*each, strict=True)]
        yield panel.line(mean, COLOURS[name], WIDTHS[name])
    yield from render_legend(curves, panel)


def render_legend(curves: CurvesByVariant, panel: PlotPanel) -> Iterator[str]:
    """In the corner that a falling loss leaves free, with where each way has come to."""
    both = compare_variants(curves, LAST_LOSS)
    several = both.error is not None
    left, right, top = WIDTH - RIGHT - 300, WIDTH - RIGHT - 12, panel.y_scale.end + 14
    yield f'<rect x="{left}" y="{top}" width="{right - left}" height="{76 if several else 58}" rx="6" fill="{BACKGROUND_COLOR}"/>'
    yield render_text(
        right,
        top + 13,
        f"last {SMOOTHING_WINDOW} updates{', ± over draws' * several}",
        anchor="end",
        colour=MUTED_COLOR,
        size=11,
    )
    for place, (name, value) in enumerate({REFERENCE: both.reference, FAST: both.fast}.items()):
        y = top + 33 + 20 * place
        yield f'<path d="M{left + 8} {y - 4}h26" stroke="{COLOURS[name]}" stroke-width="{WIDTHS[name]}"/>'
        yield render_text(left + 44, y, f"{name}{', mean' * several}")
        yield render_text(right, y, str(value), anchor="end", weight="600")
    if several:
        for row, name in enumerate((REFERENCE, FAST)):
            drawn = f'stroke="{COLOURS[name]}" stroke-opacity="0.6"'
            yield f'<path d="M{left + 8} {top + 67 + 5 * row}h26" {drawn}/>'
        yield render_text(left + 44, top + 73, "each draw", colour=MUTED_COLOR)


def render_difference(curves: CurvesByVariant) -> Iterator[str]:
    """The difference of the means over what chance may make of it."""
    found = compare_by_step(curves)
    apart = [at.difference for at in found]
    room = [MAX_STANDARD_ERRORS * at.error for at in found if at.error is not None]  # of all, or of none
    low, high = [-each for each in room], room
    panel = PlotPanel.from_lines("apart", [apart, low, high] if room else [apart], (428, 520), 3)
    yield render_text(LEFT, 412, "Fast less reference", weight="600")
    if room:
        yield panel.band(low, high)
        yield f'<rect x="{LEFT + 148}" y="402" width="22" height="12" rx="2" fill="{BAND}"/>'
        yield render_text(
            LEFT + 178,
            412,
            f"within {MAX_STANDARD_ERRORS:g} standard errors: what chance alone does",
            colour=MUTED_COLOR,
        )
    yield from panel.axes()
    yield panel.line(apart, DIFFERENCE, 1.8)
    yield render_text(WIDTH - RIGHT, HEIGHT - 22, "updates", anchor="end", colour=MUTED_COLOR, size=11)
    yield render_text(LEFT, HEIGHT - 22, format_verdict(curves), size=12)


def format_verdict(curves: CurvesByVariant) -> str:
    """In one line."""
    both, share = compare_variants(curves, LAST_LOSS), compute_share_within(curves)
    if both.error is None or share is None:
        return f"Last {SMOOTHING_WINDOW} updates: {both.difference:+.4f}, one run of each."
    where = "within" if both.is_within else "more than"
    at_end = f"Last {SMOOTHING_WINDOW} updates: {both.difference:+.4f}, {where} 2 standard errors ({MAX_STANDARD_ERRORS * both.error:.4f})"
    return f"{at_end}; within them at {share:.0%} of all updates."


def format_path(places: Sequence[CurvePoint]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def render_text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    colour: str = TEXT_COLOR,
    size: int = 12,
    weight: str = "400",
) -> str:
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
