"""Preceding sentences before a source, the same in training and in translation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from attent.data.corpus import open_corpora
from attent.data.encode import EncodingConfig
from attent.data.pairs import LanguagePair, Pair
from attent.data.split import hold_out
from attent.data.token_store import prepare_store
from attent.decoding.input_lines import LineBlock
from attent.decoding.pipeline import add_line_context
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.text.vocabulary import MAX_CONTEXT_CHARS, SEPARATOR, ContextWindow, has_separator, split_context
from tests.text.corpus import lines, tokenizer

CONTEXT_TOKENIZER = TokenizerConfig(vocab=400, symbols=(SEPARATOR,))


def make_tokenizer() -> Tokenizer:
    return train_tokenizer(*lines(), CONTEXT_TOKENIZER)


def test_a_source_has_the_sentences_before_it_and_none_at_the_start() -> None:
    texts = ["A.", "B.", " C.", "", "D.", f"E{SEPARATOR} e.", "F."]
    blocks = [LineBlock(source_name="", lines=[*part], first_index=0, byte_count=0) for part in (texts[:3], texts[3:])]
    assert [line for block in add_line_context(iter(blocks), 0) for line in block.lines] == texts
    assert [line for block in add_line_context(iter(blocks), 2) for line in block.lines] == [
        "A.",
        "A.␞ B.",
        "A.␞ B.␞  C.",
        "",
        "D.",
        f"D.␞ E{SEPARATOR} e.",
        "D.␞ E e.␞ F.",
    ]
    assert split_context("A.␞ B.␞  C.") == ("A.␞ B.␞ ", " C.")
    assert split_context("C.") == ("", "C.")


def test_the_context_is_limited() -> None:
    window = ContextWindow(3)
    window.append("a" * 10, "b" * MAX_CONTEXT_CHARS, "c" * 10)
    assert window.prefix == "c" * 10 + "␞ "


def test_the_separator_is_one_token_and_changes_no_other() -> None:
    own = make_tokenizer()
    assert has_separator(own.source)
    assert not has_separator(tokenizer().source)
    first, second = lines()[0][:2]
    alone, joined = own.source.encode([first, second]), own.source.encode([f"{first}␞ {second}"])[0]
    assert joined == [*alone[0], own.source.encode(["␞"])[0][-1], *alone[1]]
    assert own.source.decode(joined) == f"{first}␞ {second}"


def test_pairs_of_a_corpus_have_their_real_predecessors(tmp_path: Path) -> None:
    """Also after a part was held out, and where filters drop the predecessor."""
    sources, targets = (list(dict.fromkeys(side)) for side in lines(300))
    sources, targets = sources[:60], targets[:60]
    sources[9], targets[9] = sources[9] * 40, "x"  # dropped for its length
    rows = [f"{s}\t{t}" for s, t in zip(sources, targets, strict=True)]
    rows.insert(20, "")
    (tmp_path / "a.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    (corpus,) = open_corpora([str(tmp_path / "a.tsv")], LanguagePair("en", "de"))
    corpus = replace(corpus, context=1)
    expected = {s: f"{before}␞ " for before, s in pairwise(sources)}
    expected |= {sources[0]: "", sources[20]: ""}  # the empty line ends a document
    expected[sources[10]] = ""  # its predecessor is too long
    train, held_out = hold_out([corpus], 8, seed=1)
    pairs = [pair for part in (*train, *held_out) for pair in part if isinstance(pair, Pair) and pair.source]
    assert len(pairs) > 50
    assert {pair.source: pair.context for pair in pairs}.items() <= expected.items()
    own = make_tokenizer()
    store = prepare_store([corpus], EncodingConfig(tokenizer=own), tmp_path / "store", workers=1)
    plain = prepare_store([replace(corpus, context=0)], EncodingConfig(tokenizer=own), tmp_path / "store", workers=1)
    assert store.folder != plain.folder
    kept = [int(location & 0xFFFFFFFF) - 1 for location in store.locations]
    texts = [rows[line].split("\t")[0] for line in kept]
    assert texts == [rows[int(location & 0xFFFFFFFF) - 1].split("\t")[0] for location in plain.locations]
    assert sources[9] not in texts
    for index, text in enumerate(texts):
        assert own.source.decode(list(map(int, store.source[index][:-1]))) == expected[text] + text
        assert np.array_equal(store.target[index], plain.target[index])
