"""ROUGE of summaries, compared with the first sentence of each text, a strong baseline.

    pip install rouge-score
    python -m benchmarks.rouge texts.txt references.txt [written.txt ...]

Each file has one line per text: input, reference, model output. F1 of ROUGE-1, ROUGE-2 and ROUGE-L with stemming, by
Google's rouge-score; the 95% confidence interval is from 1,000 bootstrap resamples.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

from attent.text.sentence_splitter import split_sentences

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
RESAMPLES = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="?")
    parser.add_argument("references", type=Path, nargs="?")
    parser.add_argument("written", type=Path, nargs="*")
    args = parser.parse_args()
    if args.references is None:
        parser.print_usage()  # nothing to compare
        return
    texts, references = read_lines(args.texts), read_lines(args.references)
    report_rouge("first sentence", [split_sentences(text, "en")[0].text for text in texts], references)
    for path in args.written:
        report_rouge(path.name, read_lines(path), references)


def read_lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def report_rouge(name: str, written: list[str], references: list[str]) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    scorer: Any = RougeScorer(list(ROUGE_TYPES), use_stemmer=True)
    scores = [scorer.score(reference, text) for reference, text in zip(references, written, strict=True)]
    figures = []
    for kind in ROUGE_TYPES:
        f_scores = [100 * score[kind].fmeasure for score in scores]
        low, high = bootstrap_interval(f_scores)
        figures.append(f"{kind} {statistics.mean(f_scores):.2f} ({low:.2f} to {high:.2f})")
    mean_words = statistics.mean(len(text.split()) for text in written)
    print(f"{name:20} {', '.join(figures)}; {len(scores)} texts, {mean_words:.0f} words each")


def bootstrap_interval(values: list[float]) -> tuple[float, float]:
    rng = random.Random(1)
    means = sorted(statistics.mean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[RESAMPLES // 40], means[-RESAMPLES // 40]


if __name__ == "__main__":
    main()
