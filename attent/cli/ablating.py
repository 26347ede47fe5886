"""What `attent look --ablate` and `--prune` do: which heads matter, as a table and a heat map, in the model's card and
in `ablation.json`; and a model without those that do not.

The measuring is `attent.look.ablate`'s and `attent.look.prune`'s, the showing `ablating_page`'s; here pairs are read,
BLEU is brought along, and what was found is kept.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TextIO

from attent import settings
from attent.cli.ablating_page import BEFORE, TITLE, Pruned, pruned_card, section, show
from attent.cli.convert import as_a_whole
from attent.cli.scoring import Texts, asked_of, read_texts
from attent.cli.searching import MachineFlags, asked_language, translator_of
from attent.data.pairs import Languages
from attent.decode.options import Search
from attent.decode.translator import Translator
from attent.look import ablate as ablations
from attent.look.ablate import KINDS, Ablation, Bleu, Kind, Meter, Sample, Step, What
from attent.look.prune import WITHIN, PruneError, Trial, choose, prune
from attent.models import Seq2Seq
from attent.models.folder import explained
from attent.score.metrics import measured, paired
from attent.train.card import NAME as CARD
from attent.train.card import duration, many, plain, with_section
from attent.train.loop import write_model

LIMITS = "Limits"
COPIED = ("run.toml", "curves.svg")  # how it was trained; the card of before shows the picture
EVERY = 10.0  # seconds between lines where there is no terminal
GRAINS: dict[What, tuple[Kind, ...]] = {
    "heads": ("head",),
    "sublayers": ("sublayer",),
    "layers": ("layer",),
    "all": KINDS,
}


def run_ablation(
    folder: Path,
    corpus: str | Sequence[str],
    *,
    src: str | None = None,
    tgt: str | None = None,
    to: str | None = None,
    what: What = "heads",
    limit: int | None = None,
    prune_to: Path | None = None,
    within: float = WITHIN,
    search: Search | None = None,
    machine: MachineFlags | None = None,
    then: Callable[[Ablation], None] | None = None,
) -> int:
    """All of it. `then` is given what was measured, such as to draw it."""
    if prune_to is not None:
        check_new(prune_to)
    names = [corpus] if isinstance(corpus, str) else list(corpus)
    texts = read_texts(names, Languages(src, tgt))
    telling = Telling(sys.stderr)
    translator = translator_of((folder,), machine or MachineFlags(), telling.say)
    work = Work(
        folder=folder,
        translator=translator,
        sample=sample_of(texts, translator, folder, to, limit),
        search=search or Search(),
        score=bleu_for(texts, to, limit),
        telling=telling,
    )
    with_heads: What = "all" if what == "all" or (prune_to is not None and what != "heads") else what
    ablation = work.ablation(with_heads)
    pruned = work.pruned(ablation, prune_to, within) if prune_to is not None else None
    show(ablation, GRAINS[with_heads], pruned, folder, kept=work.keeps)
    if then is not None:
        then(ablation)
    return 0


def check_new(out: Path) -> None:
    """Before hours of work."""
    target = out.expanduser()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise PruneError(f"{out}: is there already, and nothing is overwritten; give a new or an empty folder")


def sample_of(texts: Texts, translator: Translator, folder: Path, to: str | None, limit: int | None) -> Sample:
    tags = translator.tokenizer.source.tags
    if to is None and tags and len(set(texts.languages)) > 1:
        raise ablations.AblationError(f"{texts.name}: must have one target language; name it with --tgt")
    asked = asked_language(to, tags, folder) if to else asked_of(texts.languages[0] if tags else None, tags, folder)
    return Sample(
        name=texts.name,
        sources=tuple(texts.sources[:limit]),
        references=tuple(texts.references[:limit]),
        to=asked,
    )


def bleu_for(texts: Texts, to: str | None, limit: int | None) -> Bleu:
    """sacreBLEU's, with a paired bootstrap for what may be chance."""
    language, references = to or texts.language, texts.references[:limit]
    perfect = measured(references, references, ("bleu",), language, resamples=0)[0]
    return Bleu(
        of=lambda outputs, references: measured(outputs, references, ("bleu",), language, resamples=0)[0].value,
        signature=perfect.signature,
        chance=lambda outputs, others, references: paired(outputs, others, references, ("bleu",), language)[0].p,
    )


# ---- the work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is measured, and how."""

    folder: Path
    translator: Translator
    sample: Sample
    search: Search
    score: Bleu
    telling: Telling

    @property
    def root(self) -> Path:
        return self.folder.expanduser()

    @property
    def model(self) -> Seq2Seq:
        assert isinstance(self.translator.model, Seq2Seq)  # of one folder
        return self.translator.model

    def ablation(self, what: What) -> Ablation:
        """Measured, as far as it has not been before; each part is kept as soon as it is there."""
        parts = ablations.parts_to_silence(self.model, what)
        done = self.before()
        with explained(self.root, "ablation"), self.telling as telling:
            telling.start(f"{len(parts):,} parts of {self.folder} on {many(len(self.sample.sources), 'pair')}")
            try:
                ablation = ablations.ablate(
                    self.translator,
                    self.sample,
                    parts,
                    search=self.search,
                    score=self.score,
                    done=done,
                    keep=self.keep if self.keeps else None,
                    progress=telling.step,
                )
            except KeyboardInterrupt:
                telling.say("what is measured is kept; the same command goes on with the rest")
                raise
            if self.keeps:
                self.keep(ablation)
                self.write_card(ablation)
        return ablation

    def keep(self, ablation: Ablation) -> None:
        ablations.remember(self.root, ablation)

    @cached_property
    def keeps(self) -> bool:
        """A trial on a few pairs does not take the place of what was measured on many."""
        try:
            done = ablations.remembered(self.root, self.model)
        except settings.SettingsError:
            return True
        if done is None or done.conditions.sentences <= len(self.sample.sources):
            return True
        many_pairs = many(done.conditions.sentences, "pair")
        self.telling.say(f"{ablations.NAME} is of {many_pairs} and stays: this trial on fewer is not kept")
        return False

    def before(self) -> Ablation | None:
        """What the folder has, if it is of these weights, pairs and settings."""
        try:
            done = ablations.recalled(self.root)
        except settings.SettingsError as error:
            self.telling.say(f"{error}: it is measured anew")
            return None
        if done is None:
            return None
        now = Meter(self.translator, self.sample, search=self.search, score=self.score).conditions
        changed = differing(done.conditions, now)
        if changed:
            if self.keeps:
                self.telling.say(f"what {ablations.NAME} has is of {changed}: everything is measured anew")
            return None
        self.telling.say(f"{ablations.NAME} has {many(len(done.effects), 'part')} already")
        return done

    def write_card(self, ablation: Ablation) -> None:
        path = self.root / CARD
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else f"# {plain(self.root.name)}\n"
        text = with_section(text, TITLE, section(ablation), (BEFORE, LIMITS))
        settings.write_aside(path, text.encode())

    def pruned(self, ablation: Ablation, out: Path, within: float) -> Pruned:
        """The model without as many heads as can be spared, written to a new folder, and measured itself."""
        self.telling.say(f"looking for heads that can go together within {within:g} BLEU of {ablation.bleu:.2f} ...")
        chosen = choose(
            ablation,
            lambda heads: self.figures(prune(self.model, heads)),
            within=within,
            progress=self.telling.trial,
        )
        if not chosen.heads:
            raise PruneError(
                f"no head of {self.folder} can go within {within:g} BLEU of {ablation.bleu:.2f}: nothing is written; "
                f"allow more with --within"
            )
        model = prune(self.model, chosen.heads)
        bleu, loss = self.figures(model)
        found = Pruned(
            folder=out,
            within=within,
            chosen=chosen,
            heads=len(ablation.of("head")),
            bleu=bleu,
            loss=loss,
            parameters=count(model),
            parameters_before=count(self.model),
        )
        as_a_whole(out.expanduser().absolute(), lambda folder: self.write_pruned(folder, model, ablation, found))
        return found

    def figures(self, model: Seq2Seq) -> tuple[float, float]:
        """BLEU and loss of a pruned model itself: with int8 it is not to the last digit what it was with its heads
        silent, since what a silent head computes has a share in how coarsely the others are rounded."""
        given = self.translator
        translator = Translator(
            model,
            given.tokenizer,
            engine=given.engine,
            threads=given.threads,
            batch_tokens=given.batch_tokens,
            record=given.record,
            say=given.say,
        )
        found = Meter(translator, self.sample, search=self.search, score=self.score).base
        return found.bleu, found.loss

    def write_pruned(self, folder: Path, model: Seq2Seq, ablation: Ablation, pruned: Pruned) -> str:
        write_model(folder, model, self.translator.tokenizer)
        for name in COPIED:
            if (self.root / name).is_file():
                shutil.copyfile(self.root / name, folder / name)
        card = self.root / CARD
        before = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        settings.write_aside(folder / CARD, pruned_card(self.folder, before, ablation, pruned).encode())
        return ""


def differing(before: ablations.Conditions, now: ablations.Conditions) -> str:
    """What is not the same, in words; "" where all is."""
    words = {
        "model": "other weights",
        "digest": "other pairs",
        "search": "another search",
        "engine": "another engine",
        "signature": "another BLEU",
        "to": "another language",
    }
    found = before.differing(now)
    return ", ".join(word for name, word in words.items() if name in found)


def count(model: Seq2Seq) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class Telling:
    """To a person who waits, on stderr: how far it is and how long it will take."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.live = stream.isatty()
        self.began = self.told = clock()
        self.first: int | None = None  # parts that were there before this run measured any
        self.drawn = False

    def __enter__(self) -> Telling:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def start(self, sentence: str) -> None:
        self.began, self.first = self.clock(), None
        self.say(f"silencing {sentence} ...")

    def say(self, sentence: str) -> None:
        self.clear()
        print(f"attent: {sentence}", file=self.stream, flush=True)

    def step(self, step: Step) -> None:
        now = self.clock()
        if self.first is None:
            self.first = step.done - 1
        each = (now - self.began) / (step.done - self.first)
        text = (
            f"{step.done:,} of {step.all:,}, {duration(each * (step.all - step.done))} left: "
            f"without {step.effect.part} {step.effect.bleu:.2f} BLEU, loss {step.effect.loss:.3f}"
        )
        if self.live:
            self.stream.write(f"\r\x1b[K{text}")
            self.stream.flush()
            self.drawn = True
        elif now - self.told >= EVERY or step.done == step.all:
            self.told = now
            self.say(text)

    def trial(self, trial: Trial) -> None:
        verdict = "good" if trial.good else "too many"
        self.say(f"without {many(trial.count, 'head')} {trial.bleu:.2f} BLEU, loss {trial.loss:.3f}: {verdict}")

    def clear(self) -> None:
        if self.drawn:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self.drawn = False
