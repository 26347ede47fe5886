"""A model behind HTTP: the app, its limits, and the server that runs it in this process (extra `serve`)."""

from attent.serve.app import Site, make_app
from attent.serve.limits import Limits
from attent.serve.question import Question
from attent.serve.run import ServeError, running, serve

__all__ = ["Limits", "Question", "ServeError", "Site", "make_app", "running", "serve"]
