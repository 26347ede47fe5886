"""The files of a Hugging Face folder: config.json, and weights in one safetensors file or several.

Links are followed, since the hub's cache is made of them; names that an index file gives must be plain names.
What the tensors mean is left to the families; our own folders are left to `attent.models.folder`.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from attent import settings
from attent.models.folder import (
    MANIFEST,
    NEW,
    PICKLES,
    FolderError,
    explained,
    read_safetensors,
    sync,
    write_safetensors,
)

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


# Reading.


def check_folder(root: Path, given: str) -> None:
    """Refuses what is not a folder, in words that help someone who gave the name of a model on the hub."""
    if root.is_dir():
        return
    problem = "is a file" if root.exists() else "does not exist"
    advice = "give the folder that holds config.json"
    if not root.exists() and HUB_NAME.fullmatch(given):
        name = given.rpartition("/")[2]
        advice += (
            f". If {given} is a model on the Hugging Face hub, download it first, "
            f"`hf download {given} --local-dir {name}`, and give the folder {name}"
        )
    raise FolderError(f"{given}: must be a model folder, but {problem}; {advice}")


def is_ours(root: Path) -> bool:
    """Whether attent has saved this folder. With a manifest it has, whatever may have happened to config.json since."""
    if any((root / name).exists() for name in (MANIFEST, MANIFEST + NEW)):
        return True
    return read_json(root / CONFIG).get("format") == "attent"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of the folder."""
    if not path.is_file():
        raise FolderError(f"{path.parent}: must hold {path.name}, but does not; is it a model folder?")
    try:
        return settings.read_json(path)
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error


def read_tensors(root: Path) -> dict[str, Tensor]:
    """Every tensor of the folder, by its foreign name."""
    try:
        if (root / WEIGHTS).is_file():
            return read_safetensors(root / WEIGHTS)
        if (root / INDEX).is_file():
            return read_shards(root)
    except OSError as error:
        raise FolderError(
            f"{error.filename or root}: cannot be read ({error.strerror}); check its permissions"
        ) from error
    raise FolderError(no_weights(root))


def read_shards(root: Path) -> dict[str, Tensor]:
    """The tensors of the files that the index names, each where the index says it is."""
    homes = read_json(root / INDEX).get("weight_map")
    if not isinstance(homes, dict) or not homes or not all(isinstance(home, str) for home in homes.values()):
        raise FolderError(f"{root / INDEX}: `weight_map` must map tensors to files; get the file again")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(homes.values())):
        listed = {name for name, home in homes.items() if home == shard}
        tensors |= check_shard(read_safetensors(shard_path(root, shard)), listed, root / shard)
    return tensors


def check_shard(tensors: dict[str, Tensor], listed: set[str], path: Path) -> dict[str, Tensor]:
    if tensors.keys() != listed:
        odd = sorted(tensors.keys() ^ listed)[0]
        problem = f"does not hold `{odd}`" if odd in listed else f"holds `{odd}`"
        raise FolderError(f"{path}: {problem}, unlike {INDEX} says; get both files again from one place")
    return tensors


def shard_path(root: Path, name: str) -> Path:
    """A file beside the index; never a way to somewhere else."""
    if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
        raise FolderError(
            f"{root / INDEX}: {quoted(name)} must be the name of a .safetensors file in the same folder; "
            f"do not trust this folder: get the model from its publisher"
        )
    if not (root / name).is_file():
        raise FolderError(f"{root / name}: is missing, but {INDEX} names it; download it too")
    return root / name


def no_weights(root: Path) -> str:
    pickles = sorted(path.name for path in root.iterdir() if path.name.endswith(PICKLES))
    if not pickles:
        return f"{root}: must hold {WEIGHTS} (or {INDEX}), but does not; download the weights too"
    new = f"{root.name}-safetensors"
    return (
        f"{root / pickles[0]}: is a pickle, which can run code and is never opened here, and there is no "
        f"{WEIGHTS}; convert it where `transformers` is installed: python -c 'from transformers import "
        f'AutoModelForSeq2SeqLM as M; M.from_pretrained("{root}").save_pretrained("{new}")\', then load {new}'
    )


# Writing.


def write_folder(
    folder: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """A new Hugging Face folder: written aside and renamed as a whole, so that there is never half of one."""
    root = Path(folder).expanduser().absolute()
    if root.exists() and not (root.is_dir() and not any(root.iterdir())):
        raise FolderError(f"{folder}: exists already; give a new folder, or remove that one first")
    with explained(root):
        root.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{root.name}.", suffix=NEW, dir=root.parent))
        try:
            write_json(aside / CONFIG, config)
            write_json(aside / GENERATION, generation)
            write_safetensors(dict(tensors), aside / WEIGHTS)
            publish(aside, root)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def publish(aside: Path, root: Path) -> None:
    """Everything on disk for sure, readable as other new files are, then under its name in one step."""
    shutil.copymode(aside / CONFIG, aside / WEIGHTS)  # safetensors makes files that only their owner can read
    aside.chmod(0o777 & ~umask())
    for path in (*aside.iterdir(), aside):
        sync(path)
    if root.is_dir():
        root.rmdir()  # empty: Windows renames onto nothing else
    os.rename(aside, root)
    sync(root.parent)


def umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def quoted(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) and len(value) < 80 else reprlib.repr(value)
