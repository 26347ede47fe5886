"""API keys, the rate of a client, and its share of the queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from attent.serving import admission
from attent.serving.admission import Admission
from attent.serving.limits import ApiError, Limits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("attent.serving.admission.time.monotonic", clock)
    return clock


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def refuse(caught: pytest.ExceptionInfo[ApiError]) -> tuple[int, str | None]:
    return caught.value.status, caught.value.headers.get("retry-after")


def test_without_keys_a_client_is_its_address() -> None:
    assert Admission(Limits()).identify("10.0.0.1", "") == "10.0.0.1"
    assert Admission(Limits()).identify("10.0.0.1", "anything") == "10.0.0.1"


@pytest.mark.parametrize(("key", "problem"), [("", "is required"), ("wrong", "not valid"), ("sécret ", "not valid")])
def test_with_keys_a_client_needs_one(key: str, problem: str) -> None:
    guarded = Admission(Limits(), frozenset({"sécret", "other"}))
    assert guarded.identify("10.0.0.1", "sécret") == guarded.identify("10.0.0.2", "sécret") != "10.0.0.1"
    with pytest.raises(ApiError, match=problem) as caught:
        guarded.identify("10.0.0.1", key)
    assert caught.value.status == 403


def test_the_rate_is_per_client_and_recovers(clock: Clock) -> None:
    counted = Admission(Limits(requests_per_minute=6))
    for _ in range(6):
        counted.check_rate("a")
    with pytest.raises(ApiError, match="more than 6 requests in a minute") as caught:
        counted.check_rate("a")
    assert refuse(caught) == (429, "10")
    counted.check_rate("b")
    clock.now += 9.9
    with pytest.raises(ApiError):
        counted.check_rate("a")
    clock.now += 0.2
    counted.check_rate("a")
    with pytest.raises(ApiError):
        counted.check_rate("a")
    clock.now += 600
    for _ in range(6):
        counted.check_rate("a")
    with pytest.raises(ApiError):
        counted.check_rate("a")


def test_no_rate_limit(clock: Clock) -> None:
    counted = Admission(Limits(requests_per_minute=0))
    for _ in range(10_000):
        counted.check_rate("a")


def test_the_number_of_known_clients_is_bounded(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(admission, "MAX_KNOWN_CLIENTS", 2)
    counted = Admission(Limits(requests_per_minute=1))
    for client in "abc":
        counted.check_rate(client)
    counted.check_rate("a")  # forgotten
    with pytest.raises(ApiError):
        counted.check_rate("c")


def test_a_client_gets_at_most_half_of_what_others_leave(held: ExitStack) -> None:
    queue = Admission(Limits(max_queued=15))  # 16 places with the one that runs
    for _ in range(8):
        held.enter_context(queue.admit("a", 10))
    with pytest.raises(ApiError, match="your share of the queue") as caught, queue.admit("a", 10):
        pass
    assert caught.value.status == 429
    for _ in range(4):
        held.enter_context(queue.admit("b", 10))
    with pytest.raises(ApiError, match="your share"), queue.admit("b", 10):
        pass
    for client in "cdef":
        held.enter_context(queue.admit(client, 10))
    assert queue.num_pending == 16
    with pytest.raises(ApiError, match="the server is busy") as caught, queue.admit("g", 10):
        pass
    assert refuse(caught) == (503, "1")


def answer_first(queue: Admission) -> None:
    with queue.admit("first", 1):
        pass


def fill(queue: Admission, held: ExitStack, count: int = admission.BUSY_REQUESTS) -> None:
    for number in range(count):
        held.enter_context(queue.admit(f"filler {number}", 0))


def test_the_share_is_bounded_by_the_time_that_it_takes(clock: Clock, held: ExitStack) -> None:
    queue = Admission(Limits(max_queued=1000, max_queue_seconds=10))
    answer_first(queue)
    fill(queue, held)
    for _ in range(10):
        with queue.admit("a", 100):
            clock.now += 1
    assert queue.characters_per_second == pytest.approx(100)
    held.enter_context(queue.admit("a", 400))
    with pytest.raises(ApiError, match="your share") as caught, queue.admit("a", 200):
        pass
    assert refuse(caught) == (429, "2")
    held.enter_context(queue.admit("b", 100_000))  # a client without pending requests is always admitted
    with pytest.raises(ApiError, match="your share"), queue.admit("a", 1):
        pass
    held.enter_context(queue.admit("c", 100_000))


def test_few_requests_do_not_show_the_speed(clock: Clock, held: ExitStack) -> None:
    queue = Admission(Limits(max_queued=100))
    answer_first(queue)
    fill(queue, held, admission.BUSY_REQUESTS - 2)
    with queue.admit("a", 10):
        clock.now += 100
    assert queue.characters_per_second is None
    fill(queue, held, 2)
    for _ in range(10):
        assert queue.characters_per_second in (None, pytest.approx(10))
        with queue.admit("a", 10):
            clock.now += 1
    assert queue.characters_per_second == pytest.approx(10)


def test_the_time_before_the_first_answer_does_not_count(clock: Clock, held: ExitStack) -> None:
    queue = Admission(Limits(max_queued=100))
    fill(queue, held)
    with queue.admit("a", 10):
        clock.now += 60  # compilation
    for _ in range(10):
        with queue.admit("a", 10):
            clock.now += 1
    assert queue.characters_per_second == pytest.approx(10)


def test_failed_requests_free_their_place() -> None:
    queue = Admission(Limits(max_queued=0))
    with suppress(KeyError), queue.admit("a", 100):
        raise KeyError
    assert queue.num_pending == 0
    with queue.admit("a", 100), pytest.raises(ApiError, match="busy"), queue.admit("b", 1):
        pass
