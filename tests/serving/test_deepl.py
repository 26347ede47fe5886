"""The API of DeepL: its Python client, forms, glossaries of several clients, keys."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import deepl as deepl_client
import pytest

from attent.serving import deepl
from attent.serving.gateway import ServerOptions
from attent.serving.limits import Limits
from tests.serving.toy import Client
from tests.serving.translation_server import start_translation_server

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    options = ServerOptions(keys=frozenset(["first", "second"]), limits=Limits(max_characters=200, max_texts=4))
    with start_translation_server(tmp_path_factory.mktemp("models"), options) as client:
        yield client


@pytest.fixture
def translator(client: Client) -> deepl_client.Translator:
    return deepl_client.Translator("first", server_url=client.url)


def test_python_client_translates(translator: deepl_client.Translator) -> None:
    result = translator.translate_text("one\ntwo", source_lang="EN", target_lang="DE")
    assert isinstance(result, deepl_client.TextResult)
    assert (result.text, result.detected_source_lang, result.billed_characters) == ("eins\nzwei", "EN", 7)
    results = translator.translate_text(["three", "four"], target_lang="DE", formality="less", context="numbers")
    assert isinstance(results, list)
    assert [each.text for each in results] == ["drei", "vier"]


def test_python_client_lists_languages_and_usage(translator: deepl_client.Translator) -> None:
    assert [(each.code, each.name) for each in translator.get_source_languages()] == [("EN", "English")]
    (target,) = translator.get_target_languages()
    assert (target.code, target.name, target.supports_formality) == ("DE", "German", False)
    (pair,) = translator.get_glossary_languages()
    assert (pair.source_lang, pair.target_lang) == ("en", "de")
    before = translator.get_usage().character.count or 0
    translator.translate_text(["ten", "ten"], target_lang="DE")
    usage = translator.get_usage()
    assert usage.character.count == before + 6
    assert usage.character.valid
    assert not usage.any_limit_reached


def test_python_client_with_glossaries(translator: deepl_client.Translator, client: Client) -> None:
    glossary = translator.create_glossary("numbers", "EN", "DE", {"one": "sieben", "two": "acht"})
    assert (glossary.name, glossary.ready, glossary.source_lang, glossary.entry_count) == ("numbers", True, "EN", 2)
    assert [each.glossary_id for each in translator.list_glossaries()] == [glossary.glossary_id]
    assert translator.get_glossary(glossary.glossary_id).creation_time == glossary.creation_time
    assert translator.get_glossary_entries(glossary) == {"one": "sieben", "two": "acht"}
    result = translator.translate_text_with_glossary("one", glossary)
    assert isinstance(result, deepl_client.TextResult)
    assert "sieben" in result.text

    other = deepl_client.Translator("second", server_url=client.url)
    assert other.list_glossaries() == []
    with pytest.raises(deepl_client.GlossaryNotFoundException):
        other.get_glossary_entries(glossary)
    with pytest.raises(deepl_client.GlossaryNotFoundException):
        other.delete_glossary(glossary)
    with pytest.raises(deepl_client.DeepLException, match="languages of the glossary"):
        translator.translate_text("one", source_lang="DE", target_lang="DE", glossary=glossary.glossary_id)

    translator.delete_glossary(glossary)
    assert translator.list_glossaries() == []
    with pytest.raises(deepl_client.GlossaryNotFoundException):
        translator.get_glossary(glossary.glossary_id)


def test_csv_glossaries(translator: deepl_client.Translator) -> None:
    glossary = translator.create_glossary_from_csv("numbers", "EN", "DE", 'one,"sieben"\n\n"a, b",acht,EN,DE\n')
    assert translator.get_glossary_entries(glossary) == {"one": "sieben", "a, b": "acht"}
    translator.delete_glossary(glossary)


def test_glossaries_are_bounded(translator: deepl_client.Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepl, "MAX_GLOSSARIES", 1)
    monkeypatch.setattr(deepl, "MAX_GLOSSARY_TERMS", 2)
    with pytest.raises(deepl_client.DeepLException, match="413"):
        translator.create_glossary("numbers", "EN", "DE", {"a": "1", "b": "2", "c": "3"})
    glossary = translator.create_glossary("numbers", "EN", "DE", {"a": "1"})
    with pytest.raises(deepl_client.DeepLException, match="413"):
        translator.create_glossary("numbers", "EN", "DE", {"a": "1"})
    translator.delete_glossary(glossary)


def test_python_client_reads_errors(translator: deepl_client.Translator, client: Client) -> None:
    with pytest.raises(deepl_client.AuthorizationException, match="not valid"):
        deepl_client.Translator("wrong", server_url=client.url).get_usage()
    with pytest.raises(deepl_client.DeepLException, match="not supported yet"):
        translator.translate_text("<b>one</b>", target_lang="DE", tag_handling="xml")
    html = translator.translate_text("<b>one</b>", target_lang="DE", tag_handling="html")
    assert str(html) == "<b>eins</b>"
    with pytest.raises(deepl_client.DeepLException, match="`target` must be a language"):
        translator.translate_text("one", target_lang="FR")
    with pytest.raises(deepl_client.DeepLException, match="413"):
        translator.translate_text(["one"] * 5, target_lang="DE")
    with pytest.raises(deepl_client.GlossaryNotFoundException):
        translator.get_glossary_entries("guess")


def test_forms_and_curl(client: Client) -> None:
    body = urlencode([("text", "one"), ("text", "two"), ("target_lang", "DE"), ("auth_key", "first")]).encode()
    texts = [each["text"] for each in client.send("POST", "/v2/translate", body, FORM).json["translations"]]
    assert texts == ["eins", "zwei"]
    headers = {"Authorization": "DeepL-Auth-Key second"}
    reply = client.post({"text": ["one"], "target_lang": "de-AT"}, headers, path="/v2/translate")
    assert reply.json["translations"][0]["text"] == "eins"
    assert client.get("/v2/languages?type=target", headers=headers).json[0]["language"] == "DE"
    reply = client.get("/v2/languages?type=all", headers=headers)
    assert (reply.status, list(reply.json)) == (400, ["message"])
    assert client.get("/v2/usage").status == 403
    fields = {"name": "x", "source_lang": "en", "target_lang": "de", "entries_format": "tsv"}
    for entries in ("one", "one\t", "one\tx||y", "\t", '"'):
        reply = client.post(fields | {"entries": entries}, headers, path="/v2/glossaries")
        assert (reply.status, list(reply.json)) == (400, ["message"])
    assert client.post(fields | {"entries": ""}, headers, path="/v2/glossaries").status == 413
