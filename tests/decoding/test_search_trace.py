"""A traced search finds what the search finds, and its nodes are consistent."""

from __future__ import annotations

import math

import pytest
import torch

from attent.decoding.engines.reference import SearchCancelled, TorchEngine
from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.search_trace import SearchTrace, trace_search
from tests.decoding.toy_models import END, PAD, START, ToyModel
from tests.inspection.toy_translator import TEXT, translator
from tests.searching import beam_search


def trace_toy_search(search: SearchOptions, source: int = 5) -> SearchTrace:
    engine = TorchEngine(
        model=ToyModel(12),
        start_id=START,
        end_id=END,
        suppressed_tokens=(PAD,),
        pad=PAD,
        device=torch.device("cpu"),
        choose_batch_size=lambda *_: 1,
        build_constraints=lambda *_: ((), None),
    )
    return trace_search(engine, SearchRequest(source_ids=(source,), max_length=9), search)


@pytest.mark.parametrize("beam_size", [1, 2, 4])
@pytest.mark.parametrize("source", range(3, 9))
def test_it_finds_what_the_search_finds(beam_size: int, source: int) -> None:
    search = SearchOptions(beam_size=beam_size, n_best=beam_size)
    trace = trace_toy_search(search, source)
    output = beam_search(
        ToyModel(12),
        torch.tensor([[source]]),
        start_id=START,
        end_id=END,
        max_length=9,
        options=search,
        suppressed_tokens=[PAD],
    )
    rows = zip(output.tokens[0].tolist(), output.lengths[0].tolist(), output.scores[0].tolist(), strict=True)
    expected = [(tokens[:length], score) for tokens, length, score in rows if score > -math.inf]
    got = [
        ([*hypothesis.token_ids, *([END] if hypothesis.is_finished else [])], hypothesis.score)
        for hypothesis in trace.hypotheses
    ]
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert [score for _, score in got] == pytest.approx([score for _, score in expected])


@pytest.mark.parametrize("beam_size", [1, 3])
def test_log_probabilities_and_steps_are_consistent(beam_size: int) -> None:
    trace = trace_toy_search(SearchOptions(beam_size=beam_size))
    for node in trace.nodes:
        before = 0.0 if node.parent is None else trace.nodes[node.parent].total_log_prob
        assert node.total_log_prob == pytest.approx(before + node.log_prob, abs=1e-5)
        assert node.step == (0 if node.parent is None else trace.nodes[node.parent].step + 1)
        assert node.parent is None or trace.nodes[node.parent].is_live, "only live nodes have children"
        assert not (node.is_live and node.token == END)
    steps = {node.step for node in trace.nodes}
    for step in steps:
        nodes = [node for node in trace.nodes if node.step == step]
        assert len(nodes) <= 2 * beam_size
        assert sum(node.is_live for node in nodes) <= beam_size
        assert [node.total_log_prob for node in nodes] == sorted((node.total_log_prob for node in nodes), reverse=True)


@pytest.mark.parametrize("source", range(3, 9))
def test_only_ends_among_the_best_finish(source: int) -> None:
    trace = trace_toy_search(SearchOptions(beam_size=2), source)
    for step in {node.step for node in trace.nodes}:
        nodes = [node for node in trace.nodes if node.step == step]
        for rank, node in enumerate(nodes):
            assert (node.score is not None) == (node.token == END and rank < 2)


def test_every_hypothesis_has_its_path() -> None:
    trace = trace_toy_search(SearchOptions(beam_size=3))
    for hypothesis, last in zip(trace.hypotheses, trace.last_nodes, strict=True):
        path = [trace.nodes[index] for index in trace.path_to(last)]
        tokens = [node.token for node in path]
        assert tuple(tokens[: len(hypothesis.token_ids)]) == hypothesis.token_ids
        assert path[-1].total_log_prob == pytest.approx(hypothesis.log_prob, abs=1e-5)
        if hypothesis.is_finished:
            assert path[-1].score == pytest.approx(hypothesis.score)


def test_a_trace_equals_the_translation() -> None:
    toy_translator = translator()
    (row,) = toy_translator.tokenizer.encode_source([TEXT])
    trace = trace_search(
        toy_translator._build_torch_engine(), SearchRequest(source_ids=row, max_length=len(row) + 49), SearchOptions()
    )
    (expected,) = toy_translator.translate([TEXT], n_best=4, prevent_loops=False)
    assert [toy_translator.tokenizer.target.decode(hypothesis.token_ids) for hypothesis in trace.hypotheses] == [
        candidate.text for candidate in expected.n_best
    ]
    assert [hypothesis.score for hypothesis in trace.hypotheses] == pytest.approx(
        [candidate.score for candidate in expected.n_best], abs=1e-5
    )


def test_a_forced_prefix_is_the_only_candidate() -> None:
    toy_translator = translator()
    (row,) = toy_translator.tokenizer.encode_source([TEXT])
    free = trace_search(
        toy_translator._build_torch_engine(), SearchRequest(source_ids=row, max_length=20), SearchOptions()
    )
    other = next(node for node in free.nodes if node.step == 0 and node.token != free.hypotheses[0].token_ids[0])
    trace = trace_search(
        toy_translator._build_torch_engine(),
        SearchRequest(source_ids=row, prefix_ids=(other.token,), max_length=20),
        SearchOptions(),
    )
    assert {node.token for node in trace.nodes if node.step == 0} == {other.token}
    assert all(hypothesis.token_ids[0] == other.token for hypothesis in trace.hypotheses)
    assert trace.nodes[0].log_prob == pytest.approx(other.log_prob, abs=1e-5), "forcing does not change its probability"


def test_it_can_be_cancelled() -> None:
    toy_translator = translator()
    (row,) = toy_translator.tokenizer.encode_source([TEXT])
    with pytest.raises(SearchCancelled):
        trace_search(
            toy_translator._build_torch_engine(lambda: True),
            SearchRequest(source_ids=row, max_length=20),
            SearchOptions(),
        )
