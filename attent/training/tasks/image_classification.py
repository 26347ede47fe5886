"""`--task images`: classify images with a ViT, from scratch or fine-tuned; batches with shift, flip and erasing."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.data import images as image_data
from attent.data.arrays import Array
from attent.data.images import ImageDataConfig, ImageDataset, ImageShape, ImageSplit
from attent.data.loader import BatchT, EpochCache, PrefetchLoader
from attent.interop import load_as
from attent.models import VisionConfig, VisionTransformer, presets
from attent.nn import ImageConfig, LearnedConfig
from attent.nn.eval_mode import eval_mode
from attent.text.tokenizer import Tokenizer
from attent.training import autoconfig
from attent.training.config import RunConfig, Size, TrainError, UserSettings, build_model_config
from attent.training.events import StopRequested
from attent.training.objective import Objective
from attent.training.run_options import DataConfig, TrainConfig
from attent.training.tasks import base
from attent.training.tasks.base import RowBatch
from attent.training.tasks.text_classification import build_accuracy_scores

MAX_ERASED_AREA = 0.2  # of an image
MAX_HELD_OUT = 5_000  # images: enough for an accuracy to half a percent
GPU_BATCH_IMAGES, CPU_BATCH_IMAGES, VALID_BATCH_IMAGES = 512, 128, 500
MAX_PATCHES = 196  # 14 x 14, as in ViT-B/16
STACK_BY_SIZE: dict[Size, dict[str, Any]] = {  # `base` is ViT-S, `big` ViT-B
    "tiny": {"layers": 4, "width": 128, "heads": 4, "ffn_width": 512},
    "small": {"layers": 8, "width": 256, "heads": 8, "ffn_width": 1024},
    "base": {"layers": 12, "width": 384, "heads": 6, "ffn_width": 1536},
    "big": {"layers": 12, "width": 768, "heads": 12, "ffn_width": 3072},
}
SIZE_AND_EPOCHS_BY_IMAGES: tuple[tuple[int, tuple[Size, int]], ...] = (
    (0, ("tiny", 200)),
    (20_000, ("small", 100)),
    (500_000, ("base", 60)),
    (5_000_000, ("big", 30)),
)
CPU_EPOCHS = 20  # more would take days
MIN_STEPS, FINETUNE_DIVISOR = 1_000, 10  # fine-tuning takes a tenth of the epochs and of `MIN_STEPS`
BASE_LR, FINETUNE_LR = 1e-3, 1e-4  # at width 256; lower for wider models


@dataclass(frozen=True)
class ImageBatch(RowBatch):
    """Images as bytes, which are cheap to move; the model normalizes them on its device."""

    pixels: Tensor  # (B, C, S, S)
    labels: Tensor  # (B,)
    num_patches: int

    @property
    def num_targets(self) -> int:
        return len(self)

    @property
    def num_tokens(self) -> int:
        return self.num_padded_tokens

    @property
    def row_length(self) -> int:
        return self.num_patches


class ShuffledLoader(PrefetchLoader[BatchT]):
    """Batches of one size in a new order every epoch, without the remainder, augmented as `config` says.

    Without a config: all examples in their order, without augmentation. Subclasses define `take_batch`.
    """

    def __init__(self, count: int, config: ImageDataConfig | None, *, batch_size: int, seed: int = 0) -> None:
        self.count, self.config, self.seed = count, config, seed
        self.batch_size = max(1, min(batch_size, count))
        self._get_order = EpochCache(self._build_order)

    def take_batch(self, ids: Array, rng: np.random.Generator) -> BatchT:
        raise NotImplementedError

    def num_batches(self, epoch: int) -> int:
        return self.count // self.batch_size if self.config else -(-self.count // self.batch_size)

    def build_batch(self, epoch: int, batch_index: int) -> BatchT:
        ids = self._get_order(epoch)[batch_index * self.batch_size : (batch_index + 1) * self.batch_size]
        return self.take_batch(ids, np.random.default_rng((self.seed, epoch, batch_index)))

    def _build_order(self, epoch: int) -> Array:
        if self.config is None:
            return np.arange(self.count)
        return np.random.default_rng((self.seed, epoch)).permutation(self.count)


class ImageLoader(ShuffledLoader[ImageBatch]):
    def __init__(
        self, images: ImageDataset, config: ImageDataConfig | None, *, batch_size: int, row_length: int, seed: int = 0
    ) -> None:
        super().__init__(len(images), config, batch_size=batch_size, seed=seed)
        self.images, self.row_length = images, row_length

    def take_batch(self, ids: Array, rng: np.random.Generator) -> ImageBatch:
        pixels, labels = self.images.take(ids)
        if self.config is not None:
            pixels = augment_pixels(pixels, self.config, rng)
        return ImageBatch(torch.from_numpy(pixels), torch.from_numpy(labels), self.row_length, example_ids=ids)


def augment_pixels(pixels: Array, config: ImageDataConfig, rng: np.random.Generator) -> Array:
    pixels = flip_random(pixels, config.flip, rng)
    pixels = shift_random(pixels, round(config.shift * pixels.shape[-1]), rng)
    erase_random(pixels, config.erase, rng)
    return pixels


def flip_random(pixels: Array, rate: float, rng: np.random.Generator) -> Array:
    indices = np.flatnonzero(rng.random(len(pixels)) < rate)
    result = pixels.copy()
    result[indices] = pixels[indices][..., ::-1]
    return result


def shift_random(pixels: Array, max_shift: int, rng: np.random.Generator) -> Array:
    side, positions = pixels.shape[-1], 2 * max_shift + 1
    shifts = rng.integers(0, positions * positions, len(pixels))
    padded = np.pad(pixels, ((0, 0), (0, 0), (max_shift, max_shift), (max_shift, max_shift)))
    result = np.empty_like(pixels)
    for shift in np.unique(shifts):  # small images have few shifts, so images are shifted in groups
        group, (top, left) = shifts == shift, divmod(int(shift), positions)
        result[group] = padded[group, :, top : top + side, left : left + side]
    return result


def erase_random(pixels: Array, rate: float, rng: np.random.Generator) -> None:
    """Fill a rectangle of some images with noise, in place (random erasing, Zhong et al. 2020)."""
    _, channels, side, _ = pixels.shape
    erased = np.flatnonzero(rng.random(len(pixels)) < rate)
    area = rng.uniform(0.02, MAX_ERASED_AREA, len(erased)) * side * side
    aspect = np.exp(rng.uniform(-1, 1, len(erased)))
    sizes = np.sqrt(np.stack([area * aspect, area / aspect], 1)).round().astype(int).clip(1, side)
    corners = (rng.random((len(erased), 2)) * (side - sizes + 1)).astype(int)
    noise = rng.integers(0, 256, (channels, side, side), np.uint8)
    for index, (top, left), (height, width) in zip(erased, corners.tolist(), sizes.tolist(), strict=True):
        rows, columns = slice(top, top + height), slice(left, left + width)
        pixels[index, :, rows, columns] = noise[:, rows, columns]


class ImageObjective(Objective):
    def forward(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        logits, labels = self._forward_states(batch.pixels).float(), batch.labels
        loss = F.cross_entropy(logits, labels, label_smoothing=self.smoothing, reduction="none").sum()
        return loss, F.cross_entropy(logits.detach(), labels, reduction="none").sum()

    def compute_states(self, pixels: Tensor) -> Tensor:
        return self.model(self.model.normalize(pixels))


class ImageClassificationTask(base.Task):
    model_class = VisionTransformer
    config_class = VisionConfig
    objective_class = ImageObjective
    unit = "image"
    metrics = ("accuracy", "loss")
    used_settings = frozenset({"data.images"})
    default_settings: ClassVar[dict[str, Any]] = {
        # The last steps, at a learning rate near zero, improve accuracy most, after a plateau: early stopping would
        # cost more than it saves.
        "train": base.MODERN_RECIPE
        | {"betas": [0.9, 0.99], "weight_decay": 0.05, "label_smoothing": 0.1, "patience": 0},
        "data": {"images": {}},
    }
    look_example_input = "picture.png"
    held_out_method = "drawn from each class in proportion"
    tokenizer = None

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None, context: base.RunContext) -> None:
        data, self.image_options = run.data, run.data.images or ImageDataConfig()
        splits = find_all_splits(data)
        initial = run.model if isinstance(run.model, VisionConfig) else None
        if initial is None and run.init_from:
            initial = load_as(run.init_from, VisionTransformer).config
        (train_split,), self.context = splits["train"], context
        self.data_files = ()  # none of a folder
        if isinstance(train_split, image_data.IdxSplit):
            self.data_files = (train_split.images, train_split.labels)
        self.shape = (
            image_data.choose_shape(train_split, self.image_options)
            if initial is None
            else ImageShape.from_config(initial)
        )
        check_image_shape(self.image_options, self.shape, initial)
        (train,) = self.load_splits(splits["train"])
        if len(train.class_names) < 2:
            raise TrainError(f"{train.name}: must have at least two classes, but has one")
        valid = [image_data.remap_labels(images, train.class_names) for images in self.load_splits(splits["valid"])]
        self.tests = [image_data.remap_labels(images, train.class_names) for images in self.load_splits(splits["test"])]
        self.is_held_out = not valid and data.hold_out != 0
        if self.is_held_out:
            train, held_out = hold_out_valid_images(train, data.hold_out, run.train.seed, context)
            valid = [held_out]
        self.train_data, self.validation = train, valid[0] if valid else None
        colors = "grayscale" if self.shape.channels == 1 else "color"
        context.note(
            f"images: {len(train):,} for training, {self.shape.size} x {self.shape.size}, {colors}, "
            f"{len(train.class_names):,} classes"
        )

    def load_splits(self, splits: list[ImageSplit]) -> list[ImageDataset]:
        datasets = [image_data.prepare_images(split, self.shape, self.context.data_dir) for split in splits]
        for dataset in datasets:
            self.context.warn_of_skipped(dataset)
        return datasets

    @property
    def title(self) -> str:
        return f"{len(self.train_data.class_names)} classes"

    @property
    def fingerprints(self) -> Mapping[str, str]:
        validation = "" if self.validation is None else f"{self.validation.store_key} {len(self.validation)}"
        return {"data": f"{self.train_data.store_key} {len(self.train_data)} {validation}".strip()}

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> VisionConfig:
        model = requested.get("model")
        patch = model.get("patch_size") if isinstance(model, dict) else None
        size = patch if isinstance(patch, int) and patch > 0 else 32  # a size that the patch divides
        return VisionConfig(image_size=size, patch_size=1, stack=replace(presets.VIT, **STACK_BY_SIZE["tiny"]))

    def choose_model(self, run: RunConfig, requested: UserSettings) -> tuple[Size, VisionConfig, str]:
        count, on_cpu = len(self.train_data), self.context.device.type == "cpu"
        size = run.size or ("tiny" if on_cpu else autoconfig.look_up(SIZE_AND_EPOCHS_BY_IMAGES, count)[0])
        reason = "as requested" if run.size else f"for {count:,} images" + " on a CPU" * on_cpu
        patch = requested.get("model", {}).get("patch_size") or choose_patch(self.shape.size)
        config = build_model_config(requested, build_vision_config(size, self.shape, patch, self.train_data))
        if (config.image_size, config.channels) != (self.shape.size, self.shape.channels):
            raise TrainError("`model.image_size` and `model.channels` follow the data: set them in `data.images`")
        return size, fit_positions(config), reason

    def build_finetune_config(self, model: VisionTransformer, requested: UserSettings, origin: str) -> VisionConfig:
        config = replace(model.config, labels=self.train_data.class_names)
        return autoconfig.build_finetune_config(config, requested, (), origin)

    def fill_train_config(self, run: RunConfig) -> TrainConfig:
        assert isinstance(run.model, VisionConfig)
        sizes, finetune = (count_positions(run.model), run.model.stack.width), run.init_from is not None
        return fill_image_train_config(run.train, self.context.device, len(self.train_data), *sizes, finetune=finetune)

    def describe_choices(self, run: RunConfig, size_reason: str) -> Iterator[str]:
        batches = self.build_train_batches(run)
        yield autoconfig.describe_model(run, size_reason)
        sizes = f"batches of {batches.batch_size:,} images"
        yield from autoconfig.describe_schedule(run.train, batches.num_batches(0), batch_text=sizes)
        yield describe_augmentation(self.image_options, self.shape.size)

    def build_train_batches(self, run: RunConfig) -> ImageLoader:
        assert isinstance(run.model, VisionConfig)
        assert run.train.batch_tokens
        length = count_positions(run.model)
        batch_size = max(1, run.train.batch_tokens // length)
        return ImageLoader(
            self.train_data, self.image_options, batch_size=batch_size, row_length=length, seed=run.train.seed
        )

    def build_valid_batches(self, run: RunConfig) -> ImageLoader | None:
        if self.validation is None:
            return None
        assert isinstance(run.model, VisionConfig)
        return ImageLoader(self.validation, None, batch_size=VALID_BATCH_IMAGES, row_length=count_positions(run.model))

    def build_evaluator(self, run: RunConfig) -> base.Evaluator | None:
        valid, should_stop = self.validation, self.context.should_stop
        if valid is None:
            return None
        return lambda model: base.EvalResult(metrics={"accuracy": measure_accuracy(model, valid, should_stop)})

    def score_model(self, model: VisionTransformer, run: RunConfig) -> Iterator[base.FinalScores]:
        if self.validation is not None:
            name = "held-out part" if self.is_held_out else self.validation.name
            yield score_images(model, self.validation, name, "validation")
        for images in self.tests:
            yield score_images(model, images, Path(images.name).name, "test")

    def describe_model(self, out: Path) -> base.ModelDescription:
        names = self.train_data.class_names
        return base.ModelDescription(
            title=f"An image classifier ({', '.join(names[:4])}{' ...' * (len(names) > 4)})",
            shell_example=f"attent classify {shlex.quote(str(out))} picture.png",
            python_example=base.build_python_example("Predictor", out, '.classify(["picture.png"])[0].label'),
            loss_unit="image",
            note="The confidence interval is Wilson's.",
        )


def find_all_splits(data: DataConfig) -> dict[str, list[ImageSplit]]:
    if len(data.train) != 1:
        raise TrainError(f"images must be in one folder: --data FOLDER, but {len(data.train)} are named")
    if len(data.valid) > 1:
        raise TrainError(f"validation images must be in one folder, but {len(data.valid)} are named")
    splits = base.find_splits(data, image_data.find_splits, "images")
    return {name: [split for _, split in parts] for name, parts in splits.items()}


def check_image_shape(config: ImageDataConfig, shape: ImageShape, base_config: ImageConfig | None) -> None:
    requested = replace(shape, size=config.image_size or shape.size, channels=config.channels or shape.channels)
    if base_config is not None and requested != shape:
        raise TrainError(
            f"`data.images` must match the model that is fine-tuned: image_size {shape.size}, channels "
            f"{shape.channels}, but is {requested.size} and {requested.channels}; leave it out"
        )


def hold_out_valid_images(
    images: ImageDataset, requested_count: int | None, seed: int, context: base.RunContext
) -> tuple[ImageDataset, ImageDataset]:
    default_count = min(MAX_HELD_OUT, max(len(images.class_names), len(images) // 10))
    count = default_count if requested_count is None else requested_count
    base.check_hold_out(count, len(images), "images")
    rest, held_out = image_data.hold_out_images(images, count, seed)
    if not len(held_out):
        raise TrainError(
            f"{images.name}: has too few images of each class to hold some out; add images, name a validation set with "
            "--valid, or train without one (--hold-out 0)"
        )
    context.note(f"held out {len(held_out):,} of {len(images):,} images for validation (name your own with --valid)")
    return rest, held_out


def measure_accuracy(
    model: VisionTransformer, images: ImageDataset, should_stop: Callable[[], bool] = lambda: False
) -> float:
    correct = 0
    batches = ImageLoader(images, None, batch_size=VALID_BATCH_IMAGES, row_length=1)
    with eval_mode(model), torch.no_grad():
        for batch_index in range(batches.num_batches(0)):
            if should_stop():
                raise StopRequested
            batch = batches.get_batch(0, batch_index)
            predictions = model(model.normalize(batch.pixels)).argmax(-1).cpu()
            correct += int((predictions == batch.labels).sum())
    return 100 * correct / len(images)


def score_images(model: VisionTransformer, images: ImageDataset, name: str, split: base.Split) -> base.FinalScores:
    return build_accuracy_scores(name, split, measure_accuracy(model, images), len(images), "images")


def choose_patch(image_size: int) -> int:
    """The smallest patch, from 4 pixels on, that leaves at most `MAX_PATCHES`."""
    divisors = [patch for patch in range(4, image_size + 1) if image_size % patch == 0]
    return next(patch for patch in divisors if (image_size // patch) ** 2 <= MAX_PATCHES)


def build_vision_config(size: Size, shape: ImageShape, patch: int, images: ImageDataset) -> VisionConfig:
    """ViT with mean pooling, which few images train more easily than a class token."""
    mean, std = image_data.compute_channel_stats(images)
    if not isinstance(patch, int) or patch < 1 or shape.size % patch:
        raise TrainError(f"`patch_size` must divide {shape.size}, the side of the images, but is {patch!r}")
    return fit_positions(
        VisionConfig(
            image_size=shape.size,
            patch_size=patch,
            channels=shape.channels,
            stack=replace(presets.VIT, **STACK_BY_SIZE[size]),
            class_token=False,
            pooling="mean",
            labels=images.class_names,
            mean=mean,
            std=std,
        )
    )


def extract_image_config(config: VisionConfig) -> ImageConfig:
    return ImageConfig(**{field.name: getattr(config, field.name) for field in fields(ImageConfig)})


def fill_image_train_config(
    train: TrainConfig, device: torch.device, num_examples: int, tokens_per_image: int, width: int, *, finetune: bool
) -> TrainConfig:
    batch = train.batch_tokens or tokens_per_image * (CPU_BATCH_IMAGES if device.type == "cpu" else GPU_BATCH_IMAGES)
    steps_per_epoch = num_examples / (max(1, batch // tokens_per_image) * train.accumulate)
    epochs = CPU_EPOCHS if device.type == "cpu" else autoconfig.look_up(SIZE_AND_EPOCHS_BY_IMAGES, num_examples)[1]
    divisor = FINETUNE_DIVISOR if finetune else 1
    steps = train.steps or max(MIN_STEPS // divisor, math.ceil(epochs / divisor * steps_per_epoch))
    warmup = max(1, min(2_000, steps // 20)) if train.warmup is None else train.warmup
    base_lr = FINETUNE_LR if finetune else BASE_LR
    lr = train.lr or float(f"{base_lr * min(1.0, math.sqrt(256 / width)):.3g}")
    filled = autoconfig.fill_defaults(train, device, batch_tokens=batch, steps=steps, warmup=warmup, lr=lr)
    return replace(filled, micro_batch_tokens=train.micro_batch_tokens)  # images need no micro-batches on a CPU


def fit_positions(config: VisionConfig) -> VisionConfig:
    if not isinstance(config.stack.positions, LearnedConfig):
        return config
    return replace(config, stack=replace(config.stack, positions=LearnedConfig(max_length=count_positions(config))))


def count_positions(config: ImageConfig) -> int:
    return config.num_patches + config.class_token


def describe_augmentation(config: ImageDataConfig, image_size: int) -> str:
    flip = ", random flip (--set data.images.flip=0 where left and right matter)" if config.flip else ""
    erase = f", random erasing of {config.erase:.0%}" if config.erase else ""
    shift = round(config.shift * image_size)
    return f"augmentation: shift by up to {shift} pixels{flip}{erase}"
