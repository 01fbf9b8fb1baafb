"""The orchestrator's function, record by record, without a broker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from semel.client.types import ConsumerRecord
from semel.patterns import sagas
from semel.patterns.saga_states import SagaOrder, SagaReply, SagaState, SagaStep, SagaTable
from semel.patterns.sagas import TICK, Orchestrate, Participate
from semel.patterns.state import KeyedState, State, StateStore, StoreIdentity

LIMIT_BYTES = 10_000


def nothing(_: Any) -> None:
    return None


@pytest.mark.parametrize("quoted", ["\ud800", "x" * LIMIT_BYTES], ids=["half a character", "long"])
def test_an_error_that_quotes_anything_is_replied(tmp_path: Path, quoted: str) -> None:
    """A reply that cannot be written leaves the saga to its timeout, and a compensation stuck."""

    def fail(_: Any) -> None:
        raise ValueError(quoted)

    reply = participating(tmp_path, SagaStep("debit", do=fail))("s", "do")
    assert reply.status == "error"
    assert len(reply.error) < LIMIT_BYTES


def participating(tmp_path: Path, step: SagaStep) -> Callable[[str, str], SagaReply]:
    """Gives a participant the order to do, or to undo, its step for a saga, and returns the reply."""
    state = State(KeyedState(format="json").codec(), LIMIT_BYTES)
    state.attach(0, StateStore(tmp_path / "0.sqlite", StoreIdentity("app", "state", 1, 0, "t")))
    participate = Participate("transfer", {step.name: step}, 1)

    def handle(saga: str, action: str) -> SagaReply:
        state.enter(0)
        order = SagaOrder(saga, step.name, action, 1, saga, reply_to=0)
        record = ConsumerRecord("transfer.steps.commands", 0, 0, 0, b"s", msgspec.json.encode(order))
        (reply,) = participate(record, state)
        assert len(reply.value or b"") < LIMIT_BYTES
        return msgspec.json.decode(reply.value or b"", type=SagaReply)

    return handle


def test_a_participant_says_whether_a_step_without_undo_was_done(tmp_path: Path) -> None:
    """After a timeout: what was done, and cannot be taken back, must not count as compensated."""
    calls: list[str] = []
    handle = participating(tmp_path, SagaStep("credit", do=lambda call: calls.append(call.saga) or "paid"))
    assert (handle("late", "do").status, handle("late", "undo").status) == ("done", "kept")
    assert handle("late", "undo").result == "paid"
    assert (handle("never", "undo").status, handle("never", "do").status) == ("done", "failed")
    assert calls == ["late"]


def orchestrated(tmp_path: Path) -> Callable[..., list[SagaState]]:
    """Gives an orchestrator a record, and returns what it logs of sagas."""
    state = State(KeyedState().codec(), LIMIT_BYTES)
    state.attach(0, StateStore(tmp_path / "0.sqlite", StoreIdentity("app", "sagas", 1, 0, "t")))
    table = SagaTable([SagaStep("debit", do=nothing, undo=nothing, timeout_ms=1_000)], 60_000)
    orchestrate = Orchestrate("transfer", table, 1, LIMIT_BYTES)

    def handle(key: bytes | None, value: bytes | None, at_ms: int, **headers: bytes) -> list[SagaState]:
        state.enter(0)
        record = ConsumerRecord("transfer.requests", 0, 0, at_ms, key, value, tuple(headers.items()))
        outputs = orchestrate(record, state)
        logged = [each.value for each in outputs if (each.topic or "").endswith(".log")]
        return [msgspec.json.decode(value, type=SagaState) for value in logged if isinstance(value, bytes)]

    return handle


def test_a_saga_that_cannot_go_on_keeps_no_other_one_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data leave no space for the error of its timeout; whoever may start sagas may choose them."""
    monkeypatch.setattr(sagas, "DUE_AT_ONCE", 2)
    handle = orchestrated(tmp_path)
    (begun,) = handle(b"an empty one", b'""', 1_500)
    spare = LIMIT_BYTES - len(msgspec.json.encode(begun)) - 20
    handle(b"a large one", b'"%s"' % (b"x" * spare), 5)
    handle(b"b", b"1", 5)
    handle(b"0", b"1", 5)
    with caplog.at_level(logging.ERROR):
        due = handle(None, None, 2_000, **{TICK: b""})
    assert {(each.saga, each.status) for each in due} == {("0", "compensating"), ("b", "compensating")}
    assert "'a large one' of 'transfer' cannot go on" in caplog.text
    assert handle(None, None, 2_001, **{TICK: b""}) == [], "the others have moved on"


def test_a_tick_moves_a_bounded_number_of_sagas_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that became due while no orchestrator ran would be one transaction, in memory until it is committed."""
    monkeypatch.setattr(sagas, "DUE_AT_ONCE", 3)
    handle = orchestrated(tmp_path)
    for number in range(7):
        handle(b"%d" % number, b"1", number)
    ticks = [[each.saga for each in handle(None, None, 2_000 + tick, **{TICK: b""})] for tick in range(4)]
    assert ticks == [["0", "1", "2"], ["3", "4", "5"], ["6"], []]
