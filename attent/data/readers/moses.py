"""Two files side by side, as Moses reads them: line n of one is the translation of line n of the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from attent.data.pairs import Bad, CorpusError, Pair
from attent.data.readers import files


def read(source: Iterable[bytes], target: Iterable[bytes], names: tuple[str, str]) -> Iterator[Pair | Bad]:
    """A bad line on one side costs the line on the other side too, and the two stay in step."""
    left, right = files.lines(source, names[0]), files.lines(target, names[1])
    for number, (one, two) in enumerate(zip_longest(left, right), 1):
        if isinstance(one, str) and isinstance(two, str):
            yield Pair(one, two, names[0], number)
        elif one is None or two is None:
            raise _unequal(names, number, sum(1 for _ in left), one is None, sum(1 for _ in right))
        else:
            bad = one if isinstance(one, Bad) else two
            assert isinstance(bad, Bad)
            yield bad


def _unequal(names: tuple[str, str], number: int, left: int, left_ended: bool, right: int) -> CorpusError:
    counts = (number - left_ended + left, number - (not left_ended) + right)
    return CorpusError(
        f"{names[0]} has {counts[0]:,} lines but {names[1]} {counts[1]:,}, so that their lines do not belong together: "
        f"find the line that is missing or was broken in two, or take both files anew from where they came"
    )
