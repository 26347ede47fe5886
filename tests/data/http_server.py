"""A local HTTP server with configurable files and failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FakeSite:
    """Files and behavior of the server, and the requests that it received."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    endless: set[str] = field(default_factory=set)  # paths with an endless response
    sends_length: bool = True
    extra_claimed_bytes: int = 0  # added to the true Content-Length
    statuses: list[int] = field(default_factory=list)  # error statuses of the first requests
    cut_after: list[int] = field(default_factory=list)  # bytes until disconnecting, one per request
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # (path, Range)


@contextmanager
def serve_site() -> Iterator[FakeSite]:
    site = FakeSite()

    class SiteHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            handle_get(self, site)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), SiteHandler)
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def handle_get(handler: BaseHTTPRequestHandler, site: FakeSite) -> None:
    site.requests.append((handler.path, handler.headers.get("Range")))
    if site.statuses:
        handler.send_error(site.statuses.pop(0))
    elif handler.path in site.redirects:
        handler.send_response(302)
        handler.send_header("Location", site.redirects[handler.path])
        handler.end_headers()
    elif handler.path in site.endless:
        send_forever(handler)
    elif handler.path not in site.files:
        handler.send_error(404)
    else:
        send_file(handler, site, site.files[handler.path])


def send_file(handler: BaseHTTPRequestHandler, site: FakeSite, content: bytes) -> None:
    handler.send_response(200)
    if site.sends_length:
        handler.send_header("Content-Length", str(len(content) + site.extra_claimed_bytes))
    handler.end_headers()
    handler.wfile.write(content[: site.cut_after.pop(0) if site.cut_after else len(content)])


def send_forever(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(bytes(2**16))
    except OSError:  # the client has disconnected
        pass
