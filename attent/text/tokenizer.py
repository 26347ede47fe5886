"""The tokenizer of a model: the vocabularies of both sides, and their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from attent.storage.atomic import find_file, write_files
from attent.text import tokenizer_formats as formats
from attent.text.vocabulary import SentencePieceVocabulary, TokenizerError, Vocabulary

__all__ = ["Tokenizer", "TokenizerError", "Vocabulary"]

JOINT_FILES = ("tokenizer.model",)
SEPARATE_FILES = ("source.model", "target.model")
MAX_FILE_BYTES = 128 * 2**20  # the largest published tokenizers have about 35 MB


class TokenizerFormat(NamedTuple):
    """The files of a tokenizer format, and the function that loads them."""

    required_files: tuple[str, ...]
    optional_files: tuple[str, ...]
    load: Callable[[Mapping[str, bytes], str], tuple[Vocabulary, Vocabulary]]


_CONFIG = (formats.CONFIG_FILE, formats.SPECIAL_TOKENS_FILE)
TOKENIZER_FORMATS = (  # the first match wins; SentencePiece files take precedence over files derived from them
    TokenizerFormat(SEPARATE_FILES, (), formats.load_separate),
    TokenizerFormat(("source.spm", "target.spm", "vocab.json"), ("target_vocab.json",), formats.load_marian),
    TokenizerFormat(
        JOINT_FILES,
        (formats.FORMAT_FILE, *_CONFIG, formats.ADDED_TOKENS_FILE, formats.FAST_TOKENIZER_FILE),
        formats.load_sentencepiece,
    ),
    TokenizerFormat(("spiece.model",), (formats.CONFIG_FILE,), formats.load_t5),
    TokenizerFormat((formats.FAST_TOKENIZER_FILE,), _CONFIG, formats.load_fast),
)


@dataclass(frozen=True)
class Tokenizer:
    """Encodes source and target texts. With a joint vocabulary, both sides are one object."""

    source: Vocabulary = field(compare=False)
    target: Vocabulary = field(compare=False)
    files: Mapping[str, bytes] = field(repr=False)  # name -> content; they determine the ids

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], where: str = "") -> Tokenizer:
        """Load a tokenizer from file contents; `where` prefixes the names in errors."""
        for layout in TOKENIZER_FORMATS:
            if layout.required_files[0] in files:
                missing = [name for name in layout.required_files if name not in files]
                if missing:
                    raise TokenizerError(f"{where}{missing[0]}: is missing; {layout.required_files[0]} needs it")
                files = {name: files[name] for name in layout.required_files + layout.optional_files if name in files}
                if layout.required_files == JOINT_FILES:
                    files = {formats.FORMAT_FILE: encode_format(formats.FOREIGN_FORMAT)} | files
                return cls(*layout.load(files, where), files)
        names = ", ".join(layout.required_files[0] for layout in TOKENIZER_FORMATS)
        raise TokenizerError(
            f"{where or 'the folder'}: has no tokenizer; it must have one of {names} (which `save_pretrained` of "
            "transformers writes)"
        )

    def __reduce__(self) -> tuple[object, tuple[dict[str, bytes]]]:
        return Tokenizer.from_files, (dict(self.files),)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def joint(self) -> bool:
        return self.source is self.target

    @property
    def is_own(self) -> bool:
        """True if attent trained it."""
        return isinstance(self.source, SentencePieceVocabulary) and self.source.is_own

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the files; a cache key for encoded data."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()

    def encode_source(self, texts: Sequence[str], target_language: str | None = None) -> list[list[int]]:
        """Encode texts, with the end token and, for `target_language`, its tag before them."""
        return add_end_and_tag(self.source.encode(texts), self.source, target_language)

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, with the end token; the start token is added by `shift_right`."""
        return add_end_and_tag(self.target.encode(texts), self.target)

    def sample_source(
        self, texts: Sequence[str], rate: float, seed: int, target_language: str | None = None
    ) -> list[list[int]]:
        """Encode with a random segmentation, which is a pure function of the arguments in every process."""
        return add_end_and_tag(self.source.sample(texts, rate, 2 * seed), self.source, target_language)

    def sample_target(self, texts: Sequence[str], rate: float, seed: int) -> list[list[int]]:
        # Another seed than the source's, or a word in both would be segmented equally.
        return add_end_and_tag(self.target.sample(texts, rate, 2 * seed + 1), self.target)

    def save(self, folder: Path) -> None:
        """Write the files atomically."""
        write_files(folder, self.files)
        for stale in {*JOINT_FILES, *SEPARATE_FILES, formats.FORMAT_FILE} - self.files.keys():
            (folder / stale).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a model folder, of attent or Hugging Face."""
        folder = Path(folder)
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise TokenizerError(f"{folder}: must be a model folder, but {problem}; give another")
        for layout in TOKENIZER_FORMATS:
            files = read_files(folder, layout.required_files + layout.optional_files)
            if layout.required_files[0] in files:
                return cls.from_files(files, f"{folder}/")
        return cls.from_files({}, str(folder))


def read_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read those files that exist."""
    paths = {name: find_file(folder, name, names) for name in names}
    paths = {name: path for name, path in paths.items() if path.exists()}
    for path in paths.values():
        if not path.is_file():
            raise TokenizerError(f"{path}: must be a file, but is not; copy the model again")
        if path.stat().st_size > MAX_FILE_BYTES:
            limit = MAX_FILE_BYTES // 2**20
            raise TokenizerError(f"{path}: must have at most {limit} MiB, but has more; is it a tokenizer?")
    return {name: path.read_bytes() for name, path in paths.items()}


def add_end_and_tag(
    rows: list[list[int]], vocabulary: Vocabulary, target_language: str | None = None
) -> list[list[int]]:
    for row in rows:
        row.append(vocabulary.end)
    if target_language is None:
        return rows
    tag = vocabulary.get_tag_id(target_language)
    return [[tag, *row] for row in rows]


def has_tokenizer(names: Container[str]) -> bool:
    """True if the file names include those of a tokenizer; an image model has none."""
    return any(layout.required_files[0] in names for layout in TOKENIZER_FORMATS)


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer of a folder; None if it holds none, as that of an image model."""
    return Tokenizer.load(folder) if has_tokenizer({path.name for path in folder.glob("*")}) else None


def build_own_files(model: bytes) -> dict[str, bytes]:
    """Return the files of a joint tokenizer that attent has trained."""
    return {JOINT_FILES[0]: model, formats.FORMAT_FILE: encode_format(formats.OWN_FORMAT)}


def encode_format(name: str) -> bytes:
    return json.dumps({"format": name}).encode()
