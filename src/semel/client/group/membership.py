"""What both protocols of a group member have in common: what its consumer and its driver see of it, and its base.

`core.py` is the classic protocol (JoinGroup, SyncGroup, Heartbeat), `consumer_protocol_core.py` that of KIP-848
(ConsumerGroupHeartbeat). No I/O, no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from semel.client.errors import KafkaError
from semel.client.pauses import Pauses
from semel.client.settings import ConsumerSettings
from semel.client.types import GroupMetadata, RebalanceError, TopicPartition
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode

log = logging.getLogger(__name__)

NEVER_S = float("inf")


class MembershipChange(NamedTuple):
    """What changed in the membership since the last call of `take_change`."""

    lost: bool = False  # the partitions are gone, without a chance to commit
    assignment: list[TopicPartition] | None = None
    error: KafkaError | None = None


class Membership(Protocol):
    """A member as its consumer sees it: the core, or a driver that guards it with a lock."""

    @property
    def group_id(self) -> str: ...
    @property
    def is_cooperative(self) -> bool: ...
    @property
    def wants_to_join(self) -> bool: ...
    @property
    def is_rebalancing(self) -> bool: ...
    @property
    def may_commit(self) -> bool: ...
    @property
    def is_fenced(self) -> bool: ...
    @property
    def has_unknown_topics(self) -> bool: ...
    @property
    def retry_at_s(self) -> float: ...
    def identity(self) -> GroupMetadata: ...
    def reader(self) -> GroupMetadata | None: ...
    def renewed(self, identity: GroupMetadata) -> GroupMetadata | None: ...
    def take_change(self) -> MembershipChange: ...
    def needs_other_counts(self, counts: Mapping[str, int]) -> bool: ...
    def adopted(self, partitions: Iterable[TopicPartition], gave_back: bool) -> None: ...
    def rejoin(self, reason: str) -> None: ...


@runtime_checkable
class Leaving(Protocol):
    """A member that leaves, so that others need not wait for its session to end."""

    @property
    def api(self) -> Api[Any, Any]: ...
    @property
    def reason(self) -> str: ...
    def request(self, version: int) -> Any: ...


class MemberBase:
    """Polls and their interval, doubts about the coordinator, and the identity that commits."""

    def __init__(self, settings: ConsumerSettings, random: Callable[[], float], now_s: float) -> None:
        if settings.group_id is None:
            raise ValueError("a group member needs a group.id")
        self.group_id = settings.group_id
        self.retry_at_s = 0.0
        self._settings = settings
        self._pauses = Pauses(settings.retry_backoff_ms, settings.retry_backoff_max_ms, random)
        self._last_poll_s = now_s
        self._change = MembershipChange()
        self._identity: GroupMetadata | None = None
        self._is_in_doubt = False  # where the coordinator is

    def identity(self) -> GroupMetadata:
        """The identity that commits: the member in its last generation or member epoch. It stays the same when that is
        lost, so that the coordinator refuses it: one without member and generation would let a zombie commit."""
        if self._identity is None:
            raise RebalanceError(
                f"this consumer is not in a generation of group {self.group_id!r} yet; call poll() until it has "
                "partitions"
            )
        return self._identity

    def polled(self, now_s: float) -> None:
        """The program is alive; called at every poll."""
        self._last_poll_s = now_s

    def take_doubt(self) -> bool:
        """Whether the coordinator must be looked up again before the next request to it."""
        in_doubt, self._is_in_doubt = self._is_in_doubt, False
        return in_doubt

    def unreachable(self, now_s: float) -> None:
        """There is no connection to the coordinator to join with."""
        self._is_in_doubt = True
        self.retry_at_s = now_s + self._pauses.next_s()

    @property
    def _poll_limit_s(self) -> float:
        """When a program that does not poll until then loses its partitions."""
        return self._last_poll_s + self._settings.max_poll_interval_ms / 1000

    def _is_too_slow(self, now_s: float) -> bool:
        return now_s >= self._poll_limit_s

    def _warn_too_slow(self) -> None:
        log.warning(
            "group %s: poll() was not called for max.poll.interval.ms=%s; leaving the group so that others can "
            "go on. Lower max.poll.records, or raise the setting",
            self.group_id,
            self._settings.max_poll_interval_ms,
        )


class GroupCore(Membership, Protocol):
    """A member as its driver sees it: the core of either protocol. Requests are of the protocol's own types."""

    join_api: Api[Any, Any]  # which `join` returns a request of
    beat_api: Api[Any, Any]
    beat_limit_s: float

    def polled(self, now_s: float) -> None: ...
    def take_doubt(self) -> bool: ...
    def unsupported(self, address: str) -> KafkaError: ...
    def is_due_to_join(self, now_s: float) -> bool: ...
    def join(self, topics: frozenset[str], owned: Iterable[TopicPartition]) -> Any: ...
    def unreachable(self, now_s: float) -> None: ...
    def unanswered(self, now_s: float) -> None: ...
    def responded(self, response: Any, now_s: float) -> Any: ...
    def next_event_s(self) -> float: ...
    def beat(self, now_s: float) -> Any: ...
    def beaten(self, request: Any, response: Any, now_s: float) -> None: ...
    def not_beaten(self, request: Any, now_s: float) -> None: ...
    def reported(self, code: ErrorCode, identity: GroupMetadata, now_s: float) -> None: ...
    def leave(self, reason: str) -> Leaving | None: ...
