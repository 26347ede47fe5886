"""Texts in which places are left open: what is written as a mask (BERT) or a sentinel (T5) becomes its id, and the
words around it are cut as they are in any text. What is put into these places is `reader`'s and `spans`'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from attent.text.subword_sampling import SPACE
from attent.text.vocabulary import MASK_TOKEN, SentencePieceVocabulary, Vocabulary

MASK_SPELLINGS = ("[MASK]", MASK_TOKEN)  # in a text, whatever the model's own vocabulary calls it
PLACEHOLDER = "\ufffc"  # "object replacement character": it is never a part of a word


class MaskError(ValueError):
    """Masks that a model cannot read, in a sentence."""


@dataclass(frozen=True)
class SurfaceWord:
    """A piece, or several, as it is written."""

    text: str
    attaches_left: bool  # it brings the space before it, or goes on with the word before it


@dataclass(frozen=True)
class MaskedText:
    """What stands before, between and behind the marks of a text."""

    segments: tuple[str, ...]
    mask_ids: tuple[int, ...] = ()  # ids, between the parts

    def fill_masks(self, words: Sequence[SurfaceWord]) -> str:
        """Each mark replaced by its word."""
        text = self.segments[0]
        for word, behind in zip(words, self.segments[1:], strict=True):
            before = text.removesuffix(" ") if word.attaches_left else text
            text = before + (word.text if before else word.text.lstrip(" ")) + behind
        return text


class MaskTokens:
    """The marks that a vocabulary knows. A vocabulary with sentinels alone takes masks for them, one by one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        mask = () if vocabulary.mask is None else (vocabulary.mask,)
        self.token_ids = frozenset({*mask, *vocabulary.sentinels})
        marks = [*mask, *vocabulary.sentinels]
        self._name_to_id = dict(zip(vocabulary.to_pieces(marks), marks, strict=True))
        self._name_to_id |= {name: token for token in mask for name in MASK_SPELLINGS}
        written = dict.fromkeys([*self._name_to_id, *MASK_SPELLINGS]) if marks else {}
        self._pattern = re.compile("|".join(map(re.escape, written)) or "(?!)")

    def parse(self, text: str) -> MaskedText:
        """The text, cut at its marks."""
        names = self._pattern.findall(text)
        taken = {self._name_to_id.get(name) for name in names}
        free = (token for token in self.vocabulary.sentinels if token not in taken)
        marks = [self._name_to_id[name] if name in self._name_to_id else next(free, None) for name in names]
        if None in marks:
            raise MaskError(
                f"a text must have at most {len(self.vocabulary.sentinels)} masks, as many as the model has sentinels, "
                f"but has {len(names)}; cut it"
            )
        return MaskedText(tuple(self._pattern.split(text)), tuple(token for token in marks if token is not None))

    def encode(self, masked_text: MaskedText) -> list[int]:
        """As a model reads it, without a frame."""
        if not masked_text.mask_ids:
            return self.vocabulary.encode([masked_text.segments[0]])[0]
        whole = (
            isinstance(self.vocabulary, SentencePieceVocabulary)
            and self._placeholder_ids
            and self.vocabulary.unknown not in self._placeholder_ids
        )
        return self._encode_whole(masked_text) if whole else self._encode_segments(masked_text)

    def _encode_segments(self, masked_text: MaskedText) -> list[int]:
        """WordPiece and its kin, and what others have trained: a text is cut at its marks before anything else is done
        to it."""
        parts = [part.removesuffix(" ") for part in masked_text.segments[:-1]] + [masked_text.segments[-1]]
        first, *rest = self.vocabulary.encode(parts)
        return first + [token for mark, ids in zip(masked_text.mask_ids, rest, strict=True) for token in (mark, *ids)]

    def _encode_whole(self, masked_text: MaskedText) -> list[int]:
        """SentencePiece: a word's space is part of it, and a text's beginning is a space. So the text is encoded whole,
        with a sign in place of each mark that no word has in it."""
        sign, marks = self._placeholder_ids, iter(masked_text.mask_ids)
        free = [part.replace(PLACEHOLDER, " ") for part in masked_text.segments]
        ids = self.vocabulary.encode([PLACEHOLDER.join(free)])[0]
        found: list[int] = []
        place = 0
        while place < len(ids):
            if tuple(ids[place : place + len(sign)]) == sign:
                if self.has_space_prefixes and found and found[-1] == self._space_id:
                    found.pop()  # it is the mark's own
                found.append(next(marks))
                place += len(sign)
            else:
                found.append(ids[place])
                place += 1
        return found

    @cached_property
    def _placeholder_ids(self) -> tuple[int, ...]:
        ids = self.vocabulary.encode([PLACEHOLDER])[0]
        return tuple(ids[1:] if ids[:1] == [self._space_id] else ids)

    @cached_property
    def _space_id(self) -> int:
        assert isinstance(self.vocabulary, SentencePieceVocabulary)
        return self.vocabulary.processor.piece_to_id(SPACE)

    @cached_property
    def has_space_prefixes(self) -> bool:
        """Is the space before a word part of its piece? Not where every character is a piece."""
        assert isinstance(self.vocabulary, SentencePieceVocabulary)
        processor = self.vocabulary.processor
        names = processor.id_to_piece(list(range(processor.get_piece_size())))
        return any(len(name) > 1 and name.startswith(SPACE) for name in names)
