"""Whole models from the one Stack: a config in, a torch module out; and back from a folder on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from attent import settings
from attent.models import folder as model_folder
from attent.models import store
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


def fill(model: Seq2Seq, tensors: Mapping[str, Tensor], where: str) -> Seq2Seq:
    """An empty model with these weights, in eval mode; `where` is the file that errors will name."""
    store.fill(model, tensors, where)
    return model


def read(folder: str | os.PathLike[str]) -> Seq2Seq:
    """The model of one of our folders, in eval mode. (`attent.load` reads foreign ones too.)"""
    stored = model_folder.read(folder)
    file = settings.from_dict(ConfigFile, stored.config, os.path.join(folder, model_folder.CONFIG))
    return fill(build_empty(file.model), stored.tensors, os.path.join(folder, model_folder.WEIGHTS))
