"""Formats that attent does not read are refused by name; ordinary text is not."""

from __future__ import annotations

import random

import pytest

from attent.data.formats.registry import check_plain_text, detect_unsupported, sniff_format
from attent.data.pairs import CorpusError

HEADS = {  # beginnings of files, and what they are called
    '<?xml version="1.0"?>\n<!DOCTYPE TS>\n<TS>': "a Qt translation file",
    '<?xml version="1.0"?>\n<resources>': "an XML file",
    "1\n00:00:01,000 --> 00:00:02,000\nHello\n": "an SRT subtitle file",
    "WEBVTT\n\n00:01.000 --> 00:02.000\nHello": "a WebVTT subtitle file",
    "[Script Info]\nTitle: x": "a subtitle file",
    "{1}{25}Hello": "a subtitle file",
    '{"a": "b"}': "JSON",
    '{\n  "a": {\n': "JSON",
    '[\n  {"a": 1}': "JSON",
    '["a", "b"]': "JSON",
    '{"a": "b"}\n{"a": "c"}\n': "JSON",
    '{"a": "cut he': "JSON",
    '<resources><string name="a">b</string></resources>': "an XML file",
    '<svg xmlns="x"/>': "an XML file",
    "<rss><channel>": "an XML file",
    "00:00:01,000 --> 00:00:02,000\nHi\n": "an SRT subtitle file",
    "00:01.000 --> 00:02.000\nHi\n": "an SRT subtitle file",
    "WEBVTT - A title\n\n00:01.000 --> 00:02.000\nHello": "a WebVTT subtitle file",
    "%PDF-1.7\n": "a PDF file",
    "{\\rtf1\\ansi": "an RTF file",
    "PK\x03\x04\x14": "an office document or another ZIP archive",
    '/* x */\n"a" = "b";\n': "an Apple strings file",
    "\\documentclass{article}": "a LaTeX document",
}
PAGES = [
    "<!DOCTYPE html>\n<html>",
    '<?xml version="1.0"?>\n<!-- x -->\n<html xmlns="a">',
    "  <HTML>\n",
    "<body>\n<p>x</p>",
    '<div class="a"><p>Hello</p></div>\n',
    "<p>Hello</p>\n",
]
TEXTS = [
    "Hello, world. It is a fine day, is it not?",
    "{x} is a set.",
    "{ braces } and so on",
    "<b>Bold</b> words, a <i>few</i>",
    "<3 you",
    "a < b",
    "[Music]",
    "[1] Smith et al., 2020",
    '["Hello," he said, and left.]',
    '"Quoted," she said.',
    "1\nAn item of a list",
    "00:00 was the time",
    "red, green, blue\nbig, small, tiny\n",
    "Yes,no\nBlack,white\n",
    "% of all people",
    "--- a dash",
    "# A heading",
    "msgid is a keyword of gettext",
    "key = value",
    "WEBVTT is a format.\n",
    '["Quoted"] text in brackets\n',
    "[12:30:45] text\n",
    '{"a": 1} is JSON\n',
    "One,two,three\nfour,five,six\n",
    "<p> is a tag\n",
    "Well, yes\nNo, sir\nOh, well\n",
    "",
]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_format_is_known_by_its_beginning(head: str, encoding: str) -> None:
    spec = detect_unsupported("text.txt", head.encode(encoding))
    assert spec is not None
    assert spec.title == HEADS[head]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("a.srt.gz", "an SRT subtitle file"),
        ("a.vtt", "a WebVTT subtitle file"),
        ("a.json", "JSON"),
        ("a.csv", "CSV"),
        ("a.docx", "an office document or another ZIP archive"),
        ("a.doc", "an office document"),
        ("messages.properties", "a properties file"),
        ("a.yml", "a settings file"),
        ("a.resx", "an XML file"),
        ("a.rst", "a markup document"),
    ],
)
def test_format_is_known_by_its_name(name: str, title: str) -> None:
    spec = detect_unsupported(name, b"Hello.\n")
    assert spec is not None
    assert spec.title == title


@pytest.mark.parametrize(
    ("head", "title"),
    [
        (b"\xd0\xcf\x11\xe0\xa1", "office"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "office"),
        (b"\xde\x12\x04\x95\0", "compiled"),
        (b"\x95\x04\x12\xde\0", "compiled"),
    ],
)
def test_binary_format_is_known_by_its_beginning(head: bytes, title: str) -> None:
    spec = detect_unsupported("a", head)
    assert spec is not None
    assert title in spec.title


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["standard input", "a.txt", "corpus.en", "corpus.ts", "a", "a.html.txt"])
def test_ordinary_text_is_accepted(text: str, name: str) -> None:
    check_plain_text(text.encode(), name)


def test_random_prose_is_accepted() -> None:
    rng = random.Random(1)
    words = [
        "a",
        "The",
        "{x}",
        "<b>",
        "[1]",
        '"Yes,"',
        "1,5",
        "no;",
        "(x)",
        "50%",
        "A:",
        "B,",
        "-->",
        "=",
        "&",
        "Ärger",
    ]
    for _ in range(3000):
        text = "\n".join(" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 5)))
        check_plain_text(text.encode(), "a.txt")


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        ('msgid ""\nmsgstr ""\n', "is PO: give it as a file whose name ends in .po"),
        ("<tmx version='1.4'>", "is TMX: give it as a file whose name ends in .tmx"),
        ("<?xml version='1.0'?><xliff>", "is XLIFF: give it as a file whose name ends in .xliff"),
        *((head, "is HTML: give it as a file whose name ends in .html") for head in PAGES),
    ],
)
def test_refusal_says_what_to_do(content: str, advice: str) -> None:
    with pytest.raises(CorpusError, match=rf"must be text, but {advice}.* or add --input-type lines"):
        check_plain_text(content.encode(), "standard input")


@pytest.mark.parametrize("name", ["a.csv", "a.html", "a.srt", "a.docx", "a.json"])
def test_corpus_in_another_format_is_named(name: str) -> None:
    with pytest.raises(CorpusError, match=r"and not parallel text: convert it to one of .tsv"):
        sniff_format(b"Hello\n", name)


def test_columns_are_a_corpus_whatever_their_name() -> None:
    assert sniff_format(b"Hello\tHallo\n", "a.csv") == "tsv"
