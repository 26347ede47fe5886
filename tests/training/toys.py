"""Toy runs of the loop: a small corpus with its tokenizer, a model of width 16, and a complete TrainConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attent.data.batch_plan import BatchConfig
from attent.data.loader import PairLoader
from attent.data.token_store import TokenSequences, TokenStore
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import ConvDecoderConfig, ConvEncoderConfig, LSTMDecoderConfig, LSTMEncoderConfig, StackConfig
from attent.nn.lora import add_lora
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.config import TrainConfig
from attent.training.distributed import DistributedContext
from attent.training.events import Event, Note, Saved, Validated
from attent.training.loop import Evaluator, Trainer
from attent.training.objective import Seq2SeqObjective
from tests.text.corpus import lines, tokenizer

STACK = StackConfig(layers=1, width=16, heads=2, ffn_width=24, dropout=0.1)
RECIPE = TrainConfig(
    steps=6,
    batch_tokens=256,
    micro_batch_tokens=128,
    lr=3e-3,
    warmup=3,
    schedule="inverse_sqrt",
    rdrop=0.0,
    patience=10,
    save_every=3,
    valid_every=3,
    precision="float32",
    compile=False,
    workers=0,
    metric="chrf",
)


@cache
def store(first: int = 0, last: int = 60) -> TokenStore:
    """A token store of pairs of the small corpus."""
    toy_tokenizer = tokenizer()
    texts = lines()
    rows = toy_tokenizer.encode_source(texts[0][first:last]), toy_tokenizer.encode_target(texts[1][first:last])
    source, target = (TokenSequences.from_rows(side) for side in rows)
    pads = toy_tokenizer.source.pad, toy_tokenizer.target.pad
    return TokenStore.from_sequences(source, target, pads, "corpus.tsv", Path("nowhere"))


def batches(
    tokens: int = 256, layout: Literal["packed", "bucketed", "fixed"] = "bucketed", pairs: TokenStore | None = None
) -> PairLoader:
    return PairLoader(pairs or store(), BatchConfig(batch_tokens=tokens, max_tokens=64, layout=layout), seed=1)


def config(dropout: float = 0.1) -> Seq2SeqConfig:
    stack = replace(STACK, dropout=dropout)
    return fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack)), tokenizer())


def model(dropout: float = 0.1, seed: int = 1) -> Seq2Seq:
    torch.manual_seed(seed)
    return Seq2Seq(config(dropout))


def lstm(dropout: float = 0.1, seed: int = 1) -> Seq2Seq:
    torch.manual_seed(seed)
    encoder, decoder = (kind(layers=2, width=16, dropout=dropout) for kind in (LSTMEncoderConfig, LSTMDecoderConfig))
    return Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=encoder, decoder=decoder), tokenizer()))


def conv(dropout: float = 0.1, seed: int = 1) -> Seq2Seq:
    torch.manual_seed(seed)
    encoder, decoder = (kind(layers=2, width=16, dropout=dropout) for kind in (ConvEncoderConfig, ConvDecoderConfig))
    return Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=encoder, decoder=decoder), tokenizer()))


@dataclass
class ToyRun:
    """A trainer and the events that it has emitted."""

    trainer: Trainer
    events: list[Event] = field(default_factory=list)

    def of_type(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.of_type(Note)]

    @property
    def validations(self) -> list[Validated]:
        return self.of_type(Validated)

    @property
    def saves(self) -> list[Saved]:
        return self.of_type(Saved)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.trainer.parameters.items()}


def build_toy_run(
    out: Path,
    recipe: TrainConfig = RECIPE,
    *,
    dropout: float = 0.1,
    start: Seq2Seq | None = None,
    evaluator: Evaluator | None = None,
    validated: bool = True,
    stop: Callable[[], bool] = lambda: False,
    layout: Literal["packed", "bucketed", "fixed"] = "bucketed",
) -> ToyRun:
    """Build a trainer on the small corpus, the same for the same arguments."""
    events: list[Event] = []
    network = start or model(dropout)
    if recipe.lora:
        torch.manual_seed(7)
        add_lora(network, recipe.lora)
    valid = batches(512, pairs=store(60, 90)) if validated else None
    assert recipe.batch_tokens
    train_batches = batches(recipe.batch_tokens, layout)
    trainer = Trainer(
        network,
        tokenizer(),
        recipe,
        train_batches,
        valid,
        evaluator,
        out,
        DistributedContext(torch.device("cpu")),
        events.append,
        stop,
        make_objective=Seq2SeqObjective,
    )
    return ToyRun(trainer, events)


def are_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


def max_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).abs().max()) for name in actual)
