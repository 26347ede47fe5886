"""Small untrained language models with trained tokenizers: deterministic nonsense."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.decoding.generation.generator import Generator
from attent.models import CausalConfig, CausalLM, build, presets
from attent.models.weights import save_model
from attent.nn import LearnedConfig
from attent.text.tokenizer import Tokenizer
from tests.text.corpus import lines, tokenizer

LONGEST = 60  # positions of the GPT-2 model
PROMPTS = ["A man slow", "", "The children are singing", "x"]


@cache
def byte_level() -> Tokenizer:
    """A byte-level tokenizer as GPT-2's: characters may span tokens; one special token."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(lines()[1], trainer)
    return Tokenizer.from_files({"tokenizer.json": made.to_str().encode()})


@cache
def fallback() -> Tokenizer:
    """A tokenizer with byte fallback as LLaMA's: a run of byte tokens is decoded together."""
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abdehilnmorstuwy"]
    model = tokenizers.models.BPE(
        {name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    made = tokenizers.Tokenizer(model)
    parts = tokenizers.normalizers
    made.normalizer = parts.Sequence([parts.Prepend("▁"), parts.Replace(" ", "▁")])
    parts = tokenizers.decoders
    made.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer.from_files({"tokenizer.json": made.to_str().encode()})


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    return tokenizer()


def gpt2(words: Tokenizer, ends: tuple[int, ...] | None = None) -> CausalLM:
    stack = replace(
        presets.GPT2, layers=1, width=32, heads=4, ffn_width=64, positions=LearnedConfig(max_length=LONGEST)
    )
    return build_model(stack, words, ends)


def llama(words: Tokenizer, ends: tuple[int, ...] | None = None) -> CausalLM:
    stack = replace(presets.LLAMA, layers=1, width=32, heads=4, kv_heads=2, ffn_width=48)
    return build_model(stack, words, ends)


def build_model(stack: Any, words: Tokenizer, ends: tuple[int, ...] | None) -> CausalLM:
    vocabulary = words.target
    ends = (vocabulary.end,) if ends is None else ends
    model = build(CausalConfig(vocab=vocabulary.size + 3, stack=stack, start_id=vocabulary.start, end_ids=ends))
    shaken = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():  # spread out, so that every earlier token matters
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=shaken))
    return model.eval()


@cache
def generator() -> Generator:
    return Generator(gpt2(byte_level()), byte_level())


def save_model_folder(path: Path) -> Path:
    """Save a model folder."""
    save_model(gpt2(sentencepiece_tokenizer()), path, sentencepiece_tokenizer().files)
    return path
