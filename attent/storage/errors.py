"""The base of all errors that a user can correct: each message names the file and says what to do."""


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
