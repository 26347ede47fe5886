"""Where the tests run, and what makes them repeatable.

    pytest tests/laws --device cuda     the same laws on an accelerator

The laws need pytest and torch only, so that they run wherever these are.
"""

from __future__ import annotations

import sys

import pytest
import torch

DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.bfloat16)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tensors of the tests live: cpu (default), cuda")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # workers stand side by side, and toy tensors are quickest on one thread


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `dtype` argument runs in each number format that its device is used with."""
    if "dtype" in metafunc.fixturenames:
        kind = torch.device(metafunc.config.getoption("--device")).type
        dtypes = DTYPES.get(kind, (torch.float32,))
        metafunc.parametrize("dtype", dtypes, ids=[str(dtype).removeprefix("torch.") for dtype in dtypes])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: by itself at the end, it would keep one worker busy and the others idle."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_curves_by_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every little run would draw for half a second; the tests of curves call it by name."""
    curves = sys.modules.get("attent.training.curves")
    if curves is not None:
        monkeypatch.setattr(curves, "draw_curves", lambda *_: None)
