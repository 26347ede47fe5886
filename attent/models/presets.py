"""Named configs. Each is written as its difference from another, as documentation; so is the `repr` of every config.

>>> attent.presets.replace_stacks(attent.presets.base(vocab=8000), dropout=0.2)
presets.base(vocab=8000) with encoder.dropout=0.2, decoder.dropout=0.2
>>> model = attent.build(attent.presets.tiny(vocab=100))
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from attent.models.config import PRESETS, CausalConfig, EncoderConfig, Seq2SeqConfig, VisionConfig, mirror_encoder
from attent.nn import (
    ConvDecoderConfig,
    ConvEncoderConfig,
    LearnedConfig,
    LSTMDecoderConfig,
    LSTMEncoderConfig,
    RelativeConfig,
    RotaryConfig,
    StackConfig,
)

ConfigT = TypeVar("ConfigT", Seq2SeqConfig, CausalConfig, EncoderConfig, VisionConfig)


def base(vocab: int) -> Seq2SeqConfig:
    """The paper's base model (table 3): 6 + 6 layers, d_model 512, d_ff 2048, 8 heads of 64, dropout 0.1."""
    return make_seq2seq(vocab, StackConfig())


def big(vocab: int) -> Seq2SeqConfig:
    """The paper's big model (table 3): twice as wide, dropout 0.3."""
    return make_seq2seq(vocab, replace(StackConfig(), width=1024, ffn_width=4096, heads=16, dropout=0.3))


def small(vocab: int) -> Seq2SeqConfig:
    """Half the width and depth of base: for some hundred thousand pairs, or for a laptop."""
    return make_seq2seq(vocab, replace(StackConfig(), layers=3, width=256, ffn_width=1024))


def tiny(vocab: int) -> Seq2SeqConfig:
    """For some ten thousand pairs: about 2.4M parameters with 8,000 subwords. Larger models overfit."""
    return make_seq2seq(vocab, replace(StackConfig(), layers=4, width=128, ffn_width=256, heads=4, dropout=0.3))


def make_seq2seq(vocab: int, encoder: StackConfig) -> Seq2SeqConfig:
    """An encoder and the decoder that mirrors it."""
    return Seq2SeqConfig(vocab=vocab, encoder=encoder, decoder=mirror_encoder(encoder))


LSTM_SIZES = {"tiny": (128, 0.3), "small": (256, 0.1), "base": (704, 0.1), "big": (1408, 0.3)}  # width, dropout


def lstm(vocab: int, size: str = "small") -> Seq2SeqConfig:
    """An attentive LSTM with about as many parameters as the Transformer of a size, tiny to big."""
    width, dropout = LSTM_SIZES[size]
    encoder = LSTMEncoderConfig(width=width, dropout=dropout)
    return Seq2SeqConfig(vocab=vocab, encoder=encoder, decoder=LSTMDecoderConfig(width=width, dropout=dropout))


def lstm_no_attention(vocab: int, size: str = "small") -> Seq2SeqConfig:
    """An LSTM whose decoder knows only the last states of the encoder (Sutskever et al. 2014)."""
    width, dropout = LSTM_SIZES[size]
    decoder = LSTMDecoderConfig(width=width, dropout=dropout, attention="none", input_feeding=False)
    return replace(lstm(vocab, size), decoder=decoder)


CONV_SIZES = {"tiny": (5, 128, 0.3), "small": (5, 256, 0.1), "base": (10, 512, 0.1), "big": (10, 1024, 0.3)}


def conv(vocab: int, size: str = "small") -> Seq2SeqConfig:
    """Convolutions with about as many parameters as the Transformer of a size, tiny to big."""
    layers, width, dropout = CONV_SIZES[size]
    encoder = ConvEncoderConfig(layers=layers, width=width, dropout=dropout)
    decoder = ConvDecoderConfig(layers=layers, width=width, dropout=dropout)
    return Seq2SeqConfig(vocab=vocab, encoder=encoder, decoder=decoder)


ARCHS: dict[str, Callable[[int, str], Seq2SeqConfig]] = {  # name -> (vocabulary, size) -> config
    "transformer": lambda vocab, size: {"tiny": tiny, "small": small, "base": base, "big": big}[size](vocab),
    "lstm": lstm,
    "lstm-no-attention": lstm_no_attention,
    "conv": conv,
}


# --- published models: what changed since 2017, line by line -------------------------------------------------------

GPT2 = StackConfig(  # of the paper's decoder: no cross-attention, pre-norm, learned positions, GELU
    layers=12, width=768, heads=12, ffn_width=3072, activation="gelu_tanh", causal=True,
    positions=LearnedConfig(max_length=1024), norm_order="pre", attention_dropout=0.1,
)  # fmt: skip
LLAMA = replace(  # of GPT-2: rotary positions, RMS norm, SwiGLU, no biases, no dropout
    GPT2, layers=32, width=4096, heads=32, ffn_width=11_008, activation="silu", gated=True, positions=RotaryConfig(),
    norm="rms", bias=False, dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
BERT = StackConfig(  # of the paper's encoder: learned positions, GELU, a norm on the embeddings
    layers=12, width=768, heads=12, ffn_width=3072, activation="gelu", positions=LearnedConfig(max_length=512),
    norm_eps=1e-12, embedding_norm=True, attention_dropout=0.1,
)  # fmt: skip
VIT = replace(  # of BERT: pre-norm, a position for each patch and the class token, no dropout
    BERT, positions=LearnedConfig(max_length=197), norm_order="pre", embedding_norm=False, dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip
T5 = StackConfig(  # of the paper's encoder: pre-norm, RMS, positions as a bias, unscaled scores, no biases
    heads=8, head_width=64, positions=RelativeConfig(), norm="rms", norm_order="pre", norm_eps=1e-6, bias=False,
    scale=1.0, attention_dropout=0.1, activation_dropout=0.1, output_dropout=0.1,
)  # fmt: skip


def gpt2() -> CausalConfig:
    """GPT-2 (Radford et al. 2019), the smallest: 124M parameters."""
    return CausalConfig(vocab=50_257, stack=GPT2, start_id=50_256, end_ids=(50_256,))


def llama_2_7b() -> CausalConfig:
    """LLaMA 2 (Touvron et al. 2023), the smallest: 7B parameters."""
    return CausalConfig(vocab=32_000, stack=LLAMA, tie_output=False, start_id=1, end_ids=(2,))


def llama_3_8b() -> CausalConfig:
    """LLaMA 3 (2024), the smallest: grouped-query attention (groups of 4), a four times larger vocabulary."""
    stack = replace(LLAMA, kv_heads=8, ffn_width=14_336, positions=RotaryConfig(base=500_000.0))
    return replace(llama_2_7b(), vocab=128_256, stack=stack, start_id=128_000, end_ids=(128_001,))


def bert_base() -> EncoderConfig:
    """BERT (Devlin et al. 2019), base: 110M parameters."""
    return EncoderConfig(vocab=30_522, stack=BERT, segments=2, masked_lm=True, pooler=True)


def vit_b_16(labels: tuple[str, ...] = ()) -> VisionConfig:
    """ViT-B/16 (Dosovitskiy et al. 2021) for images of 224 x 224: 86M parameters."""
    return VisionConfig(stack=VIT, labels=labels)


def t5_small() -> Seq2SeqConfig:
    """T5 (Raffel et al. 2020), small: 60M parameters."""
    config = Seq2SeqConfig(vocab=32_128, encoder=T5, decoder=mirror_encoder(T5), start_id=0, end_id=1)
    return replace(config, scale_embeddings=False, scale_output=True)


def t5_v1_1_small() -> Seq2SeqConfig:
    """T5 1.1, small: a gated feed-forward with GELU, and an untied output layer."""
    config = replace_stacks(t5_small(), layers=8, heads=6, ffn_width=1024, activation="gelu_tanh", gated=True)
    return replace(config, tie_output=False, scale_output=False)


def t5_v1_1_base() -> Seq2SeqConfig:
    """T5 1.1, base: flan-t5-base is this one, trained further."""
    return replace_stacks(t5_v1_1_small(), layers=12, width=768, heads=12, ffn_width=2048)


def replace_stacks(config: ConfigT, **changes: Any) -> ConfigT:
    """Return the config with fields of its stacks changed.

    >>> attent.presets.replace_stacks(attent.presets.base(vocab=8000), layers=2, dropout=0.2).encoder
    StackConfig(layers=2, dropout=0.2)
    """
    names = [name for name in ("encoder", "decoder", "stack") if hasattr(config, name)]
    return replace(config, **{name: replace(getattr(config, name), **changes) for name in names})


PRESETS |= {
    preset.__name__: preset
    for preset in (
        base, big, small, tiny, lstm, lstm_no_attention, conv, gpt2, llama_2_7b, llama_3_8b, bert_base,
        vit_b_16, t5_small, t5_v1_1_small, t5_v1_1_base,
    )
}  # fmt: skip
