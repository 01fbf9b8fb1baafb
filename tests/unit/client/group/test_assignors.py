"""Sharing partitions out: fair, complete, like Kafka's own, and with few moves."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.client.group.assignors import (
    ASSIGNORS,
    COOPERATIVE_STICKY,
    RANGE,
    ROUND_ROBIN,
    STICKY,
    SubscribedMember,
    decode_assignment,
    decode_member,
    encode_assignment,
    encode_subscription,
)
from semel.protocol.errors import DecodeError


def member(
    name: str, *topics: str, owned: object = (), generation: int = -1, instance: str | None = None
) -> SubscribedMember:
    return SubscribedMember(name, instance, frozenset(topics), frozenset(owned), generation)  # type: ignore[arg-type]


def counts(assignment: dict[str, list[tuple[str, int]]]) -> list[int]:
    return sorted(len(share) for share in assignment.values())


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[SubscribedMember], dict[str, int]]:
    topics = [f"t{index}" for index in range(draw(st.integers(1, 4)))]
    partition_counts = {topic: draw(st.integers(0, 9)) for topic in topics}
    members = []
    for index in range(draw(st.integers(1, 6))):
        wanted = draw(st.sets(st.sampled_from(topics), min_size=1))
        owned = {(topic, part) for topic in wanted for part in range(partition_counts[topic]) if draw(st.booleans())}
        generation = draw(st.integers(-1, 3))
        members.append(member(f"m{index}", *wanted, owned=owned if generation >= 0 else (), generation=generation))
    return members, partition_counts


@pytest.mark.parametrize("name", ["range", "roundrobin", "sticky"])
@given(group=groups())
def test_every_partition_goes_to_exactly_one_member_that_asked_for_it(name, group):
    members, partition_counts = group
    assignment = ASSIGNORS[name].share(members, partition_counts)
    given_out = [partition for share in assignment.values() for partition in share]
    wanted = {topic for m in members for topic in m.topics}
    assert sorted(given_out) == sorted((t, p) for t in wanted for p in range(partition_counts[t]))
    assert all(topic in m.topics for m in members for topic, _ in assignment[m.member_id])


@given(group=groups())
def test_sticky_is_as_even_as_subscriptions_allow(group):
    members, partition_counts = group
    shares = STICKY.share(members, partition_counts)
    for giver in members:
        for taker in members:
            movable = [part for part in shares[giver.member_id] if part[0] in taker.topics]
            if movable:
                assert len(shares[giver.member_id]) - len(shares[taker.member_id]) <= 1


@given(group=groups())
def test_cooperative_rebalance_never_gives_a_partition_to_two_members(group):
    """Also while a stale member still claims what it once had."""
    members, partition_counts = group
    shares = COOPERATIVE_STICKY.share(members, partition_counts)
    holders = {part: m.member_id for m in members for part in m.owned}
    for m in members:
        for part in shares[m.member_id]:
            assert holders.get(part, m.member_id) == m.member_id


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000))
def test_cooperative_group_settles_within_two_rebalances_after_a_change(seed):
    rng = random.Random(seed)
    partition_counts = {"a": rng.randint(1, 12), "b": rng.randint(1, 5)}
    members = {f"m{i}": member(f"m{i}", "a", "b") for i in range(rng.randint(1, 5))}
    for generation in range(4):
        joined = member(f"n{generation}", "a", "b")
        members[joined.member_id] = joined
        if len(members) > 2 and rng.random() < 0.5:
            members.pop(rng.choice(sorted(members)))
        for _ in range(2):
            shares = COOPERATIVE_STICKY.share(list(members.values()), partition_counts)
            members = {
                name: m._replace(owned=frozenset(shares[name]), generation=generation) for name, m in members.items()
            }
        total = sum(partition_counts.values())
        assert sum(counts(shares)) == total
        assert max(counts(shares)) - min(counts(shares)) <= 1


def test_sticky_moves_nothing_when_nothing_changed():
    first = STICKY.share([member("a", "t"), member("b", "t")], {"t": 7})
    again = STICKY.share(
        [member(name, "t", owned=share, generation=1) for name, share in first.items()],
        {"t": 7},
    )
    assert again == first


def test_sticky_moves_only_what_a_new_member_needs():
    first = STICKY.share([member("a", "t"), member("b", "t")], {"t": 8})
    members = [member(name, "t", owned=share, generation=1) for name, share in first.items()]
    then = STICKY.share([*members, member("c", "t")], {"t": 8})
    moved = sum(len(set(first[name]) - set(then[name])) for name in first)
    assert moved == 2
    assert counts(then) == [2, 3, 3]


def test_newest_generation_wins_a_partition_that_two_claim():
    old = member("a", "t", owned={("t", 0)}, generation=1)
    new = member("b", "t", owned={("t", 0)}, generation=2)
    assert STICKY.share([old, new], {"t": 1}) == {"a": [], "b": [("t", 0)]}


def test_range_gives_kafkas_result():
    members = [member("c1", "t", "u"), member("c0", "t", "u"), member("c2", "u")]
    assert RANGE.share(members, {"t": 3, "u": 4}) == {
        "c0": [("t", 0), ("t", 1), ("u", 0), ("u", 1)],
        "c1": [("t", 2), ("u", 2)],
        "c2": [("u", 3)],
    }


def test_round_robin_gives_kafkas_result():
    """The example of Kafka's documentation: unequal subscriptions give an unequal result."""
    members = [member("C0", "t0"), member("C1", "t0", "t1"), member("C2", "t0", "t1", "t2")]
    assert ROUND_ROBIN.share(members, {"t0": 1, "t1": 2, "t2": 3}) == {
        "C0": [("t0", 0)],
        "C1": [("t1", 0)],
        "C2": [("t1", 1), ("t2", 0), ("t2", 1), ("t2", 2)],
    }


def test_static_members_keep_their_range_after_a_restart():
    before = RANGE.share([member("x-1", "t", instance="i1"), member("y-1", "t", instance="i2")], {"t": 2})
    after = RANGE.share([member("z-9", "t", instance="i1"), member("a-9", "t", instance="i2")], {"t": 2})
    assert before == {"x-1": [("t", 0)], "y-1": [("t", 1)]}
    assert after == {"z-9": [("t", 0)], "a-9": [("t", 1)]}


@pytest.mark.parametrize("assignor", ASSIGNORS.values(), ids=ASSIGNORS)
def test_subscription_survives_the_wire(assignor):
    owned = {("t", 1), ("t", 0), ("u", 5)}
    data = encode_subscription(["u", "t"], owned, 4, assignor)
    read = decode_member("m", "i", data, assignor)
    assert read.topics == {"t", "u"}
    assert read.owned == (owned if assignor.sends_owned else frozenset())
    assert read.generation == 4


def test_subscriptions_of_older_clients_are_read():
    version_0 = bytes.fromhex("000000000001000174ffffffff")
    version_1 = bytes.fromhex("000100000001000174ffffffff000000010001740000000100000003")
    assert decode_member("m", None, version_0, RANGE) == member("m", "t")
    assert decode_member("m", None, version_1, COOPERATIVE_STICKY).owned == {("t", 3)}


def test_subscription_of_a_newer_version_is_read_as_the_newest_known_one():
    data = encode_subscription(["t"], [], 1, RANGE)
    newer = b"\x00\x09" + data[2:] + b"more"
    assert decode_member("m", None, newer, RANGE).topics == {"t"}


def test_assignment_survives_the_wire():
    partitions = [("t", 0), ("t", 2), ("u", 1)]
    assert decode_assignment(encode_assignment(partitions)) == partitions
    assert decode_assignment(b"") == []


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff\xff", b"\x00\x01\x7f\xff\xff\xff"])
def test_nonsense_is_refused(data):
    with pytest.raises(DecodeError):
        decode_member("m", None, data, RANGE)
    if data:
        with pytest.raises(DecodeError):
            decode_assignment(data)


def test_sticky_claim_is_as_old_as_the_assignment_that_it_is_of():
    """A member of Kafka's Java client that missed a generation names it, beside the older one of what it claims."""
    data = encode_subscription(["t"], [("t", 1)], 4, STICKY)
    at = data.rindex(struct.pack(">i", 4))  # the generation of the subscription stands last
    newer = data[:at] + struct.pack(">i", 9) + data[at + 4 :]
    read = decode_member("m", None, newer, STICKY)
    assert (read.owned, read.generation) == ({("t", 1)}, 4)
