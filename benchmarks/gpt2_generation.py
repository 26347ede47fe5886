"""Generation with GPT-2 (124M), compared with `transformers`' generate: tokens/s at batch sizes 1 and 64, bfloat16.

    python -m benchmarks.gpt2_generation                  prompts of 32 tokens, 512 new ones, greedy
    python -m benchmarks.gpt2_generation --device cpu     prompts of 8 tokens, 16 new ones, float32, batches of 1, 4

Both have the same random weights and no end token, so that every text has the requested length. `transformers` runs
with its defaults; `--static` adds its compiled static cache. Ours is the engine of `attent generate`: on a GPU each
step, including the choice of the token, is one CUDA graph. Rounds alternate. Ids to ids, without text.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import attent
from attent.decoding.generation.loop import (
    DynamicState,
    EncodedPrompt,
    GenerationContext,
    GenerationState,
    StaticState,
    StepOptions,
    generate_batch,
)
from attent.models import CausalLM
from benchmarks.timing import describe_machine, interleave

VOCAB = 50_257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--static", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    length, new, sizes = (8, 16, (1, 4)) if device.type == "cpu" else (32, 512, (1, 64))
    print(f"{length} tokens, {new} new ones; {describe_machine()}", flush=True)
    theirs, ours = build_models(device)
    for rows in sizes:
        ids = torch.randint(0, VOCAB - 1, (rows, length), generator=torch.Generator().manual_seed(rows))
        runs = {"transformers": lambda ids=ids: generate_with_hf(theirs, ids.to(device), new)}
        if args.static:
            runs["transformers, static"] = lambda ids=ids: generate_with_hf(theirs, ids.to(device), new, static=True)
        runs["attent"] = build_generator(ours, ids.tolist(), new, device)
        compare_outputs(runs)
        report_speeds(interleave(runs, args.rounds), rows, new)


def build_models(device: torch.device) -> tuple[Any, CausalLM]:
    """Return both models, with the same weights."""
    from transformers import GPT2LMHeadModel

    config = attent.presets.gpt2()
    model = attent.build(replace(config, start_id=None, end_ids=())).eval()
    with tempfile.TemporaryDirectory() as folder:
        from attent.interop import gpt2

        gpt2.save(model, f"{folder}/gpt2")
        theirs: Any = GPT2LMHeadModel.from_pretrained(f"{folder}/gpt2")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    return theirs.eval().to(device, dtype), model.to(device, dtype)


def build_generator(
    model: CausalLM, ids: list[list[int]], new: int, device: torch.device
) -> Callable[[], list[list[int]]]:
    prompts = [EncodedPrompt(token_ids=row, max_new_tokens=new, rng_key=number) for number, row in enumerate(ids)]
    context = GenerationContext.from_options(StepOptions(end_ids=()), device)
    static_state = StaticState(model, len(ids), len(ids[0]) + new, context) if device.type == "cuda" else None

    def run() -> list[list[int]]:
        state: GenerationState = DynamicState(model, prompts, context) if static_state is None else static_state
        if static_state is not None:
            static_state.load_prompts(prompts)
        return [list(result.token_ids) for result in generate_batch(prompts, state, ())]

    return run


def generate_with_hf(model: Any, ids: torch.Tensor, new: int, *, static: bool = False) -> list[list[int]]:
    options = {"cache_implementation": "static"} if static else {}
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, **options)
    rows: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return rows


def compare_outputs(runs: dict[str, Callable[[], list[list[int]]]]) -> None:
    """Print how many outputs are identical; in bfloat16 near ties may differ."""
    first, *_, last = (run() for run in runs.values())
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(first, last, strict=True)
    ]
    print(f"{sum(length == len(first[0]) for length in same)} of {len(same)} texts are identical")


def report_speeds(seconds: dict[str, list[float]], rows: int, new: int) -> None:
    for name, rounds in seconds.items():
        speeds = [rows * new / elapsed for elapsed in rounds]
        ratios = [theirs / elapsed for theirs, elapsed in zip(seconds["transformers"], rounds, strict=True)]
        print(
            f"batch {rows:<3} {name:22} {statistics.median(speeds):9,.0f} tokens/s ({min(speeds):,.0f} to "
            f"{max(speeds):,.0f}), {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
