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
from attent.decoding.constraints.base import NEG_INF
from attent.decoding.constraints.min_length import MinLength
from attent.decoding.constraints.no_repeat import MAX_LOOP_PERIOD, MIN_LOOP_REPEATS
from attent.decoding.constraints.no_repeat import MIN_LOOP_TOKENS as FILLED
from attent.decoding.engines.gpu import kernels
from attent.decoding.engines.gpu.inference_model import GpuLayerCache, InferenceDecoder, InferenceModel
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, exclusive_cumsum
from attent.decoding.search import BeamState, FinishedHypotheses, SearchContext, collect_output
from attent.models import Seq2Seq

POLL_INTERVAL = 4  # steps between two looks at how many rows are left; each look is one interval old
MIN_ROWS = 8  # rows
MIN_BEAMS = 1024  # beams that a step may have as well as fewer
ENCODER_BATCH_TOKENS = 2**17  # tokens of sources
MEMORY_FRACTION = 0.25  # of the free memory that sources may have
ASSUMED_FREE_BYTES = 2**30
MAX_TREE_NODES = 2**28  # tokens in the trees of all sources: their places must be int32, and have room
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """How much room a search wants."""

    rows: int
    cache_positions: int  # of all rows' caches
    sources: int
    tree_nodes: int  # places of all sources' trees
    source_tokens: int  # of all sources
    max_target_length: int  # target
    max_source_length: int  # source

    def fits_in(self, other: BufferSizes) -> bool:
        return all(mine <= theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))

    def round_up(self) -> BufferSizes:
        return BufferSizes(**{name: round_up_size(number) for name, number in vars(self).items()})

    def merge_max(self, other: BufferSizes) -> BufferSizes:
        """For either: who searches now for this and then for that shall not make a new board each time."""
        return BufferSizes(**{name: max(number, getattr(other, name)) for name, number in vars(self).items()})


MIN_BUFFER_SIZES = BufferSizes(
    rows=MIN_ROWS,
    cache_positions=1024,
    sources=256,
    tree_nodes=2**14,
    source_tokens=4096,
    max_target_length=256,
    max_source_length=256,
)


def round_up_size(size: int) -> int:
    """A little more, so that the next search fits as well: 4, 5, 6 or 7 times a power of 2."""
    unit = 1 << max(0, size.bit_length() - 3)
    return -(-size // unit) * unit


class SearchBuffers:
    """The state of a search on the device. Everything of a source stays where it is, whichever row works at it."""

    def __init__(self, decoder: InferenceDecoder, context: SearchContext, sizes: BufferSizes) -> None:
        K, N, device = context.num_beams, context.options.n_best, context.suppressed_tokens.device
        columns = sizes.cache_positions * K
        self.sizes = sizes

        def whole(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        def exact(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=device)

        self.rows = whole(sizes.rows, kernels.ROW_FIELDS)
        self.input_tokens = whole(sizes.rows, K)
        self.counters = whole(4)
        self.settings = whole(2)
        self.length_penalties = exact(sizes.max_target_length + 2)
        self.sources = whole(sizes.sources, kernels.SOURCE_FIELDS)
        self.forbid_loops = whole(sizes.sources)
        self.loop_limits = kernels.LoopLimits(MAX_LOOP_PERIOD, MIN_LOOP_REPEATS, FILLED)
        self.lengths = whole(sizes.sources)
        self.finished_counts = whole(sizes.sources)
        self.log_probs = exact(sizes.sources, K)
        self.finished_scores = exact(sizes.sources, N)
        self.finished_log_probs = exact(sizes.sources, N)
        self.finished_pointers = whole(sizes.sources, N)
        self.tree_tokens = whole(sizes.tree_nodes, K)
        self.tree_parents = torch.zeros(sizes.tree_nodes, K, dtype=torch.int8, device=device)
        self.ancestors = torch.zeros(2, columns if K > 1 else 1, dtype=torch.int8, device=device)
        self.layer_caches = []
        for layer, across in zip(decoder.layers, decoder.cross_attns, strict=True):
            own, cross = layer.self_attn_shape, across.shape
            keys, values = (decoder.embedding_weight.new_zeros(own.kv_heads, columns, own.head_width) for _ in range(2))
            self.layer_caches.append(
                GpuLayerCache(
                    keys,
                    values,
                    decoder.embedding_weight.new_zeros(sizes.source_tokens, 2, cross.kv_heads, cross.head_width),
                )
            )

    def reset(self, rows: Tensor, sources: Tensor, forbid_loops: Tensor, context: SearchContext) -> None:
        """Nothing is written yet. Rows (R, 8), sources (S, 4) and which of them may not go in circles are as `steps`
        has them."""
        S = len(sources)
        least = max((rule.min_length for rule in context.constraints if isinstance(rule, MinLength)), default=0)
        patience = context.options.patience
        enough = INT32_MAX if patience is None else min(INT32_MAX, round(patience * context.num_beams))
        self.rows.fill_(-1)
        self.rows[: len(rows)] = rows
        self.sources[:S] = sources
        self.forbid_loops[:S] = forbid_loops
        self.input_tokens.fill_(context.start)
        self.counters.copy_(torch.tensor([len(rows), len(rows), S, 0], dtype=torch.int32))
        self.settings.copy_(torch.tensor([min(least, INT32_MAX), enough], dtype=torch.int32))
        self.length_penalties.copy_(
            context.compute_length_penalty(torch.arange(len(self.length_penalties), device=self.rows.device))
        )
        self.log_probs.fill_(NEG_INF)
        self.log_probs[:, 0] = 0
        for unset in (self.finished_scores, self.finished_log_probs):
            unset.fill_(NEG_INF)
        for zero in (self.lengths, self.finished_counts, self.finished_pointers):
            zero.zero_()

    def compact_rows(self, size: int) -> None:
        """The rows that are at work come first."""
        order = (self.rows[:, 0] < 0).to(torch.uint8).argsort(stable=True)[:size]
        self.rows[:size] = self.rows[order]
        self.input_tokens[:size] = self.input_tokens[order]
        self.rows[size:] = -1  # where they were before, they must not be found again

    def to_beam_state(self, S: int) -> BeamState:
        """As `search` has it, but in the place of tokens stands where the last of them is: (place + 1) * K + beam."""
        sums, lengths, K = self.log_probs[:S], self.lengths[:S].long(), self.log_probs.shape[1]
        last = lengths[:, None] * K + torch.arange(K, device=sums.device)
        pointers = self.finished_pointers[:S].long()
        ended = FinishedHypotheses(
            pointers[:, :, None], self.finished_log_probs[:S], self.finished_scores[:S], pointers // K + 1
        )
        return BeamState(
            tokens=last[:, :, None],
            log_probs=sums,
            lengths=lengths,
            max_lengths=self.sources[:S, 2].long(),
            rng_keys=lengths,
            finished_counts=self.finished_counts[:S],
            done=torch.ones_like(lengths, dtype=torch.bool),
            finished=ended,
            constraint_states=(),
        )


class GpuBeamSearch:
    """One model, ready for searches of so many beams. One search at a time."""

    def __init__(self, model: Seq2Seq, context: SearchContext) -> None:
        with device_context(context.suppressed_tokens.device):
            self.inference_model = InferenceModel(model, context.suppressed_tokens)
        self.buffers: SearchBuffers | None = None
        self.graphs: dict[int, Any] = {}
        self.graph_pool: Any = None
        self.capture_stream: torch.cuda.Stream | None = None  # what is recorded in several could not share the pool
        self.lock = threading.Lock()
        self.max_rows = INT32_MAX  # rows, where memory was short

    def has_room_for(self, batch: RequestBatch, context: SearchContext) -> bool:
        """All of it at once? One source always."""
        board = self.buffers  # which others may give up meanwhile
        room = max(
            0 if board is None else board.sizes.source_tokens,
            estimate_max_source_tokens(self.inference_model.decoder, context.suppressed_tokens.device),
        )
        return len(batch) == 1 or (
            len(batch.token_ids) <= room and int(batch.max_target_lengths.sum()) <= MAX_TREE_NODES // context.num_beams
        )

    def search(
        self,
        model: object,
        batch: RequestBatch,
        context: SearchContext,
        max_rows: int,
        check_cancelled: Callable[[], None],
    ) -> HypothesisBatch | None:
        """With at most so many sources at work at once; `stop` may raise an error. None: there was no memory for so
        many after all. Then fewer are at work at once, until it has gone well again."""
        assert isinstance(model, Seq2Seq)
        rows = min(max_rows, self.max_rows)
        with self.lock, device_context(context.suppressed_tokens.device):
            try:
                found = self._search(model, batch, context, rows, check_cancelled)
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
            else:
                self.max_rows = min(2 * self.max_rows, INT32_MAX)
                return found
            # Here, not above: an error that is being handled keeps alive all that was at work.
            self.max_rows = max(1, min(rows, len(batch)) // 2)
            self._drop_graphs()
            self.buffers = None
            torch.cuda.empty_cache()
            return None

    def _search(
        self,
        model: Seq2Seq,
        batch: RequestBatch,
        context: SearchContext,
        max_rows: int,
        check_cancelled: Callable[[], None],
    ) -> HypothesisBatch:
        rows = choose_row_count(
            batch.source_lengths,
            max(max_rows, self._allocated_rows(int(batch.max_target_lengths.max()))),
            context.num_beams,
        )
        size = round_up_rows(rows)
        need = compute_buffer_sizes(batch, rows)
        there = copy_to_device(batch, rows, context.suppressed_tokens.device)
        self.inference_model.refresh(model)
        board = self._ensure_buffers(model, replace(need, rows=size), context)
        self._encode_sources(batch, there, board)
        board.reset(there.rows, there.sources, there.forbid_loops, context)
        self._run_steps(board, size, context, check_cancelled)
        return self._collect_hypotheses(board, there.sources, need.max_target_length, context)

    def _allocated_rows(self, max_target_length: int) -> int:
        """Rows that there is room for already: its memory is no longer counted as free."""
        if self.buffers is None:
            return 0
        return min(self.buffers.sizes.rows, self.buffers.sizes.cache_positions // max_target_length)

    def _ensure_buffers(self, model: Seq2Seq, sizes: BufferSizes, context: SearchContext) -> SearchBuffers:
        decoder = self.inference_model.decoder
        if not decoder.ensure_positions(model.decoder, sizes.max_target_length):
            self._drop_graphs()
        self.inference_model.encoder.ensure_positions(model.encoder, sizes.max_source_length)
        if self.buffers is None or not sizes.fits_in(self.buffers.sizes):
            self._drop_graphs()
            more = sizes.round_up().merge_max(MIN_BUFFER_SIZES if self.buffers is None else self.buffers.sizes)
            self.buffers = None  # its memory is needed
            self.buffers = SearchBuffers(decoder, context, more)
        return self.buffers

    def _drop_graphs(self) -> None:
        """Graphs read the memory that they were recorded with."""
        self.graphs.clear()
        self.graph_pool = None

    def _encode_sources(self, batch: RequestBatch, device_batch: DeviceBatch, buffers: SearchBuffers) -> None:
        """What the decoder will look at, of all sources."""
        for part in split_for_encoder(batch.source_lengths, batch.source_offsets):
            first, last = part.tokens.start, part.tokens.stop
            begins = device_batch.source_offsets[part.sources] - first
            states = self.inference_model.encoder.encode(
                device_batch.token_ids[first:last],
                device_batch.positions[first:last],
                begins,
                device_batch.source_lengths[part.sources],
                part.max_length,
            )
            self.inference_model.decoder.cache_memory(states, buffers.layer_caches, first)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _run_steps(
        self, buffers: SearchBuffers, size: int, context: SearchContext, check_cancelled: Callable[[], None]
    ) -> None:
        looks: deque[AsyncRowCount] = deque()
        while True:
            check_cancelled()
            for _ in range(POLL_INTERVAL):
                self._replay_step(buffers, size, context)
            looks.append(AsyncRowCount(buffers.counters))
            if len(looks) < 2:
                continue
            left = looks.popleft().active_rows
            if left <= 0:
                return
            if 2 * round_up_rows(left) <= size:
                size = round_up_rows(left)
                buffers.compact_rows(size)

    def _replay_step(self, buffers: SearchBuffers, size: int, context: SearchContext) -> None:
        """One step; the first of its size is run as it is, and recorded for those that follow."""
        if size in self.graphs:
            self.graphs[size].replay()
            return
        self._step(buffers, size, context)
        if buffers.rows.device.type == "cuda":
            self.graphs[size] = self._capture_step(buffers, size, context)

    def _capture_step(self, buffers: SearchBuffers, size: int, context: SearchContext) -> torch.cuda.CUDAGraph:
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(buffers.rows.device)
        self.capture_stream = (
            torch.cuda.Stream(buffers.rows.device) if self.capture_stream is None else self.capture_stream
        )
        self.graph_pool = torch.cuda.graph_pool_handle() if self.graph_pool is None else self.graph_pool
        self.capture_stream.wait_stream(now)
        with torch.cuda.stream(self.capture_stream):
            # Other threads may go on with work of their own.
            graph.capture_begin(pool=self.graph_pool, capture_error_mode="thread_local")
            try:
                self._step(buffers, size, context)
            except BaseException:
                with suppress(RuntimeError):  # that it cannot be ended well is no news, and would hide what is
                    graph.capture_end()
                raise
            graph.capture_end()
        now.wait_stream(self.capture_stream)
        return graph

    def _step(self, buffers: SearchBuffers, size: int, context: SearchContext) -> None:
        rows, read = buffers.rows[:size], buffers.input_tokens[:size]
        logits = self.inference_model.decoder.compute_logits(rows, read, buffers.ancestors, buffers.layer_caches)
        ids, gains = kernels.topk_log_probs(logits, rows, buffers.settings, context.num_beams, context.end, buffers)
        kernels.advance_rows(buffers, rows, read, ids, gains, context.start, context.end)

    # --- what was found ----------------------------------------------------------------------------------------------

    def _collect_hypotheses(
        self, buffers: SearchBuffers, sources: Tensor, max_target_length: int, context: SearchContext
    ) -> HypothesisBatch:
        best = collect_output(buffers.to_beam_state(len(sources)), context)
        pointers = best.tokens[:, :, 0].to(torch.int32)
        tokens = kernels.backtrack_tokens(
            pointers, sources, buffers.tree_tokens, buffers.tree_parents, max_target_length
        )
        numbers = (pointers // context.num_beams, best.lengths, best.log_probs, best.scores)
        return HypothesisBatch(tokens.cpu().numpy(), *(x.flatten().cpu().numpy() for x in numbers))


class AsyncRowCount:
    """How many rows were at work, when it was asked; who wants to know waits until the device is there."""

    def __init__(self, counters: Tensor) -> None:
        cuda = counters.device.type == "cuda"
        self.host_counters = torch.empty(4, dtype=torch.int32, pin_memory=cuda)
        self.host_counters.copy_(counters, non_blocking=cuda)
        self.copy_event = torch.cuda.Event() if cuda else None
        if self.copy_event is not None:
            self.copy_event.record()

    @property
    def active_rows(self) -> int:
        if self.copy_event is not None:
            self.copy_event.synchronize()
        return int(self.host_counters[1])


# --- sources -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EncoderBatch:
    """Sources that are read at once."""

    sources: slice  # in the order of lengths
    tokens: slice
    max_length: int


class DeviceBatch(NamedTuple):
    """A lot on the device."""

    token_ids: Tensor
    positions: Tensor
    source_offsets: Tensor
    source_lengths: Tensor
    sources: Tensor
    forbid_loops: Tensor
    rows: Tensor


def copy_to_device(batch: RequestBatch, num_rows: int, device: torch.device) -> DeviceBatch:
    """In one piece; so many rows begin with the first sources."""
    at = np.arange(len(batch.token_ids)) - np.repeat(batch.source_offsets, batch.source_lengths)
    sources = np.stack(
        [
            batch.memory_offsets,
            batch.memory_lengths,
            batch.max_target_lengths,
            exclusive_cumsum(batch.max_target_lengths),
        ],
        1,
    )
    rows = np.zeros((num_rows, kernels.ROW_FIELDS), dtype=np.int64)
    rows[:, 0] = np.arange(num_rows)
    rows[:, kernels.ROW_CACHE_START.value] = exclusive_cumsum(batch.max_target_lengths[:num_rows])
    rows[:, kernels.ROW_MEMORY_START.value : kernels.ROW_TREE_START.value + 1] = sources[:num_rows]
    arrays = [batch.token_ids, at, batch.source_offsets, batch.source_lengths, sources, batch.forbid_loops, rows]
    packed = torch.from_numpy(np.concatenate([array.ravel().astype(np.int32) for array in arrays]))
    packed = packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed
    pieces = packed.split([array.size for array in arrays])
    return DeviceBatch(*(piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)))


def compute_buffer_sizes(batch: RequestBatch, rows: int) -> BufferSizes:
    return BufferSizes(
        rows=rows,
        cache_positions=int(batch.max_target_lengths[:rows].sum()),
        sources=len(batch),
        tree_nodes=int(batch.max_target_lengths.sum()),
        source_tokens=len(batch.token_ids),
        max_target_length=int(batch.max_target_lengths.max()),
        max_source_length=int(batch.source_lengths[0]),
    )


def split_for_encoder(lengths: Array, offsets: Array) -> Iterator[EncoderBatch]:
    first, count, ends = 0, len(lengths), offsets + lengths
    while first < count:
        last = max(first + 1, int(np.searchsorted(ends, offsets[first] + ENCODER_BATCH_TOKENS, "right")))
        yield EncoderBatch(slice(first, last), slice(int(offsets[first]), int(ends[last - 1])), int(lengths[first]))
        first = last


@contextmanager
def device_context(device: torch.device) -> Iterator[None]:
    """Kernels are launched on the current GPU, which need not be the model's. What is made in inference mode could not
    be written outside of it, and a lane is kept for who comes next."""
    on: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), on:
        yield


def choose_row_count(lengths: Array, max_rows: int, num_beams: int) -> int:
    """Rows that are worth having for sources of such lengths. A search takes as many steps as its longest target: more
    rows than all targets fill in that time would stand empty. Few rows are no quicker than some more."""
    full = max(int(lengths.sum()) // int(lengths.max()), MIN_BEAMS // num_beams)
    return min(max_rows, len(lengths), round_up_rows(full * 7 // 8))


def round_up_rows(rows: int) -> int:
    """The number of rows of a step for so many: a power of 2, or one and a half times that."""
    size = MIN_ROWS
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def estimate_max_source_tokens(decoder: InferenceDecoder, device: torch.device) -> int:
    """Tokens of sources that there is memory for."""
    each = sum(2 * across.shape.kv_heads * across.shape.head_width for across in decoder.cross_attns)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ASSUMED_FREE_BYTES
    return max(1, int(MEMORY_FRACTION * free) // (each * decoder.embedding_weight.element_size()))
