"""Generated PO, XLIFF and TMX files with their expected results: the generator knows the empty targets, so that
every byte of the result is known.
"""

from __future__ import annotations

import codecs
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from attent.data.formats.units import InlineContent, TransferredContent
from attent.data.pairs import CorpusError
from attent.data.pretranslate import PretranslateResult, pretranslate_file
from attent.decoding.alignment import Links
from attent.decoding.markup import project_codes, remove_codes

FILES_PER_KIND = 50
WORDS = [
    "Open",
    "the",
    "file",
    "Straße",
    "naïve",
    "café",
    "100",
    "error",
    "at",
    "“quoted”",
    "e\u0301",
    "a",
    "I",
    "日本語",
    "𝒳",
]
LATIN_WORDS = [word for word in WORDS if all(ord(character) < 256 for character in word)]
PLACEHOLDERS = ["%s", "%d", "%1$s", "%(name)s", "{name}", "{0}", "{}", "${x}", "{{x}}", "%%", "https://a.example/b?c=d"]


PLURAL_RULES = {1: "0", 2: "(n != 1)", 3: "n==1 ? 0 : n%10>=2 && n%10<=4 ? 1 : 2"}


def translate_in_parentheses(texts: Sequence[str]) -> list[str]:
    """Translate by adding parentheses, which every charset has."""
    return [f"({text})" for text in texts]


def reverse_words(text: str) -> str:
    return " ".join(reversed(text.split()))


def project_reversed(
    content: InlineContent, translate: Callable[[str], str] = reverse_words, links: Links | None = None
) -> TransferredContent:
    """Translate a content by reversing its words, with the alignment that this is."""
    text = translate(remove_codes(content))
    count = len(text.split())
    reversal = tuple((count - 1 - index, index) for index in range(count))
    return project_codes(content, text, reversal if links is None else links)


def fail_if_called(texts: Sequence[str]) -> list[str]:
    """Translator for files without empty targets: fails if it is called."""
    raise AssertionError(f"called with {list(texts)!r}")


def pretranslate(
    content: bytes | str,
    name: str,
    translate: Callable[[Sequence[str]], Sequence[str]] = translate_in_parentheses,
    **requested: str,
) -> PretranslateResult:
    return pretranslate_file(content.encode() if isinstance(content, str) else content, name, translate, **requested)  # type: ignore[arg-type]


def get_error(content: bytes, name: str) -> str:
    """Return the error message for a file that cannot be pre-translated, else an empty string."""
    try:
        pretranslate(content, name)
    except CorpusError as error:
        return str(error)
    return ""


@dataclass
class ExpectedFile:
    """A file before and after pre-translation, and the expected counts."""

    before: str = ""
    after: str = ""
    filled_count: int = 0
    existing_count: int = 0
    targets: list[str] = field(default_factory=list)  # filled targets, unescaped

    def add(self, before: str, after: str | None = None) -> None:
        self.before += before
        self.after += before if after is None else after

    def encode(self, encoding: str, newline: str) -> tuple[bytes, bytes]:
        bom = {"utf-8-sig": codecs.BOM_UTF8, "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}
        codec = "utf-8" if encoding == "utf-8-sig" else encoding
        first, second = (
            bom.get(encoding, b"") + text.replace("\n", newline).encode(codec) for text in (self.before, self.after)
        )
        return first, second


def make_sentence(rng: random.Random, words: Sequence[str] = WORDS) -> str:
    """Return words and placeholders, with a word at both ends."""
    inner = rng.choices([*words, *PLACEHOLDERS], k=rng.randint(0, 5))
    return " ".join([rng.choice(words[:4]), *inner, rng.choice(words[:3])])


# PO catalogs.


def make_po(rng: random.Random) -> tuple[bytes, ExpectedFile, bytes]:
    """Return a catalog, the expected counts, and the expected result."""
    charset, encoding = rng.choice([("UTF-8", "utf-8"), ("UTF-8", "utf-8-sig"), ("ISO-8859-1", "latin-1")])
    words = LATIN_WORDS if encoding == "latin-1" else WORDS
    expected, forms = ExpectedFile(), rng.choice((1, 2, 3))
    expected.add(
        f'# Title, é\nmsgid ""\nmsgstr ""\n"Content-Type: text/plain; charset={charset}\\n"\n"Language: de\\n"\n'
    )
    expected.add(f'"Plural-Forms: nplurals={forms}; plural={PLURAL_RULES[forms]};\\n"\n')
    for number in range(rng.randint(1, 15)):
        expected.add("\n" * rng.randint(1, 2))
        _add_po_entry(expected, rng, number, forms, words)
    expected.add(rng.choice(["", "\n", '\n#~ msgid "old"\n#~ msgstr ""\n', '\n#~ msgid ""\n#~ "old"\n#~ msgstr "alt"']))
    before, after = expected.encode(encoding, rng.choice(["\n", "\n", "\r\n"]))
    return before, expected, after


def _add_po_entry(expected: ExpectedFile, rng: random.Random, number: int, forms: int, words: Sequence[str]) -> None:
    is_filled = rng.random() < 0.6
    expected.add(
        "".join(rng.sample(["# note\n", "#. extracted é\n", "#: a.c:1 b.c:2\n", "#  \n"], k=rng.randint(0, 3)))
    )
    flags = rng.choice(["", "", "#, c-format\n", "#, fuzzy\n", "#, fuzzy, c-format\n", "#,no-wrap\n"])
    added = flags if "fuzzy" in flags else f"#, fuzzy,{flags[2:]}" if flags else "#, fuzzy\n"
    expected.add(flags, added if is_filled else flags)
    expected.add(rng.choice(["", "", '#| msgid "older"\n']) if flags else "")
    expected.add(f'msgctxt "context {number}"\n')
    space = rng.choice(["", "", " ", "\n", "\t"])
    texts = [make_sentence(rng, words) for _ in range(rng.choice((1, 1, 2)))]
    if "c-format" in flags and len(texts) > 1:  # form 0 has the directives of the plural
        texts[1] = f"{texts[0]} {words[0]}"
    for keyword, text in zip(("msgid", "msgid_plural"), texts, strict=False):
        expected.add(f"{keyword} {_format_po_string(text + space, rng)}\n")
    _add_po_forms(expected, rng, texts, space, is_filled, forms)


def _add_po_forms(
    expected: ExpectedFile, rng: random.Random, texts: list[str], space: str, is_filled: bool, forms: int
) -> None:
    expected.filled_count += is_filled
    expected.existing_count += not is_filled
    sources = texts[-1:] if len(texts) == 1 or forms == 1 else [texts[0], *[texts[1]] * (forms - 1)]
    for number, source in enumerate(sources):
        keyword = "msgstr" if len(texts) == 1 else f"msgstr[{number}]"
        empty = rng.choice(['""', '""', '""\n""'])
        target = f"({source}){space}"
        if is_filled:
            absent = number > 0 and number == len(sources) - 1 and rng.random() < 0.3  # a missing form
            expected.targets.append(target)
            expected.add("" if absent else f"{keyword} {empty}\n", f"{keyword} {_quote_po(target)}\n")
        else:
            expected.add(f"{keyword} {_format_po_string(source, rng)}\n")


def _format_po_string(text: str, rng: random.Random) -> str:
    """Quote a text, on one line or wrapped at a random position."""
    middle = rng.randint(0, len(text))
    return _quote_po(text) if rng.random() < 0.6 else f'""\n{_quote_po(text[:middle])}\n{_quote_po(text[middle:])}'


def _quote_po(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


# XML. Each content is generated twice: as the source, and as the expected target.

PAIRS_12 = [
    ('<g id="1">', "</g>"),
    ('<bpt id="2">&lt;b></bpt>', '<ept id="2">&lt;/b></ept>'),
    ('<bx id="3"/>', "<ex id='3' />"),
]
ALONE_12 = [
    '<x id="4"/>',
    '<ph id="5">&lt;br/&gt;</ph>',
    "<it id='6' pos=\"open\">[</it>",
    '<mrk mtype="protected">Acme &amp; Co</mrk>',
]
PAIRS_2 = [('<pc id="1">', "</pc>"), ('<sc id="2"/>', '<ec startRef="2"/>'), ('<mrk id="3" type="term">', "</mrk>")]
ALONE_2 = ['<ph id="4"/>', '<ph id="5" equiv=">"/>', '<cp hex="001A"/>', '<mrk id="6" translate="no">Acme</mrk>']
PAIRS_TMX = [('<bpt i="1">&lt;b></bpt>', '<ept i="1">&lt;/b></ept>'), ("<hi>", "</hi>"), ('<hi type="x>">', "</hi >")]
ALONE_TMX = ['<ph x="4"/>', "<ph>%s &amp; &#60;</ph>", "<it pos='begin'>(</it>", "<ut>\\b</ut>"]


def make_xml_text(text: str, rng: random.Random) -> str:
    """Escape a text for XML, randomly as CDATA or references."""
    way = rng.randrange(5)
    if way == 0:
        return f"<![CDATA[{text}]]>"
    if way == 1:
        return "".join(f"&#{ord(letter)};" if ord(letter) > 127 else escape(letter) for letter in text)
    if way == 2:
        return f"{escape(text)}<!-- & -->"
    return escape(text)


def make_xml_content(
    rng: random.Random, words: Sequence[str], pairs: list[tuple[str, str]], alone: list[str]
) -> tuple[str, str]:
    """Return a source and its expected target; outer markup stays outside of the parentheses."""
    tail = rng.choice(["", "", " & <i>x</i>", " it's"])
    first, last = make_sentence(rng, words), make_sentence(rng, words) + tail
    parts = [(make_xml_text(first, rng), escape(first))]
    if rng.random() < 0.5:
        opened, closed = rng.choice(pairs)
        middle = make_sentence(rng, words)
        code = rng.choice(alone) if rng.random() < 0.5 else ""
        parts += [(opened, opened), (make_xml_text(middle, rng) + code, escape(middle) + code), (closed, closed)]
    parts.append((make_xml_text(last, rng), escape(last)))
    before, behind = rng.choice([("", ""), ("", ""), ("  ", "\n"), pairs[0], (alone[0], alone[0]), ("\n  ", " ")])
    if before == pairs[0][0] and any(opened == before for opened, _ in parts):
        before, behind = "", ""  # codes must be distinct
    return (
        before + "".join(source for source, _ in parts) + behind,
        f"{before}({''.join(target for _, target in parts)}){behind}",
    )


def _make_xml_head(rng: random.Random) -> tuple[str, str, Sequence[str]]:
    """Return an XML declaration, its encoding, and words that it can encode."""
    declared, encoding = rng.choice(
        [
            ("UTF-8", "utf-8"),
            ("utf-8", "utf-8-sig"),
            ("UTF-16", "utf-16-le"),
            ("UTF-16", "utf-16-be"),
            ("ISO-8859-1", "latin-1"),
        ]
    )
    quote = rng.choice("'\"")
    head = f"<?xml version={quote}1.0{quote} encoding={quote}{declared}{quote}?>\n<!-- <target/> é -->\n"
    return head, encoding, LATIN_WORDS if encoding == "latin-1" else WORDS


MARK_12 = 'state="needs-review-translation" state-qualifier="mt-suggestion"'
MARK_2 = 'state="initial" subState="attent:needs-review"'
MARK_TMX = '<prop type="x-attent-state">needs-review</prop>'


def make_xliff_12(rng: random.Random) -> tuple[bytes, ExpectedFile, bytes]:
    head, encoding, words = _make_xml_head(rng)
    expected = ExpectedFile()
    expected.add(f'{head}<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2" xmlns:o=\'urn:o\'>\n')
    expected.add(
        "<file original='a>b' source-language=\"en\" target-language='de'\tdatatype=\"plaintext\" ><header/><body>\n"
    )
    for number in range(rng.randint(1, 12)):
        expected.add(f'  <trans-unit id="{number}" o:x=">">')
        indent = rng.choice(["", "\n    "])
        source, target = make_xml_content(rng, words, PAIRS_12, ALONE_12)
        expected.add(f"{indent}<source xml:lang='en'>{source}</source>")
        if rng.random() < 0.2:
            expected.add(f"{indent}<target >{source}</target>")
            expected.existing_count += 1
        else:
            _add_target_12(expected, rng, indent, target)
        expected.add(rng.choice(["", "<note>n & m</note>".replace("&", "&amp;"), "<alt-trans><target/></alt-trans>"]))
        expected.add("\n  </trans-unit>\n<!-- é -->")
    expected.add("</body></file></xliff>\n")
    before, after = expected.encode(encoding, rng.choice(["\n", "\n", "\r\n"]))
    return before, expected, after


def _add_target_12(expected: ExpectedFile, rng: random.Random, indent: str, target: str) -> None:
    expected.filled_count += 1
    kind = rng.randrange(5)
    if kind == 0:
        expected.add("", f"{indent}<target {MARK_12}>{target}</target>")
    elif kind == 1:
        expected.add(f"{indent}<target/>", f"{indent}<target {MARK_12}>{target}</target>")
    elif kind == 2:
        expected.add(
            f"{indent}<target xml:lang='de'> \n</target >",
            f"{indent}<target xml:lang='de' {MARK_12}>{target}</target >",
        )
    elif kind == 3:
        marked_target = (
            f'<target state="needs-review-translation" o:y=\'1\' state-qualifier="mt-suggestion">{target}</target>'
        )
        expected.add(f"{indent}<target state='new' o:y='1' />", indent + marked_target)
    else:
        expected.add(f"<!-- - -->{indent}<target></target>", f"<!-- - -->{indent}<target {MARK_12}>{target}</target>")


def make_xliff_2(rng: random.Random) -> tuple[bytes, ExpectedFile, bytes]:
    head, encoding, words = _make_xml_head(rng)
    expected, p = ExpectedFile(), rng.choice(["", "", "x:"])
    space = f'xmlns{":" if p else ""}{p[:-1]}="urn:oasis:names:tc:xliff:document:2.0"'
    expected.add(f"{head}<{p}xliff {space} version='2.0' srcLang='en-US' trgLang=\"de\"><{p}file id='f'>\n")
    for number in range(rng.randint(1, 12)):
        expected.add(f'<{p}unit id="{number}"><{p}ignorable><{p}source>a</{p}source></{p}ignorable>\n')
        source, target = (_add_prefix(content, p) for content in make_xml_content(rng, words, PAIRS_2, ALONE_2))
        is_filled, indent = rng.random() < 0.7, rng.choice(["", "\n    "])
        attributes = rng.choice(
            [("", f" {MARK_2}"), (" id='s'", f" id='s' {MARK_2}"), (" state='initial'", f" {MARK_2}")]
        )
        expected.add(f"<{p}segment{attributes[0]}>", f"<{p}segment{attributes[is_filled]}>")
        expected.add(f"{indent}<{p}source>{source}</{p}source>")
        existing_target = rng.choice([f"<{p}target/>", f"<{p}target></{p}target>"]) if rng.random() < 0.5 else ""
        if is_filled:
            expected.filled_count += 1
            expected.add(existing_target, f"{'' if existing_target else indent}<{p}target>{target}</{p}target>")
        else:
            expected.existing_count += 1
            expected.add(f"<{p}target>{source}</{p}target>")
        expected.add(f"</{p}segment></{p}unit>\n")
    expected.add(f"</{p}file></{p}xliff>")
    before, after = expected.encode(encoding, rng.choice(["\n", "\n", "\r\n"]))
    return before, expected, after


def _add_prefix(xml: str, prefix: str) -> str:
    return re.sub(r"<(/?)(pc|sc|ec|ph|cp|mrk)\b", rf"<\1{prefix}\2", xml)


def make_tmx(rng: random.Random) -> tuple[bytes, ExpectedFile, bytes]:
    head, encoding, words = _make_xml_head(rng)
    expected = ExpectedFile()
    doctype = rng.choice(["", '<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n'])
    expected.add(f'{head}{doctype}<tmx version="1.4"><header srclang="en" adminlang=\'en\'/><body>\n')
    expected.add("<tu><tuv xml:lang='en'><seg>a</seg></tuv><tuv xml:lang='de-DE'><seg>b</seg></tuv></tu>\n")
    expected.existing_count += 1
    for number in range(rng.randint(1, 12)):
        indent, inner = rng.choice([("", ""), ("\n  ", "\n    "), ("\n\t", "")])
        source, target = make_xml_content(rng, words, PAIRS_TMX, ALONE_TMX)
        expected.add(
            f'<tu tuid="{number}"><note>é</note>{indent}<tuv xml:lang="EN-us" >{inner}<seg>{source}</seg></tuv>'
        )
        if rng.random() < 0.2:
            expected.existing_count += 1
            expected.add(f"{indent}<tuv xml:lang='de-DE'><prop type='x'>y</prop><seg>{source}</seg></tuv>")
        else:
            _add_variant(expected, rng, indent, inner, target)
        expected.add("\n</tu>\n")
    expected.add("</body></tmx>")
    before, after = expected.encode(encoding, rng.choice(["\n", "\n", "\r\n"]))
    return before, expected, after


def _add_variant(expected: ExpectedFile, rng: random.Random, indent: str, inner: str, target: str) -> None:
    expected.filled_count += 1
    kind = rng.randrange(3)
    if kind == 0:
        layout = f"{inner}{MARK_TMX}{inner}<seg>{target}</seg>{indent if inner else ''}"
        expected.add("", f'{indent}<tuv xml:lang="de-DE" creationtool="attent">{layout}</tuv>')
    else:
        empty, close = ("<seg/>", "</seg>") if kind == 1 else ("<seg > </seg >", "</seg >")
        tag = empty[: empty.index(">") + 1].replace("/>", ">")
        expected.add(
            f"<tuv xml:lang='de-DE'>{inner}{empty}</tuv>",
            f"<tuv xml:lang='de-DE'>{inner}{MARK_TMX}{inner}{tag}{target}{close}</tuv>",
        )


GENERATORS: dict[str, Callable[[random.Random], tuple[bytes, ExpectedFile, bytes]]] = {
    "a.po": make_po,
    "a.xlf": make_xliff_12,
    "b.xliff": make_xliff_2,
    "a.tmx": make_tmx,
}
