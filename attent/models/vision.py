"""The encoder-only image model (ViT): an image is cut into patches, and each patch is a token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.models.config import VisionConfig
from attent.models.encoder import Classifier, Pooler, make_linear
from attent.models.weights import SavableModel
from attent.nn import Stack
from attent.nn.init import init_normal


class VisionTransformer(SavableModel):
    """Pixels -> logits over labels."""

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
        """(B, C, image_size, image_size), normalized (see `normalize`) -> (B, labels)."""
        if self.classifier is None:
            raise ValueError("this model has no classifier (`labels` is empty in its config); see `compute_states`")
        return self.classifier(self.pool(self.compute_states(pixels)))

    def compute_states(self, pixels: Tensor) -> Tensor:
        """-> (B, T, E): the class token, if there is one, then the patches, row by row."""
        self.check_pixels(pixels)
        x = self.patch_embedding(pixels)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1).to(x.dtype), x], 1)
        return self.encoder(x)

    def pool(self, states: Tensor) -> Tensor:
        """Return the representation of the whole image: (B, T, E) -> (B, E)."""
        first_patch = int(self.config.class_token)
        pooled = states[:, 0] if self.config.pooling == "class" else states[:, first_patch:].mean(1)
        return pooled if self.pooler is None else self.pooler(pooled)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Convert bytes, or values from 0 to 1, to the model's input: (pixel - mean) / std."""
        weight = self.patch_embedding.weight
        pixels = pixels.to(weight.device, weight.dtype) / (255 if pixels.dtype == torch.uint8 else 1)
        mean, std = (pixels.new_tensor(values)[:, None, None] for values in (self.config.mean, self.config.std))
        return (pixels - mean) / std

    def check_pixels(self, pixels: Tensor) -> None:
        shape = (self.config.channels, self.config.image_size, self.config.image_size)
        if not isinstance(pixels, Tensor) or pixels.shape[1:] != shape or not pixels.is_floating_point():
            is_now = f"{pixels.dtype} of {tuple(pixels.shape)}" if isinstance(pixels, Tensor) else repr(type(pixels))
            raise ValueError(f"pixels must be floating numbers of (B, {', '.join(map(str, shape))}), but are {is_now}")


class PatchEmbedding(nn.Module):
    """(B, C, height, width) -> one vector per patch, (B, T, E), row by row."""

    def __init__(self, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        layer = make_linear(channels * patch_size * patch_size, width)
        self.weight, self.bias = layer.weight, layer.bias  # (E, C * P * P), (E,)

    def forward(self, pixels: Tensor) -> Tensor:
        P = self.patch_size
        x = pixels.unfold(2, P, P).unfold(3, P, P)  # (B, C, rows, columns, P, P)
        x = x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # (B, T, C * P * P)
        return F.linear(x, self.weight, self.bias)
