"""`python -m legato`: the same as the command `legato`."""

import sys

from legato.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
