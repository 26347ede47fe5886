"""Compiled graphs are reused: changing sizes, decoding steps and packed batches do not recompile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import attent
from attent.models import Seq2Seq, shift_right
from attent.nn import LearnedConfig, Packing
from tests.laws.helpers import assert_close


def small(positions: object = None) -> Seq2Seq:
    config = attent.presets.tiny(vocab=50)
    if positions is not None:
        config = replace(
            config,
            encoder=replace(config.encoder, positions=positions),
            decoder=replace(config.decoder, positions=positions),
        )
    encoder, decoder = replace(config.encoder, layers=1), replace(config.decoder, layers=1)
    return attent.build(replace(config, encoder=encoder, decoder=decoder)).eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 50, shape)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.slow
def test_padded_batches_of_any_size_share_two_graphs() -> None:
    """One for the first size, one for all others."""
    model, graphs = small(), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for rows, T, U in ((3, 7, 5), (4, 9, 6), (2, 12, 11), (5, 4, 8), (6, 13, 3)):
        batch = (ids(rows, T), ids(rows, U), torch.randint(1, T + 1, (rows,)), torch.randint(1, U + 1, (rows,)))
        with torch.no_grad():
            assert_close(compiled(*batch), model(*batch))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_steps_of_decoding_share_a_few_graphs(ragged: bool) -> None:
    model, graphs = small(), CompileCounter()
    step = torch.compile(model.step, fullgraph=True, backend=graphs)
    source, target, lengths = ids(3, 6), ids(3, 14), torch.tensor([6, 2, 4])
    caches = [model.init_decoder_state(source, lengths, capacity=14) for _ in range(2)]
    for cache in caches:
        model.step(target[:, :2], cache, torch.tensor([2, 1, 1]) if ragged else None)
    for t in range(2, 14):
        assert_close(step(target[:, t : t + 1], caches[0]), model.step(target[:, t : t + 1], caches[1]))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("positions", [None, LearnedConfig(max_length=8)], ids=["sinusoidal", "learned"])
def test_packed_batches_of_fixed_shape_share_one_graph(positions: object) -> None:
    """Row width and number of sentences are fixed as in training, their lengths vary."""
    model, graphs = small(positions), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=False)
    layouts = ([[3, 4], [5, 1, 2]], [[8], [2, 2, 2]], [[1], [7, 1]], [[2, 6], [4]])
    for layout in layouts:
        packing = Packing.from_lengths(layout, row_length=12, max_sentences=4)
        batch = (ids(2, 12), shift_right(ids(2, 12), 1, packing))
        with torch.no_grad():
            assert_close(compiled(*batch, packing=(packing, packing)), model(*batch, packing=(packing, packing)))
    assert graphs.frame_count == 1


def test_the_model_exports_with_free_sizes() -> None:
    from torch.export import Dim, export

    model = small()
    batch, source_length, target_length = Dim("B", min=2, max=64), Dim("T", min=2, max=64), Dim("U", min=2, max=64)
    example = (ids(3, 7), ids(3, 5), torch.tensor([7, 3, 2]), torch.tensor([5, 1, 4]))
    shapes = ({0: batch, 1: source_length}, {0: batch, 1: target_length}, {0: batch}, {0: batch})
    exported = export(model, example, dynamic_shapes=shapes).module()
    other = (ids(5, 11), ids(5, 9), torch.tensor([1, 11, 4, 8, 2]), torch.tensor([9, 9, 1, 2, 3]))
    assert_close(exported(*other), model(*other))
