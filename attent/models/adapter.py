"""Adapter folders: the low-rank updates of a fine-tuned model without the model, from `attent train --keep-adapter`.

A folder has the files of a model folder: the tensors, a manifest of hashes, and a config with the rank and the hash of
the matrices that the adapter belongs to.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from attent.models.folder import read_folder, write_folder
from attent.nn.lora import apply_adapter, hash_matrices
from attent.storage.errors import FolderError

ADAPTER_FOLDER = "adapter"  # in the folder of a run
ADAPTER_KIND = "lora"
M = TypeVar("M", bound=nn.Module)


def write_adapter(folder: Path, updates: Mapping[str, Tensor], matrices: Mapping[str, Tensor], base_model: str) -> None:
    rank = min(min(tensor.shape) for tensor in updates.values())
    config = {"adapter": ADAPTER_KIND, "rank": rank, "base": hash_matrices(matrices), "base_model": base_model}
    write_folder(folder, config=config, tensors=updates)


def load_adapter(folder: str | Path, model: M, original: M) -> M:
    """Return a copy of the model with the adapter of a folder, or of the folder of a run, unmerged; `original` is the
    model in the stored precision."""
    folder = Path(folder).expanduser()
    folder = folder / ADAPTER_FOLDER if (folder / ADAPTER_FOLDER).is_dir() else folder
    stored = read_folder(folder)
    if stored.config.get("adapter") != ADAPTER_KIND:
        raise FolderError(f"{folder}: must be an adapter, but is a model; train one with --lora and --keep-adapter")
    paths = dict.fromkeys(name.rpartition(".")[0] for name in stored.tensors)
    modules = dict(original.named_modules())
    matrices = {path: part.weight for path in paths if isinstance(part := modules.get(path), nn.Linear)}
    if len(matrices) < len(paths) or hash_matrices(matrices) != stored.config["base"]:
        base = stored.config["base_model"]
        raise FolderError(f"{folder}: is an adapter of {base}, not of this model; give both together")
    return apply_adapter(model, stored.tensors)
