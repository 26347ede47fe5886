"""One small model of each family, with random weights scaled up so that outputs are not uniform, and its input."""

from __future__ import annotations

import io
import wave
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import sentencepiece
import torch
from torch import Tensor, nn

from attent.inspection.inspectors.front_ends import encode_png
from attent.models import (
    CausalConfig,
    CausalLM,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
    TextEncoder,
    VisionConfig,
    VisionTransformer,
    build,
)
from attent.models.config import mirror_encoder
from attent.nn import AudioConfig, ImageConfig, LearnedConfig, RotaryConfig, SinusoidalConfig, StackConfig
from attent.text.tokenizer import Tokenizer, build_own_files
from attent.text.vocabulary import ESCAPE
from attent.training.autoconfig import fit_to_tokenizer
from tests.text.corpus import lines

N = TypeVar("N", bound=nn.Module)
TEXT = lines()[0][0]
HIDDEN = TEXT.replace("is", "<mask>", 1) if " is " in TEXT else TEXT.replace(" ", " <mask> ", 1)
STACK = StackConfig(layers=2, width=24, heads=4, ffn_width=32, dropout=0.1, norm_order="pre")


@cache
def tokenizer() -> Tokenizer:
    """A tokenizer with a mask token."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines()[0]),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        control_symbols=["<mask>"],
        user_defined_symbols=[ESCAPE],  # append the end token, as our trained models do
        minloglevel=2,
    )
    return Tokenizer.from_files(build_own_files(model.getvalue()))


def steep(model: N) -> N:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_()
    return model.eval()


@cache
def causal() -> CausalLM:
    """Like LLaMA: rotary positions and grouped-query attention."""
    torch.manual_seed(0)
    stack = replace(STACK, causal=True, norm="rms", activation="silu", gated=True, kv_heads=2, positions=RotaryConfig())
    return steep(build(CausalConfig(vocab=tokenizer().source.size + 5, stack=stack)))


@cache
def encoder(labels: tuple[str, ...] = (), masked: bool = True) -> TextEncoder:
    """Like BERT."""
    torch.manual_seed(0)
    stack = replace(STACK, norm_order="post", embedding_norm=True, positions=LearnedConfig(max_length=40))
    vocab = tokenizer().source.size
    return steep(
        build(EncoderConfig(vocab=vocab, stack=stack, segments=2, masked_lm=masked, pooler=True, labels=labels))
    )


@cache
def vision(class_token: bool = True) -> VisionTransformer:
    """Like ViT: 16 patches of 7 x 7 pixels."""
    torch.manual_seed(0)
    stack = replace(STACK, positions=LearnedConfig(max_length=16 + class_token))
    config = VisionConfig(
        image_size=28,
        patch_size=7,
        channels=1,
        stack=stack,
        class_token=class_token,
        pooling="class" if class_token else "mean",
        labels=("ring", "bar", "cross"),
    )
    return steep(build(config))


@cache
def speech(fixed_frames: int | None = None) -> Seq2Seq:
    """Like Whisper, if all recordings are padded to fixed frames."""
    return make_front_end_model(AudioConfig(mel_bins=20, fixed_frames=fixed_frames), SinusoidalConfig())


@cache
def captioner(class_token: bool = True) -> Seq2Seq:
    """Patches as in `vision`."""
    config = ImageConfig(image_size=28, patch_size=7, channels=1, class_token=class_token)
    return make_front_end_model(config, LearnedConfig(max_length=16 + class_token))


def make_front_end_model(
    frontend: AudioConfig | ImageConfig, positions: Any, vocabulary: Tokenizer | None = None
) -> Seq2Seq:
    torch.manual_seed(0)
    config = Seq2SeqConfig(
        vocab=9,
        frontend=frontend,
        encoder=replace(STACK, positions=positions),
        decoder=mirror_encoder(replace(STACK, heads=3)),
        share_embeddings=False,
        tie_output=False,
    )
    return steep(Seq2Seq(fit_to_tokenizer(config, vocabulary or tokenizer())))


def write_chirp(folder: Path, seconds: float = 1.2) -> Path:
    """A tone that rises, 16 kHz."""
    time = torch.arange(int(seconds * 16_000)) / 16_000
    samples = 0.5 * torch.sin(2 * torch.pi * (200 + 800 * time) * time)
    path = folder / "chirp.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((samples * 32767).short().numpy().tobytes())
    return path


def ring(size: int = 28) -> Tensor:
    """A white ring on black, (1, size, size)."""
    at = torch.arange(size) - (size - 1) / 2
    away = (at[:, None] ** 2 + at[None] ** 2).sqrt()
    return ((away - size / 3.2).abs() < size / 12).mul(255).to(torch.uint8)[None]


def write_ring(folder: Path) -> Path:
    path = folder / "ring.png"
    path.write_bytes(encode_png(ring()))
    return path
