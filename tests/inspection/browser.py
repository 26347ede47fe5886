"""A real browser for the tests of the page: Chromium without a window, one for each file of tests.

Where there is none, the tests are skipped and say why.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium: the machine's own, else the one that Playwright brought."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("no Chromium: Playwright is not installed (pip install playwright)")
    with sync_playwright() as playwright:
        chromium = launched(playwright)
        yield chromium
        chromium.close()


def launched(playwright: Any) -> Any:
    from playwright.sync_api import Error

    problems = []
    for path in [*filter(None, map(shutil.which, NAMES)), None]:
        try:
            return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as problem:
            problems.append(f"{path or 'that of Playwright'}: {str(problem).strip().splitlines()[0]}")
    pytest.skip(f"no Chromium: {'; '.join(problems)}")
