"""Span infilling with T5-like models (`--task spans`): the words that a model generates for each sentinel token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attent.decoding.mask_tokens import SurfaceWord
from attent.decoding.options import SearchOptions, SearchRequest
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
    translator: Translator, rows: Sequence[Sequence[int]], sentinels: Sequence[Sequence[int]], top: int
) -> list[list[SpanPrediction]]:
    """Return the `top` best predictions for each row, which contains its `sentinels`."""
    assert isinstance(translator.model, Seq2Seq)
    options = SearchOptions(beam_size=max(MIN_BEAM_SIZE, top), n_best=top)
    max_positions = translator.model.decoder.positions.max_length or math.inf
    limits = [int(min(options.compute_max_length(len(row) - 1), max_positions)) for row in rows]
    requests = [SearchRequest(source_ids=list(row), max_length=n) for row, n in zip(rows, limits, strict=True)]
    hypotheses = dict(translator.build_torch_engine().search(requests, options))
    vocabulary = translator.tokenizer.target
    return [
        [
            SpanPrediction(extract_words(vocabulary, item.token_ids, marks), math.exp(item.log_prob))
            for item in hypotheses[i]
        ]
        for i, marks in enumerate(sentinels)
    ]


def extract_words(
    vocabulary: Vocabulary, token_ids: Sequence[int], sentinels: Sequence[int]
) -> tuple[SurfaceWord, ...]:
    spans = dict(split_by_sentinel(vocabulary, token_ids))
    return tuple(decode_word(vocabulary, spans.get(sentinel, [])) for sentinel in sentinels)


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
