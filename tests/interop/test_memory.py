"""Loading never holds two copies of a model: tensors are read and converted one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attent.interop import llama, load, save_hf
from attent.models import CausalConfig, CausalLM, build, build_empty
from attent.models.presets import GPT2, LLAMA
from attent.nn import LearnedConfig
from tests.interop.folders import split_shards
from tests.interop.parity import same_bits

# 20 million parameters (80 MB in float32); the largest tensor has a fifth of them.
CONFIG = CausalConfig(
    vocab=8000,
    stack=replace(LLAMA, layers=4, width=512, heads=8, kv_heads=2, ffn_width=1408),
    tie_output=False,
)
PEAK = """
import json, sys, threading, torch
from attent.interop import load

def own_bytes():  # without the pages of mapped files, which the kernel can reclaim
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def peak_of(loading):
    load(small)  # imports and one-time setup
    before, seen, done = own_bytes(), [0], threading.Event()
    def watch():
        while not done.wait(0.0005):
            seen.append(own_bytes())
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = loading()
    done.set()
    watcher.join()
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return (max(seen + [own_bytes()]) - before) / size

small, *folders = sys.argv[1:]
for folder in folders:
    print(json.dumps([peak_of(lambda: load(folder, dtype=torch.bfloat16)), peak_of(lambda: load(folder).bfloat16())]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is available on Linux only")
def test_peak_memory_is_close_to_the_model_size(tmp_path: Path) -> None:
    model = build_empty(CONFIG).to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    llama.save(model, tmp_path / "shards")
    split_shards(tmp_path / "shards", 3)
    model.save(tmp_path / "ours")
    build(replace(CONFIG, vocab=9, stack=replace(CONFIG.stack, layers=1, width=16, ffn_width=8))).save(
        tmp_path / "small"
    )
    folders = [str(tmp_path / name) for name in ("small", "shards", "ours")]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # return freed memory to the system at once
    process = subprocess.run(
        [sys.executable, "-c", PEAK, *folders], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    for line in process:
        careful, naive = json.loads(line)
        assert 0.9 < careful < 1.3
        assert naive > 1.7, "the test would not see it"


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_load_onto_a_device(kind: str, tmp_path: Path) -> None:
    stack = replace(GPT2, layers=1, width=8, heads=2, ffn_width=12, positions=LearnedConfig(max_length=16))
    model = build(CausalConfig(vocab=13, stack=stack)).eval()
    model.save(tmp_path / "m") if kind == "ours" else save_hf(model, tmp_path / "m")
    loaded = load(tmp_path / "m", dtype=torch.float16, device="meta")
    assert isinstance(loaded, CausalLM)
    assert {(weight.device.type, weight.dtype) for weight in loaded.parameters()} == {("meta", torch.float16)}
    assert loaded.output.weight is loaded.embedding.weight
    assert same_bits(load(tmp_path / "m", device="cpu"), model)
    assert same_bits(load(tmp_path / "m", dtype=torch.bfloat16), model.bfloat16())
