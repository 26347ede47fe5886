"""Files of translators, filled: PO, XLIFF and TMX come out with only their empty targets filled and marked for a
review, Markdown and plain text come out translated in their layout; every other byte is as it was.

`fill` is all that others need. A module per format knows where the texts are; `runs` has them translated; what must
not be lost on the way is known to `placeholders`. Who translates is left to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from attent.data.formats import markdown, plain_text, po_units, tmx_units, xliff_units
from attent.data.formats.registry import FORMAT_BY_SUFFIX
from attent.data.formats.units import Edit, PretranslateError, SkippedUnit, TranslationUnit
from attent.data.pairs import LanguagePair
from attent.data.pretranslate import text_runs
from attent.data.pretranslate.text_runs import TranslateConstrained, TranslateTexts

__all__ = [
    "FORMAT_NAMES",
    "PretranslateError",
    "PretranslateResult",
    "SkippedUnit",
    "TranslateConstrained",
    "TranslateTexts",
    "detect_document_format",
    "pretranslate_file",
]

_FORMAT_MODULES: dict[str, ModuleType] = {
    "po": po_units,
    "xliff": xliff_units,
    "tmx": tmx_units,
    "markdown": markdown,
    "text": plain_text,
}
FORMAT_NAMES = tuple(_FORMAT_MODULES)
_EXTRA_SUFFIXES = {".pot": "po", ".md": "markdown", ".markdown": "markdown", ".txt": "text", ".text": "text"}
_ENCODING_ERRORS = {"xliff": "xmlcharrefreplace", "tmx": "xmlcharrefreplace"}  # XML can write what its encoding lacks


@dataclass(frozen=True, kw_only=True)
class PretranslateResult:
    """A file with its empty targets filled, and what was not."""

    content: bytes
    filled_count: int
    existing_count: int  # units that had a target already
    skipped: tuple[SkippedUnit, ...]


def detect_document_format(name: str) -> str | None:
    """The kind of file that a name stands for; None for one that cannot be filled. Compressed ones cannot."""
    suffixes = {suffix: kind for suffix, kind in FORMAT_BY_SUFFIX.items() if kind in FORMAT_NAMES} | _EXTRA_SUFFIXES
    return next((kind for suffix, kind in suffixes.items() if name.lower().endswith(suffix)), None)


def pretranslate_file(
    content: bytes,
    name: str,
    translate: TranslateTexts,
    *,
    translate_constrained: TranslateConstrained | None = None,
    src: str | None = None,
    tgt: str | None = None,
    format_name: str | None = None,
) -> PretranslateResult:
    """The content of a file with all that waits for a translation filled by `translate`, which is called twice at most.

    `insist` is called once at most, for texts whose placeholders were lost: it is told which must come. Languages that
    are not asked for are those that the file itself names.
    """
    form = format_name or detect_document_format(name)
    if form not in _FORMAT_MODULES:
        known = ", ".join(sorted({*FORMAT_BY_SUFFIX} - {".tsv", ".tab", ".jsonl", ".ndjson"} | {*_EXTRA_SUFFIXES}))
        raise PretranslateError(f"{name} must be a file of one of these kinds: {known}; rename it or say its kind")
    module = _FORMAT_MODULES[form]
    text = module.decode_document(content, name)
    scan = module.scan_units(text, LanguagePair(src, tgt))
    outcomes = text_runs.translate_units(scan, translate, translate_constrained)
    edits = [edit for unit, outcome in zip(scan.units, outcomes, strict=True) for edit in _make_edits(unit, outcome)]
    left = [*scan.skipped, *(outcome for outcome in outcomes if isinstance(outcome, SkippedUnit))]
    return PretranslateResult(
        content=text.encode_edited(edits, _ENCODING_ERRORS.get(form, "surrogateescape")),
        filled_count=sum(not isinstance(outcome, SkippedUnit) for outcome in outcomes),
        existing_count=scan.existing_count,
        skipped=tuple(sorted(left, key=lambda one: one.line)),
    )


def _make_edits(unit: TranslationUnit, outcome: Sequence[object] | SkippedUnit) -> list[Edit]:
    return [] if isinstance(outcome, SkippedUnit) else unit.make_edits(outcome)  # type: ignore[arg-type]
