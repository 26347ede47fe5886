"""Continuous batching: the searches of concurrent requests share batches, each request with its own options.

Request threads call `SearchBatcher.search` and wait; other threads run the engine. Whenever one of them is free, it
takes the next batch from what is waiting: sources of one length class and one set of options, from all clients in turn,
up to a number of tokens. Short sources go first, so that they never wait for long ones, unless a long one has waited
for `MAX_WAIT` seconds.

Clients who got their answers usually send the next text at once, one after the other. A free thread therefore waits a
little for its share of them, so that it does not search a batch of the first few.
"""

import itertools
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest, StopCheck

SHORT_TOKENS = 48  # sources up to this length are one class; each further class has sources of up to twice the length
MAX_WAIT = 1.0  # seconds until a waiting source is taken before shorter ones
# How long a free thread waits for more sources: a share of the time of its last batch, and at most so many seconds.
GATHER_SHARE, MAX_GATHER_SECONDS = 0.1, 0.1
POLL_SECONDS = 0.2  # between checks whether the client of a waiting request is gone, whose sources are dropped then

RunSearch = Callable[[list[SearchRequest], SearchOptions, StopCheck], list[list[Hypothesis]]]


@dataclass(eq=False)
class SearchJob:
    """The sources that one request searches for at once."""

    options: SearchOptions
    client: str
    should_stop: StopCheck
    num_sources: int
    hypotheses: dict[int, list[Hypothesis]] = field(default_factory=dict)
    done: Future[None] = field(default_factory=Future)

    def is_cancelled(self) -> bool:
        return self.done.done() or self.should_stop()

    def add_hypotheses(self, index: int, hypotheses: list[Hypothesis]) -> None:
        self.hypotheses[index] = hypotheses
        if len(self.hypotheses) == self.num_sources:
            with suppress(InvalidStateError):  # cancelled, or finished by two threads at once
                self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # finished meanwhile
            self.done.set_exception(error)


@dataclass(frozen=True, eq=False)
class WaitingSource:
    request: SearchRequest
    index: int  # in its job
    job: SearchJob
    since: float

    @property
    def batch_key(self) -> tuple[int, SearchOptions]:
        """Sources with the same key can share a batch."""
        length = max(len(self.request.source_ids), self.request.max_length // 2)
        return max(0, (length - 1) // SHORT_TOKENS).bit_length(), self.job.options


class SearchBatcher:
    """Runs the searches of many threads in shared batches, in threads of its own."""

    def __init__(self, run_search: RunSearch, *, max_batch_tokens: int, num_threads: int = 1) -> None:
        """`max_batch_tokens` bounds sources x longest source or `min_length` x beams of a batch, and so its time.

        With several threads, `run_search` is called concurrently.
        """
        self._run_search = run_search
        self._max_batch_tokens = max_batch_tokens
        self._waiting: dict[tuple[int, SearchOptions], dict[str, deque[WaitingSource]]] = defaultdict(dict)
        self._changed = threading.Condition()
        self._last_turn: dict[str, int] = {}  # client -> when it was last served, for the order among clients
        self._turns = itertools.count()
        self._num_threads = num_threads
        self._num_arrived = self._num_running = 0  # sources, since the start and in running batches
        self.batch_sizes: Counter[int] = Counter()  # batch size -> number of batches
        for _ in range(num_threads):
            threading.Thread(target=self._run, name="attent search", daemon=True).start()

    def search(
        self, requests: Sequence[SearchRequest], options: SearchOptions, should_stop: StopCheck, client: str = ""
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each request; raise `SearchCancelled` soon after `should_stop()` is True."""
        if not requests:
            return []
        job = SearchJob(options, client, should_stop, len(requests))
        now = time.monotonic()
        with self._changed:
            for index, request in enumerate(requests):
                source = WaitingSource(request, index, job, now)
                self._waiting[source.batch_key].setdefault(client, deque()).append(source)
            self._num_arrived += len(requests)
            self._changed.notify_all()
        while True:
            try:
                job.done.result(timeout=POLL_SECONDS)
                return [job.hypotheses[index] for index in range(len(requests))]
            except TimeoutError:
                if should_stop():
                    job.fail(SearchCancelled())  # removes its sources from the queue

    def _run(self) -> None:
        size, seconds = 0, 0.0  # of the last batch
        while True:
            batch = self._wait_for_batch(size, min(MAX_GATHER_SECONDS, GATHER_SHARE * seconds))
            began = time.monotonic()
            self._search_batch(batch)
            size, seconds = len(batch), time.monotonic() - began

    def _search_batch(self, batch: list[WaitingSource]) -> None:
        """Search a batch; if it fails, search each source alone, so that one request cannot fail those of others."""
        jobs = {source.job for source in batch}
        try:
            options = batch[0].job.options
            results = self._run_search(
                [source.request for source in batch], options, lambda: all(job.is_cancelled() for job in jobs)
            )
        except SearchCancelled as error:
            for job in jobs:
                job.fail(error)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for it
            if len(jobs) == 1:
                batch[0].job.fail(error)
                return
            for source in batch:
                if not source.job.is_cancelled():
                    self._search_batch([source])
        else:
            for source, hypotheses in zip(batch, results, strict=True):
                source.job.add_hypotheses(source.index, hypotheses)

    # --- the next batch ----------------------------------------------------------------------------------------------

    def _wait_for_batch(self, num_answered: int, max_seconds: float) -> list[WaitingSource]:
        """Return the next batch, which is never empty; wait for a full share of the sources for some seconds.

        It is assumed that each of the `num_answered` sources of the last batch will be followed by another one.
        """
        with self._changed:
            end, num_before = time.monotonic() + max_seconds, self._num_arrived
            self._num_running -= num_answered
            while True:
                self._remove_cancelled()
                if not self._waiting:
                    self._changed.wait()
                    continue
                num_waiting = sum(len(row) for clients in self._waiting.values() for row in clients.values())
                if self._num_running:
                    num_expected = max(0, num_answered - (self._num_arrived - num_before))
                    share = math.ceil((num_waiting + num_expected + self._num_running) / self._num_threads)
                else:  # the engine divides the batch among its threads
                    share = max(num_waiting, num_answered)
                seconds = end - time.monotonic()
                if num_waiting < share and seconds > 0:
                    self._changed.wait(seconds)
                elif batch := self._take_batch(self._choose_key(), share):
                    self.batch_sizes[len(batch)] += 1
                    self._num_running += len(batch)
                    return batch

    def _remove_cancelled(self) -> None:
        for key, clients in list(self._waiting.items()):
            for client, row in list(clients.items()):
                while row and row[0].job.is_cancelled():
                    row.popleft()
                if not row:
                    del clients[client]
            if not clients:
                del self._waiting[key]
        if not self._waiting:
            self._last_turn.clear()

    def _choose_key(self) -> tuple[int, SearchOptions]:
        """Return the key whose sources are shortest; among those that waited too long, the oldest."""
        now = time.monotonic()
        ages = {key: now - min(row[0].since for row in rows.values()) for key, rows in self._waiting.items()}
        oldest = max(ages, key=lambda key: ages[key])
        return oldest if ages[oldest] > MAX_WAIT else min(ages, key=lambda key: (key[0], -ages[key]))

    def _take_batch(self, key: tuple[int, SearchOptions], max_sources: int) -> list[WaitingSource]:
        """Take one source after the other from each client in turn, until the batch is full."""
        clients, batch, longest = self._waiting[key], list[WaitingSource](), key[1].min_length
        beams = max(key[1].beam_size, key[1].n_best)
        order = deque(sorted(clients, key=lambda client: self._last_turn.get(client, -1)))
        while order and len(batch) < max_sources:
            client = order.popleft()
            row = clients[client]
            while row and row[0].job.is_cancelled():
                row.popleft()
            if not row:
                del clients[client]
                continue
            longest = max(longest, len(row[0].request.source_ids))
            if batch and (len(batch) + 1) * longest * beams > self._max_batch_tokens:
                break
            batch.append(row.popleft())
            self._last_turn[client] = next(self._turns)
            order.append(client)
        if not clients:
            del self._waiting[key]
        return batch
