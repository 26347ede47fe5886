"""A text through a model that reads one text alone, as a document: of a decoder (GPT, LLaMA) what it expected at each
place and how it would go on; of an encoder (BERT) which words it puts where some are hidden, and what it says of the
whole. Translators are `view`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attent.decoding.encoder_inference import Predictor
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.forced_decoding import eval_mode
from attent.inspection.attention_trace import TraceSide, build_document
from attent.inspection.display_tokens import build_display_tokens
from attent.inspection.head_masking import mask_parts
from attent.inspection.head_stats import measure_document_heads
from attent.inspection.inspectors.base import (
    InspectionError,
    InspectionRequest,
    Inspector,
    LayerFilter,
    check_length,
    describe_labels,
    describe_predictions,
    get_device,
    mark_masked_heads,
    reject_translation_options,
)
from attent.models import CausalLM, TextEncoder
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import Vocabulary, replace_surrogates

CONTINUATION_TOKENS = 16  # tokens by which a text is continued
MAX_MASKED_TOKENS = 128  # tokens of a text of which each is hidden in turn
MASKED_BATCH_ROWS = 16  # of these texts at once


class CausalLMInspector(Inspector[CausalLM]):
    """Answers questions about one language model."""

    def __init__(
        self, model: CausalLM, vocabulary: Vocabulary, *, name: str = "", head_stats: dict[str, Any] | None = None
    ) -> None:
        check_vocabulary(vocabulary, model.config.vocab)
        super().__init__(model, name=name, head_stats=head_stats)
        self.vocabulary = vocabulary

    def inspect(
        self,
        request: InspectionRequest,
        layer_filter: LayerFilter | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        reject_translation_options(request, "a language model")
        if request.text_pair is not None:
            raise InspectionError("a second text is for encoders, and this is a language model; leave it out")
        text = validate_text(request.text)
        ids = [*self.vocabulary.prefix_ids, *self.vocabulary.encode([text])[0]]
        check_length(self.model.decoder, len(ids), "the text")
        sides = {"text": TraceSide(label="text", text=text, tokens=build_display_tokens(self.vocabulary, ids))}
        with eval_mode(self.model), mask_parts(self.model, request.masked_parts), torch.no_grad():
            with self.record_layers(sides, layer_filter or LayerFilter()) as layers:
                logits = self.model(torch.tensor([ids], device=get_device(self.model)))[0]
            text_after = self._decode_continuation(ids, list(self._continue_greedily(ids, should_stop)))
        mark_masked_heads(layers, request.masked_parts)
        found = build_document(text.strip(), sides, layers) | {"model": self.get_model_info()}
        steps = describe_predictions(self.vocabulary, [*ids[1:], None], compute_log_probs(logits, self.vocabulary))
        places = [{"place": place} | step for place, step in enumerate(steps, 1)]
        found["guesses"] = {"kind": "next", "side": "text", "places": places}
        found["outcome"] = {"label": "would go on", "text": text_after}
        found["properties"] = self.head_stats or measure_document_heads(found)
        return found | self.get_model_sections()

    def _continue_greedily(self, token_ids: Sequence[int], should_stop: Callable[[], bool] | None) -> Iterator[int]:
        """The likeliest token, and behind it the likeliest, and so on."""
        most = self.model.decoder.positions.max_length
        room = min(CONTINUATION_TOKENS, CONTINUATION_TOKENS if most is None else most - len(token_ids))
        ends = {self.vocabulary.end, *self.model.config.end_ids}
        cache = self.model.begin(rows=1, capacity=len(token_ids) + room)
        given = list(token_ids)
        for _ in range(room):
            if should_stop is not None and should_stop():
                raise SearchCancelled("nobody waits for the answer")
            logits = self.model.step(torch.tensor([given], device=get_device(self.model)), cache)[0, -1:]
            token = int(compute_log_probs(logits, self.vocabulary).argmax())
            if token in ends:
                return
            yield token
            given = [token]

    def _decode_continuation(self, token_ids: Sequence[int], continuation: Sequence[int]) -> str:
        whole, before = (self.vocabulary.decode(row) for row in ([*token_ids, *continuation], token_ids))
        return whole[len(before) :] if whole.startswith(before) else self.vocabulary.decode(continuation)


@dataclass(frozen=True)
class EncoderInput:
    """What an encoder reads."""

    token_ids: list[int]
    segment_ids: list[int]
    word_positions: list[int]  # places of what is text, neither frame nor mask
    mask_positions: list[int]  # places of masks


class EncoderInspector(Inspector[TextEncoder]):
    """Answers questions about one encoder of text."""

    def __init__(
        self, model: TextEncoder, tokenizer: Tokenizer, *, name: str = "", head_stats: dict[str, Any] | None = None
    ) -> None:
        super().__init__(model, name=name, head_stats=head_stats)
        self.reader, self.vocabulary = Predictor(model, tokenizer, name=name or "the model"), tokenizer.source
        mask = self.vocabulary.mask
        self.mask_piece = None if mask is None else self.vocabulary.to_pieces([mask])[0]
        self.can_fill_masks = model.masked_lm is not None and mask is not None

    def get_model_info(self) -> dict[str, Any]:
        return super().get_model_info() | ({"mask": self.mask_piece} if self.can_fill_masks else {})

    def inspect(
        self,
        request: InspectionRequest,
        layer_filter: LayerFilter | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        reject_translation_options(request, "an encoder of text")
        texts = [validate_text(text).strip() for text in (request.text, request.text_pair) if text is not None]
        read = self._encode_texts(texts)
        check_length(self.model.encoder, len(read.token_ids), "the text")
        text = " ".join(texts)
        sides = {
            "text": TraceSide(label="text", text=text, tokens=build_display_tokens(self.vocabulary, read.token_ids))
        }
        with eval_mode(self.model), mask_parts(self.model, request.masked_parts), torch.no_grad():
            with self.record_layers(sides, layer_filter or LayerFilter()) as layers:
                states = self._compute_states([read.token_ids], read.segment_ids)
            said = self._predict(texts, read, states, should_stop)
        mark_masked_heads(layers, request.masked_parts)
        found = build_document(text, sides, layers) | {"model": self.get_model_info()} | said
        found["properties"] = self.head_stats or measure_document_heads(found)
        return found | self.get_model_sections()

    def _encode_texts(self, texts: Sequence[str]) -> EncoderInput:
        vocabulary = self.vocabulary
        rows = [self.reader.encode_masked(text) for text in texts]
        ids, segments, words = list(vocabulary.prefix_ids), [0] * len(vocabulary.prefix_ids), []
        for number, row in enumerate(rows):
            words += [len(ids) + i for i, token in enumerate(row) if token != vocabulary.mask]
            ids += [*row, *vocabulary.suffix_ids]
            segments += [number] * (len(row) + len(vocabulary.suffix_ids))
        masks = [i for i, token in enumerate(ids) if token == vocabulary.mask]
        if masks and self.model.masked_lm is None:
            raise InspectionError(
                f"the model has no head that guesses hidden words; write a word for {self.mask_piece}"
            )
        return EncoderInput(ids, segments, words, masks)

    def _compute_states(self, rows: Sequence[Sequence[int]], segment_ids: Sequence[int]) -> Tensor:
        told = torch.tensor([segment_ids] * len(rows), device=get_device(self.model))
        apart = told if self.model.config.segments > 1 else None
        return self.model(torch.tensor(rows, device=told.device), segments=apart)

    def _predict(
        self, texts: Sequence[str], encoded: EncoderInput, states: Tensor, should_stop: Callable[[], bool] | None
    ) -> dict[str, Any]:
        """What the model says: of hidden words, and of the whole."""
        found: dict[str, Any] = {}
        if self.can_fill_masks and encoded.mask_positions:
            found |= self._fill_masks(texts, encoded, self.model.masked_logits(states[0, encoded.mask_positions]))
        if self.model.config.labels:
            found["labels"] = describe_labels(self.model.config.labels, self.model.classify(states)[0])
            found.setdefault("outcome", {"label": "label", "text": found["labels"]["best"][0]["label"]})
        if self.can_fill_masks and not encoded.mask_positions and 0 < len(encoded.word_positions) <= MAX_MASKED_TOKENS:
            found = self._predict_each_token(encoded, should_stop) | found
        return found

    def _fill_masks(self, texts: Sequence[str], encoded: EncoderInput, logits: Tensor) -> dict[str, Any]:
        never = torch.tensor(self.reader.suppressed_tokens)
        likely = compute_log_probs(logits, self.vocabulary).index_fill(-1, never, -math.inf)
        steps = describe_predictions(self.vocabulary, [None] * len(encoded.mask_positions), likely)
        best = dict(zip(encoded.mask_positions, (step["options"][0]["token"] for step in steps), strict=True))
        filled = [best.get(i, token) for i, token in enumerate(encoded.token_ids)]
        text = self.reader.fill(texts)[0].text if len(texts) == 1 else self.vocabulary.decode(filled)
        places = [{"place": place} | step for place, step in zip(encoded.mask_positions, steps, strict=True)]
        return {
            "guesses": {"kind": "masked", "side": "text", "places": places},
            "outcome": {"label": "filled in", "text": text},
        }

    def _predict_each_token(self, encoded: EncoderInput, should_stop: Callable[[], bool] | None) -> dict[str, Any]:
        """Each word hidden in turn: what the model would put there, and how likely what stands there is."""
        found: list[Tensor] = []
        for start in range(0, len(encoded.word_positions), MASKED_BATCH_ROWS):
            if should_stop is not None and should_stop():
                raise SearchCancelled("nobody waits for the answer")
            some = encoded.word_positions[start : start + MASKED_BATCH_ROWS]
            states = self._compute_states(
                [replace_with_mask(encoded.token_ids, place, self.vocabulary) for place in some], encoded.segment_ids
            )
            found.append(self.model.masked_logits(states[range(len(some)), some]))
        words = [encoded.token_ids[i] for i in encoded.word_positions]
        never = torch.tensor(sorted(set(self.reader.suppressed_tokens) - set(words)))
        likely = compute_log_probs(torch.cat(found), self.vocabulary).index_fill(-1, never, -math.inf)
        steps = describe_predictions(self.vocabulary, words, likely)
        text = self.vocabulary.decode([step["options"][0]["token"] for step in steps])
        places = [{"place": place} | step for place, step in zip(encoded.word_positions, steps, strict=True)]
        return {
            "guesses": {"kind": "hidden", "side": "text", "places": places},
            "outcome": {"label": "each word guessed from the others", "text": text},
        }


def check_vocabulary(vocabulary: Vocabulary, max_size: int) -> None:
    if vocabulary.size > max_size:
        raise InspectionError(
            f"the tokenizer must be the model's, of {max_size} pieces at most, but has {vocabulary.size}; "
            f"load both from the same folder"
        )


def validate_text(text: str) -> str:
    text = replace_surrogates(text)
    if not text.strip():
        raise InspectionError("there must be a sentence to look at, but it is empty; type one")
    return text


def replace_with_mask(token_ids: Sequence[int], position: int, vocabulary: Vocabulary) -> list[int]:
    assert vocabulary.mask is not None
    return [*token_ids[:position], vocabulary.mask, *token_ids[position + 1 :]]


def compute_log_probs(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Log-probabilities, of pieces alone: an imported model may have rows that no piece belongs to."""
    logits = logits.float()
    logits[..., vocabulary.size :] = -math.inf
    return logits.log_softmax(-1).cpu()
