"""Corpora by name: `dates` is made on the spot, the others are downloaded once and kept.

    attent data dates        attent train --data multi30k --src en --tgt de        attent data tatoeba --src en --tgt fi

Each becomes a folder of train, valid and test files in the cache, whole or not there, with SOURCE.json beside them:
where they come from, and a checksum of each file that is verified at every use. A folder that a person puts there by
hand is taken as it is. How files travel is `download`'s, how a folder becomes whole `cache`'s, what an archive of OPUS
becomes is `opus`'s, and how files are read `corpus`'s.

Where the addresses and checksums are from:
- multi30k: the project's own repository at a fixed commit. SHA-256 and MD5 of all twelve files were compared with those
  that other projects (torchtext among them) publish for the same addresses.
- OPUS: the object store of the collection; the addresses, versions and the names inside the archives are those of
  OPUS's own lists and of many public scripts. It serves hundreds of language pairs and publishes no checksums, so that
  of the first download is what later uses are held against; https and the archive's own checksums guard the first.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attent import settings
from attent.data import dates
from attent.data.opus import unpack_archive
from attent.data.pairs import CorpusError, LanguagePair
from attent.storage import download
from attent.storage.cache import build_folder, get_cache_folder
from attent.storage.download import RemoteFile, download_file, show_progress
from attent.text.language_tags import normalize_tag

SOURCE_FILE = "SOURCE.json"
LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8})*")


@dataclass(frozen=True)
class Multi30kFile:
    """A file of multi30k: the publisher's name for it, ours, and what must arrive."""

    name: str
    local_name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class OpusCorpus:
    """A corpus of the OPUS collection."""

    opus_name: str
    version: str
    max_bytes: int  # bytes of an archive: above the largest language pair
    description: str
    terms: str


MULTI30K_LANGUAGES = ("cs", "de", "en", "fr")
MULTI30K_URL = (
    "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw"
)
MULTI30K_FILES = tuple(
    Multi30kFile(f"{theirs}.{language}.gz", f"{ours}.{language}.gz", size, sha256)
    for theirs, ours, language, size, sha256 in (
        ("train", "train", "cs", 593_827, "a65adb8b32e3bc664f21ecba7a6e7f6950fd1f405e135f7c312faabdb6255077"),
        ("train", "train", "de", 637_044, "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
        ("train", "train", "en", 568_929, "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
        ("train", "train", "fr", 604_242, "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c"),
        ("val", "valid", "cs", 22_096, "b63226e05c4bd5dd6a42897d74b86a1b9d2c31498252c572b1ea7f7996927fcc"),
        ("val", "valid", "de", 24_681, "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
        ("val", "valid", "en", 21_650, "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
        ("val", "valid", "fr", 23_001, "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9"),
        ("test_2016_flickr", "test", "cs", 22_572, "200a4a74cc9560f051924abb9803be008d1908d77f747e9141aeb86dfd2797f1"),
        ("test_2016_flickr", "test", "de", 22_890, "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"),
        ("test_2016_flickr", "test", "en", 21_077, "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"),
        ("test_2016_flickr", "test", "fr", 22_310, "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90"),
    )
)

UNKNOWN_TERMS = "see the corpus's page at https://opus.nlpl.eu"
OPUS_URL = "https://object.pouta.csc.fi"
OPUS_CORPORA: Mapping[str, OpusCorpus] = {
    "tatoeba": OpusCorpus("Tatoeba", "v2023-04-12", 200 * 10**6, "short everyday sentences", "CC BY 2.0 FR"),
    "europarl": OpusCorpus(
        "Europarl", "v8", 600 * 10**6, "speeches in the European Parliament, 21 languages", UNKNOWN_TERMS
    ),
    "news-commentary": OpusCorpus(
        "News-Commentary", "v16", 400 * 10**6, "essays on world affairs, 15 languages", UNKNOWN_TERMS
    ),
    "books": OpusCorpus("Books", "v1", 100 * 10**6, "novels, 16 languages", UNKNOWN_TERMS),
    "kde4": OpusCorpus("KDE4", "v2", 100 * 10**6, "messages of the KDE desktop, 92 languages", UNKNOWN_TERMS),
    "bible": OpusCorpus("bible-uedin", "v1", 100 * 10**6, "the Bible in 100 languages", UNKNOWN_TERMS),
}

BUILTIN_CORPORA: Mapping[str, str] = {
    "dates": "dates as written in 50 languages -> ISO 8601; 103,000 pairs made from CLDR in seconds, Unicode licence",
    "multi30k": "picture captions in cs, de, en, fr; 31,014 pairs, 2.6 MB, for research",
    **{
        name: f"{opus.description}; OPUS {opus.opus_name} {opus.version}; {opus.terms}"
        for name, opus in OPUS_CORPORA.items()
    },
}


@dataclass(frozen=True, kw_only=True)
class DownloadSites:
    """Where downloads come from: a mirror may be put here, and so may a test's own server."""

    multi30k_url: str = MULTI30K_URL
    multi30k_files: tuple[Multi30kFile, ...] = MULTI30K_FILES
    opus_url: str = OPUS_URL


def get_corpus_folder(name: str, languages: LanguagePair, sites: DownloadSites = DownloadSites()) -> Path:  # noqa: B008 - it is frozen
    """The folder of a built-in corpus, made or downloaded if it is not there yet."""
    if name == "dates":
        return _get_cached_folder(dates.get_folder_name(languages), lambda aside: _make_dates(aside, languages))
    if name == "multi30k":
        _check_multi30k(languages)
        return _get_cached_folder(name, lambda aside: _fetch_multi30k(aside, sites))
    if name in OPUS_CORPORA:
        first, second = _get_opus_pair(name, languages)
        key = f"{name}-{OPUS_CORPORA[name].version}-{first}-{second}"
        return _get_cached_folder(
            key, lambda aside: _fetch_opus(aside, OPUS_CORPORA[name], (first, second), sites.opus_url)
        )
    raise CorpusError(f"{name}: is no built-in corpus; there are {', '.join(BUILTIN_CORPORA)}")


def _get_cached_folder(key: str, build: Callable[[Path], None]) -> Path:
    """The folder `key` of the cache, whole and as it was when it was made."""
    place = get_cache_folder() / "corpora" / key
    try:
        build_folder(place, build, is_complete=_has_train_files)
    except download.DownloadError as error:
        raise CorpusError(
            f"{key}: {error}. Fetch it elsewhere and give its path in place of the name, or put it into {place}"
        ) from error
    _verify_checksums(place)
    return place


def _has_train_files(folder: Path) -> bool:
    return any(folder.glob("train*"))


# What lies beside the data.


def _write_source_file(staging: Path, origin: Mapping[str, object]) -> None:
    """Writes SOURCE.json, the last file of a folder: what it holds is verified from now on."""
    files = {path.name: download.compute_sha256(path) for path in sorted(staging.iterdir()) if path.name != SOURCE_FILE}
    text = json.dumps({**origin, "sha256": files}, indent=2, ensure_ascii=False)
    (staging / SOURCE_FILE).write_text(text + "\n", encoding="utf-8")


def _verify_checksums(folder: Path) -> None:
    """Holds each file against SOURCE.json. A folder without one was put there by hand, and is its owner's affair."""
    if not (folder / SOURCE_FILE).exists():
        return
    listed = settings.read_json(folder / SOURCE_FILE).get("sha256")
    for name, expected in listed.items() if isinstance(listed, dict) else ():
        path = folder / Path(name).name
        if not path.is_file() or download.compute_sha256(path) != expected:
            problem = "has changed" if path.exists() else "is missing"
            raise CorpusError(
                f"{path}: {problem} since it was made; delete the folder {folder} and run again, or delete {SOURCE_FILE} to "
                f"use it as it is"
            )


# dates


def _make_dates(staging: Path, languages: LanguagePair) -> None:
    print("making dates, which takes a few seconds", file=sys.stderr)
    dates.write_corpus(staging, languages)
    _write_source_file(staging, {"name": "dates", "from": "CLDR, by Babel", "terms": "Unicode-3.0"})


# multi30k


def _check_multi30k(languages: LanguagePair) -> None:
    known = ", ".join(MULTI30K_LANGUAGES)
    for tag in _require_languages("multi30k", languages):
        if normalize_tag(tag) not in MULTI30K_LANGUAGES:
            raise CorpusError(f"multi30k: is in {known}, not in `{tag}`; choose --src and --tgt from these")


def _require_languages(name: str, languages: LanguagePair) -> tuple[str, str]:
    source, target = languages.source, languages.target
    if source is None or target is None:
        raise CorpusError(f"{name}: is in several languages; say which, such as --src en --tgt de")
    if normalize_tag(source) == normalize_tag(target):
        raise CorpusError(f"{name}: --src and --tgt are both `{source}`; give two languages")
    return source, target


def _fetch_multi30k(staging: Path, sites: DownloadSites) -> None:
    """All four languages, whichever were asked for: together they are smaller than one photograph."""
    whole = sum(file.size for file in sites.multi30k_files)
    done = 0
    with show_progress("multi30k") as show:
        for file in sites.multi30k_files:
            remote = RemoteFile(f"{sites.multi30k_url}/{file.name}", file.size, file.sha256)
            download_file(remote, staging / file.local_name, partial(_show_total_progress, show, done, whole))
            done += file.size
    _write_source_file(staging, {"name": "multi30k", "from": sites.multi30k_url, "terms": "for research"})


def _show_total_progress(
    show: download.ProgressCallback, bytes_before: int, total_bytes: int, done: int, total: int | None
) -> None:
    """The progress of one file as that of all: `before` bytes of the `whole` were there when it began."""
    show(bytes_before + done, total_bytes)


# OPUS


def _get_opus_pair(name: str, languages: LanguagePair) -> tuple[str, str]:
    """OPUS's own codes (`pt_BR`), in its order, so that both directions share one folder and one split."""
    for tag in _require_languages(name, languages):
        if not LANGUAGE_TAG.fullmatch(tag):
            raise CorpusError(f"{name}: `{tag}` is no language tag; write one such as de or pt-BR")
    first, second = sorted(map(_get_opus_code, _require_languages(name, languages)))
    return first, second


def _get_opus_code(tag: str) -> str:
    language, *rest = re.split("[-_]", tag)
    return "_".join([language.lower(), *(part.upper() if len(part) == 2 else part for part in rest)])


def _fetch_opus(staging: Path, corpus: OpusCorpus, pair: tuple[str, str], site: str) -> None:
    name = f"{'-'.join(pair)}.txt.zip"
    remote = RemoteFile(f"{site}/OPUS-{corpus.opus_name}/{corpus.version}/moses/{name}", corpus.max_bytes)
    archive = staging / name
    try:
        with show_progress(f"{corpus.opus_name} {'-'.join(pair)}") as show:
            checksum = download_file(remote, archive, show)
    except download.RemoteFileMissing as error:
        raise CorpusError(
            f"{error}; https://opus.nlpl.eu lists the language pairs that {corpus.opus_name} has"
        ) from error
    print(f"splitting {corpus.opus_name} into train, valid and test", file=sys.stderr)
    unpack_archive(archive, corpus.opus_name, pair)
    _write_source_file(
        staging, {"name": corpus.opus_name, "from": remote.url, "archive_sha256": checksum, "terms": corpus.terms}
    )
