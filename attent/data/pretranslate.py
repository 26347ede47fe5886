"""Pre-translate files of translators: PO, XLIFF and TMX get their empty targets filled and marked for review; HTML,
Markdown and plain text come out translated in their layout. Every other byte stays.

A content is cut into runs at line breaks, tabs and block markup; a run must keep its codes and placeholders. The model
is given those that it may know how to copy: all, if it was trained with tags (`copies_tags`), else placeholders, and
after a sample only those that it mostly copies. The others, and those that it lost, are put into the translation along
the word alignment (`transfer`).
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from typing import TypeVar
from xml.sax.saxutils import escape, quoteattr

from attent.data.formats import placeholders, units
from attent.data.formats.placeholders import PlaceholderSyntax, insert_accelerator, remove_accelerator
from attent.data.formats.registry import scan_document
from attent.data.formats.units import InlineCode, InlineContent, Role, SkippedUnit, TransferredContent, get_raw_text
from attent.data.formats.xliff import REVIEW_ATTRIBUTES_1
from attent.data.formats.xml import replace_invalid_chars
from attent.data.pairs import CorpusError, LanguagePair
from attent.formatting import escape_invisible
from attent.text.scripts import is_separate_word

TranslateTexts = Callable[[Sequence[str]], Sequence[str | TransferredContent]]
TransferMarkup = Callable[[Sequence[InlineContent]], Sequence[TransferredContent]]
_UNCERTAIN = "the place of its markup is a guess"
_TEXT_BREAK = re.compile(rf"((?:[\t-\r\x1c-\x1f\x85\u2028\u2029]|{placeholders.HTML_BLOCK_TAG})+)", re.IGNORECASE)
_NUMBERED_TAG = re.compile(r"</?x(\d{1,9})/?>")
COPY_SAMPLE_RUNS = 32  # the first with placeholders: those that are lost here do not go through the model later
_COLUMNS = ("line", "state", "reason", "source", "target")


@dataclass(frozen=True, kw_only=True)
class FilledContent:
    """A text of a unit and its translation."""

    line: int
    source: InlineContent
    target: InlineContent = ()
    reason: str  # to review it, or ""


@dataclass(frozen=True, kw_only=True)
class PretranslateResult:
    content: bytes
    filled_count: int
    existing_count: int  # units that had a target
    skipped: tuple[SkippedUnit, ...]
    for_review: tuple[SkippedUnit, ...] = ()  # filled, but a code may be in another place
    filled: tuple[FilledContent, ...] = ()


def pretranslate_file(
    content: bytes,
    name: str,
    translate: TranslateTexts,
    *,
    transfer: TransferMarkup | None = None,
    copies_tags: bool = False,
    src: str | None = None,
    tgt: str | None = None,
    fields: Sequence[str] = (),
) -> PretranslateResult:
    """Fill in all missing translations of a file.

    `translate` is called at most once, `transfer` at most three times; without it, a unit that lost a code is skipped.
    Open languages are those that the file declares. `fields` are the columns or keys to translate, where a format has
    them.
    """
    scan = scan_document(content, name, LanguagePair(src, tgt), fields)
    pending = [_PendingUnit(unit, scan) for unit in scan.units]
    _translate_units(pending, translate, transfer, copies_tags)
    results = [unit.build_result() for unit in pending]
    edits = [
        edit
        for unit, result in zip(pending, results, strict=True)
        if not isinstance(result, SkippedUnit)
        for edit in unit.unit.make_edits(result)
    ]
    edits += scan.final_edits if edits else []
    skipped = [*scan.skipped, *(result for result in results if isinstance(result, SkippedUnit))]
    return PretranslateResult(
        content=scan.text.encode_edited(edits, scan.encoding_errors),
        filled_count=sum(not isinstance(result, SkippedUnit) for result in results),
        existing_count=scan.existing_count,
        skipped=tuple(sorted(skipped, key=lambda unit: unit.line)),
        for_review=tuple(unit.report(_join(unit.review_reasons.values())) for unit in pending if unit.review_reasons),
        filled=tuple(
            FilledContent(
                line=unit.unit.line,
                source=number_codes(source),
                target=target,
                reason=_join(unit.review_reasons.get(run, "") for run in runs),
            )
            for unit, result in zip(pending, results, strict=True)
            if not isinstance(result, SkippedUnit)
            for source, target, runs in zip(unit.unit.contents, result, unit.runs, strict=True)
        ),
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
        return format_for_model(self.core)

    @cached_property
    def word_codes(self) -> list[str]:
        """Placeholders and inline code, which are part of the sentence."""
        codes = placeholders.mark_codes(self.core, self.syntax)
        return [code.display for code in codes if isinstance(code, InlineCode) and code.is_word]

    @property
    def has_known_tags(self) -> bool:
        """True if its tags have numbers that a model can have learned."""
        codes = [part.display for part in self.core if isinstance(part, InlineCode)]
        return all(code in placeholders.INLINE_TAGS for code in codes if _NUMBERED_TAG.fullmatch(code))


def _translate_units(
    pending: "Sequence[_PendingUnit]", translate: TranslateTexts, transfer: TransferMarkup | None, copies_tags: bool
) -> None:
    """Translate the runs of all units. Equal ones are translated once."""
    todo = [(unit, run) for unit in pending for content in unit.runs for run in content if run.core]
    if transfer is None or copies_tags:
        direct = [(unit, run) for unit, run in todo if transfer is None or run.has_known_tags]
        texts = list(dict.fromkeys(run.text for _, run in direct))
        translations = _check_count(texts, translate(texts)) if texts else {}
        for unit, run in direct:
            result = translations[run.text]
            text = result if isinstance(result, str) else units.get_display_text(result.candidates[0])
            content = restore_codes((" ".join(text.split("\n")).strip(),), run.core, spaced=True)
            problem = "" if isinstance(result, str) else result.problem
            unit.record(run, TransferredContent((content,), is_certain=True, problem=problem))
    if transfer is not None:
        _transfer_runs([(unit, run) for unit, run in todo if run not in unit.translations], transfer)


def _transfer_runs(todo: "Sequence[tuple[_PendingUnit, TextRun]]", transfer: TransferMarkup) -> None:
    """Translate runs: a sample with all word codes, the rest with those that were copied, and what lost one without."""
    transferred: dict[InlineContent, TransferredContent] = {}

    def translate(part: "Sequence[tuple[_PendingUnit, TextRun]]", is_copied: Callable[[str], bool]) -> None:
        missing = dict.fromkeys(run for unit, run in part if run not in unit.translations)
        marked = {run: placeholders.mark_codes(run.core, run.syntax, is_copied) for run in missing}
        contents = [content for content in dict.fromkeys(marked.values()) if content not in transferred]
        transferred.update(_check_count(contents, transfer(contents)) if contents else {})
        for unit, run in todo:  # a run may occur again in the rest
            if run in marked and run not in unit.translations:
                unit.record(run, transferred[marked[run]])

    sample = [index for index, (_, run) in enumerate(todo) if run.word_codes][:COPY_SAMPLE_RUNS]
    translate(todo[: sample[-1] + 1] if sample else (), lambda code: True)
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for unit, run in (todo[index] for index in sample):
        for code in run.word_codes:
            outcomes[code].append(run in unit.translations)
    all_outcomes = list(chain.from_iterable(outcomes.values()))
    share = sum(all_outcomes) / max(1, len(all_outcomes))
    # Two average outcomes are added to those of each code, so that a single one does not decide.
    translate(todo, lambda code: sum(outcomes[code]) + 2 * share > (len(outcomes[code]) + 2) / 2)
    translate(todo, lambda code: False)


Source = TypeVar("Source")
Target = TypeVar("Target")


def _check_count(sources: Sequence[Source], translations: Sequence[Target]) -> dict[Source, Target]:
    """Return the translation of each source."""
    if len(translations) != len(sources):
        counts = f"{len(sources):,} translations, but there are {len(translations):,}"
        raise CorpusError(f"there must be {counts}: the model is at fault")
    return dict(zip(sources, translations, strict=True))


def _join(reasons: Iterable[str]) -> str:
    return "; ".join(filter(None, dict.fromkeys(reasons)))


class _PendingUnit:
    """A unit, the translations of its runs so far, and their problems."""

    def __init__(self, unit: units.TranslationUnit, scan: units.ScanResult) -> None:
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
        self.review_reasons: dict[TextRun, str] = {}

    def record(self, run: TextRun, transferred: TransferredContent) -> None:
        """Keep the first candidate without a problem, else the problem of the first."""
        for number, candidate in enumerate(transferred.candidates):
            content = placeholders.unmark_codes(restore_codes(candidate, run.core))
            text = "".join(part for part in content if isinstance(part, str))
            problem = "" if text.strip() else "its translation is empty"
            problem = problem or self.check_text(text) or placeholders.find_problem(run.core, content, self.syntax)
            if not problem:
                self.translations[run] = content
                guess = "" if number == 0 and transferred.is_certain else _UNCERTAIN
                if reasons := _join((guess, transferred.problem)):
                    self.review_reasons[run] = reasons
                return
            self.problems.setdefault(run, problem)

    def build_result(self) -> Sequence[InlineContent] | SkippedUnit:
        if self.skip_reason:
            return self._skip(0, self.skip_reason)
        results: list[InlineContent] = []
        for index, runs in enumerate(self.runs):
            parts: list[str | InlineCode] = []
            for run in runs:
                if run.core and run not in self.translations:
                    return self._skip(index, self.problems[run])
                parts += [*run.prefix, *self.translations.get(run, ()), *run.suffix]
            content = units.join_texts(parts)
            source, accelerator = self.sources[index]
            problem = placeholders.find_problem(source, content, self.syntax)
            if self.syntax.directives and problem:  # of a directive that a line break cuts
                return self._skip(index, problem)
            result = insert_accelerator(content, accelerator, self.syntax) if accelerator else content
            if result is None:
                return self._skip(index, f"its translation has no letter for {''.join(accelerator or ())}")
            results.append(result)
        return results

    def report(self, reason: str, index: int = 0) -> SkippedUnit:
        source = units.get_display_text(number_codes(self.unit.contents[index]))
        return SkippedUnit(line=self.unit.line, source=source, reason=reason)

    def _skip(self, index: int, reason: str) -> SkippedUnit:
        self.review_reasons.clear()
        return self.report(reason, index)


def _find_unit_problem(unit: units.TranslationUnit) -> str:
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
    """Give codes without a display text numbers that the text does not use: `<x1>`, `</x1>`, `<x2/>`."""
    text = "".join(part for part in content if isinstance(part, str))
    numbers = count(max((int(number) for number in _NUMBERED_TAG.findall(text)), default=0) + 1)
    pair_numbers: dict[str, int] = defaultdict(lambda: next(numbers))
    codes = [part for part in content if isinstance(part, InlineCode)]
    opened, closed = ({code.pair_id for code in codes if code.role == role} for role in ("open", "close"))
    paired = opened & closed
    parts: list[str | InlineCode] = []
    for part in content:
        if isinstance(part, InlineCode):
            role = part.role if part.pair_id in paired else "standalone"
            number = pair_numbers[part.pair_id] if role != "standalone" else next(numbers)
            part = part._replace(role=role, display=part.display or placeholders.INLINE_TAG[role].format(number))
        parts.append(part)
    return tuple(parts)


def _trim_run(run: TextRun) -> TextRun:
    """Move space and markup out of the core, except codes that are words."""
    trimmed = run
    while (spaceless := _trim_codes(_trim_space(trimmed))) != trimmed:
        trimmed = spaceless
    if placeholders.has_words("".join(part for part in trimmed.core if isinstance(part, str)), run.syntax):
        return trimmed
    return TextRun(prefix=(*trimmed.prefix, *trimmed.core, *trimmed.suffix))


def _trim_space(run: TextRun) -> TextRun:
    """Move the space before the first text to the prefix and that after the last to the suffix."""
    core = list(run.core)
    start = end = ""
    if core and isinstance(first := core[0], str):
        core[0] = first.lstrip()
        start = first[: len(first) - len(core[0])]
    if core and isinstance(last := core[-1], str):
        core[-1] = last.rstrip()
        end = last[len(core[-1]) :]
    prefix, suffix = (*run.prefix, start), (end, *run.suffix)
    return replace(run, prefix=units.join_texts(prefix), core=units.join_texts(core), suffix=units.join_texts(suffix))


def _trim_codes(run: TextRun) -> TextRun:
    """Move the first or last code out of the core, unless its other half is inside."""
    core = run.core
    if not core:
        return run
    first, last = core[0], core[-1]
    if _is_markup(first) or (len(core) > 1 and _is_pair(*core[:2])):
        count = 1 if _is_markup(first) else 2
        return replace(run, prefix=(*run.prefix, *core[:count]), core=core[count:])
    if _is_markup(last) or (len(core) > 1 and _is_pair(*core[-2:])):
        count = 1 if _is_markup(last) else 2
        return replace(run, core=core[:-count], suffix=(*core[-count:], *run.suffix))
    if _is_pair(first, last):  # around all the rest
        return replace(run, prefix=(*run.prefix, first), core=core[1:-1], suffix=(last, *run.suffix))
    return run


def _is_pair(first: str | InlineCode, last: str | InlineCode) -> bool:
    """True for an opening code and its closing one."""
    if not isinstance(first, InlineCode) or not isinstance(last, InlineCode):
        return False
    return (first.role, last.role, first.pair_id) == ("open", "close", last.pair_id)


def _is_markup(part: str | InlineCode) -> bool:
    return isinstance(part, InlineCode) and part.role == "standalone" and not part.is_word


def format_for_model(content: InlineContent) -> str:
    """Return a content with its codes as tags, and a space between a tag and the words that it encloses."""
    text = ""
    for part in content:
        if _is_tag(part, "close") and not text.endswith((" ", ">")):
            text += " "
        text += units.get_display_text((part,)) + (" " if _is_tag(part, "open") else "")
    return text


def restore_codes(content: InlineContent, template: InlineContent, *, spaced: bool = False) -> InlineContent:
    """Split texts into words and the other codes of `template`; one that occurs too often is repeated.

    A code is found inside a longer word only if it is inside one in `template` (`u8`s). With `spaced`, the space that
    `format_for_model` adds is removed.
    """
    codes: dict[str, list[InlineCode]] = {}
    inside_words: set[str] = set()
    present = set(content)
    sides = ("", *template, "")
    for before, part, after in zip(sides[:-2], template, sides[2:], strict=True):
        if isinstance(part, InlineCode) and part not in present:
            codes.setdefault(part.display, []).append(part)
            left, right = (side if isinstance(side, str) else "" for side in (before, after))
            if not is_separate_word(left + part.display + right, len(left), len(left + part.display)):
                inside_words.add(part.display)
    if not codes:
        return content
    parts: list[str | InlineCode] = []
    for piece in chain.from_iterable(_find_codes(part, codes, inside_words) for part in content):
        same = codes.get(piece, []) if isinstance(piece, str) else []
        code = same.pop(0) if len(same) > 1 else same[0] if same else None
        before = parts[-1] if parts else ""
        if spaced and isinstance(before, str) and _is_tag(code, "close"):
            parts[-1:] = [before.removesuffix(" ")]
        elif spaced and isinstance(piece, str) and not code and _is_tag(before, "open"):
            piece = piece.removeprefix(" ")
        parts.append(code or piece)
    return tuple(filter(None, parts))


def _is_tag(part: str | InlineCode | None, role: Role) -> bool:
    return isinstance(part, InlineCode) and part.role == role and _NUMBERED_TAG.fullmatch(part.display) is not None


def _find_codes(
    text: str | InlineCode, displays: Collection[str], inside_words: Collection[str]
) -> Iterator[str | InlineCode]:
    """Split a text at the displays of codes, of which there may be thousands; the longest first.

    Only those `inside_words` may be a part of a longer word.
    """
    if isinstance(text, InlineCode):
        yield text
        return
    lengths = sorted({len(display) for display in displays if display}, reverse=True)
    first_chars = re.compile("[" + re.escape("".join({display[:1] for display in displays})) + "]")
    start = position = 0
    while lengths and (match := first_chars.search(text, position)):
        at = match.start()
        ends = (at + n for n in lengths if text[at : at + n] in displays)
        end = next((end for end in ends if text[at:end] in inside_words or is_separate_word(text, at, end)), at)
        if display := text[at:end]:
            yield text[start:at]
            yield display
            start = at + len(display)
        position = max(start, at + 1)
    yield text[start:]


# ---- reports: all units, or source and target for a CAT tool ---------------------------------------------------------


def format_report(result: PretranslateResult, name: str, *, is_tsv: bool) -> bytes:
    """Return the state of every unit and the reason, with the number of all in JSON."""
    rows = []
    for content in _list_contents(result):
        state = "skipped" if not content.target else "needs-review" if content.reason else "translated"
        sides = (get_raw_text(side).strip() for side in (content.source, content.target))
        rows.append((content.line, state, content.reason, *sides))
    if is_tsv:
        lines = [_COLUMNS, *(map(escape_invisible, map(str, row)) for row in rows)]
        text = "".join("\t".join(line) + "\n" for line in lines)
    else:
        counts = {"filled": result.filled_count, "kept": result.existing_count, "skipped": len(result.skipped)}
        units = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        report = {"file": name, **counts, "to_review": len(result.for_review), "units": units}
        text = json.dumps(report, ensure_ascii=False, indent=1) + "\n"
    return text.encode("utf-8", "replace")


def format_bilingual(result: PretranslateResult, name: str, languages: LanguagePair) -> bytes:
    """Return an XLIFF file with each unit's source, its target as a draft, and the reason to review it as a note."""
    sides = {"source-language": languages.source or "und", "target-language": languages.target or "und"}
    attributes = {"original": name, "datatype": "plaintext", **sides}
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>\n<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">\n',
        f"<file{_format_attributes(attributes)}><body>\n",
    ]
    for number, text in enumerate(_list_contents(result), 1):
        parts.append(f'<trans-unit id="{number}" resname="line {text.line}">\n')
        parts.append(f"<source>{_format_content(text.source, text.source)}</source>\n")
        if text.target:
            state = {"state": "translated"} | (REVIEW_ATTRIBUTES_1 if text.reason else {})
            parts.append(f"<target{_format_attributes(state)}>{_format_content(text.target, text.source)}</target>\n")
        parts.append(f"<note>{_escape(text.reason)}</note>\n</trans-unit>\n" if text.reason else "</trans-unit>\n")
    return "".join([*parts, "</body></file>\n</xliff>\n"]).encode()


def _list_contents(result: PretranslateResult) -> list[FilledContent]:
    """Return the texts of all units by line, without a target those that were skipped."""
    skipped = (FilledContent(line=unit.line, source=(unit.source,), reason=unit.reason) for unit in result.skipped)
    return sorted([*result.filled, *skipped], key=lambda text: text.line)


def _format_attributes(values: dict[str, str]) -> str:
    return "".join(f" {name}={quoteattr(replace_invalid_chars(value))}" for name, value in values.items())


def _format_content(content: InlineContent, source: InlineContent) -> str:
    """Return a content with its codes as native codes, numbered as those of the source."""
    numbers = count(1)
    ids: dict[InlineCode, list[int]] = defaultdict(list)
    for part in source:
        if isinstance(part, InlineCode):
            ids[part].append(next(numbers))
    pairs = {pair_id: str(n) for n, pair_id in enumerate(dict.fromkeys(code.pair_id for code in ids), 1)}
    parts = list[str]()
    for part in content:
        if isinstance(part, str) or part.raw.isspace():
            parts.append(_escape(part if isinstance(part, str) else part.raw))
            continue
        tag = {"open": "bpt", "close": "ept"}.get(part.role, "ph")
        attributes = {"id": str(ids[part].pop(0))} | ({} if tag == "ph" else {"rid": pairs[part.pair_id]})
        parts.append(f"<{tag}{_format_attributes(attributes)}>{_escape(part.raw)}</{tag}>")
    return "".join(parts)


def _escape(text: str) -> str:
    return escape(replace_invalid_chars(text))
