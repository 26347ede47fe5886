"""XLIFF and TMX: corner cases of targets, inline markup and languages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attent.data.pairs import CorpusError
from tests.data.pretranslate_cases import (
    MARK_2,
    MARK_12,
    MARK_TMX,
    fail_if_called,
    pretranslate,
    translate_in_parentheses,
)

MARKED = f"<target {MARK_12}>"
SEGMENTS = '<mrk mtype="seg" mid="1">a</mrk> <mrk mtype="seg" mid="2">b</mrk>'
SEGMENTS_FILLED = SEGMENTS.replace(">a<", ">(a)<").replace(">b<", ">(b)<")


def make_xliff_12(units: str, languages: str = 'source-language="en" target-language="de"') -> str:
    space = 'xmlns="urn:oasis:names:tc:xliff:document:1.2"'
    return f'<xliff version="1.2" {space}><file original="x" {languages}><body>{units}</body></file></xliff>'


def make_unit_12(inside: str, attributes: str = "") -> str:
    return make_xliff_12(f'<trans-unit id="1"{attributes}>{inside}</trans-unit>')


def make_xliff_20(inside: str, above: str = "") -> str:
    space = 'xmlns="urn:oasis:names:tc:xliff:document:2.0"'
    unit = f'<file id="f"{above}><unit id="u">{inside}</unit></file>'
    return f'<xliff version="2.0" {space} srcLang="en" trgLang="de">{unit}</xliff>'


def make_tmx(*units: str, source: str = "en") -> str:
    body = "".join(f"<tu>{unit}</tu>" for unit in units)
    return f'<tmx version="1.4"><header srclang="{source}"/><body>{body}</body></tmx>'


def make_variant(language: str, text: str) -> str:
    return f'<tuv xml:lang="{language}"><seg>{text}</seg></tuv>'


def pretranslate_12(source: str, translate: Callable[..., list[str]] = translate_in_parentheses) -> str:
    """Return the target that is inserted for a source."""
    content = pretranslate(make_unit_12(f"<source>{source}</source>"), "a.xlf", translate).content.decode()
    return content.split(MARKED)[1].split("</target>")[0] if MARKED in content else ""


# Targets.


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<source>a</source>", f"<source>a</source>{MARKED}(a)</target>"),
        ("\n <source>a</source>\n", f"\n <source>a</source>\n {MARKED}(a)</target>\n"),
        ("<source>a</source><target/>", f"<source>a</source>{MARKED}(a)</target>"),
        (
            "<source>a</source><target state-qualifier='x'\n state=\"new\"/>",
            '<source>a</source><target state-qualifier="mt-suggestion"\n state="needs-review-translation">(a)</target>',
        ),
        (
            f"<source>a b</source><seg-source>{SEGMENTS}</seg-source>",
            f"<source>a b</source><seg-source>{SEGMENTS}</seg-source>{MARKED}{SEGMENTS_FILLED}</target>",
        ),
        ('<source>a</source><target><mrk mtype="seg" mid="1"/></target>', f"<source>a</source>{MARKED}(a)</target>"),
    ],
)
def test_target_is_inserted_and_marked(before: str, after: str) -> None:
    assert pretranslate(make_unit_12(before), "a.xlf").content.decode() == make_unit_12(after)


@pytest.mark.parametrize(
    "unit",
    [
        "<source>a</source><target>b</target>",
        '<source>a</source><target state="new">a</target>',
        '<source>a</source><target><x id="1"/></target>',
        "<source> </source>",
        "<source/><target/>",
        "<note>no source</note>",
        "<source>a</source><target>b</target><alt-trans><source>c</source><target/></alt-trans>",
    ],
)
def test_translated_and_empty_units_are_unchanged(unit: str) -> None:
    assert pretranslate(make_unit_12(unit), "a.xlf", fail_if_called).content.decode() == make_unit_12(unit)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (make_unit_12("<source>a</source>", ' translate="no"'), 'the file says translate="no"'),
        (make_xliff_12('<group translate="no"><trans-unit><source>a</source></trans-unit></group>'), 'translate="no"'),
        (make_unit_12("<source>a</source><target/>", ' approved="yes"'), "its empty target is approved"),
        (make_unit_12('<source>a</source><target state="final"/>'), "its empty target is approved"),
        (make_unit_12("<source>a</source><target><!-- why --></target>"), "its empty target contains a comment"),
        (make_unit_12("<source>a</source><seg-source> </seg-source>"), "its seg-source is empty"),
        (make_unit_12('<source>a</source><seg-source><mrk mtype="seg"/><x/></seg-source>'), "its seg-source is empty"),
        (make_unit_12('<source>a <ph id="1"><sub>b</sub></ph> c</source>'), "text inside markup"),
        (make_unit_12('<source>a <q:x xmlns:q="urn:q"/> c</source>'), "it contains <q:x>"),
        (make_xliff_20("<segment><source>a</source></segment>", ' translate="no"'), 'translate="no"'),
        (make_xliff_20('<segment state="final"><source>a</source><target/></segment>'), "empty target is approved"),
    ],
)
def test_intentionally_empty_targets_are_skipped_with_a_reason(content: str, reason: str) -> None:
    result = pretranslate(content, "a.xlf", fail_if_called)
    assert result.content.decode() == content
    assert (result.filled_count, result.existing_count, len(result.skipped)) == (0, 0, 1)
    assert reason in result.skipped[0].reason
    assert result.skipped[0].source.startswith("a")


def test_xliff_2_segment_stays_initial_with_a_sub_state() -> None:
    before = make_xliff_20('<segment id="s" subState="my:x" state="initial"><source>a</source></segment>')
    attributes = 'subState="attent:needs-review" state="initial"'
    after = make_xliff_20(f'<segment id="s" {attributes}><source>a</source><target>(a)</target></segment>')
    assert pretranslate(before, "a.xlf").content.decode() == after
    assert MARK_2 in pretranslate(make_xliff_20("<segment><source>a</source></segment>"), "a.xlf").content.decode()


# Texts.


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("<![CDATA[a < b]]>", "(a &lt; b)"),
        ("a &amp; b &#x41; &quot;c&quot;", '(a &amp; b A "c")'),
        ("&lt;p&gt;One.&lt;/p&gt;&lt;p&gt;Two.&lt;/p&gt;", "&lt;p&gt;(One.)&lt;/p&gt;&lt;p&gt;(Two.)&lt;/p&gt;"),
        ("a\nb", "(a)\n(b)"),
        ("a&#13;b", "(a)&#13;(b)"),
        ('<g id="1">a</g>', '<g id="1">(a)</g>'),
        ('<g id="1"><g id="2">a</g> b</g>', '<g id="1">(<g id="2">a</g> b)</g>'),
        ('<g id="1">a</g> b <g id="2">c</g>', '(<g id="1">a</g> b <g id="2">c</g>)'),
        ('<x id="1"/> a <x id="2" />', '<x id="1"/> (a) <x id="2" />'),
        ('a<x id="1" ctype="lb"/>b', '(a)<x id="1" ctype="lb"/>(b)'),
        ('a &lt;1&gt; <x id="9"/> b', '(a &lt;1&gt; <x id="9"/> b)'),
        ('a <bpt id="1"/>b', '(a <bpt id="1"/>b)'),
        ('a <mrk mtype="protected">b <g id="1">c</g></mrk> d', '(a <mrk mtype="protected">b <g id="1">c</g></mrk> d)'),
        ("12 %", "12 %"),
    ],
)
def test_inline_markup_is_kept(source: str, target: str) -> None:
    assert pretranslate_12(source) == target


def test_codes_get_unused_numbers() -> None:
    requested: list[str] = []

    def translate(texts: list[str]) -> list[str]:
        requested.extend(texts)
        return texts

    pretranslate_12('a &lt;x3&gt; <g id="1">b</g><x id="2"/> c', translate)
    assert requested == ["a <x3> <x4> b </x4><x5/> c"]


@pytest.mark.parametrize(
    ("translation", "target"),
    [
        ("<x2/> und <x1>x</x1> y", '<x id="8"/> und <g id="7">x</g> y'),
        ("<x1>x <x2/></x1> y", '<g id="7">x <x id="8"/></g> y'),
        ("x </x1> y <x1> <x2/>", ""),
        ("<x1>x y <x2/>", ""),
        ("<x1>x</x1> <x1>z</x1> y <x2/>", ""),
        ("<x1>x</x1> y < 2/>", ""),
    ],
)
def test_target_has_all_codes_well_nested_or_is_skipped(translation: str, target: str) -> None:
    assert pretranslate_12('a <g id="7">b</g> c <x id="8"/> d', lambda texts: [translation]) == target


def test_crossing_codes_must_keep_their_order() -> None:
    source = 'a <bx id="1"/>b<bx id="2"/>c<ex id="1"/>d<ex id="2"/> e'
    assert pretranslate_12(source) == f"({source})"
    assert pretranslate_12(source, lambda texts: ["<x2>a<x1>b</x1>c</x2>"]) == ""


def test_characters_outside_the_encoding_become_references() -> None:
    head = '<?xml version="1.0" encoding="ISO-8859-1"?>'
    content = (head + make_unit_12("<source>é</source>")).encode("latin-1")
    result = pretranslate(content, "a.xlf", lambda texts: ["日é"])
    assert f"{MARKED}&#26085;é</target>".encode("latin-1") in result.content


def test_characters_invalid_in_xml_are_skipped() -> None:
    result = pretranslate(make_unit_12("<source>a</source>"), "a.xlf", lambda texts: ["\x07"])
    assert result.skipped[0].reason == "its translation has '\\x07', which XML cannot contain"


# Languages.


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"src": "de", "tgt": "en"}, "a.xlf goes from en to de, and sources cannot be filled in"),
        ({"src": "en", "tgt": "fr"}, "a.xlf does not contain en and fr: it has de, en"),
    ],
)
def test_xliff_of_other_languages_is_refused(requested: dict[str, str], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        pretranslate(make_unit_12("<source>a</source>"), "a.xlf", fail_if_called, **requested)


def test_only_files_in_the_requested_languages_are_filled() -> None:
    unit = "<trans-unit><source>a</source></trans-unit>"
    files = [f'<file source-language="en" target-language="{tag}"><body>{unit}</body></file>' for tag in ("de", "fr")]
    content = f'<xliff version="1.2">{"".join(files)}</xliff>'
    for requested in ({}, {"src": "en", "tgt": "de"}):
        result = pretranslate(content, "a.xlf", **requested)
        assert [skipped.reason for skipped in result.skipped] == ["no de side"]
        assert result.content.decode() == content.replace("</source>", f"</source>{MARKED}(a)</target>", 1)


def make_added_variant(language: str, text: str, attribute: str = "xml:lang") -> str:
    return f'<tuv {attribute}="{language}" creationtool="attent">{MARK_TMX}<seg>{text}</seg></tuv>'


@pytest.mark.parametrize(
    ("units", "requested", "expected"),
    [
        ([make_variant("en", "a")], {"tgt": "de"}, [make_added_variant("de", "(a)")]),
        (
            [make_variant("en", "a"), make_variant("en", "b") + make_variant("de-AT", "c")],
            {},
            [make_added_variant("de-AT", "(a)"), ""],
        ),
        (
            [make_variant("fr", "a") + make_variant("en", "b")],
            {"src": "fr", "tgt": "de"},
            [make_added_variant("de", "(a)")],
        ),
        ([make_variant("fr", "a") + make_variant("en", "b")], {"tgt": "de"}, [make_added_variant("de", "(b)")]),
        (
            [make_variant("pt-PT", "a"), make_variant("pt-BR", "b")],
            {"src": "pt", "tgt": "pt-BR"},
            [make_added_variant("pt-BR", "(a)"), ""],
        ),
        ([make_variant("en", "a") + make_variant("de", "b") + make_variant("de", "")], {}, [""]),
        (['<tuv lang="EN"><seg>a</seg></tuv>'], {"src": "en", "tgt": "de"}, [make_added_variant("de", "(a)", "lang")]),
        ([make_variant("en", " ") + make_variant("de", "")], {}, [""]),
    ],
)
def test_variant_is_added_where_the_language_is_missing(
    units: list[str], requested: dict[str, str], expected: list[str]
) -> None:
    result = pretranslate(make_tmx(*units), "a.tmx", **requested)
    assert result.content.decode() == make_tmx(*(unit + more for unit, more in zip(units, expected, strict=True)))


def test_empty_variant_is_filled_and_marked() -> None:
    before = make_tmx(make_variant("en", "a") + "\n<tuv xml:lang='de' creationid='me'>\n <seg/></tuv>")
    after = make_tmx(
        make_variant("en", "a") + f"\n<tuv xml:lang='de' creationid='me'>\n {MARK_TMX}\n <seg>(a)</seg></tuv>"
    )
    assert pretranslate(before, "a.tmx").content.decode() == after


@pytest.mark.parametrize(
    ("content", "requested", "message"),
    [
        (make_tmx(make_variant("en", "a")), {}, "a.tmx does not say which two languages to read: it has en"),
        (
            make_tmx(make_variant("en", "a") + make_variant("de", "b") + make_variant("fr", "c")),
            {},
            "it has de, en, fr; choose two",
        ),
        (
            make_tmx(make_variant("en", "a"), source="*all*"),
            {"src": "fr", "tgt": "de"},
            "a.tmx does not contain fr: it has en",
        ),
    ],
)
def test_tmx_with_ambiguous_languages_is_refused(content: str, requested: dict[str, str], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        pretranslate(content, "a.tmx", fail_if_called, **requested)


def test_unit_without_the_source_is_skipped() -> None:
    result = pretranslate(
        make_tmx(make_variant("en", "a") + make_variant("de", "b"), make_variant("fr", "c")),
        "a.tmx",
        fail_if_called,
        src="en",
        tgt="de",
    )
    assert [(unit.reason, unit.source) for unit in result.skipped] == [("no en side", "c")]


def test_report_shows_the_tags_of_the_source() -> None:
    units = (
        '<trans-unit id="1"><source>a <g id="1">b</g> c</source></trans-unit>'
        '<trans-unit id="2" translate="no"><source>a <g id="1">b</g> c</source></trans-unit>'
    )
    xliff = f'<xliff version="1.2"><file source-language="en" target-language="de"><body>{units}</body></file></xliff>'
    result = pretranslate(xliff, "a.xlf", lambda texts: ["x"] * len(texts))
    assert {(unit.source, unit.reason) for unit in result.skipped} == {
        ("a <x1>b</x1> c", "its translation lost <x1>, </x1>"),
        ('a <g id="1">b</g> c', 'the file says translate="no"'),
    }
