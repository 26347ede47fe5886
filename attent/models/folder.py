"""A model folder on disk: `config.json`, `model.safetensors`, and `manifest.json` with a checksum of both.

This file moves tensors and plain data; what they mean is left to the models. It never opens a pickle, and it
leaves every other file of the folder (card, run.toml) alone. Small files that belong to the model, as its
tokenizer's do, may be saved with it, under the same manifest.

A save can be killed at any instant, and the old or the new model still loads:
1. each file is written beside its place as NAME.new and synced to disk: the old model is untouched;
2. each NAME.new is renamed to NAME. Until the last has been, the model stands partly under NAME.new.
A model is therefore a manifest, each of whose files stands under NAME or NAME.new with the right checksum.
Reading tries `manifest.json`, then `manifest.json.new` (first, where renaming had begun), and changes nothing on
disk; the next save begins by finishing or clearing away what an interrupted one has left. One process at a time
may save into a folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attent import settings

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1
NEW_SUFFIX = ".new"
SCRATCH_FOLDER = ".saving"  # where safetensors writes: when killed, it leaves a temporary file with a random name

MAX_MANIFEST_BYTES = 2**16  # bytes; it has about 300
MAX_FILE_BYTES = 128 * 2**20  # bytes of a further file; the largest published tokenizers have some 35 MB
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
MAX_HEADER_BYTES = 16 * 2**20  # bytes of names and shapes in model.safetensors; 10,000 tensors need about one MiB
READ_ATTEMPTS = 5  # when another process saves while we read
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

R = TypeVar("R")


class FolderError(ValueError):
    """A model folder that cannot be read or written; the message says which file and what to do."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """What a folder holds. Every name has its tensor; names that were tied when saved share one."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tied: dict[str, str]  # further name -> the name that its tensor is stored under
    files: dict[str, bytes] = field(default_factory=dict)  # those saved with it


@dataclass(frozen=True)
class ManifestEntry:
    """A file as the manifest describes it."""

    sha256: str
    bytes: int


# Writing.


def write_folder(
    folder: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Saves a model. Whatever happens meanwhile, the folder's old model or this one loads afterwards.

    `files` are saved and verified with it. Those of an older save are left where they are, but no longer listed.
    """
    root = Path(folder).expanduser()
    stored, tied = _untie(tensors)
    text = _encode_config(config, tied)
    # The further files come first and in their order, so that a tokenizer that is read by itself is found to be of
    # the same save as the model at every instant (text/files.py goes by the first NAME.new).
    small = _check_files(files or {}) | {CONFIG_FILE: text}
    with explain_save_errors(root):
        make_folder(root)
        _recover_interrupted_save(root, small)
        try:
            _stage(root, small, stored)
            _publish(root, {name: root / (name + NEW_SUFFIX) for name in (*small, WEIGHTS_FILE, MANIFEST_FILE)})
        except BaseException:
            with suppress(OSError):
                _recover_interrupted_save(root, small)
            raise


def _check_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    for name, content in files.items():
        if not _is_extra_name(name):
            raise FolderError(f"`{name}` must be a plain file name that the model itself does not use; rename the file")
        if len(content) > MAX_FILE_BYTES:
            raise FolderError(f"{name}: must have at most {MAX_FILE_BYTES} bytes, but has {len(content)}; leave it out")
    return dict(files)


def _is_extra_name(name: str) -> bool:
    taken = name.lower() in (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE) or name.lower().endswith(NEW_SUFFIX)
    return PLAIN_NAME.fullmatch(name) is not None and not taken


def _untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to store, each once, and for each further name the first name that its tensor has."""
    first: dict[object, str] = {}
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        owner = first.setdefault(_memory_key(name, tensor), name)
        if owner == name:
            stored[name] = to_standalone_cpu(tensor, storages)
        else:
            tied[name] = owner
    return stored, tied


def _memory_key(name: str, tensor: Tensor) -> object:
    """Equal for two names exactly when they are the same numbers in the same memory."""
    check_storable(name, tensor)
    if tensor.numel() == 0:
        return name
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride())
    return (tensor.device, tensor.dtype, tensor.shape, tensor.is_conj(), tensor.is_neg(), place)


def check_storable(name: str, tensor: object) -> None:
    if name == "__metadata__" or not isinstance(tensor, Tensor):
        raise FolderError(f"`{name}` must be a tensor, and not named `__metadata__`; rename it or leave it out")
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = f"{tensor.layout} on {tensor.device}"
        raise FolderError(f"`{name}` must be a dense tensor with data, but is {kind}; give it data first")


def to_standalone_cpu(tensor: Tensor, seen_storages: set[int]) -> Tensor:
    """The tensor on the CPU, contiguous, in memory of its own: safetensors stores no views of one block."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.untyped_storage().data_ptr() in seen_storages:
        tensor = tensor.clone()
    seen_storages.add(tensor.untyped_storage().data_ptr())
    return tensor


def _encode_config(config: Mapping[str, Any], tied: dict[str, str]) -> bytes:
    if "tied" in config:
        raise FolderError(f"{CONFIG_FILE}: the key `tied` is kept for the names of tied tensors; rename yours")
    return encode_json({**config, "tied": tied}, CONFIG_FILE)


def encode_json(data: Mapping[str, Any], name: str) -> bytes:
    """What a JSON file of this name will hold: what could not be read back must not replace what can."""
    try:
        content = f"{json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)}\n".encode()
        settings.parse_json(content, name)
    except (TypeError, ValueError, RecursionError) as error:
        raise FolderError(f"{name}: must be plain finite data, but {error}; nothing was saved") from error
    if len(content) > settings.MAX_BYTES:
        raise FolderError(
            f"{name}: must have at most {settings.MAX_BYTES} bytes, but has {len(content)}; leave out some"
        )
    return content


def make_folder(root: Path) -> None:
    """The folder and those above it, on disk for sure."""
    missing = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_path(path.parent)


def _stage(root: Path, small_files: Mapping[str, bytes], tensors: dict[str, Tensor]) -> None:
    """Puts every file beside its place, on disk for sure, the manifest last."""
    for name, content in small_files.items():
        write_synced(root / (name + NEW_SUFFIX), content)
    _write_weights(root, tensors)
    weights_path = root / (WEIGHTS_FILE + NEW_SUFFIX)
    shutil.copymode(
        root / (CONFIG_FILE + NEW_SUFFIX), weights_path
    )  # safetensors makes files that only their owner can read
    fsync_path(weights_path)
    write_manifest(
        root / (MANIFEST_FILE + NEW_SUFFIX),
        {name: hash_file(root / (name + NEW_SUFFIX)) for name in (*small_files, WEIGHTS_FILE)},
    )
    fsync_path(root)


def write_synced(path: Path, content: bytes) -> None:
    """A file that was not there, on disk for sure."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(path: Path, files: Mapping[str, ManifestEntry]) -> None:
    manifest = {"format": MANIFEST_FORMAT, "files": {name: vars(entry) for name, entry in files.items()}}
    # Without a newline at its end, so that no cut goes unnoticed.
    write_synced(path, json.dumps(manifest, indent=2).encode())


def _write_weights(root: Path, tensors: dict[str, Tensor]) -> None:
    scratch = root / SCRATCH_FOLDER
    scratch.mkdir()
    write_safetensors(tensors, scratch / WEIGHTS_FILE)
    os.replace(scratch / WEIGHTS_FILE, root / (WEIGHTS_FILE + NEW_SUFFIX))
    scratch.rmdir()


def write_safetensors(tensors: dict[str, Tensor], path: Path, label: str = "model") -> None:
    """One file of tensors; what the system refuses is an OSError, as from any other file."""
    try:
        save_file(tensors, path, {"format": "pt"})  # Hugging Face asks for this mark
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number:
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise FolderError(f"{path}: safetensors cannot store this {label}: {error}") from error


def _publish(root: Path, paths: dict[str, Path]) -> None:
    for name, path in paths.items():
        if path.name != name:
            os.replace(path, root / name)
    fsync_path(root)


def _recover_interrupted_save(root: Path, small_files: Iterable[str]) -> None:
    """Finishes an interrupted save that had begun to rename, and clears away one that had not.

    Last written, first removed, as text/files.py needs it; and the manifest goes before what it lists.
    """
    names = dict.fromkeys([*_list_extra_files(root), *small_files, CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE])
    leftovers = [root / (name + NEW_SUFFIX) for name in reversed(names)]
    if any(os.path.lexists(path) for path in leftovers):
        with suppress(FolderError):
            _publish(root, _find_files(root))
        for path in leftovers:
            path.unlink(missing_ok=True)
    if (root / SCRATCH_FOLDER).is_dir() and not (root / SCRATCH_FOLDER).is_symlink():
        shutil.rmtree(root / SCRATCH_FOLDER)


def _list_extra_files(root: Path) -> list[str]:
    """The further files that a save into this folder may be about, finished or not."""
    names: list[str] = []
    for manifest in (MANIFEST_FILE + NEW_SUFFIX, MANIFEST_FILE):
        with suppress(FolderError, OSError):
            names += [name for name in _read_model_manifest(root / manifest) if name not in (CONFIG_FILE, WEIGHTS_FILE)]
    return names


def fsync_path(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder, and needs no sync of it
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explain_save_errors(root: Path, label: str = "model") -> Iterator[None]:
    """Turns what the system says while saving into a sentence; `what` is what was to be saved."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"{root}: the {label} could not be saved: {_explain_os_error(root, error, label)}") from error


def _explain_os_error(root: Path, error: OSError, label: str) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError) and not root.is_dir():
        return "there is a file where the folder must be; give another folder, or move that file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full; an older {label} in the folder is unharmed; free some space and save again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "the folder cannot be written to; give another folder, or change its permissions"
    if not root.is_dir():
        return f"the folder cannot be made ({error.strerror}); give another"
    return f"{error}; an older {label} in the folder is unharmed; save again"


# Reading.


def read_folder(folder: str | os.PathLike[str], copy_tensor: Callable[[Tensor], Tensor] = Tensor.clone) -> StoredModel:
    """The model of a folder, after its checksums have been verified. Nothing stays open.

    Links are followed inside the folder only: what lies outside could change without the folder knowing. `place` makes
    the copy of each tensor, as soon as it is read: where it is to be, and in which precision.
    """
    return _retry_while_changing(Path(folder).expanduser(), lambda root: _read_model(root, copy_tensor))


def read_extra_files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """The further files that were saved with the folder's model, verified: of the same save as its weights."""
    return _retry_while_changing(Path(folder).expanduser(), lambda root: _load_extra_files(_find_files(root)))


def _retry_while_changing(root: Path, read: Callable[[Path], R]) -> R:
    """What `reading` gives when no other process has saved meanwhile."""
    for _ in range(READ_ATTEMPTS):
        before = _snapshot(root)
        try:
            found = _read_once(root, read)
        except FolderError:
            if _snapshot(root) == before:
                raise
        else:
            if _snapshot(root) == before:
                return found
    raise FolderError(f"{root}: changes while it is read; try again when the save into it has finished")


def _snapshot(root: Path) -> dict[str, tuple[int, int, int] | None]:
    """Differs before and after whenever another process has renamed a file of the model in between."""
    found = {
        name: _stat_path(root / name) for name in (*_list_extra_files(root), CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE)
    }
    return {name: (one.st_ino, one.st_size, one.st_mtime_ns) if one else None for name, one in found.items()}


def _stat_path(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _read_once(root: Path, read: Callable[[Path], R]) -> R:
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise FolderError(f"{root}: must be a model folder, but {problem}; give one that holds {CONFIG_FILE}")
    try:
        return read(root)
    except OSError as error:
        path = error.filename or root
        raise FolderError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error


def _read_model(root: Path, copy_tensor: Callable[[Tensor], Tensor]) -> StoredModel:
    paths = _find_files(root)
    config = settings.read_json(paths[CONFIG_FILE])
    tied = _parse_ties(config.pop("tied", {}), root)
    tensors = _apply_ties(read_safetensors(paths[WEIGHTS_FILE], copy_tensor=copy_tensor), tied, root)
    return StoredModel(config=config, tensors=tensors, tied=tied, files=_load_extra_files(paths))


def _load_extra_files(paths: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in paths.items() if _is_extra_name(name)}


def _find_files(root: Path) -> dict[str, Path]:
    """Where each file of a whole model stands, the manifest last. OSError passes: it is no damage."""
    problems = {}
    for manifest in _order_manifests(root):
        try:
            paths = {
                name: _find_intact_file(root / name, entry) for name, entry in _read_model_manifest(manifest).items()
            }
            return paths | {MANIFEST_FILE: manifest}
        except FolderError as problem:
            problems[manifest.name] = problem
    raise problems[MANIFEST_FILE]


def _order_manifests(root: Path) -> list[Path]:
    """Those to try, in order: the new one first once renaming has begun, even if the old lists nothing of that."""
    old, new = root / MANIFEST_FILE, root / (MANIFEST_FILE + NEW_SUFFIX)
    with suppress(FolderError):
        if any(not os.path.lexists(root / (name + NEW_SUFFIX)) for name in _read_model_manifest(new)):
            return [new, old]
    return [old, new]


def _read_model_manifest(path: Path) -> dict[str, ManifestEntry]:
    if stat_plain_file(path) is None:
        raise FolderError(_explain_missing_manifest(path.parent))
    files = read_manifest(path)
    if not {CONFIG_FILE, WEIGHTS_FILE} <= files.keys():
        raise FolderError(f"{path}: must list {CONFIG_FILE} and {WEIGHTS_FILE}; copy the model again")
    for name in files.keys() - {CONFIG_FILE, WEIGHTS_FILE}:
        if not _is_extra_name(name) or files[name].bytes > MAX_FILE_BYTES:
            raise FolderError(
                f"{path}: `files` must be plain names of small files, but {name!r:.80} is not; get another"
            )
    return files


def read_manifest(path: Path, label: str = "model") -> dict[str, ManifestEntry]:
    """The files that a manifest lists; whether they are the right ones is left to the caller."""
    status = stat_plain_file(path)
    if status is None:
        raise FolderError(f"{path}: is missing; copy the {label} again")
    if status.st_size > MAX_MANIFEST_BYTES:
        raise FolderError(f"{path}: is damaged: it has {status.st_size} bytes; copy the {label} again")
    try:
        data = settings.parse_json(path.read_bytes(), str(path))
    except settings.SettingsError as error:
        raise FolderError(f"{error}; the manifest is damaged: copy the {label} again") from error
    files = data.get("files")
    if (
        data != {"format": MANIFEST_FORMAT, "files": files}
        or type(data["format"]) is not int
        or not isinstance(files, dict)
    ):
        raise FolderError(
            f"{path}: must have `format` {MANIFEST_FORMAT} and `files`; copy the {label} again or update attent"
        )
    return {name: _parse_entry(path, name, entry, label) for name, entry in files.items()}


def _explain_missing_manifest(root: Path) -> str:
    names = sorted(path.name for path in root.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if WEIGHTS_FILE not in names and pickles:
        return (
            f"{root / pickles[0]}: is a pickle, which can run code and is never opened here; "
            f"get the model as safetensors"
        )
    if WEIGHTS_FILE in names:
        return f"{root / MANIFEST_FILE}: is missing, so the weights cannot be verified; copy the whole folder again"
    if any(name.endswith(NEW_SUFFIX) for name in names):
        return f"{root}: holds no model yet: the first save into it was interrupted; save again"
    return f"{root}: holds no model ({MANIFEST_FILE} is missing); give a folder that attent has saved"


def _parse_entry(path: Path, name: str, data: object, label: str) -> ManifestEntry:
    entry = data if isinstance(data, dict) else {}
    size, digest = entry.get("bytes"), entry.get("sha256")
    if entry.keys() != {"bytes", "sha256"} or type(size) is not int or not isinstance(digest, str):
        raise FolderError(f"{path}: `files.{name:.80}` must have `sha256` and `bytes`; copy the {label} again")
    return ManifestEntry(digest, size)


def _find_intact_file(path: Path, entry: ManifestEntry) -> Path:
    """The file that a manifest's entry describes: under its name or, after an interrupted save, NAME.new."""
    problems = []
    for candidate in (path, path.with_name(path.name + NEW_SUFFIX)):
        problem = find_damage(candidate, entry)
        if problem is None:
            return candidate
        problems.append(f"{candidate}: {problem}")
    raise FolderError(f"{problems[0]}; copy the model again, or take an older save")


def find_damage(path: Path, entry: ManifestEntry) -> str | None:
    """What is wrong with a file, if anything: its size first, then every byte."""
    status = stat_plain_file(path)
    if status is None:
        return f"is missing, though {MANIFEST_FILE} lists it"
    if status.st_size != entry.bytes:
        return f"is damaged: by {MANIFEST_FILE} it must have {entry.bytes} bytes, but it has {status.st_size}"
    if hash_file(path) != entry:
        return f"is damaged or was changed: its SHA-256 is not the one in {MANIFEST_FILE}"
    return None


def stat_plain_file(path: Path) -> os.stat_result | None:
    """The status of a plain file in its folder; None when there is none; an error for anything else."""
    if not os.path.lexists(path):
        return None
    if path.resolve().parent != path.parent.resolve():
        raise FolderError(f"{path}: is a link out of the folder; put the file itself there (cp -L)")
    if not path.exists():
        return None
    if not stat.S_ISREG(path.stat().st_mode):
        raise FolderError(f"{path}: must be a plain file; put the file itself there")
    return path.stat()


def hash_file(path: Path) -> ManifestEntry:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ManifestEntry(digest, os.fstat(file.fileno()).st_size)


def read_safetensors(
    path: Path, label: str = "model", copy_tensor: Callable[[Tensor], Tensor] = Tensor.clone
) -> dict[str, Tensor]:
    """Every tensor of a file, as a copy in memory: a mapped file that changes would change the model, or kill us."""
    check_safetensors_header(path, label)
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: copy_tensor(file.get_tensor(name)) for name in names}
    except SafetensorError as error:
        raise FolderError(f"{path}: is not valid safetensors: {error}; get the {label} again") from error


def check_safetensors_header(path: Path, label: str) -> None:
    """Refuses what is not safetensors at all, and a header so large that it can only be an attack."""
    with open(path, "rb") as file:
        start = file.read(9)
        size = os.fstat(file.fileno()).st_size
    header = int.from_bytes(start[:8], "little")
    if start[8:] == b"{" and header <= min(MAX_HEADER_BYTES, size - 8):
        return
    if start.startswith((b"\x80", b"PK")):
        raise FolderError(f"{path}: is a pickle or zip, which is never opened; get the {label} as safetensors")
    raise FolderError(f"{path}: is not safetensors (its header claims {header} bytes); get the {label} again")


def _parse_ties(data: object, root: Path) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data.values()):
        raise FolderError(f"{root / CONFIG_FILE}: `tied` must map names of tensors to names; get the model again")
    return data


def _apply_ties(tensors: dict[str, Tensor], tied: dict[str, str], root: Path) -> dict[str, Tensor]:
    for name, owner in tied.items():
        if name in tensors or owner not in tensors:
            problem = "is itself stored" if name in tensors else f"`{owner}` is not stored"
            raise FolderError(f"{root / CONFIG_FILE}: `tied.{name}` cannot be: {problem}; get the model again")
    return tensors | {name: tensors[owner] for name, owner in tied.items()}


# Checking.


def check_tensors(expected: Mapping[str, torch.Size], actual: Mapping[str, Tensor], where: str | Path) -> None:
    """Refuses tensors whose names or shapes are not those that a model expects; `where` is their file."""
    missing = [f"`{name}`" for name in expected if name not in actual]
    unknown = [f"`{name}`{_suggest_name(name, expected, actual)}" for name in actual if name not in expected]
    wrong = [
        f"`{name}` must be {list(shape)}, but is {list(actual[name].shape)}"
        for name, shape in expected.items()
        if name in actual and actual[name].shape != shape
    ]
    groups = [("missing: ", missing), ("not known to the model: ", unknown), ("wrong shape: ", wrong)]
    faults = [title + _join_first(names) for title, names in groups if names]
    if faults:
        raise FolderError(
            f"{where}: {'; '.join(faults)}. Take {CONFIG_FILE} and the weights from one and the same model"
        )


def _suggest_name(name: str, expected: Mapping[str, object], actual: Mapping[str, object]) -> str:
    near = get_close_matches(name, [other for other in expected if other not in actual], n=1)
    return f" (for `{near[0]}`?)" if near else ""


def _join_first(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
