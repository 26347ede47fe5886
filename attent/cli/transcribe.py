"""`attent transcribe`: recordings to text, subtitles or JSON, also while a recording grows."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, TextIO

from cyclopts import CycloptsError, Parameter

from attent.cli import shared
from attent.cli.shared import ProgressDisplay, derive_flags, flag, make_flags_class, prepare_loading, use_utf8
from attent.decoding.options import DeviceOptions, DtypeName, InputError, SearchOptions
from attent.decoding.output_format import TranscriptFormat

if TYPE_CHECKING:
    from attent.data.audio import AudioError
    from attent.decoding.transcriber import Transcript

STDIN = Path("-")
RECORDINGS_HELP = "audio files (wav, flac, ogg, opus, mp3) and folders of them; by default, or with -, standard input"
OUTPUT_HELP = "output file, or a folder for one file per recording; by default stdout"
FORMAT_HELP = "text; srt or vtt: subtitles; json: one object per recording, with the times of segments and words"
UNUSED_OPTIONS = ("n_best", "max_length", "min_length", "beam_groups", "diversity_penalty", "prevent_loops")
SEARCH_FLAGS = list(derive_flags(SearchOptions, exclude=UNUSED_OPTIONS))
SpeechFlags: Any = make_flags_class(SEARCH_FLAGS, derive_flags(DeviceOptions, exclude=("engine", "batch_tokens")))


@dataclass(frozen=True, kw_only=True)
class TranscribeFlags(SpeechFlags):  # type: ignore[misc]  # derived from the options
    output: Annotated[str | None, flag("Common", OUTPUT_HELP, "--output", "-o")] = None
    format: Annotated[TranscriptFormat, flag("Output", FORMAT_HELP, "--format", "-f")] = "text"
    partial: Annotated[bool, flag("Common", "print text while stdin grows: raw 16-bit samples at 16 kHz")] = False
    language: Annotated[str | None, flag("Common", "of the recordings, for Whisper; by default detected")] = None
    task: Annotated[
        Literal["transcribe", "translate"] | None,
        flag("Common", "for Whisper, by default that of its training; translate: to English"),
    ] = None
    dtype: Annotated[DtypeName | None, flag("Device", "by default float32")] = None


def transcribe(
    model: Annotated[Path, Parameter(help="a folder of `attent train --task speech`, or Whisper's")],
    /,
    *recordings: Annotated[Path, Parameter(help=RECORDINGS_HELP)],
    flags: Annotated[TranscribeFlags, Parameter(name="*", show_default=False)] = TranscribeFlags(),
) -> int:
    """Transcribe recordings.

    attent transcribe runs/asr talk.wav --format srt -o talk.srt
    """
    names = recordings or [STDIN]
    check_usage(names, flags)
    with shared.raise_usage_errors("transcribe"):
        options = SearchOptions(**{name: getattr(flags, name) for name, _, _ in SEARCH_FLAGS})
    files, problems = list_files(names)
    output = None if flags.output is None else Path(flags.output)
    is_single = len(names) == 1 and not names[0].expanduser().is_dir()
    outputs = plan_outputs(files, is_single, output, flags.format)

    from attent.decoding.transcriber import Transcriber, read_live_audio
    from attent.storage.atomic import open_output
    from attent.storage.manifest import check_outputs

    check_outputs(outputs or [output], [model, *(file for file in files if file != STDIN)])
    prepare_loading(model, flags.threads)
    settings = {name: getattr(flags, name) for name in ("device", "dtype", "language", "task")}
    try:
        transcriber = Transcriber.load(model, **settings)
    except InputError as error:
        message = shared.use_flag_names(str(error), TranscribeFlags)
        raise CycloptsError(msg=message, command_chain=("transcribe",)) from error
    use_utf8(sys.stdout)
    to_stdout = output in (None, STDIN) or outputs is not None
    with (
        ProgressDisplay(sys.stderr) as progress,
        nullcontext(sys.stdout) if to_stdout else open_output(output, progress.print_message) as out,  # type: ignore[arg-type]
    ):
        if flags.partial:
            for piece in transcriber.stream(read_live_audio(sys.stdin.buffer), options):
                print(piece, end="", file=out, flush=True)
            return 0
        progress.start(None, quiet=sys.stdout.isatty() and to_stdout)
        sources: Iterator[Path | BinaryIO] = (sys.stdin.buffer if file == STDIN else file for file in files)
        results = transcriber.transcribe_all(sources, options, word_times=flags.format != "text")
        num_bad = write_transcripts(results, files, outputs or [out] * len(files), flags.format, is_single, progress)
        for problem in problems:
            progress.print_message(problem)
        return 1 if num_bad or problems else 0


def plan_outputs(files: Sequence[Path], is_single: bool, output: Path | None, kind: str) -> list[Path] | None:
    if output is not None and output.expanduser().is_dir():
        suffix = "txt" if kind == "text" else kind
        return [output / f"{'stdin' if file == STDIN else file.stem}.{suffix}" for file in files]
    if not is_single and kind in ("srt", "vtt"):
        problem = f"--format {kind} of several recordings needs --output with an existing folder"
        raise CycloptsError(msg=problem, command_chain=("transcribe",))
    return None


def write_transcripts(
    results: "Iterator[Transcript | AudioError]",
    files: Sequence[Path],
    outputs: Sequence[Path | TextIO],
    transcript_format: TranscriptFormat,
    is_single: bool,
    progress: ProgressDisplay,
) -> int:
    from attent.data.audio import AudioError
    from attent.decoding.output_format import format_transcript
    from attent.storage.atomic import write_output

    num_bad = 0
    for i, (file, result) in enumerate(zip(files, results, strict=True)):
        output = outputs[i]
        if isinstance(result, AudioError):
            progress.print_message(str(result))
            num_bad += 1
        elif isinstance(output, Path):
            write_output(output, format_transcript(result, transcript_format).encode())
        else:
            output.write(format_transcript(result, transcript_format, None if is_single else str(file)))
            output.flush()
        progress.update(i + 1, 0, len(files))
    if num_bad and len(files) > 1:
        progress.print_message(f"{num_bad:,} of {len(files):,} recordings could not be transcribed")
    return num_bad


def check_usage(names: Sequence[Path], flags: TranscribeFlags) -> None:
    problem = None
    if flags.partial and list(names) != [STDIN]:
        problem = "--partial reads standard input: leave the recordings out"
    elif flags.partial and flags.format != "text":
        problem = f"--partial prints text: leave --format {flags.format} out"
    elif flags.output and flags.output.endswith("/") and not Path(flags.output).expanduser().is_dir():
        problem = f"{flags.output}: must be an existing folder, but is not; make the folder first"
    if problem:
        raise CycloptsError(msg=problem, command_chain=("transcribe",))
    shared.check_positive("transcribe", threads=flags.threads)


def list_files(names: Sequence[Path]) -> tuple[list[Path], list[str]]:
    from attent.data.audio import AUDIO_SUFFIXES, AudioError

    files, problems = list[Path](), list[str]()
    for name in names:
        path = name.expanduser()
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in AUDIO_SUFFIXES and file.is_file())
        if not inside:
            problems.append(f"{name}: must be a folder with recordings, but has none; give another, or files")
        files += inside
    if not files:
        raise AudioError("\n".join(problems))
    return files, problems
