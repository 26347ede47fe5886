"""Search on every model of the family: a beam of one is greedy, a beam's score is what reading its text gives."""

from __future__ import annotations

import pytest
import torch

from attent.decode import beam, greedy
from attent.models import Seq2SeqConfig, shift_right
from tests.laws.models import every_seq2seq, make_seq2seq, pairs

START, LONGEST = 1, 7


@every_seq2seq
def test_a_beam_of_one_equals_greedy(config: Seq2SeqConfig, device: torch.device) -> None:
    model, (source, _, lengths, _) = make_seq2seq(config, device), pairs(device).batch()
    end = int(greedy(model, source, lengths, start=START, end=0, max_length=3)[0, -1])  # a token that it does write
    wanted = greedy(model, source, lengths, start=START, end=end, max_length=LONGEST)
    got = beam(model, source, lengths, start=START, end=end, max_length=LONGEST, beam_size=1)
    assert got.tokens[:, 0].tolist() == wanted.tolist()


@every_seq2seq
def test_the_score_of_a_beam_equals_its_score_by_reading(config: Seq2SeqConfig, device: torch.device) -> None:
    model, (source, _, lengths, _) = make_seq2seq(config, device), pairs(device).batch()
    end = int(greedy(model, source, lengths, start=START, end=0, max_length=3)[0, -1])
    got = beam(model, source, lengths, start=START, end=end, max_length=LONGEST, beam_size=3, length_penalty=0.6)
    for i in range(3):
        target = got.tokens[:, i]
        with torch.no_grad():
            logits = model(source, shift_right(target, START), lengths)
        each = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
        read = torch.arange(LONGEST, device=device) < got.lengths[:, i, None]
        score = (each * read).sum(1) / ((5 + got.lengths[:, i]) / 6) ** 0.6
        torch.testing.assert_close(got.scores[:, i], score.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beam_size", [1, 4])
@every_seq2seq
def test_neighbours_change_nothing(config: Seq2SeqConfig, beam_size: int, device: torch.device) -> None:
    model, text = make_seq2seq(config, device), pairs(device)
    source, _, lengths, _ = text.batch(extra=2)
    kinds = {"start": START, "end": 5, "max_length": LONGEST, "beam_size": beam_size}
    together = beam(model, source, lengths, **kinds)
    for row, sentence in enumerate(text.sources):
        alone = beam(model, sentence[None], **kinds)
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        torch.testing.assert_close(alone.scores[0], together.scores[row], rtol=1e-5, atol=1e-5)
