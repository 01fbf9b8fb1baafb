"""Which APIs there are: key, the module that holds its tables, its name, and the first version with tagged fields.

The files are loaded when they are first asked for, so that a program pays only for the APIs that it speaks.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from semel.protocol.api import Api
from semel.protocol.errors import UnsupportedVersionError

# key: (module in `messages`, name, first flexible version or None)
APIS: dict[int, tuple[str, str, int | None]] = {
    0: ("records", "produce", 9),
    1: ("records", "fetch", 12),
    2: ("records", "list_offsets", 6),
    3: ("cluster", "metadata", 9),
    8: ("offsets", "offset_commit", 8),
    9: ("offsets", "offset_fetch", 6),
    10: ("cluster", "find_coordinator", 3),
    11: ("groups", "join_group", 6),
    12: ("groups", "heartbeat", 4),
    13: ("groups", "leave_group", 4),
    14: ("groups", "sync_group", 4),
    15: ("groups", "describe_groups", 5),
    16: ("groups", "list_groups", 3),
    17: ("security", "sasl_handshake", None),
    18: ("cluster", "api_versions", 3),
    19: ("topics", "create_topics", 5),
    20: ("topics", "delete_topics", 4),
    21: ("records", "delete_records", 2),
    22: ("transactions", "init_producer_id", 2),
    23: ("records", "offset_for_leader_epoch", 4),
    24: ("transactions", "add_partitions_to_txn", 3),
    25: ("transactions", "add_offsets_to_txn", 3),
    26: ("transactions", "end_txn", 3),
    27: ("transactions", "write_txn_markers", 1),
    28: ("transactions", "txn_offset_commit", 3),
    29: ("security", "describe_acls", 2),
    30: ("security", "create_acls", 2),
    31: ("security", "delete_acls", 2),
    32: ("configs", "describe_configs", 4),
    33: ("configs", "alter_configs", 2),
    34: ("topics", "alter_replica_log_dirs", 2),
    35: ("topics", "describe_log_dirs", 2),
    36: ("security", "sasl_authenticate", 2),
    37: ("topics", "create_partitions", 2),
    38: ("security", "create_delegation_token", 2),
    39: ("security", "renew_delegation_token", 2),
    40: ("security", "expire_delegation_token", 2),
    41: ("security", "describe_delegation_token", 2),
    42: ("groups", "delete_groups", 2),
    43: ("topics", "elect_leaders", 2),
    44: ("configs", "incremental_alter_configs", 1),
    45: ("topics", "alter_partition_reassignments", 0),
    46: ("topics", "list_partition_reassignments", 0),
    47: ("offsets", "offset_delete", None),
    48: ("configs", "describe_client_quotas", 1),
    49: ("configs", "alter_client_quotas", 1),
    50: ("security", "describe_user_scram_credentials", 0),
    51: ("security", "alter_user_scram_credentials", 0),
    55: ("cluster", "describe_quorum", 0),
    57: ("cluster", "update_features", 0),
    60: ("cluster", "describe_cluster", 0),
    61: ("transactions", "describe_producers", 0),
    64: ("cluster", "unregister_broker", 0),
    65: ("transactions", "describe_transactions", 0),
    66: ("transactions", "list_transactions", 0),
    68: ("groups", "consumer_group_heartbeat", 0),
    69: ("groups", "consumer_group_describe", 0),
    74: ("configs", "list_config_resources", 0),
    75: ("cluster", "describe_topic_partitions", 0),
    20000: ("transactions", "describe_transaction_events", 0),  # semel's own
}

FIRST_OWN_KEY = 20000  # from here on: APIs that Kafka does not have
FLEXIBLE_FROM: dict[int, int] = {key: first for key, (_, _, first) in APIS.items() if first is not None}
# Kafka's names, such as AddPartitionsToTxn
NAMES: dict[int, str] = {key: name.title().replace("_", "") for key, (_, name, _) in APIS.items()}


@cache
def api_of(key: int) -> Api[Any, Any]:
    if key not in APIS:
        raise UnsupportedVersionError(f"there is no API with key {key}")
    module, name, _ = APIS[key]
    api: Api[Any, Any] = getattr(import_module(f"semel.protocol.messages.{module}"), name.upper())
    return api
