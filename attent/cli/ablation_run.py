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
from attent.cli.ablation_report import (
    ORIGINAL_CARD_TITLE,
    SECTION_TITLE,
    PruneResult,
    build_card_section,
    build_pruned_card,
    print_ablation,
)
from attent.cli.convert import write_atomically
from attent.data.pairs import LanguagePair
from attent.decoding.options import DeviceOptions, SearchOptions
from attent.decoding.translator import Translator, load_translator, resolve_target_lang
from attent.formatting import escape_markdown, format_count, format_duration, replace_section
from attent.inspection import ablate as ablations
from attent.inspection.ablate import (
    PART_KINDS,
    Ablation,
    AblationData,
    AblationMeter,
    AblationProgress,
    BleuScorer,
    PartKind,
    PartSelection,
)
from attent.inspection.prune import DEFAULT_MAX_BLEU_DROP, PruneError, PruneTrial, prune_heads, select_heads
from attent.models import Seq2Seq
from attent.scoring.metrics import compare_outputs, compute_metrics
from attent.scoring.pipeline import TestSet, find_language_tag, read_test_set
from attent.storage.atomic import write_atomic
from attent.storage.manifest import explain_save_errors
from attent.training.loop import write_model
from attent.training.model_card import CARD_NAME as CARD

LIMITS_SECTION = "Limits"
COPIED_FILES = ("run.toml", "curves.svg")  # how it was trained; the card of before shows the picture
REPORT_INTERVAL = 10.0  # seconds between lines where there is no terminal
SELECTED_KINDS: dict[PartSelection, tuple[PartKind, ...]] = {
    "heads": ("head",),
    "sublayers": ("sublayer",),
    "layers": ("layer",),
    "all": PART_KINDS,
}


def run_ablation(
    folder: Path,
    data: str | Sequence[str],
    *,
    src: str | None = None,
    tgt: str | None = None,
    to: str | None = None,
    selection: PartSelection = "heads",
    limit: int | None = None,
    prune_to: Path | None = None,
    max_bleu_drop: float = DEFAULT_MAX_BLEU_DROP,
    search: SearchOptions | None = None,
    machine: DeviceOptions | None = None,
    on_done: Callable[[Ablation], None] | None = None,
) -> int:
    """All of it. `then` is given what was measured, such as to draw it."""
    if prune_to is not None:
        check_output_folder(prune_to)
    names = [data] if isinstance(data, str) else list(data)
    texts = read_test_set(names, LanguagePair(src, tgt))
    telling = AblationReporter(sys.stderr)
    translator = load_translator((folder,), machine or DeviceOptions(), telling.say)
    work = AblationJob(
        folder=folder,
        translator=translator,
        data=build_ablation_data(texts, translator, folder, to, limit),
        search=search or SearchOptions(),
        scorer=build_bleu_scorer(texts, to, limit),
        reporter=telling,
    )
    with_heads: PartSelection = (
        "all" if selection == "all" or (prune_to is not None and selection != "heads") else selection
    )
    ablation = work.measure_parts(with_heads)
    pruned = work.prune_model(ablation, prune_to, max_bleu_drop) if prune_to is not None else None
    print_ablation(ablation, SELECTED_KINDS[with_heads], pruned, folder, saved=work.should_save)
    if on_done is not None:
        on_done(ablation)
    return 0


def check_output_folder(out: Path) -> None:
    """Before hours of work."""
    target = out.expanduser()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise PruneError(f"{out}: is there already, and nothing is overwritten; give a new or an empty folder")


def build_ablation_data(
    texts: TestSet, translator: Translator, folder: Path, to: str | None, limit: int | None
) -> AblationData:
    tags = translator.tokenizer.source.tags
    if to is None and tags and len(set(texts.languages)) > 1:
        raise ablations.AblationError(f"{texts.name}: must have one target language; name it with --tgt")
    asked = (
        resolve_target_lang(to, tags, folder)
        if to
        else find_language_tag(texts.languages[0] if tags else None, tags, folder)
    )
    return AblationData(
        name=texts.name,
        sources=tuple(texts.sources[:limit]),
        references=tuple(texts.references[:limit]),
        to=asked,
    )


def build_bleu_scorer(texts: TestSet, to: str | None, limit: int | None) -> BleuScorer:
    """sacreBLEU's, with a paired bootstrap for what may be chance."""
    language, references = to or texts.language, texts.references[:limit]
    perfect = compute_metrics(references, references, ("bleu",), language, resamples=0)[0]
    return BleuScorer(
        compute_bleu=lambda outputs, references: (
            compute_metrics(outputs, references, ("bleu",), language, resamples=0)[0].value
        ),
        signature=perfect.signature,
        compute_p_value=lambda outputs, others, references: (
            compare_outputs(outputs, others, references, ("bleu",), language)[0].p_value
        ),
    )


# ---- the work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AblationJob:
    """What is measured, and how."""

    folder: Path
    translator: Translator
    data: AblationData
    search: SearchOptions
    scorer: BleuScorer
    reporter: AblationReporter

    @property
    def model_folder(self) -> Path:
        return self.folder.expanduser()

    @property
    def model(self) -> Seq2Seq:
        assert isinstance(self.translator.model, Seq2Seq)  # of one folder
        return self.translator.model

    def measure_parts(self, selection: PartSelection) -> Ablation:
        """Measured, as far as it has not been before; each part is kept as soon as it is there."""
        parts = ablations.select_parts(self.model, selection)
        done = self.load_previous()
        with explain_save_errors(self.model_folder, "ablation"), self.reporter as telling:
            telling.start(f"{len(parts):,} parts of {self.folder} on {format_count(len(self.data.sources), 'pair')}")
            try:
                ablation = ablations.ablate(
                    self.translator,
                    self.data,
                    parts,
                    search=self.search,
                    scorer=self.scorer,
                    previous=done,
                    save=self.save if self.should_save else None,
                    progress=telling.report_progress,
                )
            except KeyboardInterrupt:
                telling.say("what is measured is kept; the same command goes on with the rest")
                raise
            if self.should_save:
                self.save(ablation)
                self.write_card(ablation)
        return ablation

    def save(self, ablation: Ablation) -> None:
        ablations.save_ablation(self.model_folder, ablation)

    @cached_property
    def should_save(self) -> bool:
        """A trial on a few pairs does not take the place of what was measured on many."""
        try:
            done = ablations.load_matching_ablation(self.model_folder, self.model)
        except settings.SettingsError:
            return True
        if done is None or done.conditions.sentences <= len(self.data.sources):
            return True
        many_pairs = format_count(done.conditions.sentences, "pair")
        self.reporter.say(f"{ablations.ABLATION_FILE} is of {many_pairs} and stays: this trial on fewer is not kept")
        return False

    def load_previous(self) -> Ablation | None:
        """What the folder has, if it is of these weights, pairs and settings."""
        try:
            done = ablations.load_ablation(self.model_folder)
        except settings.SettingsError as error:
            self.reporter.say(f"{error}: it is measured anew")
            return None
        if done is None:
            return None
        now = AblationMeter(self.translator, self.data, search=self.search, scorer=self.scorer).conditions
        changed = describe_differences(done.conditions, now)
        if changed:
            if self.should_save:
                self.reporter.say(f"what {ablations.ABLATION_FILE} has is of {changed}: everything is measured anew")
            return None
        self.reporter.say(f"{ablations.ABLATION_FILE} has {format_count(len(done.effects), 'part')} already")
        return done

    def write_card(self, ablation: Ablation) -> None:
        path = self.model_folder / CARD
        text = (
            path.read_text(encoding="utf-8", errors="replace")
            if path.exists()
            else f"# {escape_markdown(self.model_folder.name)}\n"
        )
        text = replace_section(text, SECTION_TITLE, build_card_section(ablation), (ORIGINAL_CARD_TITLE, LIMITS_SECTION))
        write_atomic(path, text.encode())

    def prune_model(self, ablation: Ablation, out: Path, max_bleu_drop: float) -> PruneResult:
        """The model without as many heads as can be spared, written to a new folder, and measured itself."""
        self.reporter.say(
            f"looking for heads that can go together within {max_bleu_drop:g} BLEU of {ablation.bleu:.2f} ..."
        )
        chosen = select_heads(
            ablation,
            lambda heads: self.measure_model(prune_heads(self.model, heads)),
            max_bleu_drop=max_bleu_drop,
            progress=self.reporter.report_trial,
        )
        if not chosen.heads:
            raise PruneError(
                f"no head of {self.folder} can go within {max_bleu_drop:g} BLEU of {ablation.bleu:.2f}: nothing is written; "
                f"allow more with --max-bleu-drop"
            )
        model = prune_heads(self.model, chosen.heads)
        bleu, loss = self.measure_model(model)
        found = PruneResult(
            folder=out,
            max_bleu_drop=max_bleu_drop,
            selection=chosen,
            num_heads_before=len(ablation.get_effects("head")),
            bleu=bleu,
            loss=loss,
            parameters=count_parameters(model),
            parameters_before=count_parameters(self.model),
        )
        write_atomically(out.expanduser().absolute(), lambda folder: self.write_pruned(folder, model, ablation, found))
        return found

    def measure_model(self, model: Seq2Seq) -> tuple[float, float]:
        """BLEU and loss of a pruned model itself: with int8 it is not to the last digit what it was with its heads
        silent, since what a silent head computes has a share in how coarsely the others are rounded."""
        given = self.translator
        translator = Translator(
            model,
            given.tokenizer,
            engine=given.engine,
            threads=given.threads,
            batch_tokens=given.batch_tokens,
            use_cuda_graphs=given.use_cuda_graphs,
            notify=given.notify,
        )
        found = AblationMeter(translator, self.data, search=self.search, scorer=self.scorer).baseline
        return found.bleu, found.loss

    def write_pruned(self, folder: Path, model: Seq2Seq, ablation: Ablation, pruned: PruneResult) -> str:
        write_model(folder, model, self.translator.tokenizer)
        for name in COPIED_FILES:
            if (self.model_folder / name).is_file():
                shutil.copyfile(self.model_folder / name, folder / name)
        card = self.model_folder / CARD
        before = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        write_atomic(folder / CARD, build_pruned_card(self.folder, before, ablation, pruned).encode())
        return ""


def describe_differences(previous: ablations.AblationConditions, current: ablations.AblationConditions) -> str:
    """What is not the same, in words; "" where all is."""
    words = {
        "weights_digest": "other weights",
        "digest": "other pairs",
        "search": "another search",
        "engine": "another engine",
        "signature": "another BLEU",
        "to": "another language",
    }
    found = previous.find_differences(current)
    return ", ".join(word for name, word in words.items() if name in found)


def count_parameters(model: Seq2Seq) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class AblationReporter:
    """To a person who waits, on stderr: how far it is and how long it will take."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.is_terminal = stream.isatty()
        self.started_at = self.last_report = clock()
        self.num_cached: int | None = None  # parts that were there before this run measured any
        self.has_status_line = False

    def __enter__(self) -> AblationReporter:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear_line()

    def start(self, sentence: str) -> None:
        self.started_at, self.num_cached = self.clock(), None
        self.say(f"silencing {sentence} ...")

    def say(self, sentence: str) -> None:
        self.clear_line()
        print(f"attent: {sentence}", file=self.stream, flush=True)

    def report_progress(self, progress: AblationProgress) -> None:
        now = self.clock()
        if self.num_cached is None:
            self.num_cached = progress.done - 1
        each = (now - self.started_at) / (progress.done - self.num_cached)
        text = (
            f"{progress.done:,} of {progress.total:,}, {format_duration(each * (progress.total - progress.done))} left: "
            f"without {progress.effect.part} {progress.effect.bleu:.2f} BLEU, loss {progress.effect.loss:.3f}"
        )
        if self.is_terminal:
            self.stream.write(f"\r\x1b[K{text}")
            self.stream.flush()
            self.has_status_line = True
        elif now - self.last_report >= REPORT_INTERVAL or progress.done == progress.total:
            self.last_report = now
            self.say(text)

    def report_trial(self, trial: PruneTrial) -> None:
        verdict = "good" if trial.accepted else "too many"
        self.say(
            f"without {format_count(trial.num_removed, 'head')} {trial.bleu:.2f} BLEU, loss {trial.loss:.3f}: {verdict}"
        )

    def clear_line(self) -> None:
        if self.has_status_line:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self.has_status_line = False
