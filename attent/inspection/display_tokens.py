"""Display text and special kind of tokens, and their labels in figures."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from attent.decoding.alignment import WORD_START_MARKERS
from attent.formatting import escape_invisible
from attent.inspection.attention_trace import DisplayToken, SpecialKind
from attent.text.tokenizer_formats import BYTE_TOKEN
from attent.text.vocabulary import Vocabulary

CONTINUATION_PREFIX = "##"  # WordPiece prefix inside a word
NEWLINE_SYMBOL = "⏎"
REPLACEMENT_CHARACTER = "\ufffd"  # of incomplete UTF-8
SPACE_SYMBOL, DOTTED_CIRCLE = "␣", "◌"


def build_display_tokens(
    vocabulary: Vocabulary, ids: Sequence[int], *, is_decoder_input: bool = False
) -> tuple[DisplayToken, ...]:
    """`is_decoder_input`: the first token is the decoder's start token, whatever else its id means."""
    pieces = vocabulary.to_pieces(ids)
    tokens = [build_display_token(vocabulary, token, piece) for token, piece in zip(ids, pieces, strict=True)]
    if is_decoder_input and tokens:
        tokens[0] = DisplayToken(pieces[0], "start", special="start")
    return tuple(tokens)


def build_display_token(vocabulary: Vocabulary, token_id: int, piece: str) -> DisplayToken:
    special = get_special_kind(vocabulary, token_id, piece)
    if special is not None:
        text = {"tag": piece, "byte": piece.strip("<>").replace("0x", "")}.get(special, special)
        return DisplayToken(piece, text, special=special)
    if token_id in vocabulary.sentinels:
        return DisplayToken(piece, piece.strip("<>"), special="mask")
    text = vocabulary.decode([token_id])
    # WordPiece marks continuations, not word starts: does the decoder put a space before the token?
    space = bool(text.strip()) and f"{text} {text}" == vocabulary.decode([token_id, token_id])
    space = space or piece.startswith(WORD_START_MARKERS)
    if REPLACEMENT_CHARACTER in text:
        return DisplayToken(piece, piece.lstrip("".join(WORD_START_MARKERS)) or piece, space, "byte")
    if piece.startswith(CONTINUATION_PREFIX) and piece != CONTINUATION_PREFIX:
        return DisplayToken(piece, piece.removeprefix(CONTINUATION_PREFIX), False)
    return DisplayToken(piece, text.strip() or NEWLINE_SYMBOL * text.count("\n"), space)


def get_special_kind(vocabulary: Vocabulary, token_id: int, piece: str) -> SpecialKind | None:
    if BYTE_TOKEN.fullmatch(piece):
        return "byte"
    if piece.startswith("<2") and piece[2:-1] in vocabulary.tags:
        return "tag"
    special_ids: tuple[tuple[int | None, SpecialKind], ...] = (
        (vocabulary.mask, "mask"),
        (vocabulary.end, "end"),
        (vocabulary.unknown, "unknown"),
        (vocabulary.pad, "pad"),
        (vocabulary.start, "start"),
    )
    return next((special for special_id, special in special_ids if token_id == special_id), None)


def format_token(token: Mapping[str, Any]) -> str:
    """Format a token on one line: ‹end› for special tokens, ␣ for a space."""
    text = escape_invisible(str(token["text"]))
    if token["special"] is not None:
        return f"‹{text}›"
    if text and unicodedata.category(text[0])[0] == "M":
        text = DOTTED_CIRCLE + text  # a lone accent would combine with the character before it
    return text if cell_len(text) else SPACE_SYMBOL
