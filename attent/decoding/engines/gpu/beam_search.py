"""Beam search with one Transformer, entirely on an NVIDIA GPU.

All sources are encoded first, and their keys and values for cross-attention are concatenated. A fixed number of rows,
each with the beams of one source, takes steps that are captured as a CUDA graph. A row whose source is done takes the
next source inside the step. The host replays graphs and now and then reads, some steps late, how many rows are active;
when they are few, a graph of fewer rows takes over. The hypotheses are those of `attent.decoding.search`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attent.data.arrays import Array
from attent.decoding.constraints.base import NEG_INF
from attent.decoding.constraints.token_rules import MinLength
from attent.decoding.engines.gpu import kernels
from attent.decoding.engines.gpu.inference_model import GpuLayerCache, InferenceDecoder, InferenceModel
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, exclusive_cumsum
from attent.decoding.search import BeamState, HypothesisTensors, SearchContext, select_n_best
from attent.models import Seq2Seq
from attent.nn.kernels.cuda_graphs import capture_graph
from attent.nn.masks import Packing

POLL_INTERVAL = 4  # steps between reads of the number of active rows; each value is one interval old
MIN_ROWS = 8
MIN_BEAMS = 1024  # a step with fewer beams is no faster
ENCODER_BATCH_TOKENS = 2**17
MEMORY_FRACTION = 0.25  # of the free memory, for the keys and values of sources
ASSUMED_FREE_BYTES = 2**30  # without a GPU
MAX_TREE_NODES = 2**28  # tokens in the trees of all sources: indices must fit int32
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    rows: int
    cache_positions: int  # of all rows
    sources: int
    tree_positions: int  # of all sources
    source_tokens: int  # of all sources
    max_target_length: int
    max_source_length: int


MIN_BUFFER_SIZES = BufferSizes(
    rows=MIN_ROWS,
    cache_positions=1024,
    sources=256,
    tree_positions=2**14,
    source_tokens=4096,
    max_target_length=256,
    max_source_length=256,
)


def round_up_size(size: int) -> int:
    unit = 1 << max(0, size.bit_length() - 3)
    return -(-size // unit) * unit


class SearchBuffers:
    """The state of a search on the device (see `kernels`). Per-source data stay in place, whichever row uses them."""

    def __init__(self, decoder: InferenceDecoder, context: SearchContext, sizes: BufferSizes) -> None:
        K, N, device = context.num_beams, context.options.n_best, context.device
        columns = sizes.cache_positions * K
        self.sizes = sizes

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=device)

        self.rows = ints(sizes.rows, kernels.ROW_FIELDS)
        self.input_tokens = ints(sizes.rows, K)
        self.counters = ints(4)
        self.settings = ints(2)
        self.score_divisors = floats(sizes.max_target_length + 2)  # by length
        self.sources = ints(sizes.sources, kernels.SOURCE_FIELDS)
        self.forbid_loops = ints(sizes.sources)  # nonzero: forbidden
        self.lengths = ints(sizes.sources)  # tokens generated
        self.finished_counts = ints(sizes.sources)
        self.log_probs = floats(sizes.sources, K)  # of the beams
        self.finished_scores = floats(sizes.sources, N)  # of the best finished hypotheses, best first
        self.finished_log_probs = floats(sizes.sources, N)
        # Tree node of the last token: length (without the end) * K + beam.
        self.finished_nodes = ints(sizes.sources, N)
        self.tree_tokens = ints(sizes.tree_positions, K)  # of all sources
        self.tree_parents = torch.zeros(sizes.tree_positions, K, dtype=torch.int8, device=device)
        self.ancestors = torch.zeros(2, columns if K > 1 else 1, dtype=torch.int8, device=device)
        self.layer_caches = [
            GpuLayerCache.allocate(decoder, layer, columns, sizes.source_tokens) for layer in range(len(decoder.blocks))
        ]

    def reset(self, rows: Tensor, sources: Tensor, forbid_loops: Tensor, context: SearchContext) -> None:
        S = len(sources)
        min_length = max((each.min_length for each in context.constraints if isinstance(each, MinLength)), default=0)
        patience = context.options.patience
        max_finished = INT32_MAX if patience is None else min(INT32_MAX, round(patience * context.num_beams))
        lengths = torch.arange(len(self.score_divisors), device=self.rows.device)
        self.rows.fill_(-1)
        self.rows[: len(rows)] = rows
        self.sources[:S] = sources
        self.forbid_loops[:S] = forbid_loops
        self.input_tokens.fill_(context.start_id)
        self.counters.copy_(torch.tensor([len(rows), len(rows), S, 0], dtype=torch.int32))
        self.settings.copy_(torch.tensor([min(min_length, INT32_MAX), max_finished], dtype=torch.int32))
        self.score_divisors.copy_(context.compute_score_divisor(lengths))
        self.log_probs.fill_(NEG_INF)
        self.log_probs[:, 0] = 0
        for scores in (self.finished_scores, self.finished_log_probs):
            scores.fill_(NEG_INF)
        for counts in (self.lengths, self.finished_counts, self.finished_nodes):
            counts.zero_()

    def compact_rows(self, num_rows: int) -> None:
        """Move the active rows to the front."""
        order = (self.rows[:, 0] < 0).to(torch.uint8).argsort(stable=True)[:num_rows]
        self.rows[:num_rows] = self.rows[order]
        self.input_tokens[:num_rows] = self.input_tokens[order]
        self.rows[num_rows:] = -1  # or a later compaction would find them again

    def to_beam_state(self, S: int) -> BeamState:
        """Return the state of `search`; `tokens` holds one entry per beam: length * K + beam, the tree node of its
        last token. `rng_keys` and `done` are fillers, which ranking the hypotheses does not read."""
        log_probs, lengths, K = self.log_probs[:S], self.lengths[:S].long(), self.log_probs.shape[1]
        last = lengths[:, None] * K + torch.arange(K, device=log_probs.device)
        nodes = self.finished_nodes[:S].long()
        finished = HypothesisTensors(
            nodes[:, :, None], self.finished_log_probs[:S], self.finished_scores[:S], nodes // K + 1
        )
        return BeamState(
            tokens=last[:, :, None],
            log_probs=log_probs,
            lengths=lengths,
            max_lengths=self.sources[:S, 2].long(),
            rng_keys=lengths,
            finished_counts=self.finished_counts[:S],
            done=torch.ones_like(lengths, dtype=torch.bool),
            finished=finished,
            constraint_states=(),
        )


class GpuBeamSearch:
    """The weights, buffers and graphs of one model for searches with a fixed number of beams; one search at a time."""

    def __init__(self, model: Seq2Seq, context: SearchContext) -> None:
        with device_context(context.device):
            self.inference_model = InferenceModel(model, context.suppressed_tokens)
        self.buffers: SearchBuffers | None = None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.graph_pool: Any = None
        self.capture_stream: torch.cuda.Stream | None = None  # one: graphs of several streams cannot share a pool
        self.lock = threading.Lock()
        self.max_rows = INT32_MAX  # less after running out of memory

    def has_room_for(self, batch: RequestBatch, context: SearchContext) -> bool:
        """True if the whole batch fits at once; a single source is always tried."""
        buffers = self.buffers  # another thread may drop them meanwhile
        allocated = 0 if buffers is None else buffers.sizes.source_tokens
        max_tokens = max(allocated, estimate_max_source_tokens(self.inference_model.decoder, context.device))
        fits_tree = int(batch.max_target_lengths.sum()) <= MAX_TREE_NODES // context.num_beams
        return len(batch) == 1 or (len(batch.token_ids) <= max_tokens and fits_tree)

    def search(
        self, batch: RequestBatch, context: SearchContext, max_rows: int, check_cancelled: Callable[[], None]
    ) -> HypothesisBatch | None:
        """Search with at most `max_rows` rows; `check_cancelled` may raise. None: out of memory after all. Later
        searches then use fewer rows, until one succeeds."""
        rows = min(max_rows, self.max_rows)
        with self.lock, device_context(context.device):
            try:
                result = self._search(batch, context, rows, check_cancelled)
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
            else:
                self.max_rows = min(2 * self.max_rows, INT32_MAX)
                return result
            # Not in the except block: an error that is being handled keeps the tensors of its frames alive.
            self.max_rows = max(1, min(rows, len(batch)) // 2)
            self._drop_graphs()
            self.buffers = None
            torch.cuda.empty_cache()
            return None

    def _search(
        self, batch: RequestBatch, context: SearchContext, max_rows: int, check_cancelled: Callable[[], None]
    ) -> HypothesisBatch:
        max_rows = max(max_rows, self._count_allocated_rows(int(batch.max_target_lengths.max())))
        rows = choose_row_count(batch.encoder_order_lengths, max_rows, context.num_beams)
        graph_rows = round_up_rows(rows)
        sizes = BufferSizes(
            rows=graph_rows,
            cache_positions=int(batch.max_target_lengths[:rows].sum()),
            sources=len(batch),
            tree_positions=int(batch.max_target_lengths.sum()),
            source_tokens=len(batch.token_ids),
            max_target_length=int(batch.max_target_lengths.max()),
            max_source_length=int(batch.encoder_order_lengths[0]),
        )
        device_batch = copy_to_device(batch, rows, context.device)
        self.inference_model.refresh()
        buffers = self._ensure_buffers(sizes, context)
        self._encode_sources(batch, device_batch, buffers)
        buffers.reset(device_batch.rows, device_batch.sources, device_batch.forbid_loops, context)
        self._run_steps(buffers, graph_rows, context, check_cancelled)
        best = select_n_best(buffers.to_beam_state(len(batch)), context)
        nodes = best.tokens[:, :, 0].to(torch.int32)
        token_ids = kernels.backtrack_tokens(
            nodes, device_batch.sources, buffers.tree_tokens, buffers.tree_parents, sizes.max_target_length
        )
        columns = (nodes // context.num_beams, best.lengths, best.log_probs, best.scores)
        return HypothesisBatch(token_ids.cpu().numpy(), *(x.flatten().cpu().numpy() for x in columns))

    def _count_allocated_rows(self, max_target_length: int) -> int:
        """Rows that fit into the existing buffers, whose memory no longer counts as free."""
        if self.buffers is None:
            return 0
        return min(self.buffers.sizes.rows, self.buffers.sizes.cache_positions // max_target_length)

    def _ensure_buffers(self, sizes: BufferSizes, context: SearchContext) -> SearchBuffers:
        decoder = self.inference_model.decoder
        if decoder.grow_position_table(sizes.max_target_length):
            self._drop_graphs()
        self.inference_model.encoder.grow_position_table(sizes.max_source_length)
        allocated = MIN_BUFFER_SIZES if self.buffers is None else self.buffers.sizes
        if self.buffers is None or any(size > getattr(allocated, name) for name, size in vars(sizes).items()):
            self._drop_graphs()
            # Never smaller than before, so that alternating searches do not reallocate each time.
            sizes = BufferSizes(
                **{name: max(round_up_size(size), getattr(allocated, name)) for name, size in vars(sizes).items()}
            )
            self.buffers = None  # free the old ones first
            self.buffers = SearchBuffers(decoder, context, sizes)
        return self.buffers

    def _drop_graphs(self) -> None:
        """Graphs use the memory that they were captured with."""
        self.graphs.clear()
        self.graph_pool = None

    def _encode_sources(self, batch: RequestBatch, device_batch: DeviceBatch, buffers: SearchBuffers) -> None:
        lengths, offsets = batch.encoder_order_lengths, batch.encoder_order_offsets
        first, ends = 0, offsets + lengths
        while first < len(batch):
            last = max(first + 1, int(np.searchsorted(ends, offsets[first] + ENCODER_BATCH_TOKENS, "right")))
            sources, tokens = slice(first, last), slice(int(offsets[first]), int(ends[last - 1]))
            packing = Packing(
                device_batch.segments[None, tokens] - first,
                device_batch.positions[None, tokens],
                device_batch.ends[None, sources] - tokens.start,
                int(lengths[first]),
            )
            states = self.inference_model.encoder.encode(device_batch.token_ids[tokens], packing)
            self.inference_model.decoder.cache_memory(states, buffers.layer_caches, tokens.start)
            first = last

    # --- steps -------------------------------------------------------------------------------------------------------

    def _run_steps(
        self, buffers: SearchBuffers, graph_rows: int, context: SearchContext, check_cancelled: Callable[[], None]
    ) -> None:
        counts: deque[AsyncRowCount] = deque()
        while True:
            check_cancelled()
            for _ in range(POLL_INTERVAL):
                self._replay_step(buffers, graph_rows, context)
            counts.append(AsyncRowCount(buffers.counters))
            if len(counts) < 2:
                continue
            active_rows = counts.popleft().active_rows
            if active_rows <= 0:
                return
            if 2 * round_up_rows(active_rows) <= graph_rows:
                graph_rows = round_up_rows(active_rows)
                buffers.compact_rows(graph_rows)

    def _replay_step(self, buffers: SearchBuffers, graph_rows: int, context: SearchContext) -> None:
        """Run one step; the first of its size runs eagerly and is then captured."""
        if graph_rows in self.graphs:
            self.graphs[graph_rows].replay()
            return
        self._step(buffers, graph_rows, context)
        device = buffers.rows.device
        if device.type == "cuda":
            self.capture_stream = self.capture_stream or torch.cuda.Stream(device)
            self.graph_pool = self.graph_pool or torch.cuda.graph_pool_handle()
            self.graphs[graph_rows] = capture_graph(
                lambda: self._step(buffers, graph_rows, context),
                pool=self.graph_pool,
                stream=self.capture_stream,
                trim_memory=False,
            )

    def _step(self, buffers: SearchBuffers, graph_rows: int, context: SearchContext) -> None:
        rows, input_tokens = buffers.rows[:graph_rows], buffers.input_tokens[:graph_rows]
        decoder = self.inference_model.decoder
        logits = decoder.compute_logits(rows, input_tokens, buffers.ancestors, buffers.layer_caches)
        ids, log_probs = kernels.topk_log_probs(
            logits, rows, buffers.settings, context.num_beams, context.end_id, buffers
        )
        kernels.advance_rows(buffers, rows, input_tokens, ids, log_probs, context.start_id, context.end_id)


class AsyncRowCount:
    """The number of active rows, copied to the host without waiting."""

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


# --- batches -------------------------------------------------------------------------------------------------------


class DeviceBatch(NamedTuple):
    token_ids: Tensor
    segments: Tensor  # index of each token's source in encoder order
    positions: Tensor
    ends: Tensor  # of the sources in encoder order
    sources: Tensor
    forbid_loops: Tensor
    rows: Tensor


def copy_to_device(batch: RequestBatch, num_rows: int, device: torch.device) -> DeviceBatch:
    segments = np.repeat(np.arange(len(batch)), batch.encoder_order_lengths)
    positions = np.arange(len(batch.token_ids)) - batch.encoder_order_offsets[segments]
    tree_starts = exclusive_cumsum(batch.max_target_lengths)
    sources = np.stack(
        [batch.decoder_order_offsets, batch.decoder_order_lengths, batch.max_target_lengths, tree_starts], 1
    )
    rows = np.zeros((num_rows, kernels.ROW_FIELDS), dtype=np.int64)
    rows[:, 0] = np.arange(num_rows)
    rows[:, kernels.ROW_CACHE_START.value] = exclusive_cumsum(batch.max_target_lengths[:num_rows])
    rows[:, kernels.ROW_MEMORY_START.value : kernels.ROW_TREE_START.value + 1] = sources[:num_rows]
    arrays = [
        batch.token_ids,
        segments,
        positions,
        batch.encoder_order_offsets + batch.encoder_order_lengths,
        sources,
        batch.forbid_loops,
        rows,
    ]
    flat = torch.from_numpy(np.concatenate([array.ravel().astype(np.int32) for array in arrays]))
    flat = flat.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else flat
    parts = flat.split([array.size for array in arrays])
    return DeviceBatch(*(part.view(array.shape) for part, array in zip(parts, arrays, strict=True)))


@contextmanager
def device_context(device: torch.device) -> Iterator[None]:
    """Make the model's GPU the current one, where kernels are launched; leave inference mode, whose tensors could not
    be updated by later searches outside of it."""
    on_device: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), on_device:
        yield


def choose_row_count(lengths: Array, max_rows: int, num_beams: int) -> int:
    """Choose rows for sources of these lengths. A search takes as many steps as its longest target; more rows than all
    targets fill in that time would idle. Very few rows are no faster than some more."""
    full = max(int(lengths.sum()) // int(lengths.max()), MIN_BEAMS // num_beams)
    return min(max_rows, len(lengths), round_up_rows(full * 7 // 8))


def round_up_rows(rows: int) -> int:
    """Round up to the row count of a graph: a power of 2, or one and a half times that."""
    graph_rows = MIN_ROWS
    while graph_rows < rows:
        graph_rows = graph_rows * 3 // 2 if graph_rows & (graph_rows - 1) == 0 else graph_rows * 4 // 3
    return graph_rows


def estimate_max_source_tokens(decoder: InferenceDecoder, device: torch.device) -> int:
    """Return how many source tokens fit into the free memory."""
    per_token = sum(2 * cross_attn.kv_heads * cross_attn.head_width for cross_attn in decoder.cross_attns)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ASSUMED_FREE_BYTES
    return max(1, int(MEMORY_FRACTION * free) // (per_token * decoder.embedding_weight.element_size()))
