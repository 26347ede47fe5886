"""XLIFF 1.2 (`trans-unit`) and 2.x (`segment`): a source and, once somebody has translated it, a target.

A target of 1.2 whose `state` says that it is none yet is not read, one that needs a review only when fuzzy ones are
asked for. Proposals (`alt-trans`, `matches`), `seg-source`, `bin-unit` and `ignorable` are passed over. Of inline
elements `g`, `pc` and `mrk` hold text; `bpt`, `ept`, `ph`, `it` of 1.2 hold markup of another program, which is left
out, but one that stands for a line break or other white space gives it. White space is kept as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from attent.data.formats import language_tags, safe_xml
from attent.data.formats.streams import EXCERPT_CHARS, TOO_LONG
from attent.data.pairs import BadLine, LanguagePair, Pair

UNIT_TAGS = ("trans-unit", "segment")
LINE_BREAK_TYPES = ("lb", "pb", "x-html-br", "xlf:lb", "xlf:pb")  # `ctype` of 1.2, `subType` of 2.x
UNTRANSLATED_STATES = ("new", "needs-translation")  # `state` of a target that is still what was there before
_HEX_CODE = re.compile("[0-9A-Fa-f]{1,8}")


def read_pairs(
    content: Iterable[bytes], name: str, requested: LanguagePair, *, fuzzy: bool = False
) -> Iterator[Pair | BadLine]:
    """Read the other way round when asked for: `de` to `en` from a file that was translated from `en` to `de`."""
    return safe_xml.parse_xml(content, _XliffReader(name, requested, fuzzy=fuzzy))


def read_languages(content: Iterable[bytes], name: str) -> LanguagePair:
    """Those of the first unit."""
    return safe_xml.read_languages(content, _XliffReader(name, language_tags.ANY_LANGUAGES))


class _XliffReader(safe_xml.XmlHandler):
    root_tag = "xliff"
    native_code_tags = frozenset({"bpt", "bx", "ec", "em", "ept", "ex", "it", "ph", "sc", "sm", "sub", "x"})

    def __init__(self, name: str, requested: LanguagePair, *, fuzzy: bool = False) -> None:
        super().__init__(name, requested)
        self.fuzzy = fuzzy
        self.requested = requested
        self.root_languages = (
            language_tags.ANY_LANGUAGES
        )  # the languages of the root, which are those of every file (2.x)
        self.seen_languages: set[str] = set()
        self.is_reversed: bool | None = False  # None: the file that we are in has other languages
        self.mismatch_reason = ""  # then the reason, for each of its units
        self.has_match = False
        self.unit_line = 0  # of the unit
        self.unit_texts: dict[str, str | None] = {}  # of the unit: source, target
        self.target_state = ""  # of its target (1.2)

    def start_element(self, tag: str, attributes: Mapping[str, str], line: int) -> bool:
        if tag == "xliff":
            self.root_languages = LanguagePair(attributes.get("srcLang"), attributes.get("trgLang"))
        elif tag == "file":
            source, target = attributes.get("source-language"), attributes.get("target-language")
            self._set_direction(
                LanguagePair(source or self.root_languages.source, target or self.root_languages.target)
            )
        elif tag in UNIT_TAGS:
            self.unit_line, self.unit_texts, self.target_state = line, {}, ""
        elif tag == "target" and self.open_tags[-1] in UNIT_TAGS:
            self.target_state = attributes.get("state", "")
        return tag in ("source", "target") and self.open_tags[-1] in UNIT_TAGS

    def _set_direction(self, declared: LanguagePair) -> None:
        """Which way round the units of this file are read. What was left open is settled by the first one."""
        found = [tag for tag in (declared.source, declared.target) if tag]
        self.seen_languages.update(found[: language_tags.MAX_LISTED - len(self.seen_languages)])
        self.is_reversed = language_tags.is_reversed(self.languages, declared)
        if self.is_reversed is None:
            self.mismatch_reason = language_tags.describe_missing(self.languages, found)
            if self.requested.source is None or self.requested.target is None:
                raise language_tags.make_mismatch_error(self.name, self.requested, self.seen_languages)
            return
        self.has_match = True
        source, target = declared.source, declared.target
        self.languages = language_tags.fill_open_sides(
            self.languages, *((target, source) if self.is_reversed else (source, target))
        )

    def add_segment(self, tag: str, text: str | None) -> None:
        self.unit_texts.setdefault(tag, text)

    def get_inline_text(self, tag: str, attributes: Mapping[str, str]) -> str:
        """`cp` stands for a character that XML cannot hold, by its number; a code may stand for white space."""
        if attributes.get("ctype", attributes.get("subType", "")).lower() in LINE_BREAK_TYPES:
            return "\n"
        instead = attributes.get("equiv-text", attributes.get("equiv", ""))
        if instead.isspace():
            return instead
        number = (
            int(attributes.get("hex", ""), 16) if tag == "cp" and _HEX_CODE.fullmatch(attributes.get("hex", "")) else 0
        )
        return chr(number) if 0 < number < 0xD800 or 0xDFFF < number < 0x110000 else ""

    def end_element(self, tag: str) -> None:
        if tag in UNIT_TAGS:
            self.items.append(self._make_pair())

    def _make_pair(self) -> Pair | BadLine:
        source, target = self.unit_texts.get("source", ""), self.unit_texts.get("target", "")
        why = self.mismatch_reason if self.is_reversed is None else ""
        if source is None or target is None:
            why = why or TOO_LONG
        elif not target.strip() or self.target_state in UNTRANSLATED_STATES:
            why = why or language_tags.UNTRANSLATED
        elif self.target_state.startswith("needs-") and not self.fuzzy:
            why = why or "fuzzy"
        elif not why:
            source, target = (target, source) if self.is_reversed else (source, target)
            return Pair(source, target, self.name, self.unit_line)
        return BadLine(why, self.name, self.unit_line, (source or target or "")[:EXCERPT_CHARS])

    def finish(self) -> None:
        if self.seen_languages and not self.has_match:
            raise language_tags.make_mismatch_error(self.name, self.requested, self.seen_languages)
