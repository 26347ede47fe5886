"""The base class of whole models: a torch module with a config that can be saved as a folder."""

from __future__ import annotations

import os

from torch import nn

from attent.models import weights


class SavableModel(nn.Module):
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json, model.safetensors and manifest.json; `attent.load(folder)` reads them back."""
        weights.save_model(self, folder)
