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
    check_outputs,
    explain_save_errors,
    find_damage,
    hash_file,
    read_manifest,
    stat_plain_file,
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


def test_a_key_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format_version": 1, "files": {}, "files": {}}')
    with pytest.raises(FolderError, match="is not valid JSON: duplicate key `files`; the manifest is damaged"):
        read_manifest(tmp_path / "manifest.json")


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    for name, problem in (("link", "is a link to nothing"), ("folder", "must be a plain file")):
        with pytest.raises(FolderError, match=f"{name}: {problem}; put the file itself there"):
            stat_plain_file(tmp_path / name)
    assert stat_plain_file(tmp_path / "none") is None


def test_long_names_of_files_are_cut(tmp_path: Path) -> None:
    content = {"format_version": 1, "files": {"a" * 81: {}}}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(FolderError, match=rf"`files\.{'a' * 80}` must have"):
        read_manifest(tmp_path / "manifest.json")


def test_an_older_model_is_said_to_be_intact(tmp_path: Path) -> None:
    for holds_older, text in ((None, ""), (lambda: True, "an older model in the folder is intact; ")):
        with (
            pytest.raises(FolderError, match=f"the model could not be saved: the disk is full; {text}free some space"),
            explain_save_errors(tmp_path, holds_older=holds_older),
        ):
            raise OSError(errno.ENOSPC, "full")
    (tmp_path / "manifest.json").touch()
    with pytest.raises(FolderError, match="an older model in the folder is intact"), explain_save_errors(tmp_path):
        raise OSError(errno.ENOSPC, "full")


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


def test_an_output_is_neither_an_input_nor_another_output(file: Path) -> None:
    folder, other = file.parent, file.parent / "other"
    write_manifest(folder / "manifest.json", {"weights": hash_file(file)})
    other.touch()
    check_outputs([folder / "new", None, other], [folder, None])
    for outputs, inputs, problem in (
        ([other], [other], "must not be an input; write to another file"),
        ([file], [folder], "must not be an input; write to another file"),
        ([folder / "manifest.json"], [folder], "must not be an input; write to another file"),
        ([other, folder / "." / "other"], [], "must not be the file of two outputs; name another for one"),
        ([folder / "new", folder / "new"], [], "must not be the file of two outputs; name another for one"),
    ):
        with pytest.raises(OSError, match=problem) as caught:
            check_outputs(outputs, inputs)
        assert caught.value.filename == str(outputs[-1])
    if Path("/dev/null").exists():
        check_outputs([Path("/dev/null"), Path("/dev/null")], [])
