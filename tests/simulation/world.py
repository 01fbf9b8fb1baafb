"""The world of a simulation: one thread, one virtual time, one random generator, a network of bytes, and a broker whose
real code runs in a loop of its own and can be killed between any two steps of it.

The seed decides about everything. `trace` has what happened; the same seed gives the same trace again.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from semel import faults
from semel.broker import turns
from semel.broker.broker import BrokerNode
from semel.broker.clock import Clock
from semel.broker.connection import Connection, Server
from semel.broker.quotas import CLIENT_ID, PRODUCER_BYTE_RATE
from semel.broker.settings import Settings
from semel.protocol.schema import NO_UUID
from semel.prove.powercut import JournaledFiles
from semel.storage import StorageError, sync
from semel.storage.data_dir import DataDir
from tests.simulation.disk import SimulatedDisk
from tests.simulation.loop import NEVER_S, SimulatedLoop

TOPIC, PARTITIONS = "t", 3
START_S = 1_000_000.0
STALL = 100
SOCKET_BYTES = 3_000  # on their way to the broker, at most
WALL_S = 1_700_000_000.0  # what the wall clock says at START_S, less that


class SimulatedProcess(Protocol):
    """Something that acts in virtual time."""

    def next_event_s(self) -> float:
        """When it has something to do, if nothing else happens."""

    def run(self) -> None:
        """Does what can be done now."""


class World:
    def __init__(self, seed: int, data: Path) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now_s = START_S
        self.trace: list[str] = []
        self.faults = 0  # that happened: each is counted once, and what follows from it is not
        self.is_over = False  # what is stopped from here on is no fault
        self.strikes = 0  # so many times something could be made to fail
        self.left_out: frozenset[int] = frozenset()  # numbers of those at which nothing is made to fail
        self.delay_s = 0.005  # of bytes on their way, most often at most
        self.stall_rate = 0.0  # of those that take longer, up to a hundred times
        self.cuts_lose_requests = False  # that are on their way when a connection is cut; else they arrive
        self.sync_s = 0.005
        self.clock = SimulatedClock(self)
        self.disk = SimulatedDisk(data, self.fault)
        self.broker = SimulatedBroker(self, data)
        self.processes: list[SimulatedProcess] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0

    def note(self, what: str) -> None:
        self.trace.append(f"{self.now_s - START_S:.6f} {what}")

    def fault(self, what: str) -> None:
        self.faults += not self.is_over
        self.note(what)

    def may_strike(self) -> bool:
        """Called before each fault. Whether it is to happen: see `shrink.py`."""
        self.strikes += 1
        return self.strikes not in self.left_out

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (time_s, self._numbers, event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, event)

    def network_delay_s(self) -> float:
        if self.rng.random() < self.stall_rate and self.may_strike():
            self.faults += 1
            return self.delay_s * (1 + STALL * self.rng.random())
        return self.delay_s * self.rng.random()

    def run(self, until: Callable[[], bool], limit_s: float = 10_000.0) -> bool:
        """Lets time pass until it is so; False if that did not happen within the limit."""
        end_s = self.now_s + limit_s
        while True:
            self.broker.advance()
            self.broker.check()
            for process in self.processes:
                process.run()
            if until():
                return True
            due = [self.broker.next_event_s(), *(process.next_event_s() for process in self.processes)]
            if self._events:
                due.append(self._events[0][0])
            next_s = min(due)
            if next_s > end_s:
                return False
            self.now_s = max(self.now_s, next_s)
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()

    def run_for(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        self.at(end_s, lambda: None)
        self.run(lambda: self.now_s >= end_s)


class SimulatedClock(Clock):
    """The broker's clocks. Its wall clock can be set; both run faster or slower than the time of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wall_offset_s = WALL_S
        self._rate = 1.0
        self._since_s = self._at_s = START_S  # the monotonic clock was at `_at_s` when the world's time was `_since_s`

    def now_ms(self) -> int:
        return int((self._wall_offset_s + self.monotonic_s()) * 1000)

    def monotonic_s(self) -> float:
        return self._at_s + (self._world.now_s - self._since_s) * self._rate

    def world_s(self, at_s: float) -> float:
        """The world's time when the monotonic clock is there; a nanosecond later, for it is rounded."""
        return self._since_s + (at_s - self._at_s) / self._rate + 1e-9

    def step_wall(self, seconds: float) -> None:
        self._world.fault(f"the broker's wall clock is set {seconds:+.1f} s")
        self._wall_offset_s += seconds

    def set_right(self) -> None:
        """The wall clock, as a time server does."""
        offset_s = WALL_S + self._world.now_s - self.monotonic_s()
        self._world.note(f"the broker's wall clock is set right, {offset_s - self._wall_offset_s:+.1f} s")
        self._wall_offset_s = offset_s

    def drift(self, rate: float) -> None:
        self._world.fault(f"the broker's clocks run at {rate:.3f} of the time")
        self._at_s, self._since_s, self._rate = self.monotonic_s(), self._world.now_s, rate


class _SimulatedSyncs:
    """Takes the place of the storage's threads: a sync takes a while, in virtual time."""

    def __init__(self, loop: Any, on_done: Callable[..., None]) -> None:
        self._loop = loop
        self._on_done = on_done

    def submit(self, jobs: list[Any]) -> None:
        for job in jobs:
            self._loop.call_later(self._loop.sync_delay_s(), lambda job=job: self._on_done(job, job.log.run_sync(job)))

    def stop(self) -> None:
        """There is nothing to stop."""


def _close_files(data_dir: DataDir) -> None:
    """As the system does for a process that was killed."""
    data_dir._shared.cache.close_all()
    if isinstance(data_dir.files, JournaledFiles):
        os.close(data_dir.files._journal._fd)


class SimulatedBroker:
    """The broker's real code. `start` it, `connect` to it, `kill` it, `cut_power`; `start` it again."""

    def __init__(self, world: World, data: Path) -> None:
        self._world = world
        self._data = data
        self.node: BrokerNode | None = None
        self._loop: SimulatedLoop | None = None
        self._server: Server | None = None
        self._bugs: list[dict[str, Any]] = []
        self._dead: list[Any] = []  # kept: collecting what was killed would run its `finally` blocks
        self._transports: list[_BrokerTransport] = []
        self.frozen_until_s = 0.0
        self.topics = {TOPIC: PARTITIONS}  # and their partitions; created if they are not there
        self.settings = {
            "offsets.topic.num.partitions": "2",
            "transaction.state.log.num.partitions": "2",
            "group.initial.rebalance.delay.ms": "100",
            "group.consumer.session.timeout.ms": "6000",
            "group.consumer.heartbeat.interval.ms": "1500",
        }
        self.quotas: dict[str, float] = {}  # producer_byte_rate of client ids
        self.port = 9092  # of the address that it advertises

    @property
    def restarts(self) -> int:
        return len(self._dead)

    @property
    def is_up(self) -> bool:
        return self._server is not None

    @property
    def topic_id(self) -> bytes:
        """The id of the one topic, once the broker has started."""
        topic = self.node.topics.get(TOPIC) if self.node is not None else None
        return topic.id if topic is not None else NO_UUID

    def start(self) -> None:
        loop = self._loop = SimulatedLoop(self._world.clock.monotonic_s())
        loop.sync_delay_s = lambda: self._world.rng.random() * self._world.sync_s  # type: ignore[attr-defined]
        loop.set_exception_handler(self._on_bug)
        loop.create_task(self._serve())
        self._world.note("broker starts")

    async def _serve(self) -> None:
        """A broker that cannot start ends; as under a supervisor, another one is started a while later."""
        disk = self._world.disk
        failures = disk.failures
        try:
            await self._start()
        except (OSError, StorageError) as error:
            if disk.failures == failures:
                raise
            self._world.note(f"broker did not start: {error}")
            self._world.after(0.1, self._start_again)

    def _start_again(self) -> None:
        if self._loop is not None and not self.is_up:
            self._end()
            self.start()

    async def _start(self) -> None:
        settings = Settings(self.settings)
        node = self.node = BrokerNode.__new__(BrokerNode)  # known although it may fail: it has the lock of its folder
        BrokerNode.__init__(node, settings, self._data, self._world.clock)
        node.advertised = ("broker", self.port)
        await node.start()
        for name, partitions in self.topics.items():
            if node.topics.get(name) is None:
                node.topics.create(name, partitions)
        if self.quotas and not node.quotas.is_active:
            for client_id, rate in self.quotas.items():
                node.quotas.alter(((CLIENT_ID, client_id),), {PRODUCER_BYTE_RATE: rate})
        self._server = Server(node)
        self._world.note("broker is up")

    def _on_bug(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._bugs.append(context)

    def check(self) -> None:
        """Raises what went wrong in the broker's own code, outside of any request."""
        for context in self._bugs:
            raise AssertionError(f"in the broker: {context['message']}") from context.get("exception")

    @property
    def is_frozen(self) -> bool:
        return self._world.now_s < self.frozen_until_s

    def advance(self, at_most: int = 1_000_000) -> None:
        if self._loop is not None and not self.is_frozen:
            self._loop.advance(self._world.clock.monotonic_s(), at_most)

    def next_event_s(self) -> float:
        if self._loop is None:
            return NEVER_S
        return max(self._world.clock.world_s(self._loop.next_event_s()), self.frozen_until_s)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while: then it reads what came meanwhile, connections in any order."""
        if self._loop is None or self.is_frozen:
            return
        self.frozen_until_s = self._world.now_s + seconds
        self._world.fault(f"broker frozen for {seconds:.3f} s")
        self._world.at(self.frozen_until_s, self._thaw)

    def _thaw(self) -> None:
        transports = list(self._transports)
        self._world.rng.shuffle(transports)
        for transport in transports:
            transport.wake()

    def kill(self, steps: int = 0) -> None:
        """kill -9, after so many more steps of what it is doing."""
        if self._loop is not None:
            self.advance(steps)
            self._world.fault("broker killed")
            self._end()

    def _end(self) -> None:
        assert self._loop is not None
        self.frozen_until_s = 0.0
        for task in asyncio.all_tasks(self._loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._dead.append((self._loop, self.node, self._server))
        node, self.node, self._loop, self._server = self.node, None, None, None
        if node is not None:
            with contextlib.suppress(OSError, AttributeError):
                os.close(node.store._fd)
            with contextlib.suppress(AttributeError):
                node.data_dir.crash()
                _close_files(node.data_dir)
        transports, self._transports = self._transports, []
        for transport in transports:
            transport.lose()

    def move(self, steps: int) -> None:
        """It is killed, and when it starts again its address is another one. The first one still leads to it, too, if
        clients use it under the name `bootstrap`."""
        self.kill(steps)
        self.port += 1

    def cut_power(self) -> None:
        """As `kill`, and what was not synced is lost, or in part."""
        if self._loop is None:
            return
        self.kill(self._world.rng.randrange(20))
        lost = self._world.disk.cut_power(random.Random(self._world.rng.random()))
        self._world.note(f"power cut: {lost} bytes")

    def connect(self, on_bytes: Callable[[bytes], None], on_lost: Callable[[], None]) -> SimulatedConnection | None:
        """A connection of a client; None if nobody listens."""
        if self._server is None or self._loop is None:
            return None
        protocol = Connection(self._server)
        connection = SimulatedConnection(self._world, on_bytes, on_lost)
        transport = _BrokerTransport(self, self._loop, protocol, connection)
        connection.transport = transport
        self._transports.append(transport)
        self._loop.call_soon(protocol.connection_made, transport)
        return connection


class SimulatedConnection:
    """The client's end: bytes arrive in order, after a while, in pieces; until it is cut."""

    transport: _BrokerTransport

    def __init__(self, world: World, on_bytes: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._world = world
        self._on_bytes = on_bytes
        self._on_lost = on_lost
        self._to_broker_s = self._to_client_s = 0.0
        self._unread_bytes = 0  # by the broker
        self._throttled_s = (0.0, 0.0)  # since when the client can know that it is to send nothing, and until when
        self.closed = False

    @property
    def free_bytes(self) -> int:
        """How much a socket takes now."""
        return max(0, SOCKET_BYTES - self._unread_bytes)

    def read_by_broker(self, count: int) -> None:
        self._unread_bytes -= count

    @property
    def throttled_for_s(self) -> float:
        """For how long the client could know that it is to send nothing for a while; 0: it may send."""
        since_s, until_s = self._throttled_s
        return self._world.now_s - since_s if since_s < self._world.now_s < until_s else 0.0

    def send(self, data: bytes) -> None:
        """What is sent before the connection is cut arrives all the same, or in part."""
        rng = self._world.rng
        self._unread_bytes += len(data)
        cut = rng.randrange(len(data)) if rng.random() < 0.2 else len(data)
        for piece in (data[:cut], data[cut:]):
            if piece:
                self._to_broker_s = max(self._to_broker_s, self._world.now_s + self._world.network_delay_s())
                self._world.at(self._to_broker_s, lambda piece=piece: self._arrive(piece))  # type: ignore[misc]

    def _arrive(self, piece: bytes) -> None:
        if not (self.closed and self._world.cuts_lose_requests):
            self.transport.receive(piece)

    def cut_by(self, whom: str) -> None:
        """A fault; none if it is closed already."""
        if not self.closed:
            self._world.fault(f"a connection of {whom} is cut")
            self.cut()

    def cut(self) -> None:
        """The client takes it for dead. Of what is on its way, some arrives."""
        if not self.closed:
            self.closed = True
            if self._world.cuts_lose_requests:
                self.transport.forget_unread()
            at_s = max(self._to_broker_s, self._world.now_s) + self._world.network_delay_s()
            self._world.at(at_s, self.transport.hang_up)
            self._on_lost()

    def deliver(self, data: bytes) -> None:
        """Bytes of the broker, on their way to the client."""
        self._to_client_s = max(self._to_client_s, self._world.now_s + self._world.network_delay_s())
        muted_s = self.transport.muted_s
        if muted_s:
            since_s, until_s = self._throttled_s
            at_s = self._to_client_s
            self._throttled_s = (at_s if at_s > until_s else since_s, max(until_s, at_s + muted_s))
        self._world.at(self._to_client_s, lambda: None if self.closed else self._on_bytes(data))

    def lose(self) -> None:
        """The broker is gone: the client learns it after what came before."""
        at_s = max(self._to_client_s, self._world.now_s + self._world.network_delay_s())
        self._world.at(at_s, self._lost)

    def _lost(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_lost()


class _Socket:
    def setsockopt(self, *_: Any) -> None:
        """Nothing to set."""


class _BrokerTransport(asyncio.Transport):
    """The broker's end of a connection."""

    def __init__(
        self, broker: SimulatedBroker, loop: SimulatedLoop, protocol: Connection, client: SimulatedConnection
    ) -> None:
        super().__init__({"peername": ("client", 1), "sockname": ("broker", 9092), "socket": _Socket()})
        self._broker = broker
        self._is_hung_up = False
        self._loop = loop
        self._protocol = protocol
        self._client = client
        self._is_open = True
        self._is_reading = True
        self._unread: list[bytes] = []

    def receive(self, data: bytes) -> None:
        if self._is_open:
            self._unread.append(data)
            self.wake()
        else:
            self._client.read_by_broker(len(data))

    def forget_unread(self) -> None:
        self._unread.clear()

    @property
    def muted_s(self) -> float:
        """For how long the broker throttles this client from now on."""
        left_s = self._protocol._muted_until_s - self._loop.time()
        return max(0.0, left_s) if self._protocol._is_muted else 0.0

    def wake(self) -> None:
        """There may be something to read; a frozen process does it later."""
        if not self._broker.is_frozen and self._is_open:
            self._loop.call_soon(self._read)
            if self._is_hung_up:
                self._loop.call_soon(self.abort)

    def _read(self) -> None:
        while self._is_open and self._is_reading and self._unread:
            data = self._unread.pop(0)
            self._client.read_by_broker(len(data))
            while data and self._is_open:
                buffer = self._protocol.get_buffer(len(data))
                count = min(len(buffer), len(data))
                buffer[:count] = data[:count]
                data = data[count:]
                self._protocol.buffer_updated(count)

    def hang_up(self) -> None:
        """The client closed its end: known after what it sent before."""
        self._is_hung_up = True
        self.wake()

    def lose(self) -> None:
        """The process is gone."""
        if self._is_open:
            self._is_open = False
            self._client.lose()

    def abort(self) -> None:
        if self._is_open:
            self._is_open = False
            self._client.lose()
            self._loop.call_soon(self._protocol.connection_lost, None)

    def close(self) -> None:
        self.abort()

    def is_closing(self) -> bool:
        return not self._is_open

    def write(self, data: Any) -> None:
        if self._is_open:
            self._client.deliver(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._loop.call_soon(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything is written at once."""

    def get_write_buffer_size(self) -> int:
        return 0


@contextlib.contextmanager
def simulated(seed: int, data: Path) -> Iterator[World]:
    """A world with a broker that is down. Puts the storage's threads and the handlers' turns under virtual time."""
    workers, counter, new_uuid, ids = sync._Workers, turns.perf_counter, uuid.uuid4, random.Random(seed)
    world = World(seed, data)
    faults.install(world.disk)
    sync._Workers = _SimulatedSyncs  # type: ignore[assignment,misc]
    turns.perf_counter = lambda: world.now_s
    uuid.uuid4 = lambda: uuid.UUID(int=ids.getrandbits(128))  # the ids of group members
    try:
        yield world
    finally:
        world.is_over = True
        world.broker.kill()
        faults.install(None)
        sync._Workers = workers  # type: ignore[misc]
        turns.perf_counter = counter
        uuid.uuid4 = new_uuid
