"""Recording by path, with filters; observers are always removed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attent
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import Attention, StackConfig

ENCODER = StackConfig(layers=2, width=8, heads=2, ffn_width=8, dropout=0.0)
PATHS = [
    "encoder.blocks.0.self_attn",
    "encoder.blocks.1.self_attn",
    "decoder.blocks.0.self_attn",
    "decoder.blocks.0.cross_attn",
    "decoder.blocks.1.self_attn",
    "decoder.blocks.1.cross_attn",
]


@pytest.fixture
def model() -> Seq2Seq:
    return Seq2Seq(Seq2SeqConfig(vocab=9, encoder=ENCODER, decoder=mirror_encoder(ENCODER))).eval()


def run(model: Seq2Seq) -> torch.Tensor:
    return model(torch.randint(0, 9, (3, 5)), torch.randint(0, 9, (3, 4)), torch.tensor([5, 2, 3]))


def observers(model: nn.Module) -> list[list[object]]:
    return [list(module.observers) for module in model.modules() if isinstance(module, Attention)]


def test_every_layer_is_recorded_by_path(model: Seq2Seq) -> None:
    with attent.record(model) as trace:
        run(model)
        run(model)
    assert sorted(trace) == sorted(PATHS)
    assert len(trace) == 6
    shapes = {
        "encoder.blocks.0.self_attn": (5, 5),
        "decoder.blocks.1.self_attn": (4, 4),
        "decoder.blocks.1.cross_attn": (4, 5),
    }
    for path, shape in shapes.items():
        assert [weights.shape for weights in trace[path]] == [(3, 2, *shape)] * 2
    for calls in trace.values():
        for weights in calls:
            assert not weights.requires_grad
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_selected_layers_are_recorded(model: Seq2Seq) -> None:
    with attent.record(model, pattern="decoder.*.cross_attn") as trace:
        run(model)
    assert sorted(trace) == ["decoder.blocks.0.cross_attn", "decoder.blocks.1.cross_attn"]
    with attent.record(model, pattern="encoder.blocks.1.self_attn") as trace:
        run(model)
    assert list(trace) == ["encoder.blocks.1.self_attn"]


def test_recording_changes_no_output(model: Seq2Seq) -> None:
    source, target = torch.randint(0, 9, (2, 3, 5))
    expected = model(source, target)
    with attent.record(model):
        assert torch.equal(model(source, target), expected)


def test_nothing_is_recorded_afterwards(model: Seq2Seq) -> None:
    with attent.record(model) as trace:
        run(model)
    run(model)
    assert {len(calls) for calls in trace.values()} == {1}
    assert observers(model) == [[]] * 6


def test_nested_recordings_remove_their_observers(model: Seq2Seq) -> None:
    with attent.record(model) as outer:
        before = observers(model)
        with attent.record(model, pattern="*.cross_attn") as inner:
            run(model)
        assert observers(model) == before
        run(model)
    assert observers(model) == [[]] * 6
    assert sorted(inner) == ["decoder.blocks.0.cross_attn", "decoder.blocks.1.cross_attn"]
    assert len(outer["encoder.blocks.0.self_attn"]) == 2


def test_recordings_may_end_in_any_order(model: Seq2Seq) -> None:
    first, second = attent.record(model), attent.record(model, pattern="*.cross_attn")
    item, two = first.__enter__(), second.__enter__()
    run(model)
    first.__exit__(None, None, None)
    run(model)
    second.__exit__(None, None, None)
    run(model)
    assert (len(item["decoder.blocks.0.cross_attn"]), len(two["decoder.blocks.0.cross_attn"])) == (1, 2)
    assert observers(model) == [[]] * 6


def test_errors_remove_the_observers(model: Seq2Seq) -> None:
    def stumble() -> None:
        with attent.record(model):
            raise RuntimeError("stumbled")

    with pytest.raises(RuntimeError, match="stumbled"):
        stumble()
    assert observers(model) == [[]] * 6


def test_pattern_without_a_match_is_rejected(model: Seq2Seq) -> None:
    with (
        pytest.raises(ValueError, match=r"pattern cross must select an attention layer, but select none of: enc"),
        attent.record(model, pattern="cross"),
    ):
        pass


def test_unrecorded_path_is_reported(model: Seq2Seq) -> None:
    with attent.record(model, pattern="encoder.*") as trace:
        run(model)
    with pytest.raises(KeyError, match=r"no attention was recorded at 'decoder\.blocks\.0\.self_attn'; recorded: enc"):
        trace["decoder.blocks.0.self_attn"]


def test_each_decoding_step_is_a_call(model: Seq2Seq) -> None:
    cache = model.init_decoder_state(torch.randint(0, 9, (1, 3)), capacity=4)
    with attent.record(model, pattern="decoder.*") as trace:
        for _ in range(3):
            model.step(torch.tensor([[1]]), cache)
    assert [weights.shape[2:] for weights in trace["decoder.blocks.0.self_attn"]] == [(1, 1), (1, 2), (1, 3)]
    assert [weights.shape[2:] for weights in trace["decoder.blocks.1.cross_attn"]] == [(1, 3)] * 3


def test_table_has_every_weight_of_every_call(model: Seq2Seq) -> None:
    with attent.record(model, pattern="*.blocks.0.*", kind="cross") as trace:
        for _ in range(2):
            run(model)
    ((path, calls),) = trace.items()
    frame = trace.to_frame()
    assert list(frame.columns) == ["path", "call", "row", "head", "query", "key", "weight"]
    assert len(frame) == sum(weights.numel() for weights in calls)
    last = frame.iloc[-1]
    assert last.weight == calls[1].flatten()[-1].item()
    assert (last.path, last.call, last.row, last["head"]) == (path, 1, calls[1].shape[0] - 1, calls[1].shape[1] - 1)
