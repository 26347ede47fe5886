"""The film of a search: it finds what the search finds, and what it tells of the way there adds up."""

from __future__ import annotations

import math

import pytest
import torch

from attent.decode.engine import Stopped, TorchEngine
from attent.decode.film import Film, film
from attent.decode.options import Job, Search
from attent.decode.search import beam
from tests.decode.toys import END, PAD, START, Toy
from tests.look.toys import TEXT, translator


def toy_film(search: Search, source: int = 5) -> Film:
    engine = TorchEngine(
        model=Toy(12),
        start=START,
        end=END,
        never=(PAD,),
        pad=PAD,
        device=torch.device("cpu"),
        batch_size=lambda *_: 1,
        make_rules=lambda *_: ((), None),
    )
    return film(engine, Job(source=(source,), limit=9), search)


@pytest.mark.parametrize("beam_size", [1, 2, 4])
@pytest.mark.parametrize("source", range(3, 9))
def test_it_finds_what_the_search_finds(beam_size: int, source: int) -> None:
    search = Search(beam_size=beam_size, n_best=beam_size)
    seen = toy_film(search, source)
    wanted = beam(Toy(12), torch.tensor([[source]]), start=START, end=END, max_length=9, search=search, never=[PAD])
    rows = zip(wanted.tokens[0].tolist(), wanted.lengths[0].tolist(), wanted.scores[0].tolist(), strict=True)
    expected = [(tokens[:length], score) for tokens, length, score in rows if score > -math.inf]
    found = [([*one.ids, *([END] if one.ended else [])], one.score) for one in seen.found]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])


@pytest.mark.parametrize("beam_size", [1, 3])
def test_what_it_tells_adds_up(beam_size: int) -> None:
    seen = toy_film(Search(beam_size=beam_size))
    for node in seen.nodes:
        before = 0.0 if node.parent is None else seen.nodes[node.parent].sum
        assert node.sum == pytest.approx(before + node.log_prob, abs=1e-5)
        assert node.step == (0 if node.parent is None else seen.nodes[node.parent].step + 1)
        assert node.parent is None or seen.nodes[node.parent].kept, "only what went on has children"
        assert not (node.kept and node.token == END)
    steps = {node.step for node in seen.nodes}
    for step in steps:
        here = [node for node in seen.nodes if node.step == step]
        assert len(here) <= 2 * beam_size
        assert sum(node.kept for node in here) <= beam_size
        assert [node.sum for node in here] == sorted((node.sum for node in here), reverse=True)


@pytest.mark.parametrize("source", range(3, 9))
def test_only_ends_among_the_best_are_put_aside(source: int) -> None:
    seen = toy_film(Search(beam_size=2), source)
    for step in {node.step for node in seen.nodes}:
        here = [node for node in seen.nodes if node.step == step]
        for rank, node in enumerate(here):
            assert (node.score is not None) == (node.token == END and rank < 2)


def test_every_result_has_its_path() -> None:
    seen = toy_film(Search(beam_size=3))
    for one, last in zip(seen.found, seen.last, strict=True):
        path = [seen.nodes[number] for number in seen.path(last)]
        tokens = [node.token for node in path]
        assert tuple(tokens[: len(one.ids)]) == one.ids
        assert path[-1].sum == pytest.approx(one.log_prob, abs=1e-5)
        if one.ended:
            assert path[-1].score == pytest.approx(one.score)


def test_a_model_says_the_same_in_translation_and_in_film() -> None:
    of = translator()
    (row,) = of.tokenizer.encode_source([TEXT])
    seen = film(of.torch_engine(), Job(source=row, limit=len(row) + 49), Search())
    (wanted,) = of.translate([TEXT], n_best=4, guard=False)
    assert [of.tokenizer.target.decode(one.ids) for one in seen.found] == [one.text for one in wanted.n_best]
    assert [one.score for one in seen.found] == pytest.approx([one.score for one in wanted.n_best], abs=1e-5)


def test_a_forced_beginning_is_the_only_way() -> None:
    of = translator()
    (row,) = of.tokenizer.encode_source([TEXT])
    free = film(of.torch_engine(), Job(source=row, limit=20), Search())
    other = next(node for node in free.nodes if node.step == 0 and node.token != free.found[0].ids[0])
    seen = film(of.torch_engine(), Job(source=row, prefix=(other.token,), limit=20), Search())
    assert {node.token for node in seen.nodes if node.step == 0} == {other.token}
    assert all(one.ids[0] == other.token for one in seen.found)
    assert seen.nodes[0].log_prob == pytest.approx(other.log_prob, abs=1e-5), "forced, it is as likely as it was"


def test_it_stops_when_it_is_told_to() -> None:
    of = translator()
    (row,) = of.tokenizer.encode_source([TEXT])
    with pytest.raises(Stopped):
        film(of.torch_engine(lambda: True), Job(source=row, limit=20), Search())
