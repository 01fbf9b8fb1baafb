"""The consumer's options and its retry budget."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from semel.client.consumer.fetching import RetryBudget
from semel.client.errors import (
    ConfigError,
    ConnectionFailedError,
    IllegalStateError,
    RequestTimedOutError,
    TimedOutError,
)
from semel.client.settings import ConsumerSettings
from semel.client.types import CorruptRecordError, TopicPartition
from semel.protocol.errors import ErrorCode


def settings(**options: object) -> ConsumerSettings:
    return ConsumerSettings.of({"bootstrap.servers": "localhost:9092"}, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_id": ""}, r"group\.id is empty"),
        ({"group_instance_id": "x"}, r"needs a group\.id"),
        ({"auto_offset_reset": "newest"}, "earliest, latest, none"),
        ({"isolation_level": "serializable"}, "read_committed"),
        ({"heartbeat_interval_ms": 50_000}, r"below session\.timeout\.ms"),
        ({"partition_assignment_strategy": "fair"}, "range, roundrobin, sticky, cooperative-sticky"),
        ({"partition_assignment_strategy": ""}, "one or more of"),
        ({"max_poll_records": 0}, "above 0"),
        ({"session_timeout_ms": -1}, "positive"),
        ({"max_poll_record": 5}, r"did you mean 'max\.poll\.records'"),
        ({"fetch_max_bytes": "many"}, "expected int"),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session_timeout_ms": 10_000}, r"session\.timeout\.ms cannot be set when group\.protocol=consumer"),
        ({"session_timeout_ms": 45_000}, r"session\.timeout\.ms cannot be set"),
        ({"heartbeat_interval_ms": 1_000}, r"heartbeat\.interval\.ms cannot be set when group\.protocol=consumer"),
        (
            {"partition_assignment_strategy": "range"},
            r"partition\.assignment\.strategy cannot be set.*remote\.assignor",
        ),
        (
            {"group_protocol": "classic", "group_remote_assignor": "range"},
            r"cannot be set when group\.protocol=classic",
        ),
        ({"group_protocol": "new"}, "classic, consumer"),
    ],
)
def test_options_of_the_other_group_protocol_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**{"group_id": "g", "group_protocol": "consumer", **options})


def test_options_of_the_other_group_protocol_are_refused_later_too() -> None:
    chosen = settings(group_id="g", group_protocol="consumer", group_remote_assignor="uniform")
    assert chosen.replace(max_poll_records=1).group_protocol == "consumer"
    with pytest.raises(ConfigError, match="cannot be set"):
        chosen.replace(session_timeout_ms=10_000)


def test_read_committed_is_the_default() -> None:
    assert settings().reads_committed
    assert settings().isolation == 1
    assert settings(isolation_level="read_uncommitted").isolation == 0


def test_settings_and_errors_travel_between_processes() -> None:
    given = settings(group_id="g", partition_assignment_strategy="sticky,range")
    assert pickle.loads(pickle.dumps(given)) == given
    error = CorruptRecordError("broken", ErrorCode.CORRUPT_MESSAGE, TopicPartition("t", 1), 5)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.partition, copy.offset) == ("broken", error.code, ("t", 1), 5)


def test_importing_the_consumer_loads_neither_numpy_nor_pyarrow() -> None:
    code = "import sys, semel.client.consumer; print('numpy' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# --- the retry budget ---


@pytest.fixture
def retry_budget() -> RetryBudget:
    return RetryBudget(60)


REFUSED = ConnectionFailedError("connection refused", ErrorCode.NETWORK_EXCEPTION)
LATE = RequestTimedOutError("no answer", ErrorCode.REQUEST_TIMED_OUT)


def test_refused_first_connection_is_raised_when_poll_ends(retry_budget: RetryBudget) -> None:
    retry_budget.failed(REFUSED, 0)
    retry_budget.check(0, poll_ends=False, was_reached=False)
    with pytest.raises(TimedOutError, match="connection refused"):
        retry_budget.check(0, poll_ends=True, was_reached=False)


def test_after_the_first_contact_errors_are_retried_up_to_the_limit(retry_budget: RetryBudget) -> None:
    """Also where no request has succeeded yet: the connection may have been cut in the middle of the first."""
    retry_budget.failed(REFUSED, 0)
    retry_budget.failed(REFUSED, 59)
    retry_budget.check(59, poll_ends=True, was_reached=True)
    with pytest.raises(TimedOutError, match="for 60 s"):
        retry_budget.check(60, poll_ends=False, was_reached=True)


def test_success_resets_the_retry_budget(retry_budget: RetryBudget) -> None:
    retry_budget.failed(REFUSED, 0)
    retry_budget.succeeded()
    retry_budget.check(100, poll_ends=True, was_reached=False)


def test_retry_budget_counts_from_the_start_of_the_failed_attempt(retry_budget: RetryBudget) -> None:
    """An attempt may itself take as long as the limit."""
    retry_budget.failed(LATE, since_s=40)
    with pytest.raises(TimedOutError, match="for 60 s"):
        retry_budget.check(100, poll_ends=False, was_reached=True)


def test_consumer_dropped_without_close_leaves_no_descriptor_behind() -> None:
    import gc
    import os

    from semel.client.consumer import Consumer

    Consumer(bootstrap_servers="localhost:9092")
    gc.collect()
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        Consumer(bootstrap_servers="localhost:9092", group_id="g").subscribe(["t"])
    gc.collect()
    assert len(os.listdir("/dev/fd")) <= before


def test_transaction_refuses_the_offsets_of_a_consumer_that_commits_them_itself() -> None:
    """Both would commit: after an abort of the transaction the records were skipped."""
    from semel.client.consumer import Consumer
    from semel.client.producer import Producer

    address = {"bootstrap_servers": "127.0.0.1:1"}
    with (
        Consumer(**address, group_id="g") as automatic,
        Consumer(**address, group_id="g", enable_auto_commit=False) as manual,
        Producer(**address, transactional_id="t") as producer,
    ):
        with pytest.raises(ConfigError, match=r"enable_auto_commit=False"):
            producer.send_offsets_to_transaction({("t", 0): 1}, automatic.group_metadata())
        with pytest.raises(IllegalStateError, match="uninitialized"):  # nothing else is wrong with it
            producer.send_offsets_to_transaction({("t", 0): 1}, manual.group_metadata())
