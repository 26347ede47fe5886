"""Batches of similar length, up to the limit and not beyond it."""

from __future__ import annotations

import torch

from attent.decoding.loading import batch_by_length, pad_token_ids, split_batches


def test_a_batch_has_as_many_padded_tokens_as_allowed() -> None:
    lengths = [4, 4, 4, 2, 2, 9, 1]
    assert list(split_batches(range(7), lengths, 8)) == [[0, 1], [2, 3], [4], [5], [6]]
    assert list(split_batches(range(7), lengths, 7)) == [[0], [1], [2], [3, 4], [5], [6]]
    assert list(split_batches(range(7), lengths, 12)) == [[0, 1, 2], [3, 4], [5], [6]]
    assert list(split_batches([], lengths, 8)) == []


def test_the_longest_rows_come_first_and_equal_ones_in_order() -> None:
    lengths = [2, 5, 3, 5, 0]
    assert list(batch_by_length(lengths, 10)) == [[1, 3], [2, 0, 4]]
    assert list(batch_by_length(lengths, 10, [0, 3])) == [[3, 0]]


def test_rows_are_padded_to_the_longest() -> None:
    ids, lengths = pad_token_ids([[5, 6, 7], [8], []], torch.device("cpu"), 9)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert lengths.tolist() == [3, 1, 0]
    assert pad_token_ids([[5], [6, 7]], torch.device("cpu"))[0].tolist() == [[5, 0], [6, 7]]
