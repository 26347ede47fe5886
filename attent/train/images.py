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
from attent.data.drawn import Drawn
from attent.data.estimate import Size
from attent.data.images import (
    IdxPart,
    Images,
    ImagesConfig,
    Part,
    Shape,
    find,
    hold_out,
    measured,
    shape_of,
    told_left_out,
    with_names,
)
from attent.data.images import prepare as prepare_part
from attent.interop import load_as
from attent.models import Vision, VisionConfig, build, presets
from attent.nn import LearnedConfig
from attent.nn.checks import check_rate
from attent.text.tokenizer import Tokenizer
from attent.train import card
from attent.train.config import Asked, DataConfig, Run, TrainConfig, TrainError, model_of
from attent.train.events import Note, Tell
from attent.train.hardware import pick_precision
from attent.train.labelled import interval
from attent.train.loop import Stopping
from attent.train.task import Judge, Judged, Outcome, Place

MOST_COVERED = 0.2  # share of an image, of what is erased
KEPT_EPOCHS = 3  # orders in memory: a walk is in one epoch, and makes batches of the next
MOST_HELD_OUT = 5_000  # images: accuracy is told to half a per cent by them
BATCH, CPU_BATCH = 512, 128  # images
VALID_BATCH = 500
MOST_PATCHES = 196  # of an image: 14 x 14, as ViT-B/16 has them
SIZES: dict[Size, dict[str, Any]] = {  # `base` is ViT-S, `big` ViT-B
    "tiny": {"layers": 4, "width": 128, "heads": 4, "inner": 512},
    "small": {"layers": 8, "width": 256, "heads": 8, "inner": 1024},
    "base": {"layers": 12, "width": 384, "heads": 6, "inner": 1536},
    "big": {"layers": 12, "width": 768, "heads": 12, "inner": 3072},
}
BY_AMOUNT: tuple[tuple[int, Size, int], ...] = (  # from so many images on: the size, and epochs
    (0, "tiny", 200),
    (20_000, "small", 100),
    (500_000, "base", 60),
    (5_000_000, "big", 30),
)
CPU_EPOCHS = 20  # more would take days
FEWEST_STEPS, FURTHER = 1_000, 10  # a model that is trained further needs the tenth of epochs and fewest steps
RATE, FURTHER_RATE = 1e-3, 1e-4  # at width 256; wider ones learn more gently
VALIDATIONS = 50
PYTHON = """\
import attent

reader = attent.Reader.load({folder!r})
print(reader.classify(["picture.png"])[0].label)"""


# ---- batches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageBatch:
    """Images as bytes, which are small to move: the model makes numbers of them where it computes."""

    pixels: Tensor  # (B, C, S, S)
    labels: Tensor  # (B,)
    pairs: Array  # their numbers in the set
    width: int  # patches of an image
    others: Tensor | None = None  # (B,) labels of what is laid over each image (mixup)
    shares: Tensor | None = None  # (B,) of `labels`; the rest is of `others`

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def units(self) -> int:
        return len(self)

    @property
    def tokens(self) -> int:
        return len(self) * self.width

    @property
    def slots(self) -> int:
        return len(self) * self.width

    def rows(self, start: int, stop: int) -> ImageBatch:
        return replace(self._each(lambda tensor: tensor[start:stop]), pairs=self.pairs[start:stop])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ImageBatch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> ImageBatch:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> ImageBatch:
        others, shares = (None if x is None else change(x) for x in (self.others, self.shares))
        return replace(self, pixels=change(self.pixels), labels=change(self.labels), others=others, shares=shares)


class ImageBatches(Drawn[ImageBatch]):
    """All images in another order in every epoch, in batches of one size; what is left over waits for the next epoch.

    With a config chance changes the images; without one, they come as they are, in their order, all of them.
    """

    def __init__(self, images: Images, config: ImagesConfig | None, *, size: int, width: int, seed: int = 0) -> None:
        self.images, self.config, self.width, self.seed = images, config, width, seed
        self.size = max(1, min(size, len(images)))
        self._orders: dict[int, Array] = {}

    def steps(self, epoch: int) -> int:
        count = len(self.images)
        return count // self.size if self.config else -(-count // self.size)

    def batch(self, epoch: int, step: int) -> ImageBatch:
        if not 0 <= step < self.steps(epoch):
            raise IndexError(f"epoch {epoch} has {self.steps(epoch)} steps, so there is no step {step}")
        numbers = self._order(epoch)[step * self.size : (step + 1) * self.size]
        pixels, labels = self.images.take(numbers)
        batch = ImageBatch(torch.from_numpy(pixels), torch.from_numpy(labels), numbers, self.width)
        if self.config is None:
            return batch
        return changed(batch, self.config, np.random.default_rng((self.seed, epoch, step)))

    def _order(self, epoch: int) -> Array:
        if self.config is None:
            return np.arange(len(self.images))
        found = self._orders.get(epoch)
        if found is None:
            found = np.random.default_rng((self.seed, epoch)).permutation(len(self.images))
            for old in sorted(self._orders)[: -KEPT_EPOCHS + 1]:
                self._orders.pop(old, None)
            self._orders[epoch] = found
        return found


# ---- chance ----------------------------------------------------------------------------------------------------------


def changed(batch: ImageBatch, config: ImagesConfig, chance: np.random.Generator) -> ImageBatch:
    """The batch as it is learned from this time."""
    pixels = batch.pixels.numpy()
    pixels = mirrored(pixels, config.flip, chance)
    pixels = moved(pixels, round(config.shift * pixels.shape[-1]), chance)
    covered(pixels, config.erase, chance)
    if not config.mixup:
        return replace(batch, pixels=torch.from_numpy(pixels))
    partners = chance.permutation(len(pixels))
    shares = chance.beta(config.mixup, config.mixup, len(pixels)).astype(np.float32)
    return replace(
        batch,
        pixels=torch.from_numpy(laid_over(pixels, pixels[partners], shares)),
        others=batch.labels[torch.from_numpy(partners)],
        shares=torch.from_numpy(shares),
    )


def mirrored(pixels: Array, rate: float, chance: np.random.Generator) -> Array:
    turn = np.flatnonzero(chance.random(len(pixels)) < rate)
    result = pixels.copy()
    result[turn] = pixels[turn][..., ::-1]
    return result


def moved(pixels: Array, most: int, chance: np.random.Generator) -> Array:
    """By up to so many pixels each way; what comes in from outside is black."""
    side, ways = pixels.shape[-1], 2 * most + 1
    places = chance.integers(0, ways * ways, len(pixels))
    wide = np.pad(pixels, ((0, 0), (0, 0), (most, most), (most, most)))
    result = np.empty_like(pixels)
    for place in np.unique(places):  # small images have few ways to go, and those that go one way are moved together
        some, (top, left) = places == place, divmod(int(place), ways)
        result[some] = wide[some, :, top : top + side, left : left + side]
    return result


def covered(pixels: Array, rate: float, chance: np.random.Generator) -> None:
    """A rectangle of noise on some of them, in place (random erasing, Zhong et al. 2020)."""
    _, channels, side, _ = pixels.shape
    some = np.flatnonzero(chance.random(len(pixels)) < rate)
    area, slant = chance.uniform(0.02, MOST_COVERED, len(some)) * side * side, np.exp(chance.uniform(-1, 1, len(some)))
    sizes = np.sqrt(np.stack([area * slant, area / slant], 1)).round().astype(int).clip(1, side)
    places = (chance.random((len(some), 2)) * (side - sizes + 1)).astype(int)
    noise = chance.integers(0, 256, (channels, side, side), np.uint8)
    for one, (top, left), (height, width) in zip(some, places.tolist(), sizes.tolist(), strict=True):
        rows, columns = slice(top, top + height), slice(left, left + width)
        pixels[one, :, rows, columns] = noise[:, rows, columns]


def laid_over(pixels: Array, others: Array, shares: Array) -> Array:
    """Two images in one (mixup, Zhang et al. 2018), in bytes again."""
    share = shares[:, None, None, None]
    return np.rint(pixels * share + others * (1 - share)).astype(np.uint8)


# ---- the loss --------------------------------------------------------------------------------------------------------


class ImageObjective(nn.Module):
    """The label-smoothed cross-entropy of a model on a batch of images."""

    def __init__(self, model: Vision, *, smoothing: float = 0.1, rdrop: float = 0.0, compile: bool = False) -> None:  # noqa: A002
        super().__init__()
        check_rate("smoothing", smoothing)
        if rdrop:
            raise ValueError(f"`rdrop` must be 0 for images, but is {rdrop}; leave it out")
        self.model, self.smoothing = model, smoothing
        self._logits: Callable[[Tensor], Tensor] = torch.compile(self.logits, dynamic=False) if compile else self.logits

    def forward(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Sums over the images: the loss, and the plain cross-entropy in nats, which has no gradient."""
        logits = self._logits(batch.pixels).float()
        loss = mixed(logits, batch, self.smoothing)
        return loss, mixed(logits.detach(), batch, 0.0)

    def logits(self, pixels: Tensor) -> Tensor:
        return self.model(self.model.normalised(pixels))


def mixed(logits: Tensor, batch: ImageBatch, smoothing: float) -> Tensor:
    """Where two images lie over each other, each counts by its share."""
    loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing, reduction="none")
    if batch.others is not None and batch.shares is not None:
        other = F.cross_entropy(logits, batch.others, label_smoothing=smoothing, reduction="none")
        loss = loss * batch.shares + other * (1 - batch.shares)
    return loss.sum()


# ---- how good it is --------------------------------------------------------------------------------------------------


@torch.no_grad()
def count_right(model: Vision, images: Images, stop: Callable[[], bool] = lambda: False) -> int:
    """How many images the model gives their own label, on the device that it is on."""
    was_training, right = model.training, 0
    model.eval()
    try:
        batches = ImageBatches(images, None, size=VALID_BATCH, width=1)
        for step in range(batches.steps(0)):
            if stop():
                raise Stopping
            batch = batches.batch(0, step)
            chosen = model(model.normalised(batch.pixels)).argmax(-1).cpu()
            right += int((chosen == batch.labels).sum())
    finally:
        model.train(was_training)
    return right


# ---- the task --------------------------------------------------------------------------------------------------------


def prepare(run: Run, tokenizer: Tokenizer | None, place: Place) -> ImageMaterial:
    """The images of a run, brought to the size of the model that is there already, or that it begins from."""
    data, config = run.data, run.data.images or ImagesConfig()
    parts = parts_of(data)
    like = run.model if isinstance(run.model, VisionConfig) else None
    if like is None and run.start:
        like = load_as(run.start, Vision).config
    shape = shape_of(parts["train"][0], config) if like is None else Shape.of(like)
    check_asked(config, shape, like)
    (train,) = read(parts["train"], shape, place)
    if len(train.names) < 2:
        raise TrainError(f"{train.name}: must show at least two classes, but shows one; there is nothing to tell apart")
    valid = [with_names(one, train.names) for one in read(parts["valid"], shape, place)]
    tests = [with_names(one, train.names) for one in read(parts["test"], shape, place)]
    held_out = not valid and data.hold_out != 0
    if held_out:
        train, held = held_out_of(train, data.hold_out, run.train.seed, place.tell)
        valid = [held]
    how = f"{shape.image} x {shape.image}, {'grey' if shape.channels == 1 else 'in colour'}"
    place.tell(Note(text=f"images: {len(train):,} to train on, {how}, of {len(train.names):,} classes"))
    return ImageMaterial(
        config=config,
        shape=shape,
        part=parts["train"][0],
        train=train,
        validation=valid[0] if valid else None,
        tests=tuple(tests),
        held_out=held_out,
        place=place,
    )


def parts_of(data: DataConfig) -> dict[str, list[Part]]:
    """Which files are for which part."""
    if len(data.train) != 1:
        raise TrainError(f"images must be in one folder: --data FOLDER, but {len(data.train)} are named")
    if len(data.valid) > 1:
        raise TrainError(f"images to validate on must be in one folder, but {len(data.valid)} are named")
    found = find(data.train[0])
    if "train" not in found:
        raise TrainError(f"{data.train[0]}: must hold images to train on, but has only its {', '.join(found)} part")
    chosen = {"train": [found["train"]]}
    for part, named in (("valid", data.valid), ("test", data.test)):
        chosen[part] = [named_part(name, part) for name in named] or ([found[part]] if part in found else [])
    return chosen


def named_part(name: str, part: str) -> Part:
    found = find(name)
    return found.get(part) or found.get("train") or next(iter(found.values()))


def check_asked(config: ImagesConfig, shape: Shape, like: VisionConfig | None) -> None:
    asked = replace(shape, image=config.image or shape.image, channels=config.channels or shape.channels)
    if like is not None and asked != shape:
        raise TrainError(
            f"`data.images` must be as the model that is trained further: image {shape.image}, channels "
            f"{shape.channels}, but is {asked.image} and {asked.channels}; leave it out"
        )


def read(parts: list[Part], shape: Shape, place: Place) -> list[Images]:
    found = [prepare_part(part, shape, place.folder) for part in parts]
    for one in found:
        if told := told_left_out(one):
            place.tell(Note(text=told, weight="warning"))
    return found


def held_out_of(images: Images, asked: int | None, seed: int, tell: Tell) -> tuple[Images, Images]:
    count = min(MOST_HELD_OUT, max(len(images.names), len(images) // 10)) if asked is None else asked
    if count >= len(images):
        raise TrainError(
            f"`data.hold_out` must be less than the {len(images):,} images there are, but is {count:,}; add images, "
            "name a validation set with --valid, or train without one (--hold-out 0)"
        )
    rest, held = hold_out(images, count, seed)
    if not len(held):
        raise TrainError(
            f"{images.name}: has too few images of each class to hold some out; add images, name a validation set with "
            "--valid, or train without one (--hold-out 0)"
        )
    tell(Note(text=f"{len(held):,} of {len(images):,} images are held out to validate on (name your own with --valid)"))
    return rest, held


@dataclass(frozen=True, kw_only=True)
class ImageMaterial:
    """The images of a run, and all that is done with them: see `attent.train.task.Material`."""

    config: ImagesConfig
    shape: Shape
    part: Part  # that `train` comes from
    train: Images
    validation: Images | None
    tests: tuple[Images, ...]
    held_out: bool  # the validation part was taken from the training data
    place: Place
    kind: type[Vision] = Vision
    tokenizer: None = None

    @property
    def title(self) -> str:
        return f"{len(self.train.names)} classes"

    @property
    def identity(self) -> Mapping[str, str]:
        validation = "" if self.validation is None else f"{self.validation.key} {len(self.validation)}"
        return {"data": f"{self.train.key} {len(self.train)} {validation}".strip()}

    @property
    def objective(self) -> type[ImageObjective]:
        return ImageObjective

    # the model

    def sized(self, run: Run, asked: Asked) -> tuple[Size, VisionConfig, str]:
        count, kind = len(self.train), self.place.device.type
        size = run.size or ("tiny" if kind == "cpu" else by_amount(count)[0])
        why = "as asked for" if run.size else f"for {count:,} images" + (" on a CPU" if kind == "cpu" else "")
        patch = asked.get("model", {}).get("patch") or patch_of(self.shape.image)
        config = vision(size, self.shape, patch, self.train)
        config = model_of(asked, config)
        if (config.image, config.channels) != (self.shape.image, self.shape.channels):
            raise TrainError("`model.image` and `model.channels` are those of the data: choose them as `data.images`")
        return size, with_room(config), why

    def kept(self, model: Vision, asked: Asked, where: str) -> VisionConfig:
        """The shape stays; the labels are those of the images."""
        other = {name for name in asked.get("model", {}) if name != "stack"}
        other |= {name for name in asked.get("model", {}).get("stack", {}) if "dropout" not in name}
        if other:
            raise TrainError(
                f"`model.{min(other)}` cannot be chosen with --from {where}: a model that is trained further keeps its "
                "shape and may have another dropout only; leave it out, or train without --from"
            )
        return replace(model_of(asked, model.config), labels=self.train.names)

    def begin(self, config: VisionConfig, loaded: Vision | None) -> Vision:
        """Where the labels are others, the layer that chooses among them is new."""
        model = build(config)
        if loaded is not None:
            weights = loaded.state_dict()
            if loaded.config.labels != config.labels:
                weights = {name: value for name, value in weights.items() if not name.startswith("classifier.")}
            model.load_state_dict(weights, strict=False)
        return model

    # the recipe

    def recipe(self, run: Run, size: Size | None, config: VisionConfig, *, further: bool) -> TrainConfig:
        train, device = run.train, self.place.device
        tokens = slots_of(config)
        batch = train.batch_tokens or tokens * (CPU_BATCH if device.type == "cpu" else BATCH)
        an_epoch = len(self.train) / (max(1, batch // tokens) * train.accumulate)
        epochs = CPU_EPOCHS if device.type == "cpu" else by_amount(len(self.train))[1]
        less = FURTHER if further else 1
        steps = train.steps or max(FEWEST_STEPS // less, math.ceil(epochs / less * an_epoch))
        every = train.valid_every or max(10, min(5_000, round(steps / VALIDATIONS)))
        rate = FURTHER_RATE if further else RATE
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

    def told(self, run: Run, why: str) -> Iterator[str]:
        train, model = run.train, run.model
        assert isinstance(model, VisionConfig)
        assert train.batch_tokens
        assert train.steps
        stack, batches = model.stack, self.batches(run)
        epochs = train.steps * train.accumulate / max(1, batches.steps(0))
        yield (
            f"model: {f'{run.size}, ' if run.size else ''}{stack.layers} layers, width {stack.width}, "
            f"{model.patches} patches of {model.patch} x {model.patch}; {why}"
        )
        yield (
            f"recipe: {train.optimiser}, learning rate up to {train.lr:g} after {train.warmup:,} updates, batches of "
            f"{batches.size:,} images, at most {train.steps:,} updates (about {epochs:,.0f} epochs)"
        )
        chance = self.config
        mirrored = ", or mirrored (--set data.images.flip=0 where left and right matter)" if chance.flip else ""
        yield (
            f"each time an image is moved by up to {round(chance.shift * self.shape.image)} pixels{mirrored}; "
            f"{chance.erase:.0%} have a part covered"
        )
        yield f"validation every {train.valid_every:,} updates, checkpoint every {train.save_every:,}"

    def batches(self, run: Run) -> ImageBatches:
        assert isinstance(run.model, VisionConfig)
        assert run.train.batch_tokens
        slots = slots_of(run.model)
        size = max(1, run.train.batch_tokens // slots)
        return ImageBatches(self.train, self.config, size=size, width=slots, seed=run.train.seed)

    def valid(self, run: Run) -> ImageBatches | None:
        if self.validation is None:
            return None
        assert isinstance(run.model, VisionConfig)
        return ImageBatches(self.validation, None, size=VALID_BATCH, width=slots_of(run.model))

    def judge(self, run: Run) -> Judge | None:
        valid = self.validation
        if valid is None:
            return None
        stop = self.place.stop
        return lambda model: Judged(figures={"accuracy": 100 * count_right(model, valid, stop) / len(valid)})

    # the end

    def outcomes(self, model: Vision, run: Run) -> Iterator[Outcome]:
        sets = [] if self.validation is None else [(self.validation, "validation")]
        for images, part in [*sets, *((one, "test") for one in self.tests)]:
            right, count = count_right(model, images), len(images)
            low, high = interval(right / count, count)
            figure, between = f"{100 * right / count:.2f}%", f"{100 * low:.2f} to {100 * high:.2f}"
            yield Outcome(
                name=Path(images.name).name if part == "test" else "held-out part" if self.held_out else images.name,
                part=part,  # type: ignore[arg-type]  # one of the two
                count=count,
                figures={"accuracy": 100 * right / count, "accuracy_low": 100 * low, "accuracy_high": 100 * high},
                told=f"accuracy {figure} (95% interval {between})",
                more=(("Accuracy", figure), ("95% interval", between)),
            )

    def after(self, model: Any, out: Path) -> None:
        """Nothing else is measured."""

    def data(self) -> card.Data:
        used, left_out = len(self.train), len(self.train.left_out)
        held = 0 if self.validation is None else len(self.validation)
        origin = card.Origin(
            name=self.train.name,
            read=used + left_out,
            used=used,
            dropped=(("no image", left_out),) if left_out else (),
            files=files_of(self.part),
        )
        how = "" if self.validation is None else self.validation.name
        return card.Data(
            origins=(origin,),
            source_tokens=0,
            target_tokens=0,
            key=self.train.key,
            held_out=held,
            held_out_how="drawn from each class by its share" if self.held_out else how,
        )

    def words(self, out: Path) -> card.Words:
        shell = f"attent classify {shlex.quote(str(out))} picture.png"
        return card.Words(
            title=f"A classifier of images ({', '.join(self.train.names[:4])}{' ...' * (len(self.train.names) > 4)})",
            unit="image",
            shell=shell,
            python=PYTHON.format(folder=str(out)),
            try_it=f"try it: {shell}",
            loss="image",
            note="The interval is Wilson's, of 95%.",
            both_sides=False,
        )


def by_amount(count: int) -> tuple[Size, int]:
    return next((size, epochs) for least, size, epochs in reversed(BY_AMOUNT) if count >= least)


def patch_of(image: int) -> int:
    """Pixels of a patch's side: the fewest, from 4 on, that leave no more patches than ViT-B/16 has."""
    fitting = [patch for patch in range(4, image + 1) if image % patch == 0]
    return next(patch for patch in fitting if (image // patch) ** 2 <= MOST_PATCHES)


def vision(size: Size, shape: Shape, patch: int, images: Images) -> VisionConfig:
    """ViT in our sizes. The mean of the patches says what an image shows: of few images that is learned more easily
    than a vector of its own."""
    mean, std = measured(images)
    if not isinstance(patch, int) or patch < 1 or shape.image % patch:
        raise TrainError(f"`model.patch` must divide {shape.image}, the side of the images, but is {patch!r}")
    stack = replace(presets.VIT, **SIZES[size])
    return with_room(
        VisionConfig(
            image=shape.image,
            patch=patch,
            channels=shape.channels,
            stack=stack,
            class_token=False,
            pooling="mean",
            labels=images.names,
            mean=mean,
            std=std,
        )
    )


def with_room(config: VisionConfig) -> VisionConfig:
    """As many learned positions as there are patches, and one for the class token."""
    if not isinstance(config.stack.positions, LearnedConfig):
        return config
    return replace(config, stack=replace(config.stack, positions=LearnedConfig(max_length=slots_of(config))))


def slots_of(config: VisionConfig) -> int:
    return config.patches + config.class_token


def files_of(part: Part) -> tuple[tuple[str, str], ...]:
    """With checksums, where they are few."""
    if not isinstance(part, IdxPart):
        return ()
    found = []
    for path in (part.images, part.labels):
        with open(path, "rb") as file:
            found.append((str(path), hashlib.file_digest(file, "sha256").hexdigest()))
    return tuple(found)
