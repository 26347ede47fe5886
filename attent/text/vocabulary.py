"""The tokenizer of one side: the interface of vocabularies, and the one of SentencePiece models.

Folders are handled by `tokenizer`, other formats by `tokenizer_formats`. Models trained by attent are lossless: text
without a piece is encoded as bytes, and `▁`, which SentencePiece uses for the space, is escaped here.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from sentencepiece import SentencePieceProcessor, set_min_log_level

from attent.storage.errors import AttentError

SPACE = "▁"  # SentencePiece's space; a literal `▁` would be decoded as a space

PAD, START, END, UNKNOWN = 0, 1, 2, 3  # of tokenizers trained by attent

ESCAPE = "\x1a"  # U+001A "substitute": a piece of every model that attent trains
TAG_PATTERN = re.compile(r"<2([^<>]+)>")
MASK_TOKEN = "<mask>"
SENTINEL_PATTERN = re.compile(r"<extra_id_(\d+)>")
SURROGATE = re.compile("[\ud800-\udfff]")
SILENT_LOG_LEVEL = 4  # of SentencePiece; errors are raised as exceptions
SEPARATOR = "␞"  # of preceding sentences, one symbol of the tokenizer
MAX_CONTEXT_CHARS = 500  # about 100 subwords; longer sentences, and those before them, are left out
_BREAK = f"{SEPARATOR} "  # with the space that begins a sentence's first subword


class TokenizerError(AttentError):
    """A tokenizer cannot be trained, read or used; the message says why and what to do."""


class Vocabulary:
    size: int
    pad: int
    start: int
    end: int
    unknown: int
    prefix_ids: tuple[int, ...]  # before a text for single-stack models: BERT's [CLS], the start token
    suffix_ids: tuple[int, ...]  # after it: BERT's [SEP], the end token; none for models that continue texts
    mask: int | None = None  # of masked language models
    sentinels: tuple[int, ...] = ()  # of T5 for masked spans, in the order of their use
    byte_ids: frozenset[int] = frozenset()  # decode only as whole runs: an incomplete character invalidates its run
    tags: tuple[str, ...] = ()  # languages with a tag, such as ("de", "fr")
    _tags: Mapping[str, int] = {}  # and the ids of these tags
    first_ids: tuple[int, ...] = ()  # before each text of an encoder-decoder model: BART's <s>
    # Instead, tokens that name the language of the text, on both sides (M2M-100, NLLB, mBART): `bind_languages`.
    language_ids: Mapping[str, int] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, without start and end tokens."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to text, without special tokens and tags."""
        raise NotImplementedError

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the piece of each id: `▁man`, `<0xE2>`, `<2de>`."""
        raise NotImplementedError

    def get_tag_id(self, language: str) -> int:
        if language in self._tags:
            return self._tags[language]
        languages = ", ".join(self.tags)
        known = f"its languages are {languages}" if languages else "it has no tags, since it has one target language"
        raise TokenizerError(f"the tokenizer has no tag for {language!r}; {known}")


class AddedToken(NamedTuple):
    name: str
    special: bool  # not part of the text


@dataclass(frozen=True, kw_only=True)
class SentencePieceOptions:
    """Settings of a SentencePiece model from other files of its folder."""

    added_tokens: Mapping[int, AddedToken] = field(default_factory=dict)
    eos_token: str | None = None  # None: as in the model
    add_bos: bool = True  # if the model has a start token
    add_eos: bool = False


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model, trained by attent or imported."""

    def __init__(
        self,
        model: bytes,
        where: str = "tokenizer.model",
        extra_ids: int = 0,
        options: SentencePieceOptions | None = None,
        is_own: bool = False,
    ) -> None:
        """`extra_ids`: ids after the model's own without text (T5's sentinels). `options`: for imported models.
        `is_own`: trained by attent, which escapes `▁`."""
        self._arguments = (model, where, extra_ids, options, is_own)
        self.processor = processor = load_processor(model, where)
        own = processor.get_piece_size()
        self.is_own = is_own
        options = SentencePieceOptions() if options is None else options
        self._added_tokens = {i: piece for i, piece in options.added_tokens.items() if i >= own}
        self.size = max(own + extra_ids, 1 + max(self._added_tokens, default=0))
        self.end = self._find_end(options)
        if self.end < 0:
            raise TokenizerError(f"{where}: has no end-of-sentence piece; use a model for translation")
        self.unknown = processor.unk_id()
        # LLaMA has no padding piece, and T5 no start piece: its decoder starts from padding.
        self.pad = processor.pad_id() if processor.pad_id() >= 0 else self.end
        self.start = processor.bos_id() if processor.bos_id() >= 0 else self.pad
        own_ids = list(range(own))
        names, control = processor.id_to_piece(own_ids), processor.is_control(own_ids)
        self._tags = {match[1]: i for i in own_ids if control[i] and (match := TAG_PATTERN.fullmatch(names[i]))}
        self.tags = tuple(self._tags)
        texts = {i for i, piece in self._added_tokens.items() if not piece.special}
        self._skipped_ids = {i for i in own_ids if control[i]} | {self.unknown} | set(range(own, self.size)) - texts
        has_start = processor.bos_id() >= 0
        self.prefix_ids = (self.start,) if has_start and options.add_bos else ()
        ends = self.is_own or not has_start or options.add_eos  # LLaMA continues texts
        self.suffix_ids = (self.end,) if ends else ()
        self.mask = next((i for i in own_ids if control[i] and names[i] == MASK_TOKEN), None)
        sentinels = {
            int(match[1]): i for i in own_ids if control[i] and (match := SENTINEL_PATTERN.fullmatch(names[i]))
        }
        self.sentinels = tuple(sentinels[n] for n in sorted(sentinels))
        self.sentinels = self.sentinels or tuple(range(own + extra_ids - 1, own - 1, -1))  # T5's ids count downwards

    def __reduce__(self) -> "tuple[type[SentencePieceVocabulary], tuple[Any, ...]]":
        return SentencePieceVocabulary, self._arguments

    def _find_end(self, options: SentencePieceOptions) -> int:
        """Return the id of `eos_token` if the model has it, else the model's own."""
        if options.eos_token is None:
            return int(self.processor.eos_id())
        added = next((i for i, token in self._added_tokens.items() if token.name == options.eos_token), None)
        if added is not None:
            return added
        own = self.processor.piece_to_id(options.eos_token)
        is_known = self.processor.id_to_piece(own) == options.eos_token
        return int(own if is_known else self.processor.eos_id())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_escaped(self.escape_texts(list(texts)))

    def encode_escaped(self, texts: list[str]) -> list[list[int]]:
        try:
            return self.processor.encode(texts, num_threads=1)
        except TypeError:  # a lone surrogate
            return self.processor.encode([replace_surrogates(text) for text in texts], num_threads=1)

    def escape_texts(self, texts: list[str]) -> list[str]:
        """Escape `▁`, which SentencePiece would take for a space."""
        joined = "".join(texts)  # faster than searching each text
        if self.is_own and (SPACE in joined or ESCAPE in joined):
            return [text.replace(ESCAPE, ESCAPE + "0").replace(SPACE, ESCAPE + "1") for text in texts]
        return texts

    @cached_property
    def can_encode_by_word(self) -> bool:
        """True if the ids of a word never depend on its neighbors, as in our BPE models.

        Their pieces contain a space only at the start. A unigram model breaks near ties by sums over the whole text.
        """
        all_ids = range(self.processor.get_piece_size())
        is_bpe = all(self.processor.get_score(i).is_integer() for i in all_ids)  # the ranks of the merges
        return self.is_own and is_bpe and not any(SPACE in self.processor.id_to_piece(i)[1:] for i in all_ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_batch([ids])[0]

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        if not rows:
            return []
        for ids in rows:
            check_ids(ids, self.size)
        kept_rows = [
            [*ids] if self._skipped_ids.isdisjoint(ids) else [int(i) for i in ids if i not in self._skipped_ids]
            for ids in rows
        ]
        # Added tokens are decoded by name: SentencePiece takes unknown names for text.
        texts: list[str]
        if self._added_tokens and not self._added_tokens.keys().isdisjoint(chain.from_iterable(kept_rows)):
            texts = [self.processor.decode(self.to_pieces(ids)) if ids else "" for ids in kept_rows]
        else:
            texts = self.processor.decode(kept_rows, num_threads=1)
        if self.is_own and any(ESCAPE in text for text in texts):
            return [text.replace(ESCAPE + "1", SPACE).replace(ESCAPE + "0", ESCAPE) for text in texts]
        return texts

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        names = self._names
        return [names[i] for i in ids]

    @cached_property
    def _names(self) -> list[str]:
        own = self.processor.get_piece_size()
        extra = {i: f"<{i}>" for i in range(own, self.size)}
        extra |= {i: f"<extra_id_{number}>" for number, i in enumerate(self.sentinels) if i >= own}
        extra |= {i: token.name for i, token in self._added_tokens.items()}
        return [*self.processor.id_to_piece(list(range(own))), *extra.values()]


def check_ids(ids: Sequence[int], size: int) -> None:
    if len(ids) and not (min(ids) >= 0 and max(ids) < size):
        first = next(int(i) for i in ids if not 0 <= i < size)
        raise TokenizerError(f"ids must be from 0 to {size - 1}, but one is {first}; check that they are of this model")


def load_processor(model: bytes, where: str) -> SentencePieceProcessor:
    set_min_log_level(SILENT_LOG_LEVEL)
    try:
        processor = SentencePieceProcessor()
        processor.LoadFromSerializedProto(model)
        processor.id_to_piece(list(range(processor.get_piece_size())))  # raises for invalid UTF-8
        return processor
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        problem = "is not a SentencePiece model, or is damaged"
        raise TokenizerError(f"{where}: {problem}; download the file again") from error


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs; lone surrogates become U+FFFD."""
    if not SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def has_separator(vocabulary: Vocabulary) -> bool:
    return SEPARATOR in vocabulary.to_pieces(vocabulary.encode([SEPARATOR])[0])


def split_context(source: str) -> tuple[str, str]:
    """Return the context, with its separators, and the sentence."""
    before, separator, sentence = source.rpartition(_BREAK)
    return before + separator, sentence


class ContextWindow:
    """The last sentences of a document that is read in order, as context; an empty sentence ends the document.

    A source is `first sentence␞ second sentence␞ the sentence to translate`, in training and in translation.
    """

    def __init__(self, size: int) -> None:
        self.sentences = deque[str](maxlen=size)

    @property
    def prefix(self) -> str:
        """The context of the next sentence."""
        prefix = ""
        for sentence in reversed(self.sentences):
            if len(prefix) + len(sentence) > MAX_CONTEXT_CHARS:
                break
            prefix = sentence + _BREAK + prefix
        return prefix

    def append(self, *sentences: str) -> None:
        for sentence in sentences:
            text = " ".join(sentence.replace(SEPARATOR, " ").split())
            if text:
                self.sentences.append(text)
            else:
                self.sentences.clear()
