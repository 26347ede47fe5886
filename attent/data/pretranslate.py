"""Pre-translate files of translators: PO, XLIFF and TMX get their empty targets filled and marked for review; Markdown
and plain text come out translated in their layout. Every other byte stays.

A unit's content is cut into runs at line breaks, tabs and block markup; a run is translated without the space and
markup around it and must keep its placeholders. A run that lost a placeholder at an end is translated again without
it; for placeholders inside a run, constrained decoding is tried. A unit that still lacks one is skipped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from attent.data.formats import placeholders, units
from attent.data.formats.accelerators import insert_accelerator, remove_accelerator
from attent.data.formats.placeholders import PlaceholderSyntax
from attent.data.formats.registry import FORMATS, detect_document_format, list_document_suffixes
from attent.data.formats.units import InlineCode, InlineContent, ScanResult, SkippedUnit, TranslationUnit
from attent.data.pairs import CorpusError, LanguagePair

TranslateTexts = Callable[[Sequence[str]], Sequence[str]]
# From texts and the placeholders that each must keep: candidate translations of each, the best first, or none.
TranslateConstrained = Callable[[Sequence[str], Sequence[tuple[str, ...]]], Sequence[Sequence[str]]]
_TEXT_BREAK = re.compile(rf"((?:[\t-\r\x1c-\x1f\x85\u2028\u2029]|{placeholders.HTML_BLOCK_TAG})+)", re.IGNORECASE)
_NUMBERED_TAG = re.compile(r"</?(\d{1,9})/?>")


@dataclass(frozen=True, kw_only=True)
class PretranslateResult:
    content: bytes
    filled_count: int
    existing_count: int  # units that had a target
    skipped: tuple[SkippedUnit, ...]


def pretranslate_file(
    content: bytes,
    name: str,
    translate: TranslateTexts,
    *,
    translate_constrained: TranslateConstrained | None = None,
    src: str | None = None,
    tgt: str | None = None,
) -> PretranslateResult:
    """Fill in all missing translations of a file.

    `translate` is called at most twice; `translate_constrained` at most once, for texts that lost placeholders. Open
    languages are those that the file declares.
    """
    key = detect_document_format(name)
    scan_units = FORMATS[key].scan_units if key in FORMATS else None
    if scan_units is None:
        known = ", ".join(sorted(list_document_suffixes()))
        raise CorpusError(f"{name} must be a file of one of these kinds: {known}; rename it")
    scan = scan_units(content, name, LanguagePair(src, tgt))
    results = _translate_units(scan, translate, translate_constrained)
    filled = [
        (unit, result) for unit, result in zip(scan.units, results, strict=True) if not isinstance(result, SkippedUnit)
    ]
    skipped = [*scan.skipped, *(result for result in results if isinstance(result, SkippedUnit))]
    edits = [edit for unit, contents in filled for edit in unit.make_edits(contents)]
    return PretranslateResult(
        content=scan.text.encode_edited(edits, scan.encoding_errors),
        filled_count=len(filled),
        existing_count=scan.existing_count,
        skipped=tuple(sorted(skipped, key=lambda unit: unit.line)),
    )


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """Text that is translated at once, and the space and markup around it."""

    prefix: InlineContent = ()
    core: InlineContent = ()  # empty if there is nothing to translate
    suffix: InlineContent = ()
    syntax: PlaceholderSyntax = placeholders.GENERIC

    @property
    def text(self) -> str:
        return units.get_display_text(self.core)

    @property
    def required_placeholders(self) -> tuple[str, ...]:
        return tuple(placeholders.list_placeholders(self.core, self.syntax))


def _translate_units(
    scan: ScanResult, translate: TranslateTexts, translate_constrained: TranslateConstrained | None
) -> list[Sequence[InlineContent] | SkippedUnit]:
    """Return the translated contents of each unit, or why it is skipped. Equal texts are translated once."""
    pending = [_PendingUnit(unit, scan) for unit in scan.units]
    _record([(unit, run) for unit in pending for run in unit.list_runs()], translate)
    is_constrained = translate_constrained is not None
    retries = [(unit, run) for unit in pending for run in unit.list_retries(include_whole=is_constrained)]
    constrained = [(unit, run) for unit, run in retries if is_constrained and run.required_placeholders]
    _record([pair for pair in retries if pair not in constrained], translate)
    if translate_constrained is not None and constrained:
        required = {run.text: run.required_placeholders for _, run in constrained}
        candidates = _index_by_source(list(required), translate_constrained(list(required), list(required.values())))
        for unit, run in constrained:
            unit.record_first_valid(run, candidates[run.text], constrained=True)
    return [unit.build_result() for unit in pending]


def _record(runs: Sequence[tuple[_PendingUnit, TextRun]], translate: TranslateTexts) -> None:
    texts = list(dict.fromkeys(run.text for _, run in runs))
    candidates = _index_by_source(texts, [[text] for text in translate(texts)]) if texts else {}
    for unit, run in runs:
        unit.record_first_valid(run, candidates[run.text], constrained=False)


def _index_by_source(texts: Sequence[str], candidates: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Return the candidates of each text, each joined to one line."""
    if len(candidates) != len(texts):
        raise CorpusError(
            f"there must be {len(texts):,} translations, but there are {len(candidates):,}: the model is at fault"
        )
    lines = [[" ".join(text.split("\n")).strip() for text in translations] for translations in candidates]
    return dict(zip(texts, lines, strict=True))


class _PendingUnit:
    """A unit, the translations of its runs so far, and their problems."""

    def __init__(self, unit: TranslationUnit, scan: ScanResult) -> None:
        self.unit, self.check_text = unit, scan.check_text
        self.skip_reason = _find_unit_problem(unit)
        self.syntax = placeholders.get_syntax(unit.format_names)
        self.sources = [
            remove_accelerator(content, self.syntax) if scan.has_labels else (content, None)
            for content in unit.contents
        ]
        self.runs = [[] if self.skip_reason else split_runs(content, self.syntax) for content, _ in self.sources]
        self.translations: dict[TextRun, InlineContent] = {}
        self.problems: dict[TextRun, str] = {}

    def list_runs(self) -> list[TextRun]:
        return [run for content in self.runs for run in content if run.core]

    def list_retries(self, *, include_whole: bool) -> list[TextRun]:
        """Return the failed runs without the placeholders at their ends; those without such if `include_whole`."""
        failed = [(run, strip_end_placeholders(run)) for run in self.list_runs() if run in self.problems]
        retries = [
            stripped or run for run, stripped in failed if stripped or (include_whole and run.required_placeholders)
        ]
        return list(dict.fromkeys(retries))

    def record_first_valid(self, run: TextRun, candidates: Iterable[str], *, constrained: bool) -> None:
        """Keep the first candidate without a problem, else the problem of the first."""
        for text in candidates:
            content = restore_codes(text, run.core)
            content = placeholders.restore_spacing(run.core, content, self.syntax) if constrained else content
            problem = "" if text else "its translation is empty"
            problem = problem or self.check_text(text) or placeholders.find_problem(run.core, content, self.syntax)
            if constrained and not problem:
                problem = placeholders.find_misplaced(run.core, content, self.syntax)
            if not problem:
                self.translations[run] = content
                return
            self.problems.setdefault(run, problem)

    def build_result(self) -> Sequence[InlineContent] | SkippedUnit:
        if self.skip_reason:
            return self._skip(0, self.skip_reason)
        results: list[InlineContent] = []
        for index, runs in enumerate(self.runs):
            parts: list[str | InlineCode] = []
            for run in runs:
                content = self._assemble_run(run)
                if content is None:
                    return self._skip(index, self.problems[run])
                parts += content
            source, accelerator = self.sources[index]
            problem = placeholders.find_problem(source, tuple(parts), self.syntax)
            if self.syntax.directives and problem:  # of a directive that a line break cuts
                return self._skip(index, problem)
            result = insert_accelerator(tuple(parts), accelerator, self.syntax) if accelerator else tuple(parts)
            if result is None:
                return self._skip(index, f"its translation has no letter for {''.join(accelerator or ())}")
            results.append(result)
        return results

    def _skip(self, index: int, reason: str) -> SkippedUnit:
        source = units.get_display_text(number_codes(self.unit.contents[index]))
        return SkippedUnit(line=self.unit.line, source=source, reason=reason)

    def _assemble_run(self, run: TextRun) -> InlineContent | None:
        if not run.core:
            return (*run.prefix, *run.suffix)
        if run in self.translations:
            return (*run.prefix, *self.translations[run], *run.suffix)
        stripped = strip_end_placeholders(run)
        if stripped is None or stripped not in self.translations:
            return None
        return (*stripped.prefix, *_strip_added_period(stripped, self.translations[stripped]), *stripped.suffix)


def _strip_added_period(stripped: TextRun, content: InlineContent) -> InlineContent:
    """Remove a full stop that the source does not have, since a placeholder follows."""
    last = content[-1]
    if stripped.text.endswith(".") or not stripped.suffix or not isinstance(last, str) or not last.rstrip(".").strip():
        return content
    return (*content[:-1], last.rstrip("."))


def _find_unit_problem(unit: TranslationUnit) -> str:
    """Return why no translation can be filled in, or ""."""
    texts = [part for content in unit.contents for part in content if isinstance(part, str)]
    if any("\udc80" <= character <= "\udcff" for text in texts for character in text):  # undecodable bytes
        return "it is not in the file's encoding"
    if any("\0" in text for text in texts):
        return "it has a NUL character"
    if any(placeholders.ICU_MESSAGE.search(text) for text in texts):
        return "it has forms of its own (plural, select)"
    return ""


def split_runs(content: InlineContent, syntax: PlaceholderSyntax = placeholders.GENERIC) -> list[TextRun]:
    """Cut a content at its breaks; the breaks are runs without a core."""
    runs: list[TextRun] = []
    parts: list[str | InlineCode] = []
    pieces = [_TEXT_BREAK.split(part) if isinstance(part, str) else [part] for part in number_codes(content)]
    for part in filter(None, chain.from_iterable(pieces)):
        if part.is_break if isinstance(part, InlineCode) else _TEXT_BREAK.fullmatch(part):
            runs += [_trim_run(TextRun(core=tuple(parts), syntax=syntax)), TextRun(prefix=(part,))]
            parts = []
        else:
            parts.append(part)
    return [*runs, _trim_run(TextRun(core=tuple(parts), syntax=syntax))]


def number_codes(content: InlineContent) -> InlineContent:
    """Give codes without a display text numbers that the text does not use: `<1>`, `</1>`, `<2/>`."""
    text = "".join(part for part in content if isinstance(part, str))
    numbers = count(max((int(number) for number in _NUMBERED_TAG.findall(text)), default=0) + 1)
    pair_numbers: dict[str, int] = defaultdict(lambda: next(numbers))
    codes = [part for part in content if isinstance(part, InlineCode)]
    opened, closed = ({code.pair_id for code in codes if code.role == role} for role in ("open", "close"))
    parts: list[str | InlineCode] = []
    for part in content:
        if isinstance(part, InlineCode):
            role = part.role if part.pair_id in opened & closed else "standalone"
            number = pair_numbers[part.pair_id] if role != "standalone" else next(numbers)
            part = part._replace(role=role, display=part.display or placeholders.TAG_TEMPLATES[role].format(number))
        parts.append(part)
    return tuple(parts)


def _trim_run(run: TextRun, *, include_words: bool = False) -> TextRun:
    """Move space and markup out of the core; codes that are words only if `include_words`."""
    trimmed = run
    while (spaceless := _trim_codes(_trim_space(trimmed), include_words)) != trimmed:
        trimmed = spaceless
    if placeholders.has_words("".join(part for part in trimmed.core if isinstance(part, str)), run.syntax):
        return trimmed
    return TextRun(prefix=(*trimmed.prefix, *trimmed.core, *trimmed.suffix))


def _trim_space(run: TextRun) -> TextRun:
    return _trim_texts(
        run,
        lambda text: (text[: len(text) - len(text.lstrip())], text.lstrip()),
        lambda text: (text.rstrip(), text[len(text.rstrip()) :]),
    )


def _trim_texts(
    run: TextRun, cut_start: Callable[[str], tuple[str, str]], cut_end: Callable[[str], tuple[str, str]]
) -> TextRun:
    """Move the start of the first text to the prefix and the end of the last to the suffix."""
    core, prefix, suffix = list(run.core), run.prefix, run.suffix
    if core and isinstance(core[0], str):
        cut, core[0] = cut_start(core[0])
        prefix = (*prefix, cut) if cut else prefix
    if core and isinstance(core[-1], str):
        core[-1], cut = cut_end(core[-1])
        suffix = (cut, *suffix) if cut else suffix
    return replace(run, prefix=prefix, core=tuple(part for part in core if part), suffix=suffix)


def _trim_codes(run: TextRun, include_words: bool) -> TextRun:
    """Move the first or last code out of the core, unless its other half is inside."""
    core = run.core
    if not core:
        return run
    first, last = core[0], core[-1]
    if _is_standalone_code(first, include_words):
        return replace(run, prefix=(*run.prefix, first), core=core[1:])
    if _is_standalone_code(last, include_words):
        return replace(run, core=core[:-1], suffix=(last, *run.suffix))
    if not isinstance(first, InlineCode) or not isinstance(last, InlineCode):
        return run
    if (first.role, last.role, first.pair_id) != ("open", "close", last.pair_id):
        return run
    return replace(run, prefix=(*run.prefix, first), core=core[1:-1], suffix=(last, *run.suffix))


def _is_standalone_code(part: str | InlineCode, include_words: bool) -> bool:
    return isinstance(part, InlineCode) and part.role == "standalone" and (include_words or not part.is_word)


def strip_end_placeholders(run: TextRun) -> TextRun | None:
    """Return the run without the placeholders at its ends; None if there are none or nothing would remain."""
    trimmed = _trim_texts(
        _trim_run(run, include_words=True),
        lambda text: placeholders.strip_placeholders(text, start=True, end=False, syntax=run.syntax)[:2],
        lambda text: placeholders.strip_placeholders(text, start=False, end=True, syntax=run.syntax)[1:],
    )
    inner = _trim_run(trimmed, include_words=True)
    return None if inner.core in ((), run.core) else inner


def restore_codes(text: str, template: InlineContent) -> InlineContent:
    """Split a translation into words and the codes of `template`; a code that occurs too often is repeated."""
    codes: dict[str, list[InlineCode]] = {}
    for part in template:
        if isinstance(part, InlineCode):
            codes.setdefault(part.display, []).append(part)
    if not codes:
        return (text,)
    by_length = sorted(codes, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, by_length)) + ")", text)
    parts: list[str | InlineCode] = []
    for piece in filter(None, pieces):
        same = codes.get(piece, [])
        parts.append(same.pop(0) if len(same) > 1 else same[0] if same else piece)
    return tuple(parts)
