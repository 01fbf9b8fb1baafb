"""The bits that say what a client may do: without an authorizer, everything that a resource knows."""

from __future__ import annotations

_OPERATION = {
    "read": 3, "write": 4, "create": 5, "delete": 6, "alter": 7, "describe": 8, "cluster_action": 9,
    "describe_configs": 10, "alter_configs": 11, "idempotent_write": 12,
}  # fmt: skip


def _bits(*operations: str) -> int:
    return sum(1 << _OPERATION[name] for name in operations)


TOPIC_OPERATIONS = _bits("read", "write", "create", "delete", "alter", "describe", "describe_configs", "alter_configs")
CLUSTER_OPERATIONS = _bits(
    "create", "alter", "describe", "cluster_action", "describe_configs", "alter_configs", "idempotent_write"
)
GROUP_OPERATIONS = _bits("read", "delete", "describe", "describe_configs", "alter_configs")
NOT_ASKED = -(2**31)
