"""Hooks of Schemathesis for `make fuzz-server`: most requests get real languages and models, to reach the models."""

from __future__ import annotations

import zlib
from typing import Any

import schemathesis  # from an environment of its own

REAL_VALUES = {
    "source": "en",
    "target": "de",
    "source_lang": "EN",
    "target_lang": "DE",
    "langpair": "en|de",
    "model": "numbers",
    "entries": "one\teins",
    "tag_handling": "",
}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    return insert_real_values(body)


@schemathesis.hook
def map_query(context: Any, query: Any) -> Any:
    return insert_real_values(query)


def insert_real_values(fields: Any) -> Any:
    """Replace the values of two thirds of the requests. Wrong types and lengths stay as they are."""
    if not isinstance(fields, dict) or zlib.crc32(repr(fields).encode(errors="replace")) % 3 == 0:
        return fields
    return fields | {
        name: value
        for name, value in REAL_VALUES.items()
        if isinstance(fields.get(name), str) and 0 < len(fields[name]) <= 40
    }
