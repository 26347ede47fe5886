"""`attent translate --ray`: the output of one process, with a worker killed, and resumed after an interruption."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from attent import cli
from attent.decoding.ray_translate import compute_fingerprint

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "tests" / "models" / "saved_model"
WORDS = "one two three four five six seven eight nine ten".split()
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'attent[ray]'")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines with blanks around them, empty lines, carriage returns and characters that no model knows."""
    path, generator = tmp_path_factory.mktemp("corpus") / "text.txt", random.Random(1)
    lines = [" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(10_300)]
    lines[::50] = [f"  {line}\t" for line in lines[::50]]
    lines[::97] = [f"{line}\r" for line in lines[::97]]
    lines[::101] = [""] * len(lines[::101])
    lines[7] = "Schönes Wetter 🌞"
    path.write_bytes("\n".join(lines).encode())  # the last line has no line feed
    return path


@pytest.fixture(scope="module")
def expected(corpus: Path) -> bytes:
    output = corpus.with_name("one-process.txt")
    assert cli.main(["translate", str(MODEL), str(corpus), "-o", str(output), "--threads", "1"]) == 0
    return output.read_bytes()


def start(corpus: Path, output: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "attent", "translate", str(MODEL), str(corpus), "-o", str(output), "--ray", *flags]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env, cwd=ROOT)


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)


def list_finished(output: Path) -> list[Path]:
    return sorted(output.parent.glob(f"{output.name}.blocks/*/[0-9]*.txt"))


@pytest.mark.slow
@needs_ray
def test_the_output_is_that_of_one_process_although_a_worker_dies(
    corpus: Path, expected: bytes, tmp_path: Path
) -> None:
    output = tmp_path / "out.txt"
    process = start(corpus, output)
    wait_until(process, lambda: bool(list_finished(output)))
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child.pid for child in children if "ray::BlockWorker" in " ".join(child.cmdline())]
    os.kill(workers[0], signal.SIGKILL)
    assert process.communicate()[1] == ""
    assert process.returncode == 0
    assert output.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_is_resumed(corpus: Path, expected: bytes, tmp_path: Path, number: int) -> None:
    output = tmp_path / "out.txt"
    process = start(corpus, output)
    wait_until(process, lambda: len(list_finished(output)) >= 2)
    process.send_signal(number)
    process.communicate()
    assert not output.exists()
    finished = list_finished(output)
    times = [path.stat().st_mtime_ns for path in finished]
    assert 2 <= len(finished) < 6

    other = start(corpus, tmp_path / "out.txt", "--beam-size", "1")  # another option: starts over, in another folder
    assert "resuming" not in other.communicate()[1]
    assert [path.stat().st_mtime_ns for path in finished] == times
    assert output.read_bytes() != expected

    process = start(corpus, output)
    assert "resuming" in process.communicate()[1]
    assert output.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.slow
@needs_ray
def test_errors_are_one_sentence(corpus: Path, tmp_path: Path) -> None:
    process = start(corpus, tmp_path / "out.txt", "--to", "fr")
    error = process.communicate()[1]
    assert process.returncode == 1
    assert error.startswith(f"attent: error: {MODEL}: has one target language, so --to must be left out")
    assert error.count("\n") == 1


# --- without Ray -----------------------------------------------------------------------------------------------------


def test_the_flag_names_the_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "text.txt").write_text("one two")
    assert cli.main(["translate", str(MODEL), str(tmp_path / "text.txt"), "-o", str(tmp_path / "out"), "--ray"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert "pip install 'attent[ray]'" in error
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("text.txt", []),
        (None, ["-o", "out.txt"]),
        ("text.md", ["-o", "out.md"]),
        ("text.txt", ["-o", "/dev/stdout"]),
        ("text.txt.gz", ["-o", "out.txt"]),
    ],
)
def test_other_inputs_and_outputs_are_refused(
    name: str | None,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    if name:
        Path(name).write_bytes(gzip.compress(b"one two") if name.endswith(".gz") else b"one two")
    assert cli.main(["translate", str(MODEL), *([name] if name else []), *flags, "--ray"]) in (1, 2)
    (error,) = capsys.readouterr().err.splitlines()
    assert "--ray " in error
    assert "pip install" not in error


def test_the_fingerprint_covers_input_model_and_options(tmp_path: Path) -> None:
    text, model = tmp_path / "text.txt", tmp_path / "model"
    text.write_text("one")
    model.mkdir()
    (model / "config.json").write_text("{}")
    prints = [compute_fingerprint([text, model], "beam 4"), compute_fingerprint([text, model], "beam 5")]
    text.write_text("two")
    prints.append(compute_fingerprint([text, model], "beam 4"))
    (model / "config.json").write_text("[]")
    prints.append(compute_fingerprint([text, model], "beam 4"))
    (model / "manifest.json").write_text("{}")
    prints.append(compute_fingerprint([text, model], "beam 4"))
    assert len(set(prints)) == 5
    assert prints[-1] == compute_fingerprint([text, model], "beam 4")
