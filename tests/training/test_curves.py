"""Training curves: the data that is drawn, the drawing, and the callback."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attent.training import curves
from attent.training.curves import (
    MAX_POINTS,
    CurveWriter,
    collect_curves,
    compute_value_range,
    downsample,
    draw_curves,
    find_ticks,
    render_panels,
)
from attent.training.events import Ended, Event, Progress, Validated

SVG = "{http://www.w3.org/2000/svg}"
XTICKS = ["200", "400", "600", "800", "1,000"]


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


def validated(step: int, loss: float = 2.0, best: bool = False, **metrics: float) -> Validated:
    return Validated(step=step, epoch=1.0, loss=loss, metrics=metrics, best=best, validations_since_best=0, seconds=1.0)


def run(steps: int = 1000, every: int = 10) -> list[Event]:
    events: list[Event] = []
    for step in range(every, steps + 1, every):
        events.append(progress(step, math.exp(1 + 6 * math.exp(-step / 200))))
        if step % 200 == 0:
            events.append(validated(step, loss=1 + 500 / step, best=step <= 800, bleu=30 * step / steps, chrf=50.0))
    return events


def metric_names(*events: Event) -> list[str]:
    return [line.name for line in collect_curves(events).metrics]


def test_both_losses_are_the_cross_entropy_without_smoothing() -> None:
    losses = collect_curves([progress(10, math.exp(3.0)), validated(10, loss=2.5)]).losses
    assert [(line.name, line.points) for line in losses] == [
        ("training", ((10, pytest.approx(3.0)),)),
        ("validation", ((10, 2.5),)),
    ]


def test_a_resumed_run_gives_the_same_curves() -> None:
    events = run()
    assert collect_curves([*events[:60], *events[40:]]) == collect_curves(events)
    assert collect_curves([validated(10, loss=9.0), validated(10, loss=3.0)]).losses[0].points == ((10, 3.0),)


def test_downsampling_keeps_the_ends_and_the_mean() -> None:
    points = [(float(i), float(i % 7)) for i in range(10_000)]
    few = downsample(points)
    assert len(few) == MAX_POINTS
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert sum(y for _, y in few) / len(few) == pytest.approx(3.0, abs=0.05)


def test_few_points_are_not_averaged() -> None:
    points = [(float(i), float(i)) for i in range(MAX_POINTS)]
    assert downsample(points) == points
    assert downsample([(0, 0), (1, 2), (2, 4), (3, 0), (4, 2), (9, 9)], 4) == [(0, 0), (1.5, 3), (3.5, 1), (9, 9)]
    assert MAX_POINTS == 400


def test_values_that_are_not_finite_are_left_out() -> None:
    data = collect_curves([progress(1), progress(2, math.nan), progress(3, math.inf), validated(4, loss=math.nan)])
    assert [len(line.points) for line in data.losses] == [1]


def test_the_scale_leaves_out_the_steep_beginning() -> None:
    data = collect_curves([progress(1, math.exp(9.0)), progress(100, math.exp(2.0)), progress(200, math.exp(1.0))])
    assert compute_value_range(data.losses, data.last_step) == (pytest.approx(1.0), pytest.approx(2.0))
    for first, high in ((3, 2.0), (4, 9.0)):
        line = collect_curves([progress(first, math.exp(9.0)), progress(100, math.exp(2.0))]).losses
        assert compute_value_range(line, 100)[1] == pytest.approx(high)


def test_exact_matches_are_drawn_only_where_they_measure_the_task() -> None:
    assert metric_names(validated(1, bleu=20.0, exact=4.0)) == ["BLEU"]
    assert metric_names(validated(1, bleu=20.0, exact=90.0)) == ["BLEU", "exact %"]
    assert metric_names(validated(1, bleu=20.0, exact=20.0)) == ["BLEU", "exact %"]
    assert metric_names(validated(1, bleu=20.0, exact=19.9)) == ["BLEU"]
    assert metric_names(validated(1, exact=4.0)) == ["exact %"]
    assert metric_names(validated(1)) == []
    assert metric_names(validated(1, bleu=20.0, exact=math.nan)) == ["BLEU"]


def test_the_file_has_every_panel_that_has_points(tmp_path: Path) -> None:
    path = tmp_path / "curves.svg"
    titles = ["Cross-entropy (nats)", "Validation metrics", "Learning rate"]
    for events, expected in (
        (run(), titles),
        ([progress(1), validated(1, best=True)], [titles[0], titles[2]]),
        ([validated(7, bleu=3.0)], titles[:2]),
    ):
        draw_curves(events, path)
        root = ElementTree.parse(path).getroot()
        assert [text.text for text in root.iter(f"{SVG}text") if text.get("font-weight")] == expected
        assert float(root.attrib["width"]) == curves.PANEL_WIDTH * len(expected)
    draw_curves([], tmp_path / "none.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.svg"]


def test_the_callback_draws_at_validations_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(curves, "draw_curves", lambda events, _: drawn.append(len(events)))
    write = CurveWriter(tmp_path / "curves.svg", past_events=[progress(1), validated(1)])
    for event in (progress(2), validated(2, best=True), validated(3), Ended(step=3, reason="steps", seconds=1.0)):
        write(event)
    assert drawn == [4, 5, 5]


def test_a_problem_is_reported_once_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = CurveWriter(tmp_path / "none" / "curves.svg", past_events=[progress(1)])
    write(validated(1))
    write(Ended(step=2, reason="steps", seconds=1.0))
    assert capsys.readouterr().err.count("without curves") == 1


def test_a_panel_shows_its_lines_the_best_step_and_the_scale() -> None:
    events = [progress(1), progress(1000, math.exp(3)), validated(1000, loss=4.0, best=True, chrf=50.0)]
    losses, _, rate = (ElementTree.fromstring(panel.replace("&#160;", "")) for panel in render_panels(events))
    plot = losses.find("svg")
    assert plot is not None
    assert [text.text for text in losses.iter("tspan")] == ["training", "validation"]
    assert [text.text for text in losses.iter("title")] == ["best: step 1,000"]
    assert [text.text for text in losses.iter("text")][1:-1] == ["3", "3.5", "4", *XTICKS, "step"]
    height, width = float(plot.attrib["height"]), float(plot.attrib["width"]) - 4
    training, validation = (line.attrib["points"].split() for line in plot.iter("polyline"))
    x, y = map(float, training[1].split(","))
    assert (x, y) == (width, pytest.approx(height * (4.05 - 3) / 1.1, abs=0.1))  # the range is 2.95 to 4.05
    assert validation == [f"{width},{round(height * 0.05 / 1.1, 1)}"]
    assert len(list(plot.iter("circle"))) == 1
    assert not list(rate.iter("title"))


@pytest.mark.parametrize(
    ("low", "high", "ticks"), [(0, 200, [0, 50, 100, 150, 200]), (1.93, 6.4, [2, 3, 4, 5, 6]), (0, 0, [0])]
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert find_ticks(low, high) == ticks
