"""Translating on a GPU beside `transformers`' generate: sentences a second, base model, the same weights and lengths.

    python -m benchmarks.decode_gpu                    3,003 sentences, bfloat16, beam 4 and greedy
    python -m benchmarks.decode_gpu --profile          and where our time goes
    python -m benchmarks.decode_gpu --device cpu       the same on a CPU, 96 sentences in float32

Sources are random tokens of lengths such as those of WMT's newstest2014 (mean 27, up to 100), and weights are random
too; so that every sentence has a target of a length of its own (that of its source, more or less), the end is forced
there in both: a target goes on until it is that long. Both take the sentences by length. `transformers` has batches of
256, the size that was best for it; ours is the engine of `attent translate`. They take turns. Ids to ids, no text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attent.decode.engine import TorchEngine
from attent.decode.options import Job, Search
from attent.decode.rules import MinLength
from attent.decode.translator import CPU_ROWS, MOST_ROWS
from benchmarks.measure import machine

VOCAB, START, PAD, END = 32_000, 0, 0, 2
SENTENCES = 3_003


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, help="by default 3,003; on a CPU 96")
    parser.add_argument("--batch", type=int, help="sentences of a batch of transformers, by default 256; on a CPU 32")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--device", help="by default a GPU, where there is one")
    parser.add_argument("--dtype", help="by default bfloat16; on a CPU float32")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    print(machine())
    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usual = (96, 32, "float32") if device.type == "cpu" else (SENTENCES, 256, "bfloat16")
    asked.sentences, asked.batch = asked.sentences or usual[0], asked.batch or usual[1]
    dtype = getattr(torch, asked.dtype or usual[2])
    theirs = their_model().eval()
    ours = our_model(theirs).to(device, dtype).eval()
    theirs = theirs.to(device, dtype)
    jobs = made_up_jobs(asked.sentences)
    for beams in asked.beams:
        compare(ours, theirs, jobs, beams, device, asked)


def compare(ours: Any, theirs: Any, jobs: list[Job], beams: int, device: torch.device, asked: Any) -> None:
    ways: dict[str, Callable[[], None]] = {"attent": lambda: search(ours, jobs, beams, device, most_rows(device))}
    if not asked.only_ours:
        ways["transformers"] = lambda: generate(theirs, jobs, beams, device, asked.batch)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(asked.rounds + 1):  # the first warms up
        for name, way in ways.items():
            seconds = timed(way, device)
            if turn:
                speeds[name].append(len(jobs) / seconds)
    for name, found in speeds.items():
        each = ", ".join(f"{one:,.0f}" for one in found)
        print(f"beam {beams}  {name:13} {statistics.median(found):8,.0f} sentences/s  ({each})")
    if len(speeds) == 2:
        ratios = [a / b for a, b in zip(speeds["attent"], speeds["transformers"], strict=True)]
        print(f"beam {beams}  ratio {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    if asked.profile:
        with torch.profiler.profile() as profile:
            ways["attent"]()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))


def most_rows(device: torch.device) -> int:
    """As `attent translate` has them, where memory allows."""
    return CPU_ROWS if device.type == "cpu" else MOST_ROWS


def timed(way: Callable[[], None], device: torch.device) -> float:
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    sync()
    began = time.perf_counter()
    way()
    sync()
    return time.perf_counter() - began


def search(model: Any, jobs: list[Job], beams: int, device: torch.device, rows: int) -> None:
    """No end is allowed: every target is cut at its length, and so has as many steps as one that ends there."""
    never_ends = MinLength(10**6, END, device)
    engine = TorchEngine(
        model=model,
        start=START,
        end=END,
        never=(),
        pad=PAD,
        device=device,
        batch_size=lambda source, target, beams: rows // beams,
        make_rules=lambda search, jobs: ((never_ends,), None),
    )
    found = dict(engine.search(jobs, Search(beam_size=beams)))
    assert all(len(found[i][0].ids) == job.limit for i, job in enumerate(jobs))


def generate(model: Any, jobs: list[Job], beams: int, device: torch.device, size: int) -> None:
    order = sorted(jobs, key=lambda job: -len(job.source))
    for at in range(0, len(order), size):
        batch = order[at : at + size]
        longest = len(batch[0].source)
        ids = torch.tensor([[*job.source, *[PAD] * (longest - len(job.source))] for job in batch], device=device)
        lengths = torch.tensor([len(job.source) for job in batch], device=device)
        limits = torch.tensor([job.limit for job in batch], device=device).repeat_interleave(beams)
        model.generate(
            ids,
            attention_mask=(torch.arange(longest, device=device) < lengths[:, None]).long(),
            num_beams=beams,
            do_sample=False,
            length_penalty=0.6,
            max_new_tokens=max(job.limit for job in batch),
            logits_processor=[EndAt(limits)],
        ).cpu()


class EndAt:
    """The end at a length of its own for each row, and nowhere else."""

    def __init__(self, limits: Tensor) -> None:
        self.limits = limits

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        now = ids.shape[1] >= self.limits  # the start is counted
        scores[:, END] = torch.where(now, 1e4, float("-inf"))
        return scores


def made_up_jobs(count: int) -> list[Job]:
    dice = random.Random(1)
    jobs = []
    for number in range(count):
        length = min(100, max(3, round(dice.lognormvariate(3.15, 0.55))))
        target = max(3, round(length * dice.uniform(0.9, 1.2)))
        source = (*(dice.randrange(3, VOCAB) for _ in range(length)), END)
        jobs.append(Job(source=source, number=number, limit=target))
    return jobs


def their_model() -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=VOCAB,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=512,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    return transformers.MarianMTModel(config)


def our_model(theirs: Any) -> Any:
    import tempfile

    import attent

    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return attent.load(folder)


if __name__ == "__main__":
    main()
