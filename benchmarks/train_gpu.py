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
from attent.data.batches import START, Batch, Batches, Position
from attent.data.estimate import Size
from attent.data.plan import BatchConfig
from attent.data.store import FORMAT, META, Meta, Part, Store
from attent.models import Seq2SeqConfig, shift_right
from attent.nn.attend import WITHOUT_CUDNN
from attent.train import chance
from attent.train.choose import Amount, recipe
from attent.train.config import TrainConfig
from attent.train.events import Event, Progress
from attent.train.loop import Training
from attent.train.team import Team
from benchmarks.flops import least_bytes, model_flops
from benchmarks.measure import Ceiling, machine, measured

PAD, BEGIN, END, WORDS = 0, 1, 2, 4  # ids; words begin at the last
SMOOTHING = 0.1
WARM = {"cuda": 24, "cpu": 2}  # updates before the clock runs: they compile, record, and settle the allocator
SETTLE = {"cuda": 10, "cpu": 1}  # untimed at the beginning of a round: more than were made ahead in the meantime
STEADY, MOST_SETTLING = 1.1, 12  # theirs is warm when it gets no faster by a tenth, or after so many tries
PROFILED = 10
BEFORE = 2  # reports of our loop at the beginning of a round that are left out
OURS, EAGER, COMPILED = "attent", "transformers", "transformers, compiled"
Step = tuple[Position, Batch]
Walk = Iterator[Step]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of a kind of text."""

    source: float  # mean
    target: float
    spread: float  # standard deviation of the logarithm
    most: int
    row: int  # tokens of a row of packed batches


LENGTHS = {
    "15": Lengths(source=15, target=15.5, spread=0.35, most=60, row=256),
    "29": Lengths(source=29, target=30, spread=0.6, most=200, row=256),
    "1024": Lengths(source=1000, target=1024, spread=0.3, most=2048, row=2048),
}
CORPUS = {"cuda": 8_000_000, "cpu": 20_000}  # tokens of a side: on a GPU about 300 updates an epoch


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of settings, and the device."""

    size: Size
    lengths: str
    tokens: int
    vocab: int
    device: torch.device
    rounds: int
    seconds: float  # of a round
    corpus: int

    @property
    def told(self) -> str:
        of = LENGTHS[self.lengths]
        means = f"mean lengths {of.source:g} + {of.target:g}"
        return f"{self.size}, {means}, {self.tokens:,} tokens a side, {self.vocab:,} words"

    @property
    def warm(self) -> int:
        return WARM[self.device.type]

    @property
    def settle(self) -> int:
        return SETTLE[self.device.type]

    def config(self) -> Seq2SeqConfig:
        return getattr(attent.presets, self.size)(self.vocab)

    def batches(self, store: Store, layout: Any) -> Batches:
        longest = min(LENGTHS[self.lengths].row, self.tokens)
        return Batches(store, BatchConfig(tokens=self.tokens, longest=longest, layout=layout), seed=1)

    def precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True)
class Round:
    seconds: float
    updates: int
    targets: int  # tokens, filler aside

    @property
    def speed(self) -> float:
        return self.targets / self.seconds


@dataclass(kw_only=True)
class Found:
    """What a case came to."""

    rounds: dict[str, list[Round]] = field(default_factory=dict)
    warming: dict[str, float] = field(default_factory=dict)  # seconds of the updates before the clock ran
    reports: list[float] = field(default_factory=list)  # target tokens/s that our loop tells
    kernels: dict[str, float] = field(default_factory=dict)  # ms of one of our updates, by kernel
    busy: float = 0.0  # ms of one of our updates in which some kernel runs
    failed: dict[str, str] = field(default_factory=dict)  # which of theirs, and why

    def warm(self, name: str, seconds: float, pace: Round) -> None:
        """Told at once: a run that is cut short has said something then."""
        self.warming[name] = seconds
        print(f"{name}: warm after {seconds:.1f} s, at first {pace.speed:,.0f} target tokens/s", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    device = torch.device(asked.device)
    print(f"{machine()}, {commit()}, {datetime.date.today()}", flush=True)
    ceiling = measured(device)
    tells = f"{ceiling.flops / 1e12:,.1f} TFLOP/s in a product, {ceiling.bytes / 1e12:,.3f} TB/s in a copy"
    print(f"ceiling: {tells}", flush=True)
    facts: dict[str, Any] = {"machine": machine(), "commit": commit(), "ceiling": asdict(ceiling), "cases": []}
    failed = 0
    for size, lengths, tokens in product(asked.size, asked.lengths, asked.tokens):
        case = Case(
            size=size, lengths=lengths, tokens=tokens, vocab=asked.vocab, device=device, rounds=asked.rounds,
            seconds=asked.seconds, corpus=CORPUS[device.type],
        )  # fmt: skip
        try:
            facts["cases"].append(told := tried(case, ceiling, asked))
            failed += len(told["failed"])
        except RuntimeError:  # out of memory, most likely: the other cases are still worth having
            failed += 1
            traceback.print_exc()
        if asked.json:
            Path(asked.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if failed:
        sys.exit(1)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
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
    asked = parser.parse_args(words)
    gpu = asked.device.startswith("cuda")
    asked.size = asked.size or ["base" if gpu else "tiny"]
    asked.tokens = asked.tokens or [25_600 if gpu else 1024]
    asked.vocab = asked.vocab or (32_768 if gpu else 1000)
    asked.rounds = asked.rounds or (5 if gpu else 1)
    asked.seconds = asked.seconds or (2.0 if gpu else 0.2)
    return asked


def tried(case: Case, ceiling: Ceiling, asked: argparse.Namespace) -> dict[str, Any]:
    """A case from its data to its table."""
    print(f"\n{case.told}", flush=True)
    with tempfile.TemporaryDirectory() as home:
        store = made_up(Path(home), case)
        found = compare(case, store, Path(home), asked)
        account = Account.of(case, store, found, ceiling)
    for line in account.lines(profile=asked.profile):
        print(line, flush=True)
    torch._dynamo.reset()  # graphs and their memory go with the case
    free(case.device)
    return account.facts()


def compare(case: Case, store: Store, home: Path, asked: argparse.Namespace) -> Found:
    """All ways in turns. Ours is a loop that is not left before its end, so that the others' turns are inside it."""
    found = Found()
    rivals = {name: Rival(case, store, compiled=name == COMPILED) for name in theirs(case, asked)}

    def turns() -> None:
        for name in list(rivals):
            if not took_turn(name, rivals[name], found):
                del rivals[name]
                free(case.device)

    if asked.only == "theirs":
        for _ in range(case.rounds):
            turns()
    else:
        Ours(case, store, home, found, turns).run()
    return found


def theirs(case: Case, asked: argparse.Namespace) -> Iterator[str]:
    if asked.only != "ours":
        yield EAGER
        if case.device.type == "cuda" and not asked.without_compiled:
            yield COMPILED


def took_turn(name: str, rival: Rival, found: Found) -> bool:
    """One that fails, compiling or out of memory, is told of and has no more turns: the others go on."""
    try:
        if not rival.updates:
            found.warm(name, *rival.warmed())
        found.rounds.setdefault(name, []).append(rival.turn())
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways
        traceback.print_exc(limit=-3)
        found.rounds.pop(name, None)
        found.failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
        print(f"{name}: failed, and is left out", flush=True)
    return name not in found.failed


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- ours ------------------------------------------------------------------------------------------------------------


class Enough(Exception):
    """All rounds are over; the run that is measured need not save itself."""


class Ours:
    """`Training` on batches that watch the clock: they are asked for one by one, and know when a round is over."""

    def __init__(self, case: Case, store: Store, home: Path, found: Found, turns: Callable[[], None]) -> None:
        self.case, self.found, self.turns = case, found, turns
        self.inner = case.batches(store, "packed")
        config = case.config()
        amount = Amount(pairs=len(store), tokens=int(store.target.lengths().sum()))
        never = 10**9
        asked = TrainConfig(steps=never, batch_tokens=case.tokens, save_every=never, valid_every=never)
        chosen = recipe(asked, case.size, config, amount, case.device)
        chance.fix(chosen.seed, 0)
        self.training = Training(
            attent.build(config), None, chosen, self, None, None, home / "run", Team(case.device), self.tell
        )
        self.timed, self.told = False, 0  # now; and the reports of this round

    def run(self) -> None:
        try:
            self.training.run()
        except Enough:
            return
        raise AssertionError("the run ended by itself")

    def tell(self, event: Event) -> None:
        """The first reports of a round may speak of what came before it too."""
        if isinstance(event, Progress) and self.timed:
            self.told += 1
            if self.told > BEFORE and event.targets_per_second:
                self.found.reports.append(event.targets_per_second)

    # What `Training` asks of batches.

    def steps(self, epoch: int) -> int:
        return self.inner.steps(epoch)

    def batch(self, epoch: int, step: int) -> Batch:
        return self.inner.batch(epoch, step)

    def too_long(self, epoch: int = 0) -> str | None:
        return self.inner.too_long(epoch)

    def walk(self, start: Position = START, *, workers: int = 1, ahead: int = 8, pin: bool = False) -> Walk:
        walk = self.inner.walk(start, workers=workers, ahead=ahead, pin=pin)
        began = time.perf_counter()
        yield from islice(walk, self.case.warm)
        self.case.synchronise()
        warming = time.perf_counter() - began
        pace = yield from self.round(walk, self.case.settle)
        self.found.warm(OURS, warming, pace)
        updates = updates_of(pace, self.case.seconds)
        for _ in range(self.case.rounds):
            self.turns()
            yield from islice(walk, self.case.settle)
            now = yield from self.round(walk, updates)
            self.found.rounds.setdefault(OURS, []).append(now)
        if self.case.device.type == "cuda":
            yield from self.profiled(walk)
        raise Enough

    def round(self, walk: Walk, updates: int) -> Generator[Step, None, Round]:
        self.case.synchronise()
        self.timed, self.told = True, 0
        began, targets = time.perf_counter(), 0
        for place, batch in islice(walk, updates):
            targets += batch.target.tokens
            yield place, batch
        self.case.synchronise()
        self.timed = False
        return Round(seconds=time.perf_counter() - began, updates=updates, targets=targets)

    def profiled(self, walk: Walk) -> Walk:
        """Which kernels ran when. Only the GPU is watched: watching Python too would make it slower."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            yield from islice(walk, PROFILED)
            self.case.synchronise()
        spans = list(kernel_spans(seen))
        for name, start, stop in spans:
            self.found.kernels[name] = self.found.kernels.get(name, 0.0) + (stop - start) / 1e3 / PROFILED
        self.found.busy = covered([(start, stop) for _, start, stop in spans]) / 1e3 / PROFILED


def updates_of(pace: Round, seconds: float) -> int:
    """As many as take so long."""
    return max(2, round(seconds * pace.updates / pace.seconds))


# ---- theirs ----------------------------------------------------------------------------------------------------------


class Rival:
    """Marian in a plain loop, as a careful person writes it."""

    def __init__(self, case: Case, store: Store, *, compiled: bool) -> None:
        self.case = case
        torch.manual_seed(1)
        self.model = marian(case.config(), LENGTHS[case.lengths].row).to(case.device).train()
        self.loss: Callable[..., Tensor] = torch.compile(self.loss_of, dynamic=True) if compiled else self.loss_of
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.batches = case.batches(store, "bucketed").walk(workers=0, pin=case.device.type == "cuda")
        self.updates = 0  # of a round

    def warmed(self) -> tuple[float, Round]:
        """Seconds of the first updates, and how fast the next ones are: then it is known how many make a round."""
        warm, before, pace = self.round(self.case.warm), 0.0, self.round(self.case.settle)
        for _ in range(MOST_SETTLING):  # each shape of a batch is new to the allocator
            if pace.speed < STEADY * before:
                break
            before, pace = pace.speed, self.round(self.case.settle)
        self.updates = updates_of(pace, self.case.seconds)
        return warm.seconds, pace

    def turn(self) -> Round:
        return self.round(self.updates)

    def round(self, updates: int) -> Round:
        """Its batches are made while no clock runs. Not with cuDNN: that takes a tenth of a second for each new shape
        of attention, and would make it five times as slow."""
        with WITHOUT_CUDNN:
            return self.timed(updates)

    def timed(self, updates: int) -> Round:
        batches = [batch for _, batch in islice(self.batches, updates)]
        self.case.synchronise()
        began, targets = time.perf_counter(), 0
        for batch in batches:
            targets += batch.target.tokens
            self.learn(batch.to(self.case.device, non_blocking=True))
        self.case.synchronise()
        return Round(seconds=time.perf_counter() - began, updates=updates, targets=targets)

    def learn(self, batch: Batch) -> None:
        self.optimiser.zero_grad()
        real = batch.target.real()
        with self.case.precision():
            loss = self.loss(
                batch.source.ids,
                batch.source.real().long(),
                shift_right(batch.target.ids, BEGIN),
                real.long(),
                batch.target.ids.masked_fill(~real, -100),
            )
        loss.backward()
        self.optimiser.step()

    def loss_of(self, source: Tensor, source_real: Tensor, reads: Tensor, reads_real: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(
            input_ids=source, attention_mask=source_real, decoder_input_ids=reads, decoder_attention_mask=reads_real
        ).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=SMOOTHING)


def marian(config: Seq2SeqConfig, longest: int) -> nn.Module:
    try:
        from transformers import MarianConfig, MarianMTModel
        from transformers.utils import logging
    except ImportError:
        raise SystemExit("transformers is not installed: install it, or measure with --only ours") from None
    logging.set_verbosity_error()
    stack = config.encoder
    theirs = MarianConfig(
        vocab_size=config.vocab, d_model=stack.width, encoder_layers=stack.layers, decoder_layers=config.decoder.layers,
        encoder_attention_heads=stack.heads, decoder_attention_heads=stack.heads, encoder_ffn_dim=stack.inner,
        decoder_ffn_dim=stack.inner, activation_function="relu", scale_embedding=True, dropout=stack.dropout,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=PAD, eos_token_id=END,
        decoder_start_token_id=BEGIN, forced_eos_token_id=None, max_position_embeddings=longest + 8, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return MarianMTModel(theirs)


# ---- the data --------------------------------------------------------------------------------------------------------


def made_up(folder: Path, case: Case) -> Store:
    """Random ids in a store as any other."""
    dice, of = np.random.default_rng(1), LENGTHS[case.lengths]
    most = min(of.most, case.tokens)
    pairs = max(8, round(case.corpus / of.target))
    source = np.exp(np.log(of.source) - of.spread**2 / 2 + of.spread * dice.standard_normal(pairs))
    target = source * (of.target / of.source) * np.exp(-0.02 + 0.2 * dice.standard_normal(pairs))
    tokens = {}
    for side, lengths in (("source", source), ("target", target)):
        tokens[side] = write_side(folder, side, lengths.round().clip(2, most).astype(np.int64), case.vocab, dice)
    np.arange(1, pairs + 1, dtype="<u8").tofile(folder / "places")
    part = Part(name="made up", pairs=pairs, dropped={}, examples={})
    pad = {"source": PAD, "target": PAD}
    meta = Meta(format=FORMAT, pairs=pairs, dtype="<u4", tokens=tokens, pad=pad, files=["made-up"], parts=[part])
    (folder / META).write_text(json.dumps(asdict(meta)), encoding="utf-8")
    return Store.open(folder)


def write_side(folder: Path, side: str, lengths: Array, vocab: int, dice: np.random.Generator) -> int:
    """Sentences of these lengths, their end tokens included."""
    ends = lengths.cumsum()
    ids = dice.integers(WORDS, vocab, int(ends[-1]), dtype=np.uint32)
    ids[ends - 1] = END
    ids.astype("<u4").tofile(folder / f"{side}.ids")
    np.concatenate([[0], ends]).astype("<i8").tofile(folder / f"{side}.offsets")
    return len(ids)


# ---- the machine -----------------------------------------------------------------------------------------------------


def commit() -> str:
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
GROUPS = {
    "attention": ("attend", "attention", "flash", "fmha", "sdpa", "tiles"),
    "loss": ("logsumexp", "loss", "softmax", "entropy", "smooth", "to_gradients"),
    "optimiser": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "triton_tem", "_mm_", "gemv"),
    "norm, dropout, residual": ("norm", "dropout", "residual", "var_mean", "rsqrt"),
}
OTHER = "other"


def group_of(kernel: str) -> str:
    name = kernel.lower()
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), OTHER)


def kernel_spans(seen: torch.profiler.profile) -> Iterator[tuple[str, float, float]]:
    """Name, start and end in microseconds of all that ran on the GPU, copies included."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)["traceEvents"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            yield event["name"], event["ts"], event["ts"] + event["dur"]


def covered(spans: list[tuple[float, float]]) -> float:
    """How much time lies in at least one of them: kernels of several streams may run at once."""
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


# ---- the account -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Account:
    """A case in numbers."""

    case: Case
    found: Found
    ceiling: Ceiling
    flops: float  # of a target token
    bytes: int  # of one of our updates, at least
    targets: float  # of one of our updates

    @classmethod
    def of(cls, case: Case, store: Store, found: Found, ceiling: Ceiling) -> Account:
        source, target = store.source.lengths(), store.target.lengths()
        config = case.config()
        ours = found.rounds.get(OURS, [])
        targets = sum(one.targets for one in ours) / max(1, sum(one.updates for one in ours))
        sources = targets * int(source.sum()) / int(target.sum())
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in attent.build(config).parameters())
        return cls(
            case=case,
            found=found,
            ceiling=ceiling,
            flops=model_flops(config, source, target).total / int(target.sum()),
            bytes=least_bytes(config, parameters, round(sources), round(targets)),
            targets=targets,
        )

    @property
    def update(self) -> float:
        """Milliseconds of one of ours."""
        return statistics.median(1e3 * one.seconds / one.updates for one in self.found.rounds[OURS])

    @property
    def bounds(self) -> tuple[float, float]:
        """Milliseconds in which one of ours could be done by the operations alone, and by the bytes alone."""
        return 1e3 * self.flops * self.targets / self.ceiling.flops, 1e3 * self.bytes / self.ceiling.bytes

    def lines(self, *, profile: bool) -> Iterator[str]:
        yield "\n| | target tokens/s (min to max) | model TFLOP/s | of the ceiling | times transformers |"
        yield "|---|---|---|---|---|"
        for name in sorted(self.found.rounds, key=[EAGER, COMPILED, OURS].index):
            yield self.row(name)
        for name, reason in self.found.failed.items():
            yield f"| {name} | failed: {reason[:90].replace('|', ' ')} | | | |"
        warming = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.found.warming.items())
        yield f"\nthe first {self.case.warm} updates, compiling included: {warming}"
        if OURS in self.found.rounds:
            yield from self.ours()
        if profile and self.found.kernels:
            yield from self.profile()

    def row(self, name: str) -> str:
        speeds = [one.speed for one in self.found.rounds[name]]
        rate = statistics.median(speeds) * self.flops
        spread = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        share = f"{rate / self.ceiling.flops:.1%}"
        return f"| {name} | {spread} | {rate / 1e12:.4g} | {share} | {self.times(speeds)} |"

    def times(self, speeds: list[float]) -> str:
        theirs = self.found.rounds.get(EAGER)
        if theirs is None:
            return ""
        ratios = [ours / other.speed for ours, other in zip(speeds, theirs, strict=True)]
        return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"

    def ours(self) -> Iterator[str]:
        by_flops, by_bytes = self.bounds
        full = self.targets / self.case.tokens
        yield (
            f"our update: {self.update:.2f} ms, {self.targets:,.0f} target tokens ({full:.1%} of the room); "
            f"at least {by_flops:.2f} ms by {self.flops * self.targets / 1e12:.2f} TFLOP, "
            f"{by_bytes:.2f} ms by {self.bytes / 1e9:.2f} GB"
        )
        if self.found.busy:
            yield f"the GPU: {self.found.busy:.2f} ms in kernels, idle {self.idle:.1%} of an update"
        if self.found.reports:
            yield f"the loop itself tells {statistics.median(self.found.reports):,.0f} target tokens/s"

    @property
    def idle(self) -> float:
        return max(0.0, 1 - self.found.busy / self.update)

    def groups(self) -> dict[str, float]:
        found = dict.fromkeys((*GROUPS, OTHER), 0.0)
        for name, milliseconds in self.found.kernels.items():
            found[group_of(name)] += milliseconds
        return found

    def profile(self, most: int = 25) -> Iterator[str]:
        total = sum(self.found.kernels.values())
        yield "\n| | ms of an update | of all kernels |\n|---|---|---|"
        for name, milliseconds in sorted(self.groups().items(), key=lambda entry: -entry[1]):
            yield f"| {name} | {milliseconds:.3f} | {milliseconds / total:.1%} |"
        yield "\n      ms  group                    kernel"
        for name, milliseconds in sorted(self.found.kernels.items(), key=lambda entry: -entry[1])[:most]:
            yield f"{milliseconds:8.3f}  {group_of(name):23}  {name[:90]}"

    def facts(self) -> dict[str, Any]:
        """For a file."""
        case = {name: value for name, value in asdict(self.case).items() if name != "device"}
        rounds = {name: [asdict(one) for one in all_of] for name, all_of in self.found.rounds.items()}
        facts: dict[str, Any] = {
            **case, "rounds": rounds, "warming": self.found.warming, "flops_per_target": self.flops,
            "reports": self.found.reports, "failed": self.found.failed,
        }  # fmt: skip
        if OURS in rounds:
            by_flops, by_bytes = self.bounds
            facts |= {
                "update_ms": self.update, "bound_ms": {"flops": by_flops, "bytes": by_bytes}, "bytes": self.bytes,
                "busy_ms": self.found.busy, "groups_ms": self.groups(), "kernels_ms": self.found.kernels,
            }  # fmt: skip
        return facts


if __name__ == "__main__":
    main()
