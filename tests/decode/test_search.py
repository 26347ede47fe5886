"""Search on a toy writer whose every target can be counted out; the laws over whole models are in tests/laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attent.decode import beam, greedy
from attent.decode import search as searching
from attent.decode.options import Hypothesis, Search
from attent.decode.search import Plan, Pool, first, likeliest
from tests.decode.toys import END, PAD, START, Tokens, Toy, every_target, found, plain, sources, texts

NEVER = float("-inf")
KINDS: dict[str, Any] = {"start": START, "end": END}


def searched(toy: Toy, rows: Tensor, max_length: int, search: Search, never: tuple[int, ...] = ()) -> list[Any]:
    got = beam(toy, rows, **KINDS, max_length=max_length, search=search, never=never)
    return [found(got, row) for row in range(len(rows))]


# --- the best of all -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("n_best", [1, 5, 60])
def test_a_beam_as_wide_as_all_there_is_finds_the_best(kind: Any, alpha: float, n_best: int) -> None:
    toy, rows = Toy(5), sources(*range(6))
    search = Search(beam_size=60, length_penalty=alpha, length_penalty_type=kind, n_best=n_best)
    for source, got in enumerate(searched(toy, rows, 4, search, (PAD,))):
        every = every_target(5, 4, {START, PAD})
        wanted = {tokens: toy.log_prob(source, tokens, (PAD,)) / search.penalty(len(tokens)) for tokens in every}
        best = sorted(wanted, key=wanted.__getitem__, reverse=True)[:n_best]
        ended = [one for one in got if one.ended]
        assert [(*one.ids, END) for one in ended] == best
        assert [one.score for one in ended] == pytest.approx([wanted[tokens] for tokens in best], abs=1e-5)


@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
@pytest.mark.parametrize("beam_size", [1, 2, 3, 7])
def test_every_score_equals_its_score_by_reading(beam_size: int, kind: Any) -> None:
    toy, search = Toy(9), Search(beam_size=beam_size, n_best=beam_size, length_penalty_type=kind)
    for source, got in zip((3, 1, 4), searched(toy, sources(3, 1, 4), 6, search), strict=True):
        assert len(set(texts(got))) == beam_size
        for one in got:
            tokens = (*one.ids, END) if one.ended else one.ids
            log_prob = toy.log_prob(source, tokens)
            assert one.log_prob == pytest.approx(log_prob, abs=1e-5)
            assert one.score == pytest.approx(log_prob / search.penalty(len(tokens)), abs=1e-5)
            assert not {START, END} & set(one.ids)
            assert one.ended or len(one.ids) == 6


def test_what_is_best_comes_first_and_what_was_cut_last() -> None:
    search, cut = Search(beam_size=5, n_best=5), 0
    for got in searched(Toy(6), sources(*range(30)), 5, search):
        assert got == sorted(got, key=lambda one: (not one.ended, -one.score))
        cut += sum(not one.ended for one in got)
    assert 10 < cut < 130


def test_what_was_cut_comes_behind_what_has_ended_however_likely_it_is() -> None:
    class Endless(Toy):
        def logits(self, source: int, read: Tokens) -> Tensor:
            return torch.tensor([-9.0, -3.0 if len(read) == 1 else -50.0, -4.0, 2.0])

    (got,) = searched(Endless(4), sources(0), 5, Search(beam_size=3, n_best=3))
    assert texts(got)[:2] == [((), True), ((3, 3, 3, 3, 3), False)]
    assert got[1].score > got[0].score


# --- step for step as it is told ------------------------------------------------------------------------------------

SEARCHES = {
    "the default": Search(),
    "greedy": Search(beam_size=1),
    "all of four": Search(n_best=4),
    "of Wu": Search(beam_size=3, n_best=2, length_penalty_type="wu"),
    "no penalty": Search(beam_size=5, n_best=2, length_penalty_type="none"),
    "long is good": Search(beam_size=4, n_best=2, length_penalty=3.0),
    "impatient": Search(beam_size=4, n_best=3, patience=1.0),
    "rather patient": Search(beam_size=3, n_best=3, patience=1.7),
}


@pytest.mark.parametrize("even", [False, True], ids=["", "many-ties"])
@pytest.mark.parametrize("vocab", [4, 9, 40])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_it_finds_what_a_plain_search_finds_that_never_stops_early(search: Search, vocab: int, even: bool) -> None:
    """With a vocabulary smaller than twice the beam, too; and of equally good ones those of the lowest tokens."""
    toy, ends = Toy(vocab, 1.5, even=even), 0
    for source, got in enumerate(searched(toy, sources(*range(8)), 8, search, (2,))):
        wanted = plain(toy, source, 8, search, (2,))
        assert texts(got) == texts(wanted)
        assert [one.score for one in got] == pytest.approx([one.score for one in wanted], abs=1e-5)
        ends += got[0].ended
    assert vocab == 40 or ends > 1


@pytest.mark.parametrize("vocab", [9, 2100])
def test_of_all_equally_likely_tokens_the_lowest_are_taken(vocab: int) -> None:
    class Flat(Toy):
        def logits(self, source: int, read: Tokens) -> Tensor:
            return torch.zeros(self.vocab, dtype=torch.float64)

    search = Search(beam_size=3, n_best=3, length_penalty_type="none")
    (got,) = searched(Flat(vocab), sources(0), 3, search)
    assert texts(got) == [((), True), ((2,), True), ((2, 2), True)]  # an end is token 1; a beam's first is that of all
    (got,) = searched(Flat(vocab), sources(0), 2, search, (END + 1,))
    assert texts(got)[:2] == [((), True), ((3,), True)]
    (got,) = searched(Flat(vocab), sources(0), 1, replace(search, beam_size=4, n_best=4), (3, 5))
    assert texts(got) == [((), True), ((2,), False), ((4,), False), ((6,), False)]


@pytest.mark.parametrize("never", [(), (PAD, 4)])
@pytest.mark.parametrize("max_length", [1, 5, 12])
def test_a_beam_of_one_is_greedy(max_length: int, never: tuple[int, ...]) -> None:
    rows = sources(*range(20))
    got = beam(Toy(6), rows, **KINDS, max_length=max_length, search=Search(beam_size=1), never=never)
    wanted = greedy(Toy(6), rows, **KINDS, max_length=max_length, never=never)
    assert got.tokens[:, 0].tolist() == wanted.tolist()
    assert not set(wanted.flatten().tolist()) & {START, *never}
    if max_length == 12:
        assert (wanted == END).any(1).sum() > 10


def test_of_equally_likely_tokens_a_beam_of_one_takes_the_one_that_greedy_takes() -> None:
    rows, toy = sources(*range(40)), Toy(300, 1.0, even=True)
    got = beam(toy, rows, **KINDS, max_length=8, search=Search(beam_size=1))
    assert got.tokens[:, 0].tolist() == greedy(toy, rows, **KINDS, max_length=8).tolist()


@pytest.mark.parametrize("beam_size", [1, 3])
def test_neighbours_change_nothing(beam_size: int) -> None:
    search = Search(beam_size=beam_size, n_best=beam_size)
    together = searched(Toy(7), sources(*range(10)), 15, search)
    assert together == [searched(Toy(7), sources(row), 15, search)[0] for row in range(10)]


# --- when to stop ----------------------------------------------------------------------------------------------------


def never_done(sums: Tensor, lengths: Tensor, limits: Tensor, *others: object) -> Tensor:
    return lengths >= limits


@pytest.mark.parametrize("n_best", [1, 3])
@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_stopping_early_changes_nothing(alpha: float, kind: Any, n_best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, search = sources(*range(25)), Search(length_penalty=alpha, length_penalty_type=kind, n_best=n_best)
    toy = Toy(6, 1.0)
    stopped = searched(toy, rows, 20, search)
    steps = len(toy.rows)
    monkeypatch.setattr(searching, "may_ask", lambda t, device: t % 8 == 7)
    assert searched(toy, rows, 20, search) == stopped
    monkeypatch.setattr(searching, "finished", never_done)
    assert searched(toy, rows, 20, search) == stopped
    assert steps < 20 or search.penalty(20) > 10  # lengths that gain so much may all win


def test_it_stops_as_soon_as_nothing_better_can_come() -> None:
    class Sure(Toy):
        """Behind token 3 an end is certain; anything else is a hundred times less likely."""

        def logits(self, source: int, read: Tokens) -> Tensor:
            return torch.tensor([-9.0, 9.0 if read[-1] == 3 else -9.0, -4.0, 1.0])

    toy = Sure(4)
    (got,) = searched(toy, sources(0), 50, Search())
    assert texts(got) == [((3,), True)]
    assert len(toy.rows) < 10
    toy.rows.clear()
    greedy(toy, sources(0), **KINDS, max_length=50)
    assert len(toy.rows) == 2


def test_patience_stops_when_so_many_have_ended() -> None:
    toy, rows = Toy(5, 1.0), sources(*range(30))
    steps, best = [], []
    for patience in (1.0, 3.0, None):
        toy.rows.clear()
        got = searched(toy, rows, 25, Search(beam_size=3, length_penalty=2.0, patience=patience))
        steps.append(len(toy.rows))
        best.append([one[0].score for one in got])
    assert steps == sorted(steps)
    assert steps[0] < steps[2]
    assert all(list(scores) == sorted(scores) for scores in zip(*best, strict=True))
    assert best[0] != best[2]


def test_a_longer_hypothesis_gains_by_the_penalty() -> None:
    rows, lengths = sources(*range(20)), []
    for alpha in (0.0, 3.0):
        got = searched(Toy(4, 1.0), rows, 12, Search(beam_size=12, length_penalty=alpha))
        lengths.append([len(one[0].ids) for one in got])
    assert all(short <= long for short, long in zip(*lengths, strict=True))
    assert sum(lengths[0]) < sum(lengths[1])


def test_greedy_stops_when_all_have_ended() -> None:
    toy = Toy(4)
    ids = greedy(toy, sources(*range(5)), **KINDS, max_length=200)
    assert ids.shape == (5, 200)
    assert len(toy.rows) == int((ids != END).sum(1).max()) + 1 < 200


# --- the best of many, told exactly ----------------------------------------------------------------------------------


def by_sorting(values: Tensor, n: int) -> list[list[list[int]]]:
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
        "mostly forbidden": torch.where(torch.rand(2, 3, vocab) < 0.999, NEVER, 1.0),
        "rising": torch.arange(6 * vocab).view(2, 3, vocab) // 3 * -1.0,
        "nothing": torch.full((2, 3, vocab), NEVER),
    }[kind]
    for n in (1, 2, 3, 8, 20):
        got, places = likeliest(values, n)
        assert places.tolist() == by_sorting(values, n)
        assert torch.equal(got, values.gather(-1, places))


def test_the_first_of_equal_values_is_the_first_whatever_their_sign() -> None:
    values = torch.tensor([-1.0, -0.0, 0.0, 2.0, -0.0, 2.0, NEVER, 1e-45, -1e-45, NEVER, float("inf")])
    assert first(values, 11).tolist() == [10, 3, 5, 7, 1, 2, 4, 8, 0, 6, 9]


def test_of_equally_good_hypotheses_the_earlier_is_kept() -> None:
    def pool(first_token: int, *scores: float) -> Pool:
        tokens = torch.arange(first_token, first_token + len(scores))[None, :, None]
        values = torch.tensor([scores])
        return Pool(tokens, values, values, torch.ones_like(tokens[..., 0]))

    plan = Plan(search=Search(), start=START, end=END, never=torch.tensor([START]))
    got = pool(0, -1.0, -2.0, NEVER).merged(pool(3, -2.0, -1.0, -2.0), plan)
    assert got.tokens.flatten().tolist() == [0, 4, 1]
    assert got.scores.flatten().tolist() == [-1.0, -1.0, -2.0]


@pytest.mark.parametrize("kind", ["avg", "wu", "none"])
def test_a_penalty_is_that_of_its_length_wherever_it_stands(kind: Any) -> None:
    search = Search(length_penalty=0.6, length_penalty_type=kind)
    plan = Plan(search=search, start=START, end=END, never=torch.tensor([START]))
    lengths = torch.arange(1, 300)
    wanted = torch.tensor([search.penalty(length) for length in lengths.tolist()])
    assert torch.equal(plan.penalty(lengths), wanted)
    assert torch.equal(plan.penalty(lengths[3:7]), wanted[3:7])


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_length": 0}, "`max_length` must be 1 or more tokens, but is 0"),
        ({"end": -1}, "`end` must be the id of a token, 0 or more, but is -1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, int], words: str) -> None:
    for search in (beam, greedy):
        with pytest.raises(ValueError, match=words):
            search(Toy(4), sources(0), **{**KINDS, "max_length": 3, **changes})


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
        ({"groups": 3}, "`beam_size`=4 must be a multiple of `groups`, but that is 3"),
    ],
)
def test_a_search_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Search(**changes)


def test_a_hypothesis_of_the_toys_is_what_the_search_gives() -> None:
    """The comparisons above are worth something: a plain search and ours give the same facts."""
    toy = Toy(5)
    (got,) = searched(toy, sources(1), 6, Search())
    assert isinstance(got[0], Hypothesis)
    assert got[0].log_prob == pytest.approx(plain(toy, 1, 6, Search())[0].log_prob, abs=1e-5)
