"""Feature levels: which there are, which are final, and how they are changed while the broker runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode

# Feature -> (lowest, highest level that the code can do).
FEATURES = {"group.version": (0, 1), "transaction.version": (0, 2)}
LEVELS, _EPOCH = "feature-levels", "feature-epoch"


def epoch(broker: BrokerNode) -> int:
    """Goes up with every change."""
    number: int = broker.store.get(_EPOCH) or 1
    return number


def finalize(broker: BrokerNode, levels: Mapping[str, int]) -> None:
    """Durable on return; OSError: nothing changed."""
    known = {**(broker.store.get(LEVELS) or {}), **levels}
    broker.store.put(LEVELS, known)
    broker.store.put(_EPOCH, epoch(broker) + 1)
    broker.store.commit()
    broker.settings.finalize(known)
