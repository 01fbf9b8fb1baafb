"""Requests to bytes and bytes to answers, without any I/O: what a connection knows once it is open.

A broker answers in the order of the requests, so answers are matched in order and the correlation id is checked.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from semel.client.errors import ConnectionFailedError, KafkaError, UnsupportedByBrokerError, error_of
from semel.protocol.api import Api
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.cluster import API_VERSIONS, ApiVersionsResponse
from semel.protocol.schema import Buffer, VersionRange

_SIZE = struct.Struct(">i")


class Pending:
    """A request on its way: `done` once there is an answer or an error; `result()` returns or raises it.

    A request that timed out is done, but stays in its place until its answer comes, which is dropped. A request without
    an answer (acks=0) is done when its last byte is written, and its result is None."""

    __slots__ = (
        "_answer",
        "api",
        "context",
        "correlation_id",
        "deadline_s",
        "error",
        "frame",
        "on_throttle",
        "version",
        "written",
    )

    def __init__(
        self, api: Api[Any, Any], version: int, correlation_id: int, deadline_s: float, context: Any = None
    ) -> None:
        self.api = api
        self.version = version
        self.correlation_id = correlation_id
        self.deadline_s = deadline_s
        self.context = context
        self.frame: Buffer | None = None
        self.error: KafkaError | None = None
        self.written = False  # and no answer will come
        self.on_throttle: Callable[[int], None] | None = None  # called with the milliseconds that an answer asks for
        self._answer: Any = None

    @property
    def done(self) -> bool:
        return self.frame is not None or self.error is not None or self.written

    def result(self) -> Any:
        """The answer, decoded when first asked for."""
        if self.error is not None:
            raise self.error
        if self._answer is None and not self.written:
            if self.frame is None:
                raise RuntimeError(f"{self.api.name} has no answer yet")
            _, self._answer = self.api.read_response(self.frame, self.version)
            throttle_ms = getattr(self._answer, "throttle_time_ms", 0)
            if throttle_ms > 0 and self.on_throttle is not None:
                self.on_throttle(throttle_ms)
        return self._answer


class Wire:
    """The requests of one connection: `outgoing` waits to be written, `pending` for an answer; `match` takes frames."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.outgoing: deque[memoryview] = deque()
        self.pending: deque[Pending] = deque()
        self.unanswered: deque[tuple[int, Pending]] = deque()  # not written yet: where each ends among all bytes
        self._queued_bytes = 0  # put into `outgoing` so far
        self._written_bytes = 0
        self._correlation_id = 0

    @property
    def in_flight(self) -> int:
        return len(self.pending) + len(self.unanswered)

    def waiting(self) -> Iterator[Pending]:
        """The requests that are not done, oldest first."""
        yield from (pending for pending in self.pending if not pending.done)
        yield from (pending for _, pending in self.unanswered if not pending.done)

    def clear(self) -> list[Pending]:
        """Takes back all that is not done."""
        left = list(self.waiting())
        self.pending.clear()
        self.unanswered.clear()
        self.outgoing.clear()
        return left

    # --- out ---

    def send(
        self,
        api: Api[Any, Any],
        request: Any,
        version: int,
        deadline_s: float,
        context: Any = None,
        answer: bool = True,
    ) -> Pending:
        """Puts a request behind those that wait; without `answer` (acks=0) it is done when it is written."""
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        parts = api.frame_request(request, version, self._correlation_id, self.client_id)
        pending = Pending(api, version, self._correlation_id, deadline_s, context)
        for part in _merged(parts):
            self.outgoing.append(memoryview(part))
            self._queued_bytes += len(part)
        if answer:
            self.pending.append(pending)
        else:
            self.unanswered.append((self._queued_bytes, pending))
        return pending

    def written(self, count: int) -> list[Pending]:
        """That many bytes of `outgoing` are on their way; the requests that are done with that."""
        self._written_bytes += count
        outgoing = self.outgoing
        while count:
            first = outgoing[0]
            if count < len(first):
                outgoing[0] = first[count:]
                break
            count -= len(first)
            outgoing.popleft()
        done = []
        while self.unanswered and self.unanswered[0][0] <= self._written_bytes:
            _, pending = self.unanswered.popleft()
            if not pending.done:
                pending.written = True
                done.append(pending)
        return done

    # --- in ---

    def match(self, frames: Iterable[memoryview]) -> Iterator[Pending]:
        """The requests that frames answer, which are the oldest ones, without those that have timed out."""
        for frame in frames:
            pending = self._oldest(frame)
            if not pending.done:
                pending.frame = frame
                yield pending

    def _oldest(self, frame: memoryview) -> Pending:
        if not self.pending:
            raise ConnectionFailedError("the broker sent an answer that nobody asked for")
        pending = self.pending[0]
        (correlation_id,) = _SIZE.unpack_from(frame)
        if correlation_id != pending.correlation_id:
            raise ConnectionFailedError(
                f"the broker answered request {correlation_id}, expected {pending.correlation_id} ({pending.api.name})"
            )
        return self.pending.popleft()


def _merged(parts: list[Buffer]) -> Iterator[Buffer]:
    """Small parts joined, so that one write takes a whole request; large ones (record sets) stay as they are."""
    small: list[Buffer] = []
    for part in parts:
        if len(part) < 4096:
            small.append(part)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield part
    if small:
        yield b"".join(small)


# --- what the broker can do ---


class Capabilities:
    """Which versions and features the broker at the other end has, from its ApiVersions answer."""

    __slots__ = ("features", "features_epoch", "ranges")

    def __init__(self, answer: ApiVersionsResponse) -> None:
        self.ranges = {api.api_key: VersionRange(api.min_version, api.max_version) for api in answer.api_keys}
        self.features_epoch = answer.finalized_features_epoch
        self.features = {feature.name: feature.max_version_level for feature in answer.finalized_features}

    def feature(self, name: str) -> int:
        """The finalised level of a feature; 0 where the broker finalised nothing."""
        return self.features.get(name, 0) if self.features_epoch > -1 else 0

    def has(self, api: Api[Any, Any], at_least: int = 0) -> bool:
        there = self.ranges.get(api.key)
        return there is not None and there.high >= at_least

    def version_of(self, api: Api[Any, Any], at_most: int = 0x7FFF, at_least: int = 0) -> int:
        """The highest version that both sides have."""
        ours, there = api.request.valid, self.ranges.get(api.key)
        if there is None:
            raise UnsupportedByBrokerError(
                f"the broker does not have {api.name} (API {api.key}); upgrade it, or do without",
                ErrorCode.UNSUPPORTED_VERSION,
            )
        best = min(ours.high, there.high, at_most)
        if best < max(ours.low, there.low, at_least):
            low = max(ours.low, at_least)
            raise UnsupportedByBrokerError(
                f"{api.name}: the broker has versions {there}, this client needs {low}-{min(ours.high, at_most)}; "
                "use another version of the broker",
                ErrorCode.UNSUPPORTED_VERSION,
            )
        return best


def read_api_versions(frame: Buffer, version: int) -> tuple[ApiVersionsResponse | None, int]:
    """(the answer, -1), or (None, the version to ask again with) if the broker is older than the request was.

    A broker that does not have the version answers in version 0 with UNSUPPORTED_VERSION and what it has.
    """
    if len(frame) < 6:
        raise DecodeError(f"an ApiVersions answer has at least 6 bytes, this one {len(frame)}")
    (code,) = struct.unpack_from(">h", frame, 4)
    if code == ErrorCode.UNSUPPORTED_VERSION and version > 0:
        try:
            _, answer = API_VERSIONS.read_response(frame, 0)
        except DecodeError:
            return None, 0
        highest = next((api.max_version for api in answer.api_keys if api.api_key == API_VERSIONS.key), 0)
        return None, min(version - 1, highest)
    _, answer = API_VERSIONS.read_response(frame, version)
    if answer.error_code:
        raise error_of(answer.error_code, "asking the broker for its API versions")
    return answer, -1
