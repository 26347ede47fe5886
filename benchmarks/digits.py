"""Strings of spoken digits from AudioMNIST (60 speakers, MIT): recordings of single digits, joined with random pauses
and levels.

    python -m benchmarks.digits recordings.tar.xz OUT [--strings 8000]

    OUT/train.tsv   speakers 01-42: strings of 3 to 7 digits, and all single digits
    OUT/valid.tsv   speakers 43-48: strings; OUT/test.tsv: speakers 49-54: strings
    OUT/singles/test.tsv   speakers 49-54: single digits

The recordings are named {digit}_{speaker}_{take}.opus. The digits of a string are of one speaker. The column `words`
has the start and the end of each word in seconds, by the energy of its recording. The same arguments give the same
bytes.

On two CPU cores, and on a GPU:

    attent train --task speech --data OUT --src en --out digits --minutes 12
    attent train --task speech --data OUT --src en --out digits --test OUT/test.tsv OUT/singles/test.tsv
    attent score digits --data OUT/singles/test.tsv -m wer exact
"""

from __future__ import annotations

import argparse
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from attent.data.arrays import Array
from attent.data.audio import SAMPLE_RATE, read_audio

WORDS = "zero one two three four five six seven eight nine".split()
SPEAKERS = {"train": range(1, 43), "valid": range(43, 49), "test": range(49, 55)}
EVAL_STRINGS = 600
PAUSE_SECONDS = 0.05, 0.5  # before, between and after the words
STRING_LEVEL, WORD_LEVEL = (-36.0, -6.0), (-6.0, 0.0)  # dB: of the loudest word's peak, and of each word below it
NOISE_LEVEL = -72.0  # dB: digital silence is too easy to recognize
BLOCK = SAMPLE_RATE // 100  # samples of 10 ms, whose energy is compared
MIN_ENERGY = 0.05  # of a word's loudest block, in amplitude
MARGIN = 3  # blocks around a word that are kept


@dataclass(frozen=True)
class Digit:
    digit: int
    speaker: int
    samples: Array
    start: int  # of the word, in samples
    end: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--strings", type=int, default=8_000, help="for training")
    args = parser.parse_args()
    if args.out is None:
        parser.print_usage()
        return
    digits = sorted(read_digits(args.recordings), key=lambda x: (x.speaker, x.digit, len(x.samples)))
    for seed, (split, speakers) in enumerate(SPEAKERS.items()):
        count = args.strings if split == "train" else EVAL_STRINGS
        by_speaker = {speaker: [x for x in digits if x.speaker == speaker] for speaker in speakers}
        rows = list(draw_strings(by_speaker, count, np.random.default_rng(seed)))
        singles = [describe_single(x) for speaker in speakers for x in by_speaker[speaker]]
        write_table(args.out, split, rows + (singles if split == "train" else []))
        if split == "test":
            write_table(args.out / "singles", split, singles)


def read_digits(archive: Path) -> Iterator[Digit]:
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is None or not member.name.endswith(".opus"):
                continue
            digit, speaker, _ = Path(member.name).stem.split("_")
            samples = read_audio(io.BytesIO(file.read()))
            blocks = samples[: len(samples) // BLOCK * BLOCK].reshape(-1, BLOCK)
            energy = np.sqrt((blocks**2).mean(1))
            loud = np.flatnonzero(energy > MIN_ENERGY * energy.max())
            yield Digit(int(digit), int(speaker), samples, int(loud[0]) * BLOCK, int(loud[-1] + 1) * BLOCK)


Row = tuple[Array, str, str]  # samples, text, times of the words


def describe_single(x: Digit) -> Row:
    return x.samples, WORDS[x.digit], format_times([(x.start, x.end)])


def draw_strings(by_speaker: dict[int, list[Digit]], count: int, rng: np.random.Generator) -> Iterator[Row]:
    for number in range(count):
        digits = by_speaker[list(by_speaker)[number % len(by_speaker)]]
        chosen = [digits[i] for i in rng.integers(0, len(digits), rng.integers(3, 8))]
        yield join_digits(chosen, rng)


def join_digits(digits: list[Digit], rng: np.random.Generator) -> Row:
    parts, spans, length = [], [], 0
    for x in digits:
        pause = int(rng.uniform(*PAUSE_SECONDS) * SAMPLE_RATE)
        first, last = max(0, x.start - MARGIN * BLOCK), min(len(x.samples), x.end + MARGIN * BLOCK)
        word = x.samples[first:last] * (10 ** (rng.uniform(*WORD_LEVEL) / 20) / np.abs(x.samples[first:last]).max())
        parts += [np.zeros(pause), word]
        spans.append((length + pause + x.start - first, length + pause + x.end - first))
        length += pause + len(word)
    parts.append(np.zeros(int(rng.uniform(*PAUSE_SECONDS) * SAMPLE_RATE)))
    samples = np.concatenate(parts) * 10 ** (rng.uniform(*STRING_LEVEL) / 20)
    samples += rng.normal(0, 10 ** (NOISE_LEVEL / 20), len(samples))
    return samples, " ".join(WORDS[x.digit] for x in digits), format_times(spans)


def format_times(spans: list[tuple[int, int]]) -> str:
    return " ".join(f"{start / SAMPLE_RATE:.3f}-{end / SAMPLE_RATE:.3f}" for start, end in spans)


def write_table(out: Path, split: str, rows: list[Row]) -> None:
    (out / split).mkdir(parents=True, exist_ok=True)
    lines = ["path\ttext\twords"]
    for number, (samples, text, times) in enumerate(rows):
        name = f"{split}/{number:05}.flac"
        soundfile.write(out / name, samples.astype(np.float32), SAMPLE_RATE, subtype="PCM_16")
        lines.append(f"{name}\t{text}\t{times}")
    (out / f"{split}.tsv").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
