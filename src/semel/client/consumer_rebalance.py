"""What a rebalance does to a consumer's partitions, in which order, and whom it tells."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from semel.client.consumer_positions import Positions
from semel.client.consumer_types import TopicPartition
from semel.client.group import GroupMember

log = logging.getLogger(__name__)


class RebalanceListener:
    """Override what you need. Called inside poll() and close(), in the thread that calls them."""

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """These are new. Called before the first record of them is read: seek here if positions are kept elsewhere."""

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """These will be given back when this returns: the last chance to finish and commit work on them."""

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """These are gone already, others may work on them: drop unfinished work. Calls on_partitions_revoked unless
        overridden."""
        self.on_partitions_revoked(partitions)


class Rebalancer:
    """Takes partitions on and off. `commit` is called before partitions are given back."""

    def __init__(
        self, member: GroupMember, positions: Positions, listener: RebalanceListener, commit: Callable[[], None]
    ) -> None:
        self._member = member
        self._positions = positions
        self._listener = listener
        self._commit = commit
        self._prepared = False

    def lose(self) -> None:
        """The membership ended without us: no commit, it would be refused."""
        lost = sorted(self._positions.partitions)
        self._positions.assign([])
        if lost:
            log.warning("group %s: lost %s", self._member.group_id, ", ".join(map(str, lost)))
            self._listener.on_partitions_lost(lost)

    def prepare(self, topics: frozenset[str]) -> None:
        """Before joining, once per rebalance: eager members give everything back, cooperative ones what is unwanted."""
        if self._prepared:
            return
        self._prepared = True
        owned = self._positions.partitions
        keep = {part for part in owned if part.topic in topics} if self._member.is_cooperative else set()
        self._revoke(owned - keep, keep)

    def adopt(self, assignment: Iterable[TopicPartition]) -> None:
        """The new assignment. What a cooperative member lost is given back now, and shared out in another round."""
        self._prepared = False
        target, owned = set(assignment), self._positions.partitions
        revoked, added = owned - target, target - owned
        self._revoke(revoked, owned & target)
        self._positions.assign(target)
        log.info("group %s: has %s", self._member.group_id, ", ".join(map(str, sorted(target))) or "no partitions")
        if self._member.is_cooperative:
            if revoked:
                self._member.rejoin("gave partitions back that others are to have")
            self._listener.on_partitions_assigned(sorted(added))
        else:
            self._listener.on_partitions_assigned(sorted(target))

    def give_back(self) -> None:
        """Everything, before leaving."""
        self._revoke(self._positions.partitions, set())

    def _revoke(self, revoked: set[TopicPartition], kept: set[TopicPartition]) -> None:
        if not revoked:
            return
        self._commit()
        self._listener.on_partitions_revoked(sorted(revoked))
        self._positions.assign(kept)
