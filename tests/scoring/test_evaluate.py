"""A test set as a whole: figures by length, each sentence, the worst."""

from __future__ import annotations

import pytest

from attent.scoring.evaluate import evaluate
from attent.scoring.metrics import ScoreError, compare_outputs, compute_metrics, score_sentences

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


def test_groups_hold_every_pair_once_by_the_words_of_its_source() -> None:
    got = evaluate(SOURCES, REFERENCES, OUTPUTS, metrics=["bleu", "ter"], resamples=10)
    assert [(group.min_length, group.max_length, group.sentences) for group in got.groups] == [
        (1, 10, 3),
        (11, 20, 1),
        (21, 30, 1),
        (51, None, 1),
    ]
    assert [[one.metric for one in group.scores] for group in got.groups] == [["bleu", "ter"]] * 4
    (alone,) = compute_metrics([OUTPUTS[2]], [REFERENCES[2]], ["bleu"], resamples=0)
    assert got.groups[1].scores[0] == alone
    assert got.length_unit == "words"


def test_a_script_without_spaces_is_measured_in_characters() -> None:
    got = evaluate(["这是一个很大的房子" * 3] * 3, ["a b c d e"] * 3, ["a b c d e"] * 3, names=["bleu"], resamples=0)
    assert got.length_unit == "characters"
    assert [(group.min_length, group.max_length) for group in got.groups] == [(21, 40)]


def test_the_worst_come_first() -> None:
    got = evaluate(SOURCES, REFERENCES, OUTPUTS, metrics=["chrf"], resamples=0)
    assert got.find_worst(2)[0].number in (4, 6)
    assert [one.chrf for one in got.find_worst(9)] == sorted(one.chrf for one in got.sentences if one.chrf < 100)
    assert 0 < len(got.find_worst(9)) < 6  # the others are as the reference
    assert got.find_worst(0) == []
    assert (got.exact, got.num_empty) == (pytest.approx(50), 1)


def test_each_sentence_has_the_scores_that_it_has_alone() -> None:
    import sacrebleu

    outputs, references = [*OUTPUTS, "Good day"], [*REFERENCES, "Good day"]  # two words have no four in a row
    got = evaluate([*SOURCES, "Guten Tag"], references, outputs, metrics=["bleu"], resamples=0)
    for one, output, reference in zip(got.sentences, outputs, references, strict=True):
        assert one.bleu == sacrebleu.sentence_bleu(output, [reference]).score
        assert one.chrf == sacrebleu.sentence_chrf(output, [reference]).score
    assert score_sentences(outputs, references, "bleu") == [one.bleu for one in got.sentences]
    assert got.sentences[-1].bleu == pytest.approx(100)


def test_all_four_are_what_sacrebleu_says_and_intervals_are_its_own() -> None:
    import sacrebleu

    got = {one.metric: one for one in compute_metrics(OUTPUTS, REFERENCES)}
    assert got["bleu"].value == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert got["chrf"].value == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score
    assert got["chrf++"].value == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES], word_order=2).score
    assert got["ter"].value == sacrebleu.corpus_ter(OUTPUTS, [REFERENCES]).score
    for one in got.values():
        assert one.mean is not None
        assert one.ci_half_width is not None
        assert abs(one.mean - one.value) < one.ci_half_width < 100
        assert "bs:1000|seed:12345" in one.signature
    assert compute_metrics(OUTPUTS, REFERENCES) == list(got.values())  # seeded
    assert compute_metrics(OUTPUTS, REFERENCES, ["ter"], resamples=0)[0].ci_half_width is None


def test_a_paired_test_tells_a_difference_from_chance() -> None:
    references = [f"the {i} men walk over {i} old bridges to the town" for i in range(60)]
    worse = [text.replace("old bridges", "new roads") for text in references]
    got = {one.metric: one for one in compare_outputs(references, worse, references, ["bleu", "ter"], resamples=200)}
    for one, sign in ((got["bleu"], 1), (got["ter"], -1)):
        assert one.is_better is True
        assert one.p_value < 0.05
        assert one.difference * sign > 0
    back = compare_outputs(worse, references, references, ["bleu", "ter"], resamples=200)
    assert [one.is_better for one in back] == [False, False]
    assert back[0].value == got["bleu"].baseline
    (same,) = compare_outputs(worse, worse, references, ["chrf"], resamples=200)
    assert (same.is_better, same.difference, same.p_value) == (None, 0, 1)


@pytest.mark.parametrize(
    ("sources", "outputs", "words"),
    [(["a"], ["a"], "a reference for each output"), (["a"], ["a", "b"], "a source for each reference")],
)
def test_what_does_not_belong_together_is_refused(sources: list[str], outputs: list[str], words: str) -> None:
    with pytest.raises(ScoreError, match=words):
        evaluate(sources, ["a", "b"], outputs)
    with pytest.raises(ScoreError, match="at least one output"):
        evaluate([], [], [])
