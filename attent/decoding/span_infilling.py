"""Span infilling with T5-like models (`--task spans`): the words that a model generates for each sentinel token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attent.decoding.mask_tokens import MaskedText, SurfaceWord
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.decoding.translator import Translator
from attent.models import Seq2Seq
from attent.text.subword_sampling import SPACE
from attent.text.vocabulary import Vocabulary

MIN_BEAM_SIZE = 4


@dataclass(frozen=True)
class SpanPrediction:
    """The words for all sentinels of a text, with their joint probability."""

    words: tuple[SurfaceWord, ...]
    probability: float


def search_spans(
    translator: Translator, rows: Sequence[Sequence[int]], masked_texts: Sequence[MaskedText], top: int
) -> list[list[SpanPrediction]]:
    """Return the `top` best predictions for each row, the token ids of a masked text."""
    assert isinstance(translator.model, Seq2Seq)
    options = SearchOptions(beam_size=max(MIN_BEAM_SIZE, top), n_best=top)
    max_positions = translator.model.decoder.positions.max_length or math.inf
    limits = [int(min(options.compute_max_length(len(row) - 1), max_positions)) for row in rows]
    requests = [SearchRequest(source_ids=list(row), max_length=n) for row, n in zip(rows, limits, strict=True)]
    hypotheses = dict(translator.build_torch_engine().search(requests, options))
    vocabulary = translator.tokenizer.target
    return [
        [build_prediction(vocabulary, hypothesis, masked_text.mask_ids) for hypothesis in hypotheses[i]]
        for i, masked_text in enumerate(masked_texts)
    ]


def build_prediction(vocabulary: Vocabulary, hypothesis: Hypothesis, sentinels: Sequence[int]) -> SpanPrediction:
    spans = dict(split_by_sentinel(vocabulary, hypothesis.token_ids))
    words = tuple(decode_word(vocabulary, spans.get(sentinel, [])) for sentinel in sentinels)
    return SpanPrediction(words, math.exp(hypothesis.log_prob))


def split_by_sentinel(vocabulary: Vocabulary, token_ids: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return each sentinel of an output with the tokens after it."""
    spans: list[tuple[int, list[int]]] = []
    for token in token_ids:
        if token in vocabulary.sentinels:
            spans.append((token, []))
        elif spans:
            spans[-1][1].append(token)
    return spans


def decode_word(vocabulary: Vocabulary, token_ids: Sequence[int]) -> SurfaceWord:
    text = vocabulary.decode(token_ids).strip()
    has_space = bool(token_ids) and vocabulary.to_pieces(token_ids[:1])[0].startswith(SPACE)
    return SurfaceWord(f" {text}" if has_space else text, True)


def format_spans(vocabulary: Vocabulary, token_ids: Sequence[int]) -> str:
    """Return an output as readable text: `<extra_id_0> cat <extra_id_1> on the`."""
    parts = [
        (vocabulary.to_pieces([sentinel])[0], vocabulary.decode(span).strip())
        for sentinel, span in split_by_sentinel(vocabulary, token_ids)
    ]
    return " ".join(part for pair in parts for part in pair if part) or vocabulary.decode(token_ids)
