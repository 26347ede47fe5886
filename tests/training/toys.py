"""Toy runs of the loop: a small corpus with its tokenizer, a model of width 16, and a recipe with nothing left open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from attent.data.batch_plan import BatchConfig
from attent.data.loader import PairLoader
from attent.data.token_store import CorpusPart, StoreMeta, TokenSequences, TokenStore
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
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
    rdrop=0.0,
    save_every=3,
    valid_every=3,
    precision="float32",
    compile=False,
    workers=0,
    metric="chrf",
)


@cache
def store(first: int = 0, last: int = 60) -> TokenStore:
    """Pairs of the little corpus as numbers."""
    of = tokenizer()
    texts = lines()
    rows = of.encode_source(texts[0][first:last]), of.encode_target(texts[1][first:last])
    sides = [
        TokenSequences(np.concatenate(side).astype("<u4"), np.cumsum([0, *map(len, side)]).astype("<i8"))
        for side in [[np.array(row) for row in side] for side in rows]
    ]
    meta = StoreMeta(
        format_version=1,
        pairs=last - first,
        dtype="<u4",
        token_counts={},
        pad_ids={"source": of.source.pad, "target": of.target.pad},
        files=["corpus.tsv"],
        parts=[CorpusPart(name="corpus", pairs=last - first, dropped={}, examples={})],
    )
    return TokenStore(Path("nowhere"), meta, sides[0], sides[1], np.arange(1, last - first + 1).astype("<u8"))


def batches(
    tokens: int = 256, layout: Literal["packed", "bucketed"] = "bucketed", of: TokenStore | None = None
) -> PairLoader:
    return PairLoader(of or store(), BatchConfig(batch_tokens=tokens, max_tokens=64, layout=layout), seed=1)


def config(dropout: float = 0.1) -> Seq2SeqConfig:
    stack = replace(STACK, dropout=dropout)
    return fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack)), tokenizer())


def model(dropout: float = 0.1, seed: int = 1) -> Seq2Seq:
    torch.manual_seed(seed)
    return Seq2Seq(config(dropout))


@dataclass
class ToyRun:
    """A training and all that it has told."""

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
    layout: Literal["packed", "bucketed"] = "bucketed",
) -> ToyRun:
    """A training of the little corpus; the same arguments give the same one."""
    told: list[Event] = []
    of = start or model(dropout)
    if recipe.lora:
        torch.manual_seed(7)
        add_lora(of, recipe.lora)
    valid = batches(512, of=store(60, 90)) if validated else None
    assert recipe.batch_tokens
    text = batches(recipe.batch_tokens, layout)
    made = Trainer(
        of,
        tokenizer(),
        recipe,
        text,
        valid,
        evaluator,
        out,
        DistributedContext(torch.device("cpu")),
        told.append,
        stop,
        make_objective=Seq2SeqObjective,
    )
    return ToyRun(made, told)


def are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def max_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
