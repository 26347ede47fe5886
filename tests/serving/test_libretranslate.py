"""The API of LibreTranslate: its Python client, forms, Weblate's requests, files, suggestions, keys."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tempfile
import urllib.error
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import polib
import pytest
from libretranslatepy import LibreTranslateAPI

from attent.serving import gateway, libretranslate
from attent.serving.backend import LocalBackend
from attent.serving.endpoints import UploadedFile
from attent.serving.gateway import ITEM_BYTES, Gateway, ItemStore, ServerOptions
from attent.serving.limits import ApiError, Limits
from tests.data.document_cases import pack_docx
from tests.serving.toy import Client, Reply
from tests.serving.translation_server import start_translation_server

KEY = "a key"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    options = ServerOptions(
        limits=Limits(max_characters=200, max_texts=4, max_file_bytes=3_000), suggestions=folder / "suggestions.jsonl"
    )
    with start_translation_server(folder, options) as client:
        yield client


@pytest.fixture(scope="module")
def keyed(folder: Path) -> Iterator[Client]:
    with start_translation_server(folder, ServerOptions(keys=frozenset([KEY, "other"]))) as client:
        yield client


def send_form(client: Client, path: str, method: str = "POST", **fields: Any) -> Reply:
    return client.send(method, path, urlencode(fields, doseq=True).encode(), FORM)


def send_multipart(client: Client, path: str, fields: dict[str, str | tuple[str, bytes]], **headers: str) -> Reply:
    parts = []
    for name, value in fields.items():
        file_name, content = (None, value.encode()) if isinstance(value, str) else value
        head = f'form-data; name="{name}"' + ("" if file_name is None else f'; filename="{file_name}"')
        parts.append(f"--xyz\r\nContent-Disposition: {head}\r\n\r\n".encode() + content + b"\r\n")
    body = b"".join(parts) + b"--xyz--\r\n"
    return client.send("POST", path, body, {"Content-Type": "multipart/form-data; boundary=xyz"} | headers)


def test_python_client(client: Client) -> None:
    api = LibreTranslateAPI(client.url)
    assert api.translate("seven", "en", "de") == "sieben"
    assert api.translate("seven\n\n  eight\nten", "en", "de") == "sieben\n\n  acht\nzehn"
    assert api.languages() == [
        {"code": "de", "name": "German", "targets": []},
        {"code": "en", "name": "English", "targets": ["de"]},
    ]
    best, *_ = api.detect("The children are singing in the garden of the old house.")
    assert best["language"] == "en"
    assert 50 < best["confidence"] <= 100
    with pytest.raises(urllib.error.HTTPError) as error:
        api.translate("seven", "en", "tlh")
    assert error.value.code == 400
    assert "`target`" in json.load(error.value)["error"]


def test_python_client_with_keys(keyed: Client) -> None:
    assert LibreTranslateAPI(keyed.url, KEY).translate("seven", "en", "de") == "sieben"
    assert len(LibreTranslateAPI(keyed.url, KEY).languages()) == 2
    assert len(LibreTranslateAPI(keyed.url).languages()) == 2  # Weblate sends no key here
    assert LibreTranslateAPI(keyed.url, "other").detect("seven")
    for key in (None, "wrong", ""):
        with pytest.raises(urllib.error.HTTPError) as error:
            LibreTranslateAPI(keyed.url, key).translate("seven", "en", "de")
        assert error.value.code == 403
        assert "API key" in json.load(error.value)["error"]


@pytest.mark.parametrize("send", [send_form, lambda client, path, **fields: send_multipart(client, path, fields)])
def test_forms(client: Client, send: Any) -> None:
    reply = send(client, "/translate", q="one\r\ntwo", source="en", target="de", format="text", alternatives="2")
    assert reply.json["translatedText"] == "eins\nzwei"
    assert len(reply.json["alternatives"]) == 2
    assert send(client, "/translate", q="one", source="en", target="de", alternatives="many").error.startswith(
        "`alternatives`"
    )
    assert send(client, "/detect", q="one").status == 200


def test_weblate_sends_a_list(client: Client) -> None:
    body = {"api_key": "", "q": ["one", "two\nthree"], "source": "en", "target": "de"}
    assert client.post(body, path="/translate").json == {"translatedText": ["eins", "zwei\ndrei"]}
    assert client.post(body | {"q": []}, path="/translate").json == {"translatedText": []}
    assert client.post(body | {"q": ""}, path="/translate").json == {"translatedText": ""}


def test_html_keeps_its_tags(client: Client) -> None:
    body = {"source": "en", "target": "de", "format": "html"}
    page = "<p class=x>one <b>two</b></p>\r\n<code>one</code> <img alt='four'>"
    result = client.post(body | {"q": page, "alternatives": 2}, path="/translate").json
    translated, alternatives = result["translatedText"], result["alternatives"]
    assert alternatives == []
    assert translated.startswith("<p class=x>")
    assert translated.endswith("</p>\r\n<code>one</code> <img alt='vier'>")
    assert translated.count("<b>") == translated.count("</b>") == 1
    batch = client.post(body | {"q": ["<i>one</i>", "5 < 6", ""], "source": "auto"}, path="/translate").json
    assert batch["translatedText"] == ["<i>eins</i>", "5 < 6", ""]
    charset = '<meta charset="latin1"><p>five</p>\u65e5'
    assert "<p>f\u00fcnf</p>" in client.post(body | {"q": charset}, path="/translate").json["translatedText"]
    assert send_form(client, "/translate", q="<b>two</b>", **body).json["translatedText"] == "<b>zwei</b>"


def test_page_is_translated_as_a_file(client: Client) -> None:
    fields = {"file": ("page.html", b'<html lang="en"><b>seven</b>'), "source": "en", "target": "de"}
    address = send_multipart(client, "/translate_file", fields).json["translatedFileUrl"]
    assert client.get(urlsplit(address).path).body == b'<html lang="de"><b>sieben</b>'
    assert ".html" in client.get("/frontend/settings").json["supportedFilesFormat"]


def test_alternatives_are_distinct(client: Client) -> None:
    body = {"q": "four", "source": "en", "target": "de", "alternatives": 6}
    result = client.post(body, path="/translate").json
    assert result["translatedText"] == "vier"
    assert 3 <= len({"vier", *result["alternatives"]}) == 1 + len(result["alternatives"]) <= 7
    batch = client.post(body | {"q": ["four", "six"]}, path="/translate").json
    assert batch["alternatives"][0] == result["alternatives"]
    assert len(batch["alternatives"]) == 2
    assert "alternatives" not in client.post(body | {"alternatives": 0}, path="/translate").json
    assert client.post(body | {"alternatives": "3"}, path="/translate").status == 400  # JSON has numbers
    assert client.post(body | {"alternatives": 1_000}, path="/translate").status == 400


def test_detected_language(client: Client) -> None:
    result = client.post({"q": "five", "source": "auto", "target": "de"}, path="/translate").json
    assert result["translatedText"] == "fünf"
    assert result["detectedLanguage"]["language"] == "en"
    assert 0 <= result["detectedLanguage"]["confidence"] <= 100
    batch = client.post({"q": ["five", "six"], "source": "auto", "target": "de"}, path="/translate").json
    assert [each["language"] for each in batch["detectedLanguage"]] == ["en", "en"]
    detections = client.post({"q": ["five", "six"]}, path="/detect").json
    assert len(detections) == 2
    assert all(set(each) == {"confidence", "language"} for each in detections[0])


def test_text_in_the_target_language_is_returned_unchanged(client: Client) -> None:
    german = "  Ein Hund läuft durch den Garten.\n"
    body = {"q": german, "source": "auto", "target": "de"}
    result = client.post(body, path="/translate").json
    assert result["translatedText"] == german
    assert result["detectedLanguage"]["language"] == "de"
    assert result["detectedLanguage"]["confidence"] > 50
    assert client.post(body | {"source": "de-DE"}, path="/translate").json == {"translatedText": german}
    assert client.post(body | {"q": "five", "source": "en", "target": "en"}, path="/translate").json == {
        "translatedText": "five"
    }
    assert client.post(body | {"source": "fr", "target": "fr"}, path="/translate").status == 400
    french = client.post(body | {"q": "Le chien dort dans le jardin."}, path="/translate").json["detectedLanguage"]
    assert (french["language"], french["confidence"] < 5) == ("en", True)  # the language that it was translated from


def test_wrong_requests(client: Client) -> None:
    body = {"q": "one", "source": "en", "target": "de"}
    assert client.post(body | {"format": "pdf"}, path="/translate").status == 400
    assert client.post({"q": "one", "source": "en"}, path="/translate").error == "`target`: Field required"
    assert client.post(body | {"unknown": [1]}, path="/translate").status == 200
    assert client.post(body | {"q": "x" * 201}, path="/translate").status == 413
    assert client.post(body | {"q": ["x"] * 5}, path="/translate").status == 413
    assert client.post({"q": ["x"] * 5}, path="/detect").status == 413
    assert client.send("POST", "/translate", b"q=one", {"Content-Type": "text/plain"}).status == 415
    reply = client.get("/translate", method="DELETE")
    assert reply.status == 405
    assert set(reply.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


# --- files -----------------------------------------------------------------------------------------------------------


def translate_file(client: Client, name: str, content: bytes, **fields: str) -> Reply:
    """Upload a file, and return the download."""
    reply = send_multipart(
        client, "/translate_file", {"source": "en", "target": "de", "file": (name, content)} | fields
    )
    assert reply.status == 200, reply.body
    url = reply.json["translatedFileUrl"]
    assert url.startswith(f"{client.url.replace('localhost', '127.0.0.1')}/download_file/")
    return client.get(urlsplit(url).path)


def test_text_file(client: Client) -> None:
    reply = translate_file(client, "Zahlen 1.txt", b"one\n\n  two\n")
    assert reply.body.decode() == "eins\n\n  zwei\n"
    assert reply.headers["content-disposition"] == f"attachment; filename*=UTF-8''{quote('Zahlen 1_de.txt')}"
    assert reply.headers["content-type"] == "application/octet-stream"
    assert translate_file(client, "a.txt", b"one\r\n two \r\n\nthree").body.decode() == "eins\r\n zwei \r\n\ndrei"
    german = "<b>Ein Hund läuft durch den Garten.</b>\r\n".encode()
    assert translate_file(client, "a.txt", german, source="auto").body == german


def test_size_of_a_file() -> None:
    call: Any = SimpleNamespace(
        body=SimpleNamespace(file=UploadedFile("a.txt", b"one"), source="en", target="de"),
        gateway=SimpleNamespace(limits=Limits(max_file_bytes=2)),
    )
    with pytest.raises(ApiError, match="at most 2 bytes") as error:
        asyncio.run(libretranslate.translate_file(call))
    assert error.value.status == 413


def test_language_of_a_document_is_detected_without_its_markup(client: Client) -> None:
    tags = b"<seg the of and in to is that with for this from have not>" * 40
    page = tags + "Ein Hund läuft durch den Garten.".encode()
    assert translate_file(client, "a.md", page, source="auto").body == page


def test_language_of_a_word_document_is_that_of_its_text(client: Client) -> None:
    text = "<w:p><w:r><w:t>Ein Hund läuft durch den Garten.</w:t></w:r></w:p>"
    document = pack_docx(f'<w:document xmlns:w="http://x.example/w"><w:body>{text}</w:body></w:document>')
    assert translate_file(client, "a.docx", document, source="auto").body == document


def test_po_file(client: Client, tmp_path: Path) -> None:
    catalog = polib.POFile()
    catalog.metadata = {"Content-Type": "text/plain; charset=utf-8"}
    catalog.extend([polib.POEntry(msgid="one"), polib.POEntry(msgid="two", msgstr="zwo")])
    catalog.append(polib.POEntry(msgid="a", msgstr="Ein Hund läuft durch den Garten. " * 5))
    reply = translate_file(client, "../../messages.po", str(catalog).encode(), source="auto")
    (tmp_path / "out.po").write_bytes(reply.body)
    assert [entry.msgstr for entry in polib.pofile(str(tmp_path / "out.po"))][:2] == ["eins", "zwo"]
    assert reply.headers["content-disposition"].endswith("messages_de.po")


def test_markdown_file(client: Client) -> None:
    reply = translate_file(client, "notes.md", b"# one\n\n- two\n- three\n\n```\nfour\n```\n")
    assert reply.body.decode() == "# eins\n\n- zwei\n- drei\n\n```\nfour\n```\n"


def test_wrong_files(client: Client, keyed: Client) -> None:
    fields = {"source": "en", "target": "de"}
    assert send_multipart(client, "/translate_file", fields | {"file": ("a.exe", b"MZ")}).status == 400
    assert send_multipart(client, "/translate_file", fields | {"file": ("", b"one")}).status == 400
    assert send_multipart(client, "/translate_file", fields | {"file": ("a.txt", b"\xff")}).status == 400
    assert send_multipart(client, "/translate_file", fields | {"file": "one"}).error.startswith("`file`")
    assert send_multipart(client, "/translate_file", fields).error == "`file`: Field required"
    assert send_multipart(client, "/translate_file", fields | {"file": ("a.txt", b"x" * 3_001)}).status == 413
    assert client.post(fields, path="/translate_file").status == 415
    assert client.get("/download_file/../v1/info").status == 404
    assert client.get("/download_file/guess.txt").status == 404
    upload = fields | {"file": ("a.txt", b"one")}
    assert send_multipart(keyed, "/translate_file", upload).status == 403
    reply = send_multipart(keyed, "/translate_file", upload | {"api_key": KEY})
    assert keyed.get(urlsplit(reply.json["translatedFileUrl"]).path).body == b"eins"  # the name is the secret


def test_address_behind_a_proxy(folder: Path) -> None:
    options = ServerOptions(trust_proxy=True, hosts=("translate.example",))
    headers = {"Host": "translate.example", "X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1"}
    with start_translation_server(folder, options) as client:
        fields = {"source": "en", "target": "de", "file": ("a.txt", b"one")}
        url = send_multipart(client, "/translate_file", fields, **headers).json["translatedFileUrl"]
    assert url.startswith("https://translate.example/download_file/")


def test_stored_items_are_bounded() -> None:
    store = ItemStore(max_bytes=2 * ITEM_BYTES + 10)
    first, second = store.add("a", 1, 5), store.add("b", 2, 5)
    assert (store.list_items("a"), store.list_items("b")) == ({first: 1}, {second: 2})
    assert (store.get("a", first), store.get("b", first), store.get("", "x")) == (1, None, None)
    third = store.add("b", 3, 5)
    assert (store.list_items("a"), store.list_items("b")) == ({}, {second: 2, third: 3})
    store.remove(second)
    fourth = store.add("a", 4, 5)
    assert (store.get("a", fourth), store.get("b", third)) == (4, 3)
    assert store.get("a", store.add("a", 5, 10**6)) is None


def test_a_server_stores_64_mib_of_files_and_of_glossaries() -> None:
    server = Gateway(LocalBackend(object()), ServerOptions())
    for store in (server.files, server.glossaries):
        names = [store.add("a", number, 2**20 - ITEM_BYTES) for number in range(65)]
        assert list(store.list_items("a")) == names[1:]


def test_stored_items_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = ItemStore(10**6, max_seconds=60), 1_000.0
    monkeypatch.setattr(gateway.time, "monotonic", lambda: now)
    name = store.add("", 1, 1)
    now += 59
    assert store.get("", name) == 1
    now += 2
    assert store.get("", name) is None
    other = store.add("", 2, 1)
    assert store.list_items("") == {other: 2}


# --- settings and suggestions ----------------------------------------------------------------------------------------


def test_frontend_settings(client: Client, keyed: Client) -> None:
    settings = client.get("/frontend/settings").json
    assert settings["charLimit"] == 200
    assert settings["suggestions"]
    assert not settings["keyRequired"]
    assert {".txt", ".po", ".md"} <= set(settings["supportedFilesFormat"])
    assert settings["language"]["source"]["code"] == "auto"
    assert settings["language"]["target"] == {"code": "de", "name": "German"}
    settings = keyed.get("/frontend/settings").json
    assert settings["apiKeys"]
    assert settings["keyRequired"]
    assert not settings["suggestions"]


def test_suggestions(client: Client, keyed: Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"q": "one\ntwo", "s": "ein „Stück“", "source": "en", "target": "de"}
    assert send_form(client, "/suggest", **fields).json == {"success": True}
    assert client.post(fields | {"api_key": "secret"}, path="/suggest").json == {"success": True}
    lines = (folder / "suggestions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [{name: json.loads(line)[name] for name in fields} for line in lines] == [fields, fields]
    assert "secret" not in "".join(lines)
    assert client.post(fields | {"s": ""}, path="/suggest").status == 400
    assert client.post(fields | {"q": "x" * 10_001}, path="/suggest").status == 400
    assert keyed.post(fields | {"api_key": KEY}, path="/suggest").status == 403
    monkeypatch.setattr(libretranslate, "MAX_SUGGESTIONS_BYTES", 2 * len(lines[0].encode()))
    assert client.post(fields, path="/suggest").status == 403
    assert len((folder / "suggestions.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Suggestions are refused; uploaded files are not written to temporary files."""
    options = ServerOptions(suggestions=Path("/dev/full"), limits=Limits(max_file_bytes=2**21))
    fields = {"q": "one", "s": "eins", "source": "en", "target": "de"}
    with start_translation_server(tmp_path, options) as client:
        reply = client.post(fields, path="/suggest")
        monkeypatch.setattr(tempfile, "tempdir", "/dev/full")
        upload = send_multipart(client, "/translate_file", {"target": "de", "file": ("a.exe", b"x" * 2**21)})
    assert (reply.status, reply.error) == (503, "the suggestion cannot be stored")
    assert "/dev/full: cannot be written (No space left on device)" in caplog.text
    assert (upload.status, "one of these kinds" in upload.error) == (400, True)


def test_progress_of_a_file(client: Client) -> None:
    fields = {"source": "en", "target": "de", "file": ("a.txt", b"one\n" * 200)}
    reply = send_multipart(client, "/translate_file", fields, Accept="text/event-stream")
    events = [json.loads(event.removeprefix("data: ")) for event in reply.body.decode().split("\n\n") if event]
    assert [event.get("progress") for event in events] == [128 / 201, 1.0, None]
    assert client.get(urlsplit(events[-1]["translatedFileUrl"]).path).body == b"eins\n" * 200
    wrong = send_multipart(client, "/translate_file", fields | {"target": "xx"}, Accept="text/event-stream")
    assert (wrong.status, "`target`" in wrong.error) == (400, True)


def test_a_key_must_be_a_text(client: Client) -> None:
    reply = client.post({"q": "one", "target": "de", "api_key": 1}, path="/translate")
    assert (reply.status, reply.error.partition(":")[0]) == (400, "`api_key`")


def test_full_disk_leaves_no_partial_line(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(FileIO):
        def write(self, line: Any) -> int:
            return super().write(line[:5])

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fields = {"q": "one", "s": "eins", "source": "en", "target": "de"}
    client.post(fields, path="/suggest")
    before = (folder / "suggestions.jsonl").read_bytes()
    monkeypatch.setattr(libretranslate, "FileIO", FullDisk)
    reply = client.post(fields, path="/suggest")
    assert reply.status == 503
    assert reply.error == "the suggestion cannot be stored"
    assert (folder / "suggestions.jsonl").read_bytes() == before
    assert "is the disk full?" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", fail)
    assert client.post(fields, path="/suggest").status == 503
    assert (folder / "suggestions.jsonl").read_bytes() == before
