"""Reports of a pre-translated file: JSON or TSV of all units, and XLIFF 1.2 of source and target for a CAT tool."""

import json
from collections import defaultdict
from itertools import count
from xml.sax.saxutils import escape, quoteattr

from attent.data.formats.units import InlineCode, InlineContent, get_raw_text
from attent.data.formats.xliff import REVIEW_ATTRIBUTES_1
from attent.data.formats.xml import replace_invalid_chars
from attent.data.pairs import LanguagePair
from attent.data.pretranslate import FilledContent, PretranslateResult
from attent.formatting import escape_invisible

_COLUMNS = ("line", "state", "reason", "source", "target")


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
