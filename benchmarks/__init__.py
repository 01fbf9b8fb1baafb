"""Benchmarks side by side with peers, behind `semel bench NAME`. Part of a checkout, not of an installed semel.

A benchmark is a module of this package with `run(report, quick=False)`; `harness.py` has what they share, `peers/` the
systems that semel is compared with. `peers/` is used by the tests as well.
"""
