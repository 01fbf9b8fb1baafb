"""A failed fsync of a coordinator's log, on real files: the log heals itself, and so does what it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.groups import Committer, GroupCoordinator, OffsetToCommit
from semel.broker.settings import Settings
from semel.broker.transactions.coordinator import TransactionCoordinator
from semel.broker.transactions.handlers import init_producer_id
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.transactions import InitProducerIdRequest
from semel.protocol.rows import Record, encode_batch
from semel.storage.files import DiskFiles
from tests.support.waiting import PATIENCE_S

ID = "orders"


class FailingDisk(DiskFiles):
    """Fails the next syncs of the partitions of a topic."""

    def __init__(self) -> None:
        self.topic = "__transaction_state"
        self.failures_due = 0
        self.failed: list[str] = []

    def sync_file(self, fd: int, path: str) -> None:
        if self.failures_due and f"/{self.topic}-" in path:
            self.failures_due -= 1
            self.failed.append(path)
            raise OSError(5, "Input/output error")
        super().sync_file(fd, path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    made = FailingDisk()
    monkeypatch.setattr("semel.storage.data_dir.files_for", lambda _: made)
    monkeypatch.setattr("semel.broker.transactions.coordinator.RETRY_S", 0.05)
    monkeypatch.setattr("semel.broker.coordinator_runtime.RETRY_S", 0.05)
    return made


def with_broker(folder: Path, body: Callable[[BrokerNode, TransactionCoordinator], Awaitable[None]]) -> None:
    async def run() -> None:
        counts = {"transaction.state.log.num.partitions": "1", "offsets.topic.num.partitions": "1"}
        broker = BrokerNode(Settings(counts), folder)
        await broker.start()
        try:
            await body(broker, broker.transactions)
        finally:
            await broker.stop()

    asyncio.run(asyncio.wait_for(run(), 4 * PATIENCE_S))


async def until(ask: Callable[[], Awaitable[E]], expected: E) -> None:
    """What a client does: it sends the request again while the error is retriable."""
    while (error := await ask()) is not expected:
        assert error in (E.CONCURRENT_TRANSACTIONS, E.NOT_COORDINATOR), error
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("failures", [1, 4])
@pytest.mark.parametrize("commit", [True, False])
def test_an_end_whose_fsync_failed_can_be_sent_again(
    tmp_path: Path, disk: FailingDisk, failures: int, commit: bool
) -> None:
    async def body(broker: BrokerNode, coordinator: TransactionCoordinator) -> None:
        log = broker.topics.create("t", 1).partitions[0].log
        owner = await coordinator.init(ID, 60_000, None)
        who = (owner.producer_id, owner.epoch)
        assert await coordinator.add(ID, *who, [("t", 0)]) is E.NONE
        guard = log.start_verification(*who, 0, supports_epoch_bump=False)
        record = [Record(0, 1, None, b"v")]
        data = encode_batch(record, producer_id=who[0], producer_epoch=who[1], base_sequence=0, transactional=True)
        log.append(data, now_ms=broker.clock.now_ms(), guard=guard)
        disk.failures_due = failures

        async def end() -> E:
            return (await coordinator.end(ID, *who, commit=commit, is_v2=True)).error

        assert await end() is E.NOT_COORDINATOR
        assert disk.failed, "the fault did not fire"
        await until(end, E.NONE)
        assert len(disk.failed) == failures
        while log.last_stable_offset < 2:
            await asyncio.sleep(0.01)
        assert len(log.opened.segments.aborted_in(0, 2)) == (not commit)

    with_broker(tmp_path, body)

    async def after_restart(broker: BrokerNode, coordinator: TransactionCoordinator) -> None:
        async def init() -> E:
            return (await coordinator.init(ID, 60_000, None)).error

        await until(init, E.NONE)

    with_broker(tmp_path, after_restart)


def test_many_ids_whose_fsync_failed_together_are_all_usable_again(tmp_path: Path, disk: FailingDisk) -> None:
    async def body(broker: BrokerNode, coordinator: TransactionCoordinator) -> None:
        broker.topics.create("t", 1)
        await coordinator.init("first", 60_000, None)
        disk.failures_due = 1
        ids = [f"id{number}" for number in range(50)]
        owners = await asyncio.gather(*(coordinator.init(id_, 60_000, None) for id_ in ids))
        assert disk.failed, "the fault did not fire"
        assert {owner.error for owner in owners} == {E.NOT_COORDINATOR}
        assert (await coordinator.init("first", 60_000, None)).error is E.NONE
        for id_ in ids:

            async def init(id_: str = id_) -> E:
                return (await coordinator.init(id_, 60_000, None)).error

            await until(init, E.NONE)

    with_broker(tmp_path, body)


def test_a_store_that_cannot_be_written_refuses_producer_ids_until_it_can(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(broker: BrokerNode, coordinator: TransactionCoordinator) -> None:
        fired = []

        def full(*_: object) -> None:
            fired.append(1)
            raise OSError(28, "No space left on device")

        context = RequestContext(22, 5, "c", "localhost", None)

        async def ask(transactional_id: str | None) -> tuple[E, int]:
            request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=60_000)
            answer = await init_producer_id(broker, context, request)
            return E(answer.error_code), answer.producer_id

        with monkeypatch.context() as patch:
            patch.setattr("semel.broker.store.write_fully", full)
            assert await ask(None) == (E.COORDINATOR_LOAD_IN_PROGRESS, -1)
            assert await ask(ID) == (E.COORDINATOR_LOAD_IN_PROGRESS, -1)
        assert len(fired) == 2, "the fault did not fire"
        assert await ask(None) == (E.NONE, 0)
        assert await ask(ID) == (E.NONE, 1)

    with_broker(tmp_path, body)


@pytest.mark.parametrize("moment", ["commit", "transactional commit", "marker"])
def test_offsets_whose_fsync_failed_can_be_committed_again(tmp_path: Path, disk: FailingDisk, moment: str) -> None:
    async def body(broker: BrokerNode, coordinator: TransactionCoordinator) -> None:
        disk.topic = "__consumer_offsets"
        broker.topics.create("t", 1)
        groups: GroupCoordinator = broker.groups  # type: ignore[assignment]

        async def commit_again() -> E:
            return (await groups.commits.commit("g", Committer(), [OffsetToCommit("t", 0, 2)])).code

        assert await groups.commits.commit("g", Committer(), [OffsetToCommit("t", 0, 1)]) == (1, E.NONE)
        owner = await coordinator.init(ID, 60_000, None)
        who = (owner.producer_id, owner.epoch)
        disk.failures_due = moment == "commit"
        await until(commit_again, E.NONE)
        assert offset_of(groups) == 2
        assert await coordinator.add(ID, *who, [("__consumer_offsets", 0)]) is E.NONE
        disk.failures_due = moment == "transactional commit"

        async def commit_in_transaction() -> E:
            outcome = await groups.commits.commit("g", Committer(), [OffsetToCommit("t", 0, 3)], producer=who)
            return outcome.code

        await until(commit_in_transaction, E.NONE)
        assert offset_of(groups) == 2
        disk.failures_due = moment == "marker"
        assert (await coordinator.end(ID, *who, commit=True, is_v2=True)).error is E.NONE
        while groups.commits.is_pending("g", "t", 0):
            await asyncio.sleep(0.01)
        assert offset_of(groups) == 3
        assert len(disk.failed) == 1, "the fault did not fire"

    with_broker(tmp_path, body)

    async def after_restart(broker: BrokerNode, coordinator: TransactionCoordinator) -> None:
        assert offset_of(broker.groups) == 3  # type: ignore[arg-type]

    with_broker(tmp_path, after_restart)


def offset_of(groups: GroupCoordinator) -> int:
    found = groups.commits.committed("g", "t", 0)
    assert found is not None
    return found.offset
