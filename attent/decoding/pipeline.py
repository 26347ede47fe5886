"""What `attent translate` does: lines in blocks to the translator and out again in their order, files of translators
filled, and what a person should know told on stderr.

What was asked for is `translate`'s, where lines come from `reading`'s, what they become `output`'s.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from cyclopts import CycloptsError

from attent import settings
from attent.cli.search_flags import (
    InputError,
    build_search_options,
    load_translator,
    resolve_target_lang,
    use_flag_names,
)
from attent.cli.translate import TranslateFlags
from attent.data.pairs import CorpusError
from attent.data.pretranslate import PretranslateResult, detect_document_format, pretranslate_file
from attent.decoding import Constraints, Glossary, SearchOptions, Translation, Translator
from attent.decoding.constraints.builder import NO_CONSTRAINTS
from attent.decoding.engines.gpu.worker_pool import RemoteEngine, TextWorkerPool
from attent.decoding.input_lines import (
    InputLine,
    LineBlock,
    LineParser,
    LineSource,
    build_line_source,
    open_input,
    parse_json_line,
    parse_text_line,
)
from attent.decoding.output_format import OutputFormat
from attent.formatting import escape_invisible, format_duration
from attent.models import Seq2Seq
from attent.storage.atomic import write_atomic

CPU_BLOCK_LINES, GPU_BLOCK_LINES = 256, 4096  # lines that are translated together
GPU_PENDING_BLOCKS = (
    3  # blocks at work at once on a GPU: it searches for one, while others' texts become ids and ids become texts
)
SWITCH_INTERVAL = (
    1e-4  # seconds after which Python lets another thread go on: with 5 ms, as usual, the GPU would wait for texts
)
MIN_WORKER_BYTES = 4 * 2**20  # size of an input for which worker processes pay off; if it is unknown,
MIN_WORKER_LINES = 16_384  # they start at this line
MAX_WORKERS = 6  # as many keep the fastest search of an H200 busy
REDRAW_INTERVAL = 0.25  # seconds between looks at the progress
SPEED_WINDOW = 5.0  # seconds of which the speed is told: how long the start took says nothing of what is to come
MAX_LISTED_SKIPS = 20  # units that were not filled, told one by one
MAX_ALIGNED_WORDS = 2000  # words of a line whose alignment is asked for: its weights are as many as words times words


def run_translate(model: Path, file: Path | None, flags: TranslateFlags) -> None:
    """What is given is read first: a wrong name is told before a large model is read."""
    use_utf8(sys.stdout)
    with open_input(file, sys.stdin.buffer) as stream, ProgressDisplay(sys.stderr) as screen:
        check_output_path(file, flags)
        check_document_flags(file, flags)
        search, glossary = parse_search_options(flags), Glossary.from_file(flags.glossary) if flags.glossary else None
        content = stream.read() if is_document(file) else b""
        translator = load_translator((model, *flags.ensemble), flags, screen.print_message)
        tags = translator.tokenizer.source.tags
        to = resolve_target_lang(flags.tgt if tags and flags.to is None else flags.to, tags, model)
        translator.translate([], search)  # its engine is made ready: what is wrong with it is no fault of a line
        gc.freeze()  # all this stays: to look through it for garbage again and again takes as long as the texts do
        desk = TranslationPipeline(translator=translator, options=search, to=to, glossary=glossary, flags=flags)
        if file is not None and is_document(file):
            pretranslate_document(desk, content, file, screen)
        elif flags.interactive or (file is None and stream.isatty() and sys.stdout.isatty() and flags.output is None):
            from attent.cli.interactive import run_session

            run_session(desk)
        else:
            if file is None and stream.isatty():
                screen.print_message("type text, a sentence a line; Ctrl-D ends")
            with open_output(flags.output) as out:
                translate_lines(desk, build_line_source(stream, file), out, screen)


def parse_search_options(flags: TranslateFlags) -> SearchOptions:
    try:
        return build_search_options(flags, flags.mbr_candidates if not flags.sample else 1)
    except ValueError as error:
        raise CycloptsError(msg=use_flag_names(str(error)), command_chain=("translate",)) from error


def use_utf8(stream: TextIO) -> None:
    """As the input, whatever the terminal's language is."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", newline="\n")


def is_document(file: Path | None) -> bool:
    """Is it more than lines of text?"""
    return file is not None and detect_document_format(file.name) not in (None, "text")


def check_output_path(file: Path | None, flags: TranslateFlags) -> None:
    """Nothing is written over what is read, unless it is asked for."""
    if flags.in_place and not is_document(file):
        raise InputError(f"{file}: --in-place is for .po, .xlf, .tmx and .md files; give --output another name")
    if flags.output is None:
        return
    out = flags.output.expanduser()
    if not out.absolute().parent.is_dir() or out.is_dir():
        raise InputError(f"{flags.output}: must be a file in a folder that is there, but is not; make the folder first")
    if file is not None and out.exists() and os.path.samefile(file.expanduser(), out):
        raise InputError(f"{flags.output}: must be another file than the one that is read; or take --in-place")


def check_document_flags(file: Path | None, flags: TranslateFlags) -> None:
    """A file of translators is given back as one."""
    asked = {
        "--n-best": flags.n_best > 1,
        "--output-type": flags.output_type != "text",
        "--with-score": flags.with_score,
        "--alignment": flags.alignment is not None,
        "--input-type": flags.input_type != "text",
    }
    wrong = [name for name, given in asked.items() if given]
    if is_document(file) and wrong:
        raise CycloptsError(
            msg=f"{file} is filled, and comes out as what it is: leave {wrong[0]} out", command_chain=("translate",)
        )


def open_output(path: Path | None) -> AbstractContextManager[TextIO]:
    if path is None or str(path) == "-":
        return nullcontext(sys.stdout)
    return open(path.expanduser(), "w", encoding="utf-8", newline="\n")


# --- who translates ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TranslationPipeline:
    """A translator, with all that was asked for."""

    translator: Translator
    options: SearchOptions
    to: str | None
    glossary: Glossary | None
    flags: TranslateFlags

    @cached_property
    def languages(self) -> tuple[str | None, str | None]:
        """That the model was trained for, where its folder says so."""
        path = (self.translator.folder or Path()) / "run.toml"
        told = settings.read_toml_dict(path).get("data", {}) if self.translator.folder and path.exists() else {}
        source, target = told.get("src"), self.to or told.get("tgt")
        return source or None, target if isinstance(target, str) and "," not in target else None

    @cached_property
    def constraints(self) -> Constraints:
        """Of every text."""
        asked = Constraints(prefix=self.flags.prefix, required=self.flags.require, banned=self.flags.ban)
        return NO_CONSTRAINTS if asked == NO_CONSTRAINTS else asked

    @property
    def output_format(self) -> OutputFormat:
        flags = self.flags
        return OutputFormat(
            type=flags.output_type,
            n_best=flags.n_best,
            with_score=flags.with_score,
            alignment=flags.alignment,
            score_formula=self.options.score_formula,
        )

    @property
    def block_lines(self) -> int:
        return CPU_BLOCK_LINES if self.translator.device.type == "cpu" else GPU_BLOCK_LINES

    @property
    def max_pending_blocks(self) -> int:
        return 0 if self.translator.device.type == "cpu" else GPU_PENDING_BLOCKS

    def build_line_constraints(self, line: InputLine) -> Constraints:
        """Of a line with wishes of its own."""
        base = self.constraints
        if line.is_plain:
            return base
        return Constraints(
            prefix=base.prefix if line.prefix is None else line.prefix,
            required=(*base.required, *line.required),
            banned=(*base.banned, *line.banned),
        )

    def translate(
        self, lines: Sequence[InputLine], first_index: int = 0, should_stop: Callable[[], bool] | None = None
    ) -> list[Translation]:
        """`first` is the place of the first line among all: chance depends on it."""
        if self.flags.alignment:
            check_word_counts(lines)
        return self.translator.translate(
            [line.text for line in lines],
            self.options,
            to=self.to,
            constraints=[self.build_line_constraints(line) for line in lines],
            glossary=self.glossary,
            alignment=self.flags.alignment is not None,
            mbr_candidates=self.flags.mbr_candidates,
            split_sentences=self.flags.split_sentences,
            source_lang=self.flags.src,
            prevent_loops=self.flags.prevent_loops,
            first_index=first_index,
            should_stop=should_stop,
        )

    def translate_n_best(self, lines: Sequence[InputLine], first_index: int) -> list[list[str]]:
        """The texts of the n best of each line; none of one that cannot have all that it must."""
        try:
            found = self.translate(lines, first_index)
        except ValueError:
            if len(lines) == 1:
                return [[]]
            return [
                some for number, line in enumerate(lines, first_index) for some in self.translate_n_best([line], number)
            ]
        return [[candidate.text for candidate in one.n_best] for one in found]


# --- lines ---------------------------------------------------------------------------------------------------------


def translate_lines(pipeline: TranslationPipeline, source: LineSource, out: TextIO, progress: ProgressDisplay) -> None:
    """Each block is written as soon as it is translated, so that what is done stays done."""
    read = parse_json_line if pipeline.flags.input_type == "json" else parse_text_line
    number, done = 0, 0
    progress.start(source.total_bytes, quiet=out.isatty())
    with closing(iterate_translated_blocks(pipeline, source, read)) as blocks:
        for block, written in blocks:
            out.write(written.text)
            out.flush()
            number += written.line_count
            for line, parts in written.split_lines:
                progress.print_message(
                    f"{source.name}, line {line:,}: is too long to be read at once, and was translated in "
                    f"{parts:,} parts"
                )
            if written.error is not None:
                raise InputError(written.error)
            done += block.byte_count
            progress.update(number, done)
    if number == 0:
        progress.print_message(f"{source.name}: is empty, there is nothing to translate")


def iterate_translated_blocks(
    pipeline: TranslationPipeline, source: LineSource, parse_line: LineParser
) -> Generator[tuple[LineBlock, TranslatedBlock], None, None]:
    """Blocks and what they became, in their order. None is held back while there is nothing more to read yet."""
    blocks = source.read_blocks(pipeline.block_lines, parse_line)
    if pipeline.max_pending_blocks == 0:
        yield from ((block, translate_block(pipeline, block.lines, block.first_index, source.name)) for block in blocks)
        return
    waiting: deque[tuple[LineBlock, Future[TranslatedBlock]]] = deque()
    problem, num_workers = None, choose_worker_count(pipeline)
    ahead = max(pipeline.max_pending_blocks, num_workers)
    long_input = source.total_bytes is not None and source.total_bytes >= MIN_WORKER_BYTES
    with (
        closing(make_worker_pool(pipeline, num_workers)) as workers,
        start_threads(ahead) as (threads, cancelled),
    ):
        try:
            for block in blocks:
                block_task = compact_block(block, source.name)
                use_workers = long_input or block.first_index >= MIN_WORKER_LINES
                waiting.append((block, threads.submit(workers.run, block_task, cancelled.is_set, use_workers)))
                while waiting and (len(waiting) > ahead or waiting[0][1].done() or not source.has_more()):
                    yield waiting[0][0], waiting.popleft()[1].result()
        except (InputError, CorpusError) as error:  # a line cannot be read: those before it can
            problem = error
        for block, task in waiting:
            yield block, task.result()
        if problem is not None:
            raise problem


# --- worker processes ----------------------------------------------------------------------------------------------

BlockTask = tuple[
    list[str | InputLine], int, str
]  # lines (plain ones as text: cheap to pickle), first index, file name


def choose_worker_count(pipeline: TranslationPipeline) -> int:
    """Return how many worker processes pay off; 0 if a worker would need the weights."""
    translator = pipeline.translator
    if translator.device.type == "cpu" or translator.engine == "ctranslate2" or pipeline.flags.alignment:
        return 0
    return min(MAX_WORKERS, (os.cpu_count() or 1) // 2) if isinstance(translator.model, Seq2Seq) else 0


def make_worker_pool(pipeline: TranslationPipeline, num_workers: int) -> TextWorkerPool[TranslatedBlock]:
    def run_here(task: BlockTask, should_stop: Callable[[], bool]) -> TranslatedBlock:
        return run_block_task(pipeline, task, should_stop)

    return TextWorkerPool(pipeline.translator, PipelineSetup(pipeline), run_here, num_workers)


def compact_block(block: LineBlock, name: str) -> BlockTask:
    return [line.text if line.is_plain else line for line in block.lines], block.first_index, name


def run_block_task(
    pipeline: TranslationPipeline, task: BlockTask, should_stop: Callable[[], bool] | None = None
) -> TranslatedBlock:
    texts, first_index, name = task
    lines = [InputLine(text=text) if isinstance(text, str) else text for text in texts]
    return translate_block(pipeline, lines, first_index, name, should_stop)


class PipelineSetup:
    """A pipeline as a worker gets it: everything but the weights."""

    def __init__(self, pipeline: TranslationPipeline) -> None:
        translator = pipeline.translator
        self.tokenizer, self.folder, self.config = translator.tokenizer, translator.folder, translator.model.config
        self.pipeline = replace(pipeline, translator=cast(Translator, None))

    def build_handler(self, engine: RemoteEngine) -> Callable[[BlockTask], TranslatedBlock]:
        with torch.device("meta"):  # only its config is used
            model = Seq2Seq(self.config).eval()
        translator = RemoteTranslator(model, self.tokenizer, folder=self.folder)
        translator.remote_engine = engine
        pipeline = replace(self.pipeline, translator=translator)
        return lambda task: run_block_task(pipeline, task)


class RemoteTranslator(Translator):
    """A translator whose searches run in the main process."""

    remote_engine: RemoteEngine

    def build_torch_engine(self, should_stop: Callable[[], bool] | None = None) -> Any:
        return self.remote_engine


@contextmanager
def start_threads(count: int) -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """Threads, and what tells them that nobody waits for them any more."""
    over, interval = threading.Event(), sys.getswitchinterval()
    pool = ThreadPoolExecutor(count, "attent texts")
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield pool, over
    finally:
        over.set()
        pool.shutdown(cancel_futures=True)
        sys.setswitchinterval(interval)


@dataclass(frozen=True, kw_only=True)
class TranslatedBlock:
    """What the lines of a block became."""

    text: str
    line_count: int  # of the source that are in it
    split_lines: list[
        tuple[int, int]
    ]  # which were too long to be read at once, from 1, and into how many parts they were cut
    error: str | None  # of the line behind these, if there is one


def translate_block(
    pipeline: TranslationPipeline,
    lines: Sequence[InputLine],
    first_index: int,
    name: str,
    should_stop: Callable[[], bool] | None = None,
) -> TranslatedBlock:
    output = pipeline.output_format
    found, fault = translate_until_error(pipeline, lines, first_index, name, should_stop)
    rows = [
        restore_whitespace(row, given.text) if output.is_plain else row
        for number, (given, translation) in enumerate(zip(lines, found, strict=False), first_index)
        for row in output.format_lines(translation, number)
    ]
    long = (
        []
        if pipeline.flags.split_sentences
        else [(n, one.segment_count) for n, one in enumerate(found, first_index + 1) if one.segment_count > 1]
    )
    return TranslatedBlock(
        text="".join(f"{row}\n" for row in rows), line_count=len(found), split_lines=long, error=fault
    )


def translate_until_error(
    pipeline: TranslationPipeline,
    lines: Sequence[InputLine],
    first_index: int,
    name: str,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[list[Translation], str | None]:
    """Of all lines at once; where that cannot be done, of those before the one that is at fault, and what it is."""
    try:
        return pipeline.translate(lines, first_index, should_stop), None
    except ValueError as error:
        if len(lines) == 1:
            return [], f"{name}, line {first_index + 1:,}: {use_flag_names(str(error))}"
        half = len(lines) // 2
        found, fault = translate_until_error(pipeline, lines[:half], first_index, name, should_stop)
        if fault is not None:
            return found, fault
        more, fault = translate_until_error(pipeline, lines[half:], first_index + half, name, should_stop)
        return [*found, *more], fault


def restore_whitespace(line: str, source: str) -> str:
    """With the blanks around it that the source has: so a text keeps its layout."""
    text = source.strip(" \t")
    before, _, behind = source.partition(text) if text and line else ("", "", "")
    return f"{before}{line}{behind}"


def check_word_counts(lines: Sequence[InputLine]) -> None:
    words = max((len(line.text.split()) for line in lines), default=0)
    if words > MAX_ALIGNED_WORDS:
        raise InputError(
            f"a line must have at most {MAX_ALIGNED_WORDS:,} words to be aligned, but this one has {words:,}; cut it, or "
            f"leave --alignment out"
        )


# --- files of translators ------------------------------------------------------------------------------------------


def pretranslate_document(pipeline: TranslationPipeline, content: bytes, file: Path, progress: ProgressDisplay) -> None:
    flags = pipeline.flags
    progress.start(None, quiet=sys.stdout.isatty() and flags.output is None)
    filled = pretranslate_file(
        content,
        str(file),
        lambda texts: translate_document_texts(pipeline, texts, progress),
        translate_constrained=lambda texts, needed: translate_with_required(pipeline, texts, needed, progress),
        src=flags.src or pipeline.languages[0],
        tgt=flags.tgt or pipeline.languages[1],
    )
    progress.clear()
    if flags.in_place or (flags.output is not None and str(flags.output) != "-"):
        place = file if flags.in_place or flags.output is None else flags.output
        write_atomic(place.expanduser().resolve(), filled.content)
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(filled.content)
    report_pretranslation(filled, file, progress.print_message)


def translate_document_texts(
    pipeline: TranslationPipeline, texts: Sequence[str], progress: ProgressDisplay
) -> list[str]:
    found: list[str] = []
    for first in range(0, len(texts), pipeline.block_lines):
        some = pipeline.translate([InputLine(text=text) for text in texts[first : first + pipeline.block_lines]], first)
        found += [one.text for one in some]
        progress.update(len(found), 0, total_lines=len(texts))
    return found


def translate_with_required(
    pipeline: TranslationPipeline, texts: Sequence[str], required: Sequence[tuple[str, ...]], progress: ProgressDisplay
) -> list[list[str]]:
    """Translations with all that is needed, as many as there are beams: what else must be right is not ours to know."""
    search = pipeline.options
    if not search.sampling and not pipeline.flags.mbr_candidates:
        search = replace(search, n_best=search.beam_size)
    firm = replace(pipeline, options=search)
    lines = [InputLine(text=text, required=must) for text, must in zip(texts, required, strict=True)]
    found: list[list[str]] = []
    for first in range(0, len(lines), pipeline.block_lines):
        found += firm.translate_n_best(lines[first : first + pipeline.block_lines], first)
        progress.update(len(found), 0, total_lines=len(lines))
    return found


def report_pretranslation(filled: PretranslateResult, file: Path, notify: Callable[[str], None]) -> None:
    notify(f"{file}: filled {filled.filled_count:,}, kept {filled.existing_count:,}, left {len(filled.skipped):,}")
    for one in filled.skipped[:MAX_LISTED_SKIPS]:
        notify(f"{file}, line {one.line:,}: left, because {one.reason}: {escape_invisible(one.source[:60])}")
    if len(filled.skipped) > MAX_LISTED_SKIPS:
        notify(f"... and {len(filled.skipped) - MAX_LISTED_SKIPS:,} more")


# --- what a person sees --------------------------------------------------------------------------------------------


class ProgressDisplay:
    """Messages, and at a terminal a line that tells how far it is, which is gone at the end."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.is_live = False
        self.is_drawn = False
        self.total_bytes: int | None = None
        self.next_redraw = clock()
        self.samples: deque[ProgressSample] = deque(
            [ProgressSample(self.next_redraw, 0, 0.0)]
        )  # the first is RECENT old, if it can be

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def start(self, total_bytes: int | None, *, quiet: bool) -> None:
        """`quiet`: the translations themselves are seen, and tell how far it is."""
        self.is_live = self.stream.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self.total_bytes, self.samples = total_bytes, deque([ProgressSample(self.clock(), 0, 0.0)])

    def print_message(self, message: str) -> None:
        self.clear()
        print(f"attent: {message}", file=self.stream, flush=True)

    def update(self, lines: int, done_bytes: int, total_lines: int | None = None) -> None:
        now = self.clock()
        if not self.is_live or now < self.next_redraw:
            return
        part = lines / total_lines if total_lines else done_bytes / self.total_bytes if self.total_bytes else 0.0
        if lines < self.samples[-1].lines:  # other texts
            self.samples = deque([replace(self.samples[-1], lines=0, fraction=0.0)])
        self.samples.append(ProgressSample(now, lines, min(part, 1.0)))
        while now - self.samples[1].time >= SPEED_WINDOW:
            self.samples.popleft()
        self.stream.write(f"\r\x1b[K{format_progress(self.samples[0], self.samples[-1])}")
        self.stream.flush()
        self.is_drawn, self.next_redraw = True, now + REDRAW_INTERVAL

    def clear(self) -> None:
        if self.is_drawn:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self.is_drawn = False


@dataclass(frozen=True)
class ProgressSample:
    """How far it was."""

    time: float
    lines: int
    fraction: float  # of all; 0: nobody knows


def format_progress(before: ProgressSample, now: ProgressSample) -> str:
    """`1,024 lines, 210 a second, 40%, 12 s left`"""
    seconds = max(now.time - before.time, 1e-3)
    speed = (now.lines - before.lines) / seconds
    told = f"{now.lines:,} lines, {speed:,.{0 if speed >= 10 else 1}f} a second"
    if now.fraction <= before.fraction:
        return told if not now.fraction else f"{told}, {now.fraction:.0%}"
    left = seconds * (1 - now.fraction) / (now.fraction - before.fraction)
    return f"{told}, {now.fraction:.0%}, {format_duration(left)} left"
