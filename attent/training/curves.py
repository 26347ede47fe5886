"""`curves.svg`: how training went, drawn from its events without any dependency.

Losses on the left, scores on the right, the learning rate below; what the run took for its best is marked. The picture
has a background of its own, so that it reads on light and on dark pages. `draw_png` does the same by matplotlib, where
that is installed. Where the events come from (the loop, or `log.jsonl`) is left to the caller.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from attent.storage.atomic import atomic_path, write_atomic
from attent.training.events import Ended, Event, Progress, Validated

CURVES_NAME = "curves.svg"
WIDTH, HEIGHT = 960, 476
LEFT, RIGHT, TOP, GAP = 62, 28, 74, 76  # around and between the panels
PANEL_HEIGHT, LR_HEIGHT = 250, 56  # heights: of losses and scores, and of the learning rate
MAX_POINTS = 400  # points of a line: one for every second pixel
WARMUP_FRACTION = 0.04  # of a run: what the loss falls by before is left out of the scale, so that the rest can be seen
MIN_EXACT = 20.0  # per cent of exact outputs: below, it is no measure of the task
CHAR_WIDTH = 6.2  # pixels of a letter of small text, about

TEXT_COLOR, MUTED_COLOR, GRID_COLOR, BACKGROUND_COLOR = "#1f2933", "#616e7c", "#e4e7eb", "#ffffff"
# Blue, vermilion, green and purple of Okabe and Ito: told apart by colour-blind people, and on paper.
LINE_COLORS = {
    "training": "#9fb3c8",
    "validation": "#d55e00",
    "BLEU": "#0072b2",
    "chrF": "#009e73",
    "exact %": "#8e4585",
    "accuracy %": "#8e4585",
    "learning rate": "#616e7c",
}
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"

CurvePoint = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """One quantity over the steps."""

    name: str
    points: tuple[CurvePoint, ...]
    has_markers: bool = False  # seldom measured: each measurement is shown

    def get_value(self, step: int | None) -> float | None:
        return next((y for x, y in self.points if x == step), None)


@dataclass(frozen=True, kw_only=True)
class CurveData:
    """What is drawn, whoever draws it."""

    losses: tuple[CurveLine, ...]
    scores: tuple[CurveLine, ...]
    learning_rate: CurveLine
    best_step: int | None  # the step that the run took for its best
    last_step: int  # the last step


class CurveWriter:
    """Listens to training, and draws after each validation, at the end as PNG too; never the reason that a run ends."""

    def __init__(self, path: Path, past_events: Iterable[Event] = ()) -> None:
        """`before` is what a resumed run told earlier."""
        self.path = Path(path)
        self._events = list(past_events)
        self._failed = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress | Validated | Ended):
            self._events.append(event)
        if isinstance(event, Validated | Ended) and not self._failed:
            try:
                draw_svg(self._events, self.path)
                if isinstance(event, Ended):  # matplotlib takes half a second
                    draw_png(self._events, self.path.with_suffix(".png"))
            except OSError as error:
                self._failed = True
                reason = error.strerror or str(error)
                print(f"warning: {self.path}: cannot be written ({reason}); no more curves", file=sys.stderr)


def draw_svg(events: Sequence[Event], path: Path) -> None:
    """Write the curves as SVG, atomically."""
    write_atomic(path, render_svg(collect_curves(events)).encode())


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def collect_curves(events: Sequence[Event]) -> CurveData:
    # A step that was told twice, before and after an interruption, counts as it was told last.
    progress = sorted({e.step: e for e in events if isinstance(e, Progress)}.values(), key=lambda e: e.step)
    validated = sorted({e.step: e for e in events if isinstance(e, Validated)}.values(), key=lambda e: e.step)
    best = [e.step for e in validated if e.best]
    return CurveData(
        losses=_drop_empty(
            # The loss that is minimised holds the label smoothing; only without it are both lines one quantity.
            _build_line("training", ((e.step, _to_loss(e.perplexity)) for e in progress)),
            _build_line("validation", ((e.step, e.loss) for e in validated), has_markers=True),
        ),
        scores=_drop_empty(*_score_lines(validated)),
        learning_rate=_build_line("learning rate", ((e.step, e.lr) for e in progress)),
        best_step=best[-1] if best else None,
        last_step=max([0, *(e.step for e in progress), *(e.step for e in validated)]),
    )


def _score_lines(validated: Sequence[Validated]) -> Iterator[CurveLine]:
    yield _build_line("BLEU", ((e.step, e.bleu) for e in validated), has_markers=True)
    yield _build_line("chrF", ((e.step, e.chrf) for e in validated), has_markers=True)
    exact = _build_line("exact %", ((e.step, e.exact) for e in validated), has_markers=True)
    only = all(e.bleu is None and e.chrf is None for e in validated)
    if only or max((y for _, y in exact.points), default=0.0) >= MIN_EXACT:
        yield exact
    yield _build_line("accuracy %", ((e.step, e.accuracy) for e in validated), has_markers=True)


def _build_line(name: str, points: Iterable[tuple[int, float | None]], *, has_markers: bool = False) -> CurveLine:
    return CurveLine(
        name=name,
        points=tuple((x, y) for x, y in points if y is not None and math.isfinite(y)),
        has_markers=has_markers,
    )


def _drop_empty(*lines: CurveLine) -> tuple[CurveLine, ...]:
    return tuple(line for line in lines if line.points)


def _to_loss(perplexity: float) -> float | None:
    return math.log(perplexity) if perplexity > 0 else None


def downsample(points: Sequence[CurvePoint], max_points: int = MAX_POINTS) -> list[CurvePoint]:
    """Many points as fewer, each the mean of its neighbours; the first and the last stay as they are."""
    if len(points) <= max_points:
        return list(points)
    inner, groups = points[1:-1], max_points - 2
    ends = [round(i * len(inner) / groups) for i in range(groups + 1)]
    parts = (inner[a:b] for a, b in pairwise(ends))
    return [points[0], *((_mean(x for x, _ in part), _mean(y for _, y in part)) for part in parts), points[-1]]


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


# ---- scales ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisScale:
    """Numbers from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def compute_ticks(low: float, high: float, target_count: int) -> list[float]:
    """Round numbers that span low to high: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        low, high = low - max(abs(low), 1) * 0.05, high + max(abs(high), 1) * 0.05
    step = _round_step((high - low) / max(target_count, 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)


def value_range(lines: Sequence[CurveLine], last_step: int) -> tuple[float, float]:
    """The lowest and the highest value, the fall at the very beginning aside."""
    points = [point for line in lines for point in line.points]
    values = [y for x, y in points if x >= WARMUP_FRACTION * last_step] or [y for _, y in points]
    return min(values), max(values)


def format_number(value: float) -> str:
    """As few digits as say it: 2,000; 2.5; 0.001."""
    if value and abs(value) < 0.001:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value:,.4f}".rstrip("0").rstrip(".") if value % 1 else f"{value:,.0f}"


# ---- SVG -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurvePanel:
    """A rectangle with two scales."""

    name: str  # of its clip path
    x: AxisScale
    y: AxisScale

    @property
    def box(self) -> tuple[float, float, float, float]:
        return self.x.start, self.y.end, self.x.end - self.x.start, self.y.start - self.y.end


def render_svg(curves: CurveData) -> str:
    body = (
        "\n".join(_render_body(curves))
        if curves.last_step
        else _render_text(WIDTH / 2, HEIGHT / 2, "nothing to draw yet", anchor="middle")
    )
    told = escape(_describe_curves(curves))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{told}" font-family="{FONT}" font-size="12">\n<title>{told}</title>\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="{BACKGROUND_COLOR}" stroke="{GRID_COLOR}"/>\n'
        f"{body}\n</svg>\n"
    )


def _describe_curves(curves: CurveData) -> str:
    """The picture in words, for those who cannot see it."""
    last = [f"{line.name} {line.points[-1][1]:.2f}" for line in (*curves.losses, *curves.scores)]
    best = f"; the best was at step {curves.best_step:,}" if curves.best_step is not None else ""
    return f"Training after {curves.last_step:,} updates: {', '.join(last)}{best}"


def _render_body(curves: CurveData) -> Iterator[str]:
    steps = compute_ticks(0, curves.last_step, 5)
    if steps[-1] > curves.last_step:  # the axis ends where training does
        steps.pop()
    inner = WIDTH - LEFT - RIGHT
    half = (inner - GAP) / 2 if curves.scores else inner
    if curves.losses:
        yield from _render_panel("loss", "Cross-entropy, nats per token", curves, curves.losses, (LEFT, half), steps)
    if curves.scores:
        left = LEFT + half + GAP
        yield from _render_panel("score", "Score on held-out text", curves, curves.scores, (left, half), steps)
    if curves.learning_rate.points:
        yield from _render_learning_rate(curves, inner)


def _render_panel(
    name: str,
    title: str,
    curves: CurveData,
    lines: Sequence[CurveLine],
    across: tuple[float, float],
    steps: Sequence[float],
) -> Iterator[str]:
    left, width = across
    low, high = value_range(lines, curves.last_step)
    marks = compute_ticks(low, high, 5)
    panel = CurvePanel(
        name,
        AxisScale(0, curves.last_step, left, left + width),
        AxisScale(marks[0], marks[-1], TOP + PANEL_HEIGHT, TOP),
    )
    yield _render_text(left, 32, title, weight="600", size=14)
    yield from _render_legend(lines, left, 53)
    yield from _render_grid(panel, marks)
    yield from _render_step_axis(panel, steps)
    if curves.best_step is not None:
        x = panel.x(curves.best_step)
        yield f'<path d="M{x:.1f} {TOP}V{TOP + PANEL_HEIGHT}" stroke="{MUTED_COLOR}" stroke-dasharray="2 4" opacity="0.7"/>'
    yield _render_clip(panel)
    for line in lines:
        yield from _draw_line(line, panel)
    yield from _render_best_labels(lines, panel, curves.best_step)


def _render_learning_rate(curves: CurveData, inner: float) -> Iterator[str]:
    """The learning rate, low and wide: its shape is what matters."""
    top = HEIGHT - LR_HEIGHT - 24
    marks = compute_ticks(0, max(y for _, y in curves.learning_rate.points), 2)
    panel = CurvePanel(
        "rate", AxisScale(0, curves.last_step, LEFT, LEFT + inner), AxisScale(marks[0], marks[-1], top + LR_HEIGHT, top)
    )
    yield _render_text(LEFT, top - 10, "Learning rate", weight="600")
    yield from _render_grid(panel, [marks[0], marks[-1]])
    yield _render_clip(panel)
    yield from _draw_line(curves.learning_rate, panel)


def _render_legend(lines: Sequence[CurveLine], left: float, y: float) -> Iterator[str]:
    for line in lines:
        colour = LINE_COLORS[line.name]
        yield f'<path d="M{left:.1f} {y - 4}h18" stroke="{colour}" stroke-width="2.5" stroke-linecap="round"/>'
        if line.has_markers:
            yield f'<circle cx="{left + 9:.1f}" cy="{y - 4}" r="3" fill="{colour}"/>'
        yield _render_text(left + 24, y, line.name, color=MUTED_COLOR)
        left += 24 + CHAR_WIDTH * len(line.name) + 22


def _render_grid(panel: CurvePanel, tick_values: Sequence[float]) -> Iterator[str]:
    for mark in tick_values:
        y = panel.y(mark)
        yield f'<path d="M{panel.x.start:.1f} {y:.1f}H{panel.x.end:.1f}" stroke="{GRID_COLOR}"/>'
        yield _render_text(panel.x.start - 8, y + 4, format_number(mark), anchor="end", color=MUTED_COLOR, size=11)


def _render_step_axis(panel: CurvePanel, steps: Sequence[float]) -> Iterator[str]:
    base = panel.y.start
    yield f'<path d="M{panel.x.start:.1f} {base}H{panel.x.end:.1f}" stroke="{MUTED_COLOR}"/>'
    for step in steps:
        x = panel.x(step)
        yield f'<path d="M{x:.1f} {base}v4" stroke="{MUTED_COLOR}"/>'
        yield _render_text(x, base + 18, format_number(step), anchor="middle", color=MUTED_COLOR, size=11)
    yield _render_text(panel.x.end, base + 34, "updates", anchor="end", color=MUTED_COLOR, size=11)


def _render_clip(panel: CurvePanel) -> str:
    x, y, width, height = panel.box
    # A little more than the panel, so that lines on its border keep their width.
    rect = f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="{width + 8:.1f}" height="{height + 8:.1f}"/>'
    return f'<clipPath id="{panel.name}">{rect}</clipPath>'


def _draw_line(line: CurveLine, panel: CurvePanel) -> Iterator[str]:
    colour, width = LINE_COLORS[line.name], 2 if line.has_markers else 1.5
    places = [(panel.x(x), panel.y(y)) for x, y in downsample(line.points)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<g clip-path="url(#{panel.name})" fill="none" stroke="{colour}">'
    yield f'<path d="M{path}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"/>'
    if line.has_markers and len(places) <= MAX_POINTS // 8:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}" stroke="none"/>' for x, y in places)
    yield "</g>"


def _render_best_labels(lines: Sequence[CurveLine], panel: CurvePanel, best_step: int | None) -> Iterator[str]:
    """The value of each seldom measured line where the run was best, beside its point, kept inside the panel."""
    if best_step is None:
        return
    x, taken = panel.x(best_step), [panel.y.end - 6]  # the heights of text that stands there already
    yield _render_label(panel, x, taken[0], f"best: {best_step:,}", color=MUTED_COLOR, weight="400", size=11)
    for line in lines:
        value, colour = line.get_value(best_step), LINE_COLORS[line.name]
        if value is None or not line.has_markers:
            continue
        y = panel.y(value)
        free = (at for at in (y - 12, y + 22) if all(abs(at - other) > 14 for other in taken) and at < panel.y.start)
        taken.append(next(free, y - 12))
        text = f"{value:.2f}" if line.name == "validation" else f"{line.name} {value:.1f}"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{BACKGROUND_COLOR}" stroke="{colour}" stroke-width="2.5"/>'
        yield _render_label(panel, x, taken[-1], text, color=colour, weight="600", size=12)


def _render_label(panel: CurvePanel, x: float, y: float, text: str, *, color: str, weight: str, size: int) -> str:
    """Text in the middle over a place, moved so that it does not leave the panel."""
    half = CHAR_WIDTH * len(text) / 2 + 2
    middle = min(max(x, panel.x.start + half), panel.x.end - half)
    return _render_text(middle, y, text, anchor="middle", color=color, weight=weight, size=size, halo=True)


def _render_text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    color: str = TEXT_COLOR,
    weight: str = "400",
    size: int = 12,
    halo: bool = False,
) -> str:
    """`halo`: readable on top of lines."""
    around = (
        f' stroke="{BACKGROUND_COLOR}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"' if halo else ""
    )
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}" '
        f'font-size="{size}"{around}>{escape(text)}</text>'
    )


# ---- PNG -------------------------------------------------------------------------------------------------------------


def draw_png(events: Sequence[Event], path: Path) -> bool:
    """The same panels by matplotlib; False where it is not installed (`pip install 'attent[viz]'`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    drawn = collect_curves(events)
    groups = [group for group in (drawn.losses, drawn.scores, (drawn.learning_rate,)) if group and group[0].points]
    if not groups:
        return False
    figure = Figure(figsize=(5 * len(groups), 4), layout="constrained")
    for axes, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        for line in group:
            xs, ys = zip(*downsample(line.points), strict=True)
            axes.plot(xs, ys, label=line.name, color=LINE_COLORS[line.name], marker="." if line.has_markers else None)
        if drawn.best_step is not None and group is not groups[-1]:
            axes.axvline(drawn.best_step, color=MUTED_COLOR, linestyle=":", label=f"best: {drawn.best_step:,}")
        axes.set_xlabel("updates")
        axes.grid(color=GRID_COLOR)
        axes.legend(frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=144)
    return True
