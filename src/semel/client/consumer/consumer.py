"""The consumer: rows with `poll`, Arrow tables with `poll_table`, alone or in a group.

    with Consumer(bootstrap_servers="localhost:9092", group_id="billing", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["orders"])
        while True:
            for record in consumer.poll(timeout_ms=1000):
                print(record.topic, record.partition, record.offset, record.key, record.value)

Names follow Kafka's consumer; times are milliseconds. A consumer belongs to one thread; only `wakeup` may be called
from another. It reads committed records only, unless isolation.level says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from semel.client.connection import BrokerConnection
from semel.client.consumer.base import ConsumerBase, Woken
from semel.client.immediate import blocked, run
from semel.client.network import BlockingNetwork
from semel.client.settings import ConsumerSettings
from semel.client.types import ConsumerRecord
from semel.client.use_guard import UseGuard, one_user_at_a_time


@one_user_at_a_time("_poll", but=("wakeup", "metrics", "end_calls"))
class Consumer(ConsumerBase[BrokerConnection]):
    """Reads records, in the thread that calls it."""

    def __init__(
        self,
        options: Mapping[str, Any] | ConsumerSettings | None = None,
        /,
        *,
        key_deserializer: Any = None,
        value_deserializer: Any = None,
        **keywords: Any,
    ) -> None:
        """Options by Kafka's names: `{"group.id": "billing"}` or `group_id="billing"`. The deserializers are functions
        of the bytes of a key or value that is not None; `poll` and iteration apply them, tables hold bytes."""
        super().__init__(options, key_deserializer, value_deserializer, keywords, BlockingNetwork)
        self._guard = UseGuard("consumer", "wakeup() and metrics()")

    poll = blocked(ConsumerBase._poll_records)
    poll_table = blocked(ConsumerBase._poll_table)
    unsubscribe = blocked(ConsumerBase._unsubscribe)
    position = blocked(ConsumerBase._position)
    lag = blocked(ConsumerBase._lag)
    beginning_offsets = blocked(ConsumerBase._beginning_offsets)
    end_offsets = blocked(ConsumerBase._end_offsets)
    settled_ends = blocked(ConsumerBase._settled_ends)
    offsets_for_times = blocked(ConsumerBase._offsets_for_times)
    partitions_for = blocked(ConsumerBase._partitions_for)
    topic_ids = blocked(ConsumerBase._topic_ids)
    commit = blocked(ConsumerBase._commit)
    committed = blocked(ConsumerBase._committed)
    close = blocked(ConsumerBase._close)

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """All records from here on, waiting for more; ends when the consumer is closed or woken.

        A record counts as processed when the loop continues: automatic commits leave out the record at which
        an exception or `break` left the loop, and all that were not yielded. The next poll returns the latter.
        """
        while not self._engine.closed:
            try:
                iteration = run(self._next_iteration())
            except Woken:
                return
            yield from iteration

    def end_calls(self) -> None:
        """Calls that wait for a broker, and those that follow, raise `ClosedError`. Any thread may call it; the
        one that uses the consumer closes it."""
        network = self._engine.network
        assert isinstance(network, BlockingNetwork)
        network.calls.close()
        network.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
