"""DescribeTransactionEvents (20000): what happened to transactional ids, for `semel trace` and `semel ui`."""

from __future__ import annotations

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.transactions.events import TraceEvent
from semel.broker.turns import Turns
from semel.protocol.messages import observation as messages

MOST_EVENTS = 10_000


async def describe_transaction_events(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeTransactionEventsRequest
) -> messages.DescribeTransactionEventsResponse:
    kept = broker.transactions.events
    ids = dict.fromkeys(request.transactional_ids)
    found = sorted(event for id_ in ids for event in kept.of(id_)) if ids else kept.all()
    limit = min(max(request.limit, 1), MOST_EVENTS)
    chosen = [event for event in found if event.number > request.after][-limit:]
    return messages.DescribeTransactionEventsResponse(
        now_ms=broker.clock.now_ms(), events=await Turns().map(_message, chosen)
    )


def _message(event: TraceEvent) -> messages.TransactionTraceEvent:
    return messages.TransactionTraceEvent(
        number=event.number,
        time_ms=event.time_ms,
        step=event.step.number,
        api=event.step.api,
        transactional_id=event.transactional_id,
        producer_id=event.producer_id,
        producer_epoch=event.epoch,
        error_code=event.error,
        client=event.client,
        partitions=[messages.TracedPartition(topic, index) for topic, index in event.partitions],
        partition_count=event.partition_count,
        note=event.note,
    )
