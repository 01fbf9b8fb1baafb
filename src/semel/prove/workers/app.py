"""The user's own pipeline: `python -m semel.prove.workers.app JSON`. Calls its function until it is killed."""

from __future__ import annotations

import json
import sys
from typing import Any

from semel.prove.app import load


def main(options: dict[str, Any]) -> int:
    print("working", flush=True)
    load(options["app"])(
        brokers=options["brokers"],
        source=options["source"],
        output=options["output"],
        application_id=options["application_id"],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
