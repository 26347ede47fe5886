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

from attent.data.images import ImageShape, read_image
from attent.decoding.forced_decoding import eval_mode
from attent.decoding.mask_tokens import MASK_SPELLINGS, MaskedText, MaskTokens, SurfaceWord
from attent.decoding.span_infilling import SpanPrediction, search_spans
from attent.decoding.translator import DTYPES, Translator, load_tokenizer
from attent.interop import load as load_model
from attent.models import CausalLM, Model, Seq2Seq, TextEncoder, VisionTransformer
from attent.nn.devices import choose_device
from attent.text.subword_sampling import SPACE
from attent.text.tokenizer import Tokenizer, Vocabulary
from attent.text.vocabulary import SentencePieceVocabulary

Pooling = Literal["mean", "class"]
TextItem = str | tuple[str, str]
Item = TextItem | Path | Tensor
T = TypeVar("T")

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 4_096, 65_536  # of a batch, filler included
IMAGE_BATCH_SIZE = 64  # of a batch


class PredictorError(ValueError):
    """What cannot be read as it was asked for, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class MaskPrediction:
    """A word that may stand behind a mask."""

    word: str
    probability: float
    text: str  # the whole text with it; other masks have their likeliest words


@dataclass(frozen=True, kw_only=True)
class FilledText:
    """A text whose masks are filled with the likeliest words."""

    source: str
    text: str
    masks: tuple[tuple[MaskPrediction, ...], ...]  # for each mask, the likeliest first


@dataclass(frozen=True, kw_only=True)
class Classification:
    """The likeliest label, and how likely each is, the likeliest first."""

    label: str
    probability: float
    probabilities: dict[str, float]


@dataclass(frozen=True)
class TokenizedText:
    """A text as ids, with the kind of text that each belongs to."""

    token_ids: tuple[int, ...]
    segments: tuple[int, ...]
    mask_positions: tuple[int, ...] = ()  # places


class Predictor:
    """A model that reads texts or images, with its tokenizer if it needs one."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        *,
        name: str = "the model",
        batch_tokens: int | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """
        name          what to call the model in an error
        batch_tokens  tokens that go through the model at once, filler included; None: what suits the device
        say           is told what a person may want to know, such as that texts were cut
        """
        if batch_tokens is not None and batch_tokens < 1:
            raise PredictorError(f"`batch_tokens` must be 1 or more, but is {batch_tokens}")
        check_vocabulary(model, tokenizer, name)
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.batch_tokens, self.notify = batch_tokens, notify
        self.notified: set[str] = set()

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        batch_tokens: int | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> Predictor:
        """The reader of a folder, ours or Hugging Face's; in float32 unless another `dtype` is named."""
        if dtype is not None and dtype not in DTYPES:
            raise PredictorError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype!r}")
        path = Path(folder).expanduser()
        where = choose_device() if device is None else torch.device(device)
        model = load_model(path, dtype=DTYPES[dtype or "float32"], device=where)
        tokenizer = None if isinstance(model, VisionTransformer) else load_tokenizer(path)
        return cls(model, tokenizer, name=str(folder), batch_tokens=batch_tokens, notify=notify)

    # --- what people call --------------------------------------------------------------------------------------------

    def fill(self, texts: Sequence[str], top_k: int = 5, line_numbers: Sequence[int] | None = None) -> list[FilledText]:
        """For each mask of each text the `top` likeliest words. A mask is written [MASK] or <mask>; a model of spans
        (T5) fills each with as many words as it likes, and knows <extra_id_0>, <extra_id_1> and so on, too.

        numbers  what the texts are called in an error; None: 1, 2 and so on
        """
        if top_k < 1:
            raise PredictorError(f"`top` must be 1 or more, but is {top_k}")
        self._check_can_fill()
        check_is_list(texts)
        words = [self._parse_masks(text) for text in texts]
        numbered = zip(words, line_numbers or range(1, len(words) + 1), strict=True)
        rows = [self._encode_masked_text(words, number) for words, number in numbered]
        if isinstance(self.model, Seq2Seq):
            answers = self._predict_spans(rows, words, top_k)
            return [make_filled_text(*one) for one in zip(texts, words, answers, strict=True)]
        found = self._predict_masks(rows, top_k)
        return [self._make_filled_text(text, one, best) for text, one, best in zip(texts, words, found, strict=True)]

    def has_mask(self, text: str) -> bool:
        """Is there something to fill?"""
        return bool(self._parse_masks(text).mask_ids)

    def encode_masked(self, text: str) -> list[int]:
        """A text without its frame, as `fill` reads it: what is written as a mask is the mask."""
        return self.mask_tokens.encode(self._parse_masks(text))

    def _predict_masks(self, rows: Sequence[TokenizedText], top_k: int) -> list[list[tuple[list[int], list[float]]]]:
        """For each mask of each row the likeliest tokens, and how likely they are."""
        model = self.model
        assert isinstance(model, TextEncoder)

        def guess(batch: list[TokenizedText], states: Tensor) -> list[list[tuple[list[int], list[float]]]]:
            counts = [len(row.mask_positions) for row in batch]
            line = torch.arange(len(batch)).repeat_interleave(torch.tensor(counts)).to(states.device)
            place = torch.tensor([at for row in batch for at in row.mask_positions], device=states.device)
            likely = model.masked_logits(states[line, place]).float().softmax(-1)  # (masks, V)
            likely[:, self.suppressed_tokens] = 0.0
            best = likely.topk(min(top_k, likely.shape[1] - len(self.suppressed_tokens)), -1)
            found = iter(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            return [[next(found) for _ in range(count)] for count in counts]

        return self._run_batches(rows, guess)

    def _predict_spans(
        self, rows: Sequence[TokenizedText], masked_texts: Sequence[MaskedText], top_k: int
    ) -> list[list[SpanPrediction]]:
        """The best answers of a model that fills spans."""
        assert isinstance(self.model, Seq2Seq)
        assert self.tokenizer is not None
        translator = Translator(self.model, self.tokenizer, batch_tokens=self.batch_tokens)
        marks = [one.mask_ids for one in masked_texts]
        with eval_mode(self.model), torch.inference_mode():
            return search_spans(translator, [row.token_ids for row in rows], marks, top_k)

    def classify(self, items: Sequence[Item]) -> list[Classification]:
        """The label of each text, of each pair of texts `(a, b)`, or of each image: a path, or bytes of (C, S, S)."""
        labels, model = self.require_labels(), self.model
        check_is_list(items)
        if isinstance(model, VisionTransformer):
            logits = self._run_images(items, model)
        else:
            assert isinstance(model, TextEncoder)
            rows = self._encode_texts(items)
            logits = self._run_batches(rows, lambda _, states: list(model.classify(states).float().cpu()))
        return [make_classification(labels, one.softmax(-1).tolist()) for one in logits]

    def embed(self, items: Sequence[Item], pooling: Pooling = "mean", normalize: bool = False) -> Tensor:
        """A vector for each text or image, (N, E) in float32: the mean of its tokens' states, or the state of its first
        token; with `normalise` of length 1, so that the product of two is their cosine."""
        self._check_pooling(pooling)
        check_is_list(items)
        if isinstance(self.model, VisionTransformer):
            made = self._run_images(items, self.model, pooling)
        else:
            made = self._run_batches(
                self._encode_texts(items), lambda batch, states: pool_states(states, batch, pooling)
            )
        vectors = torch.stack(made) if made else torch.empty(0, self.width)
        return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors

    def require_labels(self) -> tuple[str, ...]:
        """That it chooses among; a model that does not choose is refused."""
        model = self.model
        if isinstance(model, TextEncoder | VisionTransformer) and model.config.labels:
            return model.config.labels
        task = "images" if isinstance(model, VisionTransformer) else "classify"
        advice = f"give a model of `attent train --task {task}`"
        if isinstance(model, TextEncoder | VisionTransformer):
            advice = f"teach it: attent train --task {task} --from {self.name} --data EXAMPLES --out DIR"
        raise PredictorError(f"{self.name}: must have learned to choose among labels, but has not; {advice}")

    @property
    def width(self) -> int:
        config = self.model.config
        return config.encoder.width if isinstance(self.model, Seq2Seq) else config.stack.width  # type: ignore[union-attr]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # --- what a model can do -----------------------------------------------------------------------------------------

    def _check_can_fill(self) -> None:
        model = self.model
        fills = isinstance(model, Seq2Seq) and bool(self._vocabulary.sentinels)
        if isinstance(model, TextEncoder):
            fills = model.masked_lm is not None and self._vocabulary.mask is not None
        if not fills:
            raise PredictorError(
                f"{self.name}: must have learned to tell masked words, but has not; give a model of "
                "`attent train --task mlm` or `--task spans`, or a BERT that has its masked-word head"
            )

    def _check_pooling(self, pooling: str) -> None:
        model = self.model
        if pooling not in ("mean", "class"):
            raise PredictorError(f"`pooling` must be mean or class, but is {pooling!r}")
        has_first = model.config.class_token if isinstance(model, VisionTransformer) else isinstance(model, TextEncoder)
        if pooling == "class" and not has_first:
            raise PredictorError(f"{self.name}: has no token that stands for the whole; take the pooling `mean`")

    @property
    def _vocabulary(self) -> Vocabulary:
        assert self.tokenizer is not None
        return self.tokenizer.source

    @cached_property
    def mask_tokens(self) -> MaskTokens:
        """How masks are written."""
        return MaskTokens(self._vocabulary)

    @cached_property
    def suppressed_tokens(self) -> list[int]:
        """What is no word: the frame of a text, padding, the mask itself."""
        of = self._vocabulary
        mask = () if of.mask is None else (of.mask,)
        assert not isinstance(self.model, VisionTransformer | Seq2Seq)
        nameless = range(of.size, self.model.config.vocab)  # rows that round the matrix up
        return sorted(
            {*of.prefix_ids, *of.suffix_ids, *mask, *of.sentinels, of.pad, of.start, of.end, of.unknown, *nameless}
        )

    # --- from texts to rows ------------------------------------------------------------------------------------------

    @cached_property
    def _max_length(self) -> int | None:
        """Tokens that the model has positions for; None: any number."""
        stack = self.model.decoder if isinstance(self.model, CausalLM) else self.model.encoder
        return stack.positions.max_length

    def _parse_masks(self, text: str) -> MaskedText:
        if not isinstance(text, str):
            raise PredictorError(f"a text to fill must be a string, but is a {type(text).__name__}")
        return self.mask_tokens.parse(text.strip())

    def _encode_texts(self, items: Sequence[Item]) -> list[TokenizedText]:
        texts = [check_text_item(item, number) for number, item in enumerate(items, 1)]
        if not isinstance(self.model, CausalLM):  # the others have met texts without spaces around them
            texts = [text.strip() if isinstance(text, str) else (text[0].strip(), text[1].strip()) for text in texts]
        firsts = self._vocabulary.encode([text if isinstance(text, str) else text[0] for text in texts])
        others = iter(self._vocabulary.encode([text[1] for text in texts if not isinstance(text, str)]))
        rows = [
            self._encode_single(ids) if isinstance(text, str) else self._encode_pair(ids, next(others))
            for text, ids in zip(texts, firsts, strict=True)
        ]
        longer = sum(row is not kept for row, kept in rows)
        if longer:
            self._notify_once(
                f"{longer:,} of {len(rows):,} texts have more tokens than the {self._max_length} that the model reads, and "
                "are cut"
            )
        return [kept for _, kept in rows]

    def _encode_single(self, token_ids: Sequence[int]) -> tuple[TokenizedText, TokenizedText]:
        """A text in its frame, and what of it the model can read."""
        before, after = self._special_tokens
        whole = join_segments([(*before, *token_ids, *after) or (self._vocabulary.start,)])
        if self._max_length is None or len(whole.token_ids) <= self._max_length:
            return whole, whole
        kept = token_ids[: self._max_length - len(before) - len(after)]
        return whole, join_segments([(*before, *kept, *after)])

    def _encode_pair(self, first: list[int], second: list[int]) -> tuple[TokenizedText, TokenizedText]:
        """Two texts in one row; where they are too long, the longer one is cut."""
        if not isinstance(self.model, TextEncoder):
            raise PredictorError(
                f"{self.name}: must be an encoder to read pairs of texts, but is not; give single texts"
            )
        before, after = self._special_tokens
        told_apart = self.model.config.segments > 1

        def laid(one: Sequence[int], other: Sequence[int]) -> TokenizedText:
            row = join_segments([(*before, *one, *after), (*other, *after)])
            return row if told_apart else replace(row, segments=(0,) * len(row.token_ids))

        whole = laid(first, second)
        room = len(whole.token_ids) if self._max_length is None else self._max_length
        over = len(whole.token_ids) - room
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
    def _special_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands around a text. A translator's source ends, and begins with nothing; what goes on has no end."""
        of = self._vocabulary
        if isinstance(self.model, Seq2Seq):
            return (), (of.end,)
        return of.prefix_ids, () if isinstance(self.model, CausalLM) else of.suffix_ids

    def _encode_masked_text(self, masked_text: MaskedText, line_number: int) -> TokenizedText:
        """A text with masks, in its frame."""
        if not masked_text.mask_ids:
            raise PredictorError(
                f"text {line_number:,} must have a mask in the place of a word, such as `The {MASK_SPELLINGS[0]} sat`, but has none"
            )
        whole, kept = self._encode_single(self.mask_tokens.encode(masked_text))
        masks = tuple(place for place, token in enumerate(whole.token_ids) if token in self.mask_tokens.token_ids)
        if masks[-1] >= len(kept.token_ids) - len(self._special_tokens[1]):
            raise PredictorError(
                f"text {line_number:,} must have its masks among the first {self._max_length} tokens, which the model reads, but "
                f"one stands at {masks[-1] + 1:,}; shorten the text before it"
            )
        if kept is not whole:
            self._notify_once(f"texts with more than {self._max_length} tokens are cut behind their masks")
        return replace(kept, mask_positions=masks)

    # --- from rows to results ----------------------------------------------------------------------------------------

    def _run_batches(
        self, rows: Sequence[TokenizedText], process: Callable[[list[TokenizedText], Tensor], list[T]]
    ) -> list[T]:
        """What `read` makes of the states of each batch, in the order of the rows."""
        tokens = self.batch_tokens or (CPU_BATCH_TOKENS if self.device.type == "cpu" else GPU_BATCH_TOKENS)
        found: dict[int, T] = {}
        with eval_mode(self.model), torch.inference_mode():
            for numbers in batch_by_length([len(row.token_ids) for row in rows], tokens):
                batch = [rows[number] for number in numbers]
                found |= dict(zip(numbers, process(batch, self._compute_states(batch)), strict=True))
        return [found[number] for number in range(len(rows))]

    def _compute_states(self, batch: Sequence[TokenizedText]) -> Tensor:
        """(B, T, E)"""
        model = self.model
        width = max(len(row.token_ids) for row in batch)
        filler = [self._vocabulary.pad] * width
        ids = torch.tensor([[*row.token_ids, *filler[len(row.token_ids) :]] for row in batch], device=self.device)
        lengths = torch.tensor([len(row.token_ids) for row in batch], device=self.device)
        if isinstance(model, TextEncoder):
            kinds = [[*row.segments, *[0] * (width - len(row.token_ids))] for row in batch]
            return model(ids, lengths, torch.tensor(kinds, device=self.device) if model.config.segments else None)
        if isinstance(model, Seq2Seq):
            return model.encode(ids, lengths).states
        assert isinstance(model, CausalLM)
        return model.compute_states(ids, lengths)

    def _run_images(
        self, items: Sequence[Item], model: VisionTransformer, pooling: Pooling | None = None
    ) -> list[Tensor]:
        """The logits of each image, or its vector."""
        found: list[Tensor] = []
        with eval_mode(model), torch.inference_mode():
            for start in range(0, len(items), IMAGE_BATCH_SIZE):
                some = [load_image(item, model) for item in items[start : start + IMAGE_BATCH_SIZE]]
                pixels = model.normalize(torch.stack(some).to(self.device))
                if pooling is None:
                    found += model(pixels).float().cpu()
                else:
                    states = model.compute_states(pixels).float().cpu()
                    first = int(model.config.class_token)
                    found += states[:, 0] if pooling == "class" else states[:, first:].mean(1)
        return found

    def _make_filled_text(
        self, text: str, masked_text: MaskedText, best: list[tuple[list[int], list[float]]]
    ) -> FilledText:
        written = [[self._make_word(token) for token in tokens] for tokens, _ in best]
        likeliest = [some[0] for some in written]
        masks = []
        for place, ((_, chances), some) in enumerate(zip(best, written, strict=True)):
            others = [[*likeliest[:place], word, *likeliest[place + 1 :]] for word in some]
            masks.append(
                tuple(
                    MaskPrediction(
                        word=word.text.strip() or word.text, probability=chance, text=masked_text.fill_masks(all_words)
                    )
                    for word, chance, all_words in zip(some, chances, others, strict=True)
                )
            )
        return FilledText(source=text, text=masked_text.fill_masks(likeliest), masks=tuple(masks))

    def _make_word(self, token: int) -> SurfaceWord:
        of = self._vocabulary
        piece = of.to_pieces([token])[0]
        if isinstance(of, SentencePieceVocabulary):
            text = of.decode([token])
            text = piece if "\ufffd" in text else " " + text if piece.startswith(SPACE) else text
            return SurfaceWord(text, self.mask_tokens.has_space_prefixes)
        return SurfaceWord(piece.removeprefix("##"), piece.startswith("##"))

    def _notify_once(self, text: str) -> None:
        if self.notify is not None and text not in self.notified:
            self.notified.add(text)
            self.notify(text)


# --- texts -----------------------------------------------------------------------------------------------------------


def make_filled_text(text: str, masked_text: MaskedText, answers: Sequence[SpanPrediction]) -> FilledText:
    """What a model of spans says: each guess belongs to a whole answer, of which it tells how likely it is."""
    masks = []
    for place in range(len(masked_text.mask_ids)):
        guesses: dict[str, MaskPrediction] = {}
        for answer in answers:
            word = answer.words[place].text.strip()
            told = MaskPrediction(word=word, probability=answer.probability, text=masked_text.fill_masks(answer.words))
            guesses.setdefault(word, told)
        masks.append(tuple(guesses.values()))
    return FilledText(source=text, text=masks[0][0].text, masks=tuple(masks))


def check_is_list(items: object) -> None:
    """One text is a sequence too, of its letters: nobody means those."""
    if isinstance(items, str | os.PathLike):
        raise PredictorError(
            f"a list of texts or images must be given, but it is one: {str(items)[:60]!r}; put it in [ ]"
        )


def check_text_item(item: Item, number: int) -> TextItem:
    if isinstance(item, str) or (
        isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item)
    ):
        return item
    raise PredictorError(f"item {number:,} must be a text, or a pair of texts, but is a {type(item).__name__}")


def join_segments(segments: Sequence[tuple[int, ...]]) -> TokenizedText:
    """Parts of a row end to end, each its own kind of text."""
    kinds = tuple(kind for kind, part in enumerate(segments) for _ in part)
    return TokenizedText(tuple(token for part in segments for token in part), kinds)


def batch_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of rows in batches of like length: as many as have room, filled up to the longest."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def pool_states(states: Tensor, batch: Sequence[TokenizedText], pooling: Pooling) -> list[Tensor]:
    """(B, T, E) -> a vector for each row, by its real tokens."""
    states = states.float()
    if pooling == "class":
        return list(states[:, 0].cpu())
    lengths = torch.tensor([len(row.token_ids) for row in batch], device=states.device)[:, None]
    real = torch.arange(states.shape[1], device=states.device) < lengths  # (B, T)
    return list(((states * real[..., None]).sum(1) / lengths).cpu())


def make_classification(labels: tuple[str, ...], probabilities: Sequence[float]) -> Classification:
    ranked = sorted(zip(labels, probabilities, strict=True), key=lambda one: -one[1])
    return Classification(label=ranked[0][0], probability=ranked[0][1], probabilities=dict(ranked))


def load_image(item: Item, model: VisionTransformer) -> Tensor:
    """An image as the model reads it: a path, or bytes of (C, S, S)."""
    config = model.config
    if isinstance(item, str | Path):
        return read_image(item, ImageShape.from_config(config))
    wanted = (config.channels, config.image_size, config.image_size)
    if not isinstance(item, Tensor) or item.dtype != torch.uint8 or item.shape != wanted:
        is_now = f"{item.dtype} of {tuple(item.shape)}" if isinstance(item, Tensor) else f"a {type(item).__name__}"
        raise PredictorError(f"an image must be the name of a file, or bytes of {wanted}, but is {is_now}")
    return item


def check_vocabulary(model: Model, tokenizer: Tokenizer | None, name: str) -> None:
    if isinstance(model, VisionTransformer):
        return
    if tokenizer is None:
        raise PredictorError(
            f"{name}: must have a tokenizer to read texts with, but has none; load both from one folder"
        )
    if tokenizer.source.size > model.config.vocab:
        raise PredictorError(
            f"{name}: its tokenizer must have at most {model.config.vocab} pieces, as the model, but has "
            f"{tokenizer.source.size}; load both from the same folder"
        )
