"""The model compiles to one graph, padded and packed, and decoding steps do not synchronize."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attent.models import Seq2SeqConfig
from attent.nn import StackConfig
from tests.laws.helpers import (
    CROSS_DECODERS,
    assert_close,
    make_memory,
    make_stack,
    new_cache,
    parametrize_all,
    random_states,
)
from tests.laws.models import VOCAB, make_seq2seq, pairs
from tests.laws.test_seq2seq import packed_batch


def select_configs() -> dict[str, StackConfig]:
    """The first decoder of each position scheme, with one block, since tracing time grows with blocks."""
    configs: dict[object, tuple[str, StackConfig]] = {}
    for name, config in CROSS_DECODERS.items():
        configs.setdefault(config.positions, (name, replace(config, layers=1)))
    return dict(configs.values())


SCHEMES = select_configs()


def pair_configs() -> dict[str, Seq2SeqConfig]:
    """Three models that together have all six position schemes."""
    a, b, c, d, e, f, _ = SCHEMES.values()
    b = replace(b, compatibility="additive")
    return {
        f"{x.positions.kind}-{y.positions.kind}": Seq2SeqConfig(
            vocab=VOCAB, encoder=replace(x, causal=False, cross_attention=False, window=(2, 1)), decoder=y
        )
        for x, y in ((a, d), (b, e), (c, f))
    }


@parametrize_all("config", pair_configs())
def test_the_model_compiles_in_one_graph(config: Seq2SeqConfig, device: torch.device) -> None:
    """Without a graph break, from padded rows and from packed ones."""
    torch._dynamo.reset()
    model, text = make_seq2seq(config, device), pairs(device, (4, 2), (3, 2))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    batch = text.batch()
    assert_close(compiled(*batch), model(*batch))

    source, source_packing = packed_batch(text.sources, [[0, 1]], 7)
    target, target_packing = packed_batch(text.targets, [[0, 1]], 7)
    packing = (source_packing, target_packing)
    assert_close(compiled(source, target, packing=packing), model(source, target, packing=packing))


@parametrize_all("config", SCHEMES)
def test_a_decoding_step_does_not_synchronize(config: StackConfig, device: torch.device) -> None:
    """Neither steps, prefill nor reordering may read a value from the accelerator, which would synchronize."""
    if device.type != "cuda":
        pytest.skip("only an accelerator can be waited for: run with --device cuda")
    stack, x, memory = make_stack(config, device), random_states(3, 6, device=device), make_memory(config, 3, device)
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
