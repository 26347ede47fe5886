"""The Transformer of "Attention Is All You Need": tensors in, tensors out. Imports torch and nothing else.

One letter has one meaning in all comments of this package:

    B  batch            E  width of the model (d_model)        V  vocabulary
    T  length           H  query heads; Hkv key/value heads    S  sentences packed into a row
    Tq, Tk  length of the queries and of the keys              D  width of one head (d_k = d_v)

Queries, keys and values are (B, H, T, D) everywhere. Read in this order: `masks` (visibility), `dot_product` (equation
1), `attention` (multi-head), `feedforward` (equation 2), `positions`, `block` and `stack` (figure 1), `cache`. The fast
paths are in `backends`, `fused` and `kernels`, and what the paper compares with in `recurrent` and `convolution`.
"""

from attent.nn.attention import Attention, AttentionRecord, get_attention_layers, set_backend
from attent.nn.backends import BACKENDS, attend, choose_backend
from attent.nn.block import Block, BlockContext, Memory, Residual
from attent.nn.cache import Cache
from attent.nn.config import StackConfig
from attent.nn.convolution import ConvDecoderConfig, ConvEncoderConfig, ConvStack
from attent.nn.dot_product import AttentionInputs, attend_explicit
from attent.nn.feedforward import FeedForward
from attent.nn.frontends import AudioConfig, ImageConfig, LogMelSpectrogram
from attent.nn.masks import Mask, Packing
from attent.nn.positions import (
    AlibiConfig,
    LearnedConfig,
    LinearScaling,
    Llama3Scaling,
    RelativeConfig,
    RotaryConfig,
    SinusoidalConfig,
    make_sinusoids,
)
from attent.nn.recurrent import LSTMDecoder, LSTMDecoderConfig, LSTMEncoder, LSTMEncoderConfig
from attent.nn.stack import Stack

__all__ = [
    "BACKENDS", "AlibiConfig", "Attention", "AttentionInputs", "AttentionRecord", "AudioConfig", "Block",
    "BlockContext", "Cache", "ConvDecoderConfig", "ConvEncoderConfig", "ConvStack", "FeedForward", "ImageConfig",
    "LSTMDecoder", "LSTMDecoderConfig", "LSTMEncoder", "LSTMEncoderConfig", "LearnedConfig", "LinearScaling",
    "Llama3Scaling", "LogMelSpectrogram", "Mask", "Memory", "Packing", "RelativeConfig", "Residual", "RotaryConfig",
    "SinusoidalConfig", "Stack", "StackConfig", "attend", "attend_explicit", "choose_backend", "get_attention_layers",
    "make_sinusoids", "set_backend",
]  # fmt: skip
