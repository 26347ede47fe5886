"""Worker processes without weights give what the main process gives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from attent.decoding.engines.gpu import worker_pool
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, Unavailable
from attent.decoding.engines.gpu.worker_pool import TextWorkerPool
from attent.decoding.input_lines import LineBlock
from attent.decoding.options import PhraseConstraints, SearchOptions, SearchRequest
from attent.decoding.output_format import OutputFormat
from attent.decoding.pipeline import (
    MAX_WORKERS,
    BlockOutput,
    TranslationPipeline,
    build_worker_pool,
    choose_worker_count,
    translate_block,
)
from attent.decoding.translator import Translator
from tests.decoding.toy_models import make_hypothesis_batch
from tests.text.corpus import lines as corpus_lines
from tests.text.corpus import tokenizer
from tests.training.toys import model

WAIT = 60  # seconds for a process to start
PLAIN: list[str] = [*corpus_lines()[0][:4], "", "  a dog ", "a dog"]
LONG = "a dog sees a man. " * 60
CONSTRAINTS = PhraseConstraints(prefix="ein", require=("Hund",), ban=("Mann",))


@pytest.fixture(scope="module")
def pipeline() -> TranslationPipeline:
    translator = Translator(model().eval(), tokenizer())
    search = SearchOptions(n_best=2, beam_size=2, max_length=12)
    return TranslationPipeline(translator=translator, options=search, to="de", output_format=OutputFormat(n_best=2))


@pytest.fixture(scope="module")
def pool(pipeline: TranslationPipeline) -> Iterator[TextWorkerPool[BlockOutput]]:
    with start_pool(pipeline) as pool:
        yield pool


@contextmanager
def start_pool(pipeline: TranslationPipeline) -> Iterator[TextWorkerPool[BlockOutput]]:
    """Yield a pool with one worker that has started."""
    pool = build_worker_pool(pipeline, 1)
    try:
        run_in_worker(pool, PLAIN[-1:])  # runs here and starts the worker
        (worker,) = pool.starting_workers
        assert worker.connection.poll(WAIT)
        yield pool
    finally:
        pool.close()
        assert not any(worker.process.is_alive() for worker in pool.workers)


def make_block(lines: list[str]) -> LineBlock:
    return LineBlock(source_name="text", lines=lines, first_index=10, byte_count=1)


def run_in_worker(pool: TextWorkerPool[BlockOutput], lines: list[str]) -> BlockOutput:
    return pool.run(make_block(lines), lambda: False)


@pytest.mark.parametrize("lines", [PLAIN, [LONG]], ids=["plain", "long"])
def test_a_worker_gives_what_the_main_process_gives(
    lines: list[str], pipeline: TranslationPipeline, pool: TextWorkerPool[BlockOutput]
) -> None:
    _, messages, error = compare_worker(lines, pipeline, pool)
    assert error is None
    assert messages == (["text, line 11: too long to translate at once, translated in 4 parts"] * (lines == [LONG]))


def test_a_worker_gives_what_the_main_process_gives_with_constraints(pipeline: TranslationPipeline) -> None:
    constrained = replace(pipeline, constraints=CONSTRAINTS)
    with start_pool(constrained) as pool:
        assert compare_worker(["a dog", "a man"], constrained, pool)[2] is None
        text, _, error = compare_worker(["a dog", LONG, "a dog"], constrained, pool)  # with a prefix it must be short
        assert text.count("\n") == 2  # the two best of the first line
        assert "text, line 12: " in (error or "")


def compare_worker(lines: list[str], pipeline: TranslationPipeline, pool: TextWorkerPool[BlockOutput]) -> BlockOutput:
    searched = []
    search = pipeline.translator.search
    pipeline.translator.search = lambda *arguments: searched.append(1) or search(*arguments)  # type: ignore[method-assign, func-returns-value]
    try:
        result = run_in_worker(pool, lines)
    finally:
        pipeline.translator.search = search  # type: ignore[method-assign]
    assert result == translate_block(pipeline, make_block(lines))
    assert searched, "no worker has sent a search"
    return result


def test_a_worker_sends_request_batches_where_supported(pipeline: TranslationPipeline) -> None:
    batches: list[RequestBatch] = []

    refusals: list[Unavailable] = []

    def search_batch(batch: RequestBatch, search: SearchOptions, stop: object) -> HypothesisBatch | Unavailable:
        """Like the GPU engine, but with the reference search."""
        batches.append(batch)
        if refusals:
            return refusals.pop(0)
        requests = [
            SearchRequest(
                source_ids=batch.token_ids[first : first + width].tolist(),
                max_length=int(limit),
                forbid_loops=bool(forbid_loops),
            )
            for first, width, limit, forbid_loops in zip(
                batch.decoder_order_offsets,
                batch.decoder_order_lengths,
                batch.max_target_lengths,
                batch.forbid_loops,
                strict=True,
            )
        ]
        result = [hypothesis for best in pipeline.translator.search(requests, search) for hypothesis in best]
        assert len(result) == 2 * len(requests)
        return make_hypothesis_batch(result)

    pool = build_worker_pool(pipeline, 1)
    pipeline.translator.search_batch = search_batch  # type: ignore[method-assign, assignment]
    try:
        run_in_worker(pool, PLAIN)
        assert pool.starting_workers[0].connection.poll(WAIT)
        batches.clear()
        assert run_in_worker(pool, PLAIN) == translate_block(pipeline, make_block(PLAIN))
        assert [len(batch) for batch in batches] == [5]  # each distinct text once, and none for empty ones
        refusals += [Unavailable.OUT_OF_MEMORY, Unavailable.UNSUPPORTED]
        assert run_in_worker(pool, PLAIN) == translate_block(pipeline, make_block(PLAIN))
        assert [len(batch) for batch in batches[1:]] == [5, 2]  # then it learns that batches are unsupported
        assert run_in_worker(pool, PLAIN) == translate_block(pipeline, make_block(PLAIN))
        assert len(batches) == 3
    finally:
        del pipeline.translator.search_batch
        pool.close()


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "starting"])
def test_tasks_of_dead_workers_run_here(is_ready: bool, pipeline: TranslationPipeline) -> None:
    pool = build_worker_pool(pipeline, 1)
    try:
        run_in_worker(pool, PLAIN)
        (worker,) = pool.starting_workers
        assert not is_ready or worker.connection.poll(WAIT)
        worker.process.kill()
        worker.process.join(WAIT)
        assert run_in_worker(pool, PLAIN) == translate_block(pipeline, make_block(PLAIN))
        assert run_in_worker(pool, PLAIN) == translate_block(pipeline, make_block(PLAIN))
        assert not pool.idle_workers
    finally:
        pool.close()


def test_tasks_run_here_if_no_process_can_start(pipeline: TranslationPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_os_error(*_: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", raise_os_error)
    pool = build_worker_pool(pipeline, 2)
    assert run_in_worker(pool, PLAIN) == translate_block(pipeline, make_block(PLAIN))
    assert pool.workers == []
    pool.close()


def test_workers_start_on_request(pipeline: TranslationPipeline) -> None:
    pool = build_worker_pool(pipeline, 1)
    pool.run(make_block(PLAIN), lambda: False, False)
    assert not pool.workers


def test_close_does_not_wait_for_starting_workers(pipeline: TranslationPipeline) -> None:
    pool = build_worker_pool(pipeline, 1)
    run_in_worker(pool, PLAIN)
    began = time.monotonic()
    pool.close()
    assert not pool.workers[0].process.is_alive()
    assert time.monotonic() - began < worker_pool.JOIN_TIMEOUT


def test_there_are_no_workers_on_a_cpu_or_where_they_need_weights(
    pipeline: TranslationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_worker_count(pipeline) == 0
    monkeypatch.setattr(Translator, "device", type("Gpu", (), {"type": "cuda"})())
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert choose_worker_count(pipeline) == MAX_WORKERS
    assert choose_worker_count(replace(pipeline, output_format=OutputFormat(alignment="hard"))) == 0
    assert (
        choose_worker_count(replace(pipeline, translator=Translator(model(), tokenizer(), engine="ctranslate2"))) == 0
    )
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert choose_worker_count(pipeline) == 0
