"""Long texts on a GPU: it finds translations faster than one Python turns text into ids and ids into text.

A clerk is a process that has the tokenizer and all that was asked for, but no weights. It is given lines, asks for
every search that they need, and gives back lines of output. Clerks take seconds to come, so they are called when there
is work for them, and until then it is done here; here is also done what is left of one that goes away.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from attent.data.process_pool import bind_to_parent, block_sigint, hide_main_script
from attent.decoding import Translator
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, Unavailable, search_in_batches
from attent.decoding.input_lines import InputLine, LineBlock, LineSource
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.decoding.pipeline import TranslatedBlock, TranslationPipeline, translate_block
from attent.models import Seq2Seq

MIN_INPUT_BYTES = 4 * 2**20  # bytes of a text for which clerks are worth their coming; where its size is not known,
MIN_INPUT_LINES = 16_384  # they are called when there are so many lines
MAX_WORKERS = 6  # clerks: as many keep the fastest search of an H200 busy
READY = "ready"
JOIN_TIMEOUT = 5  # seconds for a clerk to go


def choose_worker_count(pipeline: TranslationPipeline) -> int:
    """How many are worth having; none where they could not do without the weights."""
    model, device, quick = (
        pipeline.translator.model,
        pipeline.translator.device,
        pipeline.translator.engine == "ctranslate2",
    )
    if device.type == "cpu" or quick or not isinstance(model, Seq2Seq) or pipeline.flags.alignment:
        return 0
    return min(MAX_WORKERS, (os.cpu_count() or 1) // 2)


class TextWorkerPool:
    """Whoever is free takes the next block; if nobody is, it is done here."""

    def __init__(self, pipeline: TranslationPipeline, source: LineSource, num_workers: int) -> None:
        self.pipeline, self.source_name, self.workers_to_start = pipeline, source.name, num_workers
        self.min_line = (
            0 if source.total_bytes is not None and source.total_bytes >= MIN_INPUT_BYTES else MIN_INPUT_LINES
        )
        self.workers: list[TextWorker] = []
        self.starting_workers: list[TextWorker] = []  # who are not here yet
        self.idle_workers: list[TextWorker] = []
        self.lock = threading.Lock()

    def translate_block(self, block: LineBlock, should_stop: Callable[[], bool]) -> TranslatedBlock:
        clerk = self._take_worker(block)
        while clerk is not None:
            with suppress(OSError, EOFError):
                done = clerk.translate_block(block, self.source_name, should_stop)
                with self.lock:
                    self.idle_workers.append(clerk)
                return done
            clerk = self._take_worker(block)  # that one has gone
        return translate_block(self.pipeline, block.lines, block.first_index, self.source_name, should_stop)

    def _take_worker(self, block: LineBlock) -> TextWorker | None:
        with self.lock:
            calls, self.workers_to_start = (
                (self.workers_to_start, 0) if block.first_index >= self.min_line else (0, self.workers_to_start)
            )
        if calls:
            self._start_workers(calls)
        with self.lock:
            come = [clerk for clerk in self.starting_workers if clerk.is_ready()]
            self.starting_workers = [clerk for clerk in self.starting_workers if clerk not in come]
            self.idle_workers += come
            return self.idle_workers.pop() if self.idle_workers else None

    def _start_workers(self, count: int) -> None:
        """As many as come: where a process cannot be started, there are fewer."""
        task = ForkingPickler.dumps(WorkerSetup.from_pipeline(self.pipeline))
        with suppress(OSError):
            for _ in range(count):
                clerk = TextWorker(self.pipeline.translator, task)
                with self.lock:
                    self.workers.append(clerk)
                    self.starting_workers.append(clerk)

    def close(self) -> None:
        """Nobody has work any more."""
        for clerk in self.workers:
            clerk.connection.close()
        for clerk in self.starting_workers:
            clerk.process.terminate()
        for clerk in self.workers:
            clerk.process.join(JOIN_TIMEOUT)


class TextWorker:
    """The side of it that has the weights."""

    def __init__(self, translator: Translator, setup: Any) -> None:
        self.translator, self.setup = translator, setup
        context = get_context("spawn")  # a process with a GPU cannot be forked
        self.connection, theirs = context.Pipe()
        # With next to nothing for arguments: whoever starts a process waits until it has read them.
        self.process = context.Process(target=run_worker, args=(theirs,), name="attent worker", daemon=True)
        try:
            with hide_main_script(), block_sigint():
                self.process.start()
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()

    def is_ready(self) -> bool:
        """If so, it is told what it must know."""
        with suppress(OSError, EOFError):
            if self.connection.poll() and self.connection.recv() == READY:
                self.connection.send_bytes(self.setup)
                return True
        return False

    def translate_block(self, block: LineBlock, source_name: str, should_stop: Callable[[], bool]) -> TranslatedBlock:
        lines = [line.text if line.is_plain else line for line in block.lines]
        self.connection.send((lines, block.first_index, source_name))
        while not isinstance(told := self.connection.recv(), TranslatedBlock):
            asked, search = told
            self.connection.send(self._run_search(asked, search, should_stop))
        return told

    def _run_search(
        self, requested: RequestBatch | list[tuple[Any, ...]], options: SearchOptions, should_stop: Callable[[], bool]
    ) -> object:
        try:
            if isinstance(requested, RequestBatch):
                return self.translator.search_batch(requested, options, should_stop)
            found = self.translator.search([unpack_request(*row) for row in requested], options, should_stop)
        except ValueError as error:  # what a line asks for cannot be done: it is told which line
            return error
        return [[(one.token_ids, one.log_prob, one.score, one.is_finished) for one in some] for some in found]


def pack_request(request: SearchRequest) -> tuple[Any, ...]:
    """As few objects as can be: thousands of jobs go from process to process at once."""
    more = request.prefix_ids, request.required_phrases, request.banned_phrases, request.prefix_ends_word
    return request.source_ids, request.rng_key, request.max_length, request.forbid_loops, more if any(more) else None


def unpack_request(
    source_ids: Sequence[int], rng_key: int, max_length: int, forbid_loops: bool, constraints: tuple[Any, ...] | None
) -> SearchRequest:
    if constraints is None:
        return SearchRequest(source_ids=source_ids, rng_key=rng_key, max_length=max_length, forbid_loops=forbid_loops)
    prefix, demanded, forbidden, whole_words = constraints
    return SearchRequest(
        source_ids=source_ids, prefix_ids=prefix, required_phrases=demanded, banned_phrases=forbidden, prefix_ends_word=whole_words, rng_key=rng_key,
        max_length=max_length, forbid_loops=forbid_loops,
    )  # fmt: skip


# --- in the other process ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """What a clerk must know."""

    pipeline_fields: dict[str, Any]  # but for the translator
    tokenizer: Any
    config: Any
    folder: Any

    @classmethod
    def from_pipeline(cls, pipeline: TranslationPipeline) -> WorkerSetup:
        facts = {
            name: value for name, value in vars(pipeline).items() if name in ("options", "to", "glossary", "flags")
        }
        translator = pipeline.translator
        return cls(
            pipeline_fields=facts,
            tokenizer=translator.tokenizer,
            config=translator.model.config,
            folder=translator.folder,
        )


class RemoteEngine:
    """An engine that asks the process that has the weights: where that has a lane, for lots, which are little work
    there."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.unsupported: set[SearchOptions] = set()  # that have no lane

    def search(
        self, requests: Sequence[SearchRequest], options: SearchOptions
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        left = set(range(len(requests)))
        if options not in self.unsupported and not any(
            job.prefix_ids or job.required_phrases or job.banned_phrases for job in requests
        ):
            for place, some in search_in_batches(requests, options, lambda lot: self._search_batch(lot, options)):
                left.remove(place)
                yield place, some
        if left:
            yield from self._search_requests(requests, sorted(left), options)

    def _search_batch(self, batch: RequestBatch, options: SearchOptions) -> HypothesisBatch | Unavailable:
        found: HypothesisBatch | Unavailable = self._call(batch, options)
        if found is Unavailable.UNSUPPORTED:
            self.unsupported.add(options)
        return found

    def _search_requests(
        self, requests: Sequence[SearchRequest], indices: Sequence[int], options: SearchOptions
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        found = self._call([pack_request(requests[place]) for place in indices], options)
        for place, some in zip(indices, found, strict=True):
            yield (
                place,
                [Hypothesis(token_ids=ids, log_prob=p, score=score, is_finished=e) for ids, p, score, e in some],
            )

    def _call(self, payload: object, options: SearchOptions) -> Any:
        self.connection.send((payload, options))
        found = self.connection.recv()
        if isinstance(found, ValueError):
            raise found
        return found


class RemoteTranslator(Translator):
    """A translator whose only engine is elsewhere."""

    remote_engine: RemoteEngine

    def build_torch_engine(self, should_stop: Callable[[], bool] | None = None) -> Any:
        return self.remote_engine


def run_worker(connection: Connection) -> None:
    """Until nobody asks any more."""
    bind_to_parent()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        connection.send(READY)
        desk = build_pipeline(connection.recv(), connection)
        gc.freeze()  # as who has called this
        while True:
            lines, first, name = connection.recv()
            given = [InputLine(text=line) if isinstance(line, str) else line for line in lines]
            connection.send(translate_block(desk, given, first, name))


def build_pipeline(setup: WorkerSetup, connection: Connection) -> TranslationPipeline:
    with torch.device("meta"):  # its shape is known, and nothing of it is needed
        model = Seq2Seq(setup.config).eval()
    translator = RemoteTranslator(model, setup.tokenizer, folder=setup.folder)
    translator.remote_engine = RemoteEngine(connection)
    return TranslationPipeline(translator=translator, **setup.pipeline_fields)
