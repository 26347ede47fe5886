"""The page of the other model families in Chromium: predictions, labels, images, live requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.decoding.transcriber import Transcriber
from attent.inspection.ablate import ModelPart
from attent.inspection.attention_trace import pack_array
from attent.inspection.head_stats import measure_trace_heads
from attent.inspection.html_page import render_page as page_of
from attent.inspection.inspectors.base import InspectionRequest
from attent.inspection.inspectors.front_ends import CaptioningInspector, SpeechInspector, VisionInspector
from attent.inspection.inspectors.text import CausalLMInspector, EncoderInspector
from tests.inspection.models import (
    HIDDEN,
    TEXT,
    captioner,
    causal,
    encoder,
    speech,
    tokenizer,
    vision,
    write_chirp,
    write_ring,
)
from tests.inspection.test_page_heads import SITE, Open, eventually, pixel, text


def align(document: dict[str, Any]) -> dict[str, Any]:
    """Replace cross-attention: each word attends to its own part of the source, in order."""
    queries, keys = (len(document["sides"][side]["tokens"]) for side in ("target", "source"))
    weights = torch.zeros(queries, keys)
    for q in range(queries):
        weights[q, q * keys // queries : (q + 1) * keys // queries] = 1
    weights /= weights.sum(1, keepdim=True)
    for layer in document["layers"]:
        if layer["kind"] == "cross":
            layer["weights"] = pack_array(weights.expand(layer["heads"], -1, -1), "unit16")
    return document | {"head_stats": measure_trace_heads(document["layers"], document["sides"]).to_document()}


@pytest.fixture(scope="module")
def writer() -> CausalLMInspector:
    return CausalLMInspector(causal(), tokenizer().source, name="toy")


def test_language_model_shows_predictions(open_page: Open, writer: CausalLMInspector) -> None:
    document = writer.inspect(InspectionRequest(text=TEXT))
    page = open_page(document)
    assert page.locator("[role=tab]:visible").all_inner_texts() == [
        "Heads",
        "Equation",
        "Predictions",
        "Head statistics",
        "Positions",
    ]
    assert text(page, ".sentences .text >> nth=0") == TEXT
    assert text(page, ".translation .label") == "continuation"
    page.locator("#tab-predictions").click()
    positions = document["predictions"]["positions"]
    words = page.locator(".pred .dec-word")
    words.last.wait_for()
    assert words.count() == len(positions) + 1  # and the start token, which is not predicted
    assert words.last.get_attribute("aria-pressed") == "true"
    options = page.locator(".pred .dec-option")
    assert options.count() == len(positions[-1]["options"])
    words.nth(3).click()
    eventually(page, ".pred .dec-options", "has a probability of")
    assert page.locator(".pred .dec-is").count() == 1


def test_masked_token_shows_predictions(open_page: Open) -> None:
    document = EncoderInspector(encoder(), tokenizer()).inspect(InspectionRequest(text=HIDDEN))
    page = open_page(document, "#tab=predictions")
    (position,) = document["predictions"]["positions"]
    arguments = page.locator(".pred button.dec-word")
    arguments.last.wait_for()
    assert arguments.count() == 1
    assert position["options"][0]["text"] in arguments.inner_text()
    assert text(page, ".translation .text") == " ".join(document["output"]["text"].split())
    assert page.locator(".token.special-mask").first.get_attribute("title") == "<mask> (masked token)"


def test_labels_have_bars(open_page: Open, tmp_path: Path) -> None:
    document = VisionInspector(vision()).inspect(InspectionRequest(text=str(write_ring(tmp_path))))
    page = open_page(document)
    names = page.locator(".labels .label-name").all_inner_texts()
    assert names == [item["label"] for item in document["labels"]["best"]]
    assert page.locator(".translation .text").count() == 0
    assert page.locator(".thumb").evaluate("one => one.naturalWidth") == 28
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_every_head_shows_attended_patches(open_page: Open, tmp_path: Path) -> None:
    document = VisionInspector(vision()).inspect(InspectionRequest(text=str(write_ring(tmp_path))))
    page = open_page(document, "#layer=encoder.blocks.0.self_attn&heads=0")
    grid = page.locator(".grid-cells canvas")
    before = grid.evaluate("one => one.toDataURL()")
    box = page.locator(".picture-frame").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 4, box["y"] + box["height"] * 0.5 / 4)
    eventually(page, "#saying", "The patch in row 0, column 2 attends")
    assert grid.evaluate("one => one.toDataURL()") != before
    page.mouse.move(0, 0)
    eventually(page, "#saying", "class attends")
    page.locator(".picture-tint input").fill("0")
    assert page.locator(".picture-frame canvas").evaluate("one => getComputedStyle(one).opacity") == "0"
    page.locator("#tab-positions").click()
    page.wait_for_selector(".pos-patch")
    assert pixel(page.locator(".pos-square canvas").first, 0.1, 0.1)[3] > 0


@pytest.mark.slow
def test_words_of_a_caption_tint_the_picture(open_page: Open, tmp_path: Path) -> None:
    inspector = CaptioningInspector(captioner(), tokenizer())
    document = inspector.inspect(InspectionRequest(text=str(write_ring(tmp_path)), target="A dog waiting."))
    page = open_page(document, "#layer=decoder.blocks.1.cross_attn&heads=0")
    assert text(page, ".translation .label") == "caption"
    words = page.locator(".picture-words button")
    assert words.count() == len(document["sides"]["target"]["tokens"])
    tint, thumbnails = page.locator(".picture-frame canvas"), page.locator(".grid-cells canvas")
    mean, drawn = (
        tint.evaluate("one => one.toDataURL()"),
        [one.evaluate("x => x.toDataURL()") for one in thumbnails.all()],
    )
    words.nth(1).click()
    eventually(page, "#saying", "attends to the patch in row")
    assert words.nth(1).get_attribute("aria-pressed") == "true"
    assert tint.evaluate("one => one.toDataURL()") != mean
    now = [one.evaluate("x => x.toDataURL()") for one in thumbnails.all()]
    assert [a == b for a, b in zip(drawn, now, strict=True)] == [True, True, False]  # a word is no query of the encoder
    page.locator("#tab-positions").click()
    page.wait_for_selector(".pos-patch, .pos-square")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_words_of_a_transcript_play_what_they_attend_to(open_page: Open, tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    inspector = SpeechInspector(Transcriber(speech(), tokenizer()))
    document = align(inspector.inspect(InspectionRequest(text=str(write_chirp(tmp_path)), target="A dog waiting.")))
    page = open_page(document, "#layer=decoder.blocks.1.cross_attn&heads=0")
    page.evaluate("""() => {
        window.played = [];
        const start = AudioBufferSourceNode.prototype.start;
        AudioBufferSourceNode.prototype.start = function (...times) {
            window.played.push([...times.slice(1), this.buffer.duration, Math.max(...this.buffer.getChannelData(0))]);
            start.apply(this, times);
        };
    }""")
    assert text(page, ".translation .label") == "transcript"
    assert page.locator(".map-box").is_hidden()
    assert page.locator(".sound-axis span").first.inner_text() == "0.0 s"
    assert page.locator(".sound-labels .at").count() == len(document["sides"]["target"]["tokens"])
    frame, field = (page.locator(name).bounding_box() for name in (".picture-frame", ".sound-field"))
    assert (frame["x"], frame["width"]) == (pytest.approx(field["x"], abs=1), pytest.approx(field["width"], abs=1))
    words = page.locator(".picture-words button")
    last = words.count() - 1  # the end: the last part of the recording
    words.nth(last).click()
    eventually(page, "#saying", "s (5")
    page.wait_for_function("() => window.played.length === 1")
    start, length, duration, peak = page.evaluate("window.played[0]")
    assert (duration, peak) == (pytest.approx(1.2), pytest.approx(0.5, abs=0.01))
    count = len(document["sides"]["target"]["tokens"])
    assert 1.2 * last / count - 0.3 <= start < start + length <= 1.2001
    assert page.locator(".picture-best").bounding_box()["x"] > frame["x"] + frame["width"] * (last / count - 0.02)
    page.locator(".picture-foot button").last.wait_for()
    page.mouse.click(field["x"] + 5, field["y"] + 5)  # the first word
    page.wait_for_function("() => window.played.length === 2")
    assert page.evaluate("window.played[1][0]") < 0.2
    page.locator(".picture-foot button").first.click()  # stops, or plays it all if that was over
    if page.evaluate("window.played.length") == 2:
        page.locator(".picture-foot button").first.click()
    page.wait_for_function("() => window.played.at(-1)[1] > 1.19")
    assert page.locator(".sound-cursor").is_visible()
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_encoder_of_a_recording(open_page: Open, tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    document = SpeechInspector(Transcriber(speech(), tokenizer())).inspect(
        InspectionRequest(text=str(write_chirp(tmp_path)), target="A dog waiting.")
    )
    page = open_page(document, "#layer=encoder.blocks.0.self_attn&heads=1")
    box = page.locator(".picture-frame").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 30.5 / 60, box["y"] + 20)
    eventually(page, "#saying", "0.60\xa0s attends to")
    assert page.locator(".picture-words button").count() == 0
    page.mouse.click(box["x"] + box["width"] * 30.5 / 60, box["y"] + 20)
    page.wait_for_function("() => location.hash.includes('query=30')")
    for tab in ("equation", "decoding", "head_stats", "positions"):
        page.locator(f"#tab-{tab}").click()
    page.wait_for_selector(".pos-canvas")
    assert "frames" in text(page, ".pos-drawing")


def test_live_page_inserts_predictions_and_masks(browser: Any, writer: CausalLMInspector) -> None:
    arguments: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        question = json.loads(route.request.post_data)
        arguments.append(question)
        parts = tuple(map(ModelPart.parse, question["masked_parts"]))
        route.fulfill(
            json=writer.inspect(InspectionRequest(text=question["text"], masked_parts=parts)) | {"live": True}
        )

    for page in open_intercepted_page(browser, page_of(writer.build_model_document("") | {"live": True})):
        page.route(f"{SITE}/api/look", answer)
        page.goto(SITE)
        assert page.locator("#sentence").get_attribute("placeholder") == "Type the beginning of a text …"
        page.locator("#sentence").fill("Two women")
        page.keyboard.press("Enter")
        page.locator("#tab-predictions").click()
        option = page.locator(".pred button.dec-option").first
        word = option.locator(".token").inner_text()
        option.click()
        page.wait_for_function("() => document.querySelectorAll('.pred .dec-word').length > 4")
        assert arguments[-1]["text"].endswith(word)
        page.locator("#tab-masking").click()
        eventually(page, "#panel-masking", "and the sentence is processed again.")
        page.locator("[data-part='decoder.blocks.0']").click()
        eventually(page, ".mask-now", "Masked parts")
        eventually(page, ".mask-now", "continuation")
        page.wait_for_function("() => !document.querySelector('.page').classList.contains('busy')")
        assert arguments[-1]["masked_parts"] == ["decoder.blocks.0"]


def open_intercepted_page(browser: Any, content: str) -> Iterator[Any]:
    """A page with intercepted requests; fails on exceptions."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(5000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.route(f"{SITE}/", lambda route: route.fulfill(body=content, content_type="text/html; charset=utf-8"))
    yield page
    context.close()
    assert problems == []
