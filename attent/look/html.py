"""One HTML file that holds everything: the page, its style, its program and the document that it shows.

The program is written as plain ES modules in `page/`. A file that is opened from disk may not import others, so they
are joined here into one module, in the order of their imports; names at their top level are unique (`joined` refuses
others). Nothing is fetched: a strict content security policy allows just this style and this program, by their hashes.
The document goes in as JSON in a block that is data, with every `<` escaped: no text in it can end the block.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

MAIN = "main.js"
STYLES = ("style.css", "views.css")
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?function|const|let|class)", re.MULTILINE)
NAMED = re.compile(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", re.MULTILINE)
UNPACKED = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(document: dict[str, Any]) -> str:
    """The page of a document; with `"live": true` in it, one that asks its server for more."""
    style, script = parts()
    policy = policy_of(style, script, live=bool(document.get("live")))
    title = " ".join(["attent look", *([document["title"][:80]] if document.get("title") else [])])
    blocks = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "title": f"<title>{escaped(title)}</title>",
        "style": f"<style>{style}</style>",
        "document": f'<script type="application/json" id="document">{embedded(document)}</script>',
        "script": f'<script type="module">{script}</script>',
    }
    return re.sub(r"<!--(\w+)-->", lambda match: blocks.get(match[1], match[0]), text_of("index.html"))


def policy_of(style: str, script: str, *, live: bool) -> str:
    asked = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:{asked}; "
        "base-uri 'none'; form-action 'none'"
    )


def live_policy() -> str:
    """What the server says in its header, for pages of its own."""
    return policy_of(*parts(), live=True) + "; frame-ancestors 'none'"


@functools.cache
def parts() -> tuple[str, str]:
    """All style, and all of the program."""
    return "\n".join(text_of(name) for name in STYLES), joined(MAIN)


def joined(main: str) -> str:
    """The modules that `main` imports, and it, as one."""
    modules: dict[str, str] = {}
    collect(main, modules, ())
    names: dict[str, str] = {}
    for file, code in modules.items():
        for name in NAMED.findall(code):
            if name in names:
                raise ValueError(f"page/{file}: `{name}` is at the top level of {names[name]} too; rename one")
            names[name] = file
    return "\n".join(modules.values())


def collect(file: str, modules: dict[str, str], within: tuple[str, ...]) -> None:
    """A module behind those that it imports, without the words that only separate files need."""
    if file in within:
        raise ValueError(f"page/{file}: imports itself by way of {' -> '.join(within)}")
    if file in modules:
        return
    source = text_of(file)
    for _, other in IMPORT.findall(source):
        collect(other, modules, (*within, file))
    code = EXPORT.sub("", IMPORT.sub("", source))
    left = UNPACKED.search(code)
    if left:
        raise ValueError(f'page/{file}: `{left[0]}` cannot be joined; write import {{ a, b }} from "./file.js"')
    if "</script" in code.lower() or "<!--" in code:
        raise ValueError(f"page/{file}: must not hold the end of a script or a comment of HTML; spell it otherwise")
    modules[file] = code


def text_of(name: str) -> str:
    return (files("attent.look") / "page" / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(document: dict[str, Any]) -> str:
    """JSON that HTML reads as nothing else; half a surrogate pair, which UTF-8 cannot hold, stays escaped."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)
    return re.sub("[<>&\u2028\u2029]", lambda sign: UNSAFE[sign[0]], text)


def escaped(text: str) -> str:
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
