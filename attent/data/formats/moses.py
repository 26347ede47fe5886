"""Moses format: two files, in which line n of one is the translation of line n of the other."""

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from attent.data.formats import streams
from attent.data.pairs import BadLine, CorpusError, Pair


def read_pairs(source: Iterable[bytes], target: Iterable[bytes], names: tuple[str, str]) -> Iterator[Pair | BadLine]:
    """Yield the pairs of lines. A bad line on either side makes the pair bad; the two files stay in step."""
    sources, targets = streams.read_lines(source, names[0]), streams.read_lines(target, names[1])
    for number, (source_line, target_line) in enumerate(zip_longest(sources, targets), 1):
        if isinstance(source_line, str) and isinstance(target_line, str):
            yield Pair(source_line, target_line, names[0], number, names[1])
        elif source_line is None or target_line is None:
            ends = ((source_line, sources), (target_line, targets))
            counts = [number - (line is None) + sum(1 for _ in rest) for line, rest in ends]
            problem = f"{names[0]} has {counts[0]:,} lines but {names[1]} {counts[1]:,}, so that they do not match"
            raise CorpusError(f"{problem}: find the missing or broken line, or fetch both files again")
        else:
            bad_line = source_line if isinstance(source_line, BadLine) else target_line
            assert isinstance(bad_line, BadLine)
            yield bad_line
