"""Sizes with a name. Each says what it changes of another, so that the difference is the documentation."""

from __future__ import annotations

from dataclasses import replace

from attent.models.config import Seq2SeqConfig, decoder_of
from attent.nn import StackConfig


def base(vocab: int) -> Seq2SeqConfig:
    """The paper's base model (table 3): 6 + 6 layers, d_model 512, d_ff 2048, 8 heads of 64, dropout 0.1."""
    return seq2seq(vocab, StackConfig())


def big(vocab: int) -> Seq2SeqConfig:
    """The paper's big model (table 3): twice as wide, dropout 0.3."""
    return seq2seq(vocab, replace(StackConfig(), width=1024, inner=4096, heads=16, dropout=0.3))


def small(vocab: int) -> Seq2SeqConfig:
    """Half as wide as base and half as deep: for some hundred thousand pairs, or for a laptop."""
    return seq2seq(vocab, replace(StackConfig(), layers=3, width=256, inner=1024))


def tiny(vocab: int) -> Seq2SeqConfig:
    """For some ten thousand pairs: about 2.4M parameters with 8,000 subwords. A larger one learns them by heart."""
    return seq2seq(vocab, replace(StackConfig(), layers=4, width=128, inner=256, heads=4, dropout=0.3))


def seq2seq(vocab: int, encoder: StackConfig) -> Seq2SeqConfig:
    """An encoder and the decoder that mirrors it."""
    return Seq2SeqConfig(vocab=vocab, encoder=encoder, decoder=decoder_of(encoder))
