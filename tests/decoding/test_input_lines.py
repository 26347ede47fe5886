"""Reading lines: none waits for later input, and none is lost because of an invalid one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from attent.decoding import input_lines
from attent.decoding.input_lines import LineSource, build_line_source
from attent.decoding.options import InputError


def build_source(chunks: list[bytes], ready: Iterator[bool] | None = None) -> LineSource:
    return LineSource(name="text", chunks=chunks, has_more=(lambda: True) if ready is None else lambda: next(ready))


def read_texts(chunks: list[bytes], most: int = 100) -> list[str]:
    return [line for block in build_source(chunks).read_blocks(most) for line in block.lines]


def test_a_byte_order_mark_is_removed() -> None:
    mark = b"\xef\xbb\xbf"
    assert read_texts([mark + b"a dog\r\n", b"a\rcat"]) == ["a dog", "a\rcat"]
    with pytest.raises(InputError, match="line 1: must be UTF-8, but byte 2 is 0xe4"):
        read_texts([mark + b"M\xe4dchen"])


def test_available_lines_of_a_pipe_are_yielded_at_once() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)  # a read that would wait gives None, and is an error
    with open(reader, "rb") as stream, open(writer, "wb", buffering=0) as pipe:
        pipe.write(b"a dog\na cat\nand a ha")
        blocks = build_line_source(stream, None).read_blocks(100)
        assert next(blocks).lines == ["a dog", "a cat"]  # and the pipe is still open
        pipe.write(b"lf line\n")
        assert next(blocks).lines == ["and a half line"]
        pipe.write(b"no end")
        pipe.close()
        assert [block.lines for block in blocks] == [["no end"]]


def test_lines_do_not_depend_on_the_chunks() -> None:
    text = "one\n\ntwo\r\n\u2028three\x0c\nä".encode()
    expected = ["one", "", "two", "\u2028three\x0c", "ä"]
    for size in (1, 2, 3, 100):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        assert read_texts(chunks) == read_texts(chunks, most=2) == expected
        blocks = build_source(chunks, ready=iter([False] * 100)).read_blocks(2)
        assert [line for block in blocks for line in block.lines] == expected


def test_a_slow_pipe_is_read_line_by_line() -> None:
    chunks = [b"line\n"] * 5
    slow = build_source(chunks, ready=iter([False] * 5))
    assert [(block.first_index, block.byte_count) for block in slow.read_blocks(2)] == [(i, 5) for i in range(5)]


def test_blocks_of_long_lines_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MAX_BLOCK_BYTES", 10)
    blocks = build_source([b"a\nb\n" + b"c" * 20 + b"\nd\n"]).read_blocks(100)
    assert [len(block.lines) for block in blocks] == [3, 1]
    blocks = build_source([b"12345\n67890\nabc\n"]).read_blocks(100)
    assert [(block.lines, block.first_index, block.byte_count) for block in blocks] == [
        (["12345", "67890"], 0, 12),
        (["abc"], 2, 4),
    ]
    blocks = build_source([b"a\nb\nc\n"]).read_blocks(2)
    assert [block.lines for block in blocks] == [["a", "b"], ["c"]]
    monkeypatch.setattr(input_lines, "MAX_LINE_BYTES", 30)
    assert read_texts([b"a\n", *[b"0" * 10] * 3]) == ["a", "0" * 30]
    with pytest.raises(InputError, match="is it a text file"):
        read_texts([b"a\n", *[b"0" * 10] * 3, b"0"])


def test_lines_before_an_invalid_one_are_yielded_first() -> None:
    for bad in (b"\xff", b"a\0b"):
        blocks = build_source([b"one\ntwo\n" + bad + b"\nfour\n"]).read_blocks(100)
        assert next(blocks).lines == ["one", "two"]
        with pytest.raises(InputError, match="text, line 3: must be"):
            next(blocks)
