"""What happened to transactional ids, step by step, for people: the last events of the ids that were used last.

Steps have the numbers of the figure in KIP-98. The memory is bounded, and nothing here outlives the process: what
counts is in the transaction log. An event is a tuple, made once per request of a transaction and never per batch.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from enum import Enum
from functools import cache
from itertools import count, islice
from typing import NamedTuple

from semel.broker.counters import FENCED, Counters
from semel.broker.transactions.states import TopicPartition, Transaction, TransactionEvent, TxnState
from semel.protocol.errors import ErrorCode

KEPT_IDS = 512
KEPT_EVENTS = 64  # of one id: some transactions
KEPT_PARTITIONS = 8  # that an event names; it has the number of all of them
_CANDIDATES = 16  # ids that are looked at for one to forget


class TraceStep(Enum):
    """A step of a transaction: its number in KIP-98's figure, and the request or record that it is."""

    FIND = ("1", "FindCoordinator")
    INIT = ("2", "InitProducerId")
    ADD = ("4.1", "AddPartitionsToTxn")
    PRODUCE = ("4.2", "Produce")
    ADD_OFFSETS = ("4.3", "AddOffsetsToTxn")
    OFFSETS = ("4.4", "TxnOffsetCommit")
    END = ("5.1", "EndTxn")
    DECIDED = ("5.1a", "PREPARE")
    MARKERS = ("5.2", "WriteTxnMarkers")
    COMPLETE = ("5.3", "COMPLETE")

    @property
    def number(self) -> str:
        return self.value[0]

    @property
    def api(self) -> str:
        return self.value[1]


class TraceEvent(NamedTuple):
    number: int  # counts the events of all ids
    time_ms: int
    step: TraceStep
    transactional_id: str
    producer_id: int
    epoch: int
    error: ErrorCode
    client: str  # id and address of the client; empty for what the broker does by itself
    partitions: tuple[TopicPartition, ...]
    partition_count: int
    note: str


# Why the coordinator ended a transaction, by the event that decided it.
REASONS = {
    TransactionEvent.COMMIT_V1: "client",
    TransactionEvent.COMMIT_V2: "client",
    TransactionEvent.ABORT_V1: "client",
    TransactionEvent.ABORT_V2: "client",
    TransactionEvent.INIT: "new_owner",
    TransactionEvent.TIMEOUT: "timeout",
}
OPERATOR = "operator"  # a marker that somebody wrote by hand


@cache
def _decided_by(state: TxnState, event: TransactionEvent) -> tuple[str, str]:
    """The reason of a decision, and what the event says of it."""
    reason = REASONS.get(event, event.value)
    return reason, f"{state.label}, decided by {reason.replace('_', ' ')}"


_UNFINISHED = frozenset(
    {
        TraceStep.ADD,
        TraceStep.PRODUCE,
        TraceStep.ADD_OFFSETS,
        TraceStep.OFFSETS,
        TraceStep.END,
        TraceStep.DECIDED,
        TraceStep.MARKERS,
    }
)


class TransactionEvents:
    """The events of the transaction coordinator, and what is counted of them."""

    def __init__(self, now_ms: Callable[[], int], counters: Counters) -> None:
        self._now_ms = now_ms
        self._counters = counters
        self._numbers = count()
        self._by_id: OrderedDict[str, deque[TraceEvent]] = OrderedDict()

    def add(
        self,
        step: TraceStep,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        error: ErrorCode = ErrorCode.NONE,
        client: str = "",
        partitions: Collection[TopicPartition] = (),
        note: str = "",
        moment: tuple[int, int] | None = None,
    ) -> None:
        """`moment`: when a request came whose effects are events themselves (see `moment`)."""
        if (
            error is not ErrorCode.NONE and error in FENCED and step is not TraceStep.PRODUCE
        ):  # a batch that is refused is counted where it is
            self._counters.fenced[step.api] += 1
        events = self._by_id.get(transactional_id)
        if events is None:
            self._make_space()
            events = self._by_id[transactional_id] = deque(maxlen=KEPT_EVENTS)
        else:
            self._by_id.move_to_end(transactional_id)
        count = len(partitions)
        if count < 2:
            named = tuple(partitions)
        else:
            named = tuple(sorted(partitions) if count <= KEPT_PARTITIONS else islice(partitions, KEPT_PARTITIONS))
        if step is TraceStep.FIND and events and events[-1].step is TraceStep.FIND:
            events.pop()  # somebody who only looks: it would push out what happened
        number, now_ms = moment or (next(self._numbers), self._now_ms())
        events.append(
            TraceEvent(number, now_ms, step, transactional_id, producer_id, epoch, error, client, named, count, note)
        )

    def moment(self) -> tuple[int, int]:
        """Number and time of an event that happens now and is added later, when its outcome is known."""
        return next(self._numbers), self._now_ms()

    def transition(self, transactional_id: str, event: TransactionEvent, to: Transaction) -> None:
        """A decision or the end of a transaction is in the log."""
        if event is TransactionEvent.MARKERS_WRITTEN:
            self.add(TraceStep.COMPLETE, transactional_id, to.producer_id, to.epoch, note=to.state.label)
        elif to.state in (TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT):
            reason, note = _decided_by(to.state, event)
            self._counters.ends[to.state is TxnState.PREPARE_COMMIT, reason] += 1
            self.add(TraceStep.DECIDED, transactional_id, to.producer_id, to.epoch, partitions=to.partitions, note=note)

    def of(self, transactional_id: str) -> list[TraceEvent]:
        """The kept events of an id, oldest first. May be called from another thread."""
        return sorted(self._by_id.get(transactional_id, ()))

    def all(self) -> list[TraceEvent]:
        """The kept events of all ids, oldest first."""
        return sorted(event for events in list(self._by_id.values()) for event in list(events))

    def _make_space(self) -> None:
        """Forgets the id that was used longest ago; rather one that has ended than one whose transaction hangs."""
        if len(self._by_id) < KEPT_IDS:
            return
        oldest = list(islice(self._by_id.items(), _CANDIDATES))
        ended = (id_ for id_, events in oldest if events[-1].step not in _UNFINISHED)
        del self._by_id[next(ended, oldest[0][0])]
