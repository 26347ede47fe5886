"""Translations as lines of output: plain text, Moses n-best lists, Pharaoh alignments, TSV, JSON lines. Pure functions.

One translation is one line, whatever it holds, or `n_best` lines:

    text                    hyp
    text with score         score<TAB>hyp
    text with alignment     hyp ||| 0-0 1-2
    text, n-best            number ||| hyp ||| score          (numbers from 0, as Moses has them)
    tsv                     src<TAB>hyp, then <TAB>score and <TAB>alignment where asked for
    json                    {"src": ..., "hyp": ..., "score": ..., "log_prob": ..., "tokens": [...], "finished": true, ...}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

OutputType = Literal["text", "json", "tsv"]
FIELD_SEPARATOR = "|||"
_SEPARATORS = re.compile(r"\|{3,}")
# Line breaks that JSON may hold as they are, and at which some readers would end a line.
_JSON_ESCAPES = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"})
_LINE_BREAKS = re.compile(r"[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


class HypothesisLike(Protocol):
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
    def is_finished(self) -> bool: ...


class AlignmentLike(Protocol):
    """Which word comes from which."""

    @property
    def links(self) -> Sequence[tuple[int, int]]: ...
    @property
    def weights(self) -> Sequence[Sequence[float]]: ...


class TranslationLike(HypothesisLike, Protocol):
    """The best hypothesis of a source, and all that were asked for, itself the first of them."""

    @property
    def source(self) -> str: ...
    @property
    def n_best(self) -> Sequence[HypothesisLike]: ...
    @property
    def alignment(self) -> AlignmentLike | None: ...


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """What to write of each translation. `formula` tells in JSON how a score was made."""

    type: OutputType = "text"
    n_best: int = 1
    with_score: bool = False
    alignment: Literal["hard", "soft"] | None = None
    score_formula: str = ""

    def __post_init__(self) -> None:
        if self.type not in get_args(OutputType):
            raise ValueError(f"`type` must be one of {', '.join(get_args(OutputType))}, but is {self.type!r}")
        if self.alignment and self.n_best > 1 and self.type != "json":
            raise ValueError(
                f"alignments are of the best translation only, and there must be one of each line, but `n_best` is "
                f"{self.n_best}; leave out one of the two, or take JSON"
            )

    @property
    def is_plain(self) -> bool:
        """Nothing but the text."""
        return self.type == "text" and self.n_best == 1 and not self.with_score and self.alignment is None

    def format_lines(self, translation: TranslationLike, index: int) -> list[str]:
        """The lines of one translation, without their ends; `number` is its place in the input, from 0."""
        match self.type:
            case "json":
                return [self._format_json(translation)]
            case "tsv":
                return [self._format_tsv(translation, found) for found in self._select_hypotheses(translation)]
            case "text" if self.n_best > 1:
                return [format_moses(index, found) for found in self._select_hypotheses(translation)]
            case "text":
                return [self._format_text(translation)]

    def _select_hypotheses(self, translation: TranslationLike) -> Sequence[HypothesisLike]:
        """At least one: an empty text has itself as its translation."""
        return translation.n_best[: self.n_best] or [translation] if self.n_best > 1 else [translation]

    def _format_text(self, translation: TranslationLike) -> str:
        before = f"{format_score(translation.score)}\t" if self.with_score else ""
        behind = f" {FIELD_SEPARATOR} {format_pharaoh(get_links(translation))}".rstrip(" ") if self.alignment else ""
        text = replace_line_breaks(translation.text)
        return before + (escape_separators(text) if self.alignment else text) + behind

    def _format_tsv(self, translation: TranslationLike, hypothesis: HypothesisLike) -> str:
        cells = [translation.source, hypothesis.text]
        if self.with_score:
            cells.append(format_score(hypothesis.score))
        if self.alignment:
            cells.append(format_pharaoh(get_links(translation)))
        return "\t".join(map(replace_line_breaks, cells))

    def _format_json(self, translation: TranslationLike) -> str:
        facts = {"src": translation.source, **_build_fields(translation)}
        if self.alignment:
            facts["alignment"] = [list(link) for link in get_links(translation)]
        if self.alignment == "soft":
            weights = () if translation.alignment is None else translation.alignment.weights
            facts["weights"] = [[round(float(weight), 4) for weight in row] for row in weights]
        if self.n_best > 1:
            facts["n_best"] = [_build_fields(found) for found in self._select_hypotheses(translation)]
        facts["formula"] = self.score_formula
        return json.dumps(facts, ensure_ascii=False, allow_nan=False).translate(_JSON_ESCAPES)


def format_moses(index: int, hypothesis: HypothesisLike) -> str:
    return f"{index} {FIELD_SEPARATOR} {escape_separators(replace_line_breaks(hypothesis.text))} {FIELD_SEPARATOR} {format_score(hypothesis.score)}"


def get_links(translation: TranslationLike) -> Sequence[tuple[int, int]]:
    return () if translation.alignment is None else translation.alignment.links


def format_pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Words of source and target that belong together, by their places from 0: `0-0 1-2`."""
    return " ".join(f"{source}-{target}" for source, target in links)


def replace_line_breaks(text: str) -> str:
    """No line break and no tab: so many lines in, so many lines out, and columns stay columns."""
    return _LINE_BREAKS.sub(" ", text)


def escape_separators(text: str) -> str:
    """Bars that would be read as the end of a field are set apart."""
    return _SEPARATORS.sub(lambda bars: " ".join(bars[0]), text)


def format_score(score: float) -> str:
    return f"{round(score, 4) + 0.0:.4f}"  # + 0.0: never -0.0000


def _build_fields(hypothesis: HypothesisLike) -> dict[str, Any]:
    return {
        "hyp": hypothesis.text,
        "score": _round_finite(hypothesis.score),
        "log_prob": _round_finite(hypothesis.log_prob),
        "tokens": list(hypothesis.tokens),
        "finished": hypothesis.is_finished,
    }


def _round_finite(value: float) -> float | None:
    """JSON has no infinity."""
    return round(value, 6) + 0.0 if math.isfinite(value) else None
