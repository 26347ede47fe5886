"""PO catalogs: corner cases, and files written by gettext, polib and the translate toolkit."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import polib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from translate.misc.multistring import multistring
from translate.storage import pypo

from attent.data.formats import po, streams
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

HEADER = 'msgid ""\nmsgstr ""\n"Language: de\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'
needs_gettext = pytest.mark.skipif(shutil.which("msgcat") is None, reason="gettext's tools are not installed")


def read_po(
    data: str | bytes, languages: LanguagePair = ANY_LANGUAGES, *, fuzzy: bool = False, obsolete: bool = False
) -> list[Pair | BadLine]:
    raw = data.encode() if isinstance(data, str) else data
    content = streams.read_blocks(io.BytesIO(raw), "a.po")
    return list(po.read_pairs(content, "a.po", languages, ReadOptions(fuzzy=fuzzy, obsolete=obsolete)))


def list_texts(items: Iterable[Pair | BadLine]) -> list[tuple[str, str]]:
    return [(item.source, item.target) for item in items if isinstance(item, Pair)]


def list_reasons(items: Iterable[Pair | BadLine]) -> list[tuple[int, str]]:
    return [(item.line, item.reason) for item in items if isinstance(item, BadLine)]


# Files of other programs.


def make_catalog(count: int) -> polib.POFile:
    """Return a catalog with all kinds of entries and odd strings."""
    catalog = polib.POFile(wrapwidth=40)
    catalog.metadata = {
        "Language": "de",
        "Content-Type": "text/plain; charset=UTF-8",
        "Plural-Forms": "nplurals=3; plural=(n%10);",
    }
    ids, translations = make_strings(count, 5), make_strings(count, 6)
    for number, (source, target) in enumerate(zip(ids, translations, strict=True)):
        entry = polib.POEntry(msgid=source, msgstr=target, comment="é #~ msgid", occurrences=[("a.c", str(number))])
        if number % 7 == 1:
            entry.msgctxt = f'context "{number}"'
        if number % 7 == 2:
            entry.flags = ["fuzzy", "c-format"]
            entry.previous_msgid = "older\nid"
        if number % 7 == 3:
            entry.msgstr = ""
        if number % 7 == 4:
            entry.obsolete = True
        if number % 7 == 5:
            entry.msgid_plural, entry.msgstr = f"{source} many", ""
            entry.msgstr_plural = {form: f"{target} {form}" for form in range(3)}
        catalog.append(entry)
    return catalog


def list_expected_pairs(catalog: polib.POFile) -> list[tuple[str, str]]:
    """Return the pairs of a catalog as parsed by polib, with our rule for plurals."""
    pairs = []
    for entry in catalog:
        if entry.obsolete or "fuzzy" in entry.flags:
            continue
        if entry.msgid_plural:
            forms = [entry.msgstr_plural[form] for form in sorted(entry.msgstr_plural)]
            ids = [entry.msgid] + [entry.msgid_plural] * (len(forms) - 1)
            pairs += list(zip(ids, forms, strict=True))
        elif entry.msgstr:
            pairs.append((entry.msgid, entry.msgstr))
    return pairs


def test_catalog_of_polib_is_read_as_by_polib(tmp_path: Path) -> None:
    catalog = make_catalog(350)
    catalog.save(str(tmp_path / "a.po"))
    items = read_po((tmp_path / "a.po").read_bytes())
    assert sorted(list_texts(items)) == sorted(list_expected_pairs(polib.pofile(str(tmp_path / "a.po"))))
    assert sorted(why for _, why in list_reasons(items)) == ["fuzzy"] * 50 + ["no translation"] * 50 + ["obsolete"] * 50


@needs_gettext
@pytest.mark.parametrize(
    "command",
    [
        ["msgcat", "--width=30"],
        ["msgcat", "--no-wrap", "--sort-output"],
        ["msgcat", "--escape"],
        ["msgattrib", "--no-obsolete"],
        ["msgconv", "--to-code=UTF-8"],
    ],
)
def test_gettext_tools_keep_the_pairs(tmp_path: Path, command: list[str]) -> None:
    catalog = make_catalog(210)
    catalog.save(str(tmp_path / "a.po"))
    written = subprocess.run([*command, str(tmp_path / "a.po")], capture_output=True, check=True, timeout=60).stdout
    assert sorted(list_texts(read_po(written))) == sorted(list_expected_pairs(catalog))


@needs_gettext
def test_compiled_and_decompiled_catalog_has_the_same_pairs(tmp_path: Path) -> None:
    catalog = make_catalog(210)
    catalog.save(str(tmp_path / "a.po"))
    subprocess.run(["msgfmt", "-o", tmp_path / "a.mo", tmp_path / "a.po"], check=True, timeout=60)
    written = subprocess.run(["msgunfmt", tmp_path / "a.mo"], capture_output=True, check=True, timeout=60).stdout
    assert sorted(list_texts(read_po(written))) == sorted(list_expected_pairs(catalog))


@needs_gettext
@pytest.mark.parametrize("charset", ["ISO-8859-15", "CP1252", "SHIFT_JIS", "GB18030", "BIG5", "EUC-JP", "KOI8-R"])
def test_catalogs_in_other_charsets_are_read(tmp_path: Path, charset: str) -> None:
    text = {"KOI8-R": "да", "ISO-8859-15": "Größe €", "CP1252": "Größe €", "GB18030": "中文 é"}.get(charset, "表示")
    (tmp_path / "a.po").write_text(f'{HEADER}msgid "a"\nmsgstr "{text}"\n', encoding="utf-8")
    command = ["msgconv", f"--to-code={charset}", str(tmp_path / "a.po")]
    written = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    assert text.encode() not in written
    assert list_texts(read_po(written)) == [("a", text)]


def test_catalog_of_the_translate_toolkit_is_read() -> None:
    store = pypo.pofile()
    pairs = list(zip(make_strings(200, 7), make_strings(200, 8), strict=True))
    for source, target in pairs:
        store.addsourceunit(source).target = target
    plural = store.addsourceunit("one")
    plural.source, plural.target = multistring(["one", "%d many"]), multistring(["eins", "%d viele", "%d mehr"])
    list_expected_pairs = [*pairs, ("one", "eins"), ("%d many", "%d viele"), ("%d many", "%d mehr")]
    assert list_texts(read_po(bytes(store))) == list_expected_pairs


@given(st.text(), st.text(min_size=1))
def test_any_text_round_trips_through_a_catalog(source: str, target: str) -> None:
    def quote(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
        return f'"{escaped}"'

    assert list_texts(read_po(f'{HEADER}msgctxt "c"\nmsgid {quote(source)}\nmsgstr {quote(target)}\n')) == [
        (source, target)
    ]


# Corners.


def test_plural_forms_are_paired_with_singular_and_plural_ids() -> None:
    entry = 'msgid "a file"\nmsgid_plural "%d files"\n'
    three = 'msgstr[0] "plik"\nmsgstr[1] "%d pliki"\nmsgstr[2] "%d plików"\n'
    assert list_texts(read_po(HEADER + entry + three)) == [
        ("a file", "plik"),
        ("%d files", "%d pliki"),
        ("%d files", "%d plików"),
    ]
    assert list_texts(read_po(HEADER + entry + 'msgstr[0] "%d ファイル"\n')) == [("%d files", "%d ファイル")]
    half = read_po(HEADER + entry + 'msgstr[0] ""\nmsgstr[1] "%d pliki"\n')
    assert list_texts(half) == [("%d files", "%d pliki")]


def test_same_id_in_two_contexts_is_two_pairs() -> None:
    data = 'msgctxt "verb"\nmsgid "Open"\nmsgstr "Öffnen"\n\nmsgctxt "state"\nmsgid "Open"\nmsgstr "Offen"\n'
    assert list_texts(read_po(HEADER + data)) == [("Open", "Öffnen"), ("Open", "Offen")]


def test_fuzzy_and_obsolete_entries_are_read_on_request() -> None:
    data = HEADER + '#, c-format, fuzzy\nmsgid "a"\nmsgstr "b"\n\n#~ msgid "c"\n#~ msgstr ""\n#~ "d"\n'
    assert list_reasons(read_po(data)) == [(7, "fuzzy"), (10, "obsolete")]
    assert list_texts(read_po(data, fuzzy=True)) == [("a", "b")]
    assert list_texts(read_po(data, obsolete=True)) == [("c", "d")]
    assert list_texts(read_po(data, fuzzy=True, obsolete=True)) == [("a", "b"), ("c", "d")]


def test_comment_that_says_fuzzy_is_a_comment() -> None:
    assert list_texts(read_po(HEADER + '# a, fuzzy\n#. b, fuzzy\n#: c, fuzzy\nmsgid "a"\nmsgstr "b"\n')) == [("a", "b")]


def test_previous_id_is_not_text() -> None:
    data = '#| msgid "old"\n#| "er"\nmsgid "new"\nmsgstr "neu"\n\n#~| msgid "x"\n#~ msgid "y"\n#~ msgstr "z"\n'
    assert list_texts(read_po(HEADER + data, obsolete=True)) == [("new", "neu"), ("y", "z")]


def test_entries_without_blank_lines_are_separated() -> None:
    data = 'msgid "a"\nmsgstr "b"\n# comment\nmsgid "c"\nmsgstr "d"\n'
    data += 'msgctxt "x"\nmsgid "e"\nmsgstr "f"\nmsgid "g"\nmsgstr "h"'
    assert list_texts(read_po(HEADER + data)) == [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")]


def test_escapes_are_those_of_c() -> None:
    data = r'msgid "\a\b\f\v\t\\n\"" "joined" ' + "\n" + r'msgstr "\303\244 \x41\xc3\xb6 \101"' + "\n"
    assert list_texts(read_po(HEADER + data)) == [('\a\b\f\v\t\\n"joined', "ä Aö A")]


@pytest.mark.parametrize(
    "wrong",
    [
        'msgid "a \\q"\nmsgstr "b"',
        'msgid "a\nmsgstr "b"',
        'msgid "a"x\nmsgstr "b"',
        'msgid a\nmsgstr "b"',
        'msgid "a"\nmsgid_plural "b"\nmsgstr[0] "c"\nmsgstr[0] "d"',
        'msgid "a"\nmsgstr "\\377"',
        "just words",
        '"a string of nothing"',
    ],
)
def test_malformed_entry_is_a_bad_line_and_the_next_is_read(wrong: str) -> None:
    items = read_po(f'{HEADER}msgid "1"\nmsgstr "eins"\n\n{wrong}\n\nmsgid "2"\nmsgstr "zwei"\n')
    assert list_texts(items) == [("1", "eins"), ("2", "zwei")]
    assert list_reasons(items) == [(9, "not PO")]


@pytest.mark.parametrize(("wrong", "why"), [('msgid "a"', "no msgstr"), ('msgctxt "a"\nmsgstr "b"', "no msgid")])
def test_incomplete_entry_is_a_bad_line(wrong: str, why: str) -> None:
    assert list_reasons(read_po(f'{HEADER}{wrong}\n\nmsgid "2"\nmsgstr "zwei"\n')) == [(6, why)]


def test_invalid_bytes_lose_their_entry_but_not_in_comments() -> None:
    data = (
        HEADER.encode()
        + '# Müller\nmsgid "a"\nmsgstr "b"\n\nmsgid "c"\nmsgstr "ü"\n\nmsgid "d"\nmsgstr "e"\n'.encode("cp1252")
    )
    items = read_po(data)
    assert list_texts(items) == [("a", "b"), ("d", "e")]
    assert list_reasons(items) == [(10, "not UTF-8")]


@pytest.mark.parametrize("charset", ["nonsense", "hex", "idna", "utf-16", "KOI8"])
def test_unknown_charset_is_reported(charset: str) -> None:
    with pytest.raises(CorpusError, match=f"a.po is in charset {charset.lower()}, which attent does not know: convert"):
        read_po(HEADER.replace("UTF-8", charset))


def test_catalog_is_read_backwards_on_request() -> None:
    data = HEADER + 'msgid "a"\nmsgstr "b"\n'
    for languages in (LanguagePair("de", "en"), LanguagePair("de", None), LanguagePair(None, "en")):
        assert list_texts(read_po(data, languages)) == [("b", "a")]
    for languages in (LanguagePair("en", "de"), LanguagePair("en", None), LanguagePair(None, "de"), ANY_LANGUAGES):
        assert list_texts(read_po(data, languages)) == [("a", "b")]
    assert po.read_languages([data.encode()], "a") == LanguagePair(None, "de")


def test_catalog_in_another_language_is_an_error() -> None:
    with pytest.raises(
        LanguageMismatchError, match=r"a\.po does not contain en and fr: it has de; change --src or --tgt"
    ):
        read_po(HEADER, LanguagePair("en", "fr"))


def test_truncated_catalog_keeps_the_entries_before() -> None:
    entries = "".join(f'msgid "{n * n}"\nmsgstr "{n}"\n\n' for n in range(1000))
    data = gzip.compress((HEADER + entries).encode())
    items: list[Pair | BadLine] = []
    with pytest.raises(CorpusError, match=r"a\.po is cut short after line [\d,]+: fetch"):
        items.extend(
            po.read_pairs(streams.read_blocks(io.BytesIO(data[: len(data) // 2]), "a.po"), "a.po", ANY_LANGUAGES)
        )
    assert len(list_texts(items)) > 200


@pytest.mark.parametrize("size", [1, 2, 7])
def test_catalog_does_not_depend_on_block_sizes(size: int) -> None:
    data = HEADER.replace("UTF-8", "SHIFT_JIS").encode() + 'msgid "a\\n"\nmsgstr "表示"\n'.encode("shift_jis")
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    assert (
        list(po.read_pairs(blocks, "a", ANY_LANGUAGES))
        == list(po.read_pairs([data], "a", ANY_LANGUAGES))
        == [Pair("a\n", "表示", "a", 6)]
    )


def test_endless_text_is_read_in_constant_memory() -> None:
    line = b'"' + b"x" * 1000 + b'"\n'
    tracemalloc.start()
    items = list(
        po.read_pairs(
            iter([b'msgid "a"\nmsgstr ""\n', *[line] * 4000, b'\nmsgid "b"\nmsgstr "c"\n']), "a.po", ANY_LANGUAGES
        )
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list_reasons(items) == [(1, "longer than 1 MiB")]
    assert list_texts(items) == [("b", "c")]
    assert peak < 3 * 2**20


def test_only_ascii_spaces_and_digits_belong_to_keywords() -> None:
    """As for msgfmt; a line separator in an index was accepted, and the file that was written could not be read."""
    for index in ("\u20280", "\u0660"):
        content = f'msgid "a"\nmsgid_plural "b"\nmsgstr[{index}] ""\n'.encode()
        with pytest.raises(CorpusError, match="is not PO at line 3"):
            po.scan_units(content, "a.po", ANY_LANGUAGES)
