"""The Transformer of "Attention Is All You Need": tensors in, tensors out. Imports torch and nothing else.

One letter means one thing in every comment of this package:

    B  batch            E  width of the model (d_model)        V  vocabulary
    T  length           H  query heads; Hkv key/value heads    S  sentences packed into a row
    Tq, Tk  length of the queries and of the keys              D  width of one head (d_k = d_v)

Queries, keys and values are (B, H, T, D) everywhere. Read in this order: `masks` (who may look at whom), `attend`
(equation 1), `attention` (many heads), `feedforward` (equation 2), `positions`, `block` (figure 1), `cache`.
"""

from attent.nn.attend import BACKENDS, Backend, Request, attend, choose, explicit, flex, fused, packed
from attent.nn.attention import Attention, Look, attention_layers, set_backend
from attent.nn.block import Block, Memory, Residual, Stack, StackConfig
from attent.nn.cache import KV, Cache, KVCache, LayerCache
from attent.nn.feedforward import FeedForward
from attent.nn.masks import Mask, Packing
from attent.nn.positions import (
    Alibi,
    AlibiConfig,
    Learned,
    LearnedConfig,
    LinearScaling,
    Llama3Scaling,
    Positions,
    PositionsConfig,
    Relative,
    RelativeConfig,
    Rotary,
    RotaryConfig,
    Sinusoidal,
    SinusoidalConfig,
    sinusoid,
)

__all__ = [
    "BACKENDS",
    "KV",
    "Alibi",
    "AlibiConfig",
    "Attention",
    "Backend",
    "Block",
    "Cache",
    "FeedForward",
    "KVCache",
    "LayerCache",
    "Learned",
    "LearnedConfig",
    "LinearScaling",
    "Llama3Scaling",
    "Look",
    "Mask",
    "Memory",
    "Packing",
    "Positions",
    "PositionsConfig",
    "Relative",
    "RelativeConfig",
    "Request",
    "Residual",
    "Rotary",
    "RotaryConfig",
    "Sinusoidal",
    "SinusoidalConfig",
    "Stack",
    "StackConfig",
    "attend",
    "attention_layers",
    "choose",
    "explicit",
    "flex",
    "fused",
    "packed",
    "set_backend",
    "sinusoid",
]
