"""A batch in pieces is the same batch: every row once, whoever takes it, and the same gradient."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from attent.data.loader import PairBatch, TokenBatch
from attent.models import Seq2Seq
from attent.training.objective import Seq2SeqObjective
from attent.training.state import MicroBatch, assign_to_rank, split_batch
from tests.training.toys import batches, model

Layout = Literal["packed", "bucketed"]
LAYOUTS: tuple[Layout, ...] = ("packed", "bucketed")


def batch(layout: Layout) -> PairBatch:
    return batches(400, layout).get_batch(0, 0)


def gradient(of: Seq2Seq, pieces: list[PairBatch]) -> list[Tensor]:
    objective = Seq2SeqObjective(of).train()
    losses = [objective(piece)[0] for piece in pieces]
    return list(torch.autograd.grad(sum(losses, torch.zeros(())), list(of.parameters())))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [40, 100, 199, 10_000])
def test_the_gradient_of_pieces_adds_up_to_that_of_the_batch(layout: Layout, tokens: int) -> None:
    of = model(dropout=0.0).double()
    whole = batch(layout)
    pieces = split_batch(whole, tokens, 1)
    assert len(pieces) > 1 or tokens == 10_000
    parts = zip(
        gradient(of, [whole.slice_rows(piece.start, piece.stop) for piece in pieces]),
        gradient(of, [whole]),
        strict=True,
    )
    for of_pieces, of_whole in parts:
        torch.testing.assert_close(of_pieces, of_whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("tokens", [None, 50, 128, 1000])
def test_the_shares_of_all_processes_cover_each_row_once(layout: Layout, ranks: int, tokens: int | None) -> None:
    whole = batch(layout)
    pieces = split_batch(whole, tokens, ranks)
    shares = [list(assign_to_rank(pieces, rank, ranks)) for rank in range(ranks)]
    assert len({len(mine) for mine in shares}) == 1  # their steps must meet
    rows = [row for mine in shares for piece in mine if piece.weight for row in range(piece.start, piece.stop)]
    assert sorted(rows) == list(range(len(whole.target.ids)))
    assert {piece.weight for mine in shares for piece in mine} <= {0.0, 1.0}
    assert all(piece.start < piece.stop for mine in shares for piece in mine)


def test_fewer_rows_than_processes_leave_some_with_a_piece_that_does_not_count() -> None:
    text = TokenBatch(torch.ones(2, 3, dtype=torch.long), torch.tensor([3, 2]), None, 5)
    pieces = split_batch(PairBatch(text, text, np.arange(2)), None, 5)
    assert pieces == [MicroBatch(0, 1), MicroBatch(1, 2)]
    assert [next(iter(assign_to_rank(pieces, rank, 5))).weight for rank in range(5)] == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cut_does_not_depend_on_how_many_share_it_when_there_is_enough_for_all(layout: Layout) -> None:
    whole = batch(layout)
    alone = split_batch(whole, 100, 1)
    assert all(split_batch(whole, 100, ranks) == alone for ranks in range(1, len(alone) + 1))


@pytest.mark.parametrize("tokens", [30, 64, 100, 400])
def test_no_piece_has_more_than_its_tokens_but_for_what_evenness_costs(tokens: int) -> None:
    """Rows are of one width: a piece is over by less than a row."""
    whole = batch("bucketed")
    width = max(whole.source.ids.shape[1], whole.target.ids.shape[1])
    pieces = split_batch(whole, tokens, 1)
    assert all((piece.stop - piece.start) * width < tokens + width for piece in pieces)
    assert all(one.stop == other.start for one, other in pairwise(pieces))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_batch_are_a_batch_with_their_own_pairs_and_tokens(layout: Layout) -> None:
    """Made again from the store, the pairs that a part says it has are the sentences that stand in it."""
    of = batches(400, layout)
    whole, count = of.get_batch(0, 0), 0
    for start in range(len(whole.target.ids)):
        part = whole.slice_rows(start, start + 1)
        for side, stored in ((part.source, of.store.source), (part.target, of.store.target)):
            expected = [int(token) for pair in part.example_ids for token in stored[int(pair)]]
            assert side.ids[side.token_mask()].tolist() == expected
            assert side.num_tokens == len(expected)
        count += len(part.example_ids)
    assert count == len(whole.example_ids)
    assert whole.slice_rows(0, len(whole.target.ids)) is whole
    assert (
        sum(whole.slice_rows(i, i + 1).target.num_tokens for i in range(len(whole.target.ids)))
        == whole.target.num_tokens
    )


def test_rows_of_a_packed_batch_keep_their_packing() -> None:
    whole = batch("packed")
    part = whole.slice_rows(1, 3)
    for side, of in ((part.source, whole.source), (part.target, whole.target)):
        assert side.packing is not None
        assert of.packing is not None
        assert torch.equal(side.packing.segments, of.packing.segments[1:3])
        assert torch.equal(side.packing.positions, of.packing.positions[1:3])
        assert torch.equal(side.packing.ends, of.packing.ends[1:3])
        assert side.packing.max_length == of.packing.max_length
