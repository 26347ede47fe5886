"""The encoder-only image model (ViT): an image is cut into patches, and each patch is a token."""

import torch
from torch import Tensor, nn

from attent.models.config import VisionConfig
from attent.models.encoder import Classifier, Pooler
from attent.models.weights import SavableModel
from attent.nn import Stack
from attent.nn.frontends import PatchEmbedding, add_class_token, check_pixels, normalize_pixels
from attent.nn.init import init_normal
from attent.storage.errors import AttentError


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
            raise AttentError("this model has no classifier (`labels` is empty in its config); see `compute_states`")
        return self.classifier(self.pool(self.compute_states(pixels)))

    def compute_states(self, pixels: Tensor) -> Tensor:
        """-> (B, T, E): the class token, if there is one, then the patches, row by row."""
        check_pixels(pixels, self.config)
        return self.encoder(add_class_token(self.patch_embedding(pixels), self.class_token))

    def pool(self, states: Tensor) -> Tensor:
        """Return the representation of the whole image: (B, T, E) -> (B, E)."""
        first_patch = int(self.config.class_token)
        pooled = states[:, 0] if self.config.pooling == "class" else states[:, first_patch:].mean(1)
        return pooled if self.pooler is None else self.pooler(pooled)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Convert bytes, or values from 0 to 1, to the model's input: (pixel - mean) / std."""
        return normalize_pixels(pixels, self.config, self.patch_embedding.weight)
