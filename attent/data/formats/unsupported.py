"""Formats that are neither parallel text nor plain lines, recognized by name or first characters and refused by name.

Some are documents that attent translates if their name says so; most it does not read.
The patterns match the beginning of such files and hardly any text: prose may begin with a brace, a tag or a quote.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from attent.data.formats.streams import decode_head, strip_compression_suffix

_TO_MARKDOWN = "convert it to Markdown, for example with pandoc"
_TO_PO = "convert it to PO, for example with the Translate Toolkit"
_TO_XLIFF = "convert it to XLIFF, for example with Okapi"
_BY_NAME = "give it as a file whose name ends in {}"
_TO_TEXT = "save its text as a .txt file"
_XML_PROLOG = r"(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*"
_JSON_STRING = r'"(?:[^"\\\n]|\\.)*"'


class UnsupportedFormat(NamedTuple):
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


_FORMATS = (
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
    for spec in _FORMATS:
        matches = spec.head and re.match(spec.head, text, re.IGNORECASE | re.DOTALL)
        if matches and (spec.is_valid is None or spec.is_valid(text)):
            return spec
    return next((spec for spec in _FORMATS if plain_name.endswith(spec.suffixes)), None)
