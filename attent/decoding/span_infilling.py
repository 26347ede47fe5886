"""What a model that has learned to fill spans (T5, `--task spans`) writes behind each sentinel: read from what it has
written, and searched for. How texts with sentinels are read is `marks`'.
"""

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

MIN_BEAM_SIZE = 4  # at least


@dataclass(frozen=True)
class SpanPrediction:
    """One answer of the model: what belongs behind each mark, and how likely all of it together is."""

    words: tuple[SurfaceWord, ...]
    probability: float


def search_spans(
    translator: Translator, rows: Sequence[Sequence[int]], sentinels: Sequence[Sequence[int]], top: int
) -> list[list[SpanPrediction]]:
    """The `top` best answers to each row, which has these marks in it."""
    search = SearchOptions(beam_size=max(MIN_BEAM_SIZE, top), n_best=top)
    assert isinstance(translator.model, Seq2Seq)
    most = translator.model.decoder.positions.max_length
    limits = [search.compute_max_length(len(row) - 1) for row in rows]
    jobs = [
        SearchRequest(source_ids=list(row), max_length=limit if most is None else min(limit, most))
        for row, limit in zip(rows, limits, strict=True)
    ]
    found = dict(translator.build_torch_engine().search(jobs, search))
    vocabulary = translator.tokenizer.target
    return [
        [
            SpanPrediction(extract_words(vocabulary, one.token_ids, sentinels[number]), math.exp(one.log_prob))
            for one in found[number]
        ]
        for number in range(len(jobs))
    ]


def extract_words(
    vocabulary: Vocabulary, token_ids: Sequence[int], sentinels: Sequence[int]
) -> tuple[SurfaceWord, ...]:
    spans = dict(split_by_sentinel(vocabulary, token_ids))
    return tuple(decode_word(vocabulary, spans.get(mark, [])) for mark in sentinels)


def split_by_sentinel(vocabulary: Vocabulary, token_ids: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Each sentinel of what was written, with what stands behind it."""
    found: list[tuple[int, list[int]]] = []
    for token in token_ids:
        if token in vocabulary.sentinels:
            found.append((token, []))
        elif found:
            found[-1][1].append(token)
    return found


def decode_word(vocabulary: Vocabulary, token_ids: Sequence[int]) -> SurfaceWord:
    text = vocabulary.decode(token_ids).strip()
    begins = bool(token_ids) and vocabulary.to_pieces(token_ids[:1])[0].startswith(SPACE)
    return SurfaceWord(f" {text}" if begins else text, True)


def format_spans(vocabulary: Vocabulary, token_ids: Sequence[int]) -> str:
    """What was written, as a person reads it: `<extra_id_0> cat <extra_id_1> on the`."""
    parts = [
        (vocabulary.to_pieces([mark])[0], vocabulary.decode(rest).strip())
        for mark, rest in split_by_sentinel(vocabulary, token_ids)
    ]
    return " ".join(part for both in parts for part in both if part) or vocabulary.decode(token_ids)
