"""Geometry and wording of the page in Chromium, at 1400 x 900 and on a phone with touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.inspection.html_page import render_page
from tests.inspection.conftest import watch_problems
from tests.inspection.test_page_heads import SOURCE, TARGET, eventually, picture, pixel, side, text, translation
from tests.inspection.test_page_heads import layer as plain_layer
from tests.inspection.test_page_views import document, token

DESK = {"viewport": {"width": 1400, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
LONG = "A man in a blue shirt rides an old bike down the street , next to two dogs and a cat .".split()
Open = Callable[..., Any]


@pytest.fixture
def open_on(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """open_on(screen, document, fragment) returns the page on that screen."""
    contexts = []

    def load_page(screen: dict[str, Any], trace: dict[str, Any], fragment: str = "") -> Any:
        context = browser.new_context(reduced_motion="reduce", **screen)
        page = context.new_page()
        page.set_default_timeout(5000)
        contexts.append((context, watch_problems(page)))
        (tmp_path / "page.html").write_text(render_page(trace), encoding="utf-8")
        page.goto((tmp_path / "page.html").as_uri() + fragment)
        page.wait_for_selector("[role=tab][aria-selected=true]")
        return page

    yield load_page
    for context, problems in contexts:
        context.close()
        assert problems == []


def overlap(page: Any, first: str, second: str) -> float:
    """Height in pixels by which two elements overlap."""
    a, b = (page.locator(selector).first.bounding_box() for selector in (first, second))
    across = min(a["x"] + a["width"], b["x"] + b["width"]) - max(a["x"], b["x"])
    down = min(a["y"] + a["height"], b["y"] + b["height"]) - max(a["y"], b["y"])
    return max(0.0, down) if across > 0 else 0.0


def with_stats(entropy: float) -> dict[str, Any]:
    """A translation whose cross-attention heads have this normalized entropy."""
    trace = translation()
    heads = [
        {"path": each["path"], "head": head, "description": "uniform", "values": {"normalized_entropy": entropy}}
        for each in trace["layers"]
        for head in range(3)
    ]
    column = {"key": "normalized_entropy", "label": "normalized entropy", "unit": "share", "help": "100% is uniform."}
    return trace | {"head_stats": {"sentences": 1, "dataset": "this sentence", "columns": [column], "heads": heads}}


# --- geometry ---


@pytest.mark.slow
@pytest.mark.parametrize("screen", [DESK, PHONE], ids=["desk", "phone"])
def test_description_covers_no_figure(open_on: Open, screen: dict[str, Any]) -> None:
    page = open_on(screen, translation(LONG, LONG))
    for at in (0.0, 0.5, 1.0):
        page.evaluate("at => scrollTo(0, at * document.documentElement.scrollHeight)", at)
        for figure in (".map-box", ".lines-box"):
            assert overlap(page, "#saying", figure) == 0
    hidden = """() => [...document.querySelectorAll(".map-left .at")].filter((label) => {
      label.scrollIntoView({block: "nearest"});
      const {x, y, width, height} = label.getBoundingClientRect();
      return !document.elementFromPoint(x + width - 2, y + height / 2)?.closest(".map-left");
    }).length"""
    assert page.evaluate(hidden) == 0


def test_heat_map_of_a_usual_sentence_fits_the_window(open_on: Open) -> None:
    page = open_on(DESK, translation(LONG[:15], LONG[:15]))
    box = page.locator(".map-field").bounding_box()
    assert box["y"] + box["height"] <= 900


@pytest.mark.slow
@pytest.mark.parametrize("screen", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("tab", ["heads", "equation", "decoding", "head_stats", "positions"])
def test_no_view_scrolls_sideways_or_clips_its_text(open_on: Open, screen: dict[str, Any], tab: str) -> None:
    page = open_on(screen, document(), f"#tab={tab}")
    page.locator(f"#panel-{tab}").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    clipped = """tab => [...document.querySelectorAll(`#panel-${tab} :is(p, h2, h3, button, dt, dd, figcaption)`)]
      .filter((element) => element.offsetParent && getComputedStyle(element).textOverflow !== "ellipsis")
      .filter((element) => element.scrollWidth > element.clientWidth + 1)
      .map((element) => element.outerHTML.slice(0, 120))"""
    assert page.evaluate(clipped, tab) == []


@pytest.mark.parametrize("screen", [DESK, PHONE], ids=["desk", "phone"])
def test_entry_box_is_as_high_as_its_text(open_on: Open, screen: dict[str, Any]) -> None:
    trace = translation([" ".join(LONG * 2)]) | {"live": True}
    page = open_on(screen, trace)
    fits = "box => box.scrollHeight <= box.clientHeight && box.scrollWidth <= box.clientWidth"
    box = page.locator("textarea.entry")
    assert box.evaluate(fits)
    before = box.bounding_box()["height"]
    box.fill(" ".join(LONG * 3))
    assert box.evaluate(fits)
    assert box.bounding_box()["height"] > before
    button = page.locator(".asking .button").bounding_box()
    assert button["x"] + button["width"] <= screen["viewport"]["width"]


@pytest.mark.slow
def test_no_line_begins_with_closing_punctuation(open_on: Open) -> None:
    words = ["Mann", ",", "Frau", ","] * 3
    trace = translation(words, words)
    for name in ("source", "target", "decoder_input"):
        trace["sides"][name]["tokens"] = [token(word, word != ",") for word in [*words, "x"]]
    page = open_on(DESK, trace, "#tab=equation")
    page.locator(".eq-word").first.wait_for()
    begins = """() => {
      const words = [...document.querySelectorAll(".eq-word")];
      const left = (word) => word.getBoundingClientRect().left;
      return words.filter((word, i) => word.innerText.trim() === "," && left(word) < left(words[i - 1])).length;
    }"""
    widths = range(300, 460, 20)
    for width in widths:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(begins) == 0
    page.locator("#tab-heads").click()
    page.locator(".words.queries .word").nth(1).click()
    eventually(page, "#saying", "Output “,” (input “,”) attends to “,” (")
    starts = """() => {
      const [range, lines] = [document.createRange(), new Map()];
      const walk = document.createTreeWalker(document.getElementById("saying"), NodeFilter.SHOW_TEXT);
      while (walk.nextNode()) for (let i = 0; i < walk.currentNode.length; i++) {
        range.setStart(walk.currentNode, i);
        range.setEnd(walk.currentNode, i + 1);
        const [box, letter] = [range.getBoundingClientRect(), range.toString()];
        const line = Math.round(box.bottom / 8);
        const isFirst = !(lines.get(line)?.left <= box.left);
        if (box.width && letter.trim() && isFirst) lines.set(line, {left: box.left, letter});
      }
      return [...lines.values()].map(({letter}) => letter).filter((letter) => /[,.;)]/.test(letter));
    }"""
    for width in widths:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(starts) == []


@pytest.mark.slow
def test_parentheses_are_as_high_as_the_fraction(open_on: Open) -> None:
    page = open_on(DESK, document(), "#tab=equation")
    sides = """inner => ["::before", "::after"].map((side) => parseFloat(getComputedStyle(inner, side).height))"""
    heights = page.locator(".eq-inner").evaluate(sides)
    fraction = page.locator(".eq-fraction").bounding_box()["height"]
    assert all(height >= fraction for height in heights)
    assert "softmax(q K^T / sqrt(" in page.locator("[role=math]").get_attribute("aria-label")


def test_curves_have_axes(open_on: Open) -> None:
    page = open_on(DESK, document(), "#tab=positions")
    values = page.locator(".pos-values .pos-curvebox")
    assert text(page, ".pos-values .pos-ends").startswith("0 dimension →")
    assert "value ↑" in values.inner_text()
    assert "position →" in text(page, ".pos-pairwise .pos-ends")
    assert values.locator(".pos-ticks span").count() >= 2


# --- wording ---


@pytest.mark.slow
def test_touch_screens_are_told_to_tap(open_on: Open) -> None:
    trace = document()
    for screen, words, other in ((PHONE, "Tap", "Point at"), (DESK, "Point at", "Tap")):
        page = open_on(screen, trace)
        assert words in text(page, ".grid-caption")
        assert other not in text(page, ".grid-caption")
        assert page.locator("button", has_text="Keys").is_visible() == (screen is DESK)
        page = open_on(screen, trace, "#tab=positions")
        assert f"{words} the matrix" in text(page, ".pos-values .pos-say")


def test_tap_on_the_heat_map_shows_the_weight(open_on: Open) -> None:
    page = open_on(PHONE, translation())
    page.locator(".map-box").scroll_into_view_if_needed()
    for across, down in ((0.2, 0.2), (0.95, 0.95)):
        box = page.locator(".map-field").bounding_box()
        page.touchscreen.tap(box["x"] + across * box["width"], box["y"] + down * box["height"])
        page.locator(".tip", has_text="→").wait_for()
        tip = page.locator(".tip").bounding_box()
        assert tip["x"] >= 0
        assert tip["x"] + tip["width"] <= 390
    page.touchscreen.tap(20, 20)
    page.locator(".tip").wait_for(state="hidden")


@pytest.mark.slow
def test_uniform_cross_attention_asks_to_train_longer(open_on: Open) -> None:
    page = open_on(DESK, with_stats(0.9))
    assert "train longer" in text(page, ".unformed")
    assert not page.locator(".pictures").is_visible()
    page.locator(".grid-cells [data-path='encoder.blocks.0.self_attn'][data-head='0']").click()
    page.locator(".pictures").wait_for()  # self-attention is shown as always
    assert not page.locator(".unformed").is_visible()
    page.locator(".grid-cells [data-path='decoder.blocks.0.cross_attn'][data-head='0']").click()
    page.locator(".unformed button").click()
    page.locator(".pictures .map-box").wait_for()
    formed = open_on(DESK, with_stats(0.899))
    assert formed.locator(".pictures").is_visible()
    assert not formed.locator(".unformed").is_visible()


@pytest.mark.slow
def test_columns_and_rows_are_explained_in_place(open_on: Open) -> None:
    trace = with_stats(0.5)
    page = open_on(PHONE, trace, "#tab=head_stats")
    assert text(page, ".prop-terms") == "normalized entropy 100% is uniform."
    page = open_on(PHONE, trace)
    eventually(page, "#saying", "labeled by the token that it predicts (output); it reads the one before")
    page.locator(".rows input[value=decoder_input]").check(force=True)
    eventually(page, "#saying", "labeled by the token that it reads (input); it predicts the next one")


def test_equation_opens_on_a_word_with_divided_weight(open_on: Open) -> None:
    weights = torch.full((1, 4, 4), 0.01)
    weights[0, :, 0] = 0.97
    weights[0, 2] = torch.tensor([0.05, 0.6, 0.3, 0.05])
    sides = {"text": side(["start", "cat", "dog", "mouse"])}
    sides["text"]["tokens"][0] = token("start", False, "start")
    trace = {"format": "attent-trace", "version": 1, "title": "t", "sides": sides}
    page = open_on(
        DESK, trace | {"layers": [plain_layer("decoder.blocks.0.self_attn", "text", "text", weights)]}, "#tab=equation"
    )
    assert page.locator(".eq-word[aria-pressed=true]").inner_text() == "dog"


# --- scales ---


@pytest.mark.slow
def test_bars_of_a_view_have_one_scale(open_on: Open) -> None:
    page = open_on(DESK, document(), "#tab=decoding")
    widths = """(bars) => bars.map((bar) => parseFloat(bar.style.width))"""
    shares = [float(each.strip("%<")) for each in page.locator(".dec-option .dec-n").all_inner_texts()]
    assert page.locator(".dec-bar > span").evaluate_all(widths) == pytest.approx(shares, abs=0.06)
    meters = "words => words.map((word) => getComputedStyle(word, '::after').width)"
    assert len(set(page.locator(".dec-word").evaluate_all(meters))) == 1
    page = open_on(DESK, document(), "#tab=equation")
    shares = [float(each.strip("%<")) for each in page.locator(".eq-row .eq-share > .eq-n").all_inner_texts()]
    assert page.locator(".eq-row .eq-bar > span").evaluate_all(widths) == pytest.approx(shares, abs=0.06)


def image_document(weight: float) -> dict[str, Any]:
    """A class token and 16 patches; the class token puts this weight on patch 5."""
    weights = torch.full((1, 17, 17), (1 - weight) / 16)
    weights[0, :, 6] = weight
    tokens = [token("class", False, "class"), *(token(f"{i}") for i in range(16))]
    image = side([]) | {"label": "image", "text": "a.png", "tokens": tokens, "image": picture(4, 4)}
    trace = {"format": "attent-trace", "version": 1, "title": "a.png", "sides": {"image": image}}
    return trace | {"layers": [plain_layer("encoder.blocks.0.self_attn", "image", "image", weights)]}


@pytest.mark.slow
def test_tint_leaves_the_picture_visible_and_its_scale_follows_the_data(open_on: Open) -> None:
    page = open_on(DESK, image_document(0.12))
    canvas = page.locator(".picture-frame canvas")
    strongest = pixel(canvas, 0.375, 0.375)  # patch 5
    assert 100 < strongest[3] <= 0.6 * 255 + 1  # visible, and the picture under it too
    assert pixel(canvas, 0.9, 0.9)[3] < strongest[3]
    assert "12% of the weight" in text(page, ".legend")
    darkest = pixel(page.locator(".map-field canvas"), 6.5 / 17, 0.5)
    weak = open_on(DESK, image_document(0.5))
    assert "50% of the weight" in text(weak, ".legend")
    assert pixel(weak.locator(".map-field canvas"), 6.5 / 17, 0.5) == darkest  # each at full strength
    assert "100% of the weight" in text(open_on(DESK, translation(SOURCE, TARGET)), ".legend")
