"""The training itself: updates, validations and checkpoints, until it is over or asked to stop.

`Training.run` is the page to read. What a run has done so far is `Marks` and tensors, and a checkpoint is just these: a
run that was killed goes on from the last one and comes to the same bits. What is learned, and how it is judged, is
handed in (`task`).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from attent.data.loader import LoaderPosition
from attent.models import Model, build_empty, folder, weights
from attent.scoring.metrics import METRICS
from attent.text.tokenizer import Tokenizer
from attent.training import checkpoint, rng
from attent.training.checkpoint import Checkpoint
from attent.training.config import TrainConfig, TrainError
from attent.training.cuda_graph import WARMUP_STEPS, Capture, StepGraphCache, make_cuda_capture
from attent.training.distributed import DistributedContext, distribute_like, to_full_tensor
from attent.training.events import Ended, EventHandler, Note, Progress, Saved, Started, Validated
from attent.training.hardware import describe_device, persist_compile_cache
from attent.training.micro_batch import MicroBatch, assign_to_rank, split_batch
from attent.training.objective import Seq2SeqObjective
from attent.training.optimizer import CombinedOptimizer, clip_gradients, compute_grad_norm
from attent.training.schedule import compute_lr
from attent.training.tasks.base import (
    BatchLoader,
    EvalResult,
    Evaluator,
    ObjectiveFactory,
    TrainBatch,
)

REPORT_INTERVAL = 0.5  # seconds between two events of progress; reading numbers makes a GPU wait
MAX_NONFINITE_STEPS = 10  # updates in a row whose gradient is not finite, after which the run goes back to a checkpoint
MAX_ROLLBACKS = 3
ROLLBACK_LR_FACTOR = 0.5  # of the learning rate after a setback

StopReason = Literal["steps", "patience", "stopped"]


class StopRequested(Exception):
    """Someone asked to stop in the middle of something that is done again when the run goes on."""


@dataclass(kw_only=True)
class TrainState:
    """How far a run has come: all of it that is no tensor."""

    step: int = 0
    epoch: int = 0
    batch_index: int = 0  # the next batch of the epoch
    order_digest: str = ""  # a digest of all pairs so far, in their order
    tokens: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    best_loss: float | None = None
    lowest_loss: float | None = None  # loss of any validation
    best_step: int = 0
    validations_since_best: int = 0  # validations since the best
    validations_without_progress: int = 0  # validations since it last got better in any way
    last_validated_step: int = 0  # the last step that was validated
    skipped_steps: int = 0  # updates without effect, since their gradient was not finite
    rollbacks: int = 0
    micro_batch_tokens: int | None = None


@dataclass
class StepMetrics:
    """Sums since the last report; they stay on the device until then, in the same tensors, which recordings add to."""

    device: torch.device
    clock_start: float = field(default_factory=time.monotonic)
    steps: int = 0
    tokens: int = 0  # these two since the clock was set
    num_targets: int = 0
    local_targets: float = 0.0  # of the pieces that this process has met
    sums: Tensor = field(init=False)  # loss, cross-entropy, norm
    nonfinite: Tensor = field(init=False)  # updates without effect: in a row, in all
    reported_nonfinite: int = 0  # of all

    def __post_init__(self) -> None:
        exact = torch.float64 if self.device.type != "mps" else torch.float32
        self.sums = torch.zeros(3, dtype=exact, device=self.device)
        self.nonfinite = torch.zeros(2, device=self.device)

    def add_loss(self, loss: Tensor, cross_entropy: Tensor) -> None:
        self.sums[:2] += torch.stack([loss.detach(), cross_entropy.detach()])

    def snapshot(self) -> tuple[Tensor, float]:
        return self.sums.clone(), self.local_targets

    def restore(self, snapshot: tuple[Tensor, float]) -> None:
        self.sums.copy_(snapshot[0])
        self.local_targets = snapshot[1]

    def record_step(self, grad_norm: Tensor, found_inf: Tensor) -> None:
        self.sums[2] += grad_norm.nan_to_num(0.0, 0.0, 0.0)
        self.nonfinite.copy_(torch.stack([(self.nonfinite[0] + 1) * found_inf, self.nonfinite[1] + found_inf]))

    def count_batches(self, batches: list[TrainBatch]) -> None:
        self.steps += 1
        self.tokens += sum(batch.num_tokens for batch in batches)
        self.num_targets += sum(batch.num_targets for batch in batches)

    def reset_clock(self) -> None:
        """Speed is measured from here on."""
        self.clock_start, self.tokens, self.num_targets = time.monotonic(), 0, 0

    def take_sums(self) -> Tensor:
        """The sums, on the host as soon as the device has come so far; from here on they begin anew."""
        numbers = torch.empty(3, dtype=self.sums.dtype, pin_memory=self.device.type == "cuda")
        numbers.copy_(self.sums, non_blocking=True)
        self.sums.zero_()
        self.steps, self.local_targets = 0, 0.0
        self.reset_clock()
        return numbers


@dataclass(frozen=True)
class PendingReport:
    """What will be told of the updates up to now, once their sums are here."""

    sums: Tensor
    copy_event: torch.cuda.Event | None
    steps: int
    num_targets: float
    progress: Progress  # but for the sums

    def is_ready(self) -> bool:
        return self.copy_event is None or self.copy_event.query()


class Trainer:
    """One run of the loop, in one of the processes of a team."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        config: TrainConfig,
        train_batches: BatchLoader,
        valid_batches: BatchLoader | None,
        evaluator: Evaluator | None,
        out: Path,
        distributed: DistributedContext,
        emit: EventHandler,
        should_stop: Callable[[], bool] = lambda: False,
        fingerprints: Mapping[str, str] | None = None,
        make_objective: ObjectiveFactory = Seq2SeqObjective,
    ) -> None:
        self.config, self.train_batches, self.valid_batches, self.evaluator = (
            config,
            train_batches,
            valid_batches,
            evaluator,
        )
        self.tokenizer, self.out, self.distributed, self.emit, self.should_stop = (
            tokenizer,
            out,
            distributed,
            emit,
            should_stop,
        )
        self.fingerprints = dict(fingerprints or {})  # what a checkpoint must have been made with
        self.state = TrainState(micro_batch_tokens=config.micro_batch_tokens)
        self.model = model.to(distributed.device).train()
        self.compiled = bool(config.compile)
        if self.compiled:
            persist_compile_cache()
        self.make_objective = make_objective
        self.objective = make_objective(
            self.model, smoothing=config.label_smoothing, rdrop=config.rdrop or 0.0, compile=self.compiled
        )
        self.wrapped_objective = distributed.wrap_module(self.objective, config.shard)
        self.parameters = dict(self.model.named_parameters())
        self.trainable_parameters = {
            name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad
        }
        self.optimizer = CombinedOptimizer(self.trainable_parameters, config)
        self.ema = {name: p.detach().clone() for name, p in self.trainable_parameters.items()} if config.ema else {}
        self.metrics = StepMetrics(distributed.device)
        self.pending_report: PendingReport | None = None
        self.step_graphs: StepGraphCache | None = None
        self.loss_factor = torch.zeros((), device=distributed.device)  # of the loss, in a recorded update
        if self.compiled and distributed.device.type == "cuda":
            self.enable_cuda_graphs(make_cuda_capture(distributed.device))
        self.start_step, self.last_clock = 0, time.monotonic()
        self.pace_start = (time.monotonic(), 0)  # since when, and since which update, the time that is left is judged
        self.compile_start: float | None = None  # since when
        self.last_saved = (
            -1,
            0,
        )  # of the checkpoint that was saved or filled in last: its step, and the last validated

    # ---- the page ----------------------------------------------------------------------------------------------------

    def run(self) -> Ended:
        """Update after update, from wherever the run stands."""
        self.last_clock = time.monotonic()
        self.start_step = self.state.step
        self.pace_start = (self.last_clock, self.start_step)
        self.emit(self.build_started_event())
        if self.compiled and not self.get_stop_reason():
            self.compile_start = time.monotonic()
            self.emit(
                Note(text="compiling: once for each model and machine, kept for the next start", step=self.start_step)
            )
        try:
            self.run_scheduled_work()
            while not (reason := self.get_stop_reason()):
                with closing(self.iter_steps()) as updates:
                    for batches, after in updates:
                        if self.is_stop_requested():
                            raise StopRequested
                        self.train_step(batches, after)
                        if self.is_diverging():
                            self.rollback()
                            break
                        self.run_scheduled_work()
                        if reason := self.get_stop_reason():
                            break
        except StopRequested:
            reason = "stopped"
            self.emit(Note(text="saving, then leaving (Ctrl-C again: leave at once)", step=self.state.step))
        self.report_progress(force=True)
        self.save_checkpoint()
        ended = Ended(step=self.state.step, reason=reason, seconds=self.update_clock())
        self.emit(ended)
        return ended

    def run_scheduled_work(self) -> None:
        """After an update, and again when a run goes on behind one: what is due."""
        step, config = self.state.step, self.config
        assert config.valid_every
        assert config.save_every
        last = step == config.steps
        due = step > 0 and (step % config.valid_every == 0 or last) and self.state.last_validated_step < step
        if due and self.valid_batches is not None:
            self.validate()
        if (
            step > self.start_step and step % config.save_every == 0 and not self.metrics.nonfinite[0]
        ):  # else nothing new, or worse
            self.save_checkpoint()

    def get_stop_reason(self) -> StopReason | None:
        assert self.config.steps
        if self.state.step >= self.config.steps:
            return "steps"
        return (
            "patience"
            if self.config.patience and self.state.validations_without_progress >= self.config.patience
            else None
        )

    def iter_steps(self) -> Generator[tuple[list[TrainBatch], LoaderPosition], None, None]:
        """The batches of each update, and where the next one begins."""
        start = LoaderPosition(self.state.epoch, self.state.batch_index)
        pin = self.distributed.device.type == "cuda"
        group: list[TrainBatch] = []
        with closing(self.train_batches.iter_batches(start, workers=self.config.workers, pin_memory=pin)) as walk:  # type: ignore[type-var]
            for (epoch, step), batch in walk:
                group.append(batch)
                if len(group) == self.config.accumulate:
                    after = (
                        LoaderPosition(epoch, step + 1)
                        if step + 1 < self.train_batches.num_steps(epoch)
                        else LoaderPosition(epoch + 1, 0)
                    )
                    yield group, after
                    group = []

    def train_step(self, batches: list[TrainBatch], next_position: LoaderPosition) -> None:
        """One update."""
        units = sum(batch.num_targets for batch in batches)
        if not self.replay_step(batches, units):
            self.accumulate_gradients(batches, units)
            self.optimizer.set_lr(self.get_lr(self.state.step + 1))
            self.optimizer_step()
        self.state.step += 1
        self.update_ema()
        self.state.epoch, self.state.batch_index = next_position
        self.record_batches(batches)
        self.metrics.count_batches(batches)
        self.finish_warmup()
        self.report_progress()

    def optimizer_step(self) -> None:
        """Where none is asked for, the host waits for nothing here, so that it can be recorded."""
        norm = compute_grad_norm(self.trainable_parameters.values())
        found_inf = (~norm.isfinite()).float()
        if self.config.clip_norm:
            clip_gradients(self.trainable_parameters.values(), norm, self.config.clip_norm)
        self.optimizer.update_weights(found_inf)
        self.optimizer.zero_grad()
        self.metrics.record_step(norm, found_inf)

    # ---- one update --------------------------------------------------------------------------------------------------

    def accumulate_gradients(self, batches: list[TrainBatch], units: int) -> None:
        """Of the mean loss over all units of these batches. Out of memory, it begins anew in smaller pieces."""
        while True:
            mark = self.metrics.snapshot()
            try:
                for number, batch in enumerate(batches):
                    pieces = split_batch(batch, self.state.micro_batch_tokens, self.distributed.world_size)
                    for piece in (
                        mine := list(assign_to_rank(pieces, self.distributed.rank, self.distributed.world_size))
                    ):
                        last = number == len(batches) - 1 and piece is mine[-1]
                        self.backward_micro_batch(batch, piece, number, units, last)
                return
            except torch.OutOfMemoryError:
                had_more = self.step_graphs is not None and self.step_graphs.clear()
                smaller = self.state.micro_batch_tokens if had_more else self.halve_micro_batch(batches)
            self.optimizer.zero_grad()  # here, where the failed pass no longer holds its memory
            self.metrics.restore(mark)
            if self.distributed.device.type == "cuda":
                torch.cuda.empty_cache()
            self.state.micro_batch_tokens = smaller

    def backward_micro_batch(
        self, batch: TrainBatch, micro_batch: MicroBatch, batch_number: int, units: int, is_last: bool
    ) -> None:
        if self.distributed.world_size == 1 and self.should_stop():
            self.optimizer.zero_grad()
            raise StopRequested
        part = micro_batch.select_rows(batch).to(self.distributed.device, non_blocking=True)
        rng.seed_torch(self.config.seed, self.state.step, batch_number, micro_batch.start)
        with self.distributed.no_sync(self.wrapped_objective, is_last), self.autocast():
            loss, entropy = self.wrapped_objective(part)
            # Behind the backward pass stands the mean over the processes, where the sum is wanted.
            (loss * (micro_batch.weight * self.distributed.world_size / units)).backward()
        self.metrics.add_loss(loss * micro_batch.weight, entropy * micro_batch.weight)
        self.metrics.local_targets += part.num_targets * micro_batch.weight

    def halve_micro_batch(self, batches: list[TrainBatch]) -> int:
        """Half as many tokens at once as just now."""
        largest, widest = max(batch.num_padded_tokens for batch in batches), max(batch.row_length for batch in batches)
        now = min(self.state.micro_batch_tokens or largest, largest)
        half = max(widest, now // 2)
        if (
            self.distributed.world_size > 1 and now > widest
        ):  # the others know nothing of it, and would wait for gradients
            raise TrainError(
                f"process {self.distributed.rank} is out of memory with {now:,} tokens at once; run the same command again "
                f"with --micro-batch-tokens {half}, and it goes on from the last checkpoint"
            )
        if now <= widest:
            raise TrainError(
                f"the memory of {self.distributed.device} does not hold even {now:,} tokens at once; take a smaller --size, "
                "fewer tokens (--max-tokens), or --lora, or spread the model over several GPUs (--shard)"
            )
        self.warn(f"out of memory with {now:,} tokens at once: going on with {half:,}; the update is the same")
        return half

    # ---- recorded updates --------------------------------------------------------------------------------------------

    def enable_cuda_graphs(self, capture: Capture) -> None:
        """From now on updates are repeated from recordings, where they can be."""
        alone = self.distributed.world_size == 1 and self.config.accumulate == 1
        if alone and self.optimizer.is_capturable():
            self.optimizer.use_lr_tensor()
            self.step_graphs = StepGraphCache(self.run_whole_step, self.distributed.device, capture)

    def run_whole_step(self, batch: TrainBatch) -> None:
        """What a recording holds: the same as one piece of one batch that runs as usual."""
        with self.autocast():
            loss, entropy = self.wrapped_objective(batch)
            (loss * self.loss_factor).backward()
        self.metrics.add_loss(loss, entropy)
        self.optimizer_step()

    def replay_step(self, batches: list[TrainBatch], units: int) -> bool:
        """The update from a recording, if there is one for it."""
        recorder, batch = self.step_graphs, batches[0]
        if recorder is None or len(split_batch(batch, self.state.micro_batch_tokens, self.distributed.world_size)) > 1:
            return False
        recording = recorder.get_or_capture(batch)
        if recording is None:
            if recorder.failure:
                self.disable_cuda_graphs(recorder.failure)
            return False
        rng.seed_torch(self.config.seed, self.state.step, 0, 0)
        self.optimizer.set_lr(self.get_lr(self.state.step + 1))
        self.loss_factor.fill_(1 / units)
        recorder.replay(recording, batch, self.metrics.nonfinite)
        self.metrics.local_targets += batch.num_targets
        return True

    def disable_cuda_graphs(self, reason: str) -> None:
        self.optimizer.zero_grad()  # what is left of the attempt
        self.step_graphs = None
        self.warn(f"updates cannot be recorded as a CUDA graph, so each is launched by itself ({reason})")

    def finish_warmup(self) -> None:
        """The first updates compile and record: they tell nothing of the speed of the others."""
        done = self.state.step - self.start_step
        if not self.compiled or done > WARMUP_STEPS + 1:
            return
        if self.compile_start is not None:
            seconds, self.compile_start = time.monotonic() - self.compile_start, None
            self.emit(Note(text=f"compiled in {seconds:.0f} s", step=self.state.step))
        self.metrics.reset_clock()
        self.pace_start = (time.monotonic(), self.state.step)

    def get_lr(self, step: int) -> float:
        config = self.config
        assert config.lr is not None
        assert config.warmup is not None
        assert config.steps is not None
        whole = compute_lr(
            step, schedule=config.schedule, peak_lr=config.lr, warmup=config.warmup, total_steps=config.steps
        )
        return whole * ROLLBACK_LR_FACTOR**self.state.rollbacks

    def autocast(self) -> AbstractContextManager[object]:
        if self.config.precision == "bfloat16":
            return torch.autocast(self.distributed.device.type, torch.bfloat16)
        return nullcontext()

    @torch.no_grad()
    def update_ema(self) -> None:
        """The running mean of the weights; at first it follows faster, so that it forgets the random start."""
        if self.ema:
            decay = min(self.config.ema, (1 + self.state.step) / (10 + self.state.step))
            torch._foreach_lerp_(
                list(self.ema.values()), [p.detach() for p in self.trainable_parameters.values()], 1 - decay
            )

    def record_batches(self, batches: list[TrainBatch]) -> None:
        for batch in batches:
            digest = hashlib.sha256(self.state.order_digest.encode() + batch.example_ids.astype("<i8").tobytes())
            self.state.order_digest = digest.hexdigest()
            self.state.tokens += batch.num_tokens

    def is_stop_requested(self) -> bool:
        return self.distributed.any_rank(self.should_stop())

    # ---- telling -----------------------------------------------------------------------------------------------------

    def build_started_event(self) -> Started:
        assert self.config.steps
        assert self.config.precision
        return Started(
            step=self.state.step,
            steps=self.config.steps,
            steps_per_epoch=self.train_batches.num_steps(self.state.epoch) / self.config.accumulate,
            parameters=sum(parameter.numel() for parameter in self.parameters.values()),
            trainable_parameters=sum(parameter.numel() for parameter in self.trainable_parameters.values()),
            device=describe_device(self.distributed.device, self.config.precision, self.compiled)
            + (f", {self.distributed.world_size} processes" if self.distributed.world_size > 1 else ""),
        )

    def update_clock(self) -> float:
        """Seconds of training so far; called whenever marks are told or kept."""
        now = time.monotonic()
        self.state.seconds += now - self.last_clock
        self.last_clock = now
        return self.state.seconds

    def report_progress(self, force: bool = False) -> None:
        """Told at once, or where the GPU has updates before it, when it has come so far: it is never made to wait."""
        wait = force or self.step_graphs is None
        self.emit_pending_report(wait)
        first = self.state.step == self.start_step + 1 and not self.compiled
        due = force or first or time.monotonic() - self.metrics.clock_start >= REPORT_INTERVAL
        if self.metrics.steps and self.distributed.any_rank(due):
            self.emit_pending_report(wait=True)
            self.pending_report = self.read_metrics(force)
            self.emit_pending_report(wait)

    def read_metrics(self, force: bool) -> PendingReport:
        meter, flight = self.metrics, self.step_graphs.in_flight if self.step_graphs else None
        if flight is not None and force:
            flight.synchronize()
        pace = flight.take_throughput() if flight is not None else None
        seconds, elapsed = self.update_clock(), max(1e-9, time.monotonic() - meter.clock_start)
        if not meter.tokens:  # all of these updates have compiled
            elapsed = math.nan
        per_update = (time.monotonic() - self.pace_start[0]) / max(1, self.state.step - self.pace_start[1])
        assert self.config.steps
        progress = Progress(
            step=self.state.step,
            epoch=self.state.epoch + self.state.batch_index / max(1, self.train_batches.num_steps(self.state.epoch)),
            loss=0.0,
            perplexity=0.0,
            lr=self.get_lr(self.state.step),
            grad_norm=0.0,
            tokens_per_second=pace.tokens_per_second if pace else meter.tokens / elapsed,
            targets_per_second=pace.targets_per_second if pace else meter.num_targets / elapsed,
            gpu_busy=pace.busy_fraction if pace else None,
            seconds=seconds,
            seconds_left=per_update * (self.config.steps - self.state.step),
        )
        updates, targets, sums = meter.steps, meter.local_targets, meter.take_sums()
        here = None
        if sums.is_pinned():
            here = torch.cuda.Event()
            here.record()
        return PendingReport(sums, here, updates, targets, progress)

    def emit_pending_report(self, wait: bool) -> None:
        """What was read, as soon as it is here."""
        reading = self.pending_report
        if reading is None or not (wait or reading.is_ready()):
            return
        if reading.copy_event is not None:
            reading.copy_event.synchronize()
        self.pending_report = None
        numbers = torch.cat([reading.sums, torch.tensor([reading.num_targets], dtype=reading.sums.dtype)])
        loss, entropy, norm, targets = self.distributed.all_reduce_sum(numbers).tolist()
        self.emit(
            replace(
                reading.progress,
                loss=loss / max(1.0, targets),
                perplexity=math.exp(min(entropy / max(1.0, targets), 50.0)) if math.isfinite(entropy) else math.inf,
                grad_norm=norm / self.distributed.world_size / reading.steps,
            )
        )

    # ---- gradients that are not finite -------------------------------------------------------------------------------

    def is_diverging(self) -> bool:
        """Whether too many updates in a row came to nothing. A GPU is asked seldom, since asking makes it wait, or it
        has told by itself."""
        flight = self.step_graphs.in_flight if self.step_graphs else None
        if flight is not None and flight.steps:
            in_a_row, in_all = (int(number) for number in flight.nonfinite)  # of a few updates ago
        elif self.distributed.device.type != "cpu" and self.state.step % MAX_NONFINITE_STEPS:
            return False
        else:
            in_a_row, in_all = (int(number) for number in self.metrics.nonfinite.tolist())
        if (new := in_all - self.metrics.reported_nonfinite) > 0:
            self.state.skipped_steps += new
            self.metrics.reported_nonfinite = in_all
            so_far = f"({self.state.skipped_steps:,} so far)"
            self.warn(f"update {self.state.step:,}: the gradient was not finite, so it was skipped {so_far}")
        return in_a_row >= MAX_NONFINITE_STEPS

    def rollback(self) -> None:
        """To the last checkpoint, with half the learning rate."""
        setbacks, at = self.state.rollbacks + 1, self.state.step
        found = checkpoint.load_newest(self.out / "state", self.warn) if setbacks <= MAX_ROLLBACKS else None
        if found is None:
            raise TrainError(
                f"the last {MAX_NONFINITE_STEPS} gradients up to update {at:,} are not finite: training diverges; "
                f"lower the learning rate (--lr, now {self.get_lr(at):g}), raise --warmup, or set --clip-norm 1"
            )
        self.load_checkpoint(found)
        self.state.rollbacks = setbacks
        self.metrics, self.pending_report = StepMetrics(self.distributed.device), None
        self.warn(
            f"{MAX_NONFINITE_STEPS} gradients in a row were not finite: back from update {at:,} to {self.state.step:,}, "
            f"with {ROLLBACK_LR_FACTOR:g} times the learning rate"
        )

    def warn(self, text: str) -> None:
        self.emit(Note(text=text, level="warning", step=self.state.step))

    # ---- validation --------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        self.report_progress(force=True)
        if self.step_graphs is not None:
            self.step_graphs.free_memory()
        self.state.last_validated_step = self.state.step  # set back if it is interrupted
        try:
            with self.use_ema_weights():
                event = self.evaluate(self.gather_model())
                if event.best:
                    self.export_model()
        except StopRequested:
            self.state.last_validated_step = 0
            raise
        self.emit(event)
        self.metrics.reset_clock()

    def evaluate(self, model: Model | None) -> Validated:
        """The validation of a model that the first process has; the others are told the outcome."""
        loss, scores = math.nan, None
        stopped = 0.0
        if model is not None and self.valid_batches is not None:
            try:
                loss, scores = self.compute_valid_loss(model), self.evaluator(model) if self.evaluator else None
            except StopRequested:
                stopped = 1.0
        found = scores.metrics if scores else {}
        numbers = [loss, *(found.get(name, math.nan) for name in METRICS), stopped]
        loss, *figures, stopped = self.distributed.broadcast(numbers)
        if stopped:
            raise StopRequested
        metrics = {name: value for name, value in zip(METRICS, figures, strict=True) if not math.isnan(value)}
        return self.update_best(loss, metrics, scores or EvalResult())

    def update_best(self, loss: float, metrics: Mapping[str, float], result: EvalResult) -> Validated:
        name = self.config.metric if self.evaluator else None
        metric = -loss if name in (None, "loss") else metrics.get(str(name), math.nan)
        best = math.isfinite(metric) and math.isfinite(loss) and self.is_better(metric, loss)
        if best:
            self.state.best_score, self.state.best_loss = metric, loss
            self.state.best_step, self.state.validations_since_best, self.state.validations_without_progress = (
                self.state.step,
                0,
                0,
            )
        elif self.is_still_learning(loss):
            self.state.validations_without_progress = 0
        elif not math.isnan(metric):
            self.state.validations_without_progress += 1
        self.state.validations_since_best += not best
        if math.isfinite(loss):
            self.state.lowest_loss = loss if self.state.lowest_loss is None else min(loss, self.state.lowest_loss)
        return Validated(
            step=self.state.step,
            epoch=self.state.epoch + self.state.batch_index / max(1, self.train_batches.num_steps(self.state.epoch)),
            loss=loss,
            metrics=metrics,
            best=best,
            validations_since_best=self.state.validations_since_best,
            seconds=self.update_clock(),
            samples=result.samples,
        )

    def is_better(self, score: float, loss: float) -> bool:
        """Than the best so far; of two with one score, as at the very beginning, the loss tells."""
        if self.state.best_score is None or self.state.best_loss is None:
            return True
        return (score, -loss) > (self.state.best_score, -self.state.best_loss)

    def is_still_learning(self, loss: float) -> bool:
        """Whether it is too early to lose patience: scores are coarse and jump about while the loss still falls."""
        assert self.config.warmup is not None
        return self.state.step <= self.config.warmup or self.state.lowest_loss is None or loss < self.state.lowest_loss

    @torch.no_grad()
    def compute_valid_loss(self, model: Model) -> float:
        """The cross-entropy per unit (target token, masked word, text) of the validation part."""
        assert self.valid_batches is not None
        objective, was_training = self.make_objective(model, smoothing=0.0), model.training
        objective.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        try:
            for step in range(self.valid_batches.num_steps(0)):
                if self.should_stop():
                    raise StopRequested
                batch = self.valid_batches.get_batch(0, step)
                with self.autocast():
                    _, entropy = objective(batch.to(self.distributed.device))
                sums += torch.tensor([float(entropy), float(batch.num_targets)], dtype=torch.float64)
        finally:
            model.train(was_training)
        return float(sums[0] / sums[1].clamp(min=1))

    @contextmanager
    def use_ema_weights(self) -> Iterator[None]:
        """With the running mean in place of the weights, if there is one."""
        self.swap_ema_weights()
        try:
            yield
        finally:
            self.swap_ema_weights()

    @torch.no_grad()
    def swap_ema_weights(self) -> None:
        """The numbers change places, not the tensors: of one that is spread over processes `.data` is only a shell."""
        for name, mean in self.ema.items():
            held = self.trainable_parameters[name].detach().clone()
            self.trainable_parameters[name].copy_(mean)
            mean.copy_(held)

    # ---- what is written ---------------------------------------------------------------------------------------------

    def gather_model(self) -> Model | None:
        """The model as a plain one, on the first process: whole, and with added matrices added in."""
        if self.distributed.world_size == 1 and not self.config.lora:
            return self.model
        like = build_empty(self.model.config)
        found: dict[str, Tensor] = {}
        for name in like.state_dict():
            path, _, leaf = name.rpartition(".")
            found[name] = to_full_tensor(getattr(self.model.get_submodule(path), leaf).detach())
        if not self.distributed.is_main:
            return None
        return weights.assign_weights(like, {name: tensor.clone() for name, tensor in found.items()}, "the model").to(
            self.distributed.device
        )

    def export_model(self) -> None:
        """The model folder gets the present weights."""
        model = self.gather_model()
        if model is not None and self.distributed.is_main:
            write_model(self.out, model, self.tokenizer)

    def save_checkpoint(self) -> None:
        """A checkpoint of this very moment; older ones go when it is complete."""
        began = time.monotonic()
        now = (self.state.step, self.state.last_validated_step)
        if now != self.last_saved:  # by its name alone it could be one that is damaged
            kept = self.build_checkpoint()
            if self.distributed.is_main:
                place = checkpoint.save_checkpoint(self.out / "state", kept)
                self.prune_checkpoints()
                self.emit(Saved(step=self.state.step, folder=str(place), seconds=time.monotonic() - began))
        self.last_saved = now
        if self.valid_batches is None:
            self.export_model()
        self.distributed.barrier()  # whoever looks for it now must find it

    def list_checkpoints(self) -> list[int]:
        return checkpoint.list_steps(self.out / "state")

    def prune_checkpoints(self) -> None:
        """The last regular ones stay, and the newest: those of an interruption go when another comes."""
        every = self.config.save_every
        assert every
        regular = [step for step in self.list_checkpoints() if step % every == 0]
        most = max(self.config.keep_last, self.config.average)
        checkpoint.prune_checkpoints(self.out / "state", {*regular[-most:], self.state.step})

    def build_checkpoint(self) -> Checkpoint:
        self.update_clock()
        tensors = {
            "weights": {name: to_full_tensor(parameter.detach()) for name, parameter in self.parameters.items()},
            "optimizer": {name: to_full_tensor(tensor) for name, tensor in self.optimizer.get_state().items()},
            "rng": rng.get_rng_state(),
        }
        if self.ema:
            tensors["ema"] = {name: to_full_tensor(tensor) for name, tensor in self.ema.items()}
        return Checkpoint(step=self.state.step, state={**asdict(self.state), "run": self.fingerprints}, tensors=tensors)

    def load_checkpoint(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, whatever number of processes has written it."""
        facts = dict(saved.state)
        written_with = facts.pop("run", {})
        for name, value in self.fingerprints.items():
            if written_with.get(name) != value:
                what = f"other {name}" if name in ("data", "labels") else f"another {name}"
                raise TrainError(
                    f"{self.out}: its checkpoints were made with {what}; give the {name} of then, or another --out "
                    "for a new run"
                )
        self.load_weights(saved.tensors["weights"])
        self.optimizer.load_state(saved.tensors["optimizer"])
        if self.step_graphs is not None:
            self.step_graphs.clear()  # its updates would go on with the tensors of before
        for name, mean in saved.tensors.get("ema", {}).items():
            if name in self.ema:
                copy_into(self.ema[name], mean)
        rng.set_rng_state(saved.tensors["rng"])
        self.state = replace(TrainState(), **facts)
        sizes = [size for size in (self.state.micro_batch_tokens, self.config.micro_batch_tokens) if size is not None]
        self.state.micro_batch_tokens = min(sizes, default=None)  # what memory had room for, or what is asked for now
        self.start_step = self.state.step
        self.last_clock = time.monotonic()
        self.pace_start = (self.last_clock, self.start_step)
        self.last_saved = (self.state.step, self.state.last_validated_step)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        folder.check_tensors({name: p.shape for name, p in self.parameters.items()}, weights, self.out / "state")
        for name, parameter in self.parameters.items():
            copy_into(parameter, weights[name])


@torch.no_grad()
def copy_into(target: Tensor, value: Tensor) -> None:
    """Numbers into a tensor that may be spread over several processes."""
    target.copy_(distribute_like(value, target))


def write_model(out: Path, model: nn.Module, tokenizer: Tokenizer | None) -> None:
    """Config, weights and tokenizer, if there is one, as one model folder."""
    weights.save_model(model, out, tokenizer.files if tokenizer else None)
