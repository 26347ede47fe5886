"""Tensors in safetensors files: written without shared memory, read as copies.

Pickled weights are converted in a process of its own (`python -m attent.storage.tensor_files`). A pickle can run any
code, so `torch.load(weights_only=True)` takes tensors and plain containers only, within limits.
"""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attent.storage.errors import FolderError, StorageError

MAX_HEADER_BYTES = 16 * 2**20  # names and shapes; 10,000 tensors need about one MiB
BASE_BYTES = 2 * 2**30  # besides the weights
MEMORY_FACTOR = 3  # the mapped file, its tensors, and the bytes to write
MAX_SECONDS = 900  # of a process that converts about 200 MB/s


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


def convert_weights(pickles: Sequence[Path], out: Path) -> None:
    """Write the tensors of one or more pickled files as a safetensors file. Tied tensors are written once."""
    size = sum(path.stat().st_size for path in pickles)
    command = [sys.executable, "-m", __name__, str(size), str(out), *map(str, pickles)]
    where = f"{pickles[0]}: cannot be converted to safetensors"
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=MAX_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise StorageError(f"{where}: it takes longer than {MAX_SECONDS} seconds; get another model") from error
    if process.returncode == 0:
        return
    out.unlink(missing_ok=True)
    if code := re.search(r"GLOBAL ([\w.]+)", process.stderr):
        raise StorageError(
            f"{where}: it is not only tensors, but calls `{code[1]}`; do not trust it, get another model"
        )
    reason = (process.stderr.strip().splitlines() or [f"the process ended with {process.returncode}"])[-1]
    raise StorageError(f"{where}: {reason}; get the file again, or a model with safetensors")


def limit_process(size: int) -> None:
    """Limit address space, CPU time and file size. Windows has no such limits; macOS refuses some."""
    with suppress(ImportError):
        import resource

        import psutil

        memory = psutil.Process().memory_info().vms + BASE_BYTES + MEMORY_FACTOR * size
        limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: MAX_SECONDS, resource.RLIMIT_FSIZE: 2 * size + 2**20}
        for limit, value in limits.items():
            with suppress(ValueError, OSError):
                resource.setrlimit(limit, (value, value))


def main(size: str, out: str, *pickles: str) -> None:
    limit_process(int(size))
    tensors: dict[str, Tensor] = {}
    for path in pickles:
        is_zip = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and cannot be mapped
        tensors |= torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)  # noqa: TID251 - tensors only
    write_safetensors(untie_tensors(tensors)[0], Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
