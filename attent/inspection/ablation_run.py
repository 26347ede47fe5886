"""`attent look --ablate` and `--prune` on a model folder: measure parts, store the results, write the pruned model.

Results are stored in `ablation.json` after each part, so that an interrupted run resumes, and in the model card.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TextIO, get_args

from attent import settings
from attent.data.pairs import LanguagePair
from attent.decoding.options import DeviceOptions, SearchOptions
from attent.decoding.translator import load_translator
from attent.formatting import escape_markdown, format_count, format_duration, replace_section
from attent.inspection import ablate, ablation_report
from attent.inspection.head_masking import Granularity, list_parts
from attent.inspection.prune import DEFAULT_MAX_BLEU_DROP, PruneTrial, prune_heads, select_heads
from attent.models import Seq2Seq
from attent.models.folder import read_side_file, write_side_file
from attent.models.weights import save_model
from attent.scoring.pipeline import read_test_set
from attent.storage.atomic import atomic_folder, make_folder, write_atomic
from attent.storage.manifest import explain_save_errors

LIMITS_SECTION = "Limits"
RUN_FILE, CURVES_FILE = "run.toml", "curves.svg"  # of the training run; the original card shows the curves
REPORT_INTERVAL = 10.0  # seconds between progress lines without a terminal
SELECTED_KINDS: dict[ablate.PartSelection, tuple[ablate.PartKind, ...]] = {
    "heads": ("head",),
    "sublayers": ("sublayer",),
    "layers": ("layer",),
    "all": ablate.PART_KINDS,
}
DIFFERENCES = {
    "weights_digest": "other weights",
    "digest": "other pairs",
    "search": "another search",
    "engine": "another engine",
    "signature": "another BLEU signature",
    "to": "another language",
}


def ablate_folder(
    folder: Path,
    data: Sequence[str],
    languages: LanguagePair,
    *,
    to: str | None = None,
    limit: int | None = None,
    selection: ablate.PartSelection = "heads",
    prune_to: Path | None = None,
    max_bleu_drop: float = DEFAULT_MAX_BLEU_DROP,
    beam_size: int = SearchOptions.beam_size,
    device: DeviceOptions = DeviceOptions(),  # noqa: B008 - frozen
) -> ablation_report.AblationResult:
    """Ablate a model folder on the first `limit` pairs of parallel text; with `prune_to`, write a model without the
    dispensable heads."""
    if prune_to is not None:
        check_output_folder(prune_to)
    reporter = AblationReporter(sys.stderr)
    test_set = read_test_set(data, languages, reporter.say)
    translator = load_translator((folder,), device, reporter.say)
    pairs = ablate.AblationData.from_test_set(test_set, translator, folder, to=to, limit=limit)
    scorer = ablate.BleuScorer.from_sacrebleu(to or test_set.language, pairs.references)
    search = SearchOptions(beam_size=beam_size)
    meter = ablate.AblationMeter(translator=translator, data=pairs, search=search, scorer=scorer)
    return AblationJob(folder=folder, meter=meter, reporter=reporter).run(selection, prune_to, max_bleu_drop)


def check_output_folder(out: Path) -> None:
    target = out.expanduser()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{out}: must be a new or an empty folder, but it has files; give another")


@dataclass(frozen=True, kw_only=True)
class AblationJob:
    """Measures one model folder and stores the results in it."""

    folder: Path
    meter: ablate.AblationMeter
    reporter: AblationReporter

    @property
    def model_folder(self) -> Path:
        return self.folder.expanduser()

    @property
    def model(self) -> Seq2Seq:
        return self.meter.model

    def run(
        self,
        selection: ablate.PartSelection = "heads",
        prune_to: Path | None = None,
        max_bleu_drop: float = DEFAULT_MAX_BLEU_DROP,
    ) -> ablation_report.AblationResult:
        if prune_to is not None:
            check_output_folder(prune_to)
            selection = selection if selection == "heads" else "all"
        ablation = self.measure_parts(selection)
        pruned = None if prune_to is None else self.prune_model(ablation, prune_to, max_bleu_drop)
        kinds = SELECTED_KINDS[selection]
        return ablation_report.AblationResult(
            folder=self.folder, ablation=ablation, kinds=kinds, pruned=pruned, saved=self.should_save
        )

    def measure_parts(self, selection: ablate.PartSelection) -> ablate.Ablation:
        """Measure the parts that `ablation.json` does not have yet; each is saved at once."""
        kinds: tuple[Granularity, ...] = get_args(Granularity) if selection == "all" else (selection,)
        parts = [part for kind in kinds for part in list_parts(self.model, kind)]
        previous = self.load_previous()
        save = partial(ablate.save_ablation, self.model_folder) if self.should_save else None
        pairs = format_count(len(self.meter.data.sources), "pair")
        with explain_save_errors(self.model_folder, "ablation"), self.reporter as reporter:
            reporter.start(f"{len(parts):,} parts of {self.folder} on {pairs}")
            try:
                ablation = self.meter.ablate(parts, previous=previous, save=save, progress=reporter.report_progress)
            except KeyboardInterrupt:
                reporter.say("finished parts are saved; run the same command again to resume")
                raise
            if save is not None:
                save(ablation)
                self.write_card(ablation)
        return ablation

    @cached_property
    def should_save(self) -> bool:
        """False if the folder has an ablation of these weights on more pairs."""
        try:
            stored = ablate.load_matching_ablation(self.model_folder, self.model)
        except settings.SettingsError:
            return True
        if stored is None or stored.conditions.sentences <= len(self.meter.data.sources):
            return True
        pairs = format_count(stored.conditions.sentences, "pair")
        self.reporter.say(f"{ablate.ABLATION_FILE} was measured on {pairs}; this run on fewer pairs is not saved")
        return False

    def load_previous(self) -> ablate.Ablation | None:
        """Return the stored ablation if it has the same weights, pairs and settings."""
        try:
            stored = ablate.load_ablation(self.model_folder)
        except settings.SettingsError as error:
            self.reporter.say(f"{error}; measuring all parts again")
            return None
        if stored is None:
            return None
        changed = stored.conditions.find_differences(self.meter.conditions)
        if changed:
            changes = ", ".join(words for name, words in DIFFERENCES.items() if name in changed)
            if self.should_save:
                self.reporter.say(f"{ablate.ABLATION_FILE} was measured with {changes}; measuring all parts again")
            return None
        self.reporter.say(f"{ablate.ABLATION_FILE} has {format_count(len(stored.effects), 'part')} already")
        return stored

    def read_card(self) -> str:
        path = self.model_folder / ablation_report.CARD_FILE
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def write_card(self, ablation: ablate.Ablation) -> None:
        text = self.read_card() or f"# {escape_markdown(self.model_folder.name)}\n"
        text = replace_section(
            text,
            ablation_report.SECTION_TITLE,
            ablation_report.build_card_section(ablation),
            (ablation_report.ORIGINAL_CARD_TITLE, LIMITS_SECTION),
        )
        write_atomic(self.model_folder / ablation_report.CARD_FILE, text.encode())

    def prune_model(self, ablation: ablate.Ablation, out: Path, max_bleu_drop: float) -> ablation_report.PruneResult:
        """Write the model without as many heads as the bound allows to a new folder, and measure it."""
        self.reporter.say(f"selecting heads to prune within {max_bleu_drop:g} BLEU of {ablation.bleu:.2f} ...")
        selection = select_heads(
            ablation,
            lambda heads: self.measure_model(prune_heads(self.model, heads)),
            max_bleu_drop=max_bleu_drop,
            progress=self.reporter.report_trial,
        )
        if not selection.heads:
            raise ValueError(
                f"no head of {self.folder} can be pruned within {max_bleu_drop:g} BLEU of {ablation.bleu:.2f}; "
                f"allow more with --max-bleu-drop"
            )
        model = prune_heads(self.model, selection.heads)
        bleu, loss = self.measure_model(model)
        result = ablation_report.PruneResult(
            folder=out,
            max_bleu_drop=max_bleu_drop,
            selection=selection,
            num_heads_before=len(ablation.get_effects("head")),
            bleu=bleu,
            loss=loss,
            parameters=sum(p.numel() for p in model.parameters()),
            parameters_before=sum(p.numel() for p in self.model.parameters()),
        )
        self.write_pruned(out.expanduser().absolute(), model, ablation, result)
        return result

    def measure_model(self, model: Seq2Seq) -> tuple[float, float]:
        """Return BLEU and loss of a pruned model. In int8 they differ slightly from those with masked heads, whose
        activations still affect the quantization scales."""
        meter = replace(self.meter, translator=ablate.copy_translator(self.meter.translator, model))
        return meter.baseline.bleu, meter.baseline.loss

    def write_pruned(
        self, out: Path, model: Seq2Seq, ablation: ablate.Ablation, pruned: ablation_report.PruneResult
    ) -> None:
        with explain_save_errors(out, "pruned model"):
            make_folder(out.parent)
            with atomic_folder(out) as folder:
                save_model(model, folder, self.meter.translator.tokenizer.files)
                if (run := read_side_file(self.model_folder, RUN_FILE)) is not None:
                    write_side_file(folder, RUN_FILE, run)
                if (self.model_folder / CURVES_FILE).is_file():
                    shutil.copyfile(self.model_folder / CURVES_FILE, folder / CURVES_FILE)
                card = ablation_report.build_pruned_card(self.folder, self.read_card(), ablation, pruned)
                write_atomic(folder / ablation_report.CARD_FILE, card.encode())


class AblationReporter(AbstractContextManager["AblationReporter"]):
    """Progress on stderr, with the remaining time."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.is_terminal = stream.isatty()
        self.started_at = self.last_report = clock()
        self.num_cached: int | None = None  # parts measured by earlier runs
        self.has_status_line = False

    def __exit__(self, *error: object) -> None:
        self.clear_line()

    def start(self, text: str) -> None:
        self.started_at, self.num_cached = self.clock(), None
        self.say(f"ablating {text} ...")

    def say(self, text: str) -> None:
        self.clear_line()
        print(f"attent: {text}", file=self.stream, flush=True)

    def report_progress(self, done: int, total: int, effect: ablate.AblationEffect) -> None:
        now = self.clock()
        if self.num_cached is None:
            self.num_cached = done - 1
        seconds = (now - self.started_at) / (done - self.num_cached) * (total - done)
        text = (
            f"{done:,} of {total:,}, {format_duration(seconds)} left: "
            f"without {effect.part} {effect.bleu:.2f} BLEU, loss {effect.loss:.3f}"
        )
        if self.is_terminal:
            self.stream.write(f"\r\x1b[K{text}")
            self.stream.flush()
            self.has_status_line = True
        elif now - self.last_report >= REPORT_INTERVAL or done == total:
            self.last_report = now
            self.say(text)

    def report_trial(self, trial: PruneTrial) -> None:
        verdict = "accepted" if trial.accepted else "rejected"
        heads = format_count(trial.num_removed, "head")
        self.say(f"without {heads} {trial.bleu:.2f} BLEU, loss {trial.loss:.3f}: {verdict}")

    def clear_line(self) -> None:
        if self.has_status_line:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self.has_status_line = False
