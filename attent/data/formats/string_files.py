r"""Strings of programs for pre-translation (JSON, YAML, .properties, .strings, Android's XML): values are translated.

Keys, comments and layout stay. Of JSON and YAML without fields, all values are translated but identifiers and paths,
the metadata of ARB files (Flutter) and that of `messages.json` (browser extensions). Aliases of YAML are not expanded;
a translation that its style cannot hold is written in double quotes, and a folded block (`>`) as a literal one.
Java's properties in ASCII get `\uXXXX` escapes, which every version reads. Values may be ICU messages; a property with
`{0}` is a pattern of MessageFormat, in which an apostrophe is doubled. Of Android's resources, strings with
`translatable="false"` and references (`@string/x`) stay, and plurals get the items that the target language needs in
addition.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from attent.data.formats import message_format, placeholders, units, xml
from attent.data.formats.units import Edit, FileText, InlineContent, ScanResult, decode_plain_text
from attent.data.formats.xml import XmlElement
from attent.data.pairs import CorpusError, LanguagePair

_TOKEN = re.compile(rb'(?P<string>"(?:[^"\\]++|\\.)*+")(?P<key>\s*:)?|[][{}\n]', re.DOTALL)
_UNICODE_ESCAPE = re.compile(rb"\\u00[8-f]|\\u0[1-9a-f]|\\u[1-9a-f]", re.IGNORECASE)
_IDENTIFIER = re.compile(r"\S*[^\W_][_@#=.\\]\S*\w|[#@./$_]\S*|[a-z]+[A-Z]\w*|[a-z\d]+(?:[/:][a-z\d.+-]+)+", re.ASCII)
_EXTENSION_CODE = re.compile(r"\$\w+\$|\$\d")
_MAX_IDENTIFIER = 200
_CHARACTER = rb"[^\\\r\n]|\\(?:\r\n|.|\Z)"
_PROPERTY = re.compile(
    rb"[ \t\f]*+(?:[#!][^\r\n]*+|(?:(?![=: \t\f])(?:%b))*+[ \t\f]*+[=:]?[ \t\f]*+(?P<value>(?:%b)*+))(?:\r\n?|\n|\Z)"
    % (_CHARACTER, _CHARACTER),
    re.DOTALL,
)
_CONTINUATION = re.compile(r"\\(?:\r?\n|\r)[ \t\f]*")
_QUOTED = rb'"(?:[^"\\]|\\.)*+"'
_STRING = re.compile(
    rb"(?:\s++|/\*(?:[^*]|\*(?!/))*+\*/|//[^\n]*+)*+"
    rb"(?:(?:%b|[\w.$:/-]++)\s*+(?:=\s*+(?P<value>%b)\s*+)?;|\Z)" % (_QUOTED, _QUOTED),
    re.DOTALL,
)
_ESCAPE = re.compile(r"((?:\\[Uu][0-9A-Fa-f]{4})+)|\\(.|\Z)", re.DOTALL)
_UNESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_ESCAPED = {char: f"\\{letter}" for letter, char in _UNESCAPED.items()} | {"\\": "\\\\"}
_PATTERN = re.compile(r"\{\s*\d+\s*[,}]")
_MAX_DEPTH = 200
_STRING_TAGS = (None, "!", "tag:yaml.org,2002:str")
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")  # anchor and tag
_PLAIN = re.compile(r"[^\W\d_](?:[^:#,\[\]{}\x00-\x20\x7f-\xa0\u2028\u2029\ufeff]|:(?=\w)| (?=[^\s#]))*")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_ANDROID_TAGS = "a annotation b big font i li marquee p small span strike strong sub sup tt u ul"
ANDROID_SCHEMA = xml.XmlSchema(
    root="resources",
    units=frozenset({"string", "string-array", "plurals"}),
    spans=frozenset({"", *_ANDROID_TAGS.split()}),
    standalone=frozenset({"br"}),
    is_protected=lambda element: not element.tag,  # xliff:g
    is_break=lambda element: element.tag in ("br", "li", "p", "ul"),
)
_ANDROID_ESCAPE = re.compile(r"((?:\\u[0-9A-Fa-f]{4})+)|\\(.)|(?P<attribute>=\"[^\"<>]*\")|\"|\s+", re.DOTALL)
_ANDROID_UNESCAPED = {"n": "\n", "t": "\t"}
_ANDROID_ESCAPED = {"\n": "\\n", "\t": "\\t", " ": "\\u0020"}


def scan_json_fields(content: bytes, name: str, languages: LanguagePair, fields: Sequence[str] = ()) -> ScanResult:
    """Return the values of the keys named by `fields` and everything inside, or of all keys."""
    text = decode_plain_text(content, name)
    result = ScanResult(text=text, check_text=text.check_encodable)
    document = _parse_json(text, name)
    code = None
    if not fields and isinstance(document, dict):
        entries = list(document.values())
        if entries and all(isinstance(entry, dict) and "message" in entry for entry in entries):
            fields, code = ("message",), _EXTENSION_CODE
    ensure_ascii = text.utf8.isascii() and _UNICODE_ESCAPE.search(text.utf8) is not None
    line = 1
    selected, current = [not fields], not fields  # of the values of each container that is open; of the next value
    for match in _TOKEN.finditer(text.utf8):
        line += match[0].count(b"\n")
        string = (match["string"] or b"").decode("utf-8", "surrogateescape")
        if match["key"]:
            key = json.loads(string)
            current = key in fields or (selected[-1] and not key.startswith("@"))
        elif match[0] in (b"{", b"["):
            selected.append(current)
        elif match[0] in (b"}", b"]"):
            current = selected.pop()
        elif current and string:
            value = json.loads(string)
            write = partial(_make_json_edit, match.span("string"), ensure_ascii)
            if is_translatable(value, is_named=bool(fields)):
                message_format.add_unit(result, line, value, languages, write, code=code)
    return result


def _parse_json(text: FileText, name: str) -> object:
    try:
        return json.loads(text.utf8.decode("utf-8", "surrogateescape"))
    except json.JSONDecodeError as error:
        raise CorpusError(f"{name} is not JSON at line {error.lineno:,} ({error.msg}): correct it there") from None
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        raise CorpusError(f"{name} is nested too deeply or has a number that is too long: check the file") from None


def is_translatable(text: str, *, is_named: bool) -> bool:
    """True for words. Identifiers and paths count only where a field `is_named`."""
    is_identifier = not is_named and len(text) <= _MAX_IDENTIFIER and _IDENTIFIER.fullmatch(text) is not None
    return placeholders.has_words(text) and not is_identifier


def _make_json_edit(span: tuple[int, int], ensure_ascii: bool, text: str) -> Edit:
    return Edit(*span, json.dumps(text, ensure_ascii=ensure_ascii))


def scan_properties(content: bytes, name: str, languages: LanguagePair) -> ScanResult:
    try:
        content.decode()
        encoding = "utf-8"
    except UnicodeDecodeError:
        encoding = "iso-8859-1"
    text = units.decode_file(content, name, encoding)
    last = "\x7f" if content.isascii() else "\xff" if text.encoding == "iso8859-1" else "\U0010ffff"
    return _scan(text, _PROPERTY, languages, last)


def scan_strings(content: bytes, name: str, languages: LanguagePair) -> ScanResult:
    return _scan(decode_plain_text(content, name), _STRING, languages, "")


def _scan(text: FileText, pattern: re.Pattern[bytes], languages: LanguagePair, last: str) -> ScanResult:
    """Return the values of all entries; `last` is the last character that needs no escape, or "" for quotes."""
    result = ScanResult(text=text, check_text=(lambda _: "") if last else text.check_encodable)
    offset, line = 0, 1
    while offset < len(text.utf8):
        entry = pattern.match(text.utf8, offset)
        if entry is None:
            line += text.utf8[offset:].removesuffix(text.utf8[offset:].lstrip()).count(b"\n")
            raise CorpusError(f'{text.name} has no `"key" = "value";` at line {line:,}: correct it there')
        lines = max(entry[0].count(b"\n"), entry[0].count(b"\r"))
        raw = (entry["value"] or b"").decode("utf-8", "surrogateescape")
        value = _ESCAPE.sub(_unescape, _CONTINUATION.sub("", raw) if last else raw[1:-1])
        if is_translatable(value, is_named=False):
            is_pattern = bool(last) and _PATTERN.search(value) is not None
            write = partial(_make_edit, entry.span("value"), last)
            message_format.add_unit(result, line + lines * (not last), value, languages, write, doubled=is_pattern)
        line, offset = line + lines, entry.end()
    return result


def _unescape(escape: re.Match[str]) -> str:
    return decode_unicode_escapes(escape[1]) if escape[1] else _UNESCAPED.get(escape[2], escape[2])


def decode_unicode_escapes(escapes: str) -> str:
    """Return the characters of `\\uXXXX\\uXXXX`, in which two can be one character."""
    return bytes.fromhex(re.sub(r"\\[Uu]", "", escapes)).decode("utf-16-be", "surrogatepass")


def _make_edit(span: tuple[int, int], last: str, value: str) -> Edit:
    escaped = "".join(_ESCAPED.get(char, char) for char in value)
    if not last:
        return Edit(*span, '"{}"'.format(escaped.replace('"', '\\"')))
    escaped = re.sub(r"\A ", r"\\ ", escaped)
    hex_codes = partial(re.sub, "(....)", r"\\u\1")
    return Edit(*span, re.sub(f"[^\0-{last}]", lambda char: hex_codes(char[0].encode("utf-16-be").hex()), escaped))


def scan_yaml_fields(content: bytes, name: str, languages: LanguagePair, fields: Sequence[str] = ()) -> ScanResult:
    """Return the values of the keys named by `fields` and everything inside, or of all keys."""
    import yaml

    text = decode_plain_text(content, name)
    result = ScanResult(text=text, check_text=text.check_encodable)
    decoded = text.utf8.decode("utf-8", "surrogateescape")
    index = offset = 0  # in characters and in bytes
    try:
        events = iter(yaml.parse(decoded, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        for scalar in (each for event in events for each in _list_scalars(event, events, fields, not fields, name)):
            # A string, not a number, date, boolean or null, and without a tag of another type
            is_string = bool(scalar.style) or scalar.tag is not None or not _has_other_type(scalar.value)
            is_string = is_string and scalar.tag in _STRING_TAGS
            if is_string and is_translatable(scalar.value, is_named=bool(fields)):
                first, last = scalar.start_mark.index, scalar.end_mark.index
                offset, index = offset + len(units.encode_text(decoded[index:first])), first
                write = partial(_make_yaml_edit, offset, decoded[first:last], scalar.style)
                message_format.add_unit(result, scalar.start_mark.line + 1, scalar.value, languages, write)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f" at line {mark.line + 1:,}" if mark else ""
        problem = getattr(error, "problem", None) or "characters that are not allowed"
        raise CorpusError(f"{name} is not YAML{position} ({problem}): correct it there") from None
    except UnicodeEncodeError:
        raise CorpusError(f"{name} is not UTF-8: save it as UTF-8") from None
    return result


def _list_scalars(
    event: Any, events: Iterator[Any], fields: Sequence[str], is_selected: bool, name: str, depth: int = 0
) -> Iterator[Any]:
    """Yield the scalars in the node that begins with an event: all if it `is_selected`, else those of the fields."""
    if depth > _MAX_DEPTH:
        raise CorpusError(f"{name} has over {_MAX_DEPTH} collections inside each other: check the file")
    kind, is_key, key = type(event).__name__, False, None
    if kind == "ScalarEvent" and is_selected:
        yield event
    while kind in ("MappingStartEvent", "SequenceStartEvent"):
        child = next(events)
        if type(child).__name__.endswith("EndEvent"):
            return
        is_key = kind == "MappingStartEvent" and not is_key
        key = getattr(child, "value", None) if is_key else key
        scalars = _list_scalars(child, events, fields, is_selected or (not is_key and key in fields), name, depth + 1)
        yield from (scalar for scalar in scalars if not is_key)


def _has_other_type(text: str) -> bool:
    """True if a plain scalar is read as a number, date, boolean or null."""
    from yaml import SafeLoader

    resolvers = SafeLoader.yaml_implicit_resolvers
    patterns = [*resolvers.get(text[:1], ()), *resolvers.get(None, ())]
    return any(pattern.match(text) for _, pattern in patterns)


def _make_yaml_edit(offset: int, raw: str, style: str | None, value: str) -> Edit:
    before = _PROPERTIES.match(raw)
    assert before is not None, "it may be empty"
    old = raw[before.end() :]
    edit = partial(Edit, offset + len(units.encode_text(before[0])), offset + len(units.encode_text(raw)))
    is_printable = not _UNPRINTABLE.search(value)
    if style in ("|", ">"):
        return edit(_format_block(old, value))
    if style == "'" and is_printable:
        return edit("'{}'".format(value.replace("'", "''")))
    if not style and _PLAIN.fullmatch(value) and not _has_other_type(value):
        return edit(value)
    return edit(_quote(value))


def _format_block(old: str, value: str) -> str:
    """Return a literal block with the header, the indent and the line breaks at the end of another block."""
    header, _, body = old.partition("\n")
    tail = old[len(old.rstrip("\r\n ")) :]
    first = next((line for line in body.split("\n") if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip(" "))]
    lines = value.rstrip("\n").split("\n")
    if not indent or any(map(str.isdigit, header)) or value[:1] in (" ", "\n") or any(map(_UNPRINTABLE.search, lines)):
        return _quote(value) + tail
    newline = "\r\n" if header.endswith("\r") else "\n"
    body = newline.join(indent + line if line.strip() else "" for line in lines)
    return f"{header.replace('>', '|', 1).rstrip()}{newline}{body}{tail}"


def _quote(value: str) -> str:
    quoted = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda char: f"\\u{ord(char[0]):04x}", quoted)


def scan_android(content: bytes, name: str, languages: LanguagePair) -> ScanResult:
    text = xml.decode_xml(content, name, ANDROID_SCHEMA)
    result = xml.make_scan_result(text)
    for element in xml.scan_elements(text, ANDROID_SCHEMA):
        if element.attributes.get("translatable") == "false":
            continue
        if element.tag == "plurals":
            _add_android_unit(result, element.find_children("item"), languages, is_plural=True)
            continue
        for item in [element] if element.tag == "string" else element.find_children("item"):
            _add_android_unit(result, [item], languages)
    return result


def _add_android_unit(
    result: ScanResult, items: Sequence[XmlElement], languages: LanguagePair, *, is_plural: bool = False
) -> None:
    """Add the unit of a string, or of all items of a plural."""
    text = result.text
    parsed = [xml.parse_content(text, item, ANDROID_SCHEMA) for item in items]
    contents = [_unescape_android(content) for content, _ in parsed]
    if not any(map(_is_android_text, contents)):
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
        inner = [xml.serialize_content(text, items[0], _escape_android(target)) for target in targets]
        edits = [xml.replace_content(text, *pair, {}) for pair in zip(items, inner, strict=False)]
        before, end = xml.get_indent(text, items[0]), items[-1].end
        new_items = zip(added, inner[len(items) :], strict=True)
        return [*edits, *(Edit(end, end, f'{before}<item quantity="{key}">{new}</item>') for key, new in new_items)]

    result.add_unit(items[0].line, contents, make_edits)


def _is_android_text(content: InlineContent) -> bool:
    text = "".join(part for part in content if isinstance(part, str))
    return placeholders.has_words(text) and not text.startswith(("@", "?"))


def _unescape_android(content: InlineContent) -> InlineContent:
    """Return a content as Android shows it: without quotes, and spaces outside of them as one."""
    is_quoted = False

    def replace(escape: re.Match[str]) -> str:
        nonlocal is_quoted
        if escape[1]:
            return decode_unicode_escapes(escape[1])
        if escape[2]:
            return _ANDROID_UNESCAPED.get(escape[2], escape[2])
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
        _ANDROID_ESCAPE.sub(replace, part)
        if isinstance(part, str)
        else part._replace(display=re.sub("<[^<>]*>", "", part.raw), is_word=True)
        if part.role == "standalone" and not part.is_break
        else part
        for part in parts
    )


def _escape_android(content: InlineContent) -> InlineContent:
    """Escape spaces that would be lost, and the signs that Android reads otherwise."""
    parts = list(content)
    for index, part in enumerate(content):
        if isinstance(part, str):
            at_start, at_end = r"|\A[@? ]" * (index == 0), r"| \Z" * (index == len(content) - 1)
            signs = rf"[\\'\"\n\t]|(?<= ) {at_start}{at_end}"
            parts[index] = re.sub(signs, lambda match: _ANDROID_ESCAPED.get(match[0], f"\\{match[0]}"), part)
    return tuple(parts)
