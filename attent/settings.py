"""Settings: frozen dataclasses to and from plain data, JSON and TOML, with `--set a.b=c` overrides.

The annotations of a dataclass are the schema: each value is checked against them, and each error names the file, the
key, the expected and the actual value. Constraints between values are checked by the dataclasses (`__post_init__`).

Supported annotations: int, float, bool, str, Literal, tuple[A, B], tuple[A, ...], X | None, dataclasses, and unions of
them. In a union of dataclasses each has a `kind: ClassVar[str]`, and the data has a `kind` key. A missing key has its
default; a partial table keeps the rest of its field's default. TOML has no null: None is omitted where it is the
default, and the word "none" elsewhere.
"""

from __future__ import annotations

import json
import math
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from attent.storage.atomic import write_atomic
from attent.storage.errors import AttentError
from attent.storage.manifest import reject_duplicate_keys

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

MAX_BYTES = 16 * 2**20  # of a settings file; real ones have a few kilobytes
MAX_DEPTH = 64  # of nested tables and lists in a file; real ones have about five
NONE_WORD = "none"


class SettingsError(AttentError):
    """An invalid setting or settings file."""


# ---- plain data ------------------------------------------------------------------------------------------------------


def to_dict(config: DataclassInstance) -> dict[str, Any]:
    """Return plain data (dicts, lists, numbers, strings, None) from which `from_dict` builds an equal `config`."""
    hints = _get_hints(type(config))
    return {name: _to_plain(getattr(config, name), hints[name]) for name in _get_init_fields(type(config))}


def from_dict(cls: type[C], data: Mapping[str, Any], where: str = "config.json") -> C:
    """Build a `cls` from plain data and check each value; `where` is the file that errors name."""
    return _build_dataclass(cls, data, _KeyPath(where=where, root=cls), None)


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; `where` is the file that errors name."""
    return _parse_object(content, decode_strict_json, "JSON", where)


def decode_strict_json(text: str, parse_int: Callable[[str], int] = int) -> Any:
    """Decode JSON; a duplicate key or a number that is not finite raises a ValueError."""
    return json.loads(
        text,
        object_pairs_hook=reject_duplicate_keys,
        parse_constant=_reject_constant,
        parse_float=_parse_finite_float,
        parse_int=parse_int,
    )


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object: at most 16 MiB of UTF-8, no duplicate keys, no NaN."""
    return parse_json(_read_bytes(Path(path)), str(path))


def read_toml_dict(path: str | Path) -> dict[str, Any]:
    """Read a TOML file as plain data, without checking it against a dataclass."""
    return parse_toml(_read_bytes(Path(path)), str(path))


def parse_toml(content: bytes, where: str) -> dict[str, Any]:
    """Parse TOML as plain data; `where` is the file that errors name."""
    return _parse_object(content, tomllib.loads, "TOML", where)


def apply_override(cls: type[DataclassInstance], data: dict[str, Any], text: str) -> None:
    """Apply an override such as `train.lr=3e-4` to the plain data of a `cls`."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SettingsError(f"--set: must have the form key=value, but is {_format_value(text)}; write e.g. a.b=3")
    _set_key(cls, data, keys, value.strip(), _KeyPath(where="--set", root=cls), None)


def to_toml(config: DataclassInstance) -> str:
    """Return TOML that reads back as an equal `config`."""
    text = "\n".join(_iter_toml_lines(_to_toml_data(config, None), ())).lstrip("\n") + "\n"
    if from_dict(type(config), tomllib.loads(text), where="TOML") != config:
        raise SettingsError(f"TOML: cannot represent every value of {_format_value(config)}; save it as JSON")
    return text


def write_json(data: Mapping[str, Any], path: str | Path) -> None:
    write_atomic(Path(path), to_json(data))


def to_json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False).encode()


# ---- errors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _KeyPath:
    where: str
    root: type
    path: str = ""
    advice: str = "change that value"

    def key(self, name: str, default: object = MISSING) -> _KeyPath:
        path = f"{self.path}.{name}" if self.path else name
        if default is MISSING or _is_dataclass(default):
            return replace(self, path=path, advice="change that value")
        return replace(self, path=path, advice=f"leave it out for the default, {_format_value(default)}")

    def item(self, index: int) -> _KeyPath:
        return replace(self, path=f"{self.path}[{index}]", advice="change that value")

    def error(self, message: str) -> SettingsError:
        return SettingsError(f"{self.where}: {message}")

    def invalid_value(self, expected: str, value: object) -> SettingsError:
        subject = f"`{self.path}`" if self.path else "the top level"
        return self.error(f"{subject} must be {expected}, but is {_format_value(value)}; {self.advice}")

    def unknown_key(self, key: object, known: Iterable[str]) -> SettingsError:
        names = list(known)
        path = self.key(str(key)).path
        same_name = [other for other in _iter_key_paths(self.root) if other.endswith(f".{key}")]
        suggestions = [self.key(name).path for name in get_close_matches(str(key)[:80], names)] + same_name
        advice = f"did you mean `{suggestions[0]}`?" if suggestions else "remove it, or update attent."
        advice = "it belongs to another `kind`." if path in same_name else advice
        listed = ", ".join(f"`{name}`" for name in names) or "none"
        return self.error(f"unknown key `{_truncate_text(path)}`; {advice} Known keys: {listed}")


def _format_value(value: object) -> str:
    formatter = reprlib.Repr()
    formatter.maxstring = formatter.maxother = 60
    formatter.maxlevel = 3
    return formatter.repr(value)


def _truncate_text(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _nesting_error(where: str) -> SettingsError:
    return SettingsError(f"{where}: is nested deeper than {MAX_DEPTH} levels; is it a settings file?")


_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    NoneType: "nothing (null)",
}


def _describe_type(kind: Any) -> str:
    """Describe the values that an annotation allows."""
    if kind in _TYPE_NAMES:
        return _TYPE_NAMES[kind]
    if _is_dataclass(kind):
        return "a table of the keys " + ", ".join(f"`{name}`" for name in _get_init_fields(kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        args = get_args(kind)
        if args[-1:] == (...,):
            return f"a list, each item {_describe_type(args[0])}"
        return f"a list of {len(args)}: " + ", ".join(map(_describe_type, args))
    return " or ".join(map(_describe_type, _get_union_members(kind)))


# ---- annotations -----------------------------------------------------------------------------------------------------


def _is_dataclass(kind: object) -> bool:
    return is_dataclass(kind)


@cache
def _get_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _get_init_fields(cls: type[DataclassInstance]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(cls) if field.init}


def _get_union_members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _get_dataclasses(kind: Any) -> list[Any]:
    tables = [member for member in _get_union_members(kind) if _is_dataclass(member)]
    untagged = [cls.__name__ for cls in tables if not isinstance(getattr(cls, "kind", None), str)]
    assert len(tables) < 2 or not untagged, f"{untagged} need a `kind: ClassVar[str]` in a union"
    return tables


def _get_item_types(kind: Any) -> Iterable[Any]:
    """Return the annotations of a tuple's items, in order."""
    args = next((get_args(member) for member in _get_union_members(kind) if get_origin(member) is tuple), ())
    return repeat(args[0]) if args[-1:] == (...,) else args


def _get_default(field: Field[Any], base: object) -> Any:
    """Return the value of a missing key: that of `base` if there is one, else the field's default."""
    if base is not None:
        return getattr(base, field.name)
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _iter_key_paths(cls: type[DataclassInstance], prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield every dotted key under `cls`, for suggestions."""
    for name in _get_init_fields(cls):
        yield prefix + name
        for table in _get_dataclasses(_get_hints(cls)[name]) if depth < 6 else ():
            yield from _iter_key_paths(table, f"{prefix}{name}.", depth + 1)


def _to_plain(value: Any, kind: Any) -> Any:
    if _is_dataclass(value):
        return _make_kind_tag(value, kind) | to_dict(value)
    if isinstance(value, tuple):
        return [_to_plain(item, of) for item, of in zip(value, _get_item_types(kind), strict=False)]
    return value


def _make_kind_tag(value: Any, kind: Any) -> dict[str, Any]:
    return {"kind": value.kind} if len(_get_dataclasses(kind)) > 1 else {}


def _build_dataclass(cls: Any, data: object, key_path: _KeyPath, base: object) -> Any:
    if not isinstance(data, Mapping):
        raise key_path.invalid_value(_describe_type(cls), data)
    for key in data:
        if key not in _get_init_fields(cls):
            raise key_path.unknown_key(key, _get_init_fields(cls))
    base = base if isinstance(base, cls) else None
    values = {name: _build_field(cls, name, data, key_path, base) for name in _get_init_fields(cls)}
    try:
        return cls(**values)
    except ValueError as error:
        raise key_path.error(f"`{key_path.path}`: {error}" if key_path.path else str(error)) from error


def _build_field(cls: Any, name: str, data: Mapping[str, Any], key_path: _KeyPath, base: object) -> Any:
    kind = _get_hints(cls)[name]
    default = _get_default(_get_init_fields(cls)[name], base)
    inner = key_path.key(name, default)
    if name in data:
        return _convert(kind, data[name], inner, default)
    if default is MISSING:
        raise key_path.error(f"missing key `{inner.path}`; it must be {_describe_type(kind)}; add it")
    return default


def _convert(kind: Any, value: object, key_path: _KeyPath, base: object = None) -> Any:
    """Convert `value` to the annotation `kind`; `base` completes a partial table."""
    if _is_dataclass(kind):
        return _build_dataclass(kind, value, key_path, base)
    if get_origin(kind) is Literal:
        return _convert_literal(kind, value, key_path)
    if get_origin(kind) is tuple:
        args = get_args(kind)
        if not isinstance(value, list | tuple) or (args[-1:] != (...,) and len(value) != len(args)):
            raise key_path.invalid_value(_describe_type(kind), value)
        pairs = enumerate(zip(value, _get_item_types(kind), strict=False))
        return tuple(_convert(of, item, key_path.item(index)) for index, (item, of) in pairs)
    if len(_get_union_members(kind)) > 1:
        return _convert_union(kind, value, key_path, base)
    return _convert_scalar(kind, value, key_path)


def _convert_scalar(kind: Any, value: Any, key_path: _KeyPath) -> Any:
    assert kind in _TYPE_NAMES, f"unsupported annotation {kind} of `{key_path.path}`"
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if type(value) is not kind:
        raise key_path.invalid_value(_describe_type(kind), value)
    if kind is float and not math.isfinite(value):
        raise key_path.invalid_value("a finite number", value)
    if kind is str and any("\ud800" <= character <= "\udfff" for character in value):  # lone surrogates
        raise key_path.invalid_value("valid Unicode text", value)
    return value


def _convert_literal(kind: Any, value: object, key_path: _KeyPath) -> Any:
    for choice in get_args(kind):
        if type(choice) is type(value) and choice == value:
            return choice
    near = get_close_matches(value[:80], map(str, get_args(kind))) if isinstance(value, str) else []
    error = key_path.invalid_value(_describe_type(kind), value)
    raise SettingsError(f"{error}; did you mean {near[0]!r}?") if near else error


def _convert_union(kind: Any, value: object, key_path: _KeyPath, base: object) -> Any:
    members = _get_union_members(kind)
    words = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    if value == NONE_WORD and NoneType in members and str not in members and NONE_WORD not in words:
        return None
    if isinstance(value, Mapping) and _get_dataclasses(kind):
        classes = _get_dataclasses(kind)
        rest = value if len(classes) == 1 else {key: item for key, item in value.items() if key != "kind"}
        return _build_dataclass(_choose_dataclass(classes, value, key_path, base), rest, key_path, base)
    present = [member for member in members if member is not NoneType]
    if len(present) == 1 and value is not None and present[0] not in _TYPE_NAMES:
        return _convert(present[0], value, key_path, base)
    for member in sorted(present, key=lambda member: member is float):  # 3 stays an int in `float | int`
        try:
            return _convert(member, value, key_path)
        except SettingsError:
            continue
    if value is None and NoneType in members:
        return None
    raise key_path.invalid_value(_describe_type(kind), value)


def _choose_dataclass(classes: list[Any], data: Mapping[str, Any], key_path: _KeyPath, base: object) -> Any:
    """Return the dataclass that the `kind` key names, or that of `base` without one."""
    if len(classes) == 1:
        return classes[0]
    kind = data.get("kind", base.kind if isinstance(base, tuple(classes)) else MISSING)  # type: ignore[attr-defined]
    kinds = {cls.kind: cls for cls in classes}
    literal = _make_kind_literal(kinds)
    if kind is MISSING:
        raise key_path.error(f"missing key `{key_path.key('kind').path}`; it must be {_describe_type(literal)}; add it")
    return kinds[_convert_literal(literal, kind, key_path.key("kind"))]


def _make_kind_literal(kinds: Iterable[str]) -> Any:
    return Literal[tuple(kinds)]


# ---- overrides -------------------------------------------------------------------------------------------------------


def _set_key(cls: Any, data: dict[str, Any], keys: list[str], text: str, key_path: _KeyPath, base: object) -> None:
    """Set the value of the dotted `keys` in the plain data of a `cls`."""
    name, *rest = keys
    if name not in _get_init_fields(cls):
        raise key_path.unknown_key(name, _get_init_fields(cls))
    kind = _get_hints(cls)[name]
    default = _get_default(_get_init_fields(cls)[name], base if isinstance(base, cls) else None)
    inner = key_path.key(name, default)
    if not rest:
        data[name] = _parse_value(kind, text, inner, default)
    elif rest == ["kind"] and len(_get_dataclasses(kind)) > 1:
        kinds = _make_kind_literal(table.kind for table in _get_dataclasses(kind))
        data[name] = {"kind": _parse_value(kinds, text, inner.key("kind"))}  # the keys of the old kind are dropped
    else:
        table = _open_table(data, name, kind, inner)
        _set_key(_choose_dataclass(_get_dataclasses(kind), table, inner, default), table, rest, text, inner, default)


def _open_table(data: dict[str, Any], name: str, kind: Any, key_path: _KeyPath) -> dict[str, Any]:
    if not _get_dataclasses(kind):
        raise key_path.error(f"`{key_path.path}` has no keys: it must be {_describe_type(kind)}; set it as a whole")
    if data.get(name) is None:
        data[name] = {}  # its other keys keep the field's default
    table = data[name]
    if not isinstance(table, dict):
        raise key_path.invalid_value(_describe_type(kind), table)
    return table


def _parse_value(kind: Any, text: str, key_path: _KeyPath, base: object = None) -> Any:
    """Parse a value as TOML if the annotation accepts that, else as bare words."""
    candidates = [*_parse_toml_value(text), text, *_parse_bare_list(kind, text)]
    errors = []
    for value in candidates:
        try:
            _convert(kind, value, key_path, base)
            return value
        except SettingsError as error:
            errors.append(error)
    raise errors[0]


def _parse_toml_value(text: str) -> list[Any]:
    try:
        data = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return [None] if text in ("none", "null") else []
    return [data["value"]] if data.keys() == {"value"} else []


def _parse_bare_list(kind: Any, text: str) -> list[list[Any]]:
    """Parse `a.tsv,b.tsv` and `[a.tsv, b.tsv]`: lists whose quotes the shell has removed."""
    if not any(get_origin(member) is tuple for member in _get_union_members(kind)):
        return []
    words = [word.strip() for word in text.removeprefix("[").removesuffix("]").split(",")]
    return [words, [value for word in words for value in _parse_toml_value(word) or [word]]]


# ---- files -----------------------------------------------------------------------------------------------------------


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise SettingsError(f"{path}: {problem}; give the path of a settings file")
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if len(content) > MAX_BYTES:
        raise SettingsError(f"{path}: must be at most {MAX_BYTES} bytes, but is more; is it a settings file?")
    return content


def _parse_object(content: bytes, decode: Callable[[str], object], format_name: str, where: str) -> dict[str, Any]:
    try:
        data = decode(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SettingsError(f"{where}: must be UTF-8, but byte {error.start} is not; convert it") from error
    except RecursionError:
        raise _nesting_error(where) from None
    except ValueError as error:
        raise SettingsError(f"{where}: is not valid {format_name}: {error}; correct it") from error
    if not isinstance(data, dict):
        raise SettingsError(f"{where}: must be an object, {{...}}, but is {_format_value(data)}; correct it")
    layer: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        layer = [item for node in layer for item in (node.values() if isinstance(node, dict) else node)]
        layer = [item for item in layer if isinstance(item, dict | list)]
        if not layer:
            return data
    raise _nesting_error(where)


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a finite number")


def _parse_finite_float(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _reject_constant(_truncate_text(text))


# ---- TOML text, which the standard library reads but does not write --------------------------------------------------


def _to_toml_data(config: DataclassInstance, base: object) -> dict[str, Any]:
    """Return `to_dict` without None where it is the default; elsewhere `_format_toml` writes the word "none"."""
    base = base if isinstance(base, type(config)) else None
    data: dict[str, Any] = {}
    for name, field in _get_init_fields(type(config)).items():
        value, kind, default = getattr(config, name), _get_hints(type(config))[name], _get_default(field, base)
        if _is_dataclass(value):
            data[name] = _make_kind_tag(value, kind) | _to_toml_data(value, default)
        elif value is not None or default is not None:
            data[name] = _to_plain(value, kind)
    return data


def _iter_toml_lines(data: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    if path and (len(tables) < len(data) or not data):
        yield f"\n[{'.'.join(map(_format_toml_key, path))}]"
    for key, value in data.items():
        if key not in tables:
            yield f"{_format_toml_key(key)} = {_format_toml(value)}"
    for key, table in tables.items():
        yield from _iter_toml_lines(table, (*path, key))


def _format_toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_toml_key(key)} = {_format_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str | None):
        return json.dumps(NONE_WORD if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
    writers: dict[type, Callable[[Any], str]] = {bool: lambda it: str(it).lower(), int: str, float: repr}
    if type(value) not in writers:
        raise SettingsError(f"TOML: cannot represent {_format_value(value)}; use numbers, strings, bools, tuples")
    return writers[type(value)](value)


def _format_toml_key(key: str) -> str:
    return key if key.isascii() and key.isidentifier() else _format_toml(key)
