"""Training of GPT-2 (124M), compared with `transformers`: tokens/s of forward, backward and AdamW in bfloat16.

    python -m benchmarks.gpt2_training                    16 rows of 1,024 tokens, on a GPU
    python -m benchmarks.gpt2_training --profile          with a profile of our step
    python -m benchmarks.gpt2_training --device cpu       2 rows of 128 tokens, uncompiled, float32

Random tokens in plain causal rows, no dropout, torch's fused AdamW for both. `transformers` runs with its defaults
(SDPA, its own loss), eager and compiled; ours is as in `attent train --task lm`: compiled stack, the output layer
and the loss in chunks. Rounds alternate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import attent
from attent.training.loss import linear_cross_entropy
from benchmarks.timing import describe_machine, interleave

VOCAB, STEPS = 50_257, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    rows, length = (
        args.rows or (2 if device.type == "cpu" else 16),
        args.length or (128 if device.type == "cpu" else 1024),
    )
    print(f"{rows} rows of {length} tokens; {describe_machine()}", flush=True)
    ids = torch.randint(0, VOCAB, (rows, length), device=device)
    steps = build_steps(ids, device)
    seconds = interleave(
        {name: lambda step=step: [step() for _ in range(STEPS)] for name, step in steps.items()}, args.rounds
    )
    report_speeds(seconds, rows * length * STEPS)
    if args.profile:
        profile_step(steps["attent"])


def build_steps(ids: Tensor, device: torch.device) -> dict[str, Callable[[], None]]:
    compiles = device.type == "cuda"
    steps = {"transformers": build_hf_step(ids, device, compiled=False)}
    if compiles:
        steps["transformers, compiled"] = build_hf_step(ids, device, compiled=True)
    steps["attent"] = build_attent_step(ids, device, compiled=compiles)
    return steps


def report_speeds(seconds: dict[str, list[float]], tokens: int) -> None:
    for name, rounds in seconds.items():
        speeds = [tokens / elapsed for elapsed in rounds]
        ratios = [theirs / elapsed for theirs, elapsed in zip(seconds["transformers"], rounds, strict=True)]
        print(
            f"{name:24} {statistics.median(speeds):10,.0f} tokens/s ({min(speeds):,.0f} to {max(speeds):,.0f}), "
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def build_attent_step(ids: Tensor, device: torch.device, *, compiled: bool) -> Callable[[], None]:
    config = attent.presets.gpt2()
    config = replace(config, stack=replace(config.stack, dropout=0.0, attention_dropout=0.0))
    model = attent.build(config).to(device)
    states = torch.compile(model.compute_states, dynamic=False) if compiled else model.compute_states
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    targets = ids.roll(-1, 1).flatten()

    def step() -> None:
        with autocast(device):
            last = states(ids).flatten(0, 1)
            loss, _ = linear_cross_entropy(last, model.output.weight, None, targets, None, 0.0)
            (loss / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_hf_step(ids: Tensor, device: torch.device, *, compiled: bool) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model: nn.Module = GPT2LMHeadModel(config).to(device).train()
    run: Any = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with autocast(device):
            run(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def profile_step(step: Callable[[], None]) -> None:
    with torch.profiler.profile() as profile:
        for _ in range(3):
            step()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))


if __name__ == "__main__":
    main()
