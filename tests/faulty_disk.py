"""A simulated disk that fails at a chosen system call, for tests of crash safety."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from safetensors.torch import save_file

from attent.storage import atomic, manifest, tensor_files


class SimulatedKill(BaseException):
    """Simulates kill -9: once raised, nothing more is written."""


class FaultyDisk:
    """Counts calls of os.NAME and open, and raises `fault` at call `fail_at` (or from then on, `forever`)."""

    def __init__(
        self, patch: pytest.MonkeyPatch, fail_at: int, fault: BaseException, forever: bool, names: Sequence[str]
    ) -> None:
        self.calls, self.fail_at, self.fault, self.forever = 0, fail_at, fault, forever
        patch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of real ones would be slow
        for name in names:
            patch.setattr(os, name, self.guard(getattr(os, name)))
        for module in (atomic, manifest, tensor_files):
            patch.setattr(module, "open", self.guard(open), raising=False)
        patch.setattr(tensor_files, "save_file", self.guard(save_file))

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail_at or (self.forever and self.calls > self.fail_at):
                raise self.fault
            return function(*arguments, **options)

        return call
