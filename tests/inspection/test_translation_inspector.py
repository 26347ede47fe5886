"""The document of a sentence: the search as it went, what was looked at on the way, and what is silent."""

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
from attent.inspection import Trace
from attent.inspection.head_masking import ModelPart, mask_parts
from attent.inspection.html_page import render_page
from attent.inspection.inspectors import base
from attent.inspection.inspectors.base import PageBudget
from attent.inspection.inspectors.translation import (
    InspectionError,
    InspectionRequest,
    LayerFilter,
    TranslationInspector,
)
from attent.interop.ctranslate2 import find_suppressed_tokens
from attent.models import shift_right
from attent.models.config import mirror_encoder
from attent.nn import LearnedConfig
from tests.inspection.toy_translator import STACK, TEXT, model, translator
from tests.text.corpus import tokenizer

SECTIONS = {"format", "version", "title", "sides", "layers", "model", "decoding", "head_stats", "positions"}


@pytest.fixture(scope="module")
def looker() -> TranslationInspector:
    return TranslationInspector(translator(), name="toy", languages=("en", "de"))


@pytest.fixture(scope="module")
def seen(looker: TranslationInspector) -> dict[str, Any]:
    return looker.inspect(InspectionRequest(text=f" {TEXT} "))


def test_output_is_the_translation(looker: TranslationInspector, seen: dict[str, Any]) -> None:
    (wanted,) = translator().translate([TEXT], n_best=4)
    assert set(seen) == SECTIONS
    assert seen["title"] == TEXT
    assert seen["sides"]["target"]["text"] == wanted.text == seen["decoding"]["results"][0]["text"]
    assert [one["text"] for one in seen["decoding"]["results"]] == [one.text for one in wanted.n_best]
    assert (seen["sides"]["source"]["language"], seen["sides"]["target"]["language"]) == ("en", "de")
    json.dumps(seen, allow_nan=False)


def test_weights_are_those_of_teacher_forcing(looker: TranslationInspector, seen: dict[str, Any]) -> None:
    of = translator()
    (source,), ids = of.tokenizer.encode_source([TEXT]), [one["chosen"] for one in seen["decoding"]["choices"]]
    target = torch.tensor([ids])
    with attent.record(looker.model) as trace, torch.no_grad():
        logits = looker.model(torch.tensor([source]), shift_right(target, looker.model.config.start_id))
    never = find_suppressed_tokens(looker.model.config, of.tokenizer)
    back = Trace.from_document(seen)
    assert list(back) == list(trace)
    for path, calls in trace.items():
        torch.testing.assert_close(back[path][0], calls[0], atol=1e-5, rtol=0)
    assert [len(seen["sides"][name]["tokens"]) for name in ("source", "decoder_input", "target")] == [
        len(source),
        *[len(ids)] * 2,
    ]
    for choice, row, token in zip(seen["decoding"]["choices"], logits[0], ids, strict=True):
        assert choice["chosen"] == token
        words = row.index_fill(-1, torch.tensor(never), -math.inf)  # what is no word has no share
        assert choice["p"] == pytest.approx(float(words.softmax(-1)[token]), rel=1e-3)
        shares = [option["p"] for option in choice["options"]]
        assert shares == sorted(shares, reverse=True)


def test_suppressed_tokens_have_no_probability(looker: TranslationInspector, seen: dict[str, Any]) -> None:
    never = torch.tensor(find_suppressed_tokens(looker.model.config, translator().tokenizer))
    hook = looker.model.output.register_forward_hook(
        lambda _, __, made: made.index_add(-1, never, torch.full_like(made[..., : len(never)], 30.0))
    )
    try:
        found = looker.inspect(InspectionRequest(text=TEXT))
    finally:
        hook.remove()
    assert found["decoding"]["choices"] == seen["decoding"]["choices"]


def test_every_node_has_a_parent(seen: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in seen["decoding"]["nodes"]}
    won = [node for node in nodes.values() if node["on_best_path"]]
    assert [node["token"] for node in won] == [one["chosen"] for one in seen["decoding"]["choices"]]
    assert math.exp(sum(node["log_prob"] for node in won)) == pytest.approx(
        math.prod(one["p"] for one in seen["decoding"]["choices"]), rel=1e-3
    )
    assert all(nodes[one["node"]]["in_results"] for one in seen["decoding"]["results"])
    assert all(node["parent"] is None or nodes[node["parent"]]["expanded"] for node in nodes.values())


def test_forced_token_changes_the_rest(looker: TranslationInspector, seen: dict[str, Any]) -> None:
    first = seen["decoding"]["choices"][0]
    other = next(option["token"] for option in first["options"] if option["token"] != first["chosen"])
    forced = looker.inspect(InspectionRequest(text=TEXT, prefix=(other,)))
    assert forced["decoding"]["forced"] == 1
    assert forced["decoding"]["choices"][0]["chosen"] == other
    assert forced["sides"]["target"]["tokens"][0] != seen["sides"]["target"]["tokens"][0]


def test_masked_parts_equal_a_masked_model(looker: TranslationInspector, seen: dict[str, Any]) -> None:
    parts = (ModelPart("decoder.blocks.0.cross_attn", 1), ModelPart("decoder.blocks.1"))
    quiet = looker.inspect(InspectionRequest(text=TEXT, masked_parts=parts))
    assert {layer["path"]: layer["masked_heads"] for layer in quiet["layers"] if layer["masked_heads"]} == {
        "decoder.blocks.0.cross_attn": [1],
        "decoder.blocks.1.self_attn": [0, 1, 2],
        "decoder.blocks.1.cross_attn": [0, 1, 2],
    }
    with mask_parts(looker.model, parts):
        (wanted,) = translator().translate([TEXT])
    assert quiet["sides"]["target"]["text"] == wanted.text != seen["sides"]["target"]["text"]
    assert looker.inspect(InspectionRequest(text=TEXT))["sides"] == seen["sides"], "afterwards it is as before"


def test_given_translation_is_used(looker: TranslationInspector) -> None:
    found = looker.inspect(InspectionRequest(text=TEXT, target="Hallo  Welt"))
    assert found["decoding"]["given"] is True
    forced = translator().model, translator().tokenizer, [TEXT], ["Hallo  Welt"]
    assert found["decoding"]["results"][0]["log_prob"] == pytest.approx(force(*forced)[0].log_prob, rel=1e-3)
    ids = tokenizer().encode_target(["Hallo  Welt"])[0]
    assert [token["piece"] for token in found["sides"]["target"]["tokens"]] == tokenizer().target.to_pieces(ids)
    assert found["sides"]["decoder_input"]["tokens"][0]["special"] == "start"


def test_layer_filter(looker: TranslationInspector) -> None:
    found = looker.inspect(InspectionRequest(text=TEXT), LayerFilter(kind="cross", layers=(1,)))
    assert [layer["path"] for layer in found["layers"]] == ["decoder.blocks.1.cross_attn"]


def test_long_text_fits_the_page_budget(
    looker: TranslationInspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_DENSE_WEIGHTS", 2_000)
    monkeypatch.setattr(base, "MAX_SPARSE_WEIGHTS", 2_000)
    monkeypatch.setattr(base, "MAX_QKV_VALUES", 2_000)
    found = looker.inspect(InspectionRequest(text=" ".join([TEXT] * 4), target=" ".join([TEXT] * 4)))
    assert all("sparse" in layer and "q" not in layer for layer in found["layers"])
    most = found["layers"][0]["sparse"]["indices"]["shape"][-1]
    assert most == base.MIN_WEIGHTS_PER_ROW
    json.dumps(found, allow_nan=False)


def test_two_thousand_tokens(looker: TranslationInspector) -> None:
    text = " ".join(["two dogs"] * 290)
    found = looker.inspect(InspectionRequest(text=text, target=text))
    counts = [len(side["tokens"]) for side in found["sides"].values()]
    assert min(counts) > 2_000
    assert len(render_page(found).encode()) < 5_000_000


def test_page_budget(seen: dict[str, Any]) -> None:
    sides = Trace.from_document(seen).sides
    layers = dict.fromkeys(Trace.from_document(seen), (3, 8))
    assert PageBudget.from_layers(layers, sides) == PageBudget(weights_per_row=None, include_qkv=True)
    assert PageBudget.from_layers({"decoder.blocks.0.cross_attn": (10_000_000, 8)}, sides).include_qkv is False


def test_any_script_is_displayed(looker: TranslationInspector) -> None:
    found = looker.inspect(InspectionRequest(text="שלום 日本語 \U0001f600", search=SearchOptions(max_length=3)))
    tokens = found["sides"]["source"]["tokens"]
    assert all(token["text"] or token["piece"] == "▁" for token in tokens)
    assert tokens[-1]["special"] == "end"
    assert {token["special"] for token in tokens if token["piece"].startswith("<0x")} == {"byte"}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"text": " \n"}, "must not be empty"),
        ({"text": "a", "prefix": (10**9,)}, "`prefix` must hold token ids from 0 to"),
        ({"text": "a", "prefix": (5,) * 200}, "`prefix` must be shorter than"),
        ({"text": "a", "prefix": (1,)}, "prefix"),
        ({"text": "a", "masked_parts": (ModelPart("decoder.blocks.9"),)}, "has no part 'decoder.blocks.9'"),
        ({"text": "a", "to": "fr"}, "has no tag for 'fr'"),
    ],
)
def test_invalid_requests_are_rejected(looker: TranslationInspector, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        looker.inspect(InspectionRequest(**asked))


def test_too_long_sentence_is_rejected() -> None:
    from dataclasses import replace

    from attent.decoding import Translator

    short = replace(STACK, positions=LearnedConfig(max_length=6))
    assert mirror_encoder(short).positions == short.positions
    looker = TranslationInspector(Translator(model(short), tokenizer()))
    with pytest.raises(InspectionError, match="the sentence must have at most 6 tokens"):
        looker.inspect(InspectionRequest(text=" ".join([TEXT] * 3)))
    with pytest.raises(InspectionError, match="the translation must have at most 6 tokens"):
        looker.inspect(InspectionRequest(text="a", target=" ".join([TEXT] * 3)))


def test_inspection_stops_when_cancelled(looker: TranslationInspector) -> None:
    with pytest.raises(SearchCancelled):
        looker.inspect(InspectionRequest(text=TEXT), should_stop=lambda: True)


def test_sentinels_in_the_source_are_filled() -> None:
    from attent.decoding import Translator
    from tests.decoding.encoder_models import sentencepiece, span_model

    pieces = sentencepiece(controls=("<extra_id_0>", "<extra_id_1>"))
    of_spans = TranslationInspector(Translator(span_model(pieces), pieces))
    found = of_spans.inspect(InspectionRequest(text="The <extra_id_0> sat on the [MASK]."))
    source, target = found["sides"]["source"], found["sides"]["target"]
    assert [token["piece"] for token in source["tokens"] if token["special"] == "mask"] == [
        "<extra_id_0>",
        "<extra_id_1>",
    ]
    assert (target["label"], target["text"]) == ("filled spans", "<extra_id_0> cat <extra_id_1> mat")
    assert found["decoding"]["results"][0]["text"] == target["text"]
    given = of_spans.inspect(InspectionRequest(text="The <extra_id_0> sat", target="<extra_id_0> dog"))["sides"][
        "target"
    ]
    assert [token["piece"] for token in given["tokens"]] == ["<extra_id_0>", "▁dog", "</s>"]
    assert of_spans.inspect(InspectionRequest(text="The cat"))["sides"]["target"]["label"] == "translation"
