"""A transaction that goes on whatever happens to the broker, and a broker that dies at a named point.

The transaction's client knows the protocol's rules for a lost answer and follows them: it sends the same request again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar

from benchmarks.peers.raw_client import RETRIABLE, Owner, RawClient, eventually
from semel.protocol.errors import ErrorCode
from semel.prove.testbed import OwnBroker
from tests.support.waiting import PATIENCE_S

T = TypeVar("T")
TOPICS = ("left", "right")
SOURCE = "source"
GROUP = "group"


class MortalBroker(OwnBroker):
    """A broker process with at most one armed fault. With `power`, its death takes everything that was not synced."""

    def __init__(self, folder: Path, *settings: str, power: bool = False, seed: int = 1) -> None:
        super().__init__(folder, settings=settings)
        self._seeds = count(seed) if power else None

    def __enter__(self) -> MortalBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def arm(self, fault: str) -> None:
        """A fault such as `marker.before:kill:2`, at the second visit from now on."""
        point, _, action = fault.partition(":")
        draft = self.faults / "draft"
        draft.write_text(action)
        draft.rename(self.faults / point)

    def freeze_and_return(self, point: str) -> None:
        """Waits until the armed fault has frozen the broker, then lets it go on."""
        self.process.wait_for_line(f"^fault fired: {point}$", PATIENCE_S)
        command = ["ps", "-o", "stat=", "-p", str(self.process.pid)]
        eventually(
            lambda: subprocess.run(command, capture_output=True, text=True, check=True).stdout,
            done=lambda state: state.startswith("T"),
        )
        self.process.resume()

    def die_and_return(self, point: str) -> None:
        """Waits until the armed fault has killed the broker, then starts it again without one."""
        self.process.wait_for_line(f"^fault fired: {point}$", PATIENCE_S)
        assert self.process.wait(PATIENCE_S) == -9, "the fault kills the broker"
        self.power_cut_seed = next(self._seeds) if self._seeds is not None else None
        self.supervise()


@dataclass
class Persistent:
    """A producer that follows the rules. One transaction writes to two topics and commits a position."""

    broker: MortalBroker
    is_v2: bool
    point: str = ""  # the fault that is armed
    client: RawClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = RawClient(self.broker.bootstrap)

    def run(self, id_: str, value: bytes, position: int, *, commit: bool) -> Owner:
        """One whole transaction, over the broker's dead body if need be."""
        owner = self._retried(lambda: self.client.init(id_, version=5 if self.is_v2 else 4), lambda o: o.error)
        assert owner.error is ErrorCode.NONE
        who = (id_, owner.producer_id, owner.epoch)
        places = [(topic, 0) for topic in TOPICS]
        if not self.is_v2:
            self._all(lambda: self.client.add_partitions(*who, places))
        for place in places:
            appended = self._retried(
                lambda place=place: self.client.produce(*who, place, [value], version=12 if self.is_v2 else 11),
                lambda answer: answer.error,
            )
            assert appended.error is ErrorCode.NONE
        if not self.is_v2:
            assert self._retried(lambda: self.client.add_offsets(*who, GROUP), lambda e: e) is ErrorCode.NONE
        offsets = {(SOURCE, 0): position}
        self._all(lambda: self.client.commit_offsets(*who, GROUP, offsets, version=5 if self.is_v2 else 3))
        ended = self._retried(
            lambda: self.client.end(*who, commit=commit, version=5 if self.is_v2 else 3), lambda o: o.error
        )
        assert ended.error is ErrorCode.NONE, f"{self.point}: the end is {ended.error.name}"
        if self.point and not self.broker.deaths:
            self._survive()
        return ended

    def _all(self, ask: Callable[[], dict[tuple[str, int], ErrorCode]]) -> None:
        codes = self._retried(ask, lambda answer: max(answer.values()))
        assert set(codes.values()) == {ErrorCode.NONE}, codes

    def _retried(self, ask: Callable[[], T], code: Callable[[T], ErrorCode]) -> T:
        """Asks until there is an answer that is not "come again"; a broker that dies meanwhile is started again."""

        def once() -> T | None:
            try:
                answer = ask()
            except (EOFError, OSError):
                self._survive()
                return None
            return None if code(answer) in RETRIABLE else answer

        answer = eventually(once, done=lambda answer: answer is not None)
        assert answer is not None
        return answer

    def _survive(self) -> None:
        assert self.point, "the broker died and nobody told it to"
        self.client.close()
        self.broker.die_and_return(self.point)
        self.client = RawClient(self.broker.bootstrap)
