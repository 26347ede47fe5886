"""Recorded weights of imported models equal the attentions of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attent
from attent.inspection import Trace
from attent.models import CausalLM, Seq2Seq, TextEncoder, VisionTransformer
from tests.interop.families import PairBatch, make_marian, make_marian_batch, run_seq2seq, transformers
from tests.interop.parity import randomise, worst

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 24, "intermediate_size": 20}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
ROWS, LONGEST, VOCAB = 3, 9, 31


def import_model(theirs: Any, folder: Path, seed: int) -> Any:
    """Return a transformers model with random weights and eager attention, and ours loaded from its folder."""
    theirs = theirs.float().eval()
    randomise(theirs, seed)
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(folder)
    return attent.load(folder)


def make_ragged_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, lengths and the padding mask; padding has real ids, so that attending to it changes the result."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (ROWS, LONGEST), generator=generator)
    lengths = torch.tensor([LONGEST, *torch.randint(1, LONGEST, (ROWS - 1,), generator=generator).tolist()])
    return ids, lengths, torch.arange(LONGEST) < lengths[:, None]


def check_same_weights(trace: Trace, path: str, layers: Sequence[Tensor], real: Tensor) -> None:
    assert len(layers) == sum(
        name.startswith(path.split("{}")[0]) and name.endswith(path.rpartition(".")[2]) for name in trace
    )
    for number, weights in enumerate(layers):
        (recorded,) = trace[path.format(number)]
        assert recorded.shape == weights.shape
        rows = real[:, None].expand(recorded.shape[:3])  # rows of padding are not compared
        assert worst(recorded[rows], weights[rows]) < 1e-5
        torch.testing.assert_close(recorded[rows].sum(-1), torch.ones(int(rows.sum())))


# --- encoder-decoder ---


def check_same_translator(ours: Seq2Seq, theirs: Any, batch: PairBatch) -> None:
    expected = run_seq2seq(ours, batch)
    with attent.record(ours) as trace:
        assert torch.equal(run_seq2seq(ours, batch), expected), "recording must change no output"
    with torch.no_grad():
        out = theirs(
            input_ids=batch.source,
            attention_mask=batch.source_mask.long(),
            decoder_input_ids=batch.target,
            output_attentions=True,
        )
    check_same_weights(trace, "encoder.blocks.{}.self_attn", out.encoder_attentions, batch.source_mask)
    check_same_weights(trace, "decoder.blocks.{}.self_attn", out.decoder_attentions, batch.real)
    check_same_weights(trace, "decoder.blocks.{}.cross_attn", out.cross_attentions, batch.real)


@pytest.mark.parametrize("seed", range(0, 36, 4))
def test_marian_weights_equal_transformers(tmp_path: Path, seed: int) -> None:
    theirs = make_marian(seed, torch.float32)
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    ours = attent.load(tmp_path)
    assert isinstance(ours, Seq2Seq)
    check_same_translator(ours, theirs, make_marian_batch(theirs.config, seed))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_heads": 3, "d_kv": 5},
        {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 6, "num_decoder_layers": 1},
    ],
)
def test_t5_weights_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    usual = {"d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=VOCAB, **(usual | changes))
    theirs = transformers.T5ForConditionalGeneration(config)
    ours = import_model(theirs, tmp_path, 1)
    (source, lengths, _), (target, target_lengths, _) = make_ragged_batch(1), make_ragged_batch(2)
    check_same_translator(ours, theirs, PairBatch(source, target, target, lengths, target_lengths))


# --- decoder-only ---


@pytest.mark.parametrize(
    "changes",
    [{}, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False, "n_head": 1}],
)
def test_gpt2_weights_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    usual = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 20}
    same_causal(transformers.GPT2LMHeadModel(transformers.GPT2Config(**(usual | changes))), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 1}, {"num_key_value_heads": 2, "rope_parameters": SCALED}],
)
def test_llama_weights_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    usual: dict[str, Any] = SMALL | {"vocab_size": VOCAB, "max_position_embeddings": 32, "num_key_value_heads": 4}
    same_causal(transformers.LlamaForCausalLM(transformers.LlamaConfig(**(usual | changes))), tmp_path)


def same_causal(theirs: Any, folder: Path) -> None:
    ours = import_model(theirs, folder, 3)
    assert isinstance(ours, CausalLM)
    ids, lengths, real = make_ragged_batch(3)
    with attent.record(ours) as trace, torch.no_grad():
        ours(ids, lengths)
    with torch.no_grad():
        out = theirs(input_ids=ids, attention_mask=real.long(), output_attentions=True)
    check_same_weights(trace, "decoder.blocks.{}.self_attn", out.attentions, real)


# --- encoder-only ---


@pytest.mark.parametrize("changes", [{}, {"type_vocab_size": 1, "num_attention_heads": 1}])
def test_bert_weights_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    usual = SMALL | {"vocab_size": VOCAB, "max_position_embeddings": 16}
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**(usual | changes)))
    ours = import_model(theirs, tmp_path, 4)
    assert isinstance(ours, TextEncoder)
    ids, lengths, real = make_ragged_batch(4)
    segments = (torch.arange(LONGEST) > 4).long().expand(ROWS, -1) % theirs.config.type_vocab_size
    with attent.record(ours) as trace, torch.no_grad():
        ours(ids, lengths, segments)
    with torch.no_grad():
        out = theirs(input_ids=ids, attention_mask=real.long(), token_type_ids=segments, output_attentions=True)
    check_same_weights(trace, "encoder.blocks.{}.self_attn", out.attentions, real)


@pytest.mark.parametrize("changes", [{}, {"patch_size": 4, "num_channels": 1, "num_attention_heads": 1}])
def test_vit_weights_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    usual = SMALL | {"image_size": 8, "patch_size": 2, "num_channels": 3}
    theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**(usual | changes)))
    ours = import_model(theirs, tmp_path, 5)
    assert isinstance(ours, VisionTransformer)
    pixels = torch.randn(ROWS, theirs.config.num_channels, 8, 8, generator=torch.Generator().manual_seed(5))
    with attent.record(ours) as trace, torch.no_grad():
        ours(pixels)
    with torch.no_grad():
        out = theirs(pixel_values=pixels, output_attentions=True)
    real = torch.ones(out.attentions[0].shape[0], out.attentions[0].shape[2], dtype=torch.bool)
    check_same_weights(trace, "encoder.blocks.{}.self_attn", out.attentions, real)
