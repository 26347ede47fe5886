"""Words that must not appear in what is written, however a tokenizer cuts them, in capitals or small letters.

A forbidden word is one that stands in the text as a whole: no letter or digit before or behind it. Where a script has
no spaces there are no such borders, and it must not stand there at all. An automaton reads the characters of the text;
each piece of the vocabulary is, from each of its states, one long step. Pieces that are no whole characters (`<0xC3>`)
are read byte by byte, on the device. What pieces write is `spelling`'s.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, GeneratedTokens
from attent.decoding.options import SearchRequest
from attent.decoding.token_bytes import (
    BLANK,
    ESCAPE,
    HIDDEN,
    OTHER,
    UNICODE_SIZE,
    WORD,
    ZERO_WIDTH_CHARS,
    get_char_kinds,
)

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
WordList = tuple[str, ...]
PartialMatches = frozenset[tuple[int, int]]  # how far which words have come: (word, characters)

AFTER_ESCAPE: PartialMatches = frozenset({(-1, 0)})  # an escape has been read
UNRESTRICTED, REJECTED = 0, 1  # states: of a text without forbidden words; behind one
MAX_TABLE_BYTES = 2**31  # entries of a table: bytes of memory
MAX_CACHED_TABLES = 8  # tables that are kept for the next texts: a server meets the same lists again


class BannedPhraseError(ValueError):
    """Words that cannot be forbidden; the message says why and what to do."""


# --- words as characters ---------------------------------------------------------------------------------------------


@cache
def build_case_foldings() -> dict[str, str]:
    """Characters that are written otherwise when case is ignored: A -> a, ß -> ss."""
    cased = (chr(i) for i in range(0x20000))
    return {one: one.casefold() for one in cased if one.casefold() != one}


def build_spelling_variants(words: Iterable[str]) -> list[str]:
    """The spellings to look for, case folded: accents as part of their letters, and behind them."""
    found: dict[str, None] = {}
    for word in words:
        plain = " ".join(word.translate(dict.fromkeys(map(ord, ZERO_WIDTH_CHARS))).split())
        if not plain:
            raise BannedPhraseError(f"a forbidden word must have letters, but is {word!r}; leave it out")
        found |= dict.fromkeys(unicodedata.normalize(form, plain).casefold() for form in ("NFC", "NFD"))
    return list(found)


@dataclass(frozen=True, eq=False)
class CharacterClasses:
    """Characters that make no difference to any of the words are one class, by what they are to words in general."""

    class_ids: NDArray[np.int16]  # (UNICODE,) the class of each character
    kinds: list[int]  # of each class
    by_folded_text: dict[str, list[int]]  # the classes of characters that are, case folded, this text

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CharacterClasses:
        """Those that tell these texts apart."""
        together = "\n".join(texts)
        folds = {one: one for one in together} | {
            one: fold for one, fold in build_case_foldings().items() if fold in together
        }
        kind_of = get_char_kinds()
        of, found = kind_of.astype(np.int16), [HIDDEN, OTHER, WORD, BLANK]
        classes: dict[tuple[str, int], int] = {}
        letters: dict[str, list[int]] = {}
        for one, fold in folds.items():
            kind = int(kind_of[ord(one)])
            if kind in (HIDDEN, BLANK):
                continue
            if (fold, kind) not in classes:
                classes[fold, kind] = len(found)
                letters.setdefault(fold, []).append(len(found))
                found.append(kind)
            of[ord(one)] = classes[fold, kind]
        return cls(of, found, letters)

    def list_transitions(self, text: str, position: int) -> list[tuple[int, int]]:
        """Which classes of characters go on with a text behind its first characters, and how far it is then."""
        nexts = {text[position : position + n] for n in (1, 2, 3)}  # no character becomes more than three
        found = [(one, position + len(fold)) for fold in nexts for one in self.by_folded_text.get(fold, ())]
        if text[position : position + 1] == " ":
            found.append((BLANK, position + 1))
        if text[:position].endswith(" "):
            found.append((BLANK, position))  # one space or many
        return found


# --- the automaton over characters -----------------------------------------------------------------------------------


class CharacterAutomaton:
    """Reads text character by character. A state is how far which words have come, and whether a word is being written;
    their numbers begin at `offset`, the first of them is the start."""

    def __init__(self, texts: Sequence[str], classes: CharacterClasses, offset: int) -> None:
        self.texts, self.classes, self.offset = texts, classes, offset
        self.is_word = [kind == WORD for kind in classes.kinds]
        self.transitions = [[classes.list_transitions(text, at) for at in range(len(text) + 1)] for text in texts]
        self.state_ids: dict[tuple[PartialMatches, bool], int] = {}
        self.states: list[tuple[PartialMatches, bool]] = []
        self.get_state_id(frozenset(), False)
        # From nothing. Most other states go on like that, but for a few characters.
        self.initial_matches = self._extend_matches(frozenset((word, 0) for word in range(len(texts))))
        self.default_rows = {in_word: self._build_default_row(in_word) for in_word in (False, True)}
        self.rows = [self._build_row(items, in_word) for items, in_word in self.states]  # the list grows meanwhile
        self.is_open = [self._is_complete(items) for items, _ in self.states]  # a forbidden word, unless a letter comes

    def get_state_id(self, matches: PartialMatches, in_word: bool) -> int:
        state = matches, in_word
        if state not in self.state_ids:
            self.state_ids[state] = self.offset + len(self.states)
            self.states.append(state)
        return self.state_ids[state]

    def _is_complete(self, matches: PartialMatches) -> bool:
        return any(at == len(self.texts[word]) for word, at in matches if word >= 0)

    def _extend_matches(self, matches: PartialMatches) -> dict[int, PartialMatches]:
        """What becomes of words that have begun, for each class of characters that goes on with one."""
        found: dict[int, set[tuple[int, int]]] = {}
        for word, at in matches - AFTER_ESCAPE:
            for one, further in self.transitions[word][at]:
                found.setdefault(one, set()).add((word, further))
        return {one: frozenset(grown) for one, grown in found.items()}

    def _start_matches(self, char_class: int, in_word: bool) -> PartialMatches:
        return (
            frozenset() if in_word and self.is_word[char_class] else self.initial_matches.get(char_class, frozenset())
        )

    def _get_next_state(self, char_class: int, matches: PartialMatches) -> int:
        """Behind a character. A word whose last character is no letter needs no border."""
        return (
            REJECTED
            if self._is_complete(matches) and not self.is_word[char_class]
            else self.get_state_id(matches, self.is_word[char_class])
        )

    def _build_default_row(self, in_word: bool) -> list[int]:
        return [self._get_next_state(one, self._start_matches(one, in_word)) for one in range(len(self.is_word))]

    def _build_row(self, matches: PartialMatches, in_word: bool) -> list[int]:
        """Where each class of characters leads to."""
        row = list(self.default_rows[in_word])
        for one, grown in self._extend_matches(matches).items():
            row[one] = self._get_next_state(one, grown | self._start_matches(one, in_word))
        if self._is_complete(matches):
            row = [state if is_word else REJECTED for state, is_word in zip(row, self.is_word, strict=True)]
        row[HIDDEN] = self.get_state_id(matches, in_word)
        for escape in self.classes.by_folded_text.get(ESCAPE, ()):
            self._add_escape(row, escape, matches)
        return row

    def _add_escape(self, row: list[int], escape: int, matches: PartialMatches) -> None:
        """What follows an escape belongs to it, and both are one character that is no letter."""
        if matches == AFTER_ESCAPE:
            for one in (HIDDEN, *self.classes.by_folded_text["0"], *self.classes.by_folded_text["1"]):
                row[one] = self.offset
        row[escape] = REJECTED if self._is_complete(matches) else self.get_state_id(AFTER_ESCAPE, False)


# --- the automaton over pieces ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TransitionTables:
    """What becomes of each state Q behind each of the V pieces."""

    start_states: dict[WordList, int]
    char_classes: NDArray[np.int16]  # (UNICODE,) of characters
    char_transitions: Ints  # (Q, K) the state behind a character of each class
    is_open: Bools  # (Q,) would the text, if it ended here, end in a forbidden word?
    first_class: Ints  # (V,) the class of a piece's first character
    row_index: Ints  # (Q, K) behind a piece that begins with such a character: the row of `after`
    next_state: Ints  # (N, V) the state behind a piece
    banned_tokens: Bools  # (2Q, V) may a piece not come? In the second half: nor if it must not leave the text open


@dataclass(frozen=True, eq=False)
class TokenGroup:
    """Pieces that begin with characters of one class: wherever that leads to the same state, all else is the same."""

    token_ids: NDArray[np.int64]  # (n,)
    row_index: NDArray[np.int64]  # (Q,) which row below is that of a state
    next_state: Ints  # (m, n) the state behind each piece, from each of m states behind the first character


class TokenSpellings:
    """The pieces of a vocabulary, cut into whole characters and bytes that are none, before and behind them."""

    def __init__(self, pieces: Sequence[bytes], end: int) -> None:
        self.end, self.size = end, len(pieces)
        self.has_escape = ESCAPE.encode() in pieces
        parts = [split_token_bytes(piece) for piece in pieces]
        texts = [text.lstrip(ZERO_WIDTH_CHARS) for _, text, _ in parts]
        self.lengths = np.array([len(text) for text in texts])
        self.char_codes = np.zeros((self.size, max(self.lengths, default=0)), dtype=np.int64)
        self.char_codes[np.arange(self.char_codes.shape[1]) < self.lengths[:, None]] = [
            ord(one) for text in texts for one in text
        ]
        self.partial_ids = [i for i, (head, _, tail) in enumerate(parts) if head or tail]
        self.head_bytes = pad_rows([parts[i][0] for i in self.partial_ids])
        self.tail_bytes = pad_rows([parts[i][2] for i in self.partial_ids])
        self._cache: dict[frozenset[WordList], TransitionTables] = {}

    def get_tables(self, word_lists: frozenset[WordList]) -> TransitionTables:
        """For texts each of which has one of these lists of forbidden words."""
        found = self._cache.pop(word_lists, None) or self._build_tables(sorted(word_lists))
        self._cache[word_lists] = found
        for old in list(self._cache)[:-MAX_CACHED_TABLES]:
            del self._cache[old]
        return found

    def _build_tables(self, word_lists: Sequence[WordList]) -> TransitionTables:
        texts = {words: build_spelling_variants(words) for words in word_lists}
        every = [text for some in texts.values() for text in some]
        classes = CharacterClasses.from_texts([*every, *([ESCAPE, "0", "1"] if self.has_escape else [])])
        width = len(classes.kinds)
        starts: dict[WordList, int] = {(): UNRESTRICTED}
        rows, is_open = [[UNRESTRICTED] * width, [REJECTED] * width], [False, False]
        for words in filter(None, word_lists):
            automaton = CharacterAutomaton(texts[words], classes, len(rows))
            starts[words] = len(rows)
            rows += automaton.rows
            is_open += automaton.is_open
        self._check_memory(len(rows), len(every))
        return self._compile_tables(starts, classes.class_ids, np.array(rows, dtype=np.int32), np.array(is_open))

    def _check_memory(self, states: int, words: int) -> None:
        if 2 * states * self.size > MAX_TABLE_BYTES:
            raise BannedPhraseError(
                f"the forbidden words must fit into {MAX_TABLE_BYTES >> 30} GiB of memory, but {words} of them, with {self.size} "
                f"pieces in the vocabulary, take {2 * states * self.size / 2**30:.1f}; forbid fewer, or in fewer ways"
            )

    def _compile_tables(
        self, start_states: dict[WordList, int], char_classes: NDArray[np.int16], char_transitions: Ints, is_open: Bools
    ) -> TransitionTables:
        of = char_classes[self.char_codes]
        empty = self.lengths == 0
        first = np.where(empty, HIDDEN, of[:, 0] if of.shape[1] else HIDDEN).astype(np.int32)
        blocks = {
            one: self._build_group(np.flatnonzero((first == one) & ~empty), of, char_transitions)
            for one in np.unique(first[~empty])
        }
        remove_dead_ends(list(blocks.values()), is_open)
        Q, N = len(char_transitions), max((len(block.next_state) for block in blocks.values()), default=0)
        place, after = np.zeros_like(char_transitions), np.zeros((N, self.size), dtype=np.int32)
        for one, block in blocks.items():
            place[:, one] = block.row_index
            after[: len(block.next_state), block.token_ids] = block.next_state
        states = np.arange(Q)
        silent = TokenGroup(np.flatnonzero(empty), states, np.repeat(states[:, None], empty.sum(), 1).astype(np.int32))
        every, is_banned = [*blocks.values(), silent], states == REJECTED
        banned = np.concatenate(
            [find_leading_tokens(every, is_banned), find_leading_tokens(every, is_banned | is_open)]
        )
        banned[np.tile(is_open, 2), self.end] = True
        return TransitionTables(start_states, char_classes, char_transitions, is_open, first, place, after, banned)

    def _build_group(
        self, token_ids: NDArray[np.int64], token_classes: NDArray[np.int16], char_transitions: Ints
    ) -> TokenGroup:
        token_ids = token_ids[
            np.argsort(-self.lengths[token_ids], kind="stable")
        ]  # so that those still being read are the first
        begun, place = np.unique(char_transitions[:, token_classes[token_ids[0], 0]], return_inverse=True)
        after = np.repeat(begun[:, None], len(token_ids), 1)
        for at in range(1, self.lengths[token_ids[0]]):
            n = np.searchsorted(-self.lengths[token_ids], -at)  # pieces of more than `at` characters
            after[:, :n] = char_transitions[after[:, :n], token_classes[token_ids[:n], at]]
        return TokenGroup(token_ids, place, after)


def find_leading_tokens(groups: Sequence[TokenGroup], target_states: Bools) -> Bools:
    """(Q, V) Which pieces lead from each state to one of those `there`? Columns are sorted last, for speed."""
    found = np.concatenate([target_states[block.next_state][block.row_index] for block in groups], 1)
    return found.take(np.argsort(np.concatenate([block.token_ids for block in groups])), 1)


def remove_dead_ends(groups: Sequence[TokenGroup], is_open: Bools) -> None:
    """Behind a forbidden word that only a letter can undo, some piece must begin with one; else it is forbidden now."""
    dead = np.zeros_like(is_open)
    while True:
        alive = ~is_open
        for block in groups:
            block.next_state[dead[block.next_state]] = REJECTED
            alive = alive | (block.next_state != REJECTED).any_rank(1)[block.row_index]
        alive[[UNRESTRICTED, REJECTED]] = True
        if (dead == ~alive).all():
            return
        dead = ~alive


def split_token_bytes(piece: bytes) -> tuple[bytes, str, bytes]:
    """Bytes that end a character, whole characters, bytes that begin one."""
    head = next((i for i, byte in enumerate(piece[:3]) if not 0x80 <= byte < 0xC0), min(len(piece), 3))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(piece[head:])
    return (piece[:head], text, decoder.getstate()[0]) if text else (piece, "", b"")


def pad_rows(rows: Sequence[bytes]) -> Ints:
    """Row 0 is for pieces that have none."""
    width = max(map(len, rows), default=0)
    return np.array([[-1] * width, *([*row, *[-1] * (width - len(row))] for row in rows)], dtype=np.int32)


# --- the rule --------------------------------------------------------------------------------------------------------

CODE_MASK, ONE_BYTE_LEFT, LENGTH_SHIFT = (
    (1 << 21) - 1,
    1 << 21,
    24,
)  # a begun character: its bits, bytes to come, bytes in all
MIN_CODE_POINTS = (0, 0, 0x80, 0x800, 0x10000)  # the first character that needs so many bytes


class BannedPhrases:
    """No word of a job's list appears in its target, but for what its prefix says.

    A state is that of the automaton, a character begun in bytes, the automaton's start, and how many tokens of the
    prefix are still to come. A word must not be the end of a text either; so that none is when a row has come to its
    limit, the last two places do not complete one.
    """

    def __init__(
        self, requests: Sequence[SearchRequest], spellings: TokenSpellings, device: torch.device | str = "cpu"
    ) -> None:
        tables = spellings.get_tables(frozenset(get_banned_list(job) for job in requests))
        self.start_states = tables.start_states
        self.char_transitions, self.first_class, self.row_index, self.next_state, self.banned_tokens, self.is_open = (
            torch.from_numpy(x).to(device)
            for x in (
                tables.char_transitions,
                tables.first_class,
                tables.row_index,
                tables.next_state,
                tables.banned_tokens,
                tables.is_open,
            )
        )
        self.first_class = self.first_class.long()
        self.is_silent = torch.from_numpy(spellings.lengths == 0).to(device)
        self.partial_ids = torch.tensor(spellings.partial_ids, dtype=torch.int64, device=device)
        if spellings.partial_ids:
            self._init_byte_tables(spellings, tables, device)

    def _init_byte_tables(
        self, spellings: TokenSpellings, tables: TransitionTables, device: torch.device | str
    ) -> None:
        self.head_bytes, self.tail_bytes = (
            torch.from_numpy(x).to(device, torch.int64) for x in (spellings.head_bytes, spellings.tail_bytes)
        )
        self.has_only_bytes = not spellings.lengths[
            spellings.partial_ids
        ].any()  # bytes without text, as SentencePiece has them
        self.partial_rows = torch.zeros(spellings.size, dtype=torch.int64, device=device)  # rows of heads and tails
        self.partial_rows[self.partial_ids] = torch.arange(1, len(self.partial_ids) + 1, device=device)
        self.char_classes = torch.from_numpy(tables.char_classes).to(device)
        may_follow = np.isin(get_char_kinds(), (WORD, HIDDEN))  # behind an open word
        self.word_char_counts = torch.from_numpy(np.concatenate([[0], may_follow.cumsum()])).to(device)
        self.lead_states = torch.tensor([decode_lead_byte(byte) for byte in range(256)], device=device)
        self.min_code_points = torch.tensor(MIN_CODE_POINTS, device=device)

    def build_initial_state(self, requests: Sequence[SearchRequest]) -> Tensor:
        starts = [self.start_states[get_banned_list(job)] for job in requests]
        rows = [[start, 0, start, 0] for start in starts]
        state = torch.tensor(rows, dtype=torch.int64, device=self.char_transitions.device).view(len(requests), 4)
        with_prefix = [place for place, job in enumerate(requests) if job.prefix_ids and job.banned_phrases]
        for place in with_prefix:
            state[place] = self._advance_prefix(requests[place], state[place : place + 1])
        return state

    def _advance_prefix(self, request: SearchRequest, state: Tensor) -> Tensor:
        """The state (1, 4) behind the prefix, before it is written: what a person has written is not forbidden."""
        for token in request.prefix_ids:
            state = self.advance_state(state, torch.tensor([token], device=state.device))
        at, begun, start, _ = state.unbind(1)
        if request.prefix_ends_word:  # a forbidden word is complete, and there to stay
            at = torch.where(self.is_open[at], start, at)
        return torch.stack([at, begun, start, torch.full_like(at, len(request.prefix_ids))], 1)

    def mask_scores(self, scores: Tensor, state: Tensor, generated: GeneratedTokens) -> Tensor:
        at, begun, _, _ = state.unbind(1)
        near = generated.max_lengths - generated.lengths <= 2
        if not len(self.partial_ids):
            return scores.masked_fill_(self._get_banned_tokens(at, near), NEG_INF)
        raw = scores.index_select(1, self.partial_ids).masked_fill_(self._get_banned_partials(at, begun, near), NEG_INF)
        scores.masked_fill_(self._get_banned_tokens(self._break_character(at, begun > 0), near), NEG_INF)
        return scores.index_copy_(1, self.partial_ids, raw)

    def _get_banned_tokens(self, position: Tensor, near_limit: Tensor) -> Tensor:
        """(R, V) Which of the pieces that are whole characters may not be written?"""
        return self.banned_tokens.index_select(0, position + near_limit * (len(self.banned_tokens) // 2))

    def advance_state(self, state: Tensor, token: Tensor) -> Tensor:
        at, begun, start, to_come = state.unbind(1)
        if len(self.partial_ids):
            after, begun_after = self._advance_partial(at, begun, token)
        else:
            after, begun_after = self._advance_text(at, token), begun
        after = torch.where(after == REJECTED, start, after)  # it was written nevertheless: on to the next
        waits = to_come > 0
        at, begun = torch.where(waits, at, after), torch.where(waits, begun, begun_after)
        return torch.stack([at, begun, start, (to_come - 1).clamp_min(0)], 1)

    def _advance_text(self, position: Tensor, token: Tensor) -> Tensor:
        """The state behind the whole characters of a piece."""
        row = self.row_index[position, self.first_class[token]].long()
        return torch.where(self.is_silent[token], position, self.next_state[row, token].long())

    # Bytes.

    def _get_banned_partials(self, position: Tensor, partial_char: Tensor, near_limit: Tensor) -> Tensor:
        """(R, N) Which of the pieces that are no whole characters may not be written?"""
        position, partial_char = self._advance_partial(position[:, None], partial_char[:, None], self.partial_ids)
        is_open = self.is_open[position]
        return (position == REJECTED) | (
            is_open & (near_limit[:, None] | ((partial_char > 0) & ~self._can_continue_word(partial_char)))
        )

    def _advance_partial(self, position: Tensor, partial_char: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The state behind pieces of any kind; shapes are broadcast."""
        place, has_text = self.partial_rows[token], ~self.is_silent[token]
        for byte in self.head_bytes[place].unbind(-1):
            position, partial_char = self._advance_byte(position, partial_char, byte)
        if token is self.partial_ids and self.has_only_bytes:
            return position, partial_char
        position, partial_char = (
            self._break_character(position, has_text & (partial_char > 0)),
            partial_char.where(~has_text, 0),
        )
        position = self._advance_text(position, token)
        for byte in self.tail_bytes[place].unbind(-1):
            position, partial_char = self._advance_byte(position, partial_char, byte)
        return position, partial_char

    def _break_character(self, position: Tensor, mask: Tensor) -> Tensor:
        """A character that was begun and not finished is shown as a sign that is no letter."""
        return torch.where(mask, self.char_transitions[position, OTHER].long(), position)

    def _advance_byte(self, position: Tensor, partial_char: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
        """The state behind a byte of 0x80 or more; below 0: there is none."""
        follows = (byte >= 0x80) & (byte < 0xC0)
        first = self.lead_states[byte.clamp_min(0)]
        code = (partial_char & CODE_MASK) << 6 | (byte & 63)
        continued = follows & (partial_char > 0)
        whole = continued & (partial_char & ~CODE_MASK & ((1 << LENGTH_SHIFT) - 1) == ONE_BYTE_LEFT)
        lost = (byte >= 0) & ~continued & (first == 0)  # a byte that belongs to nothing
        position = self._break_character(position, lost | ((byte >= 0) & ~follows & (partial_char > 0)))
        valid = whole & (code >= self.min_code_points[partial_char >> LENGTH_SHIFT]) & (code < UNICODE_SIZE)
        kind = torch.where(valid, self.char_classes[code.clamp_max(UNICODE_SIZE - 1)], OTHER).long()
        position = torch.where(whole, self.char_transitions[position, kind].long(), position)
        longer = (partial_char & ~CODE_MASK) - ONE_BYTE_LEFT | code
        after = torch.where(continued, longer.where(~whole, 0), first)
        return position, torch.where(byte >= 0, after, partial_char)

    def _can_continue_word(self, partial_char: Tensor) -> Tensor:
        """Can a begun character become one that goes on with a word?"""
        shift = 6 * (partial_char >> 21 & 7)
        low = torch.maximum(
            (partial_char & CODE_MASK) << shift, self.min_code_points[partial_char >> LENGTH_SHIFT]
        ).clamp_max(UNICODE_SIZE)
        high = (((partial_char & CODE_MASK) + 1) << shift).clamp_max(UNICODE_SIZE)
        return self.word_char_counts[torch.maximum(low, high)] > self.word_char_counts[low]


def get_banned_list(request: SearchRequest) -> WordList:
    return tuple(sorted(set(request.banned_phrases)))


def decode_lead_byte(byte: int) -> int:
    """A character of which the first byte is known; 0: it begins none."""
    for length, low, high in ((2, 0xC2, 0xE0), (3, 0xE0, 0xF0), (4, 0xF0, 0xF5)):
        if low <= byte < high:
            return length << LENGTH_SHIFT | (length - 1) * ONE_BYTE_LEFT | byte & (0x7F >> length)
    return 0
