"""What one step of decoding needs, for K beams of each of many sources: attention over a past that is told by
ancestors, attention at sources laid end to end, the likeliest words, and the beams' next turn with all that follows.

The state of a search stays on the GPU, and nothing waits for the host: a row of beams whose source is done takes the
next source by itself. How the parts go together is `attent.decode.lane`'s; each rule is that of `attent.decode.search`.

A row is (source, tokens written, first place of its cache, first token and tokens of its memory, most tokens, first
place of its tree, places up to which all its beams have the same ancestors); the source is -1 where there is none. A
place has a column for each beam. In the tree stand the token that each beam wrote at each place, and the beam that it
went on from.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW = 8  # numbers of a row
SOURCE = 4  # of a source: its first token and tokens in the memory, most tokens of its target, first place of its tree
GROUP = 64  # words that are first looked at by their best alone
CHUNK = 32  # groups that one program surveys
COLUMNS = 16  # that queries meet at once; of 16, 32 and 64, with one warp or two, the fastest on an H200
MOST_BEAMS = 16  # the fewest rows of a product of matrices: fewer beams are filled up


def power(n: int) -> int:
    return triton.next_power_of_2(n)


# --- layers ----------------------------------------------------------------------------------------------------------


def embedded(tokens: Tensor, rows: Tensor, table: Tensor, places: Tensor, scale: float) -> Tensor:
    """Tokens (R, K) with their places in the target: (R * K, E)."""
    out = table.new_empty(tokens.numel(), table.shape[1])
    wide = power(table.shape[1])
    _embed[(tokens.numel(),)](
        tokens, rows, table, places, out, scale, table.shape[1], tokens.shape[1], wide, num_warps=warps(wide)
    )
    return out


def added(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """x + y and its norm, both (N, E); without a bias it is RMSNorm. If the sum is not kept, the norm stands for it."""
    normed = torch.empty_like(x)
    total = torch.empty_like(x) if keep and y is not None else normed
    wide = power(x.shape[1])
    _add[(len(x),)](
        x, x if y is None else y, weight, weight if bias is None else bias, total, normed, x.shape[1], eps,
        y is not None, bias is not None, keep and y is not None, wide, num_warps=warps(wide),
    )  # fmt: skip
    return (total if keep and y is not None else x if keep else normed), normed


def look_back(
    qkv: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, rows: Tensor, beams: int, heads: int, scale: float
) -> Tensor:
    """Queries, keys and values (R * K, (H + 2 Hkv) * D) of a step: what each beam sees of its past, (R * K, H * D).
    Keys and values are written to the cache (Hkv, columns, D); `ancestors` (2, columns) tell whose column each place
    of a beam is, in one half after even numbers of tokens and in the other after odd ones."""
    shared, columns, D = keys.shape
    out = qkv.new_empty(len(qkv), heads * D)
    _look_back[(len(qkv) // beams, heads)](
        qkv, keys, values, ancestors, rows, out, scale, columns,
        heads, shared, beams, MOST_BEAMS, D, COLUMNS, num_warps=1,
    )  # fmt: skip
    return out


def look_across(q: Tensor, memory: Tensor, rows: Tensor, beams: int, scale: float) -> Tensor:
    """Queries (R * K, H * D) at the source of each row; its keys and values are among those of all, (N, 2, Hkv, D)."""
    _, _, shared, D = memory.shape
    heads = q.shape[1] // D
    out = torch.empty_like(q)
    _look_across[(len(q) // beams, heads)](
        q, memory, rows, out, scale, heads, shared, beams, MOST_BEAMS, D, COLUMNS, num_warps=1
    )
    return out


def look_around(
    qkv: Tensor, begins: Tensor, lengths: Tensor, longest: int, heads: tuple[int, int, int], scale: float
) -> Tensor:
    """Queries, keys and values (N, (H + 2 Hkv) * D) of sources that lie end to end: what each token sees of its own
    source, (N, H * D). `heads` are (H, Hkv, D)."""
    H, shared, D = heads
    out = qkv.new_empty(len(qkv), H * D)
    queries = 32 if qkv.element_size() == 2 else 16
    _look_around[(len(lengths), H, triton.cdiv(longest, queries))](
        qkv, begins, lengths, out, scale, H, shared, D, queries, queries, num_warps=2 if queries == 32 else 1
    )
    return out


def warps(width: int) -> int:
    return max(1, min(8, width // 512))


# --- words -----------------------------------------------------------------------------------------------------------


def likely(logits: Tensor, rows: Tensor, settings: Tensor, beams: int, end: int) -> tuple[Tensor, Tensor]:
    """Of each beam's logits (R * K, V) the likeliest words, 2 K or with one beam 1: ids and log-probabilities, each
    (R * K, C); of equal ones that of the lowest id. `settings` begin with the tokens before an end is allowed."""
    N, V = logits.shape
    groups = -(-V // GROUP)
    chunk = min(CHUNK, power(groups))
    chunks = -(-groups // chunk)
    count = candidates(beams)
    near = min(count, groups)
    peaks = logits.new_empty(N, chunks * chunk, dtype=torch.float32)
    parts = logits.new_empty(N, chunks, 2, dtype=torch.float32)
    _survey[(N, chunks)](logits, rows, peaks, parts, V, end, beams, chunk, GROUP, num_warps=4)
    ids = torch.empty(N, count, dtype=torch.int32, device=logits.device)
    gains = logits.new_empty(N, count, dtype=torch.float32)
    _pick[(N,)](
        logits, rows, settings, peaks, parts, ids, gains, V, end, chunks * chunk, chunks,
        beams, count, power(count), near, power(near), GROUP, power(chunks * chunk), power(chunks),
        num_warps=1 if count <= 8 else 4,
    )  # fmt: skip
    return ids, gains


def candidates(beams: int) -> int:
    return 1 if beams == 1 else 2 * beams


# --- beams -----------------------------------------------------------------------------------------------------------


class Board(Protocol):
    """The state of a search; `attent.decode.lane` has it."""

    sources: Tensor  # (S, 4)
    counters: Tensor  # the next source, rows at work, sources that there are
    settings: Tensor  # tokens before an end is allowed, ends to wait for
    penalties: Tensor  # of each length
    ancestors: Tensor
    sums: Tensor  # (S, K) of log-probabilities
    lengths: Tensor  # (S,) tokens written
    counts: Tensor  # (S,) hypotheses that have ended
    scores: Tensor  # (S, N) of the best of these, the best first
    end_sums: Tensor  # (S, N)
    pointers: Tensor  # (S, N) tokens before the end, times K, + the beam that it went on from
    tokens: Tensor  # (leaves, K) the trees of all sources
    parents: Tensor  # (leaves, K)


def turn(board: Board, rows: Tensor, read: Tensor, ids: Tensor, gains: Tensor, start: int, end: int) -> None:
    """With the likeliest words of each beam (R * K, C), the next turn of every row; all that follows is written."""
    K, N, C = read.shape[1], board.scores.shape[1], ids.shape[1]
    _turn[(len(rows),)](
        rows, board.sources, board.counters, board.settings, board.penalties, ids, gains, read, board.ancestors,
        board.ancestors.shape[1], board.sums, board.lengths, board.counts, board.scores, board.end_sums,
        board.pointers, board.tokens, board.parents, start, end,
        K, power(K), C, power(C), N, power(N), 32, num_warps=1,
    )  # fmt: skip


def traced(pointers: Tensor, sources: Tensor, tokens: Tensor, parents: Tensor, longest: int) -> Tensor:
    """The tokens that lead to each pointer (S, N): (S * N, longest); what stands behind them is nothing."""
    S, N = pointers.shape
    out = torch.empty(S * N, longest, dtype=torch.int32, device=pointers.device)
    _trace[(triton.cdiv(S * N, 32),)](
        pointers.contiguous(), sources, tokens, parents, out, S * N, longest, tokens.shape[1], N, 32, num_warps=1
    )
    return out


# --- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _embed(Tokens, Rows, Table, Places, Out, scale, width, K: tl.constexpr, E: tl.constexpr):
    beam = tl.program_id(0)
    row = Rows + beam // K * 8
    if tl.load(row) >= 0:
        length = tl.load(row + 1)
        token = tl.load(Tokens + beam).to(tl.int64)
        e = tl.arange(0, E)
        x = tl.load(Table + token * width + e, mask=e < width, other=0.0).to(tl.float32) * scale
        x += tl.load(Places + length * width + e, mask=e < width, other=0.0).to(tl.float32)
        tl.store(Out + beam.to(tl.int64) * width + e, x.to(Out.dtype.element_ty), mask=e < width)


@triton.jit
def _add(
    X, Y, Weight, Bias, Total, Out, width, eps,
    ADDS: tl.constexpr, CENTRED: tl.constexpr, KEEPS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, E)
    inside = e < width
    place = tl.program_id(0).to(tl.int64) * width + e
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(Y + place, mask=inside, other=0.0).to(tl.float32)
    if KEEPS:
        tl.store(Total + place, x.to(Total.dtype.element_ty), mask=inside)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    x = x * tl.load(Weight + e, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x += tl.load(Bias + e, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + place, x.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def _met(q, Keys, Values, place, read, seen, top, mass, sums, scale):
    """Queries meet some more keys and values: those that are read at all, and of these the ones that each has seen."""
    keys = tl.load(Keys + place, mask=read[:, None], other=0.0)
    values = tl.load(Values + place, mask=read[:, None], other=0.0)
    score = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    fade, weight = tl.exp(top - higher), tl.exp(score - higher[:, None])
    sums = tl.dot(weight.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
    return higher, mass * fade + tl.sum(weight, 1), sums


@triton.jit
def _look_back(
    QKV, Keys, Values, Ancestors, Rows, Out, scale, columns,
    H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each beam has its own new column to begin with. Up to some place all have the same ancestors: a column for each.
    From there on all beams meet all columns, but see those of their own ancestors alone; what is nobody's is not
    read."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(Rows + row * 8) >= 0:
        length, room = tl.load(Rows + row * 8 + 1), tl.load(Rows + row * 8 + 2)
        shared = head // (H // HKV)
        beam, d, c = tl.arange(0, KP), tl.arange(0, D), tl.arange(0, BLOCK)
        real = (beam < K)[:, None]
        new = QKV + (row * K + beam).to(tl.int64)[:, None] * ((H + 2 * HKV) * D) + d[None, :]
        q = tl.load(new + head * D, mask=real, other=0.0)
        key = tl.load(new + (H + shared) * D, mask=real, other=0.0)
        value = tl.load(new + (H + HKV + shared) * D, mask=real, other=0.0)
        past = shared.to(tl.int64) * columns * D + room.to(tl.int64) * (K * D)
        here = past + (length * K + beam)[:, None] * D + d[None, :]
        if head % (H // HKV) == 0:
            tl.store(Keys + here, key, mask=real)
            tl.store(Values + here, value, mask=real)
        top = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
        mass = tl.full((KP,), 1.0, tl.float32)
        sums = value.to(tl.float32)
        whose = Ancestors + (length % 2) * columns.to(tl.int64) + room.to(tl.int64) * K
        alike = length
        if K > 1:
            alike = tl.load(Rows + row * 8 + 7)
        for first in range(0, alike, BLOCK):
            read = first + c < alike
            column = (first + c) * K
            if K > 1:
                column += tl.load(whose + column, mask=read, other=0).to(tl.int32)
            place = past + column[:, None] * D + d[None, :]
            top, mass, sums = _met(q, Keys, Values, place, read, read[None, :], top, mass, sums, scale)
        if K > 1:
            for first in range(alike * K, length * K, BLOCK):
                column = first + c
                inside = (column < length * K)[None, :] & real
                ancestor = tl.load(whose + (column // K * K)[None, :] + beam[:, None], mask=inside, other=-1)
                seen = ancestor == (column % K)[None, :]
                read = tl.max(seen.to(tl.int32), 0) > 0
                place = past + column[:, None] * D + d[None, :]
                top, mass, sums = _met(q, Keys, Values, place, read, seen, top, mass, sums, scale)
        place = (row * K + beam).to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
        tl.store(Out + place, (sums / mass[:, None]).to(Out.dtype.element_ty), mask=real)


@triton.jit
def _look_across(
    Q, Memory, Rows, Out, scale,
    H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The beams of a row share what they look at."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(Rows + row * 8) >= 0:
        begin, length = tl.load(Rows + row * 8 + 3), tl.load(Rows + row * 8 + 4)
        beam, d, t = tl.arange(0, KP), tl.arange(0, D), tl.arange(0, BLOCK)
        real = (beam < K)[:, None]
        mine = (row * K + beam).to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
        keys = Memory + begin.to(tl.int64) * (2 * HKV * D) + head // (H // HKV) * D
        q = tl.load(Q + mine, mask=real, other=0.0)
        top = tl.full((KP,), -1e30, tl.float32)
        mass = tl.zeros((KP,), tl.float32)
        sums = tl.zeros((KP, D), tl.float32)
        for first in range(0, length, BLOCK):
            read = first + t < length
            place = (first + t)[:, None] * (2 * HKV * D) + d[None, :]
            top, mass, sums = _met(q, keys, keys + HKV * D, place, read, read[None, :], top, mass, sums, scale)
        tl.store(Out + mine, (sums / mass[:, None]).to(Out.dtype.element_ty), mask=real)


@triton.jit
def _look_around(
    QKV, Begins, Lengths, Out, scale,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some queries of one source at all of it."""
    source, head, first_query = tl.program_id(0), tl.program_id(1), tl.program_id(2) * QUERIES
    length = tl.load(Lengths + source)
    if first_query < length:
        at = first_query + tl.arange(0, QUERIES)
        d, t = tl.arange(0, D), tl.arange(0, BLOCK)
        wide = (H + 2 * HKV) * D
        begin = tl.load(Begins + source).to(tl.int64)
        mine = QKV + begin * wide
        keys = mine + (H + head // (H // HKV)) * D
        q = tl.load(mine + head * D + at[:, None] * wide + d[None, :], mask=(at < length)[:, None], other=0.0)
        top = tl.full((QUERIES,), -1e30, tl.float32)
        mass = tl.zeros((QUERIES,), tl.float32)
        sums = tl.zeros((QUERIES, D), tl.float32)
        for first in range(0, length, BLOCK):
            read = first + t < length
            place = (first + t)[:, None] * wide + d[None, :]
            top, mass, sums = _met(q, keys, keys + HKV * D, place, read, read[None, :], top, mass, sums, scale)
        place = (begin + at)[:, None] * (H * D) + head * D + d[None, :]
        tl.store(Out + place, (sums / mass[:, None]).to(Out.dtype.element_ty), mask=(at < length)[:, None])


@triton.jit
def _ranked(values, places):
    """Whole numbers that are greater where the value is, and of equal ones where the place is lower."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def _place(ranked):
    return 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _survey(
    Logits, Rows, Peaks, Parts, V, end,
    K: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of each group of words its best, without the end; of the chunk what the sum of all probabilities needs."""
    beam, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(Rows + beam // K * 8) >= 0:
        group = chunk * GROUPS + tl.arange(0, GROUPS)
        word = group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        logits = tl.load(Logits + beam.to(tl.int64) * V + word, mask=word < V, other=float("-inf")).to(tl.float32)
        best = tl.max(logits, 1)
        top = tl.max(best, 0)
        calm = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.sum(tl.sum(tl.exp(logits - calm), 1), 0)
        peaks = tl.max(tl.where(word == end, float("-inf"), logits), 1)
        tl.store(Peaks + beam.to(tl.int64) * (tl.num_programs(1) * GROUPS) + group, peaks)
        part = Parts + (beam * tl.num_programs(1) + chunk) * 2
        tl.store(part, calm)
        tl.store(part + 1, mass)


@triton.jit
def _pick(
    Logits, Rows, Settings, Peaks, Parts, Ids, Gains, V, end, groups, chunks,
    K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, NEAR: tl.constexpr, NEARP: tl.constexpr,
    WIDE: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The best words lie in the groups whose own best are the best. The end has no group: it stands by itself."""
    beam = tl.program_id(0)
    row = Rows + beam // K * 8
    if tl.load(row) >= 0:
        lowest = tl.full((), -(2**63), tl.int64)
        chunk = tl.arange(0, CHUNKS)
        part = Parts + (beam * chunks + chunk) * 2
        tops = tl.load(part, mask=chunk < chunks, other=float("-inf"))
        masses = tl.load(part + 1, mask=chunk < chunks, other=0.0)
        top = tl.max(tops, 0)
        total = top + tl.log(tl.sum(masses * tl.exp(tops - top), 0))

        group, nth = tl.arange(0, GROUPS), tl.arange(0, NEARP)
        peaks = tl.load(Peaks + beam.to(tl.int64) * groups + group, mask=group < groups, other=0.0)
        ranks = tl.where(group < groups, _ranked(peaks, group), lowest)
        nearest = tl.zeros((NEARP,), tl.int64)
        for i in range(NEAR):
            best = tl.max(ranks, 0)
            ranks = tl.where(ranks == best, lowest, ranks)
            nearest = tl.where(nth == i, best, nearest)

        mine = Logits + beam.to(tl.int64) * V
        near = tl.where(nth < NEAR, _place(nearest), 0)
        word = near[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        there = (nth < NEAR)[:, None] & (word < V) & (word != end)
        logits = tl.load(mine + word, mask=there, other=0.0).to(tl.float32)
        ranks = tl.where(there, _ranked(logits, word), lowest)
        allowed = tl.load(row + 1) >= tl.load(Settings)
        last = tl.where(allowed, tl.load(mine + end).to(tl.float32), float("-inf"))
        ended = _ranked(last, end)
        rank, likeliest = tl.arange(0, CP), tl.zeros((CP,), tl.int64)
        for i in range(C):
            best = tl.maximum(tl.max(tl.max(ranks, 1), 0), ended)
            ranks = tl.where(ranks == best, lowest, ranks)
            ended = tl.where(ended == best, lowest, ended)
            likeliest = tl.where(rank == i, best, likeliest)
        ids = tl.where(rank < C, _place(likeliest), 0)
        logits = tl.load(mine + ids, mask=rank < C, other=0.0).to(tl.float32)
        logits = tl.where((ids == end) & (allowed == 0), float("-inf"), logits)
        tl.store(Ids + beam * C + rank, ids, mask=rank < C)
        tl.store(Gains + beam * C + rank, logits - total, mask=rank < C)


@triton.jit
def _turn(
    Rows, Sources, Counters, Settings, Penalties, Ids, Gains, Read, Ancestors, columns, Sums, Lengths, Counts,
    Scores, EndSums, Pointers, Tokens, Parents, start, end,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One source: the best continuations of its beams, which of them end, which go on, and whether any can still win.
    Behind the last one the row takes the next source. One warp: what is read before is written over after."""
    number = tl.program_id(0)
    row = Rows + number * 8
    source = tl.load(row)
    if source >= 0:
        lowest = tl.full((), -(2**63), tl.int64)
        length, room, limit, tree = tl.load(row + 1), tl.load(row + 2), tl.load(row + 5), tl.load(row + 6)
        beam, rank, nth = tl.arange(0, KP), tl.arange(0, CP), tl.arange(0, NP)
        sums = Sums + source * K
        ids, gains = Ids + number * (K * C), Gains + number * (K * C)

        place = beam[:, None] * C + rank[None, :]
        inside = (beam < K)[:, None] & (rank < C)[None, :]
        before = tl.load(sums + beam, mask=beam < K, other=float("-inf"))
        ranks = before[:, None] + tl.load(gains + place, mask=inside, other=float("-inf"))
        ranks = tl.where(inside, _ranked(ranks, place), lowest)
        order = tl.zeros((CP,), tl.int64)
        for i in range(C):
            best = tl.max(tl.max(ranks, 1), 0)
            ranks = tl.where(ranks == best, lowest, ranks)
            order = tl.where(rank == i, best, order)
        chosen = tl.where(rank < C, _place(order), 0)
        parent = chosen // C
        token = tl.load(ids + chosen, mask=rank < C, other=0)
        total = tl.load(sums + parent, mask=rank < C, other=float("-inf"))
        total += tl.load(gains + chosen, mask=rank < C, other=float("-inf"))

        possible = (rank < C) & (total > float("-inf"))
        ends = possible & (token == end) & (rank < K)
        goes = possible & (token != end)
        going = tl.sum(goes.to(tl.int32), 0)
        behind = tl.cumsum(((rank < C) & (goes == 0)).to(tl.int32), 0) + going
        to = tl.where(goes, tl.cumsum(goes.to(tl.int32), 0), behind) - 1
        mine = (to[None, :] == beam[:, None]) & (rank < C)[None, :]
        alive = mine & goes[None, :]
        new_parent = tl.sum(tl.where(mine, parent[None, :], 0), 1)
        new_token = tl.sum(tl.where(mine, tl.where(goes, token, end)[None, :], 0), 1)
        new_sum = tl.sum(tl.where(alive, total[None, :], 0.0), 1)
        new_sum = tl.where(tl.sum(alive.to(tl.int32), 1) > 0, new_sum, float("-inf"))

        pool = source * N + nth
        old = tl.load(Scores + pool, mask=nth < N, other=float("-inf"))
        ended = tl.sum(ends.to(tl.int32), 0)
        if ended > 0:
            score = tl.div_rn(total, tl.load(Penalties + length + 1) + tl.zeros((CP,), tl.float32))
            kept_ranks = tl.where(nth < N, _ranked(old, nth), lowest)
            new_ranks = tl.where(ends, _ranked(score, NP + rank), lowest)
            ranking = tl.zeros((NP,), tl.int64)
            for i in range(N):
                best = tl.maximum(tl.max(kept_ranks, 0), tl.max(new_ranks, 0))
                kept_ranks = tl.where(kept_ranks == best, lowest, kept_ranks)
                new_ranks = tl.where(new_ranks == best, lowest, new_ranks)
                ranking = tl.where(nth == i, best, ranking)
            kept = _place(ranking)
            stays = (nth < N) & (kept < NP)
            comes = (kept[:, None] - NP == rank[None, :]) & ends[None, :] & (nth < N)[:, None]
            old_sum = tl.load(EndSums + source * N + kept, mask=stays, other=0.0)
            old_score = tl.load(Scores + source * N + kept, mask=stays, other=0.0)
            old_pointer = tl.load(Pointers + source * N + kept, mask=stays, other=0)
            pointer = length * K + parent
            tl.debug_barrier()
            old = tl.where(stays, old_score, tl.sum(tl.where(comes, score[None, :], 0.0), 1))
            tl.store(Scores + pool, old, mask=nth < N)
            end_sum = tl.where(stays, old_sum, tl.sum(tl.where(comes, total[None, :], 0.0), 1))
            tl.store(EndSums + pool, end_sum, mask=nth < N)
            pointer = tl.where(stays, old_pointer, tl.sum(tl.where(comes, pointer[None, :], 0), 1))
            tl.store(Pointers + pool, pointer, mask=nth < N)

        count = tl.load(Counts + source) + ended
        worst = tl.max(tl.where(nth == N - 1, old, float("-inf")), 0)
        hope = tl.div_rn(tl.max(tl.where(beam < K, new_sum, float("-inf")), 0), tl.load(Penalties + limit))
        done = (length + 1 >= limit) | (hope <= worst) | (count >= tl.load(Settings + 1))
        tl.debug_barrier()
        tl.store(sums + beam, new_sum, mask=beam < K)
        tl.store(Lengths + source, length + 1)
        tl.store(Counts + source, count)
        leaf = (tree + length) * K + beam
        tl.store(Tokens + leaf, new_token, mask=beam < K)
        tl.store(Parents + leaf, new_parent.to(tl.int8), mask=beam < K)

        if done:
            following = tl.atomic_add(Counters, 1)
            if following < tl.load(Counters + 2):
                tl.store(row, following)
                tl.store(row + 1, 0)
                tl.store(row + 7, 0)
                tl.store(row + 3, tl.load(Sources + following * 4))
                tl.store(row + 4, tl.load(Sources + following * 4 + 1))
                tl.store(row + 5, tl.load(Sources + following * 4 + 2))
                tl.store(row + 6, tl.load(Sources + following * 4 + 3))
                tl.store(Read + number * K + beam, start + tl.zeros((KP,), tl.int32), mask=beam < K)
            else:
                tl.store(row, -1)
                tl.atomic_add(Counters + 1, -1)
        else:
            tl.store(row + 1, length + 1)
            tl.store(Read + number * K + beam, new_token, mask=beam < K)
            if K > 1:
                now = Ancestors + (length % 2) * columns.to(tl.int64)
                after = Ancestors + ((length + 1) % 2) * columns.to(tl.int64)
                alike = length + 1
                for first in range(0, length + 1, BLOCK):
                    t = first + tl.arange(0, BLOCK)
                    column = ((room + t) * K)[:, None]
                    seen = (t < length)[:, None] & (beam < K)[None, :]
                    whose = tl.load(now + column + new_parent[None, :], mask=seen, other=0)
                    whose = tl.where((t == length)[:, None], new_parent[None, :].to(tl.int8), whose)
                    tl.store(after + column + beam[None, :], whose, mask=(t <= length)[:, None] & (beam < K)[None, :])
                    whose = tl.where((beam < K)[None, :], whose.to(tl.int32), tl.max(whose.to(tl.int32), 1)[:, None])
                    differ = (tl.max(whose, 1) != tl.min(whose, 1)) & (t <= length)
                    alike = tl.minimum(alike, tl.min(tl.where(differ, t, alike), 0))
                tl.store(row + 7, alike)


@triton.jit
def _trace(Pointers, Trees, Tokens, Parents, Out, count, width, K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """From the last token of each hypothesis to its first."""
    nth = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = nth < count
    pointer = tl.load(Pointers + nth, mask=inside, other=0)
    tree = tl.load(Trees + nth // N * 4 + 3, mask=inside, other=0)
    place, beam = pointer // K - 1, pointer % K
    for _ in range(tl.max(place, 0) + 1):
        there = inside & (place >= 0)
        leaf = (tree + place) * K + beam
        tl.store(Out + nth.to(tl.int64) * width + place, tl.load(Tokens + leaf, mask=there, other=0), mask=there)
        beam = tl.load(Parents + leaf, mask=there, other=0).to(tl.int32)
        place -= 1
