"""Files of translators, filled: PO, XLIFF and TMX come out with only their empty targets filled and marked for a
review, Markdown and plain text come out translated in their layout; every other byte is as it was.

`fill` is all that others need. A module per format knows where the texts are; `runs` has them translated; what must
not be lost on the way is known to `placeholders`. Who translates is left to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from attent.data.fill import markdown, po, runs, tmx, txt, xliff
from attent.data.fill.parts import Edit, FillError, Left, Unit
from attent.data.fill.runs import Insist, Translate
from attent.data.pairs import Languages
from attent.data.readers.formats import SUFFIXES

__all__ = ["KINDS", "FillError", "Filled", "Insist", "Left", "Translate", "fill", "kind_of"]

_FORMATS: dict[str, ModuleType] = {"po": po, "xliff": xliff, "tmx": tmx, "markdown": markdown, "text": txt}
KINDS = tuple(_FORMATS)
_OTHER_SUFFIXES = {".pot": "po", ".md": "markdown", ".markdown": "markdown", ".txt": "text", ".text": "text"}
_ERRORS = {"xliff": "xmlcharrefreplace", "tmx": "xmlcharrefreplace"}  # XML can write what its encoding lacks


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A file with its empty targets filled, and what was not."""

    content: bytes
    filled: int
    kept: int  # units that had a target already
    left: tuple[Left, ...]


def kind_of(name: str) -> str | None:
    """The kind of file that a name stands for; None for one that cannot be filled. Compressed ones cannot."""
    suffixes = {suffix: kind for suffix, kind in SUFFIXES.items() if kind in KINDS} | _OTHER_SUFFIXES
    return next((kind for suffix, kind in suffixes.items() if name.lower().endswith(suffix)), None)


def fill(
    content: bytes,
    name: str,
    translate: Translate,
    *,
    insist: Insist | None = None,
    src: str | None = None,
    tgt: str | None = None,
    kind: str | None = None,
) -> Filled:
    """The content of a file with all that waits for a translation filled by `translate`, which is called twice at most.

    `insist` is called once at most, for texts whose placeholders were lost: it is told which must come. Languages that
    are not asked for are those that the file itself names.
    """
    form = kind or kind_of(name)
    if form not in _FORMATS:
        known = ", ".join(sorted({*SUFFIXES} - {".tsv", ".tab", ".jsonl", ".ndjson"} | {*_OTHER_SUFFIXES}))
        raise FillError(f"{name} must be a file of one of these kinds: {known}; rename it or say its kind")
    module = _FORMATS[form]
    text = module.text_of(content, name)
    scan = module.scan(text, Languages(src, tgt))
    outcomes = runs.translated(scan, translate, insist)
    edits = [edit for unit, outcome in zip(scan.units, outcomes, strict=True) for edit in _edits(unit, outcome)]
    left = [*scan.left, *(outcome for outcome in outcomes if isinstance(outcome, Left))]
    return Filled(
        content=text.content(edits, _ERRORS.get(form, "surrogateescape")),
        filled=sum(not isinstance(outcome, Left) for outcome in outcomes),
        kept=scan.kept,
        left=tuple(sorted(left, key=lambda one: one.line)),
    )


def _edits(unit: Unit, outcome: Sequence[object] | Left) -> list[Edit]:
    return [] if isinstance(outcome, Left) else unit.edits(outcome)  # type: ignore[arg-type]
