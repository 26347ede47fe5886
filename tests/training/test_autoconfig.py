"""Automatic settings: size and schedule from the amount of data and the device, with reasons."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from attent.data.batch_plan import Layout
from attent.models import Seq2SeqConfig, presets
from attent.training import autoconfig
from attent.training.autoconfig import DataSize, choose_model, describe_model, describe_schedule, fill_train_config
from attent.training.config import RunConfig, TrainError, read_user_settings
from attent.training.optimizer import compute_paper_lr
from attent.training.run_options import Arch, DataConfig, Size, TrainConfig
from tests.text.corpus import tokenizer

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def skip_speed_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not measure the speed of this machine."""
    monkeypatch.setattr(autoconfig, "pick_precision", lambda device: "bfloat16" if device.type == "cuda" else "float32")


def amount(pairs: int) -> DataSize:
    return DataSize(num_examples=pairs, num_tokens=30 * pairs)


@pytest.mark.parametrize(
    ("pairs", "kind", "size", "dropout"),
    [
        (1_000, "cpu", "tiny", 0.1),
        (29_000, "cuda", "small", 0.3),
        (200_000, "cuda", "small", 0.3),
        (600_000, "cuda", "small", 0.2),
        (4_000_000, "cuda", "base", 0.1),
        (4_000_000, "cpu", "tiny", 0.1),
        (30_000_000, "cuda", "base", 0.1),
    ],
)
def test_the_size_and_dropout_come_from_the_amount_of_data(pairs: int, kind: str, size: str, dropout: float) -> None:
    chosen, model, reason = choose_model(RunConfig(), {}, amount(pairs), tokenizer(), kind)
    assert chosen == size
    assert model.encoder.dropout == model.decoder.dropout == dropout
    assert model.encoder.width == getattr(presets, size)(9).encoder.width
    assert f"{pairs:,} pairs" in reason
    assert f"dropout {dropout:g}" in reason


@pytest.mark.parametrize(
    ("pairs", "limit", "chosen", "reason"),
    [
        (600_000, {"steps": 9}, "small", "a larger model would overfit"),
        (600_000, {"minutes": 61.0}, "small", "a larger model would overfit"),
        (600_000, {"minutes": 60.0}, "tiny", "a larger model would take too long on a CPU"),
        (3_000_000, {"minutes": 600.0}, "small", "a larger model would take too long on a CPU"),
        (99_999, {"minutes": 600.0}, "tiny", "a larger model would take too long on a CPU"),
    ],
)
def test_a_cpu_trains_a_model_that_fits_the_time(pairs: int, limit: dict[str, Any], chosen: str, reason: str) -> None:
    run = RunConfig(train=TrainConfig(**limit))
    size, _, given = choose_model(run, {}, amount(pairs), tokenizer(), "cpu")
    assert size == chosen
    assert given.startswith(f"for {pairs:,} pairs: {reason}; dropout")


def test_requested_settings_are_kept() -> None:
    requested = read_user_settings(None, {"model.dropout": 0.05}, [])
    size, model, reason = choose_model(RunConfig(size="base"), requested, amount(1000), tokenizer(), "cpu")
    assert size == "base"
    assert model.encoder.dropout == 0.05
    assert reason == "as requested"


def test_a_requested_shape_is_not_said_to_follow_from_the_data() -> None:
    requested = {"model": {"encoder": {"layers": 6}, "decoder": {"layers": 2}}}
    _, _, reason = choose_model(RunConfig(), requested, amount(600_000), tokenizer(), "cpu")
    assert reason.startswith("as requested; dropout")


def test_the_model_fits_the_tokenizer() -> None:
    for joint in (True, False):
        fitted = tokenizer(joint=joint)
        _, model, _ = choose_model(RunConfig(), {}, amount(1000), fitted, "cpu")
        assert (model.vocab, model.output_vocab) == (fitted.source.size, fitted.target.size)
        assert (model.start_id, model.end_id) == (fitted.target.start, fitted.target.end)
        assert model.share_embeddings == joint


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("pairs", [10, 29_000, 5_000_000, 10**9])
@pytest.mark.parametrize("finetune", [False, True])
def test_no_setting_is_left_open(device: torch.device, pairs: int, finetune: bool) -> None:
    optional = {"threads", "device", "metric", "minutes", "ctc"} | ({"micro_batch_tokens"} if device == GPU else set())
    train = fill_train_config(TrainConfig(), "small", presets.small(100), amount(pairs), device, finetune=finetune)
    assert {field.name for field in fields(train) if getattr(train, field.name) is None} <= optional
    assert train.steps
    assert train.warmup
    assert train.valid_every
    assert train.save_every
    assert train.warmup < train.steps <= autoconfig.MAX_STEPS
    assert train.valid_every <= train.steps


def test_given_values_are_unchanged() -> None:
    requested = TrainConfig(
        steps=7, batch_tokens=8, lr=0.9, warmup=0, save_every=3, valid_every=2, precision="bfloat16", compile=True,
        micro_batch_tokens=5, rdrop=4.0, clip_norm=0.5, valid_share=0.3, save_share=0.2, schedule="inverse_sqrt",
        patience=3,
    )  # fmt: skip
    for finetune in (False, True):
        assert fill_train_config(requested, "tiny", presets.tiny(100), amount(100), CPU, finetune=finetune) == requested


def test_the_learning_rate_is_the_papers_and_doubled_for_small_models() -> None:
    for preset, times in ((presets.base(100), 1), (presets.small(100), 2)):
        train = fill_train_config(TrainConfig(warmup=4000), "base", preset, amount(5_000_000), GPU)
        assert train.lr == pytest.approx(times * compute_paper_lr(preset.encoder.width, 4000), rel=5e-3)


def test_the_learning_rate_does_not_jump_with_the_steps() -> None:
    rates = [
        fill_train_config(TrainConfig(steps=steps, warmup=400), "tiny", presets.tiny(100), amount(100), CPU).lr or 0.0
        for steps in (1, 1_000, 1_999, 2_000, 9_000)
    ]
    assert rates == pytest.approx([rates[0], 1.5 * rates[0], 2 * rates[0], 2 * rates[0], 2 * rates[0]], rel=5e-3)


def test_fine_tuning_takes_fewer_steps() -> None:
    scratch = fill_train_config(TrainConfig(), "small", presets.small(100), amount(300_000), GPU)
    finetune = fill_train_config(TrainConfig(), None, presets.small(100), amount(300_000), GPU, finetune=True)
    assert finetune.steps
    assert scratch.steps
    assert finetune.steps < scratch.steps / 5
    assert finetune.lr == autoconfig.FINETUNE_LR


@pytest.mark.parametrize(
    ("steps", "requested", "compiled"), [(9_999, None, False), (10_000, None, True), (9, True, True)]
)
def test_only_long_runs_are_compiled_by_default(steps: int, requested: bool | None, compiled: bool) -> None:
    options = TrainConfig(steps=steps, compile=requested)
    assert fill_train_config(options, "small", presets.small(100), amount(29_000), GPU).compile is compiled
    assert not fill_train_config(replace(options, compile=None), "small", presets.small(100), amount(9), CPU).compile


def test_there_is_a_minimum_of_steps() -> None:
    few = fill_train_config(TrainConfig(), "tiny", presets.tiny(100), amount(10), CPU)
    assert few.steps == autoconfig.MIN_STEPS


def test_choices_are_described() -> None:
    run = RunConfig()
    size, model, reason = choose_model(run, {}, amount(29_000), tokenizer(), "cpu")
    train = fill_train_config(replace(run.train, accumulate=2), size, model, amount(29_000), CPU)
    schedule = describe_schedule(train, autoconfig.count_batches(train, amount(29_000)), "greedy")
    text = "\n".join([describe_model(replace(run, size=size, model=model, train=train), reason), *schedule])
    for part in (
        "model: tiny, 4+4 layers, width 128", f"vocabulary {model.vocab}", "for 29,000 pairs", "dropout 0.1",
        "schedule: adam", "batches of 2,048 tokens x 2", f"at most {train.steps:,} steps",
        f"validate every {train.valid_every:,} steps (greedy)",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("device", "finetune", "is_on"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_new_models_on_a_gpu_are_trained_with_augmentation(device: str, finetune: bool, is_on: bool) -> None:
    config = DataConfig(augment=autoconfig.choose_augmentation(device, finetune=finetune))
    assert config.augment_rates == (DataConfig(augment=()).augment_rates if is_on else {})
    assert config.augment is not None
    assert DataConfig(augment=config.augment) == config  # as run.toml has it


def list_choices(train: TrainConfig) -> tuple[object, ...]:
    return (
        train.batch_tokens, train.steps, train.warmup, train.lr, train.valid_every, train.save_every, train.valid_share,
        train.save_share, train.schedule, train.rdrop, train.clip_norm, train.patience, train.micro_batch_tokens,
        train.precision, train.compile,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pairs", "size", "device", "finetune", "expected"),
    [
        (29_000, "tiny", CPU, False,
         (2_048, 25_489, 4_000, 0.0028, 510, 510, 0.1, 0.1, "cosine", 0.0, 0.0, 0, 2_048, "float32", False)),
        (29_000, "small", GPU, False,
         (8_192, 16_993, 4_000, 0.00198, 340, 340, 0.1, 0.1, "cosine", 5.0, 0.0, 0, None, "bfloat16", True)),
        (4_000_000, "base", GPU, False,
         (25_600, 37_500, 4_000, 0.000699, 750, 750, 0.1, 0.1, "cosine", 0.0, 0.0, 0, None, "bfloat16", True)),
        (10**9, "big", GPU, False,
         (25_600, 300_000, 4_000, 0.000494, 5_000, 5_000, 0.1, 0.1, "cosine", 0.0, 0.0, 0, None, "bfloat16", True)),
        (10, "tiny", CPU, True,
         (2_048, 200, 50, 0.0002, 10, 10, 0.1, 0.1, "cosine", 0.0, 0.0, 10, 2_048, "float32", False)),
        (29_000, None, GPU, True,
         (8_192, 1_700, 425, 0.0002, 34, 34, 0.1, 0.1, "cosine", 0.0, 0.0, 10, None, "bfloat16", False)),
    ],
)  # fmt: skip
def test_the_choices_of_a_run(
    pairs: int, size: Size | None, device: torch.device, finetune: bool, expected: tuple[object, ...]
) -> None:
    model = getattr(presets, size or "small")(100)
    train = fill_train_config(TrainConfig(), size, model, amount(pairs), device, finetune=finetune)
    assert list_choices(train) == expected


@pytest.mark.parametrize("arch", ["lstm", "conv"])
def test_other_architectures_have_their_own_learning_rate_and_clip_gradients(arch: Arch) -> None:
    model = presets.ARCHS[arch](100, "tiny")
    train = fill_train_config(TrainConfig(steps=20_000), "tiny", model, amount(100), GPU)
    assert (train.lr, train.clip_norm, train.compile) == (2e-3, 1.0, False)
    wide = fill_train_config(TrainConfig(steps=20_000), "base", presets.ARCHS[arch](100, "base"), amount(100), GPU)
    assert wide.lr == 1e-3
    requested = TrainConfig(steps=20_000, clip_norm=0.0, compile=True, lr=0.5)
    train = fill_train_config(requested, "tiny", model, amount(100), GPU)
    assert (train.lr, train.clip_norm, train.compile) == (0.5, 0.0, True)


@pytest.mark.parametrize(
    ("arch", "requested", "device", "layout"),
    [
        ("transformer", None, GPU, "packed"), ("transformer", None, CPU, "bucketed"), ("lstm", None, GPU, "fixed"),
        ("transformer", "packed", CPU, "packed"), ("lstm", "bucketed", GPU, "bucketed"), ("lstm", "packed", GPU, None),
    ],
)  # fmt: skip
def test_rows_are_packed_where_layers_and_device_allow_it(
    arch: Arch, requested: Layout | None, device: torch.device, layout: Layout | None
) -> None:
    config = presets.ARCHS[arch](100, "tiny")
    if layout is not None:
        assert autoconfig.choose_layout(requested, config, device) == layout
    else:
        message = f"`data.layout` must be bucketed or fixed for --arch lstm, but is {requested}"
        with pytest.raises(TrainError, match=message):
            autoconfig.choose_layout(requested, config, device)


def test_fine_tuning_keeps_the_shape_and_the_vocabulary() -> None:
    config = presets.tiny(100)

    def build(requested: dict[str, Any], *vocab_sizes: int) -> Seq2SeqConfig:
        return autoconfig.build_finetune_config(config, requested, vocab_sizes, "runs/old")

    encoder = {"encoder": {"dropout": 0.25, "layers": config.encoder.layers}}
    changed = build({"model": encoder}, 100, 100)
    assert (changed.encoder.dropout, changed.encoder.layers) == (0.25, config.encoder.layers)
    for requested, path in (
        ({"size": "big"}, "size"),
        ({"arch": "lstm"}, "arch"),
        ({"data": {"tokenizer": {"vocab": 9}}}, r"data\.tokenizer\.vocab"),
        ({"model": {"encoder": {"layers": 9}}}, r"model\.encoder\.layers"),
    ):
        with pytest.raises(TrainError, match=f"`{path}` cannot be changed with --from runs/old: fine-tuning keeps"):
            build(requested, 100, 100)
    for sizes, text in (((101, 100), "101 and 100"), ((100, 101), "100 and 101")):
        with pytest.raises(
            TrainError, match=f"does not match its model: {text} subwords for embeddings of 100 and 100"
        ):
            build({}, *sizes)


@pytest.mark.parametrize(
    ("train", "batches", "expected"),
    [
        (
            TrainConfig(
                steps=1_000, batch_tokens=4_096, schedule="cosine", lr=3e-4, warmup=1_200, valid_every=1_500,
                save_every=2_500, patience=7, rdrop=5.0,
            ),
            100,
            [
                (
                    "schedule: adam, cosine, learning rate up to 0.0003 after 1,200 steps, batches of 4,096 tokens, "
                    "at most 1,000 steps (about 10 epochs), R-Drop 5"
                ),
                "validate every 1,500 steps, checkpoint every 2,500; stops after 7 without improvement",
            ],
        ),
        (
            TrainConfig(
                steps=499, batch_tokens=64, accumulate=2, schedule="inverse_sqrt", lr=1.0, warmup=0, valid_every=10,
                save_every=10, patience=0, rdrop=0.0,
            ),
            100,
            [
                (
                    "schedule: adam, inverse_sqrt, learning rate up to 1 after 0 steps, batches of 64 tokens x 2, "
                    "at most 499 steps (about 10.0 epochs)"
                ),
                "validate every 10 steps, checkpoint every 10",
            ],
        ),
    ],
)  # fmt: skip
def test_the_schedule_is_described(train: TrainConfig, batches: int, expected: list[str]) -> None:
    assert list(autoconfig.describe_schedule(train, batches)) == expected
    first, second = autoconfig.describe_schedule(train, 0, "greedy", "batches of 8 images")
    assert (
        f"steps, batches of 8 images, at most {train.steps:,} steps (about {train.steps * train.accumulate:,} ep"
        in first
    )
    assert second.startswith(f"validate every {train.valid_every:,} steps (greedy), checkpoint")


# ---- a time budget ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "scoring", "share", "steps"),
    [
        (1000, 0, 0.1, 436),  # 970 seconds, of which 873 are for steps of 2 seconds
        (1000, 100, 0.1, 392),
        (1000, 400, 0.1, 261),
        (1000, 900, 0.1, 261),  # an estimate of the scores takes 40% at most
        (1000, 0, 0.5, 242),
        (1000, 0, None, 436),
        (1000, 0, 0.0, 436),
        (1, 0, 0.1, 1),
        (-5, 3, 0.1, 1),
    ],
)
def test_steps_follow_from_the_time(seconds: float, scoring: float, share: float | None, steps: int) -> None:
    assert autoconfig.plan_steps(seconds, 2.0, scoring, share) == steps


@pytest.mark.parametrize(
    ("requested", "finetune", "expected"),
    [
        (TrainConfig(), False, ("cosine", 0)),
        (TrainConfig(), True, ("cosine", 10)),
        (TrainConfig(minutes=3), True, ("cosine", 0)),
        (TrainConfig(schedule="inverse_sqrt"), False, ("inverse_sqrt", 10)),
        (TrainConfig(schedule="inverse_sqrt", patience=4, minutes=3), False, ("inverse_sqrt", 4)),
    ],
)
def test_nothing_stops_before_the_learning_rate_is_zero(
    requested: TrainConfig, finetune: bool, expected: tuple[str, int]
) -> None:
    train = fill_train_config(requested, "tiny", presets.tiny(100), amount(100), CPU, finetune=finetune)
    assert (train.schedule, train.patience) == expected


@pytest.mark.parametrize(
    ("pairs", "device", "finetune", "rdrop"),
    [(99_999, GPU, False, 5.0), (100_000, GPU, False, 0.0), (99, CPU, False, 0.0), (99, GPU, True, 0.0)],
)
def test_rdrop_is_for_little_data_on_a_gpu(pairs: int, device: torch.device, finetune: bool, rdrop: float) -> None:
    model = presets.small(100)
    assert fill_train_config(TrainConfig(), "small", model, amount(pairs), device, finetune=finetune).rdrop == rdrop
    requested = TrainConfig(rdrop=2.0)
    assert fill_train_config(requested, "small", model, amount(pairs), device, finetune=finetune).rdrop == 2.0


@pytest.mark.parametrize(
    ("requested", "share"),
    [(TrainConfig(), 0.1), (TrainConfig(valid_every=5), 0.0), (TrainConfig(valid_every=5, valid_share=0.2), 0.2)],
)
def test_validations_are_limited_unless_their_interval_is_given(requested: TrainConfig, share: float) -> None:
    train = fill_train_config(requested, "tiny", presets.tiny(100), amount(100), CPU)
    assert train.valid_share == share


@pytest.mark.parametrize(
    ("requested", "share"),
    [
        (TrainConfig(), 0.1),
        (TrainConfig(save_every=5), 0.0),
        (TrainConfig(valid_every=5), 0.0),
        (TrainConfig(save_every=5, save_share=0.2), 0.2),
    ],
)
def test_checkpoints_are_limited_unless_their_interval_is_given(requested: TrainConfig, share: float) -> None:
    train = fill_train_config(requested, "tiny", presets.tiny(100), amount(100), CPU)
    assert train.save_share == share


@pytest.mark.parametrize(
    ("pairs", "gpu", "cpu"),
    [
        (99_999, ("small", 160), ("tiny", 60)), (100_000, ("small", 60), ("small", 25)),
        (499_999, ("small", 60), ("small", 25)), (500_000, ("small", 25), ("small", 25)),
        (1_999_999, ("small", 25), ("small", 25)), (2_000_000, ("base", 8), ("small", 8)),
        (19_999_999, ("base", 8), ("small", 8)), (20_000_000, ("base", 3), ("small", 3)),
    ],
)  # fmt: skip
def test_recipes_change_exactly_at_their_limits(pairs: int, gpu: tuple[str, int], cpu: tuple[str, int]) -> None:
    assert autoconfig.choose_recipe(pairs, "cuda")[:2] == gpu
    assert autoconfig.choose_recipe(pairs, "cpu")[:2] == cpu
