"""YAML for pre-translation: string values are translated; keys, other values, anchors, comments and layout stay.

Aliases are not expanded. A translation that its style cannot hold is written in double quotes, and a folded block (`>`)
as a literal one.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from attent.data.formats import message_format, units
from attent.data.formats.json_strings import is_translatable
from attent.data.formats.plain_text import decode_plain_text
from attent.data.formats.units import Edit, ScanResult
from attent.data.pairs import CorpusError, LanguagePair

_MAX_DEPTH = 200
_STRING_TAGS = (None, "!", "tag:yaml.org,2002:str")
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")  # anchor and tag
_PLAIN = re.compile(r"[^\W\d_](?:[^:#,\[\]{}\x00-\x20\x7f-\xa0\u2028\u2029\ufeff]|:(?=\w)| (?=[^\s#]))*")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]")


def scan_fields(content: bytes, name: str, languages: LanguagePair, fields: Sequence[str] = ()) -> ScanResult:
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
                write = partial(_make_edit, offset, decoded[first:last], scalar.style)
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


def _make_edit(offset: int, raw: str, style: str | None, value: str) -> Edit:
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
