"""Quix Streams as a peer: copies one topic to another, exactly once. It runs in a virtual environment of its own.

    python quix_peer.py '{"brokers": ..., "id": ..., "source": ..., "target": ..., "commit_s": 1.0}'

With a "folder" for its RocksDB state it counts the records of each key instead, and keeps a changelog topic. It says
"first" when the first record is there, and runs until it is ended.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from quixstreams import Application  # type: ignore[import-not-found]


def main(job: dict[str, Any]) -> None:
    logging.disable(logging.WARNING)
    counts = "folder" in job
    application = Application(
        broker_address=job["brokers"],
        consumer_group=job["id"],
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=job["commit_s"],
        loglevel=None,
        use_changelog_topics=counts,
        consumer_extra_config={"isolation.level": "read_committed"},
        **({"state_dir": job["folder"]} if counts else {}),
    )
    source = application.topic(
        job["source"], key_serializer="bytes", key_deserializer="bytes", value_deserializer="bytes"
    )
    target = application.topic(job["target"], key_serializer="bytes", value_serializer="bytes")
    frame = application.dataframe(source)
    begun: list[bool] = []

    def begin(value: bytes) -> None:
        if not begun:
            begun.append(True)
            print("first", flush=True)

    def counted(value: bytes, state: Any) -> bytes:
        begin(value)
        total = state.get("total", 0) + 1
        state.set("total", total)
        return b"%d" % total

    frame = frame.apply(counted, stateful=True) if counts else frame.update(begin)
    frame.to_topic(target)
    application.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
