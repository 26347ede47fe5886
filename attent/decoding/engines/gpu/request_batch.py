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
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest


@dataclass(frozen=True, eq=False)
class RequestBatch:
    """Sources, those with the longest targets first; their tokens lie end to end in the order of their own lengths."""

    token_ids: Array  # of all sources
    source_offsets: Array  # of each source, in the order of lengths
    source_lengths: Array
    memory_offsets: Array  # the same begins, in the order of targets
    memory_lengths: Array  # tokens of each
    max_target_lengths: Array  # that its target may have
    forbid_loops: Array  # 1: it may not go in circles

    @classmethod
    def from_requests(cls, requests: Sequence[SearchRequest], forbid_loops: bool) -> RequestBatch:
        """Of jobs that are in order; `no_loops`: none of them may go in circles."""
        widths, limits = get_request_lengths(requests)
        order = np.argsort(-widths, kind="stable")
        lengths = widths[order]
        begins = exclusive_cumsum(lengths)
        memory = np.empty_like(begins)
        memory[order] = begins
        return cls(
            token_ids=np.fromiter(
                chain.from_iterable(requests[place].source for place in order), np.int32, int(lengths.sum())
            ),
            source_offsets=begins,
            source_lengths=lengths,
            memory_offsets=memory,
            memory_lengths=widths,
            max_target_lengths=limits,
            forbid_loops=np.array([forbid_loops or job.forbid_loops for job in requests], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.max_target_lengths)


@dataclass(frozen=True, eq=False)
class HypothesisBatch:
    """The hypotheses of all sources of a lot, as many of each; where there are fewer, their scores are -inf."""

    token_ids: Array  # (hypotheses, longest)
    token_counts: Array  # of each how many of these it has
    lengths: Array  # with its end
    log_probs: Array
    scores: Array

    def to_hypotheses(self, n_best: int) -> list[list[Hypothesis]]:
        numbers = (x.tolist() for x in (self.token_counts, self.lengths, self.log_probs, self.scores))
        found = [
            Hypothesis(
                token_ids=tuple(ids[:count].tolist()), log_prob=log_prob, score=score, is_finished=length > count
            )
            for ids, count, length, log_prob, score in zip(self.token_ids, *numbers, strict=True)
        ]
        some = (found[at : at + n_best] for at in range(0, len(found), n_best))
        return [[one for one in best if one.score > float("-inf")] for best in some]


def get_request_lengths(requests: Sequence[SearchRequest]) -> tuple[Array, Array]:
    """Tokens of each source, and how many its target may have."""
    widths = np.fromiter((len(job.source_ids) for job in requests), np.int64, len(requests))
    return widths, np.fromiter((job.max_length for job in requests), np.int64, len(requests))


def sort_by_length(source_lengths: Array, max_target_lengths: Array) -> list[int]:
    """The places of jobs of such sizes as lots have them: the longest targets first, and of equal ones sources."""
    order: list[int] = np.lexsort((-source_lengths, -max_target_lengths)).tolist()
    return order


class Unavailable(Enum):
    """What a lot may be answered."""

    UNSUPPORTED = "there is none for such a search"
    OUT_OF_MEMORY = "there is no memory for so many: fewer might do"


def search_in_batches(
    requests: Sequence[SearchRequest],
    options: SearchOptions,
    search_batch: Callable[[RequestBatch], HypothesisBatch | Unavailable],
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """The places of jobs and what was found for them: for all at once, or for fewer as long as there is no room. What
    has no lane is left out."""
    waiting = deque([sort_by_length(*get_request_lengths(requests))])
    while waiting and waiting[0]:
        places = waiting.popleft()
        found = search_batch(RequestBatch.from_requests([requests[place] for place in places], options.forbid_loops))
        if found is Unavailable.UNSUPPORTED:
            return
        if isinstance(found, HypothesisBatch):
            yield from zip(places, found.to_hypotheses(options.n_best), strict=True)
        else:
            half = len(places) // 2
            waiting.extendleft((places[half:], places[:half]))


def exclusive_cumsum(numbers: Array) -> Array:
    """What comes before each, together."""
    return np.cumsum(numbers) - numbers
