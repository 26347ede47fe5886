"""Two hundred generated files: only their empty targets change, byte by byte; other programs read the same."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import polib
import pytest
from lxml import etree
from translate.storage import pypo
from translate.storage import tmx as toolkit_tmx
from translate.storage import xliff as toolkit_xliff
from translate.storage import xliff2 as toolkit_xliff2

from attent.data.formats.registry import detect_document_format
from attent.data.pairs import CorpusError
from attent.data.pretranslate import pretranslate_file
from tests.data import pretranslate_cases
from tests.data.pretranslate_cases import fail_if_called, pretranslate, translate_in_parentheses

NAMES = list(pretranslate_cases.GENERATORS)


def make_files(name: str) -> Iterator[tuple[bytes, pretranslate_cases.Made, bytes]]:
    for seed in range(pretranslate_cases.FILES_PER_KIND):
        yield pretranslate_cases.GENERATORS[name](random.Random(f"{name} {seed}"))


@pytest.mark.parametrize("name", NAMES)
def test_only_the_empty_targets_change(name: str) -> None:
    for before, expected, after in make_files(name):
        result = pretranslate(before, name)
        assert result.content == after
        assert (result.filled_count, result.existing_count, result.skipped) == (
            expected.filled_count,
            expected.existing_count,
            (),
        )


@pytest.mark.parametrize("name", NAMES)
def test_complete_file_is_unchanged_and_translates_nothing(name: str) -> None:
    for _, expected, after in make_files(name):
        result = pretranslate(after, name, fail_if_called)
        assert result.content == after
        assert (result.filled_count, result.existing_count) == (0, expected.filled_count + expected.existing_count)


@pytest.mark.parametrize("name", NAMES)
def test_lossy_translator_fills_only_units_without_placeholders(name: str) -> None:
    for before, expected, _ in make_files(name):
        result = pretranslate(before, name, lambda texts: ["x"] * len(texts))
        assert result.filled_count + len(result.skipped) == expected.filled_count
        again = pretranslate(result.content, name, lambda texts: ["x"] * len(texts))
        assert again.content == result.content
        assert all("lost" in unit.reason and unit.source for unit in result.skipped)


# The result as read by other programs.


def test_polib_and_the_translate_toolkit_read_the_result_as_fuzzy() -> None:
    for before, expected, _ in make_files("a.po"):
        after = pretranslate(before, "a.po").content
        old, new = (list(polib.pofile(_decode_for_polib(content))) for content in (before, after))
        assert [_list_metadata(entry) for entry in old] == [_list_metadata(entry) for entry in new]
        changed = [entry for was, entry in zip(old, new, strict=True) if _list_forms(was) != _list_forms(entry)]
        assert [form for entry in changed for form in _list_forms(entry)] == expected.targets
        assert all(entry.fuzzy for entry in changed)
        store = pypo.pofile.parsestring(after.removeprefix(b"\xef\xbb\xbf"))
        assert sum(unit.isfuzzy() for unit in store.units) == sum(entry.fuzzy for entry in new)


def _decode_for_polib(content: bytes) -> str:
    """Decode and add the space after `#,` that polib requires."""
    text = content.decode("latin-1" if b"ISO-8859-1" in content else "utf-8-sig")
    return text.replace("\r\n", "\n").replace("#,no", "#, no")


def _list_metadata(entry: polib.POEntry) -> tuple[object, ...]:
    flags = [flag for flag in entry.flags if flag != "fuzzy"]
    ids = (entry.msgctxt, entry.msgid, entry.msgid_plural, entry.previous_msgid)
    return (*ids, flags, entry.comment, entry.tcomment, entry.occurrences, entry.obsolete)


def _list_forms(entry: polib.POEntry) -> list[str]:
    return list(entry.msgstr_plural.values()) or [entry.msgstr]


@pytest.mark.parametrize(("name", "unit"), [("a.xlf", "trans-unit"), ("b.xliff", "segment"), ("a.tmx", "tu")])
def test_lxml_tree_differs_only_in_targets_and_marks(name: str, unit: str) -> None:
    for before, expected, _ in make_files(name):
        trees = [etree.fromstring(element) for element in (before, pretranslate(before, name).content)]
        empty = [not _get_target_text(element) for element in trees[0].iterfind(f".//{{*}}{unit}")]
        assert sum(empty) == expected.filled_count
        for tree in trees:
            for element, strip in zip(tree.iterfind(f".//{{*}}{unit}"), empty, strict=True):
                assert tree is trees[0] or _get_target_text(element)
                if strip:
                    _remove_targets(element)
        old, new = (etree.tostring(tree, method="c14n") for tree in trees)
        assert b"".join(old.split()) == b"".join(new.split())


def _find_targets(unit: etree._Element) -> list[etree._Element]:
    language = "{http://www.w3.org/XML/1998/namespace}lang"
    targets = unit.findall("{*}target")
    return targets + [variant for variant in unit.findall("{*}tuv") if variant.get(language, "").startswith("de")]


def _get_target_text(unit: etree._Element) -> str:
    segments = [seg for element in _find_targets(unit) for seg in (element.findall("{*}seg") or [element])]
    return "".join("".join(element.itertext()) for element in segments).strip()


def _remove_targets(unit: etree._Element) -> None:
    unit.attrib.pop("state", None)
    unit.attrib.pop("subState", None)
    for target in _find_targets(unit):
        unit.remove(target)


@pytest.mark.parametrize(
    ("name", "store"),
    [("a.xlf", toolkit_xliff.xlifffile), ("b.xliff", toolkit_xliff2.Xliff2File), ("a.tmx", toolkit_tmx.tmxfile)],
)
def test_translate_toolkit_reads_every_translation(name: str, store: type) -> None:
    for before, expected, _ in make_files(name):
        after = pretranslate(before, name).content
        units = [unit for unit in store.parsestring(after).units if unit.source and unit.source != "a"]
        assert len(units) >= expected.filled_count
        assert sum("(" in str(unit.target or "") for unit in units) >= expected.filled_count
        if name == "a.xlf":
            assert sum(unit.isreview() for unit in units) == expected.filled_count


# Bad files.


ATTACKS = {
    "billion laughs": '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]>',
    "external entity": '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
    "parameter entity": '<!DOCTYPE x [<!ENTITY % a SYSTEM "http://a.example/"> %a;]>',
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("name", "root"), [("a.xlf", "xliff"), ("a.tmx", "tmx")])
def test_entities_are_refused(attack: str, name: str, root: str) -> None:
    with pytest.raises(CorpusError, match=rf"{name} declares .* which can be an attack \(at line 1\): remove that"):
        pretranslate(f"{ATTACKS[attack]}<{root}>&a;</{root}>", name, fail_if_called)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_file_is_refused_or_filled_as_far_as_it_goes(name: str) -> None:
    content = next(
        before for before, expected, _ in make_files(name) if expected.filled_count > 4 and before.isascii() is False
    )
    for cut in range(0, len(content), 37):
        message = pretranslate_cases.get_error(content[:cut], name)
        if message:
            assert re.match(f"{name} .*: ", message)
        else:
            assert name == "a.po"
            assert pretranslate(pretranslate(content[:cut], name).content, name, fail_if_called).filled_count == 0


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "a.xlf", "a.xlf is empty"),
        (b"<tmx/>", "a.xlf", "a.xlf must begin with <xliff>, but begins with <tmx>"),
        (b"<xliff>\n<file></xliff>", "a.xlf", "a.xlf is not well-formed XML at line 2"),
        (b'<?xml version="1.0" encoding="shift_jis"?><tmx/>', "a.tmx", "encoding that attent does not read"),
        (b'msgid "a"\nmsgstr ""\n\nhello\n', "a.po", "a.po is not PO at line 4: correct it there"),
        (b'msgid "a\nmsgstr ""\n', "a.po", "a.po is not PO at line 1"),
        (b'msgid "a"\n\nmsgctxt "b"\nmsgid "c"\n', "a.po", "incomplete entry at line 1"),
        (b'msgid "a"\nmsgstr ""\nmsgstr ""\n', "a.po", "a.po is not PO at line 3"),
        (b'msgid "a"\nmsgid_plural "b"\nmsgstr ""\n', "a.po", "an incomplete entry at line 1"),
        (b'msgid ""\nmsgstr "charset=klingon\\n"\n', "a.po", "charset klingon, which attent does not know"),
        (b'msgid ""\nmsgstr "charset=UTF-16\\n"\n', "a.po", "charset utf-16, which attent"),
        (b"a\0b", "a.txt", "a.txt is not text at line 1"),
        (b"\xff\xfea", "a.txt", "bytes that are not utf-16-le"),
        (b"", "a.pdf", "a.pdf must be a file of one of these kinds: .arb, .csv, .docx, .htm, .html, .json"),
    ],
)
def test_bad_files_are_reported(content: bytes, name: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        pretranslate(content, name, fail_if_called)


def test_wrong_number_of_translations_is_an_error() -> None:
    with pytest.raises(CorpusError, match="must be 2 translations, but there are 1"):
        pretranslate("one\ntwo\n", "a.txt", lambda texts: ["eins"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("de.po", "po"),
        ("x/MESSAGES.POT", "po"),
        ("a.xlf", "xliff"),
        ("a.sdlxliff", "xliff"),
        ("a.tmx", "tmx"),
        ("README.md", "markdown"),
        ("a.txt", "text"),
        ("a.po.gz", None),
        ("a.tsv", "table"),
        ("po", None),
    ],
)
def test_document_format_is_detected_by_name(name: str, kind: str | None) -> None:
    assert detect_document_format(name) == kind


def test_each_text_is_translated_once_and_in_one_call() -> None:
    calls: list[list[str]] = []

    def translate(texts: object) -> list[str]:
        calls.append(list(texts))  # type: ignore[call-overload]
        return translate_in_parentheses(calls[-1])

    result = pretranslate_file(b"one\n\n two\none \n%d\n", "a.txt", translate)
    assert calls == [["one", "two"]]
    assert result.content == b"(one)\n\n (two)\n(one) \n%d\n"
