"""Programs on this machine as child processes: what proofs, demos, benchmarks and tests start, freeze and kill."""
