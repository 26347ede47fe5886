"""Forced decoding: what the model itself says of a target, whatever stands beside it, and however long it is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attent.decoding import forced_decoding, translator
from attent.decoding.forced_decoding import (
    ForcedDecodingError,
    TargetScores,
    compute_perplexity,
    encode_pairs,
    score_targets,
    score_token_ids,
)
from attent.decoding.options import DeviceOptions
from attent.interop.ctranslate2 import find_suppressed_tokens
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import LearnedConfig, StackConfig
from attent.scoring.pipeline import ScoreOptions, score
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.loop import write_model
from tests.text.corpus import lines, tokenizer

STACK = StackConfig(layers=2, width=16, heads=2, ffn_width=24, dropout=0.5)
SOURCES, TARGETS = (list(side[:12]) for side in lines())


def make_model(stack: StackConfig = STACK) -> Seq2Seq:
    """Random and exact, so that rounding hides nothing."""
    config = fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack)), tokenizer())
    return Seq2Seq(config).double()


def score_step_by_step(model: Seq2Seq, source: list[int], target: list[int]) -> list[float]:
    """The same, as a search meets it: one token after the other, from a cache."""
    model.eval()
    cache = model.begin(torch.tensor([source]), capacity=len(target))
    token, found = model.config.start_id, []
    for wanted in target:
        logits = model.step(torch.tensor([[token]]), cache)
        words = logits[0, -1].index_fill(
            0, torch.tensor(find_suppressed_tokens(model.config, tokenizer())), float("-inf")
        )
        found.append(float(torch.log_softmax(words, -1)[wanted]))
        token = wanted
    return found


def test_each_token_has_the_probability_that_a_search_would_see() -> None:
    model, of = make_model(), tokenizer()
    sources, targets = of.encode_source(SOURCES, "de"), of.encode_target(TARGETS)
    got = score_targets(model, of, SOURCES, TARGETS, to="de")
    for one, source, target in zip(got, sources, targets, strict=True):
        assert one.log_probs == pytest.approx(score_step_by_step(model, source, target), abs=1e-9)
        assert list(one.tokens) == of.target.to_pieces(target)
        assert one.log_prob == pytest.approx(sum(one.log_probs))
        assert one.length == len(target)


def test_what_can_follow_has_a_probability_of_one_together() -> None:
    model, of = make_model(), tokenizer()
    source = of.encode_source(SOURCES[:1])[0]
    beginning = of.encode_target(TARGETS[:1])[0][:3]
    every = [[*beginning, token] for token in range(of.target.size)]
    last = [row[-1] for row in score_token_ids(model, [source] * len(every), every)]
    assert math.fsum(map(math.exp, last)) == pytest.approx(1)


@pytest.mark.parametrize("batch_tokens", [45, 70, 10_000])
def test_neighbours_and_order_change_nothing(batch_tokens: int) -> None:
    model, of = make_model(), tokenizer()
    alone = [score_targets(model, of, [s], [t])[0] for s, t in zip(SOURCES, TARGETS, strict=True)]
    together = score_targets(model, of, SOURCES, TARGETS, batch_tokens=batch_tokens)
    backwards = score_targets(model, of, SOURCES[::-1], TARGETS[::-1], batch_tokens=batch_tokens)[::-1]
    assert len({round(one.log_prob, 6) for one in alone}) > 8  # else mixing them up would not show
    for one, two, three in zip(alone, together, backwards, strict=True):
        assert two.log_probs == pytest.approx(one.log_probs, abs=1e-9)
        assert three.log_probs == pytest.approx(one.log_probs, abs=1e-9)


def test_logits_that_are_made_piece_by_piece_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, of = make_model(), tokenizer()
    wanted = score_targets(model, of, SOURCES, TARGETS)
    monkeypatch.setattr(forced_decoding, "MAX_LOGITS", 3 * of.target.size)
    got = score_targets(model, of, SOURCES, TARGETS)
    for one, two in zip(got, wanted, strict=True):
        assert one.log_probs == pytest.approx(two.log_probs, abs=1e-12)


def test_an_empty_target_is_the_end_alone() -> None:
    model, of = make_model(), tokenizer()
    (empty, blank), (other,) = (
        score_targets(model, of, ["a dog", "a dog"], ["", " \t"]),
        score_targets(model, of, [""], ["ein Hund"]),
    )
    assert empty.tokens == tuple(of.target.to_pieces([of.target.end]))
    assert empty == blank
    assert empty.log_prob < 0
    assert other.length > 1
    assert score_targets(model, of, [], []) == []


def test_what_is_too_long_is_cut_before_its_end_and_says_so() -> None:
    of = tokenizer()
    model = make_model(replace(STACK, positions=LearnedConfig(max_length=8)))
    long, short = score_targets(model, of, ["a dog", "a"], ["ein Hund " * 10, "e"])
    assert (long.length, long.truncated, long.tokens[-1]) == (8, True, of.target.to_pieces([of.target.end])[0])
    assert not short.truncated
    source, target = of.encode_source(["a dog"])[0], of.encode_target(["ein Hund " * 10])[0]
    assert long.log_probs[:7] == pytest.approx(score_step_by_step(model, source, target[:7]), abs=1e-9)
    (row,) = encode_pairs(make_model(), of, ["a dog " * 99], ["e"], max_length=20)
    assert (row.truncated, len(row.source), row.source[-1]) == (True, 20, of.source.end)
    assert score_targets(make_model(), of, ["a dog " * 99], ["e"], batch_tokens=20)[0].truncated


def test_the_model_stays_as_it_was() -> None:
    model, of = make_model(), tokenizer()
    model.train()
    model.encoder.eval()
    first, second = (score_targets(model, of, SOURCES, TARGETS) for _ in range(2))
    assert first == second  # no dropout
    assert (model.training, model.encoder.training, model.decoder.training) == (True, False, True)


def test_perplexity_is_that_of_the_mean_token() -> None:
    one = TargetScores(tokens=("a", "b", "</s>"), log_probs=(math.log(0.5), math.log(0.25), math.log(0.125)))
    assert one.perplexity == pytest.approx(4)
    assert compute_perplexity(0.0, 0) == 1
    assert compute_perplexity(-1e9, 1) == math.inf


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ForcedDecodingError, match="target for each source, but there are 1 sources and 2 targets"):
        score_targets(make_model(), tokenizer(), ["a"], ["a", "b"])
    with pytest.raises(ForcedDecodingError, match="`batch_tokens` must be 2 or more, but is 1"):
        score_targets(make_model(), tokenizer(), ["a"], ["a"], batch_tokens=1)


def test_a_command_that_measures_has_all_digits_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model().float().eval()
    write_model(tmp_path / "model", model, tokenizer())
    pairs = "".join(f"{source}\t{target}\n" for source, target in zip(SOURCES, TARGETS, strict=True))
    (tmp_path / "test.tsv").write_text(pairs, encoding="utf-8")
    monkeypatch.setattr(translator, "choose_dtype", lambda device: "bfloat16")
    wanted = sum(one.log_prob for one in score_targets(model, tokenizer(), SOURCES, TARGETS, to="de"))
    for dtype, exact in ((None, True), ("bfloat16", False)):
        options = ScoreOptions(force_decode=True, device=DeviceOptions(device="cpu", dtype=dtype))
        found = score(tmp_path / "model", str(tmp_path / "test.tsv"), src="en", tgt="de", options=options).forced
        assert found is not None
        difference = abs(sum(one.log_prob for one in found) - wanted)
        assert (difference < 1e-4) == exact
