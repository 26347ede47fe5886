"""The figures are sacreBLEU's own, under signatures that say how they came about."""

from __future__ import annotations

import logging

import pytest

from attent.scoring import score_corpus
from attent.scoring.metrics import choose_bleu_tokenizer

REFERENCES = ["The cat sat on the mat, again.", "A dog barks.", "It's 5 o'clock in the morning."]
OUTPUTS = ["The cat sat on a mat, again.", " A dog barks.", "It is five in the morning."]


def test_they_are_what_sacrebleu_says() -> None:
    import sacrebleu

    got = score_corpus(OUTPUTS, REFERENCES, "en")
    assert got.bleu == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert got.chrf == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score
    assert 20 < got.bleu < 80
    assert got.exact == pytest.approx(100 / 3)


def test_signatures_are_given_in_full() -> None:
    got = score_corpus(OUTPUTS, REFERENCES, "en")
    assert got.bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    assert got.chrf_signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.")


def test_the_references_themselves_are_perfect() -> None:
    got = score_corpus(REFERENCES, REFERENCES)
    assert (got.bleu, got.chrf, got.exact) == (pytest.approx(100), pytest.approx(100), 100)


def test_nothing_at_all_is_worth_nothing() -> None:
    got = score_corpus(["", "", ""], REFERENCES)
    assert (got.bleu, got.chrf, got.exact) == (0, 0, 0)


def test_outputs_and_references_are_not_confused() -> None:
    """A translation that is too short is punished, one that is too long less so."""
    assert score_corpus(["a b c d"], ["a b c d e f g h"]).bleu != score_corpus(["a b c d e f g h"], ["a b c d"]).bleu
    assert score_corpus(["a b c d"], ["a b c d e f g h"]).bleu == pytest.approx(100 * 2.718281828**-1)


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    {
        **dict.fromkeys(["en", "de", "tw", "ru", "ar", "hi", "tr", "vi", "xx", None], "13a"),
        **dict.fromkeys(["zh", "zh-TW", "zh_Hans", "yue"], "zh"),
        **dict.fromkeys(["ja", "ko", "th", "km", "lo", "my", "bo"], "char"),
    }.items(),
)
def test_words_are_found_as_the_script_asks_for(language: str | None, tokenizer: str) -> None:
    assert choose_bleu_tokenizer(language) == tokenizer


def test_the_references_tell_the_script_where_the_language_does_not() -> None:
    assert choose_bleu_tokenizer(None, ["这是一个很大的房子"] * 5) == "zh"
    assert choose_bleu_tokenizer(None, ["これはとても大きな家です"] * 5) == "char"
    assert choose_bleu_tokenizer(None, REFERENCES) == "13a"
    assert choose_bleu_tokenizer("de", ["这是一个很大的房子"] * 5) == "13a"


def test_text_without_spaces_is_scored_by_its_characters() -> None:
    got = score_corpus(["这是一个很小的房子。"], ["这是一个很大的房子。"], "zh")
    assert 30 < got.bleu < 90
    assert "tok:zh" in got.bleu_signature
    assert score_corpus(["これはとても小さな家です"], ["これはとても大きな家です"], "ja").bleu > 30


def test_text_that_looks_tokenised_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        score_corpus(["a dog barks ."] * 200, ["a dog barks ."] * 200)
    assert not caplog.records


@pytest.mark.parametrize(
    ("outputs", "references", "words"),
    [
        ([], [], "at least one output to score, but there is none"),
        (["a"], ["a", "b"], "a reference for each output, but there are 2 references and 1 outputs"),
    ],
)
def test_what_cannot_be_scored_is_refused(outputs: list[str], references: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        score_corpus(outputs, references)
