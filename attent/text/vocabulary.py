"""One side's words as numbers: what every vocabulary offers, and the one that is a SentencePiece model.

A vocabulary is made from the bytes of its file and knows nothing of folders (`tokenizer`), of how it was trained
(`train`) or of other people's formats (`foreign`). In the models that we train any text comes back as it was:
whatever has no piece of its own is spelled in bytes, and the one character that SentencePiece takes for itself, `▁`,
is escaped here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

from sentencepiece import SentencePieceProcessor, set_min_log_level

from attent.text.subword_sampling import SPACE, PieceTable, SegmentationSampler

PAD, START, END, UNKNOWN = 0, 1, 2, 3  # in the vocabularies that we train; imported ones say their own

ESCAPE = "\x1a"  # "substitute" by its Unicode name. A piece of every model that we train, and their mark
TAG_PATTERN = re.compile(r"<2([^<>]+)>")
MASK_TOKEN = "<mask>"
SENTINEL_PATTERN = re.compile(r"<extra_id_(\d+)>")
SURROGATE = re.compile("[\ud800-\udfff]")
MIN_SAMPLING_RATE = 1e-9  # a rate at which nothing would be drawn in a lifetime
SILENT_LOG_LEVEL = 4  # SentencePiece's log level: nothing, errors come as exceptions


class TokenizerError(ValueError):
    """A tokenizer that cannot be made, read or used; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class SubwordSampling:
    """Another segmentation each time, so that a model meets a word in many spellings (subword regularisation)."""

    rate: float = 0.1  # 0 is the usual segmentation, near 1 the wildest: of BPE, the chance that a merge is left out

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ValueError(f"`rate` must be at least 0 and less than 1, but is {self.rate!r}")


class Vocabulary(Protocol):
    """What the rest of the package needs of one side."""

    @property
    def size(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def unknown(self) -> int: ...
    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What stands before a text that a model reads by itself: BERT's [CLS], the start."""

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """What stands behind such a text: BERT's [SEP], the end, or nothing where texts are to be gone on with."""

    @property
    def mask(self) -> int | None:
        """The id that stands in the place of a word to be told, if there is one."""

    @property
    def sentinels(self) -> tuple[int, ...]:
        """Ids that stand in the places of spans of words, the first of a text first (T5)."""

    @property
    def byte_ids(self) -> frozenset[int]:
        """Ids of bytes that are read with their neighbours: a whole run of them is characters, or none of it is."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Languages that have a tag, such as ("de", "fr")."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without start or end."""

    def sample(self, texts: Sequence[str], sampling: SubwordSampling, seed: int) -> list[list[int]]:
        """Like `encode`, in a segmentation drawn by chance: a pure function of its arguments, in every process."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text; specials and tags are left out."""

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each: of many at once more quickly than one by one."""

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        """Each id as people look at it: `▁man`, `<0xE2>`, `<2de>`."""

    def get_tag_id(self, language: str) -> int:
        """The id that asks for a language, such as that of `<2de>`."""


class AddedToken(NamedTuple):
    """A piece that was added to a model when its tokenizer was made already."""

    name: str
    special: bool  # it is no text


@dataclass(frozen=True, kw_only=True)
class SentencePieceOptions:
    """What the files beside a SentencePiece model say of it."""

    added_tokens: Mapping[int, AddedToken] = field(default_factory=dict)
    eos_token: str | None = None  # the name of the piece that ends a text; None: as the model says
    add_bos: bool = True  # the start stands before a text, where there is one
    add_eos: bool = False  # the end stands behind it


class SentencePieceVocabulary:
    """A vocabulary that is a SentencePiece model, ours or that of an imported model."""

    byte_ids: frozenset[int] = frozenset()  # SentencePiece reads each character by itself

    def __init__(
        self,
        model: bytes,
        where: str = "tokenizer.model",
        extra_ids: int = 0,
        options: SentencePieceOptions | None = None,
    ) -> None:
        """`extra` ids behind the model's own have no text (T5's sentinels). `told` is for imported models alone."""
        self._arguments = (model, where, extra_ids, options)
        self.processor = processor = load_processor(model, where)
        own = processor.get_piece_size()
        self._escapes = processor.piece_to_id(ESCAPE) != processor.unk_id()
        options = SentencePieceOptions() if options is None or self._escapes else options
        self._added_tokens = {i: piece for i, piece in options.added_tokens.items() if i >= own}
        self.size = max(own + extra_ids, 1 + max(self._added_tokens, default=0))
        self.end: int = self._find_end(options)
        if self.end < 0:
            raise TokenizerError(f"{where}: has no piece that ends a sentence; give a model made for translation")
        self.unknown: int = processor.unk_id()
        # LLaMA has no piece for padding, and T5 none for the start: its decoder starts from padding.
        self.pad: int = processor.pad_id() if processor.pad_id() >= 0 else self.end
        self.start: int = processor.bos_id() if processor.bos_id() >= 0 else self.pad
        everything = list(range(own))
        names, control = processor.id_to_piece(everything), processor.is_control(everything)
        self._tags = {match[1]: i for i in everything if control[i] and (match := TAG_PATTERN.fullmatch(names[i]))}
        texts = {i for i, piece in self._added_tokens.items() if not piece.special}
        self._skipped_ids = {i for i in everything if control[i]} | {self.unknown} | set(range(own, self.size)) - texts
        has_start = processor.bos_id() >= 0
        self.prefix_ids: tuple[int, ...] = (self.start,) if has_start and options.add_bos else ()
        ends = self._escapes or not has_start or options.add_eos  # LLaMA's goes on
        self.suffix_ids: tuple[int, ...] = (self.end,) if ends else ()
        self.mask: int | None = next((i for i in everything if control[i] and names[i] == MASK_TOKEN), None)
        sentinels = {
            int(match[1]): i for i in everything if control[i] and (match := SENTINEL_PATTERN.fullmatch(names[i]))
        }
        self.sentinels: tuple[int, ...] = tuple(sentinels[n] for n in sorted(sentinels))
        self.sentinels = self.sentinels or tuple(range(own + extra_ids - 1, own - 1, -1))  # T5's count downwards

    def __reduce__(self) -> tuple[type[SentencePieceVocabulary], tuple[bytes, str, int, SentencePieceOptions | None]]:
        return SentencePieceVocabulary, self._arguments

    def _find_end(self, options: SentencePieceOptions) -> int:
        """What ends a text: as is told, if there is such a piece, or as the model says."""
        if options.eos_token is None:
            return int(self.processor.eos_id())
        found = next((i for i, piece in self._added_tokens.items() if piece.name == options.eos_token), None)
        if (
            found is None
            and self.processor.id_to_piece(own := self.processor.piece_to_id(options.eos_token)) == options.eos_token
        ):
            return int(own)
        return int(self.processor.eos_id()) if found is None else found

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._tags)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        texts = self.escape_texts(list(texts))
        try:
            return self.processor.encode(texts, num_threads=1)
        except TypeError:  # a text with half a surrogate pair is refused
            return self.processor.encode([replace_surrogates(text) for text in texts], num_threads=1)

    def escape_texts(self, texts: list[str]) -> list[str]:
        """As the model sees them: what SentencePiece takes for itself is spelled otherwise."""
        together = "".join(texts)  # two searches instead of two for every text
        if self._escapes and (SPACE in together or ESCAPE in together):
            return [text.replace(ESCAPE, ESCAPE + "0").replace(SPACE, ESCAPE + "1") for text in texts]
        return texts

    @cached_property
    def can_encode_by_word(self) -> bool:
        """Does what a word becomes never depend on its neighbours? So it is in our BPE models (their scores count the
        merges), since in theirs only the first letter of a piece is a space. A unigram model decides near ties by
        how the numbers of the whole text add up."""
        if not self._escapes:
            return False
        pieces = range(self.processor.get_piece_size())
        merges = all(self.processor.get_score(i).is_integer() for i in pieces)
        return merges and not any(SPACE in self.processor.id_to_piece(i)[1:] for i in pieces)

    def sample(self, texts: Sequence[str], sampling: SubwordSampling, seed: int) -> list[list[int]]:
        if not self._escapes:
            raise TokenizerError("only a tokenizer that attent has trained can sample; leave sampling out")
        if sampling.rate < MIN_SAMPLING_RATE:
            return self.encode(texts)
        spelling, sampler = self._sampler
        chance = random.Random(seed)
        texts = [replace_surrogates(text) for text in self.escape_texts(list(texts))]
        return [spelling.sample(text, sampler, sampling.rate, chance) for text in texts]

    @cached_property
    def _sampler(self) -> tuple[PieceTable, SegmentationSampler]:
        spelling = PieceTable.from_processor(self.processor, ESCAPE)
        return spelling, spelling.build_sampler()

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_batch([ids])[0]

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        if not rows:
            return []
        for ids in rows:
            check_ids(ids, self.size)
        heard = [
            [*ids] if self._skipped_ids.isdisjoint(ids) else [int(i) for i in ids if i not in self._skipped_ids]
            for ids in rows
        ]
        # By names where one was added: SentencePiece takes what it does not know for text.
        texts: list[str]
        if self._added_tokens and not self._added_tokens.keys().isdisjoint(chain.from_iterable(heard)):
            texts = [self.processor.decode(self.to_pieces(ids)) if ids else "" for ids in heard]
        else:
            texts = self.processor.decode(heard, num_threads=1)
        if self._escapes and any(ESCAPE in text for text in texts):
            return [text.replace(ESCAPE + "1", SPACE).replace(ESCAPE + "0", ESCAPE) for text in texts]
        return texts

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        names = self._names
        return [names[i] for i in ids]

    @cached_property
    def _names(self) -> list[str]:
        own = self.processor.get_piece_size()
        return [*self.processor.id_to_piece(list(range(own))), *map(self._get_extra_name, range(own, self.size))]

    def _get_extra_name(self, i: int) -> str:
        """Of an id behind the model's own."""
        if i in self._added_tokens:
            return self._added_tokens[i].name
        return f"<extra_id_{self.sentinels.index(i)}>" if i in self.sentinels else f"<{i}>"

    def get_tag_id(self, language: str) -> int:
        return find_tag(self._tags, language)


def check_ids(ids: Sequence[int], size: int) -> None:
    if len(ids) and not (min(ids) >= 0 and max(ids) < size):
        outside = [int(i) for i in ids if not 0 <= i < size]
        raise TokenizerError(f"ids must be from 0 to {size - 1}, but one is {outside[0]}; is it of another model?")


def find_tag(tags: dict[str, int], language: str) -> int:
    if language in tags:
        return tags[language]
    known = f"its languages are {', '.join(tags)}" if tags else "it has none: it translates into one language only"
    raise TokenizerError(f"the tokenizer has no tag for {language!r}; {known}")


def load_processor(model: bytes, where: str) -> SentencePieceProcessor:
    """SentencePiece's reader of a model file; what it refuses is an error that names the file."""
    set_min_log_level(SILENT_LOG_LEVEL)
    try:
        processor = SentencePieceProcessor()
        processor.LoadFromSerializedProto(model)
        processor.id_to_piece(list(range(processor.get_piece_size())))  # none of them must be broken UTF-8
        return processor
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise TokenizerError(f"{where}: is no SentencePiece model, or is damaged; get the file again") from error


def replace_surrogates(text: str) -> str:
    """Surrogates that make a pair become their character, a lone one, which is none, becomes U+FFFD."""
    if not SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
