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
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Self

from semel.aio.cluster import AsyncCluster, LoopGuard
from semel.aio.connection import AsyncConnection
from semel.aio.sender import forgettable
from semel.client.consumer.base import ConsumerBase, Woken
from semel.client.errors import ConcurrentUseError
from semel.client.network import Background, Network, Reading
from semel.client.settings import ClientSettings, ConsumerSettings
from semel.client.types import ConsumerRecord
from semel.client.use_guard import guarded
from semel.client.waiting import Aside
from semel.client.wire import Pending
from semel.protocol.api import Api

# --- What the drivers of a consumer need, in an event loop: tasks instead of threads, a future instead of poll(2) ---


class AsyncNetwork(Network[AsyncConnection]):
    """Connections read and write by themselves, and watch the deadlines of their requests."""

    def __init__(self, settings: ClientSettings) -> None:
        self.guard = LoopGuard("AsyncConsumer")
        self.calls: AsyncCluster = AsyncCluster(settings, self.guard)
        self._wakeups = Wakeups()
        self.aside = Aside(self.spawn, self._wakeups.wake)
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self,
        connection: AsyncConnection,
        api: Api[Any, Any],
        request: Any,
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        may_be_large: bool = False,
    ) -> Pending:
        return connection.send(api, request, self._wakeups.done, version=version, timeout_s=timeout_s)

    def receive(self, connections: Iterable[AsyncConnection]) -> None: ...

    def next_deadline_s(self, connections: Iterable[AsyncConnection]) -> float:
        return float("inf")

    def notice_closing(self, connection: AsyncConnection) -> None: ...

    # --- waiting ---
    async def wait(
        self,
        connections: Iterable[AsyncConnection],
        until_s: float,
        reading: Reading[AsyncConnection] | None = None,
    ) -> None:
        await self._wakeups.wait(self.guard.loop, until_s, is_poll=reading is not None)

    async def give_way(self) -> None:
        """A program that finds records at every poll must not keep the loop from fetching more, and from heartbeats."""
        await asyncio.sleep(0)

    def wake(self) -> None:
        self.guard.call_soon(self._wakeups.wake)

    # --- work aside ---
    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self.guard.loop.create_task(work(), name="semel-aside")
        forgettable(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def background(self, name: str, work: Callable[[Background], Coroutine[Any, Any, None]]) -> Background:
        return BackgroundTask(self.guard.loop, name, work)

    # --- end ---
    def check_owner(self) -> None:
        self.guard.check()

    @property
    def is_over(self) -> bool:
        return self.guard.is_over

    def close(self) -> None:
        if not self.guard.is_over:
            for task in self._tasks:
                task.cancel()
        self.calls.close()


class Wakeups:
    """Who waits for the network. It holds no reference to the consumer, so that connections do not keep it alive."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_woken = False  # since the last wait of a poll

    def wake(self) -> None:
        self._is_woken = True
        for waiter in self._waiters:
            _fill(waiter)

    def done(self, _: Pending) -> None:
        self.wake()

    async def wait(self, loop: asyncio.AbstractEventLoop, until_s: float, is_poll: bool) -> None:
        """A turn of a poll may stand still in the program's listener: what came meanwhile ends its wait at once. Other
        turns do not."""
        if is_poll and self._is_woken:
            self._is_woken = False
            return
        woken: asyncio.Future[None] = loop.create_future()
        alarm = None
        if until_s != float("inf"):
            alarm = loop.call_later(max(0.0, until_s - time.monotonic()), _fill, woken)
        self._waiters.add(woken)
        try:
            await woken
        finally:
            self._waiters.discard(woken)
            if alarm is not None:
                alarm.cancel()
            if is_poll:
                self._is_woken = False


class BackgroundTask:
    """Work in a task of its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, name: str, work: Callable[[Background], Coroutine[Any, Any, None]]
    ) -> None:
        self._stopped = asyncio.Event()
        self._task = loop.create_task(work(self), name=name)
        forgettable(self._task)

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    async def pause(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, timeout_s: float) -> None:
        self._stopped.set()
        self._task.cancel()
        await asyncio.wait([self._task], timeout=timeout_s)


def _fill(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# --- One task at a time in what belongs to one: a poll, and what changes the partitions that it reads ---


class _Use:
    """A task that is inside, with the tasks that it started there (`asyncio.wait_for` starts one)."""

    __slots__ = ("depth", "description")

    def __init__(self, description: str) -> None:
        self.description = description
        self.depth = 0


_uses: ContextVar[tuple[_Use, ...]] = ContextVar("semel_uses", default=())


class TaskGuard:
    """Lets one task in, which may come in again (from a listener), and refuses others instead of making them wait."""

    def __init__(self, what: str, loops: LoopGuard) -> None:
        self._what = what
        self._loops = loops
        self._use: _Use | None = None

    def enter(self, call: str) -> None:
        self._loops.check()
        use = self._use
        if use is None:
            use = self._use = _Use(_in_task(call))
            _uses.set((*_uses.get(), use))
        elif use not in _uses.get():
            raise ConcurrentUseError(
                f"{_in_task(call)} while another one is in this {self._what}: {use.description}. One task at a time "
                f"may poll, assign, subscribe or close it: make one {self._what} per task, or call wakeup() first"
            )
        use.depth += 1

    def leave(self) -> None:
        use = self._use
        assert use is not None
        use.depth -= 1
        if not use.depth:
            self._use = None
            _uses.set(tuple(each for each in _uses.get() if each is not use))


def _in_task(call: str) -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return f"{call}() in task {task.get_name()!r}" if task is not None else f"{call}() outside of tasks"


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
    settled_ends = ConsumerBase._settled_ends
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
