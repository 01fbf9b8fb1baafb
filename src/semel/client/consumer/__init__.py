"""Reading records: assigned partitions or those of a group, rows or Arrow tables.

consumer   `Consumer`, which waits in its thread   base                 the calls that users make, as coroutines
core       its group, and what a new assignment    engine               its drivers: fetches, commits, turns of its loop
           does to it                              assigned_partitions  where each partition stands
fetching   where to start, what a response means   fetcher              what to fetch next, and what came
commits    the order of commits                    reader               hands out what was fetched
decode     record batches to rows or columns

Those without I/O: core, fetching, fetcher, commits, reader, assigned_partitions.
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
