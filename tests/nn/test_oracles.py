"""PyTorch's attention, encoder and decoder with the same weights give the same outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attent.nn import Attention, Block, Mask, Memory, Residual, Stack, StackConfig, make_sinusoids
from attent.nn.dot_product import attend_explicit
from attent.nn.kernels.attention import attend_few_queries

B, T, E, H = 2, 5, 16, 4
CONFIG = StackConfig(layers=2, width=E, heads=H, ffn_width=24, dropout=0.0)


def randomize(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module.double().eval()


def states(T: int) -> Tensor:
    return torch.randn(B, T, E, dtype=torch.float64)


def copy(theirs: nn.Module, ours: nn.Linear | nn.LayerNorm) -> None:
    ours.load_state_dict(theirs.state_dict())


def copy_attention(theirs: nn.MultiheadAttention, ours: Attention) -> None:
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    for linear, weight, bias in zip((ours.query, ours.key, ours.value), weights, biases, strict=True):
        linear.load_state_dict({"weight": weight, "bias": bias})
    copy(theirs.out_proj, ours.output)


def copy_block(theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, ours: Block) -> None:
    residuals: list[Residual] = [ours.self_attn_residual, ours.feedforward_residual]
    copy_attention(theirs.self_attn, ours.self_attn)
    if ours.cross_attn is not None:
        copy_attention(theirs.multihead_attn, ours.cross_attn)
        residuals.insert(1, ours.cross_attn_residual)
    copy(theirs.linear1, ours.feedforward.expand)
    copy(theirs.linear2, ours.feedforward.contract)
    for i, residual in enumerate(residuals, 1):
        copy(getattr(theirs, f"norm{i}"), residual.norm)


def copy_stack(theirs: nn.TransformerEncoder | nn.TransformerDecoder, ours: Stack) -> None:
    for layer, block in zip(theirs.layers, ours.blocks, strict=True):
        copy_block(layer, block)
    if theirs.norm is not None:
        copy(theirs.norm, ours.norm)


def test_attention_is_pytorchs() -> None:
    theirs = randomize(nn.MultiheadAttention(E, H, batch_first=True))
    ours = Attention(StackConfig(width=E, heads=H)).double()
    copy_attention(theirs, ours)
    x, y, lengths = states(T), states(7), torch.tensor([7, 3])
    padding = torch.arange(7) >= lengths[:, None]
    expected, weights = theirs(x, y, y, key_padding_mask=padding, average_attn_weights=False)
    looks: list[Tensor] = []
    ours.observers.append(lambda look: looks.append(look.weights))
    torch.testing.assert_close(ours(x, ours.project_keys_values(y), Mask(key_lengths=lengths)), expected)
    torch.testing.assert_close(looks[0], weights)
    future = torch.ones(T, T).triu(1).bool()
    expected, _ = theirs(x, x, x, attn_mask=future)
    torch.testing.assert_close(ours(x, ours.project_keys_values(x), Mask(causal=True)), expected)


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_encoder_is_pytorchs(order: str, activation: str) -> None:
    pre = order == "pre"
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, activation, batch_first=True, norm_first=pre)
    theirs = randomize(
        nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(E) if pre else None, enable_nested_tensor=False)
    )
    ours = Stack(replace(CONFIG, norm_order=order, activation=activation)).double()
    copy_stack(theirs, ours)
    x, lengths = states(T), torch.tensor([T, 3])
    expected = theirs(x + make_sinusoids(torch.arange(T), E), src_key_padding_mask=torch.arange(T) >= lengths[:, None])
    actual = ours(x, lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(actual[row, :length], expected[row, :length])


@pytest.mark.parametrize("order", ["post", "pre"])
def test_the_decoder_is_pytorchs(order: str) -> None:
    pre = order == "pre"
    layer = nn.TransformerDecoderLayer(E, H, 24, 0.0, batch_first=True, norm_first=pre)
    theirs = randomize(nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(E) if pre else None))
    ours = Stack(replace(CONFIG, norm_order=order, causal=True, cross_attention=True)).double()
    copy_stack(theirs, ours)
    x, memory, lengths = states(T), states(6), torch.tensor([6, 2])
    expected = theirs(
        x + make_sinusoids(torch.arange(T), E),
        memory,
        tgt_mask=torch.ones(T, T).triu(1).bool(),
        memory_key_padding_mask=torch.arange(6) >= lengths[:, None],
    )
    torch.testing.assert_close(ours(x, memory=Memory(memory, lengths)), expected)


def test_rms_norm_by_hand() -> None:
    stack = Stack(replace(CONFIG, norm="rms", norm_order="pre", norm_eps=1e-3)).double()
    x = states(T)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(stack.norm(x), expected)
    assert not isinstance(Stack(replace(CONFIG, norm="rms")).norm, nn.RMSNorm)  # post-norm: no final norm


@pytest.mark.parametrize("queries", [1, 4])
def test_the_path_for_few_queries_is_equation_1(queries: int) -> None:
    q, k, v = torch.randn(3, 2, queries, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    mask = Mask(key_lengths=torch.tensor([11, 4, 1]))
    visible = mask.to_dense(3, queries, 11, q.device)
    torch.testing.assert_close(attend_few_queries(q, k, v, visible, 0.3), attend_explicit(q, k, v, mask, scale=0.3)[0])
    bias = torch.randn(1, 2, queries, 11)
    hidden = bias.masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(attend_few_queries(q, k, v, hidden, 0.3), attend_explicit(q, k, v, mask, bias, 0.3)[0])
