"""XLIFF 1.2 (`trans-unit`) and 2.x (`segment`): a source and, once somebody has translated it, a target.

A target of 1.2 whose `state` says that it is none yet is not read, one that needs a review only when fuzzy ones are
asked for. Proposals (`alt-trans`, `matches`), `seg-source`, `bin-unit` and `ignorable` are passed over. Of inline
elements `g`, `pc` and `mrk` hold text; `bpt`, `ept`, `ph`, `it` of 1.2 hold markup of another program, which is left
out, but one that stands for a line break or other white space gives it. White space is kept as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from attent.data.pairs import Bad, Languages, Pair
from attent.data.readers import safe_xml, tags
from attent.data.readers.files import SHOWN, TOO_LONG

UNITS = ("trans-unit", "segment")
LINE_BREAKS = ("lb", "pb", "x-html-br", "xlf:lb", "xlf:pb")  # `ctype` of 1.2, `subType` of 2.x
NOT_YET = ("new", "needs-translation")  # `state` of a target that is still what was there before
_HEX = re.compile("[0-9A-Fa-f]{1,8}")


def read(content: Iterable[bytes], name: str, asked: Languages, *, fuzzy: bool = False) -> Iterator[Pair | Bad]:
    """Read the other way round when asked for: `de` to `en` from a file that was translated from `en` to `de`."""
    return safe_xml.parse(content, _Xliff(name, asked, fuzzy=fuzzy))


def languages(content: Iterable[bytes], name: str) -> Languages:
    """Those of the first unit."""
    return safe_xml.languages(content, _Xliff(name, tags.ANY))


class _Xliff(safe_xml.Document):
    root = "xliff"
    codes = frozenset({"bpt", "bx", "ec", "em", "ept", "ex", "it", "ph", "sc", "sm", "sub", "x"})

    def __init__(self, name: str, asked: Languages, *, fuzzy: bool = False) -> None:
        super().__init__(name, asked)
        self.fuzzy = fuzzy
        self.asked = asked
        self.whole = tags.ANY  # the languages of the root, which are those of every file (2.x)
        self.seen: set[str] = set()
        self.swapped: bool | None = False  # None: the file that we are in has other languages
        self.missing = ""  # then the reason, for each of its units
        self.answered = False
        self.line = 0  # of the unit
        self.texts: dict[str, str | None] = {}  # of the unit: source, target
        self.state = ""  # of its target (1.2)

    def opened(self, tag: str, attributes: Mapping[str, str], line: int) -> bool:
        if tag == "xliff":
            self.whole = Languages(attributes.get("srcLang"), attributes.get("trgLang"))
        elif tag == "file":
            source, target = attributes.get("source-language"), attributes.get("target-language")
            self._turn(Languages(source or self.whole.source, target or self.whole.target))
        elif tag in UNITS:
            self.line, self.texts, self.state = line, {}, ""
        elif tag == "target" and self.path[-1] in UNITS:
            self.state = attributes.get("state", "")
        return tag in ("source", "target") and self.path[-1] in UNITS

    def _turn(self, declared: Languages) -> None:
        """Which way round the units of this file are read. What was left open is settled by the first one."""
        found = [tag for tag in (declared.source, declared.target) if tag]
        self.seen.update(found[: tags.MOST_NAMED - len(self.seen)])
        self.swapped = tags.swapped(self.languages, declared)
        if self.swapped is None:
            self.missing = tags.missing(self.languages, found)
            if self.asked.source is None or self.asked.target is None:
                raise tags.error(self.name, self.asked, self.seen)
            return
        self.answered = True
        source, target = declared.source, declared.target
        self.languages = tags.settled(self.languages, *((target, source) if self.swapped else (source, target)))

    def segment(self, tag: str, text: str | None) -> None:
        self.texts.setdefault(tag, text)

    def inline(self, tag: str, attributes: Mapping[str, str]) -> str:
        """`cp` stands for a character that XML cannot hold, by its number; a code may stand for white space."""
        if attributes.get("ctype", attributes.get("subType", "")).lower() in LINE_BREAKS:
            return "\n"
        instead = attributes.get("equiv-text", attributes.get("equiv", ""))
        if instead.isspace():
            return instead
        number = int(attributes.get("hex", ""), 16) if tag == "cp" and _HEX.fullmatch(attributes.get("hex", "")) else 0
        return chr(number) if 0 < number < 0xD800 or 0xDFFF < number < 0x110000 else ""

    def closed(self, tag: str) -> None:
        if tag in UNITS:
            self.found.append(self._unit())

    def _unit(self) -> Pair | Bad:
        source, target = self.texts.get("source", ""), self.texts.get("target", "")
        why = self.missing if self.swapped is None else ""
        if source is None or target is None:
            why = why or TOO_LONG
        elif not target.strip() or self.state in NOT_YET:
            why = why or tags.UNTRANSLATED
        elif self.state.startswith("needs-") and not self.fuzzy:
            why = why or "fuzzy"
        elif not why:
            source, target = (target, source) if self.swapped else (source, target)
            return Pair(source, target, self.name, self.line)
        return Bad(why, self.name, self.line, (source or target or "")[:SHOWN])

    def finished(self) -> None:
        if self.seen and not self.answered:
            raise tags.error(self.name, self.asked, self.seen)
