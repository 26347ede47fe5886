"""Banned phrases against plain Python that searches the decoded text, with all kinds of tokenizers."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from attent.decoding.constraints.banned_phrases import BannedPhrases
from attent.decoding.constraints.base import GeneratedTokens
from attent.decoding.constraints.phrase_automaton import (
    TokenSpellings,
    find_phrase,
    find_word_continuations,
    get_token_bytes,
)
from attent.decoding.options import SearchRequest
from attent.text import TokenizerConfig, Vocabulary, train_tokenizer
from attent.text.scripts import UNSPACED_SCRIPTS, compile_letter_pattern
from attent.text.tokenizer_formats import FastVocabulary, MarianVocabulary, read_vocab_json
from tests.text.imported_tokenizers import marian_folder

NEVER = float("-inf")
LINES = [
    "Das Haus am See, ein Hausboot und „Häuser“ in der Straße.",
    "DAS HAUS IN DER STRASSE – „GUTEN TAG“, sagte er… guten Abend!",
    "Ein Café, ein Cafe\u0301, C++ und C, 手机很好, 我的手机。 日本語",
    "Guten Tag, Guten Morgen: ein Schulhaus, Hausa, das Haus-Boot, house_2",
]
WORDS = ("Haus", "Straße", "guten tag", "Café", "手机", "C++", "haus am")
UNSEEN = "\u00ad\u200b\u200c\u200d\u2060\ufeff"


@cache
def vocabulary(kind: str) -> Vocabulary:
    if kind in ("bpe", "unigram", "char"):
        return train_tokenizer(
            LINES * 8, LINES * 8, TokenizerConfig(kind=kind, vocab=400 if kind == "bpe" else None)
        ).target
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    model.train_from_iterator(LINES * 8, trainer)
    return FastVocabulary(model, {}, "")


# --- the oracle ------------------------------------------------------------------------------------------------------


@cache
def is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN" and not compile_letter_pattern(UNSPACED_SCRIPTS).search(
        character
    )


def fold_case(text: str) -> str:
    return re.sub(r"\s+", " ", text.casefold())


def has_phrase(text: str, words: Sequence[str]) -> bool:
    """True if one of the phrases occurs in a text as whole words."""
    text = "".join(character for character in text if character not in UNSEEN)
    spellings = {fold_case(unicodedata.normalize(form, word)) for word in words for form in ("NFC", "NFD")}
    borders = [i in (0, len(text)) or not (is_letter(text[i - 1]) and is_letter(text[i])) for i in range(len(text) + 1)]
    positions = [i for i, border in enumerate(borders) if border]
    return any(fold_case(text[i:j]) in spellings for i in positions for j in positions if i < j <= i + 24)


@cache
def list_word_lead_bytes() -> frozenset[bytes]:
    """Return the first bytes of characters that continue a word."""
    characters = map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE1000)])
    encodings = [character.encode() for character in characters if is_letter(character) or character in UNSEEN]
    return frozenset(character[:n] for character in encodings for n in range(1, len(character)))


def open_bytes(written: bytes) -> bytes:
    """Return the incomplete character at the end of a text."""
    for n in (1, 2, 3):
        tail = written[-n:]
        if tail and tail[0] >= 0xC2 and tail[0] < 0xF5 and n < (2 if tail[0] < 0xE0 else 3 if tail[0] < 0xF0 else 4):
            return tail
        if not (tail and 0x80 <= tail[0] < 0xC0):
            return b""
    return b""


def is_too_late(text: str, written: bytes, words: Sequence[str]) -> bool:
    """True if the text has a banned phrase whatever follows; incomplete characters count by their bytes."""
    tail = open_bytes(written)
    if not tail:
        return has_phrase(text + "x", words)
    whole = written[: -len(tail)].decode(errors="replace").replace("\x1a1", "▁").replace("\x1a0", "\x1a")
    return has_phrase(whole + "x", words) or (has_phrase(whole, words) and tail not in list_word_lead_bytes())


# --- the constraint --------------------------------------------------------------------------------------------------


def list_banned(constraint: BannedPhrases, state: Tensor, size: int, room: int = 50) -> list[bool]:
    written = GeneratedTokens(torch.zeros(len(state), 1), torch.zeros(len(state)), torch.full((len(state),), room))
    return (constraint.mask_logits(torch.zeros(len(state), size), state, written)[0] == NEVER).tolist()


def list_tempting_tokens(pieces: list[bytes]) -> list[int]:
    """Return tokens that the phrases consist of, and bytes."""
    letters = "".join(WORDS).casefold().encode() + "„“ .\u00adʼ–".encode()
    likely = [i for i, piece in enumerate(pieces) if piece and all(byte in letters for byte in piece.lower())]
    return [i for i in (*likely, *likely, *range(len(pieces))) if pieces[i]]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "gpt2"])
@pytest.mark.parametrize("seed", range(2))
def test_exactly_the_tokens_that_complete_a_banned_phrase_are_masked(kind: str, seed: int) -> None:
    known, rng = vocabulary(kind), random.Random(seed)
    pieces, words = get_token_bytes(known), WORDS
    request, tempting = SearchRequest(source_ids=(), banned_phrases=words), list_tempting_tokens(pieces)
    constraint = BannedPhrases([request], TokenSpellings(pieces, known.end))
    seen = 0
    for _ in range(8):
        state, ids = constraint.build_initial_state([request]), []
        for word in (rng.choice(words), rng.choice(words)):
            for goal in encode_variant(known, word, rng):
                got = list_banned(constraint, state, known.size)
                text = known.decode(ids)
                if not open_bytes(b"".join(pieces[i] for i in ids)):
                    assert got[known.end] == has_phrase(text, words), text
                for token in {goal, *rng.sample(tempting, 12)}:
                    after, written = known.decode([*ids, token]), b"".join(pieces[i] for i in [*ids, token])
                    assert got[token] == is_too_late(after, written, words), (text, pieces[token])
                    seen += got[token]
                token = goal if not got[goal] else next(i for i in rng.sample(tempting, len(tempting)) if not got[i])
                ids.append(token)
                state = constraint.advance_state(state, torch.tensor([token]))
    assert seen > 25


def encode_variant(known: Vocabulary, word: str, rng: random.Random) -> list[int]:
    """Encode a phrase, possibly in another case or in bytes."""
    word = rng.choice([str.lower, str.upper, str.title, str])(word)
    word = unicodedata.normalize(rng.choice(["NFC", "NFD"]), word)
    if rng.random() < 0.5:
        return known.encode([word + rng.choice(["", "e", ".", "boot"])])[0]
    names = known.to_pieces(range(known.size))
    spaced = names.index("▁") if "▁" in names else names.index("Ġ")
    single = {piece: i for i, piece in enumerate(get_token_bytes(known)) if len(piece) == 1}
    return [spaced, *(single.get(bytes([byte]), spaced) for byte in word.encode())]


@pytest.mark.parametrize("separate", [False, True])
def test_token_bytes_of_a_marian_model_match_decoding(separate: bool, tmp_path: Path) -> None:
    folder = marian_folder(tmp_path, separate, tags=(">>deu<<",))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    known = MarianVocabulary(
        files["target.spm"], "", read_vocab_json(files, "target_vocab.json" if separate else "vocab.json", "")
    )
    check_token_bytes(known, random.Random(0))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "gpt2"])
def test_token_bytes_match_decoding(kind: str) -> None:
    check_token_bytes(vocabulary(kind), random.Random(1))


def check_token_bytes(known: Vocabulary, rng: random.Random) -> None:
    pieces = get_token_bytes(known, known.size + 3)
    assert len(pieces) == known.size + 3
    silent = [i for i in range(known.size) if not pieces[i]]
    assert known.end in silent
    assert len(silent) < 10
    whole = [i for i in range(known.size) if is_valid_utf8(pieces[i]) and b"\x1a" not in pieces[i]]
    for _ in range(200):
        ids = rng.choices(whole, k=10)
        assert b"".join(pieces[i] for i in ids).decode().strip() == known.decode(ids).strip()


def is_valid_utf8(piece: bytes) -> bool:
    return b"\xef\xbf\xbd" not in piece.decode(errors="replace").encode()


# --- special cases ---------------------------------------------------------------------------------------------------


def list_allowed_after(words: tuple[str, ...], text: str | bytes, pieces: list[bytes], room: int = 50) -> set[bytes]:
    """Return the tokens allowed after a text; b"" is the end token."""
    request = SearchRequest(source_ids=(), banned_phrases=words)
    constraint = BannedPhrases([request], TokenSpellings(pieces, 0))
    state = constraint.build_initial_state([request])
    for byte in text.encode() if isinstance(text, str) else text:
        state = constraint.advance_state(state, torch.tensor([pieces.index(bytes([byte]))]))
    return {pieces[i] for i, no in enumerate(list_banned(constraint, state, len(pieces), room)) if not no}


BYTES = [b"", *(bytes([i]) for i in range(256))]


@pytest.mark.parametrize(
    ("words", "text", "is_banned"),
    [
        (("Haus",), "das Haus", True),
        (("Haus",), "das hAUS", True),
        (("Haus",), "das Hausboot", False),
        (("Haus",), "Schulhaus", False),
        (("Haus",), "Haus2", False),
        (("Haus",), "Schul-Haus", True),
        (("Haus",), "„Haus", True),
        (("Haus",), "Ha\u00adus", True),
        (("Haus",), "Hau\x1a1s", False),
        (("Straße",), "STRASSE", True),
        (("strasse",), "Straße", True),
        (("café",), "Cafe\u0301", True),
        (("cafe\u0301",), "CAFÉ", True),
        (("cafe",), "café", False),
        (("guten  Tag",), "Guten Tag", True),
        (("guten Tag",), "guten \u00a0tag", True),
        (("guten Tag",), "gutentag", False),
        (("b", "a b c"), "a b", True),
        (("Apple",), "我喜欢Apple", True),
        (("ΟΔΟΣ",), "οδος", True),
    ],
)
def test_the_end_token_is_masked_after_a_banned_phrase(words: tuple[str, ...], text: str, is_banned: bool) -> None:
    assert (b"" not in list_allowed_after(words, text, BYTES)) is is_banned
    assert (find_phrase(text, words) is not None) is is_banned


@pytest.mark.parametrize(
    ("text", "words", "found", "found_in_part"),
    [
        ("das Haus", ("Boot", "HAUS"), "HAUS", None),
        ("das Haus am See", ("Boot", "Haus"), "Haus", "Haus"),
        ("das Hausboot", ("Haus",), None, None),
        ("我爱北京", ("北京",), "北京", "北京"),
        ("", ("Haus",), None, None),
        ("das Haus", (), None, None),
    ],
)
def test_a_phrase_is_found_in_text(
    text: str, words: tuple[str, ...], found: str | None, found_in_part: str | None
) -> None:
    assert find_phrase(text, words) == found
    assert find_phrase(text, words, is_partial=True) == found_in_part


def test_only_word_continuations_may_follow_a_banned_phrase() -> None:
    may = list_allowed_after(("Haus",), "Haus", BYTES)
    ascii_ones = {chr(i) for i in range(128) if bytes([i]) in may}
    assert ascii_ones == {chr(i) for i in range(128) if chr(i).isalnum()}
    assert b"\xc3" in may
    assert b"\xe3" in may
    assert not {bytes([i]) for i in range(0x80, 0xC2)} & may


def test_an_incomplete_character_after_a_banned_phrase_may_become_a_letter() -> None:
    request = SearchRequest(source_ids=(), banned_phrases=("Haus",))
    constraint = BannedPhrases([request], TokenSpellings(BYTES, 0))
    for first in list_allowed_after(("Haus",), "Haus", BYTES):
        state = constraint.build_initial_state([request])
        for byte in b"Haus" + first:
            state = constraint.advance_state(state, torch.tensor([byte + 1]))
        while int(state[0, 1]):
            free = [i for i, no in enumerate(list_banned(constraint, state, 257)) if not no]
            assert free
            assert all(0x80 <= i - 1 < 0xC0 for i in free)
            state = constraint.advance_state(state, torch.tensor([free[-1]]))
        assert not list_banned(constraint, state, 257)[0], "the text may end"


def test_an_overlong_encoding_is_no_letter() -> None:
    overlong = b"\xe0\x81\xb5"  # code point of u, decoded as three replacement characters
    assert b"" in list_allowed_after(("Haus",), b"Ha" + overlong + b"s", BYTES)
    assert b"" not in list_allowed_after(("s",), b"Ha" + overlong + b"s", BYTES)
    may = list_allowed_after(("Haus",), b"Haus\xe0", BYTES)
    assert b"\x81" not in may
    assert b"\xa4" in may


def test_a_token_may_complete_a_character_and_continue_with_text() -> None:
    pieces = [b"", b"Haus", b"\xc3", b"\xa4", b"\xa4.", b"\xa4n"]
    request = SearchRequest(source_ids=(), banned_phrases=("Hausä",))
    constraint = BannedPhrases([request], TokenSpellings(pieces, 0))
    state = constraint.build_initial_state([request])
    for token in (1, 2):
        state = constraint.advance_state(state, torch.tensor([token]))
    assert list_banned(constraint, state, 6) == [False, False, False, False, True, False]
    assert list_banned(constraint, constraint.advance_state(state, torch.tensor([3])), 6)[0]
    assert not list_banned(constraint, constraint.advance_state(state, torch.tensor([5])), 6)[0]


def test_an_escape_sequence_is_one_character() -> None:
    for text in ("\x1a1Haus", "\x1a0Haus"):
        assert b"" not in list_allowed_after(("Haus",), text, BYTES), "the text is `▁Haus`"
    assert b"" in list_allowed_after(("Haus",), "1Haus", BYTES)


def test_truncation_leaves_no_banned_phrase() -> None:
    assert b"s" in list_allowed_after(("Haus",), "Hau", BYTES, room=3)
    for room in (1, 2):
        assert b"s" not in list_allowed_after(("Haus",), "Hau", BYTES, room)
        assert b"x" in list_allowed_after(("Haus",), "Hau", BYTES, room)
        assert b"" in list_allowed_after(("Haus",), "Hau", BYTES, room)


def test_a_word_vocabulary_avoids_dead_ends() -> None:
    pieces = [b"", b" Haus", b" am", b" See", b"!"]
    constraint = BannedPhrases([SearchRequest(source_ids=(), banned_phrases=("Haus",))], TokenSpellings(pieces, 0))
    assert list_banned(
        constraint, constraint.build_initial_state([SearchRequest(source_ids=(), banned_phrases=("Haus",))]), 5
    ) == [
        False,
        True,
        False,
        False,
        False,
    ]
    pieces.append(b"boot")
    constraint = BannedPhrases([SearchRequest(source_ids=(), banned_phrases=("Haus",))], TokenSpellings(pieces, 0))
    assert not any(
        list_banned(
            constraint, constraint.build_initial_state([SearchRequest(source_ids=(), banned_phrases=("Haus",))]), 6
        )
    )


def test_every_request_has_its_own_list() -> None:
    requests = [
        SearchRequest(source_ids=(), banned_phrases=words)
        for words in ((), ("Haus",), ("am", "Haus"), ("Haus", "am"), ("See",))
    ]
    pieces = [b"", b" Haus", b" am", b" See", b"."]
    constraint = BannedPhrases(requests, TokenSpellings(pieces, 0))
    state = constraint.build_initial_state(requests)
    written = GeneratedTokens(torch.zeros(5, 1), torch.zeros(5), torch.full((5,), 50))
    got = constraint.mask_logits(torch.zeros(5, 5), state, written) == NEVER
    assert got[:, 1:4].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert constraint.build_initial_state([]).shape == (0, state.shape[1])


def list_banned_after_prefix(request: SearchRequest, pieces: list[bytes]) -> list[bool]:
    """Return which tokens are banned after a request's prefix."""
    constraint = BannedPhrases([request], TokenSpellings(pieces, 0))
    state = constraint.build_initial_state([request])
    for token in request.prefix_ids:
        state = constraint.advance_state(state, torch.tensor([token]))
    return list_banned(constraint, state, len(pieces))


def test_a_phrase_in_the_prefix_is_allowed_but_its_continuation_is_not() -> None:
    pieces = [b"", b" Haus", b" am", b" See", b"!", b"boot"]
    for prefix in ([1, 4], [1, 2], [2, 1, 3]):
        request = SearchRequest(source_ids=(), prefix_ids=prefix, banned_phrases=("Haus",))
        assert list_banned_after_prefix(request, pieces) == [False] * 6
    part = SearchRequest(source_ids=(), prefix_ids=[1], banned_phrases=("Haus",))
    assert list_banned_after_prefix(part, pieces) == [True, True, True, True, True, False]
    assert list_banned_after_prefix(replace(part, prefix_ends_word=True), pieces)[:5] == [False] * 5
    phrase = SearchRequest(source_ids=(), prefix_ids=[1, 2], banned_phrases=("Haus am See",), prefix_ends_word=True)
    assert list_banned_after_prefix(phrase, pieces[:5]) == [False, False, False, True, False]


def test_an_empty_phrase_is_rejected() -> None:
    with pytest.raises(ValueError, match="must have letters, but is '  '; leave it out"):
        BannedPhrases([SearchRequest(source_ids=(), banned_phrases=("a", "  "))], TokenSpellings([b"", b"a"], 0))


def test_word_continuations() -> None:
    pieces = ["", "a", " a", "1", ".", "'s", "手", "\u0301", "é", "\u00ada", "–"]
    spelt = [piece.encode() for piece in pieces] + [b"\xc3", b"\xa4a"]
    assert find_word_continuations(spelt).tolist() == [c in "a1\u0301é\u00ada" and c != "" for c in pieces] + [
        True,
        True,
    ]


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_sampling_never_generates_a_banned_phrase(kind: str) -> None:
    known, rng = vocabulary(kind), torch.Generator().manual_seed(3)
    pieces = get_token_bytes(known)
    requests = [SearchRequest(source_ids=(), banned_phrases=WORDS)] * 50
    constraint = BannedPhrases(requests, TokenSpellings(pieces, known.end))
    ids = known.encode([" ".join(LINES)])[0]
    likely = torch.from_numpy(np.bincount(ids, minlength=known.size)).float() + 0.01
    limit, tokens = 30, torch.zeros(50, 30, dtype=torch.int64)
    state, over = constraint.build_initial_state(requests), torch.zeros(50, dtype=torch.bool)
    for length in range(limit):
        written = GeneratedTokens(tokens, torch.full((50,), length), torch.full((50,), limit))
        logits = constraint.mask_logits(likely.log().repeat(50, 1), state, written)
        assert (logits.amax(1) > NEVER).all()
        token = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0].where(~over, known.end)
        over |= token == known.end
        tokens[:, length] = token
        state = constraint.advance_state(state, token)
    for row in tokens.tolist():
        assert not has_phrase(known.decode([i for i in row if i != known.end]), WORDS)
