"""Forced decoding gives the probabilities of a search, in any batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attent.decoding import forced_decoding, translator
from attent.decoding.forced_decoding import (
    TargetScores,
    compute_perplexity,
    encode_pairs,
    score_targets,
    score_token_ids,
)
from attent.decoding.options import DeviceOptions
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import LearnedConfig, StackConfig
from attent.scoring.pipeline import ScoreOptions, score
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.loop import write_model
from tests.text.corpus import lines, tokenizer

STACK = StackConfig(layers=2, width=16, heads=2, ffn_width=24, dropout=0.5)
SOURCES, TARGETS = (list(side[:12]) for side in lines())


def make_model(stack: StackConfig = STACK) -> Seq2Seq:
    """Random weights in float64, so that rounding hides nothing."""
    config = fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack)), tokenizer())
    return Seq2Seq(config).double()


def score_step_by_step(model: Seq2Seq, source: list[int], target: list[int]) -> list[float]:
    """Log-probabilities as a search computes them: one token at a time, with a cache."""
    model.eval()
    cache = model.init_decoder_state(torch.tensor([source]), capacity=len(target))
    token, log_probs = model.config.start_id, []
    for label in target:
        logits = model.step(torch.tensor([[token]]), cache)
        allowed = logits[0, -1].index_fill(
            0, torch.tensor(find_suppressed_tokens(model.config, tokenizer())), float("-inf")
        )
        log_probs.append(float(torch.log_softmax(allowed, -1)[label]))
        token = label
    return log_probs


def test_each_token_has_the_probability_of_a_search() -> None:
    model, toy_tokenizer = make_model(), tokenizer()
    sources, targets = toy_tokenizer.encode_source(SOURCES, "de"), toy_tokenizer.encode_target(TARGETS)
    got = score_targets(model, toy_tokenizer, SOURCES, TARGETS, to="de")
    for scores, source, target in zip(got, sources, targets, strict=True):
        assert scores.log_probs == pytest.approx(score_step_by_step(model, source, target), abs=1e-9)
        assert list(scores.tokens) == toy_tokenizer.target.to_pieces(target)
        assert scores.log_prob == pytest.approx(sum(scores.log_probs))
        assert scores.length == len(target)


def test_probabilities_of_all_continuations_sum_to_one() -> None:
    model, toy_tokenizer = make_model(), tokenizer()
    source = toy_tokenizer.encode_source(SOURCES[:1])[0]
    beginning = toy_tokenizer.encode_target(TARGETS[:1])[0][:3]
    continuations = [[*beginning, token] for token in range(toy_tokenizer.target.size)]
    last = [row[-1] for row in score_token_ids(model, [source] * len(continuations), continuations)]
    assert math.fsum(map(math.exp, last)) == pytest.approx(1)


@pytest.mark.parametrize("batch_tokens", [45, 70, 10_000])
def test_batch_and_order_change_nothing(batch_tokens: int) -> None:
    model, toy_tokenizer = make_model(), tokenizer()
    alone = [score_targets(model, toy_tokenizer, [s], [t])[0] for s, t in zip(SOURCES, TARGETS, strict=True)]
    together = score_targets(model, toy_tokenizer, SOURCES, TARGETS, batch_tokens=batch_tokens)
    backwards = score_targets(model, toy_tokenizer, SOURCES[::-1], TARGETS[::-1], batch_tokens=batch_tokens)[::-1]
    assert len({round(scores.log_prob, 6) for scores in alone}) > 8  # else a mix-up would not show
    for single, batched, reversed_batch in zip(alone, together, backwards, strict=True):
        assert batched.log_probs == pytest.approx(single.log_probs, abs=1e-9)
        assert reversed_batch.log_probs == pytest.approx(single.log_probs, abs=1e-9)


def test_chunked_logits_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, toy_tokenizer = make_model(), tokenizer()
    expected = score_targets(model, toy_tokenizer, SOURCES, TARGETS)
    monkeypatch.setattr(forced_decoding, "MAX_LOGITS", 3 * toy_tokenizer.target.size)
    got = score_targets(model, toy_tokenizer, SOURCES, TARGETS)
    for chunked, whole in zip(got, expected, strict=True):
        assert chunked.log_probs == pytest.approx(whole.log_probs, abs=1e-12)


def test_an_empty_target_is_scored_by_its_end() -> None:
    model, toy_tokenizer = make_model(), tokenizer()
    (empty, blank), (other,) = (
        score_targets(model, toy_tokenizer, ["a dog", "a dog"], ["", " \t"]),
        score_targets(model, toy_tokenizer, [""], ["ein Hund"]),
    )
    assert empty.tokens == tuple(toy_tokenizer.target.to_pieces([toy_tokenizer.target.end]))
    assert empty == blank
    assert empty.log_prob < 0
    assert other.length > 1
    assert score_targets(model, toy_tokenizer, [], []) == []


def test_long_texts_are_truncated_before_the_end() -> None:
    toy_tokenizer = tokenizer()
    model = make_model(replace(STACK, positions=LearnedConfig(max_length=8)))
    long, short = score_targets(model, toy_tokenizer, ["a dog", "a"], ["ein Hund " * 10, "e"])
    assert (long.length, long.truncated, long.tokens[-1]) == (
        8,
        True,
        toy_tokenizer.target.to_pieces([toy_tokenizer.target.end])[0],
    )
    assert not short.truncated
    source, target = toy_tokenizer.encode_source(["a dog"])[0], toy_tokenizer.encode_target(["ein Hund " * 10])[0]
    assert long.log_probs[:7] == pytest.approx(score_step_by_step(model, source, target[:7]), abs=1e-9)
    (row,) = encode_pairs(make_model(), toy_tokenizer, ["a dog " * 99], ["e"], batch_tokens=20)
    assert (row.truncated, len(row.source), row.source[-1]) == (True, 20, toy_tokenizer.source.end)
    assert score_targets(make_model(), toy_tokenizer, ["a dog " * 99], ["e"], batch_tokens=20)[0].truncated


def test_the_training_mode_is_restored() -> None:
    model, toy_tokenizer = make_model(), tokenizer()
    model.train()
    model.encoder.eval()
    first, second = (score_targets(model, toy_tokenizer, SOURCES, TARGETS) for _ in range(2))
    assert first == second  # no dropout
    assert (model.training, model.encoder.training, model.decoder.training) == (True, False, True)


def test_perplexity_is_that_of_the_mean_token() -> None:
    scores = TargetScores(tokens=("a", "b", "</s>"), log_probs=(math.log(0.5), math.log(0.25), math.log(0.125)))
    assert scores.perplexity == pytest.approx(4)
    assert compute_perplexity(0.0, 0) == 1
    assert compute_perplexity(-1e9, 1) == math.inf


def test_invalid_inputs_raise_an_error() -> None:
    with pytest.raises(ValueError, match="target for each source, but there are 1 sources and 2 targets"):
        score_targets(make_model(), tokenizer(), ["a"], ["a", "b"])
    with pytest.raises(ValueError, match="`batch_tokens` must be 2 or more, but is 1"):
        score_targets(make_model(), tokenizer(), ["a"], ["a"], batch_tokens=1)


def test_scoring_uses_float32_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model().float().eval()
    write_model(tmp_path / "model", model, tokenizer())
    pairs = "".join(f"{source}\t{target}\n" for source, target in zip(SOURCES, TARGETS, strict=True))
    (tmp_path / "test.tsv").write_text(pairs, encoding="utf-8")
    monkeypatch.setattr(translator, "choose_dtype", lambda device, engine: "bfloat16")
    expected = sum(scores.log_prob for scores in score_targets(model, tokenizer(), SOURCES, TARGETS, to="de"))
    for dtype, exact in ((None, True), ("bfloat16", False)):
        options = ScoreOptions(force_decode=True, device=DeviceOptions(device="cpu", dtype=dtype))
        forced = score(tmp_path / "model", str(tmp_path / "test.tsv"), src="en", tgt="de", **vars(options)).forced
        assert forced is not None
        difference = abs(sum(scores.log_prob for scores in forced) - expected)
        assert (difference < 1e-4) == exact
