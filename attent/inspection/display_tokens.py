"""Tokens as people look at them: the text of each, and what is special about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attent.inspection.attention_trace import DisplayToken, SpecialKind
from attent.text.vocabulary import Vocabulary

SPACE_MARKERS = ("▁", "Ġ")  # with which a piece says that a space stands before it
BYTE_PATTERN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CONTINUATION_PREFIX = "##"  # with which a piece of BERT says that it goes on with a word
NEWLINE_SYMBOL = "⏎"
REPLACEMENT_CHARACTER = "\ufffd"  # what is half a character


def build_display_tokens(
    vocabulary: Vocabulary, ids: Sequence[int], *, is_decoder_input: bool = False
) -> tuple[DisplayToken, ...]:
    """`starts`: the first is what a decoder starts from, whatever else its id may mean."""
    pieces = vocabulary.to_pieces(ids)
    made = [build_display_token(vocabulary, token, piece) for token, piece in zip(ids, pieces, strict=True)]
    if is_decoder_input and made:
        made[0] = DisplayToken(pieces[0], "start", special="start")
    return tuple(made)


def build_display_token(vocabulary: Vocabulary, token_id: int, piece: str) -> DisplayToken:
    special = get_special_kind(vocabulary, token_id, piece)
    if special is not None:
        text = {"tag": piece, "byte": piece.strip("<>").replace("0x", "")}.get(special, special)
        return DisplayToken(piece, text, special=special)
    if token_id in vocabulary.sentinels:
        return DisplayToken(piece, piece.strip("<>"), special="mask")
    text = vocabulary.decode([token_id])
    space = piece.startswith(SPACE_MARKERS) or has_space_before(vocabulary, token_id, text)
    if REPLACEMENT_CHARACTER in text:
        return DisplayToken(piece, piece.lstrip("".join(SPACE_MARKERS)) or piece, space, "byte")
    if piece.startswith(CONTINUATION_PREFIX) and piece != CONTINUATION_PREFIX:
        return DisplayToken(piece, piece.removeprefix(CONTINUATION_PREFIX), False)
    return DisplayToken(piece, text.strip() or NEWLINE_SYMBOL * text.count("\n"), space)


def has_space_before(vocabulary: Vocabulary, token_id: int, text: str) -> bool:
    """WordPiece marks what goes on with a word, not what begins one: there two words have a space between them."""
    return bool(text.strip()) and f"{text} {text}" == vocabulary.decode([token_id, token_id])


def get_special_kind(vocabulary: Vocabulary, token_id: int, piece: str) -> SpecialKind | None:
    if BYTE_PATTERN.fullmatch(piece):
        return "byte"
    if piece.startswith("<2") and piece[2:-1] in vocabulary.tags:
        return "tag"
    known: tuple[tuple[int | None, SpecialKind], ...] = (
        (vocabulary.mask, "mask"),
        (vocabulary.end, "end"),
        (vocabulary.unknown, "unknown"),
        (vocabulary.pad, "pad"),
        (vocabulary.start, "start"),
    )
    return next((special for number, special in known if token_id == number), None)
