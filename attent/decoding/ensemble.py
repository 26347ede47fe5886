"""Ensembles: models with one vocabulary, whose probabilities are averaged at each step, searched as one `StepModel`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from attent.models import Seq2Seq, Seq2SeqConfig
from attent.nn import Cache
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer


@dataclass(eq=False)
class EnsembleState:
    caches: list[Cache]

    def reorder_beams(self, parents: Tensor) -> None:
        for cache in self.caches:
            cache.reorder_beams(parents)

    def reorder(self, rows: Tensor) -> None:
        for cache in self.caches:
            cache.reorder(rows)

    def replace_sources(self, rows: Tensor, new: Self) -> None:
        for cache, other in zip(self.caches, new.caches, strict=True):
            cache.replace_sources(rows, other)

    def set_row_lengths(self, lengths: Sequence[int]) -> None:
        for cache in self.caches:
            cache.set_row_lengths(lengths)


class Ensemble(nn.Module):
    """Several models that generate one target; they must have the same vocabularies, start and end token."""

    def __init__(self, models: Sequence[Seq2Seq]) -> None:
        super().__init__()
        if not models:
            raise AttentError("an ensemble must have at least one model, but has none; give a folder for each")
        for number, model in enumerate(models[1:], 2):
            names = ("vocab", "output_vocab", "start_id", "end_id")
            if any(getattr(models[0].config, name) != getattr(model.config, name) for name in names):
                raise AttentError(
                    f"models of an ensemble must have the same vocabularies, start and end token, but model {number} "
                    f"and the first differ; train them with one tokenizer"
                )
        self.models = nn.ModuleList(models)

    @property
    def members(self) -> list[Seq2Seq]:
        return [model for model in self.models if isinstance(model, Seq2Seq)]

    @property
    def config(self) -> Seq2SeqConfig:
        return self.members[0].config

    @torch.no_grad()
    def init_decoder_state(
        self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1
    ) -> EnsembleState:
        return EnsembleState(
            [model.init_decoder_state(source, lengths, capacity=capacity, beams=beams) for model in self.members]
        )

    @torch.no_grad()
    def step(self, target: Tensor, state: EnsembleState, /) -> Tensor:
        """(B, K) -> (B, K, V): the logarithm of the mean probability."""
        total: Tensor | None = None
        for model, cache in zip(self.members, state.caches, strict=True):  # in turn: logits are large
            logits = model.step(target, cache)
            log_probs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
            total = log_probs if total is None else torch.logaddexp(total, log_probs)
        assert total is not None
        return total - math.log(len(self.models))


def check_tokenizers(tokenizers: Sequence[Tokenizer], names: Sequence[str]) -> None:
    """Raise an error if an id stands for different pieces: vocabularies of equal size may differ."""
    for tokenizer, name in zip(tokenizers[1:], names[1:], strict=True):
        if tokenizer.fingerprint != tokenizers[0].fingerprint:
            raise AttentError(
                f"{name}: must have the tokenizer of {names[0]} to form an ensemble with it, but has another; "
                f"train both from one `tokenizer.model`, or translate with one of them"
            )
