"""Output files are complete or as they were: not even a kill loses the old content or what was already written. Saved
models are in tests/models."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attent.storage.atomic import (
    PARTIAL_SUFFIX,
    atomic_folder,
    atomic_path,
    find_file,
    is_same_file,
    is_stream,
    is_temporary,
    lock_folder,
    make_folder,
    open_output,
    replace_folder,
    write_atomic,
    write_files,
    write_output,
    write_synced,
)
from attent.storage.cache import build_folder
from tests.faulty_disk import FaultyDisk, SimulatedKill

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


# ---- settings, folders and files that belong together ----------------------------------------------------------------

OLD, NEW = {"a": b"old a", "b": b"old b"}, {"a": b"new a", "b": b"new b"}


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_replaces_the_content_and_keeps_the_permissions(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list_names(tmp_path) == ["run.toml"]


def test_error_keeps_the_old_file_and_leaves_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    path.write_bytes(b"old")

    def fail_halfway() -> None:
        with atomic_path(path) as temporary:
            assert temporary.suffix == ".png"
            temporary.write_bytes(b"half")
            assert is_temporary(temporary)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert path.read_bytes() == b"old"
    assert list_names(tmp_path) == ["curves.png"]


@pytest.mark.parametrize("name", [".a.txt", "a.new", "a.new.txt", "a"])
def test_files_of_users_are_not_temporary(name: str, tmp_path: Path) -> None:
    assert not is_temporary(tmp_path / name)


def test_folder_replaces_another_or_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for content in ("first", "second"):
        with atomic_folder(folder) as temporary:
            (temporary / content).touch()
            assert is_temporary(temporary)
        assert list_names(folder) == [content]
    with pytest.raises(RuntimeError), atomic_folder(folder):
        raise RuntimeError
    assert list_names(folder) == ["second"]
    assert list_names(tmp_path) == ["model"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_folder_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "model"):
        pass
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_synced_file_must_not_exist(tmp_path: Path) -> None:
    write_synced(tmp_path / "a", b"content")
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "a", b"other")
    assert (tmp_path / "a").read_bytes() == b"content"


def test_make_folder_creates_the_parents(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def read_files(folder: Path) -> dict[str, bytes]:
    return {name: find_file(folder, name, list(OLD)).read_bytes() for name in OLD}


def test_kill_at_any_call_leaves_files_that_belong_together(tmp_path: Path) -> None:
    versions, call = [], 0
    while True:
        call += 1
        write_files(tmp_path, OLD)
        with pytest.MonkeyPatch.context() as patch:
            FaultyDisk(patch, call, SimulatedKill(), True, ("replace", "unlink"))
            try:
                write_files(tmp_path, NEW)
            except SimulatedKill:
                versions.append(read_files(tmp_path))
                continue
        break
    assert read_files(tmp_path) == NEW
    assert list_names(tmp_path) == ["a", "b"]
    assert versions[0] == OLD
    assert versions[-1] == NEW
    assert all(version in (OLD, NEW) for version in versions)


def test_a_link_to_itself_is_no_output(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="leads back to itself"):
        write_output(loop, b"")
    with pytest.raises(OSError, match="leads back to itself"), open_output(loop, print):
        pass


# ---- syncing ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc, which names open files")
def test_everything_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, move = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        calls.append(f"sync {re.sub(r'[0-9]{2,}|[.][a-z0-9_]{8}(?=[.]new)', '', name)}")
        fsync(descriptor)

    def rename(old: Path, new: Path) -> None:
        move(old, new)
        calls.append(f"rename to {new.name}")

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(os, "rename", rename)
    root = tmp_path / "root"
    root.mkdir()
    write_atomic(root / "a.json", b"a")
    with open_output(root / "b.txt", calls.append) as out:
        out.write("b\n")
    assert calls == ["sync .a..new.json", "rename to a.json", "sync b.txt.partial", "rename to b.txt"]
    calls.clear()
    with atomic_folder(root / "folder") as temporary:
        (temporary / "c").write_bytes(b"c")
    assert calls == ["sync c", "sync .folder.new", "rename to folder", "sync root"]
    calls.clear()
    write_files(root / "new", {"d": b"d"})
    assert calls == ["sync d.new", "rename to d", "sync new"]
    calls.clear()
    make_folder(root / "e" / "f")
    assert calls == ["sync e", "sync root"]
    calls.clear()
    build_folder(root / "g", lambda staging: (staging / "h").touch(), lambda folder: folder.exists())
    assert calls == ["sync h", "sync g.part", "rename to g", "sync root"]


def test_an_interrupted_write_is_finished_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`b.new` without `a.new`: the new `a` is in place, and `b.new` is the file that belongs to it."""
    for name, content in (("a", b"new a"), ("b", b"old b"), ("b.new", b"new b")):
        (tmp_path / name).write_bytes(content)
    written: list[Path] = []

    def write_one(path: Path, content: bytes) -> None:
        if written:
            raise SimulatedKill
        write_synced(path, content)
        written.append(path)

    monkeypatch.setattr("attent.storage.atomic.write_synced", write_one)
    with pytest.raises(SimulatedKill):
        write_files(tmp_path, {"a": b"newer a", "b": b"newer b"})
    names = ["a", "b"]
    assert [find_file(tmp_path, name, names).read_bytes() for name in names] == [b"new a", b"new b"]


def test_new_folders_are_made_next_to_the_final_one(tmp_path: Path) -> None:
    """A rename works inside of one disk only."""
    for content in ("first", "second"):
        with atomic_folder(tmp_path / "model") as temporary:
            assert temporary.parent == tmp_path
            assert temporary.name.startswith(".model.")
            assert is_temporary(temporary)
            (temporary / "a").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with open_output(tmp_path / "text", print) as out:
        assert (out.encoding, out.newlines) == ("utf-8", None)
        out.write("a\n")
    assert (tmp_path / "text").read_bytes() == b"a\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")
def test_a_locked_folder_is_waited_for(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with lock_folder(tmp_path):
            entered.set()

    thread = threading.Thread(target=enter)
    with lock_folder(tmp_path):
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(WAIT)
    thread.join()


def test_parents_are_made_and_protected_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "a" / "b", {"c": b"c"})
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"c"
    build_folder(tmp_path / "d" / "e" / "f", lambda staging: None, Path.exists)
    assert (tmp_path / "d" / "e" / "f").is_dir()
    (tmp_path / "old").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="is write-protected; choose another name"):
        write_lines(tmp_path / "old", "new")
    assert (tmp_path / "old").read_text() == "old"
    write_lines(tmp_path / "new", "new")


def test_a_write_protected_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.txt"
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everything
    with open_output(path, print) as out:
        out.write("new")
    with pytest.raises(PermissionError, match="is write-protected; choose another name"), open_output(path, print):
        pass
    assert path.read_text() == "new"


def test_an_old_folder_that_cannot_be_removed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    (tmp_path / "model").mkdir()
    (tmp_path / "new").mkdir()
    monkeypatch.setattr("os.rmdir", refuse)
    replace_folder(tmp_path / "new", tmp_path / "model")
    assert not (tmp_path / "new").exists()
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "model"] == [".old"]


def test_a_stream_is_written_as_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def record(*arguments: object, **options: object) -> io.StringIO:
        calls.append((*arguments, options))
        return io.StringIO()

    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("attent.storage.atomic.open", record, raising=False)
    with open_output(tmp_path / "pipe", print):
        pass
    assert calls == [(tmp_path / "pipe", "w", {"encoding": "utf-8", "newline": "\n"})]
