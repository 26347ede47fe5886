"""The table of file formats. Each has a module; adding a format touches that module and this table.

A corpus is read by `read_pairs`; a document to pre-translate is scanned by `scan_units`. The format comes from the
name, or from the first bytes where the name does not tell (standard input).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attent.data.formats import (
    android,
    docx,
    html,
    json_strings,
    jsonl,
    markdown,
    moses,
    plain_text,
    po,
    streams,
    string_files,
    subtitles,
    table,
    tmx,
    tsv,
    xliff,
    yaml_strings,
)
from attent.data.formats.streams import InputFile, decode_head, strip_compression_suffix
from attent.data.formats.units import ScanResult
from attent.data.pairs import ANY_LANGUAGES, DEFAULT_READ_OPTIONS, BadLine, CorpusError, LanguagePair, Pair, ReadOptions

_TO_MARKDOWN = "convert it to Markdown, for example with pandoc"
_TO_PO = "convert it to PO, for example with the Translate Toolkit"
_TO_XLIFF = "convert it to XLIFF, for example with Okapi"
_BY_NAME = "give it as a file whose name ends in {}"
_TO_TEXT = "save its text as a .txt file"
_XML_PROLOG = r"(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*"
_JSON_STRING = r'"(?:[^"\\\n]|\\.)*"'
_INSIST = "add --input-type lines to translate each of its lines as it is"
MOSES_ROLES = (("src", "tgt"), ("src", "trg"), ("source", "target"))  # suffixes of Moses pairs that name no languages


class UnsupportedFormat(NamedTuple):
    """A format that is neither parallel text nor plain lines, refused by name.

    The patterns match the beginning of such files and hardly any text: prose may begin with a brace, a tag or a quote.
    """

    title: str  # with its article
    suffixes: tuple[str, ...]
    head: str  # pattern of its beginning; "" if only the name tells
    advice: str
    is_valid: Callable[[str], bool] | None = None  # decides about a text whose beginning matches


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


UNSUPPORTED_FORMATS = (
    UnsupportedFormat(
        "a Qt translation file",
        (),  # corpus.ts is Tsonga
        _XML_PROLOG + r"(?:<!DOCTYPE TS>|<TS[\s>])",
        "convert it to XLIFF, for example with lconvert",
    ),
    UnsupportedFormat(
        "an XML file",
        (".xml", ".resx", ".svg", ".ttml", ".dita", ".xhtml"),
        r"<\?xml\s|<!DOCTYPE\s|<(?:resources|svg|rss)(?:\s[^<>]*)?>",
        _TO_XLIFF,
    ),
    UnsupportedFormat(
        "an SRT subtitle file",
        (".srt",),
        r"(?:\d+[ \t]*\r?\n)?(?:\d{1,2}:)?\d\d:\d\d[,.]\d{1,3}[ \t]*-->",
        _BY_NAME.format(".srt"),
    ),
    UnsupportedFormat(
        "a WebVTT subtitle file",
        (".vtt",),
        r"WEBVTT(?:[ \t]*(?:\r?\n|\Z)|[ \t][^\n]*\n.*?\d\d:\d\d\.\d{3}[ \t]*-->)",
        _BY_NAME.format(".vtt"),
    ),
    UnsupportedFormat(
        "a subtitle file",
        (".ass", ".ssa", ".sub", ".sbv", ".lrc"),
        r"\[Script Info\]|\{\d+\}\{\d+\}|\[\d\d:\d\d\.\d\d\]|\d:\d\d:\d\d\.\d{3},\d:\d\d:\d\d\.\d{3}\s",
        _TO_PO,
    ),
    UnsupportedFormat(
        "JSON",
        (".json", ".jsonl", ".ndjson", ".arb", ".xcstrings", ".ipynb"),
        rf'\{{\s*{_JSON_STRING}\s*:\s*(?:["\[{{\d-]|true|false|null)|\[\s*(?:\{{\s*"|\[\s*["\[{{\d]|{_JSON_STRING}\s*[,\]])',
        f"{_BY_NAME.format('.json')}, or add --input-type json if each line is an object with a text",
        _is_json,
    ),
    UnsupportedFormat("CSV", (".csv",), "", "extract the column to translate"),
    UnsupportedFormat("a table of columns", (".tsv", ".tab"), "", "extract the column to translate with cut -f1"),
    UnsupportedFormat("a PDF file", (".pdf",), r"%PDF-", _TO_TEXT),
    UnsupportedFormat("an RTF file", (".rtf",), r"\{\\rtf", _TO_MARKDOWN),
    UnsupportedFormat(
        "an office document or another ZIP archive",
        (".docx", ".odt", ".pptx", ".odp", ".xlsx", ".ods", ".epub", ".idml", ".pages", ".zip"),
        "PK\x03\x04",
        "save it as DOCX, or " + _TO_MARKDOWN,
    ),
    UnsupportedFormat("an office document", (".doc", ".ppt", ".xls"), "\ufffd{2}\x11(?:\ufffd|\u0871)", _TO_TEXT),
    UnsupportedFormat(
        "a compiled gettext catalog", (".gmo",), "\ufffd(?:\x12\x04|\x04\x12)\ufffd", "use msgunfmt first"
    ),
    UnsupportedFormat(
        "an Apple strings file",
        (".strings",),
        rf"(?:/\*.*?\*/\s*)?{_JSON_STRING}\s*=\s*{_JSON_STRING};",
        _BY_NAME.format(".strings"),
    ),
    UnsupportedFormat("a properties file", (".properties",), "", _BY_NAME.format(".properties")),
    UnsupportedFormat("a settings file", (".yaml", ".yml", ".toml", ".ini"), r"%YAML\s", _TO_PO),
    UnsupportedFormat("a LaTeX document", (".tex", ".latex"), r"\\documentclass\W", _TO_MARKDOWN),
    UnsupportedFormat("a markup document", (".rst", ".adoc", ".asciidoc", ".org"), "", _TO_MARKDOWN),
)


def detect_unsupported(name: str, head: bytes) -> UnsupportedFormat | None:
    """Return the format of a file that attent does not read, by its first bytes or its name; None for text."""
    text, plain_name = decode_head(head), strip_compression_suffix(name).lower()
    for spec in UNSUPPORTED_FORMATS:
        matches = spec.head and re.match(spec.head, text, re.IGNORECASE | re.DOTALL)
        if matches and (spec.is_valid is None or spec.is_valid(text)):
            return spec
    return next((spec for spec in UNSUPPORTED_FORMATS if plain_name.endswith(spec.suffixes)), None)


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
        document_suffixes=("strings.xml", "plurals.xml", "arrays.xml"), scan_units=android.scan_units
    ),
    "apple-strings": FileFormat(document_suffixes=(".strings",), scan_units=string_files.scan_strings),
    "properties": FileFormat(document_suffixes=(".properties",), scan_units=string_files.scan_properties),
    "json": FileFormat(document_suffixes=(".json", ".arb"), scan_fields=json_strings.scan_fields),
    "yaml": FileFormat(document_suffixes=(".yaml", ".yml"), scan_fields=yaml_strings.scan_fields),
    "docx": FileFormat(document_suffixes=(".docx",), scan_units=docx.scan_units),
    "table": FileFormat(document_suffixes=(".csv", ".tsv", ".tab"), scan_fields=table.scan_fields),
    "subtitles": FileFormat(document_suffixes=(".srt", ".vtt"), scan_units=subtitles.scan_units),
    "text": FileFormat(document_suffixes=(".txt", ".text"), scan_units=plain_text.scan_units),
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
        return moses.read_pairs(source.read_blocks(), target.read_blocks(), (source.name, target.name))
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
