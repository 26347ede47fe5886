"""Attention of a packed batch, forward and backward, by each backend and mean length.

    python -m benchmarks.attention_speed                         25,600 tokens, 8 heads of 64, bfloat16, causal
    python -m benchmarks.attention_speed --mean 29 1024 --heads 16
    python -m benchmarks.attention_speed --flex                  include `flex`, which compiles for every row width
    python -m benchmarks.attention_speed --device cpu            small, as a smoke test

Lengths are log-normal around each mean; sentences are packed best-fit into rows as wide as in training (256, or more
for longer ones). Forward and backward are captured as one CUDA graph, so that launch overhead does not count; the time
is the median of interleaved replays. The floor is q, k, v, the output and all their gradients, read or written once at
the speed of a copy. The choice of `auto` is marked: it should be the fastest.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from attent.nn import Mask, Packing
from attent.nn.backends import BACKENDS, attend, choose_backend
from attent.nn.dot_product import AttentionInputs
from benchmarks.timing import describe_machine, measure_peak_rates, time_by_events, time_run

MEAN_LENGTHS = (15, 29, 64, 128, 256, 512, 1024, 4096)
LOG_STD = 0.5  # standard deviation of the logarithm
MIN_ROW_WIDTH = 256  # tokens of a row
WARMUP_RUNS, ROUNDS = 3, 15


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    tokens = args.tokens or (25_600 if gpu else 512)
    dtype = torch.bfloat16 if gpu else torch.float32
    speed = measure_peak_rates(device).bytes
    print(f"{describe_machine()}; {tokens:,} tokens, {args.heads} heads of {args.width}, {dtype}, causal")
    names = [name for name in BACKENDS if name != "explicit" and (name != "flex" or args.flex)]
    print(f"\n| mean length | row | {' | '.join(names)} | floor by bytes |\n|{'---|' * (len(names) + 3)}")
    for mean in args.mean or (MEAN_LENGTHS if gpu else (15, 64)):
        request = build_request(mean, tokens, args.heads, args.width, device, dtype)
        chosen = next(name for name, backend in BACKENDS.items() if backend is choose_backend("auto", request))
        seconds = compare_backends(request, names)
        cells = [format_cell(seconds[name], name == chosen) for name in names]
        floor = 12 * request.q.numel() * request.q.element_size() / speed  # 4 forward, 8 backward
        print(f"| {mean} | {request.q.shape[2]} | {' | '.join(cells)} | {1e3 * floor:.3f} |", flush=True)
    print("\nms, forward and backward; **chosen** by `auto`")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mean", nargs="+", type=int, help="mean sentence lengths")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="width of a head")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def format_cell(seconds: float | None, chosen: bool) -> str:
    if seconds is None:
        return "-"
    return f"**{1e3 * seconds:.3f}**" if chosen else f"{1e3 * seconds:.3f}"


def build_request(
    mean: int, tokens: int, heads: int, width: int, device: torch.device, dtype: torch.dtype
) -> AttentionInputs:
    row = MIN_ROW_WIDTH
    while row < 2 * mean and 2 * row <= tokens:
        row *= 2
    packing = Packing.from_lengths(pack_lengths(mean, row, tokens // row), row, device=device)
    shape = (tokens // row, heads, row, width)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    mask = Mask(causal=True, packing=(packing, packing))
    return AttentionInputs(q, k, v, mask, None, width**-0.5, 0.0)


def pack_lengths(mean: int, width: int, count: int) -> list[list[int]]:
    """Draw sentence lengths and pack them best-fit, until one fits in no row."""
    rng, rows = np.random.default_rng(1), [[] for _ in range(count)]  # type: list[list[int]]
    remaining = np.full(count, width)
    while True:
        length = int(np.clip(np.exp(np.log(mean) - LOG_STD**2 / 2 + LOG_STD * rng.standard_normal()), 2, width))
        fits = np.where(remaining >= length, remaining, width + 1)
        if fits.min() > width:
            return rows
        row = int(fits.argmin())
        rows[row].append(length)
        remaining[row] -= length


def compare_backends(request: AttentionInputs, names: list[str]) -> dict[str, float | None]:
    """Return the seconds of each backend; None if it does not support the request."""
    able = {name: build_runner(request, name) for name in names if BACKENDS[name].find_limitation(request) is None}
    seconds: dict[str, list[float]] = {name: [] for name in able}
    for _ in range(ROUNDS):
        for name, run in able.items():
            seconds[name].append(time_by_events(run) if request.q.device.type == "cuda" else time_run(run))
    return {name: statistics.median(seconds[name]) if name in able else None for name in names}


def build_runner(request: AttentionInputs, name: str) -> Callable[[], object]:
    q, k, v, mask, *_ = request
    direction = torch.randn_like(q)
    leaves: list[Tensor] = [q, k, v]

    def run() -> object:
        return torch.autograd.grad(attend(q, k, v, mask, backend=name), leaves, direction)

    for _ in range(WARMUP_RUNS):
        run()
    return capture_graph(run) if q.device.type == "cuda" else run


def capture_graph(run: Callable[[], object]) -> Callable[[], object]:
    """Capture as a CUDA graph, if possible."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run
    return graph.replay


if __name__ == "__main__":
    main()
