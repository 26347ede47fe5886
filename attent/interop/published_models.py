"""Well-known published translation models, by language pair: names, sizes and licences of `published_models.toml`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from attent import settings
from attent.text.language_tags import find_language, get_primary_subtag


class PublishedModel(NamedTuple):
    name: str  # on the Hugging Face hub
    parameters: int
    license: str
    note: str  # which languages


def find_models(src: str | None = None, tgt: str | None = None) -> Iterator[PublishedModel]:
    """Yield the models that know both languages, in any notation, smallest families first; None: any language."""
    path = Path(__file__).with_suffix(".toml")
    for family in settings.parse_toml(path.read_bytes(), path.name)["family"]:
        known, note = family.get("languages", "").split(), family.get("note", "")
        requested = [language for language in (src, tgt) if language is not None]
        matches = ["/".join(find_language(language, known)) for language in requested]
        if known and not all(matches):
            continue
        pair = {key: get_primary_subtag(tag) if tag else f"{{{key}}}" for key, tag in (("src", src), ("tgt", tgt))}
        for name, millions in family["models"].items():
            note = note or (", ".join(matches) if requested else f"{len(known)} languages")
            yield PublishedModel(name.format(**pair), millions * 10**6, family["license"], note)
