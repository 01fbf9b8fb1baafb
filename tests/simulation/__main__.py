"""`make simulate`: see `campaign.py`. Processes that it starts import that one, which they cannot do with this."""

from __future__ import annotations

import sys

from tests.simulation.campaign import main

if __name__ == "__main__":
    sys.exit(main())
