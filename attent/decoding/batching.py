"""Batches of rows of similar length, padded to the longest."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor


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
