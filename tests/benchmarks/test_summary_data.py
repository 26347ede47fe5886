"""The training data for summaries: what is copied, and that the test set stays apart."""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

import pytest

from benchmarks import summary_data
from benchmarks.summary_data import draw_copy_pairs, find_nearest_sentence


def test_the_only_sentence_with_we_is_copied() -> None:
    sentences = [f"We saw number {i}." if i % 5 == 0 else f"They were {i}." for i in range(500)]
    pairs = list(draw_copy_pairs(sentences))
    assert len(pairs) == 100
    for source, target in pairs:
        assert target in source
        assert source.lower().count("we ") == 1 == target.lower().count("we ")
    assert pairs == list(draw_copy_pairs(sentences))
    assert len({source.index(target) > 0 for source, target in pairs}) == 2  # not always the first


def test_the_nearest_sentence_shares_most_words_with_the_summary() -> None:
    abstract = "Dogs are old friends. We train dogs to read maps with treats. Results are good."
    assert find_nearest_sentence(abstract, "Dogs read maps for treats") == "We train dogs to read maps with treats."


def test_all_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scitldr").mkdir()
    for part in ("train", "dev", "test"):
        for side, text in (("src", f"The {part} set.  We read it.\n"), ("tgt", f"we read {part}\n")):
            (tmp_path / f"scitldr/{part}.{side}.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "europarl.en.xz").write_bytes(lzma.compress(b"It is so.\nWe agree.\n"))
    out = tmp_path / "out"
    arguments = ["summary_data", str(tmp_path / "scitldr"), str(tmp_path / "europarl.en.xz"), str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    summary_data.main()
    texts = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*.*") if path.is_file()}
    assert texts["text/train.txt"] == "It is so. We agree.\n" + 5 * "The train set. We read it.\n"
    assert texts["copy/abstracts.tsv"] == "The train set. We read it.\tWe read it.\n"
    assert texts["pairs/valid.tsv"] == "The dev set. We read it.\twe read dev\n"
    assert [name for name, text in texts.items() if "The test set" in text] == ["test.tsv"]
