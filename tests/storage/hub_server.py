"""A local server that speaks the protocol of the Hugging Face hub, and can be told to stall, damage and refuse."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_SUFFIXES = (".safetensors", ".bin")


@dataclass
class FakeHub:
    """Repositories by name, each a mapping of file names to contents; every revision but `main` is unknown."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)  # files sent with a wrong first byte
    stalled: set[str] = field(default_factory=set)  # files of which only the first half is sent
    half_sent: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)  # with Range, Authorization


def hash_blob(content: bytes, is_large: bool) -> str:
    """Return the hub's ETag: SHA-256 of large files, git's hash of small ones."""
    if is_large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.respond(send_body=False)

    def do_GET(self) -> None:
        self.respond(send_body=True)

    def respond(self, send_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range"), self.headers.get("Authorization")))
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo, *rest = ["/".join(parts[2:4]), *parts[4:]] if is_api else ["/".join(parts[:2]), *parts[2:]]
        if repo in self.hub.gated:
            return self.refuse(403, "GatedRepo")
        if repo not in self.hub.repositories:
            return self.refuse(401, "RepoNotFound")
        files = self.hub.repositories[repo]
        if rest[1:2] not in ([], ["main"], [COMMIT]):
            return self.refuse(404, "RevisionNotFound")
        if is_api and rest[:1] == ["tree"]:
            return self.send_json([describe_file(name, content) for name, content in files.items()])
        if is_api:
            return self.send_json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        name = "/".join(rest[2:])
        if name not in files:
            return self.refuse(404, "EntryNotFound")
        return self.send_file(name, files[name], send_body)

    def send_file(self, name: str, content: bytes, send_body: bool) -> None:
        is_large = name.endswith(LARGE_SUFFIXES)
        etag = hash_blob(content, is_large)
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if is_large:
            self.send_header("X-Linked-Etag", f'"{etag}"')
            self.send_header("X-Linked-Size", str(len(content)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if not send_body:
            return
        if name in self.hub.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        if name in self.hub.stalled:
            self.wfile.write(content[start : len(content) // 2])
            self.wfile.flush()
            self.hub.half_sent.set()
            self.connection.recv(1)  # until the client is gone
            return
        self.wfile.write(content[start:])

    def send_json(self, data: object) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def describe_file(name: str, content: bytes) -> dict[str, object]:
    is_large = name.endswith(LARGE_SUFFIXES)
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": hash_blob(content, False)}
    lfs = {"lfs": {"oid": hash_blob(content, True), "size": len(content), "pointerSize": 134}}
    return entry | lfs if is_large else entry


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    handler = type("Handler", (HubHandler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
