"""Translate files: lines in blocks through the translator and out in order, and documents.

On a GPU several blocks are in flight: one is searched while threads or worker processes tokenize and detokenize others.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import torch

from attent.data.augment import TAGS
from attent.data.formats.tmx import list_languages
from attent.data.formats.units import InlineCode, InlineContent, TransferredContent, get_display_text
from attent.data.pairs import ANY_LANGUAGES, CorpusError, LanguageMismatchError, LanguagePair
from attent.data.pretranslate import PretranslateResult, pretranslate_file
from attent.decoding.alignment import AlignmentError, find_cross_layers
from attent.decoding.document_terms import find_document_terms
from attent.decoding.engines.gpu.worker_pool import RemoteEngine, TextWorkerPool
from attent.decoding.glossary import Glossary
from attent.decoding.input_lines import LineBlock, LineSource
from attent.decoding.loading import read_data_settings
from attent.decoding.markup import project_codes, remove_codes, select_links
from attent.decoding.options import NO_CONSTRAINTS, InputError, PhraseConstraints, SearchOptions, StopCheck
from attent.decoding.output_format import OutputFormat
from attent.decoding.quality import measure_quality
from attent.decoding.translator import Translation, Translator
from attent.formatting import escape_invisible
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.text.language_tags import is_same_language
from attent.text.sentence_splitter import split_sentences
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import ContextWindow

CPU_BLOCK_LINES, GPU_BLOCK_LINES = 256, 4096
GPU_PENDING_BLOCKS = 3  # one is searched while others are tokenized and detokenized
SWITCH_INTERVAL = 1e-4  # seconds until Python switches threads: with the usual 5 ms the GPU would wait for text
MAX_LISTED_SKIPS = 20
MAX_ALIGNED_WORDS = 2000  # per line: the weights are words x words
MIN_WORKER_BYTES = 4 * 2**20  # size of an input for which worker processes pay off; if it is unknown,
MIN_WORKER_LINES = 16_384  # they start at this line
MAX_WORKERS = 6  # as many keep the fastest search of an H200 busy


class LineProgress(Protocol):
    def update(self, lines: int, done_bytes: int, total_lines: int | None = None) -> None: ...

    def print_message(self, message: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TranslationPipeline:
    translator: Translator
    options: SearchOptions
    to: str | None = None
    source_lang: str | None = None
    glossary: Glossary | None = None
    constraints: PhraseConstraints = NO_CONSTRAINTS  # of every line
    mbr_candidates: int = 0
    reverse: Translator | None = None  # translates back, for `Quality`
    context: int = 0  # preceding sentences; the model must be trained with as many
    split_sentences: bool = False
    consistent_terms: bool = False  # of a document, by a second pass
    output_format: OutputFormat = OutputFormat()  # noqa: RUF009 - frozen

    @cached_property
    def languages(self) -> tuple[str | None, str | None]:
        """Source and target language of the training run; None if the folder does not have it, or has several."""
        data, known = read_data_settings(self.translator.folder), self.translator.language_identifier
        source = data.get("src") or (",".join(known.sources) if known else None)
        target = self.to or data.get("tgt") or (",".join(known.targets) if known else None)
        is_single = [isinstance(side, str) and side != "" and "," not in side for side in (source, target)]
        return source if is_single[0] else None, target if is_single[1] else None

    @cached_property
    def can_align(self) -> bool:
        """True if the model has cross-attention."""
        model = self.translator.model
        with suppress(AlignmentError):
            return bool(find_cross_layers(model if isinstance(model, Seq2Seq) else model.members[0]))
        return False

    def add_document_context(self, texts: Sequence[str]) -> Sequence[str]:
        """Return the texts of a document with the sentences before each."""
        window = ContextWindow(self.context)
        extended = []
        for text in texts if self.context else ():
            extended.append(window.prefix + text)
            window.append(*(sentence.text for sentence in split_sentences(text, self.source_lang)))
        return extended or texts

    def describe_direction(self) -> str:
        source, target = (language or "any language" for language in self.languages)
        return f"{self.translator.folder} translates from {source} to {target}"

    @property
    def block_lines(self) -> int:
        return CPU_BLOCK_LINES if self.translator.device.type == "cpu" else GPU_BLOCK_LINES

    @property
    def max_pending_blocks(self) -> int:
        return 0 if self.translator.device.type == "cpu" else GPU_PENDING_BLOCKS

    def translate(
        self, texts: Sequence[str], first_index: int = 0, should_stop: StopCheck | None = None
    ) -> list[Translation]:
        """Translate lines; `first_index` is the index of the first in the file, on which sampling depends."""
        aligned = texts if self.output_format.alignment is not None else []
        words = max((len(text.split()) for text in aligned), default=0)
        if words > MAX_ALIGNED_WORDS:
            raise InputError(
                f"a line must have at most {MAX_ALIGNED_WORDS:,} words for alignment, but has {words:,}; split it, or "
                f"leave the alignment out"
            )
        options = self.options
        if self.output_format.with_quality and not (options.sampling or self.mbr_candidates):
            options = replace(options, n_best=options.beam_size)
        translations = self.translator.translate(
            texts,
            options,
            to=self.to,
            constraints=self.constraints,
            glossary=self.glossary,
            alignment=self.output_format.alignment is not None,
            mbr_candidates=self.mbr_candidates,
            split_sentences=self.split_sentences,
            source_lang=self.source_lang,
            first_index=first_index,
            should_stop=should_stop,
        )
        if self.output_format.with_quality:
            to = self.languages[0] if self.reverse and self.reverse.tokenizer.source.tags else None
            for translation, quality in zip(translations, measure_quality(translations, self.reverse, to), strict=True):
                vars(translation)["quality"] = quality
        return translations


# --- lines ---------------------------------------------------------------------------------------------------------


BlockOutput = tuple[str, list[str], str | None]  # text, messages for the user, error of the line after the text


def translate_lines(pipeline: TranslationPipeline, source: LineSource, out: TextIO, progress: LineProgress) -> None:
    """Translate a file line by line; each block is written as soon as it is done."""
    line_count, done_bytes = 0, 0
    with closing(iterate_translated_blocks(pipeline, source)) as blocks:
        for block, (text, messages, error) in blocks:
            if not line_count:
                warn_of_text_language(pipeline, block.lines, progress)
            out.write(text)
            out.flush()
            for message in messages:
                progress.print_message(message)
            if error is not None:
                raise InputError(error)
            line_count += len(block.lines)
            done_bytes += block.byte_count
            progress.update(line_count, done_bytes)
    if line_count == 0:
        progress.print_message(f"{source.name}: is empty, there is nothing to translate")


def add_line_context(blocks: Iterator[LineBlock], size: int) -> Iterator[LineBlock]:
    """Yield the blocks with the preceding lines of each line; an empty line ends a document."""
    window = ContextWindow(size)
    for block in blocks:
        lines = []
        for text in block.lines if size else ():
            lines.append(window.prefix + text if text.strip() else text)
            window.append(text)
        yield replace(block, lines=lines) if size else block


def warn_of_text_language(pipeline: TranslationPipeline, texts: Sequence[str], progress: LineProgress) -> None:
    if problem := pipeline.translator.describe_wrong_language(texts):
        progress.print_message(f"warning: {problem}")


def iterate_translated_blocks(
    pipeline: TranslationPipeline, source: LineSource
) -> Generator[tuple[LineBlock, BlockOutput], None, None]:
    """Yield blocks with their output, in order. Before waiting for more input, yield all that were read so far."""
    blocks = add_line_context(source.read_blocks(pipeline.block_lines), pipeline.context)
    if pipeline.max_pending_blocks == 0:
        yield from ((block, translate_block(pipeline, block)) for block in blocks)
        return
    pending: deque[tuple[LineBlock, Future[BlockOutput]]] = deque()
    error, num_workers = None, choose_worker_count(pipeline)
    max_pending = max(pipeline.max_pending_blocks, num_workers)
    is_long = source.total_bytes is not None and source.total_bytes >= MIN_WORKER_BYTES
    with (
        closing(build_worker_pool(pipeline, num_workers)) as workers,
        start_threads(max_pending) as (threads, cancelled),
    ):
        try:
            for block in blocks:
                use_workers = is_long or block.first_index >= MIN_WORKER_LINES
                pending.append((block, threads.submit(workers.run, block, cancelled.is_set, use_workers)))
                while pending and (len(pending) > max_pending or pending[0][1].done() or not source.has_more()):
                    yield pending[0][0], pending.popleft()[1].result()
        except (InputError, CorpusError) as unreadable:  # raised after the lines before it are written
            error = unreadable
        for block, future in pending:
            yield block, future.result()
        if error is not None:
            raise error


@contextmanager
def start_threads(count: int) -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    cancelled, interval = threading.Event(), sys.getswitchinterval()
    pool = ThreadPoolExecutor(count, "attent texts")
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield pool, cancelled
    finally:
        cancelled.set()
        pool.shutdown(cancel_futures=True)
        sys.setswitchinterval(interval)


def translate_block(
    pipeline: TranslationPipeline, block: LineBlock, should_stop: StopCheck | None = None
) -> BlockOutput:
    output, first_index = pipeline.output_format, block.first_index
    translations, error = translate_until_error(pipeline, block.lines, first_index, block.source_name, should_stop)
    rows = [
        restore_whitespace(row, translation.source) if output.is_plain else row
        for index, translation in enumerate(translations, first_index)
        for row in output.format_lines(translation, index)
    ]
    messages = []
    for number, translation in enumerate(translations, first_index + 1):
        if translation.segment_count > 1 and not pipeline.split_sentences:
            parts = f"translated in {translation.segment_count:,} parts"
            messages.append(f"{block.source_name}, line {number:,}: too long to translate at once, {parts}")
        messages += [f"{block.source_name}, line {number:,}: {term}" for term in translation.missed_terms]
    return "".join(f"{row}\n" for row in rows), messages, error


def translate_until_error(
    pipeline: TranslationPipeline,
    lines: Sequence[str],
    first_index: int,
    name: str,
    should_stop: StopCheck | None = None,
) -> tuple[list[Translation], str | None]:
    """Translate all lines at once; if one cannot be translated, return those before it, and the error."""
    try:
        return pipeline.translate(lines, first_index, should_stop), None
    except ValueError as error:
        if len(lines) == 1:
            return [], f"{name}, line {first_index + 1:,}: {error}"
        middle = len(lines) // 2
        done, message = translate_until_error(pipeline, lines[:middle], first_index, name, should_stop)
        if message is not None:
            return done, message
        more, message = translate_until_error(pipeline, lines[middle:], first_index + middle, name, should_stop)
        return [*done, *more], message


def restore_whitespace(line: str, source: str) -> str:
    """Surround a line with the blanks that its source has, so that the text keeps its layout."""
    text = source.strip(" \t")
    before, _, after = source.partition(text) if text and line else ("", "", "")
    return f"{before}{line}{after}"


# --- worker processes ----------------------------------------------------------------------------------------------


def choose_worker_count(pipeline: TranslationPipeline) -> int:
    """Return how many worker processes pay off; 0 if a worker would need the weights."""
    translator = pipeline.translator
    if translator.device.type == "cpu" or translator.engine == "ctranslate2":
        return 0
    if pipeline.output_format.alignment or pipeline.glossary or pipeline.reverse:  # these run a model
        return 0
    return min(MAX_WORKERS, (os.cpu_count() or 1) // 2) if isinstance(translator.model, Seq2Seq) else 0


def build_worker_pool(pipeline: TranslationPipeline, num_workers: int) -> TextWorkerPool[BlockOutput]:
    translator, rest = pipeline.translator, replace(pipeline, translator=cast(Translator, None))
    parts = (translator.tokenizer, translator.folder, translator.model.config, rest)
    setup = partial(build_block_handler, *parts)
    return TextWorkerPool(translator, setup, partial(translate_block, pipeline), num_workers)


def build_block_handler(
    tokenizer: Tokenizer,
    folder: Path | None,
    config: Seq2SeqConfig,
    pipeline: TranslationPipeline,
    engine: RemoteEngine,
) -> Callable[[LineBlock], BlockOutput]:
    """Return what a worker runs for each block; it has everything but the weights."""
    with torch.device("meta"):  # only its config is used
        model = Seq2Seq(config).eval()
    translator = RemoteTranslator(model, tokenizer, folder=folder)
    translator.remote_engine = engine
    return partial(translate_block, replace(pipeline, translator=translator))


class RemoteTranslator(Translator):
    remote_engine: RemoteEngine

    def _build_torch_engine(self, should_stop: StopCheck | None = None) -> Any:
        return self.remote_engine


# --- documents -----------------------------------------------------------------------------------------------------


def pretranslate_document(
    pipeline: TranslationPipeline,
    content: bytes,
    file: Path,
    tgt: str | None,
    progress: LineProgress,
    fields: Sequence[str] = (),
) -> PretranslateResult:
    """Fill in the missing translations of a PO, XLIFF or TMX file, or translate a document of another format."""
    requested, own = LanguagePair(pipeline.source_lang, tgt), LanguagePair(*pipeline.languages)
    is_tmx = file.name.lower().endswith(".tmx")
    augmented = read_data_settings(pipeline.translator.folder).get("augment", ())
    if not is_tmx:  # a TMX file gets new variants with the region of the target
        own = ANY_LANGUAGES.fill_open_sides(own.source, own.target)

    def fill(pipeline: TranslationPipeline, translations: dict[str, Translation]) -> PretranslateResult:
        transfer = partial(transfer_markup, pipeline, progress=progress, translations=translations)
        return pretranslate_file(
            content,
            str(file),
            lambda texts: transfer([(text,) for text in texts]),
            transfer=transfer,
            copies_tags=any(str(item).startswith(f"{TAGS}=") for item in augmented),
            src=requested.source or own.source,
            tgt=requested.target or own.target,
            fields=fields,
        )

    try:
        if is_tmx and requested.target is None:
            check_tmx_target(content, str(file), LanguagePair(requested.source or own.source, own.target))
        translations: dict[str, Translation] = {}
        result = fill(pipeline, translations)
        if pipeline.consistent_terms:
            terms, again = find_document_terms(translations, pipeline.translator.tokenizer, pipeline.glossary)
            consistent = {text: unit for text, unit in translations.items() if text not in again}
            result = fill(replace(pipeline, glossary=terms), consistent) if again else result
        return result
    except LanguageMismatchError as error:
        if not requested.is_open:
            raise
        advice = "use another file or model, or name the languages of the file with --src and --tgt to insist"
        raise InputError(f"{error.problem}, but {pipeline.describe_direction()}; {advice}") from error


def check_tmx_target(content: bytes, name: str, languages: LanguagePair) -> None:
    """Raise an error if the source has variants in other languages only: a new one is added if it is requested."""
    source, target = languages.source, languages.target
    if source is None or target is None:
        return
    present = list_languages(content, name)
    others = [tag for tag in present if not is_same_language(source, tag)]
    if others and not any(is_same_language(target, tag) for tag in others):
        raise languages.make_mismatch_error(name, present)


def choose_context(translator: Translator, requested: int | None) -> int:
    """Return the number of preceding sentences to give: as many as in training unless fewer are requested."""
    trained = translator.context
    if requested is not None and not 0 <= requested <= trained:
        if not trained:
            raise InputError(f"--context {requested} needs a model of attent train --context N; leave it out")
        raise InputError(f"--context {requested} must be 0 to {trained}, as many as in training; leave it out")
    return trained if requested is None else requested


def warn_of_requested_languages(pipeline: TranslationPipeline, tgt: str | None, progress: LineProgress) -> None:
    requested = {"--src": pipeline.source_lang, "--tgt": tgt}
    for (flag, language), own in zip(requested.items(), pipeline.languages, strict=True):
        if language and own and not is_same_language(language, own):
            progress.print_message(
                f"warning: {flag} is {language}, but {pipeline.describe_direction()}; check the model"
            )


def translate_document_texts(pipeline: TranslationPipeline, texts: Sequence[str], progress: LineProgress) -> list[str]:
    transferred = transfer_markup(pipeline, [(text,) for text in texts], progress, {})
    return [get_display_text(content.candidates[0]) for content in transferred]


def transfer_markup(
    pipeline: TranslationPipeline,
    contents: Sequence[InlineContent],
    progress: LineProgress,
    translations: dict[str, Translation],
) -> list[TransferredContent]:
    """Translate the contents that `translations` lacks, add them to it, and put codes where the alignment says."""
    texts = [remove_codes(content) for content in contents]
    is_marked = [any(isinstance(part, InlineCode) for part in content) for content in contents]
    sources = pipeline.add_document_context(texts)
    warn_of_text_language(pipeline, texts[: pipeline.block_lines], progress)
    aligned = replace(pipeline, output_format=replace(pipeline.output_format, alignment="hard"))
    transferred = [TransferredContent((("",),), is_certain=True)] * len(texts)
    done = 0
    for group in (False, True):
        indices = [index for index, marked in enumerate(is_marked) if marked == group]
        for first in range(0, len(indices), pipeline.block_lines):
            block = indices[first : first + pipeline.block_lines]
            can_align = (group or pipeline.consistent_terms) and pipeline.can_align
            can_align = can_align and max(len(texts[index].split()) for index in block) <= MAX_ALIGNED_WORDS
            new = list(dict.fromkeys(sources[index] for index in block if sources[index] not in translations))
            translated = (aligned if can_align else pipeline).translate(new, first) if new else []
            for translation in translated:
                for term in translation.missed_terms:
                    progress.print_message(f"{escape_invisible(translation.source[:60])}: {term}")
            translations.update(zip(new, translated, strict=True))
            for index in block:
                translation = translations[sources[index]]
                links = select_links(translation.alignment, texts[index], translation.text) if can_align else ()
                text = " ".join(translation.text.split("\n")).strip()
                content = project_codes(contents[index], text, links)
                transferred[index] = content._replace(problem="; ".join(map(str, translation.missed_terms)))
            done += len(block)
            progress.update(done, 0, total_lines=len(texts))
    return transferred


def report_pretranslation(result: PretranslateResult, file: Path, notify: Callable[[str], None]) -> None:
    skipped = result.skipped
    counts = f"{result.filled_count:,} filled, {result.existing_count:,} kept, {len(skipped):,} skipped"
    notify(f"{file}: {counts}" + (f", {len(result.for_review):,} to review" if result.for_review else ""))
    for action, items in (("skipped", skipped), ("review it", result.for_review)):
        for item in items[:MAX_LISTED_SKIPS]:
            notify(f"{file}, line {item.line:,}: {action}, because {item.reason}: {escape_invisible(item.source[:60])}")
        if len(items) > MAX_LISTED_SKIPS:
            notify(f"... and {len(items) - MAX_LISTED_SKIPS:,} more")
