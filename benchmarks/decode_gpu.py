"""Translating on a GPU beside `transformers`' generate: sentences a second, the same weights and lengths.

    python -m benchmarks.decode_gpu                    base size, 3,003 sentences, bfloat16, beam 4 and greedy
    python -m benchmarks.decode_gpu --size big --lengths 15
    python -m benchmarks.decode_gpu --lengths 1024     documents of 1,024 tokens
    python -m benchmarks.decode_gpu --profile          and where our time goes
    python -m benchmarks.decode_gpu --device cpu       the same on a CPU, 96 sentences in float32

Sources are random tokens with lengths such as those of WMT's newstest2014 (29: log-normal, mean 27, up to 100) or of
Multi30k (15), and weights are random too; so that every sentence has a target of a length of its own (that of its
source, more or less), the end is forced there in both: a target goes on until it is that long. Both take the sentences
by length. `transformers` has batches of 256, the size that was best for it; ours is the engine of `attent translate`.
They take turns. Ids to ids, no text.

What it could be at best: the operations of all products over the speed of one large product, and the bytes that must
be read over the speed of a copy, both measured in the same run.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attent.decode.engine import TorchEngine
from attent.decode.options import Job, Search
from attent.decode.rules import MinLength
from attent.decode.translator import CPU_ROWS, MOST_ROWS
from attent.nn.attend import WITHOUT_CUDNN
from benchmarks.measure import Ceiling, machine, measured

VOCAB, START, PAD, END = 32_000, 0, 0, 2


@dataclass(frozen=True, kw_only=True)
class Size:
    layers: int
    width: int
    heads: int
    inner: int


SIZES = {
    "tiny": Size(layers=2, width=64, heads=4, inner=128),
    "small": Size(layers=3, width=256, heads=4, inner=1024),
    "base": Size(layers=6, width=512, heads=8, inner=2048),
    "big": Size(layers=6, width=1024, heads=16, inner=4096),
}
SENTENCES = {15: 3_003, 29: 3_003, 1024: 64}
BATCH = {15: 256, 29: 256, 1024: 16}  # of transformers


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one of the two did."""

    beams: int
    name: str
    sentences: float  # a second: the median
    least: float
    most: float
    tokens: float  # of targets, a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--lengths", type=int, choices=SENTENCES, default=29, help="mean tokens of a source")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, help="by default 3,003, of documents 64; on a CPU 96 and 2")
    parser.add_argument("--batch", type=int, help="sentences of a batch of transformers, by default 256; on a CPU 32")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--device", help="by default a GPU, where there is one")
    parser.add_argument("--dtype", help="by default bfloat16; on a CPU float32")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_cpu = device.type == "cpu"
    asked.sentences = asked.sentences or (
        max(2, SENTENCES[asked.lengths] // 32) if on_cpu else SENTENCES[asked.lengths]
    )
    asked.batch = asked.batch or (32 if on_cpu else BATCH[asked.lengths])
    dtype = getattr(torch, asked.dtype or ("float32" if on_cpu else "bfloat16"))
    jobs = made_up_jobs(asked.sentences, asked.lengths)
    print(f"{machine()}; {asked.size}, {len(jobs):,} sources of {mean_length(jobs):.0f} tokens, {dtype}", flush=True)
    theirs = their_model(SIZES[asked.size]).eval()
    ours = our_model(theirs).to(device, dtype).eval()
    theirs = None if asked.only_ours else theirs.to(device, dtype)
    ceiling = measured(device, dtype)
    speeds: list[Speed] = []
    for beams in asked.beams:
        speeds += compare(ours, theirs, jobs, beams, device, asked)
        bound(ours, jobs, beams, device, SIZES[asked.size], ceiling, next(s for s in speeds if s.beams == beams))
    print(table(speeds))


def compare(ours: Any, theirs: Any, jobs: list[Job], beams: int, device: torch.device, asked: Any) -> list[Speed]:
    ways: dict[str, Callable[[], None]] = {"attent": lambda: search(ours, jobs, beams, device)}
    if theirs is not None:
        ways["transformers"] = lambda: generated(theirs, jobs, beams, device, asked.batch)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(asked.rounds + 1):  # the first warms up
        for name, way in ways.items():
            took = timed(way, device)
            if turn:
                seconds[name].append(took)
            elif name == "attent":
                print(
                    f"beam {beams}  the first time, kernels are compiled and steps recorded: {took:.1f} s", flush=True
                )
    if asked.profile:
        with torch.profiler.profile() as profile:
            ways["attent"]()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))
    return [speed_of(name, beams, found, jobs) for name, found in seconds.items()]


def speed_of(name: str, beams: int, seconds: Sequence[float], jobs: Sequence[Job]) -> Speed:
    middle = statistics.median(seconds)
    return Speed(
        beams=beams,
        name=name,
        sentences=len(jobs) / middle,
        least=len(jobs) / max(seconds),
        most=len(jobs) / min(seconds),
        tokens=sum(job.limit for job in jobs) / middle,
    )


def table(speeds: Sequence[Speed]) -> str:
    lines = ["| beam | | sentences/s | slowest to fastest | target tokens/s | ratio |", "|---|---|---|---|---|---|"]
    for one in speeds:
        other = next((s for s in speeds if s.beams == one.beams and s.name == "transformers"), None)
        ratio = "" if other is None else f"{one.sentences / other.sentences:.2f}x"
        spread = f"{one.least:,.0f} to {one.most:,.0f}"
        lines.append(f"| {one.beams} | {one.name} | {one.sentences:,.0f} | {spread} | {one.tokens:,.0f} | {ratio} |")
    return "\n".join(lines)


def timed(way: Callable[[], None], device: torch.device) -> float:
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    sync()
    began = time.perf_counter()
    way()
    sync()
    return time.perf_counter() - began


# --- what it could be at best ----------------------------------------------------------------------------------------


def bound(
    model: Any, jobs: Sequence[Job], beams: int, device: torch.device, size: Size, ceiling: Ceiling, ours: Speed
) -> None:
    seconds = len(jobs) / ours.sentences
    work, least = flops(jobs, beams, size), least_bytes(jobs, size, next(model.parameters()).element_size())
    floor = max(work / ceiling.flops, least / ceiling.bytes)
    by_work, by_bytes = 1e3 * work / ceiling.flops, 1e3 * least / ceiling.bytes
    print(
        f"beam {beams}  {work / 1e12:.1f} TFLOP at {ceiling.flops / 1e12:.0f} TFLOP/s: {by_work:.1f} ms; "
        f"{least / 1e9:.1f} GB at {ceiling.bytes / 1e12:.2f} TB/s: {by_bytes:.1f} ms; took {1e3 * seconds:.1f} ms, "
        f"{floor / seconds:.0%} of the bound; {work / seconds / 1e12:.0f} TFLOP/s"
    )
    if device.type == "cuda":
        print(f"beam {beams}  the GPU is busy for {busy(model, jobs, beams, device):.0%} of the time", flush=True)


def flops(jobs: Sequence[Job], beams: int, size: Size) -> float:
    """2 for each weight that a token meets, and the products of attention; nothing for filler."""
    d, source, target = size.width, sum(len(job.source) for job in jobs), sum(job.limit for job in jobs)
    read = size.layers * (4 * d * d + 2 * d * size.inner + 2 * d * d)
    written = size.layers * (6 * d * d + 2 * d * size.inner) + d * VOCAB
    looks = sum(len(job.source) ** 2 for job in jobs)
    looks += beams * sum(job.limit * (job.limit + 1) // 2 + job.limit * len(job.source) for job in jobs)
    return 2.0 * (source * read + beams * target * written) + 4.0 * d * size.layers * looks


def least_bytes(jobs: Sequence[Job], size: Size, each: int) -> float:
    """Every step reads the decoder's weights, and of each source its keys and values and those of one past."""
    d, steps = size.width, max(job.limit for job in jobs)
    weights = size.layers * (6 * d * d + 2 * d * size.inner) + d * VOCAB
    columns = sum(job.limit * (job.limit + 1) // 2 + job.limit * len(job.source) for job in jobs)
    return each * (float(steps) * weights + 2.0 * d * size.layers * columns)


def busy(model: Any, jobs: Sequence[Job], beams: int, device: torch.device) -> float:
    """The share of all kernels in the time of one run; the profiler's own work is part of that time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = timed(lambda: search(model, jobs, beams, device), device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / seconds


# --- the two -------------------------------------------------------------------------------------------------------


def search(model: Any, jobs: Sequence[Job], beams: int, device: torch.device) -> None:
    """No end is allowed: every target is cut at its length, and so has as many steps as one that ends there."""
    never_ends = MinLength(10**6, END, device)
    rows = CPU_ROWS if device.type == "cpu" else MOST_ROWS  # as `attent translate` has them, where memory allows
    engine = TorchEngine(
        model=model,
        start=START,
        end=END,
        never=(),
        pad=PAD,
        device=device,
        batch_size=lambda source, target, beams: max(1, rows // beams),
        make_rules=lambda search, jobs: ((never_ends,), None),
    )
    found = dict(engine.search(jobs, Search(beam_size=beams)))
    assert all(len(found[i][0].ids) == job.limit for i, job in enumerate(jobs))


def generated(model: Any, jobs: Sequence[Job], beams: int, device: torch.device, size: int) -> None:
    """Not with cuDNN: that takes a tenth of a second for each new shape of attention, and every step has one."""
    with WITHOUT_CUDNN:
        generate(model, jobs, beams, device, size)


def generate(model: Any, jobs: Sequence[Job], beams: int, device: torch.device, size: int) -> None:
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


def made_up_jobs(count: int, mean: int = 29) -> list[Job]:
    dice = random.Random(1)
    jobs = []
    for number in range(count):
        length = made_up_length(dice, mean)
        target = max(3, round(length * dice.uniform(0.9, 1.2)))
        source = (*(dice.randrange(3, VOCAB) for _ in range(length)), END)
        jobs.append(Job(source=source, number=number, limit=target))
    return jobs


def made_up_length(dice: random.Random, mean: int) -> int:
    if mean == 29:
        return min(100, max(3, round(dice.lognormvariate(3.15, 0.55))))
    if mean == 15:
        return min(50, max(3, round(dice.lognormvariate(math.log(14), 0.35))))
    return mean


def mean_length(jobs: Sequence[Job]) -> float:
    return statistics.mean(len(job.source) for job in jobs)


def their_model(size: Size) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=VOCAB,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.inner,
        decoder_ffn_dim=size.inner,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=1536,
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
