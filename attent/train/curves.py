"""`curves.svg`: how training went, drawn from its events without any dependency.

Losses on the left, scores on the right, the learning rate below; what the run took for its best is marked. The picture
has a background of its own, so that it reads on light and on dark pages. `draw_png` does the same by matplotlib, where
that is installed. Where the events come from (the loop, or `log.jsonl`) is left to the caller.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from attent.train.events import Ended, Event, Progress, Validated

NAME = "curves.svg"
WIDTH, HEIGHT = 960, 476
LEFT, RIGHT, TOP, GAP = 62, 28, 74, 76  # around and between the panels
PANEL, STRIP = 250, 56  # heights: of losses and scores, and of the learning rate
MOST = 400  # points of a line: one for every second pixel
SETTLED = 0.04  # of a run: what the loss falls by before is left out of the scale, so that the rest can be seen
TELLS = 20.0  # per cent of exact outputs: below, it is no measure of the task
LETTER = 6.2  # pixels of a letter of small text, about

INK, QUIET, GRID, PAPER = "#1f2933", "#616e7c", "#e4e7eb", "#ffffff"
# Blue, vermilion, green and purple of Okabe and Ito: told apart by colour-blind people, and on paper.
COLOURS = {
    "training": "#9fb3c8",
    "validation": "#d55e00",
    "BLEU": "#0072b2",
    "chrF": "#009e73",
    "exact %": "#8e4585",
    "accuracy %": "#8e4585",
    "learning rate": "#616e7c",
}
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One quantity over the steps."""

    name: str
    points: tuple[Point, ...]
    dots: bool = False  # seldom measured: each measurement is shown

    def at(self, step: int | None) -> float | None:
        return next((y for x, y in self.points if x == step), None)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What is drawn, whoever draws it."""

    losses: tuple[Line, ...]
    scores: tuple[Line, ...]
    rate: Line
    best: int | None  # the step that the run took for its best
    end: int  # the last step


class Curves:
    """Listens to training, and draws after each validation, at the end as PNG too; never the reason that a run ends."""

    def __init__(self, path: Path, before: Iterable[Event] = ()) -> None:
        """`before` is what a resumed run told earlier."""
        self.path = Path(path)
        self._events = list(before)
        self._failed = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress | Validated | Ended):
            self._events.append(event)
        if isinstance(event, Validated | Ended) and not self._failed:
            try:
                draw(self._events, self.path)
                if isinstance(event, Ended):  # matplotlib takes half a second
                    draw_png(self._events, self.path.with_suffix(".png"))
            except OSError as error:
                self._failed = True
                reason = error.strerror or str(error)
                print(f"warning: {self.path}: cannot be written ({reason}); no more curves", file=sys.stderr)


def draw(events: Sequence[Event], path: Path) -> None:
    """Write the picture as SVG: aside and renamed, so that a viewer never sees half of it."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(svg(picture(events)), encoding="utf-8", newline="\n")
    os.replace(aside, path)


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def picture(events: Sequence[Event]) -> Picture:
    # A step that was told twice, before and after an interruption, counts as it was told last.
    progress = sorted({e.step: e for e in events if isinstance(e, Progress)}.values(), key=lambda e: e.step)
    validated = sorted({e.step: e for e in events if isinstance(e, Validated)}.values(), key=lambda e: e.step)
    best = [e.step for e in validated if e.best]
    return Picture(
        losses=_with_points(
            # The loss that is minimised holds the label smoothing; only without it are both lines one quantity.
            _line("training", ((e.step, _log(e.perplexity)) for e in progress)),
            _line("validation", ((e.step, e.loss) for e in validated), dots=True),
        ),
        scores=_with_points(*_scores(validated)),
        rate=_line("learning rate", ((e.step, e.lr) for e in progress)),
        best=best[-1] if best else None,
        end=max([0, *(e.step for e in progress), *(e.step for e in validated)]),
    )


def _scores(validated: Sequence[Validated]) -> Iterator[Line]:
    yield _line("BLEU", ((e.step, e.bleu) for e in validated), dots=True)
    yield _line("chrF", ((e.step, e.chrf) for e in validated), dots=True)
    exact = _line("exact %", ((e.step, e.exact) for e in validated), dots=True)
    only = all(e.bleu is None and e.chrf is None for e in validated)
    if only or max((y for _, y in exact.points), default=0.0) >= TELLS:
        yield exact
    yield _line("accuracy %", ((e.step, e.accuracy) for e in validated), dots=True)


def _line(name: str, points: Iterable[tuple[int, float | None]], *, dots: bool = False) -> Line:
    return Line(name=name, points=tuple((x, y) for x, y in points if y is not None and math.isfinite(y)), dots=dots)


def _with_points(*lines: Line) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.points)


def _log(perplexity: float) -> float | None:
    return math.log(perplexity) if perplexity > 0 else None


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """Many points as fewer, each the mean of its neighbours; the first and the last stay as they are."""
    if len(points) <= most:
        return list(points)
    inner, groups = points[1:-1], most - 2
    ends = [round(i * len(inner) / groups) for i in range(groups + 1)]
    parts = (inner[a:b] for a, b in pairwise(ends))
    return [points[0], *((_mean(x for x, _ in part), _mean(y for _, y in part)) for part in parts), points[-1]]


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


# ---- scales ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Numbers from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that span low to high: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        low, high = low - max(abs(low), 1) * 0.05, high + max(abs(high), 1) * 0.05
    step = _round_step((high - low) / max(about, 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)


def span(lines: Sequence[Line], end: int) -> tuple[float, float]:
    """The lowest and the highest value, the fall at the very beginning aside."""
    points = [point for line in lines for point in line.points]
    values = [y for x, y in points if x >= SETTLED * end] or [y for _, y in points]
    return min(values), max(values)


def number(value: float) -> str:
    """As few digits as say it: 2,000; 2.5; 0.001."""
    if value and abs(value) < 0.001:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value:,.4f}".rstrip("0").rstrip(".") if value % 1 else f"{value:,.0f}"


# ---- SVG -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A rectangle with two scales."""

    name: str  # of its clip path
    x: Scale
    y: Scale

    @property
    def box(self) -> tuple[float, float, float, float]:
        return self.x.start, self.y.end, self.x.end - self.x.start, self.y.start - self.y.end


def svg(drawn: Picture) -> str:
    body = (
        "\n".join(_body(drawn)) if drawn.end else _text(WIDTH / 2, HEIGHT / 2, "nothing to draw yet", anchor="middle")
    )
    told = escape(_told(drawn))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{told}" font-family="{FONT}" font-size="12">\n<title>{told}</title>\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="{PAPER}" stroke="{GRID}"/>\n'
        f"{body}\n</svg>\n"
    )


def _told(drawn: Picture) -> str:
    """The picture in words, for those who cannot see it."""
    last = [f"{line.name} {line.points[-1][1]:.2f}" for line in (*drawn.losses, *drawn.scores)]
    best = f"; the best was at step {drawn.best:,}" if drawn.best is not None else ""
    return f"Training after {drawn.end:,} updates: {', '.join(last)}{best}"


def _body(drawn: Picture) -> Iterator[str]:
    steps = ticks(0, drawn.end, 5)
    if steps[-1] > drawn.end:  # the axis ends where training does
        steps.pop()
    inner = WIDTH - LEFT - RIGHT
    half = (inner - GAP) / 2 if drawn.scores else inner
    if drawn.losses:
        yield from _panel("loss", "Cross-entropy, nats per token", drawn, drawn.losses, (LEFT, half), steps)
    if drawn.scores:
        left = LEFT + half + GAP
        yield from _panel("score", "Score on held-out text", drawn, drawn.scores, (left, half), steps)
    if drawn.rate.points:
        yield from _strip(drawn, inner)


def _panel(
    name: str, title: str, drawn: Picture, lines: Sequence[Line], across: tuple[float, float], steps: Sequence[float]
) -> Iterator[str]:
    left, width = across
    low, high = span(lines, drawn.end)
    marks = ticks(low, high, 5)
    panel = Panel(name, Scale(0, drawn.end, left, left + width), Scale(marks[0], marks[-1], TOP + PANEL, TOP))
    yield _text(left, 32, title, weight="600", size=14)
    yield from _legend(lines, left, 53)
    yield from _grid(panel, marks)
    yield from _steps(panel, steps)
    if drawn.best is not None:
        x = panel.x(drawn.best)
        yield f'<path d="M{x:.1f} {TOP}V{TOP + PANEL}" stroke="{QUIET}" stroke-dasharray="2 4" opacity="0.7"/>'
    yield _clip(panel)
    for line in lines:
        yield from _draw_line(line, panel)
    yield from _best_labels(lines, panel, drawn.best)


def _strip(drawn: Picture, inner: float) -> Iterator[str]:
    """The learning rate, low and wide: its shape is what matters."""
    top = HEIGHT - STRIP - 24
    marks = ticks(0, max(y for _, y in drawn.rate.points), 2)
    panel = Panel("rate", Scale(0, drawn.end, LEFT, LEFT + inner), Scale(marks[0], marks[-1], top + STRIP, top))
    yield _text(LEFT, top - 10, "Learning rate", weight="600")
    yield from _grid(panel, [marks[0], marks[-1]])
    yield _clip(panel)
    yield from _draw_line(drawn.rate, panel)


def _legend(lines: Sequence[Line], left: float, y: float) -> Iterator[str]:
    for line in lines:
        colour = COLOURS[line.name]
        yield f'<path d="M{left:.1f} {y - 4}h18" stroke="{colour}" stroke-width="2.5" stroke-linecap="round"/>'
        if line.dots:
            yield f'<circle cx="{left + 9:.1f}" cy="{y - 4}" r="3" fill="{colour}"/>'
        yield _text(left + 24, y, line.name, colour=QUIET)
        left += 24 + LETTER * len(line.name) + 22


def _grid(panel: Panel, marks: Sequence[float]) -> Iterator[str]:
    for mark in marks:
        y = panel.y(mark)
        yield f'<path d="M{panel.x.start:.1f} {y:.1f}H{panel.x.end:.1f}" stroke="{GRID}"/>'
        yield _text(panel.x.start - 8, y + 4, number(mark), anchor="end", colour=QUIET, size=11)


def _steps(panel: Panel, steps: Sequence[float]) -> Iterator[str]:
    base = panel.y.start
    yield f'<path d="M{panel.x.start:.1f} {base}H{panel.x.end:.1f}" stroke="{QUIET}"/>'
    for step in steps:
        x = panel.x(step)
        yield f'<path d="M{x:.1f} {base}v4" stroke="{QUIET}"/>'
        yield _text(x, base + 18, number(step), anchor="middle", colour=QUIET, size=11)
    yield _text(panel.x.end, base + 34, "updates", anchor="end", colour=QUIET, size=11)


def _clip(panel: Panel) -> str:
    x, y, width, height = panel.box
    # A little more than the panel, so that lines on its border keep their width.
    rect = f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="{width + 8:.1f}" height="{height + 8:.1f}"/>'
    return f'<clipPath id="{panel.name}">{rect}</clipPath>'


def _draw_line(line: Line, panel: Panel) -> Iterator[str]:
    colour, width = COLOURS[line.name], 2 if line.dots else 1.5
    places = [(panel.x(x), panel.y(y)) for x, y in thinned(line.points)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<g clip-path="url(#{panel.name})" fill="none" stroke="{colour}">'
    yield f'<path d="M{path}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"/>'
    if line.dots and len(places) <= MOST // 8:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}" stroke="none"/>' for x, y in places)
    yield "</g>"


def _best_labels(lines: Sequence[Line], panel: Panel, best: int | None) -> Iterator[str]:
    """The value of each seldom measured line where the run was best, beside its point, kept inside the panel."""
    if best is None:
        return
    x, taken = panel.x(best), [panel.y.end - 6]  # the heights of text that stands there already
    yield _inside(panel, x, taken[0], f"best: {best:,}", colour=QUIET, weight="400", size=11)
    for line in lines:
        value, colour = line.at(best), COLOURS[line.name]
        if value is None or not line.dots:
            continue
        y = panel.y(value)
        free = (at for at in (y - 12, y + 22) if all(abs(at - other) > 14 for other in taken) and at < panel.y.start)
        taken.append(next(free, y - 12))
        text = f"{value:.2f}" if line.name == "validation" else f"{line.name} {value:.1f}"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{PAPER}" stroke="{colour}" stroke-width="2.5"/>'
        yield _inside(panel, x, taken[-1], text, colour=colour, weight="600", size=12)


def _inside(panel: Panel, x: float, y: float, text: str, *, colour: str, weight: str, size: int) -> str:
    """Text in the middle over a place, moved so that it does not leave the panel."""
    half = LETTER * len(text) / 2 + 2
    middle = min(max(x, panel.x.start + half), panel.x.end - half)
    return _text(middle, y, text, anchor="middle", colour=colour, weight=weight, size=size, halo=True)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = INK,
    weight: str = "400",
    size: int = 12,
    halo: bool = False,
) -> str:
    """`halo`: readable on top of lines."""
    around = f' stroke="{PAPER}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}" '
        f'font-size="{size}"{around}>{escape(text)}</text>'
    )


# ---- PNG -------------------------------------------------------------------------------------------------------------


def draw_png(events: Sequence[Event], path: Path) -> bool:
    """The same panels by matplotlib; False where it is not installed (`pip install 'attent[viz]'`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    drawn = picture(events)
    groups = [group for group in (drawn.losses, drawn.scores, (drawn.rate,)) if group and group[0].points]
    if not groups:
        return False
    figure = Figure(figsize=(5 * len(groups), 4), layout="constrained")
    for axes, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        for line in group:
            xs, ys = zip(*thinned(line.points), strict=True)
            axes.plot(xs, ys, label=line.name, color=COLOURS[line.name], marker="." if line.dots else None)
        if drawn.best is not None and group is not groups[-1]:
            axes.axvline(drawn.best, color=QUIET, linestyle=":", label=f"best: {drawn.best:,}")
        axes.set_xlabel("updates")
        axes.grid(color=GRID)
        axes.legend(frameon=False)
    aside = path.with_name(path.name + ".new")
    figure.savefig(aside, format="png", dpi=144)
    os.replace(aside, path)
    return True
