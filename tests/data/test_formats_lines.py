"""TSV, JSON Lines and Moses pairs, also compressed, damaged and in UTF-16."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attent.data.formats import jsonl, registry, streams, tsv
from attent.data.pairs import ANY_LANGUAGES, BadLine, CorpusError, LanguageMismatchError, LanguagePair, Pair

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

EN_DE = LanguagePair("en", "de")
COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress}


def read_blocks(data: bytes, name: str = "a.tsv") -> Iterator[bytes]:
    return streams.read_blocks(io.BytesIO(data), name)


def read_tsv(data: bytes, languages: LanguagePair = ANY_LANGUAGES) -> list[Pair | BadLine]:
    return list(tsv.read_pairs(read_blocks(data), "a.tsv", languages))


def read_jsonl(text: str, languages: LanguagePair = ANY_LANGUAGES) -> list[Pair | BadLine]:
    return list(jsonl.read_pairs(read_blocks(text.encode(), "a.jsonl"), "a.jsonl", languages))


def read_moses(source: bytes, target: bytes) -> list[Pair | BadLine]:
    return list(registry.read_moses_pairs(read_blocks(source, "a.en"), read_blocks(target, "a.de"), ("a.en", "a.de")))


def list_texts(items: list[Pair | BadLine]) -> list[tuple[str, str]]:
    return [(item.source, item.target) for item in items if isinstance(item, Pair)]


def list_reasons(items: list[Pair | BadLine]) -> list[tuple[int, str]]:
    return [(item.line, item.reason) for item in items if isinstance(item, BadLine)]


def read_until_error(pairs: Iterator[Pair | BadLine]) -> tuple[list[Pair | BadLine], str]:
    items = []
    try:
        items.extend(pairs)  # keeps the items before the error
    except CorpusError as error:
        return items, str(error)
    raise AssertionError("no error")


# Lines.


def test_only_a_newline_ends_a_line() -> None:
    odd = "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i\rj"
    assert list(streams.read_lines([f"{odd}\n{odd}".encode()], "a")) == [odd, odd]


def test_crlf_and_byte_order_mark_are_removed() -> None:
    assert list(streams.read_lines([b"\xef\xbb\xbfone\r\ntwo\r\r\n\r\n"], "a")) == ["one", "two\r", ""]


@given(st.text(), st.integers(1, 7))
def test_lines_do_not_depend_on_block_sizes(text: str, size: int) -> None:
    data = text.encode()
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    assert list(streams.read_lines(blocks, "a")) == list(streams.read_lines([data], "a"))


@given(st.lists(st.text().filter(lambda line: "\n" not in line and not line.endswith("\r"))))
def test_written_lines_round_trip(written: list[str]) -> None:
    data = "\ufeff".encode() + "".join(f"{line}\n" for line in written).encode()
    assert list(streams.read_lines([data], "a")) == written


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_as_spreadsheets_export_it_is_read(encoding: str) -> None:
    text = "é\tß\n😀\tz\r\n" if encoding == "utf-16" else "\ufeffé\tß\n😀\tz\r\n"
    assert list_texts(read_tsv(text.encode(encoding))) == [("é", "ß"), ("😀", "z")]


def test_truncated_utf16_character_loses_only_its_line() -> None:
    data = "\ufeffa\tb\n".encode("utf-16-le") + b"\x00\xd8" + "\tc\nd\te\n".encode("utf-16-le") + b"x"
    pairs = read_tsv(data)
    assert list_texts(pairs) == [("a", "b"), ("d", "e")]
    assert list_reasons(pairs) == [(2, "not UTF-8"), (4, "not UTF-8")]


def test_invalid_utf8_line_is_a_bad_line() -> None:
    pairs = read_tsv(b"a\tb\n" + "schön\tgut\n".encode("latin-1") + b"c\td\n")
    assert list_texts(pairs) == [("a", "b"), ("c", "d")]
    assert pairs[1] == BadLine("not UTF-8", "a.tsv", 2, "sch�n\tgut")


def test_control_characters_are_kept() -> None:
    assert list_texts(read_tsv(b"a\x00b\tc\x07d\n")) == [("a\x00b", "c\x07d")]


def test_overlong_line_is_skipped_in_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.tsv"
    with open(path, "wb") as file:
        file.write(b"a\tb\n")
        for _ in range(10):
            file.write(b"x" * 10**6)
        file.write(b"\tend\nc\td\n")
    tracemalloc.start()
    pairs = list(tsv.read_pairs(streams.InputFile(path).read_blocks(), str(path), ANY_LANGUAGES))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list_texts(pairs) == [("a", "b"), ("c", "d")]
    assert pairs[1] == BadLine("longer than 1 MiB", str(path), 2, "x" * 80)
    assert pairs[2].line == 3
    assert peak < 5 * 2**20


@pytest.mark.parametrize("length", [2**20, 2**20 + 1])
def test_line_may_be_exactly_1_mib_long(length: int) -> None:
    lines = list(streams.read_lines([b"a" * length + b"\n", b"b\n"], "a"))
    assert lines[1] == "b"
    assert isinstance(lines[0], str) == (length == 2**20)


# Compression.


@pytest.mark.parametrize("suffix", COMPRESS)
def test_each_compression_is_read_also_in_several_members_and_under_any_name(tmp_path: Path, suffix: str) -> None:
    data = COMPRESS[suffix](b"a\tb\nc") + COMPRESS[suffix](b"\td\n")
    for name in (f"x.tsv{suffix}", "x.tsv"):
        (tmp_path / name).write_bytes(data)
        pairs = list(tsv.read_pairs(streams.InputFile(tmp_path / name).read_blocks(), name, ANY_LANGUAGES))
        assert list_texts(pairs) == [("a", "b"), ("c", "d")]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_truncated_file_keeps_the_pairs_before_the_cut(suffix: str) -> None:
    noise = random.Random(1)
    data = "".join(f"{noise.random()}\t{number}\n" for number in range(40_000)).encode()
    cut = COMPRESS[suffix](data)
    items, message = read_until_error(tsv.read_pairs(read_blocks(cut[: len(cut) // 2], "x"), "x", ANY_LANGUAGES))
    assert len(items) > 1000
    assert list_texts(items) == [tuple(line.split("\t")) for line in data.decode().split("\n")[: len(items)]]
    assert message == f"x is cut short after line {len(items):,}: fetch or copy it again"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_damaged_data_is_reported_with_the_line(suffix: str) -> None:
    data = bytearray(COMPRESS[suffix](b"".join(b"%d\t%d\n" % (n * n, n) for n in range(9000))))
    data[len(data) // 2 : len(data) // 2 + 20] = b"\xff" * 20
    _, message = read_until_error(tsv.read_pairs(read_blocks(bytes(data), "x"), "x", ANY_LANGUAGES))
    assert message.startswith("x is damaged (")
    assert "after line " in message


def test_compression_suffix_must_match_the_content() -> None:
    _, message = read_until_error(tsv.read_pairs(read_blocks(b"plain\ttext\n", "a.tsv.gz"), "a.tsv.gz", ANY_LANGUAGES))
    assert message.startswith("a.tsv.gz is not gz data, though its name says so: fetch it again, or rename it")


# TSV.


def test_columns_one_and_two_are_the_pair() -> None:
    assert read_tsv(b"a\tb\tc\n\te\nf\t") == [
        Pair("a", "b", "a.tsv", 1),
        Pair("", "e", "a.tsv", 2),
        Pair("f", "", "a.tsv", 3),
    ]


def test_missing_columns_are_bad_lines() -> None:
    assert list_reasons(read_tsv(b"a\tb\nonly\n\n")) == [(2, "one column only"), (3, "empty line")]


@pytest.mark.parametrize("header", ["id\tde\ten", "id\tDE_at\ten-US", '"id"\t"target"\t"source"', "n\tTgt\tSRC"])
def test_header_chooses_the_columns(header: str) -> None:
    pairs = read_tsv(f"{header}\n1\tHallo\tHello\n2\tx\n".encode(), EN_DE)
    assert list_texts(pairs) == [("Hello", "Hallo")]
    assert list_reasons(pairs) == [(3, "too few columns")]


def test_first_line_similar_to_a_header_is_text() -> None:
    assert list_texts(read_tsv(b"en\tde\n")) == [("en", "de")]  # no languages requested
    assert list_texts(read_tsv(b"no\tnein, danke\n", EN_DE)) == [("no", "nein, danke")]


@pytest.mark.parametrize("header", ["en\tde", "EN\tDE", "en-US\tde_AT", '"en"\t"de"', "eng\tdeu", "twi\ten"])
def test_first_line_of_languages_above_text_is_a_header(header: str) -> None:
    data = f"{header}\nA dog.\tEin Hund.\n".encode()
    assert read_tsv(data) == [Pair("A dog.", "Ein Hund.", "a.tsv", 2)]
    assert tsv.read_languages([data], "a") == LanguagePair(*header.replace('"', "").split("\t"))


@pytest.mark.parametrize(
    "text",
    [
        "no\tja\nhello\thola\n",  # a list of words
        "No\tNe\nA dog barks.\tPas aboie.\n",
        "no\tno\nA dog barks.\tEin Hund bellt.\n",
        "so\tqq\nA dog barks.\tEin Hund bellt.\n",
        "it\tes\nonly one column here\n",
        "src\tmt\nA dog barks.\tEin Hund bellt.\n",
        "en\tde\tscore\nA dog.\tEin Hund.\t5\n",
    ],
)
def test_ambiguous_language_words_are_text(text: str) -> None:
    first = text.split("\n")[0].split("\t")
    assert list_texts(read_tsv(text.encode()))[0] == (first[0], first[1])
    assert tsv.read_languages([text.encode()], "a") == ANY_LANGUAGES


def test_header_with_more_than_two_languages_needs_a_choice() -> None:
    data = b"id\ten\tde\nA dog barks.\tA dog barks.\tEin Hund bellt.\n"
    with pytest.raises(LanguageMismatchError, match="does not say which two languages to read: it has de, en, id"):
        read_tsv(data)
    assert list_texts(read_tsv(data, LanguagePair("de", "en"))) == [("Ein Hund bellt.", "A dog barks.")]


def test_names_of_languages_stay_on_one_line_of_the_error() -> None:
    with pytest.raises(LanguageMismatchError, match=r"it has a\\nb, c; "):
        read_jsonl(json.dumps({"a\nb": "x", "c": "y"}), LanguagePair("en", "de"))


def test_header_of_unrequested_languages_is_not_text() -> None:
    with pytest.raises(LanguageMismatchError, match=r"a\.tsv does not contain en and de: it has es, fr"):
        read_tsv(b"fr\tes\nUn chien aboie.\tUn perro ladra.\n", EN_DE)


def test_header_of_other_languages_is_an_error() -> None:
    with pytest.raises(LanguageMismatchError, match=r"a\.tsv does not contain en and de: it has en, fr; choose two"):
        read_tsv(b"en\tfr\nHello\tBonjour\n", EN_DE)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ('"say ""yes"""', 'say "yes"'),
        ('"""a"" b"', '"a" b'),
        ('"plain"', '"plain"'),  # quoted speech, not a spreadsheet's quoting
        ('"a "b" c"', '"a "b" c"'),
        ('""', '""'),
        ('"""', '"""'),
        ('5" and 6"', '5" and 6"'),
        ('"open', '"open'),
    ],
)
def test_spreadsheet_quotes_are_removed_and_others_kept(cell: str, text: str) -> None:
    assert list_texts(read_tsv(f"{cell}\tx\n".encode())) == [(text, "x")]


TORN = "a quoted cell with a tab or line break in it"


@pytest.mark.parametrize(
    "torn",
    [
        '"a\nb"\tc d',
        'a\t"b\nc"',
        '"a\n\nb ""c""\nd"\te',
        'a\t"b\n""c"""',
        '"He said ""hi"" to\tme"\t"x"',
        '"a\tb"\tc',
        'a\t"b\tc"',
        '"a\tb"\t"c\td"',
    ],
)
def test_quoted_cell_with_tab_or_line_break_is_one_bad_line(torn: str) -> None:
    pairs = read_tsv(f"one\teins\ntwo\tzwei\n{torn}\nlast\tletzt\n".encode())
    assert list_texts(pairs) == [("one", "eins"), ("two", "zwei"), ("last", "letzt")]
    assert list_reasons(pairs) == [(3, TORN)]
    assert pairs[2] == BadLine(TORN, "a.tsv", 3, torn.split("\n")[0])


def test_broken_cells_are_found_in_three_columns_and_at_the_start() -> None:
    rows = '1\tone\teins\n"a\nb"\t"c\nd"\te\n2\ttwo\tzwei\n'
    assert list_reasons(read_tsv(rows.encode())) == [(2, TORN)]
    assert list_reasons(read_tsv(b'"He said ""hi"" to\tme"\t"x"\n')) == [(1, TORN)]
    assert list_reasons(read_tsv(b'"a\nb"\tc d\n"x y"\tz\n')) == [(1, TORN)]


@pytest.mark.parametrize(
    "raw",
    [
        '"Hello, he said.\tHallo, sagte er."\n',
        '"Come here.\t"Komm her.\nNow," she said.\tSofort", sagte sie.\n',
        '"Come here.\tKomm her.\nNow."\tSofort."\n',
        'a\t"b\nc"\td\n',
        '"say ""yes"" to\tsag ""ja"""\n',
        '"Hi.\tHallo."\tCC-BY\nBye.\tEnde.\tCC-BY\n',
        '5" or 6"\t5" oder 6"\tcm\n',
    ],
)
def test_stray_quotes_lose_no_pair(raw: str) -> None:
    pairs = read_tsv(raw.encode())
    assert [(item.source, item.target) for item in pairs if isinstance(item, Pair)] == [
        tuple(line.split("\t")[:2]) for line in raw.splitlines()
    ]


@given(st.lists(st.tuples(*[st.text(alphabet='"a ', min_size=1)] * 2), min_size=1))
def test_every_line_of_two_columns_is_a_pair_with_any_quotes(rows: list[tuple[str, str]]) -> None:
    pairs = read_tsv("".join(f"{left}\t{right}\n" for left, right in rows).encode())
    assert [item.line for item in pairs if isinstance(item, Pair)] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize("lines", [3, 200])
def test_open_quote_without_an_end_loses_no_line(lines: int) -> None:
    rest = [f"{n}" for n in range(lines)]
    pairs = read_tsv("\n".join(["one\teins", 'two\t"zwei', *rest, "three\tdrei"]).encode())
    assert [item.line for item in pairs] == list(range(1, lines + 4))
    assert list_texts(pairs) == [("one", "eins"), ("two", '"zwei'), ("three", "drei")]
    assert list_texts(read_tsv(b'one\teins\ntwo\t"zwei')) == [("one", "eins"), ("two", '"zwei')]


def test_open_quote_before_a_bad_line_or_truncation_is_read() -> None:
    pairs = read_tsv(b'one\t"eins\n\xff"\ntwo\tzwei\n')
    assert (list_texts(pairs), list_reasons(pairs)) == ([("one", '"eins'), ("two", "zwei")], [(2, "not UTF-8")])

    def read_damaged_blocks() -> Iterator[bytes]:
        yield b'one\t"eins\nmore\n'
        raise streams.DamagedFileError("x", "is cut short")

    items, message = read_until_error(tsv.read_pairs(read_damaged_blocks(), "x", ANY_LANGUAGES))
    assert (list_texts(items), list_reasons(items)) == ([("one", '"eins')], [(2, "one column only")])
    assert message == "x is cut short after line 2: fetch or copy it again"


# JSON lines.


@pytest.mark.parametrize(
    "line",
    [
        '{"src": "a", "tgt": "b"}',
        '{"target": "b", "id": 7, "source": "a"}',
        '{"translation": {"de": "b", "fr": "c", "en": "a"}}',
        '{"de-AT": "b", "en_US": "a", "score": 0.5}',
    ],
)
def test_all_json_layouts_are_read(line: str) -> None:
    assert read_jsonl(line, EN_DE) == [Pair("a", "b", "a.jsonl", 1)]


def test_first_object_decides_the_direction() -> None:
    text = '{"translation": {"en": "a", "de": "b"}}\n{"translation": {"de": "d", "en": "c"}}\n'
    assert list_texts(read_jsonl(text)) == [("a", "b"), ("c", "d")]
    assert jsonl.read_languages([text.encode()], "a") == LanguagePair("en", "de")


@given(st.text(), st.text())
def test_any_text_round_trips_through_json(source: str, target: str) -> None:
    for ascii_only in (True, False):
        line = json.dumps({"src": source, "tgt": target}, ensure_ascii=ascii_only)
        assert list_texts(read_jsonl(line)) == [(source, target)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('"a"', "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('{"a":' * 100_000, "not a JSON object"),
        ('{"src": ' + "1" * 10_000 + ', "tgt": "b"}', "not a JSON object"),
        ('{"src": NaN, "tgt": "b"}', "not a string"),
        ('{"src": null, "tgt": "b"}', "not a string"),
        ('{"src": "\\ud800", "tgt": "b"}', "not UTF-8"),
        ('{"translation": {"en": "a"}}', "no de side"),
        ("", "empty line"),
    ],
)
def test_json_without_a_pair_is_a_bad_line(line: str, why: str) -> None:
    pairs = read_jsonl(f'{{"src": "a", "tgt": "b"}}\n{line}\n{{"src": "c", "tgt": "d"}}\n', EN_DE)
    assert list_texts(pairs) == [("a", "b"), ("c", "d")]
    assert list_reasons(pairs) == [(2, why)]


def test_duplicate_json_key_takes_the_last_value() -> None:
    assert list_texts(read_jsonl('{"src": "a", "src": "b", "tgt": "c"}')) == [("b", "c")]


def test_json_without_the_requested_languages_lists_its_keys() -> None:
    with pytest.raises(LanguageMismatchError, match="does not contain en and de: it has es, fr, id"):
        read_jsonl('{"es": "a", "fr": "b", "id": 3}\n', EN_DE)
    with pytest.raises(LanguageMismatchError, match="does not say which two languages to read: it has de, en, fr"):
        read_jsonl('{"translation": {"en": "a", "de": "b", "fr": "c"}}\n')


# Moses.


def test_lines_are_paired_by_number() -> None:
    expected = [Pair("a", "x", "a.en", 1, "a.de"), Pair("b", "y", "a.en", 2, "a.de")]
    assert read_moses(b"a\nb", b"x\ny\n") == expected


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"y" * (2**20 + 1)])
@pytest.mark.parametrize("side", [0, 1])
def test_bad_line_on_one_side_keeps_the_sides_in_step(bad: bytes, side: int) -> None:
    good, spoilt = b"1\n2\n3\n", b"1\n" + bad + b"\n3\n"
    pairs = read_moses(*((spoilt, good) if side == 0 else (good, spoilt)))
    assert list_texts(pairs) == [("1", "1"), ("3", "3")]
    assert pairs[1].line == 2
    assert pairs[1].file == ("a.en", "a.de")[side]


@pytest.mark.parametrize(("left", "right"), [(1000, 999), (3, 5000), (5000, 3), (1, 0), (0, 2)])
def test_files_of_unequal_length_fail_after_the_common_pairs(left: int, right: int) -> None:
    source, target = (b"".join(b"%d\n" % n for n in range(count)) for count in (left, right))
    items, message = read_until_error(
        registry.read_moses_pairs(read_blocks(source, "a.en"), read_blocks(target, "a.de"), ("a.en", "a.de"))
    )
    assert len(list_texts(items)) == min(left, right)
    assert f"a.en has {left:,} lines but a.de {right:,}" in message


def test_two_files_may_be_compressed_differently() -> None:
    pairs = read_moses(gzip.compress(b"a\nb\n"), lzma.compress(b"x\ny\n"))
    assert list_texts(pairs) == [("a", "x"), ("b", "y")]
