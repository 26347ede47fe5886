"""What models that read have to say: which word stands behind a mask, which label a text or an image gets, and texts as
vectors.

    reader = Reader.load("runs/mlm")
    reader.fill(["The [MASK] sat on the mat."])[0].text

Texts go through the model in batches of like length, and what comes out stands in the order in which they came.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from attent.data.images import Shape, read_image
from attent.decode.force import evaluating
from attent.decode.marks import WRITTEN, Marks, Word, Words
from attent.decode.spans import Spans, search_spans
from attent.decode.translator import DTYPES, Translator, best_device, tokenizer_of
from attent.interop import load as load_model
from attent.models import CausalLM, Encoder, Model, Seq2Seq, Vision
from attent.text.sample import SPACE
from attent.text.tokenizer import Tokenizer, Vocabulary
from attent.text.vocabulary import Pieces

Pooling = Literal["mean", "class"]
TextItem = str | tuple[str, str]
Item = TextItem | Path | Tensor
T = TypeVar("T")

CPU_TOKENS, GPU_TOKENS = 4_096, 65_536  # of a batch, filler included
PICTURES = 64  # of a batch


class ReaderError(ValueError):
    """What cannot be read as it was asked for, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A word that may stand behind a mask."""

    word: str
    probability: float
    text: str  # the whole text with it; other masks have their likeliest words


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A text whose masks are filled with the likeliest words."""

    source: str
    text: str
    masks: tuple[tuple[Guess, ...], ...]  # for each mask, the likeliest first


@dataclass(frozen=True, kw_only=True)
class Classified:
    """The likeliest label, and how likely each is, the likeliest first."""

    label: str
    probability: float
    probabilities: dict[str, float]


@dataclass(frozen=True)
class Row:
    """A text as ids, with the kind of text that each belongs to."""

    ids: tuple[int, ...]
    segments: tuple[int, ...]
    masks: tuple[int, ...] = ()  # places


class Reader:
    """A model that reads texts or images, with its tokenizer if it needs one."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        *,
        name: str = "the model",
        batch_tokens: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """
        name          what to call the model in an error
        batch_tokens  tokens that go through the model at once, filler included; None: what suits the device
        say           is told what a person may want to know, such as that texts were cut
        """
        if batch_tokens is not None and batch_tokens < 1:
            raise ReaderError(f"`batch_tokens` must be 1 or more, but is {batch_tokens}")
        check_vocabulary(model, tokenizer, name)
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.batch_tokens, self.say = batch_tokens, say
        self.said: set[str] = set()

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        batch_tokens: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Reader:
        """The reader of a folder, ours or Hugging Face's; in float32 unless another `dtype` is named."""
        if dtype is not None and dtype not in DTYPES:
            raise ReaderError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype!r}")
        path = Path(folder).expanduser()
        where = best_device() if device is None else torch.device(device)
        model = load_model(path, dtype=DTYPES[dtype or "float32"], device=where)
        tokenizer = None if isinstance(model, Vision) else tokenizer_of(path)
        return cls(model, tokenizer, name=str(folder), batch_tokens=batch_tokens, say=say)

    # --- what people call --------------------------------------------------------------------------------------------

    def fill(self, texts: Sequence[str], top: int = 5, numbers: Sequence[int] | None = None) -> list[Filled]:
        """For each mask of each text the `top` likeliest words. A mask is written [MASK] or <mask>; a model of spans
        (T5) fills each with as many words as it likes, and knows <extra_id_0>, <extra_id_1> and so on, too.

        numbers  what the texts are called in an error; None: 1, 2 and so on
        """
        if top < 1:
            raise ReaderError(f"`top` must be 1 or more, but is {top}")
        self._check_fills()
        check_several(texts)
        words = [self._words(text) for text in texts]
        numbered = zip(words, numbers or range(1, len(words) + 1), strict=True)
        rows = [self._blanked(words, number) for words, number in numbered]
        if isinstance(self.model, Seq2Seq):
            answers = self._spans(rows, words, top)
            return [filled_spans(*one) for one in zip(texts, words, answers, strict=True)]
        found = self._likeliest(rows, top)
        return [self._filled(text, one, best) for text, one, best in zip(texts, words, found, strict=True)]

    def has_mask(self, text: str) -> bool:
        """Is there something to fill?"""
        return bool(self._words(text).marks)

    def masked_ids(self, text: str) -> list[int]:
        """A text without its frame, as `fill` reads it: what is written as a mask is the mask."""
        return self.marks.ids(self._words(text))

    def _likeliest(self, rows: Sequence[Row], top: int) -> list[list[tuple[list[int], list[float]]]]:
        """For each mask of each row the likeliest tokens, and how likely they are."""
        model = self.model
        assert isinstance(model, Encoder)

        def guess(batch: list[Row], states: Tensor) -> list[list[tuple[list[int], list[float]]]]:
            counts = [len(row.masks) for row in batch]
            line = torch.arange(len(batch)).repeat_interleave(torch.tensor(counts)).to(states.device)
            place = torch.tensor([at for row in batch for at in row.masks], device=states.device)
            likely = model.masked_logits(states[line, place]).float().softmax(-1)  # (masks, V)
            likely[:, self.never] = 0.0
            best = likely.topk(min(top, likely.shape[1] - len(self.never)), -1)
            found = iter(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            return [[next(found) for _ in range(count)] for count in counts]

        return self._through(rows, guess)

    def _spans(self, rows: Sequence[Row], words: Sequence[Words], top: int) -> list[list[Spans]]:
        """The best answers of a model that fills spans."""
        assert isinstance(self.model, Seq2Seq)
        assert self.tokenizer is not None
        translator = Translator(self.model, self.tokenizer, batch_tokens=self.batch_tokens)
        marks = [one.marks for one in words]
        with evaluating(self.model), torch.inference_mode():
            return search_spans(translator, [row.ids for row in rows], marks, top)

    def classify(self, items: Sequence[Item]) -> list[Classified]:
        """The label of each text, of each pair of texts `(a, b)`, or of each image: a path, or bytes of (C, S, S)."""
        labels, model = self.labels(), self.model
        check_several(items)
        if isinstance(model, Vision):
            logits = self._pictures(items, model)
        else:
            assert isinstance(model, Encoder)
            rows = self._rows(items)
            logits = self._through(rows, lambda _, states: list(model.classify(states).float().cpu()))
        return [classified(labels, one.softmax(-1).tolist()) for one in logits]

    def embed(self, items: Sequence[Item], pooling: Pooling = "mean", normalise: bool = False) -> Tensor:
        """A vector for each text or image, (N, E) in float32: the mean of its tokens' states, or the state of its first
        token; with `normalise` of length 1, so that the product of two is their cosine."""
        self._check_pooling(pooling)
        check_several(items)
        if isinstance(self.model, Vision):
            made = self._pictures(items, self.model, pooling)
        else:
            made = self._through(self._rows(items), lambda batch, states: pooled(states, batch, pooling))
        vectors = torch.stack(made) if made else torch.empty(0, self.width)
        return torch.nn.functional.normalize(vectors, dim=-1) if normalise else vectors

    def labels(self) -> tuple[str, ...]:
        """That it chooses among; a model that does not choose is refused."""
        model = self.model
        if isinstance(model, Encoder | Vision) and model.config.labels:
            return model.config.labels
        task = "images" if isinstance(model, Vision) else "classify"
        advice = f"give a model of `attent train --task {task}`"
        if isinstance(model, Encoder | Vision):
            advice = f"teach it: attent train --task {task} --from {self.name} --data EXAMPLES --out DIR"
        raise ReaderError(f"{self.name}: must have learned to choose among labels, but has not; {advice}")

    @property
    def width(self) -> int:
        config = self.model.config
        return config.encoder.width if isinstance(self.model, Seq2Seq) else config.stack.width  # type: ignore[union-attr]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # --- what a model can do -----------------------------------------------------------------------------------------

    def _check_fills(self) -> None:
        model = self.model
        fills = isinstance(model, Seq2Seq) and bool(self._vocabulary.sentinels)
        if isinstance(model, Encoder):
            fills = model.masked is not None and self._vocabulary.mask is not None
        if not fills:
            raise ReaderError(
                f"{self.name}: must have learned to tell masked words, but has not; give a model of "
                "`attent train --task mlm` or `--task spans`, or a BERT that has its masked-word head"
            )

    def _check_pooling(self, pooling: str) -> None:
        model = self.model
        if pooling not in ("mean", "class"):
            raise ReaderError(f"`pooling` must be mean or class, but is {pooling!r}")
        has_first = model.config.class_token if isinstance(model, Vision) else isinstance(model, Encoder)
        if pooling == "class" and not has_first:
            raise ReaderError(f"{self.name}: has no token that stands for the whole; take the pooling `mean`")

    @property
    def _vocabulary(self) -> Vocabulary:
        assert self.tokenizer is not None
        return self.tokenizer.source

    @cached_property
    def marks(self) -> Marks:
        """How masks are written."""
        return Marks(self._vocabulary)

    @cached_property
    def never(self) -> list[int]:
        """What is no word: the frame of a text, padding, the mask itself."""
        of = self._vocabulary
        mask = () if of.mask is None else (of.mask,)
        assert not isinstance(self.model, Vision | Seq2Seq)
        nameless = range(of.size, self.model.config.vocab)  # rows that round the matrix up
        return sorted({*of.before, *of.after, *mask, *of.sentinels, of.pad, of.start, of.end, of.unknown, *nameless})

    # --- from texts to rows ------------------------------------------------------------------------------------------

    @cached_property
    def _limit(self) -> int | None:
        """Tokens that the model has positions for; None: any number."""
        stack = self.model.decoder if isinstance(self.model, CausalLM) else self.model.encoder
        return stack.positions.max_length

    def _words(self, text: str) -> Words:
        if not isinstance(text, str):
            raise ReaderError(f"a text to fill must be a string, but is a {type(text).__name__}")
        return self.marks.words_of(text.strip())

    def _rows(self, items: Sequence[Item]) -> list[Row]:
        texts = [text_of(item, number) for number, item in enumerate(items, 1)]
        if not isinstance(self.model, CausalLM):  # the others have met texts without spaces around them
            texts = [text.strip() if isinstance(text, str) else (text[0].strip(), text[1].strip()) for text in texts]
        firsts = self._vocabulary.encode([text if isinstance(text, str) else text[0] for text in texts])
        others = iter(self._vocabulary.encode([text[1] for text in texts if not isinstance(text, str)]))
        rows = [
            self._single(ids) if isinstance(text, str) else self._pair(ids, next(others))
            for text, ids in zip(texts, firsts, strict=True)
        ]
        longer = sum(row is not kept for row, kept in rows)
        if longer:
            self._tell(
                f"{longer:,} of {len(rows):,} texts have more tokens than the {self._limit} that the model reads, and "
                "are cut"
            )
        return [kept for _, kept in rows]

    def _single(self, ids: Sequence[int]) -> tuple[Row, Row]:
        """A text in its frame, and what of it the model can read."""
        before, after = self._frame
        whole = row_of([(*before, *ids, *after) or (self._vocabulary.start,)])
        if self._limit is None or len(whole.ids) <= self._limit:
            return whole, whole
        kept = ids[: self._limit - len(before) - len(after)]
        return whole, row_of([(*before, *kept, *after)])

    def _pair(self, first: list[int], second: list[int]) -> tuple[Row, Row]:
        """Two texts in one row; where they are too long, the longer one is cut."""
        if not isinstance(self.model, Encoder):
            raise ReaderError(f"{self.name}: must be an encoder to read pairs of texts, but is not; give single texts")
        before, after = self._frame
        told_apart = self.model.config.segments > 1

        def laid(one: Sequence[int], other: Sequence[int]) -> Row:
            row = row_of([(*before, *one, *after), (*other, *after)])
            return row if told_apart else replace(row, segments=(0,) * len(row.ids))

        whole = laid(first, second)
        room = len(whole.ids) if self._limit is None else self._limit
        over = len(whole.ids) - room
        if over <= 0:
            return whole, whole
        first, second = list(first), list(second)
        while over > 0:
            longer = first if len(first) > len(second) else second
            cut = max(1, min(over, abs(len(first) - len(second))))
            del longer[len(longer) - cut :]
            over -= cut
        return whole, laid(first, second)

    @property
    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands around a text. A translator's source ends, and begins with nothing; what goes on has no end."""
        of = self._vocabulary
        if isinstance(self.model, Seq2Seq):
            return (), (of.end,)
        return of.before, () if isinstance(self.model, CausalLM) else of.after

    def _blanked(self, words: Words, number: int) -> Row:
        """A text with masks, in its frame."""
        if not words.marks:
            raise ReaderError(
                f"text {number:,} must have a mask in the place of a word, such as `The {WRITTEN[0]} sat`, but has none"
            )
        whole, kept = self._single(self.marks.ids(words))
        masks = tuple(place for place, token in enumerate(whole.ids) if token in self.marks.tokens)
        if masks[-1] >= len(kept.ids) - len(self._frame[1]):
            raise ReaderError(
                f"text {number:,} must have its masks among the first {self._limit} tokens, which the model reads, but "
                f"one stands at {masks[-1] + 1:,}; shorten the text before it"
            )
        if kept is not whole:
            self._tell(f"texts with more than {self._limit} tokens are cut behind their masks")
        return replace(kept, masks=masks)

    # --- from rows to results ----------------------------------------------------------------------------------------

    def _through(self, rows: Sequence[Row], read: Callable[[list[Row], Tensor], list[T]]) -> list[T]:
        """What `read` makes of the states of each batch, in the order of the rows."""
        tokens = self.batch_tokens or (CPU_TOKENS if self.device.type == "cpu" else GPU_TOKENS)
        found: dict[int, T] = {}
        with evaluating(self.model), torch.inference_mode():
            for numbers in by_length([len(row.ids) for row in rows], tokens):
                batch = [rows[number] for number in numbers]
                found |= dict(zip(numbers, read(batch, self._states(batch)), strict=True))
        return [found[number] for number in range(len(rows))]

    def _states(self, batch: Sequence[Row]) -> Tensor:
        """(B, T, E)"""
        model = self.model
        width = max(len(row.ids) for row in batch)
        filler = [self._vocabulary.pad] * width
        ids = torch.tensor([[*row.ids, *filler[len(row.ids) :]] for row in batch], device=self.device)
        lengths = torch.tensor([len(row.ids) for row in batch], device=self.device)
        if isinstance(model, Encoder):
            kinds = [[*row.segments, *[0] * (width - len(row.ids))] for row in batch]
            return model(ids, lengths, torch.tensor(kinds, device=self.device) if model.config.segments else None)
        if isinstance(model, Seq2Seq):
            return model.encode(ids, lengths).states
        assert isinstance(model, CausalLM)
        return model.states(ids, lengths)

    def _pictures(self, items: Sequence[Item], model: Vision, pooling: Pooling | None = None) -> list[Tensor]:
        """The logits of each image, or its vector."""
        found: list[Tensor] = []
        with evaluating(model), torch.inference_mode():
            for start in range(0, len(items), PICTURES):
                some = [picture(item, model) for item in items[start : start + PICTURES]]
                pixels = model.normalised(torch.stack(some).to(self.device))
                if pooling is None:
                    found += model(pixels).float().cpu()
                else:
                    states = model.states(pixels).float().cpu()
                    first = int(model.config.class_token)
                    found += states[:, 0] if pooling == "class" else states[:, first:].mean(1)
        return found

    def _filled(self, text: str, words: Words, best: list[tuple[list[int], list[float]]]) -> Filled:
        written = [[self._word(token) for token in tokens] for tokens, _ in best]
        likeliest = [some[0] for some in written]
        masks = []
        for place, ((_, chances), some) in enumerate(zip(best, written, strict=True)):
            others = [[*likeliest[:place], word, *likeliest[place + 1 :]] for word in some]
            masks.append(
                tuple(
                    Guess(word=word.text.strip() or word.text, probability=chance, text=words.with_words(all_words))
                    for word, chance, all_words in zip(some, chances, others, strict=True)
                )
            )
        return Filled(source=text, text=words.with_words(likeliest), masks=tuple(masks))

    def _word(self, token: int) -> Word:
        of = self._vocabulary
        piece = of.pieces([token])[0]
        if isinstance(of, Pieces):
            text = of.decode([token])
            text = piece if "\ufffd" in text else " " + text if piece.startswith(SPACE) else text
            return Word(text, self.marks.joins_spaces)
        return Word(piece.removeprefix("##"), piece.startswith("##"))

    def _tell(self, text: str) -> None:
        if self.say is not None and text not in self.said:
            self.said.add(text)
            self.say(text)


# --- texts -----------------------------------------------------------------------------------------------------------


def filled_spans(text: str, words: Words, answers: Sequence[Spans]) -> Filled:
    """What a model of spans says: each guess belongs to a whole answer, of which it tells how likely it is."""
    masks = []
    for place in range(len(words.marks)):
        guesses: dict[str, Guess] = {}
        for answer in answers:
            word = answer.words[place].text.strip()
            told = Guess(word=word, probability=answer.probability, text=words.with_words(answer.words))
            guesses.setdefault(word, told)
        masks.append(tuple(guesses.values()))
    return Filled(source=text, text=masks[0][0].text, masks=tuple(masks))


def check_several(items: object) -> None:
    """One text is a sequence too, of its letters: nobody means those."""
    if isinstance(items, str | os.PathLike):
        raise ReaderError(f"a list of texts or images must be given, but it is one: {str(items)[:60]!r}; put it in [ ]")


def text_of(item: Item, number: int) -> TextItem:
    if isinstance(item, str) or (
        isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item)
    ):
        return item
    raise ReaderError(f"item {number:,} must be a text, or a pair of texts, but is a {type(item).__name__}")


def row_of(parts: Sequence[tuple[int, ...]]) -> Row:
    """Parts of a row end to end, each its own kind of text."""
    kinds = tuple(kind for kind, part in enumerate(parts) for _ in part)
    return Row(tuple(token for part in parts for token in part), kinds)


def by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of rows in batches of like length: as many as have room, filled up to the longest."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def pooled(states: Tensor, batch: Sequence[Row], pooling: Pooling) -> list[Tensor]:
    """(B, T, E) -> a vector for each row, by its real tokens."""
    states = states.float()
    if pooling == "class":
        return list(states[:, 0].cpu())
    lengths = torch.tensor([len(row.ids) for row in batch], device=states.device)[:, None]
    real = torch.arange(states.shape[1], device=states.device) < lengths  # (B, T)
    return list(((states * real[..., None]).sum(1) / lengths).cpu())


def classified(labels: tuple[str, ...], chances: Sequence[float]) -> Classified:
    ranked = sorted(zip(labels, chances, strict=True), key=lambda one: -one[1])
    return Classified(label=ranked[0][0], probability=ranked[0][1], probabilities=dict(ranked))


def picture(item: Item, model: Vision) -> Tensor:
    """An image as the model reads it: a path, or bytes of (C, S, S)."""
    config = model.config
    if isinstance(item, str | Path):
        return read_image(item, Shape.of(config))
    wanted = (config.channels, config.image, config.image)
    if not isinstance(item, Tensor) or item.dtype != torch.uint8 or item.shape != wanted:
        is_now = f"{item.dtype} of {tuple(item.shape)}" if isinstance(item, Tensor) else f"a {type(item).__name__}"
        raise ReaderError(f"an image must be the name of a file, or bytes of {wanted}, but is {is_now}")
    return item


def check_vocabulary(model: Model, tokenizer: Tokenizer | None, name: str) -> None:
    if isinstance(model, Vision):
        return
    if tokenizer is None:
        raise ReaderError(f"{name}: must have a tokenizer to read texts with, but has none; load both from one folder")
    if tokenizer.source.size > model.config.vocab:
        raise ReaderError(
            f"{name}: its tokenizer must have at most {model.config.vocab} pieces, as the model, but has "
            f"{tokenizer.source.size}; load both from the same folder"
        )
