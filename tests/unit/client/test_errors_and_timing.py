"""Errors know their recovery and survive pickling; deadlines and back-off follow an injected clock."""

from __future__ import annotations

import pickle
import threading

import pytest

from semel.client.errors import (
    AbortableError,
    AuthenticationError,
    ConfigError,
    ConnectionFailedError,
    DeliveryTimedOutError,
    FatalError,
    FencedError,
    KafkaError,
    RecordTooLargeError,
    RequestTimedOutError,
    RetriableError,
    TimedOutError,
    error_of,
)
from semel.client.producer.accumulator import StickyPartitioner
from semel.client.producer.coordinator import EndUnknownError
from semel.client.timing import Backoff, Deadline
from semel.protocol.errors import ErrorCode, Recovery


@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.NONE], ids=lambda code: code.name)
def test_every_code_becomes_an_error_of_its_recovery(code: ErrorCode) -> None:
    error = error_of(code, "doing something", "the broker's words")
    assert error.code is code
    assert code.name in str(error)
    assert "the broker's words" in str(error)
    if type(error) in (RetriableError, AbortableError, FencedError, FatalError):
        assert error.recovery is code.recovery


def test_special_codes_have_classes_of_their_own() -> None:
    assert isinstance(error_of(58, "x"), AuthenticationError)
    assert isinstance(error_of(10, "x"), RecordTooLargeError)
    assert isinstance(error_of(90, "x"), FencedError)
    assert isinstance(error_of(120, "x"), AbortableError)
    assert "error 9999" in str(error_of(9999, "x"))


@pytest.mark.parametrize("kind", [KafkaError, TimedOutError, DeliveryTimedOutError, FencedError])
def test_errors_cross_process_borders(kind: type[KafkaError]) -> None:
    error = kind("what happened", ErrorCode.NOT_COORDINATOR)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.code) == (kind, "what happened", ErrorCode.NOT_COORDINATOR)


def test_connection_errors_remember_whether_the_request_may_have_arrived() -> None:
    for kind in (ConnectionFailedError, RequestTimedOutError, EndUnknownError):
        copy = pickle.loads(pickle.dumps(kind("cut", None, True)))
        assert (str(copy), copy.maybe_sent) == ("cut", True)
        assert copy.recovery is Recovery.RETRY
    assert isinstance(RequestTimedOutError("late"), TimeoutError)
    assert isinstance(TimedOutError("late"), TimeoutError)


def test_a_deadline_counts_down_to_zero() -> None:
    now = [100.0]
    deadline = Deadline(5, lambda: now[0])
    assert deadline.remaining_s() == 5
    now[0] = 104
    assert (deadline.remaining_s(), deadline.expired) == (1, False)
    now[0] = 200
    assert (deadline.remaining_s(), deadline.expired) == (0, True)


@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 1e10])
def test_a_deadline_of_ever_is_one_that_the_system_can_wait_for(seconds: float) -> None:
    deadline = Deadline(seconds, lambda: 100.0)
    assert not deadline.expired
    assert 1e8 < deadline.remaining_s() < threading.TIMEOUT_MAX
    assert int(deadline.remaining_s() * 1000) > 0  # as requests say it
    assert deadline.total_s == seconds


def test_a_deadline_that_is_no_number_is_refused() -> None:
    """It is neither reached nor not: a poll would go round for ever."""
    with pytest.raises(ConfigError, match="a timeout is nan"):
        Deadline(float("nan"))


def test_back_off_doubles_up_to_its_limit_and_varies_by_a_fifth() -> None:
    middle = Backoff(100, 1000, lambda: 0.5)
    assert [round(middle.next_s(), 3) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    middle.reset()
    assert round(middle.next_s(), 3) == 0.1
    assert round(Backoff(100, 1000, lambda: 0.0).next_s(), 3) == 0.08
    assert round(Backoff(100, 1000, lambda: 1.0).next_s(), 3) == 0.12


def test_a_sticky_partition_changes_when_its_batch_is_full_and_never_to_itself() -> None:
    sticky = StickyPartitioner(100, lambda count: 0)
    chosen = [sticky.partition("t", 3, 50) for _ in range(8)]
    assert chosen == [0, 0, 1, 1, 2, 2, 0, 0]
    assert sticky.partition("other", 1, 50) == 0
    assert StickyPartitioner(100, lambda count: count - 1).partition("t", 3, 1) == 2
