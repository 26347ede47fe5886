"""Recordings with texts: mono samples at 16 kHz from audio files, and corpora of them (layouts: docs/speech.md).

They are decoded once into a memory-mapped file, which is cached by path, size and times of the audio files.
"""

import csv
import hashlib
import io
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self

import numpy as np

from attent.data.arrays import Array
from attent.data.file_hashes import stamp_file
from attent.data.formats.tsv import unquote_cell
from attent.data.media_store import compute_media_key, prepare_media_store
from attent.data.pairs import MAX_EXAMPLES, CorpusError, detect_split
from attent.data.text_corpus import find_text_files, read_text_file
from attent.storage.errors import AttentError, import_package
from attent.text.language_tags import is_same_language

STORE_VERSION = 2  # part of a store's key: raised when the same files give other samples
SAMPLE_RATE = 16_000  # equals `nn.frontends.SAMPLE_RATE`, which needs torch
MIN_RATE, MAX_RATE = 4_000, 1_000_000  # of files: a rate of 1 Hz would make 16,000 samples from one
BLOCK_VALUES = 2**18  # decoded at a time, all channels together: 1 MiB
MAX_PEAK = 8.0  # lossy formats exceed 1 slightly; integers stored as floats, by far
SILENCE_PEAK = 1e-3  # -60 dB, 33 steps of 16 bits
MAX_BYTES_IN_MEMORY = 2**26  # of standard input; more goes to a temporary file
BASE_SAMPLE = 20  # rows of a table whose files are looked for
AUDIO_SUFFIXES = frozenset(".wav .flac .ogg .oga .opus .mp3 .aif .aiff .au .caf .w64 .m4a".split())
TABLE_SUFFIXES = (".tsv", ".csv")
AUDIO_COLUMNS = ("path", "audio", "file", "file_name", "filename", "wav_filename")
TEXT_COLUMNS = ("text", "sentence", "transcript", "transcription", "translation")
AUDIO_FOLDERS = ("", "clips", "wavs", "wav", "audio")  # next to a table
_import = partial(import_package, purpose="reading recordings", install="'attent[audio]'")


class AudioError(CorpusError):
    """A recording or a corpus of them that cannot be read. The message names the file, the problem and what to do."""


@dataclass(frozen=True, kw_only=True)
class AudioDataConfig:
    """Lengths of recordings, speed perturbation (Ko et al. 2015) and SpecAugment (Park et al. 2019)."""

    max_seconds: Annotated[float, "longer recordings are skipped"] = 30.0
    min_seconds: Annotated[float, "shorter recordings are skipped"] = 0.1
    speed_perturbation: Annotated[tuple[float, ...], "speeds, one drawn per recording; 1: none"] = (0.9, 1.0, 1.1)
    time_masks: Annotated[int, "SpecAugment: masked spans of time, each up to 0.4 s; 0: none"] = 2
    frequency_masks: Annotated[int, "SpecAugment: masked bands of up to 27 mel bins; 0: none"] = 2

    def __post_init__(self) -> None:
        if not 0 < self.min_seconds < math.inf:
            raise AttentError(f"`min_seconds` must be more than 0, but is {self.min_seconds}")
        if not self.min_seconds < self.max_seconds <= 3_600:
            required = f"more than `min_seconds`={self.min_seconds:g} and at most 3600"
            raise AttentError(f"`max_seconds` must be {required}, but is {self.max_seconds}")
        speeds = self.speed_perturbation
        if not speeds or not all(0.5 <= speed <= 2 for speed in speeds):
            raise AttentError(f"`speed_perturbation` must be speeds from 0.5 to 2, but is {speeds}; 1 for none")
        for name in ("time_masks", "frequency_masks"):
            if getattr(self, name) < 0:
                raise AttentError(f"`{name}` must be 0 or more, but is {getattr(self, name)}")


# ---- audio files -----------------------------------------------------------------------------------------------------

AudioFile = str | Path | BinaryIO


def read_audio(file: AudioFile, max_seconds: float = math.inf) -> Array:
    """Return the samples of a recording: float32, mono, 16 kHz. One longer than `max_seconds` is an error."""
    parts, count = [], 0
    for part in _decode(file):
        parts.append(part)
        count += len(part)
        if count > max_seconds * SAMPLE_RATE:
            raise AudioError(f"{_get_name(file)}: must be at most {max_seconds:g} s long, but is longer; split it")
    return np.concatenate(parts)


def iter_audio(file: AudioFile, seconds: float) -> Iterator[Array]:
    """Yield the samples of `read_audio` in blocks of `seconds` (the last may be shorter), with bounded memory."""
    if not 0 < seconds < math.inf:
        raise AttentError(f"`seconds` must be more than 0, but is {seconds}")
    size = max(1, round(seconds * SAMPLE_RATE))
    buffer = np.empty(0, np.float32)
    for part in _decode(file):
        buffer = np.concatenate([buffer, part])
        while len(buffer) >= size:
            yield buffer[:size]
            buffer = buffer[size:]
    if len(buffer):
        yield buffer


def _decode(file: AudioFile) -> Iterator[Array]:
    """Yield mono samples at 16 kHz in small blocks; at least one sample."""
    name = _get_name(file)
    with _open_stream(file) as stream, _open_sound(stream, name) as sound:
        resampler = None
        if sound.samplerate != SAMPLE_RATE:
            # HQ (20 bits) resamples at 5,000 to 7,500 times real time; decoders are slower, and samples have 16 bits.
            resampler = _import("soxr").ResampleStream(sound.samplerate, SAMPLE_RATE, 1, quality="HQ")
        block_frames = max(1, BLOCK_VALUES // sound.channels)
        frames, count, is_last = 0, 0, False
        while not is_last:
            block = _read_block(sound, block_frames, name)
            frames, is_last = frames + len(block), len(block) < block_frames
            part = resampler.resample_chunk(block, last=is_last) if resampler else block
            count += len(part)
            yield part
        if not count:
            raise AudioError(f"{name}: must be a recording, but has no samples")
        _check_end(sound, frames, stream, name)


def _check_end(sound: Any, frames: int, stream: BinaryIO, name: str) -> None:
    """Check that the whole recording was decoded. The length of an MP3 without a header is an estimate."""
    end, rate, expected = stream.tell(), sound.samplerate, sound.frames
    # libsndfile corrects the length of a truncated WAV file and logs both. 2**31 and more: written without seeking.
    for declared, actual in re.findall(r"(?:data|SSND|Size) *: (\d+) \(should be (\d+)\)", sound.extra_info):
        expected = expected * int(declared) / max(1, int(actual)) if int(declared) < 2**31 - 2**16 else expected
    if frames + rate / 2 < 0.98 * expected < 2**62:  # FLAC may leave the length open
        ends = f"ends after {frames / rate:.1f} s of {expected / rate:.1f} s"
        raise AudioError(f"{name}: must be a whole recording, but {ends}; get it again")
    if sound.format == "MP3" and end < 0.9 * stream.seek(0, os.SEEK_END):
        problem = f"must have its length in its header, but continues after {frames / rate:.1f} s"
        raise AudioError(f"{name}: {problem}; convert it, for example with ffmpeg")


def _get_name(file: AudioFile) -> str:
    return str(file) if isinstance(file, str | Path) else str(getattr(file, "name", "the recording"))


@contextmanager
def _open_stream(file: AudioFile) -> Iterator[BinaryIO]:
    """Open a file for reading at any position; a pipe is copied first."""
    with _open_file(Path(file).expanduser()) if isinstance(file, str | Path) else nullcontext(file) as stream:
        if stream.seekable():
            yield stream
            return
        with tempfile.SpooledTemporaryFile(MAX_BYTES_IN_MEMORY) as copy:
            shutil.copyfileobj(stream, copy)
            yield copy  # type: ignore[misc]


def _open_file(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except (OSError, ValueError) as error:
        reason = f"cannot be opened ({getattr(error, 'strerror', error)})"
        reason = "is a folder" if path.is_dir() else reason if path.exists() else "does not exist"
        raise AudioError(f"{path}: must be a recording, but {reason}; check the path") from error


@contextmanager
def _open_sound(stream: BinaryIO, name: str) -> Iterator[Any]:
    soundfile = _import("soundfile")
    if not stream.seek(0, os.SEEK_END):
        raise AudioError(f"{name}: must be a recording, but is empty")
    stream.seek(0)
    try:
        sound = soundfile.SoundFile(stream)
    except (soundfile.SoundFileError, TypeError) as error:  # TypeError: a name that ends in .raw
        problem = "must be a recording (wav, flac, ogg, opus, mp3), but is not recognized as one"
        raise AudioError(f"{name}: {problem}; convert it, for example with ffmpeg") from error
    with sound:
        sound.seekable = lambda: False  # soundfile seeks after each block otherwise: FLAC of open length cannot
        if not MIN_RATE <= sound.samplerate <= MAX_RATE:
            allowed = f"a sample rate from {MIN_RATE:,} to {MAX_RATE:,} Hz"
            raise AudioError(f"{name}: must have {allowed}, but has {sound.samplerate:,}; is its header right?")
        yield sound


def _read_block(sound: Any, frames: int, name: str) -> Array:
    try:
        block = sound.read(frames, "float32", always_2d=True)
    except _import("soundfile").SoundFileError as error:
        reason = getattr(error, "error_string", error)
        raise AudioError(f"{name}: must be a whole recording, but is damaged ({reason}); get it again") from error
    with np.errstate(all="ignore"):
        samples: Array = block[:, 0] if block.shape[1] == 1 else block.mean(1)
    peak = float(np.abs(samples).max(initial=0.0))
    if not peak <= MAX_PEAK:  # NaN compares false
        raise AudioError(f"{name}: must have samples from -1 to 1, but has {peak:g}; export it again")
    return np.ascontiguousarray(samples)


# ---- corpora ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DatasetRow:
    """A recording in the audio column of a `datasets.Dataset`."""

    dataset: Any = field(repr=False)
    column: str
    row: int

    def open(self) -> AudioFile:
        cell = self.dataset[self.row][self.column] or {}
        content = cell.get("bytes")
        return cell["path"] if content is None and cell.get("path") else io.BytesIO(content or b"")


@dataclass(frozen=True)
class Recording:
    file: Path | DatasetRow
    text: str
    location: str = ""  # of the text, if it is a line of a table: corpus.tsv:17

    def compute_version(self) -> str:
        if isinstance(self.file, DatasetRow):
            return f"{self.file.dataset._fingerprint} {self.file.column} {self.file.row}"
        try:
            return stamp_file(self.file)
        except (OSError, ValueError):
            return f"{self.file} missing"


def has_translations(source: str | None, target: str | None) -> bool:
    """True if the texts of a corpus are in another language (`target`) than its recordings (`source`)."""
    return target is not None and (source is None or not is_same_language(source, target))


def choose_text_columns(source: str | None, target: str | None) -> tuple[str, ...]:
    """Return the columns that may have the texts of recordings in the language `source`, best first."""
    own = (target or source, "translation" if has_translations(source, target) else None)
    return (*filter(None, own), *TEXT_COLUMNS)


def find_recordings(data: str | Path, text_columns: Sequence[str] = TEXT_COLUMNS) -> dict[str, list[Recording]]:
    """Return the recordings of a corpus by train, valid and test.

    Splits are recognized by the names of files and folders; a corpus without them is `train`. In a table with a header
    or a dataset, the text is the first of `text_columns` that is there.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _read_dataset(_import("datasets", install="datasets").load_from_disk(str(path)), text_columns)
        if not any(file.name.lower().endswith(TABLE_SUFFIXES) for file in path.iterdir()):
            return _read_folder(path)
    elif path.suffix.lower() in AUDIO_SUFFIXES:
        problem = "must be a table of recordings and texts, or a folder of them, but is a recording"
        raise AudioError(f"{path}: {problem}; to recognize it there is `attent transcribe`")
    splits = vars(find_text_files([str(data)], TABLE_SUFFIXES)).items()
    read_table = partial(_read_table, text_columns=text_columns)
    return {split: list(chain.from_iterable(map(read_table, tables))) for split, tables in splits if tables}


def _read_folder(root: Path) -> dict[str, list[Recording]]:
    """Read LibriSpeech's layout, or transcripts next to recordings."""
    files = sorted(file for file in root.rglob("*") if not file.name.startswith("."))
    audio = {file.with_suffix(""): file for file in files if file.suffix.lower() in AUDIO_SUFFIXES}
    tables = [file for file in files if file.name.endswith(".trans.txt")]
    rows = [row for table in tables for row in _read_librispeech(table, audio)]
    if not tables:
        transcripts = {file.with_suffix(""): file for file in files if file.suffix.lower() == ".txt"}
        if not transcripts.keys() & audio.keys():
            required = "recordings with a transcript next to each (a.wav and a.txt), or a table of them (.tsv, .csv)"
            raise AudioError(f"{root}: must have {required}, but has {len(audio):,} recordings and none")
        texts = {stem: read_text_file(file) for stem, file in transcripts.items() if stem in audio}
        rows = [(file, texts.get(stem, ""), "") for stem, file in audio.items()]
    return _group_by_split((row[0].relative_to(root).parent.parts, [Recording(*row)]) for row in rows)


def _read_librispeech(table: Path, audio: Mapping[Path, Path]) -> Iterator[tuple[Path, str, str]]:
    """Yield file, text and location of each line of a *.trans.txt file: an id, a space and the text."""
    for number, line in enumerate(read_text_file(table).split("\n"), 1):
        if line.strip():
            name, _, text = line.strip().partition(" ")
            file = audio.get(table.parent / name, table.parent / f"{name}.flac")
            yield file, text, f"{table}:{number}"


def _group_by_split(groups: Iterable[tuple[Sequence[str], list[Recording]]]) -> dict[str, list[Recording]]:
    """Merge groups by the split that one of their names says. If none is `train`, those without a split are."""
    splits: dict[str, list[Recording]] = {}
    for names, recordings in groups:
        splits.setdefault(next(filter(None, map(detect_split, names)), ""), []).extend(recordings)
    others = splits.pop("", [])
    if others and "train" not in splits:
        splits["train"] = others
    return splits if len(splits) > 1 else {"train": next(iter(splits.values()), [])}


def _read_table(path: Path, text_columns: Sequence[str]) -> list[Recording]:
    content = read_text_file(path)
    first_line = content.partition("\n")[0]
    is_tsv = path.name.lower().partition(".tsv")[1] or "\t" in first_line
    delimiter = "\t" if is_tsv else "|" if "|" in first_line else ","
    rows = list(_read_rows(content, delimiter, path))
    if not rows:
        raise AudioError(f"{path}: is empty; a line needs the path of a recording and its text")
    header = [cell.strip().lower() for cell in rows[0][1]]
    audio = next((header.index(name) for name in AUDIO_COLUMNS if name in header), None)
    if audio is not None:
        text, rows = _find_text_column(header, text_columns, str(path)), rows[1:]
    elif len(header) < 2:
        raise AudioError(f"{path}: must have two columns, the path of a recording and its text, but has one")
    else:
        audio, text = 0, 2 if delimiter == "|" and len(header) == 3 else 1
    width = max(audio, text) + 1
    padded = [(number, cells + [""] * (width - len(cells))) for number, cells in rows]
    base, suffix = _find_base(path.parent, [cells[audio].strip() for _, cells in padded[:BASE_SAMPLE]])
    return [
        Recording(base / f"{cells[audio].strip()}{suffix}", cells[text], f"{path}:{number}") for number, cells in padded
    ]


def _read_rows(content: str, delimiter: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    if delimiter == ",":
        reader = csv.reader(io.StringIO(content))
        try:
            yield from ((reader.line_num, row) for row in reader if row)
        except csv.Error as error:
            problem = f"must be comma-separated cells, but is not ({error})"
            raise AudioError(f"{path}:{reader.line_num}: {problem}") from error
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield number, [unquote_cell(cell) for cell in line.split(delimiter)]


def _find_text_column(header: Sequence[str], text_columns: Sequence[str], name: str) -> int:
    index = next((header.index(column.lower()) for column in text_columns if column.lower() in header), None)
    if index is None:
        needed = " or ".join(f"`{column}`" for column in text_columns)
        raise AudioError(f"{name}: must have a column {needed}, but its columns are {', '.join(header)}; rename one")
    return index


def _find_base(folder: Path, names: Sequence[str]) -> tuple[Path, str]:
    """Return the folder and the suffix with which one of the names is a file; relative paths begin at the table."""
    for base in AUDIO_FOLDERS:
        for suffix in ("", ".wav", ".mp3", ".flac"):
            if any(name and (folder / base / f"{name}{suffix}").is_file() for name in names):
                return folder / base, suffix
    return folder, ""


def _read_dataset(dataset: Any, text_columns: Sequence[str]) -> dict[str, list[Recording]]:
    """Read a `datasets.Dataset`, or a `DatasetDict` of splits."""
    if isinstance(dataset, Mapping):
        return _group_by_split(((name,), _read_dataset(rows, text_columns)["train"]) for name, rows in dataset.items())
    features = dataset.features
    audio = next((name for name, feature in features.items() if type(feature).__name__ == "Audio"), None)
    if audio is None:
        raise AudioError(f"the dataset must have an Audio column, but its columns are {', '.join(features)}")
    names = list(features)
    column = names[_find_text_column([name.lower() for name in names], text_columns, "the dataset")]
    undecoded = dataset.cast_column(audio, _import("datasets", install="datasets").Audio(decode=False))
    texts = (str(text or "") for text in dataset[column])
    return {"train": [Recording(DatasetRow(undecoded, audio, i), text, f"row {i}") for i, text in enumerate(texts)]}


# ---- the store -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordingDataset:
    """Memory-mapped recordings and their texts."""

    name: str
    samples: Array = field(repr=False)  # of all recordings, int16 at 16 kHz: 32,768 is 1.0
    offsets: Array = field(repr=False)  # of the first sample of each recording
    num_samples: Array = field(repr=False)
    texts: tuple[str, ...] = field(repr=False)
    skipped: tuple[str, ...] = ()  # a message for each recording that cannot be used
    store_key: str = ""

    def __len__(self) -> int:
        return len(self.texts)

    def get_samples(self, index: int) -> Array:
        return self.samples[self.offsets[index] : self.offsets[index] + self.num_samples[index]]

    def select(self, indices: Array) -> Self:
        texts = tuple(self.texts[index] for index in indices)
        return replace(self, offsets=self.offsets[indices], num_samples=self.num_samples[indices], texts=texts)


def prepare_recordings(
    recordings: Sequence[Recording],
    name: str,
    config: AudioDataConfig,
    data_dir: str | Path,
    *,
    progress: Callable[[int], None] = lambda count: None,
) -> RecordingDataset:
    """Return the usable recordings from a store in `data_dir`, which is built if missing, or resumed if interrupted."""
    with_text = [recording for recording in recordings if recording.text.strip()]
    versions = (recording.compute_version() for recording in with_text)
    key = compute_media_key([STORE_VERSION, config.min_seconds, config.max_seconds], versions)
    folder, decode = Path(data_dir) / f"recordings-{key}", partial(_load_samples, config=config)
    samples, listed = prepare_media_store(with_text, decode, "<i2", folder, progress)
    entries = iter(listed)
    skipped, texts, num_samples = [], [], []
    for recording in recordings:
        if not recording.text.strip():
            skipped.append(f"{recording.location or recording.file}: must have a text, but has none")
        elif isinstance(entry := next(entries), str):
            skipped.append(": ".join(filter(None, (recording.location, entry))))
        else:
            texts.append(" ".join(recording.text.split()))
            num_samples.append(entry)
    if not texts:
        reasons = "; ".join(skipped[:MAX_EXAMPLES]) or "there are none"
        raise AudioError(f"{name}: must have recordings, but of {len(recordings):,} none can be used: {reasons}")
    lengths = np.array(num_samples, np.int64)
    text_hash = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    offsets, store_key = lengths.cumsum() - lengths, f"{folder.name}-{text_hash}"
    return RecordingDataset(name, samples, offsets, lengths, tuple(texts), tuple(skipped), store_key)


def _load_samples(recording: Recording, config: AudioDataConfig) -> Array:
    file = recording.file.open() if isinstance(recording.file, DatasetRow) else recording.file
    samples = read_audio(file, config.max_seconds)
    if len(samples) < config.min_seconds * SAMPLE_RATE:
        seconds = len(samples) / SAMPLE_RATE
        raise AudioError(f"{_get_name(file)}: must be at least {config.min_seconds:g} s long, but has {seconds:.2f} s")
    if np.abs(samples).max() < SILENCE_PEAK:
        raise AudioError(f"{_get_name(file)}: must be louder than -60 dB, but is silent")
    return np.rint(samples * 32_768).clip(-32_768, 32_767).astype("<i2")
