"""CIDEr-D against the published formula, and metrics with several references."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from attent.scoring.evaluate import evaluate
from attent.scoring.metrics import VALIDATION_METRICS, CiderScorer, compare_outputs, compute_metrics, score_sentences

Texts = list[list[str]]  # the references of each image


def compute_cider(outputs: list[str], references: Texts) -> float:
    """Equation 7 of Vedantam et al. (2015), word for word: loops over n, i and j."""

    def grams(text: str, n: int) -> list[tuple[str, ...]]:
        words = text.split()
        return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]

    total = 0.0
    for candidate, texts in zip(outputs, references, strict=True):
        for n in (1, 2, 3, 4):
            frequency = Counter(g for image in references for g in {g for text in image for g in grams(text, n)})

            def weigh(text: str, n: int = n, frequency: Counter[tuple[str, ...]] = frequency) -> dict[object, float]:
                idf = {g: math.log(len(references)) - math.log(max(1, frequency[g])) for g in grams(text, n)}
                return {g: count * idf[g] for g, count in Counter(grams(text, n)).items()}

            for text in texts:
                c, s = weigh(candidate), weigh(text)
                norms = math.sqrt(sum(x * x for x in c.values())) * math.sqrt(sum(x * x for x in s.values()))
                dot = sum(min(c[g], s[g]) * s[g] for g in c if g in s)
                penalty = math.exp(-((len(candidate.split()) - len(text.split())) ** 2) / (2 * 6**2))
                total += 10 * (dot / norms if norms else 0) * penalty / 4 / len(texts)
    return total / len(outputs)


def score(outputs: list[str], references: Texts) -> float:
    (result,) = compute_metrics(outputs, [tuple(texts) for texts in references], ["cider"], "en", resamples=0)
    return result.value


@pytest.mark.parametrize("seed", range(20))
def test_cider_is_the_published_formula(seed: int) -> None:
    rng = random.Random(seed)

    def make_text() -> str:
        return " ".join(rng.choices("a dog cat runs on the red mat".split(), k=rng.randint(0, 9)))

    references = [[make_text() or "dog" for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 8))]
    outputs = [make_text() for _ in references]
    assert score(outputs, references) == pytest.approx(compute_cider(outputs, references), abs=1e-9)


def test_cider_of_cases_made_by_hand() -> None:
    references = [["a small dog runs"], ["the cat sleeps now"]]
    assert score(["a small dog runs", "the cat sleeps now"], references) == pytest.approx(10)
    assert score(["the cat sleeps now", "a small dog runs"], references) == 0
    # Two of four words, one of three bigrams, all with the same rarity; one word fewer than the reference.
    words, bigrams = 2 / math.sqrt(3 * 4), 1 / math.sqrt(2 * 3)
    expected = 10 * (words + bigrams) / 4 * math.exp(-1 / 72)
    assert score(["small dog sleeps", "nothing"], references) * 2 == pytest.approx(expected)
    # A repeated word counts as often as it is in the reference.
    repeated, once = (score([text, "-"], references) for text in ("dog dog dog", "dog"))
    assert repeated * 2 == pytest.approx(10 * (1 / 3) / 2 / 4 * math.exp(-1 / 72) * 1)
    assert once > repeated
    # A word of every image says nothing, so one image alone scores 0.
    assert score(["a dog"], [["a dog"]]) == 0


def test_cider_ignores_case_and_punctuation_and_counts_characters_without_spaces() -> None:
    references = [("A dog, running.",), ("Two cats!",)]
    (value,) = compute_metrics(["a DOG running", "two cats"], references, ["cider"], "en", resamples=0)
    assert value.value == pytest.approx(score(["a dog running", "two cats"], [["a dog running"], ["two cats"]]))
    assert "case:lc|tok:13a-no-punctuation|n:4|sigma:6" in value.signature
    (value,) = compute_metrics(["一只小狗", "猫在睡觉"], ["一只小狗", "猫在睡觉"], ["cider"], "zh", resamples=0)
    assert value.value == pytest.approx(10)


def test_document_frequencies_count_an_image_once() -> None:
    scorer = CiderScorer(str.split)
    scorer.count_documents([["a dog", "a dog a dog"], ["a cat"], ["nothing"]])
    assert scorer.num_documents == 3
    assert scorer.document_counts[("a",)] == 2
    assert scorer.document_counts[("a", "dog")] == 1


def test_metrics_take_several_references_of_each_output() -> None:
    outputs = ["A dog runs on the grass.", "Two cats sleep.", "A red car."]
    references = [
        ("A dog is on the grass.", "A dog runs on the grass."),
        ("Cats.",),
        ("A car.", "Red car.", "A red one."),
    ]
    streams = [[r[i] if i < len(r) else None for r in references] for i in range(3)]
    scores = compute_metrics(outputs, references, VALIDATION_METRICS, "en", resamples=0)
    metrics = {score.metric: score.value for score in scores}
    assert metrics["bleu"] == BLEU().corpus_score(outputs, streams).score  # type: ignore[arg-type]
    assert metrics["chrf"] == CHRF().corpus_score(outputs, streams).score  # type: ignore[arg-type]
    assert metrics["exact"] == pytest.approx(100 / 3)
    assert score_sentences(outputs, references, "chrf")[0] == pytest.approx(100)
    first, second = compute_metrics(outputs, references, ["cider", "bleu"], resamples=50)
    assert first.mean is not None
    assert "nrefs:var" in second.signature


def test_captions_are_compared_by_cider() -> None:
    texts = [f"a {color} {animal}" for color in ("red", "blue", "green") for animal in ("dog", "cat", "cow", "hen")]
    (comparison,) = compare_outputs(texts, ["a red dog"] * len(texts), [(text, text) for text in texts], ["cider"])
    assert comparison.is_better


def test_an_evaluation_takes_several_references() -> None:
    references = [("A dog.", "One dog here."), ("Two cats.",)]
    evaluation = evaluate(
        ["1.png", "2.png"], references, ["A dog.", ""], metrics=["cider"], resamples=0, by_length=False
    )
    assert (evaluation.exact, evaluation.num_empty, evaluation.groups) == (50, 1, ())
    assert evaluation.length_ratio == pytest.approx(6 / ((6 + 13) / 2 + 9))
    assert evaluation.sentences[0].reference == "A dog. | One dog here."
    assert [sentence.number for sentence in evaluation.find_worst(5)] == [2]
