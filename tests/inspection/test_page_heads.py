"""The page and its heads view in Chromium."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attent.inspection.attention_trace import pack_array
from attent.inspection.html_page import render_page as page_of

HOSTILE = ["</script><script>window.bad=1</script>", "<img src=x onerror=window.bad=1>", "&amp;", "__proto__"]
SOURCE = "A man rides a bike .".split()
TARGET = "Ein Mann fährt Fahrrad .".split()
SITE = "http://127.0.0.1:9"  # nothing listens there: requests are intercepted
Open = Callable[..., Any]


# --- documents ---


def token(text: str, special: str | None = None) -> dict[str, Any]:
    return {"piece": text if special else f"▁{text}", "text": text, "space": not special, "special": special}


def side(words: list[str], *, start: bool = False, end: bool = False) -> dict[str, Any]:
    first, last = [token("start", "start")] * start, [token("end", "end")] * end
    tokens = [*first, *map(token, words), *last]
    return {"label": "words", "text": " ".join(words), "language": None, "tokens": tokens}


def layer(path: str, queries: str, keys: str, weights: Tensor, **changes: Any) -> dict[str, Any]:
    stack, _, number, name = path.split(".")
    kind = "cross" if name == "cross_attn" else "self"
    about = {"path": path, "stack": stack, "layer": int(number), "kind": kind, "heads": len(weights)}
    inspected = {"queries": queries, "keys": keys, "causal": False, "scale": 0.25, "masked_heads": []}
    return about | inspected | {"weights": pack_array(weights, "unit16")} | changes


def spread(heads: int, rows: int, columns: int, *, causal: bool = False) -> Tensor:
    """Head h puts 80% on the h-th key after the query position, the rest is uniform."""
    weights = torch.zeros(heads, rows, columns)
    for head in range(heads):
        for row in range(rows):
            inspected = min(row + 1, columns) if causal else columns
            weights[head, row, :inspected] = 0.2 / inspected
            weights[head, row, min(row + head, inspected - 1)] += 0.8
    return weights


def translation(source: list[str] = SOURCE, target: list[str] = TARGET, **changes: Any) -> dict[str, Any]:
    """Two layers of three heads on each side."""
    n, m = len(source) + 1, len(target) + 1
    layers = [layer(f"encoder.blocks.{i}.self_attn", "source", "source", spread(3, n, n)) for i in range(2)]
    for i in range(2):
        self_weights = spread(3, m, m, causal=True)
        layers.append(layer(f"decoder.blocks.{i}.self_attn", "target", "decoder_input", self_weights, causal=True))
        layers.append(layer(f"decoder.blocks.{i}.cross_attn", "target", "source", spread(3, m, n)))
    sides = {
        "source": side(source, end=True),
        "decoder_input": side(target, start=True),
        "target": side(target, end=True),
    }
    return {"format": "attent-trace", "version": 1, "title": "a test", "sides": sides, "layers": layers} | changes


def one_sided_document(words: list[str], weights: Tensor, **changes: Any) -> dict[str, Any]:
    """A model of one side: no cross-attention, no translation."""
    sides = {"text": side(words) | changes.pop("side", {})}
    layers = [layer("decoder.blocks.0.self_attn", "text", "text", weights, **changes)]
    return {"format": "attent-trace", "version": 1, "title": " ".join(words)[:50], "sides": sides, "layers": layers}


def long_text(length: int = 2000, stored: int = 8) -> dict[str, Any]:
    """Row i puts 50% on key i + 3 and a little on the keys after it, as sparse weights."""
    positions = (torch.arange(length)[:, None] + 3 + torch.arange(stored)).clamp(max=length - 1).expand(2, -1, -1)
    weights = torch.tensor([0.5] + [0.5 / stored] * (stored - 1)).expand(2, length, -1).clone()
    weights[:, -9:, 1:] = 0  # repeated indices have no weight
    sparse = {"indices": pack_array(positions, "uint16"), "weights": pack_array(weights, "unit16")}
    document = one_sided_document([f"w{i}" for i in range(length)], torch.zeros(2, 1, 1), sparse=sparse)
    del document["layers"][0]["weights"]
    return document


def picture(rows: int, columns: int) -> dict[str, Any]:
    """A white PNG with 8 x 8 pixels per patch."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width, height = 8 * columns, 8 * rows
    pixels = zlib.compress((b"\0" + b"\xff" * width) * height)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    return {"src": source, "rows": rows, "columns": columns, "num_prefix_tokens": 1}


# --- helpers ---


def text(page: Any, selector: str) -> str:
    return " ".join(page.locator(selector).inner_text().split())


def head(page: Any, path: str, number: int) -> Any:
    return page.locator(f".grid-cells [data-path='{path}'][data-head='{number}']")


def word(page: Any, side: str, index: int) -> Any:
    return page.locator(f".words.{side} .word").nth(index)


def shares(page: Any, side: str) -> dict[int, str]:
    words = page.locator(f".words.{side} .word[data-share]")
    return dict(words.evaluate_all("all => all.map(one => [Number(one.dataset.index), one.dataset.share])"))


def eventually(page: Any, selector: str, words: str) -> None:
    page.locator(selector, has_text=words).wait_for()


def pixel(canvas: Any, across: float, down: float) -> list[int]:
    """RGBA of a canvas at relative coordinates."""
    look = """(canvas, [across, down]) => {
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
      copy.drawImage(canvas, 0, 0);
      return [...copy.getImageData(Math.floor(across * canvas.width), Math.floor(down * canvas.height), 1, 1).data];
    }"""
    return canvas.evaluate(look, [across, down])


def darkness(page: Any, selector: str, across: float, down: float) -> int:
    """Distance from white."""
    return 765 - sum(pixel(page.locator(selector).first, across, down)[:3])


# --- heads ---


def test_page_shows_all_heads_and_texts(open_page: Open) -> None:
    page = open_page(translation())
    assert page.locator(".grid-cells button").count() == 2 * 3 * 3
    assert page.locator(".grid-group figcaption").all_inner_texts() == [
        "encoder self-attention",
        "decoder self-attention",
        "cross-attention",
    ]
    assert text(page, ".sentences") == "words A man rides a bike . words Ein Mann fährt Fahrrad ."
    assert page.locator(".words.queries .word").all_inner_texts() == [*TARGET, "end"]
    assert page.locator(".words.keys .word").all_inner_texts() == [*SOURCE, "end"]
    assert page.locator("[role=tab]:visible").all_inner_texts() == [
        "Heads",
        "Equation",
    ]  # the document has no data for the others
    assert page.evaluate("performance.getEntriesByName('attent-ready').length") == 1


def test_heat_map_has_queries_down_and_keys_across(open_page: Open) -> None:
    weights = torch.full((1, 4, 4), 0.01)
    weights[0, 1, 3] = 0.97
    page = open_page(one_sided_document(list("abcd"), weights))
    for canvas in (".map-field canvas", ".grid-cells canvas"):
        scale = 1 if "map" in canvas else 0.94  # thumbnails have a gap
        darkness_at_cell = darkness(page, canvas, 0.85 * scale, 0.4 * scale)
        assert darkness_at_cell > 250
        assert darkness_at_cell > 3 * darkness(page, canvas, 0.4 * scale, 0.85 * scale)
    labels = page.locator(".map-left .at").all_inner_texts(), page.locator(".map-top .at").all_inner_texts()
    assert labels == (list("abcd"), list("abcd"))


def test_click_selects_a_head_and_shift_overlays(open_page: Open) -> None:
    page = open_page(translation())
    head(page, "encoder.blocks.1.self_attn", 2).click()
    eventually(page, "#saying", "Head 2 of layer 1, encoder self-attention.")
    assert page.locator(".words.queries .word").all_inner_texts() == [*SOURCE, "end"]
    assert head(page, "encoder.blocks.1.self_attn", 2).get_attribute("aria-pressed") == "true"
    before = page.locator(".lines .all path").count()
    head(page, "encoder.blocks.1.self_attn", 0).click(modifiers=["Shift"])
    eventually(page, "#saying", "Heads 2 and 0 of layer 1")
    assert page.locator(".lines .all path").count() > before
    strokes = page.locator(".lines .all path").evaluate_all("all => all.map(one => one.getAttribute('stroke'))")
    assert set(strokes) == {"var(--head-0)", "var(--head-1)"}
    assert page.locator(".chip").all_inner_texts() == ["head 2", "head 0"]
    page.locator(".chip").first.click()
    eventually(page, "#saying", "Head 0 of layer 1")


def test_hover_describes_attention_in_both_directions(open_page: Open) -> None:
    page = open_page(translation(), "#layer=decoder.blocks.1.cross_attn&heads=1")
    word(page, "queries", 1).hover()
    eventually(page, "#saying", "Output Mann (input Ein) attends to rides (83%)")
    assert shares(page, "keys")[2] == "83%"
    word(page, "keys", 3).hover()
    eventually(page, "#saying", "a receives most attention when the output is fährt (83%)")
    assert shares(page, "queries")[2] == "83%"
    assert shares(page, "keys") == {}
    page.mouse.move(2, 2)
    eventually(page, "#saying", "Largest weight here")
    assert shares(page, "queries") == {}
    head(page, "encoder.blocks.0.self_attn", 1).click()
    word(page, "queries", 1).hover()  # self-attention: both directions
    eventually(page, "#saying", "man attends to rides (83%)")
    eventually(page, "#saying", "man receives most attention from A (83%)")
    assert page.locator(".lines .other path").count() > 0


def test_decoder_self_attention_shifts_output_and_input(open_page: Open) -> None:
    page = open_page(translation(), "#layer=decoder.blocks.0.self_attn&heads=0")
    assert page.locator(".words.keys .word").all_inner_texts() == ["start", *TARGET]
    word(page, "queries", 1).hover()
    eventually(page, "#saying", "Output Mann (input Ein) attends to Ein (90%)")
    eventually(page, "#saying", "Mann receives most attention when the output is fährt (87%)")


def test_hover_on_the_heat_map_shows_the_weight(open_page: Open) -> None:
    page = open_page(translation(), "#layer=decoder.blocks.0.cross_attn&heads=2")
    box = page.locator(".map-field").bounding_box()
    cell = box["width"] / 7
    page.mouse.move(box["x"] + 3.5 * cell, box["y"] + 1.5 * cell)
    eventually(page, ".tip", "Mann → a 83%")
    eventually(page, "#saying", "attends to a (83%)")
    assert page.locator(".map-band:visible").count() == 2


def test_sliders_and_arrow_keys_select_heads(open_page: Open) -> None:
    page = open_page(translation(), "#layer=encoder.blocks.0.self_attn&heads=0")
    page.locator(".layer-slider").fill("1")
    eventually(page, "#saying", "Head 0 of layer 1, encoder")
    page.locator(".head-slider").fill("2")
    eventually(page, "#saying", "Head 2 of layer 1, encoder")
    page.locator(".head-slider").evaluate("one => one.blur()")
    for key, output in [
        ("ArrowUp", "Head 2 of layer 0, encoder"),
        ("ArrowLeft", "Head 1 of layer 0, encoder"),
        ("ArrowRight", "Head 2 of layer 0, encoder"),
        ("ArrowRight", "Head 0 of layer 0, decoder"),  # beyond the last head: the next group
        ("ArrowDown", "Head 0 of layer 1, decoder"),
        ("ArrowDown", "Head 0 of layer 1, decoder"),  # the last layer
    ]:
        page.keyboard.press(key)
        eventually(page, "#saying", output)
    head(page, "decoder.blocks.1.self_attn", 0).focus()
    page.keyboard.press("ArrowRight")
    eventually(page, "#saying", "Head 1 of layer 1, decoder")
    assert page.evaluate("document.activeElement.dataset.head") == "1"
    page.locator("#tab-heads").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#panel-equation:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "tab-equation"


def test_pinned_token_is_in_the_url_until_escape(open_page: Open) -> None:
    page = open_page(translation(), "#layer=decoder.blocks.1.cross_attn&heads=1")
    word(page, "queries", 2).click()
    page.mouse.move(2, 2)
    eventually(page, "#saying", "Output fährt")
    address = page.url
    assert address.endswith("#tab=heads&layer=decoder.blocks.1.cross_attn&heads=1&query=2")
    page.wait_for_timeout(900)  # rapid changes share a history entry
    head(page, "encoder.blocks.0.self_attn", 0).click()
    eventually(page, "#saying", "encoder")
    assert "query" not in page.url  # another query side
    page.go_back()
    eventually(page, "#saying", "Output fährt")
    page.reload()
    eventually(page, "#saying", "Output fährt")
    page.keyboard.press("Escape")
    eventually(page, "#saying", "Largest weight here")
    page.locator(".words.keys").focus()
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    eventually(page, ".words.keys .word.pinned", "man")
    assert page.url.endswith("&key=1")


@pytest.mark.slow
def test_unknown_url_values_fall_back(open_page: Open) -> None:
    page = open_page(translation(), "#tab=masking&layer=nowhere.9&heads=77,x&query=99999")
    eventually(page, "#saying", "cross-attention")
    assert page.locator("#tab-heads").get_attribute("aria-selected") == "true"
    page = open_page(translation(), "#layer=encoder.blocks.0.self_attn&heads=1,9,-1,1.5&query=6.5")
    eventually(page, "#saying", "Head 1 of layer 0, encoder")


# --- special texts ---


def test_tokens_that_look_like_html_are_text(open_page: Open) -> None:
    page = open_page(translation(HOSTILE, [*HOSTILE, ""], title=HOSTILE[0], model={"name": HOSTILE[1]}))
    assert page.locator(".words.keys .word").all_inner_texts() == [*HOSTILE, "end"]
    assert page.locator(".words.queries .word").all_inner_texts() == [*HOSTILE, "␣", "end"]
    for index in range(4):
        word(page, "queries", index).hover()
        eventually(page, "#saying", f"Output {HOSTILE[index]}")
    assert page.evaluate("window.bad === undefined")
    assert page.locator("img").count() == 1  # the empty one of the image panel
    assert page.evaluate("[...document.scripts].length") == 2


@pytest.mark.slow
def test_tokens_have_their_own_direction(open_page: Open) -> None:
    arabic, chinese = ["صعد", "الرجل", "ABC"], ["男人", "上", "了"]
    page = open_page(translation(arabic, chinese))
    directions = page.locator(".words.keys bdi").evaluate_all("all => all.map(one => getComputedStyle(one).direction)")
    assert directions == ["rtl", "rtl", "ltr", "ltr"]
    assert page.locator(".sentences .text").first.evaluate("one => getComputedStyle(one).direction") == "rtl"
    word(page, "queries", 0).hover()
    eventually(page, "#saying", "男人")


@pytest.mark.slow
def test_continuation_tokens_are_marked(open_page: Open) -> None:
    document = one_sided_document("erk lä re . 男人 die".split(), torch.eye(6)[None])
    for number in (1, 2, 3, 4):
        document["sides"]["text"]["tokens"][number]["space"] = False
    page = open_page(document)
    marked = "all => all.map(one => getComputedStyle(one, '::before').content)"
    dots = page.locator(".words.keys .token").evaluate_all(marked)
    assert [dot == '"·"' for dot in dots] == [False, True, True, False, False, False]


def test_long_texts_draw_only_the_visible_part(open_page: Open) -> None:
    page = open_page(long_text())
    assert page.locator(".words.queries .word").count() == 2000
    assert page.locator(".map-field canvas").evaluate("one => one.width * one.height") < 4_000_000
    assert page.locator(".map-left .at").count() < 120
    assert (
        page.locator(".lines .all path").evaluate_all("all => all.map(p => p.getAttribute('d')).join('')").count("M")
        == 400
    )
    page.locator(".map-box").evaluate("one => one.scrollTo(1000 * 14 + 9, 1000 * 14 + 5)")
    page.locator(".map-left .at", has_text="w1001").wait_for()
    box = page.locator(".map-field canvas").bounding_box()
    across, down = 13 * 14 - 9 + 3, 10 * 14 - 5 + 3  # just inside the cell of w1010 and w1013
    page.mouse.move(box["x"] + across, box["y"] + down)
    page.locator(".tip:visible", has_text="w1010 → w1013 50%").wait_for()
    at = (across / box["width"], down / box["height"])
    assert darkness(page, ".map-field canvas", *at) > 250
    assert darkness(page, ".map-field canvas", at[0] - 8 / box["width"], at[1]) < 50  # no weight to the left
    word(page, "keys", 1503).scroll_into_view_if_needed()
    word(page, "keys", 1503).hover()
    eventually(page, "#saying", "w1503 receives most attention from w1500 (50%)")
    word(page, "queries", 1503).hover()
    eventually(page, "#saying", "w1503 attends to w1506 (50%)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["one"]], ids=["no word", "one word"])
def test_tiny_and_empty_documents(open_page: Open, words: list[str]) -> None:
    n = len(words)
    page = open_page(one_sided_document(words, torch.ones(1, n, n)))
    eventually(page, "#saying", "one attends to one (100%)" if words else "There are no tokens here.")
    page = open_page({"format": "attent-trace", "version": 1, "title": "", "sides": {}, "layers": []})
    eventually(page, "#panel-heads", "has no attention weights")


def test_attended_patches_are_tinted(open_page: Open) -> None:
    weights = torch.full((1, 13, 13), 0.001)
    weights[0, 0, 1 + 6] = weights[0, 5, 12] = 0.988  # the class token: row 1, column 2; patch 4: the last one
    document = one_sided_document(["class", *[""] * 12], weights, side={"image": picture(3, 4)})
    page = open_page(document)
    canvas = page.locator(".picture-frame canvas")
    assert pixel(canvas, 2.5 / 4, 1.5 / 3)[3] > 140  # tinted
    assert pixel(canvas, 3.5 / 4, 2.5 / 3)[3] < 10
    box = page.locator(".picture-frame").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5 / 4, box["y"] + box["height"] * 1.5 / 3)
    eventually(page, "#saying", "The patch in row 1, column 0 attends to the patch in row 2, column 3 (99%).")
    assert pixel(canvas, 3.5 / 4, 2.5 / 3)[3] > 140
    assert page.locator(".lines").is_hidden()
    assert page.locator(".picture-frame img").evaluate("one => one.naturalWidth") == 32


def test_phone_layout_does_not_scroll_sideways(open_page: Open) -> None:
    page = open_page(translation(["bicycle"] * 40, ["Donaudampfschifffahrtsgesellschaft"] * 40))
    page.set_viewport_size({"width": 360, "height": 740})
    for theme in ("light", "dark"):
        page.locator(f".themes input[value={theme}]").check()
        paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (int(paper[4:].split(",")[0]) > 128) == (theme == "light")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_masked_heads_are_marked(open_page: Open) -> None:
    document = translation()
    document["layers"][0]["masked_heads"] = [1]
    page = open_page(document, "#layer=encoder.blocks.0.self_attn&heads=1")
    eventually(page, "#saying", "This head is masked")
    assert page.locator(".grid-cells .masked").count() == 1
    assert head(page, "encoder.blocks.0.self_attn", 1).get_attribute("aria-label") == (
        "encoder self-attention, layer 0, head 1, masked"
    )


# --- live ---


class Server:
    """A fake server that holds each request until the test answers it."""

    def __init__(self, browser: Any, document: dict[str, Any]) -> None:
        self.context = browser.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
        self.questions: list[dict[str, Any]] = []
        self.waiting: list[Any] = []
        self.errors: list[str] = []
        html = page_of(document | {"live": True})
        self.context.route(f"{SITE}/**", lambda route: route.fulfill(body=html, content_type="text/html"))
        self.context.route(f"{SITE}/api/look", self.note)
        self.page = self.context.new_page()
        self.page.set_default_timeout(5000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(f"{SITE}/")
        self.page.wait_for_selector("#sentence")

    def note(self, route: Any) -> None:
        self.questions.append(json.loads(route.request.post_data))
        self.waiting.append(route)

    def wait_for_request(self, number: int) -> dict[str, Any]:
        """Return the n-th request once it has arrived."""
        for _ in range(100):
            if len(self.questions) > number:
                return self.questions[number]
            self.page.wait_for_timeout(20)
        raise AssertionError(f"there are only {len(self.questions)} questions")

    def answer(self, number: int, document: dict[str, Any], status: int = 200) -> None:
        self.wait_for_request(number)
        self.waiting[number].fulfill(status=status, json=document)


@pytest.fixture
def start_server(browser: Any) -> Iterator[Callable[[dict[str, Any]], Server]]:
    servers: list[Server] = []

    def serve(document: dict[str, Any]) -> Server:
        servers.append(Server(browser, document))
        return servers[-1]

    yield serve
    for server in servers:
        server.context.close()
        assert server.errors == []


def test_masking_sends_a_request_and_marks_differences(start_server: Callable[..., Server]) -> None:
    server = start_server(translation())
    page = server.page
    page.locator("#tab-masking").click()
    page.locator("[data-part='decoder.blocks.1.cross_attn:2']").click()
    page.locator("[data-part='encoder.blocks.0.feedforward']").click()
    parts = ["decoder.blocks.1.cross_attn:2", "encoder.blocks.0.feedforward"]
    assert server.wait_for_request(0) == {"text": "A man rides a bike .", "prefix": [], "masked_parts": parts}
    server.answer(0, translation(target=["Ein", "Hund", "fährt", "Fahrrad", "."]))
    eventually(page, ".translation ins", "Hund")
    assert page.locator(".translation ins").count() == 1
    eventually(page, ".translation .was", "Ein Mann fährt Fahrrad .")
    eventually(page, ".mask-now del", "Mann")
    page.get_by_role("button", name="Reset").click()
    page.locator(".translation .was").wait_for(state="detached")
    assert text(page, ".translation") == "words Ein Mann fährt Fahrrad ."
    assert page.locator(".switch[aria-pressed=true]").count() == 0
    assert len(server.questions) == 1  # the baseline is cached


def test_last_request_wins_and_errors_are_shown(start_server: Callable[..., Server]) -> None:
    server = start_server({"format": "attent-trace", "version": 1, "title": "m", "sides": {}, "layers": []})
    page = server.page
    assert page.locator("#sentence").input_value() == ""
    assert page.evaluate("document.activeElement.id") == "sentence"
    for number, words in enumerate(["one", "two", "three"]):
        page.locator("#sentence").fill(words)
        page.keyboard.press("Enter")
        assert server.wait_for_request(number)["text"] == words
    server.answer(1, translation(target=["zwei"]))
    server.answer(2, translation(["three"], ["drei"]))
    eventually(page, ".translation", "drei")
    server.answer(0, translation(target=["eins"]))
    page.wait_for_timeout(100)
    assert text(page, ".translation") == "words drei"
    page.locator("#sentence").fill("")
    page.keyboard.press("Enter")
    eventually(page, ".notice", "Type a sentence first.")
    page.locator("#sentence").fill("four")
    page.keyboard.press("Enter")
    server.answer(3, {"error": "there must be a sentence <b>"}, status=422)
    eventually(page, ".notice", "There must be a sentence <b>.")
    assert text(page, ".translation") == "words drei"
    page.locator("#tab-masking").click()
    page.locator("[data-part='encoder.blocks.1.self_attn']").click()
    assert server.wait_for_request(4)["text"] == "three"  # the current sentence, not the rejected one


def test_examples_and_target_languages(start_server: Callable[..., Server]) -> None:
    empty = {"format": "attent-trace", "version": 1, "title": "", "sides": {}, "layers": []}
    server = start_server(empty | {"examples": ["A <b>dog</b>.", "A cat."], "languages": ["de", "fr"]})
    page = server.page
    page.get_by_role("button", name="A <b>dog</b>.").click()
    assert server.wait_for_request(0) == {"text": "A <b>dog</b>.", "prefix": [], "masked_parts": [], "to": "de"}
    server.answer(0, translation())
    page.locator(".example").first.wait_for(state="hidden")
    page.get_by_label("Translate into").select_option("fr")
    assert server.wait_for_request(1)["to"] == "fr"
    server.answer(1, translation(target=["Un", "homme"]))
    eventually(page, ".translation", "Un homme")
    page.locator("#tab-masking").click()
    page.locator("[data-part='decoder.blocks.1.cross_attn:2']").click()
    assert server.wait_for_request(2)["to"] == "fr"


@pytest.mark.slow
def test_head_aligned_on_input_is_labeled_by_input(open_page: Open) -> None:
    values = {"aligned_on_input": 0.9, "aligned_on_output": 0.4, "alignment": 0.9}
    late = {"path": "decoder.blocks.1.cross_attn", "head": 2, "description": "aligns late", "values": values}
    head_stats = {"sentences": 500, "dataset": "pairs", "columns": [], "heads": [late]}
    page = open_page(translation(head_stats=head_stats))
    assert text(page, "#saying").startswith("Head 2 of layer 1")
    first = page.locator(".words.queries .word").first
    assert first.inner_text().strip() == "start"
    eventually(page, ".side-label.queries", "decoder input")
    page.locator(".rows label", has_text="output").click()
    eventually(page, ".side-label.queries", "output")
    assert first.inner_text().strip() == TARGET[0]
    head(page, "encoder.blocks.0.self_attn", 1).click()
    page.locator(".rows").wait_for(state="hidden")
    head(page, "decoder.blocks.0.self_attn", 1).click()
    page.locator(".rows label", has_text=re.compile("^input")).click()
    eventually(page, ".side-label.queries", "decoder input")
    assert first.inner_text().strip() == "start"


@pytest.mark.slow
def test_heads_are_compared_without_a_keyboard(open_page: Open) -> None:
    document = translation()
    n, m = len(SOURCE) + 1, len(TARGET) + 1
    document["layers"][-1] = layer("decoder.blocks.1.cross_attn", "target", "source", spread(5, m, n))
    page = open_page(document, "#tab=heads&layer=decoder.blocks.1.cross_attn&heads=4")
    assert page.locator(".head-slider").get_attribute("max") == "4"
    page.keyboard.press("ArrowUp")
    eventually(page, "#saying", "Head 2 of layer 0, cross-attention")
    assert page.locator(".head-slider").get_attribute("max") == "2"
    page.get_by_role("button", name="compare heads").click()
    head(page, "decoder.blocks.0.cross_attn", 0).click()
    eventually(page, "#saying", "Heads 2 and 0 of layer 0")
    page.get_by_role("button", name="overlay all heads").wait_for(state="detached")
    assert page.locator(".chips .chip").all_inner_texts() == ["head 2", "head 0"]


def test_live_page_requests_the_sentence_in_its_url(start_server: Callable[..., Server]) -> None:
    server = start_server({"format": "attent-trace", "version": 1, "title": "", "sides": {}, "layers": []})
    page = server.page
    page.goto("about:blank")
    page.goto(f"{SITE}/#tab=equation&layer=encoder.blocks.1.self_attn&heads=1&text=A%20man")
    assert server.wait_for_request(0)["text"] == "A man"
    server.answer(0, translation())
    eventually(page, "[role=tab][aria-selected=true]", "Equation")
    assert "encoder.blocks.1.self_attn" in page.evaluate("location.hash")
    assert "text=A%20man" in page.evaluate("location.hash")
