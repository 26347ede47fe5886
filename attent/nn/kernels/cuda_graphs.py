"""Capture of CUDA graphs: many small kernels are recorded once, then launched as one.

A graph reads and writes the same memory at each replay. Which tensors stay in place is the caller's business.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def capture_graph(
    work: Callable[[], object], *, pool: Any, stream: torch.cuda.Stream, trim_memory: bool = True
) -> torch.cuda.CUDAGraph:
    """Capture the kernels that `work` launches, with memory from `pool`.

    pool         `torch.cuda.graph_pool_handle()`; graphs may share it if they are captured on one stream
    trim_memory  synchronize, collect garbage and empty the allocator's cache first, as `torch.cuda.graph` does
    """
    if trim_memory:
        torch.cuda.synchronize(stream.device)
        gc.collect()
        torch.cuda.empty_cache()
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # Thread-local: other threads may allocate meanwhile, pinned memory for instance.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # ending a failed capture fails too, and would hide the error of `work`
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(stream)
    return graph
