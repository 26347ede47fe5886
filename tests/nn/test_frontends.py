"""A front-end may embed any source: here, frames of audio, four of which become one state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.nn.frontends import FrontEnd

STACK = StackConfig(layers=1, width=16, heads=2, ffn_width=24, dropout=0.0)


class Frames(FrontEnd):
    """(B, T, 3) -> (B, T / 4, E)"""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 16, 4, stride=4)

    def embed_source(self, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.conv(source.transpose(1, 2)).transpose(1, 2), None if lengths is None else lengths // 4


def test_a_model_of_frames_ignores_their_padding() -> None:
    config = Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK))
    model = Seq2Seq(config, Frames()).eval()
    frames, target, lengths = torch.randn(2, 12, 3), torch.randint(0, 9, (2, 5)), torch.tensor([12, 8])
    logits = model(frames, target, lengths)
    assert logits.shape == (2, 5, 9)
    changed = frames.clone()
    changed[1, 8:] += 1
    torch.testing.assert_close(model(changed, target, lengths), logits)
    cache = model.init_decoder_state(frames, lengths, capacity=5)
    torch.testing.assert_close(model.step(target, cache), logits)
