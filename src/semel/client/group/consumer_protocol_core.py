"""What a member of a consumer group decides under the consumer protocol (KIP-848, group.protocol=consumer).

A state machine without a thread, a socket, a clock or a lock, after the table in `consumer_protocol_states.py`. All it
sends is ConsumerGroupHeartbeat, one at a time. The coordinator assigns; what it takes away is acknowledged when the
consumer has given it back (committed, and called its listener), and only then others get it. A driver (`member.py`)
owns the rest:

    core.polled(now_s)                          # the program is alive
    if core.is_due_to_join(now_s): core.join(topics, owned)    # joins, or sends at once what changed; then `responded`
    core.beat(now_s)                            # a heartbeat if it is due, or the departure of one that does not poll
    core.beaten(request, response, now_s)       # what the coordinator says to it
    core.take_change()                          # for the consumer: an assignment, lost partitions, an error
    core.adopted(partitions, gave_back)         # the consumer has taken the assignment on
    core.reported(code, identity, now_s)        # what the coordinator says to a commit
    core.next_event_s()                         # when to call `beat` again, if nothing else happens

Topics come as ids and are named by the metadata of the subscribed topics. An id that it does not have yet waits there
while the consumer looks the topics up, and the rest is taken on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from semel.client.errors import KafkaError, UnsupportedByBrokerError, error_of
from semel.client.group.consumer_protocol_states import (
    MEMBERS,
    ConsumerProtocolEvent,
    ConsumerProtocolState,
    event_of,
    step,
)
from semel.client.group.membership import NEVER_S, MemberBase, MembershipChange
from semel.client.group.states import MembershipEffect
from semel.client.metadata import Metadata
from semel.client.settings import ConsumerSettings
from semel.client.types import GroupMetadata, TopicPartition
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import (
    CONSUMER_GROUP_HEARTBEAT,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

log = logging.getLogger(__name__)

JOINS, LEAVES, LEAVES_FOR_A_WHILE = 0, -1, -2  # member epochs with a meaning of their own
# What the response to a commit says about the membership.
_MEMBERSHIP_EVENTS = (
    ConsumerProtocolEvent.EXPELLED,
    ConsumerProtocolEvent.TAKEN_OVER,
    ConsumerProtocolEvent.COORDINATOR_LOST,
)

Ids = frozenset[tuple[bytes, int]]


class HeartbeatDeparture(NamedTuple):
    """A member that leaves with its last heartbeat. A static one keeps its place until its session ends."""

    group_id: str
    member_id: str
    instance_id: str | None
    reason: str

    @property
    def api(self) -> Api[Any, Any]:
        return CONSUMER_GROUP_HEARTBEAT

    def request(self, version: int) -> ConsumerGroupHeartbeatRequest:
        epoch = LEAVES if self.instance_id is None else LEAVES_FOR_A_WHILE
        return ConsumerGroupHeartbeatRequest(self.group_id, self.member_id, epoch, self.instance_id)


class _Reported(NamedTuple):
    """What a heartbeat reported to the coordinator."""

    topics: frozenset[str]
    owned: Ids


class ConsumerProtocolCore(MemberBase):
    """One member. `member_id` names it for as long as its process lives; `metadata` is what its driver keeps up to
    date; `random` returns numbers from 0 to 1, for the length of pauses."""

    join_api = beat_api = CONSUMER_GROUP_HEARTBEAT
    is_cooperative = True  # what is not taken away is kept

    def __init__(
        self, settings: ConsumerSettings, metadata: Metadata, random: Callable[[], float], member_id: str, now_s: float
    ) -> None:
        super().__init__(settings, random, now_s)
        self.state = ConsumerProtocolState.UNJOINED
        self.member_id = member_id
        self.epoch = JOINS
        self.beat_limit_s = settings.request_timeout_ms / 1000
        self._metadata = metadata
        self._topics: frozenset[str] = frozenset()
        self._first_epoch = JOINS  # since the member joined the last time
        self._may_be_member = False  # to the coordinator
        self._assigned: Ids = frozenset()  # by the coordinator
        self._offered: dict[TopicPartition, bytes] | None = None  # to the consumer, with the ids of the topics
        self._owned: dict[TopicPartition, bytes] = {}
        self._owned_ids: Ids = frozenset()  # the same, as the coordinator says it
        self._reported: _Reported | None = None  # None: nothing, or nothing is sure; the next heartbeat has everything
        self._on_its_way: tuple[ConsumerGroupHeartbeatRequest, _Reported] | None = None
        self._is_resubscribing = False
        self._next_beat_s = NEVER_S

    # --- for the consumer ---

    @property
    def wants_to_join(self) -> bool:
        """Whether there is something to report to the coordinator at once, once the consumer is ready for it."""
        if self._on_its_way is not None:
            return False
        is_out = self.state is ConsumerProtocolState.UNJOINED
        return is_out or (self.state in MEMBERS and (self._is_resubscribing or self._has_news))

    @property
    def is_rebalancing(self) -> bool:
        return self.state is ConsumerProtocolState.JOINING

    @property
    def may_commit(self) -> bool:
        return self.state in MEMBERS

    @property
    def is_fenced(self) -> bool:
        return self.state is ConsumerProtocolState.FENCED

    @property
    def has_unknown_topics(self) -> bool:
        """Whether partitions of topics are assigned that the metadata does not have, or not under this id."""
        return self.state is ConsumerProtocolState.RECONCILING and len(self._resolved()) < len(self._assigned)

    def reader(self) -> GroupMetadata | None:
        """The identity that fetches committed offsets."""
        return self._identity if self.state in MEMBERS else None

    def renewed(self, identity: GroupMetadata) -> GroupMetadata | None:
        """The identity for another attempt of a commit that was refused as stale: that of the newest epoch, if the
        member never lost its partitions in between."""
        mine = self._identity
        if mine is None or self.state not in MEMBERS or identity.member_id != mine.member_id:
            return None
        return mine if identity.generation_id >= self._first_epoch else None

    def needs_other_counts(self, counts: Mapping[str, int]) -> bool:
        """The coordinator watches the topics."""
        return False

    def take_change(self) -> MembershipChange:
        change, self._change = self._change, MembershipChange()
        if self.state is ConsumerProtocolState.RECONCILING:
            offer = self._resolved()
            if offer != self._offered:
                self._offered = offer
                change = change._replace(assignment=sorted(offer))
        return change

    def adopted(self, partitions: Iterable[TopicPartition], gave_back: bool) -> None:
        """The consumer has taken on what `take_change` returned last, and given the rest back."""
        if self.state not in MEMBERS or self._offered is None:
            return  # expelled meanwhile
        self._own({each: self._offered[each] for each in partitions if each in self._offered})
        if self._owned_ids == self._assigned:
            self._apply(ConsumerProtocolEvent.RECONCILED, 0.0)

    def rejoin(self, reason: str) -> None:
        """The topics changed: the next heartbeat reports it."""
        log.info("group %s: telling the coordinator: %s", self.group_id, reason)
        self._is_resubscribing = True

    # --- names and ids ---

    def _resolved(self) -> dict[TopicPartition, bytes]:
        """What is assigned, by name. Partitions of a topic that was created again wait until those of the old one were
        given back."""
        known = self._metadata.topics
        held = {each.topic: topic_id for each, topic_id in self._owned.items()}
        names = {topic_id: name for name, topic_id in held.items()}
        names |= {known[name].topic_id: name for name in self._topics if name in known}
        return {
            TopicPartition(names[topic_id], number): topic_id
            for topic_id, number in self._assigned
            if topic_id in names and held.get(names[topic_id], topic_id) == topic_id
        }

    def _own(self, partitions: dict[TopicPartition, bytes]) -> None:
        self._owned = partitions
        self._owned_ids = frozenset((topic_id, each.partition) for each, topic_id in partitions.items())

    @property
    def _has_news(self) -> bool:
        """Whether the coordinator does not know yet what the member owns."""
        return self._reported is not None and self._reported.owned != self._owned_ids

    # --- joining, and telling what changed ---

    def unsupported(self, address: str) -> KafkaError:
        return UnsupportedByBrokerError(
            "group.protocol=consumer needs a broker that serves ConsumerGroupHeartbeat (KIP-848: Apache Kafka 4.0 or "
            f"later, with the feature group.version=1); {address} does not. Set group.protocol=classic, or upgrade "
            "the broker",
            ErrorCode.UNSUPPORTED_VERSION,
        )

    def is_due_to_join(self, now_s: float) -> bool:
        return self.wants_to_join and now_s >= self.retry_at_s

    def join(self, topics: frozenset[str], owned: Iterable[TopicPartition]) -> ConsumerGroupHeartbeatRequest:
        """A heartbeat to be sent now: it joins, or reports what changed."""
        self._topics = topics
        self._is_resubscribing = False
        if self.state is ConsumerProtocolState.UNJOINED:
            self._apply(ConsumerProtocolEvent.JOIN_SENT, 0.0)
            self._may_be_member = True
        else:
            self._keep_only(owned)
        return self._request()

    def _keep_only(self, owned: Iterable[TopicPartition]) -> None:
        """The consumer gave back what it does not want any more; it is offered again if it is wanted again. And it may
        have taken on what it was offered in a call that was interrupted."""
        if self._offered is None:
            return  # the first assignment is still to come, even if it is empty
        known = {**self._offered, **self._owned}
        self._own({each: known[each] for each in owned if each in known})
        self._offered = dict(self._owned)
        is_all = self._owned_ids == self._assigned
        self._apply(ConsumerProtocolEvent.RECONCILED if is_all else ConsumerProtocolEvent.ASSIGNED, 0.0)

    def _request(self) -> ConsumerGroupHeartbeatRequest:
        """With all that the coordinator may not know."""
        settings, reported = self._settings, self._reported
        current = _Reported(self._topics, self._owned_ids)
        request = ConsumerGroupHeartbeatRequest(self.group_id, self.member_id, self.epoch, settings.group_instance_id)
        if reported is None:
            request.rebalance_timeout_ms = settings.max_poll_interval_ms
            request.server_assignor = settings.group_remote_assignor
        if reported is None or reported.topics != current.topics:
            request.subscribed_topic_names = sorted(current.topics)
        if reported is None or reported.owned != current.owned:
            request.topic_partitions = _by_topic(current.owned)
        self._on_its_way = (request, current)
        return request

    def unanswered(self, now_s: float) -> None:
        """What `join` returned got no response, or one that makes no sense, or could not be sent; or a call was
        interrupted (Ctrl-C). The next heartbeat reports everything, and the response to it has the assignment."""
        self._reported = None
        if self._on_its_way is not None or self.is_rebalancing:
            self._failed(ConsumerProtocolEvent.COORDINATOR_LOST, now_s)

    def responded(self, response: ConsumerGroupHeartbeatResponse, now_s: float) -> None:
        """The response to what `join` returned."""
        if self._on_its_way is not None:
            self.beaten(self._on_its_way[0], response, now_s)

    # --- heartbeats ---

    def next_event_s(self) -> float:
        """When `beat` has something to do."""
        if self.state not in MEMBERS:
            return NEVER_S
        return min(self._beat_at_s, self._poll_limit_s)

    @property
    def _beat_at_s(self) -> float:
        if self._on_its_way is not None:
            return NEVER_S
        return min(self._next_beat_s, self.retry_at_s) if self._has_news else self._next_beat_s

    def beat(self, now_s: float) -> ConsumerGroupHeartbeatRequest | HeartbeatDeparture | None:
        """A heartbeat if it is due (then `beaten`, or `not_beaten`). A member whose program does not poll leaves, so
        that others can go on."""
        if self.state not in MEMBERS:
            return None
        if self._is_too_slow(now_s):
            self._warn_too_slow()
            departure = self._departure("max.poll.interval.ms passed without a poll")
            self._apply(ConsumerProtocolEvent.EXPELLED, now_s)
            return departure
        return self._request() if now_s >= self._beat_at_s else None

    def beaten(
        self, request: ConsumerGroupHeartbeatRequest, response: ConsumerGroupHeartbeatResponse, now_s: float
    ) -> None:
        """What the coordinator says to a heartbeat; nothing counts that it said before the member was expelled."""
        if not self._is_on_its_way(request):
            return
        code = ErrorCode.of(response.error_code)
        if code is ErrorCode.NONE:
            self._accepted(response, now_s)
        else:
            event = event_of(code, is_joining=request.member_epoch == JOINS)
            self._failed(event, now_s, code, response.error_message)

    def not_beaten(self, request: ConsumerGroupHeartbeatRequest, now_s: float) -> None:
        """No response. The next heartbeat reports everything; the coordinator returns an error if the session ended."""
        if self._is_on_its_way(request):
            self._failed(ConsumerProtocolEvent.COORDINATOR_LOST, now_s)

    def _is_on_its_way(self, request: ConsumerGroupHeartbeatRequest) -> bool:
        return self._on_its_way is not None and self._on_its_way[0] is request

    def _accepted(self, response: ConsumerGroupHeartbeatResponse, now_s: float) -> None:
        assert self._on_its_way is not None
        (_, self._reported), self._on_its_way = self._on_its_way, None
        self._pauses.reset()
        self._next_beat_s = now_s + response.heartbeat_interval_ms / 1000
        self.epoch = response.member_epoch
        self.member_id = response.member_id or self.member_id
        self._identity = GroupMetadata(self.group_id, self.epoch, self.member_id, self._settings.group_instance_id)
        is_new = self.state is ConsumerProtocolState.JOINING
        if is_new:
            self._first_epoch = self.epoch
            self._apply(ConsumerProtocolEvent.JOINED, now_s)
        if is_new or response.assignment is not None:
            topics = response.assignment.topic_partitions if response.assignment is not None else []
            self._assign(frozenset((topic.topic_id, number) for topic in topics for number in topic.partitions), is_new)

    def _assign(self, assigned: Ids, is_new: bool) -> None:
        """The consumer gets it with the next `take_change`; a new member also if it has none. What was never offered is
        assigned anew: Ctrl-C may have come in between."""
        is_other = is_new or self._offered is None or assigned != self._assigned
        self._assigned = assigned
        if is_other:
            self._apply(ConsumerProtocolEvent.ASSIGNED, 0.0)

    def _failed(
        self, event: ConsumerProtocolEvent, now_s: float, code: ErrorCode | None = None, detail: str | None = None
    ) -> None:
        """A heartbeat failed."""
        self._on_its_way = self._reported = None
        self._apply(event, now_s, code, "a heartbeat to", detail)
        self._next_beat_s = max(self.retry_at_s, now_s)

    def reported(self, code: ErrorCode, identity: GroupMetadata, now_s: float) -> None:
        """The error of a commit may end the membership; that of an older epoch is ignored."""
        if identity != self._identity or self.state not in MEMBERS:
            return
        event = event_of(code, is_joining=False)
        if event in _MEMBERSHIP_EVENTS:
            self._apply(event, now_s, code, "committing to")
        elif code is ErrorCode.STALE_MEMBER_EPOCH and self._on_its_way is None:
            self._reported, self._next_beat_s = None, now_s  # the response that had the new epoch was lost

    # --- the end ---

    def leave(self, reason: str) -> HeartbeatDeparture | None:
        """For good. What to send to the coordinator, if anything."""
        self._on_its_way = None
        self.state, effect = step(self.state, ConsumerProtocolEvent.LEAVE)
        return self._departure(reason) if effect & MembershipEffect.SEND_LEAVE else None

    def _departure(self, reason: str) -> HeartbeatDeparture | None:
        if not self._may_be_member:
            return None
        return HeartbeatDeparture(self.group_id, self.member_id, self._settings.group_instance_id, reason)

    def _apply(
        self,
        event: ConsumerProtocolEvent,
        now_s: float,
        code: ErrorCode | None = None,
        doing: str = "",
        detail: str | None = None,
    ) -> None:
        self.state, effect = step(self.state, event)
        if effect & MembershipEffect.FORGET_GENERATION:
            self.epoch, self._may_be_member = JOINS, False
        if effect & MembershipEffect.LOSE_PARTITIONS:
            self._change = MembershipChange(lost=True, error=self._change.error)
            self._own({})
            self._assigned, self._offered = frozenset(), None
            self._reported = self._on_its_way = None
        if effect & MembershipEffect.FIND_COORDINATOR:
            self._is_in_doubt = True
        if effect & MembershipEffect.BACK_OFF:
            self.retry_at_s = now_s + self._pauses.next_s()
        if effect & MembershipEffect.RAISE and code is not None:
            self._change = self._change._replace(error=self._error(code, doing, detail))

    def _error(self, code: ErrorCode, doing: str, detail: str | None) -> KafkaError:
        if code is ErrorCode.UNSUPPORTED_VERSION:
            return self.unsupported("the coordinator")
        if code is ErrorCode.GROUP_ID_NOT_FOUND:
            doing = "group.protocol=consumer cannot join while members with group.protocol=classic are in"
        return error_of(code, f"{doing} group {self.group_id!r}", detail)


def _by_topic(ids: Ids) -> list[TopicPartitions]:
    grouped: dict[bytes, list[int]] = {}
    for topic_id, number in sorted(ids):
        grouped.setdefault(topic_id, []).append(number)
    return [TopicPartitions(topic_id, numbers) for topic_id, numbers in grouped.items()]
