"""The training display: in terminals of any size, in a pipe, and with --quiet."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from attent.training.events import Ended, Event, Note, Progress, Saved, Started, Validated, ValidationSample
from attent.training.progress import (
    EventHistory,
    TrainingDisplay,
    format_end,
    format_header,
    format_perplexity,
    format_progress,
    format_speed,
    format_time_left,
    format_validation,
    render_display,
)

LINE = "step 1,200/8,000  12 min left  epoch 9.6  loss 2.412  ppl 6.12  18,400 tokens/s  lr 1.2e-03"
STARTED = Started(
    step=0, steps=8_000, steps_per_epoch=125, parameters=2_634_752, trainable_parameters=2_634_752, device="CPU"
)
SAMPLE = ValidationSample(source="A \x1b[31mman[bold] " + "walks " * 40, reference="Ein Mann", output="Ein Mann")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_progress(step: int = 1_200, loss: float = 2.412) -> Progress:
    return Progress(
        step=step,
        epoch=9.6,
        loss=loss,
        perplexity=6.123,
        lr=1.2e-3,
        grad_norm=0.8,
        tokens_per_second=18_412.0,
        seconds=100.0,
        seconds_left=720.0,
    )


def make_validation(
    step: int, bleu: float | None = 30.0, best: bool = True, samples: tuple[ValidationSample, ...] = ()
) -> Validated:
    return Validated(
        step=step, epoch=1.0, loss=2.0, metrics={} if bleu is None else {"bleu": bleu, "chrf": bleu},
        best=best, validations_since_best=0 if best else 2,
        seconds=1.0, samples=samples,
    )  # fmt: skip


def print_events(events: list[Event], *, terminal: bool = False, width: int = 80, quiet: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, height=40, color_system=None)
    with TrainingDisplay(console, quiet=quiet, clock=Clock()) as display:
        display.begin_run("en-de", [])
        for event in events:
            display(event)
    return out.getvalue()


def render_lines(events: list[Event], width: int) -> list[str]:
    history = EventHistory()
    for event in events:
        history.add(event)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as lines:
        console.print(render_display(history, "en-de", width))
    return lines.get().rstrip("\n").split("\n")


# ---- files and pipes


def test_plain_progress_line() -> None:
    assert print_events([STARTED, make_progress()]).splitlines()[1] == LINE


def test_plain_lines_have_no_escape_codes_and_are_not_wrapped() -> None:
    page = print_events(
        [STARTED, Note(text="long " * 60), make_progress(), make_validation(1_200, samples=(SAMPLE,))], width=40
    )
    assert "\x1b" not in page
    assert "\\x1b[31mman[bold]" in page
    assert len(page.splitlines()) == 1 + 1 + 1 + 1 + 3


def test_plain_lines_are_printed_every_ten_seconds_and_first_and_last() -> None:
    out, clock = io.StringIO(), Clock()
    with TrainingDisplay(Console(file=out, width=200), clock=clock) as display:
        display(STARTED)
        for second in range(25):
            clock.now = float(second)
            display(make_progress(step=second))
        display(Ended(step=24, reason="steps", seconds=25.0))
    steps = [int(step) for step in re.findall(r"step +(\d+)/8,000", out.getvalue())]
    assert steps == [0, 10, 20, 24]


def test_validations_notes_and_samples_are_always_printed() -> None:
    page = print_events(
        [
            STARTED,
            *(make_validation(step, best=step == 1, samples=(SAMPLE,)) for step in (1, 2)),
            Note(text="one"),
            Note(text="two"),
        ]
    )
    assert "validated at step 1  loss 2.000  BLEU 30.0  chrF 30.0  best so far" in page
    assert "best was 2 validations ago" in page
    assert page.count("    output  Ein Mann") == 2
    assert "one\ntwo\n" in page


def test_quiet_prints_only_warnings_and_the_end() -> None:
    events: list[Event] = [
        STARTED, Note(text="chosen"), Note(text="split", level="warning"), make_progress(), make_validation(5),
        Ended(step=5, reason="patience", seconds=60.0),
    ]  # fmt: skip
    for terminal in (False, True):
        page = re.sub(r"\x1b\[[^m]*m", "", print_events(events, quiet=True, terminal=terminal, width=200))
        warning, end = page.splitlines()
        assert warning == "warning: split"
        assert end.startswith("done: stopped early, no improvement after 5 steps in 1 min 0 s; best at step 5: ")


# ---- terminals


EVENTS: list[Event] = [
    STARTED,
    *(make_progress(step, loss=9 - step / 200) for step in range(100, 1_300, 100)),
    *(
        make_validation(step, bleu=step / 40, best=step <= 1_000, samples=(SAMPLE, SAMPLE))
        for step in range(100, 1_300, 100)
    ),
    Saved(step=1_200, folder="state", seconds=1.0),
]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_the_display_fits_its_width(width: int) -> None:
    lines = render_lines(EVENTS, width)
    assert all(cell_len(line) <= width for line in lines)
    assert any("1,200/8,000" in line for line in lines)
    assert not any("\x1b[31m" in line for line in lines)


SCREEN = """\
en-de  2.6 million parameters  CPU
━━━━━━━━━━━
step 1,100/8,000  12 min left  epoch 9.6  loss 3.500  ppl 6.12  18,400 tokens/s…"""
SCREEN_EVENTS: list[Event] = [
    STARTED,
    *(make_progress(step, loss=9 - step / 200) for step in range(100, 1_200, 100)),
    *(make_validation(step, step / 40, step <= 1_000, samples=(SAMPLE,) * 4) for step in range(100, 1_200, 100)),
]
GPU_PROGRESS = replace(make_progress(), targets_per_second=9_000.0, gpu_busy=0.87)


def test_the_display_at_80_columns() -> None:
    lines = render_lines(SCREEN_EVENTS, 80)
    assert "\n".join(line.rstrip() for line in lines) == SCREEN


def test_validations_and_samples_stay_above_the_bar() -> None:
    page = print_events(
        [STARTED, make_validation(5, samples=(SAMPLE,) * 4), make_validation(6, best=False), make_progress()],
        terminal=True,
        width=200,
    )
    assert page.count("validated at step 5  loss 2.000  BLEU 30.0  chrF 30.0  best so far\n") == 1
    assert page.count("    output  Ein Mann\n") == 3
    assert page.rindex("best was 2 validations ago") < page.rindex("1,200/8,000")


def test_missing_metrics_have_no_column() -> None:
    assert "BLEU" not in print_events([STARTED, make_validation(1, bleu=None)])


def test_notes_stay_above_the_display_and_the_last_state_stays() -> None:
    page = print_events(
        [STARTED, make_progress(), Note(text="a batch was split"), Ended(step=9, reason="stopped", seconds=5.0)],
        terminal=True,
    )
    assert page.count("a batch was split") == 1
    assert page.rstrip().endswith("stopped after 9 steps in 5 s")
    assert page.rindex("1,200/8,000") < page.index("stopped after")


def test_the_display_is_drawn_at_most_four_times_a_second() -> None:
    def count_redraws(seconds: float) -> int:
        out, clock = io.StringIO(), Clock()
        with TrainingDisplay(Console(file=out, force_terminal=True, width=80, height=40), clock=clock) as display:
            display(STARTED)
            for i in range(1_000):
                clock.now = i * seconds / 1_000
                display(make_progress(i))
        return out.getvalue().count("tokens/s")

    assert count_redraws(0.2) <= 2  # the first and the final one
    assert 30 <= count_redraws(10.0) <= 42


def test_an_error_restores_the_terminal() -> None:
    out = io.StringIO()

    def fail() -> None:
        with TrainingDisplay(Console(file=out, force_terminal=True, width=80, height=40)) as display:
            display(STARTED)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1  # the cursor is shown again


def test_after_the_end_lines_are_plain() -> None:
    out = io.StringIO()
    display = TrainingDisplay(Console(file=out, force_terminal=True, width=80, height=40), clock=Clock())
    for event in (STARTED, make_progress(), Ended(step=9, reason="steps", seconds=5.0)):
        display(event)
    out.truncate(0)
    display(make_validation(10))
    display(Note(text="a model was exported"))
    assert "\x1b[?25l" not in out.getvalue()  # no second live display
    assert "validated at step 10" in out.getvalue()
    assert "a model was exported" in out.getvalue()


def test_standard_output_is_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingDisplay(Console(file=io.StringIO(), force_terminal=True, width=80, height=40)) as display:
        display(STARTED)
        print("a result", file=sys.stdout)
    assert capsys.readouterr().out == "a result\n"


def test_a_resumed_run_remembers_its_best_validation() -> None:
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, force_terminal=True, width=80, height=40)) as display:
        display.begin_run("en-de", [make_validation(77)])
        display(STARTED)
        display(Ended(step=80, reason="steps", seconds=1.0))
    assert "best at step 77" in out.getvalue()


def test_slow_terminals_are_drawn_in_one_percent_of_the_time() -> None:
    class SlowClock(Clock):
        def __call__(self) -> float:
            self.now += 0.01
            return self.now

    out = io.StringIO()
    display = TrainingDisplay(Console(file=out, force_terminal=True, width=80, height=40), clock=SlowClock())
    display(STARTED)
    for step in range(500):  # each takes 10 ms, and drawing 20 ms
        display(make_progress(step))
    assert out.getvalue().count("tokens/s") == 2


# ---- numbers


def test_the_title_names_the_trained_parameters() -> None:
    assert format_header("", STARTED) == "2.6 million parameters  CPU"
    few = replace(STARTED, trainable_parameters=1_000)
    assert format_header("en-de", few) == "en-de  2.6 million parameters, 1.0 thousand trainable  CPU"


def test_the_lines_of_a_run_in_a_file() -> None:
    first = format_progress(replace(GPU_PROGRESS, step=7, seconds_left=None), 8_000)
    assert first.startswith("step     7/8,000  epoch 9.6  loss 2.412  ppl 6.12  18,400 tokens/s  (9,000 targets/s)  ")
    assert first.endswith("  GPU 87% busy  lr 1.2e-03")
    ended = Ended(step=1, reason="stopped", seconds=5.0)
    assert format_end(ended, None) == "stopped after 1 step in 5 s"
    best = "; best at step 1,000: loss 2.000, BLEU 30.0, chrF 30.0"
    assert format_end(replace(ended, step=2, reason="steps"), make_validation(1_000)) == f"done: 2 steps in 5 s{best}"
    since = format_validation(replace(make_validation(1_000, best=False), validations_since_best=1))
    assert since.endswith("  best was 1 validation ago")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", None),
        ("", float("inf")),
        ("0 s left", -1),
        ("5 s left", 5),
        ("89 s left", 89),
        ("2 min left", 90),
        ("12 min left", 720),
        ("89 min left", 5_340),
        ("1 h 30 min left", 5_400),
        ("2 h 10 min left", 7_800),
        ("47 h 59 min left", 172_740),
        ("2 days left", 172_800),
        ("3 days left", 260_000),
    ],
)
def test_time_left_is_rounded(text: str, seconds: float | None) -> None:
    assert format_time_left(seconds) == text


@pytest.mark.parametrize(
    ("text", "value"), [("999.99", 999.99), ("1,000", 1_000), ("9,999,999", 9_999_999), ("1.0e+07", 1e7)]
)
def test_perplexity_is_shortened(text: str, value: float) -> None:
    assert format_perplexity(value) == text


def test_nonfinite_numbers_are_formatted() -> None:
    assert format_perplexity(float("inf")) == "inf"
    assert format_speed(float("nan")) == "-"
    assert "nan" in print_events([STARTED, make_progress(loss=float("nan"))])
