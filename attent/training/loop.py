"""The training loop: steps, validations and checkpoints until the run ends or is stopped.

Start reading at `Trainer.run`. A checkpoint holds `TrainState` and tensors, and resuming from it gives the same
bits as training without interruption. Batches, objective and evaluator come from the task.
"""

import copy
import hashlib
import math
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from attent.data.loader import LoaderPosition
from attent.formatting import format_count
from attent.models import Model, build_empty, folder, weights
from attent.models.weights import ADAPTER_FOLDER, write_adapter
from attent.nn.lora import split_parameters
from attent.scoring.metrics import METRICS
from attent.text.tokenizer import Tokenizer
from attent.training import checkpoint
from attent.training.checkpoint import STATE_FOLDER, Checkpoint
from attent.training.config import TrainConfig, TrainError
from attent.training.distributed import DistributedContext, distribute_like, to_full_tensor
from attent.training.events import Ended, EventHandler, Note, Progress, Saved, Started, StopRequested, Validated
from attent.training.hardware import describe_device, persist_compile_cache
from attent.training.optimizer import AdamOptimizer, compute_grad_norm, compute_lr
from attent.training.state import (
    MicroBatch,
    Pauses,
    PendingReport,
    StepMetrics,
    TrainState,
    assign_to_rank,
    seed_torch,
    split_batch,
)
from attent.training.step_graphs import EAGER_STEPS, Capture, StepGraphCache, make_cuda_capture
from attent.training.tasks.base import BatchLoader, EvalResult, Evaluator, ObjectiveFactory, TrainBatch

REPORT_INTERVAL = 0.5  # seconds between progress events; reading the sums synchronizes a GPU
MAX_NONFINITE_STEPS = 10  # in a row, after which the run rolls back to a checkpoint
MAX_ROLLBACKS = 3
ROLLBACK_LR_FACTOR = 0.5  # of the learning rate, per rollback

StopReason = Literal["steps", "patience", "stopped"]


class Trainer:
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
        *,
        make_objective: ObjectiveFactory,
        extra_files: Mapping[str, bytes] | None = None,
        base_model: str = "",
    ) -> None:
        self.extra_files = extra_files  # of the model folder
        self.base_model = base_model  # the name of the model that is fine-tuned
        self.config, self.tokenizer, self.out, self.state_dir = config, tokenizer, out, out / STATE_FOLDER
        self.train_batches, self.valid_batches, self.evaluator = train_batches, valid_batches, evaluator
        self.distributed, self.emit, self.should_stop = distributed, emit, should_stop
        self.fingerprints = dict(fingerprints or {})  # of data and tokenizer; a checkpoint must have the same
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
        self.trainable_parameters = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = AdamOptimizer(self.trainable_parameters, config)
        self.metrics = StepMetrics(distributed.device)
        self.pending_report: PendingReport | None = None
        self.step_graphs: StepGraphCache | None = None
        self.loss_factor = torch.zeros((), device=distributed.device)  # 1 / targets, read by captured steps
        if distributed.device.type == "cuda" and getattr(self.objective, "supports_cuda_graphs", True):
            self.enable_cuda_graphs(make_cuda_capture(distributed.device))
        self.start_clocks()
        self.compile_start: float | None = None
        self.last_saved = (-1, 0)  # step and last validated step of the newest checkpoint
        self.pending_save: Future[Saved] | None = None  # of the thread that writes a checkpoint
        self.save_seconds, self.save_end = 0.0, 0.0  # duration and end of the last one that was written
        self.has_validated = False  # in this process

    # ---- main loop ---------------------------------------------------------------------------------------------------

    def run(self) -> Ended:
        """Train from the current state until the last step, until patience runs out, or until a stop is requested."""
        self.emit_start()
        try:
            reason = self.train_until_stopped()
            self.report_progress(force=True)
            self.save_checkpoint()
        finally:  # nothing writes to the folder after this call
            self.finish_save()
        ended = Ended(step=self.state.step, reason=reason, seconds=self.update_clock())
        self.emit(ended)
        return ended

    def train_until_stopped(self) -> StopReason:
        try:
            self.run_scheduled_work()
            while not (reason := self.get_stop_reason()):
                with closing(self.iter_steps()) as steps:
                    for batches, next_position in steps:
                        if self.distributed.is_true_on_any_rank(self.should_stop()):
                            raise StopRequested
                        self.train_step(batches, next_position)
                        if self.check_divergence():
                            self.rollback()
                            break
                        self.run_scheduled_work()
                        if reason := self.get_stop_reason():
                            break
        except StopRequested:
            reason = "stopped"
            self.emit(Note(text="stopping after a checkpoint (Ctrl-C again: stop at once)", step=self.state.step))
        return reason

    def train_step(self, batches: list[TrainBatch], next_position: LoaderPosition) -> None:
        """Forward, backward and optimizer step on `accumulate` batches."""
        targets = sum(batch.num_targets for batch in batches)
        if not self.replay_step(batches, targets):
            self.accumulate_gradients(batches, targets)
            self.optimizer.set_lr(self.get_lr(self.state.step + 1))
            self.optimizer_step()
        self.state.step += 1
        self.state.epoch, self.state.batch_index = next_position
        for batch in batches:
            ids = batch.example_ids.astype("<i8").tobytes()
            self.state.order_digest = hashlib.sha256(self.state.order_digest.encode() + ids).hexdigest()
            self.state.tokens += batch.num_tokens
        self.metrics.count_batches(batches)
        self.restart_clocks_while_compiling()
        self.report_progress()

    def optimizer_step(self) -> None:
        """Clip and update without a host synchronization, so that it can be captured."""
        grad_norm = compute_grad_norm(self.trainable_parameters.values())
        found_inf = (~grad_norm.isfinite()).float()
        if self.config.clip_norm:
            parameters = self.trainable_parameters.values()
            nn.utils.clip_grads_with_norm_(parameters, self.config.clip_norm, grad_norm)
        self.optimizer.update_weights(found_inf)
        self.optimizer.zero_grad()
        self.metrics.record_step(grad_norm, found_inf)

    def run_scheduled_work(self) -> None:
        """Validate and save if this step is due; also called when a run resumes at such a step."""
        step, config = self.state.step, self.config
        self.finish_save(wait=False)
        assert config.valid_every
        assert config.save_every
        is_scheduled = step % config.valid_every == 0 and step >= self.state.next_validation
        is_due = step > 0 and (is_scheduled or step == config.steps)
        is_best = False
        if is_due and self.state.last_validated_step < step and self.valid_batches is not None:
            is_best = self.validate()
        # Nothing new to save right after resuming, and no checkpoint while gradients are not finite.
        is_due = step > self.start_step and step % config.save_every == 0 and (is_best or self.has_time_to_save())
        if is_due and not self.metrics.nonfinite_counts[0]:
            self.save_checkpoint()
        if is_best:
            start = time.monotonic()
            self.finish_save()  # a killed run must not resume before the step of the exported model
            self.export_model()
            self.pauses.add(time.monotonic() - start)
            self.metrics.reset_clock()

    def has_time_to_save(self) -> bool:
        """True if checkpoints take at most `save_share` of the time, for the last ones, or for several processes."""
        config, share = self.config, self.config.save_share
        assert config.steps
        assert config.save_every
        is_averaged = self.state.step > config.steps - config.average * config.save_every
        if not share or is_averaged or self.distributed.world_size > 1:
            return True
        return self.pending_save is None and time.monotonic() - self.save_end >= self.save_seconds * (1 / share - 1)

    def get_stop_reason(self) -> StopReason | None:
        assert self.config.steps
        if self.state.step >= self.config.steps:
            return "steps"
        patience = self.config.patience
        return "patience" if patience and self.state.validations_without_progress >= patience else None

    def measure_step_seconds(self, seconds: float, min_steps: int = 2) -> float:
        """Return the mean time of real steps after the first, which compile; all are undone and not reported."""
        warm_up = EAGER_STEPS + 2 if self.has_slow_start else 1
        saved, emit = copy.deepcopy(self.build_checkpoint()), self.emit
        self.emit = lambda event: None
        try:
            with closing(self.iter_steps()) as steps:
                for number, (batches, next_position) in enumerate(steps):
                    if number == warm_up:
                        self.synchronize()
                        start = time.monotonic()
                    done = number - warm_up
                    if done >= min_steps and not self.distributed.is_true_on_any_rank(
                        time.monotonic() - start < seconds
                    ):
                        break
                    self.train_step(batches, next_position)
            self.synchronize()
            step_seconds = (time.monotonic() - start) / done
        finally:
            self.emit = emit
            self.metrics, self.pending_report = StepMetrics(self.distributed.device), None
            self.load_checkpoint(saved)
            self.last_saved = (-1, 0)
            if self.step_graphs is not None:  # eager steps come first again: they create the optimizer's state
                self.step_graphs.signature_counts.clear()
        return self.distributed.broadcast([step_seconds])[0]

    def synchronize(self) -> None:
        if self.distributed.device.type == "cuda":
            torch.cuda.synchronize(self.distributed.device)

    def emit_start(self) -> None:
        self.start_clocks()
        self.reset_peak_memory()
        assert self.config.steps
        assert self.config.precision
        device = describe_device(self.distributed.device, self.config.precision, self.compiled)
        world_size = self.distributed.world_size
        self.emit(
            Started(
                step=self.state.step,
                steps=self.config.steps,
                steps_per_epoch=self.train_batches.num_batches(self.state.epoch) / self.config.accumulate,
                parameters=sum(parameter.numel() for parameter in self.parameters.values()),
                trainable_parameters=sum(parameter.numel() for parameter in self.trainable_parameters.values()),
                device=f"{device}, {world_size} processes" if world_size > 1 else device,
            )
        )
        if self.has_slow_start and not self.get_stop_reason():
            self.compile_start = time.monotonic()
            self.emit(Note(text="compiling (cached for the next start)", step=self.start_step))

    def iter_steps(self) -> Generator[tuple[list[TrainBatch], LoaderPosition], None, None]:
        start = LoaderPosition(self.state.epoch, self.state.batch_index)
        pin = self.distributed.device.type == "cuda"
        loader, batches = self.train_batches, list[TrainBatch]()
        with closing(loader.iter_batches(start, workers=self.config.workers, pin_memory=pin)) as loaded:  # type: ignore[type-var]
            for (epoch, index), batch in loaded:
                batches.append(batch)
                if len(batches) == self.config.accumulate:
                    is_last = index + 1 >= loader.num_batches(epoch)
                    yield batches, LoaderPosition(epoch + 1, 0) if is_last else LoaderPosition(epoch, index + 1)
                    batches = []

    # ---- one step ----------------------------------------------------------------------------------------------------

    def accumulate_gradients(self, batches: list[TrainBatch], targets: int) -> None:
        """Compute the gradient of the mean loss over all targets; out of memory, retry with smaller micro-batches."""
        world_size = self.distributed.world_size
        while True:
            snapshot = self.metrics.snapshot()
            try:
                for number, batch in enumerate(batches):
                    micro_batches = split_batch(batch, self.state.micro_batch_tokens, world_size)
                    assigned = list(assign_to_rank(micro_batches, self.distributed.rank, world_size))
                    for micro_batch in assigned:
                        is_last = number == len(batches) - 1 and micro_batch is assigned[-1]
                        self.backward_micro_batch(batch, micro_batch, number, targets, is_last)
                return
            except torch.OutOfMemoryError:
                can_free = (self.step_graphs is not None and self.step_graphs.clear()) or self.pending_save is not None
                micro_batch_tokens = self.state.micro_batch_tokens if can_free else self.halve_micro_batch(batches)
            self.optimizer.zero_grad()  # after the handler, when the traceback no longer holds the activations
            self.finish_save()  # which frees its copy
            self.metrics.restore(snapshot)
            if self.distributed.device.type == "cuda":
                torch.cuda.empty_cache()
            self.state.micro_batch_tokens = micro_batch_tokens

    def backward_micro_batch(
        self, batch: TrainBatch, micro_batch: MicroBatch, batch_number: int, targets: int, is_last: bool
    ) -> None:
        if self.distributed.world_size == 1 and self.should_stop():
            self.optimizer.zero_grad()
            raise StopRequested
        rows = batch.slice_rows(micro_batch.start, micro_batch.stop).to(self.distributed.device, non_blocking=True)
        seed_torch(self.config.seed, self.state.step, batch_number, micro_batch.start)
        with self.distributed.sync_gradients(self.wrapped_objective, enabled=is_last), self.autocast():
            loss, cross_entropy = self.wrapped_objective(rows)
            # DDP averages the gradients over the ranks, but the sum is needed.
            (loss * (micro_batch.weight * self.distributed.world_size / targets)).backward()
        self.metrics.add_loss(loss * micro_batch.weight, cross_entropy * micro_batch.weight)
        self.metrics.local_targets += rows.num_targets * micro_batch.weight

    def halve_micro_batch(self, batches: list[TrainBatch]) -> int:
        """Return half of the current micro-batch size; raise if a single row does not fit."""
        largest = max(batch.num_padded_tokens for batch in batches)
        longest_row = max(batch.row_length for batch in batches)
        current = min(self.state.micro_batch_tokens or largest, largest)
        half = max(longest_row, current // 2)
        if self.distributed.world_size > 1 and current > longest_row:  # the other ranks would wait for gradients
            raise TrainError(
                f"rank {self.distributed.rank} is out of memory with micro-batches of {current:,} tokens; run the same "
                f"command again with --micro-batch-tokens {half} to resume from the last checkpoint"
            )
        if current <= longest_row:
            raise TrainError(
                f"the memory of {self.distributed.device} does not hold a micro-batch of {current:,} tokens; choose a "
                "smaller --size, a smaller --max-tokens, --lora, or shard the model over several GPUs (--shard)"
            )
        self.warn(f"out of memory with micro-batches of {current:,} tokens; retrying with {half:,} (same gradient)")
        return half

    def get_lr(self, step: int) -> float:
        config = self.config
        assert config.lr is not None
        assert config.warmup is not None
        assert config.steps is not None
        assert config.schedule is not None
        lr = compute_lr(
            step, schedule=config.schedule, peak_lr=config.lr, warmup=config.warmup, total_steps=config.steps
        )
        return lr * ROLLBACK_LR_FACTOR**self.state.rollbacks

    def autocast(self) -> AbstractContextManager[object]:
        if self.config.precision == "bfloat16":
            return torch.autocast(self.distributed.device.type, torch.bfloat16)
        return nullcontext()

    def enable_cuda_graphs(self, capture: Capture) -> None:
        if self.distributed.world_size == 1 and self.config.accumulate == 1:
            self.optimizer.use_lr_tensor()
            self.step_graphs = StepGraphCache(self.run_whole_step, self.distributed.device, capture)

    def run_whole_step(self, batch: TrainBatch) -> None:
        with self.autocast():
            loss, cross_entropy = self.wrapped_objective(batch)
            (loss * self.loss_factor).backward()
        self.metrics.add_loss(loss, cross_entropy)
        self.optimizer_step()

    def replay_step(self, batches: list[TrainBatch], targets: int) -> bool:
        """Run the step from a CUDA graph; False if there is none for batches of this shape."""
        graphs, batch = self.step_graphs, batches[0]
        if graphs is None or len(split_batch(batch, self.state.micro_batch_tokens, self.distributed.world_size)) > 1:
            return False
        graph = graphs.get_or_capture(batch)
        if graph is None:
            if graphs.failure:
                self.optimizer.zero_grad()  # gradients of the failed capture
                self.step_graphs = None
                self.warn(f"CUDA graph capture failed, so kernels are launched one by one ({graphs.failure})")
            return False
        seed_torch(self.config.seed, self.state.step, 0, 0)
        self.optimizer.set_lr(self.get_lr(self.state.step + 1))
        self.loss_factor.fill_(1 / targets)
        graphs.replay(graph, batch, self.state.step + 1, self.metrics.nonfinite_counts)
        self.metrics.local_targets += batch.num_targets
        return True

    @property
    def has_slow_start(self) -> bool:
        return self.compiled or self.step_graphs is not None

    def restart_clocks_while_compiling(self) -> None:
        """Restart the clocks during the first steps, which compile and capture."""
        if not self.has_slow_start or self.state.step - self.start_step > EAGER_STEPS + 1:
            return
        if self.compile_start is not None:
            seconds, self.compile_start = time.monotonic() - self.compile_start, None
            self.emit(Note(text=f"compiled in {seconds:.0f} s", step=self.state.step))
        self.metrics.reset_clock()
        self.eta_start, self.pauses = (time.monotonic(), self.state.step), Pauses()

    # ---- events ------------------------------------------------------------------------------------------------------

    def start_clocks(self) -> None:
        self.start_step, self.last_clock = self.state.step, time.monotonic()
        self.eta_start = (self.last_clock, self.start_step)  # from which the time left is extrapolated
        self.pauses = Pauses()  # since then
        self.checked_step = self.start_step  # the last step whose gradient is known to be finite or reported

    def reset_peak_memory(self) -> None:
        if self.distributed.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.distributed.device)

    def update_clock(self) -> float:
        now = time.monotonic()
        self.state.seconds += now - self.last_clock
        self.last_clock = now
        return self.state.seconds

    def get_epoch(self) -> float:
        return self.state.epoch + self.state.batch_index / max(1, self.train_batches.num_batches(self.state.epoch))

    def report_progress(self, force: bool = False) -> None:
        """Emit a progress event if one is due. With graphs in flight, emit it when the sums arrive, without a wait."""
        wait = force or self.step_graphs is None
        self.emit_pending_report(wait)
        is_first = self.state.step == self.start_step + 1 and not self.has_slow_start
        is_due = force or is_first or time.monotonic() - self.metrics.clock_start >= REPORT_INTERVAL
        if self.metrics.steps and self.distributed.is_true_on_any_rank(is_due):
            self.emit_pending_report(wait=True)
            self.pending_report = self.start_report(synchronize=force)
            self.emit_pending_report(wait)

    def start_report(self, synchronize: bool) -> PendingReport:
        """Start to copy the sums of the metrics to the host, and reset them; `synchronize` waits for captured steps."""
        metrics, device = self.metrics, self.distributed.device
        in_flight = self.step_graphs.in_flight if self.step_graphs else None
        if in_flight is not None and synchronize:
            in_flight.synchronize()
        seconds, elapsed = self.update_clock(), max(1e-9, time.monotonic() - metrics.clock_start)
        if not metrics.tokens:  # every step since the last report compiled
            elapsed = math.nan
        progress = Progress(
            step=self.state.step,
            epoch=self.get_epoch(),
            loss=0.0,
            perplexity=0.0,
            lr=self.get_lr(self.state.step),
            grad_norm=0.0,
            tokens_per_second=metrics.tokens / elapsed,
            targets_per_second=metrics.num_targets / elapsed,
            peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            seconds=seconds,
            seconds_left=self.estimate_seconds_left(),
        )
        if in_flight is not None:
            progress = replace(progress, **in_flight.take_throughput())
        steps, targets, sums = metrics.steps, metrics.local_targets, metrics.take_sums()
        copy_event = None
        if sums.is_pinned():
            copy_event = torch.cuda.Event()
            copy_event.record()
        return PendingReport(sums, copy_event, steps, targets, progress)

    def get_step_seconds(self) -> float:
        """Mean time of a step since `eta_start`, without validations and checkpoints."""
        elapsed = time.monotonic() - self.eta_start[0] - self.pauses.seconds
        return elapsed / max(1, self.state.step - self.eta_start[1])

    def estimate_seconds_left(self) -> float:
        """Time of the steps that are left, of their validations and of their checkpoints."""
        assert self.config.steps
        assert self.config.valid_every
        steps, share = self.config.steps - self.state.step, self.config.valid_share
        training = steps * self.get_step_seconds()
        pauses = math.ceil(steps / self.config.valid_every) * self.pauses.pause_seconds_per_validation
        if share and self.valid_batches is not None:  # before the first validation: the most that they may take
            limit = training * share / (1 - share)
            pauses = min(pauses, limit) if self.pauses.num_validations else limit
        return training + pauses

    def schedule_next_validation(self, seconds: float) -> None:
        """Postpone validations until they, with the next and the last one, take at most `valid_share` of the time."""
        share, step_seconds = self.config.valid_share, self.get_step_seconds()
        if not share or step_seconds <= 0:
            return
        elapsed = time.monotonic() - self.eta_start[0]
        wait = ((self.pauses.validation_seconds + 2 * seconds) / share - elapsed) / step_seconds
        self.state.next_validation = int(self.distributed.broadcast([self.state.step + max(0.0, wait)])[0])

    def emit_pending_report(self, wait: bool) -> None:
        report = self.pending_report
        if report is None or not (wait or report.is_ready()):
            return
        if report.copy_event is not None:
            report.copy_event.synchronize()
        self.pending_report = None
        local = torch.cat([report.sums, torch.tensor([report.num_targets], dtype=report.sums.dtype)])
        loss, cross_entropy, grad_norm, targets = self.distributed.all_reduce_sum(local).tolist()
        mean = cross_entropy / max(1.0, targets)
        self.emit(
            replace(
                report.progress,
                loss=loss / max(1.0, targets),
                perplexity=math.exp(min(mean, 50.0)) if math.isfinite(cross_entropy) else math.inf,
                grad_norm=grad_norm / self.distributed.world_size / report.steps,
            )
        )

    def warn(self, text: str) -> None:
        self.emit(Note(text=text, level="warning", step=self.state.step))

    def check_divergence(self) -> bool:
        """Report skipped steps; return True after too many non-finite gradients in a row."""
        # Reading the counters synchronizes a GPU, so they are polled every 10 steps, or come with the graphs' events.
        in_flight, step = self.step_graphs.in_flight if self.step_graphs else None, self.state.step
        if in_flight is not None and in_flight.steps:
            step = in_flight.finished_step  # of a few steps ago
            in_a_row, total = (int(count) for count in in_flight.nonfinite_counts)
        elif self.distributed.device.type != "cpu" and self.state.step % MAX_NONFINITE_STEPS:
            return False
        else:
            in_a_row, total = (int(count) for count in self.metrics.nonfinite_counts.tolist())
        if (new := total - self.metrics.reported_nonfinite) > 0:
            self.state.skipped_steps += new
            self.metrics.reported_nonfinite = total
            skipped = f"{new:,} of the steps {self.checked_step + 1:,} to {step:,}"
            skipped = f"step {step:,}" if step == self.checked_step + 1 else skipped
            self.warn(f"{skipped} skipped: non-finite gradient ({self.state.skipped_steps:,} so far)")
        self.checked_step = step
        return in_a_row >= MAX_NONFINITE_STEPS

    def rollback(self) -> None:
        """Return to the last checkpoint with half of the learning rate."""
        rollbacks, step = self.state.rollbacks + 1, self.state.step
        self.finish_save()
        saved = checkpoint.load_newest(self.state_dir, self.warn) if rollbacks <= MAX_ROLLBACKS else None
        if saved is None:
            raise TrainError(
                f"the last {MAX_NONFINITE_STEPS} gradients up to step {step:,} are not finite: training diverges; "
                f"lower the learning rate (--lr, now {self.get_lr(step):g}), raise --warmup, or set --clip-norm 1"
            )
        self.load_checkpoint(saved)
        self.state.rollbacks = rollbacks
        self.metrics, self.pending_report = StepMetrics(self.distributed.device), None
        self.warn(
            f"{MAX_NONFINITE_STEPS} non-finite gradients in a row: rolled back from step {step:,} to "
            f"{self.state.step:,}, with {ROLLBACK_LR_FACTOR:g} times the learning rate"
        )

    def validate(self) -> bool:
        self.report_progress(force=True)
        start = time.monotonic()
        if self.step_graphs is not None:
            self.step_graphs.free_memory_if_low()
        self.state.last_validated_step = self.state.step
        try:
            event = self.evaluate_and_update_best(self.gather_model())
        except StopRequested:
            self.state.last_validated_step = 0  # validate again after resuming
            raise
        self.emit(event)
        seconds = time.monotonic() - start
        if self.has_slow_start and not self.has_validated:  # it compiles: the next one takes a fraction of its time
            self.eta_start = (self.eta_start[0] + seconds, self.eta_start[1])
        else:
            self.pauses.add(seconds, is_validation=True)
            self.schedule_next_validation(seconds)
        self.has_validated = True
        self.metrics.reset_clock()
        self.reset_peak_memory()
        return event.best

    def evaluate_and_update_best(self, model: Model | None) -> Validated:
        """Validate the model, which only rank 0 has, broadcast the result, and update best score and patience."""
        loss, result, stopped = math.nan, EvalResult(), 0.0
        if model is not None and self.valid_batches is not None:
            try:
                loss = self.compute_valid_loss(model)
                if self.evaluator and math.isfinite(loss):  # a search with NaN finds nothing
                    result = self.evaluator(model)
            except StopRequested:
                stopped = 1.0
        values = [loss, *(result.metrics.get(name, math.nan) for name in METRICS), stopped]
        loss, *values, stopped = self.distributed.broadcast(values)
        if stopped:
            raise StopRequested
        metrics = {name: value for name, value in zip(METRICS, values, strict=True) if not math.isnan(value)}
        return self.record_validation(loss, metrics, result)

    def record_validation(self, loss: float, metrics: Mapping[str, float], result: EvalResult) -> Validated:
        """Update best score and patience in the state, and return the event."""
        state, warmup, name = self.state, self.config.warmup, self.config.metric if self.evaluator else None
        assert warmup is not None
        score = -loss if name in (None, "loss") else metrics.get(str(name), math.nan)
        if name in METRICS and METRICS[name].lower_is_better:
            # With as many errors as words, an output is as good as none: then the loss decides.
            score = -min(score, 100.0)
        best_score, best_loss = state.best_score, state.best_loss
        # The loss breaks ties, as between the zero scores of the first validations.
        is_better = best_score is None or best_loss is None or (score, -loss) > (best_score, -best_loss)
        is_best = math.isfinite(score) and math.isfinite(loss) and is_better
        if is_best:
            state.best_score, state.best_loss, state.best_step = score, loss, state.step
            state.validations_since_best = state.validations_without_progress = 0
        elif state.step <= warmup or state.lowest_loss is None or loss < state.lowest_loss:
            state.validations_without_progress = 0  # scores are noisy: patience does not count while the loss falls
        elif not math.isnan(score):
            state.validations_without_progress += 1
        state.validations_since_best += not is_best
        if math.isfinite(loss):
            state.lowest_loss = loss if state.lowest_loss is None else min(loss, state.lowest_loss)
        return Validated(
            step=state.step,
            epoch=self.get_epoch(),
            loss=loss,
            metrics=metrics,
            best=is_best,
            validations_since_best=state.validations_since_best,
            seconds=self.update_clock(),
            samples=result.samples,
        )

    @torch.no_grad()
    def compute_valid_loss(self, model: Model) -> float:
        """Return the mean cross-entropy per target of the validation set."""
        assert self.valid_batches is not None
        objective, was_training = self.make_objective(model, smoothing=0.0), model.training
        objective.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        try:
            for batch_index in range(self.valid_batches.num_batches(0)):
                if self.should_stop():
                    raise StopRequested
                batch = self.valid_batches.get_batch(0, batch_index)
                with self.autocast():
                    _, cross_entropy = objective(batch.to(self.distributed.device))
                sums += torch.tensor([float(cross_entropy), float(batch.num_targets)], dtype=torch.float64)
        finally:
            model.train(was_training)
        return float(sums[0] / sums[1].clamp(min=1))

    # ---- model and checkpoints ---------------------------------------------------------------------------------------

    def gather_model(self) -> Model | None:
        """Return the model unsharded and with LoRA merged, on rank 0; None on the others."""
        if self.distributed.world_size == 1 and not self.config.lora:
            return self.model
        model = build_empty(self.model.config)
        tensors: dict[str, Tensor] = {}
        for name in model.state_dict():
            path, _, leaf = name.rpartition(".")
            tensors[name] = to_full_tensor(getattr(self.model.get_submodule(path), leaf).detach())
        if not self.distributed.is_main:
            return None
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return weights.assign_weights(model, tensors, "the model").to(self.distributed.device)

    def export_model(self) -> None:
        model = self.gather_model()
        if model is not None and self.distributed.is_main:
            write_model(self.out, model, self.tokenizer, self.extra_files)
        if self.config.keep_adapter:
            parts = split_parameters(self.parameters)
            updates, matrices = ({name: to_full_tensor(x.detach()) for name, x in part.items()} for part in parts)
            if self.distributed.is_main:
                write_adapter(self.out / ADAPTER_FOLDER, updates, matrices, self.base_model)

    def save_checkpoint(self) -> None:
        """Save a checkpoint, unless the newest one has this state. A thread writes a copy while training continues."""
        start = time.monotonic()
        current = (self.state.step, self.state.last_validated_step)
        if current != self.last_saved:
            self.finish_save()
            saved = self.build_checkpoint()
            if self.distributed.is_main:
                self.pending_save = self.start_save(clone_tensors(saved))
        self.last_saved = current
        if self.valid_batches is None:
            self.export_model()
        if self.distributed.world_size > 1:
            self.finish_save()
            self.distributed.barrier()  # so that every rank finds the checkpoint
        self.pauses.add(time.monotonic() - start)

    def start_save(self, saved: Checkpoint) -> Future[Saved]:
        def save() -> Saved:
            start = time.monotonic()
            folder = checkpoint.save_checkpoint(self.state_dir, saved)
            return Saved(step=saved.step, folder=str(folder), seconds=time.monotonic() - start)

        executor = ThreadPoolExecutor(1, "checkpoint")
        future = executor.submit(save)
        executor.shutdown(wait=False)
        return future

    def finish_save(self, wait: bool = True) -> None:
        """Report the checkpoint that was being written, and remove old ones; an error of the thread is raised here."""
        pending = self.pending_save
        if pending is None or not (wait or pending.done()):
            return
        try:
            saved = pending.result()
        finally:
            if pending.done():  # otherwise interrupted
                self.pending_save = None
        self.save_seconds, self.save_end = saved.seconds, time.monotonic()
        every = self.config.save_every
        assert every
        scheduled = [step for step in checkpoint.list_steps(self.state_dir) if step % every == 0]
        count = max(self.config.keep_last, self.config.average)
        checkpoint.prune_checkpoints(self.state_dir, {*scheduled[-count:], saved.step})  # interrupted ones go
        self.emit(saved)

    def build_checkpoint(self) -> Checkpoint:
        self.update_clock()
        self.state.threads = torch.get_num_threads() if self.distributed.device.type == "cpu" else None
        tensors = {
            "weights": {name: to_full_tensor(parameter.detach()) for name, parameter in self.parameters.items()},
            "optimizer": {name: to_full_tensor(tensor) for name, tensor in self.optimizer.get_state().items()},
        }
        return Checkpoint(step=self.state.step, state={**asdict(self.state), "run": self.fingerprints}, tensors=tensors)

    def load_checkpoint(self, saved: Checkpoint) -> None:
        """Resume from a checkpoint, written by any number of processes."""
        state = dict(saved.state)
        fingerprints = state.pop("run", {})
        for name, value in self.fingerprints.items():
            if fingerprints.get(name) != value:
                raise TrainError(
                    f"{self.out}: the {name} must match its checkpoints, but does not; give the original {name}, "
                    "or another --out for a new run"
                )
        self.load_weights(saved.tensors["weights"])
        self.optimizer.load_state(saved.tensors["optimizer"])
        if self.step_graphs is not None:
            self.step_graphs.clear()  # they would write to the replaced tensors
        self.state = TrainState(**state)
        threads = torch.get_num_threads()
        if self.distributed.device.type == "cpu" and self.state.threads not in (None, threads):
            self.warn(
                f"the checkpoint was written with {format_count(self.state.threads or 0, 'thread')}, and this run has "
                f"{threads:,}: the weights will differ from those of an uninterrupted run by rounding"
            )
        sizes = [self.state.micro_batch_tokens, self.config.micro_batch_tokens]
        self.state.micro_batch_tokens = min((size for size in sizes if size is not None), default=None)
        self.start_clocks()
        self.last_saved = (self.state.step, self.state.last_validated_step)

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        folder.check_tensors({name: p.shape for name, p in self.parameters.items()}, tensors, self.state_dir)
        for name, parameter in self.parameters.items():
            parameter.copy_(distribute_like(tensors[name], parameter))


def clone_tensors(saved: Checkpoint) -> Checkpoint:
    """Copy the tensors, if memory allows it on their device, where the copy does not wait for the steps in flight."""

    def copy_all(copy_tensor: Callable[[Tensor], Tensor]) -> Checkpoint:
        groups = saved.tensors.items()
        return replace(
            saved, tensors={group: {name: copy_tensor(t) for name, t in tensors.items()} for group, tensors in groups}
        )

    try:
        return copy_all(Tensor.clone)
    except torch.OutOfMemoryError:
        return copy_all(Tensor.cpu)


def write_model(
    out: Path, model: nn.Module, tokenizer: Tokenizer | None, extra_files: Mapping[str, bytes] | None = None
) -> None:
    # run.toml is part of the model: the translator reads its languages and `max_tokens`.
    run = {name: path.read_bytes() for name in ("run.toml",) if (path := out / name).is_file()}
    weights.save_model(model, out, {**(tokenizer.files if tokenizer else {}), **(extra_files or {}), **run})
