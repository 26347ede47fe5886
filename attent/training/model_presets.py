"""The models that are trained from nothing, for each task and size: blocks of the family (`presets`) in sizes that suit
what people have. What is chosen by itself, and why, is `choose`'s and the tasks' business.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attent.data.estimate import Size
from attent.models import CausalConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, VisionConfig, presets
from attent.models.config import mirror_encoder
from attent.nn import LearnedConfig, RotaryConfig
from attent.training.run_options import TaskName

# One stack: `base` is GPT-2's and BERT's smallest, `small` that of nanoGPT for a few megabytes of text.
STACK_BY_SIZE: dict[Size, dict[str, Any]] = {
    "tiny": {"layers": 4, "width": 128, "heads": 4, "ffn_width": 512},
    "small": {"layers": 6, "width": 384, "heads": 6, "ffn_width": 1536},
    "base": {"layers": 12, "width": 768, "heads": 12, "ffn_width": 3072},
    "big": {"layers": 24, "width": 1024, "heads": 16, "ffn_width": 4096},
}
# Two stacks with gated feed-forwards, whose inner width counts twice: `base` and `big` are T5 1.1's small and base.
SEQ2SEQ_STACK_BY_SIZE: dict[Size, dict[str, Any]] = {
    "tiny": {"layers": 3, "width": 128, "heads": 4, "head_width": 32, "ffn_width": 256},
    "small": {"layers": 4, "width": 256, "heads": 4, "head_width": 64, "ffn_width": 640},
    "base": {"layers": 8, "width": 512, "heads": 8, "head_width": 64, "ffn_width": 1024},
    "big": {"layers": 12, "width": 768, "heads": 12, "head_width": 64, "ffn_width": 2048},
}


def causal_lm_config(size: Size, vocab: int) -> CausalConfig:
    """GPT-2 with rotary positions: no text is too long for them, and they learn sooner."""
    stack = replace(presets.GPT2, positions=RotaryConfig(), **STACK_BY_SIZE[size])
    return CausalConfig(vocab=vocab, stack=stack)


def encoder_config(size: Size, vocab: int, max_tokens: int = 512) -> EncoderConfig:
    """BERT, without the vectors by which it tells a first text of a pair from the second."""
    positions = LearnedConfig(max_length=max(512, max_tokens))
    stack = replace(presets.BERT, positions=positions, **STACK_BY_SIZE[size])
    return EncoderConfig(vocab=vocab, stack=stack)


def span_corruption_config(size: Size, vocab: int) -> Seq2SeqConfig:
    """T5 1.1, with the output tied to the embedding: of a small model half would be that matrix otherwise."""
    tied = replace(presets.t5_v1_1_small(), vocab=vocab, tie_output=True, scale_output=True)
    stack = replace(tied.encoder, **SEQ2SEQ_STACK_BY_SIZE[size])
    return replace(tied, encoder=stack, decoder=mirror_encoder(stack))


def placeholder_config(task: TaskName, vocab: int, patch: object = None) -> ModelConfig:
    """Some model of the kind that a task trains, to check a table before the data are known; images whose sides
    `patch` divides, where that was asked for."""
    if task == "translate":
        return presets.tiny(vocab)
    if task == "spans":
        return span_corruption_config("tiny", vocab)
    if task == "images":
        image = patch if isinstance(patch, int) and patch > 0 else 32
        return VisionConfig(image_size=image, patch_size=1, stack=replace(presets.VIT, **STACK_BY_SIZE["tiny"]))
    return causal_lm_config("tiny", vocab) if task == "lm" else encoder_config("tiny", vocab)
