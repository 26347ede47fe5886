"""`curves.svg`: losses, metrics and learning rate of a run, drawn from its events; notebooks show the same panels."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from attent.scoring.metrics import METRICS
from attent.storage.atomic import write_atomic
from attent.training.events import Ended, Event, Progress, Validated

MAX_POINTS = 400  # of a line
SETTLED_FRACTION = 0.04  # of a run: the loss before it is outside of the scale, so that the rest can be seen
MIN_EXACT = 20.0  # percent; below, exact matches do not measure the task
TRAIN_COLOR, GRID_COLOR = "#9fb3c8", "#e4e7eb"
# Near Okabe and Ito's palette, which colour-blind people can tell apart, but visible on light and on dark pages.
COLORS = ("#d55e00", "#2a8fd4", "#009e73", "#b267a8", "#b8860b", "#7f7f7f")
PANEL_WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 214, 52, 20, 26, 34  # a panel and its margins, in pixels

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    name: str
    points: tuple[Point, ...]
    has_markers: bool = False  # measured seldom: each measurement is shown


@dataclass(frozen=True, kw_only=True)
class CurveData:
    losses: tuple[CurveLine, ...]
    metrics: tuple[CurveLine, ...]
    learning_rate: CurveLine
    best_step: int | None
    last_step: int


class CurveWriter:
    def __init__(self, path: Path, past_events: Iterable[Event] = ()) -> None:
        """`past_events` are those of the run that is resumed."""
        self.path = Path(path)
        self._events = list(past_events)
        self._failed = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress | Validated):
            self._events.append(event)
        if isinstance(event, Validated | Ended) and not self._failed:
            try:
                draw_curves(self._events, self.path)
            except OSError as error:
                self._failed = True
                problem = f"{self.path}: cannot be written ({error.strerror or error})"
                print(f"warning: {problem}; training continues without curves", file=sys.stderr)


def collect_curves(events: Sequence[Event]) -> CurveData:
    """Collect the lines; of a step that was reported twice, before and after an interruption, the last report."""
    progress = sorted({e.step: e for e in events if isinstance(e, Progress)}.values(), key=lambda e: e.step)
    validated = sorted({e.step: e for e in events if isinstance(e, Validated)}.values(), key=lambda e: e.step)
    best = [e.step for e in validated if e.best]
    losses = (
        # From the perplexity: the loss itself includes label smoothing, which the validation loss does not.
        _build_line("training", ((e.step, math.log(e.perplexity) if e.perplexity > 0 else None) for e in progress)),
        _build_line("validation", ((e.step, e.loss) for e in validated), has_markers=True),
    )
    return CurveData(
        losses=tuple(line for line in losses if line.points),
        metrics=tuple(_build_metric_lines(validated)),
        learning_rate=_build_line("learning rate", ((e.step, e.lr) for e in progress)),
        best_step=best[-1] if best else None,
        last_step=max([0, *(e.step for e in progress), *(e.step for e in validated)]),
    )


def _build_metric_lines(validated: Sequence[Validated]) -> Iterator[CurveLine]:
    names = [name for name in METRICS if any(name in e.metrics for e in validated)]
    for name in names:
        title = f"{METRICS[name].title} {METRICS[name].unit}".strip()
        line = _build_line(title, ((e.step, e.metrics.get(name)) for e in validated), has_markers=True)
        too_low = name == "exact" and len(names) > 1 and max((y for _, y in line.points), default=0.0) < MIN_EXACT
        if line.points and not too_low:
            yield line


def _build_line(name: str, points: Iterable[tuple[int, float | None]], *, has_markers: bool = False) -> CurveLine:
    finite = tuple((x, y) for x, y in points if y is not None and math.isfinite(y))
    return CurveLine(name=name, points=finite, has_markers=has_markers)


def downsample(points: Sequence[Point], max_points: int = MAX_POINTS) -> list[Point]:
    """Average neighbouring points; the first and the last stay."""
    if len(points) <= max_points:
        return list(points)
    inner, groups = points[1:-1], max_points - 2
    bounds = [round(i * len(inner) / groups) for i in range(groups + 1)]
    means = [(fmean(x for x, _ in inner[a:b]), fmean(y for _, y in inner[a:b])) for a, b in pairwise(bounds)]
    return [points[0], *means, points[-1]]


def compute_value_range(lines: Sequence[CurveLine], last_step: int) -> tuple[float, float]:
    """The lowest and the highest value, without the steep fall at the beginning."""
    points = [point for line in lines for point in line.points]
    values = [y for x, y in points if x >= SETTLED_FRACTION * last_step] or [y for _, y in points]
    return min(values), max(values)


def draw_curves(events: Sequence[Event], path: Path) -> None:
    if panels := render_panels(events):
        size = f'width="{PANEL_WIDTH * len(panels)}" height="{PANEL_HEIGHT}"'
        placed = (f'<g transform="translate({PANEL_WIDTH * i})">{panel}</g>' for i, panel in enumerate(panels))
        content = f'<rect width="100%" height="100%" fill="white"/>{"".join(placed)}'
        write_atomic(path, f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{content}</svg>\n'.encode())


def render_panels(events: Sequence[Event]) -> list[str]:
    """Return the losses, metrics and learning rate, those that there are, as SVG elements in the color of the text."""
    curves = collect_curves(events)
    lines_by_title = {
        "Cross-entropy (nats)": curves.losses,
        "Validation metrics": curves.metrics,
        "Learning rate": (curves.learning_rate,),
    }
    return [_render_panel(*panel, curves) for panel in lines_by_title.items() if panel[1] and panel[1][0].points]


def _render_panel(title: str, lines: Sequence[CurveLine], curves: CurveData) -> str:
    low, high = compute_value_range(lines, curves.last_step)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 0.05
    low, high = low - margin, high + margin
    width, height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM

    def locate(x: float, y: float) -> tuple[float, float]:
        return round(width * x / max(curves.last_step, 1), 1), round(height * (high - y) / (high - low), 1)

    parts = [f'<text x="{LEFT}" y="14" font-weight="bold">{title}</text>']
    for tick in find_ticks(low, high):
        y = TOP + locate(0, tick)[1]
        parts.append(f'<path d="M{LEFT} {y}h{width}" stroke="currentColor" stroke-opacity="0.2"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:.4g}</text>')
    for tick in find_ticks(0, curves.last_step)[1:]:
        x = LEFT + locate(tick, 0)[0]
        parts.append(f'<text x="{x}" y="{PANEL_HEIGHT - 18}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(f'<text x="{LEFT + width / 2}" y="{PANEL_HEIGHT - 4}" text-anchor="middle">step</text>')
    parts.append(f'<svg x="{LEFT}" y="{TOP}" width="{width + 4}" height="{height}">')  # clips the lines
    if curves.best_step is not None and lines[0] is not curves.learning_rate:
        x = locate(curves.best_step, 0)[0]
        best = f'<path d="M{x} 0v{height}" stroke="currentColor" stroke-opacity="0.5" stroke-dasharray="2 3">'
        parts.append(f"{best}<title>best: step {curves.best_step:,}</title></path>")
    colors, legend = iter(COLORS), []
    for line in lines:
        color = next(colors) if line.has_markers else TRAIN_COLOR
        points = [locate(*point) for point in downsample(line.points)]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2" fill="{color}"/>' for x, y in points if line.has_markers]
        legend += [f'<tspan fill="{color}">{line.name}</tspan>'] if len(lines) > 1 or line.has_markers else []
    parts.append(f'</svg><text x="{LEFT + width}" y="14" text-anchor="end">{"&#160; ".join(legend)}</text>')
    size = f'width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" viewBox="0 0 {PANEL_WIDTH} {PANEL_HEIGHT}"'
    font = 'font-family="sans-serif" font-size="11" fill="currentColor"'
    return f'<svg {size} {font} style="max-width: 100%">{"".join(parts)}</svg>'


def find_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two values, at most six."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5)) if high > low else 1.0
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 5)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
