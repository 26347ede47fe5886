"""Settings: frozen dataclasses <-> plain data <-> JSON and TOML, with `--set a.b=c` on top.

The annotations of a dataclass are the schema: each value is checked against them, and each error names the
file, the key, what it must be and what it is. What settings mean, and which values go together, is left to
the dataclasses themselves (`__post_init__`); model folders are left to `attent.models.folder`.

Understood annotations: int, float, bool, str, Literal, tuple[A, B], tuple[A, ...], X | None, dataclasses, and
unions of them. Where a field may hold one of several dataclasses, each has a `kind: ClassVar[str]` and the
data carry a `kind` key. A key left out has its default; a table given in part keeps the rest of its field's
default. TOML has no null: a None is left out where that is the default, and is the word "none" elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

MAX_BYTES = 16 * 2**20  # of one settings file; real ones have a few kilobytes
MAX_DEPTH = 64  # tables and lists inside each other; real ones have about five
NONE_WORD = "none"


class SettingsError(ValueError):
    """A setting that cannot be used; the message is a sentence for the person who wrote it."""


# Plain data.


def to_dict(config: DataclassInstance) -> dict[str, Any]:
    """Plain data (dicts, lists, numbers, strings, None) from which `from_dict` makes an equal `config`."""
    hints = _hints(type(config))
    return {name: _plain(getattr(config, name), hints[name]) for name in _fields(type(config))}


def from_dict(cls: type[C], data: Mapping[str, Any], where: str = "config.json") -> C:
    """A `cls` built from plain data, each value checked; `where` is the file that errors will name."""
    built: C = _build(cls, data, _Place(where=where, root=cls), None)
    return built


def apply(config: C, overrides: Iterable[str]) -> C:
    """`config` with overrides such as `train.lr=3e-4`: set from left to right, then checked together."""
    data = to_dict(config)
    for each in overrides:
        override(type(config), data, each)
    return from_dict(type(config), data, where="--set")


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """The object that JSON `content` holds; `where` is the file that errors will name."""
    text = _decode(content, where)
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_not_a_number, parse_float=_finite_float)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise SettingsError(f"{where}: is not valid JSON: {error}; correct it or write it anew") from error
    return _checked_top(data, where)


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file: at most 16 MiB of UTF-8, no key twice, no NaN."""
    return parse_json(_read_bytes(Path(path)), str(path))


def read_toml(cls: type[C], path: str | Path, overrides: Iterable[str] = ()) -> C:
    """A `cls` from a TOML file with `--set` overrides on top, so that a required key may come from either."""
    where, data = str(path), read_tables(path)
    overrides = list(overrides)
    for each in overrides:
        override(cls, data, each)
    return from_dict(cls, data, where=f"{where} with --set" if overrides else where)


def read_tables(path: str | Path) -> dict[str, Any]:
    """The plain data of a TOML file, not yet held against any dataclass."""
    where = str(path)
    try:
        return _checked_top(tomllib.loads(_decode(_read_bytes(Path(path)), where)), where)
    except RecursionError:
        raise _too_deep(where) from None
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"{where}: is not valid TOML: {error}; correct it") from error


def override(cls: type[DataclassInstance], data: dict[str, Any], text: str) -> None:
    """Puts what `text`, such as `train.lr=3e-4`, says into plain `data` that are meant for a `cls`."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SettingsError(f"--set: must have the form key=value, but is {_show(text)}; write e.g. a.b=3")
    _set(cls, data, keys, value.strip(), _Place(where="--set", root=cls), None)


def to_toml(config: DataclassInstance) -> str:
    """TOML text that reads back as an equal `config`."""
    text = "\n".join(_toml_lines(_toml_data(config, None), ())).lstrip("\n") + "\n"
    if from_dict(type(config), tomllib.loads(text), where="TOML") != config:
        raise SettingsError(f"TOML: cannot keep every value of {_show(config)}; save it as JSON")
    return text


def write_toml(config: DataclassInstance, path: str | Path) -> None:
    """Writes `config` as a TOML file."""
    write_aside(Path(path), to_toml(config).encode())


def write_json(data: Mapping[str, Any], path: str | Path) -> None:
    """Writes plain data as a JSON file, which `read_json` reads back."""
    write_aside(Path(path), json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False).encode())


def write_aside(path: Path, content: bytes) -> None:
    """A small file, written aside first, then renamed, so that a reader never sees half of it. A file that is there
    keeps its permissions."""
    aside = path.with_name(path.name + ".new")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        shutil.copymode(path, aside)
    os.replace(aside, path)


# Where a value stands, and what is said when it is wrong.


@dataclass(frozen=True, kw_only=True)
class _Place:
    where: str
    root: type
    path: str = ""
    depth: int = 0
    advice: str = "change that value"

    def key(self, name: str, default: object = MISSING) -> _Place:
        path = f"{self.path}.{name}" if self.path else name
        if default is MISSING or _is_table(default):
            return self._inner(path, "change that value")
        return self._inner(path, f"leave it out for the default, {_show(default)}")

    def item(self, index: int) -> _Place:
        return self._inner(f"{self.path}[{index}]", "change that value")

    def _inner(self, path: str, advice: str) -> _Place:
        if self.depth >= MAX_DEPTH:
            raise _too_deep(self.where)
        return replace(self, path=path, depth=self.depth + 1, advice=advice)

    def error(self, message: str) -> SettingsError:
        return SettingsError(f"{self.where}: {message}")

    def refuse(self, must: str, value: object) -> SettingsError:
        subject = f"`{self.path}`" if self.path else "the whole"
        return self.error(f"{subject} must be {must}, but is {_show(value)}; {self.advice}")

    def unknown(self, key: object, known: Iterable[str]) -> SettingsError:
        names = list(known)
        full = self.key(str(key)).path
        elsewhere = [path for path in _paths(self.root) if path.endswith(f".{key}")]
        guesses = [self.key(name).path for name in get_close_matches(str(key)[:80], names, n=1)] + elsewhere
        guess = f" did you mean `{guesses[0]}`?" if guesses else ""
        guess = " it belongs to another `kind`." if full in elsewhere else guess
        listed = ", ".join(f"`{name}`" for name in names) or "none"
        advice = guess or " remove it, or update attent."
        return self.error(f"unknown key `{_clip(full)}`;{advice} Known keys: {listed}")


def _show(value: object) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    short.maxlevel = 3
    return short.repr(value)


def _clip(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _too_deep(where: str) -> SettingsError:
    return SettingsError(f"{where}: is nested deeper than {MAX_DEPTH} levels; is it a settings file?")


_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    NoneType: "nothing (null)",
}


def _describe(kind: Any) -> str:
    """What a value of this annotation must be, in words."""
    if kind in _WORDS:
        return _WORDS[kind]
    if _is_table(kind):
        return "a table of the keys " + ", ".join(f"`{name}`" for name in _fields(kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        return _describe_tuple(get_args(kind))
    return " or ".join(_describe(member) for member in _members(kind))


def _describe_tuple(args: tuple[Any, ...]) -> str:
    if args[-1:] == (...,):
        return f"a list, each item {_describe(args[0])}"
    return f"a list of {len(args)}: " + ", ".join(_describe(arg) for arg in args)


# What the annotations say.


def _is_table(kind: object) -> bool:
    return is_dataclass(kind)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _fields(cls: type[DataclassInstance]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(cls) if field.init}


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _tables(kind: Any) -> list[Any]:
    """The dataclasses among which a field of this annotation may choose."""
    tables = [member for member in _members(kind) if _is_table(member)]
    untagged = [cls.__name__ for cls in tables if not isinstance(getattr(cls, "kind", None), str)]
    assert len(tables) < 2 or not untagged, f"{untagged} need a `kind: ClassVar[str]` to stand in a union"
    return tables


def _items(kind: Any) -> Iterable[Any]:
    """The annotations of a tuple's items, in order."""
    args = next((get_args(member) for member in _members(kind) if get_origin(member) is tuple), ())
    return repeat(args[0]) if args[-1:] == (...,) else args


def _default(field: Field[Any], base: object) -> Any:
    """What a left-out key means: the same field of `base` if there is one, else the field's own default."""
    if base is not None:
        return getattr(base, field.name)
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _paths(cls: type[DataclassInstance], prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Every dotted key under `cls`, for guesses at what was meant."""
    for name in _fields(cls):
        yield prefix + name
        for table in _tables(_hints(cls)[name]) if depth < 6 else ():
            yield from _paths(table, f"{prefix}{name}.", depth + 1)


# Dataclass -> plain data.


def _plain(value: Any, kind: Any) -> Any:
    if _is_table(value):
        return _tag(value, kind) | to_dict(value)
    if isinstance(value, tuple):
        return [_plain(item, of) for item, of in zip(value, _items(kind), strict=False)]
    return value


def _tag(value: Any, kind: Any) -> dict[str, Any]:
    return {"kind": value.kind} if len(_tables(kind)) > 1 else {}


# Plain data -> dataclass.


def _build(cls: Any, data: object, place: _Place, base: object) -> Any:
    if not isinstance(data, Mapping):
        raise place.refuse(_describe(cls), data)
    for key in data:
        if key not in _fields(cls):
            raise place.unknown(key, _fields(cls))
    base = base if isinstance(base, cls) else None
    values = {name: _field_value(cls, name, data, place, base) for name in _fields(cls)}
    try:
        return cls(**values)
    except ValueError as error:
        raise place.error(f"`{place.path}`: {error}" if place.path else str(error)) from error


def _field_value(cls: Any, name: str, data: Mapping[str, Any], place: _Place, base: object) -> Any:
    kind = _hints(cls)[name]
    default = _default(_fields(cls)[name], base)
    inner = place.key(name, default)
    if name in data:
        return _convert(kind, data[name], inner, default)
    if default is MISSING:
        raise place.error(f"missing key `{inner.path}`; it must be {_describe(kind)}; add it")
    return default


def _convert(kind: Any, value: object, place: _Place, base: object = None) -> Any:
    """`value` as the annotation `kind` wants it; `base` fills what a partly given table leaves out."""
    if _is_table(kind):
        return _build(kind, value, place, base)
    if get_origin(kind) is Literal:
        return _literal(kind, value, place)
    if get_origin(kind) is tuple:
        return _tuple(kind, value, place)
    if len(_members(kind)) > 1:
        return _union(kind, value, place, base)
    return _scalar(kind, value, place)


def _scalar(kind: Any, value: Any, place: _Place) -> Any:
    assert kind in _WORDS, f"settings do not know the annotation {kind} of `{place.path}`"
    if kind is float and type(value) is int:
        value = _as_float(value)
    if type(value) is not kind:
        raise place.refuse(_describe(kind), value)
    if kind is float and not math.isfinite(value):
        raise place.refuse("a finite number", value)
    if kind is str and not _is_unicode(value):
        raise place.refuse("text that UTF-8 can hold", value)
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _literal(kind: Any, value: object, place: _Place) -> Any:
    for choice in get_args(kind):
        if type(choice) is type(value) and choice == value:
            return choice
    near = get_close_matches(value[:80], map(str, get_args(kind)), n=1) if isinstance(value, str) else []
    error = place.refuse(_describe(kind), value)
    raise SettingsError(f"{error}; did you mean {near[0]!r}?") if near else error


def _tuple(kind: Any, value: object, place: _Place) -> tuple[Any, ...]:
    args = get_args(kind)
    if not isinstance(value, list | tuple):
        raise place.refuse(_describe(kind), value)
    if args[-1:] != (...,) and len(value) != len(args):
        raise place.refuse(_describe(kind), value)
    return tuple(
        _convert(of, item, place.item(index)) for index, (item, of) in enumerate(zip(value, _items(kind), strict=False))
    )


def _union(kind: Any, value: object, place: _Place, base: object) -> Any:
    if value == NONE_WORD and _none_word_is_none(kind):
        return None
    if isinstance(value, Mapping) and _tables(kind):
        return _build_one_of(_tables(kind), value, place, base)
    present = [member for member in _members(kind) if member is not NoneType]
    if len(present) == 1 and value is not None and present[0] not in _WORDS:
        return _convert(present[0], value, place, base)
    for member in sorted(present, key=lambda member: member is float):  # 3 stays an int in `float | int`
        try:
            return _convert(member, value, place)
        except SettingsError:
            continue
    if value is None and NoneType in _members(kind):
        return None
    raise place.refuse(_describe(kind), value)


def _none_word_is_none(kind: Any) -> bool:
    members = _members(kind)
    words = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    return NoneType in members and str not in members and NONE_WORD not in words


def _build_one_of(tables: list[Any], data: Mapping[str, Any], place: _Place, base: object) -> Any:
    rest = dict(data) if len(tables) == 1 else {key: value for key, value in data.items() if key != "kind"}
    return _build(_choose(tables, data, place, base), rest, place, base)


def _choose(tables: list[Any], data: Mapping[str, Any], place: _Place, base: object) -> Any:
    """The dataclass that the data's `kind` names, or that of `base` if they name none."""
    if len(tables) == 1:
        return tables[0]
    kind = data.get("kind", base.kind if isinstance(base, tuple(tables)) else MISSING)  # type: ignore[attr-defined]
    kinds = {cls.kind: cls for cls in tables}
    if kind is MISSING:
        raise place.error(f"missing key `{place.key('kind').path}`; it must be {_one_of(kinds)}; add it")
    return kinds[_literal(_one_of_kind(kinds), kind, place.key("kind"))]


def _one_of_kind(kinds: Iterable[str]) -> Any:
    return Literal[tuple(kinds)]


def _one_of(kinds: Iterable[str]) -> str:
    return _describe(_one_of_kind(kinds))


# Overrides.


def _set(cls: Any, data: dict[str, Any], keys: list[str], text: str, place: _Place, base: object) -> None:
    """Puts the value that `text` spells at the dotted `keys` of plain `data`, which are meant for a `cls`."""
    name, *rest = keys
    if name not in _fields(cls):
        raise place.unknown(name, _fields(cls))
    kind = _hints(cls)[name]
    default = _default(_fields(cls)[name], base if isinstance(base, cls) else None)
    inner = place.key(name, default)
    if not rest:
        data[name] = _parse(kind, text, inner, default)
    elif rest == ["kind"] and len(_tables(kind)) > 1:
        kinds = _one_of_kind(table.kind for table in _tables(kind))
        data[name] = {"kind": _parse(kinds, text, inner.key("kind"))}  # the keys of the old kind go with it
    else:
        table = _open_table(data, name, kind, inner)
        _set(_choose(_tables(kind), table, inner, default), table, rest, text, inner, default)


def _open_table(data: dict[str, Any], name: str, kind: Any, place: _Place) -> dict[str, Any]:
    if not _tables(kind):
        raise place.error(f"`{place.path}` has no keys: it must be {_describe(kind)}; set it as a whole")
    if data.get(name) is None:
        data[name] = {}  # the rest of it keeps the field's default
    table = data[name]
    if not isinstance(table, dict):
        raise place.refuse(_describe(kind), table)
    return table


def _parse(kind: Any, text: str, place: _Place, base: object = None) -> Any:
    """The plain value that `text` spells: as TOML if the annotation takes that, else as bare words."""
    spellings = [*_toml_value(text), text, *_bare_list(kind, text)]
    errors = []
    for spelling in spellings:
        try:
            _convert(kind, spelling, place, base)
            return spelling
        except SettingsError as error:
            errors.append(error)
    raise errors[0]


def _toml_value(text: str) -> list[Any]:
    try:
        data = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return [None] if text in ("none", "null") else []
    return [data["value"]] if data.keys() == {"value"} else []


def _bare_list(kind: Any, text: str) -> list[list[Any]]:
    """`a.tsv,b.tsv` and `[a.tsv, b.tsv]`, for the lists that a shell has robbed of their quotes."""
    if not any(get_origin(member) is tuple for member in _members(kind)):
        return []
    words = [word.strip() for word in text.removeprefix("[").removesuffix("]").split(",")]
    return [words, [value for word in words for value in (_toml_value(word) or [word])[:1]]]


# Files.


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


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{where}: must be UTF-8, but byte {error.start} is not; save it so") from error


def _checked_top(data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise SettingsError(f"{where}: must hold an object, {{...}}, but holds {_show(data)}; write it anew")
    layer: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        layer = [item for node in layer for item in (node.values() if isinstance(node, dict) else node)]
        layer = [item for item in layer if isinstance(item, dict | list)]
        if not layer:
            return data
    raise _too_deep(where)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key `{_clip(twice)}` stands twice")
    return data


def _not_a_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a finite number")


def _finite_float(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _not_a_number(_clip(text))


# TOML text. The standard library reads it and does not write it.


def _toml_data(config: DataclassInstance, base: object) -> dict[str, Any]:
    """`to_dict`, with each None left out where that is the default and the word "none" elsewhere."""
    base = base if isinstance(base, type(config)) else None
    data: dict[str, Any] = {}
    for name, field in _fields(type(config)).items():
        value, kind, default = getattr(config, name), _hints(type(config))[name], _default(field, base)
        if _is_table(value):
            data[name] = _tag(value, kind) | _toml_data(value, default)
        elif value is not None or default is not None:
            data[name] = _none_words(_plain(value, kind))
    return data


def _none_words(value: Any) -> Any:
    if isinstance(value, list):
        return [_none_words(item) for item in value]
    if isinstance(value, dict):
        return {key: _none_words(item) for key, item in value.items()}
    return NONE_WORD if value is None else value


def _toml_lines(data: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    if path and (len(tables) < len(data) or not data):
        yield f"\n[{'.'.join(map(_toml_key, path))}]"
    for key, value in data.items():
        if key not in tables:
            yield f"{_toml_key(key)} = {_toml_text(value)}"
    for key, table in tables.items():
        yield from _toml_lines(table, (*path, key))


def _toml_text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    writers: dict[type, Callable[[Any], str]] = {bool: lambda it: str(it).lower(), int: str, float: repr}
    if type(value) not in writers:
        raise SettingsError(f"TOML: cannot hold {_show(value)}; use numbers, strings, bools, tuples")
    return writers[type(value)](value)


def _toml_key(key: str) -> str:
    return key if key.isascii() and key.isidentifier() else _toml_text(key)
