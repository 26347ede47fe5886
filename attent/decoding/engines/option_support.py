"""Engines list the options that they support; any other goes to the torch engine, so that none is ever ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def are_supported(values: Sequence[DataclassInstance], supported: frozenset[str]) -> bool:
    """True if `find_unsupported_field` finds nothing in any of `values`, which are of one type; fast for thousands."""
    if not values:
        return True
    others = list_unsupported_fields(type(values[0]), supported)
    names = [name for name, default in others if not default]
    if len(names) != len(others) or len(names) < 2:  # attrgetter returns a tuple for two names or more
        return all(find_unsupported_field(value, supported) is None for value in values)
    get_fields = attrgetter(*names)
    return not any(any(get_fields(value)) for value in values)


def find_unsupported_field(value: DataclassInstance, supported: frozenset[str]) -> str | None:
    """Return the first field that differs from its default and is not in `supported`."""
    for name, default in list_unsupported_fields(type(value), supported):
        if (getattr(value, name) or None) != (default or None):  # empty is empty: () and []
            return name
    return None


@cache
def list_unsupported_fields(kind: type[DataclassInstance], supported: frozenset[str]) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in fields(kind) if field.name not in supported]
