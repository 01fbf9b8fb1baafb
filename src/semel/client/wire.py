"""Requests to bytes and bytes to responses, without any I/O: the state of a connection once it is open.

A broker responds in the order of the requests, so responses are matched in order and the correlation id is checked.
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from semel.client.errors import ConnectionFailedError, KafkaError, UnsupportedByBrokerError, error_of
from semel.protocol.api import Api
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.cluster import API_VERSIONS, ApiVersionsResponse
from semel.protocol.schema import Buffer, VersionRange

_SIZE = struct.Struct(">i")


@dataclass(slots=True, eq=False)
class Pending:
    """A request on its way: `done` once there is a response or an error; `result()` returns or raises it.

    A request that timed out is done, but stays in its place until its response comes, which is dropped. A request
    without a response (acks=0) is done when its last byte is written, and its result is None."""

    api: Api[Any, Any]
    version: int
    correlation_id: int
    deadline_s: float
    context: Any = None
    frame: Buffer | None = None
    error: KafkaError | None = None
    written: bool = False  # and no response will come
    on_throttle: Callable[[int], None] | None = None  # called with the throttle time of a response
    _response: Any = None

    @property
    def done(self) -> bool:
        return self.frame is not None or self.error is not None or self.written

    def result(self) -> Any:
        """The response, decoded at the first call."""
        if self.error is not None:
            raise self.error
        if self._response is None and not self.written:
            if self.frame is None:
                raise RuntimeError(f"{self.api.name} has no response yet")
            self._response = self._read(self.frame)
        return self._response

    def came_late(self, frame: Buffer) -> None:
        """Nobody waits for the response any more, but the broker may throttle with it."""
        with contextlib.suppress(DecodeError):
            self._read(frame)

    def _read(self, frame: Buffer) -> Any:
        _, response = self.api.read_response(frame, self.version)
        throttle_ms = getattr(response, "throttle_time_ms", 0)
        if throttle_ms > 0 and self.on_throttle is not None:
            self.on_throttle(throttle_ms)
        return response


class Wire:
    """The requests of one connection: `outgoing` is to be written, `pending` has no response; `match` takes frames."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.outgoing: deque[memoryview] = deque()
        self.pending: deque[Pending] = deque()
        self.without_response: deque[tuple[int, Pending]] = deque()  # not written yet: where each ends among all bytes
        self._queued_bytes = 0  # put into `outgoing` so far
        self._written_bytes = 0
        self._correlation_id = 0

    @property
    def in_flight(self) -> int:
        return len(self.pending) + len(self.without_response)

    def waiting(self) -> Iterator[Pending]:
        """The requests that are not done, oldest first."""
        yield from (pending for pending in self.pending if not pending.done)
        yield from (pending for _, pending in self.without_response if not pending.done)

    def late(self, now_s: float, is_throttled: bool) -> tuple[Pending | None, list[Pending], str]:
        """Requests past their deadline, and why. If the oldest one is late the broker is taken for dead: it comes
        first, and all fail with the connection. One that is late behind another, which may still take its time, fails
        alone, and so do those that are held back while the broker throttles."""
        waiting = list(self.waiting())
        if not waiting:
            return None, [], ""
        oldest = waiting[0]
        if oldest.deadline_s <= now_s and not is_throttled:
            return oldest, [], "is the broker overloaded, stopped or cut off?"
        why = "it throttles this client" if is_throttled else f"it is still busy with {oldest.api.name}"
        return None, [pending for pending in waiting if pending.deadline_s <= now_s], why

    def clear(self) -> list[Pending]:
        """Takes back all that is not done."""
        left = list(self.waiting())
        self.pending.clear()
        self.without_response.clear()
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
        response: bool = True,
    ) -> Pending:
        """Puts a request behind those that wait; without `response` (acks=0) it is done when it is written."""
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        parts = api.frame_request(request, version, self._correlation_id, self.client_id)
        pending = Pending(api, version, self._correlation_id, deadline_s, context)
        for part in _merged(parts):
            self.outgoing.append(memoryview(part))
            self._queued_bytes += len(part)
        if response:
            self.pending.append(pending)
        else:
            self.without_response.append((self._queued_bytes, pending))
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
        while self.without_response and self.without_response[0][0] <= self._written_bytes:
            _, pending = self.without_response.popleft()
            if not pending.done:
                pending.written = True
                done.append(pending)
        return done

    # --- in ---
    def match(self, frames: Iterable[memoryview]) -> Iterator[Pending]:
        """The requests whose responses the frames are, the oldest ones, without those that have timed out."""
        for frame in frames:
            pending = self._oldest(frame)
            if pending.done:
                pending.came_late(frame)
            else:
                pending.frame = frame
                yield pending

    def _oldest(self, frame: memoryview) -> Pending:
        if not self.pending:
            raise ConnectionFailedError("the broker sent a response without a request")
        pending = self.pending[0]
        (correlation_id,) = _SIZE.unpack_from(frame)
        if correlation_id != pending.correlation_id:
            raise ConnectionFailedError(
                f"the broker responded to {correlation_id}, expected {pending.correlation_id} ({pending.api.name})"
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
    """Which versions and features the broker at the other end has, from its ApiVersions response."""

    __slots__ = ("features", "features_epoch", "ranges")

    def __init__(self, response: ApiVersionsResponse) -> None:
        self.ranges = {api.api_key: VersionRange(api.min_version, api.max_version) for api in response.api_keys}
        self.features_epoch = response.finalized_features_epoch
        self.features = {feature.name: feature.max_version_level for feature in response.finalized_features}

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
    """(the response, -1), or (None, the version to send again) if the broker is older than the request was.

    A broker that does not have the version responds in version 0 with UNSUPPORTED_VERSION and what it has.
    """
    if len(frame) < 6:
        raise DecodeError(f"an ApiVersions response has at least 6 bytes, this one {len(frame)}")
    (code,) = struct.unpack_from(">h", frame, 4)
    if code == ErrorCode.UNSUPPORTED_VERSION and version > 0:
        try:
            _, response = API_VERSIONS.read_response(frame, 0)
        except DecodeError:
            return None, 0
        highest = next((api.max_version for api in response.api_keys if api.api_key == API_VERSIONS.key), 0)
        return None, min(version - 1, highest)
    _, response = API_VERSIONS.read_response(frame, version)
    if response.error_code:
        raise error_of(response.error_code, "reading the broker's API versions")
    return response, -1
