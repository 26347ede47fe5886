"""BLEU of a teacher and its students against their speed on a CPU and their size: int8 and float32, beam 1 and 4.

    python -m benchmarks.students runs/de-en runs/de-en-384 runs/de-en-256 --data test.tsv --src de --tgt en \
        --threads 4 --output students.svg

All translate the same test set with CTranslate2, text to text, in rounds that alternate between them; a speed is the
median of the rounds, a ratio the median of the ratios to the first model (int8, same beam) of each round. The first
round, which loads and converts, does not count. The size is that of `model.bin`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attent.data.corpus import open_corpora
from attent.data.pairs import LanguagePair, Pair
from attent.decoding.engines.ctranslate2 import CTranslate2Engine
from attent.decoding.translator import Translator
from attent.inspection.plots import save_figure
from attent.interop import ctranslate2 as converter
from attent.models import Seq2Seq
from attent.models.seq2seq import find_suppressed_tokens
from attent.scoring.metrics import compute_metrics
from benchmarks.timing import describe_machine, interleave, ratio

COMPUTE_TYPES, BEAMS = ("int8", "float32"), (1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="the teacher first")
    parser.add_argument("--data", required=True)
    parser.add_argument("--src", required=True)
    parser.add_argument("--tgt", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=10_000)
    parser.add_argument("--output", type=Path, help="figure, with the figures as JSON next to it")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    (corpus,) = open_corpora([arguments.data], LanguagePair(arguments.src, arguments.tgt))
    pairs = [entry for entry in corpus if isinstance(entry, Pair)][: arguments.sentences]
    print(f"{len(pairs):,} sentences, {arguments.threads} threads; {describe_machine()}", flush=True)
    rows = measure_models(arguments.models, pairs, arguments.threads, arguments.rounds)
    for row in rows:
        print(
            f"{row['model']:24} {row['type']:8} beam {row['beam']}  BLEU {row['bleu']:5.2f}  "
            f"{row['megabytes']:6.1f} MB  {row['speed']:8.1f} sentences/s  {row['ratio']:.2f}x",
            flush=True,
        )
    if arguments.output:
        arguments.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        save_figure(plot_rows(rows), arguments.output)


def measure_models(folders: Sequence[str], pairs: Sequence[Pair], threads: int, rounds: int) -> list[dict[str, Any]]:
    sources, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
    work, rows, outputs = {}, {}, {}
    for folder in folders:
        for compute_type in COMPUTE_TYPES:
            translator, megabytes = load_converted(folder, compute_type, threads)
            for beam in BEAMS:
                name = f"{folder} {compute_type} {beam}"
                rows[name] = {
                    "model": Path(folder).name,
                    "type": compute_type,
                    "beam": beam,
                    "megabytes": megabytes,
                    "parameters": sum(parameter.numel() for parameter in translator.model.parameters()),
                }

                def run(name: str = name, translator: Translator = translator, beam: int = beam) -> None:
                    outputs[name] = [each.text for each in translator(sources, beam_size=beam)]

                work[name] = run
    seconds = interleave(work, rounds)
    for name, row in rows.items():
        baseline = seconds[f"{folders[0]} int8 {row['beam']}"]
        row["bleu"] = compute_metrics(outputs[name], references, ["bleu"], resamples=0)[0].value
        row["speed"] = len(sources) / statistics.median(seconds[name])
        row["ratio"] = ratio(seconds[name], baseline)
    return list(rows.values())


def load_converted(folder: str, compute_type: str, threads: int) -> tuple[Translator, float]:
    """Return a translator that uses this compute type, and the megabytes of its conversion."""
    translator = Translator.load(folder, device="cpu", engine="ctranslate2", threads=threads)
    model, tokenizer = translator.model, translator.tokenizer
    assert isinstance(model, Seq2Seq)
    engine = CTranslate2Engine(model, tokenizer, compute_type=compute_type, threads=threads)
    vars(translator)["_ctranslate2_engine"] = engine
    suppressed = find_suppressed_tokens(model.config, tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "conversion"
        converter.write_conversion(model, tokenizer, path, quantization=compute_type, suppressed_tokens=suppressed)
        return translator, (path / "model.bin").stat().st_size / 1e6


def plot_rows(rows: Sequence[dict[str, Any]]) -> Any:
    """Plot BLEU against speed and against megabytes: a color for each model, filled for int8, larger for beam 4."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    names = list(dict.fromkeys(row["model"] for row in rows))
    for axes, key, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("speed", "megabytes"),
        ("sentences/s on the CPU", "MB on disk"),
        strict=True,
    ):
        for row in rows:
            color = f"C{names.index(row['model'])}"
            fill = color if row["type"] == "int8" else "none"
            text = row["model"] if (row["type"], row["beam"]) == ("int8", 4) else None
            axes.scatter(row[key], row["bleu"], 25 * row["beam"], edgecolors=color, facecolors=fill, label=text)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("BLEU")
    figure.axes[1].legend(title="filled: int8, large: beam 4", fontsize="small", title_fontsize="small")
    return figure


if __name__ == "__main__":
    main()
