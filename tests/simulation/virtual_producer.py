"""A driver for `ProducerCore` with virtual time: one thread, a network that is a list of events, and a broker that is a
model. The random generator that it is given decides about every delay and fault, so a seed gives the same run again.
"""

from __future__ import annotations

import copy
import heapq
import random
from collections.abc import Callable
from typing import NamedTuple

from semel.client.errors import ConnectionFailedError
from semel.client.producer.batches import ProducerBatch
from semel.client.producer.core import Produce, ProducerCore
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import ProduceRequest
from tests.simulation.log_model import LogModel, Responses

START_S = 1_000.0
ROW_BYTES = 100


class NetworkFaults(NamedTuple):
    """How often things go wrong, per request."""

    cut: float = 0.0  # the connection breaks: no response to anything that is on its way, which arrives all the same
    arrives_late: float = 0.5  # of those: so late that a retry may have overtaken it
    refused: float = 0.0  # the broker says that it is not the leader
    delay_s: float = 0.01


class _Connection:
    def __init__(self) -> None:
        self.in_flight: list[Produce] = []
        self.last_arrival_s = self.last_response_s = 0.0  # both in the order of the requests
        self.closed = False


class VirtualProducer:
    def __init__(
        self, core: ProducerCore, log: LogModel, rng: random.Random, faults: NetworkFaults | None = None
    ) -> None:
        self.core = core
        self.log = log
        self.now_s = START_S
        self.faults = faults or NetworkFaults()
        self.cuts = self.refusals = 0
        self.finished: list[ProducerBatch] = []
        self.finished_at_s: dict[ProducerBatch, float] = {}
        self.most_bytes = 0
        self._rng = rng
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._connection = _Connection()

    # --- the program ---

    def send(self, partition: int, value: bytes) -> tuple[ProducerBatch, int] | None:
        """A row in its batch, and its place there; None while buffer.memory is full."""
        accumulator, row = self.core.accumulator, (None, value, 1, ())
        batch = accumulator.append("t", partition, row, ROW_BYTES)
        if batch is None:
            self.core.check_accepts()
            if not accumulator.has_memory(ROW_BYTES + 61):
                return None
            batch = accumulator.append_new("t", partition, row, ROW_BYTES, self.now_s)
        self.most_bytes = max(self.most_bytes, accumulator.used_bytes)
        return batch, batch.count - 1

    # --- time ---

    def run(self, until: Callable[[], bool], limit_s: float = 10_000.0) -> bool:
        """Lets time pass until it is so; False if that did not happen within the limit."""
        end_s = self.now_s + limit_s
        while True:
            self.step()
            if until():
                return True
            next_s = min(self.core.next_event_s(), self._events[0][0] if self._events else float("inf"))
            if next_s > end_s:
                return False
            self.now_s = max(self.now_s, next_s)
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()

    def run_for(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        self.at(end_s, lambda: None)
        self.run(lambda: self.now_s >= end_s)

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (time_s, self._numbers, event))

    def step(self) -> None:
        """Everything that can be done now."""
        core = self.core
        for batch in core.advance(self.now_s):
            batch.encode(0)
        if core.wants_identity(self.now_s):
            core.identity_received(self.log.new_identity())
        queues = core.ready(self.now_s)
        places = core.partitions_to_add(queues)
        if places:
            core.partitions_added(places)
        while len(self._connection.in_flight) < core.settings.max_in_flight_requests_per_connection:
            produce = core.take(queues, self.now_s)
            if produce is None:
                break
            self._send(produce)
        for batch in core.take_finished():
            assert batch.done
            self.finished.append(batch)
            self.finished_at_s[batch] = self.now_s

    # --- the network ---

    def _send(self, produce: Produce) -> None:
        connection = self._connection
        connection.in_flight.append(produce)
        request = copy.deepcopy(produce.request)  # the bytes as they are now
        arrival_s = max(connection.last_arrival_s, self.now_s + self._delay_s())
        is_cut, is_refused = self._rng.random() < self.faults.cut, self._rng.random() < self.faults.refused
        if is_cut:
            self.at(self.now_s + self._delay_s(), lambda: self._cut(connection))
        if is_cut and self._rng.random() < self.faults.arrives_late:
            arrival_s += 100 * self._delay_s()
        connection.last_arrival_s = arrival_s  # what follows on this connection does not overtake it
        self.at(arrival_s, lambda: self._arrive(connection, produce, request, is_refused))
        self.at(self.now_s + produce.timeout_s, lambda: self._time_out(connection, produce))

    def _arrive(self, connection: _Connection, produce: Produce, request: ProduceRequest, is_refused: bool) -> None:
        self.refusals += is_refused
        responses = (
            self.log.refuse(request, ErrorCode.NOT_LEADER_OR_FOLLOWER) if is_refused else self.log.produce(request)
        )
        connection.last_response_s = max(connection.last_response_s, self.now_s + self._delay_s())
        self.at(connection.last_response_s, lambda: self._respond(connection, produce, responses))

    def _respond(self, connection: _Connection, produce: Produce, responses: Responses) -> None:
        if produce in connection.in_flight:
            connection.in_flight.remove(produce)
            self.core.responded(produce.sendings, responses, self.now_s)

    def _time_out(self, connection: _Connection, produce: Produce) -> None:
        if produce in connection.in_flight:
            self._cut(connection)

    def _cut(self, connection: _Connection) -> None:
        """What is on its way has no response. Whether it arrived, or will, nobody knows."""
        if connection.closed:
            return
        connection.closed = True
        self.cuts += 1
        self._connection = _Connection()
        lost, connection.in_flight = connection.in_flight, []
        for produce in lost:
            error = ConnectionFailedError("cut", ErrorCode.NETWORK_EXCEPTION, maybe_sent=True)
            self.core.lost(produce.sendings, error, self.now_s)

    def _delay_s(self) -> float:
        return self.faults.delay_s * self._rng.random()
