"""The API v2 of DeepL: texts and glossaries. Glossaries are kept in memory, for the client that created them."""

import csv
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from pydantic import Field, create_model
from starlette.responses import Response

from attent.decoding.glossary import Glossary
from attent.serving.endpoints import BODY_TYPES, Body, Call, Endpoint
from attent.serving.limits import ApiError
from attent.serving.messages import AUTO, TranslateRequest
from attent.text.language_tags import get_language_name, is_same_language

NO_LIMIT = 10**12  # characters, as DeepL reports for accounts without a limit
MAX_GLOSSARIES = 100  # of a client
MAX_GLOSSARY_TERMS = 2_000
VARIANTS = {"EN": ("EN-GB", "EN-US"), "PT": ("PT-BR", "PT-PT")}  # DeepL's client refuses EN and PT as targets


class DeepLTranslateBody(Body):
    text: str | list[str] = Field(description="one text or several; lines are translated one by one")
    source_lang: str | None = Field(None, max_length=40)
    target_lang: str = Field(max_length=40)
    glossary_id: str | None = Field(None, description="of a glossary for these languages; needs `source_lang`")
    tag_handling: str | None = Field(None, description="html, or none for plain text")


async def translate(call: Call[DeepLTranslateBody]) -> Any:
    body, terms = call.body, {}
    if body.tag_handling not in (None, "", "html"):
        raise ApiError(400, "`tag_handling` must be html, or missing for plain text; others are not supported yet")
    if body.glossary_id:
        info, terms = get_glossary(call, body.glossary_id)
        languages = ((body.source_lang or "", info["source_lang"]), (body.target_lang, info["target_lang"]))
        if not all(is_same_language(*pair) for pair in languages):
            raise ApiError(400, "`source_lang` and `target_lang` must be the languages of the glossary")
    texts = (body.text,) if isinstance(body.text, str) else tuple(body.text)
    request = TranslateRequest(
        texts=texts,
        source=body.source_lang or AUTO,
        target=body.target_lang,
        glossary=tuple(terms.items()),
        is_html=body.tag_handling == "html",
    )
    translations = zip(await call.gateway.translate(request, call.client), texts, strict=True)
    return {
        "translations": [
            {"detected_source_language": each.source.upper(), "text": each.text, "billed_characters": len(text)}
            for each, text in translations
        ]
    }


class LanguagesQuery(Body):
    type: Literal["source", "target"] = "source"


async def list_languages(call: Call[LanguagesQuery]) -> Any:
    tags = dict.fromkeys(getattr(each, call.body.type).upper() for each in call.gateway.backend.info.directions)
    if call.body.type == "target":
        tags = dict.fromkeys(variant for tag in tags for variant in VARIANTS.get(tag, (tag,)))
    return [{"language": tag, "name": get_language_name(tag), "supports_formality": False} for tag in tags]


async def show_usage(call: Call[None]) -> Any:
    return {"character_count": call.gateway.used_characters.get(call.client, 0), "character_limit": NO_LIMIT}


class GlossaryBody(Body):
    name: str = Field(min_length=1, max_length=200)
    source_lang: str = Field(min_length=1, max_length=40)
    target_lang: str = Field(min_length=1, max_length=40)
    entries: str = Field(description="a term and its translation in each line")
    entries_format: Literal["tsv", "csv"] = "tsv"


async def create_glossary(call: Call[GlossaryBody]) -> Any:
    body, store = call.body, call.gateway.glossaries
    options: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if body.entries_format == "tsv" else {}
    try:
        rows = [row[:2] for row in csv.reader(body.entries.splitlines(), **options) if row]
        terms = {term.strip(): translation.strip() for term, translation in rows}
        Glossary.from_terms(terms)
    except (ValueError, csv.Error):
        raise ApiError(400, "`entries` must have a term and its translation in each line") from None
    if not 0 < len(terms) <= MAX_GLOSSARY_TERMS or len(store.list_items(call.client)) >= MAX_GLOSSARIES:
        problem = f"there may be {MAX_GLOSSARIES} glossaries with 1 to {MAX_GLOSSARY_TERMS} terms each"
        raise ApiError(413, f"{problem}; delete one, or send other terms")
    info = body.model_dump(include={"name", "source_lang", "target_lang"})
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    info |= {"ready": True, "creation_time": time, "entry_count": len(terms)}
    return {"glossary_id": store.add(call.client, (info, terms), len(body.entries.encode())), **info}


def get_glossary(call: Call[Any], name: str | None = None) -> Any:
    """Return the description and the terms of a glossary of the client; by default, that of the path."""
    glossary = call.gateway.glossaries.get(call.client, name or call.request.path_params["glossary_id"])
    if glossary is None:
        raise ApiError(404, "this glossary does not exist; the server forgets glossaries when it stops")
    return glossary


async def list_glossaries(call: Call[None]) -> Any:
    items = call.gateway.glossaries.list_items(call.client).items()
    return {"glossaries": [{"glossary_id": name, **info} for name, (info, _) in items]}


async def show_glossary(call: Call[None]) -> Any:
    return {"glossary_id": call.request.path_params["glossary_id"], **get_glossary(call)[0]}


async def show_entries(call: Call[None]) -> Response:
    lines = (f"{term}\t{translation}" for term, translation in get_glossary(call)[1].items())
    return Response("\n".join(lines), media_type="text/tab-separated-values")


async def delete_glossary(call: Call[None]) -> Response:
    get_glossary(call)  # 404 for those of other clients
    call.gateway.glossaries.remove(call.request.path_params["glossary_id"])
    return Response(status_code=204)


async def list_glossary_pairs(call: Call[None]) -> Any:
    pairs = call.gateway.backend.info.language_pairs
    return {"supported_languages": [{"source_lang": source, "target_lang": target} for source, target in pairs]}


DeepLLanguage: Any = create_model("DeepLLanguage", language=str, name=str, supports_formality=bool)
DeepLTranslation: Any = create_model("DeepLTranslation", detected_source_language=str, text=str, billed_characters=int)
GlossaryInfo: Any = create_model("GlossaryInfo", glossary_id=str, name=str, ready=bool, source_lang=str,
                                 target_lang=str, creation_time=str, entry_count=int)  # fmt: skip
endpoint: Any = partial(
    Endpoint, tag="DeepL", content_types=BODY_TYPES, format_error=lambda text, status: {"message": text}
)
ENDPOINTS: tuple[Endpoint, ...] = (
    endpoint("POST", "/v2/translate", translate, "Translate texts.", DeepLTranslateBody,
             create_model("DeepLResult", translations=list[DeepLTranslation])),
    endpoint("GET", "/v2/languages", list_languages, "List source or target languages.", LanguagesQuery,
             list[DeepLLanguage]),
    endpoint("GET", "/v2/usage", show_usage, "Count the translated characters.", None, dict[str, int]),
    endpoint("GET", "/v2/glossary-language-pairs", list_glossary_pairs, "List language pairs of glossaries.", None,
             create_model("GlossaryPairs", supported_languages=list[dict[str, str]])),
    endpoint("POST", "/v2/glossaries", create_glossary, "Create a glossary.", GlossaryBody, GlossaryInfo, status=201),
    endpoint("GET", "/v2/glossaries", list_glossaries, "List glossaries.", None,
             create_model("GlossaryList", glossaries=list[GlossaryInfo])),
    endpoint("GET", "/v2/glossaries/{glossary_id}", show_glossary, "Describe a glossary.", None, GlossaryInfo),
    endpoint("GET", "/v2/glossaries/{glossary_id}/entries", show_entries, "The terms of a glossary.",
             media_type="text/tab-separated-values"),
    endpoint("DELETE", "/v2/glossaries/{glossary_id}", delete_glossary, "Delete a glossary.", status=204),
)  # fmt: skip
