"""Texts as numbers: each becomes ids, kept in arrays on disk that a run which goes on only opens.

Running text is encoded in stretches that give the ids which the whole would give. What stands around a text (start and
end, [CLS] and [SEP]) is added here as it is asked for; how texts are laid into rows is left to `rows`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from attent.data.arrays import Array, ragged
from attent.data.cache import made
from attent.text.bulk import Bulk, Sentences
from attent.text.vocabulary import ESCAPE, Pieces, Vocabulary

FORMAT = 1  # part of the key: raised when the same texts give other ids
STRETCH = 2**16  # characters that are encoded at once, about
BLOCK = 4096  # texts that are encoded together
DTYPE = "<u4"
FILES = ("ids", "lengths")


@dataclass(frozen=True)
class Encoded:
    """Many texts end to end: text i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: Array
    offsets: Array
    key: str  # a digest of all that decides them

    @classmethod
    def of(cls, sentences: Sentences, key: str) -> Encoded:
        return cls(sentences.ids, np.concatenate([[0], sentences.lengths.cumsum()]), key)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    def gather(self, starts: Array, lengths: Array) -> Array:
        return np.take(self.ids, ragged(starts, lengths))


def encode(
    texts: Sequence[str], vocabulary: Vocabulary, fingerprint: str, folder: Path, *, running: bool
) -> tuple[Sentences, str]:
    """The ids of each text, without anything around them, and the key under which they are kept in `folder`."""
    key = _key(texts, fingerprint, running)

    def make(place: Path) -> None:
        sentences = _running(texts, vocabulary) if running else _lines(texts, vocabulary)
        for name, array in zip(FILES, (sentences.ids, sentences.lengths), strict=True):
            np.save(place / f"{name}.npy", array, allow_pickle=False)

    place = made(folder / f"texts-{key}", make, lambda at: all((at / f"{name}.npy").is_file() for name in FILES))
    ids, lengths = (np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in FILES)
    return Sentences(ids, np.asarray(lengths)), key


def _key(texts: Iterable[str], fingerprint: str, running: bool) -> str:
    digest = hashlib.sha256(f"{FORMAT} {fingerprint} {running}\n".encode())
    for text in texts:
        content = text.encode(errors="surrogatepass")
        digest.update(f"{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:24]


def _lines(texts: Sequence[str], vocabulary: Vocabulary) -> Sentences:
    bulk = Bulk(vocabulary, DTYPE)
    parts = [_without_ends(bulk.encode(texts[at : at + BLOCK])) for at in range(0, len(texts), BLOCK)]
    return Sentences(np.concatenate([p.ids for p in parts]), np.concatenate([p.lengths for p in parts]))


def _without_ends(sentences: Sentences) -> Sentences:
    """`Bulk` puts an end behind each."""
    kept = np.ones(len(sentences.ids), bool)
    kept[sentences.lengths.cumsum() - 1] = False
    return Sentences(sentences.ids[kept], sentences.lengths - 1)


def _running(texts: Sequence[str], vocabulary: Vocabulary) -> Sentences:
    return Sentences.of([list(running_ids(text, vocabulary)) for text in texts], DTYPE)


def running_ids(text: str, vocabulary: Vocabulary) -> Iterator[int]:
    """The ids of a text of any length."""
    # Other people's vocabularies may join what stands around a newline: there it is encoded in one piece.
    stretches = _stretches(text) if _ours(vocabulary) else [text]
    encoded = (vocabulary.encode([stretch])[0] for stretch in stretches)
    return chain.from_iterable(ids[1:] if number else ids for number, ids in enumerate(encoded))


def _ours(vocabulary: Vocabulary) -> bool:
    return isinstance(vocabulary, Pieces) and vocabulary.processor.piece_to_id(ESCAPE) != vocabulary.unknown


def _stretches(text: str) -> Iterator[str]:
    """Cut before newlines. SentencePiece begins every text with a space, which before a newline stands alone: all
    stretches but the first lose their first id."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + STRETCH)
        stop = len(text) if stop < 0 else stop
        yield text[start:stop]
        start = stop


# ---- around texts ----------------------------------------------------------------------------------------------------


def framed(sentences: Sentences, before: Sequence[int], after: Sequence[int]) -> Sentences:
    """With these ids around each."""
    more = len(before) + len(after)
    lengths = sentences.lengths + more
    starts = lengths.cumsum() - lengths
    ids = np.empty(int(lengths.sum()), DTYPE)
    ids[ragged(starts + len(before), sentences.lengths)] = sentences.ids
    for i, one in enumerate(before):
        ids[starts + i] = one
    for i, one in enumerate(after):
        ids[starts + lengths - len(after) + i] = one
    return Sentences(ids, lengths)


def cut_short(sentences: Sentences, room: int) -> Sentences:
    """Of each no more than so many ids."""
    lengths = np.minimum(sentences.lengths, room)
    starts = sentences.lengths.cumsum() - sentences.lengths
    return Sentences(np.take(sentences.ids, ragged(starts, lengths)), lengths)


def in_parts(sentences: Sentences, room: int) -> Sentences:
    """Texts of more than `room` ids become several, about equally long: nothing is lost."""
    counts = np.maximum(1, -(-sentences.lengths // room))
    number = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
    whole, pieces = np.repeat(sentences.lengths, counts), np.repeat(counts, counts)
    return Sentences(sentences.ids, whole * (number + 1) // pieces - whole * number // pieces)
