"""Documents of translators: search, weights, masks, budgets."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import attent
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.forced_decoding import score_targets as force
from attent.decoding.options import SearchOptions
from attent.inspection.ablate import ModelPart, mask_heads
from attent.inspection.html_page import render_page
from attent.inspection.inspectors import base
from attent.inspection.inspectors.base import InspectionRequest, PageBudget
from attent.inspection.inspectors.seq2seq import TranslationInspector
from attent.models import shift_right
from attent.models.config import mirror_encoder
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import Attention, LearnedConfig, StackConfig
from tests.inspection.documents import read_sides, read_weights
from tests.inspection.toy_translator import STACK, TEXT, model, translator
from tests.text.corpus import tokenizer

SECTIONS = {"format", "version", "title", "sides", "layers", "model", "decoding", "head_stats", "positions"}


@pytest.fixture(scope="module")
def inspector() -> TranslationInspector:
    return TranslationInspector(translator(), name="toy", languages=("en", "de"))


@pytest.fixture(scope="module")
def inspection(inspector: TranslationInspector) -> dict[str, Any]:
    return inspector.inspect(InspectionRequest(text=f" {TEXT} "))


def test_output_is_the_translation(inspector: TranslationInspector, inspection: dict[str, Any]) -> None:
    (expected,) = translator().translate([TEXT], n_best=4)
    assert set(inspection) == SECTIONS
    assert inspection["title"] == TEXT
    assert inspection["sides"]["target"]["text"] == expected.text == inspection["decoding"]["results"][0]["text"]
    assert [item["text"] for item in inspection["decoding"]["results"]] == [item.text for item in expected.n_best]
    assert (inspection["sides"]["source"]["language"], inspection["sides"]["target"]["language"]) == ("en", "de")
    json.dumps(inspection, allow_nan=False)


def test_weights_are_those_of_teacher_forcing(inspector: TranslationInspector, inspection: dict[str, Any]) -> None:
    of = translator()
    (source,), ids = of.tokenizer.encode_source([TEXT]), [item["chosen"] for item in inspection["decoding"]["choices"]]
    target = torch.tensor([ids])
    with attent.record(inspector.model) as trace, torch.no_grad():
        logits = inspector.model(torch.tensor([source]), shift_right(target, inspector.model.config.start_id))
    never = find_suppressed_tokens(inspector.model.config, of.tokenizer)
    back = read_weights(inspection)
    assert list(back) == list(trace)
    for path, calls in trace.items():
        torch.testing.assert_close(back[path], calls[0], atol=1e-5, rtol=0)
    assert [len(inspection["sides"][name]["tokens"]) for name in ("source", "decoder_input", "target")] == [
        len(source),
        *[len(ids)] * 2,
    ]
    for choice, row, token in zip(inspection["decoding"]["choices"], logits[0], ids, strict=True):
        assert choice["chosen"] == token
        words = row.index_fill(-1, torch.tensor(never), -math.inf)  # suppressed tokens have no probability
        assert choice["p"] == pytest.approx(float(words.softmax(-1)[token]), rel=1e-3)
        shares = [option["p"] for option in choice["options"]]
        assert shares == sorted(shares, reverse=True)


def test_suppressed_tokens_have_no_probability(inspector: TranslationInspector, inspection: dict[str, Any]) -> None:
    never = torch.tensor(find_suppressed_tokens(inspector.model.config, translator().tokenizer))
    hook = inspector.model.output.register_forward_hook(
        lambda _, __, created: created.index_add(-1, never, torch.full_like(created[..., : len(never)], 30.0))
    )
    try:
        document = inspector.inspect(InspectionRequest(text=TEXT))
    finally:
        hook.remove()
    assert document["decoding"]["choices"] == inspection["decoding"]["choices"]


def test_every_node_has_a_parent(inspection: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in inspection["decoding"]["nodes"]}
    won = [node for node in nodes.values() if node["on_best_path"]]
    assert [node["token"] for node in won] == [item["chosen"] for item in inspection["decoding"]["choices"]]
    assert math.exp(sum(node["log_prob"] for node in won)) == pytest.approx(
        math.prod(item["p"] for item in inspection["decoding"]["choices"]), rel=1e-3
    )
    assert all(nodes[item["node"]]["in_results"] for item in inspection["decoding"]["results"])
    assert all(node["parent"] is None or nodes[node["parent"]]["expanded"] for node in nodes.values())


def test_forced_token_changes_the_rest(inspector: TranslationInspector, inspection: dict[str, Any]) -> None:
    first = inspection["decoding"]["choices"][0]
    other = next(option["token"] for option in first["options"] if option["token"] != first["chosen"])
    forced = inspector.inspect(InspectionRequest(text=TEXT, prefix=(other,)))
    assert forced["decoding"]["forced"] == 1
    assert forced["decoding"]["choices"][0]["chosen"] == other
    assert forced["sides"]["target"]["tokens"][0] != inspection["sides"]["target"]["tokens"][0]


def test_masked_parts_equal_a_masked_model(inspector: TranslationInspector, inspection: dict[str, Any]) -> None:
    parts = (ModelPart("decoder.blocks.0.cross_attn", 1), ModelPart("decoder.blocks.1"))
    masked = inspector.inspect(InspectionRequest(text=TEXT, masked_parts=parts))
    assert {layer["path"]: layer["masked_heads"] for layer in masked["layers"] if layer["masked_heads"]} == {
        "decoder.blocks.0.cross_attn": [1],
        "decoder.blocks.1.self_attn": [0, 1, 2],
        "decoder.blocks.1.cross_attn": [0, 1, 2],
    }
    with mask_heads(inspector.model, *parts):
        (expected,) = translator().translate([TEXT])
    assert masked["sides"]["target"]["text"] == expected.text != inspection["sides"]["target"]["text"]
    assert inspector.inspect(InspectionRequest(text=TEXT))["sides"] == inspection["sides"], "afterwards it is as before"


def test_given_translation_is_used(inspector: TranslationInspector) -> None:
    document = inspector.inspect(InspectionRequest(text=TEXT, target="Hallo  Welt"))
    assert document["decoding"]["given"] is True
    forced = translator().model, translator().tokenizer, [TEXT], ["Hallo  Welt"]
    assert document["decoding"]["results"][0]["log_prob"] == pytest.approx(force(*forced)[0].log_prob, rel=1e-3)
    ids = tokenizer().encode_target(["Hallo  Welt"])[0]
    assert [token["piece"] for token in document["sides"]["target"]["tokens"]] == tokenizer().target.to_pieces(ids)
    assert document["sides"]["decoder_input"]["tokens"][0]["special"] == "start"


def test_layer_filter(inspector: TranslationInspector) -> None:
    document = inspector.inspect(InspectionRequest(text=TEXT, kind="cross", layers=(1,)))
    assert [layer["path"] for layer in document["layers"]] == ["decoder.blocks.1.cross_attn"]


def test_long_text_fits_the_page_budget(inspector: TranslationInspector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_DENSE_WEIGHTS", 2_000)
    monkeypatch.setattr(base, "MAX_SPARSE_WEIGHTS", 2_000)
    monkeypatch.setattr(base, "MAX_QKV_VALUES", 2_000)
    document = inspector.inspect(InspectionRequest(text=" ".join([TEXT] * 4), target=" ".join([TEXT] * 4)))
    assert all("sparse" in layer and "q" not in layer for layer in document["layers"])
    most = document["layers"][0]["sparse"]["indices"]["shape"][-1]
    assert most == base.MIN_WEIGHTS_PER_ROW
    json.dumps(document, allow_nan=False)


@pytest.mark.slow
def test_two_thousand_tokens(inspector: TranslationInspector) -> None:
    text = " ".join(["two dogs"] * 290)
    document = inspector.inspect(InspectionRequest(text=text, target=text))
    counts = [len(side["tokens"]) for side in document["sides"].values()]
    assert min(counts) > 2_000
    assert len(render_page(document).encode()) < 5_000_000


def test_page_budget_ends_at_its_limits(inspection: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sides = read_sides(inspection)
    layers = {"encoder.blocks.0.self_attn": Attention(StackConfig(width=24, heads=3))}
    tokens = len(sides["source"].tokens)
    for margin, per_row, include_qkv in (
        (0, 3 * tokens * tokens, True),
        (1, max(4, (3 * tokens * tokens - 1) // (3 * tokens)), False),
    ):
        monkeypatch.setattr(base, "MAX_DENSE_WEIGHTS", 3 * tokens * tokens - margin)
        monkeypatch.setattr(base, "MAX_SPARSE_WEIGHTS", 3 * tokens * tokens - margin)
        monkeypatch.setattr(base, "MAX_QKV_VALUES", 24 * 3 * tokens)
        dense = frozenset() if margin else frozenset(layers)
        expected = PageBudget(dense_layers=dense, weights_per_row=per_row, include_qkv=include_qkv)
        assert PageBudget.from_layers(layers, sides) == expected
    monkeypatch.undo()
    monkeypatch.setattr(base, "MAX_QKV_VALUES", 24 * 3 * tokens - 1)
    assert PageBudget.from_layers(layers, sides).include_qkv is False


def test_predictions_of_long_texts_are_fewer() -> None:
    vocabulary, log_probs = tokenizer().target, torch.randn(301, tokenizer().target.size).log_softmax(-1)
    for length, count in ((300, 10), (301, 3)):
        steps = base.describe_predictions(vocabulary, [5] * length, log_probs[:length])
        assert {len(step["options"]) for step in steps} == {count}


def test_text_may_be_as_long_as_the_positions(inspector: TranslationInspector) -> None:
    stack = type("Limited", (), {"positions": type("Positions", (), {"max_length": 4})})
    base.check_length(stack, 4, "the text")
    with pytest.raises(ValueError, match="the text must have at most 4 tokens for this model, but has 5"):
        base.check_length(stack, 5, "the text")
    base.check_length(type("Free", (), {"positions": type("Positions", (), {"max_length": None})}), 10**6, "the text")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.123456, 0.12346), (1234567.0, 1234600.0), (math.nan, None), (-math.inf, None), (0.0, 0.0)],
)
def test_numbers_for_json_have_five_digits(value: float, expected: float | None) -> None:
    assert base.round_for_json(value) == expected


def test_page_budget(inspection: dict[str, Any]) -> None:
    sides = read_sides(inspection)
    layers = dict.fromkeys(read_weights(inspection), Attention(StackConfig(width=24, heads=3)))
    budget = PageBudget.from_layers(layers, sides)
    assert (budget.dense_layers, budget.include_qkv) == (frozenset(layers), True)
    wide = Attention(StackConfig(width=24, heads=3))
    wide.heads = 10_000_000
    assert PageBudget.from_layers({"decoder.blocks.0.cross_attn": wide}, sides).include_qkv is False


def test_any_script_is_displayed(inspector: TranslationInspector) -> None:
    document = inspector.inspect(InspectionRequest(text="שלום 日本語 \U0001f600", search=SearchOptions(max_length=3)))
    tokens = document["sides"]["source"]["tokens"]
    assert all(token["text"] or token["piece"] == "▁" for token in tokens)
    assert tokens[-1]["special"] == "end"
    assert {token["special"] for token in tokens if token["piece"].startswith("<0x")} == {"byte"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text": " \n"}, "must not be empty"),
        ({"text": "a", "prefix": (10**9,)}, "`prefix` must hold token ids from 0 to"),
        ({"text": "a", "prefix": (5,) * 200}, "`prefix` must be shorter than"),
        ({"text": "a", "prefix": (1,)}, "prefix"),
        ({"text": "a", "masked_parts": (ModelPart("decoder.blocks.9"),)}, "has no part 'decoder.blocks.9'"),
        ({"text": "a", "to": "fr"}, "has no tag for 'fr'"),
    ],
)
def test_invalid_requests_are_rejected(inspector: TranslationInspector, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        inspector.inspect(InspectionRequest(**arguments))


@pytest.mark.parametrize("to", [None, "de"])
def test_the_limit_of_a_translation_is_without_added_tokens(inspector: TranslationInspector, to: str | None) -> None:
    tokens = len(inspector.translator.tokenizer.source.encode([TEXT])[0])
    request = inspector._build_search_request(InspectionRequest(text=TEXT, to=to))
    assert request.max_length == tokens + 50
    prefix = (5,) * (tokens + 49)
    assert inspector._build_search_request(InspectionRequest(text=TEXT, to=to, prefix=prefix)).prefix_ids == prefix
    with pytest.raises(ValueError, match=f"`prefix` must be shorter than {tokens + 50} tokens, but has {tokens + 50}"):
        inspector._build_search_request(InspectionRequest(text=TEXT, to=to, prefix=(*prefix, 5)))
    size = inspector.model.config.output_vocab
    assert inspector._build_search_request(InspectionRequest(text=TEXT, to=to, prefix=(0, size - 1))).prefix_ids
    for token in (-1, size):
        with pytest.raises(ValueError, match=f"`prefix` must hold token ids from 0 to {size - 1}, but one is {token}"):
            inspector._build_search_request(InspectionRequest(text=TEXT, to=to, prefix=(token,)))


def test_too_long_sentence_is_rejected() -> None:
    from dataclasses import replace

    from attent.decoding.translator import Translator

    short = replace(STACK, positions=LearnedConfig(max_length=6))
    assert mirror_encoder(short).positions == short.positions
    inspector = TranslationInspector(Translator(model(short), tokenizer()))
    with pytest.raises(ValueError, match="the sentence must have at most 6 tokens"):
        inspector.inspect(InspectionRequest(text=" ".join([TEXT] * 3)))
    with pytest.raises(ValueError, match="the translation must have at most 6 tokens"):
        inspector.inspect(InspectionRequest(text="a", target=" ".join([TEXT] * 3)))


def test_inspection_stops_when_cancelled(inspector: TranslationInspector) -> None:
    with pytest.raises(SearchCancelled):
        inspector.inspect(InspectionRequest(text=TEXT), should_stop=lambda: True)


def test_sentinels_in_the_source_are_filled() -> None:
    from attent.decoding.translator import Translator
    from tests.decoding.encoder_models import sentencepiece, span_model

    pieces = sentencepiece(controls=("<extra_id_0>", "<extra_id_1>"))
    of_spans = TranslationInspector(Translator(span_model(pieces), pieces))
    document = of_spans.inspect(InspectionRequest(text="The <extra_id_0> sat on the [MASK]."))
    source, target = document["sides"]["source"], document["sides"]["target"]
    assert [token["piece"] for token in source["tokens"] if token["special"] == "mask"] == [
        "<extra_id_0>",
        "<extra_id_1>",
    ]
    assert (target["label"], target["text"]) == ("filled spans", "<extra_id_0> cat <extra_id_1> mat")
    assert document["decoding"]["results"][0]["text"] == target["text"]
    target_side = of_spans.inspect(InspectionRequest(text="The <extra_id_0> sat", target="<extra_id_0> dog"))["sides"][
        "target"
    ]
    assert [token["piece"] for token in target_side["tokens"]] == ["<extra_id_0>", "▁dog", "</s>"]
    assert of_spans.inspect(InspectionRequest(text="The cat"))["sides"]["target"]["label"] == "translation"
