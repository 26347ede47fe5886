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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from attent import interop, settings
from attent.cli.watch import Watch
from attent.data.cache import try_locked
from attent.decode.align import AlignmentError, agreed, remember
from attent.decode.translate import Stopped, translate
from attent.look import properties
from attent.models import Seq2Seq, Seq2SeqConfig, build, build_empty
from attent.models.folder import explained
from attent.models.store import fill
from attent.score.metrics import Scores, scores
from attent.text.tokenizer import LAYOUTS, Tokenizer
from attent.train import chance, checkpoint, choose, prepare
from attent.train.config import (
    HARMLESS,
    Asked,
    Run,
    TrainError,
    changes,
    check,
    completed,
    flat,
    model_of,
    read_asked,
)
from attent.train.curves import Curves
from attent.train.events import Ended, Event, Note, Sample
from attent.train.hardware import pick_device
from attent.train.log import Log
from attent.train.log import read as read_log
from attent.train.loop import Judge, Judged, Stopping, Training
from attent.train.lora import add_lora, freeze
from attent.train.means import mean_weights
from attent.train.prepare import Prepared, Texts, texts_of
from attent.train.team import Team, joined, missed

RUN, STATE, ASKED, FINISHED, LOG, CURVES, CARD = (
    "run.toml", "state", "asked.json", "finished.json", "log.jsonl", "curves.svg", "card.md",
)  # fmt: skip
OURS = {"config.json", "model.safetensors", "manifest.json", "run.toml", "card.md", "log.jsonl"}
MODEL = {"config.json", "model.safetensors", "manifest.json"}
BEGUN = {name for layout in LAYOUTS for name in (*layout.needs, *layout.may)} | {  # before anything was learned
    RUN, LOG, CURVES, "curves.png", "tensorboard",
}  # fmt: skip
SAMPLES = 3
LISTED = 8  # settings that are named when too many differ
INTERRUPTED, TERMINATED = 130, 143


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
    resolved = dict(flat(settings.to_dict(settings.read_toml(Run, out / RUN)))) if (out / RUN).exists() else {}
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

    def tell(self, event: Event) -> None:
        """Only the first process talks."""
        for listener in self.listeners:
            listener(event)
        if len(self.listeners) < 2:
            self.notes.append(event)

    def run(self) -> int:
        run, prepared, model = self.began()
        if self.watch is not None:
            self.watch.title = title(prepared, self.out)
        training = self.training(run, prepared, model)
        self.resume(training)
        if self.finished(training):
            return self.scored_anew(run, prepared, training)
        self.signals.saves = True
        ended = training.run()
        if ended.reason == "stopped":
            return self.leave()
        try:
            final = Final(self, run, prepared, training, ended)
            final.choose()
            final.write()
        except (Stopping, Stopped):
            self.team.wait()  # the others wait for the first to write
            return self.leave()
        return 0

    def began(self) -> tuple[Run, Prepared, Seq2Seq]:
        """The run as it was resolved when it began or, for a new one, as it is resolved now; its text and its model."""
        known = self.out / RUN
        fresh = not checkpoint.steps(self.out / STATE)  # killed before its first checkpoint, it begins anew
        path = self.out / STATE / ASKED
        before = settings.read_json(path) if path.exists() else self.asked
        self.asked = completed(self.asked, before)
        if not fresh:
            run = gone_on(settings.read_toml(Run, known), before, self.asked)
        else:
            run = check(self.asked, "--set")
            if self.team.leads:
                with explained(self.out, "run"):
                    settings.write_json(self.asked, path)  # first of all: it says that what else is here is this run's
        if run.train.threads:
            torch.set_num_threads(run.train.threads)
        chance.begin(run.train.seed)
        loaded = interop.load(run.start) if run.start and fresh else None
        prepared = self.prepared(run, fresh)
        if fresh:
            run, model = self.resolved(run, prepared, loaded)
        else:
            assert run.model is not None
            model = build(run.model)
        if self.team.leads:
            with explained(self.out, "run"):
                settings.write_toml(run, known)
                settings.write_json(self.asked, self.out / STATE / ASKED)
        return run, prepared, model

    def prepared(self, run: Run, fresh: bool) -> Prepared:
        """The first process makes what is made once; the others find it done."""
        if not self.team.leads:
            self.team.wait()
        folder = self.out / STATE / "data"
        found = prepare.find(run.data, folder, run.train.seed, self.tell)
        prepared = prepare.tokens(found, self.tokenizer(run, fresh), run.data, folder, run.train.seed, self.tell)
        if self.team.leads:
            with explained(self.out, "tokenizer"):
                prepared.tokenizer.save(self.out)
            self.team.wait()
        return prepared

    def tokenizer(self, run: Run, fresh: bool) -> Tokenizer | None:
        """That of this run, or of the model to begin from; None: it is still to be learned."""
        if not fresh or not self.team.leads:
            return Tokenizer.load(self.out)
        return Tokenizer.load(Path(run.start).expanduser()) if run.start else None

    def resolved(self, run: Run, prepared: Prepared, loaded: Seq2Seq | None) -> tuple[Run, Seq2Seq]:
        """With everything chosen that nobody said, and the reasons told."""
        device = self.team.device
        layout = run.data.layout or ("bucketed" if device.type == "cpu" else "packed")
        run = replace(run, data=replace(run.data, layout=layout))
        if loaded is not None:
            config = further(loaded.config, self.asked, prepared.tokenizer, run.start or "")
            size, why = run.size, f"that of {run.start}"
        else:
            size, config, why = choose.sized(run, self.asked, prepared.amount, prepared.tokenizer, device.type)
        train = choose.recipe(run.train, size, config, prepared.amount, device, further=loaded is not None)
        halved = self.team.told([float(train.precision == "bfloat16")])[0]  # measured: others may find it otherwise
        train = replace(train, precision="bfloat16" if halved else "float32")
        run = replace(run, size=size, model=config, train=train)
        for sentence in choose.told(run, why, prepared.amount, device):
            self.tell(Note(text=sentence))
        chance.fix(run.train.seed, 0)
        model = (
            build(config) if loaded is None else fill(build_empty(config), loaded.state_dict(), run.start or "").train()
        )
        return run, model

    def training(self, run: Run, prepared: Prepared, model: Seq2Seq) -> Training:
        if run.train.lora and not run.start:
            raise TrainError(
                "`train.lora` needs a model to begin from (--from): beside random weights nothing is learned"
            )
        if run.train.lora:
            chance.fix(run.train.seed, 1)
            add_lora(model, run.train.lora)
        if run.train.freeze:
            freeze(model, run.train.freeze)
        batches = prepare.batches_of(prepared, run.data, run.train)
        if long := batches.too_long(0):
            self.tell(Note(text=long, weight="warning"))
        valid = prepare.valid_batches(prepared.valid, run.data) if prepared.valid is not None else None
        return Training(
            model,
            prepared.tokenizer,
            run.train,
            batches,
            valid,
            self.judge(run, prepared),
            self.out,
            self.team,
            self.tell,
            self.signals.asked,
            {"data": prepared.store.folder.name, "tokenizer": prepared.tokenizer.fingerprint},
        )

    def judge(self, run: Run, prepared: Prepared) -> Judge | None:
        """How the model is judged on the way: a part of the validation set, translated word by likeliest word."""
        if prepared.valid is None or not run.train.valid_sentences:
            return None
        texts = texts_of(prepared.found.valid, prepared.found.tags, run.train.valid_sentences)

        def judge(model: Seq2Seq) -> Judged:
            outputs = self.translated(model, prepared.tokenizer, texts, beam_size=1, length_penalty=0.0)
            found = scores(outputs, texts.references, texts.language)
            return Judged(bleu=found.bleu, chrf=found.chrf, exact=found.exact, samples=samples_of(texts, outputs))

        return judge

    def translated(
        self, model: Seq2Seq, tokenizer: Tokenizer, texts: Texts, *, beam_size: int, length_penalty: float
    ) -> list[str]:
        outputs = [""] * len(texts.sources)
        for to in dict.fromkeys(texts.to):
            places = [i for i, other in enumerate(texts.to) if other == to]
            try:
                written = translate(
                    model,
                    tokenizer,
                    [texts.sources[i] for i in places],
                    to=to,
                    beam_size=beam_size,
                    length_penalty=length_penalty,
                    stop=self.signals.asked,
                )
            except Stopped as stopped:
                raise Stopping from stopped
            for i, text in zip(places, written, strict=True):
                outputs[i] = text
        return outputs

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

    def scored_anew(self, run: Run, prepared: Prepared, training: Training) -> int:
        """A run that is complete, asked for other test sets or another search: only the scores are made again."""
        before = self.done(training)
        if before.get("asked") != scoring(run):
            final = Final(
                self, run, prepared, training, Ended(step=training.marks.step, reason=before["reason"], seconds=0)
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


def title(prepared: Prepared, out: Path) -> str:
    languages = prepared.found.languages
    sides = "-".join(filter(None, (languages.source, languages.target)))
    return f"{out} ({sides})" if sides else str(out)


def gone_on(run: Run, before: Asked, asked: Asked) -> Run:
    """The resolved run with what harmlessly differs now."""
    tables = settings.to_dict(run)
    for path, (_, now) in changes(before, asked).items():
        if now is not None:
            table, _, name = path.partition(".")
            tables[table][name] = now
    return settings.from_dict(Run, tables, where=RUN)


def further(config: Seq2SeqConfig, asked: Asked, tokenizer: Tokenizer, where: str) -> Seq2SeqConfig:
    """The config of a model that is trained further: its dropout may be another, and nothing else."""
    said = [path for path, _ in flat(asked) if path in ("size", "data.tokenizer.vocab") or path.startswith("model.")]
    if wrong := [path for path in said if not path.endswith("dropout")]:
        raise TrainError(
            f"`{wrong[0]}` cannot be chosen with --from {where}: a model that is trained further keeps its shape and "
            "its subwords; leave it out"
        )
    sizes = (tokenizer.source.size, tokenizer.target.size)
    if sizes[0] > config.vocab or sizes[1] > config.targets:
        raise TrainError(
            f"{where}: its tokenizer does not match its model: {sizes[0]:,} and {sizes[1]:,} subwords for embeddings "
            f"of {config.vocab:,} and {config.targets:,}; copy the model again"
        )
    return model_of(asked, config)


def scoring(run: Run) -> dict[str, Any]:
    """All that decides the scores at the end, but for the model."""
    return {"decode": settings.to_dict(run.decode), "test": list(run.data.test)}


def samples_of(texts: Texts, outputs: Sequence[str], most: int = SAMPLES) -> tuple[Sample, ...]:
    count = min(most, len(outputs))
    places = [len(outputs) * i // count for i in range(count)]
    return tuple(Sample(source=texts.sources[i], reference=texts.references[i], output=outputs[i]) for i in places)


# ---- the end ---------------------------------------------------------------------------------------------------------


Scored = tuple[Texts, str, Scores, list[str]]  # the sentences, which set they are of, their scores, the translations


class Final:
    """Which weights are the best, what they score, and the card."""

    def __init__(self, session: Session, run: Run, prepared: Prepared, training: Training, ended: Ended) -> None:
        self.session, self.run, self.prepared, self.training, self.ended = session, run, prepared, training, ended
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

            scored = self.scored()
            self.choose_heads()
            card.write(card_of(self, scored), self.session.out / CARD)
            settings.write_json(self.finished(scored), self.session.out / STATE / FINISHED)
            self.say_where()
        self.session.team.wait()

    def scored(self) -> list[Scored]:
        """Every set of sentences, translated and scored by the weights in the folder."""
        model = interop.load(self.session.out).to(self.session.team.device)
        found, decode = self.prepared.found, self.run.decode
        sets = [(texts_of(found.valid, found.tags), "validation")] if found.valid else []
        sets += [(texts_of([corpus], found.tags), "test") for corpus in found.tests]
        scored: list[Scored] = []
        for texts, kind in sets:
            outputs = self.session.translated(
                model,
                self.prepared.tokenizer,
                texts,
                beam_size=decode.beam_size,
                length_penalty=decode.length_penalty,
            )
            result = scores(outputs, texts.references, texts.language)
            scored.append((texts, kind, result, outputs))
            figures = f"BLEU {result.bleu:.2f}, chrF {result.chrf:.2f}, exact {result.exact:.1f}%"
            how = f"{len(outputs):,} sentences, beam {decode.beam_size}"
            self.session.tell(Note(text=f"{kind} {texts.name}: {figures} ({how})", step=self.ended.step))
        return scored

    def choose_heads(self) -> None:
        """Which heads tell best which word comes from which, by the validation pairs: for `translate --alignment`; and
        what each head does: for `look`."""
        found = self.prepared.found
        if not found.valid:
            return
        texts = texts_of(found.valid, found.tags)
        places = [place for place, to in enumerate(texts.to) if to == texts.to[0]]
        sources, references = ([side[place] for place in places] for side in (texts.sources, texts.references))
        model = interop.load(self.session.out).to(self.session.team.device)
        with suppress(AlignmentError):  # pairs without words have nothing to tell
            measured = agreed(model, self.prepared.tokenizer, sources, references, to=texts.to[0])
            remember(self.session.out, measured)
        habits = properties.measure(
            model, self.prepared.tokenizer, sources, references, to=texts.to[0], of="the validation pairs"
        )
        properties.remember(self.session.out, habits)

    def finished(self, scored: Sequence[Scored]) -> dict[str, Any]:
        """What a later call needs to know of this end."""
        told = [
            {"name": texts.name, "kind": kind, "pairs": len(outputs), **asdict(result)}
            for texts, kind, result, outputs in scored
        ]
        return {
            "step": self.training.marks.step,
            "reason": self.ended.reason,
            "weights": self.weights,
            "best": self.training.marks.best,
            "best_loss": self.training.marks.best_loss,
            "asked": scoring(self.run),
            "scores": told,
        }

    def say_where(self) -> None:
        out, found = self.session.out, self.prepared.found
        to = f" --to {found.train[0].languages.target}" if found.tags else ""
        told = f"the model is in {out}, and {out / CARD} says what it is; try it: attent translate {out}{to}"
        told += f", look inside: attent look {out}"
        self.session.tell(Note(text=told, step=self.ended.step))
