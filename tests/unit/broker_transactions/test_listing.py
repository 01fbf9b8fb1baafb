"""ListTransactions: filters of clients cannot hold the broker up."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from semel.broker.transactions.handlers import list_transactions
from semel.broker.transactions.states import TxnState
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.transactions import ListTransactionsRequest, ListTransactionsResponse
from tests.support.waiting import STALL_S


def listed(pattern: str | None, *ids: str) -> ListTransactionsResponse:
    txn = SimpleNamespace(producer_id=1, epoch=0, state=TxnState.EMPTY, started_ms=0)
    broker: Any = SimpleNamespace(
        clock=SimpleNamespace(now_ms=lambda: 0), transactions=SimpleNamespace(ids=dict.fromkeys(ids, txn))
    )
    request = ListTransactionsRequest(duration_filter=-1, transactional_id_pattern=pattern)

    async def run() -> Any:
        return await list_transactions(broker, None, request)  # type: ignore[arg-type]

    return asyncio.run(run())


def test_a_catastrophic_expression_takes_no_time() -> None:
    """Python's engine tries 2^32 ways to divide the id."""
    started_s = time.monotonic()
    assert listed("(a|a)*b", "a" * 32).transaction_states == []
    assert time.monotonic() - started_s < STALL_S


def test_an_expression_describes_the_whole_id() -> None:
    found = listed("orders-.*", "orders-1", "my-orders-1", "orders-").transaction_states
    assert [each.transactional_id for each in found] == ["orders-1", "orders-"]
    assert len(listed(None, "a", "b").transaction_states) == len(listed("", "a", "b").transaction_states) == 2


def test_what_re2_refuses_is_refused() -> None:
    for pattern in ("((", r"(a)\1", "(?=a)", "a{1001}", "[a-z]{1,300}" * 100):
        assert listed(pattern, "a").error_code == E.INVALID_REGULAR_EXPRESSION
