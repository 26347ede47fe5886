"""The objective is the loss of the model's logits, for padded and packed batches, whole or in pieces."""

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


def padded(pairs: list[tuple[list[int], list[int]]] = PAIRS) -> PairBatch:
    def side(rows: list[list[int]]) -> TokenBatch:
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return TokenBatch(ids, torch.tensor([len(row) for row in rows]), None, sum(map(len, rows)))

    return PairBatch(side([p[0] for p in pairs]), side([p[1] for p in pairs]), np.arange(len(pairs)))


def packed() -> PairBatch:
    """Two sentences a row, and filler behind."""

    def side(rows: list[list[int]]) -> TokenBatch:
        couples = [rows[:2], rows[2:]]
        packing = Packing.from_lengths([[len(row) for row in couple] for couple in couples], 12)
        ids = [[*couple[0], *couple[1], *[0] * (12 - len(couple[0]) - len(couple[1]))] for couple in couples]
        return TokenBatch(torch.tensor(ids), None, packing, sum(map(len, rows)))

    return PairBatch(side([p[0] for p in PAIRS]), side([p[1] for p in PAIRS]), np.arange(len(PAIRS)))


def by_hand(of: Seq2Seq, smoothing: float) -> tuple[Tensor, Tensor]:
    """Pair by pair, without any filler."""
    loss, plain = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for source, target in PAIRS:
        right = torch.tensor(target)
        logits = of(torch.tensor([source]), shift_right(right[None], of.config.start_id))[0]
        loss = loss + F.cross_entropy(logits, right, label_smoothing=smoothing, reduction="sum")
        plain = plain + F.cross_entropy(logits, right, reduction="sum").detach()
    return loss, plain


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def same_gradients(of: Seq2Seq, ours: Tensor, theirs: Tensor) -> None:
    parameters = list(of.parameters())
    for grads in zip(*(torch.autograd.grad(loss, parameters) for loss in (ours, theirs)), strict=True):
        close(*grads)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("batch", [padded(), packed()], ids=["padded", "packed"])
def test_it_is_the_loss_of_each_pair_by_itself(config: Seq2SeqConfig, batch: PairBatch) -> None:
    of = model(config)
    loss, plain = Seq2SeqObjective(of, smoothing=0.1).train()(batch)
    theirs, their_plain = by_hand(of, 0.1)
    close(loss, theirs)
    close(plain, their_plain)
    same_gradients(of, loss, theirs)


def test_pieces_add_up_to_the_whole() -> None:
    of = model()
    objective = Seq2SeqObjective(of).train()
    pieces = [objective(padded().slice_rows(start, start + 1))[0] for start in range(len(PAIRS))]
    whole = objective(padded())[0]
    close(sum(pieces, torch.zeros(())), whole)
    same_gradients(of, sum(pieces, torch.zeros(())), whole)


def test_rdrop_compares_two_draws_of_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row the same ids twice, and different states: these two go into R-Drop's loss."""
    met: list[tuple[Tensor, ...]] = []

    def watched(first: Tensor, second: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        met.append((first, second))
        assert rest[-2:] == (0.2, 3.0)
        return (first - second).sum(), first.sum()

    monkeypatch.setattr("attent.training.objective.rdrop_loss", watched)
    objective = Seq2SeqObjective(model(dropout=0.5), smoothing=0.2, rdrop=3.0).train()
    for batch in (padded(), packed()):
        objective(batch)
    objective.eval()(padded())
    assert len(met) == 2, "it is for training only"
    for first, second in met:
        assert first.shape == second.shape
        assert not torch.allclose(first, second)


@pytest.mark.parametrize("batch", [padded(), packed()], ids=["padded", "packed"])
def test_rdrop_without_dropout_is_the_plain_loss(batch: PairBatch) -> None:
    of = model()
    ours, plain = Seq2SeqObjective(of, rdrop=5.0).train()(batch)
    theirs, their_plain = by_hand(of, 0.1)
    close(ours, theirs)
    close(plain, their_plain)
    same_gradients(of, ours, theirs)


def test_more_rdrop_costs_more() -> None:
    of, losses = model(dropout=0.5), []
    for rdrop in (1e-9, 5.0):
        torch.manual_seed(1)
        losses.append(float(Seq2SeqObjective(of, rdrop=rdrop).train()(padded())[0].detach()))
    assert losses[1] > losses[0] + 0.1


def test_every_parameter_learns_from_a_batch_even_from_one_without_pairs() -> None:
    nothing = TokenBatch(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long), None, 0)
    for batch, learns in ((padded(), True), (PairBatch(nothing, nothing, np.arange(0)), False)):
        objective = Seq2SeqObjective(model(UNTIED)).train()
        loss, plain = objective(batch)
        loss.backward()
        assert (float(plain) > 0) == learns
        grads = [parameter.grad for parameter in objective.parameters()]
        assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)
        assert any(bool(grad.any()) for grad in grads if grad is not None) == learns


def test_a_frozen_embedding_stays_without_a_gradient() -> None:
    of = model()
    of.target_embedding.weight.requires_grad_(False)
    Seq2SeqObjective(of).train()(padded())[0].backward()
    assert of.target_embedding.weight.grad is None
    assert of.decoder.blocks[0].self_attn.query.weight.grad is not None


def test_it_holds_the_model_and_nothing_else() -> None:
    of = model()
    objective = Seq2SeqObjective(of)
    assert {name.removeprefix("model.") for name in objective.state_dict()} == set(of.state_dict())
    other = copy.deepcopy(objective)
    torch.nn.init.zeros_(other.model.target_embedding.weight)
    close(other(padded())[1], torch.tensor(padded().target.num_tokens * math.log(CONFIG.vocab), dtype=torch.float64))
    assert abs(float(objective(padded())[1] - other(padded())[1])) > 1e-3


@pytest.mark.parametrize(
    ("batch", "rdrop"),
    [
        pytest.param(padded(), 0.0, id="padded", marks=pytest.mark.slow),
        pytest.param(packed(), 0.0, id="packed"),
        pytest.param(padded(), 5.0, id="padded, rdrop"),
        pytest.param(packed(), 5.0, id="packed, rdrop", marks=pytest.mark.slow),
    ],
)
def test_compiled_it_is_one_graph_with_the_same_loss(
    batch: PairBatch, rdrop: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    of = model()
    ours, theirs = Seq2SeqObjective(of, rdrop=rdrop, compile=True).train()(batch)[0], by_hand(of, 0.1)[0]
    close(ours, theirs)
    same_gradients(of, ours, theirs)


def test_a_table_of_positions_stays_where_a_recording_reads_it() -> None:
    """Validation meets longer sentences, in batches that are not packed: nothing may move for these."""
    of = model()
    objective = Seq2SeqObjective(of)
    objective(packed())
    positions = of.encoder.positions
    table = positions.table
    assert table is not None
    objective(padded([([5] * 60, [6] * 70)]))
    assert positions.table is table
    positions.precompute(100, of.config.encoder.width, torch.device("cpu"))
    assert len(positions.table) == 100
    assert any(kept is table for kept in positions.old_tables)


def test_a_mistake_is_told() -> None:
    with pytest.raises(ValueError, match="`smoothing` must be at least 0 and less than 1, but is 2"):
        Seq2SeqObjective(model(), smoothing=2)
    with pytest.raises(ValueError, match="`rdrop` must be 0 or more"):
        Seq2SeqObjective(model(), rdrop=-1)
