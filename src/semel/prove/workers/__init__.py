"""The programs that a campaign runs and kills: each is started as `python -m semel.prove.workers.NAME JSON`."""
