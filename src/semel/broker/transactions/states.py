"""The life of a transactional id as one table: (state, event) with guards -> response, next state, change.

Pure: no I/O, no clock. Everything that decides about a transaction lives here. `decide` finds the cell, `coordinator`
writes what it says. `python -m semel.broker.transactions.states` draws the table.

Two generations of clients share the table. TV1 (EndTxn up to version 4) names its partitions and keeps its epoch from
one transaction to the next. TV2 (KIP-890) adds partitions by writing to them, and every end gives it a new epoch: what
comes with an older epoch is late. An epoch has 16 bits; after the last usable one the id gets a new producer id.

Two-phase commit (KIP-939): a transaction without a timeout is ended by its owner alone. A new owner that keeps it gets
an identity of its own, the next one, and may only commit or abort; the records in the partitions, and therefore the
markers, stay with the identity that wrote them. Only when the markers are written the next identity takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any, NamedTuple

from semel.protocol.errors import ErrorCode

NO_PRODUCER_ID = -1
NO_EPOCH = -1
NO_TIME = -1
NO_TIMEOUT_MS = 2**31 - 1  # of two-phase commit, as Kafka stores it: the coordinator never ends such a transaction
MAX_EPOCH = 2**15 - 1
LAST_CLIENT_EPOCH = MAX_EPOCH - 1  # the highest epoch that a client gets, so that it can always be fenced by one more

TopicPartition = tuple[str, int]
NO_PARTITIONS: frozenset[TopicPartition] = frozenset()


class TxnState(IntEnum):
    """Kafka's states, with the numbers of the transaction log."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7  # Kafka's name for a moment in memory; here the fence and the abort are one step

    @property
    def label(self) -> str:
        """The name that ListTransactions and DescribeTransactions show."""
        return _LABELS[self]


_LABELS = {state: "".join(word.capitalize() for word in state.name.split("_")) for state in TxnState}
IDLE = frozenset({TxnState.EMPTY, TxnState.COMPLETE_COMMIT, TxnState.COMPLETE_ABORT})
PREPARED = frozenset({TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT})


class TransactionEvent(Enum):
    """What can happen to a transactional id. The text is its name in the diagram."""

    INIT = "InitProducerId"
    ADD = "add partitions"
    VERIFY = "verify"
    COMMIT_V1 = "commit"
    ABORT_V1 = "abort"
    COMMIT_V2 = "commit (TV2)"
    ABORT_V2 = "abort (TV2)"
    TIMEOUT = "timeout"
    MARKERS_WRITTEN = "markers written"
    EXPIRE = "expiry"


class Transaction(NamedTuple):
    """Everything that is known about a transactional id. Immutable: a transition makes a new one."""

    producer_id: int
    previous_producer_id: int = NO_PRODUCER_ID  # the one before the last transition
    next_producer_id: int = NO_PRODUCER_ID  # takes over when the markers are written
    epoch: int = NO_EPOCH
    last_epoch: int = NO_EPOCH  # before the last bump that its owner requested: its late retries are known by it
    timeout_ms: int = 0
    state: TxnState = TxnState.EMPTY
    partitions: frozenset[TopicPartition] = NO_PARTITIONS
    started_ms: int = NO_TIME  # when the first partition was added
    updated_ms: int = 0
    client_version: int = 0  # the generation of the client that made the last transition: 0 (TV1) or 2
    next_epoch: int = NO_EPOCH  # of the owner that keeps a transaction which an earlier one wrote

    @property
    def is_kept(self) -> bool:
        """Whether the open transaction was written by an earlier owner and kept by the present one (KIP-939)."""
        return self.next_epoch != NO_EPOCH

    @property
    def owner_id(self) -> int:
        """The producer id that requests must carry."""
        return self.next_producer_id if self.is_kept else self.producer_id

    @property
    def owner_epoch(self) -> int:
        return self.next_epoch if self.is_kept else self.epoch

    @property
    def exhausted(self) -> bool:
        return self.owner_epoch >= LAST_CLIENT_EPOCH


class EventFields(NamedTuple):
    """What comes with an event. Fields that an event does not use keep their default."""

    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH
    now_ms: int = 0
    partitions: frozenset[TopicPartition] = NO_PARTITIONS
    timeout_ms: int = 0
    client_version: int = 0
    broker_version: int = 2  # the finalised feature level: how the broker itself ends transactions
    fresh_producer_id: int = NO_PRODUCER_ID  # the next one that was never given out
    expiration_ms: int = 0
    keep_prepared: bool = False  # InitProducerId must not abort what is open (KIP-939)

    @property
    def has_expectation(self) -> bool:
        """Whether an InitProducerId says who it thinks it is (KIP-360)."""
        return self.producer_id != NO_PRODUCER_ID


def new_transaction(producer_id: int, timeout_ms: int, now_ms: int) -> Transaction:
    """An id that was never used, before its first InitProducerId is written."""
    return Transaction(producer_id, timeout_ms=timeout_ms, updated_ms=now_ms)


NOT_STORED = Transaction(NO_PRODUCER_ID)  # the value of an id that the log has no record of


# --- guards: questions about the value and the request -------------------------------------------------------------
class Guard(NamedTuple):
    text: str
    holds: Callable[[Transaction, EventFields], bool]


always = Guard("always", lambda txn, fields: True)
foreign_id = Guard("another producer id", lambda txn, fields: fields.producer_id != txn.owner_id)
foreign_epoch = Guard("another epoch", lambda txn, fields: fields.epoch != txn.owner_epoch)
is_kept = Guard("kept from an earlier owner", lambda txn, fields: txn.is_kept)
to_keep = Guard("keepPreparedTxn", lambda txn, fields: fields.keep_prepared)
contained = Guard("partitions already in it", lambda txn, fields: fields.partitions <= txn.partitions)
v2_broker = Guard("broker at TV2", lambda txn, fields: fields.broker_version >= 2)
within_timeout = Guard(
    "within its timeout, or without one",
    lambda txn, fields: txn.timeout_ms == NO_TIMEOUT_MS or txn.started_ms + txn.timeout_ms >= fields.now_ms,
)
unused = Guard(
    "unused for transactional.id.expiration.ms",
    lambda txn, fields: txn.updated_ms <= fields.now_ms - fields.expiration_ms,
)
is_new = Guard("first use", lambda txn, fields: txn.epoch == NO_EPOCH)
no_expectation = Guard("no expected epoch", lambda txn, fields: not fields.has_expectation)
expects_current = Guard("expects the current epoch", lambda txn, fields: fields.epoch == txn.epoch)
expects_last = Guard("expects the last epoch (a retry)", lambda txn, fields: fields.epoch == txn.last_epoch)
stale_expectation = Guard(
    "expects an epoch that is not current",
    lambda txn, fields: fields.has_expectation and fields.epoch != txn.owner_epoch,
)
worn_out = Guard(
    "no epochs left", lambda txn, fields: txn.exhausted and (not fields.has_expectation or fields.epoch == txn.epoch)
)


def _is_foreign_owner(txn: Transaction, fields: EventFields) -> bool:
    if not fields.has_expectation or txn.epoch == NO_EPOCH or fields.producer_id == txn.owner_id:
        return False
    return fields.producer_id != txn.previous_producer_id or fields.epoch < LAST_CLIENT_EPOCH


def _is_overflow_retry(txn: Transaction, fields: EventFields) -> bool:
    return txn.previous_producer_id == fields.producer_id and fields.epoch == LAST_CLIENT_EPOCH and txn.owner_epoch == 0


def _is_retried_end(txn: Transaction, fields: EventFields) -> bool:
    return txn.owner_epoch == fields.epoch + 1


foreign_owner = Guard("expects a producer id that is not the owner's", _is_foreign_owner)
foreign_id_v2 = Guard(
    "another producer id",
    lambda txn, fields: fields.producer_id != txn.owner_id and not _is_overflow_retry(txn, fields),
)
bumped_by_it = Guard("a retry of the end that made this epoch", _is_retried_end)
retried_end = Guard(
    "a retry of the last end", lambda txn, fields: _is_retried_end(txn, fields) or _is_overflow_retry(txn, fields)
)


# --- changes: how a transition makes the next value -----------------------------------------------------------------

Change = Callable[[Transaction, EventFields, TxnState], Transaction]


def _moved(txn: Transaction, fields: EventFields, to: TxnState, **changes: Any) -> Transaction:
    """What every transition does: the state, the time, and the producer id so far becomes the previous one."""
    return txn._replace(state=to, updated_ms=fields.now_ms, previous_producer_id=txn.producer_id, **changes)


def _initialised(txn: Transaction, fields: EventFields, epoch: int, last_epoch: int) -> Transaction:
    return _moved(
        txn,
        fields,
        TxnState.EMPTY,
        epoch=epoch,
        last_epoch=last_epoch,
        timeout_ms=fields.timeout_ms,
        partitions=NO_PARTITIONS,
        started_ms=NO_TIME,
        next_producer_id=NO_PRODUCER_ID,
    )


def take_over(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    return _initialised(txn, fields, txn.epoch + 1, NO_EPOCH)


def bump(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    return _initialised(txn, fields, txn.epoch + 1, txn.epoch)


def repeat(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    again = _initialised(txn, fields, txn.epoch, txn.last_epoch)
    return again._replace(previous_producer_id=txn.previous_producer_id)  # so that a third try is known as well


def rotate(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    last = txn.epoch if fields.has_expectation else NO_EPOCH
    return _initialised(txn, fields, 0, last)._replace(producer_id=fields.fresh_producer_id)


def keep(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    """The caller becomes the owner of what an earlier owner wrote; that one is fenced by the next identity."""
    if txn.exhausted:
        next_id, next_epoch = fields.fresh_producer_id, 0
    else:
        next_id, next_epoch = txn.owner_id, txn.owner_epoch + 1
    return txn._replace(
        state=to,
        updated_ms=fields.now_ms,
        timeout_ms=NO_TIMEOUT_MS if fields.timeout_ms == NO_TIMEOUT_MS else txn.timeout_ms,
        previous_producer_id=txn.owner_id,
        next_producer_id=next_id,
        next_epoch=next_epoch,
        last_epoch=NO_EPOCH,
    )


def begin(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    return _moved(
        txn, fields, to, partitions=fields.partitions, started_ms=fields.now_ms, client_version=fields.client_version
    )


def grow(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    return _moved(txn, fields, to, partitions=txn.partitions | fields.partitions, client_version=fields.client_version)


def end_v1(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    if txn.is_kept:
        return _moved(txn, fields, to, client_version=0)._replace(previous_producer_id=txn.owner_id)
    return _moved(txn, fields, to, client_version=0, next_producer_id=NO_PRODUCER_ID)


def end_v2(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    """The markers carry the new epoch, so that they close the door behind this transaction in every partition."""
    ended = _moved(txn, fields, to, epoch=min(txn.epoch + 1, MAX_EPOCH), last_epoch=txn.owner_epoch, client_version=2)
    if txn.is_kept:
        return _next_owner(txn, fields, ended)
    return ended._replace(next_producer_id=fields.fresh_producer_id if txn.exhausted else NO_PRODUCER_ID)


def _next_owner(txn: Transaction, fields: EventFields, ended: Transaction) -> Transaction:
    """The owner of a kept transaction ends it, and gets a new epoch as for any other end."""
    next_id, next_epoch = (fields.fresh_producer_id, 0) if txn.exhausted else (txn.owner_id, txn.owner_epoch + 1)
    return ended._replace(previous_producer_id=txn.owner_id, next_producer_id=next_id, next_epoch=next_epoch)


def end_nothing_v2(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    return end_v2(txn, fields, to)._replace(started_ms=fields.now_ms)


def fence_v1(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    fenced = end_v1(txn, fields, to)._replace(epoch=min(txn.epoch + 1, MAX_EPOCH), last_epoch=NO_EPOCH)
    return _next_owner(txn, fields, fenced) if txn.is_kept else fenced


def complete(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    moved = _moved(txn, fields, to, partitions=NO_PARTITIONS, next_producer_id=NO_PRODUCER_ID, next_epoch=NO_EPOCH)
    if txn.is_kept:
        return moved._replace(
            producer_id=txn.owner_id, epoch=txn.owner_epoch, previous_producer_id=txn.previous_producer_id
        )
    if txn.client_version >= 2 and txn.next_producer_id != NO_PRODUCER_ID:
        return moved._replace(producer_id=txn.next_producer_id, epoch=0)
    return moved


def forget(txn: Transaction, fields: EventFields, to: TxnState) -> Transaction:
    return _moved(txn, fields, to, partitions=NO_PARTITIONS)


# --- the table --------------------------------------------------------------------------------------------------------
class TxnRule(NamedTuple):
    """If the guard holds: this response, and this transition (`to` is None: nothing changes, nothing is written)."""

    when: Guard
    error: ErrorCode = ErrorCode.NONE
    to: TxnState | None = None
    change: Change | None = None


Check = tuple[Guard, ErrorCode]
E = ErrorCode

# While a transition waits for its record or for its markers, the id is pending. Which question comes first
# differs from event to event, and clients can see it.
pending = Guard("a transition is pending", lambda txn, fields: False)  # asked by `decide`, which knows

CHECKS: dict[TransactionEvent, tuple[Check, ...]] = {
    TransactionEvent.INIT: ((pending, E.CONCURRENT_TRANSACTIONS), (foreign_owner, E.PRODUCER_FENCED)),
    TransactionEvent.ADD: (
        (pending, E.CONCURRENT_TRANSACTIONS),
        (foreign_id, E.INVALID_PRODUCER_ID_MAPPING),
        (foreign_epoch, E.PRODUCER_FENCED),
    ),
    TransactionEvent.VERIFY: ((foreign_id, E.INVALID_PRODUCER_ID_MAPPING), (foreign_epoch, E.PRODUCER_FENCED)),
    TransactionEvent.COMMIT_V1: (
        (foreign_id, E.INVALID_PRODUCER_ID_MAPPING),
        (foreign_epoch, E.PRODUCER_FENCED),
        (pending, E.CONCURRENT_TRANSACTIONS),
    ),
    TransactionEvent.ABORT_V1: (
        (foreign_id, E.INVALID_PRODUCER_ID_MAPPING),
        (foreign_epoch, E.PRODUCER_FENCED),
        (pending, E.CONCURRENT_TRANSACTIONS),
    ),
    TransactionEvent.COMMIT_V2: ((pending, E.CONCURRENT_TRANSACTIONS), (foreign_id_v2, E.INVALID_PRODUCER_ID_MAPPING)),
    TransactionEvent.ABORT_V2: ((pending, E.CONCURRENT_TRANSACTIONS), (foreign_id_v2, E.INVALID_PRODUCER_ID_MAPPING)),
    TransactionEvent.TIMEOUT: ((pending, E.CONCURRENT_TRANSACTIONS),),
    TransactionEvent.MARKERS_WRITTEN: (),
    TransactionEvent.EXPIRE: ((pending, E.CONCURRENT_TRANSACTIONS),),
}

_FENCED = TxnRule(always, E.PRODUCER_FENCED)
_STALE = TxnRule(foreign_epoch, E.PRODUCER_FENCED)
_REFUSED = TxnRule(always, E.INVALID_TXN_STATE)
_NEVER = (_REFUSED,)
_WAIT = (TxnRule(always, E.CONCURRENT_TRANSACTIONS),)
_DONE = (TxnRule(always),)
_VERIFY = (TxnRule(contained), TxnRule(always, E.TRANSACTION_ABORTABLE))
_VERIFY_OPEN = (TxnRule(is_kept, E.INVALID_TXN_STATE), *_VERIFY)
_INIT = (
    TxnRule(worn_out, to=TxnState.EMPTY, change=rotate),
    TxnRule(no_expectation, to=TxnState.EMPTY, change=take_over),
    TxnRule(is_new, to=TxnState.EMPTY, change=bump),
    TxnRule(expects_current, to=TxnState.EMPTY, change=bump),
    TxnRule(expects_last, to=TxnState.EMPTY, change=repeat),
    _FENCED,
)
_CLEAR = (
    TxnRule(stale_expectation, E.PRODUCER_FENCED),  # a zombie must not abort the new owner's transaction
    TxnRule(to_keep, to=TxnState.ONGOING, change=keep),
    TxnRule(v2_broker, E.CONCURRENT_TRANSACTIONS, TxnState.PREPARE_ABORT, end_v2),
    TxnRule(always, E.CONCURRENT_TRANSACTIONS, TxnState.PREPARE_ABORT, fence_v1),
)
_OVERDUE = (
    TxnRule(within_timeout, E.INVALID_TXN_STATE),
    TxnRule(v2_broker, to=TxnState.PREPARE_ABORT, change=end_v2),
    TxnRule(always, to=TxnState.PREPARE_ABORT, change=fence_v1),
)
_BEGIN = (TxnRule(always, to=TxnState.ONGOING, change=begin),)
_GROW = (TxnRule(is_kept, E.INVALID_TXN_STATE), TxnRule(contained), TxnRule(always, to=TxnState.ONGOING, change=grow))
_COMMIT_V1 = (TxnRule(always, to=TxnState.PREPARE_COMMIT, change=end_v1),)
_ABORT_V1 = (TxnRule(always, to=TxnState.PREPARE_ABORT, change=end_v1),)
_COMMIT_V2 = (_STALE, TxnRule(always, to=TxnState.PREPARE_COMMIT, change=end_v2))
_ABORT_V2 = (_STALE, TxnRule(always, to=TxnState.PREPARE_ABORT, change=end_v2))
_SAME_END = (TxnRule(bumped_by_it, E.CONCURRENT_TRANSACTIONS), _FENCED)  # the end that is under way
_OTHER_END = (TxnRule(bumped_by_it, E.INVALID_TXN_STATE), _FENCED)
_NO_TXN = (_STALE, _REFUSED)
_ABORT_NONE = (_STALE, TxnRule(always, to=TxnState.PREPARE_ABORT, change=end_nothing_v2))
_COMMIT_AGAIN = (TxnRule(retried_end), *_NO_TXN)
_ABORT_AGAIN = (TxnRule(retried_end), *_ABORT_NONE)
_COMMIT_LATE = (TxnRule(retried_end, E.INVALID_TXN_STATE), *_NO_TXN)  # the transaction ended the other way
_ABORT_LATE = (TxnRule(retried_end, E.INVALID_TXN_STATE), *_ABORT_NONE)
_COMMITTED = (TxnRule(always, to=TxnState.COMPLETE_COMMIT, change=complete),)
_ABORTED = (TxnRule(always, to=TxnState.COMPLETE_ABORT, change=complete),)
_EXPIRE = (TxnRule(unused, to=TxnState.DEAD, change=forget), _REFUSED)

# fmt: off
# Empty: initialised, no transaction yet. Ongoing: partitions were added. Prepare...: decided, markers are on their way.
# Complete...: every partition has its marker.
_STATES = (
    TxnState.EMPTY, TxnState.ONGOING, TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT, TxnState.COMPLETE_COMMIT,
    TxnState.COMPLETE_ABORT,
)
_ROWS: dict[TransactionEvent, tuple[tuple[TxnRule, ...], ...]] = {
    #                                  Empty        Ongoing     PrepareCommit PrepareAbort CompleteCommit CompleteAbort
    TransactionEvent.INIT:            (_INIT,       _CLEAR,     _WAIT,        _WAIT,       _INIT,         _INIT),
    TransactionEvent.ADD:             (_BEGIN,      _GROW,      _WAIT,        _WAIT,       _BEGIN,        _BEGIN),
    TransactionEvent.VERIFY:          (_VERIFY,     _VERIFY_OPEN, _WAIT,      _WAIT,       _VERIFY,       _VERIFY),
    TransactionEvent.COMMIT_V1:       (_NEVER,      _COMMIT_V1, _WAIT,        _NEVER,      _DONE,         _NEVER),
    TransactionEvent.ABORT_V1:        (_NEVER,      _ABORT_V1,  _NEVER,       _WAIT,       _NEVER,        _DONE),
    TransactionEvent.COMMIT_V2:       (_NO_TXN,     _COMMIT_V2, _SAME_END,    _OTHER_END,  _COMMIT_AGAIN, _COMMIT_LATE),
    TransactionEvent.ABORT_V2:        (_ABORT_NONE, _ABORT_V2,  _OTHER_END,   _SAME_END,   _ABORT_LATE,   _ABORT_AGAIN),
    TransactionEvent.TIMEOUT:         (_NEVER,      _OVERDUE,   _NEVER,       _NEVER,      _NEVER,        _NEVER),
    TransactionEvent.MARKERS_WRITTEN: (_NEVER,      _NEVER,     _COMMITTED,   _ABORTED,    _NEVER,        _NEVER),
    TransactionEvent.EXPIRE:          (_EXPIRE,     _NEVER,     _NEVER,       _NEVER,      _EXPIRE,       _EXPIRE),
}
# fmt: on
CELLS: dict[tuple[TxnState, TransactionEvent], tuple[TxnRule, ...]] = {
    (state, event): row[column] for column, state in enumerate(_STATES) for event, row in _ROWS.items()
}


class TxnDecision(NamedTuple):
    """The response, and the value to write and replay before it is sent (None: nothing changes)."""

    error: ErrorCode
    to: Transaction | None = None
    takes_producer_id: bool = False  # the fresh producer id of the fields is used up; see `Ask.fresh_producer_id`


def decide(txn: Transaction, event: TransactionEvent, fields: EventFields, *, is_pending: bool = False) -> TxnDecision:
    """What an event means for a transactional id. Raises KeyError for states that no id is ever seen in."""
    rules = CELLS[txn.state, event]
    for guard, error in CHECKS[event]:
        if is_pending if guard is pending else guard.holds(txn, fields):
            return TxnDecision(error)
    for rule in rules:
        if rule.when.holds(txn, fields):
            if rule.to is None or rule.change is None:
                return TxnDecision(rule.error)
            to = rule.change(txn, fields, rule.to)
            fresh = fields.fresh_producer_id
            return TxnDecision(
                rule.error, to, fresh != NO_PRODUCER_ID and fresh in (to.producer_id, to.next_producer_id)
            )
    raise AssertionError(f"no rule of {txn.state.label} on {event.value!r} fits: the last one must always hold")


# --- The state machine as a picture and as a grid, for the docs: `python -m semel.broker.transactions.states` ---


SEEN = [state for state in TxnState if state not in (TxnState.DEAD, TxnState.PREPARE_EPOCH_FENCE)]


def diagram() -> str:
    """A Mermaid state diagram: one arrow for each pair of states, with the events that lead along it."""
    arrows: dict[tuple[TxnState, TxnState], list[str]] = {}
    for (state, event), rules in CELLS.items():
        for rule in rules:
            if rule.to is not None and event.value not in arrows.setdefault((state, rule.to), []):
                arrows[state, rule.to].append(event.value)
    lines = ["stateDiagram-v2", f"    [*] --> {TxnState.EMPTY.label}: {TransactionEvent.INIT.value}"]
    lines += [f"    {a.label} --> {b.label}: {', '.join(events)}" for (a, b), events in sorted(arrows.items())]
    return "\n".join([*lines, f"    {TxnState.DEAD.label} --> [*]"])


def grid() -> str:
    """Every cell: the first guard that holds decides. `=` means that nothing changes."""
    lines = ["| event | first | in state | then |", "|---|---|---|---|"]
    for event in TransactionEvent:
        checks = "; ".join(f"{guard.text}: {error.name}" for guard, error in CHECKS[event]) or "-"
        for number, (states, rules) in enumerate(_cells_of(event)):
            names = ", ".join(state.label for state in states)
            text = "; ".join(map(_describe, rules))
            lines.append(
                f"| {event.value if number == 0 else ''} | {checks if number == 0 else ''} | {names} | {text} |"
            )
    return "\n".join(lines)


def _cells_of(event: TransactionEvent) -> list[tuple[list[TxnState], tuple[TxnRule, ...]]]:
    """The cells of an event, states with the same rules together."""
    groups: list[tuple[list[TxnState], tuple[TxnRule, ...]]] = []
    for state in SEEN:
        rules = CELLS[state, event]
        for states, known in groups:
            if known == rules:
                states.append(state)
                break
        else:
            groups.append(([state], rules))
    return groups


def _describe(rule: TxnRule) -> str:
    when = "" if rule.when.text == "always" else f"{rule.when.text}: "
    to = "=" if rule.to is None else f"-> {rule.to.label}"
    if rule.to is not None and rule.change is not None:
        to += f" ({rule.change.__name__})"
    return f"{when}{to}" if rule.error.name == "NONE" else f"{when}{rule.error.name} {to}".removesuffix(" =")


if __name__ == "__main__":
    print(f"{diagram()}\n\n{grid()}")
