"""Table 1: fits on exact laws, layers against references, gradients in stacks, and a whole report at tiny sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attent.nn import Mask, attend
from benchmarks import table1
from benchmarks.table1_layers import (
    LAYERS,
    PATH_LAYERS,
    PathSizes,
    Point,
    attend_in_blocks,
    build_block_mask,
    compute_reach,
    find_flop_crossover,
    make_heads,
    measure_gradient_path,
)
from benchmarks.table1_report import find_crossover, fit_exponent, fit_two_terms

CPU = torch.device("cpu")
TINY = table1.Sizes(
    width=64,
    tokens=64,
    lengths=(16, 32, 64),
    scores_lengths=(16, 32),
    min_fit_length=16,
    widths=(64, 128),
    width_length=32,
    recurrent_batch=2,
    recurrent_lengths=(16, 32, 64),
    recurrent_width_length=4,
    recurrent_widths=(64, 128),
    kernels=(1, 3),
    window=16,
    windows=(16, 32),
    window_length=64,
    single_lengths=(16, 32),
    path_lengths=(2, 4),
    path=PathSizes(layers=2, width=16, rows=2),
    rounds=2,
    min_seconds=0.0,
    min_runs=1,
)


def test_exponents_of_power_laws_are_found() -> None:
    assert fit_exponent([(n, 3e-9 * n**1.7) for n in (32.0, 64.0, 256.0)]) == pytest.approx(1.7)
    assert fit_exponent([(32.0, 1.0)]) is None


def test_both_terms_of_attention_are_found() -> None:
    sizes = [(n, d) for n in (64.0, 256.0, 1024.0) for d in (128.0, 256.0)]
    a, b, deviation = fit_two_terms(sizes, [2e-12 * n * n * d + 5e-12 * n * d * d for n, d in sizes])
    assert (a, b) == pytest.approx((2e-12, 5e-12))
    assert deviation < 1e-9


def test_crossovers() -> None:
    quadratic, linear = [(n, n * n) for n in (16.0, 64.0, 256.0)], [(n, 100 * n) for n in (16.0, 64.0, 256.0)]
    assert find_crossover(quadratic, linear) == pytest.approx(100)
    assert find_crossover(linear, [(n, y / 1e6) for n, y in quadratic]) == 0
    assert find_crossover(quadratic, [(n, 1e6 * y) for n, y in quadratic]) == math.inf
    assert find_flop_crossover("products fused", "recurrent", 512) == 512  # n = d
    assert find_flop_crossover("attention fused", "LSTM", 512) == 1024
    assert find_flop_crossover("attention fused", "recurrent", 512) == 0


@pytest.mark.parametrize("layer", ["attention explicit", "products explicit"])
def test_flops_match_the_count_of_torch(layer: str) -> None:
    point = Point(layer=layer, length=6, width=128, batch=3)
    built = LAYERS[layer].build(point, CPU, torch.float32)
    with FlopCounterMode(display=False) as counter:
        built.forward()
    assert counter.get_total_flops() == point.batch * LAYERS[layer].count_flops(point)


def test_windows_in_blocks_are_windows() -> None:
    point = Point(layer="windowed products", length=32, width=128, batch=2, window=16)
    q, k, v = make_heads(point, CPU, torch.float64)
    out = attend_in_blocks(q, k, v, build_block_mask(point, CPU), point.window)
    expected = attend(q, k, v, Mask(window=(8, 8)), backend="explicit")
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    gradients = (torch.autograd.grad(x, (q, k, v), direction) for x in (out, expected))
    torch.testing.assert_close(next(gradients), next(gradients))


@pytest.mark.parametrize("layer", PATH_LAYERS)
def test_gradients_reach_as_far_as_the_stack(layer: str) -> None:
    sizes = PathSizes(layers=2, width=16, window=4, kernel=5, rows=2)
    reach = compute_reach(layer, sizes)
    far = 40 if reach is None else reach
    assert measure_gradient_path(layer, far + 1, sizes) > 0
    assert reach is None or measure_gradient_path(layer, far + 2, sizes) == 0


def test_gradients_fall_slowly_in_attention_and_exponentially_in_recurrence() -> None:
    sizes = PathSizes(layers=2, width=16, rows=4)
    fall = {
        layer: measure_gradient_path(layer, 16, sizes) / measure_gradient_path(layer, 64, sizes)
        for layer in ("self-attention", "LSTM")
    }
    assert 2 < fall["self-attention"] < 8  # 1/n: 4
    assert fall["LSTM"] > 1e4


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(table1, "QUICK_CPU", TINY)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table1.main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    report = capsys.readouterr().out
    assert "| convolution | O(k n d²) | k | 1 |" in report
    assert (tmp_path / "table1.md").read_text(encoding="utf-8") == report[:-1]
    assert {path.name for path in tmp_path.glob("*.svg")} == {"time.svg", "memory.svg", "sequential.svg", "path.svg"}


@pytest.mark.usefixtures("tiny")
def test_an_interrupted_run_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [Point(layer=layer, length=8, width=64, batch=1) for layer in ("LSTM", "convolution")]
    monkeypatch.setattr(table1, "plan_points", lambda *_, **__: {"length": points})
    monkeypatch.setattr(table1, "write_report", lambda *_: "")
    arguments = ["--quick", "--device", "cpu", "--out", str(tmp_path)]
    table1.main(arguments)
    file = tmp_path / "results.json"
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["points"]["LSTM n=8 d=64 B=1"]["bytes"] > 8 * 64 * 4
    del results["points"]["LSTM n=8 d=64 B=1"]
    results["points"]["convolution n=8 d=64 B=1 k=3"]["rounds"] = 1
    file.write_text(json.dumps(results), encoding="utf-8")
    capsys.readouterr()
    table1.main(arguments)
    lines = capsys.readouterr().err.splitlines()[:3]
    assert [line.rpartition(":")[0] for line in lines] == [
        "1/3  LSTM n=8 d=64 B=1", "2/3  LSTM n=8 d=64 B=1", "3/3  convolution n=8 d=64 B=1 k=3",
    ]  # fmt: skip
    monkeypatch.setattr(table1, "QUICK_CPU", table1.Sizes())
    with pytest.raises(SystemExit, match="give another --out"):
        table1.main(arguments)
