"""What a model that has learned to fill spans (T5, `--task spans`) writes behind each sentinel: read from what it has
written, and searched for. How texts with sentinels are read is `marks`'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attent.decode.marks import Word
from attent.decode.options import Job, Search
from attent.decode.translator import Translator
from attent.models import Seq2Seq
from attent.text.sample import SPACE
from attent.text.vocabulary import Vocabulary

BEAMS = 4  # at least


@dataclass(frozen=True)
class Spans:
    """One answer of the model: what belongs behind each mark, and how likely all of it together is."""

    words: tuple[Word, ...]
    probability: float


def search_spans(
    translator: Translator, rows: Sequence[Sequence[int]], marks: Sequence[Sequence[int]], top: int
) -> list[list[Spans]]:
    """The `top` best answers to each row, which has these marks in it."""
    search = Search(beam_size=max(BEAMS, top), n_best=top)
    assert isinstance(translator.model, Seq2Seq)
    most = translator.model.decoder.positions.max_length
    limits = [search.limit(len(row) - 1) for row in rows]
    jobs = [
        Job(source=list(row), limit=limit if most is None else min(limit, most))
        for row, limit in zip(rows, limits, strict=True)
    ]
    found = dict(translator.torch_engine().search(jobs, search))
    vocabulary = translator.tokenizer.target
    return [
        [Spans(words_behind(vocabulary, one.ids, marks[number]), math.exp(one.log_prob)) for one in found[number]]
        for number in range(len(jobs))
    ]


def words_behind(vocabulary: Vocabulary, ids: Sequence[int], marks: Sequence[int]) -> tuple[Word, ...]:
    spans = dict(spans_of(vocabulary, ids))
    return tuple(word_of(vocabulary, spans.get(mark, [])) for mark in marks)


def spans_of(vocabulary: Vocabulary, ids: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Each sentinel of what was written, with what stands behind it."""
    found: list[tuple[int, list[int]]] = []
    for token in ids:
        if token in vocabulary.sentinels:
            found.append((token, []))
        elif found:
            found[-1][1].append(token)
    return found


def word_of(vocabulary: Vocabulary, ids: Sequence[int]) -> Word:
    text = vocabulary.decode(ids).strip()
    begins = bool(ids) and vocabulary.pieces(ids[:1])[0].startswith(SPACE)
    return Word(f" {text}" if begins else text, True)


def told(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """What was written, as a person reads it: `<extra_id_0> cat <extra_id_1> on the`."""
    parts = [
        (vocabulary.pieces([mark])[0], vocabulary.decode(rest).strip()) for mark, rest in spans_of(vocabulary, ids)
    ]
    return " ".join(part for both in parts for part in both if part) or vocabulary.decode(ids)
