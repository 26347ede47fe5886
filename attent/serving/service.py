"""The models of a server and what it offers: translate, detect, suggest, translate files, look, complete.

A service is called by many threads at once; searches share batches (`batching`). It knows nothing of HTTP: a request
that cannot be fulfilled raises `ApiError` with the status of the response, or another ValueError, which is status 400.
"""

import codecs
import math
import re
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from attent.data.formats.registry import detect_document_format, list_document_suffixes, scan_document
from attent.data.pairs import ANY_LANGUAGES, CorpusError
from attent.decoding.engines.ctranslate2 import BATCH_BEAM_TOKENS
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.generation.generator import Generator
from attent.decoding.glossary import Glossary
from attent.decoding.loading import check_model_exists, read_data_settings
from attent.decoding.options import Generation, Hypothesis, SearchOptions, SearchRequest, StopCheck
from attent.decoding.pipeline import (
    TranslationPipeline,
    pretranslate_document,
    restore_whitespace,
    translate_document_texts,
)
from attent.decoding.translator import Translation, Translator
from attent.inspection.html_page import build_live_csp
from attent.inspection.inspectors.seq2seq import TranslationInspector
from attent.interop import load
from attent.models import CausalLM, Seq2Seq
from attent.serving.batching import SearchBatcher
from attent.serving.endpoints import LookRequest, SuggestRequest
from attent.serving.limits import ApiError
from attent.serving.look_document import build_look_document, render_look_page
from attent.serving.messages import (
    AUTO,
    CallContext,
    CompletionRequest,
    Direction,
    FileRequest,
    Languages,
    ScoredText,
    ServiceInfo,
    TextTranslation,
    TranslateRequest,
)
from attent.storage.errors import FolderError
from attent.storage.hub import find_origin
from attent.text.language_id import LanguageIdentifier, detect_language
from attent.text.language_tags import choose_tag, get_language_name, is_same_language

if TYPE_CHECKING:
    from attent.serving.backend import ServiceConfig

GPU_BATCH_TOKENS = 65_536  # sources x longest source x beams; one batch takes a few dozen milliseconds
PLAIN_TEXT_SUFFIX = ".txt"
MIN_DETECTED = 0.5  # confidence to return a text unchanged, since it is in the target language
LINE_END = re.compile(r"\r?\n")
MARKUP = re.compile(r"<(script|style)\b.*?(?:</\1|\Z)|<[^<>]*>", re.IGNORECASE | re.DOTALL)
SAMPLE_BYTES, SAMPLE_CHARACTERS = 20_000, 2_000  # of a file, to detect its language: with and without markup

Detection = tuple[tuple[str, float], ...]  # (language, confidence), best first

_client: ContextVar[str] = ContextVar("client", default="")  # whose request the current thread works on


class BatchedTranslator(Translator):
    """A translator whose concurrent searches share batches."""

    @cached_property
    def batcher(self) -> SearchBatcher:
        if self.device.type != "cpu":
            return SearchBatcher(super()._run_engines, max_batch_tokens=GPU_BATCH_TOKENS)
        # Two, so that one batch is searched while the answers of the other are sent and new requests arrive. The torch
        # engine searches one at a time. CTranslate2's splits a batch with more than BATCH_BEAM_TOKENS by length.
        count = 1 if self._ctranslate2_engine is None else 2
        return SearchBatcher(super()._run_engines, max_batch_tokens=count * BATCH_BEAM_TOKENS, num_threads=count)

    def _run_engines(
        self, requests: Sequence[SearchRequest], options: SearchOptions, should_stop: StopCheck | None
    ) -> list[list[Hypothesis]]:
        return self.batcher.search(requests, options, should_stop or (lambda: False), _client.get())


class TranslationService:
    def __init__(self, config: "ServiceConfig", notify: Callable[[str], None] | None = None) -> None:
        """Load the models."""
        self.limits = config.limits
        self.translators: dict[str, BatchedTranslator] = {}
        self.generators: dict[str, Generator] = {}
        self._generator_lock = threading.Lock()
        self._inspectors: dict[str, TranslationInspector] = {}
        for folder in config.folders:
            self._load_model(folder.expanduser(), config, notify)
        bases = list(self.translators.values())
        for name, folder in config.adapters:
            self._load_adapter(name, folder, bases)
        if not self.translators and not self.generators:
            raise ValueError("there must be a model to serve, but none is named; give its folder")
        self.directions = tuple(
            direction
            for name, translator in self.translators.items()
            for direction in list_directions(name, translator, config.languages)
        )

    def _load_model(self, folder: Path, config: "ServiceConfig", notify: Callable[[str], None] | None) -> None:
        check_model_exists(folder)
        device, (src, tgt) = config.device, config.languages
        name = self._choose_name(folder)
        model = load(folder)
        if isinstance(model, CausalLM):
            self.generators[name] = Generator.load(folder, device=device.device, dtype=device.dtype, notify=notify)
        elif isinstance(model, Seq2Seq) and model.config.frontend is None:
            translator = BatchedTranslator.load(folder, **vars(device), src=src, tgt=tgt, notify=notify)
            translator.translate(["a"])  # loads the engine and its conversion
            self.translators[name] = translator
        else:
            raise ValueError(
                f"{folder}: must be a translator or a language model, but is a {type(model).__name__} of another task; "
                f"use attent transcribe, caption, classify or fill"
            )

    def _load_adapter(self, name: str, folder: Path, bases: Sequence[BatchedTranslator]) -> None:
        """Serve the model of an adapter with it, as a model of its own that shares the weights."""
        if name in (*self.translators, *self.generators):
            raise ValueError(f"{folder}: must have another name than {name}, which is served already; change it")
        problem: Exception = ValueError(f"{folder}: is an adapter, but no translator is served; name its model")
        for base in bases:
            try:
                translator = base.with_adapter(folder)
                translator.translate(["a"])  # an engine that does not support it is reported now
                self.translators[name] = translator
                return
            except FolderError as error:
                problem = error
        raise problem

    def _choose_name(self, folder: Path) -> str:
        """Return the folder's name, with a number if another model has it."""
        name = folder.resolve().name
        name = name.partition("@")[0] if find_origin(folder) else name  # a new commit keeps the name
        others = {*self.translators, *self.generators}
        numbered = (f"{name}-{number}" for number in range(2, len(others) + 3))
        return name if name not in others else next(each for each in numbered if each not in others)

    @cached_property
    def info(self) -> ServiceInfo:
        models = [
            {"name": name, "kind": kind, "parameters": sum(p.numel() for p in owner.model.parameters())}
            for kind, group in (("translation", self.translators), ("generation", self.generators))
            for name, owner in group.items()
        ]
        tags = {tag for direction in self.directions for tag in (direction.source, direction.target)}
        return ServiceInfo(
            directions=self.directions,
            models=tuple(models),
            language_names={tag: get_language_name(tag) for tag in sorted(tags)},
            file_suffixes=tuple(sorted({PLAIN_TEXT_SUFFIX, *list_document_suffixes()})),
        )

    # --- languages ---------------------------------------------------------------------------------------------------

    @cached_property
    def _identifier(self) -> LanguageIdentifier:
        known = [translator.language_identifier for translator in self.translators.values()]
        return LanguageIdentifier.merge([identifier for identifier in known if identifier is not None])

    def detect(self, texts: Sequence[str], context: CallContext | None = None) -> list[Detection]:
        """Return for each text the likely languages with their confidence, best first."""
        own = sorted({direction.source for direction in self.directions})
        return [tuple(detect_language(text, self._identifier, own)) for text in texts]

    def choose_direction(
        self, source: str, target: str, model: str | None, text: str, *, can_copy: bool = True
    ) -> tuple[Direction, float | None]:
        """Return the direction between two languages, and the confidence if the source language is detected.

        With `can_copy`, the source is the target if the text is in the target language: it is not translated then.
        """
        candidates = [each for each in self.directions if model in (None, each.model)]
        if not candidates:
            names = ", ".join(dict.fromkeys(each.model for each in self.directions)) or "none"
            raise ApiError(404, f"`model` must be a translator that is served ({names}), but is {model!r:.80}")
        detected = (*self.detect([text])[0], ("", 0.0)) if source == AUTO else ((source, 1.0),)
        language, probability = detected[0]
        if can_copy and probability >= MIN_DETECTED and (tag := find_common_tag(language, target, candidates)):
            same = Direction(source=tag, target=tag, model=candidates[0].model)
            return same, probability if source == AUTO else None
        candidates, confidence = self._match_language(candidates, "target", target), None
        if source == AUTO:
            sources = [each.source for each in candidates]
            likely = ((choose_tag(each, sources), probability) for each, probability in detected)
            source, confidence = next(((tag, value) for tag, value in likely if tag), (sources[0], 0.0))
        candidates = self._match_language(candidates, "source", source)
        targets = dict.fromkeys(each.target for each in candidates)
        if len(targets) > 1:
            raise ApiError(400, f"`target` must be one of {', '.join(targets)} for source {source}, but is missing")
        return candidates[0], confidence

    def _match_language(self, candidates: list[Direction], side: str, requested: str) -> list[Direction]:
        if not requested and side == "target":
            return candidates
        available = list(dict.fromkeys(getattr(each, side) for each in candidates))
        primary = requested.replace("_", "-").partition("-")[0]
        tag = choose_tag(requested, available) or choose_tag(primary, available)
        if tag is None:
            known = ", ".join(available)
            raise ApiError(400, f"`{side}` must be a language of the models here ({known}), but is {requested!r:.40}")
        return [each for each in candidates if getattr(each, side) == tag]

    # --- translation -------------------------------------------------------------------------------------------------

    def translate(self, request: TranslateRequest, context: CallContext) -> list[TextTranslation]:
        _client.set(context.client)
        by_direction: dict[Direction, dict[int, float | None]] = {}
        for index, text in enumerate(request.texts):
            sample = strip_markup(text) if request.is_html else text
            direction, confidence = self.choose_direction(request.source, request.target, request.model, sample)
            by_direction.setdefault(direction, {})[index] = confidence
        translations: dict[int, TextTranslation] = {}
        for direction, indices in by_direction.items():
            if direction.source == direction.target:
                for index, value in indices.items():
                    translations[index] = copy_text(request.texts[index], direction, value, request.alignment)
                continue
            if request.is_html:
                for index, value in indices.items():
                    translations[index] = self._translate_html(request, request.texts[index], direction, value, context)
                continue
            lines = [request.texts[index].split("\n") for index in indices]
            translated_lines = self.translators[direction.model].translate(
                list(chain.from_iterable(lines)),
                request.search,
                alignment=request.alignment,
                mbr_candidates=request.mbr_candidates,
                should_stop=context.should_stop,
                **build_search_arguments(request, direction),
            )
            remaining = iter(translated_lines)
            for (index, confidence), text_lines in zip(indices.items(), lines, strict=True):
                own_lines = list(islice(remaining, len(text_lines)))
                translations[index] = join_lines(own_lines, direction, confidence, request.alignment)
        return [translations[index] for index in range(len(request.texts))]

    def _translate_html(
        self, request: TranslateRequest, text: str, direction: Direction, confidence: float | None, context: CallContext
    ) -> TextTranslation:
        pipeline = HtmlPipeline(
            translator=self.translators[direction.model],
            options=replace(request.search, n_best=1),
            mbr_candidates=request.mbr_candidates,
            **build_search_arguments(request, direction),
        )
        content = codecs.BOM_UTF8 + text.encode("utf-8", "replace")  # whatever charset the page declares
        progress = FileProgress(replace(context, send_item=lambda item: None))
        result = pretranslate_document(pipeline, content, Path("text.html"), direction.target, progress)
        if not pipeline.translations:
            return copy_text(text, direction, confidence, alignment=False)
        joined = join_lines(pipeline.translations, direction, confidence, alignment=False)
        return replace(joined, text=result.content.removeprefix(codecs.BOM_UTF8).decode(), n_best=())

    def stream(self, request: TranslateRequest, context: CallContext) -> None:
        """Send the translation of the only text sentence by sentence; joined, they are what `translate` returns."""
        _client.set(context.client)
        (text,) = request.texts
        direction, _ = self.choose_direction(request.source, request.target, request.model, text)
        if direction.source == direction.target:
            context.send_item(text)
            return
        arguments = build_search_arguments(request, direction) | {"should_stop": context.should_stop}
        for number, line in enumerate(text.split("\n")):
            content = line.strip(" \t")
            before, _, after = line.partition(content) if content else ("", "", "")
            context.send_item(f"{chr(10) if number else ''}{before}")
            translator = self.translators[direction.model]
            for sentence in translator.stream_sentences(line, request.search, first_index=number, **arguments):
                context.send_item(sentence)
            context.send_item(after)

    def suggest(self, request: SuggestRequest, context: CallContext) -> list[ScoredText]:
        """Return translations that begin with a prefix and continue with different words, best first."""
        direction, _ = self.choose_direction(request.source or AUTO, request.target, None, request.text)
        if direction.source == direction.target:
            return []
        translator = self.translators[direction.model]
        with translator.hold_device():
            suggestions = translator.suggest_continuations(
                request.text, request.prefix, request.count, to=direction.tag, should_stop=context.should_stop
            )
        return [ScoredText(text=each.text, score=each.score) for each in suggestions]

    def translate_file(self, request: FileRequest, context: CallContext) -> bytes:
        """Translate a document in its format, or a text line by line; sends the share that is done."""
        _client.set(context.client)
        name = PurePath(request.name)
        key = detect_document_format(name.name)
        if key is None and name.suffix != PLAIN_TEXT_SUFFIX:
            known = ", ".join(self.info.file_suffixes)
            raise ApiError(400, f"the file must be of one of these kinds: {known}, but is {name.name!r:.80}")
        sample = extract_sample(request.content, name.name) if request.source == AUTO else ""
        can_copy = key not in ("po", "xliff", "tmx", "table")  # these may have both languages
        direction, _ = self.choose_direction(request.source, request.target, None, sample, can_copy=can_copy)
        if direction.source == direction.target:
            return request.content
        pipeline = FilePipeline(
            translator=self.translators[direction.model],
            options=SearchOptions(),
            to=direction.tag,
            source_lang=direction.source,
            context=self.translators[direction.model].context,
        )
        progress = FileProgress(context)
        if key in (None, "text"):
            try:
                text = request.content.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ApiError(400, f"the file must be UTF-8, but byte {error.start} is not") from None
            lines, ends = LINE_END.split(text), [*LINE_END.findall(text), ""]
            parts = zip(translate_document_texts(pipeline, lines, progress), lines, ends, strict=True)
            return "".join(restore_whitespace(text, line) + end for text, line, end in parts).encode()
        return pretranslate_document(pipeline, request.content, Path(name.name), direction.target, progress).content

    # --- other models and views --------------------------------------------------------------------------------------

    def complete(self, request: CompletionRequest, context: CallContext) -> list[list[Generation]]:
        if request.model not in self.generators:
            names = ", ".join(self.generators) or "none"
            raise ApiError(404, f"`model` must be a language model served here ({names}), but is {request.model!r:.80}")
        generator, options = self.generators[request.model], request.options
        with self._generator_lock:
            return generator.generate(request.prompts, options, should_stop=context.should_stop)

    def look(self, request: LookRequest, context: CallContext) -> dict[str, Any]:
        inspector = self._get_inspector(request.model or "")
        with inspector.translator.hold_device():  # heads may be masked meanwhile
            return build_look_document(inspector, request, context.should_stop, self.limits)

    def look_page(self, model: str, context: CallContext) -> tuple[str, str]:
        """Return the page that shows the attention of a model, and its Content-Security-Policy."""
        return render_look_page(self._get_inspector(model)), build_live_csp()

    def _get_inspector(self, model: str) -> TranslationInspector:
        if model not in self.translators:
            raise ApiError(404, f"`model` must be a translator that is served, but is {model!r:.80}")
        translator = self.translators[model]
        direction = next(each for each in self.directions if each.model == model)
        languages = (direction.source, None if direction.tag else direction.target)
        return self._inspectors.setdefault(model, TranslationInspector(translator, name=model, languages=languages))


class FilePipeline(TranslationPipeline):
    """A pipeline with small blocks, after each of which the progress is reported."""

    block_lines = 128


@dataclass(frozen=True, kw_only=True)
class HtmlPipeline(FilePipeline):
    """A pipeline that keeps its translations, for their scores."""

    translations: list[Translation] = field(default_factory=list)

    def translate(
        self, texts: Sequence[str], first_index: int = 0, should_stop: StopCheck | None = None
    ) -> list[Translation]:
        translations = super().translate(texts, first_index, should_stop)
        self.translations.extend(translations)
        return translations


@dataclass(frozen=True)
class FileProgress:
    """Sends the share of the lines that are translated, and ends the translation when the client is gone."""

    context: CallContext

    def update(self, lines: int, done_bytes: int, total_lines: int | None = None) -> None:
        if self.context.should_stop():
            raise SearchCancelled
        self.context.send_item(lines / (total_lines or lines or 1))

    def print_message(self, message: str) -> None:
        pass


def extract_sample(content: bytes, name: str) -> str:
    """Return the first texts of a document, to detect its language."""
    try:
        units = scan_document(content, name, ANY_LANGUAGES).units[:SAMPLE_CHARACTERS]
    except CorpusError:  # it does not name its languages, or is damaged, which its translation reports
        return strip_markup(content[:SAMPLE_BYTES].decode("utf-8", "ignore"))
    parts = chain.from_iterable(chain.from_iterable(unit.contents) for unit in units)
    text = " ".join(part for part in parts if isinstance(part, str))
    return strip_markup(text.encode("utf-8", "ignore").decode())


def strip_markup(text: str) -> str:
    """Return the beginning of a text without tags, to detect its language."""
    return MARKUP.sub(" ", text[:SAMPLE_BYTES])[:SAMPLE_CHARACTERS]


def build_search_arguments(request: TranslateRequest, direction: Direction) -> dict[str, Any]:
    """Return the arguments that `Translator.translate`, `Translator.stream_sentences` and pipelines share."""
    return {
        "to": direction.tag,
        "constraints": request.constraints,
        "glossary": Glossary.from_terms(dict(request.glossary)) if request.glossary else None,
        "split_sentences": request.split_sentences,
        "source_lang": direction.source,
    }


def list_directions(name: str, translator: Translator, default: Languages = (None, None)) -> list[Direction]:
    """Return the language pairs of a model, from its training run, its stored languages, or the given ones."""
    data, known = read_data_settings(translator.folder), translator.language_identifier
    source_text = data.get("src") or (",".join(known.sources) if known else "") or default[0]
    target_text = data.get("tgt") or (",".join(known.targets) if known else "") or default[1]
    tags = translator.tokenizer.source.tags
    if not source_text or not (target_text or tags):
        raise ValueError(
            f"{translator.folder}: must say its languages, but does not; name them with --src and --tgt, such as "
            f"--src en --tgt de"
        )
    sources = [tag.strip() for tag in str(source_text).split(",")]
    named = [(tag.strip(), None) for tag in str(target_text).split(",")]
    targets: Sequence[tuple[str, str | None]] = [(tag, tag) for tag in tags] or named
    return [
        Direction(source=source, target=target, model=name, tag=tag)
        for source in sources
        for target, tag in targets
        if source != target
    ]


def find_common_tag(source: str, target: str, directions: Sequence[Direction]) -> str | None:
    """Return the tag of a known language if it is the source and the target, and no model translates between both."""
    has_model = any(all(is_same_language(tag, target) for tag in (each.source, each.target)) for each in directions)
    if has_model or not is_same_language(source, target):
        return None
    tags = [tag for each in directions for tag in (each.source, each.target) if is_same_language(tag, target)]
    return choose_tag(target, tags) or next(iter(tags), None)


def copy_text(text: str, direction: Direction, confidence: float | None, alignment: bool) -> TextTranslation:
    """Return the translation of a text that is in the target language."""
    return TextTranslation(
        text=text,
        score=0.0,
        source=direction.source,
        target=direction.target,
        model=direction.model,
        confidence=1.0,
        detected=confidence,
        alignment=tuple((index, index) for index in range(len(text.split()))) if alignment else None,
    )


def join_lines(
    lines: Sequence[Translation], direction: Direction, confidence: float | None, alignment: bool
) -> TextTranslation:
    """Return the translation of a text from those of its lines; alternatives are joined by their rank."""

    def join(ranked: Sequence[Any]) -> ScoredText:
        texts = [restore_whitespace(each.text, line.source) for each, line in zip(ranked, lines, strict=True)]
        scores = [each.score for each in ranked if each.tokens]
        return ScoredText(text="\n".join(texts), score=sum(scores) / max(1, len(scores)))

    best = join(lines)
    log_prob = sum(line.log_prob for line in lines)
    length = sum(len(line.tokens) + line.is_finished for line in lines)
    n_best = [
        join([line.n_best[min(rank, len(line.n_best) - 1)] if line.n_best else line for line in lines])
        for rank in range(max(len(line.n_best) for line in lines))
    ]
    return TextTranslation(
        text=best.text,
        score=best.score,
        source=direction.source,
        target=direction.target,
        model=direction.model,
        confidence=math.exp(log_prob / length) if length else 1.0,
        detected=confidence,
        n_best=tuple(n_best),
        alignment=join_links(lines) if alignment else None,
        missed_terms=tuple(str(term) for line in lines for term in line.missed_terms) or None,
    )


def join_links(lines: Sequence[Translation]) -> tuple[tuple[int, int], ...]:
    """Return the alignment links of consecutive lines, numbered by the words of the whole text."""
    links, source_start, target_start = [], 0, 0
    for line in lines:
        links += [(source_start + source, target_start + target) for source, target in line.alignment.links]
        source_start += len(line.source.split())
        target_start += len(line.text.split())
    return tuple(links)
