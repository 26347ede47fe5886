"""Well-known published translation models, by language pair: names, sizes and licences of `published_models.toml`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from attent import settings
from attent.storage.errors import AttentError
from attent.text.language_tags import (
    find_language,
    find_nearest_languages,
    get_language_name,
    get_primary_subtag,
    get_shortest_code,
)


class PublishedModel(NamedTuple):
    name: str  # on the Hugging Face hub
    parameters: int
    license: str
    note: str  # which languages


def find_models(src: str | None = None, tgt: str | None = None) -> Iterator[PublishedModel]:
    """Yield the models that know both languages, in any notation, smallest families first; None: any language."""
    src, tgt = (None if tag is None else tag.strip("<>") for tag in (src, tgt))  # >>deu<<, as in Marian's tags
    requested = [language for language in (src, tgt) if language is not None]
    path = Path(__file__).with_suffix(".toml")
    families = settings.parse_toml(path.read_bytes(), path.name)["family"]
    for language in requested:
        if not re.fullmatch("[a-z]{2,3}", get_primary_subtag(language)):
            codes = [code for family in families for code in family.get("languages", "").split()]
            near = get_shortest_code([*find_nearest_languages(language, codes), "en"][0])
            raise AttentError(f"`{language}` must be a language code, such as {near} for {get_language_name(near)}")
    names = {"src": get_shortest_code(src or "{src}"), "tgt": get_shortest_code(tgt or "{tgt}")}
    for family in families:
        known = family.get("languages", "").split()
        matches = ["/".join(find_language(language, known)) for language in requested]
        if all(matches) or not known:
            languages = ", ".join(matches) if requested else f"{len(known)} languages"
            for name, millions in family["models"].items():
                yield PublishedModel(
                    name.format(**names), millions * 10**6, family["license"], family.get("note", languages)
                )
