"""Single requests of the transaction protocol, right or wrong."""

from benchmarks.peers.raw_client import NOT_READY, Appended, Fetched, Owner, RawClient, patiently

__all__ = ["NOT_READY", "Appended", "Fetched", "Owner", "RawClient", "patiently"]
