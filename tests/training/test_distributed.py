"""Distributed training, started by torchrun with gloo: world size and sharding do not change the result; a lost process
ends the run with a message, and the run resumes with any world size.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from attent.cli import main
from attent.training import checkpoint
from attent.training.distributed import DistributedContext, explain_lost_process, init_distributed
from attent.training.run_options import TrainError
from tests.text.corpus import lines

# A learning rate and an eps that do not amplify rounding: with a high rate, runs that differ in the last digit of a sum
# diverge within a hundred steps. Micro-batches so small that each batch has one per process: a batch with fewer is
# split differently, and then dropout differs.
RECIPE = """
--device cpu --precision float32 --threads 1 --batch-tokens 512 --micro-batch-tokens 32 --valid-sentences 0 --average 0
--hold-out 20 --lr 0.002 --warmup 10 --clip-norm 1 --dropout 0.2 --quiet --set train.eps=1e-6
--set decode.beam_size=1 --set model.layers=2 --set model.width=32 --set model.ffn_width=64 --set model.heads=2
""".split()
LIMIT = 120  # seconds, enough for each step on a busy machine


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.tsv"
    pairs = list(dict.fromkeys(zip(*lines(), strict=True)))[:250]
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


def make_arguments(corpus: Path, out: Path, *more: str) -> list[str]:
    return ["train", "--data", str(corpus), "--src", "en", "--tgt", "de", "--out", str(out), *RECIPE, *more]


@contextmanager
def start_training(corpus: Path, out: Path, processes: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    alone = [sys.executable, "-m", "attent"]
    many = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "-m",
        "attent",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*(alone if processes == 1 else many), *make_arguments(corpus, out, *more)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        try:
            yield run
        finally:
            if run.poll() is None:
                run.kill()


def train(corpus: Path, out: Path, processes: int, *more: str) -> str:
    """Train to the end and return stderr."""
    with start_training(corpus, out, processes, *more) as run:
        _, stderr = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, stderr
    return stderr


def losses(out: Path) -> dict[int, float]:
    events = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return {event["step"]: event["loss"] for event in events if event["event"] == "validated"}


def assert_close(actual: dict[int, float], expected: dict[int, float]) -> None:
    assert actual.keys() == expected.keys()
    assert actual
    for step, loss in actual.items():
        assert expected[step] == pytest.approx(loss, rel=1e-6), step


def wait_for(path: Path, run: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT
    while not path.exists():
        assert run.poll() is None, "the run ended early"
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def child_processes(run: subprocess.Popen[str]) -> list[int]:
    """Process ids of the run by rank."""
    listed = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    ranks = {}
    for pid in map(int, listed):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks.update({int(entry[5:]): pid for entry in environment if entry.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


# ---- one process -----------------------------------------------------------------------------------------------------


def test_a_single_process_has_world_size_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with init_distributed(torch.device("cpu")) as team:
        assert team.is_main
        assert team.world_size == 1
        team.barrier()
        assert team.is_true_on_any_rank(True)
        assert not team.is_true_on_any_rank(False)
        assert team.broadcast([1.5]) == [1.5]
        assert torch.equal(team.all_reduce_sum(torch.ones(2)), torch.ones(2))


def test_missing_launcher_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with (
        pytest.raises(TrainError, match=r"MASTER_ADDR is not; start several processes with torchrun"),
        init_distributed(torch.device("cpu")),
    ):
        pass


def test_only_connection_errors_mean_a_lost_process() -> None:
    lost = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
    team = DistributedContext(torch.device("cpu"), rank=1, world_size=2)
    with (
        pytest.raises(TrainError, match=r"rank 1 of 2: another process .* has exited; .* same command again"),
        explain_lost_process(team),
    ):
        raise RuntimeError(lost)
    with pytest.raises(RuntimeError, match="shapes"), explain_lost_process(team):
        raise RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="gloo"), explain_lost_process(DistributedContext(torch.device("cpu"))):
        raise RuntimeError(lost)


# ---- two processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_match_one_and_only_rank_0_logs(corpus: Path, tmp_path: Path) -> None:
    few = ("--steps", "6", "--valid-every", "3")
    assert main(make_arguments(corpus, tmp_path / "one", *few)) == 0
    stderr = train(corpus, tmp_path / "two", 2, *few)
    assert_close(losses(tmp_path / "one"), losses(tmp_path / "two"))
    twice = [line for line, count in Counter(filter(None, stderr.splitlines())).items() if count > 1]
    assert not twice
    single, double = (
        checkpoint.load_checkpoint(tmp_path / name / "state" / "step-00000006") for name in ("one", "two")
    )
    assert single.state["order_digest"] == double.state["order_digest"]


@pytest.mark.slow
def test_batches_of_fewer_micro_batches_than_processes_have_the_same_gradient(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = " ".join(RECIPE).replace("--micro-batch-tokens 32", "--micro-batch-tokens 512")
    monkeypatch.setattr(sys.modules[__name__], "RECIPE", recipe.replace("--dropout 0.2", "--dropout 0").split())
    few = ("--steps", "30", "--valid-every", "10")
    train(corpus, tmp_path / "one", 1, *few)
    train(corpus, tmp_path / "two", 2, *few)
    assert_close(losses(tmp_path / "one"), losses(tmp_path / "two"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--shard",)], ids=["copied", "spread"])
def test_at_step_100_the_loss_of_two_processes_is_that_of_one(
    corpus: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    hundred = ("--steps", "100", "--valid-every", "25")
    train(corpus, tmp_path / "one", 1, *hundred)
    train(corpus, tmp_path / "two", 2, *hundred, *more)
    assert_close(losses(tmp_path / "one"), losses(tmp_path / "two"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [((2,), (1,)), ((1,), (2,)), ((2, "--shard"), (1,)), ((1,), (2, "--shard")), ((2, "--shard"), (2,))],
    ids=["two-one", "one-two", "spread-one", "one-spread", "spread-copied"],
)
def test_a_run_resumes_with_another_world_size(
    corpus: Path, tmp_path: Path, first: tuple[int, *tuple[str, ...]], second: tuple[int, *tuple[str, ...]]
) -> None:
    every = ("--valid-every", "5", "--save-every", "5")
    train(corpus, tmp_path / "uninterrupted", 1, "--steps", "20", *every)
    train(corpus, tmp_path / "interrupted", first[0], "--steps", "10", *every, *first[1:])
    train(corpus, tmp_path / "interrupted", second[0], "--steps", "20", *every, *second[1:])
    assert_close(losses(tmp_path / "uninterrupted"), losses(tmp_path / "interrupted"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_with_a_message_and_it_resumes(corpus: Path, tmp_path: Path, victim: int) -> None:
    out = tmp_path / "out"
    with start_training(corpus, out, 2, "--steps", "100000", "--save-every", "5", "--valid-every", "1000") as run:
        wait_for(out / "state" / "step-00000005", run)
        os.kill(child_processes(run)[victim], signal.SIGKILL)
        began = time.monotonic()
        _, stderr = run.communicate(timeout=60)
    assert run.returncode != 0
    assert time.monotonic() - began < 60
    assert f"rank {1 - victim} of 2: another process of this run has exited" in stderr
    assert "run the same command again" in stderr
    assert "Connection closed by peer" not in stderr
    reached = checkpoint.list_steps(out / "state")[-1]
    train(corpus, out, 2, "--steps", str(reached + 2), "--save-every", "5", "--valid-every", "1000")
    assert checkpoint.list_steps(out / "state")[-1] == reached + 2


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--shard",)], ids=["copied", "spread"])
def test_sigterm_saves_and_exits_on_all_ranks(corpus: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    with start_training(
        corpus, out, 2, "--steps", "100000", "--save-every", "1000", "--valid-every", "4", *more
    ) as run:
        wait_for(out / "model.safetensors", run)  # the first validation
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=60)
    assert stderr.count("attent: saved; resume with: the same command") == 1
    assert "has exited" not in stderr
    steps = checkpoint.list_steps(out / "state")
    assert len(steps) == 1
    assert steps[0] >= 4
