"""TBX term bases, version 2 (`martif`) and 3 (`tbx`): the terms of each concept by language.

Deprecated and superseded terms are left out; preferred ones come first.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from attent.data.formats import tmx, xml
from attent.data.formats.xml import XmlElement
from attent.data.pairs import CorpusError

ROOTS = ("tbx", "martif")
SCHEMA = replace(tmx.SCHEMA, root=ROOTS[0], units=frozenset({"conceptEntry", "termEntry"}))
_STATUS = re.compile("(preferred|deprecated|superseded)Term")


def is_tbx(head: str) -> bool:
    return any(replace(SCHEMA, root=root).matches_head(head) for root in ROOTS)


def read_concepts(content: bytes, name: str) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Yield the line and the (language, term) pairs of each concept."""
    root = next((root for root in ROOTS if re.search(rf"<(?:[\w.-]+:)?{root}[\s>/]".encode(), content)), ROOTS[0])
    for unit in xml.parse_xml([content], name, replace(SCHEMA, root=root)):
        if unit.is_truncated:
            raise CorpusError(f"{name}, line {unit.line:,}: this concept is too large; split it")
        sections = [
            (section.attributes.get(xml.XML_LANG, ""), *_list_terms(section))
            for section in unit.find_children("langSec", "langSet")
        ]
        yield unit.line, [(language, term) for language, *terms in sections for term in terms]


def _list_terms(section: XmlElement) -> list[str]:
    """Return the terms of a language, the preferred ones first."""
    groups = section.find_children("termSec", "tig", "ntig", "termGrp")
    terms = [" ".join(term.get_text().split()) for term in section.find_children("term")]
    statuses = "".join(child.get_text() for child in section.children if isinstance(child, XmlElement))
    status = _STATUS.search(statuses) if terms else None
    if status and status[1] != "preferred":
        return []
    nested = [(group, _list_terms(group)) for group in groups]
    nested.sort(key=lambda item: "preferredTerm" not in item[0].get_text())
    return [term for term in (*terms, *(term for _, group_terms in nested for term in group_terms)) if term]
