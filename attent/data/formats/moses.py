"""Two files side by side, as Moses reads them: line n of one is the translation of line n of the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from attent.data.formats import streams
from attent.data.pairs import BadLine, CorpusError, Pair


def read_pairs(source: Iterable[bytes], target: Iterable[bytes], names: tuple[str, str]) -> Iterator[Pair | BadLine]:
    """A bad line on one side costs the line on the other side too, and the two stay in step."""
    left, right = streams.read_lines(source, names[0]), streams.read_lines(target, names[1])
    for number, (one, two) in enumerate(zip_longest(left, right), 1):
        if isinstance(one, str) and isinstance(two, str):
            yield Pair(one, two, names[0], number)
        elif one is None or two is None:
            raise _make_line_count_error(names, number, sum(1 for _ in left), one is None, sum(1 for _ in right))
        else:
            bad = one if isinstance(one, BadLine) else two
            assert isinstance(bad, BadLine)
            yield bad


def _make_line_count_error(
    names: tuple[str, str], line_number: int, remaining_left: int, left_ended: bool, remaining_right: int
) -> CorpusError:
    counts = (line_number - left_ended + remaining_left, line_number - (not left_ended) + remaining_right)
    return CorpusError(
        f"{names[0]} has {counts[0]:,} lines but {names[1]} {counts[1]:,}, so that their lines do not belong together: "
        f"find the line that is missing or was broken in two, or take both files anew from where they came"
    )
