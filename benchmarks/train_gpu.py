"""Training a translator on a GPU beside `transformers`' Marian of the same size: target tokens/s of whole updates.

    python -m benchmarks.train_gpu                                     base, lengths as in WMT, 25,600 tokens a side
    python -m benchmarks.train_gpu --size small base big --lengths 15 29 1024
    python -m benchmarks.train_gpu --tokens 25600 65536 --only ours --profile
    python -m benchmarks.train_gpu --without-compiled                  theirs only as it comes: to compile takes minutes
    python -m benchmarks.train_gpu --device cpu                        the same, tiny, to see that it runs

Token ids are drawn at random; lengths are log-normal (29: mean 29 + 30 tokens, up to 200; 15: image captions; 1024:
documents of up to 2,048). Both train with Adam (fused), label smoothing 0.1, the preset's dropout, in bfloat16.

    transformers  batches bucketed by length, room for `--tokens` tokens a side with filler, made while no clock runs,
                  sent from pinned memory; autocast, SDPA; as it comes, and compiled together with its loss (dynamic)
    attent        `attent.train.loop.Training` itself, with the recipe that `attent train` chooses by itself;
                  packed batches, made by its own thread while it trains

They take turns, round by round, each round about `--seconds` long; filler counts for nobody. Model TFLOP/s are by
`flops.model_flops`; the ceiling is a bfloat16 product of 8192 x 8192 matrices of random numbers in the same run. An
update has two floors: its operations at that ceiling, and its fewest bytes (`flops.least_bytes`) at the speed of a copy
within the GPU's memory, which is measured too. What the GPU does not spend in kernels, by torch's profiler, is idle.
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
from attent.nn.kernels.sdpa import DISABLE_CUDNN
from attent.training import rng
from attent.training.autoconfig import DataSize, fill_train_config
from attent.training.config import TrainConfig
from attent.training.distributed import DistributedContext
from attent.training.events import Event, Progress
from attent.training.loop import Trainer
from attent.training.run_options import Size
from benchmarks.flops import count_min_bytes, count_model_flops
from benchmarks.timing import PeakRates, describe_machine, measure_peak_rates

PAD, START_ID, END, FIRST_WORD = 0, 1, 2, 4  # ids; words begin at the last
SMOOTHING = 0.1
WARMUP_STEPS = {"cuda": 24, "cpu": 2}  # updates before the clock runs: they compile, record, and settle the allocator
SETTLE_STEPS = {"cuda": 10, "cpu": 1}  # untimed at the beginning of a round: more than were made ahead in the meantime
STEADY_RATIO, MAX_SETTLE_ROUNDS = 1.1, 12  # theirs is warm when it gets no faster by a tenth, or after so many tries
PROFILED_STEPS = 10
SKIPPED_REPORTS = 2  # reports of our loop at the beginning of a round that are left out
OURS, EAGER, COMPILED = "attent", "transformers", "transformers, compiled"
Step = tuple[LoaderPosition, PairBatch]
BatchIterator = Iterator[Step]


@dataclass(frozen=True, kw_only=True)
class LengthDistribution:
    """Of a kind of text."""

    source_mean: float  # mean
    target_mean: float
    log_std: float  # standard deviation of the logarithm
    max_length: int
    row_tokens: int  # tokens of a row of packed batches


LENGTHS = {
    "15": LengthDistribution(source_mean=15, target_mean=15.5, log_std=0.35, max_length=60, row_tokens=256),
    "29": LengthDistribution(source_mean=29, target_mean=30, log_std=0.6, max_length=200, row_tokens=256),
    "1024": LengthDistribution(source_mean=1000, target_mean=1024, log_std=0.3, max_length=2048, row_tokens=2048),
}
CORPUS_TOKENS = {"cuda": 8_000_000, "cpu": 20_000}  # tokens of a side: on a GPU about 300 updates an epoch


@dataclass(frozen=True, kw_only=True)
class BenchmarkCase:
    """One row of settings, and the device."""

    size: Size
    lengths: str
    batch_tokens: int
    vocab: int
    device: torch.device
    rounds: int
    round_seconds: float  # of a round
    corpus_tokens: int

    @property
    def description(self) -> str:
        of = LENGTHS[self.lengths]
        means = f"mean lengths {of.source_mean:g} + {of.target_mean:g}"
        return f"{self.size}, {means}, {self.batch_tokens:,} tokens a side, {self.vocab:,} words"

    @property
    def warmup_steps(self) -> int:
        return WARMUP_STEPS[self.device.type]

    @property
    def settle_steps(self) -> int:
        return SETTLE_STEPS[self.device.type]

    def make_config(self) -> Seq2SeqConfig:
        return getattr(attent.presets, self.size)(self.vocab)

    def make_batches(self, store: TokenStore, layout: Any) -> PairLoader:
        longest = min(LENGTHS[self.lengths].row_tokens, self.batch_tokens)
        return PairLoader(store, BatchConfig(batch_tokens=self.batch_tokens, max_tokens=longest, layout=layout), seed=1)

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    seconds: float
    num_steps: int
    target_tokens: int  # tokens, filler aside

    @property
    def tokens_per_second(self) -> float:
        return self.target_tokens / self.seconds


@dataclass(kw_only=True)
class CaseResult:
    """What a case came to."""

    rounds: dict[str, list[TimedRound]] = field(default_factory=dict)
    warmup_seconds: dict[str, float] = field(default_factory=dict)  # seconds of the updates before the clock ran
    reported_speeds: list[float] = field(default_factory=list)  # target tokens/s that our loop tells
    kernel_ms: dict[str, float] = field(default_factory=dict)  # ms of one of our updates, by kernel
    busy_ms: float = 0.0  # ms of one of our updates in which some kernel runs
    failures: dict[str, str] = field(default_factory=dict)  # which of theirs, and why

    def add_warmup(self, name: str, seconds: float, pace: TimedRound) -> None:
        """Told at once: a run that is cut short has said something then."""
        self.warmup_seconds[name] = seconds
        print(f"{name}: warm after {seconds:.1f} s, at first {pace.tokens_per_second:,.0f} target tokens/s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    asked = parse_arguments(argv)
    device = torch.device(asked.device)
    print(f"{describe_machine()}, {describe_commit()}, {datetime.date.today()}", flush=True)
    ceiling = measure_peak_rates(device)
    tells = f"{ceiling.flops / 1e12:,.1f} TFLOP/s in a product, {ceiling.bytes / 1e12:,.3f} TB/s in a copy"
    print(f"ceiling: {tells}", flush=True)
    facts: dict[str, Any] = {
        "machine": describe_machine(),
        "commit": describe_commit(),
        "ceiling": asdict(ceiling),
        "cases": [],
    }
    failed = 0
    for size, lengths, tokens in product(asked.size, asked.lengths, asked.tokens):
        case = BenchmarkCase(
            size=size, lengths=lengths, batch_tokens=tokens, vocab=asked.vocab, device=device, rounds=asked.rounds,
            round_seconds=asked.seconds, corpus_tokens=CORPUS_TOKENS[device.type],
        )  # fmt: skip
        try:
            facts["cases"].append(told := run_case(case, ceiling, asked))
            failed += len(told["failed"])
        except RuntimeError:  # out of memory, most likely: the other cases are still worth having
            failed += 1
            traceback.print_exc()
        if asked.json:
            Path(asked.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if failed:
        sys.exit(1)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=("tiny", "small", "base", "big"))
    parser.add_argument("--lengths", nargs="+", choices=tuple(LENGTHS), default=["29"])
    parser.add_argument("--tokens", nargs="+", type=int, help="of a side of a batch, by default 25,600")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of a round, about")
    parser.add_argument("--only", choices=("ours", "theirs"))
    parser.add_argument("--without-compiled", action="store_true", help="transformers only as it comes")
    parser.add_argument("--profile", action="store_true", help="tell where our time goes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="a file for all numbers")
    asked = parser.parse_args(argv)
    gpu = asked.device.startswith("cuda")
    asked.size = asked.size or ["base" if gpu else "tiny"]
    asked.tokens = asked.tokens or [25_600 if gpu else 1024]
    asked.vocab = asked.vocab or (32_768 if gpu else 1000)
    asked.rounds = asked.rounds or (5 if gpu else 1)
    asked.seconds = asked.seconds or (2.0 if gpu else 0.2)
    return asked


def run_case(case: BenchmarkCase, ceiling: PeakRates, arguments: argparse.Namespace) -> dict[str, Any]:
    """A case from its data to its table."""
    print(f"\n{case.description}", flush=True)
    with tempfile.TemporaryDirectory() as home:
        store = make_random_store(Path(home), case)
        found = compare_speeds(case, store, Path(home), arguments)
        account = CaseReport.from_result(case, store, found, ceiling)
    for line in account.format_lines(profile=arguments.format_profile):
        print(line, flush=True)
    torch._dynamo.reset()  # graphs and their memory go with the case
    free_memory(case.device)
    return account.to_json()


def compare_speeds(case: BenchmarkCase, store: TokenStore, home: Path, arguments: argparse.Namespace) -> CaseResult:
    """All ways in turns. Ours is a loop that is not left before its end, so that the others' turns are inside it."""
    found = CaseResult()
    rivals = {
        name: TransformersBaseline(case, store, compiled=name == COMPILED) for name in list_baselines(case, arguments)
    }

    def turns() -> None:
        for name in list(rivals):
            if not run_baseline_round(name, rivals[name], found):
                del rivals[name]
                free_memory(case.device)

    if arguments.only == "theirs":
        for _ in range(case.rounds):
            turns()
    else:
        TimedTraining(case, store, home, found, turns).run()
    return found


def list_baselines(case: BenchmarkCase, arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.only != "ours":
        yield EAGER
        if case.device.type == "cuda" and not arguments.without_compiled:
            yield COMPILED


def run_baseline_round(name: str, baseline: TransformersBaseline, result: CaseResult) -> bool:
    """One that fails, compiling or out of memory, is told of and has no more turns: the others go on."""
    try:
        if not baseline.num_steps:
            result.add_warmup(name, *baseline.warm_up())
        result.rounds.setdefault(name, []).append(baseline.run_round())
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways
        traceback.print_exc(limit=-3)
        result.rounds.pop(name, None)
        result.failures[name] = f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
        print(f"{name}: failed, and is left out", flush=True)
    return name not in result.failures


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- ours ------------------------------------------------------------------------------------------------------------


class AllRoundsDone(Exception):
    """All rounds are over; the run that is measured need not save itself."""


class TimedTraining:
    """`Training` on batches that watch the clock: they are asked for one by one, and know when a round is over."""

    def __init__(
        self, case: BenchmarkCase, store: TokenStore, home: Path, result: CaseResult, run_baselines: Callable[[], None]
    ) -> None:
        self.case, self.result, self.run_baselines = case, result, run_baselines
        self.batches = case.make_batches(store, "packed")
        config = case.make_config()
        amount = DataSize(num_examples=len(store), num_tokens=int(store.target.lengths.sum()))
        never = 10**9
        asked = TrainConfig(steps=never, batch_tokens=case.batch_tokens, save_every=never, valid_every=never)
        chosen = fill_train_config(asked, case.size, config, amount, case.device)
        rng.seed_torch(chosen.seed, 0)
        self.training = Trainer(
            attent.build(config),
            None,
            chosen,
            self,
            None,
            None,
            home / "run",
            DistributedContext(case.device),
            self.handle_event,
        )
        self.is_timed, self.num_reports = False, 0  # now; and the reports of this round

    def run(self) -> None:
        try:
            self.training.run()
        except AllRoundsDone:
            return
        raise AssertionError("the run ended by itself")

    def handle_event(self, event: Event) -> None:
        """The first reports of a round may speak of what came before it too."""
        if isinstance(event, Progress) and self.is_timed:
            self.num_reports += 1
            if self.num_reports > SKIPPED_REPORTS and event.targets_per_second:
                self.result.reported_speeds.append(event.targets_per_second)

    # What `Training` asks of batches.

    def steps(self, epoch: int) -> int:
        return self.batches.num_steps(epoch)

    def batch(self, epoch: int, step: int) -> PairBatch:
        return self.batches.get_batch(epoch, step)

    def too_long(self, epoch: int = 0) -> str | None:
        return self.batches.describe_too_long(epoch)

    def walk(
        self, start: LoaderPosition = START_POSITION, *, workers: int = 1, ahead: int = 8, pin: bool = False
    ) -> BatchIterator:
        walk = self.batches.iter_batches(start, workers=workers, prefetch=ahead, pin_memory=pin)
        began = time.perf_counter()
        yield from islice(walk, self.case.warmup_steps)
        self.case.synchronize()
        warming = time.perf_counter() - began
        pace = yield from self.time_round(walk, self.case.settle_steps)
        self.result.add_warmup(OURS, warming, pace)
        updates = estimate_steps(pace, self.case.round_seconds)
        for _ in range(self.case.rounds):
            self.run_baselines()
            yield from islice(walk, self.case.settle_steps)
            now = yield from self.time_round(walk, updates)
            self.result.rounds.setdefault(OURS, []).append(now)
        if self.case.device.type == "cuda":
            yield from self.profile_steps(walk)
        raise AllRoundsDone

    def time_round(self, batches: BatchIterator, num_steps: int) -> Generator[Step, None, TimedRound]:
        self.case.synchronize()
        self.is_timed, self.num_reports = True, 0
        began, targets = time.perf_counter(), 0
        for place, batch in islice(batches, num_steps):
            targets += batch.target.num_tokens
            yield place, batch
        self.case.synchronize()
        self.is_timed = False
        return TimedRound(seconds=time.perf_counter() - began, num_steps=num_steps, target_tokens=targets)

    def profile_steps(self, batches: BatchIterator) -> BatchIterator:
        """Which kernels ran when. Only the GPU is watched: watching Python too would make it slower."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            yield from islice(batches, PROFILED_STEPS)
            self.case.synchronize()
        spans = list(iter_kernel_spans(seen))
        for name, start, stop in spans:
            self.result.kernel_ms[name] = self.result.kernel_ms.get(name, 0.0) + (stop - start) / 1e3 / PROFILED_STEPS
        self.result.busy_ms = measure_union([(start, stop) for _, start, stop in spans]) / 1e3 / PROFILED_STEPS


def estimate_steps(pace: TimedRound, seconds: float) -> int:
    """As many as take so long."""
    return max(2, round(seconds * pace.num_steps / pace.seconds))


# ---- theirs ----------------------------------------------------------------------------------------------------------


class TransformersBaseline:
    """Marian in a plain loop, as a careful person writes it."""

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
        self.num_steps = 0  # of a round

    def warm_up(self) -> tuple[float, TimedRound]:
        """Seconds of the first updates, and how fast the next ones are: then it is known how many make a round."""
        warm, before, pace = self.time_round(self.case.warmup_steps), 0.0, self.time_round(self.case.settle_steps)
        for _ in range(MAX_SETTLE_ROUNDS):  # each shape of a batch is new to the allocator
            if pace.tokens_per_second < STEADY_RATIO * before:
                break
            before, pace = pace.tokens_per_second, self.time_round(self.case.settle_steps)
        self.num_steps = estimate_steps(pace, self.case.round_seconds)
        return warm.seconds, pace

    def run_round(self) -> TimedRound:
        return self.time_round(self.num_steps)

    def time_round(self, num_steps: int) -> TimedRound:
        """Its batches are made while no clock runs. Not with cuDNN: that takes a tenth of a second for each new shape
        of attention, and would make it five times as slow."""
        with DISABLE_CUDNN:
            return self._time_steps(num_steps)

    def _time_steps(self, num_steps: int) -> TimedRound:
        batches = [batch for _, batch in islice(self.batches, num_steps)]
        self.case.synchronize()
        began, targets = time.perf_counter(), 0
        for batch in batches:
            targets += batch.target.num_tokens
            self.train_step(batch.to(self.case.device, non_blocking=True))
        self.case.synchronize()
        return TimedRound(seconds=time.perf_counter() - began, num_steps=num_steps, target_tokens=targets)

    def train_step(self, batch: PairBatch) -> None:
        self.optimizer.zero_grad()
        real = batch.target.token_mask()
        with self.case.autocast():
            loss = self.loss_function(
                batch.source.ids,
                batch.source.token_mask().long(),
                shift_right(batch.target.ids, START_ID),
                real.long(),
                batch.target.ids.masked_fill(~real, -100),
            )
        loss.backward()
        self.optimizer.step()

    def compute_loss(
        self, source: Tensor, source_real: Tensor, reads: Tensor, reads_real: Tensor, labels: Tensor
    ) -> Tensor:
        logits = self.model(
            input_ids=source, attention_mask=source_real, decoder_input_ids=reads, decoder_attention_mask=reads_real
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
    theirs = MarianConfig(
        vocab_size=config.vocab, d_model=stack.width, encoder_layers=stack.layers, decoder_layers=config.decoder.layers,
        encoder_attention_heads=stack.heads, decoder_attention_heads=stack.heads, encoder_ffn_dim=stack.ffn_width,
        decoder_ffn_dim=stack.ffn_width, activation_function="relu", scale_embedding=True, dropout=stack.dropout,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=PAD, eos_token_id=END,
        decoder_start_token_id=START_ID, forced_eos_token_id=None, max_position_embeddings=max_length + 8, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return MarianMTModel(theirs)


# ---- the data --------------------------------------------------------------------------------------------------------


def make_random_store(folder: Path, case: BenchmarkCase) -> TokenStore:
    """Random ids in a store as any other."""
    dice, of = np.random.default_rng(1), LENGTHS[case.lengths]
    most = min(of.max_length, case.batch_tokens)
    pairs = max(8, round(case.corpus_tokens / of.target_mean))
    source = np.exp(np.log(of.source_mean) - of.log_std**2 / 2 + of.log_std * dice.standard_normal(pairs))
    target = source * (of.target_mean / of.source_mean) * np.exp(-0.02 + 0.2 * dice.standard_normal(pairs))
    tokens = {}
    for side, lengths in (("source", source), ("target", target)):
        tokens[side] = write_side(folder, side, lengths.round().clip(2, most).astype(np.int64), case.vocab, dice)
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


def write_side(folder: Path, side: str, lengths: Array, vocab: int, dice: np.random.Generator) -> int:
    """Sentences of these lengths, their end tokens included."""
    ends = lengths.cumsum()
    ids = dice.integers(FIRST_WORD, vocab, int(ends[-1]), dtype=np.uint32)
    ids[ends - 1] = END
    ids.astype("<u4").tofile(folder / f"{side}.ids")
    np.concatenate([[0], ends]).astype("<i8").tofile(folder / f"{side}.offsets")
    return len(ids)


# ---- the machine -----------------------------------------------------------------------------------------------------


def describe_commit() -> str:
    try:
        here = Path(__file__).parent
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return f"commit {found.stdout.strip()}"


# ---- the profile -----------------------------------------------------------------------------------------------------

# The first that has a part of a kernel's name. Kernels that the compiler makes are called by all that they fuse: what
# stands in the way of a product or of the loss says more than a dropout beside it.
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
    """Name, start and end in microseconds of all that ran on the GPU, copies included."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)["traceEvents"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            yield event["name"], event["ts"], event["ts"] + event["dur"]


def measure_union(spans: list[tuple[float, float]]) -> float:
    """How much time lies in at least one of them: kernels of several streams may run at once."""
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


# ---- the account -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """A case in numbers."""

    case: BenchmarkCase
    result: CaseResult
    ceiling: PeakRates
    flops_per_token: float  # of a target token
    min_bytes: int  # of one of our updates, at least
    tokens_per_step: float  # of one of our updates

    @classmethod
    def from_result(cls, case: BenchmarkCase, store: TokenStore, result: CaseResult, ceiling: PeakRates) -> CaseReport:
        source, target = store.source.lengths, store.target.lengths
        config = case.make_config()
        ours = result.rounds.get(OURS, [])
        targets = sum(one.target_tokens for one in ours) / max(1, sum(one.num_steps for one in ours))
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
        """Milliseconds of one of ours."""
        return statistics.median(1e3 * one.seconds / one.num_steps for one in self.result.rounds[OURS])

    @property
    def bounds_ms(self) -> tuple[float, float]:
        """Milliseconds in which one of ours could be done by the operations alone, and by the bytes alone."""
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
        yield f"\nthe first {self.case.warmup_steps} updates, compiling included: {warming}"
        if OURS in self.result.rounds:
            yield from self.format_our_step()
        if profile and self.result.kernel_ms:
            yield from self.format_profile()

    def format_row(self, name: str) -> str:
        speeds = [one.tokens_per_second for one in self.result.rounds[name]]
        rate = statistics.median(speeds) * self.flops_per_token
        spread = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        share = f"{rate / self.ceiling.flops:.1%}"
        return f"| {name} | {spread} | {rate / 1e12:.4g} | {share} | {self.format_ratio(speeds)} |"

    def format_ratio(self, speeds: list[float]) -> str:
        theirs = self.result.rounds.get(EAGER)
        if theirs is None:
            return ""
        ratios = [ours / other.tokens_per_second for ours, other in zip(speeds, theirs, strict=True)]
        return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"

    def format_our_step(self) -> Iterator[str]:
        by_flops, by_bytes = self.bounds_ms
        full = self.tokens_per_step / self.case.batch_tokens
        yield (
            f"our update: {self.step_ms:.2f} ms, {self.tokens_per_step:,.0f} target tokens ({full:.1%} of the room); "
            f"at least {by_flops:.2f} ms by {self.flops_per_token * self.tokens_per_step / 1e12:.2f} TFLOP, "
            f"{by_bytes:.2f} ms by {self.min_bytes / 1e9:.2f} GB"
        )
        if self.result.busy_ms:
            yield f"the GPU: {self.result.busy_ms:.2f} ms in kernels, idle {self.idle_share:.1%} of an update"
        if self.result.reported_speeds:
            yield f"the loop itself tells {statistics.median(self.result.reported_speeds):,.0f} target tokens/s"

    @property
    def idle_share(self) -> float:
        return max(0.0, 1 - self.result.busy_ms / self.step_ms)

    def sum_groups(self) -> dict[str, float]:
        found = dict.fromkeys((*KERNEL_GROUPS, OTHER_GROUP), 0.0)
        for name, milliseconds in self.result.kernel_ms.items():
            found[classify_kernel(name)] += milliseconds
        return found

    def format_profile(self, most: int = 25) -> Iterator[str]:
        total = sum(self.result.kernel_ms.values())
        yield "\n| | ms of an update | of all kernels |\n|---|---|---|"
        for name, milliseconds in sorted(self.sum_groups().items(), key=lambda entry: -entry[1]):
            yield f"| {name} | {milliseconds:.3f} | {milliseconds / total:.1%} |"
        yield "\n      ms  group                    kernel"
        for name, milliseconds in sorted(self.result.kernel_ms.items(), key=lambda entry: -entry[1])[:most]:
            yield f"{milliseconds:8.3f}  {classify_kernel(name):23}  {name[:90]}"

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        case = {name: value for name, value in asdict(self.case).items() if name != "device"}
        rounds = {name: [asdict(one) for one in all_of] for name, all_of in self.result.rounds.items()}
        facts: dict[str, Any] = {
            **case, "rounds": rounds, "warming": self.result.warmup_seconds, "flops_per_target": self.flops_per_token,
            "reports": self.result.reported_speeds, "failed": self.result.failures,
        }  # fmt: skip
        if OURS in rounds:
            by_flops, by_bytes = self.bounds_ms
            facts |= {
                "update_ms": self.step_ms, "bound_ms": {"flops": by_flops, "bytes": by_bytes}, "bytes": self.min_bytes,
                "busy_ms": self.result.busy_ms, "groups_ms": self.sum_groups(), "kernels_ms": self.result.kernel_ms,
            }  # fmt: skip
        return facts


if __name__ == "__main__":
    main()
