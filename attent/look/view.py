"""A sentence through a translator, as a document: the search as it went, and every weight of every head in the pass
over what it found. `page`, `plots`, `terminal` and the live page show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attent.decode import Translator
from attent.decode.engine import TorchEngine
from attent.decode.film import Film, Node, film
from attent.decode.force import Pass, evaluating
from attent.decode.marks import Marks
from attent.decode.options import Hypothesis, Job, Search
from attent.decode.rules import looping
from attent.decode.spans import told as told_spans
from attent.interop.ctranslate2 import never_written
from attent.look.properties import measure_document
from attent.look.reading import (
    LONG,
    Filter,
    LookError,
    Question,
    Reading,
    check_length,
    choices,
    mark_silent,
    rounded,
    told,
)
from attent.look.silence import silenced
from attent.look.tokens import tokens_of
from attent.look.trace import Side, document
from attent.models import Seq2Seq
from attent.text.tokenizer import framed
from attent.text.vocabulary import Vocabulary, valid

__all__ = ["Filter", "LookError", "Looker", "Question"]


class Looker(Reading[Seq2Seq]):
    """Answers questions about one translator."""

    def __init__(
        self,
        translator: Translator,
        *,
        name: str = "",
        languages: tuple[str | None, str | None] = (None, None),
        properties: dict[str, Any] | None = None,
        ablation: dict[str, Any] | None = None,
    ) -> None:
        """`properties` and `ablation` as for every `Reading`."""
        if not isinstance(translator.model, Seq2Seq):
            raise LookError("an ensemble must be looked at one model at a time; give one folder")
        super().__init__(translator.model, name=name, properties=properties, ablation=ablation)
        self.translator, self.languages = translator, languages

    def look(
        self, question: Question, chosen: Filter | None = None, stop: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """The document of one sentence."""
        if question.pair is not None:
            raise LookError("a second text is for encoders, and this is a translator; leave it out")
        question = replace(question, text=valid(question.text), target=question.target and valid(question.target))
        job = self._job(question)
        with evaluating(self.model), silenced(self.model, question.silence):
            seen, again = (None, False) if question.target is not None else self._film(job, question.search, stop)
            target = self._given(question) if seen is None else seen.found[0]
            sides = self._sides(question, job, target)
            layers, options = self._read(job, target, sides, chosen or Filter())
        mark_silent(layers, question.silence)
        found = document(question.text.strip(), sides, layers) | {"model": self.facts()}
        steps = choices(self.translator.tokenizer.target, self._written(target), options)
        if seen is None:
            found["decoding"] = given_decoding(target, sides, steps)
        else:
            found["decoding"] = self._decoding(seen, question, steps) | {"no_loops": again}
        found["properties"] = self.properties or measure_document(found)
        return found | self.known()

    # --- the search --------------------------------------------------------------------------------------------------

    def _job(self, question: Question) -> Job:
        text = self.translator.cleaned(question.text)
        if not text:
            raise LookError("there must be a sentence to look at, but it is empty; type one")
        source = self.translator.tokenizer.source
        (row,) = framed([with_sentinels(source, text)], source, question.to)
        framing = 1 if question.to is None else 2
        limit = question.search.limit(len(row) - framing)
        check_length(self.model.encoder, len(row), "the sentence")
        most = self.model.decoder.positions.max_length
        size = self.model.config.targets
        wrong = [token for token in question.prefix if not 0 <= token < size]
        if wrong:
            raise LookError(f"`prefix` must hold token ids from 0 to {size - 1}, but one is {wrong[0]}")
        if len(question.prefix) >= (limit := min(limit, most or limit)):
            raise LookError(f"`prefix` must be shorter than {limit} tokens, but has {len(question.prefix)}")
        return Job(source=row, prefix=question.prefix, limit=limit)

    def _film(self, job: Job, search: Search, stop: Callable[[], bool] | None) -> tuple[Film, bool]:
        """The search, as translating does it: one that runs in circles is made anew without, unless that was forbidden
        from the start; was it made anew?"""
        engine: TorchEngine[Any] = self.translator.torch_engine(stop)
        if self.translator.guards_at_once and not job.prefix:
            job = replace(job, no_loops=not looping(job.source))
        seen = film(engine, job, search)
        if not seen.found:
            raise LookError("the translation cannot go on behind these tokens; take back the last")
        if looping(seen.found[0].ids) and not looping(job.source):
            return film(engine, job, replace(search, no_loops=True)), True
        return seen, False

    def _given(self, question: Question) -> Hypothesis:
        assert question.target is not None
        ids = with_sentinels(self.translator.tokenizer.target, question.target.strip())
        check_length(self.model.decoder, len(ids) + 1, "the translation")
        return Hypothesis(ids=tuple(ids), log_prob=math.nan, score=math.nan, ended=True)

    # --- what the model did ------------------------------------------------------------------------------------------

    def _sides(self, question: Question, job: Job, target: Hypothesis) -> dict[str, Side]:
        tokenizer, config = self.translator.tokenizer, self.model.config
        written = self._written(target)
        source, to = self.languages
        hidden = any(token in tokenizer.source.sentinels for token in job.source)
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
                label="hidden spans" if hidden else "translation",
                text=self._text(target.ids),
                tokens=tokens_of(tokenizer.target, written),
                language=question.to or to,
            ),
        }

    def _text(self, ids: Sequence[int]) -> str:
        target = self.translator.tokenizer.target
        return told_spans(target, ids) if any(token in target.sentinels for token in ids) else target.decode(ids)

    def _written(self, target: Hypothesis) -> list[int]:
        return [*target.ids, *([self.model.config.end] if target.ended else [])]

    @torch.no_grad()
    def _read(
        self, job: Job, target: Hypothesis, sides: Mapping[str, Side], chosen: Filter
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Every layer while the decoder reads what was found, and the log-probabilities of what it could write."""
        one = Pass.of(self.model, [list(job.source)], [self._written(target)])
        with self.written_down(sides, chosen) as layers:
            states = one.states(self.model)
        logits = self.model.output(states)[0].float()
        never = torch.tensor(never_written(self.model.config, self.translator.tokenizer), device=logits.device)
        return layers, logits.index_fill(-1, never, -math.inf).log_softmax(-1).cpu()

    # --- as JSON -----------------------------------------------------------------------------------------------------

    def _decoding(self, seen: Film, question: Question, steps: list[dict[str, Any]]) -> dict[str, Any]:
        alive = {number for last in seen.last for number in seen.path(last)}
        won = set(seen.path(seen.last[0]))
        last = max(node.step for node in seen.nodes)
        shown = [n for n in seen.nodes if last < LONG or n.kept or n.score is not None]
        results = zip(seen.found, seen.last, strict=True)
        return {
            "formula": question.search.formula,
            "beam_size": question.search.beam_size,
            "forced": len(question.prefix),
            "nodes": [self._node(node, node.number in won, node.number in alive) for node in shown],
            "results": [
                {
                    "text": self._text(one.ids),
                    "score": rounded(one.score),
                    "log_prob": rounded(one.log_prob),
                    "node": last,
                    "ended": one.ended,
                }
                for one, last in results
            ],
            "choices": steps,
        }

    def _node(self, node: Node, won: bool, alive: bool) -> dict[str, Any]:
        return {
            "id": node.number,
            "parent": node.parent,
            "step": node.step,
            **told(self.translator.tokenizer.target, node.token),
            "log_prob": rounded(node.log_prob),
            "sum": rounded(node.sum),
            "kept": node.kept,
            "ended": node.score is not None,
            "score": None if node.score is None else rounded(node.score),
            "won": won,
            "alive": alive,
        }


def with_sentinels(vocabulary: Vocabulary, text: str) -> list[int]:
    """The ids of a text; what is written as a sentinel, or as a mask, is one where the vocabulary has them."""
    marks = Marks(vocabulary)
    return marks.ids(marks.words_of(text)) if vocabulary.sentinels else vocabulary.encode([text])[0]


def given_decoding(target: Hypothesis, sides: Mapping[str, Side], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a translation that was not searched for: how likely each of its words is."""
    log_prob = rounded(math.fsum(math.log(choice["p"]) if choice["p"] else -math.inf for choice in steps))
    result = {
        "text": sides["target"].text,
        "score": log_prob,
        "log_prob": log_prob,
        "node": None,
        "ended": target.ended,
    }
    return {"given": True, "formula": "", "forced": 0, "nodes": [], "results": [result], "choices": steps}
