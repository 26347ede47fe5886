"""The task of telling what an image shows: `attent train --task images`. Batches in which chance moves, mirrors and
covers images, the loss, accuracy, and a model and recipe that suit the set.

Reading files is `attent.data.images`'s; the model is a ViT (`attent.models.vision`), from nothing or trained further.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.data.arrays import Array
from attent.data.estimate import Size
from attent.data.images import (
    IdxSplit,
    ImageDataConfig,
    ImageDataset,
    ImageShape,
    ImageSplit,
    choose_shape,
    compute_channel_stats,
    describe_skipped,
    find_splits,
    hold_out_images,
    remap_labels,
)
from attent.data.images import prepare_images as prepare_part
from attent.data.loader import PrefetchLoader
from attent.interop import load_as
from attent.models import VisionConfig, VisionTransformer, build, presets
from attent.nn import LearnedConfig
from attent.nn.argument_checks import check_rate
from attent.text.tokenizer import Tokenizer
from attent.training import model_card
from attent.training.config import DataConfig, Run, TrainConfig, TrainError, UserSettings, build_model_config
from attent.training.events import EventHandler, Note
from attent.training.hardware import pick_precision
from attent.training.loop import StopRequested
from attent.training.tasks.base import EvalResult, Evaluator, FinalScores, RunContext
from attent.training.tasks.text_classification import wilson_interval

MAX_ERASED_AREA = 0.2  # share of an image, of what is erased
CACHED_EPOCHS = 3  # orders in memory: a walk is in one epoch, and makes batches of the next
MAX_HELD_OUT = 5_000  # images: accuracy is told to half a per cent by them
GPU_BATCH_IMAGES, CPU_BATCH_IMAGES = 512, 128  # images
VALID_BATCH_IMAGES = 500
MAX_PATCHES = 196  # of an image: 14 x 14, as ViT-B/16 has them
STACK_BY_SIZE: dict[Size, dict[str, Any]] = {  # `base` is ViT-S, `big` ViT-B
    "tiny": {"layers": 4, "width": 128, "heads": 4, "ffn_width": 512},
    "small": {"layers": 8, "width": 256, "heads": 8, "ffn_width": 1024},
    "base": {"layers": 12, "width": 384, "heads": 6, "ffn_width": 1536},
    "big": {"layers": 12, "width": 768, "heads": 12, "ffn_width": 3072},
}
SIZE_AND_EPOCHS_BY_IMAGES: tuple[tuple[int, Size, int], ...] = (  # from so many images on: the size, and epochs
    (0, "tiny", 200),
    (20_000, "small", 100),
    (500_000, "base", 60),
    (5_000_000, "big", 30),
)
CPU_EPOCHS = 20  # more would take days
MIN_STEPS, FINETUNE_DIVISOR = 1_000, 10  # a model that is trained further needs the tenth of epochs and fewest steps
BASE_LR, FINETUNE_LR = 1e-3, 1e-4  # at width 256; wider ones learn more gently
NUM_VALIDATIONS = 50
PYTHON_EXAMPLE = """\
import attent

reader = attent.Reader.load({folder!r})
print(reader.classify(["picture.png"])[0].label)"""


# ---- batches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageBatch:
    """Images as bytes, which are small to move: the model makes numbers of them where it computes."""

    pixels: Tensor  # (B, C, S, S)
    labels: Tensor  # (B,)
    example_ids: Array  # their numbers in the set
    row_length: int  # patches of an image
    mixup_labels: Tensor | None = None  # (B,) labels of what is laid over each image (mixup)
    mixup_weights: Tensor | None = None  # (B,) of `labels`; the rest is of `others`

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_targets(self) -> int:
        return len(self)

    @property
    def num_tokens(self) -> int:
        return len(self) * self.row_length

    @property
    def num_padded_tokens(self) -> int:
        return len(self) * self.row_length

    def slice_rows(self, start: int, stop: int) -> ImageBatch:
        return replace(self._map_tensors(lambda tensor: tensor[start:stop]), example_ids=self.example_ids[start:stop])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ImageBatch:
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ImageBatch:
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, transform: Callable[[Tensor], Tensor]) -> ImageBatch:
        others, shares = (None if x is None else transform(x) for x in (self.mixup_labels, self.mixup_weights))
        return replace(
            self,
            pixels=transform(self.pixels),
            labels=transform(self.labels),
            mixup_labels=others,
            mixup_weights=shares,
        )


class ImageLoader(PrefetchLoader[ImageBatch]):
    """All images in another order in every epoch, in batches of one size; what is left over waits for the next epoch.

    With a config chance changes the images; without one, they come as they are, in their order, all of them.
    """

    def __init__(
        self, images: ImageDataset, config: ImageDataConfig | None, *, batch_size: int, row_length: int, seed: int = 0
    ) -> None:
        self.images, self.config, self.row_length, self.seed = images, config, row_length, seed
        self.batch_size = max(1, min(batch_size, len(images)))
        self._orders: dict[int, Array] = {}

    def num_steps(self, epoch: int) -> int:
        count = len(self.images)
        return count // self.batch_size if self.config else -(-count // self.batch_size)

    def get_batch(self, epoch: int, step: int) -> ImageBatch:
        if not 0 <= step < self.num_steps(epoch):
            raise IndexError(f"epoch {epoch} has {self.num_steps(epoch)} steps, so there is no step {step}")
        numbers = self._epoch_order(epoch)[step * self.batch_size : (step + 1) * self.batch_size]
        pixels, labels = self.images.take(numbers)
        batch = ImageBatch(torch.from_numpy(pixels), torch.from_numpy(labels), numbers, self.row_length)
        if self.config is None:
            return batch
        return augment(batch, self.config, np.random.default_rng((self.seed, epoch, step)))

    def _epoch_order(self, epoch: int) -> Array:
        if self.config is None:
            return np.arange(len(self.images))
        found = self._orders.get(epoch)
        if found is None:
            found = np.random.default_rng((self.seed, epoch)).permutation(len(self.images))
            for old in sorted(self._orders)[: -CACHED_EPOCHS + 1]:
                self._orders.pop(old, None)
            self._orders[epoch] = found
        return found


# ---- chance ----------------------------------------------------------------------------------------------------------


def augment(batch: ImageBatch, config: ImageDataConfig, rng: np.random.Generator) -> ImageBatch:
    """The batch as it is learned from this time."""
    pixels = batch.pixels.numpy()
    pixels = flip_random(pixels, config.flip, rng)
    pixels = shift_random(pixels, round(config.shift * pixels.shape[-1]), rng)
    erase_random(pixels, config.erase, rng)
    if not config.mixup:
        return replace(batch, pixels=torch.from_numpy(pixels))
    partners = rng.permutation(len(pixels))
    shares = rng.beta(config.mixup, config.mixup, len(pixels)).astype(np.float32)
    return replace(
        batch,
        pixels=torch.from_numpy(mix_images(pixels, pixels[partners], shares)),
        mixup_labels=batch.labels[torch.from_numpy(partners)],
        mixup_weights=torch.from_numpy(shares),
    )


def flip_random(pixels: Array, rate: float, rng: np.random.Generator) -> Array:
    turn = np.flatnonzero(rng.random(len(pixels)) < rate)
    result = pixels.copy()
    result[turn] = pixels[turn][..., ::-1]
    return result


def shift_random(pixels: Array, max_shift: int, rng: np.random.Generator) -> Array:
    """By up to so many pixels each way; what comes in from outside is black."""
    side, ways = pixels.shape[-1], 2 * max_shift + 1
    places = rng.integers(0, ways * ways, len(pixels))
    wide = np.pad(pixels, ((0, 0), (0, 0), (max_shift, max_shift), (max_shift, max_shift)))
    result = np.empty_like(pixels)
    for place in np.unique(places):  # small images have few ways to go, and those that go one way are moved together
        some, (top, left) = places == place, divmod(int(place), ways)
        result[some] = wide[some, :, top : top + side, left : left + side]
    return result


def erase_random(pixels: Array, rate: float, rng: np.random.Generator) -> None:
    """A rectangle of noise on some of them, in place (random erasing, Zhong et al. 2020)."""
    _, channels, side, _ = pixels.shape
    some = np.flatnonzero(rng.random(len(pixels)) < rate)
    area, slant = rng.uniform(0.02, MAX_ERASED_AREA, len(some)) * side * side, np.exp(rng.uniform(-1, 1, len(some)))
    sizes = np.sqrt(np.stack([area * slant, area / slant], 1)).round().astype(int).clip(1, side)
    places = (rng.random((len(some), 2)) * (side - sizes + 1)).astype(int)
    noise = rng.integers(0, 256, (channels, side, side), np.uint8)
    for one, (top, left), (height, width) in zip(some, places.tolist(), sizes.tolist(), strict=True):
        rows, columns = slice(top, top + height), slice(left, left + width)
        pixels[one, :, rows, columns] = noise[:, rows, columns]


def mix_images(pixels: Array, others: Array, weights: Array) -> Array:
    """Two images in one (mixup, Zhang et al. 2018), in bytes again."""
    share = weights[:, None, None, None]
    return np.rint(pixels * share + others * (1 - share)).astype(np.uint8)


# ---- the loss --------------------------------------------------------------------------------------------------------


class ImageObjective(nn.Module):
    """The label-smoothed cross-entropy of a model on a batch of images."""

    def __init__(
        self, model: VisionTransformer, *, smoothing: float = 0.1, rdrop: float = 0.0, compile: bool = False
    ) -> None:
        super().__init__()
        check_rate("smoothing", smoothing)
        if rdrop:
            raise ValueError(f"`rdrop` must be 0 for images, but is {rdrop}; leave it out")
        self.model, self.smoothing = model, smoothing
        self._logits: Callable[[Tensor], Tensor] = torch.compile(self.logits, dynamic=False) if compile else self.logits

    def forward(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Sums over the images: the loss, and the plain cross-entropy in nats, which has no gradient."""
        logits = self._logits(batch.pixels).float()
        loss = mixup_loss(logits, batch, self.smoothing)
        return loss, mixup_loss(logits.detach(), batch, 0.0)

    def logits(self, pixels: Tensor) -> Tensor:
        return self.model(self.model.normalize(pixels))


def mixup_loss(logits: Tensor, batch: ImageBatch, smoothing: float) -> Tensor:
    """Where two images lie over each other, each counts by its share."""
    loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing, reduction="none")
    if batch.mixup_labels is not None and batch.mixup_weights is not None:
        other = F.cross_entropy(logits, batch.mixup_labels, label_smoothing=smoothing, reduction="none")
        loss = loss * batch.mixup_weights + other * (1 - batch.mixup_weights)
    return loss.sum()


# ---- how good it is --------------------------------------------------------------------------------------------------


@torch.no_grad()
def count_correct(
    model: VisionTransformer, images: ImageDataset, should_stop: Callable[[], bool] = lambda: False
) -> int:
    """How many images the model gives their own label, on the device that it is on."""
    was_training, right = model.training, 0
    model.eval()
    try:
        batches = ImageLoader(images, None, batch_size=VALID_BATCH_IMAGES, row_length=1)
        for step in range(batches.num_steps(0)):
            if should_stop():
                raise StopRequested
            batch = batches.get_batch(0, step)
            chosen = model(model.normalize(batch.pixels)).argmax(-1).cpu()
            right += int((chosen == batch.labels).sum())
    finally:
        model.train(was_training)
    return right


# ---- the task --------------------------------------------------------------------------------------------------------


def prepare_image_task(run: Run, tokenizer: Tokenizer | None, context: RunContext) -> ImageClassificationTask:
    """The images of a run, brought to the size of the model that is there already, or that it begins from."""
    data, config = run.data, run.data.images or ImageDataConfig()
    parts = find_parts(data)
    like = run.model if isinstance(run.model, VisionConfig) else None
    if like is None and run.init_from:
        like = load_as(run.init_from, VisionTransformer).config
    shape = choose_shape(parts["train"][0], config) if like is None else ImageShape.from_config(like)
    check_image_shape(config, shape, like)
    (train,) = load_parts(parts["train"], shape, context)
    if len(train.class_names) < 2:
        raise TrainError(f"{train.name}: must show at least two classes, but shows one; there is nothing to tell apart")
    valid = [remap_labels(one, train.class_names) for one in load_parts(parts["valid"], shape, context)]
    tests = [remap_labels(one, train.class_names) for one in load_parts(parts["test"], shape, context)]
    held_out = not valid and data.hold_out != 0
    if held_out:
        train, held = hold_out_valid_images(train, data.hold_out, run.train.seed, context.report)
        valid = [held]
    how = f"{shape.size} x {shape.size}, {'grey' if shape.channels == 1 else 'in colour'}"
    context.report(Note(text=f"images: {len(train):,} to train on, {how}, of {len(train.class_names):,} classes"))
    return ImageClassificationTask(
        config=config,
        shape=shape,
        train_part=parts["train"][0],
        train=train,
        validation=valid[0] if valid else None,
        tests=tuple(tests),
        held_out=held_out,
        context=context,
    )


def find_parts(data: DataConfig) -> dict[str, list[ImageSplit]]:
    """Which files are for which part."""
    if len(data.train) != 1:
        raise TrainError(f"images must be in one folder: --data FOLDER, but {len(data.train)} are named")
    if len(data.valid) > 1:
        raise TrainError(f"images to validate on must be in one folder, but {len(data.valid)} are named")
    found = find_splits(data.train[0])
    if "train" not in found:
        raise TrainError(f"{data.train[0]}: must hold images to train on, but has only its {', '.join(found)} part")
    chosen = {"train": [found["train"]]}
    for part, named in (("valid", data.valid), ("test", data.test)):
        chosen[part] = [find_part(name, part) for name in named] or ([found[part]] if part in found else [])
    return chosen


def find_part(name: str, part: str) -> ImageSplit:
    found = find_splits(name)
    return found.get(part) or found.get("train") or next(iter(found.values()))


def check_image_shape(config: ImageDataConfig, shape: ImageShape, base_config: VisionConfig | None) -> None:
    asked = replace(shape, size=config.image_size or shape.size, channels=config.channels or shape.channels)
    if base_config is not None and asked != shape:
        raise TrainError(
            f"`data.images` must be as the model that is trained further: image {shape.size}, channels "
            f"{shape.channels}, but is {asked.size} and {asked.channels}; leave it out"
        )


def load_parts(parts: list[ImageSplit], shape: ImageShape, context: RunContext) -> list[ImageDataset]:
    found = [prepare_part(part, shape, context.data_dir) for part in parts]
    for one in found:
        if told := describe_skipped(one):
            context.report(Note(text=told, level="warning"))
    return found


def hold_out_valid_images(
    images: ImageDataset, requested_count: int | None, seed: int, report: EventHandler
) -> tuple[ImageDataset, ImageDataset]:
    count = (
        min(MAX_HELD_OUT, max(len(images.class_names), len(images) // 10))
        if requested_count is None
        else requested_count
    )
    if count >= len(images):
        raise TrainError(
            f"`data.hold_out` must be less than the {len(images):,} images there are, but is {count:,}; add images, "
            "name a validation set with --valid, or train without one (--hold-out 0)"
        )
    rest, held = hold_out_images(images, count, seed)
    if not len(held):
        raise TrainError(
            f"{images.name}: has too few images of each class to hold some out; add images, name a validation set with "
            "--valid, or train without one (--hold-out 0)"
        )
    report(
        Note(text=f"{len(held):,} of {len(images):,} images are held out to validate on (name your own with --valid)")
    )
    return rest, held


@dataclass(frozen=True, kw_only=True)
class ImageClassificationTask:
    """The images of a run, and all that is done with them: see `attent.train.task.Material`."""

    config: ImageDataConfig
    shape: ImageShape
    train_part: ImageSplit  # that `train` comes from
    train: ImageDataset
    validation: ImageDataset | None
    tests: tuple[ImageDataset, ...]
    held_out: bool  # the validation part was taken from the training data
    context: RunContext
    model_class: type[VisionTransformer] = VisionTransformer
    tokenizer: None = None

    @property
    def title(self) -> str:
        return f"{len(self.train.class_names)} classes"

    @property
    def fingerprints(self) -> Mapping[str, str]:
        validation = "" if self.validation is None else f"{self.validation.store_key} {len(self.validation)}"
        return {"data": f"{self.train.store_key} {len(self.train)} {validation}".strip()}

    @property
    def objective_class(self) -> type[ImageObjective]:
        return ImageObjective

    # the model

    def choose_model(self, run: Run, requested: UserSettings) -> tuple[Size, VisionConfig, str]:
        count, kind = len(self.train), self.context.device.type
        size = run.size or ("tiny" if kind == "cpu" else choose_size_and_epochs(count)[0])
        why = "as asked for" if run.size else f"for {count:,} images" + (" on a CPU" if kind == "cpu" else "")
        patch = requested.get("model", {}).get("patch_size") or choose_patch(self.shape.size)
        config = build_vision_config(size, self.shape, patch, self.train)
        config = build_model_config(requested, config)
        if (config.image_size, config.channels) != (self.shape.size, self.shape.channels):
            raise TrainError(
                "`model.image_size` and `model.channels` are those of the data: choose them as `data.images`"
            )
        return size, fit_positions(config), why

    def build_finetune_config(self, model: VisionTransformer, requested: UserSettings, origin: str) -> VisionConfig:
        """The shape stays; the labels are those of the images."""
        other = {name for name in requested.get("model", {}) if name != "stack"}
        other |= {name for name in requested.get("model", {}).get("stack", {}) if "dropout" not in name}
        if other:
            raise TrainError(
                f"`model.{min(other)}` cannot be chosen with --from {origin}: a model that is trained further keeps its "
                "shape and may have another dropout only; leave it out, or train without --from"
            )
        return replace(build_model_config(requested, model.config), labels=self.train.class_names)

    def build_model(self, config: VisionConfig, pretrained: VisionTransformer | None) -> VisionTransformer:
        """Where the labels are others, the layer that chooses among them is new."""
        model = build(config)
        if pretrained is not None:
            weights = pretrained.state_dict()
            if pretrained.config.labels != config.labels:
                weights = {name: value for name, value in weights.items() if not name.startswith("classifier.")}
            model.load_state_dict(weights, strict=False)
        return model

    # the recipe

    def fill_train_config(self, run: Run, size: Size | None, config: VisionConfig, *, finetune: bool) -> TrainConfig:
        train, device = run.train, self.context.device
        tokens = count_positions(config)
        batch = train.batch_tokens or tokens * (CPU_BATCH_IMAGES if device.type == "cpu" else GPU_BATCH_IMAGES)
        an_epoch = len(self.train) / (max(1, batch // tokens) * train.accumulate)
        epochs = CPU_EPOCHS if device.type == "cpu" else choose_size_and_epochs(len(self.train))[1]
        less = FINETUNE_DIVISOR if finetune else 1
        steps = train.steps or max(MIN_STEPS // less, math.ceil(epochs / less * an_epoch))
        every = train.valid_every or max(10, min(5_000, round(steps / NUM_VALIDATIONS)))
        rate = FINETUNE_LR if finetune else BASE_LR
        return replace(
            train,
            batch_tokens=batch,
            steps=steps,
            valid_every=every,
            save_every=train.save_every or every,
            warmup=max(1, min(2_000, steps // 20)) if train.warmup is None else train.warmup,
            lr=train.lr or float(f"{rate * min(1.0, math.sqrt(256 / config.stack.width)):.3g}"),
            rdrop=train.rdrop or 0.0,
            precision=train.precision or pick_precision(device)[0],
            compile=device.type == "cuda" if train.compile is None else train.compile,
        )

    def describe_choices(self, run: Run, size_reason: str) -> Iterator[str]:
        train, model = run.train, run.model
        assert isinstance(model, VisionConfig)
        assert train.batch_tokens
        assert train.steps
        stack, batches = model.stack, self.build_train_batches(run)
        epochs = train.steps * train.accumulate / max(1, batches.num_steps(0))
        yield (
            f"model: {f'{run.size}, ' if run.size else ''}{stack.layers} layers, width {stack.width}, "
            f"{model.num_patches} patches of {model.patch_size} x {model.patch_size}; {size_reason}"
        )
        yield (
            f"recipe: {train.optimizer}, learning rate up to {train.lr:g} after {train.warmup:,} updates, batches of "
            f"{batches.batch_size:,} images, at most {train.steps:,} updates (about {epochs:,.0f} epochs)"
        )
        chance = self.config
        mirrored = ", or mirrored (--set data.images.flip=0 where left and right matter)" if chance.flip else ""
        yield (
            f"each time an image is moved by up to {round(chance.shift * self.shape.size)} pixels{mirrored}; "
            f"{chance.erase:.0%} have a part covered"
        )
        yield f"validation every {train.valid_every:,} updates, checkpoint every {train.save_every:,}"

    def build_train_batches(self, run: Run) -> ImageLoader:
        assert isinstance(run.model, VisionConfig)
        assert run.train.batch_tokens
        slots = count_positions(run.model)
        size = max(1, run.train.batch_tokens // slots)
        return ImageLoader(self.train, self.config, batch_size=size, row_length=slots, seed=run.train.seed)

    def build_valid_batches(self, run: Run) -> ImageLoader | None:
        if self.validation is None:
            return None
        assert isinstance(run.model, VisionConfig)
        return ImageLoader(self.validation, None, batch_size=VALID_BATCH_IMAGES, row_length=count_positions(run.model))

    def build_evaluator(self, run: Run) -> Evaluator | None:
        valid = self.validation
        if valid is None:
            return None
        stop = self.context.should_stop
        return lambda model: EvalResult(metrics={"accuracy": 100 * count_correct(model, valid, stop) / len(valid)})

    # the end

    def score_model(self, model: VisionTransformer, run: Run) -> Iterator[FinalScores]:
        sets = [] if self.validation is None else [(self.validation, "validation")]
        for images, part in [*sets, *((one, "test") for one in self.tests)]:
            right, count = count_correct(model, images), len(images)
            low, high = wilson_interval(right / count, count)
            figure, between = f"{100 * right / count:.2f}%", f"{100 * low:.2f} to {100 * high:.2f}"
            yield FinalScores(
                name=Path(images.name).name if part == "test" else "held-out part" if self.held_out else images.name,
                split=part,  # type: ignore[arg-type]  # one of the two
                num_examples=count,
                metrics={"accuracy": 100 * right / count, "accuracy_low": 100 * low, "accuracy_high": 100 * high},
                summary=f"accuracy {figure} (95% interval {between})",
                extra_columns=(("Accuracy", figure), ("95% interval", between)),
            )

    def write_analysis(self, model: Any, out: Path) -> None:
        """Nothing else is measured."""

    def describe_data(self) -> model_card.DataSummary:
        used, left_out = len(self.train), len(self.train.skipped)
        held = 0 if self.validation is None else len(self.validation)
        origin = model_card.CardCorpus(
            name=self.train.name,
            read=used + left_out,
            used=used,
            dropped=(("no image", left_out),) if left_out else (),
            files=list_files(self.train_part),
        )
        how = "" if self.validation is None else self.validation.name
        return model_card.DataSummary(
            corpora=(origin,),
            source_tokens=0,
            target_tokens=0,
            data_key=self.train.store_key,
            num_held_out=held,
            held_out_method="drawn from each class by its share" if self.held_out else how,
        )

    def describe_model(self, out: Path) -> model_card.ModelDescription:
        shell = f"attent classify {shlex.quote(str(out))} picture.png"
        return model_card.ModelDescription(
            title=f"A classifier of images ({', '.join(self.train.class_names[:4])}{' ...' * (len(self.train.class_names) > 4)})",
            unit="image",
            shell_example=shell,
            python_example=PYTHON_EXAMPLE.format(folder=str(out)),
            next_step=f"try it: {shell}",
            loss_unit="image",
            note="The interval is Wilson's, of 95%.",
            has_two_sides=False,
        )


def choose_size_and_epochs(num_images: int) -> tuple[Size, int]:
    return next((size, epochs) for least, size, epochs in reversed(SIZE_AND_EPOCHS_BY_IMAGES) if num_images >= least)


def choose_patch(image_size: int) -> int:
    """Pixels of a patch's side: the fewest, from 4 on, that leave no more patches than ViT-B/16 has."""
    fitting = [patch for patch in range(4, image_size + 1) if image_size % patch == 0]
    return next(patch for patch in fitting if (image_size // patch) ** 2 <= MAX_PATCHES)


def build_vision_config(size: Size, shape: ImageShape, patch: int, images: ImageDataset) -> VisionConfig:
    """ViT in our sizes. The mean of the patches says what an image shows: of few images that is learned more easily
    than a vector of its own."""
    mean, std = compute_channel_stats(images)
    if not isinstance(patch, int) or patch < 1 or shape.size % patch:
        raise TrainError(f"`model.patch_size` must divide {shape.size}, the side of the images, but is {patch!r}")
    stack = replace(presets.VIT, **STACK_BY_SIZE[size])
    return fit_positions(
        VisionConfig(
            image_size=shape.size,
            patch_size=patch,
            channels=shape.channels,
            stack=stack,
            class_token=False,
            pooling="mean",
            labels=images.class_names,
            mean=mean,
            std=std,
        )
    )


def fit_positions(config: VisionConfig) -> VisionConfig:
    """As many learned positions as there are patches, and one for the class token."""
    if not isinstance(config.stack.positions, LearnedConfig):
        return config
    return replace(config, stack=replace(config.stack, positions=LearnedConfig(max_length=count_positions(config))))


def count_positions(config: VisionConfig) -> int:
    return config.num_patches + config.class_token


def list_files(part: ImageSplit) -> tuple[tuple[str, str], ...]:
    """With checksums, where they are few."""
    if not isinstance(part, IdxSplit):
        return ()
    found = []
    for path in (part.images, part.labels):
        with open(path, "rb") as file:
            found.append((str(path), hashlib.file_digest(file, "sha256").hexdigest()))
    return tuple(found)
