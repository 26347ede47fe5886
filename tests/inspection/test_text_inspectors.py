"""Documents of causal language models and text encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import attent
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import DeviceOptions
from attent.inspection import Trace
from attent.inspection.ablate import ModelPart, mask_heads
from attent.inspection.attention_trace import unpack_array
from attent.inspection.html_page import render_page
from attent.inspection.inspectors import text
from attent.inspection.inspectors.base import InspectionRequest
from attent.inspection.inspectors.text import CausalLMInspector, EncoderInspector
from attent.inspection.session import open_inspector
from attent.models.weights import save_model
from attent.nn import get_attention_layers
from tests.inspection.documents import read_weights
from tests.inspection.models import HIDDEN, TEXT, causal, encoder, tokenizer

VOCABULARY = tokenizer().source
LABELS = ("good", "bad", "neither")


@pytest.fixture(scope="module")
def writer() -> CausalLMInspector:
    return CausalLMInspector(causal(), VOCABULARY, name="toy")


@pytest.fixture(scope="module")
def inspection(writer: CausalLMInspector) -> dict[str, Any]:
    return writer.inspect(InspectionRequest(text=TEXT))


def ids_of(text: str) -> list[int]:
    return [*VOCABULARY.prefix_ids, *VOCABULARY.encode([text])[0]]


def same_weights(document: dict[str, Any], trace: Trace) -> None:
    back = read_weights(document)
    assert list(back) == list(trace)
    for path, calls in trace.items():
        torch.testing.assert_close(back[path], calls[0], atol=1e-5, rtol=0)


# --- causal language model ---


def test_language_model_records_the_text(writer: CausalLMInspector, inspection: dict[str, Any]) -> None:
    ids = torch.tensor([ids_of(TEXT)])
    with attent.record(writer.model) as trace, torch.no_grad():
        writer.model(ids)
    same_weights(inspection, trace)
    assert list(inspection["sides"]) == ["text"]
    assert [token["piece"] for token in inspection["sides"]["text"]["tokens"]] == VOCABULARY.to_pieces(ids[0].tolist())
    assert all(layer["causal"] and layer["path"].startswith("decoder.blocks.") for layer in inspection["layers"])
    assert inspection["model"]["kind"] == "causal"
    assert "4 heads (2 KV heads)" in inspection["model"]["summary"]
    json.dumps(inspection, allow_nan=False)
    assert "decoding" not in inspection
    assert render_page(inspection)


def test_next_token_predictions(writer: CausalLMInspector, inspection: dict[str, Any]) -> None:
    ids = ids_of(TEXT)
    with torch.no_grad():
        logits = writer.model(torch.tensor([ids]))[0, :, : VOCABULARY.size]  # rows without a piece have no probability
    positions = inspection["predictions"]["positions"]
    assert [position["position"] for position in positions] == list(range(1, len(ids) + 1))
    assert [position["chosen"] for position in positions] == [*ids[1:], None]
    for position, row in zip(positions, logits.softmax(-1), strict=True):
        best = position["options"][0]
        assert (best["token"], best["p"]) == (int(row.argmax()), pytest.approx(float(row.max()), rel=1e-3))
        if position["chosen"] is not None:
            assert position["p"] == pytest.approx(float(row[position["chosen"]]), rel=1e-3)


def test_greedy_continuation(writer: CausalLMInspector, inspection: dict[str, Any]) -> None:
    ids = ids_of(TEXT)
    before = len(VOCABULARY.decode(ids))
    for _ in range(text.CONTINUATION_TOKENS):
        with torch.no_grad():
            ids.append(int(writer.model(torch.tensor([ids]))[0, -1, : VOCABULARY.size].argmax()))
        if ids[-1] == VOCABULARY.end:
            break
    assert inspection["output"]["text"] == VOCABULARY.decode(ids)[before:]


def test_grouped_query_attention(inspection: dict[str, Any]) -> None:
    layer = inspection["layers"][1]
    queries, keys = (unpack_array(layer[name]) for name in "qk")
    assert (len(queries), len(keys)) == (4, 2)
    scores = queries @ keys.repeat_interleave(2, 0).transpose(-1, -2) * layer["scale"]  # head h uses KV head h * 2 // 4
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    again = scores.masked_fill(later, -torch.inf).softmax(-1)
    torch.testing.assert_close(
        again, read_weights(inspection)["decoder.blocks.1.self_attn"][0], atol=0.02, rtol=0
    )  # stored with three digits


def test_masked_parts_change_the_continuation(writer: CausalLMInspector, inspection: dict[str, Any]) -> None:
    parts = (ModelPart("decoder.blocks.0"), ModelPart("decoder.blocks.1.self_attn", 3))
    masked_document = writer.inspect(InspectionRequest(text=TEXT, masked_parts=parts))
    assert [layer["masked_heads"] for layer in masked_document["layers"]] == [[0, 1, 2, 3], [3]]
    assert masked_document["predictions"] != inspection["predictions"]
    with mask_heads(writer.model, *parts), torch.no_grad():
        last = writer.model(torch.tensor([ids_of(TEXT)]))[0, -1, : VOCABULARY.size]
    assert masked_document["predictions"]["positions"][-1]["options"][0]["token"] == int(last.argmax())
    assert writer.inspect(InspectionRequest(text=TEXT))["predictions"] == inspection["predictions"], (
        "afterwards it is as before"
    )


def test_layer_filter(writer: CausalLMInspector) -> None:
    document = writer.inspect(InspectionRequest(text=TEXT, layers=(1,)))
    assert [layer["path"] for layer in document["layers"]] == ["decoder.blocks.1.self_attn"]


# --- text encoder ---


@pytest.fixture(scope="module")
def reader() -> EncoderInspector:
    return EncoderInspector(encoder(), tokenizer(), name="toy")


def test_masked_token_is_predicted(reader: EncoderInspector) -> None:
    document = reader.inspect(InspectionRequest(text=HIDDEN))
    tokens = document["sides"]["text"]["tokens"]
    (position,) = document["predictions"]["positions"]
    assert [i for i, token in enumerate(tokens) if token["special"] == "mask"] == [position["position"]]
    (before, after) = HIDDEN.split("<mask>")
    inside = [*VOCABULARY.encode([before.strip()])[0], VOCABULARY.mask, *VOCABULARY.encode([after.strip()])[0]]
    ids = torch.tensor([[*VOCABULARY.prefix_ids, *inside, *VOCABULARY.suffix_ids]])
    with attent.record(reader.model) as trace, torch.no_grad():
        states = reader.model(ids)
    same_weights(document, trace)
    shares = reader.model.masked_logits(states)[0, position["position"]].softmax(-1)
    assert position["options"][0]["token"] == int(shares.argmax())
    ids[0, position["position"]] = int(shares.argmax())
    assert document["output"] == {"label": "filled in", "text": VOCABULARY.decode(ids[0].tolist())}
    assert document["model"]["mask_token"] == "<mask>"
    assert not any(layer["causal"] for layer in document["layers"])


def test_second_text_has_another_segment(reader: EncoderInspector) -> None:
    document = reader.inspect(InspectionRequest(text="a dog", text_pair="two women"))
    first, second = VOCABULARY.encode(["a dog", "two women"])
    ids = [*VOCABULARY.prefix_ids, *first, *VOCABULARY.suffix_ids, *second, *VOCABULARY.suffix_ids]
    segments = [0] * (len(ids) - len(second) - 1) + [1] * (len(second) + 1)
    with attent.record(reader.model) as trace, torch.no_grad():
        reader.model(torch.tensor([ids]), segments=torch.tensor([segments]))
    same_weights(document, trace)
    item = reader.inspect(InspectionRequest(text="a dog"))["layers"][0]["weights"]
    assert document["layers"][0]["weights"]["shape"][-1] > item["shape"][-1]


def test_labels_have_probabilities() -> None:
    model = encoder(LABELS, masked=False)
    document = EncoderInspector(model, tokenizer()).inspect(InspectionRequest(text=TEXT))
    ids = torch.tensor([[*VOCABULARY.prefix_ids, *VOCABULARY.encode([TEXT])[0], *VOCABULARY.suffix_ids]])
    with torch.no_grad():
        shares = model.classify(model(ids))[0].softmax(-1)
    best = document["labels"]["best"]
    assert {item["label"] for item in best} == set(LABELS)
    assert best[0]["label"] == LABELS[int(shares.argmax())] == document["output"]["text"]
    assert best[0]["p"] == pytest.approx(float(shares.max()), rel=1e-3)
    assert "predictions" not in document


def test_head_statistics_without_alignment(inspection: dict[str, Any]) -> None:
    columns = [column["key"] for column in inspection["head_stats"]["columns"]]
    assert "previous" in columns
    assert not {"alignment", "aligned_on_output", "aligned_on_input", "next"} & set(columns)
    heads = inspection["head_stats"]["heads"]
    assert len(heads) == sum(layer.heads for layer in get_attention_layers(causal()).values())
    assert not any("input token" in head["description"] for head in heads)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("causal", {"text": " \n"}, "must not be empty"),
        ("causal", {"text": "a", "target": "b"}, "is for translators, but this is a language model; leave it out"),
        ("causal", {"text": "a", "prefix": (3,)}, "`prefix` is for translators"),
        ("causal", {"text": "a", "text_pair": "b"}, "`text_pair` is for text encoders"),
        ("causal", {"text": "a", "masked_parts": (ModelPart("decoder.blocks.9"),)}, "has no part 'decoder.blocks.9'"),
        ("encoder", {"text": "a", "to": "de"}, "`to` is for translators, but this is a text encoder"),
        ("encoder", {"text": "a dog " * 40}, "must have at most 40 tokens for this model, but has"),
        ("encoder", {"text": "a", "text_pair": " "}, "must not be empty"),
        ("labels", {"text": HIDDEN}, "has no masked-language-model head; replace <mask>"),
    ],
)
def test_invalid_requests_are_rejected(
    writer: CausalLMInspector, reader: EncoderInspector, kind: str, arguments: dict[str, Any], words: str
) -> None:
    labels = EncoderInspector(encoder(LABELS, masked=False), tokenizer())
    inspector: Any = {"causal": writer, "encoder": reader, "labels": labels}[kind]
    with pytest.raises(ValueError, match=words):
        inspector.inspect(InspectionRequest(**arguments))


def test_inspection_stops_when_cancelled(writer: CausalLMInspector, reader: EncoderInspector) -> None:
    for inspector in (writer, reader):
        with pytest.raises(SearchCancelled):
            inspector.inspect(InspectionRequest(text=TEXT), should_stop=lambda: True)


def test_a_folder_is_opened_with_the_requested_type_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(causal(), tmp_path / "gpt", tokenizer().files)
    threads = list[int]()
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    plain = open_inspector(tmp_path / "gpt", DeviceOptions(device="cpu"))
    assert (plain.name, next(plain.model.parameters()).dtype, threads) == ("gpt", torch.float32, [])
    half = open_inspector(tmp_path / "gpt", DeviceOptions(device="cpu", dtype="bfloat16", threads=3))
    assert (next(half.model.parameters()).dtype, threads) == (torch.bfloat16, [3])
    assert open_inspector(half) is half
