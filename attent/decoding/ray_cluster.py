"""Connect to a Ray cluster (extra `ray`)."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attent.decoding.options import DeviceOptions, InputError

# Of a cluster on this machine. Ray runs what it receives, so its ports are those of 127.0.0.1 and need a token.
LOCAL_ENV = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: listen at 127.0.0.1 only
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",  # otherwise Ray reports its usage over the network
}


@contextmanager
def connect_to_ray(device: DeviceOptions, env: Mapping[str, str] | None = None) -> Iterator[tuple[Any, dict[str, int]]]:
    """Connect to $RAY_ADDRESS or a new local cluster; yield `ray` and the resources of a process with a model."""
    address = os.environ.get("RAY_ADDRESS")
    os.environ.update({} if address else LOCAL_ENV | {"RAY_AUTH_TOKEN": secrets.token_hex(32)} | os.environ)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise InputError("--ray needs the package `ray`, which is not installed: pip install 'attent[ray]'") from error
    local = {} if address else {"include_dashboard": False, "object_store_memory": 2**27}  # only text passes through it
    runtime_env = {"env_vars": dict(env or {})}
    ray.init(address or "local", runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR", **local)
    try:
        use_gpu = device.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= 1
        yield ray, {"num_cpus": device.threads or 1, "num_gpus": int(use_gpu)}
    finally:
        ray.shutdown()


def get_reason(problem: object) -> str:
    line = str(problem).strip().splitlines()[-1]
    return line.partition(": ")[2] or line
