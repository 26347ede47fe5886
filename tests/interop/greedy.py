"""Greedy decoding with the cache against `transformers`' generate, for decoder-only models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attent.interop import load_as
from attent.models import CausalLM
from tests.interop.families import TokenBatch, make_causal, make_texts
from tests.interop.parity import exact


def check_greedy(config: Any, seed: int, folder: Path, *, rows: int, steps: int) -> None:
    """Continue ragged prompts greedily with the cache; theirs are padded on the left."""
    theirs, texts = make_causal(config, seed), make_texts(config, seed, rows, 8)
    with torch.no_grad():
        theirs.get_input_embeddings().weight.mul_(8)  # so that the prompt decides, not the biases
    theirs.save_pretrained(folder)
    theirs.generation_config.eos_token_id = None  # all the steps
    ids, mask = texts.left_padded
    with exact(theirs):
        expected = theirs.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, pad_token_id=0)
    got = greedy(load_as(folder, CausalLM), texts, steps)
    assert got == expected[:, ids.shape[1] :].tolist()
    assert len({tuple(row) for row in got}) > rows / 4, "too many equal continuations"


def greedy(model: CausalLM, texts: TokenBatch, steps: int) -> list[list[int]]:
    cache = model.init_decoder_state(rows=len(texts.ids), capacity=texts.ids.shape[1] + steps)
    logits = model.step(texts.ids, cache, texts.lengths)[torch.arange(len(texts.ids)), texts.lengths - 1]
    written = []
    for _ in range(steps):
        written.append(logits.argmax(-1))
        logits = model.step(written[-1][:, None], cache)[:, 0]
    return torch.stack(written, 1).tolist()
