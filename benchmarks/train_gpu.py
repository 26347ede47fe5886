"""Train a translator on a GPU, compared with `transformers`' Marian of the same size: target tokens/s of whole steps.

    python -m benchmarks.train_gpu                                     base, lengths as in WMT, 25,600 tokens a side
    python -m benchmarks.train_gpu --size small base big --lengths 15 29 1024
    python -m benchmarks.train_gpu --tokens 25600 65536 --only ours --profile
    python -m benchmarks.train_gpu --without-compiled                  transformers only eager: compiling takes minutes
    python -m benchmarks.train_gpu --device cpu                        a tiny smoke test

Token ids are random; lengths are log-normal (29: mean 29 + 30 tokens, up to 200; 15: image captions; 1024: documents of
up to 2,048). Both train with Adam (fused), label smoothing 0.1, the preset's dropout, in bfloat16.

    transformers  batches bucketed by length, `--tokens` tokens a side with padding, built before the clock starts,
                  copied from pinned memory; autocast, SDPA; eager, and compiled together with its loss (dynamic)
    attent        `attent.training.loop.Trainer` with the settings that `attent train` chooses; packed batches, built by
                  its own thread while it trains

They alternate, round by round, each round about `--seconds` long; padding is not counted. Model TFLOP/s are by
`flops.count_model_flops`; the ceiling is a bfloat16 product of 8192 x 8192 random matrices in the same run. A step has
two lower bounds: its operations at that ceiling, and its fewest bytes (`flops.count_min_bytes`) at the speed of a copy
within GPU memory, which is measured too. Time that the GPU does not spend in kernels, by torch's profiler, is idle.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attent
from attent.data.arrays import Array
from attent.data.batch_plan import BatchConfig
from attent.data.loader import START_POSITION, LoaderPosition, PairBatch, PairLoader
from attent.data.token_store import FORMAT_VERSION, META_FILE, CorpusPart, StoreMeta, TokenStore
from attent.models import Seq2SeqConfig, shift_right
from attent.nn.kernels.attention import DISABLE_CUDNN
from attent.training.autoconfig import DataSize, fill_train_config
from attent.training.config import TrainConfig
from attent.training.distributed import DistributedContext
from attent.training.events import Event, Progress
from attent.training.loop import Trainer
from attent.training.objective import Seq2SeqObjective
from attent.training.run_options import Size
from attent.training.state import seed_torch
from benchmarks.flops import count_min_bytes, count_model_flops
from benchmarks.timing import PeakRates, describe_machine, measure_peak_rates

PAD, START_ID, END, FIRST_WORD = 0, 1, 2, 4  # token ids
SMOOTHING = 0.1
WARMUP_STEPS = {
    "cuda": 24,
    "cpu": 2,
}  # steps before the clock starts: they compile, capture and fill the allocator's cache
SETTLE_STEPS = {"cuda": 10, "cpu": 1}  # untimed at the start of a round: more than the prefetched batches
STEADY_RATIO, MAX_SETTLE_ROUNDS = 1.1, 12  # the baseline is warm when it gets no faster by a tenth
PROFILED_STEPS = 10
SKIPPED_REPORTS = 2  # reports of our loop at the start of a round that are ignored
OURS, EAGER, COMPILED = "attent", "transformers", "transformers, compiled"
Step = tuple[LoaderPosition, PairBatch]
BatchIterator = Iterator[Step]


@dataclass(frozen=True, kw_only=True)
class LengthDistribution:
    """Lengths of one kind of text, in tokens."""

    source_mean: float
    target_mean: float
    log_std: float  # standard deviation of the logarithm
    max_length: int
    row_tokens: int  # of packed batches


LENGTHS = {
    "15": LengthDistribution(source_mean=15, target_mean=15.5, log_std=0.35, max_length=60, row_tokens=256),
    "29": LengthDistribution(source_mean=29, target_mean=30, log_std=0.6, max_length=200, row_tokens=256),
    "1024": LengthDistribution(source_mean=1000, target_mean=1024, log_std=0.3, max_length=2048, row_tokens=2048),
}
CORPUS_TOKENS = {"cuda": 8_000_000, "cpu": 20_000}  # of a side: on a GPU about 300 steps an epoch


@dataclass(frozen=True, kw_only=True)
class BenchmarkCase:
    """One combination of settings."""

    size: Size
    lengths: str
    batch_tokens: int
    vocab: int
    device: torch.device
    rounds: int
    round_seconds: float
    corpus_tokens: int

    @property
    def description(self) -> str:
        lengths = LENGTHS[self.lengths]
        means = f"mean lengths {lengths.source_mean:g} + {lengths.target_mean:g}"
        return f"{self.size}, {means}, {self.batch_tokens:,} tokens a side, vocabulary {self.vocab:,}"

    @property
    def warmup_steps(self) -> int:
        return WARMUP_STEPS[self.device.type]

    @property
    def settle_steps(self) -> int:
        return SETTLE_STEPS[self.device.type]

    def make_config(self) -> Seq2SeqConfig:
        return getattr(attent.presets, self.size)(self.vocab)

    def make_batches(self, store: TokenStore, layout: Any) -> PairLoader:
        max_tokens = min(LENGTHS[self.lengths].row_tokens, self.batch_tokens)
        config = BatchConfig(batch_tokens=self.batch_tokens, max_tokens=max_tokens, layout=layout)
        return PairLoader(store, config, seed=1)

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    seconds: float
    num_steps: int
    target_tokens: int  # without padding

    @property
    def tokens_per_second(self) -> float:
        return self.target_tokens / self.seconds


@dataclass(kw_only=True)
class CaseResult:
    """The measurements of a case."""

    rounds: dict[str, list[TimedRound]] = field(default_factory=dict)
    warmup_seconds: dict[str, float] = field(default_factory=dict)  # of the steps before the clock started
    reported_speeds: list[float] = field(default_factory=list)  # target tokens/s, by our loop
    kernel_ms: dict[str, float] = field(default_factory=dict)  # of one of our steps, by kernel
    busy_ms: float = 0.0  # of one of our steps in which some kernel runs
    failures: dict[str, str] = field(default_factory=dict)  # of baselines: the reason

    def add_warmup(self, name: str, seconds: float, pace: TimedRound) -> None:
        """Print at once, for runs that are interrupted."""
        self.warmup_seconds[name] = seconds
        print(f"{name}: warm after {seconds:.1f} s, then {pace.tokens_per_second:,.0f} target tokens/s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    device = torch.device(arguments.device)
    print(f"{describe_machine()}, {describe_commit()}, {datetime.date.today()}", flush=True)
    ceiling = measure_peak_rates(device)
    rates = f"{ceiling.flops / 1e12:,.1f} TFLOP/s in a product, {ceiling.bytes / 1e12:,.3f} TB/s in a copy"
    print(f"ceiling: {rates}", flush=True)
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "commit": describe_commit(),
        "ceiling": asdict(ceiling),
        "cases": [],
    }
    num_failed = 0
    for size, lengths, tokens in product(arguments.size, arguments.lengths, arguments.tokens):
        case = BenchmarkCase(
            size=size, lengths=lengths, batch_tokens=tokens, vocab=arguments.vocab, device=device,
            rounds=arguments.rounds, round_seconds=arguments.seconds, corpus_tokens=CORPUS_TOKENS[device.type],
        )  # fmt: skip
        try:
            report["cases"].append(case_report := run_case(case, ceiling, arguments))
            num_failed += len(case_report["failed"])
        except RuntimeError:  # out of memory, most likely: continue with the other cases
            num_failed += 1
            traceback.print_exc()
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if num_failed:
        sys.exit(1)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=("tiny", "small", "base", "big"))
    parser.add_argument("--lengths", nargs="+", choices=tuple(LENGTHS), default=["29"])
    parser.add_argument("--tokens", nargs="+", type=int, help="tokens of a side of a batch, by default 25,600")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="approximate length of a round")
    parser.add_argument("--only", choices=("ours", "theirs"))
    parser.add_argument("--without-compiled", action="store_true", help="transformers only eager")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="write all numbers to this file")
    arguments = parser.parse_args(argv)
    gpu = arguments.device.startswith("cuda")
    arguments.size = arguments.size or ["base" if gpu else "tiny"]
    arguments.tokens = arguments.tokens or [25_600 if gpu else 1024]
    arguments.vocab = arguments.vocab or (32_768 if gpu else 1000)
    arguments.rounds = arguments.rounds or (5 if gpu else 1)
    arguments.seconds = arguments.seconds or (2.0 if gpu else 0.2)
    return arguments


def run_case(case: BenchmarkCase, ceiling: PeakRates, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a case and print its table."""
    print(f"\n{case.description}", flush=True)
    with tempfile.TemporaryDirectory() as home:
        store = make_random_store(Path(home), case)
        result = compare_speeds(case, store, Path(home), arguments)
        case_report = CaseReport.from_result(case, store, result, ceiling)
    for line in case_report.format_lines(profile=arguments.profile):
        print(line, flush=True)
    torch._dynamo.reset()  # free its graphs
    free_memory(case.device)
    return case_report.to_json()


def compare_speeds(case: BenchmarkCase, store: TokenStore, home: Path, arguments: argparse.Namespace) -> CaseResult:
    """Alternate between all. Our training loop runs to its end, so the rounds of the baselines run inside it."""
    result = CaseResult()
    baselines = {
        name: TransformersBaseline(case, store, compiled=name == COMPILED) for name in list_baselines(case, arguments)
    }

    def run_baselines() -> None:
        for name in list(baselines):
            if not run_baseline_round(name, baselines[name], result):
                del baselines[name]
                free_memory(case.device)

    if arguments.only == "theirs":
        for _ in range(case.rounds):
            run_baselines()
    else:
        TimedTraining(case, store, home, result, run_baselines).run()
    return result


def list_baselines(case: BenchmarkCase, arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.only != "ours":
        yield EAGER
        if case.device.type == "cuda" and not arguments.without_compiled:
            yield COMPILED


def run_baseline_round(name: str, baseline: TransformersBaseline, result: CaseResult) -> bool:
    """Return False for a baseline that failed; the others continue."""
    try:
        if not baseline.round_steps:
            result.add_warmup(name, *baseline.warm_up())
        result.rounds.setdefault(name, []).append(baseline.run_round())
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways
        traceback.print_exc(limit=-3)
        result.rounds.pop(name, None)
        result.failures[name] = f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
        print(f"{name}: failed and is left out", flush=True)
    return name not in result.failures


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- ours ------------------------------------------------------------------------------------------------------------


class AllRoundsDone(Exception):
    """Ends the training loop without saving."""


class TimedTraining:
    """A `Trainer` on batches that measure time: as a `BatchLoader`, it sees when a round starts and ends."""

    def __init__(
        self, case: BenchmarkCase, store: TokenStore, home: Path, result: CaseResult, run_baselines: Callable[[], None]
    ) -> None:
        self.case, self.result, self.run_baselines = case, result, run_baselines
        self.batches = case.make_batches(store, "packed")
        config = case.make_config()
        amount = DataSize(num_examples=len(store), num_tokens=int(store.target.lengths.sum()))
        never = 10**9
        config_options = TrainConfig(steps=never, batch_tokens=case.batch_tokens, save_every=never, valid_every=never)
        train_config = fill_train_config(config_options, case.size, config, amount, case.device)
        seed_torch(train_config.seed, 0)
        self.trainer = Trainer(
            attent.build(config),
            None,
            train_config,
            self,
            None,
            None,
            home / "run",
            DistributedContext(case.device),
            self.handle_event,
            make_objective=Seq2SeqObjective,
        )
        self.is_timed, self.num_reports = False, 0  # reports of this round

    def run(self) -> None:
        try:
            self.trainer.run()
        except AllRoundsDone:
            return
        raise AssertionError("the training loop ended before the last round")

    def handle_event(self, event: Event) -> None:
        """Collect speeds; the first reports of a round may include steps before it."""
        if isinstance(event, Progress) and self.is_timed:
            self.num_reports += 1
            if self.num_reports > SKIPPED_REPORTS and event.targets_per_second:
                self.result.reported_speeds.append(event.targets_per_second)

    # The protocol of `BatchLoader`.

    def num_batches(self, epoch: int) -> int:
        return self.batches.num_batches(epoch)

    def get_batch(self, epoch: int, batch_index: int) -> PairBatch:
        return self.batches.get_batch(epoch, batch_index)

    def describe_too_long(self, epoch: int = 0) -> str | None:
        return self.batches.describe_too_long(epoch)

    def iter_batches(
        self, start: LoaderPosition = START_POSITION, *, workers: int = 1, prefetch: int = 8, pin_memory: bool = False
    ) -> BatchIterator:
        batches = self.batches.iter_batches(start, workers=workers, prefetch=prefetch, pin_memory=pin_memory)
        start_time = time.perf_counter()
        yield from islice(batches, self.case.warmup_steps)
        self.case.synchronize()
        warmup_seconds = time.perf_counter() - start_time
        pace = yield from self.time_round(batches, self.case.settle_steps)
        self.result.add_warmup(OURS, warmup_seconds, pace)
        round_steps = estimate_steps(pace, self.case.round_seconds)
        for _ in range(self.case.rounds):
            self.run_baselines()
            yield from islice(batches, self.case.settle_steps)
            timed_round = yield from self.time_round(batches, round_steps)
            self.result.rounds.setdefault(OURS, []).append(timed_round)
        if self.case.device.type == "cuda":
            yield from self.profile_steps(batches)
        raise AllRoundsDone

    def time_round(self, batches: BatchIterator, num_steps: int) -> Generator[Step, None, TimedRound]:
        self.case.synchronize()
        self.is_timed, self.num_reports = True, 0
        start, targets = time.perf_counter(), 0
        for position, batch in islice(batches, num_steps):
            targets += batch.target.num_tokens
            yield position, batch
        self.case.synchronize()
        self.is_timed = False
        return TimedRound(seconds=time.perf_counter() - start, num_steps=num_steps, target_tokens=targets)

    def profile_steps(self, batches: BatchIterator) -> BatchIterator:
        """Profile the GPU only: profiling Python would slow it down."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            yield from islice(batches, PROFILED_STEPS)
            self.case.synchronize()
        spans = list(iter_kernel_spans(profile))
        for name, start, stop in spans:
            self.result.kernel_ms[name] = self.result.kernel_ms.get(name, 0.0) + (stop - start) / 1e3 / PROFILED_STEPS
        self.result.busy_ms = measure_union([(start, stop) for _, start, stop in spans]) / 1e3 / PROFILED_STEPS


def estimate_steps(pace: TimedRound, seconds: float) -> int:
    """Return the number of steps that take the given time."""
    return max(2, round(seconds * pace.num_steps / pace.seconds))


# ---- theirs ----------------------------------------------------------------------------------------------------------


class TransformersBaseline:
    """Marian in a plain, careful training loop."""

    def __init__(self, case: BenchmarkCase, store: TokenStore, *, compiled: bool) -> None:
        self.case = case
        torch.manual_seed(1)
        self.model = build_marian(case.make_config(), LENGTHS[case.lengths].row_tokens).to(case.device).train()
        self.loss_function: Callable[..., Tensor] = (
            torch.compile(self.compute_loss, dynamic=True) if compiled else self.compute_loss
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.batches = case.make_batches(store, "bucketed").iter_batches(
            workers=0, pin_memory=case.device.type == "cuda"
        )
        self.round_steps = 0

    def warm_up(self) -> tuple[float, TimedRound]:
        """Return the seconds of the first steps and a round after them; it sets the length of later rounds."""
        warm, before, pace = self.time_round(self.case.warmup_steps), 0.0, self.time_round(self.case.settle_steps)
        for _ in range(MAX_SETTLE_ROUNDS):  # each new batch shape needs new memory
            if pace.tokens_per_second < STEADY_RATIO * before:
                break
            before, pace = pace.tokens_per_second, self.time_round(self.case.settle_steps)
        self.round_steps = estimate_steps(pace, self.case.round_seconds)
        return warm.seconds, pace

    def run_round(self) -> TimedRound:
        return self.time_round(self.round_steps)

    def time_round(self, num_steps: int) -> TimedRound:
        """Time steps without cuDNN, which takes 0.1 s for each new attention shape and would be five times slower.
        Batches are built before the clock starts."""
        with DISABLE_CUDNN:
            return self._time_steps(num_steps)

    def _time_steps(self, num_steps: int) -> TimedRound:
        batches = [batch for _, batch in islice(self.batches, num_steps)]
        self.case.synchronize()
        start, targets = time.perf_counter(), 0
        for batch in batches:
            targets += batch.target.num_tokens
            self.train_step(batch.to(self.case.device, non_blocking=True))
        self.case.synchronize()
        return TimedRound(seconds=time.perf_counter() - start, num_steps=num_steps, target_tokens=targets)

    def train_step(self, batch: PairBatch) -> None:
        self.optimizer.zero_grad()
        target_mask = batch.target.token_mask()
        with self.case.autocast():
            loss = self.loss_function(
                batch.source.ids,
                batch.source.token_mask().long(),
                shift_right(batch.target.ids, START_ID),
                target_mask.long(),
                batch.target.ids.masked_fill(~target_mask, -100),
            )
        loss.backward()
        self.optimizer.step()

    def compute_loss(
        self, source: Tensor, source_mask: Tensor, target: Tensor, target_mask: Tensor, labels: Tensor
    ) -> Tensor:
        logits = self.model(
            input_ids=source, attention_mask=source_mask, decoder_input_ids=target, decoder_attention_mask=target_mask
        ).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=SMOOTHING)


def build_marian(config: Seq2SeqConfig, max_length: int) -> nn.Module:
    try:
        from transformers import MarianConfig, MarianMTModel
        from transformers.utils import logging
    except ImportError:
        raise SystemExit("transformers is not installed: install it, or measure with --only ours") from None
    logging.set_verbosity_error()
    stack = config.encoder
    marian = MarianConfig(
        vocab_size=config.vocab, d_model=stack.width, encoder_layers=stack.layers, decoder_layers=config.decoder.layers,
        encoder_attention_heads=stack.heads, decoder_attention_heads=stack.heads, encoder_ffn_dim=stack.ffn_width,
        decoder_ffn_dim=stack.ffn_width, activation_function="relu", scale_embedding=True, dropout=stack.dropout,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=PAD, eos_token_id=END,
        decoder_start_token_id=START_ID, forced_eos_token_id=None, max_position_embeddings=max_length + 8,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return MarianMTModel(marian)


# ---- the data --------------------------------------------------------------------------------------------------------


def make_random_store(folder: Path, case: BenchmarkCase) -> TokenStore:
    """Write a token store of random ids."""
    generator, lengths = np.random.default_rng(1), LENGTHS[case.lengths]
    max_length = min(lengths.max_length, case.batch_tokens)
    pairs = max(8, round(case.corpus_tokens / lengths.target_mean))
    source = np.exp(
        np.log(lengths.source_mean) - lengths.log_std**2 / 2 + lengths.log_std * generator.standard_normal(pairs)
    )
    target = (
        source * (lengths.target_mean / lengths.source_mean) * np.exp(-0.02 + 0.2 * generator.standard_normal(pairs))
    )
    tokens = {}
    for side, values in (("source", source), ("target", target)):
        side_lengths = values.round().clip(2, max_length).astype(np.int64)
        tokens[side] = write_side(folder, side, side_lengths, case.vocab, generator)
    np.arange(1, pairs + 1, dtype="<u8").tofile(folder / "locations")
    part = CorpusPart(name="made up", pairs=pairs, dropped={}, examples={})
    pad = {"source": PAD, "target": PAD}
    meta = StoreMeta(
        format_version=FORMAT_VERSION,
        pairs=pairs,
        dtype="<u4",
        token_counts=tokens,
        pad_ids=pad,
        files=["made-up"],
        parts=[part],
    )
    (folder / META_FILE).write_text(json.dumps(asdict(meta)), encoding="utf-8")
    return TokenStore.open(folder)


def write_side(folder: Path, side: str, lengths: Array, vocab: int, generator: np.random.Generator) -> int:
    """Write sentences of these lengths, with their end tokens; return the number of tokens."""
    ends = lengths.cumsum()
    ids = generator.integers(FIRST_WORD, vocab, int(ends[-1]), dtype=np.uint32)
    ids[ends - 1] = END
    ids.astype("<u4").tofile(folder / f"{side}.ids")
    np.concatenate([[0], ends]).astype("<i8").tofile(folder / f"{side}.offsets")
    return len(ids)


# ---- the machine -----------------------------------------------------------------------------------------------------


def describe_commit() -> str:
    try:
        output = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return f"commit {output.stdout.strip()}"


# ---- the profile -----------------------------------------------------------------------------------------------------

# The first group that has a part of a kernel's name. The names of compiled kernels list all that they fuse: a product
# or the loss is more specific than a dropout in the same kernel.
KERNEL_GROUPS = {
    "attention": ("attend", "attention", "flash", "fmha", "sdpa", "tiles"),
    "loss": ("logsumexp", "loss", "softmax", "entropy", "smooth", "to_gradients"),
    "optimizer": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "triton_tem", "_mm_", "gemv"),
    "norm, dropout, residual": ("norm", "dropout", "residual", "var_mean", "rsqrt"),
}
OTHER_GROUP = "other"


def classify_kernel(kernel: str) -> str:
    name = kernel.lower()
    return next((group for group, parts in KERNEL_GROUPS.items() if any(part in name for part in parts)), OTHER_GROUP)


def iter_kernel_spans(profile: torch.profiler.profile) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end in microseconds of everything that ran on the GPU, copies included."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)["traceEvents"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            yield event["name"], event["ts"], event["ts"] + event["dur"]


def measure_union(spans: list[tuple[float, float]]) -> float:
    """Return the time covered by at least one span: kernels of several streams may overlap."""
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


# ---- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """The figures of a case."""

    case: BenchmarkCase
    result: CaseResult
    ceiling: PeakRates
    flops_per_token: float  # per target token
    min_bytes: int  # of one of our steps
    tokens_per_step: float  # of one of our steps

    @classmethod
    def from_result(cls, case: BenchmarkCase, store: TokenStore, result: CaseResult, ceiling: PeakRates) -> CaseReport:
        source, target = store.source.lengths, store.target.lengths
        config = case.make_config()
        ours = result.rounds.get(OURS, [])
        targets = sum(each.target_tokens for each in ours) / max(1, sum(each.num_steps for each in ours))
        sources = targets * int(source.sum()) / int(target.sum())
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in attent.build(config).parameters())
        return cls(
            case=case,
            result=result,
            ceiling=ceiling,
            flops_per_token=count_model_flops(config, source, target).total / int(target.sum()),
            min_bytes=count_min_bytes(config, parameters, round(sources), round(targets)),
            tokens_per_step=targets,
        )

    @property
    def step_ms(self) -> float:
        """Median of one of our steps."""
        return statistics.median(1e3 * each.seconds / each.num_steps for each in self.result.rounds[OURS])

    @property
    def bounds_ms(self) -> tuple[float, float]:
        """Lower bounds of one of our steps: by operations, and by bytes."""
        return (
            1e3 * self.flops_per_token * self.tokens_per_step / self.ceiling.flops,
            1e3 * self.min_bytes / self.ceiling.bytes,
        )

    def format_lines(self, *, profile: bool) -> Iterator[str]:
        yield "\n| | target tokens/s (min to max) | model TFLOP/s | of the ceiling | times transformers |"
        yield "|---|---|---|---|---|"
        for name in sorted(self.result.rounds, key=[EAGER, COMPILED, OURS].index):
            yield self.format_row(name)
        for name, reason in self.result.failures.items():
            yield f"| {name} | failed: {reason[:90].replace('|', ' ')} | | | |"
        warming = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.result.warmup_seconds.items())
        yield f"\nthe first {self.case.warmup_steps} steps, with compilation: {warming}"
        if OURS in self.result.rounds:
            yield from self.format_our_step()
        if profile and self.result.kernel_ms:
            yield from self.format_profile()

    def format_row(self, name: str) -> str:
        speeds = [each.tokens_per_second for each in self.result.rounds[name]]
        rate = statistics.median(speeds) * self.flops_per_token
        spread = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        share = f"{rate / self.ceiling.flops:.1%}"
        return f"| {name} | {spread} | {rate / 1e12:.4g} | {share} | {self.format_ratio(speeds)} |"

    def format_ratio(self, speeds: list[float]) -> str:
        theirs = self.result.rounds.get(EAGER)
        if theirs is None:
            return ""
        ratios = [ours / baseline.tokens_per_second for ours, baseline in zip(speeds, theirs, strict=True)]
        return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"

    def format_our_step(self) -> Iterator[str]:
        by_flops, by_bytes = self.bounds_ms
        full = self.tokens_per_step / self.case.batch_tokens
        yield (
            f"our step: {self.step_ms:.2f} ms, {self.tokens_per_step:,.0f} target tokens ({full:.1%} of the batch); "
            f"at least {by_flops:.2f} ms by {self.flops_per_token * self.tokens_per_step / 1e12:.2f} TFLOP, "
            f"{by_bytes:.2f} ms by {self.min_bytes / 1e9:.2f} GB"
        )
        if self.result.busy_ms:
            yield f"the GPU: {self.result.busy_ms:.2f} ms in kernels, idle {self.idle_share:.1%} of a step"
        if self.result.reported_speeds:
            yield f"the loop itself reports {statistics.median(self.result.reported_speeds):,.0f} target tokens/s"

    @property
    def idle_share(self) -> float:
        return max(0.0, 1 - self.result.busy_ms / self.step_ms)

    def sum_groups(self) -> dict[str, float]:
        totals = dict.fromkeys((*KERNEL_GROUPS, OTHER_GROUP), 0.0)
        for name, milliseconds in self.result.kernel_ms.items():
            totals[classify_kernel(name)] += milliseconds
        return totals

    def format_profile(self, max_kernels: int = 25) -> Iterator[str]:
        total = sum(self.result.kernel_ms.values())
        yield "\n| | ms of a step | of all kernels |\n|---|---|---|"
        for name, milliseconds in sorted(self.sum_groups().items(), key=lambda entry: -entry[1]):
            yield f"| {name} | {milliseconds:.3f} | {milliseconds / total:.1%} |"
        yield "\n      ms  group                    kernel"
        for name, milliseconds in sorted(self.result.kernel_ms.items(), key=lambda entry: -entry[1])[:max_kernels]:
            yield f"{milliseconds:8.3f}  {classify_kernel(name):23}  {name[:90]}"

    def to_json(self) -> dict[str, Any]:
        """Return all figures for the JSON file."""
        case = {name: value for name, value in asdict(self.case).items() if name != "device"}
        rounds = {name: [asdict(each) for each in timed] for name, timed in self.result.rounds.items()}
        report: dict[str, Any] = {
            **case, "rounds": rounds, "warmup_seconds": self.result.warmup_seconds,
            "flops_per_target": self.flops_per_token, "reported_speeds": self.result.reported_speeds,
            "failed": self.result.failures,
        }  # fmt: skip
        if OURS in rounds:
            by_flops, by_bytes = self.bounds_ms
            report |= {
                "step_ms": self.step_ms, "bound_ms": {"flops": by_flops, "bytes": by_bytes}, "bytes": self.min_bytes,
                "busy_ms": self.result.busy_ms, "group_ms": self.sum_groups(), "kernel_ms": self.result.kernel_ms,
            }  # fmt: skip
        return report


if __name__ == "__main__":
    main()
