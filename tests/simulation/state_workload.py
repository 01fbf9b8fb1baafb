"""Instances of `semel.process` that count, with state, in a simulated world.

Each output says of which input it was made and how many of the same key there were in its partition up to it. A count
that is wrong shows state that was lost, doubled or of an aborted unit of work. The changelog is checked at the end.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from semel.patterns import state
from semel.patterns.process_output import Output
from semel.patterns.state import KeyedState, StateError, StateStore
from tests.simulation.operating_system import ClientProcess, current_process
from tests.simulation.processing_workload import SINK, SINK_PARTITIONS, TIMEOUTS, Instances, processing
from tests.simulation.workloads import read_rows
from tests.simulation.world import PARTITIONS, World

KEYS = 3
STORE = "counts"


def _key(offset: int) -> bytes:
    return b"k%d" % (offset % KEYS)


class Counting(Instances):
    """Some keep their state in a directory; an instance that is started again finds what the one before left there."""

    # State is restored by a listener, within a poll.
    timeouts: ClassVar = {call: limit for call, limit in TIMEOUTS.items() if call[1] not in ("poll", "poll_table")}
    directory: Path

    def _state(self, instance: str) -> KeyedState:
        directory = self.directory / instance if self._directory_is_kept(instance) else None
        return KeyedState(STORE, format="int64", directory=directory)

    def _directory_is_kept(self, instance: str) -> bool:
        return instance != "i1"

    def _function(self, process: ClientProcess) -> Callable[..., Any]:
        def count(record: Any, state: Any) -> Output:
            self._work(process)
            key = _key(record.offset)
            total = state.get(key, 0) + 1
            state.put(key, total)
            assert state.get(key) == total
            value = b"%d:%d:%d" % (record.partition, record.offset, total)
            return Output(value, partition=record.partition % SINK_PARTITIONS)

        def count_table(table: Any, state: Any) -> Any:
            self._work(process)
            places = list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
            keys = sorted({_key(offset) for _, offset in places})
            totals = dict(zip(keys, state.get_many(keys).fill_null(0).to_pylist(), strict=True))
            values = []
            for partition, offset in places:
                totals[_key(offset)] += 1
                values.append(b"%d:%d:%d" % (partition, offset, totals[_key(offset)]))
            state.put_many(list(totals), list(totals.values()))
            targets = [partition % SINK_PARTITIONS for partition, _ in places]
            return table.from_pydict({"value": values, "to_partition": targets})

        return count_table if self._options["tables"] else count

    def _ended(self, process: ClientProcess, instance: str) -> None:
        assert not isinstance(process.error, StateError), f"{process.name} ended: {process.error!r}"
        super()._ended(process, instance)


@contextlib.contextmanager
def files_of_the_killed(max_unwritten: int) -> Iterator[None]:
    """A process that was killed writes nothing any more; `finally` runs in these, as it does not in real ones."""
    write = StateStore.write

    def write_if_alive(store: StateStore) -> None:
        if not current_process().is_over:
            write(store)

    with (
        mock.patch.object(StateStore, "write", write_if_alive),
        mock.patch.object(state, "MAX_UNWRITTEN", max_unwritten),
    ):
        yield


def counting(seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None, **options: Any) -> World:
    """Instances that count, every fault. AssertionError: state and output do not belong together."""

    class Counters(Counting):
        directory = data.with_name(f"{data.name}.state")  # `data` belongs to the broker

    with files_of_the_killed(random.Random(seed).choice([0, 2, 50_000])):
        return processing(seed, data, on_start, guarantee="exactly_once", of=Counters, check=_check, **options)


def _check(world: World) -> None:
    """Every count is that of a replay of the input, and the changelog has the last ones."""
    counts: dict[int, dict[int, int]] = {partition: {} for partition in range(PARTITIONS)}
    for number in range(SINK_PARTITIONS):
        for _, value in read_rows(world, number, committed=True, topic=SINK):
            assert value is not None
            partition, offset, count = map(int, value.split(b":"))
            counts[partition][offset] = count
    for partition, of_partition in counts.items():
        replayed: Counter[bytes] = Counter()
        for offset in sorted(of_partition):
            replayed[_key(offset)] += 1
            found = of_partition[offset]
            assert found == replayed[_key(offset)], (
                f"input {(partition, offset)} is number {replayed[_key(offset)]} of its key, the state said {found}"
            )
