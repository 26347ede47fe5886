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
from attent.decode.rules import LONGEST_UNIT, MinLength, NoLoops
from attent.decode.search import Plan
from attent.models import Seq2Seq
from attent.nn import kernels

if TYPE_CHECKING:
    from attent.decode.lane import Lane

MOST_LANES = 2  # kept for a model: of different beams, for instance
LANES: weakref.WeakKeyDictionary[Seq2Seq, dict[object, Lane]] = weakref.WeakKeyDictionary()
FAILED: weakref.WeakSet[Seq2Seq] = weakref.WeakSet()  # models whose lanes could not be run: it is not tried again
LOCK = threading.Lock()


def may_have(model: object, plan: Plan) -> bool:
    """Is it worth while to ask?"""
    if not isinstance(model, Seq2Seq):
        return False
    if not kernels.usable(plan.never):
        forget(model)  # it was moved here
        return False
    return model not in FAILED


def lane_of(model: object, widths: Array, limits: Array, plan: Plan, never: tuple[int, ...]) -> Lane | None:
    """The lane for such a search of sources and targets of such sizes, kept from the last one like it; None: this is
    not for a lane. `never` are the tokens that the plan has on the device."""
    if not may_have(model, plan):
        return None
    assert isinstance(model, Seq2Seq)
    if not can(model, plan) or not fits(model, widths, limits):
        return None
    key = (plan.beams, plan.search.n_best, plan.start, plan.end, never)
    with LOCK:
        return kept(model, plan, key)


def kept(model: Seq2Seq, plan: Plan, key: object) -> Lane:
    from attent.decode.lane import Lane

    lanes = LANES.setdefault(model, {})
    for other in [other for other, lane in lanes.items() if not lane.twin.fits(model)]:
        del lanes[other]
    lane = lanes.pop(key, None)
    if lane is None:
        while len(lanes) >= MOST_LANES:
            del lanes[next(iter(lanes))]
        lane = Lane(model, plan)
    lanes[key] = lane
    return lane


def forget(model: object, failed: bool = False) -> None:
    """Its lanes are given up, and their memory with them; where they failed, there will be no others."""
    assert isinstance(model, Seq2Seq)
    with LOCK:
        LANES.pop(model, None)
        if failed:
            FAILED.add(model)


def can(model: Seq2Seq, plan: Plan) -> bool:
    """Is the search plain, and the model one that our kernels know?"""
    from attent.decode.layers import refuses
    from attent.nn.kernels.steps import MOST_BEAMS

    search = plan.search
    plain = search.sampling is None and plan.groups == 1 and plan.demands is None
    plain = plain and all(
        type(rule) is NoLoops or (type(rule) is MinLength and rule.end == plan.end) for rule in plan.rules
    )
    if not plain or plan.beams > MOST_BEAMS or torch.is_autocast_enabled(plan.never.device.type):
        return False
    forbidden = LONGEST_UNIT if any(type(rule) is NoLoops for rule in plan.rules) else 0
    return refuses(model) is None and 2 * plan.beams + forbidden < model.config.targets


def fits(model: Seq2Seq, widths: Array, limits: Array) -> bool:
    """Is there something to read and to write, and a position for every token? If not, the search tells."""
    if not len(widths) or not widths.all() or not limits.all():
        return False
    widest, longest = model.encoder.positions.max_length, model.decoder.positions.max_length
    return (widest is None or widths.max() <= widest) and (longest is None or limits.max() <= longest)


def failures() -> tuple[type[Exception], ...]:
    """What a lane may fail with where kernels cannot be compiled or run, or memory is short: other ways remain."""
    known = (RuntimeError, OSError, SubprocessError)
    if not kernels.INSTALLED:
        return known
    from triton.errors import TritonError

    return (*known, TritonError)
