"""Android's string resources (strings.xml) for pre-translation: strings, arrays and plurals; names and markup stay.

Strings with `translatable="false"` and references (`@string/x`) stay. Plurals get the items that the target language
needs in addition.
"""

import re
from collections.abc import Sequence

from attent.data.formats import message_format, placeholders, units, xml
from attent.data.formats.string_files import decode_unicode_escapes
from attent.data.formats.units import Edit, InlineContent, ScanResult, TranslationUnit
from attent.data.formats.xml import XmlElement
from attent.data.pairs import LanguagePair

_TAGS = "a annotation b big font i li marquee p small span strike strong sub sup tt u ul"
SCHEMA = xml.XmlSchema(
    root="resources",
    units=frozenset({"string", "string-array", "plurals"}),
    spans=frozenset({"", *_TAGS.split()}),
    standalone=frozenset({"br"}),
    is_protected=lambda element: not element.tag,  # xliff:g
    is_break=lambda element: element.tag in ("br", "li", "p", "ul"),
)
_ESCAPE = re.compile(r"((?:\\u[0-9A-Fa-f]{4})+)|\\(.)|(?P<attribute>=\"[^\"<>]*\")|\"|\s+", re.DOTALL)
_UNESCAPED = {"n": "\n", "t": "\t"}
_ESCAPED = {"\n": "\\n", "\t": "\\t", " ": "\\u0020"}


def scan_units(content: bytes, name: str, languages: LanguagePair) -> ScanResult:
    text = xml.decode_xml(content, name, SCHEMA)
    result = xml.make_scan_result(text)
    for element in xml.scan_elements(text, SCHEMA):
        if element.attributes.get("translatable") == "false":
            continue
        if element.tag == "plurals":
            _add_unit(result, element.find_children("item"), languages, is_plural=True)
            continue
        for item in [element] if element.tag == "string" else element.find_children("item"):
            _add_unit(result, [item], languages)
    return result


def _add_unit(
    result: ScanResult, items: Sequence[XmlElement], languages: LanguagePair, *, is_plural: bool = False
) -> None:
    """Add the unit of a string, or of all items of a plural."""
    text = result.text
    parsed = [xml.parse_content(text, item, SCHEMA) for item in items]
    contents = [_unescape(content) for content, _ in parsed]
    if not any(map(is_translatable, contents)):
        return
    if reason := next((reason for _, reason in parsed if reason), ""):
        result.skip(items[0].line, xml.get_inner_xml(text, items[0]), reason)
        return
    added: dict[str, str] = {}
    quantities = [item.attributes.get("quantity", "") for item in items]
    if is_plural and "other" in quantities:
        shown = dict(zip(quantities, map(placeholders.list_placeholders, contents), strict=True))
        added = message_format.choose_plural_sources(shown, languages)
        contents += [contents[quantities.index(source)] for source in added.values()]

    def make_edits(targets: Sequence[InlineContent]) -> list[Edit]:
        if units.is_unchanged(contents, targets):
            return []
        inner = [xml.serialize_content(text, items[0], _escape(target)) for target in targets]
        edits = [xml.replace_content(text, *pair, {}) for pair in zip(items, inner, strict=False)]
        before, end = xml.get_indent(text, items[0]), items[-1].end
        new_items = zip(added, inner[len(items) :], strict=True)
        return [*edits, *(Edit(end, end, f'{before}<item quantity="{key}">{new}</item>') for key, new in new_items)]

    result.units.append(TranslationUnit(line=items[0].line, contents=tuple(contents), make_edits=make_edits))


def is_translatable(content: InlineContent) -> bool:
    text = "".join(part for part in content if isinstance(part, str))
    return placeholders.has_words(text) and not text.startswith(("@", "?"))


def _unescape(content: InlineContent) -> InlineContent:
    """Return a content as Android shows it: without quotes, and spaces outside of them as one."""
    is_quoted = False

    def replace(escape: re.Match[str]) -> str:
        nonlocal is_quoted
        if escape[1]:
            return decode_unicode_escapes(escape[1])
        if escape[2]:
            return _UNESCAPED.get(escape[2], escape[2])
        if escape[0] == '"':
            is_quoted = not is_quoted
            return ""
        return escape[0] if is_quoted or escape["attribute"] else " "

    parts = list(content)
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].lstrip()
    if parts and isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    return tuple(
        _ESCAPE.sub(replace, part)
        if isinstance(part, str)
        else part._replace(display=re.sub("<[^<>]*>", "", part.raw), is_word=True)
        if part.role == "standalone" and not part.is_break
        else part
        for part in parts
    )


def _escape(content: InlineContent) -> InlineContent:
    """Escape spaces that would be lost, and the signs that Android reads otherwise."""
    parts = list(content)
    for index, part in enumerate(content):
        if isinstance(part, str):
            at_start, at_end = r"|\A[@? ]" * (index == 0), r"| \Z" * (index == len(content) - 1)
            signs = rf"[\\'\"\n\t]|(?<= ) {at_start}{at_end}"
            parts[index] = re.sub(signs, lambda match: _ESCAPED.get(match[0], f"\\{match[0]}"), part)
    return tuple(parts)
