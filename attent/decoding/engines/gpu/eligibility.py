"""Checks whether the GPU engine supports a search, and a cache of searches for reuse: they hold copies of some weights,
buffers and CUDA graphs. Triton is imported when the first one is built.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from subprocess import SubprocessError
from typing import TYPE_CHECKING

import torch

from attent.decoding.constraints.token_rules import MAX_LOOP_PERIOD, MinLength, NoLoops
from attent.decoding.engines.gpu.request_batch import RequestBatch
from attent.decoding.options import SearchRequest, find_unsupported_field
from attent.decoding.search import SearchContext
from attent.models import Seq2Seq
from attent.nn import kernels

if TYPE_CHECKING:
    from attent.decoding.engines.gpu.beam_search import GpuBeamSearch

SUPPORTED_OPTIONS = frozenset({
    "beam_size", "length_penalty", "length_penalty_type", "n_best", "max_length", "min_length", "patience",
    "diversity_penalty", "prevent_loops", "rank_truncated_equally",
})  # fmt: skip
SUPPORTED_REQUEST_FIELDS = frozenset({"source_ids", "rng_key", "max_length", "forbid_loops", "prefix_ends_word"})
MAX_SEARCHES_PER_MODEL = 2  # with different numbers of beams, for instance
CACHED_SEARCHES: weakref.WeakKeyDictionary[Seq2Seq, dict[object, GpuBeamSearch]] = weakref.WeakKeyDictionary()
FAILED_MODELS: weakref.WeakSet[Seq2Seq] = weakref.WeakSet()  # not tried again
LOCK = threading.Lock()


def may_support(model: object, context: SearchContext) -> bool:
    """A quick check before batches are built. Frees the searches of a model that may have been moved from a GPU."""
    on_gpu = kernels.can_use_kernels(context.suppressed_tokens)
    if isinstance(model, Seq2Seq) and not on_gpu:
        drop_cached_searches(model)
    return isinstance(model, Seq2Seq) and on_gpu and model not in FAILED_MODELS


def get_gpu_search(
    model: object, batch: RequestBatch, context: SearchContext, suppressed_tokens: tuple[int, ...]
) -> GpuBeamSearch | None:
    """Return the cached or a new search; None if the GPU engine does not support it."""
    if not may_support(model, context):
        return None
    assert isinstance(model, Seq2Seq)
    if not supports_search(model, context) or not has_positions_for(model, batch):
        return None
    from attent.decoding.engines.gpu.beam_search import GpuBeamSearch

    key = (context.num_beams, context.options.n_best, context.start_id, context.end_id, suppressed_tokens)
    with LOCK:
        searches = CACHED_SEARCHES.setdefault(model, {})
        for stale in [key for key, search in searches.items() if not search.inference_model.matches_model(model)]:
            del searches[stale]
        search = searches.pop(key, None)
        if search is None:
            while len(searches) >= MAX_SEARCHES_PER_MODEL:
                del searches[next(iter(searches))]
            search = GpuBeamSearch(model, context)
        searches[key] = search
        return search


def drop_cached_searches(model: object, failed: bool = False) -> None:
    """Free the model's searches and their memory; after a failure, build no others."""
    assert isinstance(model, Seq2Seq)
    with LOCK:
        CACHED_SEARCHES.pop(model, None)
        if failed:
            FAILED_MODELS.add(model)


def supports_search(model: Seq2Seq, context: SearchContext) -> bool:
    """True if the kernels support the options, the constraints and the model."""
    from attent.decoding.engines.gpu.inference_model import find_unsupported_reason
    from attent.decoding.engines.gpu.kernels import MAX_BEAMS

    if find_unsupported_field(context.options, SUPPORTED_OPTIONS) or context.required_phrases is not None:
        return False
    for constraint in context.constraints:
        if type(constraint) is not NoLoops and not (
            type(constraint) is MinLength and constraint.end_ids == (context.end_id,)
        ):
            return False
    if context.num_beams > MAX_BEAMS or torch.is_autocast_enabled(context.device.type):
        return False
    loop_tokens = MAX_LOOP_PERIOD if any(type(constraint) is NoLoops for constraint in context.constraints) else 0
    return find_unsupported_reason(model) is None and 2 * context.num_beams + loop_tokens < model.config.output_vocab


def supports_requests(requests: Sequence[SearchRequest]) -> bool:
    return all(find_unsupported_field(request, SUPPORTED_REQUEST_FIELDS) is None for request in requests)


def has_positions_for(model: Seq2Seq, batch: RequestBatch) -> bool:
    """False also for empty sources or targets, about which the reference engine raises an error."""
    for stack, lengths in ((model.encoder, batch.decoder_order_lengths), (model.decoder, batch.max_target_lengths)):
        limit = stack.positions.max_length
        if not len(lengths) or not lengths.all() or (limit is not None and lengths.max() > limit):
            return False
    return True


def get_recoverable_errors() -> tuple[type[Exception], ...]:
    """Errors of kernels that cannot be compiled or run, and of memory: another engine can take over."""
    errors = (RuntimeError, OSError, SubprocessError)
    if not kernels.TRITON_INSTALLED:
        return errors
    from triton.errors import TritonError

    return (*errors, TritonError)
