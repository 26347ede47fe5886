"""Images and what each shows, as bytes of one size: idx files (MNIST and its kin), or a folder of pictures per class.

    a folder of train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-... (the test set)
    cat/*.jpg dog/*.jpg ...      or with the parts told apart: train/cat/*.jpg valid/cat/*.jpg test/cat/*.jpg

They are read once into memory-mapped arrays, found again by what the files are. Only pictures need Pillow. Batches, and
what chance does to images in training, are `attent.train.images`'s.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from attent import settings
from attent.data.arrays import Array
from attent.data.file_hashes import hash_file
from attent.data.pairs import CorpusError
from attent.storage.cache import build_folder

if TYPE_CHECKING:
    from torch import Tensor

    from attent.models import VisionConfig

STORE_VERSION = 2  # part of the key of a store: raised when the same files give other bytes
META_FILE, PIXELS_FILE, LABELS_FILE = "images.json", "pixels", "labels"
IMAGE_SUFFIXES = frozenset(".png .jpg .jpeg .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .avif .jp2".split())
SPLIT_NAMES = {  # what a part is called, as a folder and as a word in the name of an idx file
    "train": ("train", "training"),
    "valid": ("valid", "val", "validation", "dev"),
    "test": ("test", "t10k", "testing", "eval"),
}
CLASS_NAMES_FILE = "labels.txt"  # beside idx files, whose labels are numbers: a name a line, if anybody has written it
PHOTO_SIZE = 224  # pixels of a side, for photographs; small pictures keep their size
MAX_PIXELS = 2**27  # of a picture: what unpacks to more is no picture to learn from
SIZE_SAMPLE = 64  # pictures whose size is asked for
IDX_BLOCK_BYTES = 2**20  # bytes of an idx file
DECODE_BATCH = 256  # pictures in memory while a store is made
MAX_LISTED_FILES = 3  # bad pictures that are named
MAX_STATS_IMAGES = 20_000  # images that the mean is taken of


class ImageError(CorpusError):
    """Images that cannot be read: which file, what was wrong and what to do next."""


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig:
    """What becomes of images before a model reads them, and what chance does to them while it learns."""

    image_size: Annotated[int | None, "pixels of a side that images are brought to; by default what suits theirs"] = (
        None
    )
    channels: Annotated[Literal[1, 3] | None, "1: grey, 3: colour; by default as they are"] = None
    flip: Annotated[float, "chance that an image is mirrored; 0 where left and right matter, as in writing"] = 0.5
    shift: Annotated[float, "share of its side by which an image is moved at most, each way"] = 0.1
    erase: Annotated[float, "chance that a rectangle of it is covered with noise"] = 0.25
    mixup: Annotated[float, "alpha of Beta(alpha, alpha), by which two images are laid over each other; 0: none"] = 0.0

    def __post_init__(self) -> None:
        if self.image_size is not None and not 4 <= self.image_size <= 4096:
            raise ValueError(f"`image_size` must be from 4 to 4096 pixels, but is {self.image_size}")
        for name in ("flip", "shift", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be from 0 to 1, but is {getattr(self, name)}")
        if not 0 <= self.mixup < float("inf"):
            raise ValueError(f"`mixup` must be 0 or more, but is {self.mixup}")


@dataclass(frozen=True)
class ImageShape:
    """What all images are brought to, and how; what is not said is said in `VisionConfig`."""

    size: int  # pixels of a side
    channels: int
    fit: Literal["crop", "squash"] = "crop"
    resize_to: int | None = None
    resample: Literal["bilinear", "bicubic"] = "bilinear"

    @classmethod
    def from_config(cls, config: VisionConfig) -> ImageShape:
        """As a model reads them."""
        return cls(config.image_size, config.channels, config.fit, config.resize_to, config.resample)


@dataclass(frozen=True)
class IdxSplit:
    """A part of a set in idx files."""

    images: Path
    labels: Path

    @property
    def name(self) -> str:
        return str(self.images)


@dataclass(frozen=True)
class FolderSplit:
    """A part of a set that is a folder with a folder for each class."""

    folder: Path
    classes: tuple[str, ...]
    files: tuple[tuple[Path, int], ...] = field(repr=False)  # each with the number of its class

    @property
    def name(self) -> str:
        return str(self.folder)


ImageSplit = IdxSplit | FolderSplit


@dataclass(frozen=True)
class ImageDataset:
    """Images as numbers, and what each shows. Only what is used comes into memory."""

    name: str
    pixels: Array = field(repr=False)  # (N, C, S, S) of bytes
    labels: Array = field(repr=False)  # (N,), places in `names`
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = ()  # a sentence for each file that is no image
    indices: Array | None = field(default=None, repr=False)  # those that belong to it; None: all
    store_key: str = ""  # of the store

    def __len__(self) -> int:
        return len(self.pixels) if self.indices is None else len(self.indices)

    def take(self, indices: Array) -> tuple[Array, Array]:
        """Some of them: pixels and labels."""
        rows = indices if self.indices is None else self.indices[indices]
        return self.pixels[rows], self.labels[rows].astype(np.int64)

    def select(self, indices: Array) -> ImageDataset:
        """A part of these, as a set of its own."""
        return replace(self, indices=indices if self.indices is None else self.indices[indices])

    @property
    def item_labels(self) -> Array:
        """The label of each."""
        return np.asarray(self.labels if self.indices is None else self.labels[self.indices], np.int64)


# --- finding ---------------------------------------------------------------------------------------------------------


def find_splits(data_path: str | Path) -> dict[str, ImageSplit]:
    """The parts of what a person named, by train, valid and test; a set without parts is `train` alone."""
    root = Path(data_path).expanduser()
    if root.is_file():
        return {"train": open_idx_split(root)}
    if not root.is_dir():
        raise ImageError(f"{data_path}: must be a folder of images, but does not exist; check its name")
    if found := find_idx_splits(root):
        return found if len(found) > 1 else {"train": next(iter(found.values()))}
    check_images_present(root)
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}
    parts = {part: folders[name] for part, names in SPLIT_NAMES.items() for name in names if name in folders}
    if "train" in parts and is_split_folder(parts["train"]):
        return {part: open_split(path) for part, path in parts.items()}
    return {"train": open_folder_split(root)}


def is_split_folder(folder: Path) -> bool:
    """Trains may well be a class, beside cars and buses: a part has classes in it, or idx files."""
    return any(
        (path.is_dir() and not path.name.startswith(".")) or is_idx_file(path, "images") for path in folder.iterdir()
    )


def find_idx_splits(root: Path) -> dict[str, ImageSplit]:
    """By what their names say. A file may lie there packed and unpacked; two sets in one folder may not."""
    found: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        if not is_idx_file(path, "images"):
            continue
        part = get_split_name(path)
        other = found.setdefault(part, path)
        if other.name.removesuffix(".gz") != path.name.removesuffix(".gz"):
            raise ImageError(
                f"{root}: must hold one idx file of images for each part, but {other.name} and {path.name} are both "
                f"for its part `{part}`; put each set into a folder of its own"
            )
    return {part: open_idx_split(path) for part, path in found.items()}


def check_images_present(root: Path) -> None:
    labels = next((path for path in sorted(root.iterdir()) if is_idx_file(path, "labels")), None)
    if labels is not None:
        images = labels.name.replace("labels", "images").replace("idx1", "idx3")
        raise ImageError(f"{labels}: must have its images beside it, as {images}, but has none; put them there")


def open_split(path: Path) -> ImageSplit:
    idx = find_idx_splits(path)
    if len(idx) > 1:
        told = " and ".join(part.name for part in idx.values())
        raise ImageError(f"{path}: must hold one part of a set, but holds {told}; name the folder itself")
    return next(iter(idx.values()), None) or open_folder_split(path)


def is_idx_file(path: Path, kind: str) -> bool:
    name = path.name.lower().removesuffix(".gz")
    return path.is_file() and kind in name and name.endswith(("ubyte", ".idx", ".idx1", ".idx3"))


def get_split_name(path: Path) -> str:
    words = re.split(r"[^a-z0-9]+", path.name.lower())
    return next((part for word in words for part, names in SPLIT_NAMES.items() if word in names), "train")


def open_idx_split(images: Path) -> IdxSplit:
    """The labels of images lie beside them, under the same name."""
    if not is_idx_file(images, "images"):
        raise ImageError(f"{images}: must be a folder of images, or an idx file of them, but is another file")
    bare = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for name in (f"{bare}.gz", bare):
        if (images.parent / name).is_file():
            return IdxSplit(images, images.parent / name)
    raise ImageError(f"{images}: must have its labels beside it, as {bare} or {bare}.gz, but has none; put them there")


def open_folder_split(folder: Path) -> FolderSplit:
    """A folder with a folder for each class."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise ImageError(
            f"{folder}: must have a folder of images for each class, such as {folder.name}/cat and {folder.name}/dog, "
            "or idx files, but has neither"
        )
    files: list[tuple[Path, int]] = []
    for number, one in enumerate(classes):
        own = [path for path in sorted(one.rglob("*")) if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
        if not own:
            raise ImageError(
                f"{one}: must hold images of its class, but holds none ({', '.join(sorted(IMAGE_SUFFIXES)[:6])} ...); "
                "add some, or take the folder away"
            )
        files += [(path, number) for path in own]
    return FolderSplit(folder, tuple(path.name for path in classes), tuple(files))


# --- the size --------------------------------------------------------------------------------------------------------


def choose_shape(split: ImageSplit, config: ImageDataConfig) -> ImageShape:
    """As asked for, else what suits the images: small ones keep their size, to a multiple of 4 that patches fit in."""
    if isinstance(split, IdxSplit):
        with open_idx(split.images) as file:
            _, rows, columns = read_idx_sizes(file, split.images, 3)
        return ImageShape(config.image_size or round_up_to_four(max(rows, columns)), config.channels or 1)
    sides, grey = sample_sizes(split)
    if not sides:
        raise ImageError(f"{split.folder}: must hold images, but none of its first {SIZE_SAMPLE} can be read as one")
    side = int(np.median(sides))
    usual = (
        PHOTO_SIZE
        if side >= PHOTO_SIZE * 3 // 4
        else round_up_to_four(side)
        if min(sides) == max(sides)
        else max(8, side // 4 * 4)
    )
    return ImageShape(config.image_size or usual, config.channels or (1 if grey else 3))


def round_up_to_four(side: int) -> int:
    return -(-side // 4) * 4


def sample_sizes(split: FolderSplit) -> tuple[list[int], bool]:
    """The shorter sides of some of the pictures, and whether all of them are grey."""
    some = split.files[:: max(1, len(split.files) // SIZE_SAMPLE)][:SIZE_SAMPLE]
    sides, grey = [], True
    for path, _ in some:
        with suppress_warnings(), suppress(ImageError), open_image(path) as picture:
            sides.append(min(picture.size))
            grey = grey and (picture.mode in ("1", "L", "F") or picture.mode.startswith("I"))
    return sides, grey


# --- a picture -------------------------------------------------------------------------------------------------------


def read_image(path: str | Path, shape: ImageShape) -> Tensor:
    """A picture as a model reads it, (C, image, image) of bytes: as it is meant to be held, and brought to size."""
    import torch

    with suppress_warnings():
        return torch.from_numpy(read_pixels(Path(path).expanduser(), shape))


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Without Pillow's warnings, of too many pixels and the like: of what matters we speak ourselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_pixels(path: Path, shape: ImageShape) -> Array:
    """(C, S, S) of bytes."""
    with open_image(path) as picture:
        try:
            return convert_to_pixels(picture, shape)
        except ImageError as error:
            raise ImageError(f"{path}: {error}") from error
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # decoders of damaged files raise what they like
            why = f"must be a whole image, but is damaged ({_format_reason(error)}); get it again"
            raise ImageError(f"{path}: {why}") from error


@contextmanager
def open_image(path: Path) -> Iterator[Any]:
    """A picture of which nothing but its head has been read."""
    Image = import_pillow()
    try:
        picture = Image.open(path)
    except Image.DecompressionBombError as error:
        raise ImageError(f"{path}: {TOO_LARGE}; make it smaller first ({_format_reason(error)})") from error
    except OSError as error:
        if error.filename is not None and not isinstance(error, Image.UnidentifiedImageError):
            raise ImageError(f"{path}: must be an image, but cannot be opened ({error.strerror})") from error
        why = "must be an image, but is none that Pillow knows; is it another kind of file?"
        raise ImageError(f"{path}: {why}") from error
    except (ValueError, SyntaxError, TypeError, struct.error) as error:
        raise ImageError(f"{path}: must be an image, but cannot be read as one ({_format_reason(error)})") from error
    with picture:
        if picture.width * picture.height > MAX_PIXELS:
            size = f"{picture.width:,} x {picture.height:,}"
            raise ImageError(f"{path}: {TOO_LARGE}, but has {size}; make it smaller first")
        yield picture


TOO_LARGE = f"must have at most {MAX_PIXELS:,} pixels"


def import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImageError(
            "reading pictures needs the package `pillow`, which is not installed: pip install 'attent[images]' "
            "(idx files need nothing)"
        ) from error
    return Image


def convert_to_pixels(image: Any, shape: ImageShape) -> Array:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    fitted = resize_image(convert_channels(upright, shape.channels), shape)
    pixels = np.asarray(fitted, np.uint8)
    return np.ascontiguousarray(pixels[None] if shape.channels == 1 else pixels.transpose(2, 0, 1))


def convert_channels(image: Any, channels: int) -> Any:
    """Grey or in colour, of 8 bits; what is transparent lets white through."""
    Image = import_pillow()
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    elif image.mode in ("I", "F"):
        image = Image.fromarray(scale_to_bytes(np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("L" if channels == 1 else "RGB")


def scale_to_bytes(values: Array) -> Array:
    """Bytes of numbers whose scale no file tells: what they reach says whether white is 1, 255 or 65,535."""
    least, most = float(values.min()), float(values.max())
    if not (np.isfinite(values).all() and least >= 0 and most <= 65_535):
        told = f"from {least:g} to {most:g}" if np.isfinite([least, most]).all() else "not all numbers"
        raise ImageError(f"its pixels must be from 0 to 1, to 255 or to 65,535, but are {told}; save it as a PNG first")
    if most <= 1:
        return np.rint(values * 255).astype(np.uint8)
    return (np.rint(values) if most <= 255 else values // 256).astype(np.uint8)


def resize_image(image: Any, shape: ImageShape) -> Any:
    """The whole is brought to size, squashed or by its shorter side, and of that the middle stays. It is done in one
    step: the same pixels, but for rounding, and nothing larger on the way."""
    (width, height), side, first = image.size, shape.size, shape.resize_to or shape.size
    if (width, height) == (side, side) == (first, first):
        return image
    by = (width, height) if shape.fit == "squash" else (min(width, height),) * 2
    wide, high = first * width // by[0], first * height // by[1]
    left, top = (wide - side) // 2, (high - side) // 2
    box = (left * width / wide, top * height / high, (left + side) * width / wide, (top + side) * height / high)
    return image.resize((side, side), import_pillow().Resampling[shape.resample.upper()], box=box)


def _format_reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


# --- idx -------------------------------------------------------------------------------------------------------------


@contextmanager
def open_idx(path: Path) -> Iterator[IO[bytes]]:
    """An idx file, unpacked where it is packed; what is wrong with the packing is told with its name."""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not packed:
                yield raw
                return
            with gzip.open(raw) as file:
                yield file  # type: ignore[misc]
    except (EOFError, gzip.BadGzipFile, zlib.error, struct.error) as error:
        why = f"must be a whole gzip file, but is damaged ({_format_reason(error)}); get it again"
        raise ImageError(f"{path}: {why}") from error
    except OSError as error:
        raise ImageError(f"{path}: cannot be read ({error.strerror or _format_reason(error)})") from error


def read_idx_sizes(file: IO[bytes], path: Path, dimensions: int) -> tuple[int, ...]:
    """The head of an idx file of bytes: how many along each dimension."""
    head = file.read(4)
    if len(head) < 4 or head[:3] != b"\0\0\x08" or head[3] != dimensions:
        what = "images, with a head of 00 00 08 03" if dimensions == 3 else "labels, with a head of 00 00 08 01"
        raise ImageError(f"{path}: must be an idx file of {what}, but begins with {head.hex(' ') or 'nothing'}")
    sizes = file.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise ImageError(f"{path}: must tell its {dimensions} sizes, but ends before them; get the file again")
    found = struct.unpack(f">{dimensions}I", sizes)
    if not all(found) or (dimensions == 3 and max(found[1:]) > 4096):
        told = " x ".join(map(str, found))
        raise ImageError(f"{path}: must hold images of 1 to 4096 pixels a side, but its head tells {told}")
    return found


def read_idx_rows(path: Path, dimensions: int) -> Iterator[Array]:
    """The numbers of an idx file, some rows at a time; there must be just as many as its head tells."""
    with open_idx(path) as file:
        count, *rest = read_idx_sizes(file, path, dimensions)
        each = int(np.prod(rest, dtype=np.int64))
        some = max(1, IDX_BLOCK_BYTES // each)
        for start in range(0, count, some):
            wanted = min(some, count - start) * each
            block = file.read(wanted)
            if len(block) < wanted:
                whole = start + len(block) // each
                raise ImageError(f"{path}: must have {count:,} entries, as its head tells, but ends after {whole:,}")
            yield np.frombuffer(block, np.uint8).reshape(-1, *rest)
        if file.read(1):
            raise ImageError(f"{path}: must have {count:,} entries, as its head tells, but has more behind them")


def read_idx_labels(split: IdxSplit) -> Array:
    labels = np.concatenate(list(read_idx_rows(split.labels, 1)))
    with open_idx(split.images) as file:
        count = read_idx_sizes(file, split.images, 3)[0]
    if len(labels) != count:
        raise ImageError(
            f"{split.labels}: must have a label for each of the {count:,} images of {split.images.name}, but has "
            f"{len(labels):,}; are they of one set?"
        )
    return labels.astype("<i4")


def read_class_names(split: IdxSplit, labels: Array) -> tuple[str, ...]:
    """The numbers themselves, unless somebody has written down what they stand for."""
    count = int(labels.max()) + 1
    path = split.images.parent / CLASS_NAMES_FILE
    if not path.is_file():
        return tuple(map(str, range(count)))
    names = tuple(line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    names = names[: -1 if names and not names[-1] else None]
    if len(names) < count or len(set(names)) != len(names) or not all(names):
        raise ImageError(f"{path}: must name each of the {count} labels in a line of its own, but names {len(names)}")
    return names


def pad_or_resize(images: Array, shape: ImageShape) -> Array:
    """(n, rows, columns) -> (n, C, S, S): black around what is a little smaller, else brought to size."""
    count, rows, columns = images.shape
    if 0 <= shape.size - max(rows, columns) < 4:
        square = np.zeros((count, 1, shape.size, shape.size), np.uint8)
        top, left = (shape.size - rows) // 2, (shape.size - columns) // 2
        square[:, 0, top : top + rows, left : left + columns] = images
    else:
        Image = import_pillow()
        square = np.stack([np.asarray(resize_image(Image.fromarray(one), shape))[None] for one in images])
    return np.repeat(square, shape.channels, 1)


# --- the store -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImageStoreMeta:
    """What `images.json` tells; it is written last, so that a folder with it is whole."""

    format: int
    count: int
    size: int
    channels: int
    class_names: list[str]
    skipped: list[str]


def prepare_images(split: ImageSplit, shape: ImageShape, root: str | Path) -> ImageDataset:
    """A part as bytes of one size, in `root`: opened where it stands, else made."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"images-{compute_store_key(split, shape, root)}"

    def make(aside: Path) -> None:
        try:
            fill(aside)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def fill(aside: Path) -> None:
        writer = write_idx_pixels if isinstance(split, IdxSplit) else write_folder_pixels
        names, labels, left_out = writer(split, shape, aside / PIXELS_FILE)  # type: ignore[arg-type]
        if not len(labels):
            such = f"of its {len(left_out):,} files none can be read, such as {left_out[0]}"
            raise ImageError(f"{split.name}: must hold images, but {such}")
        (aside / LABELS_FILE).write_bytes(labels.astype("<i4").tobytes())
        meta = ImageStoreMeta(
            format=STORE_VERSION,
            count=len(labels),
            size=shape.size,
            channels=shape.channels,
            class_names=list(names),
            skipped=left_out,
        )
        (aside / META_FILE).write_text(json.dumps(asdict(meta), ensure_ascii=False), encoding="utf-8")

    return read_image_store(build_folder(folder, make, is_complete), split.name)


def compute_store_key(split: ImageSplit, shape: ImageShape, root: Path) -> str:
    """By content for the few idx files; by name, size and times for pictures, of which there may be a million."""
    facts: list[object] = [STORE_VERSION, asdict(shape)]
    if isinstance(split, IdxSplit):
        names = split.images.parent / CLASS_NAMES_FILE
        files = [split.images, split.labels, *([names] if names.is_file() else [])]
        facts += [hash_file(path, root / "digests.json") for path in files]
    else:
        digest = hashlib.sha256()
        for path, number in split.files:
            status = path.stat()
            digest.update(f"{path} {number} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode())
        facts += [split.classes, digest.hexdigest()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def write_idx_pixels(split: IdxSplit, shape: ImageShape, path: Path) -> tuple[Sequence[str], Array, list[str]]:
    labels = read_idx_labels(split)
    with open(path, "wb") as file:
        for images in read_idx_rows(split.images, 3):
            file.write(pad_or_resize(images, shape).tobytes())
    return read_class_names(split, labels), labels, []


def write_folder_pixels(split: FolderSplit, shape: ImageShape, path: Path) -> tuple[Sequence[str], Array, list[str]]:
    """One bad picture among many is left out, and told; a class of which nothing is left is not."""
    labels, left_out = [], []
    import_pillow()
    with open(path, "wb") as file, suppress_warnings(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for start in range(0, len(split.files), DECODE_BATCH):
            some = split.files[start : start + DECODE_BATCH]
            for (_, number), found in zip(
                some, pool.map(lambda one: try_read_pixels(one[0], shape), some), strict=True
            ):
                if isinstance(found, str):
                    left_out.append(found)
                else:
                    file.write(found.tobytes())
                    labels.append(number)
    missing = sorted(set(range(len(split.classes))) - set(labels))
    if labels and missing:
        raise ImageError(f"{split.folder / split.classes[missing[0]]}: must hold images, but none can be read as one")
    return split.classes, np.array(labels, "<i4"), left_out


def try_read_pixels(path: Path, shape: ImageShape) -> Array | str:
    """A picture, or the sentence that says why it is none."""
    try:
        return read_pixels(path, shape)
    except ImageError as error:
        return str(error)


def read_image_store(folder: Path, name: str) -> ImageDataset:
    meta = ImageStoreMeta(**settings.read_json(folder / META_FILE))
    shape = (meta.count, meta.channels, meta.size, meta.size)
    for path, wanted in ((folder / PIXELS_FILE, int(np.prod(shape))), (folder / LABELS_FILE, 4 * meta.count)):
        if path.stat().st_size != wanted:
            raise ImageError(f"{path} must have {wanted} bytes: delete its folder, and it is made again")
    pixels = np.memmap(folder / PIXELS_FILE, np.uint8, "r", shape=shape)
    labels = np.fromfile(folder / LABELS_FILE, "<i4")
    return ImageDataset(name, pixels, labels, tuple(meta.class_names), tuple(meta.skipped), store_key=folder.name)


def is_complete(folder: Path) -> bool:
    try:
        return len(read_image_store(folder, "")) > 0
    except (OSError, ValueError, TypeError):  # not there, or damaged
        return False


def describe_skipped(images: ImageDataset) -> str | None:
    """A sentence about the files that are no images, or None if there are none."""
    if not images.skipped:
        return None
    such = "; ".join(images.skipped[:MAX_LISTED_FILES])
    total = len(images) + len(images.skipped)
    return f"{len(images.skipped):,} of {total:,} files of {images.name} are left out: {such}"


# --- parts and numbers -----------------------------------------------------------------------------------------------


def remap_labels(images: ImageDataset, class_names: Sequence[str]) -> ImageDataset:
    """The same images, with labels numbered as those that a model has learned."""
    unknown = sorted({images.class_names[label] for label in set(images.item_labels.tolist())} - set(class_names))
    if unknown:
        raise ImageError(
            f"{images.name}: its classes must be among those learned ({', '.join(class_names[:8])}"
            f"{' ...' if len(class_names) > 8 else ''}), but `{unknown[0]}` is not; is it another set?"
        )
    places = np.array([class_names.index(name) if name in class_names else -1 for name in images.class_names], np.int64)
    return replace(images, labels=places[images.labels], class_names=tuple(class_names))


def hold_out_images(images: ImageDataset, count: int, seed: int) -> tuple[ImageDataset, ImageDataset]:
    """The rest, and about `count` of them, as many of each label as its share: the same for the same seed."""
    chance = np.random.default_rng((seed, 0x1D))
    shown = images.item_labels
    held: list[Array] = []
    for label in range(len(images.class_names)):
        own = chance.permutation(np.flatnonzero(shown == label))
        share = min(round(count * len(own) / len(shown)), len(own) - 1)
        held.append(own[: max(0, share)])
    chosen = np.sort(np.concatenate(held))
    rest = np.setdiff1d(np.arange(len(shown)), chosen, assume_unique=True)
    return images.select(rest), images.select(chosen)


def compute_channel_stats(images: ImageDataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels from 0 to 1; of very many images an even choice."""
    numbers = np.arange(0, len(images), max(1, len(images) // MAX_STATS_IMAGES))
    counts = np.zeros((images.pixels.shape[1], 256))
    for start in range(0, len(numbers), 256):
        pixels, _ = images.take(numbers[start : start + 256])
        for channel, total in enumerate(counts):
            total += np.bincount(pixels[:, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    shares = counts / counts.sum(1, keepdims=True)
    means = shares @ values
    deviations = np.sqrt(np.maximum(shares @ values**2 - means**2, 1e-6))
    return tuple(round(float(x), 4) for x in means), tuple(round(float(x), 4) for x in deviations)
