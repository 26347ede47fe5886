"""Tokens as people look at them: the text of each, and what is special about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attent.look.trace import Special, Token
from attent.text.vocabulary import Vocabulary

SPACES = ("▁", "Ġ")  # with which a piece says that a space stands before it
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
INSIDE = "##"  # with which a piece of BERT says that it goes on with a word
LINE = "⏎"
BROKEN = "\ufffd"  # what is half a character


def tokens_of(vocabulary: Vocabulary, ids: Sequence[int], *, starts: bool = False) -> tuple[Token, ...]:
    """`starts`: the first is what a decoder starts from, whatever else its id may mean."""
    pieces = vocabulary.pieces(ids)
    made = [token_of(vocabulary, token, piece) for token, piece in zip(ids, pieces, strict=True)]
    if starts and made:
        made[0] = Token(pieces[0], "start", special="start")
    return tuple(made)


def token_of(vocabulary: Vocabulary, token: int, piece: str) -> Token:
    special = special_of(vocabulary, token, piece)
    if special is not None:
        text = {"tag": piece, "byte": piece.strip("<>").replace("0x", "")}.get(special, special)
        return Token(piece, text, special=special)
    if token in vocabulary.sentinels:
        return Token(piece, piece.strip("<>"), special="mask")
    text = vocabulary.decode([token])
    space = piece.startswith(SPACES) or stands_apart(vocabulary, token, text)
    if BROKEN in text:
        return Token(piece, piece.lstrip("".join(SPACES)) or piece, space, "byte")
    if piece.startswith(INSIDE) and piece != INSIDE:
        return Token(piece, piece.removeprefix(INSIDE), False)
    return Token(piece, text.strip() or LINE * text.count("\n"), space)


def stands_apart(vocabulary: Vocabulary, token: int, text: str) -> bool:
    """WordPiece marks what goes on with a word, not what begins one: there two words have a space between them."""
    return bool(text.strip()) and f"{text} {text}" == vocabulary.decode([token, token])


def special_of(vocabulary: Vocabulary, token: int, piece: str) -> Special | None:
    if BYTE.fullmatch(piece):
        return "byte"
    if piece.startswith("<2") and piece[2:-1] in vocabulary.tags:
        return "tag"
    known: tuple[tuple[int | None, Special], ...] = (
        (vocabulary.mask, "mask"),
        (vocabulary.end, "end"),
        (vocabulary.unknown, "unknown"),
        (vocabulary.pad, "pad"),
        (vocabulary.start, "start"),
    )
    return next((special for number, special in known if token == number), None)
