"""Device selection and reproducibility of the tests.

    pytest tests/laws --device cuda     run the same laws on an accelerator

The laws need only pytest and torch.
"""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch

DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.bfloat16)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tensors of the tests live: cpu (default), cuda")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # xdist workers run in parallel, and toy tensors are fastest on one thread
    torch.backends.cudnn.allow_tf32 = False  # of LSTMs, whose steps are compared with whole sequences in float32


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a `dtype` argument with each dtype that is used on the device."""
    if "dtype" in metafunc.fixturenames:
        kind = torch.device(metafunc.config.getoption("--device")).type
        dtypes = DTYPES.get(kind, (torch.float32,))
        metafunc.parametrize("dtype", dtypes, ids=[str(dtype).removeprefix("torch.") for dtype in dtypes])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest tests first: at the end, one would keep a single worker busy and the others idle."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


def pytest_collection_finish() -> None:
    """Exempt imported modules and collected tests from garbage collection, which would visit them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep conversions and downloads of the tests out of the user's cache."""
    os.environ.setdefault("ATTENT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_curves_by_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip drawing curves, which takes half a second per run; the tests of curves call the function directly."""
    curves = sys.modules.get("attent.training.curves")
    if curves is not None:
        monkeypatch.setattr(curves, "draw_curves", lambda *_: None)
