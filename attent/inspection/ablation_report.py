"""Reports of ablation and pruning: tables for the terminal, never wrapped, and the card of a pruned model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from attent.decoding.options import SearchOptions
from attent.formatting import escape_markdown, format_code, format_count
from attent.inspection.ablate import ABLATION_FILE, Ablation, AblationEffect, get_sort_key
from attent.inspection.head_masking import PartKind
from attent.inspection.prune import DEFAULT_MAX_BLEU_DROP, MAX_LOSS_PER_BLEU, PruneSelection
from attent.scoring.report import render_heading, render_table

CARD_FILE = "card.md"
MIN_USEFUL_BLEU = 1.0
SIGNIFICANCE_LEVEL = 0.05
KIND_NAMES: dict[PartKind, str] = {"head": "head", "sublayer": "sub-layer", "layer": "layer"}


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
    ablation: Ablation
    kinds: Sequence[PartKind]
    pruned: PruneResult | None = None


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
    yield Text(f"saved to {folder / ABLATION_FILE}", "dim")
    if result.pruned is not None:
        yield from (Text(sentence) for sentence in summarize_pruning(result.pruned, ablation))


def render_header(ablation: Ablation) -> Iterator[Text]:
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


def format_effect(effect: AblationEffect, ablation: Ablation) -> list[str]:
    return [
        effect.part,
        f"{effect.bleu:.2f}",
        f"{effect.bleu - ablation.bleu:+.2f}",
        f"{effect.loss:.4f}",
        f"{effect.loss - ablation.loss:+.4f}",
        f"{100 * effect.num_changed / ablation.conditions.sentences:.1f}%",
        f"{effect.p_value:.3f}" if effect.p_value < SIGNIFICANCE_LEVEL else "not significant",
    ]


def summarize_ablation(ablation: Ablation, kind: PartKind) -> Iterator[str]:
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


def summarize_pruning(pruned: PruneResult, ablation: Ablation) -> Iterator[str]:
    selection, less = pruned.selection, 100 * (1 - pruned.parameters / pruned.parameters_before)
    yield (
        f"Without {len(selection.heads):,} of {format_count(len(ablation.get_effects('head')), 'head')}: "
        f"{selection.bleu:.2f} BLEU (before: {ablation.bleu:.2f}), loss {selection.loss:.3f} ({ablation.loss:.3f}), "
        f"{pruned.parameters:,} parameters ({pruned.parameters_before:,}, {less:.1f}% fewer)."
    )
    yield f"The pruned model is in {pruned.folder}."


def build_pruned_card(folder: Path, original_card: str, ablation: Ablation, pruned: PruneResult) -> str:
    """Say what was removed and what it costs, before the original card, whose sections may no longer apply."""
    title, _, rest = original_card.partition("\n")
    if not title.startswith("# "):
        title, rest = f"# {escape_markdown(folder.name)}", f"\n{original_card}"
    conditions, layers = ablation.conditions, dict[str, list[str]]()
    for part in sorted(pruned.selection.heads, key=get_sort_key):
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
