"""Ensembles average probabilities; copies of one model change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attent.decoding.engines.reference import TorchEngine
from attent.decoding.ensemble import Ensemble, check_tokenizers
from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.search import State, StepModel
from attent.decoding.translator import Translator
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.text.tokenizer import Tokenizer
from tests.laws.helpers import randomize
from tests.laws.models import SEQ2SEQS
from tests.text.corpus import tokenizer

CONFIG = next(iter(SEQ2SEQS.values()))
SOURCE = torch.tensor([[3, 4, 5, 1], [6, 1, 2, 2], [7, 8, 1, 2]])
LENGTHS = torch.tensor([4, 2, 3])
TOKENS = torch.tensor([[[5, 6], [3, 4]], [[3, 7], [5, 6]], [[8, 4], [7, 3]]])  # (B, steps, K)


def make_model(seed: int, config: Seq2SeqConfig = CONFIG) -> Seq2Seq:
    torch.manual_seed(seed)
    return randomize(Seq2Seq(config).double()).eval()


def run_steps(model: Seq2Seq | Ensemble, parents: Tensor | None = None) -> Tensor:
    """Log-probabilities of the second step of two beams."""
    state = model.init_decoder_state(SOURCE, LENGTHS, capacity=4, beams=2)
    model.step(TOKENS[:, 0], state)  # type: ignore[arg-type]
    if parents is not None:
        state.reorder_beams(parents)
    return model.step(TOKENS[:, 1], state).log_softmax(-1)  # type: ignore[arg-type]


def test_probabilities_are_the_mean_of_the_models() -> None:
    models = [make_model(1), make_model(2), make_model(3)]
    expected = torch.stack([run_steps(model).exp() for model in models]).mean(0)
    torch.testing.assert_close(run_steps(Ensemble(models)).exp(), expected)
    assert Ensemble(models).config is models[0].config


def test_an_ensemble_of_copies_equals_the_model() -> None:
    model = make_model(1)
    torch.testing.assert_close(run_steps(Ensemble([model])), run_steps(model))
    torch.testing.assert_close(run_steps(Ensemble([model, model])), run_steps(model))


def test_a_step_gives_log_probabilities_in_float32_or_better() -> None:
    ensemble = Ensemble([make_model(1), make_model(2)])
    for dtype, expected in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        ensemble.to(dtype)
        log_probs = ensemble.step(TOKENS[:, 0], ensemble.init_decoder_state(SOURCE, LENGTHS, capacity=2, beams=2))
        assert log_probs.dtype == expected
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 2, dtype=expected), rtol=0, atol=1e-5)


def test_beams_are_reordered_in_every_model() -> None:
    models = [make_model(1), make_model(2)]
    parents = torch.tensor([[1, 0], [0, 0], [1, 1]])
    expected = torch.stack([run_steps(model, parents).exp() for model in models]).mean(0)
    torch.testing.assert_close(run_steps(Ensemble(models), parents).exp(), expected)


def test_sources_are_reordered_in_every_model() -> None:
    ensemble, rows = Ensemble([make_model(1), make_model(2)]), torch.tensor([2, 0])
    state = ensemble.init_decoder_state(SOURCE, LENGTHS, capacity=4, beams=2)
    ensemble.step(TOKENS[:, 0], state)
    state.reorder(rows)
    torch.testing.assert_close(ensemble.step(TOKENS[rows, 1], state), run_steps(ensemble)[rows])


def test_a_source_is_replaced_in_every_model() -> None:
    ensemble = Ensemble([make_model(1), make_model(2)])
    state = ensemble.init_decoder_state(SOURCE, LENGTHS, capacity=4, beams=2)
    ensemble.step(TOKENS[:, 0], state)
    fresh = ensemble.init_decoder_state(SOURCE[:1, :2], LENGTHS[1:2], capacity=1, beams=2)
    state.replace_sources(torch.tensor([1]), fresh)
    state.set_row_lengths([1, 0, 1])
    log_probs = ensemble.step(torch.stack([TOKENS[0, 1], TOKENS[0, 0], TOKENS[2, 1]]), state)
    again = ensemble.init_decoder_state(SOURCE[:1, :2], LENGTHS[1:2], capacity=2, beams=2)
    torch.testing.assert_close(log_probs[1], ensemble.step(TOKENS[:1, 0], again)[0])
    torch.testing.assert_close(log_probs[[0, 2]], run_steps(ensemble)[[0, 2]])


def test_models_of_different_architectures_form_an_ensemble() -> None:
    configs = [c for c in SEQ2SEQS.values() if (c.vocab, c.output_vocab) == (CONFIG.vocab, CONFIG.output_vocab)][:3]
    models = [make_model(seed, config) for seed, config in enumerate(configs)]
    assert len(models) > 1
    expected = torch.stack([run_steps(model).exp() for model in models]).mean(0)
    torch.testing.assert_close(run_steps(Ensemble(models)).exp(), expected)
    assert Ensemble(models).config is models[0].config


def test_the_maximum_lengths_are_the_smallest_of_the_models() -> None:
    models = [make_model(1, replace(CONFIG, vocab=350, target_vocab=350)) for _ in range(2)]
    models[0].encoder.positions.max_length, models[1].encoder.positions.max_length = 30, None
    models[0].decoder.positions.max_length, models[1].decoder.positions.max_length = 30, 20
    assert Translator(Ensemble(models), tokenizer())._max_lengths == [30, 20]


def find_best(model: StepModel[State]) -> dict[int, tuple[int, ...]]:
    engine = TorchEngine(
        model=model,
        start_id=CONFIG.start_id,
        end_id=CONFIG.end_id,
        suppressed_tokens=(),
        pad=2,
        device=torch.device("cpu"),
        choose_batch_size=lambda *_: 2,  # so small that rows are refilled
        build_constraints=lambda search, requests: ((), None),
    )
    sources = [[3, 4, 5, 1], [6, 1], [7, 8, 1], [9, 3, 1], [5, 1]]
    requests = [SearchRequest(source_ids=source, max_length=6, rng_key=number) for number, source in enumerate(sources)]
    return {index: best[0].token_ids for index, best in engine.search(requests, SearchOptions(beam_size=2))}


def test_a_search_with_copies_of_a_model_equals_that_of_the_model() -> None:
    first, second = make_model(1), make_model(2)
    alone = find_best(first)
    assert len(alone) == 5
    assert find_best(Ensemble([first, first])) == alone
    assert find_best(Ensemble([first, second])) == find_best(Ensemble([second, first])) != alone


@pytest.mark.parametrize(
    "change",
    [
        {"vocab": 23, "share_embeddings": False, "target_vocab": CONFIG.output_vocab},
        {"target_vocab": 23, "share_embeddings": False},
        {"start_id": 5},
        {"end_id": 6},
    ],
)
def test_different_vocabularies_raise_an_error(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="same vocabularies, start and end token, but model 2"):
        Ensemble([make_model(1), make_model(1, replace(CONFIG, **change))])


def test_an_empty_ensemble_raises_an_error() -> None:
    with pytest.raises(ValueError, match="must have at least one model"):
        Ensemble([])


def test_different_tokenizers_raise_an_error_with_the_folder() -> None:
    ours, others = tokenizer("bpe"), tokenizer("unigram")
    check_tokenizers([ours, Tokenizer.from_files(dict(ours.files))], ["a", "b"])
    with pytest.raises(ValueError, match=r"^c: must have the tokenizer of a to form an ensemble with it"):
        check_tokenizers([ours, ours, others], ["a", "b", "c"])
