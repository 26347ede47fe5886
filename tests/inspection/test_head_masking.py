"""Masking: a masked part adds nothing, and weights are restored bit-exactly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attent.decoding.translator import Translator
from attent.inspection.ablate import PART_KINDS, ModelPart, PartKind, list_parts, mask_heads
from attent.models import Seq2Seq
from attent.nn import get_attention_layers
from attent.nn.block import Block
from tests.inspection.toy_translator import model

SOURCE, TARGET = torch.tensor([[5, 6, 7, 8, 2]]), torch.tensor([[1, 9, 10, 11]])


@pytest.fixture(scope="module")
def of() -> Seq2Seq:
    return model()


def run(of: Seq2Seq) -> Tensor:
    with torch.no_grad():
        return of(SOURCE, TARGET)


def test_list_parts_names_every_part(of: Seq2Seq) -> None:
    heads, sublayers, layers = (list_parts(of, kind) for kind in PART_KINDS)
    assert [len(parts) for parts in (heads, sublayers, layers)] == [3 * (2 + 4), 2 * 2 + 2 * 3, 4]
    assert str(heads[0]) == "encoder.blocks.0.self_attn:0"
    assert str(layers[-1]) == "decoder.blocks.1"
    for part in (*heads, *sublayers, *layers):
        assert ModelPart.parse(str(part)) == part
    assert [{part.kind for part in parts} for parts in (heads, sublayers, layers)] == [
        {"head"},
        {"sublayer"},
        {"layer"},
    ]


@pytest.mark.parametrize("kind", PART_KINDS)
def test_masking_any_part_changes_the_output_and_is_undone(of: Seq2Seq, kind: PartKind) -> None:
    expected = run(of)
    weights = {name: value.clone() for name, value in of.state_dict().items()}
    for part in list_parts(of, kind):
        with mask_heads(of, part):
            assert not torch.allclose(run(of), expected, atol=1e-4), f"{part} must be heard"
        assert all(torch.equal(value, weights[name]) for name, value in of.state_dict().items())


def test_translator_is_masked_with_every_engine(tmp_path: Path) -> None:
    """CTranslate2, the default engine on a CPU, has converted the weights before."""
    folder = shutil.copytree(Path(__file__).parents[1] / "models" / "saved_model", tmp_path / "model")
    translator = Translator.load(folder, device="cpu")
    for _ in range(2):
        assert translator.translate(["seven"])[0].text == "sieben"
        with mask_heads(translator, "decoder.blocks.0.cross_attn:0", "decoder.blocks.0.cross_attn:1"):
            assert translator.translate(["seven"])[0].text != "sieben"


def test_masked_head_adds_nothing(of: Seq2Seq) -> None:
    """Subtract the head's contribution (weights x values x W^O columns) from the layer's output."""
    layer = get_attention_layers(of)["decoder.blocks.0.cross_attn"]
    outputs: list[Tensor] = []
    records = []
    layer.observers.append(records.append)
    hook = layer.register_forward_hook(lambda _, __, created: outputs.append(created))
    run(of)
    with mask_heads(of, ModelPart("decoder.blocks.0.cross_attn", 1)):
        run(of)
    layer.observers.clear()
    hook.remove()
    width = layer.head_width
    ours = records[0].weights[:, 1] @ records[0].v[:, 1] @ layer.output.weight[:, width : 2 * width].T
    torch.testing.assert_close(outputs[1], outputs[0] - ours)


def test_masked_layer_equals_a_removed_layer(of: Seq2Seq) -> None:
    """In a pre-norm model it is the identity."""
    from dataclasses import replace

    from tests.inspection.toy_translator import STACK

    pre = model(replace(STACK, norm_order="pre"))
    states: list[tuple[Tensor, Tensor]] = []
    block = pre.encoder.blocks[1]
    assert isinstance(block, Block)
    hook = block.register_forward_hook(lambda _, given, created: states.append((given[0], created)))
    with mask_heads(pre, ModelPart("encoder.blocks.1")):
        run(pre)
    hook.remove()
    assert torch.equal(*states[0])


def test_parts_may_overlap_and_errors_restore_weights(of: Seq2Seq) -> None:
    expected = run(of)
    parts = [
        ModelPart("decoder.blocks.0.cross_attn", 1),
        ModelPart("decoder.blocks.0.cross_attn"),
        ModelPart("decoder.blocks.0"),
    ]

    def stumble() -> None:
        with mask_heads(of, *parts):
            raise RuntimeError("stumbled")

    with pytest.raises(RuntimeError, match="stumbled"):
        stumble()
    assert torch.equal(run(of), expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("decoder blocks", "a part must be like decoder.blocks.0.cross_attn:2"),
        ("decoder.blocks.0.cross_attn:-1", "a part must be like"),
        (
            "decoder.blocks.7.cross_attn",
            r"has no part 'decoder\.blocks\.7\.cross_attn'; did you mean decoder\.blocks\.[01]\.cross",
        ),
        ("decoder.blocks.0.cross_attn:3", "decoder.blocks.0.cross_attn has 3 heads, numbered from 0"),
        ("decoder.blocks.0.feedforward:0", "only attention layers have heads"),
        ("decoder.blocks.0:0", "only attention layers have heads"),
    ],
)
def test_unknown_parts_are_rejected(of: Seq2Seq, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words), mask_heads(of, ModelPart.parse(text)):
        pass
