"""Details of the encoder-decoder: shifting, forced prefixes, and steps without gradients."""

from __future__ import annotations

import torch

import attent
from attent.models import shift_right
from attent.nn import Packing


def test_targets_are_shifted_right_after_the_start() -> None:
    assert shift_right(torch.tensor([[5, 6, 2], [7, 2, 0]]), 1).tolist() == [[1, 5, 6], [1, 7, 2]]


def test_shifting_an_empty_target_gives_an_empty_one() -> None:
    assert shift_right(torch.zeros(2, 0, dtype=torch.long), 1).shape == (2, 0)


def test_each_packed_sentence_has_its_own_start() -> None:
    packing = Packing.from_lengths([[3, 2]], width=6)
    assert shift_right(torch.tensor([[5, 6, 2, 7, 2, 0]]), 1, packing).tolist() == [[1, 5, 6, 1, 7, 1]]


def test_steps_build_no_autograd_graph() -> None:
    model = attent.build(attent.presets.tiny(vocab=20)).eval()
    cache = model.begin(torch.tensor([[3, 4]]), capacity=3)
    logits = model.step(torch.tensor([[1]]), cache)
    assert not logits.requires_grad
    assert not cache.layers[0].self_attn.keys.requires_grad


def test_forced_prefixes_may_differ_in_length() -> None:
    model = attent.build(attent.presets.tiny(vocab=20)).eval().double()
    source, prefix = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[1, 9, 10], [1, 0, 0]])
    cache = model.begin(source, capacity=4)
    model.step(prefix, cache, torch.tensor([3, 1]))
    logits = model.step(torch.tensor([[11], [12]]), cache)[:, -1]
    first = model(source[:1], torch.tensor([[1, 9, 10, 11]]))[0, -1]
    second = model(source[1:], torch.tensor([[1, 12]]))[0, -1]
    torch.testing.assert_close(logits, torch.stack([first, second]))


def test_autocast_supports_decoding_in_steps() -> None:
    model = attent.build(attent.presets.tiny(vocab=20)).eval()
    source, target = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[1, 9, 10], [1, 11, 12]])
    lengths = torch.tensor([3, 2])
    outside = model.begin(source, lengths, capacity=3)  # its keys are float32
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(source, target, lengths)
        inside = model.begin(source, lengths, capacity=3)
        for cache in (inside, outside):
            steps = torch.cat([model.step(token, cache) for token in target.split(1, 1)], 1)
            torch.testing.assert_close(steps, expected, rtol=0.05, atol=0.05)
    assert inside.layers[0].self_attn.keys.dtype == torch.bfloat16
