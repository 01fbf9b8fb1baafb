"""The APIs of groups: each a small function from request to answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.groups.coordinator import GroupCoordinator


def groups_of(broker: Broker) -> GroupCoordinator:
    """The broker knows its coordinator by what it asks of it; the handlers here know it as it is."""
    return cast("GroupCoordinator", broker.groups)
