"""Model folders: `config.json`, `model.safetensors`, small extra files such as the tokenizer's, and `manifest.json`.

Every file that influences a result is listed in the manifest with its hash: those of a save, and side files that are
written later (`write_side_file`). Other files of the folder (the card, the log) are left alone. A save can be killed at
any instant, and the old or the new model still loads:
1. each file is written as NAME.new and synced to disk: the old model is untouched;
2. each NAME.new is renamed to NAME. Until the last rename, some files of the model are under NAME.new.
A model is therefore a manifest, each of whose files exists as NAME or NAME.new with the right checksum. Reading tries
`manifest.json`, then `manifest.json.new` (in reverse order once renaming has begun) and changes nothing on disk; the
next save first finishes or removes an interrupted one.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from attent import settings
from attent.storage.atomic import NEW_SUFFIX, fsync_path, lock_folder, make_folder, write_atomic, write_synced
from attent.storage.errors import FolderError
from attent.storage.manifest import (
    MANIFEST_FILE,
    ManifestEntry,
    explain_save_errors,
    find_damage,
    hash_file,
    read_manifest,
    stat_plain_file,
    write_manifest,
)
from attent.storage.tensor_files import read_safetensors, untie_tensors, write_safetensors
from attent.text.tokenizer import Tokenizer, find_tokenizer, has_tokenizer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CHECKPOINT_FILE = "state.json"  # of `state/step-.../`, which also has a manifest
SCRATCH_FOLDER = ".saving"  # safetensors writes here: when killed, it leaves a temporary file with a random name

MAX_FILE_BYTES = 128 * 2**20  # of an extra file; the largest published tokenizers have about 35 MB
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
READ_ATTEMPTS = 5  # while another process saves
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R")
C = TypeVar("C", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """Every name has its tensor; names that were tied when saved share one."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tied: dict[str, str]  # additional name -> the name under which the tensor is stored
    files: dict[str, bytes] = field(default_factory=dict)  # extra files of the same save


def write_folder(
    folder: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Save a model. Whatever happens meanwhile, the old model or this one loads afterwards.

    `files` are saved and verified with it. Other files of an older save stay on disk, but are no longer listed; if
    `files` is None, all of them stay listed.
    """
    root = Path(folder).expanduser()
    stored, tied = untie_tensors(tensors)
    if "tied" in config:
        raise FolderError(f"{CONFIG_FILE}: the key `tied` is reserved for the names of tied tensors; rename yours")
    encoded_config = encode_json({**config, "tied": tied}, CONFIG_FILE)
    with explain_save_errors(root):
        # Extra files come first and in order, so that a tokenizer that is read on its own always belongs to the same
        # save as the model (storage.atomic.find_file relies on the first NAME.new).
        extra_files: dict[str, bytes] = {}
        if files is not None:
            extra_files = _check_files(files)
        elif has_manifest(root):
            with suppress(FolderError):
                extra_files = _load_extra_files(_find_files(root, _list_extra_files(root)))
        small_files = extra_files | {CONFIG_FILE: encoded_config}
        make_folder(root)
        with _replace_files(root, small_files):
            _stage(root, small_files, stored)
            _publish(root, {name: root / (name + NEW_SUFFIX) for name in (*small_files, WEIGHTS_FILE, MANIFEST_FILE)})


def write_side_file(folder: str | os.PathLike[str], name: str, content: bytes) -> None:
    """Write a small file such as alignment.json, and list it in the manifest if the folder has one."""
    root = Path(folder).expanduser()
    _check_files({name: content})
    with _replace_files(root, [name]):
        try:
            entries = _read_model_manifest(root / MANIFEST_FILE)
        except FolderError:  # a folder of Hugging Face, or one that holds no model yet
            write_atomic(root / name, content)
            return
        write_synced(root / (name + NEW_SUFFIX), content)
        entries[name] = hash_file(root / (name + NEW_SUFFIX))
        write_manifest(root / (MANIFEST_FILE + NEW_SUFFIX), entries)
        _publish(root, {name: root / (name + NEW_SUFFIX) for name in (name, MANIFEST_FILE)})


@contextmanager
def _replace_files(root: Path, small_files: Iterable[str]) -> Iterator[None]:
    """Hold the folder's lock, and remove what an earlier or this write leaves behind when it is interrupted."""
    with lock_folder(root):
        _recover_interrupted_save(root, small_files)
        try:
            yield
        except BaseException:
            with suppress(OSError):
                _recover_interrupted_save(root, small_files)
            raise


def _check_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    for name, content in files.items():
        if not _is_extra_name(name):
            raise FolderError(f"`{name}` must be a plain file name that the model itself does not use; rename the file")
        if len(content) > MAX_FILE_BYTES:
            raise FolderError(f"{name}: must have at most {MAX_FILE_BYTES} bytes, but has {len(content)}; leave it out")
    return dict(files)


def _is_extra_name(name: str) -> bool:
    is_reserved = name.lower() in (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE) or name.lower().endswith(NEW_SUFFIX)
    return PLAIN_NAME.fullmatch(name) is not None and not is_reserved


def encode_json(data: Mapping[str, Any], name: str) -> bytes:
    """Encode a JSON file and check that it can be read back, so that it never replaces a readable one."""
    try:
        content = f"{json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)}\n".encode()
        settings.parse_json(content, name)
    except (TypeError, ValueError, RecursionError) as error:
        raise FolderError(f"{name}: must be plain finite data, but {error}; nothing was saved") from error
    if len(content) > settings.MAX_BYTES:
        raise FolderError(f"{name}: must have at most {settings.MAX_BYTES} bytes, but has {len(content)}; shorten it")
    return content


def _stage(root: Path, small_files: Mapping[str, bytes], tensors: dict[str, Tensor]) -> None:
    """Write every file as NAME.new and sync it, the manifest last."""
    for name, content in small_files.items():
        write_synced(root / (name + NEW_SUFFIX), content)
    weights_path = root / (WEIGHTS_FILE + NEW_SUFFIX)
    scratch = root / SCRATCH_FOLDER
    scratch.mkdir()
    write_safetensors(tensors, scratch / WEIGHTS_FILE)
    os.replace(scratch / WEIGHTS_FILE, weights_path)
    scratch.rmdir()
    shutil.copymode(root / (CONFIG_FILE + NEW_SUFFIX), weights_path)  # safetensors files are private to their owner
    fsync_path(weights_path)
    entries = {name: hash_file(root / (name + NEW_SUFFIX)) for name in (*small_files, WEIGHTS_FILE)}
    write_manifest(root / (MANIFEST_FILE + NEW_SUFFIX), entries)
    fsync_path(root)


def _publish(root: Path, paths: dict[str, Path]) -> None:
    for name, path in paths.items():
        if path.name != name:
            os.replace(path, root / name)
    fsync_path(root)


def _recover_interrupted_save(root: Path, small_files: Iterable[str]) -> None:
    """Finish an interrupted save that had begun to rename, and remove one that had not.

    The manifest is removed before its files: in the reverse order of writing, as `storage.atomic` needs.
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
    names: list[str] = []
    for manifest in (MANIFEST_FILE + NEW_SUFFIX, MANIFEST_FILE):
        with suppress(FolderError, OSError):
            names += [name for name in _read_model_manifest(root / manifest) if name not in (CONFIG_FILE, WEIGHTS_FILE)]
    return names


def read_folder(folder: str | os.PathLike[str], copy_tensor: Callable[[Tensor], Tensor] = Tensor.clone) -> StoredModel:
    """Read a model after verifying its checksums; `copy_tensor` moves each tensor at once. No file stays open."""
    return _retry_while_changing(Path(folder).expanduser(), lambda root: _read_model(root, copy_tensor))


def read_extra_files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Read the extra files that were saved with the model, verified: of the same save as its weights."""
    return _retry_while_changing(Path(folder).expanduser(), lambda root: _load_extra_files(_find_files(root)))


def read_side_file(folder: str | os.PathLike[str], name: str) -> bytes | None:
    """Read a side file, such as alignment.json; None if there is none.

    If the folder has a manifest, the file must be intact; one that is not listed, of an older save or from elsewhere,
    is ignored. A link out of the folder is refused.
    """
    root = Path(folder).expanduser()
    if has_manifest(root):
        paths = _retry_while_changing(root, lambda root: _find_files(root, [name]))
        return paths[name].read_bytes() if name in paths else None
    return None if stat_plain_file(root / name) is None else (root / name).read_bytes()


def write_side_settings(folder: str | os.PathLike[str], name: str, config: "DataclassInstance") -> None:
    write_side_file(folder, name, settings.to_json(settings.to_dict(config)))


def read_side_settings(folder: str | os.PathLike[str], name: str, cls: type[C]) -> C | None:
    content, where = read_side_file(folder, name), str(Path(folder) / name)
    return None if content is None else settings.from_dict(cls, settings.parse_json(content, where), where=where)


def has_manifest(root: Path) -> bool:
    """True for a folder that attent saved a model into, also if the save was interrupted."""
    return any(os.path.lexists(root / name) for name in (MANIFEST_FILE, MANIFEST_FILE + NEW_SUFFIX))


def read_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | None:
    """Load the tokenizer of a model folder, verified if the folder has a manifest; None if there is none."""
    root = Path(folder).expanduser()
    if not has_manifest(root):
        return find_tokenizer(root)
    files = read_extra_files(root)
    if has_tokenizer(files):
        return Tokenizer.from_files(files, f"{root}/")
    if find_tokenizer(root) is not None:
        problem = f"its tokenizer is not listed in {MANIFEST_FILE}, so it cannot be verified"
        advice = "copy the model again, or save both together with attent.models.weights.save_model"
        raise FolderError(f"{root}: {problem}; {advice}")
    return None


def _retry_while_changing(root: Path, read: Callable[[Path], R]) -> R:
    """Return the result of `read` once no other process has saved meanwhile."""
    for _ in range(READ_ATTEMPTS):
        before = _snapshot(root)
        try:
            result = _read_once(root, read)
        except FolderError:
            if _snapshot(root) == before:
                raise
        else:
            if _snapshot(root) == before:
                return result
    raise FolderError(f"{root}: changes while it is read; try again when the save into it has finished")


def _snapshot(root: Path) -> dict[str, tuple[int, int, int] | None]:
    """Return the identity of each file; it differs if another process has renamed one in between."""
    snapshot: dict[str, tuple[int, int, int] | None] = {}
    for name in (*_list_extra_files(root), CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE):
        snapshot[name] = None
        with suppress(OSError):
            status = (root / name).stat()
            snapshot[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return snapshot


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
    tied = config.pop("tied", {})
    tensors = _apply_ties(read_safetensors(paths[WEIGHTS_FILE], copy_tensor=copy_tensor), tied, root / CONFIG_FILE)
    return StoredModel(config=config, tensors=tensors, tied=tied, files=_load_extra_files(paths))


def _load_extra_files(paths: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in paths.items() if _is_extra_name(name)}


def _find_files(root: Path, names: Container[str] | None = None) -> dict[str, Path]:
    """Return the path of each file of an intact model, or only of `names`, the manifest last. An OSError passes."""
    problems = {}
    for manifest in _order_manifests(root):
        try:
            entries = _read_model_manifest(manifest)
            listed = {name: entry for name, entry in entries.items() if names is None or name in names}
            paths = {name: _find_intact_file(root / name, entry) for name, entry in listed.items()}
            return paths | {MANIFEST_FILE: manifest}
        except FolderError as problem:
            problems[manifest.name] = problem
    raise problems[MANIFEST_FILE]


def _order_manifests(root: Path) -> list[Path]:
    """Return the manifests in the order to try: the new one first once renaming has begun."""
    old, new = root / MANIFEST_FILE, root / (MANIFEST_FILE + NEW_SUFFIX)
    with suppress(FolderError):
        if any(not os.path.lexists(root / (name + NEW_SUFFIX)) for name in _read_model_manifest(new)):
            return [new, old]
    return [old, new]


def _read_model_manifest(path: Path) -> dict[str, ManifestEntry]:
    if stat_plain_file(path) is None:
        raise FolderError(_explain_missing_manifest(path.parent))
    files = read_manifest(path)
    if CHECKPOINT_FILE in files:
        problem = "must be a model folder, but is a checkpoint for resuming a run"
        raise FolderError(f"{path.parent}: {problem}; give the folder of the run, {path.parent.parent.parent}")
    if not {CONFIG_FILE, WEIGHTS_FILE} <= files.keys():
        raise FolderError(f"{path}: must list {CONFIG_FILE} and {WEIGHTS_FILE}; copy the model again")
    for name in files.keys() - {CONFIG_FILE, WEIGHTS_FILE}:
        if not _is_extra_name(name) or files[name].bytes > MAX_FILE_BYTES:
            problem = f"`files` must be plain names of small files, but {name!r:.80} is not"
            raise FolderError(f"{path}: {problem}; get another")
    return files


def _explain_missing_manifest(root: Path) -> str:
    names = sorted(path.name for path in root.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if WEIGHTS_FILE not in names and pickles:
        return f"{root / pickles[0]}: is a pickle, which can run code and is never opened; get the model as safetensors"
    return f"{root}: holds no complete model ({MANIFEST_FILE} is missing); give a folder that attent has saved"


def _find_intact_file(path: Path, entry: ManifestEntry) -> Path:
    """Return the file that a manifest entry describes: NAME or, after an interrupted save, NAME.new."""
    problems = []
    for candidate in (path, path.with_name(path.name + NEW_SUFFIX)):
        problem = find_damage(candidate, entry)
        if problem is None:
            return candidate
        problems.append(f"{candidate}: {problem}")
    raise FolderError(f"{problems[0]}; copy the model again, or take an older save")


def _apply_ties(tensors: dict[str, Tensor], tied: object, where: Path) -> dict[str, Tensor]:
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        raise FolderError(f"{where}: `tied` must map names of tensors to names; get the model again")
    for name, owner in tied.items():
        if name in tensors or owner not in tensors:
            problem = "is itself stored" if name in tensors else f"`{owner}` is not stored"
            raise FolderError(f"{where}: `tied.{name}` is invalid: {problem}; get the model again")
    return tensors | {name: tensors[owner] for name, owner in tied.items()}


def check_tensors(expected: Mapping[str, torch.Size], actual: Mapping[str, Tensor], where: str | Path) -> None:
    """Refuse tensors whose names or shapes differ from those that a model expects; `where` is their file."""
    missing = [name for name in expected if name not in actual]
    unknown = {name: get_close_matches(name, missing, n=1) for name in actual if name not in expected}
    groups = {
        "missing": [f"`{name}`" for name in missing],
        "not known to the model": [
            f"`{name}`" + "".join(f" (for `{n}`?)" for n in near) for name, near in unknown.items()
        ],
        "wrong shape": [
            f"`{name}` must be {list(shape)}, but is {list(actual[name].shape)}"
            for name, shape in expected.items()
            if name in actual and actual[name].shape != shape
        ],
    }
    more = {title: f" and {len(names) - 3} more" if len(names) > 3 else "" for title, names in groups.items()}
    faults = [f"{title}: {', '.join(names[:3])}{more[title]}" for title, names in groups.items() if names]
    if faults:
        raise FolderError(f"{where}: {'; '.join(faults)}. Take {CONFIG_FILE} and the weights from the same model")
