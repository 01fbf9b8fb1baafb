"""A cluster as its clients see it: leaders, coordinators, connections, and one call that finds the right broker.

    cluster = Cluster(ClientSettings.of({"bootstrap.servers": "localhost:9092"}))
    response = cluster.call(Leader("orders", 0), LIST_OFFSETS, request, timeout_s=10)

`call` finds the broker, connects, retries what is transient with back-off, and never takes longer than its timeout.
Threads may share a cluster. Calls on one connection take turns, so work that waits for long (a group join, say) uses a
lane, a set of connections, of its own. A forked child starts with no connections.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from semel.client.closing import Closing
from semel.client.connection import BrokerConnection
from semel.client.errors import (
    ClosedError,
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
from semel.protocol.api import Api
from semel.protocol.errors import DecodeError, ErrorCode, Recovery
from semel.protocol.messages import cluster as messages
from semel.protocol.schema import Struct

log = logging.getLogger("semel.client")

FIRST_S = 2.0
EVERY_S = 10.0
FORGOTTEN_S = 60.0  # a failure so long after the one before is a new one

Request = TypeVar("Request", bound=Struct)
Response = TypeVar("Response", bound=Struct)
Result = TypeVar("Result")

GROUP, TRANSACTION = 0, 1  # kinds of coordinators


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


class Cluster(Closing):
    """Connections and metadata of one client."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.metadata = Metadata()
        self.closed = False
        self._end = threading.Event()  # wakes those that pause before a retry
        self._lock = threading.RLock()  # guards what follows and the metadata
        self._connections: dict[tuple[str, str, int], BrokerConnection] = {}
        self._openings: dict[tuple[str, str, int], threading.Lock] = {}
        self._coordinators: dict[CoordinatorTarget, BrokerAddress] = {}
        self._reconnects = Reconnects(settings)
        self._owner_pid = os.getpid()
        self.outages = Outages()
        self.was_reached = False  # by a connection that was opened, whatever became of it

    # --- the one call ---
    def call(
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

        def attempt() -> Response:
            connection = self.connect(target, deadline, lane)
            version = connection.capabilities.version_of(api, at_most, at_least)
            response = checked_call(connection, api, request, min(limit_s, deadline.remaining_s()), version)
            for code in errors(response) if errors else ():
                if code:
                    raise error_of(code, f"{api.name} to {describe(target)}", getattr(response, "error_message", None))
            return response

        return self.retry(attempt, f"{api.name} to {describe(target)}", deadline, target, resend, first_wait_ms)

    def retry(
        self,
        attempt: Callable[[], Result],
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
            self._check_open()
            try:
                result = attempt()
            except KafkaError as error:
                if error.recovery is not Recovery.RETRY or (not resend and getattr(error, "maybe_sent", False)):
                    self.outages.over(what)
                    raise
                first = first or error
                if target is not None:
                    self.forget(target)
                if not is_network(error):  # of the network `_connect_to` says it
                    self.outages.failed(what, error)
                if not self.pause(backoff, deadline, getattr(error, "retry_after_s", 0.0)):
                    self.outages.over(what)
                    raise _out_of_time(what, deadline, first, error) from first
            else:
                self.outages.over(what)
                return result

    # --- finding brokers ---
    def connect(self, target: Target, deadline: Deadline, lane: str = "main") -> BrokerConnection:
        """An open connection to the target, looked up if need be. One attempt: transient errors are raised."""
        if isinstance(target, AnyNode):
            return self._connect_any(deadline, lane)
        broker = self.locate(target, deadline, lane)
        try:
            return self._connect_to(broker.host, broker.port, deadline, lane)
        except ConnectionFailedError as error:
            raise _not_reached(
                f"{error} (broker {broker.node_id} advertises this address: if it is wrong, correct the broker's "
                "advertised.listeners)",
                [error],
            ) from None

    def locate(self, target: Target, deadline: Deadline, lane: str = "main") -> BrokerAddress:
        if isinstance(target, CoordinatorTarget):
            return self._coordinator(target, deadline, lane)
        if isinstance(target, Leader):
            node_id = self.partition(target.topic, target.partition, deadline, lane).leader
        else:
            is_moving = isinstance(target, Controller) and self.metadata.is_controller_in_doubt
            if is_moving or not self.metadata.brokers:
                self.refresh([], deadline, lane)
            node_id = target.node_id if isinstance(target, NodeTarget) else self.metadata.controller_id
            if isinstance(target, Controller) and node_id < 0:
                node_id = min(self.metadata.brokers, default=-1)
        with self._lock:
            broker = self.metadata.brokers.get(node_id)
        if broker is None:
            self.refresh([], deadline, lane)
            broker = self.metadata.brokers.get(node_id)
        if broker is None:
            known = ", ".join(map(str, sorted(self.metadata.brokers)))
            raise RetriableError(f"broker {node_id} is not in the cluster now; known are: {known or 'none'}")
        return broker

    def forget(self, target: Target) -> None:
        """What was known about the target is in doubt; it is looked up again."""
        with self._lock:
            if isinstance(target, CoordinatorTarget):
                self._coordinators.pop(target, None)
            elif isinstance(target, Leader):
                self.metadata.forget(target.topic)
            elif isinstance(target, Controller):
                self.metadata.is_controller_in_doubt = True

    def topic(self, name: str, deadline: Deadline | None = None, lane: str = "main") -> TopicMetadata:
        """A topic's partitions, from memory while that is fresh. One attempt; `partitions` retries."""
        with self._lock:
            if self.metadata.is_fresh(name, time.monotonic(), self.settings.metadata_max_age_ms / 1000):
                return self.metadata.topics[name]
        self.refresh([name], deadline or self.deadline(), lane)
        with self._lock:
            found = self.metadata.topics.get(name)
            if name in self.metadata.errors or found is None:
                code = self.metadata.errors.get(name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                raise error_of(code, f"looking up topic {name!r}")
            return found

    def partition(
        self, topic: str, index: int, deadline: Deadline | None = None, lane: str = "main"
    ) -> PartitionMetadata:
        """One partition with a leader. One attempt."""
        found = self.topic(topic, deadline, lane)
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

    def partitions(
        self, topic: str, timeout_s: float | None = None, lane: str = "main"
    ) -> dict[int, PartitionMetadata]:
        """A topic's partitions; waits for a topic that is being created, up to the timeout."""
        deadline = self.deadline(timeout_s)

        what = f"looking up topic {topic!r}"
        return self.retry(lambda: self.topic(topic, deadline, lane), what, deadline).partitions

    def refresh(self, topics: Iterable[str] | None, deadline: Deadline | None = None, lane: str = "main") -> Metadata:
        """Metadata of these topics from any broker (None: all, empty: brokers only). One attempt."""
        deadline = deadline or self.deadline()
        wanted = None if topics is None else [messages.MetadataRequestTopic(name=name) for name in topics]
        request = messages.MetadataRequest(
            topics=wanted, allow_auto_topic_creation=self.settings.allow_auto_create_topics
        )
        connection = self._connect_any(deadline, lane)
        version = connection.capabilities.version_of(messages.METADATA, at_least=1)
        limit_s = min(self.settings.request_timeout_ms / 1000, deadline.remaining_s())
        response = checked_call(connection, messages.METADATA, request, limit_s, version)
        if response.error_code:
            raise error_of(response.error_code, "looking up the cluster")
        with self._lock:
            self.metadata.update(response, time.monotonic(), is_complete=wanted is None)
        return self.metadata

    def feature(self, name: str, target: Target | None = None, timeout_s: float | None = None) -> int:
        """The level at which the cluster finalised a feature, such as 'transaction.version'; 0 if it did not."""
        deadline = self.deadline(timeout_s)
        where = target or AnyNode()
        connection = self.retry(lambda: self.connect(where, deadline), f"looking up {name}", deadline, where)
        return connection.capabilities.feature(name)

    def _coordinator(self, target: CoordinatorTarget, deadline: Deadline, lane: str) -> BrokerAddress:
        with self._lock:
            known = self._coordinators.get(target)
        if known is not None:
            return known
        connection = self._connect_any(deadline, lane)
        version = connection.capabilities.version_of(
            messages.FIND_COORDINATOR, at_least=0 if target.kind == GROUP else 1
        )
        request = messages.FindCoordinatorRequest(key_type=target.kind)
        if version >= 4:
            request.coordinator_keys = [target.key]
        else:
            request.key = target.key
        limit_s = min(self.settings.request_timeout_ms / 1000, deadline.remaining_s())
        response = checked_call(connection, messages.FIND_COORDINATOR, request, limit_s, version)
        found = response.coordinators[0] if version >= 4 else response
        if found.error_code:
            raise error_of(found.error_code, f"looking for the {describe(target)}", found.error_message)
        broker = BrokerAddress(found.node_id, found.host, found.port)
        with self._lock:
            self._coordinators[target] = broker
        return broker

    # --- connections ---
    def _connect_any(self, deadline: Deadline, lane: str) -> BrokerConnection:
        """One that is open, else the first of all known addresses that responds."""
        self._check_open()
        with self._lock:
            for (its_lane, _, _), connection in self._connections.items():
                if its_lane == lane and not connection.closed and not connection.retiring:
                    return connection
            known = [(broker.host, broker.port) for broker in self.metadata.brokers.values()]
        random.shuffle(known)
        addresses = list(dict.fromkeys([*known, *map(parse_address, self.settings.bootstrap_servers)]))
        failures = []
        for host, port in addresses:
            try:
                return self._connect_to(host, port, deadline, lane)
            except ConnectionFailedError as error:
                failures.append(error)
        raise _not_reached(f"none of the brokers can be reached: {'; '.join(map(str, failures))}", failures)

    def _connect_to(self, host: str, port: int, deadline: Deadline, lane: str) -> BrokerConnection:
        self._check_open()
        key = (lane, host, port)
        with self._opening(key, deadline):
            with self._lock:
                connection = self._connections.get(key)
            if connection is not None and not connection.in_flight:
                connection.notice_closing()
            if connection is not None and not connection.closed:
                if not connection.retiring or connection.in_flight:
                    return connection
                connection.close()
            connection = self._open(host, port, deadline)
            with self._lock:
                if self.closed:
                    connection.close()
                    self._check_open()
                self._connections[key] = connection
            return connection

    def _open(self, host: str, port: int, deadline: Deadline) -> BrokerConnection:
        """Logs a broker that cannot be reached before the timeout passes, wherever the call is retried."""
        address = f"{host}:{port}"
        try:
            connection = self._reconnects.open(host, port, deadline)
        except ConnectionFailedError as error:
            self.outages.failed(address, error)
            raise
        self.outages.over(address)
        self.was_reached = True
        return connection

    def connections(self, lane: str) -> list[BrokerConnection]:
        """The open connections of a lane, for `semel.client.connection.poll`."""
        with self._lock:
            return [c for (its_lane, _, _), c in self._connections.items() if its_lane == lane and not c.closed]

    @contextmanager
    def _opening(self, key: tuple[str, str, int], deadline: Deadline) -> Iterator[None]:
        """One thread at a time opens a connection; those that want the same one wait for it, up to their deadline."""
        with self._lock:
            lock = self._openings.setdefault(key, threading.Lock())
        if not lock.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
            raise ConnectionFailedError(
                f"another thread has been connecting to {key[1]}:{key[2]} for longer than {deadline.total_s:.3g} s",
                ErrorCode.NETWORK_EXCEPTION,
            )
        try:
            yield
        finally:
            lock.release()

    # --- small things ---
    def deadline(self, timeout_s: float | None = None) -> Deadline:
        return Deadline(self.settings.default_api_timeout_ms / 1000 if timeout_s is None else timeout_s)

    def backoff(self, first_wait_ms: float | None = None) -> Backoff:
        first_ms = self.settings.retry_backoff_ms if first_wait_ms is None else first_wait_ms
        return Backoff(first_ms, self.settings.retry_backoff_max_ms)

    def pause(self, backoff: Backoff, deadline: Deadline, retry_after_s: float = 0.0) -> bool:
        """Sleeps before the next try, exactly `retry_after_s` if that is known; False, at once, if the deadline comes
        first."""
        wait_s = retry_after_s or backoff.next_s()
        if deadline.remaining_s() <= wait_s:
            return False
        self._end.wait(wait_s)
        return True

    def close(self) -> None:
        """Closes every connection. Calls that wait in other threads fail."""
        if os.getpid() != self._owner_pid:
            self.closed = True  # the connections are the parent's, and a thread of it may have had the lock at the fork
            return
        with self._lock:
            self.closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        self._end.set()
        for connection in connections:
            connection.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this client is closed; make a new one")
        if os.getpid() != self._owner_pid:
            self._lock = threading.RLock()  # another thread of the parent may have held it at the fork
            self._openings = {}
            self._connections = {}  # the parent's sockets; using them would mix both processes' requests
            self.outages = Outages()
            self._owner_pid = os.getpid()


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


def checked_call(
    connection: BrokerConnection,
    api: Api[Request, Response],
    request: Request,
    timeout_s: float,
    version: int | None = None,
) -> Response:
    """A call whose response may make no sense: that is a broken connection."""
    try:
        return connection.call(api, request, max(timeout_s, 0.001), version)
    except DecodeError as error:
        connection.close()
        raise ConnectionFailedError(
            f"{connection.address} sent a malformed response to {api.name}: {error}", maybe_sent=True
        ) from error


def _out_of_time(what: str, deadline: Deadline, first: KafkaError, last: KafkaError) -> TimedOutError:
    """Names the first error too: the last attempt is often cut short by the deadline, and says nothing of the cause."""
    causes = f"the last try: {last}" + (f"; the first try: {first}" if str(first) != str(last) else "")
    return TimedOutError(f"{what} did not succeed within {deadline.total_s:.3g} s; {causes}", last.code)


class _Failure(NamedTuple):
    message: str
    backoff: Backoff
    next_s: float  # on time.monotonic()


class Reconnects:
    """Opens connections, and does not try an address that cannot be reached again and again: after each failure in a
    row the next attempt is made after reconnect.backoff.ms, doubled each time up to reconnect.backoff.max.ms."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._failures: dict[tuple[str, int], _Failure] = {}

    def open(self, host: str, port: int, deadline: Deadline) -> BrokerConnection:
        """A new connection. Raises at once, with `retry_after_s`, where the last attempt failed a moment ago."""
        address = (host, port)
        failure = self._failures.get(address)
        wait_s = 0.0 if failure is None else failure.next_s - time.monotonic()
        if failure is not None and wait_s > 0:
            error = ConnectionFailedError(failure.message, ErrorCode.NETWORK_EXCEPTION)
            error.retry_after_s = wait_s
            raise error
        try:
            connection = BrokerConnection.open(host, port, self._settings, deadline.remaining_s())
        except ConnectionFailedError as error:
            if not deadline.expired:  # else the caller's short timeout may be the cause
                self._note(address, str(error))
            raise
        self._failures.pop(address, None)
        return connection

    def _note(self, address: tuple[str, int], message: str) -> None:
        settings, before = self._settings, self._failures.get(address)
        backoff = (
            before.backoff if before else Backoff(settings.reconnect_backoff_ms, settings.reconnect_backoff_max_ms)
        )
        self._failures[address] = _Failure(message, backoff, time.monotonic() + backoff.next_s())


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
