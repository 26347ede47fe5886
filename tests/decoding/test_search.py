"""Search with a toy model whose targets can be enumerated; tests/laws has whole models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attent.decoding import search as searching
from attent.decoding.constraints.base import NEG_INF
from attent.decoding.options import Hypothesis, SearchOptions
from attent.decoding.search import HypothesisTensors, SearchContext, stable_topk, stable_topk_indices
from tests.decoding.toy_models import (
    END,
    PAD,
    START,
    Tokens,
    ToyModel,
    list_all_targets,
    make_sources,
    search_plainly,
    to_hypotheses,
    to_ids,
)
from tests.greedy import greedy_search
from tests.searching import beam_search

IDS: dict[str, Any] = {"start_id": START, "end_id": END}


def run_search(
    toy: ToyModel, rows: Tensor, max_length: int, search: SearchOptions, suppressed: tuple[int, ...] = ()
) -> list[Any]:
    got = beam_search(toy, rows, **IDS, max_length=max_length, options=search, suppressed_tokens=suppressed)
    return [to_hypotheses(got, row) for row in range(len(rows))]


# --- the best of all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("n_best", [1, 5, 60])
def test_a_beam_that_holds_everything_finds_the_best(kind: Any, alpha: float, n_best: int) -> None:
    toy, rows = ToyModel(5), make_sources(*range(6))
    search = SearchOptions(beam_size=60, length_penalty=alpha, length_penalty_type=kind, n_best=n_best)
    for source, got in enumerate(run_search(toy, rows, 4, search, (PAD,))):
        every = list_all_targets(5, 4, {START, PAD})
        expected = {
            tokens: toy.log_prob(source, tokens, (PAD,)) / search.compute_score_divisor(len(tokens)) for tokens in every
        }
        best = sorted(expected, key=expected.__getitem__, reverse=True)[:n_best]
        ended = [hypothesis for hypothesis in got if hypothesis.is_finished]
        assert [(*hypothesis.token_ids, END) for hypothesis in ended] == best
        assert [hypothesis.score for hypothesis in ended] == pytest.approx(
            [expected[tokens] for tokens in best], abs=1e-5
        )


@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
@pytest.mark.parametrize("beam_size", [1, 2, 3, 7])
def test_every_score_equals_that_of_forced_decoding(beam_size: int, kind: Any) -> None:
    toy, search = ToyModel(9), SearchOptions(beam_size=beam_size, n_best=beam_size, length_penalty_type=kind)
    for source, got in zip((3, 1, 4), run_search(toy, make_sources(3, 1, 4), 6, search), strict=True):
        assert len(set(to_ids(got))) == beam_size
        for hypothesis in got:
            tokens = (*hypothesis.token_ids, END) if hypothesis.is_finished else hypothesis.token_ids
            log_prob = toy.log_prob(source, tokens)
            assert hypothesis.log_prob == pytest.approx(log_prob, abs=1e-5)
            assert hypothesis.score == pytest.approx(log_prob / search.compute_score_divisor(len(tokens)), abs=1e-5)
            assert not {START, END} & set(hypothesis.token_ids)
            assert hypothesis.is_finished or len(hypothesis.token_ids) == 6


def test_the_best_comes_first_and_truncated_ones_last() -> None:
    search, cut = SearchOptions(beam_size=5, n_best=5), 0
    for got in run_search(ToyModel(6), make_sources(*range(30)), 5, search):
        assert got == sorted(got, key=lambda hypothesis: (not hypothesis.is_finished, -hypothesis.score))
        cut += sum(not hypothesis.is_finished for hypothesis in got)
    assert 10 < cut < 130


def test_a_truncated_hypothesis_ranks_behind_finished_ones() -> None:
    class Endless(ToyModel):
        def logits(self, source: int, read: Tokens) -> Tensor:
            return torch.tensor([-9.0, -3.0 if len(read) == 1 else -50.0, -4.0, 2.0])

    (got,) = run_search(Endless(4), make_sources(0), 5, SearchOptions(beam_size=3, n_best=3))
    assert to_ids(got)[:2] == [((), True), ((3, 3, 3, 3, 3), False)]
    assert got[1].score > got[0].score


# --- compared with a plain search -------------------------------------------------------------------------------------

SEARCHES = {
    "default": SearchOptions(),
    "greedy": SearchOptions(beam_size=1),
    "4 best": SearchOptions(n_best=4),
    "Wu": SearchOptions(beam_size=3, n_best=2, length_penalty_type="wu"),
    "no penalty": SearchOptions(beam_size=5, n_best=2, length_penalty_type="none"),
    "prefers long": SearchOptions(beam_size=4, n_best=2, length_penalty=3.0),
    "patience 1": SearchOptions(beam_size=4, n_best=3, patience=1.0),
    "patience 1.7": SearchOptions(beam_size=3, n_best=3, patience=1.7),
}


@pytest.mark.parametrize("has_ties", [False, True], ids=["", "many-ties"])
@pytest.mark.parametrize("vocab", [4, 9, 40])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_it_equals_a_plain_search_that_never_stops_early(search: SearchOptions, vocab: int, has_ties: bool) -> None:
    """Also with a vocabulary smaller than twice the beam; on ties the lowest tokens win."""
    toy, ends = ToyModel(vocab, 1.5, has_ties=has_ties), 0
    for source, got in enumerate(run_search(toy, make_sources(*range(8)), 8, search, (2,))):
        expected = search_plainly(toy, source, 8, search, (2,))
        assert to_ids(got) == to_ids(expected)
        assert [hypothesis.score for hypothesis in got] == pytest.approx(
            [hypothesis.score for hypothesis in expected], abs=1e-5
        )
        ends += got[0].is_finished
    assert vocab == 40 or ends > 1


@pytest.mark.parametrize("vocab", [9, 2100])
def test_on_ties_the_lowest_tokens_win(vocab: int) -> None:
    class Flat(ToyModel):
        def logits(self, source: int, read: Tokens) -> Tensor:
            return torch.zeros(self.vocab, dtype=torch.float64)

    search = SearchOptions(beam_size=3, n_best=3, length_penalty_type="none")
    (got,) = run_search(Flat(vocab), make_sources(0), 3, search)
    assert to_ids(got) == [((), True), ((2,), True), ((2, 2), True)]  # the end is token 1
    (got,) = run_search(Flat(vocab), make_sources(0), 2, search, (END + 1,))
    assert to_ids(got)[:2] == [((), True), ((3,), True)]
    (got,) = run_search(Flat(vocab), make_sources(0), 1, replace(search, beam_size=4, n_best=4), (3, 5))
    assert to_ids(got) == [((), True), ((2,), False), ((4,), False), ((6,), False)]


@pytest.mark.parametrize("suppressed", [(), (PAD, 4)])
@pytest.mark.parametrize("max_length", [1, 5, 12])
def test_a_beam_of_one_is_greedy(max_length: int, suppressed: tuple[int, ...]) -> None:
    rows = make_sources(*range(20))
    got = beam_search(
        ToyModel(6),
        rows,
        **IDS,
        max_length=max_length,
        options=SearchOptions(beam_size=1),
        suppressed_tokens=suppressed,
    )
    expected = greedy_search(ToyModel(6), rows, **IDS, max_length=max_length, suppressed_tokens=suppressed)
    assert got.tokens[:, 0].tolist() == expected.tolist()
    assert not set(expected.flatten().tolist()) & {START, *suppressed}
    if max_length == 12:
        assert (expected == END).any(1).sum() > 10


def test_a_beam_of_one_breaks_ties_as_greedy_search() -> None:
    rows, toy = make_sources(*range(40)), ToyModel(300, 1.0, has_ties=True)
    got = beam_search(toy, rows, **IDS, max_length=8, options=SearchOptions(beam_size=1))
    assert got.tokens[:, 0].tolist() == greedy_search(toy, rows, **IDS, max_length=8).tolist()


@pytest.mark.parametrize("beam_size", [1, 3])
def test_other_rows_change_nothing(beam_size: int) -> None:
    search = SearchOptions(beam_size=beam_size, n_best=beam_size)
    together = run_search(ToyModel(7), make_sources(*range(10)), 15, search)
    assert together == [run_search(ToyModel(7), make_sources(row), 15, search)[0] for row in range(10)]


# --- when to stop -----------------------------------------------------------------------------------------------------


def never_done_sources(sums: Tensor, lengths: Tensor, limits: Tensor, *others: object) -> Tensor:
    return lengths >= limits


@pytest.mark.parametrize("n_best", [1, 3])
@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_stopping_early_changes_nothing(alpha: float, kind: Any, n_best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, search = (
        make_sources(*range(25)),
        SearchOptions(length_penalty=alpha, length_penalty_type=kind, n_best=n_best),
    )
    toy = ToyModel(6, 1.0)
    stopped = run_search(toy, rows, 20, search)
    steps = len(toy.step_rows)
    monkeypatch.setattr(searching, "is_poll_step", lambda t, device: t % 8 == 7)
    assert run_search(toy, rows, 20, search) == stopped
    monkeypatch.setattr(searching, "find_done_sources", never_done_sources)
    assert run_search(toy, rows, 20, search) == stopped
    assert steps < 20 or search.compute_score_divisor(20) > 10  # with such a penalty any length may win


def test_it_stops_when_no_better_hypothesis_is_possible() -> None:
    class Sure(ToyModel):
        """After token 3 the end is certain; anything else is a hundred times less likely."""

        def logits(self, source: int, read: Tokens) -> Tensor:
            return torch.tensor([-9.0, 9.0 if read[-1] == 3 else -9.0, -4.0, 1.0])

    toy = Sure(4)
    (got,) = run_search(toy, make_sources(0), 50, SearchOptions())
    assert to_ids(got) == [((3,), True)]
    assert len(toy.step_rows) < 10
    toy.step_rows.clear()
    greedy_search(toy, make_sources(0), **IDS, max_length=50)
    assert len(toy.step_rows) == 2


def test_patience_limits_the_number_of_finished_hypotheses() -> None:
    toy, rows = ToyModel(5, 1.0), make_sources(*range(30))
    steps, best = [], []
    for patience in (1.0, 3.0, None):
        toy.step_rows.clear()
        got = run_search(toy, rows, 25, SearchOptions(beam_size=3, length_penalty=2.0, patience=patience))
        steps.append(len(toy.step_rows))
        best.append([best[0].score for best in got])
    assert steps == sorted(steps)
    assert steps[0] < steps[2]
    assert all(list(scores) == sorted(scores) for scores in zip(*best, strict=True))
    assert best[0] != best[2]


def test_a_longer_hypothesis_gains_by_the_penalty() -> None:
    rows, lengths = make_sources(*range(20)), []
    for alpha in (0.0, 3.0):
        got = run_search(ToyModel(4, 1.0), rows, 12, SearchOptions(beam_size=12, length_penalty=alpha))
        lengths.append([len(best[0].token_ids) for best in got])
    assert all(short <= long for short, long in zip(*lengths, strict=True))
    assert sum(lengths[0]) < sum(lengths[1])


def test_greedy_stops_when_all_have_ended() -> None:
    toy = ToyModel(4)
    ids = greedy_search(toy, make_sources(*range(5)), **IDS, max_length=200)
    assert ids.shape == (5, 200)
    assert len(toy.step_rows) == int((ids != END).sum(1).max()) + 1 < 200


# --- top-k ------------------------------------------------------------------------------------------------------------


def topk_by_sorting(values: Tensor, n: int) -> list[list[list[int]]]:
    return [[sorted(range(len(beam)), key=lambda i: (-beam[i], i))[:n] for beam in row] for row in values.tolist()]


@pytest.mark.parametrize("kind", ["ties", "more ties", "random", "mostly forbidden", "rising", "nothing"])
@pytest.mark.parametrize("vocab", [1, 5, 300, 1024, 1025, 1300, 3000])
def test_stable_topk_equals_a_sort(vocab: int, kind: str) -> None:
    values = {
        "ties": torch.randint(-40, 40, (2, 3, vocab)) / 8,
        "more ties": torch.randint(-1, 2, (2, 3, vocab)) * torch.tensor(-0.0 if vocab % 2 else 2.0),
        "random": torch.randn(2, 3, vocab, dtype=torch.float64).float(),
        "mostly forbidden": torch.where(torch.rand(2, 3, vocab) < 0.999, NEG_INF, 1.0),
        "rising": torch.arange(6 * vocab).view(2, 3, vocab) // 3 * -1.0,
        "nothing": torch.full((2, 3, vocab), NEG_INF),
    }[kind]
    for n in (1, 2, 3, 8, 20):
        got, indices = stable_topk(values, n)
        assert indices.tolist() == topk_by_sorting(values, n)
        assert torch.equal(got, values.gather(-1, indices))


def test_ties_keep_their_order_whatever_the_sign_of_zero() -> None:
    values = torch.tensor([-1.0, -0.0, 0.0, 2.0, -0.0, 2.0, NEG_INF, 1e-45, -1e-45, NEG_INF, float("inf")])
    assert stable_topk_indices(values, 11).tolist() == [10, 3, 5, 7, 1, 2, 4, 8, 0, 6, 9]


def test_equally_good_hypotheses_keep_the_earlier_one() -> None:
    def make_finished(first_token: int, *scores: float) -> HypothesisTensors:
        tokens = torch.arange(first_token, first_token + len(scores))[None, :, None]
        values = torch.tensor([scores])
        return HypothesisTensors(tokens, values, values, torch.ones_like(tokens[..., 0]))

    context = SearchContext(
        options=SearchOptions(), start_id=START, end_id=END, suppressed_tokens=torch.tensor([START])
    )
    got = make_finished(0, -1.0, -2.0, NEG_INF).merge(make_finished(3, -2.0, -1.0, -2.0), context)
    assert got.tokens.flatten().tolist() == [0, 4, 1]
    assert got.scores.flatten().tolist() == [-1.0, -1.0, -2.0]


@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
def test_a_penalty_does_not_depend_on_the_position_in_the_tensor(kind: Any) -> None:
    search = SearchOptions(length_penalty=0.6, length_penalty_type=kind)
    context = SearchContext(options=search, start_id=START, end_id=END, suppressed_tokens=torch.tensor([START]))
    lengths = torch.arange(1, 300)
    expected = torch.tensor([search.compute_score_divisor(length) for length in lengths.tolist()])
    assert torch.equal(context.compute_score_divisor(lengths), expected)
    assert torch.equal(context.compute_score_divisor(lengths[3:7]), expected[3:7])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beam_size": 0}, "`beam_size` must be 1 or more, but is 0"),
        ({"n_best": 5}, "`n_best` must be at most `beam_size`=4, but is 5"),
        ({"length_penalty": -0.1}, "`length_penalty` must be 0 or more, but is -0.1"),
        ({"length_penalty": float("nan")}, "`length_penalty` must be 0 or more, but is nan"),
        ({"length_penalty_type": "average"}, "`length_penalty_type` must be one of avg, wu, none, but is 'average'"),
        ({"max_length": 0}, "`max_length` must be 1 or more, but is 0"),
        ({"patience": 0.5}, "`patience` must be 1 or more, but is 0.5"),
        ({"beam_groups": 3}, "`beam_size`=4 must be a multiple of `beam_groups`, but that is 3"),
    ],
)
def test_invalid_options_raise_an_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchOptions(**changes)


def test_the_plain_search_gives_hypotheses() -> None:
    toy = ToyModel(5)
    (got,) = run_search(toy, make_sources(1), 6, SearchOptions())
    assert isinstance(got[0], Hypothesis)
    assert got[0].log_prob == pytest.approx(search_plainly(toy, 1, 6, SearchOptions())[0].log_prob, abs=1e-5)


# --- ids --------------------------------------------------------------------------------------------------------------


class SwappedModel(ToyModel):
    """The toy model with the ids of its start and end token swapped: the end is 0, as in Marian models."""

    ids = torch.tensor([END, START, *range(2, 7)])

    def step(self, target: Tensor, state: Any, /) -> Tensor:
        return super().step(self.ids[target], state)[..., self.ids]


@pytest.mark.parametrize(
    "search",
    [
        SearchOptions(beam_size=1),
        SearchOptions(beam_size=3, n_best=3),
        SearchOptions(beam_size=4, n_best=4, beam_groups=2),
        SearchOptions(beam_size=3, n_best=2, patience=1.0, length_penalty=0.0),
    ],
    ids=["greedy", "beam", "diverse", "impatient"],
)
def test_the_end_token_may_be_0(search: SearchOptions) -> None:
    rows = make_sources(*range(6))
    expected = run_search(ToyModel(7), rows, 6, search, (PAD,))
    output = beam_search(
        SwappedModel(7), rows, start_id=END, end_id=START, max_length=6, options=search, suppressed_tokens=(PAD,)
    )
    got = HypothesisTensors(SwappedModel.ids[output.tokens], output.log_probs, output.scores, output.lengths)
    assert [to_hypotheses(got, row) for row in range(len(rows))] == expected
    if search.beam_size == 1:
        tokens = greedy_search(
            SwappedModel(7), rows, start_id=END, end_id=START, max_length=6, suppressed_tokens=(PAD,)
        )
        assert torch.equal(
            tokens,
            greedy_search(ToyModel(7), rows, **IDS, max_length=6, suppressed_tokens=(PAD,)).apply_(
                lambda token: int(SwappedModel.ids[token])
            ),
        )


def test_the_smallest_arguments_are_accepted() -> None:
    rows = make_sources(1, 2)
    assert beam_search(SwappedModel(7), rows, start_id=END, end_id=0, max_length=1).tokens.shape == (2, 1, 1)


def test_the_start_is_suppressed_and_the_end_never() -> None:
    assert searching.list_suppressed_tokens(0, 1, (4, 2)) == (0, 2, 4)
    assert searching.list_suppressed_tokens(5, 0, (0, 3)) == (3, 5)
    assert searching.list_suppressed_tokens(-1, 1, ()) == ()  # a prompt
    assert searching.list_suppressed_tokens(1, 1, (3,)) == (3,)
