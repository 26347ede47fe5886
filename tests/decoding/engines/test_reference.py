"""Any number of sources through batches that are refilled: what comes out is what each source gives alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attent.decoding import search as searching
from attent.decoding.constraints.min_length import MinLength
from attent.decoding.constraints.no_repeat import NoLoops
from attent.decoding.constraints.prefix import ForcedPrefix
from attent.decoding.engines.gpu import eligibility
from attent.decoding.engines.gpu.request_batch import (
    HypothesisBatch,
    RequestBatch,
    Unavailable,
    sort_by_length,
)
from attent.decoding.engines.reference import SearchCancelled, SearchSession, TorchEngine, group_by_length
from attent.decoding.options import Hypothesis, SamplingOptions, SearchOptions, SearchRequest
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import AlibiConfig, LearnedConfig, RotaryConfig, StackConfig
from tests.decoding.toy_models import (
    END,
    PAD,
    START,
    ToyModel,
    ToyState,
    compute_log_probs,
    make_hypothesis_batch,
    search_plainly,
    to_ids,
)

STACK = StackConfig(layers=2, width=16, heads=2, ffn_width=24, dropout=0.0)


def make_engine(model: Any, size: int, **changes: Any) -> TorchEngine[Any]:
    kinds: dict[str, Any] = {
        "suppressed_tokens": (PAD,),
        "choose_batch_size": lambda source, target, beams: size,
        "build_constraints": lambda search, jobs: ((), None),
        **changes,
    }
    return TorchEngine(model=model, start=START, end=END, pad=PAD, device=torch.device("cpu"), **kinds)


def make_requests(count: int, seed: int = 0, vocab: int = 30) -> list[SearchRequest]:
    """Of all lengths and limits."""
    chance = random.Random(seed)
    return [
        SearchRequest(
            source_ids=[
                3 + number % (vocab - 3),
                *(chance.randrange(3, vocab) for _ in range(chance.randrange(20))),
                END,
            ],
            rng_key=number,
            max_length=chance.choice((1, 2, 5, 9, 14)),
        )
        for number in range(count)
    ]


def run_search(one: TorchEngine[Any], some: Sequence[SearchRequest], search: SearchOptions) -> list[list[Hypothesis]]:
    found = list(one.search(some, search))
    assert sorted(place for place, _ in found) == list(range(len(some)))
    return [best for _, best in sorted(found, key=lambda pair: pair[0])]


SEARCHES = {
    "greedy": SearchOptions(beam_size=1),
    "beam": SearchOptions(beam_size=3, n_best=3),
    "impatient": SearchOptions(beam_size=4, n_best=2, patience=1.0),
}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_refilled_batches_of_any_size_give_what_each_source_gives_alone(search: SearchOptions, size: int) -> None:
    toy, some = ToyModel(7), make_requests(24)
    for job, got in zip(some, run_search(make_engine(toy, size), some, search), strict=True):
        wanted = search_plainly(toy, job.source_ids[0], job.max_length, search, (PAD,))
        assert to_ids(got) == to_ids(wanted)
        assert [one.score for one in got] == pytest.approx([one.score for one in wanted], abs=1e-5)
        assert [one.log_prob for one in got] == pytest.approx([one.log_prob for one in wanted], abs=1e-5)


def test_a_row_that_has_finished_is_used_again_and_the_batch_shrinks_at_the_end() -> None:
    toy, some = ToyModel(7), [replace(job, source_ids=job.source_ids[:1]) for job in make_requests(40)]
    run_search(make_engine(toy, 8), some, SearchOptions())
    steps = sum(job.max_length for job in some)
    assert toy.step_rows[0] == 8
    assert toy.step_rows == sorted(toy.step_rows, reverse=True)
    assert toy.step_rows[-1] < 8
    assert sum(toy.step_rows) < steps  # to wait for the longest of every eight would take twice as many


def test_where_the_host_may_seldom_ask_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, some = ToyModel(7), make_requests(30)
    wanted = run_search(make_engine(toy, 6), some, SearchOptions())
    for every in (3, 8, 1000):
        monkeypatch.setattr(
            "attent.decoding.engines.reference.can_poll_device", lambda t, device, every=every: t % every == every - 1
        )
        assert run_search(make_engine(toy, 6), some, SearchOptions()) == wanted


def make_model(positions: Any, ends: float, **more: Any) -> Seq2Seq:
    """In float64, so that rounding decides nothing; loud, so that it ends here and there."""
    torch.manual_seed(0)
    stack = replace(STACK, positions=positions, **more)
    model = Seq2Seq(Seq2SeqConfig(vocab=30, encoder=stack, decoder=mirror_encoder(stack), output_bias=True)).double()
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
    model, some = make_model(positions, ends, kv_heads=1, window=(4, None)), make_requests(16)
    some[3] = replace(some[3], source_ids=[*[5] * 20, END], max_length=21)
    search = SearchOptions(beam_size=beam_size, n_best=beam_size)
    together, apart = (run_search(make_engine(model, size), some, search) for size in (5, 1))
    assert [to_ids(one) for one in together] == [to_ids(one) for one in apart]
    ended = sum(one[0].is_finished for one in together)
    assert 2 < ended < 16
    for job, got in zip(some, together, strict=True):
        for one in got:
            assert one.log_prob == pytest.approx(score_hypothesis(model, job, one), abs=1e-5)


def score_hypothesis(model: Seq2Seq, job: SearchRequest, one: Hypothesis) -> float:
    """The log-probability by reading, without a cache."""
    target = [*one.token_ids, END] if one.is_finished else list(one.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([job.source_ids]), torch.tensor([[START, *target[:-1]]]))[0]
    return float(compute_log_probs(logits, [PAD])[torch.arange(len(target)), target].sum())


def test_limits_may_differ_down_to_one_token() -> None:
    toy = ToyModel(7, 0.1)  # which hardly ever ends soon
    some = [SearchRequest(source_ids=[5], max_length=limit) for limit in (1, 2, 3, 1, 7, 1)]
    got = run_search(make_engine(toy, 2), some, SearchOptions())
    assert all(len(one[0].token_ids) + one[0].is_finished <= job.max_length for one, job in zip(got, some, strict=True))
    assert got[0] == got[3] == got[5]
    assert to_ids(got[4]) == to_ids(search_plainly(toy, 5, 7, SearchOptions(), (PAD,)))


def test_nothing_to_search_for_is_no_work() -> None:
    toy = ToyModel(7)
    assert list(make_engine(toy, 3).search([], SearchOptions())) == []
    assert toy.step_rows == []


# --- batches ---------------------------------------------------------------------------------------------------------


def test_sources_of_like_length_are_taken_together_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attent.decoding.engines.reference.MIN_GROUP_LENGTH", 8)
    lengths = [3, 70, 9, 31, 8, 30, 16, 1, 15]
    some = [SearchRequest(source_ids=[3] * length) for length in lengths]
    all_of_them = range(len(some))
    groups = [[lengths[place] for place in group] for group in group_by_length(some, all_of_them)]
    assert groups == [[70], [31, 30, 16], [15, 9, 8, 3, 1]]
    assert [[lengths[place] for place in group] for group in group_by_length(some, {1, 3, 7})] == [[70], [31], [1]]
    monkeypatch.setattr("attent.decoding.engines.reference.MIN_GROUP_LENGTH", 100)
    assert [len(group) for group in group_by_length(some, all_of_them)] == [9]


def test_the_pad_behind_short_sources_is_told_by_lengths() -> None:
    source, lengths = make_engine(ToyModel(7), 3).pad_sources(
        [SearchRequest(source_ids=[5, 6, END]), SearchRequest(source_ids=[END])]
    )
    assert source.tolist() == [[5, 6, END], [END, PAD, PAD]]
    assert lengths.tolist() == [3, 1]


def test_what_is_done_is_given_at_once() -> None:
    """Results come as sources finish, not when all have."""
    toy, some = ToyModel(7), [replace(job, source_ids=job.source_ids[:1]) for job in make_requests(40)]
    seen = []
    for _ in make_engine(toy, 4).search(some, SearchOptions()):
        seen.append(len(toy.step_rows))
    assert seen == sorted(seen)
    assert seen[5] < seen[-1] / 2


def test_stop_is_asked_at_every_step() -> None:
    toy, asked = ToyModel(7), []

    def stop() -> bool:
        asked.append(len(toy.step_rows))
        return len(asked) == 4

    with pytest.raises(SearchCancelled):
        list(make_engine(toy, 4, should_stop=stop).search(make_requests(20), SearchOptions()))
    assert asked == [0, 1, 2, 3]


# --- rules -----------------------------------------------------------------------------------------------------------


def test_what_a_rule_remembers_goes_with_its_row() -> None:
    """A row that is filled again has the rule's beginning of its own job; a beam has that of the beam it came from."""
    some = [replace(job, prefix_ids=[4, 3 + job.rng_key % 4], max_length=12) for job in make_requests(30)]

    def rules(search: SearchOptions, some: Sequence[SearchRequest]) -> tuple[tuple[Any, ...], None]:
        return (MinLength(4, END), NoLoops(), ForcedPrefix(some, None)), None

    toy = ToyModel(7)
    together, apart = (
        run_search(make_engine(toy, size, build_constraints=rules), some, SearchOptions()) for size in (7, 1)
    )
    assert together == apart
    for job, (one,) in zip(some, together, strict=True):
        assert list(one.token_ids[:2]) == job.prefix_ids
        assert len(one.token_ids) >= 4
        tokens = (*one.token_ids, END)[: len(one.token_ids) + one.is_finished]
        assert one.log_prob == pytest.approx(toy.log_prob(job.source_ids[0], tokens, (PAD,)))


# --- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_best", [1, 3])
def test_chance_does_not_depend_on_neighbours_or_batches(n_best: int) -> None:
    toy, some = ToyModel(7), make_requests(30)
    search = SearchOptions(sampling=SamplingOptions(seed=4), n_best=n_best)
    wanted = run_search(make_engine(toy, 1), some, search)
    for size in (2, 7, 100):
        assert run_search(make_engine(toy, size), some, search) == wanted
    order = list(range(30))
    random.Random(1).shuffle(order)
    mixed = run_search(make_engine(toy, 4), [some[place] for place in order], search)
    assert mixed == [wanted[place] for place in order]
    assert all(len(got) == n_best for got in wanted)
    assert run_search(make_engine(toy, 7), some, replace(search, sampling=SamplingOptions(seed=5))) != wanted
    assert run_search(make_engine(toy, 7), some, replace(search, beam_groups=4)) == wanted  # who draws avoids nobody


def test_what_was_drawn_has_the_score_of_reading_it() -> None:
    toy, search = ToyModel(7), SearchOptions(sampling=SamplingOptions(temperature=2.0), n_best=4)
    some = make_requests(20)
    different = set()
    for job, got in zip(some, run_search(make_engine(toy, 5), some, search), strict=True):
        for one in got:
            tokens = (*one.token_ids, END) if one.is_finished else one.token_ids
            assert one.log_prob == pytest.approx(toy.log_prob(job.source_ids[0], tokens, (PAD,)), abs=1e-5)
            assert one.score == pytest.approx(one.log_prob / search.compute_length_penalty(len(tokens)))
            assert one.is_finished or len(one.token_ids) == job.max_length
            assert not {START, PAD, END} & set(one.token_ids)
            different.add((job.rng_key, one.token_ids))
        assert got == sorted(got, key=lambda one: (not one.is_finished, -one.score))
    assert len(different) > 40


def test_targets_are_drawn_as_often_as_they_are_likely() -> None:
    toy, sampling = ToyModel(4, 1.0), SamplingOptions(seed=2)
    some = [SearchRequest(source_ids=[5], rng_key=number, max_length=2) for number in range(2000)]
    got = run_search(make_engine(toy, 500, suppressed_tokens=()), some, SearchOptions(sampling=sampling))
    drawn = [(*one.token_ids, END) if one.is_finished else one.token_ids for (one,) in got]
    for tokens in ((END,), (2, END), (3, 2)):
        chance = 1.0
        for i, token in enumerate(tokens):
            chances = toy.logits(5, (START, *tokens[:i])).softmax(-1)
            chance *= float(chances[token] / (1 - chances[START]))  # it is never written: others share its chance
        assert abs(drawn.count(tokens) - 2000 * chance) < 4 * (2000 * chance * (1 - chance)) ** 0.5


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_that_pay_nothing_each_find_what_a_beam_of_their_size_finds(groups: int) -> None:
    toy, some = ToyModel(9), make_requests(20)
    got = run_search(make_engine(toy, 6), some, SearchOptions(beam_size=6, beam_groups=groups, diversity_penalty=0.0))
    wanted = run_search(make_engine(toy, 6), some, SearchOptions(beam_size=6 // groups))
    assert [to_ids(one) for one in got] == [to_ids(one) for one in wanted]


def test_one_group_is_a_plain_beam_whatever_it_would_pay() -> None:
    toy, some, search = ToyModel(9), make_requests(20), SearchOptions(beam_size=4, n_best=4)
    assert run_search(make_engine(toy, 6), some, replace(search, diversity_penalty=9.0)) == run_search(
        make_engine(toy, 6), some, search
    )


def test_groups_avoid_one_another_and_keep_the_scores_of_the_model() -> None:
    toy, search = ToyModel(9), SearchOptions(beam_size=4, n_best=4, beam_groups=4, diversity_penalty=50.0)
    for limit in (1, 8):
        some, beginnings = [replace(job, max_length=limit) for job in make_requests(20)], 0
        for job, got in zip(some, run_search(make_engine(toy, 6), some, search), strict=True):
            beginnings += len({(*one.token_ids, END)[0] for one in got})
            for one in got:
                tokens = (*one.token_ids, END) if one.is_finished else one.token_ids
                assert one.log_prob == pytest.approx(toy.log_prob(job.source_ids[0], tokens, (PAD,)), abs=1e-4)
        plainly = run_search(make_engine(toy, 6), some, replace(search, beam_groups=1))
        if limit == 1:
            assert beginnings == 80  # who pays so much takes no token that another takes at the same step
        else:
            assert beginnings > 1.3 * sum(len({(*one.token_ids, END)[0] for one in got}) for got in plainly)


@pytest.mark.parametrize("diversity", [0.1, 0.5, 2.0])
def test_groups_give_no_text_twice_and_the_best_first(diversity: float) -> None:
    toy, some = ToyModel(12), make_requests(20)
    different = []
    for groups in (1, 3):
        search = SearchOptions(beam_size=6, n_best=6, beam_groups=groups, diversity_penalty=diversity)
        found = run_search(make_engine(toy, 9), some, search)
        for job, got in zip(some, found, strict=True):
            assert len(set(to_ids(got))) == len(got)
            for one in got:
                tokens = (*one.token_ids, END) if one.is_finished else one.token_ids
                assert one.log_prob == pytest.approx(toy.log_prob(job.source_ids[0], tokens, (PAD,)), abs=1e-4)
            assert got == sorted(got, key=lambda one: (not one.is_finished, -one.score))
        different.append(found)
    assert different[0] != different[1]
    if diversity >= 0.5:  # who pays little goes another's way to the end
        assert all(len(got) == 6 for job, got in zip(some, found, strict=True) if job.max_length > 8)


# --- the lane --------------------------------------------------------------------------------------------------------


class FailingSearch:
    """A lane that has room for two, and the next time no compiler, or no memory."""

    def __init__(self, found: Sequence[list[Hypothesis]], error: Exception) -> None:
        self.found_for, self.error = found, error
        self.given: list[int] = []

    def has_room_for(self, lot: RequestBatch, plan: object) -> bool:
        return len(lot) <= 2

    def search(self, model: object, lot: RequestBatch, *_: Any) -> HypothesisBatch:
        if self.given:
            raise self.error
        self.given = (lot.token_ids[lot.memory_offsets] - 3).tolist()  # how `jobs` begins a source
        best = [self.found_for[place][0] for place in self.given]
        return make_hypothesis_batch(best)


@pytest.mark.parametrize(
    ("error", "again"), [(RuntimeError("no C compiler\nat all"), False), (torch.OutOfMemoryError("full"), True)]
)
def test_what_the_lane_leaves_is_found_all_the_same(
    error: Exception, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Seq2Seq(
        Seq2SeqConfig(vocab=30, encoder=STACK, decoder=mirror_encoder(STACK), start_id=START, end_id=END)
    ).eval()
    some, search = make_requests(6), SearchOptions(beam_size=2)
    wanted = run_search(make_engine(model, 3), some, search)
    failing, said = FailingSearch(wanted, error), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(eligibility, "can_try", lambda *_: True)
        patched.setattr(eligibility, "get_gpu_search", lambda *_: failing)
        got = run_search(make_engine(model, 3, notify=said.append), some, search)
    assert [to_ids(one) for one in got] == [to_ids(one) for one in wanted]
    assert len(failing.given) in (1, 2)
    assert all(got[place] == wanted[place] for place in failing.given)
    (sentence,) = said
    assert sentence.startswith(f"the GPU kernels failed ({type(error).__name__}: {str(error).splitlines()[0]});")
    assert (model not in eligibility.FAILED_MODELS) == again


def test_a_lane_that_is_stopped_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = ToyModel(6, 1.0)
    failing = FailingSearch(run_search(make_engine(toy, 3), make_requests(6), SearchOptions()), SearchCancelled())
    monkeypatch.setattr(eligibility, "can_try", lambda *_: True)
    monkeypatch.setattr(eligibility, "get_gpu_search", lambda *_: failing)
    with pytest.raises(SearchCancelled):
        run_search(make_engine(toy, 3), make_requests(6), SearchOptions())


def test_there_are_as_many_rows_as_the_longest_targets_leave_room_for() -> None:
    """Of sources and targets that have nothing to do with one another, too; 1,000 tokens find room here."""
    one = make_engine(
        ToyModel(6, 1.0), 1, choose_batch_size=lambda source, target, beams: max(1, 1000 // (source + target))
    )
    short = [SearchRequest(source_ids=[3] * 90, max_length=10)] * 2000
    assert one._choose_max_rows(make_batch(short), 1) == 10
    assert one._choose_max_rows(make_batch([*short, *[SearchRequest(source_ids=[3], max_length=99)] * 500]), 1) == 10
    assert (
        one._choose_max_rows(
            make_batch(
                [SearchRequest(source_ids=[3], max_length=499), *[SearchRequest(source_ids=[3], max_length=9)] * 500]
            ),
            1,
        )
        == 50
    )
    assert one._choose_max_rows(make_batch([SearchRequest(source_ids=[3], max_length=5000)]), 1) == 1


def make_batch(some: Sequence[SearchRequest]) -> RequestBatch:
    return RequestBatch.from_requests([some[place] for place in sort_by_length(some)], forbid_loops=False)


def test_a_lot_is_given_back_where_there_is_no_lane_or_none_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Seq2Seq(
        Seq2SeqConfig(vocab=30, encoder=STACK, decoder=mirror_encoder(STACK), start_id=START, end_id=END)
    ).eval()
    lot, said = make_batch(make_requests(6)), list[str]()
    one = make_engine(model, 3, notify=said.append)
    assert one.search_batch(lot, SearchOptions()) is Unavailable.UNSUPPORTED  # a CPU has none
    monkeypatch.setattr(eligibility, "get_gpu_search", lambda *_: LimitedSearch(room=5))
    assert one.search_batch(lot, SearchOptions()) is Unavailable.OUT_OF_MEMORY
    monkeypatch.setattr(eligibility, "get_gpu_search", lambda *_: LimitedSearch(room=6, memory=5))
    assert one.search_batch(lot, SearchOptions()) is Unavailable.OUT_OF_MEMORY
    monkeypatch.setattr(eligibility, "get_gpu_search", lambda *_: LimitedSearch(room=6))
    assert one.search_batch(lot, SearchOptions()) == (6, 3)  # with as many rows as there is room for
    assert replace(one, use_cuda_graphs=False).search_batch(lot, SearchOptions()) is Unavailable.UNSUPPORTED
    assert not said
    monkeypatch.setattr(
        eligibility, "get_gpu_search", lambda *_: LimitedSearch(room=6, error=RuntimeError("no C compiler"))
    )
    assert one.search_batch(lot, SearchOptions()) is Unavailable.UNSUPPORTED
    assert "the GPU kernels failed (RuntimeError: no C compiler)" in said[0]


@dataclass(frozen=True, kw_only=True)
class LimitedSearch:
    """A lane that finds how many it was given, and for how many rows."""

    room: int
    memory: int = 100
    error: Exception | None = None

    def has_room_for(self, lot: RequestBatch, plan: object) -> bool:
        return len(lot) <= self.room

    def search(self, model: object, lot: RequestBatch, plan: object, most: int, *_: Any) -> Any:
        if self.error is not None:
            raise self.error
        return (len(lot), most) if len(lot) <= self.memory else None


# --- several threads -------------------------------------------------------------------------------------------------


def test_a_thread_makes_its_lot_and_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, ready, done = threading.Lock(), threading.Event(), threading.Event()
    toy, real, asked = ToyModel(7), RequestBatch.from_requests, []

    def of(some: Sequence[SearchRequest], no_loops: bool) -> RequestBatch:
        ready.set()
        return real(some, no_loops)

    monkeypatch.setattr(RequestBatch, "from_requests", of)
    monkeypatch.setattr(eligibility, "can_try", lambda *_: True)
    monkeypatch.setattr(
        eligibility, "get_gpu_search", lambda *_: asked.append(turn.locked())
    )  # there is none after all
    one = make_engine(toy, 4, device_lock=turn)
    thread = threading.Thread(target=lambda: (run_search(one, make_requests(6), SearchOptions()), done.set()))
    with turn:
        thread.start()
        assert ready.wait(30)
        assert not done.wait(0.1)
        assert not toy.step_rows
        assert not asked
    assert done.wait(30)
    thread.join()
    assert asked == [True]
    assert toy.step_rows
    assert not turn.locked()


def test_who_stops_half_way_does_not_keep_the_turn() -> None:
    turn = threading.Lock()
    found = make_engine(ToyModel(7), 4, device_lock=turn).search(make_requests(20), SearchOptions())
    next(found)
    assert not turn.locked()


# --- a session by itself ---------------------------------------------------------------------------------------------


def test_candidates_are_all_that_may_still_win() -> None:
    """What the best will be begins as one of them, at every step."""
    for source in range(20):
        toy, job = ToyModel(6, 1.0), SearchRequest(source_ids=[source], max_length=10)
        (best,) = search_plainly(toy, source, 10, SearchOptions(), (PAD,))
        one = make_engine(toy, 1)
        plan = searching.SearchContext(
            options=SearchOptions(), start=START, end=END, suppressed_tokens=torch.tensor([START, PAD])
        )
        session: SearchSession[ToyState] = SearchSession(one, [job], [0], plan)
        while session.row_requests:
            session.step()
            if list(session.pop_finished()):
                break
            assert any(list(best.token_ids[: len(ids)]) == ids for ids in session.list_candidates())
