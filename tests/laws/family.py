"""Toy models of the published families: each is its preset, made small. Text models share one calling convention, so
that one test covers them all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attent.models import (
    CausalConfig,
    CausalLM,
    EncoderConfig,
    ModelConfig,
    Seq2SeqConfig,
    TextEncoder,
    VisionConfig,
    build,
    presets,
)
from attent.nn import LearnedConfig, LinearScaling, Llama3Scaling, Packing, RelativeConfig, RotaryConfig, StackConfig
from tests.laws.helpers import parametrize_all, precise, randomize

VOCAB = 19
SMALL = {"layers": 2, "width": 32, "ffn_width": 40}


def small(stack: StackConfig, **changes: object) -> StackConfig:
    """A small copy of a stack config. Dropout is kept: `eval` must turn it off."""
    fewer = {"heads": 4, "head_width": None} | SMALL | changes
    return replace(stack, **fewer)


GPT2 = replace(
    presets.gpt2(),
    vocab=VOCAB,
    stack=small(presets.GPT2, positions=LearnedConfig(max_length=40)),
    start_id=None,
    end_ids=(3,),
)
LLAMA = replace(presets.llama_2_7b(), vocab=VOCAB, stack=small(presets.LLAMA))
STRETCHED = Llama3Scaling(
    factor=4.0, original_length=40
)  # low, high and medium frequencies among four pairs of features
CAUSAL: dict[str, CausalConfig] = {
    "gpt2": GPT2,
    "gpt2-by-layer": replace(GPT2, stack=replace(GPT2.stack, scale_by_layer=True)),
    "gpt2-unscaled": replace(GPT2, stack=replace(GPT2.stack, scale=1.0), tie_output=False, output_bias=True),
    "llama2": LLAMA,
    "llama3": replace(
        LLAMA, stack=replace(LLAMA.stack, kv_heads=2, positions=RotaryConfig(base=5e5, scaling=STRETCHED))
    ),
    "llama-one-key": replace(
        LLAMA, stack=replace(LLAMA.stack, kv_heads=1, positions=RotaryConfig(scaling=LinearScaling(factor=2.0)))
    ),
}
BERT = replace(
    presets.bert_base(),
    vocab=VOCAB,
    stack=small(presets.BERT, positions=LearnedConfig(max_length=40)),
    labels=("bad", "good", "neither"),
)
ENCODERS: dict[str, EncoderConfig] = {
    "bert": BERT,
    "bert-one-segment": replace(BERT, segments=0, pooler=False),
    "bert-norm-first": replace(BERT, stack=replace(BERT.stack, norm_order="pre", embedding_norm=False)),
}
TEXT: dict[str, CausalConfig | EncoderConfig] = {**CAUSAL, **ENCODERS}
VIT = VisionConfig(
    image_size=12,
    patch_size=4,
    channels=3,
    stack=small(presets.VIT, positions=LearnedConfig(max_length=10)),
    labels=("cat", "dog", "other"),
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.3, 0.4),
)
VISION: dict[str, VisionConfig] = {
    "vit": VIT,
    "vit-pooler": replace(VIT, pooler=True),
    "vit-mean": replace(VIT, pooling="mean"),
    "vit-without-class": replace(VIT, pooling="mean", class_token=False, channels=1, mean=(0.3,), std=(0.3,)),
}
T5_POSITIONS = RelativeConfig(buckets=8, max_distance=12)
T5_TOY: dict[str, Seq2SeqConfig] = {
    "t5": replace(
        presets.replace_stacks(presets.t5_small(), heads=4, head_width=10, positions=T5_POSITIONS, **SMALL), vocab=VOCAB
    ),
    "t5-1.1": replace(
        presets.replace_stacks(presets.t5_v1_1_small(), heads=4, head_width=8, positions=T5_POSITIONS, **SMALL),
        vocab=VOCAB,
    ),
}

every_text = parametrize_all("config", TEXT)
every_causal = parametrize_all("config", CAUSAL)
every_encoder = parametrize_all("config", ENCODERS)
every_vision = parametrize_all("config", VISION)
every_model = parametrize_all("config", {**TEXT, **VISION, **T5_TOY})


def make_model(config: ModelConfig, device: torch.device) -> nn.Module:
    return randomize(build(config).to(device, precise(device)))


def read(model: nn.Module, ids: Tensor, lengths: Tensor | None = None, packing: Packing | None = None) -> Tensor:
    """Logits of a text model at each token: of the next token, or of the token itself."""
    if isinstance(model, CausalLM):
        return model(ids, lengths, packing=packing)
    assert isinstance(model, TextEncoder)
    # Segments follow from the ids, so that padded, packed and separate texts have the same.
    segments = ids % model.config.segments if model.config.segments else None
    return model.masked_logits(model(ids, lengths, segments, packing=packing))


def sentences(device: torch.device, lengths: tuple[int, ...] = (6, 2, 4, 1)) -> list[Tensor]:
    return [torch.randint(0, 17, (n,)).to(device) for n in lengths]


def pictures(config: VisionConfig, count: int, device: torch.device) -> Tensor:
    shape = (count, config.channels, config.image_size, config.image_size)
    return torch.randn(shape, dtype=torch.float64).to(device, precise(device))
