"""Download a file: it arrives complete and verified, or not at all.

An interrupted download leaves PATH.part and resumes by HTTP Range; the validator of the server (ETag or Last-Modified,
kept in PATH.mark) tells whether the file is still the same. Transient errors are retried. Only http and https are
accepted, proxies are taken from the environment, and no more bytes are read than the file may have.
"""

import errno
import http.client
import os
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib import error as web
from urllib import request

from attent.storage.cache import CACHE_ENV_VAR
from attent.storage.errors import AttentError, StorageError
from attent.storage.manifest import hash_file

ProgressCallback = Callable[[int, int | None], None]  # bytes done, and the total if it is known

BLOCK_SIZE = 2**16
TIMEOUT_SECONDS = 30.0
RETRY_DELAYS = (1.0, 2.0, 4.0, 8.0)  # seconds
RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
MISSING_STATUSES = frozenset({404, 410})
PARTIAL_CONTENT, RANGE_NOT_SATISFIABLE = 206, 416


@dataclass(frozen=True)
class RemoteFile:
    url: str
    max_bytes: int
    sha256: str | None = None  # None if no checksum is published
    token: str | None = field(default=None, repr=False)  # for the server of `url`, not for one that it redirects to


class DownloadError(StorageError):
    """The file cannot be downloaded."""


class RemoteFileMissing(DownloadError):
    """The server has no such file."""


class _TransientError(Exception):
    """An error that may be gone at the next attempt."""


def download_file(
    remote: RemoteFile, path: Path, progress: ProgressCallback, retry_delays: Sequence[float] = RETRY_DELAYS
) -> str:
    """Download to `path`, unless it exists, and return the SHA-256. One process at a time may do so."""
    if not remote.url.startswith(("https://", "http://")):
        raise AttentError(f"`{remote.url}` must begin with https:// or http://; give a local file by its path")
    if path.exists():
        return _verify_checksum(remote, path)
    part = path.with_name(path.name + ".part")
    for delay in (*retry_delays, None):
        try:
            _try_download(remote, part, progress)
            break
        except _TransientError as error:
            if delay is None:
                attempts = f"{len(retry_delays) + 1} attempts" if retry_delays else "1 attempt"
                raise DownloadError(f"cannot download {remote.url}: {error}, after {attempts}") from error
            time.sleep(delay)
    checksum = _verify_checksum(remote, part)
    os.replace(part, path)
    _get_validator_path(part).unlink(missing_ok=True)
    return checksum


def _verify_checksum(remote: RemoteFile, path: Path) -> str:
    checksum = hash_file(path).sha256
    if remote.sha256 is None or remote.sha256 == checksum:
        return checksum
    path.unlink()
    raise StorageError(
        f"{path}: does not match {remote.url} (SHA-256 {checksum[:12]}... instead of {remote.sha256[:12]}...) and was "
        f"removed; run again, and if it happens again, report it to attent"
    )


def _try_download(remote: RemoteFile, part: Path, progress: ProgressCallback) -> None:
    offset = part.stat().st_size if part.exists() else 0
    if offset and hash_file(part).sha256 == remote.sha256:  # the process ended between the last byte and the renaming
        return
    with _classify_errors(remote, part), _open_url(_build_request(remote, part, offset)) as response:
        start = 0
        if response.status == PARTIAL_CONTENT:
            start, content_range = offset, response.headers.get("Content-Range", "")
            if not content_range.startswith(f"bytes {start}-"):
                received = content_range or "without Content-Range"
                raise _TransientError(f"the server sent another part of the file ({received})")
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdecimal() else None
        _check_size(remote, part, start, total)
        with open(part, "r+b" if start else "wb") as file:
            if start == 0:  # after truncation: the old bytes must never have the new validator
                etag = response.headers.get("ETag", "")
                is_weak = etag.startswith("W/") or not etag  # If-Range accepts a strong ETag, else the date
                validator = response.headers.get("Last-Modified", "") if is_weak else etag
                _get_validator_path(part).write_text(validator, encoding="utf-8")
            file.seek(start)
            while block := response.read(BLOCK_SIZE):
                if file.tell() + len(block) > remote.max_bytes:
                    file.truncate(0)
                    problem = f"sends more than the {remote.max_bytes:,} bytes it may have; nothing was kept"
                    raise StorageError(f"{remote.url}: {problem}")
                file.write(block)
                progress(file.tell(), total)
            if total is not None and file.tell() < total:
                raise _TransientError(f"the connection closed after {file.tell():,} of {total:,} bytes")


def _build_request(remote: RemoteFile, part: Path, offset: int) -> request.Request:
    """Request the missing bytes. Without a validator or checksum, a partial file cannot be trusted."""
    headers = {"User-Agent": "attent", "Accept-Encoding": "identity"}
    validator_path = _get_validator_path(part)
    validator = validator_path.read_text(encoding="utf-8") if offset and validator_path.exists() else ""
    if offset and (validator or remote.sha256):
        headers["Range"] = f"bytes={offset}-"
        if validator:
            headers["If-Range"] = validator
    http_request = request.Request(remote.url, headers=headers)
    if remote.token:
        http_request.add_unredirected_header("Authorization", f"Bearer {remote.token}")
    return http_request


def _get_validator_path(part: Path) -> Path:
    return part.with_suffix(".mark")


def _check_size(remote: RemoteFile, part: Path, start: int, total: int | None) -> None:
    if total is not None and total > remote.max_bytes:
        raise StorageError(
            f"{remote.url}: has {total:,} bytes, more than the {remote.max_bytes:,} it may have; nothing was kept"
        )
    missing = (total or 0) - start
    if shutil.disk_usage(part.parent).free < missing:
        raise OSError(errno.ENOSPC, f"{missing:,} bytes more are needed")


class _SecureRedirects(request.HTTPRedirectHandler):
    """Follows redirects to https and, from plain http, to http."""

    def redirect_request(
        self, req: request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> request.Request | None:
        allowed = ("https:",) if req.type == "https" else ("https:", "http:")
        if not newurl.lower().startswith(allowed):
            raise web.URLError(f"it redirects from {req.type} to {newurl}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open_url(http_request: request.Request) -> http.client.HTTPResponse:
    return request.build_opener(_SecureRedirects()).open(http_request, timeout=TIMEOUT_SECONDS)


@contextmanager
def _classify_errors(remote: RemoteFile, part: Path) -> Iterator[None]:
    try:
        yield
    except web.HTTPError as error:
        error.close()
        answer = f"the server answered {error.code} {error.reason}"
        if error.code == RANGE_NOT_SATISFIABLE:  # the part on disk is longer than the file
            part.unlink(missing_ok=True)
            raise _TransientError("the part on disk does not match the file") from error
        if error.code in RETRYABLE_STATUSES:
            raise _TransientError(answer) from error
        error_type = RemoteFileMissing if error.code in MISSING_STATUSES else DownloadError
        raise error_type(f"cannot download {remote.url}: {answer}") from error
    except web.URLError as error:
        reason: object = error.reason
        if isinstance(reason, TimeoutError | ConnectionResetError):
            raise _TransientError(f"the server does not answer ({reason})") from error
        message = getattr(reason, "strerror", None) or reason
        is_offline = isinstance(reason, OSError) and not isinstance(reason, ssl.SSLError)
        problem = f"no network ({message})" if is_offline else message
        raise DownloadError(f"cannot download {remote.url}: {problem}") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise _TransientError(f"the connection broke ({str(error) or type(error).__name__})") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        advice = f"free some space, or set {CACHE_ENV_VAR} to another disk"
        raise StorageError(f"{part.parent}: the disk is full ({error.strerror}); {advice}") from error


@contextmanager
def show_progress(title: str) -> Iterator[ProgressCallback]:
    if not sys.stderr.isatty():
        yield _print_once(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def _print_once(title: str) -> ProgressCallback:
    is_printed = False

    def show(done: int, total: int | None) -> None:
        nonlocal is_printed
        if not is_printed:
            is_printed = True
            print(f"downloading {title}" + (f" ({total / 1e6:.1f} MB)" if total else ""), file=sys.stderr)

    return show
