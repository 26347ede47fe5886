"""Any number of sources through batches that are refilled: what comes out is what each source gives alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attent.decode import lanes
from attent.decode import search as searching
from attent.decode.engine import Session, Stopped, TorchEngine, alike
from attent.decode.lots import Found, Lot, No, in_order, sizes
from attent.decode.options import Hypothesis, Job, Sampling, Search
from attent.decode.rules import MinLength, NoLoops, Prefix
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import decoder_of
from attent.nn import AlibiConfig, LearnedConfig, RotaryConfig, StackConfig
from tests.decode.toys import END, PAD, START, Prefixes, Toy, as_found, log_probs, plain, texts

STACK = StackConfig(layers=2, width=16, heads=2, inner=24, dropout=0.0)


def engine(model: Any, size: int, **changes: Any) -> TorchEngine[Any]:
    kinds: dict[str, Any] = {
        "never": (PAD,),
        "batch_size": lambda source, target, beams: size,
        "make_rules": lambda search, jobs: ((), None),
        **changes,
    }
    return TorchEngine(model=model, start=START, end=END, pad=PAD, device=torch.device("cpu"), **kinds)


def jobs(count: int, seed: int = 0, vocab: int = 30) -> list[Job]:
    """Of all lengths and limits."""
    chance = random.Random(seed)
    return [
        Job(
            source=[3 + number % (vocab - 3), *(chance.randrange(3, vocab) for _ in range(chance.randrange(20))), END],
            number=number,
            limit=chance.choice((1, 2, 5, 9, 14)),
        )
        for number in range(count)
    ]


def searched(one: TorchEngine[Any], some: Sequence[Job], search: Search) -> list[list[Hypothesis]]:
    found = list(one.search(some, search))
    assert sorted(place for place, _ in found) == list(range(len(some)))
    return [best for _, best in sorted(found, key=lambda pair: pair[0])]


SEARCHES = {
    "greedy": Search(beam_size=1),
    "beam": Search(beam_size=3, n_best=3),
    "impatient": Search(beam_size=4, n_best=2, patience=1.0),
}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_refilled_batches_of_any_size_give_what_each_source_gives_alone(search: Search, size: int) -> None:
    toy, some = Toy(7), jobs(24)
    for job, got in zip(some, searched(engine(toy, size), some, search), strict=True):
        wanted = plain(toy, job.source[0], job.limit, search, (PAD,))
        assert texts(got) == texts(wanted)
        assert [one.score for one in got] == pytest.approx([one.score for one in wanted], abs=1e-5)
        assert [one.log_prob for one in got] == pytest.approx([one.log_prob for one in wanted], abs=1e-5)


def test_a_row_that_has_finished_is_used_again_and_the_batch_shrinks_at_the_end() -> None:
    toy, some = Toy(7), [replace(job, source=job.source[:1]) for job in jobs(40)]
    searched(engine(toy, 8), some, Search())
    steps = sum(job.limit for job in some)
    assert toy.rows[0] == 8
    assert toy.rows == sorted(toy.rows, reverse=True)
    assert toy.rows[-1] < 8
    assert sum(toy.rows) < steps  # to wait for the longest of every eight would take twice as many


def test_where_the_host_may_seldom_ask_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, some = Toy(7), jobs(30)
    wanted = searched(engine(toy, 6), some, Search())
    for every in (3, 8, 1000):
        monkeypatch.setattr("attent.decode.engine.may_ask", lambda t, device, every=every: t % every == every - 1)
        assert searched(engine(toy, 6), some, Search()) == wanted


def made(positions: Any, ends: float, **more: Any) -> Seq2Seq:
    """In float64, so that rounding decides nothing; loud, so that it ends here and there."""
    torch.manual_seed(0)
    stack = replace(STACK, positions=positions, **more)
    model = Seq2Seq(Seq2SeqConfig(vocab=30, encoder=stack, decoder=decoder_of(stack), output_bias=True)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        assert model.output.bias is not None
        model.output.bias[END] += ends
    return model.eval()


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize(
    ("positions", "ends"),
    [(LearnedConfig(max_length=21), 5.0), (RotaryConfig(), 2.0), (AlibiConfig(), 2.0)],
    ids=["learned", "rotary", "alibi"],
)
def test_a_model_in_refilled_batches_gives_what_it_gives_each_source_alone(
    positions: Any, ends: float, beam_size: int
) -> None:
    """Its cache, too, lets a row begin anew while others go on; learned positions are as many as the longest needs."""
    model, some = made(positions, ends, kv_heads=1, window=(4, None)), jobs(16)
    some[3] = replace(some[3], source=[*[5] * 20, END], limit=21)
    search = Search(beam_size=beam_size, n_best=beam_size)
    together, apart = (searched(engine(model, size), some, search) for size in (5, 1))
    assert [texts(one) for one in together] == [texts(one) for one in apart]
    ended = sum(one[0].ended for one in together)
    assert 2 < ended < 16
    for job, got in zip(some, together, strict=True):
        for one in got:
            assert one.log_prob == pytest.approx(read(model, job, one), abs=1e-5)


def read(model: Seq2Seq, job: Job, one: Hypothesis) -> float:
    """The log-probability by reading, without a cache."""
    target = [*one.ids, END] if one.ended else list(one.ids)
    with torch.no_grad():
        logits = model(torch.tensor([job.source]), torch.tensor([[START, *target[:-1]]]))[0]
    return float(log_probs(logits, [PAD])[torch.arange(len(target)), target].sum())


def test_limits_may_differ_down_to_one_token() -> None:
    toy = Toy(7, 0.1)  # which hardly ever ends soon
    some = [Job(source=[5], limit=limit) for limit in (1, 2, 3, 1, 7, 1)]
    got = searched(engine(toy, 2), some, Search())
    assert all(len(one[0].ids) + one[0].ended <= job.limit for one, job in zip(got, some, strict=True))
    assert got[0] == got[3] == got[5]
    assert texts(got[4]) == texts(plain(toy, 5, 7, Search(), (PAD,)))


def test_nothing_to_search_for_is_no_work() -> None:
    toy = Toy(7)
    assert list(engine(toy, 3).search([], Search())) == []
    assert toy.rows == []


# --- batches ---------------------------------------------------------------------------------------------------------


def test_sources_of_like_length_are_taken_together_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attent.decode.engine.SHORT", 8)
    lengths = [3, 70, 9, 31, 8, 30, 16, 1, 15]
    some = [Job(source=[3] * length) for length in lengths]
    all_of_them = range(len(some))
    groups = [[lengths[place] for place in group] for group in alike(some, all_of_them)]
    assert groups == [[70], [31, 30, 16], [15, 9, 8, 3, 1]]
    assert [[lengths[place] for place in group] for group in alike(some, {1, 3, 7})] == [[70], [31], [1]]
    monkeypatch.setattr("attent.decode.engine.SHORT", 100)
    assert [len(group) for group in alike(some, all_of_them)] == [9]


def test_the_pad_behind_short_sources_is_told_by_lengths() -> None:
    source, lengths = engine(Toy(7), 3).sources([Job(source=[5, 6, END]), Job(source=[END])])
    assert source.tolist() == [[5, 6, END], [END, PAD, PAD]]
    assert lengths.tolist() == [3, 1]


def test_what_is_done_is_given_at_once() -> None:
    """Results come as sources finish, not when all have."""
    toy, some = Toy(7), [replace(job, source=job.source[:1]) for job in jobs(40)]
    seen = []
    for _ in engine(toy, 4).search(some, Search()):
        seen.append(len(toy.rows))
    assert seen == sorted(seen)
    assert seen[5] < seen[-1] / 2


def test_stop_is_asked_at_every_step() -> None:
    toy, asked = Toy(7), []

    def stop() -> bool:
        asked.append(len(toy.rows))
        return len(asked) == 4

    with pytest.raises(Stopped):
        list(engine(toy, 4, stop=stop).search(jobs(20), Search()))
    assert asked == [0, 1, 2, 3]


# --- rules -----------------------------------------------------------------------------------------------------------


def test_what_a_rule_remembers_goes_with_its_row() -> None:
    """A row that is filled again has the rule's beginning of its own job; a beam has that of the beam it came from."""
    some = [replace(job, prefix=[4, 3 + job.number % 4], limit=12) for job in jobs(30)]

    def rules(search: Search, some: Sequence[Job]) -> tuple[tuple[Any, ...], None]:
        return (MinLength(4, END), NoLoops(), Prefix(some, None)), None

    toy = Toy(7)
    together, apart = (searched(engine(toy, size, make_rules=rules), some, Search()) for size in (7, 1))
    assert together == apart
    for job, (one,) in zip(some, together, strict=True):
        assert list(one.ids[:2]) == job.prefix
        assert len(one.ids) >= 4
        tokens = (*one.ids, END)[: len(one.ids) + one.ended]
        assert one.log_prob == pytest.approx(toy.log_prob(job.source[0], tokens, (PAD,)))


# --- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_best", [1, 3])
def test_chance_does_not_depend_on_neighbours_or_batches(n_best: int) -> None:
    toy, some = Toy(7), jobs(30)
    search = Search(sampling=Sampling(seed=4), n_best=n_best)
    wanted = searched(engine(toy, 1), some, search)
    for size in (2, 7, 100):
        assert searched(engine(toy, size), some, search) == wanted
    order = list(range(30))
    random.Random(1).shuffle(order)
    mixed = searched(engine(toy, 4), [some[place] for place in order], search)
    assert mixed == [wanted[place] for place in order]
    assert all(len(got) == n_best for got in wanted)
    assert searched(engine(toy, 7), some, replace(search, sampling=Sampling(seed=5))) != wanted
    assert searched(engine(toy, 7), some, replace(search, groups=4)) == wanted  # who draws avoids nobody


def test_what_was_drawn_has_the_score_of_reading_it() -> None:
    toy, search = Toy(7), Search(sampling=Sampling(temperature=2.0), n_best=4)
    some = jobs(20)
    different = set()
    for job, got in zip(some, searched(engine(toy, 5), some, search), strict=True):
        for one in got:
            tokens = (*one.ids, END) if one.ended else one.ids
            assert one.log_prob == pytest.approx(toy.log_prob(job.source[0], tokens, (PAD,)), abs=1e-5)
            assert one.score == pytest.approx(one.log_prob / search.penalty(len(tokens)))
            assert one.ended or len(one.ids) == job.limit
            assert not {START, PAD, END} & set(one.ids)
            different.add((job.number, one.ids))
        assert got == sorted(got, key=lambda one: (not one.ended, -one.score))
    assert len(different) > 40


def test_targets_are_drawn_as_often_as_they_are_likely() -> None:
    toy, sampling = Toy(4, 1.0), Sampling(seed=2)
    some = [Job(source=[5], number=number, limit=2) for number in range(2000)]
    got = searched(engine(toy, 500, never=()), some, Search(sampling=sampling))
    drawn = [(*one.ids, END) if one.ended else one.ids for (one,) in got]
    for tokens in ((END,), (2, END), (3, 2)):
        chance = 1.0
        for i, token in enumerate(tokens):
            chances = toy.logits(5, (START, *tokens[:i])).softmax(-1)
            chance *= float(chances[token] / (1 - chances[START]))  # it is never written: others share its chance
        assert abs(drawn.count(tokens) - 2000 * chance) < 4 * (2000 * chance * (1 - chance)) ** 0.5


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_that_pay_nothing_each_find_what_a_beam_of_their_size_finds(groups: int) -> None:
    toy, some = Toy(9), jobs(20)
    got = searched(engine(toy, 6), some, Search(beam_size=6, groups=groups, diversity=0.0))
    wanted = searched(engine(toy, 6), some, Search(beam_size=6 // groups))
    assert [texts(one) for one in got] == [texts(one) for one in wanted]


def test_one_group_is_a_plain_beam_whatever_it_would_pay() -> None:
    toy, some, search = Toy(9), jobs(20), Search(beam_size=4, n_best=4)
    assert searched(engine(toy, 6), some, replace(search, diversity=9.0)) == searched(engine(toy, 6), some, search)


def test_groups_avoid_one_another_and_keep_the_scores_of_the_model() -> None:
    toy, search = Toy(9), Search(beam_size=4, n_best=4, groups=4, diversity=50.0)
    for limit in (1, 8):
        some, beginnings = [replace(job, limit=limit) for job in jobs(20)], 0
        for job, got in zip(some, searched(engine(toy, 6), some, search), strict=True):
            beginnings += len({(*one.ids, END)[0] for one in got})
            for one in got:
                tokens = (*one.ids, END) if one.ended else one.ids
                assert one.log_prob == pytest.approx(toy.log_prob(job.source[0], tokens, (PAD,)), abs=1e-4)
        plainly = searched(engine(toy, 6), some, replace(search, groups=1))
        if limit == 1:
            assert beginnings == 80  # who pays so much takes no token that another takes at the same step
        else:
            assert beginnings > 1.3 * sum(len({(*one.ids, END)[0] for one in got}) for got in plainly)


@pytest.mark.parametrize("diversity", [0.1, 0.5, 2.0])
def test_groups_give_no_text_twice_and_the_best_first(diversity: float) -> None:
    toy, some = Toy(12), jobs(20)
    different = []
    for groups in (1, 3):
        search = Search(beam_size=6, n_best=6, groups=groups, diversity=diversity)
        found = searched(engine(toy, 9), some, search)
        for job, got in zip(some, found, strict=True):
            assert len(set(texts(got))) == len(got)
            for one in got:
                tokens = (*one.ids, END) if one.ended else one.ids
                assert one.log_prob == pytest.approx(toy.log_prob(job.source[0], tokens, (PAD,)), abs=1e-4)
            assert got == sorted(got, key=lambda one: (not one.ended, -one.score))
        different.append(found)
    assert different[0] != different[1]
    if diversity >= 0.5:  # who pays little goes another's way to the end
        assert all(len(got) == 6 for job, got in zip(some, found, strict=True) if job.limit > 8)


# --- the lane --------------------------------------------------------------------------------------------------------


class Failing:
    """A lane that has room for two, and the next time no compiler, or no memory."""

    def __init__(self, found: Sequence[list[Hypothesis]], error: Exception) -> None:
        self.found_for, self.error = found, error
        self.given: list[int] = []

    def takes(self, lot: Lot, plan: object) -> bool:
        return len(lot) <= 2

    def found(self, model: object, lot: Lot, *_: Any) -> Found:
        if self.given:
            raise self.error
        self.given = (lot.ids[lot.memory] - 3).tolist()  # how `jobs` begins a source
        best = [self.found_for[place][0] for place in self.given]
        return as_found(best)


@pytest.mark.parametrize(
    ("error", "again"), [(RuntimeError("no C compiler\nat all"), False), (torch.OutOfMemoryError("full"), True)]
)
def test_what_the_lane_leaves_is_found_all_the_same(
    error: Exception, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Seq2Seq(Seq2SeqConfig(vocab=30, encoder=STACK, decoder=decoder_of(STACK), start=START, end=END)).eval()
    some, search = jobs(6), Search(beam_size=2)
    wanted = searched(engine(model, 3), some, search)
    failing, said = Failing(wanted, error), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(lanes, "may_have", lambda *_: True)
        patched.setattr(lanes, "lane_of", lambda *_: failing)
        got = searched(engine(model, 3, say=said.append), some, search)
    assert [texts(one) for one in got] == [texts(one) for one in wanted]
    assert len(failing.given) in (1, 2)
    assert all(got[place] == wanted[place] for place in failing.given)
    (sentence,) = said
    assert sentence.startswith(f"our own kernels fail here ({type(error).__name__}: {str(error).splitlines()[0]});")
    assert (model not in lanes.FAILED) == again


def test_a_lane_that_is_stopped_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(6, 1.0)
    failing = Failing(searched(engine(toy, 3), jobs(6), Search()), Stopped())
    monkeypatch.setattr(lanes, "may_have", lambda *_: True)
    monkeypatch.setattr(lanes, "lane_of", lambda *_: failing)
    with pytest.raises(Stopped):
        searched(engine(toy, 3), jobs(6), Search())


def test_there_are_as_many_rows_as_the_longest_targets_leave_room_for() -> None:
    """Of sources and targets that have nothing to do with one another, too; 1,000 tokens find room here."""
    one = engine(Toy(6, 1.0), 1, batch_size=lambda source, target, beams: max(1, 1000 // (source + target)))
    short = [Job(source=[3] * 90, limit=10)] * 2000
    assert one._most(lot_of(short), 1) == 10
    assert one._most(lot_of([*short, *[Job(source=[3], limit=99)] * 500]), 1) == 10
    assert one._most(lot_of([Job(source=[3], limit=499), *[Job(source=[3], limit=9)] * 500]), 1) == 50
    assert one._most(lot_of([Job(source=[3], limit=5000)]), 1) == 1


def lot_of(some: Sequence[Job]) -> Lot:
    return Lot.of([some[place] for place in in_order(*sizes(some))], no_loops=False)


def test_a_lot_is_given_back_where_there_is_no_lane_or_none_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Seq2Seq(Seq2SeqConfig(vocab=30, encoder=STACK, decoder=decoder_of(STACK), start=START, end=END)).eval()
    lot, said = lot_of(jobs(6)), list[str]()
    one = engine(model, 3, say=said.append)
    assert one.search_lot(lot, Search()) is No.LANE  # a CPU has none
    monkeypatch.setattr(lanes, "lane_of", lambda *_: Taking(room=5))
    assert one.search_lot(lot, Search()) is No.ROOM
    monkeypatch.setattr(lanes, "lane_of", lambda *_: Taking(room=6, memory=5))
    assert one.search_lot(lot, Search()) is No.ROOM
    monkeypatch.setattr(lanes, "lane_of", lambda *_: Taking(room=6))
    assert one.search_lot(lot, Search()) == (6, 3)  # with as many rows as there is room for
    assert replace(one, record=False).search_lot(lot, Search()) is No.LANE
    assert not said
    monkeypatch.setattr(lanes, "lane_of", lambda *_: Taking(room=6, error=RuntimeError("no C compiler")))
    assert one.search_lot(lot, Search()) is No.LANE
    assert "our own kernels fail here (RuntimeError: no C compiler)" in said[0]


@dataclass(frozen=True, kw_only=True)
class Taking:
    """A lane that finds how many it was given, and for how many rows."""

    room: int
    memory: int = 100
    error: Exception | None = None

    def takes(self, lot: Lot, plan: object) -> bool:
        return len(lot) <= self.room

    def found(self, model: object, lot: Lot, plan: object, most: int, *_: Any) -> Any:
        if self.error is not None:
            raise self.error
        return (len(lot), most) if len(lot) <= self.memory else None


# --- several threads -------------------------------------------------------------------------------------------------


def test_a_thread_makes_its_lot_and_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, ready, done = threading.Lock(), threading.Event(), threading.Event()
    toy, real, asked = Toy(7), Lot.of, []

    def of(some: Sequence[Job], no_loops: bool) -> Lot:
        ready.set()
        return real(some, no_loops)

    monkeypatch.setattr(Lot, "of", of)
    monkeypatch.setattr(lanes, "may_have", lambda *_: True)
    monkeypatch.setattr(lanes, "lane_of", lambda *_: asked.append(turn.locked()))  # there is none after all
    one = engine(toy, 4, turn=turn)
    thread = threading.Thread(target=lambda: (searched(one, jobs(6), Search()), done.set()))
    with turn:
        thread.start()
        assert ready.wait(30)
        assert not done.wait(0.1)
        assert not toy.rows
        assert not asked
    assert done.wait(30)
    thread.join()
    assert asked == [True]
    assert toy.rows
    assert not turn.locked()


def test_who_stops_half_way_does_not_keep_the_turn() -> None:
    turn = threading.Lock()
    found = engine(Toy(7), 4, turn=turn).search(jobs(20), Search())
    next(found)
    assert not turn.locked()


# --- a session by itself ---------------------------------------------------------------------------------------------


def test_candidates_are_all_that_may_still_win() -> None:
    """What the best will be begins as one of them, at every step."""
    for source in range(20):
        toy, job = Toy(6, 1.0), Job(source=[source], limit=10)
        (best,) = plain(toy, source, 10, Search(), (PAD,))
        one = engine(toy, 1)
        plan = searching.Plan(search=Search(), start=START, end=END, never=torch.tensor([START, PAD]))
        session: Session[Prefixes] = Session(one, [job], [0], plan)
        while session.rows:
            session.step()
            if list(session.finished()):
                break
            assert any(list(best.ids[: len(ids)]) == ids for ids in session.candidates())
