"""What can be wrong with a folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from semel.client.errors import AbortableError, FatalError


class FolderError(FatalError):
    """The folder cannot be used as it is: the message says what was found and what to do. Nothing was deleted."""


class OlderFolderError(FolderError):
    """The offsets of the folder and those of the group or the topic do not fit together: one of them was restored."""


class FolderTakenError(AbortableError):
    """Another instance has this partition now; what this one wrote is not visible and never will be."""


class UnfitRowError(ValueError):
    """A row that cannot be written: the cause of a `RecordError`, or the reason of a dead letter."""


_REMEDIES = {
    errno.ENOSPC: "free space on the disk, then start again",
    errno.EDQUOT: "free space or raise the quota, then start again",
    errno.EACCES: "grant this user the right to write there, then start again",
    errno.EPERM: "the file system must know hard links, and this user must have the right to make them",
    errno.EROFS: "mount the file system for writing, then start again",
    errno.ENOENT: "the folder was moved or deleted: put it back, then start again",
}


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raises the system's errors as `FolderError`, with the remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "correct the cause, then start again")
        raise FolderError(f"{what}: {error.strerror or error}; {remedy}") from error
