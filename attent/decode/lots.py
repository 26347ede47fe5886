"""Sources on their way to the fast lane (`lane`), and what was found for them: a few arrays for thousands. They are
made and read wherever there is time for it, and are soon in another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from attent.data.arrays import Array
from attent.decode.options import Hypothesis, Job


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


def parted(order: Sequence[int], jobs: Sequence[Job], tokens: int, leaves: int) -> Iterator[list[int]]:
    """As many sources as so many tokens have together, and whose targets may have so many; at least one."""
    lot: list[int] = []
    read = written = 0
    for place in order:
        read += len(jobs[place].source)
        written += jobs[place].limit
        if lot and (read > tokens or written > leaves):
            yield lot
            lot = []
            read, written = len(jobs[place].source), jobs[place].limit
        lot.append(place)
    if lot:
        yield lot


def before(numbers: Array) -> Array:
    """What comes before each, together."""
    return np.cumsum(numbers) - numbers
