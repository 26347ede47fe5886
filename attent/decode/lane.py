"""The fast lane of a search: plain beam search with one Transformer on an NVIDIA GPU, all of it on the device.

All sources are read first; what the decoder looks at of them lies end to end. A fixed number of rows, with the beams of
a source each, takes steps that are recorded as a CUDA graph. A row whose source is done takes the next one inside the
step: the host replays, and looks now and then, at numbers of some steps ago, how many rows are left; when these are
few, steps of fewer rows go on. The hypotheses are those of `search`; what else can be asked for is `engine`'s.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attent.data.arrays import Array
from attent.decode.layers import Decoder, Kept, Twin
from attent.decode.lots import Found, Lot, before
from attent.decode.rules import LEAST as FILLED
from attent.decode.rules import LONGEST_UNIT, TIMES, MinLength
from attent.decode.search import NEVER, Beams, Plan, Pool, results
from attent.models import Seq2Seq
from attent.nn.kernels import steps

LOOK = 4  # steps between two looks at how many rows are left; each look is one interval old
SMALLEST = 8  # rows
FEWEST = 1024  # beams that a step may have as well as fewer
READ_AT_ONCE = 2**17  # tokens of sources
SHARE = 0.25  # of the free memory that sources may have
UNKNOWN_BYTES = 2**30
MOST_LEAVES = 2**28  # tokens in the trees of all sources: their places must be int32, and have room
FOREVER = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Need:
    """How much room a search wants."""

    rows: int
    places: int  # of all rows' caches
    sources: int
    leaves: int  # places of all sources' trees
    tokens: int  # of all sources
    longest: int  # target
    widest: int  # source

    def within(self, other: Need) -> bool:
        return all(mine <= theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))

    def rounded(self) -> Need:
        return Need(**{name: roomy(number) for name, number in vars(self).items()})

    def with_room_for(self, other: Need) -> Need:
        """For either: who searches now for this and then for that shall not make a new board each time."""
        return Need(**{name: max(number, getattr(other, name)) for name, number in vars(self).items()})


LEAST = Need(rows=SMALLEST, places=1024, sources=256, leaves=2**14, tokens=4096, longest=256, widest=256)


def roomy(number: int) -> int:
    """A little more, so that the next search fits as well: 4, 5, 6 or 7 times a power of 2."""
    unit = 1 << max(0, number.bit_length() - 3)
    return -(-number // unit) * unit


class Board:
    """The state of a search on the device. Everything of a source stays where it is, whichever row works at it."""

    def __init__(self, decoder: Decoder, plan: Plan, need: Need) -> None:
        K, N, device = plan.beams, plan.search.n_best, plan.never.device
        columns = need.places * K
        self.room = need

        def whole(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        def exact(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=device)

        self.rows = whole(need.rows, steps.ROW)
        self.read = whole(need.rows, K)
        self.counters = whole(4)
        self.settings = whole(2)
        self.penalties = exact(need.longest + 2)
        self.sources = whole(need.sources, steps.SOURCE)
        self.no_loops = whole(need.sources)
        self.loop = steps.Loop(LONGEST_UNIT, TIMES, FILLED)
        self.lengths = whole(need.sources)
        self.counts = whole(need.sources)
        self.sums = exact(need.sources, K)
        self.scores = exact(need.sources, N)
        self.end_sums = exact(need.sources, N)
        self.pointers = whole(need.sources, N)
        self.tokens = whole(need.leaves, K)
        self.parents = torch.zeros(need.leaves, K, dtype=torch.int8, device=device)
        self.ancestors = torch.zeros(2, columns if K > 1 else 1, dtype=torch.int8, device=device)
        self.kept = []
        for layer, across in zip(decoder.layers, decoder.across, strict=True):
            own, cross = layer.own, across.heads
            keys, values = (decoder.table.new_zeros(own.shared, columns, own.width) for _ in range(2))
            self.kept.append(Kept(keys, values, decoder.table.new_zeros(need.tokens, 2, cross.shared, cross.width)))

    def begin(self, rows: Tensor, sources: Tensor, no_loops: Tensor, plan: Plan) -> None:
        """Nothing is written yet. Rows (R, 8), sources (S, 4) and which of them may not go in circles are as `steps`
        has them."""
        S = len(sources)
        least = max((rule.least for rule in plan.rules if isinstance(rule, MinLength)), default=0)
        patience = plan.search.patience
        enough = FOREVER if patience is None else min(FOREVER, round(patience * plan.beams))
        self.rows.fill_(-1)
        self.rows[: len(rows)] = rows
        self.sources[:S] = sources
        self.no_loops[:S] = no_loops
        self.read.fill_(plan.start)
        self.counters.copy_(torch.tensor([len(rows), len(rows), S, 0], dtype=torch.int32))
        self.settings.copy_(torch.tensor([min(least, FOREVER), enough], dtype=torch.int32))
        self.penalties.copy_(plan.penalty(torch.arange(len(self.penalties), device=self.rows.device)))
        self.sums.fill_(NEVER)
        self.sums[:, 0] = 0
        for unset in (self.scores, self.end_sums):
            unset.fill_(NEVER)
        for zero in (self.lengths, self.counts, self.pointers):
            zero.zero_()

    def compact(self, size: int) -> None:
        """The rows that are at work come first."""
        order = (self.rows[:, 0] < 0).to(torch.uint8).argsort(stable=True)[:size]
        self.rows[:size] = self.rows[order]
        self.read[:size] = self.read[order]
        self.rows[size:] = -1  # where they were before, they must not be found again

    def beams(self, S: int) -> Beams:
        """As `search` has it, but in the place of tokens stands where the last of them is: (place + 1) * K + beam."""
        sums, lengths, K = self.sums[:S], self.lengths[:S].long(), self.sums.shape[1]
        last = lengths[:, None] * K + torch.arange(K, device=sums.device)
        pointers = self.pointers[:S].long()
        ended = Pool(pointers[:, :, None], self.end_sums[:S], self.scores[:S], pointers // K + 1)
        return Beams(
            tokens=last[:, :, None],
            sums=sums,
            lengths=lengths,
            limits=self.sources[:S, 2].long(),
            numbers=lengths,
            count=self.counts[:S],
            done=torch.ones_like(lengths, dtype=torch.bool),
            ended=ended,
            memories=(),
        )


class Lane:
    """One model, ready for searches of so many beams. One search at a time."""

    def __init__(self, model: Seq2Seq, plan: Plan) -> None:
        with alone(plan.never.device):
            self.twin = Twin(model, plan.never)
        self.board: Board | None = None
        self.graphs: dict[int, Any] = {}
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None  # what is recorded in several could not share the pool
        self.busy = threading.Lock()
        self.fewer = FOREVER  # rows, where memory was short

    def takes(self, lot: Lot, plan: Plan) -> bool:
        """All of it at once? One source always."""
        board = self.board  # which others may give up meanwhile
        room = max(0 if board is None else board.room.tokens, room_for(self.twin.decoder, plan.never.device))
        return len(lot) == 1 or (len(lot.ids) <= room and int(lot.limits.sum()) <= MOST_LEAVES // plan.beams)

    def found(self, model: object, lot: Lot, plan: Plan, most: int, stop: Callable[[], None]) -> Found | None:
        """With at most so many sources at work at once; `stop` may raise an error. None: there was no memory for so
        many after all. Then fewer are at work at once, until it has gone well again."""
        assert isinstance(model, Seq2Seq)
        rows = min(most, self.fewer)
        with self.busy, alone(plan.never.device):
            try:
                found = self._searched(model, lot, plan, rows, stop)
            except torch.OutOfMemoryError:
                if len(lot) == 1:
                    raise
            else:
                self.fewer = min(2 * self.fewer, FOREVER)
                return found
            # Here, not above: an error that is being handled keeps alive all that was at work.
            self.fewer = max(1, min(rows, len(lot)) // 2)
            self._forget()
            self.board = None
            torch.cuda.empty_cache()
            return None

    def _searched(self, model: Seq2Seq, lot: Lot, plan: Plan, most: int, stop: Callable[[], None]) -> Found:
        rows = useful(lot.lengths, max(most, self._held(int(lot.limits.max()))), plan.beams)
        size = fitting(rows)
        need = need_of(lot, rows)
        there = brought(lot, rows, plan.never.device)
        self.twin.take(model)
        board = self._board(model, replace(need, rows=size), plan)
        self._read(lot, there, board)
        board.begin(there.rows, there.sources, there.no_loops, plan)
        self._steps(board, size, plan, stop)
        return self._found(board, there.sources, need.longest, plan)

    def _held(self, longest: int) -> int:
        """Rows that there is room for already: its memory is no longer counted as free."""
        if self.board is None:
            return 0
        return min(self.board.room.rows, self.board.room.places // longest)

    def _board(self, model: Seq2Seq, need: Need, plan: Plan) -> Board:
        decoder = self.twin.decoder
        if not decoder.reach(model.decoder, need.longest):
            self._forget()
        self.twin.encoder.reach(model.encoder, need.widest)
        if self.board is None or not need.within(self.board.room):
            self._forget()
            more = need.rounded().with_room_for(LEAST if self.board is None else self.board.room)
            self.board = None  # its memory is needed
            self.board = Board(decoder, plan, more)
        return self.board

    def _forget(self) -> None:
        """Graphs read the memory that they were recorded with."""
        self.graphs.clear()
        self.pool = None

    def _read(self, lot: Lot, there: There, board: Board) -> None:
        """What the decoder will look at, of all sources."""
        for part in parts_of(lot.lengths, lot.begins):
            first, last = part.tokens.start, part.tokens.stop
            begins = there.begins[part.sources] - first
            states = self.twin.encoder.states(
                there.ids[first:last], there.at[first:last], begins, there.lengths[part.sources], part.longest
            )
            self.twin.decoder.remember(states, board.kept, first)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _steps(self, board: Board, size: int, plan: Plan, stop: Callable[[], None]) -> None:
        looks: deque[Look] = deque()
        while True:
            stop()
            for _ in range(LOOK):
                self._play(board, size, plan)
            looks.append(Look(board.counters))
            if len(looks) < 2:
                continue
            left = looks.popleft().rows
            if left <= 0:
                return
            if 2 * fitting(left) <= size:
                size = fitting(left)
                board.compact(size)

    def _play(self, board: Board, size: int, plan: Plan) -> None:
        """One step; the first of its size is run as it is, and recorded for those that follow."""
        if size in self.graphs:
            self.graphs[size].replay()
            return
        self._step(board, size, plan)
        if board.rows.device.type == "cuda":
            self.graphs[size] = self._recorded(board, size, plan)

    def _recorded(self, board: Board, size: int, plan: Plan) -> torch.cuda.CUDAGraph:
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(board.rows.device)
        self.stream = torch.cuda.Stream(board.rows.device) if self.stream is None else self.stream
        self.pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            # Other threads may go on with work of their own.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                self._step(board, size, plan)
            except BaseException:
                with suppress(RuntimeError):  # that it cannot be ended well is no news, and would hide what is
                    graph.capture_end()
                raise
            graph.capture_end()
        now.wait_stream(self.stream)
        return graph

    def _step(self, board: Board, size: int, plan: Plan) -> None:
        rows, read = board.rows[:size], board.read[:size]
        logits = self.twin.decoder.logits(rows, read, board.ancestors, board.kept)
        ids, gains = steps.likely(logits, rows, board.settings, plan.beams, plan.end, board)
        steps.turn(board, rows, read, ids, gains, plan.start, plan.end)

    # --- what was found ----------------------------------------------------------------------------------------------

    def _found(self, board: Board, sources: Tensor, longest: int, plan: Plan) -> Found:
        best = results(board.beams(len(sources)), plan)
        pointers = best.tokens[:, :, 0].to(torch.int32)
        tokens = steps.traced(pointers, sources, board.tokens, board.parents, longest)
        numbers = (pointers // plan.beams, best.lengths, best.sums, best.scores)
        return Found(tokens.cpu().numpy(), *(x.flatten().cpu().numpy() for x in numbers))


class Look:
    """How many rows were at work, when it was asked; who wants to know waits until the device is there."""

    def __init__(self, counters: Tensor) -> None:
        cuda = counters.device.type == "cuda"
        self.seen = torch.empty(4, dtype=torch.int32, pin_memory=cuda)
        self.seen.copy_(counters, non_blocking=cuda)
        self.done = torch.cuda.Event() if cuda else None
        if self.done is not None:
            self.done.record()

    @property
    def rows(self) -> int:
        if self.done is not None:
            self.done.synchronize()
        return int(self.seen[1])


# --- sources -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """Sources that are read at once."""

    sources: slice  # in the order of lengths
    tokens: slice
    longest: int


class There(NamedTuple):
    """A lot on the device."""

    ids: Tensor
    at: Tensor
    begins: Tensor
    lengths: Tensor
    sources: Tensor
    no_loops: Tensor
    rows: Tensor


def brought(lot: Lot, count: int, device: torch.device) -> There:
    """In one piece; so many rows begin with the first sources."""
    at = np.arange(len(lot.ids)) - np.repeat(lot.begins, lot.lengths)
    sources = np.stack([lot.memory, lot.widths, lot.limits, before(lot.limits)], 1)
    rows = np.zeros((count, steps.ROW), dtype=np.int64)
    rows[:, 0] = np.arange(count)
    rows[:, steps.ROOM.value] = before(lot.limits[:count])
    rows[:, steps.MEMORY.value : steps.TREE.value + 1] = sources[:count]
    arrays = [lot.ids, at, lot.begins, lot.lengths, sources, lot.no_loops, rows]
    packed = torch.from_numpy(np.concatenate([array.ravel().astype(np.int32) for array in arrays]))
    packed = packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed
    pieces = packed.split([array.size for array in arrays])
    return There(*(piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)))


def need_of(lot: Lot, rows: int) -> Need:
    return Need(
        rows=rows,
        places=int(lot.limits[:rows].sum()),
        sources=len(lot),
        leaves=int(lot.limits.sum()),
        tokens=len(lot.ids),
        longest=int(lot.limits.max()),
        widest=int(lot.lengths[0]),
    )


def parts_of(lengths: Array, begins: Array) -> Iterator[Part]:
    first, count, ends = 0, len(lengths), begins + lengths
    while first < count:
        last = max(first + 1, int(np.searchsorted(ends, begins[first] + READ_AT_ONCE, "right")))
        yield Part(slice(first, last), slice(int(begins[first]), int(ends[last - 1])), int(lengths[first]))
        first = last


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Kernels are launched on the current GPU, which need not be the model's. What is made in inference mode could not
    be written outside of it, and a lane is kept for who comes next."""
    on: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), on:
        yield


def useful(lengths: Array, most: int, beams: int) -> int:
    """Rows that are worth having for sources of such lengths. A search takes as many steps as its longest target: more
    rows than all targets fill in that time would stand empty. Few rows are no quicker than some more."""
    full = max(int(lengths.sum()) // int(lengths.max()), FEWEST // beams)
    return min(most, len(lengths), fitting(full * 7 // 8))


def fitting(rows: int) -> int:
    """The number of rows of a step for so many: a power of 2, or one and a half times that."""
    size = SMALLEST
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def room_for(decoder: Decoder, device: torch.device) -> int:
    """Tokens of sources that there is memory for."""
    each = sum(2 * across.heads.shared * across.heads.width for across in decoder.across)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else UNKNOWN_BYTES
    return max(1, int(SHARE * free) // (each * decoder.table.element_size()))
