"""One instance of the processing loop as a program: `python -m tests.support.process_worker '{"guarantee": ...}'`."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from semel.client.errors import FencedError
from semel.patterns.process import Output, Processor

FENCED = 3


def main(options: dict[str, Any]) -> int:
    delay_s = options.pop("delay_ms", 0) / 1000

    def copy(record: Any) -> Output:
        if delay_s:
            time.sleep(delay_s)  # the window in which a kill hurts
        return Output(record.value, record.key)

    def settled(stats: Any) -> None:
        print(f"settled {stats.records_in} {stats.commits} {stats.aborts}", flush=True)

    function = (lambda table: table) if options.get("tables") else copy
    try:
        stats = Processor(options.pop("source"), options.pop("sink"), function, on_settled=settled, **options).run()
    except FencedError as error:
        print(f"fenced: {error}", flush=True)
        return FENCED
    print(f"stopped {stats.records_in} {stats.commits} {stats.aborts}", flush=True)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    sys.exit(main(json.loads(sys.argv[1])))
