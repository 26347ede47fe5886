"""Downloads from a local server that disconnects, refuses, redirects and lies."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import select
import socket
import ssl
from collections.abc import Iterator
from http.client import HTTPMessage
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import Request

import pytest

from attent.storage.cache import CACHE_ENV_VAR
from attent.storage.download import (
    BLOCK_SIZE,
    RETRY_DELAYS,
    TIMEOUT_SECONDS,
    DownloadError,
    RemoteFile,
    RemoteFileMissing,
    _check_size,
    _classify_errors,
    _open_url,
    _SecureRedirects,
    _TransientError,
    download_file,
    show_progress,
)
from attent.storage.errors import StorageError
from tests.data.http_server import FakeSite, serve_site

CONTENT = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NO_PAUSES = (0.0, 0.0, 0.0)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    monkeypatch.setenv("no_proxy", "*")
    with serve_site() as site:
        site.files["/data"] = CONTENT
        yield site


def ignore_progress(done: int, total: int | None) -> None:
    pass


def download(
    site: FakeSite, path: Path, name: str = "/data", sha256: str | None = SHA256, max_bytes: int = len(CONTENT)
) -> str:
    return download_file(RemoteFile(site.url + name, max_bytes, sha256), path, ignore_progress, NO_PAUSES)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- complete files ----------------------------------------------------------------------------------------


def test_download_leaves_only_the_file(site: FakeSite, tmp_path: Path) -> None:
    assert download(site, tmp_path / "data") == SHA256
    assert (tmp_path / "data").read_bytes() == CONTENT
    assert list_names(tmp_path) == ["data"]


def test_progress_counts_up_to_the_total(site: FakeSite, tmp_path: Path) -> None:
    steps: list[tuple[int, int | None]] = []
    download_file(
        RemoteFile(site.url + "/data", len(CONTENT), SHA256), tmp_path / "data", lambda *step: steps.append(step)
    )
    assert steps == sorted(steps)
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert len(steps) > 3


def test_existing_file_is_not_requested(site: FakeSite, tmp_path: Path) -> None:
    download(site, tmp_path / "data")
    download(site, tmp_path / "data")
    assert len(site.requests) == 1


def test_checksum_is_returned_without_a_published_one(site: FakeSite, tmp_path: Path) -> None:
    assert download(site, tmp_path / "data", sha256=None) == SHA256


def test_response_without_length_is_read_to_the_end(site: FakeSite, tmp_path: Path) -> None:
    site.sends_length = False
    assert download(site, tmp_path / "data") == SHA256


def test_redirect_is_followed(site: FakeSite, tmp_path: Path) -> None:
    site.redirects["/old"] = site.url + "/data"
    assert download(site, tmp_path / "data", "/old") == SHA256


# ---- wrong files -------------------------------------------------------------------------------------------


def test_wrong_checksum_is_refused_and_the_file_is_not_used(site: FakeSite, tmp_path: Path) -> None:
    site.files["/data"] = CONTENT[:-1] + b"x"
    with pytest.raises(StorageError, match=r"does not match http.*/data \(SHA-256 .*was removed; run again"):
        download(site, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "data.part").exists()


def test_existing_file_must_match_the_checksum(site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"something else")
    with pytest.raises(StorageError, match="does not match"):
        download(site, tmp_path / "data")
    assert download(site, tmp_path / "data") == SHA256


def test_endless_response_is_cut_off(site: FakeSite, tmp_path: Path) -> None:
    site.endless.add("/flood")
    with pytest.raises(StorageError, match="sends more than the 300,000 bytes it may have"):
        download(site, tmp_path / "data", "/flood")
    assert not (tmp_path / "data").exists()
    assert (tmp_path / "data.part").stat().st_size == 0


def test_file_that_is_too_large_is_refused_before_it_is_read(site: FakeSite, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="has 300,000 bytes, more than the 1,000 it may have"):
        download(site, tmp_path / "data", max_bytes=1000)
    assert not (tmp_path / "data.part").exists()


# ---- broken downloads --------------------------------------------------------------------------------------


def test_interrupted_download_resumes(site: FakeSite, tmp_path: Path) -> None:
    site.cut_after = [100_000]
    assert download(site, tmp_path / "data") == SHA256
    assert site.requests == [("/data", None), ("/data", "bytes=100000-")]


def test_server_without_ranges_sends_the_whole_file(site: FakeSite, tmp_path: Path) -> None:
    site.cut_after, site.ranges = [100_000], False
    assert download(site, tmp_path / "data") == SHA256
    assert (tmp_path / "data").read_bytes() == CONTENT


def test_changed_file_is_downloaded_again(site: FakeSite, tmp_path: Path) -> None:
    site.cut_after = [100_000]
    with pytest.raises(DownloadError):
        download_file(RemoteFile(site.url + "/data", 400_000), tmp_path / "data", ignore_progress, retry_delays=())
    site.files["/data"], site.etag = bytes(reversed(CONTENT)), '"two"'
    download(site, tmp_path / "data", sha256=None)
    assert (tmp_path / "data").read_bytes() == bytes(reversed(CONTENT))


def test_part_without_validator_and_checksum_is_not_trusted(site: FakeSite, tmp_path: Path) -> None:
    site.cut_after, site.etag = [100_000], None
    download(site, tmp_path / "data", sha256=None)
    assert site.requests == [("/data", None), ("/data", None)]


def test_weak_etag_is_not_a_validator(site: FakeSite, tmp_path: Path) -> None:
    site.cut_after, site.etag = [100_000], 'W/"one"'
    download(site, tmp_path / "data", sha256=None)
    assert site.requests == [("/data", None), ("/data", None)]


def test_part_longer_than_the_file_is_discarded(site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "data.part").write_bytes(bytes(400_000))
    assert download(site, tmp_path / "data") == SHA256
    assert [requested for _, requested in site.requests] == ["bytes=400000-", None]


def test_complete_part_needs_no_request(site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "data.part").write_bytes(CONTENT)
    assert download(site, tmp_path / "data") == SHA256
    assert site.requests == []


def test_interrupted_download_keeps_its_part_and_resumes(site: FakeSite, tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        if done > 150_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_file(RemoteFile(site.url + "/data", len(CONTENT)), tmp_path / "data", interrupt)
    part_size = (tmp_path / "data.part").stat().st_size
    assert 150_000 < part_size < len(CONTENT)
    assert download(site, tmp_path / "data", sha256=None) == SHA256
    assert site.requests[-1] == ("/data", f"bytes={part_size}-")


def test_transient_errors_are_retried(site: FakeSite, tmp_path: Path) -> None:
    site.statuses = [500, 503]
    assert download(site, tmp_path / "data") == SHA256
    assert len(site.requests) == 3


def test_retries_end_after_the_last_delay(site: FakeSite, tmp_path: Path) -> None:
    site.statuses = [502] * 9
    with pytest.raises(DownloadError, match="the server answered 502 Bad Gateway, after 4 attempts"):
        download(site, tmp_path / "data")
    assert len(site.requests) == 4


def test_a_body_that_is_too_long_by_one_byte_is_refused(site: FakeSite, tmp_path: Path) -> None:
    site.sends_length = False
    with pytest.raises(StorageError, match="sends more than the 299,999 bytes it may have; nothing was kept"):
        download(site, tmp_path / "data", max_bytes=len(CONTENT) - 1)
    assert download(site, tmp_path / "data") == SHA256


def test_requests_have_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = list[float]()
    monkeypatch.setattr("urllib.request.OpenerDirector.open", lambda self, url, timeout: timeouts.append(timeout))
    _open_url(Request("http://x"))
    assert timeouts == [30.0]


def test_delays_and_limits_by_default() -> None:
    assert (RETRY_DELAYS, TIMEOUT_SECONDS, BLOCK_SIZE) == ((1.0, 2.0, 4.0, 8.0), 30.0, 65_536)


@pytest.mark.parametrize(
    ("status", "error_type", "attempts"),
    [(404, RemoteFileMissing, 1), (410, RemoteFileMissing, 1), (403, DownloadError, 1)]
    + [(status, DownloadError, 2) for status in (408, 425, 429, 500, 502, 503, 504)],
)
def test_statuses_that_are_retried(
    status: int, error_type: type[DownloadError], attempts: int, site: FakeSite, tmp_path: Path
) -> None:
    site.statuses = [status] * 2
    remote = RemoteFile(site.url + "/data", len(CONTENT), SHA256)
    with pytest.raises(error_type, match=f"the server answered {status}") as error:
        download_file(remote, tmp_path / "data", ignore_progress, (0.0,))
    assert (type(error.value), len(site.requests)) == (error_type, attempts)


def test_another_part_than_the_requested_one_is_refused(site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "data.part").write_bytes(CONTENT[:7])
    site.range_shift = 1
    with pytest.raises(
        DownloadError, match=r"sent another part of the file \(bytes 8-299999/300000\), after 1 attempt$"
    ):
        download_file(RemoteFile(site.url + "/data", len(CONTENT), SHA256), tmp_path / "data", ignore_progress, ())


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (TimeoutError("timed out"), _TransientError, "the connection broke (timed out)"),
        (ConnectionResetError(), _TransientError, "the connection broke (ConnectionResetError)"),
        (ssl.SSLError("bad record"), _TransientError, "the connection broke (('bad record',))"),
        (URLError(TimeoutError("timed out")), _TransientError, "the server does not answer (timed out)"),
        (URLError(OSError(101, "unreachable")), DownloadError, "cannot download http://x: no network (unreachable)"),
        (URLError(ssl.SSLError("expired")), DownloadError, "cannot download http://x: ('expired',)"),
        (OSError(errno.EIO, "damaged"), OSError, "[Errno 5] damaged"),
    ],
)
def test_errors_are_transient_or_final(raised: Exception, expected: type[Exception], text: str) -> None:
    with pytest.raises(expected) as caught, _classify_errors(RemoteFile("http://x", 1), Path("part")):
        raise raised
    assert (type(caught.value), str(caught.value)) == (expected, text)


def test_redirects_never_leave_https() -> None:
    redirect = _SecureRedirects().redirect_request
    arguments = (io.BytesIO(), 302, "Found", HTTPMessage())
    with pytest.raises(URLError, match="it redirects from https to http://b"):
        redirect(Request("https://a"), *arguments, "http://b")
    for start, end in (("https://a", "HTTPS://b"), ("http://a", "https://b"), ("http://a", "http://b")):
        followed = redirect(Request(start), *arguments, end)
        assert followed is not None
        assert followed.full_url == end


# ---- failures ----------------------------------------------------------------------------------------------


def test_missing_file_is_requested_once(site: FakeSite, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"cannot download http.*/nothing: the server answered 404 Not Found"):
        download(site, tmp_path / "data", "/nothing")
    assert len(site.requests) == 1


def test_no_network_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unused:  # bound but not listening
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/data"
        with pytest.raises(DownloadError, match=r"cannot download http.*: no network \(.+\)"):
            download_file(RemoteFile(url, 10), tmp_path / "data", ignore_progress)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/data", "data:,hello", "/etc/hostname"])
def test_only_http_urls_are_accepted(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must begin with https:// or http://"):
        download_file(RemoteFile(url, 1000), tmp_path / "data", ignore_progress)
    assert list_names(tmp_path) == []


def test_redirect_to_another_scheme_is_refused(site: FakeSite, tmp_path: Path) -> None:
    site.redirects["/trap"] = "file:///etc/hostname"
    with pytest.raises(StorageError, match="cannot download"):
        download(site, tmp_path / "data", "/trap")
    assert not (tmp_path / "data").exists()


def test_proxy_of_the_environment_is_used(site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", site.url)
    site.files["http://corpus.invalid/data"] = CONTENT  # a proxy request has the absolute URL
    download_file(RemoteFile("http://corpus.invalid/data", len(CONTENT), SHA256), tmp_path / "data", ignore_progress)
    assert site.requests == [("http://corpus.invalid/data", None)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full: /dev/full")
def test_full_disk_is_reported(site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "data.part").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=f"the disk is full .*; free some space, or set {CACHE_ENV_VAR}"):
        download(site, tmp_path / "data")


def test_too_small_disk_is_reported_before_the_first_byte(site: FakeSite, tmp_path: Path) -> None:
    site.extra_claimed_bytes = 10**18
    with pytest.raises(StorageError, match=r"the disk is full \(1,000,000,000,000,300,000 bytes more are needed\)"):
        download(site, tmp_path / "data", max_bytes=10**19)
    assert list_names(tmp_path) == []


# ---- progress ----------------------------------------------------------------------------------------------


def test_progress_without_a_terminal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("multi30k") as show:
        show(100, 2_600_000)
        show(200, 2_600_000)
    written = capsys.readouterr()
    assert (written.out, written.err) == ("", "downloading multi30k (2.6 MB)\n")


def test_no_progress_without_a_download(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("multi30k"):
        pass
    assert capsys.readouterr().err == ""


def test_progress_at_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(writer, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with show_progress("multi30k") as show:
            show(500_000, 2_000_000)
            show(2_000_000, 2_000_000)
        output = b""
        while select.select([reader], [], [], 0.3)[0]:
            output += os.read(reader, 2**16)
    os.close(reader)
    assert b"multi30k" in output
    assert b"2.0/2.0 MB" in output


def test_only_the_missing_bytes_must_fit_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteFile("https://example.org/file", max_bytes=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    _check_size(remote, tmp_path / "part", start=600, total=700)
    _check_size(remote, tmp_path / "part", start=600, total=None)
    with pytest.raises(OSError, match="101 bytes more are needed"):
        _check_size(remote, tmp_path / "part", start=600, total=701)
