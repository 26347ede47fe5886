"""The encoder-decoder is figure 1, assembled here by hand; shifting, forced prefixes, steps without gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import attent
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.models.config import mirror_encoder
from attent.nn import Memory, Packing, StackConfig

ENCODER = StackConfig(layers=1, width=8, heads=2, ffn_width=8, dropout=0.0)
CONFIG = Seq2SeqConfig(vocab=9, encoder=ENCODER, decoder=mirror_encoder(ENCODER))
CONFIGS = {
    "the paper": CONFIG,
    "nothing shared": replace(CONFIG, target_vocab=7, share_embeddings=False, tie_output=False, output_bias=True),
    "not scaled": replace(CONFIG, scale_embeddings=False),
    "tied, not shared": replace(CONFIG, target_vocab=7, share_embeddings=False),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_model_is_figure_1(config: Seq2SeqConfig) -> None:
    """Section 3.4: the same matrix for both embeddings and the last layer; in the embeddings, times sqrt(d_model)."""
    model = Seq2Seq(config).eval()
    weights = dict(model.named_parameters(remove_duplicate=False))
    if config.output_bias:
        torch.nn.init.normal_(weights["output.bias"])
    source, target = torch.randint(0, 7, (2, 3, 5))
    factor = 8**0.5 if config.scale_embeddings else 1.0
    memory = model.encoder(F.embedding(source, weights["source_embedding.weight"]) * factor)
    states = model.decoder(F.embedding(target, weights["target_embedding.weight"]) * factor, memory=Memory(memory))
    last = "target_embedding.weight" if config.tie_output else "output.weight"
    expected = states @ weights[last].T + (weights["output.bias"] if config.output_bias else 0)
    torch.testing.assert_close(model(source, target), expected)
    shared = [weights[f"{side}_embedding.weight"] for side in ("source", "target")]
    assert (shared[0] is shared[1]) == config.share_embeddings
    assert (weights["output.weight"] is shared[1]) == config.tie_output


def test_embeddings_start_with_variance_one() -> None:
    """N(0, 1 / d_model), times sqrt(d_model)."""
    stack = replace(ENCODER, width=64)
    model = Seq2Seq(Seq2SeqConfig(vocab=500, encoder=stack, decoder=mirror_encoder(stack)))
    embedded = model.source_embedding(torch.arange(500)[None])
    assert embedded.std().item() == pytest.approx(1, rel=0.02)


def test_targets_are_shifted_right_after_the_start() -> None:
    assert shift_right(torch.tensor([[5, 6, 2], [7, 2, 0]]), 1).tolist() == [[1, 5, 6], [1, 7, 2]]


def test_shifting_an_empty_target_gives_an_empty_one() -> None:
    assert shift_right(torch.zeros(2, 0, dtype=torch.long), 1).shape == (2, 0)


def test_each_packed_sentence_has_its_own_start() -> None:
    packing = Packing.from_lengths([[3, 2], [4]], row_length=6)
    shifted = shift_right(torch.tensor([[5, 6, 2, 7, 2, 0], [8, 9, 4, 2, 0, 0]]), 1, packing)
    assert shifted[0].tolist() == [1, 5, 6, 1, 7, 1]
    assert shifted[1, :4].tolist() == [1, 8, 9, 4]


def test_steps_build_no_autograd_graph() -> None:
    model = attent.build(attent.presets.tiny(vocab=20)).eval()
    cache = model.init_decoder_state(torch.tensor([[3, 4]]), capacity=3)
    logits = model.step(torch.tensor([[1]]), cache)
    assert not logits.requires_grad
    assert not cache.layers[0].self_attn.keys.requires_grad


def test_forced_prefixes_may_differ_in_length() -> None:
    model = attent.build(attent.presets.tiny(vocab=20)).eval().double()
    source, prefix = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[1, 9, 10], [1, 0, 0]])
    cache = model.init_decoder_state(source, capacity=4)
    model.step(prefix, cache, torch.tensor([3, 1]))
    logits = model.step(torch.tensor([[11], [12]]), cache)[:, -1]
    first = model(source[:1], torch.tensor([[1, 9, 10, 11]]))[0, -1]
    second = model(source[1:], torch.tensor([[1, 12]]))[0, -1]
    torch.testing.assert_close(logits, torch.stack([first, second]))


def test_autocast_supports_decoding_in_steps() -> None:
    model = attent.build(attent.presets.tiny(vocab=20)).eval()
    source, target = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[1, 9, 10], [1, 11, 12]])
    lengths = torch.tensor([3, 2])
    outside = model.init_decoder_state(source, lengths, capacity=3)  # its keys are float32
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(source, target, lengths)
        inside = model.init_decoder_state(source, lengths, capacity=3)
        for cache in (inside, outside):
            steps = torch.cat([model.step(token, cache) for token in target.split(1, 1)], 1)
            torch.testing.assert_close(steps, expected, rtol=0.05, atol=0.05)
    assert inside.layers[0].self_attn.keys.dtype == torch.bfloat16


def test_stacks_are_the_encoder_and_the_decoder() -> None:
    model = Seq2Seq(CONFIG)
    assert model.stacks == (model.encoder, model.decoder)
