"""Memory of one self-attention, forward and backward, against length: `fused` grows as T, `explicit` as T squared.

    python -m benchmarks.attention_memory [--lengths 512 1024 ...]

On CPU each measurement is the peak of a fresh process (less what torch itself takes); on CUDA the allocator's peak.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import torch

from attent.nn import Mask, attend
from benchmarks.measure import machine

LENGTHS = (512, 1024, 2048, 4096, 8192)
HEADS, HEAD_WIDTH = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "LENGTH"), help="measure one, print its bytes")
    arguments = parser.parse_args()
    if arguments.one:
        print(peak(arguments.one[0], int(arguments.one[1])))
        return
    print(f"causal self-attention, forward + backward, 1 x {HEADS} heads of {HEAD_WIDTH}, float32; {machine()}")
    print(f"{'T':>6} {'fused MiB':>10} {'explicit MiB':>13}   growth from the row above")
    before: dict[str, float] = {}
    for length in arguments.lengths:
        mib = {name: in_fresh_process(name, length) / 2**20 for name in ("fused", "explicit")}
        growth = ", ".join(f"{name} x{mib[name] / before[name]:.2f}" for name in mib if before.get(name))
        print(f"{length:>6} {mib['fused']:>10.1f} {mib['explicit']:>13.1f}   {growth}", flush=True)
        before = mib


def in_fresh_process(backend: str, length: int) -> int:
    command = [sys.executable, "-m", "benchmarks.attention_memory", "--one", backend, str(length)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak(backend: str, length: int) -> int:
    """Bytes at the peak, above what was there before the first tensor."""
    step(backend, 16)  # libraries load on first use
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        step(backend, length)
        return torch.cuda.max_memory_allocated()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(backend, length)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def step(backend: str, length: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, HEADS, length, HEAD_WIDTH, device=device, requires_grad=True) for _ in range(3))
    attend(q, k, v, Mask(causal=True), backend=backend).sum().backward()


if __name__ == "__main__":
    main()
