"""Position-wise feed-forward network (section 3.3, equation 2): the same two layers at every position."""

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from attent.nn.argument_checks import check_states
from attent.nn.config import Activation, StackConfig, choose_config
from attent.nn.dropout import Dropout

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,  # the paper
    "gelu": F.gelu,  # BERT, ViT
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),  # GPT-2, T5 v1.1
    "silu": F.silu,  # Marian calls it swish; gated, it is LLaMA's SwiGLU
}


class FeedForward(nn.Module):
    """Equation 2: FFN(x) = max(0, x W1 + b1) W2 + b2; gated (SwiGLU and similar): (act(x W1) * x W3) W2.

    >>> attent.nn.FeedForward(width=64, ffn_width=256)(torch.randn(2, 7, 64)).shape
    torch.Size([2, 7, 64])
    """

    def __init__(
        self, config: StackConfig | None = None, *, width: int | None = None, ffn_width: int | None = None
    ) -> None:
        """Alone in another model, `width` (default 512) and `ffn_width` (default 2048) replace the config."""
        super().__init__()
        config = choose_config(config, width=width, ffn_width=ffn_width)
        self.width = config.width
        self.expand = nn.Linear(config.width, config.ffn_width, bias=config.bias)  # W1
        self.gate = nn.Linear(config.width, config.ffn_width, bias=config.bias) if config.gated else None  # W3
        self.contract = nn.Linear(config.ffn_width, config.width, bias=config.bias)  # W2
        self.activation = config.activation
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        check_states("x", x, self.width)
        return self.contract(self.compute_hidden(x))  # (B, T, ffn_width) -> (B, T, E)

    def compute_hidden(self, x: Tensor) -> Tensor:
        hidden = ACTIVATIONS[self.activation](self.expand(x))  # (B, T, E) -> (B, T, ffn_width)
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        return self.dropout(hidden)
