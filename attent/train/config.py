"""What a training run is: one table for each part, the same names in `run.toml`, in `--set` and as flags.

A None means "chosen from the data and the machine"; `choose` fills it in and says why, and the resolved run is kept in
the model folder. What a person asked for is kept apart from it (`Asked`), so that a later command can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attent import settings
from attent.data.estimate import Size
from attent.models import presets
from attent.models.config import Seq2SeqConfig
from attent.nn import StackConfig
from attent.train.recipe import DataConfig, DecodeConfig, Precision, TrainConfig, TrainError

__all__ = ["Asked", "DataConfig", "DecodeConfig", "Precision", "Run", "Size", "TrainConfig", "TrainError"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, from files to a model folder."""

    size: Size | None = None
    start: str | None = None  # a model to begin from (--from)
    data: DataConfig = field(default_factory=DataConfig)
    model: Seq2SeqConfig | None = None  # None until the vocabulary is known
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)


# What may differ when a run goes on: none of it changes what was learned so far.
HARMLESS = frozenset(
    f"train.{name}"
    for name in (
        "steps", "save_every", "keep_last", "valid_every", "valid_sentences", "patience", "average", "device",
        "threads", "workers", "compile", "piece_tokens", "shard", "tensorboard",
    )
) | {"decode.beam_size", "decode.length_penalty", "data.test"}  # fmt: skip

BOTH_STACKS = {field.name for field in fields(StackConfig)} - {"causal", "cross"}
PLACEHOLDER = 1000  # a vocabulary, to check a model's table before the real one is known


# ---- what a person asked for -----------------------------------------------------------------------------------------

Asked = dict[str, Any]  # tables inside tables, with only what was said


def read_asked(file: Path | None, flags: Mapping[str, Any], overrides: Iterable[str]) -> Asked:
    """A run file, then flags such as {"train.lr": 0.001}, then `--set` on top; checked, but nothing filled in."""
    asked: Asked = settings.read_tables(file) if file else {}
    where = str(file) if file else "--set"
    for path, value in flags.items():
        _put(asked, path.split("."), value)
    _spread(asked, where)
    for override in overrides:
        for each in _for_both_stacks(override):
            settings.override(Run, asked, each)
    check(asked, where)
    return asked


def check(asked: Asked, where: str) -> Run:
    """The run as asked for; its model is tried with a vocabulary that stands in for the real one."""
    tables = {name: table for name, table in asked.items() if name != "model"}
    run = settings.from_dict(Run, tables, where=where)
    model_of(asked, presets.tiny(PLACEHOLDER), where)
    return run


def model_of(asked: Asked, preset: Seq2SeqConfig, where: str = "run.toml") -> Seq2SeqConfig:
    """The preset with what was asked for on top. Its vocabulary is the tokenizer's, whatever was said."""
    table = {name: value for name, value in asked.get("model", {}).items() if name not in ("vocab", "target_vocab")}
    merged = _merged(settings.to_dict(preset), table)
    try:
        return settings.from_dict(Run, {"model": merged}, where=where).model or preset
    except settings.SettingsError:
        raise
    except ValueError as error:
        raise settings.SettingsError(f"{where}: {error}") from error


def _put(tables: Asked, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tables = tables.setdefault(name, {})
    tables[path[-1]] = list(value) if isinstance(value, tuple) else value


def _spread(asked: Asked, where: str) -> None:
    """`model.dropout` means both stacks; what is said of one of them counts more."""
    model = asked.get("model")
    if isinstance(model, dict):
        for name in [name for name in model if _of_both_stacks(name, where)]:
            value = model.pop(name)
            for stack in ("encoder", "decoder"):
                if isinstance(table := model.setdefault(stack, {}), dict):
                    table.setdefault(name, value)


def _of_both_stacks(name: str, where: str) -> bool:
    near = get_close_matches(name, BOTH_STACKS, n=1)
    if near and near[0] != name and name not in {field.name for field in fields(Seq2SeqConfig)}:
        raise settings.SettingsError(f"{where}: unknown key `model.{name}`; did you mean `model.{near[0]}`?")
    return name in BOTH_STACKS


def _for_both_stacks(override: str) -> list[str]:
    path, equals, value = override.partition("=")
    parts = path.strip().split(".")
    if equals and len(parts) > 1 and parts[0] == "model" and _of_both_stacks(parts[1], "--set"):
        rest = ".".join(parts[1:])
        return [f"model.{stack}.{rest}={value}" for stack in ("encoder", "decoder")]
    return [override]


def _merged(base: Asked, table: Asked) -> Asked:
    """`base` with `table` on top; another `kind` of a part starts from nothing."""
    merged = dict(base)
    for name, value in table.items():
        old = merged.get(name)
        same = (
            isinstance(value, dict) and isinstance(old, dict) and value.get("kind", old.get("kind")) == old.get("kind")
        )
        merged[name] = _merged(old, value) if same and isinstance(old, dict) else value
    return merged


def completed(asked: Asked, before: Asked) -> Asked:
    """What the command means for a run that is there: without --data, all that it does not say is as before."""
    return asked if asked.get("data", {}).get("train") else _merged(before, asked)


def changes(before: Asked, now: Asked) -> dict[str, tuple[Any, Any]]:
    """Every setting that differs: its path -> (before, now); None where it was not said."""
    old, new = dict(flat(before)), dict(flat(now))
    return {path: (old.get(path), new.get(path)) for path in {**old, **new} if old.get(path) != new.get(path)}


def flat(tables: Asked, before: str = "") -> Iterable[tuple[str, Any]]:
    """Every setting by its path, such as `train.lr`."""
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
