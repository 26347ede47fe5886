"""Settings: round trips, overrides, and error messages."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from attent import settings
from attent.settings import SettingsError


@dataclass(frozen=True, kw_only=True)
class Sinusoidal:
    kind: ClassVar[str] = "sinusoidal"
    period: float = 10_000.0


@dataclass(frozen=True, kw_only=True)
class Learned:
    kind: ClassVar[str] = "learned"
    length: int = 512


@dataclass(frozen=True, kw_only=True)
class Stack:
    layers: int
    width: int = 512
    heads: int = 8
    norm: Literal["pre", "post"] = "post"
    positions: Sinusoidal | Learned | None = Sinusoidal()
    window: tuple[int | None, int | None] | None = None

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"`width` must be a multiple of `heads` ({self.heads}), but is {self.width}")


@dataclass(frozen=True, kw_only=True)
class Train:
    lr: float = 1e-3
    compile: bool = True
    seed: int | None = 1
    note: str = ""
    betas: tuple[float, float] = (0.9, 0.98)
    limit: float | int | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    encoder: Stack
    decoder: Stack = Stack(layers=6, norm="pre")
    train: Train = field(default_factory=Train)
    files: tuple[str, ...] = ()
    several: tuple[Sinusoidal | Learned, ...] = ()
    name: str | None = None


RUN = Run(encoder=Stack(layers=2))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)
positions = st.one_of(st.builds(Sinusoidal, period=numbers), st.builds(Learned, length=st.integers()))
maybe_int = st.none() | st.integers()
stacks = st.builds(
    Stack,
    layers=st.integers(),
    width=st.integers().map(lambda n: 8 * n),
    norm=st.sampled_from(["pre", "post"]),
    positions=st.none() | positions,
    window=st.none() | st.tuples(maybe_int, maybe_int),
)
trains = st.builds(
    Train,
    lr=numbers,
    compile=st.booleans(),
    seed=maybe_int,
    note=texts,
    betas=st.tuples(numbers, numbers),
    limit=st.one_of(st.none(), numbers, st.integers()),
)
runs = st.builds(
    Run,
    encoder=stacks,
    decoder=stacks,
    train=trains,
    files=st.lists(texts, max_size=3).map(tuple),
    several=st.lists(positions, max_size=3).map(tuple),
    name=st.none() | texts,
)
quickly = hypothesis_settings(max_examples=100, deadline=None)


def message(cls: type, data: Any, where: str = "config.json") -> str:
    with pytest.raises(SettingsError) as caught:
        settings.from_dict(cls, data, where)
    return str(caught.value)


def read_toml(cls: type, path: Path, overrides: Sequence[str] = ()) -> Any:
    return build_with_overrides(cls, settings.read_toml_dict(path), overrides, str(path))


def apply_overrides(config: Any, overrides: Sequence[str]) -> Any:
    return build_with_overrides(type(config), settings.to_dict(config), overrides, "--set")


def build_with_overrides(cls: type, data: dict[str, Any], overrides: Sequence[str], where: str) -> Any:
    for override in overrides:
        settings.apply_override(cls, data, override)
    return settings.from_dict(cls, data, where)


def override_message(*overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        apply_overrides(RUN, overrides)
    return str(caught.value)


# Round trips.


@quickly
@given(runs)
def test_json_round_trip(run: Run) -> None:
    text = json.dumps(settings.to_dict(run), allow_nan=False)
    assert settings.from_dict(Run, json.loads(text)) == run
    assert repr(settings.from_dict(Run, json.loads(text))) == repr(run)  # 3 and 3.0 are equal, and not the same


@quickly
@given(runs)
def test_toml_round_trip(run: Run) -> None:
    assert repr(settings.from_dict(Run, tomllib.loads(settings.to_toml(run)))) == repr(run)


@quickly
@given(runs, st.data())
def test_override_sets_only_its_key(run: Run, data: st.DataObject) -> None:
    rate, note = data.draw(numbers), data.draw(texts.map(str.strip))
    quoted = json.dumps(note, ensure_ascii=False).replace("\x7f", "\\u007f")
    changed = apply_overrides(run, [f"train.lr={rate!r}", f"train.note = {quoted}"])
    assert changed == replace(run, train=replace(run.train, lr=rate, note=note))


@quickly
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | texts,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(texts | st.sampled_from(["encoder", "layers", "kind"]), inner, max_size=3)
        ),
    )
)
def test_random_data_gives_a_run_or_a_settings_error(data: object) -> None:
    wholes: list[Any] = [data, {"encoder": data}, {"encoder": {"layers": 1, "positions": data}}]
    for whole in wholes:
        try:
            assert isinstance(settings.from_dict(Run, whole), Run)
        except SettingsError as error:
            assert str(error).startswith("config.json: ")  # noqa: PT017 - both outcomes are right


def test_to_dict_returns_plain_data() -> None:
    assert settings.to_dict(RUN)["encoder"] == {
        "layers": 2,
        "width": 512,
        "heads": 8,
        "norm": "post",
        "positions": {"kind": "sinusoidal", "period": 10_000.0},
        "window": None,
    }
    assert settings.to_dict(RUN)["train"]["betas"] == [0.9, 0.98]


def test_partial_table_keeps_other_defaults() -> None:
    run = settings.from_dict(Run, {"encoder": {"layers": 1}, "decoder": {"layers": 3}})
    assert run.decoder == Stack(layers=3, norm="pre")
    assert settings.from_dict(
        Run, {"encoder": {"layers": 1, "positions": {"period": 5}}}
    ).encoder.positions == Sinusoidal(period=5.0)


def test_toml_omits_default_none_and_writes_none_elsewhere() -> None:
    run = replace(RUN, train=Train(seed=None), encoder=Stack(layers=1, window=(None, 3), positions=None))
    data = tomllib.loads(settings.to_toml(run))
    assert "name" not in data
    assert data["train"]["seed"] == data["encoder"]["positions"] == "none"
    assert data["encoder"]["window"] == ["none", 3]


@dataclass(frozen=True, kw_only=True)
class Named:
    name: str | None = "x"


@dataclass(frozen=True, kw_only=True)
class Worded:
    choice: Literal["none", "all"] | None = "all"
    other: Literal["pre", "post"] | None = "pre"


def test_the_word_none_is_a_choice_where_the_annotation_has_it() -> None:
    assert settings.from_dict(Worded, {"choice": "none", "other": "none"}) == Worded(choice="none", other=None)


def test_toml_refuses_values_that_do_not_round_trip() -> None:
    with pytest.raises(SettingsError, match="TOML: cannot represent 1j; use numbers, strings, bools, tuples"):
        settings.to_toml(Learned(length=1j))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"TOML: cannot represent every value of .*save it as JSON"):
        settings.to_toml(Named(name=None))  # the word "none" would come back as a name
    with pytest.raises(SettingsError, match=r"^TOML: `length` must be an integer, but is 'x'"):
        settings.to_toml(Learned(length="x"))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ['a"b\\c', "\x00\x1f\x7f\x80", "\n\r\t", "\u2028 é 中 😀", "'''", '"""', "# [x]"])
def test_toml_strings_round_trip(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(settings.to_toml(replace(RUN, files=(text,))), encoding="utf-8")
    assert read_toml(Run, tmp_path / "run.toml").files == (text,)


# Error messages.


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"layers": "six"}, "config.json: `layers` must be an integer, but is 'six'; change that value"),
        ({"layers": True}, "config.json: `layers` must be an integer, but is True; change that value"),
        ({"layers": 6.0}, "config.json: `layers` must be an integer, but is 6.0; change that value"),
        ({"layers": None}, "config.json: `layers` must be an integer, but is None; change that value"),
        ({}, "config.json: missing key `layers`; it must be an integer; add it"),
        (
            {"layers": 1, "heads": []},
            "config.json: `heads` must be an integer, but is []; leave it out for the default, 8",
        ),
        (
            {"layers": 1, "norm": "prae"},
            (
                "config.json: `norm` must be one of 'pre', 'post', but is 'prae'; "
                "leave it out for the default, 'post'; did you mean 'pre'?"
            ),
        ),
        (
            {"layers": 1, "window": [1, "x"]},
            "config.json: `window[1]` must be an integer or nothing (null), but is 'x'; change that value",
        ),
        (
            {"layers": 1, "window": [1]},
            (
                "config.json: `window` must be a list of 2: an integer or nothing (null), "
                "an integer or nothing (null), but is [1]; leave it out for the default, None"
            ),
        ),
        (
            {"layers": 1, "positions": {"kind": "learnt"}},
            (
                "config.json: `positions.kind` must be one of 'sinusoidal', 'learned', but is 'learnt'; "
                "change that value; did you mean 'learned'?"
            ),
        ),
        (
            {"layers": 1, "positions": 3},
            (
                "config.json: `positions` must be a table of the keys `period` or a table of the keys "
                "`length` or nothing (null), but is 3; change that value"
            ),
        ),
        (
            {"layers": 1, "heads": 3},
            "config.json: `width` must be a multiple of `heads` (3), but is 512",
        ),
    ],
)
def test_invalid_values_are_described(data: dict[str, Any], expected: str) -> None:
    assert message(Stack, data) == expected


def test_errors_name_the_file_and_the_dotted_path() -> None:
    assert message(Run, {"encoder": {"layers": "six"}}, "run.toml").startswith("run.toml: `encoder.layers` must")
    assert message(Run, {"encoder": {"layers": 1, "heads": 7}}).startswith("config.json: `encoder`: `width` must")
    assert message(Run, {"encoder": {"layers": 1}, "several": [{"period": 1}]}).startswith(
        "config.json: missing key `several[0].kind`; it must be one of 'sinusoidal', 'learned'"
    )


def test_unknown_key_gets_a_suggestion() -> None:
    assert message(Run, {"encoder": {"layerz": 1}}) == (
        "config.json: unknown key `encoder.layerz`; did you mean `encoder.layers`? "
        "Known keys: `layers`, `width`, `heads`, `norm`, `positions`, `window`"
    )
    assert "unknown key `lr`; did you mean `train.lr`?" in message(Run, {"lr": 1})
    assert "did you mean" not in message(Train, {"zzzz": 1})
    assert len(message(Train, {"z" * 10**6: 1})) < 300
    assert "unknown key `7`" in message(Train, {7: 1})


@dataclass(frozen=True, kw_only=True)
class Deep:
    leaf: int = 0
    deep: Deep | None = None


def test_suggestions_are_looked_for_in_seven_levels() -> None:
    paths = list(settings._iter_key_paths(Deep))
    assert len(paths) == 14
    assert max(path.count(".") for path in paths) == 6


def test_toml_has_a_heading_for_each_table_with_values() -> None:
    text = settings.to_toml(Holder())
    assert text == "[inner]\nnumber = 1\n\n[inner.rest]\n\n[other.inner]\nnumber = 1\n\n[other.inner.rest]\n"


@dataclass(frozen=True, kw_only=True)
class Nothing:
    pass


@dataclass(frozen=True, kw_only=True)
class Inner:
    number: int = 1
    rest: Nothing = field(default_factory=Nothing)


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True, kw_only=True)
class Holder:
    inner: Inner = field(default_factory=Inner)
    other: Wrapper = field(default_factory=Wrapper)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_nonfinite_numbers_are_refused(value: float) -> None:
    assert "`lr` must be a" in message(Train, {"lr": value})


def test_integers_too_large_for_a_float_are_infinite() -> None:
    assert "`lr` must be a finite number, but is inf" in message(Train, {"lr": 10**400})


def test_long_keys_and_values_are_cut() -> None:
    assert f"unknown key `{'z' * 80}`; remove it" in message(Train, {"z" * 80: 1})
    assert f"unknown key `{'z' * 77}...`; remove it" in message(Train, {"z" * 81: 1})
    assert f"but is '{'x' * 58}'" in message(Stack, {"layers": "x" * 58})
    assert f"but is '{'x' * 27}...{'x' * 28}'" in message(Stack, {"layers": "x" * 59})
    assert "but is [[[[...]]]]" in message(Stack, {"layers": [[[[1]]]]})
    assert "but is [[[7]]]" in message(Stack, {"layers": [[[7]]]})


def test_int_is_a_float_and_bool_is_not() -> None:
    lr = settings.from_dict(Train, {"lr": 1}).lr
    assert type(lr) is float
    assert "`lr` must be a number, but is True" in message(Train, {"lr": True})
    assert type(settings.from_dict(Train, {"limit": 3}).limit) is int
    assert "`note` must be valid Unicode text" in message(Train, {"note": "\ud800"})


# Overrides.


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("train.lr=3e-4", "train.lr", 3e-4),
        ("train.lr=1", "train.lr", 1.0),
        ("encoder.layers=32_0", "encoder.layers", 320),
        ("train.compile=false", "train.compile", False),
        ("train.seed=none", "train.seed", None),
        ("train.note=a = b", "train.note", "a = b"),
        ("train.note=3", "train.note", "3"),
        ("train.note=true", "train.note", "true"),
        ("train.note=", "train.note", ""),
        ('train.note="3"', "train.note", "3"),
        ("train.note=x\ny = 1", "train.note", "x\ny = 1"),
        ("train.note=1\ny = 1", "train.note", "1\ny = 1"),
        ("name=none", "name", None),
        ('name="none"', "name", "none"),
        ("encoder.norm=pre", "encoder.norm", "pre"),
        ("train.betas=[0.5, 1]", "train.betas", (0.5, 1.0)),
        ("train.betas=0.5,1", "train.betas", (0.5, 1.0)),
        ("encoder.window=[none, 3]", "encoder.window", (None, 3)),
        ('files=["a.tsv"]', "files", ("a.tsv",)),
        ("files=[a.tsv, b.tsv]", "files", ("a.tsv", "b.tsv")),
        ("files=a.tsv,b.tsv", "files", ("a.tsv", "b.tsv")),
        ("files=[]", "files", ()),
        ("encoder.positions.period=5", "encoder.positions", Sinusoidal(period=5.0)),
        ("encoder.positions.kind=learned", "encoder.positions", Learned()),
        ('encoder.positions={kind="learned", length=3}', "encoder.positions", Learned(length=3)),
        ("encoder.positions=none", "encoder.positions", None),
    ],
)
def test_overrides_are_parsed_by_annotation(override: str, path: str, expected: object) -> None:
    value: Any = apply_overrides(RUN, [override])
    for name in path.split("."):
        value = getattr(value, name)
    assert (value, type(value)) == (expected, type(expected))


def test_overrides_are_checked_together_at_the_end() -> None:
    run = apply_overrides(RUN, ["encoder.heads=7", "encoder.width=70"])
    assert (run.encoder.heads, run.encoder.width) == (7, 70)
    assert override_message("encoder.heads=7") == (
        "--set: `encoder`: `width` must be a multiple of `heads` (7), but is 512"
    )


def test_new_kind_has_its_own_keys() -> None:
    run = apply_overrides(RUN, ["encoder.positions.kind=learned", "encoder.positions.length=9"])
    assert run.encoder.positions == Learned(length=9)
    without = replace(RUN, encoder=Stack(layers=1, positions=None))
    with_again = apply_overrides(without, ["encoder.positions.period=2"])
    assert with_again.encoder.positions == Sinusoidal(period=2.0)  # the field's default says which


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("encoder.layers=six", "--set: `encoder.layers` must be an integer, but is 'six'; change that value"),
        ("train.lr=nan", "--set: `train.lr` must be a finite number, but is nan"),
        ("train.compile=yes", "--set: `train.compile` must be true or false, but is 'yes'"),
        ("encoder.layerz=6", "--set: unknown key `encoder.layerz`; did you mean `encoder.layers`?"),
        ("lr=6", "--set: unknown key `lr`; did you mean `train.lr`?"),
        ("train.lr.x=6", "--set: `train.lr` has no keys: it must be a number; set it as a whole"),
        (
            "encoder.positions.length=6",
            "--set: unknown key `encoder.positions.length`; it belongs to another `kind`. Known",
        ),
        (
            "encoder.positions.kind=x",
            "--set: `encoder.positions.kind` must be one of 'sinusoidal', 'learned'",
        ),
        ("train.lr", "--set: must have the form key=value, but is 'train.lr'; write e.g. a.b=3"),
        ("=3", "--set: must have the form key=value"),
        ("train..lr=3", "--set: must have the form key=value"),
        ("encoder.layers=" + "[" * 100_000, "--set: `encoder.layers` must be an integer"),
    ],
)
def test_invalid_overrides_are_described(override: str, expected: str) -> None:
    values = override_message(override)
    assert values.startswith(expected)
    assert len(values) < 300


# Files.


def test_required_key_may_come_from_file_or_override(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nlr = 0.1\n")
    run = read_toml(Run, path, ["encoder.layers=2", "decoder.layers=9"])
    assert (run.train.lr, run.encoder.layers, run.decoder) == (0.1, 2, Stack(layers=9, norm="pre"))
    with pytest.raises(SettingsError, match=r"run\.toml: missing key `encoder`"):
        read_toml(Run, path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"lr = x", "is not valid TOML: .*line 1.*correct it"),
        (b"a = 1\na = 2", "is not valid TOML: "),
        (b"a = " + b"[" * 100_000, "nested deeper than 64 levels"),
        (b"a" + b".a" * 500 + b" = 1", "nested deeper than 64 levels"),
        (b"\xff", "must be UTF-8, but byte 0 is not"),
        (b"encoder = 3", "`encoder` must be a table of the keys"),
    ],
)
def test_invalid_toml_is_described(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    for overrides in ([], ["encoder.layers=1"]):
        with pytest.raises(SettingsError, match=rf"run\.toml.*: .*{expected}|--set: .*{expected}"):
            read_toml(Run, path, overrides)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1, "a": 2}', "duplicate key `a`"),
        (b'{"a": {"b": 1, "b": 1}}', "duplicate key `b`"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b'{"a": -Infinity}', "-Infinity is not a finite number"),
        (b'{"a": 1e999}', "1e999 is not a finite number"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "is not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper than 64 levels"),
        (b"[1]", r"must be an object, \{...\}, but is \[1\]"),
        (b"", "is not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "is not valid JSON"),
        (b'{"a": "\xff"}', "must be UTF-8, but byte 7 is not"),
        (b"{}" + b" " * settings.MAX_BYTES, "must be at most 16777216 bytes, but is more"),
    ],
)
def test_invalid_json_is_described(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=rf"config\.json: .*{expected}"):
        settings.read_json(path)


def test_file_of_the_largest_size_and_depth_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}".ljust(settings.MAX_BYTES))
    assert settings.read_json(path) == {}
    lists = settings.MAX_DEPTH - 1
    path.write_bytes(b'{"a": ' + b"[" * lists + b"]" * lists + b"}")
    assert settings.read_json(path)
    path.write_bytes(b'{"a": ' + b"[" * (lists + 1) + b"]" * (lists + 1) + b"}")
    with pytest.raises(SettingsError, match="nested deeper than 64 levels"):
        settings.read_json(path)


def test_json_is_written_as_text_and_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    settings.write_json({"a": "é", "b": [1]}, path)
    assert path.read_bytes() == '{\n "a": "é",\n "b": [\n  1\n ]\n}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        settings.to_json({"a": math.nan})


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
def test_unreadable_file_is_described() -> None:
    with pytest.raises(SettingsError, match=r"mem: cannot be read \(.+\); check its permissions"):
        settings.read_json("/proc/self/mem")


def test_missing_file_is_described(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no\.json: does not exist; give the path"):
        settings.read_json(tmp_path / "no.json")
    with pytest.raises(SettingsError, match="is not a file; give the path"):
        read_toml(Run, tmp_path)


def test_toml_keys_that_are_not_ascii_are_quoted() -> None:
    config_class = make_dataclass("Sized", [("größe", int, 3), ("size", int, 3)], frozen=True)
    text = settings.to_toml(config_class(5, 6))
    assert text == '"größe" = 5\nsize = 6\n'
