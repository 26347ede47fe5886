"""The words that the formats of `fill` share: what stands in a file, which parts of it wait for a translation, and
how they are written.

A format reads a `Text` into a `Scan`: its units, each with the contents to translate and the edits that write them.
All of it in UTF-8, whatever the file is in: a place is a number of bytes there, and `Text.content` goes back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from attent.data.pairs import CorpusError

BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class PretranslateError(CorpusError):
    """A file that cannot be filled: which one, which line, what was wrong and what to do next."""


@dataclass(frozen=True, kw_only=True)
class SkippedUnit:
    """A unit that was not filled, and why."""

    line: int
    source: str
    reason: str


class InlineCode(NamedTuple):
    """Markup inside of a text, which the translation must hold too."""

    display: str  # how it stands in the text that is translated
    raw: str  # how it stands in the file
    role: Literal["open", "close", "alone"] = "alone"
    pair_id: str = ""  # what an open and its close have in common
    is_break: bool = False  # text before it and after it is translated apart
    is_word: bool = False  # it stands in its sentence as a word does


InlineContent: TypeAlias = tuple[str | InlineCode, ...]


class Edit(NamedTuple):
    """Bytes of the text that others take the place of; none of them when something is put in."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, kw_only=True)
class TranslationUnit:
    """What waits for a translation: all its contents are filled, or none is."""

    line: int
    contents: tuple[InlineContent, ...]  # one; for an entry with plural forms one for each
    make_edits: Callable[[Sequence[InlineContent]], list[Edit]]  # that write the translations of these contents
    reserved_chars: str = ""  # characters that mean something in its text, and must not be more than in the source


@dataclass(kw_only=True)
class ScanResult:
    """What a format found in a file."""

    units: list[TranslationUnit] = field(default_factory=list)
    skipped: list[SkippedUnit] = field(default_factory=list)  # units that cannot be filled, whatever the translation is
    existing_count: int = 0  # units that have a target
    check_text: Callable[[str], str] = lambda text: ""  # why the file cannot hold this text


@dataclass(frozen=True, kw_only=True)
class FileText:
    """A file's text in UTF-8, and how to get its own bytes back."""

    name: str
    utf8: bytes
    encoding: str
    bom: bytes = b""

    def encode_edited(self, edits: Iterable[Edit], errors: str = "surrogateescape") -> bytes:
        """The bytes of the file, with these edits made."""
        changed = apply_edits(self.utf8, edits)
        if self.encoding == "utf-8":
            return self.bom + changed
        return self.bom + changed.decode("utf-8", "surrogateescape").encode(self.encoding, errors)

    def get_line_number(self, offset: int) -> int:
        return self.utf8.count(b"\n", 0, offset) + 1


def decode_file(content: bytes, name: str, encoding: str) -> FileText:
    """The text of a file; `encoding` holds when no mark at its beginning says another. Nothing of it is lost."""
    bom = next((mark for mark in BOMS if content.startswith(mark)), b"")
    encoding = codecs.lookup(BOMS.get(bom, encoding)).name
    body = content[len(bom) :]
    if encoding == "utf-8":
        return FileText(name=name, utf8=body, encoding=encoding, bom=bom)
    try:
        decoded = body.decode(encoding, "surrogateescape")
        whole = decoded.encode(encoding, "surrogateescape") == body
    except UnicodeError:
        whole = False
    if not whole:
        raise PretranslateError(f"{name} holds bytes that are not {encoding}, which it says it is in: save it as UTF-8")
    return FileText(name=name, utf8=decoded.encode("utf-8", "surrogateescape"), encoding=encoding, bom=bom)


def apply_edits(text: bytes, edits: Iterable[Edit]) -> bytes:
    """The text with every edit made; two at the same place in the order in which they come."""
    done: list[bytes] = []
    at = 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        assert at <= edit.start <= edit.end, "edits must not overlap"
        done += [text[at : edit.start], edit.text.encode("utf-8", "surrogateescape")]
        at = edit.end
    return b"".join([*done, text[at:]])


def has_undecodable_bytes(text: str) -> bool:
    """Does it hold bytes that are no text in the file's encoding?"""
    return any("\udc80" <= character <= "\udcff" for character in text)


def make_encoding_check(encoding: str) -> Callable[[str], str]:
    """What a file in this encoding has to say against a text."""

    def objection(text: str) -> str:
        try:
            text.encode(encoding)
        except UnicodeEncodeError as error:
            return f"the file is in {encoding}, which has no {text[error.start]!r}"
        return ""

    return objection


def to_display_text(content: InlineContent) -> str:
    """A content for a person to read."""
    return "".join(part if isinstance(part, str) else part.display for part in content)
