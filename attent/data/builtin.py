"""Built-in corpora: `phrases` and `dates` are generated, those of `builtin.toml` are downloaded once and cached.

Each becomes a cached folder of train, valid and test files with SOURCE.json: their origin, and a checksum of each file,
which is verified at every use. A folder that a person puts there by hand is used as it is.
"""

import errno
import io
import json
import re
import sys
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO

from attent import settings
from attent.data import phrases
from attent.data.file_hashes import hash_bytes
from attent.data.formats.streams import MAX_LINE_BYTES
from attent.data.pairs import CorpusError, LanguageMismatchError, LanguagePair
from attent.storage import hub
from attent.storage.cache import build_folder, get_cache_folder
from attent.storage.errors import StorageError
from attent.storage.hub import RemoteFile, download_file, show_progress
from attent.storage.manifest import hash_file
from attent.text.language_tags import LANGUAGE_TAG, normalize_tag

MAX_HELD_OUT_PAIRS = 2_000  # each for valid and test
HELD_OUT_DIVISOR = 20  # and at most one pair in 20
MAX_COMPRESSION_RATIO = 50  # real text has 3 to 5, a zip bomb a thousand

LinePair = tuple[bytes, bytes]
PairReader = Callable[[], Iterator[LinePair]]  # each call reads from the beginning
SOURCE_FILE = "SOURCE.json"


# ---- archives of the OPUS collection ---------------------------------------------------------------------------------
# The split depends on hashes of the sentences alone: it is the same on every machine and in both directions, and no
# sentence of either side is in two splits, since pairs that share one with valid or test are removed from train.


def unpack_archive(archive: Path, corpus: str, pair: tuple[str, str]) -> None:
    """Write the splits into the archive's folder and delete the archive, which is read to its end before."""
    names = [f"{corpus}.{'-'.join(pair)}.{tag}" for tag in pair]  # nothing is unpacked under a name from the archive
    with _explain_damage(archive), zipfile.ZipFile(archive) as zip_file:
        _check_archive(archive, zip_file, names)
        write_splits(lambda: _read_line_pairs(zip_file, names), archive.parent, pair)
    archive.unlink()


@contextmanager
def _explain_damage(archive: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: an offset outside the archive
            raise
        archive.unlink()
        raise CorpusError(f"{archive}: was a damaged archive ({error}) and was removed; run again") from error


def _check_archive(archive: Path, zip_file: zipfile.ZipFile, names: list[str]) -> None:
    infos = zip_file.infolist()
    if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in infos):
        raise zipfile.BadZipFile("it is compressed in an unusual way")
    missing = sorted(set(names) - {info.filename for info in infos})
    if missing:
        raise zipfile.BadZipFile(f"there is no {missing[0]} in it")
    size = sum(info.file_size for info in infos if info.filename in names)
    if size > MAX_COMPRESSION_RATIO * archive.stat().st_size:
        raise zipfile.BadZipFile(f"it claims to contain {size:,} bytes of text")


def _read_line_pairs(zip_file: zipfile.ZipFile, names: list[str]) -> Iterator[LinePair]:
    with ExitStack() as stack:
        first, second = (stack.enter_context(zip_file.open(name)) for name in names)
        for source, target in zip_longest(_read_lines(first), _read_lines(second)):
            if source is None or target is None:
                raise zipfile.BadZipFile("its two sides have different numbers of lines")
            if source and target:
                yield source, target


def _read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield stripped lines; an overlong one is empty."""
    buffered = io.BufferedReader(file, 2**18)  # type: ignore[type-var]  # a ZipExtFile is a RawIOBase where it counts
    while line := buffered.readline(MAX_LINE_BYTES):
        is_complete = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        while not is_complete and (rest := buffered.readline(MAX_LINE_BYTES)):
            is_complete, line = rest.endswith(b"\n"), b""
        yield line.strip()


def write_splits(read_pairs: PairReader, folder: Path, pair: tuple[str, str]) -> None:
    """Write train, valid and test files that share no sentence on either side. Only held-out pairs are in memory."""
    held_out = _choose_held_out(read_pairs)
    sources, targets = ({line_pair[side] for pairs in held_out.values() for line_pair in pairs} for side in (0, 1))
    train = ((source, target) for source, target in read_pairs() if source not in sources and target not in targets)
    for name, pairs in {"train": train, **held_out}.items():
        paths = [folder / f"{name}.{tag.replace('_', '-')}" for tag in pair]
        with open(paths[0], "wb") as first, open(paths[1], "wb") as second:
            for source, target in pairs:
                first.write(source + b"\n")
                second.write(target + b"\n")


def _choose_held_out(read_pairs: PairReader) -> dict[str, list[LinePair]]:
    """Return the pairs of test and valid: those with the lowest hashes and without a repeated target."""
    total = sum(1 for _ in read_pairs())
    if not total:
        raise zipfile.BadZipFile("it has no pairs")
    size = min(MAX_HELD_OUT_PAIRS, total // HELD_OUT_DIVISOR)
    limit = 8 * size * 2**64 // total  # four times as many as needed, since some share a sentence
    candidates: dict[bytes, bytes] = {}
    for source, target in read_pairs():
        if hash_bytes(source) < limit:
            candidates.setdefault(source, target)
    held_out: dict[str, list[LinePair]] = {"test": [], "valid": []}
    seen: set[bytes] = set()
    for source in sorted(candidates, key=hash_bytes):
        name, target = "test" if len(held_out["test"]) < size else "valid", candidates[source]
        if len(held_out[name]) < size and target not in seen:
            seen.add(target)
            held_out[name].append((source, target))
    return {name: pairs for name, pairs in held_out.items() if pairs}


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


_TABLES = tomllib.loads(Path(__file__).with_name("builtin.toml").read_text(encoding="utf-8"))
MULTI30K_URL: str = _TABLES["multi30k"]["url"]
MULTI30K_LANGUAGES: tuple[str, ...] = tuple(_TABLES["multi30k"]["languages"])
MULTI30K_FILES = tuple(Multi30kFile(**table) for table in _TABLES["multi30k"]["files"])
OPUS_URL: str = _TABLES["opus"]["url"]
OPUS_CORPORA = {name: OpusCorpus(**table) for name, table in _TABLES["opus"]["corpora"].items()}
OPUS_SHA256: Mapping[str, str] = _TABLES["opus"]["sha256"]  # by the key of the corpus

BUILTIN_CORPORA: Mapping[str, str] = {
    "phrases": "short sentences in en and de; 2,400 pairs generated from a grammar, free to use",
    "dates": "dates as written in 50 languages -> ISO 8601; 103,000 pairs made from CLDR in seconds, Unicode licence",
    "multi30k": "picture captions in cs, de, en, fr; 31,014 pairs, 2.6 MB, for research",
    **{
        name: f"{opus.description}; OPUS {opus.opus_name} {opus.version}; {opus.terms}"
        for name, opus in OPUS_CORPORA.items()
    },
}


def get_corpus_folder(name: str, languages: LanguagePair) -> Path:
    """Return the folder of a built-in corpus, which is generated or downloaded if it is not cached."""
    if name == "phrases":
        return _get_cached_folder(f"phrases-{phrases.VERSION}", _make_phrases)
    if name == "dates":
        from attent.data import dates  # imported late: it needs Babel

        return _get_cached_folder(dates.get_folder_name(languages), _make_dates)
    if name == "multi30k":
        tags = _check_multi30k(languages)
        return _get_cached_folder("-".join((name, *tags)), lambda staging: _fetch_multi30k(staging, tags))
    if name in OPUS_CORPORA:
        pair = _get_opus_pair(name, languages)
        key = f"{name}-{OPUS_CORPORA[name].version}-{'-'.join(pair)}"
        return _get_cached_folder(key, lambda staging: _fetch_opus(staging, key, OPUS_CORPORA[name], pair))
    raise CorpusError(f"{name}: is not a built-in corpus; there are {', '.join(BUILTIN_CORPORA)}")


def _get_cached_folder(key: str, build: Callable[[Path], None]) -> Path:
    folder = get_cache_folder() / "corpora" / key
    try:
        build_folder(folder, build, is_complete=lambda path: any(path.glob("train*")))
    except hub.DownloadError as error:
        advice = f"Fetch it elsewhere and give its path instead of the name, or put it into {folder}"
        raise CorpusError(f"{key}: {error}. {advice}") from error
    except StorageError as error:
        raise error if isinstance(error, CorpusError) else CorpusError(str(error)) from error
    _verify_checksums(folder)
    return folder


def _write_source_file(staging: Path, origin: Mapping[str, object]) -> None:
    """Write SOURCE.json as the last file of a folder; the files are verified from then on."""
    files = {path.name: hash_file(path).sha256 for path in sorted(staging.iterdir()) if path.name != SOURCE_FILE}
    text = json.dumps({**origin, "sha256": files}, indent=2, ensure_ascii=False)
    (staging / SOURCE_FILE).write_text(text + "\n", encoding="utf-8")


def _verify_checksums(folder: Path) -> None:
    """Compare each file with SOURCE.json. A folder without it was put there by hand."""
    if not (folder / SOURCE_FILE).exists():
        return
    checksums = settings.read_json(folder / SOURCE_FILE).get("sha256")
    for name, expected in checksums.items() if isinstance(checksums, dict) else ():
        path = folder / Path(name).name
        if not path.is_file() or hash_file(path).sha256 != expected:
            problem = "has changed" if path.exists() else "is missing"
            advice = f"delete the folder {folder} and run again, or delete {SOURCE_FILE} to use it as it is"
            raise CorpusError(f"{path}: {problem} since it was made; {advice}")


def _make_phrases(staging: Path) -> None:
    phrases.write_corpus(staging)
    _write_source_file(staging, {"name": "phrases", "from": "attent's own grammar", "terms": "free to use"})


def _make_dates(staging: Path) -> None:
    from attent.data import dates

    print("generating dates, which takes a few seconds", file=sys.stderr)
    dates.write_corpus(staging)
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
            raise LanguageMismatchError(f"multi30k: is in {known}, not in `{tag}`", "choose --src and --tgt from these")
    return sorted(map(normalize_tag, languages.tags))


def _fetch_multi30k(staging: Path, tags: list[str]) -> None:
    files = [file for file in MULTI30K_FILES if file.name.split(".")[1] in tags]
    total, bytes_before = sum(file.size for file in files), 0
    with show_progress("multi30k") as show:
        for file in files:
            remote = RemoteFile(f"{MULTI30K_URL}/{file.name}", file.size, file.sha256)

            def show_total(done: int, _: int | None, offset: int = bytes_before) -> None:
                show(offset + done, total)

            download_file(remote, staging / file.local_name, show_total)
            bytes_before += file.size
    _write_source_file(staging, {"name": "multi30k", "from": MULTI30K_URL, "terms": "for research"})


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


def _fetch_opus(staging: Path, key: str, corpus: OpusCorpus, pair: tuple[str, str]) -> None:
    name = f"{'-'.join(pair)}.txt.zip"
    url = f"{OPUS_URL}/OPUS-{corpus.opus_name}/{corpus.version}/moses/{name}"
    remote = RemoteFile(url, corpus.max_bytes, OPUS_SHA256.get(key))
    archive = staging / name
    try:
        with show_progress(f"{corpus.opus_name} {'-'.join(pair)}") as show:
            checksum = download_file(remote, archive, show)
    except hub.RemoteFileMissing as error:
        advice = f"https://opus.nlpl.eu lists the language pairs of {corpus.opus_name}"
        raise LanguageMismatchError(str(error), advice) from error
    print(f"splitting {corpus.opus_name} into train, valid and test", file=sys.stderr)
    unpack_archive(archive, corpus.opus_name, pair)
    origin = {"name": corpus.opus_name, "from": remote.url, "archive_sha256": checksum, "terms": corpus.terms}
    _write_source_file(staging, origin)
