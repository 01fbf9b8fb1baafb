"""The admin client: topics, configurations, offsets, groups, transactions, the cluster.

    with Admin(bootstrap_servers="localhost:9092") as admin:
        admin.create_topic("orders", partitions=6)
        for group in admin.list_groups():
            print(group.group_id, group.state)

Every call takes `timeout_ms` (default.api.timeout.ms) and raises a `KafkaError` that says what to do. What the calls do
is in `calls.py`, `groups.py`, `transactions.py` and `observation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.client.admin.base import admin_settings
from semel.client.admin.calls import AdminCalls
from semel.client.cluster import Cluster
from semel.client.immediate import Closing, blocking
from semel.client.settings import ClientSettings


class Admin(Closing):
    def __init__(self, options: Mapping[str, Any] | ClientSettings | None = None, /, **keywords: Any) -> None:
        """Options by Kafka's names: `{"bootstrap.servers": "..."}` or `bootstrap_servers="..."`."""
        self.settings = admin_settings(options, keywords)
        self._cluster = Cluster(self.settings)
        self.calls = AdminCalls(self.settings, self._cluster.calls)

    def close(self) -> None:
        self._cluster.close()

    create_topics = blocking(AdminCalls.create_topics)
    create_topic = blocking(AdminCalls.create_topic)
    delete_topics = blocking(AdminCalls.delete_topics)
    list_topics = blocking(AdminCalls.list_topics)
    describe_topics = blocking(AdminCalls.describe_topics)
    create_partitions = blocking(AdminCalls.create_partitions)
    delete_records = blocking(AdminCalls.delete_records)

    describe_configs = blocking(AdminCalls.describe_configs)
    alter_configs = blocking(AdminCalls.alter_configs)

    list_offsets = blocking(AdminCalls.list_offsets)
    describe_cluster = blocking(AdminCalls.describe_cluster)

    list_groups = blocking(AdminCalls.list_groups)
    describe_group = blocking(AdminCalls.describe_group)
    group_lag = blocking(AdminCalls.group_lag)
    group_offsets = blocking(AdminCalls.group_offsets)
    alter_group_offsets = blocking(AdminCalls.alter_group_offsets)
    delete_group_offsets = blocking(AdminCalls.delete_group_offsets)
    delete_groups = blocking(AdminCalls.delete_groups)

    list_transactions = blocking(AdminCalls.list_transactions)
    describe_transaction = blocking(AdminCalls.describe_transaction)
    abort_transaction = blocking(AdminCalls.abort_transaction)
    describe_producers = blocking(AdminCalls.describe_producers)
    abort_hanging_transaction = blocking(AdminCalls.abort_hanging_transaction)

    describe_transactions = blocking(AdminCalls.describe_transactions)
    producers_of = blocking(AdminCalls.producers_of)
    offsets_of_existing = blocking(AdminCalls.offsets_of_existing)
    committed_of_all = blocking(AdminCalls.committed_of_all)
    transaction_events = blocking(AdminCalls.transaction_events)
