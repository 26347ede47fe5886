"""One attention of a packed batch, forward and backward, by each backend: which is best for which lengths?

    python -m benchmarks.attention_speed                         25,600 tokens, 8 heads of 64, bfloat16, causal
    python -m benchmarks.attention_speed --mean 29 1024 --heads 16
    python -m benchmarks.attention_speed --flex                  `flex` too, which compiles for every row width
    python -m benchmarks.attention_speed --device cpu            small, to see that it runs

Lengths are log-normal around each mean, whole sentences fill rows of the width that training would take (256, or more
for longer ones), best-fit. Forward and backward are recorded as one CUDA graph, so that Python's launches do not count;
the time is the median of replays, in turns. The floor is q, k, v, the output and all their gradients, read or written
once at the speed of a copy. What `auto` chooses is marked: it should be the fastest.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from attent.nn import Mask, Packing
from attent.nn.attend import BACKENDS, Request, attend, choose
from benchmarks.measure import by_events, machine, measured, timed

MEANS = (15, 29, 64, 128, 256, 512, 1024, 4096)
SPREAD = 0.5  # standard deviation of the logarithm
NARROWEST = 256  # tokens of a row
WARM, ROUNDS = 3, 15


def main() -> None:
    asked = arguments()
    device = torch.device(asked.device)
    gpu = device.type == "cuda"
    tokens = asked.tokens or (25_600 if gpu else 512)
    dtype = torch.bfloat16 if gpu else torch.float32
    speed = measured(device).bytes
    print(f"{machine()}; {tokens:,} tokens, {asked.heads} heads of {asked.width}, {dtype}, causal")
    names = [name for name in BACKENDS if name != "explicit" and (name != "flex" or asked.flex)]
    print(f"\n| mean length | row | {' | '.join(names)} | floor by bytes |\n|{'---|' * (len(names) + 3)}")
    for mean in asked.mean or (MEANS if gpu else (15, 64)):
        request = made(mean, tokens, asked.heads, asked.width, device, dtype)
        chosen = next(name for name, one in BACKENDS.items() if one is choose("auto", request))
        found = compared(request, names)
        cells = [cell(found[name], name == chosen) for name in names]
        floor = 12 * request.q.numel() * request.q.element_size() / speed  # 4 forward, 8 backward
        print(f"| {mean} | {request.q.shape[2]} | {' | '.join(cells)} | {1e3 * floor:.3f} |", flush=True)
    print("\nms, forward and backward; **chosen** by `auto`")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mean", nargs="+", type=int, help="lengths of sentences")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def cell(seconds: float | None, chosen: bool) -> str:
    if seconds is None:
        return "-"
    return f"**{1e3 * seconds:.3f}**" if chosen else f"{1e3 * seconds:.3f}"


def made(mean: int, tokens: int, heads: int, width: int, device: torch.device, dtype: torch.dtype) -> Request:
    row = NARROWEST
    while row < 2 * mean and 2 * row <= tokens:
        row *= 2
    packing = Packing.of(rows_of(mean, row, tokens // row), row, device=device)
    shape = (tokens // row, heads, row, width)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    mask = Mask(causal=True, packing=(packing, packing))
    return Request(q, k, v, mask, None, width**-0.5, 0.0)


def rows_of(mean: int, width: int, count: int) -> list[list[int]]:
    """Sentences in rows, each into the row that it leaves the least room in; drawn until one finds none."""
    dice, rows = np.random.default_rng(1), [[] for _ in range(count)]  # type: list[list[int]]
    left = np.full(count, width)
    while True:
        length = int(np.clip(np.exp(np.log(mean) - SPREAD**2 / 2 + SPREAD * dice.standard_normal()), 2, width))
        fits = np.where(left >= length, left, width + 1)
        if fits.min() > width:
            return rows
        place = int(fits.argmin())
        rows[place].append(length)
        left[place] -= length


def compared(request: Request, names: list[str]) -> dict[str, float | None]:
    """Seconds of each; none of what cannot do it."""
    able = {name: runner(request, name) for name in names if BACKENDS[name].refuses(request) is None}
    seconds: dict[str, list[float]] = {name: [] for name in able}
    for _ in range(ROUNDS):
        for name, run in able.items():
            seconds[name].append(by_events(run) if request.q.device.type == "cuda" else timed(run))
    return {name: statistics.median(seconds[name]) if name in able else None for name in names}


def runner(request: Request, name: str) -> Callable[[], object]:
    q, k, v, mask, *_ = request
    direction = torch.randn_like(q)
    leaves: list[Tensor] = [q, k, v]

    def run() -> object:
        return torch.autograd.grad(attend(q, k, v, mask, backend=name), leaves, direction)

    for _ in range(WARM):
        run()
    return recorded(run) if q.device.type == "cuda" else run


def recorded(run: Callable[[], object]) -> Callable[[], object]:
    """As a graph, where it can be one."""
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
