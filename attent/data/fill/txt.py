"""Plain text: each line is translated where it stands; blank lines, indents and the ends of lines stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attent.data.fill import placeholders
from attent.data.fill.parts import BOMS, Content, Edit, FillError, Scan, Text, Unit, encodable, opened
from attent.data.pairs import Languages


def text_of(content: bytes, name: str) -> Text:
    """The text of a file in UTF-8, or in UTF-16 if its first bytes say so."""
    text = opened(content, name, "utf-8")
    if b"\0" in text.utf8:
        unmarked = "" if content.startswith(tuple(BOMS)) else ", or as UTF-8 if it is text"
        raise FillError(f"{name} is not text at line {text.line(text.utf8.index(0)):,}: save it as text{unmarked}")
    return text


def scan(text: Text, asked: Languages) -> Scan:
    """Every line with words. A text does not say its language, so any fits."""
    found = Scan(objection=encodable(text.encoding))
    for number, (start, line) in enumerate(lines(text.utf8), 1):
        said = line.decode("utf-8", "surrogateescape")
        if placeholders.has_words(said):
            found.units.append(unit(number, (said,), start, start + len(line)))
    return found


def lines(utf8: bytes) -> Iterator[tuple[int, bytes]]:
    """Each line with its place, without its end; where there is no newline at all, a carriage return is one."""
    at = 0
    for line in utf8.split(b"\n" if b"\n" in utf8 else b"\r"):
        yield at, line.removesuffix(b"\r")
        at += len(line) + 1


def unit(line: int, content: Content, start: int, end: int) -> Unit:
    """A text that its translation takes the place of."""

    def edits(targets: Sequence[Content]) -> list[Edit]:
        return [Edit(start, end, written(targets[0]))]

    return Unit(line=line, contents=(content,), edits=edits)


def written(content: Content) -> str:
    return "".join(part if isinstance(part, str) else part.raw for part in content)
