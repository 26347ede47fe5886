"""Compare the loss curves of the fast and the reference implementation, with the same model, text and batches.

    fast        as `attent train` on this device: on a GPU compiled, in bfloat16, with our kernels
    reference   uncompiled, in float32, without our kernels, attention by torch's `fused`

    python -m benchmarks.loss_curve --svg docs/loss-curves.svg              500 steps of a small model, synthetic text
    python -m benchmarks.loss_curve --size base --data FOLDER --src en --tgt de --svg FILE --json FILE
    python -m benchmarks.loss_curve --exact                                 the reference's attention by equation 1
    python -m benchmarks.loss_curve --dropout 0                             one run each, which differ by rounding only
    python -m benchmarks.loss_curve --device cpu                            a few steps, as a smoke test

All runs start with the same weights; runs of one variant differ by their dropout. When a run leaves the initial plateau
is random: the smallest difference shifts it by some steps, and the loss there by tenths. One run of each is therefore
not conclusive, and the means of `--draws` runs are compared. The means of identical variants are more than 2 standard
errors apart in one of eleven cases with four draws each, and in one of five with two (Student's t).
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
from pathlib import Path
from typing import Any, Literal

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
from attent.training.curves import CurveLine, value_range
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
        draw_plot(curves, "; ".join(about), Path(asked.svg))
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
    parser.add_argument("--svg", help="file for the plot (needs matplotlib)")
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
        band = f"{MAX_STANDARD_ERRORS:g} standard errors"
        yield f"Smoothed, the means are within {band} of each other at {share:.0%} of the steps."


# ---- the plot --------------------------------------------------------------------------------------------------------

COLORS = {REFERENCE: "#0072b2", FAST: "#d55e00"}  # Okabe and Ito's palette
LINE_WIDTHS = {REFERENCE: 4.0, FAST: 1.7}  # drawn over each other, both are visible
BAND_COLOR, DIFFERENCE_COLOR = "#dfe4ea", "#1f2933"


def draw_plot(curves: CurvesByVariant, subtitle: str, path: Path) -> None:
    """Losses of every run and their means, and the difference of the means; SVG or PNG, by the suffix of `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 6.2), layout="constrained")
    losses, difference = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    figure.suptitle(f"Training loss: {FAST} and {REFERENCE}\n{subtitle}", fontsize=11)
    draw_losses(losses, curves)
    draw_difference(difference, curves)
    figure.supxlabel(format_verdict(curves), fontsize=9)
    figure.savefig(path)


def draw_losses(axes: Any, curves: CurvesByVariant) -> None:
    """Every run as a thin line, the mean of each variant as a thick one."""
    comparison = compare_variants(curves, LAST_LOSS)
    smoothed = {name: [smooth_losses(losses) for losses in curves[name]] for name in (REFERENCE, FAST)}
    lines = [CurveLine(name=name, points=tuple(enumerate(run, 1))) for name, runs in smoothed.items() for run in runs]
    for line in lines:
        axes.plot(*zip(*line.points, strict=True), color=COLORS[line.name], linewidth=0.8, alpha=0.45)
    for name, summary in ((REFERENCE, comparison.reference), (FAST, comparison.fast)):
        mean = [statistics.fmean(step) for step in zip(*smoothed[name], strict=True)]
        label = f"{name}, last {SMOOTHING_WINDOW} updates: {summary}"
        axes.plot(range(1, len(mean) + 1), mean, color=COLORS[name], linewidth=LINE_WIDTHS[name], label=label)
    low, high = value_range(lines, max(len(line.points) for line in lines))
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_ylabel(f"loss (nats per token, mean of {SMOOTHING_WINDOW})")
    axes.legend(frameon=False)


def draw_difference(axes: Any, curves: CurvesByVariant) -> None:
    """The difference of the means and its standard errors."""
    comparisons = compare_by_step(curves)
    steps = range(1, len(comparisons) + 1)
    errors = [MAX_STANDARD_ERRORS * c.error for c in comparisons if c.error is not None]  # of all steps, or of none
    if errors:
        label = f"{MAX_STANDARD_ERRORS:g} standard errors"
        axes.fill_between(steps, [-error for error in errors], errors, color=BAND_COLOR, label=label)
        axes.legend(frameon=False)
    axes.plot(steps, [c.difference for c in comparisons], color=DIFFERENCE_COLOR)
    axes.set_ylabel(f"{FAST} - {REFERENCE}")
    axes.set_xlabel("updates")


def format_verdict(curves: CurvesByVariant) -> str:
    """In one line."""
    both, share = compare_variants(curves, LAST_LOSS), compute_share_within(curves)
    if both.error is None or share is None:
        return f"Last {SMOOTHING_WINDOW} updates: {both.difference:+.4f}, one run of each."
    where = "within" if both.is_within else "more than"
    band = f"2 standard errors ({MAX_STANDARD_ERRORS * both.error:.4f})"
    at_end = f"Last {SMOOTHING_WINDOW} steps: {both.difference:+.4f}, {where} {band}"
    return f"{at_end}; within them at {share:.0%} of all updates."


if __name__ == "__main__":
    main()
