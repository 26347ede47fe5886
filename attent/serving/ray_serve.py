"""Serve models on a Ray cluster: every replica of a Ray Serve deployment is a whole translation server.

Ray's proxies, one per machine with a replica, accept the requests. For a request whose replica dies, the proxy of Ray
2.60 sends no response, and its HTTP server a plain 500; so the proxies run `retry_requests`.
"""

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attent.decoding.ray_cluster import connect_to_ray, get_reason
from attent.serving import limits
from attent.serving.backend import MAX_ATTEMPTS, LocalBackend, ServiceConfig
from attent.serving.gateway import ServerOptions
from attent.serving.limits import ServeError
from attent.serving.translation_app import TranslationApp

APP_NAME = "attent"
MAX_ONGOING_REQUESTS = 64  # of a replica
TARGET_REQUESTS = 16  # running requests per replica that autoscaling aims at: they share batches
PROXY_ENV = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.build_proxy_middlewares"}


def serve_on_ray(
    config: ServiceConfig,
    options: ServerOptions,
    replicas: int | tuple[int, int],
    host: str,
    port: int,
    on_ready: Callable[[str], None],
) -> None:
    """Serve on the cluster at $RAY_ADDRESS, or on a new one on this machine, until Ctrl-C or SIGTERM.

    config    of a replica; every machine of the cluster must have the model folders at the same path
    replicas  their number, or the minimum and the maximum
    """

    def build_app() -> ASGIApp:  # in each replica; Ray waits for its running requests before it stops a replica
        app = TranslationApp(LocalBackend(config.load()), options)

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app.start()
            await app(scope, receive, send)

        return handle

    scaling: dict[str, Any] = {"num_replicas": replicas}
    if isinstance(replicas, tuple):
        bounds = dict(zip(("min_replicas", "max_replicas"), replicas, strict=True))
        scaling = {"autoscaling_config": {**bounds, "target_ongoing_requests": TARGET_REQUESTS}}
    with connect_to_ray(config.device, PROXY_ENV) as (_, resources):
        from ray import serve

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        deployment = serve.deployment(
            serve.ingress(build_app)(),
            name="translation",
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
            max_queued_requests=options.limits.max_queued,  # in a proxy; further ones get 503
            graceful_shutdown_timeout_s=options.drain_timeout,
            max_constructor_retry_count=1,
            ray_actor_options=resources,
            **scaling,
        )
        try:
            serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
            serve.run(deployment.bind(), name=APP_NAME, route_prefix="/")
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            while True:
                time.sleep(3600)
        except RuntimeError as error:
            deployments = getattr(serve.status().applications.get(APP_NAME), "deployments", {}).values()
            raise ServeError(get_reason(next((each.message for each in deployments), error))) from error
        except KeyboardInterrupt:
            pass
        finally:
            serve.delete(APP_NAME)


def build_proxy_middlewares() -> list[Any]:
    from starlette.middleware import Middleware

    return [Middleware(retry_requests)]


def retry_requests(app: ASGIApp) -> ASGIApp:
    """Return an ASGI app that sends a request without a response to `app` once more, then responds with 503."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        received: list[Message] = []
        sent: set[str] = set()

        async def receive_next(earlier: Iterator[Message]) -> Message:
            if (message := next(earlier, None)) is None:
                message = await receive()
                received.append(message)
            return message

        async def record_and_send(message: Message) -> None:
            sent.add(message["type"])
            await send(message)

        for _ in range(MAX_ATTEMPTS):
            earlier = iter(list(received))
            await app({**scope}, partial(receive_next, earlier), record_and_send)
            if sent or scope["type"] != "http" or {"type": "http.disconnect"} in received:
                return
        error = limits.make_unavailable_error("the model stopped unexpectedly; try again")
        await limits.ResponseSender(send).send_error(error)

    return handle
