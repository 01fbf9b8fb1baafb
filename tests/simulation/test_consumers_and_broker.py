"""Groups of consumers, their writers and a broker in simulated worlds: what must never happen, and that it would be
found if it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.client.consumer import decode
from semel.client.consumer.commits import CommitsCore, PendingCommit
from semel.client.consumer.core import Rebalancer
from semel.client.consumer.fetcher import FetchFailure
from semel.client.consumer.fetching import FetchingCore
from semel.client.group.consumer_protocol_core import ConsumerProtocolCore
from semel.client.group.core import MemberCore
from semel.client.group.membership import MembershipChange
from tests.simulation.group_workload import consumers
from tests.simulation.shrink import run, shrink

SEEDS = range(3)  # fresh ones are in test_g5
HUNTED = 40  # seeds, in which each deliberate bug must be found


def test_group_reads_everything_in_order_and_never_behind_a_commit(tmp_path: Path) -> None:
    faults = 0
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload consumers --seed {seed}"')
        faults += consumers(seed, tmp_path / str(seed)).faults
    assert faults > 50


@pytest.mark.full  # half a minute of processor time
def test_faults_that_a_broken_promise_does_not_need_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    send_the_newest_commit_first(monkeypatch)
    for seed in range(HUNTED):
        world, error = run(consumers, seed)
        if error is not None and world.strikes >= 4:
            break
    left_out = shrink(consumers, seed)
    assert len(left_out) >= world.strikes // 2
    _, error = run(consumers, seed, left_out)
    assert isinstance(error, AssertionError)


# --- deliberate bugs ---


def give_partitions_back_without_a_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rebalancer, "_is_committed", lambda *_: True)


def ignore_max_poll_interval(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemberCore, "_is_too_slow", lambda *_: False)


def drop_what_was_read_ahead_when_out_of_range(patch: pytest.MonkeyPatch) -> None:
    on_out_of_range = FetchingCore._on_out_of_range

    def at_once(core: FetchingCore, failure: FetchFailure, now_s: float) -> None:
        failure.state.position = failure.state.fetch_offset
        on_out_of_range(core, failure, now_s)

    patch.setattr(FetchingCore, "_on_out_of_range", at_once)


def keep_the_leader_that_says_it_is_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FetchingCore, "take_doubted", lambda _: [])


def keep_the_coordinator_that_cannot_be_reached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemberCore, "take_doubt", lambda _: False)
    patch.setattr(CommitsCore, "take_doubt", lambda _: False)


def send_the_newest_commit_first(patch: pytest.MonkeyPatch) -> None:
    def newest(core: CommitsCore, now_s: float) -> PendingCommit | None:
        unsent = [commit for commit in core._queue if not commit.is_sent and commit.retry_at_s <= now_s]
        return unsent[-1] if unsent else None

    patch.setattr(CommitsCore, "next_to_send", newest)


def show_records_of_aborted_transactions(patch: pytest.MonkeyPatch) -> None:
    record_set = decode._record_set
    patch.setattr(decode, "_record_set", lambda chunk, _: record_set(chunk, False))


def take_an_old_heartbeat_s_error_for_the_generation_s(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemberCore, "_is_current", lambda *_: True)


def acknowledge_before_partitions_are_given_back(patch: pytest.MonkeyPatch) -> None:
    take_change = ConsumerProtocolCore.take_change

    def acknowledging(core: ConsumerProtocolCore) -> MembershipChange:
        change = take_change(core)
        if change.assignment is not None:
            core.adopted(change.assignment, False)
        return change

    patch.setattr(ConsumerProtocolCore, "take_change", acknowledging)


def stay_although_the_program_does_not_poll(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerProtocolCore, "_is_too_slow", lambda *_: False)


PROTOCOL_BUGS: list[Callable[[pytest.MonkeyPatch], Any]] = [
    acknowledge_before_partitions_are_given_back,
    give_partitions_back_without_a_commit,
    stay_although_the_program_does_not_poll,
]

BUGS: list[Callable[[pytest.MonkeyPatch], Any]] = [
    give_partitions_back_without_a_commit,
    ignore_max_poll_interval,
    drop_what_was_read_ahead_when_out_of_range,
    keep_the_leader_that_says_it_is_none,
    keep_the_coordinator_that_cannot_be_reached,
    send_the_newest_commit_first,
    show_records_of_aborted_transactions,
    take_an_old_heartbeat_s_error_for_the_generation_s,
]


LONG_HUNTS = {  # they take many seeds: `make test-full`
    drop_what_was_read_ahead_when_out_of_range,
    keep_the_leader_that_says_it_is_none,
    acknowledge_before_partitions_are_given_back,
}
CASES = [*((bug, None) for bug in BUGS), *((bug, "consumer") for bug in PROTOCOL_BUGS)]


@pytest.mark.parametrize(
    ("bug", "protocol"),
    [
        pytest.param(
            bug,
            protocol,
            id=f"{bug.__name__}-{protocol or 'drawn'}",
            marks=[pytest.mark.full] if bug in LONG_HUNTS else [],
        )
        for bug, protocol in CASES
    ],
)
def test_a_deliberate_bug_in_consumers_is_found(
    bug: Callable[[pytest.MonkeyPatch], Any], protocol: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    for seed in range(HUNTED):
        try:
            consumers(seed, tmp_path / str(seed), protocol=protocol)
        except AssertionError as error:
            print(seed, error)
            return
    pytest.fail(f"not found in {HUNTED} seeds")
