"""The film of a search: every continuation that was looked at, which went on, which ended and which were dropped.

It is the search of `search`, step by step for one source, so what it finds is what translating finds. How it is shown
is left to `attent.look`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attent.decoding.engines.reference import SearchCancelled, SearchSession, TorchEngine
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.decoding.search import (
    NEG_INF,
    BeamState,
    SearchContext,
    advance_beams,
    expand_beams,
    make_suppressed_tensor,
    mask_logits,
    stable_topk_indices,
)


@dataclass(frozen=True, kw_only=True)
class TraceNode:
    """A token behind its parent's."""

    index: int
    parent: int | None  # None: behind the start
    step: int  # from 0
    token: int
    log_prob: float  # of this token
    total_log_prob: float  # of all up to it
    is_live: bool  # it went on as a beam
    score: float | None  # of a hypothesis that it ends; None: it ends none


@dataclass(frozen=True, kw_only=True)
class SearchTrace:
    """A search for one source."""

    nodes: tuple[TraceNode, ...]  # by step, the best first
    hypotheses: tuple[Hypothesis, ...]  # the best first, as many as there are beams
    last_nodes: tuple[int, ...]  # of each hypothesis its last node

    def path_to(self, index: int) -> list[int]:
        """The nodes up to one, the first first."""
        path = [index]
        while (parent := self.nodes[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]


@torch.no_grad()
def trace_search(engine: TorchEngine[Any], request: SearchRequest, options: SearchOptions) -> SearchTrace:
    """The search for the target of a source, all of its beams wanted: plain beam search, with a prefix or without."""
    options = replace(options, n_best=options.beam_size)
    rules, _ = engine.build_constraints(options, [request])
    never = make_suppressed_tensor(engine.start, engine.end, engine.suppressed_tokens, engine.device)
    plan = SearchContext(
        options=options, start=engine.start, end=engine.end, suppressed_tokens=never, constraints=rules
    )
    session = SearchSession(engine, [request], [0], plan)
    nodes: list[TraceNode] = []
    live: list[int | None] = [None] * plan.num_beams  # the node of each beam
    while not bool(session.beams.done):
        if engine.should_stop is not None and engine.should_stop():
            raise SearchCancelled
        live = trace_step(session, plan, nodes, live)
    ((_, found),) = session.pop_finished()
    return SearchTrace(nodes=tuple(nodes), hypotheses=tuple(found), last_nodes=tuple(find_last_nodes(nodes, found)))


def trace_step(
    session: SearchSession[Any], context: SearchContext, nodes: list[TraceNode], live: list[int | None]
) -> list[int | None]:
    """One step: what was looked at joins the nodes; the nodes of the beams after it."""
    beams, model = session.beams, session.engine.model
    logits = model.step(beams.get_next_inputs(context.start), session.state)
    seen = list_candidates(beams, logits.clone(), context)  # rules write into what they are given
    grown, parents = advance_beams(beams, logits, context)
    if parents is not None:
        session.state.reorder_beams(parents)
    session.beams, session.row_steps = grown, [age + 1 for age in session.row_steps]
    own = torch.arange(context.num_beams).tolist() if parents is None else parents[0].tolist()
    t = int(beams.lengths)
    written = zip(own, grown.tokens[0, :, t].tolist(), (grown.log_probs[0] > NEG_INF).tolist(), strict=True)
    goes_on = {(parent, token): beam for beam, (parent, token, real) in enumerate(written) if real}
    after: list[int | None] = [None] * context.num_beams
    for rank, (parent, token, log_prob, total) in enumerate(seen):
        ends = token == context.end and rank < context.num_beams
        beam = None if token == context.end else goes_on.get((parent, token))
        node = TraceNode(
            index=len(nodes),
            parent=live[parent],
            step=t,
            token=token,
            log_prob=log_prob,
            total_log_prob=total,
            is_live=beam is not None,
            score=total / context.options.compute_length_penalty(t + 1) if ends else None,
        )
        nodes.append(node)
        if beam is not None:
            after[beam] = node.index
    return after


def list_candidates(beams: BeamState, logits: Tensor, context: SearchContext) -> list[tuple[int, int, float, float]]:
    """Of the continuations of all beams the 2K best: beam, token, log-probability of the token, sum."""
    K = context.num_beams
    logits, total = mask_logits(logits, beams, context)
    tokens, sums = expand_beams(logits, total, beams.log_probs, 2 * K)
    best = stable_topk_indices(sums, min(2 * K, sums.shape[1]))[0]
    each = best // (sums.shape[1] // K)
    gains = sums[0, best] - beams.log_probs[0, each]
    rows = zip(each.tolist(), tokens[0, best].tolist(), gains.tolist(), sums[0, best].tolist(), strict=True)
    return [row for row in rows if row[3] > NEG_INF]


def find_last_nodes(nodes: list[TraceNode], hypotheses: list[Hypothesis]) -> Iterator[int]:
    """The node in which each hypothesis ends, or at which it was cut."""
    below: dict[tuple[int | None, int], int] = {}
    for node in nodes:
        if node.is_live or node.score is not None:
            below[node.parent, node.token] = node.index
    end = {node.parent: node.index for node in nodes if node.score is not None}
    for one in hypotheses:
        at: int | None = None
        for token in one.token_ids:
            at = below[at, token]
        last = end[at] if one.is_finished else at
        assert last is not None
        yield last
