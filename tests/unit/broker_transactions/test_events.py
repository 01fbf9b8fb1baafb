"""Events of transactions are kept in bounded memory, and the interesting ones are kept longest."""

from __future__ import annotations

from itertools import count

from semel.broker.counters import Counters
from semel.broker.transactions import events as module
from semel.broker.transactions.events import KEPT_EVENTS, KEPT_IDS, KEPT_PARTITIONS, TraceStep, TransactionEvents
from semel.protocol.errors import ErrorCode


def make() -> tuple[TransactionEvents, Counters]:
    counters = Counters()
    return TransactionEvents(count(1000).__next__, counters), counters


def test_events_of_an_id_are_in_order_and_the_oldest_are_forgotten() -> None:
    events, _ = make()
    for number in range(KEPT_EVENTS + 10):
        events.add(TraceStep.ADD, "a", number, 0)
    found = events.of("a")
    assert [event.producer_id for event in found] == list(range(10, KEPT_EVENTS + 10))
    assert [event.time_ms for event in found] == sorted(event.time_ms for event in found)
    assert events.of("unknown") == []


def test_an_open_transaction_outlives_thousands_of_ids_that_came_and_went() -> None:
    events, _ = make()
    events.add(TraceStep.PRODUCE, "hanging", 7, 1, partitions=[("t", 0)])
    for number in range(5 * KEPT_IDS):
        events.add(TraceStep.INIT, f"short-{number}", number, 0)
        events.add(TraceStep.COMPLETE, f"short-{number}", number, 0)
    assert [event.step for event in events.of("hanging")] == [TraceStep.PRODUCE]
    assert len({event.transactional_id for event in events.all()}) == KEPT_IDS


def test_lookups_of_tools_do_not_push_out_what_happened() -> None:
    events, _ = make()
    events.add(TraceStep.END, "a", 1, 0)
    for _ in range(2 * KEPT_EVENTS):
        events.add(TraceStep.FIND, "a", -1, -1)
    assert [event.step for event in events.of("a")] == [TraceStep.END, TraceStep.FIND]


def test_a_request_stands_before_what_it_caused() -> None:
    events, _ = make()
    moment = events.moment()
    events.add(TraceStep.DECIDED, "a", 1, 0)
    events.add(TraceStep.END, "a", 1, 0, moment=moment)
    assert [event.step for event in events.of("a")] == [TraceStep.END, TraceStep.DECIDED]


def test_memory_is_bounded_although_every_transaction_hangs() -> None:
    events, _ = make()
    for number in range(3 * KEPT_IDS):
        events.add(TraceStep.ADD, f"open-{number}", number, 0)
    assert len(events._by_id) == KEPT_IDS


def test_an_event_names_a_few_partitions_and_counts_all() -> None:
    events, _ = make()
    events.add(TraceStep.ADD, "a", 1, 0, partitions=[("t", index) for index in range(10_000)])
    events.add(TraceStep.ADD, "a", 1, 0, partitions={("t", 1), ("t", 0)})
    many, few = events.of("a")
    assert (len(many.partitions), many.partition_count) == (KEPT_PARTITIONS, 10_000)
    assert few.partitions == (("t", 0), ("t", 1))


def test_fenced_requests_are_counted_by_api_and_batches_only_once() -> None:
    events, counters = make()
    events.add(TraceStep.END, "a", 1, 0, ErrorCode.PRODUCER_FENCED)
    events.add(TraceStep.INIT, "a", 1, 0, ErrorCode.CONCURRENT_TRANSACTIONS)
    events.add(TraceStep.PRODUCE, "a", 1, 0, ErrorCode.INVALID_PRODUCER_EPOCH)  # the append counts it
    counters.batch_refused(ErrorCode.INVALID_PRODUCER_EPOCH)
    counters.batch_refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert dict(counters.fenced) == {"EndTxn": 1, "Produce": 1}
    assert counters.out_of_order == 1


def test_every_reason_has_a_word() -> None:
    assert set(module.REASONS.values()) == {"client", "new_owner", "timeout"}
