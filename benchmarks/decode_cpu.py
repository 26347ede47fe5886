"""Translate on a CPU at base size (6 + 6 layers of 512, vocabulary 32,000), compared with `transformers` and plain
CTranslate2: output tokens per second and per CPU-second.

    python -m benchmarks.decode_cpu                     2 threads, beam 4, then beam 1
    python -m benchmarks.decode_cpu --beams 4 --rounds 5 --sentences 128

    transformers    `generate` of the same weights as MarianMTModel, from ids to ids; the best of some batch sizes
    attent, torch   the reference engine in float32, from text to text
    CTranslate2     calls of `translate_batch` on the same int8 conversion, from pieces to pieces, sorted by length in
                    one call; the best of some batch sizes
    attent          the default of `attent translate` on a CPU: text to text, int8

Weights are random, and the bias of the end is so low that it never comes: every output has the maximum length, so that
all do the same work. Sentences are random, as long as those of news; all alternate, round by round, and a ratio is the
median of the ratios of the rounds. CPU-seconds count all threads. The first round, which warms up and finds the best
batch size, does not count.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attent.decoding.options import EngineName, SearchOptions
from attent.decoding.translator import Translator
from attent.interop import ctranslate2 as converter
from attent.interop import marian
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.training.loop import write_model
from benchmarks import synthetic_corpus
from benchmarks.timing import describe_machine

VOCAB, NUM_PAIRS, MEAN_WORDS = 32_000, 40_000, 21  # 21 random words are some 29 pieces
BATCH_SIZES = (16, 32, 64)  # tried for those without automatic batching
NO_END_BIAS = -1e4
CONVERSION_FOLDER = "ctranslate2"  # for calls of CTranslate2 itself

TranslateRun = Callable[[], int]  # translates everything and returns the number of output tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--length", type=int, default=29, help="output length in tokens")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as home:
        texts = prepare_models(Path(home), arguments.layers, arguments.sentences)
        print(
            f"{arguments.sentences} sentences, outputs of {arguments.length} tokens; {describe_machine()}", flush=True
        )
        for beams in arguments.beams:
            runs = make_runs(Path(home), texts, beams, arguments.length, arguments.threads)
            compare_speeds(runs, arguments.rounds, f"beam {beams}")


def prepare_models(home: Path, layers: int, count: int) -> list[str]:
    """Write the model for attent, transformers and CTranslate2; return the text to translate."""
    synthetic_corpus.write_corpus(home / "corpus.tsv", NUM_PAIRS, mean_words=MEAN_WORDS)
    pairs = [line.rstrip("\n").split("\t") for line in (home / "corpus.tsv").read_text(encoding="utf-8").splitlines()]
    tokenizer = train_tokenizer([a for a, _ in pairs], [b for _, b in pairs], TokenizerConfig(vocab=VOCAB))
    encoder = StackConfig(layers=layers)
    config = Seq2SeqConfig(
        vocab=tokenizer.source.size, encoder=encoder, decoder=mirror_encoder(encoder), output_bias=True
    )
    model = Seq2Seq(config).eval()
    assert model.output.bias is not None
    with torch.no_grad():
        model.output.bias[config.end_id] = NO_END_BIAS
    write_model(home / "ours", model, tokenizer)
    marian.save(model, home / "theirs", pad=tokenizer.target.pad)
    converter.write_conversion(model, tokenizer, home / CONVERSION_FOLDER)
    return [source for source, _ in pairs[:count]]


# --- implementations ------------------------------------------------------------------------------------------------


def make_runs(home: Path, texts: list[str], beams: int, length: int, threads: int) -> dict[str, list[TranslateRun]]:
    """Return runs by name, one for every batch size to try."""
    names: tuple[EngineName, ...] = ("torch", "ctranslate2")
    engines = {name: Translator.load(home / "ours", device="cpu", engine=name, threads=threads) for name in names}
    tokenizer = engines["torch"].tokenizer
    rows = sorted(tokenizer.encode_source(texts), key=len, reverse=True)

    def text_to_text(name: EngineName) -> TranslateRun:
        def run() -> int:
            # Random weights produce loops: allow them, or some sentences would be searched twice.
            results = engines[name].translate(
                texts, SearchOptions(beam_size=beams, max_length=length), prevent_loops=False
            )
            return sum(len(rates.tokens) for rates in results)

        return run

    return {
        "transformers": [
            make_transformers_run(home / "theirs", rows, tokenizer, beams, length, size) for size in BATCH_SIZES
        ],
        "attent, torch": [text_to_text("torch")],
        "CTranslate2": [
            make_ctranslate2_run(home / CONVERSION_FOLDER, rows, tokenizer, beams, length, threads, size)
            for size in BATCH_SIZES
        ],
        "attent": [text_to_text("ctranslate2")],
    }


def make_transformers_run(
    folder: Path, rows: list[list[int]], tokenizer: Tokenizer, beams: int, length: int, size: int
) -> TranslateRun:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    options = {"max_length": None, "forced_eos_token_id": None, "bad_words_ids": None, "renormalize_logits": False}
    inputs = [pad_rows(rows[start : start + size], tokenizer.source.pad) for start in range(0, len(rows), size)]

    def run() -> int:
        outputs = [
            model.generate(input_ids=ids, attention_mask=mask, num_beams=beams, max_new_tokens=length, **options)
            for ids, mask in inputs
        ]
        return sum((out.shape[1] - 1) * len(out) for out in outputs)  # without the start token

    return run


def pad_rows(rows: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows]), mask


def make_ctranslate2_run(
    folder: Path, rows: list[list[int]], tokenizer: Tokenizer, beams: int, length: int, threads: int, size: int
) -> TranslateRun:
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), compute_type="int8", inter_threads=1, intra_threads=threads)
    pieces: list[Any] = [tokenizer.source.to_pieces(row) for row in rows]

    def run() -> int:
        results = translator.translate_batch(
            pieces,
            beam_size=beams,
            length_penalty=0.6,
            max_batch_size=size,
            max_decoding_length=length,
            min_decoding_length=length,
        )
        return sum(len(rates.hypotheses[0]) for rates in results)

    return run


# --- comparison ------------------------------------------------------------------------------------------------------


@dataclass
class TokenRates:
    """Tokens per second and per CPU-second of each round."""

    per_second: list[float] = field(default_factory=list)
    per_cpu_second: list[float] = field(default_factory=list)

    def time_run(self, run: TranslateRun) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = run()
        self.per_second.append(tokens / (time.perf_counter() - wall))
        self.per_cpu_second.append(tokens / (time.process_time() - cpu))


def compare_speeds(runs: dict[str, list[TranslateRun]], rounds: int, title: str) -> None:
    chosen = {name: choose_fastest(runs) for name, runs in runs.items()}
    times = {name: TokenRates() for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            times[name].time_run(chosen[name])
    print(f"\n{title:<16}{'tokens/s':>10}{'tokens/CPU-s':>14}{'x transformers':>16}{'x CTranslate2':>16}")
    for name, rates in times.items():
        ratios = "".join(
            f"{compute_ratio(rates, times[other]):>{w}.2f}" for other, w in (("transformers", 16), ("CTranslate2", 15))
        )
        wall, cpu = statistics.median(rates.per_second), statistics.median(rates.per_cpu_second)
        print(f"{name:<16}{wall:>10,.0f}{cpu:>14,.0f}{ratios}", flush=True)


def choose_fastest(runs: list[TranslateRun]) -> TranslateRun:
    """Return the fastest run, each tried once after a warm-up."""
    speeds = []
    for run in runs:
        times = TokenRates()
        for _ in range(2):
            times.time_run(run)
        speeds.append(times.per_cpu_second[-1])
    return runs[speeds.index(max(speeds))]


def compute_ratio(rates: TokenRates, other: TokenRates) -> float:
    return statistics.median(a / b for a, b in zip(rates.per_cpu_second, other.per_cpu_second, strict=True))


if __name__ == "__main__":
    main()
