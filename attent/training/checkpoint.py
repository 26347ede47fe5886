"""Checkpoints that survive anything: `state/step-00000120/`, with tensors, `state.json` and a manifest of checksums.

A checkpoint is written aside, synced and renamed, so that under its name it is whole; the one before it stays until
`prune`. Reading verifies every byte it uses, opens no pickle and changes nothing on  What the tensors and facts
mean, and when to save, is left to the loop. One process at a time may save into a folder.

Names in `state/` other than step-N are never taken for checkpoints, but for one: a save that replaces step-N first
moves the old one to .replaced-N, which stands for step-N as long as that is not there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attent import settings
from attent.models.folder import encode_json
from attent.storage.atomic import fsync_path, make_folder, write_synced
from attent.storage.errors import FolderError
from attent.storage.manifest import (
    MANIFEST_FILE,
    ManifestEntry,
    explain_save_errors,
    find_damage,
    hash_file,
    read_manifest,
    write_manifest,
)
from attent.storage.tensor_files import check_storable, read_safetensors, to_standalone_cpu, write_safetensors

STATE_FILE = "state.json"
TENSOR_SUFFIX = ".safetensors"
STEP_PREFIX, REPLACED_PREFIX, SAVING_PREFIX, REMOVING_PREFIX = "step-", ".replaced-", ".saving-", ".removing-"
GROUP_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,79}")  # of a group of tensors; one case, since some disks know only one


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved or read; the message says which file and what to do."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """All that training needs to go on from a step as if nothing had happened."""

    step: int
    state: dict[str, Any]  # state.json: plain finite data
    tensors: dict[str, dict[str, Tensor]]  # group ("weights", "optimizer", ...) -> name -> tensor


# Saving.


def save_checkpoint(root: Path, checkpoint: Checkpoint) -> Path:
    """Writes `state/step-N`. Whatever happens meanwhile, the older ones load, and this one does or is not there."""
    root = Path(root)
    with _wrap_errors(root), explain_save_errors(root, "checkpoint"):
        target = checkpoint_path(root, checkpoint.step)
        facts = encode_json(checkpoint.state, STATE_FILE)
        groups = _prepare_groups(checkpoint.tensors)
        make_folder(root)
        _clean_up(root)
        try:
            aside = _write_staged(root / f"{SAVING_PREFIX}{_format_step(checkpoint.step)}", facts, groups)
            _rename_into_place(aside, target)
        finally:
            with suppress(OSError):  # the next save or prune clears what this cannot
                _clean_up(root)
    return target


def _format_step(step: int) -> str:
    if type(step) is not int or step < 0:
        raise CheckpointError(f"a checkpoint's step must be a count, 0 or more, but is {step!r}; give the steps done")
    return f"{step:08}"


def _prepare_groups(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The tensors on the CPU, each in memory of its own: what was tied is stored as often as it has names."""
    for group in groups:
        if not GROUP_NAME.fullmatch(group) or group + TENSOR_SUFFIX == STATE_FILE:
            raise CheckpointError(f"`{group}` must be a plain name (a-z, 0-9, _ . -) for a file of tensors; rename it")
    return {group: _prepare_group(tensors) for group, tensors in groups.items()}


def _prepare_group(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    storages: set[int] = set()
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    return {name: to_standalone_cpu(tensor, storages) for name, tensor in tensors.items()}


def _write_staged(staged: Path, state: bytes, groups: Mapping[str, dict[str, Tensor]]) -> Path:
    """The whole checkpoint under a name that nobody reads, on disk for sure, its manifest last."""
    staged.mkdir()
    write_synced(staged / STATE_FILE, state)
    for group, tensors in groups.items():
        path = staged / (group + TENSOR_SUFFIX)
        write_safetensors(tensors, path, "checkpoint")
        shutil.copymode(staged / STATE_FILE, path)  # safetensors makes files that only their owner can read
        fsync_path(path)
    names = [STATE_FILE, *(group + TENSOR_SUFFIX for group in groups)]
    write_manifest(staged / MANIFEST_FILE, {name: hash_file(staged / name) for name in names})
    fsync_path(staged)
    return staged


def _rename_into_place(staged: Path, target: Path) -> None:
    if os.path.lexists(target):  # a folder cannot be renamed onto a full one: the old makes way, and still counts
        os.rename(target, target.with_name(target.name.replace(STEP_PREFIX, REPLACED_PREFIX)))
    os.rename(staged, target)
    fsync_path(target.parent)


def _clean_up(root: Path) -> None:
    """Clears what interrupted saves and prunes have left; puts one that was to be replaced, and was not, back."""
    for path in _list_with_prefix(root, SAVING_PREFIX):
        _remove(path)
    for path in _list_with_prefix(root, REPLACED_PREFIX):
        step = path.with_name(path.name.replace(REPLACED_PREFIX, STEP_PREFIX))
        os.rename(path, _discarded_name(path) if os.path.lexists(step) else step)
    _remove_discarded(root)


def _remove_discarded(root: Path) -> None:
    """Removes what a rename has given up, once that is on disk for sure: half of it must never count again."""
    doomed = _list_with_prefix(root, REMOVING_PREFIX)
    if doomed:
        fsync_path(root)
    for path in doomed:
        _remove(path)


def _list_with_prefix(root: Path, prefix: str) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.name.startswith(prefix))


def _discarded_name(path: Path) -> Path:
    """A free name for what is to be removed; an interrupted removal may hold the first."""
    number = path.name.rpartition("-")[2]
    tries = (path.with_name(f"{REMOVING_PREFIX}{again}-{number}") for again in range(10**6))
    return next(one for one in tries if not os.path.lexists(one))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def prune_checkpoints(root: Path, keep: Collection[int]) -> None:
    """Removes all checkpoints but those of the steps `keep` and the newest, and what interrupted saves have left.

    The newest is the last whose files are all there in full length. Each loses its name before its first file.
    """
    root = Path(root)
    if not root.is_dir():
        return
    with _wrap_errors(root, "old checkpoints cannot be removed"):
        _clean_up(root)
        found = list_steps(root)
        newest_step = next((step for step in reversed(found) if _has_all_files(_find_folder(root, step))), None)
        for step in found:
            if step not in keep and step != newest_step:
                path = _find_folder(root, step)
                os.rename(path, _discarded_name(path))
        _remove_discarded(root)


def _has_all_files(folder: Path) -> bool:
    try:
        return all((folder / name).stat().st_size == entry.bytes for name, entry in _read_manifest(folder).items())
    except (FolderError, OSError):
        return False


# Reading.


def list_steps(root: Path) -> list[int]:
    """The steps of which there are checkpoints, ascending; whether each is intact, `load` says."""
    root = Path(root)
    with _wrap_errors(root):
        names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    found = (re.fullmatch(f"(?:{STEP_PREFIX}|{re.escape(REPLACED_PREFIX)})([0-9]{{8,15}})", name) for name in names)
    return sorted({int(match[1]) for match in found if match and _format_step(int(match[1])) == match[1]})


def load_checkpoint(folder: Path, groups: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint `state/step-N`, or `only` these groups of its tensors; every byte of that is verified first."""
    folder = Path(folder)
    step = _parse_step(folder)
    with _wrap_errors(folder):
        place = _find_folder(folder.parent, step)
        files = _read_manifest(place)
        names = _select_files(place, files, groups)
        for name in (STATE_FILE, *names.values()):
            problem = find_damage(place / name, files[name])
            if problem is not None:
                raise FolderError(f"{place / name}: {problem}; copy the checkpoint again, or take an older one")
        facts = settings.read_json(place / STATE_FILE)
        tensors = {group: read_safetensors(place / name, "checkpoint") for group, name in names.items()}
    return Checkpoint(step=step, state=facts, tensors=tensors)


def load_newest(root: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest that is whole, or None if there is none at all; `tell` is told of each newer one that is damaged."""
    root = Path(root)
    refused: list[CheckpointError] = []
    for step in reversed(list_steps(root)):
        try:
            checkpoint = load_checkpoint(checkpoint_path(root, step))
        except CheckpointError as problem:
            refused.append(problem)
            continue
        for damage in refused:
            warn(f"{damage}. The checkpoint of step {step}, before it, is used instead")
        return checkpoint
    if not refused:
        return None
    raise CheckpointError(
        f"{root}: holds {len(refused)} checkpoint(s), and every one is damaged; copy the folder again from "
        f"where it is whole, or remove it to start anew. The newest: {refused[0]}"
    )


def _parse_step(folder: Path) -> int:
    match = re.fullmatch(f"{STEP_PREFIX}([0-9]{{8,15}})", folder.name)
    if match is None:
        raise CheckpointError(f"{folder}: must be a checkpoint's folder, step-00000120 for example; give one of those")
    return int(match[1])


def checkpoint_path(root: Path, step: int) -> Path:
    """The name under which the checkpoint of a step stands."""
    return root / f"{STEP_PREFIX}{_format_step(step)}"


def _find_folder(root: Path, step: int) -> Path:
    """Where a checkpoint stands: under its name, or aside if a save that was to replace it was interrupted."""
    path, replaced = root / f"{STEP_PREFIX}{_format_step(step)}", root / f"{REPLACED_PREFIX}{_format_step(step)}"
    return replaced if not os.path.lexists(path) and replaced.is_dir() else path


def _read_manifest(folder: Path) -> dict[str, ManifestEntry]:
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise FolderError(f"{folder}: must be a checkpoint's folder, but {problem}; give another")
    files = read_manifest(folder / MANIFEST_FILE, "checkpoint")
    for name in files:
        if name != STATE_FILE and not (
            name.endswith(TENSOR_SUFFIX) and GROUP_NAME.fullmatch(name.removesuffix(TENSOR_SUFFIX))
        ):
            raise FolderError(
                f"{folder / MANIFEST_FILE}: must list {STATE_FILE} and plain names of {TENSOR_SUFFIX} files, but lists {name!r:.80}; "
                f"copy the checkpoint again"
            )
    if STATE_FILE not in files:
        raise FolderError(f"{folder / MANIFEST_FILE}: must list {STATE_FILE}; copy the checkpoint again")
    return files


def _select_files(folder: Path, files: Mapping[str, ManifestEntry], groups: Collection[str] | None) -> dict[str, str]:
    """Group of tensors -> its file, for those that are asked for."""
    names = {name.removesuffix(TENSOR_SUFFIX): name for name in files if name != STATE_FILE}
    if groups is None:
        return names
    for group in groups:
        if group not in names:
            listed = ", ".join(f"`{name}`" for name in names) or "none"
            raise FolderError(f"{folder}: holds no tensors `{group}`; it has {listed}")
    return {group: names[group] for group in names if group in groups}


@contextmanager
def _wrap_errors(path: Path, problem: str = "cannot be read") -> Iterator[None]:
    """One kind of error for whatever is wrong with a checkpoint."""
    try:
        yield
    except (FolderError, settings.SettingsError) as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        what = f"{error.filename or path}: {problem} ({error.strerror})"
        raise CheckpointError(f"{what}; check its permissions and the disk") from error
