"""Batches that are refilled give what each source gives alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attent.decoding import search as searching
from attent.decoding.constraints.prefix import ForcedPrefix
from attent.decoding.constraints.token_rules import MinLength, NoLoops
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
    options: dict[str, Any] = {
        "suppressed_tokens": (PAD,),
        "choose_batch_size": lambda source, target, beams: size,
        "build_constraints": lambda search, requests: ((), None),
        **changes,
    }
    return TorchEngine(model=model, start_id=START, end_id=END, pad=PAD, device=torch.device("cpu"), **options)


def make_requests(count: int, seed: int = 0, vocab: int = 30) -> list[SearchRequest]:
    """Sources of all lengths, with different maximum target lengths."""
    rng = random.Random(seed)
    return [
        SearchRequest(
            source_ids=[
                3 + number % (vocab - 3),
                *(rng.randrange(3, vocab) for _ in range(rng.randrange(20))),
                END,
            ],
            rng_key=number,
            max_length=rng.choice((1, 2, 5, 9, 14)),
        )
        for number in range(count)
    ]


def run_search(
    engine: TorchEngine[Any], requests: Sequence[SearchRequest], options: SearchOptions
) -> list[list[Hypothesis]]:
    results = list(engine.search(requests, options))
    assert sorted(index for index, _ in results) == list(range(len(requests)))
    return [best for _, best in sorted(results, key=lambda pair: pair[0])]


SEARCHES = {
    "greedy": SearchOptions(beam_size=1),
    "beam": SearchOptions(beam_size=3, n_best=3),
    "impatient": SearchOptions(beam_size=4, n_best=2, patience=1.0),
}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_refilled_batches_equal_single_sources(search: SearchOptions, size: int) -> None:
    toy, requests = ToyModel(7), make_requests(24)
    for request, got in zip(requests, run_search(make_engine(toy, size), requests, search), strict=True):
        expected = search_plainly(toy, request.source_ids[0], request.max_length, search, (PAD,))
        assert to_ids(got) == to_ids(expected)
        assert [hypothesis.score for hypothesis in got] == pytest.approx(
            [hypothesis.score for hypothesis in expected], abs=1e-5
        )
        assert [hypothesis.log_prob for hypothesis in got] == pytest.approx(
            [hypothesis.log_prob for hypothesis in expected], abs=1e-5
        )


def test_finished_rows_are_refilled_and_the_batch_shrinks_at_the_end() -> None:
    toy, requests = ToyModel(7), [replace(request, source_ids=request.source_ids[:1]) for request in make_requests(40)]
    run_search(make_engine(toy, 8), requests, SearchOptions())
    steps = sum(request.max_length for request in requests)
    assert toy.step_rows[0] == 8
    assert toy.step_rows == sorted(toy.step_rows, reverse=True)
    assert toy.step_rows[-1] < 8
    assert sum(toy.step_rows) < steps  # fixed batches of eight would need twice as many


def test_rare_polling_gives_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, requests = ToyModel(7), make_requests(30)
    expected = run_search(make_engine(toy, 6), requests, SearchOptions())
    for every in (3, 8, 1000):
        monkeypatch.setattr(
            "attent.decoding.engines.reference.is_poll_step", lambda t, device, every=every: t % every == every - 1
        )
        assert run_search(make_engine(toy, 6), requests, SearchOptions()) == expected


def make_model(positions: Any, ends: float, **changes: Any) -> Seq2Seq:
    """In float64, so that rounding decides nothing; with large weights, so that targets end early."""
    torch.manual_seed(0)
    stack = replace(STACK, positions=positions, **changes)
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
def test_a_model_in_refilled_batches_equals_single_sources(positions: Any, ends: float, beam_size: int) -> None:
    """Rows of the cache restart while others continue; there are just enough learned positions."""
    model, requests = make_model(positions, ends, kv_heads=1, window=(4, None)), make_requests(16)
    requests[3] = replace(requests[3], source_ids=[*[5] * 20, END], max_length=21)
    search = SearchOptions(beam_size=beam_size, n_best=beam_size)
    together, apart = (run_search(make_engine(model, size), requests, search) for size in (5, 1))
    assert [to_ids(best) for best in together] == [to_ids(best) for best in apart]
    ended = sum(best[0].is_finished for best in together)
    assert 2 < ended < 16
    for request, got in zip(requests, together, strict=True):
        for hypothesis in got:
            assert hypothesis.log_prob == pytest.approx(score_hypothesis(model, request, hypothesis), abs=1e-5)


def score_hypothesis(model: Seq2Seq, request: SearchRequest, hypothesis: Hypothesis) -> float:
    """The log-probability by forced decoding, without a cache."""
    target = [*hypothesis.token_ids, END] if hypothesis.is_finished else list(hypothesis.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([request.source_ids]), torch.tensor([[START, *target[:-1]]]))[0]
    return float(compute_log_probs(logits, [PAD])[torch.arange(len(target)), target].sum())


def test_maximum_lengths_may_differ_down_to_one_token() -> None:
    toy = ToyModel(7, 0.1)  # rarely ends early
    requests = [SearchRequest(source_ids=[5], max_length=limit) for limit in (1, 2, 3, 1, 7, 1)]
    got = run_search(make_engine(toy, 2), requests, SearchOptions())
    assert all(
        len(best[0].token_ids) + best[0].is_finished <= request.max_length
        for best, request in zip(got, requests, strict=True)
    )
    assert got[0] == got[3] == got[5]
    assert to_ids(got[4]) == to_ids(search_plainly(toy, 5, 7, SearchOptions(), (PAD,)))


def test_no_requests_need_no_steps() -> None:
    toy = ToyModel(7)
    assert list(make_engine(toy, 3).search([], SearchOptions())) == []
    assert toy.step_rows == []


# --- batches ----------------------------------------------------------------------------------------------------------


def test_sources_are_grouped_by_length_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attent.decoding.engines.reference.MIN_GROUP_LENGTH", 8)
    lengths = [3, 70, 9, 31, 8, 30, 16, 1, 15]
    requests = [SearchRequest(source_ids=[3] * length) for length in lengths]
    everything = range(len(requests))
    groups = [[lengths[index] for index in group] for group in group_by_length(requests, everything)]
    assert groups == [[70], [31, 30, 16], [15, 9, 8, 3, 1]]
    assert [[lengths[index] for index in group] for group in group_by_length(requests, {1, 3, 7})] == [[70], [31], [1]]
    monkeypatch.setattr("attent.decoding.engines.reference.MIN_GROUP_LENGTH", 100)
    assert [len(group) for group in group_by_length(requests, everything)] == [9]


def test_sources_are_padded() -> None:
    source, lengths = make_engine(ToyModel(7), 3).pad_sources(
        [SearchRequest(source_ids=[5, 6, END]), SearchRequest(source_ids=[END])]
    )
    assert source.tolist() == [[5, 6, END], [END, PAD, PAD]]
    assert lengths.tolist() == [3, 1]


def test_results_come_as_sources_finish() -> None:
    toy, requests = ToyModel(7), [replace(request, source_ids=request.source_ids[:1]) for request in make_requests(40)]
    seen = []
    for _ in make_engine(toy, 4).search(requests, SearchOptions()):
        seen.append(len(toy.step_rows))
    assert seen == sorted(seen)
    assert seen[5] < seen[-1] / 2


def test_should_stop_is_called_at_every_step() -> None:
    toy, steps_seen = ToyModel(7), []

    def stop() -> bool:
        steps_seen.append(len(toy.step_rows))
        return len(steps_seen) == 4

    with pytest.raises(SearchCancelled):
        list(make_engine(toy, 4, should_stop=stop).search(make_requests(20), SearchOptions()))
    assert steps_seen == [0, 1, 2, 3]


# --- constraints ------------------------------------------------------------------------------------------------------


def test_constraint_states_follow_their_rows_and_beams() -> None:
    requests = [
        replace(request, prefix_ids=[4, 3 + request.rng_key % 4], max_length=12, forbid_loops=True)
        for request in make_requests(30)
    ]

    def build_constraints(options: SearchOptions, requests: Sequence[SearchRequest]) -> tuple[tuple[Any, ...], None]:
        return (MinLength(4, [END]), NoLoops(), ForcedPrefix(requests, None)), None

    toy = ToyModel(7)
    together, apart = (
        run_search(make_engine(toy, size, build_constraints=build_constraints), requests, SearchOptions())
        for size in (7, 1)
    )
    assert together == apart
    for request, (hypothesis,) in zip(requests, together, strict=True):
        assert list(hypothesis.token_ids[:2]) == request.prefix_ids
        assert len(hypothesis.token_ids) >= 4
        tokens = (*hypothesis.token_ids, END)[: len(hypothesis.token_ids) + hypothesis.is_finished]
        assert hypothesis.log_prob == pytest.approx(toy.log_prob(request.source_ids[0], tokens, (PAD,)))


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_best", [1, 3])
def test_sampling_does_not_depend_on_the_batch(n_best: int) -> None:
    toy, requests = ToyModel(7), make_requests(30)
    search = SearchOptions(sampling=SamplingOptions(seed=4), n_best=n_best)
    expected = run_search(make_engine(toy, 1), requests, search)
    for size in (2, 7, 100):
        assert run_search(make_engine(toy, size), requests, search) == expected
    order = list(range(30))
    random.Random(1).shuffle(order)
    mixed = run_search(make_engine(toy, 4), [requests[index] for index in order], search)
    assert mixed == [expected[index] for index in order]
    assert all(len(got) == n_best for got in expected)
    assert run_search(make_engine(toy, 7), requests, replace(search, sampling=SamplingOptions(seed=5))) != expected
    assert run_search(make_engine(toy, 7), requests, replace(search, beam_groups=4)) == expected  # no effect on samples


def test_a_sample_has_the_score_of_forced_decoding() -> None:
    toy, search = ToyModel(7), SearchOptions(sampling=SamplingOptions(temperature=2.0), n_best=4)
    requests = make_requests(20)
    different = set()
    for request, got in zip(requests, run_search(make_engine(toy, 5), requests, search), strict=True):
        for hypothesis in got:
            tokens = (*hypothesis.token_ids, END) if hypothesis.is_finished else hypothesis.token_ids
            assert hypothesis.log_prob == pytest.approx(toy.log_prob(request.source_ids[0], tokens, (PAD,)), abs=1e-5)
            assert hypothesis.score == pytest.approx(hypothesis.log_prob / search.compute_score_divisor(len(tokens)))
            assert hypothesis.is_finished or len(hypothesis.token_ids) == request.max_length
            assert not {START, PAD, END} & set(hypothesis.token_ids)
            different.add((request.rng_key, hypothesis.token_ids))
        assert got == sorted(got, key=lambda hypothesis: (not hypothesis.is_finished, -hypothesis.score))
    assert len(different) > 40


def test_targets_are_sampled_by_their_probability() -> None:
    toy, sampling = ToyModel(4, 1.0), SamplingOptions(seed=2)
    requests = [SearchRequest(source_ids=[5], rng_key=number, max_length=2) for number in range(2000)]
    got = run_search(make_engine(toy, 500, suppressed_tokens=()), requests, SearchOptions(sampling=sampling))
    samples = [
        (*hypothesis.token_ids, END) if hypothesis.is_finished else hypothesis.token_ids for (hypothesis,) in got
    ]
    for tokens in ((END,), (2, END), (3, 2)):
        probability = 1.0
        for i, token in enumerate(tokens):
            probabilities = toy.logits(5, (START, *tokens[:i])).softmax(-1)
            probability *= float(probabilities[token] / (1 - probabilities[START]))  # the start is suppressed
        assert abs(samples.count(tokens) - 2000 * probability) < 4 * (2000 * probability * (1 - probability)) ** 0.5


# --- diverse beam search ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_without_penalty_equal_a_beam_of_their_size(groups: int) -> None:
    toy, requests = ToyModel(9), make_requests(20)
    got = run_search(
        make_engine(toy, 6), requests, SearchOptions(beam_size=6, beam_groups=groups, diversity_penalty=0.0)
    )
    expected = run_search(make_engine(toy, 6), requests, SearchOptions(beam_size=6 // groups))
    assert [to_ids(best) for best in got] == [to_ids(best) for best in expected]


def test_one_group_equals_beam_search() -> None:
    toy, requests, search = ToyModel(9), make_requests(20), SearchOptions(beam_size=4, n_best=4)
    assert run_search(make_engine(toy, 6), requests, replace(search, diversity_penalty=9.0)) == run_search(
        make_engine(toy, 6), requests, search
    )


def test_groups_differ_and_keep_the_scores_of_the_model() -> None:
    toy, search = ToyModel(9), SearchOptions(beam_size=4, n_best=4, beam_groups=4, diversity_penalty=50.0)
    for limit in (1, 8):
        requests, beginnings = [replace(request, max_length=limit) for request in make_requests(20)], 0
        for request, got in zip(requests, run_search(make_engine(toy, 6), requests, search), strict=True):
            beginnings += len({(*hypothesis.token_ids, END)[0] for hypothesis in got})
            for hypothesis in got:
                tokens = (*hypothesis.token_ids, END) if hypothesis.is_finished else hypothesis.token_ids
                assert hypothesis.log_prob == pytest.approx(
                    toy.log_prob(request.source_ids[0], tokens, (PAD,)), abs=1e-4
                )
        plainly = run_search(make_engine(toy, 6), requests, replace(search, beam_groups=1))
        if limit == 1:
            assert beginnings == 80  # at this penalty no token is chosen twice in a step
        else:
            assert beginnings > 1.3 * sum(
                len({(*hypothesis.token_ids, END)[0] for hypothesis in got}) for got in plainly
            )


@pytest.mark.parametrize("diversity", [0.1, 0.5, 2.0])
def test_groups_return_distinct_hypotheses_best_first(diversity: float) -> None:
    toy, requests = ToyModel(12), make_requests(20)
    different = []
    for groups in (1, 3):
        search = SearchOptions(beam_size=6, n_best=6, beam_groups=groups, diversity_penalty=diversity)
        results = run_search(make_engine(toy, 9), requests, search)
        for request, got in zip(requests, results, strict=True):
            assert len(set(to_ids(got))) == len(got)
            for hypothesis in got:
                tokens = (*hypothesis.token_ids, END) if hypothesis.is_finished else hypothesis.token_ids
                assert hypothesis.log_prob == pytest.approx(
                    toy.log_prob(request.source_ids[0], tokens, (PAD,)), abs=1e-4
                )
            assert got == sorted(got, key=lambda hypothesis: (not hypothesis.is_finished, -hypothesis.score))
        different.append(results)
    assert different[0] != different[1]
    if diversity >= 0.5:  # with less, groups may find the same
        assert all(len(got) == 6 for request, got in zip(requests, results, strict=True) if request.max_length > 8)


# --- the GPU engine ---------------------------------------------------------------------------------------------------


class FailingSearch:
    """Takes two requests, and fails at the next batch."""

    def __init__(self, hypotheses: Sequence[list[Hypothesis]], error: Exception) -> None:
        self.hypotheses, self.error = hypotheses, error
        self.searched: list[int] = []

    def has_room_for(self, batch: RequestBatch, context: object) -> bool:
        return len(batch) <= 2

    def search(self, batch: RequestBatch, *_: Any) -> HypothesisBatch:
        if self.searched:
            raise self.error
        self.searched = (
            batch.token_ids[batch.decoder_order_offsets] - 3
        ).tolist()  # the first token of `make_requests`
        best = [self.hypotheses[index][0] for index in self.searched]
        return make_hypothesis_batch(best)


@pytest.mark.parametrize(
    ("error", "again"), [(RuntimeError("no C compiler\nat all"), False), (torch.OutOfMemoryError("full"), True)]
)
def test_the_reference_engine_takes_over_after_a_failure(
    error: Exception, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Seq2Seq(
        Seq2SeqConfig(vocab=30, encoder=STACK, decoder=mirror_encoder(STACK), start_id=START, end_id=END)
    ).eval()
    requests, search = make_requests(6), SearchOptions(beam_size=2)
    expected = run_search(make_engine(model, 3), requests, search)
    failing, messages = FailingSearch(expected, error), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(eligibility, "may_support", lambda *_: True)
        patched.setattr(eligibility, "get_gpu_search", lambda *_: failing)
        got = run_search(make_engine(model, 3, notify=messages.append), requests, search)
    assert [to_ids(best) for best in got] == [to_ids(best) for best in expected]
    assert len(failing.searched) in (1, 2)
    assert all(got[index] == expected[index] for index in failing.searched)
    (message,) = messages
    assert message.startswith(f"the GPU kernels failed ({type(error).__name__}: {str(error).splitlines()[0]});")
    assert (model not in eligibility.FAILED_MODELS) == again


def test_a_cancelled_gpu_search_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = ToyModel(6, 1.0)
    failing = FailingSearch(run_search(make_engine(toy, 3), make_requests(6), SearchOptions()), SearchCancelled())
    monkeypatch.setattr(eligibility, "may_support", lambda *_: True)
    monkeypatch.setattr(eligibility, "get_gpu_search", lambda *_: failing)
    with pytest.raises(SearchCancelled):
        run_search(make_engine(toy, 3), make_requests(6), SearchOptions())


def test_rows_fit_the_mean_length_of_the_longest() -> None:
    """Also for sources and targets of unrelated lengths; 1,000 tokens fit."""
    engine = make_engine(
        ToyModel(6, 1.0), 1, choose_batch_size=lambda source, target, beams: max(1, 1000 // (source + target))
    )
    short = [SearchRequest(source_ids=[3] * 90, max_length=10)] * 2000
    assert engine._choose_max_rows(make_batch(short), 1) == 10
    assert engine._choose_max_rows(make_batch([*short, *[SearchRequest(source_ids=[3], max_length=99)] * 500]), 1) == 10
    assert (
        engine._choose_max_rows(
            make_batch(
                [SearchRequest(source_ids=[3], max_length=499), *[SearchRequest(source_ids=[3], max_length=9)] * 500]
            ),
            1,
        )
        == 50
    )
    assert engine._choose_max_rows(make_batch([SearchRequest(source_ids=[3], max_length=5000)]), 1) == 1


def make_batch(requests: Sequence[SearchRequest]) -> RequestBatch:
    return RequestBatch.from_requests([requests[index] for index in sort_by_length(requests)])


def test_a_batch_may_be_unsupported_or_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Seq2Seq(
        Seq2SeqConfig(vocab=30, encoder=STACK, decoder=mirror_encoder(STACK), start_id=START, end_id=END)
    ).eval()
    batch, messages = make_batch(make_requests(6)), list[str]()
    engine = make_engine(model, 3, notify=messages.append)
    assert engine.search_batch(batch, SearchOptions()) is Unavailable.UNSUPPORTED  # on a CPU
    monkeypatch.setattr(eligibility, "get_gpu_search", lambda *_: LimitedSearch(room=5))
    assert engine.search_batch(batch, SearchOptions()) is Unavailable.OUT_OF_MEMORY
    monkeypatch.setattr(eligibility, "get_gpu_search", lambda *_: LimitedSearch(room=6, memory=5))
    assert engine.search_batch(batch, SearchOptions()) is Unavailable.OUT_OF_MEMORY
    monkeypatch.setattr(eligibility, "get_gpu_search", lambda *_: LimitedSearch(room=6))
    assert engine.search_batch(batch, SearchOptions()) == (6, 3)  # (requests, rows)
    assert replace(engine, use_gpu_engine=False).search_batch(batch, SearchOptions()) is Unavailable.UNSUPPORTED
    assert not messages
    monkeypatch.setattr(
        eligibility, "get_gpu_search", lambda *_: LimitedSearch(room=6, error=RuntimeError("no C compiler"))
    )
    assert engine.search_batch(batch, SearchOptions()) is Unavailable.UNSUPPORTED
    assert "the GPU kernels failed (RuntimeError: no C compiler)" in messages[0]


@dataclass(frozen=True, kw_only=True)
class LimitedSearch:
    """Returns the number of requests and rows."""

    room: int
    memory: int = 100
    error: Exception | None = None

    def has_room_for(self, batch: RequestBatch, context: object) -> bool:
        return len(batch) <= self.room

    def search(self, batch: RequestBatch, context: object, max_rows: int, *_: Any) -> Any:
        if self.error is not None:
            raise self.error
        return (len(batch), max_rows) if len(batch) <= self.memory else None


# --- several threads --------------------------------------------------------------------------------------------------


def test_a_thread_builds_its_batch_before_it_takes_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, ready, done = threading.Lock(), threading.Event(), threading.Event()
    toy, real, lock_states = ToyModel(7), RequestBatch.from_requests, []

    def from_requests(requests: Sequence[SearchRequest]) -> RequestBatch:
        ready.set()
        return real(requests)

    monkeypatch.setattr(RequestBatch, "from_requests", from_requests)
    monkeypatch.setattr(eligibility, "may_support", lambda *_: True)
    monkeypatch.setattr(eligibility, "get_gpu_search", lambda *_: lock_states.append(lock.locked()))  # unsupported
    engine = make_engine(toy, 4, device_lock=lock)
    thread = threading.Thread(target=lambda: (run_search(engine, make_requests(6), SearchOptions()), done.set()))
    with lock:
        thread.start()
        assert ready.wait(30)
        assert not done.wait(0.1)
        assert not toy.step_rows
        assert not lock_states
    assert done.wait(30)
    thread.join()
    assert lock_states == [True]
    assert toy.step_rows
    assert not lock.locked()


def test_an_abandoned_search_releases_the_lock() -> None:
    lock = threading.Lock()
    results = make_engine(ToyModel(7), 4, device_lock=lock).search(make_requests(20), SearchOptions())
    next(results)
    assert not lock.locked()


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_candidates_include_the_winner() -> None:
    """At every step, one of them is a prefix of the best hypothesis."""
    for source in range(20):
        toy, request = ToyModel(6, 1.0), SearchRequest(source_ids=[source], max_length=10)
        (best,) = search_plainly(toy, source, 10, SearchOptions(), (PAD,))
        engine = make_engine(toy, 1)
        context = searching.SearchContext(
            options=SearchOptions(), start_id=START, end_id=END, suppressed_tokens=torch.tensor([START, PAD])
        )
        session: SearchSession[ToyState] = SearchSession(engine, [request], [0], context)
        while session.row_requests:
            session.step()
            if list(session.collect_and_refill()):
                break
            assert any(list(best.token_ids[: len(ids)]) == ids for ids in session.list_candidates())


def test_half_precision_logits_are_normalized_in_float32() -> None:
    logits = torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    context = make_engine(ToyModel(7), 1).build_context(SearchOptions(beam_size=3), make_requests(2))
    beams = searching.BeamState.from_requests(make_requests(2), 14, context)
    expected = logits.float().index_fill(-1, context.suppressed_tokens, float("-inf"))
    masked, log_norm = searching.mask_logits(logits.clone(), beams, context)
    assert masked.dtype == log_norm.dtype == torch.float32
    assert torch.equal(masked, expected)
    assert torch.allclose(log_norm, expected.logsumexp(-1, keepdim=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("length", "fits"), [(10, True), (11, False), (0, False)])
def test_the_gpu_engine_needs_positions_for_all_tokens(length: int, fits: bool) -> None:
    stack = replace(STACK, positions=LearnedConfig(max_length=10))
    model = Seq2Seq(Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack)))
    target = SearchRequest(source_ids=[3, END], max_length=length)
    source = SearchRequest(source_ids=[3] * length, max_length=5)
    for request in (target, source):
        assert eligibility.has_positions_for(model, RequestBatch.from_requests([request])) is fits
