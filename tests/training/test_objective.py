"""The objective is the loss of the model's logits, for padded and packed batches, whole or in micro-batches."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.data.loader import PairBatch, TokenBatch
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.models.config import mirror_encoder
from attent.nn import Packing, StackConfig
from attent.training.objective import Seq2SeqObjective

PAIRS = [([5, 6, 2], [7, 8, 9, 2]), ([4, 2], [3, 2]), ([9, 8, 7, 6, 2], [5, 2]), ([3, 3, 2], [4, 5, 6, 7, 2])]
STACK = StackConfig(layers=2, width=16, heads=2, ffn_width=24, dropout=0.0)
CONFIG = Seq2SeqConfig(vocab=11, encoder=STACK, decoder=mirror_encoder(STACK), start_id=1)
UNTIED = replace(CONFIG, share_embeddings=False, tie_output=False, target_vocab=13, output_bias=True, start_id=6)


def model(config: Seq2SeqConfig = CONFIG, dropout: float = 0.0) -> Seq2Seq:
    encoder = replace(config.encoder, dropout=dropout)
    made = Seq2Seq(replace(config, encoder=encoder, decoder=mirror_encoder(encoder))).double()
    if made.output.bias is not None:
        torch.nn.init.normal_(made.output.bias)
    return made


def make_padded_batch(pairs: list[tuple[list[int], list[int]]] = PAIRS) -> PairBatch:
    def side(rows: list[list[int]]) -> TokenBatch:
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return TokenBatch(ids, torch.tensor([len(row) for row in rows]), None, sum(map(len, rows)))

    return PairBatch(side([p[0] for p in pairs]), side([p[1] for p in pairs]), np.arange(len(pairs)))


def make_packed_batch() -> PairBatch:
    """Two sentences per row, followed by padding."""

    def side(rows: list[list[int]]) -> TokenBatch:
        couples = [rows[:2], rows[2:]]
        packing = Packing.from_lengths([[len(row) for row in couple] for couple in couples], 12)
        ids = [[*couple[0], *couple[1], *[0] * (12 - len(couple[0]) - len(couple[1]))] for couple in couples]
        return TokenBatch(torch.tensor(ids), None, packing, sum(map(len, rows)))

    return PairBatch(side([p[0] for p in PAIRS]), side([p[1] for p in PAIRS]), np.arange(len(PAIRS)))


def reference_loss(network: Seq2Seq, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss pair by pair, without padding."""
    loss, plain = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for source, target in PAIRS:
        right = torch.tensor(target)
        logits = network(torch.tensor([source]), shift_right(right[None], network.config.start_id))[0]
        loss = loss + F.cross_entropy(logits, right, label_smoothing=smoothing, reduction="sum")
        plain = plain + F.cross_entropy(logits, right, reduction="sum").detach()
    return loss, plain


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def assert_same_gradients(network: Seq2Seq, ours: Tensor, theirs: Tensor) -> None:
    parameters = list(network.parameters())
    for grads in zip(*(torch.autograd.grad(loss, parameters) for loss in (ours, theirs)), strict=True):
        assert_close(*grads)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("batch", [make_padded_batch(), make_packed_batch()], ids=["padded", "packed"])
def test_the_loss_is_the_sum_over_single_pairs(config: Seq2SeqConfig, batch: PairBatch) -> None:
    network = model(config)
    loss, plain = Seq2SeqObjective(network, smoothing=0.1).train()(batch)
    theirs, their_plain = reference_loss(network, 0.1)
    assert_close(loss, theirs)
    assert_close(plain, their_plain)
    assert_same_gradients(network, loss, theirs)


def test_micro_batches_add_up_to_the_batch() -> None:
    network = model()
    objective = Seq2SeqObjective(network).train()
    pieces = [objective(make_padded_batch().slice_rows(start, start + 1))[0] for start in range(len(PAIRS))]
    whole = objective(make_padded_batch())[0]
    assert_close(sum(pieces, torch.zeros(())), whole)
    assert_same_gradients(network, sum(pieces, torch.zeros(())), whole)


def test_rdrop_compares_two_dropout_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the same ids twice and different states: both are passed to R-Drop's loss."""
    met: list[tuple[Tensor, ...]] = []

    def record_states(first: Tensor, second: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        met.append((first, second))
        assert rest[-2:] == (0.2, 3.0)
        return (first - second).sum(), first.sum()

    monkeypatch.setattr("attent.training.objective.rdrop_loss", record_states)
    objective = Seq2SeqObjective(model(dropout=0.5), smoothing=0.2, rdrop=3.0).train()
    for batch in (make_padded_batch(), make_packed_batch()):
        objective(batch)
    objective.eval()(make_padded_batch())
    assert len(met) == 2, "it is for training only"
    for first, second in met:
        assert first.shape == second.shape
        assert not torch.allclose(first, second)


@pytest.mark.parametrize("batch", [make_padded_batch(), make_packed_batch()], ids=["padded", "packed"])
def test_rdrop_without_dropout_is_the_plain_loss(batch: PairBatch) -> None:
    network = model()
    ours, plain = Seq2SeqObjective(network, smoothing=0.1, rdrop=5.0).train()(batch)
    theirs, their_plain = reference_loss(network, 0.1)
    assert_close(ours, theirs)
    assert_close(plain, their_plain)
    assert_same_gradients(network, ours, theirs)


def test_a_larger_rdrop_weight_gives_a_larger_loss() -> None:
    network, losses = model(dropout=0.5), []
    for rdrop in (1e-9, 5.0):
        torch.manual_seed(1)
        losses.append(float(Seq2SeqObjective(network, rdrop=rdrop).train()(make_padded_batch())[0].detach()))
    assert losses[1] > losses[0] + 0.1


def test_every_parameter_has_a_gradient_even_from_an_empty_batch() -> None:
    nothing = TokenBatch(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long), None, 0)
    for batch, learns in ((make_padded_batch(), True), (PairBatch(nothing, nothing, np.arange(0)), False)):
        objective = Seq2SeqObjective(model(UNTIED)).train()
        loss, plain = objective(batch)
        loss.backward()
        assert (float(plain) > 0) == learns
        grads = [parameter.grad for parameter in objective.parameters()]
        assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)
        assert any(bool(grad.any()) for grad in grads if grad is not None) == learns


def test_a_frozen_embedding_has_no_gradient() -> None:
    network = model()
    network.target_embedding.weight.requires_grad_(False)
    Seq2SeqObjective(network).train()(make_padded_batch())[0].backward()
    assert network.target_embedding.weight.grad is None
    assert network.decoder.blocks[0].self_attn.query.weight.grad is not None


def test_the_objective_has_the_parameters_of_the_model_only() -> None:
    network = model()
    objective = Seq2SeqObjective(network)
    assert {name.removeprefix("model.") for name in objective.state_dict()} == set(network.state_dict())
    other = copy.deepcopy(objective)
    torch.nn.init.zeros_(other.model.target_embedding.weight)
    assert_close(
        other(make_padded_batch())[1],
        torch.tensor(make_padded_batch().target.num_tokens * math.log(CONFIG.vocab), dtype=torch.float64),
    )
    assert abs(float(objective(make_padded_batch())[1] - other(make_padded_batch())[1])) > 1e-3


@pytest.mark.parametrize(
    ("batch", "rdrop"),
    [
        pytest.param(make_padded_batch(), 0.0, id="padded", marks=pytest.mark.slow),
        pytest.param(make_packed_batch(), 0.0, id="packed"),
        pytest.param(make_padded_batch(), 5.0, id="padded, rdrop"),
        pytest.param(make_packed_batch(), 5.0, id="packed, rdrop", marks=pytest.mark.slow),
    ],
)
def test_the_objective_compiles_to_one_graph_with_the_same_loss(
    batch: PairBatch, rdrop: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    network = model()
    ours, theirs = (
        Seq2SeqObjective(network, smoothing=0.1, rdrop=rdrop, compile=True).train()(batch)[0],
        reference_loss(network, 0.1)[0],
    )
    assert_close(ours, theirs)
    assert_same_gradients(network, ours, theirs)


def test_position_tables_keep_their_address_for_cuda_graphs() -> None:
    """Validation has longer sentences in batches that are not packed, which must not reallocate the table."""
    network = model()
    objective = Seq2SeqObjective(network)
    objective(make_packed_batch())
    positions = network.encoder.positions
    table = positions.table
    assert table is not None
    objective(make_padded_batch([([5] * 60, [6] * 70)]))
    assert positions.table is table
    positions.precompute(100, network.config.encoder.width, torch.device("cpu"))
    assert len(positions.table) == 100
    assert any(old_table is table for old_table in positions.old_tables)


def test_invalid_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="`smoothing` must be at least 0 and less than 1, but is 2"):
        Seq2SeqObjective(model(), smoothing=2)
    with pytest.raises(ValueError, match="`rdrop` must be 0 or more"):
        Seq2SeqObjective(model(), rdrop=-1)
