"""Processes that have no weights write what the one that has them would write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from attent.cli import clerks
from attent.cli.clerks import Office, clerks_for, packed, unpacked
from attent.cli.reading import Block, Line, Source
from attent.cli.translate import Flags
from attent.cli.translating import Desk, write_lines
from attent.decode import Search, Translator
from attent.decode.lots import Found, Lot, No
from attent.decode.options import Job
from tests.decode.toys import as_found
from tests.text.corpus import lines as corpus_lines
from tests.text.corpus import tokenizer
from tests.train.toys import model

WAIT = 60  # seconds until a process must have come
PLAIN = [*(Line(text=text) for text in corpus_lines()[0][:4]), Line(text=""), Line(text="  a dog "), Line(text="a dog")]
WISHES = [Line(text="a dog", prefix="ein", must=("Hund",)), Line(text="a man", must_not=("Mann",))]
LONG = [Line(text="a dog sees a man. " * 60)]
WRONG = [Line(text="a dog"), Line(text="a man", must=("",)), Line(text="a dog")]


@pytest.fixture(scope="module")
def desk() -> Desk:
    translator = Translator(model().eval(), tokenizer())
    search = Search(n_best=2, beam_size=2, max_length=12)
    return Desk(translator=translator, search=search, to="de", glossary=None, flags=Flags(n_best=2))


@pytest.fixture(scope="module")
def office(desk: Desk) -> Iterator[Office]:
    """With one clerk who has come."""
    made = Office(desk, long_text(), 1)
    try:
        asked(made, PLAIN)  # the first is done here, and calls for help
        (clerk,) = made.called
        assert clerk.connection.poll(WAIT)
        yield made
    finally:
        made.close()
        assert not any(clerk.process.is_alive() for clerk in made.all)


def asked(office: Office, lines: list[Line]) -> object:
    return office.write(Block(lines=lines, first=10, bytes=1), lambda: False)


@pytest.mark.parametrize("lines", [PLAIN, WISHES, LONG, WRONG], ids=["plain", "wishes", "long", "wrong"])
def test_a_clerk_writes_what_is_written_here(lines: list[Line], desk: Desk, office: Office) -> None:
    searched = []
    search = desk.translator.search
    desk.translator.search = lambda *given: searched.append(1) or search(*given)  # type: ignore[method-assign, func-returns-value]
    try:
        found = asked(office, lines)
    finally:
        desk.translator.search = search  # type: ignore[method-assign]
    assert found == write_lines(desk, lines, 10, "text")
    assert searched, "no clerk has asked for it"
    assert lines is not WRONG or "text, line 12: " in found.fault  # type: ignore[attr-defined]
    assert lines is not LONG or found.cut[0][0] == 11  # type: ignore[attr-defined]


def test_a_clerk_asks_with_lots_where_these_are_taken(desk: Desk) -> None:
    lots: list[Lot] = []

    refusals: list[No] = []

    def taken(lot: Lot, search: Search, stop: object) -> Found | No:
        """As a lane would, but with the search."""
        lots.append(lot)
        if refusals:
            return refusals.pop(0)
        some = [
            Job(source=lot.ids[first : first + width].tolist(), limit=int(limit), no_loops=bool(no_loops))
            for first, width, limit, no_loops in zip(lot.memory, lot.widths, lot.limits, lot.no_loops, strict=True)
        ]
        found = [one for best in desk.translator.search(some, search) for one in best]
        assert len(found) == 2 * len(some)
        return as_found(found)

    made = Office(desk, long_text(), 1)
    desk.translator.search_lot = taken  # type: ignore[method-assign, assignment]
    try:
        asked(made, PLAIN)
        assert made.called[0].connection.poll(WAIT)
        lots.clear()
        assert asked(made, PLAIN) == write_lines(desk, PLAIN, 10, "text")
        assert [len(lot) for lot in lots] == [5]  # each different text once, and none for nothing
        assert asked(made, WISHES) == write_lines(desk, WISHES, 10, "text")
        assert len(lots) == 1
        refusals += [No.ROOM, No.LANE]
        assert asked(made, PLAIN) == write_lines(desk, PLAIN, 10, "text")
        assert [len(lot) for lot in lots[1:]] == [5, 2]  # and then it is told that there is no lane
        assert asked(made, PLAIN) == write_lines(desk, PLAIN, 10, "text")
        assert len(lots) == 3
    finally:
        del desk.translator.search_lot
        made.close()


def long_text() -> Source:
    return Source(name="text", chunks=[], ready=lambda: True, size=clerks.LONG)


@pytest.mark.parametrize("come", [True, False], ids=["come", "on its way"])
def test_what_a_clerk_leaves_is_done_here(come: bool, desk: Desk) -> None:
    made = Office(desk, long_text(), 1)
    try:
        asked(made, PLAIN)
        (clerk,) = made.called
        assert not come or clerk.connection.poll(WAIT)
        clerk.process.kill()
        clerk.process.join(WAIT)
        assert asked(made, PLAIN) == write_lines(desk, PLAIN, 10, "text")
        assert asked(made, PLAIN) == write_lines(desk, PLAIN, 10, "text")
        assert not made.free
    finally:
        made.close()


def test_where_no_process_can_be_started_it_is_done_here(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", refused)
    made = Office(desk, long_text(), 2)
    assert asked(made, PLAIN) == write_lines(desk, PLAIN, 10, "text")
    assert made.all == []
    made.close()


def test_nobody_is_called_for_a_short_text(desk: Desk) -> None:
    made = Office(desk, Source(name="text", chunks=[], ready=lambda: True, size=clerks.LONG - 1), 1)
    asked(made, PLAIN)
    assert not made.all
    assert made.from_line == clerks.FROM_LINE


def test_one_who_has_not_come_is_not_waited_for(desk: Desk) -> None:
    made = Office(desk, long_text(), 1)
    asked(made, PLAIN)
    began = time.monotonic()
    made.close()
    assert not made.all[0].process.is_alive()
    assert time.monotonic() - began < clerks.PATIENCE


def test_there_are_none_on_a_cpu_or_where_weights_are_needed_for_more(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clerks_for(desk) == 0
    monkeypatch.setattr(Translator, "device", type("Gpu", (), {"type": "cuda"})())
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert clerks_for(desk) == clerks.MOST
    assert clerks_for(replace(desk, flags=Flags(alignment="hard"))) == 0
    assert clerks_for(replace(desk, translator=Translator(model(), tokenizer(), engine="ctranslate2"))) == 0
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert clerks_for(desk) == 0


def test_a_job_is_the_same_when_it_arrives() -> None:
    plain = Job(source=[4, 5, 2], number=7, limit=9)
    wished = Job(source=[4, 2], prefix=(5,), demanded=((6, 7),), forbidden=("no",), whole_words=True, number=1, limit=3)
    for job in (plain, wished):
        assert unpacked(*packed(job)) == job
