"""A small translator with random weights, and a sentence."""

from __future__ import annotations

from functools import cache

import torch

from attent.decoding.translator import Translator
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.training.autoconfig import fit_to_tokenizer
from tests.text.corpus import lines, tokenizer

STACK = StackConfig(layers=2, width=24, heads=3, ffn_width=32, dropout=0.1)
TEXT = lines()[0][0]


def model(stack: StackConfig = STACK, seed: int = 0) -> Seq2Seq:
    """Weights are scaled up, so that outputs are not uniform; no bias is zero, so that each one matters."""
    torch.manual_seed(seed)
    config = Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack), tie_output=False)
    created = Seq2Seq(fit_to_tokenizer(config, tokenizer())).eval()
    with torch.no_grad():
        for parameter in created.parameters():
            parameter.mul_(2) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return created


@cache
def translator() -> Translator:
    return Translator(model(), tokenizer())
