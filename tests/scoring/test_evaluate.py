"""Evaluation of a test set: by source length, of each sentence, the worst ones, comparisons."""

from __future__ import annotations

import pytest
from sacrebleu.significance import PairedTest

from attent.scoring.evaluate import Evaluation, SentenceScore, evaluate
from attent.scoring.metrics import (
    SCORE_METRICS,
    ScoreError,
    compare_outputs,
    compute_metrics,
    make_metric,
    score_sentences,
)

SOURCES = ["ein Hund", "wort " * 10, "wort " * 11, "wort " * 25, "wort " * 99, ""]
REFERENCES = [
    "A dog barks at a cat.",
    "The cat sat on the mat.",
    "It is 5 o'clock.",
    "A b c d e.",
    "Yes, I do.",
    "",
]
OUTPUTS = ["A dog barks at a cat.", "The cat sat on a mat.", "It was about five.", "", "Yes, I do.", ""]


def test_groups_have_every_pair_once_by_source_length() -> None:
    evaluation = evaluate(SOURCES, REFERENCES, OUTPUTS, metrics=["bleu", "ter"], resamples=10)
    assert [(group.min_length, group.max_length, group.sentences) for group in evaluation.groups] == [
        (1, 10, 3),
        (11, 20, 1),
        (21, 30, 1),
        (51, None, 1),
    ]
    assert [[score.metric for score in group.scores] for group in evaluation.groups] == [["bleu", "ter"]] * 4
    (alone,) = compute_metrics([OUTPUTS[2]], [REFERENCES[2]], ["bleu"], resamples=0)
    assert evaluation.groups[1].scores[0] == alone
    assert evaluation.length_unit == "words"


def test_a_script_without_spaces_is_measured_in_characters() -> None:
    evaluation = evaluate(
        ["这是一个很大的房子" * 3] * 3, ["a b c d e"] * 3, ["a b c d e"] * 3, metrics=["bleu"], resamples=0
    )
    assert evaluation.length_unit == "characters"
    assert evaluation.length_ratio == 1
    assert [(group.min_length, group.max_length) for group in evaluation.groups] == [(21, 40)]


def test_the_worst_come_first() -> None:
    evaluation = evaluate(SOURCES, REFERENCES, OUTPUTS, metrics=["chrf"], resamples=0)
    assert evaluation.find_worst(2)[0].number in (4, 6)
    scores = [sentence.metrics["chrf"] for sentence in evaluation.sentences]
    assert [sentence.metrics["chrf"] for sentence in evaluation.find_worst(9)] == sorted(s for s in scores if s < 100)
    assert 0 < len(evaluation.find_worst(9)) < 6  # the others equal the reference
    assert evaluation.find_worst(0) == []
    assert (evaluation.exact, evaluation.num_empty) == (pytest.approx(50), 1)


@pytest.mark.parametrize("name", ["wer", "cer"])
def test_the_worst_transcripts_have_the_most_errors(name: str) -> None:
    references, outputs = ["one two", "one two", "one", "one"], ["one too", "six ten", "one", ""]
    evaluation = evaluate(references, references, outputs, metrics=[name], resamples=0)
    assert [sentence.metrics["wer"] for sentence in evaluation.sentences] == [50, 100, 0, 100]
    assert [sentence.number for sentence in evaluation.find_worst(9)] == ([2, 4, 1] if name == "wer" else [4, 2, 1])
    assert evaluation.ranking_metric == name


def test_sentence_scores_are_those_of_sacrebleu() -> None:
    import sacrebleu

    outputs, references = [*OUTPUTS, "Good day"], [*REFERENCES, "Good day"]  # too short for 4-grams
    evaluation = evaluate([*SOURCES, "Guten Tag"], references, outputs, metrics=["bleu"], resamples=0)
    for sentence, output, reference in zip(evaluation.sentences, outputs, references, strict=True):
        assert sentence.metrics["bleu"] == sacrebleu.sentence_bleu(output, [reference]).score
        assert sentence.metrics["chrf"] == sacrebleu.sentence_chrf(output, [reference]).score
    assert score_sentences(outputs, references, "bleu") == [s.metrics["bleu"] for s in evaluation.sentences]
    assert evaluation.sentences[-1].metrics["bleu"] == pytest.approx(100)


def test_metrics_and_confidence_intervals_are_those_of_sacrebleu() -> None:
    import sacrebleu

    with_packages = ("bleu-lc-tok", "rouge-1", "rouge-2", "rouge-l")  # which may be missing
    names = [name for name in SCORE_METRICS if name not in with_packages]
    scores = {score.metric: score for score in compute_metrics(OUTPUTS, REFERENCES, names)}
    assert scores["bleu"].value == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert scores["chrf"].value == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score
    assert scores["chrf++"].value == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES], word_order=2).score
    assert scores["ter"].value == sacrebleu.corpus_ter(OUTPUTS, [REFERENCES]).score
    for score in scores.values():
        assert score.mean is not None
        assert score.ci_half_width is not None
        assert abs(score.mean - score.value) < score.ci_half_width < 100
        assert "bs:1000|seed:12345" in score.signature
    assert compute_metrics(OUTPUTS, REFERENCES, names) == list(scores.values())  # seeded
    assert compute_metrics(OUTPUTS, REFERENCES, ["ter"], resamples=0)[0].ci_half_width is None


def test_a_paired_test_finds_significant_differences() -> None:
    references = [f"the {i} men walk over {i} old bridges to the town" for i in range(60)]
    worse = [text.replace("old bridges", "new roads") for text in references]
    scores = {
        score.metric: score for score in compare_outputs(references, worse, references, ["bleu", "ter"], resamples=200)
    }
    for score, sign in ((scores["bleu"], 1), (scores["ter"], -1)):
        assert score.is_better is True
        assert score.p_value < 0.05
        assert score.difference * sign > 0
    back = compare_outputs(worse, references, references, ["bleu", "ter"], resamples=200)
    assert [score.is_better for score in back] == [False, False]
    assert back[0].value == scores["bleu"].baseline
    (same,) = compare_outputs(worse, worse, references, ["chrf"], resamples=200)
    assert (same.is_better, same.difference, same.p_value) == (None, 0, 1)


@pytest.mark.parametrize("name", ["bleu", "chrf", "ter", "exact"])
def test_a_paired_test_of_tied_scores_is_that_of_sacrebleu(name: str) -> None:
    """Each system is wrong on the other half of the sentences: equal scores of different outputs."""
    references = ["the men walk over old bridges to the town"] * 40
    wrong = "the men walk over new roads to the town"
    first = [wrong if i < 20 else text for i, text in enumerate(references)]
    second = [text if i < 20 else wrong for i, text in enumerate(references)]
    (tie,) = compare_outputs(first, second, references, [name], "en", resamples=300)
    assert tie.difference == 0
    p_values = {}
    for test, samples in (("bs", 300), ("ar", 1000)):
        systems = [("second", second), ("first", first)]
        metric = make_metric(name, "en", references)
        _, results = PairedTest(systems, {name: metric}, [references], test_type=test, n_samples=samples)()
        ((_, result),) = [rows for title, rows in results.items() if title != "System"]
        p_values[test] = result.p_value  # type: ignore[union-attr]
    assert 0.05 < tie.p_value == p_values["bs"] < 1
    assert p_values["ar"] > 0.05
    assert tie.is_better is None


def test_outputs_that_a_metric_cannot_tell_apart_are_not_significant() -> None:
    spaced = [f"{text} " for text in OUTPUTS]
    (comparison,) = compare_outputs(OUTPUTS, spaced, REFERENCES, ["bleu"], resamples=100)
    assert (comparison.difference, comparison.p_value, comparison.is_better) == (0, 1, None)


def test_the_exact_metric_has_intervals_and_paired_tests() -> None:
    references = [f"sentence {i}" for i in range(50)]
    half = [text if i % 2 else f" {text}!" for i, text in enumerate(references)]
    (score,) = compute_metrics(half, references, ["exact"], resamples=200)
    assert score.value == 50
    assert score.mean == pytest.approx(50, abs=5)
    assert 5 < (score.ci_half_width or 0) < 20
    (comparison,) = compare_outputs([f"{text} " for text in references], half, references, ["exact"], resamples=200)
    assert (comparison.value, comparison.baseline, comparison.is_better) == (100, 50, True)


def test_scores_by_default() -> None:
    assert [score.metric for score in compute_metrics(OUTPUTS, REFERENCES, resamples=0)] == ["bleu", "chrf", "ter"]


def test_texts_that_do_not_match_are_refused() -> None:
    with pytest.raises(ScoreError, match="a reference for each output"):
        evaluate(["a", "b"], ["a", "b"], ["a"])
    with pytest.raises(ScoreError, match="at least one output"):
        evaluate([], [], [])


@pytest.mark.parametrize(("count", "limits"), [(20, (1, 20)), (21, (21, 40)), (100, (81, 100)), (101, (101, None))])
def test_character_groups_end_at_their_limits(count: int, limits: tuple[int, int | None]) -> None:
    evaluation = evaluate(["房 " * count], ["a"], ["bb"], metrics=["bleu"], resamples=0)
    assert [(group.min_length, group.max_length) for group in evaluation.groups] == [limits]
    assert evaluation.length_ratio == 2
    assert evaluation.num_empty == 0


def test_sentences_just_below_the_maximum_are_among_the_worst() -> None:
    sentences = tuple(
        SentenceScore(number=number, source="", reference="", output="", metrics={"chrf": value})
        for number, value in enumerate((100.0, 99.5, 100 - 1e-12), 1)
    )
    evaluation = Evaluation(
        scores=(), exact=0.0, num_empty=0, length_ratio=1.0, length_unit="words", groups=(), sentences=sentences
    )
    assert [sentence.number for sentence in evaluation.find_worst(9)] == [2]
