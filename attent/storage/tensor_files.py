"""Tensors in safetensors files: written without shared memory, read as copies. A pickle is never opened."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attent.storage.errors import FolderError

MAX_HEADER_BYTES = 16 * 2**20  # names and shapes; 10,000 tensors need about one MiB


def write_safetensors(tensors: dict[str, Tensor], path: Path, label: str = "model") -> None:
    """Write a file of tensors. An error of the operating system is raised as OSError, as for any other file."""
    try:
        save_file(tensors, path, {"format": "pt"})  # Hugging Face requires this metadata
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number:
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise FolderError(f"{path}: safetensors cannot store this {label}: {error}") from error


def read_safetensors(
    path: Path, label: str = "model", copy_tensor: Callable[[Tensor], Tensor] = Tensor.clone
) -> dict[str, Tensor]:
    """Return copies of all tensors: a memory-mapped file that changes would change the model or crash the process."""
    check_safetensors_header(path, label)
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: copy_tensor(file.get_tensor(name)) for name in names}
    except SafetensorError as error:
        raise FolderError(f"{path}: is not valid safetensors: {error}; get the {label} again") from error


def check_safetensors_header(path: Path, label: str) -> None:
    """Refuse a file that is not safetensors, and a header so large that it can only be an attack."""
    with open(path, "rb") as file:
        start = file.read(9)
        size = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(start[:8], "little")
    if start[8:] == b"{" and header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        return
    if start.startswith((b"\x80", b"PK")):
        raise FolderError(f"{path}: is a pickle or zip, which is never opened; get the {label} as safetensors")
    raise FolderError(f"{path}: is not safetensors (its header claims {header_bytes} bytes); get the {label} again")


def check_storable(name: str, tensor: object) -> None:
    if name == "__metadata__" or not isinstance(tensor, Tensor):
        raise FolderError(f"`{name}` must be a tensor, and not named `__metadata__`; rename it or leave it out")
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = f"{tensor.layout} on {tensor.device}"
        raise FolderError(f"`{name}` must be a dense tensor with data, but is {kind}; give it data first")


def to_standalone_cpu(tensor: Tensor, seen_storages: set[int]) -> Tensor:
    """Return the tensor on the CPU, contiguous, in its own memory: safetensors cannot store views of shared storage."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.untyped_storage().data_ptr() in seen_storages:
        tensor = tensor.clone()
    seen_storages.add(tensor.untyped_storage().data_ptr())
    return tensor


def untie_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to store, each once, and for each additional name the first name of its tensor."""
    first: dict[object, str] = {}
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        check_storable(name, tensor)
        # Two names have the same key exactly when they are the same values in the same memory.
        layout = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride())
        key = (tensor.device, tensor.dtype, tensor.shape, tensor.is_conj(), tensor.is_neg(), layout)
        owner = first.setdefault(key if tensor.numel() else name, name)
        if owner == name:
            stored[name] = to_standalone_cpu(tensor, storages)
        else:
            tied[name] = owner
    return stored, tied
