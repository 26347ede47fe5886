"""Long texts on a GPU: it finds translations faster than one Python turns text into ids and ids into text.

A clerk is a process that has the tokenizer and all that was asked for, but no weights. It is given lines, asks for
every search that they need, and gives back lines of output. Clerks take seconds to come, so they are called when there
is work for them, and until then it is done here; here is also done what is left of one that goes away.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from attent.cli.reading import Block, Line, Source
from attent.cli.translating import Desk, Written, write_lines
from attent.data.crew import deaf, no_main_script, obey
from attent.decode import Translator
from attent.decode.lots import Found, Lot, No, in_lots
from attent.decode.options import Hypothesis, Job, Search
from attent.models import Seq2Seq

LONG = 4 * 2**20  # bytes of a text for which clerks are worth their coming; where its size is not known,
FROM_LINE = 16_384  # they are called when there are so many lines
MOST = 6  # clerks: as many keep the fastest search of an H200 busy
READY = "ready"
PATIENCE = 5  # seconds for a clerk to go


def clerks_for(desk: Desk) -> int:
    """How many are worth having; none where they could not do without the weights."""
    model, device, quick = desk.translator.model, desk.translator.device, desk.translator.engine == "ctranslate2"
    if device.type == "cpu" or quick or not isinstance(model, Seq2Seq) or desk.flags.alignment:
        return 0
    return min(MOST, (os.cpu_count() or 1) // 2)


class Office:
    """Whoever is free takes the next block; if nobody is, it is done here."""

    def __init__(self, desk: Desk, source: Source, count: int) -> None:
        self.desk, self.name, self.count = desk, source.name, count
        self.from_line = 0 if source.size is not None and source.size >= LONG else FROM_LINE
        self.all: list[Clerk] = []
        self.called: list[Clerk] = []  # who are not here yet
        self.free: list[Clerk] = []
        self.lock = threading.Lock()

    def write(self, block: Block, stop: Callable[[], bool]) -> Written:
        clerk = self._one(block)
        while clerk is not None:
            with suppress(OSError, EOFError):
                done = clerk.write(block, self.name, stop)
                with self.lock:
                    self.free.append(clerk)
                return done
            clerk = self._one(block)  # that one has gone
        return write_lines(self.desk, block.lines, block.first, self.name, stop)

    def _one(self, block: Block) -> Clerk | None:
        with self.lock:
            calls, self.count = (self.count, 0) if block.first >= self.from_line else (0, self.count)
        if calls:
            self._call(calls)
        with self.lock:
            come = [clerk for clerk in self.called if clerk.has_come()]
            self.called = [clerk for clerk in self.called if clerk not in come]
            self.free += come
            return self.free.pop() if self.free else None

    def _call(self, count: int) -> None:
        """As many as come: where a process cannot be started, there are fewer."""
        task = ForkingPickler.dumps(Task.of(self.desk))
        with suppress(OSError):
            for _ in range(count):
                clerk = Clerk(self.desk.translator, task)
                with self.lock:
                    self.all.append(clerk)
                    self.called.append(clerk)

    def close(self) -> None:
        """Nobody has work any more."""
        for clerk in self.all:
            clerk.connection.close()
        for clerk in self.called:
            clerk.process.terminate()
        for clerk in self.all:
            clerk.process.join(PATIENCE)


class Clerk:
    """The side of it that has the weights."""

    def __init__(self, translator: Translator, task: Any) -> None:
        self.translator, self.task = translator, task
        context = get_context("spawn")  # a process with a GPU cannot be forked
        self.connection, theirs = context.Pipe()
        # With next to nothing for arguments: whoever starts a process waits until it has read them.
        self.process = context.Process(target=serve, args=(theirs,), name="attent clerk", daemon=True)
        try:
            with no_main_script(), deaf():
                self.process.start()
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()

    def has_come(self) -> bool:
        """If so, it is told what it must know."""
        with suppress(OSError, EOFError):
            if self.connection.poll() and self.connection.recv() == READY:
                self.connection.send_bytes(self.task)
                return True
        return False

    def write(self, block: Block, name: str, stop: Callable[[], bool]) -> Written:
        lines = [line.text if line.plain else line for line in block.lines]
        self.connection.send((lines, block.first, name))
        while not isinstance(told := self.connection.recv(), Written):
            asked, search = told
            self.connection.send(self._found(asked, search, stop))
        return told

    def _found(self, asked: Lot | list[tuple[Any, ...]], search: Search, stop: Callable[[], bool]) -> object:
        try:
            if isinstance(asked, Lot):
                return self.translator.search_lot(asked, search, stop)
            found = self.translator.search([unpacked(*row) for row in asked], search, stop)
        except ValueError as error:  # what a line asks for cannot be done: it is told which line
            return error
        return [[(one.ids, one.log_prob, one.score, one.ended) for one in some] for some in found]


def packed(job: Job) -> tuple[Any, ...]:
    """As few objects as can be: thousands of jobs go from process to process at once."""
    more = job.prefix, job.demanded, job.forbidden, job.whole_words
    return job.source, job.number, job.limit, job.no_loops, more if any(more) else None


def unpacked(source: Sequence[int], number: int, limit: int, no_loops: bool, more: tuple[Any, ...] | None) -> Job:
    if more is None:
        return Job(source=source, number=number, limit=limit, no_loops=no_loops)
    prefix, demanded, forbidden, whole_words = more
    return Job(
        source=source, prefix=prefix, demanded=demanded, forbidden=forbidden, whole_words=whole_words, number=number,
        limit=limit, no_loops=no_loops,
    )  # fmt: skip


# --- in the other process ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a clerk must know."""

    desk: dict[str, Any]  # but for the translator
    tokenizer: Any
    config: Any
    folder: Any

    @classmethod
    def of(cls, desk: Desk) -> Task:
        facts = {name: value for name, value in vars(desk).items() if name in ("search", "to", "glossary", "flags")}
        translator = desk.translator
        return cls(desk=facts, tokenizer=translator.tokenizer, config=translator.model.config, folder=translator.folder)


class Remote:
    """An engine that asks the process that has the weights: where that has a lane, for lots, which are little work
    there."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.without: set[Search] = set()  # that have no lane

    def search(self, jobs: Sequence[Job], search: Search) -> Iterator[tuple[int, list[Hypothesis]]]:
        left = set(range(len(jobs)))
        if search not in self.without and not any(job.prefix or job.demanded or job.forbidden for job in jobs):
            for place, some in in_lots(jobs, search, lambda lot: self._of_lot(lot, search)):
                left.remove(place)
                yield place, some
        if left:
            yield from self._of_jobs(jobs, sorted(left), search)

    def _of_lot(self, lot: Lot, search: Search) -> Found | No:
        found: Found | No = self._asked(lot, search)
        if found is No.LANE:
            self.without.add(search)
        return found

    def _of_jobs(
        self, jobs: Sequence[Job], places: Sequence[int], search: Search
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        found = self._asked([packed(jobs[place]) for place in places], search)
        for place, some in zip(places, found, strict=True):
            yield place, [Hypothesis(ids=ids, log_prob=p, score=score, ended=e) for ids, p, score, e in some]

    def _asked(self, what: object, search: Search) -> Any:
        self.connection.send((what, search))
        found = self.connection.recv()
        if isinstance(found, ValueError):
            raise found
        return found


class Asking(Translator):
    """A translator whose only engine is elsewhere."""

    remote: Remote

    def torch_engine(self, stop: Callable[[], bool] | None = None) -> Any:
        return self.remote


def serve(connection: Connection) -> None:
    """Until nobody asks any more."""
    obey()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        connection.send(READY)
        desk = desk_of(connection.recv(), connection)
        gc.freeze()  # as who has called this
        while True:
            lines, first, name = connection.recv()
            given = [Line(text=line) if isinstance(line, str) else line for line in lines]
            connection.send(write_lines(desk, given, first, name))


def desk_of(task: Task, connection: Connection) -> Desk:
    with torch.device("meta"):  # its shape is known, and nothing of it is needed
        model = Seq2Seq(task.config).eval()
    translator = Asking(model, task.tokenizer, folder=task.folder)
    translator.remote = Remote(connection)
    return Desk(translator=translator, **task.desk)
