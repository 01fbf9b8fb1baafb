"""What a rebalance does to a consumer's partitions, in which order, and which listener it calls."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable

from semel.client.consumer.assigned_partitions import AssignedPartitions
from semel.client.consumer.commits import PendingCommit
from semel.client.group.membership import Membership
from semel.client.types import TopicPartition

log = logging.getLogger(__name__)


class RebalanceListener:
    """Override what you need. Called inside poll() and close(), in the thread that calls them; an `AsyncConsumer`
    awaits methods that are coroutines."""

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """These are new. Called before the first record of them is read: seek here if offsets are kept elsewhere."""
        return None

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """These will be given back when this returns: the last chance to finish and commit work on them."""
        return None

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """These are gone already, others may work on them: drop unfinished work. Calls on_partitions_revoked unless
        overridden."""
        return self.on_partitions_revoked(partitions)


class Rebalancer:
    """Takes partitions on and off. `start_commit` is called before partitions are given back, and its commit waited
    for; None: there is nothing to commit. A listener that raises changes nothing about the assignment: the error is
    raised when the partitions are where they belong."""

    def __init__(
        self,
        member: Membership,
        assigned: AssignedPartitions,
        listener: RebalanceListener,
        start_commit: Callable[[], PendingCommit | None],
    ) -> None:
        self._member = member
        self._assigned = assigned
        self._listener = listener
        self._start_commit = start_commit
        self._commit: PendingCommit | None = None  # before a revocation, on its way
        self._assignment: set[TopicPartition] | None = None  # not adopted yet
        self._prepared = False
        self._is_calling = False

    @property
    def is_revoking(self) -> bool:
        """Whether partitions wait for a commit before they are given back: no record of theirs may be handed out."""
        return self._commit is not None

    @property
    def is_calling(self) -> bool:
        """Whether the listener is called, from which a turn of the consumer may be run (by position(), say): what it is
        called for ends before anything else happens to the partitions."""
        return self._is_calling

    async def _call(
        self, method: Callable[[list[TopicPartition]], Awaitable[None] | None], partitions: list[TopicPartition]
    ) -> None:
        try:
            self._is_calling = True
            waiting = method(partitions)
            if inspect.isawaitable(waiting):
                await waiting
        finally:
            self._is_calling = False

    async def apply_change(self, lost: bool, assignment: Iterable[TopicPartition] | None) -> None:
        """What happened to the membership. Lost: it ended without us; no commit, it would be refused."""
        gone = sorted(self._assigned.partitions) if lost else []
        if lost:
            self._commit = self._assignment = None
            self._assigned.assign([])
        if assignment is not None:
            self._assignment = set(assignment)
        if gone:
            log.warning("group %s: lost %s", self._member.group_id, ", ".join(map(str, gone)))
            await self._call(self._listener.on_partitions_lost, gone)

    async def prepare(self, topics: frozenset[str]) -> bool:
        """Before joining, once per rebalance: eager members give everything back, cooperative ones what is unwanted.
        False while a commit must be waited for."""
        if self._prepared:
            return True
        owned = self._assigned.partitions
        keep = {part for part in owned if part.topic in topics} if self._member.is_cooperative else set()
        if not self._is_committed(owned - keep):
            return False
        await self._revoke(owned - keep, keep)
        self._prepared = True
        return True

    async def adopt(self) -> bool:
        """The new assignment. What a cooperative member lost is given back now, and shared out in another round.
        False while a commit must be waited for."""
        if self._assignment is None:
            return True
        target, owned = self._assignment, self._assigned.partitions
        revoked, added = owned - target, target - owned
        if not self._is_committed(revoked):
            return False
        self._assignment, self._prepared = None, False
        try:
            await self._revoke(revoked, target)
        finally:
            log.info("group %s: has %s", self._member.group_id, ", ".join(map(str, sorted(target))) or "no partitions")
            self._member.adopted(target, bool(revoked))
            new = sorted(added if self._member.is_cooperative else target)
            await self._call(self._listener.on_partitions_assigned, new)
        return True

    async def give_back(self) -> None:
        """Everything, before leaving; the caller has committed."""
        self._commit = None
        await self._revoke(self._assigned.partitions, set())

    def _is_committed(self, revoked: set[TopicPartition]) -> bool:
        """Starts the commit; whether it has ended, with or without success."""
        if not revoked:
            return True
        if self._commit is None:
            self._commit = self._start_commit()
        if self._commit is not None and not self._commit.is_done:
            return False
        self._commit = None
        return True

    async def _revoke(self, revoked: set[TopicPartition], kept: set[TopicPartition]) -> None:
        try:
            if revoked:
                await self._call(self._listener.on_partitions_revoked, sorted(revoked))
        finally:
            self._assigned.assign(kept)
