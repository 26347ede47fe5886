"""Inspect causal language models (next tokens, a greedy continuation) and text encoders (masked tokens, labels)."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from attent.decoding.generation.generator import decode_continuation
from attent.decoding.generation.loop import generate_greedy
from attent.decoding.loading import check_tokenizer_size
from attent.decoding.options import StopCheck
from attent.decoding.predictor import Predictor
from attent.inspection.attention_trace import TraceSide, build_display_tokens
from attent.inspection.inspectors import base
from attent.models import CausalLM, TextEncoder
from attent.nn.devices import get_device
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import Vocabulary, replace_surrogates

CONTINUATION_TOKENS = 16  # length of the greedy continuation


class CausalLMInspector(base.Inspector[CausalLM]):
    model_kind = "a language model"

    def __init__(self, model: CausalLM, vocabulary: Vocabulary, *, name: str = "") -> None:
        check_tokenizer_size(vocabulary.size, model.config.vocab)
        super().__init__(model, name=name)
        self.vocabulary = vocabulary

    def _run(self, request: base.InspectionRequest, should_stop: StopCheck | None) -> base.RecordedPass:
        text = validate_text(request.text)
        ids = [*self.vocabulary.prefix_ids, *self.vocabulary.encode([text])[0]]
        base.check_length(self.model.decoder, len(ids), "the text", request.max_tokens)
        sides = {"text": TraceSide(label="text", text=text, tokens=build_display_tokens(self.vocabulary, ids))}
        with self.record_layers(sides, request, should_stop) as layers:
            logits = self.model(torch.tensor([ids], device=get_device(self.model)))[0]
        continuation = self._continue_greedily(ids, should_stop)
        steps = base.describe_predictions(self.vocabulary, [*ids[1:], None], compute_log_probs(logits, self.vocabulary))
        sections = build_sections("next", range(1, len(steps) + 1), steps, "continuation", continuation)
        return base.RecordedPass(title=text.strip(), sides=sides, layers=layers, sections=sections)

    def _continue_greedily(self, token_ids: Sequence[int], should_stop: StopCheck | None) -> str:
        max_length = self.model.decoder.positions.max_length
        limit = CONTINUATION_TOKENS if max_length is None else min(CONTINUATION_TOKENS, max_length - len(token_ids))
        if limit < 1:
            return ""
        end_ids = sorted({self.vocabulary.end, *self.model.config.end_ids})
        unused_ids = range(self.vocabulary.size, self.model.config.vocab)
        continuation = generate_greedy(self.model, token_ids, limit, end_ids, unused_ids, should_stop).token_ids
        return decode_continuation(self.vocabulary, token_ids, continuation)


class EncoderInspector(base.Inspector[TextEncoder]):
    model_kind = "a text encoder"
    supported_options = frozenset({"text_pair"})

    def __init__(self, model: TextEncoder, tokenizer: Tokenizer, *, name: str = "") -> None:
        super().__init__(model, name=name)
        self.predictor, self.vocabulary = Predictor(model, tokenizer, name=name or "the model"), tokenizer.source
        mask = self.vocabulary.mask
        self.mask_piece = None if mask is None else self.vocabulary.to_pieces([mask])[0]
        self.can_fill_masks = model.masked_lm is not None and mask is not None

    def get_model_info(self) -> dict[str, Any]:
        return super().get_model_info() | ({"mask_token": self.mask_piece} if self.can_fill_masks else {})

    def _run(self, request: base.InspectionRequest, should_stop: StopCheck | None) -> base.RecordedPass:
        texts = [validate_text(text).strip() for text in (request.text, request.text_pair) if text is not None]
        ids, segment_ids = self._encode_texts(texts)
        base.check_length(self.model.encoder, len(ids), "the text", request.max_tokens)
        tokens = build_display_tokens(self.vocabulary, ids)
        sides = {"text": TraceSide(label="text", text=" ".join(texts), tokens=tokens)}
        with self.record_layers(sides, request, should_stop) as layers:
            device = get_device(self.model)
            segments = torch.tensor([segment_ids], device=device) if self.model.config.segments > 1 else None
            states = self.model(torch.tensor([ids], device=device), segments=segments)
        sections = self._predict(texts, ids, states)
        return base.RecordedPass(title=" ".join(texts), sides=sides, layers=layers, sections=sections)

    def _encode_texts(self, texts: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the token ids of all texts, and the segment of each token."""
        vocabulary = self.vocabulary
        rows = [self.predictor.mask_tokens.encode(self.predictor.parse_masks(text)) for text in texts]
        ids, segments = list(vocabulary.prefix_ids), [0] * len(vocabulary.prefix_ids)
        for segment, row in enumerate(rows):
            ids += [*row, *vocabulary.suffix_ids]
            segments += [segment] * (len(row) + len(vocabulary.suffix_ids))
        return ids, segments

    def _predict(self, texts: Sequence[str], ids: list[int], states: Tensor) -> dict[str, Any]:
        masks = [i for i, token in enumerate(ids) if token == self.vocabulary.mask]
        if masks and self.model.masked_lm is None:
            raise AttentError(f"the model has no masked-language-model head; replace {self.mask_piece} by a word")
        sections = self._fill_masks(texts, ids, masks, self.model.masked_logits(states[0, masks])) if masks else {}
        if self.model.config.labels:
            sections["labels"] = base.describe_labels(self.model.config.labels, self.model.classify(states)[0])
            sections.setdefault("output", {"label": "label", "text": sections["labels"]["best"][0]["label"]})
        return sections

    def _fill_masks(self, texts: Sequence[str], ids: list[int], masks: list[int], logits: Tensor) -> dict[str, Any]:
        suppressed = torch.tensor(self.predictor.suppressed_tokens)
        log_probs = compute_log_probs(logits, self.vocabulary).index_fill(-1, suppressed, -math.inf)
        steps = base.describe_predictions(self.vocabulary, [None] * len(masks), log_probs)
        best = dict(zip(masks, (step["options"][0]["token"] for step in steps), strict=True))
        filled = [best.get(i, token) for i, token in enumerate(ids)]
        text = self.predictor.fill(texts)[0].text if len(texts) == 1 else self.vocabulary.decode(filled)
        return build_sections("masked", masks, steps, "filled in", text)


def build_sections(
    kind: str, positions: Iterable[int], steps: Sequence[dict[str, Any]], label: str, text: str
) -> dict[str, Any]:
    entries = [{"position": position} | step for position, step in zip(positions, steps, strict=True)]
    return {
        "predictions": {"kind": kind, "side": "text", "positions": entries},
        "output": {"label": label, "text": text},
    }


def validate_text(text: str) -> str:
    text = replace_surrogates(text)
    if not text.strip():
        raise AttentError("the sentence must not be empty")
    return text


def compute_log_probs(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Log-probabilities of the vocabulary's pieces; imported models may have more rows."""
    logits = logits.float()
    logits[..., vocabulary.size :] = -math.inf
    return logits.log_softmax(-1).cpu()
