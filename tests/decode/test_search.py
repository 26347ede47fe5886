"""Search on a toy writer whose every target can be counted out; the laws over whole models are in tests/laws."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from attent.decode import Hypotheses, beam, greedy
from attent.decode import search as searching

START, END, PAD = 0, 1, 2


class Prefixes:
    """What the toy keeps: for each row its source, and all that it has read."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.read = source.new_zeros(len(source), 0)
        self.moves = 0

    def reorder(self, rows: Tensor) -> None:
        self.source, self.read = self.source[rows], self.read[rows]
        self.moves += 1


class Toy:
    """Logits by chance, but always the same for the same source and prefix; `sharp` ones leave less doubt."""

    def __init__(self, vocab: int, sharp: float = 2.0) -> None:
        self.vocab, self.sharp = vocab, sharp
        self.rows: list[int] = []  # of each step

    def begin(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int) -> Prefixes:
        return Prefixes(source[:, 0])

    def step(self, target: Tensor, state: Prefixes, /) -> Tensor:
        state.read = torch.cat([state.read, target], 1)
        self.rows.append(len(target))
        rows = zip(state.source.tolist(), state.read.tolist(), strict=True)
        return torch.stack([self.logits(source, tuple(read)) for source, read in rows])[:, None]

    def logits(self, source: int, read: tuple[int, ...]) -> Tensor:
        chance = torch.Generator().manual_seed(hash((source, *read)) % 2**31)  # of numbers: the same in every process
        return self.sharp * torch.randn(self.vocab, generator=chance)

    def score(self, source: int, tokens: tuple[int, ...], penalty: float) -> float:
        total = 0.0
        for i, token in enumerate(tokens):
            total += float(self.logits(source, (START, *tokens[:i])).double().log_softmax(-1)[token])
        return total / ((5 + len(tokens)) / 6) ** penalty


def every_target(vocab: int, longest: int, never: set[int]) -> list[tuple[int, ...]]:
    """All that end, up to a length."""
    words = sorted(set(range(vocab)) - never - {END})
    return [(*body, END) for n in range(longest) for body in product(words, repeat=n)]


def sources(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None]


def found(hypotheses: Hypotheses, row: int) -> list[tuple[tuple[int, ...], float]]:
    rows = zip(*(x[row].tolist() for x in (hypotheses.tokens, hypotheses.lengths, hypotheses.scores)), strict=True)
    return [(tuple(tokens[:length]), score) for tokens, length, score in rows if score > -math.inf]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("n_best", [1, 5, None])
def test_a_beam_as_wide_as_all_there_is_finds_the_best(penalty: float, n_best: int | None) -> None:
    toy, rows = Toy(5), sources(*range(6))
    got = beam(
        toy, rows, start=START, end=END, max_length=4, beam_size=60, length_penalty=penalty, n_best=n_best, never=[PAD]
    )
    for row in range(6):
        wanted = {tokens: toy.score(row, tokens, penalty) for tokens in every_target(5, 4, {START, PAD})}
        best = sorted(wanted, key=wanted.__getitem__, reverse=True)
        ended = [(tokens, score) for tokens, score in found(got, row) if tokens[-1] == END]
        assert [tokens for tokens, _ in ended] == best[: n_best or len(best)]
        assert [score for _, score in ended] == pytest.approx([wanted[tokens] for tokens, _ in ended], abs=1e-5)


@pytest.mark.parametrize("beam_size", [1, 2, 3, 7])
def test_every_score_equals_its_score_by_reading(beam_size: int) -> None:
    toy = Toy(9)
    got = beam(toy, sources(3, 1, 4), start=START, end=END, max_length=6, beam_size=beam_size, length_penalty=0.6)
    for row, source in enumerate((3, 1, 4)):
        hypotheses = found(got, row)
        assert len({tokens for tokens, _ in hypotheses}) == beam_size
        for tokens, score in hypotheses:
            assert score == pytest.approx(toy.score(source, tokens, 0.6), abs=1e-5)
            assert START not in tokens
            assert END not in tokens[:-1]
        ends = [tokens[-1] == END for tokens, _ in hypotheses]
        assert ends == sorted(ends, reverse=True)
        for kind in (True, False):
            scores = [score for (_, score), ended in zip(hypotheses, ends, strict=True) if ended == kind]
            assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("never", [[], [PAD, 4]])
@pytest.mark.parametrize("max_length", [1, 5, 12])
def test_a_beam_of_one_is_greedy(max_length: int, never: list[int]) -> None:
    rows = sources(*range(20))
    got = beam(Toy(6), rows, start=START, end=END, max_length=max_length, beam_size=1, never=never)
    wanted = greedy(Toy(6), rows, start=START, end=END, max_length=max_length, never=never)
    assert got.tokens[:, 0].tolist() == wanted.tolist()
    assert not set(wanted.flatten().tolist()) & {START, *never}
    if max_length == 12:
        assert (wanted == END).any(1).sum() > 10


def test_of_equally_likely_tokens_a_beam_of_one_takes_the_one_that_greedy_takes() -> None:
    class Even(Toy):
        def logits(self, source: int, read: tuple[int, ...]) -> Tensor:
            return super().logits(source, read).round().bfloat16()

    rows = sources(*range(40))
    got = beam(Even(300, 1.0), rows, start=START, end=END, max_length=8, beam_size=1)
    assert got.tokens[:, 0].tolist() == greedy(Even(300, 1.0), rows, start=START, end=END, max_length=8).tolist()


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_stopping_early_changes_nothing(penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best one, asked for alone, is that of a search in which every hypothesis is written to its end."""
    rows = sources(*range(40))
    kinds = {"start": START, "end": END, "max_length": 20, "beam_size": 4, "length_penalty": penalty}
    short, long = Toy(6, 1.0), Toy(6, 1.0)
    one = beam(short, rows, **kinds, n_best=1)
    every = beam(long, rows, **kinds)
    assert one.tokens[:, 0].tolist() == every.tokens[:, 0].tolist()
    assert sum(short.rows) <= (1 if penalty > 1 else 0.7) * sum(long.rows)  # lengths that gain so much may all win
    monkeypatch.setattr(searching, "_may_ask", lambda t, device: t % 8 == 7)
    assert beam(Toy(6, 1.0), rows, **kinds, n_best=1).tokens.tolist() == one.tokens.tolist()
    monkeypatch.setattr(searching, "_may_ask", lambda t, device: False)
    assert beam(Toy(6, 1.0), rows, **kinds, n_best=1).tokens.tolist() == one.tokens.tolist()


def test_rows_of_finished_sources_are_given_up() -> None:
    toy = Toy(6)
    beam(toy, sources(*range(20)), start=START, end=END, max_length=30, beam_size=3, n_best=1)
    assert toy.rows[0] == 60
    assert toy.rows == sorted(toy.rows, reverse=True)
    assert toy.rows[-1] < 15
    assert len(toy.rows) < 30


def test_neighbours_change_nothing() -> None:
    kinds = {"start": START, "end": END, "max_length": 15, "beam_size": 3}
    together = beam(Toy(7), sources(*range(10)), **kinds)
    for row in range(10):
        alone = beam(Toy(7), sources(row), **kinds)
        assert found(alone, 0) == found(together, row)


def test_greedy_stops_when_all_have_ended() -> None:
    toy = Toy(4)
    ids = greedy(toy, sources(*range(5)), start=START, end=END, max_length=200)
    assert ids.shape == (5, 200)
    assert len(toy.rows) == int((ids != END).sum(1).max()) + 1 < 200


def test_a_longer_hypothesis_gains_by_the_penalty() -> None:
    kinds = {"start": START, "end": END, "max_length": 12, "beam_size": 12}
    rows = sources(*range(20))
    lengths = [beam(Toy(4, 1.0), rows, **kinds, length_penalty=alpha).lengths[:, 0] for alpha in (0.0, 3.0)]
    assert (lengths[0] <= lengths[1]).all()
    assert lengths[0].sum() < lengths[1].sum()


def test_what_was_cut_comes_behind_what_has_ended() -> None:
    class Endless(Toy):
        def logits(self, source: int, read: tuple[int, ...]) -> Tensor:
            return torch.tensor([-9.0, -3.0, -4.0, 2.0])

    got = beam(Endless(4), sources(0), start=START, end=END, max_length=5, beam_size=3)
    assert found(got, 0)[0][0][-1] == END
    assert found(got, 0)[-1][0] == (3, 3, 3, 3, 3)
    assert got.scores[0, -1] > got.scores[0, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beam_size": 0}, "`beam_size` must be 1 or more, but is 0"),
        ({"n_best": 5}, "`n_best` must be from 1 to `beam_size`=4, but is 5"),
        ({"length_penalty": -0.1}, "`length_penalty` must be 0 or more, but is -0.1"),
        ({"max_length": 0}, "`max_length` must be 1 or more tokens, but is 0"),
        ({"end": -1}, "`end` must be the id of a token, 0 or more, but is -1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        beam(Toy(4), sources(0), **{"start": START, "end": END, "max_length": 3, "beam_size": 4, **changes})
