"""semel's broker as a process, for those who look for it here."""

from semel.local.semel_broker import SemelBroker, semel_command

__all__ = ["SemelBroker", "semel_command"]
