"""The pure parts of the consumer protocol: assignors, steps towards a target, expressions, changes, records."""

from __future__ import annotations

import asyncio
import re
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.broker.expressions import ExpressionError
from semel.broker.groups.consumer.model import (
    NOTHING,
    ConsumerGroup,
    ConsumerGroupState,
    Current,
    CurrentSet,
    EpochSet,
    MemberState,
    Partitions,
    Subscription,
    SubscriptionSet,
    TargetEpochSet,
    TargetSet,
    compile_pattern,
    reconcile,
)
from semel.broker.groups.consumer.planner import ASSIGNORS, AssignableMember, assign_range, assign_uniform
from semel.broker.groups.records import change_of, record_of
from semel.protocol.messages import internal_topics as log
from tests.support.waiting import STALL_S

A, B = b"a" * 16, b"b" * 16
TOPICS = [A, B, b"c" * 16]

counts_of = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 12))


@st.composite
def situations(
    draw: st.DrawFn, alike: bool
) -> tuple[dict[str, AssignableMember], dict[bytes, int], dict[str, Partitions]]:
    """Members with wishes, topics, and what they had before: any mess that earlier epochs can have left."""
    counts = draw(counts_of)
    members = draw(st.lists(st.sampled_from("mnopqrs"), unique=True, min_size=1))
    some = st.frozensets(st.sampled_from(sorted(counts))) if counts else st.just(frozenset())
    shared = frozenset(counts)
    wishes = {member: AssignableMember(shared if alike else draw(some)) for member in members}
    every = [(topic, index) for topic in TOPICS for index in range(12)]
    owners = draw(st.dictionaries(st.sampled_from(every), st.sampled_from("mnopqrs")))
    before = {m: frozenset(part for part, owner in owners.items() if owner == m) for m in "mnopqrs"}
    return wishes, counts, before


def check_complete(
    wishes: dict[str, AssignableMember], counts: dict[bytes, int], targets: dict[str, Partitions]
) -> None:
    """Everything that somebody wants is given, once, to somebody who wants it."""
    assert targets.keys() == wishes.keys()
    given_out = [part for share in targets.values() for part in share]
    wanted = {(t, i) for t, n in counts.items() for i in range(n) if any(t in wish.topics for wish in wishes.values())}
    assert len(given_out) == len(set(given_out))
    assert set(given_out) == wanted
    assert all(topic in wishes[member].topics for member, share in targets.items() for topic, _ in share)


@pytest.mark.parametrize("name", ASSIGNORS)
@given(situations(alike=False))
def test_every_wanted_partition_is_assigned_once(name: str, situation: tuple) -> None:  # type: ignore[type-arg]
    wishes, counts, before = situation
    check_complete(wishes, counts, ASSIGNORS[name](wishes, counts, before))


@given(situations(alike=True))
def test_uniform_is_even_and_moves_as_little_as_it_can(situation: tuple) -> None:  # type: ignore[type-arg]
    wishes, counts, before = situation
    targets = assign_uniform(wishes, counts, before)
    check_complete(wishes, counts, targets)
    sizes = [len(share) for share in targets.values()]
    assert max(sizes) - min(sizes) <= 1
    kept = sum(len(targets[member] & before[member]) for member in wishes)
    fair, odd = divmod(sum(counts.values()), len(wishes))
    valid = sorted((len([p for p in before[m] if p[1] < counts.get(p[0], 0)]) for m in wishes), reverse=True)
    assert kept == sum(min(had, fair + (number < odd)) for number, had in enumerate(valid))
    assert assign_uniform(wishes, counts, targets) == targets, "an assignment that is fine stays"


@given(situations(alike=False))
def test_uniform_leaves_no_pair_that_could_share_better(situation: tuple) -> None:  # type: ignore[type-arg]
    wishes, counts, before = situation
    targets = assign_uniform(wishes, counts, before)
    for giver, share in targets.items():
        for topic, _ in share:
            for taker, wish in wishes.items():
                assert topic not in wish.topics or len(targets[taker]) >= len(targets[giver]) - 1


def test_large_groups_of_different_wishes_are_balanced_quickly() -> None:
    """The event loop waits for it. One member has much that nobody else may have; another one joins the third."""
    started_s = time.monotonic()
    wishes = {"m": AssignableMember(frozenset((A,))), "n": AssignableMember(frozenset((B,)))}
    counts = {A: 10_000, B: 6_000}
    before = assign_uniform(wishes, counts, {})
    targets = assign_uniform({**wishes, "o": wishes["n"]}, counts, before)
    assert {member: len(share) for member, share in targets.items()} == {"m": 10_000, "n": 3_000, "o": 3_000}
    assert targets["m"] == before["m"]
    assert targets["n"] < before["n"]
    assert time.monotonic() - started_s < STALL_S


def test_range_gives_neighbours_and_the_same_ones_in_every_topic() -> None:
    wishes = {member: AssignableMember(frozenset((A, B))) for member in ("m2", "m1")} | {
        "s": AssignableMember(frozenset((A, B)), "z")
    }
    targets = assign_range(wishes, {A: 7, B: 7}, {})
    assert {member: sorted(i for t, i in share if t == A) for member, share in targets.items()} == {
        "s": [0, 1, 2], "m1": [3, 4], "m2": [5, 6],
    }  # fmt: skip
    assert all({i for t, i in share if t == A} == {i for t, i in share if t == B} for share in targets.values())


# -- towards the target ------------------------------------------------------------------------------------------------
def parts(*indexes: int) -> Partitions:
    return frozenset((A, index) for index in indexes)


def since(epoch: int, *indexes: int) -> dict[tuple[bytes, int], int]:
    return dict.fromkeys(parts(*indexes), epoch)


def free(_: object) -> bool:
    return True


def test_member_at_its_target_stays() -> None:
    current = Current(5, 4, MemberState.STABLE, parts(0, 1))
    assert reconcile(current, 5, parts(0, 1), None, free) is current


def test_new_member_gets_what_is_free_at_once() -> None:
    new = Current(3, 0, MemberState.STABLE, parts(0, 1), since=since(3, 0, 1))
    assert reconcile(Current(), 3, parts(0, 1), NOTHING, free) == new


def test_member_waits_for_what_others_hold() -> None:
    waiting = reconcile(Current(), 3, parts(0, 1), NOTHING, lambda part: part[1] == 0)
    assert (waiting.epoch, waiting.state, waiting.assigned) == (3, MemberState.UNRELEASED, parts(0))
    assert reconcile(waiting, 3, parts(0, 1), None, free).assigned == parts(0, 1)


def test_member_gives_back_before_it_gets_the_next_epoch() -> None:
    had = Current(5, 4, MemberState.STABLE, parts(0, 1))
    revoking = reconcile(had, 6, parts(1, 2), parts(0, 1), free)
    assert (revoking.epoch, revoking.state) == (5, MemberState.UNREVOKED)
    assert (revoking.assigned, revoking.revoking) == (parts(1), parts(0))
    assert reconcile(revoking, 6, parts(1, 2), None, free) == revoking, "it did not say what it has"
    assert reconcile(revoking, 6, parts(1, 2), parts(0, 1), free) == revoking, "it still has it"
    done = reconcile(revoking, 6, parts(1, 2), parts(1), free)
    assert (done.epoch, done.previous_epoch, done.state, done.assigned) == (6, 5, MemberState.STABLE, parts(1, 2))
    assert done.revoking == NOTHING


def test_partition_that_the_member_already_let_go_needs_no_revocation() -> None:
    had = Current(5, 4, MemberState.STABLE, parts(0, 1))
    after = Current(6, 5, MemberState.STABLE, parts(1), since=since(5, 1))
    assert reconcile(had, 6, parts(1), parts(1), free) == after


def test_epoch_at_which_a_partition_came_stays_with_it_as_long_as_the_member_has_it() -> None:
    first = reconcile(Current(), 3, parts(0, 1), NOTHING, free)
    revoking = reconcile(first, 5, parts(1, 2), parts(0, 1), free)
    assert revoking.since == since(3, 0, 1)
    second = reconcile(revoking, 5, parts(1, 2), parts(1), free)
    assert second.since == since(3, 1) | since(5, 2)
    back = reconcile(second, 7, parts(0, 1, 2), parts(1, 2), free)
    assert back.since == since(3, 1) | since(5, 2) | since(7, 0)


@given(st.lists(st.tuples(st.frozensets(st.integers(0, 5)), st.booleans()), min_size=1, max_size=12))
def test_two_members_never_hold_the_same_partition(steps: list[tuple[frozenset[int], bool]]) -> None:
    """Targets change at random, members report what they have or stay silent: nothing is ever held twice."""
    group = ConsumerGroup("g")
    for member in "xy":
        group.apply(CurrentSet("g", member, Current()))
    for epoch, (share, reports) in enumerate(steps, 1):
        targets = {"x": parts(*share), "y": parts(*(set(range(6)) - share))}
        for member in "xyx":
            current = group.current[member]
            owned = current.assigned if reports else None
            group.apply(CurrentSet("g", member, reconcile(current, epoch, targets[member], owned, group.is_free)))
            held = [part for each in group.current.values() for part in each.assigned | each.revoking]
            assert len(held) == len(set(held))
    for _ in range(4):  # once everybody reports, everybody arrives
        for member in "xy":
            current = group.current[member]
            after = reconcile(current, len(steps), targets[member], current.assigned, group.is_free)
            group.apply(CurrentSet("g", member, after))
    assert {member: current.assigned for member, current in group.current.items()} == targets


# -- changes and records -----------------------------------------------------------------------------------------------
SUBSCRIPTION = Subscription("i", "rack", "client", "/host", ("t", "u"), "t.*", 60_000, "range")


@pytest.mark.parametrize(
    "change",
    [
        EpochSet("g", 7, -5),
        EpochSet("g", None),
        TargetEpochSet("g", 7, 123),
        TargetEpochSet("g", None),
        SubscriptionSet("g", "m", SUBSCRIPTION),
        SubscriptionSet("g", "m", Subscription(topics=("t",))),
        SubscriptionSet("g", "m", None),
        TargetSet("g", "m", frozenset(((A, 0), (A, 3), (B, 1)))),
        TargetSet("g", "m", NOTHING),
        TargetSet("g", "m", None),
        CurrentSet("g", "m", Current(7, 6, MemberState.UNREVOKED, parts(0, 2), parts(1), since(4, 0, 1) | since(7, 2))),
        CurrentSet("g", "m", None),
    ],
)
def test_changes_are_written_and_read_back(change: object) -> None:
    key, value = record_of(change)  # type: ignore[arg-type]
    assert key is not None
    assert change_of(int.from_bytes(key[:2], "big"), key, value) == change


def test_assignment_of_an_older_kafka_is_read_as_made_at_the_members_latest_epoch() -> None:
    topics = [log.CurrentTopicPartitions(A, [0, 2])]
    value = log.ConsumerGroupCurrentMemberAssignmentValue(-2, 6, 0, topics, [log.CurrentTopicPartitions(A, [1])])
    key, _ = record_of(CurrentSet("g", "m", None))
    body = b"\0\0" + log.CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE.encode(value, 0)
    assert key is not None
    read = change_of(8, key, body)
    assert isinstance(read, CurrentSet)
    assert read.value is not None
    assert read.value.since == since(6, 0, 1, 2)


def test_records_have_kafkas_bytes() -> None:
    assert record_of(EpochSet("g", 2, 0)) == (b"\0\3\0\1g", b"\0\0\0\0\0\2\0")
    assert record_of(TargetSet("g", "m", parts(0, 1))) == (
        b"\0\7\0\1g\0\1m", b"\0\0\2" + A + b"\3\0\0\0\0\0\0\0\1\0\0",
    )  # fmt: skip


def test_state_of_a_group_follows_its_epochs() -> None:
    group = ConsumerGroup("g")
    assert group.state is ConsumerGroupState.EMPTY
    group.apply(SubscriptionSet("g", "m", SUBSCRIPTION))
    group.apply(EpochSet("g", 2))
    assert group.state is ConsumerGroupState.ASSIGNING
    group.apply(TargetEpochSet("g", 2))
    assert group.state is ConsumerGroupState.RECONCILING
    group.apply(CurrentSet("g", "m", Current(2)))
    assert group.state is ConsumerGroupState.STABLE


def test_draft_does_not_touch_the_group_it_is_made_from() -> None:
    group = ConsumerGroup("g")
    group.apply(CurrentSet("g", "m", Current(1, 0, MemberState.STABLE, parts(0))))
    draft = group.copy()
    draft.apply(CurrentSet("g", "m", None))
    draft.apply(SubscriptionSet("g", "n", SUBSCRIPTION))
    assert not group.is_free((A, 0))
    assert draft.is_free((A, 0))
    assert (group.subscriptions, group.static_ids) == ({}, {})


# -- expressions -------------------------------------------------------------------------------------------------------
PATTERNS = [
    "abc", "a.*", "^a.*$", "(a|b)+c", "[a-c]{2,3}x?", r"t-\d+", "(?i)aB", "[^a]b", "a|b|", "(?:foo|bar)-.*",
    r"\w+\.\w+", "a{0,2}b", "^foo$|^bar$", "a^b", "a$b", "(^a|b)c", "x*$", "[]a]", "[a-]", r"[\w.]+", "a{2}", "a{2,}",
    "(a*)*b", "", r"a\.b", "(a|ab)(c|bcd)", ".+?-", r"\D+", "[^-._]*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@given(st.text("abcxfor-._0T", max_size=6))
@settings(deadline=None)  # the first one loads RE2
def test_expressions_mean_what_they_mean_elsewhere(pattern: str, name: str) -> None:
    assert compile_pattern(pattern).matches(name) == bool(re.fullmatch(pattern, name))


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "[a", "*a", "a{3,2}", r"(a)\1", "(?=a)", "(?<=a)b", "a{1001}", "((a{99}){99}){99}", "\\"],
)
def test_expressions_that_cannot_be_used_are_refused(pattern: str) -> None:
    with pytest.raises(ExpressionError):
        compile_pattern(pattern)


def test_no_expression_takes_long() -> None:
    """Python's own engine would need longer than the universe for the first one."""
    started_s = time.monotonic()
    for pattern in ("(a+)+b", "(a|a)*b", "(a*)*(a*)*b", "(.*)*x"):
        assert not compile_pattern(pattern).matches("a" * 249)
    assert time.monotonic() - started_s < STALL_S


@pytest.mark.parametrize("pattern", ["a" * 5000, r"\PL" * 100, "[a-z]{1,300}" * 100], ids=lambda text: text[:8])
def test_an_expression_that_takes_long_to_compile_is_refused(pattern: str) -> None:
    """RE2 holds the GIL while it compiles; with its default limits the last one takes it seconds."""
    with pytest.raises(ExpressionError):
        compile_pattern(pattern)


def test_names_that_an_expression_has_seen_are_not_matched_again() -> None:
    pattern = compile_pattern("topic-.*7")
    names = [f"topic-{number}" for number in range(1000)]
    asyncio.run(pattern.look_at(names))
    pattern._expression = None  # type: ignore[assignment]  # any further match would fail
    assert sum(map(pattern.matches, names)) == 100


def test_members_are_listed_in_the_order_of_their_names() -> None:
    topics = [record_of(TargetSet("g", "m", frozenset(((B, 1), (A, 2), (A, 0)))))[1] or b""]
    assert all(topics[0].index(first) < topics[0].index(second) for first, second in pairwise((A, B)))
