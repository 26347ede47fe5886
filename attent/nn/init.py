"""Initial weights of embeddings and output layers."""

from torch import Tensor, nn


def init_normal(weight: Tensor, std: float) -> None:
    """Skip tensors on the meta device: for these torch would import its compiler, which takes two seconds."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)
