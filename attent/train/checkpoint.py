"""Checkpoints that survive anything: `state/step-00000120/`, with tensors, `state.json` and a manifest of checksums.

A checkpoint is written aside, synced and renamed, so that under its name it is whole; the one before it stays until
`prune`. Reading verifies every byte it uses, opens no pickle and changes nothing on disk. What the tensors and facts
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
from attent.models import folder as disk
from attent.models.folder import MANIFEST, Entry, FolderError

FACTS = "state.json"
TENSORS = ".safetensors"
STEP, REPLACED, SAVING, REMOVING = "step-", ".replaced-", ".saving-", ".removing-"
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,79}")  # of a group of tensors; one case, since some disks know only one


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved or read; the message says which file and what to do."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """All that training needs to go on from a step as if nothing had happened."""

    step: int
    facts: dict[str, Any]  # state.json: plain finite data
    tensors: dict[str, dict[str, Tensor]]  # group ("weights", "optimiser", ...) -> name -> tensor


# Saving.


def save(state: Path, checkpoint: Checkpoint) -> Path:
    """Writes `state/step-N`. Whatever happens meanwhile, the older ones load, and this one does or is not there."""
    state = Path(state)
    with _refused(state), disk.explained(state, "checkpoint"):
        target = path_of(state, checkpoint.step)
        facts = disk.json_text(checkpoint.facts, FACTS)
        groups = _storable(checkpoint.tensors)
        disk.make_folder(state)
        _settle(state)
        try:
            aside = _stage(state / f"{SAVING}{_number(checkpoint.step)}", facts, groups)
            _publish(aside, target)
        finally:
            with suppress(OSError):  # the next save or prune clears what this cannot
                _settle(state)
    return target


def _number(step: int) -> str:
    if type(step) is not int or step < 0:
        raise CheckpointError(f"a checkpoint's step must be a count, 0 or more, but is {step!r}; give the steps done")
    return f"{step:08}"


def _storable(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The tensors on the CPU, each in memory of its own: what was tied is stored as often as it has names."""
    for group in groups:
        if not NAME.fullmatch(group) or group + TENSORS == FACTS:
            raise CheckpointError(f"`{group}` must be a plain name (a-z, 0-9, _ . -) for a file of tensors; rename it")
    return {group: _group(tensors) for group, tensors in groups.items()}


def _group(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    storages: set[int] = set()
    for name, tensor in tensors.items():
        disk.check_storable(name, tensor)
    return {name: disk.alone(tensor, storages) for name, tensor in tensors.items()}


def _stage(aside: Path, facts: bytes, groups: Mapping[str, dict[str, Tensor]]) -> Path:
    """The whole checkpoint under a name that nobody reads, on disk for sure, its manifest last."""
    aside.mkdir()
    disk.write_new(aside / FACTS, facts)
    for group, tensors in groups.items():
        path = aside / (group + TENSORS)
        disk.write_safetensors(tensors, path, "checkpoint")
        shutil.copymode(aside / FACTS, path)  # safetensors makes files that only their owner can read
        disk.sync(path)
    names = [FACTS, *(group + TENSORS for group in groups)]
    disk.write_manifest(aside / MANIFEST, {name: disk.entry_of(aside / name) for name in names})
    disk.sync(aside)
    return aside


def _publish(aside: Path, target: Path) -> None:
    if os.path.lexists(target):  # a folder cannot be renamed onto a full one: the old makes way, and still counts
        os.rename(target, target.with_name(target.name.replace(STEP, REPLACED)))
    os.rename(aside, target)
    disk.sync(target.parent)


def _settle(state: Path) -> None:
    """Clears what interrupted saves and prunes have left; puts one that was to be replaced, and was not, back."""
    for path in _named(state, SAVING):
        _remove(path)
    for path in _named(state, REPLACED):
        step = path.with_name(path.name.replace(REPLACED, STEP))
        os.rename(path, _doomed(path) if os.path.lexists(step) else step)
    _clear(state)


def _clear(state: Path) -> None:
    """Removes what a rename has given up, once that is on disk for sure: half of it must never count again."""
    doomed = _named(state, REMOVING)
    if doomed:
        disk.sync(state)
    for path in doomed:
        _remove(path)


def _named(state: Path, prefix: str) -> list[Path]:
    return sorted(path for path in state.iterdir() if path.name.startswith(prefix))


def _doomed(path: Path) -> Path:
    """A free name for what is to be removed; an interrupted removal may hold the first."""
    number = path.name.rpartition("-")[2]
    tries = (path.with_name(f"{REMOVING}{again}-{number}") for again in range(10**6))
    return next(one for one in tries if not os.path.lexists(one))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def prune(state: Path, keep: Collection[int]) -> None:
    """Removes all checkpoints but those of the steps `keep` and the newest, and what interrupted saves have left.

    The newest is the last whose files are all there in full length. Each loses its name before its first file.
    """
    state = Path(state)
    if not state.is_dir():
        return
    with _refused(state, "old checkpoints cannot be removed"):
        _settle(state)
        found = steps(state)
        newest_step = next((step for step in reversed(found) if _looks_whole(_place(state, step))), None)
        for step in found:
            if step not in keep and step != newest_step:
                path = _place(state, step)
                os.rename(path, _doomed(path))
        _clear(state)


def _looks_whole(folder: Path) -> bool:
    try:
        return all((folder / name).stat().st_size == entry.bytes for name, entry in _manifest(folder).items())
    except (FolderError, OSError):
        return False


# Reading.


def steps(state: Path) -> list[int]:
    """The steps of which there are checkpoints, ascending; whether each is intact, `load` says."""
    state = Path(state)
    with _refused(state):
        names = [path.name for path in state.iterdir() if path.is_dir()] if state.is_dir() else []
    found = (re.fullmatch(f"(?:{STEP}|{re.escape(REPLACED)})([0-9]{{8,15}})", name) for name in names)
    return sorted({int(match[1]) for match in found if match and _number(int(match[1])) == match[1]})


def load(folder: Path, only: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint `state/step-N`, or `only` these groups of its tensors; every byte of that is verified first."""
    folder = Path(folder)
    step = _step_of(folder)
    with _refused(folder):
        place = _place(folder.parent, step)
        files = _manifest(place)
        names = _wanted(place, files, only)
        for name in (FACTS, *names.values()):
            problem = disk.damage(place / name, files[name])
            if problem is not None:
                raise FolderError(f"{place / name}: {problem}; copy the checkpoint again, or take an older one")
        facts = settings.read_json(place / FACTS)
        tensors = {group: disk.read_safetensors(place / name, "checkpoint") for group, name in names.items()}
    return Checkpoint(step=step, facts=facts, tensors=tensors)


def newest(state: Path, tell: Callable[[str], None]) -> Checkpoint | None:
    """The newest that is whole, or None if there is none at all; `tell` is told of each newer one that is damaged."""
    state = Path(state)
    refused: list[CheckpointError] = []
    for step in reversed(steps(state)):
        try:
            checkpoint = load(path_of(state, step))
        except CheckpointError as problem:
            refused.append(problem)
            continue
        for damage in refused:
            tell(f"{damage}. The checkpoint of step {step}, before it, is used instead")
        return checkpoint
    if not refused:
        return None
    raise CheckpointError(
        f"{state}: holds {len(refused)} checkpoint(s), and every one is damaged; copy the folder again from "
        f"where it is whole, or remove it to start anew. The newest: {refused[0]}"
    )


def _step_of(folder: Path) -> int:
    match = re.fullmatch(f"{STEP}([0-9]{{8,15}})", folder.name)
    if match is None:
        raise CheckpointError(f"{folder}: must be a checkpoint's folder, step-00000120 for example; give one of those")
    return int(match[1])


def path_of(state: Path, step: int) -> Path:
    """The name under which the checkpoint of a step stands."""
    return state / f"{STEP}{_number(step)}"


def _place(state: Path, step: int) -> Path:
    """Where a checkpoint stands: under its name, or aside if a save that was to replace it was interrupted."""
    path, replaced = state / f"{STEP}{_number(step)}", state / f"{REPLACED}{_number(step)}"
    return replaced if not os.path.lexists(path) and replaced.is_dir() else path


def _manifest(folder: Path) -> dict[str, Entry]:
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise FolderError(f"{folder}: must be a checkpoint's folder, but {problem}; give another")
    files = disk.read_manifest(folder / MANIFEST, "checkpoint")
    for name in files:
        if name != FACTS and not (name.endswith(TENSORS) and NAME.fullmatch(name.removesuffix(TENSORS))):
            raise FolderError(
                f"{folder / MANIFEST}: must list {FACTS} and plain names of {TENSORS} files, but lists {name!r:.80}; "
                f"copy the checkpoint again"
            )
    if FACTS not in files:
        raise FolderError(f"{folder / MANIFEST}: must list {FACTS}; copy the checkpoint again")
    return files


def _wanted(folder: Path, files: Mapping[str, Entry], only: Collection[str] | None) -> dict[str, str]:
    """Group of tensors -> its file, for those that are asked for."""
    names = {name.removesuffix(TENSORS): name for name in files if name != FACTS}
    if only is None:
        return names
    for group in only:
        if group not in names:
            listed = ", ".join(f"`{name}`" for name in names) or "none"
            raise FolderError(f"{folder}: holds no tensors `{group}`; it has {listed}")
    return {group: names[group] for group in names if group in only}


@contextmanager
def _refused(where: Path, trouble: str = "cannot be read") -> Iterator[None]:
    """One kind of error for whatever is wrong with a checkpoint."""
    try:
        yield
    except (FolderError, settings.SettingsError) as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        what = f"{error.filename or where}: {trouble} ({error.strerror})"
        raise CheckpointError(f"{what}; check its permissions and the disk") from error
