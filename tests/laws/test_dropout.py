"""Dropout is active in training only, and applied where the paper says: section 5.4."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import Attention, FeedForward, Stack, StackConfig, dropout
from tests.laws.helpers import TOY, assert_close, every_stack, make_memory, make_stack, parametrize_all, random_states

KINDS = ("dropout", "attention_dropout", "activation_dropout")


@every_stack
def test_dropout_is_off_in_eval_mode(config: StackConfig, device: torch.device) -> None:
    """Every call equals a stack without dropout."""
    stack = make_stack(replace(config, dropout=0.5, attention_dropout=0.5, activation_dropout=0.5), device)
    x, memory = random_states(2, 5, device=device), make_memory(config, 2, device)
    without = Stack(config).to(x).eval()
    without.load_state_dict(stack.state_dict())
    expected = without(x, memory=memory)
    assert_close(stack(x, memory=memory), expected)
    assert_close(stack(x, memory=memory), expected)
    assert torch.equal(without.train()(x, memory=memory), expected)  # without dropout, training mode is the same


@pytest.mark.parametrize("kind", KINDS)
@parametrize_all("config", {"encoder": TOY, "decoder": replace(TOY, causal=True, norm_order="pre")})
def test_each_dropout_is_active_in_training(config: StackConfig, kind: str, device: torch.device) -> None:
    stack = make_stack(replace(config, **{kind: 0.5}), device).train()
    x = random_states(2, 5, device=device)
    assert not torch.allclose(stack(x), stack(x), rtol=1e-3, atol=1e-3)


class DropoutRecorder:
    """Replace dropout: record its inputs and rates, and drop nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.met: list[tuple[Tensor, float]] = []
        self.on_weights: list[float] = []
        monkeypatch.setattr(dropout, "apply_dropout", self.drop)
        fused = F.scaled_dot_product_attention

        def record_rate(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, **rest: object) -> Tensor:
            self.on_weights.append(rate)
            return fused(q, k, v, mask, 0.0, **rest)

        monkeypatch.setattr(F, "scaled_dot_product_attention", record_rate)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        self.met.append((x, rate))
        return x


@pytest.mark.parametrize("order", ["post", "pre"])
def test_dropout_is_where_the_paper_has_it(order: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """On embeddings + positions of both sides, and on each sub-layer's output before the residual; nowhere else."""
    encoder = replace(TOY, norm_order=order, dropout=0.25)
    model = Seq2Seq(Seq2SeqConfig(vocab=9, encoder=encoder, decoder=mirror_encoder(encoder))).to(device).train()
    outputs: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, (Attention, FeedForward)):
            module.register_forward_hook(lambda _, __, out: outputs.append(out))
    dice = DropoutRecorder(monkeypatch)
    source, target = torch.randint(0, 9, (2, 3, 4)).to(device)
    model(source, target)

    layers = encoder.layers
    assert len(dice.met) == (1 + 2 * layers) + (1 + 3 * layers)
    assert {p for _, p in dice.met} == {0.25}
    assert dice.on_weights == [0.0] * 3 * layers, "the paper drops no attention weights"
    embeddings = [dice.met[0][0], dice.met[1 + 2 * layers][0]]
    sublayers = [x for i, (x, _) in enumerate(dice.met) if i not in (0, 1 + 2 * layers)]
    assert all(dropped is out for dropped, out in zip(sublayers, outputs, strict=True))
    for x, embedding, stack, ids in zip(
        embeddings,
        (model.source_embedding, model.target_embedding),
        (model.encoder, model.decoder),
        (source, target),
        strict=True,
    ):
        assert_close(x, stack.positions.embed(embedding(ids), torch.arange(4, device=device)))


def test_attention_and_activation_dropout_are_applied_to_weights_and_activations(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    config = replace(TOY, attention_dropout=0.125, activation_dropout=0.375)
    stack, x = make_stack(config, device).train(), random_states(2, 4, device=device)
    dice = DropoutRecorder(monkeypatch)
    stack(x)
    assert dice.on_weights == [0.125] * config.layers
    assert [(p, inner.shape[-1]) for inner, p in dice.met] == [(0.375, config.ffn_width)] * config.layers


def test_remaining_values_are_scaled_up(device: torch.device) -> None:
    """Over many draws, the mean of a stack in training equals its output in eval mode."""
    stack = make_stack(replace(TOY, layers=1, dropout=0.5), device).train()
    ones = torch.ones(4000, 4, device=device)
    dropped = stack.dropout(ones)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert abs(float(dropped.mean()) - 1) < 0.05
