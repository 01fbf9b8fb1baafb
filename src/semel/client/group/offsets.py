"""A group's committed offsets and a log's offsets. One try each; `retried` and `list_offsets_retried` retry.

Used by the consumer and by Spark's source. What they do is in `offset_calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from semel.client.cluster import Cluster
from semel.client.group import offset_calls
from semel.client.immediate import blocking
from semel.client.timing import Deadline

Value = TypeVar("Value")

list_offsets = blocking(offset_calls.list_offsets)
list_offsets_retried = blocking(offset_calls.list_offsets_retried)
fetch_committed = blocking(offset_calls.fetch_committed)


def retried(cluster: Cluster, attempt: Callable[[Deadline], Value], what: str, timeout_s: float | None = None) -> Value:
    """Runs one of the single tries above until it succeeds, fails for good or time is up."""
    deadline = cluster.deadline(timeout_s)
    return cluster.retry(lambda: attempt(deadline), what, deadline)
