"""Several models as one: probabilities are averaged, and beams of one and the same model change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attent.decoding.engines.reference import TorchEngine
from attent.decoding.ensemble import Ensemble, EnsembleError, check_tokenizers
from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.search import State, StepModel
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.text.tokenizer import Tokenizer
from tests.laws.helpers import shake
from tests.laws.models import SEQ2SEQS
from tests.text.corpus import tokenizer

CONFIG = next(iter(SEQ2SEQS.values()))
SOURCE = torch.tensor([[3, 4, 5, 1], [6, 1, 2, 2], [7, 8, 1, 2]])
LENGTHS = torch.tensor([4, 2, 3])
TOKENS = torch.tensor([[[5, 6], [3, 4]], [[3, 7], [5, 6]], [[8, 4], [7, 3]]])  # (B, steps, K)


def model(seed: int, config: Seq2SeqConfig = CONFIG) -> Seq2Seq:
    torch.manual_seed(seed)
    return shake(Seq2Seq(config).double()).eval()


def run_steps(one: Seq2Seq | Ensemble, parents: Tensor | None = None) -> Tensor:
    """Log-probabilities of the second step of two beams."""
    state = one.begin(SOURCE, LENGTHS, capacity=4, beams=2)
    one.step(TOKENS[:, 0], state)  # type: ignore[arg-type]
    if parents is not None:
        state.reorder_beams(parents)
    return one.step(TOKENS[:, 1], state).log_softmax(-1)  # type: ignore[arg-type]


def test_probabilities_are_the_mean_of_the_models() -> None:
    models = [model(1), model(2), model(3)]
    wanted = torch.stack([run_steps(one).exp() for one in models]).mean(0)
    torch.testing.assert_close(run_steps(Ensemble(models)).exp(), wanted)


def test_one_model_or_the_same_one_twice_is_that_model() -> None:
    one = model(1)
    torch.testing.assert_close(run_steps(Ensemble([one])), run_steps(one))
    torch.testing.assert_close(run_steps(Ensemble([one, one])), run_steps(one))


def test_a_step_gives_log_probabilities_in_float32_or_better() -> None:
    both = Ensemble([model(1), model(2)])
    for dtype, wanted in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        both.to(dtype)
        found = both.step(TOKENS[:, 0], both.begin(SOURCE, LENGTHS, capacity=2, beams=2))
        assert found.dtype == wanted
        torch.testing.assert_close(found.exp().sum(-1), torch.ones(3, 2, dtype=wanted), rtol=0, atol=1e-5)


def test_beams_follow_in_every_model() -> None:
    models = [model(1), model(2)]
    parents = torch.tensor([[1, 0], [0, 0], [1, 1]])
    wanted = torch.stack([run_steps(one, parents).exp() for one in models]).mean(0)
    torch.testing.assert_close(run_steps(Ensemble(models), parents).exp(), wanted)


def test_sources_are_reordered_in_every_model() -> None:
    both, rows = Ensemble([model(1), model(2)]), torch.tensor([2, 0])
    state = both.begin(SOURCE, LENGTHS, capacity=4, beams=2)
    both.step(TOKENS[:, 0], state)
    state.reorder(rows)
    torch.testing.assert_close(both.step(TOKENS[rows, 1], state), run_steps(both)[rows])


def test_a_source_is_replaced_in_every_model() -> None:
    both = Ensemble([model(1), model(2)])
    state = both.begin(SOURCE, LENGTHS, capacity=4, beams=2)
    both.step(TOKENS[:, 0], state)
    fresh = both.begin(SOURCE[:1, :2], LENGTHS[1:2], capacity=1, beams=2)
    state.replace_rows(torch.tensor([1]), fresh)
    state.rewind([1, 0, 1])
    found = both.step(torch.stack([TOKENS[0, 1], TOKENS[0, 0], TOKENS[2, 1]]), state)
    again = both.begin(SOURCE[:1, :2], LENGTHS[1:2], capacity=2, beams=2)
    torch.testing.assert_close(found[1], both.step(TOKENS[:1, 0], again)[0])
    torch.testing.assert_close(found[[0, 2]], run_steps(both)[[0, 2]])


def test_models_of_different_make_write_together() -> None:
    alike = [c for c in SEQ2SEQS.values() if (c.vocab, c.output_vocab) == (CONFIG.vocab, CONFIG.output_vocab)][:3]
    models = [model(seed, config) for seed, config in enumerate(alike)]
    assert len(models) > 1
    wanted = torch.stack([run_steps(one).exp() for one in models]).mean(0)
    torch.testing.assert_close(run_steps(Ensemble(models)).exp(), wanted)


def test_the_limits_are_those_of_the_model_that_has_the_fewest_positions() -> None:
    models = [model(1), model(1)]
    models[0].encoder.positions.max_length, models[1].encoder.positions.max_length = 30, None
    models[0].decoder.positions.max_length, models[1].decoder.positions.max_length = 30, 20
    both = Ensemble(models)
    assert (both.max_source_length, both.max_target_length) == (30, 20)


def find_best(one: StepModel[State]) -> dict[int, tuple[int, ...]]:
    engine = TorchEngine(
        model=one,
        start=CONFIG.start_id,
        end=CONFIG.end_id,
        suppressed_tokens=(),
        pad=2,
        device=torch.device("cpu"),
        choose_batch_size=lambda *_: 2,  # so few that finished sources make room for others
        build_constraints=lambda search, jobs: ((), None),
    )
    sources = [[3, 4, 5, 1], [6, 1], [7, 8, 1], [9, 3, 1], [5, 1]]
    jobs = [SearchRequest(source_ids=source, max_length=6, rng_key=number) for number, source in enumerate(sources)]
    return {place: found[0].token_ids for place, found in engine.search(jobs, SearchOptions(beam_size=2))}


def test_a_search_with_copies_of_a_model_finds_what_it_finds() -> None:
    one, other = model(1), model(2)
    alone = find_best(one)
    assert len(alone) == 5
    assert find_best(Ensemble([one, one])) == alone
    assert find_best(Ensemble([one, other])) == find_best(Ensemble([other, one])) != alone


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab": 23, "share_embeddings": False, "target_vocab": CONFIG.output_vocab}, "same source vocabulary"),
        (
            {"target_vocab": 23, "share_embeddings": False},
            "same target vocabulary, but the first has 17 and model 2 23",
        ),
        ({"start_id": 5}, "same start token"),
        ({"end_id": 6}, "same end token"),
    ],
)
def test_models_of_different_vocabularies_are_refused(change: dict[str, int], says: str) -> None:
    with pytest.raises(EnsembleError, match=says):
        Ensemble([model(1), model(1, replace(CONFIG, **change))])


def test_no_models_are_refused() -> None:
    with pytest.raises(EnsembleError, match="must have at least one model"):
        Ensemble([])


def test_tokenizers_that_differ_are_refused_by_the_name_of_the_folder() -> None:
    ours, others = tokenizer("bpe"), tokenizer("unigram")
    check_tokenizers([ours, Tokenizer.from_files(dict(ours.files))], ["a", "b"])
    with pytest.raises(EnsembleError, match=r"^c: must have the tokenizer of a to form an ensemble with it"):
        check_tokenizers([ours, ours, others], ["a", "b", "c"])
