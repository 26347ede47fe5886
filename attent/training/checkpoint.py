"""Checkpoints: `state/step-00000120/` with tensors, `state.json` and a manifest of checksums.

A checkpoint is written under a temporary name, synced and renamed, so that it is complete under its own name; older
ones stay until `prune_checkpoints`. Reading verifies every byte and changes nothing on disk. One process at a time may
save.

Only step-N folders are checkpoints, with one exception: a save that replaces step-N first moves the old one to
.replaced-N, which stands in for step-N while that does not exist.
"""

import json
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
from attent.models.folder import CONFIG_FILE, WEIGHTS_FILE, encode_json
from attent.storage import manifest
from attent.storage.atomic import NEW_SUFFIX, fsync_path, is_temporary, make_folder, write_synced
from attent.storage.cache import try_hold_lock
from attent.storage.errors import AttentError, FolderError
from attent.storage.manifest import MANIFEST_FILE, ManifestEntry, explain_save_errors
from attent.storage.tensor_files import check_storable, read_safetensors, to_standalone_cpu, write_safetensors
from attent.text.tokenizer import TOKENIZER_FORMATS
from attent.training.config import RESUMABLE_CHANGES, UserSettings, diff_settings, merge_with_previous, read_run
from attent.training.events import LOG_FILE
from attent.training.run_options import TrainError

STATE_FILE = "state.json"
TENSOR_SUFFIX = ".safetensors"
STEP_PREFIX, REPLACED_PREFIX, SAVING_PREFIX, REMOVING_PREFIX = "step-", ".replaced-", ".saving-", ".removing-"
# Of a tensor group; lower case, since some file systems ignore case.
GROUP_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,79}")
RUN_FILE, CURVES_FILE, CARD_FILE, STATE_FOLDER = "run.toml", "curves.svg", "card.md", "state"
REQUESTED_FILE, FINISHED_FILE, NEW_HEADS_FILE = "requested.json", "finished.json", "new_heads.json"  # in state/
MODEL_FILES = {CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE}
RUN_FILES = MODEL_FILES | {RUN_FILE, CARD_FILE, LOG_FILE}
# Files that a run may have written before its first checkpoint.
EARLY_FILES = {RUN_FILE, LOG_FILE, CURVES_FILE} | {
    name for layout in TOKENIZER_FORMATS for name in (*layout.required_files, *layout.optional_files)
}
MAX_LISTED_CHANGES = 8


class CheckpointError(AttentError):
    """A checkpoint that cannot be saved or read."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int
    state: dict[str, Any]  # state.json: plain finite data
    tensors: dict[str, dict[str, Tensor]]  # group ("weights", "optimizer", ...) -> name -> tensor


def save_checkpoint(state_dir: Path, checkpoint: Checkpoint) -> Path:
    """Write `state/step-N`. Whatever happens meanwhile, older checkpoints load, and this one is complete or missing."""
    with (
        _wrap_errors(state_dir),
        manifest.explain_save_errors(state_dir, "checkpoint", lambda: bool(list_steps(state_dir))),
    ):
        target = checkpoint_path(state_dir, checkpoint.step)
        state = encode_json(checkpoint.state, STATE_FILE)
        groups: dict[str, dict[str, Tensor]] = {}
        for group, tensors in checkpoint.tensors.items():
            storages = set[int]()
            for name, tensor in tensors.items():
                check_storable(name, tensor)
            groups[group] = {name: to_standalone_cpu(tensor, storages) for name, tensor in tensors.items()}
        make_folder(state_dir)
        _clean_up(state_dir)
        try:
            staged = _write_staged(state_dir / f"{SAVING_PREFIX}{checkpoint.step:08}", state, groups)
            if os.path.lexists(target):  # rename cannot replace a full folder: move it away, where it still counts
                os.rename(target, target.with_name(target.name.replace(STEP_PREFIX, REPLACED_PREFIX)))
            os.rename(staged, target)
            fsync_path(state_dir)
        finally:
            with suppress(OSError):  # the next save or prune removes what is left
                _clean_up(state_dir)
    return target


def _write_staged(staged: Path, state: bytes, groups: Mapping[str, dict[str, Tensor]]) -> Path:
    """Write and sync the checkpoint under a temporary name, its manifest last."""
    staged.mkdir()
    write_synced(staged / STATE_FILE, state)
    for group, tensors in groups.items():
        path = staged / (group + TENSOR_SUFFIX)
        write_safetensors(tensors, path, "checkpoint")
        shutil.copymode(staged / STATE_FILE, path)  # safetensors files are private to their owner
        fsync_path(path)
    names = [STATE_FILE, *(group + TENSOR_SUFFIX for group in groups)]
    manifest.write_manifest(staged / MANIFEST_FILE, {name: manifest.hash_file(staged / name) for name in names})
    fsync_path(staged)
    return staged


def _clean_up(state_dir: Path) -> None:
    for path in _list_with_prefix(state_dir, SAVING_PREFIX):
        _remove(path)
    for path in _list_with_prefix(state_dir, REPLACED_PREFIX):
        step = path.with_name(path.name.replace(REPLACED_PREFIX, STEP_PREFIX))
        os.rename(path, _discarded_name(path) if os.path.lexists(step) else step)
    _remove_discarded(state_dir)


def _remove_discarded(state_dir: Path) -> None:
    """Remove discarded folders once their rename is synced: a partly removed one must never count again."""
    discarded = _list_with_prefix(state_dir, REMOVING_PREFIX)
    if discarded:
        fsync_path(state_dir)
    for path in discarded:
        _remove(path)


def _list_with_prefix(state_dir: Path, prefix: str) -> list[Path]:
    return sorted(path for path in state_dir.iterdir() if path.name.startswith(prefix))


def _discarded_name(path: Path) -> Path:
    """Return a free name for a folder to remove; an interrupted removal may use the first."""
    number = path.name.rpartition("-")[2]
    names = (path.with_name(f"{REMOVING_PREFIX}{i}-{number}") for i in range(10**6))
    return next(name for name in names if not os.path.lexists(name))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def prune_checkpoints(state_dir: Path, keep: Collection[int]) -> None:
    """Remove all checkpoints but those of `keep` and the newest with all its files, and leftovers of killed saves."""
    if not state_dir.is_dir():
        return
    with _wrap_errors(state_dir, "old checkpoints cannot be removed"):
        _clean_up(state_dir)
        steps = list_steps(state_dir)
        newest_step = next((step for step in reversed(steps) if _has_all_files(_find_folder(state_dir, step))), None)
        for step in steps:
            if step not in keep and step != newest_step:
                path = _find_folder(state_dir, step)
                os.rename(path, _discarded_name(path))
        _remove_discarded(state_dir)


def _has_all_files(folder: Path) -> bool:
    try:
        return all((folder / name).stat().st_size == entry.bytes for name, entry in _read_manifest(folder).items())
    except (FolderError, OSError):
        return False


def list_steps(state_dir: Path) -> list[int]:
    """Return the steps with a checkpoint, ascending; `load_checkpoint` checks whether one is intact."""
    with _wrap_errors(state_dir):
        names = [path.name for path in state_dir.iterdir() if path.is_dir()] if state_dir.is_dir() else []
    matches = (re.fullmatch(f"(?:{STEP_PREFIX}|{re.escape(REPLACED_PREFIX)})([0-9]{{8,15}})", name) for name in names)
    return sorted({int(match[1]) for match in matches if match and f"{int(match[1]):08}" == match[1]})


def load_checkpoint(folder: Path, groups: Collection[str] | None = None) -> Checkpoint:
    """Load the checkpoint `state/step-N`, or only some groups of its tensors, after verifying every byte."""
    match = re.fullmatch(f"{STEP_PREFIX}([0-9]{{8,15}})", folder.name)
    if match is None:
        raise CheckpointError(f"{folder}: must be a checkpoint folder; give one such as step-00000120")
    step = int(match[1])
    with _wrap_errors(folder):
        path = _find_folder(folder.parent, step)
        files = _read_manifest(path)
        names = {name.removesuffix(TENSOR_SUFFIX): name for name in files if name != STATE_FILE}
        names = {group: name for group, name in names.items() if groups is None or group in groups}
        for name in (STATE_FILE, *names.values()):
            problem = manifest.find_damage(path / name, files[name])
            if problem is not None:
                raise FolderError(f"{path / name}: {problem}; copy the checkpoint again, or take an older one")
        state = settings.read_json(path / STATE_FILE)
        tensors = {group: read_safetensors(path / name, "checkpoint") for group, name in names.items()}
    return Checkpoint(step=step, state=state, tensors=tensors)


def load_newest(state_dir: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Load the newest intact checkpoint, None if there is none at all; `warn` is called for each newer, damaged one."""
    errors: list[CheckpointError] = []
    for step in reversed(list_steps(state_dir)):
        try:
            checkpoint = load_checkpoint(checkpoint_path(state_dir, step))
        except CheckpointError as error:
            errors.append(error)
            continue
        for damage in errors:
            warn(f"{damage}. The older checkpoint of step {step} is used instead")
        return checkpoint
    if not errors:
        return None
    raise CheckpointError(
        f"{state_dir}: holds {len(errors)} checkpoint(s), and every one is damaged; restore the folder from a backup, "
        f"or remove it to start again. The newest: {errors[0]}"
    )


def checkpoint_path(state_dir: Path, step: int) -> Path:
    return state_dir / f"{STEP_PREFIX}{step:08}"


def _find_folder(state_dir: Path, step: int) -> Path:
    path, replaced = checkpoint_path(state_dir, step), state_dir / f"{REPLACED_PREFIX}{step:08}"
    return replaced if not os.path.lexists(path) and replaced.is_dir() else path


def _read_manifest(folder: Path) -> dict[str, ManifestEntry]:
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise FolderError(f"{folder}: must be a checkpoint folder, but {problem}; give another")
    files = manifest.read_manifest(folder / MANIFEST_FILE, "checkpoint")
    for name in files.keys() - {STATE_FILE}:
        if not name.endswith(TENSOR_SUFFIX) or not GROUP_NAME.fullmatch(name.removesuffix(TENSOR_SUFFIX)):
            raise FolderError(
                f"{folder / MANIFEST_FILE}: must list {STATE_FILE} and plain names of {TENSOR_SUFFIX} files, but lists "
                f"{name!r:.80}; copy the checkpoint again"
            )
    if STATE_FILE not in files:
        raise FolderError(f"{folder / MANIFEST_FILE}: must list {STATE_FILE}; copy the checkpoint again")
    return files


@contextmanager
def _wrap_errors(path: Path, problem: str = "cannot be read") -> Iterator[None]:
    try:
        yield
    except (FolderError, settings.SettingsError) as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        message = f"{error.filename or path}: {problem} ({error.strerror}); check its permissions and the disk"
        raise CheckpointError(message) from error


# ---- the folder of a run, which belongs to one run and to one process at a time --------------------------------------


def check_folder(out: Path, requested: UserSettings) -> None:
    if out.exists() and not out.is_dir():
        raise TrainError(f"{out}: must be a folder, but is a file; give another --out")
    state = out / STATE_FOLDER
    is_run = (state / REQUESTED_FILE).exists()
    has_checkpoint = bool(list_steps(state))
    files = [path for path in out.iterdir() if not is_temporary(path)] if out.is_dir() else []
    names = {path.name.removesuffix(NEW_SUFFIX) for path in files}
    if is_run and (names & MODEL_FILES or has_checkpoint):
        check_changes(out, settings.read_json(state / REQUESTED_FILE), requested)
    elif names - {STATE_FOLDER} - (EARLY_FILES if is_run else set()) or has_checkpoint:
        has_model = bool(names & RUN_FILES)
        content = "a model" if has_model else f"other files ({', '.join(sorted(names)[:3])})"
        advice = f", or fine-tune the model with --from {out}" if has_model else ""
        raise TrainError(f"{out}: contains {content}, which is not overwritten; give another --out{advice}")
    elif not is_run and not names_data(requested):
        raise TrainError("there is no training data; name a corpus with --data, such as --data corpus.tsv")
    with explain_save_errors(out, "run"):
        state.mkdir(parents=True, exist_ok=True)
        probe = state / ".probe"
        probe.write_bytes(b"")
        probe.unlink()


def names_data(requested: UserSettings) -> bool:
    """True if the settings name training data: a corpus, or text to translate."""
    data = requested.get("data", {})
    synthetic = data.get("synthetic", {})
    return any((data.get("train"), synthetic.get("mono_target"), synthetic.get("mono_source")))


def check_changes(out: Path, previous: UserSettings, requested: UserSettings) -> None:
    resolved = settings.to_dict(read_run(out / RUN_FILE)) if (out / RUN_FILE).exists() else {}
    changes = diff_settings(previous, merge_with_previous(requested, previous, resolved))
    rejected = [
        f"{path}: {_format_value(old)} -> {_format_value(new)}"
        for path, (old, new) in sorted(changes.items())
        if path not in RESUMABLE_CHANGES
    ]
    if rejected:
        more = len(rejected) - MAX_LISTED_CHANGES
        listed = "; ".join(rejected[:MAX_LISTED_CHANGES]) + (f"; and {more} more" if more > 0 else "")
        raise TrainError(
            f"{out}: contains a run with other settings ({listed}); resume with the original settings, "
            "or give another --out for a new run"
        )


def _format_value(value: Any) -> str:
    return "(not set)" if value is None else json.dumps(value, ensure_ascii=False)


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    with try_hold_lock(out / STATE_FOLDER / ".lock") as held:
        if not held:
            raise TrainError(f"{out}: is in use by another training process; wait for it, or give another --out")
        yield
