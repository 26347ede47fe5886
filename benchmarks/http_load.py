"""An HTTP load generator on asyncio streams: many connections in one process, each sending one request at a time.

Used by `benchmarks.serving` and by the load tests in tests/serving.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    status: int
    seconds: float
    body: bytes
    retry_after: int | None = None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """A keep-alive connection, opened again when the server closes it."""

    def __init__(self, url: str, headers: str = "") -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._headers = headers
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: Any) -> Answer:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{self._headers}"
        begin = time.perf_counter()
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status, fields = parse_head(await reader.readuntil(b"\r\n\r\n"))
        payload = await read_body(reader, fields)
        if fields.get("connection") == "close":
            self.close()
        retry_after = int(fields["retry-after"]) if "retry-after" in fields else None
        return Answer(status, time.perf_counter() - begin, payload, retry_after)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    return int(first.split()[1]), fields


async def read_body(reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
    if "chunked" not in fields.get("transfer-encoding", ""):
        return await reader.readexactly(int(fields.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


async def run_clients(
    url: str,
    count: int,
    requests: Iterable[tuple[str, Any]],
    handle: Callable[[Answer, Any], Awaitable[None] | None] = lambda answer, body: None,
    headers: str = "",
) -> list[float]:
    """Send (path, body) requests by `count` concurrent clients; return the seconds of each answer.

    `{client}` in the headers is the number of the client.
    """
    pending, seconds = iter(requests), list[float]()

    async def run_client(number: int) -> None:
        connection = Connection(url, headers.format(client=number))
        for path, body in pending:
            answer = await connection.post(path, body)
            seconds.append(answer.seconds)
            waiting = handle(answer, body)
            if waiting is not None:
                await waiting
        connection.close()

    await asyncio.gather(*map(run_client, range(count)))
    return seconds
