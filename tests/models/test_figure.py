"""The model is figure 1: embeddings, encoder, decoder and output layer, assembled here by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

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


def test_decoder_inputs_are_the_targets_shifted_right() -> None:
    assert shift_right(torch.tensor([[5, 6, 2], [7, 2, 0]]), start=1).tolist() == [[1, 5, 6], [1, 7, 2]]


def test_every_packed_sentence_has_its_own_start() -> None:
    packing = Packing.from_lengths([[2, 3], [4]], 5)
    target = torch.tensor([[5, 2, 6, 7, 2], [8, 9, 4, 2, 0]])
    assert shift_right(target, 1, packing)[:, :4].tolist() == [[1, 5, 1, 6], [1, 8, 9, 4]]


def test_embeddings_start_with_variance_one() -> None:
    """N(0, 1 / d_model), times sqrt(d_model)."""
    stack = replace(ENCODER, width=64)
    model = Seq2Seq(Seq2SeqConfig(vocab=500, encoder=stack, decoder=mirror_encoder(stack)))
    embedded = model.source_embedding(torch.arange(500)[None])
    assert embedded.std().item() == pytest.approx(1, rel=0.02)
