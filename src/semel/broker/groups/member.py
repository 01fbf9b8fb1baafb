"""One member of a classic group."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from semel.broker.groups.timers import Alarm
from semel.protocol.messages.groups import JoinGroupResponse, SyncGroupResponse

Protocols = dict[str, bytes]  # protocol name: the member's metadata for it, in the order that the member prefers


@dataclass(slots=True, eq=False)
class Member:
    """What a group knows about a member. `joining` and `syncing` are its requests that wait for an answer."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    assignment: bytes = b""
    is_new: bool = False  # never answered yet: does not know its id, so it cannot send heartbeats
    joining: asyncio.Future[JoinGroupResponse] | None = None
    syncing: asyncio.Future[SyncGroupResponse] | None = None
    session: Alarm | None = field(default=None, repr=False)

    @property
    def is_static(self) -> bool:
        return self.group_instance_id is not None

    @property
    def needs_no_heartbeat(self) -> bool:
        """Somebody whose request waits here is alive; but a new member may be gone without our noticing."""
        return not self.is_new and (self.joining is not None or self.syncing is not None)

    def has_protocols(self, protocols: Protocols) -> bool:
        """Whether these are the same protocols with the same metadata, in the same order of preference."""
        return list(self.protocols.items()) == list(protocols.items())

    def vote(self, candidates: set[str]) -> str:
        return next(name for name in self.protocols if name in candidates)

    def answer_join(self, response: JoinGroupResponse) -> bool:
        waiting, self.joining = self.joining, None
        if waiting is not None and not waiting.done():
            waiting.set_result(response)
        return waiting is not None

    def answer_sync(self, response: SyncGroupResponse) -> bool:
        waiting, self.syncing = self.syncing, None
        if waiting is not None and not waiting.done():
            waiting.set_result(response)
        return waiting is not None
