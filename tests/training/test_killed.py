"""A run that is killed at any moment and resumed ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.training.runs import (
    STEPS,
    ForkServer,
    Kill,
    checkpoint_facts,
    command,
    contents,
    events,
    fingerprint,
    write_corpus,
)

CALLS = 60  # calls that change the disk between two checkpoints, including one published model (approximate)
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def fork_server(home: Path) -> Iterator[ForkServer]:
    if not hasattr(os, "fork"):
        pytest.skip("there is no SIGKILL here")
    fork_server = ForkServer(home / "cache")
    yield fork_server
    fork_server.close()


@pytest.fixture(scope="module")
def corpus(home: Path) -> Path:
    return write_corpus(home / "corpus.tsv")


class UninterruptedRun:
    """An uninterrupted run: the expected result of all others, with all its checkpoints."""

    def __init__(self, fork_server: ForkServer, corpus: Path, out: Path, *more: str) -> None:
        began = time.monotonic()
        assert fork_server.run(command(corpus, out, "--set", f"train.keep_last={STEPS}", *more)) == 0, (
            fork_server.stderr
        )
        self.seconds = time.monotonic() - began
        self.out, self.fingerprint, self.checkpoints = out, fingerprint(out), checkpoint_facts(out)


@pytest.fixture(scope="module")
def uninterrupted_run(fork_server: ForkServer, corpus: Path, home: Path) -> UninterruptedRun:
    return UninterruptedRun(fork_server, corpus, home / "uninterrupted")


@pytest.mark.slow
def test_two_runs_are_bitwise_equal(
    fork_server: ForkServer, corpus: Path, uninterrupted_run: UninterruptedRun, tmp_path: Path
) -> None:
    assert fork_server.run(command(corpus, tmp_path / "again")) == 0, fork_server.stderr
    assert fingerprint(tmp_path / "again") == uninterrupted_run.fingerprint
    assert uninterrupted_run.fingerprint["step"] == STEPS
    assert len({facts["weights.safetensors"] for facts in uninterrupted_run.checkpoints.values()}) == STEPS // 3
    assert any(facts["state"]["batch_index"] for facts in uninterrupted_run.checkpoints.values())  # within an epoch
    assert uninterrupted_run.fingerprint["state"]["epoch"] >= 2


# ---- SIGKILL ---------------------------------------------------------------------------------------------------------


class Killer:
    """Kill runs at seeded random moments, resume each until it is complete, and compare after every kill."""

    def __init__(
        self, fork_server: ForkServer, corpus: Path, uninterrupted_run: UninterruptedRun, home: Path, seed: int
    ) -> None:
        self.fork_server, self.corpus, self.uninterrupted, self.home = fork_server, corpus, uninterrupted_run, home
        self.rng = random.Random(seed)
        self.kills = self.in_saves = self.runs = 0
        self.differ: list[str] = []

    def kill_runs(self, kills: int, in_saves: int) -> None:
        while self.kills < kills or self.in_saves < in_saves:
            self.runs += 1
            self.one_run(self.home / f"run-{self.runs}", kills, in_saves)

    def one_run(self, out: Path, kills: int, in_saves: int) -> None:
        pieces = 0
        while True:
            pieces += 1
            # A run that is always killed before its first save would never end.
            enough = (self.kills >= kills and self.in_saves >= in_saves) or pieces > 25
            kill = Kill() if enough else self.moment(kills, in_saves)
            code = self.fork_server.run(command(self.corpus, out, "--workers", str(self.rng.choice([0, 2]))), kill)
            if code == 0:
                break
            assert code == KILLED, self.fork_server.stderr
            self.kills += 1
            self.in_saves += kill.at is not None
            self.compare(out)
        if fingerprint(out) != self.uninterrupted.fingerprint:
            self.differ.append(f"{out}, at its end")

    def moment(self, kills: int, in_saves: int) -> Kill:
        """Draw a moment: by time, or at a call inside a save."""
        if self.in_saves < in_saves and (self.rng.random() < 0.5 or self.kills >= kills - in_saves):
            return Kill(at=self.rng.randint(1, CALLS))
        return Kill(after=self.rng.uniform(0, self.uninterrupted.seconds))

    def compare(self, out: Path) -> None:
        """Assert that every remaining checkpoint equals that of the uninterrupted run."""
        for step, facts in checkpoint_facts(out).items():
            if facts != self.uninterrupted.checkpoints[step]:
                self.differ.append(f"{out}, update {step}, kill {self.kills}")


def test_four_kills_do_not_change_the_result(
    fork_server: ForkServer, corpus: Path, uninterrupted_run: UninterruptedRun, tmp_path: Path
) -> None:
    killer = Killer(fork_server, corpus, uninterrupted_run, tmp_path, seed=1)
    killer.kill_runs(4, 2)
    assert not killer.differ


@pytest.mark.slow
def test_two_hundred_kills_do_not_change_the_result(
    fork_server: ForkServer, corpus: Path, uninterrupted_run: UninterruptedRun, tmp_path: Path
) -> None:
    killer = Killer(fork_server, corpus, uninterrupted_run, tmp_path, seed=2)
    killer.kill_runs(200, 60)
    print(f"{len(killer.differ)} of {killer.kills} differ ({killer.in_saves} inside a save, {killer.runs} runs)")
    assert not killer.differ


@pytest.mark.slow
@pytest.mark.parametrize("at", [pytest.param(30, marks=pytest.mark.slow), 64, pytest.param(72, marks=pytest.mark.slow)])
def test_a_kill_before_the_first_checkpoint_starts_over(
    at: int, fork_server: ForkServer, corpus: Path, uninterrupted_run: UninterruptedRun, tmp_path: Path
) -> None:
    assert fork_server.run(command(corpus, tmp_path / "run"), Kill(at=at, in_saves=False)) == KILLED
    assert not checkpoint_facts(tmp_path / "run")
    assert fork_server.run(command(corpus, tmp_path / "run")) == 0, fork_server.stderr
    assert fingerprint(tmp_path / "run") == uninterrupted_run.fingerprint


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--accumulate", "2"], marks=pytest.mark.slow),
        pytest.param(["--augment"], marks=pytest.mark.slow),
        pytest.param(
            "--rdrop 1 --optimizer adamw --clip-norm 1 --schedule cosine --layout packed".split(),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["accumulate", "augmentation", "rdrop, adamw, packed"],
)
def test_other_settings_resume_exactly(fork_server: ForkServer, corpus: Path, tmp_path: Path, more: list[str]) -> None:
    whole = UninterruptedRun(fork_server, corpus, tmp_path / "whole", *more)
    out = tmp_path / "killed"
    fork_server.start(command(corpus, out, "--workers", "0", *more), Kill(at=35))  # after the second checkpoint
    assert fork_server.wait() == KILLED
    assert 0 < max(checkpoint_facts(out)) < STEPS
    assert fork_server.run(command(corpus, out, "--workers", "2", *more)) == 0, fork_server.stderr
    assert fingerprint(out) == whole.fingerprint


# ---- interrupts -----------------------------------------------------------------------------------------------------


def start_until(fork_server: ForkServer, out: Path, step: int = 6) -> None:
    fork_server.wait_until(lambda: (out / "state" / f"step-{step:08}").exists())


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130)],
    ids=["SIGTERM", "SIGINT"],
)
def test_an_interrupt_saves_and_the_run_resumes_exactly(
    number: int, code: int, fork_server: ForkServer, corpus: Path, uninterrupted_run: UninterruptedRun, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    child = fork_server.start(command(corpus, out))
    start_until(fork_server, out)
    began = time.monotonic()
    os.kill(child, number)
    assert fork_server.wait() == code, fork_server.stderr
    assert time.monotonic() - began < 10
    goes_on = f"resume with: attent train --out {out}"
    assert goes_on in fork_server.stderr
    assert events(out, "ended")[-1]["reason"] == "stopped"
    assert max(checkpoint_facts(out)) == events(out, "ended")[-1]["step"]
    assert fork_server.run(["train", "--out", str(out)]) == 0, fork_server.stderr
    assert fingerprint(out) == uninterrupted_run.fingerprint


@pytest.mark.slow
def test_a_second_interrupt_exits_at_once_without_loss(
    fork_server: ForkServer, corpus: Path, uninterrupted_run: UninterruptedRun, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    child = fork_server.start(command(corpus, out))
    start_until(fork_server, out)
    os.kill(child, signal.SIGSTOP)  # so that both signals are pending when it continues
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGCONT)
    fork_server.wait_until(lambda: "stopping" in fork_server.stderr)
    os.kill(child, signal.SIGINT)
    assert fork_server.wait() == 130, fork_server.stderr
    assert fork_server.run(command(corpus, out)) == 0, fork_server.stderr
    assert fingerprint(out) == uninterrupted_run.fingerprint


@pytest.mark.slow
def test_repeated_interrupts_do_not_change_the_result(
    fork_server: ForkServer, corpus: Path, uninterrupted_run: UninterruptedRun, tmp_path: Path
) -> None:
    chance, out, stops = random.Random(5), tmp_path / "run", 0
    for _ in range(40):
        child = fork_server.start(command(corpus, out))
        time.sleep(chance.uniform(0.1, uninterrupted_run.seconds))
        with suppress(ProcessLookupError):  # it may finish first
            os.kill(child, chance.choice([signal.SIGTERM, signal.SIGINT]))
        code = fork_server.wait()
        assert code in (0, 130, 143) or not fork_server.stderr, (
            fork_server.stderr
        )  # no message: training had not started
        stops += code != 0
        if code == 0:
            assert fingerprint(out) == uninterrupted_run.fingerprint
            shutil.rmtree(out)
    assert stops > 10


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_run(fork_server: ForkServer, corpus: Path, home: Path) -> Path:
    """A run that was killed halfway."""
    out = home / "half"
    child = fork_server.start(command(corpus, out))
    start_until(fork_server, out, 12)
    os.kill(child, signal.SIGKILL)
    assert fork_server.wait() == KILLED
    assert STEPS > max(checkpoint_facts(out)) >= 12
    return out


def flip(path: Path, fraction: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(fraction * len(content))] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("manifest.json", lambda path: flip(path, 0.02), marks=pytest.mark.slow),
        pytest.param("state.json", lambda path: flip(path, 0.5), marks=pytest.mark.slow),
        ("weights.safetensors", lambda path: flip(path, 0.9)),
        pytest.param("optimizer.safetensors", lambda path: flip(path, 0.1), marks=pytest.mark.slow),
        pytest.param("weights.safetensors", cut, marks=pytest.mark.slow),
        ("optimizer.safetensors", Path.unlink),
    ],
    ids=["manifest", "state", "weights", "optimizer", "cut", "missing"],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_used(
    name: str, damage: Callable[[Path], None], fork_server: ForkServer, corpus: Path, half_run: Path,
    uninterrupted_run: UninterruptedRun, tmp_path: Path,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    shutil.copytree(half_run, out)
    newest = max(checkpoint_facts(out))
    path = out / "state" / f"step-{newest:08}" / name
    damage(path)
    assert fork_server.run(command(corpus, out)) == 0, fork_server.stderr
    assert f"warning: {path}" in fork_server.stderr
    assert f"The older checkpoint of step {newest - 3} is used instead" in fork_server.stderr
    assert f"from step {newest - 3}" in fork_server.stderr
    assert fingerprint(out) == uninterrupted_run.fingerprint


@pytest.mark.slow
def test_a_damaged_final_checkpoint_is_recomputed(
    fork_server: ForkServer, corpus: Path, uninterrupted_run: UninterruptedRun, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert fork_server.run(command(corpus, out)) == 0, fork_server.stderr
    flip(out / "state" / f"step-{STEPS:08}" / "weights.safetensors", 0.5)
    assert fork_server.run(command(corpus, out)) == 0, fork_server.stderr
    assert f"from step {STEPS - 3}" in fork_server.stderr
    assert fingerprint(out) == uninterrupted_run.fingerprint


@pytest.mark.slow
def test_if_all_checkpoints_are_damaged_nothing_is_overwritten(
    fork_server: ForkServer, corpus: Path, half_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(half_run, out)
    for path in (out / "state").glob("step-*/weights.safetensors"):
        flip(path, 0.5)
    before = contents(out)
    assert fork_server.run(command(corpus, out)) == 1
    assert "every one is damaged" in fork_server.stderr
    assert "weights.safetensors" in fork_server.stderr
    assert "Traceback" not in fork_server.stderr
    assert contents(out) == before
