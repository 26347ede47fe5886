"""Texts in which places are left open: what is written as a mask (BERT) or a sentinel (T5) becomes its id, and the
words around it are cut as they are in any text. What is put into these places is `reader`'s and `spans`'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from attent.text.sample import SPACE
from attent.text.vocabulary import MASK, Pieces, Vocabulary

WRITTEN = ("[MASK]", MASK)  # in a text, whatever the model's own vocabulary calls it
STAND_IN = "\ufffc"  # "object replacement character": it is never a part of a word


class MarkError(ValueError):
    """Masks that a model cannot read, in a sentence."""


@dataclass(frozen=True)
class Word:
    """A piece, or several, as it is written."""

    text: str
    own_space: bool  # it brings the space before it, or goes on with the word before it


@dataclass(frozen=True)
class Words:
    """What stands before, between and behind the marks of a text."""

    parts: tuple[str, ...]
    marks: tuple[int, ...] = ()  # ids, between the parts

    def with_words(self, words: Sequence[Word]) -> str:
        """Each mark replaced by its word."""
        text = self.parts[0]
        for word, behind in zip(words, self.parts[1:], strict=True):
            before = text.removesuffix(" ") if word.own_space else text
            text = before + (word.text if before else word.text.lstrip(" ")) + behind
        return text


class Marks:
    """The marks that a vocabulary knows. A vocabulary with sentinels alone takes masks for them, one by one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        mask = () if vocabulary.mask is None else (vocabulary.mask,)
        self.tokens = frozenset({*mask, *vocabulary.sentinels})
        marks = [*mask, *vocabulary.sentinels]
        self._named = dict(zip(vocabulary.pieces(marks), marks, strict=True))
        self._named |= {name: token for token in mask for name in WRITTEN}
        written = dict.fromkeys([*self._named, *WRITTEN]) if marks else {}
        self._pattern = re.compile("|".join(map(re.escape, written)) or "(?!)")

    def words_of(self, text: str) -> Words:
        """The text, cut at its marks."""
        names = self._pattern.findall(text)
        taken = {self._named.get(name) for name in names}
        free = (token for token in self.vocabulary.sentinels if token not in taken)
        marks = [self._named[name] if name in self._named else next(free, None) for name in names]
        if None in marks:
            raise MarkError(
                f"a text must have at most {len(self.vocabulary.sentinels)} masks, as many as the model has sentinels, "
                f"but has {len(names)}; cut it"
            )
        return Words(tuple(self._pattern.split(text)), tuple(token for token in marks if token is not None))

    def ids(self, words: Words) -> list[int]:
        """As a model reads it, without a frame."""
        if not words.marks:
            return self.vocabulary.encode([words.parts[0]])[0]
        whole = isinstance(self.vocabulary, Pieces) and self._stand_in and self.vocabulary.unknown not in self._stand_in
        return self._spaced(words) if whole else self._apart(words)

    def _apart(self, words: Words) -> list[int]:
        """WordPiece and its kin, and what others have trained: a text is cut at its marks before anything else is done
        to it."""
        parts = [part.removesuffix(" ") for part in words.parts[:-1]] + [words.parts[-1]]
        first, *rest = self.vocabulary.encode(parts)
        return first + [token for mark, ids in zip(words.marks, rest, strict=True) for token in (mark, *ids)]

    def _spaced(self, words: Words) -> list[int]:
        """SentencePiece: a word's space is part of it, and a text's beginning is a space. So the text is encoded whole,
        with a sign in place of each mark that no word has in it."""
        sign, marks = self._stand_in, iter(words.marks)
        free = [part.replace(STAND_IN, " ") for part in words.parts]
        ids = self.vocabulary.encode([STAND_IN.join(free)])[0]
        found: list[int] = []
        place = 0
        while place < len(ids):
            if tuple(ids[place : place + len(sign)]) == sign:
                if self.joins_spaces and found and found[-1] == self._space:
                    found.pop()  # it is the mark's own
                found.append(next(marks))
                place += len(sign)
            else:
                found.append(ids[place])
                place += 1
        return found

    @cached_property
    def _stand_in(self) -> tuple[int, ...]:
        ids = self.vocabulary.encode([STAND_IN])[0]
        return tuple(ids[1:] if ids[:1] == [self._space] else ids)

    @cached_property
    def _space(self) -> int:
        assert isinstance(self.vocabulary, Pieces)
        return self.vocabulary.processor.piece_to_id(SPACE)

    @cached_property
    def joins_spaces(self) -> bool:
        """Is the space before a word part of its piece? Not where every character is a piece."""
        assert isinstance(self.vocabulary, Pieces)
        processor = self.vocabulary.processor
        names = processor.id_to_piece(list(range(processor.get_piece_size())))
        return any(len(name) > 1 and name.startswith(SPACE) for name in names)
