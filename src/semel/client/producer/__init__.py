"""Writing records: batches, sequences, retries, transactions.

What it decides, without I/O, lock or clock (decision 32):
core             what is sent when, what responses mean    identities          under which id and epoch
accumulator      where rows wait, and in which order       transaction         a transaction and its failures
batches          one batch                                 transaction_states  its life as one table

What it does:
producer         `Producer`, the calls that users make     sender              drives the core: lock, network, waiting
transactions     the calls of a transaction                coordinator         their requests
deliveries       what a program holds of its records       handle              one transaction, many processes
tables           Arrow tables to batches                   sending             what all drivers do alike
base             what `Producer` and `semel.aio` share
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.client.producer.producer import Producer as Producer
    from semel.client.producer.transaction import PreparedTransaction as PreparedTransaction


def __getattr__(name: str) -> Any:
    """Loads what users import from here when it is first used: the modules of this package are used without it."""
    home = {"Producer": "producer", "PreparedTransaction": "transaction"}.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
