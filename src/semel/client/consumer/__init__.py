"""Reading records: assigned partitions or those of a group, rows or Arrow tables.

consumer   `Consumer`, the calls that users make    engine               one turn of its loop, and waiting
fetching   finds leaders and offsets, sends fetches  fetcher              what to fetch next, and what a response holds
decode     record batches to rows or columns         assigned_partitions  where each partition stands; pure
commits    commits on their way                      rebalance            what a new assignment does to the consumer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.client.consumer.consumer import Consumer as Consumer


def __getattr__(name: str) -> Any:
    """Loads `Consumer` when it is first used: the other modules of this package are used without it."""
    if name != "Consumer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from semel.client.consumer.consumer import Consumer

    return Consumer
