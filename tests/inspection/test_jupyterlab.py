"""JupyterLab shows an inspection as the interactive page, inside a frame that cannot reach the notebook."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("jupyterlab") is None, reason="JupyterLab is not installed (pip install jupyterlab)"),
]
ROOT = Path(__file__).resolve().parents[2]
CELL = 'import attent\nattent.look(attent.Translator.load("model"), "seven")'
START_SECONDS, CELL_SECONDS = 60, 120  # of a busy machine


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A JupyterLab with a notebook and a model in its folder; yields its address."""
    shutil.copytree(ROOT / "tests" / "models" / "saved_model", tmp_path / "model")
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": CELL, "outputs": [], "execution_count": None}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "look.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    folders = {f"JUPYTER_{name}_DIR": str(tmp_path / f".{name}") for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = {**os.environ, **folders, "IPYTHONDIR": str(tmp_path / ".ipython"), "PYTHONPATH": str(ROOT)}
    options = ("--no-browser", "--port=0", "--ip=127.0.0.1", "--ServerApp.token=", "--allow-root")
    command = [sys.executable, "-m", "jupyterlab", *options, f"--notebook-dir={tmp_path}"]
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
    try:
        yield wait_for_server(process, tmp_path)
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for_server(process: subprocess.Popen[bytes], folder: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        address = re.search(r"http://127\.0\.0\.1:\d+/", (folder / "log.txt").read_text(encoding="utf-8"))
        if address is not None:
            try:
                urlopen(f"{address[0]}api").close()
            except URLError:
                pass
            else:
                return address[0]
        time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start: {(folder / 'log.txt').read_text(encoding='utf-8')[-2000:]}")


def test_notebook_shows_the_page(server: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1500, "height": 1150})
    page.set_default_timeout(CELL_SECONDS * 1000)
    page.goto(f"{server}lab/tree/look.ipynb?reset")
    page.locator(".jp-NotebookPanel .cm-content").first.click()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    page.keyboard.press("Shift+Enter")
    assert page.locator("iframe[title='attent look']").get_attribute("sandbox") == "allow-scripts"
    frame = page.frame_locator("iframe[title='attent look']")
    frame.locator("[role=tab][aria-selected=true]").wait_for()
    frame.get_by_role("tab", name="Decoding").click()
    frame.get_by_text("sieben").first.wait_for()
    frame.get_by_role("tab", name="Heads").click()
    frame.locator(".grid-cells [data-path='encoder.blocks.0.self_attn'][data-head='1']").click()
    frame.locator("#saying", has_text="Head 1 of layer 0, encoder").wait_for()
    frame.locator(".words.queries .word").nth(1).hover()
    frame.locator("#saying", has_text="s attends to").wait_for()
    page.close()
