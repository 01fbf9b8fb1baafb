"""How a request finds its broker, and when it is sent again: the calls of a cluster, for every driver.

    response = await calls.call(Leader("orders", 0), LIST_OFFSETS, request, timeout_s=10)

`ClusterCalls` decides; a driver connects, sends and waits. `cluster.py` is the blocking one, whose coroutines never
wait (`immediate.py`), `semel.aio` the one for asyncio.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from semel.client.errors import (
    ConnectionFailedError,
    KafkaError,
    RetriableError,
    TimedOutError,
    error_of,
    is_network,
)
from semel.client.metadata import BrokerAddress, Metadata, PartitionMetadata, TopicMetadata
from semel.client.settings import ClientSettings, parse_address
from semel.client.timing import Backoff, Clock, Deadline
from semel.client.types import checked_topic
from semel.client.wire import Capabilities
from semel.protocol.api import Api
from semel.protocol.errors import DecodeError, ErrorCode, Recovery
from semel.protocol.messages import cluster as messages
from semel.protocol.schema import Struct

Request = TypeVar("Request", bound=Struct)
Response = TypeVar("Response", bound=Struct)
Result = TypeVar("Result")


ConnectionKey = tuple[str, str, int]  # lane, host, port

log = logging.getLogger("semel.client")

GROUP, TRANSACTION = 0, 1  # kinds of coordinators
FIRST_S = 2.0  # until an outage is logged
EVERY_S = 10.0
FORGOTTEN_S = 60.0  # a failure so long after the one before is a new one


# --- targets ---
class AnyNode(NamedTuple):
    """Whichever broker can be reached."""


class Controller(NamedTuple):
    """The broker that metadata names as controller; with KRaft any broker, which passes requests on."""


class NodeTarget(NamedTuple):
    node_id: int


class Leader(NamedTuple):
    topic: str
    partition: int


class CoordinatorTarget(NamedTuple):
    kind: int
    key: str


Target = AnyNode | Controller | NodeTarget | Leader | CoordinatorTarget


def group_coordinator(group_id: str) -> CoordinatorTarget:
    return CoordinatorTarget(GROUP, group_id)


def transaction_coordinator(transactional_id: str) -> CoordinatorTarget:
    return CoordinatorTarget(TRANSACTION, transactional_id)


def top_error(response: Any) -> Iterable[int]:
    """The error code on top of a response, where its type has one: what `call` looks at by default."""
    return (getattr(response, "error_code", 0),)


class OpenConnection(Protocol):
    """What is looked at in a connection of any driver."""

    capabilities: Capabilities
    closed: bool

    @property
    def address(self) -> str: ...
    @property
    def retiring(self) -> bool: ...
    def close(self) -> None: ...


Connection = TypeVar("Connection", bound=OpenConnection)


class ClusterCalls(Generic[Connection]):
    """Metadata, coordinators and the calls of one client. The methods of the last section are the driver's."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.metadata = Metadata()
        self.closed = False
        self.was_reached = False  # by a connection that was opened, whatever became of it
        self.coordinators: dict[CoordinatorTarget, BrokerAddress] = {}
        self.connections: dict[ConnectionKey, Connection] = {}
        self.outages = Outages()
        self._reconnects = ReconnectBackoff(settings)

    # --- the one call ---
    async def call(
        self,
        target: Target,
        api: Api[Request, Response],
        request: Request,
        *,
        timeout_s: float | None = None,
        attempt_timeout_s: float | None = None,
        errors: Callable[[Response], Iterable[int]] | None = top_error,
        resend: bool = True,
        at_most: int = 0x7FFF,
        at_least: int = 0,
        first_wait_ms: float | None = None,
        lane: str = "main",
    ) -> Response:
        """Sends the request to the right broker and returns its response; raises a `KafkaError` that says what to do.

        timeout_s          for everything together (default.api.timeout.ms)
        attempt_timeout_s  for one request (request.timeout.ms)
        errors             where a response has its error codes: a retriable one is retried, another one raised.
                           None: the response is returned as it is, only network errors are retried
        resend             False: a request that the broker may have got is not sent again; the error is raised
        at_most, at_least  limits for the version of the request
        first_wait_ms      before the first retry (retry.backoff.ms); each further one waits longer
        """
        deadline = self.deadline(timeout_s)
        limit_s = self.settings.request_timeout_ms / 1000 if attempt_timeout_s is None else attempt_timeout_s

        async def attempt() -> Response:
            connection = await self.connect(target, deadline, lane)
            version = connection.capabilities.version_of(api, at_most, at_least)
            response = await self.request(connection, api, request, min(limit_s, deadline.remaining_s()), version)
            for code in errors(response) if errors else ():
                if code:
                    raise error_of(code, f"{api.name} to {describe(target)}", getattr(response, "error_message", None))
            return response

        return await self.retry(attempt, f"{api.name} to {describe(target)}", deadline, target, resend, first_wait_ms)

    async def retry(
        self,
        attempt: Callable[[], Awaitable[Result]],
        what: str,
        deadline: Deadline,
        target: Target | None = None,
        resend: bool = True,
        first_wait_ms: float | None = None,
    ) -> Result:
        """Runs an attempt until it succeeds, fails for good or the deadline passes. Forgets the target in between."""
        backoff = self.backoff(first_wait_ms)
        first: KafkaError | None = None
        while True:
            self.check_open()
            try:
                result = await attempt()
            except KafkaError as error:
                if error.recovery is not Recovery.RETRY or (not resend and getattr(error, "maybe_sent", False)):
                    self.outages.over(what)
                    raise
                first = first or error
                if target is not None:
                    self.forget(target)
                if not is_network(error):  # of the network `_connect_to` says it
                    self.outages.failed(what, error)
                if not await self.pause(backoff, deadline, getattr(error, "retry_after_s", 0.0)):
                    self.outages.over(what)
                    raise _out_of_time(what, deadline, first, error) from first
            else:
                self.outages.over(what)
                return result

    # --- finding brokers ---
    async def connect(self, target: Target, deadline: Deadline, lane: str = "main") -> Connection:
        """An open connection to the target, looked up if need be. One attempt: transient errors are raised."""
        if isinstance(target, AnyNode):
            return await self._connect_any(deadline, lane)
        broker = await self.locate(target, deadline, lane)
        try:
            return await self.connect_to(broker.host, broker.port, deadline, lane)
        except ConnectionFailedError as error:
            raise _not_reached(
                f"{error} (broker {broker.node_id} advertises this address: if it is wrong, correct the broker's "
                "advertised.listeners)",
                [error],
            ) from None

    async def locate(self, target: Target, deadline: Deadline, lane: str = "main") -> BrokerAddress:
        if isinstance(target, CoordinatorTarget):
            return await self._coordinator(target, deadline, lane)
        if isinstance(target, Leader):
            node_id = (await self.partition(target.topic, target.partition, deadline, lane)).leader
        else:
            is_moving = isinstance(target, Controller) and self.metadata.is_controller_in_doubt
            if is_moving or not self.metadata.brokers:
                await self.refresh([], deadline, lane)
            node_id = target.node_id if isinstance(target, NodeTarget) else self.metadata.controller_id
            if isinstance(target, Controller) and node_id < 0:
                node_id = min(self.metadata.brokers, default=-1)
        with self.lock:
            broker = self.metadata.brokers.get(node_id)
        if broker is None:
            await self.refresh([], deadline, lane)
            broker = self.metadata.brokers.get(node_id)
        if broker is None:
            known = ", ".join(map(str, sorted(self.metadata.brokers)))
            raise RetriableError(f"broker {node_id} is not in the cluster now; known are: {known or 'none'}")
        return broker

    def forget(self, target: Target) -> None:
        """What was known about the target is in doubt; it is looked up again."""
        with self.lock:
            if isinstance(target, CoordinatorTarget):
                self.coordinators.pop(target, None)
            elif isinstance(target, Leader):
                self.metadata.forget(target.topic)
            elif isinstance(target, Controller):
                self.metadata.is_controller_in_doubt = True

    async def topic(self, name: str, deadline: Deadline | None = None, lane: str = "main") -> TopicMetadata:
        """A topic's partitions, from memory while that is fresh. One attempt; `partitions` retries."""
        with self.lock:
            if self.metadata.is_fresh(name, self.now_s(), self.settings.metadata_max_age_ms / 1000):
                return self.metadata.topics[name]
        await self.refresh([name], deadline or self.deadline(), lane)
        with self.lock:
            found = self.metadata.topics.get(name)
            if name in self.metadata.errors or found is None:
                code = self.metadata.errors.get(name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                raise error_of(code, f"looking up topic {name!r}")
            return found

    async def partition(
        self, topic: str, index: int, deadline: Deadline | None = None, lane: str = "main"
    ) -> PartitionMetadata:
        """One partition with a leader. One attempt."""
        found = await self.topic(topic, deadline, lane)
        partition = found.partitions.get(index)
        if partition is None:
            self.forget(Leader(topic, index))
            raise error_of(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"partition {index} of {topic!r}",
                f"it has {len(found.partitions)} partitions",
            )
        if partition.leader < 0:
            self.forget(Leader(topic, index))
            raise error_of(partition.error or ErrorCode.LEADER_NOT_AVAILABLE, f"partition {index} of {topic!r}")
        return partition

    async def partitions(
        self, topic: str, timeout_s: float | None = None, lane: str = "main"
    ) -> dict[int, PartitionMetadata]:
        """A topic's partitions; waits for a topic that is being created, up to the timeout."""
        deadline = self.deadline(timeout_s)

        what = f"looking up topic {topic!r}"
        return (await self.retry(lambda: self.topic(topic, deadline, lane), what, deadline)).partitions

    async def refresh(
        self, topics: Iterable[str] | None, deadline: Deadline | None = None, lane: str = "main"
    ) -> Metadata:
        """Metadata of these topics from any broker (None: all, empty: brokers only). One attempt."""
        deadline = deadline or self.deadline()
        wanted = (
            None if topics is None else [messages.MetadataRequestTopic(name=checked_topic(each)) for each in topics]
        )
        request = messages.MetadataRequest(
            topics=wanted, allow_auto_topic_creation=self.settings.allow_auto_create_topics
        )
        connection = await self._connect_any(deadline, lane)
        version = connection.capabilities.version_of(messages.METADATA, at_least=1)
        limit_s = min(self.settings.request_timeout_ms / 1000, deadline.remaining_s())
        response = await self.request(connection, messages.METADATA, request, limit_s, version)
        if response.error_code:
            raise error_of(response.error_code, "looking up the cluster")
        with self.lock:
            self.metadata.update(response, self.now_s(), is_complete=wanted is None)
        return self.metadata

    async def feature(self, name: str, target: Target | None = None, timeout_s: float | None = None) -> int:
        """The level at which the cluster finalised a feature, such as 'transaction.version'; 0 if it did not."""
        return (await self.capabilities(f"looking up {name}", target, timeout_s)).feature(name)

    async def capabilities(
        self, what: str, target: Target | None = None, timeout_s: float | None = None
    ) -> Capabilities:
        """Of the broker that is the target now."""
        deadline = self.deadline(timeout_s)
        where = target or AnyNode()
        connection = await self.retry(lambda: self.connect(where, deadline), what, deadline, where)
        return connection.capabilities

    async def _coordinator(self, target: CoordinatorTarget, deadline: Deadline, lane: str) -> BrokerAddress:
        with self.lock:
            known = self.coordinators.get(target)
        if known is not None:
            return known
        connection = await self._connect_any(deadline, lane)
        version = connection.capabilities.version_of(
            messages.FIND_COORDINATOR, at_least=0 if target.kind == GROUP else 1
        )
        request = messages.FindCoordinatorRequest(key_type=target.kind)
        if version >= 4:
            request.coordinator_keys = [target.key]
        else:
            request.key = target.key
        limit_s = min(self.settings.request_timeout_ms / 1000, deadline.remaining_s())
        response = await self.request(connection, messages.FIND_COORDINATOR, request, limit_s, version)
        found = response.coordinators[0] if version >= 4 else response
        if found.error_code:
            raise error_of(found.error_code, f"looking for the {describe(target)}", found.error_message)
        broker = BrokerAddress(found.node_id, found.host, found.port)
        with self.lock:
            self.coordinators[target] = broker
        return broker

    async def _connect_any(self, deadline: Deadline, lane: str) -> Connection:
        """One that is open, else the first of all known addresses that responds."""
        self.check_open()
        with self.lock:
            connection = self.open_connection(lane)
            known = [(broker.host, broker.port) for broker in self.metadata.brokers.values()]
        if connection is not None:
            return connection
        self.shuffle(known)
        addresses = list(dict.fromkeys([*known, *map(parse_address, self.settings.bootstrap_servers)]))
        failures = []
        for host, port in addresses:
            try:
                return await self.connect_to(host, port, deadline, lane)
            except ConnectionFailedError as error:
                failures.append(error)
        raise _not_reached(f"none of the brokers can be reached: {'; '.join(map(str, failures))}", failures)

    # --- small things ---
    def deadline(self, timeout_s: float | None = None) -> Deadline:
        return Deadline(self.settings.default_api_timeout_ms / 1000 if timeout_s is None else timeout_s)

    def backoff(self, first_wait_ms: float | None = None) -> Backoff:
        first_ms = self.settings.retry_backoff_ms if first_wait_ms is None else first_wait_ms
        return Backoff(first_ms, self.settings.retry_backoff_max_ms)

    async def pause(self, backoff: Backoff, deadline: Deadline, retry_after_s: float = 0.0) -> bool:
        """Sleeps before the next try, exactly `retry_after_s` if that is known; False, at once, if the deadline comes
        first."""
        wait_s = retry_after_s or backoff.next_s()
        if deadline.remaining_s() <= wait_s:
            return False
        await self.sleep(wait_s)
        return True

    def now_s(self) -> float:
        """On the clock of deadlines."""
        return time.monotonic()

    def shuffle(self, addresses: list[tuple[str, int]]) -> None:
        random.shuffle(addresses)

    def open_connection(self, lane: str) -> Connection | None:
        """A connection of a lane that is open and takes requests. The lock is held."""
        for (its_lane, _, _), connection in self.connections.items():
            if its_lane == lane and not connection.closed and not connection.retiring:
                return connection
        return None

    @contextlib.contextmanager
    def attempt_to_reach(self, host: str, port: int, deadline: Deadline) -> Iterator[None]:
        """Around an attempt to open a connection. Raises at once, with `retry_after_s`, where the last one failed a
        moment ago. A broker that cannot be reached is logged before the timeout passes, wherever the call is
        retried."""
        address = f"{host}:{port}"
        try:
            self._reconnects.check(host, port, self.now_s())
            yield
        except ConnectionFailedError as error:
            if not error.retry_after_s and not deadline.expired:  # else the caller's short timeout may be the cause
                self._reconnects.failed(host, port, error, self.now_s())
            self.outages.failed(address, error)
            raise
        self._reconnects.opened(host, port)
        self.outages.over(address)
        self.was_reached = True

    # --- the driver's ---
    lock: contextlib.AbstractContextManager[Any]  # guards the metadata, the coordinators and the set of connections

    def check_open(self) -> None:
        """Raises `ClosedError` once the client is closed."""
        raise NotImplementedError

    async def connect_to(self, host: str, port: int, deadline: Deadline, lane: str) -> Connection:
        raise NotImplementedError

    async def request(
        self,
        connection: Connection,
        api: Api[Request, Response],
        request: Request,
        timeout_s: float,
        version: int | None = None,
    ) -> Response:
        """One request on one connection. A response that makes no sense is a broken connection."""
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        """Shorter if the client is closed meanwhile."""
        raise NotImplementedError


@contextlib.contextmanager
def checking(connection: OpenConnection, api: Api[Any, Any]) -> Iterator[None]:
    """Around a call: a response that makes no sense is a broken connection."""
    try:
        yield
    except DecodeError as error:
        connection.close()
        raise ConnectionFailedError(
            f"{connection.address} sent a malformed response to {api.name}: {error}", maybe_sent=True
        ) from error


def describe(target: Target) -> str:
    """A target in words, for messages."""
    match target:
        case NodeTarget(node_id):
            return f"broker {node_id}"
        case Leader(topic, partition):
            return f"the leader of {topic}-{partition}"
        case CoordinatorTarget(kind, key):
            return f"coordinator of {'group' if kind == GROUP else 'transactional id'} {key!r}"
        case Controller():
            return "the controller"
        case _:
            return "any broker"


def _not_reached(message: str, causes: list[ConnectionFailedError]) -> ConnectionFailedError:
    error = ConnectionFailedError(message, causes[0].code)
    error.retry_after_s = min(cause.retry_after_s for cause in causes)
    return error


def _out_of_time(what: str, deadline: Deadline, first: KafkaError, last: KafkaError) -> TimedOutError:
    """Names the first error too: the last attempt is often cut short by the deadline, and says nothing of the cause."""
    causes = f"the last try: {last}" + (f"; the first try: {first}" if str(first) != str(last) else "")
    return TimedOutError(f"{what} did not succeed within {deadline.total_s:.3g} s; {causes}", last.code)


class _Failure(NamedTuple):
    message: str
    backoff: Backoff
    next_s: float


class ReconnectBackoff:
    """When an address that could not be reached may be tried again: after each failure in a row reconnect.backoff.ms
    later, doubled each time up to reconnect.backoff.max.ms."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._failures: dict[tuple[str, int], _Failure] = {}

    def check(self, host: str, port: int, now_s: float) -> None:
        """Raises, with `retry_after_s`, where the last attempt failed a moment ago."""
        failure = self._failures.get((host, port))
        wait_s = 0.0 if failure is None else failure.next_s - now_s
        if failure is not None and wait_s > 0:
            error = ConnectionFailedError(failure.message, ErrorCode.NETWORK_EXCEPTION)
            error.retry_after_s = wait_s
            raise error

    def failed(self, host: str, port: int, error: ConnectionFailedError, now_s: float) -> None:
        settings, before = self._settings, self._failures.get((host, port))
        backoff = (
            before.backoff if before else Backoff(settings.reconnect_backoff_ms, settings.reconnect_backoff_max_ms)
        )
        self._failures[host, port] = _Failure(str(error), backoff, now_s + backoff.next_s())

    def opened(self, host: str, port: int) -> None:
        self._failures.pop((host, port), None)


class Outages:
    """Logs failures that are being retried, after 2 s and every 10 s, each under a name: the address of a broker, or
    what a call does."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, _Outage] = {}

    def failed(self, name: str, error: Exception) -> None:
        now_s = self._clock()
        with self._lock:
            found = self._open.get(name)
            if found is None or now_s - found.last_s > FORGOTTEN_S:
                found = self._open[name] = _Outage(now_s)
            found.last_s = now_s
            if now_s < found.next_message_s:
                return
            found.next_message_s = now_s + EVERY_S
        log.warning("%s; retried for %.0f s so far, and until the timeout of the call", error, now_s - found.since_s)

    def over(self, name: str) -> None:
        """It works again, or the error was raised."""
        if self._open:
            with self._lock:
                self._open.pop(name, None)


class _Outage:
    __slots__ = ("last_s", "next_message_s", "since_s")

    def __init__(self, now_s: float) -> None:
        self.since_s = self.last_s = now_s
        self.next_message_s = now_s + FIRST_S
