"""A finite automaton that finds banned phrases in text, compiled to transitions per vocabulary token.

A phrase is found where it stands as whole words: no letter or digit before or after it. Scripts without spaces have no
such boundaries, so there it is found anywhere. Case is ignored. The automaton reads characters; each token is, from
each state, one long transition. A token may be part of a character: `<0xC3>` of SentencePiece is one byte, and many
tokens of GPT-2's kind contain incomplete characters. These are left to `banned_phrases`.
"""

import codecs
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from attent.storage.errors import AttentError
from attent.text import Vocabulary
from attent.text.scripts import UNSPACED_SCRIPTS, compile_letter_pattern
from attent.text.tokenizer_formats import BYTE_TOKEN
from attent.text.vocabulary import ESCAPE, SPACE

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


Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
PhraseList = tuple[str, ...]
PartialMatches = frozenset[tuple[int, int]]  # (phrase, characters matched)

AFTER_ESCAPE: PartialMatches = frozenset({(-1, 0)})
UNRESTRICTED, REJECTED = 0, 1  # states: no banned phrases at all; after a banned phrase
MAX_TABLE_BYTES = 2**31
MAX_CACHED_TABLES = 8  # a server sees the same lists of phrases again


# --- characters ------------------------------------------------------------------------------------------------------


@cache
def build_case_foldings() -> dict[str, str]:
    """Characters that case folding changes: A -> a, ß -> ss."""
    chars = (chr(i) for i in range(0x20000))
    return {char: char.casefold() for char in chars if char.casefold() != char}


def build_spelling_variants(phrases: Iterable[str]) -> list[str]:
    """Return the case-folded spellings to find, with composed and with decomposed accents."""
    variants: dict[str, None] = {}
    for phrase in phrases:
        text = " ".join(phrase.translate(dict.fromkeys(map(ord, ZERO_WIDTH_CHARS))).split())
        if not text:
            raise AttentError(f"a banned phrase must have letters, but is {phrase!r}; leave it out")
        variants |= dict.fromkeys(unicodedata.normalize(form, text).casefold() for form in ("NFC", "NFD"))
    return list(variants)


@dataclass(frozen=True, eq=False)
class CharacterClasses:
    """Characters that no phrase tells apart share a class, one for each kind of character."""

    class_ids: NDArray[np.int16]  # (UNICODE_SIZE,)
    kinds: list[int]  # of each class
    by_folded_text: dict[str, list[int]]  # classes of the characters with this case folding

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Self:
        joined = "\n".join(texts)
        folds = {char: char for char in joined}
        folds |= {char: fold for char, fold in build_case_foldings().items() if fold in joined}
        char_kinds = get_char_kinds()
        class_ids, kinds = char_kinds.astype(np.int16), [HIDDEN, OTHER, WORD, BLANK]
        known: dict[tuple[str, int], int] = {}
        by_folded_text: dict[str, list[int]] = {}
        for char, fold in folds.items():
            kind = int(char_kinds[ord(char)])
            if kind in (HIDDEN, BLANK):
                continue
            if (fold, kind) not in known:
                known[fold, kind] = len(kinds)
                by_folded_text.setdefault(fold, []).append(len(kinds))
                kinds.append(kind)
            class_ids[ord(char)] = known[fold, kind]
        return cls(class_ids, kinds, by_folded_text)

    def list_transitions(self, text: str, position: int) -> list[tuple[int, int]]:
        """Return the classes that continue a text from `position`, each with the next position."""
        folds = {text[position : position + n] for n in (1, 2, 3)}  # case folding gives at most three characters
        steps = [
            (char_class, position + len(fold)) for fold in folds for char_class in self.by_folded_text.get(fold, ())
        ]
        if text[position : position + 1] == " ":
            steps.append((BLANK, position + 1))
        if text[:position].endswith(" "):
            steps.append((BLANK, position))  # several spaces count as one
        return steps


class CharacterAutomaton:
    """Reads text by characters. A state is the partial matches and whether it is inside a word; ids from `offset`."""

    def __init__(self, texts: Sequence[str], classes: CharacterClasses, offset: int) -> None:
        self.texts, self.classes, self.offset = texts, classes, offset
        self.is_word = [kind == WORD for kind in classes.kinds]
        self.transitions = [[classes.list_transitions(text, i) for i in range(len(text) + 1)] for text in texts]
        self.state_ids: dict[tuple[PartialMatches, bool], int] = {}
        self.states: list[tuple[PartialMatches, bool]] = []
        self.get_state_id(frozenset(), False)
        # Most states differ from the empty one in a few characters only.
        self.initial_matches = self._extend_matches(frozenset((phrase, 0) for phrase in range(len(texts))))
        self.default_rows = [
            [self._get_next_state(i, self._start_matches(i, in_word)) for i in range(len(self.is_word))]
            for in_word in (False, True)
        ]
        self.rows = [self._build_row(matches, in_word) for matches, in_word in self.states]  # grows while it is read
        # Banned unless a letter follows.
        self.ends_in_match = [self._is_complete(matches) for matches, _ in self.states]

    def get_state_id(self, matches: PartialMatches, in_word: bool) -> int:
        state = matches, in_word
        if state not in self.state_ids:
            self.state_ids[state] = self.offset + len(self.states)
            self.states.append(state)
        return self.state_ids[state]

    def _is_complete(self, matches: PartialMatches) -> bool:
        return any(position == len(self.texts[phrase]) for phrase, position in matches if phrase >= 0)

    def _extend_matches(self, matches: PartialMatches) -> dict[int, PartialMatches]:
        extended: dict[int, set[tuple[int, int]]] = {}
        for phrase, position in matches - AFTER_ESCAPE:
            for char_class, next_position in self.transitions[phrase][position]:
                extended.setdefault(char_class, set()).add((phrase, next_position))
        return {char_class: frozenset(items) for char_class, items in extended.items()}

    def _start_matches(self, char_class: int, in_word: bool) -> PartialMatches:
        is_inside = in_word and self.is_word[char_class]
        return frozenset() if is_inside else self.initial_matches.get(char_class, frozenset())

    def _get_next_state(self, char_class: int, matches: PartialMatches) -> int:
        """Return the state after a character. A phrase whose last character is no letter needs no boundary."""
        is_word = self.is_word[char_class]
        return REJECTED if self._is_complete(matches) and not is_word else self.get_state_id(matches, is_word)

    def _build_row(self, matches: PartialMatches, in_word: bool) -> list[int]:
        row = list(self.default_rows[in_word])
        for char_class, extended in self._extend_matches(matches).items():
            row[char_class] = self._get_next_state(char_class, extended | self._start_matches(char_class, in_word))
        if self._is_complete(matches):
            row = [state if is_word else REJECTED for state, is_word in zip(row, self.is_word, strict=True)]
        row[HIDDEN] = self.get_state_id(matches, in_word)
        for escape in self.classes.by_folded_text.get(ESCAPE, ()):
            # An escape and the character after it are one character, which is no letter.
            if matches == AFTER_ESCAPE:
                for char_class in (HIDDEN, *self.classes.by_folded_text["0"], *self.classes.by_folded_text["1"]):
                    row[char_class] = self.offset
            row[escape] = REJECTED if self._is_complete(matches) else self.get_state_id(AFTER_ESCAPE, False)
        return row


@lru_cache(MAX_CACHED_TABLES)
def build_text_automaton(phrases: PhraseList) -> CharacterAutomaton:
    texts = build_spelling_variants(phrases)
    return CharacterAutomaton(texts, CharacterClasses.from_texts(texts), REJECTED + 1)


def find_phrase(text: str, phrases: PhraseList, *, is_partial: bool = False) -> str | None:
    """Return a phrase that the text contains; None if it has none. `is_partial`: the last word may be continued."""
    if not phrases:
        return None
    automaton = build_text_automaton(phrases)
    state = automaton.offset
    for char_class in automaton.classes.class_ids[list(map(ord, text))]:
        state = automaton.rows[state - automaton.offset][char_class]
        if state == REJECTED:
            break
    if state != REJECTED and (is_partial or not automaton.ends_in_match[state - automaton.offset]):
        return None
    alone = (phrase for phrase in phrases if find_phrase(text, (phrase,), is_partial=is_partial))
    return phrases[0] if len(phrases) == 1 else next(alone)


# --- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TransitionTables:
    start_states: dict[PhraseList, int]
    char_classes: NDArray[np.int16]  # (UNICODE_SIZE,)
    char_transitions: Ints  # (Q, K) the state after a character
    ends_in_match: Bools  # (Q,) the text would end in a banned phrase if it ended here
    first_class: Ints  # (V,) class of a token's first character
    row_index: Ints  # (Q, K) the row of `next_state` for a token that starts with this class
    next_state: Ints  # (N, V) the state after a token
    banned_tokens: Bools  # (2Q, V); in the second half also tokens that leave the text open


@dataclass(frozen=True, eq=False)
class TokenGroup:
    """Tokens that start with one character class: states that this class leads to one state share a row."""

    token_ids: NDArray[np.int64]  # (n,)
    row_index: NDArray[np.int64]  # (Q,) the row of a state
    next_state: Ints  # (m, n) the state after each token, by the m states after the first character


class TokenSpellings:
    """The tokens of a vocabulary, split into leading bytes, whole characters and trailing bytes."""

    def __init__(self, pieces: Sequence[bytes], end: int) -> None:
        self.end, self.size = end, len(pieces)
        self.has_escape = ESCAPE.encode() in pieces
        parts = [split_token_bytes(piece) for piece in pieces]
        texts = [text.lstrip(ZERO_WIDTH_CHARS) for _, text, _ in parts]
        self.lengths = np.array([len(text) for text in texts])
        self.char_codes = np.zeros((self.size, max(self.lengths, default=0)), dtype=np.int64)
        columns = np.arange(self.char_codes.shape[1])
        self.char_codes[columns < self.lengths[:, None]] = [ord(char) for text in texts for char in text]
        self.partial_char_token_ids = [i for i, (head, _, tail) in enumerate(parts) if head or tail]
        self.head_bytes = pad_byte_rows([parts[i][0] for i in self.partial_char_token_ids])
        self.tail_bytes = pad_byte_rows([parts[i][2] for i in self.partial_char_token_ids])
        self._cache: dict[frozenset[PhraseList], TransitionTables] = {}

    def get_tables(self, phrase_lists: frozenset[PhraseList]) -> TransitionTables:
        tables = self._cache.pop(phrase_lists, None) or self._build_tables(sorted(phrase_lists))
        self._cache[phrase_lists] = tables
        for oldest in list(self._cache)[:-MAX_CACHED_TABLES]:
            del self._cache[oldest]
        return tables

    def _build_tables(self, phrase_lists: Sequence[PhraseList]) -> TransitionTables:
        variants = {phrases: build_spelling_variants(phrases) for phrases in phrase_lists}
        texts = [text for spellings in variants.values() for text in spellings]
        classes = CharacterClasses.from_texts([*texts, *([ESCAPE, "0", "1"] if self.has_escape else [])])
        width = len(classes.kinds)
        start_states: dict[PhraseList, int] = {(): UNRESTRICTED}
        rows, ends_in_match = [[UNRESTRICTED] * width, [REJECTED] * width], [False, False]
        for phrases in filter(None, phrase_lists):
            automaton = CharacterAutomaton(variants[phrases], classes, len(rows))
            start_states[phrases] = len(rows)
            rows += automaton.rows
            ends_in_match += automaton.ends_in_match
        needed = 2 * len(rows) * self.size
        if needed > MAX_TABLE_BYTES:
            raise AttentError(
                f"the banned phrases must fit into {MAX_TABLE_BYTES >> 30} GiB of memory, but {len(texts)} spellings "
                f"with {self.size} tokens in the vocabulary take {needed / 2**30:.1f}; ban fewer"
            )
        return self._compile_tables(
            start_states, classes.class_ids, np.array(rows, dtype=np.int32), np.array(ends_in_match)
        )

    def _compile_tables(
        self,
        start_states: dict[PhraseList, int],
        char_classes: NDArray[np.int16],
        char_transitions: Ints,
        ends_in_match: Bools,
    ) -> TransitionTables:
        token_classes = char_classes[self.char_codes]
        is_empty = self.lengths == 0
        first = np.where(is_empty, HIDDEN, token_classes[:, 0] if token_classes.shape[1] else HIDDEN).astype(np.int32)
        groups: dict[int, TokenGroup] = {}
        for char_class in np.unique(first[~is_empty]):
            token_ids = np.flatnonzero((first == char_class) & ~is_empty)
            groups[char_class] = self._build_group(token_ids, token_classes, char_transitions)
        remove_dead_ends(list(groups.values()), ends_in_match)
        rows = max((len(group.next_state) for group in groups.values()), default=0)
        row_index, next_state = np.zeros_like(char_transitions), np.zeros((rows, self.size), dtype=np.int32)
        for char_class, group in groups.items():
            row_index[:, char_class] = group.row_index
            next_state[: len(group.next_state), group.token_ids] = group.next_state
        states = np.arange(len(char_transitions))
        unchanged = np.repeat(states[:, None], is_empty.sum(), 1).astype(np.int32)
        every = [*groups.values(), TokenGroup(np.flatnonzero(is_empty), states, unchanged)]
        is_rejected = states == REJECTED
        leading = [find_tokens_reaching(every, is_rejected), find_tokens_reaching(every, is_rejected | ends_in_match)]
        banned = np.concatenate(leading)
        banned[np.tile(ends_in_match, 2), self.end] = True
        return TransitionTables(
            start_states, char_classes, char_transitions, ends_in_match, first, row_index, next_state, banned
        )

    def _build_group(
        self, token_ids: NDArray[np.int64], token_classes: NDArray[np.int16], char_transitions: Ints
    ) -> TokenGroup:
        # Longest first: the tokens that have characters left are then the first n.
        token_ids = token_ids[np.argsort(-self.lengths[token_ids], kind="stable")]
        states, row_index = np.unique(char_transitions[:, token_classes[token_ids[0], 0]], return_inverse=True)
        next_state = np.repeat(states[:, None], len(token_ids), 1)
        for i in range(1, self.lengths[token_ids[0]]):
            n = np.searchsorted(-self.lengths[token_ids], -i)  # tokens of more than i characters
            next_state[:, :n] = char_transitions[next_state[:, :n], token_classes[token_ids[:n], i]]
        return TokenGroup(token_ids, row_index, next_state)


def find_tokens_reaching(groups: Sequence[TokenGroup], target_states: Bools) -> Bools:
    """Return (Q, V) which tokens lead from each state to one of `target_states`. Columns are sorted last, for speed."""
    leads = np.concatenate([target_states[group.next_state][group.row_index] for group in groups], 1)
    return leads.take(np.argsort(np.concatenate([group.token_ids for group in groups])), 1)


def remove_dead_ends(groups: Sequence[TokenGroup], ends_in_match: Bools) -> None:
    """Reject states that end in a match and cannot be left: a letter must follow, and no token starts with one."""
    is_dead = np.zeros_like(ends_in_match)
    while True:
        is_alive = ~ends_in_match
        for group in groups:
            group.next_state[is_dead[group.next_state]] = REJECTED
            is_alive = is_alive | (group.next_state != REJECTED).any(1)[group.row_index]
        is_alive[[UNRESTRICTED, REJECTED]] = True
        if (is_dead == ~is_alive).all():
            return
        is_dead = ~is_alive


def split_token_bytes(piece: bytes) -> tuple[bytes, str, bytes]:
    """Split into bytes that end a character, whole characters, and bytes that start one."""
    head = next((i for i, byte in enumerate(piece[:3]) if not 0x80 <= byte < 0xC0), min(len(piece), 3))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(piece[head:])
    return (piece[:head], text, decoder.getstate()[0]) if text else (piece, "", b"")


def pad_byte_rows(rows: Sequence[bytes]) -> Ints:
    """Pad with -1; row 0 is empty, for tokens of whole characters."""
    width = max(map(len, rows), default=0)
    return np.array([[-1] * width, *([*row, *[-1] * (width - len(row))] for row in rows)], dtype=np.int32)
