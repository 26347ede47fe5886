"""`attent look --ablate` and `--prune`: results are stored in `ablation.json` after each part, so that runs resume."""

import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from attent import settings
from attent.data.pairs import LanguagePair
from attent.decoding.options import DeviceOptions, SearchOptions
from attent.decoding.translator import Translator
from attent.formatting import format_count
from attent.inspection import ablate, ablation_report
from attent.inspection.head_masking import PART_KINDS, ModelPart, PartKind, list_parts
from attent.inspection.prune import DEFAULT_MAX_BLEU_DROP, prune_heads, select_heads
from attent.models import Seq2Seq
from attent.models.folder import read_side_file, write_side_file
from attent.models.weights import save_model
from attent.scoring.pipeline import read_test_set
from attent.storage.atomic import atomic_folder, make_folder, write_atomic
from attent.storage.errors import AttentError
from attent.storage.hub import locate_model
from attent.storage.manifest import explain_save_errors

RUN_FILE, CURVES_FILE = "run.toml", "curves.svg"  # of the training run; the original card shows the curves
PartSelection = Literal["heads", "sublayers", "layers", "all"]
SELECTED_KINDS: dict[PartSelection, tuple[PartKind, ...]] = {
    "heads": ("head",),
    "sublayers": ("sublayer",),
    "layers": ("layer",),
    "all": PART_KINDS,
}


def ablate_folder(
    folder: Path,
    data: Sequence[str],
    languages: LanguagePair,
    *,
    to: str | None = None,
    limit: int | None = None,
    selection: PartSelection = "heads",
    prune_to: Path | None = None,
    max_bleu_drop: float = DEFAULT_MAX_BLEU_DROP,
    beam_size: int = SearchOptions.beam_size,
    device: DeviceOptions = DeviceOptions(),  # noqa: B008 - frozen
    notify: Callable[[str], None] = warnings.warn,
) -> ablation_report.AblationResult:
    """Ablate a folder on the first `limit` pairs; with `prune_to`, write a model without the dispensable heads."""
    test_set = read_test_set(data, languages, notify)
    folder = locate_model(folder)
    translator = Translator.load(folder, **vars(device), notify=notify)
    pairs = ablate.AblationData.from_test_set(test_set, translator, folder, to=to, limit=limit)
    meter = ablate.AblationMeter(translator=translator, data=pairs, search=SearchOptions(beam_size=beam_size))
    return AblationJob(folder=folder.expanduser(), meter=meter, notify=notify).run(selection, prune_to, max_bleu_drop)


@dataclass(frozen=True, kw_only=True)
class AblationJob:
    folder: Path
    meter: ablate.AblationMeter
    notify: Callable[[str], None]

    def run(
        self, selection: PartSelection, prune_to: Path | None, max_bleu_drop: float
    ) -> ablation_report.AblationResult:
        if prune_to is not None:
            target = prune_to.expanduser()
            if target.exists() and not (target.is_dir() and not any(target.iterdir())):
                raise AttentError(f"{prune_to}: must be a new or an empty folder, but it has files; give another")
            selection = selection if selection == "heads" else "all"
        kinds = SELECTED_KINDS[selection]
        ablation = self.measure_parts([part for kind in kinds for part in list_parts(self.meter.model, kind)])
        pruned = None if prune_to is None else self.prune_model(ablation, prune_to, max_bleu_drop)
        return ablation_report.AblationResult(folder=self.folder, ablation=ablation, kinds=kinds, pruned=pruned)

    def measure_parts(self, parts: Sequence[ModelPart]) -> ablate.Ablation:
        previous = self.find_reusable()
        pairs = format_count(len(self.meter.data.sources), "pair")
        self.notify(f"ablating {len(parts):,} parts of {self.folder} on {pairs} ...")
        with explain_save_errors(self.folder, "ablation"):
            try:
                for count, ablation in enumerate(self.meter.ablate(parts, previous)):
                    ablate.save_ablation(self.folder, ablation)
                    if count:  # the first has what was measured before
                        done, effect = f"{len(ablation.effects):,} of {len(parts):,}", ablation.effects[-1]
                        self.notify(f"{done}: without {effect.part} {effect.bleu:.2f} BLEU, loss {effect.loss:.3f}")
            except KeyboardInterrupt:
                self.notify("finished parts are saved; run the same command again to resume")
                raise
        return ablation

    def find_reusable(self) -> ablate.Ablation | None:
        try:
            stored = ablate.load_ablation(self.folder)
        except settings.SettingsError as error:
            self.notify(f"{error}; measuring all parts again")
            return None
        changed = [] if stored is None else stored.conditions.find_differences(self.meter.conditions)
        if stored is None or changed:
            changes = ", ".join(name.removesuffix("_digest") for name in changed)
            if changed:
                self.notify(f"{ablate.ABLATION_FILE} is of other conditions ({changes}); measuring all parts again")
            return None
        self.notify(f"{ablate.ABLATION_FILE} has {format_count(len(stored.effects), 'part')} already")
        return stored

    def prune_model(self, ablation: ablate.Ablation, out: Path, max_bleu_drop: float) -> ablation_report.PruneResult:
        original = self.meter.model
        self.notify(f"selecting heads to prune within {max_bleu_drop:g} BLEU of {ablation.bleu:.2f} ...")

        def measure_without(heads: Sequence[ModelPart]) -> tuple[float, float]:
            # In int8 the scores differ slightly from those with masked heads, whose activations still affect the
            # quantization scales.
            translator = ablate.copy_translator(self.meter.translator, prune_heads(original, heads))
            baseline = replace(self.meter, translator=translator).baseline
            return baseline.bleu, baseline.loss

        def report_trial(num_removed: int, bleu: float, loss: float, accepted: bool) -> None:
            heads, verdict = format_count(num_removed, "head"), "accepted" if accepted else "rejected"
            self.notify(f"without {heads} {bleu:.2f} BLEU, loss {loss:.3f}: {verdict}")

        selection = select_heads(ablation, measure_without, max_bleu_drop=max_bleu_drop, progress=report_trial)
        if not selection.heads:
            raise AttentError(
                f"no head of {self.folder} can be pruned within {max_bleu_drop:g} BLEU of {ablation.bleu:.2f}; "
                f"allow more with --max-bleu-drop"
            )
        model = prune_heads(original, selection.heads)
        result = ablation_report.PruneResult(
            folder=out,
            max_bleu_drop=max_bleu_drop,
            selection=selection,
            parameters=sum(p.numel() for p in model.parameters()),
            parameters_before=sum(p.numel() for p in original.parameters()),
        )
        self.write_pruned(out.expanduser().absolute(), model, ablation, result)
        return result

    def write_pruned(
        self, out: Path, model: Seq2Seq, ablation: ablate.Ablation, pruned: ablation_report.PruneResult
    ) -> None:
        card = self.folder / ablation_report.CARD_FILE
        original_card = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        with explain_save_errors(out, "pruned model"):
            make_folder(out.parent)
            with atomic_folder(out) as folder:
                save_model(model, folder, self.meter.translator.tokenizer.files)
                if (run := read_side_file(self.folder, RUN_FILE)) is not None:
                    write_side_file(folder, RUN_FILE, run)
                if (self.folder / CURVES_FILE).is_file():
                    shutil.copyfile(self.folder / CURVES_FILE, folder / CURVES_FILE)
                text = ablation_report.build_pruned_card(self.folder, original_card, ablation, pruned)
                write_atomic(folder / card.name, text.encode())
