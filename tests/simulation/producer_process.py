"""A program that writes: the producer's real core and the client's real wire format, driven in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semel.client.errors import ConnectionFailedError, KafkaError, error_of
from semel.client.frames import Frames
from semel.client.producer.batches import Identity, ProducerBatch
from semel.client.producer.core import ProducerCore
from semel.client.producer.identities import IdempotentIdentity, WriteIdentity
from semel.client.settings import ProducerSettings
from semel.client.wire import Pending, Wire
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import PRODUCE
from semel.protocol.messages.transactions import INIT_PRODUCER_ID, InitProducerIdRequest
from tests.simulation.loop import NEVER_S
from tests.simulation.world import SimulatedConnection, World

RECONNECT_S = 0.05
ROW_BYTES = 60
INIT_VERSION = 4


Connect = Callable[[Callable[[bytes], None], Callable[[], None]], SimulatedConnection | None]


class WireClient:
    """Requests on one connection after the other, each with its deadline."""

    def __init__(self, world: World, connect: Connect | None = None) -> None:
        self.world = world
        self._open = connect or world.broker.connect
        self._connection: SimulatedConnection | None = None
        self._wire = Wire("simulated")
        self._frames = Frames()
        self._then: dict[Pending, Callable[[Pending], None]] = {}
        self._retry_s = 0.0

    @property
    def in_flight(self) -> int:
        return self._wire.in_flight

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def connect(self) -> bool:
        if self._connection is None and self.world.now_s >= self._retry_s:
            connection = self._open(self._on_bytes, self._on_lost)
            if connection is None:
                self._retry_s = self.world.now_s + RECONNECT_S
            self._connection, self._wire, self._frames = connection, Wire("simulated"), Frames()
        return self._connection is not None

    def send(
        self,
        api: Api[Any, Any],
        request: Any,
        version: int,
        timeout_s: float,
        then: Callable[[Pending], None],
        context: Any = None,
    ) -> None:
        """`then` gets the request when it has a response or an error. Needs a connection."""
        connection = self._connection
        assert connection is not None
        pending = self._wire.send(api, request, version, self.world.now_s + timeout_s, context)
        self._then[pending] = then
        data = b"".join(self._wire.outgoing)
        self._wire.written(len(data))
        connection.send(data)
        self.world.after(timeout_s, lambda: self._time_out(connection, pending))

    def cut(self) -> None:
        if self._connection is not None:
            self._connection.cut()

    def cut_by_fault(self, whom: str) -> None:
        if self._connection is not None:
            self._connection.cut_by(whom)

    def _time_out(self, connection: SimulatedConnection, pending: Pending) -> None:
        if not pending.done and connection is self._connection:
            self.world.note("request timed out")
            connection.cut()

    def _on_bytes(self, data: bytes) -> None:
        while data:
            space = self._frames.space()
            count = min(len(space), len(data))
            space[:count] = data[:count]
            data = data[count:]
            for pending in self._wire.match(self._frames.filled(count)):
                self._then.pop(pending)(pending)

    def _on_lost(self) -> None:
        self._connection = None
        for pending in self._wire.clear():
            pending.error = ConnectionFailedError("cut", ErrorCode.NETWORK_EXCEPTION, maybe_sent=True)
            self._then.pop(pending)(pending)


class ProducerProcess:
    """A producer of topic `t`, which is there; an idempotent one unless it is given another identity."""

    produce_version = 9

    def __init__(self, world: World, identity: WriteIdentity | None = None, **options: Any) -> None:
        defaults = {"linger_ms": 0, "retry_backoff_ms": 20, "retry_backoff_max_ms": 200, "request_timeout_ms": 2000}
        settings = ProducerSettings.of(bootstrap_servers="broker:9092", **{**defaults, **options})
        self.core = ProducerCore(settings, identity or IdempotentIdentity(), world.rng.random)
        self.sent: list[tuple[ProducerBatch, int, int, bytes]] = []  # batch, place in it, partition, value
        self.most_bytes = 0
        self.cut_rate = 0.0  # of requests, after which the connection is cut
        self._world = world
        self._client = WireClient(world)
        self._asks_for_identity = False

    def send(self, partition: int, value: bytes) -> bool:
        """False while buffer.memory is full."""
        core, row = self.core, (None, value, 1, ())
        batch = core.accumulator.append("t", partition, row, ROW_BYTES)
        if batch is None:
            core.check_accepts()
            if not core.accumulator.has_memory(ROW_BYTES + 61):
                return False
            batch = core.accumulator.append_new("t", partition, row, ROW_BYTES, self._world.now_s)
        self.sent.append((batch, batch.count - 1, partition, value))
        self.most_bytes = max(self.most_bytes, core.accumulator.used_bytes)
        return True

    def next_event_s(self) -> float:
        due_s = self.core.next_event_s()
        if due_s > self._world.now_s:
            return due_s
        return NEVER_S if self._asks_for_identity else self._world.now_s + RECONNECT_S  # it waits for a connection

    def run(self) -> None:
        core, now_s = self.core, self._world.now_s
        for batch in core.advance(now_s):
            batch.encode(0)
        if core.wants_identity(now_s) and not self._asks_for_identity and self._client.connect():
            self._ask_for_identity()
        queues = core.ready(now_s)
        assert not core.partitions_to_add(queues), "TV1 is not simulated"
        if queues and not self._client.connect():
            error = ConnectionFailedError("the broker is down", ErrorCode.NETWORK_EXCEPTION)
            core.unreachable(queues, error, now_s)
            queues = []
        while queues and self._client.in_flight < core.settings.max_in_flight_requests_per_connection:
            produce = core.take(queues, now_s)
            if produce is None:
                break
            self._client.send(
                PRODUCE, produce.request, self.produce_version, produce.timeout_s, self._settle, produce.sendings
            )
            if self._world.rng.random() < self.cut_rate and self._world.may_strike():
                self._world.after(
                    self._world.rng.random() * 4 * self._world.delay_s, lambda: self._client.cut_by_fault("a producer")
                )
        for batch in core.take_finished():
            self._world.note(f"{batch!r}: {batch.error or batch.base_offset}")

    def _ask_for_identity(self) -> None:
        self._asks_for_identity = True

        def then(pending: Pending) -> None:
            self._asks_for_identity = False
            try:
                response = pending.result()
                if response.error_code:
                    raise error_of(response.error_code, "InitProducerId")
            except KafkaError as error:
                self.core.not_ready(error, self._world.now_s)
                return
            if response.error_code:
                self.core.not_ready(error_of(response.error_code, "InitProducerId"), self._world.now_s)
                return
            self.core.identity_received(Identity(response.producer_id, response.producer_epoch))

        request = InitProducerIdRequest(None, 2**31 - 1)
        self._client.send(INIT_PRODUCER_ID, request, INIT_VERSION, 2.0, then)

    def _settle(self, pending: Pending) -> None:
        try:
            response = pending.result()
        except KafkaError as error:
            self.core.lost(pending.context, error, self._world.now_s)
            return
        parts = {(topic.name, part.index): part for topic in response.responses for part in topic.partition_responses}
        self.core.responded(pending.context, parts, self._world.now_s)
