"""Writing records: batches, sequences, retries, transactions.

producer         `Producer`, the calls that users make      sender              sends batches, takes their responses
accumulator      where records wait, memory is counted       partition_queue     order and retries of a partition; pure
batches          one batch, and the deliveries of its rows   tables              Arrow tables to batches
transactions     a producer's transaction                    transaction_states  its life as one table; pure
coordinator      the requests of a transaction               handle              one transaction, many processes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.client.producer.producer import Producer as Producer


def __getattr__(name: str) -> Any:
    """Loads `Producer` when it is first used: the other modules of this package are used without it."""
    if name != "Producer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from semel.client.producer.producer import Producer

    return Producer
