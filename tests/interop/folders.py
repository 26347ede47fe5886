"""Change the files of a Hugging Face folder, and check that `load` rejects the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from attent.interop import load
from attent.storage.errors import FolderError


def assert_rejected(folder: str | Path, *words: str) -> None:
    with pytest.raises(FolderError) as caught:
        load(folder)
    for word in words:
        assert word in str(caught.value)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in change(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def split_shards(folder: Path, shards: int) -> None:
    """Split the weights into several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    weight_map = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))
    }
    for shard in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard, {"format": "pt"}
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
