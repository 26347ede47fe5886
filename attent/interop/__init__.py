"""Foreign weights in and out: `load` opens any model folder, ours or Hugging Face's, whichever it is.

One file per family holds its table of names and its whitelist of settings (`marian`); what reads and writes
foreign files is in `files`. No code of a folder is run, no pickle is opened, `transformers` is not needed.
"""

from __future__ import annotations

import os
from pathlib import Path

from attent import models
from attent.interop import files, marian
from attent.models import Seq2Seq
from attent.models.folder import FolderError

__all__ = ["load", "marian"]

FAMILIES = {"marian": marian.load}  # `model_type` in config.json -> who reads it


def load(folder: str | os.PathLike[str]) -> Seq2Seq:
    """The model of a folder, ours or Hugging Face's, in eval mode, in the precision that it is stored in."""
    root = Path(folder).expanduser()
    files.check_folder(root, os.fspath(folder))
    if files.is_ours(root):
        return models.read(root)
    where = root / files.CONFIG
    model_type = files.read_json(where).get("model_type")
    if model_type is None:
        raise FolderError(
            f'{where}: must have "format": "attent" or a `model_type`, but has neither; '
            f"give a folder that attent or transformers has saved"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise FolderError(
            f"{where}: model_type {files.quoted(model_type)} is not supported yet; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type](root)
