"""A model's tokenizer: both sides' vocabularies and the files that they come from, saved and loaded together.

How one side turns text into numbers is `vocabulary`'s; training is `train`'s; formats of others are `foreign`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from attent.storage.atomic import write_files
from attent.text import tokenizer_formats
from attent.text.tokenizer_files import read_files
from attent.text.vocabulary import END, PAD, START, UNKNOWN, SubwordSampling, TokenizerError, Vocabulary

__all__ = ["END", "PAD", "START", "UNKNOWN", "SubwordSampling", "Tokenizer", "TokenizerError", "Vocabulary"]

JOINT_FILES = ("tokenizer.model",)
SEPARATE_FILES = ("source.model", "target.model")


class TokenizerFormat(NamedTuple):
    """The files of one way to store a tokenizer."""

    required_files: tuple[str, ...]
    optional_files: tuple[str, ...]
    load: Callable[[Mapping[str, bytes], str], tuple[Vocabulary, Vocabulary]]


TOKENIZER_FORMATS = (  # the first that fits is taken: SentencePiece's own files rather than what was made from them
    TokenizerFormat(SEPARATE_FILES, (), tokenizer_formats.load_separate),
    TokenizerFormat(("source.spm", "target.spm", "vocab.json"), ("target_vocab.json",), tokenizer_formats.load_marian),
    TokenizerFormat(
        JOINT_FILES,
        (
            tokenizer_formats.CONFIG_FILE,
            tokenizer_formats.SPECIAL_TOKENS_FILE,
            tokenizer_formats.ADDED_TOKENS_FILE,
            tokenizer_formats.FAST_TOKENIZER_FILE,
        ),
        tokenizer_formats.load_sentencepiece,
    ),
    TokenizerFormat(("spiece.model",), (tokenizer_formats.CONFIG_FILE,), tokenizer_formats.load_t5),
    TokenizerFormat(
        (tokenizer_formats.FAST_TOKENIZER_FILE,),
        (tokenizer_formats.CONFIG_FILE, tokenizer_formats.SPECIAL_TOKENS_FILE),
        tokenizer_formats.load_fast,
    ),
    TokenizerFormat(
        ("merges.txt", "vocab.json"),
        (tokenizer_formats.CONFIG_FILE, tokenizer_formats.SPECIAL_TOKENS_FILE, tokenizer_formats.ADDED_TOKENS_FILE),
        tokenizer_formats.load_gpt2,
    ),
    TokenizerFormat(
        ("vocab.txt",),
        (tokenizer_formats.CONFIG_FILE, tokenizer_formats.SPECIAL_TOKENS_FILE),
        tokenizer_formats.load_bert,
    ),
)


@dataclass(frozen=True)
class Tokenizer:
    """Turns text of the source and of the target language into ids. With a joint vocabulary both are one object."""

    source: Vocabulary = field(compare=False)
    target: Vocabulary = field(compare=False)
    files: Mapping[str, bytes] = field(repr=False)  # name -> content: all that decides the ids

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], where: str = "") -> Tokenizer:
        """The tokenizer that these contents make, by the files' names; errors put `where` before those."""
        for layout in TOKENIZER_FORMATS:
            if layout.required_files[0] in files:
                missing = [name for name in layout.required_files if name not in files]
                if missing:
                    raise TokenizerError(
                        f"{where}{missing[0]}: is missing beside {layout.required_files[0]}; copy it there too"
                    )
                return cls(*layout.load(files, where), files)
        looked_for = ", ".join(layout.required_files[0] for layout in TOKENIZER_FORMATS)
        raise TokenizerError(f"{where or 'the folder'}: holds no tokenizer; looked for {looked_for}")

    def __reduce__(self) -> tuple[object, tuple[dict[str, bytes]]]:
        return Tokenizer.from_files, (dict(self.files),)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def joint(self) -> bool:
        return self.source is self.target

    @property
    def fingerprint(self) -> str:
        """sha256 of the files: a key for what was encoded with them."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()

    def encode_source(self, texts: Sequence[str], target_language: str | None = None) -> list[list[int]]:
        """Ids and the end; before them, with `to`, the tag of the language to translate into."""
        return add_end_and_tag(self.source.encode(texts), self.source, target_language)

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids and the end. What a decoder starts from (`target.start`) is not text and is left to the batches."""
        return add_end_and_tag(self.target.encode(texts), self.target)

    def sample_source(
        self, texts: Sequence[str], sampling: SubwordSampling, seed: int, target_language: str | None = None
    ) -> list[list[int]]:
        """Like `encode_source`, segmented by chance: a pure function of its arguments, in every process."""
        return add_end_and_tag(self.source.sample(texts, sampling, 2 * seed), self.source, target_language)

    def sample_target(self, texts: Sequence[str], sampling: SubwordSampling, seed: int) -> list[list[int]]:
        # Seeds of the two sides differ, or both would cut the same word of a joint vocabulary at the same places.
        return add_end_and_tag(self.target.sample(texts, sampling, 2 * seed + 1), self.target)

    def save(self, folder: Path) -> None:
        """Writes the files; a crash meanwhile leaves the old ones or the new ones."""
        write_files(folder, self.files)
        for stale in {*JOINT_FILES, *SEPARATE_FILES} - self.files.keys():
            (folder / stale).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a folder, ours or that of an imported model."""
        folder = Path(folder)
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise TokenizerError(f"{folder}: must be a model's folder, but {problem}; give one that holds a tokenizer")
        for layout in TOKENIZER_FORMATS:
            files = read_files(folder, layout.required_files + layout.optional_files)
            if layout.required_files[0] in files:
                return cls.from_files(files, f"{folder}/")
        return cls.from_files({}, str(folder))


def add_end_and_tag(
    rows: list[list[int]], vocabulary: Vocabulary, target_language: str | None = None
) -> list[list[int]]:
    for row in rows:
        row.append(vocabulary.end)
    if target_language is None:
        return rows
    tag = vocabulary.get_tag_id(target_language)
    return [[tag, *row] for row in rows]


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer of a folder; None if it holds none, as that of an image model."""
    has_files = any((folder / layout.required_files[0]).exists() for layout in TOKENIZER_FORMATS)
    return Tokenizer.load(folder) if has_files else None
