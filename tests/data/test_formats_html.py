"""HTML for pre-translation: what is text, and that everything else stays as it is."""

from __future__ import annotations

import html
import random
import re
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from lxml import etree

from attent.data.formats.html import tokenize
from attent.data.formats.units import InlineContent, TransferredContent
from attent.data.pairs import CorpusError
from attent.data.pretranslate import PretranslateResult, pretranslate_file
from attent.decoding.markup import project_codes, remove_codes
from tests.data import fuzz
from tests.data.pretranslate_cases import project_reversed

PAGE = """<!DOCTYPE html>
<html lang="en-GB">
<head><meta charset="utf-8"><title>My page &amp; yours</title>
<meta name="description" content="About dogs"><meta name=generator content="A tool">
<style>p > a { color: red }</style><script>if (a < b) write("<p>no</p>")</script>
</head>
<body class=x>
  <nav><a href="/">Go home</a> | <a href="/about">About us</a></nav>
  <h1>
     Hello <em>big world</em>
  </h1>
  <p>A man with a <b>red hat</b>
     rides a <a href="x" title='Small "bike"'>bike</a>.<br>
     Run <code>make</code> now. <img src=a.png alt=Dog>
  <p translate=no>Not <b>this
  <p>Caf&eacute; &lt;open&gt; <i lang=fr>le mot</i> today
  <pre>keep
  this</pre>
  <ul><li>one<li class="notranslate">no <ul><li>x</ul> no<li>two <b>three</b></ul>
  <svg><title>no</title><a>no</a></svg>
  <input type=submit value="Send it" placeholder="Your name"><input value="not this">
  <button>Save it</button><!-- no -->
</body></html>
"""
EXPECTED = """<!DOCTYPE html>
<html lang="de">
<head><meta charset="utf-8"><title>yours &amp; page My</title>
<meta name="description" content="dogs About"><meta name=generator content="A tool">
<style>p > a { color: red }</style><script>if (a < b) write("<p>no</p>")</script>
</head>
<body class=x>
  <nav><a href="/">home Go</a> | <a href="/about">us About</a></nav>
  <h1>
     <em>world big</em> Hello
  </h1>
  <p><a href="x" title='"bike" Small'>bike</a>. a rides <b>hat red</b> a with man A<br>
     now. <code>make</code> Run <img src=a.png alt=Dog>
  <p translate=no>Not <b>this
  <p>today &lt;open&gt; <i lang=fr>le mot</i> Caf&eacute;
  <pre>keep
  this</pre>
  <ul><li>one<li class="notranslate">no <ul><li>x</ul> no<li><b>three</b> two</ul>
  <svg><title>no</title><a>no</a></svg>
  <input type=submit value="it Send" placeholder="name Your"><input value="not this">
  <button>it Save</button><!-- no -->
</body></html>
"""


def reverse(contents: Sequence[InlineContent]) -> list[TransferredContent]:
    return [project_reversed(content) for content in contents]


def echo(contents: Sequence[InlineContent]) -> list[TransferredContent]:
    texts = [remove_codes(content) for content in contents]
    identity = [tuple((index, index) for index in range(len(text.split()))) for text in texts]
    return [project_codes(*arguments) for arguments in zip(contents, texts, identity, strict=True)]


def pretranslate(page: str | bytes, src: str | None = "en", tgt: str | None = "de") -> PretranslateResult:
    content = page.encode("utf-8", "surrogateescape") if isinstance(page, str) else page
    return pretranslate_file(content, "a.html", list, transfer=reverse, src=src, tgt=tgt)


def test_page_is_translated_and_its_markup_stays() -> None:
    result = pretranslate(PAGE)
    assert result.content.decode() == EXPECTED
    assert result.skipped == ()


def test_page_with_equal_translation_is_unchanged() -> None:
    assert pretranslate_file(PAGE.encode(), "a.html", list, transfer=echo, src="en").content == PAGE.encode()


def test_translated_page_is_not_translated_again() -> None:
    result = pretranslate(EXPECTED)
    assert (result.content.decode(), result.filled_count) == (EXPECTED, 0)
    assert result.skipped[0].reason == "its lang attribute says that it is in de"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<p>a b</p>", "<p>b a</p>"),
        ("<p>a b", "<p>b a"),
        ("a b<br>c d", "b a<br>d c"),
        ("<P>a <B>b</B></P>", "<P><B>b</B> a</P>"),
        ("<td>a b<td>c d", "<td>b a<td>d c"),
        ("<b>a b<p>c d</b> e</p>", "<b>b a<p>e</b> d c</p>"),
        ("<b>a <i>b</b> c</i> d", "<b>d <i>c</b> b</i> a"),
        ("<p>\n  a\n  b\n</p>\n", "<p>\n  b a\n</p>\n"),
        ("<p><b>\n a b</b> c</p>", "<p>c <b>\n b a</b></p>"),
        ("<a href=1>a b</a><a href=2>c d</a>", "<a href=1>b a</a><a href=2>d c</a>"),
        ("x <a href=1>a</a><a href=2>b</a>", "<a href=2>b</a> <a href=1>a</a> x"),
        ("a <span class=icon></span>b c", "c b <span class=icon></span>a"),
        ("<p title='a b'>c d", "<p title='b a'>d c"),
        ("<p title=a>c d", "<p title=a>d c"),
        ("<img alt='a b' title=\"c 'd'\">", "<img alt='b a' title=\"'d' c\">"),
        ("a <img alt='b c'> d <img alt='e f'>", "d <img alt='c b'> a <img alt='f e'>"),
        ("<p>a < b & c &copy; &#233;</p>", "<p>&#233; &copy; c &amp; b &lt; a</p>"),
        ("<p>&nbsp;a b&nbsp;</p>", "<p>&nbsp;b a&nbsp;</p>"),
        ("<div translate=no>a b<div>c</div>d</div>e f", "<div translate=no>a b<div>c</div>d</div>f e"),
        ("a <b class='x notranslate'>b c</b> d", "d <b class='x notranslate'>b c</b> a"),
        ("<p lang=fr>a b</p><p lang=en-US>c d</p>", "<p lang=fr>a b</p><p lang=en-US>d c</p>"),
        ("<p>a {name} b %s c</p>", "<p>c %s b {name} a</p>"),
        ("<textarea placeholder='a b'>c d</textarea>", "<textarea placeholder='b a'>c d</textarea>"),
        ("<select><option>a b<option>c d</select>", "<select><option>b a<option>d c</select>"),
        ("<meta property=og:title content='a b'><meta name=x content='a b'>",
         "<meta property=og:title content='b a'><meta name=x content='a b'>"),
        ("<p>a <math><mi>x</mi></math> b</p>", "<p>b <math><mi>x</mi></math> a</p>"),
        ("<p>שלום <b>עולם</b> a &rlm;</p>", "<p>&rlm; a <b>עולם</b> שלום</p>"),
        ("<p>123 <b>4</b></p>", "<p>123 <b>4</b></p>"),
        ("<![CDATA[a b]]><? c d ?>e f", "<![CDATA[a b]]><? c d ?>f e"),
        ("<script>a b", "<script>a b"),
        ("a b <p title='c d", "b a <p title='c d"),
        ("", ""),
    ],
)  # fmt: skip
def test_only_text_changes(page: str, expected: str) -> None:
    assert pretranslate(page).content.decode() == expected


def test_page_keeps_its_charset() -> None:
    page = '<meta charset="iso-8859-1"><p>caf\u00e9 \u201ca\u201d</p>'.encode("cp1252")
    result = pretranslate_file(page, "a.html", list, transfer=lambda contents: [_translate("日 é ü")], src=None)
    assert result.content == b'<meta charset="iso-8859-1"><p>&#26085; \xe9 \xfc</p>'
    assert pretranslate("<p>a é</p>".encode("utf-16")).content == "<p>é a</p>".encode("utf-16")
    assert pretranslate(b"<p>a b</p><p>c \xff</p>").skipped[0].reason == "it is not in the file's encoding"
    with pytest.raises(CorpusError, match=r"a\.html is in charset klingon, which attent does not know"):
        pretranslate(b"<meta charset=klingon>")
    assert pretranslate("\ufeff<meta charset=klingon>a b").content.decode() == "\ufeff<meta charset=klingon>b a"


def _translate(text: str) -> TransferredContent:
    return TransferredContent(((text,),), is_certain=True)


def test_language_of_the_page_is_changed_only_with_a_translation() -> None:
    assert b'lang="en"' in pretranslate('<html lang="en"><p>a b', tgt=None).content
    assert pretranslate('<html lang="en"><p>1').content == b'<html lang="en"><p>1'
    assert pretranslate("<html lang=fr xml:lang=fr>a b").content == b'<html lang="de" xml:lang="de">b a'
    assert pretranslate('<html lang="de"><p>a b', src="de", tgt="de-AT").content == b'<html lang="de-AT"><p>b a'


# Random documents.

WORDS = [
    "one",
    "two,",
    "שלום",
    "مرحبا",
    "e\u0301",
    "日本",
    "&amp;",
    "&lt;b&gt;",
    "&nbsp;",
    "&copy;",
    "caf&eacute;",
    "%s",
    "a<b",
]
INLINE = ["b", "i", "a", "span", "em", "code", "sup", "svg", "ruby"]
BLOCKS = ["p", "div", "li", "td", "h1", "pre", "ul", "button", "section"]
ATTRIBUTES = [
    "",
    ' title="x y"',
    " title='a \"b\"'",
    " alt=word",
    " class=notranslate",
    " lang=fr",
    ' x="<p>"',
    " lang=en",
]
JUNK = [
    "<br>",
    "<!-- a > b -->",
    "<",
    "</",
    "<img alt='p q'>",
    "</i>",
    "<b>",
    "<script>a < b</script>",
    "\n\t ",
    "&#0;",
    "&",
]


def make_document(rng: random.Random, depth: int = 0) -> str:
    pieces = []
    for _ in range(rng.randint(1, 5)):
        kind = rng.random()
        tag = rng.choice(BLOCKS if kind < 0.25 else INLINE) if depth < 4 else ""
        if kind < 0.5 and tag:
            end = f"</{tag}>" if rng.random() < 0.9 else ""
            pieces.append(f"<{tag}{rng.choice(ATTRIBUTES)}>{make_document(rng, depth + 1)}{end}")
        else:
            pieces.append(rng.choice(JUNK) if rng.random() < 0.15 else rng.choice(WORDS))
    return rng.choice([" ", " ", "\n  ", ""]).join(pieces)


def list_markup(content: bytes) -> list[bytes]:
    return [content[token.start : token.end] for token in tokenize(content) if not token.is_text]


def test_random_documents_keep_their_markup() -> None:
    rng, changed = random.Random(5), 0
    for _ in range(1000):
        page = f'<!doctype html><html lang="en"><body>{make_document(rng)}</body></html>'.encode()
        same = pretranslate_file(page, "a.html", list, transfer=echo, src="en", tgt=None)
        assert _count_chars(same.content) == _count_chars(page)
        result = pretranslate(page)
        changed += result.content != page
        markup = [
            tag.replace(b'lang="en"', b'lang="de"', 1) if tag.startswith(b"<html") else tag for tag in list_markup(page)
        ]
        after = list_markup(result.content)
        if result.content != page:
            assert Counter(map(_sort_words, after)) == Counter(map(_sort_words, markup)), page
            assert not result.skipped
        again = pretranslate(result.content)
        assert again.content == result.content or not result.filled_count
        etree.fromstring(result.content, etree.HTMLParser(encoding="utf-8"))
    assert changed > 500


def _count_chars(content: bytes) -> Counter[str]:
    """Count the characters but space, which tags without an end may move or lose, however they are escaped."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # as its meta element says, else it is refused
    return Counter("".join(html.unescape(text).split()))


def _sort_words(tag: bytes) -> tuple[bytes, ...]:
    """Return a tag up to the order of words in its attributes, which are translated."""
    return tuple(sorted(re.findall(rb"[\w<>/!-]+", tag)))


def test_tokens_cover_the_document_as_a_browser_reads_it() -> None:
    rng = random.Random(6)
    for _ in range(300):
        page = re.sub(r"<(/?)(svg|ruby|td|li)\b", r"<\1span", make_document(rng)).replace("&#0;", "")
        page = page.replace("a<b", "a").replace("</ ", " ").replace("< ", " ")
        content = f"<!doctype html><body><div>{page} </div>".encode()
        tokens = list(tokenize(content))
        assert b"".join(content[token.start : token.end] for token in tokens) == content
        tree = etree.fromstring(content, etree.HTMLParser(encoding="utf-8"))
        etree.strip_elements(tree, "script", etree.Comment, with_tail=False)
        texts = (content[token.start : token.end].decode() for token in tokens if token.is_text)
        assert Counter("".join(map(html.unescape, texts)).split()) == Counter("".join(tree.itertext()).split()), content


TOKENS = (
    rb'<|>|"|=|/|<!--|-->|<!|<?|</|<p |title=|&amp;|&#|<b>|</b>|<title>|</title>|<br>|<style>|<a title="|<svg>|</svg>'
    rb"|<code>|<p translate=no>|<i lang=de>|<html lang=de>|<meta charset=utf-16>|<meta charset=latin1>|<plaintext>"
    rb"|<img alt='x y'>|{n}|%s|<![CDATA["
).split(b"|")


def test_html_survives_ten_thousand_broken_documents() -> None:
    filled = refused = 0
    for number, data in enumerate(fuzz.generate_inputs([PAGE.encode(), EXPECTED.encode()], TOKENS, 9)):
        if number % 4:
            continue
        start = time.process_time()
        try:
            result = pretranslate(data)
            same = pretranslate_file(data, "a.html", list, transfer=echo)
        except CorpusError:
            refused += 1
            continue
        assert _count_chars(same.content) == _count_chars(data), data
        assert time.process_time() - start < fuzz.MAX_SECONDS, data
        filled += result.filled_count
    assert filled > 50
    assert refused > 5


@pytest.mark.parametrize(
    "unit",
    ["<", "<a ", "<a title='", "</b>", "<b>", "<b>x", "<!--", "&", "<svg>", "<p translate=no>", "<code>", "a <i></i>"],
)
def test_large_hostile_documents_take_linear_time(unit: str) -> None:
    start = time.process_time()
    pretranslate(unit * (60_000 // len(unit)))
    assert time.process_time() - start < 5
