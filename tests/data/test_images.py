"""Image datasets: finding splits, the store, resizing, and errors."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attent.data import images
from attent.data.images import (
    ImageDataConfig,
    ImageError,
    ImageShape,
    choose_shape,
    find_splits,
    prepare_images,
    read_image,
)
from attent.data.media_store import describe_skipped
from attent.data.pairs import CorpusError
from tests.data.image_sets import encode_idx, make_bar_images, write_class_folders, write_idx

Image = pytest.importorskip("PIL.Image")


def test_idx_files_are_read(tmp_path: Path) -> None:
    parts = find_splits(write_idx(tmp_path / "set"))
    assert set(parts) == {"train", "test"}
    shape = choose_shape(parts["train"], ImageDataConfig())
    assert shape == ImageShape(8, 1)
    dataset = prepare_images(parts["train"], shape, tmp_path / "store")
    pixels, labels = make_bar_images(60, 8, 0)
    assert np.array_equal(dataset.pixels[:, 0], pixels)
    assert np.array_equal(dataset.item_labels, labels)
    assert dataset.class_names == ("0", "1", "2")


def test_store_is_rebuilt_when_the_files_change(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "set")
    part = find_splits(folder)["train"]
    first = prepare_images(part, ImageShape(8, 1), tmp_path / "store")
    assert prepare_images(part, ImageShape(8, 1), tmp_path / "store").store_key == first.store_key
    labels = (make_bar_images(60, 8, 0)[1] + 1) % 3
    (folder / "train-labels-idx1-ubyte").write_bytes(encode_idx(labels))
    again = prepare_images(part, ImageShape(8, 1), tmp_path / "store")
    assert again.store_key != first.store_key
    assert np.array_equal(again.item_labels, labels)


def test_sizes_are_padded_to_a_multiple_of_four(tmp_path: Path) -> None:
    part = find_splits(write_idx(tmp_path / "set", side=9))["train"]
    shape = choose_shape(part, ImageDataConfig())
    assert shape.size == 12
    dataset = prepare_images(part, shape, tmp_path / "store")
    assert np.array_equal(dataset.pixels[:, 0, 1:10, 1:10], make_bar_images(60, 9, 0)[0])
    assert not dataset.pixels[:, 0, 0].any()


def test_folder_per_class_is_read_with_its_splits(tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        write_class_folders(tmp_path / "set" / part)
    parts = find_splits(tmp_path / "set")
    assert set(parts) == {"train", "valid", "test"}
    shape = choose_shape(parts["train"], ImageDataConfig())
    assert shape == ImageShape(12, 3)
    dataset = prepare_images(parts["train"], shape, tmp_path / "store")
    assert dataset.class_names == ("cat", "dog")
    assert dataset.item_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (dataset.pixels[:3, 0] == 240).all()
    assert (dataset.pixels[3:, 1] == 240).all()


def test_bad_image_is_skipped_and_reported(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "set")
    (folder / "cat" / "1.png").write_bytes((folder / "cat" / "0.png").read_bytes()[:100])
    (folder / "dog" / "9.jpg").write_bytes(b"this is no picture")
    dataset = prepare_images(find_splits(folder)["train"], ImageShape(12, 3), tmp_path / "store")
    assert dataset.item_labels.tolist() == [0, 0, 1, 1, 1]
    message = describe_skipped(dataset.name, dataset.skipped)
    assert message is not None
    assert "skipped 2 entries, such as" in message
    assert "cat/1.png: must be a whole image" in message
    assert "dog/9.jpg: must be an image, but Pillow does not recognize it" in message


def test_class_without_readable_images_is_an_error(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "set", count=1)
    (folder / "dog" / "0.png").write_bytes(b"no")
    with pytest.raises(ImageError, match="dog: must have images, but none can be read"):
        prepare_images(find_splits(folder)["train"], ImageShape(12, 3), tmp_path / "store")
    (folder / "cat" / "0.png").write_bytes(b"no")
    with pytest.raises(ImageError, match="of its 2 files none can be read"):
        prepare_images(find_splits(folder)["train"], ImageShape(12, 3), tmp_path / "store")
    assert not list((tmp_path / "store").glob("*.part"))


def test_image_is_rotated_resized_and_converted(tmp_path: Path) -> None:
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:, 10:] = 255  # the right half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF: rotate by 90 degrees clockwise
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path, exif=exif)
    dataset = read_image(path, ImageShape(10, 1))
    assert dataset.shape == (1, 10, 10)
    assert int(dataset[0, :4].max()) == 0  # the left half is now on top
    assert int(dataset[0, 6:].min()) == 255
    coloured = read_image(path, ImageShape(4, 3))
    assert coloured.shape == (3, 4, 4)
    assert int(coloured[:, 0].max()) == 0
    assert int(coloured[:, 3].min()) == 255


def test_transparency_becomes_white_and_16_bits_become_8(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4, 4), np.uint8)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png", ImageShape(4, 3)).min() == 255
    Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png", ImageShape(4, 1)).unique().tolist() == [0x80]


def test_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (100, 100)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(images, "MAX_PIXELS", 5_000)
    with pytest.raises(ImageError, match=r"bomb\.png: must have at most .* pixels, but has 100 x 100"):
        read_image(tmp_path / "bomb.png", ImageShape(8, 1))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
    with pytest.raises(ImageError, match=r"bomb\.png: must have at most .* pixels"):
        read_image(tmp_path / "bomb.png", ImageShape(8, 1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: b"\0\0\x09" + raw[3:], "must be an idx file of images, .* but begins with 00 00 09 03"),
        (lambda raw: raw[:-10], "must have 3,840 bytes after its header, but has 3,830; get it again"),
        (lambda raw: raw + b"!", "must have 3,840 bytes after its header, but has 3,841; get it again"),
        (lambda raw: raw[:3], "must be an idx file of images, .* but begins with 00 00 08"),
        (lambda raw: raw[:4] + b"\xff\xff\xff\xff" + raw[8:], "must have 274,877,906,880 bytes after its header"),
        (lambda raw: raw[:8] + b"\xff\xff\xff\xff" + raw[12:], "must have images of 1 to 4096 pixels"),
    ],
)
def test_damaged_idx_file_is_reported(tmp_path: Path, spoil: Callable[[bytes], bytes], message: str) -> None:
    path = write_idx(tmp_path / "set", test=False) / "train-images-idx3-ubyte.gz"
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(spoil(content)))
    with pytest.raises(ImageError, match=rf"train-images-idx3-ubyte\.gz: {message}"):
        images.read_idx(path, 3)
    path.write_bytes(gzip.compress(content)[:-20])
    with pytest.raises(CorpusError, match=r"train-images-idx3-ubyte\.gz is cut short"):
        images.read_idx(path, 3)


def test_image_and_label_counts_must_match(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "set", test=False)
    labels = folder / "train-labels-idx1-ubyte"
    labels.write_bytes(encode_idx(np.zeros(7, np.uint8)))
    with pytest.raises(ImageError, match=r"must have a label for each of the 60 images .* but has 7"):
        prepare_images(find_splits(folder)["train"], ImageShape(8, 1), tmp_path / "store")
    labels.unlink()
    with pytest.raises(ImageError, match="must have its labels in the same folder"):
        find_splits(folder)
    labels.write_bytes(encode_idx(np.zeros(7, np.uint8)))
    (folder / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(ImageError, match="must have its images in the same folder"):
        find_splits(folder)


def test_invalid_image_datasets_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="nowhere: must be a folder of images, but does not exist"):
        find_splits(tmp_path / "nowhere")
    with pytest.raises(ImageError, match="must have a folder of images for each class"):
        find_splits(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ImageError, match="cat: must have images, but has none"):
        find_splits(tmp_path)
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(ImageError, match=r"notes\.txt: must be a folder of images"):
        find_splits(tmp_path / "notes.txt")
    with pytest.raises(ImageError, match=r"none\.png: must be an image, but cannot be opened"):
        read_image(tmp_path / "none.png", ImageShape(8, 1))


def test_held_out_images_are_stratified_by_label(tmp_path: Path) -> None:
    dataset = prepare_images(find_splits(write_idx(tmp_path / "set"))["train"], ImageShape(8, 1), tmp_path / "store")
    rest, held = images.hold_out_images(dataset, 12, seed=1)
    assert np.bincount(held.item_labels).tolist() == [4, 4, 4]
    assert rest.indices is not None
    assert held.indices is not None
    assert sorted([*rest.indices, *held.indices]) == list(range(60))
    assert np.bincount(images.hold_out_images(dataset, 60, seed=1)[0].item_labels).tolist() == [
        1,
        1,
        1,
    ]  # at least one of each class stays in training
    again = images.hold_out_images(dataset, 12, seed=1)[1]
    assert again.indices is not None
    assert np.array_equal(held.indices, again.indices)


def test_labels_are_remapped_to_the_model(tmp_path: Path) -> None:
    dataset = prepare_images(
        find_splits(write_class_folders(tmp_path / "set"))["train"], ImageShape(12, 3), tmp_path / "store"
    )
    assert images.remap_labels(dataset, ("dog", "bird", "cat")).item_labels.tolist() == [2, 2, 2, 0, 0, 0]
    with pytest.raises(ImageError, match="`dog` is not; is it another dataset"):
        images.remap_labels(dataset, ("cat", "bird"))


def test_channel_stats_match_numpy(tmp_path: Path) -> None:
    dataset = prepare_images(
        find_splits(write_class_folders(tmp_path / "set"))["train"], ImageShape(12, 3), tmp_path / "store"
    )
    mean, std = images.compute_channel_stats(dataset)
    pixels = dataset.pixels / 255
    assert np.allclose(mean, pixels.mean((0, 2, 3)), atol=1e-4)
    assert np.allclose(std, pixels.std((0, 2, 3)), atol=1e-4)


@pytest.mark.parametrize("setting", [{"flip": 1.5}, {"shift": -1}, {"image_size": 2}])
def test_invalid_settings_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        ImageDataConfig(**setting)  # type: ignore[arg-type]


def test_limits_of_settings_are_allowed() -> None:
    for settings in ({"image_size": 4}, {"image_size": 4096}, {"flip": 0, "shift": 1, "erase": 1}):
        ImageDataConfig(**settings)
    for image_size in (3, 4097):
        with pytest.raises(ValueError, match=f"from 4 to 4096 pixels, but is {image_size}"):
            ImageDataConfig(image_size=image_size)


def test_image_of_the_maximum_number_of_pixels_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    monkeypatch.setattr("attent.data.images.MAX_PIXELS", 64)
    assert read_image(tmp_path / "a.png", ImageShape(8, 1)).shape == (1, 8, 8)
    monkeypatch.setattr("attent.data.images.MAX_PIXELS", 63)
    with pytest.raises(ImageError, match="pixels, but has 8 x 8"):
        read_image(tmp_path / "a.png", ImageShape(8, 1))


def test_non_square_image_is_cropped_or_squashed(tmp_path: Path) -> None:
    pixels = np.zeros((12, 36), np.uint8)
    pixels[:, 12:24] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert read_image(tmp_path / "wide.png", ImageShape(12, 1)).unique().tolist() == [200]
    squashed = read_image(tmp_path / "wide.png", ImageShape(12, 1, "squash"))[0]
    assert squashed[0, [0, 5, 11]].tolist() == [0, 200, 0]
    pixels[:2] = 255
    Image.fromarray(pixels[:, 12:24]).save(tmp_path / "top.png")
    assert int(read_image(tmp_path / "top.png", ImageShape(8, 1, resize_to=12)).max()) == 200  # cropped


@pytest.mark.parametrize("number_type", [np.int32, np.float32])
def test_images_of_32_bits_are_skipped_and_reported(number_type: type, tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "set")
    Image.fromarray(np.full((4, 4), 1, number_type)).save(folder / "cat" / "a.tiff")
    dataset = prepare_images(find_splits(folder)["train"], ImageShape(12, 3), tmp_path / "store")
    assert len(dataset) == 6
    assert "a.tiff: its pixels must have 8 or 16 bits, but have 32" in dataset.skipped[0]


def test_split_is_detected_by_any_word_of_the_name(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "set")
    for path in sorted(folder.iterdir()):
        path.rename(folder / f"emnist-letters-{path.name.replace('t10k', 'test')}")
    assert {part: Path(split.name).name for part, split in find_splits(folder).items()} == {
        "train": "emnist-letters-train-images-idx3-ubyte.gz",
        "test": "emnist-letters-test-images-idx3-ubyte.gz",
    }


def test_two_datasets_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "set")
    packed = folder / "train-images-idx3-ubyte.gz"
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    assert set(find_splits(folder)) == {"train", "test"}
    packed.rename(folder / "digits-train-images-idx3-ubyte.gz")
    expected_text = r"digits-train-images-idx3-ubyte\.gz and train-images-idx3-ubyte are both for `train`"
    with pytest.raises(ImageError, match=expected_text):
        find_splits(folder)


def test_train_may_be_a_class(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "set", ("bus", "car", "train"))
    assert prepare_images(find_splits(folder)["train"], ImageShape(12, 3), tmp_path / "store").class_names == (
        "bus",
        "car",
        "train",
    )
