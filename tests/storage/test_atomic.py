"""Output files are complete or as they were: not even a kill loses the old content or what was already written."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attent.storage.atomic import PARTIAL_SUFFIX, is_same_file, is_stream, open_output, write_output

WAIT = 30  # seconds
STREAMS = [Path(name) for name in ("/dev/null", "/dev/stdout", "/dev/fd/1") if Path(name).exists()]
needs_fifos = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def write_lines(
    path: Path, *lines: str, error: BaseException | None = None, messages: list[str] | None = None
) -> list[str]:
    """Write lines, then raise the error; return the messages."""
    messages = [] if messages is None else messages
    with open_output(path, messages.append) as out:
        for line in lines:
            out.write(f"{line}\n")
            out.flush()
        assert not path.exists() or path.read_text(encoding="utf-8") == "old\n"
        if error:
            raise error
    return messages


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / "keep.txt"
    path.write_text("old\n", encoding="utf-8")
    path.chmod(0o640)
    return path


def test_a_complete_output_replaces_the_old_file(old_file: Path) -> None:
    assert write_lines(old_file, "a", "b") == []
    assert old_file.read_text(encoding="utf-8") == "a\nb\n"
    assert old_file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in old_file.parent.iterdir()] == ["keep.txt"]


@pytest.mark.parametrize("error", [ValueError("line 2"), OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_failed_output_keeps_both_files(error: BaseException, old_file: Path) -> None:
    messages: list[str] = []
    for attempt in (1, 2):
        with pytest.raises(type(error)):
            write_lines(old_file, str(attempt), error=error, messages=messages)
    partials = [old_file.with_name(f"keep.txt{PARTIAL_SUFFIX}{number}") for number in ("", "2")]
    assert [path.read_text(encoding="utf-8") for path in partials] == ["1\n", "2\n"]
    assert old_file.read_text(encoding="utf-8") == "old\n"
    first, left, second = messages
    assert (
        first
        == f"{old_file} keeps its old content, because the run did not finish; its output so far is in {partials[0]}"
    )
    assert left.startswith(f"{partials[0]}: is left from a run that did not finish")
    assert second.endswith(f"is in {partials[1]}")


def test_a_failure_before_the_first_line_leaves_nothing(old_file: Path) -> None:
    with pytest.raises(ValueError, match="line 1"):
        write_lines(old_file, error=ValueError("line 1"))
    assert [path.name for path in old_file.parent.iterdir()] == ["keep.txt"]


def test_a_new_output_that_fails_is_said_not_to_be_written(tmp_path: Path) -> None:
    messages: list[str] = []
    with pytest.raises(ValueError, match="x"):
        write_lines(tmp_path / "new.txt", "a", error=ValueError("x"), messages=messages)
    assert not (tmp_path / "new.txt").exists()
    assert "new.txt is not written" in messages[0]


def test_a_killed_process_leaves_the_old_file_and_its_partial_output(old_file: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from attent.storage.atomic import open_output\n"
        "with open_output(Path(sys.argv[1]), print) as out:\n"
        "    out.write('a\\n'); out.flush(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(old_file)])
    partial, end = old_file.with_name(f"keep.txt{PARTIAL_SUFFIX}"), time.monotonic() + WAIT
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
    process.wait(WAIT)
    assert (old_file.read_text(encoding="utf-8"), partial.read_text(encoding="utf-8")) == ("old\n", "a\n")
    assert write_lines(old_file, "b")[0].startswith(f"{partial}: is left from a run that did not finish")
    assert (old_file.read_text(encoding="utf-8"), partial.read_text(encoding="utf-8")) == ("b\n", "a\n")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everything")
def test_a_write_protected_file_is_not_replaced(old_file: Path) -> None:
    old_file.chmod(0o440)
    with pytest.raises(PermissionError, match="write-protected"):
        write_lines(old_file, "a")


def test_a_link_is_followed(old_file: Path) -> None:
    for name, write in (
        ("streamed", lambda path: write_lines(path, "a")),
        ("whole", lambda path: write_output(path, b"a\n")),
    ):
        old_file.write_text("old\n", encoding="utf-8")
        link = old_file.with_name(name)
        link.symlink_to(old_file)
        write(link)
        assert link.is_symlink()
        assert old_file.read_text(encoding="utf-8") == "a\n"


@needs_fifos
@pytest.mark.parametrize("streamed", [True, False])
def test_a_pipe_is_written_directly(streamed: bool, tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    if streamed:
        with open_output(pipe, pytest.fail) as out:
            out.write("a\n")
    else:
        write_output(pipe, b"a\n")
    reader.join(WAIT)
    assert read == [b"a\n"]
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("path", STREAMS, ids=str)
def test_devices_and_descriptors_are_never_replaced(path: Path) -> None:
    assert is_stream(path)


def test_folders_named_like_devices_hold_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert not is_stream(tmp_path / "dev" / "out.txt")


def test_the_same_file_is_found_by_its_identity(old_file: Path) -> None:
    link, other = old_file.with_name("hard"), old_file.with_name("other")
    os.link(old_file, link)
    other.write_text("old\n", encoding="utf-8")
    with open(old_file, "rb") as stream:
        assert is_same_file(link, stream)
        assert is_same_file(stream, stream)
        assert not is_same_file(other, stream)
        assert not is_same_file(old_file.with_name("missing"), stream)
    with open(os.devnull, "rb") as null:
        assert not is_same_file(Path(os.devnull), null)
    assert not is_same_file(old_file, io.BytesIO())
