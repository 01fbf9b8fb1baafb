"""Keeps freed memory for the next answer.

A fetch answer is some megabytes, read into memory, sent and freed. By default glibc gives such blocks back to the
system each time, and the next answer pays for every page again: most of what a fetch costs in the kernel.
"""

from __future__ import annotations

KEPT_BYTES = 32 << 20  # so much freed memory stays with the process
LARGEST_KEPT_BYTES = 16 << 20  # larger blocks come from the system and go back to it
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # names in glibc's malloc.h


def keep_freed_memory() -> bool:
    """True if the C library could be told; others than glibc are left as they are."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
