"""Requests and results between the HTTP front end and the model workers: plain dataclasses, without torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attent.decoding.options import NO_CONSTRAINTS, GenerationOptions, PhraseConstraints, SearchOptions, StopCheck

Languages = tuple[str | None, str | None]  # of the source and the target
AUTO = "auto"  # as a source language: detect it
DEFAULT_BEAMS = SearchOptions.beam_size


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """The caller of a method of the service."""

    client: str = ""
    should_stop: StopCheck = lambda: False  # True when the client is gone
    send_item: Callable[[Any], None] = lambda item: None  # sends a result before the last


@dataclass(frozen=True, kw_only=True)
class TranslateRequest:
    """Texts to translate, all with the same options."""

    texts: tuple[str, ...]
    source: str = AUTO
    target: str = ""  # "": the only target language of the source
    model: str | None = None  # by name; None: the first that translates between the languages
    search: SearchOptions = field(default_factory=SearchOptions)
    constraints: PhraseConstraints = NO_CONSTRAINTS
    glossary: tuple[tuple[str, str], ...] = ()  # (term, translation)
    alignment: bool = False
    mbr_candidates: int = 0
    split_sentences: bool = False
    is_html: bool = False  # texts are HTML, whose tags are kept; without alignment and alternatives

    @property
    def num_beams(self) -> int:
        """The number of beams or samples of each text, at least the default."""
        return max(self.search.beam_size, self.search.n_best, self.mbr_candidates, DEFAULT_BEAMS)


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    text: str
    score: float


@dataclass(frozen=True, kw_only=True)
class TextTranslation(ScoredText):
    source: str  # language
    target: str
    model: str
    confidence: float  # mean probability of the tokens
    detected: float | None = None  # confidence of the detected source language; None: the client named the language
    n_best: tuple[ScoredText, ...] = ()  # best first, including this one
    alignment: tuple[tuple[int, int], ...] | None = None  # (source word, target word), from 0
    missed_terms: tuple[str, ...] | None = None  # of the glossary; None: none


@dataclass(frozen=True, kw_only=True)
class FileRequest:
    """A document, or a text with one sentence per line."""

    name: str
    content: bytes
    source: str = AUTO
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    model: str
    prompts: tuple[str, ...]
    options: GenerationOptions


@dataclass(frozen=True, kw_only=True)
class Direction:
    """A pair of languages and the model that translates between them."""

    source: str
    target: str
    model: str
    tag: str | None = None  # the target language as the model's own tag, for a multilingual model


@dataclass(frozen=True, kw_only=True)
class ServiceInfo:
    """The models of a service, as a worker reports them when it is ready."""

    directions: tuple[Direction, ...] = ()
    models: tuple[dict[str, Any], ...] = ()  # name, kind ("translation" or "generation"), number of parameters
    language_names: dict[str, str] = field(default_factory=dict)  # tag -> English name
    file_suffixes: tuple[str, ...] = ()

    @property
    def language_pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple(dict.fromkeys((each.source, each.target) for each in self.directions))
