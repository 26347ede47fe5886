"""Predictions of models that read: words for masks, labels of texts and images, and embeddings."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, Self, TypeVar

import torch
from torch import Tensor

from attent.data.images import ImageShape, read_image
from attent.decoding import loading
from attent.decoding.mask_tokens import MASK_SPELLINGS, MaskedText, MaskTokens, SurfaceWord
from attent.interop import MODEL_DESCRIPTIONS, get_model_kind
from attent.interop import load as load_model
from attent.models import TextEncoder, VisionTransformer
from attent.nn.devices import get_device
from attent.nn.eval_mode import eval_mode
from attent.storage.errors import AttentError
from attent.storage.hub import locate_model
from attent.text.tokenizer import Tokenizer, Vocabulary
from attent.text.vocabulary import SPACE, SentencePieceVocabulary

Pooling = Literal["mean", "class"]
Item = str | Path | Tensor
Row = Sequence[int]  # the token ids of a text, with its special tokens
T = TypeVar("T")

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 4_096, 65_536  # with padding
IMAGE_BATCH_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class MaskPrediction:
    word: str
    probability: float
    text: str  # the whole text with it, and the best words for the other masks


@dataclass(frozen=True, kw_only=True)
class FilledText:
    source: str
    text: str
    masks: tuple[tuple[MaskPrediction, ...], ...]  # of each mask, best first


@dataclass(frozen=True, kw_only=True)
class Classification:
    label: str
    probability: float
    probabilities: dict[str, float]


class Predictor:
    """An encoder of texts or images that fills masks, classifies and embeds.

    >>> predictor = attent.Predictor.load("runs/bert")
    >>> predictor.fill(["A <mask> sings."], top_k=3)[0].text
    'A ... sings.'
    >>> predictor.classify(["A man sings."])[0].label
    'music'
    >>> predictor.embed(["A man sings.", "A dog sleeps."]).shape
    torch.Size([2, 24])
    """

    def __init__(
        self,
        model: TextEncoder | VisionTransformer,
        tokenizer: Tokenizer | None,
        *,
        name: str = "the model",
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """
        name    name of the model in error messages
        notify  receives messages for the user, such as that texts were truncated
        """
        if not isinstance(model, VisionTransformer):
            if tokenizer is None:
                raise AttentError(
                    f"{name}: must have a tokenizer to read texts, but has none; load both from one folder"
                )
            loading.check_tokenizer_size(tokenizer.source.size, model.config.vocab, f"{name}: its tokenizer")
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._notify_once: Callable[[str], None] = cache(notify or (lambda message: None))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> Self:
        """Load a folder of attent or Hugging Face; `dtype` None: float32."""
        path = locate_model(folder)
        placed, precision = loading.resolve_device_and_dtype(device, dtype or "float32")
        model = load_model(path, dtype=precision, device=placed)
        if not isinstance(model, TextEncoder | VisionTransformer):
            kind, command = MODEL_DESCRIPTIONS[get_model_kind(model)]
            raise AttentError(f"{folder}: must be an encoder of texts or images, but is {kind}; use `{command}`")
        tokenizer = None if isinstance(model, VisionTransformer) else loading.load_tokenizer(path)
        return cls(model, tokenizer, name=str(folder), notify=notify)

    # --- predictions -------------------------------------------------------------------------------------------------

    def fill(self, texts: Sequence[str], top_k: int = 5, line_numbers: Sequence[int] | None = None) -> list[FilledText]:
        """Predict the `top_k` best words for each mask, written [MASK] or <mask>.

        line_numbers  numbers of the texts in error messages; None: from 1
        """
        if top_k < 1:
            raise AttentError(f"`top_k` must be 1 or more, but is {top_k}")
        model = self.model
        if not isinstance(model, TextEncoder) or model.masked_lm is None or self._vocabulary.mask is None:
            raise AttentError(
                f"{self.name}: must be a masked language model, but is not; use a model of `attent train --task mlm`, "
                "or a BERT with its masked-word head"
            )
        check_is_list(texts)
        masked_texts = [self.parse_masks(text) for text in texts]
        numbered = zip(masked_texts, line_numbers or range(1, len(texts) + 1), strict=True)
        rows = [self._encode_masked_text(masked_text, number) for masked_text, number in numbered]
        candidates = self._predict_masks(rows, top_k)
        return [self._fill_with_words(*each) for each in zip(texts, masked_texts, candidates, strict=True)]

    def _predict_masks(self, rows: Sequence[Row], top_k: int) -> list[list[tuple[list[int], list[float]]]]:
        model = self.model
        assert isinstance(model, TextEncoder)

        def predict(batch: list[Row], states: Tensor) -> list[list[tuple[list[int], list[float]]]]:
            positions = [self._find_masks(row) for row in batch]
            counts = [len(each) for each in positions]
            row_index = torch.arange(len(batch)).repeat_interleave(torch.tensor(counts)).to(states.device)
            columns = torch.tensor([i for each in positions for i in each], device=states.device)
            probabilities = model.masked_logits(states[row_index, columns]).float().softmax(-1)  # (masks, V)
            probabilities[:, self.suppressed_tokens] = 0.0
            best = probabilities.topk(min(top_k, probabilities.shape[1] - len(self.suppressed_tokens)), -1)
            candidates = iter(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            return [[next(candidates) for _ in range(count)] for count in counts]

        return self._run_batches(rows, predict)

    def classify(self, items: Sequence[Item]) -> list[Classification]:
        """Classify texts, or images: paths, or uint8 tensors (C, S, S)."""
        labels, model = self.require_labels(), self.model
        check_is_list(items)
        if isinstance(model, VisionTransformer):
            logits = self._run_images(items, model)
        else:
            assert isinstance(model, TextEncoder)
            rows = self._encode_texts(items)
            logits = self._run_batches(rows, lambda _, states: list(model.classify(states).float().cpu()))
        classifications = []
        for row in logits:
            ranked = sorted(zip(labels, row.softmax(-1).tolist(), strict=True), key=lambda pair: -pair[1])
            label, probability = ranked[0]
            classifications.append(Classification(label=label, probability=probability, probabilities=dict(ranked)))
        return classifications

    def embed(self, items: Sequence[Item], pooling: Pooling = "mean", normalize: bool = False) -> Tensor:
        """Embed each item, (N, E) in float32: the mean of its states or the first; `normalize`: of length 1."""
        model = self.model
        if pooling not in ("mean", "class"):
            raise AttentError(f"`pooling` must be mean or class, but is {pooling!r}")
        if pooling == "class" and isinstance(model, VisionTransformer) and not model.config.class_token:
            raise AttentError(f"{self.name}: has no class token; use the pooling `mean`")
        check_is_list(items)
        if isinstance(model, VisionTransformer):
            vectors = self._run_images(items, model, pooling)
        else:
            rows = self._encode_texts(items)
            vectors = self._run_batches(rows, lambda batch, states: pool_states(states, batch, pooling))
        embeddings = torch.stack(vectors) if vectors else torch.empty(0, self.width)
        return torch.nn.functional.normalize(embeddings, dim=-1) if normalize else embeddings

    def require_labels(self) -> tuple[str, ...]:
        """Return the labels of a classifier; raise an error for other models."""
        model = self.model
        if model.config.labels:
            return model.config.labels
        task = "images" if isinstance(model, VisionTransformer) else "classify"
        raise AttentError(f"{self.name}: must be a classifier, but has no labels; train one by --task {task}")

    @property
    def width(self) -> int:
        return self.model.config.stack.width

    @property
    def device(self) -> torch.device:
        return get_device(self.model)

    # --- checks ------------------------------------------------------------------------------------------------------

    @property
    def _vocabulary(self) -> Vocabulary:
        assert self.tokenizer is not None
        return self.tokenizer.source

    @cached_property
    def mask_tokens(self) -> MaskTokens:
        return MaskTokens(self._vocabulary)

    @cached_property
    def suppressed_tokens(self) -> list[int]:
        """Tokens that are never predicted: special tokens, padding, the mask itself."""
        vocabulary = self._vocabulary
        mask = () if vocabulary.mask is None else (vocabulary.mask,)
        special = vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unknown
        assert isinstance(self.model, TextEncoder)
        unnamed = range(vocabulary.size, self.model.config.vocab)  # rows that pad the embedding matrix
        around = *vocabulary.prefix_ids, *vocabulary.suffix_ids
        return sorted({*around, *mask, *vocabulary.sentinels, *special, *unnamed})

    # --- tokenization ------------------------------------------------------------------------------------------------

    @cached_property
    def _max_length(self) -> int | None:
        return self.model.encoder.positions.max_length

    def parse_masks(self, text: str) -> MaskedText:
        if not isinstance(text, str):
            raise AttentError(f"a text to fill must be a string, but is of type {type(text).__name__}")
        return self.mask_tokens.parse(text.strip())

    def _encode_texts(self, items: Sequence[Item]) -> list[Row]:
        for number, item in enumerate(items, 1):
            if not isinstance(item, str):
                raise AttentError(f"item {number:,} must be a text, but is of type {type(item).__name__}")
        texts = [str(item).strip() for item in items]
        rows = [self._encode_and_truncate(ids) for ids in self._vocabulary.encode(texts)]
        num_truncated = sum(row is not truncated for row, truncated in rows)
        if num_truncated:
            self._notify_once(
                f"truncated {num_truncated:,} of {len(rows):,} texts to the model's {self._max_length} positions"
            )
        return [truncated for _, truncated in rows]

    def _encode_and_truncate(self, token_ids: Sequence[int]) -> tuple[Row, Row]:
        """Return a text with its special tokens, and the same truncated to the model's positions."""
        prefix, suffix = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
        row = (*prefix, *token_ids, *suffix) or (self._vocabulary.start,)
        if self._max_length is None or len(row) <= self._max_length:
            return row, row
        return row, (*prefix, *token_ids[: self._max_length - len(prefix) - len(suffix)], *suffix)

    def _find_masks(self, row: Row) -> list[int]:
        return [i for i, token in enumerate(row) if token in self.mask_tokens.token_ids]

    def _encode_masked_text(self, masked_text: MaskedText, line_number: int) -> Row:
        if not masked_text.mask_ids:
            raise AttentError(
                f"text {line_number:,} must have a mask, such as `The {MASK_SPELLINGS[0]} sat`, but has none"
            )
        row, truncated = self._encode_and_truncate(self.mask_tokens.encode(masked_text))
        last = self._find_masks(row)[-1]
        if last >= len(truncated) - len(self._vocabulary.suffix_ids):
            raise AttentError(
                f"text {line_number:,} must have its masks among the first {self._max_length} tokens, but one is at "
                f"{last + 1:,}; shorten the text before it"
            )
        if truncated is not row:
            self._notify_once(f"truncated texts of more than {self._max_length} tokens after their masks")
        return truncated

    # --- batches -----------------------------------------------------------------------------------------------------

    def _run_batches(self, rows: Sequence[Row], process: Callable[[list[Row], Tensor], list[T]]) -> list[T]:
        """Return what `process` makes of the states of each batch, in the order of the rows."""
        assert isinstance(self.model, TextEncoder)
        batch_tokens = CPU_BATCH_TOKENS if self.device.type == "cpu" else GPU_BATCH_TOKENS
        results: dict[int, T] = {}
        with eval_mode(self.model), torch.inference_mode():
            for indices in loading.batch_by_length([len(row) for row in rows], batch_tokens):
                batch = [rows[index] for index in indices]
                states = self.model(*loading.pad_token_ids(batch, self.device, self._vocabulary.pad))
                results |= dict(zip(indices, process(batch, states), strict=True))
        return [results[index] for index in range(len(rows))]

    def _run_images(
        self, items: Sequence[Item], model: VisionTransformer, pooling: Pooling | None = None
    ) -> list[Tensor]:
        results: list[Tensor] = []
        with eval_mode(model), torch.inference_mode():
            for start in range(0, len(items), IMAGE_BATCH_SIZE):
                images = [load_image(item, model) for item in items[start : start + IMAGE_BATCH_SIZE]]
                pixels = model.normalize(torch.stack(images).to(self.device))
                if pooling is None:
                    results += model(pixels).float().cpu()
                else:
                    states = model.compute_states(pixels).float().cpu()
                    first_patch = int(model.config.class_token)
                    results += states[:, 0] if pooling == "class" else states[:, first_patch:].mean(1)
        return results

    def _fill_with_words(
        self, text: str, masked_text: MaskedText, candidates: list[tuple[list[int], list[float]]]
    ) -> FilledText:
        words = [[self._make_word(token) for token in tokens] for tokens, _ in candidates]
        best = [mask_words[0] for mask_words in words]
        masks = tuple(
            tuple(
                MaskPrediction(
                    word=word.text.strip() or word.text,
                    probability=probability,
                    text=masked_text.fill_masks([*best[:i], word, *best[i + 1 :]]),
                )
                for word, probability in zip(words[i], probabilities, strict=True)
            )
            for i, (_, probabilities) in enumerate(candidates)
        )
        return FilledText(source=text, text=masked_text.fill_masks(best), masks=masks)

    def _make_word(self, token: int) -> SurfaceWord:
        vocabulary = self._vocabulary
        piece = vocabulary.to_pieces([token])[0]
        if isinstance(vocabulary, SentencePieceVocabulary):
            text = vocabulary.decode([token])
            text = piece if "\ufffd" in text else " " + text if piece.startswith(SPACE) else text
            return SurfaceWord(text, self.mask_tokens.has_space_prefixes)
        return SurfaceWord(piece.removeprefix("##"), piece.startswith("##"))


# --- inputs and results ----------------------------------------------------------------------------------------------


def check_is_list(items: object) -> None:
    if isinstance(items, str | os.PathLike):
        raise AttentError(
            f"the input must be a list of texts or images, but is one: {str(items)[:60]!r}; put it in [ ]"
        )


def pool_states(states: Tensor, batch: Sequence[Row], pooling: Pooling) -> list[Tensor]:
    """(B, T, E) -> B vectors; the mean leaves padding out."""
    states = states.float()
    if pooling == "class":
        return list(states[:, 0].cpu())
    lengths = torch.tensor([len(row) for row in batch], device=states.device)[:, None]
    real = torch.arange(states.shape[1], device=states.device) < lengths  # (B, T)
    return list(((states * real[..., None]).sum(1) / lengths).cpu())


def load_image(item: Item, model: VisionTransformer) -> Tensor:
    config = model.config
    if isinstance(item, str | Path):
        return read_image(item, ImageShape.from_config(config))
    shape = (config.channels, config.image_size, config.image_size)
    if not isinstance(item, Tensor) or item.dtype != torch.uint8 or item.shape != shape:
        kind = f"{item.dtype} of {tuple(item.shape)}" if isinstance(item, Tensor) else f"a {type(item).__name__}"
        raise AttentError(f"an image must be a path, or a uint8 tensor of {shape}, but is {kind}")
    return item
