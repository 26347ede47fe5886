"""Images with captions from .tsv files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attent.data.captions import CaptionItem, prepare_captions, read_captions
from attent.data.images import ImageDataConfig, ImageError, ImageShape, choose_shape
from attent.data.media_store import describe_skipped
from attent.data.pairs import CorpusError
from tests.data.image_sets import write_captions


def write_rows(tmp_path: Path, *rows: str, name: str = "captions.tsv") -> Path:
    write_captions(tmp_path, 3)
    (tmp_path / name).write_text("\n".join(rows) + "\n")
    return tmp_path / name


def test_an_image_may_have_several_captions(tmp_path: Path) -> None:
    rows = read_captions([write_rows(tmp_path, "0.png\tone", "1.png\ttwo", "0.png\tthree")])
    assert [path.name for path in rows.paths] == ["0.png", "1.png"]
    assert (rows.image_ids.tolist(), rows.texts, rows.languages) == (
        [0, 1, 0],
        ("one", "two", "three"),
        (None, None, None),
    )


@pytest.mark.parametrize(
    ("rows", "languages"),
    [
        (["caption\tlang\tpath", "one\tde\t0.png"], ("de",)),  # a header in another order
        (["id\tfile\ttext", "7\t0.png\tone"], (None,)),
        (["0.png\tone\tpt-BR", "1.png\ttwo\ten"], ("pt-BR", "en")),
    ],
)
def test_columns_are_named_by_a_header_or_in_order(tmp_path: Path, rows: list[str], languages: tuple[str]) -> None:
    captions = read_captions([write_rows(tmp_path, *rows)])
    assert captions.languages == languages
    assert captions.texts[0] == "one"
    assert captions.paths[0] == tmp_path / "0.png"


def test_bad_rows_are_named_by_line(tmp_path: Path) -> None:
    lines = ["image\ttext", *["0.png\ta bar"] * 15, "gone.png\tmissing", "1.png\t", "\ttext", "2.png"]
    file = write_rows(tmp_path, *lines)
    captions = read_captions([file])
    assert captions.skipped == (
        f"{file}:17: gone.png does not exist",
        f"{file}:18: has no text",
        f"{file}:19: has no image",
        f"{file}:20: has no text",
    )
    dataset = prepare_captions(captions, ImageShape(8, 1), tmp_path / "store")
    assert len(dataset) == 15
    message = describe_skipped(dataset.name, dataset.skipped) or ""
    assert "skipped 4 entries" in message
    assert ":17: gone.png does not exist" in message


def test_damaged_images_are_left_out_with_their_captions(tmp_path: Path) -> None:
    rows = ["text.png\tno image", "0.png\tone", "folder.png\ta folder", "empty.png\tempty", "2.png\tthree"]
    file = write_rows(tmp_path, *rows)
    (tmp_path / "text.png").write_text("text")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    dataset = prepare_captions(read_captions([file]), ImageShape(8, 1), tmp_path / "store")
    assert dataset.texts == ("one", "three")
    assert [path.name for path in dataset.paths] == ["0.png", "2.png"]
    assert dataset.image_ids.tolist() == [0, 1]
    assert len(dataset.skipped) == 3
    other = prepare_captions(read_captions([write_rows(tmp_path, "2.png\tx")]), ImageShape(8, 1), tmp_path / "store")
    assert np.array_equal(dataset.images.take(dataset.image_ids[1:])[0], other.images.take(np.array([0]))[0])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["gone.png\tmissing"], r"none: .*captions.tsv:1: gone.png does not exist; a line is image<TAB>text"),
        (["A dog runs."], "none: .*captions.tsv:1: has no text; a line is"),
        (["0.png\tone\ttwo words"], "has 3 columns; a line is image<TAB>text"),
        ([""], "must have images with captions, but has none: it is empty"),
    ],
)
def test_files_without_captions_are_refused(tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read_captions([write_rows(tmp_path, *rows)])


def test_a_file_of_bad_images_is_refused_with_a_reason(tmp_path: Path) -> None:
    rows = read_captions([write_rows(tmp_path, "captions.tsv\tnot an image")])
    with pytest.raises(ImageError, match=r"must have images, but none of 1 tried, out of 1, can be read: .*Pillow"):
        choose_shape(rows.split, ImageDataConfig())
    for number in range(99):
        (tmp_path / f"{number}.wav").write_text("not an image")
    rows = read_captions([write_rows(tmp_path, *(f"{number}.wav\ttext" for number in range(99)))])
    with pytest.raises(ImageError, match="none of 64 tried, out of 99, can be read"):
        choose_shape(rows.split, ImageDataConfig())


def test_images_are_selected_with_all_of_their_captions(tmp_path: Path) -> None:
    rows = read_captions([write_rows(tmp_path, "0.png\ta\ten", "1.png\tb\ten", "2.png\tc\tde", "1.png\td\ten")])
    dataset = prepare_captions(rows, ImageShape(8, 1), tmp_path / "store")
    part = dataset.select_images(np.array([1, 2]))
    assert (part.texts, part.languages, part.image_ids.tolist()) == (("b", "c", "d"), ("en", "de", "en"), [0, 1, 0])
    assert part.list_items() == [CaptionItem(0, "en", ("b", "d")), CaptionItem(1, "de", ("c",))]
    assert np.array_equal(part.images.take(part.image_ids)[0], dataset.images.take(np.array([1, 2, 1]))[0])
    again = part.select_images(np.array([1]))
    assert again.texts == ("c",)
    assert np.array_equal(again.images.take(again.image_ids)[0], dataset.images.take(np.array([2]))[0])
