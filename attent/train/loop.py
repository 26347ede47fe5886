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

from attent.data.batches import Position
from attent.models import Model, build_empty, folder, store
from attent.text.tokenizer import Tokenizer
from attent.train import chance, checkpoint
from attent.train.checkpoint import Checkpoint
from attent.train.config import TrainConfig, TrainError
from attent.train.events import Ended, Note, Progress, Saved, Started, Tell, Validated
from attent.train.hardware import describe, keep_compiled
from attent.train.objective import Objective
from attent.train.optimiser import Optimiser, gradient_norm, shorten
from attent.train.pieces import Piece, cut, share
from attent.train.recorded import WARM, Capture, Recorder, on_gpu
from attent.train.schedule import learning_rate
from attent.train.task import FIGURES, Batch, Batches, Judge, Judged, MakeObjective
from attent.train.team import Team, full, placed

REPORT = 0.5  # seconds between two events of progress; reading numbers makes a GPU wait
MOST_BAD = 10  # updates in a row whose gradient is not finite, after which the run goes back to a checkpoint
MOST_SETBACKS = 3
FACTOR = 0.5  # of the learning rate after a setback

Reason = Literal["steps", "patience", "stopped"]


class Stopping(Exception):
    """Someone asked to stop in the middle of something that is done again when the run goes on."""


@dataclass(kw_only=True)
class Marks:
    """How far a run has come: all of it that is no tensor."""

    step: int = 0
    epoch: int = 0
    at: int = 0  # the next batch of the epoch
    order: str = ""  # a digest of all pairs so far, in their order
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_loss: float | None = None
    lowest: float | None = None  # loss of any validation
    best_step: int = 0
    since: int = 0  # validations since the best
    waited: int = 0  # validations since it last got better in any way
    validated: int = 0  # the last step that was validated
    skipped: int = 0  # updates without effect, since their gradient was not finite
    setbacks: int = 0
    piece_tokens: int | None = None


@dataclass
class Meter:
    """Sums since the last report; they stay on the device until then, in the same tensors, which recordings add to."""

    device: torch.device
    since: float = field(default_factory=time.monotonic)
    updates: int = 0
    tokens: int = 0  # these two since the clock was set
    units: int = 0
    targets: float = 0.0  # of the pieces that this process has met
    sums: Tensor = field(init=False)  # loss, cross-entropy, norm
    bad: Tensor = field(init=False)  # updates without effect: in a row, in all
    told: int = 0  # of all

    def __post_init__(self) -> None:
        exact = torch.float64 if self.device.type != "mps" else torch.float32
        self.sums = torch.zeros(3, dtype=exact, device=self.device)
        self.bad = torch.zeros(2, device=self.device)

    def add(self, loss: Tensor, entropy: Tensor) -> None:
        self.sums[:2] += torch.stack([loss.detach(), entropy.detach()])

    def mark(self) -> tuple[Tensor, float]:
        return self.sums.clone(), self.targets

    def back_to(self, mark: tuple[Tensor, float]) -> None:
        self.sums.copy_(mark[0])
        self.targets = mark[1]

    def done(self, norm: Tensor, found_inf: Tensor) -> None:
        self.sums[2] += norm.nan_to_num(0.0, 0.0, 0.0)
        self.bad.copy_(torch.stack([(self.bad[0] + 1) * found_inf, self.bad[1] + found_inf]))

    def count(self, batches: list[Batch]) -> None:
        self.updates += 1
        self.tokens += sum(batch.tokens for batch in batches)
        self.units += sum(batch.units for batch in batches)

    def set_clock(self) -> None:
        """Speed is measured from here on."""
        self.since, self.tokens, self.units = time.monotonic(), 0, 0

    def taken(self) -> Tensor:
        """The sums, on the host as soon as the device has come so far; from here on they begin anew."""
        numbers = torch.empty(3, dtype=self.sums.dtype, pin_memory=self.device.type == "cuda")
        numbers.copy_(self.sums, non_blocking=True)
        self.sums.zero_()
        self.updates, self.targets = 0, 0.0
        self.set_clock()
        return numbers


@dataclass(frozen=True)
class Reading:
    """What will be told of the updates up to now, once their sums are here."""

    sums: Tensor
    here: torch.cuda.Event | None
    updates: int
    targets: float
    progress: Progress  # but for the sums

    def is_here(self) -> bool:
        return self.here is None or self.here.query()


class Training:
    """One run of the loop, in one of the processes of a team."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        config: TrainConfig,
        batches: Batches,
        valid: Batches | None,
        judge: Judge | None,
        out: Path,
        team: Team,
        tell: Tell,
        stop: Callable[[], bool] = lambda: False,
        identity: Mapping[str, str] | None = None,
        objective: MakeObjective = Objective,
    ) -> None:
        self.config, self.batches, self.valid, self.judge = config, batches, valid, judge
        self.tokenizer, self.out, self.team, self.tell, self.stop = tokenizer, out, team, tell, stop
        self.identity = dict(identity or {})  # what a checkpoint must have been made with
        self.marks = Marks(piece_tokens=config.piece_tokens)
        self.model = model.to(team.device).train()
        self.compiled = bool(config.compile)
        if self.compiled:
            keep_compiled()
        self.make = objective
        self.objective = objective(
            self.model, smoothing=config.label_smoothing, rdrop=config.rdrop or 0.0, compile=self.compiled
        )
        self.wrapped = team.wrapped(self.objective, config.shard)
        self.named = dict(self.model.named_parameters())
        self.learning = {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}
        self.optimiser = Optimiser(self.learning, config)
        self.ema = {name: p.detach().clone() for name, p in self.learning.items()} if config.ema else {}
        self.meter = Meter(team.device)
        self.reading: Reading | None = None
        self.recorder: Recorder | None = None
        self.factor = torch.zeros((), device=team.device)  # of the loss, in a recorded update
        if self.compiled and team.device.type == "cuda":
            self.record(on_gpu(team.device))
        self.first, self.mark = 0, time.monotonic()
        self.paced = (time.monotonic(), 0)  # since when, and since which update, the time that is left is judged
        self.compiling: float | None = None  # since when
        self.stored = (-1, 0)  # of the checkpoint that was saved or filled in last: its step, and the last validated

    # ---- the page ----------------------------------------------------------------------------------------------------

    def run(self) -> Ended:
        """Update after update, from wherever the run stands."""
        self.mark = time.monotonic()
        self.first = self.marks.step
        self.paced = (self.mark, self.first)
        self.tell(self.started())
        if self.compiled and not self.over():
            self.compiling = time.monotonic()
            self.tell(Note(text="compiling: once for each model and machine, kept for the next start", step=self.first))
        try:
            self.look_back()
            while not (reason := self.over()):
                with closing(self.updates()) as updates:
                    for batches, after in updates:
                        if self.asked_to_stop():
                            raise Stopping
                        self.learn(batches, after)
                        if self.trouble():
                            self.go_back()
                            break
                        self.look_back()
                        if reason := self.over():
                            break
        except Stopping:
            reason = "stopped"
            self.tell(Note(text="saving, then leaving (Ctrl-C again: leave at once)", step=self.marks.step))
        self.report(now=True)
        self.save()
        ended = Ended(step=self.marks.step, reason=reason, seconds=self.clock())
        self.tell(ended)
        return ended

    def look_back(self) -> None:
        """After an update, and again when a run goes on behind one: what is due."""
        step, config = self.marks.step, self.config
        assert config.valid_every
        assert config.save_every
        last = step == config.steps
        due = step > 0 and (step % config.valid_every == 0 or last) and self.marks.validated < step
        if due and self.valid is not None:
            self.validate()
        if step > self.first and step % config.save_every == 0 and not self.meter.bad[0]:  # else nothing new, or worse
            self.save()

    def over(self) -> Reason | None:
        assert self.config.steps
        if self.marks.step >= self.config.steps:
            return "steps"
        return "patience" if self.config.patience and self.marks.waited >= self.config.patience else None

    def updates(self) -> Generator[tuple[list[Batch], Position], None, None]:
        """The batches of each update, and where the next one begins."""
        start = Position(self.marks.epoch, self.marks.at)
        pin = self.team.device.type == "cuda"
        group: list[Batch] = []
        with closing(self.batches.walk(start, workers=self.config.workers, pin=pin)) as walk:  # type: ignore[type-var]
            for (epoch, step), batch in walk:
                group.append(batch)
                if len(group) == self.config.accumulate:
                    after = (
                        Position(epoch, step + 1) if step + 1 < self.batches.steps(epoch) else Position(epoch + 1, 0)
                    )
                    yield group, after
                    group = []

    def learn(self, batches: list[Batch], after: Position) -> None:
        """One update."""
        units = sum(batch.units for batch in batches)
        if not self.played(batches, units):
            self.gradients(batches, units)
            self.optimiser.set_rate(self.rate(self.marks.step + 1))
            self.follow_gradients()
        self.marks.step += 1
        self.follow()
        self.marks.epoch, self.marks.at = after
        self.count(batches)
        self.meter.count(batches)
        self.settle()
        self.report()

    def follow_gradients(self) -> None:
        """Where none is asked for, the host waits for nothing here, so that it can be recorded."""
        norm = gradient_norm(self.learning.values())
        found_inf = (~norm.isfinite()).float()
        if self.config.clip_norm:
            shorten(self.learning.values(), norm, self.config.clip_norm)
        self.optimiser.update(found_inf)
        self.optimiser.zero_grad()
        self.meter.done(norm, found_inf)

    # ---- one update --------------------------------------------------------------------------------------------------

    def gradients(self, batches: list[Batch], units: int) -> None:
        """Of the mean loss over all units of these batches. Out of memory, it begins anew in smaller pieces."""
        while True:
            mark = self.meter.mark()
            try:
                for number, batch in enumerate(batches):
                    pieces = cut(batch, self.marks.piece_tokens, self.team.size)
                    for piece in (mine := list(share(pieces, self.team.rank, self.team.size))):
                        last = number == len(batches) - 1 and piece is mine[-1]
                        self.add_gradient(batch, piece, number, units, last)
                return
            except torch.OutOfMemoryError:
                had_more = self.recorder is not None and self.recorder.forget()
                smaller = self.marks.piece_tokens if had_more else self.smaller_pieces(batches)
            self.optimiser.zero_grad()  # here, where the failed pass no longer holds its memory
            self.meter.back_to(mark)
            if self.team.device.type == "cuda":
                torch.cuda.empty_cache()
            self.marks.piece_tokens = smaller

    def add_gradient(self, batch: Batch, piece: Piece, number: int, units: int, last: bool) -> None:
        if self.team.size == 1 and self.stop():
            self.optimiser.zero_grad()
            raise Stopping
        part = piece.of(batch).to(self.team.device, non_blocking=True)
        chance.fix(self.config.seed, self.marks.step, number, piece.start)
        with self.team.quiet(self.wrapped, last), self.precision():
            loss, entropy = self.wrapped(part)
            # Behind the backward pass stands the mean over the processes, where the sum is wanted.
            (loss * (piece.weight * self.team.size / units)).backward()
        self.meter.add(loss * piece.weight, entropy * piece.weight)
        self.meter.targets += part.units * piece.weight

    def smaller_pieces(self, batches: list[Batch]) -> int:
        """Half as many tokens at once as just now."""
        largest, widest = max(batch.slots for batch in batches), max(batch.width for batch in batches)
        now = min(self.marks.piece_tokens or largest, largest)
        half = max(widest, now // 2)
        if self.team.size > 1 and now > widest:  # the others know nothing of it, and would wait for gradients
            raise TrainError(
                f"process {self.team.rank} is out of memory with {now:,} tokens at once; run the same command again "
                f"with --piece-tokens {half}, and it goes on from the last checkpoint"
            )
        if now <= widest:
            raise TrainError(
                f"the memory of {self.team.device} does not hold even {now:,} tokens at once; take a smaller --size, "
                "fewer tokens (--longest), or --lora, or spread the model over several GPUs (--shard)"
            )
        self.warn(f"out of memory with {now:,} tokens at once: going on with {half:,}; the update is the same")
        return half

    # ---- recorded updates --------------------------------------------------------------------------------------------

    def record(self, capture: Capture) -> None:
        """From now on updates are repeated from recordings, where they can be."""
        alone = self.team.size == 1 and self.config.accumulate == 1
        if alone and self.optimiser.can_be_recorded():
            self.optimiser.hold_rate()
            self.recorder = Recorder(self.whole_update, self.team.device, capture)

    def whole_update(self, batch: Batch) -> None:
        """What a recording holds: the same as one piece of one batch that runs as usual."""
        with self.precision():
            loss, entropy = self.wrapped(batch)
            (loss * self.factor).backward()
        self.meter.add(loss, entropy)
        self.follow_gradients()

    def played(self, batches: list[Batch], units: int) -> bool:
        """The update from a recording, if there is one for it."""
        recorder, batch = self.recorder, batches[0]
        if recorder is None or len(cut(batch, self.marks.piece_tokens, self.team.size)) > 1:
            return False
        recording = recorder.of(batch)
        if recording is None:
            if recorder.refused:
                self.give_up_recording(recorder.refused)
            return False
        chance.fix(self.config.seed, self.marks.step, 0, 0)
        self.optimiser.set_rate(self.rate(self.marks.step + 1))
        self.factor.fill_(1 / units)
        recorder.play(recording, batch, self.meter.bad)
        self.meter.targets += batch.units
        return True

    def give_up_recording(self, reason: str) -> None:
        self.optimiser.zero_grad()  # what is left of the attempt
        self.recorder = None
        self.warn(f"updates cannot be recorded as a CUDA graph, so each is launched by itself ({reason})")

    def settle(self) -> None:
        """The first updates compile and record: they tell nothing of the speed of the others."""
        done = self.marks.step - self.first
        if not self.compiled or done > WARM + 1:
            return
        if self.compiling is not None:
            seconds, self.compiling = time.monotonic() - self.compiling, None
            self.tell(Note(text=f"compiled in {seconds:.0f} s", step=self.marks.step))
        self.meter.set_clock()
        self.paced = (time.monotonic(), self.marks.step)

    def rate(self, step: int) -> float:
        config = self.config
        assert config.lr is not None
        assert config.warmup is not None
        assert config.steps is not None
        whole = learning_rate(
            step, schedule=config.schedule, highest=config.lr, warmup=config.warmup, steps=config.steps
        )
        return whole * FACTOR**self.marks.setbacks

    def precision(self) -> AbstractContextManager[object]:
        if self.config.precision == "bfloat16":
            return torch.autocast(self.team.device.type, torch.bfloat16)
        return nullcontext()

    @torch.no_grad()
    def follow(self) -> None:
        """The running mean of the weights; at first it follows faster, so that it forgets the random start."""
        if self.ema:
            decay = min(self.config.ema, (1 + self.marks.step) / (10 + self.marks.step))
            torch._foreach_lerp_(list(self.ema.values()), [p.detach() for p in self.learning.values()], 1 - decay)

    def count(self, batches: list[Batch]) -> None:
        for batch in batches:
            digest = hashlib.sha256(self.marks.order.encode() + batch.pairs.astype("<i8").tobytes())
            self.marks.order = digest.hexdigest()
            self.marks.tokens += batch.tokens

    def asked_to_stop(self) -> bool:
        return self.team.any(self.stop())

    # ---- telling -----------------------------------------------------------------------------------------------------

    def started(self) -> Started:
        assert self.config.steps
        assert self.config.precision
        return Started(
            step=self.marks.step,
            steps=self.config.steps,
            steps_per_epoch=self.batches.steps(self.marks.epoch) / self.config.accumulate,
            parameters=sum(parameter.numel() for parameter in self.named.values()),
            trained=sum(parameter.numel() for parameter in self.learning.values()),
            device=describe(self.team.device, self.config.precision, self.compiled)
            + (f", {self.team.size} processes" if self.team.size > 1 else ""),
        )

    def clock(self) -> float:
        """Seconds of training so far; called whenever marks are told or kept."""
        now = time.monotonic()
        self.marks.seconds += now - self.mark
        self.mark = now
        return self.marks.seconds

    def report(self, now: bool = False) -> None:
        """Told at once, or where the GPU has updates before it, when it has come so far: it is never made to wait."""
        wait = now or self.recorder is None
        self.tell_reading(wait)
        first = self.marks.step == self.first + 1 and not self.compiled
        due = now or first or time.monotonic() - self.meter.since >= REPORT
        if self.meter.updates and self.team.any(due):
            self.tell_reading(wait=True)
            self.reading = self.read(now)
            self.tell_reading(wait)

    def read(self, now: bool) -> Reading:
        meter, flight = self.meter, self.recorder.flight if self.recorder else None
        if flight is not None and now:
            flight.rest()
        pace = flight.pace() if flight is not None else None
        seconds, elapsed = self.clock(), max(1e-9, time.monotonic() - meter.since)
        if not meter.tokens:  # all of these updates have compiled
            elapsed = math.nan
        per_update = (time.monotonic() - self.paced[0]) / max(1, self.marks.step - self.paced[1])
        assert self.config.steps
        progress = Progress(
            step=self.marks.step,
            epoch=self.marks.epoch + self.marks.at / max(1, self.batches.steps(self.marks.epoch)),
            loss=0.0,
            perplexity=0.0,
            lr=self.rate(self.marks.step),
            grad_norm=0.0,
            tokens_per_second=pace.tokens if pace else meter.tokens / elapsed,
            targets_per_second=pace.units if pace else meter.units / elapsed,
            busy=pace.busy if pace else None,
            seconds=seconds,
            seconds_left=per_update * (self.config.steps - self.marks.step),
        )
        updates, targets, sums = meter.updates, meter.targets, meter.taken()
        here = None
        if sums.is_pinned():
            here = torch.cuda.Event()
            here.record()
        return Reading(sums, here, updates, targets, progress)

    def tell_reading(self, wait: bool) -> None:
        """What was read, as soon as it is here."""
        reading = self.reading
        if reading is None or not (wait or reading.is_here()):
            return
        if reading.here is not None:
            reading.here.synchronize()
        self.reading = None
        numbers = torch.cat([reading.sums, torch.tensor([reading.targets], dtype=reading.sums.dtype)])
        loss, entropy, norm, targets = self.team.sum(numbers).tolist()
        self.tell(
            replace(
                reading.progress,
                loss=loss / max(1.0, targets),
                perplexity=math.exp(min(entropy / max(1.0, targets), 50.0)) if math.isfinite(entropy) else math.inf,
                grad_norm=norm / self.team.size / reading.updates,
            )
        )

    # ---- gradients that are not finite -------------------------------------------------------------------------------

    def trouble(self) -> bool:
        """Whether too many updates in a row came to nothing. A GPU is asked seldom, since asking makes it wait, or it
        has told by itself."""
        flight = self.recorder.flight if self.recorder else None
        if flight is not None and flight.flying:
            in_a_row, in_all = (int(number) for number in flight.bad)  # of a few updates ago
        elif self.team.device.type != "cpu" and self.marks.step % MOST_BAD:
            return False
        else:
            in_a_row, in_all = (int(number) for number in self.meter.bad.tolist())
        if (new := in_all - self.meter.told) > 0:
            self.marks.skipped += new
            self.meter.told = in_all
            so_far = f"({self.marks.skipped:,} so far)"
            self.warn(f"update {self.marks.step:,}: the gradient was not finite, so it was skipped {so_far}")
        return in_a_row >= MOST_BAD

    def go_back(self) -> None:
        """To the last checkpoint, with half the learning rate."""
        setbacks, at = self.marks.setbacks + 1, self.marks.step
        found = checkpoint.newest(self.out / "state", self.warn) if setbacks <= MOST_SETBACKS else None
        if found is None:
            raise TrainError(
                f"the last {MOST_BAD} gradients up to update {at:,} are not finite: training diverges; "
                f"lower the learning rate (--lr, now {self.rate(at):g}), raise --warmup, or set --clip-norm 1"
            )
        self.fill(found)
        self.marks.setbacks = setbacks
        self.meter, self.reading = Meter(self.team.device), None
        self.warn(
            f"{MOST_BAD} gradients in a row were not finite: back from update {at:,} to {self.marks.step:,}, "
            f"with {FACTOR:g} times the learning rate"
        )

    def warn(self, text: str) -> None:
        self.tell(Note(text=text, weight="warning", step=self.marks.step))

    # ---- validation --------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        self.report(now=True)
        if self.recorder is not None:
            self.recorder.pause()
        self.marks.validated = self.marks.step  # set back if it is interrupted
        try:
            with self.smoothed():
                event = self.judged(self.plain())
                if event.best:
                    self.publish()
        except Stopping:
            self.marks.validated = 0
            raise
        self.tell(event)
        self.meter.set_clock()

    def judged(self, model: Model | None) -> Validated:
        """The validation of a model that the first process has; the others are told the outcome."""
        loss, scores = math.nan, None
        stopped = 0.0
        if model is not None and self.valid is not None:
            try:
                loss, scores = self.loss_of(model), self.judge(model) if self.judge else None
            except Stopping:
                stopped = 1.0
        found = scores.figures if scores else {}
        numbers = [loss, *(found.get(name, math.nan) for name in FIGURES), stopped]
        loss, *figures, stopped = self.team.told(numbers)
        if stopped:
            raise Stopping
        return self.compared(loss, dict(zip(FIGURES, figures, strict=True)), scores or Judged())

    def compared(self, loss: float, figures: Mapping[str, float], scores: Judged) -> Validated:
        metric = -loss if self.config.metric == "loss" or not self.judge else figures[self.config.metric]
        best = math.isfinite(metric) and math.isfinite(loss) and self.is_better(metric, loss)
        if best:
            self.marks.best, self.marks.best_loss = metric, loss
            self.marks.best_step, self.marks.since, self.marks.waited = self.marks.step, 0, 0
        elif self.still_learning(loss):
            self.marks.waited = 0
        elif not math.isnan(metric):
            self.marks.waited += 1
        self.marks.since += not best
        if math.isfinite(loss):
            self.marks.lowest = loss if self.marks.lowest is None else min(loss, self.marks.lowest)
        return Validated(
            step=self.marks.step,
            epoch=self.marks.epoch + self.marks.at / max(1, self.batches.steps(self.marks.epoch)),
            loss=loss,
            **{name: None if math.isnan(figure) else figure for name, figure in figures.items()},
            best=best,
            waited=self.marks.since,
            seconds=self.clock(),
            samples=scores.samples,
        )

    def is_better(self, metric: float, loss: float) -> bool:
        """Than the best so far; of two with one score, as at the very beginning, the loss tells."""
        if self.marks.best is None or self.marks.best_loss is None:
            return True
        return (metric, -loss) > (self.marks.best, -self.marks.best_loss)

    def still_learning(self, loss: float) -> bool:
        """Whether it is too early to lose patience: scores are coarse and jump about while the loss still falls."""
        assert self.config.warmup is not None
        return self.marks.step <= self.config.warmup or self.marks.lowest is None or loss < self.marks.lowest

    @torch.no_grad()
    def loss_of(self, model: Model) -> float:
        """The cross-entropy per unit (target token, masked word, text) of the validation part."""
        assert self.valid is not None
        objective, was_training = self.make(model, smoothing=0.0), model.training
        objective.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        try:
            for step in range(self.valid.steps(0)):
                if self.stop():
                    raise Stopping
                batch = self.valid.batch(0, step)
                with self.precision():
                    _, entropy = objective(batch.to(self.team.device))
                sums += torch.tensor([float(entropy), float(batch.units)], dtype=torch.float64)
        finally:
            model.train(was_training)
        return float(sums[0] / sums[1].clamp(min=1))

    @contextmanager
    def smoothed(self) -> Iterator[None]:
        """With the running mean in place of the weights, if there is one."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """The numbers change places, not the tensors: of one that is spread over processes `.data` is only a shell."""
        for name, mean in self.ema.items():
            held = self.learning[name].detach().clone()
            self.learning[name].copy_(mean)
            mean.copy_(held)

    # ---- what is written ---------------------------------------------------------------------------------------------

    def plain(self) -> Model | None:
        """The model as a plain one, on the first process: whole, and with added matrices added in."""
        if self.team.size == 1 and not self.config.lora:
            return self.model
        like = build_empty(self.model.config)
        found: dict[str, Tensor] = {}
        for name in like.state_dict():
            path, _, leaf = name.rpartition(".")
            found[name] = full(getattr(self.model.get_submodule(path), leaf).detach())
        if not self.team.leads:
            return None
        return store.fill(like, {name: tensor.clone() for name, tensor in found.items()}, "the model").to(
            self.team.device
        )

    def publish(self) -> None:
        """The model folder gets the present weights."""
        model = self.plain()
        if model is not None and self.team.leads:
            write_model(self.out, model, self.tokenizer)

    def save(self) -> None:
        """A checkpoint of this very moment; older ones go when it is complete."""
        began = time.monotonic()
        now = (self.marks.step, self.marks.validated)
        if now != self.stored:  # by its name alone it could be one that is damaged
            kept = self.kept()
            if self.team.leads:
                place = checkpoint.save(self.out / "state", kept)
                self.prune()
                self.tell(Saved(step=self.marks.step, folder=str(place), seconds=time.monotonic() - began))
        self.stored = now
        if self.valid is None:
            self.publish()
        self.team.wait()  # whoever looks for it now must find it

    def known(self) -> list[int]:
        return checkpoint.steps(self.out / "state")

    def prune(self) -> None:
        """The last regular ones stay, and the newest: those of an interruption go when another comes."""
        every = self.config.save_every
        assert every
        regular = [step for step in self.known() if step % every == 0]
        most = max(self.config.keep_last, self.config.average)
        checkpoint.prune(self.out / "state", {*regular[-most:], self.marks.step})

    def kept(self) -> Checkpoint:
        self.clock()
        tensors = {
            "weights": {name: full(parameter.detach()) for name, parameter in self.named.items()},
            "optimiser": {name: full(tensor) for name, tensor in self.optimiser.tensors().items()},
            "random": chance.tensors(),
        }
        if self.ema:
            tensors["ema"] = {name: full(tensor) for name, tensor in self.ema.items()}
        return Checkpoint(step=self.marks.step, facts={**asdict(self.marks), "run": self.identity}, tensors=tensors)

    def fill(self, found: Checkpoint) -> None:
        """Go on from a checkpoint, whatever number of processes has written it."""
        facts = dict(found.facts)
        written_with = facts.pop("run", {})
        for name, value in self.identity.items():
            if written_with.get(name) != value:
                what = f"other {name}" if name in ("data", "labels") else f"another {name}"
                raise TrainError(
                    f"{self.out}: its checkpoints were made with {what}; give the {name} of then, or another --out "
                    "for a new run"
                )
        self.load_weights(found.tensors["weights"])
        self.optimiser.fill(found.tensors["optimiser"])
        if self.recorder is not None:
            self.recorder.forget()  # its updates would go on with the tensors of before
        for name, mean in found.tensors.get("ema", {}).items():
            if name in self.ema:
                put(self.ema[name], mean)
        chance.restore(found.tensors["random"])
        self.marks = replace(Marks(), **facts)
        sizes = [size for size in (self.marks.piece_tokens, self.config.piece_tokens) if size is not None]
        self.marks.piece_tokens = min(sizes, default=None)  # what memory had room for, or what is asked for now
        self.first = self.marks.step
        self.mark = time.monotonic()
        self.paced = (self.mark, self.first)
        self.stored = (self.marks.step, self.marks.validated)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        folder.check_tensors({name: p.shape for name, p in self.named.items()}, weights, self.out / "state")
        for name, parameter in self.named.items():
            put(parameter, weights[name])


@torch.no_grad()
def put(place: Tensor, value: Tensor) -> None:
    """Numbers into a tensor that may be spread over several processes."""
    place.copy_(placed(value, place))


def write_model(out: Path, model: nn.Module, tokenizer: Tokenizer | None) -> None:
    """Config, weights and tokenizer, if there is one, as one model folder."""
    store.save(model, out, tokenizer.files if tokenizer else None)
