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

from attent.decode.options import Job
from attent.decode.rules import NEVER, Written
from attent.decode.spelling import BLANK, ESCAPE, HIDDEN, OTHER, UNICODE, UNSEEN, WORD, kinds

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Words = tuple[str, ...]
Items = frozenset[tuple[int, int]]  # how far which words have come: (word, characters)

ESCAPED: Items = frozenset({(-1, 0)})  # an escape has been read
FREE, BANNED = 0, 1  # states: of a text without forbidden words; behind one
MOST = 2**31  # entries of a table: bytes of memory
KEPT = 8  # tables that are kept for the next texts: a server meets the same lists again


class ForbiddenError(ValueError):
    """Words that cannot be forbidden; the message says why and what to do."""


# --- words as characters ---------------------------------------------------------------------------------------------


@cache
def foldings() -> dict[str, str]:
    """Characters that are written otherwise when case is ignored: A -> a, ß -> ss."""
    cased = (chr(i) for i in range(0x20000))
    return {one: one.casefold() for one in cased if one.casefold() != one}


def variants(words: Iterable[str]) -> list[str]:
    """The spellings to look for, case folded: accents as part of their letters, and behind them."""
    found: dict[str, None] = {}
    for word in words:
        plain = " ".join(word.translate(dict.fromkeys(map(ord, UNSEEN))).split())
        if not plain:
            raise ForbiddenError(f"a forbidden word must have letters, but is {word!r}; leave it out")
        found |= dict.fromkeys(unicodedata.normalize(form, plain).casefold() for form in ("NFC", "NFD"))
    return list(found)


@dataclass(frozen=True, eq=False)
class Classes:
    """Characters that make no difference to any of the words are one class, by what they are to words in general."""

    of: NDArray[np.int16]  # (UNICODE,) the class of each character
    kinds: list[int]  # of each class
    letters: dict[str, list[int]]  # the classes of characters that are, case folded, this text

    @classmethod
    def telling(cls, texts: Iterable[str]) -> Classes:
        """Those that tell these texts apart."""
        together = "\n".join(texts)
        folds = {one: one for one in together} | {one: fold for one, fold in foldings().items() if fold in together}
        kind_of = kinds()
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

    def steps(self, text: str, at: int) -> list[tuple[int, int]]:
        """Which classes of characters go on with a text behind its first characters, and how far it is then."""
        nexts = {text[at : at + n] for n in (1, 2, 3)}  # no character becomes more than three
        found = [(one, at + len(fold)) for fold in nexts for one in self.letters.get(fold, ())]
        if text[at : at + 1] == " ":
            found.append((BLANK, at + 1))
        if text[:at].endswith(" "):
            found.append((BLANK, at))  # one space or many
        return found


# --- the automaton over characters -----------------------------------------------------------------------------------


class Automaton:
    """Reads text character by character. A state is how far which words have come, and whether a word is being written;
    their numbers begin at `offset`, the first of them is the start."""

    def __init__(self, texts: Sequence[str], classes: Classes, offset: int) -> None:
        self.texts, self.classes, self.offset = texts, classes, offset
        self.is_word = [kind == WORD for kind in classes.kinds]
        self.steps = [[classes.steps(text, at) for at in range(len(text) + 1)] for text in texts]
        self.numbers: dict[tuple[Items, bool], int] = {}
        self.states: list[tuple[Items, bool]] = []
        self.number(frozenset(), False)
        # From nothing. Most other states go on like that, but for a few characters.
        self.begun = self._grown(frozenset((word, 0) for word in range(len(texts))))
        self.plain = {in_word: self._plain(in_word) for in_word in (False, True)}
        self.rows = [self._row(items, in_word) for items, in_word in self.states]  # the list grows meanwhile
        self.open = [self._complete(items) for items, _ in self.states]  # a forbidden word, unless a letter comes

    def number(self, items: Items, in_word: bool) -> int:
        state = items, in_word
        if state not in self.numbers:
            self.numbers[state] = self.offset + len(self.states)
            self.states.append(state)
        return self.numbers[state]

    def _complete(self, items: Items) -> bool:
        return any(at == len(self.texts[word]) for word, at in items if word >= 0)

    def _grown(self, items: Items) -> dict[int, Items]:
        """What becomes of words that have begun, for each class of characters that goes on with one."""
        found: dict[int, set[tuple[int, int]]] = {}
        for word, at in items - ESCAPED:
            for one, further in self.steps[word][at]:
                found.setdefault(one, set()).add((word, further))
        return {one: frozenset(grown) for one, grown in found.items()}

    def _begun(self, one: int, in_word: bool) -> Items:
        return frozenset() if in_word and self.is_word[one] else self.begun.get(one, frozenset())

    def _after(self, one: int, items: Items) -> int:
        """Behind a character. A word whose last character is no letter needs no border."""
        return BANNED if self._complete(items) and not self.is_word[one] else self.number(items, self.is_word[one])

    def _plain(self, in_word: bool) -> list[int]:
        return [self._after(one, self._begun(one, in_word)) for one in range(len(self.is_word))]

    def _row(self, items: Items, in_word: bool) -> list[int]:
        """Where each class of characters leads to."""
        row = list(self.plain[in_word])
        for one, grown in self._grown(items).items():
            row[one] = self._after(one, grown | self._begun(one, in_word))
        if self._complete(items):
            row = [state if is_word else BANNED for state, is_word in zip(row, self.is_word, strict=True)]
        row[HIDDEN] = self.number(items, in_word)
        for escape in self.classes.letters.get(ESCAPE, ()):
            self._escape(row, escape, items)
        return row

    def _escape(self, row: list[int], escape: int, items: Items) -> None:
        """What follows an escape belongs to it, and both are one character that is no letter."""
        if items == ESCAPED:
            for one in (HIDDEN, *self.classes.letters["0"], *self.classes.letters["1"]):
                row[one] = self.offset
        row[escape] = BANNED if self._complete(items) else self.number(ESCAPED, False)


# --- the automaton over pieces ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tables:
    """What becomes of each state Q behind each of the V pieces."""

    starts: dict[Words, int]
    classes: NDArray[np.int16]  # (UNICODE,) of characters
    moves: Ints  # (Q, K) the state behind a character of each class
    open: Bools  # (Q,) would the text, if it ended here, end in a forbidden word?
    first: Ints  # (V,) the class of a piece's first character
    place: Ints  # (Q, K) behind a piece that begins with such a character: the row of `after`
    after: Ints  # (N, V) the state behind a piece
    banned: Bools  # (2Q, V) may a piece not come? In the second half: nor if it must not leave the text open


@dataclass(frozen=True, eq=False)
class Block:
    """Pieces that begin with characters of one class: wherever that leads to the same state, all else is the same."""

    ids: NDArray[np.int64]  # (n,)
    place: NDArray[np.int64]  # (Q,) which row below is that of a state
    after: Ints  # (m, n) the state behind each piece, from each of m states behind the first character


class Alphabet:
    """The pieces of a vocabulary, cut into whole characters and bytes that are none, before and behind them."""

    def __init__(self, pieces: Sequence[bytes], end: int) -> None:
        self.end, self.size = end, len(pieces)
        self.escapes = ESCAPE.encode() in pieces
        parts = [cut(piece) for piece in pieces]
        texts = [text.lstrip(UNSEEN) for _, text, _ in parts]
        self.lengths = np.array([len(text) for text in texts])
        self.codes = np.zeros((self.size, max(self.lengths, default=0)), dtype=np.int64)
        self.codes[np.arange(self.codes.shape[1]) < self.lengths[:, None]] = [
            ord(one) for text in texts for one in text
        ]
        self.raw = [i for i, (head, _, tail) in enumerate(parts) if head or tail]
        self.heads = padded([parts[i][0] for i in self.raw])
        self.tails = padded([parts[i][2] for i in self.raw])
        self._known: dict[frozenset[Words], Tables] = {}

    def tables(self, lists: frozenset[Words]) -> Tables:
        """For texts each of which has one of these lists of forbidden words."""
        found = self._known.pop(lists, None) or self._made(sorted(lists))
        self._known[lists] = found
        for old in list(self._known)[:-KEPT]:
            del self._known[old]
        return found

    def _made(self, lists: Sequence[Words]) -> Tables:
        texts = {words: variants(words) for words in lists}
        every = [text for some in texts.values() for text in some]
        classes = Classes.telling([*every, *([ESCAPE, "0", "1"] if self.escapes else [])])
        width = len(classes.kinds)
        starts: dict[Words, int] = {(): FREE}
        rows, is_open = [[FREE] * width, [BANNED] * width], [False, False]
        for words in filter(None, lists):
            automaton = Automaton(texts[words], classes, len(rows))
            starts[words] = len(rows)
            rows += automaton.rows
            is_open += automaton.open
        self._check(len(rows), len(every))
        return self._compiled(starts, classes.of, np.array(rows, dtype=np.int32), np.array(is_open))

    def _check(self, states: int, words: int) -> None:
        if 2 * states * self.size > MOST:
            raise ForbiddenError(
                f"the forbidden words must fit into {MOST >> 30} GiB of memory, but {words} of them, with {self.size} "
                f"pieces in the vocabulary, take {2 * states * self.size / 2**30:.1f}; forbid fewer, or in fewer ways"
            )

    def _compiled(self, starts: dict[Words, int], classes: NDArray[np.int16], moves: Ints, is_open: Bools) -> Tables:
        of = classes[self.codes]
        empty = self.lengths == 0
        first = np.where(empty, HIDDEN, of[:, 0] if of.shape[1] else HIDDEN).astype(np.int32)
        blocks = {
            one: self._block(np.flatnonzero((first == one) & ~empty), of, moves) for one in np.unique(first[~empty])
        }
        without_dead_ends(list(blocks.values()), is_open)
        Q, N = len(moves), max((len(block.after) for block in blocks.values()), default=0)
        place, after = np.zeros_like(moves), np.zeros((N, self.size), dtype=np.int32)
        for one, block in blocks.items():
            place[:, one] = block.place
            after[: len(block.after), block.ids] = block.after
        states = np.arange(Q)
        silent = Block(np.flatnonzero(empty), states, np.repeat(states[:, None], empty.sum(), 1).astype(np.int32))
        every, is_banned = [*blocks.values(), silent], states == BANNED
        banned = np.concatenate([leading(every, is_banned), leading(every, is_banned | is_open)])
        banned[np.tile(is_open, 2), self.end] = True
        return Tables(starts, classes, moves, is_open, first, place, after, banned)

    def _block(self, ids: NDArray[np.int64], of: NDArray[np.int16], moves: Ints) -> Block:
        ids = ids[np.argsort(-self.lengths[ids], kind="stable")]  # so that those still being read are the first
        begun, place = np.unique(moves[:, of[ids[0], 0]], return_inverse=True)
        after = np.repeat(begun[:, None], len(ids), 1)
        for at in range(1, self.lengths[ids[0]]):
            n = np.searchsorted(-self.lengths[ids], -at)  # pieces of more than `at` characters
            after[:, :n] = moves[after[:, :n], of[ids[:n], at]]
        return Block(ids, place, after)


def leading(blocks: Sequence[Block], there: Bools) -> Bools:
    """(Q, V) Which pieces lead from each state to one of those `there`? Columns are sorted last, for speed."""
    found = np.concatenate([there[block.after][block.place] for block in blocks], 1)
    return found.take(np.argsort(np.concatenate([block.ids for block in blocks])), 1)


def without_dead_ends(blocks: Sequence[Block], is_open: Bools) -> None:
    """Behind a forbidden word that only a letter can undo, some piece must begin with one; else it is forbidden now."""
    dead = np.zeros_like(is_open)
    while True:
        alive = ~is_open
        for block in blocks:
            block.after[dead[block.after]] = BANNED
            alive = alive | (block.after != BANNED).any(1)[block.place]
        alive[[FREE, BANNED]] = True
        if (dead == ~alive).all():
            return
        dead = ~alive


def cut(piece: bytes) -> tuple[bytes, str, bytes]:
    """Bytes that end a character, whole characters, bytes that begin one."""
    head = next((i for i, byte in enumerate(piece[:3]) if not 0x80 <= byte < 0xC0), min(len(piece), 3))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(piece[head:])
    return (piece[:head], text, decoder.getstate()[0]) if text else (piece, "", b"")


def padded(rows: Sequence[bytes]) -> Ints:
    """Row 0 is for pieces that have none."""
    width = max(map(len, rows), default=0)
    return np.array([[-1] * width, *([*row, *[-1] * (width - len(row))] for row in rows)], dtype=np.int32)


# --- the rule --------------------------------------------------------------------------------------------------------

CODE, ONE_MORE, LONG = (1 << 21) - 1, 1 << 21, 24  # a begun character: its bits, bytes to come, bytes in all
LEAST = (0, 0, 0x80, 0x800, 0x10000)  # the first character that needs so many bytes


class Forbidden:
    """No word of a job's list appears in its target, but for what its prefix says.

    A state is that of the automaton, a character begun in bytes, the automaton's start, and how many tokens of the
    prefix are still to come. A word must not be the end of a text either; so that none is when a row has come to its
    limit, the last two places do not complete one.
    """

    def __init__(self, jobs: Sequence[Job], alphabet: Alphabet, device: torch.device | str = "cpu") -> None:
        tables = alphabet.tables(frozenset(as_list(job) for job in jobs))
        self.starts = tables.starts
        self.moves, self.first, self.place, self.after, self.banned, self.open = (
            torch.from_numpy(x).to(device)
            for x in (tables.moves, tables.first, tables.place, tables.after, tables.banned, tables.open)
        )
        self.first = self.first.long()
        self.silent = torch.from_numpy(alphabet.lengths == 0).to(device)
        self.raw = torch.tensor(alphabet.raw, dtype=torch.int64, device=device)
        if alphabet.raw:
            self._know_bytes(alphabet, tables, device)

    def _know_bytes(self, alphabet: Alphabet, tables: Tables, device: torch.device | str) -> None:
        self.heads, self.tails = (torch.from_numpy(x).to(device, torch.int64) for x in (alphabet.heads, alphabet.tails))
        self.bare = not alphabet.lengths[alphabet.raw].any()  # bytes without text, as SentencePiece has them
        self.raw_place = torch.zeros(alphabet.size, dtype=torch.int64, device=device)  # rows of heads and tails
        self.raw_place[self.raw] = torch.arange(1, len(self.raw) + 1, device=device)
        self.classes = torch.from_numpy(tables.classes).to(device)
        may_follow = np.isin(kinds(), (WORD, HIDDEN))  # behind an open word
        self.followers = torch.from_numpy(np.concatenate([[0], may_follow.cumsum()])).to(device)
        self.leads = torch.tensor([lead(byte) for byte in range(256)], device=device)
        self.least = torch.tensor(LEAST, device=device)

    def begin(self, jobs: Sequence[Job]) -> Tensor:
        starts = [self.starts[as_list(job)] for job in jobs]
        rows = [[start, 0, start, 0] for start in starts]
        state = torch.tensor(rows, dtype=torch.int64, device=self.moves.device).view(len(jobs), 4)
        with_prefix = [place for place, job in enumerate(jobs) if job.prefix and job.forbidden]
        for place in with_prefix:
            state[place] = self._behind(jobs[place], state[place : place + 1])
        return state

    def _behind(self, job: Job, state: Tensor) -> Tensor:
        """The state (1, 4) behind the prefix, before it is written: what a person has written is not forbidden."""
        for token in job.prefix:
            state = self.advance(state, torch.tensor([token], device=state.device))
        at, begun, start, _ = state.unbind(1)
        if job.whole_words:  # a forbidden word is complete, and there to stay
            at = torch.where(self.open[at], start, at)
        return torch.stack([at, begun, start, torch.full_like(at, len(job.prefix))], 1)

    def forbid(self, scores: Tensor, state: Tensor, written: Written) -> Tensor:
        at, begun, _, _ = state.unbind(1)
        near = written.limits - written.lengths <= 2
        if not len(self.raw):
            return scores.masked_fill_(self._banned(at, near), NEVER)
        raw = scores.index_select(1, self.raw).masked_fill_(self._raw_banned(at, begun, near), NEVER)
        scores.masked_fill_(self._banned(self._broken(at, begun > 0), near), NEVER)
        return scores.index_copy_(1, self.raw, raw)

    def _banned(self, at: Tensor, near: Tensor) -> Tensor:
        """(R, V) Which of the pieces that are whole characters may not be written?"""
        return self.banned.index_select(0, at + near * (len(self.banned) // 2))

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        at, begun, start, to_come = state.unbind(1)
        if len(self.raw):
            after, begun_after = self._with_raw(at, begun, token)
        else:
            after, begun_after = self._with_text(at, token), begun
        after = torch.where(after == BANNED, start, after)  # it was written nevertheless: on to the next
        waits = to_come > 0
        at, begun = torch.where(waits, at, after), torch.where(waits, begun, begun_after)
        return torch.stack([at, begun, start, (to_come - 1).clamp_min(0)], 1)

    def _with_text(self, at: Tensor, token: Tensor) -> Tensor:
        """The state behind the whole characters of a piece."""
        row = self.place[at, self.first[token]].long()
        return torch.where(self.silent[token], at, self.after[row, token].long())

    # Bytes.

    def _raw_banned(self, at: Tensor, begun: Tensor, near: Tensor) -> Tensor:
        """(R, N) Which of the pieces that are no whole characters may not be written?"""
        at, begun = self._with_raw(at[:, None], begun[:, None], self.raw)
        is_open = self.open[at]
        return (at == BANNED) | (is_open & (near[:, None] | ((begun > 0) & ~self._may_follow(begun))))

    def _with_raw(self, at: Tensor, begun: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The state behind pieces of any kind; shapes are broadcast."""
        place, has_text = self.raw_place[token], ~self.silent[token]
        for byte in self.heads[place].unbind(-1):
            at, begun = self._with_byte(at, begun, byte)
        if token is self.raw and self.bare:
            return at, begun
        at, begun = self._broken(at, has_text & (begun > 0)), begun.where(~has_text, 0)
        at = self._with_text(at, token)
        for byte in self.tails[place].unbind(-1):
            at, begun = self._with_byte(at, begun, byte)
        return at, begun

    def _broken(self, at: Tensor, where: Tensor) -> Tensor:
        """A character that was begun and not finished is shown as a sign that is no letter."""
        return torch.where(where, self.moves[at, OTHER].long(), at)

    def _with_byte(self, at: Tensor, begun: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
        """The state behind a byte of 0x80 or more; below 0: there is none."""
        follows = (byte >= 0x80) & (byte < 0xC0)
        first = self.leads[byte.clamp_min(0)]
        code = (begun & CODE) << 6 | (byte & 63)
        continued = follows & (begun > 0)
        whole = continued & (begun & ~CODE & ((1 << LONG) - 1) == ONE_MORE)
        lost = (byte >= 0) & ~continued & (first == 0)  # a byte that belongs to nothing
        at = self._broken(at, lost | ((byte >= 0) & ~follows & (begun > 0)))
        valid = whole & (code >= self.least[begun >> LONG]) & (code < UNICODE)
        kind = torch.where(valid, self.classes[code.clamp_max(UNICODE - 1)], OTHER).long()
        at = torch.where(whole, self.moves[at, kind].long(), at)
        longer = (begun & ~CODE) - ONE_MORE | code
        after = torch.where(continued, longer.where(~whole, 0), first)
        return at, torch.where(byte >= 0, after, begun)

    def _may_follow(self, begun: Tensor) -> Tensor:
        """Can a begun character become one that goes on with a word?"""
        shift = 6 * (begun >> 21 & 7)
        low = torch.maximum((begun & CODE) << shift, self.least[begun >> LONG]).clamp_max(UNICODE)
        high = (((begun & CODE) + 1) << shift).clamp_max(UNICODE)
        return self.followers[torch.maximum(low, high)] > self.followers[low]


def as_list(job: Job) -> Words:
    return tuple(sorted(set(job.forbidden)))


def lead(byte: int) -> int:
    """A character of which the first byte is known; 0: it begins none."""
    for length, low, high in ((2, 0xC2, 0xE0), (3, 0xE0, 0xF0), (4, 0xF0, 0xF5)):
        if low <= byte < high:
            return length << LONG | (length - 1) * ONE_MORE | byte & (0x7F >> length)
    return 0
