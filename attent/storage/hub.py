"""Models by name from the Hugging Face hub: `owner/repo`, or `owner/repo@revision`.

`huggingface_hub` keeps the files in its cache. Large ones are fetched by `download_file`, which resumes after a restart
and verifies SHA-256; `huggingface_hub` does neither. The files that attent reads are then verified and linked into a
folder of attent's cache, hub/owner/repo@commit, which is a model folder like any other and needs no network again.
Weights that are published only as a pickle are converted there.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attent.storage.cache import build_folder, get_cache_folder
from attent.storage.download import RemoteFile, download_file, show_progress
from attent.storage.errors import FolderError, StorageError
from attent.storage.manifest import hash_file

HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
COMMIT, SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.toml")
CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = "config.json", "model.safetensors", "pytorch_model.bin"
SHARD_NAME = re.compile(r"(?:model|pytorch_model)[\w.-]*\.(?:safetensors|bin)")


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
