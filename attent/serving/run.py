"""Serve models: `attent serve` and `attent.serve`."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from attent.decoding.options import DeviceOptions
from attent.serving.backend import ServiceConfig, WorkerPool
from attent.serving.gateway import ServerOptions
from attent.serving.limits import LOCAL_HOSTS, ServeError
from attent.serving.server import serve_app
from attent.serving.translation_app import TranslationApp
from attent.storage.hub import locate_model

PUBLIC_HOSTS = ("0.0.0.0", "::")


def serve(
    models: str | Path | Sequence[str | Path],
    *,
    adapters: Mapping[str, str | Path] = MappingProxyType({}),
    host: str = "127.0.0.1",
    port: int | None = None,
    src: str | None = None,
    tgt: str | None = None,
    workers: int | None = None,
    devices: Sequence[str] = (),
    replicas: int | tuple[int, int] | None = None,
    device: DeviceOptions = DeviceOptions(),  # noqa: B008 - frozen
    options: ServerOptions = ServerOptions(),  # noqa: B008 - frozen
    allow_public: bool = False,
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serve models over HTTP until Ctrl-C or SIGTERM: a page, attent's API, and those of LibreTranslate and others.

    >>> attent.serve("runs/en-de", src="en", tgt="de", port=0, on_ready=print_and_stop)  # default: serve until Ctrl-C
    http://127.0.0.1:...

    models        folders of translators and language models
    adapters      folders of adapters by name; a request names one as its model
    port          None: the first free port from 8017; 0: any free port
    src, tgt      languages of a model whose folder does not say them
    workers       processes with all models; by default one per device
    devices       such as cuda:0 and cuda:1; by default the fastest
    replicas      processes with all models on a Ray cluster, or their minimum and maximum; None: without Ray
    allow_public  accept connections from other machines without an API key
    on_ready      gets the address; by default it is printed
    """
    names = [models] if isinstance(models, str | Path) else models
    config = ServiceConfig(
        folders=tuple(locate_model(name).expanduser() for name in names),
        device=device,
        languages=(src, tgt),
        limits=options.limits,
        adapters=tuple((name, Path(folder).expanduser()) for name, folder in adapters.items()),
    )
    check_host(host, options, allow_public)
    for folder in (*config.folders, *dict(config.adapters).values()):
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise ServeError(f"{folder}: must be a model folder, but {problem}; train one with attent train")
    if host not in (*LOCAL_HOSTS, "::1") and options.hosts == LOCAL_HOSTS:
        options = replace(options, hosts=("*",) if host in PUBLIC_HOSTS else (*LOCAL_HOSTS, host))
    if replicas is not None:
        from attent.serving.ray_serve import serve_on_ray

        folders = tuple(folder.absolute() for folder in config.folders)  # a replica has another working directory
        adapter_folders = tuple((name, folder.absolute()) for name, folder in config.adapters)
        device = replace(device, threads=device.threads or 1)
        config = replace(config, folders=folders, adapters=adapter_folders, device=device)
        options = replace(options, suggestions=options.suggestions and options.suggestions.expanduser().absolute())
        serve_on_ray(config, options, replicas, host, port, on_ready)
        return
    pool = WorkerPool(share_devices(config, workers, devices), drain_timeout=options.drain_timeout)
    serve_app(TranslationApp(pool, options), host=host, port=port, on_ready=on_ready)


def check_host(host: str, options: ServerOptions, allow_public: bool) -> None:
    """Refuse to serve other machines without a key, unless it is allowed explicitly."""
    if host not in (*LOCAL_HOSTS, "::1") and not options.keys and not allow_public:
        raise ServeError(
            f"`host` {host} accepts requests from other machines, so there must be an API key, but there is none; "
            f"set one with --api-key, or allow everybody with --allow-public"
        )


def share_devices(config: ServiceConfig, workers: int | None, devices: Sequence[str]) -> list[ServiceConfig]:
    """Return the configuration of each worker. They share the CPU's cores, and take the devices in turn."""
    count = workers or max(1, len(devices))
    threads = config.device.threads or max(1, (os.cpu_count() or 1) // count)
    names = [devices[index % len(devices)] if devices else config.device.device for index in range(count)]
    return [replace(config, device=replace(config.device, device=name, threads=threads)) for name in names]


def configure_logging(verbose: bool) -> None:
    """Log to stderr: problems, and with `verbose` each request, without its text."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("attent.serving").setLevel(logging.INFO if verbose else logging.WARNING)
