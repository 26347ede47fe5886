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
from attent.cli.watch import Watch
from attent.data.cache import try_locked
from attent.decode.translate import Stopped
from attent.models import CausalLM, Encoder, Model, ModelConfig, Seq2Seq, Vision, build
from attent.models.folder import explained
from attent.text.tokenizer import LAYOUTS, Tokenizer
from attent.train import chance, checkpoint, heads
from attent.train.config import (
    HARMLESS,
    READ_BY,
    Asked,
    Run,
    Task,
    TrainError,
    changes,
    check,
    completed,
    flat,
    read_asked,
    read_run,
)
from attent.train.curves import Curves
from attent.train.events import Ended, Event, Note
from attent.train.hardware import pick_device
from attent.train.log import Log
from attent.train.log import read as read_log
from attent.train.loop import Stopping, Training
from attent.train.lora import add_lora, freeze
from attent.train.means import mean_weights
from attent.train.task import Material, Outcome, Place
from attent.train.team import Team, joined, missed
from attent.train.texts import within_reach

RUN, STATE, ASKED, FINISHED, LOG, CURVES, CARD = (
    "run.toml", "state", "asked.json", "finished.json", "log.jsonl", "curves.svg", "card.md",
)  # fmt: skip
BEGUN_WITH = "begun.json"
OURS = {"config.json", "model.safetensors", "manifest.json", "run.toml", "card.md", "log.jsonl"}
MODEL = {"config.json", "model.safetensors", "manifest.json"}
BEGUN = {name for layout in LAYOUTS for name in (*layout.needs, *layout.may)} | {  # before anything was learned
    RUN, LOG, CURVES, "curves.png", "tensorboard",
}  # fmt: skip
LISTED = 8  # settings that are named when too many differ
INTERRUPTED, TERMINATED = 130, 143
# The kind of model that a task trains, and what one calls it.
MODELS: dict[Task, type[Model]] = {
    "translate": Seq2Seq, "lm": CausalLM, "mlm": Encoder, "spans": Seq2Seq, "classify": Encoder, "images": Vision,
}  # fmt: skip
CALLED: dict[type[Model], str] = {
    Seq2Seq: "a model of encoder and decoder",
    CausalLM: "a language model",
    Encoder: "an encoder of text",
    Vision: "an encoder of images",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was typed."""

    out: Path
    file: Path | None = None
    flags: Mapping[str, Any]
    overrides: Sequence[str] = ()
    quiet: bool = False


def start(request: Request) -> int:
    """The command: exit code 0 when the run is complete, 130 or 143 when it was asked to stop and has saved."""
    asked = read_asked(request.file, request.flags, request.overrides)
    out = request.out.expanduser()
    kind = asked.get("train", {}).get("device") if isinstance(asked.get("train"), dict) else None
    with ExitStack() as stack:
        team = stack.enter_context(joined(pick_device(kind)))
        stack.enter_context(missed(team))
        if team.leads:
            check_folder(out, asked)
            stack.enter_context(alone(out))
        team.wait()
        watch = stack.enter_context(Watch(quiet=request.quiet)) if team.leads else None
        signals = stack.enter_context(Signals())
        return Session(out, asked, team, watch, signals).run()


# ---- the folder ------------------------------------------------------------------------------------------------------


def check_folder(out: Path, asked: Asked) -> None:
    """Refuse a folder that cannot be written to, that holds something else, or that a changed command would spoil."""
    if out.exists() and not out.is_dir():
        raise TrainError(f"{out}: is a file; give another --out, a folder that attent will make")
    known = out / STATE / ASKED
    names = {path.name.removesuffix(".new") for path in out.iterdir()} if out.is_dir() else set()
    if known.exists() and (names & MODEL or checkpoint.steps(out / STATE)):
        check_changes(out, settings.read_json(known), asked)
    elif names - {STATE} - (BEGUN if known.exists() else set()) or checkpoint.steps(out / STATE):
        what = "a model already" if names & OURS else f"other files ({', '.join(sorted(names)[:3])})"
        raise TrainError(
            f"{out}: holds {what}, and nothing there is overwritten; give another --out"
            + (f", or train it further with --from {out}" if names & OURS else "")
        )
    elif not known.exists() and not asked.get("data", {}).get("train"):
        raise TrainError("there is nothing to train on: name your text with --data, such as --data corpus.tsv")
    with explained(out, "run"):
        (out / STATE).mkdir(parents=True, exist_ok=True)
        probe = out / STATE / ".probe"
        probe.write_bytes(b"")
        probe.unlink()


def check_changes(out: Path, before: Asked, asked: Asked) -> None:
    """A run goes on with the settings that it began with; what changes nothing that was learned may differ."""
    resolved = dict(flat(settings.to_dict(read_run(out / RUN)))) if (out / RUN).exists() else {}
    differ = changes(before, completed(asked, before))
    refused = {
        path: (old, new)
        for path, (old, new) in differ.items()
        if path not in HARMLESS and not (old is None and resolved.get(path) == new)  # it only says what was chosen
    }
    if refused:
        listed = [f"{path}: {_said(old)} -> {_said(new)}" for path, (old, new) in sorted(refused.items())]
        told = "; ".join(listed[:LISTED]) + (f"; and {len(listed) - LISTED} more" if len(listed) > LISTED else "")
        raise TrainError(
            f"{out}: holds a run with other settings ({told}); give those of then to go on with it, "
            "or another --out for a new run"
        )


def _said(value: Any) -> str:
    return "(not said)" if value is None else json.dumps(value, ensure_ascii=False)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    with try_locked(out / STATE / ".lock") as held:
        if not held:
            raise TrainError(f"{out}: another attent is training into this folder; wait for it, or give another --out")
        yield


# ---- signals ---------------------------------------------------------------------------------------------------------


class Signals:
    """Once there is something to save, the first Ctrl-C or SIGTERM asks to save and leave; a second Ctrl-C, and any
    before that, leaves at once."""

    def __init__(self) -> None:
        self.caught, self.saves = 0, False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        return bool(self.caught)

    @property
    def code(self) -> int:
        return TERMINATED if self.caught == signal.SIGTERM else INTERRUPTED

    def _catch(self, number: int, _: FrameType | None) -> None:
        if not self.saves:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(TERMINATED)
        if self.caught and number == signal.SIGINT:
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # the cursor, which the display had hidden
            os._exit(INTERRUPTED)
        self.caught = self.caught or number


# ---- the run ---------------------------------------------------------------------------------------------------------


class Session:
    """One call of the command, in one process."""

    def __init__(self, out: Path, asked: Asked, team: Team, watch: Watch | None, signals: Signals) -> None:
        self.out, self.asked, self.team, self.signals = out, asked, team, signals
        self.watch = watch
        self.listeners: list[Callable[[Event], None]] = [watch] if watch else []
        self.notes: list[Event] = []  # told before there was a log to keep them
        self.new: list[str] = []  # parameters that the model to begin from does not have

    def tell(self, event: Event) -> None:
        """Only the first process talks."""
        for listener in self.listeners:
            listener(event)
        if len(self.listeners) < 2:
            self.notes.append(event)

    def run(self) -> int:
        run, material, model = self.began()
        if self.watch is not None:
            self.watch.title = f"{self.out} ({material.title})" if material.title else str(self.out)
        training = self.training(run, material, model)
        self.resume(training)
        if self.finished(training):
            return self.scored_anew(run, material, training)
        self.signals.saves = True
        ended = training.run()
        if ended.reason == "stopped":
            return self.leave()
        try:
            final = Final(self, run, material, training, ended)
            final.choose()
            final.write()
        except (Stopping, Stopped):
            self.team.wait()  # the others wait for the first to write
            return self.leave()
        return 0

    def began(self) -> tuple[Run, Material, Model]:
        """The run as it was resolved when it began or, for a new one, as it is resolved now; its data and its model."""
        known = self.out / RUN
        fresh = not checkpoint.steps(self.out / STATE)  # killed before its first checkpoint, it begins anew
        path = self.out / STATE / ASKED
        before = settings.read_json(path) if path.exists() else self.asked
        self.asked = completed(self.asked, before)
        if not fresh:
            run = gone_on(read_run(known), before, self.asked)
        else:
            run = check(self.asked, "--set")
            if self.team.leads:
                with explained(self.out, "run"):
                    settings.write_json(self.asked, path)  # first of all: it says that what else is here is this run's
        if run.train.threads:
            torch.set_num_threads(run.train.threads)
        chance.begin(run.train.seed)
        loaded = opened(run.start, run.task) if run.start and fresh else None
        if loaded is not None and run.task not in ("translate", "images"):
            run = within_reach(run, self.asked, loaded.config, self.tell)
        material = self.prepared(run, fresh)
        if fresh:
            run, model = self.resolved(run, material, loaded)
            self.remember(model, loaded, run)
        else:
            assert run.model is not None
            model = build(run.model)
            if (begun := self.out / STATE / BEGUN_WITH).exists():
                self.new = settings.read_json(begun)["new"]
        if self.team.leads:
            with explained(self.out, "run"):
                settings.write_toml(run, known)
                settings.write_json(self.asked, self.out / STATE / ASKED)
        return run, material, model

    def remember(self, model: Model, loaded: Model | None, run: Run) -> None:
        """Which heads are new: told now, and known again when the run goes on, where --from may be gone."""
        if loaded is None:
            return
        self.new = list(heads.new(model, loaded))
        if told := heads.told(model, self.new, run.start or ""):
            self.tell(Note(text=told))
        if self.new and self.team.leads:
            with explained(self.out, "run"):
                settings.write_json({"new": self.new}, self.out / STATE / BEGUN_WITH)

    def prepared(self, run: Run, fresh: bool) -> Material:
        """The first process makes what is made once; the others find it done."""
        if not self.team.leads:
            self.team.wait()
        place = Place(
            folder=self.out / STATE / "data", device=self.team.device, tell=self.tell, stop=self.signals.asked
        )
        material = material_of(run, self.tokenizer(run, fresh), place)
        if self.team.leads:
            if material.tokenizer is not None:
                with explained(self.out, "tokenizer"):
                    material.tokenizer.save(self.out)
            self.team.wait()
        return material

    def tokenizer(self, run: Run, fresh: bool) -> Tokenizer | None:
        """That of this run, or of the model to begin from; None: it is still to be learned, or none is needed."""
        if run.task == "images":
            return None
        if not fresh or not self.team.leads:
            return Tokenizer.load(self.out)
        return Tokenizer.load(Path(run.start).expanduser()) if run.start else None

    def resolved(self, run: Run, material: Material, loaded: Model | None) -> tuple[Run, Model]:
        """With everything chosen that nobody said, and the reasons told."""
        if run.task in READ_BY["data.layout"]:
            layout = run.data.layout or ("bucketed" if self.team.device.type == "cpu" else "packed")
            run = replace(run, data=replace(run.data, layout=layout))
        config: ModelConfig
        if loaded is not None:
            config = material.kept(loaded, self.asked, run.start or "")
            size, why = run.size, f"that of {run.start}"
        else:
            size, config, why = material.sized(run, self.asked)
        train = material.recipe(run, size, config, further=loaded is not None)
        halved = self.team.told([float(train.precision == "bfloat16")])[0]  # measured: others may find it otherwise
        train = replace(train, precision="bfloat16" if halved else "float32")
        run = replace(run, size=size, model=config, train=train)
        for sentence in material.told(run, why):
            self.tell(Note(text=sentence))
        chance.fix(run.train.seed, 0)
        return run, material.begin(config, loaded)

    def training(self, run: Run, material: Material, model: Model) -> Training:
        if run.train.lora and not run.start:
            raise TrainError(
                "`train.lora` needs a model to begin from (--from): beside random weights nothing is learned"
            )
        if run.train.lora:
            chance.fix(run.train.seed, 1)
            add_lora(model, run.train.lora, self.new)
        if run.train.freeze:
            freeze(model, run.train.freeze)
        batches = material.batches(run)
        if long := batches.too_long(0):
            self.tell(Note(text=long, weight="warning"))
        return Training(
            model,
            material.tokenizer,
            run.train,
            batches,
            material.valid(run),
            material.judge(run),
            self.out,
            self.team,
            self.tell,
            self.signals.asked,
            material.identity,
            material.objective,
        )

    def resume(self, training: Training) -> None:
        """From the newest checkpoint that is whole, if there is one; then the log goes on from there."""
        found = checkpoint.newest(self.out / STATE, training.warn)
        if found is not None:
            training.fill(found)
            if done := self.done(training):  # the mean of checkpoints may have become the best
                training.marks.best, training.marks.best_loss = done["best"], done["best_loss"]
            self.tell(Note(text=f"going on from update {found.step:,} of {self.out}", step=found.step))
        if self.team.leads:
            step = training.marks.step
            log = Log(self.out / LOG, from_step=step)
            before = read_log(self.out / LOG)
            for note in self.notes if not step else ():
                log(note)
            if self.watch is not None:
                self.watch.recall(before)
            self.listeners += [log, Curves(self.out / CURVES, before)]
            if training.config.tensorboard:
                from attent.cli.board import Board

                self.listeners.append(Board(self.out / "tensorboard", step))

    def finished(self, training: Training) -> bool:
        """Whether all is done already."""
        if not self.done(training) or not training.over():
            return False
        self.tell(
            Note(
                text=f"{self.out}: this run is complete, after {training.marks.step:,} updates; "
                "to train it further, raise --steps (and --patience)"
            )
        )
        return True

    def done(self, training: Training) -> dict[str, Any]:
        """What was written at the end of this very run, or nothing."""
        path = self.out / STATE / FINISHED
        told = settings.read_json(path) if path.exists() else {}
        return told if told.get("step") == training.marks.step else {}

    def scored_anew(self, run: Run, material: Material, training: Training) -> int:
        """A run that is complete, asked for other test sets or another search: only the scores are made again."""
        before = self.done(training)
        if before.get("asked") != scoring(run):
            final = Final(
                self, run, material, training, Ended(step=training.marks.step, reason=before["reason"], seconds=0)
            )
            final.weights = before["weights"]
            final.write()
        return 0

    def leave(self) -> int:
        if self.team.leads:
            again = shlex.join(["attent", "train", "--out", str(self.out)])
            command = again if self.team.size == 1 else "the same command"
            print(f"attent: saved; go on with: {command}", file=sys.stderr)
        return self.signals.code


def material_of(run: Run, tokenizer: Tokenizer | None, place: Place) -> Material:
    """The data of a run, made ready by those who know its task."""
    if run.task == "images":
        from attent.train import images

        return images.prepare(run, tokenizer, place)
    if run.task == "translate":
        from attent.cli import translation

        return translation.prepare(run, tokenizer, place)
    from attent.train import texts

    return texts.prepare(run, tokenizer, place)


def opened(where: str, task: Task) -> Model:
    """The model to begin from, which must be of the kind that the task trains."""
    model = interop.load(where)
    if not isinstance(model, MODELS[task]):
        others = " or ".join(f"--task {name}" for name, kind in MODELS.items() if isinstance(model, kind))
        raise TrainError(
            f"{where}: must be {CALLED[MODELS[task]]} for --task {task}, but is {CALLED[type(model)]}; train it "
            f"further with {others}, or give another --from"
        )
    return model


def gone_on(run: Run, before: Asked, asked: Asked) -> Run:
    """The resolved run with what harmlessly differs now."""
    tables = settings.to_dict(run)
    for path, (_, now) in changes(before, asked).items():
        if now is not None:
            table, _, name = path.partition(".")
            tables[table][name] = now
    return settings.from_dict(type(run), tables, where=RUN)


def scoring(run: Run) -> dict[str, Any]:
    """All that decides the scores at the end, but for the model."""
    return {"decode": settings.to_dict(run.decode), "test": list(run.data.test)}


# ---- the end ---------------------------------------------------------------------------------------------------------


class Final:
    """Which weights are the best, what they score, and the card."""

    def __init__(self, session: Session, run: Run, material: Material, training: Training, ended: Ended) -> None:
        self.session, self.run, self.material, self.training, self.ended = session, run, material, training, ended
        best = training.marks.best_step
        self.weights = f"best, update {best:,}" if best else f"last, update {ended.step:,}"

    def choose(self) -> None:
        """The mean of the last checkpoints, where it is better than the best of them."""
        training, config = self.training, self.training.config
        steps = training.known()[-config.average :]
        if len(steps) < 2 or config.ema or config.lora or config.average < 2 or training.valid is None:
            return  # a running mean is one already; and a mean of factors is not the factors of a mean
        try:
            means = mean_weights([checkpoint.path_of(self.session.out / STATE, step) for step in steps])
        except checkpoint.CheckpointError as problem:
            training.warn(f"{problem}. No mean of the last checkpoints is tried")
            return
        training.load_weights(means)
        before = training.marks.best
        event = training.judged(training.plain())
        metric = config.metric if training.judge else "loss"
        if event.best:
            training.publish()
            self.weights = f"mean of the last {len(steps)} checkpoints"
        figures = f"{metric} {abs(training.marks.best or 0):.2f}" if event.best else "no better"
        told = f"the mean of the last {len(steps)} checkpoints: {figures} (best before: {abs(before or 0):.2f})"
        self.session.tell(Note(text=told, step=training.marks.step))

    def write(self) -> None:
        """The scores, the card, and that all is done. The first process writes, the others wait for it."""
        if self.session.team.leads:
            from attent.cli.carding import card_of
            from attent.train import card

            outcomes = self.outcomes()
            self.material.after(interop.load(self.session.out).to(self.session.team.device), self.session.out)
            card.write(card_of(self, outcomes), self.session.out / CARD)
            settings.write_json(self.finished(outcomes), self.session.out / STATE / FINISHED)
            self.say_where()
        self.session.team.wait()

    def outcomes(self) -> list[Outcome]:
        """What the weights in the folder score on every set."""
        model = interop.load(self.session.out).to(self.session.team.device)
        found = []
        for outcome in self.material.outcomes(model, self.run):
            found.append(outcome)
            self.session.tell(Note(text=f"{outcome.part} {outcome.name}: {outcome.told}", step=self.ended.step))
        return found

    def finished(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """What a later call needs to know of this end."""
        unit = self.material.words(self.session.out).unit
        told = [
            {"name": one.name, "kind": one.part, "pairs": one.count, "unit": unit, **one.figures} for one in outcomes
        ]
        return {
            "step": self.training.marks.step,
            "reason": self.ended.reason,
            "weights": self.weights,
            "best": self.training.marks.best,
            "best_loss": self.training.marks.best_loss,
            "asked": scoring(self.run),
            "unit": unit,  # of what it learned from: pair, text, document, image
            "scores": told,
        }

    def say_where(self) -> None:
        out = self.session.out
        told = f"the model is in {out}, and {out / CARD} says what it is; {self.material.words(out).try_it}"
        told += f", look inside: attent look {out}{' picture.png' if self.run.task == 'images' else ''}"
        self.session.tell(Note(text=told, step=self.ended.step))
