"""Convert pickled weights to safetensors in a process of its own (`python -m attent.storage.torch_files`).

A pickle can run any code, so `torch.load(weights_only=True)` takes tensors and plain containers only, within limits.
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from attent.storage.errors import StorageError

BASE_BYTES = 2 * 2**30  # besides the weights
MEMORY_FACTOR = 3  # the mapped file, its tensors, and the bytes to write
MAX_SECONDS = 900  # of a process that converts about 200 MB/s


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
    import torch

    from attent.storage.tensor_files import untie_tensors, write_safetensors

    limit_process(int(size))
    tensors: dict[str, torch.Tensor] = {}
    for path in pickles:
        is_zip = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and cannot be mapped
        tensors |= torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)  # noqa: TID251 - tensors only
    write_safetensors(untie_tensors(tensors)[0], Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
