"""Sources on their way to the fast lane (`lane`), and what was found for them: a few arrays for thousands. They are
made and read wherever there is time for it, and are soon in another process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

import numpy as np

from attent.data.arrays import Array
from attent.decode.options import Hypothesis, Job, Search


@dataclass(frozen=True, eq=False)
class Lot:
    """Sources, those with the longest targets first; their tokens lie end to end in the order of their own lengths."""

    ids: Array  # of all sources
    begins: Array  # of each source, in the order of lengths
    lengths: Array
    memory: Array  # the same begins, in the order of targets
    widths: Array  # tokens of each
    limits: Array  # that its target may have
    no_loops: Array  # 1: it may not go in circles

    @classmethod
    def of(cls, jobs: Sequence[Job], no_loops: bool) -> Lot:
        """Of jobs that are in order; `no_loops`: none of them may go in circles."""
        widths, limits = sizes(jobs)
        order = np.argsort(-widths, kind="stable")
        lengths = widths[order]
        begins = before(lengths)
        memory = np.empty_like(begins)
        memory[order] = begins
        return cls(
            ids=np.fromiter(chain.from_iterable(jobs[place].source for place in order), np.int32, int(lengths.sum())),
            begins=begins,
            lengths=lengths,
            memory=memory,
            widths=widths,
            limits=limits,
            no_loops=np.array([no_loops or job.no_loops for job in jobs], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.limits)


@dataclass(frozen=True, eq=False)
class Found:
    """The hypotheses of all sources of a lot, as many of each; where there are fewer, their scores are -inf."""

    tokens: Array  # (hypotheses, longest)
    written: Array  # of each how many of these it has
    lengths: Array  # with its end
    sums: Array
    scores: Array

    def hypotheses(self, n_best: int) -> list[list[Hypothesis]]:
        numbers = (x.tolist() for x in (self.written, self.lengths, self.sums, self.scores))
        found = [
            Hypothesis(ids=tuple(ids[:count].tolist()), log_prob=log_prob, score=score, ended=length > count)
            for ids, count, length, log_prob, score in zip(self.tokens, *numbers, strict=True)
        ]
        some = (found[at : at + n_best] for at in range(0, len(found), n_best))
        return [[one for one in best if one.score > float("-inf")] for best in some]


def sizes(jobs: Sequence[Job]) -> tuple[Array, Array]:
    """Tokens of each source, and how many its target may have."""
    widths = np.fromiter((len(job.source) for job in jobs), np.int64, len(jobs))
    return widths, np.fromiter((job.limit for job in jobs), np.int64, len(jobs))


def in_order(widths: Array, limits: Array) -> list[int]:
    """The places of jobs of such sizes as lots have them: the longest targets first, and of equal ones sources."""
    order: list[int] = np.lexsort((-widths, -limits)).tolist()
    return order


class No(Enum):
    """What a lot may be answered."""

    LANE = "there is none for such a search"
    ROOM = "there is no memory for so many: fewer might do"


def in_lots(
    jobs: Sequence[Job], search: Search, ask: Callable[[Lot], Found | No]
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """The places of jobs and what was found for them: for all at once, or for fewer as long as there is no room. What
    has no lane is left out."""
    waiting = deque([in_order(*sizes(jobs))])
    while waiting and waiting[0]:
        places = waiting.popleft()
        found = ask(Lot.of([jobs[place] for place in places], search.no_loops))
        if found is No.LANE:
            return
        if isinstance(found, Found):
            yield from zip(places, found.hypotheses(search.n_best), strict=True)
        else:
            half = len(places) // 2
            waiting.extendleft((places[half:], places[:half]))


def before(numbers: Array) -> Array:
    """What comes before each, together."""
    return np.cumsum(numbers) - numbers
