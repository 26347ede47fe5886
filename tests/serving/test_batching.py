"""Continuous batching: what shares a batch, who goes first, cancellation, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import Hypothesis, SamplingOptions, SearchOptions, SearchRequest, StopCheck
from attent.serving import batching
from attent.serving.batching import SearchBatcher
from tests.serving.toy import wait_until

GREEDY, BEAM = SearchOptions(beam_size=1), SearchOptions(beam_size=4)
SAMPLES = SearchOptions(beam_size=1, n_best=4, sampling=SamplingOptions())


def source(*ids: int, length: int = 1, max_length: int = 0) -> SearchRequest:
    return SearchRequest(source_ids=(ids or (7,)) * length, max_length=max_length)


class Engine:
    """Returns the source as its only hypothesis; waits for `release` before each batch."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[SearchRequest], SearchOptions]] = []
        self.release = threading.Semaphore(0)
        self.stop_checks: list[StopCheck] = []

    def __call__(
        self, requests: list[SearchRequest], options: SearchOptions, should_stop: StopCheck
    ) -> list[list[Hypothesis]]:
        self.batches.append((requests, options))
        self.stop_checks.append(should_stop)
        self.release.acquire()
        if any(13 in request.source_ids for request in requests):
            raise ValueError("13 is not translated")
        if should_stop():
            raise SearchCancelled
        return [
            [Hypothesis(token_ids=tuple(request.source_ids), log_prob=0.0, score=0.0, is_finished=True)]
            for request in requests
        ]

    @property
    def lengths(self) -> list[list[int]]:
        return [[len(request.source_ids) for request in requests] for requests, _ in self.batches]


Submit = Callable[..., "Future[list[list[Hypothesis]]]"]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def batcher(engine: Engine) -> Iterator[SearchBatcher]:
    made = SearchBatcher(engine, max_batch_tokens=64)
    yield made
    for _ in range(200):
        engine.release.release()


@pytest.fixture
def submit(batcher: SearchBatcher, engine: Engine) -> Iterator[Submit]:
    """Search in a thread. The first search occupies the engine, so that the next ones wait together."""
    with ThreadPoolExecutor(64) as threads:

        def run(
            *requests: SearchRequest,
            options: SearchOptions = GREEDY,
            client: str = "",
            stop: StopCheck = lambda: False,
        ) -> Future[list[list[Hypothesis]]]:
            before, num_batches = count_waiting(batcher), len(engine.batches)
            future = threads.submit(batcher.search, requests, options, stop, client)
            assert wait_until(lambda: count_waiting(batcher) > before or len(engine.batches) > num_batches)
            return future

        run(source(1))
        assert wait_until(lambda: len(engine.batches) == 1)
        yield run
        for _ in range(200):
            engine.release.release()


def count_waiting(batcher: SearchBatcher) -> int:
    with batcher._changed:
        return sum(len(row) for clients in batcher._waiting.values() for row in clients.values())


def get_ids(future: Future[list[list[Hypothesis]]]) -> list[tuple[int, ...]]:
    return [hypotheses[0].token_ids for hypotheses in future.result(10)]


def test_waiting_requests_share_a_batch_and_get_their_own_results(engine: Engine, submit: Submit) -> None:
    futures = [submit(source(number), source(number + 100)) for number in range(2, 8)]
    engine.release.release(2)
    assert [get_ids(future) for future in futures] == [[(n,), (n + 100,)] for n in range(2, 8)]
    assert engine.lengths == [[1], [1] * 12]


def test_other_options_are_another_batch(engine: Engine, submit: Submit) -> None:
    futures = [submit(source(2)), submit(source(3), options=BEAM), submit(source(4))]
    engine.release.release(3)
    assert [get_ids(future) for future in futures] == [[(2,)], [(3,)], [(4,)]]
    assert sorted((len(requests), options.beam_size) for requests, options in engine.batches[1:]) == [(1, 4), (2, 1)]


def test_a_batch_has_at_most_the_given_tokens(engine: Engine, submit: Submit) -> None:
    # 64 tokens: 6 sources of 10 tokens, or one of 20 with 4 beams or samples, which is more by itself.
    plain = [submit(source(2, length=10)) for _ in range(8)]
    wide = [submit(source(3, length=20), options=options) for options in (BEAM, BEAM, SAMPLES, SAMPLES)]
    engine.release.release(8)
    for future in (*plain, *wide):
        get_ids(future)
    assert sorted(map(len, engine.lengths[1:])) == [1, 1, 1, 1, 2, 6]


@pytest.mark.parametrize(("seconds", "sizes"), [(1000.0, [1, 2, 2]), (0.0, [1, 2, 1, 1])])
def test_a_free_thread_waits_for_the_next_sources_of_clients_that_got_answers(
    engine: Engine,
    batcher: SearchBatcher,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    sizes: list[int],
) -> None:
    monkeypatch.setattr(batching, "GATHER_SHARE", 1e9)
    monkeypatch.setattr(batching, "MAX_GATHER_SECONDS", seconds)
    searches = [submit(source(2)), submit(source(3))]
    engine.release.release(2)
    assert wait_until(lambda: len(engine.batches) == 2 and batcher._num_running == 0)
    searches += [submit(source(4)), submit(source(5))]
    engine.release.release(2)
    assert [get_ids(search) for search in searches] == [[(2,)], [(3,)], [(4,)], [(5,)]]
    assert list(map(len, engine.lengths)) == sizes


def test_two_threads_share_the_sources_equally(engine: Engine) -> None:
    batcher = SearchBatcher(engine, max_batch_tokens=64, num_threads=2)
    with ThreadPoolExecutor(8) as threads:

        def submit_source(number: int, num_batches: int, num_waiting: int) -> Future[list[list[Hypothesis]]]:
            search = threads.submit(batcher.search, [source(number)], GREEDY, lambda: False)
            assert wait_until(lambda: (len(engine.batches), count_waiting(batcher)) == (num_batches, num_waiting))
            return search

        # Two run. One is answered; of the four that wait, the one that runs and the one that is expected, half is 3.
        searches = [submit_source(1, 1, 0), submit_source(2, 2, 0)]
        searches += [submit_source(number, 2, number - 2) for number in range(3, 7)]
        engine.release.release()
        assert wait_until(lambda: len(engine.batches) == 3)
        engine.release.release(3)
        assert [get_ids(search) for search in searches] == [[(number,)] for number in range(1, 7)]
    assert list(map(len, engine.lengths)) == [1, 1, 3, 1]


def test_the_minimum_length_counts_as_length(engine: Engine, submit: Submit) -> None:
    long = SearchOptions(beam_size=1, min_length=32)
    searches = [submit(source(number), options=long) for number in range(2, 7)]
    engine.release.release(4)
    assert [get_ids(search) for search in searches] == [[(number,)] for number in range(2, 7)]
    assert sorted(map(len, engine.lengths[1:])) == [1, 2, 2]


def test_short_sources_go_before_long_ones_until_those_have_waited(
    engine: Engine, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = submit(source(2, length=200))
    short = submit(source(3))
    engine.release.release(3)
    get_ids(long), get_ids(short)
    assert engine.lengths == [[1], [1], [200]]
    monkeypatch.setattr(batching, "MAX_WAIT", 0.0)
    submit(source(1))
    assert wait_until(lambda: len(engine.batches) == 4)
    long, short = submit(source(2, length=200)), submit(source(3))
    engine.release.release(3)
    get_ids(long), get_ids(short)
    assert engine.lengths[4:] == [[200], [1]]


def test_clients_take_turns(engine: Engine, submit: Submit) -> None:
    flood = submit(*[source(2, length=10) for _ in range(60)], client="flood")
    other = submit(source(3, length=10), client="other")
    engine.release.release(2)
    assert get_ids(other) == [(3,) * 10]  # in the first batch, although 60 were there before
    assert not flood.done()
    assert engine.lengths[1] == [10] * 6


def test_a_cancelled_search_leaves_the_queue_at_once(engine: Engine, batcher: SearchBatcher, submit: Submit) -> None:
    gone = threading.Event()
    cancelled = submit(source(2), stop=gone.is_set)
    kept = submit(source(3))
    gone.set()
    with pytest.raises(SearchCancelled):
        cancelled.result(10)
    engine.release.release(2)
    assert get_ids(kept) == [(3,)]
    assert engine.lengths == [[1], [1]]


def test_the_engine_is_told_to_stop_when_all_clients_of_a_batch_are_gone(engine: Engine, submit: Submit) -> None:
    first, second = threading.Event(), threading.Event()
    searches = [submit(source(2), stop=first.is_set), submit(source(3), stop=second.is_set)]
    engine.release.release()
    assert wait_until(lambda: len(engine.batches) == 2)
    first.set()
    assert not engine.stop_checks[1]()
    second.set()
    assert engine.stop_checks[1]()
    for search in searches:
        with pytest.raises(SearchCancelled):
            search.result(10)
    next_search = submit(source(4))
    engine.release.release(2)
    assert get_ids(next_search) == [(4,)]


def test_one_request_that_fails_does_not_fail_the_others(engine: Engine, submit: Submit) -> None:
    searches = [submit(source(2)), submit(source(13)), submit(source(4))]
    engine.release.release(10)
    assert get_ids(searches[0]) == [(2,)]
    assert get_ids(searches[2]) == [(4,)]
    with pytest.raises(ValueError, match="13 is not translated"):
        searches[1].result(10)


def test_no_sources(engine: Engine) -> None:
    assert SearchBatcher(engine, max_batch_tokens=64).search([], GREEDY, lambda: False) == []


def test_two_threads_search_the_batches_of_one_request_at_once(engine: Engine) -> None:
    batcher = SearchBatcher(engine, max_batch_tokens=4, num_threads=2)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(batcher.search, [source(number) for number in range(1, 9)], GREEDY, lambda: False)
        assert wait_until(lambda: len(engine.batches) == 2)  # while neither has ended
        engine.release.release(8)
        assert get_ids(future) == [(number,) for number in range(1, 9)]
