"""Events of a training run, `log.jsonl`, which has a JSON object for each, and the signals that stop a run.

Times are seconds of training, summed over all sessions of a resumed run. A resumed run truncates the log to its
checkpoint, so that the file reads as if there had been no interruption. If the log cannot be written, training warns
once and continues without it.
"""

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args, get_type_hints

from attent import settings
from attent.storage.atomic import write_atomic

LOG_FILE = "log.jsonl"
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


@dataclass(frozen=True, kw_only=True)
class Note:
    text: str
    level: Literal["info", "warning"] = "info"
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Started:
    step: int  # 0, or that of the checkpoint
    steps: int  # maximum
    steps_per_epoch: float
    parameters: int
    trainable_parameters: int
    device: str  # "NVIDIA H200, bfloat16, compiled" or "CPU, 2 threads, float32"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Means since the last progress event."""

    step: int
    epoch: float
    loss: float  # with label smoothing, per target (token, masked token, text, image), in nats
    perplexity: float  # exp of the cross-entropy, without label smoothing
    lr: float
    grad_norm: float
    tokens_per_second: float  # of source and target, without padding
    seconds: float
    seconds_left: float | None
    targets_per_second: float | None = None
    gpu_busy: float | None = None  # fraction of the time that the GPU spent in training steps, if known
    peak_memory: int | None = None  # bytes on the GPU, at most, since training started or was last validated


@dataclass(frozen=True, kw_only=True)
class ValidationSample:
    source: str
    reference: str
    output: str


@dataclass(frozen=True, kw_only=True)
class Validated:
    step: int
    epoch: float
    loss: float  # cross-entropy per target, without label smoothing
    best: bool  # so far
    validations_since_best: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # by their names in `attent.scoring.metrics.METRICS`
    samples: tuple[ValidationSample, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Saved:
    step: int
    folder: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Ended:
    step: int
    reason: Literal["steps", "patience", "stopped"]
    seconds: float


Event = Note | Started | Progress | Validated | Saved | Ended
EventHandler = Callable[[Event], None]
EVENT_TYPES: dict[str, type[Event]] = {cls.__name__.lower(): cls for cls in get_args(Event)}
# Fields of type float, where null stands for NaN or infinity.
FLOAT_FIELDS: dict[type, list[str]] = {
    cls: [name for name, kind in get_type_hints(cls).items() if kind is float] for cls in EVENT_TYPES.values()
}


class EventLog:
    """Writes each event as a line, unbuffered, after removing lines of steps after `from_step` (0: all of them)."""

    def __init__(self, path: Path, from_step: int = 0) -> None:
        self.path = Path(path)
        self._file: FileIO | None = None
        self.history: list[Event] = []
        try:
            objects = list(_read_objects(self.path)) if self.path.is_file() else []
            steps = [step if isinstance(step := data.get("step"), int | float) else 0 for _, data in objects]
            earlier = [item for item, step in zip(objects, steps, strict=True) if from_step and step <= from_step]
            self.history = [event for _, data in earlier if (event := _parse_event(data)) is not None]
            earlier_lines = b"".join(line for line, _ in earlier)
            if self.path.is_file() and self.path.stat().st_size != len(earlier_lines):
                write_atomic(self.path, earlier_lines)
            self._file = FileIO(self.path, "a")  # unbuffered: a kill loses at most the line being written
        except OSError as error:
            self._disable(error)

    def __call__(self, event: Event) -> None:
        if self._file is None:
            return
        line = to_json_line(event, datetime.now(UTC))
        try:
            if self._file.write(line) != len(line):
                raise OSError("only part of the line was written; is the disk full?")
        except OSError as error:
            self._disable(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _disable(self, error: OSError) -> None:
        self.close()
        reason = error.strerror or str(error)
        print(f"warning: {self.path}: cannot be written ({reason}); training continues without it", file=sys.stderr)


def read_events(path: Path) -> list[Event]:
    """Read the events of a log; lines that are damaged or of an unknown type are skipped."""
    if not path.is_file():
        return []
    return [event for _, data in _read_objects(path) if (event := _parse_event(data)) is not None]


def to_json_line(event: Event, now: datetime) -> bytes:
    """Serialize an event; NaN and infinity, which JSON lacks, become null."""
    data: dict[str, Any] = {"event": type(event).__name__.lower(), "time": now.isoformat(timespec="seconds")}
    for name, value in settings.to_dict(event).items():
        data[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    # A lone surrogate cannot be UTF-8; Python's escape for it is also JSON's.
    return (json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")


def _read_objects(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line that is a JSON object, and the object; a kill or a full disk may leave partial lines."""
    with open(path, "rb") as file:
        for line in file:
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(data, dict):
                yield line.rstrip(b"\r\n") + b"\n", data


def _parse_event(data: dict[str, Any]) -> Event | None:
    kind = data.get("event")
    cls = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        return None
    known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
    metrics = known.pop("metrics", {})
    replacements: dict[str, Any] = {name: math.nan for name in FLOAT_FIELDS[cls] if known.get(name, 0) is None}
    try:
        event = settings.from_dict(cls, known | dict.fromkeys(replacements, 0.0), "log")
    except settings.SettingsError:
        return None
    if isinstance(event, Validated) and isinstance(metrics, dict):
        replacements["metrics"] = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return replace(event, **replacements) if replacements else event


class StopRequested(Exception):
    """A stop was requested during work that is repeated when the run is resumed."""


class StopSignals:
    """A context manager that turns signals into a stop request once `can_save` is set; before that they end the run.

    A second SIGINT raises KeyboardInterrupt or, with `force_exit`, ends the process at once.
    """

    def __init__(self, *, force_exit: bool = False) -> None:
        self.force_exit, self.can_save, self.received = force_exit, False, 0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # as Python requires
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        return EXIT_TERMINATED if self.received == signal.SIGTERM else EXIT_INTERRUPTED

    def should_stop(self) -> bool:
        return bool(self.received)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self.can_save:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_TERMINATED)
        if self.received and number == signal.SIGINT:
            if not self.force_exit:
                raise KeyboardInterrupt
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # show the cursor, which the progress display hides
            os._exit(EXIT_INTERRUPTED)
        self.received = self.received or number
