"""What is run under faults: small classes in a table. A new one needs its processes, its topics and what to expect."""

from __future__ import annotations

from semel.prove.workloads.app import AppWorkload
from semel.prove.workloads.base import PRODUCER, Workload
from semel.prove.workloads.loop import ChainWorkload, LoopWorkload
from semel.prove.workloads.spark import AnyOrderWorkload, ExecutorsWorkload, SparkWorkload, StatefulWorkload

WORKLOADS: dict[str, type[Workload]] = {
    workload.name: workload
    for workload in (
        LoopWorkload,
        ChainWorkload,
        SparkWorkload,
        AnyOrderWorkload,
        StatefulWorkload,
        ExecutorsWorkload,
        AppWorkload,
    )
}

__all__ = ["PRODUCER", "WORKLOADS", "Workload"]
