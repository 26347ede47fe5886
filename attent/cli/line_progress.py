"""A progress line on the terminal for commands that read lines, with messages in between."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TextIO

from attent.formatting import format_duration

REDRAW_INTERVAL = 0.25  # seconds
SPEED_WINDOW = 5.0  # seconds over which speed is measured: a slow start says nothing about the rest


def print_message(message: str) -> None:
    print(f"attent: {message}", file=sys.stderr, flush=True)


def print_status(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def use_utf8(stream: TextIO) -> None:
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", newline="\n")


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.is_live = False
        self.is_drawn = False
        self.total_bytes: int | None = None
        self.next_redraw = clock()
        self.samples: deque[ProgressSample] = deque([ProgressSample(self.next_redraw, 0, 0.0)])

    def __exit__(self, *error: object) -> None:
        self.clear()

    def start(self, total_bytes: int | None, *, quiet: bool) -> None:
        self.is_live = self.stream.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self.total_bytes, self.samples = total_bytes, deque([ProgressSample(self.clock(), 0, 0.0)])

    def print_message(self, message: str) -> None:
        self.clear()
        print(f"attent: {message}", file=self.stream, flush=True)

    def update(self, lines: int, done_bytes: int, total_lines: int | None = None) -> None:
        now = self.clock()
        if not self.is_live or now < self.next_redraw:
            return
        fraction = lines / total_lines if total_lines else done_bytes / self.total_bytes if self.total_bytes else 0.0
        if lines < self.samples[-1].lines:  # another pass over the document
            self.samples = deque([replace(self.samples[-1], lines=0, fraction=0.0)])
        self.samples.append(ProgressSample(now, lines, min(fraction, 1.0)))
        while now - self.samples[1].time >= SPEED_WINDOW:
            self.samples.popleft()
        self.stream.write(f"\r\x1b[K{format_progress(self.samples[0], self.samples[-1])}")
        self.stream.flush()
        self.is_drawn, self.next_redraw = True, now + REDRAW_INTERVAL

    def clear(self) -> None:
        if self.is_drawn:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
            self.is_drawn = False


@dataclass(frozen=True)
class ProgressSample:
    time: float
    lines: int
    fraction: float  # 0: unknown


def format_progress(before: ProgressSample, now: ProgressSample) -> str:
    """`1,024 lines, 210 a second, 40%, 12 s left`"""
    seconds = max(now.time - before.time, 1e-3)
    speed = (now.lines - before.lines) / seconds
    progress = f"{now.lines:,} lines, {speed:,.{0 if speed >= 10 else 1}f} a second"
    if now.fraction <= before.fraction:
        return progress if not now.fraction else f"{progress}, {now.fraction:.0%}"
    left = seconds * (1 - now.fraction) / (now.fraction - before.fraction)
    return f"{progress}, {now.fraction:.0%}, {format_duration(left)} left"
