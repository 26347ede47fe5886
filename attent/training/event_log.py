"""`log.jsonl`: what training told, one JSON object a line, for people, for curves and for other programs.

A resumed run drops what it will tell again, so that the file reads as if the run had never been interrupted. Training
never ends because of this file: when it cannot be written, that is said once, and the run goes on without it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, get_type_hints

from attent import settings
from attent.storage.atomic import write_atomic
from attent.training.events import Ended, Event, Note, Progress, Saved, Started, Validated

LOG_FILE = "log.jsonl"
EVENT_TYPES: dict[str, type[Event]] = {
    cls.__name__.lower(): cls for cls in (Note, Started, Progress, Validated, Saved, Ended)
}
# The fields that always hold a number, so that null there is a number that JSON could not hold.
FLOAT_FIELDS: dict[type, list[str]] = {
    cls: [name for name, kind in get_type_hints(cls).items() if kind is float] for cls in EVENT_TYPES.values()
}


class EventLog:
    """Listens to training, and writes each event as a line that is in the file when the call returns.

    `from_step` is the step that a resumed run goes on from: lines of later steps are dropped first. With 0 nothing is
    resumed, and the log begins anew.
    """

    def __init__(self, path: Path, from_step: int = 0) -> None:
        self.path = Path(path)
        self._file: FileIO | None = None
        try:
            truncate_log(self.path, from_step)
            self._file = FileIO(self.path, "a")  # without a buffer: a kill can lose no line but the one being written
        except OSError as error:
            self._disable(error)

    def __call__(self, event: Event) -> None:
        if self._file is None:
            return
        line = to_json_line(event, datetime.now(UTC))
        try:
            if self._file.write(line) != len(line):
                raise OSError("only a part of the line could be written; is the disk full?")
        except OSError as error:
            self._disable(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _disable(self, error: OSError) -> None:
        self.close()
        reason = error.strerror or str(error)
        print(f"warning: {self.path}: cannot be written ({reason}); training goes on without this log", file=sys.stderr)


def read_events(path: Path) -> list[Event]:
    """The events of a log, in its order; none where there is no log.

    Lines that are broken, or of a kind that is not known here, are skipped.
    """
    if not path.is_file():
        return []
    return [event for _, data in _read_objects(path) if (event := _parse_event(data)) is not None]


def truncate_log(path: Path, step: int) -> None:
    """Leave only what was told up to a step: aside and renamed, so that a kill leaves the old or the new log."""
    if not path.is_file():
        return
    kept = b"".join(line for line, data in _read_objects(path) if step and _get_step(data) <= step)
    if path.stat().st_size == len(kept):
        return
    write_atomic(path, kept)


def to_json_line(event: Event, now: datetime) -> bytes:
    """JSON knows no NaN: a loss that is none, or infinite, is null."""
    facts = {name: _finite_or_none(value) for name, value in settings.to_dict(event).items()}
    data = {"event": type(event).__name__.lower(), "time": now.isoformat(timespec="seconds"), **facts}
    # A lone half of a surrogate pair cannot be UTF-8; its escape is also JSON's.
    return (json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_objects(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line that is a JSON object, and the object; a kill or a full disk may have left others."""
    with open(path, "rb") as file:
        for line in file:
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(data, dict):
                yield line.rstrip(b"\r\n") + b"\n", data


def _get_step(data: Mapping[str, Any]) -> float:
    step = data.get("step")
    return step if isinstance(step, int | float) else 0


def _parse_event(data: dict[str, Any]) -> Event | None:
    kind = data.get("event")
    cls = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        return None
    known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
    metrics = known.pop("metrics", {})
    lost: dict[str, Any] = {name: math.nan for name in FLOAT_FIELDS[cls] if known.get(name, 0) is None}
    try:
        event = settings.from_dict(cls, known | dict.fromkeys(lost, 0.0), "log")
    except settings.SettingsError:
        return None
    if isinstance(event, Validated) and isinstance(metrics, dict):
        lost["metrics"] = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return replace(event, **lost) if lost else event
