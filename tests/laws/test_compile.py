"""The model is one graph, padded and packed, and a step of decoding waits for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attent.models import Seq2SeqConfig
from attent.nn import StackConfig
from tests.laws.helpers import CROSS_DECODERS, close, every, make, memory_for, new_cache, states
from tests.laws.models import VOCAB, make_seq2seq, pairs
from tests.laws.test_seq2seq import packed_batch


def one_of_each_scheme() -> dict[str, StackConfig]:
    """The first decoder of each kind of positions, with one block: tracing takes as long as there are blocks."""
    found: dict[object, tuple[str, StackConfig]] = {}
    for name, config in CROSS_DECODERS.items():
        found.setdefault(config.positions, (name, replace(config, layers=1)))
    return dict(found.values())


SCHEMES = one_of_each_scheme()


def in_pairs() -> dict[str, Seq2SeqConfig]:
    """Three models that have all six kinds of positions between them."""
    a, b, c, d, e, f, _ = SCHEMES.values()
    return {
        f"{x.positions.kind}-{y.positions.kind}": Seq2SeqConfig(
            vocab=VOCAB, encoder=replace(x, causal=False, cross_attention=False, window=(2, 1)), decoder=y
        )
        for x, y in ((a, d), (b, e), (c, f))
    }


@every("config", in_pairs())
def test_the_model_compiles_in_one_graph(config: Seq2SeqConfig, device: torch.device) -> None:
    """Without a break, in training as it is done: from padded rows and from packed ones."""
    torch._dynamo.reset()
    model, text = make_seq2seq(config, device), pairs(device, (4, 2), (3, 2))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    batch = text.batch()
    close(compiled(*batch), model(*batch))

    source, source_packing = packed_batch(text.sources, [[0, 1]], 7)
    target, target_packing = packed_batch(text.targets, [[0, 1]], 7)
    packing = (source_packing, target_packing)
    close(compiled(source, target, packing=packing), model(source, target, packing=packing))


@every("config", SCHEMES)
def test_a_step_waits_for_nothing(config: StackConfig, device: torch.device) -> None:
    """No step, prefill or reordering may ask the accelerator for a number: the host would wait for it."""
    if device.type != "cuda":
        pytest.skip("only an accelerator can be waited for: run with --device cuda")
    stack, x, memory = make(config, device), states(3, 6, device=device), memory_for(config, 3, device)
    cache = new_cache(stack, 6, 3, memory)
    lengths, rows = torch.tensor([3, 1, 2], device=device), torch.tensor([1, 1, 0], device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stack(x[:, :3], lengths, cache=cache)
        cache.reorder(rows)
        stack(x[:, 3:4], cache=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
