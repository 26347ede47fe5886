"""Labeled images as bytes of one size: idx files (MNIST and the like), or a folder of image files per class.

Image files (by Pillow) are decoded once into a memory-mapped array, cached by path, size and times.
"""

import hashlib
import math
import re
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np

from attent.data.arrays import Array
from attent.data.file_hashes import stamp_file
from attent.data.formats.streams import InputFile
from attent.data.media_store import compute_media_key, prepare_media_store
from attent.data.pairs import SPLIT_WORDS, CorpusError
from attent.storage.errors import AttentError, import_package

if TYPE_CHECKING:
    from torch import Tensor

    from attent.nn import ImageConfig

STORE_VERSION = 3  # part of a store's key: raised when the same files give other bytes
IMAGE_SUFFIXES = frozenset(".png .jpg .jpeg .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .avif .jp2".split())
SPLIT_NAMES = SPLIT_WORDS | {"test": (*SPLIT_WORDS["test"], "t10k", "eval")}  # of folders, and words of idx file names
PHOTO_SIZE = 224  # pixels; small images keep their size
MAX_PIXELS = 2**27  # of an image file, against decompression bombs
SIZE_SAMPLE = 64  # images whose size is read
MAX_STATS_IMAGES = 20_000  # for mean and standard deviation
TOO_LARGE = f"must have at most {MAX_PIXELS:,} pixels"


class ImageError(CorpusError):
    """Images that cannot be read. The message names the file, the problem and what to do."""


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig:
    """Image size and augmentation."""

    image_size: Annotated[int | None, "pixels of a side that images are resized to; by default chosen by theirs"] = None
    channels: Annotated[Literal[1, 3] | None, "1: grey, 3: colour; by default as in the files"] = None
    flip: Annotated[
        float, "probability of a horizontal flip; 0 where left and right matter [default: 0.5; 0 for captions]"
    ] = 0.5
    shift: Annotated[float, "maximum shift in each direction, as a fraction of the side"] = 0.1
    erase: Annotated[float, "probability of random erasing [default: 0.25; 0 for captions]"] = 0.25

    def __post_init__(self) -> None:
        if self.image_size is not None and not 4 <= self.image_size <= 4096:
            raise AttentError(f"`image_size` must be from 4 to 4096 pixels, but is {self.image_size}")
        for name in ("flip", "shift", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise AttentError(f"`{name}` must be from 0 to 1, but is {getattr(self, name)}")


@dataclass(frozen=True)
class ImageShape:
    """The size of all images and how they are resized; see `ImageConfig`."""

    size: int  # pixels of a side
    channels: int
    fit: Literal["crop", "squash"] = "crop"
    resize_to: int | None = None
    resample: Literal["bilinear", "bicubic"] = "bilinear"

    @classmethod
    def from_config(cls, config: "ImageConfig") -> Self:
        return cls(config.image_size, config.channels, config.fit, config.resize_to, config.resample)


@dataclass(frozen=True)
class IdxSplit:
    name: str
    images: Path
    labels: Path


@dataclass(frozen=True)
class FolderSplit:
    name: str
    folder: Path
    classes: tuple[str, ...]
    files: tuple[tuple[Path, int], ...] = field(repr=False)  # each with its class index


ImageSplit = IdxSplit | FolderSplit


@dataclass(frozen=True)
class ImageDataset:
    name: str
    pixels: Array = field(repr=False)  # (N, C, S, S), uint8
    labels: Array = field(repr=False)  # (N,), indices of `class_names`
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = ()  # a message for each file that is not an image
    indices: Array | None = field(default=None, repr=False)  # of a subset; None: all
    store_key: str = ""

    def __len__(self) -> int:
        return len(self.pixels) if self.indices is None else len(self.indices)

    def take(self, indices: Array) -> tuple[Array, Array]:
        rows = indices if self.indices is None else self.indices[indices]
        return self.pixels[rows], self.labels[rows].astype(np.int64)

    def select(self, indices: Array) -> Self:
        return replace(self, indices=indices if self.indices is None else self.indices[indices])

    @property
    def item_labels(self) -> Array:
        return np.asarray(self.labels if self.indices is None else self.labels[self.indices], np.int64)


def find_splits(data_path: str | Path) -> dict[str, ImageSplit]:
    root = Path(data_path).expanduser()
    if root.is_file():
        return {"train": open_idx_split(root)}
    if not root.is_dir():
        raise ImageError(f"{data_path}: must be a folder of images, but does not exist; check the path")
    if splits := find_idx_splits(root):
        return splits if len(splits) > 1 else {"train": next(iter(splits.values()))}
    if labels := next((path for path in sorted(root.iterdir()) if is_idx_file(path, "labels")), None):
        images = labels.name.replace("labels", "images").replace("idx1", "idx3")
        raise ImageError(f"{labels}: must have its images in the same folder, as {images}, but has none; add them")
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}
    split_folders = {split: folders[name] for split, names in SPLIT_NAMES.items() for name in names if name in folders}
    train = split_folders.get("train")  # may also be a class, next to cars and buses
    if train and list_class_folders(train):
        return {split: open_folder_split(path) for split, path in split_folders.items()}
    return {"train": open_folder_split(root)}


def list_class_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def find_idx_splits(root: Path) -> dict[str, ImageSplit]:
    """Return idx files by the split in their names. A file may be there compressed and uncompressed."""
    images: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        if not is_idx_file(path, "images"):
            continue
        words = re.split(r"[^a-z0-9]+", path.name.lower())
        split = next((split for word in words for split, names in SPLIT_NAMES.items() if word in names), "train")
        other = images.setdefault(split, path)
        if other.name.removesuffix(".gz") != path.name.removesuffix(".gz"):
            problem = f"must have one idx file per split, but {other.name} and {path.name} are both for `{split}`"
            raise ImageError(f"{root}: {problem}; put each dataset into a folder of its own")
    return {split: open_idx_split(path) for split, path in images.items()}


def is_idx_file(path: Path, kind: str) -> bool:
    name = path.name.lower().removesuffix(".gz")
    return path.is_file() and kind in name and name.endswith(("ubyte", ".idx", ".idx1", ".idx3"))


def open_idx_split(images: Path) -> IdxSplit:
    """Find the labels of images: they have the same name."""
    if not is_idx_file(images, "images"):
        raise ImageError(f"{images}: must be a folder of images, or an idx file of them, but is another file")
    labels = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for name in (f"{labels}.gz", labels):
        if (images.parent / name).is_file():
            return IdxSplit(str(images), images, images.parent / name)
    expected = f"its labels in the same folder, as {labels} or {labels}.gz"
    raise ImageError(f"{images}: must have {expected}, but has none; add them")


def list_images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())


def open_folder_split(folder: Path) -> FolderSplit:
    classes = list_class_folders(folder)
    if not classes:
        expected = f"a folder of images for each class, such as {folder.name}/cat, or idx files"
        raise ImageError(f"{folder}: must have {expected}, but has neither")
    files: list[tuple[Path, int]] = []
    for index, class_folder in enumerate(classes):
        if not (paths := list_images(class_folder)):
            suffixes = ", ".join(sorted(IMAGE_SUFFIXES)[:6])
            raise ImageError(f"{class_folder}: must have images, but has none ({suffixes} ...); add some, or remove it")
        files += [(path, index) for path in paths]
    return FolderSplit(str(folder), folder, tuple(path.name for path in classes), tuple(files))


def choose_shape(split: ImageSplit, config: ImageDataConfig) -> ImageShape:
    """Return the requested size, or one for the images: small ones keep theirs, rounded to a multiple of 4."""
    if isinstance(split, IdxSplit):
        _, rows, columns = read_idx(split.images, 3).shape
        return ImageShape(config.image_size or math.ceil(max(rows, columns) / 4) * 4, config.channels or 1)
    sides, is_grey, problems = sample_sizes(split)
    if not sides:
        tried = f"{len(problems)} tried, out of {len(split.files):,},"
        raise ImageError(f"{split.name}: must have images, but none of {tried} can be read: {problems[0]}")
    side = int(np.median(sides))
    small_size = math.ceil(side / 4) * 4 if min(sides) == max(sides) else max(8, side // 4 * 4)
    size = PHOTO_SIZE if side >= PHOTO_SIZE * 3 // 4 else small_size
    return ImageShape(config.image_size or size, config.channels or (1 if is_grey else 3))


def sample_sizes(split: FolderSplit) -> tuple[list[int], bool, list[str]]:
    """Return the shorter sides of a sample of images, whether all of them are grey, and the problems of the others."""
    sample = split.files[:: max(1, len(split.files) // SIZE_SAMPLE)][:SIZE_SAMPLE]
    sides, is_grey, problems = [], True, []
    for path, _ in sample:
        try:
            with warnings.catch_warnings(action="ignore"), open_image(path) as image:
                sides.append(min(image.size))
                is_grey = is_grey and (image.mode in ("1", "L", "F") or image.mode.startswith("I"))
        except ImageError as error:
            problems.append(str(error))
    return sides, is_grey, problems


def read_image(path: str | Path, shape: ImageShape) -> "Tensor":
    """Return an upright and resized image, (C, size, size) of uint8."""
    import torch

    with warnings.catch_warnings(action="ignore"):
        return torch.from_numpy(read_pixels(Path(path).expanduser(), shape))


def read_pixels(path: Path, shape: ImageShape) -> Array:
    with open_image(path) as image:
        try:
            return convert_to_pixels(image, shape)
        except ImageError as error:
            raise ImageError(f"{path}: {error}") from error
        except MemoryError:
            raise
        except Exception as error:  # decoders of damaged files raise anything
            problem = f"must be a whole image, but is damaged ({_format_reason(error)}); get it again"
            raise ImageError(f"{path}: {problem}") from error


@contextmanager
def open_image(path: Path) -> Iterator[Any]:
    Image = import_pillow()
    try:
        image = Image.open(path)
    except Image.DecompressionBombError as error:
        raise ImageError(f"{path}: {TOO_LARGE}; make it smaller first ({_format_reason(error)})") from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"{path}: must be an image, but Pillow does not recognize it; check the file") from error
    except (OSError, ValueError, SyntaxError, TypeError, struct.error) as error:
        reason = getattr(error, "strerror", None) or _format_reason(error)  # without the path, which stands before it
        raise ImageError(f"{path}: must be an image, but cannot be opened ({reason})") from error
    with image:
        if image.width * image.height > MAX_PIXELS:
            size = f"{image.width:,} x {image.height:,}"
            raise ImageError(f"{path}: {TOO_LARGE}, but has {size}; make it smaller first")
        yield image


def import_pillow() -> Any:
    return import_package("PIL.Image", "reading image files", "'attent[images]' (idx files do not need it)")


def convert_to_pixels(image: Any, shape: ImageShape) -> Array:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    pixels = np.asarray(resize_image(convert_channels(upright, shape.channels), shape), np.uint8)
    return np.ascontiguousarray(pixels[None] if shape.channels == 1 else pixels.transpose(2, 0, 1))


def convert_channels(image: Any, channels: int) -> Any:
    """Convert to 8-bit grey or RGB; transparency becomes white."""
    Image = import_pillow()
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ImageError("its pixels must have 8 or 16 bits, but have 32; save it as a PNG first")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def resize_image(image: Any, shape: ImageShape) -> Any:
    """Resize an image, squashed or by its shorter side with a center crop, in one step without a larger one between."""
    (width, height), side, resized = image.size, shape.size, shape.resize_to or shape.size
    if (width, height) == (side, side) == (resized, resized):
        return image
    divisors = (width, height) if shape.fit == "squash" else (min(width, height),) * 2
    wide, high = resized * width // divisors[0], resized * height // divisors[1]
    left, top = (wide - side) // 2, (high - side) // 2
    box = (left * width / wide, top * height / high, (left + side) * width / wide, (top + side) * height / high)
    return image.resize((side, side), import_pillow().Resampling[shape.resample.upper()], box=box)


def _format_reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def read_idx(path: Path, dimensions: Literal[1, 3]) -> Array:
    """Read an idx file of bytes, compressed or not: labels (N,), or images (N, rows, columns)."""
    content = b"".join(InputFile(path).read_blocks())
    magic, header_bytes = bytes((0, 0, 8, dimensions)), 4 + 4 * dimensions
    if not content.startswith(magic) or len(content) < header_bytes:
        kind, begin = "images" if dimensions == 3 else "labels", content[:4].hex(" ") or "nothing"
        header = magic.hex(" ")
        raise ImageError(f"{path}: must be an idx file of {kind}, with the header {header}, but begins with {begin}")
    sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    if not all(sizes) or (dimensions == 3 and max(sizes[1:]) > 4096):
        listed = " x ".join(map(str, sizes))
        raise ImageError(f"{path}: must have images of 1 to 4096 pixels a side, but its header says {listed}")
    expected, actual = math.prod(sizes), len(content) - header_bytes
    if actual != expected:
        raise ImageError(f"{path}: must have {expected:,} bytes after its header, but has {actual:,}; get it again")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(sizes)


def pad_or_resize(images: Array, shape: ImageShape) -> Array:
    """(n, rows, columns) -> (n, C, S, S): slightly smaller images get a black border, others are resized."""
    count, rows, columns = images.shape
    if 0 <= shape.size - max(rows, columns) < 4:
        square = np.zeros((count, 1, shape.size, shape.size), np.uint8)
        top, left = (shape.size - rows) // 2, (shape.size - columns) // 2
        square[:, 0, top : top + rows, left : left + columns] = images
    else:
        Image = import_pillow()
        square = np.stack([np.asarray(resize_image(Image.fromarray(image), shape))[None] for image in images])
    return np.repeat(square, shape.channels, 1)


def prepare_images(split: ImageSplit, shape: ImageShape, root: str | Path) -> ImageDataset:
    """Return a split as bytes of one size; image files come from a store in `root` that is built if missing."""
    return read_idx_split(split, shape) if isinstance(split, IdxSplit) else prepare_files(split, shape, Path(root))


def read_idx_split(split: IdxSplit, shape: ImageShape) -> ImageDataset:
    images, labels = read_idx(split.images, 3), read_idx(split.labels, 1).astype("<i4")
    if len(labels) != len(images):
        required = f"a label for each of the {len(images):,} images of {split.images.name}"
        raise ImageError(f"{split.labels}: must have {required}, but has {len(labels):,}; are they of one dataset?")
    pixels, names = pad_or_resize(images, shape), tuple(map(str, range(int(labels.max()) + 1)))
    digest = hashlib.sha256(repr((shape, names)).encode() + labels.tobytes())
    digest.update(pixels.data)
    return ImageDataset(split.name, pixels, labels, names, store_key=f"images-{digest.hexdigest()[:24]}")


def prepare_files(split: FolderSplit, shape: ImageShape, root: Path) -> ImageDataset:
    """Decode image files. Bad ones are skipped, but each class must have one that can be read."""
    versions = (f"{stamp_file(path)} {label}" for path, label in split.files)
    key = compute_media_key([STORE_VERSION, asdict(shape), split.classes], versions)
    paths = [path for path, _ in split.files]
    with warnings.catch_warnings(action="ignore"):
        decode, folder = partial(read_pixels, shape=shape), root / f"images-{key}"
        values, entries = prepare_media_store(paths, decode, "<u1", folder)
    skipped = tuple(entry for entry in entries if isinstance(entry, str))
    files = zip(split.files, entries, strict=True)
    labels = np.array([label for (_, label), entry in files if not isinstance(entry, str)], "<i4")
    if not len(labels):
        example = f"of its {len(skipped):,} files none can be read, such as {skipped[0]}"
        raise ImageError(f"{split.name}: must have images, but {example}")
    missing = sorted(set(range(len(split.classes))) - set(labels.tolist()))
    if missing:
        raise ImageError(f"{split.folder / split.classes[missing[0]]}: must have images, but none can be read")
    pixels = values.reshape(len(labels), shape.channels, shape.size, shape.size)
    return ImageDataset(split.name, pixels, labels, split.classes, skipped, store_key=folder.name)


def remap_labels(dataset: ImageDataset, class_names: Sequence[str]) -> ImageDataset:
    """Number the labels as a model's classes."""
    used = {dataset.class_names[label] for label in set(dataset.item_labels.tolist())}
    unknown = sorted(used - set(class_names))
    if unknown:
        known = ", ".join(class_names[:8]) + (" ..." if len(class_names) > 8 else "")
        problem = f"its classes must be among those of the model ({known}), but `{unknown[0]}` is not"
        raise ImageError(f"{dataset.name}: {problem}; is it another dataset?")
    mapping = [class_names.index(name) if name in class_names else -1 for name in dataset.class_names]
    return replace(dataset, labels=np.array(mapping, np.int64)[dataset.labels], class_names=tuple(class_names))


def hold_out_images(dataset: ImageDataset, count: int, seed: int) -> tuple[ImageDataset, ImageDataset]:
    """Return (the rest, about `count` images), stratified by label and drawn by the seed."""
    rng = np.random.default_rng((seed, 0x1D))
    labels = dataset.item_labels
    held_out: list[Array] = []
    for label in range(len(dataset.class_names)):
        indices = rng.permutation(np.flatnonzero(labels == label))
        share = min(round(count * len(indices) / len(labels)), len(indices) - 1)
        held_out.append(indices[: max(0, share)])
    chosen = np.sort(np.concatenate(held_out))
    rest = np.setdiff1d(np.arange(len(labels)), chosen, assume_unique=True)
    return dataset.select(rest), dataset.select(chosen)


def compute_channel_stats(dataset: ImageDataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of pixels from 0 to 1; a large dataset is sampled."""
    indices = np.arange(0, len(dataset), max(1, len(dataset) // MAX_STATS_IMAGES))
    counts = np.zeros((dataset.pixels.shape[1], 256))
    for start in range(0, len(indices), 256):
        pixels, _ = dataset.take(indices[start : start + 256])
        for channel, histogram in enumerate(counts):
            histogram += np.bincount(pixels[:, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    shares = counts / counts.sum(1, keepdims=True)
    means = shares @ values
    deviations = np.sqrt(np.maximum(shares @ values**2 - means**2, 1e-6))
    return tuple(round(float(x), 4) for x in means), tuple(round(float(x), 4) for x in deviations)
