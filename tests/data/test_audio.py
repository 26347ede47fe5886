"""Recordings: reading and resampling audio files, corpora, the store, and errors."""

from __future__ import annotations

import csv
import io
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attent.data import audio, media_store
from attent.data.arrays import Array
from attent.data.audio import (
    AudioDataConfig,
    AudioError,
    Recording,
    find_recordings,
    iter_audio,
    prepare_recordings,
    read_audio,
)
from attent.data.pairs import CorpusError
from attent.storage.errors import AttentError

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")
CONFIG = AudioDataConfig()


def make_tone(seconds: float, rate: int = 16_000, frequency: float = 440) -> Array:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def write_tone(path: Path, seconds: float = 0.5, rate: int = 16_000, frequency: float = 440) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind: dict[str, Any] = {"format": "OGG", "subtype": "OPUS"} if path.suffix == ".opus" else {}
    soundfile.write(path, make_tone(seconds, rate, frequency), rate, **kind)
    return path


def list_recordings(recordings: list[Recording], root: Path) -> list[tuple[str, str]]:
    paths = [recording.file for recording in recordings if isinstance(recording.file, Path)]
    return [
        (path.relative_to(root).as_posix(), recording.text) for path, recording in zip(paths, recordings, strict=True)
    ]


# ---- audio files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "tolerance"), [("wav", 1e-4), ("flac", 1e-4), ("ogg", 0.1), ("mp3", 0.1), ("opus", 0.1)]
)
def test_formats_are_read(tmp_path: Path, suffix: str, tolerance: float) -> None:
    samples = read_audio(write_tone(tmp_path / f"a.{suffix}"))
    assert samples.dtype == np.float32
    assert samples.shape == (8_000,)
    assert np.abs(samples - make_tone(0.5))[800:-800].max() < tolerance


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 192_000])
def test_any_rate_is_resampled_to_16_khz(tmp_path: Path, rate: int) -> None:
    samples = read_audio(str(write_tone(tmp_path / "a.wav", 0.7, rate)))
    assert abs(len(samples) - 11_200) <= 1
    expected = make_tone(0.7)[: len(samples)]
    assert np.abs(samples[: len(expected)] - expected)[400:-400].max() < 1e-3


def test_frequencies_above_8_khz_do_not_alias(tmp_path: Path) -> None:
    assert np.abs(read_audio(write_tone(tmp_path / "a.wav", 0.5, 48_000, 12_000)))[400:-400].max() < 1e-3


@pytest.mark.parametrize(
    ("subtype", "tolerance"), [("PCM_U8", 0.01), ("PCM_24", 1e-6), ("FLOAT", 1e-6), ("ULAW", 0.05)]
)
def test_any_sample_format_is_read(tmp_path: Path, subtype: str, tolerance: float) -> None:
    soundfile.write(tmp_path / "a.wav", make_tone(0.1), 16_000, subtype=subtype)
    assert np.abs(read_audio(tmp_path / "a.wav") - make_tone(0.1)).max() < tolerance


def test_channels_are_averaged(tmp_path: Path) -> None:
    tones = np.stack([make_tone(0.1, frequency=100 * (i + 1)) for i in range(8)], 1)
    soundfile.write(tmp_path / "a.wav", tones, 16_000, subtype="FLOAT", format="WAVEX")  # 7.1
    assert np.abs(read_audio(tmp_path / "a.wav") - tones.mean(1)).max() < 1e-6


def test_blocks_are_the_samples_of_the_whole_file(tmp_path: Path) -> None:
    path = write_tone(tmp_path / "a.flac", 12.3, 44_100)  # several blocks of the decoder
    blocks = list(iter_audio(path, 2))
    assert [len(block) for block in blocks] == [32_000] * 6 + [4_800]
    assert np.array_equal(np.concatenate(blocks), read_audio(path))
    with pytest.raises(ValueError, match="`seconds` must be more than 0"):
        next(iter_audio(path, 0))


class CountingFile(io.FileIO):
    """A file that counts the bytes read."""

    count = 0

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer)
        self.count += size or 0
        return size or 0


def write_zeros(path: Path, seconds: int) -> Path:
    """Write the header of a WAV file and leave the rest to the file system, which stores no zeros."""
    size = 2 * 16_000 * seconds
    header = struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", size + 36, b"WAVEfmt ", 16, 1, 1, 16_000, 32_000, 2, 16, b"data", size
    )
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(size + len(header))
    return path


def test_a_10_hour_recording_is_read_as_it_is_needed(tmp_path: Path) -> None:
    with CountingFile(str(write_zeros(tmp_path / "long.wav", 36_000))) as file:
        blocks = iter_audio(file, 1)
        assert len(next(blocks)) == 16_000
        assert len(next(blocks)) == 16_000
        assert file.count < 2**21
    assert len(read_audio(write_zeros(tmp_path / "exact.wav", 30), 30)) == 480_000
    with pytest.raises(AudioError, match=r"long\.wav: must be at most 30 s long, but is longer; split it"):
        read_audio(tmp_path / "long.wav", 30)


def test_streams_are_read(tmp_path: Path) -> None:
    content = write_tone(tmp_path / "a.wav").read_bytes()
    expected = read_audio(tmp_path / "a.wav")
    assert np.array_equal(read_audio(io.BytesIO(content)), expected)
    read_end, write_end = os.pipe()

    def write() -> None:
        with open(write_end, "wb") as file:
            file.write(content)

    writer = threading.Thread(target=write)
    writer.start()
    with open(read_end, "rb") as pipe:
        assert np.array_equal(read_audio(pipe), expected)
    writer.join()


def write_bad_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield files that are not recordings, each with the expected message."""
    tone, unknown = make_tone(0.5), "must be a recording (wav, flac, ogg, opus, mp3), but is not recognized as one"
    path = folder / "folder.wav"
    path.mkdir()
    yield path, "must be a recording, but is a folder; check the path"
    yield folder / "missing.wav", "must be a recording, but does not exist; check the path"
    (path := folder / "empty.wav").write_bytes(b"")
    yield path, "must be a recording, but is empty"
    soundfile.write(path := folder / "none.wav", tone[:0], 16_000)
    yield path, "must be a recording, but has no samples"
    (path := folder / "text.wav").write_text("this is text\n" * 100, encoding="utf-8")
    yield path, unknown
    (path := folder / "a.raw").write_bytes(bytes(1_000))
    yield path, unknown
    for name, value in (("nan", np.nan), ("inf", np.inf), ("15000", 15_000)):
        tone[100] = value
        soundfile.write(path := folder / f"{name}.wav", tone, 16_000, subtype="FLOAT")
        yield path, f"must have samples from -1 to 1, but has {name}; export it again"
    soundfile.write(path := folder / "slow.wav", make_tone(0.5), 1)
    yield path, "must have a sample rate from 4,000 to 1,000,000 Hz, but has 1; is its header right?"
    content = write_tone(folder / "whole.flac").read_bytes()
    (path := folder / "half.flac").write_bytes(content[: len(content) // 2])
    yield path, "must be a whole recording, but is damaged (Error : flac decoder lost sync.); get it again"


def test_bad_file_is_one_sentence(tmp_path: Path) -> None:
    for path, problem in write_bad_files(tmp_path):
        for read in (read_audio, lambda path: list(iter_audio(path, 1))):
            with pytest.raises(AudioError) as error:
                read(path)
            assert str(error.value).startswith(f"{path}: {problem}")
            assert "\n" not in str(error.value)


def test_shortened_recording_is_an_error(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.mp3", make_tone(5), 16_000)
    content = (tmp_path / "a.mp3").read_bytes()
    (tmp_path / "a.mp3").write_bytes(content[: len(content) // 2])
    with pytest.raises(AudioError, match=r"a\.mp3: must be a whole recording, but ends after 2\.\d s of 5\.0 s"):
        read_audio(tmp_path / "a.mp3")


@pytest.mark.parametrize("suffix", ["wav", "aiff", "au"])
def test_truncated_file_without_compression_is_an_error(tmp_path: Path, suffix: str) -> None:
    soundfile.write(path := tmp_path / f"a.{suffix}", make_tone(5), 16_000)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(AudioError, match=r": must be a whole recording, but ends after 2\.5 s of 5\.0 s; get it again"):
        read_audio(path)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32 - 1])
def test_wav_of_a_recorder_that_cannot_seek_is_read(tmp_path: Path, size: int) -> None:
    soundfile.write(path := tmp_path / "a.wav", make_tone(1), 16_000)
    content = bytearray(path.read_bytes())
    start = content.index(b"data") + 4
    content[4:8] = content[start : start + 4] = size.to_bytes(4, "little")
    path.write_bytes(content)
    assert len(read_audio(path)) == 16_000


def test_mp3_that_is_longer_than_its_header_says_is_an_error(tmp_path: Path) -> None:
    content = write_tone(tmp_path / "a.mp3").read_bytes()
    (tmp_path / "a.mp3").write_bytes(content * 2)
    with pytest.raises(AudioError, match=r"a\.mp3: must have its length in its header, but continues after 0\.5 s"):
        read_audio(tmp_path / "a.mp3")


def test_flac_of_open_length_is_read(tmp_path: Path) -> None:
    content = bytearray(write_tone(tmp_path / "a.flac", 20).read_bytes())
    content[21] &= 0xF0  # the number of samples has 36 bits; 0 is an open length, as of a FLAC written to a pipe
    content[22:26] = bytes(4)
    assert np.array_equal(read_audio(io.BytesIO(bytes(content))), read_audio(tmp_path / "a.flac"))


@pytest.mark.parametrize(("package", "rate"), [("soundfile", 16_000), ("soxr", 8_000)])
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, rate: int) -> None:
    path = write_tone(tmp_path / "a.wav", rate=rate)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(AttentError, match=rf"{package}, which is not installed: pip install 'attent\[audio\]'"):
        read_audio(path)


def test_sample_rate_is_that_of_the_front_end() -> None:
    from attent.nn import frontends

    assert audio.SAMPLE_RATE == frontends.SAMPLE_RATE


# ---- corpora ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "a.wav\tHello there\nsub/b.wav\tBye",
        "a.wav\tHello there\tMary\nsub/b.wav\tBye\tJohn",
        "path\ttext\na.wav\tHello there\nsub/b.wav\tBye\n",
        "id\tSentence\tAudio\n1\tHello there\ta.wav\n2\tBye\tsub/b.wav\n",
        'file\ttranscript\r\na.wav\tHello there\r\n\r\nsub/b.wav\t"Bye"\r\n',
    ],
)
def test_tsv_is_read(tmp_path: Path, content: str) -> None:
    for name in ("a.wav", "sub/b.wav"):
        write_tone(tmp_path / name)
    (tmp_path / "corpus.tsv").write_text(content, encoding="utf-8", newline="")
    splits = find_recordings(tmp_path / "corpus.tsv")
    assert set(splits) == {"train"}
    dataset = prepare_recordings(splits["train"], "corpus", CONFIG, tmp_path / "store")
    assert dataset.texts in (("Hello there", "Bye"), ("Hello there", '"Bye"'))
    assert not dataset.skipped


def test_text_column_can_be_chosen(tmp_path: Path) -> None:
    table = tmp_path / "corpus.tsv"
    table.write_text("path\tsentence\ttranslation\tde\na.wav\tone\tun\teins\n", encoding="utf-8")
    assert find_recordings(table)["train"][0].text == "one"
    assert find_recordings(table, ("fr", "DE", "text"))["train"][0].text == "eins"
    with pytest.raises(
        AudioError, match="must have a column `fr`, but its columns are path, sentence, translation, de"
    ):
        find_recordings(table, ("fr",))
    table.write_text("path\tspeaker\na.wav\tMary\n", encoding="utf-8")
    with pytest.raises(
        AudioError, match=r"must have a column `text` or `sentence` .* but its columns are path, speaker"
    ):
        find_recordings(table)
    table.write_text("a.wav\n", encoding="utf-8")
    with pytest.raises(AudioError, match="must have two columns, the path of a recording and its text, but has one"):
        find_recordings(table)
    table.write_text("\n", encoding="utf-8")
    with pytest.raises(AudioError, match=r"corpus\.tsv: is empty"):
        find_recordings(table)
    table = tmp_path / "corpus.csv"
    table.write_text(f"path,text\na.wav,{'long' * 50_000}\n", encoding="utf-8")
    with pytest.raises(AudioError, match=r"corpus\.csv:2: must be comma-separated cells, but is not \(field larger"):
        find_recordings(table)


def test_common_voice_is_read(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "dev", "test", "validated", "other")):
        write_tone(tmp_path / "clips" / f"{number}.mp3")
        table = f'client_id\tpath\tsentence_id\tsentence\nx\t{number}.mp3\ty\t"He said ""{split}""."\n'
        (tmp_path / f"{split}.tsv").write_text(table, encoding="utf-8")
    for path in (tmp_path, tmp_path / "train.tsv"):
        splits = find_recordings(path)
        assert {split: list_recordings(recordings, tmp_path) for split, recordings in splits.items()} == {
            "train": [("clips/0.mp3", 'He said "train".')],
            "valid": [("clips/1.mp3", 'He said "dev".')],
            "test": [("clips/2.mp3", 'He said "test".')],
        }


def test_librispeech_is_read(tmp_path: Path) -> None:
    for name in ("train-clean-100", "train-other-500", "dev-clean", "test-clean"):
        folder = tmp_path / name / "84" / "121"
        for number in range(2):
            write_tone(folder / f"84-121-{number}.flac")
        (folder / "84-121.trans.txt").write_text(f"84-121-0 GO DO\n84-121-1 {name}\n", encoding="utf-8")
    (tmp_path / "SPEAKERS.TXT").write_text("84 | F\n", encoding="utf-8")
    splits = find_recordings(tmp_path)
    assert {split: len(recordings) for split, recordings in splits.items()} == {"train": 4, "valid": 2, "test": 2}
    assert list_recordings(splits["test"], tmp_path) == [
        ("test-clean/84/121/84-121-0.flac", "GO DO"),
        ("test-clean/84/121/84-121-1.flac", "test-clean"),
    ]
    assert splits["test"][1].location == f"{tmp_path / 'test-clean/84/121/84-121.trans.txt'}:2"
    assert set(find_recordings(tmp_path / "dev-clean")) == {"train"}


def test_deepspeech_csv_is_read(tmp_path: Path) -> None:
    for name in ("train", "dev"):
        write_tone(tmp_path / f"{name}.wav")
        with open(tmp_path / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(
                [("wav_filename", "wav_filesize", "transcript"), (tmp_path / f"{name}.wav", 1, "one, two\nthree")]
            )
    splits = find_recordings(tmp_path / "train.csv")
    assert set(splits) == {"train", "valid"}
    assert list_recordings(splits["valid"], tmp_path) == [("dev.wav", "one, two\nthree")]
    assert prepare_recordings(splits["valid"], "dev", CONFIG, tmp_path / "store").texts == ("one, two three",)


def test_ljspeech_is_read(tmp_path: Path) -> None:
    write_tone(tmp_path / "wavs" / "LJ001-0001.wav")
    (tmp_path / "metadata.csv").write_text('LJ001-0001|the "16th"|the "sixteenth"\n', encoding="utf-8")
    assert list_recordings(find_recordings(tmp_path)["train"], tmp_path) == [("wavs/LJ001-0001.wav", 'the "sixteenth"')]


def test_transcripts_next_to_recordings_are_read(tmp_path: Path) -> None:
    for name in ("train/a.wav", "train/deep/b.mp3", "train/c.wav", "val/d.flac"):
        write_tone(tmp_path / name)
    for name in ("train/a.txt", "train/deep/b.txt", "val/d.txt"):
        (tmp_path / name).write_text(f"This is\n{name}.\n", encoding="utf-8")
    (tmp_path / "train" / "._a.wav").write_bytes(b"AppleDouble")
    splits = find_recordings(tmp_path)
    assert list_recordings(splits["valid"], tmp_path) == [("val/d.flac", "This is\nval/d.txt.\n")]
    dataset = prepare_recordings(splits["train"], "train", CONFIG, tmp_path / "store")
    assert dataset.texts == ("This is train/a.txt.", "This is train/deep/b.txt.")
    assert dataset.skipped == (f"{tmp_path / 'train' / 'c.wav'}: must have a text, but has none",)


def test_recordings_without_a_split_are_for_training_unless_others_are(tmp_path: Path) -> None:
    for name in ("mary/a", "dev/b", "b"):
        write_tone(tmp_path / f"{name}.wav")
        (tmp_path / f"{name}.txt").write_text(name, encoding="utf-8")
    splits = find_recordings(tmp_path)
    assert {split: [recording.text for recording in recordings] for split, recordings in splits.items()} == {
        "train": ["b", "mary/a"],
        "valid": ["dev/b"],
    }
    (tmp_path / "mary").rename(tmp_path / "train")
    splits = find_recordings(tmp_path)
    assert {split: [recording.text for recording in recordings] for split, recordings in splits.items()} == {
        "train": ["mary/a"],
        "valid": ["dev/b"],
    }
    (tmp_path / "train").rename(tmp_path / "dev" / "more")
    (tmp_path / "b.wav").unlink()
    assert {split: len(recordings) for split, recordings in find_recordings(tmp_path).items()} == {"train": 2}


def test_corpus_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="nowhere: there is no such file or folder"):
        find_recordings(tmp_path / "nowhere")
    with pytest.raises(
        AudioError, match=r"must have recordings with a transcript next to each .* but has 0 recordings"
    ):
        find_recordings(tmp_path)
    with pytest.raises(AudioError, match="but is a recording; to recognize it there is `attent transcribe`"):
        find_recordings(write_tone(tmp_path / "a.wav"))
    with pytest.raises(
        AudioError, match=r"must have recordings with a transcript next to each .* but has 1 recordings"
    ):
        find_recordings(tmp_path)


def test_dataset_with_an_audio_column_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths = [str(write_tone(tmp_path / f"{i}.wav", 0.5 + i)) for i in range(2)]
    columns = {"speech": [*paths, None], "Text": ["one", "two", "three"]}
    dataset = datasets.Dataset.from_dict(columns).cast_column("speech", datasets.Audio())
    datasets.DatasetDict({"train": dataset, "validation": dataset}).save_to_disk(str(tmp_path / "saved"))
    dataset.save_to_disk(str(tmp_path / "one"))
    splits = find_recordings(tmp_path / "saved")
    assert set(splits) == {"train", "valid"}
    for recordings in (find_recordings(tmp_path / "one")["train"], splits["valid"]):
        prepared = prepare_recordings(recordings, "dataset", CONFIG, tmp_path / "store")
        assert prepared.texts == ("one", "two")
        assert prepared.num_samples.tolist() == [8_000, 24_000]
        assert prepared.skipped == ("row 2: the recording: must be a recording, but is empty",)


# ---- the store -------------------------------------------------------------------------------------------------------


def write_corpus(folder: Path, count: int = 3) -> list[Recording]:
    rows = [write_tone(folder / f"{i}.wav", 0.5 + i / 10, frequency=200 + 100 * i).name for i in range(count)]
    (folder / "corpus.tsv").write_text("".join(f"{row}\ttext {i}\n" for i, row in enumerate(rows)), encoding="utf-8")
    return find_recordings(folder / "corpus.tsv")["train"]


def test_store_has_the_samples_of_the_files(tmp_path: Path) -> None:
    recordings = write_corpus(tmp_path / "corpus")
    done: list[int] = []
    dataset = prepare_recordings(recordings, "corpus", CONFIG, tmp_path / "store", progress=done.append)
    assert done == [3]
    assert dataset.num_samples.tolist() == [8_000, 9_600, 11_200]
    for i in range(3):
        samples = dataset.get_samples(i)
        assert samples.dtype == np.int16
        assert np.array_equal(samples, soundfile.read(tmp_path / "corpus" / f"{i}.wav", dtype="int16")[0])
    subset = dataset.select(np.array([2, 0]))
    assert len(subset) == 2
    assert subset.texts == ("text 2", "text 0")
    assert subset.num_samples.tolist() == [11_200, 8_000]
    assert np.array_equal(subset.get_samples(0), dataset.get_samples(2))
    assert prepare_recordings(recordings, "corpus", CONFIG, tmp_path / "store", progress=done.append).texts
    assert done == [3]


def test_loud_samples_are_clipped(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", 3 * make_tone(0.5), 16_000, subtype="FLOAT")
    dataset = prepare_recordings([Recording(tmp_path / "a.wav", "loud")], "a", CONFIG, tmp_path / "store")
    assert (dataset.get_samples(0).min(), dataset.get_samples(0).max()) == (-32_768, 32_767)


def test_store_key_follows_audio_and_texts(tmp_path: Path) -> None:
    recordings = write_corpus(tmp_path / "corpus")
    store = tmp_path / "store"
    first = prepare_recordings(recordings, "corpus", CONFIG, store)
    assert prepare_recordings(recordings, "corpus", CONFIG, store).store_key == first.store_key
    corrected = [Recording(recordings[0].file, "corrected"), *recordings[1:]]
    second = prepare_recordings(corrected, "corpus", CONFIG, store)
    assert second.store_key != first.store_key
    assert second.texts[0] == "corrected"
    assert len(list(store.glob("recordings-*"))) == 1  # texts are not in it
    write_tone(tmp_path / "corpus" / "0.wav", 0.9)
    assert prepare_recordings(recordings, "corpus", CONFIG, store).num_samples.tolist() == [14_400, 9_600, 11_200]
    short = AudioDataConfig(max_seconds=0.8)
    assert prepare_recordings(recordings, "corpus", short, store).num_samples.tolist() == [9_600, 11_200]


def test_bad_recordings_are_skipped_and_named(tmp_path: Path) -> None:
    bad = [
        (write_tone(tmp_path / "long.wav", 31), "must be at most 30 s long, but is longer; split it"),
        (write_tone(tmp_path / "short.wav", 0.05), "must be at least 0.1 s long, but has 0.05 s"),
        (tmp_path / "silent.wav", "must be louder than -60 dB, but is silent"),
        *write_bad_files(tmp_path),
    ]
    soundfile.write(tmp_path / "silent.wav", np.full(16_000, 9e-4), 16_000)
    write_tone(tmp_path / "good.wav")
    lines = ["good.wav\t ", "good.wav\tfine", *(f"{path.name}\ttext" for path, _ in bad), "good.wav"]
    (tmp_path / "corpus.tsv").write_text("\n".join(lines), encoding="utf-8")
    dataset = prepare_recordings(
        find_recordings(tmp_path / "corpus.tsv")["train"], "corpus", CONFIG, tmp_path / "store"
    )
    assert dataset.texts == ("fine",)
    table, (first, *others, last) = tmp_path / "corpus.tsv", dataset.skipped  # in the order of the lines
    assert first == f"{table}:1: must have a text, but has none"
    assert last == f"{table}:{len(bad) + 3}: must have a text, but has none"
    for number, ((path, problem), message) in enumerate(zip(bad, others, strict=True), 3):
        assert message.startswith(f"{table}:{number}: {path}: {problem}")


def test_missing_file_is_named_with_its_line(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav")
    lines = ["path\ttext", *["a.wav\tfine"] * 20]
    lines[16] = "b.wav\tgone"
    (tmp_path / "corpus.tsv").write_text("\n".join(lines), encoding="utf-8")
    dataset = prepare_recordings(
        find_recordings(tmp_path / "corpus.tsv")["train"], "corpus", CONFIG, tmp_path / "store"
    )
    assert len(dataset) == 19
    expected = (
        f"{tmp_path / 'corpus.tsv'}:17: {tmp_path / 'b.wav'}: must be a recording, but does not exist; check the path"
    )
    assert dataset.skipped == (expected,)


def test_corpus_without_usable_recordings_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "corpus.tsv").write_text("a.wav\tone\nb.wav\t\n", encoding="utf-8")
    recordings = find_recordings(tmp_path / "corpus.tsv")["train"]
    problems = r".*corpus\.tsv:1: .*a\.wav.*; .*corpus\.tsv:2: must have a text"
    message = f"corpus: must have recordings, but of 2 none can be used: {problems}"
    for _ in range(2):
        with pytest.raises(AudioError, match=message):
            prepare_recordings(recordings, "corpus", CONFIG, tmp_path / "store")
    with pytest.raises(AudioError, match="but of 0 none can be used: there are none"):
        prepare_recordings([], "corpus", CONFIG, tmp_path / "store")


@pytest.mark.parametrize("damage", ["none", "entry", "samples", "more"])
def test_interrupted_build_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    recordings, store = write_corpus(tmp_path / "corpus", 5), tmp_path / "store"
    expected = prepare_recordings(recordings, "corpus", CONFIG, tmp_path / "other")
    monkeypatch.setattr(media_store, "DECODE_BATCH", 2)
    done: list[int] = []

    def interrupt(count: int) -> None:
        done.append(count)
        if count == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_recordings(recordings, "corpus", CONFIG, store, progress=interrupt)
    (staging,) = store.glob("*.part")
    if damage == "entry":  # the process was killed while it wrote the file
        with open(staging / media_store.ENTRIES_FILE, "a", encoding="utf-8") as file:
            file.write("12")
    elif damage == "samples":  # the machine lost power
        os.truncate(staging / media_store.VALUES_FILE, 100)
    elif damage == "more":
        with open(staging / media_store.VALUES_FILE, "ab") as samples_file:
            samples_file.write(b"xyz")
    dataset = prepare_recordings(recordings, "corpus", CONFIG, store, progress=done.append)
    assert done == ([2, 4, 2, 4, 5] if damage == "samples" else [2, 4, 5])
    assert dataset.store_key == expected.store_key
    assert np.array_equal(dataset.samples, expected.samples)
    assert np.array_equal(dataset.num_samples, expected.num_samples)


def test_damaged_store_is_built_again(tmp_path: Path) -> None:
    recordings = write_corpus(tmp_path / "corpus")
    first = prepare_recordings(recordings, "corpus", CONFIG, tmp_path / "store")
    expected = first.get_samples(0).copy()
    del first
    (folder,) = (tmp_path / "store").glob("recordings-*")
    os.truncate(folder / media_store.VALUES_FILE, 10)
    assert np.array_equal(prepare_recordings(recordings, "corpus", CONFIG, tmp_path / "store").get_samples(0), expected)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"min_seconds": 0.0}, "`min_seconds` must be more than 0, but is 0.0"),
        ({"max_seconds": 0.1}, "`max_seconds` must be more than `min_seconds`=0.1 and at most 3600, but is 0.1"),
        ({"max_seconds": float("nan")}, "but is nan"),
        ({"max_seconds": 4000.0}, "but is 4000.0"),
        ({"speed_perturbation": ()}, r"`speed_perturbation` must be speeds from 0.5 to 2, but is \(\)"),
        ({"speed_perturbation": (1.0, 2.1)}, r"but is \(1.0, 2.1\)"),
        ({"time_masks": -1}, "`time_masks` must be 0 or more, but is -1"),
        ({"frequency_masks": -1}, "`frequency_masks` must be"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        AudioDataConfig(**settings)
