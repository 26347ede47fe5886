"""Translation memories (TMX 1.4): a unit `tu` has a variant `tuv` for each language, with its text in `seg`.

Of inline elements the content of `hi` is text; that of `bpt`, `ept`, `it`, `ph`, `ut` is markup of the program that
the text comes from, and is left out, but a line break stays one. A unit has the number of the line on which it
begins. Of several variants in the same language the first is taken, and the others are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attent.data.formats import language_tags, safe_xml
from attent.data.formats.streams import EXCERPT_CHARS, TOO_LONG
from attent.data.pairs import BadLine, LanguagePair, Pair, normalize_tag

LINE_BREAK_TYPES = ("lb", "pb")  # of a line and of a page, as `type`


def read_pairs(content: Iterable[bytes], name: str, requested: LanguagePair) -> Iterator[Pair | BadLine]:
    """When languages are left open, the two of the first unit count; a third one further on is an error."""
    return safe_xml.parse_xml(content, _TmxReader(name, requested))


def read_languages(content: Iterable[bytes], name: str) -> LanguagePair:
    """Those of the first unit."""
    return safe_xml.read_languages(content, _TmxReader(name, language_tags.ANY_LANGUAGES))


class _TmxReader(safe_xml.XmlHandler):
    root_tag = "tmx"
    native_code_tags = frozenset({"bpt", "ept", "it", "ph", "sub", "ut"})

    def __init__(self, name: str, requested: LanguagePair) -> None:
        super().__init__(name, requested)
        self.has_open_side = requested.source is None or requested.target is None
        self.header_language = ""  # the language of the sources, as the header says
        self.unit_line = 0  # of the unit
        self.variant_language = ""  # of the variant
        self.unit_texts: dict[str, str | None] = {}  # of the unit, by language
        self.duplicates: list[tuple[str, str]] = []  # languages that came before in the unit, and how these texts begin
        self.unit_languages: tuple[str, ...] | None = None  # the languages of the unit before
        self.chosen_sides: tuple[str, str] | None = None  # and its source and target
        self.seen_languages: set[str] = set()
        self.has_match = False

    def start_element(self, tag: str, attributes: Mapping[str, str], line: int) -> bool:
        if tag == "header":
            self.header_language = attributes.get("srclang", "")
        elif tag == "tu":
            self.unit_line, self.unit_texts, self.duplicates = line, {}, []
        elif tag == "tuv":
            self.variant_language = attributes.get(safe_xml.XML_LANG) or attributes.get("lang", "")
        return tag == "seg" and self.open_tags[-1] == "tuv"

    def add_segment(self, tag: str, text: str | None) -> None:
        first = next(
            (known for known in self.unit_texts if normalize_tag(known) == normalize_tag(self.variant_language)), None
        )
        if first is None:
            self.unit_texts[self.variant_language] = text
        else:
            self.duplicates.append((first, (text or "")[:EXCERPT_CHARS]))

    def get_inline_text(self, tag: str, attributes: Mapping[str, str]) -> str:
        return "\n" if attributes.get("type") in LINE_BREAK_TYPES else ""

    def end_element(self, tag: str) -> None:
        if tag == "tu":
            self.items.append(self._make_pair())
            chosen = self.chosen_sides or ()
            self.items += [self._make_duplicate(*one) for one in self.duplicates if one[0] in chosen]

    def _make_duplicate(self, language: str, text: str) -> BadLine:
        return BadLine(f"a second {language_tags.get_primary_subtag(language)} side", self.name, self.unit_line, text)

    def _make_pair(self) -> Pair | BadLine:
        present = tuple(self.unit_texts)
        if present != self.unit_languages:  # most units have the same languages as the one before
            self.unit_languages, self.chosen_sides = present, self._choose_sides(present)
        if self.chosen_sides is None:
            return self._make_bad_line(language_tags.describe_missing(self.languages, present))
        source, target = self.unit_texts[self.chosen_sides[0]], self.unit_texts[self.chosen_sides[1]]
        if source is None or target is None:
            return self._make_bad_line(TOO_LONG)
        return Pair(source, target, self.name, self.unit_line)

    def _make_bad_line(self, reason: str) -> BadLine:
        shown = next((text for text in self.unit_texts.values() if text), "")
        return BadLine(reason, self.name, self.unit_line, shown[:EXCERPT_CHARS])

    def _choose_sides(self, present: tuple[str, ...]) -> tuple[str, str] | None:
        """Which languages of a unit are the pair. The first answer settles what was left open."""
        in_order = tuple(
            sorted(filter(None, present), key=lambda tag: not language_tags.is_same_language(self.header_language, tag))
        )
        self.seen_languages.update(in_order[: language_tags.MAX_LISTED - len(self.seen_languages)])
        chosen = language_tags.choose_sides(self.languages, in_order)
        if chosen and not self.has_match:
            self.has_match = True
            self.languages = language_tags.fill_open_sides(self.languages, *chosen)
        if self.has_open_side and any(not language_tags.is_requested(self.languages, tag) for tag in in_order):
            raise language_tags.make_mismatch_error(self.name, self.languages, self.seen_languages)
        return chosen

    def finish(self) -> None:
        if self.seen_languages and not self.has_match:
            raise language_tags.make_mismatch_error(self.name, self.languages, self.seen_languages)
