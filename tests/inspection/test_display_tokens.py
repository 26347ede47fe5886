"""Display tokens of the tokenizers of imported models."""

from __future__ import annotations

import pytest

from attent.inspection.attention_trace import DisplayToken, build_display_tokens, format_token
from attent.text.tokenizer import Tokenizer
from tests.inspection.models import tokenizer as with_mask

tokenizers = pytest.importorskip("tokenizers")


def test_wordpiece_continuations() -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "walk", "##ing", "man", ".", "#"]
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    model.add_special_tokens(pieces[:5])
    of = Tokenizer.from_files({"tokenizer.json": model.to_str().encode()}).source
    document = build_display_tokens(of, [2, 7, 5, 6, 4, 8, 1, 3])
    assert [(token.text, token.space, token.special) for token in document] == [
        ("start", False, "start"),
        ("man", True, None),
        ("walk", True, None),
        ("ing", False, None),
        ("mask", False, "mask"),
        (".", document[5].space, None),
        ("unknown", False, "unknown"),
        ("end", False, "end"),
    ]


def test_partial_characters_and_newlines() -> None:
    pieces = ["<|endoftext|>", "a", "Ġa", "Ċ", "Ã", "¤", "ĊĊ", "Ġ"]
    vocab, merges = {piece: i for i, piece in enumerate(pieces)}, [("Ġ", "a"), ("Ċ", "Ċ")]
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(pieces[:1])
    of = Tokenizer.from_files({"tokenizer.json": model.to_str().encode()}).source
    document = build_display_tokens(of, [1, 2, 3, 4, 5, 6, 0])
    assert document == (
        DisplayToken("a", "a"),
        DisplayToken("Ġa", "a", True),
        DisplayToken("Ċ", "⏎"),
        DisplayToken("Ã", "Ã", special="byte"),
        DisplayToken("¤", "¤", special="byte"),
        DisplayToken("ĊĊ", "⏎⏎"),
        DisplayToken("<|endoftext|>", "end", special="end"),
    )


def test_added_mask_token() -> None:
    of = with_mask().source
    assert of.mask is not None
    assert build_display_tokens(of, [of.mask]) == (DisplayToken("<mask>", "mask", special="mask"),)


@pytest.mark.parametrize(
    ("text", "special", "label"),
    [
        ("end", "end", "‹end›"),
        ("end", None, "end"),
        ("", None, "␣"),
        ("\u200c", None, "␣"),
        ("\u0301", None, "◌\u0301"),
    ],
)
def test_special_tokens_and_spaces_are_marked(text: str, special: str | None, label: str) -> None:
    assert format_token({"text": text, "special": special}) == label
