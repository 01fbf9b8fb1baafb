"""The table of sagas: every pair of status and event."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from semel.client.errors import ConfigError
from semel.patterns.saga_states import (
    ENDED,
    SagaOrder,
    SagaReply,
    SagaState,
    SagaStep,
    SagaStepError,
    SagaTable,
    check_steps,
)
from semel.patterns.sagas import Sagas


def nothing(_: Any) -> None:
    return None


STEPS = [
    SagaStep("one", nothing, nothing, timeout_ms=100, retries=1, backoff_ms=10),
    SagaStep("two", nothing, None, timeout_ms=100, retries=1, backoff_ms=10),
    SagaStep("three", nothing, nothing, timeout_ms=100, retries=1, backoff_ms=10, key=lambda data: data["key"]),
]
TABLE = SagaTable(STEPS, keep_ms=1_000)


def begun(at: int = 0, status: str = "running") -> SagaState:
    state, _ = TABLE.begin("s", {"key": "k"}, 0)
    state.at, state.reached, state.status = at, at, status
    return state


def reply(status: str, result: Any = None) -> SagaReply:
    return SagaReply("", "", 0, status, result, "because")


def names(orders: list[SagaOrder]) -> list[str]:
    return [f"{order.action} {order.step}" for order in orders]


@pytest.mark.parametrize(
    ("status", "at", "event", "leads_to", "ordered"),
    [
        ("running", 0, "done", ("running", 1, "reply"), ["do two"]),
        ("running", 2, "done", ("done", 2, "forget"), ["forget one", "forget two", "forget three"]),
        ("running", 0, "failed", ("compensated", 0, "forget"), ["forget one"]),
        ("running", 2, "failed", ("compensating", 0, "reply"), ["undo one"]),
        ("running", 0, "error", ("running", 0, "retry"), []),
        ("running", 2, "timeout", ("compensating", 2, "reply"), ["undo three"]),
        ("running", 1, "timeout", ("compensating", 1, "reply"), ["undo two"]),
        ("running", 1, "due", ("running", 1, "reply"), ["do two"]),
        ("compensating", 2, "done", ("compensating", 0, "reply"), ["undo one"]),
        ("compensating", 0, "done", ("compensated", 0, "forget"), ["forget one"]),
        ("compensating", 1, "done", ("compensating", 0, "reply"), ["undo one"]),
        ("compensating", 1, "kept", ("running", 2, "reply"), ["do three"]),
        ("compensating", 0, "failed", ("compensating", 0, "retry"), []),
        ("compensating", 0, "error", ("compensating", 0, "retry"), []),
        ("compensating", 0, "timeout", ("compensating", 0, "reply"), []),
        ("compensating", 0, "due", ("compensating", 0, "reply"), ["undo one"]),
        *[(end, 2, event, (end, 2, "reply"), []) for end in ENDED for event in ("done", "failed", "error", "timeout")],
        ("running", 0, "no such event", ("running", 0, "reply"), []),
    ],
)
def test_every_pair(status: str, at: int, event: str, leads_to: tuple[str, int, str], ordered: list[str]) -> None:
    state = begun(at, status)
    before = copy.deepcopy(state)
    orders = names(TABLE.handle(state, event, 5, reply(event)))
    if status in ENDED:
        assert state == before
        return
    assert (state.status, state.at, state.waits_for) == leads_to
    assert orders == ordered


def test_an_error_is_retried_with_a_backoff_and_then_compensated() -> None:
    state = begun()
    assert TABLE.handle(state, "error", 50, reply("error")) == []
    assert state.due_ms == 60
    assert names(TABLE.handle(state, "due", 60)) == ["do one"]
    assert names(TABLE.handle(state, "error", 70, reply("error"))) == ["forget one"]
    assert state.status == "compensated"
    assert state.error == "one: because"


def test_a_compensation_is_never_given_up_and_shows_as_stuck() -> None:
    state = begun(0, "compensating")
    for number in range(40):
        assert TABLE.handle(state, "error", 0, reply("error")) == []
        assert state.stuck is (number > 0)
        assert state.due_ms <= 60_000
        assert names(TABLE.handle(state, "due", state.due_ms)) == ["undo one"]
    assert names(TABLE.handle(state, "done", 0, reply("done"))) == ["forget one"]
    assert state.status == "compensated"
    assert not state.stuck


def test_a_reply_that_is_overdue_shows_as_stuck() -> None:
    state = begun(0, "compensating")
    assert TABLE.handle(state, "timeout", 7) == []
    assert (state.stuck, state.due_ms) == (True, 107)


def test_a_step_without_undo_that_is_late_is_not_done_beside_a_compensation() -> None:
    """Its command is in its topic: only the participant can say whether it was done."""
    state = begun(1)
    assert names(TABLE.handle(state, "timeout", 5)) == ["undo two"]
    assert names(TABLE.handle(state, "kept", 6, reply("kept", "late"))) == ["do three"]
    assert (state.results, state.error, state.stuck) == ({"two": "late"}, "", False)
    assert names(TABLE.handle(state, "failed", 7, reply("failed"))) == ["undo one"]
    state = begun(2, "compensating")
    state.at = 1
    assert names(TABLE.handle(state, "kept", 6, reply("kept"))) == ["undo one"], "three has failed"


def test_a_delay_is_waited_for() -> None:
    table = SagaTable([SagaStep("later", nothing, delay_ms=500)], keep_ms=1)
    state, orders = table.begin("s", None, 1_000)
    assert (state.waits_for, state.due_ms, orders) == ("delay", 1_500, [])
    assert names(table.handle(state, "due", 1_600)) == ["do later"]


def test_keys_are_made_when_a_saga_begins() -> None:
    state, _ = TABLE.begin("s", {"key": "k"}, 0)
    assert state.keys == ["s", "s", "k"]
    with pytest.raises(KeyError):
        TABLE.begin("s", {}, 0)
    with pytest.raises(TypeError, match="expected text"):
        TABLE.begin("s", {"key": 7}, 0)


def test_a_step_that_the_program_does_not_have_is_refused_with_the_way_out() -> None:
    state = begun()
    fewer = SagaTable(STEPS[1:], keep_ms=1)
    with pytest.raises(SagaStepError, match=r"has the step 'one', which this program does not have.*Go back"):
        fewer.handle(state, "done", 0, reply("done"))
    state.status = "done"
    fewer.check(state)
    more = SagaTable([*STEPS, SagaStep("four", nothing)], keep_ms=1)
    more.check(begun())


def test_whatever_happens_a_saga_ends_once_its_compensations_work() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        state, _ = TABLE.begin("s", {"key": "k"}, 0)
        for now_ms in range(60):
            event = rng.choice(["done", "failed", "error", "timeout", "kept"]) if state.waits_for == "reply" else "due"
            TABLE.handle(state, event, now_ms, reply(event))
        for now_ms in range(60, 80):
            TABLE.handle(state, "done" if state.waits_for == "reply" else "due", now_ms, reply("done"))
        assert state.status in ENDED, seed


def test_steps_need_names_of_their_own() -> None:
    for steps in ([], [SagaStep("", nothing)], [STEPS[0], STEPS[0]]):
        with pytest.raises(ConfigError):
            check_steps(steps)


@pytest.mark.parametrize(
    ("option", "value"),
    [("timeout_ms", 0), ("timeout_ms", 1.5), ("retries", -1), ("backoff_ms", "1s"), ("delay_ms", 500.0)],
)
def test_numbers_of_a_step_are_whole(option: str, value: object) -> None:
    """With another, every saga of these steps would be set aside as one that cannot be started."""
    with pytest.raises(ConfigError, match=f"step 'pay' has {option}={value!r}"):
        check_steps([SagaStep("pay", nothing, **{option: value})])  # type: ignore[arg-type]


def test_waiting_for_a_saga_does_not_last_for_ever() -> None:
    with pytest.raises(ConfigError, match="a timeout is nan"):
        Sagas("transfer", [SagaStep("debit", print)]).wait("t-1", timeout_ms=float("nan"))
