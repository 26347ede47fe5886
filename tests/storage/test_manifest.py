"""Manifests: entries, limits and explained errors. Damaged model folders are in tests/models/test_folder.py."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from attent.storage.errors import FolderError
from attent.storage.manifest import (
    MAX_MANIFEST_BYTES,
    ManifestEntry,
    explain_save_errors,
    find_damage,
    hash_file,
    read_manifest,
    write_manifest,
)

SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    return path


def test_manifest_round_trip(file: Path) -> None:
    entry = hash_file(file)
    assert entry == ManifestEntry(SHA256_OF_ABC, 3)
    manifest = file.with_name("manifest.json")
    write_manifest(manifest, {"weights": entry})
    assert read_manifest(manifest) == {"weights": entry}
    assert json.loads(manifest.read_bytes())["format_version"] == 1
    with pytest.raises(FileExistsError):
        write_manifest(manifest, {})


def test_damage_is_described(file: Path) -> None:
    entry = hash_file(file)
    assert find_damage(file, entry) is None
    file.write_bytes(b"abd")
    assert find_damage(file, entry) == "is damaged or was changed: its SHA-256 is not the one in manifest.json"
    file.write_bytes(b"abcd")
    assert find_damage(file, entry) == "is damaged: by manifest.json it must have 3 bytes, but it has 4"
    file.unlink()
    assert find_damage(file, entry) == "is missing, though manifest.json lists it"


def test_manifest_of_the_largest_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    content = b'{"format_version": 1, "files": {}}'
    path.write_bytes(content.ljust(MAX_MANIFEST_BYTES))
    assert read_manifest(path) == {}
    path.write_bytes(content.ljust(MAX_MANIFEST_BYTES + 1))
    with pytest.raises(FolderError, match=f"is damaged: it has {MAX_MANIFEST_BYTES + 1} bytes"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"format_version": 2, "files": {}}, "must have `format_version` 1"),
        ({"format_version": True, "files": {}}, "must have `format_version` 1"),
        ({"format_version": 1, "files": {}, "more": 1}, "must have `format_version` 1"),
        ({"format_version": 1, "files": []}, "must have `format_version` 1"),
        ({"format_version": 1, "files": {"a": {"sha256": "0"}}}, r"`files.a` must have `sha256` and `bytes`"),
        ({"format_version": 1, "files": {"a": {"sha256": "0", "bytes": True}}}, r"`files.a` must have"),
        ({"format_version": 1, "files": {"a": {"sha256": 0, "bytes": 1}}}, r"`files.a` must have"),
    ],
)
def test_invalid_manifests_are_refused(content: object, problem: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(FolderError, match=f"{problem}.*; copy the checkpoint again"):
        read_manifest(tmp_path / "manifest.json", "checkpoint")


def test_missing_manifest_is_described(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"manifest.json: is missing; copy the model again"):
        read_manifest(tmp_path / "manifest.json")


@pytest.mark.parametrize(
    ("number", "folder", "reason"),
    [
        (errno.ENOSPC, ".", "the disk is full"),
        (errno.EDQUOT, ".", "the disk is full"),
        (errno.EROFS, ".", "the folder cannot be written to; give another folder, or change its permissions"),
        (errno.EIO, "none", "the folder cannot be created .*; give another"),
        (errno.EIO, ".", ".*Input/output error.*; save again"),
        (errno.EEXIST, "weights", "there is a file where the folder must be; give another folder, or move that file"),
    ],
)
def test_save_errors_are_explained(number: int, folder: str, reason: str, file: Path) -> None:
    where = file.parent / folder
    with (
        pytest.raises(FolderError, match=f"the checkpoint could not be saved: {reason}"),
        explain_save_errors(where, "checkpoint"),
    ):
        raise OSError(number, "Input/output error" if number == errno.EIO else "reason")
