"""What goes into a demo's pipelines, and what must come out of them."""

from semel.demo.workloads.ads import Ads
from semel.demo.workloads.bank import Bank
from semel.demo.workloads.base import Event, Outcome, Part, Record, Topics, Workload

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (Bank(), Ads())}

__all__ = ["WORKLOADS", "Event", "Outcome", "Part", "Record", "Topics", "Workload"]
