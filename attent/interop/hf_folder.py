"""The files of a Hugging Face folder: config.json, and weights in one safetensors file or several, memory-mapped.

Symbolic links are followed, since the hub's cache uses them; file names in an index must be plain names.
"""

import json
import os
import re
import reprlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attent import settings
from attent.models.folder import PICKLE_SUFFIXES, has_manifest
from attent.storage.atomic import atomic_folder
from attent.storage.errors import FolderError
from attent.storage.hub import HUB_NAME, locate_model
from attent.storage.manifest import explain_save_errors
from attent.storage.tensor_files import check_safetensors_header, write_safetensors

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
StrPath = str | os.PathLike[str]
Device = torch.device | str


def resolve_folder(folder: StrPath) -> Path:
    root, requested = locate_model(folder), os.fspath(folder)
    if root.is_dir():
        return root
    problem = "is a file" if root.exists() else "does not exist"
    advice = "give the folder that holds config.json"
    if not root.exists() and HUB_NAME.fullmatch(requested):
        advice += f", or {requested}@main for a model on the Hugging Face hub"
    raise FolderError(f"{requested}: must be a model folder, but {problem}; {advice}")


def is_attent_folder(root: Path) -> bool:
    """True for a folder that attent saved: one with a manifest, even if its config.json is damaged."""
    path = root / CONFIG_FILE
    return has_manifest(root) or (path.is_file() and read_json(path).get("format") == "attent")


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FolderError(f"{path.parent}: must hold {path.name}, but does not; is it a model folder?")
    try:
        return settings.read_json(path)
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor in a file: name, shape and dtype from the file's header; `read` maps its data."""

    path: Path
    name: str
    shape: torch.Size
    stored_dtype: str  # in safetensors' notation, F32
    file: Any

    @property
    def dtype(self) -> torch.dtype | None:
        """None if it is not a floating type that weights have."""
        return SAFETENSORS_DTYPES.get(self.stored_dtype)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 0

    def read(self) -> Tensor:
        """Return the tensor, mapped from the file; copy it to keep it."""
        try:
            return self.file.get_tensor(self.name)
        except SafetensorError as error:
            raise FolderError(f"{self.path}: `{self.name}` cannot be read: {error}; get the model again") from error


def open_tensors(root: Path) -> dict[str, LazyTensor]:
    try:
        if (root / WEIGHTS_FILE).is_file():
            return open_safetensors(root / WEIGHTS_FILE)
        if (root / INDEX_FILE).is_file():
            return open_shards(root)
    except OSError as error:
        path = error.filename or root
        raise FolderError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    pickles = sorted(path.name for path in root.iterdir() if path.name.endswith(PICKLE_SUFFIXES))
    problem = f"holds only {pickles[0]}: a pickle can run code and is never opened here" if pickles else "does not"
    files = f"{WEIGHTS_FILE} (or {INDEX_FILE})"
    raise FolderError(f"{root}: must hold {files}, but {problem}; download the weights in that format")


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    check_safetensors_header(path, "model")
    try:
        file: Any = safe_open(path, framework="pt")  # stays mapped while its tensors are read
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    except SafetensorError as error:
        raise FolderError(f"{path}: is not valid safetensors: {error}; get the model again") from error
    return {
        name: LazyTensor(path, name, torch.Size(part.get_shape()), str(part.get_dtype()), file)
        for name, part in slices.items()
    }


def open_shards(root: Path) -> dict[str, LazyTensor]:
    weight_map = read_json(root / INDEX_FILE).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
    if not is_map or not weight_map:
        raise FolderError(f"{root / INDEX_FILE}: `weight_map` must map tensors to files; get the file again")
    paths = [resolve_shard(root, shard) for shard in sorted(set(weight_map.values()))]  # check all, then open
    return {name: tensor for path in paths for name, tensor in open_safetensors(path).items()}


def resolve_shard(root: Path, name: str) -> Path:
    if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
        required = "the name of a .safetensors file in the same folder"
        advice = "do not trust this folder: get the model from its publisher"
        raise FolderError(f"{root / INDEX_FILE}: {quote_value(name)} must be {required}; {advice}")
    if not (root / name).is_file():
        raise FolderError(f"{root / name}: is missing, but {INDEX_FILE} names it; download it too")
    return root / name


def write_folder(
    folder: StrPath,
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    extra_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a new Hugging Face folder atomically. `extra_files` are further JSON files by name."""
    root = Path(folder).expanduser().absolute()
    if root.exists() and not (root.is_dir() and not any(root.iterdir())):
        raise FolderError(f"{folder}: exists already; give a new folder, or remove that one first")
    with explain_save_errors(root):
        root.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(root) as staged:
            for name, data in {CONFIG_FILE: config, **(extra_files or {})}.items():
                (staged / name).write_bytes(to_json_bytes(data))
            write_safetensors(dict(tensors), staged / WEIGHTS_FILE)
            shutil.copymode(staged / CONFIG_FILE, staged / WEIGHTS_FILE)  # safetensors files are private to their owner


def to_json_bytes(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def quote_value(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) and len(value) < 80 else reprlib.repr(value)


def make_key_error(where: Path, key: str, required: str, kind: str, value: object, advice: str = "") -> FolderError:
    problem = f"`{key}` must be {required} for a {kind} that attent can compute, but is {quote_value(value)}"
    return FolderError(f"{where}: {problem}{advice}")
