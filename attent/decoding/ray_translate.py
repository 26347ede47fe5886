"""Translate a large file on a Ray cluster: the same output as in one process, resumed after an interruption.

Workers translate the blocks of lines that one process would. This process writes them to OUTPUT.blocks/FINGERPRINT,
several blocks to a file; the fingerprint covers the input, the models and the options.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from attent import __version__
from attent.decoding import pipeline as pipelines
from attent.decoding.input_lines import LineBlock, LineSource
from attent.decoding.options import DeviceOptions, InputError
from attent.decoding.ray_cluster import connect_to_ray, get_reason
from attent.storage.atomic import make_folder, open_output, write_atomic
from attent.storage.manifest import MANIFEST_FILE, hash_file

TASK_BLOCKS = 8  # blocks of a task, which is the unit of resuming
MAX_RETRIES = 3  # of a task whose worker died; Ray starts the worker again

Task = tuple[Path, list[LineBlock]]  # blocks, and the file that gets their translation
TaskResult = tuple[Task, str | None, list[str]]  # translation, None if the file exists; messages for the user


class BlockWorker:
    def __init__(self, build_pipeline: Callable[[], pipelines.TranslationPipeline]) -> None:
        self._pipeline = build_pipeline()

    def translate(self, task: Task) -> TaskResult:
        text, messages = "", []
        for block in task[1]:
            block_text, block_messages, error = pipelines.translate_block(self._pipeline, block)
            if error is not None:
                raise InputError(error)
            text += block_text
            messages += block_messages
        return task, text, messages


def translate_with_ray(
    build_pipeline: Callable[[], pipelines.TranslationPipeline],
    source: LineSource,
    output: Path,
    fingerprint: str,
    device: DeviceOptions,
    progress: pipelines.LineProgress,
) -> None:
    """Translate a file on all free cores or GPUs of the cluster. `build_pipeline` runs in each worker."""
    folder = output.with_name(f"{output.name}.blocks") / fingerprint
    paths: list[Path] = []
    line_count, done_bytes = 0, 0
    with connect_to_ray(device) as (ray, resources):
        make_folder(folder)
        if any(folder.iterdir()):
            progress.print_message(f"resuming with the finished blocks in {folder}")
        block_lines = pipelines.GPU_BLOCK_LINES if resources["num_gpus"] else pipelines.CPU_BLOCK_LINES
        blocks = source.read_blocks(block_lines)
        groups = iter(lambda: list(islice(blocks, TASK_BLOCKS)), [])
        tasks = ((folder / f"{number:08}.txt", group) for number, group in enumerate(groups))
        for (path, group), text, messages in run_tasks(ray, build_pipeline, resources, tasks):
            if text is not None:
                write_atomic(path, text.encode())
            for message in messages:
                progress.print_message(message)
            paths.append(path)
            line_count += sum(len(block.lines) for block in group)
            done_bytes += sum(block.byte_count for block in group)
            progress.update(line_count, done_bytes)
    with open_output(output, progress.print_message) as out:
        for path in sorted(paths):
            out.write(path.read_bytes().decode())
    shutil.rmtree(folder)
    with suppress(OSError):  # it has blocks of other options
        folder.parent.rmdir()


def run_tasks(
    ray: Any,
    build_pipeline: Callable[[], pipelines.TranslationPipeline],
    resources: dict[str, int],
    tasks: Iterator[Task],
) -> Iterator[TaskResult]:
    free = ray.available_resources()
    num_workers = min(int(free.get(name[4:-1].upper(), 0)) // need for name, need in resources.items() if need)
    worker_class = ray.remote(max_restarts=-1, max_task_retries=MAX_RETRIES, **resources)(BlockWorker)
    pool = ray.util.ActorPool([worker_class.remote(build_pipeline) for _ in range(max(1, num_workers))])
    try:
        for task in tasks:
            if task[0].exists():
                yield task, None, []
                continue
            if not pool.has_free():
                yield pool.get_next_unordered()
            pool.submit(lambda worker, task: worker.translate.remote(task), task)
        while pool.has_next():
            pool.pop_idle()  # ends an idle worker, so that one whose machine is lost can start in its place
            yield pool.get_next_unordered()
    except ray.exceptions.RayError as error:
        raise InputError(get_reason(error)) from error


def compute_fingerprint(paths: Iterable[Path], options: str) -> str:
    digest = hashlib.sha256(f"{__version__} {options}".encode())
    for path in paths:
        is_listed = (path / MANIFEST_FILE).exists()  # with the hashes of the other files
        files = [path / MANIFEST_FILE] if is_listed else sorted(path.iterdir()) if path.is_dir() else [path]
        for file in filter(Path.is_file, files):
            digest.update(f"{file.name} {hash_file(file).sha256}\n".encode())
    return digest.hexdigest()[:16]
