"""Images with captions, one or more rows for each, from .tsv files; `images` decodes and stores the images."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from attent.data.arrays import Array
from attent.data.formats.tsv import unquote_cell
from attent.data.images import FolderSplit, ImageDataset, ImageShape, prepare_images
from attent.data.pairs import CorpusError
from attent.data.text_corpus import read_text_file
from attent.text.language_tags import LANGUAGE_TAG

SUFFIXES = (".tsv", ".tab")
COLUMNS = {
    "image": ("image", "path", "file", "filename", "file_name", "image_path", "audio", "wav_filename"),
    "text": ("text", "caption", "sentence", "description", "transcript", "transcription", "translation"),
    "language": ("language", "lang", "locale"),
}
LINE_FORMAT = "a line is image<TAB>text, and a header names other columns"


@dataclass(frozen=True)
class CaptionItem:
    """An image to caption in one language, and its references."""

    image_id: int
    language: str | None
    references: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CaptionRows:
    name: str
    files: tuple[Path, ...]
    paths: tuple[Path, ...]  # of the images, without duplicates
    locations: tuple[str, ...] = field(repr=False)  # the first row of each image: captions.tsv:17
    image_ids: Array = field(repr=False)  # the image of each row
    texts: tuple[str, ...] = field(repr=False)
    languages: tuple[str | None, ...] = field(repr=False)  # of each row
    skipped: tuple[str, ...] = ()  # a sentence for each row that is left out

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def split(self) -> FolderSplit:
        """The images, each with its number as the label."""
        files = tuple((path, number) for number, path in enumerate(self.paths))
        return FolderSplit(self.name, self.files[0].parent, (), files)

    def select_images(self, indices: Array) -> Self:
        new_ids = np.full(len(self.paths), -1)
        new_ids[indices] = np.arange(len(indices))
        rows = np.flatnonzero(new_ids[self.image_ids] >= 0).tolist()
        return replace(
            self,
            paths=tuple(self.paths[i] for i in indices.tolist()),
            locations=tuple(self.locations[i] for i in indices.tolist()),
            image_ids=new_ids[self.image_ids[rows]],
            texts=tuple(self.texts[i] for i in rows),
            languages=tuple(self.languages[i] for i in rows),
        )

    def list_items(self) -> list[CaptionItem]:
        """Return each image once for each language of its captions, with these as references."""
        references: dict[tuple[int, str | None], list[str]] = {}
        for image_id, language, text in zip(self.image_ids.tolist(), self.languages, self.texts, strict=True):
            references.setdefault((image_id, language), []).append(text)
        return [CaptionItem(image_id, language, tuple(texts)) for (image_id, language), texts in references.items()]


@dataclass(frozen=True, kw_only=True)
class CaptionDataset(CaptionRows):
    images: ImageDataset

    @property
    def store_key(self) -> str:
        return self.images.store_key

    def select_images(self, indices: Array) -> Self:
        return replace(super().select_images(indices), images=self.images.select(indices))


def read_captions(files: Sequence[Path], *, check_images: bool = True) -> CaptionRows:
    images: dict[Path, tuple[int, str]] = {}  # number and location
    rows: list[tuple[int, str, str | None]] = []
    skipped: list[str] = []
    for file in files:
        for number, cells in _read_cells(file):
            image, text, language = (cell.strip() for cell in cells)
            path = file.parent / Path(image).expanduser()
            problem = "has no image" if not image else "has no text" if not text else ""
            if check_images and not problem and path not in images and not path.exists():
                problem = f"{image} does not exist"
            if problem:
                skipped.append(f"{file}:{number}: {problem}")
            else:
                image_id, _ = images.setdefault(path, (len(images), f"{file}:{number}"))
                rows.append((image_id, text, language or None))
    name = ", ".join(map(str, files))
    if not rows:
        reason = f"{skipped[0]}; {LINE_FORMAT}" if skipped else "it is empty"
        raise CorpusError(f"{name}: must have images with captions, but has none: {reason}")
    image_ids, texts, languages = zip(*rows, strict=True)
    return CaptionRows(
        name=name,
        files=tuple(files),
        paths=tuple(images),
        locations=tuple(location for _, location in images.values()),
        image_ids=np.array(image_ids),
        texts=texts,
        languages=languages,
        skipped=tuple(skipped),
    )


def find_columns(header: Sequence[str]) -> dict[str, int]:
    names = [name.strip().lower() for name in header]
    columns = {key: next((names.index(name) for name in known if name in names), -1) for key, known in COLUMNS.items()}
    return columns if min(columns["image"], columns["text"]) >= 0 else {}


def _read_cells(file: Path) -> list[tuple[int, list[str]]]:
    """Return image, text and language ("" if there is none) of each line, with its number."""
    lines = [
        (number, [unquote_cell(cell.strip()) for cell in line.split("\t")])
        for number, line in enumerate(read_text_file(file).split("\n"), 1)
        if line.strip()
    ]
    columns = find_columns(lines[0][1] if lines else [])
    if columns:
        lines = lines[1:]
    else:
        columns = {"image": 0, "text": 1, "language": -1}
        width = max((len(cells) for _, cells in lines), default=2)
        if width == 3 and all(re.fullmatch(LANGUAGE_TAG, cell) for _, cells in lines for cell in cells[2:]):
            columns["language"] = 2
        elif width > 2:
            problem = f"must have an image and a text in a line, but has {width} columns"
            raise CorpusError(f"{file}: {problem}; {LINE_FORMAT}")
    return [(number, [cells[i] if 0 <= i < len(cells) else "" for i in columns.values()]) for number, cells in lines]


def prepare_captions(rows: CaptionRows, shape: ImageShape, root: Path) -> CaptionDataset:
    """Decode the images, into a store in `root` that is built if missing; rows of bad images are left out."""
    images = prepare_images(rows.split, shape, root)
    readable = vars(rows.select_images(images.item_labels))
    return CaptionDataset(**readable | {"images": images, "skipped": (*rows.skipped, *images.skipped)})
