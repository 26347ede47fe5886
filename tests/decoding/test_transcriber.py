"""Transcriber: files, samples and streams, errors of single recordings, overlaps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

import attent
from attent.data.arrays import Array
from attent.data.audio import AudioError
from attent.decoding import transcriber
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import Hypothesis, InputError, SearchOptions
from attent.decoding.output_format import format_transcript
from attent.decoding.source_search import add_text, compute_audio_frames
from attent.decoding.speech_timing import SpokenWord
from attent.decoding.transcriber import (
    Transcriber,
    Transcript,
    TranscriptSegment,
    choose_max_seconds,
    join_segments,
    read_samples,
)
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.models.weights import save_model
from attent.nn import AudioConfig, LearnedConfig, StackConfig
from attent.nn.frontends import SAMPLE_RATE
from attent.storage.errors import FolderError
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from tests.decoding.test_source_search import make_model
from tests.interop.test_whisper import NO_TIMESTAMPS, START, make_searchable

GREEDY = SearchOptions(beam_size=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_monolingual_tokenizer(["ba di ku lo zero one two"] * 3, TokenizerConfig(kind="char"))


@pytest.fixture(scope="module")
def random_transcriber(tokenizer: Tokenizer) -> Transcriber:
    return Transcriber(make_model(tokenizer, AudioConfig(mel_bins=8, max_frames=200), end_bias=-2), tokenizer)


def make_speech(*seconds: float, pause: float = 1.5) -> Array:
    """Noise of a changing level for each of `seconds`, with pauses."""
    rng = np.random.default_rng(len(seconds))
    silence = rng.normal(0, 0.001, int(pause * SAMPLE_RATE))
    parts = [rng.normal(0, 0.2, int(s * SAMPLE_RATE)) * np.sin(np.arange(int(s * SAMPLE_RATE)) / 900) for s in seconds]
    return np.concatenate([x for part in parts for x in (part, silence)]).astype(np.float32)


def test_segments_of_several_recordings_share_batches_and_change_nothing(
    random_transcriber: Transcriber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = [make_speech(0.7), make_speech(1.2, 0.4, 1.9, 0.3), make_speech(0.2), make_speech(2.5, 1.0)]
    alone = [random_transcriber.transcribe(x, GREEDY) for x in recordings]
    assert [len(x.segments) for x in alone] == [1, 5, 1, 3]
    assert alone[1].duration == len(recordings[1]) / SAMPLE_RATE
    assert alone[1].text == " ".join(segment.text for segment in alone[1].segments)
    assert list(random_transcriber.transcribe_all(recordings, GREEDY)) == alone
    monkeypatch.setattr(transcriber, "CPU_MAX_STATES", 70)
    monkeypatch.setattr(transcriber, "BLOCK_BATCHES", 2)  # a recording may end in a later block
    assert list(random_transcriber.transcribe_all(map(torch.from_numpy, recordings), GREEDY)) == alone
    soundfile.write(tmp_path / "a.wav", recordings[1], SAMPLE_RATE, subtype="FLOAT")
    assert random_transcriber.transcribe(tmp_path / "a.wav", GREEDY) == alone[1]
    with open(tmp_path / "a.wav", "rb") as file:
        assert random_transcriber.transcribe(file, beam_size=1) == alone[1]


def test_a_recording_that_cannot_be_read_does_not_stop_the_others(
    random_transcriber: Transcriber, tmp_path: Path
) -> None:
    (tmp_path / "text.wav").write_text("no audio")
    silence, speech = np.zeros(8_000, np.float32), make_speech(0.5)
    results = list(random_transcriber.transcribe_all([tmp_path / "text.wav", speech, "missing.wav", silence], GREEDY))
    assert [type(x) for x in results] == [AudioError, Transcript, AudioError, Transcript]
    assert results[3] == Transcript(segments=(), duration=0.5)
    assert "missing.wav" in str(results[2])
    with pytest.raises(AudioError, match=r"text\.wav"):
        random_transcriber.transcribe(tmp_path / "text.wav")
    shape = r"samples must be \(S,\) of floats or of integers up to 32 bits, but are \("
    for samples, message in (
        (np.zeros((2, 9), np.float32), shape + r"2, 9\) of float32"),
        (np.zeros(9, np.int64), shape + r"9,\) of int64"),
        (np.full(9, np.nan, np.float32), "samples must be finite"),
    ):
        with pytest.raises(AudioError, match=message):
            random_transcriber.transcribe(samples)


@pytest.mark.parametrize(("integer", "scale", "offset"), [("i2", 2**15, 0), ("i4", 2**31, 0), ("u1", 2**7, 2**7)])
def test_integers_are_scaled_as_in_wav(integer: str, scale: int, offset: int) -> None:
    values = np.array([-scale, -scale // 2, 0, scale // 4]) + offset
    for samples in (values.astype(integer), torch.from_numpy(values.astype(integer))):
        (block,) = read_samples(samples)
        assert block.dtype == np.float32
        assert block.tolist() == [-1, -0.5, 0, 0.25]


def test_words_have_times_only_on_request(random_transcriber: Transcriber) -> None:
    speech = make_speech(1.0, 0.6)
    timed, plain = (random_transcriber.transcribe(speech, GREEDY, word_times=value) for value in (True, False))
    assert timed.text == plain.text
    assert plain.words == ()
    assert " ".join(word.text for word in timed.words) == timed.text
    times = [time for word in timed.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= timed.duration
    with pytest.raises(SearchCancelled):
        random_transcriber.transcribe(speech, should_stop=lambda: True)


def test_the_longest_segment_is_what_the_model_can_read() -> None:
    stack = StackConfig(layers=1, width=8, heads=2, ffn_width=8)
    config = Seq2SeqConfig(
        vocab=9, frontend=AudioConfig(mel_bins=8), encoder=stack, decoder=mirror_encoder(stack), share_embeddings=False
    )
    assert choose_max_seconds(Seq2Seq(config)) == 30
    assert choose_max_seconds(Seq2Seq(replace(config, frontend=AudioConfig(mel_bins=8, fixed_frames=500)))) == 5
    both = AudioConfig(mel_bins=8, fixed_frames=500, max_frames=200)
    assert choose_max_seconds(Seq2Seq(replace(config, frontend=both))) == 2
    encoder = replace(stack, positions=LearnedConfig(max_length=40))
    assert choose_max_seconds(Seq2Seq(replace(config, encoder=encoder))) == pytest.approx(0.8)


def test_folders_are_loaded(tokenizer: Tokenizer, random_transcriber: Transcriber, tmp_path: Path) -> None:
    save_model(random_transcriber.model, tmp_path / "asr", tokenizer.files)
    loaded = attent.Transcriber.load(tmp_path / "asr", device="cpu")
    assert loaded.max_seconds == 2
    speech = make_speech(0.7)
    assert loaded.transcribe(speech, GREEDY) == random_transcriber.transcribe(speech, GREEDY)
    stack = StackConfig(layers=1, width=8, heads=2, ffn_width=8)
    config = Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack))
    save_model(Seq2Seq(config), tmp_path / "text", tokenizer.files)
    with pytest.raises(FolderError, match=r"must be a speech model, but is a translator .* `attent translate`"):
        Transcriber.load(tmp_path / "text")


def make_part(text: str, start: float, end: float, timed: bool) -> TranscriptSegment:
    """Words of equal length, if they are timed."""
    words = text.split()
    length = (end - start) / max(1, len(words))
    spoken = [SpokenWord(text=x, start=start + i * length, end=start + (i + 1) * length) for i, x in enumerate(words)]
    return TranscriptSegment(start=start, end=end, text=text, words=tuple(spoken) if timed else ())


@pytest.mark.parametrize("timed", [True, False])
def test_an_overlap_is_merged_at_its_longest_common_words(timed: bool) -> None:
    first = make_part("One two three one two four fiv", 0, 10, timed)
    second = make_part("hree, one two, four five six one two", 6, 16, timed)
    third = make_part("nothing in common", 12, 15, timed)
    joined = join_segments([(first, 0), (second, 4.0), (make_part("", 16, 17, timed), 1.0), (third, 0)])
    assert [x.text for x in joined] == ["One two three", "one two, four five six one two", "nothing in common"]
    if timed:
        assert all([word.text for word in x.words] == x.text.split() for x in joined)
        assert joined[0].end == pytest.approx(30 / 7)
    same = join_segments([(first, 0), (third, 2.0)])
    assert [x.text for x in same] == [first.text, third.text]


def test_an_overlap_without_spaces_is_merged_and_split_into_subtitles() -> None:
    texts = ["今天天气很好我们去公园", "我们去公园散步吧"]
    parts = [make_part(" ".join(text), 8.0 * i, 8.0 * i + 11, True) for i, text in enumerate(texts)]
    joined = join_segments([(replace(x, text=x.text.replace(" ", "")), 3.0 * (x.start > 0)) for x in parts])
    transcript = Transcript(segments=joined, duration=19)
    assert transcript.text == "今天天气很好我们去公园散步吧"
    cues = format_transcript(transcript, "srt").strip().split("\n\n")
    assert [cue.split("\n")[2] for cue in cues] == ["今天天气很好", "我们去公园", "散步吧"]


@pytest.mark.parametrize("timed", [True, False])
def test_times_of_overlapping_segments_do_not_go_back(timed: bool) -> None:
    parts = [make_part("one two three", 0, 10, timed), make_part("four five six", 8, 14, timed)]
    parts += [make_part("seven", 12, 13, timed), make_part("eight nine", 13.5, 16, timed)]
    joined = join_segments([(part, 2.0 * (i > 0)) for i, part in enumerate(parts)])
    assert [x.text for x in joined] == [x.text for x in parts]
    for items in (joined, [word for x in joined for word in x.words]):
        times = [time for x in items for time in (x.start, x.end)]
        assert times == sorted(times)
    assert (joined[1].start, joined[1].end, joined[3].end) == (10, 14, 16)
    subtitles = format_transcript(Transcript(segments=joined, duration=16), "vtt")
    cues = [line.split(" --> ") for line in subtitles.split("\n") if "-->" in line]
    assert all(start < end for start, end in cues)
    assert [x for cue in cues for x in cue] == sorted(x for cue in cues for x in cue)


def test_whisper_is_told_the_language_and_the_task(tmp_path: Path, random_transcriber: Transcriber) -> None:
    make_searchable(1, tmp_path)
    rng = np.random.default_rng(0)
    loaded = Transcriber.load(tmp_path, device="cpu")
    frames = loaded.config.fixed_frames
    assert frames is not None
    assert loaded.max_seconds == frames / 100
    speech = rng.normal(0, 0.2, 160 * frames - 100).astype(np.float32)
    transcript = loaded.transcribe(speech, GREEDY)
    assert "<|" not in transcript.text
    assert " ".join(word.text for word in transcript.words) == transcript.text
    vocabulary = loaded.tokenizer.target
    assert loaded.detect_language(speech) in vocabulary.tags
    for language, task in (("de", "transcribe"), ("de", "translate"), ("en", "translate")):
        told = Transcriber.load(tmp_path, device="cpu", language=language, task=task)  # type: ignore[arg-type]
        assert vocabulary.to_pieces(told.get_prefix()) == [f"<|{language}|>", f"<|{task}|>", "<|notimestamps|>"]
        told.transcribe(speech, GREEDY)
    with pytest.raises(InputError, match="only multilingual Whisper models take them"):
        Transcriber(random_transcriber.model, random_transcriber.tokenizer, language="en")


class LoudnessTranscriber(Transcriber):
    """Hears English in loud recordings and German in others; a text is the language of its prompt."""

    def detect_language(self, samples: Array) -> str | None:
        return "en" if np.abs(samples).max() > 0.3 else "de"

    def search(
        self, source: Tensor, lengths: Tensor | None, prefix_ids: Sequence[int], *_: object, **__: object
    ) -> list[Hypothesis]:
        (language, *_rest) = self.tokenizer.target.to_pieces(prefix_ids)
        token_ids = tuple(self.tokenizer.target.encode([f" {language[2:-2]}"])[0])
        hypothesis = Hypothesis(token_ids=token_ids, log_prob=0, score=0, is_finished=True)
        return [add_text(hypothesis, self.tokenizer) for _ in source]


def test_the_language_of_each_recording_is_that_of_its_first_segment(tmp_path: Path) -> None:
    make_searchable(1, tmp_path)
    loaded = LoudnessTranscriber.load(tmp_path, device="cpu")
    rng = np.random.default_rng(0)
    first, second = (rng.normal(0, 0.2, SAMPLE_RATE // 2).astype(np.float32) for _ in range(2))
    pause = np.zeros(2 * SAMPLE_RATE, np.float32)
    loud, quiet = np.concatenate([first, pause, second / 9]), np.concatenate([first / 9, pause, second, pause])
    transcripts = loaded.transcribe_all([loud, quiet, loud, first, quiet], word_times=False)
    assert [x.text for x in transcripts if isinstance(x, Transcript)] == ["en en", "de de", "en en", "en", "de de"]
    assert [x.split() for x in loaded.stream([quiet])] == [["de"], ["de"]]
    assert "".join(loaded.stream([quiet[:SAMPLE_RATE], quiet[SAMPLE_RATE:], loud])).split() == ["de"] * 4
    assert loaded.language is None


def test_english_only_whisper_has_the_prompt_of_transformers(tmp_path: Path) -> None:
    theirs = make_searchable(0, tmp_path / "en").float()
    path = tmp_path / "en" / "generation_config.json"
    keys = json.loads(path.read_text())
    del keys["lang_to_id"], keys["task_to_id"]
    path.write_text(json.dumps(keys | {"is_multilingual": False, "forced_decoder_ids": [[1, NO_TIMESTAMPS]]}))
    theirs.generation_config = type(theirs.generation_config).from_pretrained(path.parent)
    loaded = Transcriber.load(path.parent, device="cpu")
    frames = loaded.config.fixed_frames
    assert frames is not None
    speech = np.random.default_rng(0).normal(0, 0.2, 160 * frames).astype(np.float32)
    source, _ = compute_audio_frames([torch.from_numpy(speech)], loaded.config, loaded.device)
    expected = theirs.generate(source.transpose(1, 2), force_unique_generate_call=True, max_length=4)
    prompt = (loaded.model.config.start_id, *loaded.get_prefix())
    assert prompt == (START, NO_TIMESTAMPS) == tuple(expected[0, :2].tolist())
    loaded.transcribe(speech, GREEDY)
    assert loaded.detect_language(speech) is None
    for options in ({"language": "en"}, {"task": "translate"}):
        with pytest.raises(ValueError, match="English-only"):
            theirs.generate(source.transpose(1, 2), **options)
        with pytest.raises(InputError, match="`language` and `task` must be left out: only multilingual Whisper"):
            Transcriber.load(path.parent, device="cpu", **options)  # type: ignore[arg-type]


class ScriptedTranscriber(Transcriber):
    """Hears one of these words every half second; the last word of a growing recording is wrong."""

    script: tuple[str, ...] = ("one", "two", "one", "zero", "two", "two")

    def _continue_text(self, samples: Array, known: tuple[int, ...], options: SearchOptions) -> tuple[int, ...]:
        words = list(self.script[: int(len(samples) / SAMPLE_RATE / 0.5)])
        if not self.script:
            return tuple(self.tokenizer.target.encode([" "])[0])
        if len(words) < len(self.script):
            words[-1] = words[-1][:2]
        token_ids = tuple(self.tokenizer.target.encode([" ".join(words)])[0])
        assert token_ids[: len(known)] == known
        return token_ids


def test_words_of_a_growing_recording_are_final_when_two_searches_agree(random_transcriber: Transcriber) -> None:
    scripted = ScriptedTranscriber(random_transcriber.model, random_transcriber.tokenizer)
    scripted.max_seconds = 10
    quiet = np.random.default_rng(0).normal(0, 0.001, SAMPLE_RATE // 2).astype(np.float32)
    speech = np.concatenate([quiet, make_speech(2.5, pause=0.3)])
    blocks = [speech[at : at + 4_000] for at in range(0, len(speech), 4_000)]
    pieces = list(scripted.stream(iter(blocks)))
    assert pieces == ["one", " two one", " zero two two\n"]  # after 2 s, 3 s, and at the end
    assert list(scripted.stream([quiet] * 8)) == []
    lines = "".join(scripted.stream([*blocks, *[quiet] * 4, *blocks])).splitlines()
    assert lines == ["one two one zero two two"] * 2
    scripted.script = ("one", "\x1b[2J", "\r", "a\r\nb", "\x9b", "two")
    lines = "".join(scripted.stream(blocks)).split("\n")
    assert [line.split() for line in lines] == [["one", "[2J", "a", "b", "two"], []]
    assert all(map(str.isprintable, lines))
    scripted.script = ()
    assert list(scripted.stream([*blocks, *[quiet] * 4, *blocks])) == []
