"""Foreign weights in and out: `load` opens any model folder, ours or Hugging Face's, whichever it is.

One file per family holds its table of names and its whitelist of settings; what they share is in `table`, and what
reads and writes foreign files is in `files`. No code of a folder is run, no pickle is opened, `transformers` is not
needed.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from attent import models
from attent.interop import hf_folder
from attent.interop.conversion import check_dtype
from attent.models import CausalLM, Model, Seq2Seq, TextEncoder, VisionTransformer
from attent.nn import LearnedConfig, RelativeConfig
from attent.storage.errors import FolderError

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILIES", "detect_family", "load", "load_as", "save_hf"]

M = TypeVar("M", Seq2Seq, CausalLM, TextEncoder, VisionTransformer)
MODEL_DESCRIPTIONS: dict[type, tuple[str, str]] = {  # what each kind is called, and which commands are for it
    Seq2Seq: ("a translator (encoder and decoder)", "attent translate"),
    CausalLM: ("a language model (a decoder alone)", "attent generate"),
    TextEncoder: ("an encoder of text", "attent fill, classify or embed"),
    VisionTransformer: ("an encoder of images", "attent classify"),
}

FAMILIES = {  # `model_type` in config.json -> the module here that reads it
    "bert": "bert", "gpt2": "gpt2", "llama": "llama", "marian": "marian", "mt5": "t5", "t5": "t5", "vit": "vit",
}  # fmt: skip


class FamilyModule(Protocol):
    """What the module of a family has."""

    def load(
        self, folder: str | os.PathLike[str], *, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> Model: ...
    def save(self, model: Model, folder: str | os.PathLike[str], *, pad: int | None) -> None: ...


def import_family(name: str) -> FamilyModule:
    return cast("FamilyModule", import_module(f"attent.interop.{FAMILIES[name]}"))


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Model:
    """The model of a folder, ours or Hugging Face's, in eval mode.

    Each tensor is read from its file when its turn comes and converted on its way, so that nothing is held twice.
    dtype   the precision to load it in; None: as it is stored, where all tensors are stored alike
    device  where to; None: the CPU
    """
    check_dtype(dtype)
    root = hf_folder.resolve_folder(folder)
    if hf_folder.is_attent_folder(root):
        return models.read_model(root, dtype=dtype, device=device)
    return import_family(read_model_type(root / hf_folder.CONFIG_FILE)).load(root, dtype=dtype, device=device)


def read_model_type(path: Path) -> str:
    """Which family a Hugging Face folder is of, if it is one that we have."""
    model_type = hf_folder.read_json(path).get("model_type")
    if model_type is None:
        raise FolderError(
            f'{path}: must have "format": "attent" or a `model_type`, but has neither; '
            f"give a folder that attent or transformers has saved"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise FolderError(
            f"{path}: model_type {hf_folder.quote_value(model_type)} is not supported yet; supported: {', '.join(FAMILIES)}"
        )
    return model_type


def load_as(
    folder: str | os.PathLike[str],
    model_class: type[M],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> M:
    """The model of a folder that must be of this kind: another is refused, with the command that is made for it."""
    model = load(folder, dtype=dtype, device=device)
    if not isinstance(model, model_class):
        found, command = MODEL_DESCRIPTIONS[type(model)]
        raise FolderError(
            f"{os.fspath(folder)}: must be {MODEL_DESCRIPTIONS[model_class][0]}, but is {found}; for that there is `{command}`"
        )
    return model


def save_hf(model: Model, folder: str | os.PathLike[str], *, pad: int | None = None) -> None:
    """Writes a new folder that `transformers` loads, as the family that the model is of; without a tokenizer.

    A model that the family cannot express is refused by the name of the field. `pad` is the token id that fills up
    short rows there; images have none.
    """
    if isinstance(model, VisionTransformer):
        from attent.interop import vit

        vit.save(model, folder)
    else:
        import_family(detect_family(model)).save(model, folder, pad=pad)


def detect_family(model: Model) -> str:
    """The family that a model is nearest to."""
    match model:
        case CausalLM():
            return "gpt2" if isinstance(model.config.stack.positions, LearnedConfig) else "llama"
        case TextEncoder():
            return "bert"
        case VisionTransformer():
            return "vit"
        case Seq2Seq():
            return "t5" if isinstance(model.config.encoder.positions, RelativeConfig) else "marian"
