"""Metrics are sacreBLEU's, with its signatures."""

from __future__ import annotations

import logging
import random
import statistics
import sys

import pytest

from attent.scoring.metrics import (
    METRICS,
    VALIDATION_METRICS,
    ScoreError,
    add_selected_metric,
    choose_bleu_tokenizer,
    compare_outputs,
    compute_metrics,
    count_edits,
    format_headline,
    format_metrics,
    make_metric,
)
from attent.storage.errors import AttentError

REFERENCES = ["The cat sat on the mat, again.", "A dog barks.", "It's 5 o'clock in the morning."]
OUTPUTS = ["The cat sat on a mat, again.", " A dog barks.", "It is five in the morning."]


def score_corpus(outputs: list[str], references: list[str], language: str | None = None) -> dict[str, float]:
    scores = compute_metrics(outputs, references, VALIDATION_METRICS, language, resamples=0)
    return {score.metric: score.value for score in scores}


def bleu(outputs: list[str], references: list[str], language: str | None = None) -> float:
    return score_corpus(outputs, references, language)["bleu"]


def test_scores_are_those_of_sacrebleu() -> None:
    import sacrebleu

    metrics = score_corpus(OUTPUTS, REFERENCES, "en")
    assert metrics == {
        "bleu": sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score,
        "chrf": sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score,
        "exact": pytest.approx(100 / 3),
    }
    assert 20 < metrics["bleu"] < 80


def test_signatures_are_given_in_full() -> None:
    scores = compute_metrics(OUTPUTS, REFERENCES, ["bleu", "chrf"], "en", resamples=0)
    bleu, chrf = (score.signature for score in scores)
    assert bleu.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    assert chrf.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.")


def test_the_references_themselves_are_perfect() -> None:
    assert list(score_corpus(REFERENCES, REFERENCES).values()) == pytest.approx([100, 100, 100])


def test_tokenized_bleu_is_that_of_text_tokenized_by_hand() -> None:
    """The tokens are those that Multi30k's lc.norm.tok files have in such sentences."""
    sacremoses = pytest.importorskip("sacremoses")
    import sacrebleu

    references = ["Une femme – vêtue d’un T-shirt – court.", "L'homme dit : « C'est l'hiver »..."]
    tokenized_references = [
        "une femme - vêtue d&apos; un t-shirt - court .",
        "l&apos; homme dit : &quot; c&apos; est l&apos; hiver &quot; ...",
    ]
    outputs = ["Une dame - vêtue d'un t-shirt - court.", "Un homme dit: « C'est l'été »..."]
    tokenized_outputs = [
        "une dame - vêtue d&apos; un t-shirt - court .",
        "un homme dit : &quot; c&apos; est l&apos; été &quot; ...",
    ]
    expected = sacrebleu.corpus_bleu(tokenized_outputs, [tokenized_references], tokenize="none", force=True).score
    (score,) = compute_metrics(outputs, references, ["bleu-lc-tok"], "fr-CA", resamples=0)
    assert score.value == expected
    assert expected != pytest.approx(bleu(outputs, references, "fr"))
    tokenizer = f"normalized-moses-fr-{sacremoses.__version__}"
    assert score.signature.startswith(f"nrefs:1|case:lc|eff:no|tok:{tokenizer}|smooth:exp|version:2.")


def test_tokenized_bleu_needs_the_language() -> None:
    pytest.importorskip("sacremoses")
    with pytest.raises(ScoreError, match=r"language of the references.*--tgt"):
        make_metric("bleu-lc-tok", None, REFERENCES)


def test_empty_outputs_score_zero() -> None:
    assert set(score_corpus(["", "", ""], REFERENCES).values()) == {0}


def test_rouge_is_the_mean_of_rouge_score() -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    kinds = {"rouge-1": "rouge1", "rouge-2": "rouge2", "rouge-l": "rougeL"}
    scorer = rouge_scorer.RougeScorer(list(kinds.values()), use_stemmer=True)
    expected = [scorer.score(reference, output) for output, reference in zip(OUTPUTS, REFERENCES, strict=True)]
    for score in compute_metrics(OUTPUTS, REFERENCES, list(kinds)):
        assert score.value == pytest.approx(100 * statistics.mean(s[kinds[score.metric]].fmeasure for s in expected))
        assert score.ci_half_width is not None
        assert 0 < score.ci_half_width < 50
        assert score.signature.startswith("nrefs:1|bs:1000|seed:12345|stem:porter|version:rouge-score-")
    # Of "cats sat" in "the cat sat", 2 words match after stemming: precision 1, recall 2/3.
    assert compute_metrics(["cats sat"], ["the cat sat"], ["rouge-1"], resamples=0)[0].value == pytest.approx(80)


def test_rouge_is_computed_in_validations_that_select_by_it() -> None:
    pytest.importorskip("rouge_score")
    assert add_selected_metric(VALIDATION_METRICS, "rouge-l") == ["bleu", "chrf", "rouge-l", "exact"]
    assert add_selected_metric(VALIDATION_METRICS, "loss") == ["bleu", "chrf", "exact"]


def test_a_missing_package_of_rouge_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(AttentError, match=r"rouge_score, which is not installed: pip install 'attent\[rouge\]'"):
        make_metric("rouge-l", "en", REFERENCES)


def test_outputs_and_references_are_not_confused() -> None:
    short, long = ["a b c d"], ["a b c d e f g h"]
    assert bleu(short, long) == pytest.approx(100 * 2.718281828**-1)  # the brevity penalty
    assert bleu(long, short) != bleu(short, long)


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    {
        **dict.fromkeys(["en", "de", "tw", "ru", "ar", "hi", "tr", "vi", "xx", None], "13a"),
        **dict.fromkeys(["zh", "zh-TW", "zh_Hans", "yue"], "zh"),
        **dict.fromkeys(["ja", "ko", "th", "km", "lo", "my", "bo"], "char"),
    }.items(),
)
def test_the_bleu_tokenizer_follows_the_language(language: str | None, tokenizer: str) -> None:
    assert choose_bleu_tokenizer(language) == tokenizer


def test_the_bleu_tokenizer_follows_the_script_of_the_references() -> None:
    assert choose_bleu_tokenizer(None, ["这是一个很大的房子"] * 5) == "zh"
    assert choose_bleu_tokenizer(None, ["これはとても大きな家です"] * 5) == "char"
    assert choose_bleu_tokenizer(None, REFERENCES) == "13a"
    assert choose_bleu_tokenizer("de", ["这是一个很大的房子"] * 5) == "13a"


def test_text_without_spaces_is_scored_by_characters() -> None:
    (score,) = compute_metrics(["这是一个很小的房子。"], ["这是一个很大的房子。"], ["bleu"], "zh", resamples=0)
    assert 30 < score.value < 90
    assert "tok:zh" in score.signature
    assert bleu(["これはとても小さな家です"], ["これはとても大きな家です"], "ja") > 30


def test_text_that_looks_tokenized_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        score_corpus(["a dog barks ."] * 200, ["a dog barks ."] * 200)
    assert not caplog.records


@pytest.mark.parametrize(
    ("outputs", "references", "message"),
    [
        ([], [], "at least one output to score, but there is none"),
        (["a"], ["a", "b"], "a reference for each output, but there are 2 references and 1 outputs"),
    ],
)
def test_texts_that_do_not_match_are_refused(outputs: list[str], references: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score_corpus(outputs, references)


@pytest.mark.parametrize(
    ("metrics", "headline"),
    [
        ({"bleu": 38.64, "chrf": 60.0, "exact": 5.0}, "38.6 BLEU"),
        ({"bleu": 5.0, "exact": 5.0}, "5.0% exact"),  # the rate of exact matches, if it is not smaller
        ({"bleu": 5.1, "exact": 5.0}, "5.1 BLEU"),
        ({"bleu": 0.0, "chrf": 12.0, "exact": 0.0}, "12.0 chrF"),
        ({"bleu": 0.0, "exact": 0.0}, "0.0 BLEU"),
        ({"accuracy": 91.234, "bleu": 0.0}, "91.23% accuracy"),
        ({"chrf": 3.0}, "3.0 chrF"),
        ({"wer": 0.0, "cer": 0.0, "exact": 100.0}, "0.0% WER"),
        ({"wer": 60.0, "bleu": 21.0}, "21.0 BLEU"),  # speech translation
        ({"loss": 1.0}, ""),
    ],
)
def test_headline_is_the_most_informative_metric(metrics: dict[str, float], headline: str) -> None:
    assert format_headline(metrics) == headline


def test_metrics_are_written_in_the_order_of_the_table_with_their_units() -> None:
    values = {"exact": 4.06, "loss": 1.0, "accuracy": 9.876, "bleu": 31.24}
    assert format_metrics(values) == "BLEU 31.2, exact 4.1%, accuracy 9.88%"
    assert format_metrics(values, digits=0) == "BLEU 31, exact 4%, accuracy 10%"
    assert (METRICS["exact"].heading, METRICS["chrf"].heading) == ("Exact", "chrF")


def test_both_systems_of_a_comparison_must_have_every_line() -> None:
    for outputs, baseline in ((["a"], ["a", "b"]), (["a", "b"], ["a"])):
        with pytest.raises(ScoreError, match="1"):
            compare_outputs(outputs, baseline, ["a", "b"], ["chrf"], resamples=2)


# ---- error rates -----------------------------------------------------------------------------------------------------


def draw_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    texts = (rng.choices("ab abc b  cd é one 世界".split(" "), k=rng.randrange(8)) for _ in range(count))
    return [rng.choice(["", " "]) + " ".join(words) for words in texts]


@pytest.mark.parametrize("seed", range(20))
def test_error_rates_are_those_of_jiwer(seed: int) -> None:
    jiwer = pytest.importorskip("jiwer")
    count = 1 + seed * 2
    outputs, references = draw_texts(seed, count), draw_texts(seed + 100, count)
    wer, cer = (score.value for score in compute_metrics(outputs, references, ("wer", "cer"), resamples=0))
    assert wer == pytest.approx(100 * jiwer.wer(references, outputs))
    assert cer == pytest.approx(100 * jiwer.cer(references, outputs))


@pytest.mark.parametrize(
    ("output", "reference", "edits"),
    [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("ab", "ba", 2), ("abcd", "bcd", 1)],
)
def test_edits_of_empty_and_shifted_texts(output: str, reference: str, edits: int) -> None:
    assert count_edits(output, reference) == count_edits(reference, output) == edits


def test_an_output_without_a_reference_counts_as_insertions() -> None:
    """As in jiwer, where a rate over no words is the number of insertions."""
    assert compute_metrics(["two words"], [""], ("wer",), resamples=0)[0].value == 200
    assert compute_metrics(["a", ""], ["", "b c d e"], ("wer",), resamples=0)[0].value == 125


def test_error_rates_have_confidence_intervals_and_paired_tests() -> None:
    references = [f"one two three {i}" for i in range(40)]
    worse = [text if i % 2 else "one two four" for i, text in enumerate(references)]
    better = [text if i % 8 else "one two" for i, text in enumerate(references)]
    (score,) = compute_metrics(worse, references, ("wer",), resamples=200)
    assert score.value == 25
    assert score.mean == pytest.approx(25, abs=2)
    assert 1 < (score.ci_half_width or 0) < 15
    assert "|case:mixed|tok:space|" in score.signature
    (comparison,) = compare_outputs(better, worse, references, ("wer",), resamples=200)
    assert comparison.is_better
    assert comparison.difference < 0
