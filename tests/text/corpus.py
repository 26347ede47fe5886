"""A small generated parallel corpus, enough to train a tokenizer on in well under a second."""

from __future__ import annotations

import random
from functools import cache

from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, TokenizerKind, train_tokenizer

WHO = [("a man", "ein Mann"), ("two women", "zwei Frauen"), ("the children", "die Kinder"), ("a dog", "ein Hund")]
HOW = [("slowly", "langsam"), ("happily", "fröhlich"), ("carefully", "vorsichtig"), ("again", "wieder")]
DOES = [
    ("walking", "läuft"),
    ("standing", "steht"),
    ("singing", "singt"),
    ("waiting", "wartet"),
    ("sleeping", "schläft"),
]
WHERE = [
    ("in the snow-covered park", "im verschneiten Park"),
    ("near an old railway bridge", "bei einer alten Eisenbahnbrücke"),
    ("on the market square", "auf dem Marktplatz"),
    ("outside a theatre, at 7:30", "vor einem Theater, um 7.30 Uhr"),
]


@cache
def lines(count: int = 2000) -> tuple[tuple[str, ...], tuple[str, ...]]:
    chance = random.Random(1)
    drawn = [tuple(map(chance.choice, (WHO, HOW, DOES, WHERE))) for _ in range(count)]
    pairs = [[" ".join(part[side] for part in parts).capitalize() + "." for parts in drawn] for side in (0, 1)]
    return tuple(pairs[0]), tuple(pairs[1])


@cache
def tokenizer(kind: TokenizerKind = "bpe", joint: bool = True) -> Tokenizer:
    config = TokenizerConfig(kind=kind, joint=joint, vocab=None if kind == "char" else 350, symbols=("%s", "{name}"))
    return train_tokenizer(*lines(), config, tags=("de", "pt-BR"))
