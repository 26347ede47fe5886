"""What `attent look --ablate` and `--prune` found, as a table and a heat map, as JSON, and as sections of cards.

Lines are never broken or cut: a table can be piped on, and a signature copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from attent.decoding.options import SearchOptions
from attent.formatting import code_block, escape_markdown, format_code, format_count
from attent.formatting import markdown_table as card_table
from attent.inspection.ablate import (
    ABLATION_FILE,
    PART_KINDS,
    Ablation,
    AblationEffect,
    AblationGrid,
    PartKind,
    build_grids,
    get_sort_key,
)
from attent.inspection.head_masking import ModelPart
from attent.inspection.prune import DEFAULT_MAX_BLEU_DROP, MAX_LOSS_PER_BLEU, PruneSelection
from attent.scoring.pipeline import describe_beam
from attent.scoring.report import render_heading, render_table
from attent.training.model_card import CARD_NAME as CARD

SECTION_TITLE, ORIGINAL_CARD_TITLE = "Which heads matter", "The card of the model before"
MAX_CARD_ROWS = 10  # of the most and the least important parts in the card
MIN_USEFUL_BLEU = 1.0  # BLEU below which it tells nothing
SIGNIFICANCE_LEVEL = 0.05  # a p from which on a difference may be chance
KIND_NAMES: dict[PartKind, str] = {"head": "head", "sublayer": "sub-layer", "layer": "layer"}


@dataclass(frozen=True, kw_only=True)
class PruneResult:
    """A model without some heads, and what it is worth."""

    folder: Path
    max_bleu_drop: float  # BLEU that it was allowed to cost
    selection: PruneSelection
    num_heads_before: int  # before
    bleu: float  # of the pruned model itself
    loss: float
    parameters: int
    parameters_before: int


# ---- what is shown ---------------------------------------------------------------------------------------------------


def print_ablation(
    ablation: Ablation, kinds: Sequence[PartKind], pruned: PruneResult | None, folder: Path, *, saved: bool
) -> None:
    console = Console(highlight=False)
    for line in render_ablation(ablation, kinds, pruned, folder, saved=saved):
        console.print(line, soft_wrap=True)


def render_ablation(
    ablation: Ablation, kinds: Sequence[PartKind], pruned: PruneResult | None, folder: Path, *, saved: bool = True
) -> Iterator[Text]:
    yield from render_header(ablation)
    for kind in kinds:
        effects = ablation.get_effects(kind)
        if effects:
            yield render_heading(
                f"Without each {KIND_NAMES[kind]}", "the most harmful silence first; p: of as much by chance"
            )
            yield from render_table(
                [format_effect(effect, ablation) for effect in effects], EFFECT_COLUMNS, bold_column=2
            )
    worst = max((ablation.bleu - effect.bleu for effect in ablation.get_effects(*kinds)), default=0.0)
    for grid in build_grids(ablation, kinds):
        yield render_heading(f"BLEU, difference: {grid.title}", f"layers down from 0, {describe_columns(grid)} across")
        yield from render_heatmap(grid, ablation.bleu, worst)
    yield Text("")
    for kind in kinds:
        yield from (Text(sentence) for sentence in summarize_ablation(ablation, kind))
    if saved:
        yield Text(f"kept in {folder / ABLATION_FILE} and {folder / CARD}", "dim")
    if pruned is not None:
        yield from (Text(sentence) for sentence in summarize_pruning(pruned, ablation))


def describe_columns(grid: AblationGrid) -> str:
    return "heads from 0" if grid.columns[0].isdigit() else "sub-layers" if grid.title != "layers" else "stacks"


def render_header(ablation: Ablation) -> Iterator[Text]:
    about = ablation.conditions
    lines = {
        "pairs": f"{about.dataset}: {about.sentences:,}",
        "search": describe_search(about.search),
        "engine": about.engine,
        "whole model": f"{ablation.bleu:.2f} BLEU, loss {ablation.loss:.4f} of {ablation.num_tokens:,} tokens",
        "BLEU": about.signature,
    }
    yield from (Text.assemble((f"{name:<12}", "dim"), text) for name, text in lines.items())


def describe_search(search: SearchOptions) -> str:
    return f"{describe_beam(search)}, {search.score_formula}, no second look at what loops"


EFFECT_COLUMNS = ("", "BLEU", "difference", "loss", "difference", "changed", "p")


def format_effect(effect: AblationEffect, ablation: Ablation) -> list[str]:
    chance = (
        ""
        if effect.p_value is None
        else "may be chance"
        if effect.p_value >= SIGNIFICANCE_LEVEL
        else f"{effect.p_value:.3f}"
    )
    return [
        effect.part,
        f"{effect.bleu:.2f}",
        f"{effect.bleu - ablation.bleu:+.2f}",
        f"{effect.loss:.4f}",
        f"{effect.loss - ablation.loss:+.4f}",
        f"{100 * effect.num_changed / ablation.conditions.sentences:.1f}%",
        chance,
    ]


def render_heatmap(grid: AblationGrid, baseline: float, worst: float) -> Iterator[Text]:
    """Numbers in cells that are the redder the more is lost; without colours the numbers are left."""
    # + 0.0: never -0.0
    lost = [[None if one is None else round(baseline - one.bleu, 1) + 0.0 for one in line] for line in grid.effects]
    width = max(7, *(len(name) + 2 for name in grid.columns))
    yield Text("   " + "".join(f"{name} ".rjust(width) for name in grid.columns), "dim")
    for name, line in zip(grid.rows, lost, strict=True):
        text = Text(f"{name:>3}", "dim")
        for value in line:
            text.append(f"{'' if value is None else f'{0.0 - value:.1f} ':>{width}}", get_cell_style(value, worst))
        yield text


def get_cell_style(value: float | None, worst: float) -> str:
    """From the background to a strong red; the square root, so that small losses can be told apart, too."""
    if value is None or value <= 0 or worst <= 0:
        return ""
    part = (value / worst) ** 0.5
    pale = round(235 - 190 * part)
    return f"{'white' if part > 0.55 else 'black'} on rgb({round(255 - 60 * part)},{pale},{pale})"


def summarize_ablation(ablation: Ablation, kind: PartKind) -> Iterator[str]:
    effects, name = ablation.get_effects(kind), KIND_NAMES[kind]
    if not effects:
        return
    if ablation.bleu < MIN_USEFUL_BLEU:
        yield f"BLEU is {ablation.bleu:.2f}: these texts are too short, or too far off, for it. Go by the loss."
    worst = effects[0] if ablation.bleu >= MIN_USEFUL_BLEU else max(effects, key=lambda effect: effect.loss)
    dearest = max(effects, key=lambda effect: effect.loss)
    yield (
        f"The {name} that matters most is {worst.part}: without it BLEU goes from {ablation.bleu:.2f} to "
        f"{worst.bleu:.2f}, and the loss from {ablation.loss:.3f} to {worst.loss:.3f}."
    )
    if dearest is not worst:
        yield f"By the loss, which is less noisy, it is {dearest.part}: {dearest.loss:.3f}."
    few = sum(ablation.bleu - effect.bleu <= DEFAULT_MAX_BLEU_DROP for effect in effects)
    chance = sum(effect.p_value is not None and effect.p_value >= SIGNIFICANCE_LEVEL for effect in effects)
    yield (
        f"Of {format_count(len(effects), name)}, {few:,} cost at most {DEFAULT_MAX_BLEU_DROP:g} BLEU when silenced alone; for {chance:,} the "
        f"difference may be chance (paired bootstrap, p >= {SIGNIFICANCE_LEVEL:g}; about "
        f"{SIGNIFICANCE_LEVEL * len(effects):.0f} would be below that by chance alone)."
    )


def summarize_pruning(pruned: PruneResult, ablation: Ablation) -> Iterator[str]:
    less = 100 * (1 - pruned.parameters / pruned.parameters_before)
    yield (
        f"Without {len(pruned.selection.heads):,} of {format_count(pruned.num_heads_before, 'head')}: {pruned.bleu:.2f} BLEU (before: "
        f"{ablation.bleu:.2f}), loss {pruned.loss:.3f} ({ablation.loss:.3f}), {pruned.parameters:,} parameters "
        f"({pruned.parameters_before:,}, {less:.1f}% fewer)."
    )
    yield f"The pruned model is in {pruned.folder}."


# ---- the card --------------------------------------------------------------------------------------------------------


def build_card_section(ablation: Ablation) -> Iterator[str]:
    """What was measured, and how, for the model's card."""
    about = ablation.conditions
    yield (
        f"Each part was silenced in turn (what it adds to the residual stream was set to zero), and the same "
        f"{format_count(about.sentences, 'pair')} of {escape_markdown(about.dataset)} were translated and scored anew: the same search "
        f"({escape_markdown(describe_search(about.search))}), the same engine ({escape_markdown(about.engine)}). The whole model has "
        f"**{ablation.bleu:.2f} BLEU** and a loss of {ablation.loss:.4f} nats per token. What a part is worth together "
        f"with others is another question: parts can stand in for one another."
    )
    for kind in PART_KINDS:
        effects = ablation.get_effects(kind)
        if effects:
            yield from summarize_for_card(ablation, kind)
            yield from build_card_tables(ablation, effects, KIND_NAMES[kind])
    yield f"sacreBLEU signature: {format_code(about.signature)}. All figures are in {format_code(ABLATION_FILE)} beside this card."


def summarize_for_card(ablation: Ablation, kind: PartKind) -> Iterator[str]:
    yield escape_markdown(" ".join(summarize_ablation(ablation, kind)))


def build_card_tables(ablation: Ablation, effects: Sequence[AblationEffect], name: str) -> Iterator[str]:
    columns = (f"Without this {name}", "BLEU", "Difference", "Loss", "Difference", "Changed", "p")
    most, least = (
        (effects, []) if len(effects) <= 2 * MAX_CARD_ROWS else (effects[:MAX_CARD_ROWS], effects[-MAX_CARD_ROWS:])
    )
    for some in (most, least):
        if some:
            rows = [format_effect(effect, ablation) for effect in some]
            yield card_table(columns, rows, right_aligned=range(1, 6), code_columns=(0,))
        if some is most and least:
            yield f"... {len(effects) - 2 * MAX_CARD_ROWS:,} more; the {MAX_CARD_ROWS} that matter least:"


def build_pruned_card(folder: Path, original_card: str, ablation: Ablation, pruned: PruneResult) -> str:
    """Of the new model; the card of the one before, which may not hold for it any more, stands behind."""
    title = (
        original_card.partition("\n")[0].removeprefix("# ")
        if original_card.startswith("# ")
        else escape_markdown(folder.name)
    )
    paragraphs = [
        f"# {title}, pruned",
        f"{format_code(str(folder))} without {len(pruned.selection.heads):,} of its {format_count(pruned.num_heads_before, 'head')}, by attent.",
        "## Scores",
        *build_score_table(ablation, pruned),
        "## Pruning",
        *describe_pruning(pruned),
        "## How to use it",
        code_block("sh", f"attent translate {pruned.folder} < input.txt > output.txt"),
        *([f"## {ORIGINAL_CARD_TITLE}", demote_headings(original_card)] if original_card else []),
    ]
    return "\n\n".join(paragraphs) + "\n"


def build_score_table(ablation: Ablation, pruned: PruneResult) -> Iterator[str]:
    about, left = ablation.conditions, pruned.num_heads_before - len(pruned.selection.heads)
    rows = [
        ("before", *format_scores(ablation.bleu, ablation.loss, pruned.num_heads_before, pruned.parameters_before)),
        ("pruned", *format_scores(pruned.bleu, pruned.loss, left, pruned.parameters)),
    ]
    yield card_table(("Model", "BLEU", "Loss", "Heads", "Parameters"), rows, right_aligned=(1, 2, 3, 4))
    yield (
        f"Both on the same {format_count(about.sentences, 'pair')} of {escape_markdown(about.dataset)}, which also chose the heads, so that "
        f"other text may tell otherwise; {escape_markdown(describe_search(about.search))}; {escape_markdown(about.engine)}. sacreBLEU signature: "
        f"{format_code(about.signature)}."
    )


def describe_pruning(pruned: PruneResult) -> Iterator[str]:
    yield (
        f"Heads that cost at most {pruned.max_bleu_drop:g} BLEU alone were removed in the order of how many translations "
        f"change without them, in groups, as long as all together stayed within that bound and within "
        f"{MAX_LOSS_PER_BLEU * pruned.max_bleu_drop:g} nats of the loss: {format_count(len(pruned.selection.trials), 'trial')}. CTranslate2 and "
        f"Hugging Face know no layers of different numbers of heads: there zeros stand in for those that were removed, "
        f"and nothing is quicker."
    )
    columns = ("Layer", "Heads removed (numbered as they were)")
    yield card_table(columns, list_removed_heads(pruned.selection.heads), code_columns=(0,))


def format_scores(bleu: float, loss: float, heads: int, parameters: int) -> tuple[str, ...]:
    return f"{bleu:.2f}", f"{loss:.4f}", f"{heads:,}", f"{parameters:,}"


def list_removed_heads(heads: Sequence[ModelPart]) -> list[tuple[str, str]]:
    layers: dict[str, list[int]] = {}
    for part in sorted(heads, key=get_sort_key):
        layers.setdefault(part.path, []).append(part.head or 0)
    return [(path, ", ".join(map(str, numbers))) for path, numbers in layers.items()]


def demote_headings(card: str) -> str:
    """A card inside of another: each heading two levels down, but for what stands between fences."""
    lines, fence = [], False
    for line in card.strip("\n").split("\n"):
        fence ^= line.startswith("```")
        lines.append(f"##{line}" if line.startswith("#") and not fence else line)
    return "\n".join(lines)
