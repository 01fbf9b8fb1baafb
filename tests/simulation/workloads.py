"""What runs in a simulated world, and what must hold at its end."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semel.client.errors import DeliveryTimedOutError, KafkaError
from semel.client.wire import Pending
from semel.protocol.api import Api
from semel.protocol.batch import Buffer, iter_headers
from semel.protocol.messages.records import FETCH, FetchPartition, FetchRequest, FetchTopic, PartitionData
from semel.protocol.rows import Record, decode_batch
from tests.simulation.producer_process import ProducerProcess, WireClient
from tests.simulation.transactional_process import TransactionalProcess
from tests.simulation.world import PARTITIONS, TOPIC, World, simulated

RECORDS = 200
OWNERS, TRANSACTIONS = 3, 12
DRAIN_S = 300.0  # virtual
FETCH_VERSION = 11


class Disturbances:
    """What happens to the broker now and then: it is frozen, killed (and started again after a while), loses its power,
    its disk fails or is full, its clocks are set or drift. Until `end`."""

    def __init__(self, world: World, every_s: float = 1.0, down_s: float = 0.5) -> None:
        self._world = world
        self._every_s = every_s
        self.down_s = down_s  # how long it is, at most
        self.on = True
        self._next()

    def end(self) -> None:
        self.on = False
        self._world.disk.repair()
        self._world.clock.set_right()

    def _next(self) -> None:
        self._world.after(self._world.rng.expovariate(1 / self._every_s), self._strike)

    def maybe_strike_soon(self, rate: float) -> None:
        """While a request is on its way, or its response."""
        world = self._world
        if world.rng.random() < rate:
            world.after(world.rng.random() * 3 * world.delay_s, self._strike_once)

    def _strike(self) -> None:
        if self.on:
            self._strike_once()
            self._next()

    def _strike_once(self) -> None:
        if not self.on:
            return
        world = self._world
        rng = random.Random(world.rng.random())  # a fault that is left out changes no other
        if world.broker.is_up and world.may_strike():
            (fault,) = rng.choices(list(FAULTS), list(FAULTS.values()))
            fault(world, rng)
            if not world.broker.is_up:
                world.after(rng.random() * self.down_s, world.broker.start)


def _freeze(world: World, rng: random.Random) -> None:
    world.broker.freeze(rng.expovariate(1 / 1.5))


def _cut_power(world: World, _: random.Random) -> None:
    world.broker.cut_power()


def _kill(world: World, rng: random.Random) -> None:
    world.broker.kill(rng.randrange(20))


def _fail_syncs(world: World, rng: random.Random) -> None:
    world.disk.failing_syncs = rng.choice([1, 1, 2, 5])


def _fill_the_disk(world: World, rng: random.Random) -> None:
    world.disk.fill(rng.choice([0, rng.randrange(500)]))
    world.note(f"the disk has {world.disk.free_bytes} free bytes")
    world.after(rng.random() * 2, lambda: world.disk.fill(None))


def _set_the_clock(world: World, rng: random.Random) -> None:
    world.clock.step_wall(rng.choice([-1, 1]) * rng.choice([rng.random(), 10.0, 3_600.0]))


def _let_the_clocks_drift(world: World, rng: random.Random) -> None:
    world.clock.drift(rng.uniform(0.9, 1.1))


FAULTS = {
    _freeze: 4,
    _cut_power: 4,
    _kill: 4,
    _fail_syncs: 3,
    _fill_the_disk: 2,
    _set_the_clock: 1,
    _let_the_clocks_drift: 1,
}


def producer_and_broker(seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None) -> World:
    """One idempotent producer, one broker, every fault. Raises AssertionError if a promise is broken."""
    with simulated(seed, data) as world:
        on_start(world)
        rng = world.rng
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        producer = ProducerProcess(
            world,
            buffer_memory=rng.choice([2_000, 20_000]),
            batch_size=rng.choice([150, 400, 2_000]),
            linger_ms=rng.choice([0, 5]),
            request_timeout_ms=rng.choice([300, 1_000]),
            delivery_timeout_ms=rng.choice([1_500, 5_000, 2**31 - 1]),
        )
        world.processes.append(producer)
        producer.cut_rate, world.stall_rate = rng.random() * 0.8, rng.random() * rng.choice([0.1, 0.5])
        disturbances = Disturbances(world, every_s=0.5)
        for number in range(RECORDS):
            partition, value = rng.randrange(PARTITIONS), b"%d" % number
            full_since_s = world.now_s
            while not producer.send(partition, value):
                world.run_for(0.01)
                assert world.now_s < full_since_s + DRAIN_S, "buffer.memory stays full"
            if rng.random() < 0.3:
                world.run_for(rng.random() * 0.1)
        disturbances.end()
        producer.cut_rate = world.stall_rate = 0.0
        assert world.run(lambda: producer.core.accumulator.is_empty, DRAIN_S), "not everything drained"
        world.run_for(10.0)  # late requests arrive
        assert world.run(lambda: world.broker.is_up, DRAIN_S)
        assert producer.core.accumulator.used_bytes == 0
        assert producer.most_bytes <= producer.core.settings.buffer_memory
        _check_stored(producer, [_read(world, partition) for partition in range(PARTITIONS)])
        return world


def transactions(seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None) -> World:
    """Owners of one transactional id, each fenced by the next or by a timeout. Transactions are visible whole, once."""
    with simulated(seed, data) as world:
        on_start(world)
        rng = world.rng
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        disturbances, owners = Disturbances(world), list[TransactionalProcess]()
        for number in range(OWNERS):
            options = {"batch_size": rng.choice([150, 2_000]), "delivery_timeout_ms": rng.choice([1_500, 60_000])}
            owner = TransactionalProcess(
                world, "owner", f"p{number}", TRANSACTIONS, request_timeout_ms=1_000, **options
            )
            owner.cut_rate, world.stall_rate = rng.random() * 0.2, rng.random() * 0.03
            owners.append(owner)
            world.processes.append(owner)
            if number + 1 < OWNERS:
                world.run(lambda owner=owner: owner.is_over, rng.random() * 5.0)  # type: ignore[misc]
        disturbances.end()
        for owner in owners:
            owner.cut_rate = 0.0
        world.stall_rate = 0.0
        assert world.run(lambda: all(owner.is_over for owner in owners), DRAIN_S), "not every owner came to an end"
        world.run_for(60.0)  # transactions that were left open are aborted at their timeout
        check_visible(owners, committed_values(world))
        return world


def committed_values(world: World) -> list[list[bytes | None]]:
    """What a reader of committed records gets from each partition."""
    return [_read(world, partition, committed=True) for partition in range(PARTITIONS)]


def check_visible(owners: list[TransactionalProcess], visible: list[list[bytes | None]]) -> None:
    values = [value for partition in visible for value in partition]
    assert len(values) == len(set(values)), "a record is visible twice"
    seen = set(values)
    for owner in owners:
        missing = set(owner.committed) - seen
        assert not missing, f"committed, but not visible: {sorted(missing)}"
        assert not seen & set(owner.aborted), f"aborted, but visible: {sorted(seen & set(owner.aborted))}"
        shown = seen & set(owner.unknown)
        assert not shown or shown == set(owner.unknown), "a transaction is visible in part"
    assert seen <= {value for owner in owners for value in [*owner.committed, *owner.unknown]}, "visible, but not sent"


def _check_stored(producer: ProducerProcess, stored: list[list[bytes | None]]) -> None:
    for partition, values in enumerate(stored):
        assert len(values) == len(set(values)), f"partition {partition} has a record twice"
        mine = [(batch, index, value) for batch, index, to, value in producer.sent if to == partition]
        for batch, index, value in mine:
            assert batch.done, f"{batch} was forgotten"
            if batch.error is None:
                assert values[batch.base_offset + index : batch.base_offset + index + 1] == [value], (
                    f"{value!r} was acknowledged at offset {batch.base_offset + index} of partition {partition}"
                )
            else:
                is_doubtful = "it is unknown whether they were stored" in str(batch.error)
                assert isinstance(batch.error, DeliveryTimedOutError) or is_doubtful, repr(batch.error)
        order = [value for value in values if value in {each for _, _, each in mine}]
        assert order == [value for _, _, value in mine if value in set(values)], "not in the order of sending"


def read_rows(
    world: World, partition: int, committed: bool = False, offset: int = 0, topic: str = TOPIC
) -> list[tuple[int, bytes | None]]:
    """All records of a partition, or those of committed transactions, as a consumer gets them: offset and value."""
    return [(record.offset, record.value) for record in read_records(world, partition, committed, offset, topic)]


def read_records(
    world: World, partition: int, committed: bool = False, offset: int = 0, topic: str = TOPIC
) -> list[Record]:
    client, rows = WireClient(world), list[Record]()
    while True:
        part = _fetch(world, client, (topic, partition), offset, committed)
        assert part.error_code == 0
        data = part.records or b""
        if not len(data):
            return rows
        aborted = sorted((each.first_offset, each.producer_id) for each in part.aborted_transactions or ())
        rows += _visible(data, offset, aborted)
        offset = max(header.next_offset for _, header in iter_headers(data))


def _read(world: World, partition: int, committed: bool = False) -> list[bytes | None]:
    return [value for _, value in read_rows(world, partition, committed)]


def _fetch(world: World, client: WireClient, place: tuple[str, int], offset: int, committed: bool) -> PartitionData:
    topic, partition = place
    request = FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1 << 26,
        isolation_level=int(committed),
        topics=[FetchTopic(topic, partitions=[FetchPartition(partition, -1, offset, partition_max_bytes=1 << 26)])],
    )
    part: PartitionData = ask(world, client, FETCH, request, FETCH_VERSION).responses[0].partitions[0]
    return part


def ask(world: World, client: WireClient, api: Api[Any, Any], request: Any, version: int) -> Any:
    """The response, however often that takes."""
    while True:
        answers: list[Pending] = []
        if client.connect():
            client.send(api, request, version, 60.0, answers.append)
            assert world.run(lambda answers=answers: bool(answers), 100.0)  # type: ignore[misc]
            with contextlib.suppress(KafkaError):
                return answers[0].result()
        world.run_for(0.05)


def _visible(data: Buffer, offset: int, aborted: list[tuple[int, int]]) -> list[Record]:
    """Without control records, and without the transactions that the response names as aborted."""
    rows: list[Record] = []
    aborting: set[int] = set()  # producers whose batches are skipped, up to their marker
    for at, header in iter_headers(data):
        while aborted and aborted[0][0] <= header.base_offset:
            aborting.add(aborted.pop(0)[1])
        if header.is_control:
            aborting.discard(header.producer_id)
        elif header.producer_id not in aborting:
            found = decode_batch(data, at).records
            rows += [record for record in found if record.offset >= offset]
    return rows
