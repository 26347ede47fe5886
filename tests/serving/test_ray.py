"""`attent serve --ray`: replicas on a local Ray cluster, one of them killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attent import cli
from attent.decoding.translator import Translator
from attent.serving.ray_serve import retry_requests
from tests.serving.toy import Client

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "tests" / "models" / "saved_model"
WORDS = "one two three four five six seven eight nine ten".split()
SENTENCES = [" ".join(WORDS[(start * step) % 10] for step in range(1, 3 + start % 28)) for start in range(1, 201)]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'attent[ray]'")

# --- on a cluster ----------------------------------------------------------------------------------------------------


@contextmanager
def start_server(*flags: str) -> Iterator[tuple[Client, psutil.Process]]:
    command = [
        sys.executable,
        "-m",
        "attent",
        "serve",
        str(MODEL),
        "--src",
        "en",
        "--tgt",
        "de",
        "--port",
        "0",
        "--ray",
    ]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    server = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        yield Client(url), psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0


def list_replicas(server: psutil.Process) -> list[int]:
    children = server.children(recursive=True)
    return [child.pid for child in children if "ray::ServeReplica" in " ".join(child.cmdline())]


def translate(client: Client, text: str) -> tuple[int, str]:
    reply = client.post({"text": text, "source": "en", "target": "de", "beam_size": 12}, path="/v1/translate")
    return reply.status, reply.json["translations"][0]["text"] if reply.status == 200 else reply.error


@pytest.mark.slow
@needs_ray
def test_replicas_answer_as_the_translator_and_one_of_them_may_die() -> None:
    from attent.decoding.options import SearchOptions

    translations = Translator.load(MODEL).translate(SENTENCES, SearchOptions(beam_size=12))
    expected = [(200, translation.text) for translation in translations]
    with start_server("--replicas", "2", "--cache", "0") as (client, server), ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda text: translate(client, text), SENTENCES)) == expected

        first, second = list_replicas(server)
        replies = [threads.submit(translate, client, text) for text in [*SENTENCES, *SENTENCES]]
        while not replies[20].done():
            time.sleep(0.001)
        os.kill(first, signal.SIGKILL)
        for reply, right in zip(replies, [*expected, *expected], strict=True):
            assert reply.result() == right or reply.result()[0] == 503

        end = time.monotonic() + 60
        while len(replicas := list_replicas(server)) < 2 and time.monotonic() < end:
            time.sleep(0.2)
        assert second in replicas
        assert first not in replicas
        assert list(threads.map(lambda text: translate(client, text), SENTENCES)) == expected


@pytest.mark.slow
@needs_ray
def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "attent", "serve", str(tmp_path), "--port", "0", "--ray"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"attent: error: {tmp_path}")


# --- without Ray -----------------------------------------------------------------------------------------------------


def test_the_flag_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["serve", str(MODEL), "--src", "en", "--tgt", "de", "--ray"]) == 1
    assert "pip install 'attent[ray]'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "flags",
    [
        ["--replicas", "2"],
        ["--autoscale", "1", "2"],
        ["--ray", "--replicas", "2", "--autoscale", "1", "2"],
        ["--ray", "--workers", "2"],
        ["--ray", "--autoscale", "3", "2"],
        ["--ray", "--autoscale", "0", "2"],
        ["--ray", "--replicas", "0"],
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(MODEL), *flags]) == 2
    assert "--replicas" in (error := capsys.readouterr().err) or "--autoscale" in error


class Proxy:
    """Ray's proxy, whose first replicas die: it reads the request and returns without a response."""

    def __init__(self, num_deaths: int) -> None:
        self.num_deaths = num_deaths
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        if len(self.bodies) > self.num_deaths:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})


def call(app: ASGIApp, received: list[Message]) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return received.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(app(scope, receive, send))
    return sent


REQUEST: list[Message] = [
    {"type": "http.request", "body": b"one ", "more_body": True},
    {"type": "http.request", "body": b"two", "more_body": False},
]


@pytest.mark.parametrize(("num_deaths", "status", "num_attempts"), [(0, 200, 1), (1, 200, 2), (5, 503, 2)])
def test_a_request_is_sent_once_more(num_deaths: int, status: int, num_attempts: int) -> None:
    proxy = Proxy(num_deaths)
    start, end = call(retry_requests(proxy), [*REQUEST])
    assert start["status"] == status
    assert proxy.bodies == [b"one two"] * num_attempts
    assert end["body"] == b"one two" if status == 200 else "error" in json.loads(end["body"])


def test_a_request_whose_client_is_gone_is_not_repeated() -> None:
    proxy = Proxy(5)
    assert call(retry_requests(proxy), [REQUEST[0], {"type": "http.disconnect"}]) == []
    assert len(proxy.bodies) == 1
