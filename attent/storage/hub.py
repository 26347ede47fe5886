"""Downloads that arrive complete and verified or not at all, and models by name from the Hugging Face hub.

An interrupted download leaves PATH.part and resumes by HTTP Range; the validator of the server (ETag or Last-Modified,
kept in PATH.mark) tells whether the file is still the same. Transient errors are retried. Only http and https are
accepted, proxies are taken from the environment, and no more bytes are read than the file may have.

A model is named `owner/repo`, or `owner/repo@revision`.
`huggingface_hub` keeps the files in its cache. Large ones are fetched by `download_file`, which resumes after a restart
and verifies SHA-256; `huggingface_hub` does neither. The files that attent reads are then verified and linked into a
folder of attent's cache, hub/owner/repo@commit, which is a model folder like any other and needs no network again.
Weights that are published only as a pickle are converted there.
"""

import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO
from urllib import error as web
from urllib import request

from attent.storage.cache import CACHE_ENV_VAR, build_folder, get_cache_folder
from attent.storage.errors import AttentError, FolderError, StorageError
from attent.storage.manifest import hash_file

ProgressCallback = Callable[[int, int | None], None]  # bytes done, and the total if it is known

BLOCK_SIZE = 2**16
TIMEOUT_SECONDS = 30.0
RETRY_DELAYS = (1.0, 2.0, 4.0, 8.0)  # seconds
RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
MISSING_STATUSES = frozenset({404, 410})
PARTIAL_CONTENT, RANGE_NOT_SATISFIABLE = 206, 416
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
COMMIT, SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.toml")
CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = "config.json", "model.safetensors", "pytorch_model.bin"
SHARD_NAME = re.compile(r"(?:model|pytorch_model)[\w.-]*\.(?:safetensors|bin)")


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


# ---- models of the hub -----------------------------------------------------------------------------------------------


def locate_model(model: str | os.PathLike[str]) -> Path:
    """Return the folder of a model: the path itself, or the download of a name on the hub.

    A path into an existing folder is no name, so that a mistyped `runs/en-de` is not looked up on the hub; with a
    revision (`runs/en-de@main`) it is.
    """
    path, name = Path(model).expanduser(), Path(model).as_posix()
    match = HUB_NAME.fullmatch(name)
    if match is None or path.exists() or (match[2] is None and path.parent.is_dir()):
        return path
    return download_model(match[1], match[2] or "main")


def get_model_name(folder: Path) -> str:
    return find_origin(folder) or folder.resolve().name


def find_origin(folder: str | os.PathLike[str]) -> str | None:
    path, root = Path(folder).expanduser().resolve(), (get_cache_folder() / "hub").resolve()
    return path.relative_to(root).as_posix() if path.parent.parent == root else None


def download_model(repo: str, revision: str) -> Path:
    """Return the folder of a model on the hub; what is in a cache is not requested again."""
    hub_folder = get_cache_folder() / "hub"
    folder = hub_folder / f"{repo}@{revision}"
    if COMMIT.fullmatch(revision) and is_complete(folder):
        return folder
    with explain_hub_errors(repo, revision):
        snapshot = fetch_small_files(repo, revision)
    if not (snapshot / CONFIG_FILE).is_file():
        raise FolderError(f"{repo}: has no {CONFIG_FILE} on the Hugging Face hub; give a model of transformers")
    folder = hub_folder / f"{repo}@{snapshot.name}"

    def build(staging: Path) -> None:
        with explain_hub_errors(repo, revision):
            weights = fetch_weights(repo, snapshot)
        link_files(repo, snapshot, weights, staging)

    return build_folder(folder, build, is_complete)


def is_complete(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def fetch_small_files(repo: str, revision: str) -> Path:
    """Return the snapshot folder of the revision, whose name is the commit, with all files but the weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    fetch = partial(snapshot_download, repo, revision=revision, allow_patterns=[*SMALL_FILES], ignore_patterns="*/*")
    try:
        return Path(fetch(local_files_only=True))
    except LocalEntryNotFoundError:
        print(f"downloading {repo} from the Hugging Face hub", file=sys.stderr)
        return Path(fetch())


def fetch_weights(repo: str, snapshot: Path) -> list[str]:
    """Return the names of the weights, safetensors if there are any, after downloading what is missing."""
    from huggingface_hub.errors import EntryNotFoundError

    candidates = [list_weights(snapshot, name) for name in (WEIGHTS_FILE, PICKLE_FILE)]
    for names in candidates:
        if all((snapshot / name).is_file() for name in names):
            return names
    for names in candidates:
        try:
            for name in names:
                fetch_file(repo, snapshot, name)
            return names
        except EntryNotFoundError:
            continue
    raise FolderError(f"{repo}: has neither {WEIGHTS_FILE} nor {PICKLE_FILE} on the Hugging Face hub; give another")


def list_weights(snapshot: Path, name: str) -> list[str]:
    index = snapshot / f"{name}.index.json"
    if not index.is_file():
        return [name]
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        shards = []
    if not shards or not all(isinstance(shard, str) and SHARD_NAME.fullmatch(shard) for shard in shards):
        raise FolderError(f"{index}: `weight_map` must map tensors to files of the model; get it from its publisher")
    return shards


def fetch_file(repo: str, snapshot: Path, name: str) -> None:
    """Download a large file into the cache of `huggingface_hub`: a blob, named by its SHA-256, and a link to it."""
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_download, hf_hub_url

    if (snapshot / name).is_file():
        return
    url = hf_hub_url(repo, name, revision=snapshot.name)
    remote = get_hf_file_metadata(url)
    if remote.etag and SHA256.fullmatch(remote.etag) and remote.size:
        blob = snapshot.parent.parent / "blobs" / remote.etag
        blob.parent.mkdir(parents=True, exist_ok=True)
        with show_progress(f"{repo}/{name}") as show:
            download_file(RemoteFile(url, remote.size, remote.etag, get_token()), blob, show)
    hf_hub_download(repo, name, revision=snapshot.name)


def link_files(repo: str, snapshot: Path, weights: list[str], staging: Path) -> None:
    small_files = {path.name for path in snapshot.iterdir() if any(path.match(pattern) for pattern in SMALL_FILES)}
    for name in sorted({*small_files, *weights}):
        verify_blob(repo, snapshot / name)
        (staging / name).unlink(missing_ok=True)
        if not name.endswith(".bin"):
            source = (snapshot / name).resolve()
            try:  # a hard link takes no space, and keeps the file if the other cache is cleared
                os.link(source, staging / name)
            except OSError:  # another disk, or one without links
                shutil.copyfile(source, staging / name)
    pickles = [snapshot / name for name in weights if name.endswith(".bin")]
    if pickles:
        print(f"{repo}: converting {PICKLE_FILE} to safetensors, in a process with limits", file=sys.stderr)
        from attent.storage.tensor_files import convert_weights  # imports torch

        convert_weights(pickles, staging / WEIGHTS_FILE)


def verify_blob(repo: str, path: Path) -> None:
    """Compare a file with its name in the cache, a hash, and remove it if damaged; some (Windows) have no such name."""
    blob = path.resolve()
    if SHA256.fullmatch(blob.name):
        actual = hash_file(blob).sha256
    elif COMMIT.fullmatch(blob.name):
        content = blob.read_bytes()
        actual = hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()
    else:
        return
    if actual != blob.name:
        blob.unlink()
        path.unlink(missing_ok=True)
        raise StorageError(
            f"{repo}: {path.name} is damaged (hash {actual[:12]}... instead of {blob.name[:12]}...) and was removed; "
            f"run again to download it"
        )


@contextmanager
def explain_hub_errors(repo: str, revision: str) -> Iterator[None]:
    where = f"{repo}: is not a folder here, and"
    try:
        from huggingface_hub import constants, errors
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client
    except ModuleNotFoundError as error:
        advice = "to download it from the Hugging Face hub, run pip install 'attent[hf]'"
        raise FolderError(f"{repo}: is not a folder here; if it is the name of a model, {advice}") from error
    try:
        yield
    except errors.GatedRepoError as error:
        advice = f"request access at {constants.ENDPOINT}/{repo}, then log in with `hf auth login`"
        raise FolderError(f"{repo}: the Hugging Face hub gives it only to users with access; {advice}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        advice = "check the name; a private one needs `hf auth login`"
        raise FolderError(f"{where} the Hugging Face hub has no model of that name; {advice}") from error
    except errors.RevisionNotFoundError as error:
        raise FolderError(f"{repo}: has no revision {revision} on the Hugging Face hub; give another") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, HTTPError) as error:
        cache = Path(constants.HF_HUB_CACHE)
        advice = f"where there is a network, run `hf download {repo}{f' --revision {revision}' * (revision != 'main')}`"
        cause: BaseException = error.__cause__ or error
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
            reason = "HF_HUB_OFFLINE is set"
        copy = f"copy the folder models--{repo.replace('/', '--')} of its cache ($HF_HOME/hub) into {cache}"
        raise FolderError(f"{where} cannot be downloaded ({reason}); {advice}, and {copy}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space, or set HF_HOME to a folder on another disk"
            raise StorageError(f"{constants.HF_HUB_CACHE}: the disk is full; {advice}") from error
        raise StorageError(f"{repo}: cannot be downloaded ({str(error).splitlines()[0]}); run again") from error
