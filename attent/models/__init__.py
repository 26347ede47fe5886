"""Whole models from the one Stack: a config in, a torch module out; and back from a folder on disk."""

from __future__ import annotations

import os

import torch
from torch import nn

from attent import settings
from attent.models import folder as model_folder
from attent.models.config import ConfigFile, Seq2SeqConfig
from attent.models.seq2seq import Seq2Seq, shift_right

__all__ = ["Seq2Seq", "Seq2SeqConfig", "build", "build_empty", "fill", "read", "shift_right"]


def build(config: Seq2SeqConfig) -> Seq2Seq:
    """A new model with fresh weights, in training mode. `attent.presets` has configs with a name."""
    if not isinstance(config, Seq2SeqConfig):
        raise ValueError(f"`config` must be a Seq2SeqConfig (see attent.presets), but is a {type(config).__name__}")
    return Seq2Seq(config)


def build_empty(config: Seq2SeqConfig) -> Seq2Seq:
    """The model without memory for its weights: for those who bring them (see `fill`)."""
    with torch.device("meta"):
        return build(config)


def fill(model: Seq2Seq, tensors: dict[str, torch.Tensor], where: str) -> Seq2Seq:
    """Give an empty model its weights as they are, without a copy, and tie again what was tied. In eval mode."""
    ties = tied_names(model)
    expected = {name: value.shape for name, value in model.state_dict().items()}
    model_folder.check_tensors(expected, tensors, where)
    model.load_state_dict(tensors, assign=True)
    for name, first in ties.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(first))
    return model.eval()


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several -> its first name."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties


def read(folder: str | os.PathLike[str]) -> Seq2Seq:
    """The model of one of our folders, in eval mode. (`attent.load` reads foreign ones too.)"""
    stored = model_folder.read(folder)
    file = settings.from_dict(ConfigFile, stored.config, os.path.join(folder, model_folder.CONFIG))
    return fill(build_empty(file.model), stored.tensors, os.path.join(folder, model_folder.WEIGHTS))
