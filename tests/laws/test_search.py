"""Search on every model of the family: a beam of one is greedy, a beam's score equals its forced score, and other rows
of the batch change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attent.decoding.engines.reference import TorchEngine
from attent.decoding.options import SearchOptions, SearchRequest
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from tests.greedy import greedy_search
from tests.laws.helpers import parametrize_in_turn
from tests.laws.models import SEQ2SEQS, every_seq2seq, make_seq2seq, pairs
from tests.searching import beam_search

START, LONGEST = 1, 7
Kinds = dict[str, Any]


def kinds(model: Seq2Seq, source: torch.Tensor, lengths: torch.Tensor | None) -> Kinds:
    """With an end token that the model does generate."""
    end = int(greedy_search(model, source, lengths, start_id=START, end_id=0, max_length=3)[0, -1])
    return {"start_id": START, "end_id": end, "max_length": LONGEST}


@every_seq2seq
def test_a_beam_of_one_equals_greedy(config: Seq2SeqConfig, device: torch.device) -> None:
    model, (source, _, lengths, _) = make_seq2seq(config, device), pairs(device, config=config).batch()
    these = kinds(model, source, lengths)
    got = beam_search(model, source, lengths, **these, options=SearchOptions(beam_size=1))
    assert got.tokens[:, 0].tolist() == greedy_search(model, source, lengths, **these).tolist()


@every_seq2seq
def test_the_score_of_a_beam_equals_its_forced_score(config: Seq2SeqConfig, device: torch.device) -> None:
    model, (source, _, lengths, _) = make_seq2seq(config, device), pairs(device, config=config).batch()
    search = SearchOptions(beam_size=3, n_best=3)
    got = beam_search(model, source, lengths, **kinds(model, source, lengths), options=search)
    for i in range(3):
        target = got.tokens[:, i]
        with torch.no_grad():
            logits = model(source, shift_right(target, START), lengths)
        logits[..., START] = float("-inf")
        each = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
        real = torch.arange(LONGEST, device=device) < got.lengths[:, i, None]
        sums = (each * real).sum(1)
        torch.testing.assert_close(got.log_probs[:, i], sums.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.scores[:, i], (sums / got.lengths[:, i] ** 0.6).float(), rtol=1e-5, atol=1e-5)


@parametrize_in_turn("config, beam_size", SEQ2SEQS, {"1": 1, "4": 4})
def test_other_rows_of_the_batch_change_nothing(config: Seq2SeqConfig, beam_size: int, device: torch.device) -> None:
    """Neither the other rows of a batch, nor earlier sources of the same row (of token ids, which engines refill)."""
    model, text = make_seq2seq(config, device), pairs(device, config=config)
    source, _, lengths, _ = text.batch(extra=2)
    these, search = kinds(model, source, lengths), SearchOptions(beam_size=beam_size, n_best=beam_size)
    together = beam_search(model, source, lengths, **these, options=search)
    engine = TorchEngine[Any](
        model=model,
        start_id=START,
        end_id=these["end_id"],
        suppressed_tokens=(),
        pad=0,
        device=device,
        choose_batch_size=lambda *_: 2,
        build_constraints=lambda *_: ((), None),
    )
    is_text = config.frontend is None
    sources = text.sources if is_text else []
    jobs = [SearchRequest(source_ids=sentence.tolist(), max_length=LONGEST) for sentence in sources]
    refilled = dict(engine.search(jobs, search))
    for row, sentence in enumerate(text.sources):
        alone = beam_search(model, sentence[None], **these, options=search)
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        torch.testing.assert_close(alone.scores[0], together.scores[row], rtol=1e-5, atol=1e-5)
        if not is_text:
            continue
        tokens = zip(alone.tokens[0].tolist(), alone.lengths[0].tolist(), strict=True)
        written = [tuple(token for token in ids[:length] if token != these["end_id"]) for ids, length in tokens]
        assert [hypothesis.token_ids for hypothesis in refilled[row]] == written
        assert [hypothesis.score for hypothesis in refilled[row]] == pytest.approx(alone.scores[0].tolist(), abs=1e-5)
