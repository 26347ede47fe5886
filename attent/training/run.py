"""A training run from settings to a scored model: `train` is what `attent train` calls.

Resolve the settings, prepare the data, train, choose the best weights, score them, write the model card. The training
loop is `loop`, what differs between tasks is `tasks`, and the folder's files are `checkpoint`.
"""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from attent import interop, settings
from attent.data.in_memory import CorpusInput, InMemoryCorpus, is_in_memory
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.loading import load_tokenizer
from attent.formatting import format_count, format_duration
from attent.models import Model, ModelConfig, build
from attent.models.folder import CONFIG_FILE, WEIGHTS_FILE, write_side_file
from attent.nn import get_attention_layers
from attent.nn.lora import LoRAError, add_lora, freeze_parameters
from attent.storage.hub import find_origin, locate_model
from attent.storage.machine import count_usable_cores
from attent.storage.manifest import explain_save_errors
from attent.text.tokenizer import Tokenizer
from attent.training import autoconfig, checkpoint, hardware
from attent.training import config as run_config
from attent.training.averaging import average_checkpoints
from attent.training.config import RunConfig, TrainConfig, TrainError, UserSettings
from attent.training.curves import CurveWriter
from attent.training.distributed import DistributedContext, explain_lost_process, init_distributed
from attent.training.events import LOG_FILE, Ended, Event, EventHandler, EventLog, Note, StopRequested, StopSignals
from attent.training.loop import StopReason, Trainer
from attent.training.progress import open_display
from attent.training.result import TrainResult
from attent.training.run_options import OPTION_PATHS, SETTING_TABLES, TrainOptions, accept_options
from attent.training.state import seed_everything, seed_torch
from attent.training.tasks import TaskName, get_task_class
from attent.training.tasks.base import RunContext, Task, find_new_head_parameters


@runtime_checkable
class RunCallback(Protocol):
    """An event handler that also receives the run's title and the events of earlier sessions."""

    def __call__(self, event: Event) -> None: ...

    def begin_run(self, title: str, history: Sequence[Event]) -> None: ...


@accept_options(TrainOptions)
def train(
    data: CorpusInput = (),
    *,
    out: str | Path,
    config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    callbacks: EventHandler | Sequence[EventHandler] = (),
    progress: bool = True,
    should_stop: Callable[[], bool] | None = None,
    force_exit: bool = False,
    **options: Any,
) -> TrainResult:
    """Train a model into the folder `out`, or resume the run that is there.

    >>> import attent
    >>> pairs = [(f"{number} dogs", f"{number} Hunde") for number in range(300)]
    >>> run = attent.train(pairs, src="en", tgt="de", out="runs/dogs", size="tiny", steps=2, progress=False)
    >>> run.step, run.stop_reason
    (2, 'steps')
    >>> translator = attent.Translator.load("runs/dogs")

    Real data has more pairs, and `minutes=10` instead of `steps`: attent.train("corpus.tsv", src="en", tgt="de",
    out="runs/en-de", minutes=10). Ctrl-C, or Kernel > Interrupt in a notebook, saves a checkpoint and returns; the same
    call resumes. The result has the `scores`, the `history` of the losses and metrics, and `to_frame()` for pandas.
    """
    folder = Path(out).expanduser()
    handlers = [callbacks] if callable(callbacks) else callbacks
    stored: dict[Path, InMemoryCorpus] = {}  # corpora that are stored in the run's folder
    corpora: dict[str, Any] = {"data": data, "valid": options.get("valid"), "test": options.get("test")}
    for name, value in corpora.items():
        if value is not None and is_in_memory(value):
            corpus = InMemoryCorpus(value, name, (options.get("src"), options.get("tgt")))
            value = folder.absolute() / checkpoint.STATE_FOLDER / "input" / corpus.name
            stored[value] = corpus
        names = (value,) if isinstance(value, str | Path) else value or ()
        corpora[name] = tuple(map(str, names)) or None
    if stored and (task := options.get("task") or "translate") != "translate":
        raise TrainError(f"`data` must be files for the task {task}, but is in memory; save it to a file")
    train_names = corpora.pop("data")
    init_from = options.get("init_from")
    options |= {**corpora, "init_from": None if init_from is None else str(init_from)}
    flags = {"data.train": train_names, **locate_settings(options), **(settings or {})}
    requested = run_config.read_user_settings(
        None if config is None else Path(config),
        {path: value for path, value in flags.items() if value is not None},
        overrides,
    )
    pin_models(requested)
    table = requested.get("train", {})
    with ExitStack() as stack:
        distributed = stack.enter_context(init_distributed(hardware.activate_device(table.get("device"))))
        stack.enter_context(explain_lost_process(distributed))
        if distributed.is_main:
            checkpoint.check_folder(folder, requested)
            stack.enter_context(checkpoint.lock_folder(folder))
            for path, corpus in stored.items():
                if not path.exists():
                    with explain_save_errors(folder, "run"):
                        corpus.write(path)
        distributed.barrier()
        signals = stack.enter_context(StopSignals(force_exit=force_exit))
        display = [stack.enter_context(open_display())] if progress and distributed.is_main else []
        session = TrainSession(
            out=folder,
            requested=requested,
            distributed=distributed,
            callbacks=[*display, *handlers] if distributed.is_main else [],
            signals=signals,
            should_stop=lambda: (
                signals.should_stop() or session.callback_error is not None or bool(should_stop and should_stop())
            ),
            open_files=stack,
        )
        result = session.run()
    if session.callback_error is not None:
        session.callback_error.add_note(f"The run is saved at step {result.step:,}; the same call resumes it.")
        raise session.callback_error
    return result


def pin_models(requested: UserSettings) -> None:
    """Replace the names of models on the hub by those of their commits."""
    data = requested.get("data", {})
    synthetic = data.get("synthetic", {})
    names = (requested, "init_from"), (data, "tokenizer_from"), (synthetic, "reverse"), (synthetic, "forward")
    for table, name in names:
        models = table.get(name)
        if isinstance(models, str):
            table[name] = find_origin(locate_model(models)) or models
        elif models:
            table[name] = [find_origin(locate_model(model)) or model for model in models]


def locate_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """{"steps": 20, "src": "en"} -> {"train.steps": 20, "data.src": "en"}"""
    paths = {field.name: f"{table}.{field.name}" for table, cls in SETTING_TABLES.items() for field in fields(cls)}
    paths |= OPTION_PATHS
    for name in flags.keys() - paths.keys():
        near = get_close_matches(name, paths)
        raise TrainError(f"unknown setting `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""))
    for name, value in flags.items():  # here an error names the flag, later only its table
        table, _, field_name = paths[name].rpartition(".")
        if value is not None and table in SETTING_TABLES:
            try:
                settings.from_dict(SETTING_TABLES[table], {field_name: value}, where="")
            except settings.SettingsError as error:
                raise TrainError(str(error).removeprefix(": ")) from None
    return {paths[name]: value for name, value in flags.items()}


@dataclass(kw_only=True)
class TrainSession:
    """One call of `train`, in one process."""

    out: Path
    requested: UserSettings
    distributed: DistributedContext
    callbacks: list[EventHandler]
    signals: StopSignals
    should_stop: Callable[[], bool]
    open_files: ExitStack  # the log
    early_events: list[Event] | None = field(default_factory=list)  # until the log is open
    new_parameters: list[str] = field(default_factory=list)  # heads that the pretrained model lacks
    unresolved: TrainConfig = field(default_factory=TrainConfig)  # as requested, with None where it is chosen
    start: float = field(default_factory=time.monotonic)
    callback_error: Exception | None = None  # raised when the run has been saved

    @property
    def state_dir(self) -> Path:
        return self.out / checkpoint.STATE_FOLDER

    def emit(self, event: Event) -> None:
        """Call all callbacks. If one raises after training has begun, the run is saved and stopped first."""
        for callback in self.callbacks:
            try:
                callback(event)
            except Exception as error:
                if not self.signals.can_save:
                    raise
                self.callback_error = self.callback_error or error
        if self.early_events is not None:
            self.early_events.append(event)

    def run(self) -> TrainResult:
        run, task, model = self.set_up()
        trainer = self.build_trainer(run, task, model)
        if not checkpoint.list_steps(self.state_dir):
            try:
                run = self.choose_threads_and_steps(run, task, trainer)
            except StopRequested:
                return self.build_result(task, trainer, "stopped")
        self.restore_and_open_log(trainer, f"{self.out} ({task.title})" if task.title else str(self.out))
        if (result := self.rescore_if_finished(run, task, trainer)) is not None:
            return result
        self.signals.can_save = True
        ended = trainer.run()
        if ended.reason == "stopped":
            return self.build_result(task, trainer, "stopped")
        try:
            self.write_results(run, task, trainer, ended, self.choose_weights(trainer, ended))
        except (StopRequested, SearchCancelled):
            self.distributed.barrier()  # the other ranks wait in `write_results`
            return self.build_result(task, trainer, "stopped")
        return self.build_result(task, trainer, ended.reason)

    def build_result(self, task: Task, trainer: Trainer, reason: StopReason) -> TrainResult:
        result = TrainResult(out=self.out, step=trainer.state.step, stop_reason=reason)
        if reason != "stopped":
            scores = tuple(self.read_run_summary(trainer.state.step).get("scores", ()))
            return replace(result, scores=scores, python_example=task.describe_model(self.out).python_example)
        again = shlex.join(["attent", "train", "--out", str(self.out)])
        again = again if self.distributed.world_size == 1 else "the same command"
        again = again if self.distributed.is_main else ""
        return replace(result, exit_code=self.signals.exit_code, resume_command=again)

    def set_up(self) -> tuple[RunConfig, Task, Model]:
        """Return the resolved run (as it was resolved when it began, if this resumes it), its data and its model."""
        is_new = not checkpoint.list_steps(self.state_dir)  # without a checkpoint there is nothing to resume
        path = self.state_dir / checkpoint.REQUESTED_FILE
        previous = settings.read_json(path) if path.exists() else self.requested
        resolved = None if is_new else run_config.read_run(self.out / checkpoint.RUN_FILE)
        has_model = (self.out / WEIGHTS_FILE).exists()  # possibly before the first checkpoint
        if resolved or has_model or not checkpoint.names_data(self.requested):
            tables = settings.to_dict(resolved) if resolved else {}
            self.requested = run_config.merge_with_previous(self.requested, previous, tables)
        if resolved is None:
            run = run_config.build_run_config(self.requested, "settings")
            if self.distributed.device.type == "cpu" and not (run.init_from or run.train.steps or run.train.minutes):
                run = replace(run, train=replace(run.train, minutes=get_task_class(run.task).cpu_minutes))
            if run.data.augment is None and "data.augment" in get_task_class(run.task).used_settings:
                device, finetune = self.distributed.device.type, run.init_from is not None
                chosen = autoconfig.choose_augmentation(device, finetune=finetune)
                run = replace(run, data=replace(run.data, augment=chosen))
            self.unresolved = run.train
            self.write_json(self.requested, path)  # first: it marks all other files in the folder as this run's
        else:
            run = apply_changes(resolved, previous, self.requested)
        if threads := run.train.threads:
            torch.set_num_threads(threads)
            if threads > (cores := count_usable_cores()) and self.distributed.device.type == "cpu":
                problem = f"this run has {threads:,} threads, but this machine has {format_count(cores, 'core')}"
                choice = "the threads stay, so that the weights stay the same, but steps are slow"
                advice = f"with --threads {cores} they are faster, and the weights differ by rounding"
                self.emit(Note(text=f"{problem}: {choice}; {advice}", level="warning"))
        seed_everything(run.train.seed)
        pretrained = load_initial_model(run.init_from, run.task) if run.init_from and is_new else None
        if pretrained is not None:
            run = get_task_class(run.task).adapt_run(run, self.requested, pretrained.config, self.emit)
        preloading = hardware.preload_libraries(self.distributed.device)
        try:
            task = self.prepare_task(run, is_new, pretrained)
        finally:
            preloading.join()  # before speed is measured; a process that exits during the import is aborted
        if is_new:
            run, model = self.resolve_settings(run, task, pretrained)
            self.record_new_heads(model, pretrained, run)
        else:
            assert run.model is not None
            model = build(run.model)
            if (heads := self.state_dir / checkpoint.NEW_HEADS_FILE).exists():
                self.new_parameters = settings.read_json(heads)["new"]
        self.write_run(run)
        self.write_json(self.requested, path)
        return run, task, model

    def choose_threads_and_steps(self, run: RunConfig, task: Task, trainer: Trainer) -> RunConfig:
        """Choose the number of CPU threads and, with `--minutes`, the number of steps by measuring real steps."""
        train, distributed = run.train, self.distributed
        if distributed.device.type == "cpu" and distributed.world_size == 1:
            if busy := hardware.describe_load():
                self.emit(Note(text=busy))
            if train.threads is None and torch.get_num_threads() > 1:
                threads, seconds = hardware.pick_threads(lambda: trainer.measure_step_seconds(0.5, min_steps=1))
                listed = ", ".join(f"{count} in {mean:.2f} s" for count, mean in seconds.items())
                self.emit(Note(text=f"threads: {threads} (a step with {listed})"))
                train = replace(train, threads=threads)
        if train.minutes and self.unresolved.steps is None:
            self.emit(Note(text=f"{'compiling and ' if trainer.has_slow_start else ''}measuring steps ..."))
            is_requested = "minutes" in self.requested.get("train", {})
            measure_seconds = min(60.0, 2 * train.minutes) if is_requested else autoconfig.MEASURE_SECONDS
            step_seconds = trainer.measure_step_seconds(measure_seconds)
            scoring = task.estimate_scoring_seconds(trainer.gather_model(), run) if distributed.is_main else 0.0
            left = distributed.broadcast([60 * train.minutes - (time.monotonic() - self.start)])[0]
            scoring = distributed.broadcast([scoring])[0]
            steps = autoconfig.plan_steps(left, step_seconds, scoring, train.valid_share)
            note = "" if is_requested else " at most (the default on a CPU; --minutes changes it)"
            if not is_requested and run.train.steps:
                steps = min(steps, run.train.steps)
            unresolved = replace(self.unresolved, steps=steps, threads=train.threads, precision=train.precision)
            train = task.fill_train_config(replace(run, train=unresolved))
            plan = f"{steps:,} steps of {step_seconds:.2f} s, about {format_duration(scoring)} for the final scores"
            self.emit(Note(text=f"{train.minutes:g} minutes{note}: {plan}"))
        if train != run.train:
            run = replace(run, train=train)
            trainer.config = train
            self.write_run(run)
        if self.unresolved.minutes and self.unresolved.steps is None:
            for sentence in list(task.describe_choices(run, ""))[1:]:
                self.emit(Note(text=sentence))
        return run

    def write_run(self, run: RunConfig) -> None:
        if self.distributed.is_main:
            with explain_save_errors(self.out, "run"):
                write_side_file(self.out, checkpoint.RUN_FILE, settings.to_toml(run).encode())

    def write_json(self, data: Mapping[str, Any], path: Path) -> None:
        if self.distributed.is_main:
            with explain_save_errors(self.out, "run"):
                settings.write_json(data, path)

    def record_new_heads(self, model: Model, pretrained: Model | None, run: RunConfig) -> None:
        """Report the new heads, and store their names for resuming, when the pretrained model may be gone."""
        if pretrained is None:
            return
        self.new_parameters = list(find_new_head_parameters(model, pretrained))
        if self.new_parameters:
            heads = ", ".join(dict.fromkeys(name.partition(".")[0] for name in self.new_parameters))
            self.emit(Note(text=f"new heads: {heads}; all other weights are from {run.init_from}"))
            self.write_json({"new": self.new_parameters}, self.state_dir / checkpoint.NEW_HEADS_FILE)

    def prepare_task(self, run: RunConfig, is_new: bool, pretrained: Model | None) -> Task:
        """Tokenize and store the data on the main rank; the other ranks wait and load it."""
        if not self.distributed.is_main:
            self.distributed.barrier()
        data_dir, device = self.state_dir / "data", self.distributed.device
        context = RunContext(
            data_dir=data_dir, device=device, report=self.emit, should_stop=self.should_stop, is_new=is_new
        )
        task = get_task_class(run.task)(run, self.load_tokenizer(run, is_new, pretrained), context)
        if self.distributed.is_main:
            if task.tokenizer is not None:
                with explain_save_errors(self.out, "tokenizer"):
                    task.tokenizer.save(self.out)
            self.distributed.barrier()
        return task

    def load_tokenizer(self, run: RunConfig, is_new: bool, pretrained: Model | None) -> Tokenizer | None:
        """The tokenizer of this run or of the pretrained model; None: it will be trained, or the task needs none."""
        task = get_task_class(run.task)
        if "data.tokenizer" not in task.used_settings:
            return None
        languages = run.data.src, run.data.tgt
        if not is_new or not self.distributed.is_main:
            return Tokenizer.load(self.out).bind_languages(*languages)
        if isinstance(pretrained, task.pretrained_classes):
            return None
        if run.init_from and run.data.tokenizer_from:
            raise TrainError("`data.tokenizer_from` has no effect with --from, which has a tokenizer; leave it out")
        model = run.init_from or run.data.tokenizer_from
        return load_tokenizer(locate_model(model), *languages) if model else None

    def resolve_settings(self, run: RunConfig, task: Task, pretrained: Model | None) -> tuple[RunConfig, Model]:
        """Choose every setting that is None, report the reasons, and build the model."""
        config: ModelConfig
        if pretrained is not None:
            config = task.build_finetune_config(pretrained, self.requested, run.init_from or "")
            size, reason = run.size, f"that of {run.init_from}"
        else:
            size, config, reason = task.choose_model(run, self.requested)
        if "data.layout" in task.used_settings:
            layout = autoconfig.choose_layout(run.data.layout, config, self.distributed.device)
            run = replace(run, data=replace(run.data, layout=layout))
        run = replace(run, size=size, model=config)
        chosen = task.fill_train_config(run)
        # The precision depends on a measurement, which may differ between ranks.
        is_bf16 = self.distributed.broadcast([float(chosen.precision == "bfloat16")])[0]
        run = replace(run, train=replace(chosen, precision="bfloat16" if is_bf16 else "float32"))
        sentences = list(task.describe_choices(run, reason))
        is_planned = run.train.minutes and self.unresolved.steps is None  # then the schedule is not known yet
        for sentence in sentences[:1] if is_planned else sentences:
            self.emit(Note(text=sentence))
        seed_torch(run.train.seed, 0)
        return run, task.build_model(config, pretrained)

    def build_trainer(self, run: RunConfig, task: Task, model: Model) -> Trainer:
        if run.train.lora and not run.init_from:
            raise TrainError("`train.lora` needs a pretrained model, but there is none; name one with --from")
        if run.train.keep_adapter and not run.train.lora:
            raise TrainError("`train.keep_adapter` needs `train.lora`, which is 0; give its rank, such as --lora 16")
        try:
            if run.train.lora:
                seed_torch(run.train.seed, 1)
                add_lora(model, run.train.lora, self.new_parameters)
            if run.train.freeze:
                freeze_parameters(model, run.train.freeze)
        except LoRAError as error:
            raise TrainError(str(error)) from error
        batches = task.build_train_batches(run)
        if warning := batches.describe_too_long(0):
            self.emit(Note(text=warning, level="warning"))
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
            self.should_stop,
            task.fingerprints,
            make_objective=task.get_objective_factory(run),
            extra_files=task.extra_files,
            base_model=run.init_from or "",
        )

    def restore_and_open_log(self, trainer: Trainer, title: str) -> None:
        """Load the newest intact checkpoint, if there is one, and continue the log from its step."""
        saved = checkpoint.load_newest(self.state_dir, trainer.warn)
        if saved is not None:
            trainer.load_checkpoint(saved)
            if finished := self.read_run_summary(trainer.state.step):  # averaged weights may have become the best
                trainer.state.best_score, trainer.state.best_loss = finished["best"], finished["best_loss"]
            elif trainer.state.best_step == saved.step:  # perhaps killed before it was exported
                trainer.export_model()
            self.emit(Note(text=f"resuming {self.out} from step {saved.step:,}", step=saved.step))
        if self.distributed.is_main:
            self.open_log(trainer, title)
        self.early_events = None

    def open_log(self, trainer: Trainer, title: str) -> None:
        step = trainer.state.step
        log = self.open_files.enter_context(closing(EventLog(self.out / LOG_FILE, from_step=step)))
        history = list(log.history)
        for event in (self.early_events or []) if not step else ():
            log(event)
        for callback in self.callbacks:
            if isinstance(callback, RunCallback):
                callback.begin_run(title, history)
        self.callbacks += [log, CurveWriter(self.out / checkpoint.CURVES_FILE, history)]

    def read_run_summary(self, step: int) -> dict[str, Any]:
        """The summary that was written when the run was complete; empty if that was not at this step."""
        path = self.state_dir / checkpoint.FINISHED_FILE
        finished = settings.read_json(path) if path.exists() else {}
        return finished if finished.get("step") == step else {}

    def rescore_if_finished(self, run: RunConfig, task: Task, trainer: Trainer) -> TrainResult | None:
        """Score a complete run again if its test sets or search options have changed; None if it is not complete, or
        if its settings ask for more steps."""
        finished = self.read_run_summary(trainer.state.step)
        if not finished or not trainer.get_stop_reason():
            return None
        advice = "raise --steps (and --patience) to continue"
        self.emit(Note(text=f"{self.out}: this run is complete at step {trainer.state.step:,}; {advice}"))
        if finished.get("scoring") != get_scoring_settings(run):
            ended = Ended(step=trainer.state.step, reason=finished["reason"], seconds=0)
            self.write_results(run, task, trainer, ended, finished["weights"])
        return self.build_result(task, trainer, finished["reason"])

    def choose_weights(self, trainer: Trainer, ended: Ended) -> str:
        """Keep the average of the last checkpoints if it scores better than the best; return which are exported."""
        config, best_step = trainer.config, trainer.state.best_step
        exported = f"best, step {best_step:,}" if best_step else f"last, step {ended.step:,}"
        steps = checkpoint.list_steps(self.state_dir)[-config.average :]
        # An average of LoRA's factors is not the factors of an average.
        if len(steps) < 2 or config.lora or config.average < 2 or trainer.valid_batches is None:
            return exported
        try:
            weights = average_checkpoints([checkpoint.checkpoint_path(self.state_dir, step) for step in steps])
        except checkpoint.CheckpointError as error:
            trainer.warn(f"{error}. Checkpoint averaging is skipped")
            return exported
        trainer.load_weights(weights)
        previous = trainer.state.best_score
        event = trainer.evaluate_and_update_best(trainer.gather_model())
        metric = str(config.metric) if trainer.evaluator else "loss"
        score = trainer.state.best_score if event.best else None
        self.emit(Note(text=describe_average(len(steps), metric, score, previous), step=trainer.state.step))
        if not event.best:
            return exported
        trainer.export_model()
        return f"average of the last {len(steps)} checkpoints"

    def write_results(self, run: RunConfig, task: Task, trainer: Trainer, ended: Ended, weights_label: str) -> None:
        """Score the exported weights, and write analysis, card and summary on the main rank."""
        if self.distributed.is_main:
            from attent.training import model_card

            out, card_file = self.out, self.out / checkpoint.CARD_FILE
            if not (out / CONFIG_FILE).exists():
                problem = "no validation gave a finite loss, so that there is no model"
                raise TrainError(f"{out}: {problem}; lower --lr or raise --warmup, in another --out")
            model = interop.load(out).to(self.distributed.device)
            self.emit(Note(text="scoring the model ...", step=ended.step))
            results = []
            for result in task.score_model(model, run):
                results.append(result)
                self.emit(Note(text=f"{result.split} {result.name}: {result.summary}", step=ended.step))
            task.write_analysis(model, out)
            model_card.write_card(model_card.build_card(task, run, trainer, results, ended, weights_label), card_file)
            state, shown, unit = trainer.state, ("name", "split", "num_examples"), {"unit": task.unit}
            scores = [
                {name: getattr(result, name) for name in shown} | unit | {"metrics": dict(result.metrics)}
                for result in results
            ]
            finished: dict[str, Any] = {"step": state.step, "reason": ended.reason, "weights": weights_label}
            finished |= {"best": state.best_score, "best_loss": state.best_loss, "scoring": get_scoring_settings(run)}
            finished |= {**unit, "scores": scores}
            settings.write_json(finished, self.state_dir / checkpoint.FINISHED_FILE)
            text = f"model: {out}; card: {card_file}; {task.describe_model(out).next_step}"
            if get_attention_layers(trainer.model):
                text += f"; inspect it: attent look {out} {task.look_example_input}".rstrip()
            self.emit(Note(text=text, step=ended.step))
        self.distributed.barrier()


def load_initial_model(path: str, task: TaskName) -> Model:
    """Load the model of `--from`, which must be of the class that the task trains."""
    model = interop.load(path, dtype=torch.float32)  # an optimizer cannot train half-precision weights
    expected, kind = get_task_class(task).model_class, interop.get_model_kind(model)
    is_other = not isinstance(model, (expected, *get_task_class(task).pretrained_classes))
    if is_other or (task in ("translate", "spans") and kind is not expected):
        names = [interop.MODEL_DESCRIPTIONS[each][0] for each in (expected, kind)]
        raise TrainError(f"{path}: must be {names[0]} for --task {task}, but is {names[1]}; give another --from")
    damaged = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if damaged:
        problem = f"its weights must be finite, but {len(damaged)} of its tensors contain NaN or infinity"
        raise TrainError(f"{path}: {problem}, such as `{damaged[0]}`; give another --from")
    return model.float()  # half-precision weights would lose most updates; products are in `train.precision`


def apply_changes(run: RunConfig, previous: UserSettings, requested: UserSettings) -> RunConfig:
    """The resolved run with the settings that may differ when it is resumed."""
    tables = settings.to_dict(run)
    changes = run_config.diff_settings(previous, requested)
    for path, (_, value) in changes.items():
        if value is not None:
            run_config.set_path(tables, path.split("."), value)
            share = path.replace("_every", "_share")
            if path in ("train.valid_every", "train.save_every") and share not in changes:  # without a limit
                run_config.set_path(tables, share.split("."), 0.0)
    return settings.from_dict(type(run), tables, where=checkpoint.RUN_FILE)


def get_scoring_settings(run: RunConfig) -> dict[str, Any]:
    """The settings that influence the final scores, besides the model."""
    return {"decode": settings.to_dict(run.decode), "test": list(run.data.test)}


def describe_average(num_checkpoints: int, metric: str, score: float | None, previous: float | None) -> str:
    """Compare averaged weights to the best before; `score` is None if they are no better, `previous` if there is none.
    Scores of losses are negative."""
    result = "no better" if score is None else f"{metric} {abs(score):.2f}"
    before = "" if previous is None else f" (best before: {abs(previous):.2f})"
    return f"average of the last {num_checkpoints} checkpoints: {result}{before}"
