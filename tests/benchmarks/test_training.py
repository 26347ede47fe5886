"""The benchmarks of training run anywhere, on tiny numbers; what they measure on a GPU stands in docs/speed.md."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch

from attent.train import loop
from benchmarks import loss_curve, train_gpu
from tests.train.runs import write_corpus

TINY = "--device cpu --size tiny --vocab 50 --tokens 96 --seconds 0.01 --rounds 2".split()


def test_ours_and_theirs_are_told_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(train_gpu, "measured", lambda device: train_gpu.Ceiling(flops=1e12, bytes=1e11))
    monkeypatch.setitem(train_gpu.CORPUS, "cpu", 600)
    train_gpu.main([*TINY, "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    assert "| transformers |" in printed
    assert "| attent |" in printed
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    for rounds in (case["rounds"]["attent"], case["rounds"]["transformers"]):
        assert len(rounds) == 2
        assert all(one["updates"] >= 2 and one["seconds"] > 0 for one in rounds)
        assert all(0 < one["targets"] < 96 * one["updates"] for one in rounds)  # filler is not counted
    assert case["bound_ms"]["flops"] > 0


def test_lengths_are_as_the_text_they_stand_for(tmp_path: Path) -> None:
    case = train_gpu.Case(
        size="tiny", lengths="29", tokens=25_600, vocab=40, device=torch.device("cpu"), rounds=1, seconds=1.0,
        corpus=600_000,
    )  # fmt: skip
    store = train_gpu.made_up(tmp_path, case)
    source, target = store.source.lengths(), store.target.lengths()
    assert source.mean() == pytest.approx(29, abs=1)
    assert target.mean() == pytest.approx(30, abs=1)
    assert 150 < target.max() <= 200
    assert np.corrcoef(source, target)[0, 1] > 0.8
    assert store.target[0][-1] == train_gpu.END
    assert store.target.ids.max() < 40


def test_kernels_that_run_at_once_are_not_counted_twice() -> None:
    assert train_gpu.covered([(0, 4), (2, 3), (3, 6), (10, 11)]) == 7


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN", "products"),
        ("void flash_bwd_kernel<...>", "attention"),
        ("triton_red_fused__to_copy_add_native_dropout_native_layer_norm_7", "norm, dropout, residual"),
        ("triton_red_fused_eq_exp_logsumexp_sub_where_0", "loss"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimiser"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
    ],
)
def test_a_kernel_belongs_to_the_group_that_its_name_tells(kernel: str, group: str) -> None:
    assert train_gpu.group_of(kernel) == group


def test_without_dropout_the_fast_curve_is_the_reference_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REPORT", loop.REPORT)  # it is set there
    data, picture, numbers = write_corpus(tmp_path / "corpus.tsv", 60), tmp_path / "curve.svg", tmp_path / "curve.json"
    words = (
        f"--device cpu --steps 4 --vocab 320 --tokens 128 --dropout 0 --data {data} --svg {picture} --json {numbers}"
    )
    loss_curve.main(words.split())
    found = json.loads(numbers.read_text())
    assert {name: len(losses) for name, losses in found["curves"].items()} == {
        "fast": 4, "reference": 4, "other draw": 4
    }  # fmt: skip
    assert found["distances"]["fast"] < 1e-3
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_a_curve_that_goes_elsewhere_is_far_from_the_reference() -> None:
    straight = [5 - 0.01 * i for i in range(100)]
    assert loss_curve.distance(straight, [loss + 0.1 for loss in straight]) == pytest.approx(0.1)
    assert loss_curve.smoothed([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]
