"""Counters of the training loop: pauses, and sums between two reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attent.training.state import Pauses, StepMetrics

CPU = torch.device("cpu")


def test_pauses_are_counted_per_validation() -> None:
    pauses = Pauses()
    assert pauses.pause_seconds_per_validation == 0
    pauses.add(3.0)
    assert (pauses.seconds, pauses.validation_seconds, pauses.num_validations) == (3.0, 0.0, 0)
    pauses.add(5.0, is_validation=True)
    pauses.add(2.0, is_validation=True)
    assert (pauses.seconds, pauses.validation_seconds, pauses.num_validations) == (10.0, 7.0, 2)
    assert pauses.pause_seconds_per_validation == 5.0


def test_sums_are_taken_once_and_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = StepMetrics(CPU, clock_start=1.0)
    batches: list[Any] = [SimpleNamespace(num_tokens=7, num_targets=3), SimpleNamespace(num_tokens=5, num_targets=2)]
    for norm in (4.0, float("inf"), float("nan")):
        metrics.add_loss(torch.tensor(2.0, requires_grad=True), torch.tensor(1.0))
        metrics.record_step(torch.tensor(norm), torch.tensor(float(norm != 4.0)))
        metrics.count_batches(batches)
        metrics.local_targets += 5
    assert (metrics.steps, metrics.tokens, metrics.num_targets, metrics.local_targets) == (3, 36, 15, 15)
    assert metrics.sums.tolist() == [6.0, 3.0, 4.0]
    assert metrics.nonfinite_counts.tolist() == [2.0, 2.0]
    metrics.record_step(torch.tensor(1.0), torch.tensor(0.0))
    assert metrics.nonfinite_counts.tolist() == [0.0, 2.0]
    monkeypatch.setattr("time.monotonic", lambda: 9.0)
    sums = metrics.take_sums()
    assert (sums.dtype, sums.tolist()) == (torch.float64, [6.0, 3.0, 5.0])
    assert metrics.sums.tolist() == [0.0, 0.0, 0.0]
    assert (metrics.steps, metrics.local_targets, metrics.clock_start) == (0, 0.0, 9.0)
    assert (metrics.tokens, metrics.num_targets) == (0, 0)


def test_a_snapshot_is_restored() -> None:
    metrics = StepMetrics(CPU)
    metrics.add_loss(torch.tensor(2.0), torch.tensor(1.0))
    metrics.local_targets = 4.0
    address, saved = metrics.sums.data_ptr(), metrics.snapshot()
    metrics.add_loss(torch.tensor(5.0), torch.tensor(5.0))
    metrics.local_targets = 9.0
    metrics.restore(saved)
    assert (metrics.sums.tolist(), metrics.local_targets) == ([2.0, 1.0, 0.0], 4.0)
    assert metrics.sums.data_ptr() == address  # which CUDA graphs add to
