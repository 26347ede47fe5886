"""Errors of files and folders; each message names the file and says what to do."""

from __future__ import annotations


class StorageError(ValueError):
    """A file or folder that cannot be read, written or downloaded."""


class FolderError(StorageError):
    """A model folder or checkpoint that cannot be read or written."""
