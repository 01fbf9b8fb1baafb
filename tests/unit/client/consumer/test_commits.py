"""The order of a consumer's commits, without a network and with a time that the test moves."""

from __future__ import annotations

import pytest

from semel.client.consumer.commits import NEVER_S, CommitsCore, PendingCommit
from semel.client.errors import ConnectionFailedError, KafkaError, RetriableError, TimedOutError, error_of
from semel.client.pauses import Pauses
from semel.client.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from semel.protocol.errors import ErrorCode

ME = GroupMetadata("g", 1, "m")
CUT = ConnectionFailedError("cut")


def core() -> CommitsCore:
    return CommitsCore(lambda: Pauses(100, 1000, lambda: 0.5))


def add(commits: CommitsCore, offset: int, retried: bool = False, timeout_s: float = 10.0) -> PendingCommit:
    return commits.add(ME, {TopicPartition("t", 0): OffsetAndMetadata(offset)}, None, timeout_s, 0.0, retried)


def send(commits: CommitsCore, now_s: float = 0.0) -> list[PendingCommit]:
    """All that may be sent now."""
    sent = []
    while (commit := commits.next_to_send(now_s)) is not None:
        commits.sent(commit)
        sent.append(commit)
    return sent


def test_commits_follow_each_other_without_waiting() -> None:
    commits = core()
    first, second = add(commits, 1), add(commits, 2)
    assert send(commits) == [first, second]
    commits.responded(first, None, 0.0)
    commits.responded(second, None, 0.0)
    assert (commits.take_finished(), commits.take_finished(), commits.take_finished()) == (first, second, None)
    assert not len(commits)


def test_commit_that_is_tried_again_goes_alone_and_nothing_overtakes_it() -> None:
    commits = core()
    before, retried, after = add(commits, 1), add(commits, 2, retried=True), add(commits, 3)
    assert send(commits) == [before]
    commits.responded(before, None, 0.0)
    assert send(commits) == [retried]
    commits.responded(retried, CUT, 0.0)
    assert commits.take_doubt()
    assert send(commits) == []
    assert commits.next_event_s(connecting=False) == pytest.approx(0.1)
    assert commits.next_event_s(connecting=True) == 10.0
    assert send(commits, 0.1) == [retried]
    commits.responded(retried, None, 0.2)
    assert send(commits, 0.2) == [after]


def test_commit_that_is_not_retried_fails_with_its_first_error() -> None:
    commits = core()
    commit = add(commits, 1)
    send(commits)
    commits.responded(commit, CUT, 0.0)
    assert commit.is_done
    assert commit.error is CUT


@pytest.mark.parametrize("code", [ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID])
def test_refused_commit_is_not_tried_again(code: ErrorCode) -> None:
    commits = core()
    commit = add(commits, 1, retried=True)
    send(commits)
    error: KafkaError = error_of(code, "committing")
    commits.responded(commit, error, 0.0)
    assert commit.error is error
    assert not commits.take_doubt()


def test_commit_that_cannot_be_sent_in_time_fails() -> None:
    commits = core()
    commit = add(commits, 1, retried=True, timeout_s=1.0)
    commits.unreachable(CUT, 0.0)
    assert commits.take_doubt()
    assert not commit.is_done
    commits.expire(1.0)
    assert isinstance(commit.error, TimedOutError)
    assert "within 1 s; the last try: cut" in str(commit.error)
    assert commits.next_event_s(connecting=False) == NEVER_S


def test_response_to_a_commit_that_nobody_waits_for_any_more_is_ignored() -> None:
    commits = core()
    commit = add(commits, 1, retried=True)
    send(commits)
    commits.withdraw(commit)
    commits.responded(commit, CUT, 11.0)
    assert isinstance(commit.error, TimedOutError)
    assert commits.take_finished() is None


# --- member epochs that go on ---

STALE = error_of(ErrorCode.STALE_MEMBER_EPOCH, "committing")
ME_LATER = GroupMetadata("g", 2, "m")


def test_commit_of_a_stale_epoch_is_sent_again_under_the_new_one() -> None:
    newest = ME
    commits = CommitsCore(lambda: Pauses(100, 1000, lambda: 0.5), lambda _: newest)
    commit = add(commits, 1, retried=True)
    assert [sent.member for sent in send(commits)] == [ME]
    commits.responded(commit, STALE, 0.0)
    assert not commits.take_doubt(), "the coordinator is the right one"
    assert [sent.member for sent in send(commits, 0.2)] == [ME], "the new epoch is not known yet"
    commits.responded(commit, STALE, 0.2)
    newest = ME_LATER
    assert [sent.member for sent in send(commits, 1.0)] == [ME_LATER]
    commits.responded(commit, None, 1.0)
    assert commit.is_done
    assert commit.error is None


def test_commit_of_a_member_that_lost_its_partitions_is_not_sent_again() -> None:
    commits = CommitsCore(lambda: Pauses(100, 1000, lambda: 0.5), lambda _: None)
    commit = add(commits, 1, retried=True)
    send(commits)
    commits.responded(commit, STALE, 0.0)
    assert commit.is_done
    assert commit.error is STALE


def test_commit_that_waited_goes_under_the_newest_epoch() -> None:
    commits = CommitsCore(lambda: Pauses(100, 1000, lambda: 0.5), lambda _: ME_LATER)
    add(commits, 1)
    assert [sent.member for sent in send(commits)] == [ME_LATER]


def test_stale_commit_that_is_not_retried_may_succeed_later() -> None:
    commits = CommitsCore(lambda: Pauses(100, 1000, lambda: 0.5), lambda _: ME_LATER)
    commit = add(commits, 1)
    send(commits)
    commits.responded(commit, STALE, 0.0)
    assert commit.is_done
    assert isinstance(commit.error, RetriableError)


def test_commit_that_waited_for_another_one_names_what_that_failed_with() -> None:
    commits = core()
    first, second, third = add(commits, 1, retried=True), add(commits, 2, timeout_s=1.0), add(commits, 3, timeout_s=9.0)
    send(commits)
    commits.responded(first, error_of(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "committing"), 0.0)
    commits.expire(1.0)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in str(second.error)
    commits.withdraw(third)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in str(third.error)
