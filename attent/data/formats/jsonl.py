"""JSON lines: an object a line, with the keys "src" and "tgt", "source" and "target", or two languages, the latter
also one level down under "translation".

When no languages are asked for, the first object with exactly two decides for the whole file which is the source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from attent.data.formats import language_tags, streams
from attent.data.pairs import BadLine, LanguagePair, Pair

ROLE_KEYS = (("src", "tgt"), ("source", "target"))
NOT_JSON = "not a JSON object"
_MAX_REPORTED_KEYS = 100  # kept for an error: a hostile file has a new key in every line


def read_pairs(content: Iterable[bytes], name: str, requested: LanguagePair) -> Iterator[Pair | BadLine]:
    seen: dict[str, None] = {}
    paired = False
    for number, line in enumerate(streams.read_lines(content, name), 1):
        if isinstance(line, BadLine):
            yield line
            continue
        table = _parse_object(line)
        keys = _choose_keys(table, requested) if table else None
        if table and keys:
            requested = _resolve_languages(requested, keys)
            result = _extract_texts(table, keys, line)
        else:
            seen.update(dict.fromkeys(list(table or ())[: _MAX_REPORTED_KEYS - len(seen)]))
            result = (
                language_tags.describe_missing(requested, table)
                if table
                else NOT_JSON
                if line.strip()
                else "empty line"
            )
        if isinstance(result, str):
            yield BadLine(result, name, number, line[: streams.EXCERPT_CHARS])
        else:
            paired = True
            yield Pair(*result, name, number)
    if seen and not paired:
        raise language_tags.make_mismatch_error(name, requested, seen)


def read_languages(content: Iterable[bytes], name: str) -> LanguagePair:
    """Those of the first object that names two, if it stands near the beginning."""
    keys = next(
        filter(
            None, (_choose_keys(table, language_tags.ANY_LANGUAGES) for table in _read_first_objects(content, name))
        ),
        None,
    )
    return language_tags.ANY_LANGUAGES if keys is None or keys in ROLE_KEYS else LanguagePair(*keys)


def has_role_keys(content: Iterable[bytes], name: str) -> bool:
    """Does an object near the beginning say `src` and `tgt`, but not in which languages?"""
    return any(
        _choose_keys(table, language_tags.ANY_LANGUAGES) in ROLE_KEYS for table in _read_first_objects(content, name)
    )


def _read_first_objects(content: Iterable[bytes], name: str) -> Iterator[dict[str, Any]]:
    head, _ = streams.peek_head(content)
    return filter(None, (_parse_object(line) for line in streams.read_lines([head], name) if isinstance(line, str)))


def _resolve_languages(requested: LanguagePair, keys: tuple[str, str]) -> LanguagePair:
    if keys in ROLE_KEYS or (requested.source is not None and requested.target is not None):
        return requested
    return LanguagePair(requested.source or keys[0], requested.target or keys[1])


def _parse_object(line: str) -> dict[str, Any] | None:
    """The object that holds the two texts."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):  # a ValueError too when a number has thousands of digits
        return None
    if not isinstance(data, dict):
        return None
    inner = data.get("translation")
    return inner if isinstance(inner, dict) else data


def _choose_keys(record: dict[str, Any], requested: LanguagePair) -> tuple[str, str] | None:
    for roles in ROLE_KEYS:
        if roles[0] in record and roles[1] in record:
            return roles
    return language_tags.choose_sides(requested, tuple(record))


def _extract_texts(record: dict[str, Any], keys: tuple[str, str], line: str) -> tuple[str, str] | str:
    """Both texts, or why they are none."""
    source, target = record[keys[0]], record[keys[1]]
    if not isinstance(source, str) or not isinstance(target, str):
        return "not a string"
    if "\\u" in line and not (_is_encodable(source) and _is_encodable(target)):
        return streams.NOT_UTF8
    return source, target


def _is_encodable(text: str) -> bool:
    """False for half a surrogate pair, which JSON can write but no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
