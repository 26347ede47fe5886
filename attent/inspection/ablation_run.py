"""`attent look --ablate` and `--prune`: results are stored in `ablation.json` after each part, so that runs resume."""

import math
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rich.text import Text
from torch import nn

from attent import settings
from attent.data.pairs import LanguagePair
from attent.decoding.options import DeviceOptions, SearchOptions
from attent.decoding.translator import Translator
from attent.formatting import escape_markdown, format_code, format_count
from attent.inspection import ablate
from attent.inspection.ablate import PART_KINDS, ModelPart, PartKind, find_part, list_parts
from attent.models import Seq2Seq
from attent.models.folder import read_side_file, write_side_file, write_side_settings
from attent.models.pruning import remove_heads
from attent.models.weights import save_model
from attent.nn import Attention
from attent.scoring.pipeline import read_test_set
from attent.scoring.report import render_heading, render_table
from attent.storage.atomic import atomic_folder, make_folder, write_atomic
from attent.storage.errors import AttentError
from attent.storage.hub import locate_model
from attent.storage.manifest import explain_save_errors

CARD_FILE, RUN_FILE, CURVES_FILE = "card.md", "run.toml", "curves.svg"  # of the training run; the card shows the curves
MIN_USEFUL_BLEU = 1.0
SIGNIFICANCE_LEVEL = 0.05
KIND_NAMES: dict[PartKind, str] = {"head": "head", "sublayer": "sub-layer", "layer": "layer"}
DEFAULT_MAX_BLEU_DROP = 0.2  # BLEU
# Nats of loss per BLEU of the bound. BLEU is noisy, and some of many trials are lucky: by BLEU alone, 15 heads of a
# Multi30k model were dispensable on the validation set but cost 1.4 BLEU on the test set; the loss showed it (+0.055).
MAX_LOSS_PER_BLEU = 0.1
PartSelection = Literal["heads", "sublayers", "layers", "all"]
SELECTED_KINDS: dict[PartSelection, tuple[PartKind, ...]] = {
    "heads": ("head",),
    "sublayers": ("sublayer",),
    "layers": ("layer",),
    "all": PART_KINDS,
}


# --- which heads to prune --------------------------------------------------------------------------------------------
#
# Heads are tried in groups, ordered by the number of translations that change when each is masked alone, as long as the
# drop in BLEU and loss of all removed heads *together*, which is measured, stays within a bound.


def prune_heads(model: nn.Module, heads: Collection[ModelPart]) -> Seq2Seq:
    if not isinstance(model, Seq2Seq):
        raise AttentError(f"the model must be an encoder-decoder, but is a {type(model).__name__}; give another")
    removed: dict[str, set[int]] = {}
    for part in heads:
        removed.setdefault(part.path, set()).add(get_prunable_head(model, part))
    return remove_heads(model, removed)


def get_prunable_head(model: Seq2Seq, part: ModelPart) -> int:
    attention = find_part(model, part)
    if part.head is None or not isinstance(attention, Attention):
        raise AttentError(f"{part}: must be a head, such as decoder.blocks.0.cross_attn:2")
    if attention.kv_heads != attention.heads:
        raise AttentError(
            f"{part}: models with grouped-query attention cannot be pruned, but this one has {attention.heads} heads "
            f"and {attention.kv_heads} KV heads"
        )
    return part.head


def rank_heads(ablation: ablate.Ablation, max_bleu_drop: float = math.inf) -> list[ModelPart]:
    """Return the heads that cost at most `max_bleu_drop` alone, those first that change the fewest translations.

    The loss alone would mislead: for overconfident models it can fall while translations get worse.
    """
    heads = [effect for effect in ablation.get_effects("head") if ablation.bleu - effect.bleu <= max_bleu_drop]
    ranked = sorted(heads, key=lambda effect: (effect.num_changed, effect.loss, effect.part))
    return [ModelPart.parse(effect.part) for effect in ranked]


@dataclass
class PruneSelection:
    """The heads to remove. Groups of heads are bisected: few trials if most heads, or hardly any, can be removed."""

    measure_without: Callable[[Sequence[ModelPart]], tuple[float, float]]
    bleu: float  # without `heads`
    loss: float
    min_bleu: float
    max_loss: float
    progress: Callable[[int, float, float, bool], None] | None = None
    heads: list[ModelPart] = field(default_factory=list)

    def add_group(self, group: Sequence[ModelPart], *, known_rejected: bool = False) -> bool:
        """Remove as many heads of the group as possible; return whether all were removed."""
        if not group or (not known_rejected and self.try_group(group)):
            return True
        if len(group) > 1:
            half = (len(group) + 1) // 2
            first = self.add_group(group[:half])
            self.add_group(group[half:], known_rejected=first)  # both halves together were just rejected
        return False

    def try_group(self, group: Sequence[ModelPart]) -> bool:
        heads = [*self.heads, *group]
        bleu, loss = self.measure_without(heads)
        accepted = bleu >= self.min_bleu and loss <= self.max_loss
        if accepted:
            self.heads, self.bleu, self.loss = heads, bleu, loss
        if self.progress is not None:
            self.progress(len(heads), bleu, loss, accepted)
        return accepted


def select_heads(
    ablation: ablate.Ablation,
    measure_without: Callable[[Sequence[ModelPart]], tuple[float, float]],
    *,
    max_bleu_drop: float = DEFAULT_MAX_BLEU_DROP,
    progress: Callable[[int, float, float, bool], None] | None = None,
) -> PruneSelection:
    """Select heads to remove within `max_bleu_drop` of the baseline BLEU and MAX_LOSS_PER_BLEU times that of its loss.

    measure_without  returns BLEU and loss of the model without some heads
    progress         called after each trial: number of heads, BLEU and loss without them, accepted or not
    """
    if not ablation.get_effects("head"):
        raise AttentError("the ablation must have heads to prune, but has none; ablate heads first")
    if not max_bleu_drop >= 0:
        raise AttentError(f"`max_bleu_drop` must be 0 BLEU or more, but is {max_bleu_drop}")
    min_bleu, max_loss = ablation.bleu - max_bleu_drop, ablation.loss + MAX_LOSS_PER_BLEU * max_bleu_drop
    selection = PruneSelection(measure_without, ablation.bleu, ablation.loss, min_bleu, max_loss, progress)
    selection.add_group(rank_heads(ablation, max_bleu_drop))
    return selection


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PruneResult:
    folder: Path
    max_bleu_drop: float
    selection: PruneSelection
    parameters: int
    parameters_before: int


@dataclass(frozen=True, kw_only=True)
class AblationResult:
    folder: Path
    ablation: ablate.Ablation
    kinds: Sequence[PartKind]
    pruned: PruneResult | None = None


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
) -> AblationResult:
    """Ablate a folder on the first `limit` pairs; with `prune_to`, write a model without the dispensable heads."""
    test_set = read_test_set(data, languages, notify)
    folder = locate_model(folder)
    translator = Translator.load(folder, **vars(device), notify=notify)
    pairs = ablate.AblationData.from_test_set(test_set, translator, folder, to=to, limit=limit)
    search = SearchOptions(beam_size=beam_size, prevent_loops=False)  # which would hide damage
    meter = ablate.AblationMeter(translator=translator, data=pairs, search=search)
    return AblationJob(folder=folder.expanduser(), meter=meter, notify=notify).run(selection, prune_to, max_bleu_drop)


@dataclass(frozen=True, kw_only=True)
class AblationJob:
    folder: Path
    meter: ablate.AblationMeter
    notify: Callable[[str], None]

    def run(self, selection: PartSelection, prune_to: Path | None, max_bleu_drop: float) -> AblationResult:
        if prune_to is not None:
            target = prune_to.expanduser()
            if target.exists() and not (target.is_dir() and not any(target.iterdir())):
                raise AttentError(f"{prune_to}: must be a new or an empty folder, but it has files; give another")
            selection = selection if selection == "heads" else "all"
        kinds = SELECTED_KINDS[selection]
        ablation = self.measure_parts([part for kind in kinds for part in list_parts(self.meter.model, kind)])
        pruned = None if prune_to is None else self.prune_model(ablation, prune_to, max_bleu_drop)
        return AblationResult(folder=self.folder, ablation=ablation, kinds=kinds, pruned=pruned)

    def measure_parts(self, parts: Sequence[ModelPart]) -> ablate.Ablation:
        previous = self.find_reusable()
        pairs = format_count(len(self.meter.data.sources), "pair")
        self.notify(f"ablating {len(parts):,} parts of {self.folder} on {pairs} ...")
        with explain_save_errors(self.folder, "ablation"):
            try:
                for count, ablation in enumerate(self.meter.ablate(parts, previous)):
                    write_side_settings(self.folder, ablate.ABLATION_FILE, ablation)
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
        if stored is None:
            return None
        if changed := stored.conditions.find_differences(self.meter.conditions):
            changes = ", ".join(name.removesuffix("_digest") for name in changed)
            self.notify(f"{ablate.ABLATION_FILE} is of other conditions ({changes}); measuring all parts again")
            return None
        self.notify(f"{ablate.ABLATION_FILE} has {format_count(len(stored.effects), 'part')} already")
        return stored

    def prune_model(self, ablation: ablate.Ablation, out: Path, max_bleu_drop: float) -> PruneResult:
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
        result = PruneResult(
            folder=out,
            max_bleu_drop=max_bleu_drop,
            selection=selection,
            parameters=sum(p.numel() for p in model.parameters()),
            parameters_before=sum(p.numel() for p in original.parameters()),
        )
        self.write_pruned(out.expanduser().absolute(), model, ablation, result)
        return result

    def write_pruned(self, out: Path, model: Seq2Seq, ablation: ablate.Ablation, pruned: PruneResult) -> None:
        card = self.folder / CARD_FILE
        original_card = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        with explain_save_errors(out, "pruned model"):
            make_folder(out.parent)
            with atomic_folder(out) as folder:
                save_model(model, folder, self.meter.translator.tokenizer.files)
                if (run := read_side_file(self.folder, RUN_FILE)) is not None:
                    write_side_file(folder, RUN_FILE, run)
                if (self.folder / CURVES_FILE).is_file():
                    shutil.copyfile(self.folder / CURVES_FILE, folder / CURVES_FILE)
                text = build_pruned_card(self.folder, original_card, ablation, pruned)
                write_atomic(folder / card.name, text.encode())


# --- report: tables for the terminal, and the card of a pruned model ------------------------------------------------


def render_ablation(result: AblationResult) -> Iterator[Text]:
    ablation, kinds, folder = result.ablation, result.kinds, result.folder
    yield from render_header(ablation)
    for kind in kinds:
        effects = ablation.get_effects(kind)
        if effects:
            yield render_heading(f"Without each {KIND_NAMES[kind]}", "lowest BLEU first; p of a paired bootstrap")
            rows = [format_effect(effect, ablation) for effect in effects]
            yield from render_table(rows, EFFECT_COLUMNS, bold_column=2)
    yield Text("")
    for kind in kinds:
        yield from (Text(sentence) for sentence in summarize_ablation(ablation, kind))
    yield Text(f"saved to {folder / ablate.ABLATION_FILE}", "dim")
    if result.pruned is not None:
        yield from (Text(sentence) for sentence in summarize_pruning(result.pruned, ablation))


def render_header(ablation: ablate.Ablation) -> Iterator[Text]:
    conditions = ablation.conditions
    lines = {
        "pairs": f"{conditions.dataset}: {conditions.sentences:,}",
        "search": describe_search(conditions.search),
        "engine": conditions.engine,
        "baseline": f"{ablation.bleu:.2f} BLEU, loss {ablation.loss:.4f} on {ablation.num_tokens:,} tokens",
        "BLEU": conditions.signature,
    }
    yield from (Text.assemble((f"{name:<12}", "dim"), text) for name, text in lines.items())


def describe_search(search: SearchOptions) -> str:
    beam = "greedy search" if search.beam_size == 1 else f"beam size {search.beam_size}"
    return f"{beam}, {search.score_formula}, no loop prevention"


EFFECT_COLUMNS = ("", "BLEU", "difference", "loss", "difference", "changed", "p")


def format_effect(effect: ablate.AblationEffect, ablation: ablate.Ablation) -> list[str]:
    return [
        effect.part,
        f"{effect.bleu:.2f}",
        f"{effect.bleu - ablation.bleu:+.2f}",
        f"{effect.loss:.4f}",
        f"{effect.loss - ablation.loss:+.4f}",
        f"{100 * effect.num_changed / ablation.conditions.sentences:.1f}%",
        f"{effect.p_value:.3f}" if effect.p_value < SIGNIFICANCE_LEVEL else "not significant",
    ]


def summarize_ablation(ablation: ablate.Ablation, kind: PartKind) -> Iterator[str]:
    effects, name = ablation.get_effects(kind), KIND_NAMES[kind]
    if not effects:
        return
    if ablation.bleu < MIN_USEFUL_BLEU:
        yield f"BLEU is {ablation.bleu:.2f}, too low to be informative on this text; compare the loss."
    dispensable = sum(ablation.bleu - effect.bleu <= DEFAULT_MAX_BLEU_DROP for effect in effects)
    not_significant = sum(effect.p_value >= SIGNIFICANCE_LEVEL for effect in effects)
    yield (
        f"Of {format_count(len(effects), name)}, {dispensable:,} cost at most {DEFAULT_MAX_BLEU_DROP:g} BLEU when "
        f"masked alone; for {not_significant:,} the difference is not significant (paired bootstrap, "
        f"p >= {SIGNIFICANCE_LEVEL:g}; about {SIGNIFICANCE_LEVEL * len(effects):.0f} false positives are expected)."
    )


def summarize_pruning(pruned: PruneResult, ablation: ablate.Ablation) -> Iterator[str]:
    selection, less = pruned.selection, 100 * (1 - pruned.parameters / pruned.parameters_before)
    yield (
        f"Without {len(selection.heads):,} of {format_count(len(ablation.get_effects('head')), 'head')}: "
        f"{selection.bleu:.2f} BLEU (before: {ablation.bleu:.2f}), loss {selection.loss:.3f} ({ablation.loss:.3f}), "
        f"{pruned.parameters:,} parameters ({pruned.parameters_before:,}, {less:.1f}% fewer)."
    )
    yield f"The pruned model is in {pruned.folder}."


def build_pruned_card(folder: Path, original_card: str, ablation: ablate.Ablation, pruned: PruneResult) -> str:
    """Say what was removed and what it costs, before the original card, whose sections may no longer apply."""
    title, _, rest = original_card.partition("\n")
    if not title.startswith("# "):
        title, rest = f"# {escape_markdown(folder.name)}", f"\n{original_card}"
    conditions, layers = ablation.conditions, dict[str, list[str]]()
    for part in sorted(pruned.selection.heads, key=ablate.get_sort_key):
        layers.setdefault(part.path, []).append(str(part.head))
    removed = ", ".join(f"{format_code(path)}: {' '.join(heads)}" for path, heads in layers.items())
    measured = (
        f"{next(summarize_pruning(pruned, ablation))} Measured on {format_count(conditions.sentences, 'pair')} of "
        f"{escape_markdown(conditions.dataset)}, the same that selected the heads, so that scores on other text may "
        f"differ; {escape_markdown(describe_search(conditions.search))}; {escape_markdown(conditions.engine)}; "
        f"{format_code(conditions.signature)}. Bounds: {pruned.max_bleu_drop:g} BLEU and "
        f"{MAX_LOSS_PER_BLEU * pruned.max_bleu_drop:g} nats of loss."
    )
    paragraphs = (
        f"{title}, pruned",
        f"{format_code(str(folder))}, pruned by attent; the sections below are those of the original model.",
        measured,
        f"Removed heads (original numbers): {removed}. Exports to other formats have zeros in their place.",
    )
    return "\n\n".join(paragraphs) + f"\n{rest}"
