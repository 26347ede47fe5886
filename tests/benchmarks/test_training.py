"""The training benchmarks run anywhere at toy size; results on a GPU are in docs/benchmarks.md."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attent.data.token_store import TokenStore
from attent.training import hardware, loop
from benchmarks import loss_curve, time_to_bleu, train_gpu
from tests.training.runs import write_corpus

TINY = "--device cpu --size tiny --vocab 50 --tokens 96 --seconds 0.01 --rounds 2".split()


def test_table_has_both_implementations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(train_gpu, "measure_peak_rates", lambda device: train_gpu.PeakRates(flops=1e12, bytes=1e11))
    monkeypatch.setitem(train_gpu.CORPUS_TOKENS, "cpu", 600)
    train_gpu.main([*TINY, "--json", str(tmp_path / "report.json")])
    printed = capsys.readouterr().out
    assert "| transformers |" in printed
    assert "| attent |" in printed
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    for rounds in (case["rounds"]["attent"], case["rounds"]["transformers"]):
        assert len(rounds) == 2
        assert all(timed_round["num_steps"] >= 2 and timed_round["seconds"] > 0 for timed_round in rounds)
        assert all(
            0 < timed_round["target_tokens"] < 96 * timed_round["num_steps"] for timed_round in rounds
        )  # padding is not counted
    assert case["bound_ms"]["flops"] > 0


class FailingBaseline:
    """A baseline whose first step fails."""

    round_steps = 0

    def __init__(self, case: train_gpu.BenchmarkCase, store: TokenStore, *, compiled: bool) -> None:
        pass

    def warm_up(self) -> tuple[float, train_gpu.TimedRound]:
        raise KeyError("no such kernel")


def test_failing_baseline_is_reported_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpu, "measure_peak_rates", lambda device: train_gpu.PeakRates(flops=1e12, bytes=1e11))
    monkeypatch.setitem(train_gpu.CORPUS_TOKENS, "cpu", 600)
    monkeypatch.setattr(train_gpu, "TransformersBaseline", FailingBaseline)
    with pytest.raises(SystemExit, match="1"):
        train_gpu.main([*TINY, "--json", str(tmp_path / "report.json")])
    printed = capsys.readouterr().out
    assert "attent: warm after" in printed
    assert "| transformers | failed: KeyError: 'no such kernel' |" in printed
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert list(case["failed"]) == ["transformers"]
    assert {name: len(rounds) for name, rounds in case["rounds"].items()} == {"attent": 2}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("", ["transformers", "transformers, compiled"]),
        ("--without-compiled", ["transformers"]),
        ("--only ours", []),
    ],
)
def test_flags_select_the_baselines(options: str, names: list[str]) -> None:
    case = train_gpu.BenchmarkCase(
        size="tiny",
        lengths="29",
        batch_tokens=96,
        vocab=40,
        device=torch.device("cuda"),
        rounds=1,
        round_seconds=1.0,
        corpus_tokens=600,
    )
    assert list(train_gpu.list_baselines(case, train_gpu.parse_arguments(options.split()))) == names


def test_lengths_have_the_distribution_of_the_text(tmp_path: Path) -> None:
    case = train_gpu.BenchmarkCase(
        size="tiny", lengths="29", batch_tokens=25_600, vocab=40, device=torch.device("cpu"), rounds=1,
        round_seconds=1.0, corpus_tokens=600_000,
    )  # fmt: skip
    store = train_gpu.make_random_store(tmp_path, case)
    source, target = store.source.lengths, store.target.lengths
    assert source.mean() == pytest.approx(29, abs=1)
    assert target.mean() == pytest.approx(30, abs=1)
    assert 150 < target.max() <= 200
    assert np.corrcoef(source, target)[0, 1] > 0.8
    assert store.target[0][-1] == train_gpu.END
    assert store.target.ids.max() < 40


def test_overlapping_kernels_are_counted_once() -> None:
    assert train_gpu.measure_union([(0, 4), (2, 3), (3, 6), (10, 11)]) == 7


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN", "products"),
        ("void flash_bwd_kernel<...>", "attention"),
        ("triton_red_fused__to_copy_add_native_dropout_native_layer_norm_7", "norm, dropout, residual"),
        ("triton_red_fused_eq_exp_logsumexp_sub_where_0", "loss"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
    ],
)
def test_kernels_are_classified_by_name(kernel: str, group: str) -> None:
    assert train_gpu.classify_kernel(kernel) == group


@pytest.fixture(autouse=True)
def _no_bf16_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float32: with bfloat16 the fast variant would round more and draw other dropout masks."""
    monkeypatch.setattr(hardware, "measure_bf16_speedup", lambda kind: 1.0)


def run_loss_curve(tmp_path: Path, options: str) -> dict[str, Any]:
    data, plot, json_path = write_corpus(tmp_path / "corpus.tsv", 60), tmp_path / "curve.svg", tmp_path / "curve.json"
    files = f"--data {data} --svg {plot} --json {json_path}"
    loss_curve.main(f"--device cpu --vocab 320 --tokens 128 {files} {options}".split())
    assert ET.parse(plot).getroot().tag.endswith("svg")
    return json.loads(json_path.read_text())


def test_without_dropout_the_fast_curve_is_the_reference_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REPORT_INTERVAL", loop.REPORT_INTERVAL)  # restored after the test
    report = run_loss_curve(tmp_path, "--steps 4 --dropout 0 --draws 3 --exact")
    assert {name: [len(run) for run in runs] for name, runs in report["curves"].items()} == {
        "fast": [4], "reference": [4]
    }  # fmt: skip
    comparison = report["compared"][loss_curve.LAST_LOSS]
    assert abs(comparison["difference"]) < 1e-3
    assert comparison["error"] is None
    assert "one run of each cannot tell" in capsys.readouterr().out


def test_draws_differ_in_dropout_and_variants_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REPORT_INTERVAL", loop.REPORT_INTERVAL)
    report = run_loss_curve(tmp_path, "--steps 2 --dropout 0.3 --draws 2")
    fast, reference = report["curves"]["fast"], report["curves"]["reference"]
    assert len(fast) == len(reference) == 2
    assert fast[0][0] != pytest.approx(fast[1][0], abs=1e-3)
    assert fast == [pytest.approx(losses, abs=1e-3) for losses in reference]
    assert report["compared"][loss_curve.AREA]["error"] > 0


def test_means_are_compared_by_the_standard_error_of_their_difference() -> None:
    near = loss_curve.compare_samples([4.0, 5.0, 6.0], [3.5, 4.5, 5.5])
    assert near.difference == pytest.approx(0.5)
    assert near.error == pytest.approx((1 / 3 + 1 / 3) ** 0.5)  # both have a standard deviation of 1
    assert near.is_within
    far = loss_curve.compare_samples([4.0, 5.0, 6.0], [2.3, 3.3, 4.3])
    assert not far.is_within
    assert "+1.7000 apart, more than 2 standard errors of it (1.6330)" in str(far)


def test_diverging_curves_are_not_within_chance() -> None:
    straight = [[5 - 0.01 * i + 0.001 * draw for i in range(100)] for draw in range(4)]
    diverging = [[loss + (0.1 if i >= 50 else 0.0) for i, loss in enumerate(losses)] for losses in straight]
    assert loss_curve.compute_share_within({"fast": straight, "reference": straight}) == 1
    assert loss_curve.compute_share_within({"fast": diverging, "reference": straight}) == pytest.approx(26 / 76)
    assert loss_curve.smooth_losses([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]


def test_plot_has_all_runs_means_and_difference(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [[5 - 0.01 * i + 0.001 * draw for i in range(60)] for draw in range(3)]
    for count in (1, 3):
        loss_curve.draw_plot({"fast": runs[:count], "reference": runs[:count]}, "a & b", tmp_path / "plot.svg")
        plot = (tmp_path / "plot.svg").read_text(encoding="utf-8")
        assert plot.count('style="fill: none; stroke: #d55e00') == count + 2  # runs, mean and legend
        ET.fromstring(plot)


LOG_WRITER = """
import sys, time
log = open(sys.argv[1], "a")
for line in sys.argv[2:]:
    log.write(line[:20])
    log.flush()
    time.sleep(0.05)
    log.write(line[20:] + "\\n")
    log.flush()
"""


def test_time_to_bleu_follows_the_log_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[dict[str, Any]] = [
        {"event": "note", "step": 0, "text": "compiling"},
        {"event": "progress", "step": 1, "loss": 9.0},
        *({"event": "validated", "step": i, "loss": 2.5, "metrics": {"bleu": 10.0 * i, "chrf": 1.0}} for i in (2, 4)),
        {"event": "validated", "step": 6, "loss": 2.4, "metrics": {}},
    ]
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-c", LOG_WRITER, str(log), *map(json.dumps, events)]
    times, exit_code = time_to_bleu.run_and_time(command, log, tmp_path / "cache")
    assert exit_code == 0
    assert [(validation.step, validation.bleu) for validation in times.validations] == [(2, 20.0), (4, 40.0)]
    assert times.first_report is not None
    assert 0 < times.first_report < times.validations[0].seconds < times.validations[1].seconds < times.total
    time_to_bleu.print_summary(times, [30, 41])
    printed = capsys.readouterr().out
    assert "BLEU 30: " in printed
    assert "step 4\nBLEU 41: not reached (best: 40.00)" in printed
