"""An oracle from outside: what `record` writes down of an imported model is what `transformers` attends to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attent
from tests.interop.marians import our_logits, random_batch, random_model, worst


@pytest.mark.parametrize("seed", range(0, 36, 4))
def test_marian_looks_as_in_transformers(tmp_path: Path, seed: int) -> None:
    theirs = random_model(seed, torch.float32)
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    ours, batch = attent.load(tmp_path), random_batch(theirs.config, seed)
    expected = our_logits(ours, batch)
    with attent.record(ours) as trace:
        assert torch.equal(our_logits(ours, batch), expected), "recording must change no output"
    with torch.no_grad():
        out = theirs(
            input_ids=batch.source,
            attention_mask=batch.source_mask.long(),
            decoder_input_ids=batch.target,
            output_attentions=True,
        )
    pairs = {
        "encoder.blocks.{}.own": (out.encoder_attentions, batch.source_mask),
        "decoder.blocks.{}.own": (out.decoder_attentions, batch.real),
        "decoder.blocks.{}.cross": (out.cross_attentions, batch.real),
    }
    for path, (layers, real) in pairs.items():
        for number, weights in enumerate(layers):
            (mine,) = trace[path.format(number)]
            rows = real[:, None].expand(mine.shape[:3])  # what padding looks at is nobody's business
            assert worst(mine[rows], weights[rows]) < 1e-5
            torch.testing.assert_close(mine[rows].sum(-1), torch.ones(int(rows.sum())))
