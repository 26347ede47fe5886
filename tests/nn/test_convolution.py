"""The convolutional stacks against torch's convolutions, and their configuration."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.models import build, presets
from attent.nn import ConvDecoderConfig, ConvEncoderConfig, ConvStack, Mask, Memory, Packing
from attent.nn.convolution import ConvBlock

B, T, E = 2, 7, 8


def make_stack(config: ConvEncoderConfig) -> ConvStack:
    torch.manual_seed(0)
    return ConvStack(config).double().eval()


def convolve(block: ConvBlock, x: Tensor, kernel: int, padding: tuple[int, int]) -> Tensor:
    """Gated linear units after torch's convolution."""
    linear = block.convolution
    channels = F.pad(x.transpose(1, 2), padding)
    return F.glu(F.conv1d(channels, linear.weight.view(2 * E, E, kernel), linear.bias), 1).transpose(1, 2)


def test_the_encoder_is_torchs_convolutions() -> None:
    stack, x = make_stack(ConvEncoderConfig(layers=2, width=E, kernel=5)), torch.randn(B, T, E, dtype=torch.float64)
    y = embedded = x + stack.positions.weight[:T]
    for block in stack.blocks:
        y = (y + convolve(block, y, 5, (2, 2))) * 0.5**0.5
    torch.testing.assert_close(stack(x), stack.norm((y + embedded) * 0.5**0.5))


def test_the_decoder_is_torchs_convolutions_and_attends_in_every_layer() -> None:
    stack, x = make_stack(ConvDecoderConfig(layers=2, width=E, kernel=4)), torch.randn(B, T, E, dtype=torch.float64)
    memory = Memory(torch.randn(B, 3, E, dtype=torch.float64), torch.tensor([3, 2]))
    y = embedded = x + stack.positions.weight[:T]
    for block in stack.blocks:
        hidden, attention = convolve(block, y, 4, (3, 0)), block.cross_attn
        assert attention is not None
        kv = attention.project_keys_values(memory.states)
        context = attention(hidden + embedded, kv, Mask(key_lengths=memory.lengths))
        y = (y + (hidden + context) * 0.5**0.5) * 0.5**0.5
    torch.testing.assert_close(stack(x, memory=memory), stack.norm(y))


def test_kernels_of_an_encoder_are_odd_and_rows_padded() -> None:
    with pytest.raises(ValueError, match="`kernel` must be odd, to have a middle, but is 4"):
        ConvEncoderConfig(kernel=4)
    with pytest.raises(ValueError, match="`packing` must be None for LSTMs and convolutions"):
        make_stack(ConvEncoderConfig(width=E))(torch.zeros(1, 3, E).double(), packing=Packing.from_lengths([[1, 2]]))
    with pytest.raises(ValueError, match="`=2 tokens, but one has 3"):
        make_stack(ConvEncoderConfig(width=E, max_length=2))(torch.zeros(1, 3, E).double())


@pytest.mark.parametrize("size", ["tiny", "small", "base", "big"])
def test_sizes_are_those_of_transformers(size: str) -> None:
    with torch.device("meta"):
        counts = [
            sum(parameter.numel() for parameter in build(presets.ARCHS[arch](8000, size)).parameters())
            for arch in ("conv", "transformer")
        ]
    assert 0.9 < counts[0] / counts[1] < 1.1
