"""Safetensors files: headers, views of shared memory, errors of the disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from attent.storage import tensor_files
from attent.storage.errors import FolderError
from attent.storage.tensor_files import (
    check_storable,
    read_safetensors,
    to_standalone_cpu,
    write_safetensors,
)


def test_loaded_tensors_are_copies(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors({"a": torch.arange(4.0)}, path)
    loaded = read_safetensors(path)
    path.write_bytes(b"")
    assert loaded["a"].tolist() == [0, 1, 2, 3]


def test_header_of_the_largest_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors({"a": torch.zeros(1)}, path)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(tensor_files, "MAX_HEADER_BYTES", size)
    assert list(read_safetensors(path)) == ["a"]
    monkeypatch.setattr(tensor_files, "MAX_HEADER_BYTES", size - 1)
    with pytest.raises(FolderError, match=f"is not safetensors \\(its header claims {size} bytes\\)"):
        read_safetensors(path)


def test_headers_have_at_most_16_mib() -> None:
    assert tensor_files.MAX_HEADER_BYTES == 16_777_216


def test_file_of_a_header_alone_is_read(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    write_safetensors({}, path)
    assert read_safetensors(path) == {}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FolderError, match="is not safetensors"):
        read_safetensors(path)


@pytest.mark.parametrize("start", [b"\x80\x04", b"PK\x03\x04"])
def test_pickles_are_named(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(start.ljust(100))
    with pytest.raises(FolderError, match="is a pickle or zip, which is never opened; get the weights as safetensors"):
        read_safetensors(tmp_path / "model.bin", "weights")


def test_views_of_one_storage_are_separated() -> None:
    base, seen = torch.arange(6.0), set[int]()
    first, second = to_standalone_cpu(base[:4], seen), to_standalone_cpu(base[:4], seen)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)
    assert to_standalone_cpu(base.view(2, 3).t(), seen).is_contiguous()


def test_tensors_without_data_are_refused() -> None:
    check_storable("a", torch.zeros(2))
    for name, tensor, problem in (
        ("a", [1.0], "must be a tensor"),
        ("__metadata__", torch.zeros(1), "not named `__metadata__`"),
        ("a", torch.zeros(1, device="meta"), "must be a dense tensor with data, but is .* on meta"),
        ("a", torch.zeros(1).to_sparse(), "must be a dense tensor with data, but is torch.sparse_coo"),
    ):
        with pytest.raises(FolderError, match=problem):
            check_storable(name, tensor)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_disk_errors_are_os_errors(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: something (os error {number})")

    monkeypatch.setattr(tensor_files, "save_file", fail)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - its number is checked
        write_safetensors({}, tmp_path / "a")
    assert caught.value.errno == number


def test_other_errors_name_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SafetensorError("unknown dtype")

    monkeypatch.setattr(tensor_files, "save_file", fail)
    with pytest.raises(FolderError, match="safetensors cannot store this checkpoint: unknown dtype"):
        write_safetensors({}, tmp_path / "a", "checkpoint")
