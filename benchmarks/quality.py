"""How well the figures of `attent translate --quality` rank translations: Spearman's correlation with sentence chrF.

    python -m benchmarks.quality MODEL --data TEST --src en --tgt de [--reverse MODEL] [-b 4] [--limit N] [--json FILE]

The length of the source is a control: long sentences tend to have another chrF than short ones. Intervals are those of
1,000 bootstrap samples of the sentences.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attent.data.pairs import LanguagePair
from attent.decoding.options import SearchOptions
from attent.decoding.output_format import OutputFormat
from attent.decoding.pipeline import TranslationPipeline
from attent.decoding.quality import compute_pairwise_chrf
from attent.decoding.translator import Translator
from attent.formatting import markdown_table
from attent.scoring.pipeline import read_test_set
from attent.storage.atomic import write_atomic

BOOTSTRAP_SAMPLES = 1_000
Floats = npt.NDArray[np.float64]


def rank(values: Floats) -> Floats:
    """Return the rank of each value; equal values share the mean of theirs."""
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[indices]


def compute_spearman(a: Floats, b: Floats) -> float:
    """Return nan if a side is constant."""
    ranks = rank(a), rank(b)
    return float(np.corrcoef(*ranks)[0, 1]) if all(side.std() for side in ranks) else float("nan")


def measure_correlations(figures: dict[str, Floats], chrf: Floats, seed: int = 1) -> dict[str, tuple[float, ...]]:
    """Return Spearman's correlation of each figure with chrF, and its 95% interval, over sentences that have it."""
    rng, results = np.random.default_rng(seed), {}
    for name, values in figures.items():
        known = ~np.isnan(values)
        x, y = values[known], chrf[known]
        if len(set(x)) > 1 and len(set(y)) > 1:
            samples = rng.integers(0, len(x), (BOOTSTRAP_SAMPLES, len(x)))
            interval = np.nanpercentile([compute_spearman(x[s], y[s]) for s in samples], [2.5, 97.5])
            results[name] = (compute_spearman(x, y), *map(float, interval))
    return results


def main(arguments: Sequence[str] | None = None) -> dict[str, tuple[float, ...]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--src")
    parser.add_argument("--tgt")
    parser.add_argument("--reverse", type=Path)
    parser.add_argument("-b", "--beam-size", type=int, default=4)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    translator = Translator.load(options.model, device=options.device)
    test_set = read_test_set(options.data, LanguagePair(options.src, options.tgt), context=translator.context)
    sources, references = test_set.sources[: options.limit], test_set.references[: options.limit]
    texts = [before + source for before, source in zip(test_set.contexts or [""] * len(sources), sources, strict=False)]
    pipeline = TranslationPipeline(
        translator=translator,
        options=SearchOptions(beam_size=options.beam_size),
        to=options.tgt if translator.tokenizer.source.tags else None,
        reverse=Translator.load(options.reverse, device=options.device) if options.reverse else None,
        output_format=OutputFormat(type="json", with_quality=True),
    )
    translations = pipeline.translate(texts)
    rows = [{} if each.quality is None else asdict(each.quality) for each in translations]
    columns = {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}
    columns["score"] = np.array([each.score for each in translations])
    columns["source_length"] = np.array([len(source) for source in sources], np.float64)
    pairs = zip([each.text for each in translations], references, strict=True)
    chrf = np.array([compute_pairwise_chrf(list(pair))[0, 1] for pair in pairs])
    results = measure_correlations(columns, chrf)
    table = [[name, f"{rho:.3f}", f"{low:.3f} to {high:.3f}"] for name, (rho, low, high) in results.items()]
    print(f"{len(sources):,} sentences, mean chrF {chrf.mean():.2f}, beam {options.beam_size}")
    print(markdown_table(("figure", "Spearman with sentence chrF", "95% interval"), table))
    if options.json:
        write_atomic(options.json, json.dumps({"sentences": len(sources), "spearman": results}).encode())
    return results


if __name__ == "__main__":
    main()
