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

from attent.decode.engine import Session, Stopped, TorchEngine
from attent.decode.options import Hypothesis, Job, Search
from attent.decode.search import NEVER, Beams, Plan, allowed, banned, continuations, first, grow


@dataclass(frozen=True, kw_only=True)
class Node:
    """A token behind its parent's."""

    number: int
    parent: int | None  # None: behind the start
    step: int  # from 0
    token: int
    log_prob: float  # of this token
    sum: float  # of all up to it
    kept: bool  # it went on as a beam
    score: float | None  # of a hypothesis that it ends; None: it ends none


@dataclass(frozen=True, kw_only=True)
class Film:
    """A search for one source."""

    nodes: tuple[Node, ...]  # by step, the best first
    found: tuple[Hypothesis, ...]  # the best first, as many as there are beams
    last: tuple[int, ...]  # of each hypothesis its last node

    def path(self, number: int) -> list[int]:
        """The nodes up to one, the first first."""
        path = [number]
        while (parent := self.nodes[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]


@torch.no_grad()
def film(engine: TorchEngine[Any], job: Job, search: Search) -> Film:
    """The search for the target of a source, all of its beams wanted: plain beam search, with a prefix or without."""
    search = replace(search, n_best=search.beam_size)
    rules, _ = engine.make_rules(search, [job])
    never = banned(engine.start, engine.end, engine.never, engine.device)
    plan = Plan(search=search, start=engine.start, end=engine.end, never=never, rules=rules)
    session = Session(engine, [job], [0], plan)
    nodes: list[Node] = []
    live: list[int | None] = [None] * plan.beams  # the node of each beam
    while not bool(session.beams.done):
        if engine.stop is not None and engine.stop():
            raise Stopped
        live = advance(session, plan, nodes, live)
    ((_, found),) = session.finished()
    return Film(nodes=tuple(nodes), found=tuple(found), last=tuple(last_nodes(nodes, found)))


def advance(session: Session[Any], plan: Plan, nodes: list[Node], live: list[int | None]) -> list[int | None]:
    """One step: what was looked at joins the nodes; the nodes of the beams after it."""
    beams, model = session.beams, session.engine.model
    logits = model.step(beams.next_read(plan.start), session.state)
    seen = looked_at(beams, logits.clone(), plan)  # rules write into what they are given
    grown, parents = grow(beams, logits, plan)
    if parents is not None:
        session.state.follow(parents)
    session.beams, session.ages = grown, [age + 1 for age in session.ages]
    own = torch.arange(plan.beams).tolist() if parents is None else parents[0].tolist()
    t = int(beams.lengths)
    written = zip(own, grown.tokens[0, :, t].tolist(), (grown.sums[0] > NEVER).tolist(), strict=True)
    goes_on = {(parent, token): beam for beam, (parent, token, real) in enumerate(written) if real}
    after: list[int | None] = [None] * plan.beams
    for rank, (parent, token, log_prob, total) in enumerate(seen):
        ends = token == plan.end and rank < plan.beams
        beam = None if token == plan.end else goes_on.get((parent, token))
        node = Node(
            number=len(nodes),
            parent=live[parent],
            step=t,
            token=token,
            log_prob=log_prob,
            sum=total,
            kept=beam is not None,
            score=total / plan.search.penalty(t + 1) if ends else None,
        )
        nodes.append(node)
        if beam is not None:
            after[beam] = node.number
    return after


def looked_at(beams: Beams, logits: Tensor, plan: Plan) -> list[tuple[int, int, float, float]]:
    """Of the continuations of all beams the 2K best: beam, token, log-probability of the token, sum."""
    K = plan.beams
    logits, total = allowed(logits, beams, plan)
    tokens, sums = continuations(logits, total, beams.sums, 2 * K)
    best = first(sums, min(2 * K, sums.shape[1]))[0]
    each = best // (sums.shape[1] // K)
    gains = sums[0, best] - beams.sums[0, each]
    rows = zip(each.tolist(), tokens[0, best].tolist(), gains.tolist(), sums[0, best].tolist(), strict=True)
    return [row for row in rows if row[3] > NEVER]


def last_nodes(nodes: list[Node], found: list[Hypothesis]) -> Iterator[int]:
    """The node in which each hypothesis ends, or at which it was cut."""
    below: dict[tuple[int | None, int], int] = {}
    for node in nodes:
        if node.kept or node.score is not None:
            below[node.parent, node.token] = node.number
    end = {node.parent: node.number for node in nodes if node.score is not None}
    for one in found:
        at: int | None = None
        for token in one.ids:
            at = below[at, token]
        last = end[at] if one.ended else at
        assert last is not None
        yield last
