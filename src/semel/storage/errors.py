"""What the storage refuses, with the error code that a client gets for it."""

from __future__ import annotations

from semel.protocol.errors import ErrorCode


class StorageError(Exception):
    """A refused or failed operation on a log. `code` is what the wire protocol calls it."""

    def __init__(self, code: ErrorCode, message: str, record_errors: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.record_errors = record_errors  # (index of the record in its batch, what is wrong with it)


class DataDirLockedError(Exception):
    """Another process (or another broker in this one) works on the data folder."""
