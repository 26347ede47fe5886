"""A beam search recorded step by step by the functions of `search`: every continuation, and what became of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attent.decoding import search
from attent.decoding.constraints.base import NEG_INF
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest


@dataclass(frozen=True, kw_only=True)
class TraceNode:
    index: int
    parent: int | None  # None: the start
    step: int  # from 0
    token: int
    log_prob: float = 0.0  # of this token; a forced one has no share in the scores
    total_log_prob: float = 0.0  # of the tokens up to it
    is_live: bool = True  # it stayed in the beam
    score: float | None = None  # of the hypothesis that it finishes, if it does


@dataclass(frozen=True, kw_only=True)
class SearchTrace:
    nodes: tuple[TraceNode, ...]  # by step, best first
    hypotheses: tuple[Hypothesis, ...]  # best first, as many as there are beams
    last_nodes: tuple[int, ...]  # of each hypothesis

    def path_to(self, index: int) -> list[int]:
        path = [index]
        while (parent := self.nodes[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]


def trace_search(engine: TorchEngine[Any], request: SearchRequest, options: SearchOptions) -> SearchTrace:
    """Record a beam search that returns all of its beams; with a prefix or without, but no required phrases."""
    context = engine.build_context(replace(options, n_best=options.beam_size), [request])
    context = replace(context, required_phrases=None)
    return trace_source(
        engine.model, *engine.pad_sources([request]), request, context, check_cancelled=engine.check_cancelled
    )


@torch.no_grad()
def trace_source(
    model: search.StepModel[search.State],
    source: Tensor,
    lengths: Tensor | None,
    request: SearchRequest,
    context: search.SearchContext,
    *,
    prompt_ids: Sequence[int] = (),
    check_cancelled: Callable[[], None],
) -> SearchTrace:
    """Record the search as `search_requests` does it; prompt tokens and `start_id` are nodes before the first step."""
    beams, state = search.start_search(model, source, lengths, [request], context, prompt_ids)
    nodes: list[TraceNode] = []
    last_prompt_node: int | None = None
    for i, token in enumerate([*prompt_ids, context.start_id][1:]):
        nodes.append(TraceNode(index=i, parent=last_prompt_node, step=i, token=token))
        last_prompt_node = i
    live = [last_prompt_node] * context.num_beams  # the node of each beam
    while not bool(beams.done):
        check_cancelled()
        beams, live = trace_step(model, state, beams, context, nodes, live, len(prompt_ids))
    (hypotheses,) = search.select_n_best(beams, context).to_hypotheses(context.end_id)
    last_nodes = tuple(find_last_nodes(nodes, hypotheses, last_prompt_node))
    return SearchTrace(nodes=tuple(nodes), hypotheses=tuple(hypotheses), last_nodes=last_nodes)


def trace_step(
    model: search.StepModel[search.State],
    state: search.State,
    beams: search.BeamState,
    context: search.SearchContext,
    nodes: list[TraceNode],
    live: list[int | None],
    prompt_length: int = 0,
) -> tuple[search.BeamState, list[int | None]]:
    """Run one step, append its candidates to `nodes`, and return the beams after it with their nodes."""
    step = int(beams.lengths)
    logits = model.step(beams.get_next_inputs(context.start_id), state)
    candidates = list_candidates(beams, logits.clone(), context)  # constraints change logits in place
    beams, parents = search.advance_beams(beams, logits, context)
    if parents is not None:
        state.reorder_beams(parents)
    own = range(context.num_beams) if parents is None else parents[0].tolist()
    rows = zip(own, beams.tokens[0, :, step].tolist(), (beams.log_probs[0] > NEG_INF).tolist(), strict=True)
    beam_of = {(parent, token): beam for beam, (parent, token, is_live) in enumerate(rows) if is_live}
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
                step=prompt_length + step,
                token=token,
                log_prob=log_prob,
                total_log_prob=total,
                is_live=beam is not None,
                score=total / context.options.compute_score_divisor(step + 1) if is_finished else None,
            )
        )
    return beams, live_after


def list_candidates(
    beams: search.BeamState, logits: Tensor, context: search.SearchContext
) -> list[tuple[int, int, float, float]]:
    """Return the 2K best continuations: beam, token, its log-probability, the total."""
    K = context.num_beams
    logits, log_norm = search.mask_logits(logits, beams, context)
    tokens, totals = search.expand_beams(logits, log_norm, beams.log_probs, 2 * K)
    parents, tokens, totals = (x[0] for x in search.rank_continuations(tokens, totals, K))
    log_probs = totals - beams.log_probs[0, parents]
    rows = zip(parents.tolist(), tokens.tolist(), log_probs.tolist(), totals.tolist(), strict=True)
    return [row for row in rows if row[3] > NEG_INF]


def find_last_nodes(nodes: list[TraceNode], hypotheses: list[Hypothesis], first_parent: int | None) -> Iterator[int]:
    """Yield the node at which each hypothesis ends or was truncated."""
    children: dict[tuple[int | None, int], int] = {}
    for node in nodes:
        if node.is_live or node.score is not None:
            children[node.parent, node.token] = node.index
    ends = {node.parent: node.index for node in nodes if node.score is not None}
    for hypothesis in hypotheses:
        index = first_parent
        for token in hypothesis.token_ids:
            index = children[index, token]
        last = ends[index] if hypothesis.is_finished else index
        assert last is not None
        yield last
