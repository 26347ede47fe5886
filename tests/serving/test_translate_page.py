"""The page of `attent serve` in Chromium, with a service that translates by a dictionary and reverses each sentence."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

from attent.serving.endpoints import LookRequest
from attent.serving.limits import Limits
from attent.serving.messages import (
    AUTO,
    CallContext,
    Direction,
    FileRequest,
    ScoredText,
    ServiceInfo,
    TextTranslation,
    TranslateRequest,
)
from tests.inspection.conftest import browser, watch_problems  # noqa: F401 - a fixture
from tests.serving.toy import serve_in_thread

pytest.importorskip("starlette", reason="needs Starlette: pip install 'attent[serve]'")
pytest.importorskip("granian", reason="needs granian: pip install 'attent[serve]'")

from attent.serving.backend import LocalBackend
from attent.serving.endpoints import SuggestRequest
from attent.serving.gateway import ServerOptions
from attent.serving.translation_app import TranslationApp

WORDS = {"a": "ein", "big": "großer", "dog": "Hund", "cat": "Katze", "runs": "läuft", "sleeps": "schläft"}
DICTIONARIES = {
    ("en", "de"): WORDS,
    ("de", "en"): {german: english for english, german in WORDS.items()},
    ("en", "ar"): {"dog": "كلب", "a": ""},
}
LANGUAGE_NAMES = {"ar": "Arabic", "de": "German", "en": "English"}
ALTERNATIVES = ("Katze", "Pferd", "Kuh")
KEY = "sesame"
HTTP_ERROR = "Failed to load resource"  # Chromium's message for responses from 400 on
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


class DictionaryService:
    """What `LocalBackend` uses of a `TranslationService`."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        directions = tuple(
            Direction(source=source, target=target, model=f"{source}-{target}") for source, target in DICTIONARIES
        )
        models = tuple({"name": each.model, "kind": "translation", "parameters": 1_469_440} for each in directions)
        self.can_finish_file = threading.Event()
        self.info = ServiceInfo(
            directions=directions, models=models, language_names=LANGUAGE_NAMES, file_suffixes=(".po", ".txt")
        )

    def translate(self, request: TranslateRequest, context: CallContext) -> list[TextTranslation]:
        self.requests.append(request)
        (text,) = request.texts
        if text == "broken":
            raise ValueError("the model cannot process this request")
        source = request.source if request.source != AUTO else self.detect_source(text, request.target)
        words = {**DICTIONARIES[source, request.target], **dict(request.glossary)}
        sentences, links, start = [], [], 0
        for sentence in re.split(r"((?<=\.) |\n)", text):  # with the separators
            count = len(sentence.split())
            translated = [words.get(word, words.get(word.lower(), word)) for word in reversed(sentence.split())]
            sentences.append(" ".join(translated) if count else sentence)
            links += [(start + index, start + count - 1 - index) for index in range(count)]
            start += count
        return [
            TextTranslation(
                text=request.constraints.prefix or "".join(sentences),
                score=-1.0,
                source=source,
                target=request.target,
                model=f"{source}-{request.target}",
                confidence=0.2 if "doubtful" in text else 0.9,
                detected=1.0 if request.source == AUTO else None,
                alignment=tuple(links),
            )
        ]

    def detect_source(self, text: str, target: str) -> str:
        sources = [pair[0] for pair in DICTIONARIES if pair[1] == target]
        return max(sources, key=lambda tag: sum(word in DICTIONARIES[tag, target] for word in text.split()))

    def suggest(self, request: SuggestRequest, context: CallContext) -> list[ScoredText]:
        self.requests.append(request)
        return [ScoredText(text=f"{request.prefix}{word} ein", score=-1.0) for word in ("Hund", *ALTERNATIVES)]

    def translate_file(self, request: FileRequest, context: CallContext) -> bytes:
        context.send_item(0.25)
        assert self.can_finish_file.wait(20)
        if request.content == b"broken":
            raise ValueError("the file is damaged")
        return request.content.upper()

    @cached_property
    def inspector(self) -> Any:
        from attent.inspection.inspectors.seq2seq import TranslationInspector
        from tests.inspection.toy_translator import translator

        return TranslationInspector(translator(), name="en-de")

    def look(self, request: LookRequest, context: CallContext) -> dict[str, Any]:
        from attent.serving.live_page import build_look_document

        self.requests.append(request)
        return build_look_document(self.inspector, request, context.should_stop, Limits(), to="de")

    def look_page(self, model: str, context: CallContext) -> tuple[str, str]:
        from attent.inspection.html_page import build_live_csp
        from attent.serving.live_page import render_look_page

        return render_look_page(self.inspector), build_live_csp()

    def close(self) -> None:
        pass


def start_app(service: Any, **options: Any) -> Any:
    return serve_in_thread(TranslationApp(LocalBackend(service), ServerOptions(**options)))


@pytest.fixture(scope="module")
def service() -> DictionaryService:
    return DictionaryService()


@pytest.fixture(scope="module")
def url(service: DictionaryService) -> Iterator[str]:
    with start_app(service, limits=Limits(max_characters=60)) as address:
        yield address


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Any]]:  # noqa: F811 - the fixture
    """open_tab(url) returns a page without stored data; at the end, fail on console errors and other hosts."""
    contexts = []

    def load_page(address: str, *, allowed: str = "", **screen: Any) -> Any:
        context = browser.new_context(
            reduced_motion="reduce", **(screen or {"viewport": {"width": 1400, "height": 900}})
        )
        page = context.new_page()
        page.set_default_timeout(5000)
        problems = watch_problems(page)
        page.on("request", lambda request: request.url.startswith((address, "blob:")) or problems.append(request.url))
        contexts.append((context, problems, allowed))
        page.goto(address)
        return page

    yield load_page
    for context, problems, allowed in contexts:
        context.close()
        assert [problem for problem in problems if not (allowed and problem.startswith(allowed))] == []


@pytest.fixture
def page(url: str, open_tab: Callable[..., Any], service: DictionaryService) -> Any:
    service.requests.clear()
    page = open_tab(url)
    page.wait_for_selector("#translator:not([hidden])")
    return page


def wait_for_translation(page: Any, text: str) -> None:
    page.wait_for_function("text => document.getElementById('translation').innerText === text", arg=text)


def list_linked(page: Any, side: str) -> list[str]:
    return page.locator(f"#{side} .linked").all_inner_texts()


def list_translated(service: DictionaryService) -> list[str]:
    return [request.texts[0] for request in service.requests if isinstance(request, TranslateRequest)]


# --- translation while typing ----------------------------------------------------------------------------------------


def test_translates_while_typing(page: Any, service: DictionaryService) -> None:
    page.locator("#source-text").press_sequentially("a dog", delay=20)
    wait_for_translation(page, "Hund ein")
    assert list_translated(service) == ["a dog"]
    assert page.inner_text("#count") == "5 / 60"
    assert page.locator("#source-language option:checked").inner_text() == "English (detected)"
    assert (page.get_attribute("#source-text", "lang"), page.get_attribute("#translation", "lang")) == ("en", "de")
    assert page.get_attribute("#confidence", "title").startswith("Confidence 90%")
    assert page.inner_text("#confidence-note") == ""
    page.fill("#source-text", "doubtful")
    page.keyboard.press("Control+Enter")
    wait_for_translation(page, "doubtful")
    assert page.inner_text("#confidence-note") == "unsure"
    page.click("#clear")
    wait_for_translation(page, "")
    assert page.evaluate("document.activeElement.id") == "source-text"


def test_older_answer_never_overwrites_newer(page: Any, service: DictionaryService) -> None:
    delayed: list[Any] = []

    def hold_first(route: Any) -> None:
        if json.loads(route.request.post_data)["text"] == "a cat":
            delayed.append(route)
        else:
            route.continue_()

    page.route("**/v1/translate", hold_first)
    page.fill("#source-text", "a cat")
    page.wait_for_selector(".working")
    page.fill("#source-text", "a big dog")
    wait_for_translation(page, "Hund großer ein")
    for route in delayed:
        route.continue_()
    page.wait_for_timeout(100)
    wait_for_translation(page, "Hund großer ein")
    assert page.locator(".working").count() == 0


def test_languages_and_swap(page: Any) -> None:
    assert page.locator("#target-language option").all_inner_texts() == ["Arabic", "English", "German"]
    page.select_option("#source-language", "en")
    assert page.locator("#target-language option").all_inner_texts() == ["Arabic", "German"]
    page.fill("#source-text", "a dog")
    wait_for_translation(page, "Hund ein")
    page.click("#swap")
    wait_for_translation(page, "a dog")
    assert page.input_value("#source-text") == "Hund ein"
    assert (page.input_value("#source-language"), page.input_value("#target-language")) == ("de", "en")
    page.select_option("#source-language", "en")
    page.select_option("#target-language", "ar")
    page.wait_for_function("() => document.getElementById('translation').dir === 'rtl'")
    assert page.is_disabled("#swap")
    page.reload()
    page.wait_for_selector("#translator:not([hidden])")
    assert (page.input_value("#source-language"), page.input_value("#target-language")) == ("en", "ar")


def test_text_in_the_target_language_changes_the_languages(page: Any) -> None:
    unchanged = {"text": "ein Hund", "source": "de", "target": "de", "model": "en-de", "confidence": 1.0}

    def answer(route: Any) -> None:
        if json.loads(route.request.post_data)["target"] == "de":
            route.fulfill(json={"translations": [unchanged | {"detected": detected}]})
        else:
            route.continue_()

    page.route("**/v1/translate", answer)
    detected = 0.6
    page.fill("#source-text", "ein Hund")
    wait_for_translation(page, "ein Hund")
    assert (page.input_value("#target-language"), page.get_attribute("#attention", "href")) == ("de", None)
    detected = 0.9
    page.keyboard.press("Control+Enter")
    wait_for_translation(page, "dog a")
    assert page.locator("#source-language option:checked").inner_text() == "German (detected)"
    assert page.input_value("#target-language") == "en"


# --- words -----------------------------------------------------------------------------------------------------------


def test_alignment_is_highlighted_on_both_sides(page: Any) -> None:
    page.fill("#source-text", "a dog\nbig cat sleeps")
    wait_for_translation(page, "Hund ein\nschläft Katze großer")
    page.hover("#translation >> text=Hund")
    assert (list_linked(page, "source-words"), list_linked(page, "translation")) == (["dog"], ["Hund"])
    box = page.locator("#source-words >> text=sleeps").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert (list_linked(page, "source-words"), list_linked(page, "translation")) == (["sleeps"], ["schläft"])
    page.mouse.move(2, 2)
    assert list_linked(page, "translation") == []
    page.focus("#source-text")
    page.keyboard.press("Control+Home")
    assert list_linked(page, "translation") == ["ein"]
    page.keyboard.type("x")
    assert list_linked(page, "translation") == []


@pytest.mark.slow
def test_words_of_the_layer_lie_under_those_of_the_textarea(page: Any) -> None:
    page.fill("#source-text", "a big dog runs " * 3 + "\n\n")
    texts = page.evaluate("""["source-text", "source-words"].map((id) => {
      const { font, padding, lineHeight, letterSpacing, whiteSpace } = getComputedStyle(document.getElementById(id));
      const { x, y, width, height } = document.getElementById(id).getBoundingClientRect();
      return JSON.stringify({ font, padding, lineHeight, letterSpacing, whiteSpace, x, y, width, height });
    })""")
    assert texts[0] == texts[1]
    assert page.evaluate("(box => box.scrollHeight <= box.clientHeight)(document.getElementById('source-text'))")


def test_alternatives_by_keyboard(page: Any, service: DictionaryService) -> None:
    page.fill("#source-text", "runs\nYes. A dog")
    wait_for_translation(page, "läuft\nYes. Hund ein")
    page.focus("#translation [tabindex='0']")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=menuitem]:focus")
    assert page.locator("[role=menuitem] b").all_inner_texts() == list(ALTERNATIVES)
    page.keyboard.press("Escape")
    page.wait_for_selector("#alternatives", state="hidden")
    assert page.evaluate("document.activeElement.textContent") == "Hund"
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=menuitem]:focus")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait_for_translation(page, "läuft\nYes. Pferd ein")
    assert page.evaluate("document.activeElement.textContent") == "Pferd"
    suggestion = next(request for request in service.requests if isinstance(request, SuggestRequest))
    assert (suggestion.text, suggestion.prefix, suggestion.source, suggestion.target) == ("A dog", "", "en", "de")
    page.wait_for_function("() => document.querySelector('#source-words .linked')?.textContent === 'dog'")


@pytest.mark.slow
def test_copy(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.fill("#source-text", "a\ndog")
    wait_for_translation(page, "ein\nHund")
    page.click("#copy")
    page.wait_for_selector("#copy >> text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "ein\nHund"


# --- stored in the browser -------------------------------------------------------------------------------------------


def test_glossary_is_sent_and_stored(page: Any) -> None:
    page.fill("#source-text", "a dog")
    wait_for_translation(page, "Hund ein")
    page.click("#glossary-box summary")
    page.fill("#glossary", "dog = Köter\nnothing")
    wait_for_translation(page, "Köter ein")
    assert page.inner_text("#glossary-problem") == "Line 2 is not used: write term = translation."
    page.reload()
    page.fill("#source-text", "a dog")
    wait_for_translation(page, "Köter ein")
    assert page.inner_text("#glossary-count") == "1"


@pytest.mark.slow
def test_history(page: Any) -> None:
    page.clock.install()
    page.reload()
    for text, translation, count in (("a dog", "Hund ein", 1), ("a dog runs", "läuft Hund ein", 1), ("a", "ein", 1)):
        page.fill("#source-text", text)
        page.clock.run_for(300)
        wait_for_translation(page, translation)
        page.clock.run_for(1900)
        before = page.evaluate("localStorage.getItem('attent-history') ?? ''")
        assert f'"{text}"' not in before
        page.clock.run_for(200)
        assert page.inner_text("#history-count") == str(count)
    page.clock.resume()
    page.reload()
    page.click("#history-box summary")
    page.click("#history .entry")
    wait_for_translation(page, "läuft Hund ein")
    assert (page.input_value("#source-text"), page.input_value("#source-language")) == ("a dog runs", "en")
    page.click("#clear-history")
    assert page.locator("#history .entry").count() == 0
    assert page.evaluate("localStorage.getItem('attent-history')") == "[]"


@pytest.mark.slow
def test_theme(page: Any) -> None:
    page.check("[name=theme][value=dark]")
    page.reload()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


# --- files and errors ------------------------------------------------------------------------------------------------


def test_file(page: Any, tmp_path: Path) -> None:
    bodies: list[str] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_buffer.decode())
        event = {"translatedFileUrl": "http://proxied.example/download_file/x1.txt"}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\n")

    page.route("**/translate_file", answer)
    page.route("**/download_file/x1.txt", lambda route: route.fulfill(body="Hund ein"))
    (tmp_path / "pets.txt").write_text("a dog")
    (tmp_path / "pets.exe").write_text("a dog")
    with page.expect_download() as download:
        page.set_input_files("#file", tmp_path / "pets.txt")
    assert download.value.suggested_filename == "pets.de.txt"
    assert Path(download.value.path()).read_text() == "Hund ein"
    assert "pets.txt is translated." in page.inner_text("#file-status")
    assert 'name="target"\r\n\r\nde\r\n' in bodies[0]
    assert 'name="source"\r\n\r\nauto\r\n' in bodies[0]
    page.set_input_files("#file", tmp_path / "pets.exe")
    assert page.inner_text("#file-status").strip() == "pets.exe has another format than .po, .txt."


def test_progress_of_a_file(page: Any, service: DictionaryService, tmp_path: Path) -> None:
    (tmp_path / "pets.txt").write_text("a dog")
    service.can_finish_file.clear()
    page.set_input_files("#file", tmp_path / "pets.txt")
    page.wait_for_selector("#file-status progress[value='0.25']")
    assert "pets.txt is being translated." in page.inner_text("#file-status")
    with page.expect_download() as download:
        service.can_finish_file.set()
    assert Path(download.value.path()).read_text() == "A DOG"
    (tmp_path / "pets.txt").write_text("broken")
    page.set_input_files("#file", tmp_path / "pets.txt")
    page.wait_for_selector("#file-status >> text=pets.txt was not translated. The file is damaged.")


def test_errors_are_one_sentence(url: str, open_tab: Callable[..., Any], tmp_path: Path) -> None:
    page = open_tab(url, allowed=HTTP_ERROR)
    page.clock.install()
    page.reload()
    page.fill("#source-text", "broken")
    page.keyboard.press("Control+Enter")
    page.clock.run_for(1)
    page.wait_for_selector("#message >> text=The model cannot process this request.")
    page.fill("#source-text", "x" * 61)
    page.wait_for_selector("#message >> text=The text has 61 characters; at most 60 are translated at once.")
    answers = iter([429, 503])

    def refuse(route: Any) -> None:
        status = next(answers, None)
        if status is None:
            route.continue_()
        else:
            route.fulfill(status=status, headers={"retry-after": "1"}, json={"error": "retry later"})

    page.route("**/v1/translate", refuse)
    page.fill("#source-text", "a dog")
    page.clock.run_for(300)
    page.wait_for_selector("#message >> text=Too many requests; retrying in 1 s.")
    page.clock.run_for(1000)
    page.wait_for_selector("#message >> text=The server is busy; retrying in 1 s.")
    page.clock.run_for(1000)
    wait_for_translation(page, "Hund ein")
    assert page.inner_text("#message") == ""
    answers = iter([503] * 4)
    page.fill("#source-text", "a cat")
    page.clock.run_for(300)
    for _ in range(3):
        page.wait_for_selector("#message >> text=The server is busy; retrying in 1 s.")
        page.wait_for_selector("#target-pane:not(.working)")
        page.clock.run_for(1000)
    page.wait_for_selector("#message >> text=Retry later.")
    page.clock.run_for(5000)
    assert page.inner_text("#message") == "Retry later."
    (tmp_path / "pets.txt").write_text("a dog")
    for status in (400, 503):
        answer = {"status": status, "json": {"error": f"error {status}"}}
        page.route("**/translate_file", partial(lambda answer, route: route.fulfill(**answer), answer))
        page.set_input_files("#file", tmp_path / "pets.txt")
        page.wait_for_selector(f"#file-status >> text=pets.txt was not translated. Error {status}.")


def test_key_is_asked_for_and_passed_to_the_attention_view(
    open_tab: Callable[..., Any], service: DictionaryService
) -> None:
    with start_app(service, keys=frozenset({KEY})) as address:
        page = open_tab(address, allowed=HTTP_ERROR)
        page.wait_for_selector("#key:focus")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-text >> text=does not accept")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.fill("#source-text", "a dog\nruns")
        wait_for_translation(page, "Hund ein\nläuft")
        assert page.evaluate("sessionStorage.getItem('attent-key')") == KEY
        sent: list[str] = []
        page.context.on("request", lambda request: sent.append(request.url))
        with page.context.expect_page() as opened:
            page.click("#attention")
        opened.value.wait_for_selector("[role=tab]:has-text('Decoding')")
        assert opened.value.input_value("#sentence") == "runs"
        assert KEY not in opened.value.url
        opened.value.reload()
        opened.value.wait_for_selector("[role=tab]:has-text('Decoding')")
        assert [address for address in sent if KEY in address.partition("#")[0]] == []
    request = next(request for request in service.requests if isinstance(request, LookRequest))
    assert (request.model, request.text) == ("en-de", "runs")


def test_server_without_a_translator(page: Any, url: str) -> None:
    info = {"models": [], "directions": [], "languages": {}, "file_suffixes": [".txt"], "limits": {}}
    page.route("**/v1/info", lambda route: route.fulfill(json=info))
    page.reload()
    page.wait_for_selector("#notice:not([hidden])")
    text = page.inner_text("#notice")
    assert text == f"This server has language models but no translator; their API is at {url}/v1 (documentation)."
    assert page.is_hidden("#translator")


@pytest.mark.slow
def test_phone_has_no_horizontal_scroll(url: str, open_tab: Callable[..., Any]) -> None:
    page = open_tab(url, **PHONE)
    page.fill("#source-text", "a dog runs\n" + "x" * 45)
    page.wait_for_selector("#translation [data-word]")
    assert page.evaluate("(box => box.scrollHeight <= box.clientHeight)(document.getElementById('source-text'))")
    page.tap("#translation [data-word='0']")
    page.wait_for_selector("[role=menuitem]")
    assert list_linked(page, "source-words") == ["runs"]
    menu = page.locator("#alternatives").bounding_box()
    assert 0 <= menu["x"] <= 390 - menu["width"]
    page.keyboard.press("Escape")
    page.tap("#history-box summary")
    page.tap("#glossary-box summary")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    source, target = (page.locator(f"#{name}-pane").bounding_box() for name in ("source", "target"))
    assert target["y"] >= source["y"] + source["height"]
