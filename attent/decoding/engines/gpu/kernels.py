"""Triton kernels for one decoding step of K beams for each of many sources: attention over a cache with shared
ancestors, attention to packed sources, top-k, and the update of the beams. Norms, and attention within sources, are
the kernels of `attent.nn`.

The state of a search stays on the GPU and nothing waits for the host: a row whose source is done takes the next one
itself. `beam_search` puts the parts together; the rules are those of `attent.decoding.search`.

A row holds the beams of one source and is described by eight integers (`ROW_*`). A position of the cache has one column
for each beam. The tree of a source stores the token of each beam at each position, and the beam that it continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from attent.decoding.constraints.token_rules import LOOP_RUNS, MAX_LOOP_PERIOD, MIN_LOOP_REPEATS, MIN_LOOP_TOKENS

if TYPE_CHECKING:
    from attent.decoding.engines.gpu.beam_search import SearchBuffers

ROW_FIELDS = 8  # int32 fields per row
ROW_SOURCE = tl.constexpr(0)  # -1: inactive
ROW_LENGTH = tl.constexpr(1)  # tokens generated
ROW_CACHE_START = tl.constexpr(2)  # first position in the cache
ROW_MEMORY_START = tl.constexpr(3)  # first token of its source among all
ROW_SOURCE_LENGTH = tl.constexpr(4)
ROW_MAX_LENGTH = tl.constexpr(5)
ROW_TREE_START = tl.constexpr(6)  # first position in the trees
ROW_SHARED_LENGTH = tl.constexpr(7)  # positions up to which all beams have the same ancestors
SOURCE_FIELDS = 4  # fields of a source: ROW_MEMORY_START to ROW_TREE_START of the row that takes it
ROW_STRIDE = tl.constexpr(ROW_FIELDS)
SOURCE_STRIDE = tl.constexpr(SOURCE_FIELDS)
COUNTER_NEXT_SOURCE = tl.constexpr(0)
COUNTER_ACTIVE_ROWS = tl.constexpr(1)
COUNTER_SOURCES = tl.constexpr(2)
SETTING_MIN_LENGTH = tl.constexpr(0)
SETTING_MAX_FINISHED = tl.constexpr(1)  # number of finished hypotheses at which a source is done
GROUP_SIZE = 64  # tokens that are first compared by their maximum alone
GROUPS_PER_CHUNK = 32  # per program of the first pass
KEY_BLOCK = 16  # keys per iteration; of 16, 32 and 64, with one warp or two, the fastest on an H200
# For periods 1, 2, ...: how many tokens come before the one that closes a loop.
LOOP_HISTORIES = tuple(run_length + period - 1 for period, run_length in enumerate(LOOP_RUNS, 1))
MAX_BEAMS = 16  # the smallest row count of a matrix product: fewer beams are padded


# --- layers ----------------------------------------------------------------------------------------------------------


def embed_tokens(
    tokens: Tensor, rows: Tensor, embedding_weight: Tensor, position_embeddings: Tensor, scale: float
) -> Tensor:
    """Embed tokens (R, K) at the positions of their rows: (R * K, E)."""
    width = embedding_weight.shape[1]
    out = embedding_weight.new_empty(tokens.numel(), width)
    padded = triton.next_power_of_2(width)
    _embed_kernel[(tokens.numel(),)](
        tokens, rows, embedding_weight, position_embeddings, out, scale, width, tokens.shape[1], padded,
        num_warps=max(1, min(8, padded // 512)),
    )  # fmt: skip
    return out


def attend_past(
    qkv: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, rows: Tensor, num_beams: int, heads: int, scale: float
) -> Tensor:
    """Attend from each beam to its past: qkv (R * K, (H + 2 Hkv) * D) -> (R * K, H * D).

    New keys and values are written to the cache (Hkv, columns, D). `ancestors` (2, columns) says which beam's column
    holds each position of a beam's past; one half is for even numbers of tokens, the other for odd ones.
    """
    kv_heads, columns, D = keys.shape
    out = qkv.new_empty(len(qkv), heads * D)
    _attend_past_kernel[(len(qkv) // num_beams, heads)](
        qkv, keys, values, ancestors, rows, out, scale, columns,
        heads, kv_heads, num_beams, MAX_BEAMS, D, KEY_BLOCK, num_warps=1,
    )  # fmt: skip
    return out


def attend_memory(q: Tensor, memory: Tensor, rows: Tensor, num_beams: int, scale: float) -> Tensor:
    """Attend from queries (R * K, H * D) to the source of each row; `memory` (N, 2, Hkv, D) has keys and values."""
    _, _, kv_heads, D = memory.shape
    heads = q.shape[1] // D
    out = torch.empty_like(q)
    _attend_memory_kernel[(len(q) // num_beams, heads)](
        q, memory, rows, out, scale, heads, kv_heads, num_beams, MAX_BEAMS, D, KEY_BLOCK, num_warps=1
    )
    return out


# --- candidates ------------------------------------------------------------------------------------------------------


def topk_log_probs(
    logits: Tensor, rows: Tensor, settings: Tensor, num_beams: int, end: int, history: SearchBuffers | None = None
) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities (R * K, C) of the best tokens of each beam, C = 2K, or 1 for one beam.

    On ties the lowest id comes first. The end is excluded before the minimum length, and tokens that would close a
    loop where loops are forbidden; their logits (R * K, V) are overwritten.
    """
    N, V = logits.shape
    groups = -(-V // GROUP_SIZE)
    chunk = min(GROUPS_PER_CHUNK, triton.next_power_of_2(groups))
    chunks = -(-groups // chunk)
    count = 1 if num_beams == 1 else 2 * num_beams
    best_groups = min(count, groups)
    group_max = logits.new_empty(N, chunks * chunk, dtype=torch.float32)
    chunk_sums = logits.new_empty(N, chunks, 2, dtype=torch.float32)
    _group_max_kernel[(N, chunks)](
        logits, rows, group_max, chunk_sums, V, end, num_beams, chunk, GROUP_SIZE, num_warps=4
    )
    if history is not None:
        _forbid_loops_kernel[(N,)](
            logits, group_max, rows, history.forbid_loops, history.tree_tokens, history.ancestors,
            history.ancestors.shape[1], V, end, chunks * chunk, num_beams, GROUP_SIZE, MAX_LOOP_PERIOD,
            MIN_LOOP_REPEATS, MIN_LOOP_TOKENS, triton.next_power_of_2(max(LOOP_HISTORIES)), num_warps=1,
        )  # fmt: skip
    ids = torch.empty(N, count, dtype=torch.int32, device=logits.device)
    log_probs = logits.new_empty(N, count, dtype=torch.float32)
    _topk_kernel[(N,)](
        logits, rows, settings, group_max, chunk_sums, ids, log_probs, V, end, chunks * chunk, chunks,
        num_beams, count, triton.next_power_of_2(count), best_groups, triton.next_power_of_2(best_groups), GROUP_SIZE,
        triton.next_power_of_2(chunks * chunk), triton.next_power_of_2(chunks), num_warps=1 if count <= 8 else 4,
    )  # fmt: skip
    return ids, log_probs


# --- beams -----------------------------------------------------------------------------------------------------------


def advance_rows(
    state: SearchBuffers, rows: Tensor, input_tokens: Tensor, ids: Tensor, log_probs: Tensor, start: int, end: int
) -> None:
    """Select among the candidates of each beam (R * K, C) and update the state of every row in place."""
    K, C, N = input_tokens.shape[1], ids.shape[1], state.finished_scores.shape[1]
    _advance_rows_kernel[(len(rows),)](
        rows, state.sources, state.counters, state.settings, state.score_divisors, ids, log_probs, input_tokens,
        state.ancestors, state.ancestors.shape[1], state.log_probs, state.lengths, state.finished_counts,
        state.finished_scores, state.finished_log_probs, state.finished_nodes, state.tree_tokens,
        state.tree_parents, start, end, K, triton.next_power_of_2(K), C, triton.next_power_of_2(C),
        N, triton.next_power_of_2(N), 32, num_warps=1,
    )  # fmt: skip


def backtrack_tokens(nodes: Tensor, sources: Tensor, tokens: Tensor, parents: Tensor, max_length: int) -> Tensor:
    """Return the tokens that lead to each node (S, N): (S * N, max_length); the rest of a row is uninitialized."""
    S, N = nodes.shape
    out = torch.empty(S * N, max_length, dtype=torch.int32, device=nodes.device)
    _backtrack_kernel[(triton.cdiv(S * N, 32),)](
        nodes.contiguous(), sources, tokens, parents, out, S * N, max_length, tokens.shape[1], N, 32, num_warps=1
    )
    return out


# --- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _embed_kernel(
    Tokens, Rows, EmbeddingWeight, PositionEmbeddings, Out, scale, width, K: tl.constexpr, E: tl.constexpr
):
    beam = tl.program_id(0)
    row = Rows + beam // K * ROW_STRIDE
    if tl.load(row + ROW_SOURCE) >= 0:
        length = tl.load(row + ROW_LENGTH)
        token = tl.load(Tokens + beam).to(tl.int64)
        e = tl.arange(0, E)
        x = tl.load(EmbeddingWeight + token * width + e, mask=e < width, other=0.0).to(tl.float32) * scale
        x += tl.load(PositionEmbeddings + length * width + e, mask=e < width, other=0.0).to(tl.float32)
        tl.store(Out + beam.to(tl.int64) * width + e, x.to(Out.dtype.element_ty), mask=e < width)


@triton.jit
def _attend_block(q, Keys, Values, offsets, load_mask, visible, row_max, row_sum, acc, scale):
    """Online softmax over one block of keys and values: load those in `load_mask`, attend to the `visible` ones."""
    keys = tl.load(Keys + offsets, mask=load_mask[:, None], other=0.0)
    values = tl.load(Values + offsets, mask=load_mask[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    rescale = tl.exp(row_max - new_max)
    weights = tl.exp(scores - new_max[:, None])
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return new_max, row_sum * rescale + tl.sum(weights, 1), acc


@triton.jit
def _attend_past_kernel(
    QKV, Keys, Values, Ancestors, Rows, Out, scale, columns,
    H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each beam starts with its own new column. Up to `ROW_SHARED_LENGTH` all beams have the same ancestors: one column
    per position. From there on all beams process all columns, masked to their own ancestors; columns that are no
    beam's ancestor are not loaded."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    row_ptr = Rows + row * ROW_STRIDE
    if tl.load(row_ptr + ROW_SOURCE) >= 0:
        length = tl.load(row_ptr + ROW_LENGTH)
        cache_start = tl.load(row_ptr + ROW_CACHE_START)
        kv_head = head // (H // HKV)
        beam = tl.arange(0, K_PAD)
        d = tl.arange(0, D)
        c = tl.arange(0, BLOCK)
        is_beam = (beam < K)[:, None]
        qkv_ptr = QKV + (row * K + beam).to(tl.int64)[:, None] * ((H + 2 * HKV) * D) + d[None, :]
        q = tl.load(qkv_ptr + head * D, mask=is_beam, other=0.0)
        key = tl.load(qkv_ptr + (H + kv_head) * D, mask=is_beam, other=0.0)
        value = tl.load(qkv_ptr + (H + HKV + kv_head) * D, mask=is_beam, other=0.0)
        cache_offset = kv_head.to(tl.int64) * columns * D + cache_start.to(tl.int64) * (K * D)
        new_offsets = cache_offset + (length * K + beam)[:, None] * D + d[None, :]
        if head % (H // HKV) == 0:
            tl.store(Keys + new_offsets, key, mask=is_beam)
            tl.store(Values + new_offsets, value, mask=is_beam)
        row_max = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
        row_sum = tl.full((K_PAD,), 1.0, tl.float32)
        acc = value.to(tl.float32)
        ancestor_ptr = Ancestors + (length % 2).to(tl.int64) * columns + cache_start.to(tl.int64) * K
        shared_length = length
        if K > 1:
            shared_length = tl.load(row_ptr + ROW_SHARED_LENGTH)
        for first in range(0, shared_length, BLOCK):
            load_mask = first + c < shared_length
            column = (first + c) * K
            if K > 1:
                column += tl.load(ancestor_ptr + column, mask=load_mask, other=0).to(tl.int32)
            offsets = cache_offset + column[:, None] * D + d[None, :]
            row_max, row_sum, acc = _attend_block(
                q, Keys, Values, offsets, load_mask, load_mask[None, :], row_max, row_sum, acc, scale
            )
        if K > 1:
            for first in range(shared_length * K, length * K, BLOCK):
                column = first + c
                valid = (column < length * K)[None, :] & is_beam
                ancestor = tl.load(ancestor_ptr + (column // K * K)[None, :] + beam[:, None], mask=valid, other=-1)
                visible = ancestor == (column % K)[None, :]
                load_mask = tl.max(visible.to(tl.int32), 0) > 0
                offsets = cache_offset + column[:, None] * D + d[None, :]
                row_max, row_sum, acc = _attend_block(
                    q, Keys, Values, offsets, load_mask, visible, row_max, row_sum, acc, scale
                )
        offsets = (row * K + beam).to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
        tl.store(Out + offsets, (acc / row_sum[:, None]).to(Out.dtype.element_ty), mask=is_beam)


@triton.jit
def _attend_memory_kernel(
    Q, Memory, Rows, Out, scale,
    H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The beams of a row share keys and values."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    row_ptr = Rows + row * ROW_STRIDE
    if tl.load(row_ptr + ROW_SOURCE) >= 0:
        memory_start = tl.load(row_ptr + ROW_MEMORY_START)
        length = tl.load(row_ptr + ROW_SOURCE_LENGTH)
        beam = tl.arange(0, K_PAD)
        d = tl.arange(0, D)
        t = tl.arange(0, BLOCK)
        is_beam = (beam < K)[:, None]
        beam_offsets = (row * K + beam).to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
        keys = Memory + memory_start.to(tl.int64) * (2 * HKV * D) + head // (H // HKV) * D
        q = tl.load(Q + beam_offsets, mask=is_beam, other=0.0)
        row_max = tl.full((K_PAD,), -1e30, tl.float32)
        row_sum = tl.zeros((K_PAD,), tl.float32)
        acc = tl.zeros((K_PAD, D), tl.float32)
        for first in range(0, length, BLOCK):
            load_mask = first + t < length
            offsets = (first + t)[:, None] * (2 * HKV * D) + d[None, :]
            row_max, row_sum, acc = _attend_block(
                q, keys, keys + HKV * D, offsets, load_mask, load_mask[None, :], row_max, row_sum, acc, scale
            )
        tl.store(Out + beam_offsets, (acc / row_sum[:, None]).to(Out.dtype.element_ty), mask=is_beam)


@triton.jit
def _pack_rank(values, indices):
    """Pack values and indices into integers that order by value, then by lower index. Do not call
    `indices.to`: Triton passes an argument equal to 1 as a constant, which has no `to`."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - indices)


@triton.jit
def _unpack_index(rank):
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _group_max_kernel(
    Logits, Rows, GroupMax, ChunkSums, V, end,
    K: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the maximum of each group without the end, and the chunk's part of the softmax denominator."""
    beam = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(Rows + beam // K * ROW_STRIDE + ROW_SOURCE) >= 0:
        group = chunk * GROUPS + tl.arange(0, GROUPS)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        logits = tl.load(Logits + beam.to(tl.int64) * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
        maxima = tl.max(logits, 1)
        chunk_max = tl.max(maxima, 0)
        safe_max = tl.where(chunk_max == float("-inf"), 0.0, chunk_max)
        chunk_sum = tl.sum(tl.sum(tl.exp(logits - safe_max), 1), 0)
        group_max = tl.max(tl.where(token == end, float("-inf"), logits), 1)
        tl.store(GroupMax + beam.to(tl.int64) * (tl.num_programs(1) * GROUPS) + group, group_max)
        chunk_ptr = ChunkSums + (beam * tl.num_programs(1) + chunk) * 2
        tl.store(chunk_ptr, chunk_max)
        tl.store(chunk_ptr + 1, chunk_sum)


@triton.jit
def _load_history(Tokens, ancestor_ptr, tree_start, length, beam, distance, K: tl.constexpr):
    """Load the tokens of a beam at a distance from the last one (0); -1 where there is none. The beam itself has the
    last token, its ancestor at a position the one before that position."""
    exists = distance < length
    column = tl.zeros_like(distance)
    if K > 1:
        is_older = exists & (distance > 0)
        column = tl.load(ancestor_ptr + (length - distance) * K + beam, mask=is_older, other=0).to(tl.int32)
        column = tl.where(distance > 0, column, beam)
    return tl.load(Tokens + (tree_start + length - 1 - distance) * K + column, mask=exists, other=-1)


@triton.jit
def _forbid_loops_kernel(
    Logits, GroupMax, Rows, ForbidLoops, Tokens, Ancestors, columns, V, end, groups,
    K: tl.constexpr, GROUP: tl.constexpr,
    MAX_UNIT: tl.constexpr, MIN_REPEATS: tl.constexpr, MIN_TOKENS: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Set tokens with which a beam would close a loop to -inf and update their groups' maxima; they keep their share of
    the softmax denominator."""
    beam_index = tl.program_id(0)
    row = Rows + beam_index // K * ROW_STRIDE
    source = tl.load(row + ROW_SOURCE)
    if tl.load(ForbidLoops + source, mask=source >= 0, other=0) != 0:
        beam = beam_index % K
        length = tl.load(row + ROW_LENGTH)
        tree_start = tl.load(row + ROW_TREE_START).to(tl.int64)
        ancestor_ptr = Ancestors + (length % 2).to(tl.int64) * columns + tl.load(row + ROW_CACHE_START).to(tl.int64) * K
        distance = tl.arange(0, HISTORY)
        tokens = _load_history(Tokens, ancestor_ptr, tree_start, length, beam, distance, K)
        last = tl.sum(tl.where(distance == 0, tokens, 0), 0)
        repeats = (tokens == last) & (distance > 0) & (distance <= MAX_UNIT) & (distance < length)
        if tl.sum(repeats.to(tl.int32), 0) > 0:  # else the last token cannot be part of a loop
            logits_ptr = Logits + beam_index.to(tl.int64) * V
            for unit in tl.static_range(1, MAX_UNIT + 1):
                run_length = (
                    (tl.cdiv(MIN_TOKENS, unit) if tl.cdiv(MIN_TOKENS, unit) > MIN_REPEATS else MIN_REPEATS) * unit
                    - unit
                    - 1
                )
                earlier = _load_history(Tokens, ancestor_ptr, tree_start, length, beam, distance + unit, K)
                differs = (distance < run_length) & (tokens != earlier)
                if (tl.sum(differs.to(tl.int32), 0) == 0) & (run_length + unit <= length):
                    token = tl.sum(tl.where(distance == unit - 1, tokens, 0), 0)
                    tl.store(logits_ptr + token, float("-inf"))
                    tl.debug_barrier()
                    group = token // GROUP
                    neighbors = group * GROUP + tl.arange(0, GROUP)
                    logits = tl.load(
                        logits_ptr + neighbors, mask=(neighbors < V) & (neighbors != end), other=float("-inf")
                    )
                    tl.store(GroupMax + beam_index.to(tl.int64) * groups + group, tl.max(logits.to(tl.float32), 0))


@triton.jit
def _topk_kernel(
    Logits, Rows, Settings, GroupMax, ChunkSums, Ids, LogProbs, V, end, groups, chunks,
    K: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, BEST_GROUPS: tl.constexpr, BEST_GROUPS_PAD: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The best tokens lie in the groups with the greatest maxima. The end belongs to no group."""
    beam = tl.program_id(0)
    row = Rows + beam // K * ROW_STRIDE
    if tl.load(row + ROW_SOURCE) >= 0:
        min_rank = tl.full((), -(2**63), tl.int64)
        chunk = tl.arange(0, CHUNKS)
        chunk_ptr = ChunkSums + (beam * chunks + chunk) * 2
        chunk_max = tl.load(chunk_ptr, mask=chunk < chunks, other=float("-inf"))
        chunk_sum = tl.load(chunk_ptr + 1, mask=chunk < chunks, other=0.0)
        row_max = tl.max(chunk_max, 0)
        log_norm = row_max + tl.log(tl.sum(chunk_sum * tl.exp(chunk_max - row_max), 0))

        group = tl.arange(0, GROUPS)
        slot = tl.arange(0, BEST_GROUPS_PAD)
        group_max = tl.load(GroupMax + beam.to(tl.int64) * groups + group, mask=group < groups, other=0.0)
        ranks = tl.where(group < groups, _pack_rank(group_max, group), min_rank)
        group_ranks = tl.zeros((BEST_GROUPS_PAD,), tl.int64)
        for i in range(BEST_GROUPS):
            best = tl.max(ranks, 0)
            ranks = tl.where(ranks == best, min_rank, ranks)
            group_ranks = tl.where(slot == i, best, group_ranks)

        logits_ptr = Logits + beam.to(tl.int64) * V
        best_group = tl.where(slot < BEST_GROUPS, _unpack_index(group_ranks), 0)
        token = best_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        valid = (slot < BEST_GROUPS)[:, None] & (token < V) & (token != end)
        logits = tl.load(logits_ptr + token, mask=valid, other=0.0).to(tl.float32)
        ranks = tl.where(valid, _pack_rank(logits, token), min_rank)
        can_end = tl.load(row + ROW_LENGTH) >= tl.load(Settings + SETTING_MIN_LENGTH)
        end_logit = tl.where(can_end, tl.load(logits_ptr + end).to(tl.float32), float("-inf"))
        end_rank = _pack_rank(end_logit, end)
        rank = tl.arange(0, C_PAD)
        best_ranks = tl.zeros((C_PAD,), tl.int64)
        for i in range(C):
            best = tl.maximum(tl.max(tl.max(ranks, 1), 0), end_rank)
            ranks = tl.where(ranks == best, min_rank, ranks)
            end_rank = tl.where(end_rank == best, min_rank, end_rank)
            best_ranks = tl.where(rank == i, best, best_ranks)
        ids = tl.where(rank < C, _unpack_index(best_ranks), 0)
        logits = tl.load(logits_ptr + ids, mask=rank < C, other=0.0).to(tl.float32)
        logits = tl.where((ids == end) & (can_end == 0), float("-inf"), logits)
        tl.store(Ids + beam * C + rank, ids, mask=rank < C)
        tl.store(LogProbs + beam * C + rank, logits - log_norm, mask=rank < C)


@triton.jit
def _advance_rows_kernel(
    Rows, Sources, Counters, Settings, ScoreDivisors, Ids, LogProbs, InputTokens, Ancestors, columns,
    BeamLogProbs, Lengths, FinishedCounts,
    FinishedScores, FinishedLogProbs, FinishedNodes, TreeTokens, TreeParents, start, end,
    K: tl.constexpr, K_PAD: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One source: rank the continuations of its beams, finish those that end, keep the next beams, and check whether
    any can still win; if not, the row takes the next source. One warp: reads come before writes to the same place."""
    row_index = tl.program_id(0)
    row = Rows + row_index * ROW_STRIDE
    source = tl.load(row + ROW_SOURCE)
    if source >= 0:
        length = tl.load(row + ROW_LENGTH)
        limit = tl.load(row + ROW_MAX_LENGTH)
        beam = tl.arange(0, K_PAD)
        slot = tl.arange(0, N_PAD)
        beam_log_probs = BeamLogProbs + source * K
        parent, token, log_prob = _expand_beams(
            Ids + row_index * (K * C), LogProbs + row_index * (K * C), beam_log_probs, K, K_PAD, C, C_PAD
        )
        valid = (tl.arange(0, C_PAD) < C) & (log_prob > float("-inf"))
        is_end = valid & (token == end) & (tl.arange(0, C_PAD) < K)
        new_parent, new_token, new_log_prob = _select_live_beams(
            parent, token, log_prob, valid & (token != end), end, K_PAD, C, C_PAD
        )

        finished_scores = tl.load(FinishedScores + source * N + slot, mask=slot < N, other=float("-inf"))
        num_ended = tl.sum(is_end.to(tl.int32), 0)
        if num_ended > 0:
            score = tl.div_rn(log_prob, tl.load(ScoreDivisors + length + 1) + tl.zeros((C_PAD,), tl.float32))
            finished_scores = _merge_finished(
                FinishedScores + source * N, FinishedLogProbs + source * N, FinishedNodes + source * N,
                finished_scores, is_end, score, log_prob, length * K + parent, N, N_PAD, C_PAD,
            )  # fmt: skip

        count = tl.load(FinishedCounts + source) + num_ended
        worst_finished = tl.max(tl.where(slot == N - 1, finished_scores, float("-inf")), 0)
        best_log_prob = tl.max(tl.where(beam < K, new_log_prob, float("-inf")), 0)
        best_possible = tl.div_rn(best_log_prob, tl.load(ScoreDivisors + limit))
        enough = count >= tl.load(Settings + SETTING_MAX_FINISHED)
        done = (length + 1 >= limit) | (best_possible <= worst_finished) | enough
        tl.debug_barrier()
        tl.store(beam_log_probs + beam, new_log_prob, mask=beam < K)
        tl.store(Lengths + source, length + 1)
        tl.store(FinishedCounts + source, count)
        node = (tl.load(row + ROW_TREE_START) + length) * K + beam
        tl.store(TreeTokens + node, new_token, mask=beam < K)
        tl.store(TreeParents + node, new_parent.to(tl.int8), mask=beam < K)

        input_ptr = InputTokens + row_index * K + beam
        if done:
            _load_next_source(row, Sources, Counters)
            tl.store(input_ptr, start + tl.zeros((K_PAD,), tl.int32), mask=beam < K)
        else:
            tl.store(row + ROW_LENGTH, length + 1)
            tl.store(input_ptr, new_token, mask=beam < K)
            if K > 1:
                _update_ancestors(row, Ancestors, columns, length, new_parent, K, K_PAD, BLOCK)


@triton.jit
def _expand_beams(
    ids, log_probs, beam_log_probs, K: tl.constexpr, K_PAD: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr
):
    """Return parent, token and log-probability of the C best continuations of all beams, best first."""
    min_rank = tl.full((), -(2**63), tl.int64)
    beam = tl.arange(0, K_PAD)
    rank = tl.arange(0, C_PAD)
    index = beam[:, None] * C + rank[None, :]
    valid = (beam < K)[:, None] & (rank < C)[None, :]
    beam_log_prob = tl.load(beam_log_probs + beam, mask=beam < K, other=float("-inf"))
    ranks = beam_log_prob[:, None] + tl.load(log_probs + index, mask=valid, other=float("-inf"))
    ranks = tl.where(valid, _pack_rank(ranks, index), min_rank)
    best_ranks = tl.zeros((C_PAD,), tl.int64)
    for i in range(C):
        best = tl.max(tl.max(ranks, 1), 0)
        ranks = tl.where(ranks == best, min_rank, ranks)
        best_ranks = tl.where(rank == i, best, best_ranks)
    chosen = tl.where(rank < C, _unpack_index(best_ranks), 0)
    parent = chosen // C
    token = tl.load(ids + chosen, mask=rank < C, other=0)
    log_prob = tl.load(beam_log_probs + parent, mask=rank < C, other=float("-inf"))
    log_prob += tl.load(log_probs + chosen, mask=rank < C, other=float("-inf"))
    return parent, token, log_prob


@triton.jit
def _select_live_beams(
    parent, token, log_prob, is_live, end, K_PAD: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr
):
    """Return the next beams: the best live continuations, and empty beams if these are too few."""
    beam = tl.arange(0, K_PAD)
    rank = tl.arange(0, C_PAD)
    num_live = tl.sum(is_live.to(tl.int32), 0)
    dead_slot = tl.cumsum(((rank < C) & (is_live == 0)).to(tl.int32), 0) + num_live
    slot = tl.where(is_live, tl.cumsum(is_live.to(tl.int32), 0), dead_slot) - 1
    selected = (slot[None, :] == beam[:, None]) & (rank < C)[None, :]
    live = selected & is_live[None, :]
    new_parent = tl.sum(tl.where(selected, parent[None, :], 0), 1)
    new_token = tl.sum(tl.where(selected, tl.where(is_live, token, end)[None, :], 0), 1)
    new_log_prob = tl.sum(tl.where(live, log_prob[None, :], 0.0), 1)
    new_log_prob = tl.where(tl.sum(live.to(tl.int32), 1) > 0, new_log_prob, float("-inf"))
    return new_parent, new_token, new_log_prob


@triton.jit
def _merge_finished(
    Scores,
    LogProbs,
    Nodes,
    old_scores,
    is_end,
    score,
    log_prob,
    node,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    C_PAD: tl.constexpr,
):
    """Merge new finished hypotheses into the N best, old ones first on ties; return their scores."""
    min_rank = tl.full((), -(2**63), tl.int64)
    rank = tl.arange(0, C_PAD)
    slot = tl.arange(0, N_PAD)
    old_ranks = tl.where(slot < N, _pack_rank(old_scores, slot), min_rank)
    new_ranks = tl.where(is_end, _pack_rank(score, N_PAD + rank), min_rank)
    best_ranks = tl.zeros((N_PAD,), tl.int64)
    for i in range(N):
        best = tl.maximum(tl.max(old_ranks, 0), tl.max(new_ranks, 0))
        old_ranks = tl.where(old_ranks == best, min_rank, old_ranks)
        new_ranks = tl.where(new_ranks == best, min_rank, new_ranks)
        best_ranks = tl.where(slot == i, best, best_ranks)
    index = _unpack_index(best_ranks)
    is_old = (slot < N) & (index < N_PAD)
    is_new = (index[:, None] - N_PAD == rank[None, :]) & is_end[None, :] & (slot < N)[:, None]
    old_score = tl.load(Scores + index, mask=is_old, other=0.0)
    old_log_prob = tl.load(LogProbs + index, mask=is_old, other=0.0)
    old_node = tl.load(Nodes + index, mask=is_old, other=0)
    tl.debug_barrier()
    best_scores = tl.where(is_old, old_score, tl.sum(tl.where(is_new, score[None, :], 0.0), 1))
    tl.store(Scores + slot, best_scores, mask=slot < N)
    best_log_probs = tl.where(is_old, old_log_prob, tl.sum(tl.where(is_new, log_prob[None, :], 0.0), 1))
    tl.store(LogProbs + slot, best_log_probs, mask=slot < N)
    best_nodes = tl.where(is_old, old_node, tl.sum(tl.where(is_new, node[None, :], 0), 1))
    tl.store(Nodes + slot, best_nodes, mask=slot < N)
    return best_scores


@triton.jit
def _load_next_source(row, Sources, Counters):
    """Start the next source in this row, or deactivate the row."""
    source = tl.atomic_add(Counters + COUNTER_NEXT_SOURCE, 1)
    if source < tl.load(Counters + COUNTER_SOURCES):
        tl.store(row + ROW_SOURCE, source)
        tl.store(row + ROW_LENGTH, 0)
        tl.store(row + ROW_SHARED_LENGTH, 0)
        for field in tl.static_range(ROW_MEMORY_START, ROW_TREE_START + 1):
            tl.store(row + field, tl.load(Sources + source * SOURCE_STRIDE + field - ROW_MEMORY_START))
    else:
        tl.store(row + ROW_SOURCE, -1)
        tl.atomic_add(Counters + COUNTER_ACTIVE_ROWS, -1)


@triton.jit
def _update_ancestors(
    row, Ancestors, columns, length, new_parent, K: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Give each beam the ancestors of its parent, and the parent itself."""
    beam = tl.arange(0, K_PAD)
    cache_start = tl.load(row + ROW_CACHE_START)
    current = Ancestors + (length % 2).to(tl.int64) * columns
    updated = Ancestors + ((length + 1) % 2).to(tl.int64) * columns
    shared_length = length + 1
    for first in range(0, length + 1, BLOCK):
        t = first + tl.arange(0, BLOCK)
        column = ((cache_start + t) * K)[:, None]
        valid = (t < length)[:, None] & (beam < K)[None, :]
        ancestor = tl.load(current + column + new_parent[None, :], mask=valid, other=0)
        ancestor = tl.where((t == length)[:, None], new_parent[None, :].to(tl.int8), ancestor)
        tl.store(updated + column + beam[None, :], ancestor, mask=(t <= length)[:, None] & (beam < K)[None, :])
        ancestor = tl.where((beam < K)[None, :], ancestor.to(tl.int32), tl.max(ancestor.to(tl.int32), 1)[:, None])
        differ = (tl.max(ancestor, 1) != tl.min(ancestor, 1)) & (t <= length)
        shared_length = tl.minimum(shared_length, tl.min(tl.where(differ, t, shared_length), 0))
    tl.store(row + ROW_SHARED_LENGTH, shared_length)


@triton.jit
def _backtrack_kernel(
    Nodes, Trees, Tokens, Parents, Out, count, width, K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Walk from the last token of each hypothesis to the first."""
    hypothesis = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = hypothesis < count
    node = tl.load(Nodes + hypothesis, mask=valid, other=0)
    tree = tl.load(Trees + hypothesis // N * SOURCE_STRIDE + (ROW_TREE_START - ROW_MEMORY_START), mask=valid, other=0)
    position = node // K - 1
    beam = node % K
    for _ in range(tl.max(position, 0) + 1):
        exists = valid & (position >= 0)
        node = (tree + position) * K + beam
        tl.store(
            Out + hypothesis.to(tl.int64) * width + position, tl.load(Tokens + node, mask=exists, other=0), mask=exists
        )
        beam = tl.load(Parents + node, mask=exists, other=0).to(tl.int32)
        position -= 1
