"""Serve models over HTTP: ASGI apps, limits, worker processes and an embedded server (extra `serve`)."""
