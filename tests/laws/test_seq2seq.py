"""Invariants of stacks hold for the encoder-decoder too: padding, packing, causality, order, steps, saving."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attent
from attent.models import Seq2Seq, Seq2SeqConfig, build, shift_right
from attent.nn import Packing, get_attention_layers
from attent.nn.recurrent import LSTMDecoderConfig
from tests.greedy import greedy_search
from tests.laws.helpers import (
    POSITIONS,
    assert_close,
    assert_same_gradients,
    gradients,
    make_tensor,
    noise_like,
    parametrize_in_turn,
    unpad,
)
from tests.laws.models import SEQ2SEQS, TRANSFORMERS, every_seq2seq, make_seq2seq, pairs


def run_separately(model: Seq2Seq, sources: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    return [model(source[None], target[None])[0] for source, target in zip(sources, targets, strict=True)]


def compute_loss(logits: list[Tensor], targets: list[Tensor]) -> Tensor:
    """Cross-entropy summed over tokens that are not padding."""
    return F.cross_entropy(torch.cat(logits), torch.cat(targets), reduction="sum")


@every_seq2seq
def test_padding_changes_nothing(config: Seq2SeqConfig, device: torch.device) -> None:
    model, text = make_seq2seq(config, device), pairs(device, config=config)
    expected = run_separately(model, text.sources, text.targets)
    for extra in (0, 3):
        batch = text.batch(extra)
        assert_close(unpad(model(*batch), batch[3]), torch.cat(expected))
    actual = [row[: len(target)] for row, target in zip(model(*text.batch()), text.targets, strict=True)]
    assert_same_gradients(
        gradients(compute_loss(actual, text.targets), model), gradients(compute_loss(expected, text.targets), model)
    )


def packed_batch(sentences: list[Tensor], rows: list[list[int]], width: int) -> tuple[Tensor, Packing]:
    """Pack sentences, given by index, into rows padded with noise."""
    laid = []
    for row in rows:
        text = torch.cat([sentences[i] for i in row])
        laid.append(torch.cat([text, noise_like(text, width - len(text))]))
    lengths = [[len(sentences[i]) for i in row] for row in rows]
    return torch.stack(laid), Packing.from_lengths(lengths, width, device=laid[0].device)


@parametrize_in_turn("config, rows", TRANSFORMERS, {"rows": [[0, 1], [2], [3]], "flat": [[3, 1, 2, 0]]})
def test_packed_equals_separate(config: Seq2SeqConfig, rows: list[list[int]], device: torch.device) -> None:
    model, text = make_seq2seq(config, device), pairs(device, config=config)
    source, source_packing = packed_batch(text.sources, rows, 15)
    target, target_packing = packed_batch(text.targets, rows, 14)
    logits = model(source, target, packing=(source_packing, target_packing))
    order = [i for row in rows for i in row]
    targets = [text.targets[i] for i in order]
    lengths = [[len(text.targets[i]) for i in row] for row in rows]
    actual = [piece for out, counts in zip(logits, lengths, strict=True) for piece in out[: sum(counts)].split(counts)]
    expected = run_separately(model, [text.sources[i] for i in order], targets)
    assert_close(torch.cat(actual), torch.cat(expected))
    assert_same_gradients(
        gradients(compute_loss(actual, targets), model), gradients(compute_loss(expected, targets), model)
    )


@every_seq2seq
def test_the_future_changes_nothing(config: Seq2SeqConfig, device: torch.device) -> None:
    model, text = make_seq2seq(config, device), pairs(device, (6,), (5,), config=config)
    source, target = text.sources[0][None], text.targets[0][None]
    out = model(source, target)
    for t in range(5):
        other = target.clone()
        other[:, t:] = (other[:, t:] + 1) % 17
        changed = model(source, other)
        assert_close(changed[:, :t], out[:, :t])
        assert not torch.allclose(changed[:, t], out[:, t], rtol=1e-3, atol=1e-3)


@every_seq2seq
def test_the_source_matters_to_every_target_token(config: Seq2SeqConfig, device: torch.device) -> None:
    model, text = make_seq2seq(config, device), pairs(device, (6,), (5,), config=config)
    source, target = text.sources[0][None], text.targets[0][None]
    other = source + 1 if source.is_floating_point() else (source + 1) % 17
    change = (model(other, target) - model(source, target)).abs().amax(-1)
    assert (change > 1e-4).all()


@every_seq2seq
def test_the_order_of_the_batch_does_not_matter(config: Seq2SeqConfig, device: torch.device) -> None:
    model, batch = make_seq2seq(config, device), pairs(device, config=config).batch()
    order = make_tensor(2, 0, 3, 1, device=device)
    shuffled = [x if x is None else x[order] for x in batch]
    assert_close(unpad(model(*shuffled), shuffled[3]), unpad(model(*batch)[order], shuffled[3]))


@every_seq2seq
def test_decoding_in_steps_equals_one_pass(config: Seq2SeqConfig, device: torch.device) -> None:
    model, (source, target, lengths, _) = make_seq2seq(config, device), pairs(device, config=config).batch()
    cache = model.init_decoder_state(source, lengths, capacity=target.shape[1])
    steps = [model.step(token, cache) for token in target.split(1, 1)]
    assert_close(torch.cat(steps, 1), model(source, target, lengths))


@every_seq2seq
def test_beams_follow_their_rows(config: Seq2SeqConfig, device: torch.device) -> None:
    model, (source, target, lengths, _) = make_seq2seq(config, device), pairs(device, config=config).batch()
    rows = make_tensor(3, 1, 1, 0, 2, 1, device=device)
    cache = model.init_decoder_state(source, lengths, capacity=5)
    model.step(target[:, :2], cache)
    cache.reorder(rows)
    last = model.step(target[rows, 2:], cache)
    assert_close(last, model(source[rows], target[rows], None if lengths is None else lengths[rows])[:, 2:])


@every_seq2seq
def test_greedy_with_a_cache_equals_greedy_without(config: Seq2SeqConfig, device: torch.device) -> None:
    model, (source, _, lengths, _) = make_seq2seq(config, device), pairs(device, config=config).batch()
    end = int(
        greedy_search(model, source, lengths, start_id=1, end_id=0, max_length=3)[0, -1]
    )  # a token that the model does generate
    actual = greedy_search(model, source, lengths, start_id=1, end_id=end, max_length=7)
    prefix = torch.ones(len(source), 1, dtype=torch.int64, device=device)
    for _ in range(7):
        logits = model(source, prefix, lengths)[:, -1:].detach()
        logits[..., 1] = float("-inf")  # no sentence contains the start token
        best = logits.argmax(-1)
        ended = (prefix[:, 1:] == end).any(1, keepdim=True)
        prefix = torch.cat([prefix, best.masked_fill(ended, end)], 1)
    assert actual.tolist() == prefix[:, 1:].tolist()


@every_seq2seq
def test_ragged_prefixes_in_one_step_equal_separate_ones(config: Seq2SeqConfig, device: torch.device) -> None:
    """As forced prefixes of different lengths, which all rows then continue."""
    model, text = make_seq2seq(config, device), pairs(device, config=config)
    source, prefixes, source_lengths, prefix_lengths = text.batch(extra=1)
    more = torch.randint(0, 17, (4, 3)).to(device)
    cache = model.init_decoder_state(source, source_lengths, capacity=12)
    logits = [
        model.step(prefixes, cache, prefix_lengths),
        model.step(more[:, :2], cache),
        model.step(more[:, 2:], cache),
    ]
    rest = torch.cat(logits[1:], 1)
    for row, (sentence, prefix) in enumerate(zip(text.sources, text.targets, strict=True)):
        alone = model(sentence[None], torch.cat([prefix, more[row]])[None])[0]
        # An LSTM carries its rounding from step to step (3.4e-5 without attention, float32 on an H200).
        times = 2 if isinstance(config.decoder, LSTMDecoderConfig) else 1
        assert_close(logits[0][row, : len(prefix)], alone[: len(prefix)], times=times)
        assert_close(rest[row], alone[len(prefix) :], times=times)


@every_seq2seq
def test_observers_change_no_output(config: Seq2SeqConfig, device: torch.device) -> None:
    """Every attention layer is recorded once, whole; a model without one is refused."""
    model, batch = make_seq2seq(config, device), pairs(device, config=config).batch()
    with torch.no_grad():
        expected = model(*batch)
    if not get_attention_layers(model):
        with pytest.raises(ValueError, match="must have an attention layer"), attent.record(model):
            pass
        return
    with attent.record(model) as trace, torch.no_grad():
        assert torch.equal(model(*batch), expected)
    counts = model.encode(batch[0], batch[2]).states.shape[1], batch[1].shape[1]
    for path, weights in trace.items():
        queries, keys = counts[::-1] if path.endswith("cross_attn") else (counts[path.startswith("decoder")],) * 2
        assert [tuple(w.shape[::2]) + tuple(w.shape[3:]) for w in weights] == [(4, queries, keys)]
        sums = weights[0].sum(-1)  # 0 where a window holds only padding
        assert_close(sums, sums.round())
        assert sums[:, :, 0].round().eq(1).all()


@parametrize_in_turn("config, stored", SEQ2SEQS, {"float32": torch.float32, "bfloat16": torch.bfloat16})
def test_save_and_load_give_the_same_bits(
    config: Seq2SeqConfig, stored: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    model = make_seq2seq(config, device).to(stored)
    model.save(tmp_path / "model")
    again = attent.load(tmp_path / "model").to(device)
    assert again.config == config
    assert not again.training
    assert {name: id(p) for name, p in again.named_parameters()}.keys() == dict(model.named_parameters()).keys()
    for name, value in model.state_dict().items():
        assert again.state_dict()[name].dtype == stored
        assert torch.equal(again.state_dict()[name], value), name
    assert (again.output.weight is again.target_embedding.weight) == config.tie_output
    assert (again.source_embedding is again.target_embedding) == config.share_embeddings
    batch = pairs(device, config=config).batch()
    assert torch.equal(again(*batch), model(*batch))


@pytest.mark.parametrize(("order", "tied"), [("post", True), ("post", False), ("pre", False)])
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_the_first_loss_is_near_ln_v(preset: str, order: str, tied: bool, device: torch.device) -> None:
    """Uniform predictions cost ln V; logits of variance 1 cost half a nat more. A wrong scale costs many.

    (Pre-norm with a tied output costs up to two nats more: it passes the embedding through and predicts its own input.)
    """
    vocab = 2000
    config = getattr(attent.presets, preset)(vocab=vocab)
    stacks = {side: replace(getattr(config, side), norm_order=order) for side in ("encoder", "decoder")}
    model = build(replace(config, tie_output=tied, **stacks)).to(device)
    source, target = torch.randint(0, vocab, (2, 4, 20)).to(device)
    with torch.no_grad():
        logits = model(source, shift_right(target, config.start_id))
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten()).item()
    assert math.log(vocab) + 0.1 < loss < math.log(vocab) + 0.9


def test_toys_cover_all_pairs_of_options() -> None:
    """On each side of the toys, every position scheme occurs with every norm order, key/value sharing and window."""
    for side in ("encoder", "decoder"):
        stacks = [getattr(config, side) for config in TRANSFORMERS.values()]
        met = {(stack.positions, stack.norm_order) for stack in stacks}
        met |= {(stack.positions, stack.kv_heads, "heads") for stack in stacks}
        met |= {(stack.positions, stack.window, "window") for stack in stacks}
        assert len(met) == len(POSITIONS) * (2 + 3 + 3)
