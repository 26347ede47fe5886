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

from attent.storage.cache import CACHE_ENV_VAR
from attent.storage.errors import StorageError

ProgressCallback = Callable[[int, int | None], None]  # bytes that are there, and of how many, where that is known

BLOCK_SIZE = 2**16
TIMEOUT_SECONDS = 30.0  # seconds in which a server must say something
RETRY_DELAYS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt
RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})  # answers of a server that may be well again soon
MISSING_STATUSES = frozenset({404, 410})
PARTIAL_CONTENT, RANGE_NOT_SATISFIABLE = 206, 416


@dataclass(frozen=True)
class RemoteFile:
    """A file as its publisher has it."""

    url: str
    max_bytes: int  # bytes: one more, and it is not that file
    sha256: str | None = None  # None where no checksum is published


class DownloadError(StorageError):
    """The web does not give the file; another way to it may be open."""


class RemoteFileMissing(DownloadError):
    """The server has no such file."""


class _TransientError(Exception):
    """A fault that may be gone at the next attempt; its text is the reason."""


def download_file(
    remote: RemoteFile, path: Path, progress: ProgressCallback, retry_delays: Sequence[float] = RETRY_DELAYS
) -> str:
    """Puts the file at `path`, unless it lies there already, and gives its SHA-256. One process at a time."""
    if not remote.url.startswith(("https://", "http://")):
        raise ValueError(f"`{remote.url}` must begin with https:// or http://; a file on disk is given by its path")
    if path.exists():
        return _verify_checksum(remote, path)
    part = path.with_name(path.name + ".part")
    _download_with_retries(remote, part, progress, retry_delays)
    found = _verify_checksum(remote, part)
    os.replace(part, path)
    _get_validator_path(part).unlink(missing_ok=True)
    return found


def compute_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify_checksum(remote: RemoteFile, path: Path) -> str:
    found = compute_sha256(path)
    if remote.sha256 is None or remote.sha256 == found:
        return found
    path.unlink()
    raise StorageError(
        f"{path}: was not what {remote.url} should give (SHA-256 {found[:12]}... instead of {remote.sha256[:12]}...) "
        f"and was removed; run again, and if it stays so, report it to attent"
    )


def _download_with_retries(
    remote: RemoteFile, part: Path, progress: ProgressCallback, retry_delays: Sequence[float]
) -> None:
    """Attempts until the file is whole or the pauses are used up."""
    for pause in (*retry_delays, None):
        try:
            _try_download(remote, part, progress)
        except _TransientError as fault:
            if pause is None:
                tries = len(retry_delays) + 1
                raise DownloadError(f"cannot download {remote.url}: {fault}, after {tries} attempts") from fault
            time.sleep(pause)
        else:
            return


# One attempt.


def _try_download(remote: RemoteFile, part: Path, progress: ProgressCallback) -> None:
    """One request, and its answer onto the disk behind what was there before."""
    have = part.stat().st_size if part.exists() else 0
    if have and compute_sha256(part) == remote.sha256:  # the process ended between the last byte and the renaming
        return
    with _classify_errors(remote, part), _open_url(_build_request(remote, part, have)) as answer:
        start = _parse_start(answer.headers, have) if answer.status == PARTIAL_CONTENT else 0
        whole = _parse_total_size(answer.headers, start)
        _check_size(remote, part, start, whole)
        with open(part, "r+b" if start else "wb") as file:
            if start == 0:  # after the old part has gone: its bytes must never stand under a new mark
                _get_validator_path(part).write_text(_get_validator(answer.headers), encoding="utf-8")
            file.seek(start)
            _copy_body(answer, file, remote, whole, progress)


def _build_request(remote: RemoteFile, part: Path, offset: int) -> request.Request:
    """The request for all that is missing. Without a mark or a checksum, half a file cannot be told from another's."""
    headers = {"User-Agent": "attent", "Accept-Encoding": "identity"}
    mark = (
        _get_validator_path(part).read_text(encoding="utf-8") if offset and _get_validator_path(part).exists() else ""
    )
    if offset and (mark or remote.sha256):
        headers["Range"] = f"bytes={offset}-"
        if mark:
            headers["If-Range"] = mark
    return request.Request(remote.url, headers=headers)


def _get_validator_path(part: Path) -> Path:
    return part.with_suffix(".mark")


def _get_validator(headers: Message) -> str:
    """What If-Range may hold: a strong ETag, else the date of the last change."""
    etag = headers.get("ETag", "")
    return headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag


def _parse_start(headers: Message, offset: int) -> int:
    """The byte with which a partial answer begins: it must be the first that is missing."""
    given = headers.get("Content-Range", "")
    if not given.startswith(f"bytes {offset}-"):
        raise _TransientError(f"the server sent another part of the file ({given or 'it does not say which'})")
    return offset


def _parse_total_size(headers: Message, start: int) -> int | None:
    """The size of the whole file, where the server tells it."""
    length = headers.get("Content-Length", "")
    return start + int(length) if length.isdecimal() else None


def _check_size(remote: RemoteFile, part: Path, start: int, total: int | None) -> None:
    if total is not None and total > remote.max_bytes:
        raise StorageError(
            f"{remote.url}: has {total:,} bytes, more than the {remote.max_bytes:,} it may have; nothing was kept"
        )
    missing = (total or 0) - start
    if shutil.disk_usage(part.parent).free < missing:
        raise OSError(errno.ENOSPC, f"{missing:,} bytes more are needed")


def _copy_body(
    response: http.client.HTTPResponse,
    file: IO[bytes],
    remote: RemoteFile,
    total: int | None,
    progress: ProgressCallback,
) -> None:
    while block := response.read(BLOCK_SIZE):
        if file.tell() + len(block) > remote.max_bytes:
            file.truncate(0)
            raise StorageError(
                f"{remote.url}: sends more than the {remote.max_bytes:,} bytes it may have; nothing was kept"
            )
        file.write(block)
        progress(file.tell(), total)
    file.truncate()
    if total is not None and file.tell() < total:
        raise _TransientError(f"the connection closed after {file.tell():,} of {total:,} bytes")


# The web.


class _SecureRedirects(request.HTTPRedirectHandler):
    """Follows a server elsewhere, but never from https to where the line can be tampered with."""

    def redirect_request(
        self, req: request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> request.Request | None:
        if req.type == "https" and not newurl.lower().startswith("https:"):
            raise web.URLError(f"it redirects from https to {newurl}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open_url(http_request: request.Request) -> http.client.HTTPResponse:
    """Like urllib's urlopen, without its file:, ftp: and data: addresses."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.UnknownHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        _SecureRedirects(),
    ):
        opener.add_handler(handler)
    answer: http.client.HTTPResponse = opener.open(http_request, timeout=TIMEOUT_SECONDS)
    return answer


@contextmanager
def _classify_errors(remote: RemoteFile, part: Path) -> Iterator[None]:
    """Sorts what can go wrong into passing faults and sentences."""
    try:
        yield
    except web.HTTPError as error:
        error.close()
        raise _classify_http_error(remote, part, error) from error
    except web.URLError as error:
        raise _classify_url_error(remote, error.reason) from error
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise _TransientError(f"the connection broke ({str(error) or type(error).__name__})") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageError(
            f"{part.parent}: the disk is full ({error.strerror}); free some space, or set {CACHE_ENV_VAR} to another disk"
        ) from error


def _classify_http_error(remote: RemoteFile, part: Path, error: web.HTTPError) -> Exception:
    if error.code == RANGE_NOT_SATISFIABLE:  # what we have is longer than the file: it is another's
        part.unlink(missing_ok=True)
        return _TransientError("the part on disk does not fit the file")
    if error.code in RETRYABLE_STATUSES:
        return _TransientError(f"the server answered {error.code} {error.reason}")
    kind = RemoteFileMissing if error.code in MISSING_STATUSES else DownloadError
    return kind(f"cannot download {remote.url}: the server answered {error.code} {error.reason}")


def _classify_url_error(remote: RemoteFile, reason: object) -> Exception:
    if isinstance(reason, TimeoutError | ConnectionResetError):
        return _TransientError(f"the server does not answer ({reason})")
    is_offline = isinstance(reason, OSError) and not isinstance(reason, ssl.SSLError)
    words = getattr(reason, "strerror", None) or reason
    return DownloadError(f"cannot download {remote.url}: {f'no network ({words})' if is_offline else words}")


# What a person sees.


@contextmanager
def show_progress(title: str) -> Iterator[ProgressCallback]:
    """A bar with bytes, speed and time left at a terminal, else a plain line; on stderr."""
    if not sys.stderr.isatty():
        yield _print_once(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def _print_once(title: str) -> ProgressCallback:
    """Says once that bytes are coming, when the first have come."""
    said = False

    def show(done: int, total: int | None) -> None:
        nonlocal said
        if not said:
            said = True
            print(f"downloading {title}" + (f" ({total / 1e6:.1f} MB)" if total else ""), file=sys.stderr)

    return show
