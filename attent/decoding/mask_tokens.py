"""Texts with masks: a written mask (BERT) or sentinel (T5) becomes its id, the words around it as in any text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from attent.storage.errors import AttentError
from attent.text.vocabulary import MASK_TOKEN, SPACE, SentencePieceVocabulary, Vocabulary

MASK_SPELLINGS = ("[MASK]", MASK_TOKEN)  # accepted for every model
PLACEHOLDER = "\ufffc"  # "object replacement character", never part of a word


@dataclass(frozen=True)
class SurfaceWord:
    text: str
    attaches_left: bool  # it brings its own space, or continues the word before it


@dataclass(frozen=True)
class MaskedText:
    segments: tuple[str, ...]
    mask_ids: tuple[int, ...] = ()  # between the segments

    def fill_masks(self, words: Sequence[SurfaceWord]) -> str:
        text = self.segments[0]
        for word, after in zip(words, self.segments[1:], strict=True):
            before = text.removesuffix(" ") if word.attaches_left else text
            text = before + (word.text if before else word.text.lstrip(" ")) + after
        return text


class MaskTokens:
    """The masks of a vocabulary. If it has only sentinels, written masks become sentinels, in order."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        mask = () if vocabulary.mask is None else (vocabulary.mask,)
        self.token_ids = frozenset({*mask, *vocabulary.sentinels})
        ids = [*mask, *vocabulary.sentinels]
        self._name_to_id = dict(zip(vocabulary.to_pieces(ids), ids, strict=True))
        self._name_to_id |= {name: token for token in mask for name in MASK_SPELLINGS}
        spellings = dict.fromkeys([*self._name_to_id, *MASK_SPELLINGS]) if ids else {}
        self._pattern = re.compile("|".join(map(re.escape, spellings)) or "(?!)")

    def parse(self, text: str) -> MaskedText:
        names = self._pattern.findall(text)
        used = {self._name_to_id.get(name) for name in names}
        unused = (token for token in self.vocabulary.sentinels if token not in used)
        mask_ids = [self._name_to_id[name] if name in self._name_to_id else next(unused, None) for name in names]
        if None in mask_ids:
            raise AttentError(
                f"a text must have at most {len(self.vocabulary.sentinels)} masks, the number of the model's "
                f"sentinels, but has {len(names)}; split it"
            )
        return MaskedText(tuple(self._pattern.split(text)), tuple(token for token in mask_ids if token is not None))

    def encode(self, masked_text: MaskedText) -> list[int]:
        if not masked_text.mask_ids:
            return self.vocabulary.encode([masked_text.segments[0]])[0]
        is_sentencepiece = isinstance(self.vocabulary, SentencePieceVocabulary)
        if is_sentencepiece and self._placeholder_ids and self.vocabulary.unknown not in self._placeholder_ids:
            return self._encode_whole(masked_text)
        # Segment by segment, as for WordPiece: Hugging Face splits at masks first.
        *segments, last = masked_text.segments
        first, *rest = self.vocabulary.encode([*(segment.removesuffix(" ") for segment in segments), last])
        return first + [token for mask, ids in zip(masked_text.mask_ids, rest, strict=True) for token in (mask, *ids)]

    def _encode_whole(self, masked_text: MaskedText) -> list[int]:
        """Tokenize with a placeholder for each mask, as for SentencePiece: a space belongs to the word after it."""
        placeholder, mask_ids = self._placeholder_ids, iter(masked_text.mask_ids)
        segments = [segment.replace(PLACEHOLDER, " ") for segment in masked_text.segments]
        ids = self.vocabulary.encode([PLACEHOLDER.join(segments)])[0]
        result: list[int] = []
        i = 0
        while i < len(ids):
            if tuple(ids[i : i + len(placeholder)]) == placeholder:
                if self.has_space_prefixes and result and result[-1] == self._space_id:
                    result.pop()  # the space belongs to the mask
                result.append(next(mask_ids))
                i += len(placeholder)
            else:
                result.append(ids[i])
                i += 1
        return result

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
        """True if pieces include the space before a word; false for character vocabularies."""
        assert isinstance(self.vocabulary, SentencePieceVocabulary)
        processor = self.vocabulary.processor
        names = processor.id_to_piece(list(range(processor.get_piece_size())))
        return any(len(name) > 1 and name.startswith(SPACE) for name in names)
