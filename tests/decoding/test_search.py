"""Search on a toy writer whose every target can be counted out; the laws over whole models are in tests/laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attent.decoding import beam_search, greedy_search
from attent.decoding import search as searching
from attent.decoding.options import Hypothesis, SearchOptions
from attent.decoding.search import FinishedHypotheses, SearchContext, stable_topk, stable_topk_indices
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

NEG_INF = float("-inf")
KINDS: dict[str, Any] = {"start": START, "end": END}


def run_search(
    toy: ToyModel, rows: Tensor, max_length: int, search: SearchOptions, never: tuple[int, ...] = ()
) -> list[Any]:
    got = beam_search(toy, rows, **KINDS, max_length=max_length, options=search, suppressed_tokens=never)
    return [to_hypotheses(got, row) for row in range(len(rows))]


# --- the best of all -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("n_best", [1, 5, 60])
def test_a_beam_as_wide_as_all_there_is_finds_the_best(kind: Any, alpha: float, n_best: int) -> None:
    toy, rows = ToyModel(5), make_sources(*range(6))
    search = SearchOptions(beam_size=60, length_penalty=alpha, length_penalty_type=kind, n_best=n_best)
    for source, got in enumerate(run_search(toy, rows, 4, search, (PAD,))):
        every = list_all_targets(5, 4, {START, PAD})
        wanted = {
            tokens: toy.log_prob(source, tokens, (PAD,)) / search.compute_length_penalty(len(tokens))
            for tokens in every
        }
        best = sorted(wanted, key=wanted.__getitem__, reverse=True)[:n_best]
        ended = [one for one in got if one.is_finished]
        assert [(*one.token_ids, END) for one in ended] == best
        assert [one.score for one in ended] == pytest.approx([wanted[tokens] for tokens in best], abs=1e-5)


@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
@pytest.mark.parametrize("beam_size", [1, 2, 3, 7])
def test_every_score_equals_its_score_by_reading(beam_size: int, kind: Any) -> None:
    toy, search = ToyModel(9), SearchOptions(beam_size=beam_size, n_best=beam_size, length_penalty_type=kind)
    for source, got in zip((3, 1, 4), run_search(toy, make_sources(3, 1, 4), 6, search), strict=True):
        assert len(set(to_ids(got))) == beam_size
        for one in got:
            tokens = (*one.token_ids, END) if one.is_finished else one.token_ids
            log_prob = toy.log_prob(source, tokens)
            assert one.log_prob == pytest.approx(log_prob, abs=1e-5)
            assert one.score == pytest.approx(log_prob / search.compute_length_penalty(len(tokens)), abs=1e-5)
            assert not {START, END} & set(one.token_ids)
            assert one.is_finished or len(one.token_ids) == 6


def test_what_is_best_comes_first_and_what_was_cut_last() -> None:
    search, cut = SearchOptions(beam_size=5, n_best=5), 0
    for got in run_search(ToyModel(6), make_sources(*range(30)), 5, search):
        assert got == sorted(got, key=lambda one: (not one.is_finished, -one.score))
        cut += sum(not one.is_finished for one in got)
    assert 10 < cut < 130


def test_what_was_cut_comes_behind_what_has_ended_however_likely_it_is() -> None:
    class Endless(ToyModel):
        def logits(self, source: int, read: Tokens) -> Tensor:
            return torch.tensor([-9.0, -3.0 if len(read) == 1 else -50.0, -4.0, 2.0])

    (got,) = run_search(Endless(4), make_sources(0), 5, SearchOptions(beam_size=3, n_best=3))
    assert to_ids(got)[:2] == [((), True), ((3, 3, 3, 3, 3), False)]
    assert got[1].score > got[0].score


# --- step for step as it is told ------------------------------------------------------------------------------------

SEARCHES = {
    "the default": SearchOptions(),
    "greedy": SearchOptions(beam_size=1),
    "all of four": SearchOptions(n_best=4),
    "of Wu": SearchOptions(beam_size=3, n_best=2, length_penalty_type="wu"),
    "no penalty": SearchOptions(beam_size=5, n_best=2, length_penalty_type="none"),
    "long is good": SearchOptions(beam_size=4, n_best=2, length_penalty=3.0),
    "impatient": SearchOptions(beam_size=4, n_best=3, patience=1.0),
    "rather patient": SearchOptions(beam_size=3, n_best=3, patience=1.7),
}


@pytest.mark.parametrize("even", [False, True], ids=["", "many-ties"])
@pytest.mark.parametrize("vocab", [4, 9, 40])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_it_finds_what_a_plain_search_finds_that_never_stops_early(
    search: SearchOptions, vocab: int, even: bool
) -> None:
    """With a vocabulary smaller than twice the beam, too; and of equally good ones those of the lowest tokens."""
    toy, ends = ToyModel(vocab, 1.5, has_ties=even), 0
    for source, got in enumerate(run_search(toy, make_sources(*range(8)), 8, search, (2,))):
        wanted = search_plainly(toy, source, 8, search, (2,))
        assert to_ids(got) == to_ids(wanted)
        assert [one.score for one in got] == pytest.approx([one.score for one in wanted], abs=1e-5)
        ends += got[0].is_finished
    assert vocab == 40 or ends > 1


@pytest.mark.parametrize("vocab", [9, 2100])
def test_of_all_equally_likely_tokens_the_lowest_are_taken(vocab: int) -> None:
    class Flat(ToyModel):
        def logits(self, source: int, read: Tokens) -> Tensor:
            return torch.zeros(self.vocab, dtype=torch.float64)

    search = SearchOptions(beam_size=3, n_best=3, length_penalty_type="none")
    (got,) = run_search(Flat(vocab), make_sources(0), 3, search)
    assert to_ids(got) == [((), True), ((2,), True), ((2, 2), True)]  # an end is token 1; a beam's first is that of all
    (got,) = run_search(Flat(vocab), make_sources(0), 2, search, (END + 1,))
    assert to_ids(got)[:2] == [((), True), ((3,), True)]
    (got,) = run_search(Flat(vocab), make_sources(0), 1, replace(search, beam_size=4, n_best=4), (3, 5))
    assert to_ids(got) == [((), True), ((2,), False), ((4,), False), ((6,), False)]


@pytest.mark.parametrize("never", [(), (PAD, 4)])
@pytest.mark.parametrize("max_length", [1, 5, 12])
def test_a_beam_of_one_is_greedy(max_length: int, never: tuple[int, ...]) -> None:
    rows = make_sources(*range(20))
    got = beam_search(
        ToyModel(6), rows, **KINDS, max_length=max_length, options=SearchOptions(beam_size=1), suppressed_tokens=never
    )
    wanted = greedy_search(ToyModel(6), rows, **KINDS, max_length=max_length, suppressed_tokens=never)
    assert got.tokens[:, 0].tolist() == wanted.tolist()
    assert not set(wanted.flatten().tolist()) & {START, *never}
    if max_length == 12:
        assert (wanted == END).any(1).sum() > 10


def test_of_equally_likely_tokens_a_beam_of_one_takes_the_one_that_greedy_takes() -> None:
    rows, toy = make_sources(*range(40)), ToyModel(300, 1.0, has_ties=True)
    got = beam_search(toy, rows, **KINDS, max_length=8, options=SearchOptions(beam_size=1))
    assert got.tokens[:, 0].tolist() == greedy_search(toy, rows, **KINDS, max_length=8).tolist()


@pytest.mark.parametrize("beam_size", [1, 3])
def test_neighbours_change_nothing(beam_size: int) -> None:
    search = SearchOptions(beam_size=beam_size, n_best=beam_size)
    together = run_search(ToyModel(7), make_sources(*range(10)), 15, search)
    assert together == [run_search(ToyModel(7), make_sources(row), 15, search)[0] for row in range(10)]


# --- when to stop ----------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(searching, "can_poll_device", lambda t, device: t % 8 == 7)
    assert run_search(toy, rows, 20, search) == stopped
    monkeypatch.setattr(searching, "find_done_sources", never_done_sources)
    assert run_search(toy, rows, 20, search) == stopped
    assert steps < 20 or search.compute_length_penalty(20) > 10  # lengths that gain so much may all win


def test_it_stops_as_soon_as_nothing_better_can_come() -> None:
    class Sure(ToyModel):
        """Behind token 3 an end is certain; anything else is a hundred times less likely."""

        def logits(self, source: int, read: Tokens) -> Tensor:
            return torch.tensor([-9.0, 9.0 if read[-1] == 3 else -9.0, -4.0, 1.0])

    toy = Sure(4)
    (got,) = run_search(toy, make_sources(0), 50, SearchOptions())
    assert to_ids(got) == [((3,), True)]
    assert len(toy.step_rows) < 10
    toy.step_rows.clear()
    greedy_search(toy, make_sources(0), **KINDS, max_length=50)
    assert len(toy.step_rows) == 2


def test_patience_stops_when_so_many_have_ended() -> None:
    toy, rows = ToyModel(5, 1.0), make_sources(*range(30))
    steps, best = [], []
    for patience in (1.0, 3.0, None):
        toy.step_rows.clear()
        got = run_search(toy, rows, 25, SearchOptions(beam_size=3, length_penalty=2.0, patience=patience))
        steps.append(len(toy.step_rows))
        best.append([one[0].score for one in got])
    assert steps == sorted(steps)
    assert steps[0] < steps[2]
    assert all(list(scores) == sorted(scores) for scores in zip(*best, strict=True))
    assert best[0] != best[2]


def test_a_longer_hypothesis_gains_by_the_penalty() -> None:
    rows, lengths = make_sources(*range(20)), []
    for alpha in (0.0, 3.0):
        got = run_search(ToyModel(4, 1.0), rows, 12, SearchOptions(beam_size=12, length_penalty=alpha))
        lengths.append([len(one[0].token_ids) for one in got])
    assert all(short <= long for short, long in zip(*lengths, strict=True))
    assert sum(lengths[0]) < sum(lengths[1])


def test_greedy_stops_when_all_have_ended() -> None:
    toy = ToyModel(4)
    ids = greedy_search(toy, make_sources(*range(5)), **KINDS, max_length=200)
    assert ids.shape == (5, 200)
    assert len(toy.step_rows) == int((ids != END).sum(1).max()) + 1 < 200


# --- the best of many, told exactly ----------------------------------------------------------------------------------


def topk_by_sorting(values: Tensor, n: int) -> list[list[list[int]]]:
    return [
        [sorted(range(len(one)), key=lambda place: (-one[place], place))[:n] for one in row] for row in values.tolist()
    ]


@pytest.mark.parametrize("kind", ["ties", "more ties", "by chance", "mostly forbidden", "rising", "nothing"])
@pytest.mark.parametrize("vocab", [1, 5, 300, 1024, 1025, 1300, 3000])
def test_the_likeliest_are_those_of_a_plain_sort(vocab: int, kind: str) -> None:
    values = {
        "ties": torch.randint(-40, 40, (2, 3, vocab)) / 8,
        "more ties": torch.randint(-1, 2, (2, 3, vocab)) * torch.tensor(-0.0 if vocab % 2 else 2.0),
        "by chance": torch.randn(2, 3, vocab, dtype=torch.float64).float(),
        "mostly forbidden": torch.where(torch.rand(2, 3, vocab) < 0.999, NEG_INF, 1.0),
        "rising": torch.arange(6 * vocab).view(2, 3, vocab) // 3 * -1.0,
        "nothing": torch.full((2, 3, vocab), NEG_INF),
    }[kind]
    for n in (1, 2, 3, 8, 20):
        got, places = stable_topk(values, n)
        assert places.tolist() == topk_by_sorting(values, n)
        assert torch.equal(got, values.gather(-1, places))


def test_the_first_of_equal_values_is_the_first_whatever_their_sign() -> None:
    values = torch.tensor([-1.0, -0.0, 0.0, 2.0, -0.0, 2.0, NEG_INF, 1e-45, -1e-45, NEG_INF, float("inf")])
    assert stable_topk_indices(values, 11).tolist() == [10, 3, 5, 7, 1, 2, 4, 8, 0, 6, 9]


def test_of_equally_good_hypotheses_the_earlier_is_kept() -> None:
    def pool(first_token: int, *scores: float) -> FinishedHypotheses:
        tokens = torch.arange(first_token, first_token + len(scores))[None, :, None]
        values = torch.tensor([scores])
        return FinishedHypotheses(tokens, values, values, torch.ones_like(tokens[..., 0]))

    plan = SearchContext(options=SearchOptions(), start=START, end=END, suppressed_tokens=torch.tensor([START]))
    got = pool(0, -1.0, -2.0, NEG_INF).merge(pool(3, -2.0, -1.0, -2.0), plan)
    assert got.tokens.flatten().tolist() == [0, 4, 1]
    assert got.scores.flatten().tolist() == [-1.0, -1.0, -2.0]


@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
def test_a_penalty_is_that_of_its_length_wherever_it_stands(kind: Any) -> None:
    search = SearchOptions(length_penalty=0.6, length_penalty_type=kind)
    plan = SearchContext(options=search, start=START, end=END, suppressed_tokens=torch.tensor([START]))
    lengths = torch.arange(1, 300)
    wanted = torch.tensor([search.compute_length_penalty(length) for length in lengths.tolist()])
    assert torch.equal(plan.compute_length_penalty(lengths), wanted)
    assert torch.equal(plan.compute_length_penalty(lengths[3:7]), wanted[3:7])


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_length": 0}, "`max_length` must be 1 or more tokens, but is 0"),
        ({"end": -1}, "`end` must be the id of a token, 0 or more, but is -1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, int], words: str) -> None:
    for search in (beam_search, greedy_search):
        with pytest.raises(ValueError, match=words):
            search(ToyModel(4), make_sources(0), **{**KINDS, "max_length": 3, **changes})


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
def test_a_search_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchOptions(**changes)


def test_a_hypothesis_of_the_toys_is_what_the_search_gives() -> None:
    """The comparisons above are worth something: a plain search and ours give the same facts."""
    toy = ToyModel(5)
    (got,) = run_search(toy, make_sources(1), 6, SearchOptions())
    assert isinstance(got[0], Hypothesis)
    assert got[0].log_prob == pytest.approx(search_plainly(toy, 1, 6, SearchOptions())[0].log_prob, abs=1e-5)
