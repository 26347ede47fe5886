"""Generated documents of each format.

A document knows its pieces, so that every byte outside of its texts is known, and the values that a parser of
another project (or a few lines here) must read from it before and after translation.
"""

from __future__ import annotations

import csv
import html
import io
import json
import random
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import yaml
from translate.storage import properties

WORDS = [
    "Open",
    "the",
    "file",
    "Straße",
    "naïve",
    "100",
    "שלום",
    "مرحبا",
    "日本語",
    "𝒳",
    "e\u0301",
    "don't",
    "a",
    "Yes.",
]
SIGNS = [
    *'"&;:,#=!?\\@|',
    "it's",
    '"quoted"',
    "a: b",
    "- x",
    "# y",
    "R&D",
    "C:\\x",
    "100%",
    "& more",
    "<3",
    "[z]",
    "''",
]
NAMED = ["{name}", "%s", "%1$s", "${x}", "{{y}}", "https://a.example/b?c=d"]


def translate_in_parentheses(texts: Sequence[str]) -> list[str]:
    return [f"({text})" for text in texts]


def make_text(rng: random.Random, inner: Sequence[str] = (), *, avoid: str = "") -> str:
    """Return words, signs and `inner` (placeholders, markup), with a word at both ends."""
    choice = [part for part in [*WORDS, *WORDS, *SIGNS, *inner, *inner] if not set(avoid) & set(part)]
    return " ".join([rng.choice(WORDS[:3]), *rng.choices(choice, k=rng.randint(0, 7)), rng.choice(WORDS[:3])])


@dataclass
class Document:
    """The pieces of a file, None for a text, and its values before and after translation."""

    raw: str = ""
    pieces: list[str | None] = field(default_factory=lambda: [""])
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    def add(self, raw: str) -> None:
        """Add what is not translated."""
        self.raw += raw
        self.pieces += [raw]

    def keep(self, value: str, raw: str) -> None:
        """Add a value that is not translated."""
        self.add(raw)
        self.before.append(value)
        self.after.append(value)

    def translate(self, value: str, raw: str, after: str | None = None) -> None:
        self.raw += raw
        self.pieces.append(None)
        self.before.append(value)
        self.after.append(f"({value})" if after is None else after)

    @property
    def pattern(self) -> str:
        """Matches a file with other texts."""
        return "".join("(.*?)" if piece is None else re.escape(piece) for piece in self.pieces)


# Subtitles


def make_subtitles(rng: random.Random, *, is_vtt: bool) -> Document:
    document, separator = Document(), "." if is_vtt else ","
    document.add("WEBVTT - Title\n\nSTYLE\n::cue(b) { color: red }\n\nNOTE a note\n\n" if is_vtt else "")
    for number in range(rng.randint(1, 12)):
        start, end = (f"00:{number:02}:0{digit}{separator}000" for digit in (1, 3))
        document.add(f"{number + 1}\n{start} --> {end}{rng.choice([' align:start', '']) if is_vtt else ''}\n")
        for _ in range(rng.choice((1, 1, 2))):
            before, after = rng.choice(
                [("", ""), ("<i>", "</i>"), ("- ", ""), ("{\\an8}", ""), ("♪ ", " ♪"), ("- <i>", "</i>")]
            )
            avoid = "!?日<&" if is_vtt else "!?日"
            text = make_text(rng, ["<i>so</i>", "<b>an <u>x</u></b>", *NAMED], avoid=avoid).replace("Yes.", "Yes")
            text = re.sub(r"(?<= )- x", "x", text) + rng.choice([".", "?", "!"])
            document.add(before if before.startswith("- ") else f"- {before}")
            document.translate(text, text.replace(" ", rng.choice([" ", "\n", " \n"]), 1))
            document.add(f"{after}\n")
        document.add("\n")
    return document


def parse_subtitles(content: bytes) -> list[str]:
    cues = re.findall(r"-->[^\n]*\n(.*?)\n\n", content.decode() + "\n\n", re.DOTALL)
    speakers = (part for cue in cues for part in re.split(r"^- ", cue, flags=re.MULTILINE)[1:])
    peeled = (re.fullmatch(r"(?:<i>|\{\\an8\}|♪ )?(.*?)(?:</i>| ♪)?\n*", part, re.DOTALL) for part in speakers)
    return [html.unescape(" ".join(part[1].split())) for part in peeled if part]


# Strings of programs


def make_json(rng: random.Random) -> Document:
    document, ensure_ascii = Document(), rng.random() < 0.3

    def add_value(depth: int) -> None:
        kind = rng.randrange(7 if depth < 4 else 4)
        if kind < 3:
            text = make_text(rng, [*NAMED, "<b>x</b>", "&amp;"])
            document.translate(text, json.dumps(text, ensure_ascii=ensure_ascii))
        elif kind == 3:
            value = rng.choice(["a.png", "en_US", "#fff", "image/png", "", "12:30", "https://a.example/"])
            document.keep(value, json.dumps(value))
        elif kind == 4:
            document.add(rng.choice(["12", "-1.5e3", "true", "null", "[]", "{}"]))
        else:
            is_list = kind == 5
            document.add("[" if is_list else "{")
            for number in range(rng.randint(1, 4)):
                document.add(rng.choice([",", " ,\n\t"]) if number else "")
                document.add("" if is_list else f'"key \\"{number}\\u00e9"{rng.choice([":", " : "])}')
                add_value(depth + 1)
            document.add("]" if is_list else "}")

    document.add('{"é": ')
    add_value(0)
    document.add(', "@x": {"description": "not this"}}\n')
    return document


def parse_json(content: bytes) -> list[str]:
    def list_strings(value: object) -> list[str]:
        if isinstance(value, str):
            return [value]
        children = value if isinstance(value, list) else []
        children = [item for key, item in value.items() if key != "@x"] if isinstance(value, dict) else children
        return [text for child in children for text in list_strings(child)]

    return list_strings(json.loads(content))


def make_yaml(rng: random.Random) -> Document:
    document = Document()
    document.add("# a comment: é\nen:\n")
    for number in range(rng.randint(1, 10)):
        key = rng.choice([f"key {number}", f'"quoted {number}"', f"'é{number}'"])
        document.add(f"  {key}: ")
        text, kind = make_text(rng, NAMED), rng.randrange(8)
        if kind == 0:
            document.translate(text, json.dumps(text, ensure_ascii=False))
        elif kind == 1:
            document.translate(text, "'{}'".format(text.replace("'", "''")))
        elif kind == 2:
            text = make_text(rng, avoid="#:,[]{}\"'&!|%@-")
            document.translate(text, text.replace(" ", "\n    ", 1) if rng.random() < 0.5 else text)
        elif kind == 3:
            lines, tail = [text, make_text(rng)], rng.choice(["", "-", "+"])
            end = "" if tail == "-" else "\n"
            after = "\n".join(f"({line})" for line in lines) + end
            document.translate("\n".join(lines) + end, f"|{tail}\n      {lines[0]}\n      {lines[1]}", after)
        elif kind == 4:
            document.translate(f"{text} end\n", f">\n    {text}\n    end", f"({text} end)\n")
        elif kind == 5:
            document.add("[12, true, ")
            document.translate(text, json.dumps(text, ensure_ascii=False))
            document.add(", 2020-01-01]  # comment")
        elif kind == 6:
            document.add(f"&a{number} !!str ")
            document.translate("some words", "some words")
        else:
            value = rng.choice(["a/b.png", "en_US"])
            document.keep(value, value)
        document.add("\n")
    document.add("# the end\n")
    return document


def parse_yaml(content: bytes) -> list[str]:
    values = yaml.safe_load(content)["en"].values()
    return [value[2] if isinstance(value, list) else value for value in values]


def make_properties(rng: random.Random) -> Document:
    document = Document()
    document.add("# comment é = x\n! another\n\n" if rng.random() < 0.5 else "# comment\n")
    is_ascii = document.raw.isascii()
    for number in range(rng.randint(1, 10)):
        document.add(f"{rng.choice(['', '  '])}key.{number}{rng.choice(['=', ' = ', ': '])}")
        is_pattern = rng.random() < 0.4
        text = make_text(rng, ["{0}", "{1,number}"] if is_pattern else NAMED, avoid="𝒳\\" if is_pattern else "\\")
        value = text.replace("'", "''") if re.search(r"\{\d", text) else text
        raw = value.encode("ascii" if is_ascii else "utf-8", "backslashreplace").decode()
        raw = re.sub(r"\\x(..)", r"\\u00\1", raw).replace("\\U0001d4b3", "\\ud835\\udcb3")
        middle = raw.find(" ") + 1
        raw = raw[:middle] + "\\\n    " + raw[middle:] if rng.random() < 0.3 else raw
        document.translate(value, raw)
        document.add("\n")
    return document


def parse_properties(content: bytes) -> list[str]:
    store = properties.javautf8file()
    store.parse(content)
    texts = (unit.source for unit in store.units if unit.name)
    return [text.encode("utf-16", "surrogatepass").decode("utf-16") for text in texts]


def make_apple_strings(rng: random.Random) -> Document:
    document = Document()
    for number in range(rng.randint(1, 10)):
        document.add(rng.choice(['/* a comment "x" = "y"; */\n', "// another\n", ""]))
        document.add(f'"key \\"{number}" = "')
        text = make_text(rng, ["%@", "%1$@", "%ld"])
        document.translate(text, text.replace("\\", "\\\\").replace('"', '\\"'))
        document.add('";\n')
    return document


def parse_apple_strings(content: bytes) -> list[str]:
    texts = re.findall(r'^"(?:[^"\\]|\\.)*" = "((?:[^"\\]|\\.)*)";$', content.decode(), re.MULTILINE)
    return [re.sub(r"\\(.)", r"\1", text) for text in texts]


def make_android(rng: random.Random) -> Document:
    document = Document()
    document.add('<?xml version="1.0" encoding="utf-8"?>\n<!-- é -->\n')
    document.add('<resources xmlns:xliff="urn:oasis:names:tc:xliff:document:1.2">\n')
    for number in range(rng.randint(1, 8)):
        kind = rng.randrange(4)
        if kind == 3:
            document.add(
                '  <string name="x" translatable="false">Acme words</string>\n<string name="y">@string/z</string>\n'
            )
            continue
        text = make_text(rng, ["%1$s", "%d", "<b>so</b>", '<xliff:g id="x" example="1">%2$s</xliff:g>'], avoid="\\@")
        raw = "".join(
            part if part.startswith("<") and len(part) > 2 else escape(re.sub("['\"]", r"\\\g<0>", part))
            for part in re.split(r"(</?[bx][^<>]*>)", text)
        )
        tag = "string" if kind else "item"
        document.add('  <plurals name="p">' if kind == 0 else "")
        if kind == 0:
            document.add('<item quantity="one">')
            document.translate("A file", "A file")
            document.add("</item>")
        document.add(f'<string name="s{number}">' if kind else '<item quantity="other">')
        document.translate(text, raw)
        document.add(f"</{tag}>{'' if kind else '</plurals>'}\n")
    document.add("</resources>\n")
    return document


def parse_android(content: bytes) -> list[str]:
    root = ElementTree.fromstring(content)
    texts = []
    for element in root.iter():
        if element.tag in ("string", "item") and element.get("name") not in ("x", "y"):
            inner = element.text or ""
            for child in element:
                start = "<b>" if child.tag == "b" else '<xliff:g id="x" example="1">'
                inner += f"{start}{child.text}</{start[1:].partition(' ')[0].rstrip('>')}>{child.tail}"
            texts.append(re.sub(r"\\(.)", r"\1", inner))
    return texts


# Tables and Word documents


def make_table(rng: random.Random) -> Document:
    delimiter, document = rng.choice(",;\t"), Document()
    document.add(delimiter.join(["id", '"a ""note"", here"', "text", "more text"]) + "\r\n")
    for number in range(rng.randint(1, 10)):
        document.add(f'{number}{delimiter}"not, {delimiter} ""this"""{delimiter}')
        for is_last in (False, True):
            text = make_text(rng, NAMED)
            if delimiter in text or '"' in text or rng.random() < 0.3:
                document.add('"')
                document.translate(text, text.replace('"', '""'))
                document.add('"')
            else:
                document.translate(text, text)
            document.add("\r\n" if is_last else delimiter)
    return document


def parse_table(content: bytes) -> list[str]:
    text = content.decode()
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=text[2]))
    return [cell for row in rows[1:] for cell in row[2:]]


_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def make_docx(rng: random.Random) -> Document:
    """Return the main part of a document; `pack_docx` adds the archive."""
    document = Document()
    document.add(f'<?xml version="1.0"?>\n<w:document xmlns:w="{_WORD}"><w:body>')
    for _ in range(rng.randint(1, 6)):
        document.add('<w:p w:rsidR="1"><w:pPr><w:jc w:val="left"/></w:pPr>')
        value, raw = "", ""
        for number, word in enumerate(
            ["Introduction", "of-everything-that-follows", *make_text(rng, avoid="<").split(), "conclusions"]
        ):
            kind = rng.randrange(9) if number > 1 else 9
            is_link, is_bold = kind == 0, kind == 1
            text = word if not number else f" {word}"
            shown = f"<b>{text}</b>" if is_bold else f"<a>{text}</a>" if is_link else text
            run = _make_run(
                text,
                rng.choice(["", "<w:rPr/>", '<w:rPr><w:lang w:val="en"/></w:rPr>'])
                if not is_bold
                else "<w:rPr><w:b/></w:rPr>",
            )
            raw += f'<w:hyperlink w:anchor="x">{run}</w:hyperlink>' if is_link else run
            if kind == 2 and word != "conclusions":
                shown, raw = f"{shown}<n/>", f'{raw}<w:r><w:footnoteReference w:id="2"/></w:r>'
            raw += '<w:proofErr w:type="spellStart"/>' if kind == 3 else ""
            value += shown
        value = value.replace("</b><b>", "")
        document.translate(value, raw, f"({value})")
        document.add("</w:p>" + rng.choice(["", "<w:p/>", "<w:tbl><w:tr><w:tc><w:p/></w:tc></w:tr></w:tbl>"]))
    document.add("<w:sectPr/></w:body></w:document>")
    return document


def _make_run(text: str, rpr: str) -> str:
    return f'<w:r w:rsidR="2">{rpr}<w:t xml:space="preserve">{escape(text)}</w:t></w:r>'


def pack_docx(document: str | bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/media/image1.png", b"\x89PNG")
        archive.writestr("word/document.xml", document)
    return buffer.getvalue()


def unpack_docx(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.read("word/media/image1.png") == b"\x89PNG"
        return archive.read("word/document.xml")


def parse_docx(content: bytes) -> list[str]:
    texts = []
    for paragraph in ElementTree.fromstring(content).iter(f"{{{_WORD}}}p"):
        text = ""
        for child in paragraph:
            runs = list(child) if child.tag.endswith("hyperlink") else [child]
            shown = "".join(_show_run(run) for run in runs if run.tag.endswith("}r"))
            text += f"<a>{shown}</a>" if child.tag.endswith("hyperlink") else shown
        texts += [text.replace("</b><b>", "")] if text else []
    return texts


def _show_run(run: ElementTree.Element) -> str:
    text = "".join(node.text or "" for node in run.iter(f"{{{_WORD}}}t"))
    text += "<n/>" if run.find(f"{{{_WORD}}}footnoteReference") is not None else ""
    return f"<b>{text}</b>" if run.find(f"{{{_WORD}}}rPr/{{{_WORD}}}b") is not None else text


@dataclass(frozen=True)
class DocumentFormat:
    make: Callable[[random.Random], Document]
    parse: Callable[[bytes], list[str]]  # the values of a file
    fields: tuple[str, ...] = ()
    pack: Callable[[str], bytes] = str.encode  # from what `make` returns to a file
    unpack: Callable[[bytes], bytes] = bytes


FORMATS = {
    "a.srt": DocumentFormat(lambda rng: make_subtitles(rng, is_vtt=False), parse_subtitles),
    "a.vtt": DocumentFormat(lambda rng: make_subtitles(rng, is_vtt=True), parse_subtitles),
    "a.json": DocumentFormat(make_json, parse_json),
    "a.yaml": DocumentFormat(make_yaml, parse_yaml),
    "a.properties": DocumentFormat(make_properties, parse_properties),
    "a.strings": DocumentFormat(make_apple_strings, parse_apple_strings),
    "strings.xml": DocumentFormat(make_android, parse_android),
    "a.csv": DocumentFormat(make_table, parse_table, fields=("text", "more text")),
    "a.docx": DocumentFormat(make_docx, parse_docx, pack=pack_docx, unpack=unpack_docx),
}
