"""What `attent train` does, step by step: read what was asked, find or make the run, train, choose the best weights,
score them, write the card. Signals save and leave; a folder belongs to one run and to one process at a time.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from attent import interop, settings
from attent.cli.progress import TrainingDisplay
from attent.decoding.engines.reference import SearchCancelled
from attent.models import CausalLM, Model, ModelConfig, Seq2Seq, TextEncoder, VisionTransformer, build
from attent.nn.lora import LoRAError, add_lora, freeze_parameters
from attent.storage.cache import try_hold_lock
from attent.storage.manifest import explain_save_errors
from attent.text.tokenizer import TOKENIZER_FORMATS, Tokenizer
from attent.training import checkpoint, rng, task_heads
from attent.training.averaging import average_checkpoints
from attent.training.config import (
    RESUMABLE_CHANGES,
    Run,
    TrainError,
    UserSettings,
    diff_settings,
    flatten_settings,
    merge_with_previous,
    read_run,
    read_user_settings,
    validate_settings,
)
from attent.training.curves import CurveWriter
from attent.training.distributed import DistributedContext, explain_lost_process, init_distributed
from attent.training.event_log import EventLog
from attent.training.event_log import read_events as read_log
from attent.training.events import Ended, Event, Note
from attent.training.hardware import pick_device
from attent.training.loop import StopRequested, Trainer
from attent.training.tasks import TASKS, TaskName, get_task_class
from attent.training.tasks.base import FinalScores, RunContext, Task

RUN_FILE, STATE_FOLDER, REQUESTED_FILE, FINISHED_FILE, LOG_FILE, CURVES_FILE, CARD_FILE = (
    "run.toml", "state", "requested.json", "finished.json", "log.jsonl", "curves.svg", "card.md",
)  # fmt: skip
NEW_HEADS_FILE = "new_heads.json"
RUN_FILES = {"config.json", "model.safetensors", "manifest.json", "run.toml", "card.md", "log.jsonl"}
MODEL_FILES = {"config.json", "model.safetensors", "manifest.json"}
EARLY_FILES = {name for layout in TOKENIZER_FORMATS for name in (*layout.required_files, *layout.optional_files)} | {  # before anything was learned
    RUN_FILE, LOG_FILE, CURVES_FILE, "curves.png", "tensorboard",
}  # fmt: skip
MAX_LISTED_CHANGES = 8  # settings that are named when too many differ
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
MODEL_DESCRIPTIONS: dict[type[Model], str] = {
    Seq2Seq: "a model of encoder and decoder",
    CausalLM: "a language model",
    TextEncoder: "an encoder of text",
    VisionTransformer: "an encoder of images",
}


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What was typed."""

    out: Path
    config_file: Path | None = None
    flags: Mapping[str, Any]
    overrides: Sequence[str] = ()
    quiet: bool = False


def run_training(request: TrainRequest) -> int:
    """The command: exit code 0 when the run is complete, 130 or 143 when it was asked to stop and has saved."""
    asked = read_user_settings(request.config_file, request.flags, request.overrides)
    out = request.out.expanduser()
    kind = asked.get("train", {}).get("device") if isinstance(asked.get("train"), dict) else None
    with ExitStack() as stack:
        team = stack.enter_context(init_distributed(pick_device(kind)))
        stack.enter_context(explain_lost_process(team))
        if team.is_main:
            check_folder(out, asked)
            stack.enter_context(lock_folder(out))
        team.barrier()
        watch = stack.enter_context(TrainingDisplay(quiet=request.quiet)) if team.is_main else None
        signals = stack.enter_context(SignalHandler())
        return TrainSession(out, asked, team, watch, signals).run()


# ---- the folder ------------------------------------------------------------------------------------------------------


def check_folder(out: Path, requested: UserSettings) -> None:
    """Refuse a folder that cannot be written to, that holds something else, or that a changed command would spoil."""
    if out.exists() and not out.is_dir():
        raise TrainError(f"{out}: is a file; give another --out, a folder that attent will make")
    known = out / STATE_FOLDER / REQUESTED_FILE
    names = {path.name.removesuffix(".new") for path in out.iterdir()} if out.is_dir() else set()
    if known.exists() and (names & MODEL_FILES or checkpoint.list_steps(out / STATE_FOLDER)):
        check_changes(out, settings.read_json(known), requested)
    elif names - {STATE_FOLDER} - (EARLY_FILES if known.exists() else set()) or checkpoint.list_steps(
        out / STATE_FOLDER
    ):
        what = "a model already" if names & RUN_FILES else f"other files ({', '.join(sorted(names)[:3])})"
        raise TrainError(
            f"{out}: holds {what}, and nothing there is overwritten; give another --out"
            + (f", or train it further with --from {out}" if names & RUN_FILES else "")
        )
    elif not known.exists() and not requested.get("data", {}).get("train"):
        raise TrainError("there is nothing to train on: name your text with --data, such as --data corpus.tsv")
    with explain_save_errors(out, "run"):
        (out / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        probe = out / STATE_FOLDER / ".probe"
        probe.write_bytes(b"")
        probe.unlink()


def check_changes(out: Path, previous: UserSettings, requested: UserSettings) -> None:
    """A run goes on with the settings that it began with; what changes nothing that was learned may differ."""
    resolved = dict(flatten_settings(settings.to_dict(read_run(out / RUN_FILE)))) if (out / RUN_FILE).exists() else {}
    differ = diff_settings(previous, merge_with_previous(requested, previous))
    refused = {
        path: (old, new)
        for path, (old, new) in differ.items()
        if path not in RESUMABLE_CHANGES
        and not (old is None and resolved.get(path) == new)  # it only says what was chosen
    }
    if refused:
        listed = [
            f"{path}: {_format_value(old)} -> {_format_value(new)}" for path, (old, new) in sorted(refused.items())
        ]
        told = "; ".join(listed[:MAX_LISTED_CHANGES]) + (
            f"; and {len(listed) - MAX_LISTED_CHANGES} more" if len(listed) > MAX_LISTED_CHANGES else ""
        )
        raise TrainError(
            f"{out}: holds a run with other settings ({told}); give those of then to go on with it, "
            "or another --out for a new run"
        )


def _format_value(value: Any) -> str:
    return "(not said)" if value is None else json.dumps(value, ensure_ascii=False)


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    with try_hold_lock(out / STATE_FOLDER / ".lock") as held:
        if not held:
            raise TrainError(f"{out}: another attent is training into this folder; wait for it, or give another --out")
        yield


# ---- signals ---------------------------------------------------------------------------------------------------------


class SignalHandler:
    """Once there is something to save, the first Ctrl-C or SIGTERM asks to save and leave; a second Ctrl-C, and any
    before that, leaves at once."""

    def __init__(self) -> None:
        self.caught, self.can_save = 0, False
        self.previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> SignalHandler:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous_handlers[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def is_stop_requested(self) -> bool:
        return bool(self.caught)

    @property
    def exit_code(self) -> int:
        return EXIT_TERMINATED if self.caught == signal.SIGTERM else EXIT_INTERRUPTED

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        if not self.can_save:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_TERMINATED)
        if self.caught and number == signal.SIGINT:
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # the cursor, which the display had hidden
            os._exit(EXIT_INTERRUPTED)
        self.caught = self.caught or number


# ---- the run ---------------------------------------------------------------------------------------------------------


class TrainSession:
    """One call of the command, in one process."""

    def __init__(
        self,
        out: Path,
        requested: UserSettings,
        distributed: DistributedContext,
        display: TrainingDisplay | None,
        signals: SignalHandler,
    ) -> None:
        self.out, self.requested, self.distributed, self.signals = out, requested, distributed, signals
        self.display = display
        self.listeners: list[Callable[[Event], None]] = [display] if display else []
        self.early_events: list[Event] = []  # told before there was a log to keep them
        self.new_parameters: list[str] = []  # parameters that the model to begin from does not have

    def emit(self, event: Event) -> None:
        """Only the first process talks."""
        for listener in self.listeners:
            listener(event)
        if len(self.listeners) < 2:
            self.early_events.append(event)

    def run(self) -> int:
        run, material, model = self.set_up()
        if self.display is not None:
            self.display.title = f"{self.out} ({material.title})" if material.title else str(self.out)
        training = self.build_trainer(run, material, model)
        self.resume(training)
        if self.is_finished(training):
            return self.rescore(run, material, training)
        self.signals.can_save = True
        ended = training.run()
        if ended.reason == "stopped":
            return self.exit_after_save()
        try:
            final = Finalizer(self, run, material, training, ended)
            final.choose_weights()
            final.write_results()
        except (StopRequested, SearchCancelled):
            self.distributed.barrier()  # the others wait for the first to write
            return self.exit_after_save()
        return 0

    def set_up(self) -> tuple[Run, Task, Model]:
        """The run as it was resolved when it began or, for a new one, as it is resolved now; its data and its model."""
        known = self.out / RUN_FILE
        fresh = not checkpoint.list_steps(self.out / STATE_FOLDER)  # killed before its first checkpoint, it begins anew
        path = self.out / STATE_FOLDER / REQUESTED_FILE
        before = settings.read_json(path) if path.exists() else self.requested
        self.requested = merge_with_previous(self.requested, before)
        if not fresh:
            run = apply_changes(read_run(known), before, self.requested)
        else:
            run = validate_settings(self.requested, "--set")
            if self.distributed.is_main:
                with explain_save_errors(self.out, "run"):
                    settings.write_json(
                        self.requested, path
                    )  # first of all: it says that what else is here is this run's
        if run.train.threads:
            torch.set_num_threads(run.train.threads)
        rng.seed_everything(run.train.seed)
        loaded = load_initial_model(run.init_from, run.task) if run.init_from and fresh else None
        if loaded is not None:
            run = get_task_class(run.task).adapt_run(run, self.requested, loaded.config, self.emit)
        material = self.prepare_task(run, fresh)
        if fresh:
            run, model = self.resolve_settings(run, material, loaded)
            self.record_new_heads(model, loaded, run)
        else:
            assert run.model is not None
            model = build(run.model)
            if (begun := self.out / STATE_FOLDER / NEW_HEADS_FILE).exists():
                self.new_parameters = settings.read_json(begun)["new"]
        if self.distributed.is_main:
            with explain_save_errors(self.out, "run"):
                settings.write_toml(run, known)
                settings.write_json(self.requested, self.out / STATE_FOLDER / REQUESTED_FILE)
        return run, material, model

    def record_new_heads(self, model: Model, loaded: Model | None, run: Run) -> None:
        """Which heads are new: told now, and known again when the run goes on, where --from may be gone."""
        if loaded is None:
            return
        self.new_parameters = list(task_heads.find_new_heads(model, loaded))
        if told := task_heads.describe_new_heads(model, self.new_parameters, run.init_from or ""):
            self.emit(Note(text=told))
        if self.new_parameters and self.distributed.is_main:
            with explain_save_errors(self.out, "run"):
                settings.write_json({"new": self.new_parameters}, self.out / STATE_FOLDER / NEW_HEADS_FILE)

    def prepare_task(self, run: Run, fresh: bool) -> Task:
        """The first process makes what is made once; the others find it done."""
        if not self.distributed.is_main:
            self.distributed.barrier()
        place = RunContext(
            data_dir=self.out / STATE_FOLDER / "data",
            device=self.distributed.device,
            report=self.emit,
            should_stop=self.signals.is_stop_requested,
        )
        material = get_task_class(run.task)(run, self.load_tokenizer(run, fresh), place)
        if self.distributed.is_main:
            if material.tokenizer is not None:
                with explain_save_errors(self.out, "tokenizer"):
                    material.tokenizer.save(self.out)
            self.distributed.barrier()
        return material

    def load_tokenizer(self, run: Run, fresh: bool) -> Tokenizer | None:
        """That of this run, or of the model to begin from; None: it is still to be learned, or none is needed."""
        if "data.tokenizer" not in get_task_class(run.task).settings:
            return None
        if not fresh or not self.distributed.is_main:
            return Tokenizer.load(self.out)
        return Tokenizer.load(Path(run.init_from).expanduser()) if run.init_from else None

    def resolve_settings(self, run: Run, task: Task, loaded: Model | None) -> tuple[Run, Model]:
        """With everything chosen that nobody said, and the reasons told."""
        if "data.layout" in task.settings:
            layout = run.data.layout or ("bucketed" if self.distributed.device.type == "cpu" else "packed")
            run = replace(run, data=replace(run.data, layout=layout))
        config: ModelConfig
        if loaded is not None:
            config = task.build_finetune_config(loaded, self.requested, run.init_from or "")
            size, why = run.size, f"that of {run.init_from}"
        else:
            size, config, why = task.choose_model(run, self.requested)
        train = task.fill_train_config(run, size, config, finetune=loaded is not None)
        halved = self.distributed.broadcast([float(train.precision == "bfloat16")])[
            0
        ]  # measured: others may find it otherwise
        train = replace(train, precision="bfloat16" if halved else "float32")
        run = replace(run, size=size, model=config, train=train)
        for sentence in task.describe_choices(run, why):
            self.emit(Note(text=sentence))
        rng.seed_torch(run.train.seed, 0)
        return run, task.build_model(config, loaded)

    def build_trainer(self, run: Run, task: Task, model: Model) -> Trainer:
        if run.train.lora and not run.init_from:
            raise TrainError(
                "`train.lora` needs a model to begin from (--from): beside random weights nothing is learned"
            )
        try:
            if run.train.lora:
                rng.seed_torch(run.train.seed, 1)
                add_lora(model, run.train.lora, self.new_parameters)
            if run.train.freeze:
                freeze_parameters(model, run.train.freeze)
        except LoRAError as error:
            raise TrainError(str(error)) from error
        batches = task.build_train_batches(run)
        if long := batches.describe_too_long(0):
            self.emit(Note(text=long, level="warning"))
        return Trainer(
            model,
            task.tokenizer,
            run.train,
            batches,
            task.build_valid_batches(run),
            task.build_evaluator(run),
            self.out,
            self.distributed,
            self.emit,
            self.signals.is_stop_requested,
            task.fingerprints,
            task.objective_class,
        )

    def resume(self, trainer: Trainer) -> None:
        """From the newest checkpoint that is whole, if there is one; then the log goes on from there."""
        found = checkpoint.load_newest(self.out / STATE_FOLDER, trainer.warn)
        if found is not None:
            trainer.load_checkpoint(found)
            if done := self.read_finished(trainer):  # the mean of checkpoints may have become the best
                trainer.state.best_score, trainer.state.best_loss = done["best"], done["best_loss"]
            self.emit(Note(text=f"going on from update {found.step:,} of {self.out}", step=found.step))
        if self.distributed.is_main:
            step = trainer.state.step
            log = EventLog(self.out / LOG_FILE, from_step=step)
            before = read_log(self.out / LOG_FILE)
            for note in self.early_events if not step else ():
                log(note)
            if self.display is not None:
                self.display.load_history(before)
            self.listeners += [log, CurveWriter(self.out / CURVES_FILE, before)]
            if trainer.config.tensorboard:
                from attent.training.tensorboard import TensorBoardWriter

                self.listeners.append(TensorBoardWriter(self.out / "tensorboard", step))

    def is_finished(self, trainer: Trainer) -> bool:
        """Whether all is done already."""
        if not self.read_finished(trainer) or not trainer.get_stop_reason():
            return False
        self.emit(
            Note(
                text=f"{self.out}: this run is complete, after {trainer.state.step:,} updates; "
                "to train it further, raise --steps (and --patience)"
            )
        )
        return True

    def read_finished(self, trainer: Trainer) -> dict[str, Any]:
        """What was written at the end of this very run, or nothing."""
        path = self.out / STATE_FOLDER / FINISHED_FILE
        told = settings.read_json(path) if path.exists() else {}
        return told if told.get("step") == trainer.state.step else {}

    def rescore(self, run: Run, task: Task, trainer: Trainer) -> int:
        """A run that is complete, asked for other test sets or another search: only the scores are made again."""
        before = self.read_finished(trainer)
        if before.get("scoring") != scoring_settings(run):
            final = Finalizer(
                self, run, task, trainer, Ended(step=trainer.state.step, reason=before["reason"], seconds=0)
            )
            final.weights = before["weights"]
            final.write_results()
        return 0

    def exit_after_save(self) -> int:
        if self.distributed.is_main:
            again = shlex.join(["attent", "train", "--out", str(self.out)])
            command = again if self.distributed.world_size == 1 else "the same command"
            print(f"attent: saved; go on with: {command}", file=sys.stderr)
        return self.signals.exit_code


def load_initial_model(where: str, task: TaskName) -> Model:
    """The model to begin from, which must be of the kind that the task trains."""
    model = interop.load(where)
    wanted = get_task_class(task).model_class
    if not isinstance(model, wanted):
        others = " or ".join(f"--task {name}" for name in TASKS if isinstance(model, get_task_class(name).model_class))
        raise TrainError(
            f"{where}: must be {MODEL_DESCRIPTIONS[wanted]} for --task {task}, but is {MODEL_DESCRIPTIONS[type(model)]}; "
            f"train it further with {others}, or give another --from"
        )
    return model


def apply_changes(run: Run, previous: UserSettings, requested: UserSettings) -> Run:
    """The resolved run with what harmlessly differs now."""
    tables = settings.to_dict(run)
    for path, (_, now) in diff_settings(previous, requested).items():
        if now is not None:
            table, _, name = path.partition(".")
            tables[table][name] = now
    return settings.from_dict(type(run), tables, where=RUN_FILE)


def scoring_settings(run: Run) -> dict[str, Any]:
    """All that decides the scores at the end, but for the model."""
    return {"decode": settings.to_dict(run.decode), "test": list(run.data.test)}


# ---- the end ---------------------------------------------------------------------------------------------------------


class Finalizer:
    """Which weights are the best, what they score, and the card."""

    def __init__(self, session: TrainSession, run: Run, task: Task, trainer: Trainer, ended: Ended) -> None:
        self.session, self.run, self.task, self.trainer, self.ended = session, run, task, trainer, ended
        best = trainer.state.best_step
        self.weights = f"best, update {best:,}" if best else f"last, update {ended.step:,}"

    def choose_weights(self) -> None:
        """The mean of the last checkpoints, where it is better than the best of them."""
        training, config = self.trainer, self.trainer.config
        steps = training.list_checkpoints()[-config.average :]
        if len(steps) < 2 or config.ema or config.lora or config.average < 2 or training.valid_batches is None:
            return  # a running mean is one already; and a mean of factors is not the factors of a mean
        try:
            means = average_checkpoints(
                [checkpoint.checkpoint_path(self.session.out / STATE_FOLDER, step) for step in steps]
            )
        except checkpoint.CheckpointError as problem:
            training.warn(f"{problem}. No mean of the last checkpoints is tried")
            return
        training.load_weights(means)
        before = training.state.best_score
        event = training.evaluate(training.gather_model())
        metric = config.metric if training.evaluator else "loss"
        if event.best:
            training.export_model()
            self.weights = f"mean of the last {len(steps)} checkpoints"
        figures = f"{metric} {abs(training.state.best_score or 0):.2f}" if event.best else "no better"
        told = f"the mean of the last {len(steps)} checkpoints: {figures} (best before: {abs(before or 0):.2f})"
        self.session.emit(Note(text=told, step=training.state.step))

    def write_results(self) -> None:
        """The scores, the card, and that all is done. The first process writes, the others wait for it."""
        if self.session.distributed.is_main:
            from attent.training import model_card

            outcomes = self.compute_scores()
            self.task.write_analysis(
                interop.load(self.session.out).to(self.session.distributed.device), self.session.out
            )
            card = model_card.build_card(
                self.task,
                self.run,
                self.session.requested,
                self.trainer,
                outcomes,
                weights=self.weights,
                ended=self.ended,
                curves_file=CURVES_FILE if (self.session.out / CURVES_FILE).exists() else "",
            )
            model_card.write_card(card, self.session.out / CARD_FILE)
            settings.write_json(self.summarize(outcomes), self.session.out / STATE_FOLDER / FINISHED_FILE)
            self.report_location()
        self.session.distributed.barrier()

    def compute_scores(self) -> list[FinalScores]:
        """What the weights in the folder score on every set."""
        model = interop.load(self.session.out).to(self.session.distributed.device)
        found = []
        for outcome in self.task.score_model(model, self.run):
            found.append(outcome)
            self.session.emit(Note(text=f"{outcome.split} {outcome.name}: {outcome.summary}", step=self.ended.step))
        return found

    def summarize(self, scores: Sequence[FinalScores]) -> dict[str, Any]:
        """What a later call needs to know of this end."""
        unit = self.task.unit
        told = [
            {
                "name": one.name,
                "split": one.split,
                "num_examples": one.num_examples,
                "unit": unit,
                "metrics": dict(one.metrics),
            }
            for one in scores
        ]
        return {
            "step": self.trainer.state.step,
            "reason": self.ended.reason,
            "weights": self.weights,
            "best": self.trainer.state.best_score,
            "best_loss": self.trainer.state.best_loss,
            "scoring": scoring_settings(self.run),
            "unit": unit,  # of what it learned from: pair, text, document, image
            "scores": told,
        }

    def report_location(self) -> None:
        out = self.session.out
        told = (
            f"the model is in {out}, and {out / CARD_FILE} says what it is; {self.task.describe_model(out).next_step}"
        )
        told += f", look inside: attent look {out} {self.task.look_argument}".rstrip()
        self.session.emit(Note(text=told, step=self.ended.step))
