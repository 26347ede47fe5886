"""Defaults chosen from the amount of data and the device by few rules of thumb, whose origin docs/log.md tells."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from attent import settings
from attent.data import augment
from attent.data.batch_plan import Layout
from attent.formatting import format_count
from attent.models import ModelConfig, Seq2SeqConfig, presets
from attent.models.config import get_stack_configs
from attent.nn import ImageConfig, StackConfig
from attent.text.tokenizer import Tokenizer
from attent.training import config as run_config
from attent.training.config import M, RunConfig, Size, TrainConfig, TrainError, UserSettings
from attent.training.hardware import pick_precision
from attent.training.optimizer import compute_paper_lr

T = TypeVar("T")


class Recipe(NamedTuple):
    size: Size
    epochs: int  # until such a model stops improving
    dropout: float
    rdrop: float


# By the minimum number of pairs. R-Drop and many epochs cost a GPU minutes where data is scarce.
GPU_RECIPES: tuple[tuple[int, Recipe], ...] = (
    (0, Recipe("small", 160, dropout=0.3, rdrop=5.0)),
    (100_000, Recipe("small", 60, dropout=0.3, rdrop=0.0)),
    (500_000, Recipe("small", 25, dropout=0.2, rdrop=0.0)),
    (2_000_000, Recipe("base", 8, dropout=0.1, rdrop=0.0)),
    (20_000_000, Recipe("base", 3, dropout=0.1, rdrop=0.0)),
)
# Half an hour on a CPU is too few epochs to overfit.
CPU_RECIPES: tuple[tuple[int, Recipe], ...] = (
    (0, Recipe("tiny", 60, dropout=0.1, rdrop=0.0)),
    (100_000, Recipe("small", 25, dropout=0.1, rdrop=0.0)),
    (2_000_000, Recipe("small", 8, dropout=0.1, rdrop=0.0)),  # base would take weeks
    (20_000_000, Recipe("small", 3, dropout=0.1, rdrop=0.0)),
)
CPU_MINUTES = 30.0  # at most, unless --minutes or --steps is given
TINY_MINUTES = 60.0  # on a CPU, for which few epochs of `small` fit: after 26 minutes `tiny` was ahead (docs/log.md)
MIN_STEPS = 2_000  # with fewer, no model has learned much, however few the pairs are
MAX_STEPS = 300_000  # the paper's big model
NUM_VALIDATIONS = 50
DEFAULT_PATIENCE = 10
BATCH_TOKENS_BY_SIZE: dict[Size, int] = {"tiny": 4_096, "small": 8_192, "base": 25_600, "big": 25_600}
COMPILE_MIN_STEPS = 10_000  # compiling takes 5 to 30 s, and `small` with R-Drop was no faster compiled (docs/log.md)
FINETUNE_DIVISOR, FINETUNE_LR = 10, 2e-4  # fine-tuning takes a tenth of the epochs and of `MIN_STEPS`
NON_TRANSFORMER_LR, NON_TRANSFORMER_CLIP_NORM = 1e-3, 1.0  # of LSTMs and convolutions; twice the rate if narrow
FIXED_SETTINGS = ("arch", "size", "data.tokenizer.vocab")  # besides the model's shape, when fine-tuning
CPU_BATCH_TOKENS = 4_096  # of language models and classifiers; with more, there would be too few updates a day
CPU_MICRO_BATCH_TOKENS = 2_048  # also the batches of translators: smaller ones are slower, larger ones fewer updates

MEASURE_SECONDS = 2.0
BUDGET_MARGIN = 0.97  # of --minutes: checkpoints, curves and the model card
MAX_SCORING_SHARE = 0.4  # of --minutes: an estimate from an untrained model must not take more
VALID_SHARE = SAVE_SHARE = 0.1  # of the time, unless the user chooses when to validate and when to save


@dataclass(frozen=True, kw_only=True)
class DataSize:
    num_examples: int
    num_tokens: int  # of the larger side, per epoch


def look_up(thresholds: Sequence[tuple[int, T]], count: int) -> T:
    """The value of the largest threshold that `count` reaches."""
    return next(value for minimum, value in reversed(thresholds) if count >= minimum)


def choose_recipe(num_pairs: int, device_type: str) -> Recipe:
    return look_up(CPU_RECIPES if device_type == "cpu" else GPU_RECIPES, num_pairs)


def choose_augmentation(device_type: str, *, finetune: bool) -> tuple[str, ...]:
    """All kinds for a new model on a GPU, where they cost nothing (docs/log.md); a CPU trains for too few epochs."""
    return augment.format_rates({} if finetune or device_type == "cpu" else augment.parse_rates(()))


def choose_model(
    run: RunConfig, requested: UserSettings, data_size: DataSize, tokenizer: Tokenizer, device_type: str
) -> tuple[Size, Seq2SeqConfig, str]:
    num_pairs = data_size.num_examples
    recipe = choose_recipe(num_pairs, device_type)
    minutes = run.train.minutes or (math.inf if run.train.steps else CPU_MINUTES)
    size = run.size or ("tiny" if device_type == "cpu" and minutes <= TINY_MINUTES else recipe.size)
    preset = presets.ARCHS[run.arch or "transformer"](tokenizer.source.size, size)
    preset = fit_to_tokenizer(preset, tokenizer)
    dropout = max(recipe.dropout, preset.encoder.dropout if size == "big" else 0.0)
    encoder, decoder = replace(preset.encoder, dropout=dropout), replace(preset.decoder, dropout=dropout)
    config = run_config.build_model_config(requested, replace(preset, encoder=encoder, decoder=decoder))
    shapes = [[(stack.layers, stack.width) for stack in (each.encoder, each.decoder)] for each in (config, preset)]
    reason = "as requested" if run.size or shapes[0] != shapes[1] else f"for {num_pairs:,} pairs"
    if reason != "as requested" and size != "base":
        too_slow = device_type == "cpu" and size != choose_recipe(num_pairs, "cuda").size
        reason += ": a larger model would take too long on a CPU" if too_slow else ": a larger model would overfit"
    if config.encoder.dropout == dropout:
        reason += f"; dropout {dropout:g}" + (", since few pairs are easily overfitted" if dropout > 0.1 else "")
    return size, config, reason


def fit_to_tokenizer(config: Seq2SeqConfig, tokenizer: Tokenizer) -> Seq2SeqConfig:
    source, target = tokenizer.source, tokenizer.target
    return replace(
        config,
        vocab=source.size,
        target_vocab=None if tokenizer.joint else target.size,
        share_embeddings=tokenizer.joint and config.share_embeddings,
        start_id=target.start,
        end_id=target.end,
    )


def build_finetune_config(config: M, requested: UserSettings, vocab_sizes: tuple[int, ...], origin: str) -> M:
    """Return the config with the requested dropout; `vocab_sizes` are those of its tokenizer, of each side."""
    own = {f"model.{name}": value for name, value in run_config.flatten_settings(settings.to_dict(config)).items()}
    fixed = [
        path
        for path, value in run_config.flatten_settings(requested).items()
        if (path in FIXED_SETTINGS or path.startswith("model."))
        and not path.endswith("dropout")
        and (path, value) not in own.items()
    ]
    if fixed:
        reason = "fine-tuning keeps the shape of the model and its vocabulary"
        raise TrainError(f"`{fixed[0]}` cannot be changed with --from {origin}: {reason}; leave it out")
    sizes = (config.vocab, config.output_vocab) if isinstance(config, Seq2SeqConfig) else (getattr(config, "vocab", 0),)
    if any(ids > rows for ids, rows in zip(vocab_sizes, sizes, strict=False)):
        ids, rows = (" and ".join(f"{size:,}" for size in counts) for counts in (vocab_sizes, sizes))
        problem = f"its tokenizer does not match its model: {ids} subwords for embeddings of {rows}"
        raise TrainError(f"{origin}: {problem}; copy the model again")
    return run_config.build_model_config(requested, config)


def choose_layout(requested: Layout | None, config: ModelConfig, device: torch.device) -> Layout:
    """Packed rows on a GPU; for layers whose state would cross sentences, padded rows in few shapes."""
    stacks = list(get_stack_configs(config).values())
    can_pack = all(isinstance(stack, StackConfig) for stack in stacks)
    if not can_pack and requested == "packed":
        problem = f"must be bucketed or fixed for --arch {stacks[0].kind}, but is {requested}"
        raise TrainError(f"`data.layout` {problem}; leave it out")
    return requested or ("bucketed" if device.type == "cpu" else "packed" if can_pack else "fixed")


def fill_train_config(
    train: TrainConfig,
    size: Size | None,
    model: Seq2SeqConfig,
    data_size: DataSize,
    device: torch.device,
    *,
    finetune: bool = False,
) -> TrainConfig:
    default_batch = CPU_MICRO_BATCH_TOKENS if device.type == "cpu" else BATCH_TOKENS_BY_SIZE[size or "small"]
    batch = train.batch_tokens or default_batch
    recipe = choose_recipe(data_size.num_examples, device.type)
    divisor = FINETUNE_DIVISOR if finetune else 1
    estimate = math.ceil(recipe.epochs / divisor * (data_size.num_tokens / (batch * train.accumulate)))
    steps = train.steps or min(MAX_STEPS, max(MIN_STEPS // divisor, estimate))
    warmup = train.warmup if train.warmup is not None else max(1, min(4_000, steps // 4))
    # Equation 3, without a higher rate after a short warm-up; up to doubled for small models, as in the paper's own
    # code (tensor2tensor), given enough steps.
    default_lr = compute_paper_lr(model.encoder.width, max(warmup, 1_600))
    default_lr *= 1 + min(1.0, steps / MIN_STEPS) if model.encoder.width < 512 else 1
    if not isinstance(model.encoder, StackConfig):
        default_lr = NON_TRANSFORMER_LR * (2 if model.encoder.width < 512 else 1)
        clip_norm = NON_TRANSFORMER_CLIP_NORM if train.clip_norm is None else train.clip_norm
        # Compile on request only: shapes differ, and cuDNN's LSTM cannot be compiled.
        train = replace(train, clip_norm=clip_norm, compile=bool(train.compile))
    lr = train.lr or (FINETUNE_LR if finetune else float(f"{default_lr:.3g}"))
    if not finetune:
        train = replace(train, rdrop=recipe.rdrop if train.rdrop is None else train.rdrop)
        # The score improves until the learning rate reaches zero.
        if train.patience is None and train.schedule in (None, "cosine"):
            train = replace(train, patience=0)
    if train.compile is None and steps < COMPILE_MIN_STEPS:
        train = replace(train, compile=False)
    return fill_defaults(train, device, batch_tokens=batch, steps=steps, warmup=warmup, lr=lr)


def fill_defaults(
    train: TrainConfig, device: torch.device, *, batch_tokens: int, steps: int, warmup: int, lr: float
) -> TrainConfig:
    """Replace every None of a training config, given the four values that depend on the task."""
    every = train.valid_every or max(10, min(5_000, round(steps / NUM_VALIDATIONS)))
    return replace(
        train,
        batch_tokens=batch_tokens,
        steps=steps,
        valid_every=every,
        valid_share=(0.0 if train.valid_every else VALID_SHARE) if train.valid_share is None else train.valid_share,
        save_every=train.save_every or every,
        save_share=(0.0 if train.save_every or train.valid_every else SAVE_SHARE)
        if train.save_share is None
        else train.save_share,
        warmup=warmup,
        lr=lr,
        schedule=train.schedule or "cosine",
        rdrop=0.0 if train.rdrop is None else train.rdrop,
        clip_norm=0.0 if train.clip_norm is None else train.clip_norm,
        patience=(0 if train.minutes else DEFAULT_PATIENCE) if train.patience is None else train.patience,
        precision=train.precision or pick_precision(device),
        micro_batch_tokens=train.micro_batch_tokens or (CPU_MICRO_BATCH_TOKENS if device.type == "cpu" else None),
        compile=device.type == "cuda" if train.compile is None else train.compile,
    )


def describe_model(run: RunConfig, size_reason: str) -> str:
    model: Any = run.model
    stacks = list(get_stack_configs(model).values())
    arch = f" ({stacks[-1].description})" if run.arch else ""
    parts = [run.size or "", f"{'+'.join(str(stack.layers) for stack in stacks)} layers{arch}"]
    parts.append(f"width {stacks[0].width}")
    if isinstance(stacks[0], StackConfig):
        parts.append(format_count(stacks[0].heads, "head"))
    image = getattr(model, "frontend", model)
    if isinstance(image, ImageConfig):
        parts.append(f"{image.num_patches} patches of {image.patch_size} x {image.patch_size}")
    if vocab := getattr(model, "output_vocab", None) or getattr(model, "vocab", None):
        parts.append(f"vocabulary {vocab:,}")
    return f"model: {', '.join(filter(None, parts))}; {size_reason}"


def count_batches(train: TrainConfig, data_size: DataSize) -> int:
    assert train.batch_tokens
    return math.ceil(data_size.num_tokens / train.batch_tokens)


def describe_schedule(train: TrainConfig, num_batches: int, note: str = "", batch_text: str = "") -> Iterator[str]:
    """Sentences about the steps and validations; `num_batches` of an epoch, `note` about validation."""
    assert train.steps
    epochs = train.steps * train.accumulate / max(1, num_batches)
    times = f" x {train.accumulate}" if train.accumulate > 1 else ""
    batch_text = batch_text or f"batches of {train.batch_tokens:,} tokens{times}"
    yield (
        f"schedule: {train.optimizer}, {train.schedule}, learning rate up to {train.lr:g} after {train.warmup:,} "
        f"steps, {batch_text}, at most {train.steps:,} steps (about {epochs:,.{0 if epochs >= 10 else 1}f} epochs)"
        + (f", R-Drop {train.rdrop:g}" if train.rdrop else "")
    )
    patience = f"; stops after {train.patience} without improvement" if train.patience else ""
    note = f" ({note})" if note else ""
    yield f"validate every {train.valid_every:,} steps{note}, checkpoint every {train.save_every:,}{patience}"


def plan_steps(seconds: float, step_seconds: float, scoring_seconds: float, valid_share: float | None) -> int:
    """Return the steps that fit into `seconds` together with validations, checkpoints and the final scores."""
    usable = BUDGET_MARGIN * (seconds - min(scoring_seconds, MAX_SCORING_SHARE * seconds))
    return max(1, int(usable * (1 - (valid_share or VALID_SHARE)) / step_seconds))
