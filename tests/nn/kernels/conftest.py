"""Kernels run on a GPU, or in Triton's interpreter on a CPU:

    pytest tests/nn/kernels --device cuda
    TRITON_INTERPRET=1 pytest tests/nn/kernels

Triton reads that variable when it is imported, so these tests run in a separate process (`make test` runs both).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attent.nn import kernels


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    can_run = kernels.TRITON_INSTALLED and (kernels.INTERPRETER_MODE or config.getoption("--device") != "cpu")
    return None if can_run else True


@pytest.fixture(params=["float32", "bfloat16"])
def dtype_of(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if device.type == "cpu" and request.param == "bfloat16":
        pytest.skip("the interpreter has no products in bfloat16")
    dtype: torch.dtype = getattr(torch, request.param)
    return dtype
