"""Serve a model over HTTP: ASGI app, limits and an embedded server (extra `serve`)."""

from attent.serving.app import HttpApp, create_app
from attent.serving.limits import Limits, ServeError
from attent.serving.request import LookRequest
from attent.serving.server import serve_app, serve_in_thread

__all__ = ["HttpApp", "Limits", "LookRequest", "ServeError", "create_app", "serve_app", "serve_in_thread"]
