"""Translation memories (TMX 1.4): a unit `tu` has a variant `tuv` for each language, with its text in `seg`.

Of inline elements the content of `hi` is text; that of `bpt`, `ept`, `it`, `ph`, `ut` is markup of the program that
the text comes from, and is left out, but a line break stays one. A unit has the number of the line on which it
begins. Of several variants in the same language the first is taken, and the others are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attent.data.pairs import Bad, Languages, Pair, normal_tag
from attent.data.readers import safe_xml, tags
from attent.data.readers.files import SHOWN, TOO_LONG

LINE_BREAKS = ("lb", "pb")  # of a line and of a page, as `type`


def read(content: Iterable[bytes], name: str, asked: Languages) -> Iterator[Pair | Bad]:
    """When languages are left open, the two of the first unit count; a third one further on is an error."""
    return safe_xml.parse(content, _Memory(name, asked))


def languages(content: Iterable[bytes], name: str) -> Languages:
    """Those of the first unit."""
    return safe_xml.languages(content, _Memory(name, tags.ANY))


class _Memory(safe_xml.Document):
    root = "tmx"
    codes = frozenset({"bpt", "ept", "it", "ph", "sub", "ut"})

    def __init__(self, name: str, asked: Languages) -> None:
        super().__init__(name, asked)
        self.left_open = asked.source is None or asked.target is None
        self.first = ""  # the language of the sources, as the header says
        self.line = 0  # of the unit
        self.language = ""  # of the variant
        self.texts: dict[str, str | None] = {}  # of the unit, by language
        self.seconds: list[tuple[str, str]] = []  # languages that came before in the unit, and how these texts begin
        self.present: tuple[str, ...] | None = None  # the languages of the unit before
        self.chosen: tuple[str, str] | None = None  # and its source and target
        self.seen: set[str] = set()
        self.answered = False

    def opened(self, tag: str, attributes: Mapping[str, str], line: int) -> bool:
        if tag == "header":
            self.first = attributes.get("srclang", "")
        elif tag == "tu":
            self.line, self.texts, self.seconds = line, {}, []
        elif tag == "tuv":
            self.language = attributes.get(safe_xml.XML_LANG) or attributes.get("lang", "")
        return tag == "seg" and self.path[-1] == "tuv"

    def segment(self, tag: str, text: str | None) -> None:
        first = next((known for known in self.texts if normal_tag(known) == normal_tag(self.language)), None)
        if first is None:
            self.texts[self.language] = text
        else:
            self.seconds.append((first, (text or "")[:SHOWN]))

    def inline(self, tag: str, attributes: Mapping[str, str]) -> str:
        return "\n" if attributes.get("type") in LINE_BREAKS else ""

    def closed(self, tag: str) -> None:
        if tag == "tu":
            self.found.append(self._unit())
            chosen = self.chosen or ()
            self.found += [self._second(*one) for one in self.seconds if one[0] in chosen]

    def _second(self, language: str, text: str) -> Bad:
        return Bad(f"a second {tags.primary(language)} side", self.name, self.line, text)

    def _unit(self) -> Pair | Bad:
        present = tuple(self.texts)
        if present != self.present:  # most units have the same languages as the one before
            self.present, self.chosen = present, self._choice(present)
        if self.chosen is None:
            return self._bad(tags.missing(self.languages, present))
        source, target = self.texts[self.chosen[0]], self.texts[self.chosen[1]]
        if source is None or target is None:
            return self._bad(TOO_LONG)
        return Pair(source, target, self.name, self.line)

    def _bad(self, why: str) -> Bad:
        shown = next((text for text in self.texts.values() if text), "")
        return Bad(why, self.name, self.line, shown[:SHOWN])

    def _choice(self, present: tuple[str, ...]) -> tuple[str, str] | None:
        """Which languages of a unit are the pair. The first answer settles what was left open."""
        in_order = tuple(sorted(filter(None, present), key=lambda tag: not tags.related(self.first, tag)))
        self.seen.update(in_order[: tags.MOST_NAMED - len(self.seen)])
        chosen = tags.sides(self.languages, in_order)
        if chosen and not self.answered:
            self.answered = True
            self.languages = tags.settled(self.languages, *chosen)
        if self.left_open and any(not tags.answers(self.languages, tag) for tag in in_order):
            raise tags.error(self.name, self.languages, self.seen)
        return chosen

    def finished(self) -> None:
        if self.seen and not self.answered:
            raise tags.error(self.name, self.languages, self.seen)
