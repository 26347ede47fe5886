"""The encoder alone, over an image (ViT): cut into patches, each patch is a token."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from attent.models import weights
from attent.models.config import VisionConfig
from attent.models.encoder import Classifier, Pooler, make_linear
from attent.nn import Stack
from attent.nn.init import init_normal


class VisionTransformer(nn.Module):
    """Pixels in, logits over labels out."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width = config.stack.width
        self.patch_embedding = PatchEmbedding(config.channels, config.patch_size, width)
        self.class_token = nn.Parameter(torch.empty(width)) if config.class_token else None
        if self.class_token is not None:
            init_normal(self.class_token, std=0.02)
        self.encoder = Stack(config.stack)
        self.pooler = Pooler(width) if config.pooler else None
        self.classifier = Classifier(config.stack, len(config.labels)) if config.labels else None

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, image, image), normalised as the config says (`normalised`) -> (B, labels)."""
        if self.classifier is None:
            raise ValueError("this model has no head that classifies (`labels` is empty in its config); see `states`")
        return self.classifier(self.pool(self.compute_states(pixels)))

    def compute_states(self, pixels: Tensor) -> Tensor:
        """-> (B, T, E): the class token, where there is one, then the patches, row by row."""
        self.check_pixels(pixels)
        x = self.patch_embedding(pixels)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1).to(x.dtype), x], 1)
        return self.encoder(x)

    def pool(self, states: Tensor) -> Tensor:
        """What is said of the whole image: (B, T, E) -> (B, E)."""
        one = states[:, 0] if self.config.pooling == "class" else states[:, int(self.config.class_token) :].mean(1)
        return one if self.pooler is None else self.pooler(one)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Bytes, or numbers from 0 to 1, as the model reads them."""
        weight = self.patch_embedding.weight
        pixels = pixels.to(weight.device, weight.dtype) / (255 if pixels.dtype == torch.uint8 else 1)
        mean, std = (pixels.new_tensor(of)[:, None, None] for of in (self.config.mean, self.config.std))
        return (pixels - mean) / std

    def check_pixels(self, pixels: Tensor) -> None:
        wanted = (self.config.channels, self.config.image_size, self.config.image_size)
        if not isinstance(pixels, Tensor) or pixels.shape[1:] != wanted or not pixels.is_floating_point():
            is_now = f"{pixels.dtype} of {tuple(pixels.shape)}" if isinstance(pixels, Tensor) else repr(type(pixels))
            raise ValueError(f"pixels must be floating numbers of (B, {', '.join(map(str, wanted))}), but are {is_now}")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json, model.safetensors and manifest.json; `attent.load(folder)` reads them back."""
        weights.save_model(self, folder)


class PatchEmbedding(nn.Module):
    """An image -> its patches as vectors: (B, C, height, width) -> (B, T, E), row by row."""

    def __init__(self, channels: int, size: int, width: int) -> None:
        super().__init__()
        self.size = size
        layer = make_linear(channels * size * size, width)
        self.weight, self.bias = layer.weight, layer.bias  # (E, C * P * P), (E,)

    def forward(self, pixels: Tensor) -> Tensor:
        P = self.size
        x = pixels.unfold(2, P, P).unfold(3, P, P)  # (B, C, rows, columns, P, P)
        x = x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # (B, T, C * P * P)
        return nn.functional.linear(x, self.weight, self.bias)
