"""Pruned models equal masked ones in every configuration, save, load and export; head selection."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import attent
from attent.decoding.engines.ctranslate2 import CTranslate2Engine
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.inspection import record
from attent.inspection.ablate import Ablation, AblationConditions, AblationEffect, ModelPart, list_parts, mask_heads
from attent.inspection.ablation_run import PruneSelection, prune_heads, rank_heads, select_heads
from attent.interop import ctranslate2, marian
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.models.pruning import restore_heads
from attent.nn import AlibiConfig, Packing, StackConfig, get_attention_layers, set_backend
from tests.laws.helpers import assert_close, parametrize_all, unpad
from tests.laws.models import TRANSFORMERS, make_seq2seq, pairs

CPU = torch.device("cpu")
STACK = StackConfig(layers=2, width=16, heads=4, ffn_width=24, dropout=0.0)
PLAIN = Seq2SeqConfig(vocab=19, encoder=STACK, decoder=mirror_encoder(STACK))


def own_keys(stack: StackConfig) -> StackConfig:
    return replace(stack, kv_heads=None)


MODELS = {
    name.replace("-grouped", "").replace("-onekey", ""): replace(
        config, encoder=own_keys(config.encoder), decoder=own_keys(config.decoder)
    )
    for name, config in TRANSFORMERS.items()
}
every_model = parametrize_all("config", MODELS)


def some_heads(model: Seq2Seq) -> list[ModelPart]:
    """Half of the heads, different ones in each layer, and all heads of one layer of each kind."""
    heads = list_parts(model, "head")
    chosen = set(Random(3).sample(heads, len(heads) // 2))
    emptied = ("encoder.blocks.1.self_attn", "decoder.blocks.0.self_attn", "decoder.blocks.1.cross_attn")
    return [part for part in heads if part in chosen or part.path in emptied]


def step_by_step(model: Seq2Seq, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
    cache = model.init_decoder_state(source, lengths, capacity=target.shape[1])
    return torch.cat([model.step(target[:, i : i + 1], cache) for i in range(target.shape[1])], 1)


# --- equality ---------------------------------------------------------------------------------------------------------


@every_model
def test_pruned_model_equals_the_masked_model(config: Seq2SeqConfig) -> None:
    model, batch = make_seq2seq(config, CPU), pairs(CPU).batch()
    heads = some_heads(model)
    with torch.no_grad():
        whole = model(*batch)
        with mask_heads(model, *heads):
            expected = model(*batch)
        pruned = prune_heads(model, heads)
        lengths = batch[3]
        assert_close(unpad(pruned(*batch), lengths), unpad(expected, lengths))
        assert_close(unpad(restore_heads(pruned)(*batch), lengths), unpad(expected, lengths))
        assert_close(model(*batch), whole)  # the original is unchanged
    assert (
        float((unpad(whole, lengths) - unpad(expected, lengths)).abs().max()) > 1e-3
    )  # so that a difference would show


@every_model
def test_stepwise_backends_and_observers_agree(config: Seq2SeqConfig) -> None:
    model = make_seq2seq(config, CPU)
    source, target, source_lengths, _ = pairs(CPU, target=(4, 4, 4, 4)).batch()
    pruned = prune_heads(model, some_heads(model))
    with torch.no_grad():
        expected = pruned(source, target, source_lengths)
        assert_close(step_by_step(pruned, source, target, source_lengths), expected)
        with record(pruned) as trace:
            assert_close(pruned(source, target, source_lengths), expected)
        set_backend(pruned, "explicit")
        assert_close(pruned(source, target, source_lengths), expected)
    shapes = {path: weights[0].shape[1] for path, weights in trace.items()}
    assert shapes == {path: layer.heads for path, layer in get_attention_layers(pruned).items()}
    assert 0 in shapes.values()


def test_packed_rows_equal_separate_rows() -> None:
    model = make_seq2seq(replace(PLAIN, encoder=replace(STACK, positions=AlibiConfig())), CPU)
    pruned = prune_heads(model, some_heads(model))
    sources, targets = [torch.arange(3, 3 + n)[None] for n in (4, 2)], [torch.arange(5, 5 + n)[None] for n in (3, 5)]
    sides = [torch.cat(subset, 1) for subset in (sources, targets)]
    packing = tuple(Packing.from_lengths([[item.shape[1] for item in subset]]) for subset in (sources, targets))
    with torch.no_grad():
        together = pruned(*sides, packing=packing)
        alone = torch.cat([pruned(source, target) for source, target in zip(sources, targets, strict=True)], 1)
    assert_close(together, alone)


def test_all_heads_can_be_pruned() -> None:
    model, batch = make_seq2seq(PLAIN, CPU), pairs(CPU).batch()
    heads = list_parts(model, "head")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # torch warns about empty parameters
        pruned = prune_heads(model, heads)
        with mask_heads(model, *heads):
            assert_close(pruned(*batch), model(*batch))


def test_weights_are_removed() -> None:
    model = make_seq2seq(PLAIN, CPU)
    pruned = prune_heads(
        model, [ModelPart("decoder.blocks.0.cross_attn", 1), ModelPart("encoder.blocks.1.self_attn", 0)]
    )
    a_head = 3 * (4 * 16 + 4) + 4 * 16  # W^Q, W^K, W^V with their biases, W^O
    before, after = (sum(p.numel() for p in item.parameters()) for item in (model, pruned))
    assert before - after == 2 * a_head


def test_pruned_model_can_be_pruned_again() -> None:
    model = make_seq2seq(replace(PLAIN, encoder=replace(STACK, positions=AlibiConfig())), CPU)
    batch = pairs(CPU).batch()
    once = prune_heads(model, [ModelPart("encoder.blocks.0.self_attn", 1)])
    twice = prune_heads(
        once, [ModelPart("encoder.blocks.0.self_attn", 1), ModelPart("encoder.blocks.1.self_attn", 3)]
    )  # originally head 2
    assert twice.config.encoder.remaining_heads == (((0, 3),), ((0, 1, 2),))
    assert twice.config.decoder.remaining_heads is None
    removed = [
        ModelPart("encoder.blocks.0.self_attn", 1),
        ModelPart("encoder.blocks.0.self_attn", 2),
        ModelPart("encoder.blocks.1.self_attn", 3),
    ]
    with torch.no_grad(), mask_heads(model, *removed):
        assert_close(twice(*batch), model(*batch))


def test_pruning_nothing_changes_nothing() -> None:
    model = make_seq2seq(PLAIN, CPU)
    assert prune_heads(model, []).config == model.config
    assert restore_heads(model) is model


def test_pruned_model_trains() -> None:
    model = make_seq2seq(PLAIN, CPU)
    pruned = prune_heads(model, some_heads(model)).train()
    pruned(*pairs(CPU).batch()).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in pruned.parameters())
    before = [parameter.clone() for parameter in model.parameters()]
    torch.optim.SGD(pruned.parameters(), lr=1.0).step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))  # a copy


def test_pruned_model_compiles() -> None:
    model = make_seq2seq(PLAIN, CPU)
    pruned, batch = prune_heads(model, some_heads(model)), pairs(CPU).batch()
    with torch.no_grad():
        assert_close(torch.compile(pruned, backend="eager", fullgraph=True)(*batch), pruned(*batch))


# --- storage and export -----------------------------------------------------------------------------------------------


def test_save_and_load_is_bit_identical(tmp_path: Path) -> None:
    model = make_seq2seq(PLAIN, CPU)
    pruned = prune_heads(model, list_parts(model, "head")[:9])
    pruned.save(tmp_path / "model")
    loaded = attent.load(tmp_path / "model")
    assert loaded.config == pruned.config
    assert all(torch.equal(item, loaded.state_dict()[name]) for name, item in pruned.state_dict().items())


def test_hugging_face_export_has_zeros(tmp_path: Path) -> None:
    model = make_seq2seq(replace(PLAIN, decoder=mirror_encoder(STACK)), CPU).float()
    pruned, batch = prune_heads(model, some_heads(model)), pairs(CPU).batch()
    marian.save(pruned, tmp_path / "hf")
    loaded = attent.load(tmp_path / "hf")
    assert loaded.config.encoder.remaining_heads is None
    with torch.no_grad():
        assert_close(loaded(*batch), pruned(*batch))


def test_ctranslate2_translates_the_same(tmp_path: Path) -> None:
    """In float32: in int8, masked heads still affect the quantization scales."""
    pytest.importorskip("ctranslate2")
    model = make_seq2seq(PLAIN, CPU).float()
    heads = some_heads(model)
    whole, pruned = found_by(model, tmp_path / "whole"), found_by(prune_heads(model, heads), tmp_path / "pruned")
    with mask_heads(model, *heads):
        masked = found_by(model, tmp_path / "silent")
    assert [item.token_ids for item in pruned] == [item.token_ids for item in masked]
    assert [item.score for item in pruned] == pytest.approx([item.score for item in masked], abs=1e-4)
    assert [item.token_ids for item in pruned] != [item.token_ids for item in whole]


def found_by(model: Seq2Seq, folder: Path) -> list[Hypothesis]:
    engine = CTranslate2Engine(model, None, use_cache=False, threads=1, compute_type="float32")
    jobs = [SearchRequest(source_ids=[3 + i, 7, 4, 2], max_length=12) for i in range(6)]
    hypotheses = dict(engine.search(jobs, SearchOptions()))
    return [hypotheses[position][0] for position in range(len(jobs))]


def test_old_conversion_is_not_reused() -> None:
    pytest.importorskip("ctranslate2")
    model = make_seq2seq(PLAIN, CPU).float()
    pruned = prune_heads(model, list_parts(model, "head")[:1])
    assert ctranslate2.compute_fingerprint(model, None, "int8", []) != ctranslate2.compute_fingerprint(
        pruned, None, "int8", []
    )


# --- errors ----------------------------------------------------------------------------------------------------------


def test_grouped_query_heads_cannot_be_pruned() -> None:
    grouped = replace(STACK, kv_heads=2)
    model = Seq2Seq(replace(PLAIN, encoder=grouped))
    with pytest.raises(ValueError, match="4 heads and 2 KV heads"):
        prune_heads(model, [ModelPart("encoder.blocks.0.self_attn", 0)])
    assert (
        prune_heads(model, [ModelPart("decoder.blocks.0.self_attn", 0)]).config.encoder.remaining_heads is None
    )  # the other stack can be pruned
    with pytest.raises(
        ValueError,
        match="and no grouped-query attention, but is",
    ):
        replace(grouped, remaining_heads=(((0,),), ((0,),)))


@pytest.mark.parametrize(
    ("part", "description"),
    [
        ("encoder.blocks.0", "must be a head"),
        ("encoder.blocks.0.feedforward", "must be a head"),
        ("encoder.blocks.0.self_attn", "must be a head"),
        ("encoder.blocks.0.self_attn:4", "has 4 heads, numbered from 0"),
        ("encoder.blocks.7.self_attn:0", "has no part"),
    ],
)
def test_parts_that_are_no_heads_are_rejected(part: str, description: str) -> None:
    with pytest.raises((ValueError, ValueError), match=description):
        prune_heads(Seq2Seq(PLAIN), [ModelPart.parse(part)])


@pytest.mark.parametrize(
    ("stored", "description"),
    [
        ((((0,),),), "2 layers of 1 lists"),
        ((((0,), (1,)), ((0,), (1,))), "2 layers of 1 lists"),
        ((((0, 4),), ((0,),)), "from 0 to 3"),
        ((((1, 0),), ((0,),)), "ascending order"),
        ((((1, 1),), ((0,),)), "distinct heads"),
        ((((-1,),), ((0,),)), "from 0 to 3"),
    ],
)
def test_invalid_remaining_heads_are_rejected(
    stored: tuple[tuple[tuple[int, ...], ...], ...], description: str
) -> None:
    with pytest.raises(ValueError, match=description):
        replace(STACK, remaining_heads=stored)


def test_pruned_encoder_with_a_full_decoder() -> None:
    assert mirror_encoder(replace(STACK, remaining_heads=(((0,),), ((),)))).remaining_heads is None


# --- selection --------------------------------------------------------------------------------------------------------


def ablation_of(changed: dict[str, int], bleu: float = 30.0) -> Ablation:
    conditions = AblationConditions(
        dataset="toy",
        pairs_digest="",
        sentences=1,
        to=None,
        search=SearchOptions(),
        engine="torch",
        signature="",
        weights_digest="",
    )
    effects = [
        AblationEffect(part=part, kind=ModelPart.parse(part).kind, bleu=29.9, loss=1.0, num_changed=count, p_value=0.5)
        for part, count in changed.items()
    ]
    return Ablation(conditions=conditions, bleu=bleu, loss=1.0, num_tokens=1, effects=tuple(effects))


HEADS = {f"encoder.blocks.{i // 4}.self_attn:{i % 4}": 5 * i % 8 for i in range(8)}


def test_heads_are_ranked_by_changed_translations() -> None:
    ablation = ablation_of(HEADS | {"encoder.blocks.0.self_attn": 0, "encoder.blocks.0": 0})
    assert [HEADS[str(part)] for part in rank_heads(ablation)] == list(range(8))
    costly = replace(ablation.effects[0], bleu=29.7)
    subset = replace(ablation, effects=(costly, *ablation.effects[1:]))
    assert [HEADS[str(part)] for part in rank_heads(subset, max_bleu_drop=0.2)] == list(range(1, 8))


@pytest.mark.parametrize("seed", range(12))
def test_selected_heads_are_maximal(seed: int) -> None:
    costs = {part: Random(f"{seed} {part}").choice([0.0, 0.0, 0.05, 0.3]) for part in HEADS}
    arguments: list[tuple[ModelPart, ...]] = []

    def without(parts: Sequence[ModelPart]) -> tuple[float, float]:
        arguments.append(tuple(parts))
        return 30.0 - sum(costs[str(part)] for part in parts), 1.0

    chosen = select_heads(ablation_of(HEADS), without, max_bleu_drop=0.2)
    names = [str(part) for part in chosen.heads]
    left = [costs[part] for part in HEADS if part not in names]
    assert chosen.bleu == 30.0 - sum(costs[part] for part in names) >= 29.8
    assert all(chosen.bleu - cost < 29.8 for cost in left)
    assert len(arguments) == len(set(arguments)) <= 15


@pytest.mark.parametrize(("cost", "count", "trials"), [(0.0, 8, 1), (1.0, 0, 15)])
def test_all_or_no_heads_can_be_selected(cost: float, count: int, trials: int) -> None:
    tried: list[Any] = []
    report = lambda *trial: tried.append(trial)  # noqa: E731
    chosen = select_heads(ablation_of(HEADS), lambda parts: (30.0 - cost * len(parts), 1.0), progress=report)
    assert (len(chosen.heads), len(tried)) == (count, trials)


def test_loss_bound_rejects_lucky_bleu() -> None:
    chosen = select_heads(ablation_of(HEADS), lambda parts: (31.0, 1.0 + 0.006 * len(parts)), max_bleu_drop=0.2)
    assert len(chosen.heads) == 3  # 0.018 nats, of 0.02


@pytest.mark.parametrize(
    ("bleu", "loss", "count"), [(29.5, 1.05, 8), (29.4999, 1.0, 0), (30.0, 1.0501, 0), (30.5, 0.9, 8)]
)
def test_heads_exactly_at_both_bounds_are_removed(bleu: float, loss: float, count: int) -> None:
    trials: list[Any] = []
    report = lambda *trial: trials.append(trial)  # noqa: E731
    chosen = select_heads(ablation_of(HEADS), lambda _: (bleu, loss), max_bleu_drop=0.5, progress=report)
    assert len(chosen.heads) == count
    assert trials[0] == (8, bleu, loss, count > 0)
    assert chosen.bleu == (bleu if count else 30.0)


def test_heads_that_cost_exactly_the_bound_are_tried() -> None:
    ablation = ablation_of(HEADS)
    cheap, costly = (replace(ablation.effects[0], bleu=ablation.bleu - drop) for drop in (0.5, 0.5001))
    assert len(rank_heads(replace(ablation, effects=(cheap,)), 0.5)) == 1
    assert rank_heads(replace(ablation, effects=(costly,)), 0.5) == []


def test_invalid_selections_are_rejected() -> None:
    with pytest.raises(ValueError, match="ablate heads first"):
        select_heads(ablation_of({"encoder.blocks.0": 1}), lambda parts: (30.0, 1.0))
    with pytest.raises(ValueError, match="`max_bleu_drop` must be 0 BLEU or more, but is nan"):
        select_heads(ablation_of(HEADS), lambda parts: (30.0, 1.0), max_bleu_drop=math.nan)


def test_groups_of_heads_are_bisected() -> None:
    """Of five heads, only the last may not be removed."""
    heads = [ModelPart(f"decoder.blocks.{i}.self_attn", 0) for i in range(5)]
    trials: list[tuple[int, bool]] = []
    selector = PruneSelection(
        measure_without=lambda parts: (30.0, 2.0) if heads[4] not in parts else (20.0, 2.0),
        bleu=30.0, loss=1.0, min_bleu=30.0, max_loss=2.0,
        progress=lambda count, _bleu, _loss, accepted: trials.append((count, accepted)),
    )  # fmt: skip
    assert not selector.add_group(heads)
    assert selector.heads == heads[:4]
    assert trials == [(5, False), (3, True), (4, True)]
    assert selector.add_group([])


@pytest.mark.parametrize(
    ("bleu", "loss", "accepted"), [(30.0, 2.0, True), (29.9, 2.0, False), (30.0, 2.1, False), (31.0, 1.0, True)]
)
def test_a_group_is_removed_at_the_limits_of_bleu_and_loss(bleu: float, loss: float, accepted: bool) -> None:
    selector = PruneSelection(lambda parts: (bleu, loss), bleu=35.0, loss=1.0, min_bleu=30.0, max_loss=2.0)
    assert selector.try_group([ModelPart("a", 1)]) is accepted
    assert (selector.bleu, selector.loss) == ((bleu, loss) if accepted else (35.0, 1.0))
