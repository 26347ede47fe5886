"""Whole models from the one Stack: a config in, a torch module out; and back from a folder on disk."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from attent import settings
from attent.models import folder as model_folder
from attent.models.config import ConfigFile, Seq2SeqConfig
from attent.models.folder import FolderError
from attent.models.seq2seq import Seq2Seq, shift_right
from attent.models.store import fill

__all__ = ["Seq2Seq", "Seq2SeqConfig", "build", "build_empty", "read", "shift_right"]


def build(config: Seq2SeqConfig) -> Seq2Seq:
    """A new model with fresh weights, in training mode. `attent.presets` has configs with a name."""
    if not isinstance(config, Seq2SeqConfig):
        raise ValueError(f"`config` must be a Seq2SeqConfig (see attent.presets), but is a {type(config).__name__}")
    return Seq2Seq(config)


def build_empty(config: Seq2SeqConfig) -> Seq2Seq:
    """The model without memory for its weights: for those who bring them (see `fill`)."""
    with torch.device("meta"):
        return build(config)


def read(folder: str | os.PathLike[str]) -> Seq2Seq:
    """The model of one of our folders, in eval mode. (`attent.load` reads foreign ones too.)"""
    root = Path(folder).expanduser()
    stored, where = model_folder.read(root), root / model_folder.CONFIG
    for key, known in (("version", ConfigFile.version), ("kind", ConfigFile.kind)):
        if stored.config.get(key, known) != known:
            found = f"has `{key}` {stored.config[key]!r}, and this attent reads {known!r}"
            raise FolderError(f"{where}: {found}; it may have been saved by a newer attent: update it")
    try:
        file = settings.from_dict(ConfigFile, stored.config, str(where))
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error
    return fill(build_empty(file.model), stored.tensors, root / model_folder.WEIGHTS)
