"""What a rebalance does when the program's listener raises or leaves the group: the partitions are given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from semel.client.consumer.assigned_partitions import AssignedPartitions
from semel.client.consumer.core import ConsumerCore, RebalanceListener, Rebalancer, TopicSubscription
from semel.client.group.membership import MembershipChange
from semel.client.immediate import run
from semel.client.metadata import Metadata
from semel.client.settings import ConsumerSettings
from semel.client.types import TopicPartition

MINE = [TopicPartition("t", number) for number in range(4)]


class Surprise(Exception):
    pass


class Member:
    group_id = "g"
    wants_to_join = True
    is_fenced = False

    def __init__(self, is_cooperative: bool) -> None:
        self.is_cooperative = is_cooperative
        self.rejoined = 0
        self.change = MembershipChange()

    def take_change(self) -> MembershipChange:
        return self.change

    def adopted(self, partitions: object, gave_back: bool) -> None:
        self.rejoined += self.is_cooperative and gave_back


class Raising(RebalanceListener):
    def __init__(self, at: str) -> None:
        self._at = at
        self.calls: list[tuple[str, list[TopicPartition]]] = []

    def _note(self, name: str, partitions: list[TopicPartition]) -> None:
        self.calls.append((name, partitions))
        if name == self._at:
            raise Surprise(name)

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self._note("assigned", partitions)

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self._note("revoked", partitions)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self._note("lost", partitions)


def rebalancer_of(
    listener: RebalanceListener, is_cooperative: bool = False, commit: Any = lambda: None
) -> tuple[Rebalancer, AssignedPartitions, Member]:
    member, assigned = Member(is_cooperative), AssignedPartitions()
    assigned.assign(MINE)
    return Rebalancer(member, assigned, listener, commit), assigned, member  # type: ignore[arg-type]


def test_partitions_are_given_back_although_the_listener_raised_before_a_join() -> None:
    listener = Raising("revoked")
    rebalancer, assigned, _ = rebalancer_of(listener)
    with pytest.raises(Surprise):
        run(rebalancer.prepare(frozenset(["t"])))
    assert assigned.partitions == set()
    assert run(rebalancer.prepare(frozenset(["t"])))  # the next poll goes on with the join, and calls it once
    assert listener.calls == [("revoked", MINE)]


def test_new_assignment_is_adopted_although_the_listener_raised_for_what_was_revoked() -> None:
    listener = Raising("revoked")
    rebalancer, assigned, member = rebalancer_of(listener, is_cooperative=True)
    new = TopicPartition("t", 9)
    run(rebalancer.apply_change(False, [MINE[0], new]))
    with pytest.raises(Surprise):
        run(rebalancer.adopt())
    assert assigned.partitions == {MINE[0], new}
    assert member.rejoined == 1
    assert listener.calls == [("revoked", MINE[1:]), ("assigned", [new])]


@pytest.mark.parametrize("is_cooperative", [False, True])
def test_new_assignment_is_adopted_although_the_listener_raised_for_it(is_cooperative: bool) -> None:
    rebalancer, assigned, _ = rebalancer_of(Raising("assigned"), is_cooperative)
    run(rebalancer.apply_change(False, MINE[:1]))
    with pytest.raises(Surprise):
        run(rebalancer.adopt())
    assert assigned.partitions == {MINE[0]}
    assert run(rebalancer.adopt())  # nothing is left to do


def test_assignment_that_follows_a_loss_is_not_lost_with_the_listener_s_error() -> None:
    rebalancer, assigned, _ = rebalancer_of(Raising("lost"))
    with pytest.raises(Surprise):
        run(rebalancer.apply_change(True, MINE[2:]))
    assert assigned.partitions == set()
    run(rebalancer.adopt())
    assert assigned.partitions == set(MINE[2:])


@pytest.mark.parametrize("is_cooperative", [False, True])
def test_partitions_are_committed_before_they_are_given_back(is_cooperative: bool) -> None:
    """The commit comes first, while all is owned, and the listener waits for its end."""
    listener, commit = Raising("nothing"), SimpleNamespace(is_done=False)
    owned_at_commit: list[set[TopicPartition]] = []

    def start_commit() -> SimpleNamespace:
        owned_at_commit.append(set(assigned.partitions))
        return commit

    rebalancer, assigned, _ = rebalancer_of(listener, is_cooperative, start_commit)
    for _ in range(2):
        assert not run(rebalancer.prepare(frozenset(["other"])))
        assert rebalancer.is_revoking
    assert owned_at_commit == [set(MINE)]
    assert assigned.partitions == set(MINE)
    assert listener.calls == []
    commit.is_done = True
    assert run(rebalancer.prepare(frozenset(["other"])))
    assert listener.calls == [("revoked", MINE)]
    assert assigned.partitions == set()
    assert not rebalancer.is_revoking


def test_partitions_that_another_gets_are_committed_before_they_are_given_up() -> None:
    listener, commit = Raising("nothing"), SimpleNamespace(is_done=False)
    rebalancer, assigned, member = rebalancer_of(listener, True, lambda: commit)
    run(rebalancer.apply_change(False, MINE[:1]))
    assert not run(rebalancer.adopt())
    assert assigned.partitions == set(MINE)
    assert (listener.calls, member.rejoined) == ([], 0)
    commit.is_done = True
    assert run(rebalancer.adopt())
    assert assigned.partitions == {MINE[0]}
    assert listener.calls == [("revoked", MINE[1:]), ("assigned", [])]


def test_commit_before_a_loss_does_not_stand_for_a_later_one() -> None:
    commits = [SimpleNamespace(is_done=False), SimpleNamespace(is_done=False)]
    started = iter(commits)
    rebalancer, assigned, _ = rebalancer_of(Raising("nothing"), False, lambda: next(started))
    assert not run(rebalancer.prepare(frozenset(["t"])))
    run(rebalancer.apply_change(True, None))
    commits[0].is_done = True
    run(rebalancer.apply_change(False, MINE))
    assert run(rebalancer.adopt())
    assert not run(rebalancer.prepare(frozenset(["t"])))  # the second one is on its way
    assert assigned.partitions == set(MINE)


def test_what_a_listener_is_called_for_ends_before_a_turn_that_it_runs_does_anything() -> None:
    """As position() does: the member must not join before what it gives back was given back."""

    class Turning(Raising):
        def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
            super().on_partitions_revoked(partitions)
            followed.append(run(core.follow_group()))
            delivering.append(core.is_delivering)

    followed: list[bool] = []
    delivering: list[bool] = []
    member, listener = Member(is_cooperative=False), Turning("nothing")
    settings = ConsumerSettings.of(bootstrap_servers="127.0.0.1:1", group_id="g")
    core = ConsumerCore(settings, Metadata(), lambda: 0.5, lambda: None)
    core.subscribe(member, TopicSubscription(["t"]), listener)  # type: ignore[arg-type]
    core.assigned.assign(MINE)
    assert run(core.is_ready_to_join())
    assert (followed, delivering) == ([False], [False])
    assert listener.calls == [("revoked", MINE)]
    assert core.assigned.partitions == set()


class Leaving(Raising):
    """Closes its consumer, or unsubscribes it, as far as its core knows of that."""

    core: ConsumerCore

    def _note(self, name: str, partitions: list[TopicPartition]) -> None:
        self.calls.append((name, partitions))
        if name == self._at:
            run(self.core.leave())


def leaving(at: str, is_cooperative: bool, owned: list[TopicPartition]) -> tuple[ConsumerCore, Leaving, Member]:
    member, listener = Member(is_cooperative), Leaving(at)
    core = ConsumerCore(
        ConsumerSettings.of(bootstrap_servers="127.0.0.1:1", group_id="g"), Metadata(), lambda: 0.5, lambda: None
    )
    core.subscribe(member, TopicSubscription(["t"]), listener)  # type: ignore[arg-type]
    core.assigned.assign(owned)
    listener.core = core
    return core, listener, member


def test_listener_that_leaves_when_partitions_are_revoked_is_not_called_for_them_again() -> None:
    core, listener, _ = leaving("revoked", False, MINE)
    assert not run(core.is_ready_to_join())
    assert listener.calls == [("revoked", MINE)]
    assert (core.member, core.assigned.partitions) == (None, set())


def test_listener_that_leaves_is_called_once_for_what_it_kept() -> None:
    core, listener, member = leaving("revoked", True, MINE)
    member.change = MembershipChange(assignment=MINE[1:])
    assert not run(core.follow_group())
    assert listener.calls == [("revoked", MINE[:1]), ("revoked", MINE[1:])]
    assert (core.member, core.assigned.partitions, member.rejoined) == (None, set(), 0)


@pytest.mark.parametrize("is_cooperative", [False, True])
def test_listener_that_leaves_when_partitions_are_assigned_gives_them_back(is_cooperative: bool) -> None:
    core, listener, member = leaving("assigned", is_cooperative, [])
    member.change = MembershipChange(assignment=MINE)
    assert not run(core.follow_group())
    assert listener.calls == [("assigned", MINE), ("revoked", MINE)]
    assert (core.member, core.assigned.partitions) == (None, set())


def test_listener_that_leaves_when_partitions_are_lost_takes_on_no_others() -> None:
    core, listener, member = leaving("lost", False, MINE)
    member.change = MembershipChange(lost=True, assignment=MINE[:1])
    assert not run(core.follow_group())
    assert listener.calls == [("lost", MINE)]
    assert (core.member, core.assigned.partitions) == (None, set())
