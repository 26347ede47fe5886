"""The picture of a run: it is valid, shows what happened, and an interruption cannot be seen in it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attent.training.curves import (
    HEIGHT,
    MAX_POINTS,
    WIDTH,
    CurveWriter,
    collect_curves,
    compute_ticks,
    downsample,
    draw_png,
    draw_svg,
    format_number,
    render_svg,
)
from attent.training.events import Ended, Event, Progress, Validated

SVG = "{http://www.w3.org/2000/svg}"


def progress(step: int, perplexity: float = 10.0) -> Progress:
    return Progress(
        step=step,
        epoch=1.0,
        loss=99.0,
        perplexity=perplexity,
        lr=1e-3,
        grad_norm=1.0,
        tokens_per_second=1.0,
        seconds=1.0,
        seconds_left=None,
    )


def validated(
    step: int, bleu: float | None = 20.0, exact: float | None = 3.0, loss: float = 2.0, best: bool = False
) -> Validated:
    chrf = None if bleu is None else 2 * bleu
    return Validated(
        step=step,
        epoch=1.0,
        loss=loss,
        bleu=bleu,
        chrf=chrf,
        exact=exact,
        best=best,
        validations_since_best=0,
        seconds=1.0,
    )


def run(steps: int = 1000, every: int = 10) -> list[Event]:
    events: list[Event] = []
    for step in range(every, steps + 1, every):
        events.append(progress(step, math.exp(1 + 6 * math.exp(-step / 200))))
        if step % 200 == 0:
            events.append(validated(step, bleu=30 * step / steps, loss=1 + 500 / step, best=step <= 800))
    return events


def texts(drawing: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


def test_it_is_valid_svg_with_axes_a_legend_and_the_best_point(tmp_path: Path) -> None:
    draw_svg(run(), tmp_path / "curves.svg")
    words = texts((tmp_path / "curves.svg").read_text(encoding="utf-8"))
    for told in ("training", "validation", "BLEU", "chrF", "Learning rate", "updates", "1,000", "best: 800"):
        assert told in words
    assert "BLEU 24.0" in words
    assert [path.name for path in tmp_path.iterdir()] == ["curves.svg"]


def test_everything_stands_inside_the_picture() -> None:
    for events in (run(), run(30, 10), [progress(1), validated(1, best=True)], [validated(7)], []):
        for element in ElementTree.fromstring(render_svg(collect_curves(events))).iter(f"{SVG}text"):
            assert 0 < float(element.attrib["x"]) < WIDTH
            assert 0 < float(element.attrib["y"]) < HEIGHT


def test_both_losses_are_the_cross_entropy_without_smoothing() -> None:
    drawn = collect_curves([progress(10, math.exp(3.0)), validated(10, loss=2.5)])
    assert [(line.name, line.points) for line in drawn.losses] == [
        ("training", ((10, pytest.approx(3.0)),)),
        ("validation", ((10, 2.5),)),
    ]


def test_an_interruption_cannot_be_seen() -> None:
    whole = run()
    again = [*whole[:60], *whole[40:]]
    assert render_svg(collect_curves(again)) == render_svg(collect_curves(whole))


def test_what_was_told_last_counts() -> None:
    assert collect_curves([validated(10, loss=9.0), validated(10, loss=3.0)]).losses[0].points == ((10, 3.0),)


def test_thousands_of_points_make_a_small_file() -> None:
    many: list[Event] = [progress(step, 5 + math.sin(step)) for step in range(1, 50_000)]
    assert len(render_svg(collect_curves(many))) < 60_000


def test_thinning_keeps_the_ends_and_the_mean() -> None:
    points = [(float(i), float(i % 7)) for i in range(10_000)]
    few = downsample(points)
    assert len(few) == MAX_POINTS
    assert few[0] == points[0]
    assert few[-1] == points[-1]
    assert sum(y for _, y in few) / len(few) == pytest.approx(3.0, abs=0.05)


def test_steps_that_were_no_number_are_left_out() -> None:
    drawing = render_svg(
        collect_curves([progress(1), progress(2, math.nan), progress(3, math.inf), validated(4, loss=math.nan)])
    )
    assert "nan" not in drawing
    assert "inf" not in drawing


def test_exact_matches_are_drawn_where_they_are_a_measure_of_the_task() -> None:
    assert "exact %" not in [line.name for line in collect_curves([validated(1, exact=4.0)]).scores]
    assert "exact %" in [line.name for line in collect_curves([validated(1, exact=90.0)]).scores]
    assert [line.name for line in collect_curves([validated(1, bleu=None, exact=4.0)]).scores] == ["exact %"]


def test_without_scores_there_is_no_panel_for_them() -> None:
    words = texts(render_svg(collect_curves([progress(1), progress(2), validated(2, bleu=None, exact=None)])))
    assert "Score on held-out text" not in words
    assert "validation" in words


def test_equal_scores_are_labelled_beside_each_other_not_on_top_of_each_other() -> None:
    close = Validated(
        step=10, epoch=1, loss=1, bleu=50.0, chrf=50.5, exact=None, best=True, validations_since_best=0, seconds=1
    )  # fmt: skip
    early = Validated(
        step=5, epoch=1, loss=1, bleu=0.0, chrf=0.0, exact=None, best=False, validations_since_best=0, seconds=1
    )
    drawing = render_svg(collect_curves([early, close]))
    places = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*font-weight="600"[^>]*>(?:BLEU|chrF) 5', drawing)]
    assert len(places) == 2
    assert abs(places[0] - places[1]) > 12


@given(
    low=st.floats(-1e6, 1e6),
    size=st.floats(1e-6, 1e6),
    about=st.integers(1, 10),
)
def test_ticks_span_the_values_and_are_evenly_spaced(low: float, size: float, about: int) -> None:
    marks = compute_ticks(low, low + size, about)
    step = marks[1] - marks[0]
    assert 2 <= len(marks) <= about + 3
    near = max(step * 1e-6, abs(low) * 1e-12)  # large numbers close together have few digits left
    assert marks[0] <= low + near
    assert marks[-1] >= low + size - near


def test_ticks_are_round() -> None:
    assert compute_ticks(0, 8000, 5) == [0, 2000, 4000, 6000, 8000]
    assert compute_ticks(1.37, 5.9, 5) == [1, 2, 3, 4, 5, 6]
    assert [format_number(tick) for tick in compute_ticks(0, 0.0007, 3)] == ["0", "5e-4", "0.001"]


def test_the_listener_draws_at_validations_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "curves.svg"
    listen = CurveWriter(path, past_events=[progress(1), validated(1)])
    listen(progress(2))
    assert not path.exists()
    listen(validated(2, best=True))
    assert "best: 2" in texts(path.read_text(encoding="utf-8"))
    path.unlink()
    listen(Ended(step=2, reason="steps", seconds=1.0))
    assert path.exists()


def test_a_picture_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listen = CurveWriter(tmp_path / "nowhere" / "curves.svg")
    listen(validated(1))
    listen(validated(2))
    assert capsys.readouterr().err.count("no more curves") == 1


def test_matplotlib_draws_the_same_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw_png(run(), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
