"""What `attent look --ablate` and `--prune` found, as a table and a heat map, as JSON, and as sections of cards.

Lines are never broken or cut: a table can be piped on, and a signature copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from attent.cli.score_page import heading, table
from attent.cli.scoring import followed
from attent.decode.options import Search
from attent.look.ablate import KINDS, NAME, Ablation, Effect, Grid, Kind, grids, place
from attent.look.prune import NATS, WITHIN, Chosen
from attent.look.silence import Part
from attent.train.card import NAME as CARD
from attent.train.card import code, fenced, many, plain
from attent.train.card import table as card_table

TITLE, BEFORE = "Which heads matter", "The card of the model before"
MOST = 10  # of the most and the least important parts in the card
USELESS = 1.0  # BLEU below which it tells nothing
NOISE = 0.05  # a p from which on a difference may be chance
NAMES: dict[Kind, str] = {"head": "head", "sublayer": "sub-layer", "layer": "layer"}


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A model without some heads, and what it is worth."""

    folder: Path
    within: float  # BLEU that it was allowed to cost
    chosen: Chosen
    heads: int  # before
    bleu: float  # of the pruned model itself
    loss: float
    parameters: int
    parameters_before: int


# ---- what is shown ---------------------------------------------------------------------------------------------------


def show(ablation: Ablation, kinds: Sequence[Kind], pruned: Pruned | None, folder: Path, *, kept: bool) -> None:
    console = Console(highlight=False)
    for line in page(ablation, kinds, pruned, folder, kept=kept):
        console.print(line, soft_wrap=True)


def page(
    ablation: Ablation, kinds: Sequence[Kind], pruned: Pruned | None, folder: Path, *, kept: bool = True
) -> Iterator[Text]:
    yield from head(ablation)
    for kind in kinds:
        effects = ablation.of(kind)
        if effects:
            yield heading(f"Without each {NAMES[kind]}", "the most harmful silence first; p: of as much by chance")
            yield from table([row(effect, ablation) for effect in effects], COLUMNS, strong=2)
    worst = max((ablation.bleu - effect.bleu for effect in ablation.of(*kinds)), default=0.0)
    for grid in grids(ablation, kinds):
        yield heading(f"BLEU, difference: {grid.title}", f"layers down from 0, {across(grid)} across")
        yield from heat_map(grid, ablation.bleu, worst)
    yield Text("")
    for kind in kinds:
        yield from (Text(sentence) for sentence in conclusions(ablation, kind))
    if kept:
        yield Text(f"kept in {folder / NAME} and {folder / CARD}", "dim")
    if pruned is not None:
        yield from (Text(sentence) for sentence in pruned_sentences(pruned, ablation))


def across(grid: Grid) -> str:
    return "heads from 0" if grid.columns[0].isdigit() else "sub-layers" if grid.title != "layers" else "stacks"


def head(ablation: Ablation) -> Iterator[Text]:
    about = ablation.conditions
    lines = {
        "pairs": f"{about.data}: {about.sentences:,}",
        "search": searched(about.search),
        "engine": about.engine,
        "whole model": f"{ablation.bleu:.2f} BLEU, loss {ablation.loss:.4f} of {ablation.tokens:,} tokens",
        "BLEU": about.signature,
    }
    yield from (Text.assemble((f"{name:<12}", "dim"), text) for name, text in lines.items())


def searched(search: Search) -> str:
    return f"{followed(search)}, {search.formula}, no second look at what loops"


COLUMNS = ("", "BLEU", "difference", "loss", "difference", "changed", "p")


def row(effect: Effect, ablation: Ablation) -> list[str]:
    chance = "" if effect.p is None else "may be chance" if effect.p >= NOISE else f"{effect.p:.3f}"
    return [
        effect.part,
        f"{effect.bleu:.2f}",
        f"{effect.bleu - ablation.bleu:+.2f}",
        f"{effect.loss:.4f}",
        f"{effect.loss - ablation.loss:+.4f}",
        f"{100 * effect.changed / ablation.conditions.sentences:.1f}%",
        chance,
    ]


def heat_map(grid: Grid, base: float, worst: float) -> Iterator[Text]:
    """Numbers in cells that are the redder the more is lost; without colours the numbers are left."""
    # + 0.0: never -0.0
    lost = [[None if one is None else round(base - one.bleu, 1) + 0.0 for one in line] for line in grid.effects]
    width = max(7, *(len(name) + 2 for name in grid.columns))
    yield Text("   " + "".join(f"{name} ".rjust(width) for name in grid.columns), "dim")
    for name, line in zip(grid.rows, lost, strict=True):
        text = Text(f"{name:>3}", "dim")
        for value in line:
            text.append(f"{'' if value is None else f'{0.0 - value:.1f} ':>{width}}", shade(value, worst))
        yield text


def shade(value: float | None, worst: float) -> str:
    """From the background to a strong red; the square root, so that small losses can be told apart, too."""
    if value is None or value <= 0 or worst <= 0:
        return ""
    part = (value / worst) ** 0.5
    pale = round(235 - 190 * part)
    return f"{'white' if part > 0.55 else 'black'} on rgb({round(255 - 60 * part)},{pale},{pale})"


def conclusions(ablation: Ablation, kind: Kind) -> Iterator[str]:
    effects, name = ablation.of(kind), NAMES[kind]
    if not effects:
        return
    if ablation.bleu < USELESS:
        yield f"BLEU is {ablation.bleu:.2f}: these texts are too short, or too far off, for it. Go by the loss."
    worst = effects[0] if ablation.bleu >= USELESS else max(effects, key=lambda effect: effect.loss)
    dearest = max(effects, key=lambda effect: effect.loss)
    yield (
        f"The {name} that matters most is {worst.part}: without it BLEU goes from {ablation.bleu:.2f} to "
        f"{worst.bleu:.2f}, and the loss from {ablation.loss:.3f} to {worst.loss:.3f}."
    )
    if dearest is not worst:
        yield f"By the loss, which is less noisy, it is {dearest.part}: {dearest.loss:.3f}."
    few = sum(ablation.bleu - effect.bleu <= WITHIN for effect in effects)
    chance = sum(effect.p is not None and effect.p >= NOISE for effect in effects)
    yield (
        f"Of {many(len(effects), name)}, {few:,} cost at most {WITHIN:g} BLEU when silenced alone; for {chance:,} the "
        f"difference may be chance (paired bootstrap, p >= {NOISE:g}; about "
        f"{NOISE * len(effects):.0f} would be below that by chance alone)."
    )


def pruned_sentences(pruned: Pruned, ablation: Ablation) -> Iterator[str]:
    less = 100 * (1 - pruned.parameters / pruned.parameters_before)
    yield (
        f"Without {len(pruned.chosen.heads):,} of {many(pruned.heads, 'head')}: {pruned.bleu:.2f} BLEU (before: "
        f"{ablation.bleu:.2f}), loss {pruned.loss:.3f} ({ablation.loss:.3f}), {pruned.parameters:,} parameters "
        f"({pruned.parameters_before:,}, {less:.1f}% fewer)."
    )
    yield f"The pruned model is in {pruned.folder}."


# ---- the card --------------------------------------------------------------------------------------------------------


def section(ablation: Ablation) -> Iterator[str]:
    """What was measured, and how, for the model's card."""
    about = ablation.conditions
    yield (
        f"Each part was silenced in turn (what it adds to the residual stream was set to zero), and the same "
        f"{many(about.sentences, 'pair')} of {plain(about.data)} were translated and scored anew: the same search "
        f"({plain(searched(about.search))}), the same engine ({plain(about.engine)}). The whole model has "
        f"**{ablation.bleu:.2f} BLEU** and a loss of {ablation.loss:.4f} nats per token. What a part is worth together "
        f"with others is another question: parts can stand in for one another."
    )
    for kind in KINDS:
        effects = ablation.of(kind)
        if effects:
            yield from conclusions_for_card(ablation, kind)
            yield from card_tables(ablation, effects, NAMES[kind])
    yield f"sacreBLEU signature: {code(about.signature)}. All figures are in {code(NAME)} beside this card."


def conclusions_for_card(ablation: Ablation, kind: Kind) -> Iterator[str]:
    yield plain(" ".join(conclusions(ablation, kind)))


def card_tables(ablation: Ablation, effects: Sequence[Effect], name: str) -> Iterator[str]:
    columns = (f"Without this {name}", "BLEU", "Difference", "Loss", "Difference", "Changed", "p")
    most, least = (effects, []) if len(effects) <= 2 * MOST else (effects[:MOST], effects[-MOST:])
    for some in (most, least):
        if some:
            rows = [row(effect, ablation) for effect in some]
            yield card_table(columns, rows, right=range(1, 6), literal=(0,))
        if some is most and least:
            yield f"... {len(effects) - 2 * MOST:,} more; the {MOST} that matter least:"


def pruned_card(folder: Path, before: str, ablation: Ablation, pruned: Pruned) -> str:
    """Of the new model; the card of the one before, which may not hold for it any more, stands behind."""
    title = before.partition("\n")[0].removeprefix("# ") if before.startswith("# ") else plain(folder.name)
    paragraphs = [
        f"# {title}, pruned",
        f"{code(str(folder))} without {len(pruned.chosen.heads):,} of its {many(pruned.heads, 'head')}, by attent.",
        "## Scores",
        *scores_before_and_after(ablation, pruned),
        "## Pruning",
        *how_it_was_pruned(pruned),
        "## How to use it",
        fenced("sh", f"attent translate {pruned.folder} < input.txt > output.txt"),
        *([f"## {BEFORE}", deeper(before)] if before else []),
    ]
    return "\n\n".join(paragraphs) + "\n"


def scores_before_and_after(ablation: Ablation, pruned: Pruned) -> Iterator[str]:
    about, left = ablation.conditions, pruned.heads - len(pruned.chosen.heads)
    rows = [
        ("before", *score_cells(ablation.bleu, ablation.loss, pruned.heads, pruned.parameters_before)),
        ("pruned", *score_cells(pruned.bleu, pruned.loss, left, pruned.parameters)),
    ]
    yield card_table(("Model", "BLEU", "Loss", "Heads", "Parameters"), rows, right=(1, 2, 3, 4))
    yield (
        f"Both on the same {many(about.sentences, 'pair')} of {plain(about.data)}, which also chose the heads, so that "
        f"other text may tell otherwise; {plain(searched(about.search))}; {plain(about.engine)}. sacreBLEU signature: "
        f"{code(about.signature)}."
    )


def how_it_was_pruned(pruned: Pruned) -> Iterator[str]:
    yield (
        f"Heads that cost at most {pruned.within:g} BLEU alone were removed in the order of how many translations "
        f"change without them, in groups, as long as all together stayed within that bound and within "
        f"{NATS * pruned.within:g} nats of the loss: {many(len(pruned.chosen.trials), 'trial')}. CTranslate2 and "
        f"Hugging Face know no layers of different numbers of heads: there zeros stand in for those that were removed, "
        f"and nothing is quicker."
    )
    columns = ("Layer", "Heads removed (numbered as they were)")
    yield card_table(columns, removed_rows(pruned.chosen.heads), literal=(0,))


def score_cells(bleu: float, loss: float, heads: int, parameters: int) -> tuple[str, ...]:
    return f"{bleu:.2f}", f"{loss:.4f}", f"{heads:,}", f"{parameters:,}"


def removed_rows(heads: Sequence[Part]) -> list[tuple[str, str]]:
    layers: dict[str, list[int]] = {}
    for part in sorted(heads, key=place):
        layers.setdefault(part.path, []).append(part.head or 0)
    return [(path, ", ".join(map(str, numbers))) for path, numbers in layers.items()]


def deeper(card: str) -> str:
    """A card inside of another: each heading two levels down, but for what stands between fences."""
    lines, fence = [], False
    for line in card.strip("\n").split("\n"):
        fence ^= line.startswith("```")
        lines.append(f"##{line}" if line.startswith("#") and not fence else line)
    return "\n".join(lines)
