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
from attent.training import loop
from attent.training.autoconfig import DataSize, fill_train_config, fit_to_tokenizer
from attent.training.config import Precision, TrainConfig
from attent.training.curves import CurveLine, compute_value_range
from attent.training.distributed import DistributedContext
from attent.training.events import Event, Progress
from attent.training.objective import Seq2SeqObjective
from attent.training.run_options import Size
from attent.training.state import seed_torch
from benchmarks import synthetic_corpus
from benchmarks.timing import describe_machine

SMOOTHING_WINDOW = 25  # steps
MAX_STANDARD_ERRORS = 2.0  # largest difference that is attributed to chance
MAX_LENGTH = 256
FAST, REFERENCE = "fast", "reference"
LossCurve = Sequence[float]  # the loss of every step
CurvesByVariant = Mapping[str, Sequence[LossCurve]]  # the curves of all runs


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings of a run that differ from the defaults of the device."""

    backend: Literal["auto", "explicit", "fused"] = "auto"
    use_kernels: bool = True  # our Triton kernels, where supported
    precision: Precision | None = None  # None: the default of the device
    compile: bool | None = None


def build_variants(exact: bool) -> dict[str, Variant]:
    backend: Literal["explicit", "fused"] = "explicit" if exact else "fused"
    return {FAST: Variant(), REFERENCE: Variant(backend=backend, use_kernels=False, precision="float32", compile=False)}


@dataclass(frozen=True, kw_only=True)
class SharedSetup:
    """Data, model and settings shared by all runs."""

    store: TokenStore
    tokenizer: Tokenizer
    model: Seq2SeqConfig
    size: Size
    steps: int
    tokens: int | None
    device: torch.device


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    loop.REPORT_INTERVAL = 0.0  # seconds: report every step
    print(f"{args.size}, {args.steps:,} steps; {describe_machine()}", flush=True)
    curves: dict[str, list[LossCurve]] = {REFERENCE: [], FAST: []}
    with tempfile.TemporaryDirectory() as home:
        setup = prepare_setup(Path(home), args)
        for seed in range(1, args.draws + 1):
            for name, variant in build_variants(args.exact).items():
                curves[name].append(train_variant(setup, name, variant, seed, Path(home) / "run"))
            write_outputs(curves, args)  # after every draw, for runs that are interrupted
    print("\n".join(format_report(curves)))


def write_outputs(curves: CurvesByVariant, args: argparse.Namespace) -> None:
    """Write the requested files with the results so far."""
    if args.svg:
        draws = f"{len(curves[FAST])} draw{'s' * (len(curves[FAST]) > 1)} of dropout each" if args.dropout else ""
        subtitle = [
            f"{args.size}, {args.steps:,} steps",
            draws or "no dropout",
            describe_machine().partition(", Python")[0],
        ]
        draw_plot(curves, "; ".join(subtitle), Path(args.svg))
    if args.json:
        settings = {name: getattr(args, name) for name in ("size", "steps", "dropout", "exact")}
        comparisons = {figure: asdict(compare_variants(curves, figure)) for figure in SUMMARIES}
        report = {"machine": describe_machine(), **settings, "compared": comparisons, "curves": curves}
        Path(args.json).write_text(json.dumps(report) + "\n", encoding="utf-8")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="steps, by default 500; on a CPU 12")
    parser.add_argument("--size", choices=("tiny", "small", "base", "big"))
    parser.add_argument("--draws", type=int, help="runs per variant, by default 4; on a CPU 2, without dropout 1")
    parser.add_argument("--exact", action="store_true", help="reference with `explicit` attention, which is slow")
    parser.add_argument("--tokens", type=int, help="tokens of a batch; by default as in `attent train`")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--data", help="parallel text; by default synthetic")
    parser.add_argument("--src", default="en")
    parser.add_argument("--tgt", default="de")
    parser.add_argument("--pairs", type=int, help="number of synthetic pairs")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--svg", help="file for the plot (needs matplotlib)")
    parser.add_argument("--json", help="write all numbers to this file")
    args = parser.parse_args(argv)
    gpu = args.device.startswith("cuda")
    args.size = args.size or ("small" if gpu else "tiny")
    args.steps = args.steps or (500 if gpu else 12)
    args.draws = max(1, args.draws or (4 if gpu else 2)) if args.dropout else 1
    args.tokens = args.tokens or (None if gpu else 512)
    args.pairs = args.pairs or (50_000 if gpu else 500)
    args.vocab = args.vocab or (8_000 if gpu else 500)
    return args


def prepare_setup(home: Path, args: argparse.Namespace) -> SharedSetup:
    """Train a tokenizer and build the token store and the model config."""
    languages = LanguagePair(args.src, args.tgt) if args.data else LanguagePair()
    if args.data is None:
        synthetic_corpus.write_corpus(home / "corpus.tsv", args.pairs)
    corpora = open_corpora([args.data or str(home / "corpus.tsv")], languages)
    pairs = [entry for entry in corpora[0] if isinstance(entry, Pair)]
    tokenizer = train_tokenizer([p.source for p in pairs], [p.target for p in pairs], TokenizerConfig(vocab=args.vocab))
    store = prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), home / "stores")
    preset = fit_to_tokenizer(getattr(attent.presets, args.size)(tokenizer.source.size), tokenizer)
    return SharedSetup(
        store=store,
        tokenizer=tokenizer,
        model=replace_stacks(preset, dropout=args.dropout),
        size=args.size,
        steps=args.steps,
        tokens=args.tokens,
        device=torch.device(args.device),
    )


class TrainerWithoutCheckpoints(loop.Trainer):
    """A trainer that writes no checkpoints."""

    def save_checkpoint(self) -> None:
        pass


def train_variant(setup: SharedSetup, name: str, variant: Variant, seed: int, out: Path) -> LossCurve:
    """Train a new model and return the loss of every step; only the first run of a variant compiles."""
    start = time.perf_counter()
    config = build_config(setup, variant, seed)
    assert config.batch_tokens
    longest = min(MAX_LENGTH, config.batch_tokens)
    batches = PairLoader(setup.store, BatchConfig(batch_tokens=config.batch_tokens, max_tokens=longest), seed=1)
    seed_torch(1, 0)
    model = attent.build(setup.model)
    set_backend(model, variant.backend)
    events: list[Event] = []
    with enable_kernels(variant.use_kernels):
        TrainerWithoutCheckpoints(
            model, setup.tokenizer, config, batches, None, None, out, DistributedContext(setup.device), events.append,
            make_objective=Seq2SeqObjective,
        ).run()  # fmt: skip
    if setup.device.type == "cuda":
        gc.collect()  # a run and its CUDA graphs are a reference cycle that holds memory
    losses = list(iterate_step_losses(events))
    ours = variant.use_kernels and kernels.TRITON_INSTALLED and setup.device.type == "cuda"
    attention = f"{variant.backend} attention, {'our' if ours else 'no'} kernels"
    description = f"{config.precision}, {'compiled' if config.compile else 'uncompiled'}, {attention}"
    print(
        f"{name} {seed}: {mean_last_losses(losses):.4f} in {time.perf_counter() - start:.1f} s ({description})",
        flush=True,
    )
    return losses


def build_config(setup: SharedSetup, variant: Variant, seed: int) -> TrainConfig:
    """Return the config of `attent train` with the settings of the variant; the seed is for dropout."""
    never = 10**9
    requested = TrainConfig(
        steps=setup.steps, batch_tokens=setup.tokens, precision=variant.precision, compile=variant.compile, seed=seed,
        save_every=never, valid_every=never,
    )  # fmt: skip
    data_size = DataSize(num_examples=len(setup.store), num_tokens=int(setup.store.target.lengths.sum()))
    return fill_train_config(requested, setup.size, setup.model, data_size, setup.device)


@contextmanager
def enable_kernels(enabled: bool) -> Iterator[None]:
    """Enable or disable our kernels; disabled, torch's own are used."""
    before = kernels.TRITON_INSTALLED
    kernels.TRITON_INSTALLED = before and enabled
    try:
        yield
    finally:
        kernels.TRITON_INSTALLED = before


def iterate_step_losses(events: Sequence[Event]) -> Iterator[float]:
    """Yield the loss of every step; a report covers all steps since the previous one."""
    done = 0
    for event in events:
        if isinstance(event, Progress):
            yield from [event.loss] * (event.step - done)
            done = event.step


# ---- comparison ------------------------------------------------------------------------------------------------------


def smooth_losses(losses: LossCurve, window: int = SMOOTHING_WINDOW) -> list[float]:
    """Return the moving average over the last `window` steps."""
    return [statistics.fmean(losses[max(0, step - window) : step]) for step in range(1, len(losses) + 1)]


def mean_last_losses(losses: LossCurve) -> float:
    return statistics.fmean(losses[-SMOOTHING_WINDOW:])


LAST_LOSS, AREA = f"mean loss of the last {SMOOTHING_WINDOW} steps", "area under the curve, per step"
SUMMARIES: dict[str, Callable[[LossCurve], float]] = {LAST_LOSS: mean_last_losses, AREA: statistics.fmean}


@dataclass(frozen=True, kw_only=True)
class SampleStats:
    """Mean and standard deviation over several runs."""

    mean: float
    std: float | None  # None for a single run

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.std:.4f}" if self.std is not None else "")


@dataclass(frozen=True, kw_only=True)
class VariantComparison:
    """A statistic of the fast variant compared with the reference."""

    fast: SampleStats
    reference: SampleStats
    difference: float  # of the means: fast - reference
    error: float | None  # standard error of the difference

    @property
    def is_within(self) -> bool | None:
        return None if self.error is None else abs(self.difference) <= MAX_STANDARD_ERRORS * self.error

    def __str__(self) -> str:
        apart = f"the fast variant is at {self.fast.mean:.4f}, the reference at {self.reference.mean:.4f}"
        if self.error is None:
            return f"{apart}, {self.difference:+.4f} apart; one run of each cannot tell how much of it is chance"
        where = "within" if self.is_within else "more than"
        verdict = "no more than chance alone does" if self.is_within else "more than chance alone does"
        band = f"{MAX_STANDARD_ERRORS:g} standard errors of it ({MAX_STANDARD_ERRORS * self.error:.4f})"
        return f"{apart}: {self.difference:+.4f} apart, {where} {band}, {verdict}"


def summarize_samples(values: Sequence[float]) -> SampleStats:
    return SampleStats(mean=statistics.fmean(values), std=statistics.stdev(values) if len(values) > 1 else None)


def compare_samples(fast: Sequence[float], reference: Sequence[float]) -> VariantComparison:
    """Compare unpaired samples: our kernels draw their own dropout masks, other ones with the same seed."""
    fast_stats, reference_stats = summarize_samples(fast), summarize_samples(reference)
    error = None
    if fast_stats.std is not None and reference_stats.std is not None:
        error = math.sqrt(fast_stats.std**2 / len(fast) + reference_stats.std**2 / len(reference))
    return VariantComparison(
        fast=fast_stats, reference=reference_stats, difference=fast_stats.mean - reference_stats.mean, error=error
    )


def compare_variants(curves: CurvesByVariant, figure: str) -> VariantComparison:
    fast, reference = ([SUMMARIES[figure](losses) for losses in curves[name]] for name in (FAST, REFERENCE))
    return compare_samples(fast, reference)


def compare_by_step(curves: CurvesByVariant) -> list[VariantComparison]:
    """Compare the smoothed curves at every step."""
    fast, reference = (zip(*map(smooth_losses, curves[name]), strict=True) for name in (FAST, REFERENCE))
    return [
        compare_samples(fast_losses, reference_losses)
        for fast_losses, reference_losses in zip(fast, reference, strict=True)
    ]


def compute_share_within(curves: CurvesByVariant) -> float | None:
    """Return the share of steps at which the means agree, after the first full window."""
    comparisons = compare_by_step(curves)
    settled = [comparison.is_within for comparison in comparisons[min(SMOOTHING_WINDOW, len(comparisons)) - 1 :]]
    return None if None in settled else statistics.fmean(map(bool, settled))


def format_report(curves: CurvesByVariant) -> Iterator[str]:
    comparisons = {figure: compare_variants(curves, figure) for figure in SUMMARIES}
    yield f"\n| mean ± standard deviation over the draws | {REFERENCE} | {FAST} | difference | its standard error |"
    yield "|---|---|---|---|---|"
    for figure, comparison in comparisons.items():
        error = "" if comparison.error is None else f"{comparison.error:.4f}"
        yield f"| {figure} | {comparison.reference} | {comparison.fast} | {comparison.difference:+.4f} | {error} |"
    yield ""
    for figure, comparison in comparisons.items():
        yield f"{figure}: {comparison}."
    share = compute_share_within(curves)
    if share is not None:
        band = f"{MAX_STANDARD_ERRORS:g} standard errors"
        yield f"Smoothed, the means are within {band} of each other at {share:.0%} of the steps."


# ---- the plot --------------------------------------------------------------------------------------------------------

COLORS = {REFERENCE: "#0072b2", FAST: "#d55e00"}  # Okabe and Ito's palette
LINE_WIDTHS = {REFERENCE: 4.0, FAST: 1.7}  # drawn over each other, both are visible
BAND_COLOR, DIFFERENCE_COLOR = "#dfe4ea", "#1f2933"


def draw_plot(curves: CurvesByVariant, subtitle: str, path: Path) -> None:
    """Plot the losses of all runs, their means and the difference of the means; SVG or PNG, by the suffix of `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 6.2), layout="constrained")
    losses, difference = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    figure.suptitle(f"Training loss: {FAST} and {REFERENCE}\n{subtitle}", fontsize=11)
    draw_losses(losses, curves)
    draw_difference(difference, curves)
    figure.supxlabel(format_verdict(curves), fontsize=9)
    figure.savefig(path)


def draw_losses(axes: Any, curves: CurvesByVariant) -> None:
    """Plot every run as a thin line, the mean of each variant as a thick one."""
    comparison = compare_variants(curves, LAST_LOSS)
    smoothed = {name: [smooth_losses(losses) for losses in curves[name]] for name in (REFERENCE, FAST)}
    lines = [CurveLine(name=name, points=tuple(enumerate(run, 1))) for name, runs in smoothed.items() for run in runs]
    for line in lines:
        axes.plot(*zip(*line.points, strict=True), color=COLORS[line.name], linewidth=0.8, alpha=0.45)
    for name, summary in ((REFERENCE, comparison.reference), (FAST, comparison.fast)):
        mean = [statistics.fmean(step) for step in zip(*smoothed[name], strict=True)]
        label = f"{name}, last {SMOOTHING_WINDOW} steps: {summary}"
        axes.plot(range(1, len(mean) + 1), mean, color=COLORS[name], linewidth=LINE_WIDTHS[name], label=label)
    low, high = compute_value_range(lines, max(len(line.points) for line in lines))
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_ylabel(f"loss (nats per token, mean of {SMOOTHING_WINDOW})")
    axes.legend(frameon=False)


def draw_difference(axes: Any, curves: CurvesByVariant) -> None:
    """Plot the difference of the means and its standard errors."""
    comparisons = compare_by_step(curves)
    steps = range(1, len(comparisons) + 1)
    errors = [MAX_STANDARD_ERRORS * c.error for c in comparisons if c.error is not None]  # for all steps or none
    if errors:
        label = f"{MAX_STANDARD_ERRORS:g} standard errors"
        axes.fill_between(steps, [-error for error in errors], errors, color=BAND_COLOR, label=label)
        axes.legend(frameon=False)
    axes.plot(steps, [c.difference for c in comparisons], color=DIFFERENCE_COLOR)
    axes.set_ylabel(f"{FAST} - {REFERENCE}")
    axes.set_xlabel("steps")


def format_verdict(curves: CurvesByVariant) -> str:
    """Return the result as one line."""
    comparison, share = compare_variants(curves, LAST_LOSS), compute_share_within(curves)
    if comparison.error is None or share is None:
        return f"Last {SMOOTHING_WINDOW} steps: {comparison.difference:+.4f}, one run of each."
    where = "within" if comparison.is_within else "more than"
    band = f"2 standard errors ({MAX_STANDARD_ERRORS * comparison.error:.4f})"
    at_end = f"Last {SMOOTHING_WINDOW} steps: {comparison.difference:+.4f}, {where} {band}"
    return f"{at_end}; within them at {share:.0%} of all steps."


if __name__ == "__main__":
    main()
