"""What goes into a demo's pipelines, and what must come out of them."""

from semel.demo.workloads.ads import Ads
from semel.demo.workloads.bank import Bank
from semel.demo.workloads.base import DemoTopics, DemoWorkload, Event, Outcome, OutputRecord, Part

WORKLOADS: dict[str, DemoWorkload] = {workload.name: workload for workload in (Bank(), Ads())}

__all__ = ["WORKLOADS", "DemoTopics", "DemoWorkload", "Event", "Outcome", "OutputRecord", "Part"]
