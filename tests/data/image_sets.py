"""Small image datasets for tests: idx files and a folder per class."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

from attent.data.arrays import Array


def encode_idx(array: Array) -> bytes:
    """Encode an array of bytes as an idx file."""
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def make_bar_images(count: int, side: int, seed: int) -> tuple[Array, Array]:
    """Return noise images with a bright bar, and labels: horizontal (0), vertical (1), no bar (2)."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.uint8) % 3
    images = rng.integers(0, 60, (count, side, side), np.uint8)
    for image, label in zip(images, labels, strict=True):
        start = int(rng.integers(1, side - 3))
        if label == 0:
            image[start : start + 2] = 250
        elif label == 1:
            image[:, start : start + 2] = 250
    return images, labels


def write_idx(folder: Path, count: int = 60, side: int = 8, *, test: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("train", "t10k") if test else ("train",)):
        images, labels = make_bar_images(count, side, number)
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(encode_idx(images)))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(encode_idx(labels))
    return folder


def write_class_folders(
    folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 3, side: int = 12
) -> Path:
    """Write color images into one folder per class."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 100, (side, side, 3), np.uint8)
            pixels[..., number % 3] = 240
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


CAPTIONS = {  # of the images of `make_bar_images`, by language
    "en": ("a lying bar", "a standing bar", "nothing"),
    "de": ("ein liegender Balken", "ein stehender Balken", "nichts"),
}


def write_captions(
    folder: Path, count: int = 30, side: int = 8, *, languages: tuple[str, ...] = (), seed: int = 0
) -> Path:
    """Write images of bars and train.tsv: two captions of each image, or one in each language."""
    from PIL import Image

    images, labels = make_bar_images(count, side, seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["image\ttext\tlanguage"] if languages else ["image\ttext"]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / f"{number}.png")
        if languages:
            lines += [f"{number}.png\t{CAPTIONS[language][label]}\t{language}" for language in languages]
        else:
            lines += [f"{number}.png\t{text}" for text in (CAPTIONS["en"][label], f"there is {CAPTIONS['en'][label]}")]
    (folder / "train.tsv").write_text("\n".join([*lines, ""]))
    return folder / "train.tsv"
