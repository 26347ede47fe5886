"""A sentence through a translator, as a document: the search as it went, and every weight of every head in the pass
over what it found. `page`, `plots`, `terminal` and the live page show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attent.decode import Translator
from attent.decode.engine import TorchEngine
from attent.decode.film import Film, Node, film
from attent.decode.force import Pass, evaluating
from attent.decode.options import Hypothesis, Job, Search
from attent.decode.rules import looping
from attent.interop.ctranslate2 import never_written
from attent.look.positions import positions
from attent.look.properties import measure_document
from attent.look.record import choose, tapped
from attent.look.silence import Part, silenced
from attent.look.tokens import token_of, tokens_of
from attent.look.trace import Kind, Side, Vectors, document, layer_of, packed_vectors, sides_of
from attent.models import Seq2Seq
from attent.nn import Look
from attent.text.vocabulary import valid

OPTIONS, FEW = 10, 3  # of the likeliest tokens that are told at each step; in a long text
WHOLE = 1_500_000  # weights that a page holds; of more, only the greatest of each row
ENTRIES = 800_000  # of these together
FEWEST = 4  # of a row, however many rows there are
NUMBERS = 1_750_000  # of queries, keys and values that a page holds; if there are more, it holds none
LONG = 300  # steps from which on continuations that were dropped at once are left out


class LookError(ValueError):
    """A text or model that cannot be looked at, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to look at."""

    text: str
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


class Looker:
    """Answers questions about one translator. What does not depend on the sentence is worked out once."""

    def __init__(
        self,
        translator: Translator,
        *,
        name: str = "",
        languages: tuple[str | None, str | None] = (None, None),
        properties: dict[str, Any] | None = None,
        ablation: dict[str, Any] | None = None,
    ) -> None:
        """
        properties  of the model's heads, measured on many sentences; None: on the one that is looked at
        ablation    what each part is worth, where that was measured
        """
        if not isinstance(translator.model, Seq2Seq):
            raise LookError("an ensemble must be looked at one model at a time; give one folder")
        self.translator, self.model = translator, translator.model
        self.name, self.languages = name, languages
        self.properties, self.ablation = properties, ablation
        self.positions = positions(self.model)

    def look(
        self, question: Question, chosen: Filter | None = None, stop: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """The document of one sentence."""
        question = replace(question, text=valid(question.text), target=question.target and valid(question.target))
        job = self._job(question)
        with evaluating(self.model), silenced(self.model, question.silence):
            seen, again = (None, False) if question.target is not None else self._film(job, question.search, stop)
            target = self._given(question) if seen is None else seen.found[0]
            sides = self._sides(question, job, target)
            layers, options = self._read(job, target, sides, chosen or Filter())
        mark_silent(layers, question.silence)
        found = document(question.text.strip(), sides, layers) | {"model": self._facts()}
        choices = self._choices(options, target)
        if seen is None:
            found["decoding"] = given_decoding(target, sides, choices)
        else:
            found["decoding"] = self._decoding(seen, question, choices) | {"no_loops": again}
        found["properties"] = self.properties or measure_document(found)
        return found | self._known()

    def empty(self, title: str) -> dict[str, Any]:
        """What is known without a sentence."""
        found = document(title, {}, []) | {"model": self._facts()} | self._known()
        return found if self.properties is None else found | {"properties": self.properties}

    def _facts(self) -> dict[str, Any]:
        return {"name": self.name, "summary": summary(self.model), "width": self.model.config.encoder.width}

    def _known(self) -> dict[str, Any]:
        found: dict[str, Any] = {"positions": self.positions}
        return found if self.ablation is None else found | {"ablation": self.ablation}

    # --- the search --------------------------------------------------------------------------------------------------

    def _job(self, question: Question) -> Job:
        text = self.translator.cleaned(question.text)
        if not text:
            raise LookError("there must be a sentence to look at, but it is empty; type one")
        (row,) = self.translator.tokenizer.encode_source([text], question.to)
        framing = 1 if question.to is None else 2
        limit = question.search.limit(len(row) - framing)
        places, most = (stack.positions.max_length for stack in (self.model.encoder, self.model.decoder))
        if places is not None and len(row) > places:
            raise LookError(
                f"the model has places for {places:,} tokens, but the sentence has {len(row):,}; shorten it"
            )
        size = self.model.config.targets
        wrong = [token for token in question.prefix if not 0 <= token < size]
        if wrong:
            raise LookError(f"`prefix` must hold token ids from 0 to {size - 1}, but one is {wrong[0]}")
        if len(question.prefix) >= (limit := min(limit, most or limit)):
            raise LookError(f"`prefix` must be shorter than {limit} tokens, but has {len(question.prefix)}")
        return Job(source=row, prefix=question.prefix, limit=limit)

    def _film(self, job: Job, search: Search, stop: Callable[[], bool] | None) -> tuple[Film, bool]:
        """The search, as translating does it: one that runs in circles is made anew without; was it?"""
        engine: TorchEngine[Any] = self.translator.torch_engine(stop)
        seen = film(engine, job, search)
        if not seen.found:
            raise LookError("the translation cannot go on behind these tokens; take back the last")
        if looping(seen.found[0].ids) and not looping(job.source):
            return film(engine, job, replace(search, no_loops=True)), True
        return seen, False

    def _given(self, question: Question) -> Hypothesis:
        assert question.target is not None
        (ids,) = self.translator.tokenizer.target.encode([question.target.strip()])
        most = self.model.decoder.positions.max_length
        if most is not None and len(ids) >= most:
            raise LookError(
                f"the model has places for {most:,} tokens, but the translation has {len(ids):,}; shorten it"
            )
        return Hypothesis(ids=tuple(ids), log_prob=math.nan, score=math.nan, ended=True)

    # --- what the model did ------------------------------------------------------------------------------------------

    def _sides(self, question: Question, job: Job, target: Hypothesis) -> dict[str, Side]:
        tokenizer, config = self.translator.tokenizer, self.model.config
        written = [*target.ids, *([config.end] if target.ended else [])]
        source, to = self.languages
        text = tokenizer.target.decode(target.ids)
        return {
            "source": Side(
                label="source",
                text=question.text.strip(),
                tokens=tokens_of(tokenizer.source, job.source),
                language=source,
            ),
            "read": Side(
                label="read so far",
                tokens=tokens_of(tokenizer.target, [config.start, *written[:-1]], starts=True),
                language=question.to or to,
            ),
            "target": Side(
                label="translation",
                text=text,
                tokens=tokens_of(tokenizer.target, written),
                language=question.to or to,
            ),
        }

    @torch.no_grad()
    def _read(
        self, job: Job, target: Hypothesis, sides: Mapping[str, Side], chosen: Filter
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Every layer while the decoder reads what was found, and the log-probabilities of what it could write."""
        config = self.model.config
        written = [*target.ids, *([config.end] if target.ended else [])]
        one = Pass.of(self.model, [list(job.source)], [written])
        every = choose(self.model, chosen.only, chosen.kind, chosen.layers, None)
        tapping = {path: layer for path, layer in every.items() if layer.heads}  # all heads of one may be pruned
        budget = Budget.of({path: (layer.heads, layer.head_width) for path, layer in tapping.items()}, sides)
        kept: dict[str, dict[str, Any]] = {}
        taps = {path: budget.tap(path, sides, kept) for path in tapping}
        with tapped(tapping, taps):
            states = one.states(self.model)
        logits = self.model.output(states)[0].float()
        never = torch.tensor(never_written(config, self.translator.tokenizer), device=logits.device)
        return [kept[path] for path in tapping], logits.index_fill(-1, never, -math.inf).log_softmax(-1).cpu()

    # --- as JSON -----------------------------------------------------------------------------------------------------

    def _token(self, token: int) -> dict[str, Any]:
        vocabulary = self.translator.tokenizer.target
        (piece,) = vocabulary.pieces([token])
        return {"token": token, **asdict(token_of(vocabulary, token, piece))}

    def _choices(self, log_probs: Tensor, target: Hypothesis) -> list[dict[str, Any]]:
        """At each step the token that was written and the likeliest ones."""
        written = [*target.ids, *([self.model.config.end] if target.ended else [])]
        best = log_probs.topk(min(OPTIONS if len(written) <= LONG else FEW, log_probs.shape[1]), -1)
        rows = zip(written, log_probs, best.values.tolist(), best.indices.tolist(), strict=True)
        return [
            {
                "chosen": token,
                "p": rounded(math.exp(float(row[token]))),
                "options": [
                    self._token(other) | {"p": rounded(math.exp(value))}
                    for value, other in zip(values, tokens, strict=True)
                    if value > -math.inf
                ],
            }
            for token, row, values, tokens in rows
        ]

    def _decoding(self, seen: Film, question: Question, choices: list[dict[str, Any]]) -> dict[str, Any]:
        alive = {number for last in seen.last for number in seen.path(last)}
        won = set(seen.path(seen.last[0]))
        steps = 1 + max(node.step for node in seen.nodes)
        shown = [n for n in seen.nodes if steps <= LONG or n.kept or n.score is not None]
        decode = self.translator.tokenizer.target.decode
        results = zip(seen.found, seen.last, strict=True)
        return {
            "formula": question.search.formula,
            "beam_size": question.search.beam_size,
            "forced": len(question.prefix),
            "nodes": [self._node(node, node.number in won, node.number in alive) for node in shown],
            "results": [
                {
                    "text": decode(one.ids),
                    "score": rounded(one.score),
                    "log_prob": rounded(one.log_prob),
                    "node": last,
                    "ended": one.ended,
                }
                for one, last in results
            ],
            "choices": choices,
        }

    def _node(self, node: Node, won: bool, alive: bool) -> dict[str, Any]:
        return {
            "id": node.number,
            "parent": node.parent,
            "step": node.step,
            **self._token(node.token),
            "log_prob": rounded(node.log_prob),
            "sum": rounded(node.sum),
            "kept": node.kept,
            "ended": node.score is not None,
            "score": None if node.score is None else rounded(node.score),
            "won": won,
            "alive": alive,
        }


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
        most = None if weights <= WHOLE else max(FEWEST, ENTRIES // max(1, rows))
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


def given_decoding(target: Hypothesis, sides: Mapping[str, Side], choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a translation that was not searched for: how likely each of its words is."""
    log_prob = rounded(math.fsum(math.log(choice["p"]) if choice["p"] else -math.inf for choice in choices))
    result = {
        "text": sides["target"].text,
        "score": log_prob,
        "log_prob": log_prob,
        "node": None,
        "ended": target.ended,
    }
    return {"given": True, "formula": "", "forced": 0, "nodes": [], "results": [result], "choices": choices}


def mark_silent(layers: Iterable[dict[str, Any]], parts: Sequence[Part]) -> None:
    for layer in layers:
        path = layer["path"]
        off = {part.head for part in parts if part.path == path}
        whole = None in off or any(path.startswith(f"{part.path}.") for part in parts)
        layer["silent"] = list(range(layer["heads"])) if whole else sorted(head for head in off if head is not None)


def summary(model: Seq2Seq) -> str:
    """`2.6M parameters, 4 + 4 layers of 4 heads, width 128`"""
    config, count = model.config, sum(p.numel() for p in model.parameters())
    layers = f"{config.encoder.layers} + {config.decoder.layers} layers"
    heads = " or ".join(map(str, sorted({config.encoder.heads, config.decoder.heads})))
    gone = config.encoder.removed + config.decoder.removed
    pruned = f" ({gone} pruned)" if gone else ""
    return f"{count / 1e6:.1f}M parameters, {layers} of {heads} heads{pruned}, width {config.encoder.width}"


def rounded(value: float) -> float | None:
    """Five digits are enough to look at; JSON has no number for what is none."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
