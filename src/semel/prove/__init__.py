"""`semel prove`: workloads, faults, an API-aware proxy, and an independent checker of what came of it."""
