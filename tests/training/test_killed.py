"""Nothing is lost: a run that is killed at any moment and started again ends with the same bits as one that was not."""

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
    checkpoints,
    command,
    contents,
    events,
    fingerprint,
    write_corpus,
)

CALLS = 60  # inside a save: about so many change the disk between two checkpoints, with a model in between
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def nursery(home: Path) -> Iterator[ForkServer]:
    if not hasattr(os, "fork"):
        pytest.skip("there is no SIGKILL here")
    nursery = ForkServer(home / "cache")
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def corpus(home: Path) -> Path:
    return write_corpus(home / "corpus.tsv")


class Unbroken:
    """A run that nothing has disturbed: what every other must come to, and all its checkpoints on the way."""

    def __init__(self, nursery: ForkServer, corpus: Path, out: Path, *more: str) -> None:
        began = time.monotonic()
        assert nursery.run(command(corpus, out, "--set", f"train.keep_last={STEPS}", *more)) == 0, nursery.stderr
        self.seconds = time.monotonic() - began
        self.out, self.fingerprint, self.checkpoints = out, fingerprint(out), checkpoints(out)


@pytest.fixture(scope="module")
def unbroken(nursery: ForkServer, corpus: Path, home: Path) -> Unbroken:
    return Unbroken(nursery, corpus, home / "unbroken")


def test_two_runs_are_bitwise_equal(nursery: ForkServer, corpus: Path, unbroken: Unbroken, tmp_path: Path) -> None:
    assert nursery.run(command(corpus, tmp_path / "again")) == 0, nursery.stderr
    assert fingerprint(tmp_path / "again") == unbroken.fingerprint
    assert unbroken.fingerprint["step"] == STEPS
    assert len({facts["weights.safetensors"] for facts in unbroken.checkpoints.values()}) == STEPS // 3
    assert any(facts["state"]["batch_index"] for facts in unbroken.checkpoints.values())  # in the middle of an epoch
    assert unbroken.fingerprint["state"]["epoch"] >= 2


# ---- SIGKILL ---------------------------------------------------------------------------------------------------------


class Killer:
    """Kills runs at moments that a seed chooses, starts each again until it is done, and compares after every kill."""

    def __init__(self, nursery: ForkServer, corpus: Path, unbroken: Unbroken, home: Path, seed: int) -> None:
        self.nursery, self.corpus, self.unbroken, self.home = nursery, corpus, unbroken, home
        self.chance = random.Random(seed)
        self.kills = self.in_saves = self.runs = 0
        self.differ: list[str] = []

    def go(self, kills: int, in_saves: int) -> None:
        while self.kills < kills or self.in_saves < in_saves:
            self.runs += 1
            self.one_run(self.home / f"run-{self.runs}", kills, in_saves)

    def one_run(self, out: Path, kills: int, in_saves: int) -> None:
        pieces = 0
        while True:
            pieces += 1
            # A run that is killed over and over before its first save would never end, and neither would the test.
            enough = (self.kills >= kills and self.in_saves >= in_saves) or pieces > 25
            kill = Kill() if enough else self.moment(kills, in_saves)
            code = self.nursery.run(command(self.corpus, out, "--workers", str(self.chance.choice([0, 2]))), kill)
            if code == 0:
                break
            assert code == KILLED, self.nursery.stderr
            self.kills += 1
            self.in_saves += kill.at is not None
            self.compare(out)
        if fingerprint(out) != self.unbroken.fingerprint:
            self.differ.append(f"{out}, at its end")

    def moment(self, kills: int, in_saves: int) -> Kill:
        """Some by the clock, some at a call inside a save."""
        if self.in_saves < in_saves and (self.chance.random() < 0.5 or self.kills >= kills - in_saves):
            return Kill(at=self.chance.randint(1, CALLS))
        return Kill(after=self.chance.uniform(0, self.unbroken.seconds))

    def compare(self, out: Path) -> None:
        """Every checkpoint that a kill has left is that of the unbroken run."""
        for step, facts in checkpoints(out).items():
            if facts != self.unbroken.checkpoints[step]:
                self.differ.append(f"{out}, update {step}, kill {self.kills}")


def test_four_kills_change_nothing(nursery: ForkServer, corpus: Path, unbroken: Unbroken, tmp_path: Path) -> None:
    killer = Killer(nursery, corpus, unbroken, tmp_path, seed=1)
    killer.go(4, 2)
    assert not killer.differ


@pytest.mark.slow
def test_two_hundred_kills_change_nothing(
    nursery: ForkServer, corpus: Path, unbroken: Unbroken, tmp_path: Path
) -> None:
    killer = Killer(nursery, corpus, unbroken, tmp_path, seed=2)
    killer.go(200, 60)
    print(f"{len(killer.differ)} of {killer.kills} differ ({killer.in_saves} inside a save, {killer.runs} runs)")
    assert not killer.differ


@pytest.mark.parametrize("at", [pytest.param(30, marks=pytest.mark.slow), 64, pytest.param(72, marks=pytest.mark.slow)])
def test_a_kill_before_the_first_checkpoint_begins_anew(
    at: int, nursery: ForkServer, corpus: Path, unbroken: Unbroken, tmp_path: Path
) -> None:
    assert nursery.run(command(corpus, tmp_path / "run"), Kill(at=at, in_saves=False)) == KILLED
    assert not checkpoints(tmp_path / "run")
    assert nursery.run(command(corpus, tmp_path / "run")) == 0, nursery.stderr
    assert fingerprint(tmp_path / "run") == unbroken.fingerprint


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--subword-sampling", "0.1", "--ema", "0.9", "--accumulate", "2"], marks=pytest.mark.slow),
        pytest.param(
            "--rdrop 1 --optimizer adamw --clip-norm 1 --schedule cosine --layout packed".split(),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sampling, ema, accumulate", "rdrop, adamw, packed"],
)
def test_other_recipes_go_on_exactly_too(nursery: ForkServer, corpus: Path, tmp_path: Path, more: list[str]) -> None:
    whole = Unbroken(nursery, corpus, tmp_path / "whole", *more)
    out = tmp_path / "killed"
    nursery.start(command(corpus, out, "--workers", "0", *more), Kill(at=35))  # behind the second checkpoint
    assert nursery.wait() == KILLED
    assert 0 < max(checkpoints(out)) < STEPS
    assert nursery.run(command(corpus, out, "--workers", "2", *more)) == 0, nursery.stderr
    assert fingerprint(out) == whole.fingerprint


# ---- asked to stop ---------------------------------------------------------------------------------------------------


def begun(nursery: ForkServer, out: Path, step: int = 6) -> None:
    nursery.wait_until(lambda: (out / "state" / f"step-{step:08}").exists())


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130)],
    ids=["SIGTERM", "SIGINT"],
)
def test_asked_to_stop_it_saves_says_how_to_go_on_and_goes_on_exactly(
    number: int, code: int, nursery: ForkServer, corpus: Path, unbroken: Unbroken, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    child = nursery.start(command(corpus, out))
    begun(nursery, out)
    began = time.monotonic()
    os.kill(child, number)
    assert nursery.wait() == code, nursery.stderr
    assert time.monotonic() - began < 10
    goes_on = f"resume with: attent train --out {out}"
    assert goes_on in nursery.stderr
    assert events(out, "ended")[-1]["reason"] == "stopped"
    assert max(checkpoints(out)) == events(out, "ended")[-1]["step"]
    assert nursery.run(["train", "--out", str(out)]) == 0, nursery.stderr
    assert fingerprint(out) == unbroken.fingerprint


def test_a_second_interrupt_leaves_at_once_and_loses_nothing(
    nursery: ForkServer, corpus: Path, unbroken: Unbroken, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    child = nursery.start(command(corpus, out))
    begun(nursery, out)
    os.kill(child, signal.SIGSTOP)  # so that both wait for it when it wakes up
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGCONT)
    nursery.wait_until(lambda: "leaving" in nursery.stderr)
    os.kill(child, signal.SIGINT)
    assert nursery.wait() == 130, nursery.stderr
    assert nursery.run(command(corpus, out)) == 0, nursery.stderr
    assert fingerprint(out) == unbroken.fingerprint


@pytest.mark.slow
def test_stopped_anywhere_again_and_again_it_comes_to_the_same(
    nursery: ForkServer, corpus: Path, unbroken: Unbroken, tmp_path: Path
) -> None:
    chance, out, stops = random.Random(5), tmp_path / "run", 0
    for _ in range(40):
        child = nursery.start(command(corpus, out))
        time.sleep(chance.uniform(0.1, unbroken.seconds))
        with suppress(ProcessLookupError):  # it may be done before
            os.kill(child, chance.choice([signal.SIGTERM, signal.SIGINT]))
        code = nursery.wait()
        assert code in (0, 130, 143) or not nursery.stderr, nursery.stderr  # without a word: it had not begun
        stops += code != 0
        if code == 0:
            assert fingerprint(out) == unbroken.fingerprint
            shutil.rmtree(out)
    assert stops > 10


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half(nursery: ForkServer, corpus: Path, home: Path) -> Path:
    """A run that was killed half-way."""
    out = home / "half"
    child = nursery.start(command(corpus, out))
    begun(nursery, out, 12)
    os.kill(child, signal.SIGKILL)
    assert nursery.wait() == KILLED
    assert STEPS > max(checkpoints(out)) >= 12
    return out


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("manifest.json", lambda path: flip(path, 0.02), marks=pytest.mark.slow),
        pytest.param("state.json", lambda path: flip(path, 0.5), marks=pytest.mark.slow),
        ("weights.safetensors", lambda path: flip(path, 0.9)),
        pytest.param("optimizer.safetensors", lambda path: flip(path, 0.1), marks=pytest.mark.slow),
        pytest.param("rng.safetensors", lambda path: flip(path, 0.5), marks=pytest.mark.slow),
        pytest.param("weights.safetensors", cut, marks=pytest.mark.slow),
        ("rng.safetensors", Path.unlink),
    ],
    ids=["manifest", "state", "weights", "optimizer", "rng", "cut", "missing"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    name: str, damage: Callable[[Path], None], nursery: ForkServer, corpus: Path, half: Path, unbroken: Unbroken,
    tmp_path: Path,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    shutil.copytree(half, out)
    newest = max(checkpoints(out))
    path = out / "state" / f"step-{newest:08}" / name
    damage(path)
    assert nursery.run(command(corpus, out)) == 0, nursery.stderr
    assert f"warning: {path}" in nursery.stderr
    assert f"The older checkpoint of step {newest - 3} is used instead" in nursery.stderr
    assert f"from step {newest - 3}" in nursery.stderr
    assert fingerprint(out) == unbroken.fingerprint


def test_a_damaged_last_checkpoint_is_made_again(
    nursery: ForkServer, corpus: Path, unbroken: Unbroken, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert nursery.run(command(corpus, out)) == 0, nursery.stderr
    flip(out / "state" / f"step-{STEPS:08}" / "weights.safetensors", 0.5)
    assert nursery.run(command(corpus, out)) == 0, nursery.stderr
    assert f"from step {STEPS - 3}" in nursery.stderr
    assert fingerprint(out) == unbroken.fingerprint


def test_when_every_checkpoint_is_damaged_nothing_is_trained_and_nothing_overwritten(
    nursery: ForkServer, corpus: Path, half: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(half, out)
    for path in (out / "state").glob("step-*/weights.safetensors"):
        flip(path, 0.5)
    before = contents(out)
    assert nursery.run(command(corpus, out)) == 1
    assert "every one is damaged" in nursery.stderr
    assert "weights.safetensors" in nursery.stderr
    assert "Traceback" not in nursery.stderr
    assert contents(out) == before
