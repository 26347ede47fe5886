"""Trace documents: JSON round trip, filters, arrays, errors."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attent
from attent.inspection.attention_trace import (
    DisplayToken,
    PatchImage,
    TraceSide,
    build_layer,
    pack_array,
    pack_qkv,
    unpack_array,
    unpack_weights,
)
from attent.inspection.session import Inspection
from attent.models import Seq2Seq
from attent.nn import AttentionRecord, Mask, Stack, StackConfig
from tests.inspection.documents import build_trace_document, read_sides, read_weights
from tests.inspection.toy_translator import model

SOURCE, TARGET = torch.tensor([[5, 6, 7, 8, 2], [5, 6, 2, 0, 0]]), torch.tensor([[1, 9, 10, 11], [1, 12, 0, 0]])
LENGTHS = torch.tensor([5, 3]), torch.tensor([4, 2])


@pytest.fixture(scope="module")
def seq2seq() -> Seq2Seq:
    return model()


def sides(source: int, target: int) -> dict[str, TraceSide]:
    names = {"source": source, "decoder_input": target, "target": target}
    return {
        name: TraceSide(
            label=name, text="</script>", tokens=tuple(DisplayToken(f"▁{i}", str(i), True) for i in range(count))
        )
        for name, count in names.items()
    }


def test_json_round_trip(seq2seq: Seq2Seq) -> None:
    with attent.record(seq2seq, qkv=True) as trace:
        seq2seq(SOURCE, TARGET, *LENGTHS)
    for row, (source, target) in enumerate([(5, 4), (3, 2)]):
        document = build_trace_document(trace, sides(source, target), title="both", row=row)
        back = read_weights(Inspection.from_json(Inspection(document).to_json()).document)
        assert list(back) == list(trace)
        assert read_sides(document) == sides(source, target)
        layers = {layer["path"]: layer for layer in document["layers"]}
        for path, calls in trace.items():
            keys = target if path.startswith("decoder") and path.endswith("self_attn") else source
            queries = source if path.startswith("encoder") else target
            torch.testing.assert_close(back[path], calls[0][[row], :, :queries, :keys], atol=0.8e-5, rtol=0)
            for name, length in (("q", queries), ("k", keys), ("v", keys)):
                ours = getattr(trace.qkv[path][0], name)[[row], :, :length]
                torch.testing.assert_close(unpack_array(layers[path][name])[None], ours, atol=1e-4, rtol=2e-3)


def test_json_is_compact(seq2seq: Seq2Seq) -> None:
    with attent.record(seq2seq, qkv=True) as trace:
        seq2seq(SOURCE, TARGET, *LENGTHS)
    layers = build_trace_document(trace, sides(5, 4))["layers"]
    numbers = sum(3 * len(layer["weights"]["data"]) for layer in layers)
    assert numbers < 4 * sum(3 * calls[0][0].numel() * 4 for calls in trace.values())


def test_selected_layers_are_recorded(seq2seq: Seq2Seq) -> None:
    with attent.record(seq2seq, kind="cross", layers=[1], qkv=True) as subset, attent.record(seq2seq) as every:
        seq2seq(SOURCE, TARGET, *LENGTHS)
    assert list(subset) == ["decoder.blocks.1.cross_attn"]
    torch.testing.assert_close(subset["decoder.blocks.1.cross_attn"][0], every["decoder.blocks.1.cross_attn"][0])
    (layer,) = build_trace_document(subset, sides(5, 4))["layers"]
    assert layer["heads"] == 3


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_query_heads_are_recorded(kv_heads: int) -> None:
    stack = Stack(StackConfig(layers=1, width=16, heads=4, kv_heads=kv_heads, ffn_width=8, dropout=0.0)).eval()
    x = torch.randn(2, 5, 16)
    with attent.record(stack, qkv=True) as trace:
        stack(x)
    vectors = trace.qkv["blocks.0.self_attn"][0]
    keys = vectors.k.repeat_interleave(4 // kv_heads, 1)
    scores = vectors.q @ keys.transpose(-2, -1) * vectors.scale
    torch.testing.assert_close(scores.softmax(-1), trace["blocks.0.self_attn"][0])


def test_additive_layers_are_marked_in_documents() -> None:
    config = StackConfig(layers=1, width=16, heads=4, kv_heads=2, ffn_width=8, dropout=0.0, compatibility="additive")
    stack = Stack(config).eval()
    with attent.record(stack, qkv=True) as every:
        stack(torch.randn(2, 5, 16))
    side = TraceSide(label="text", text="", tokens=tuple(DisplayToken(t, t, True) for t in "abcde"))
    assert build_trace_document(every, {"text": side})["layers"][0]["additive"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "crossed"}, "`kind` must be self or cross, but is 'crossed'"),
        ({"layers": [9]}, r"layers \[9\] must select an attention layer, but select none of: encoder"),
    ],
)
def test_filters_that_match_nothing_are_rejected(seq2seq: Seq2Seq, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words), attent.record(seq2seq, **arguments):
        pass


def test_one_side_suffices_for_models_of_one_text() -> None:
    stack = Stack(StackConfig(layers=1, width=16, heads=2, ffn_width=8, causal=True, dropout=0.0)).eval()
    with attent.record(stack, qkv=True) as trace:
        stack(torch.randn(1, 4, 16))
    patches = TraceSide(
        label="image",
        tokens=tuple(DisplayToken(str(i), str(i)) for i in range(4)),
        image=PatchImage(src="data:image/png;base64,", rows=2, columns=2),
    )
    document = build_trace_document(trace, {"image": patches})
    assert (document["layers"][0]["queries"], document["layers"][0]["keys"]) == ("image", "image")
    assert document["layers"][0]["causal"] is True
    assert read_sides(document)["image"].image == patches.image


def test_largest_weights_of_long_texts_are_kept() -> None:
    weights = torch.rand(2, 7, 30).softmax(-1)
    layer = build_layer("blocks.0.self_attn", ("text", "text"), weights, causal=False, scale=1.0, top_k=4)
    back = unpack_weights(layer, 30)
    assert torch.equal(unpack_weights(layer, 30, torch.tensor([4, 2])), back[:, [4, 2]])
    assert ((back > 0).sum(-1) == 4).all()
    stored = weights.topk(4, -1)
    torch.testing.assert_close(back.gather(-1, stored.indices), stored.values, atol=0.8e-5, rtol=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[]", "must be an object"),
        ('{"format": "attent-trace", "version": 2}', 'must have "format": "attent-trace" and "version": 1'),
    ],
)
def test_invalid_documents_are_rejected(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Inspection.from_json(text)


# ---- arrays ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from(["unit16", "uint16", "float16", "float32"]))
def test_arrays_round_trip(shape: list[int], kind: Any) -> None:
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))
    numbers = (numbers * 60_000).floor() if kind == "uint16" else numbers
    back = unpack_array(json.loads(json.dumps(pack_array(numbers, kind))))
    assert list(back.shape) == shape
    tolerance = {"unit16": 0.8e-5, "uint16": 0.0, "float16": 2.5e-4, "float32": 0.0}[kind]
    torch.testing.assert_close(back.float(), numbers, atol=tolerance, rtol=0)


def test_float16_keeps_three_digits() -> None:
    numbers = torch.tensor([1.0, -0.33333, 1234.5, 1e-3, -7.77e4, 65504.0])
    back = unpack_array(pack_array(numbers, "float16", drop_low_bit=True))
    torch.testing.assert_close(back, numbers.clamp(-65280, 65280), atol=0, rtol=1.5e-3)


def test_array_format_is_as_documented() -> None:
    """Decode by hand: base64, zlib, byte planes."""
    import base64
    import zlib

    planes = zlib.decompress(base64.b64decode(pack_array(torch.tensor([0.0, 1.0, 0.5]), "unit16")["data"]))
    assert planes == bytes([0, 255, 0]) + bytes([0, 255, 128])


@pytest.mark.parametrize(
    "change",
    [
        {"type": "float64"},
        {"type": ["unit16"]},
        {"shape": [3]},
        {"shape": [2**40, 2**40]},
        {"shape": [-2]},
        {"shape": None},
        {"data": "%%%"},
        {"data": None},
        {"data": "AAAA"},
    ],
)
def test_damaged_arrays_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="create the file again"):
        unpack_array(pack_array(torch.rand(2), "unit16") | change)


@pytest.mark.parametrize("bias_shape", [(1, 1, 4, 6), (2, 1, 4, 6), (2, 3, 4, 6)])
def test_the_bias_of_a_row_is_that_of_each_head(bias_shape: tuple[int, ...]) -> None:
    bias = torch.arange(math.prod(bias_shape), dtype=torch.float32).view(bias_shape)
    q, kv = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5)
    packed = pack_qkv(AttentionRecord(q, kv, kv, Mask(), bias, scale=1.0), 1, (2, 3))
    expected = bias.expand(2, 3, 4, 6)[1, :, :2, :3]
    torch.testing.assert_close(unpack_array(packed["bias"]).float(), expected)
    assert unpack_array(packed["q"]).shape == (3, 2, 5)
    assert "bias" not in pack_qkv(AttentionRecord(q, kv, kv, Mask(), None, scale=1.0), 1, (2, 3))
