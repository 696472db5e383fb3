"""`python -m tarantella.cli` is the command too."""

import sys

from tarantella.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
