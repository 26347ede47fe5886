"""The configuration of a run, with the same names in `run.toml`, in `--set` and as flags.

None means "chosen from the data and the machine" (`autoconfig`); the resolved run is saved in the model folder.
`UserSettings` holds only what the user has set, so that a later command can be compared with it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from attent import settings
from attent.models import CausalConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, VisionConfig, presets
from attent.nn import StackConfig
from attent.training.run_options import Arch, DataConfig, DecodeConfig, Precision, Size, TrainConfig, TrainError
from attent.training.tasks import TASKS, TaskName, get_task_class

__all__ = [
    "DataConfig", "DecodeConfig", "Precision", "RunConfig", "Size", "TaskName", "TrainConfig", "TrainError",
    "UserSettings",
]  # fmt: skip

M = TypeVar("M", bound=ModelConfig)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run. Run files are read as the subclass for the class of the model."""

    task: TaskName = "translate"
    arch: Arch | None = None  # of a translation model; None: transformer
    size: Size | None = None
    init_from: str | None = None  # a model to fine-tune (--from)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig | None = None  # None until the vocabulary is known
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)


# By the class of the model.
RUN_CLASSES: dict[type[Any], type[RunConfig]] = {
    config: make_dataclass(
        config.__name__.replace("Config", "RunConfig"),
        [("model", config | None, None)],
        bases=(RunConfig,),
        frozen=True,
        kw_only=True,
    )
    for config in (Seq2SeqConfig, CausalConfig, EncoderConfig, VisionConfig)
}

# Settings, or tables of them, that not every task reads (see `Task.used_settings`); one that has no effect is refused.
TASK_SETTINGS = frozenset(
    {
        "arch", "data.src", "data.tgt", "data.tags", "data.augment", "data.too_long", "data.filters",
        "data.read_options", "data.tokenizer", "data.tokenizer.joint", "data.max_tokens", "data.layout", "data.images",
        "data.audio", "data.replay", "data.store_sample", "data.synthetic", "data.tokenizer_from", "data.context",
        "train.ctc", "train.keep_adapter", "train.rdrop", "train.valid_sentences", "decode",
    }
)  # fmt: skip
# Settings that may differ when a run is resumed, since they have no effect on the steps so far.
RESUMABLE_CHANGES = frozenset(
    f"train.{name}"
    for name in (
        "steps", "save_every", "save_share", "keep_last", "valid_every", "valid_share", "valid_sentences", "patience",
        "average", "device", "threads", "workers", "compile", "micro_batch_tokens", "shard",
    )
) | {"decode.beam_size", "decode.length_penalty", "data.test"}  # fmt: skip

STACK_FIELDS = {field.name for field in fields(StackConfig)} - {"causal", "cross_attention"}
PLACEHOLDER_VOCAB = 1000  # to validate the model's settings before the vocabulary is known
FRONTEND_KINDS = {"speech": "audio", "caption": "image"}  # by task
DATA_DERIVED_FIELDS = ("vocab", "target_vocab", "labels")  # of a model; settings for them are ignored
UserSettings = dict[str, Any]  # nested tables


def read_user_settings(file: Path | None, flags: Mapping[str, Any], overrides: Iterable[str]) -> UserSettings:
    """Merge a run file, flags such as {"train.lr": 0.001} and `--set` overrides, in this order, and validate them."""
    requested: UserSettings = settings.read_toml_dict(file) if file else {}
    where = str(file) if file else "settings"
    in_file = flatten_settings(requested)
    named_paths = flags.keys() | {override.partition("=")[0].strip() for override in overrides}
    if {"train.steps", "train.minutes"} <= named_paths:
        raise TrainError("`minutes` and `steps` must not both be given: the steps follow from the minutes; give one")
    # The run.toml of a run with --minutes states both: its steps are those that were decided.
    for name, other in (("train.minutes", "steps"), ("train.steps", "minutes")):
        if name in named_paths or (name in in_file and other == "minutes" and "train.minutes" not in named_paths):
            requested.get("train", {}).pop(other, None)
    for path, value in flags.items():
        set_path(requested, path.split("."), value)
    for override in overrides:
        if override.partition("=")[0].strip() in ("task", "arch"):  # which decide the keys of `model`
            settings.apply_override(RunConfig, requested, override)
    run_class = get_run_class(requested)
    _set_layer_kinds(requested)
    frontend = FRONTEND_KINDS.get(str(requested.get("task")))
    if frontend and any(override.strip().startswith("model.frontend.") for override in overrides):
        set_path(requested, ["model", "frontend", "kind"], frontend)
    _expand_stack_settings(requested, where, run_class)
    for override in overrides:
        path, equals, value = override.partition("=")
        table, _, name = path.strip().partition(".")
        if equals and table == "model" and _is_stack_field(name.partition(".")[0], "--set"):
            expanded = [f"model.{stack}.{name}={value}" for stack in get_stack_names(run_class)]
        else:
            expanded = [override]
        for each in expanded:
            settings.apply_override(run_class, requested, each)
    _set_layer_kinds(requested)
    build_run_config(requested, where)  # raises if they are invalid
    _reject_unused_settings(requested, in_file)
    return requested


def _reject_unused_settings(requested: UserSettings, in_file: Mapping[str, Any]) -> None:
    """Raise for a setting that has no effect on this task, unless it is a default or the layout of a run file."""
    task = requested.get("task", "translate")
    defaults, used = flatten_settings(settings.to_dict(RunConfig())), get_task_class(task).used_settings
    for path, value in flatten_settings(requested).items():
        tables = accumulate(path.split("."), "{}.{}".format)  # a.b.c -> a, a.b, a.b.c
        table = next((name for name in reversed(list(tables)) if name in TASK_SETTINGS), None)
        is_file_layout = path == "data.layout" and path in in_file
        is_default = path in defaults and (value == defaults[path] or not (value or defaults[path]))
        if table and table not in used and not is_default and not is_file_layout:
            raise TrainError(f"`{path}` has no effect with --task {task}; leave it out")


def get_run_class(requested: UserSettings) -> type[RunConfig]:
    """Return the class for the task; an invalid task is reported by `build_run_config`."""
    task = requested.get("task", "translate")
    return RUN_CLASSES[get_task_class(task if task in list(TASKS) else "translate").config_class]


def read_run(path: Path) -> RunConfig:
    tables = settings.read_toml_dict(path)
    return settings.from_dict(get_run_class(tables), tables, where=str(path))


def build_run_config(requested: UserSettings, where: str) -> RunConfig:
    """Return the requested run, with the task's defaults; the model is validated with a placeholder vocabulary."""
    kind = get_run_class(requested)
    tables = {name: table for name, table in requested.items() if name != "model"}
    settings.from_dict(kind, tables, where=where)  # without the defaults, so that errors name the user's settings
    task = get_task_class(requested.get("task", "translate"))
    run = settings.from_dict(kind, _merge_tables(task.default_settings, tables), where=where)
    metric = run.train.metric or task.choose_metric(run)
    if metric not in task.metrics:
        known = " or ".join(task.metrics)
        raise TrainError(f"`train.metric` must be {known} for --task {run.task}, but is {metric}")
    build_model_config(requested, task.placeholder_config(PLACEHOLDER_VOCAB, requested), where)
    return replace(run, train=replace(run.train, metric=metric))


def build_model_config(requested: UserSettings, preset: M, where: str = "run.toml") -> M:
    """Apply the requested settings to a preset; its vocabulary stays that of the tokenizer."""
    table = {name: value for name, value in requested.get("model", {}).items() if name not in DATA_DERIVED_FIELDS}
    merged = _merge_tables(settings.to_dict(preset), table)
    try:
        config = settings.from_dict(RUN_CLASSES[type(preset)], {"model": merged}, where=where).model
        assert isinstance(config, type(preset))
        return config
    except settings.SettingsError:
        raise
    except ValueError as error:
        raise settings.SettingsError(f"{where}: {error}") from error


def set_path(tables: UserSettings, path: list[str], value: Any) -> None:
    """Set a value in nested tables; `path` is ["train", "lr"]."""
    for name in path[:-1]:
        tables = tables.setdefault(name, {})
    tables[path[-1]] = list(value) if isinstance(value, tuple) else value


def _set_layer_kinds(requested: UserSettings) -> None:
    """State the kinds of layers of `arch`, by which the keys of `model` are validated; raise if `model` has others."""
    arch = str(requested.get("arch"))
    is_translator = requested.get("task", "translate") == "translate"
    if arch in presets.ARCHS and is_translator and isinstance(requested.setdefault("model", {}), dict):
        config = presets.ARCHS[arch](PLACEHOLDER_VOCAB, "tiny")
        for name, layers in (("encoder", config.encoder), ("decoder", config.decoder)):
            if not isinstance(table := requested["model"].setdefault(name, {}), dict):
                continue
            table.setdefault("kind", layers.kind)
            for key in ("kind", "attention"):
                value, expected = table.get(key), getattr(layers, key, None)
                if value not in (None, expected) and (key == "kind" or "none" in (value, expected)):
                    raise TrainError(f"`arch` must match `model.{name}.{key}`={value}, but is {arch}; leave one out")


def _expand_stack_settings(requested: UserSettings, where: str, run_class: type[RunConfig]) -> None:
    """Expand `model.dropout` to all stacks; a setting of one stack takes precedence."""
    model = requested.get("model")
    if isinstance(model, dict):
        for name in [name for name in model if _is_stack_field(name, where)]:
            value = model.pop(name)
            for stack in get_stack_names(run_class):
                if isinstance(table := model.setdefault(stack, {}), dict):
                    table.setdefault(name, value)


def get_stack_names(run_class: type[RunConfig]) -> tuple[str, ...]:
    return ("encoder", "decoder") if run_class is RUN_CLASSES[Seq2SeqConfig] else ("stack",)


MODEL_FIELDS = {field.name for config in RUN_CLASSES for field in fields(config)}


def _is_stack_field(name: str, where: str) -> bool:
    near = get_close_matches(name, STACK_FIELDS)
    if near and near[0] != name and name not in MODEL_FIELDS:
        raise settings.SettingsError(f"{where}: unknown key `model.{name}`; did you mean `model.{near[0]}`?")
    return name in STACK_FIELDS


def _merge_tables(base: UserSettings, table: UserSettings) -> UserSettings:
    """Merge `table` into `base`; a table of another `kind` replaces the old one."""
    merged = dict(base)
    for name, value in table.items():
        old = merged.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and value.get("kind", old.get("kind")) == old.get("kind"):
            value = _merge_tables(old, value)
        merged[name] = value
    return merged


def merge_with_previous(requested: UserSettings, previous: UserSettings, resolved: UserSettings) -> UserSettings:
    """Give settings that are omitted, or repeated as resolved in `run.toml`, the values of the run that is resumed."""
    values, changed = flatten_settings(resolved), UserSettings()
    for path, value in flatten_settings(requested).items():
        if value != values.get(path):
            set_path(changed, path.split("."), value)
    return _merge_tables(previous, changed)


def diff_settings(previous: UserSettings, current: UserSettings) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ: path -> (old, new), None if not set."""
    old, new = flatten_settings(previous), flatten_settings(current)
    return {path: (old.get(path), new.get(path)) for path in {**old, **new} if old.get(path) != new.get(path)}


def flatten_settings(tables: UserSettings, prefix: str = "") -> dict[str, Any]:
    """Return every setting by its path, such as `train.lr`."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        path = f"{prefix}{name}"
        flat |= flatten_settings(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat
