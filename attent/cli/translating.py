"""What `attent translate` does: lines in blocks to the translator and out again in their order, files of translators
filled, and what a person should know told on stderr.

What was asked for is `translate`'s, where lines come from `reading`'s, what they become `output`'s.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TextIO

from cyclopts import CycloptsError

from attent import settings
from attent.cli.data import visible
from attent.cli.output import Output
from attent.cli.reading import Block, Line, Read, Source, from_json, opened, plain, source_of
from attent.cli.searching import TranslateError, asked_language, in_flags, search_of, translator_of
from attent.cli.translate import Flags
from attent.data.fill import Filled, fill, kind_of
from attent.data.pairs import CorpusError
from attent.decode import Control, Glossary, Search, Translation, Translator
from attent.decode.control import FREE
from attent.train.card import duration

CPU_BLOCK, GPU_BLOCK = 256, 4096  # lines that are translated together
AHEAD = 3  # blocks at work at once on a GPU: it searches for one, while others' texts become ids and ids become texts
SWITCH = 1e-4  # seconds after which Python lets another thread go on: with 5 ms, as usual, the GPU would wait for texts
REDRAW = 0.25  # seconds between looks at the progress
RECENT = 5.0  # seconds of which the speed is told: how long the start took says nothing of what is to come
MOST_LEFT = 20  # units that were not filled, told one by one
MOST_ALIGNED = 2000  # words of a line whose alignment is asked for: its weights are as many as words times words


def start(model: Path, file: Path | None, flags: Flags) -> None:
    """What is given is read first: a wrong name is told before a large model is read."""
    utf8(sys.stdout)
    with opened(file, sys.stdin.buffer) as stream, Screen(sys.stderr) as screen:
        check_output(file, flags)
        check_filling(file, flags)
        search, glossary = asked_search(flags), Glossary.read(flags.glossary) if flags.glossary else None
        content = stream.read() if is_filled(file) else b""
        translator = translator_of((model, *flags.ensemble), flags, screen.tell)
        tags = translator.tokenizer.source.tags
        to = asked_language(flags.tgt if tags and flags.to is None else flags.to, tags, model)
        translator.translate([], search)  # its engine is made ready: what is wrong with it is no fault of a line
        gc.freeze()  # all this stays: to look through it for garbage again and again takes as long as the texts do
        desk = Desk(translator=translator, search=search, to=to, glossary=glossary, flags=flags)
        if file is not None and is_filled(file):
            fill_file(desk, content, file, screen)
        elif flags.interactive or (file is None and stream.isatty() and sys.stdout.isatty() and flags.out is None):
            from attent.cli.interactive import talk

            talk(desk)
        else:
            if file is None and stream.isatty():
                screen.tell("type text, a sentence a line; Ctrl-D ends")
            with opened_for(flags.out) as out:
                translate_lines(desk, source_of(stream, file), out, screen)


def asked_search(flags: Flags) -> Search:
    try:
        return search_of(flags, flags.risk if not flags.sample else 1)
    except ValueError as error:
        raise CycloptsError(msg=in_flags(str(error)), command_chain=("translate",)) from error


def utf8(stream: TextIO) -> None:
    """As the input, whatever the terminal's language is."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", newline="\n")


def is_filled(file: Path | None) -> bool:
    """Is it more than lines of text?"""
    return file is not None and kind_of(file.name) not in (None, "text")


def check_output(file: Path | None, flags: Flags) -> None:
    """Nothing is written over what is read, unless it is asked for."""
    if flags.in_place and not is_filled(file):
        raise TranslateError(f"{file}: --in-place is for .po, .xlf, .tmx and .md files; give --output another name")
    if flags.out is None:
        return
    out = flags.out.expanduser()
    if not out.absolute().parent.is_dir() or out.is_dir():
        raise TranslateError(
            f"{flags.out}: must be a file in a folder that is there, but is not; make the folder first"
        )
    if file is not None and out.exists() and os.path.samefile(file.expanduser(), out):
        raise TranslateError(f"{flags.out}: must be another file than the one that is read; or take --in-place")


def check_filling(file: Path | None, flags: Flags) -> None:
    """A file of translators is given back as one."""
    asked = {
        "--n-best": flags.n_best > 1,
        "--output-type": flags.output_type != "text",
        "--with-score": flags.with_score,
        "--alignment": flags.alignment is not None,
        "--input-type": flags.input_type != "text",
    }
    wrong = [name for name, given in asked.items() if given]
    if is_filled(file) and wrong:
        raise CycloptsError(
            msg=f"{file} is filled, and comes out as what it is: leave {wrong[0]} out", command_chain=("translate",)
        )


def opened_for(out: Path | None) -> AbstractContextManager[TextIO]:
    if out is None or str(out) == "-":
        return nullcontext(sys.stdout)
    return open(out.expanduser(), "w", encoding="utf-8", newline="\n")


# --- who translates ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Desk:
    """A translator, with all that was asked for."""

    translator: Translator
    search: Search
    to: str | None
    glossary: Glossary | None
    flags: Flags

    @cached_property
    def languages(self) -> tuple[str | None, str | None]:
        """That the model was trained for, where its folder says so."""
        path = (self.translator.folder or Path()) / "run.toml"
        told = settings.read_tables(path).get("data", {}) if self.translator.folder and path.exists() else {}
        source, target = told.get("src"), self.to or told.get("tgt")
        return source or None, target if isinstance(target, str) and "," not in target else None

    @cached_property
    def control(self) -> Control:
        """Of every text."""
        asked = Control(prefix=self.flags.prefix, demanded=self.flags.must, forbidden=self.flags.must_not)
        return FREE if asked == FREE else asked

    @property
    def output(self) -> Output:
        flags = self.flags
        return Output(
            type=flags.output_type,
            n_best=flags.n_best,
            with_score=flags.with_score,
            alignment=flags.alignment,
            formula=self.search.formula,
        )

    @property
    def block(self) -> int:
        return CPU_BLOCK if self.translator.device.type == "cpu" else GPU_BLOCK

    @property
    def ahead(self) -> int:
        return 0 if self.translator.device.type == "cpu" else AHEAD

    def control_of(self, line: Line) -> Control:
        """Of a line with wishes of its own."""
        base = self.control
        if line.plain:
            return base
        return Control(
            prefix=base.prefix if line.prefix is None else line.prefix,
            demanded=(*base.demanded, *line.must),
            forbidden=(*base.forbidden, *line.must_not),
        )

    def translate(
        self, lines: Sequence[Line], first: int = 0, stop: Callable[[], bool] | None = None
    ) -> list[Translation]:
        """`first` is the place of the first line among all: chance depends on it."""
        if self.flags.alignment:
            check_words(lines)
        return self.translator.translate(
            [line.text for line in lines],
            self.search,
            to=self.to,
            control=[self.control_of(line) for line in lines],
            glossary=self.glossary,
            alignment=self.flags.alignment is not None,
            risk=self.flags.risk,
            sentences=self.flags.sentences,
            language=self.flags.src,
            guard=self.flags.guard,
            first=first,
            stop=stop,
        )

    def candidates(self, lines: Sequence[Line], first: int) -> list[list[str]]:
        """The texts of the n best of each line; none of one that cannot have all that it must."""
        try:
            found = self.translate(lines, first)
        except ValueError:
            if len(lines) == 1:
                return [[]]
            return [some for number, line in enumerate(lines, first) for some in self.candidates([line], number)]
        return [[candidate.text for candidate in one.n_best] for one in found]


# --- lines ---------------------------------------------------------------------------------------------------------


def translate_lines(desk: Desk, source: Source, out: TextIO, screen: Screen) -> None:
    """Each block is written as soon as it is translated, so that what is done stays done."""
    read = from_json if desk.flags.input_type == "json" else plain
    number, done = 0, 0
    screen.start(source.size, quiet=out.isatty())
    with closing(at_work(desk, source, read)) as blocks:
        for block, written in blocks:
            out.write(written.text)
            out.flush()
            number += written.lines
            for line, parts in written.cut:
                screen.tell(
                    f"{source.name}, line {line:,}: is too long to be read at once, and was translated in "
                    f"{parts:,} parts"
                )
            if written.fault is not None:
                raise TranslateError(written.fault)
            done += block.bytes
            screen.show(number, done)
    if number == 0:
        screen.tell(f"{source.name}: is empty, there is nothing to translate")


def at_work(desk: Desk, source: Source, read: Read) -> Generator[tuple[Block, Written], None, None]:
    """Blocks and what they became, in their order. None is held back while there is nothing more to read yet."""
    blocks = source.blocks(desk.block, read)
    if desk.ahead == 0:
        yield from ((block, write_lines(desk, block.lines, block.first, source.name)) for block in blocks)
        return
    from attent.cli.clerks import Office, clerks_for

    waiting: deque[tuple[Block, Future[Written]]] = deque()
    problem, clerks = None, clerks_for(desk)
    ahead = max(desk.ahead, clerks)
    with closing(Office(desk, source, clerks)) as office, workers(ahead) as (pool, over):
        try:
            for block in blocks:
                waiting.append((block, pool.submit(office.write, block, over.is_set)))
                while waiting and (len(waiting) > ahead or waiting[0][1].done() or not source.ready()):
                    yield waiting[0][0], waiting.popleft()[1].result()
        except (TranslateError, CorpusError) as error:  # a line cannot be read: those before it can
            problem = error
        for block, task in waiting:
            yield block, task.result()
        if problem is not None:
            raise problem


@contextmanager
def workers(count: int) -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """Threads, and what tells them that nobody waits for them any more."""
    over, interval = threading.Event(), sys.getswitchinterval()
    pool = ThreadPoolExecutor(count, "attent texts")
    sys.setswitchinterval(SWITCH)
    try:
        yield pool, over
    finally:
        over.set()
        pool.shutdown(cancel_futures=True)
        sys.setswitchinterval(interval)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the lines of a block became."""

    text: str
    lines: int  # of the source that are in it
    cut: list[tuple[int, int]]  # which were too long to be read at once, from 1, and into how many parts they were cut
    fault: str | None  # of the line behind these, if there is one


def write_lines(
    desk: Desk, lines: Sequence[Line], first: int, name: str, stop: Callable[[], bool] | None = None
) -> Written:
    output = desk.output
    found, fault = translations(desk, lines, first, name, stop)
    rows = [
        indented(row, given.text) if output.plain else row
        for number, (given, translation) in enumerate(zip(lines, found, strict=False), first)
        for row in output.lines(translation, number)
    ]
    long = [] if desk.flags.sentences else [(n, one.parts) for n, one in enumerate(found, first + 1) if one.parts > 1]
    return Written(text="".join(f"{row}\n" for row in rows), lines=len(found), cut=long, fault=fault)


def translations(
    desk: Desk, lines: Sequence[Line], first: int, name: str, stop: Callable[[], bool] | None = None
) -> tuple[list[Translation], str | None]:
    """Of all lines at once; where that cannot be done, of those before the one that is at fault, and what it is."""
    try:
        return desk.translate(lines, first, stop), None
    except ValueError as error:
        if len(lines) == 1:
            return [], f"{name}, line {first + 1:,}: {in_flags(str(error))}"
        half = len(lines) // 2
        found, fault = translations(desk, lines[:half], first, name, stop)
        if fault is not None:
            return found, fault
        more, fault = translations(desk, lines[half:], first + half, name, stop)
        return [*found, *more], fault


def indented(line: str, like: str) -> str:
    """With the blanks around it that the source has: so a text keeps its layout."""
    text = like.strip(" \t")
    before, _, behind = like.partition(text) if text and line else ("", "", "")
    return f"{before}{line}{behind}"


def check_words(lines: Sequence[Line]) -> None:
    words = max((len(line.text.split()) for line in lines), default=0)
    if words > MOST_ALIGNED:
        raise TranslateError(
            f"a line must have at most {MOST_ALIGNED:,} words to be aligned, but this one has {words:,}; cut it, or "
            f"leave --alignment out"
        )


# --- files of translators ------------------------------------------------------------------------------------------


def fill_file(desk: Desk, content: bytes, file: Path, screen: Screen) -> None:
    flags = desk.flags
    screen.start(None, quiet=sys.stdout.isatty() and flags.out is None)
    filled = fill(
        content,
        str(file),
        lambda texts: texts_of(desk, texts, screen),
        insist=lambda texts, needed: candidates_of(desk, texts, needed, screen),
        src=flags.src or desk.languages[0],
        tgt=flags.tgt or desk.languages[1],
    )
    screen.clear()
    if flags.in_place or (flags.out is not None and str(flags.out) != "-"):
        place = file if flags.in_place or flags.out is None else flags.out
        write_over(place.expanduser().resolve(), filled.content)
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(filled.content)
    report(filled, file, screen.tell)


def write_over(place: Path, content: bytes) -> None:
    """Aside first, under a name that nothing else has: this is a person's folder."""
    handle, aside = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        if place.exists():
            shutil.copymode(place, aside)
        else:
            os.chmod(aside, 0o666 & ~umask())
        os.replace(aside, place)
    except BaseException:
        os.unlink(aside)
        raise


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def texts_of(desk: Desk, texts: Sequence[str], screen: Screen) -> list[str]:
    found: list[str] = []
    for first in range(0, len(texts), desk.block):
        some = desk.translate([Line(text=text) for text in texts[first : first + desk.block]], first)
        found += [one.text for one in some]
        screen.show(len(found), 0, of=len(texts))
    return found


def candidates_of(
    desk: Desk, texts: Sequence[str], needed: Sequence[tuple[str, ...]], screen: Screen
) -> list[list[str]]:
    """Translations with all that is needed, as many as there are beams: what else must be right is not ours to know."""
    search = desk.search
    if not search.sampling and not desk.flags.risk:
        search = replace(search, n_best=search.beam_size)
    firm = replace(desk, search=search)
    lines = [Line(text=text, must=must) for text, must in zip(texts, needed, strict=True)]
    found: list[list[str]] = []
    for first in range(0, len(lines), desk.block):
        found += firm.candidates(lines[first : first + desk.block], first)
        screen.show(len(found), 0, of=len(lines))
    return found


def report(filled: Filled, file: Path, tell: Callable[[str], None]) -> None:
    tell(f"{file}: filled {filled.filled:,}, kept {filled.kept:,}, left {len(filled.left):,}")
    for one in filled.left[:MOST_LEFT]:
        tell(f"{file}, line {one.line:,}: left, because {one.reason}: {visible(one.source[:60])}")
    if len(filled.left) > MOST_LEFT:
        tell(f"... and {len(filled.left) - MOST_LEFT:,} more")


# --- what a person sees --------------------------------------------------------------------------------------------


class Screen:
    """Messages, and at a terminal a line that tells how far it is, which is gone at the end."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.live = False
        self.drawn = False
        self.size: int | None = None
        self.next = clock()
        self.seen: deque[Seen] = deque([Seen(self.next, 0, 0.0)])  # the first is RECENT old, if it can be

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def start(self, size: int | None, *, quiet: bool) -> None:
        """`quiet`: the translations themselves are seen, and tell how far it is."""
        self.live = self.stream.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self.size, self.seen = size, deque([Seen(self.clock(), 0, 0.0)])

    def tell(self, sentence: str) -> None:
        self.clear()
        print(f"attent: {sentence}", file=self.stream, flush=True)

    def show(self, lines: int, done: int, of: int | None = None) -> None:
        now = self.clock()
        if not self.live or now < self.next:
            return
        part = lines / of if of else done / self.size if self.size else 0.0
        if lines < self.seen[-1].lines:  # other texts
            self.seen = deque([replace(self.seen[-1], lines=0, part=0.0)])
        self.seen.append(Seen(now, lines, min(part, 1.0)))
        while now - self.seen[1].time >= RECENT:
            self.seen.popleft()
        self.stream.write(f"\r\x1b[K{progress(self.seen[0], self.seen[-1])}")
        self.stream.flush()
        self.drawn, self.next = True, now + REDRAW

    def clear(self) -> None:
        if self.drawn:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self.drawn = False


@dataclass(frozen=True)
class Seen:
    """How far it was."""

    time: float
    lines: int
    part: float  # of all; 0: nobody knows


def progress(before: Seen, now: Seen) -> str:
    """`1,024 lines, 210 a second, 40%, 12 s left`"""
    seconds = max(now.time - before.time, 1e-3)
    speed = (now.lines - before.lines) / seconds
    told = f"{now.lines:,} lines, {speed:,.{0 if speed >= 10 else 1}f} a second"
    if now.part <= before.part:
        return told if not now.part else f"{told}, {now.part:.0%}"
    left = seconds * (1 - now.part) / (now.part - before.part)
    return f"{told}, {now.part:.0%}, {duration(left)} left"
