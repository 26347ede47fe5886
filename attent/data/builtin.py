"""Built-in corpora: `phrases` and `dates` are generated, the others are downloaded once and cached.

    attent data dates        attent train --data multi30k --src en --tgt de        attent data tatoeba --src en --tgt fi

Each becomes a cached folder of train, valid and test files with SOURCE.json: their origin, and a checksum of each file,
which is verified at every use. A folder that a person puts there by hand is used as it is.

Origin of the URLs and checksums:
- multi30k: the project's own repository at a fixed commit. SHA-256 and MD5 of all twelve files were compared with those
  that other projects (torchtext among them) publish for the same URLs.
- OPUS: the object store of the collection; the URLs, versions and the names inside the archives are those of OPUS's own
  lists and of many public scripts. OPUS itself publishes no checksums: those in `OPUS_SHA256` are from the metadata of
  Hugging Face's `datasets` for the same URLs. The checksum of any other archive is compared from its second use on;
  https and the archive's own checksums protect its first download.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attent import settings
from attent.data import phrases
from attent.data.opus import unpack_archive
from attent.data.pairs import CorpusError, LanguagePair
from attent.storage import download
from attent.storage.cache import build_folder, get_cache_folder
from attent.storage.download import RemoteFile, download_file, show_progress
from attent.storage.errors import StorageError
from attent.text.language_tags import LANGUAGE_TAG, normalize_tag

SOURCE_FILE = "SOURCE.json"


@dataclass(frozen=True)
class Multi30kFile:
    name: str  # on the server
    local_name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class OpusCorpus:
    opus_name: str
    version: str
    max_bytes: int  # of an archive: above the largest language pair
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

OPUS_SHA256: Mapping[str, str] = {  # by the key of the corpus
    f"{corpus}-{pair}": sha256
    for corpus, pair, sha256 in (
        ("kde4-v2", "en-fr", "7ffc0c96d8b27740f58ebaf84a0d3434bb130e714e1a1b9522cb6d3fbb313034"),
        ("kde4-v2", "en-it", "a25227326866a070251a75119f2e5d0554a9bf0d8c8aa5d41487f4288b834600"),
        ("kde4-v2", "fi-nl", "67b79c0b978826f41b53d3e8c560c5dd70f1135b1c3bad1bce4ae46bc3b6a111"),
        ("kde4-v2", "it-ro", "6810b79d144de10f262a69e63f54b6c1e18430553984c0bbcc180561f6e7444d"),
        ("kde4-v2", "nl-sv", "7b38481cf9e838a587123c6328e2a3dea93d4a2c1060c5b300fb485ba830cc21"),
        ("bible-v1", "de-en", "c3189e56441b6761276be449b3548dd48991401eab201303e6123cc7148b7446"),
        ("bible-v1", "en-es", "324dcd307f373f050aa3b0c0fd7bf8566b13f676d92f607644236674cd67ff9a"),
        ("bible-v1", "en-fi", "a925a0a5332f6463048b1ab3393b8ed22ad9a6b4db05fe008ad6d758fb0a5bf3"),
        ("bible-v1", "en-fr", "b4cdc1705896307ff0647ebe9c1c3a5b857248a7eabe9f6d23887542df090cce"),
        ("bible-v1", "en-hi", "b49c420cfb2b688bbc20587470ac4feaaf7aaa7493461c9408b6f5983fefcab1"),
        ("bible-v1", "en-no", "147541ae473aaf8a7d1b00ee4e301be6084025e5b4efcd94c65ce3624e04dafc"),
    )
}

BUILTIN_CORPORA: Mapping[str, str] = {
    "phrases": "short sentences in en and de; 2,400 pairs generated from a grammar, free to use",
    "dates": "dates as written in 50 languages -> ISO 8601; 103,000 pairs made from CLDR in seconds, Unicode licence",
    "multi30k": "picture captions in cs, de, en, fr; 31,014 pairs, 2.6 MB, for research",
    **{
        name: f"{opus.description}; OPUS {opus.opus_name} {opus.version}; {opus.terms}"
        for name, opus in OPUS_CORPORA.items()
    },
}


@dataclass(frozen=True, kw_only=True)
class DownloadSites:
    """The servers of downloads; can be replaced by a mirror or a test server."""

    multi30k_url: str = MULTI30K_URL
    multi30k_files: tuple[Multi30kFile, ...] = MULTI30K_FILES
    opus_url: str = OPUS_URL
    opus_sha256: Mapping[str, str] = field(default_factory=lambda: OPUS_SHA256)


DEFAULT_SITES = DownloadSites()


def get_corpus_folder(name: str, languages: LanguagePair, sites: DownloadSites = DEFAULT_SITES) -> Path:
    """Return the folder of a built-in corpus, which is generated or downloaded if it is not cached."""
    if name == "phrases":
        return _get_cached_folder(f"phrases-{phrases.VERSION}", _make_phrases)
    if name == "dates":
        from attent.data import dates  # imported late: it needs Babel

        return _get_cached_folder(dates.get_folder_name(languages), lambda staging: _make_dates(staging, languages))
    if name == "multi30k":
        tags = _check_multi30k(languages)
        return _get_cached_folder("-".join((name, *tags)), lambda staging: _fetch_multi30k(staging, tags, sites))
    if name in OPUS_CORPORA:
        pair = _get_opus_pair(name, languages)
        key = f"{name}-{OPUS_CORPORA[name].version}-{'-'.join(pair)}"
        return _get_cached_folder(key, lambda staging: _fetch_opus(staging, key, OPUS_CORPORA[name], pair, sites))
    raise CorpusError(f"{name}: is not a built-in corpus; there are {', '.join(BUILTIN_CORPORA)}")


def _get_cached_folder(key: str, build: Callable[[Path], None]) -> Path:
    """Return a complete and verified folder of the cache."""
    folder = get_cache_folder() / "corpora" / key
    try:
        build_folder(folder, build, is_complete=lambda path: any(path.glob("train*")))
    except download.DownloadError as error:
        raise CorpusError(
            f"{key}: {error}. Fetch it elsewhere and give its path instead of the name, or put it into {folder}"
        ) from error
    except CorpusError:
        raise
    except StorageError as error:
        raise CorpusError(str(error)) from error
    _verify_checksums(folder)
    return folder


def _write_source_file(staging: Path, origin: Mapping[str, object]) -> None:
    """Write SOURCE.json as the last file of a folder; the files are verified from then on."""
    files = {path.name: download.compute_sha256(path) for path in sorted(staging.iterdir()) if path.name != SOURCE_FILE}
    text = json.dumps({**origin, "sha256": files}, indent=2, ensure_ascii=False)
    (staging / SOURCE_FILE).write_text(text + "\n", encoding="utf-8")


def _verify_checksums(folder: Path) -> None:
    """Compare each file with SOURCE.json. A folder without it was put there by hand."""
    if not (folder / SOURCE_FILE).exists():
        return
    checksums = settings.read_json(folder / SOURCE_FILE).get("sha256")
    for name, expected in checksums.items() if isinstance(checksums, dict) else ():
        path = folder / Path(name).name
        if not path.is_file() or download.compute_sha256(path) != expected:
            problem = "has changed" if path.exists() else "is missing"
            raise CorpusError(
                f"{path}: {problem} since it was made; delete the folder {folder} and run again, or delete "
                f"{SOURCE_FILE} to use it as it is"
            )


def _make_phrases(staging: Path) -> None:
    phrases.write_corpus(staging)
    _write_source_file(staging, {"name": "phrases", "from": "attent's own grammar", "terms": "free to use"})


def _make_dates(staging: Path, languages: LanguagePair) -> None:
    from attent.data import dates

    print("generating dates, which takes a few seconds", file=sys.stderr)
    dates.write_corpus(staging, languages)
    _write_source_file(staging, {"name": "dates", "from": "CLDR, by Babel", "terms": "Unicode-3.0"})


def _require_languages(name: str, languages: LanguagePair) -> tuple[str, str]:
    source, target = languages.source, languages.target
    if source is None or target is None:
        raise CorpusError(f"{name}: is in several languages; choose them, such as --src en --tgt de")
    if normalize_tag(source) == normalize_tag(target):
        raise CorpusError(f"{name}: --src and --tgt are both `{source}`; give two languages")
    return source, target


def _check_multi30k(languages: LanguagePair) -> list[str]:
    """Return the requested languages in alphabetical order, so that both directions share one folder."""
    for tag in _require_languages("multi30k", languages):
        if normalize_tag(tag) not in MULTI30K_LANGUAGES:
            known = ", ".join(MULTI30K_LANGUAGES)
            raise CorpusError(f"multi30k: is in {known}, not in `{tag}`; choose --src and --tgt from these")
    return sorted(map(normalize_tag, languages.tags))


def _fetch_multi30k(staging: Path, tags: list[str], sites: DownloadSites) -> None:
    files = [file for file in sites.multi30k_files if file.name.split(".")[1] in tags]
    total, bytes_before = sum(file.size for file in files), 0
    with show_progress("multi30k") as show:
        for file in files:
            remote = RemoteFile(f"{sites.multi30k_url}/{file.name}", file.size, file.sha256)

            def show_total(done: int, _: int | None, offset: int = bytes_before) -> None:
                show(offset + done, total)

            download_file(remote, staging / file.local_name, show_total)
            bytes_before += file.size
    _write_source_file(staging, {"name": "multi30k", "from": sites.multi30k_url, "terms": "for research"})


def _get_opus_pair(name: str, languages: LanguagePair) -> tuple[str, str]:
    """Return OPUS's codes (`pt_BR`) in its order, so that both directions share one folder and one split."""
    pair = _require_languages(name, languages)
    for tag in pair:
        if not LANGUAGE_TAG.fullmatch(tag):
            raise CorpusError(f"{name}: `{tag}` is not a language tag; write one such as de or pt-BR")
    subtags = [re.split("[-_]", tag) for tag in pair]
    first, second = sorted(
        "_".join([language.lower(), *(part.upper() if len(part) == 2 else part for part in rest)])
        for language, *rest in subtags
    )
    return first, second


def _fetch_opus(staging: Path, key: str, corpus: OpusCorpus, pair: tuple[str, str], sites: DownloadSites) -> None:
    name = f"{'-'.join(pair)}.txt.zip"
    url = f"{sites.opus_url}/OPUS-{corpus.opus_name}/{corpus.version}/moses/{name}"
    remote = RemoteFile(url, corpus.max_bytes, sites.opus_sha256.get(key))
    archive = staging / name
    try:
        with show_progress(f"{corpus.opus_name} {'-'.join(pair)}") as show:
            checksum = download_file(remote, archive, show)
    except download.RemoteFileMissing as error:
        raise CorpusError(f"{error}; https://opus.nlpl.eu lists the language pairs of {corpus.opus_name}") from error
    print(f"splitting {corpus.opus_name} into train, valid and test", file=sys.stderr)
    unpack_archive(archive, corpus.opus_name, pair)
    origin = {"name": corpus.opus_name, "from": remote.url, "archive_sha256": checksum, "terms": corpus.terms}
    _write_source_file(staging, origin)
