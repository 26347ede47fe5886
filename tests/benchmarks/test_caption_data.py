"""The corpora of pictures with captions."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from attent.data.captions import read_captions
from benchmarks.captions import CELLS, NOUNS, SIDE, describe_scene, draw_scene, list_scenes, write_emoji, write_grids
from tests.data.image_sets import encode_idx


def read_groups(labels: NDArray[np.int64]) -> tuple[tuple[int, str], ...] | None:
    """Number and noun of each row that is not empty; None if a row has two nouns."""
    names = {label: noun for noun, classes in NOUNS.items() for label in classes}
    rows = [[names[label] for label in row if label >= 0] for row in labels.tolist()]
    if any(len(set(row)) > 1 for row in rows):
        return None
    return tuple((len(row), row[0]) for row in rows if row)


def test_a_grid_shows_its_description_and_no_other() -> None:
    pictures = np.stack([np.full((SIDE, SIDE), 10 * (label + 1), np.uint8) for label in range(10)])
    rng = np.random.default_rng(0)
    scenes = list_scenes()
    assert len(set(map(describe_scene, scenes))) == len(scenes) == 2 * (9 * 4 * 3 + 27 * 4 * 3 * 2)
    assert {"a bag above two shoes", "a bag left of a shoe left of two shirts"} <= set(map(describe_scene, scenes))
    known = set(scenes)
    for scene in scenes[::2]:
        labels = draw_scene(scene, pictures, np.arange(10), rng)[::SIDE, ::SIDE].astype(int) // 10 - 1
        assert labels.shape == (CELLS, CELLS)
        readings = {("above", read_groups(labels)), ("left of", read_groups(labels.T))}
        assert readings & known == {scene}


def test_unseen_descriptions_are_in_the_test_part_only(tmp_path: Path) -> None:
    for name in ("train", "t10k"):
        images = np.full((20, SIDE, SIDE), 200, np.uint8)
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(encode_idx(images))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(encode_idx(np.arange(20, dtype=np.uint8) % 10))
    write_grids(tmp_path, tmp_path / "out", 30)
    train, valid, test = (read_captions([tmp_path / "out" / f"{split}.tsv"]) for split in ("train", "valid", "test"))
    assert len(train.paths) == len(test.paths) == 30
    assert not (set(train.texts) | set(valid.texts)) & set(test.texts)


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_an_emoji_is_in_one_part_with_all_of_its_names(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (4, 4)).save(buffer, "PNG")
    codes = [f"1F6{number:02X}" for number in range(20)]
    emoji = [{"unified": f"{code}-FE0F", "image": f"{code}.png", "category": "Objects"} for code in codes]
    emoji.append({"unified": "1F1E6", "image": "flag.png", "category": "Flags"})
    pictures = {f"img/twitter/64/{entry['image']}": buffer.getvalue() for entry in emoji}
    first = write_archive(tmp_path / "a.tgz", {"emoji.json": json.dumps(emoji).encode(), **pictures})
    tables = {
        f"{language}/data.json": json.dumps(
            [{"hexcode": code, "label": f"{language} {code}"} for code in codes]
        ).encode()
        for language in ("de", "en")
    }
    write_emoji(first, write_archive(tmp_path / "b.tgz", tables), tmp_path / "out")
    parts = [read_captions([tmp_path / "out" / f"{split}.tsv"]) for split in ("train", "valid", "test")]
    assert [len(part.paths) for part in parts] == [16, 2, 2]
    assert len({path for part in parts for path in part.paths}) == 20
    assert all(len(part.texts) == 2 * len(part.paths) and set(part.languages) == {"de", "en"} for part in parts)
