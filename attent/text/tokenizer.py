"""A model's tokenizer: both sides' vocabularies and the files that they come from, saved and loaded together.

How one side turns text into numbers is `vocabulary`'s; training is `train`'s; formats of others are `foreign`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from attent.text import files as disk
from attent.text import foreign
from attent.text.vocabulary import END, PAD, START, UNKNOWN, Sampling, TokenizerError, Vocabulary

__all__ = ["END", "PAD", "START", "UNKNOWN", "Sampling", "Tokenizer", "TokenizerError", "Vocabulary"]

JOINT = ("tokenizer.model",)
SEPARATE = ("source.model", "target.model")


class Layout(NamedTuple):
    """The files of one way to store a tokenizer."""

    needs: tuple[str, ...]
    may: tuple[str, ...]
    read: Callable[[Mapping[str, bytes], str], tuple[Vocabulary, Vocabulary]]


LAYOUTS = (  # the first that fits is taken: SentencePiece's own files rather than what was made from them
    Layout(SEPARATE, (), foreign.separate),
    Layout(("source.spm", "target.spm", "vocab.json"), ("target_vocab.json",), foreign.marian),
    Layout(JOINT, (foreign.CONFIG, foreign.MAP, foreign.ADDED, foreign.FAST), foreign.plain),
    Layout(("spiece.model",), (foreign.CONFIG,), foreign.t5),
    Layout((foreign.FAST,), (foreign.CONFIG, foreign.MAP), foreign.fast),
    Layout(("merges.txt", "vocab.json"), (foreign.CONFIG, foreign.MAP, foreign.ADDED), foreign.gpt2),
    Layout(("vocab.txt",), (foreign.CONFIG, foreign.MAP), foreign.bert),
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
        for layout in LAYOUTS:
            if layout.needs[0] in files:
                missing = [name for name in layout.needs if name not in files]
                if missing:
                    raise TokenizerError(f"{where}{missing[0]}: is missing beside {layout.needs[0]}; copy it there too")
                return cls(*layout.read(files, where), files)
        looked_for = ", ".join(layout.needs[0] for layout in LAYOUTS)
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

    def encode_source(self, texts: Sequence[str], to: str | None = None) -> list[list[int]]:
        """Ids and the end; before them, with `to`, the tag of the language to translate into."""
        return framed(self.source.encode(texts), self.source, to)

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids and the end. What a decoder starts from (`target.start`) is not text and is left to the batches."""
        return framed(self.target.encode(texts), self.target)

    def sample_source(
        self, texts: Sequence[str], sampling: Sampling, seed: int, to: str | None = None
    ) -> list[list[int]]:
        """Like `encode_source`, segmented by chance: a pure function of its arguments, in every process."""
        return framed(self.source.sample(texts, sampling, 2 * seed), self.source, to)

    def sample_target(self, texts: Sequence[str], sampling: Sampling, seed: int) -> list[list[int]]:
        # Seeds of the two sides differ, or both would cut the same word of a joint vocabulary at the same places.
        return framed(self.target.sample(texts, sampling, 2 * seed + 1), self.target)

    def save(self, folder: Path) -> None:
        """Writes the files; a crash meanwhile leaves the old ones or the new ones."""
        disk.write(folder, self.files)
        for stale in {*JOINT, *SEPARATE} - self.files.keys():
            (folder / stale).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a folder, ours or that of an imported model."""
        folder = Path(folder)
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise TokenizerError(f"{folder}: must be a model's folder, but {problem}; give one that holds a tokenizer")
        for layout in LAYOUTS:
            files = disk.read(folder, layout.needs + layout.may)
            if layout.needs[0] in files:
                return cls.from_files(files, f"{folder}/")
        return cls.from_files({}, str(folder))


def framed(rows: list[list[int]], vocabulary: Vocabulary, to: str | None = None) -> list[list[int]]:
    for row in rows:
        row.append(vocabulary.end)
    if to is None:
        return rows
    tag = vocabulary.tag(to)
    return [[tag, *row] for row in rows]
