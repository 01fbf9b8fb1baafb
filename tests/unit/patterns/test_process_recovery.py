"""Which errors the processing loop bears, and which end it."""

from __future__ import annotations

import pytest

from semel.client.errors import (
    AbortableError,
    CommitUncertainError,
    FatalError,
    FencedError,
    KafkaError,
    RetriableError,
    error_of,
)
from semel.patterns.process import FIRST_CONTACT_S, MAX_TIMEOUTS_IN_A_ROW, Processor
from semel.patterns.process_output import HOPELESS
from semel.protocol.errors import ErrorCode


def processor(instance: str | None = None, has_worked: bool = True, age_s: float = 0.0) -> Processor:
    made = Processor("in", "out", lambda record: record, application_id="app", instance=instance)
    made._has_worked = has_worked
    made._started_s -= age_s
    return made


@pytest.mark.parametrize("error", [RetriableError("busy"), AbortableError("lost"), CommitUncertainError("who knows")])
def test_transient_errors_are_borne_once_it_has_worked(error: KafkaError) -> None:
    assert processor()._can_go_on(error)


def test_trouble_before_the_first_success_ends_it_when_a_restart_cannot_be_the_cause_any_more() -> None:
    """It is most likely a wrong address or a missing topic: better said than retried for ever."""
    new, old = (processor(has_worked=False, age_s=age_s) for age_s in (FIRST_CONTACT_S / 2, FIRST_CONTACT_S))
    assert new._can_go_on(RetriableError("unreachable"))
    assert not old._can_go_on(RetriableError("unreachable"))


def test_fatal_errors_end_it() -> None:
    assert not processor()._can_go_on(FatalError("no rights"))


@pytest.mark.parametrize("code", HOPELESS)
def test_record_that_no_attempt_can_write_ends_it(code: ErrorCode) -> None:
    assert not processor()._can_go_on(AbortableError("the transaction has failed", code))


def test_fenced_instance_with_a_given_name_stops() -> None:
    assert not processor(instance="a")._can_go_on(FencedError("somebody took over"))


def test_fenced_instance_with_a_name_of_its_own_ran_into_the_timeout_and_goes_on_a_few_times() -> None:
    made = processor()
    for _ in range(MAX_TIMEOUTS_IN_A_ROW - 1):
        assert made._can_go_on(FencedError("timed out"))
    with pytest.raises(FatalError, match=r"in a row exceeded transaction_timeout_ms=10000.*lower max_records"):
        made._can_go_on(FencedError("timed out"))


def test_fenced_group_member_stops_whatever_its_name() -> None:
    assert not processor()._can_go_on(error_of(ErrorCode.FENCED_INSTANCE_ID, "heartbeat"))
