"""Foreign weights in and out: `load` opens any model folder, ours or Hugging Face's, without `transformers` or pickle.

Each family has a module with its table of tensor names and its config keys; `conversion` holds what they share.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from attent import models
from attent.interop import hf_folder, marian_npz
from attent.interop.conversion import check_dtype
from attent.interop.hf_folder import Device, StrPath
from attent.models import CausalLM, Model, Seq2Seq, TextEncoder, VisionTransformer
from attent.nn import AudioConfig, ImageConfig, LearnedConfig, RelativeConfig, SinusoidalConfig
from attent.nn.frontends import FrontEndConfig
from attent.storage.errors import FolderError
from attent.storage.hub import locate_model
from attent.text.tokenizer_formats import find_marian_folder

__all__ = ["FAMILIES", "detect_family", "detect_frontend", "get_model_kind", "load", "load_as", "save_hf"]

M = TypeVar("M", Seq2Seq, CausalLM, TextEncoder, VisionTransformer)
MODEL_DESCRIPTIONS: dict[type, tuple[str, str]] = {  # what to call each kind of model, and its commands
    Seq2Seq: ("a translator (encoder and decoder)", "attent translate"),
    CausalLM: ("a language model (decoder only)", "attent generate"),
    TextEncoder: ("a text encoder", "attent fill, classify or embed"),
    VisionTransformer: ("an image encoder", "attent classify"),
    AudioConfig: ("a speech model", "attent transcribe"),  # a Seq2Seq with this front-end
    ImageConfig: ("a caption model", "attent caption"),
}

FAMILIES = {  # `model_type` in config.json -> the module here that reads it
    "bart": "bart", "bert": "bert", "gpt2": "gpt2", "llama": "llama", "m2m_100": "bart", "marian": "marian",
    "mbart": "bart", "mt5": "t5", "t5": "t5", "vit": "vit", "vision-encoder-decoder": "vision_encoder_decoder",
    "whisper": "whisper",
}  # fmt: skip


def import_family(name: str) -> Any:
    """Return the module with `load` and `save` of a family."""
    return import_module(f"attent.interop.{FAMILIES[name]}")


def load(folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> Model:
    """Load a model folder, ours or Hugging Face's, in eval mode, tensor by tensor: nothing is in memory twice.

    dtype   None: the dtype of the file, if all its tensors have the same
    device  None: the CPU

    >>> model = attent.load("runs/en-de")
    >>> model.config.encoder.layers
    1
    """
    check_dtype(dtype)
    root = hf_folder.resolve_folder(folder)
    if (native := find_marian_folder(root)) is not None:
        return marian_npz.load(native, dtype=dtype, device=device)
    if hf_folder.is_attent_folder(root):
        return models.read_model(root, dtype=dtype, device=device)
    return import_family(read_model_type(root / hf_folder.CONFIG_FILE)).load(root, dtype=dtype, device=device)


def read_model_type(path: Path) -> str:
    model_type = hf_folder.read_json(path).get("model_type")
    if model_type is None:
        advice = "give a folder that attent or transformers has saved"
        raise FolderError(f'{path}: must have "format": "attent" or a `model_type`, but has neither; {advice}')
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        value = hf_folder.quote_value(model_type)
        raise FolderError(f"{path}: model_type {value} is not supported; supported: {known}")
    return model_type


def load_as(
    folder: StrPath,
    model_class: type[M],
    *,
    frontend: type[FrontEndConfig] | None = None,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
) -> M:
    """Load a model of this class; another is rejected, with the command that takes it; `frontend`: None for ids."""
    model = load(folder, dtype=dtype, device=device)
    expected, actual = frontend or model_class, get_model_kind(model)
    if actual is not expected or not isinstance(model, model_class):
        expected_name, (actual_name, command) = MODEL_DESCRIPTIONS[expected][0], MODEL_DESCRIPTIONS[actual]
        problem = f"must be {expected_name}, but is {actual_name}; for that there is `{command}`"
        raise FolderError(f"{os.fspath(folder)}: {problem}")
    return model


def get_model_kind(model: Model) -> type:
    """Return the key of a model in MODEL_DESCRIPTIONS: its class, or the config of its front-end."""
    frontend = model.config.frontend if isinstance(model, Seq2Seq) else None
    return type(model) if frontend is None else type(frontend)


def detect_frontend(folder: StrPath) -> type[FrontEndConfig] | None:
    """Return the kind of front-end that config.json names; None for token ids."""
    path = locate_model(folder) / hf_folder.CONFIG_FILE
    config = hf_folder.read_json(path) if path.is_file() else {}
    if config.get("format") != "attent":
        return {"whisper": AudioConfig, "vision-encoder-decoder": ImageConfig}.get(str(config.get("model_type")))
    model = config.get("model")
    frontend = model.get("frontend") if isinstance(model, dict) else None
    kind = frontend.get("kind") if isinstance(frontend, dict) else None
    return next((front_end for front_end in (AudioConfig, ImageConfig) if front_end.kind == kind), None)


def save_hf(model: Model, folder: StrPath, *, pad: int | None = None) -> None:
    """Write a new folder for `transformers` in the nearest family, without a tokenizer; `pad`: the padding token."""
    import_family(detect_family(model)).save(model, folder, pad=pad)


def detect_family(model: Model) -> str:
    match model:
        case CausalLM():
            return "gpt2" if isinstance(model.config.stack.positions, LearnedConfig) else "llama"
        case TextEncoder():
            return "bert"
        case VisionTransformer():
            return "vit"
        case Seq2Seq() if isinstance(model.config.frontend, ImageConfig):
            return "vision-encoder-decoder"
        case Seq2Seq() if isinstance(model.config.frontend, AudioConfig):
            return "whisper"
        case Seq2Seq():
            encoder = model.config.stacks[0]
            match encoder.positions:
                case RelativeConfig():
                    return "t5"
                case LearnedConfig():
                    return "bart" if encoder.norm_order == "post" else "mbart"
                case SinusoidalConfig(order="fairseq"):
                    return "m2m_100"
            return "marian"
