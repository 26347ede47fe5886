"""Chromium for the tests of the page, one per test module; the tests are skipped if there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attent.inspection.html_page import render_page

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium, else Playwright's."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("no Chromium: Playwright is not installed (pip install playwright)")
    with sync_playwright() as playwright:
        chromium = launch_chromium(playwright)
        yield chromium
        chromium.close()


def launch_chromium(playwright: Any) -> Any:
    from playwright.sync_api import Error

    problems = []
    for path in [*filter(None, map(shutil.which, EXECUTABLES)), None]:
        try:
            return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            problems.append(f"{path or 'Playwright'}: {str(error).strip().splitlines()[0]}")
    pytest.skip(f"no Chromium: {'; '.join(problems)}")


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """open(document, fragment) returns the loaded page; at the end, fail on console errors and network requests."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(5000)
    problems = watch_problems(page)
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith(("http", "ws")) else None)

    def load_page(document: dict[str, Any], fragment: str = "") -> Any:
        (tmp_path / "page.html").write_text(render_page(document), encoding="utf-8")
        page.goto("about:blank")
        page.goto((tmp_path / "page.html").as_uri() + fragment)
        page.wait_for_selector("[role=tab][aria-selected=true]")
        return page

    yield load_page
    context.close()
    assert problems == []


def watch_problems(page: Any) -> list[str]:
    """Collect console errors, exceptions and dialogs of a page."""
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    return problems
