"""The text of each vocabulary token as bytes, and the kinds of characters that make up words.

Constraints on words use this and need no tokenizer. A token may be part of a character: `<0xC3>` of SentencePiece is
one byte, and many tokens of GPT-2's kind contain incomplete characters.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from attent.text import Vocabulary
from attent.text.scripts import UNSPACED_SCRIPTS, compile_letter_pattern
from attent.text.tokenizer_formats import BYTE_TOKEN
from attent.text.vocabulary import SPACE

UNICODE_SIZE = 0x110000

# Kinds of characters. HIDDEN ones do not separate words ("Donau\u00addampfer"). Letters of scripts without spaces are
# OTHER: each may be the first or the last of a word.
HIDDEN, OTHER, WORD, BLANK = 0, 1, 2, 3
ZERO_WIDTH_CHARS = "\u00ad\u200b\u200c\u200d\u2060\ufeff"  # soft hyphen, zero-width spaces and joiners
LETTER_RANGES = (range(0x40000), range(0xE0000, 0xE1000))  # where Unicode has letters and marks

SPECIAL_TOKEN = re.compile(r"[<>\[].*[\]<>]")  # may have no text: </s>, [PAD], >>deu<<, <|endoftext|>


@cache
def get_char_kinds() -> NDArray[np.uint8]:
    kinds = np.full(UNICODE_SIZE, OTHER, dtype=np.uint8)
    for codes in LETTER_RANGES:
        kinds[codes] = [WORD if unicodedata.category(chr(i))[0] in "LMN" else OTHER for i in codes]
    kinds[[i for i in LETTER_RANGES[0] if chr(i).isspace()]] = BLANK
    unspaced = compile_letter_pattern(UNSPACED_SCRIPTS).pattern + "+"
    for run in re.finditer(unspaced, "".join(map(chr, LETTER_RANGES[0]))):
        kinds[run.start() : run.end()] = OTHER
    kinds[[ord(char) for char in ZERO_WIDTH_CHARS]] = HIDDEN
    return kinds


def get_token_bytes(vocabulary: Vocabulary, size: int | None = None) -> list[bytes]:
    """Return the bytes of each token, with the space before a word; empty for tokens without text and unknown ids."""
    names = vocabulary.to_pieces(range(vocabulary.size))
    decode = _select_decoder(vocabulary, names)
    token_bytes = [decode(name) for name in names]
    special = {vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unknown}
    word = [i for i, name in enumerate(names) if name.lstrip(SPACE + "Ġ").isalpha()][:1]
    for i, name in enumerate(names):
        may_be_special = i in special or (SPECIAL_TOKEN.fullmatch(name) and not BYTE_TOKEN.fullmatch(name))
        # Decoded after a word: alone, a space would be stripped.
        if may_be_special and vocabulary.decode([*word, i]) == vocabulary.decode(word):
            token_bytes[i] = b""
    return token_bytes + [b""] * ((size or 0) - len(token_bytes))


def _select_decoder(vocabulary: Vocabulary, names: Sequence[str]) -> Callable[[str], bytes]:
    """Return the decoder of token names: SentencePiece's, GPT-2's or BERT's."""
    if any(SPACE in name for name in names):
        has_bytes = "<0x41>" in names and vocabulary.decode([names.index("<0x41>")]) == "A"
        return _decode_byte_fallback if has_bytes else _decode_sentencepiece
    if any(name.startswith("Ġ") for name in names):
        return _decode_byte_level
    if any(name.startswith("##") for name in names):
        return lambda name: (name[2:] if name.startswith("##") else " " + name).encode()
    return str.encode


def _decode_sentencepiece(name: str) -> bytes:
    return name.replace(SPACE, " ").encode()


def _decode_byte_fallback(name: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else _decode_sentencepiece(name)


def _decode_byte_level(name: str) -> bytes:
    table = _build_gpt2_bytes()
    return bytes(table[char] for char in name) if all(char in table for char in name) else name.encode()


@cache
def _build_gpt2_bytes() -> dict[str, int]:
    """GPT-2 writes visible Latin-1 characters as themselves, other bytes as characters from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def find_word_continuations(pieces: Sequence[bytes]) -> NDArray[np.bool_]:
    """Return which tokens would extend a word before them. The first byte of a character may, so it counts."""
    return np.array([_is_word_continuation(piece) for piece in pieces], dtype=np.bool_)


def _is_word_continuation(piece: bytes) -> bool:
    try:
        text = piece.decode().lstrip(ZERO_WIDTH_CHARS)
    except UnicodeDecodeError as error:
        text = piece[: error.start].decode().lstrip(ZERO_WIDTH_CHARS) or "a"
    return bool(text) and get_char_kinds()[ord(text[0])] == WORD
