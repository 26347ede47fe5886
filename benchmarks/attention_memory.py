"""Memory of one self-attention, forward and backward, against length T: `fused` grows as T, `explicit` as T squared.

    python -m benchmarks.attention_memory [--lengths 512 1024 ...]

On a CPU each measurement is the peak of a fresh process, minus the memory of torch; on CUDA, the allocator's peak.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import torch

from attent.nn import Mask, attend
from benchmarks.timing import describe_machine

LENGTHS = (512, 1024, 2048, 4096, 8192)
CASES = ("fused causal", "fused padded", "explicit causal")  # backend and mask
HEADS, HEAD_WIDTH = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "LENGTH"), help="measure one, print its bytes")
    arguments = parser.parse_args()
    if arguments.one:
        print(measure_peak(arguments.one[0], int(arguments.one[1])))
        return
    print(f"self-attention, forward + backward, 1 x {HEADS} heads of {HEAD_WIDTH}, float32; {describe_machine()}")
    print(f"{'T':>6}" + "".join(f"{case + ' MiB':>22}" for case in CASES) + "   growth")
    before: dict[str, float] = {}
    for length in arguments.lengths:
        mib = {case: measure_in_fresh_process(case, length) / 2**20 for case in CASES}
        growth = ", ".join(f"x{mib[case] / before[case]:.2f}" for case in CASES if before.get(case))
        print(f"{length:>6}" + "".join(f"{mib[case]:>22.1f}" for case in CASES) + f"   {growth}", flush=True)
        before = mib


def measure_in_fresh_process(case: str, length: int) -> int:
    command = [sys.executable, "-m", "benchmarks.attention_memory", "--one", case, str(length)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_peak(case: str, length: int) -> int:
    """Return the peak memory in bytes, above that before the first tensor."""
    run_step(case, 16)  # libraries load on first use
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        run_step(case, length)
        return torch.cuda.max_memory_allocated()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_step(case, length)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


def run_step(case: str, length: int) -> None:
    backend, kind = case.split()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = Mask(causal=True) if kind == "causal" else Mask(key_lengths=torch.tensor([length - 5], device=device))
    q, k, v = (torch.randn(1, HEADS, length, HEAD_WIDTH, device=device, requires_grad=True) for _ in range(3))
    attend(q, k, v, mask, backend=backend).sum().backward()


if __name__ == "__main__":
    main()
