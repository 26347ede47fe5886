"""The progress display in a notebook: HTML with curves, updated in place, in colors for light and dark themes."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from html import escape
from typing import Any

from attent.formatting import escape_invisible
from attent.training import progress
from attent.training.curves import COLORS, render_panels
from attent.training.events import Ended, Event, Note, Progress, Validated
from attent.training.progress import EventHistory, TrainingDisplay, format_end

MIN_REDRAW_INTERVAL = 1.0  # seconds


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
        self._next_draw = start + max(MIN_REDRAW_INTERVAL, seconds / progress.MAX_DRAW_FRACTION)

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
            header = progress.format_header(self._title, history.started)
            yield _render_line(header, "white-space: pre-wrap; font-weight: bold")
            yield (
                '<div style="height: 6px; margin: 4px 0; border-radius: 3px; background: rgba(128, 128, 128, 0.3)">'
                f'<div style="height: 6px; border-radius: 3px; background: {COLORS[1]}; '
                f'width: {100 * done / max(history.steps, 1):.1f}%"></div></div>'
            )
        if history.progress is not None:
            parts = progress.list_progress(history.progress, history.steps)
            yield _render_line("   ".join(parts), "white-space: pre-wrap")
        if history.validated is not None:
            yield _render_line(progress.format_validation(history.validated), "white-space: pre-wrap")
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
