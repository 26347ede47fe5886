"""Invalid calls of models, and their error messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import attent
from attent.decoding import greedy_search
from attent.models import Seq2Seq, Seq2SeqConfig, build, shift_right
from attent.models.config import mirror_encoder
from attent.nn import Packing, StackConfig

ENCODER = StackConfig(layers=1, width=8, heads=2, ffn_width=8, dropout=0.0)
CONFIG = Seq2SeqConfig(vocab=9, encoder=ENCODER, decoder=mirror_encoder(ENCODER))


def ids(*values: int, rows: int = 2) -> torch.Tensor:
    return torch.tensor([values] * rows)


def model() -> Seq2Seq:
    return build(CONFIG).eval()


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "id beyond the vocabulary": (
        lambda: model()(ids(3, 9), ids(1)),
        (
            "token ids must be from 0 to 8, the vocabulary, but range from 3 to 9; were they made by "
            "another model's tokenizer?"
        ),
    ),
    "negative id": (lambda: model()(ids(3), ids(1, -1)), "from 0 to 8, the vocabulary, but range from -1 to 1"),
    "ids of the other vocabulary": (
        lambda: build(replace(CONFIG, target_vocab=5, share_embeddings=False))(ids(8), ids(6)),
        "token ids must be from 0 to 4",
    ),
    "ids without a batch": (
        lambda: model()(ids(1)[0], ids(1)),
        "source must be a tensor of int64 or int32 of (B, T), but is torch.int64 of",
    ),
    "ids with a point": (lambda: model()(ids(1).float(), ids(1)), "but is torch.float32 of (2, 1)"),
    "source lengths": (
        lambda: model()(ids(1, 2), ids(1), torch.tensor([3, 1])),
        "must be between 0 and 2, the length of the tensor, but ranges from 1 to 3",
    ),
    "target lengths": (
        lambda: model()(ids(1, 2), ids(1), None, torch.tensor([2, 1])),
        "must be between 0 and 1, the length of the tensor",
    ),
    "lengths and packing": (
        lambda: model()(
            ids(1),
            ids(1),
            torch.tensor([1, 1]),
            packing=(Packing.from_lengths([[1], [1]]), Packing.from_lengths([[1], [1]])),
        ),
        "give `lengths` (padded rows) or `packing` (packed rows), but not both",
    ),
    "more steps than room": (
        lambda: [step := model(), cache := step.init_decoder_state(ids(1), capacity=1), step.step(ids(1, 2), cache)],
        "the cache must have room for 2 tokens, but its capacity is 1",
    ),
    "start outside the vocabulary": (
        lambda: greedy_search(model(), ids(1), start_id=9, end_id=2, max_length=2),
        "token ids must be from 0 to 8",
    ),
    "sides of different rows": (
        lambda: model()(ids(1), ids(1, rows=1)),
        "source and target must have the same number of rows, but have 2 and 1",
    ),
    "one sentence shifted": (lambda: shift_right(ids(1)[0], 1), "target must be a tensor of int64 or int32 of (B, T)"),
    "an end that is no token": (
        lambda: greedy_search(model(), ids(1), start_id=1, end_id=-1, max_length=2),
        "`end_id` must be the id of a token, 0 or more, but is -1",
    ),
    "nothing to write": (
        lambda: greedy_search(model(), ids(1), start_id=1, end_id=2, max_length=0),
        "`max_length` must be",
    ),
    "no vocabulary": (
        lambda: Seq2SeqConfig(vocab=0),
        "`vocab` must be a number from 1 to 16,777,216, but is 0",
    ),
    "two vocabularies shared": (
        lambda: Seq2SeqConfig(vocab=9, target_vocab=7),
        (
            "`target_vocab` must be `vocab`=9 to share embeddings, but is 7; give both sides one vocabulary, or set "
            "`share_embeddings` to false"
        ),
    ),
    "two widths": (
        lambda: replace(CONFIG, decoder=replace(CONFIG.decoder, width=16)),
        "`encoder.width` must equal `decoder.width`, but they are 8 and 16",
    ),
    "an encoder that looks back only": (
        lambda: replace(CONFIG, encoder=replace(ENCODER, causal=True)),
        "`encoder.causal` and `encoder.cross_attention` must be false",
    ),
    "a decoder without a source": (
        lambda: replace(CONFIG, decoder=replace(ENCODER, causal=True)),
        "`decoder.causal` and `decoder.cross_attention` must be true",
    ),
    "start id": (lambda: replace(CONFIG, start_id=9), "`start_id` must be a token id from 0 to 8, but is 9"),
    "end id": (lambda: replace(CONFIG, end_id=-1), "`end_id` must be a token id from 0 to 8, but is -1"),
    "not a config": (
        lambda: build({"vocab": 9}),
        "`config` must be that of a model, such as a Seq2SeqConfig (see attent.presets), but is a dict",
    ),
    "preset without vocabulary": (
        lambda: attent.presets.base(vocab=0),
        "`vocab` must be a number from 1 to 16,777,216, but is 0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_calls_are_refused(mistake: str) -> None:
    call, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
