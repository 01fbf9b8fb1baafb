"""The consumer for asyncio: rows with `poll` or `async for`, Arrow tables with `poll_table`, alone or in a group.

    async with AsyncConsumer(bootstrap_servers="localhost:9092", group_id="billing") as consumer:
        consumer.subscribe(["orders"])
        async for record in consumer:
            print(record.topic, record.partition, record.offset, record.key, record.value)

It is `semel.Consumer` in an event loop: what may wait is awaited, and heartbeats go on while the loop runs. One task at
a time may poll it; other tasks of the same loop may commit, seek, pause and look offsets up meanwhile. A cancelled call
leaves the consumer usable: no record is lost, and none is returned twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Self

from semel.aio.connection import AsyncConnection
from semel.aio.network import AsyncNetwork
from semel.aio.task_guard import TaskGuard
from semel.client.consumer.base import ConsumerBase, Woken
from semel.client.settings import ConsumerSettings
from semel.client.types import ConsumerRecord
from semel.client.use_guard import guarded


class AsyncConsumer(ConsumerBase[AsyncConnection]):
    """Reads records in an event loop. `RebalanceListener` methods may be coroutines, which are awaited."""

    _HARMLESS = (*ConsumerBase._HARMLESS, asyncio.CancelledError)

    def __init__(
        self,
        options: Mapping[str, Any] | ConsumerSettings | None = None,
        /,
        *,
        key_deserializer: Any = None,
        value_deserializer: Any = None,
        **keywords: Any,
    ) -> None:
        """Options and deserializers as for `semel.Consumer`."""
        super().__init__(options, key_deserializer, value_deserializer, keywords, AsyncNetwork)
        network = self._engine.network
        assert isinstance(network, AsyncNetwork)
        self._guard = TaskGuard("consumer", network.guard)
        network.calls.close_with(self)

    _poll = guarded("_poll", ConsumerBase._poll)
    poll = ConsumerBase._poll_records
    poll_table = ConsumerBase._poll_table
    subscribe = guarded("subscribe", ConsumerBase.subscribe)
    assign = guarded("assign", ConsumerBase.assign)
    unsubscribe = guarded("unsubscribe", ConsumerBase._unsubscribe)
    position = guarded("position", ConsumerBase._position)
    lag = guarded("lag", ConsumerBase._lag)
    beginning_offsets = ConsumerBase._beginning_offsets
    end_offsets = ConsumerBase._end_offsets
    offsets_for_times = ConsumerBase._offsets_for_times
    partitions_for = ConsumerBase._partitions_for
    topic_ids = ConsumerBase._topic_ids
    commit = ConsumerBase._commit
    committed = ConsumerBase._committed
    _close_in_turn = guarded("close", ConsumerBase._close)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Commits (with enable.auto.commit), gives partitions back, leaves the group, closes. May be called twice.

        All of that takes no longer than the timeout (5 s); what a broker did not confirm by then is left undone. If it
        is cancelled, the rest is left undone, too."""
        await (self._close(timeout_ms) if self._engine.network.is_over else self._close_in_turn(timeout_ms))

    def __aiter__(self) -> AsyncIterator[ConsumerRecord]:
        """All records from here on, waiting for more; ends when the consumer is closed or woken.

        A record counts as processed when the loop continues: automatic commits leave out the record at which
        an exception, a cancellation or `break` left the loop, and all that were not yielded. The next poll returns the
        latter."""
        return _Records(self)

    async def __aenter__(self) -> Self:
        self._engine.check_usable()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __getstate__(self) -> object:
        raise TypeError("an AsyncConsumer cannot be pickled; send its `settings` and make one in each process")


class _Records(AsyncIterator[ConsumerRecord]):
    """What `async for` goes through. Not a generator: the event loop would close that in a task of its own after a
    `break`, and warn where it ends first."""

    def __init__(self, consumer: AsyncConsumer) -> None:
        self._consumer = consumer
        self._iteration: Iterator[ConsumerRecord] = iter(())

    async def __anext__(self) -> ConsumerRecord:
        while True:
            for record in self._iteration:
                return record
            if self._consumer._engine.closed:
                raise StopAsyncIteration
            try:
                self._iteration = iter(await self._consumer._next_iteration())
            except Woken:
                raise StopAsyncIteration from None
