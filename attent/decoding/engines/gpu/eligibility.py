"""Which searches have a lane (`lane`), and the lanes that are kept for the next one like it: in them are copies of some
weights, memory for searches and steps that were recorded. Triton is imported when a lane is wanted.
"""

from __future__ import annotations

import threading
import weakref
from subprocess import SubprocessError
from typing import TYPE_CHECKING

import torch

from attent.data.arrays import Array
from attent.decoding.constraints.base import MAX_LOOP_PERIOD, MinLength, NoLoops
from attent.decoding.search import SearchContext
from attent.models import Seq2Seq
from attent.nn import kernels

if TYPE_CHECKING:
    from attent.decoding.engines.gpu.beam_search import GpuBeamSearch

MAX_SEARCHES_PER_MODEL = 2  # kept for a model: of different beams, for instance
CACHED_SEARCHES: weakref.WeakKeyDictionary[Seq2Seq, dict[object, GpuBeamSearch]] = weakref.WeakKeyDictionary()
FAILED_MODELS: weakref.WeakSet[Seq2Seq] = (
    weakref.WeakSet()
)  # models whose lanes could not be run: it is not tried again
LOCK = threading.Lock()


def can_try(model: object, context: SearchContext) -> bool:
    """Is it worth while to ask?"""
    if not isinstance(model, Seq2Seq):
        return False
    if not kernels.can_use_kernels(context.suppressed_tokens):
        release_model(model)  # it was moved here
        return False
    return model not in FAILED_MODELS


def get_gpu_search(
    model: object,
    source_lengths: Array,
    max_target_lengths: Array,
    context: SearchContext,
    suppressed_tokens: tuple[int, ...],
) -> GpuBeamSearch | None:
    """The lane for such a search of sources and targets of such sizes, kept from the last one like it; None: this is
    not for a lane. `never` are the tokens that the plan has on the device."""
    if not can_try(model, context):
        return None
    assert isinstance(model, Seq2Seq)
    if not supports_search(model, context) or not has_positions_for(model, source_lengths, max_target_lengths):
        return None
    key = (context.num_beams, context.options.n_best, context.start, context.end, suppressed_tokens)
    with LOCK:
        return get_or_build(model, context, key)


def get_or_build(model: Seq2Seq, context: SearchContext, key: object) -> GpuBeamSearch:
    from attent.decoding.engines.gpu.beam_search import GpuBeamSearch

    lanes = CACHED_SEARCHES.setdefault(model, {})
    for other in [other for other, lane in lanes.items() if not lane.inference_model.matches_model(model)]:
        del lanes[other]
    lane = lanes.pop(key, None)
    if lane is None:
        while len(lanes) >= MAX_SEARCHES_PER_MODEL:
            del lanes[next(iter(lanes))]
        lane = GpuBeamSearch(model, context)
    lanes[key] = lane
    return lane


def release_model(model: object, failed: bool = False) -> None:
    """Its lanes are given up, and their memory with them; where they failed, there will be no others."""
    assert isinstance(model, Seq2Seq)
    with LOCK:
        CACHED_SEARCHES.pop(model, None)
        if failed:
            FAILED_MODELS.add(model)


def supports_search(model: Seq2Seq, context: SearchContext) -> bool:
    """Is the search plain, and the model one that our kernels know?"""
    from attent.decoding.engines.gpu.inference_model import find_unsupported_reason
    from attent.decoding.engines.gpu.kernels import MAX_BEAMS

    search = context.options
    plain = search.sampling is None and context.beam_groups == 1 and context.required_phrases is None
    plain = plain and all(
        type(rule) is NoLoops or (type(rule) is MinLength and rule.end == context.end) for rule in context.constraints
    )
    if not plain or context.num_beams > MAX_BEAMS or torch.is_autocast_enabled(context.suppressed_tokens.device.type):
        return False
    forbidden = MAX_LOOP_PERIOD if any(type(rule) is NoLoops for rule in context.constraints) else 0
    return find_unsupported_reason(model) is None and 2 * context.num_beams + forbidden < model.config.output_vocab


def has_positions_for(model: Seq2Seq, source_lengths: Array, max_target_lengths: Array) -> bool:
    """Is there something to read and to write, and a position for every token? If not, the search tells."""
    if not len(source_lengths) or not source_lengths.all() or not max_target_lengths.all():
        return False
    widest, longest = model.encoder.positions.max_length, model.decoder.positions.max_length
    return (widest is None or source_lengths.max() <= widest) and (
        longest is None or max_target_lengths.max() <= longest
    )


def recoverable_errors() -> tuple[type[Exception], ...]:
    """What a lane may fail with where kernels cannot be compiled or run, or memory is short: other ways remain."""
    known = (RuntimeError, OSError, SubprocessError)
    if not kernels.TRITON_INSTALLED:
        return known
    from triton.errors import TritonError

    return (*known, TritonError)
