"""A beam search recorded step by step: every continuation that was considered, and whether it was kept, finished or
dropped.

It runs the same functions as `search`, for one source, so that it finds what translating finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF
from attent.decoding.engines.reference import SearchSession, TorchEngine
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.decoding.search import (
    BeamState,
    SearchContext,
    advance_beams,
    expand_beams,
    mask_logits,
    rank_continuations,
)


@dataclass(frozen=True, kw_only=True)
class TraceNode:
    """A token that continues its parent."""

    index: int
    parent: int | None  # None: the start
    step: int  # from 0
    token: int
    log_prob: float  # of this token
    total_log_prob: float  # of the tokens up to it
    is_live: bool  # it stayed in the beam
    score: float | None  # of the hypothesis that it finishes, if it does


@dataclass(frozen=True, kw_only=True)
class SearchTrace:
    """The search for one source."""

    nodes: tuple[TraceNode, ...]  # by step, best first
    hypotheses: tuple[Hypothesis, ...]  # best first, as many as there are beams
    last_nodes: tuple[int, ...]  # of each hypothesis

    def path_to(self, index: int) -> list[int]:
        """Return the nodes from the first to this one."""
        path = [index]
        while (parent := self.nodes[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]


@torch.no_grad()
def trace_search(engine: TorchEngine[Any], request: SearchRequest, options: SearchOptions) -> SearchTrace:
    """Record a beam search that returns all of its beams; with a prefix or without, but no required phrases."""
    context = engine.build_context(replace(options, n_best=options.beam_size), [request])
    context = replace(context, required_phrases=None)
    session = SearchSession(engine, [request], [0], context)
    nodes: list[TraceNode] = []
    live: list[int | None] = [None] * context.num_beams  # the node of each beam
    while not bool(session.beams.done):
        engine.check_cancelled()
        live = trace_step(session, context, nodes, live)
    ((_, hypotheses),) = session.collect_and_refill()
    last_nodes = tuple(find_last_nodes(nodes, hypotheses))
    return SearchTrace(nodes=tuple(nodes), hypotheses=tuple(hypotheses), last_nodes=last_nodes)


def trace_step(
    session: SearchSession[Any], context: SearchContext, nodes: list[TraceNode], live: list[int | None]
) -> list[int | None]:
    """Run one step, append its candidates to `nodes`, and return the nodes of the beams after it."""
    beams, step = session.beams, int(session.beams.lengths)
    logits = session.engine.model.step(beams.get_next_inputs(context.start_id), session.decoder_state)
    candidates = list_candidates(beams, logits.clone(), context)  # constraints change logits in place
    session.beams, parents = advance_beams(beams, logits, context)
    session.row_steps = [steps + 1 for steps in session.row_steps]
    if parents is not None:
        session.decoder_state.reorder_beams(parents)
    beam_of = find_live_beams(session.beams, parents, step)
    live_after: list[int | None] = [None] * context.num_beams
    for rank, (parent, token, log_prob, total) in enumerate(candidates):
        is_finished = token == context.end_id and rank < context.num_beams
        beam = None if token == context.end_id else beam_of.get((parent, token))
        if beam is not None:
            live_after[beam] = len(nodes)
        nodes.append(
            TraceNode(
                index=len(nodes),
                parent=live[parent],
                step=step,
                token=token,
                log_prob=log_prob,
                total_log_prob=total,
                is_live=beam is not None,
                score=total / context.options.compute_score_divisor(step + 1) if is_finished else None,
            )
        )
    return live_after


def find_live_beams(beams: BeamState, parents: Tensor | None, step: int) -> dict[tuple[int, int], int]:
    """Return the beam of each (parent beam, token) that survived."""
    own = range(beams.tokens.shape[1]) if parents is None else parents[0].tolist()
    rows = zip(own, beams.tokens[0, :, step].tolist(), (beams.log_probs[0] > NEG_INF).tolist(), strict=True)
    return {(parent, token): beam for beam, (parent, token, is_live) in enumerate(rows) if is_live}


def list_candidates(beams: BeamState, logits: Tensor, context: SearchContext) -> list[tuple[int, int, float, float]]:
    """Return the 2K best continuations: beam, token, its log-probability, the total."""
    K = context.num_beams
    logits, log_norm = mask_logits(logits, beams, context)
    tokens, totals = expand_beams(logits, log_norm, beams.log_probs, 2 * K)
    parents, tokens, totals = (x[0] for x in rank_continuations(tokens, totals, K))
    log_probs = totals - beams.log_probs[0, parents]
    rows = zip(parents.tolist(), tokens.tolist(), log_probs.tolist(), totals.tolist(), strict=True)
    return [row for row in rows if row[3] > NEG_INF]


def find_last_nodes(nodes: list[TraceNode], hypotheses: list[Hypothesis]) -> Iterator[int]:
    """Yield the node at which each hypothesis ends or was truncated."""
    children: dict[tuple[int | None, int], int] = {}
    for node in nodes:
        if node.is_live or node.score is not None:
            children[node.parent, node.token] = node.index
    ends = {node.parent: node.index for node in nodes if node.score is not None}
    for hypothesis in hypotheses:
        index: int | None = None
        for token in hypothesis.token_ids:
            index = children[index, token]
        last = ends[index] if hypothesis.is_finished else index
        assert last is not None
        yield last
