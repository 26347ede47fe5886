"""`python -m attent`: the same as the `attent` command."""

import sys

from attent.cli import main

if __name__ == "__main__":
    sys.exit(main())
