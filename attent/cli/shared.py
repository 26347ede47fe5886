"""Shared parts of the commands: progress and messages on the terminal, flags derived from the options in
`attent.decoding.options`, and texts from arguments, files or stdin.
"""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, make_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, get_args, get_type_hints

from cyclopts import CycloptsError, Group, Parameter

from attent.decoding.options import DeviceOptions, DtypeName, SamplingOptions, SearchKeywords, SearchOptions
from attent.formatting import format_duration

if TYPE_CHECKING:
    from attent.decoding.predictor import Predictor

REDRAW_INTERVAL = 0.25  # seconds
SPEED_WINDOW = 5.0  # seconds over which speed is measured: a slow start says nothing about the rest


def print_message(message: str) -> None:
    print(f"attent: {message}", file=sys.stderr, flush=True)


def print_status(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def use_utf8(stream: TextIO) -> None:
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", newline="\n")


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """A progress line on the terminal for commands that read lines, with messages in between."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.is_live = False
        self.is_drawn = False
        self.total_bytes: int | None = None
        self.next_redraw = clock()
        self.samples: deque[ProgressSample] = deque([ProgressSample(self.next_redraw, 0, 0.0)])

    def __exit__(self, *error: object) -> None:
        self.clear()

    def start(self, total_bytes: int | None, *, quiet: bool) -> None:
        self.is_live = self.stream.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self.total_bytes, self.samples = total_bytes, deque([ProgressSample(self.clock(), 0, 0.0)])

    def print_message(self, message: str) -> None:
        self.clear()
        print(f"attent: {message}", file=self.stream, flush=True)

    def update(self, lines: int, done_bytes: int, total_lines: int | None = None) -> None:
        now = self.clock()
        if not self.is_live or now < self.next_redraw:
            return
        fraction = lines / total_lines if total_lines else done_bytes / self.total_bytes if self.total_bytes else 0.0
        if lines < self.samples[-1].lines:  # another pass over the document
            self.samples = deque([replace(self.samples[-1], lines=0, fraction=0.0)])
        self.samples.append(ProgressSample(now, lines, min(fraction, 1.0)))
        while now - self.samples[1].time >= SPEED_WINDOW:
            self.samples.popleft()
        self.stream.write(f"\r\x1b[K{format_progress(self.samples[0], self.samples[-1])}")
        self.stream.flush()
        self.is_drawn, self.next_redraw = True, now + REDRAW_INTERVAL

    def clear(self) -> None:
        if self.is_drawn:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
            self.is_drawn = False


@dataclass(frozen=True)
class ProgressSample:
    time: float
    lines: int
    fraction: float  # 0: unknown


def format_progress(before: ProgressSample, now: ProgressSample) -> str:
    """`1,024 lines, 210 a second, 40%, 12 s left`"""
    seconds = max(now.time - before.time, 1e-3)
    speed = (now.lines - before.lines) / seconds
    progress = f"{now.lines:,} lines, {speed:,.{0 if speed >= 10 else 1}f} a second"
    if now.fraction <= before.fraction:
        return progress if not now.fraction else f"{progress}, {now.fraction:.0%}"
    left = seconds * (1 - now.fraction) / (now.fraction - before.fraction)
    return f"{progress}, {now.fraction:.0%}, {format_duration(left)} left"


# --- flags -----------------------------------------------------------------------------------------------------------


GroupName = Literal["Common", "Constraints", "Search", "Sampling", "Output", "Documents", "Device"]
GROUPS: dict[str, Group] = {name: Group(name, sort_key=i) for i, name in enumerate(get_args(GroupName), 1)}
DerivedFlag = tuple[str, Any, Any]  # name, type and default
DEFAULT_BEAM_SIZE = SearchOptions.beam_size


def flag(group: GroupName, help_text: str, *names: str, negative: str = "") -> Parameter:
    return Parameter(name=names or None, group=GROUPS[group], help=help_text, negative=negative, negative_iterable="")


def derive_flags(options: type, unset: Container[str] = (), exclude: Container[str] = ()) -> Iterator[DerivedFlag]:
    """Yield the flag of each `option` field; those in `unset` default to None."""
    hints = get_type_hints(options)
    for field in fields(options):
        if (option := field.metadata.get("option")) and field.name not in exclude:
            names = [f"--{field.name.replace('_', '-')}", *option.aliases]
            negative = f"--no-{names[0][2:]}" if hints[field.name] is bool else ""
            parameter = Parameter(name=names, group=GROUPS[option.group], help=option.help, negative=negative)
            kind, default = hints[field.name], field.default
            if field.name in unset:
                kind, default = kind | None, None
            yield field.name, Annotated[kind, parameter], default


def make_flags_class(*flags: Iterable[DerivedFlag]) -> Any:
    return make_dataclass("DerivedFlags", chain(*flags), frozen=True, kw_only=True)


_SAMPLING_NAMES = tuple(field.name for field in fields(SamplingOptions))
_SAMPLE_FLAG = Annotated[bool, flag("Sampling", "sample the translations; implied by the next four flags")]
SearchFlags: Any = make_flags_class(
    derive_flags(SearchOptions, unset=("beam_size",)),
    [("sample", _SAMPLE_FLAG, False)],
    derive_flags(SamplingOptions, unset=_SAMPLING_NAMES),
)
DeviceFlags: Any = make_flags_class(derive_flags(DeviceOptions))


def build_search_options(flags: Any, min_beam_size: int = 1) -> SearchOptions:
    values = {name: value for name in SearchKeywords.__annotations__ if (value := getattr(flags, name)) is not None}
    if flags.sample:
        values.setdefault("temperature", SamplingOptions.temperature)
    return SearchOptions().change(min_beam_size=min_beam_size, **values)


def build_device_options(flags: Any) -> DeviceOptions:
    return DeviceOptions(**{field.name: getattr(flags, field.name) for field in fields(DeviceOptions)})


@contextmanager
def raise_usage_errors(command: str, options: type = SearchOptions) -> Iterator[None]:
    """Raise a ValueError as a usage error that names flags instead of options."""
    try:
        yield
    except ValueError as error:
        raise CycloptsError(msg=use_flag_names(str(error), options), command_chain=(command,)) from error


def use_flag_names(message: str, options: type = SearchOptions) -> str:
    """Replace option names in a message by flags: `beam_size` -> `--beam-size`."""
    names = "|".join(field.name for field in fields(options))
    message = message.replace("`mbr_candidates`", "`--mbr`")
    return re.sub(rf"(?<=`)({names})(?=`)|\b(max_length)\b", lambda name: f"--{name[0].replace('_', '-')}", message)


def check_positive(command: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            problem = f"--{name.replace('_', '-')} must be 1 or more, but is {value}"
            raise CycloptsError(msg=problem, command_chain=(command,))


# --- texts of `attent fill`, `classify` and `embed` ------------------------------------------------------------------


FILE_NAME_PATTERN = re.compile(r"\S+\.(txt|tsv|jsonl|csv|gz|xz|zst|png|jpe?g|webp)", re.IGNORECASE)
STDIN_NAMES = ("-", "./-")
BLOCK_TEXTS = 1_024
TEXTS_HELP = "texts, or files with one text per line; by default, or with -, standard input"


@dataclass(frozen=True, kw_only=True)
class TextInputFlags:
    json: Annotated[bool, flag("Output", "print one JSON object per line")] = False
    device: Annotated[str | None, flag("Device", "cuda, cuda:1, mps or cpu; by default the fastest available")] = None
    dtype: Annotated[DtypeName, flag("Device", "by default float32")] = "float32"
    threads: Annotated[int | None, flag("Device", "CPU threads, by default all cores")] = None


def prepare_loading(folder: Path, threads: int | None) -> None:
    import torch

    from attent.decoding.loading import check_model_exists

    check_model_exists(folder)
    if threads is not None:
        torch.set_num_threads(threads)


def load_predictor(folder: Path, flags: TextInputFlags) -> "Predictor":
    from attent.decoding.predictor import Predictor

    prepare_loading(folder, flags.threads)
    return Predictor.load(folder, device=flags.device, dtype=flags.dtype, notify=print_message)


@dataclass(frozen=True)
class TextBlock:
    texts: list[str]
    first_number: int = 1  # line number of the first
    is_from_command: bool = True  # False: lines of a file or of standard input


def read_inputs(predictor: "Predictor", arguments: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield blocks of texts, or names of images, which may also come from standard input."""
    from attent.models import VisionTransformer

    if isinstance(predictor.model, VisionTransformer) and arguments:
        return iter([arguments])
    return (block.texts for block in read_text_blocks(arguments))


def read_text_blocks(arguments: Sequence[str]) -> Iterator[TextBlock]:
    """Yield the arguments, with files replaced by their lines."""
    texts: list[str] = []
    for argument in arguments or ["-"]:
        if argument not in STDIN_NAMES and not os.path.isfile(os.path.expanduser(argument)):
            if FILE_NAME_PATTERN.fullmatch(argument):  # mistyped
                advice = "check its name (or echo the text to -)"
                raise ValueError(f"{argument}: must be an existing file, but there is none; {advice}")
            texts.append(argument)
            continue
        if texts:
            yield TextBlock(texts)
            texts = []
        yield from read_line_blocks(None if argument in STDIN_NAMES else Path(argument))
    if texts:
        yield TextBlock(texts)


def read_line_blocks(file: Path | None) -> Iterator[TextBlock]:
    from attent.decoding.input_lines import build_line_source, open_input

    if file is None and sys.stdin.isatty():
        print_message("type one text per line; end with Ctrl-D")
    with open_input(file, sys.stdin.buffer) as stream:
        for block in build_line_source(stream, file).read_blocks(BLOCK_TEXTS):
            yield TextBlock(block.lines, block.first_index + 1, is_from_command=False)


def print_result(line: str) -> None:
    print(line, flush=not sys.stdout.isatty())
