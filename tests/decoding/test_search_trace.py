"""The film of a search: it finds what the search finds, and what it tells of the way there adds up."""

from __future__ import annotations

import math

import pytest
import torch

from attent.decoding.engines.reference import SearchCancelled, TorchEngine
from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.search import beam_search
from attent.decoding.search_trace import SearchTrace, trace_search
from tests.decoding.toy_models import END, PAD, START, ToyModel
from tests.inspection.toy_translator import TEXT, translator


def trace_toy_search(search: SearchOptions, source: int = 5) -> SearchTrace:
    engine = TorchEngine(
        model=ToyModel(12),
        start=START,
        end=END,
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
    seen = trace_toy_search(search, source)
    wanted = beam_search(
        ToyModel(12),
        torch.tensor([[source]]),
        start=START,
        end=END,
        max_length=9,
        options=search,
        suppressed_tokens=[PAD],
    )
    rows = zip(wanted.tokens[0].tolist(), wanted.lengths[0].tolist(), wanted.scores[0].tolist(), strict=True)
    expected = [(tokens[:length], score) for tokens, length, score in rows if score > -math.inf]
    found = [([*one.token_ids, *([END] if one.is_finished else [])], one.score) for one in seen.hypotheses]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])


@pytest.mark.parametrize("beam_size", [1, 3])
def test_what_it_tells_adds_up(beam_size: int) -> None:
    seen = trace_toy_search(SearchOptions(beam_size=beam_size))
    for node in seen.nodes:
        before = 0.0 if node.parent is None else seen.nodes[node.parent].total_log_prob
        assert node.total_log_prob == pytest.approx(before + node.log_prob, abs=1e-5)
        assert node.step == (0 if node.parent is None else seen.nodes[node.parent].step + 1)
        assert node.parent is None or seen.nodes[node.parent].is_live, "only what went on has children"
        assert not (node.is_live and node.token == END)
    steps = {node.step for node in seen.nodes}
    for step in steps:
        here = [node for node in seen.nodes if node.step == step]
        assert len(here) <= 2 * beam_size
        assert sum(node.is_live for node in here) <= beam_size
        assert [node.total_log_prob for node in here] == sorted((node.total_log_prob for node in here), reverse=True)


@pytest.mark.parametrize("source", range(3, 9))
def test_only_ends_among_the_best_are_put_aside(source: int) -> None:
    seen = trace_toy_search(SearchOptions(beam_size=2), source)
    for step in {node.step for node in seen.nodes}:
        here = [node for node in seen.nodes if node.step == step]
        for rank, node in enumerate(here):
            assert (node.score is not None) == (node.token == END and rank < 2)


def test_every_result_has_its_path() -> None:
    seen = trace_toy_search(SearchOptions(beam_size=3))
    for one, last in zip(seen.hypotheses, seen.last_nodes, strict=True):
        path = [seen.nodes[number] for number in seen.path_to(last)]
        tokens = [node.token for node in path]
        assert tuple(tokens[: len(one.token_ids)]) == one.token_ids
        assert path[-1].total_log_prob == pytest.approx(one.log_prob, abs=1e-5)
        if one.is_finished:
            assert path[-1].score == pytest.approx(one.score)


def test_a_model_says_the_same_in_translation_and_in_film() -> None:
    of = translator()
    (row,) = of.tokenizer.encode_source([TEXT])
    seen = trace_search(
        of.build_torch_engine(), SearchRequest(source_ids=row, max_length=len(row) + 49), SearchOptions()
    )
    (wanted,) = of.translate([TEXT], n_best=4, prevent_loops=False)
    assert [of.tokenizer.target.decode(one.token_ids) for one in seen.hypotheses] == [one.text for one in wanted.n_best]
    assert [one.score for one in seen.hypotheses] == pytest.approx([one.score for one in wanted.n_best], abs=1e-5)


def test_a_forced_beginning_is_the_only_way() -> None:
    of = translator()
    (row,) = of.tokenizer.encode_source([TEXT])
    free = trace_search(of.build_torch_engine(), SearchRequest(source_ids=row, max_length=20), SearchOptions())
    other = next(node for node in free.nodes if node.step == 0 and node.token != free.hypotheses[0].token_ids[0])
    seen = trace_search(
        of.build_torch_engine(),
        SearchRequest(source_ids=row, prefix_ids=(other.token,), max_length=20),
        SearchOptions(),
    )
    assert {node.token for node in seen.nodes if node.step == 0} == {other.token}
    assert all(one.token_ids[0] == other.token for one in seen.hypotheses)
    assert seen.nodes[0].log_prob == pytest.approx(other.log_prob, abs=1e-5), "forced, it is as likely as it was"


def test_it_stops_when_it_is_told_to() -> None:
    of = translator()
    (row,) = of.tokenizer.encode_source([TEXT])
    with pytest.raises(SearchCancelled):
        trace_search(of.build_torch_engine(lambda: True), SearchRequest(source_ids=row, max_length=20), SearchOptions())
