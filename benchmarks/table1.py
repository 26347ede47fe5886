"""Table 1 of the paper, measured: complexity per layer, sequential operations and path length.

    python -m benchmarks.table1 --out DIR              on a GPU about 3 minutes, on one CPU core about 5
    python -m benchmarks.table1 --out DIR --quick      smaller sizes: about a minute on one CPU core

Measures time and peak memory of one layer, forward and backward, for self-attention, windowed self-attention, recurrent
and convolutional layers (`table1_layers`), and the gradient that reaches the first position from the last in a stack.
Writes results.json, which an interrupted run continues, table1.md and SVG plots (`table1_report`).

Lengths are compared at a constant number of tokens, n * batch: few short sequences would measure the launches of
kernels and not their work. Recurrent layers are also run at a constant batch, which alone fills the device in a step.
float32 without TF32 by default: tensor cores are so fast that the rest of a layer would dominate. On a CPU the time is
the CPU time of one thread, which other processes disturb less than the wall clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from attent.storage.atomic import write_atomic
from benchmarks.table1_layers import LAYERS, PATH_LAYERS, BuiltLayer, PathSizes, Point, measure_gradient_path
from benchmarks.table1_report import Results, write_report
from benchmarks.timing import describe_machine, time_by_events

RECURRENT = ("recurrent", "LSTM")
ATTENTION = ("attention explicit", "attention fused", "products explicit", "products fused")
WINDOWED = ("windowed attention", "windowed products")
FLEX = "windowed products flex"  # CUDA only, and compiled for every length
SINGLE = ("attention fused", "windowed attention", "convolution", *RECURRENT)  # measured at batch 1


def list_powers(first: int, last: int) -> tuple[int, ...]:
    """Return powers of two."""
    return tuple(2**i for i in range(first.bit_length() - 1, last.bit_length()))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes to measure; those of the CPU by default."""

    width: int = 256  # d where the length varies
    tokens: int = 4096  # n * batch where the length varies
    lengths: tuple[int, ...] = list_powers(32, 4096)
    scores_lengths: tuple[int, ...] = list_powers(256, 2048)  # with a constant number of scores, n^2 * batch
    min_fit_length: int = 256  # from here on the products dominate reading and writing q, k, v and their gradients
    widths: tuple[int, ...] = list_powers(256, 1024)
    width_length: int = 1024  # n where the width of attention varies
    recurrent_batch: int = 16
    recurrent_lengths: tuple[int, ...] = list_powers(32, 1024)
    recurrent_width_length: int = 16
    recurrent_widths: tuple[int, ...] = list_powers(256, 1024)
    kernels: tuple[int, ...] = (1, 3, 5, 9, 17)
    window: int = 128  # r where the length or the width varies
    windows: tuple[int, ...] = list_powers(256, 2048)
    window_length: int = 4096  # n where the window varies
    single_lengths: tuple[int, ...] = list_powers(16, 2048)  # at batch 1
    path_lengths: tuple[int, ...] = list_powers(2, 512)
    path: PathSizes = field(default_factory=PathSizes)
    rounds: int = 3  # over all points: a machine that is slower for a while must not bend a curve
    min_seconds: float = 0.2  # to spend on a point in a round, after a first run
    min_runs: int = 2


QUICK_CPU = Sizes(
    width=128,
    tokens=2048,
    lengths=list_powers(32, 1024),
    scores_lengths=list_powers(128, 1024),
    min_fit_length=128,
    width_length=512,
    recurrent_lengths=list_powers(32, 1024),
    window=64,
    windows=list_powers(256, 1024),
    window_length=2048,
    single_lengths=(16, 64, 256, 1024),
    path_lengths=list_powers(2, 128),
    min_seconds=0.05,
)
GPU = Sizes(
    width=512,
    tokens=16_384,
    lengths=list_powers(64, 16_384),
    scores_lengths=list_powers(512, 8192),
    min_fit_length=512,
    widths=list_powers(256, 2048),
    width_length=2048,
    recurrent_batch=1024,
    recurrent_lengths=list_powers(64, 2048),
    recurrent_width_length=16,
    recurrent_widths=list_powers(512, 2048),
    kernels=(3, 5, 9, 17, 33),
    window=256,
    windows=list_powers(256, 2048),
    window_length=8192,
    single_lengths=list_powers(16, 4096),
    rounds=1,
    min_seconds=0.2,
    min_runs=3,
)
QUICK_GPU = replace(GPU, lengths=list_powers(64, 4096), recurrent_batch=512)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    gpu = device.type == "cuda"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if not gpu:
        torch.set_num_threads(1)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports each start
    sizes = (QUICK_GPU if args.quick else GPU) if gpu else QUICK_CPU if args.quick else Sizes()
    groups = plan_points(sizes, with_flex=gpu)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "results.json"
    saved = read_results(file, f"{describe_machine()}, {args.dtype}", sizes)
    measure_points(groups, saved, file, device, dtype, sizes)
    measure_paths(saved, file, sizes)
    results = Results(
        machine=saved["machine"],
        groups=groups,
        measured=saved["points"],
        paths=saved["paths"],
        width=sizes.width,
        min_fit_length=sizes.min_fit_length,
        path=sizes.path,
    )
    print(write_report(results, args.out))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/table1"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(argv)


# --- the points ------------------------------------------------------------------------------------------------------


def plan_points(sizes: Sizes, *, with_flex: bool) -> dict[str, list[Point]]:
    """Return the points of each comparison; some belong to several."""
    windowed = (*WINDOWED, FLEX) if with_flex else WINDOWED

    def make_point(layer: str, length: int, width: int = sizes.width, batch: int | None = None, **own: int) -> Point:
        own = {"window": sizes.window} | own
        return Point(layer=layer, length=length, width=width, batch=batch or max(1, sizes.tokens // length), **own)

    def can_window(layer: str, length: int) -> bool:
        return layer not in windowed or length >= sizes.window

    parallel = (*ATTENTION, *windowed, "convolution")
    return {
        "length": [
            make_point(layer, n) for n in sizes.lengths for layer in (*parallel, *RECURRENT) if can_window(layer, n)
        ],
        # Scores that fit in a cache at one length and not at another would bend the curve.
        "scores length": [
            make_point("products explicit", n, batch=(sizes.scores_lengths[-1] // n) ** 2) for n in sizes.scores_lengths
        ],
        "recurrent length": [
            make_point(layer, n, batch=sizes.recurrent_batch) for layer in RECURRENT for n in sizes.recurrent_lengths
        ],
        # The batch falls with the width, so that the scores of explicit attention take the same memory.
        "width": [
            make_point(layer, sizes.width_length, d, sizes.tokens // sizes.width_length * sizes.widths[0] // d)
            for layer in (*ATTENTION, *WINDOWED)
            for d in sizes.widths
        ]
        + [make_point("convolution", sizes.width_length, d) for d in sizes.widths],
        "recurrent width": [
            make_point(layer, sizes.recurrent_width_length, d, 4 * sizes.recurrent_batch)
            for layer in RECURRENT
            for d in sizes.recurrent_widths
        ],
        "kernel": [make_point("convolution", sizes.width_length, kernel=k) for k in sizes.kernels],
        "window": [make_point("windowed products", sizes.window_length, window=r) for r in sizes.windows],
        "batch 1": [
            make_point(layer, n, batch=1) for layer in SINGLE for n in sizes.single_lengths if can_window(layer, n)
        ],
    }


def read_results(file: Path, machine: str, sizes: Sizes) -> dict[str, Any]:
    """Read the results of an interrupted run, or begin new ones."""
    settings = json.loads(json.dumps(asdict(sizes)))
    if not file.exists():
        return {"machine": machine, "sizes": settings, "points": {}, "paths": {}}
    saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if (saved["machine"], saved["sizes"]) != (machine, settings):
        is_now = f"is of {saved['machine']}" if saved["machine"] != machine else "has others"
        sys.exit(f"{file} must be of this machine ({machine}) and of these sizes, but {is_now}; give another --out")
    return saved


def write_results(file: Path, saved: dict[str, Any]) -> None:
    write_atomic(file, json.dumps(saved, indent=1).encode())


# --- measuring -------------------------------------------------------------------------------------------------------


def measure_points(
    groups: dict[str, list[Point]],
    saved: dict[str, Any],
    file: Path,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes,
) -> None:
    """Measure what is missing, and keep the best of all rounds. Flex attention is last, since it is compiled."""
    points = list({point.key: point for group in groups.values() for point in group}.values())
    points.sort(key=lambda point: point.layer == FLEX)
    reported = {point.key for point in groups["length"]}  # of which memory is reported
    missing = [
        (round_, point)
        for round_ in range(1, sizes.rounds + 1)
        for point in points
        if saved["points"].get(point.key, {"rounds": 0})["rounds"] < round_
    ]
    for i, (round_, point) in enumerate(missing, 1):
        try:
            with_memory = round_ == 1 and point.key in reported
            measured = measure_layer(point, device, dtype, sizes, with_memory=with_memory)
        except Exception as error:  # noqa: BLE001 - out of memory, or a kernel that cannot be compiled
            measured = {"error": str(error).partition("\n")[0][:200]}
        best = saved["points"].get(point.key, measured)
        if measured.get("seconds", math.inf) < best.get("seconds", math.inf):
            best = best | measured
        saved["points"][point.key] = best | {"rounds": round_}
        write_results(file, saved)
        outcome = measured.get("error") or f"{1e3 * measured['seconds']:.3f} ms"
        print(f"{i}/{len(missing)}  {point.key}: {outcome}", file=sys.stderr, flush=True)


def measure_layer(
    point: Point, device: torch.device, dtype: torch.dtype, sizes: Sizes, *, with_memory: bool
) -> dict[str, Any]:
    """Return the seconds of the fastest run, forward and backward, and its peak of memory above that of the inputs."""
    torch.manual_seed(0)
    layer = LAYERS[point.layer].build(point, device, dtype)
    direction = torch.randn_like(layer.forward().detach())
    runs: list[float] = []
    memory = measure_peak_bytes(layer, direction, device) if with_memory else None
    while len(runs) < sizes.min_runs or sum(runs) < sizes.min_seconds:
        runs.append(time_step(layer, direction, device))
    return {"seconds": min(runs)} | ({} if memory is None else {"bytes": memory})


def run_step(layer: BuiltLayer, direction: torch.Tensor) -> None:
    torch.autograd.grad(layer.forward(), layer.leaves, direction)


def time_step(layer: BuiltLayer, direction: torch.Tensor, device: torch.device) -> float:
    if device.type == "cuda":
        return time_by_events(lambda: run_step(layer, direction))
    start = time.process_time()
    run_step(layer, direction)
    return time.process_time() - start


def measure_peak_bytes(layer: BuiltLayer, direction: torch.Tensor, device: torch.device) -> int:
    if device.type == "cuda":
        run_step(layer, direction)  # libraries allocate workspaces on first use
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_step(layer, direction)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_step(layer, direction)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def measure_paths(saved: dict[str, Any], file: Path, sizes: Sizes) -> None:
    """Measure gradients on the CPU: the same numbers on every machine."""
    for layer in PATH_LAYERS:
        for length in sizes.path_lengths:
            key = f"{layer} n={length}"
            if key not in saved["paths"]:
                saved["paths"][key] = measure_gradient_path(layer, length, sizes.path)
        write_results(file, saved)
        print(f"gradient path: {layer}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
