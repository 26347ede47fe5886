"""The cache folder, folders built once, and locks."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attent.storage.cache import (
    CACHE_ENV_VAR,
    build_folder,
    get_cache_folder,
    hold_lock,
    remove_abandoned,
    try_hold_lock,
)
from attent.storage.errors import StorageError


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(CACHE_ENV_VAR, str(tmp_path / "own"))
    assert get_cache_folder() == tmp_path / "own"
    monkeypatch.delenv(CACHE_ENV_VAR)
    assert get_cache_folder() == tmp_path / "xdg" / "attent"
    assert list_names(tmp_path) == []


@pytest.mark.parametrize(
    ("platform", "tail"),
    [("linux", ".cache/attent"), ("darwin", "Library/Caches/attent"), ("win32", "AppData/Local/attent")],
)
def test_default_cache_folder_follows_the_platform(platform: str, tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CACHE_ENV_VAR, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", platform)
    assert get_cache_folder() == Path.home() / tail


def test_a_missing_home_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_ENV_VAR, "~nobody-of-this-name/cache")
    with pytest.raises(StorageError, match=f"there is no home folder for downloads; set {CACHE_ENV_VAR} to a writable"):
        get_cache_folder()


def test_relative_xdg_folder_is_ignored_as_its_standard_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_ENV_VAR, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert Path("here") not in get_cache_folder().parents
    assert get_cache_folder().is_absolute()


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=f"file: cannot be written .*; set {CACHE_ENV_VAR} to a writable folder"):
        build_folder(tmp_path / "file" / "corpus", Path.mkdir, Path.is_dir)


def test_folder_is_built_once_by_concurrent_callers(tmp_path: Path) -> None:
    builds: list[Path] = []
    barrier = threading.Barrier(4)

    def make(part_folder: Path) -> None:
        builds.append(part_folder)
        (part_folder / "train.tsv").write_text("a\tb\n")

    def request_folder() -> None:
        barrier.wait()
        build_folder(tmp_path / "corpus", make, Path.is_dir)

    threads = [threading.Thread(target=request_folder) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert list_names(tmp_path / "corpus") == ["train.tsv"]
    assert not (tmp_path / "corpus.part").exists()


def test_failed_build_leaves_no_folder(tmp_path: Path) -> None:
    def make(part_folder: Path) -> None:
        (part_folder / "train.tsv").write_text("half")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(StorageError, match=re.escape(os.strerror(errno.EIO))):
        build_folder(tmp_path / "corpus", make, Path.is_dir)
    assert not (tmp_path / "corpus").exists()
    # The next build continues in the staging folder.
    build_folder(tmp_path / "corpus", lambda folder: (folder / "valid.tsv").touch(), Path.is_dir)
    assert list_names(tmp_path / "corpus") == ["train.tsv", "valid.tsv"]


def test_complete_folder_is_not_built_again(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    assert build_folder(tmp_path / "corpus", lambda _: pytest.fail("built again"), Path.is_dir) == tmp_path / "corpus"
    assert list_names(tmp_path) == ["corpus"]


def test_files_of_an_incomplete_folder_are_kept(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "archive.zip").write_text("downloaded by hand")

    def finish(staging: Path) -> None:
        assert (staging / "archive.zip").read_text() == "downloaded by hand"
        (staging / "done").touch()

    build_folder(tmp_path / "corpus", finish, lambda folder: (folder / "done").exists())
    assert list_names(tmp_path / "corpus") == ["archive.zip", "done"]


def test_staging_folders_are_removed_unless_their_lock_is_held(tmp_path: Path) -> None:
    for name in ("abandoned", "running"):
        (tmp_path / f"{name}.part").mkdir()
    with hold_lock(tmp_path / ".running.lock"):
        remove_abandoned(tmp_path)
        assert not (tmp_path / "abandoned.part").exists()
        assert (tmp_path / "running.part").exists()
    remove_abandoned(tmp_path)
    assert not (tmp_path / "running.part").exists()


def test_what_cannot_be_removed_is_left(tmp_path: Path) -> None:
    (tmp_path / "video.part").write_text("a file of another program")
    remove_abandoned(tmp_path)
    assert (tmp_path / "video.part").exists()


def test_lock_excludes_other_processes_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys; from pathlib import Path; from attent.storage.cache import try_hold_lock\n"
        "with try_hold_lock(Path(sys.argv[1])) as held: print(held)"
    )

    def try_in_another_process() -> str:
        command = [sys.executable, "-c", code, str(path)]
        return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout

    with hold_lock(path):
        assert try_in_another_process() == "False\n"
    assert try_in_another_process() == "True\n"
    with try_hold_lock(path) as is_held:
        assert is_held


def test_waiting_for_a_lock_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, acquired, cpu_seconds = tmp_path / "lock", threading.Event(), []

    def wait_for_lock() -> None:
        with hold_lock(path):
            cpu_seconds.append(time.thread_time())
            acquired.set()

    with hold_lock(path):
        thread = threading.Thread(target=wait_for_lock)
        thread.start()
        assert not acquired.wait(0.2)
    thread.join(5)
    assert acquired.is_set()
    assert cpu_seconds[0] < 0.1, "it sleeps meanwhile"
    assert f"waiting for another attent process, which holds {path}" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("hold", [hold_lock, try_hold_lock])
def test_lock_is_released_while_a_forked_process_has_its_file_open(hold: Callable[..., Any], tmp_path: Path) -> None:
    with hold(tmp_path / "lock"):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with try_hold_lock(tmp_path / "lock") as is_held:
            assert is_held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
