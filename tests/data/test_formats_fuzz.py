"""Fuzz tests: each reader on ten thousand broken files must not crash or hang, and must yield valid text."""

from __future__ import annotations

import gzip
import io
import itertools
import lzma
import random
import sys
import time
from collections.abc import Iterable
from itertools import chain

import pytest

from attent.data.formats import jsonl, po, registry, streams, tmx, tsv, xliff
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair, ReadOptions
from attent.data.pretranslate import pretranslate_file
from tests.data import document_cases, fuzz
from tests.data.document_cases import translate_in_parentheses
from tests.data.pretranslate_cases import project_reversed

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ASKED = LanguagePair("en", "de")

TSV = [
    'en\tde\nHello\tHallo\n"a ""b"""\tc\tx\n\nonly one\nü\tß\r\nlast\tline'.encode(),
    "source\ttarget\nHello\tHallo\n".encode("utf-16"),
    b'id\ten\tde\n1\t"a\nb ""c"""\td\n2\t"e\tf"\t"g\nh"\n3\ti\tj\r',
    "Hello, world\tHallo Welt\nShe said \u2028 yes\tSie sagte ja\n\x85\t\x0c\n".encode(),
]
JSONL = [
    b'{"src": "a", "tgt": "b"}\n{"translation": {"en": "c", "de": "d"}}\n{"en": "\\u00e4\\ud83d\\ude00", "de": "e"}\n',
    b'{"source": "x\\ty", "target": "\\"z\\""}\n[1, 2]\n\n{"en": 1, "de": null}\n{"de": "a", "fr": "b", "en": NaN}\n',
]
LINES = ["one\ntwo\nthree\n\nfünf\n".encode(), b"eins\r\nzwei\r\ndrei\r\n\r\nv\r\n", "a\nb\nc".encode("utf-16")]
TMX = [
    b"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en" datatype="xml"/><body>
<tu tuid="1"><tuv xml:lang="en"><seg>Hello <bpt i="1">&lt;b&gt;</bpt>you<ept i="1">&lt;/b&gt;</ept></seg></tuv>
<tuv xml:lang="de-AT"><seg>Servus <hi>du</hi> &#228;</seg></tuv><tuv xml:lang="de"><seg>Hallo</seg></tuv></tu>
<tu><prop type="x">y</prop><tuv lang="EN"><seg><![CDATA[a < b]]></seg></tuv><tuv lang="fr"><seg/></tuv></tu>
</body></tmx>""",
    '<tmx version="1.4"><body><tu><tuv xml:lang="en"><seg>ä</seg></tuv><tuv xml:lang="de"><seg>ß</seg></tuv></tu>'
    "</body></tmx>".encode("utf-16"),
]
XLIFF = [
    b"""<?xml version="1.0"?><xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
<file original="a" source-language="en" target-language="de" datatype="plaintext"><body><group id="g">
<trans-unit id="1"><source>Hi <g id="1">you</g><x id="2"/></source><seg-source>no</seg-source>
<target state="final">Hallo <mrk mtype="x">du</mrk><ph id="3">%s</ph></target>
<alt-trans><source>q</source><target>r</target></alt-trans></trans-unit>
<trans-unit id="2"><source>untranslated</source></trans-unit></group></body></file></xliff>""",
    b"""<xliff xmlns="urn:oasis:names:tc:xliff:document:2.0" version="2.0" srcLang="de" trgLang="en"><file id="f">
<unit id="u"><segment><source>Hallo <pc id="1">du</pc><cp hex="0007"/></source><target>Hi</target></segment>
<ignorable><source> </source></ignorable></unit></file></xliff>""",
]
PO = [
    rb"""# comment
msgid ""
msgstr ""
"Language: de\n"
"Content-Type: text/plain; charset=UTF-8\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\n"

#: file.c:1
#, fuzzy, c-format
#| msgid "older"
msgctxt "menu"
msgid "a\tb \"q\" \303\244 \x41"
msgstr "c"

msgid "one file"
msgid_plural "%d "
"files"
msgstr[0] "eine Datei"
msgstr[1] "%d Dateien"

#~ msgid "old"
#~ msgstr "alt"
""",
    'msgid ""\nmsgstr "Content-Type: text/plain; charset=ISO-8859-15\\n"\n\nmsgid "a"\nmsgstr "ä €"\n'.encode(
        "iso-8859-15"
    ),
    'msgid ""\nmsgstr "Content-Type: text/plain; charset=SHIFT_JIS\\n"\n\nmsgid "a"\nmsgstr "表示"\n'.encode(
        "shift_jis"
    ),
]
EMPTY_PO = rb"""msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"
"Plural-Forms: nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 ? 1 : 2);\n"

#, c-format
msgid "one _file of %s"
msgid_plural "%d _files of %s"
msgstr[0] ""

#, python-brace-format
msgid "{a} and\n{b}"
msgstr ""
"""
XML_WORDS = (
    b"<!DOCTYPE x [ <!ENTITY a 'b'> ]>|<!ENTITY % p SYSTEM 'file:///etc/passwd'>|&a;|&#0;|&#xD800;|&#65;|<![CDATA[|]]>"
    b"|<!--|-->|<?xml version='1.0' encoding='utf-16'?>|<?xml version='1.0' encoding='windows-1252'?>"
    b"|<?xml version='1.0' encoding='idna'?>|<?xml version='1.0' encoding='hex'?>|encoding='undefined'"
    b"|<x:y>|xmlns='q'|/>"
).split(b"|")
TMX_WORDS = [
    *XML_WORDS,
    *b"<tmx>|</tmx>|<tu>|</tu>|<tuv xml:lang='en'>|<tuv lang='de'>|</tuv>|<seg>|</seg>|<sub>".split(b"|"),
]
XLIFF_WORDS = [
    *XML_WORDS,
    *b"<xliff>|<xliff srcLang='en'>|<file source-language='en'>|<segment>|</segment>|<trans-unit>|<source>".split(b"|"),
    *b"</source>|<target>|</target>|<cp hex='110000'/>|<cp hex='D800'/>|<cp hex='-1'/>|</xliff>|</file>".split(b"|"),
]
TEXTS = ["", " ", "a", "ß", "&lt;b&gt;", "&#13;", "<![CDATA[<]]>", "\n"]
TMX_TAGS = [
    "tu",
    "tu",
    'tuv lang="en"',
    'tuv xml:lang="de-AT"',
    "tuv",
    "seg",
    "seg",
    "bpt",
    "sub",
    "hi",
    "header",
    "tmx",
]
XLIFF_TAGS = [
    *('file source-language="en"', 'file source-language="de" target-language="en"', "trans-unit", "segment", "unit"),
    *(
        "source",
        "source",
        "target",
        "target",
        "g",
        "ph",
        'x ctype="lb"',
        'cp hex="41"',
        'cp hex="D800"',
        "alt-trans",
        "xliff",
    ),
]
PO_WORDS = (
    b'msgid "a"\n|msgstr "b"\n|msgid ""\n|msgid_plural "c"\n|msgstr[0] "d"\n|msgstr[999] ""\n|msgctxt "e"\n|"f"\n'
    b"|#, fuzzy\n|#~ "
    b'|#| msgid "x"\n|"\\|\\x|\\777|\\n"\n|domain "g"\n|"charset=hex\\n"\n|"charset=CP037\\n"\n|"charset=BIG5\\n"\n'
    b'|\xa4\xa4|"Language: fr\\n"\n|\n\n|#, c-format\n|#, python-brace-format, sh-format\n|msgid "%d {x} $y _File"\n'
    b'|msgstr ""\n|msgid_plural "%s &Files"\n|msgstr[0] ""\n|\\0|\\x00|% |%2$'
    b'|"Plural-Forms: nplurals=2; plural=n/0;\\n"\n'
).split(b"|")


def content(data: bytes, name: str) -> Iterable[bytes]:
    return streams.read_blocks(io.BytesIO(data), name)


def test_tsv_reader_survives_ten_thousand_broken_files() -> None:
    counts = fuzz.assert_survives(
        lambda data: tsv.read_pairs(content(data, "a.tsv"), "a.tsv", ASKED),
        fuzz.generate_inputs(TSV, [b"\ten\tde", b"en\tfr\n", b'"""', b'\t"', b'"\n', b'"\t'], 1),
    )
    assert min(counts) > 50


def test_jsonl_reader_survives_ten_thousand_broken_files() -> None:
    tokens = [
        b"[" * 3000,
        b'{"a":' * 2000,
        b'"\\ud800"',
        b"1" * 5000,
        b"-Infinity",
        b'{"src": ',
        b'"tgt": ',
        b'"',
        b"}",
        b"\\u",
    ]
    counts = fuzz.assert_survives(
        lambda data: jsonl.read_pairs(content(data, "a.jsonl"), "a.jsonl", ASKED),
        fuzz.generate_inputs(JSONL, tokens, 2),
    )
    assert min(counts) > 50


def test_moses_reader_survives_ten_thousand_broken_files_and_loses_no_step() -> None:
    partner = b"1\n2\n3\n4\n5\n"

    def read(data: bytes) -> Iterable[Pair | BadLine]:
        for number, item in enumerate(
            registry.read_moses_pairs(content(data, "a.en"), content(partner, "a.de"), ("a.en", "a.de")), 1
        ):
            assert item.line == number
            assert isinstance(item, BadLine) or item.target == str(number)
            yield item

    counts = fuzz.assert_survives(read, fuzz.generate_inputs(LINES, [b"\n\n\n", b"\r", b"word"], 3))
    assert min(counts) > 50


def test_tmx_reader_survives_ten_thousand_broken_files() -> None:
    counts = fuzz.assert_survives(
        lambda data: tmx.read_pairs(content(data, "a.tmx"), "a.tmx", ASKED),
        chain(fuzz.generate_inputs(TMX, TMX_WORDS, 4), fuzz.generate_trees("tmx", TMX_TAGS, TEXTS, 4)),
    )
    assert min(counts) > 50


def test_xliff_reader_survives_ten_thousand_broken_files() -> None:
    counts = fuzz.assert_survives(
        lambda data: xliff.read_pairs(content(data, "a.xlf"), "a.xlf", ASKED),
        chain(fuzz.generate_inputs(XLIFF, XLIFF_WORDS, 5), fuzz.generate_trees("xliff", XLIFF_TAGS, TEXTS, 5)),
    )
    assert min(counts) > 50


def test_po_reader_survives_ten_thousand_broken_files() -> None:
    counts = fuzz.assert_survives(
        lambda data: po.read_pairs(content(data, "a.po"), "a.po", ASKED, ReadOptions(fuzzy=True)),
        fuzz.generate_inputs(PO, PO_WORDS, 6),
    )
    assert min(counts) > 50


def test_decompression_survives_ten_thousand_broken_files() -> None:
    text = "".join(f"line {n}\tZeile {n * n}\n" for n in range(40)).encode()
    good = [
        gzip.compress(text, mtime=0),
        gzip.compress(text[:200], mtime=0) + gzip.compress(text[200:], mtime=0),
        lzma.compress(text, preset=0),
        zstd.compress(text),
    ]
    tokens = [lzma.compress(b"a\tb\n", preset=0), zstd.compress(b"a\tb\n"), gzip.compress(b"a\tb\n", mtime=0)]
    counts = fuzz.assert_survives(
        lambda data: tsv.read_pairs(content(data, "a.tsv"), "a.tsv", ASKED), fuzz.generate_inputs(good, tokens, 7)
    )
    assert min(counts) > 50


def test_pretranslation_survives_ten_thousand_broken_catalogs() -> None:
    filled = refused = 0
    for number, data in enumerate(fuzz.generate_inputs([*PO, EMPTY_PO], PO_WORDS, 8)):
        if number % 4:
            continue
        start = time.process_time()
        transfer = (lambda contents: [project_reversed(content) for content in contents]) if number % 8 else None
        try:
            result = pretranslate_file(data, "a.po", list, transfer=transfer)
        except CorpusError:
            refused += 1
            continue
        assert result.content.count(b"\0") <= data.count(b"\0"), data
        again = pretranslate_file(result.content, "a.po", list, transfer=transfer)
        assert (again.filled_count, again.content) == (0, result.content), data
        assert time.process_time() - start < fuzz.MAX_SECONDS, data
        filled += result.filled_count
    assert min(filled, refused) > 50


DOCUMENT_WORDS = (
    b"{|}|[|]|\"|'|<b>|</b>|<i>|-->|00:00:01,000 --> 00:00:02,000\n|\n\n|- |: |&a |*a|!!str |\\\n  |>-\n |/*|//|=|;|,"
    b'|{n, plural, one {a} other {# b}}|\\u|\\ud800|\\|{0}|<item quantity="one">|<![CDATA[|]]>|<w:r>|<w:t>|</w:p>'
    b"|<w:fldChar w:fldCharType='begin'/>"
).split(b"|")


@pytest.mark.parametrize("name", document_cases.FORMATS)
@pytest.mark.parametrize("share", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_translation_survives_broken_documents(name: str, share: int) -> None:
    spec = document_cases.FORMATS[name]
    seeds = [spec.make(random.Random(number)).raw.encode() for number in range(8)]
    filled, refusals = 0, list[str]()
    for data in itertools.islice(fuzz.generate_inputs(seeds, DOCUMENT_WORDS, 9), 0, None, share):
        content = document_cases.pack_docx(data) if name == "a.docx" else data
        start = time.process_time()
        try:
            result = pretranslate_file(content, name, translate_in_parentheses, tgt="pl", fields=spec.fields)
        except CorpusError as error:
            refusals.append(str(error))
            continue
        again = pretranslate_file(result.content, name, list, tgt="pl", fields=spec.fields)
        assert again.content == result.content, data
        assert time.process_time() - start < fuzz.MAX_SECONDS, data
        filled += result.filled_count
    assert filled
    assert refusals or name == "a.properties"  # in which any text is valid
    assert not any("\n" in refusal for refusal in refusals)
