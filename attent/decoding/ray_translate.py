"""Translate a large file on a Ray cluster: the same output as in one process, resumed after an interruption.

Workers translate the blocks of lines that one process would. This process writes them to OUTPUT.blocks/FINGERPRINT,
several blocks to a file; the fingerprint covers the input, the models and the options.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

from attent import __version__
from attent.decoding.input_lines import LineBlock, LineSource, parse_text_line
from attent.decoding.options import DeviceOptions, InputError
from attent.decoding.pipeline import BlockOutput, LineProgress, TranslationPipeline, translate_block
from attent.decoding.ray_cluster import connect_to_ray, get_reason
from attent.storage.atomic import make_folder, open_output, write_atomic
from attent.storage.manifest import MANIFEST_FILE, hash_file

TASK_LINES = 2048  # of a task, which is the unit of resuming
MAX_RETRIES = 3  # of a task whose worker died; Ray starts the worker again

Blocks = Sequence[LineBlock[str]]


class BlockWorker:
    """A process with the model, as a Ray actor."""

    def __init__(self, build_pipeline: Callable[[], TranslationPipeline]) -> None:
        self._pipeline = build_pipeline()

    def get_block_lines(self) -> int:
        return self._pipeline.block_lines

    def translate(self, path: Path, blocks: Blocks) -> tuple[Path, list[BlockOutput]]:
        return path, [translate_block(self._pipeline, block) for block in blocks]  # type: ignore[arg-type]


def translate_with_ray(
    build_pipeline: Callable[[], TranslationPipeline],
    source: LineSource,
    output: Path,
    fingerprint: str,
    device: DeviceOptions,
    progress: LineProgress,
) -> None:
    """Translate a file on all free cores or GPUs of the cluster. `build_pipeline` runs in each worker."""
    folder = output.with_name(f"{output.name}.blocks") / fingerprint
    sizes: dict[Path, tuple[int, int]] = {}  # file of finished blocks -> lines, bytes

    def iterate_tasks(block_lines: int) -> Iterator[tuple[Path, Blocks]]:
        blocks = source.read_blocks(block_lines, parse_text_line)
        for number in count():
            if not (group := list(islice(blocks, max(1, TASK_LINES // block_lines)))):
                return
            path = folder / f"{block_lines}-{number:08}.txt"
            sizes[path] = sum(len(block.lines) for block in group), sum(block.byte_count for block in group)
            if not path.exists():
                yield path, group

    with connect_to_ray(device) as (ray, resources):
        make_folder(folder)
        finished = set(folder.iterdir())
        if finished:
            progress.print_message(f"resuming with the finished blocks in {folder}")
        for path, outputs in run_tasks(ray, build_pipeline, resources, iterate_tasks):
            for _, messages, error in outputs:
                for message in messages:
                    progress.print_message(message)
                if error is not None:
                    raise InputError(error)
            write_atomic(path, "".join(text for text, _, _ in outputs).encode())
            finished.add(path)
            progress.update(*map(sum, zip(*(sizes[path] for path in finished & sizes.keys()), strict=True)))
    with open_output(output, progress.print_message) as out:
        for path in sizes:
            out.write(path.read_bytes().decode())
    shutil.rmtree(folder)
    with suppress(OSError):  # blocks of other options
        folder.parent.rmdir()


def run_tasks(
    ray: Any,
    build_pipeline: Callable[[], TranslationPipeline],
    resources: dict[str, int],
    iterate_tasks: Callable[[int], Iterator[tuple[Path, Blocks]]],
) -> Iterator[tuple[Path, list[BlockOutput]]]:
    """Yield the outputs of tasks as they finish."""
    free = ray.available_resources()
    num_workers = min(int(free.get(name[4:-1].upper(), 0)) // need for name, need in resources.items() if need)
    worker_class = ray.remote(max_restarts=-1, max_task_retries=MAX_RETRIES, **resources)(BlockWorker)
    pool = ray.util.ActorPool([worker_class.remote(build_pipeline) for _ in range(max(1, num_workers))])
    try:
        worker = pool.pop_idle()
        tasks = iterate_tasks(ray.get(worker.get_block_lines.remote()))
        pool.push(worker)
        del worker
        for task in tasks:
            if not pool.has_free():
                yield pool.get_next_unordered()
            pool.submit(lambda worker, task: worker.translate.remote(*task), task)
        while pool.has_next():
            pool.pop_idle()  # ends it, so that a worker whose machine is lost can start elsewhere
            yield pool.get_next_unordered()
    except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
        raise InputError(f"the workers cannot translate: {get_reason(error)}; run it again to resume") from error


def compute_fingerprint(paths: Iterable[Path], options: str) -> str:
    """Return a hash of options and of the contents of files and model folders."""
    digest = hashlib.sha256(f"{__version__} {options}".encode())
    for path in paths:
        is_listed = (path / MANIFEST_FILE).exists()  # with the hashes of the other files
        files = [path / MANIFEST_FILE] if is_listed else sorted(path.iterdir()) if path.is_dir() else [path]
        for file in filter(Path.is_file, files):
            digest.update(f"{file.name} {hash_file(file).sha256}\n".encode())
    return digest.hexdigest()[:16]
