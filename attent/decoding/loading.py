"""Load model folders for inference: device, dtype, tokenizer, batches. The same for every kind of model."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attent import settings
from attent.decoding.options import InputError
from attent.models.folder import CONFIG_FILE, WEIGHTS_FILE, read_side_file, read_tokenizer
from attent.nn.devices import choose_device
from attent.text.language_tags import find_language
from attent.text.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A CPU gains nothing from more rows; an accelerator takes what fits into half of its free memory.
CPU_MAX_BYTES, FREE_MEMORY_FRACTION, DEFAULT_FREE_BYTES = 2**30, 0.5, 4 * 2**30


def check_model_exists(folder: Path) -> None:
    path = folder.expanduser()
    is_saved = (path / CONFIG_FILE).exists() or (path / WEIGHTS_FILE).exists()
    if (path / "run.toml").exists() and not is_saved:
        raise InputError(
            f"{folder}: must hold a model, but its run has not saved one yet (the first validation does); "
            f"resume it with: attent train --out {folder}"
        )


def check_tokenizer_size(size: int, vocab: int, name: str = "the tokenizer") -> None:
    if size > vocab:
        raise InputError(
            f"{name} must have at most the model's {vocab:,} tokens, but has {size:,}; load both from the same folder"
        )


def resolve_device_and_dtype(
    device: str | torch.device | None, dtype: str | None
) -> tuple[torch.device, torch.dtype | None]:
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype!r}")
    placed = device if isinstance(device, torch.device) else choose_device(device)
    return placed, None if dtype is None else DTYPES[dtype]


def load_tokenizer(folder: Path, src: str | None = None, tgt: str | None = None) -> Tokenizer:
    """Load the tokenizer, verified if there is a manifest; by default for the languages of the training run."""
    data, tokenizer = read_data_settings(folder), read_tokenizer(folder) or Tokenizer.load(folder)
    return tokenizer.bind_languages(src or data.get("src"), tgt or data.get("tgt"))


def read_data_settings(folder: Path | None) -> dict[str, Any]:
    """Return the `data` table of the training run, verified by the manifest; empty for a folder from elsewhere."""
    content = None if folder is None else read_side_file(folder, "run.toml")
    with suppress(settings.SettingsError):  # another tool's file
        data = {} if content is None else settings.parse_toml(content, f"{folder}/run.toml").get("data")
        return data if isinstance(data, dict) else {}
    return {}


def resolve_target_lang(to: str | None, known: tuple[str, ...], model: Path) -> str | None:
    """Return the language tag of each source, or None. "" means none, for a model fine-tuned without tags."""
    names = ", ".join(known)
    if to is None and known:
        raise InputError(f"{model}: has several target languages; choose one with --to: {names}")
    if to and not known:
        raise InputError(f"{model}: has one target language, so --to must be left out, but is `{to}`")
    matches = find_language(to, known) if to else []
    if to and len(matches) != 1:
        meaning = f", which can be {' or '.join(matches)}" if matches else ""
        raise InputError(f"{model}: --to must be one of its target languages ({names}), but is `{to}`{meaning}")
    return matches[0] if matches else None


def compute_max_rows(row_bytes: int, device: torch.device, cpu_limit: int, limit: int) -> int:
    if device.type == "cpu":
        return min(cpu_limit, CPU_MAX_BYTES // row_bytes)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else DEFAULT_FREE_BYTES
    return min(limit, int(FREE_MEMORY_FRACTION * free / row_bytes))


def batch_by_length(
    lengths: Sequence[int], batch_tokens: int, indices: Iterable[int] | None = None
) -> Iterator[list[int]]:
    """Yield batches of indices (all, or those given), longest rows first: a lack of memory shows at once."""
    indices = range(len(lengths)) if indices is None else indices
    return split_batches(sorted(indices, key=lambda index: (-lengths[index], index)), lengths, batch_tokens)


def split_batches(indices: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield consecutive indices, as many as have `batch_tokens` tokens when padded to the longest; at least one."""
    batch: list[int] = []
    longest = 0
    for index in indices:
        longest = max(longest, lengths[index])
        if batch and (len(batch) + 1) * longest > batch_tokens:
            yield batch
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


def pad_token_ids(rows: Sequence[Sequence[int]], device: torch.device, pad: int = 0) -> tuple[Tensor, Tensor]:
    lengths = [len(row) for row in rows]
    padded = [[*row, *[pad] * (max(lengths) - len(row))] for row in rows]
    return torch.tensor(padded, device=device), torch.tensor(lengths, device=device)
