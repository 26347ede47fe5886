"""Speech of sentences by a synthesizer: recognition, and translation of speech, of Multi30k's captions. These are real
pipelines on synthetic voices, which are far easier than people.

    python -m benchmarks.spoken_captions --data MULTI30K --out build/spoken --train 8000
    attent train --task speech --data build/spoken/recognition --src en --tgt en --out runs/spoken-en
    attent train --task speech --data build/spoken/translation --src en --tgt de --out runs/spoken-en-de

Needs espeak-ng (Debian: apt install espeak-ng). MULTI30K holds train.en.gz, train.de.gz, val.* and test_2016_flickr.*.
Each caption is spoken by one voice at one speed. The test set is spoken twice: by the voices of the training set, and
by one that is not in it (test-new-voice).
"""

from __future__ import annotations

import argparse
import gzip
import io
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import soundfile

from attent.data.audio import SAMPLE_RATE, read_audio

COMPRESSION = 1.0  # of Opus: about 9 kbit/s
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-029", "en-gb-x-rp")
SPEAKERS = ("m1", "m2", "m3", "m4", "m6", "m7", "f1", "f2", "f3", "f4")
NEW_VOICE = "en-us+f5"
SPEEDS = (130, 190)  # words per minute


@dataclass(frozen=True)
class Utterance:
    file: Path
    voice: str
    speed: int
    text: str
    translation: str


def read_lines(folder: Path, name: str, language: str) -> list[str]:
    with gzip.open(folder / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
        return [line.strip() for line in file]


def plan_split(data: Path, out: Path, name: str, split: str, count: int, voice: str | None = None) -> list[Utterance]:
    """Choose a voice and a speed for each of the first `count` captions."""
    rng = random.Random(f"{split} {voice}")
    texts, translations = (read_lines(data, name, language)[:count] for language in ("en", "de"))
    return [
        Utterance(
            out / "audio" / split / f"{i:05}.opus",
            voice or f"{rng.choice(ACCENTS)}+{rng.choice(SPEAKERS)}",
            rng.randint(*SPEEDS),
            text,
            translation,
        )
        for i, (text, translation) in enumerate(zip(texts, translations, strict=True))
    ]


def speak(utterance: Utterance) -> None:
    if utterance.file.exists():
        return
    command = ["espeak-ng", "-v", utterance.voice, "-s", str(utterance.speed), "--stdout", "--stdin"]
    spoken = subprocess.run(command, input=utterance.text.encode(), capture_output=True, check=True).stdout
    samples = read_audio(io.BytesIO(spoken))
    partial = utterance.file.with_suffix(".part")
    soundfile.write(partial, samples, SAMPLE_RATE, format="OGG", subtype="OPUS", compression_level=COMPRESSION)
    partial.rename(utterance.file)


def write_tables(out: Path, split: str, utterances: list[Utterance]) -> None:
    for task in ("recognition", "translation"):
        rows = [(u.file.relative_to(out), u.text if task == "recognition" else u.translation) for u in utterances]
        table = out / task / f"{split}.tsv"
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("".join(f"../{file}\t{text}\n" for file, text in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=29_000, help="captions of the training set")
    parser.add_argument("--test", type=int, default=1_000, help="captions of the validation set and each test set")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    splits = {
        "train": ("train", options.train, None),
        "valid": ("val", options.test, None),
        "test": ("test_2016_flickr", options.test, None),
        "test-new-voice": ("test_2016_flickr", options.test, NEW_VOICE),
    }
    with ThreadPoolExecutor(options.jobs) as pool:
        for split, (name, count, voice) in splits.items():
            utterances = plan_split(options.data, options.out, name, split, count, voice)
            (options.out / "audio" / split).mkdir(parents=True, exist_ok=True)
            for done, _ in enumerate(pool.map(speak, utterances), 1):
                if done % 1000 == 0:
                    print(f"{split}: {done:,} of {len(utterances):,}", flush=True)
            write_tables(options.out, split, utterances)


if __name__ == "__main__":
    main()
