"""The HTML file is self-contained, loads nothing and escapes everything."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

from attent.inspection import html_page
from attent.inspection.attention_trace import DisplayToken, TraceSide, build_document
from attent.inspection.html_page import (
    build_live_csp,
    bundle_modules,
    collect_modules,
    encode_json_for_html,
    load_assets,
    read_page_file,
    render_page,
)

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>",
    "<img src=x onerror=alert(1)>",
    "\u2028",
    "\ud800",
    "&lt;",
]


def hostile() -> dict[str, Any]:
    side = TraceSide(
        label="source", text="".join(HOSTILE), tokens=tuple(DisplayToken(piece, piece) for piece in HOSTILE)
    )
    return build_document("".join(HOSTILE), {"source": side}, [])


class Reader(HTMLParser):
    """Collects scripts, styles, links and the policy."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.blocks: list[tuple[str, dict[str, str | None], str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self.blocks.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style", "title") and self.blocks:
            tag, attrs, text = self.blocks[-1]
            self.blocks[-1] = (tag, attrs, text + data)

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", {}))


def test_embedded_document_round_trips() -> None:
    blocks = Reader(render_page(hostile())).blocks
    (data,) = [text for tag, attrs, text in blocks if attrs.get("id") == "document"]
    assert json.loads(data) == hostile()
    assert sum(tag == "script" for tag, _, _ in blocks) == 2, "the document and the program, and no script of a token"
    assert not re.search("[<>&]", data)


def test_policy_allows_only_this_script_and_style() -> None:
    reader = Reader(render_page(hostile()))
    (policy,) = [attrs["content"] or "" for tag, attrs in reader.tags if attrs.get("http-equiv")]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "connect-src" not in policy, "a file makes no requests"
    assert "connect-src 'self'" in build_live_csp()
    for tag, attrs, text in reader.blocks:
        if tag == "style" or attrs.get("type") == "module":
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy


def test_page_loads_nothing() -> None:
    text = render_page(hostile())
    reader = Reader(text)
    links = [attrs for _, attrs in reader.tags if {"src", "href"} & attrs.keys()]
    assert all((attrs.get("href") or attrs.get("src") or "").startswith(("#", "data:")) for attrs in links)
    style, script = load_assets()
    assert not re.search(r"url\((?!['\"]?data:)|@import", style)
    assert not re.search(r"https?://(?!www\.w3\.org/)", script), "names of SVG are no addresses to fetch"


def test_scripts_never_write_markup() -> None:
    """No script turns a string into HTML or code."""
    _, script = load_assets()
    assert not re.search(r"\.(innerHTML|outerHTML|insertAdjacentHTML)\b|document\.write|\beval\(|new Function", script)


def test_modules_are_bundled_in_import_order() -> None:
    modules: dict[str, str] = {}
    collect_modules("main.js", modules)
    assert list(modules)[-1] == "main.js"
    order = list(modules)
    for file in order:
        for _, other in html_page.IMPORT_PATTERN.findall(read_page_file(file)):
            assert order.index(other) < order.index(file)


def test_the_bundle_is_one_script_with_unique_names() -> None:
    """Two modules with the same top-level name, or another form of import or export, would break the page."""
    script = bundle_modules("main.js")
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", script, re.MULTILINE)
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert "</script" not in script.lower()
    assert "<!--" not in script


def test_embedded_json_has_no_markup() -> None:
    assert encode_json_for_html({"a": "<>&\u2028\ud800é"}) == '{"a":"\\u003c\\u003e\\u0026\\u2028\\ud800é"}'
