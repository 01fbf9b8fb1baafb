"""Which APIs there are: key, the file that holds its tables, and from which version its headers have tagged fields.

The files are loaded when they are first asked for, so that a program pays only for the APIs that it speaks.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from semel.protocol.api import Api
from semel.protocol.errors import UnsupportedVersionError

# key: (file in `messages`, first flexible version or None)
APIS: dict[int, tuple[str, int | None]] = {
    0: ("produce", 9),
    1: ("fetch", 12),
    2: ("list_offsets", 6),
    3: ("metadata", 9),
    8: ("offset_commit", 8),
    9: ("offset_fetch", 6),
    10: ("find_coordinator", 3),
    11: ("join_group", 6),
    12: ("heartbeat", 4),
    13: ("leave_group", 4),
    14: ("sync_group", 4),
    15: ("describe_groups", 5),
    16: ("list_groups", 3),
    17: ("sasl_handshake", None),
    18: ("api_versions", 3),
    19: ("create_topics", 5),
    20: ("delete_topics", 4),
    21: ("delete_records", 2),
    22: ("init_producer_id", 2),
    23: ("offset_for_leader_epoch", 4),
    24: ("add_partitions_to_txn", 3),
    25: ("add_offsets_to_txn", 3),
    26: ("end_txn", 3),
    27: ("write_txn_markers", 1),
    28: ("txn_offset_commit", 3),
    29: ("describe_acls", 2),
    30: ("create_acls", 2),
    31: ("delete_acls", 2),
    32: ("describe_configs", 4),
    33: ("alter_configs", 2),
    34: ("alter_replica_log_dirs", 2),
    35: ("describe_log_dirs", 2),
    36: ("sasl_authenticate", 2),
    37: ("create_partitions", 2),
    38: ("create_delegation_token", 2),
    39: ("renew_delegation_token", 2),
    40: ("expire_delegation_token", 2),
    41: ("describe_delegation_token", 2),
    42: ("delete_groups", 2),
    43: ("elect_leaders", 2),
    44: ("incremental_alter_configs", 1),
    45: ("alter_partition_reassignments", 0),
    46: ("list_partition_reassignments", 0),
    47: ("offset_delete", None),
    48: ("describe_client_quotas", 1),
    49: ("alter_client_quotas", 1),
    50: ("describe_user_scram_credentials", 0),
    51: ("alter_user_scram_credentials", 0),
    55: ("describe_quorum", 0),
    57: ("update_features", 0),
    60: ("describe_cluster", 0),
    61: ("describe_producers", 0),
    64: ("unregister_broker", 0),
    65: ("describe_transactions", 0),
    66: ("list_transactions", 0),
    68: ("consumer_group_heartbeat", 0),
    69: ("consumer_group_describe", 0),
    74: ("list_config_resources", 0),
    75: ("describe_topic_partitions", 0),
}

FLEXIBLE_FROM: dict[int, int] = {key: first for key, (_, first) in APIS.items() if first is not None}


@cache
def api_of(key: int) -> Api[Any, Any]:
    """The API with a key."""
    if key not in APIS:
        raise UnsupportedVersionError(f"there is no API with key {key}")
    name = APIS[key][0]
    api: Api[Any, Any] = getattr(import_module(f"semel.protocol.messages.{name}"), name.upper())
    return api
