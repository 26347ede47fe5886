"""Searches from outside: `transformers`' generate and CTranslate2, on the same weights, find what ours finds.

All look at the 2K best continuations, put aside what ends among the first K, and rank by sum / length^alpha. One rule
differs: at the limit, `transformers` ranks what was cut among what has ended; ours puts it behind, since a sentence
without its end is no translation.
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

from attent.decoding import beam_search, greedy_search
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.interop import load
from attent.models import Seq2Seq
from tests.interop.families import transformers

END, PAD, VOCAB, LIMIT = 0, 39, 40, 14  # as in published models, the decoder starts from the padding
SENTENCES = 50  # of each of four models
RANDOM = {3: 1.0, 6: 4.5, 7: 1.0}  # seed: how much likelier the end is made, so that about half end
NAMES = [*(f"random-{seed}" for seed in RANDOM), "learnt"]
every_model = pytest.mark.parametrize("name", NAMES)


def new(**changes: Any) -> Any:
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


def by_chance(seed: int) -> Any:
    """Weights by chance, loud enough to write something else for most sources."""
    torch.manual_seed(seed)
    model = new(tie_word_embeddings=False, scale_embedding=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed_positions" not in name:
                weight.copy_(1.5 * torch.randn(weight.shape) * weight.shape[1] ** -0.5)
        model.lm_head.weight *= 1.5
        model.final_logits_bias[:, END] += RANDOM[seed]
    return model


def learnt() -> Any:
    """It has begun to learn to copy: unsure of the tokens, yet its ends come where they should."""
    torch.manual_seed(2)
    model = new(encoder_layers=1, scale_embedding=True)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(80):
        ids, lengths = filled(sources(32, seed=step))
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        loss = model(input_ids=ids, attention_mask=real.long(), labels=ids.masked_fill(~real, -100)).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


def sources(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[*(chance.randrange(1, PAD) for _ in range(chance.randrange(1, 10))), END] for _ in range(count)]


def filled(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    widest = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD] * (widest - len(row))] for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


@cache
def theirs(name: str) -> Any:
    made = learnt() if name == "learnt" else by_chance(int(name.removeprefix("random-")))
    made.final_logits_bias[:, PAD] = -30.0  # CTranslate2 gives its probability to the others, and would rank otherwise
    return made.double().eval()


@pytest.fixture
def ours(name: str, tmp_path: Path) -> Seq2Seq:
    theirs(name).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert isinstance(model, Seq2Seq)
    return model.double()


def generated(name: str, rows: list[list[int]], **changes: Any) -> Any:
    ids, lengths = filled(rows)
    kinds: dict[str, Any] = {"early_stopping": "never", "length_penalty": 0.6, "num_beams": 4, **changes}
    if kinds["num_beams"] == 1:
        kinds = {"num_beams": 1}
    return theirs(name).generate(
        input_ids=ids,
        attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        max_new_tokens=LIMIT,
        do_sample=False,
        bad_words_ids=[[PAD]],
        return_dict_in_generate=True,
        output_scores=True,
        **kinds,
    )


def tokens_of(row: Tensor) -> list[int]:
    """Without the start, with the end."""
    tokens: list[int] = row[1:].tolist()
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens[:LIMIT]


@every_model
def test_generate_finds_the_same_as_our_beam(name: str, ours: Seq2Seq) -> None:
    rows = sources(SENTENCES, seed=1000)
    made = generated(name, rows)
    ids, lengths = filled(rows)
    got = beam_search(ours, ids, lengths, start=PAD, end=END, max_length=LIMIT, options=SearchOptions())
    cut, different = 0, set()
    for row in range(SENTENCES):
        wanted, score = tokens_of(made.sequences[row]), float(made.sequences_scores[row])
        found = got.tokens[row, 0, : got.lengths[row, 0]].tolist()
        different.add(tuple(found))
        cut += END not in found
        if found == wanted:
            assert float(got.scores[row, 0]) == pytest.approx(score, abs=1e-5)
        else:  # the one rule that differs
            assert END in found
            assert END not in wanted
            assert len(wanted) == LIMIT
            assert score > float(got.scores[row, 0])
    assert len(different) > 10
    assert cut == 0 if name == "learnt" else cut > 10


@every_model
def test_generate_finds_the_same_as_greedy(name: str, ours: Seq2Seq) -> None:
    rows = sources(SENTENCES, seed=1000)
    ids, lengths = filled(rows)
    made = generated(name, rows, num_beams=1)
    got = greedy_search(ours, ids, lengths, start=PAD, end=END, max_length=LIMIT)
    for row in range(SENTENCES):
        wanted = tokens_of(made.sequences[row])
        assert got[row].tolist() == [*wanted, *[END] * (LIMIT - len(wanted))]


@pytest.mark.parametrize("name", ["learnt"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_whatever_the_penalty_the_four_best_are_the_same(name: str, ours: Seq2Seq, alpha: float) -> None:
    rows = sources(SENTENCES, seed=1001)
    made = generated(name, rows, length_penalty=alpha, num_return_sequences=4)
    ids, lengths = filled(rows)
    search = SearchOptions(length_penalty=alpha, n_best=4)
    got = beam_search(ours, ids, lengths, start=PAD, end=END, max_length=LIMIT, options=search)
    compared = 0
    for row in range(SENTENCES):
        wanted = [tokens_of(one) for one in made.sequences[4 * row : 4 * row + 4]]
        if all(END in one for one in wanted):
            found = zip(got.tokens[row].tolist(), got.lengths[row].tolist(), strict=True)
            assert [tokens[:length] for tokens, length in found] == wanted
            scores = made.sequences_scores[4 * row : 4 * row + 4].float()
            torch.testing.assert_close(got.scores[row], scores, rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared > 30


# --- CTranslate2 -----------------------------------------------------------------------------------------------------


def same(found: list[Hypothesis], wanted: list[Hypothesis]) -> bool:
    return [(one.token_ids, one.is_finished) for one in found] == [(one.token_ids, one.is_finished) for one in wanted]


@pytest.mark.parametrize("beam_size", [1, 4])
@every_model
def test_ctranslate2_finds_the_same_as_our_engine(
    name: str, beam_size: int, ours: Seq2Seq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2")
    from attent.decoding.engines.ctranslate2 import DEFAULT_PATIENCE, CTranslate2Engine

    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "cache"))
    model, search = ours.float(), SearchOptions(beam_size=beam_size)
    quick = CTranslate2Engine.open(None, model, None, compute_type="float32", threads=1, suppressed_tokens=[PAD])
    own = TorchEngine[Any](
        model=model,
        start=PAD,
        end=END,
        suppressed_tokens=(),
        pad=PAD,
        device=torch.device("cpu"),
        choose_batch_size=lambda *_: 16,
        build_constraints=lambda *_: ((), None),
    )
    jobs = [
        SearchRequest(source_ids=row, rng_key=i, max_length=LIMIT)
        for i, row in enumerate(sources(SENTENCES, seed=1000))
    ]
    assert quick.find_unsupported_reason(search, jobs) is None
    found, wanted = dict(quick.search(jobs, search)), dict(own.search(jobs, search))
    patient = dict(own.search(jobs, replace(search, patience=DEFAULT_PATIENCE)))
    sooner = 0
    for place, (theirs_is,) in sorted(found.items()):
        if not same(found[place], wanted[place]):  # it has given up too soon, as ours would if it were told to
            assert theirs_is.score < wanted[place][0].score
            wanted[place], sooner = patient[place], sooner + 1
        assert same(found[place], wanted[place])
        assert theirs_is.score == pytest.approx(wanted[place][0].score, abs=1e-4)
        assert theirs_is.log_prob == pytest.approx(wanted[place][0].log_prob, abs=1e-4)
    assert sooner <= (0 if name == "learnt" or beam_size == 1 else 5)
