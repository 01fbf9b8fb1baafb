"""What the parts of the group coordinator share: settings, time, the log, and the groups and positions in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from semel.broker.clock import Clock
from semel.broker.coordinator_runtime import CoordinatorRuntime
from semel.broker.groups.consumer.model import ConsumerGroup
from semel.broker.groups.group import Group
from semel.broker.groups.positions import Positions
from semel.broker.groups.state import GroupsRecord, GroupsState
from semel.broker.groups.timers import Timers
from semel.broker.settings import Settings

MINUTE_MS = 60_000


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
    state: GroupsState
    runtime: CoordinatorRuntime[GroupsRecord]
    new_id: Callable[[], str]  # a random UUID, the end of a member id

    @property
    def groups(self) -> dict[str, Group]:
        return self.state.groups

    @property
    def consumer_groups(self) -> dict[str, ConsumerGroup]:
        return self.state.consumer_groups

    @property
    def positions(self) -> Positions:
        return self.state.positions

    def partition_of(self, group_id: str) -> int:
        """The partition of `__consumer_offsets` that keeps a group."""
        return self.runtime.partition_for(group_id)
