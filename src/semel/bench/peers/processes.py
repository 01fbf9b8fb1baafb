"""Child processes, for those who look for them here."""

from semel.local.processes import Process, ProcessFailed

__all__ = ["Process", "ProcessFailed"]
