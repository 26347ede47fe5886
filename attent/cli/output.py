"""Translations as lines of output: plain text, Moses n-best lists, Pharaoh alignments, TSV, JSON lines. Pure functions.

One translation is one line, whatever it holds, or `n_best` lines:

    text                    hyp
    text with score         score<TAB>hyp
    text with alignment     hyp ||| 0-0 1-2
    text, n-best            number ||| hyp ||| score          (numbers from 0, as Moses has them)
    tsv                     src<TAB>hyp, then <TAB>score and <TAB>alignment where asked for
    json                    {"src": ..., "hyp": ..., "score": ..., "log_prob": ..., "tokens": [...], "ended": true, ...}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

OutputType = Literal["text", "json", "tsv"]
BAR = "|||"
_BARS = re.compile(r"\|{3,}")
# Line breaks that JSON may hold as they are, and at which some readers would end a line.
_ESCAPED = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"})
_BREAKS = re.compile(r"[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


class Found(Protocol):
    """One hypothesis, in words."""

    @property
    def text(self) -> str: ...
    @property
    def score(self) -> float: ...
    @property
    def log_prob(self) -> float: ...
    @property
    def tokens(self) -> Sequence[str]: ...
    @property
    def ended(self) -> bool: ...


class Linked(Protocol):
    """Which word comes from which."""

    @property
    def links(self) -> Sequence[tuple[int, int]]: ...
    @property
    def weights(self) -> Sequence[Sequence[float]]: ...


class Translated(Found, Protocol):
    """The best hypothesis of a source, and all that were asked for, itself the first of them."""

    @property
    def source(self) -> str: ...
    @property
    def n_best(self) -> Sequence[Found]: ...
    @property
    def alignment(self) -> Linked | None: ...


@dataclass(frozen=True, kw_only=True)
class Output:
    """What to write of each translation. `formula` tells in JSON how a score was made."""

    type: OutputType = "text"
    n_best: int = 1
    with_score: bool = False
    alignment: Literal["hard", "soft"] | None = None
    formula: str = ""

    def __post_init__(self) -> None:
        if self.type not in get_args(OutputType):
            raise ValueError(f"`type` must be one of {', '.join(get_args(OutputType))}, but is {self.type!r}")
        if self.alignment and self.n_best > 1 and self.type != "json":
            raise ValueError(
                f"alignments are of the best translation only, and there must be one of each line, but `n_best` is "
                f"{self.n_best}; leave out one of the two, or take JSON"
            )

    @property
    def plain(self) -> bool:
        """Nothing but the text."""
        return self.type == "text" and self.n_best == 1 and not self.with_score and self.alignment is None

    def lines(self, translation: Translated, number: int) -> list[str]:
        """The lines of one translation, without their ends; `number` is its place in the input, from 0."""
        match self.type:
            case "json":
                return [self._json(translation)]
            case "tsv":
                return [self._tsv(translation, found) for found in self._asked(translation)]
            case "text" if self.n_best > 1:
                return [moses(number, found) for found in self._asked(translation)]
            case "text":
                return [self._text(translation)]

    def _asked(self, translation: Translated) -> Sequence[Found]:
        """At least one: an empty text has itself as its translation."""
        return translation.n_best[: self.n_best] or [translation] if self.n_best > 1 else [translation]

    def _text(self, translation: Translated) -> str:
        before = f"{rounded(translation.score)}\t" if self.with_score else ""
        behind = f" {BAR} {pharaoh(links_of(translation))}".rstrip(" ") if self.alignment else ""
        text = one_line(translation.text)
        return before + (without_bars(text) if self.alignment else text) + behind

    def _tsv(self, translation: Translated, found: Found) -> str:
        cells = [translation.source, found.text]
        if self.with_score:
            cells.append(rounded(found.score))
        if self.alignment:
            cells.append(pharaoh(links_of(translation)))
        return "\t".join(map(one_line, cells))

    def _json(self, translation: Translated) -> str:
        facts = {"src": translation.source, **_facts(translation)}
        if self.alignment:
            facts["alignment"] = [list(link) for link in links_of(translation)]
        if self.alignment == "soft":
            weights = () if translation.alignment is None else translation.alignment.weights
            facts["weights"] = [[round(float(weight), 4) for weight in row] for row in weights]
        if self.n_best > 1:
            facts["n_best"] = [_facts(found) for found in self._asked(translation)]
        facts["formula"] = self.formula
        return json.dumps(facts, ensure_ascii=False, allow_nan=False).translate(_ESCAPED)


def moses(number: int, found: Found) -> str:
    return f"{number} {BAR} {without_bars(one_line(found.text))} {BAR} {rounded(found.score)}"


def links_of(translation: Translated) -> Sequence[tuple[int, int]]:
    return () if translation.alignment is None else translation.alignment.links


def pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Words of source and target that belong together, by their places from 0: `0-0 1-2`."""
    return " ".join(f"{source}-{target}" for source, target in links)


def one_line(text: str) -> str:
    """No line break and no tab: so many lines in, so many lines out, and columns stay columns."""
    return _BREAKS.sub(" ", text)


def without_bars(text: str) -> str:
    """Bars that would be read as the end of a field are set apart."""
    return _BARS.sub(lambda bars: " ".join(bars[0]), text)


def rounded(score: float) -> str:
    return f"{round(score, 4) + 0.0:.4f}"  # + 0.0: never -0.0000


def _facts(found: Found) -> dict[str, Any]:
    return {
        "hyp": found.text,
        "score": _number(found.score),
        "log_prob": _number(found.log_prob),
        "tokens": list(found.tokens),
        "ended": found.ended,
    }


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return round(value, 6) + 0.0 if math.isfinite(value) else None
