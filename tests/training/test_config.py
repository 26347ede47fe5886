"""Settings are read from a file, flags and `--set`, in this order; errors are reported; a resolved run round-trips
through its file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from attent import settings
from attent.models import presets
from attent.models.config import Seq2SeqConfig
from attent.training.autoconfig import COMPILE_MIN_STEPS, CPU_MINUTES, DataSize, fill_train_config
from attent.training.config import (
    RUN_CLASSES,
    RunConfig,
    UserSettings,
    build_model_config,
    build_run_config,
    diff_settings,
    read_run,
    read_user_settings,
)
from attent.training.run_options import MINIMUMS, DataConfig, DecodeConfig, TrainConfig, TrainError
from attent.training.tasks.translation import TranslationTask

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED_RUNS = sorted((ROOT / "runs").glob("*.toml"))
assert PUBLISHED_RUNS


def read_overrides(*overrides: str, file: Path | None = None, **flags: object) -> UserSettings:
    return read_user_settings(file, {name.replace("__", "."): value for name, value in flags.items()}, overrides)


def test_set_overrides_flags_and_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 1\nseed = 1\nlr = 1.0\n")
    settings = read_overrides("train.lr=3e-4", file=file, train__seed=2, train__lr=0.5)
    assert settings["train"] == {"steps": 1, "seed": 2, "lr": 3e-4}


@pytest.mark.parametrize("file", PUBLISHED_RUNS, ids=lambda file: file.stem)
def test_published_runs_have_current_settings(file: Path) -> None:
    """An unknown key or an invalid value raises."""
    assert read_overrides(file=file)["data"]["train"]


def test_only_explicit_settings_are_returned() -> None:
    assert read_overrides() == {}
    assert read_overrides(train__steps=5, data__train=("a.tsv", "b.tsv")) == {
        "train": {"steps": 5},
        "data": {"train": ["a.tsv", "b.tsv"]},
    }


@pytest.mark.parametrize("how", ["set", "flag", "file"])
def test_model_settings_apply_to_both_stacks(tmp_path: Path, how: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\ndropout = 0.25\n")
    settings = {
        "set": lambda: read_overrides("model.dropout=0.25"),
        "flag": lambda: read_overrides(model__dropout=0.25),
        "file": lambda: read_overrides(file=file),
    }[how]()
    model = build_model_config(settings, presets.tiny(100))
    assert model.encoder.dropout == model.decoder.dropout == 0.25
    assert replace_dropout(model, presets.tiny(100)) == presets.tiny(100)


def replace_dropout(model: Seq2SeqConfig, like: Seq2SeqConfig) -> Seq2SeqConfig:
    encoder = replace(model.encoder, dropout=like.encoder.dropout)
    return replace(model, encoder=encoder, decoder=replace(model.decoder, dropout=like.decoder.dropout))


def test_settings_of_one_stack_override_the_models(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\ndropout = 0.25\n[model.decoder]\ndropout = 0.5\n")
    model = build_model_config(read_overrides(file=file), presets.tiny(100))
    assert (model.encoder.dropout, model.decoder.dropout) == (0.25, 0.5)
    model = build_model_config(read_overrides("model.dropout=0.1", "model.encoder.dropout=0.2"), presets.tiny(100))
    assert (model.encoder.dropout, model.decoder.dropout) == (0.2, 0.1)


def test_another_position_scheme_starts_from_its_defaults() -> None:
    settings = read_overrides('model.positions.kind="rotary"')
    model = build_model_config(settings, presets.tiny(100))
    assert model.encoder.positions == model.decoder.positions != presets.tiny(100).encoder.positions


def test_the_vocabulary_size_is_always_the_tokenizers() -> None:
    assert build_model_config(read_overrides("model.vocab=77"), presets.tiny(100)).vocab == 100


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stps=3", "steps"),
        ("trian.steps=3", "train"),
        ("model.dropuot=0.1", "dropout"),
        ("model.encoder.widht=64", "width"),
        ("train.steps=0", "`steps` must be 1 or more, but is 0"),
        ("train.lr=-1.0", "`lr` must be greater than 0"),
        ("train.label_smoothing=1.0", "`label_smoothing` must be at least 0 and less than 1"),
        ("train.optimizer=sgd", "adamw"),
        ("data.hold_out=-1", "`hold_out` must be 0 or more"),
        ("decode.beam_size=0", "`beam_size` must be 1 or more"),
        ("model.width=63", "63"),
        ("steps", "="),
    ],
)
def test_invalid_overrides_are_refused(override: str, message: str) -> None:
    with pytest.raises(settings.SettingsError) as caught:
        read_overrides(override)
    assert message in str(caught.value)


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nstepps = 3\n")
    with pytest.raises(settings.SettingsError, match=r"mine\.toml.*steps"):
        read_overrides(file=file)


def test_changed_settings_are_listed() -> None:
    before = read_overrides("model.dropout=0.1", train__steps=5, data__train=("a",))
    now = read_overrides("model.dropout=0.2", train__steps=5, train__seed=3, data__train=("a", "b"))
    assert diff_settings(before, now) == {
        "model.encoder.dropout": (0.1, 0.2),
        "model.decoder.dropout": (0.1, 0.2),
        "train.seed": (None, 3),
        "data.train": (["a"], ["a", "b"]),
    }
    assert diff_settings(now, now) == {}


def test_a_resolved_run_round_trips_through_its_file(tmp_path: Path) -> None:
    overrides = read_overrides(
        "model.dropout=0.15", "data.filters.script=false", 'data.tokenizer.symbols=["%s"]', train__steps=9,
        train__freeze=("encoder", "*norm*"), data__train=("own.tmx:3", "b"), data__src="en,de", init_from="some/where",
    )  # fmt: skip
    run = build_run_config(overrides, "--set")
    model = build_model_config(overrides, presets.tiny(300))
    train = fill_train_config(
        run.train, "tiny", model, DataSize(num_examples=100, num_tokens=1000), torch.device("cpu")
    )
    run = replace(run, size="tiny", model=model, train=train, data=replace(run.data, layout="bucketed"))
    (tmp_path / "run.toml").write_text(settings.to_toml(run), encoding="utf-8")
    assert read_run(tmp_path / "run.toml") == run


def test_the_file_written_by_a_run_can_be_used_again(tmp_path: Path) -> None:
    model = presets.small(300)
    train = fill_train_config(
        TrainConfig(), "small", model, DataSize(num_examples=100, num_tokens=1000), torch.device("cpu")
    )
    run = RUN_CLASSES[Seq2SeqConfig](
        size="small", model=model, train=train, data=DataConfig(train=("a",)), decode=DecodeConfig(beam_size=2)
    )
    (tmp_path / "run.toml").write_text(settings.to_toml(run), encoding="utf-8")
    again = read_overrides(file=tmp_path / "run.toml")
    assert build_run_config(again, "run.toml").train == replace(train, metric="chrf")
    assert build_model_config(again, presets.tiny(300)) == model


# ---- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ("mlm", "data.tgt=de"),
        ("lm", "decode.beam_size=2"),
        ("spans", "data.read_options.fuzzy=true"),
        ("classify", "train.valid_sentences=10"),
        ("images", "data.max_tokens=64"),
        ("images", "data.tokenizer.vocab=500"),
        ("translate", "data.images.flip=0"),
    ],
)
def test_settings_that_a_task_ignores_are_refused(tmp_path: Path, task: str, setting: str) -> None:
    with pytest.raises(TrainError, match=f"`{setting.partition('=')[0]}` has no effect with --task {task}; leave it"):
        read_overrides(setting, task=task)
    file = tmp_path / "run.toml"
    file.write_text(settings.to_toml(read_like(task)), encoding="utf-8")
    assert read_overrides(file=file)["task"] == task  # the file lists all settings, at their defaults


def read_like(task: str) -> RunConfig:
    run = build_run_config({"task": task}, "--set")
    return replace(run, data=replace(run.data, layout="packed"), train=replace(run.train, rdrop=0.0))


def test_the_patch_size_is_checked_once_the_image_size_is_known() -> None:
    assert read_overrides("model.patch_size=7", task="images")["model"] == {"patch_size": 7}
    with pytest.raises(settings.SettingsError, match="`image_size` must be a multiple of `patch_size`=7, but is 32"):
        read_overrides("model.patch_size=7", "model.image_size=32", task="images")


def test_image_classification_does_not_stop_early() -> None:
    assert build_run_config({"task": "images"}, "--set").train.patience == 0
    assert build_run_config({"task": "mlm"}, "--set").train.patience is None


# ---- minutes or steps ------------------------------------------------------------------------------------------------


def test_minutes_and_steps_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"`minutes` and `steps` must not both be given"):
        read_overrides("train.steps=3", train__minutes=2.0)
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 7\nminutes = 2.0\n")
    assert read_overrides(file=file)["train"] == {"steps": 7}, "the file of a run with --minutes: its steps are decided"
    assert read_overrides(file=file, train__minutes=3.0)["train"] == {"minutes": 3.0}
    assert read_overrides("train.minutes=3", file=file)["train"] == {"minutes": 3.0}
    assert read_overrides(file=file, train__steps=9)["train"] == {"steps": 9}


@pytest.mark.parametrize("name", ["minutes", "lr", "eps"])
def test_some_numbers_must_be_greater_than_zero(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be greater than 0, but is 0"):
        TrainConfig(**{name: 0})


@pytest.mark.parametrize("name", ["label_smoothing", "valid_share", "save_share"])
def test_rates_are_less_than_one(name: str) -> None:
    for value in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 0 and less than 1, but is {value}"):
            TrainConfig(**{name: value})
    assert getattr(TrainConfig(**{name: 0.0}), name) == 0.0


@pytest.mark.parametrize(("minimum", "names"), MINIMUMS.items())
def test_numbers_at_their_minimum_are_accepted_and_below_refused(minimum: int, names: str) -> None:
    for name in names.split():
        assert getattr(TrainConfig(**{name: minimum}), name) == minimum
        with pytest.raises(ValueError, match=f"`{name}` must be {minimum} or more, but is {minimum - 1}"):
            TrainConfig(**{name: minimum - 1})


def test_help_and_documentation_state_defaults_and_metrics() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    rows = {
        name: next(row for row in page.splitlines() if row.startswith(f"| `--{name}"))
        for name in ("minutes", "compile", "metric")
    }
    helps = get_type_hints(TrainConfig, include_extras=True)
    for name, default in (("minutes", f"at most {CPU_MINUTES:g}"), ("compile", f"from {COMPILE_MIN_STEPS:,} steps")):
        for text in (rows[name], helps[name].__metadata__[0]):
            assert default in text
            assert "translation model" in text
    assert [name for name in TranslationTask.metrics if f"`{name}" not in rows["metric"]] == []
