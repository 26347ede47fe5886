"""Training as a person watches it: a display that renews itself at a terminal, plain lines in a file or a pipe.

It listens to events and writes to stderr. It never reads, computes or decides anything about the training itself, and
draws only when an event comes, at most four times a second and in one hundredth of the time, so that it costs next to
nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from attent.cli.data import visible
from attent.train.card import duration, many, short
from attent.train.events import Ended, Event, Note, Progress, Sample, Saved, Started, Validated

EVERY = 10.0  # seconds between plain lines
REDRAW = 0.25  # seconds between drawings, at least
SHARE = 0.01  # of the time may go into drawing: slow machines draw less often
ROWS = 8  # validations shown
SAMPLES = 3
WIDEST = 100  # columns: numbers far apart are hard to read
KEPT = 512  # losses remembered for the sparkline
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*%#"
FEW_ROWS = 16  # of a terminal: there is no room for samples


class Watch:
    """A context manager that is told events. `title` is what is trained, `before` what a resumed run told earlier."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        title: str = "",
        quiet: bool = False,
        before: Iterable[Event] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self.title = title
        self._clock = clock
        self._story = Story()
        self._live: Live | None = None
        self._next = self._told = -math.inf  # when it may be drawn again, and when the last plain line was written
        self._untold: Progress | None = None
        self.recall(before)

    def recall(self, events: Iterable[Event]) -> None:
        """What a resumed run told before."""
        for event in events:
            self._story.take(event)

    def __enter__(self) -> Watch:
        if self.console.is_terminal and not self.console.is_dumb_terminal and not self.quiet:
            # Without its thread: it would draw, and hold the interpreter, while nothing has changed.
            self._live = Live(console=self.console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_display()

    def __call__(self, event: Event) -> None:
        self._story.take(event)
        if isinstance(event, Ended):
            self._end(event)
        elif isinstance(event, Note):
            self._note(event)
        elif self._live is not None:
            self._draw(now=not isinstance(event, Progress))
        elif not self.quiet:
            self._plain(event)

    def _note(self, note: Note) -> None:
        if note.weight == "warning":
            self._say(Text.assemble(("warning: ", "bold yellow"), visible(note.text)))
        elif not self.quiet:
            self._say(Text(visible(note.text)))

    def _end(self, event: Ended) -> None:
        if self._untold is not None and not self.quiet and self._live is None:
            self._say(Text(progress_line(self._untold, self._story.steps)))
            self._untold = None
        self._leave_display()
        self._say(Text(end_line(event, self._story.best), "bold"))

    def _say(self, line: Text) -> None:
        """A line that stays, above the display where there is one; never broken in a pipe."""
        self.console.print(line, soft_wrap=not self.console.is_terminal)

    # ---- at a terminal

    def _draw(self, *, now: bool) -> None:
        began = self._clock()
        if self._live is None or (not now and began < self._next):
            return
        width, height = self.console.size
        screen = display(self._story, self.title, min(width, WIDEST), height, plain=self.console.options.ascii_only)
        self._live.update(screen, refresh=True)
        self._next = self._clock() + max(REDRAW, (self._clock() - began) / SHARE)

    def _leave_display(self) -> None:
        if self._live is not None:
            if self._story.started:
                self._draw(now=True)
            self._live.stop()
            self._live = None

    # ---- in a file or a pipe

    def _plain(self, event: Event) -> None:
        if isinstance(event, Started):
            self._say(Text(header(self.title, event)))
        elif isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, Validated):
            self._say(Text(validated_line(event)))
            for sample in event.samples[:SAMPLES]:
                for mark, words in (("source", sample.source), ("wanted", sample.reference), ("output", sample.output)):
                    self._say(Text(f"    {mark}  {visible(words)}"))

    def _progress(self, event: Progress) -> None:
        self._untold = event
        if self._clock() - self._told >= EVERY:
            self._told, self._untold = self._clock(), None
            self._say(Text(progress_line(event, self._story.steps)))


class Story:
    """What is remembered of the events: little, however long the run."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.progress: Progress | None = None
        self.validated: deque[Validated] = deque(maxlen=ROWS)
        self.best: Validated | None = None
        self.saved: Saved | None = None
        self.losses: list[float] = []
        self._each = 1  # this many losses become one of `losses`, by their mean
        self._some: list[float] = []

    @property
    def steps(self) -> int:
        return self.started.steps if self.started else 0

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Progress):
            self.progress = event
            self._take_loss(event.loss)
        elif isinstance(event, Validated):
            if self.validated and self.validated[-1].step == event.step:
                self.validated.pop()  # told again by a resumed run
            self.validated.append(event)
            self.best = event if event.best else self.best
        elif isinstance(event, Saved):
            self.saved = event

    def _take_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            return
        self._some.append(loss)
        if len(self._some) >= self._each:
            self.losses.append(math.fsum(self._some) / len(self._some))
            self._some = []
        if len(self.losses) >= KEPT:
            self.losses = halved(self.losses)
            self._each *= 2


# ---- the display -----------------------------------------------------------------------------------------------------


def display(story: Story, title: str, width: int, height: int, *, plain: bool = False) -> RenderableType:
    """All that fits; where a terminal is low, the samples and then the older validations make room."""
    parts: list[RenderableType] = []
    if story.started:
        parts += [cut(header(title, story.started), width, "bold"), _bar(story, width)]
    if story.progress:
        parts += ["", _numbers(story.progress, width), _sparkline(story, width, plain)]
    rows = list(story.validated)
    room = height - 8
    samples = rows[-1].samples[: min(SAMPLES, max(0, room - 6) // 4)] if rows and height > FEW_ROWS else ()
    if rows and room > 3:
        shown = min(len(rows), max(1, room - 3 - 4 * len(samples)))
        parts += ["", _validations(rows[-shown:], story.best, width, plain)]
    for sample in samples:
        parts += ["", _sample(sample, width)]
    return Group(*parts)


def cut(text: str, width: int, style: str = "") -> Text:
    line = Text(visible(text), style, no_wrap=True, overflow="ellipsis")
    line.truncate(max(width, 1), overflow="ellipsis")
    return line


def header(title: str, started: Started) -> str:
    learned = f", {short(started.trained)} trained" if started.trained != started.parameters else ""
    facts = [title, f"{short(started.parameters)} parameters{learned}", started.device]
    return "  ".join(fact for fact in facts if fact)


def _bar(story: Story, width: int) -> RenderableType:
    done = story.progress.step if story.progress else story.started.step if story.started else 0
    words = [f"{done:,}/{story.steps:,}"]
    if story.progress:
        words += [f"epoch {story.progress.epoch:.1f}", left(story.progress.seconds_left)]
    if story.saved and width >= 80:
        words.append(f"saved at {story.saved.step:,}")
    told = "  ".join(word for word in words if word)
    table = Table.grid(padding=(0, 2))
    room = max(8, width - len(told) - 2)
    bar = ProgressBar(total=max(story.steps, 1), completed=done, width=room, complete_style="cyan")
    table.add_row(bar, told)
    return table


def _numbers(progress: Progress, width: int) -> RenderableType:
    wide, roomy = width >= 78, width >= 96
    targets, busy = progress.targets_per_second, progress.busy
    cells = [
        ("loss", loss(progress.loss)),
        ("perplexity", perplexity(progress.perplexity)),
        ("tokens/s", speed(progress.tokens_per_second)),
        *([("targets/s", speed(targets))] if targets is not None and roomy else []),
        *([("GPU busy", share(busy))] if busy is not None else []),
        *([("learning rate", rate(progress.lr))] if busy is None or roomy else []),
        ("gradient", gradient(progress.grad_norm)),
        ("time", duration(progress.seconds)),
    ]
    shown = cells if wide else cells[:5]
    table = Table(box=None, padding=(0, 3 if wide else 2, 0, 0), pad_edge=False)
    for name, _ in shown:
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    table.add_row(*(Text(value, "bold" if name == "loss" else "") for name, value in shown))
    return table


def _sparkline(story: Story, width: int, plain: bool) -> RenderableType:
    if len(story.losses) < 2:
        return Text("")
    ends = f"{loss(story.losses[0])}", f"{loss(story.losses[-1])}"
    room = min(width - sum(map(len, ends)) - 10, 64)
    line = sparkline(story.losses, max(room, 1), ASCII if plain else BLOCKS)
    return Text.assemble(("loss  ", "dim"), (f"{ends[0]} ", "dim"), (line, "cyan"), (f" {ends[1]}", "dim"))


def sparkline(values: Sequence[float], width: int, marks: str = BLOCKS) -> str:
    """Values as a row of bars, low to high; more values than columns are averaged."""
    if len(values) > width:
        ends = [round(i * len(values) / width) for i in range(width + 1)]
        values = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    # Scaled by what comes after the first fall, which would press all the rest flat.
    low, high = min(values), max(values[len(values) // 20 :])
    size = (high - low) or 1.0
    return "".join(marks[min(int((value - low) / size * len(marks)), len(marks) - 1)] for value in values)


def halved(values: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=False)]


def _validations(rows: Sequence[Validated], best: Validated | None, width: int, plain: bool) -> RenderableType:
    named = {"BLEU": "bleu", "chrF": "chrf", "exact %": "exact", "accuracy %": "accuracy"}
    scores = {name: key for name, key in named.items() if any(getattr(row, key) is not None for row in rows)}
    table = Table(box=None, padding=(0, 3 if width >= 78 else 2, 0, 0), pad_edge=False)
    for name in ("validated at", "epoch", "loss", *scores):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        is_best = best is not None and row.step == best.step
        cells = [f"{row.step:,}", f"{row.epoch:.1f}", loss(row.loss)]
        cells += [score(getattr(row, key)) for key in scores.values()]
        mark = ("* best" if plain else "★ best") if is_best else ""
        table.add_row(*cells, mark, style="bold green" if is_best else "")
    return table


def _sample(sample: Sample, width: int) -> RenderableType:
    right = sample.output == sample.reference
    rows = (
        ("source", sample.source, "dim"),
        ("wanted", sample.reference, ""),
        ("output", sample.output, "bold green" if right else "bold"),
    )
    return Group(*(Text.assemble((f"{mark}  ", "dim"), cut(words, width - 8, style)) for mark, words, style in rows))


# ---- plain lines -----------------------------------------------------------------------------------------------------


def progress_line(event: Progress, steps: int) -> str:
    parts = [
        f"step {event.step:>{len(f'{steps:,}')},}/{steps:,}",
        f"epoch {event.epoch:.1f}",
        f"loss {loss(event.loss)}",
        f"ppl {perplexity(event.perplexity)}",
        f"{speed(event.tokens_per_second)} tokens/s",
        "" if event.targets_per_second is None else f"({speed(event.targets_per_second)} targets/s)",
        "" if event.busy is None else f"GPU {share(event.busy)} busy",
        f"lr {rate(event.lr)}",
        left(event.seconds_left),
    ]
    return "  ".join(part for part in parts if part)


def validated_line(event: Validated) -> str:
    parts = [f"validated at step {event.step:,}", f"loss {loss(event.loss)}"]
    shares = (("exact", event.exact, "%"), ("accuracy", event.accuracy, "%"))
    named = (("BLEU", event.bleu, ""), ("chrF", event.chrf, ""), *shares)
    parts += [f"{name} {score(value)}{unit}" for name, value, unit in named if value is not None]
    parts.append("best so far" if event.best else f"best was {many(event.waited, 'validation')} ago")
    return "  ".join(parts)


def end_line(event: Ended, best: Validated | None) -> str:
    reasons = {
        "steps": f"done: {many(event.step, 'update')}",
        "patience": f"done: no longer getting better, stopped after {many(event.step, 'update')}",
        "stopped": f"stopped after {many(event.step, 'update')}",
    }
    told = f"{reasons[event.reason]} in {duration(event.seconds)}"
    return f"{told}; best at step {best.step:,}: {_figures(best)}" if best else told


def _figures(event: Validated) -> str:
    scores = [f"{score(v)} {name}" for v, name in ((event.bleu, "BLEU"), (event.chrf, "chrF")) if v is not None]
    shares = ((event.exact, "exact"), (event.accuracy, "right"))
    return ", ".join([f"loss {loss(event.loss)}", *scores, *(f"{score(v)}% {n}" for v, n in shares if v is not None)])


# ---- numbers ---------------------------------------------------------------------------------------------------------


def loss(value: float) -> str:
    return f"{value:.3f}"


def perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1_000 else f"{value:,.0f}" if value < 1e7 else f"{value:.1e}"


def speed(value: float) -> str:
    """Three digits: 18,400."""
    return f"{float(f'{value:.3g}'):,.0f}" if math.isfinite(value) else "-"


def share(value: float) -> str:
    return f"{100 * value:.0f}%"


def rate(value: float) -> str:
    return f"{value:.1e}"


def gradient(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1e}"


def score(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def left(seconds: float | None) -> str:
    """As rough as such a guess is: 12 min left, 2 h 10 min left."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s left"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min left"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min left" if hours < 48 else f"{round(minutes / 1440)} days left"
