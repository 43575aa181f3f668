"""`python -m looplab.cli` is the same as `looplab`."""

import sys

from looplab.cli import main

if __name__ == "__main__":
    sys.exit(main())
