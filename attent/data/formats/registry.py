"""Which reader reads a file: by its name, or by its first bytes where a name says nothing (standard input)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from attent.data.formats import jsonl, language_tags, moses, po, streams, tmx, tsv, xliff
from attent.data.formats.streams import InputFile
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair

FormatName = Literal["tsv", "jsonl", "moses", "tmx", "xliff", "po"]
FORMAT_BY_SUFFIX: dict[str, FormatName] = {
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".tmx": "tmx",
    ".xlf": "xliff",
    ".xliff": "xliff",
    ".sdlxliff": "xliff",
    ".mqxliff": "xliff",
    ".mxliff": "xliff",
    ".po": "po",
}
MOSES_ROLES = (("src", "tgt"), ("src", "trg"), ("source", "target"))  # suffixes of Moses pairs that name no languages
SUPPORTED_FORMATS = (
    ".tsv, .jsonl, .tmx, .xliff, .po, or a pair such as corpus.en and corpus.de, each also with .gz, .xz or .zst"
)
_XML_ROOT = re.compile(r"<(?:[\w.-]+:)?(tmx|xliff)[\s>/]")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read. Units of TMX and XLIFF that nobody approved yet are always read."""

    fuzzy: bool = False  # PO entries and XLIFF units that a translator must still look at, too
    obsolete: bool = False  # PO entries that the program no longer uses (`#~`), too


DEFAULT_READ_OPTIONS = ReadOptions()


@dataclass(frozen=True)
class ParallelFile:
    """One file and its format, or the two files of a Moses pair, source first."""

    format: FormatName | None  # None: told by the first bytes
    files: tuple[InputFile, ...]


def strip_compression_suffix(name: str) -> str:
    """A file's name without the suffix of its compression."""
    return name[: len(name) - len(streams.get_compression_suffix(name))]


def detect_format(name: str) -> FormatName | None:
    found = [
        kind for suffix, kind in FORMAT_BY_SUFFIX.items() if strip_compression_suffix(name).lower().endswith(suffix)
    ]
    return found[0] if found else None


def read_pairs(
    parallel_file: ParallelFile, languages: LanguagePair, options: ReadOptions = DEFAULT_READ_OPTIONS
) -> Iterator[Pair | BadLine]:
    """Everything that stands in a part, in order."""
    if parallel_file.format == "moses":
        source, target = parallel_file.files
        return moses.read_pairs(source.read_blocks(), target.read_blocks(), (source.name, target.name))
    content = parallel_file.files[0].read_blocks()
    return _read_single_file(parallel_file.format, content, parallel_file.files[0].name, languages, options)


def _read_single_file(
    format_name: FormatName | None, content: Iterator[bytes], name: str, languages: LanguagePair, options: ReadOptions
) -> Iterator[Pair | BadLine]:
    if format_name is None:
        head, content = streams.peek_head(content)
        format_name = sniff_format(head, name)
    if format_name == "po":
        return po.read_pairs(content, name, languages, fuzzy=options.fuzzy, obsolete=options.obsolete)
    if format_name == "xliff":
        return xliff.read_pairs(content, name, languages, fuzzy=options.fuzzy)
    readers = {"tsv": tsv.read_pairs, "jsonl": jsonl.read_pairs, "tmx": tmx.read_pairs}
    return readers[format_name](content, name, languages)


def read_declared_languages(parallel_file: ParallelFile) -> LanguagePair:
    """The languages that a file names at its beginning, or a Moses pair in its suffixes."""
    file = parallel_file.files[0]
    try:
        match _resolve_format(parallel_file):
            case "moses":
                suffixes = tuple(strip_compression_suffix(side.name).rpartition(".")[2] for side in parallel_file.files)
                return language_tags.ANY_LANGUAGES if suffixes in MOSES_ROLES else LanguagePair(*suffixes)
            case "tsv":
                return tsv.read_languages(file.read_blocks(), file.name)
            case kind:
                readers = {
                    "jsonl": jsonl.read_languages,
                    "tmx": tmx.read_languages,
                    "xliff": xliff.read_languages,
                    "po": po.read_languages,
                }
                return readers[kind](file.read_blocks(), file.name)
    except CorpusError:  # it will be told when the file is read, after what can still be read
        return language_tags.ANY_LANGUAGES


def is_language_ambiguous(parallel_file: ParallelFile, requested: Sequence[LanguagePair]) -> bool:
    """Would one and the same text be read as several of these pairs, since the part does not say what it holds?"""
    file = parallel_file.files[0]
    try:
        match _resolve_format(parallel_file):
            case "tmx":  # every unit names its languages
                return False
            case "tsv":
                return any(
                    tsv.read_languages(file.read_blocks(), file.name, pair) == language_tags.ANY_LANGUAGES
                    for pair in requested
                )
            case "jsonl":
                return jsonl.has_role_keys(file.read_blocks(), file.name)
    except CorpusError:  # a header of other languages, or damage: told when the file is read
        return False
    found = read_declared_languages(parallel_file)
    fitting = {
        frozenset((pair.source, pair.target))
        for pair in requested
        if language_tags.is_reversed(pair, found) is not None
    }
    return found == language_tags.ANY_LANGUAGES or (not (found.source and found.target) and len(fitting) > 1)


def _resolve_format(parallel_file: ParallelFile) -> FormatName:
    file = parallel_file.files[0]
    return parallel_file.format or sniff_format(streams.peek_head(file.read_blocks())[0], file.name)


def sniff_format(head: bytes, name: str) -> FormatName:
    """The format that content with this beginning has; columns when nothing else fits."""
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = head.decode("utf-16" if wide else "utf-8-sig", errors="replace").lstrip()
    if text.startswith("<"):
        root = _XML_ROOT.search(text)
        if root is None:
            raise CorpusError(f"{name} is XML, but neither TMX nor XLIFF: convert it to one of {SUPPORTED_FORMATS}")
        return "tmx" if root[1] == "tmx" else "xliff"
    if text.startswith("{"):
        return "jsonl"
    if text.startswith(("#", "msgid", "msgctxt", "domain")) and re.search(r"^msgid\s", text, re.MULTILINE):
        return "po"
    return "tsv"
