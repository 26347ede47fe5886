"""Processes that have no weights write what the one that has them would write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from attent.decoding import SearchOptions, Translator
from attent.decoding.engines.gpu import worker_pool
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, Unavailable
from attent.decoding.engines.gpu.worker_pool import TextWorkerPool, pack_request, unpack_request
from attent.decoding.input_lines import InputLine, LineBlock
from attent.decoding.options import SearchRequest
from attent.decoding.output_format import OutputFormat
from attent.decoding.pipeline import (
    MAX_WORKERS,
    TranslatedBlock,
    TranslationPipeline,
    build_worker_pool,
    choose_worker_count,
    compact_block,
    translate_block,
)
from tests.decoding.toy_models import make_hypothesis_batch
from tests.text.corpus import lines as corpus_lines
from tests.text.corpus import tokenizer
from tests.training.toys import model

WAIT = 60  # seconds until a process must have come
PLAIN = [
    *(InputLine(text=text) for text in corpus_lines()[0][:4]),
    InputLine(text=""),
    InputLine(text="  a dog "),
    InputLine(text="a dog"),
]
CONSTRAINED = [InputLine(text="a dog", prefix="ein", required=("Hund",)), InputLine(text="a man", banned=("Mann",))]
LONG = [InputLine(text="a dog sees a man. " * 60)]
WRONG = [InputLine(text="a dog"), InputLine(text="a man", required=("",)), InputLine(text="a dog")]


@pytest.fixture(scope="module")
def pipeline() -> TranslationPipeline:
    translator = Translator(model().eval(), tokenizer())
    search = SearchOptions(n_best=2, beam_size=2, max_length=12)
    return TranslationPipeline(translator=translator, options=search, to="de", output_format=OutputFormat(n_best=2))


@pytest.fixture(scope="module")
def pool(pipeline: TranslationPipeline) -> Iterator[TextWorkerPool[TranslatedBlock]]:
    """With one worker who has come."""
    made = build_worker_pool(pipeline, 1)
    try:
        run_in_worker(made, PLAIN)  # the first is done here, and calls for help
        (worker,) = made.starting_workers
        assert worker.connection.poll(WAIT)
        yield made
    finally:
        made.close()
        assert not any(worker.process.is_alive() for worker in made.workers)


def run_in_worker(pool: TextWorkerPool[TranslatedBlock], lines: list[InputLine]) -> TranslatedBlock:
    return pool.run(compact_block(LineBlock(lines=lines, first_index=10, byte_count=1), "text"), lambda: False)


@pytest.mark.parametrize("lines", [PLAIN, CONSTRAINED, LONG, WRONG], ids=["plain", "wishes", "long", "wrong"])
def test_a_clerk_writes_what_is_written_here(
    lines: list[InputLine], pipeline: TranslationPipeline, pool: TextWorkerPool[TranslatedBlock]
) -> None:
    searched = []
    search = pipeline.translator.search
    pipeline.translator.search = lambda *given: searched.append(1) or search(*given)  # type: ignore[method-assign, func-returns-value]
    try:
        found = run_in_worker(pool, lines)
    finally:
        pipeline.translator.search = search  # type: ignore[method-assign]
    assert found == translate_block(pipeline, lines, 10, "text")
    assert searched, "no worker has asked for it"
    assert lines is not WRONG or "text, line 12: " in found.error  # type: ignore[attr-defined]
    assert lines is not LONG or found.split_lines[0][0] == 11  # type: ignore[attr-defined]


def test_a_clerk_asks_with_lots_where_these_are_taken(pipeline: TranslationPipeline) -> None:
    lots: list[RequestBatch] = []

    refusals: list[Unavailable] = []

    def taken(lot: RequestBatch, search: SearchOptions, stop: object) -> HypothesisBatch | Unavailable:
        """As a lane would, but with the search."""
        lots.append(lot)
        if refusals:
            return refusals.pop(0)
        some = [
            SearchRequest(
                source_ids=lot.token_ids[first : first + width].tolist(),
                max_length=int(limit),
                forbid_loops=bool(no_loops),
            )
            for first, width, limit, no_loops in zip(
                lot.memory_offsets, lot.memory_lengths, lot.max_target_lengths, lot.forbid_loops, strict=True
            )
        ]
        found = [one for best in pipeline.translator.search(some, search) for one in best]
        assert len(found) == 2 * len(some)
        return make_hypothesis_batch(found)

    made = build_worker_pool(pipeline, 1)
    pipeline.translator.search_batch = taken  # type: ignore[method-assign, assignment]
    try:
        run_in_worker(made, PLAIN)
        assert made.starting_workers[0].connection.poll(WAIT)
        lots.clear()
        assert run_in_worker(made, PLAIN) == translate_block(pipeline, PLAIN, 10, "text")
        assert [len(lot) for lot in lots] == [5]  # each different text once, and none for nothing
        assert run_in_worker(made, CONSTRAINED) == translate_block(pipeline, CONSTRAINED, 10, "text")
        assert len(lots) == 1
        refusals += [Unavailable.OUT_OF_MEMORY, Unavailable.UNSUPPORTED]
        assert run_in_worker(made, PLAIN) == translate_block(pipeline, PLAIN, 10, "text")
        assert [len(lot) for lot in lots[1:]] == [5, 2]  # and then it is told that there is no lane
        assert run_in_worker(made, PLAIN) == translate_block(pipeline, PLAIN, 10, "text")
        assert len(lots) == 3
    finally:
        del pipeline.translator.search_batch
        made.close()


@pytest.mark.parametrize("come", [True, False], ids=["come", "on its way"])
def test_what_a_clerk_leaves_is_done_here(come: bool, pipeline: TranslationPipeline) -> None:
    made = build_worker_pool(pipeline, 1)
    try:
        run_in_worker(made, PLAIN)
        (worker,) = made.starting_workers
        assert not come or worker.connection.poll(WAIT)
        worker.process.kill()
        worker.process.join(WAIT)
        assert run_in_worker(made, PLAIN) == translate_block(pipeline, PLAIN, 10, "text")
        assert run_in_worker(made, PLAIN) == translate_block(pipeline, PLAIN, 10, "text")
        assert not made.idle_workers
    finally:
        made.close()


def test_where_no_process_can_be_started_it_is_done_here(
    pipeline: TranslationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", refused)
    made = build_worker_pool(pipeline, 2)
    assert run_in_worker(made, PLAIN) == translate_block(pipeline, PLAIN, 10, "text")
    assert made.workers == []
    made.close()


def test_no_worker_starts_before_it_is_asked_for(pipeline: TranslationPipeline) -> None:
    pool = build_worker_pool(pipeline, 1)
    pool.run(compact_block(LineBlock(lines=PLAIN, first_index=10, byte_count=1), "text"), lambda: False, False)
    assert not pool.workers


def test_one_who_has_not_come_is_not_waited_for(pipeline: TranslationPipeline) -> None:
    made = build_worker_pool(pipeline, 1)
    run_in_worker(made, PLAIN)
    began = time.monotonic()
    made.close()
    assert not made.workers[0].process.is_alive()
    assert time.monotonic() - began < worker_pool.JOIN_TIMEOUT


def test_there_are_none_on_a_cpu_or_where_weights_are_needed_for_more(
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


def test_a_job_is_the_same_when_it_arrives() -> None:
    plain = SearchRequest(source_ids=[4, 5, 2], rng_key=7, max_length=9)
    wished = SearchRequest(
        source_ids=[4, 2],
        prefix_ids=(5,),
        required_phrases=((6, 7),),
        banned_phrases=("no",),
        prefix_ends_word=True,
        rng_key=1,
        max_length=3,
    )
    for job in (plain, wished):
        assert unpack_request(*pack_request(job)) == job
