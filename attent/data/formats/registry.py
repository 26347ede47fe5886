"""The table of file formats. Each has a module (those of a few lines are here), and adding one touches only the two.

A corpus is read by `read_pairs`; a document to pre-translate is scanned by `scan_units`. The format comes from the
name, or from the first bytes where the name does not tell (standard input).
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from attent.data.formats import (
    docx,
    html,
    jsonl,
    markdown,
    placeholders,
    po,
    streams,
    string_files,
    subtitles,
    table,
    tmx,
    tsv,
    units,
    xliff,
)
from attent.data.formats.streams import InputFile, decode_head, strip_compression_suffix
from attent.data.formats.units import Edit, InlineContent, ScanResult, decode_plain_text
from attent.data.pairs import ANY_LANGUAGES, DEFAULT_READ_OPTIONS, BadLine, CorpusError, LanguagePair, Pair, ReadOptions

_INSIST = "add --input-type lines to translate each of its lines as it is"
MOSES_ROLES = (("src", "tgt"), ("src", "trg"), ("source", "target"))  # suffixes of Moses pairs that name no languages


class UnsupportedFormat(NamedTuple):
    """A format of `unsupported.toml`."""

    title: str  # with its article
    suffixes: Sequence[str]
    advice: str
    head: str = ""  # pattern of its beginning; "" if only the name tells


@cache
def _read_unsupported_formats() -> list[UnsupportedFormat]:
    tables = tomllib.loads(Path(__file__).with_name("unsupported.toml").read_text(encoding="utf-8"))
    return [UnsupportedFormat(**table) for table in tables["format"]]


def _is_json(text: str) -> bool:
    """True for JSON, JSON lines and the beginning of either."""
    text = text.strip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:  # at the end if the text is cut
        return error.pos >= len(text) - len("false") or error.msg.startswith("Unterminated string")
    except RecursionError:
        return True
    return re.match(r"[ \t\r]*(?:\n|\Z)", text[end:]) is not None


def detect_unsupported(name: str, head: bytes) -> UnsupportedFormat | None:
    """Return the format of a file that attent does not read, by its first bytes or its name; None for text."""
    text, plain_name = decode_head(head), strip_compression_suffix(name).lower()
    formats = _read_unsupported_formats()
    for spec in formats:
        matches = spec.head and re.match(spec.head, text, re.IGNORECASE | re.DOTALL)
        if matches and (spec.title != "JSON" or _is_json(text)):
            return spec
    return next((spec for spec in formats if plain_name.endswith(tuple(spec.suffixes))), None)


def _scan_plain_text(content: bytes, name: str, _: LanguagePair) -> ScanResult:
    """Return every line with words. Text does not declare its language, so that any matches."""
    text = decode_plain_text(content, name)
    result = ScanResult(text=text, check_text=text.check_encodable)
    for number, (start, line) in enumerate(text.split_lines(), 1):
        if placeholders.has_words(line):
            result.add_unit(number, [(line,)], partial(_replace_line, start, line))
    return result


def _replace_line(start: int, line: str, targets: Sequence[InlineContent]) -> list[Edit]:
    return [Edit(start, start + len(units.encode_text(line)), units.get_raw_text(targets[0]))]


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    suffixes: tuple[str, ...] = ()
    document_suffixes: tuple[str, ...] = ()  # of documents to pre-translate, but not of corpora
    read_pairs: Callable[[Iterable[bytes], str, LanguagePair, ReadOptions], Iterator[Pair | BadLine]] | None = None
    read_languages: Callable[[Iterable[bytes], str], LanguagePair] | None = None
    # True if the same text could be read as several of the requested pairs; None: decided by `read_languages`
    is_ambiguous: Callable[[Callable[[], Iterable[bytes]], str, Sequence[LanguagePair]], bool] | None = None
    scan_units: Callable[[bytes, str, LanguagePair], ScanResult] | None = None
    # Documents of which only some columns or keys may be translated: those with these names
    scan_fields: Callable[[bytes, str, LanguagePair, Sequence[str]], ScanResult] | None = None
    sniff: Callable[[str], bool] | None = None  # True if a corpus in this format can begin with a text
    labeling_advice: str = ""  # how a file declares its languages


FORMATS = {
    "tsv": FileFormat(
        suffixes=(".tsv", ".tab"),
        read_pairs=tsv.read_pairs,
        read_languages=tsv.read_languages,
        is_ambiguous=tsv.is_ambiguous,
        labeling_advice="name its columns in a first line such as en<TAB>de<TAB>fr",
    ),
    "jsonl": FileFormat(
        suffixes=(".jsonl", ".ndjson"),
        read_pairs=jsonl.read_pairs,
        read_languages=jsonl.read_languages,
        is_ambiguous=jsonl.is_ambiguous,
        sniff=lambda text: text.startswith("{"),
        labeling_advice='use languages as keys, as in {"en": ..., "de": ...}',
    ),
    "tmx": FileFormat(
        suffixes=(".tmx",),
        read_pairs=tmx.read_pairs,
        read_languages=tmx.TmxReader.read_languages,
        is_ambiguous=lambda *_: False,  # every unit names its languages
        scan_units=tmx.scan_units,
        sniff=tmx.SCHEMA.matches_head,
    ),
    "xliff": FileFormat(
        suffixes=(".xliff", ".xlf", ".sdlxliff", ".mqxliff", ".mxliff"),
        read_pairs=xliff.read_pairs,
        read_languages=xliff.XliffReader.read_languages,
        scan_units=xliff.scan_units,
        sniff=xliff.SCHEMA.matches_head,
        labeling_advice="name both languages in its <file>",
    ),
    "po": FileFormat(
        suffixes=(".po",),
        document_suffixes=(".pot",),
        read_pairs=po.read_pairs,
        read_languages=po.read_languages,
        scan_units=po.scan_units,
        sniff=po.matches_head,
        labeling_advice="name its language in its header",
    ),
    "moses": FileFormat(  # two files, read by `read_pairs` below
        labeling_advice="name its files by language, such as corpus.en and corpus.de"
    ),
    "html": FileFormat(
        document_suffixes=(".html", ".htm", ".xhtml"), scan_units=html.scan_units, sniff=html.matches_head
    ),
    "markdown": FileFormat(document_suffixes=(".md", ".markdown"), scan_units=markdown.scan_units),
    "android": FileFormat(
        document_suffixes=("strings.xml", "plurals.xml", "arrays.xml"), scan_units=string_files.scan_android
    ),
    "apple-strings": FileFormat(document_suffixes=(".strings",), scan_units=string_files.scan_strings),
    "properties": FileFormat(document_suffixes=(".properties",), scan_units=string_files.scan_properties),
    "json": FileFormat(document_suffixes=(".json", ".arb"), scan_fields=string_files.scan_json_fields),
    "yaml": FileFormat(document_suffixes=(".yaml", ".yml"), scan_fields=string_files.scan_yaml_fields),
    "docx": FileFormat(document_suffixes=(".docx",), scan_units=docx.scan_units),
    "table": FileFormat(document_suffixes=(".csv", ".tsv", ".tab"), scan_fields=table.scan_fields),
    "subtitles": FileFormat(document_suffixes=(".srt", ".vtt"), scan_units=subtitles.scan_units),
    "text": FileFormat(document_suffixes=(".txt", ".text"), scan_units=_scan_plain_text),
}
SUPPORTED_FORMATS = (
    ", ".join(spec.suffixes[0] for spec in FORMATS.values() if spec.suffixes)
    + ", or a pair such as corpus.en and corpus.de, each also with .gz, .xz or .zst"
)


def detect_format(name: str) -> str | None:
    """Return the format of a corpus file by its name, compressed or not."""
    plain_name = strip_compression_suffix(name).lower()
    return next((key for key, spec in FORMATS.items() if plain_name.endswith(spec.suffixes)), None)


def list_document_suffixes() -> dict[str, str]:
    return {
        suffix: key
        for key, spec in FORMATS.items()
        if spec.scan_units or spec.scan_fields
        for suffix in (*spec.suffixes, *spec.document_suffixes)
    }


def detect_document_format(name: str) -> str | None:
    """Return the format of a document that can be pre-translated, by its name. Compressed ones cannot."""
    return next((key for suffix, key in list_document_suffixes().items() if name.lower().endswith(suffix)), None)


def scan_document(content: bytes, name: str, languages: LanguagePair, fields: Sequence[str] = ()) -> ScanResult:
    """Return the units of a document in the format of its name. `fields`: the columns or keys to translate."""
    key = detect_document_format(name)
    if key is None:
        known = ", ".join(sorted(list_document_suffixes()))
        raise CorpusError(f"{name} must be a file of one of these kinds: {known}; rename it")
    spec = FORMATS[key]
    if spec.scan_fields:
        return spec.scan_fields(content, name, languages, fields)
    if fields:
        known = ", ".join(suffix for suffix, key in list_document_suffixes().items() if FORMATS[key].scan_fields)
        raise CorpusError(f"{name} has no fields to choose from: leave them out; files with fields end in {known}")
    assert spec.scan_units is not None
    return spec.scan_units(content, name, languages)


def sniff_format(head: bytes, name: str) -> str:
    """Return the format by the first bytes; columns if nothing else matches."""
    text = streams.decode_head(head)
    key = next((key for key, spec in FORMATS.items() if spec.sniff and spec.sniff(text)), "tsv")
    has_columns = "\t" in text.partition("\n")[0]
    named = detect_document_format(name) if key == "tsv" and not has_columns else None
    if named and FORMATS[named].sniff:
        key = named
    if FORMATS[key].read_pairs is None:
        raise CorpusError(f"{name} is {key.upper()}, and not parallel text: convert it to one of {SUPPORTED_FORMATS}")
    if key == "tsv" and (spec := detect_unsupported("" if has_columns else name, head)):
        raise CorpusError(f"{name} is {spec.title}, and not parallel text: convert it to one of {SUPPORTED_FORMATS}")
    if key == "tsv" and text.startswith("<"):
        raise CorpusError(f"{name} is XML, but neither TMX nor XLIFF: convert it to one of {SUPPORTED_FORMATS}")
    return key


def check_plain_text(head: bytes, name: str) -> None:
    """Raise an error if a file to translate line by line is in another format, by its first bytes or its name."""
    text = streams.decode_head(head)
    for key, spec in FORMATS.items():
        if spec.scan_units and spec.sniff and spec.sniff(text):
            advice = f"give it as a file whose name ends in {[*spec.suffixes, *spec.document_suffixes][0]}"
            raise CorpusError(f"{name} must be text, but is {key.upper()}: {advice}, or {_INSIST}")
    if other := detect_unsupported(name, head):
        raise CorpusError(f"{name} must be text, but is {other.title}: {other.advice}, or {_INSIST}")


@dataclass(frozen=True)
class ParallelFile:
    """A file and its format, or the two files of a Moses pair, source first."""

    format: str | None  # None: detected from the first bytes
    files: tuple[InputFile, ...]

    @property
    def name(self) -> str:
        return self.files[0].name


def read_pairs(
    file: ParallelFile, languages: LanguagePair, options: ReadOptions = DEFAULT_READ_OPTIONS
) -> Iterator[Pair | BadLine]:
    if file.format == "moses":
        source, target = file.files
        return read_moses_pairs(source.read_blocks(), target.read_blocks(), (source.name, target.name))
    content: Iterator[bytes] = file.files[0].read_blocks()
    key = file.format
    if key is None:
        head, content = streams.peek_head(content)
        key = sniff_format(head, file.name)
    reader = FORMATS[key].read_pairs
    assert reader is not None
    return reader(content, file.name, languages, options)


def read_declared_languages(file: ParallelFile) -> LanguagePair:
    """Return the languages that a file declares at its beginning, or a Moses pair in its suffixes."""
    try:
        key = _resolve_format(file)
        if key == "moses":
            suffixes = tuple(strip_compression_suffix(side.name).rpartition(".")[2] for side in file.files)
            return ANY_LANGUAGES if suffixes in MOSES_ROLES else LanguagePair(*suffixes)
        read_languages = FORMATS[key].read_languages
        assert read_languages is not None
        return read_languages(file.files[0].read_blocks(), file.name)
    except CorpusError:  # raised again when the file is read, after what can still be read
        return ANY_LANGUAGES


def is_language_ambiguous(file: ParallelFile, requested: Sequence[LanguagePair]) -> bool:
    """True if the same text would be read as several of these pairs, since the file does not declare its languages."""
    try:
        is_ambiguous = FORMATS[_resolve_format(file)].is_ambiguous
        if is_ambiguous is not None:
            return is_ambiguous(file.files[0].read_blocks, file.name, requested)
    except CorpusError:  # a header of other languages, or damage: raised when the file is read
        return False
    declared = read_declared_languages(file)
    matches = {frozenset((pair.source, pair.target)) for pair in requested if pair.is_reversed(declared) is not None}
    return declared == ANY_LANGUAGES or (declared.is_open and len(matches) > 1)


def _resolve_format(file: ParallelFile) -> str:
    return file.format or sniff_format(streams.peek_head(file.files[0].read_blocks())[0], file.name)


def read_moses_pairs(
    source: Iterable[bytes], target: Iterable[bytes], names: tuple[str, str]
) -> Iterator[Pair | BadLine]:
    """Yield the pairs of lines. A bad line on either side makes the pair bad; the two files stay in step."""
    sources, targets = streams.read_lines(source, names[0]), streams.read_lines(target, names[1])
    for number, (source_line, target_line) in enumerate(zip_longest(sources, targets), 1):
        if isinstance(source_line, str) and isinstance(target_line, str):
            yield Pair(source_line, target_line, names[0], number, names[1])
        elif source_line is None or target_line is None:
            ends = ((source_line, sources), (target_line, targets))
            counts = [number - (line is None) + sum(1 for _ in rest) for line, rest in ends]
            problem = f"{names[0]} has {counts[0]:,} lines but {names[1]} {counts[1]:,}, so that they do not match"
            raise CorpusError(f"{problem}: find the missing or broken line, or fetch both files again")
        else:
            bad_line = source_line if isinstance(source_line, BadLine) else target_line
            assert isinstance(bad_line, BadLine)
            yield bad_line
