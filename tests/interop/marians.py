"""Small random Marian models of `transformers`, and how ours are compared with them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attent.models import Seq2Seq

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


class Batch(NamedTuple):
    """Ragged pairs, padded on the right with real ids: whoever looks at the padding gives itself away."""

    source: Tensor
    target: Tensor  # what the decoder reads
    labels: Tensor
    source_lengths: Tensor
    target_lengths: Tensor

    @property
    def source_mask(self) -> Tensor:
        return torch.arange(self.source.shape[1]) < self.source_lengths[:, None]

    @property
    def real(self) -> Tensor:
        return torch.arange(self.target.shape[1]) < self.target_lengths[:, None]


def random_config(seed: int) -> Any:
    """Any shape that Marian has: unequal sides, odd sizes, tied or not. Pad, start, end are three tokens."""
    dice = random.Random(seed)
    heads = dice.choice([(1, 3), (2, 4), (3, 1), (4, 2)])
    share, vocab = dice.random() < 0.5, dice.choice([17, 31, 53])
    return transformers.MarianConfig(
        vocab_size=vocab,
        decoder_vocab_size=vocab if share else dice.choice([19, 29, 47]),
        d_model=dice.choice([1, 2, 3]) * 12 - dice.choice([0, 0, 9]) if heads in ((1, 3), (3, 1)) else 16,
        encoder_layers=dice.choice([1, 2, 3]),
        decoder_layers=dice.choice([1, 2, 3]),
        encoder_attention_heads=heads[0],
        decoder_attention_heads=heads[1],
        encoder_ffn_dim=dice.choice([5, 24, 40]),
        decoder_ffn_dim=dice.choice([7, 20, 36]),
        activation_function=dice.choice(["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "swish", "silu"]),
        dropout=dice.choice([0.0, 0.1, 0.3]),
        attention_dropout=dice.choice([0.0, 0.2]),
        activation_dropout=dice.choice([0.0, 0.4]),
        scale_embedding=dice.random() < 0.5,
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=dice.random() < 0.6,
        max_position_embeddings=64,
        pad_token_id=16,
        decoder_start_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None,
        attn_implementation=dice.choice(["eager", "sdpa"]),
    )


def random_model(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """A model whose every number is random: no zero bias or unit norm hides a mistake."""
    model = transformers.MarianMTModel(random_config(seed)).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), ("bias", model.final_logits_bias)]:
            if "embed_positions" in name:
                continue
            spread = weight.shape[-1] ** -0.5 if weight.dim() == 2 and name != "bias" else 0.3
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype) * spread
            weight.copy_(noise + ("norm.weight" in name))
    return model


def random_batch(config: Any, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed + 1000)

    def ids(high: int, length: int) -> Tensor:
        drawn = torch.randint(0, high - 1, (4, length), generator=generator)
        return drawn + (drawn >= config.pad_token_id).long()  # every id but the pad

    target = ids(config.decoder_vocab_size, 7)
    target[:, 0] = config.decoder_start_token_id
    return Batch(
        source=ids(config.vocab_size, 9),
        target=target,
        labels=ids(config.decoder_vocab_size, 7),
        source_lengths=torch.randint(1, 10, (4,), generator=generator),
        target_lengths=torch.randint(1, 8, (4,), generator=generator),
    )


def their_logits(model: Any, batch: Batch) -> Tensor:
    out: Tensor = model(
        input_ids=batch.source, attention_mask=batch.source_mask.long(), decoder_input_ids=batch.target
    ).logits
    return out


def our_logits(model: Seq2Seq, batch: Batch) -> Tensor:
    out: Tensor = model(batch.source, batch.target, batch.source_lengths, batch.target_lengths)
    return out


def worst(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


def change_json(path: Path, **changes: Any) -> None:
    """A JSON file with some keys set."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
