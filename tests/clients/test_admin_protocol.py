"""Settings of groups, quotas, SCRAM users and feature levels over the bare protocol: semel answers as Apache Kafka."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages import configs as alter
from semel.protocol.messages import configs as described
from semel.protocol.messages import configs as quotas
from semel.protocol.messages.cluster import (
    API_VERSIONS,
    DESCRIBE_CLUSTER,
    DESCRIBE_QUORUM,
    FIND_COORDINATOR,
    UNREGISTER_BROKER,
    UPDATE_FEATURES,
    ApiVersionsRequest,
    DescribeClusterRequest,
    DescribeQuorumRequest,
    FeatureUpdateKey,
    FindCoordinatorRequest,
    QuorumPartition,
    UnregisterBrokerRequest,
    UpdateFeaturesRequest,
)
from semel.protocol.messages.cluster import QuorumTopic as QuorumTopic
from semel.protocol.messages.configs import (
    ALTER_CLIENT_QUOTAS,
    DESCRIBE_CLIENT_QUOTAS,
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
    LIST_CONFIG_RESOURCES,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    ListConfigResourcesRequest,
)
from semel.protocol.messages.groups import CONSUMER_GROUP_HEARTBEAT, ConsumerGroupHeartbeatRequest
from semel.protocol.messages.records import (
    FETCH,
    PRODUCE,
    FetchPartition,
    FetchRequest,
    FetchTopic,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from semel.protocol.messages.security import (
    ALTER_USER_SCRAM_CREDENTIALS,
    CREATE_DELEGATION_TOKEN,
    DESCRIBE_DELEGATION_TOKEN,
    DESCRIBE_USER_SCRAM_CREDENTIALS,
    EXPIRE_DELEGATION_TOKEN,
    RENEW_DELEGATION_TOKEN,
    AlterUserScramCredentialsRequest,
    CreateDelegationTokenRequest,
    DescribeDelegationTokenRequest,
    DescribeUserScramCredentialsRequest,
    ExpireDelegationTokenRequest,
    RenewDelegationTokenRequest,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
    UserName,
)
from semel.protocol.messages.topics import (
    ALTER_PARTITION_REASSIGNMENTS,
    ALTER_REPLICA_LOG_DIRS,
    CREATE_TOPICS,
    DESCRIBE_LOG_DIRS,
    ELECT_LEADERS,
    AlterPartitionReassignmentsRequest,
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirTopic,
    CreatableTopic,
    CreateTopicsRequest,
    DescribeLogDirsRequest,
    ElectLeadersRequest,
    PartitionsOfTopic,
    ReassignablePartition,
    ReassignableTopic,
)
from semel.protocol.rows import Record, encode_batch
from semel.protocol.schema import NO_UUID
from tests.support.broker import Cluster
from tests.support.direct import DirectClient
from tests.support.waiting import eventually

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE = 0, 1
SOURCE_CLUSTER, SOURCE_DEFAULT, SOURCE_LOGGER, SOURCE_METRICS, SOURCE_GROUP = 3, 5, 6, 7, 8
EXACT, DEFAULT, ANY = 0, 1, 2


@pytest.fixture
def client(cluster: Cluster) -> Iterator[DirectClient]:
    with DirectClient(cluster.bootstrap) as client:
        yield client


def soon(what: Callable[[], Any], wanted: Any) -> None:
    """Kafka's brokers learn of a change a moment after it was answered."""
    eventually(what, lambda found: found == wanted, otherwise=f"it should be {wanted!r}")


# --- settings of groups and of client metrics subscriptions ---


def set_config(client: DirectClient, kind: int, name: str, key: str, value: str | None) -> int:
    change = alter.IncrementalConfig(key, DELETE if value is None else SET, value)
    request = alter.IncrementalAlterConfigsRequest([alter.IncrementalConfigsResource(kind, name, [change])])
    code: int = client.call(INCREMENTAL_ALTER_CONFIGS, request, 1).responses[0].error_code
    return code


def configs(client: DirectClient, kind: int, name: str) -> dict[str, tuple[str, int]]:
    request = DescribeConfigsRequest([DescribeConfigsResource(kind, name, None)])
    result = client.call(DESCRIBE_CONFIGS, request, 4).results[0]
    assert result.error_code == 0, result
    return {config.name: (config.value, config.config_source) for config in result.configs}


@pytest.mark.parametrize(
    ("kind", "key", "default", "value", "source"),
    [
        (GROUP, "consumer.session.timeout.ms", "45000", "50000", SOURCE_GROUP),
        (GROUP, "consumer.heartbeat.interval.ms", "5000", "6000", SOURCE_GROUP),
        (GROUP, "consumer.assignment.interval.ms", "1000", "2000", SOURCE_GROUP),
        (GROUP, "share.auto.offset.reset", "latest", "earliest", SOURCE_GROUP),
        (GROUP, "streams.num.standby.replicas", "0", "1", SOURCE_GROUP),
        (CLIENT_METRICS, "interval.ms", "300000", "5000", SOURCE_METRICS),
        (CLIENT_METRICS, "metrics", "", "org.apache.", SOURCE_METRICS),
    ],
)
def test_groups_and_client_metrics_have_settings(
    cluster: Cluster, client: DirectClient, kind: int, key: str, default: str, value: str, source: int
) -> None:
    name = cluster.unique("named")
    assert configs(client, kind, name)[key] == (default, SOURCE_DEFAULT)
    assert set_config(client, kind, name, key, value) == E.NONE
    soon(lambda: configs(client, kind, name)[key], (value, source))

    def is_listed() -> bool:
        listed = client.call(LIST_CONFIG_RESOURCES, ListConfigResourcesRequest([kind]), 1).config_resources
        return (name, kind) in [(entry.resource_name, entry.resource_type) for entry in listed]

    soon(is_listed, True)
    assert set_config(client, kind, name, key, None) == E.NONE
    soon(lambda: configs(client, kind, name)[key], (default, SOURCE_DEFAULT))


def test_every_setting_of_a_group_is_described_with_its_default(cluster: Cluster, client: DirectClient) -> None:
    """Those of share and streams groups too, although only Kafka serves these."""
    assert configs(client, GROUP, cluster.unique("described")) == {
        name: (value, SOURCE_DEFAULT)
        for name, value in {
            "consumer.assignment.interval.ms": "1000",
            "consumer.heartbeat.interval.ms": "5000",
            "consumer.session.timeout.ms": "45000",
            "share.assignment.interval.ms": "1000",
            "share.auto.offset.reset": "latest",
            "share.delivery.count.limit": "5",
            "share.heartbeat.interval.ms": "5000",
            "share.isolation.level": "read_uncommitted",
            "share.partition.max.record.locks": "2000",
            "share.record.lock.duration.ms": "30000",
            "share.renew.acknowledge.enable": "true",
            "share.session.timeout.ms": "45000",
            "streams.assignment.interval.ms": "1000",
            "streams.heartbeat.interval.ms": "5000",
            "streams.initial.rebalance.delay.ms": "3000",
            "streams.num.standby.replicas": "0",
            "streams.session.timeout.ms": "45000",
        }.items()
    }


@pytest.mark.parametrize(
    ("kind", "name", "key", "value", "code"),
    [
        (GROUP, "g", "nope", "1", E.INVALID_CONFIG),
        (GROUP, "g", "consumer.session.timeout.ms", "x", E.INVALID_CONFIG),
        (GROUP, "g", "consumer.session.timeout.ms", "44999", E.INVALID_CONFIG),
        (GROUP, "g", "consumer.session.timeout.ms", "60001", E.INVALID_CONFIG),
        (GROUP, "g", "consumer.heartbeat.interval.ms", "15001", E.INVALID_CONFIG),
        (GROUP, "", "consumer.session.timeout.ms", "50000", E.INVALID_REQUEST),
        (CLIENT_METRICS, "m", "interval.ms", "99", E.INVALID_REQUEST),
        (CLIENT_METRICS, "m", "nope", "99", E.INVALID_REQUEST),
        (CLIENT_METRICS, "", "interval.ms", "1000", E.INVALID_REQUEST),
    ],
)
def test_bad_settings_of_groups_and_client_metrics_are_refused(
    client: DirectClient, kind: int, name: str, key: str, value: str, code: E
) -> None:
    assert set_config(client, kind, name, key, value) == code


def test_members_get_the_heartbeat_interval_of_their_group(cluster: Cluster, client: DirectClient) -> None:
    group, topic = cluster.unique("timing"), cluster.unique("timing")
    assert set_config(client, GROUP, group, "consumer.heartbeat.interval.ms", "7000") == E.NONE
    soon(lambda: configs(client, GROUP, group)["consumer.heartbeat.interval.ms"], ("7000", SOURCE_GROUP))
    join = ConsumerGroupHeartbeatRequest(
        group_id=group,
        member_id="member",
        rebalance_timeout_ms=1000,
        subscribed_topic_names=[topic],
        topic_partitions=[],
    )
    client.find_coordinator(group, 0)
    soon(lambda: client.call(CONSUMER_GROUP_HEARTBEAT, join, 1).heartbeat_interval_ms, 7000)


# --- quotas ---


def set_quota(client: DirectClient, entity: dict[str, str | None], key: str, value: float | None) -> int:
    op = quotas.OpData(key, value or 0.0, value is None)
    entry = quotas.AlterEntryData([quotas.EntityData(*part) for part in entity.items()], [op])
    code: int = client.call(ALTER_CLIENT_QUOTAS, quotas.AlterClientQuotasRequest([entry]), 1).entries[0].error_code
    return code


def found_quotas(client: DirectClient, *parts: tuple[str, int, str | None], strict: bool = False) -> list[Any]:
    request = described.DescribeClientQuotasRequest([described.ComponentData(*part) for part in parts], strict)
    answer = client.call(DESCRIBE_CLIENT_QUOTAS, request, 1)
    assert answer.error_code == 0, answer
    return [
        (
            sorted((part.entity_type, part.entity_name) for part in entry.entity),
            {value.key: value.value for value in entry.values},
        )
        for entry in answer.entries
    ]


def test_quotas_can_be_set_found_and_taken_away(cluster: Cluster, client: DirectClient) -> None:
    user, client_id = cluster.unique("user"), cluster.unique("client")
    both: dict[str, str | None] = {"user": user, "client-id": client_id}
    assert set_quota(client, both, "producer_byte_rate", 1e6) == E.NONE
    assert set_quota(client, both, "consumer_byte_rate", 2e6) == E.NONE
    assert set_quota(client, {"user": user}, "consumer_byte_rate", 3e6) == E.NONE
    entity = [("client-id", client_id), ("user", user)]
    of_both = (entity, {"producer_byte_rate": 1e6, "consumer_byte_rate": 2e6})
    of_user = ([("user", user)], {"consumer_byte_rate": 3e6})
    exact = ("user", EXACT, user)
    soon(lambda: sorted(found_quotas(client, exact), key=str), sorted([of_both, of_user], key=str))
    assert found_quotas(client, exact, strict=True) == [of_user]
    assert found_quotas(client, exact, ("client-id", ANY, None)) == [of_both]
    assert found_quotas(client, ("user", DEFAULT, None)) == []
    for key in ("producer_byte_rate", "consumer_byte_rate"):
        assert set_quota(client, both, key, None) == E.NONE
    soon(lambda: found_quotas(client, exact), [of_user])
    assert set_quota(client, {"user": user}, "consumer_byte_rate", None) == E.NONE
    soon(lambda: found_quotas(client, exact), [])


def test_quotas_come_in_the_order_of_kafka(cluster: Cluster, client: DirectClient) -> None:
    """It is that of its hash maps, and clients' own tests rely on it."""
    user, client_id = cluster.unique("user"), cluster.unique("client")
    parts = [quotas.EntityData("user", user), quotas.EntityData("client-id", client_id)]
    rates = ["producer_byte_rate", "request_percentage", "consumer_byte_rate"]
    ops = [quotas.OpData(key, 50.0, False) for key in rates]
    request = quotas.AlterClientQuotasRequest([quotas.AlterEntryData(parts, ops)])
    altered = client.call(ALTER_CLIENT_QUOTAS, request, 1).entries[0]
    assert [part.entity_type for part in altered.entity] == ["client-id", "user"]
    wanted = described.DescribeClientQuotasRequest([described.ComponentData("user", EXACT, user)], False)
    [entry] = eventually(lambda: client.call(DESCRIBE_CLIENT_QUOTAS, wanted, 1).entries, bool)
    assert [part.entity_type for part in entry.entity] == ["client-id", "user"]
    assert [value.key for value in entry.values] == ["consumer_byte_rate", "request_percentage", "producer_byte_rate"]


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("user", "request_percentage", 12.5),
        ("client-id", "controller_mutation_rate", 0.5),
        ("ip", "connection_creation_rate", 10.0),
    ],
)
def test_quotas_without_effect_are_kept_and_shown(
    cluster: Cluster, client: DirectClient, kind: str, key: str, value: float
) -> None:
    name = "127.0.0.99" if kind == "ip" else cluster.unique("slow")
    assert set_quota(client, {kind: name}, key, value) == E.NONE
    soon(lambda: found_quotas(client, (kind, EXACT, name)), [([(kind, name)], {key: value})])
    assert set_quota(client, {kind: name}, key, None) == E.NONE
    soon(lambda: found_quotas(client, (kind, EXACT, name)), [])
    assert set_quota(client, {kind: name}, "nope", None) == E.NONE  # there is none to take away


@pytest.mark.parametrize("part", [("user", EXACT, None), ("user", DEFAULT, "u"), ("user", ANY, "u")])
def test_filters_of_quotas_name_what_is_matched_exactly(
    client: DirectClient, part: tuple[str, int, str | None]
) -> None:
    request = described.DescribeClientQuotasRequest([described.ComponentData(*part)])
    answer = client.call(DESCRIBE_CLIENT_QUOTAS, request, 1)
    assert (answer.error_code, answer.entries) == (E.INVALID_REQUEST, None)


@pytest.mark.parametrize(
    ("entity", "key", "value"),
    [
        ({"client-id": "c"}, "nope", 1.0),
        ({"ip": "127.0.0.1"}, "connection_creation_rate", 1.5),
        ({"client-id": "c"}, "request_percentage", 0.0),
        ({"client-id": "c"}, "producer_byte_rate", -1.0),
        ({"client-id": "c"}, "producer_byte_rate", 1.5),
        ({"ip": "127.0.0.1"}, "producer_byte_rate", 1.0),
        ({"ip": "127.0.0.1", "user": "u"}, "connection_creation_rate", 1.0),
        ({"planet": "mars"}, "producer_byte_rate", 1.0),
        ({"user": ""}, "producer_byte_rate", 1.0),
        ({}, "producer_byte_rate", 1.0),
        ({"user": "u"}, "producer_byte_rate", math.inf),
    ],
)
def test_bad_quotas_are_refused(client: DirectClient, entity: dict[str, str | None], key: str, value: float) -> None:
    assert set_quota(client, entity, key, value) == E.INVALID_REQUEST


def test_of_two_users_in_one_quota_the_last_counts(client: DirectClient) -> None:
    """Removals only: the broker is shared, and this user is everybody."""
    parts = [quotas.EntityData("user", name) for name in ("u", None)]
    entry = quotas.AlterEntryData(parts, [quotas.OpData("producer_byte_rate", 0.0, True)])
    altered = client.call(ALTER_CLIENT_QUOTAS, quotas.AlterClientQuotasRequest([entry]), 1).entries[0]
    assert altered.error_code == E.NONE
    assert [(part.entity_type, part.entity_name) for part in altered.entity] == [("user", None)]


def test_clients_over_their_quota_get_the_throttle_time_and_are_slowed_down(
    cluster: Cluster, client: DirectClient
) -> None:
    """Twenty seconds' worth of bytes, of which ten may come in a burst: the rest has to be waited for."""
    topic, slow_id = cluster.unique("quota"), cluster.unique("slow")
    client.create_topic(topic, 1)
    batch = bytes(encode_batch([Record(0, int(time.time() * 1000), None, bytes(60_000))]))
    data = TopicProduceData(topic, NO_UUID, [PartitionProduceData(0, batch)])
    request = ProduceRequest(None, 1, 5000, [data])
    soon(lambda: client.call(PRODUCE, request, 9).responses[0].partition_responses[0].error_code, 0)
    for key in ("producer_byte_rate", "consumer_byte_rate"):
        assert set_quota(client, {"client-id": slow_id}, key, 50_000.0) == E.NONE
    soon(lambda: len(found_quotas(client, ("client-id", EXACT, slow_id))), 1)
    with DirectClient(cluster.bootstrap, client_id=slow_id) as slow:
        waits_ms = [slow.call(PRODUCE, request, 9).throttle_time_ms for _ in range(11)]
        assert not any(waits_ms[:6]), waits_ms
        assert any(waits_ms), "the quota was not enforced"
        started_s = time.monotonic()
        slow.call(API_VERSIONS, ApiVersionsRequest("test", "1"), 3)
        if waits_ms[-1]:
            assert time.monotonic() - started_s > waits_ms[-1] / 2000, "the client was not slowed down"
        fetch = FetchRequest(max_wait_ms=0, topics=[FetchTopic(topic, NO_UUID, [FetchPartition(0, -1, 0)])])
        assert any(slow.call(FETCH, fetch, 12).throttle_time_ms for _ in range(20)), "the quota was not enforced"
    assert client.call(PRODUCE, request, 9).throttle_time_ms == 0, "it is not everybody's quota"


def test_client_far_over_its_quota_gets_its_response(cluster: Cluster, client: DirectClient) -> None:
    """A rate of 1 is how clients are kept out. The wait in milliseconds exceeds an int32 with the third megabyte."""
    topic, slow_id = cluster.unique("quota"), cluster.unique("slow")
    client.create_topic(topic, 1)
    batch = bytes(encode_batch([Record(0, int(time.time() * 1000), None, bytes(1_000_000))]))
    request = ProduceRequest(None, 1, 5000, [TopicProduceData(topic, NO_UUID, [PartitionProduceData(0, batch)])])
    soon(lambda: client.call(PRODUCE, request, 9).responses[0].partition_responses[0].error_code, 0)
    assert set_quota(client, {"client-id": slow_id}, "producer_byte_rate", 1.0) == E.NONE
    soon(lambda: len(found_quotas(client, ("client-id", EXACT, slow_id))), 1)
    for _ in range(5):
        with DirectClient(cluster.bootstrap, client_id=slow_id) as slow:  # the one before is not read from any more
            assert slow.call(PRODUCE, request, 9).responses[0].partition_responses[0].error_code == E.NONE


def test_quotas_survive_a_restart(semel_broker: SemelBroker) -> None:
    with DirectClient(semel_broker.bootstrap) as client:
        assert set_quota(client, {"client-id": None}, "producer_byte_rate", 12345.0) == E.NONE
    semel_broker.kill()
    semel_broker.start()
    with DirectClient(semel_broker.bootstrap) as client:
        assert found_quotas(client) == [([("client-id", None)], {"producer_byte_rate": 12345.0})]


# --- SCRAM users ---


def alter_users(client: DirectClient, *changes: ScramCredentialDeletion | ScramCredentialUpsertion) -> dict[str, int]:
    deletions = [change for change in changes if isinstance(change, ScramCredentialDeletion)]
    upsertions = [change for change in changes if isinstance(change, ScramCredentialUpsertion)]
    request = AlterUserScramCredentialsRequest(deletions, upsertions)
    results = client.call(ALTER_USER_SCRAM_CREDENTIALS, request, 0).results
    return {result.user: result.error_code for result in results}


def describe_user(client: DirectClient, *names: str) -> list[Any]:
    request = DescribeUserScramCredentialsRequest([UserName(name) for name in names])
    results = client.call(DESCRIBE_USER_SCRAM_CREDENTIALS, request, 0).results
    return [
        (result.error_code, sorted((info.mechanism, info.iterations) for info in result.credential_infos))
        for result in results
    ]


def test_scram_users_can_be_set_described_and_deleted(cluster: Cluster, client: DirectClient) -> None:
    name = cluster.unique("user")
    assert describe_user(client, name) == [(E.RESOURCE_NOT_FOUND, [])]
    one, other = (ScramCredentialUpsertion(name, kind, 4096 * kind, b"salt", b"s" * 32) for kind in (1, 2))
    assert alter_users(client, one, other) == {name: E.DUPLICATE_RESOURCE}
    assert alter_users(client, one) == alter_users(client, other) == {name: E.NONE}
    soon(lambda: describe_user(client, name), [(E.NONE, [(1, 4096), (2, 8192)])])
    assert describe_user(client, name, name) == [(E.DUPLICATE_RESOURCE, [])]
    assert alter_users(client, ScramCredentialDeletion(name, 1)) == {name: E.NONE}
    soon(lambda: describe_user(client, name), [(E.NONE, [(2, 8192)])])
    assert alter_users(client, ScramCredentialDeletion(name, 1)) == {name: E.RESOURCE_NOT_FOUND}
    assert alter_users(client, ScramCredentialDeletion(name, 2)) == {name: E.NONE}
    soon(lambda: describe_user(client, name), [(E.RESOURCE_NOT_FOUND, [])])


@pytest.mark.parametrize(
    ("name", "mechanism", "iterations", "code"),
    [
        ("", 1, 4096, E.UNACCEPTABLE_CREDENTIAL),
        ("u", 0, 4096, E.UNSUPPORTED_SASL_MECHANISM),
        ("u", 9, 4096, E.UNSUPPORTED_SASL_MECHANISM),
        ("u", 1, 4095, E.UNACCEPTABLE_CREDENTIAL),
        ("u", 1, 16385, E.UNACCEPTABLE_CREDENTIAL),
    ],
)
def test_bad_scram_users_are_refused(client: DirectClient, name: str, mechanism: int, iterations: int, code: E) -> None:
    assert alter_users(client, ScramCredentialUpsertion(name, mechanism, iterations, b"x", b"y")) == {name: code}


# --- feature levels ---


def update_feature(client: DirectClient, name: str, level: int, kind: int = 1, *, try_only: bool = False) -> int:
    request = UpdateFeaturesRequest(1000, [FeatureUpdateKey(name, level, upgrade_type=kind)], try_only)
    code: int = client.call(UPDATE_FEATURES, request, 2).error_code
    return code


@pytest.mark.parametrize(
    ("name", "level", "kind", "code"),
    [
        ("transaction.version", 2, 1, E.NONE),
        ("transaction.version", 1, 1, E.INVALID_UPDATE_VERSION),  # a downgrade has to say so
        ("transaction.version", 1, 2, E.NONE),
        ("transaction.version", 3, 1, E.INVALID_UPDATE_VERSION),
        ("transaction.version", -1, 2, E.INVALID_UPDATE_VERSION),
        ("transaction.version", 2, 0, E.INVALID_UPDATE_VERSION),
        ("made.up", 1, 1, E.INVALID_UPDATE_VERSION),
    ],
)
def test_feature_updates_are_checked(client: DirectClient, name: str, level: int, kind: int, code: E) -> None:
    assert update_feature(client, name, level, kind, try_only=True) == code


def test_feature_levels_change_at_run_time_and_survive_a_restart(semel_broker: SemelBroker) -> None:
    def level_and_epoch() -> tuple[int, int]:
        with DirectClient(semel_broker.bootstrap) as client:
            answer = client.call(API_VERSIONS, ApiVersionsRequest("test", "1"), 4)
        levels = {feature.name: feature.max_version_level for feature in answer.finalized_features}
        return levels["transaction.version"], answer.finalized_features_epoch

    assert level_and_epoch() == (2, 1)
    with DirectClient(semel_broker.bootstrap) as client:
        assert update_feature(client, "transaction.version", 1, 2) == E.NONE
    assert level_and_epoch() == (1, 2)
    semel_broker.kill()
    semel_broker.start()
    assert level_and_epoch() == (1, 2)


# --- one node: its replicas, its quorum, its brokers ---


def test_replicas_can_be_moved_to_where_they_are(cluster: Cluster, client: DirectClient) -> None:
    topic = cluster.unique("moved")
    client.create_topic(topic, 1)
    folder = eventually_folder(client, topic)

    def moved(path: str, name: str) -> int:
        ask = AlterReplicaLogDir(path, [AlterReplicaLogDirTopic(name, [0])])
        answer = client.call(ALTER_REPLICA_LOG_DIRS, AlterReplicaLogDirsRequest([ask]), 2)
        code: int = answer.results[0].partitions[0].error_code
        return code

    assert moved(folder, topic) == E.NONE
    assert moved("/somewhere/else", topic) == E.LOG_DIR_NOT_FOUND


def eventually_folder(client: DirectClient, topic: str) -> str:
    request = DescribeLogDirsRequest([PartitionsOfTopic(topic, [0])])
    soon(lambda: len(client.call(DESCRIBE_LOG_DIRS, request, 4).results[0].topics), 1)
    folder: str = client.call(DESCRIBE_LOG_DIRS, request, 4).results[0].log_dir
    return folder


@pytest.mark.parametrize(
    ("election_type", "code", "partition_code"),
    [(0, E.NONE, E.ELECTION_NOT_NEEDED), (1, E.NONE, E.ELECTION_NOT_NEEDED), (7, E.INVALID_REQUEST, E.INVALID_REQUEST)],
)
def test_kinds_of_elections(
    cluster: Cluster, client: DirectClient, election_type: int, code: E, partition_code: E
) -> None:
    topic = cluster.unique("elected")
    client.create_topic(topic, 1)
    request = ElectLeadersRequest(election_type, [PartitionsOfTopic(topic, [0])])
    answer = client.call(ELECT_LEADERS, request, 2)
    (partition,) = answer.replica_election_results[0].partition_result
    assert (answer.error_code, partition.error_code) == (code, partition_code)
    if code == E.NONE:
        every = client.call(ELECT_LEADERS, ElectLeadersRequest(election_type, None), 2).replica_election_results
        assert [result.partition_result for result in every if result.topic == topic] == [[]]


@pytest.mark.parametrize(
    ("endpoint_type", "code", "message"),
    [
        (2, E.MISMATCHED_ENDPOINT_TYPE, "endpoint of type BROKER, but we wanted an endpoint of type CONTROLLER"),
        (7, E.UNSUPPORTED_ENDPOINT_TYPE, "Unsupported endpoint type 7"),
    ],
)
def test_a_broker_is_no_controller(client: DirectClient, endpoint_type: int, code: E, message: str) -> None:
    refused = client.call(DESCRIBE_CLUSTER, DescribeClusterRequest(endpoint_type=endpoint_type), 2)
    assert refused.error_code == code
    assert message in refused.error_message


def test_partitions_that_are_not_there_cannot_be_reassigned(cluster: Cluster, client: DirectClient) -> None:
    topic, missing = cluster.unique("reassigned"), cluster.unique("missing")
    client.create_topic(topic, 1)
    wanted = [ReassignableTopic(name, [ReassignablePartition(5, None)]) for name in (topic, missing)]
    answer = client.call(ALTER_PARTITION_REASSIGNMENTS, AlterPartitionReassignmentsRequest(topics=wanted), 1)
    found = {each.name: each.partitions[0] for each in answer.responses}
    assert found[topic].error_code == found[missing].error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert found[topic].error_message == f"Unable to find partition {topic}:5."
    assert found[missing].error_message == f"Unable to find a topic named {missing}."


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_quorum_is_this_node(client: DirectClient, version: int) -> None:
    asked = [QuorumTopic("__cluster_metadata", [QuorumPartition(0)])]
    answer = client.call(DESCRIBE_QUORUM, DescribeQuorumRequest(asked), version)
    assert answer.error_code == 0
    (partition,) = answer.topics[0].partitions
    assert partition.error_code == 0
    (voter,) = partition.current_voters
    assert voter.replica_id == partition.leader_id
    assert 0 < partition.high_watermark <= voter.log_end_offset
    assert partition.observers == []


def test_there_is_no_other_quorum(client: DirectClient) -> None:
    answer = client.call(DESCRIBE_QUORUM, DescribeQuorumRequest([QuorumTopic("nope", [QuorumPartition(0)])]), 1)
    assert answer.topics[0].partitions[0].error_code == E.UNKNOWN_TOPIC_OR_PARTITION


def test_a_broker_that_is_not_there_cannot_be_unregistered(client: DirectClient) -> None:
    answer = client.call(UNREGISTER_BROKER, UnregisterBrokerRequest(77), 0)
    assert answer.error_code == E.BROKER_ID_NOT_REGISTERED


@pytest.mark.parametrize(
    ("api", "request_type"),
    [
        (CREATE_DELEGATION_TOKEN, CreateDelegationTokenRequest),
        (RENEW_DELEGATION_TOKEN, RenewDelegationTokenRequest),
        (EXPIRE_DELEGATION_TOKEN, ExpireDelegationTokenRequest),
        (DESCRIBE_DELEGATION_TOKEN, DescribeDelegationTokenRequest),
    ],
)
def test_delegation_tokens_need_somebody_who_logged_in(client: DirectClient, api: Any, request_type: Any) -> None:
    for version in (1, 2) if api.key in (39, 40) else (1, 2, 3):
        assert client.call(api, request_type(), version).error_code == E.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED


# --- what clients read beside the codes ---


def test_old_clients_get_none_instead_of_an_error_message(cluster: Cluster, client: DirectClient) -> None:
    group = cluster.unique("word")
    client.find_coordinator(group, 0)
    for version in (1, 2, 3):
        answer = client.call(FIND_COORDINATOR, FindCoordinatorRequest(key=group), version)
        assert (answer.error_code, answer.error_message) == (0, "NONE")


def test_a_topic_that_was_not_created_has_no_settings(client: DirectClient) -> None:
    request = CreateTopicsRequest([CreatableTopic("bad name", 1, 1)], 1000)
    refused = client.call(CREATE_TOPICS, request, 7).topics[0]
    assert (refused.error_code, refused.configs) == (E.INVALID_TOPIC_EXCEPTION, [])


@pytest.mark.parametrize("key", ["retention.ms", "segment.ms", "flush.ms", "cleanup.policy", "max.message.bytes"])
def test_synonyms_of_topic_settings_are_those_that_kafka_names(
    cluster: Cluster, client: DirectClient, key: str
) -> None:
    name = cluster.unique("synonyms")
    client.create_topic(name, 1)
    request = DescribeConfigsRequest([DescribeConfigsResource(2, name, [key])], include_synonyms=True)
    soon(lambda: len(client.call(DESCRIBE_CONFIGS, request, 4).results[0].configs), 1)
    (config,) = client.call(DESCRIBE_CONFIGS, request, 4).results[0].configs
    broker_keys = {"cleanup.policy": ["log.cleanup.policy"], "max.message.bytes": ["message.max.bytes"]}
    assert [synonym.name for synonym in config.synonyms] == broker_keys.get(key, [])


TOPIC_KEYS_WITHOUT_EFFECT = {
    "local.retention.ms": ["log.local.retention.ms"],
    "local.retention.bytes": ["log.local.retention.bytes"],
    "preallocate": ["log.preallocate"],
    "remote.storage.enable": [],
    "follower.replication.throttled.replicas": [],
}


@pytest.mark.parametrize(("key", "broker_keys"), TOPIC_KEYS_WITHOUT_EFFECT.items())
def test_synonyms_of_settings_that_have_no_effect_are_kafkas_too(
    cluster: Cluster, client: DirectClient, key: str, broker_keys: list[str]
) -> None:
    name = cluster.unique("synonyms")
    client.create_topic(name, 1)
    request = DescribeConfigsRequest([DescribeConfigsResource(TOPIC, name, [key])], include_synonyms=True)
    soon(lambda: len(client.call(DESCRIBE_CONFIGS, request, 4).results[0].configs), 1)
    (config,) = client.call(DESCRIBE_CONFIGS, request, 4).results[0].configs
    assert [synonym.name for synonym in config.synonyms] == broker_keys


def test_min_insync_replicas_is_a_setting_of_the_cluster(cluster: Cluster, client: DirectClient) -> None:
    """As in every cluster that Kafka 4.1 or newer made, with eligible leader replicas (KIP-966)."""
    key, name = "min.insync.replicas", cluster.unique("isr")
    client.create_topic(name, 1)
    request = DescribeConfigsRequest([DescribeConfigsResource(TOPIC, name, [key])])
    soon(lambda: client.call(DESCRIBE_CONFIGS, request, 4).results[0].error_code, E.NONE)
    for kind, resource in ((TOPIC, name), (BROKER, "1"), (BROKER, "")):
        assert configs(client, kind, resource)[key] == ("1", SOURCE_CLUSTER)
    assert set_config(client, BROKER, "", key, None) == E.INVALID_CONFIG
    assert set_config(client, BROKER, "1", key, "1") == E.INVALID_CONFIG
    if cluster.name == "apache_kafka":
        return  # tests in other processes use it, too
    assert set_config(client, BROKER, "", key, "2") == E.NONE
    assert configs(client, TOPIC, name)[key] == ("2", SOURCE_CLUSTER)
    assert set_config(client, BROKER, "", key, "1") == E.NONE
    assert configs(client, TOPIC, name)[key] == ("1", SOURCE_CLUSTER)


def test_levels_of_loggers_are_shown(cluster: Cluster, client: DirectClient) -> None:
    described_levels = configs(client, BROKER_LOGGER, "1")
    if cluster.name == "semel":  # what Kafka has depends on its logging framework
        assert described_levels["root"] == ("WARN", SOURCE_LOGGER)
        assert described_levels["semel"] == ("INFO", SOURCE_LOGGER)
    listed = client.call(LIST_CONFIG_RESOURCES, ListConfigResourcesRequest([BROKER_LOGGER]), 1).config_resources
    assert [each.resource_name for each in listed] == ["1"]
    for name in ("", "7", "x"):
        request = DescribeConfigsRequest([DescribeConfigsResource(BROKER_LOGGER, name, None)])
        assert client.call(DESCRIBE_CONFIGS, request, 4).results[0].error_code == E.INVALID_REQUEST
