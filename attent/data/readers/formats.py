"""Which reader reads a file: by its name, or by its first bytes where a name says nothing (standard input)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from attent.data.pairs import Bad, CorpusError, Languages, Pair
from attent.data.readers import files, jsonl, moses, po, tags, tmx, tsv, xliff
from attent.data.readers.files import File

Format = Literal["tsv", "jsonl", "moses", "tmx", "xliff", "po"]
SUFFIXES: dict[str, Format] = {
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
ROLES = (("src", "tgt"), ("src", "trg"), ("source", "target"))  # suffixes of Moses pairs that name no languages
KNOWN = ".tsv, .jsonl, .tmx, .xliff, .po, or a pair such as corpus.en and corpus.de, each also with .gz, .xz or .zst"
_ROOT = re.compile(r"<(?:[\w.-]+:)?(tmx|xliff)[\s>/]")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read. Units of TMX and XLIFF that nobody approved yet are always read."""

    fuzzy: bool = False  # PO entries and XLIFF units that a translator must still look at, too
    obsolete: bool = False  # PO entries that the program no longer uses (`#~`), too


PLAIN = Reading()


@dataclass(frozen=True)
class Part:
    """One file and its format, or the two files of a Moses pair, source first."""

    format: Format | None  # None: told by the first bytes
    files: tuple[File, ...]


def plain(name: str) -> str:
    """A file's name without the suffix of its compression."""
    return name[: len(name) - len(files.compression(name))]


def by_name(name: str) -> Format | None:
    found = [kind for suffix, kind in SUFFIXES.items() if plain(name).lower().endswith(suffix)]
    return found[0] if found else None


def read(part: Part, languages: Languages, options: Reading = PLAIN) -> Iterator[Pair | Bad]:
    """Everything that stands in a part, in order."""
    if part.format == "moses":
        source, target = part.files
        return moses.read(source.blocks(), target.blocks(), (source.name, target.name))
    content = part.files[0].blocks()
    return _read_one(part.format, content, part.files[0].name, languages, options)


def _read_one(
    kind: Format | None, content: Iterator[bytes], name: str, languages: Languages, options: Reading
) -> Iterator[Pair | Bad]:
    if kind is None:
        head, content = files.beginning(content)
        kind = sniff(head, name)
    if kind == "po":
        return po.read(content, name, languages, fuzzy=options.fuzzy, obsolete=options.obsolete)
    if kind == "xliff":
        return xliff.read(content, name, languages, fuzzy=options.fuzzy)
    readers = {"tsv": tsv.read, "jsonl": jsonl.read, "tmx": tmx.read}
    return readers[kind](content, name, languages)


def declared(part: Part) -> Languages:
    """The languages that a file names at its beginning, or a Moses pair in its suffixes."""
    file = part.files[0]
    try:
        match _kind(part):
            case "moses":
                suffixes = tuple(plain(side.name).rpartition(".")[2] for side in part.files)
                return tags.ANY if suffixes in ROLES else Languages(*suffixes)
            case "tsv":
                return tsv.languages(file.blocks(), file.name)
            case kind:
                readers = {"jsonl": jsonl.languages, "tmx": tmx.languages, "xliff": xliff.languages, "po": po.languages}
                return readers[kind](file.blocks(), file.name)
    except CorpusError:  # it will be told when the file is read, after what can still be read
        return tags.ANY


def is_ambiguous(part: Part, asked: Sequence[Languages]) -> bool:
    """Would one and the same text be read as several of these pairs, since the part does not say what it holds?"""
    file = part.files[0]
    try:
        match _kind(part):
            case "tmx":  # every unit names its languages
                return False
            case "tsv":
                return any(tsv.languages(file.blocks(), file.name, pair) == tags.ANY for pair in asked)
            case "jsonl":
                return jsonl.names_roles(file.blocks(), file.name)
    except CorpusError:  # a header of other languages, or damage: told when the file is read
        return False
    found = declared(part)
    fitting = {frozenset((pair.source, pair.target)) for pair in asked if tags.swapped(pair, found) is not None}
    return found == tags.ANY or (not (found.source and found.target) and len(fitting) > 1)


def _kind(part: Part) -> Format:
    file = part.files[0]
    return part.format or sniff(files.beginning(file.blocks())[0], file.name)


def sniff(head: bytes, name: str) -> Format:
    """The format that content with this beginning has; columns when nothing else fits."""
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = head.decode("utf-16" if wide else "utf-8-sig", errors="replace").lstrip()
    if text.startswith("<"):
        root = _ROOT.search(text)
        if root is None:
            raise CorpusError(f"{name} is XML, but neither TMX nor XLIFF: convert it to one of {KNOWN}")
        return "tmx" if root[1] == "tmx" else "xliff"
    if text.startswith("{"):
        return "jsonl"
    if text.startswith(("#", "msgid", "msgctxt", "domain")) and re.search(r"^msgid\s", text, re.MULTILINE):
        return "po"
    return "tsv"
