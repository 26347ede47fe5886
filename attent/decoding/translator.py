"""Translate text: split it into segments, encode them, search with an engine, detokenize and join.

    translator = Translator.load("runs/en-de")
    print(translator("A man rides a bike."))

The search itself is in `search`, batching in `engines/reference`, CTranslate2 in `engines/ctranslate2`.
"""

import asyncio
import math
import re
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar, Unpack, get_args, overload

import torch
from torch import Tensor

from attent.decoding import loading
from attent.decoding.alignment import Alignment, AlignmentError, align_rows, concatenate_alignments, load_selection
from attent.decoding.constraints import NEG_INF, TargetVocabulary, build_constraints, has_loop
from attent.decoding.constraints.phrase_automaton import find_phrase
from attent.decoding.engines.ctranslate2 import CTranslate2Engine
from attent.decoding.engines.gpu.eligibility import drop_cached_searches
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, Unavailable
from attent.decoding.engines.reference import SearchCancelled, SearchSession, TorchEngine
from attent.decoding.ensemble import Ensemble, check_tokenizers
from attent.decoding.forced_decoding import EncodedPair
from attent.decoding.glossary import Glossary, Phrases, TermPlacement, translate_terms
from attent.decoding.options import (
    NO_CONSTRAINTS,
    EngineName,
    Hypothesis,
    InputError,
    PhraseConstraints,
    SearchKeywords,
    SearchOptions,
    SearchRequest,
    Segment,
    StopCheck,
    list_search_keywords,
)
from attent.decoding.quality import Quality, compute_expected_chrf, normalize_log_probs
from attent.decoding.search import make_suppressed_tensor
from attent.interop import load_as
from attent.models import Seq2Seq
from attent.models.folder import read_side_file
from attent.models.seq2seq import find_suppressed_tokens
from attent.models.weights import load_adapter
from attent.nn import LSTMDecoder, Stack
from attent.nn.devices import get_device
from attent.nn.eval_mode import SharedContext, eval_mode
from attent.nn.lora import has_adapter
from attent.storage.errors import AttentError
from attent.storage.hub import locate_model
from attent.text.language_id import LANGUAGES_FILE, LanguageIdentifier
from attent.text.scripts import UNSPACED_SCRIPTS, compile_letter_pattern
from attent.text.sentence_splitter import split_by_tokens, split_sentences
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_formats import BYTE_TOKEN
from attent.text.vocabulary import SEPARATOR, SPACE, ContextWindow, has_separator, split_context

UNICODE_SPACES = "\t\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
INVISIBLE_CHARS = "\u00ad\u200b\u2060\ufeff"  # soft hyphen, zero-width space, word joiner, byte order mark
MAX_SEGMENTS = 2**20  # of a text
MAX_UNSPLIT_TOKENS = 200  # longer texts are split into sentences: hardly any model was trained on longer ones
DEFAULT_MAX_TOKENS = 256  # `data.max_tokens` by default; a model with a larger value was trained on long texts
ARBITRARY_SHARE = 0.1  # of the probability, which label smoothing spreads over all tokens
CPU_MAX_ROWS, MAX_ROWS = 128, 4_096  # per batch, see `compute_max_rows`


class TranslationError(InputError):
    """The text cannot be translated as requested."""


class SearchedText(NamedTuple):
    """The segments of a text with their source ids and hypotheses."""

    translator: "Translator"
    segments: Sequence[Segment]
    rows: Sequence[Sequence[int]]
    hypotheses: Sequence[list[Hypothesis]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Translation(Hypothesis):
    """The best hypothesis for a source, with the n-best list.

    >>> translation = translator("A dog sleeps.")
    >>> print(translation)
    Ein Hund schläft.
    >>> translation.alignment.pharaoh
    '0-0 ... 2-2'
    >>> dict(zip(translation.tokens, translation.scores))
    {'▁Ein': -0.0..., '▁Hund': -0.0..., '▁schläft': -0.0..., '.': -0.0...}
    """

    source: str
    n_best: tuple[Hypothesis, ...]  # best first
    segment_count: int = 1  # that a long text was split into
    missed_terms: tuple[TermPlacement, ...] = ()  # of the glossary, that it does not have at the aligned place
    quality: Quality | None = None  # measured by `TranslationPipeline`, if requested

    @cached_property
    def alignment(self) -> Alignment:
        """The word alignment by cross-attention; computed when it is first used, or by `alignment=True`."""
        return self._search_result.translator._align_texts([self._search_result])[0]

    @cached_property
    def scores(self) -> tuple[float, ...]:
        """The log-probability of each of the `tokens`, computed when first used; `log_prob` includes the end token."""
        return self._search_result.translator._score_tokens(self._search_result)

    @property
    def _search_result(self) -> SearchedText:
        searched = vars(self).get("_searched_text")
        if searched is None:
            raise TranslationError("a translation that was stored has no model for this; translate the source again")
        return searched

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_searched_text"}


class TextColumn(Protocol):
    """A pandas Series."""

    def isna(self) -> Any: ...


ColumnT = TypeVar("ColumnT", bound=TextColumn)


class TranslateKeywords(SearchKeywords, total=False):
    """The keyword arguments of `Translator.translate`, where they are explained."""

    to: str | None
    prefix: str | None
    require: Sequence[str]
    ban: Sequence[str]
    constraints: PhraseConstraints | Sequence[PhraseConstraints]
    glossary: Glossary | Mapping[str, str] | None
    alignment: bool
    mbr_candidates: int
    split_sentences: bool
    source_lang: str | None
    first_index: int
    should_stop: StopCheck | None


class TranslatorLocks:
    def __init__(self, translator: "Translator") -> None:
        self.device_lock = threading.RLock()  # other threads encode and decode text meanwhile
        self.engine_lock = threading.Lock()  # held while an engine is loaded
        self.notify_lock = threading.Lock()
        self.eval_mode = SharedContext(lambda: eval_mode(translator.model))


class Translator:
    """A model, or an ensemble, with its tokenizer, ready to translate.

    >>> translator = attent.Translator.load("runs/en-de")
    >>> print(translator("A dog sleeps."))
    Ein Hund schläft.

    `Translator.load` explains how to load it, `translate` the result and its options.
    """

    def __init__(
        self,
        model: Seq2Seq | Ensemble,
        tokenizer: Tokenizer,
        *,
        folder: Path | None = None,
        engine: EngineName | None = "torch",
        threads: int | None = None,
        batch_tokens: int | None = None,
        use_gpu_engine: bool = True,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """
        folder           the model folder, with the alignment heads; the conversion of a model without one is not cached
        engine           None: CTranslate2 on a CPU where it is installed and supports the request, else torch
        batch_tokens     padded source tokens x beams per batch; None: chosen for the device
        use_gpu_engine   the fused GPU engine and CUDA graphs; keeps some GPU memory for the next call
        notify           receives messages for the user, such as that another engine is used
        """
        loading.check_tokenizer_size(tokenizer.source.size, model.config.vocab, "the tokenizer of the source")
        loading.check_tokenizer_size(tokenizer.target.size, model.config.output_vocab, "the tokenizer of the target")
        if batch_tokens is not None and batch_tokens < 1:
            raise TranslationError(f"`batch_tokens` must be 1 or more, but is {batch_tokens}")
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.engine, self.threads, self.batch_tokens = engine, threads, batch_tokens
        self._original: Seq2Seq | None = None  # the model without its adapter, whose alignment heads are known
        self._use_gpu_engine = use_gpu_engine
        self._notified: set[str] = set()
        self._notify = notify
        self._locks = TranslatorLocks(self)

    def __repr__(self) -> str:
        name = "ensemble" if self.folder is None else repr(str(self.folder))
        return f"Translator({name}, {self.device}, engine={self.engine!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_locks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _locks=TranslatorLocks(self))

    @classmethod
    def load(
        cls,
        *folders: str | Path,
        src: str | None = None,
        tgt: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        engine: EngineName | None = None,
        threads: int | None = None,
        batch_tokens: int | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> Self:
        """Load the model of a folder, ours or Hugging Face's (Marian, T5, NLLB); several folders make an ensemble.

        >>> attent.Translator.load("runs/en-de", device="cpu", engine="torch").device
        device(type='cpu')

        src    source language, for a model of many languages such as NLLB; `tgt`: target language
        dtype  None: bfloat16 for the torch engine on an NVIDIA GPU that supports it, else float32
        """
        if not folders:
            raise TranslationError("there must be a model to translate with, but none is named; give its folder")
        if engine not in (None, *get_args(EngineName)):
            raise TranslationError(f"`engine` must be one of {', '.join(get_args(EngineName))}, but is {engine!r}")
        paths = [locate_model(folder) for folder in folders]
        for path in paths:
            loading.check_model_exists(path)
        if threads is not None:
            torch.set_num_threads(threads)
        models = [load_as(path, Seq2Seq) for path in paths]
        tokenizers = [loading.load_tokenizer(path, src, tgt) for path in paths]
        check_tokenizers(tokenizers, [str(path) for path in paths])
        placed, precision = loading.resolve_device_and_dtype(device, dtype)
        model = models[0] if len(models) == 1 else Ensemble(models)
        # Rounding errors of a recurrent state accumulate, and cuDNN's LSTM does not compute in bfloat16.
        is_recurrent = any(isinstance(each.decoder, LSTMDecoder) for each in models)
        default = "float32" if is_recurrent else choose_dtype(placed, engine)
        model = model.to(device=placed, dtype=precision or loading.DTYPES[default]).eval()
        return cls(
            model,
            tokenizers[0],
            folder=paths[0] if len(paths) == 1 else None,
            engine=engine,
            threads=threads,
            batch_tokens=batch_tokens,
            notify=notify,
        )

    def with_adapter(self, folder: str | Path) -> Self:
        """Return a translator, with the torch engine, that shares the weights of this one and applies a LoRA adapter.

        folder  from `attent train --keep-adapter`: that of the run, or of the adapter
        """
        if not isinstance(self.model, Seq2Seq):
            raise TranslationError("an adapter needs one model, but this is an ensemble; give one of them")
        model = self.model
        is_rounded = self.folder is not None and next(model.parameters()).dtype != torch.float32
        original = load_as(self.folder, Seq2Seq) if self.folder is not None and is_rounded else model
        names = ("folder", "engine", "threads", "batch_tokens")
        adapted = load_adapter(folder, model, original).eval()
        options = {name: getattr(self, name) for name in names}
        translator = type(self)(adapted, self.tokenizer, **options, notify=self._notify)
        translator._original = model
        return translator

    # --- public methods ------------------------------------------------------------------------------------------

    @overload
    def translate(  # type: ignore[overload-overlap]  # a string is a sequence of strings too
        self, text: str, options: SearchOptions | None = None, **keywords: Unpack[TranslateKeywords]
    ) -> Translation: ...

    @overload
    def translate(
        self, text: Sequence[str], options: SearchOptions | None = None, **keywords: Unpack[TranslateKeywords]
    ) -> list[Translation]: ...

    @overload
    def translate(
        self, text: ColumnT, options: SearchOptions | None = None, **keywords: Unpack[TranslateKeywords]
    ) -> ColumnT: ...

    @list_search_keywords
    def translate(
        self,
        text: str | Sequence[str] | TextColumn,
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        prefix: str | None = None,
        require: Sequence[str] = (),
        ban: Sequence[str] = (),
        constraints: PhraseConstraints | Sequence[PhraseConstraints] = NO_CONSTRAINTS,
        glossary: Glossary | Mapping[str, str] | None = None,
        alignment: bool = False,
        mbr_candidates: int = 0,
        split_sentences: bool = False,
        source_lang: str | None = None,
        first_index: int = 0,
        should_stop: StopCheck | None = None,
        **search: Unpack[SearchKeywords],
    ) -> Any:
        """Translate a text, or a list of texts in batches; `translator(...)` is the same.

        A string gives a `Translation`, a list gives a list, and a pandas Series gives a Series of texts with the same
        index, in which missing values stay missing. An empty text gives an empty translation.

        >>> translator("A dog sleeps.")
        Translation('Ein Hund schläft.', score=-0.0...)
        >>> translation = translator("A dog sleeps.", n_best=2)
        >>> [hypothesis.text for hypothesis in translation.n_best]
        ['Ein Hund schläft.', '...']
        >>> translation.alignment.pharaoh, translation.scores  # word pairs, log-probabilities of `translation.tokens`
        ('0-0 ... 2-2', (-0.0..., -0.0...))
        >>> [str(translation) for translation in translator(["A man sings.", "A dog sleeps."], beam_size=1)]
        ['Ein Mann singt.', 'Ein Hund schläft.']
        >>> print(translator("A dog sleeps.", prefix="Der"))
        Der Hund schläft.
        >>> translator(frame["en"])
        0      Ein Mann singt.
        1    Ein Hund schläft.
        Name: en, dtype: str

        options             search options as an object; keyword arguments change them
        to                  target language, for a multilingual model
        prefix              words that the translation starts with
        require             phrases that the translation has to contain
        ban                 phrases that it must not contain
        constraints         prefix, required and banned phrases as an object, for all texts or one for each
        glossary            terms of which one translation is required at the aligned place; `missed_terms` of the
                            result lists those that could not be placed
        alignment           align the words now, in batches, and not when `Translation.alignment` is used
        mbr_candidates      number of candidates (n-best or samples) to choose from by minimum Bayes risk
        split_sentences     split every text into sentences, not only long ones; `source_lang` is the source's language
        first_index         index of the first text in the whole input, on which sampling depends
        should_stop         polled during the search; True raises `SearchCancelled`
        """
        contexts, texts = self._split_contexts(list_texts(text))
        options = (options or SearchOptions()).change(**search)
        per_text = [constraints] * len(texts) if isinstance(constraints, PhraseConstraints) else constraints
        if len(per_text) != len(texts):
            raise TranslationError(
                f"`constraints` must be one for all or {len(texts)}, one per text, but are {len(per_text)}"
            )
        per_text = [each.extend(prefix, require, ban) for each in per_text]
        per_text = [NO_CONSTRAINTS if each == NO_CONSTRAINTS else each for each in per_text]
        terms = Glossary.from_terms(glossary) if isinstance(glossary, Mapping) else glossary
        groups, encoded = self._split_texts(texts, per_text, to, split_sentences, source_lang, first_index, contexts)
        segments = [segment for group in groups for segment in group]
        for distinct in {id(segment.constraints): segment.constraints for segment in segments}.values():
            check_constraints(distinct, options)
        new = [segment.source for segment in segments if segment.source not in encoded]
        encoded.update(zip(new, self.tokenizer.source.encode(new), strict=True))
        rows = self.tokenizer.add_source_tokens([encoded[segment.source] for segment in segments], to)
        with self._locks.eval_mode:
            results, missed = self._search_with_terms(
                segments, rows, options, mbr_candidates, should_stop, to, glossary=terms
            )
        n_best_lists, segment_rows, missed_terms = iter(results), iter(rows), iter(missed)
        hypotheses = [[next(n_best_lists) for _ in group] for group in groups]
        translations = [
            join_hypotheses(
                source,
                SearchedText(self, group, [next(segment_rows) for _ in group], n_best),
                options,
                tuple(term for _ in group for term in next(missed_terms)),
            )
            for source, group, n_best in zip(texts, groups, self._detokenize(hypotheses), strict=True)
        ]
        if alignment:
            aligned = self._align_texts([translation._search_result for translation in translations])
            for translation, word_alignment in zip(translations, aligned, strict=True):
                vars(translation)["alignment"] = word_alignment
        if isinstance(text, str):
            return translations[0]
        return fill_column(text, translations) if hasattr(text, "isna") else translations

    __call__ = translate

    @list_search_keywords
    def stream(
        self,
        text: str,
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        constraints: PhraseConstraints = NO_CONSTRAINTS,
        should_stop: StopCheck | None = None,
        **search: Unpack[SearchKeywords],
    ) -> Generator[str, None, None]:
        """Yield the translation in pieces, as soon as all beams agree on them. `translate` explains the arguments;
        `prevent_loops` has no effect, since the pieces are final.

        >>> "".join(translator.stream("A dog sleeps.", beam_size=2))
        'Ein Hund schläft.'
        """
        options = (options or SearchOptions()).change(**search)
        check_constraints(constraints, options)
        (segments,), _ = self._split_texts([text], [constraints], to)
        for segment in segments:
            yield from self._stream_segment(segment, options, to, should_stop)
            if segment.gap:
                yield segment.gap

    @list_search_keywords
    async def stream_async(
        self,
        text: str,
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        constraints: PhraseConstraints = NO_CONSTRAINTS,
        **search: Unpack[SearchKeywords],
    ) -> AsyncGenerator[str, None]:
        """Yield the pieces of `stream` while the search runs in a thread, which a cancelled task stops within a step.

        >>> async def collect_pieces():
        ...     return [piece async for piece in translator.stream_async("A dog sleeps.")]
        >>> "".join(asyncio.run(collect_pieces()))
        'Ein Hund schläft.'
        """
        cancelled = threading.Event()
        stream = self.stream(text, options, to=to, constraints=constraints, should_stop=cancelled.is_set, **search)
        with ThreadPoolExecutor(1) as thread:
            run = partial(asyncio.get_running_loop().run_in_executor, thread)
            try:
                while (piece := await run(next, stream, None)) is not None:
                    yield piece
            finally:
                cancelled.set()
                await run(stream.close)

    def _stream_segment(
        self, segment: Segment, options: SearchOptions, to: str | None, should_stop: StopCheck | None
    ) -> Iterator[str]:
        source_ids = self.tokenizer.encode_source([segment.source], to)[0]
        request = self._build_request(segment, source_ids, options, to)
        printed, is_finished = "", False
        with eval_mode(self.model):
            engine = self._build_torch_engine(should_stop)
            session = SearchSession(engine, [request], [0], engine.build_context(options, [request]))
            while not is_finished:
                engine.check_cancelled()
                session.step()
                finished = [hypotheses for _, hypotheses in session.collect_and_refill()]
                is_finished = bool(finished)
                if is_finished:
                    check_hypotheses(finished[0], segment, request, options)
                    token_ids: Sequence[int] = finished[0][0].token_ids
                else:
                    token_ids = commonprefix(session.list_candidates())  # noqa: RUF071 - of lists
                text = self.tokenizer.target.decode(token_ids)
                # An incomplete character may be completed by the next token.
                is_stable = text.startswith(printed) and not text.endswith("\ufffd")
                if len(text) > len(printed) and (is_stable or is_finished):
                    yield text[len(printed) :]
                    printed = text

    def stream_sentences(
        self,
        text: str,
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        constraints: PhraseConstraints = NO_CONSTRAINTS,
        glossary: Glossary | None = None,
        split_sentences: bool = True,
        source_lang: str | None = None,
        first_index: int = 0,
        should_stop: StopCheck | None = None,
    ) -> Iterator[str]:
        """Yield the translation sentence by sentence, with the whitespace between them.

        Joined, the pieces are the text of `translate` with the same arguments, which are explained there.

        >>> list(translator.stream_sentences("A man sings. A dog sleeps."))
        ['Ein Mann singt. ', 'Ein Hund schläft.']
        """
        options = options or SearchOptions()
        (segments,), _ = self._split_texts([text], [constraints], to, split_sentences, source_lang, first_index)
        for number, segment in enumerate(segments, 1):
            check_constraints(segment.constraints, options)
            rows = [self.tokenizer.encode_source([segment.source], to)[0]]
            with self._locks.eval_mode:
                (hypotheses,), _ = self._search_with_terms(
                    [segment], rows, options, 0, should_stop, to, glossary=glossary
                )
            (((best, *_),),) = self._detokenize([[hypotheses]])
            yield best.text + (segment.gap if number < len(segments) else "")

    def suggest_continuations(
        self,
        text: str,
        prefix: str | PhraseConstraints,
        count: int = 5,
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        should_stop: StopCheck | None = None,
    ) -> list[Translation]:
        """Return translations that start with a prefix: one for each of the most likely next tokens, best first.

        >>> print(translator.suggest_continuations("A dog sleeps.", "Ein Hund", count=3)[0])
        Ein Hund schläft.
        """
        options = replace(options or SearchOptions(), n_best=1)
        segment_text = self._clean_text(text)
        source_ids = self.tokenizer.encode_source([segment_text], to)[0]
        constraints = PhraseConstraints(prefix=prefix) if isinstance(prefix, str) else prefix
        check_constraints(constraints, options)
        request = self._build_request(Segment(segment_text, constraints), source_ids, options, to)
        with eval_mode(self.model):
            requests = [
                replace(request, prefix_ids=(*request.prefix_ids, token), prefix_ends_word=False)
                for token in self._get_next_tokens(request, count)
            ]
            results = dict(self._build_torch_engine(should_stop).search(requests, options))
        best = self._detokenize([[hypotheses[:1]] for hypotheses in results.values() if hypotheses])
        segments, rows = [Segment(segment_text, constraints)], [source_ids]
        translations = [join_hypotheses(text, SearchedText(self, segments, rows, n_best), options) for n_best in best]
        allowed = [item for item in translations if find_phrase(item.text, constraints.ban) is None]
        return sorted(allowed, key=lambda item: -item.score)

    def hold_device(self) -> AbstractContextManager[Any]:
        """Return a context in which no other thread runs the model, for example while its heads are masked."""
        return self._locks.device_lock

    # --- before the search ---------------------------------------------------------------------------------------

    @cached_property
    def language_identifier(self) -> LanguageIdentifier | None:
        """The languages that the model was trained on, learned from its training text; None if they are not stored."""
        content = None if self.folder is None else read_side_file(self.folder, LANGUAGES_FILE)
        return None if content is None else LanguageIdentifier.from_bytes(content)

    def describe_wrong_language(self, texts: Sequence[str]) -> str | None:
        """Describe source texts that look like a language, of the model or a common one, that it does not translate."""
        known = self.language_identifier
        mismatch = None if known is None else known.find_mismatch(texts, known.sources)
        if known is None or mismatch is None:
            return None
        sources, targets = ", ".join(known.sources), ", ".join(known.targets)
        advice = f"for a text in {mismatch.language}, use a model that translates from it"
        return f"{mismatch}, but {self.folder} translates from {sources} to {targets}; {advice}"

    @property
    def device(self) -> torch.device:
        return get_device(self.model)

    @property
    def _members(self) -> list[Seq2Seq]:
        return self.model.members if isinstance(self.model, Ensemble) else [self.model]

    @cached_property
    def _max_lengths(self) -> list[int | None]:
        """Source and target positions of the model, in an ensemble the smallest; None: unlimited."""
        sides = [model.encoder for model in self._members], [model.decoder for model in self._members]
        limits = ([stack.positions.max_length for stack in side] for side in sides)
        return [min((limit for limit in side if limit is not None), default=None) for side in limits]

    @cached_property
    def _raised_max_tokens(self) -> int:
        """`data.max_tokens` of the training run if it was raised above the default, else 0."""
        tokens = loading.read_data_settings(self.folder).get("max_tokens")
        return tokens if isinstance(tokens, int) and tokens > DEFAULT_MAX_TOKENS else 0

    def _count_special_tokens(self, to: str | None) -> int:
        """Return the tokens of a source besides its text: the end token, and its language or a tag if there is one."""
        return 1 + len(self.tokenizer.source_prefix) + (to is not None)

    def _split_texts(
        self,
        texts: Sequence[str],
        constraints: Sequence[PhraseConstraints],
        to: str | None,
        split_sentences: bool = False,
        source_lang: str | None = None,
        first_index: int = 0,
        contexts: Sequence[str] = (),
    ) -> tuple[list[list[Segment]], dict[str, list[int]]]:
        """Return the segments of each text, whole or split into sentences, and the ids of texts encoded on the way."""
        max_tokens = max(MAX_UNSPLIT_TOKENS, self._raised_max_tokens)
        max_tokens = min(max_tokens, self._max_lengths[0] or max_tokens) - self._count_special_tokens(to)
        cleaned = [self._clean_text(text) for text in texts]
        uncertain = [] if split_sentences else [text for text in cleaned if bound_token_count(text) > max_tokens]
        encoded = dict(zip(uncertain, self.tokenizer.source.encode(uncertain), strict=True))
        groups: list[list[Segment]] = []
        for index, (text, own) in enumerate(zip(cleaned, constraints, strict=True), first_index):
            is_short = not split_sentences and len(encoded.get(text, ())) <= max_tokens
            parts = [(text, "")] if is_short else self._split_text(text, own, max_tokens, source_lang)
            numbered = enumerate(parts if text else (), index * MAX_SEGMENTS)
            groups.append([Segment(part, own, rng_key, gap) for rng_key, (part, gap) in numbered])
        if self.context:
            groups = [list(self._add_contexts(group, before)) for group, before in zip_longest(groups, contexts)]
        return groups, encoded

    @cached_property
    def context(self) -> int:
        """The number of preceding sentences that the model was trained to use."""
        return loading.read_data_settings(self.folder).get("context", 1) if has_separator(self.tokenizer.source) else 0

    def _split_contexts(self, texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return the context of each text and the texts, of a model that was trained with context."""
        if not self.context:
            return (), texts
        parts = list(map(split_context, texts))
        return [context for context, _ in parts], [text for _, text in parts]

    def _add_contexts(self, segments: Sequence[Segment], context: str | None) -> Iterator[Segment]:
        """Yield the segments of a text with the sentences before them, except where the model would get too much."""
        before = list(filter(None, map(self._clean_text, (context or "").split(SEPARATOR))))
        window = ContextWindow(max(self.context, len(before)))
        window.append(*before)
        limit = min(DEFAULT_MAX_TOKENS, self._max_lengths[0] or DEFAULT_MAX_TOKENS)
        for segment in segments:
            extended = replace(segment, context=window.prefix)
            is_short = len(self.tokenizer.encode_source([extended.source])[0]) < limit  # a tag may be added
            yield extended if is_short else segment
            window.append(segment.text)

    def _split_text(
        self, text: str, constraints: PhraseConstraints, max_tokens: int, source_lang: str | None
    ) -> list[tuple[str, str]]:
        """Return sentences, or parts of long ones, each with the whitespace after it."""

        def count_tokens(texts: Sequence[str]) -> list[int]:
            return [len(row) for row in self.tokenizer.source.encode(texts)]

        parts = split_by_tokens(split_sentences(text, source_lang), count_tokens, max_tokens)
        if len(parts) > 1 and (constraints.prefix or constraints.require):
            raise TranslationError(
                f"a text with a prefix or required phrases must be one sentence of at most {max_tokens} tokens, but "
                f"has {len(parts)}: {text[:60]!r}; translate its sentences one by one"
            )
        return [(part.text, part.gap) for part in parts]

    def _clean_text(self, text: str) -> str:
        """Replace spaces that the model does not know, and remove unknown invisible characters."""
        pattern, replacements = self._unknown_chars
        return (text.translate(replacements) if pattern.search(text) else text).strip()

    @cached_property
    def _unknown_chars(self) -> tuple[re.Pattern[str], dict[int, str | None]]:
        """Spaces and invisible characters without a token, as a pattern (faster than `translate`) and as a table."""
        source = self.tokenizer.source
        chars = [*UNICODE_SPACES, *INVISIBLE_CHARS]
        rows = source.encode([f"a{char}a" for char in chars])
        ignored = source.encode(["aa"])[0]
        unknown = [
            char
            for char, row in zip(chars, rows, strict=True)
            if row == ignored or source.unknown in row or any(map(BYTE_TOKEN.fullmatch, source.to_pieces(row)))
        ]
        table = {ord(char): " " if char in UNICODE_SPACES else None for char in unknown}
        return re.compile(f"[{''.join(unknown)}]" if unknown else "(?!)"), table

    def _build_request(
        self,
        segment: Segment,
        source_ids: Sequence[int],
        options: SearchOptions,
        to: str | None,
        forbid_loops: bool = False,
    ) -> SearchRequest:
        """Loops stay allowed where the source has some, and with constraints, which may need them."""
        first_ids = self.tokenizer.target_prefix
        max_length = options.compute_max_length(len(source_ids) - self._count_special_tokens(to)) + len(first_ids)
        max_length = min(max_length, self._max_lengths[1] or max_length)
        constraints, key = segment.constraints, segment.rng_key
        if constraints is NO_CONSTRAINTS:
            forbid_loops = forbid_loops and not has_loop(source_ids)
            return SearchRequest(
                source_ids=source_ids,
                prefix_ids=first_ids,
                rng_key=key,
                max_length=max_length,
                forbid_loops=forbid_loops,
            )
        phrases = [constraints.prefix.strip(), *constraints.require]
        prefix, *required = self.tokenizer.target.encode(phrases) if any(phrases) else [[] for _ in phrases]
        return SearchRequest(
            source_ids=source_ids,
            prefix_ids=(*first_ids, *prefix),
            required_phrases=tuple(tuple(self._drop_leading_space(token_ids)) for token_ids in required),
            banned_phrases=constraints.ban,
            prefix_ends_word=constraints.prefix_ends_word,
            rng_key=key,
            max_length=max_length,
        )

    def _drop_leading_space(self, token_ids: list[int]) -> list[int]:
        """Drop a separate space token before scripts without spaces and before punctuation, such as a placeholder's."""
        target = self.tokenizer.target
        if len(token_ids) < 2 or target.to_pieces(token_ids[:1]) != [SPACE]:
            return token_ids
        first = target.decode(token_ids).strip()[:1]
        needs_space = first.isalnum() and not compile_letter_pattern(UNSPACED_SCRIPTS).match(first)
        return token_ids if needs_space else token_ids[1:]

    # --- the search ----------------------------------------------------------------------------------------------

    def _search_with_terms(
        self,
        segments: Sequence[Segment],
        rows: Sequence[Sequence[int]],
        options: SearchOptions,
        mbr_candidates: int,
        should_stop: StopCheck | None,
        to: str | None,
        *,
        glossary: Glossary | None,
    ) -> tuple[list[list[Hypothesis]], Sequence[tuple[TermPlacement, ...]]]:
        """Return the hypotheses of each segment, and the terms of the glossary that the best one has not in place."""
        matches = [glossary.find_terms(segment.text) if glossary else [] for segment in segments]
        if any(matches):
            check_can_require(options)
        search = partial(self._search_segments, should_stop=should_stop, to=to)
        free = search(segments, rows, options, mbr_candidates)
        if not any(matches):
            return free, [()] * len(segments)
        n_best_options = replace(options, n_best=options.beam_size)

        def search_phrases(attempts: Sequence[tuple[int, Phrases]]) -> list[list[Hypothesis]]:
            """Search all attempts at once; if one is impossible, in halves, to find it."""
            required = [
                replace(segments[i], constraints=segments[i].constraints.extend(require=phrases))
                for i, phrases in attempts
            ]
            try:
                return search(required, [rows[i] for i, _ in attempts], n_best_options, 0)
            except AttentError:
                middle = len(attempts) // 2
                return [*search_phrases(attempts[:middle]), *search_phrases(attempts[middle:])] if middle else [[]]

        def align(pairs: Sequence[tuple[int, Hypothesis]]) -> list[tuple[str, Alignment | None]]:
            texts = self.tokenizer.target.decode_batch([hypothesis.token_ids for _, hypothesis in pairs])
            searched = [SearchedText(self, [segments[i]], [rows[i]], [[hypothesis]]) for i, hypothesis in pairs]
            with suppress(AlignmentError):  # a model without cross-attention: the terms may stand anywhere
                return list(zip(texts, self._align_texts(searched), strict=True))
            return [(text, None) for text in texts]

        def compute_penalty(term: TermPlacement) -> float:
            """Return the cost of an arbitrary token, and of those of a form that is missing. A term that stays as it
            is, such as a placeholder, must not be missing."""
            forms = () if term.is_elsewhere else term.match.forms
            if term.match.entry.term in forms:
                return term.match.entry.max_cost
            count = max(map(len, self.tokenizer.target.encode(forms)), default=0)
            cost = math.log(self.model.config.output_vocab / ARBITRARY_SHARE) * (1 + count)
            return min(cost, term.match.entry.max_cost)

        results, missed = translate_terms(
            matches, free, compute_penalty=compute_penalty, search=search_phrases, align=align
        )
        return [n_best[: options.n_best] for n_best in results], missed

    def _search_segments(
        self,
        segments: Sequence[Segment],
        rows: Sequence[Sequence[int]],
        options: SearchOptions,
        mbr_candidates: int,
        should_stop: StopCheck | None,
        to: str | None,
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each segment. Equal segments are searched once, unless tokens are sampled."""
        widened = options
        if mbr_candidates:
            n_best, beam_size = options.n_best, max(options.beam_size, mbr_candidates)
            if mbr_candidates < n_best:
                raise TranslationError(f"`mbr_candidates` must be at least `n_best`={n_best}, but is {mbr_candidates}")
            widened = replace(
                options, n_best=mbr_candidates, beam_size=options.beam_size if options.sampling else beam_size
            )
        keys: Sequence[object] = segments
        if options.sampling:
            keys = range(len(segments))
        elif all(segment.constraints is segments[0].constraints for segment in segments):
            keys = [segment.source for segment in segments]  # compared faster
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        forbid_loops = options.prevent_loops and options.sampling is None and self._forbids_loops_in_first_search
        requests = {
            key: self._build_request(segments[i], rows[i], widened, to, forbid_loops) for key, i in first.items()
        }
        results = dict(zip(requests, self._run_engines(list(requests.values()), widened, should_stop), strict=True))
        for key, hypotheses in results.items():
            check_hypotheses(hypotheses, segments[first[key]], requests[key], options)
        if options.prevent_loops:
            results |= self._search_without_loops(requests, results, widened, should_stop)
        if mbr_candidates:
            results = {key: self._rank_by_mbr(hypotheses, options) for key, hypotheses in results.items()}
        return [results[key] for key in keys]

    def _search_without_loops(
        self,
        requests: dict[object, SearchRequest],
        found: dict[object, list[Hypothesis]],
        options: SearchOptions,
        should_stop: StopCheck | None,
    ) -> dict[object, list[Hypothesis]]:
        """Search again where the best hypothesis has a loop that the source has not."""
        keys = [
            key
            for key, hypotheses in found.items()
            if not requests[key].forbid_loops
            and has_loop(hypotheses[0].token_ids)
            and not has_loop(requests[key].source_ids)
        ]
        if not keys:
            return {}
        without_loops = [replace(requests[key], forbid_loops=True) for key in keys]
        again = self._build_torch_engine(should_stop).search(without_loops, options)
        return {keys[i]: hypotheses for i, hypotheses in again if hypotheses}  # a required phrase may need a loop

    @property
    def _forbids_loops_in_first_search(self) -> bool:
        """True if loops are forbidden in the first search: free in the GPU engine, where searching again is costly."""
        return self.device.type != "cpu" and self.engine != "ctranslate2" and isinstance(self.model, Seq2Seq)

    def search(
        self, requests: Sequence[SearchRequest], options: SearchOptions, should_stop: StopCheck | None = None
    ) -> list[list[Hypothesis]]:
        """Search tokenized sources; the hypotheses have no text."""
        with self._locks.eval_mode:
            return self._run_engines(requests, options, should_stop)

    def search_batch(
        self, batch: RequestBatch, options: SearchOptions, should_stop: StopCheck | None = None
    ) -> HypothesisBatch | Unavailable:
        """Search a batch of unconstrained requests with the fused GPU engine."""
        with self._locks.eval_mode:
            return self._build_torch_engine(should_stop).search_batch(batch, options)

    def _run_engines(
        self, requests: Sequence[SearchRequest], options: SearchOptions, should_stop: StopCheck | None
    ) -> list[list[Hypothesis]]:
        results: list[list[Hypothesis]] = [[] for _ in requests]
        for engine, indices in self._assign_engines(requests, options, should_stop):
            for i, hypotheses in engine.search([requests[index] for index in indices], options):
                results[indices[i]] = hypotheses
                if should_stop is not None and should_stop():
                    raise SearchCancelled
        return results

    def _assign_engines(
        self, requests: Sequence[SearchRequest], options: SearchOptions, should_stop: StopCheck | None
    ) -> Iterator[tuple[TorchEngine[Any] | CTranslate2Engine, list[int]]]:
        """Yield engines with the indices of their requests: CTranslate2 takes all that it supports."""
        with self._locks.engine_lock:
            ctranslate2 = self._ctranslate2_engine
        rest = list(range(len(requests)))
        if ctranslate2 is not None and requests:
            reasons = {index: ctranslate2.find_unsupported_reason(options, [requests[index]]) for index in rest}
            supported = [index for index, reason in reasons.items() if reason is None]
            rest = [index for index, reason in reasons.items() if reason is not None]
            if supported:
                yield ctranslate2, supported
            for reason in dict.fromkeys(reasons[index] for index in rest):
                self._notify_once(f"CTranslate2 {reason}: using the torch engine, which is slower")
        with_phrases = [index for index in rest if requests[index].required_phrases]
        for indices in (with_phrases, [index for index in rest if not requests[index].required_phrases]):
            if indices:
                yield self._build_torch_engine(should_stop), indices

    def _build_torch_engine(self, should_stop: StopCheck | None = None) -> TorchEngine[Any]:
        config = self.model.config
        return TorchEngine[Any](
            model=self.model,
            start_id=config.start_id,
            end_id=config.end_id,
            suppressed_tokens=tuple(find_suppressed_tokens(config, self.tokenizer)),
            num_given=len(self.tokenizer.target_prefix),
            pad=self.tokenizer.source.pad,
            device=self.device,
            choose_batch_size=self._compute_batch_size,
            build_constraints=partial(build_constraints, vocabulary=self._target_vocabulary),
            should_stop=should_stop,
            use_gpu_engine=self._use_gpu_engine,
            notify=self._notify_once,
            device_lock=self._locks.device_lock,
        )

    @cached_property
    def _target_vocabulary(self) -> TargetVocabulary:
        return TargetVocabulary(
            self.tokenizer.target, self.model.config.output_vocab, [self.model.config.end_id], self.device
        )

    @cached_property
    def _ctranslate2_engine(self) -> CTranslate2Engine | None:
        """CTranslate2 if it is to be used; failing to load it is an error only if it was requested by name."""
        is_transformer = all(isinstance(model.decoder, Stack) for model in self._members)
        if self.engine == "torch" or (self.engine is None and (self.device.type != "cpu" or not is_transformer)):
            return None
        try:
            if isinstance(self.model, Ensemble):
                raise TranslationError("CTranslate2 does not support ensembles")
            if has_adapter(self.model):
                raise TranslationError("CTranslate2 does not support adapters")
            use_cache = self.folder is not None
            return CTranslate2Engine(self.model, self.tokenizer, use_cache=use_cache, threads=self.threads)
        except (ValueError, ImportError) as error:
            if self.engine is not None:
                raise
            self._notify_once(f"{error}; using the torch engine, which is slower")
            return None

    @contextmanager
    def use_torch_engine(self) -> Iterator[None]:
        """Translate with the model's own weights inside the `with` block, which CTranslate2 has converted before."""
        state, name = vars(self), "_ctranslate2_engine"
        loaded = {name: state[name]} if name in state else {}
        state[name] = None
        try:
            yield
        finally:
            del state[name]
            state |= loaded

    def _compute_batch_size(self, source: int, target: int, beams: int) -> int:
        if self.batch_tokens is not None:
            return max(1, self.batch_tokens // (source * beams))
        config = self.model.config
        key_bytes_per_token = (
            config.decoder.width * config.decoder.layers * next(self.model.parameters()).element_size()
        )
        key_bytes_per_token *= len(self._members)
        row_bytes = 16 * config.output_vocab + 4 * key_bytes_per_token * (source + target)  # logits and KV cache
        return max(1, loading.compute_max_rows(row_bytes, self.device, CPU_MAX_ROWS, MAX_ROWS) // beams)

    def _notify_once(self, message: str) -> None:
        with self._locks.notify_lock:
            if self._notify is not None and message not in self._notified:
                self._notify(message)
            self._notified.add(message)

    # --- after the search ----------------------------------------------------------------------------------------

    def _rank_by_mbr(self, hypotheses: list[Hypothesis], options: SearchOptions) -> list[Hypothesis]:
        texts = [self.tokenizer.target.decode(hypothesis.token_ids) for hypothesis in hypotheses]
        log_probs = [hypothesis.log_prob for hypothesis in hypotheses]
        expected = compute_expected_chrf(texts, None if options.sampling else normalize_log_probs(log_probs))
        order = sorted(range(len(hypotheses)), key=lambda index: -float(expected[index]))
        return [hypotheses[index] for index in order[: options.n_best]]

    def _detokenize(self, groups: Sequence[Sequence[Sequence[Hypothesis]]]) -> list[list[list[Hypothesis]]]:
        """Return the hypotheses of each segment of each text with their text and tokens."""
        target = self.tokenizer.target
        rows = [hypothesis.token_ids for group in groups for n_best in group for hypothesis in n_best]
        texts = iter(target.decode_batch(rows))

        def add_text(hypothesis: Hypothesis) -> Hypothesis:  # `replace` would take twice the time
            return Hypothesis(
                token_ids=hypothesis.token_ids,
                log_prob=hypothesis.log_prob,
                score=hypothesis.score,
                is_finished=hypothesis.is_finished,
                text=next(texts).strip(),
                tokens=tuple(target.to_pieces(hypothesis.token_ids)),
            )

        return [[[add_text(hypothesis) for hypothesis in n_best] for n_best in group] for group in groups]

    def _align_texts(self, texts: Sequence[SearchedText]) -> list[Alignment]:
        """Align the words of each text by the cross-attention over its best hypotheses."""
        model = self._members[0]
        selection = load_selection(self.folder, self._original or model)
        segments = [segment for text in texts for segment in text.segments]
        sources = [segment.source for segment in segments]
        best = [n_best[0].token_ids for text in texts for n_best in text.hypotheses]
        pairs = [
            EncodedPair(source=list(row), target=[*token_ids, self.model.config.end_id], truncated=False)
            for row, token_ids in zip((row for text in texts for row in text.rows), best, strict=True)
        ]
        targets = [self.tokenizer.target.decode(token_ids) for token_ids in best]
        with self._locks.eval_mode, self._locks.device_lock:
            alignments = align_rows(model, self.tokenizer, sources, targets, pairs, selection)
        if sum(len(each.unreliable_links) - len(each.links) for each in alignments) > 0:
            self._notify_once(
                f"more than half of the words have no reliable alignment and stay unaligned: the attention "
                f"({selection}) is almost even; train longer, or select other heads with attent score --alignment"
            )
        parts = (
            (alignment.drop_context(len(segment.context.split())), len(segment.text.split()))
            for alignment, segment in zip(alignments, segments, strict=True)
        )
        return [concatenate_alignments([next(parts) for _ in text.segments]) for text in texts]

    def _score_tokens(self, text: SearchedText) -> tuple[float, ...]:
        """Return the log-probability of each token of the best hypotheses, by forced decoding."""
        scores: list[float] = []
        with self._locks.eval_mode, self._locks.device_lock:
            for row, n_best in zip(text.rows, text.hypotheses, strict=True):
                token_ids = n_best[0].token_ids
                logits = self._compute_logits(SearchRequest(source_ids=row, prefix_ids=token_ids))[:-1]
                chosen = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
                scores += logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()
        return tuple(scores)

    # --- step by step --------------------------------------------------------------------------------------------

    def _compute_logits(self, request: SearchRequest) -> Tensor:
        """Return the logits of the first target token and of each after one of the prefix, (1 + prefix tokens, V)."""
        engine = self._build_torch_engine(None)
        source, lengths = engine.pad_sources([request])
        state = engine.model.init_decoder_state(source, lengths, capacity=len(request.prefix_ids) + 1)
        prefix = torch.tensor([[engine.start_id, *request.prefix_ids]], device=self.device)
        logits = engine.model.step(prefix, state)[0].float()
        suppressed = make_suppressed_tensor(engine.start_id, engine.end_id, engine.suppressed_tokens, self.device)
        return logits.index_fill(1, suppressed, NEG_INF)

    def _get_next_tokens(self, request: SearchRequest, count: int) -> list[int]:
        """Return the most likely tokens after the prefix, except the end token."""
        logits = self._compute_logits(request)[-1]
        logits[self.model.config.end_id] = NEG_INF
        if request.prefix_ends_word:
            logits = logits.masked_fill(self._target_vocabulary.word_continuations, NEG_INF)
        top = logits.topk(min(count, len(logits)))
        pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        return [token for value, token in pairs if value > NEG_INF]


def translate_texts(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    to: str | None = None,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    should_stop: StopCheck | None = None,
) -> list[str]:
    """Return the best translation of each text by a model in memory, such as one in training."""
    options = SearchOptions(beam_size=beam_size, length_penalty=length_penalty, max_length=max_length)
    translator = Translator(model, tokenizer, batch_tokens=batch_tokens)
    try:
        return [item.text for item in translator.translate(texts, options, to=to, should_stop=should_stop)]
    finally:
        drop_cached_searches(model)  # training needs the memory


# --- loading -------------------------------------------------------------------------------------------------------


def choose_dtype(device: torch.device, engine: str | None = None) -> str:
    """Return bfloat16 on an NVIDIA GPU that supports it: half the bytes, many times the speed, three digits.

    CTranslate2 has formats of its own and converts the stored weights.
    """
    if engine == "ctranslate2" or device.type != "cuda" or torch.version.hip is not None:
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"


# --- texts and options ---------------------------------------------------------------------------------------------


def list_texts(text: str | Sequence[str] | TextColumn) -> list[str]:
    """Return the texts of a string, a list or a column, without missing values."""
    column: Any = text
    if not isinstance(text, Iterable):
        raise InputError(f"`text` must be a string, strings or a column, but is of type {type(text).__name__}")
    texts = [text] if isinstance(text, str) else list(column[~column.isna()] if hasattr(column, "isna") else column)
    check_list_of_strings(texts)
    return texts


def fill_column(column: Any, translations: Sequence[Translation]) -> Any:
    """Return a column with the texts of the translations; missing values stay."""
    texts = iter(translations)
    cells = zip(column, column.isna(), strict=True)
    values = [cell if is_missing else next(texts).text for cell, is_missing in cells]
    return type(column)(values, index=column.index, name=column.name)


def check_list_of_strings(texts: Sequence[str], name: str = "texts") -> None:
    if isinstance(texts, str):
        raise InputError(f"`{name}` must be a list of strings, but is one: {texts[:60]!r}; put it in [ ]")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise InputError(f"`{name}` must be strings, but one is of type {type(wrong[0]).__name__}; leave it out")


def bound_token_count(text: str) -> int:
    """Return an upper bound: at most four bytes per character, one byte per token; ASCII gets a leading space."""
    return len(text) + 1 if text.isascii() else 4 * len(text)


def check_hypotheses(
    hypotheses: Sequence[Hypothesis], segment: Segment, request: SearchRequest, options: SearchOptions
) -> None:
    if not hypotheses:
        n = options.no_repeat_ngram_size
        raise TranslationError(
            f"no translation of {segment.text[:60]!r} within {request.max_length} tokens has all required and no "
            f"banned phrases{f' without repeating {n} tokens (`no_repeat_ngram_size`)' if n else ''}; relax them, or "
            f"raise `max_length`"
        )


def check_can_require(options: SearchOptions) -> None:
    """Raise a TranslationError if a search with these options cannot require phrases."""
    if options.sampling is not None or options.beam_groups > 1:
        raise TranslationError(
            "required phrases and glossary terms need plain beam search; leave out sampling and beam groups"
        )


def check_constraints(constraints: PhraseConstraints, options: SearchOptions) -> None:
    if constraints.require:
        check_can_require(options)
    for phrase in constraints.require:
        if not phrase.strip():
            raise TranslationError("a required phrase must be a word, but is empty; leave it out")
        if banned := find_phrase(phrase, constraints.ban):
            raise TranslationError(f"`{phrase}` is required, but contains the banned `{banned}`; leave one out")
    if banned := find_phrase(constraints.prefix, constraints.ban, is_partial=constraints.prefix_is_partial):
        raise TranslationError(
            f"the prefix `{constraints.prefix.strip()}` contains the banned `{banned}`; leave one out"
        )


# --- results -------------------------------------------------------------------------------------------------------


def join_hypotheses(
    text: str, searched: SearchedText, options: SearchOptions, missed_terms: tuple[TermPlacement, ...] = ()
) -> Translation:
    """Return the translation of a text from the n-best lists of its segments."""
    segments, n_best = searched.segments, searched.hypotheses[0] if searched.hypotheses else []
    if len(segments) != 1:
        best = [hypotheses[0] for hypotheses in searched.hypotheses]
        log_prob = sum(hypothesis.log_prob for hypothesis in best)
        length = sum(len(hypothesis.tokens) + hypothesis.is_finished for hypothesis in best)
        joined = "".join(item.text + segment.gap for item, segment in zip(best, segments, strict=True))
        whole = Hypothesis(
            token_ids=tuple(token for hypothesis in best for token in hypothesis.token_ids),
            log_prob=log_prob,
            score=log_prob / options.compute_score_divisor(length),
            is_finished=all(hypothesis.is_finished for hypothesis in best),
            text=joined.strip(),
            tokens=tuple(token for hypothesis in best for token in hypothesis.tokens),
        )
        n_best = [whole]
    translation = Translation(
        **vars(n_best[0]), source=text, n_best=tuple(n_best), segment_count=len(segments), missed_terms=missed_terms
    )
    vars(translation)["_searched_text"] = searched  # not a field: `asdict` would copy the model
    return translation
