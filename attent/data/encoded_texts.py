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

from attent.data.arrays import Array, concatenate_ranges
from attent.storage.cache import build_folder
from attent.text.bulk_encoder import BulkEncoder, EncodedSentences
from attent.text.vocabulary import ESCAPE, SentencePieceVocabulary, Vocabulary

FORMAT_VERSION = 1  # part of the key: raised when the same texts give other ids
CHUNK_CHARS = 2**16  # characters that are encoded at once, about
BLOCK_TEXTS = 4096  # texts that are encoded together
ID_DTYPE = "<u4"
ARRAY_NAMES = ("ids", "lengths")


@dataclass(frozen=True)
class EncodedTexts:
    """Many texts end to end: text i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: Array
    offsets: Array
    key: str  # a digest of all that decides them

    @classmethod
    def from_sentences(cls, sentences: EncodedSentences, key: str) -> EncodedTexts:
        return cls(sentences.ids, np.concatenate([[0], sentences.lengths.cumsum()]), key)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    def gather(self, starts: Array, lengths: Array) -> Array:
        return np.take(self.ids, concatenate_ranges(starts, lengths))


def encode_texts(
    texts: Sequence[str], vocabulary: Vocabulary, fingerprint: str, folder: Path, *, as_documents: bool
) -> tuple[EncodedSentences, str]:
    """The ids of each text, without anything around them, and the key under which they are kept in `folder`."""
    key = _cache_key(texts, fingerprint, as_documents)

    def make(place: Path) -> None:
        sentences = _encode_documents(texts, vocabulary) if as_documents else _encode_lines(texts, vocabulary)
        for name, array in zip(ARRAY_NAMES, (sentences.ids, sentences.lengths), strict=True):
            np.save(place / f"{name}.npy", array, allow_pickle=False)

    place = build_folder(
        folder / f"texts-{key}", make, lambda at: all((at / f"{name}.npy").is_file() for name in ARRAY_NAMES)
    )
    ids, lengths = (np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAY_NAMES)
    return EncodedSentences(ids, np.asarray(lengths)), key


def _cache_key(texts: Iterable[str], fingerprint: str, as_documents: bool) -> str:
    digest = hashlib.sha256(f"{FORMAT_VERSION} {fingerprint} {as_documents}\n".encode())
    for text in texts:
        content = text.encode(errors="surrogatepass")
        digest.update(f"{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:24]


def _encode_lines(texts: Sequence[str], vocabulary: Vocabulary) -> EncodedSentences:
    bulk = BulkEncoder(vocabulary, ID_DTYPE)
    parts = [_strip_eos(bulk.encode(texts[at : at + BLOCK_TEXTS])) for at in range(0, len(texts), BLOCK_TEXTS)]
    return EncodedSentences(np.concatenate([p.ids for p in parts]), np.concatenate([p.lengths for p in parts]))


def _strip_eos(sentences: EncodedSentences) -> EncodedSentences:
    """`Bulk` puts an end behind each."""
    kept = np.ones(len(sentences.ids), bool)
    kept[sentences.lengths.cumsum() - 1] = False
    return EncodedSentences(sentences.ids[kept], sentences.lengths - 1)


def _encode_documents(texts: Sequence[str], vocabulary: Vocabulary) -> EncodedSentences:
    return EncodedSentences.from_lists([list(iter_document_ids(text, vocabulary)) for text in texts], ID_DTYPE)


def iter_document_ids(text: str, vocabulary: Vocabulary) -> Iterator[int]:
    """The ids of a text of any length."""
    # Other people's vocabularies may join what stands around a newline: there it is encoded in one piece.
    stretches = _iter_chunks(text) if _is_native(vocabulary) else [text]
    encoded = (vocabulary.encode([stretch])[0] for stretch in stretches)
    return chain.from_iterable(ids[1:] if number else ids for number, ids in enumerate(encoded))


def _is_native(vocabulary: Vocabulary) -> bool:
    return (
        isinstance(vocabulary, SentencePieceVocabulary)
        and vocabulary.processor.piece_to_id(ESCAPE) != vocabulary.unknown
    )


def _iter_chunks(text: str) -> Iterator[str]:
    """Cut before newlines. SentencePiece begins every text with a space, which before a newline stands alone: all
    stretches but the first lose their first id."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + CHUNK_CHARS)
        stop = len(text) if stop < 0 else stop
        yield text[start:stop]
        start = stop


# ---- around texts ----------------------------------------------------------------------------------------------------


def add_special_tokens(sentences: EncodedSentences, prefix: Sequence[int], suffix: Sequence[int]) -> EncodedSentences:
    """With these ids around each."""
    more = len(prefix) + len(suffix)
    lengths = sentences.lengths + more
    starts = lengths.cumsum() - lengths
    ids = np.empty(int(lengths.sum()), ID_DTYPE)
    ids[concatenate_ranges(starts + len(prefix), sentences.lengths)] = sentences.ids
    for i, one in enumerate(prefix):
        ids[starts + i] = one
    for i, one in enumerate(suffix):
        ids[starts + lengths - len(suffix) + i] = one
    return EncodedSentences(ids, lengths)


def truncate_texts(sentences: EncodedSentences, max_tokens: int) -> EncodedSentences:
    """Of each no more than so many ids."""
    lengths = np.minimum(sentences.lengths, max_tokens)
    starts = sentences.lengths.cumsum() - sentences.lengths
    return EncodedSentences(np.take(sentences.ids, concatenate_ranges(starts, lengths)), lengths)


def split_long_texts(sentences: EncodedSentences, max_tokens: int) -> EncodedSentences:
    """Texts of more than `room` ids become several, about equally long: nothing is lost."""
    counts = np.maximum(1, -(-sentences.lengths // max_tokens))
    number = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
    whole, pieces = np.repeat(sentences.lengths, counts), np.repeat(counts, counts)
    return EncodedSentences(sentences.ids, whole * (number + 1) // pieces - whole * number // pieces)
