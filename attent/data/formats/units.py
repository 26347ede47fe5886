"""Translation units of files that are written back: text with inline codes, and byte edits that fill in translations.

All offsets are bytes of the file's text in UTF-8; `FileText.encode_edited` converts back to the file's own encoding.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from attent.data.pairs import CorpusError

BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}

Role: TypeAlias = Literal["open", "close", "standalone"]


@dataclass(frozen=True, kw_only=True)
class SkippedUnit:
    """A unit without a translation, or one to review, and the reason."""

    line: int
    source: str
    reason: str


class InlineCode(NamedTuple):
    """Markup inside a text that its translation must keep."""

    display: str  # in the text given to the model
    raw: str  # in the file
    role: Role = "standalone"
    pair_id: str = ""  # common to an opening code and its closing one
    is_break: bool = False  # the texts before and after it are translated separately
    is_word: bool = False  # part of the sentence, like a word


InlineContent: TypeAlias = tuple[str | InlineCode, ...]


class TransferredContent(NamedTuple):
    """A translation with the codes of its source, placed in several ways; the best first."""

    candidates: tuple[InlineContent, ...]
    is_certain: bool  # False: a person should check where the codes of the first candidate are
    problem: str = ""  # of the text, for a person to check


class Edit(NamedTuple):
    """Replacement of a byte range; an empty range is an insertion."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, kw_only=True)
class TranslationUnit:
    """Contents to translate; all of them are filled in, or none."""

    line: int
    contents: tuple[InlineContent, ...]  # several for plural forms
    make_edits: Callable[[Sequence[InlineContent]], list[Edit]]  # from the translations of the contents
    format_names: tuple[str, ...] = ()  # of its format strings: c, python-brace


@dataclass(frozen=True, kw_only=True)
class FileText:
    """A file's text in UTF-8, its encoding and byte order mark."""

    name: str
    utf8: bytes
    encoding: str
    bom: bytes = b""

    @property
    def newline(self) -> str:
        """The ending of its first line."""
        return "\r\n" if self.utf8.partition(b"\n")[0].endswith(b"\r") else "\n"

    def encode_edited(self, edits: Iterable[Edit], errors: str = "surrogateescape") -> bytes:
        """Apply edits and return the file's bytes; insertions at the same offset keep their order."""
        parts, offset = list[bytes](), 0
        for edit in sorted(edits, key=lambda edit: edit.start):
            assert offset <= edit.start <= edit.end, "edits must not overlap"
            parts += [self.utf8[offset : edit.start], encode_text(edit.text)]
            offset = edit.end
        edited = b"".join([*parts, self.utf8[offset:]])
        if self.encoding == "utf-8":
            return self.bom + edited
        return self.bom + edited.decode("utf-8", "surrogateescape").encode(self.encoding, errors)

    def check_encodable(self, text: str) -> str:
        """Return why the file cannot contain a translation, or ""."""
        if "\0" in text:
            return "its translation has a NUL character"
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError as error:
            return f"the file is in {self.encoding}, which has no {text[error.start]!r}"
        return ""

    def split_lines(self) -> Iterator[tuple[int, str]]:
        """Yield (byte offset, line without its ending)."""
        offset = 0
        for line in self.utf8.split(b"\n"):
            yield offset, line.removesuffix(b"\r").decode("utf-8", "surrogateescape")
            offset += len(line) + 1


@dataclass(kw_only=True)
class ScanResult:
    text: FileText
    units: list[TranslationUnit] = field(default_factory=list)
    skipped: list[SkippedUnit] = field(default_factory=list)  # units that no translation can fill
    existing_count: int = 0  # units with a target
    final_edits: list[Edit] = field(default_factory=list)  # made if any unit is filled
    check_text: Callable[[str], str]  # why the file cannot contain a text, or ""
    encoding_errors: str = "surrogateescape"  # error handler for what the encoding lacks
    has_labels: bool = False  # texts of a user interface, in which `_File` names a key

    def add_unit(
        self,
        line: int,
        contents: Iterable[InlineContent],
        make_edits: Callable[[Sequence[InlineContent]], list[Edit]],
        format_names: tuple[str, ...] = (),
    ) -> None:
        unit = TranslationUnit(line=line, contents=tuple(contents), make_edits=make_edits, format_names=format_names)
        self.units.append(unit)

    def skip(self, line: int, source: str, reason: str) -> None:
        self.skipped.append(SkippedUnit(line=line, source=source, reason=reason))


def decode_file(content: bytes, name: str, encoding: str) -> FileText:
    """Decode a file without loss; a byte order mark overrides `encoding`."""
    bom = next((mark for mark in BOMS if content.startswith(mark)), b"")
    encoding = codecs.lookup(BOMS.get(bom, encoding)).name
    body = content[len(bom) :]
    if encoding == "utf-8":
        return FileText(name=name, utf8=body, encoding=encoding, bom=bom)
    try:
        decoded = body.decode(encoding, "surrogateescape")
        utf8 = encode_text(decoded)
        if decoded.encode(encoding, "surrogateescape") == body and utf8.decode(errors="surrogateescape") == decoded:
            return FileText(name=name, utf8=utf8, encoding=encoding, bom=bom)
    except UnicodeError:
        pass
    raise CorpusError(f"{name} has bytes that are not {encoding}, its declared encoding: save it as UTF-8")


def decode_plain_text(content: bytes, name: str) -> FileText:
    """Decode UTF-8, or UTF-16 with a byte order mark."""
    text = decode_file(content, name, "utf-8")
    if b"\0" in text.utf8:
        line = text.utf8.count(b"\n", 0, text.utf8.index(0)) + 1
        advice = "" if content.startswith(tuple(BOMS)) else ", or as UTF-8 if it is text"
        raise CorpusError(f"{name} is not text at line {line:,}: save it as text{advice}")
    return text


def encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def get_raw_text(content: InlineContent) -> str:
    """Return a content as it is written in the file."""
    return "".join(part if isinstance(part, str) else part.raw for part in content)


def get_display_text(content: InlineContent) -> str:
    """Return a content as the model and a person read it."""
    return "".join(part if isinstance(part, str) else part.display for part in content)


def join_texts(content: Iterable[str | InlineCode]) -> InlineContent:
    """Return a content in which no text is empty or follows another."""
    parts: list[str | InlineCode] = []
    for part in content:
        if isinstance(part, str) and parts and isinstance(last := parts[-1], str):
            parts[-1] = last + part
        elif part:
            parts.append(part)
    return tuple(parts)


def is_unchanged(contents: Sequence[InlineContent], targets: Sequence[InlineContent]) -> bool:
    return [*map(get_raw_text, contents)] == [*map(get_raw_text, targets)]
