"""Render a trace document as one self-contained HTML file.

The ES modules in `page/` are bundled into one script, since a page opened from disk cannot import modules: their
top-level names must be unique, and they import by `import { a, b } from "./file.js";` only. A content security policy
allows only this style and script, by their hashes, and no network access. The document is embedded as JSON with every
`<` escaped.
"""

import base64
import functools
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

ENTRY_MODULE = "main.js"
STYLESHEETS = ("style.css", "views.css")
IMPORT_PATTERN = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
EXPORT_PATTERN = re.compile(r"^export (?=(?:async )?function|const|let|class)", re.MULTILINE)
LONE_SURROGATES, REPLACEMENT_CHARACTER = re.compile("[\ud800-\udfff]"), "\ufffd"
JSON_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_page(document: dict[str, Any]) -> str:
    """Return the HTML of a document; with `"live": true`, the page sends requests to its server."""
    style, script = load_assets()
    policy = build_csp(style, script, live=bool(document.get("live")))
    title = " ".join(["attent look", *([document["title"][:80]] if document.get("title") else [])])
    blocks = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "title": f"<title>{html.escape(LONE_SURROGATES.sub(REPLACEMENT_CHARACTER, title))}</title>",
        "style": f"<style>{style}</style>",
        "document": f'<script type="application/json" id="document">{encode_json_for_html(document)}</script>',
        "script": f'<script type="module">{script}</script>',
    }
    return re.sub(r"<!--(\w+)-->", lambda match: blocks.get(match[1], match[0]), read_page_file("index.html"))


def build_csp(style: str, script: str, *, live: bool) -> str:
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; script-src '{compute_csp_hash(script)}'; style-src '{compute_csp_hash(style)}'; "
        f"img-src data:{connect}; base-uri 'none'; form-action 'none'"
    )


def build_live_csp() -> str:
    return build_csp(*load_assets(), live=True) + "; frame-ancestors 'none'"


@functools.cache
def load_assets() -> tuple[str, str]:
    return "\n".join(read_page_file(name) for name in STYLESHEETS), bundle_modules(ENTRY_MODULE)


def bundle_modules(entry: str) -> str:
    modules: dict[str, str] = {}
    collect_modules(entry, modules)
    return "\n".join(modules.values())


def collect_modules(file: str, modules: dict[str, str]) -> None:
    source = read_page_file(file)
    for _, other in IMPORT_PATTERN.findall(source):
        if other not in modules:
            collect_modules(other, modules)
    modules[file] = EXPORT_PATTERN.sub("", IMPORT_PATTERN.sub("", source))


def read_page_file(name: str) -> str:
    return (files("attent.inspection") / "page" / name).read_text(encoding="utf-8")


def compute_csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def encode_json_for_html(document: dict[str, Any]) -> str:
    """Encode JSON that is safe inside HTML; lone surrogates, which UTF-8 cannot encode, stay escaped."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = LONE_SURROGATES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return re.sub("[<>&\u2028\u2029]", lambda match: JSON_ESCAPES[match[0]], text)
