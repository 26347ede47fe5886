"""Score reports: every row and field of the page, the numbers, the sentence rows and the JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from attent.decoding.alignment import HeadSelection, MeasuredSelection
from attent.decoding.forced_decoding import TargetScores
from attent.scoring.alignment import AlignmentCandidate, AlignmentReport, AlignmentScores
from attent.scoring.evaluate import Evaluation, LengthGroup, SentenceScore
from attent.scoring.metrics import MetricScore, PairedComparison, ScoreError
from attent.scoring.report import ScoreReport, render_page, report_to_dict

BLEU = MetricScore(metric="bleu", value=31.256, mean=30.5, ci_half_width=1.25, signature="bleu|sig")
TER = MetricScore(metric="ter", value=55.5, mean=None, ci_half_width=None, signature="ter|sig")
SENTENCES = tuple(
    SentenceScore(
        number=i, source=f"quelle {i}", reference="ref", output="a\tb\x1b", metrics={"bleu": i, "chrf": i * 10.0}
    )
    for i in (1, 2, 10)
)
EVALUATION = Evaluation(
    scores=(BLEU, TER),
    exact=12.5,
    num_empty=3,
    length_ratio=0.774,
    length_unit="words",
    groups=(
        LengthGroup(min_length=1, max_length=10, sentences=1200, scores=(BLEU, TER)),
        LengthGroup(min_length=51, max_length=None, sentences=2, scores=(TER, BLEU)),
    ),
    sentences=SENTENCES,
)
FORCED = (
    TargetScores(tokens=("a", "b"), log_probs=(-1.0, -2.0), truncated=False),
    TargetScores(tokens=("c",), log_probs=(-3.0,), truncated=True),
)
REPORT = ScoreReport(test_set="test.tsv", num_pairs=1202, num_skipped=0)


def render(report: ScoreReport, worst: int = 2) -> list[str]:
    lines = "\n".join(line.plain for line in render_page(report, worst)).split("\n")
    return [" ".join(line.split()) for line in lines]


def compare(metric: str, value: float, baseline: float, p_value: float) -> PairedComparison:
    return PairedComparison(metric=metric, value=value, baseline=baseline, p_value=p_value, signature="")


def test_page_of_an_evaluation_has_every_row() -> None:
    report = replace(REPORT, model="runs/m", search_summary="beam 4", evaluation=EVALUATION)
    assert render(report) == [
        "test set test.tsv: 1,202 pairs",
        "model runs/m",
        "search beam 4",
        "",
        "Scores ± 95% confidence interval by bootstrap; TER: lower is better",
        "BLEU 31.26 30.50 ± 1.25",
        "TER 55.50",
        "12.5% exact matches; length ratio 0.774 (characters of the output to those of the reference); 3 empty",
        "BLEU bleu|sig",
        "TER ter|sig",
        "",
        "By source length",
        "words pairs BLEU TER",
        "1-10 1,200 31.3 55.5",
        "over 50 2 55.5 31.3",
        "",
        "Worst sentences by chrF of the sentence",
        "pair 1 BLEU 1.0, chrF 10.0",
        "source quelle 1",
        "reference ref",
        "output a\\tb\\x1b",
        "pair 2 BLEU 2.0, chrF 20.0",
        "source quelle 2",
        "reference ref",
        "output a\\tb\\x1b",
    ]
    skipped = render(replace(report, num_skipped=1, hypotheses="out.txt"), 0)
    assert skipped[1] == "skipped 1 line without a pair"
    assert "hypotheses out.txt" in skipped
    assert "Worst" not in " ".join(skipped)


def test_columns_are_aligned_and_scores_are_bold() -> None:
    report = replace(REPORT, model="runs/m", search_summary="beam 4", evaluation=EVALUATION)
    lines = list(render_page(report, 1))
    assert [line.plain for line in lines[4:6]] == ["BLEU   31.26   30.50 ± 1.25", "TER    55.50"]
    bold = [text.plain[span.start : span.end].strip() for text in lines[4:6] for span in text.spans if span.style]
    assert bold == ["31.26", "55.50"]
    text = "\n".join(line.plain for line in lines)
    assert text.startswith("test set    test.tsv: 1,202 pairs\nmodel       runs/m\nsearch      beam 4\n\nScores  ± 95%")
    assert "\nBLEU   bleu|sig\nTER    ter|sig\n\nBy source length\nwords     pairs   BLEU    TER\n" in text
    assert "\n1-10      1,200   31.3   55.5\nover 50       2   55.5   31.3\n\nWorst sentences  by chrF" in text
    assert text.endswith(
        "\npair 1  BLEU 1.0, chrF 10.0\n  source     quelle 1\n  reference  ref\n  output     a\\tb\\x1b"
    )


def test_the_best_heads_have_their_rates() -> None:
    texts = list(render_page(replace(REPORT, alignment=make_alignment(0)), 1))
    bold = [text.plain[span.start : span.end].strip() for text in texts[-3:] for span in text.spans if span.style]
    assert bold == ["1.0", "1.0", "1.0"]
    lines = [line.plain for line in texts]
    title = "\nBest heads  layer 0, head 0, at the next step; saved in the model folder"
    assert lines[lines.index(title) + 1 :] == [
        "                      AER   precision   recall",
        "selection half        1.0",
        "test half             1.0         2.0      3.0",
        "  mutual links only   1.0         2.0      3.0",
    ]


@pytest.mark.parametrize(("exact", "bleu", "explained"), [(12.5, 0.0, True), (0.0, 0.0, False), (12.5, 0.1, False)])
def test_bleu_of_zero_is_explained_where_outputs_match(exact: float, bleu: float, explained: bool) -> None:
    evaluation = replace(EVALUATION, exact=exact, scores=(replace(BLEU, value=bleu),), num_empty=0)
    page = " ".join(render(replace(REPORT, evaluation=evaluation)))
    assert ("BLEU is 0 because" in page) == explained
    assert "empty" not in page


def test_comparisons_are_significant_below_the_limit_only() -> None:
    comparisons = (
        compare("bleu", 31.0, 30.0, 0.0499),
        compare("bleu", 31.0, 30.0, 0.05),
        compare("ter", 50.0, 55.0, 0.001),
        compare("ter", 55.0, 50.0, 0.001),
        compare("bleu", 30.0, 30.0, 0.001),
    )
    report = replace(REPORT, evaluation=EVALUATION, baseline="old", comparisons=comparisons)
    assert render(report)[-7:] == [
        "Compared with old paired bootstrap test",
        "this baseline difference p",
        "BLEU 31.00 30.00 +1.00 0.0499 better",
        "BLEU 31.00 30.00 +1.00 0.0500 not significant",
        "TER 50.00 55.00 -5.00 0.0010 better",
        "TER 55.00 50.00 +5.00 0.0010 worse",
        "BLEU 30.00 30.00 +0.00 0.0010 not significant",
    ]
    entries = report_to_dict(report, 1)["comparisons"]
    assert [entry["is_better"] for entry in entries] == [True, None, True, False, None]
    assert [entry["difference"] for entry in entries] == [1, 1, -5, 5, 0]


def test_forced_decoding_has_sums_and_a_row_for_each_sentence() -> None:
    report = replace(REPORT, forced=FORCED)
    assert render(report)[2:] == [
        "Forced decoding the probability of these translations under the model",
        f"perplexity {math.exp(2):.3f}",
        "log-probability per token -2.0000",
        "log-probability -6.00",
        "tokens, with end tokens 3",
        "1 too long for the model or --batch-tokens: scored in part",
    ]
    assert "too long" not in " ".join(render(replace(REPORT, forced=FORCED[:1])))
    assert "log-probability per token -3.0000" in render(replace(REPORT, forced=FORCED[1:]))


def test_sums_of_forced_decoding_are_bold() -> None:
    texts = list(render_page(replace(REPORT, forced=FORCED), 1))[2:6]
    assert texts[0].plain == f"{'perplexity':<25}   {math.exp(2):>7.3f}"
    assert texts[3].plain == f"{'tokens, with end tokens':<25}   {3:>7}"
    bold = [text.plain[span.start : span.end].strip() for text in texts for span in text.spans if span.style]
    assert bold == [f"{math.exp(2):.3f}", "-2.0000", "-6.00", "3"]


def make_alignment(num_links: int) -> AlignmentReport:
    candidates = tuple(
        AlignmentCandidate(
            choice=HeadSelection(layer=0, heads=heads, shift=shift), selection_aer=1, test_aer=2, aer=aer
        )
        for shift, heads, aer in ((False, None, 40.0), (False, (0,), 41.0), (True, None, 42.0), (True, (0,), 43.0))
    )
    scores = AlignmentScores(aer=1, precision=2, recall=3, num_links=4)
    return AlignmentReport(
        num_sentences=20,
        candidates=candidates,
        best=candidates[3],
        one_way=scores,
        mutual=scores,
        skipped_links=tuple(f"gold:{i}: 9-9" for i in range(num_links)),
        model_fingerprint="f",
    )


@pytest.mark.parametrize(("count", "more"), [(5, ""), (6, " and 1 more"), (8, " and 3 more")])
def test_skipped_links_are_listed_up_to_five(count: int, more: str) -> None:
    report = replace(REPORT, alignment=make_alignment(count))
    links = ", ".join(f"gold:{i}: 9-9" for i in range(5))
    assert render(report)[-1] == f"skipped links to missing words: {links}{more}"
    assert "skipped" not in " ".join(render(replace(REPORT, alignment=make_alignment(0))))


def test_alignment_table_has_each_step_layer_and_head() -> None:
    page = render(replace(REPORT, alignment=make_alignment(0)))
    assert page[2] == "Alignment error rate in percent, of 20 pairs; layers and heads from 0"
    at = page.index("layer 0 40.0 41.0")
    assert page[at - 1] == "all heads 0"
    assert page[at + 3] == "layer 0 42.0 43.0"
    assert page[at - 2].startswith("at the step")
    assert page[at + 1].startswith("at the next step")


def test_heads_by_agreement() -> None:
    heads = HeadSelection(layer=0, heads=(1,), shift=False)
    selection = MeasuredSelection(selection=heads, agreement=71.26, sentences=4, fingerprint="f")
    report = replace(REPORT, alignment=selection)
    assert render(report)[-1] == "71.3% of their links are mutual, more than for any other choice"


def test_json_has_every_section_and_no_infinities() -> None:
    infinite = replace(FORCED[0], log_probs=(-math.inf, 0.0))
    search: dict[str, Any] = {"beam_size": 4}
    report = replace(
        REPORT, model="m", search=search, evaluation=EVALUATION, forced=(infinite,), alignment=make_alignment(1)
    )
    data = report_to_dict(report, 1)
    json.dumps(data, allow_nan=False)
    assert data["test_set"] == "test.tsv"
    assert (data["num_pairs"], data["num_skipped"], data["model"], data["search"]) == (1202, 0, "m", search)
    assert (data["exact"], data["num_empty"], data["length_ratio"], data["worst"]) == (12.5, 3, 0.774, [1])
    assert data["hypotheses"] is None
    assert data["forced"]["log_prob"] is None
    assert data["forced"]["tokens"] == 2
    assert data["forced"]["sentences"][0]["log_probs"] == [None, 0.0]
    assert data["alignment"]["skipped_links"] == ["gold:0: 9-9"]
    assert "baseline" not in data
    assert "baseline" in report_to_dict(replace(report, baseline="old"), 1)


def test_a_report_prints_as_its_page_and_holds_the_numbers() -> None:
    report = replace(REPORT, evaluation=EVALUATION)
    assert str(report) == "\n".join(line.plain for line in render_page(report, 5))
    assert report["bleu"] is BLEU
    assert report["bleu"].interval == (29.25, 31.75)
    assert report["ter"].interval is None
    with pytest.raises(ScoreError, match="`wer` was not computed, only bleu, ter"):
        _ = report["wer"]
