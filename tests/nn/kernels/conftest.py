"""Kernels run on a GPU, or in Triton's interpreter on a CPU:

    pytest tests/nn/kernels --device cuda
    TRITON_INTERPRET=1 pytest tests/nn/kernels

Triton reads that variable when it is imported, so these tests run in a separate process (`make test` runs both).
Elsewhere each file is skipped without importing it, since an import needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attent.nn import kernels


def find_skip_reason(config: pytest.Config) -> str | None:
    if not kernels.TRITON_INSTALLED:
        return "kernels need Triton, which is not installed (pip install triton; Linux only)"
    if not kernels.INTERPRETER_MODE and torch.device(config.getoption("--device")).type != "cuda":
        return "kernels need a GPU (--device cuda) or Triton's interpreter (TRITON_INTERPRET=1)"
    return None


class SkippedItem(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(find_skip_reason(self.config) or "")


class SkippedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield SkippedItem.from_parent(self, name=self.path.stem)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return SkippedFile.from_parent(parent, path=module_path) if find_skip_reason(parent.config) else None


@pytest.fixture(params=["float32", "bfloat16"])
def dtype_of(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if device.type == "cpu" and request.param == "bfloat16":
        pytest.skip("the interpreter has no products in bfloat16")
    dtype: torch.dtype = getattr(torch, request.param)
    return dtype
