"""Training curves: the data that is drawn, the drawing, and the listener."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from attent.training import curves
from attent.training.curves import MAX_POINTS, CurveWriter, collect_curves, compute_value_range, downsample
from attent.training.events import Ended, Event, Progress, Validated

draw_curves = curves.draw_curves  # every test has it patched away


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


def fail_to_draw(*_: object) -> None:
    raise ValueError("no such font")


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
    assert (MAX_POINTS, curves.DRAW_SECONDS) == (400, 60.0)


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


@pytest.mark.parametrize("name", ["curves.svg", "curves.png"])
def test_curves_are_drawn_in_the_format_of_the_name(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    for events in (run(), run(30, 10), [progress(1), validated(1, best=True)], [validated(7)]):
        draw_curves(events, tmp_path / name)
        start = (tmp_path / name).read_bytes()[:8]
        assert start == (b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<?xml ve")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_listener_draws_at_most_once_a_minute_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(curves, "draw_curves", lambda events, _: drawn.append(len(events)))
    for interval, expected in ((curves.DRAW_SECONDS, [6]), (0.0, [4, 5, 6])):
        monkeypatch.setattr(curves, "DRAW_SECONDS", interval)
        listen = CurveWriter(tmp_path / "curves.svg", past_events=[progress(1), validated(1)])
        for event in (progress(2), validated(2, best=True), validated(3), Ended(step=3, reason="steps", seconds=1.0)):
            listen(event)
        assert drawn == expected
        drawn.clear()


@pytest.mark.parametrize("missing", ["folder", "matplotlib", "font"])
def test_a_problem_is_reported_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    if missing == "matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    elif missing == "font":
        monkeypatch.setattr(curves, "draw_curves", fail_to_draw)
    else:
        pytest.importorskip("matplotlib")
    listen = CurveWriter(tmp_path / "none" / "curves.svg", past_events=[progress(1)])
    listen(validated(1))
    listen(Ended(step=2, reason="steps", seconds=1.0))
    assert capsys.readouterr().err.count("without curves") == 1


def test_each_panel_shows_its_lines_the_best_step_and_the_scale() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    data = collect_curves([progress(1), progress(1000, math.exp(3)), validated(1000, loss=4.0, best=True, chrf=50.0)])
    axes = figure.subplots(1, 2)
    curves._draw_panel(axes[0], "Losses", data.losses, data)
    curves._draw_panel(axes[1], "Rate", (data.learning_rate,), data)
    assert [line.get_label() for line in axes[0].lines] == ["training", "validation", "best: step 1,000"]
    assert axes[0].lines[0].get_xydata().tolist() == [[1, pytest.approx(math.log(10))], [1000, pytest.approx(3.0)]]
    assert [line.get_marker() for line in axes[0].lines[:2]] == ["None", "."]
    assert axes[0].get_ylim() == pytest.approx((2.95, 4.05))
    assert [line.get_label() for line in axes[1].lines] == ["learning rate"]
    assert axes[1].get_ylim() == pytest.approx((1e-3 - 0.05, 1e-3 + 0.05))
    assert (axes[0].get_title(), axes[1].get_xlabel()) == ("Losses", "steps")
    assert len(axes[0].lines[0].get_xydata()) == 2


def test_only_panels_with_points_are_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[str] = []
    monkeypatch.setattr(curves, "_draw_panel", lambda axes, title, lines, data: drawn.append(title))
    for events in ([progress(1)], [validated(1)], [progress(1), validated(1, bleu=3.0)], []):
        draw_curves(events, tmp_path / "c.svg")
    assert drawn == [
        "Cross-entropy (nats)", "Learning rate",
        "Cross-entropy (nats)",
        "Cross-entropy (nats)", "Validation metrics", "Learning rate",
    ]  # fmt: skip
