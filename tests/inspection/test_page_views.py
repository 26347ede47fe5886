"""The equation, decoding, head statistics and positions views in Chromium."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attent.inspection.attention_trace import pack_array, unpack_array
from attent.inspection.html_page import render_page as page_of

HOSTILE = "<img src=x onerror=alert(1)>"
WIDTH = 8
Open = Callable[..., Any]


# --- documents -------------------------------------------------------------------------------------------------------


def token(text: str, space: bool = True, special: str | None = None) -> dict[str, Any]:
    return {"piece": ("▁" if space else "") + text, "text": text, "space": space, "special": special}


def side(words: list[str], *, start: bool = False, end: bool = False) -> dict[str, Any]:
    tokens = [token("start", False, "start")] if start else []
    tokens += [token(word) for word in words] + ([token("end", False, "end")] if end else [])
    return {"label": "words", "text": " ".join(words), "language": None, "tokens": tokens}


def layer(path: str, queries: str, keys: str, sizes: tuple[int, int], seed: int, **changes: Any) -> dict[str, Any]:
    """A layer with weights computed from its queries and keys."""
    heads, kv_heads = changes.get("heads", 2), changes.pop("kv_heads", changes.get("heads", 2))
    seeded = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(h, t, WIDTH, generator=seeded).half().float()
        for h, t in ((heads, sizes[0]), (kv_heads, sizes[1]), (kv_heads, sizes[1]))
    )
    result: dict[str, Any] = {
        "path": path,
        "stack": path.split(".")[0],
        "layer": 0,
        "kind": "cross" if path.endswith("cross_attn") else "self",
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "causal": False,
        "scale": WIDTH**-0.5,
        "masked_heads": [],
        **changes,
    }
    bias = torch.randn(heads, *sizes, generator=seeded).half().float() if result.pop("biased", False) else None
    result |= {name: pack_array(numbers, "float16") for name, numbers in (("q", q), ("k", k), ("v", v))}
    if bias is not None:
        result["bias"] = pack_array(bias, "float16")
    return result | {"weights": pack_array(worked_out(result)["weights"], "unit16")}


def worked_out(layer: dict[str, Any]) -> dict[str, Tensor]:
    """Equation 1 of the paper, in Python."""
    q, k, v = (unpack_array(layer[name]) for name in "qkv")
    k, v = (entry.repeat_interleave(q.size(0) // k.size(0), 0) for entry in (k, v))
    dots = q @ k.mT
    scores = dots * layer["scale"] + (unpack_array(layer["bias"]) if "bias" in layer else 0)
    if layer["causal"]:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    weights = scores.softmax(-1)
    return {
        "pairwise": dots,
        "scaled": dots * layer["scale"],
        "weights": weights,
        "products": q[:, :, None] * k[:, None],
        "output": weights @ v,
        "v": v,
    }


def option(text: str, number: int, p: float) -> dict[str, Any]:
    return token(text) | {"token": number, "p": p}


def node(id_: int, parent: int | None, step: int, text: str, log_prob: float, **status: Any) -> dict[str, Any]:
    plain = {
        "sum": log_prob * (step + 1),
        "expanded": False,
        "ended": False,
        "score": None,
        "on_best_path": False,
        "in_results": False,
    }
    return (
        {"id": id_, "parent": parent, "step": step, "token": id_, "log_prob": log_prob} | token(text) | plain | status
    )


def decoding() -> dict[str, Any]:
    """The search for "rotes Haus": a second result, an expanded path without a result, and pruned nodes."""
    best, second, gone = (
        {"expanded": True, "on_best_path": True, "in_results": True},
        {"expanded": True, "in_results": True},
        {"expanded": True},
    )
    ended = {"ended": True, "special": "end", "space": False}
    nodes = [
        node(0, None, 0, "rotes", -0.25, **best),
        node(1, None, 0, "Haus", -1.5, **second),
        node(2, None, 0, "ein", -4.0),
        node(3, 0, 1, "Haus", -0.5, **best),
        node(4, 1, 1, "rot", -1.0, **second),
        node(5, 0, 1, "Tier", -3.0, **gone),
        node(6, 1, 1, "im", -6.0),
        node(7, 3, 2, "end", -0.125, **ended, score=-0.4375, on_best_path=True, in_results=True),
        node(8, 4, 2, "end", -0.5, **ended, score=-0.75, in_results=True),
        node(9, 5, 2, "end", -1.0, **ended, score=-2.5),
    ]
    choices = [
        {
            "chosen": 11,
            "p": 0.75,
            "options": [option("rotes", 11, 0.75), option("Haus", 12, 0.2), option(HOSTILE, 13, 0.01)],
        },
        {"chosen": 12, "p": 0.5, "options": [option("Haus", 12, 0.5), option("Tier", 14, 0.4)]},
        {"chosen": 2, "p": 0.9, "options": [option("end", 2, 0.9) | {"special": "end"}]},
    ]
    results = [
        {"text": "rotes Haus", "score": -0.4375, "log_prob": -0.875, "node": 7},
        {"text": "Haus rot", "score": -0.75, "log_prob": -2.0, "node": 8},
    ]
    return {
        "formula": "score = log_prob / length",
        "beam_size": 2,
        "forced": 0,
        "nodes": nodes,
        "results": results,
        "choices": choices,
    }


def head_stats() -> dict[str, Any]:
    columns = [
        {"key": "previous", "label": "previous", "help": "the token before", "unit": "share"},
        {"key": "entropy", "label": "entropy", "help": "bits", "unit": "bits"},
    ]
    measured = {
        ("encoder.blocks.0.self_attn", 0): (0.93, 1.25),
        ("encoder.blocks.0.self_attn", 1): (0.25, 2.5),
        ("decoder.blocks.0.self_attn", 0): (0.5, 0.5),
        ("decoder.blocks.0.cross_attn", 1): (None, 3.5),
    }
    heads = [
        {
            "path": path,
            "head": head,
            "description": f"pattern of {path}",
            "values": {"previous": previous, "entropy": entropy},
        }
        for (path, head), (previous, entropy) in measured.items()
    ]
    return {"sentences": 500, "dataset": "the validation pairs", "columns": columns, "heads": heads}


def document(**changes: Any) -> dict[str, Any]:
    """A translation of "the red <img...> house" by one layer of two heads on each side."""
    sides = {
        "source": side(["red", HOSTILE, "house"], end=True),
        "decoder_input": side(["rotes", "Haus"], start=True),
        "target": side(["rotes", "Haus"], end=True),
    }
    layers = [
        layer("encoder.blocks.0.self_attn", "source", "source", (4, 4), 1),
        layer("decoder.blocks.0.self_attn", "target", "decoder_input", (3, 3), 2, causal=True),
        layer("decoder.blocks.0.cross_attn", "target", "source", (3, 4), 3),
    ]
    at = torch.arange(16)[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    values = torch.stack([at.sin(), at.cos()], -1).flatten(1)
    positions = [
        {
            "stack": stack,
            "scheme": "sinusoidal",
            "applied_as": "embed",
            "formula": "sin(...)",
            "note": "Waves.",
            "width": WIDTH,
            "values": pack_array(values, "float16"),
            "pairwise": pack_array(values @ values.T, "float16"),
        }
        for stack in ("encoder", "decoder")
    ]
    ablation = {
        "sentences": 10,
        "bleu": 40.0,
        "loss": 1.5,
        "parts": [
            {"part": "encoder.blocks.0.self_attn:1", "kind": "head", "bleu": 37.5, "loss": 1.75},
            {"part": "encoder.blocks.0.feedforward", "kind": "sublayer", "bleu": 10.0, "loss": 3.0},
        ],
    }
    return {
        "format": "attent-trace",
        "version": 1,
        "title": "red house",
        "sides": sides,
        "layers": layers,
        "decoding": decoding(),
        "head_stats": head_stats(),
        "ablation": ablation,
        "positions": positions,
    } | changes


# --- helpers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """open(document, tab, ...) returns the loaded page; at the end, fail on console errors and dialogs."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page, troubles = context.new_page(), []
    page.set_default_timeout(5000)
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))

    def open_(document: dict[str, Any], tab: str, **look: Any) -> Any:
        (tmp_path / "page.html").write_text(page_of(document), encoding="utf-8")
        fragment = "&".join(f"{name}={value}" for name, value in ({"tab": tab} | look).items())
        page.goto("about:blank")
        page.goto(f"{(tmp_path / 'page.html').as_uri()}#{fragment}")
        page.wait_for_selector(f"#panel-{tab}:not([hidden])")
        return page

    yield open_
    context.close()
    assert troubles == []


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def soon(page: Any, holds: Callable[[], bool]) -> None:
    """Wait for a condition. (Playwright's wait_for_function evaluates strings, which the page's policy forbids.)"""
    for _ in range(100):
        if holds():
            return
        page.wait_for_timeout(50)
    raise AssertionError("the condition did not hold within 5 seconds")


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf").replace("%", "").lstrip("+"))


def numbers(page: Any, selector: str) -> list[float]:
    return [number(text) for text in texts(page, selector)]


def agree(result: list[float], expected: Tensor, tolerance: float) -> None:
    assert len(result) == expected.numel()
    assert max(abs(a - b) for a, b in zip(result, expected.tolist(), strict=True)) <= tolerance


# --- equation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 2, "heads": 4}, {"biased": True, "scale": 1.0}], ids=["plain", "shared keys", "bias"]
)
def test_equation_equals_python(open_page: Open, changes: dict[str, Any]) -> None:
    entry = layer("encoder.blocks.0.self_attn", "source", "source", (4, 4), 7, **changes)
    page = open_page(document(layers=[entry]), "equation", layer=entry["path"], heads=1, query=2)
    page.wait_for_selector(".eq-row")
    right = worked_out(entry)
    agree(numbers(page, ".eq-row .eq-dot"), right["pairwise"][1, 2], 0.0051)
    agree(numbers(page, ".eq-row .eq-scaled"), right["scaled"][1, 2], 0.0051)
    agree(numbers(page, ".eq-row .eq-weight .eq-n"), 100 * right["weights"][1, 2], 0.051)
    assert texts(page, ".eq-total") == ["1.000"]
    assert page.locator(".eq-note").count() == 0
    if "biased" in changes:
        agree(numbers(page, ".eq-row .eq-bias"), unpack_array(entry["bias"])[1, 2], 0.0051)
        assert "not scaled" in page.locator(".eq-steps").inner_text()
    else:
        assert f"÷ √{WIDTH}" in page.locator(".eq-steps").inner_text()


@pytest.mark.slow
def test_causal_mask_is_shown(open_page: Open) -> None:
    page = open_page(document(), "equation", layer="decoder.blocks.0.self_attn", heads=0, query=1)
    page.wait_for_selector(".eq-row")
    assert [text.replace("−", "-") for text in texts(page, ".eq-row .eq-scaled")][2] == "-∞"
    assert texts(page, ".eq-hidden .eq-masked") == ["masked"]
    assert "decoder input rotes" in page.locator(".eq-says").inner_text()
    page.locator(".eq-word").nth(2).click()
    soon(page, lambda: page.locator(".eq-hidden").count() == 0)


def test_hover_shows_products_and_contributions(open_page: Open) -> None:
    whole = document()
    page = open_page(whole, "equation", layer="encoder.blocks.0.self_attn", heads=0, query=0)
    right = worked_out(whole["layers"][0])
    page.locator(".eq-row").nth(3).hover()
    agree(numbers(page, ".eq-cellrow:nth-child(3) .eq-cell"), right["products"][0, 0, 3], 0.051)
    page.locator(".eq-cellrow:nth-child(3) .eq-cell").nth(5).hover()
    reported = page.locator(".eq-line").inner_text()
    assert abs(number(reported.split("= ")[1]) - right["products"][0, 0, 3, 5].item()) < 0.001
    page.locator(".eq-output").focus()
    page.keyboard.press("ArrowRight")
    assert (
        abs(
            number(re.findall(r"is ([−\d.]+)\.", page.locator(".eq-title").inner_text())[0])
            - right["output"][0, 0, 1].item()
        )
        < 0.001
    )
    parts = sum(numbers(page, ".eq-sources li > .eq-n:last-child"))
    assert abs(parts - right["output"][0, 0, 1].item()) < 0.003


@pytest.mark.slow
def test_equation_view_reports_what_is_missing(open_page: Open) -> None:
    whole = document()
    wrong = 0.5 * worked_out(whole["layers"][0])["weights"] + 0.125
    whole["layers"][0] |= {"weights": pack_array(wrong, "unit16"), "masked_heads": [1]}
    page = open_page(whole, "equation", layer="encoder.blocks.0.self_attn", heads=1)
    page.wait_for_selector(".eq-note")
    assert "masked" in texts(page, ".eq-note")[0]
    assert "differ from the recorded ones" in texts(page, ".eq-note")[1]
    for entry in whole["layers"]:
        del entry["q"], entry["k"], entry["v"]
    page = open_page(whole, "equation")
    page.wait_for_selector(".eq-words button")
    assert "too large" in page.locator(".eq-says").inner_text()
    assert page.locator(".eq-body").is_hidden()
    whole = document()
    for entry in whole["layers"]:
        entry["additive"] = True
    page = open_page(whole, "equation")
    page.wait_for_selector(".eq-words button")
    assert "additive" in page.locator(".eq-says").inner_text()
    assert page.locator(".eq-body").is_hidden()


@pytest.mark.slow
def test_largest_weights_are_listed_first(open_page: Open) -> None:
    entry = layer("encoder.blocks.0.self_attn", "source", "source", (60, 60), 9)
    whole = document(layers=[entry], sides={"source": side([f"w{i}" for i in range(60)])})
    page = open_page(whole, "equation", heads=0, query=5)
    page.wait_for_selector(".eq-row")
    best = worked_out(entry)["weights"][0, 5].topk(14).indices.sort().values.tolist()
    assert texts(page, ".eq-row .eq-pick") == [f"w{i}" for i in best]
    page.locator(".eq-more").click()
    soon(page, lambda: page.locator(".eq-row").count() == 60)


# --- decoding --------------------------------------------------------------------------------------------------------


def test_search_tree_and_results_are_shown(open_page: Open) -> None:
    page = open_page(document(), "decoding")
    assert texts(page, ".dec-word .token") == ["rotes", "Haus", "end"]
    page.locator(".dec-word").nth(0).click()
    assert texts(page, ".dec-option > .token") == ["rotes", "Haus", HOSTILE]
    assert page.locator("button.dec-option").count() == 0, "only a live page can force a word"
    kinds = {kind: page.locator(f".dec-node.dec-{kind}").count() for kind in ("best", "other", "dead", "pruned")}
    assert kinds == {"best": 3, "other": 3, "dead": 2, "pruned": 2}
    page.locator('[data-node="4"]').hover()
    about = page.locator(".dec-about").inner_text()
    assert about.startswith("Haus rot")
    assert "−1.000" in about
    assert "sum −2.000" in about
    assert page.locator(".dec-node.dec-lit").evaluate_all("nodes => nodes.map(n => n.dataset.node)") == ["1", "4"]
    page.locator(".dec-slider").fill("1")
    assert page.locator(".dec-column.dec-later").count() == 2
    assert texts(page, ".dec-results tbody tr td:nth-child(2)") == ["rotes Haus", "Haus rot"]
    assert "score = log_prob / length" in page.locator(".dec-results").inner_text()


@pytest.fixture
def live_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A live server that records requests and returns a translation with the forced prefix."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(page_of(document(live=True)).encode(), "text/html; charset=utf-8")

        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            forced = requests[-1].get("prefix") or []
            whole = document()
            if forced:
                whole["sides"]["target"]["text"] = "rotes Tier"
                whole["sides"]["target"]["tokens"][1] = token("Tier")
                whole["decoding"] |= {"forced": len(forced)}
                whole["decoding"]["choices"][1] |= {"chosen": 14, "p": 0.4}
            self.answer(json.dumps(whole).encode(), "application/json")

        def answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", requests
    server.shutdown()
    server.server_close()


def test_forced_token_is_requested_and_undone(
    browser: Any,
    live_server: tuple[str, list[dict[str, Any]]],
) -> None:
    address, requests = live_server
    page = browser.new_page()
    page.set_default_timeout(5000)
    page.goto(f"{address}#tab=decoding")
    page.locator(".dec-word").nth(1).click()
    page.locator("button.dec-option", has_text="Tier").click()
    page.wait_for_selector(".dec-after ins")
    assert [question.get("prefix") for question in requests if question.get("prefix")] == [[11, 14]]
    assert requests[-1]["text"] == document()["sides"]["source"]["text"]
    assert texts(page, ".dec-after ins") == ["Tier"]
    assert texts(page, ".dec-before") == ["rotes Haus"]
    assert page.locator(".dec-forced").count() == 2
    page.get_by_role("button", name="Undo the last token").click()
    page.wait_for_selector(".dec-change:empty", state="attached")
    assert texts(page, ".dec-word .token") == ["rotes", "Haus", "end"]
    page.close()


# --- head statistics, positions ---------------------------------------------------------------------------------------


def test_head_table_sorts_filters_and_selects(open_page: Open) -> None:
    page = open_page(document(), "head_stats")
    first = ".prop-table tbody tr:first-child th"
    assert page.locator(".prop-table tbody tr").count() == 6
    assert "500 sentences" in page.locator(".prop-about").inner_text()
    page.locator('.prop-sort[data-key="entropy"]').click()
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("entropy")
    assert texts(page, first) == ["cross 0:1"]
    page.keyboard.press("Enter")  # reverses the order; missing values stay last
    assert texts(page, first) == ["decoder self 0:0"]
    assert texts(page, ".prop-table tbody tr:last-child td:nth-child(4)") == ["–"]
    page.locator('.prop-sort[data-key="bleu"]').click()
    assert texts(page, ".prop-table tbody tr:first-child")[0].endswith("−2.5\t+0.250")
    assert texts(page, '.prop-cost[data-part="encoder.blocks.0.feedforward"]') == ["−30.0"]
    page.get_by_role("button", name="cross-attention", exact=True).click()
    assert texts(page, ".prop-table tbody th") == ["cross 0:0", "cross 0:1"]
    page.locator(".prop-table tbody tr").nth(1).click()
    page.wait_for_selector("#panel-heads:not([hidden])")
    soon(page, lambda: "layer=decoder.blocks.0.cross_attn&heads=1" in page.url)


def test_head_statistics_and_positions_need_no_sentence(open_page: Open) -> None:
    page = open_page(document(layers=[], sides={}, decoding=None), "head_stats")
    assert texts(page, ".prop-table tbody th") == [
        "encoder self 0:0",
        "encoder self 0:1",
        "decoder self 0:0",
        "cross 0:0",
        "cross 0:1",
    ]
    assert page.locator(".prop-go").count() == 0, "there is no picture of a head to go to"
    page.locator("#tab-positions").click()
    page.locator(".pos-values canvas").wait_for()


@pytest.mark.slow
def test_positions_view_shows_values(open_page: Open) -> None:
    whole = document()
    page = open_page(whole, "positions")
    page.wait_for_selector(".pos-values canvas")
    assert "encoder and the decoder" in page.locator(".pos-about h2").inner_text()
    assert texts(page, ".pos-here") == ["position"]
    values = unpack_array(whole["positions"][0]["values"])
    box = page.locator(".pos-values canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 5.5 / WIDTH, box["y"] + box["height"] * 2.5 / 16)
    reported = page.locator(".pos-values .pos-say").inner_text()
    assert reported.startswith("position 2 (“house”), dimension 5: ")
    assert abs(number(reported.split(": ")[1]) - values[2, 5].item()) < 0.001
    before = page.locator(".pos-values .pos-line").first.get_attribute("d")
    page.locator(".pos-word").nth(1).click()
    assert page.locator(".pos-values .pos-line").first.get_attribute("d") != before
    page.locator(".pos-pairwise canvas").focus()
    page.keyboard.press("ArrowDown")
    reported = page.locator(".pos-pairwise .pos-say").inner_text()
    assert abs(number(reported.rsplit(": ", 1)[1]) - (values @ values.T)[1, 0].item()) < 0.01


def test_hostile_and_right_to_left_tokens_in_every_view(open_page: Open) -> None:
    whole = document()
    whole["sides"]["target"] = side(["בית", "אדום"], end=True)
    whole["head_stats"]["heads"][0]["description"] = HOSTILE
    whole["positions"][0]["note"] = HOSTILE
    whole["decoding"]["nodes"][2]["text"] = "</script><script>alert(2)</script>"
    for tab, position in (
        ("equation", ".eq-row .eq-pick"),
        ("decoding", ".dec-option"),
        ("head_stats", ".prop-description"),
        ("positions", ".pos-about p"),
    ):
        page = open_page(whole, tab, layer="encoder.blocks.0.self_attn")
        if tab == "decoding":
            assert page.locator(".dec-words").get_attribute("dir") == "rtl"
            page.locator(".dec-word").nth(0).click()
        page.locator(position, has_text=HOSTILE).first.wait_for()
        assert page.locator("main img, main script").count() == 0
