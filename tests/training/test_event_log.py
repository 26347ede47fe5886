"""The event log of a run: events round-trip, no partial line remains, and disk errors do not stop training."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from attent.training.events import (
    Ended,
    Event,
    EventLog,
    Note,
    Progress,
    Saved,
    Started,
    Validated,
    ValidationSample,
    read_events,
)


def make_progress(step: int, loss: float = 2.5) -> Progress:
    return Progress(
        step=step,
        epoch=step / 10,
        loss=loss,
        perplexity=9.5,
        lr=1e-3,
        grad_norm=0.7,
        tokens_per_second=1000.0,
        seconds=float(step),
        seconds_left=None,
    )


def make_validation(step: int) -> Validated:
    samples = (ValidationSample(source="Käse\n\u2028", reference="\x00 \ud800", output='"quoted"'),)
    return Validated(
        step=step,
        epoch=1.0,
        loss=2.0,
        metrics={"chrf": 50.0, "exact": 1.5},
        best=True,
        validations_since_best=0,
        seconds=9.0,
        samples=samples,
    )


STORY: list[Event] = [
    Note(text="chosen: tiny", level="warning"),
    Started(step=0, steps=100, steps_per_epoch=10.0, parameters=5, trainable_parameters=5, device="CPU"),
    make_progress(10),
    Validated(
        step=10, epoch=1.0, loss=2.0, metrics={"bleu": 1.0, "chrf": 2.0},
        best=True, validations_since_best=0, seconds=1.0,
        samples=(ValidationSample(source="Käse\n\u2028", reference="\x00", output='"so"'),),
    ),
    Saved(step=10, folder="state/step-00000010", seconds=0.1),
    make_progress(20),
    Ended(step=20, reason="stopped", seconds=20.0),
]  # fmt: skip


def write(path: Path, events: list[Event], from_step: int = 0) -> None:
    log = EventLog(path, from_step)
    for event in events:
        log(event)
    log.close()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "log.jsonl"
    assert not (tmp_path / "log.jsonl.new").exists()


def test_events_round_trip(path: Path) -> None:
    write(path, STORY)
    assert read_events(path) == STORY


def test_each_line_is_an_object_with_its_kind_and_the_time_in_utc(path: Path) -> None:
    write(path, STORY)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [line["event"] for line in lines][:4] == ["note", "started", "progress", "validated"]
    assert all(datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0) for line in lines)


def test_a_line_is_in_the_file_when_the_call_returns(path: Path) -> None:
    log = EventLog(path)
    for i in range(1, 4):
        log(make_progress(i))
        assert len(read_events(path)) == i
    log.close()


def test_non_finite_numbers_are_null_and_read_as_nan(path: Path) -> None:
    write(path, [make_progress(1, loss=math.inf), make_progress(2, loss=math.nan)])
    assert all(json.loads(line)["loss"] is None for line in path.read_bytes().splitlines())
    back = read_events(path)
    assert [math.isnan(event.loss) for event in back if isinstance(event, Progress)] == [True, True]


def test_a_lone_surrogate_in_a_sample_is_written(path: Path) -> None:
    write(path, [make_validation(5), make_progress(6)])
    assert path.read_bytes().decode().count("\n") == 2
    assert read_events(path)[-1] == make_progress(6)


def test_a_resumed_run_drops_events_after_its_checkpoint(path: Path) -> None:
    write(path, STORY)
    write(path, [make_progress(20, loss=9.0)], from_step=10)
    assert read_events(path) == [*STORY[:5], make_progress(20, loss=9.0)]


def test_a_resumed_run_without_later_events_does_not_rewrite_the_file(path: Path) -> None:
    write(path, STORY)
    inode, before = path.stat().st_ino, path.read_bytes()
    write(path, [], from_step=20)
    assert path.stat().st_ino == inode
    assert path.read_bytes() == before


def test_a_new_run_starts_a_new_log(path: Path) -> None:
    write(path, STORY)
    write(path, STORY[:2])
    assert read_events(path) == STORY[:2]


@pytest.mark.parametrize("lost", [1, 2, 10, 60])
def test_a_truncated_last_line_is_dropped(path: Path, lost: int) -> None:
    write(path, STORY[:3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    complete = STORY[:3] if lost == 1 else STORY[:2]  # only the newline is missing: nothing is lost
    write(path, [make_progress(30)], from_step=10)
    assert read_events(path) == [*complete, make_progress(30)]
    assert path.read_bytes().count(b"\n") == len(complete) + 1


def test_invalid_lines_are_skipped_and_unknown_events_preserved(path: Path) -> None:
    newer = b'{"event": "sung", "step": 3}\n'
    strange = b'\xff\xfe\n[1]\n{"event": ["progress"]}\n{"event": "progress", "step": "x"}\n' + b"[" * 100_000 + b"\n"
    path.write_bytes(newer + strange)
    assert read_events(path) == []
    write(path, [make_progress(5)], from_step=4)
    assert path.read_bytes().startswith(newer)
    assert read_events(path) == [make_progress(5)]


def test_unknown_fields_are_ignored(path: Path) -> None:
    write(path, [make_progress(1)])
    data = json.loads(path.read_bytes())
    path.write_text(json.dumps(data | {"temperature": 36.6}) + "\n", encoding="utf-8")
    assert read_events(path) == [make_progress(1)]


def test_a_kill_before_the_rename_leaves_the_old_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, STORY)
    before = path.read_bytes()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        EventLog(path, 10)
    assert path.read_bytes() == before
    monkeypatch.undo()
    write(path, [], from_step=10)
    assert read_events(path) == STORY[:5]


def test_a_missing_folder_is_reported_once_and_training_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "nowhere" / "log.jsonl", STORY)
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "training continues without it" in stderr
    assert "No such file" in stderr
    assert read_events(tmp_path / "nowhere" / "log.jsonl") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full here")
def test_a_full_disk_is_reported_once_and_training_continues(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.symlink_to("/dev/full")
    write(path, STORY)
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "No space left" in stderr


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (OSError("the cable is out"), "the cable is out"),
    ],
)
def test_an_error_that_is_not_a_full_disk_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, reason: str
) -> None:
    log = EventLog(path)

    class Broken:
        def write(self, _: bytes) -> int:
            raise error

        def close(self) -> None:
            pass

    monkeypatch.setattr(log, "_file", Broken())
    for _ in range(2):
        log(Note(text="a"))
    assert capsys.readouterr().err == (
        f"warning: {path}: cannot be written ({reason}); training continues without it\n"
    )


def test_the_events_up_to_the_checkpoint_are_the_history(path: Path) -> None:
    log = EventLog(path)
    for step in (1, 10, 11):
        log(Note(text=f"at {step}", step=step))
    log.close()
    assert [event.step for event in EventLog(path, 10).history] == [1, 10]
    assert EventLog(path).history == []


def test_a_line_that_is_written_in_part_ends_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path / "log.jsonl")
    monkeypatch.setattr("attent.training.events.to_json_line", lambda event, now: LongBytes(b"{}\n"))
    log(STORY[0])
    log(STORY[0])
    assert capsys.readouterr().err == (
        f"warning: {tmp_path / 'log.jsonl'}: cannot be written (only part of the line was written; is the disk full?); "
        "training continues without it\n"
    )


class LongBytes(bytes):
    """Bytes that seem longer than what is written of them."""

    def __len__(self) -> int:
        return 99
