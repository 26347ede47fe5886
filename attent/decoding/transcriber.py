"""Transcribe recordings: cut long ones into segments, search the text of each, time its words, and join the texts."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from os.path import commonprefix
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from attent.data.arrays import Array
from attent.data.audio import AudioError, has_translations, iter_audio
from attent.decoding import loading
from attent.decoding.alignment import WORD_START_MARKERS
from attent.decoding.options import Hypothesis, InputError, SearchOptions, StopCheck
from attent.decoding.output_format import replace_line_breaks
from attent.decoding.source_search import compute_audio_frames, search_sources
from attent.decoding.speech_timing import (
    WORD,
    AudioSegment,
    SpokenWord,
    compute_word_times,
    cut_finished,
    find_speech,
    iter_segments,
    join_words,
    snap_to_silence,
)
from attent.interop import load_as
from attent.interop.whisper import WhisperSettings, detect_languages, read_settings
from attent.models import Seq2Seq
from attent.nn import AudioConfig
from attent.nn.devices import get_device
from attent.nn.eval_mode import eval_mode
from attent.nn.frontends import HOP_SAMPLES, SAMPLE_RATE
from attent.storage.hub import locate_model
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_formats import WhisperTask, WhisperVocabulary, build_prompt

RecordingSource = str | Path | BinaryIO | Array | Tensor  # a file, or samples at 16 kHz

DEFAULT_MAX_SECONDS = 30.0  # of a segment, if the model has no limit
READ_SECONDS = 10.0  # of a file at a time
CPU_MAX_STATES, MAX_STATES = 6_000, 60_000  # encoder states of a batch: 2 and 20 minutes, see `compute_max_rows`
BLOCK_BATCHES = 4  # batches of segments that are collected and sorted by length
PARTIAL_SECONDS = 1.0  # of new audio between two searches of a growing recording
FILE_SIGNATURES = (b"RIFF", b"ID3", b"\xff\xfb", b"OggS", b"fLaC")  # the first bytes of WAV, MP3, Ogg and FLAC


@dataclass(frozen=True, kw_only=True)
class TranscriptSegment:
    start: float
    end: float
    text: str
    words: tuple[SpokenWord, ...] = ()  # with their times, if these were requested


@dataclass(frozen=True, kw_only=True)
class Transcript:
    segments: tuple[TranscriptSegment, ...]
    duration: float  # of the recording, in seconds

    @property
    def text(self) -> str:
        return join_words(segment.text for segment in self.segments)

    @property
    def words(self) -> tuple[SpokenWord, ...]:
        return tuple(word for segment in self.segments for word in segment.words)


@dataclass
class RecordingEnd:
    num_samples: int = 0
    error: AudioError | None = None

    def count_samples(self, blocks: Iterable[Array]) -> Iterator[Array]:
        for block in blocks:
            self.num_samples += len(block)
            yield block


class Transcriber:
    """A speech model with its tokenizer, ready to transcribe.

    >>> transcriber = attent.Transcriber.load("runs/asr")
    >>> transcript = transcriber.transcribe("talk.wav")
    >>> transcript.text
    '...'
    >>> times = [(word.start, word.end, word.text) for word in transcript.words]  # in seconds
    """

    def __init__(
        self,
        model: Seq2Seq,
        tokenizer: Tokenizer,
        *,
        whisper: WhisperSettings | None = None,
        language: str | None = None,
        task: WhisperTask | None = None,
    ) -> None:
        """
        whisper   how a Whisper model is searched
        language  of the recordings, for a Whisper model of several; None: that of the first segment of each
        task      of a Whisper model, by default transcribe; translate: to English
        """
        config = model.config.frontend
        if not isinstance(config, AudioConfig):
            raise InputError("the model must be a speech model, but its source is not audio")
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.max_seconds = choose_max_seconds(model)  # of a segment of a long recording
        if not (whisper and whisper.is_multilingual) and (language is not None or task == "translate"):
            raise InputError("`language` and `task` must be left out: only multilingual Whisper models take them")
        self.whisper, self.language, self.task = whisper, language, task or "transcribe"

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        model: Seq2Seq | None = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        language: str | None = None,
        task: WhisperTask | None = None,
    ) -> Self:
        """Load a speech model, ours or Whisper; None: float32, language and task of fine-tuning. `model`: used as is"""
        path = locate_model(folder)
        if model is None:
            placed, precision = loading.resolve_device_and_dtype(device, dtype or "float32")
            model = load_as(path, Seq2Seq, frontend=AudioConfig, dtype=precision, device=placed)
        tokenizer, whisper = loading.load_tokenizer(path), None
        if isinstance(tokenizer.target, WhisperVocabulary):
            whisper = read_settings(path, tokenizer.target)
            if whisper.is_multilingual:
                data = loading.read_data_settings(path)
                language = language or data.get("src") or whisper.default_language
                task = task or ("translate" if has_translations(data.get("src"), data.get("tgt")) else None)
        return cls(model, tokenizer, whisper=whisper, language=language, task=task)

    def transcribe(
        self,
        recording: RecordingSource,
        options: SearchOptions | None = None,
        *,
        beam_size: int | None = None,
        word_times: bool = True,
        should_stop: StopCheck | None = None,
    ) -> Transcript:
        """Return the text of a recording: the name of a file, an open file, or samples at 16 kHz.

        options      search options; `beam_size` overrides theirs
        word_times   also find the start and the end of each word
        should_stop  polled during the search; True raises `SearchCancelled`
        """
        options = options or SearchOptions()
        options = options if beam_size is None else replace(options, beam_size=beam_size)
        (result,) = self.transcribe_all([recording], options, word_times=word_times, should_stop=should_stop)
        if isinstance(result, AudioError):
            raise result
        return result

    def transcribe_all(
        self,
        recordings: Iterable[RecordingSource],
        options: SearchOptions | None = None,
        *,
        word_times: bool = True,
        should_stop: StopCheck | None = None,
    ) -> Iterator[Transcript | AudioError]:
        """Yield each transcript in order, or the error of an unreadable recording; batches may mix recordings."""
        options = options or SearchOptions()
        finished: list[tuple[TranscriptSegment, float]] = []  # of the current recording, with their overlap
        for block in self._read_blocks(recordings):
            segments = [item for item in block if isinstance(item, AudioSegment)]
            texts = iter(self._transcribe_segments(segments, options, word_times, should_stop))
            for item in block:
                if isinstance(item, AudioSegment):
                    finished.append((next(texts), item.overlap))
                else:
                    duration = item.num_samples / SAMPLE_RATE
                    yield item.error or Transcript(segments=join_segments(finished), duration=duration)
                    finished = []

    def _read_blocks(self, recordings: Iterable[RecordingSource]) -> Iterator[list[AudioSegment | RecordingEnd]]:
        """Yield the segments of all recordings, each followed by its end, in blocks of several batches."""
        block: list[AudioSegment | RecordingEnd] = []
        states, max_states = 0, BLOCK_BATCHES * self._compute_batch_states()
        for recording in recordings:
            end, language = RecordingEnd(), self.language
            try:
                for segment in iter_segments(end.count_samples(read_samples(recording)), self.max_seconds):
                    language = language or self.detect_language(segment.samples)
                    block.append(replace(segment, language=language))
                    states += self._count_states(segment)
                    if states >= max_states:
                        yield block
                        block, states = [], 0
            except AudioError as error:
                end.error = error
            block.append(end)
        yield block

    def _transcribe_segments(
        self,
        segments: Sequence[AudioSegment],
        options: SearchOptions,
        word_times: bool,
        should_stop: StopCheck | None = None,
    ) -> list[TranscriptSegment]:
        results: dict[int, TranscriptSegment] = {}
        for indices in self._plan_batches(segments):
            batch = [segments[i] for i in indices]
            source, lengths = self._compute_frames([x.samples for x in batch])
            prefix_ids = self.get_prefix(batch[0].language)
            hypotheses = self.search(source, lengths, prefix_ids, options, should_stop=should_stop)
            words: list[list[SpokenWord]] = [[] for _ in batch]
            if word_times:
                num_frames = [-(-len(x.samples) // HOP_SAMPLES) for x in batch]
                heads, inputs = (self.whisper and self.whisper.alignment_heads) or None, (source, lengths, num_frames)
                target = self.tokenizer.target
                words = compute_word_times(self.model, target, *inputs, hypotheses, prefix_ids=prefix_ids, heads=heads)
            for i, segment, hypothesis, timed in zip(indices, batch, hypotheses, words, strict=True):
                timed = snap_to_silence(timed, find_speech(segment.samples)) if timed else []
                placed = [replace(x, start=segment.start + x.start, end=segment.start + x.end) for x in timed]
                start = placed[0].start if placed else segment.start
                end = placed[-1].end if placed else segment.start + segment.seconds
                results[i] = TranscriptSegment(start=start, end=end, text=hypothesis.text, words=tuple(placed))
        return [results[i] for i in range(len(segments))]

    def _plan_batches(self, segments: Sequence[AudioSegment]) -> Iterator[list[int]]:
        """Yield the indices of segments of similar length, all with the same prompt."""
        states = [self._count_states(x) for x in segments]
        for language in dict.fromkeys(x.language for x in segments):
            indices = [i for i, x in enumerate(segments) if x.language == language]
            yield from loading.batch_by_length(states, self._compute_batch_states(), indices)

    def search(
        self,
        source: Tensor,
        lengths: Tensor | None,
        prefix_ids: Sequence[int],
        options: SearchOptions,
        known_ids: Sequence[int] = (),
        should_stop: StopCheck | None = None,
    ) -> list[Hypothesis]:
        options, ids = options if known_ids else self.ban_first_tokens(options), (*prefix_ids, *known_ids)
        inputs, banned = (self.model, self.tokenizer, source, lengths), self.suppressed_tokens
        return search_sources(*inputs, options, prefix_ids=ids, suppressed_tokens=banned, should_stop=should_stop)

    def ban_first_tokens(self, options: SearchOptions) -> SearchOptions:
        return options if self.whisper is None else replace(options, banned_first=self.whisper.banned_first)

    @property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """Tokens that Whisper never generates; timestamps among them, since its prompt excludes these."""
        if self.whisper is None or not isinstance(vocabulary := self.tokenizer.target, WhisperVocabulary):
            return ()
        return (*self.whisper.suppressed_tokens, *vocabulary.timestamps)

    def get_prefix(self, language: str | None = None) -> tuple[int, ...]:
        """Return the tokens that tell Whisper the task and the language: this one, or the transcriber's."""
        if self.whisper is None or not isinstance(vocabulary := self.tokenizer.target, WhisperVocabulary):
            return ()
        return build_prompt(vocabulary, language or self.language, self.task)

    def detect_language(self, samples: Array) -> str | None:
        is_multilingual = self.whisper is not None and self.whisper.is_multilingual
        if not is_multilingual or not isinstance(vocabulary := self.tokenizer.target, WhisperVocabulary):
            return None
        with eval_mode(self.model):
            return detect_languages(self.model, self._compute_frames([samples])[0], vocabulary)[0]

    def _compute_frames(self, recordings: Sequence[Array]) -> tuple[Tensor, Tensor | None]:
        return compute_audio_frames(list(map(torch.from_numpy, recordings)), self.config, self.device)

    def _count_states(self, segment: AudioSegment) -> int:
        return (self.config.fixed_frames or len(segment.samples) // HOP_SAMPLES) // 2 + 1

    @property
    def device(self) -> torch.device:
        return get_device(self.model)

    def _compute_batch_states(self) -> int:
        """Size a batch by the memory: a state has keys and values per decoder layer, and as much in the encoder."""
        decoder = self.model.config.decoder
        state_bytes = 8 * decoder.width * decoder.layers * next(self.model.parameters()).element_size()
        return max(1, loading.compute_max_rows(state_bytes, self.device, CPU_MAX_STATES, MAX_STATES))

    # --- while a recording grows -------------------------------------------------------------------------------------

    def stream(self, blocks: Iterable[Array], options: SearchOptions | None = None) -> Iterator[str]:
        """Yield the text of a recording while its samples come in: pieces of text that will not change, and a line
        break after each segment.

        The growing segment is searched again after each second. The words on which two searches agree are final (local
        agreement, Liu et al. 2020), and later searches start with them.
        """
        options = options or SearchOptions()
        window, searched = np.zeros(0, np.float32), 0
        stream = copy(self)  # whose language is that of this recording
        known: tuple[int, ...] = ()  # final tokens of the segment
        previous: tuple[int, ...] = ()  # tokens of the search before
        for block in blocks:
            window = np.concatenate([window, block])
            if len(window) - searched < PARTIAL_SECONDS * SAMPLE_RATE:
                continue
            finished, window = cut_finished(window, self.max_seconds)
            for samples in finished:
                yield from stream._finish_text(samples, known, options)
                known, previous = (), ()
            has_speech = find_speech(window).any()
            window = window if has_speech else window[-SAMPLE_RATE:]
            searched = len(window)
            if not has_speech:
                continue
            token_ids = stream._continue_text(window, known, options)
            pieces, end = self.tokenizer.target.to_pieces(token_ids), len(commonprefix([token_ids, previous]))  # noqa: RUF071 - of tuples
            while 0 < end < len(token_ids) and not pieces[end].startswith(WORD_START_MARKERS):
                end -= 1  # the last word may continue, unless another one follows it
            if end > len(known) and (text := self._decode_after(known, token_ids[:end])):
                yield text
                known = token_ids[:end]
            previous = token_ids
        if known or find_speech(window).any():
            yield from stream._finish_text(window, known, options)

    def _continue_text(self, samples: Array, known: tuple[int, ...], options: SearchOptions) -> tuple[int, ...]:
        self.language = self.language or self.detect_language(samples)
        source, lengths = self._compute_frames([samples])
        (hypothesis,) = self.search(source, lengths, self.get_prefix(), options, known)
        return (*known, *hypothesis.token_ids)

    def _finish_text(self, samples: Array, known: tuple[int, ...], options: SearchOptions) -> Iterator[str]:
        """Yield the rest of the text of a segment with a line break, unless it has no text at all."""
        text = self._decode_after(known, self._continue_text(samples, known, options))
        if text or known:
            yield text + "\n"

    def _decode_after(self, known: tuple[int, ...], token_ids: tuple[int, ...]) -> str:
        decode = self.tokenizer.target.decode
        return replace_line_breaks(decode(token_ids).strip().removeprefix(decode(known).strip()))


def read_samples(recording: RecordingSource) -> Iterator[Array]:
    if isinstance(recording, np.ndarray | Tensor):
        samples = np.asarray(recording)
        if samples.ndim != 1 or samples.dtype in (np.int64, np.uint64):
            allowed = "(S,) of floats or of integers up to 32 bits"
            raise AudioError(f"samples must be {allowed}, but are {samples.shape} of {samples.dtype}; convert them")
        if samples.dtype.kind in "iu":
            limits = np.iinfo(samples.dtype)  # -1 and 1, as in WAV, also of unsigned integers
            samples = (samples - (limits.min + limits.max + 1) / 2) / ((limits.max + 1 - limits.min) / 2)
        samples = samples.astype(np.float32)
        if not np.isfinite(samples).all():
            raise AudioError("samples must be finite, but some are infinite or no numbers; compute them again")
        size = int(READ_SECONDS * SAMPLE_RATE)
        yield from (samples[at : at + size] for at in range(0, len(samples), size))
    else:
        yield from iter_audio(recording, READ_SECONDS)


def read_live_audio(stream: BinaryIO) -> Iterator[Array]:
    """Yield the samples of a stream as they come: 16 bits at 16 kHz, little-endian, without a header."""
    buffer = stream.read(4)
    if not buffer:
        raise AudioError("standard input must be a recording, but is empty")
    if buffer.startswith(FILE_SIGNATURES):
        raise AudioError(
            f"a growing recording must be raw samples of 16 bits at {SAMPLE_RATE:,} Hz, but is an audio file; convert "
            f"it, for example by `ffmpeg -i - -ar {SAMPLE_RATE} -ac 1 -f s16le -`"
        )
    while data := stream.read1(2**16):  # type: ignore[attr-defined]  # what there is, at least one byte
        buffer += data
        whole = len(buffer) // 2 * 2
        yield np.frombuffer(buffer[:whole], "<i2").astype(np.float32) / 2**15
        buffer = buffer[whole:]


def choose_max_seconds(model: Seq2Seq) -> float:
    """Return the longest segment's length: that of most training recordings, within the model's limits."""
    frontend, positions = model.config.frontend, model.encoder.positions.max_length
    assert isinstance(frontend, AudioConfig)
    limits = (frontend.max_frames, frontend.fixed_frames, None if positions is None else 2 * positions)
    frames = min((limit for limit in limits if limit), default=None)
    return DEFAULT_MAX_SECONDS if frames is None else frames * HOP_SAMPLES / SAMPLE_RATE


def join_segments(parts: Sequence[tuple[TranscriptSegment, float]]) -> tuple[TranscriptSegment, ...]:
    """Return the segments that have text, each word of an overlap once. Times never go back."""
    segments = [segment for segment, _ in parts]
    for i, (_, overlap) in enumerate(parts[1:], 1):
        if overlap:
            segments[i - 1], segments[i] = remove_overlap(segments[i - 1], segments[i], overlap)
    joined: list[TranscriptSegment] = []
    for segment in (x for x in segments if x.text):
        first = joined[-1].end if joined else 0.0
        words = tuple(replace(x, start=max(x.start, first), end=max(x.end, first)) for x in segment.words)
        joined.append(replace(segment, start=max(segment.start, first), end=max(segment.end, first), words=words))
    return tuple(joined)


def remove_overlap(
    before: TranscriptSegment, after: TranscriptSegment, overlap: float
) -> tuple[TranscriptSegment, TranscriptSegment]:
    """Cut two segments at the longest sequence of words that both have in their overlap (in seconds)."""
    tail, head = (
        [word.casefold().strip(".,;:!?\"'") for word in WORD.findall(segment.text)] for segment in (before, after)
    )
    tail_start = len(tail) - count_overlap_words(before, overlap)
    head_stop = count_overlap_words(after, overlap)
    match = SequenceMatcher(None, tail, head, autojunk=False).find_longest_match(tail_start, len(tail), 0, head_stop)
    if not match.size:
        return before, after
    return slice_words(before, slice(match.a)), slice_words(after, slice(match.b, None))


def count_overlap_words(segment: TranscriptSegment, overlap: float) -> int:
    count = len(WORD.findall(segment.text))
    return min(count, 2 + int(1.5 * count * overlap / max(segment.end - segment.start, overlap)))


def slice_words(segment: TranscriptSegment, part: slice) -> TranscriptSegment:
    words = segment.words[part]
    start, end = (words[0].start, words[-1].end) if words else (segment.start, segment.end)
    return replace(segment, start=start, end=end, text=join_words(WORD.findall(segment.text)[part]), words=words)
