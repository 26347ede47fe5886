"""Text in, text out: sentences to ids, ids through an engine, ids to text, in the order in which they came.

    translator = Translator.load("runs/en-de")
    translator.translate(["A man rides a bike."])[0].text

The search is `search`'s, batches are `engine`'s, what CTranslate2 does is `quick`'s. Here is what a text needs before
and after: long ones are cut into sentences and joined again, words that are demanded become tokens, nothing may run in
circles, and of many candidates the one is taken that the others agree with.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from attent import settings
from attent.decoding import mbr
from attent.decoding.alignment import Alignment, align_rows, get_default_selection, load_selection
from attent.decoding.constraints.base import has_loop
from attent.decoding.constraints.builder import NO_CONSTRAINTS, ConstraintBuilder, Constraints
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, Unavailable
from attent.decoding.engines.reference import SearchCancelled, SearchSession, TorchEngine
from attent.decoding.ensemble import Ensemble, check_tokenizers
from attent.decoding.forced_decoding import EncodedPair, SharedContext, eval_mode
from attent.decoding.glossary import Glossary
from attent.decoding.options import Hypothesis, SearchEngine, SearchOptions, SearchRequest
from attent.decoding.search import NEG_INF, SearchContext, StepModel, make_suppressed_tensor
from attent.decoding.token_bytes import BYTE_TOKEN
from attent.interop import load_as
from attent.interop.ctranslate2 import find_suppressed_tokens
from attent.models import Seq2Seq
from attent.models.folder import read_extra_files
from attent.storage.manifest import MANIFEST_FILE
from attent.text.scripts import UNSPACED_SCRIPTS, compile_letter_pattern
from attent.text.sentence_splitter import SentencePart, join_parts, split_by_tokens, split_sentences
from attent.text.subword_sampling import SPACE
from attent.text.tokenizer import Tokenizer, Vocabulary, add_end_and_tag

EngineName = Literal["torch", "ctranslate2"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNICODE_SPACES = "\t\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
INVISIBLE_CHARS = "\u00ad\u200b\u2060\ufeff"  # soft hyphen, zero-width space, word joiner, byte order mark
MAX_SEGMENTS = 2**20  # of a text
MAX_UNSPLIT_TOKENS = (
    200  # tokens of a text beyond which it is cut into sentences: hardly any model has seen longer ones
)
DEFAULT_MAX_TOKENS = (
    256  # of the longest text to train on, where nobody said another number; a model with more was meant for it
)
# Beams searched for at once: on a CPU more are no faster; on an accelerator, if half of its free memory holds them.
CPU_MAX_ROWS, CPU_MAX_BYTES = 128, 2**30
MAX_ROWS, FREE_MEMORY_FRACTION, DEFAULT_FREE_BYTES = 4_096, 0.5, 4 * 2**30


class TranslationError(ValueError):
    """What cannot be translated as it was asked for, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A text that a search has found."""

    text: str
    score: float  # with the length penalty: `Search.formula`
    log_prob: float  # the sum of the model's log-probabilities, that of the end included
    tokens: tuple[str, ...]
    is_finished: bool  # False: cut at the length limit


@dataclass(frozen=True, kw_only=True)
class Translation(Candidate):
    """The best candidate of a source, and what else was found."""

    source: str
    n_best: tuple[Candidate, ...]  # all that were asked for, the best first
    alignment: Alignment | None = None
    segment_count: int = 1  # that a long text was cut into


@dataclass(frozen=True)
class Segment:
    """A text or a part of one, as it is searched for."""

    text: str
    constraints: Constraints
    rng_key: int = field(default=0, compare=False)  # what chance depends on: its place among all


class TranslatorLocks:
    """What threads that share a translator hold."""

    def __init__(self, translator: Translator) -> None:
        self.device_lock = threading.RLock()  # to have the device: others get ready meanwhile, or read and write texts
        self.engine_lock = threading.Lock()  # to open an engine
        self.notify_lock = threading.Lock()
        self.eval_mode = SharedContext(lambda: eval_mode(translator.model))


class Translator:
    """A model, or several that write together, with their tokenizer, ready to translate."""

    def __init__(
        self,
        model: Seq2Seq | Ensemble,
        tokenizer: Tokenizer,
        *,
        folder: Path | None = None,
        engine: EngineName | None = "torch",
        threads: int | None = None,
        batch_tokens: int | None = None,
        use_cuda_graphs: bool = True,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """
        folder        where the model comes from: what was made of it is kept there
        engine        None: CTranslate2 on a CPU, where it is installed and can do what is asked; else our own
        batch_tokens  source tokens, filled up and times the beams, searched for at once; None: what suits the device
        record        let an NVIDIA GPU repeat steps by itself, which is many times as quick; it then keeps some of its
                      memory for the next call
        say           is told what a person may want to know, such as that another engine had to be taken
        """
        check_tokenizer(model, tokenizer)
        if batch_tokens is not None and batch_tokens < 1:
            raise TranslationError(f"`batch_tokens` must be 1 or more, but is {batch_tokens}")
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.step_model: StepModel[Any] = model
        self.engine, self.threads, self.batch_tokens = engine, threads, batch_tokens
        self.use_cuda_graphs = use_cuda_graphs
        self.notified: set[str] = set()
        self._notify = notify
        self._locks = TranslatorLocks(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_locks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _locks=TranslatorLocks(self))

    @classmethod
    def load(
        cls,
        *folders: str | Path,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        engine: EngineName | None = None,
        threads: int | None = None,
        batch_tokens: int | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> Translator:
        """The translator of a folder, ours or a Hugging Face Marian or T5 one; of several folders, an ensemble.

        `dtype` None: bfloat16 for our own engine on an NVIDIA GPU that computes in it, else float32.
        """
        if not folders:
            raise TranslationError("there must be a model to translate with, but none is named; give its folder")
        if engine not in (None, *get_args(EngineName)):
            raise TranslationError(f"`engine` must be one of {', '.join(get_args(EngineName))}, but is {engine!r}")
        paths = [Path(folder).expanduser() for folder in folders]
        models = [load_as(path, Seq2Seq) for path in paths]
        tokenizers = [load_tokenizer(path) for path in paths]
        check_tokenizers(tokenizers, [str(path) for path in paths])
        where = choose_device() if device is None else torch.device(device)
        if dtype is None:  # CTranslate2 has formats of its own, and is made from the weights as they are
            dtype = "float32" if engine == "ctranslate2" else choose_dtype(where)
        if dtype not in DTYPES:
            raise TranslationError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype!r}")
        model = models[0] if len(models) == 1 else Ensemble(models)
        model = model.to(device=where, dtype=DTYPES[dtype]).eval()
        home = paths[0] if len(paths) == 1 else None
        return cls(
            model, tokenizers[0], folder=home, engine=engine, threads=threads, batch_tokens=batch_tokens, notify=notify
        )

    # --- what people call ----------------------------------------------------------------------------------------

    def translate(
        self,
        texts: Sequence[str],
        options: SearchOptions | None = None,
        *,
        beam_size: int | None = None,
        n_best: int | None = None,
        to: str | None = None,
        constraints: Constraints | Sequence[Constraints] = NO_CONSTRAINTS,
        glossary: Glossary | Mapping[str, str] | None = None,
        alignment: bool = False,
        mbr_candidates: int = 0,
        split_sentences: bool = False,
        source_lang: str | None = None,
        prevent_loops: bool = True,
        first_index: int = 0,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Translation]:
        """The best translation of each text; of a text that is nothing but space, nothing.

        search     how to look for it; `beam_size` and `n_best` alone can be given as they are
        to         the language to translate into, for a model that was trained with tags
        control    what must and must not come, for all texts or for each
        glossary   terms whose translation must come wherever they do
        alignment  tell which word comes from which
        risk       of so many candidates (the n best, or samples) take the one most like the others: minimum Bayes risk
        sentences  cut every text into sentences, not only those that are very long; `language` is that of the source
        guard      let no translation run in circles, unless its source does
        first      the place of the first text among all that there are, where they come in parts: chance depends on it
        stop       asked again and again; if it answers True, `Stopped` is raised
        """
        check_texts(texts)
        options = override_options(options or SearchOptions(), beam_size, n_best)
        controls = broadcast_constraints(constraints, len(texts))
        pieces, read = self._split_texts(texts, controls, to, split_sentences, source_lang)
        units = build_segments(
            pieces, controls, Glossary.from_terms(glossary) if isinstance(glossary, Mapping) else glossary, first_index
        )
        for wishes in {id(unit.constraints): unit.constraints for unit in units}.values():
            check_constraints(wishes, options)
        rows = self._encode_sources([unit.text for unit in units], to, read)
        with self._locks.eval_mode:
            found = iter(
                self._search_segments(
                    units, rows, options, mbr_candidates, prevent_loops, should_stop, count_special_tokens(to)
                )
            )
            groups = [[next(found) for _ in some] for some in pieces]
            links = self._align_segments(units, rows, groups) if alignment else [None] * len(texts)
        written = self._detokenize(groups)
        return [
            self._join_segments(text, some, group, options, link)
            for text, some, group, link in zip(texts, pieces, written, links, strict=True)
        ]

    def stream(
        self,
        text: str,
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        constraints: Constraints = NO_CONSTRAINTS,
    ) -> Iterator[str]:
        """The translation piece by piece, as soon as it is certain: what all beams agree on."""
        options = options or SearchOptions()
        check_constraints(constraints, options)
        (pieces,), _ = self._split_texts([text], [constraints], to, False, None)
        for piece in pieces:
            yield from self._stream_segment(Segment(piece.text, constraints), options, to)
            if piece.gap:
                yield piece.gap

    def _stream_segment(self, segment: Segment, options: SearchOptions, to: str | None) -> Iterator[str]:
        job = self._build_request(
            segment, self.tokenizer.encode_source([segment.text], to)[0], options, count_special_tokens(to)
        )
        given = certain = ""
        with eval_mode(self.model):
            for ids in self._iterate_stable_prefixes(segment, job, options):
                certain = self.tokenizer.target.decode(ids)
                # What is half a character now may be a whole one soon.
                if len(certain) > len(given) and certain.startswith(given) and not certain.endswith("\ufffd"):
                    yield certain[len(given) :]
                    given = certain
        if len(certain) > len(given):
            yield certain[len(given) :]

    def suggest_continuations(
        self,
        text: str,
        prefix: str | Constraints,
        count: int = 5,
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
    ) -> list[Translation]:
        """How else it could go on behind a beginning: the likeliest next tokens, each with the best end."""
        options = replace(options or SearchOptions(), n_best=1)
        row = self.tokenizer.encode_source([text.strip()], to)[0]
        control = Constraints(prefix=prefix) if isinstance(prefix, str) else prefix
        check_constraints(control, options)
        job = self._build_request(Segment(text.strip(), control), row, options, count_special_tokens(to))
        with eval_mode(self.model):
            tokens = self._get_next_tokens(job, count)
            jobs = [replace(job, prefix_ids=(*job.prefix_ids, token), prefix_ends_word=False) for token in tokens]
            found = dict(self.build_torch_engine(None).search(jobs, options))
        made = [
            build_translation(some, text, 1)
            for (some,) in self._detokenize([[some[:1]] for some in found.values() if some])
        ]
        kept = [one for one in made if not any(has_word(one.text, word) for word in control.banned)]
        return sorted(kept, key=lambda one: -one.score)

    # --- before the search ---------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def end(self) -> int:
        return self.model.config.end_id

    @cached_property
    def _max_lengths(self) -> tuple[int | None, int | None]:
        """Tokens that the model has positions for, on each side; None: any number."""
        if isinstance(self.model, Ensemble):
            return self.model.max_source_length, self.model.max_target_length
        return self.model.encoder.positions.max_length, self.model.decoder.positions.max_length

    @property
    def _max_segment_tokens(self) -> int:
        """Tokens of a text that is read whole: a summary, for one, is of all of a text."""
        return max(MAX_UNSPLIT_TOKENS, self._trained_max_tokens)

    @cached_property
    def _trained_max_tokens(self) -> int:
        """`data.max_tokens` of the run that made this model, if it was raised; else 0."""
        path = None if self.folder is None else self.folder / "run.toml"
        with suppress(settings.SettingsError, OSError, KeyError, AttributeError):  # a folder made otherwise
            longest = (
                0 if path is None or not path.is_file() else settings.read_toml_dict(path)["data"].get("max_tokens", 0)
            )
            return longest if isinstance(longest, int) and longest > DEFAULT_MAX_TOKENS else 0
        return 0

    def _split_texts(
        self,
        texts: Sequence[str],
        constraints: Sequence[Constraints],
        to: str | None,
        split_sentences: bool,
        source_lang: str | None,
    ) -> tuple[list[list[SentencePart]], dict[str, list[int]]]:
        """The texts as they are translated: whole, or cut into sentences; space around them is not kept. And the ids of
        those that had to be encoded to know."""
        limit = min(self._max_segment_tokens, self._max_lengths[0] or self._max_segment_tokens) - count_special_tokens(
            to
        )
        clean = [self.clean_text(text) for text in texts]
        counted = [] if split_sentences else [text for text in clean if bound_token_count(text) > limit]
        read = dict(zip(counted, self.tokenizer.source.encode(counted), strict=True))
        whole = [not split_sentences and len(read.get(text, ())) <= limit for text in clean]
        pieces = [
            ([SentencePart(text)] if text else []) if one else self._split_text(text, control, limit, source_lang)
            for text, control, one in zip(clean, constraints, whole, strict=True)
        ]
        return pieces, read

    def _split_text(
        self, text: str, constraints: Constraints, max_tokens: int, source_lang: str | None
    ) -> list[SentencePart]:
        if not text:
            return []
        pieces = split_by_tokens(split_sentences(text, source_lang), self._count_tokens, max_tokens)
        if len(pieces) > 1 and (constraints.prefix or constraints.required):
            raise TranslationError(
                f"a text with a prefix or with words that must come must be one sentence of at most {max_tokens} tokens, "
                f"but this one has {len(pieces)} sentences or parts: {text[:60]!r}; give them one by one"
            )
        return pieces

    def clean_text(self, text: str) -> str:
        """As the model reads it."""
        found, plain = self._unknown_chars
        return (text.translate(plain) if found.search(text) else text).strip()

    @cached_property
    def _unknown_chars(self) -> tuple[re.Pattern[str], dict[int, str | None]]:
        """Spaces that the model has never met become plain ones, and signs that nobody sees go; what it has a piece for
        it knows. A pattern that finds them is many times as quick as what replaces them."""
        source = self.tokenizer.source
        odd = [*UNICODE_SPACES, *INVISIBLE_CHARS]
        rows = source.encode([f"a{one}a" for one in odd])
        plain = source.encode(["aa"])[0]
        strange = [one for one, row in zip(odd, rows, strict=True) if has_unknown_chars(source, row) or row == plain]
        return re.compile(f"[{''.join(strange)}]" if strange else "(?!)"), {
            ord(one): " " if one in UNICODE_SPACES else None for one in strange
        }

    def _count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in self.tokenizer.source.encode(texts)]

    def _encode_sources(self, texts: Sequence[str], to: str | None, encoded: dict[str, list[int]]) -> list[list[int]]:
        """As `encode_source` has it, without encoding again what was."""
        new = [text for text in texts if text not in encoded]
        encoded.update(zip(new, self.tokenizer.source.encode(new), strict=True))
        return add_end_and_tag([[*encoded[text]] for text in texts], self.tokenizer.source, to)

    def _build_request(
        self,
        segment: Segment,
        source_ids: Sequence[int],
        options: SearchOptions,
        special_tokens: int,
        prevent_loops: bool = False,
    ) -> SearchRequest:
        """`guard`: it may not go in circles, unless its source does; a text with wishes may have to."""
        limit = options.compute_max_length(len(source_ids) - special_tokens)
        limit = min(limit, self._max_lengths[1] or limit)
        if segment.constraints is NO_CONSTRAINTS:
            return SearchRequest(
                source_ids=source_ids,
                rng_key=segment.rng_key,
                max_length=limit,
                forbid_loops=prevent_loops and not has_loop(source_ids),
            )
        wanted = [segment.constraints.prefix.strip(), *segment.constraints.required]
        prefix, *demanded = self.tokenizer.target.encode(wanted) if any(wanted) else ([], *([] for _ in wanted[1:]))
        return SearchRequest(
            source_ids=source_ids,
            prefix_ids=tuple(prefix),
            required_phrases=tuple(tuple(self._drop_leading_space(ids)) for ids in demanded),
            banned_phrases=segment.constraints.banned,
            prefix_ends_word=segment.constraints.prefix_ends_word,
            rng_key=segment.rng_key,
            max_length=limit,
        )

    def _drop_leading_space(self, token_ids: list[int]) -> list[int]:
        """A word as it stands inside a text. Where words have no spaces between them, the one before it is left out; as
        it is before a sign, such as that of a placeholder, which need not stand alone."""
        target = self.tokenizer.target
        if len(token_ids) < 2 or target.to_pieces(token_ids[:1]) != [SPACE]:
            return token_ids
        first = target.decode(token_ids).strip()[:1]
        return (
            token_ids
            if first.isalnum() and not compile_letter_pattern(UNSPACED_SCRIPTS).match(first)
            else token_ids[1:]
        )

    # --- the search ----------------------------------------------------------------------------------------------

    def _search_segments(
        self,
        segments: Sequence[Segment],
        rows: Sequence[Sequence[int]],
        options: SearchOptions,
        mbr_candidates: int,
        prevent_loops: bool,
        should_stop: Callable[[], bool] | None,
        special_tokens: int,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each unit, each different unit searched for once; by chance, each by itself."""
        asked = widen_for_mbr(options, mbr_candidates)
        alike = all(unit.constraints is segments[0].constraints for unit in segments)
        same: list[object] = [unit.text for unit in segments] if alike else list(segments)
        keys = list(range(len(segments))) if options.sampling else same
        places = {key: place for place, key in reversed(list(enumerate(keys)))}
        at_once = prevent_loops and not asked.forbid_loops and asked.sampling is None and self.can_forbid_loops
        jobs = {
            key: self._build_request(segments[place], rows[place], asked, special_tokens, at_once)
            for key, place in places.items()
        }
        found = dict(zip(jobs, self._run_engines(list(jobs.values()), asked, should_stop), strict=True))
        for key, some in found.items():
            check_hypotheses(some, segments[places[key]], jobs[key])
        if prevent_loops and not asked.forbid_loops:
            loose = [(key, some[0]) for key, some in found.items() if not jobs[key].forbid_loops]
            circling = [key for key, best in loose if has_loop(best.token_ids) and not has_loop(jobs[key].source_ids)]
            again = self.build_torch_engine(should_stop).search(
                [jobs[key] for key in circling], replace(asked, forbid_loops=True)
            )
            found.update((circling[place], some) for place, some in again if some)  # what must come may go in circles
        if mbr_candidates:
            found = {key: self._rank_by_mbr(some, options) for key, some in found.items()}
        return [found[key] for key in keys]

    @property
    def can_forbid_loops(self) -> bool:
        """Are loops forbidden from the start? In the lane of a GPU that costs nothing, and to look again much."""
        return self.device.type != "cpu" and self.engine != "ctranslate2" and isinstance(self.model, Seq2Seq)

    def search(
        self, requests: Sequence[SearchRequest], options: SearchOptions, should_stop: Callable[[], bool] | None = None
    ) -> list[list[Hypothesis]]:
        """For whoever has text and ids elsewhere."""
        with self._locks.eval_mode:
            return self._run_engines(requests, options, should_stop)

    def search_batch(
        self, batch: RequestBatch, options: SearchOptions, should_stop: Callable[[], bool] | None = None
    ) -> HypothesisBatch | Unavailable:
        """The same for a lot of jobs without wishes, where our own engine has a fast lane."""
        with self._locks.eval_mode:
            return self.build_torch_engine(should_stop).search_batch(batch, options)

    def _run_engines(
        self, requests: Sequence[SearchRequest], options: SearchOptions, should_stop: Callable[[], bool] | None
    ) -> list[list[Hypothesis]]:
        results: list[list[Hypothesis]] = [[] for _ in requests]
        for engine, places in self._assign_engines(requests, options, should_stop):
            with (
                nullcontext() if isinstance(engine, TorchEngine) else self._locks.device_lock
            ):  # ours takes it by itself
                for place, found in engine.search([requests[place] for place in places], options):
                    results[places[place]] = found
                    if should_stop is not None and should_stop():
                        raise SearchCancelled
        return results

    def _assign_engines(
        self, requests: Sequence[SearchRequest], options: SearchOptions, should_stop: Callable[[], bool] | None
    ) -> Iterator[tuple[SearchEngine, list[int]]]:
        """Which engine takes which jobs: the quick one all that it can do."""
        with self._locks.engine_lock:
            quick = self._ctranslate2_engine
        left = list(range(len(requests)))
        if quick is not None and requests:
            reasons = {place: quick.find_unsupported_reason(options, [requests[place]]) for place in left}
            able = [place for place, reason in reasons.items() if reason is None]
            left = [place for place, reason in reasons.items() if reason is not None]
            if able:
                yield quick, able
            for reason in dict.fromkeys(reasons[place] for place in left):
                self.notify(f"CTranslate2 {reason}: this is left to the torch engine, which is slower")
        demanding = [place for place in left if requests[place].required_phrases]
        for places in (demanding, [place for place in left if not requests[place].required_phrases]):
            if places:
                yield self.build_torch_engine(should_stop), places

    def build_torch_engine(self, should_stop: Callable[[], bool] | None = None) -> TorchEngine[Any]:
        """Our own engine with this model."""
        config = self.model.config
        return TorchEngine[Any](
            model=self.step_model,
            start=config.start_id,
            end=config.end_id,
            suppressed_tokens=tuple(find_suppressed_tokens(config, self.tokenizer)),
            pad=self.tokenizer.source.pad,
            device=self.device,
            choose_batch_size=self._compute_batch_size,
            build_constraints=self._constraint_builder.build_constraints,
            should_stop=should_stop,
            use_cuda_graphs=self.use_cuda_graphs,
            notify=self.notify,
            device_lock=self._locks.device_lock,
        )

    @cached_property
    def _constraint_builder(self) -> ConstraintBuilder:
        return ConstraintBuilder(self.tokenizer.target, self.model.config.output_vocab, self.end, self.device)

    @cached_property
    def _ctranslate2_engine(self) -> SearchEngine | None:
        """CTranslate2, where it is to be taken; it is an error only for who has asked for it by name."""
        if self.engine == "torch" or (self.engine is None and self.device.type != "cpu"):
            return None
        from attent.decoding.engines.ctranslate2 import CTranslate2Engine

        try:
            if isinstance(self.model, Ensemble):
                raise TranslationError("CTranslate2 has no ensembles of models")
            return CTranslate2Engine.open(self.folder, self.model, self.tokenizer, threads=self.threads)
        except (ValueError, ImportError) as error:
            if self.engine is not None:
                raise
            self.notify(f"{error}; the torch engine is taken, which is slower")
            return None

    def _compute_batch_size(self, source: int, target: int, beams: int) -> int:
        if self.batch_tokens is not None:
            return max(1, self.batch_tokens // (source * beams))
        return max(1, self._compute_max_rows(source, target) // beams)

    def _compute_max_rows(self, source: int, target: int) -> int:
        """Beams that fit into memory: their logits, and what their layers keep."""
        config = self.model.config
        members = len(self.model.members) if isinstance(self.model, Ensemble) else 1
        width = config.decoder.width * config.decoder.layers * members * next(self.model.parameters()).element_size()
        each = 16 * config.output_vocab + 4 * width * (source + target)
        if self.device.type == "cpu":
            return min(CPU_MAX_ROWS, CPU_MAX_BYTES // each)
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else DEFAULT_FREE_BYTES
        return min(MAX_ROWS, int(FREE_MEMORY_FRACTION * free / each))

    def notify(self, message: str) -> None:
        """Once each."""
        with self._locks.notify_lock:
            if self._notify is not None and message not in self.notified:
                self._notify(message)
            self.notified.add(message)

    # --- after the search ----------------------------------------------------------------------------------------

    def _rank_by_mbr(self, hypotheses: list[Hypothesis], options: SearchOptions) -> list[Hypothesis]:
        texts = [self.tokenizer.target.decode(one.token_ids) for one in hypotheses]
        shares = None if options.sampling else mbr.normalize_log_probs([one.log_prob for one in hypotheses])
        worth = mbr.compute_expected_chrf(texts, shares)
        order = sorted(range(len(hypotheses)), key=lambda place: -float(worth[place]))
        return [hypotheses[place] for place in order[: options.n_best]]

    def _join_segments(
        self,
        text: str,
        pieces: Sequence[SentencePart],
        candidates: Sequence[list[Candidate]],
        options: SearchOptions,
        alignment: Alignment | None,
    ) -> Translation:
        """The translation of a text from those of its parts."""
        if len(candidates) == 1:
            return build_translation(candidates[0], text, 1, alignment)
        best = [group[0] for group in candidates]
        log_prob = sum(one.log_prob for one in best)
        length = sum(len(one.tokens) + one.is_finished for one in best)
        whole = Candidate(
            text=join_parts(
                [SentencePart(one.text, piece.gap) for one, piece in zip(best, pieces, strict=True)]
            ).strip(),
            score=log_prob / options.compute_length_penalty(length),
            log_prob=log_prob,
            tokens=tuple(token for one in best for token in one.tokens),
            is_finished=all(one.is_finished for one in best),
        )
        return build_translation([whole], text, len(candidates), alignment)

    def _detokenize(self, groups: Sequence[Sequence[Sequence[Hypothesis]]]) -> list[list[list[Candidate]]]:
        """The hypotheses of each part of each text, as text."""
        target = self.tokenizer.target
        texts = iter(target.decode_batch([one.token_ids for parts in groups for some in parts for one in some]))

        def candidate(found: Hypothesis) -> Candidate:
            return Candidate(
                text=next(texts).strip(),
                score=found.score,
                log_prob=found.log_prob,
                tokens=tuple(target.to_pieces(found.token_ids)),
                is_finished=found.is_finished,
            )

        return [[[candidate(one) for one in some] for some in parts] for parts in groups]

    def _align_segments(
        self,
        segments: Sequence[Segment],
        rows: Sequence[Sequence[int]],
        groups: Sequence[Sequence[list[Hypothesis]]],
    ) -> list[Alignment]:
        """Which word comes from which: the cross-attention, when the model reads its own translation."""
        model = self.model.members[0] if isinstance(self.model, Ensemble) else self.model
        choice = get_default_selection(model) if self.folder is None else load_selection(self.folder, model)
        best = [group[0] for some in groups for group in some]
        pairs = [
            EncodedPair(source=list(row), target=[*one.token_ids, self.end], truncated=False)
            for row, one in zip(rows, best, strict=True)
        ]
        targets = [self.tokenizer.target.decode(one.token_ids) for one in best]
        sources = [unit.text for unit in segments]
        with self._locks.device_lock:
            found = iter(align_rows(model, self.tokenizer, sources, targets, pairs, choice))
        words = iter(len(source.split()) for source in sources)
        return [concatenate_alignments([(next(found), next(words)) for _ in some]) for some in groups]

    # --- step by step --------------------------------------------------------------------------------------------

    def _iterate_stable_prefixes(
        self, segment: Segment, request: SearchRequest, options: SearchOptions
    ) -> Iterator[list[int]]:
        """The beginning of the target that no beam will change any more, again and again; at last, the whole."""
        session = SearchSession(self.build_torch_engine(None), [request], [0], self._build_context(request, options))
        while session.row_requests:
            session.step()
            found = list(session.pop_finished())
            if found:
                check_hypotheses(found[0][1], segment, request)
                yield list(found[0][1][0].token_ids)
                return
            yield get_common_prefix(session.list_candidates())

    def _build_context(self, request: SearchRequest, options: SearchOptions) -> SearchContext:
        engine = self.build_torch_engine(None)
        rules, demands = engine.build_constraints(options, [request])
        never = make_suppressed_tensor(engine.start, engine.end, engine.suppressed_tokens, self.device)
        return SearchContext(
            options=options,
            start=engine.start,
            end=engine.end,
            suppressed_tokens=never,
            constraints=rules,
            required_phrases=demands,
        )

    def _get_next_tokens(self, request: SearchRequest, count: int) -> list[int]:
        """The likeliest tokens behind a prefix, other than the end."""
        engine = self.build_torch_engine(None)
        source, lengths = engine.pad_sources([request])
        state = self.step_model.begin(source, lengths, capacity=len(request.prefix_ids) + 1)
        read = torch.tensor([[engine.start, *request.prefix_ids]], device=self.device)
        logits = self.step_model.step(read, state)[0, -1].float()
        logits[make_suppressed_tensor(engine.start, engine.end, engine.suppressed_tokens, self.device)] = NEG_INF
        logits[self.end] = NEG_INF
        if request.prefix_ends_word:
            logits = logits.masked_fill(self._constraint_builder.word_continuations, NEG_INF)
        likely = logits.topk(min(count, len(logits)))
        there = zip(likely.values.tolist(), likely.indices.tolist(), strict=True)
        return [token for value, token in there if value > NEG_INF]


# --- small things --------------------------------------------------------------------------------------------------


def check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise TranslationError(f"`texts` must be a list of texts, but is one: {texts[:60]!r}; put it in [ ]")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TranslationError(f"`texts` must be texts, but one is a {type(wrong[0]).__name__}; leave it out")


def broadcast_constraints(constraints: Constraints | Sequence[Constraints], count: int) -> list[Constraints]:
    controls = [constraints] * count if isinstance(constraints, Constraints) else list(constraints)
    if len(controls) != count:
        raise TranslationError(f"there must be a control for each text, but there are {len(controls)}")
    return controls


def build_segments(
    pieces: Sequence[Sequence[SentencePart]],
    constraints: Sequence[Constraints],
    glossary: Glossary | None,
    first_index: int,
) -> list[Segment]:
    """The pieces of all texts in a row, each with what it must have."""
    return [
        Segment(piece.text, add_glossary_terms(control, piece.text, glossary), place * MAX_SEGMENTS + part)
        for place, (some, control) in enumerate(zip(pieces, constraints, strict=True), first_index)
        for part, piece in enumerate(some)
    ]


def override_options(options: SearchOptions, beam_size: int | None, n_best: int | None) -> SearchOptions:
    n_best = options.n_best if n_best is None else n_best
    return replace(options, n_best=n_best, beam_size=options.beam_size if beam_size is None else beam_size)


def add_glossary_terms(constraints: Constraints, text: str, glossary: Glossary | None) -> Constraints:
    terms = () if glossary is None else glossary.find_translations(text)
    return replace(constraints, required=(*constraints.required, *terms)) if terms else constraints


def bound_token_count(text: str) -> int:
    """A character has at most four bytes, and a token at least one; ASCII stays what it is, behind a space."""
    return len(text) + 1 if text.isascii() else 4 * len(text)


def has_unknown_chars(vocabulary: Vocabulary, row: Sequence[int]) -> bool:
    """Is there a character in it that has no piece of its own?"""
    return vocabulary.unknown in row or any(BYTE_TOKEN.fullmatch(piece) for piece in vocabulary.to_pieces(row))


def check_hypotheses(hypotheses: Sequence[Hypothesis], segment: Segment, request: SearchRequest) -> None:
    if not hypotheses:
        raise TranslationError(
            f"no translation of {segment.text[:60]!r} can have all that must come and nothing that must not within "
            f"{request.max_length} tokens; ask for less, or allow a greater `max_length`"
        )


def has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def check_constraints(constraints: Constraints, options: SearchOptions) -> None:
    """What must come must not be what must not, and must be looked for."""
    if constraints.required and (options.sampling is not None or options.beam_groups > 1):
        raise TranslationError(
            "words that must come, and terms of a glossary, are looked for by plain beam search only: leave out "
            "sampling and groups of beams"
        )
    for word in constraints.required:
        if not word.strip():
            raise TranslationError("what must come must be a word, but is empty; leave it out")
        for other in constraints.banned:
            if has_word(word, other):
                raise TranslationError(f"`{word}` must come, but must not, since `{other}` is forbidden; leave one out")


def widen_for_mbr(options: SearchOptions, mbr_candidates: int) -> SearchOptions:
    """As many candidates as the choice is made among."""
    if not mbr_candidates:
        return options
    if mbr_candidates < options.n_best:
        raise TranslationError(f"`risk` must be at least `n_best`={options.n_best} candidates, but is {mbr_candidates}")
    return replace(
        options,
        n_best=mbr_candidates,
        beam_size=options.beam_size if options.sampling else max(options.beam_size, mbr_candidates),
    )


def count_special_tokens(to: str | None) -> int:
    """Tokens of a source that are no text: the end and, where there is one, the tag of the language."""
    return 1 if to is None else 2


def build_translation(
    candidates: Sequence[Candidate], source: str, segment_count: int, alignment: Alignment | None = None
) -> Translation:
    best = candidates[0] if candidates else EMPTY_CANDIDATE
    return Translation(
        source=source,
        text=best.text,
        score=best.score,
        log_prob=best.log_prob,
        tokens=best.tokens,
        is_finished=best.is_finished,
        n_best=tuple(candidates),
        alignment=alignment,
        segment_count=segment_count,
    )


EMPTY_CANDIDATE = Candidate(text="", score=0.0, log_prob=0.0, tokens=(), is_finished=True)


def concatenate_alignments(parts: Sequence[tuple[Alignment, int]]) -> Alignment:
    """One alignment from those of sentences that follow one another, each with the number of its source words."""
    links: list[tuple[int, int]] = []
    weights: list[tuple[float, ...]] = []
    before, behind = 0, sum(words for _, words in parts)
    for part, words in parts:
        behind -= words
        links += [(source + before, target + len(weights)) for source, target in part.links]
        weights += [(*[0.0] * before, *row, *[0.0] * behind) for row in part.weights]
        before += words
    return Alignment(links=tuple(links), weights=tuple(weights))


def get_common_prefix(rows: Sequence[Sequence[int]]) -> list[int]:
    """What all begin with."""
    same: list[int] = []
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        same.append(column[0])
    return same


def check_tokenizer(model: Seq2Seq | Ensemble, tokenizer: Tokenizer) -> None:
    for side, size, vocab in (
        ("source", tokenizer.source.size, model.config.vocab),
        ("target", tokenizer.target.size, model.config.output_vocab),
    ):
        if size > vocab:
            raise ValueError(
                f"the tokenizer must be the model's, of {vocab} pieces at most on the {side} side, but has {size}; "
                f"load both from the same folder"
            )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Of the same save as the weights, where the folder can tell."""
    files = read_extra_files(folder) if (folder / MANIFEST_FILE).exists() else {}
    return Tokenizer.from_files(files, f"{folder}/") if files else Tokenizer.load(folder)


def choose_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def choose_dtype(device: torch.device) -> str:
    """Half of the bytes and many times the speed, where there are units for it; the numbers then have three digits."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return "bfloat16" if nvidia and torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
