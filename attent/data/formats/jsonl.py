"""JSON Lines: an object per line with the keys "src" and "tgt", "source" and "target", or two language tags, the latter
also one level down under "translation". Without requested languages, the first object with exactly two tags decides
which is the source in the whole file.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attent.data import pairs
from attent.data.formats import streams
from attent.data.pairs import ANY_LANGUAGES, BadLine, LanguagePair, Pair, ReadOptions

ROLE_KEYS = (("src", "tgt"), ("source", "target"))
NOT_JSON = "not a JSON object"
_LONE_SURROGATE = re.compile("[\\ud800-\\udfff]")  # JSON can express it, but UTF-8 cannot
_MAX_REPORTED_KEYS = 100  # for the error: a hostile file has a new key in every line


def parse_object(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # a ValueError too when a number has thousands of digits
        return None
    return record if isinstance(record, dict) else None


def read_pairs(
    content: Iterable[bytes], name: str, requested: LanguagePair, _: ReadOptions = pairs.DEFAULT_READ_OPTIONS
) -> Iterator[Pair | BadLine]:
    seen_keys: dict[str, None] = {}
    has_pair = False
    for number, line in enumerate(streams.read_lines(content, name), 1):
        if isinstance(line, BadLine):
            yield line
            continue
        record = _parse_record(line)
        keys = _choose_keys(record, requested) if record else None
        if record and keys:
            if requested.is_open and keys not in ROLE_KEYS:
                requested = LanguagePair(requested.source or keys[0], requested.target or keys[1])
            result = _extract_texts(record, keys, line)
        else:
            seen_keys.update(dict.fromkeys(list(record or ())[: _MAX_REPORTED_KEYS - len(seen_keys)]))
            result = requested.describe_missing(record) if record else NOT_JSON if line.strip() else "empty line"
        if isinstance(result, str):
            yield BadLine(result, name, number, line[: streams.EXCERPT_CHARS])
        else:
            has_pair = True
            yield Pair(*result, name, number)
    if seen_keys and not has_pair:
        raise requested.make_mismatch_error(name, seen_keys)


def read_languages(content: Iterable[bytes], name: str) -> LanguagePair:
    """Return the tags of the first object with two of them, if it is near the beginning."""
    keys = next(filter(None, (_choose_keys(record, ANY_LANGUAGES) for record in _read_head(content, name))), None)
    return ANY_LANGUAGES if keys is None or keys in ROLE_KEYS else LanguagePair(*keys)


def is_ambiguous(read_blocks: Callable[[], Iterable[bytes]], name: str, _: Sequence[LanguagePair]) -> bool:
    """True if an object near the beginning has roles as keys, and not languages."""
    return any(_choose_keys(record, ANY_LANGUAGES) in ROLE_KEYS for record in _read_head(read_blocks(), name))


def _read_head(content: Iterable[bytes], name: str) -> Iterator[dict[str, Any]]:
    head, _ = streams.peek_head(content)
    return filter(None, (_parse_record(line) for line in streams.read_lines([head], name) if isinstance(line, str)))


def _parse_record(line: str) -> dict[str, Any] | None:
    record = parse_object(line)
    inner = record.get("translation") if record else None
    return inner if isinstance(inner, dict) else record


def _choose_keys(record: dict[str, Any], requested: LanguagePair) -> tuple[str, str] | None:
    roles = next((roles for roles in ROLE_KEYS if roles[0] in record and roles[1] in record), None)
    return roles or pairs.choose_sides(requested, tuple(record))


def _extract_texts(record: dict[str, Any], keys: tuple[str, str], line: str) -> tuple[str, str] | str:
    source, target = record[keys[0]], record[keys[1]]
    if not isinstance(source, str) or not isinstance(target, str):
        return "not a string"
    is_invalid = "\\u" in line and _LONE_SURROGATE.search(source + target)
    return streams.NOT_UTF8 if is_invalid else (source, target)
