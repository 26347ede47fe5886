"""`attent serve`: a web page and HTTP APIs for translators and language models."""

import logging
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from attent.cli.shared import DeviceFlags, build_device_options, check_positive, raise_usage_errors

if TYPE_CHECKING:
    from attent.serving.gateway import ServerOptions

server_flag, limit_flag = (
    partial(Parameter, group=Group(name, sort_key=number), negative="")
    for number, name in enumerate(("Server", "Limits"), 1)
)
LIST = {"consume_multiple": True, "negative_iterable": ""}
KEY_VARIABLE = "ATTENT_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeFlags(DeviceFlags):  # type: ignore[misc]  # derived from the options
    host: Annotated[str, server_flag(help="address to listen at; other than 127.0.0.1 it needs a key")] = "127.0.0.1"
    port: Annotated[int | None, server_flag(help="by default the first free port from 8017; 0: any free port")] = None
    src: Annotated[str | None, server_flag(help="source language of a model whose folder does not say it")] = None
    tgt: Annotated[str | None, server_flag(help="target language of such a model")] = None
    adapter: Annotated[tuple[str, ...], server_flag(help="NAME=FOLDER of an adapter of a model; repeatable")] = ()
    workers: Annotated[int | None, server_flag(help="processes with the models; by default one per device")] = None
    devices: Annotated[tuple[str, ...], server_flag(help="devices of the workers, such as cuda:0 cuda:1", **LIST)] = ()
    ray: Annotated[bool, server_flag(help="serve on the Ray cluster at $RAY_ADDRESS, or on a new one here")] = False
    replicas: Annotated[int | None, server_flag(help="with --ray: processes with the models; by default 1")] = None
    autoscale: Annotated[tuple[int, int] | None, server_flag(help="with --ray: fewest and most replicas")] = None
    api_key: Annotated[tuple[str, ...], server_flag(help=f"key of a client, also in ${KEY_VARIABLE}; repeatable")] = ()
    allow_public: Annotated[bool, server_flag(help="serve other machines without a key")] = False
    allow_host: Annotated[tuple[str, ...], server_flag(help="host name of this server, behind a proxy", **LIST)] = ()
    allow_origin: Annotated[tuple[str, ...], server_flag(help="website whose scripts may use it; *: any", **LIST)] = ()
    trust_proxy: Annotated[bool, server_flag(help="take the client's address from X-Forwarded-For")] = False
    suggestions: Annotated[Path | None, server_flag(help="file that gets the translations that users suggest")] = None
    verbose: Annotated[bool, server_flag(name=["--verbose", "-v"], help="log each request, without its text")] = False
    log_text: Annotated[bool, server_flag(help="also log the texts to translate")] = False
    max_characters: Annotated[int, limit_flag(help="of a request, by default 10,000")] = 10_000
    max_texts: Annotated[int, limit_flag(help="of a request, by default 128")] = 128
    max_file_bytes: Annotated[int, limit_flag(help="of a file to translate, by default 1 MiB")] = 2**20
    max_queued: Annotated[int, limit_flag(help="requests that wait, by default 256; further ones get 503")] = 256
    requests_per_minute: Annotated[int, limit_flag(help="of a client, by default 3,000; 0: any number")] = 3_000
    timeout: Annotated[float, limit_flag(help="seconds for a response, by default 30")] = 30.0
    cache: Annotated[int, limit_flag(help="characters of cached translations, default 4 million; 0: none")] = 4_000_000


def serve(
    models: Annotated[list[Path], Parameter(help="model folders, of attent or Hugging Face transformers")],
    /,
    *,
    flags: Annotated[ServeFlags, Parameter(name="*", show_default=False)] = ServeFlags(),
) -> None:
    """Serve models over HTTP: a page to translate with, and the APIs of LibreTranslate, DeepL and OpenAI.

    attent serve runs/en-de runs/de-en
    curl localhost:8017/translate -d q="A man rides a bike." -d source=en -d target=de
    """
    from attent.serving import run

    with raise_usage_errors("serve", ServeFlags):
        check_flags(flags)
        options, adapters = build_options(flags), parse_adapters(flags.adapter)
        run.check_host(flags.host, options, flags.allow_public)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")  # to stderr: problems, with --verbose requests
    logging.getLogger("attent.serving").setLevel(logging.INFO if flags.verbose or flags.log_text else logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every malformed form
    names = ("host", "port", "src", "tgt", "workers", "devices", "allow_public")
    print(f"loading {', '.join(map(str, models))} ...", file=sys.stderr, flush=True)
    run.serve(
        models,
        adapters=adapters,
        **{name: getattr(flags, name) for name in names},
        replicas=(flags.autoscale or flags.replicas or 1) if flags.ray else None,
        device=build_device_options(flags),
        options=options,
        on_ready=announce,
    )


def check_flags(flags: ServeFlags) -> None:
    check_positive("serve", workers=flags.workers, threads=flags.threads, replicas=flags.replicas)
    num_scaling_flags = (flags.replicas is not None) + (flags.autoscale is not None)
    if num_scaling_flags > flags.ray or (flags.ray and (flags.workers or flags.devices)):
        raise ValueError("--replicas or --autoscale need --ray, with one of them and without --workers and --devices")
    if flags.autoscale and not 1 <= flags.autoscale[0] <= flags.autoscale[1]:
        raise ValueError(f"--autoscale must be two numbers from 1, the smaller one first, but is {flags.autoscale}")


def parse_adapters(texts: tuple[str, ...]) -> dict[str, str]:
    named = {name: folder for name, _, folder in (text.partition("=") for text in texts)}
    if not all((*named, *named.values())) or len(named) < len(texts):
        problem = f"--adapter must be different names with folders, such as legal=runs/legal, but is {' '.join(texts)}"
        raise ValueError(problem)
    return named


def build_options(flags: ServeFlags) -> "ServerOptions":
    from attent.serving.gateway import ServerOptions
    from attent.serving.limits import LOCAL_HOSTS, Limits

    names = ("max_characters", "max_texts", "max_file_bytes", "max_queued", "requests_per_minute")
    limits = Limits(
        **{name: getattr(flags, name) for name in names},
        max_body_bytes=max(2**18, 12 * flags.max_characters),
        response_timeout=flags.timeout,
        body_timeout=8.0,
    )
    return ServerOptions(
        limits=limits,
        keys=frozenset([*flags.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]),
        hosts=(*LOCAL_HOSTS, *flags.allow_host),
        origins=flags.allow_origin,
        cached_characters=flags.cache,
        trust_proxy=flags.trust_proxy,
        log_text=flags.log_text,
        suggestions=flags.suggestions,
    )


def announce(url: str) -> None:
    print(url, flush=True)
    print(f"open it in a browser; the API is described at {url}/docs; stop with Ctrl-C", file=sys.stderr, flush=True)
