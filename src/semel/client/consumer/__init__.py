"""Reading records: assigned partitions or those of a group, rows or Arrow tables.

consumer   `Consumer`, which waits in its thread     base                 the calls that users make, as coroutines
core       what it decides about its group           engine               its driver: turns of its loop, waiting
fetching   where to start, what a response means     fetch_driver         sends fetches, looks offsets and leaders up
fetcher    what to fetch next, and what came         commit_driver        sends commits, and calls back
commits    the order of commits                      assigned_partitions  where each partition stands
reader     hands out what was fetched                rebalance            what a new assignment does to the consumer
iteration  which records were yielded                decode               record batches to rows or columns

Those without I/O: core, fetching, fetcher, commits, reader, iteration, assigned_partitions, rebalance.
See docs/decisions/0032.
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
