"""JSON lines: an object a line, with the keys "src" and "tgt", "source" and "target", or two languages, the latter
also one level down under "translation".

When no languages are asked for, the first object with exactly two decides for the whole file which is the source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from attent.data.pairs import Bad, Languages, Pair
from attent.data.readers import files, tags

ROLES = (("src", "tgt"), ("source", "target"))
NOT_JSON = "not a JSON object"
_MOST_KEYS = 100  # kept for an error: a hostile file has a new key in every line


def read(content: Iterable[bytes], name: str, asked: Languages) -> Iterator[Pair | Bad]:
    seen: dict[str, None] = {}
    paired = False
    for number, line in enumerate(files.lines(content, name), 1):
        if isinstance(line, Bad):
            yield line
            continue
        table = _table(line)
        keys = _keys(table, asked) if table else None
        if table and keys:
            asked = _settled(asked, keys)
            result = _texts(table, keys, line)
        else:
            seen.update(dict.fromkeys(list(table or ())[: _MOST_KEYS - len(seen)]))
            result = tags.missing(asked, table) if table else NOT_JSON if line.strip() else "empty line"
        if isinstance(result, str):
            yield Bad(result, name, number, line[: files.SHOWN])
        else:
            paired = True
            yield Pair(*result, name, number)
    if seen and not paired:
        raise tags.error(name, asked, seen)


def languages(content: Iterable[bytes], name: str) -> Languages:
    """Those of the first object that names two, if it stands near the beginning."""
    keys = next(filter(None, (_keys(table, tags.ANY) for table in _first(content, name))), None)
    return tags.ANY if keys is None or keys in ROLES else Languages(*keys)


def names_roles(content: Iterable[bytes], name: str) -> bool:
    """Does an object near the beginning say `src` and `tgt`, but not in which languages?"""
    return any(_keys(table, tags.ANY) in ROLES for table in _first(content, name))


def _first(content: Iterable[bytes], name: str) -> Iterator[dict[str, Any]]:
    head, _ = files.beginning(content)
    return filter(None, (_table(line) for line in files.lines([head], name) if isinstance(line, str)))


def _settled(asked: Languages, keys: tuple[str, str]) -> Languages:
    if keys in ROLES or (asked.source is not None and asked.target is not None):
        return asked
    return Languages(asked.source or keys[0], asked.target or keys[1])


def _table(line: str) -> dict[str, Any] | None:
    """The object that holds the two texts."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):  # a ValueError too when a number has thousands of digits
        return None
    if not isinstance(data, dict):
        return None
    inner = data.get("translation")
    return inner if isinstance(inner, dict) else data


def _keys(table: dict[str, Any], asked: Languages) -> tuple[str, str] | None:
    for roles in ROLES:
        if roles[0] in table and roles[1] in table:
            return roles
    return tags.sides(asked, tuple(table))


def _texts(table: dict[str, Any], keys: tuple[str, str], line: str) -> tuple[str, str] | str:
    """Both texts, or why they are none."""
    source, target = table[keys[0]], table[keys[1]]
    if not isinstance(source, str) or not isinstance(target, str):
        return "not a string"
    if "\\u" in line and not (_encodable(source) and _encodable(target)):
        return files.NOT_UTF8
    return source, target


def _encodable(text: str) -> bool:
    """False for half a surrogate pair, which JSON can write but no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
