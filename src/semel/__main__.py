"""`python -m semel` is the same as `semel`."""

import sys

from semel.cli import main

if __name__ == "__main__":
    sys.exit(main())
