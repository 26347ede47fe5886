"""Translate on a GPU, compared with `transformers`' generate: sentences a second with the same weights and lengths.

    python -m benchmarks.decode_gpu                    base size, 3,003 sentences, bfloat16, beam 4 and greedy
    python -m benchmarks.decode_gpu --size big --lengths 15
    python -m benchmarks.decode_gpu --lengths 1024     documents of 1,024 tokens
    python -m benchmarks.decode_gpu --profile          with a profile of our time
    python -m benchmarks.decode_gpu --device cpu       the same on a CPU, 96 sentences in float32

Sources are random tokens with lengths as in WMT's newstest2014 (29: log-normal, mean 27, up to 100) or Multi30k (15);
weights are random too. So that targets have different lengths (near those of their sources), the end is forced at a
given length in both. Both take the sentences by length. `transformers` has batches of 256, its best size; ours is the
engine of `attent translate`. They alternate. Ids to ids, no text.

The lower bound of the time: the operations of all matrix products at the speed of one large product, and the bytes that
must be read at the speed of a copy, both measured in the same run.
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

from attent.decoding.constraints.token_rules import MinLength
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.translator import CPU_MAX_ROWS, MAX_ROWS
from attent.nn.kernels.attention import DISABLE_CUDNN
from benchmarks.timing import PeakRates, describe_machine, measure_peak_rates

VOCAB, START, PAD, END = 32_000, 0, 0, 2


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    layers: int
    width: int
    heads: int
    ffn_width: int


SIZES = {
    "tiny": ModelSize(layers=2, width=64, heads=4, ffn_width=128),
    "small": ModelSize(layers=3, width=256, heads=4, ffn_width=1024),
    "base": ModelSize(layers=6, width=512, heads=8, ffn_width=2048),
    "big": ModelSize(layers=6, width=1024, heads=16, ffn_width=4096),
}
NUM_SENTENCES = {15: 3_003, 29: 3_003, 1024: 64}
BATCH_SIZES = {15: 256, 29: 256, 1024: 16}  # of transformers


@dataclass(frozen=True, kw_only=True)
class DecodeSpeed:
    """The speed of one implementation."""

    num_beams: int
    name: str
    sentences_per_second: float  # median
    slowest: float
    fastest: float
    tokens_per_second: float  # of targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--lengths", type=int, choices=NUM_SENTENCES, default=29, help="mean source length in tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--sentences", type=int, help="number of sentences, by default 3,003 (documents: 64); on a CPU 96 (2)"
    )
    parser.add_argument("--batch", type=int, help="batch size of transformers, by default 256; on a CPU 32")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--device", help="by default a GPU if there is one")
    parser.add_argument("--dtype", help="by default bfloat16; on a CPU float32")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_cpu = device.type == "cpu"
    arguments.sentences = arguments.sentences or (
        max(2, NUM_SENTENCES[arguments.lengths] // 32) if on_cpu else NUM_SENTENCES[arguments.lengths]
    )
    arguments.batch = arguments.batch or (32 if on_cpu else BATCH_SIZES[arguments.lengths])
    dtype = getattr(torch, arguments.dtype or ("float32" if on_cpu else "bfloat16"))
    jobs = make_random_requests(arguments.sentences, arguments.lengths)
    print(
        f"{describe_machine()}; {arguments.size}, {len(jobs):,} sources of {compute_mean_length(jobs):.0f} tokens, "
        f"{dtype}",
        flush=True,
    )
    theirs = build_transformers_model(SIZES[arguments.size]).eval()
    ours = convert_to_attent(theirs).to(device, dtype).eval()
    theirs = None if arguments.only_ours else theirs.to(device, dtype)
    ceiling = measure_peak_rates(device, dtype)
    speeds: list[DecodeSpeed] = []
    for beams in arguments.beams:
        speeds += compare_speeds(ours, theirs, jobs, beams, device, arguments)
        print_bound(
            ours, jobs, beams, device, SIZES[arguments.size], ceiling, next(s for s in speeds if s.num_beams == beams)
        )
    print(format_table(speeds))


def compare_speeds(
    ours: Any, theirs: Any, requests: list[SearchRequest], num_beams: int, device: torch.device, arguments: Any
) -> list[DecodeSpeed]:
    runs: dict[str, Callable[[], None]] = {"attent": lambda: run_search(ours, requests, num_beams, device)}
    if theirs is not None:
        runs["transformers"] = lambda: generate_without_cudnn(theirs, requests, num_beams, device, arguments.batch)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(arguments.rounds + 1):  # the first one warms up
        for name, run in runs.items():
            elapsed = time_run(run, device)
            if round_number:
                seconds[name].append(elapsed)
            elif name == "attent":
                print(
                    f"beam {num_beams}  the first run, with compilation and capture: {elapsed:.1f} s",
                    flush=True,
                )
    if arguments.profile:
        with torch.profiler.profile() as profile:
            runs["attent"]()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))
    return [summarize_speed(name, num_beams, results, requests) for name, results in seconds.items()]


def summarize_speed(name: str, beams: int, seconds: Sequence[float], requests: Sequence[SearchRequest]) -> DecodeSpeed:
    middle = statistics.median(seconds)
    return DecodeSpeed(
        num_beams=beams,
        name=name,
        sentences_per_second=len(requests) / middle,
        slowest=len(requests) / max(seconds),
        fastest=len(requests) / min(seconds),
        tokens_per_second=sum(job.max_length for job in requests) / middle,
    )


def format_table(speeds: Sequence[DecodeSpeed]) -> str:
    lines = ["| beam | | sentences/s | slowest to fastest | target tokens/s | ratio |", "|---|---|---|---|---|---|"]
    for speed in speeds:
        baseline = next((s for s in speeds if s.num_beams == speed.num_beams and s.name == "transformers"), None)
        ratio = "" if baseline is None else f"{speed.sentences_per_second / baseline.sentences_per_second:.2f}x"
        spread = f"{speed.slowest:,.0f} to {speed.fastest:,.0f}"
        lines.append(
            f"| {speed.num_beams} | {speed.name} | {speed.sentences_per_second:,.0f} | {spread} "
            f"| {speed.tokens_per_second:,.0f} | {ratio} |"
        )
    return "\n".join(lines)


def time_run(run: Callable[[], None], device: torch.device) -> float:
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    run()
    sync()
    return time.perf_counter() - start


# --- lower bound ----------------------------------------------------------------------------------------


def print_bound(
    model: Any,
    requests: Sequence[SearchRequest],
    beams: int,
    device: torch.device,
    size: ModelSize,
    ceiling: PeakRates,
    ours: DecodeSpeed,
) -> None:
    seconds = len(requests) / ours.sentences_per_second
    work, least = (
        count_flops(requests, beams, size),
        count_min_bytes(requests, size, next(model.parameters()).element_size()),
    )
    floor = max(work / ceiling.flops, least / ceiling.bytes)
    by_work, by_bytes = 1e3 * work / ceiling.flops, 1e3 * least / ceiling.bytes
    print(
        f"beam {beams}  {work / 1e12:.1f} TFLOP at {ceiling.flops / 1e12:.0f} TFLOP/s: {by_work:.1f} ms; "
        f"{least / 1e9:.1f} GB at {ceiling.bytes / 1e12:.2f} TB/s: {by_bytes:.1f} ms; took {1e3 * seconds:.1f} ms, "
        f"{floor / seconds:.0%} of the lower bound; {work / seconds / 1e12:.0f} TFLOP/s"
    )
    if device.type == "cuda":
        print(
            f"beam {beams}  the GPU is busy for {measure_gpu_busy(model, requests, beams, device):.0%} of the time",
            flush=True,
        )


def count_flops(requests: Sequence[SearchRequest], beams: int, size: ModelSize) -> float:
    """Return 2 per weight and token, plus the products of attention; padding is not counted."""
    d, source, target = (
        size.width,
        sum(len(job.source_ids) for job in requests),
        sum(job.max_length for job in requests),
    )
    encoder_weights = size.layers * (4 * d * d + 2 * d * size.ffn_width + 2 * d * d)
    decoder_weights = size.layers * (6 * d * d + 2 * d * size.ffn_width) + d * VOCAB
    attention_pairs = sum(len(job.source_ids) ** 2 for job in requests)
    attention_pairs += beams * sum(
        job.max_length * (job.max_length + 1) // 2 + job.max_length * len(job.source_ids) for job in requests
    )
    return 2.0 * (source * encoder_weights + beams * target * decoder_weights) + 4.0 * d * size.layers * attention_pairs


def count_min_bytes(requests: Sequence[SearchRequest], size: ModelSize, element_size: int) -> float:
    """Return the bytes of the decoder's weights, the source's keys and values, and one beam's past, for all steps."""
    d, steps = size.width, max(job.max_length for job in requests)
    weights = size.layers * (6 * d * d + 2 * d * size.ffn_width) + d * VOCAB
    columns = sum(job.max_length * (job.max_length + 1) // 2 + job.max_length * len(job.source_ids) for job in requests)
    return element_size * (float(steps) * weights + 2.0 * d * size.layers * columns)


def measure_gpu_busy(model: Any, requests: Sequence[SearchRequest], beams: int, device: torch.device) -> float:
    """Return the share of kernels in the time of one run, the profiler's overhead included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = time_run(lambda: run_search(model, requests, beams, device), device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / seconds


# --- implementations -----------------------------------------------------------------------------------------------


def run_search(model: Any, requests: Sequence[SearchRequest], beams: int, device: torch.device) -> None:
    """Forbid the end: every target is truncated at its length, with as many steps as one that ends there."""
    never_ends = MinLength(10**6, [END], device)
    rows = CPU_MAX_ROWS if device.type == "cpu" else MAX_ROWS  # as in `attent translate`, if memory allows
    engine = TorchEngine(
        model=model,
        start_id=START,
        end_id=END,
        suppressed_tokens=(),
        pad=PAD,
        device=device,
        choose_batch_size=lambda source, target, beams: max(1, rows // beams),
        build_constraints=lambda search, jobs: ((never_ends,), None),
    )
    results = dict(engine.search(requests, SearchOptions(beam_size=beams)))
    assert all(len(results[i][0].token_ids) == job.max_length for i, job in enumerate(requests))


def generate_without_cudnn(
    model: Any, requests: Sequence[SearchRequest], beams: int, device: torch.device, batch_size: int
) -> None:
    """Disable cuDNN, which takes 0.1 s for each new attention shape, and every step has one."""
    with DISABLE_CUDNN:
        run_generate(model, requests, beams, device, batch_size)


def run_generate(
    model: Any, requests: Sequence[SearchRequest], beams: int, device: torch.device, batch_size: int
) -> None:
    order = sorted(requests, key=lambda job: -len(job.source_ids))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        longest = len(batch[0].source_ids)
        ids = torch.tensor(
            [[*job.source_ids, *[PAD] * (longest - len(job.source_ids))] for job in batch], device=device
        )
        lengths = torch.tensor([len(job.source_ids) for job in batch], device=device)
        limits = torch.tensor([job.max_length for job in batch], device=device).repeat_interleave(beams)
        model.generate(
            ids,
            attention_mask=(torch.arange(longest, device=device) < lengths[:, None]).long(),
            num_beams=beams,
            do_sample=False,
            length_penalty=0.6,
            max_new_tokens=max(job.max_length for job in batch),
            logits_processor=[ForceEndAt(limits)],
        ).cpu()


class ForceEndAt:
    """Forces the end of each row at its own length, and forbids it before."""

    def __init__(self, max_lengths: Tensor) -> None:
        self.max_lengths = max_lengths

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        now = ids.shape[1] >= self.max_lengths  # includes the start token
        scores[:, END] = torch.where(now, 1e4, float("-inf"))
        return scores


def make_random_requests(count: int, mean_length: int = 29) -> list[SearchRequest]:
    rng = random.Random(1)
    jobs = []
    for number in range(count):
        length = draw_length(rng, mean_length)
        target = max(3, round(length * rng.uniform(0.9, 1.2)))
        source = (*(rng.randrange(3, VOCAB) for _ in range(length)), END)
        jobs.append(SearchRequest(source_ids=source, rng_key=number, max_length=target))
    return jobs


def draw_length(rng: random.Random, mean_length: int) -> int:
    if mean_length == 29:
        return min(100, max(3, round(rng.lognormvariate(3.15, 0.55))))
    if mean_length == 15:
        return min(50, max(3, round(rng.lognormvariate(math.log(14), 0.35))))
    return mean_length


def compute_mean_length(requests: Sequence[SearchRequest]) -> float:
    return statistics.mean(len(job.source_ids) for job in requests)


def build_transformers_model(size: ModelSize) -> Any:
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
        encoder_ffn_dim=size.ffn_width,
        decoder_ffn_dim=size.ffn_width,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=1536,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    return transformers.MarianMTModel(config)


def convert_to_attent(model: Any) -> Any:
    import tempfile

    import attent

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return attent.load(folder)


if __name__ == "__main__":
    main()
