"""Whole models built from the one Stack: a config in, a torch module out; and back from a folder on disk."""

import os
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from attent import settings
from attent.models import folder as model_folder
from attent.models import presets
from attent.models.config import (
    CONFIG_FILE_TYPES,
    CONFIG_VERSION,
    CausalConfig,
    EncoderConfig,
    ModelConfig,
    Seq2SeqConfig,
    VisionConfig,
)
from attent.models.seq2seq import Seq2Seq, shift_right
from attent.models.single_stack import CausalLM, TextEncoder, VisionTransformer
from attent.models.weights import assign_weights
from attent.storage.errors import AttentError, FolderError

__all__ = [
    "CausalConfig", "CausalLM", "EncoderConfig", "Model", "ModelConfig", "Seq2Seq", "Seq2SeqConfig", "TextEncoder",
    "VisionConfig", "VisionTransformer", "build", "build_empty", "presets", "read_model", "shift_right",
]  # fmt: skip

Model = Seq2Seq | CausalLM | TextEncoder | VisionTransformer


@overload
def build(config: Seq2SeqConfig) -> Seq2Seq: ...
@overload
def build(config: CausalConfig) -> CausalLM: ...
@overload
def build(config: EncoderConfig) -> TextEncoder: ...
@overload
def build(config: VisionConfig) -> VisionTransformer: ...
@overload
def build(config: ModelConfig) -> Model: ...
def build(config: ModelConfig) -> Model:
    """Build a model with new weights, in training mode. `attent.presets` has named configs.

    >>> model = attent.build(attent.presets.tiny(vocab=100))
    >>> model(torch.tensor([[5, 6, 7, 2]]), torch.tensor([[1, 8, 9]])).shape
    torch.Size([1, 3, 100])
    """
    match config:
        case Seq2SeqConfig():
            return Seq2Seq(config)
        case CausalConfig():
            return CausalLM(config)
        case EncoderConfig():
            return TextEncoder(config)
        case VisionConfig():
            return VisionTransformer(config)
    raise AttentError(
        f"`config` must be that of a model, such as a Seq2SeqConfig (see attent.presets), but is a "
        f"{type(config).__name__}"
    )


@overload
def build_empty(config: Seq2SeqConfig) -> Seq2Seq: ...
@overload
def build_empty(config: CausalConfig) -> CausalLM: ...
@overload
def build_empty(config: EncoderConfig) -> TextEncoder: ...
@overload
def build_empty(config: VisionConfig) -> VisionTransformer: ...
@overload
def build_empty(config: ModelConfig) -> Model: ...
def build_empty(config: ModelConfig) -> Model:
    """Build a model on the meta device, without memory for its weights (see `assign_weights`)."""
    with torch.device("meta"):
        return build(config)


def read_model(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Model:
    """Load a model that attent saved, in eval mode. (`attent.load` reads Hugging Face folders too.)"""

    def copy_tensor(tensor: Tensor) -> Tensor:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device or "cpu", target, copy=True)

    root = Path(folder).expanduser()
    stored, where = model_folder.read_folder(root, copy_tensor), root / model_folder.CONFIG_FILE
    if "adapter" in stored.config:
        base = stored.config.get("base_model")
        raise FolderError(f"{root}: must be a model, but is an adapter of {base}; give that one, and this as --adapter")
    version, kind = stored.config.get("version", CONFIG_VERSION), stored.config.get("kind", "seq2seq")
    for key, value, known in (("version", version, [CONFIG_VERSION]), ("kind", kind, list(CONFIG_FILE_TYPES))):
        if value not in known:
            problem = f"has `{key}` {value!r}, and this attent reads {' or '.join(map(str, known))}"
            raise FolderError(f"{where}: {problem}; it may have been saved by a newer attent: update it")
    try:
        file = settings.from_dict(CONFIG_FILE_TYPES[kind], stored.config, str(where))
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error
    return assign_weights(build_empty(file.model), stored.tensors, root / model_folder.WEIGHTS_FILE)
