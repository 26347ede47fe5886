"""TMX and XLIFF: corner cases, files of other programs, and hostile files."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

import pytest
from translate.storage import tmx as toolkit_tmx
from translate.storage import xliff as toolkit_xliff
from translate.storage import xliff2 as toolkit_xliff2

from attent.data.formats import streams, tmx, xliff
from attent.data.pairs import (
    ANY_LANGUAGES,
    BadLine,
    CorpusError,
    LanguageMismatchError,
    LanguagePair,
    Pair,
    ReadOptions,
)
from tests.data.odd_strings import make_strings

EN_DE = LanguagePair("en", "de")
Reader = Callable[[Iterable[bytes], str, LanguagePair], Iterator[Pair | BadLine]]


def list_texts(items: Iterable[Pair | BadLine]) -> list[tuple[str, str]]:
    return [(item.source, item.target) for item in items if isinstance(item, Pair)]


def list_reasons(items: Iterable[Pair | BadLine]) -> list[tuple[int, str]]:
    return [(item.line, item.reason) for item in items if isinstance(item, BadLine)]


def read_tmx(data: str | bytes, languages: LanguagePair = EN_DE) -> list[Pair | BadLine]:
    raw = data.encode() if isinstance(data, str) else data
    return list(tmx.read_pairs(streams.read_blocks(io.BytesIO(raw), "a.tmx"), "a.tmx", languages))


def read_xliff(data: str | bytes, languages: LanguagePair = EN_DE) -> list[Pair | BadLine]:
    raw = data.encode() if isinstance(data, str) else data
    return list(xliff.read_pairs(streams.read_blocks(io.BytesIO(raw), "a.xlf"), "a.xlf", languages))


def make_tmx(*units: str, header: str = '<header srclang="en"/>') -> str:
    return f'<tmx version="1.4">{header}<body>\n' + "\n".join(units) + "\n</body></tmx>"


def make_unit(**variants: str) -> str:
    inside = "".join(
        f'<tuv xml:lang="{tag.replace("_", "-")}"><seg>{text}</seg></tuv>' for tag, text in variants.items()
    )
    return f"<tu>{inside}</tu>"


def make_xliff_12(*units: str, languages: str = 'source-language="en" target-language="de"') -> str:
    body = "\n".join(units)
    namespace = 'xmlns="urn:oasis:names:tc:xliff:document:1.2"'
    return f'<xliff version="1.2" {namespace}><file original="x" {languages}><body>\n{body}\n</body></file></xliff>'


def make_xliff_20(*units: str, languages: str = 'srcLang="en" trgLang="de"') -> str:
    body = "\n".join(f"<unit>{unit}</unit>" for unit in units)
    namespace = 'xmlns="urn:oasis:names:tc:xliff:document:2.0"'
    return f'<xliff version="2.0" {namespace} {languages}><file id="f">\n{body}\n</file></xliff>'


# Files of other programs.


def test_tmx_of_the_translate_toolkit_is_read() -> None:
    pairs = list(zip(make_strings(300, 1), make_strings(300, 2), strict=True))
    store = toolkit_tmx.tmxfile(sourcelanguage="en")
    for source, target in pairs:
        store.addtranslation(source, "en", target, "de")
    assert list_texts(read_tmx(bytes(store))) == pairs
    assert list_texts(read_tmx(bytes(store), LanguagePair("de", "en"))) == [(b, a) for a, b in pairs]
    assert [(unit.source, unit.target) for unit in toolkit_tmx.tmxfile.parsestring(bytes(store)).units] == pairs


@pytest.mark.parametrize("kind", [toolkit_xliff.xlifffile, toolkit_xliff2.Xliff2File])
def test_xliff_of_the_translate_toolkit_is_read(kind: type) -> None:
    pairs = list(zip(make_strings(300, 3), make_strings(300, 4), strict=True))
    store = kind(sourcelanguage="en", targetlanguage="de")
    for number, (source, target) in enumerate(pairs):
        unit = store.addsourceunit(source)
        if number % 3:
            unit.target = target
    translated = [pair for number, pair in enumerate(pairs) if number % 3]
    items = read_xliff(bytes(store))
    assert list_texts(items) == translated
    assert [why for _, why in list_reasons(items)] == ["no translation"] * 100
    again = kind.parsestring(bytes(store))  # type: ignore[attr-defined]
    assert [(unit.source, unit.target) for unit in again.units if unit.target] == translated


# TMX.


def test_native_codes_are_dropped_and_highlighted_text_is_kept() -> None:
    items = read_tmx(
        make_tmx(
            make_unit(
                en='Press <bpt i="1">&lt;b&gt;</bpt><hi>here</hi><ept i="1">&lt;/b></ept><ph>{<sub>x</sub>}</ph> now',
                de="<it pos='begin'>&lt;i&gt;</it>Hier <ut>code</ut><g id='1'>drücken</g><bx id='2'/>",
            )
        )
    )
    assert list_texts(items) == [("Press here now", "Hier drücken")]


def test_line_number_of_a_unit_is_its_first_line() -> None:
    data = make_tmx(make_unit(en="a", de="b"), "", "<tu>\n" + make_unit(en="c", de="d").removeprefix("<tu>"))
    assert [item.line for item in read_tmx(data)] == [2, 4]


def test_requested_variant_is_found_in_any_order_case_and_spelling() -> None:
    data = make_tmx(make_unit(de_CH="Velo", EN="bike", de="Fahrrad", de_AT="Radl"))
    assert list_texts(read_tmx(data)) == [("bike", "Fahrrad")]
    assert list_texts(read_tmx(data, LanguagePair("en", "de_at"))) == [("bike", "Radl")]
    assert list_texts(read_tmx(make_tmx(make_unit(de_CH="Velo", en="bike")))) == [("bike", "Velo")]
    assert list_texts(read_tmx(make_tmx(make_unit(en_GB="lift", en_US="elevator")), LanguagePair("en", "en-GB"))) == [
        ("elevator", "lift")
    ]


def test_first_of_two_variants_in_one_language_counts() -> None:
    data = make_tmx(
        '<tu><tuv xml:lang="de"><seg>eins</seg></tuv>' + make_unit(de="zwei", en="one").removeprefix("<tu>")
    )
    items = read_tmx(data)
    assert list_texts(items) == [("one", "eins")]
    assert items[1:] == [BadLine("a second de side", "a.tmx", 2, "zwei")]


def test_duplicate_variants_are_bad_lines_in_requested_languages() -> None:
    first = "".join(f'<tuv xml:lang="{tag}"><seg>{tag}</seg></tuv>' for tag in ("de-AT", "fr", "DE_at", "fr", "en"))
    data = make_tmx(f"<tu>{first}</tu>", make_unit(en="a", de="b"))
    items = read_tmx(data)
    assert list_texts(items) == [("en", "de-AT"), ("a", "b")]
    assert list_reasons(items) == [(2, "a second de side")]
    assert list_reasons(read_tmx(data, LanguagePair("en", "fr"))) == [(2, "a second fr side"), (3, "no fr side")]


def test_line_break_code_becomes_a_newline() -> None:
    data = make_tmx(make_unit(en='Hello<ph type="lb">&lt;br/></ph>you<ph type="image">x</ph>!', de="Hallo<ph>x</ph>"))
    assert list_texts(read_tmx(data)) == [("Hello\nyou!", "Hallo")]


def test_lang_attribute_of_old_tmx_is_read() -> None:
    data = make_tmx('<tu><tuv lang="EN-US"><seg>a</seg></tuv><tuv lang="DE-DE"><seg>b</seg></tuv></tu>')
    assert list_texts(read_tmx(data)) == [("a", "b")]


def test_header_language_is_the_default_source() -> None:
    data = make_tmx(make_unit(de_DE="b", en_US="a"), make_unit(en_GB="c", de_DE="d"))
    assert list_texts(read_tmx(data, ANY_LANGUAGES)) == [("a", "b"), ("c", "d")]
    assert tmx.TmxReader.read_languages([data.encode()], "a") == LanguagePair("en", "de")


def test_unit_without_a_requested_language_is_a_bad_line() -> None:
    items = read_tmx(make_tmx(make_unit(en="a", fr="b"), make_unit(en="c", de="d")))
    assert list_reasons(items) == [(2, "no de side")]
    assert list_texts(items) == [("c", "d")]


def test_tmx_without_the_requested_languages_lists_its_languages() -> None:
    with pytest.raises(
        LanguageMismatchError, match=r"a\.tmx does not contain en and de: it has en-gb, es, fr; choose two"
    ):
        read_tmx(make_tmx(make_unit(en_GB="a", fr="b"), make_unit(es="c")))
    with pytest.raises(LanguageMismatchError, match="does not say which two languages to read: it has de, en, fr"):
        read_tmx(make_tmx(make_unit(en="a", fr="b", de="c")), ANY_LANGUAGES)


def test_third_language_is_an_error_with_open_languages() -> None:
    with pytest.raises(LanguageMismatchError, match="it has de, en, fr"):
        read_tmx(make_tmx(make_unit(en="a", de="b"), make_unit(en="a", fr="b")), ANY_LANGUAGES)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "iso-8859-1", "windows-1252", "koi8-r"])
def test_tmx_in_other_encodings_is_read(encoding: str) -> None:
    text = "да" if encoding == "koi8-r" else "é€ü" if encoding == "windows-1252" else "éü"
    declared = {"utf-8-sig": "utf-8"}.get(encoding, encoding)
    data = f'<?xml version="1.0" encoding="{declared}"?>{make_tmx(make_unit(en=text, de="x"))}'
    assert list_texts(read_tmx(data.encode(encoding))) == [(text, "x")]


@pytest.mark.parametrize("encoding", ["shift_jis", "nonsense", "hex", "idna", "utf-7"])
def test_unsupported_encoding_is_reported(encoding: str) -> None:
    with pytest.raises(CorpusError, match=r"a\.tmx is in an encoding that attent does not read .*: save it as UTF-8"):
        read_tmx(f'<?xml version="1.0" encoding="{encoding}"?>{make_tmx()}')


# XLIFF.


def test_xliff_1_2_corner_cases() -> None:
    items = read_xliff(
        make_xliff_12(
            "<trans-unit id='1'><source>Hi <g id='1'>you</g><x id='2'/><ph id='3'>%s</ph>!</source>"
            "<seg-source><mrk mtype='seg'>no</mrk></seg-source>"
            "<target><mrk mtype='seg'>Hallo <bpt id='4'>&lt;b></bpt>du</mrk><it id='5' pos='open'>{</it>!</target>"
            "<alt-trans><source>q</source><target>r</target></alt-trans></trans-unit>",
            "<group><group><trans-unit id='2'><source>a\n b </source><target xml:space='default'> c\n</target>"
            "</trans-unit></group></group>",
            "<bin-unit id='3'><bin-source><internal-file>x</internal-file></bin-source></bin-unit>",
            "<trans-unit id='4'><source>open</source></trans-unit>",
            "<trans-unit id='5'><source>empty</source><target/></trans-unit>",
            "<trans-unit><alt-trans><source>q</source><target>r</target></alt-trans><source>s</source></trans-unit>",
        )
    )
    assert list_texts(items) == [("Hi you!", "Hallo du!"), ("a\n b ", " c\n")]
    assert list_reasons(items) == [(line, "no translation") for line in (7, 8, 9)]


def test_untranslated_and_unreviewed_targets_are_not_read() -> None:
    states = ("", ' state="new"', ' state="needs-translation"', ' state="needs-review-translation"', ' state="final"')
    units = [
        f"<trans-unit><source>s{n}</source><target{state}>t{n}</target></trans-unit>" for n, state in enumerate(states)
    ]
    items = read_xliff(make_xliff_12(*units))
    assert list_texts(items) == [("s0", "t0"), ("s4", "t4")]
    assert [why for _, why in list_reasons(items)] == ["no translation", "no translation", "fuzzy"]
    raw = streams.read_blocks(io.BytesIO(make_xliff_12(*units).encode()), "a.xlf")
    assert list_texts(xliff.read_pairs(raw, "a.xlf", EN_DE, ReadOptions(fuzzy=True))) == [
        ("s0", "t0"),
        ("s3", "t3"),
        ("s4", "t4"),
    ]


def test_xliff_2_corner_cases() -> None:
    matches = (
        '<mtc:matches xmlns:mtc="urn:oasis:names:tc:xliff:matches:2.0"><mtc:match><source>q</source>'
        "<target>r</target></mtc:match></mtc:matches>"
    )
    items = read_xliff(
        make_xliff_20(
            f"{matches}<segment><source>Hi <pc id='1'>you</pc><ph id='2'/><sc id='3'/><cp hex='0007'/>!</source>"
            "<target><mrk id='m'>Hallo</mrk> du<ec startRef='3'/></target></segment>"
            "<ignorable><source> </source><target> </target></ignorable>"
            "<segment><source>two</source><target>zwei</target></segment>",
            "<segment><source>bad <cp hex='D800'/><cp hex='z'/><cp hex='110000'/><cp/>code</source>"
            "<target>t</target></segment>",
            "<segment><source>open</source></segment>",
        )
    )
    assert list_texts(items) == [("Hi you\x07!", "Hallo du"), ("two", "zwei"), ("bad code", "t")]
    assert list_reasons(items) == [(4, "no translation")]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('<x id="1" ctype="lb"/>', "\n"),
        ('<x id="1" ctype="x-html-br" equiv-text="&lt;br>"/>', "\n"),
        ('<ph id="1" ctype="lb">&lt;br/></ph>', "\n"),
        ('<x id="1" equiv-text=" "/>', " "),
        ('<x id="1" equiv-text="&#160;"/>', "\u00a0"),
        ('<x id="1" equiv-text="{0}"/>', ""),
        ('<x id="1" ctype="image"/>', ""),
        ('<x id="1"/>', ""),
        ('<ph id="1">a<x ctype="lb"/>b</ph>', ""),
    ],
)
def test_whitespace_codes_become_whitespace_and_others_are_dropped(code: str, text: str) -> None:
    unit = f"<source>Hello{code}World</source><target>Hallo{code}Welt</target>"
    assert list_texts(read_xliff(make_xliff_12(f"<trans-unit>{unit}</trans-unit>"))) == [
        (f"Hello{text}World", f"Hallo{text}Welt")
    ]


def test_line_breaks_of_xliff_2_have_a_sub_type() -> None:
    codes = '<ph id="1" type="fmt" subType="xlf:lb"/>', '<ph id="2" equiv=" "/>', '<ph id="3" equiv="{}"/>'
    items = read_xliff(make_xliff_20(f"<segment><source>a{'b'.join(codes)}c</source><target>d</target></segment>"))
    assert list_texts(items) == [("a\nb bc", "d")]


@pytest.mark.parametrize("write", [make_xliff_12, make_xliff_20])
def test_xliff_is_read_backwards_on_request(write: Callable[..., str]) -> None:
    pair = "<source>a</source><target>b</target>"
    data = write(f"<trans-unit>{pair}</trans-unit>" if write is make_xliff_12 else f"<segment>{pair}</segment>")
    assert list_texts(read_xliff(data, LanguagePair("de", "en"))) == [("b", "a")]
    assert list_texts(read_xliff(data, LanguagePair("de", None))) == [("b", "a")]
    assert list_texts(read_xliff(data, ANY_LANGUAGES)) == [("a", "b")]
    assert xliff.XliffReader.read_languages([data.encode()], "a") == EN_DE
    with pytest.raises(LanguageMismatchError, match="does not contain en and fr: it has de, en"):
        read_xliff(data, LanguagePair("en", "fr"))


def test_file_with_only_a_source_language_matches_any_target() -> None:
    data = make_xliff_12(
        "<trans-unit><source>a</source><target>b</target></trans-unit>", languages='source-language="en-US"'
    )
    assert list_texts(read_xliff(data)) == [("a", "b")]
    assert list_texts(read_xliff(data, LanguagePair("de", "en"))) == [("b", "a")]


def test_regional_variants_match_the_language() -> None:
    file = (
        "<file source-language='{}'><trans-unit><source>a</source><target xml:lang='de'>b</target></trans-unit></file>"
    )
    data = f"<xliff>{file.format('en-US')}{file.format('en_GB')}</xliff>"
    assert list_texts(read_xliff(data, ANY_LANGUAGES)) == [("a", "b")] * 2
    assert xliff.XliffReader.read_languages([data.encode()], "a") == LanguagePair("en", None)


def test_only_files_in_the_requested_languages_are_read() -> None:
    file = '<x:file source-language="en" target-language="{}"><trans-unit/><x:trans-unit>{}</x:trans-unit></x:file>'
    pair = "<x:source>{}</x:source><x:target>{}</x:target>"
    body = file.format("fr", pair.format("a", "b")) + file.format("de", pair.format("c", "d"))
    data = f'<x:xliff version="1.2" xmlns:x="urn:q">{body}</x:xliff>'
    items = read_xliff(data)
    assert list_texts(items) == [("c", "d")]
    assert list_reasons(items) == [(1, "no de side")]
    with pytest.raises(LanguageMismatchError, match="it has de, en, fr"):
        read_xliff(data, ANY_LANGUAGES)


@pytest.mark.parametrize("size", [1, 3, 10])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_xml_does_not_depend_on_block_sizes(size: int, encoding: str) -> None:
    data = make_tmx(make_unit(en="é &amp; <hi>b</hi>", de="ß"), make_unit(en="c")).encode(encoding)
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    assert list(tmx.read_pairs(blocks, "a", EN_DE)) == list(tmx.read_pairs([data], "a", EN_DE))


# Broken and hostile files.


@pytest.mark.parametrize("cut", [0.5, 0.9, 0.999])
def test_truncated_tmx_keeps_the_units_before(cut: float) -> None:
    data = make_tmx(*(make_unit(en=str(n), de=str(n)) for n in range(1000))).encode()
    items: list[Pair | BadLine] = []
    with pytest.raises(CorpusError, match=r"a\.tmx is cut short after line [\d,]+: fetch or copy it again"):
        items.extend(tmx.read_pairs([data[: int(len(data) * cut)]], "a.tmx", EN_DE))
    assert abs(len(items) - 1000 * cut) < 5
    assert list_texts(items) == [(str(n), str(n)) for n in range(len(items))]


def test_malformed_xml_is_reported_after_the_units_before_it() -> None:
    items: list[Pair | BadLine] = []
    with pytest.raises(
        CorpusError, match=r"a\.tmx is not well-formed XML at line 3, column 6 \(mismatched tag\): corr"
    ):
        items.extend(tmx.read_pairs([make_tmx(make_unit(en="a", de="b"), "<a></b>").encode()], "a.tmx", EN_DE))
    assert list_texts(items) == [("a", "b")]


def test_wrong_root_element_is_reported() -> None:
    with pytest.raises(CorpusError, match=r"must begin with <tmx>, but begins with <html>: check"):
        read_tmx("<html><body>404</body></html>")
    with pytest.raises(CorpusError, match=r"a\.xlf is empty: fetch"):
        read_xliff("")


def test_external_doctype_is_ignored_and_never_fetched() -> None:
    for address in ("tmx14.dtd", "file:///etc/passwd", "http://127.0.0.1:9/tmx.dtd"):
        data = f'<?xml version="1.0"?><!DOCTYPE tmx SYSTEM "{address}">' + make_tmx(make_unit(en="a", de="b"))
        assert list_texts(read_tmx(data)) == [("a", "b")]


ATTACKS = {
    "a file by an entity": '<!DOCTYPE tmx [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
    "the network by an entity": '<!DOCTYPE tmx [<!ENTITY x SYSTEM "http://127.0.0.1:9/">]>',
    "a parameter entity": '<!DOCTYPE tmx [<!ENTITY % p SYSTEM "http://127.0.0.1:9/"> %p;]>',
    "a billion laughs": '<!DOCTYPE tmx [<!ENTITY a "lol">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefghi", "bcdefghix", strict=True))
    + "]>",
    "quadratic blowup": f'<!DOCTYPE tmx [<!ENTITY x "{"y" * 100_000}">]>',
    "an attribute list": '<!DOCTYPE tmx [<!ATTLIST tu a CDATA "b">]>',
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("read", [read_tmx, read_xliff])
def test_doctype_attacks_are_refused(attack: str, read: Callable[[str], list[Pair | BadLine]]) -> None:
    data = make_tmx(make_unit(en="&x;" * 1000, de="b")) if read is read_tmx else make_xliff_12("<trans-unit/>")
    with pytest.raises(CorpusError, match=r"declares entities or the like in its DOCTYPE.* \(at line 1\): remove that"):
        read(ATTACKS[attack] + data)


@pytest.mark.parametrize("doctype", ["", '<!DOCTYPE tmx SYSTEM "tmx14.dtd">'])
def test_undeclared_entity_is_an_error_with_its_line(doctype: str) -> None:
    with pytest.raises(CorpusError, match=r"(undefined entity|uses &nbsp;).*") as caught:
        read_tmx(doctype + make_tmx(make_unit(en="a&nbsp;b", de="c")))
    assert "line 2" in str(caught.value)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(CorpusError, match="over 256 elements inside each other"):
        read_tmx(make_tmx("<a>" * 100_000))
    with pytest.raises(CorpusError, match="over 256 elements inside each other"):
        read_tmx(make_tmx(make_unit(en="<hi>" * 100_000, de="b")))


def test_overlong_text_is_a_bad_line_and_the_next_unit_is_read() -> None:
    items = read_tmx(
        make_tmx(
            make_unit(en="x" * 2**20, de="fits"), make_unit(en="y" * (2**20 + 1), de="b"), make_unit(en="c", de="d")
        )
    )
    assert list_reasons(items) == [(3, "longer than 1 MiB")]
    assert [len(source) for source, _ in list_texts(items)] == [2**20, 1]


def repeat_block(begin: str, middle: str, times: int) -> Iterator[bytes]:
    yield begin.encode()
    for _ in range(times):
        yield middle.encode()


def measure_peak(pairs: Iterator[Pair | BadLine]) -> tuple[int, int]:
    tracemalloc.start()
    try:
        count = sum(1 for _ in pairs)
    except CorpusError:
        count = -1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return count, peak


def test_large_tmx_is_read_in_constant_memory() -> None:
    block = "\n".join(make_unit(en="Hello, you", de="Hallo, du") for _ in range(500)) + "\n"
    content = [*repeat_block("<tmx><body>", block, 25), b"</body></tmx>"]
    count, peak = measure_peak(tmx.read_pairs(iter(content), "a.tmx", EN_DE))
    assert count == 12_500
    assert peak < 2**20  # of 1.3 MB


@pytest.mark.parametrize("begin", ["<tmx><!--", '<tmx a="', "<tmx><body><tu><tuv xml:lang='en'><seg>", "<tmx><?x "])
def test_endless_tags_and_texts_are_read_in_constant_memory(begin: str) -> None:
    _, peak = measure_peak(tmx.read_pairs(repeat_block(begin, "x" * 2**16, 400), "a.tmx", EN_DE))
    assert peak < 16 * 2**20


@pytest.mark.parametrize(
    ("languages", "target", "declared", "expected"),
    [
        (("en", "de"), "de", "", "en"),
        (("en-US", "en-GB", "de"), "de", "", "en"),
        (("en", "fr", "de"), "de", "", None),
        (("en", "fr", "de"), "de", "fr", "fr"),
        (("en",), None, "", None),
        (("en", "de"), None, "en", "en"),
        (("en", "de"), "de", "de", "en"),
    ],
)
def test_the_source_of_a_tmx_file_is_the_declared_or_the_only_other_language(
    languages: tuple[str, ...], target: str | None, declared: str, expected: str | None
) -> None:
    assert tmx._infer_source(languages, target, declared) == expected
