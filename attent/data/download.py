"""One file from the web onto the disk: whole and verified, or not there.

A download that breaks leaves PATH.part and goes on from there the next time, by HTTP's Range; the server's own mark of
the file (ETag or Last-Modified, kept in PATH.mark) tells whether it is still the same. Passing faults are tried again,
others end in one sentence. Only http and https are spoken, proxies are taken from the environment, and no more is
read than the file may have. Where it comes from and where it goes is left to `builtin`.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO
from urllib import error as web
from urllib import request

from attent.data.cache import VARIABLE
from attent.data.pairs import CorpusError

Progress = Callable[[int, int | None], None]  # bytes that are there, and of how many, where that is known

BLOCK = 2**16
TIMEOUT = 30.0  # seconds in which a server must say something
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # answers of a server that may be well again soon
GONE = frozenset({404, 410})
PARTIAL, BEYOND_THE_END = 206, 416


@dataclass(frozen=True)
class Remote:
    """A file as its publisher has it."""

    url: str
    most: int  # bytes: one more, and it is not that file
    sha256: str | None = None  # None where no checksum is published


class Unreachable(CorpusError):
    """The web does not give the file; another way to it may be open."""


class Missing(Unreachable):
    """The server has no such file."""


class _Passing(Exception):
    """A fault that may be gone at the next attempt; its text is the reason."""


def fetch(remote: Remote, path: Path, progress: Progress, pauses: Sequence[float] = PAUSES) -> str:
    """Puts the file at `path`, unless it lies there already, and gives its SHA-256. One process at a time."""
    if not remote.url.startswith(("https://", "http://")):
        raise ValueError(f"`{remote.url}` must begin with https:// or http://; a file on disk is given by its path")
    if path.exists():
        return _verify(remote, path)
    part = path.with_name(path.name + ".part")
    _persist(remote, part, progress, pauses)
    found = _verify(remote, part)
    os.replace(part, path)
    _mark_file(part).unlink(missing_ok=True)
    return found


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(remote: Remote, path: Path) -> str:
    found = sha256(path)
    if remote.sha256 is None or remote.sha256 == found:
        return found
    path.unlink()
    raise CorpusError(
        f"{path}: was not what {remote.url} should give (SHA-256 {found[:12]}... instead of {remote.sha256[:12]}...) "
        f"and was removed; run again, and if it stays so, report it to attent"
    )


def _persist(remote: Remote, part: Path, progress: Progress, pauses: Sequence[float]) -> None:
    """Attempts until the file is whole or the pauses are used up."""
    for pause in (*pauses, None):
        try:
            _attempt(remote, part, progress)
        except _Passing as fault:
            if pause is None:
                tries = len(pauses) + 1
                raise Unreachable(f"cannot download {remote.url}: {fault}, after {tries} attempts") from fault
            time.sleep(pause)
        else:
            return


# One attempt.


def _attempt(remote: Remote, part: Path, progress: Progress) -> None:
    """One request, and its answer onto the disk behind what was there before."""
    have = part.stat().st_size if part.exists() else 0
    if have and sha256(part) == remote.sha256:  # the process ended between the last byte and the renaming
        return
    with _explained(remote, part), _open(_asking(remote, part, have)) as answer:
        start = _start(answer.headers, have) if answer.status == PARTIAL else 0
        whole = _whole(answer.headers, start)
        _make_sure_it_fits(remote, part, start, whole)
        with open(part, "r+b" if start else "wb") as file:
            if start == 0:  # after the old part has gone: its bytes must never stand under a new mark
                _mark_file(part).write_text(_mark(answer.headers), encoding="utf-8")
            file.seek(start)
            _copy(answer, file, remote, whole, progress)


def _asking(remote: Remote, part: Path, have: int) -> request.Request:
    """The request for all that is missing. Without a mark or a checksum, half a file cannot be told from another's."""
    headers = {"User-Agent": "attent", "Accept-Encoding": "identity"}
    mark = _mark_file(part).read_text(encoding="utf-8") if have and _mark_file(part).exists() else ""
    if have and (mark or remote.sha256):
        headers["Range"] = f"bytes={have}-"
        if mark:
            headers["If-Range"] = mark
    return request.Request(remote.url, headers=headers)


def _mark_file(part: Path) -> Path:
    return part.with_suffix(".mark")


def _mark(headers: Message) -> str:
    """What If-Range may hold: a strong ETag, else the date of the last change."""
    etag = headers.get("ETag", "")
    return headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag


def _start(headers: Message, have: int) -> int:
    """The byte with which a partial answer begins: it must be the first that is missing."""
    given = headers.get("Content-Range", "")
    if not given.startswith(f"bytes {have}-"):
        raise _Passing(f"the server sent another part of the file ({given or 'it does not say which'})")
    return have


def _whole(headers: Message, start: int) -> int | None:
    """The size of the whole file, where the server tells it."""
    length = headers.get("Content-Length", "")
    return start + int(length) if length.isdecimal() else None


def _make_sure_it_fits(remote: Remote, part: Path, start: int, whole: int | None) -> None:
    if whole is not None and whole > remote.most:
        raise CorpusError(
            f"{remote.url}: has {whole:,} bytes, more than the {remote.most:,} it may have; nothing was kept"
        )
    missing = (whole or 0) - start
    if shutil.disk_usage(part.parent).free < missing:
        raise OSError(errno.ENOSPC, f"{missing:,} bytes more are needed")


def _copy(answer: http.client.HTTPResponse, file: IO[bytes], remote: Remote, whole: int | None, show: Progress) -> None:
    while block := answer.read(BLOCK):
        if file.tell() + len(block) > remote.most:
            file.truncate(0)
            raise CorpusError(f"{remote.url}: sends more than the {remote.most:,} bytes it may have; nothing was kept")
        file.write(block)
        show(file.tell(), whole)
    file.truncate()
    if whole is not None and file.tell() < whole:
        raise _Passing(f"the connection closed after {file.tell():,} of {whole:,} bytes")


# The web.


class _Redirects(request.HTTPRedirectHandler):
    """Follows a server elsewhere, but never from https to where the line can be tampered with."""

    def redirect_request(
        self, req: request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> request.Request | None:
        if req.type == "https" and not newurl.lower().startswith("https:"):
            raise web.URLError(f"it redirects from https to {newurl}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(asking: request.Request) -> http.client.HTTPResponse:
    """Like urllib's urlopen, without its file:, ftp: and data: addresses."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.UnknownHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    answer: http.client.HTTPResponse = opener.open(asking, timeout=TIMEOUT)
    return answer


@contextmanager
def _explained(remote: Remote, part: Path) -> Iterator[None]:
    """Sorts what can go wrong into passing faults and sentences."""
    try:
        yield
    except web.HTTPError as error:
        error.close()
        raise _http_fault(remote, part, error) from error
    except web.URLError as error:
        raise _url_fault(remote, error.reason) from error
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise _Passing(f"the connection broke ({str(error) or type(error).__name__})") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CorpusError(
            f"{part.parent}: the disk is full ({error.strerror}); free some space, or set {VARIABLE} to another disk"
        ) from error


def _http_fault(remote: Remote, part: Path, error: web.HTTPError) -> Exception:
    if error.code == BEYOND_THE_END:  # what we have is longer than the file: it is another's
        part.unlink(missing_ok=True)
        return _Passing("the part on disk does not fit the file")
    if error.code in PASSING:
        return _Passing(f"the server answered {error.code} {error.reason}")
    kind = Missing if error.code in GONE else Unreachable
    return kind(f"cannot download {remote.url}: the server answered {error.code} {error.reason}")


def _url_fault(remote: Remote, reason: object) -> Exception:
    if isinstance(reason, TimeoutError | ConnectionResetError):
        return _Passing(f"the server does not answer ({reason})")
    is_offline = isinstance(reason, OSError) and not isinstance(reason, ssl.SSLError)
    words = getattr(reason, "strerror", None) or reason
    return Unreachable(f"cannot download {remote.url}: {f'no network ({words})' if is_offline else words}")


# What a person sees.


@contextmanager
def shown(title: str) -> Iterator[Progress]:
    """A bar with bytes, speed and time left at a terminal, else a plain line; on stderr."""
    if not sys.stderr.isatty():
        yield _plain_line(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def _plain_line(title: str) -> Progress:
    """Says once that bytes are coming, when the first have come."""
    said = False

    def show(done: int, total: int | None) -> None:
        nonlocal said
        if not said:
            said = True
            print(f"downloading {title}" + (f" ({total / 1e6:.1f} MB)" if total else ""), file=sys.stderr)

    return show
