"""The progress display: lines on stderr, at a terminal with a bar, and in a notebook HTML with curves.

Bars and curves are drawn at most 4 times or once a second, in 1% of the time; the colors fit light and dark themes.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from html import escape
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from attent.formatting import escape_invisible, format_count, format_duration, format_percent, format_short
from attent.scoring.metrics import format_metrics
from attent.training.curves import COLORS, render_panels
from attent.training.events import Ended, Event, Note, Progress, Started, Validated

LINE_INTERVAL = 10.0  # seconds between plain lines
MIN_REDRAW_INTERVAL, MIN_NOTEBOOK_REDRAW_INTERVAL = 0.25, 1.0  # seconds
MAX_DRAW_FRACTION = 0.01  # of the time, so that slow machines draw less often
MAX_SAMPLES = 3
MAX_WIDTH = 100  # columns


class TrainingDisplay(AbstractContextManager["TrainingDisplay"]):
    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self.title = ""
        self._clock = clock
        self._history = EventHistory()
        self._live: Live | None = None
        self._is_live = self.console.is_terminal and not self.console.is_dumb_terminal and not quiet
        self._next_draw = self._last_line = -math.inf  # times
        self._unprinted: Progress | None = None

    def begin_run(self, title: str, history: Iterable[Event]) -> None:
        self.title = title
        for event in history:
            self._history.add(event)

    def __exit__(self, *error: object) -> None:
        self._stop_display()

    def __call__(self, event: Event) -> None:
        if self._is_live and self._live is None:  # on the first event: ranks other than 0 receive none
            # No refresh thread: it would redraw, and hold the interpreter, while nothing changes.
            self._live = Live(console=self.console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        self._history.add(event)
        if isinstance(event, Ended):
            if self._unprinted is not None and not self.quiet and self._live is None:
                self._print(Text(format_progress(self._unprinted, self._history.steps)))
                self._unprinted = None
            self._stop_display()
            self._print(Text(format_end(event, self._history.best), "bold"))
        elif isinstance(event, Note) and event.level == "warning":
            self._print(Text.assemble(("warning: ", "bold yellow"), escape_invisible(event.text)))
        elif isinstance(event, Note):
            if not self.quiet:
                self._print(Text(escape_invisible(event.text)))
        elif isinstance(event, Validated) and not self.quiet:
            self._print(Text(escape_invisible(format_validation(event)), "green" if event.best else ""))
            for sample in event.samples[:MAX_SAMPLES]:
                for label, text in (("source", sample.source), ("target", sample.reference), ("output", sample.output)):
                    self._print(Text(f"    {label}  {escape_invisible(text)}"))
        elif self._live is not None:
            self._draw(force=not isinstance(event, Progress))
        elif isinstance(event, Started) and not self.quiet:
            self._print(Text(format_header(self.title, event)))
        elif isinstance(event, Progress) and not self.quiet:
            self._unprinted = event
            if self._clock() - self._last_line >= LINE_INTERVAL:
                self._last_line, self._unprinted = self._clock(), None
                self._print(Text(format_progress(event, self._history.steps)))

    def _print(self, line: Text) -> None:
        """Print a permanent line above the live display; in a pipe it is never wrapped."""
        self.console.print(line, soft_wrap=not self.console.is_terminal)

    def _draw(self, *, force: bool) -> None:
        began = self._clock()
        if self._live is None or (not force and began < self._next_draw):
            return
        screen = render_display(self._history, self.title, min(self.console.width, MAX_WIDTH))
        self._live.update(screen, refresh=True)
        self._next_draw = self._clock() + max(MIN_REDRAW_INTERVAL, (self._clock() - began) / MAX_DRAW_FRACTION)

    def _stop_display(self) -> None:
        if self._live is not None:
            if self._history.started:
                self._draw(force=True)
            self._live.stop()
            self._live = None
        self._is_live = False


class EventHistory:
    """The part of past events that the display needs, in bounded memory."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.progress: Progress | None = None
        self.validated: Validated | None = None
        self.best: Validated | None = None

    @property
    def steps(self) -> int:
        return self.started.steps if self.started else 0

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Progress):
            self.progress = event
        elif isinstance(event, Validated):
            self.validated = event
            self.best = event if event.best else self.best


def render_display(history: EventHistory, title: str, width: int) -> RenderableType:
    parts: list[RenderableType] = []
    if history.started:
        done = history.progress.step if history.progress else history.started.step
        bar = ProgressBar(total=max(history.steps, 1), completed=done, width=width, complete_style="cyan")
        parts += [truncate_line(format_header(title, history.started), width, "bold"), Padding(bar, 0)]
    if history.progress:
        parts.append(truncate_line(format_progress(history.progress, history.steps), width))
    return Group(*parts)


def truncate_line(text: str, width: int, style: str = "") -> Text:
    line = Text(escape_invisible(text), style, no_wrap=True, overflow="ellipsis")
    line.truncate(max(width, 1), overflow="ellipsis")
    return line


def format_header(title: str, started: Started) -> str:
    trainable, total = started.trainable_parameters, started.parameters
    trained = f", {format_short(trainable)} trainable" if trainable != total else ""
    parts = [title, f"{format_short(total)} parameters{trained}", started.device]
    return "  ".join(part for part in parts if part)


def format_progress(event: Progress, steps: int) -> str:
    return "  ".join(list_progress(event, steps))


def list_progress(event: Progress, steps: int) -> list[str]:
    parts = [
        f"step {event.step:>{len(f'{steps:,}')},}/{steps:,}",
        format_time_left(event.seconds_left),
        f"epoch {event.epoch:.1f}",
        f"loss {event.loss:.3f}",
        f"ppl {format_perplexity(event.perplexity)}",
        f"{format_speed(event.tokens_per_second)} tokens/s",
        "" if event.targets_per_second is None else f"({format_speed(event.targets_per_second)} targets/s)",
        "" if event.gpu_busy is None else f"GPU {format_percent(event.gpu_busy)} busy",
        f"lr {event.lr:.1e}",
    ]
    return [part for part in parts if part]


def format_validation(event: Validated) -> str:
    since = format_count(event.validations_since_best, "validation")
    end = "best so far" if event.best else f"best was {since} ago"
    metrics = format_metrics(event.metrics).replace(", ", "  ")
    return "  ".join(filter(None, [f"validated at step {event.step:,}  loss {event.loss:.3f}", metrics, end]))


def format_end(event: Ended, best: Validated | None) -> str:
    reasons = {"steps": "done:", "patience": "done: stopped early, no improvement after", "stopped": "stopped after"}
    text = f"{reasons[event.reason]} {format_count(event.step, 'step')} in {format_duration(event.seconds)}"
    if best is None:
        return text
    scores = ", ".join(filter(None, [f"loss {best.loss:.3f}", format_metrics(best.metrics)]))
    return f"{text}; best at step {best.step:,}: {scores}"


def format_perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1_000 else f"{value:,.0f}" if value < 1e7 else f"{value:.1e}"


def format_speed(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if math.isfinite(value) else "-"


def format_time_left(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s left"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min left"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min left" if hours < 48 else f"{round(minutes / 1440)} days left"


def open_display() -> AbstractContextManager[Any]:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return NotebookDisplay() if getattr(shell, "kernel", None) else TrainingDisplay()


class NotebookDisplay(AbstractContextManager["NotebookDisplay"]):
    def __init__(self) -> None:
        self._title = ""
        self._history = EventHistory()
        self._curve_events: list[Event] = []
        self._notes: list[Note] = []
        self._ended: Ended | None = None
        self._is_closed = False
        self._handle: Any = None  # of IPython's display
        self._next_draw = 0.0

    def begin_run(self, title: str, history: Iterable[Event]) -> None:
        self._title = title
        for event in history:
            self._add(event)

    def __exit__(self, *error: object) -> None:
        self._is_closed = True
        if self._handle is not None:
            self._draw()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self._notes.append(event)
        self._ended = event if isinstance(event, Ended) else self._ended
        self._add(event)
        if not isinstance(event, Progress) or time.monotonic() >= self._next_draw:
            self._draw()

    def _add(self, event: Event) -> None:
        self._history.add(event)
        if isinstance(event, Progress | Validated):
            self._curve_events.append(event)

    def _draw(self) -> None:
        from IPython.display import display

        start = time.monotonic()
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)
        seconds = time.monotonic() - start
        self._next_draw = start + max(MIN_NOTEBOOK_REDRAW_INTERVAL, seconds / MAX_DRAW_FRACTION)

    def __repr__(self) -> str:
        """The text for notebooks that show no HTML."""
        return format_end(self._ended, self._history.best) if self._ended else self._title or "training"

    def _repr_html_(self) -> str:
        style = "max-width: 60em; line-height: 1.6; font-family: var(--jp-ui-font-family, sans-serif)"
        return f'<div style="{style}">{"".join(self._render_parts())}</div>'

    def _render_parts(self) -> Iterator[str]:
        history = self._history
        if history.started is not None:
            done = history.progress.step if history.progress else history.started.step
            header = format_header(self._title, history.started)
            yield _render_line(header, "white-space: pre-wrap; font-weight: bold")
            yield (
                '<div style="height: 6px; margin: 4px 0; border-radius: 3px; background: rgba(128, 128, 128, 0.3)">'
                f'<div style="height: 6px; border-radius: 3px; background: {COLORS[1]}; '
                f'width: {100 * done / max(history.steps, 1):.1f}%"></div></div>'
            )
        if history.progress is not None:
            parts = list_progress(history.progress, history.steps)
            yield _render_line("   ".join(parts), "white-space: pre-wrap")
        if history.validated is not None:
            yield _render_line(format_validation(history.validated), "white-space: pre-wrap")
        yield from render_panels(self._curve_events)[:2]
        for note in self._notes:
            if note.level == "warning":
                yield _render_line(f"warning: {note.text}", f"color: {COLORS[0]}")
        if self._ended is not None:
            yield _render_line(format_end(self._ended, history.best), "font-weight: bold")
        notes = [_render_line(note.text, "opacity: 0.75") for note in self._notes if note.level == "info"]
        if self._is_closed and notes:  # while it is updated, it would close again and again
            yield f"<details><summary>Notes</summary>{''.join(notes)}</details>"
        else:
            yield from notes[-1:]


def _render_line(text: str, style: str) -> str:
    return f'<div style="{style}">{escape(escape_invisible(text))}</div>'
