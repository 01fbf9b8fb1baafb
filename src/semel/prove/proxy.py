"""A TCP proxy in front of a cluster that knows which API a frame belongs to, so that "the response to EndTxn is lost"
can be requested.

    with Proxy("localhost:9092") as proxy:
        rule = proxy.add(Rule("EndTxn", Effect.DROP_RESPONSE))
        ...                                       # a client with bootstrap.servers = proxy.bootstrap
        rule.assert_fired()

Clients stay behind the proxy: broker addresses in responses are replaced by addresses of its own, one for each broker.
It runs on a thread with an asyncio loop. Plain connections only: TLS hides the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from semel.protocol.api import NAMES, Api
from semel.protocol.messages.cluster import DESCRIBE_CLUSTER, FIND_COORDINATOR, METADATA

_START = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_SIZE = struct.Struct(">i")

LOCALHOST = "127.0.0.1"
API_KEYS = {name: key for key, name in NAMES.items()}


class Effect(Enum):
    PASS = "nothing happens to it"
    DROP_REQUEST = "the request is lost and the connection cut"
    DROP_RESPONSE = "the broker gets the request, its response is lost and the connection cut"
    TRUNCATE_REQUEST = "half of the request reaches the broker, then the connection is cut"
    TRUNCATE_RESPONSE = "half of the response reaches the client, then the connection is cut"
    DELAY_REQUEST = "the request, and what follows it, is held back"
    DELAY_RESPONSE = "the response, and what follows it, is held back"
    DUPLICATE_REQUEST = "the broker gets the request twice; the client gets the second response"
    DUPLICATE_RESPONSE = "the client gets the response twice"
    SILENCE_RESPONSE = "the response never comes, the connection stays"


class Rule:
    """Something that happens to the n-th next request of an API, and to those after it, `times` in all."""

    def __init__(
        self,
        api: str | Api[Any, Any],
        effect: Effect,
        *,
        nth: int = 1,
        times: int = 1,
        delay_ms: int = 0,
        client: str = "",
        on_request: bool | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        name = NAMES[api.key] if isinstance(api, Api) else api
        if name not in API_KEYS:
            raise ValueError(f"there is no API {name!r}; the APIs are {', '.join(sorted(API_KEYS))}")
        self.api, self.api_key = name, API_KEYS[name]
        self.effect = effect
        self.delay_s = delay_ms / 1000
        self.client = client  # whose requests: a part of the client id
        self.on_request = effect.name.endswith("_REQUEST") if on_request is None else on_request
        self.then = then  # called when it fires, on a thread of the proxy's, before anybody can notice
        self.fired = threading.Event()
        self.hits = 0  # requests that it was for
        self._before, self._times = nth - 1, times

    @property
    def exhausted(self) -> bool:
        return self.hits >= self._times

    def takes(self, api_key: int, client_id: str) -> bool:
        """Whether it is for this request; counts it. The proxy's lock is held."""
        if api_key != self.api_key or self.client not in client_id or self.exhausted:
            return False
        if self._before:
            self._before -= 1
            return False
        self.hits += 1
        return True

    async def fire(self) -> None:
        if self.then is not None:
            await asyncio.to_thread(self.then)
        self.fired.set()

    def assert_fired(self, times: int = 1) -> None:
        assert self.hits >= times, f"not exercised: {self.api}, {self.effect.value} (fired {self.hits} of {times})"


class Address(NamedTuple):
    host: str
    port: int


def _address(text: str) -> Address:
    host, _, port = text.strip().rpartition(":")
    return Address(host, int(port))


class Proxy:
    """Listens on ports of its own, one for each broker in the metadata."""

    def __init__(self, brokers: str) -> None:
        self._given = [_address(each) for each in brokers.split(",")]
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._servers: dict[Address, asyncio.Server] = {}
        self._ports: dict[Address, int] = {}
        self.links: set[_Link] = set()
        self._refused: set[Address] = set()
        self.seen: Counter[int] = Counter()  # requests by API key
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.bootstrap = ",".join(f"{LOCALHOST}:{self._run(self.port_for(*each))}" for each in self._given)

    def add(self, rule: Rule) -> Rule:
        with self._lock:
            self._rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        with self._lock:
            if rule in self._rules:
                self._rules.remove(rule)

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def cut_all(self, broker: str = "") -> int:
        """Cuts every connection, or those to one broker; how many there were."""

        async def cut() -> int:
            links = [link for link in self.links if not broker or link.broker == _address(broker)]
            for link in links:
                link.cut()
            return len(links)

        return self._run(cut())

    def refuse(self, broker: str = "") -> None:
        """As a network that is down, to one broker or to all that are known: every connection is cut, and no new one
        gets through until `admit`."""
        self._refused |= {_address(broker)} if broker else set(self._ports)
        self.cut_all(broker)

    def admit(self) -> None:
        self._refused.clear()

    def close(self) -> None:
        async def stop() -> None:
            for server in self._servers.values():
                server.close()
            for link in list(self.links):
                link.cut()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                _, late = await asyncio.wait(others, timeout=1)
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
            self._loop.call_soon(self._loop.stop)

        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(stop(), self._loop)
            self._thread.join(10)
            self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for its links, on the loop ---
    async def port_for(self, host: str, port: int) -> int:
        """Where clients reach a broker through the proxy."""
        broker = Address(host, port)
        if broker not in self._ports:
            self._ports[broker] = 0  # two responses at once must not open two
            server = await asyncio.start_server(lambda r, w: self._accept(broker, r, w), LOCALHOST, 0, limit=1 << 20)
            self._servers[broker] = server
            self._ports[broker] = server.sockets[0].getsockname()[1]
        while not self._ports[broker]:
            await asyncio.sleep(0.001)
        return self._ports[broker]

    def rule_for(self, api_key: int, client_id: str) -> Rule | None:
        with self._lock:
            self.seen[api_key] += 1
            rule = next((rule for rule in self._rules if rule.takes(api_key, client_id)), None)
            if rule is not None and rule.exhausted:
                self._rules.remove(rule)
            return rule

    async def _accept(self, broker: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if broker in self._refused:
            writer.close()
            return
        try:
            upstream = await asyncio.wait_for(asyncio.open_connection(*broker, limit=1 << 20), 5)
        except (TimeoutError, OSError):
            writer.close()
            return
        link = _Link(self, broker, (reader, writer), upstream)
        self.links.add(link)
        with contextlib.suppress(asyncio.CancelledError):  # when the proxy closes
            await link.run()

    def _run(self, work: Coroutine[Any, Any, int]) -> int:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class _Pending:
    api_key: int
    version: int
    rule: Rule | None
    swallow: int  # responses that the client must not get


class _Link:
    """One client's connection, and the one to the broker behind it."""

    def __init__(self, proxy: Proxy, broker: Address, client: Streams, upstream: Streams) -> None:
        self._proxy = proxy
        self.broker = broker
        self._client_in, self._client_out = client
        self._broker_in, self._broker_out = upstream
        self._pending: dict[int, _Pending] = {}

    async def run(self) -> None:
        pumps = [asyncio.ensure_future(self._until_cut(pump)) for pump in (self._requests, self._responses)]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.cut()
            for pump in pumps:
                pump.cancel()

    async def _until_cut(self, pump: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await pump()

    def cut(self) -> None:
        for writer in (self._client_out, self._broker_out):
            with contextlib.suppress(OSError, RuntimeError):
                writer.transport.abort()
        self._proxy.links.discard(self)

    async def _requests(self) -> None:
        while True:
            frame = await _frame(self._client_in)
            api_key, version, correlation_id, length = _START.unpack_from(frame, 4)
            client_id = frame[14 : 14 + max(length, 0)].decode(errors="replace")
            rule = self._proxy.rule_for(api_key, client_id)
            copies = 1
            if rule is not None and rule.on_request:
                if not await self._disturb_request(rule, frame):
                    return
                copies = 2 if rule.effect is Effect.DUPLICATE_REQUEST else 1
                rule = None
            self._pending[correlation_id] = _Pending(api_key, version, rule, copies - 1)
            self._broker_out.write(frame * copies)
            await self._broker_out.drain()

    async def _disturb_request(self, rule: Rule, frame: bytes) -> bool:
        """Whether the request still goes on."""
        await rule.fire()
        if rule.effect is Effect.DELAY_REQUEST:
            await asyncio.sleep(rule.delay_s)
        elif rule.effect is Effect.TRUNCATE_REQUEST:
            self._broker_out.write(frame[: len(frame) // 2])
            await self._broker_out.drain()
            self._broker_out.close()  # after what was written, not at once
        return rule.effect not in (Effect.DROP_REQUEST, Effect.TRUNCATE_REQUEST)

    async def _responses(self) -> None:
        while True:
            frame = await _frame(self._broker_in)
            (correlation_id,) = _SIZE.unpack_from(frame, 4)
            pending = self._pending.get(correlation_id)
            if pending is None:
                return  # a response to nothing: the stream is out of step
            if pending.swallow:
                pending.swallow -= 1
                continue
            del self._pending[correlation_id]
            if not await self._respond(pending, await self._rewritten(pending, frame)):
                return

    async def _respond(self, pending: _Pending, frame: bytes) -> bool:
        """Whether the connection lives on."""
        rule = pending.rule
        effect = rule.effect if rule is not None else Effect.PASS
        if rule is not None:
            await rule.fire()
            if effect is Effect.SILENCE_RESPONSE:
                return True
            if effect is Effect.DROP_RESPONSE:
                return False
            if effect is Effect.DELAY_RESPONSE:
                await asyncio.sleep(rule.delay_s)
        if effect is Effect.TRUNCATE_RESPONSE:
            frame = frame[: max(5, len(frame) // 2)]
        self._client_out.write(frame * 2 if effect is Effect.DUPLICATE_RESPONSE else frame)
        await self._client_out.drain()
        if effect is Effect.TRUNCATE_RESPONSE:
            self._client_out.close()
            await asyncio.sleep(0.01)  # what was written goes out before the cut
        return effect is not Effect.TRUNCATE_RESPONSE

    async def _rewritten(self, pending: _Pending, frame: bytes) -> bytes:
        """The proxy's own addresses in place of the brokers'."""
        api = _ADDRESSES.get(pending.api_key)
        if api is None:
            return frame
        correlation_id, response = api.read_response(frame[4:], pending.version)
        for place in _places(pending.api_key, pending.version, response):
            if place.port > 0:
                place.port = await self._proxy.port_for(place.host, place.port)
                place.host = LOCALHOST
        return b"".join(api.frame_response(response, pending.version, correlation_id))


_ADDRESSES: dict[int, Any] = {api.key: api for api in (METADATA, FIND_COORDINATOR, DESCRIBE_CLUSTER)}


def _places(api_key: int, version: int, response: Any) -> list[Any]:
    """The parts of a response with a host and a port."""
    if api_key == FIND_COORDINATOR.key:
        return list(response.coordinators) if version >= 4 else [response]
    return list(response.brokers)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """A frame with its size."""
    head = await reader.readexactly(4)
    return head + await reader.readexactly(_SIZE.unpack(head)[0])
