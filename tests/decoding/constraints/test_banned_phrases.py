"""Forbidden words against plain Python that looks for them in the decoded text, with tokenizers of every kind."""

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
from attent.decoding.constraints.phrase_automaton import BannedPhraseError, TokenSpellings
from attent.decoding.options import SearchRequest
from attent.decoding.token_bytes import find_word_continuations, get_token_bytes
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
def is_letter(one: str) -> bool:
    return unicodedata.category(one)[0] in "LMN" and not compile_letter_pattern(UNSPACED_SCRIPTS).search(one)


def folded(text: str) -> str:
    return re.sub(r"\s+", " ", text.casefold())


def appears(text: str, words: Sequence[str]) -> bool:
    """Does one of the words stand in a text, as a whole?"""
    text = "".join(one for one in text if one not in UNSEEN)
    spellings = {folded(unicodedata.normalize(form, word)) for word in words for form in ("NFC", "NFD")}
    borders = [i in (0, len(text)) or not (is_letter(text[i - 1]) and is_letter(text[i])) for i in range(len(text) + 1)]
    places = [i for i, border in enumerate(borders) if border]
    return any(folded(text[i:j]) in spellings for i in places for j in places if i < j <= i + 24)


@cache
def beginnings() -> frozenset[bytes]:
    """What characters that do not end a word begin with, in bytes."""
    some = map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE1000)])  # all letters and marks
    spelt = [one.encode() for one in some if is_letter(one) or one in UNSEEN]
    return frozenset(one[:n] for one in spelt for n in range(1, len(one)))


def open_bytes(written: bytes) -> bytes:
    """The beginning of a character, where a text ends in one."""
    for n in (1, 2, 3):
        tail = written[-n:]
        if tail and tail[0] >= 0xC2 and tail[0] < 0xF5 and n < (2 if tail[0] < 0xE0 else 3 if tail[0] < 0xF0 else 4):
            return tail
        if not (tail and 0x80 <= tail[0] < 0xC0):
            return b""
    return b""


def wrong(text: str, written: bytes, words: Sequence[str]) -> bool:
    """Is it too late, whatever letter may come next? Where a text ends within a character, its bytes are looked at."""
    tail = open_bytes(written)
    if not tail:
        return appears(text + "x", words)
    whole = written[: -len(tail)].decode(errors="replace").replace("\x1a1", "▁").replace("\x1a0", "\x1a")
    return appears(whole + "x", words) or (appears(whole, words) and tail not in beginnings())


# --- the rule beside it ----------------------------------------------------------------------------------------------


def banned(rule: BannedPhrases, state: Tensor, size: int, room: int = 50) -> list[bool]:
    written = GeneratedTokens(torch.zeros(len(state), 1), torch.zeros(len(state)), torch.full((len(state),), room))
    return (rule.mask_scores(torch.zeros(len(state), size), state, written)[0] == NEVER).tolist()


def tempting(pieces: list[bytes]) -> list[int]:
    """Pieces that words are made of, and bytes."""
    letters = "".join(WORDS).casefold().encode() + "„“ .\u00adʼ–".encode()
    likely = [i for i, piece in enumerate(pieces) if piece and all(byte in letters for byte in piece.lower())]
    return [i for i in (*likely, *likely, *range(len(pieces))) if pieces[i]]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "gpt2"])
@pytest.mark.parametrize("seed", range(2))
def test_a_token_is_forbidden_where_the_text_would_have_a_forbidden_word_and_nowhere_else(kind: str, seed: int) -> None:
    known, chance = vocabulary(kind), random.Random(seed)
    pieces, words = get_token_bytes(known), WORDS
    job, some = SearchRequest(source_ids=(), banned_phrases=words), tempting(pieces)
    rule = BannedPhrases([job], TokenSpellings(pieces, known.end))
    seen = 0
    for _ in range(8):
        state, ids = rule.build_initial_state([job]), []
        for word in (chance.choice(words), chance.choice(words)):
            for goal in near(known, word, chance):
                got = banned(rule, state, known.size)
                text = known.decode(ids)
                if not open_bytes(b"".join(pieces[i] for i in ids)):
                    assert got[known.end] == appears(text, words), text
                for token in {goal, *chance.sample(some, 12)}:
                    after, written = known.decode([*ids, token]), b"".join(pieces[i] for i in [*ids, token])
                    assert got[token] == wrong(after, written, words), (text, pieces[token])
                    seen += got[token]
                token = goal if not got[goal] else next(i for i in chance.sample(some, len(some)) if not got[i])
                ids.append(token)
                state = rule.advance_state(state, torch.tensor([token]))
    assert seen > 25


def near(known: Vocabulary, word: str, chance: random.Random) -> list[int]:
    """A word as tokens, in other letters perhaps, or spelled in bytes."""
    word = chance.choice([str.lower, str.upper, str.title, str])(word)
    word = unicodedata.normalize(chance.choice(["NFC", "NFD"]), word)
    if chance.random() < 0.5:
        return known.encode([word + chance.choice(["", "e", ".", "boot"])])[0]
    names = known.to_pieces(range(known.size))
    spaced = names.index("▁") if "▁" in names else names.index("Ġ")
    single = {piece: i for i, piece in enumerate(get_token_bytes(known)) if len(piece) == 1}
    return [spaced, *(single.get(bytes([byte]), spaced) for byte in word.encode())]


@pytest.mark.parametrize("separate", [False, True])
def test_the_pieces_of_a_marian_model_are_read_as_they_are_decoded(separate: bool, tmp_path: Path) -> None:
    folder = marian_folder(tmp_path, separate, tags=(">>deu<<",))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    known = MarianVocabulary(
        files["target.spm"], "", read_vocab_json(files, "target_vocab.json" if separate else "vocab.json", "")
    )
    as_written(known, random.Random(0))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "gpt2"])
def test_what_pieces_write_is_what_is_decoded(kind: str) -> None:
    as_written(vocabulary(kind), random.Random(1))


def as_written(known: Vocabulary, chance: random.Random) -> None:
    pieces = get_token_bytes(known, known.size + 3)
    assert len(pieces) == known.size + 3
    silent = [i for i in range(known.size) if not pieces[i]]
    assert known.end in silent
    assert len(silent) < 10
    whole = [i for i in range(known.size) if valid(pieces[i]) and b"\x1a" not in pieces[i]]
    for _ in range(200):
        ids = chance.choices(whole, k=10)
        assert b"".join(pieces[i] for i in ids).decode().strip() == known.decode(ids).strip()


def valid(piece: bytes) -> bool:
    return b"\xef\xbf\xbd" not in piece.decode(errors="replace").encode()


# --- single things ---------------------------------------------------------------------------------------------------


def left(words: tuple[str, ...], text: str | bytes, pieces: list[bytes], room: int = 50) -> set[bytes]:
    """What may come behind a text; b"" is the end."""
    job = SearchRequest(source_ids=(), banned_phrases=words)
    rule = BannedPhrases([job], TokenSpellings(pieces, 0))
    state = rule.build_initial_state([job])
    for byte in text.encode() if isinstance(text, str) else text:
        state = rule.advance_state(state, torch.tensor([pieces.index(bytes([byte]))]))
    return {pieces[i] for i, no in enumerate(banned(rule, state, len(pieces), room)) if not no}


BYTES = [b"", *(bytes([i]) for i in range(256))]


@pytest.mark.parametrize(
    ("words", "text", "found"),
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
def test_the_end_is_forbidden_where_a_text_ends_in_a_forbidden_word(
    words: tuple[str, ...], text: str, found: bool
) -> None:
    assert (b"" not in left(words, text, BYTES)) is found


def test_behind_a_forbidden_word_only_what_makes_another_of_it_may_come() -> None:
    may = left(("Haus",), "Haus", BYTES)
    ascii_ones = {chr(i) for i in range(128) if bytes([i]) in may}
    assert ascii_ones == {chr(i) for i in range(128) if chr(i).isalnum()}
    assert b"\xc3" in may
    assert b"\xe3" in may
    assert not {bytes([i]) for i in range(0x80, 0xC2)} & may


def test_a_character_begun_behind_a_forbidden_word_can_be_finished_as_a_letter() -> None:
    job = SearchRequest(source_ids=(), banned_phrases=("Haus",))
    rule = BannedPhrases([job], TokenSpellings(BYTES, 0))
    for first in left(("Haus",), "Haus", BYTES):
        state = rule.build_initial_state([job])
        for byte in b"Haus" + first:
            state = rule.advance_state(state, torch.tensor([byte + 1]))
        while int(state[0, 1]):
            free = [i for i, no in enumerate(banned(rule, state, 257)) if not no]
            assert free
            assert all(0x80 <= i - 1 < 0xC0 for i in free)
            state = rule.advance_state(state, torch.tensor([free[-1]]))
        assert not banned(rule, state, 257)[0], "the text may end"


def test_a_letter_spelled_in_too_many_bytes_is_none() -> None:
    overlong = b"\xe0\x81\xb5"  # the number of u, which is decoded as three signs that are no letters
    assert b"" in left(("Haus",), b"Ha" + overlong + b"s", BYTES)
    assert b"" not in left(("s",), b"Ha" + overlong + b"s", BYTES)
    may = left(("Haus",), b"Haus\xe0", BYTES)
    assert b"\x81" not in may
    assert b"\xa4" in may


def test_a_piece_may_end_a_character_and_go_on_with_text() -> None:
    pieces = [b"", b"Haus", b"\xc3", b"\xa4", b"\xa4.", b"\xa4n"]
    job = SearchRequest(source_ids=(), banned_phrases=("Hausä",))
    rule = BannedPhrases([job], TokenSpellings(pieces, 0))
    state = rule.build_initial_state([job])
    for token in (1, 2):
        state = rule.advance_state(state, torch.tensor([token]))
    assert banned(rule, state, 6) == [False, False, False, False, True, False]
    assert banned(rule, rule.advance_state(state, torch.tensor([3])), 6)[0]
    assert not banned(rule, rule.advance_state(state, torch.tensor([5])), 6)[0]


def test_an_escape_and_what_it_stands_for_are_one_character() -> None:
    for text in ("\x1a1Haus", "\x1a0Haus"):
        assert b"" not in left(("Haus",), text, BYTES), "the text is `▁Haus`"
    assert b"" in left(("Haus",), "1Haus", BYTES)


def test_no_forbidden_word_is_left_where_a_row_is_cut() -> None:
    assert b"s" in left(("Haus",), "Hau", BYTES, room=3)
    for room in (1, 2):
        assert b"s" not in left(("Haus",), "Hau", BYTES, room)
        assert b"x" in left(("Haus",), "Hau", BYTES, room)
        assert b"" in left(("Haus",), "Hau", BYTES, room)


def test_a_vocabulary_of_whole_words_does_not_begin_what_it_cannot_go_on_with() -> None:
    pieces = [b"", b" Haus", b" am", b" See", b"!"]
    rule = BannedPhrases([SearchRequest(source_ids=(), banned_phrases=("Haus",))], TokenSpellings(pieces, 0))
    assert banned(rule, rule.build_initial_state([SearchRequest(source_ids=(), banned_phrases=("Haus",))]), 5) == [
        False,
        True,
        False,
        False,
        False,
    ]
    pieces.append(b"boot")
    rule = BannedPhrases([SearchRequest(source_ids=(), banned_phrases=("Haus",))], TokenSpellings(pieces, 0))
    assert not any(banned(rule, rule.build_initial_state([SearchRequest(source_ids=(), banned_phrases=("Haus",))]), 6))


def test_every_job_has_its_own_list() -> None:
    jobs = [
        SearchRequest(source_ids=(), banned_phrases=words)
        for words in ((), ("Haus",), ("am", "Haus"), ("Haus", "am"), ("See",))
    ]
    pieces = [b"", b" Haus", b" am", b" See", b"."]
    rule = BannedPhrases(jobs, TokenSpellings(pieces, 0))
    state = rule.build_initial_state(jobs)
    written = GeneratedTokens(torch.zeros(5, 1), torch.zeros(5), torch.full((5,), 50))
    got = rule.mask_scores(torch.zeros(5, 5), state, written) == NEVER
    assert got[:, 1:4].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert rule.build_initial_state([]).shape == (0, state.shape[1])


def behind(job: SearchRequest, pieces: list[bytes]) -> list[bool]:
    """What is forbidden behind a job's prefix."""
    rule = BannedPhrases([job], TokenSpellings(pieces, 0))
    state = rule.build_initial_state([job])
    for token in job.prefix_ids:
        state = rule.advance_state(state, torch.tensor([token]))
    return banned(rule, state, len(pieces))


def test_what_a_prefix_says_is_not_forbidden_but_what_goes_on_with_it_is() -> None:
    pieces = [b"", b" Haus", b" am", b" See", b"!", b"boot"]
    for prefix in ([1, 4], [1, 2], [2, 1, 3]):
        job = SearchRequest(source_ids=(), prefix_ids=prefix, banned_phrases=("Haus",))
        assert behind(job, pieces) == [False] * 6
    part = SearchRequest(source_ids=(), prefix_ids=[1], banned_phrases=("Haus",))
    assert behind(part, pieces) == [True, True, True, True, True, False]
    assert behind(replace(part, prefix_ends_word=True), pieces)[:5] == [False] * 5
    phrase = SearchRequest(source_ids=(), prefix_ids=[1, 2], banned_phrases=("Haus am See",), prefix_ends_word=True)
    assert behind(phrase, pieces[:5]) == [False, False, False, True, False]


def test_an_empty_word_is_an_error_that_says_so() -> None:
    with pytest.raises(BannedPhraseError, match="must have letters, but is '  '; leave it out"):
        BannedPhrases([SearchRequest(source_ids=(), banned_phrases=("a", "  "))], TokenSpellings([b"", b"a"], 0))


def test_pieces_that_go_on_with_a_word() -> None:
    pieces = ["", "a", " a", "1", ".", "'s", "手", "\u0301", "é", "\u00ada", "–"]
    spelt = [piece.encode() for piece in pieces] + [b"\xc3", b"\xa4a"]
    assert find_word_continuations(spelt).tolist() == [c in "a1\u0301é\u00ada" and c != "" for c in pieces] + [
        True,
        True,
    ]


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_a_search_by_chance_never_writes_a_forbidden_word(kind: str) -> None:
    known, chance = vocabulary(kind), torch.Generator().manual_seed(3)
    pieces = get_token_bytes(known)
    jobs = [SearchRequest(source_ids=(), banned_phrases=WORDS)] * 50
    rule = BannedPhrases(jobs, TokenSpellings(pieces, known.end))
    ids = known.encode([" ".join(LINES)])[0]
    likely = torch.from_numpy(np.bincount(ids, minlength=known.size)).float() + 0.01
    limit, tokens = 30, torch.zeros(50, 30, dtype=torch.int64)
    state, over = rule.build_initial_state(jobs), torch.zeros(50, dtype=torch.bool)
    for length in range(limit):
        written = GeneratedTokens(tokens, torch.full((50,), length), torch.full((50,), limit))
        scores = rule.mask_scores(likely.log().repeat(50, 1), state, written)
        assert (scores.amax(1) > NEVER).all()
        token = torch.multinomial(scores.softmax(1), 1, generator=chance)[:, 0].where(~over, known.end)
        over |= token == known.end
        tokens[:, length] = token
        state = rule.advance_state(state, token)
    for row in tokens.tolist():
        assert not appears(known.decode([i for i in row if i != known.end]), WORDS)
