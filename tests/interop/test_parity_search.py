"""Beam and greedy search match `transformers`' generate and CTranslate2 on the same weights.

All expand the 2K best candidates, finish those among the first K that end, and rank by sum / length^alpha. One rule
differs: at the maximum length, `transformers` ranks truncated hypotheses among finished ones; attent ranks them last,
since a truncated sentence is not a translation.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attent.decoding.engines.reference import TorchEngine
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.interop import load
from attent.models import Seq2Seq
from attent.models.seq2seq import find_suppressed_tokens
from tests.greedy import greedy_search
from tests.interop.families import transformers
from tests.searching import beam_search

END, PAD, VOCAB, LIMIT = 0, 39, 40, 14  # as in published models, the decoder starts with padding
SENTENCES = 50  # of each of four models
RANDOM = {3: 1.0, 6: 4.5, 7: 1.0}  # seed: bias of the end token, so that about half of the targets end
NAMES = [*(f"random-{seed}" for seed in RANDOM), "trained"]
every_model = pytest.mark.parametrize("name", NAMES)


def make_marian(**changes: Any) -> Any:
    config = {
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
        **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), PAD),
        **dict.fromkeys(("bos_token_id", "forced_eos_token_id")),
        **changes,
    }
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=VOCAB, d_model=32, max_position_embeddings=64, eos_token_id=END, dropout=0.0, **config
        )
    )


def make_random_model(seed: int) -> Any:
    """Random weights, large enough that targets differ for most sources."""
    torch.manual_seed(seed)
    model = make_marian(tie_word_embeddings=False, scale_embedding=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed_positions" not in name:
                weight.copy_(1.5 * torch.randn(weight.shape) * weight.shape[1] ** -0.5)
        model.lm_head.weight *= 1.5
        model.final_logits_bias[:, END] += RANDOM[seed]
    return model


def train_copy_model() -> Any:
    """Train briefly to copy: uncertain about tokens, but targets end at the right length."""
    torch.manual_seed(2)
    model = make_marian(encoder_layers=1, scale_embedding=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(80):
        ids, lengths = pad_rows(make_sources(32, seed=step))
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        loss = model(input_ids=ids, attention_mask=real.long(), labels=ids.masked_fill(~real, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def make_sources(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[*(rng.randrange(1, PAD) for _ in range(rng.randrange(1, 10))), END] for _ in range(count)]


def pad_rows(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    widest = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD] * (widest - len(row))] for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


@cache
def make_hf_model(name: str) -> Any:
    model = train_copy_model() if name == "trained" else make_random_model(int(name.removeprefix("random-")))
    model.final_logits_bias[:, PAD] = -30.0  # CTranslate2 renormalizes without it, which would change scores
    return model.double().eval()


@pytest.fixture
def ours(name: str, tmp_path: Path) -> Seq2Seq:
    make_hf_model(name).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert isinstance(model, Seq2Seq)
    return model.double()


def run_generate(name: str, rows: list[list[int]], **changes: Any) -> Any:
    ids, lengths = pad_rows(rows)
    kinds: dict[str, Any] = {"early_stopping": "never", "length_penalty": 0.6, "num_beams": 4, **changes}
    if kinds["num_beams"] == 1:
        kinds = {"num_beams": 1}
    return make_hf_model(name).generate(
        input_ids=ids,
        attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        max_new_tokens=LIMIT,
        do_sample=False,
        bad_words_ids=[[PAD]],
        return_dict_in_generate=True,
        output_scores=True,
        **kinds,
    )


def strip_special_tokens(row: Tensor) -> list[int]:
    """Return the tokens without the start, up to and including the end."""
    tokens: list[int] = row[1:].tolist()
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens[:LIMIT]


@every_model
def test_beam_search_matches_generate(name: str, ours: Seq2Seq) -> None:
    rows = make_sources(SENTENCES, seed=1000)
    reference = run_generate(name, rows)
    ids, lengths = pad_rows(rows)
    got = beam_search(ours, ids, lengths, start_id=PAD, end_id=END, max_length=LIMIT, options=SearchOptions())
    cut, different = 0, set()
    for row in range(SENTENCES):
        expected, score = strip_special_tokens(reference.sequences[row]), float(reference.sequences_scores[row])
        tokens = got.tokens[row, 0, : got.lengths[row, 0]].tolist()
        different.add(tuple(tokens))
        cut += END not in tokens
        if tokens == expected:
            assert float(got.scores[row, 0]) == pytest.approx(score, abs=1e-5)
        else:  # truncated hypotheses rank differently
            assert END in tokens
            assert END not in expected
            assert len(expected) == LIMIT
            assert score > float(got.scores[row, 0])
    assert len(different) > 10
    assert cut == 0 if name == "trained" else cut > 10


@every_model
def test_greedy_search_matches_generate(name: str, ours: Seq2Seq) -> None:
    rows = make_sources(SENTENCES, seed=1000)
    ids, lengths = pad_rows(rows)
    reference = run_generate(name, rows, num_beams=1)
    got = greedy_search(ours, ids, lengths, start_id=PAD, end_id=END, max_length=LIMIT)
    for row in range(SENTENCES):
        expected = strip_special_tokens(reference.sequences[row])
        assert got[row].tolist() == [*expected, *[END] * (LIMIT - len(expected))]


@pytest.mark.parametrize("name", ["trained"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_n_best_matches_generate_for_any_length_penalty(name: str, ours: Seq2Seq, alpha: float) -> None:
    rows = make_sources(SENTENCES, seed=1001)
    reference = run_generate(name, rows, length_penalty=alpha, num_return_sequences=4)
    ids, lengths = pad_rows(rows)
    search = SearchOptions(length_penalty=alpha, n_best=4)
    got = beam_search(ours, ids, lengths, start_id=PAD, end_id=END, max_length=LIMIT, options=search)
    compared = 0
    for row in range(SENTENCES):
        expected = [strip_special_tokens(target) for target in reference.sequences[4 * row : 4 * row + 4]]
        if all(END in target for target in expected):
            hypotheses = zip(got.tokens[row].tolist(), got.lengths[row].tolist(), strict=True)
            assert [tokens[:length] for tokens, length in hypotheses] == expected
            scores = reference.sequences_scores[4 * row : 4 * row + 4].float()
            torch.testing.assert_close(got.scores[row], scores, rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared > 30


# --- CTranslate2 -----------------------------------------------------------------------------------------------------


def is_same(hypotheses: list[Hypothesis], expected: list[Hypothesis]) -> bool:
    return [(hypothesis.token_ids, hypothesis.is_finished) for hypothesis in hypotheses] == [
        (hypothesis.token_ids, hypothesis.is_finished) for hypothesis in expected
    ]


@pytest.mark.parametrize("beam_size", [1, 4])
@every_model
def test_ctranslate2_matches_the_torch_engine(
    name: str, beam_size: int, ours: Seq2Seq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2")
    from attent.decoding.engines.ctranslate2 import DEFAULT_PATIENCE, CTranslate2Engine

    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "cache"))
    model, search = ours.float(), SearchOptions(beam_size=beam_size)
    ct2_engine = CTranslate2Engine(model, None, compute_type="float32", threads=1)
    torch_engine = TorchEngine[Any](
        model=model,
        start_id=PAD,
        end_id=END,
        suppressed_tokens=tuple(find_suppressed_tokens(model.config, None)),
        pad=PAD,
        device=torch.device("cpu"),
        choose_batch_size=lambda *_: 16,
        build_constraints=lambda *_: ((), None),
    )
    requests = [
        SearchRequest(source_ids=row, rng_key=i, max_length=LIMIT)
        for i, row in enumerate(make_sources(SENTENCES, seed=1000))
    ]
    assert ct2_engine.find_unsupported_reason(search, requests) is None
    results, expected = dict(ct2_engine.search(requests, search)), dict(torch_engine.search(requests, search))
    patient = dict(torch_engine.search(requests, replace(search, patience=DEFAULT_PATIENCE)))
    early_stops = 0
    for index, (best,) in sorted(results.items()):
        if not is_same(
            results[index], expected[index]
        ):  # CTranslate2 stopped early, as the torch engine does with its patience
            assert best.score < expected[index][0].score
            expected[index], early_stops = patient[index], early_stops + 1
        assert is_same(results[index], expected[index])
        assert best.score == pytest.approx(expected[index][0].score, abs=1e-4)
        assert best.log_prob == pytest.approx(expected[index][0].log_prob, abs=1e-4)
    assert early_stops <= (0 if name == "trained" or beam_size == 1 else 5)
