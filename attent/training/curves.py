"""`curves.svg`: losses, metrics and learning rate of a run, drawn by matplotlib (`pip install 'attent[viz]'`) from its
events, which come from the training loop or from `log.jsonl`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from attent.scoring.metrics import METRICS
from attent.storage.atomic import write_atomic
from attent.training.events import Ended, Event, Progress, Validated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 400  # of a line
DRAW_SECONDS = 60.0  # between two drawings: each takes half a second
SETTLED_FRACTION = 0.04  # of a run: the loss before it is outside of the scale, so that the rest can be seen
MIN_EXACT = 20.0  # percent; below, exact matches do not measure the task
GRID_COLOR, BEST_COLOR = "#e4e7eb", "#616e7c"
# Okabe and Ito's palette, which colour-blind people can tell apart.
COLORS = ("#d55e00", "#0072b2", "#009e73", "#8e4585", "#e69f00", "#56b4e9")
TRAIN_COLOR = "#9fb3c8"

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
    """Listens to training and draws, at most once a minute and at the end; a problem never stops the run."""

    def __init__(self, path: Path, past_events: Iterable[Event] = ()) -> None:
        """`past_events` are those of the run that is resumed."""
        self.path = Path(path)
        self._events = list(past_events)
        self._failed = False
        self._last_drawn = time.monotonic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress | Validated | Ended):
            self._events.append(event)
        due = isinstance(event, Validated) and time.monotonic() - self._last_drawn >= DRAW_SECONDS
        if (due or isinstance(event, Ended)) and not self._failed:
            try:
                draw_curves(self._events, self.path)
                self._last_drawn = time.monotonic()
            except ImportError:
                self._disable("drawing needs matplotlib: pip install 'attent[viz]'")
            except OSError as error:
                self._disable(f"cannot be written ({error.strerror or error})")
            except Exception as error:  # noqa: BLE001 - matplotlib's are of many types
                self._disable(f"cannot be drawn ({type(error).__name__}: {error})")

    def _disable(self, reason: str) -> None:
        self._failed = True
        print(f"warning: {self.path}: {reason}; training continues without curves", file=sys.stderr)


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
    """Write the curves as SVG or PNG, by the suffix. Raise ImportError without matplotlib."""
    from matplotlib.figure import Figure

    curves = collect_curves(events)
    lines_by_title = {
        "Cross-entropy (nats)": curves.losses,
        "Validation metrics": curves.metrics,
        "Learning rate": (curves.learning_rate,),
    }
    panels = [(title, lines) for title, lines in lines_by_title.items() if lines and lines[0].points]
    if not panels:
        return
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, title, lines, curves)
    image = BytesIO()
    figure.savefig(image, format=path.suffix[1:], dpi=144)
    write_atomic(path, image.getvalue())


def _draw_panel(axes: Axes, title: str, lines: Sequence[CurveLine], curves: CurveData) -> None:
    colors = iter(COLORS)
    for line in lines:
        xs, ys = zip(*downsample(line.points), strict=True)
        color = next(colors) if line.has_markers else TRAIN_COLOR
        axes.plot(xs, ys, label=line.name, color=color, marker="." if line.has_markers else None)
    low, high = compute_value_range(lines, curves.last_step)
    margin = 0.05 * (high - low) or max(abs(high), 1.0) * 0.05
    axes.set_ylim(low - margin, high + margin)
    if curves.best_step is not None and lines[0] is not curves.learning_rate:
        axes.axvline(curves.best_step, color=BEST_COLOR, linestyle=":", label=f"best: step {curves.best_step:,}")
    axes.set_title(title)
    axes.set_xlabel("steps")
    axes.grid(color=GRID_COLOR)
    axes.legend(frameon=False)
