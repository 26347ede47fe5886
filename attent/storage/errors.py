"""The base of all errors that a user can correct: each message names the file and says what to do."""

from importlib import import_module
from typing import Any


class AttentError(ValueError):
    """A mistake of the user, or input that cannot be used. A notebook shows its message without a traceback.

    >>> try:
    ...     attent.load("nowhere")
    ... except attent.AttentError as error:
    ...     print(error)
    nowhere: must be a model folder, but does not exist; give the folder that holds config.json
    """

    def _render_traceback_(self) -> list[str]:  # called by IPython
        return [f"{type(self).__name__}: {self}"]


class StorageError(AttentError):
    """A file or folder that cannot be read, written or downloaded."""


class FolderError(StorageError):
    """A model folder or checkpoint that cannot be read or written."""


def import_package(module: str, purpose: str, install: str) -> Any:
    """Import an optional package; `purpose` begins the sentence that says how to install it."""
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # OSError: the package is there, but its library is not
        name = module.partition(".")[0]
        raise AttentError(f"{purpose} needs {name}, which is not installed: pip install {install}") from error
