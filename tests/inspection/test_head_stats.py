"""Head statistics: patterns of constructed weights are recognized, and values equal a plain Python computation."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attent.data.arrays import select_evenly
from attent.decoding.forced_decoding import encode_pairs
from attent.decoding.translator import Translator
from attent.inspection import head_stats as module
from attent.inspection import record
from attent.inspection.attention_trace import TraceSide, build_display_tokens, build_layer, pack_array
from attent.inspection.head_stats import (
    HEAD_STATS_FILE,
    HeadStats,
    HeadStatsReport,
    HeadValues,
    build_word_pair,
    is_punctuation,
    load_head_stats,
    measure_heads,
    measure_trace_heads,
)
from attent.models import Seq2Seq, shift_right
from attent.models.folder import write_side_settings
from attent.nn import get_attention_layers
from attent.settings import SettingsError
from attent.text.tokenizer import Tokenizer
from tests.inspection import toy_translator
from tests.inspection.documents import build_trace_document
from tests.text.corpus import lines, tokenizer

SOURCES, TARGETS = ([*side[:6], *side[40:44]] for side in lines())
PAIRS = list(zip(SOURCES, TARGETS, strict=True))
SENTENCE = ["▁The", "▁cat", ",", "▁the", "▁old", "▁cat", ".", "</s>"]


def side(pieces: list[str], starts: bool = False) -> dict[str, Any]:
    specials = {"</s>": "end", "<s>": "start", "<2de>": "tag"}
    tokens = [
        {"piece": p, "text": p.strip("▁"), "space": p.startswith("▁"), "special": specials.get(p)} for p in pieces
    ]
    return {"label": "text", "text": "", "language": None, "tokens": tokens}


def layer(
    weights: Tensor, kind: str = "self", causal: bool = False, sides: tuple[str, str] = ("a", "a")
) -> dict[str, Any]:
    return {
        "path": f"encoder.blocks.0.{'cross' if kind == 'cross' else 'measure_self'}",
        "kind": kind,
        "causal": causal,
        "queries": sides[0],
        "keys": sides[1],
        "weights": pack_array(weights, "float32"),
    }


def measure_self(weights: Tensor, pieces: list[str] = SENTENCE, causal: bool = False) -> HeadStats:
    (head,) = measure_trace_heads([layer(weights[None], causal=causal)], {"a": side(pieces)}).heads
    return head


def attend_to(positions: list[int], keys: int) -> Tensor:
    weights = torch.zeros(len(positions), keys)
    weights[range(len(positions)), positions] = 1
    return weights


# ---- constructed weights ---------------------------------------------------------------------------------------------


def test_previous_token_head() -> None:
    head = measure_self(attend_to([0, 0, 1, 2, 3, 4, 5, 6], 8))
    assert head.values.previous == 1
    assert (head.values.next, head.values.end, head.values.first) == (0, 0, 0)
    assert head.values.current == pytest.approx(1 / 8)  # the first token has no previous token
    assert head.values.entropy == 0
    assert head.values.normalized_entropy == 0
    assert head.values.confidence == 1
    assert head.description == "attends to the previous token (100%)"


def test_next_token_head() -> None:
    head = measure_self(attend_to([1, 2, 3, 4, 5, 6, 7, 7], 8))
    assert head.values.next == 1
    assert head.values.previous == 0
    assert head.values.end == 0  # queries whose next token is not the end
    assert head.description == "attends to the next token (100%)"


def test_end_token_head() -> None:
    head = measure_self(attend_to([7] * 8, 8))
    assert head.values.end == 1
    assert head.values.top_key == 1
    assert head.values.confidence == 0  # the end token is excluded
    assert head.description == "attends to the end token (100%)"


def test_uniform_head() -> None:
    head = measure_self(torch.full((8, 8), 1 / 8))
    assert head.values.entropy == pytest.approx(3)
    assert head.values.normalized_entropy == pytest.approx(1)
    assert head.values.current == pytest.approx(1 / 8)
    assert head.values.punctuation == pytest.approx((6 * 2 / 8 + 2 * 1 / 8) / 8)  # two, without the query itself
    assert head.values.same_token == pytest.approx(1 / 8)  # the two cats; "The" differs from "the"
    assert head.description == "uniform attention (3.0 bits of 3.0)"


def test_same_token_head() -> None:
    weights = torch.full((8, 8), 1 / 8)
    weights[1], weights[5] = attend_to([5], 8)[0], attend_to([1], 8)[0]
    head = measure_self(weights)
    assert head.values.same_token == 1
    assert head.description == "attends to other occurrences of the token (100% if there are any)"


def test_end_and_punctuation_head() -> None:
    weights = torch.zeros(8, 8)
    weights[:, 6], weights[:, 7] = 0.45, 0.45
    weights[:, 0] += 0.1
    assert (
        measure_self(weights).description == "attends to the end token and punctuation (45% + 39%)"
    )  # the full stop itself attends to a comma


def test_local_head() -> None:
    weights = torch.eye(8) * 0.3 + torch.eye(8).roll(1, 1) * 0.3 + torch.eye(8).roll(-1, 1) * 0.3 + 0.1 / 8
    assert measure_self(weights).description.startswith("local: the previous token 31%, itself 31%, the next token 31%")


def test_one_key_for_all_queries_differs_from_one_key_per_query() -> None:
    assert measure_self(attend_to([4] * 8, 8)).description == "attends to one token from every position (100%)"
    scattered = measure_self(attend_to([4, 3, 0, 1, 2, 0, 3, 2], 8))
    assert scattered.description == "attends to one token by content, not position (0.0 bits)"


def test_diffuse_head() -> None:
    even = 0.35 * torch.eye(8).roll(3, 1) + 0.65 / 8
    assert measure_self(even).description == "diffuse attention (2.6 bits of 3.0)"


def test_mixed_head() -> None:
    weights = torch.zeros(8, 8)
    weights[:, 0], weights[:, 3], weights[:, 7] = 0.3, 0.4, 0.3
    says = measure_self(weights).description
    assert says.startswith("mixed: the first token 30%, the end token 30%")
    assert says.endswith("1.6 bits of 3.0")


def test_first_decoder_step_is_ignored() -> None:
    pieces = ["<s>", "▁a", "▁b", "▁c"]
    weights = attend_to([0, 0, 1, 2], 4)
    head = measure_self(weights, pieces, causal=True)
    assert head.values.previous == 1
    assert head.values.current == 0  # the first step has no other key
    assert head.values.next is None
    assert head.values.end is None
    assert head.values.first == 0
    assert head.description == "attends to the previous token (100%)"
    two = {"a": side(pieces), "b": side(pieces)}  # with cross-attention, steps are named by decoder input
    (beside,) = measure_trace_heads([layer(weights[None], causal=True)], two).heads
    assert beside.description == "attends to the previous input token (100%)"
    weights[0] = 0.0
    assert measure_self(weights, pieces, causal=True).values == head.values
    assert measure_self(attend_to([0] * 4, 4), pieces, causal=True).description == "attends to the first token (100%)"


def test_maximum_entropy_depends_on_visible_keys() -> None:
    even = torch.ones(4, 4).tril()
    head = measure_self(even / even.sum(-1, keepdim=True), ["<s>", "▁a", "▁b", "▁c"], causal=True)
    assert head.values.entropy == pytest.approx((1 + math.log2(3) + 2) / 3)
    assert head.values.normalized_entropy == pytest.approx(1)


# ---- cross-attention -------------------------------------------------------------------------------------------------


def cross(weights: Tensor, target: list[str], source: list[str]) -> HeadStats:
    sides = {"t": side(target), "s": side(source)}
    (head,) = measure_trace_heads([layer(weights[None], "cross", sides=("t", "s"))], sides).heads
    return head


SOURCE, TARGET = ["▁a", "▁man", "▁walk", "s", "</s>"], ["▁ein", "▁Mann", "▁geht", "</s>"]


def test_alignment_on_output() -> None:
    head = cross(attend_to([0, 1, 3, 4], 5), TARGET, SOURCE)
    assert head.values.aligned_on_output == 1
    assert head.values.aligned_on_input == 1  # the end token makes no link
    assert head.values.alignment == 1
    assert head.values.current is head.values.previous is None
    assert head.description == "aligns when the word is the output (100% mutual links)"


def test_alignment_on_input() -> None:
    head = cross(attend_to([1, 0, 1, 2], 5), TARGET, SOURCE)
    assert head.values.aligned_on_output == pytest.approx(2 / 3)
    assert head.values.aligned_on_input == 1
    assert head.description == "aligns when the word is the input (100% mutual links)"


def test_diffuse_links_align_loosely() -> None:
    faint = 0.46 * attend_to([0, 1, 3, 1], 5) + 0.44 * attend_to([4] * 4, 5) + 0.1 / 5
    head = cross(faint, TARGET, SOURCE)
    assert head.values.alignment == 1
    assert head.description == "aligns loosely (100% mutual links)"


def test_end_token_head_that_aligns_otherwise() -> None:
    weights = 0.45 * attend_to([0, 1, 3, 1], 5) + 0.55 * attend_to([4] * 4, 5)
    says = cross(weights, TARGET, SOURCE).description
    assert says.startswith("attends to the end token (")
    assert says.endswith("; otherwise aligns loosely (100% mutual links)")


def test_truncated_translation_has_no_last_input() -> None:
    head = cross(attend_to([0, 1, 3], 5), TARGET[:-1], SOURCE)
    assert head.values.aligned_on_output == 1
    assert head.values.aligned_on_input == 1
    head = cross(attend_to([4, 1, 0], 5), TARGET[:-1], SOURCE)
    assert (head.values.aligned_on_output, head.values.aligned_on_input) == (1, 1)


def test_copied_tokens_are_the_same_token() -> None:
    head = cross(attend_to([1, 0, 2], 3), ["▁Anna", "▁7", "</s>"], ["▁7", "▁Anna", "</s>"])
    assert head.values.same_token == 1


# ---- a model ---------------------------------------------------------------------------------------------------------


def model() -> Seq2Seq:
    return toy_translator.model()


def measure_in_python(
    of: Tokenizer, toy: Seq2Seq, sources: list[str], targets: list[str]
) -> dict[tuple[str, int], dict[str, float]]:
    """Compute the same values with Python loops."""
    document: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in encode_pairs(toy, of, sources, targets):
        target = torch.tensor([row.target])
        read = shift_right(target, toy.config.start_id)[0].tolist()
        with record(toy) as trace, torch.no_grad():
            toy(torch.tensor([row.source]), torch.tensor([read]))
        for path, (weights,) in trace.items():
            kind = ("cross" if path.endswith("cross_attn") else "own", path.startswith("decoder"))
            keys = read if kind == ("own", True) else row.source
            queries = row.target if kind[0] == "cross" else keys
            for head, table in enumerate(weights[0].tolist()):
                values = document.setdefault((path, head), {})
                for q, line in enumerate(table):
                    visible = range(q + 1) if kind == ("own", True) else range(len(keys))
                    if len(visible) > 1:
                        look(values, of, queries, keys, q, line, visible, kind)
    return {key: averaged(values) for key, values in document.items()}


def look(
    values: dict[str, list[float]],
    of: Tokenizer,
    queries: list[int],
    keys: list[int],
    q: int,
    line: list[float],
    visible: range,
    kind: tuple[str, bool],
) -> None:
    vocabulary = of.source
    pieces = vocabulary.to_pieces(keys)
    special = {vocabulary.end, vocabulary.start, vocabulary.pad, vocabulary.unknown}
    reading = kind == ("own", True)
    same_sort = kind[0] == "own"
    share: dict[str, list[int]] = {
        "end": [k for k in visible if keys[k] == vocabulary.end and not (same_sort and k in (q, q + 1))],
        "punctuation": [
            k for k in visible if pieces[k].strip("▁") in (".", ",", ":", "-") and not (same_sort and k == q)
        ],
        "same_token": [k for k in visible if keys[k] == queries[q] not in special and not (same_sort and k == q)],
        "first": [0] if q > 1 or not same_sort else [],
    }
    if reading:
        share["end"] = []
    if same_sort:
        share["current"] = [q]
        share["previous"] = [q - 1] if q > 1 else []
        share["next"] = [q + 1] if q + 1 in visible and keys[q + 1] != vocabulary.end else []
    for key, positions in share.items():
        if positions:
            values.setdefault(key, []).append(sum(line[k] for k in positions))
    values.setdefault("entropy", []).append(-sum(line[k] * math.log2(line[k]) for k in visible if line[k]))
    values.setdefault("possible", []).append(math.log2(len(visible)))
    values.setdefault("confidence", []).append(max(line[k] for k in visible if keys[k] != vocabulary.end or reading))


def averaged(values: dict[str, list[float]]) -> dict[str, float]:
    means = {key: sum(subset) / len(subset) for key, subset in values.items()}
    possible = means.pop("possible")
    return means | {"normalized_entropy": means["entropy"] / possible}


def test_measured_values_equal_a_plain_python_loop() -> None:
    toy, of = model(), tokenizer()
    expected = measure_in_python(of, toy, SOURCES, TARGETS)
    found = measure_heads(Translator(toy, of), PAIRS, batch_tokens=100)
    assert [(head.path, head.head) for head in found.heads] == [
        (path, head) for path, item in get_attention_layers(toy).items() for head in range(item.heads)
    ]
    for head in found.heads:
        for key, value in expected[head.path, head.head].items():
            assert getattr(head.values, key) == pytest.approx(value, abs=2e-5), (head.path, key)
        others = {"top_key", "alignment", "aligned_on_output", "aligned_on_input"} | expected[
            head.path, head.head
        ].keys()
        assert all(value is None for key, value in asdict(head.values).items() if key not in others)


def test_batching_and_padding_change_nothing() -> None:
    toy, of = model(), tokenizer()
    together = measure_heads(Translator(toy, of), PAIRS)
    longest = max(len(ids) for row in encode_pairs(toy, of, SOURCES, TARGETS) for ids in (row.source, row.target))
    alone = measure_heads(Translator(toy, of), PAIRS, batch_tokens=longest)
    backwards = measure_heads(Translator(toy, of), PAIRS[::-1])
    for entry, other, third in zip(together.heads, alone.heads, backwards.heads, strict=True):
        for key, value in asdict(entry.values).items():
            assert value == pytest.approx(getattr(other.values, key), abs=2e-5)
            assert value == pytest.approx(getattr(third.values, key), abs=2e-5)


def test_one_pair_equals_its_document() -> None:
    toy, of = model(), tokenizer()
    (row,) = encode_pairs(toy, of, SOURCES[:1], TARGETS[:1])
    read = shift_right(torch.tensor([row.target]), toy.config.start_id)
    sides = {
        "source": TraceSide(label="source", tokens=build_display_tokens(of.source, row.source)),
        "decoder_input": TraceSide(
            label="read", tokens=build_display_tokens(of.target, read[0].tolist(), is_decoder_input=True)
        ),
        "target": TraceSide(label="target", tokens=build_display_tokens(of.target, row.target)),
    }
    with record(toy, qkv=True) as trace, torch.no_grad():
        toy(torch.tensor([row.source]), read)
    document = build_trace_document(trace, sides)
    found = measure_trace_heads(document["layers"], document["sides"]).to_document()
    expected = measure_heads(Translator(toy, of), PAIRS[:1]).to_document()
    assert found["columns"] == expected["columns"]
    assert (found["sentences"], found["dataset"]) == (1, "this input")
    for entry, other in zip(found["heads"], expected["heads"], strict=True):
        assert (entry["path"], entry["head"]) == (other["path"], other["head"])
        assert entry["values"] == pytest.approx(other["values"], abs=3e-4)
    json.dumps(found, allow_nan=False)


def test_observers_are_removed() -> None:
    toy = model().train()
    measure_heads(Translator(toy, tokenizer()), PAIRS, batch_tokens=60)
    assert toy.training
    assert not any(layer.observers for layer in get_attention_layers(toy).values())


def test_pairs_are_sampled_evenly() -> None:
    toy, of = model(), tokenizer()
    subset = measure_heads(Translator(toy, of), PAIRS, max_pairs=5)
    assert subset.sentences == 5
    assert subset == measure_heads(Translator(toy, of), PAIRS[::2])


def test_language_tag_is_not_a_word() -> None:
    toy, of = model(), tokenizer()
    plain, tagged = (measure_heads(Translator(toy, of), PAIRS, to=to) for to in (None, "de"))
    assert plain.heads[0].values.first != tagged.heads[0].values.first
    assert tagged.heads[0].values.same_token is not None


def test_invalid_calls_are_rejected() -> None:
    toy, of = model(), tokenizer()
    with pytest.raises(ValueError, match="at least one; read a file"):
        measure_heads(Translator(toy, of), [])
    with pytest.raises(ValueError, match="`max_pairs` must be 1 or more, but is 0"):
        measure_heads(Translator(toy, of), PAIRS, max_pairs=0)


# ---- documents -------------------------------------------------------------------------------------------------------


def test_sparse_weights_suffice_for_long_texts() -> None:
    weights = torch.rand(2, 8, 8).pow(9)
    weights /= weights.sum(-1, keepdim=True)
    sides = {"a": side(SENTENCE)}
    whole = build_layer("encoder.blocks.0.self_attn", ("a", "a"), weights, causal=False, scale=1.0)
    subset = build_layer("encoder.blocks.0.self_attn", ("a", "a"), weights, causal=False, scale=1.0, top_k=7)
    assert "sparse" in subset
    for entry, other in zip(
        measure_trace_heads([whole], sides).heads, measure_trace_heads([subset], sides).heads, strict=True
    ):
        assert entry.values.previous == pytest.approx(other.values.previous, abs=0.01)
        assert entry.values.entropy == pytest.approx(other.values.entropy, abs=0.05)


def test_queries_of_very_long_texts_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 6)
    monkeypatch.setattr(module, "MAX_QUERY_ROWS", 4)
    head = measure_self(attend_to([0, 0, 1, 2, 3, 4, 5, 6], 8))  # 0, 2, 4 and 6 are asked
    assert head.values.previous == 1
    assert cross(attend_to([4] * 8, 5), SENTENCE, SOURCE).values.alignment is None


def test_layers_without_heads_and_empty_texts() -> None:
    assert measure_trace_heads([layer(torch.zeros(0, 8, 8))], {"a": side(SENTENCE)}).heads == ()
    assert measure_trace_heads([], {}).to_document() == {
        "sentences": 1,
        "dataset": "this input",
        "columns": [],
        "heads": [],
    }
    (head,) = measure_trace_heads([layer(torch.ones(1, 1, 1))], {"a": side(["</s>"])}).heads
    assert head.values == HeadValues()
    assert head.description == "mixed: no choice of keys"
    (head,) = measure_trace_heads([layer(torch.zeros(1, 0, 0))], {"a": side([])}).heads
    assert head.values == HeadValues()


def test_patches_are_not_equal_tokens() -> None:
    pieces = ["", "", "", ""]
    assert measure_self(torch.full((4, 4), 1 / 4), pieces).values.same_token is None


def test_document_has_the_columns_with_values() -> None:
    packed = layer(torch.full((1, 8, 8), 1 / 8))
    found = measure_trace_heads([packed], {"a": side(SENTENCE)}).to_document()
    keys = [column["key"] for column in found["columns"]]
    assert "previous" in keys
    assert "alignment" not in keys
    assert list(found["heads"][0]["values"]) == keys
    assert all(set(column) == {"key", "label", "unit", "help"} for column in found["columns"])
    labels = {column["key"]: (column["label"], column["unit"]) for column in found["columns"]}
    assert labels["previous"] == ("previous", "share")
    assert labels["normalized_entropy"] == ("normalized entropy", "share")
    assert labels["entropy"] == ("entropy", "bits")


@pytest.mark.parametrize("piece", [".", "▁,", "▁(", "--", "。", "«", "▁$", "Ġ!"])
def test_is_punctuation(piece: str) -> None:
    assert is_punctuation(piece)


@pytest.mark.parametrize("piece", ["", "▁", "▁a", "a.", "7", "<0xE2>", "日", "'s", "</s>"])
def test_is_not_punctuation(piece: str) -> None:
    assert not is_punctuation(piece)


# ---- storage ---------------------------------------------------------------------------------------------------------


def test_folder_stores_statistics_of_these_weights(tmp_path: Path) -> None:
    toy = model()
    found = measure_heads(Translator(toy, tokenizer()), PAIRS, dataset="a few pairs")
    assert load_head_stats(tmp_path, toy) is None
    write_side_settings(tmp_path, module.HEAD_STATS_FILE, found)
    assert load_head_stats(tmp_path, toy) == found
    with torch.no_grad():
        toy.encoder.blocks[0].self_attn.query.weight[0, 0] += 1
    assert load_head_stats(tmp_path, toy) is None


def test_damaged_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / HEAD_STATS_FILE).write_text('{"sentences": "many"}')
    with pytest.raises(SettingsError, match=r"heads\.json: `sentences` must be an integer"):
        load_head_stats(tmp_path, model())


def test_document_is_rounded() -> None:
    values = HeadValues(previous=1 / 3)
    found = HeadStatsReport(
        sentences=2, dataset="them", heads=(HeadStats(path="a.own", head=0, description="", values=values),)
    ).to_document()
    assert found["heads"] == [{"path": "a.own", "head": 0, "description": "", "values": {"previous": 0.3333}}]


def test_copying_head_without_alignable_words() -> None:
    values = module.HeadValues(same_token=0.8, entropy=0.3, normalized_entropy=0.1, confidence=0.9)
    assert (
        module.describe_cross_attention(values)
        == "copies: attends to the output token in the source (80% if it occurs)"
    )
    assert "copies" not in module.describe_cross_attention(replace(values, alignment=0.5))
    assert "copies" not in module.describe_cross_attention(replace(values, same_token=0.4))


def test_one_key_for_a_sentence_is_described_however_sharp() -> None:
    values = module.HeadValues(current=0.08, next=0.08, top_key=0.71, entropy=0.6, normalized_entropy=0.16)
    assert module.describe_self_attention(values) == "attends to one token from every position (71%)"


def test_single_words_are_not_aligned() -> None:
    words = module.TokenWordMap(
        source_word_ids=[0, 1, None], target_word_ids=[0, 0], source_word_count=2, target_word_count=1
    )
    assert module.count_word_links(torch.rand(2, 3, 3), words, 0).sum() == 0


@pytest.mark.parametrize(
    ("values", "description"),
    [
        ({"current": 0.5}, "attends to itself (50%)"),
        ({"current": 0.3, "previous": 0.3}, "local: the previous token 30%, itself 30%"),
        ({"current": 0.3, "previous": 0.29}, "mixed: itself 30%, the previous token 29%"),
        ({"end": 0.35, "punctuation": 0.25}, "attends to the end token and punctuation (35% + 25%)"),
        ({"end": 0.35, "punctuation": 0.24}, "mixed: the end token 35%, punctuation 24%"),
        ({"same_token": 0.5, "current": 0.4}, "attends to other occurrences of the token (50% if there are any)"),
        ({"same_token": 0.5, "current": 0.5}, "attends to itself (50%)"),
        ({"normalized_entropy": 0.9, "entropy": 1.8}, "uniform attention (1.8 bits of 2.0)"),
        ({"normalized_entropy": 0.8, "entropy": 1.6}, "diffuse attention (1.6 bits of 2.0)"),
        ({"normalized_entropy": 0.79, "entropy": 1.58}, "mixed: 1.6 bits of 2.0"),
        ({"top_key": 0.5}, "attends to one token from every position (50%)"),
        (
            {"normalized_entropy": 0.15, "entropy": 0.3, "top_key": 0.49},
            "attends to one token by content, not position (0.3 bits of 2.0)",
        ),
        ({"normalized_entropy": 0.16, "entropy": 0.32}, "mixed: 0.3 bits of 2.0"),
        ({"first": 0.33, "end": 0.23, "entropy": 1.0}, "mixed: the first token 33%, the end token 23%, 1.0 bits"),
        ({"first": 0.32, "entropy": 1.0}, "mixed: the first token 32%, 1.0 bits"),
        ({}, "mixed: no choice of keys"),
    ],
)
def test_descriptions_of_self_attention_at_their_limits(values: dict[str, float], description: str) -> None:
    assert module.describe_self_attention(HeadValues(**values)) == description


@pytest.mark.parametrize(
    ("values", "description"),
    [
        (
            {"alignment": 0.7, "aligned_on_output": 0.7, "confidence": 0.5},
            "aligns when the word is the output (70% mutual links)",
        ),
        (
            {"alignment": 0.7, "aligned_on_output": 0.1, "confidence": 0.5},
            "aligns when the word is the input (70% mutual links)",
        ),
        ({"alignment": 0.7, "confidence": 0.49}, "aligns loosely (70% mutual links)"),
        ({"alignment": 0.69, "confidence": 0.9}, "aligns loosely (69% mutual links)"),
        ({"alignment": 0.6}, "aligns loosely (60% mutual links)"),
        ({"alignment": 0.59, "entropy": 1.0}, "mixed: 59% mutual links, 1.0 bits"),
        ({"alignment": 0.6, "end": 0.5}, "attends to the end token (50%); otherwise aligns loosely (60% mutual links)"),
        ({"alignment": 0.59, "end": 0.5}, "attends to the end token (50%)"),
        ({"same_token": 0.5}, "copies: attends to the output token in the source (50% if it occurs)"),
        ({"same_token": 0.49, "entropy": 1.0}, "mixed: 1.0 bits"),
        ({"alignment": 0.6, "normalized_entropy": 0.8, "entropy": 1.6}, "diffuse attention (1.6 bits of 2.0)"),
    ],
)
def test_descriptions_of_cross_attention_at_their_limits(values: dict[str, float], description: str) -> None:
    assert module.describe_cross_attention(HeadValues(**values)) == description


def test_samples_are_evenly_spaced() -> None:
    assert select_evenly(range(10), 10) == list(range(10))
    assert select_evenly(range(10), 4) == [0, 2, 5, 7]
    assert select_evenly("abc", 9) == ["a", "b", "c"]
    assert select_evenly("", 1) == []


def test_texts_longer_than_the_limit_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, of = model(), tokenizer()
    monkeypatch.setattr(module, "MAX_TOKENS", 6)
    found = measure_heads(Translator(toy, of), PAIRS[:1])
    cut = measure_heads(Translator(toy, of), PAIRS[:1], batch_tokens=6)
    monkeypatch.undo()
    whole = measure_heads(Translator(toy, of), PAIRS[:1])
    assert found.heads == cut.heads != whole.heads


def test_single_words_have_no_links() -> None:
    words = module.TokenWordMap(
        source_word_ids=[0, 1, 2, None], target_word_ids=[0, 0], source_word_count=3, target_word_count=1
    )
    assert module.count_word_links(torch.rand(5, 3, 4), words, 0).tolist() == [[0.0, 0.0]] * 5
    assert module.count_word_links(torch.rand(5, 3, 4), replace(words, target_word_count=2), 0)[:, 1].min() > 0


def test_a_pair_without_words_has_no_words() -> None:
    special = [{"text": "", "special": "end"}]
    pair = build_word_pair(special, special)
    assert (pair.source_word_count, pair.target_word_count) == (0, 0)
