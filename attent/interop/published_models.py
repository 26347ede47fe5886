"""Well-known published translation models, by language pair: names, sizes and licences of `published_models.toml`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from attent import settings
from attent.text.language_tags import find_language, get_shortest_code


class PublishedModel(NamedTuple):
    name: str  # on the Hugging Face hub
    parameters: int
    license: str
    note: str  # which languages


def find_models(src: str | None = None, tgt: str | None = None) -> Iterator[PublishedModel]:
    """Yield the models that know both languages, in any notation, smallest families first; None: any language."""
    requested = [language for language in (src, tgt) if language is not None]
    names = {"src": get_shortest_code(src or "{src}"), "tgt": get_shortest_code(tgt or "{tgt}")}
    path = Path(__file__).with_suffix(".toml")
    for family in settings.parse_toml(path.read_bytes(), path.name)["family"]:
        known = family.get("languages", "").split()
        matches = ["/".join(find_language(language, known)) for language in requested]
        if all(matches) or not known:
            languages = ", ".join(matches) if requested else f"{len(known)} languages"
            for name, millions in family["models"].items():
                yield PublishedModel(
                    name.format(**names), millions * 10**6, family["license"], family.get("note", languages)
                )
