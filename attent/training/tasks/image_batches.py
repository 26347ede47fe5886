"""Batches of images with random augmentation (shift, flip, erasing), and the classification loss on them."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.data.arrays import Array
from attent.data.images import ImageDataConfig, ImageDataset
from attent.data.loader import BatchT, EpochCache, PrefetchLoader
from attent.training.objective import Objective
from attent.training.tasks.base import RowBatch

MAX_ERASED_AREA = 0.2  # of an image


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

    Without a config: all examples in their order, without augmentation. Subclasses define `build_batch`.
    """

    def __init__(self, count: int, config: ImageDataConfig | None, *, batch_size: int, seed: int = 0) -> None:
        self.count, self.config, self.seed = count, config, seed
        self.batch_size = max(1, min(batch_size, count))
        self._get_order = EpochCache(self._build_order)

    def build_batch(self, ids: Array, rng: np.random.Generator) -> BatchT:
        raise NotImplementedError

    def num_batches(self, epoch: int) -> int:
        return self.count // self.batch_size if self.config else -(-self.count // self.batch_size)

    def get_batch(self, epoch: int, batch_index: int) -> BatchT:
        if not 0 <= batch_index < self.num_batches(epoch):
            raise IndexError(f"epoch {epoch} has {self.num_batches(epoch)} batches, so there is no batch {batch_index}")
        ids = self._get_order(epoch)[batch_index * self.batch_size : (batch_index + 1) * self.batch_size]
        return self.build_batch(ids, np.random.default_rng((self.seed, epoch, batch_index)))

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

    def build_batch(self, ids: Array, rng: np.random.Generator) -> ImageBatch:
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
