"""Child processes that are waited for, frozen, killed, and never left behind."""

from semel.local.processes import Process, ProcessFailed

__all__ = ["Process", "ProcessFailed"]
