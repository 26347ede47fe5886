"""Serve models on a Ray cluster: every replica of a Ray Serve deployment is a whole translation server.

Ray's proxies, one per machine with a replica, accept the requests. For a request whose replica dies, the proxy of Ray
2.60 sends no response, which becomes a 500; so the proxies run `retry_requests`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from attent.decoding.ray_cluster import connect_to_ray, get_reason
from attent.serving.backend import MAX_ATTEMPTS, NUM_THREADS, LocalBackend, ServiceConfig
from attent.serving.limits import AsgiApp, Message, Receive, Scope, Send, ServeError
from attent.serving.server import SHUTDOWN_TIMEOUT, format_url, reserve_port
from attent.serving.translation_app import RequestRecord, ServerOptions, TranslationApp

APP_NAME = "attent"
TARGET_REQUESTS = 16  # running requests per replica that autoscaling aims at: they share batches
Replicas = int | tuple[int, int]  # their number, or the minimum and the maximum
PROXY_ENV = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.build_proxy_middlewares"}


def serve_on_ray(
    config: ServiceConfig,
    options: ServerOptions,
    replicas: Replicas,
    host: str,
    port: int | None,
    on_ready: Callable[[str], None],
) -> None:
    """Serve on the cluster at $RAY_ADDRESS, or on a new one on this machine, until Ctrl-C or SIGTERM.

    `config` is that of a replica: every machine of the cluster must have the model folders at the same path.
    """
    with reserve_port(host, port) as reserved:
        free_port = reserved.getsockname()[1]
    with connect_to_ray(config.device, PROXY_ENV) as (_, resources):
        from ray import serve

        serve.start(proxy_location="EveryNode", http_options={"host": host, "port": free_port})
        try:
            deploy(serve, config, options, replicas, resources)
            on_ready(format_url(host, free_port))
            while True:
                time.sleep(3600)
        except (KeyboardInterrupt, SystemExit):  # Ray raises the second one on SIGTERM
            serve.delete(APP_NAME)  # drains the replicas


def deploy(
    serve: Any,
    config: ServiceConfig,
    options: ServerOptions,
    replicas: Replicas,
    resources: dict[str, int],
) -> None:
    """Deploy the app and wait until its replicas are ready."""

    def build_app() -> AsgiApp:
        return handle_lifespan(TranslationApp(LocalBackend(config.load()), options))

    scaling: dict[str, Any] = {"num_replicas": replicas}
    if isinstance(replicas, tuple):
        limits = {"min_replicas": replicas[0], "max_replicas": replicas[1]}
        scaling = {"autoscaling_config": {**limits, "target_ongoing_requests": TARGET_REQUESTS}}
    deployment = serve.deployment(
        serve.ingress(build_app)(),
        name="translation",
        max_ongoing_requests=NUM_THREADS,
        max_queued_requests=options.limits.max_queued,  # in a proxy; further ones get 503
        graceful_shutdown_timeout_s=options.drain_timeout,
        max_constructor_retry_count=1,
        ray_actor_options=resources,
        **scaling,
    )
    try:
        serve.run(deployment.bind(), name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        (status,) = serve.status().applications[APP_NAME].deployments.values()
        raise ServeError(f"the replicas cannot load the models: {get_reason(status.message)}") from error


def handle_lifespan(app: TranslationApp) -> AsgiApp:
    """Return an ASGI app that starts `app` in the event loop of its replica, and drains it when the replica stops."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        await receive()
        await app.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await app.drain()
        await app.close(SHUTDOWN_TIMEOUT)
        await send({"type": "lifespan.shutdown.complete"})

    return handle


def build_proxy_middlewares() -> list[Any]:
    from starlette.middleware import Middleware

    return [Middleware(retry_requests)]


def retry_requests(app: AsgiApp) -> AsgiApp:
    """Return an ASGI app that sends a request without a response to `app` once more, then responds with 503."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        received: list[Message] = []
        num_sent = 0

        async def count_sent(message: Message) -> None:
            nonlocal num_sent
            num_sent += 1
            await send(message)

        for _ in range(MAX_ATTEMPTS):
            await app({**scope}, record_messages(receive, received), count_sent)
            if num_sent or scope["type"] != "http" or {"type": "http.disconnect"} in received:
                return
        await RequestRecord(scope, send).refuse("the model stopped unexpectedly; try again")

    return handle


def record_messages(receive: Receive, received: list[Message]) -> Receive:
    """Return a `receive` that repeats the messages received so far, then receives and records further ones."""
    earlier = iter([*received])

    async def receive_next() -> Message:
        message = next(earlier, None)
        if message is None:
            message = await receive()
            received.append(message)
        return message

    return receive_next
