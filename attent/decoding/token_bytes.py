"""What each piece of a vocabulary writes, as bytes, and which characters make up words.

Rules about words (`forbidden`, and those that keep words whole) ask here; they know no tokenizer. A piece need not be
whole characters: `<0xC3>` of a SentencePiece model is a byte, and so is a part of many a piece of GPT-2's kind.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from attent.text import Vocabulary
from attent.text.scripts import UNSPACED_SCRIPTS, compile_letter_pattern

ESCAPE = "\x1a"  # in our own vocabularies, before a 0 it is itself, before a 1 it is `▁`
SPACE = "▁"
UNICODE_SIZE = 0x110000

# What a character is to a word. Those that are not seen do not part a word ("Donau\u00addampfer"); letters of scripts
# without spaces do not make words that end somewhere: each may be the first or the last of one.
HIDDEN, OTHER, WORD, BLANK = 0, 1, 2, 3
ZERO_WIDTH_CHARS = "\u00ad\u200b\u200c\u200d\u2060\ufeff"  # soft hyphen, zero-width spaces and joiners
LETTER_RANGES = (range(0x40000), range(0xE0000, 0xE1000))  # where Unicode has letters and marks

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPECIAL_TOKEN = re.compile(r"[<>\[].*[\]<>]")  # a name that need not be text: </s>, [PAD], >>deu<<, <|endoftext|>


@cache
def get_char_kinds() -> NDArray[np.uint8]:
    """For each code point HIDDEN, OTHER, WORD or BLANK."""
    found = np.full(UNICODE_SIZE, OTHER, dtype=np.uint8)
    for some in LETTER_RANGES:
        found[some] = [WORD if unicodedata.category(chr(i))[0] in "LMN" else OTHER for i in some]
    found[[i for i in LETTER_RANGES[0] if chr(i).isspace()]] = BLANK
    for run in re.finditer(compile_letter_pattern(UNSPACED_SCRIPTS).pattern + "+", "".join(map(chr, LETTER_RANGES[0]))):
        found[run.start() : run.end()] = OTHER
    found[[ord(one) for one in ZERO_WIDTH_CHARS]] = HIDDEN
    return found


def get_token_bytes(vocabulary: Vocabulary, size: int | None = None) -> list[bytes]:
    """What each id writes into a text, a space before a word included; nothing where it is no text. Ids up to `size`
    that the vocabulary does not have, as a model may, write nothing."""
    names = vocabulary.to_pieces(range(vocabulary.size))
    write = _select_decoder(vocabulary, names)
    found = [write(name) for name in names]
    special = {vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unknown}
    for i, name in enumerate(names):
        if i in special or (SPECIAL_TOKEN.fullmatch(name) and not BYTE_TOKEN.fullmatch(name)):
            found[i] = found[i] if _adds_text(vocabulary, names, i) else b""
    return found + [b""] * ((size or 0) - len(found))


def _select_decoder(vocabulary: Vocabulary, names: Sequence[str]) -> Callable[[str], bytes]:
    """How names of pieces are read: SentencePiece's way, GPT-2's or BERT's."""
    if any(SPACE in name for name in names):
        byte = "<0x41>" in names and vocabulary.decode([names.index("<0x41>")]) == "A"
        return _decode_byte_fallback if byte else _decode_sentencepiece
    if any(name.startswith("Ġ") for name in names):
        return _decode_byte_level
    if any(name.startswith("##") for name in names):
        return _decode_wordpiece
    return str.encode


def _adds_text(vocabulary: Vocabulary, names: Sequence[str], i: int) -> bool:
    """Does the id add anything to a text? Asked behind a word, since alone a space would vanish."""
    word = next((j for j, name in enumerate(names) if name.lstrip(SPACE + "Ġ").isalpha()), None)
    before = [] if word is None else [word]
    return vocabulary.decode([*before, i]) != vocabulary.decode(before)


def _decode_sentencepiece(name: str) -> bytes:
    return name.replace(SPACE, " ").encode()


def _decode_byte_fallback(name: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else _decode_sentencepiece(name)


def _decode_wordpiece(name: str) -> bytes:
    return (name[2:] if name.startswith("##") else " " + name).encode()


def _decode_byte_level(name: str) -> bytes:
    table = _build_gpt2_bytes()
    return bytes(table[one] for one in name) if all(one in table for one in name) else name.encode()


@cache
def _build_gpt2_bytes() -> dict[str, int]:
    """GPT-2 shows bytes that are visible characters of Latin-1 as these, the others as those from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def find_word_continuations(pieces: Sequence[bytes]) -> NDArray[np.bool_]:
    """Which pieces, behind a word, would make it longer. A byte that begins a character may do so, so it counts."""
    return np.array([_is_word_continuation(piece) for piece in pieces], dtype=np.bool_)


def _is_word_continuation(piece: bytes) -> bool:
    try:
        text = piece.decode().lstrip(ZERO_WIDTH_CHARS)
    except UnicodeDecodeError as error:
        text = piece[: error.start].decode().lstrip(ZERO_WIDTH_CHARS) or "a"
    return bool(text) and get_char_kinds()[ord(text[0])] == WORD
