"""What looking at any model needs: one pass in which every layer is written down, as much of it as a page can hold,
and what is known of the model without a sentence. What there is to read, and what came of it, is told by `view`
(translators), `texts` (a decoder or an encoder of text alone) and `images`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from attent.decode.options import Search
from attent.look.positions import positions
from attent.look.record import choose, tapped
from attent.look.silence import Part
from attent.look.tokens import token_of
from attent.look.trace import Kind, Side, Vectors, document, layer_of, packed_vectors, sides_of
from attent.models import Model, Seq2Seq, Vision
from attent.nn import Look, StackConfig
from attent.text.vocabulary import Vocabulary

M = TypeVar("M", bound=Model)

OPTIONS, FEW = 10, 3  # of the likeliest tokens that are told at each step; in a long text
WHOLE = 1_500_000  # weights that a page holds; of more, only the greatest of each row
PICTURED = 6_000_000  # of patches, which are seen all at once: those of ViT-B/16 at 224 pixels
ENTRIES = 800_000  # of these together
FEWEST = 4  # of a row, however many rows there are
NUMBERS = 1_750_000  # of queries, keys and values that a page holds; if there are more, it holds none
LONG = 300  # steps from which on less is told of each


class LookError(ValueError):
    """A text or model that cannot be looked at, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to look at."""

    text: str  # of an image: where it is
    pair: str | None = None  # a second text behind the first, for an encoder
    to: str | None = None  # the language to translate into, for a model that was trained with tags
    target: str | None = None  # look at this translation; None: search for one
    search: Search = field(default_factory=Search)
    prefix: tuple[int, ...] = ()  # tokens that the translation must begin with
    silence: tuple[Part, ...] = ()  # parts that are off


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Of which layers and heads weights are written down."""

    only: str = "*"
    kind: Kind | None = None
    layers: tuple[int, ...] | None = None


class Reading(Generic[M]):
    """One model that is looked at. What does not depend on what it reads is worked out once."""

    def __init__(
        self,
        model: M,
        *,
        name: str = "",
        properties: dict[str, Any] | None = None,
        ablation: dict[str, Any] | None = None,
    ) -> None:
        """
        properties  of the model's heads, measured on many sentences; None: on the one that is looked at
        ablation    what each part is worth, where that was measured
        """
        self.model, self.name = model, name
        self.properties, self.ablation = properties, ablation
        self.positions = positions(model, length=places_of(model))

    def look(
        self, question: Question, chosen: Filter | None = None, stop: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """The document of what is asked about."""
        raise NotImplementedError

    def empty(self, title: str) -> dict[str, Any]:
        """What is known without a sentence."""
        found = document(title, {}, []) | {"model": self.facts()} | self.known()
        return found if self.properties is None else found | {"properties": self.properties}

    def facts(self) -> dict[str, Any]:
        width = stacks_of(self.model)[0].width
        return {"name": self.name, "kind": self.model.config.kind, "summary": summary(self.model), "width": width}

    def known(self) -> dict[str, Any]:
        found: dict[str, Any] = {"positions": self.positions}
        return found if self.ablation is None else found | {"ablation": self.ablation}

    @contextmanager
    def written_down(self, sides: Mapping[str, Side], chosen: Filter) -> Iterator[list[dict[str, Any]]]:
        """While the block lasts one pass is made; afterwards the list holds every layer as a page shows it."""
        every = choose(self.model, chosen.only, chosen.kind, chosen.layers, None)
        tapping = {path: layer for path, layer in every.items() if layer.heads}  # all heads of one may be pruned
        budget = Budget.of({path: (layer.heads, layer.head_width) for path, layer in tapping.items()}, sides)
        kept: dict[str, dict[str, Any]] = {}
        layers: list[dict[str, Any]] = []
        with tapped(tapping, {path: budget.tap(path, sides, kept) for path in tapping}):
            yield layers
        layers += [kept[path] for path in tapping]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much of each layer a page can hold."""

    most: int | None  # weights of each row; None: all
    vectors: bool

    @classmethod
    def of(cls, layers: Mapping[str, tuple[int, int]], sides: Mapping[str, Side]) -> Budget:
        """`layers`: of each its heads and their width."""
        weights = rows = numbers = 0
        for path, (heads, width) in layers.items():
            queries, keys = (len(sides[name].tokens) for name in sides_of(path, sides))
            weights, rows = weights + heads * queries * keys, rows + heads * queries
            numbers += heads * width * (queries + 2 * keys)
        whole = PICTURED if any(side.image for side in sides.values()) else WHOLE
        most = None if weights <= whole else max(FEWEST, ENTRIES // max(1, rows))
        return cls(most=most, vectors=most is None and numbers <= NUMBERS)

    def tap(self, path: str, sides: Mapping[str, Side], kept: dict[str, dict[str, Any]]) -> Callable[[Look], None]:
        """Writes a layer down as it will be shown, at once: all weights of a long text would fill the memory."""
        names = sides_of(path, sides)
        shape = (len(sides[names[0]].tokens), len(sides[names[1]].tokens))

        def keep(look: Look) -> None:
            weights = look.weights_of(range(look.q.shape[1]))[0].float().cpu()
            layer = layer_of(path, names, weights, causal=look.mask.causal, scale=look.scale, most=self.most)
            if self.vectors:
                layer |= packed_vectors(Vectors(look.q, look.k, look.v, look.bias, look.scale), 0, shape)
            kept[path] = layer

        return keep


def mark_silent(layers: Iterable[dict[str, Any]], parts: Sequence[Part]) -> None:
    for layer in layers:
        path = layer["path"]
        off = {part.head for part in parts if part.path == path}
        whole = None in off or any(path.startswith(f"{part.path}.") for part in parts)
        layer["silent"] = list(range(layer["heads"])) if whole else sorted(head for head in off if head is not None)


# --- words, and how likely they are ----------------------------------------------------------------------------------


def told(vocabulary: Vocabulary, token: int) -> dict[str, Any]:
    (piece,) = vocabulary.pieces([token])
    return {"token": token, **asdict(token_of(vocabulary, token, piece))}


def choices(vocabulary: Vocabulary, written: Sequence[int | None], log_probs: Tensor) -> list[dict[str, Any]]:
    """At each place the token that stands there, if one does, and the likeliest ones: (N, V)."""
    best = log_probs.topk(min(OPTIONS if len(written) <= LONG else FEW, log_probs.shape[1]), -1)
    rows = zip(written, log_probs, best.values.tolist(), best.indices.tolist(), strict=True)
    return [
        {
            "chosen": token,
            "p": None if token is None else rounded(math.exp(float(row[token]))),
            "options": [
                told(vocabulary, other) | {"p": rounded(math.exp(value))}
                for value, other in zip(values, tokens, strict=True)
                if value > -math.inf
            ],
        }
        for token, row, values, tokens in rows
    ]


def labelled(labels: Sequence[str], logits: Tensor, most: int = OPTIONS) -> dict[str, Any]:
    """The section `labels` of a document: which label fits, and how well the likeliest do."""
    shares = logits.float().softmax(-1).cpu()
    best = shares.topk(min(most, len(labels)))
    found = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return {"count": len(labels), "best": [{"label": labels[i], "p": rounded(share)} for share, i in found]}


def rounded(value: float) -> float | None:
    """Five digits are enough to look at; JSON has no number for what is none."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


# --- the model in words ----------------------------------------------------------------------------------------------


def stacks_of(model: Model) -> tuple[StackConfig, ...]:
    if isinstance(model, Seq2Seq):
        return model.config.encoder, model.config.decoder
    return (model.config.stack,)


def places_of(model: Model) -> int:
    """How many positions are shown: those of an image are all in sight at once."""
    return int(model.config.class_token) + model.config.patches if isinstance(model, Vision) else SHOWN


SHOWN = 64


def summary(model: Model) -> str:
    """`2.6M parameters, 4 + 4 layers of 4 heads, width 128`"""
    stacks, count = stacks_of(model), sum(p.numel() for p in model.parameters())
    layers = " + ".join(str(stack.layers) for stack in stacks)
    layers += " layer" if layers == "1" else " layers"
    heads = " or ".join(map(str, sorted({stack.heads for stack in stacks})))
    shared = " or ".join(str(stack.kv_heads) for stack in stacks if stack.kv_heads not in (None, stack.heads))
    heads += f" heads ({shared} of keys)" if shared else " head" if heads == "1" else " heads"
    gone = sum(stack.removed for stack in stacks)
    pruned = f" ({gone} pruned)" if gone else ""
    size = f"{count / 1e6:,.1f}M" if count >= 100_000 else f"{count:,}"
    return f"{size} parameters, {layers} of {heads}{pruned}, width {stacks[0].width}"


def check_length(stack: Any, count: int, what: str) -> None:
    """Is there a place for each token?"""
    most = stack.positions.max_length
    if most is not None and count > most:
        raise LookError(f"the model has places for {most:,} tokens, but {what} has {count:,}; shorten it")


def reads_only(question: Question, what: str) -> None:
    """What is asked of translators alone has no meaning for a model that reads."""
    asked = {"a translation to look at": question.target, "a language": question.to, "`prefix`": question.prefix}
    extra = next((name for name, value in asked.items() if value), None)
    if extra is not None:
        raise LookError(f"{extra} is for translators, and this is {what}; leave it out")


def device_of(model: Model) -> torch.device:
    return next(model.parameters()).device
