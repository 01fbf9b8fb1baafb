"""What the parts of the group coordinator share: settings, time, the log, and the groups and positions in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from semel.broker.groups.consumer.model import ConsumerGroup
from semel.broker.groups.group import Group
from semel.broker.groups.ordered_log import OrderedLog
from semel.broker.groups.positions import Positions
from semel.broker.groups.timers import Timers

MINUTE_MS = 60_000


class Settings(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...


class Clock(Protocol):
    def now_ms(self) -> int: ...


class GroupConfig(NamedTuple):
    """The broker's settings about groups."""

    initial_rebalance_delay_ms: int
    min_session_timeout_ms: int
    max_session_timeout_ms: int
    max_size: int
    metadata_max_size: int
    retention_ms: int
    retention_check_interval_ms: int

    @classmethod
    def read(cls, settings: Settings) -> GroupConfig:
        return cls(
            initial_rebalance_delay_ms=settings["group.initial.rebalance.delay.ms"],
            min_session_timeout_ms=settings["group.min.session.timeout.ms"],
            max_session_timeout_ms=settings["group.max.session.timeout.ms"],
            max_size=settings["group.max.size"],
            metadata_max_size=settings["offset.metadata.max.bytes"],
            retention_ms=settings["offsets.retention.minutes"] * MINUTE_MS,
            retention_check_interval_ms=settings["offsets.retention.check.interval.ms"],
        )


@dataclass(slots=True)
class Core:
    """Shared by membership, commits and administration; there is one for a broker."""

    config: GroupConfig
    clock: Clock
    timers: Timers
    log: OrderedLog
    groups: dict[str, Group]  # classic ones
    consumer_groups: dict[str, ConsumerGroup]  # a group id is in one of the two
    positions: Positions
    new_id: Callable[[], str]  # a random UUID, the end of a member id

    def ensure(self, group_id: str) -> None:
        """Somebody who does not use group management has a position now: there is a group for it."""
        if group_id not in self.groups and group_id not in self.consumer_groups:
            self.groups[group_id] = Group(group_id, self.clock.now_ms())

    def partition_of(self, group_id: str) -> int:
        """The partition of `__consumer_offsets` that keeps a group."""
        return self.log.partition_for(group_id)
