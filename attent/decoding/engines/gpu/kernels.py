"""What one step of decoding needs, for K beams of each of many sources: attention over a past that is told by
ancestors, attention at sources laid end to end, the likeliest words, and the beams' next turn with all that follows.

The state of a search stays on the GPU, and nothing waits for the host: a row of beams whose source is done takes the
next source by itself. How the parts go together is `attent.decode.lane`'s; each rule is that of `attent.decode.search`.

A row is a source and how far its beams are, in eight numbers that are named below. A place has a column for each beam.
In the tree stand the token that each beam wrote at each place, and the beam that it went on from.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_FIELDS = 8  # numbers of a row: the source, -1 where there is none, and
ROW_LENGTH = tl.constexpr(1)  # tokens written
ROW_CACHE_START = tl.constexpr(2)  # first place of its cache
ROW_MEMORY_START = tl.constexpr(3)  # first token of its source among all
ROW_SOURCE_LENGTH = tl.constexpr(4)  # of its source
ROW_MAX_LENGTH = tl.constexpr(5)  # most tokens
ROW_TREE_START = tl.constexpr(6)  # first place of its tree
ROW_SHARED_LENGTH = tl.constexpr(7)  # places up to which all its beams have the same ancestors
SOURCE_FIELDS = 4  # numbers of a source: MEMORY to TREE of a row that takes it
ROW_STRIDE = tl.constexpr(ROW_FIELDS)
SOURCE_STRIDE = tl.constexpr(SOURCE_FIELDS)
COUNTER_NEXT_SOURCE = tl.constexpr(0)  # counters: the next source,
COUNTER_ACTIVE_ROWS = tl.constexpr(1)  # rows that have a source,
COUNTER_SOURCES = tl.constexpr(2)  # all sources
SETTING_MIN_LENGTH = tl.constexpr(0)  # settings: tokens before an end is allowed,
SETTING_MAX_FINISHED = tl.constexpr(1)  # ends to wait for
GROUP_SIZE = 64  # words that are first looked at by their best alone
GROUPS_PER_CHUNK = 32  # groups that one program surveys
KEY_BLOCK = 16  # that queries meet at once; of 16, 32 and 64, with one warp or two, the fastest on an H200
MAX_BEAMS = 16  # the fewest rows of a product of matrices: fewer beams are filled up


def next_power_of_2(n: int) -> int:
    return triton.next_power_of_2(n)


# --- layers ----------------------------------------------------------------------------------------------------------


def embed_tokens(
    tokens: Tensor, rows: Tensor, embedding_weight: Tensor, position_embeddings: Tensor, scale: float
) -> Tensor:
    """Tokens (R, K) with their places in the target: (R * K, E)."""
    out = embedding_weight.new_empty(tokens.numel(), embedding_weight.shape[1])
    wide = next_power_of_2(embedding_weight.shape[1])
    _embed_kernel[(tokens.numel(),)](
        tokens,
        rows,
        embedding_weight,
        position_embeddings,
        out,
        scale,
        embedding_weight.shape[1],
        tokens.shape[1],
        wide,
        num_warps=choose_num_warps(wide),
    )
    return out


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    """x + y and its norm, both (N, E); without a bias it is RMSNorm. If the sum is not kept, the norm stands for it."""
    normed = torch.empty_like(x)
    total = torch.empty_like(x) if keep_sum and y is not None else normed
    wide = next_power_of_2(x.shape[1])
    _add_norm_kernel[(len(x),)](
        x, x if y is None else y, weight, weight if bias is None else bias, total, normed, x.shape[1], eps,
        y is not None, bias is not None, keep_sum and y is not None, wide, num_warps=choose_num_warps(wide),
    )  # fmt: skip
    return (total if keep_sum and y is not None else x if keep_sum else normed), normed


def attend_past(
    qkv: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, rows: Tensor, num_beams: int, heads: int, scale: float
) -> Tensor:
    """Queries, keys and values (R * K, (H + 2 Hkv) * D) of a step: what each beam sees of its past, (R * K, H * D).
    Keys and values are written to the cache (Hkv, columns, D); `ancestors` (2, columns) tell whose column each place
    of a beam is, in one half after even numbers of tokens and in the other after odd ones."""
    shared, columns, D = keys.shape
    out = qkv.new_empty(len(qkv), heads * D)
    _attend_past_kernel[(len(qkv) // num_beams, heads)](
        qkv, keys, values, ancestors, rows, out, scale, columns,
        heads, shared, num_beams, MAX_BEAMS, D, KEY_BLOCK, num_warps=1,
    )  # fmt: skip
    return out


def attend_memory(q: Tensor, memory: Tensor, rows: Tensor, num_beams: int, scale: float) -> Tensor:
    """Queries (R * K, H * D) at the source of each row; its keys and values are among those of all, (N, 2, Hkv, D)."""
    _, _, shared, D = memory.shape
    heads = q.shape[1] // D
    out = torch.empty_like(q)
    _attend_memory_kernel[(len(q) // num_beams, heads)](
        q, memory, rows, out, scale, heads, shared, num_beams, MAX_BEAMS, D, KEY_BLOCK, num_warps=1
    )
    return out


def attend_packed(
    qkv: Tensor, offsets: Tensor, lengths: Tensor, max_length: int, heads: tuple[int, int, int], scale: float
) -> Tensor:
    """Queries, keys and values (N, (H + 2 Hkv) * D) of sources that lie end to end: what each token sees of its own
    source, (N, H * D). `heads` are (H, Hkv, D)."""
    H, shared, D = heads
    out = qkv.new_empty(len(qkv), H * D)
    queries = 32 if qkv.element_size() == 2 else 16
    _attend_packed_kernel[(len(lengths), H, triton.cdiv(max_length, queries))](
        qkv, offsets, lengths, out, scale, H, shared, D, queries, queries, num_warps=2 if queries == 32 else 1
    )
    return out


def choose_num_warps(width: int) -> int:
    return max(1, min(8, width // 512))


# --- words -----------------------------------------------------------------------------------------------------------


def topk_log_probs(
    logits: Tensor, rows: Tensor, settings: Tensor, num_beams: int, end: int, history: TokenHistory | None = None
) -> tuple[Tensor, Tensor]:
    """Of each beam's logits (R * K, V) the likeliest words, 2 K or with one beam 1: ids and log-probabilities, each
    (R * K, C); of equal ones that of the lowest id. `settings` begin with the tokens before an end is allowed. Words
    that would close a loop of the past are not among them where that is forbidden; their logits are overwritten."""
    N, V = logits.shape
    groups = -(-V // GROUP_SIZE)
    chunk = min(GROUPS_PER_CHUNK, next_power_of_2(groups))
    chunks = -(-groups // chunk)
    count = count_candidates(num_beams)
    near = min(count, groups)
    peaks = logits.new_empty(N, chunks * chunk, dtype=torch.float32)
    parts = logits.new_empty(N, chunks, 2, dtype=torch.float32)
    _group_max_kernel[(N, chunks)](logits, rows, peaks, parts, V, end, num_beams, chunk, GROUP_SIZE, num_warps=4)
    if history is not None:
        _forbid_loops_kernel[(N,)](
            logits, peaks, rows, history.forbid_loops, history.tree_tokens, history.ancestors, history.ancestors.shape[1], V, end,
            chunks * chunk, num_beams, GROUP_SIZE, *history.loop_limits, next_power_of_2(max(history.loop_limits.count_tokens_before(unit) for unit in history.loop_limits.unit_lengths)),
            num_warps=1,
        )  # fmt: skip
    ids = torch.empty(N, count, dtype=torch.int32, device=logits.device)
    gains = logits.new_empty(N, count, dtype=torch.float32)
    _topk_kernel[(N,)](
        logits, rows, settings, peaks, parts, ids, gains, V, end, chunks * chunk, chunks,
        num_beams, count, next_power_of_2(count), near, next_power_of_2(near), GROUP_SIZE, next_power_of_2(chunks * chunk), next_power_of_2(chunks),
        num_warps=1 if count <= 8 else 4,
    )  # fmt: skip
    return ids, gains


class LoopLimits(NamedTuple):
    """A unit of at most so many tokens that comes for the so manieth time in a row and then fills at least so many."""

    max_unit: int
    min_repeats: int
    min_tokens: int

    @property
    def unit_lengths(self) -> range:
        return range(1, self.max_unit + 1)

    def count_tokens_before(self, unit: int) -> int:
        """Tokens that must be there, so that one more can close a loop of such units."""
        return max(self.min_repeats, -(-self.min_tokens // unit)) * unit - 1


class TokenHistory(Protocol):
    """What is written, and whether that may go in circles."""

    loop_limits: LoopLimits
    forbid_loops: Tensor  # (S,) not 0: it may not
    tree_tokens: Tensor  # (leaves, K) the trees of all sources
    ancestors: Tensor


def count_candidates(num_beams: int) -> int:
    return 1 if num_beams == 1 else 2 * num_beams


# --- beams -----------------------------------------------------------------------------------------------------------


class SearchTensors(Protocol):
    """The state of a search; `attent.decode.lane` has it."""

    sources: Tensor  # (S, 4)
    counters: Tensor
    settings: Tensor
    length_penalties: Tensor  # of each length
    ancestors: Tensor
    log_probs: Tensor  # (S, K) of log-probabilities
    lengths: Tensor  # (S,) tokens written
    finished_counts: Tensor  # (S,) hypotheses that have ended
    finished_scores: Tensor  # (S, N) of the best of these, the best first
    finished_log_probs: Tensor  # (S, N)
    finished_pointers: Tensor  # (S, N) tokens before the end, times K, + the beam that it went on from
    tree_tokens: Tensor  # (leaves, K) the trees of all sources
    tree_parents: Tensor  # (leaves, K)


def advance_rows(
    state: SearchTensors, rows: Tensor, input_tokens: Tensor, ids: Tensor, log_probs: Tensor, start: int, end: int
) -> None:
    """With the likeliest words of each beam (R * K, C), the next turn of every row; all that follows is written."""
    K = input_tokens.shape[1]
    N = state.finished_scores.shape[1]
    C = ids.shape[1]
    _advance_rows_kernel[(len(rows),)](
        rows, state.sources, state.counters, state.settings, state.length_penalties, ids, log_probs, input_tokens, state.ancestors,
        state.ancestors.shape[1], state.log_probs, state.lengths, state.finished_counts, state.finished_scores, state.finished_log_probs,
        state.finished_pointers, state.tree_tokens, state.tree_parents, start, end,
        K, next_power_of_2(K), C, next_power_of_2(C), N, next_power_of_2(N), 32, num_warps=1,
    )  # fmt: skip


def backtrack_tokens(pointers: Tensor, sources: Tensor, tokens: Tensor, parents: Tensor, max_length: int) -> Tensor:
    """The tokens that lead to each pointer (S, N): (S * N, longest); what stands behind them is not written at all."""
    S, N = pointers.shape
    out = torch.empty(S * N, max_length, dtype=torch.int32, device=pointers.device)
    _backtrack_kernel[(triton.cdiv(S * N, 32),)](
        pointers.contiguous(), sources, tokens, parents, out, S * N, max_length, tokens.shape[1], N, 32, num_warps=1
    )
    return out


# --- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _embed_kernel(Tokens, Rows, Table, Places, Out, scale, width, K: tl.constexpr, E: tl.constexpr):
    beam = tl.program_id(0)
    row = Rows + beam // K * ROW_STRIDE
    if tl.load(row) >= 0:
        length = tl.load(row + ROW_LENGTH)
        token = tl.load(Tokens + beam).to(tl.int64)
        e = tl.arange(0, E)
        x = tl.load(Table + token * width + e, mask=e < width, other=0.0).to(tl.float32) * scale
        x += tl.load(Places + length * width + e, mask=e < width, other=0.0).to(tl.float32)
        tl.store(Out + beam.to(tl.int64) * width + e, x.to(Out.dtype.element_ty), mask=e < width)


@triton.jit
def _add_norm_kernel(
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
def _attend_block(q, Keys, Values, place, read, seen, top, mass, sums, scale):
    """Queries meet some more keys and values: those that are read at all, and of these the ones that each has seen."""
    keys = tl.load(Keys + place, mask=read[:, None], other=0.0)
    values = tl.load(Values + place, mask=read[:, None], other=0.0)
    score = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    fade = tl.exp(top - higher)
    weight = tl.exp(score - higher[:, None])
    sums = tl.dot(weight.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
    return higher, mass * fade + tl.sum(weight, 1), sums


@triton.jit
def _attend_past_kernel(
    QKV, Keys, Values, Ancestors, Rows, Out, scale, columns,
    H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each beam has its own new column to begin with. Up to some place all have the same ancestors: a column for each.
    From there on all beams meet all columns, but see those of their own ancestors alone; what is nobody's is not
    read."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    facts = Rows + row * ROW_STRIDE
    if tl.load(facts) >= 0:
        length = tl.load(facts + ROW_LENGTH)
        room = tl.load(facts + ROW_CACHE_START)
        shared = head // (H // HKV)
        beam = tl.arange(0, KP)
        d = tl.arange(0, D)
        c = tl.arange(0, BLOCK)
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
        whose = Ancestors + (length % 2).to(tl.int64) * columns + room.to(tl.int64) * K
        alike = length
        if K > 1:
            alike = tl.load(facts + ROW_SHARED_LENGTH)
        for first in range(0, alike, BLOCK):
            read = first + c < alike
            column = (first + c) * K
            if K > 1:
                column += tl.load(whose + column, mask=read, other=0).to(tl.int32)
            place = past + column[:, None] * D + d[None, :]
            top, mass, sums = _attend_block(q, Keys, Values, place, read, read[None, :], top, mass, sums, scale)
        if K > 1:
            for first in range(alike * K, length * K, BLOCK):
                column = first + c
                inside = (column < length * K)[None, :] & real
                ancestor = tl.load(whose + (column // K * K)[None, :] + beam[:, None], mask=inside, other=-1)
                seen = ancestor == (column % K)[None, :]
                read = tl.max(seen.to(tl.int32), 0) > 0
                place = past + column[:, None] * D + d[None, :]
                top, mass, sums = _attend_block(q, Keys, Values, place, read, seen, top, mass, sums, scale)
        place = (row * K + beam).to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
        tl.store(Out + place, (sums / mass[:, None]).to(Out.dtype.element_ty), mask=real)


@triton.jit
def _attend_memory_kernel(
    Q, Memory, Rows, Out, scale,
    H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The beams of a row share what they look at."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    facts = Rows + row * ROW_STRIDE
    if tl.load(facts) >= 0:
        begin = tl.load(facts + ROW_MEMORY_START)
        length = tl.load(facts + ROW_SOURCE_LENGTH)
        beam = tl.arange(0, KP)
        d = tl.arange(0, D)
        t = tl.arange(0, BLOCK)
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
            top, mass, sums = _attend_block(q, keys, keys + HKV * D, place, read, read[None, :], top, mass, sums, scale)
        tl.store(Out + mine, (sums / mass[:, None]).to(Out.dtype.element_ty), mask=real)


@triton.jit
def _attend_packed_kernel(
    QKV, Begins, Lengths, Out, scale,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some queries of one source at all of it."""
    source = tl.program_id(0)
    head = tl.program_id(1)
    first_query = tl.program_id(2) * QUERIES
    length = tl.load(Lengths + source)
    if first_query < length:
        at = first_query + tl.arange(0, QUERIES)
        d = tl.arange(0, D)
        t = tl.arange(0, BLOCK)
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
            top, mass, sums = _attend_block(q, keys, keys + HKV * D, place, read, read[None, :], top, mass, sums, scale)
        place = (begin + at)[:, None] * (H * D) + head * D + d[None, :]
        tl.store(Out + place, (sums / mass[:, None]).to(Out.dtype.element_ty), mask=(at < length)[:, None])


@triton.jit
def _pack_rank(values, places):
    """Whole numbers that are greater where the value is, and of equal ones where the place is lower. A place may be a
    constant: Triton makes one of every whole number that it is given as 1, and constants have no `to`."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - places)


@triton.jit
def _unpack_index(ranked):
    return 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _group_max_kernel(
    Logits, Rows, Peaks, Parts, V, end,
    K: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of each group of words its best, without the end; of the chunk what the sum of all probabilities needs."""
    beam = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(Rows + beam // K * ROW_STRIDE) >= 0:
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
        tl.store(part, top)
        tl.store(part + 1, mass)


@triton.jit
def _load_history(Tokens, whose, leaf, length, beam, back, K: tl.constexpr):
    """The tokens of a beam that stand so far back, 0 for the last; -1 where there is none. The beam itself wrote the
    last, and its ancestor at a place the one before that place."""
    there = back < length
    column = tl.zeros_like(back)
    if K > 1:
        older = there & (back > 0)
        column = tl.load(whose + (length - back) * K + beam, mask=older, other=0).to(tl.int32)
        column = tl.where(back > 0, column, beam)
    return tl.load(Tokens + (leaf + length - 1 - back) * K + column, mask=there, other=-1)


@triton.jit
def _forbid_loops_kernel(
    Logits, Peaks, Rows, NoLoops, Tokens, Ancestors, columns, V, end, groups, K: tl.constexpr, WIDE: tl.constexpr,
    LONGEST: tl.constexpr, TIMES: tl.constexpr, FILLED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """The words with which a beam would close a loop become impossible, and the best of their groups are told anew; in
    the sum of all probabilities they stay."""
    number = tl.program_id(0)
    row = Rows + number // K * ROW_STRIDE
    source = tl.load(row)
    if tl.load(NoLoops + source, mask=source >= 0, other=0) != 0:
        beam = number % K
        length = tl.load(row + ROW_LENGTH)
        leaf = tl.load(row + ROW_TREE_START).to(tl.int64)
        whose = Ancestors + (length % 2).to(tl.int64) * columns + tl.load(row + ROW_CACHE_START).to(tl.int64) * K
        back = tl.arange(0, BACK)
        tokens = _load_history(Tokens, whose, leaf, length, beam, back, K)
        last = tl.sum(tl.where(back == 0, tokens, 0), 0)
        same = (tokens == last) & (back > 0) & (back <= LONGEST) & (back < length)
        if tl.sum(same.to(tl.int32), 0) > 0:  # only then can the last token be part of a loop
            mine = Logits + number.to(tl.int64) * V
            for unit in tl.static_range(1, LONGEST + 1):
                run = (tl.cdiv(FILLED, unit) if tl.cdiv(FILLED, unit) > TIMES else TIMES) * unit - unit - 1
                before = _load_history(Tokens, whose, leaf, length, beam, back + unit, K)
                broken = (back < run) & (tokens != before)
                if (tl.sum(broken.to(tl.int32), 0) == 0) & (run + unit <= length):
                    word = tl.sum(tl.where(back == unit - 1, tokens, 0), 0)
                    tl.store(mine + word, float("-inf"))
                    tl.debug_barrier()
                    group = word // WIDE
                    near = group * WIDE + tl.arange(0, WIDE)
                    logits = tl.load(mine + near, mask=(near < V) & (near != end), other=float("-inf"))
                    tl.store(Peaks + number.to(tl.int64) * groups + group, tl.max(logits.to(tl.float32), 0))


@triton.jit
def _topk_kernel(
    Logits, Rows, Settings, Peaks, Parts, Ids, Gains, V, end, groups, chunks,
    K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, NEAR: tl.constexpr, NEARP: tl.constexpr,
    WIDE: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The best words lie in the groups whose own best are the best. The end has no group: it stands by itself."""
    beam = tl.program_id(0)
    row = Rows + beam // K * ROW_STRIDE
    if tl.load(row) >= 0:
        lowest = tl.full((), -(2**63), tl.int64)
        chunk = tl.arange(0, CHUNKS)
        part = Parts + (beam * chunks + chunk) * 2
        tops = tl.load(part, mask=chunk < chunks, other=float("-inf"))
        masses = tl.load(part + 1, mask=chunk < chunks, other=0.0)
        top = tl.max(tops, 0)
        total = top + tl.log(tl.sum(masses * tl.exp(tops - top), 0))

        group = tl.arange(0, GROUPS)
        nth = tl.arange(0, NEARP)
        peaks = tl.load(Peaks + beam.to(tl.int64) * groups + group, mask=group < groups, other=0.0)
        ranks = tl.where(group < groups, _pack_rank(peaks, group), lowest)
        nearest = tl.zeros((NEARP,), tl.int64)
        for i in range(NEAR):
            best = tl.max(ranks, 0)
            ranks = tl.where(ranks == best, lowest, ranks)
            nearest = tl.where(nth == i, best, nearest)

        mine = Logits + beam.to(tl.int64) * V
        near = tl.where(nth < NEAR, _unpack_index(nearest), 0)
        word = near[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        there = (nth < NEAR)[:, None] & (word < V) & (word != end)
        logits = tl.load(mine + word, mask=there, other=0.0).to(tl.float32)
        ranks = tl.where(there, _pack_rank(logits, word), lowest)
        allowed = tl.load(row + ROW_LENGTH) >= tl.load(Settings + SETTING_MIN_LENGTH)
        last = tl.where(allowed, tl.load(mine + end).to(tl.float32), float("-inf"))
        ended = _pack_rank(last, end)
        rank = tl.arange(0, CP)
        likeliest = tl.zeros((CP,), tl.int64)
        for i in range(C):
            best = tl.maximum(tl.max(tl.max(ranks, 1), 0), ended)
            ranks = tl.where(ranks == best, lowest, ranks)
            ended = tl.where(ended == best, lowest, ended)
            likeliest = tl.where(rank == i, best, likeliest)
        ids = tl.where(rank < C, _unpack_index(likeliest), 0)
        logits = tl.load(mine + ids, mask=rank < C, other=0.0).to(tl.float32)
        logits = tl.where((ids == end) & (allowed == 0), float("-inf"), logits)
        tl.store(Ids + beam * C + rank, ids, mask=rank < C)
        tl.store(Gains + beam * C + rank, logits - total, mask=rank < C)


@triton.jit
def _advance_rows_kernel(
    Rows, Sources, Counters, Settings, Penalties, Ids, Gains, Read, Ancestors, columns, Sums, Lengths, Counts,
    Scores, EndSums, Pointers, Tokens, Parents, start, end,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One source: the best continuations of its beams, which of them end, which go on, and whether any can still win.
    Behind the last one the row takes the next source. One warp: what is read before is written over after."""
    number = tl.program_id(0)
    row = Rows + number * ROW_STRIDE
    source = tl.load(row)
    if source >= 0:
        length = tl.load(row + ROW_LENGTH)
        limit = tl.load(row + ROW_MAX_LENGTH)
        beam = tl.arange(0, KP)
        nth = tl.arange(0, NP)
        sums = Sums + source * K
        parent, token, total = _expand_beams(Ids + number * (K * C), Gains + number * (K * C), sums, K, KP, C, CP)
        possible = (tl.arange(0, CP) < C) & (total > float("-inf"))
        ends = possible & (token == end) & (tl.arange(0, CP) < K)
        new_parent, new_token, new_sum = _select_live_beams(
            parent, token, total, possible & (token != end), end, KP, C, CP
        )

        old = tl.load(Scores + source * N + nth, mask=nth < N, other=float("-inf"))
        ended = tl.sum(ends.to(tl.int32), 0)
        if ended > 0:
            score = tl.div_rn(total, tl.load(Penalties + length + 1) + tl.zeros((CP,), tl.float32))
            pools = source * N
            pointer = length * K + parent
            old = _merge_finished(
                Scores + pools, EndSums + pools, Pointers + pools, old, ends, score, total, pointer, N, NP, CP
            )

        count = tl.load(Counts + source) + ended
        worst = tl.max(tl.where(nth == N - 1, old, float("-inf")), 0)
        hope = tl.div_rn(tl.max(tl.where(beam < K, new_sum, float("-inf")), 0), tl.load(Penalties + limit))
        done = (length + 1 >= limit) | (hope <= worst) | (count >= tl.load(Settings + SETTING_MAX_FINISHED))
        tl.debug_barrier()
        tl.store(sums + beam, new_sum, mask=beam < K)
        tl.store(Lengths + source, length + 1)
        tl.store(Counts + source, count)
        leaf = (tl.load(row + ROW_TREE_START) + length) * K + beam
        tl.store(Tokens + leaf, new_token, mask=beam < K)
        tl.store(Parents + leaf, new_parent.to(tl.int8), mask=beam < K)

        read = Read + number * K + beam
        if done:
            _load_next_source(row, Sources, Counters)
            tl.store(read, start + tl.zeros((KP,), tl.int32), mask=beam < K)
        else:
            tl.store(row + ROW_LENGTH, length + 1)
            tl.store(read, new_token, mask=beam < K)
            if K > 1:
                _update_ancestors(row, Ancestors, columns, length, new_parent, K, KP, BLOCK)


@triton.jit
def _expand_beams(ids, gains, sums, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr):
    """The C best continuations of all beams, the best first: the beam, the token and the sum of each."""
    lowest = tl.full((), -(2**63), tl.int64)
    beam = tl.arange(0, KP)
    rank = tl.arange(0, CP)
    place = beam[:, None] * C + rank[None, :]
    inside = (beam < K)[:, None] & (rank < C)[None, :]
    before = tl.load(sums + beam, mask=beam < K, other=float("-inf"))
    ranks = before[:, None] + tl.load(gains + place, mask=inside, other=float("-inf"))
    ranks = tl.where(inside, _pack_rank(ranks, place), lowest)
    order = tl.zeros((CP,), tl.int64)
    for i in range(C):
        best = tl.max(tl.max(ranks, 1), 0)
        ranks = tl.where(ranks == best, lowest, ranks)
        order = tl.where(rank == i, best, order)
    chosen = tl.where(rank < C, _unpack_index(order), 0)
    parent = chosen // C
    token = tl.load(ids + chosen, mask=rank < C, other=0)
    total = tl.load(sums + parent, mask=rank < C, other=float("-inf"))
    total += tl.load(gains + chosen, mask=rank < C, other=float("-inf"))
    return parent, token, total


@triton.jit
def _select_live_beams(parent, token, total, goes, end, KP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr):
    """The beams from here: the first of those that go on, and where these are too few, empty ones."""
    beam = tl.arange(0, KP)
    rank = tl.arange(0, CP)
    going = tl.sum(goes.to(tl.int32), 0)
    behind = tl.cumsum(((rank < C) & (goes == 0)).to(tl.int32), 0) + going
    to = tl.where(goes, tl.cumsum(goes.to(tl.int32), 0), behind) - 1
    mine = (to[None, :] == beam[:, None]) & (rank < C)[None, :]
    alive = mine & goes[None, :]
    new_parent = tl.sum(tl.where(mine, parent[None, :], 0), 1)
    new_token = tl.sum(tl.where(mine, tl.where(goes, token, end)[None, :], 0), 1)
    new_sum = tl.sum(tl.where(alive, total[None, :], 0.0), 1)
    new_sum = tl.where(tl.sum(alive.to(tl.int32), 1) > 0, new_sum, float("-inf"))
    return new_parent, new_token, new_sum


@triton.jit
def _merge_finished(
    Scores, EndSums, Pointers, old, ends, score, total, pointer, N: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr
):
    """The N best of what had ended and what ends now; of equals what was there first. Their scores."""
    lowest = tl.full((), -(2**63), tl.int64)
    rank = tl.arange(0, CP)
    nth = tl.arange(0, NP)
    kept_ranks = tl.where(nth < N, _pack_rank(old, nth), lowest)
    new_ranks = tl.where(ends, _pack_rank(score, NP + rank), lowest)
    ranking = tl.zeros((NP,), tl.int64)
    for i in range(N):
        best = tl.maximum(tl.max(kept_ranks, 0), tl.max(new_ranks, 0))
        kept_ranks = tl.where(kept_ranks == best, lowest, kept_ranks)
        new_ranks = tl.where(new_ranks == best, lowest, new_ranks)
        ranking = tl.where(nth == i, best, ranking)
    kept = _unpack_index(ranking)
    stays = (nth < N) & (kept < NP)
    comes = (kept[:, None] - NP == rank[None, :]) & ends[None, :] & (nth < N)[:, None]
    old_score = tl.load(Scores + kept, mask=stays, other=0.0)
    old_sum = tl.load(EndSums + kept, mask=stays, other=0.0)
    old_pointer = tl.load(Pointers + kept, mask=stays, other=0)
    tl.debug_barrier()
    best_scores = tl.where(stays, old_score, tl.sum(tl.where(comes, score[None, :], 0.0), 1))
    tl.store(Scores + nth, best_scores, mask=nth < N)
    end_sum = tl.where(stays, old_sum, tl.sum(tl.where(comes, total[None, :], 0.0), 1))
    tl.store(EndSums + nth, end_sum, mask=nth < N)
    best_pointers = tl.where(stays, old_pointer, tl.sum(tl.where(comes, pointer[None, :], 0), 1))
    tl.store(Pointers + nth, best_pointers, mask=nth < N)
    return best_scores


@triton.jit
def _load_next_source(row, Sources, Counters):
    """The row begins with the next source, or is at rest."""
    following = tl.atomic_add(Counters + COUNTER_NEXT_SOURCE, 1)
    if following < tl.load(Counters + COUNTER_SOURCES):
        tl.store(row, following)
        tl.store(row + ROW_LENGTH, 0)
        tl.store(row + ROW_SHARED_LENGTH, 0)
        for fact in tl.static_range(ROW_MEMORY_START, ROW_TREE_START + 1):
            tl.store(row + fact, tl.load(Sources + following * SOURCE_STRIDE + fact - ROW_MEMORY_START))
    else:
        tl.store(row, -1)
        tl.atomic_add(Counters + COUNTER_ACTIVE_ROWS, -1)


@triton.jit
def _update_ancestors(
    row, Ancestors, columns, length, new_parent, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr
):
    """Each beam has the ancestors of the one that it goes on from, and that one."""
    beam = tl.arange(0, KP)
    room = tl.load(row + ROW_CACHE_START)
    now = Ancestors + (length % 2).to(tl.int64) * columns
    after = Ancestors + ((length + 1) % 2).to(tl.int64) * columns
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
    tl.store(row + ROW_SHARED_LENGTH, alike)


@triton.jit
def _backtrack_kernel(
    Pointers, Trees, Tokens, Parents, Out, count, width, K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):
    """From the last token of each hypothesis to its first."""
    nth = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = nth < count
    pointer = tl.load(Pointers + nth, mask=inside, other=0)
    tree = tl.load(Trees + nth // N * SOURCE_STRIDE + (ROW_TREE_START - ROW_MEMORY_START), mask=inside, other=0)
    place = pointer // K - 1
    beam = pointer % K
    for _ in range(tl.max(place, 0) + 1):
        there = inside & (place >= 0)
        leaf = (tree + place) * K + beam
        tl.store(Out + nth.to(tl.int64) * width + place, tl.load(Tokens + leaf, mask=there, other=0), mask=there)
        beam = tl.load(Parents + leaf, mask=there, other=0).to(tl.int32)
        place -= 1
