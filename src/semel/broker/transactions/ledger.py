"""All transactional ids of the broker: busy ones as objects, idle ones as a few bytes each.

A million one-time ids is a day's work of some pipelines. An id that nothing happens to is its name and 42 packed bytes;
only while a transaction runs, or a transition is being journaled, there is an object for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from semel.broker.transactions.records import pack, unpack, updated_ms_of
from semel.broker.transactions.states import IDLE, Transaction


class Entry:
    """A busy id: its value, and the transition that it waits for."""

    __slots__ = ("_settled", "id", "is_pending", "txn")

    def __init__(self, transactional_id: str, txn: Transaction) -> None:
        self.id = transactional_id
        self.txn = txn
        self.is_pending = False
        self._settled: asyncio.Future[None] | None = None

    def settled(self) -> asyncio.Future[None]:
        """Done when the transition that is pending now is over."""
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        return self._settled

    def release(self) -> None:
        self.is_pending = False
        if self._settled is not None:
            self._settled.set_result(None)
            self._settled = None


class Ledger:
    """What the journal says about every id."""

    def __init__(self) -> None:
        self._busy: dict[str, Entry] = {}
        self._idle: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    def busy(self) -> list[Entry]:
        return list(self._busy.values())

    def find(self, transactional_id: str) -> Transaction | None:
        """The value of an id, to look at."""
        entry = self._busy.get(transactional_id)
        if entry is not None:
            return entry.txn
        packed = self._idle.get(transactional_id)
        return unpack(packed) if packed is not None else None

    def entry(self, transactional_id: str) -> Entry | None:
        """The id as an object, to ask for a decision. An idle one is not kept as such: see `hold`."""
        entry = self._busy.get(transactional_id)
        if entry is None:
            packed = self._idle.get(transactional_id)
            if packed is not None:
                entry = Entry(transactional_id, unpack(packed))
        return entry

    def hold(self, entry: Entry) -> None:
        """A transition starts: until `settle` the id is pending, for everybody who asks."""
        entry.is_pending = True
        self._idle.pop(entry.id, None)
        self._busy[entry.id] = entry

    def settle(self, entry: Entry) -> None:
        """The transition is over, the entry has its new value."""
        if entry.txn.state in IDLE:
            del self._busy[entry.id]
            self._idle[entry.id] = pack(entry.txn)
        entry.release()

    def forget(self, entry: Entry) -> None:
        """The id is gone: expired, or its first transition was never written."""
        self._busy.pop(entry.id, None)
        self._idle.pop(entry.id, None)
        entry.release()

    def load(self, transactional_id: str, txn: Transaction | None) -> None:
        """A record of the journal, in its order; None is a tombstone."""
        self._busy.pop(transactional_id, None)
        self._idle.pop(transactional_id, None)
        if txn is None:
            return
        if txn.state in IDLE:
            self._idle[transactional_id] = pack(txn)
        else:
            self._busy[transactional_id] = Entry(transactional_id, txn)

    def items(self) -> Iterator[tuple[str, Transaction]]:
        for transactional_id, entry in list(self._busy.items()):
            yield transactional_id, entry.txn
        for transactional_id, packed in list(self._idle.items()):
            yield transactional_id, unpack(packed)

    def unused_since(self, limit_ms: int) -> Iterator[str]:
        """Idle ids whose last use is this long ago. The ids are those of the moment; ask again before acting."""
        return (id_ for id_, packed in list(self._idle.items()) if updated_ms_of(packed) <= limit_ms)
