"""Checkpoints round-trip bit for bit, damage is refused and reported, and neither a disk fault nor a kill at any system
call loses more than the save in progress.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.models import folder
from attent.storage import tensor_files
from attent.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    list_steps,
    load_checkpoint,
    load_newest,
    prune_checkpoints,
    save_checkpoint,
)
from tests.faulty_disk import FaultyDisk, SimulatedKill

FILES = ("manifest.json", "state.json", "weights.safetensors", "optimizer.safetensors")
SYSTEM_CALLS = "open fsync rename replace unlink rmdir mkdir chmod listdir".split()  # of a save, by os.NAME


def make_checkpoint(step: int, seed: int = 0) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 5, generator=generator)
    return Checkpoint(
        step=step,
        state={"seed": seed, "loss": 0.1 + seed, "data": {"epoch": 1, "done": [1, 2]}, "note": "größer"},
        tensors={"weights": {"embed": weight, "out": weight}, "optimizer": {"embed.m": weight / 3}},
    )


def is_equal(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    """True if both are equal bit for bit."""
    return (checkpoint.step, checkpoint.state, to_plain(checkpoint)) == (other.step, other.state, to_plain(other))


def to_plain(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        group: {
            name: (t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).tolist()) for name, t in ts.items()
        }
        for group, ts in checkpoint.tensors.items()
    }


def fail_on_warning(sentence: str) -> None:
    pytest.fail(f"nothing is damaged, but there was a warning: {sentence}")


def assert_newest(state: Path, *possible: Checkpoint) -> int:
    """Assert that the newest checkpoint equals one of these; return its index."""
    loaded = load_newest(state, fail_on_warning)
    assert loaded is not None
    (number,) = [number for number, checkpoint in enumerate(possible) if is_equal(loaded, checkpoint)]
    return number


def refusal(path: Path, only: Collection[str] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, only)
    assert str(path) in str(caught.value)
    assert ";" in str(caught.value), "it must say what to do"
    return str(caught.value)


def seal(path: Path) -> None:
    """Rewrite the manifest to match the files, as an attacker would."""
    files = {}
    for name in FILES[1:]:
        content = (path / name).read_bytes()
        files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (path / "manifest.json").write_text(json.dumps({"format_version": 1, "files": files}))


def flip_bit(path: Path, offset: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "state", make_checkpoint(10))
    return tmp_path / "state"


# Round trips.


def test_checkpoint_round_trip(state: Path) -> None:
    assert save_checkpoint(state, make_checkpoint(20, seed=1)) == state / "step-00000020"
    assert is_equal(load_checkpoint(state / "step-00000010"), make_checkpoint(10))
    assert is_equal(load_checkpoint(state / "step-00000020"), make_checkpoint(20, seed=1))
    assert sorted(path.name for path in (state / "step-00000020").iterdir()) == sorted(FILES)
    assert sorted(path.name for path in state.iterdir()) == ["step-00000010", "step-00000020"]


def test_every_dtype_round_trips_bit_for_bit(tmp_path: Path) -> None:
    whole = torch.arange(24).reshape(4, 6)
    kinds = (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
    various = {
        "whole": whole,
        "tied": whole,
        "turned": whole.T,
        "part": whole[1:3, ::2],
        "row": whole[0],
        "spread": torch.ones(1).expand(5),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "random": torch.get_rng_state(),
        **{str(kind): torch.randn(7).mul(9).to(kind) for kind in kinds},
    }
    saved = Checkpoint(step=0, state={}, tensors={"weights": various, "optimizer": {"whole": whole}, "random": {}})
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved))
    assert is_equal(loaded, saved)
    for tensor in (tensor for group in loaded.tensors.values() for tensor in group.values()):
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    addresses = [t.data_ptr() for group in loaded.tensors.values() for t in group.values() if t.numel()]
    assert len(addresses) == len(set(addresses)), "each must have memory of its own"


def test_state_numbers_round_trip_exactly(tmp_path: Path) -> None:
    facts = {"loss": 0.1 + 0.2, "tiny": 5e-324, "big": 2**200, "none": None, "yes": True, "text": 'a "b"\n\u2028😀'}
    assert load_checkpoint(save_checkpoint(tmp_path, Checkpoint(step=1, state=facts, tensors={}))).state == facts


def test_only_requested_groups_are_read(state: Path) -> None:
    path = state / "step-00000010"
    flip_bit(path / "optimizer.safetensors", 100, 1)
    assert load_checkpoint(path, groups=()).tensors == {}
    assert load_checkpoint(path, groups={"weights"}).tensors.keys() == {"weights"}
    assert "optimizer.safetensors: is damaged" in refusal(path, only={"optimizer"})


def test_changing_a_loaded_tensor_does_not_change_the_file(state: Path) -> None:
    load_checkpoint(state / "step-00000010").tensors["weights"]["embed"].add_(1)
    assert is_equal(load_checkpoint(state / "step-00000010"), make_checkpoint(10))


def test_steps_are_listed_in_order(state: Path) -> None:
    for step in (123_456_789, 0, 9):
        save_checkpoint(state, make_checkpoint(step))
    for name in (".saving-00000030", "step-30", "step-00000040.old", "step-000000050", "notes", ".removing-0-00000060"):
        (state / name).mkdir()
    (state / "step-00000070").write_text("a file")
    assert list_steps(state) == [0, 9, 10, 123_456_789]
    assert list_steps(state / "nowhere") == []


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save_checkpoint(tmp_path / "state", make_checkpoint(1))
    finally:
        os.umask(before)
    assert {(path / name).stat().st_mode & 0o777 for name in FILES} == {0o640}
    assert path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": {"loss": float("nan")}}, "state.json: must be plain finite data"),
        ({"state": {"x": object()}}, "state.json: must be plain finite data"),
        ({"state": {"x": "\ud800"}}, "state.json: must be plain finite data"),
        ({"state": {"x": "a" * 2**24}}, "state.json: must have at most"),
        ({"tensors": {"weights": {"x": 3}}}, "`x` must be a tensor"),
        ({"tensors": {"weights": {"__metadata__": torch.ones(1)}}}, "not named `__metadata__`"),
        ({"tensors": {"weights": {"x": torch.ones(1, device="meta")}}}, "`x` must be a dense tensor with data"),
    ],
)
def test_unreadable_content_is_not_saved(changes: dict[str, Any], expected: str, state: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        save_checkpoint(state, Checkpoint(**{"step": 20, "state": {}, "tensors": {}, **changes}))
    assert [path.name for path in state.iterdir()] == ["step-00000010"]


# Damage is detected and reported, and the previous checkpoint is used.


def test_every_bit_flip_is_detected(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Path] = []
    monkeypatch.setattr(tensor_files, "safe_open", lambda path, **_: used.append(path))
    chosen = random.Random(0)
    for flip in range(2_000):
        path = state / "step-00000010" / FILES[flip % len(FILES)]
        offset, bit = chosen.randrange(path.stat().st_size), 1 << chosen.randrange(8)
        flip_bit(path, offset, bit)
        assert path.name in refusal(path.parent)
        flip_bit(path, offset, bit)
    assert used == []
    monkeypatch.undo()
    assert is_equal(load_checkpoint(state / "step-00000010"), make_checkpoint(10))


def test_every_truncation_is_detected(state: Path) -> None:
    chosen = random.Random(0)
    for cut in range(200):
        path = state / "step-00000010" / FILES[cut % len(FILES)]
        whole = path.read_bytes()
        os.truncate(path, len(whole) - 1 if cut < len(FILES) else chosen.randrange(len(whole)))
        assert path.name in refusal(path.parent)
        path.write_bytes(whole)
    assert is_equal(load_checkpoint(state / "step-00000010"), make_checkpoint(10))


@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoint_falls_back_to_the_previous(name: str, state: Path) -> None:
    for step in (20, 30):
        flip_bit(save_checkpoint(state, make_checkpoint(step, seed=step)) / name, 20, 1)
    warnings: list[str] = []
    loaded = load_newest(state, warnings.append)
    assert loaded is not None
    assert is_equal(loaded, make_checkpoint(10))
    assert len(warnings) == 2
    for sentence, step in zip(warnings, (30, 20), strict=True):
        assert sentence.startswith(str(state / f"step-{step:08}" / name))
        assert sentence.endswith("The older checkpoint of step 10 is used instead")


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_detected(name: str, state: Path) -> None:
    (state / "step-00000010" / name).unlink()
    assert f"{name}: is missing" in refusal(state / "step-00000010")


def test_all_damaged_is_an_error(state: Path) -> None:
    save_checkpoint(state, make_checkpoint(20))
    for step in (10, 20):
        os.truncate(state / f"step-{step:08}" / "weights.safetensors", 30)
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match=r"holds 2 checkpoint.* every one is damaged.*step-00000020") as caught:
        load_newest(state, warnings.append)
    assert "weights.safetensors: is damaged: by manifest.json it must have" in str(caught.value)
    assert warnings == []


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nowhere", fail_on_warning) is None
    assert load_newest(tmp_path, fail_on_warning) is None
    (tmp_path / ".saving-00000010").mkdir()
    assert load_newest(tmp_path, fail_on_warning) is None


def test_other_paths_are_described(state: Path) -> None:
    assert "does not exist" in refusal(state / "step-00000099")
    assert "must be a checkpoint folder" in refusal(state)
    (state / "step-00000030").write_text("")
    assert "is a file" in refusal(state / "step-00000030")


# Hostile files.


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch exploded",)


def make_pickle() -> bytes:
    import pickle  # noqa: TID251 - to make the file that must be refused

    return pickle.dumps(Bomb())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (make_pickle(), "is a pickle or zip, which is never opened; get the checkpoint as safetensors"),
        (b"PK\x03\x04" + bytes(100), "is a pickle or zip"),
        ((2**63).to_bytes(8, "little") + b"{}", "is not safetensors"),
        ((99 * 2**20).to_bytes(8, "little") + b"{" + b" " * 99 * 2**20, "is not safetensors"),
        ((20_000).to_bytes(8, "little") + b'{"a":' + b"[" * 19_995, "is not valid safetensors"),
        (b"", "is not safetensors"),
    ],
)
def test_invalid_safetensors_are_refused(content: bytes, expected: str, state: Path) -> None:
    path = state / "step-00000010"
    (path / "optimizer.safetensors").write_bytes(content)
    seal(path)
    assert f"optimizer.safetensors: {expected}" in refusal(path)


def test_hostile_manifests_are_refused(state: Path) -> None:
    path = state / "step-00000010" / "manifest.json"
    good = json.loads(path.read_text())
    files = good["files"]
    entry = files["state.json"]
    hostile: list[Any] = [
        {},
        [],
        {**good, "format_version": 2},
        {**good, "files": []},
        {**good, "files": {name: files[name] for name in files if name != "state.json"}},
        *(
            {**good, "files": {**files, name: entry}}
            for name in ("../state.json", "/etc/passwd", "a/b.safetensors", "")
        ),
        *({**good, "files": {**files, "state.json": bad}} for bad in (None, {}, {**entry, "bytes": "3"})),
    ]
    for manifest in hostile:
        path.write_text(json.dumps(manifest))
        assert "manifest.json" in refusal(path.parent)
    path.write_text(json.dumps(good) + " " * 2**17)
    assert "manifest.json: is damaged" in refusal(path.parent)


@pytest.mark.parametrize("content", [b'{"a": ' + b"[" * 100_000, b'{"a": NaN}', b"[]"])
def test_hostile_state_is_refused(content: bytes, state: Path) -> None:
    (state / "step-00000010" / "state.json").write_bytes(content)
    seal(state / "step-00000010")
    assert "state.json: " in refusal(state / "step-00000010")


@pytest.mark.parametrize("name", FILES)
def test_link_out_of_the_checkpoint_is_refused(name: str, state: Path) -> None:
    path = state / "step-00000010" / name
    path.rename(state / name)
    path.symlink_to(state / name)
    assert f"{name}: is a link out of the folder" in refusal(path.parent)


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    program = """
import sys, torch
from pathlib import Path
from attent.training.checkpoint import (
    Checkpoint, CheckpointError, load_checkpoint, load_newest, prune_checkpoints, save_checkpoint
)

events = []
sys.addaudithook(lambda name, _: events.append(name) if name in ("pickle.find_class", "os.system") else None)
root = Path(sys.argv[1])
weight = torch.ones(3)
for step in (1, 2):
    tensors = {"weights": {"x": weight, "y": weight}}
    save_checkpoint(root / "state", Checkpoint(step=step, state={"a": 1}, tensors=tensors))
prune_checkpoints(root / "state", [2])
assert load_newest(root / "state", sys.exit).step == 2
for path in sorted(root.glob("hostile*/step-*")):
    try:
        load_checkpoint(path)
        sys.exit(f"{path} was read")
    except CheckpointError:
        pass
print("before the control:", sorted(set(events)))
import pickle
pickle.loads(pickle.dumps(Path))
print("after the control:", sorted(set(events)))
"""
    for number, sealed in enumerate((False, True, True)):
        path = save_checkpoint(tmp_path / f"hostile{number}", make_checkpoint(1))
        (path / "weights.safetensors").write_bytes(make_pickle())
        if number == 2:
            with zipfile.ZipFile(path / "weights.safetensors", "w") as archive:
                archive.writestr("data.pkl", make_pickle())
        if sealed:
            seal(path)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "before the control: []" in done.stdout
    assert "after the control: ['pickle.find_class']" in done.stdout  # the hook works
    assert not (tmp_path / "exploded").exists()


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(folder.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


# A fault or a kill loses at most the save in progress.


def faults(state: Path, fault: BaseException, forever: bool, action: Callable[[], object]) -> Iterator[int]:
    """Repeat the action on the same state, failing at its first call, then at the second, ... until it succeeds."""
    original = state.with_name(state.name + "-original")
    shutil.copytree(state, original)
    for at in itertools.count(1):
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, at, fault, forever, SYSTEM_CALLS)
            with suppress(CheckpointError, SimulatedKill):
                action()
        if disk.calls < at:
            return
        yield at
        shutil.rmtree(state)
        shutil.copytree(original, state)


@pytest.mark.parametrize("step", [10, 20], ids=["replacing", "new"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_error_at_any_call_leaves_old_or_new(number: int, step: int, state: Path) -> None:
    new, seen = make_checkpoint(step, seed=1), Counter[int]()
    for _ in faults(state, OSError(number, os.strerror(number)), False, lambda: save_checkpoint(state, new)):
        seen[assert_newest(state, make_checkpoint(10), new)] += 1
        assert step == 10 or is_equal(load_checkpoint(state / "step-00000010"), make_checkpoint(10))
        assert not list(state.glob(".saving-*"))
    assert seen[0] > 10
    assert seen[1] > 0


@pytest.mark.parametrize("step", [10, 20], ids=["replacing", "new"])
def test_kill_at_any_call_leaves_old_or_new(step: int, state: Path) -> None:
    new = make_checkpoint(step, seed=1)
    seen = [
        assert_newest(state, make_checkpoint(10), new)
        for _ in faults(state, SimulatedKill(), True, lambda: save_checkpoint(state, new))
    ]
    assert set(seen) == {0, 1}


def test_kill_in_the_save_after_a_kill_loses_nothing(state: Path) -> None:
    states, count = set(), 0
    old, new, newer = make_checkpoint(10), make_checkpoint(10, seed=1), make_checkpoint(10, seed=2)
    for first in faults(state, SimulatedKill(), True, lambda: save_checkpoint(state, new)):
        before = (old, new)[assert_newest(state, old, new)]
        assert_previous_exists = frozenset((str(path.relative_to(state)), path.is_file()) for path in state.rglob("*"))
        if assert_previous_exists in states:
            continue
        states.add(assert_previous_exists)
        again = state.with_name(f"again{first}")
        shutil.copytree(state, again)
        for _ in faults(again, SimulatedKill(), True, lambda again=again: save_checkpoint(again, newer)):  # type: ignore[misc]
            assert_newest(again, before, newer)
            count += 1
        assert_newest(again, newer)
        assert [path.name for path in again.iterdir()] == ["step-00000010"]
    assert count > 100


def test_interrupted_replacement_keeps_the_old_checkpoint(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state / "step-00000010").rename(state / ".replaced-00000010")
    for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("reading must not write"))
    assert list_steps(state) == [10]
    assert is_equal(load_checkpoint(state / "step-00000010"), make_checkpoint(10))
    assert_newest(state, make_checkpoint(10))


def test_previous_checkpoint_stays_until_the_new_one_is_complete(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def assert_previous_exists(source: Path, target: Path) -> None:
        assert target == state / "step-00000020"
        assert is_equal(load_checkpoint(state / "step-00000010"), make_checkpoint(10))
        os.replace(source, target)

    monkeypatch.setattr(os, "rename", assert_previous_exists)
    save_checkpoint(state, make_checkpoint(20))
    assert list_steps(state) == [10, 20]


# Pruning.


def test_pruning_keeps_requested_and_newest(state: Path) -> None:
    for step in (20, 30, 40):
        save_checkpoint(state, make_checkpoint(step))
    (state / ".saving-00000050").mkdir()
    (state / ".removing-0-00000005").mkdir()
    (state / "notes.txt").write_text("mine")
    prune_checkpoints(state, keep={20, 99})
    assert sorted(path.name for path in state.iterdir()) == ["notes.txt", "step-00000020", "step-00000040"]
    prune_checkpoints(state, keep=())
    assert list_steps(state) == [40]
    assert_newest(state, make_checkpoint(40))
    prune_checkpoints(state / "nowhere", keep=())


@pytest.mark.parametrize("name", FILES)
def test_pruning_ignores_truncated_newest(name: str, state: Path) -> None:
    os.truncate(save_checkpoint(state, make_checkpoint(20)) / name, 5)
    prune_checkpoints(state, keep=())
    assert_newest(state, make_checkpoint(10))


@pytest.mark.parametrize("fault", [SimulatedKill(), OSError(errno.EIO, "broken")], ids=["death", "error"])
def test_fault_while_pruning_leaves_complete_checkpoints(fault: BaseException, state: Path) -> None:
    for step in (20, 30, 40):
        save_checkpoint(state, make_checkpoint(step, seed=step))
    shutil.copytree(state / "step-00000010", state / ".replaced-00000010")  # an earlier interrupted save
    seen = set()
    for _ in faults(state, fault, isinstance(fault, SimulatedKill), lambda: prune_checkpoints(state, keep=[20])):
        assert_newest(state, make_checkpoint(40, seed=40))
        for step in list_steps(state):
            assert is_equal(
                load_checkpoint(state / f"step-{step:08}"), make_checkpoint(step, seed=0 if step == 10 else step)
            )
        seen.add(tuple(list_steps(state)))
        prune_checkpoints(state, keep=[20])
        assert sorted(path.name for path in state.iterdir()) == ["step-00000020", "step-00000040"]
    assert {(10, 20, 30, 40), (20, 40)} <= seen


def test_failed_prune_is_described(state: Path) -> None:
    save_checkpoint(state, make_checkpoint(20))
    with pytest.MonkeyPatch.context() as patch:
        FaultyDisk(patch, 2, OSError(errno.EROFS, os.strerror(errno.EROFS)), True, SYSTEM_CALLS)
        with pytest.raises(CheckpointError, match=r"old checkpoints cannot be removed .*; check its permissions"):
            prune_checkpoints(state, keep=())


# Error messages of failed saves.


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "the disk is full; an older checkpoint in the folder is intact; free some space"),
        (errno.EACCES, "the folder cannot be written to; give another folder, or change its permissions"),
        (errno.EROFS, "the folder cannot be written to"),
        (errno.EIO, "an older checkpoint in the folder is intact; save again"),
    ],
)
def test_failed_save_is_described(number: int, expected: str, state: Path) -> None:
    for at in range(3, 6):
        with pytest.MonkeyPatch.context() as patch:
            FaultyDisk(patch, at, OSError(number, os.strerror(number)), False, SYSTEM_CALLS)
            with pytest.raises(CheckpointError, match=f"{state}: the checkpoint could not be saved: .*{expected}"):
                save_checkpoint(state, make_checkpoint(20))


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, "the disk is full; free"), (errno.EIO, "; save again")]
)
def test_failed_first_save_names_no_older_checkpoint(number: int, expected: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        FaultyDisk(patch, 5, OSError(number, os.strerror(number)), False, SYSTEM_CALLS)
        with pytest.raises(CheckpointError, match=expected) as failure:
            save_checkpoint(tmp_path / "state", make_checkpoint(20))
    assert "older" not in str(failure.value)


def test_full_disk_in_safetensors_is_described(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise tensor_files.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        save_checkpoint(state, make_checkpoint(20))
    assert [path.name for path in state.iterdir()] == ["step-00000010"]


def test_file_in_place_of_the_folder_is_described(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="there is a file where the folder must be; give another folder"):
            save_checkpoint(path, make_checkpoint(1))
    assert (tmp_path / "file").read_text() == "mine"


# Real faults: strace makes a system call fail, or kills the process at it.

DRIVER = """
import os, signal, sys
from pathlib import Path
from attent.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

for line in sys.stdin:
    wanted, state = map(Path, line.rstrip("\\n").split("\\t"))
    new = load_checkpoint(wanted)
    if not Path(sys.argv[1]).exists():
        save_checkpoint(Path(sys.argv[1]), new)  # the first save imports this and that
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)  # until strace holds us
        try:
            save_checkpoint(state, new)
            code = 0
        except (CheckpointError, MemoryError):
            code = 3
        os._exit(code)
    os.waitpid(child, os.WUNTRACED)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Tracer:
    """Save repeatedly, each time in a new process under strace, forked from one process that has imported torch."""

    def __init__(self, scratch: Path) -> None:
        self.trace = scratch / "trace"
        self.driver = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", DRIVER, str(scratch / "warm")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def save(self, original: Path, state: Path, *options: str) -> int:
        """Save a copy of a checkpoint into `state` in a child; return its status as from os.waitpid."""
        assert self.driver.stdin is not None
        self.driver.stdin.write(f"{original}\t{state}\n")
        self.driver.stdin.flush()
        child = self._number()
        command = ["strace", "-qq", "-y", "-s", "0", "-o", str(self.trace), *options, "-p", str(child)]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not self._is_traced(child):
            assert strace.poll() is None, strace.stderr and strace.stderr.read()
        os.kill(child, signal.SIGCONT)
        status = self._number()
        strace.communicate(timeout=60)
        return status

    def _is_traced(self, child: int) -> bool:
        return "TracerPid:\t0\n" not in Path(f"/proc/{child}/status").read_text()

    def _number(self) -> int:
        assert self.driver.stdout is not None
        return int(self.driver.stdout.readline())

    def calls(self) -> list[str]:
        """System calls of the last save, one per line."""
        lines = self.trace.read_text().splitlines()
        return [line for line in lines if re.match(r"\w+\(", line)]


def strace_works() -> bool:
    if sys.platform != "linux" or shutil.which("strace") is None:
        return False
    command = ["strace", "-qq", "-o", os.devnull, "-e", "inject=getppid:signal=KILL", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_strace = pytest.mark.skipif(not strace_works(), reason="needs strace")


@pytest.fixture(scope="module")
def tracer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracer]:
    checkpoint = Tracer(tmp_path_factory.mktemp("tracer"))
    try:
        yield checkpoint
    finally:
        assert checkpoint.driver.stdin is not None
        checkpoint.driver.stdin.close()
        checkpoint.driver.wait(timeout=60)


def record_calls(tracer: Tracer, original: Path, state: Path, *options: str) -> list[str]:
    """System calls of an undisturbed save."""
    copy = state.with_name("undisturbed")
    shutil.copytree(state, copy)
    assert tracer.save(original, copy, *options) == 0
    return tracer.calls()


@needs_strace
@pytest.mark.parametrize("step", [10, 20], ids=["replacing", "new"])
def test_files_are_synced_before_the_rename_and_the_folder_after(step: int, tracer: Tracer, state: Path) -> None:
    calls = record_calls(tracer, save_checkpoint(state.with_name("wanted"), make_checkpoint(step, seed=1)), state)
    done = [line for line in calls if re.match(r"fsync|rename", line)]
    aside = f".saving-{step:08}"
    (renamed,) = [at for at, line in enumerate(done) if re.search(rf'{aside}".*step-{step:08}"', line)]
    synced = [re.search(r"fsync\(\d+<(.*?)>", line) for line in done[:renamed]]
    paths = [match[1].rpartition("undisturbed/")[2] for match in synced if match]
    assert set(paths) == {aside, *(f"{aside}/{name}" for name in FILES)}
    assert paths[-1] == aside
    assert paths[-2] == f"{aside}/manifest.json"
    assert re.search(r"fsync\(\d+<[^>]*/undisturbed>\) += 0", done[renamed + 1])
    writes = [line for line in calls if line.startswith("write(") and "undisturbed" in line]
    assert calls.index(writes[-1]) < calls.index(done[renamed])


def inject_faults(tracer: Tracer, step: int, state: Path, fault: str, every: int) -> Counter[int]:
    """Inject a fault at every `every`-th call of a save, each on a fresh copy; count remaining old and new ones."""
    new, copy, kills = make_checkpoint(step, seed=1), state.with_name("disturbed"), fault.startswith("signal")
    original = save_checkpoint(state.with_name("wanted"), new)
    names, seen = Counter[str](), Counter[int]()
    for number, line in enumerate(
        record_calls(tracer, original, state, "-e", f"trace={'all' if kills else '%file,%desc'}")
    ):
        name = line.partition("(")[0]
        names[name] += 1
        if number % every or name == "exit_group":
            continue
        shutil.copytree(state, copy)
        status = tracer.save(original, copy, "-e", f"trace={name}", "-e", f"inject={name}:{fault}:when={names[name]}")
        assert os.WIFSIGNALED(status) == kills, line
        outcome = assert_newest(copy, make_checkpoint(10), new)
        assert kills or outcome == 1 or os.WEXITSTATUS(status) == 3, f"no error was reported: {line}"
        assert step == 10 or is_equal(load_checkpoint(copy / "step-00000010"), make_checkpoint(10))
        assert is_equal(load_checkpoint(save_checkpoint(copy, new)), new)  # leftovers do not disturb the next save
        assert {path.name[:5] for path in copy.iterdir()} == {"step-"}
        seen[outcome] += 1
        shutil.rmtree(copy)
    return seen


@needs_strace
@pytest.mark.parametrize("step", [10, 20], ids=["replacing", "new"])
@pytest.mark.parametrize("fault", ["error=EIO", "error=ENOSPC", "signal=KILL"])
def test_real_faults_leave_old_or_new(fault: str, step: int, tracer: Tracer, state: Path) -> None:
    assert inject_faults(tracer, step, state, fault, every=17)[0] > 2


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize("step", [10, 20], ids=["replacing", "new"])
@pytest.mark.parametrize("fault", ["error=EIO", "error=ENOSPC", "signal=KILL"])
def test_real_fault_at_any_call_leaves_old_or_new(fault: str, step: int, tracer: Tracer, state: Path) -> None:
    seen = inject_faults(tracer, step, state, fault, every=1)
    assert seen[0] > 50
    assert seen[1] > 3


# Errors that are not a full disk.


def test_an_unreadable_checkpoint_names_the_file_and_the_reason(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=rf"{state}: cannot be read \(Permission denied\); check its permissions"):
        list_steps(state)


def test_an_error_without_a_file_names_the_folder(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tensor_files, "load_file", fail, raising=False)
    monkeypatch.setattr("attent.training.checkpoint.read_safetensors", fail)
    folder = state / "step-00000010"
    with pytest.raises(CheckpointError, match=rf"{folder}: cannot be read \(Input/output error\)"):
        load_checkpoint(folder)
