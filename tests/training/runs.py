"""Small runs of `attent train` that are started, killed and repeated: text, processes, fingerprints.

A new interpreter needs seconds to import torch, so a `ForkServer` imports it once and forks a child for each command.
Assertions about the runs are in the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
TINY = (
    "--size tiny --set model.width=32 --set model.ffn_width=64 --set model.layers=1 --batch-tokens 256 --hold-out 10 "
    f"--steps {STEPS} --save-every 3 --valid-every 8 --valid-sentences 8 --beam-size 1 --average 2 --keep-last 2"
).split()
MAX_EXTRA_TOKENS = 6  # tokens beyond the source: an untrained model generates the maximum
NOUNS = "cat dog house tree river man woman bike stone bird".split()
VERBS = "sees likes takes finds paints".split()


# ---- text ------------------------------------------------------------------------------------------------------------


def sentences(count: int = 200, seed: int = 3) -> list[str]:
    """Short English sentences, all different."""
    rng = random.Random(seed)
    unique: dict[str, None] = {}
    while len(unique) < count:
        words = [rng.choice(["small", "big", "red"]), rng.choice(NOUNS), rng.choice(VERBS)]
        unique[" ".join(["the", *words, "a", rng.choice(NOUNS), *(["there"] * rng.randrange(3))])] = None
    return list(unique)


def reverse(sentence: str) -> str:
    """Translate a sentence: every word reversed."""
    return " ".join(word[::-1] for word in sentence.split())


def write_corpus(path: Path, count: int = 200, seed: int = 3) -> Path:
    lines = (f"{sentence}\t{reverse(sentence)}\n" for sentence in sentences(count, seed))
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return path


def command(data: Path | str, out: Path, *more: str) -> list[str]:
    """Arguments of a complete run that takes about a second, with dropout."""
    return ["train", "--data", str(data), "--src", "en", "--tgt", "xx", "--out", str(out), *TINY, *more]


# ---- results of a run ------------------------------------------------------------------------------------------------


def checkpoint_facts(out: Path) -> dict[int, dict[str, Any]]:
    """The reproducible content of each checkpoint: checksums of its tensors, and its state without the time."""
    return {int(path.name[5:]): _read_checkpoint(path) for path in sorted((out / "state").glob("step-*"))}


def _read_checkpoint(path: Path) -> dict[str, Any]:
    files = json.loads((path / "manifest.json").read_text())["files"]
    for name, entry in files.items():
        assert digest(path / name) == entry["sha256"], f"{path / name} is damaged"
    state = json.loads((path / "state.json").read_text())
    del state["seconds"]
    return {"state": state} | {name: entry["sha256"] for name, entry in files.items() if name != "state.json"}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fingerprint(out: Path) -> dict[str, Any]:
    """The reproducible result of a run: its last checkpoint, the model, and every validation."""
    last, facts = max(checkpoint_facts(out).items())
    model = {name: digest(out / name) for name in ("model.safetensors", "config.json", "tokenizer.model")}
    return {"step": last, **facts, **model, "validations": validations(out)}


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in records if event["event"] == kind]


def validations(out: Path) -> dict[int, dict[str, Any]]:
    """Validation events by step, without times, which differ between runs."""
    return {
        event["step"]: {name: value for name, value in event.items() if name not in ("time", "seconds")}
        for event in events(out, "validated")
    }


def contents(folder: Path) -> dict[str, str]:
    """Checksums of all files below a folder, to detect changed or added ones."""
    return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When a process gets SIGKILL: never, after so many seconds, or at the nth call that changes the disk."""

    after: float | None = None
    at: int | None = None
    in_saves: bool = True  # count the calls only while a checkpoint or a model is being written


class ForkServer:
    """Run commands of `attent`, each in its own process that may be killed."""

    def __init__(self, cache: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ATTENT_CACHE": str(cache), "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.runs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT, env=environment,
        )  # fmt: skip
        self.log = cache.parent / "stderr.txt"
        self._reply()  # wait for the imports

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def start(self, argv: Sequence[str], kill: Kill | None = None) -> int:
        """Start a command and return its process id."""
        self._send({"argv": list(argv), "log": str(self.log), "kill": asdict(kill or Kill())})
        return int(self._reply()["pid"])

    def wait(self) -> int:
        """Wait for the command and return its exit code; -n if signal n ended it."""
        return int(self._reply()["code"])

    def run(self, argv: Sequence[str], kill: Kill | None = None) -> int:
        self.start(argv, kill)
        return self.wait()

    @property
    def stderr(self) -> str:
        """The stderr of the last command."""
        return self.log.read_text(encoding="utf-8")

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for a condition while the command runs."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"timed out; stderr was: {self.stderr}"
            time.sleep(0.005)

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def serve_forks() -> None:
    """Main loop of the fork server; it has a single thread, so that forking is safe."""
    import sacrebleu.metrics

    import attent.cli.train
    import attent.decoding.options
    import attent.training.curves
    import attent.training.model_card
    import attent.training.run

    attent.decoding.options.MAX_EXTRA_TOKENS = MAX_EXTRA_TOKENS
    del sacrebleu, attent
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        assert len(os.listdir("/proc/self/task")) == 1 if Path("/proc/self/task").exists() else True
        child = os.fork()
        if child == 0:
            _run_child(request)
        print(json.dumps({"pid": child}), flush=True)
        print(json.dumps({"code": _wait_for_child(child, request["kill"]["after"])}), flush=True)


def _wait_for_child(child: int, kill_after: float | None) -> int:
    end = None if kill_after is None else time.monotonic() + kill_after
    while True:
        done, status = os.waitpid(child, 0 if end is None else os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            end = None
        else:
            time.sleep(0.002)


def _run_child(request: dict[str, Any]) -> None:
    """Run one command in the child, with its output in a file."""
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, os.devnull, os.O_WRONLY)):
            os.dup2(os.open(path, flags), number)
        os.dup2(os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        from attent import cli

        _kill_at_call(Kill(**request["kill"]))
        code = cli.main(request["argv"])
    except SystemExit as error:  # interrupted before there was anything to save
        code = error.code if isinstance(error.code, int) else code
    except BaseException:  # noqa: BLE001 -- a child must never return into its parent's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _kill_at_call(kill: Kill) -> None:
    if kill.at is None:
        return
    from attent.models import folder
    from attent.training import checkpoint

    inside, calls = 0 if kill.in_saves else 1, 0

    def saving(function: Callable[..., Any]) -> Callable[..., Any]:
        def save(*arguments: Any, **options: Any) -> Any:
            nonlocal inside
            inside += 1
            try:
                return function(*arguments, **options)
            finally:
                inside -= 1

        return save

    def count_calls(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += bool(inside)
            if inside and calls == kill.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    checkpoint.save_checkpoint, checkpoint.prune_checkpoints, folder.write_folder = map(
        saving, (checkpoint.save_checkpoint, checkpoint.prune_checkpoints, folder.write_folder)
    )
    for name in ("fsync", "rename", "replace", "open", "mkdir", "rmdir", "unlink"):
        setattr(os, name, count_calls(getattr(os, name)))
    folder.write_synced, folder.write_safetensors = map(count_calls, (folder.write_synced, folder.write_safetensors))


if __name__ == "__main__":
    serve_forks()
