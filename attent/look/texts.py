"""A text through a model that reads one text alone, as a document: of a decoder (GPT, LLaMA) what it expected at each
place and how it would go on; of an encoder (BERT) which words it puts where some are hidden, and what it says of the
whole. Translators are `view`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attent.decode.engine import Stopped
from attent.decode.force import evaluating
from attent.decode.reader import Reader
from attent.look.properties import measure_document
from attent.look.reading import (
    Filter,
    LookError,
    Question,
    Reading,
    check_length,
    choices,
    device_of,
    labelled,
    mark_silent,
    reads_only,
)
from attent.look.silence import silenced
from attent.look.tokens import tokens_of
from attent.look.trace import Side, document
from attent.models import CausalLM, Encoder
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import Vocabulary, valid

GOES_ON = 16  # tokens by which a text is continued
HIDDEN_MOST = 128  # tokens of a text of which each is hidden in turn
HIDDEN_ROWS = 16  # of these texts at once


class CausalLooker(Reading[CausalLM]):
    """Answers questions about one language model."""

    def __init__(
        self, model: CausalLM, vocabulary: Vocabulary, *, name: str = "", properties: dict[str, Any] | None = None
    ) -> None:
        check_vocabulary(vocabulary, model.config.vocab)
        super().__init__(model, name=name, properties=properties)
        self.vocabulary = vocabulary

    def look(
        self, question: Question, chosen: Filter | None = None, stop: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        reads_only(question, "a language model")
        if question.pair is not None:
            raise LookError("a second text is for encoders, and this is a language model; leave it out")
        text = read_text(question.text)
        ids = [*self.vocabulary.before, *self.vocabulary.encode([text])[0]]
        check_length(self.model.decoder, len(ids), "the text")
        sides = {"text": Side(label="text", text=text, tokens=tokens_of(self.vocabulary, ids))}
        with evaluating(self.model), silenced(self.model, question.silence), torch.no_grad():
            with self.written_down(sides, chosen or Filter()) as layers:
                logits = self.model(torch.tensor([ids], device=device_of(self.model)))[0]
            text_after = self._text_after(ids, list(self._goes_on(ids, stop)))
        mark_silent(layers, question.silence)
        found = document(text.strip(), sides, layers) | {"model": self.facts()}
        steps = choices(self.vocabulary, [*ids[1:], None], shares(logits, self.vocabulary))
        places = [{"place": place} | step for place, step in enumerate(steps, 1)]
        found["guesses"] = {"kind": "next", "side": "text", "places": places}
        found["outcome"] = {"label": "would go on", "text": text_after}
        found["properties"] = self.properties or measure_document(found)
        return found | self.known()

    def _goes_on(self, ids: Sequence[int], stop: Callable[[], bool] | None) -> Iterator[int]:
        """The likeliest token, and behind it the likeliest, and so on."""
        most = self.model.decoder.positions.max_length
        room = min(GOES_ON, GOES_ON if most is None else most - len(ids))
        ends = {self.vocabulary.end, *self.model.config.ends}
        cache = self.model.begin(rows=1, capacity=len(ids) + room)
        given = list(ids)
        for _ in range(room):
            if stop is not None and stop():
                raise Stopped("nobody waits for the answer")
            logits = self.model.step(torch.tensor([given], device=device_of(self.model)), cache)[0, -1:]
            token = int(shares(logits, self.vocabulary).argmax())
            if token in ends:
                return
            yield token
            given = [token]

    def _text_after(self, ids: Sequence[int], more: Sequence[int]) -> str:
        whole, before = (self.vocabulary.decode(row) for row in ([*ids, *more], ids))
        return whole[len(before) :] if whole.startswith(before) else self.vocabulary.decode(more)


@dataclass(frozen=True)
class Read:
    """What an encoder reads."""

    ids: list[int]
    segments: list[int]
    words: list[int]  # places of what is text, neither frame nor mask
    masks: list[int]  # places of masks


class EncoderLooker(Reading[Encoder]):
    """Answers questions about one encoder of text."""

    def __init__(
        self, model: Encoder, tokenizer: Tokenizer, *, name: str = "", properties: dict[str, Any] | None = None
    ) -> None:
        super().__init__(model, name=name, properties=properties)
        self.reader, self.vocabulary = Reader(model, tokenizer, name=name or "the model"), tokenizer.source
        mask = self.vocabulary.mask
        self.mask = None if mask is None else self.vocabulary.pieces([mask])[0]
        self.guessing = model.masked is not None and mask is not None

    def facts(self) -> dict[str, Any]:
        return super().facts() | ({"mask": self.mask} if self.guessing else {})

    def look(
        self, question: Question, chosen: Filter | None = None, stop: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        reads_only(question, "an encoder of text")
        texts = [read_text(text).strip() for text in (question.text, question.pair) if text is not None]
        read = self._read(texts)
        check_length(self.model.encoder, len(read.ids), "the text")
        text = " ".join(texts)
        sides = {"text": Side(label="text", text=text, tokens=tokens_of(self.vocabulary, read.ids))}
        with evaluating(self.model), silenced(self.model, question.silence), torch.no_grad():
            with self.written_down(sides, chosen or Filter()) as layers:
                states = self._states([read.ids], read.segments)
            said = self._said(texts, read, states, stop)
        mark_silent(layers, question.silence)
        found = document(text, sides, layers) | {"model": self.facts()} | said
        found["properties"] = self.properties or measure_document(found)
        return found | self.known()

    def _read(self, texts: Sequence[str]) -> Read:
        vocabulary = self.vocabulary
        rows = [self.reader.masked_ids(text) for text in texts]
        ids, segments, words = list(vocabulary.before), [0] * len(vocabulary.before), []
        for number, row in enumerate(rows):
            words += [len(ids) + i for i, token in enumerate(row) if token != vocabulary.mask]
            ids += [*row, *vocabulary.after]
            segments += [number] * (len(row) + len(vocabulary.after))
        masks = [i for i, token in enumerate(ids) if token == vocabulary.mask]
        if masks and self.model.masked is None:
            raise LookError(f"the model has no head that guesses hidden words; write a word for {self.mask}")
        return Read(ids, segments, words, masks)

    def _states(self, rows: Sequence[Sequence[int]], segments: Sequence[int]) -> Tensor:
        told = torch.tensor([segments] * len(rows), device=device_of(self.model))
        apart = told if self.model.config.segments > 1 else None
        return self.model(torch.tensor(rows, device=told.device), segments=apart)

    def _said(
        self, texts: Sequence[str], read: Read, states: Tensor, stop: Callable[[], bool] | None
    ) -> dict[str, Any]:
        """What the model says: of hidden words, and of the whole."""
        found: dict[str, Any] = {}
        if self.guessing and read.masks:
            found |= self._filled(texts, read, self.model.masked_logits(states[0, read.masks]))
        if self.model.config.labels:
            found["labels"] = labelled(self.model.config.labels, self.model.classify(states)[0])
            found.setdefault("outcome", {"label": "label", "text": found["labels"]["best"][0]["label"]})
        if self.guessing and not read.masks and 0 < len(read.words) <= HIDDEN_MOST:
            found = self._hidden(read, stop) | found
        return found

    def _filled(self, texts: Sequence[str], read: Read, logits: Tensor) -> dict[str, Any]:
        never = torch.tensor(self.reader.never)
        likely = shares(logits, self.vocabulary).index_fill(-1, never, -math.inf)
        steps = choices(self.vocabulary, [None] * len(read.masks), likely)
        best = dict(zip(read.masks, (step["options"][0]["token"] for step in steps), strict=True))
        filled = [best.get(i, token) for i, token in enumerate(read.ids)]
        text = self.reader.fill(texts)[0].text if len(texts) == 1 else self.vocabulary.decode(filled)
        places = [{"place": place} | step for place, step in zip(read.masks, steps, strict=True)]
        return {
            "guesses": {"kind": "masked", "side": "text", "places": places},
            "outcome": {"label": "filled in", "text": text},
        }

    def _hidden(self, read: Read, stop: Callable[[], bool] | None) -> dict[str, Any]:
        """Each word hidden in turn: what the model would put there, and how likely what stands there is."""
        found: list[Tensor] = []
        for start in range(0, len(read.words), HIDDEN_ROWS):
            if stop is not None and stop():
                raise Stopped("nobody waits for the answer")
            some = read.words[start : start + HIDDEN_ROWS]
            states = self._states([with_mask(read.ids, place, self.vocabulary) for place in some], read.segments)
            found.append(self.model.masked_logits(states[range(len(some)), some]))
        words = [read.ids[i] for i in read.words]
        never = torch.tensor(sorted(set(self.reader.never) - set(words)))
        likely = shares(torch.cat(found), self.vocabulary).index_fill(-1, never, -math.inf)
        steps = choices(self.vocabulary, words, likely)
        text = self.vocabulary.decode([step["options"][0]["token"] for step in steps])
        places = [{"place": place} | step for place, step in zip(read.words, steps, strict=True)]
        return {
            "guesses": {"kind": "hidden", "side": "text", "places": places},
            "outcome": {"label": "each word guessed from the others", "text": text},
        }


def check_vocabulary(vocabulary: Vocabulary, size: int) -> None:
    if vocabulary.size > size:
        raise LookError(
            f"the tokenizer must be the model's, of {size} pieces at most, but has {vocabulary.size}; "
            f"load both from the same folder"
        )


def read_text(text: str) -> str:
    text = valid(text)
    if not text.strip():
        raise LookError("there must be a sentence to look at, but it is empty; type one")
    return text


def with_mask(ids: Sequence[int], place: int, vocabulary: Vocabulary) -> list[int]:
    assert vocabulary.mask is not None
    return [*ids[:place], vocabulary.mask, *ids[place + 1 :]]


def shares(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Log-probabilities, of pieces alone: an imported model may have rows that no piece belongs to."""
    logits = logits.float()
    logits[..., vocabulary.size :] = -math.inf
    return logits.log_softmax(-1).cpu()
