"""A broker in this process that measures for how long its event loop does not look at its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import selectors
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from semel.broker.broker import BrokerNode
from semel.broker.connection import Server
from semel.broker.runner import Maintenance, bind
from semel.broker.settings import Settings
from tests.support.waiting import PATIENCE_S


class MeasuringSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Keeps the longest stretch between two looks at the sockets, in CPU time of the loop's thread: other programs on
    the machine, and other threads of this one, do not make it longer."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._since_s: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        now_s = time.thread_time()
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, now_s - self._since_s)
        found = super().select(timeout)
        self._since_s = time.thread_time()
        return found


class MeasuredBroker:
    """The broker, served from a thread."""

    def __init__(self, data: Path, **settings: object) -> None:
        self._settings = Settings({"fsync": "os", **settings})
        self._data = data
        self._selector = MeasuringSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._is_ready = threading.Event()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="broker")
        self.bootstrap = ""
        self.broker: BrokerNode

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        sock = bind("127.0.0.1", 0, 16)
        self.broker = BrokerNode(self._settings, self._data)
        await self.broker.start()
        server = Server(self.broker)
        self._maintenance = Maintenance(self.broker, server)
        await server.listen(sock)
        self.bootstrap = f"127.0.0.1:{sock.getsockname()[1]}"
        self._is_ready.set()
        await self._stopping.wait()
        await server.stop()
        await self.broker.stop()

    def longest_stretch_s(self) -> float:
        """The longest stretch since the last call. Whatever ran before this call has been counted."""
        longest_s = 0.0

        async def take() -> None:
            nonlocal longest_s
            await asyncio.sleep(0)
            longest_s, self._selector.longest_s = self._selector.longest_s, 0.0

        asyncio.run_coroutine_threadsafe(take(), self._loop).result(PATIENCE_S)
        return longest_s

    def keep_up_storage(self) -> None:
        """One round of the background work on the data folder, now."""
        asyncio.run_coroutine_threadsafe(self._maintenance.keep_up_storage(), self._loop).result(PATIENCE_S)

    def __enter__(self) -> MeasuredBroker:
        self._thread.start()
        assert self._is_ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def no_garbage_collector() -> Iterator[None]:
    """Without the pauses of the garbage collector, which come at any time and depend on what other tests left."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
