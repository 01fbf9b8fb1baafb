"""The workloads, by their names."""

from __future__ import annotations

from semel.prove.table_workloads import (
    InboxWorkload,
    OutboxWorkload,
    PostgresAndTopicsWorkload,
    PostgresWorkload,
    SparkPostgresAndTopicsWorkload,
    SparkPostgresWorkload,
)
from semel.prove.workloads import (
    AnyOrderWorkload,
    AppWorkload,
    ChainWorkload,
    EntitiesWorkload,
    ExecutorsWorkload,
    FilesWorkload,
    LoopWorkload,
    SagasWorkload,
    SparkWorkload,
    StatefulWorkload,
    StateWorkload,
    StreamWriterWorkload,
    Workload,
)

WORKLOADS: dict[str, type[Workload]] = {
    workload.name: workload
    for workload in (
        LoopWorkload,
        ChainWorkload,
        StateWorkload,
        EntitiesWorkload,
        SagasWorkload,
        PostgresWorkload,
        PostgresAndTopicsWorkload,
        InboxWorkload,
        OutboxWorkload,
        FilesWorkload,
        SparkWorkload,
        AnyOrderWorkload,
        StreamWriterWorkload,
        StatefulWorkload,
        ExecutorsWorkload,
        SparkPostgresWorkload,
        SparkPostgresAndTopicsWorkload,
        AppWorkload,
    )
}
