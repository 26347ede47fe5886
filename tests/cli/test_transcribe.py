"""`attent transcribe`: formats, several recordings, outputs, growing input, and errors in one sentence."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from attent.cli import main
from attent.cli.shared import ProgressDisplay
from attent.cli.transcribe import list_files, plan_outputs, write_transcripts
from attent.data.audio import AudioError
from attent.decoding.output_format import format_transcript, replace_line_breaks
from attent.decoding.speech_timing import SpokenWord
from attent.decoding.transcriber import Transcriber, Transcript, TranscriptSegment, read_live_audio
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.models.weights import save_model
from attent.nn import AudioConfig, StackConfig
from attent.nn.frontends import SAMPLE_RATE
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from tests.decoding.test_source_search import make_model
from tests.decoding.test_transcriber import make_speech


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, a translator, and recordings."""
    root = tmp_path_factory.mktemp("transcribe")
    tokenizer = train_monolingual_tokenizer(["zero one two three"] * 3, TokenizerConfig(kind="char"))
    model = make_model(tokenizer, AudioConfig(mel_bins=8, max_frames=200), end_bias=-1)
    save_model(model, root / "asr", tokenizer.files)
    stack = StackConfig(layers=1, width=8, heads=2, ffn_width=8)
    config = Seq2SeqConfig(vocab=tokenizer.target.size, encoder=stack, decoder=mirror_encoder(stack))
    save_model(Seq2Seq(config), root / "text", tokenizer.files)
    (root / "audio" / "more").mkdir(parents=True)
    soundfile.write(root / "audio" / "a.wav", make_speech(0.8, 0.5), SAMPLE_RATE)
    soundfile.write(root / "audio" / "more" / "b.flac", make_speech(0.6), SAMPLE_RATE)
    return root


def run(*arguments: object) -> int:
    return main(["transcribe", *map(str, arguments), "--device", "cpu", "--beam-size", "1"])


class Stdin:
    """Standard input with these bytes."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]

    def isatty(self) -> bool:
        return False


def test_one_recording_gives_its_text_in_every_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "audio" / "a.wav"
    expected = Transcriber.load(folder / "asr", device="cpu").transcribe(file, beam_size=1)
    assert len(expected.segments) == 2
    for kind in ("text", "json", "srt", "vtt"):
        assert run(folder / "asr", file, "--format", kind) == 0
        captured = capsys.readouterr()
        assert captured.out == format_transcript(expected, kind)  # type: ignore[arg-type]
        assert captured.err == ""


def test_several_recordings_give_lines_with_their_names(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    audio = folder / "audio"
    assert run(folder / "asr", audio) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert run(folder / "asr", "--format", "text", *(name for name, _ in lines)) == 0  # flags may come in between
    assert [line.split("\t") for line in capsys.readouterr().out.splitlines()] == lines
    assert [name for name, _ in lines] == [str(audio / "a.wav"), str(audio / "more" / "b.flac")]
    assert run(folder / "asr", audio, "--format", "json", "-o", tmp_path / "out.jsonl") == 0
    assert capsys.readouterr().out == ""
    objects = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [[x["file"], replace_line_breaks(x["text"])] for x in objects] == lines
    assert objects[0]["segments"][0]["words"]


def test_a_folder_gets_one_file_per_recording(folder: Path, tmp_path: Path) -> None:
    assert run(folder / "asr", folder / "audio", "--format", "srt", "-o", tmp_path) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.srt", "b.srt"]
    assert (tmp_path / "a.srt").read_text(encoding="utf-8").startswith("1\n00:00:0")


def test_bad_recordings_get_a_sentence_and_the_others_go_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.wav").write_text("no audio")
    (tmp_path / "empty.wav").touch()
    names = [tmp_path / "text.wav", folder / "audio" / "a.wav", tmp_path / "missing.wav", tmp_path / "empty.wav"]
    assert run(folder / "asr", *names) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{names[1]}\t")
    errors = captured.err.splitlines()
    assert [any(str(name) in line for line in errors) for name in names] == [True, False, True, True]
    assert errors[-1] == "attent: 3 of 4 recordings could not be transcribed"
    assert "Traceback" not in captured.err


def test_an_empty_folder_is_reported_and_the_others_go_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "audio" / "a.wav"
    assert run(folder / "asr", file, tmp_path, file) == 1
    captured = capsys.readouterr()
    assert [line.split("\t")[0] for line in captured.out.splitlines()] == [str(file)] * 2
    (error,) = captured.err.splitlines()
    assert error.startswith(f"attent: {tmp_path}: must be a folder with recordings, but has none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input must be a recording, but is empty"),
        (b"ID3\x04" + bytes(9_000), "must be raw samples of 16 bits at 16,000 Hz, but is an audio file; convert it"),
        (b"\xff\xfb\x90\x64" + bytes(9_000), "must be raw samples of 16 bits at 16,000 Hz, but is an audio file"),
        (b"OggS" + bytes(9_000), "must be raw samples of 16 bits at 16,000 Hz, but is an audio file"),
        (b"RIFF" + bytes(9_000), "must be raw samples of 16 bits at 16,000 Hz, but is an audio file"),
        (b"fLaC" + bytes(9_000), "must be raw samples of 16 bits at 16,000 Hz, but is an audio file"),
    ],
)
def test_growing_input_that_is_no_recording_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(content))
    assert run(folder / "asr", "--partial") == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_standard_input_whole_or_growing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, speech = io.BytesIO(), make_speech(1.4, 0.9, 0.5)
    soundfile.write(content, np.stack([speech, speech], 1), SAMPLE_RATE, format="WAV")
    expected = Transcriber.load(folder / "asr", device="cpu").transcribe(speech, beam_size=1)
    monkeypatch.setattr("sys.stdin", Stdin(content.getvalue()))
    assert run(folder / "asr", "-") == 0
    whole = capsys.readouterr().out
    assert abs(len(whole) - len(expected.text)) <= 0.2 * len(whole)  # 16 bits
    monkeypatch.setattr("sys.stdin", Stdin((speech * 2**15).astype("<i2").tobytes()))
    assert run(folder / "asr", "--partial") == 0
    assert capsys.readouterr().out.count("\n") == 3


def test_a_growing_recording_is_read_as_it_comes() -> None:
    samples = np.arange(-200, 200, dtype="<i2")
    expected = samples.astype(np.float32) / 2**15
    raw = np.concatenate(list(read_live_audio(io.BufferedReader(io.BytesIO(samples.tobytes() + b"\0")))))  # type: ignore[arg-type]
    assert np.array_equal(raw, expected)  # without half a sample


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("text", "audio/a.wav"), 1, "must be a speech model, but is a translator"),
        (("asr", "asr"), 1, "must be a folder with recordings, but has none"),
        (("asr", "audio", "--format", "srt"), 2, "of several recordings needs --output with an existing folder"),
        (("asr", "audio", "--partial"), 2, "--partial reads standard input: leave the recordings out"),
        (("asr", "--partial", "--format", "vtt"), 2, "--partial prints text: leave --format vtt out"),
        (("asr", "audio", "--language", "en"), 2, "`--language` and `--task` must be left out: only multilingual"),
        (("asr", "audio", "-o", "nowhere/"), 2, "nowhere/: must be an existing folder, but is not; make the folder"),
        (("asr", "audio", "--patience", "0"), 2, "`--patience` must be 1 or more, but is 0"),
        (("asr", "audio/a.wav", "-o", "audio/a.wav"), 1, "must not be an input"),
    ],
)
def test_errors_are_one_sentence(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    assert run(*arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_outputs_in_a_folder_have_the_names_of_the_recordings(tmp_path: Path) -> None:
    files = [Path("a/one.wav"), Path("-")]
    assert plan_outputs(files, False, tmp_path, "text") == [tmp_path / "one.txt", tmp_path / "stdin.txt"]
    assert plan_outputs(files, False, tmp_path, "vtt") == [tmp_path / "one.vtt", tmp_path / "stdin.vtt"]
    assert plan_outputs(files[:1], True, tmp_path / "new.srt", "srt") is None
    assert plan_outputs(files[:1], True, None, "srt") is None
    assert plan_outputs(files, False, None, "json") is None


def test_audio_files_of_folders_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("b.WAV", "a.mp3", "c/d.ogg", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "e.wav").mkdir()
    last = tmp_path / "x"
    expected = [Path("-"), *(tmp_path / name for name in ("a.mp3", "b.WAV", "c/d.ogg")), last]
    assert list_files([Path("-"), tmp_path, last]) == (expected, [])
    files, (problem,) = list_files([last, tmp_path / "e.wav"])
    assert files == [last]
    assert list_files([Path("~/no-such.wav")]) == ([Path.home() / "no-such.wav"], [])
    assert problem.startswith(f"{tmp_path / 'e.wav'}: must be a folder with recordings, but has none")


def test_one_bad_recording_gets_one_sentence() -> None:
    updates = list[tuple[Any, ...]]()

    class Progress(ProgressDisplay):
        def update(self, *counts: Any) -> None:
            updates.append(counts)

    transcript = Transcript(segments=(TranscriptSegment(start=0.0, end=1.0, text="one"),), duration=1.0)
    for results, errors, text in (
        ([AudioError("x.wav: empty")], "attent: x.wav: empty\n", ""),
        ([AudioError("x.wav: empty"), transcript],
         "attent: x.wav: empty\nattent: 1 of 2 recordings could not be transcribed\n", "b.wav\tone\n"),
    ):  # fmt: skip
        progress, out = Progress(io.StringIO()), io.StringIO()
        files = [Path("x.wav"), Path("b.wav")][: len(results)]
        assert write_transcripts(iter(results), files, [out] * len(files), "text", False, progress) == 1
        assert (progress.stream.getvalue(), out.getvalue()) == (errors, text)  # type: ignore[attr-defined]
    assert updates == [(1, 0, 1), (1, 0, 2), (2, 0, 2)]


def test_flags_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Fake:
        def transcribe_all(self, sources: Any, options: Any, *, word_times: bool) -> Any:
            calls.append((list(sources), options.beam_size, word_times))
            return iter([AudioError("no speech")])

    def load(model: Path, **settings: Any) -> Fake:
        calls.append(settings)
        return Fake()

    (tmp_path / "a.wav").touch()
    (tmp_path / "m").mkdir()
    monkeypatch.setattr(Transcriber, "load", load)
    monkeypatch.setattr("attent.cli.transcribe.prepare_loading", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("sys.stdin", Stdin(b""))
    flags = "--language de --task translate --dtype float16 --threads 2 --format json".split()
    assert run(tmp_path / "m", tmp_path / "a.wav", *flags) == 1
    expected = {"device": "cpu", "dtype": "float16", "language": "de", "task": "translate"}
    assert calls == [(tmp_path / "m", 2), expected, ([tmp_path / "a.wav"], 1, True)]
    assert run(tmp_path / "m") == 1
    sources, _, word_times = calls[-1]
    assert word_times is False
    assert isinstance(sources[0], io.BufferedReader)


def test_translate_names_the_command_for_a_speech_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", str(folder / "asr"), str(folder / "audio" / "a.wav"), "--input-type", "lines"]) == 1
    assert "but is a speech model; for that there is `attent transcribe`" in capsys.readouterr().err


# ---- formats ---------------------------------------------------------------------------------------------------------


def make_words(*words: tuple[str, float, float]) -> dict[str, Any]:
    spoken = tuple(SpokenWord(text=text, start=start, end=end) for text, start, end in words)
    return {"text": " ".join(x.text for x in spoken), "start": words[0][1], "end": words[-1][2], "words": spoken}


def test_subtitles_start_at_pauses_and_sentences_and_are_short() -> None:
    words = [("Hi", 0.1, 0.3), ("there.", 0.3, 0.5), ("You", 0.55, 0.7), ("<&>", 1.5, 3599.9996)]
    long = [("abcdefghi", 3600.0 + i, 3600.5 + i) for i in range(9)]
    segments = (
        TranscriptSegment(**make_words(*words)),
        TranscriptSegment(start=3599.9996, end=3600.0, text="no times"),
        TranscriptSegment(**make_words(*long)),
    )
    transcript = Transcript(segments=segments, duration=3610.0)
    srt = format_transcript(transcript, "srt")
    assert srt.split("\n\n")[0] == "1\n00:00:00,100 --> 00:00:00,500\nHi there."
    assert "4\n01:00:00,000 --> 01:00:00,100\nno times\n\n5\n01:00:00,100 --> 01:00:06,500\n" in srt
    assert srt.count("abcdefghi") == 9
    cues = [cue.split("\n")[2] for cue in srt.strip().split("\n\n")]
    assert cues == ["Hi there.", "You", "<&>", "no times", " ".join(["abcdefghi"] * 7), "abcdefghi abcdefghi"]
    vtt = format_transcript(transcript, "vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.100 --> 00:00:00.500\nHi there.\n\n")
    assert "\n&lt;&amp;&gt;\n" in vtt
    fields = json.loads(format_transcript(transcript, "json", "x.wav"))
    assert (fields["file"], fields["duration"], fields["text"]) == ("x.wav", 3610.0, transcript.text)
    assert fields["segments"][0]["words"][1] == {"start": 0.3, "end": 0.5, "text": "there."}
    assert format_transcript(transcript, "text") == transcript.text + "\n"


@pytest.mark.parametrize("timed", [True, False])
def test_no_format_has_control_characters_of_a_text(timed: bool) -> None:
    words = make_words(("one\x1b[2J", 0.1, 0.3), ("two\r\n\n\x9bthree", 0.3, 0.5))
    segment = TranscriptSegment(**{**words, "words": words["words"] if timed else ()})
    transcript = Transcript(segments=(segment,), duration=1.0)
    assert format_transcript(transcript, "text") == "one [2J two three\n"
    assert format_transcript(transcript, "srt").split("\n")[2:] == ["one [2J two three", ""]
    assert format_transcript(transcript, "vtt").split("\n")[3:] == ["one [2J two three", ""]
    line = format_transcript(transcript, "json")
    assert line[:-1].isprintable()
    assert json.loads(line)["text"] == segment.text
