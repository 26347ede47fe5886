"""The process pool: results in order, errors in the caller, and workers that exit with it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from attent.data import process_pool
from attent.data.process_pool import map_in_order


def test_results_come_in_the_order_of_the_tasks() -> None:
    assert list(map_in_order(divmod, ((n, 7) for n in range(40)), workers=2)) == [divmod(n, 7) for n in range(40)]


def test_worker_error_is_raised_in_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(divmod, [(1, 1), (1, 0)], workers=2))


def test_caller_may_stop_early() -> None:
    results = map_in_order(divmod, ((n, 7) for n in range(10**9)), workers=2)
    assert next(results) == (0, 0)
    results.close()  # type: ignore[attr-defined]


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(textwrap.dedent(script), encoding="utf-8")
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_script_needs_no_main_guard(tmp_path: Path) -> None:
    result = run_script(
        """
        print("started")
        from attent.data.process_pool import map_in_order
        print(list(map_in_order(divmod, [(5, 2), (7, 2)], workers=2)), __file__.endswith("script.py"))
        """,
        tmp_path,
    )
    assert result.stdout.splitlines() == ["started", "[(2, 1), (3, 1)] True"]
    assert result.stderr == ""


@pytest.mark.skipif(os.name != "posix", reason="needs kill -9 and /proc-like process ids")
def test_workers_exit_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = """
        import os, time
        from attent.data.process_pool import map_in_order
        def tasks():
            while True:
                yield ()
        for pid in map_in_order(os.getpid, tasks(), workers=1):
            print(pid, flush=True)
            time.sleep(60)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script), encoding="utf-8")
    with subprocess.Popen([sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        worker = int(caller.stdout.readline())
        caller.send_signal(signal.SIGKILL)
    for _ in range(100):
        if not is_alive(worker):
            return
        time.sleep(0.1)
    pytest.fail(f"process {worker} is still there")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize(
    ("cores", "gigabytes", "ranks", "expected"),
    [(16, 64, None, 14), (16, 2, None, 4), (64, 64, "8", 7), (2, 64, None, 1), (16, 0, "4", 1)],
    ids=["cores", "memory", "torchrun", "two cores", "nothing is free"],
)
def test_workers_are_bounded_by_cores_and_memory(
    cores: int, gigabytes: int, ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "count_usable_cores", lambda: cores)
    monkeypatch.setattr(process_pool, "measure_memory", lambda: (2**40, gigabytes * 2**30))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert process_pool.count_free_workers() == expected
