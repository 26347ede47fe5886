"""Model folders round-trip, damaged and hostile files are refused, and no save loses a model."""

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
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import attent
from attent.models import folder
from attent.storage import tensor_files
from attent.storage.atomic import lock_folder, write_files
from attent.storage.errors import FolderError
from attent.storage.manifest import explain_save_errors
from attent.text.tokenizer import read_files
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from tests.faulty_disk import FaultyDisk, SimulatedKill

FILES = ("config.json", "model.safetensors", "manifest.json")
SYSTEM_CALLS = (
    "open",
    "fsync",
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
)  # calls of a save that change the disk, by os.NAME


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(16, 8, generator=generator)
    return {
        "embed.weight": embedding,
        "bias": torch.randn(8, generator=generator),
        "output.weight": embedding,
    }


def write(path: Path, seed: int = 0) -> None:
    folder.write_folder(path, config={"seed": seed}, tensors=tensors(seed))


def assert_holds(path: Path, *seeds: int) -> int:
    """Assert that the folder loads as exactly one of the models that were saved there."""
    stored = folder.read_folder(path)
    seed = stored.config["seed"]
    assert seed in seeds
    assert stored.tensors.keys() == tensors().keys()
    assert all(torch.equal(stored.tensors[name], value) for name, value in tensors(seed).items())
    return int(seed)


def refusal(path: Path) -> str:
    with pytest.raises(FolderError) as caught:
        folder.read_folder(path)
    assert str(path) in str(caught.value)
    assert ";" in str(caught.value), "it must say what to do"
    return str(caught.value)


def write_checksums(path: Path) -> None:
    """Rewrite the manifest to match the files, as an attacker would."""
    files = {}
    for name in FILES[:2]:
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
def model(tmp_path: Path) -> Path:
    write(tmp_path / "model")
    return tmp_path / "model"


# Round trips.


def test_model_round_trip(model: Path) -> None:
    stored = folder.read_folder(model)
    assert stored.config == {"seed": 0}
    assert_holds(model, 0)
    assert sorted(path.name for path in model.iterdir()) == sorted(FILES)


def test_tied_tensors_are_stored_once_and_tied_again(model: Path) -> None:
    stored = folder.read_folder(model)
    assert stored.tied == {"output.weight": "embed.weight"}
    assert stored.tensors["output.weight"] is stored.tensors["embed.weight"]
    assert json.loads((model / "config.json").read_text())["tied"] == stored.tied
    assert (model / "model.safetensors").stat().st_size < 2 * 16 * 8 * 4


def test_every_layout_and_dtype_round_trips(tmp_path: Path) -> None:
    whole = torch.arange(24).reshape(4, 6)
    various = {
        "whole": whole,
        "turned": whole.T,
        "part": whole[1:3, ::2],
        "row": whole[0],
        "spread": torch.ones(1).expand(5),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "also_empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        **{str(kind): torch.ones(3, dtype=kind) for kind in (torch.bfloat16, torch.float64, torch.bool, torch.int8)},
    }
    folder.write_folder(tmp_path, config={}, tensors=various)
    stored = folder.read_folder(tmp_path)
    assert stored.tied == {}
    for name, value in various.items():
        assert stored.tensors[name].dtype == value.dtype
        assert torch.equal(stored.tensors[name], value)


def test_changing_a_loaded_tensor_does_not_change_the_file(model: Path) -> None:
    folder.read_folder(model).tensors["bias"].add_(1)
    assert_holds(model, 0)


def test_unrelated_files_are_left_alone(model: Path) -> None:
    (model / "card.md").write_text("card")
    (model / "state").mkdir()
    write(model, 1)
    assert_holds(model, 1)
    assert {path.name for path in model.iterdir()} == {*FILES, "card.md", "state"}


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write(tmp_path)
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in FILES} == {0o644}


@pytest.mark.parametrize(
    ("config", "weights", "expected"),
    [
        ({"tied": 1}, {}, "the key `tied` is reserved"),
        ({"x": float("nan")}, {}, "must be plain finite data"),
        ({"x": object()}, {}, "must be plain finite data"),
        ({"x": "\ud800"}, {}, "must be plain finite data"),
        ({}, {"x": 3}, "`x` must be a tensor"),
        ({}, {"__metadata__": torch.ones(1)}, "not named `__metadata__`"),
        ({}, {"x": torch.ones(1, device="meta")}, "`x` must be a dense tensor with data"),
        ({}, {"x": torch.ones(2, 2).to_sparse()}, "`x` must be a dense tensor with data"),
    ],
)
def test_unreadable_content_is_not_saved(
    config: dict[str, Any], weights: dict[str, Any], expected: str, model: Path
) -> None:
    with pytest.raises(FolderError, match=expected):
        folder.write_folder(model, config=config, tensors=weights)
    assert_holds(model, 0)


# Damage is detected before any weight is used.


def test_every_bit_flip_is_detected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Path] = []
    monkeypatch.setattr(tensor_files, "safe_open", lambda path, **_: used.append(path))
    chosen = random.Random(0)
    for flip in range(2_000):
        path = model / FILES[flip % 3]
        offset, bit = chosen.randrange(path.stat().st_size), 1 << chosen.randrange(8)
        flip_bit(path, offset, bit)
        assert path.name in refusal(model)
        flip_bit(path, offset, bit)
    assert used == []


def test_every_truncation_is_detected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Path] = []
    monkeypatch.setattr(tensor_files, "safe_open", lambda path, **_: used.append(path))
    chosen = random.Random(0)
    for cut in range(204):
        path = model / FILES[cut % 3]
        whole = path.read_bytes()
        length = len(whole) - 1 if cut < 3 else chosen.randrange(len(whole))
        os.truncate(path, length)
        assert path.name in refusal(model)
        with open(path, "ab") as file:
            file.write(whole[length:])
    assert used == []


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_detected(name: str, model: Path) -> None:
    (model / name).unlink()
    assert f"{name}{' is missing' if name == 'manifest.json' else ': is missing'}" in refusal(model)


def test_damaged_weights_with_valid_checksum_do_not_crash(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    chosen = random.Random(0)
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(chosen.randrange(1, 4)):
            content[chosen.randrange(min(300, len(content)))] = chosen.randrange(256)
        (model / "model.safetensors").write_bytes(content)
        write_checksums(model)
        try:
            folder.read_folder(model)
        except FolderError as error:
            assert str(model) in str(error)  # noqa: PT017 - both outcomes are right


# Hostile files.


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch exploded",)


def make_pickle() -> bytes:
    import pickle  # noqa: TID251 - to make the file that must be refused

    return pickle.dumps(Bomb())


def header(size: int, text: bytes = b"") -> bytes:
    return struct.pack("<Q", size) + text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (make_pickle(), "is a pickle or zip, which is never opened; get the model as safetensors"),
        (b"PK\x03\x04" + bytes(100), "is a pickle or zip"),
        (header(100 * 2**20, b"{}"), "is not safetensors"),
        (header(2**63, b"{}"), "is not safetensors"),
        (header(99 * 2**20, b"{" + b" " * 99 * 2**20), "is not safetensors"),
        (header(2, b"[]"), "is not safetensors"),
        (b"", "is not safetensors"),
        (header(9), "is not safetensors"),
        (header(20_000, b'{"a":' + b"[" * 19_995), "is not valid safetensors"),
        (
            header(64, b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'[:64]),
            "is not valid",
        ),
        (
            header(66, b'{"a":{"dtype":"F32","shape":[9999999999999],"data_offsets":[0,4]}}xxxx'),
            "is not valid",
        ),
        (header(57, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4000]}}'), "is not valid"),
    ],
)
def test_invalid_safetensors_are_refused(content: bytes, expected: str, model: Path) -> None:
    (model / "model.safetensors").write_bytes(content)
    write_checksums(model)
    assert f"model.safetensors: {expected}" in refusal(model)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": ' + b"[" * 100_000, "nested deeper"),
        (b'{"a": 1, "a": 2}', "duplicate key"),
        (b'{"a": NaN}', "not a finite number"),
        (b"[]", "must be an object"),
        (b'{"tied": 3}', "`tied` must map names"),
        (b'{"tied": {"x": 3}}', "`tied` must map names"),
        (b'{"tied": {"x": "nobody"}}', "`tied.x` is invalid: `nobody` is not stored"),
        (b'{"tied": {"bias": "bias"}}', "`tied.bias` is invalid: is itself stored"),
    ],
)
def test_hostile_configs_are_refused(content: bytes, expected: str, model: Path) -> None:
    (model / "config.json").write_bytes(content)
    write_checksums(model)
    assert expected in refusal(model)


def test_hostile_manifests_are_refused(model: Path) -> None:
    good = json.loads((model / "manifest.json").read_text())
    entry = good["files"]["config.json"]
    (model.parent / "config.json").write_bytes((model / "config.json").read_bytes())
    hostile: list[Any] = [
        {},
        [],
        {**good, "format_version": 2},
        {**good, "format_version": True},
        {**good, "more": 1},
        {**good, "files": []},
        {**good, "files": {"config.json": entry}},
        *({**good, "files": {**good["files"], name: entry}} for name in ("../config.json", "/etc/passwd", "..", "a/b")),
        *({**good, "files": {**good["files"], "config.json": bad}} for bad in (None, {}, {**entry, "bytes": "3"})),
        {**good, "files": {**good["files"], "config.json": {**entry, "sha256": entry["sha256"].upper()}}},
    ]
    wrong_names = (".hidden", "manifest.json", "Config.json", "a.new", "", "a\0b", "a" * 101, "state/a")
    hostile += [{**good, "files": {**good["files"], name: entry}} for name in wrong_names]
    hostile += [{**good, "files": {**good["files"], "a": {**entry, "bytes": 2**40}}}]
    for manifest in hostile:
        (model / "manifest.json").write_text(json.dumps(manifest))
        assert "json" in refusal(model)
    (model / "manifest.json").write_text(json.dumps(good) + " " * 2**17)
    assert "is damaged" in refusal(model)


@pytest.mark.parametrize("name", FILES)
def test_link_out_of_the_folder_is_refused(name: str, model: Path) -> None:
    outside = model.parent / name
    (model / name).rename(outside)
    (model / name).symlink_to(outside)
    assert f"{name}: is a link out of the folder" in refusal(model)
    write(model, 1)  # replaces the link instead of writing through it
    assert_holds(model, 1)
    assert not (model / name).is_symlink()
    assert outside.exists()


def test_links_within_the_folder_are_followed(model: Path) -> None:
    (model / "config.json").rename(model / "mine.json")
    (model / "config.json").symlink_to("mine.json")
    (model.parent / "best").symlink_to(model)
    assert_holds(model.parent / "best", 0)


def test_checkpoint_folder_is_described(model: Path) -> None:
    checkpoint = model / "state" / "step-00000004"
    checkpoint.mkdir(parents=True)
    entry = {"sha256": "0" * 64, "bytes": 2}
    (checkpoint / "manifest.json").write_text(json.dumps({"format_version": 1, "files": {"state.json": entry}}))
    expected = f"is a checkpoint for resuming a run; give the folder of the run, {model}"
    with pytest.raises(FolderError, match=re.escape(expected)):
        attent.load(checkpoint)


def test_special_files_are_refused(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert "config.json: must be a plain file" in refusal(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(make_pickle())
    assert f"{name}: is a pickle, which can run code and is never opened" in refusal(tmp_path)


def test_zip_named_as_weights_is_refused(model: Path) -> None:
    with zipfile.ZipFile(model / "model.safetensors", "w") as archive:
        archive.writestr("data.pkl", make_pickle())
    write_checksums(model)
    assert "is a pickle or zip" in refusal(model)


def test_other_paths_are_described(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path / "file")
    assert "holds no complete model" in refusal(tmp_path)


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    program = """
import os, sys, torch
from pathlib import Path
from attent.models import folder
from attent.storage.errors import FolderError

events = []
sys.addaudithook(lambda name, _: events.append(name) if name in ("pickle.find_class", "os.system") else None)
root = Path(sys.argv[1])
weight = torch.ones(3)
folder.write_folder(root / "model", config={"a": 1}, tensors={"x": weight, "y": weight})
folder.read_folder(root / "model")
for path in sorted(root.glob("hostile*")):
    try:
        folder.read_folder(path)
        sys.exit(f"{path} was read")
    except FolderError:
        pass
print("before the control:", sorted(set(events)))
import pickle
pickle.loads(pickle.dumps(Path))
print("after the control:", sorted(set(events)))
"""
    for number, sealed in enumerate((False, True)):
        write(tmp_path / f"hostile{number}")
        (tmp_path / f"hostile{number}" / "model.safetensors").write_bytes(make_pickle())
        if sealed:
            write_checksums(tmp_path / f"hostile{number}")
    (tmp_path / "hostile2").mkdir()
    (tmp_path / "hostile2" / "pytorch_model.bin").write_bytes(make_pickle())
    path = os.pathsep.join([str(Path(folder.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "before the control: []" in done.stdout
    assert "after the control: ['pickle.find_class']" in done.stdout  # the hook works
    assert not (tmp_path / "exploded").exists()


# No save loses a model.


def faults(path: Path, fault: BaseException, forever: bool, seed: int) -> Iterator[int]:
    """Save over `path`, failing at the first call, then at the second, ... until it succeeds."""
    original = path.with_name(path.name + "-original")
    shutil.copytree(path, original)
    for call in itertools.count(1):
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, call, fault, forever, SYSTEM_CALLS)
            with suppress(FolderError, SimulatedKill):
                write(path, seed)
        if disk.calls < call:
            return
        yield call
        shutil.rmtree(path)
        shutil.copytree(original, path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_error_at_any_call_leaves_old_or_new_model(number: int, model: Path) -> None:
    seen = [assert_holds(model, 0, 1) for _ in faults(model, OSError(number, os.strerror(number)), False, 1)]
    assert len(seen) > 10
    assert set(seen) == {0, 1}


def test_error_leaves_no_temporary_files(model: Path) -> None:
    for call in faults(model, OSError(errno.ENOSPC, "full"), False, 1):
        assert {path.name for path in model.iterdir()} == set(FILES), call


def test_kill_at_any_call_leaves_old_or_new_model(model: Path) -> None:
    seen = [assert_holds(model, 0, 1) for _ in faults(model, SimulatedKill(), True, 1)]
    assert set(seen) == {0, 1}


def test_kill_in_the_save_after_a_kill_loses_nothing(model: Path) -> None:
    states, count = set(), 0
    for first in faults(model, SimulatedKill(), True, 1):
        before = assert_holds(model, 0, 1)
        state = frozenset((path.name, path.read_bytes() if path.is_file() else b"") for path in model.iterdir())
        if state in states:
            continue
        states.add(state)
        again = model.with_name(f"again{first}")
        shutil.copytree(model, again)
        for _ in faults(again, SimulatedKill(), True, 2):
            assert_holds(again, before, 2)
            count += 1
        assert_holds(again, 2)
        assert {path.name for path in again.iterdir()} == set(FILES)
    assert count > 100


def test_reordered_renames_leave_old_or_new_model(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "new", 1)
    for number, renamed in enumerate(itertools.product([False, True], repeat=3)):
        crashed = tmp_path / f"crashed{number}"
        shutil.copytree(model, crashed)
        for name, done in zip(FILES, renamed, strict=True):
            shutil.copy(tmp_path / "new" / name, crashed / (name if done else name + ".new"))
        assert_holds(crashed, 1 if any(renamed) else 0)
        write(crashed, 2)
        assert_holds(crashed, 2)


def test_partial_save_leaves_old_model(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "new", 1)
    for name in FILES:
        shutil.copy(tmp_path / "new" / name, model / (name + ".new"))
        whole = (model / (name + ".new")).read_bytes()
        (model / (name + ".new")).write_bytes(whole[: len(whole) // 2])
        assert_holds(model, 0)
        (model / (name + ".new")).write_bytes(whole)
    (model / ".saving").mkdir()
    (model / ".saving" / ".tmpX").write_text("half")
    write(model, 2)
    assert {path.name for path in model.iterdir()} == set(FILES)


def test_interrupted_save_loads_without_writing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(model, model.with_name("new"))
    write(model.with_name("new"), 1)
    shutil.copy(model.with_name("new") / "config.json", model / "config.json")
    for name in FILES[1:]:
        shutil.copy(model.with_name("new") / name, model / (name + ".new"))
    for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("reading must not write"))
    assert_holds(model, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_sigkill_leaves_old_or_new_model(model: Path) -> None:
    seen = set()
    for call in range(1, 100):
        child = os.fork()
        if child == 0:
            _die_at(call, model)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        seen.add(assert_holds(model, 0, 1))
        shutil.rmtree(model)
        write(model, 0)
    assert seen == {0, 1}


def _die_at(call: int, path: Path) -> None:
    """Save in a child process that is killed at its call number `at`. Never returns."""
    calls = itertools.count(1)

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def kill_at_call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return kill_at_call

    try:
        for name in SYSTEM_CALLS:
            setattr(os, name, guard(getattr(os, name)))
        write(path, 1)
        os._exit(0)
    finally:
        os._exit(1)


def test_concurrent_save_is_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loads = tensor_files.read_safetensors, itertools.count()

    def load_late(path: Path, *, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        if next(loads) == 0:  # between the checksums and the weights
            write(model, 1)
        return load(path, copy_tensor=copy_tensor)

    monkeypatch.setattr(folder, "read_safetensors", load_late)
    assert_holds(model, 1)


def test_folder_that_keeps_changing_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loads = tensor_files.read_safetensors, itertools.count(1)

    def load_late(path: Path, *, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        write(model, next(loads))
        return load(path, copy_tensor=copy_tensor)

    monkeypatch.setattr(folder, "read_safetensors", load_late)
    assert "changes while it is read; try again" in refusal(model)


# Small files that are saved with a model.

SIDES = ("source.model", "target.model")


def make_files(seed: int) -> dict[str, bytes]:
    return {name: f"{name} of {seed}".encode() * 9 for name in SIDES}


def write_with_files(path: Path, seed: int) -> None:
    folder.write_folder(path, config={"seed": 7}, tensors=tensors(seed), files=make_files(seed))


def assert_holds_with_files(path: Path) -> int:
    """Assert that the model and both files are from one save; return its number."""
    stored = folder.read_folder(path)
    (seed,) = [seed for seed in range(3) if torch.equal(stored.tensors["bias"], tensors(seed)["bias"])]
    assert stored.files in ({}, make_files(seed))
    assert folder.read_extra_files(path) == stored.files
    assert read_files(path, SIDES) == make_files(seed)  # as Tokenizer.load does
    return seed


def test_extra_files_round_trip(model: Path) -> None:
    assert folder.read_folder(model).files == folder.read_extra_files(model) == {}
    folder.write_folder(model, config={}, tensors=tensors(1), files={**make_files(1), "empty": b""})
    assert folder.read_folder(model).files == folder.read_extra_files(model) == {**make_files(1), "empty": b""}
    assert {path.name for path in model.iterdir()} == {*FILES, *SIDES, "empty"}


def test_save_without_extra_files_keeps_or_unlists_old_ones(model: Path) -> None:
    write_with_files(model, 1)
    write(model, 2)
    assert_holds(model, 2)
    assert folder.read_extra_files(model) == make_files(1)
    folder.write_folder(model, config={"seed": 2}, tensors=tensors(2), files={})
    assert_holds(model, 2)
    assert folder.read_extra_files(model) == {}
    assert read_files(model, SIDES) == make_files(1)


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "Model.safetensors", "a/b", "..", ".a", "", "a.new"])
def test_reserved_extra_file_names_are_refused(name: str, model: Path) -> None:
    with pytest.raises(FolderError, match="must be a plain file name that the model itself does not use; rename"):
        folder.write_folder(model, config={}, tensors={}, files={name: b""})
    assert_holds(model, 0)


def test_damaged_extra_file_is_detected(model: Path) -> None:
    write_with_files(model, 1)
    chosen = random.Random(0)
    for number in range(200):
        path = model / (*SIDES, "manifest.json")[number % 3]
        whole = path.read_bytes()
        if number < 100:
            flip_bit(path, chosen.randrange(len(whole)), 1 << chosen.randrange(8))
        else:
            os.truncate(path, chosen.randrange(len(whole)))
        assert path.name in refusal(model)
        with pytest.raises(FolderError, match=path.name):
            folder.read_extra_files(model)
        path.write_bytes(whole)
    (model / SIDES[0]).unlink()
    assert "source.model: is missing" in refusal(model)


@pytest.fixture(params=["listed", "not listed"])
def with_files(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose tokenizer was saved with it, and one whose tokenizer was saved separately."""
    path = tmp_path / "model"
    if request.param == "listed":
        write_with_files(path, 0)
    else:
        folder.write_folder(path, config={"seed": 7}, tensors=tensors(0))
        write_files(path, make_files(0))
    return path


def faults_with_files(path: Path, fault: BaseException, forever: bool, seed: int) -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "write", write_with_files)
        yield from faults(path, fault, forever, seed)


def test_error_at_any_call_leaves_files_of_one_save(with_files: Path) -> None:
    seen = set()
    for call in faults_with_files(with_files, OSError(errno.ENOSPC, "full"), False, 1):
        seen.add(assert_holds_with_files(with_files))
        assert {path.name for path in with_files.iterdir()} == {*FILES, *SIDES}, call
    assert seen == {0, 1}


def test_kill_at_any_call_leaves_files_of_one_save(with_files: Path) -> None:
    seen = {assert_holds_with_files(with_files) for _ in faults_with_files(with_files, SimulatedKill(), True, 1)}
    assert seen == {0, 1}


def test_kill_during_recovery_leaves_files_of_one_save(with_files: Path) -> None:
    write_with_files(with_files.with_name("unused"), 1)
    for name in (*SIDES, *FILES):
        shutil.copy(with_files.with_name("unused") / name, with_files / (name + ".new"))
    seen = {assert_holds_with_files(with_files) for _ in faults_with_files(with_files, SimulatedKill(), True, 2)}
    assert seen == {0, 2}


@pytest.mark.slow
def test_kill_after_a_kill_leaves_files_of_one_save(with_files: Path) -> None:
    states, count = set(), 0
    for first in faults_with_files(with_files, SimulatedKill(), True, 1):
        before = assert_holds_with_files(with_files)
        names = frozenset(path.name for path in with_files.rglob("*"))
        if names in states:
            continue
        states.add(names)
        again = with_files.with_name(f"again{first}")
        shutil.copytree(with_files, again)
        for _ in faults_with_files(again, SimulatedKill(), True, 2):
            assert assert_holds_with_files(again) in (before, 2)
            count += 1
        assert assert_holds_with_files(again) == 2
        assert {path.name for path in again.iterdir()} == {*FILES, *SIDES}
    assert count > 200


SIDE_FILE = "alignment.json"


def write_side_number(path: Path, seed: int) -> None:
    with explain_save_errors(path):
        folder.write_side_file(path, SIDE_FILE, f"side file {seed}".encode())


def assert_side_number(path: Path) -> int:
    """Assert that the model is intact and the side file is whole; return its number."""
    assert_holds(path, 0)
    content = folder.read_side_file(path, SIDE_FILE)
    assert content is not None
    assert folder.read_extra_files(path) == {SIDE_FILE: content}
    return int(content.decode().removeprefix("side file "))


def test_side_file_is_listed_and_verified(model: Path) -> None:
    assert folder.read_side_file(model, SIDE_FILE) is None
    write_side_number(model, 1)
    write_side_number(model, 2)
    assert assert_side_number(model) == 2
    for offset in range(len(b"side file 2")):
        flip_bit(model / SIDE_FILE, offset, 1)
        with pytest.raises(FolderError, match=r"alignment.json: is damaged or was changed"):
            folder.read_side_file(model, SIDE_FILE)
        flip_bit(model / SIDE_FILE, offset, 1)
    (model / SIDE_FILE).unlink()
    with pytest.raises(FolderError, match=r"alignment.json: is missing"):
        folder.read_side_file(model, SIDE_FILE)


def test_unlisted_side_file_is_ignored(model: Path) -> None:
    write_side_number(model, 1)
    folder.write_folder(model, config={"seed": 0}, tensors=tensors(0), files={})
    assert (model / SIDE_FILE).exists()
    assert folder.read_side_file(model, SIDE_FILE) is None


@pytest.mark.parametrize("target", ["outside.json", SIDE_FILE, "nothing.json"])
@pytest.mark.parametrize("listed", [True, False])
def test_link_in_place_of_a_side_file_is_refused(target: str, listed: bool, model: Path) -> None:
    """Also without a manifest, as in a folder of Hugging Face; a link to itself is no reason for a traceback."""
    write_side_number(model, 1)
    (model / SIDE_FILE).rename(model.parent / "outside.json")
    (model / SIDE_FILE).symlink_to("../outside.json" if target == "outside.json" else target)
    if not listed:
        (model / "manifest.json").unlink()
    with pytest.raises(FolderError, match=r"alignment.json: is a link .*; put the file itself there"):
        folder.read_side_file(model, SIDE_FILE)
    if listed:
        assert "alignment.json: is a link" in refusal(model)


@pytest.mark.parametrize(("fault", "forever"), [(OSError(errno.ENOSPC, "full"), False), (SimulatedKill(), True)])
def test_interrupted_side_file_is_the_old_or_the_new_one(fault: BaseException, forever: bool, model: Path) -> None:
    write_side_number(model, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "write", write_side_number)
        seen = {assert_side_number(model) for _ in faults(model, fault, forever, 2)}
    assert seen == {1, 2}
    write_side_number(model, 2)
    assert {path.name for path in model.iterdir()} == {*FILES, SIDE_FILE}


def test_side_file_waits_for_a_save_of_another_process(model: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with lock_folder(model):
            written = pool.submit(write_side_number, model, 1)
            with pytest.raises(TimeoutError):
                written.result(0.1)
            assert folder.read_side_file(model, SIDE_FILE) is None
        written.result(10)
    assert assert_side_number(model) == 1


def test_killed_first_save_leaves_all_or_nothing(tmp_path: Path) -> None:
    path, seen = tmp_path / "model", set()
    path.mkdir()
    for _ in faults_with_files(path, SimulatedKill(), True, 1):
        try:
            assert folder.read_folder(path).files == folder.read_extra_files(path) == make_files(1)
            seen.add("whole")
        except FolderError as error:
            seen.add(str(error).partition(": ")[2].partition(" (")[0])
    assert seen == {
        "holds no complete model",
        "whole",
    }


def test_reordered_renames_leave_files_of_one_save(tmp_path: Path) -> None:
    write_with_files(tmp_path / "old", 0)
    write_with_files(tmp_path / "new", 1)
    for number, renamed in enumerate(itertools.product([False, True], repeat=5)):
        crashed = tmp_path / f"crashed{number}"
        shutil.copytree(tmp_path / "old", crashed)
        for name, done in zip((*SIDES, *FILES), renamed, strict=True):
            shutil.copy(tmp_path / "new" / name, crashed / (name if done else name + ".new"))
        assert (
            folder.read_folder(crashed).files
            == folder.read_extra_files(crashed)
            == make_files(1 if any(renamed) else 0)
        )
        write_with_files(crashed, 2)
        assert assert_holds_with_files(crashed) == 2


# Error messages of failed saves.


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "the disk is full; an older model in the folder is intact; free some space"),
        (errno.EACCES, "the folder cannot be written to; give another folder, or change its permissions"),
        (errno.EROFS, "the folder cannot be written to"),
        (errno.EIO, "an older model in the folder is intact; save again"),
    ],
)
def test_failed_save_is_described(number: int, expected: str, model: Path) -> None:
    for call in range(2, 5):  # the first call creates the folder, which exists
        with pytest.MonkeyPatch.context() as patch:
            FaultyDisk(patch, call, OSError(number, os.strerror(number)), False, SYSTEM_CALLS)
            with pytest.raises(FolderError, match=f"{model}: the model could not be saved: .*{expected}"):
                write(model, 1)


def test_full_disk_in_safetensors_is_described(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise tensor_files.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(FolderError, match="the disk is full"):
        write(model, 1)
    assert_holds(model, 0)
    assert {path.name for path in model.iterdir()} == set(FILES)


def test_file_in_place_of_the_folder_is_described(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FolderError, match="there is a file where the folder must be; give another folder"):
            write(path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_loads_but_does_not_save(model: Path) -> None:
    model.chmod(0o555)
    try:
        with pytest.raises(FolderError, match="the folder cannot be written to"):
            write(model, 1)
        assert_holds(model, 0)
    finally:
        model.chmod(0o755)


# Names and shapes.


def shapes(**sizes: tuple[int, ...]) -> dict[str, torch.Size]:
    return {name: torch.Size(size) for name, size in sizes.items()}


def test_expected_tensors_pass() -> None:
    folder.check_tensors(shapes(a=(2, 3), b=()), {"a": torch.zeros(2, 3).half(), "b": torch.zeros(())}, "here")


def test_unexpected_tensors_are_described() -> None:
    expected = shapes(weight=(2, 3), bias=(3,), scale=(1,), gone=(1,))
    got = {
        "weights": torch.zeros(2, 3),
        "bias": torch.zeros(4),
        "scale": torch.zeros(1),
        "zzz": torch.zeros(1),
    }
    with pytest.raises(FolderError) as caught:
        folder.check_tensors(expected, got, Path("m/model.safetensors"))
    assert str(caught.value) == (
        "m/model.safetensors: missing: `weight`, `gone`; "
        "not known to the model: `weights` (for `weight`?), `zzz`; "
        "wrong shape: `bias` must be [3], but is [4]. Take config.json and the weights from the same model"
    )


def test_many_unexpected_tensors_are_shortened() -> None:
    with pytest.raises(FolderError, match="missing: `n0`, `n1`, `n2` and 997 more"):
        folder.check_tensors({f"n{number}": torch.Size([1]) for number in range(1_000)}, {}, "here")


def test_files_of_the_largest_size_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MAX_FILE_BYTES", 5)
    folder.write_folder(tmp_path / "m", config={}, tensors=tensors(), files={"a.txt": b"12345"})
    assert folder.read_folder(tmp_path / "m").files == {"a.txt": b"12345"}
    with pytest.raises(FolderError, match=r"a\.txt: must have at most 5 bytes, but has 6; leave it out"):
        folder.write_folder(tmp_path / "n", config={}, tensors=tensors(), files={"a.txt": b"123456"})
    content = '{\n  "a": "é"\n}\n'.encode()
    monkeypatch.setattr(folder.settings, "MAX_BYTES", len(content))
    assert folder.encode_json({"a": "é"}, "config.json") == content
    with pytest.raises(FolderError, match=rf"config\.json: must have at most {len(content)} bytes, but has"):
        folder.encode_json({"a": "éx"}, "config.json")


def test_a_tokenizer_without_a_manifest_is_read_and_one_beside_it_is_refused(tmp_path: Path) -> None:
    tokenizer = train_monolingual_tokenizer(["a b c d"] * 9, TokenizerConfig(kind="char"))
    tokenizer.save(tmp_path / "plain")
    found = folder.read_tokenizer(tmp_path / "plain")
    assert found is not None
    assert found.fingerprint == tokenizer.fingerprint
    write(tmp_path / "model", 0)
    assert folder.read_tokenizer(tmp_path / "model") is None
    tokenizer.save(tmp_path / "model")
    with pytest.raises(FolderError, match=r"its tokenizer is not listed in manifest\.json"):
        folder.read_tokenizer(tmp_path / "model")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    def fail(error: OSError) -> Callable[[Path], None]:
        def read(root: Path) -> None:
            raise error

        return read

    with pytest.raises(FolderError, match=r"^a\.bin: cannot be read \(broken\); check its permissions$"):
        folder._read_once(tmp_path, fail(OSError(errno.EIO, "broken", "a.bin")))
    with pytest.raises(FolderError, match=rf"^{re.escape(str(tmp_path))}: cannot be read \(broken\)"):
        folder._read_once(tmp_path, fail(OSError(errno.EIO, "broken")))
