"""The command, as ``python -m multimax``, which torchrun needs."""

import sys

from multimax.cli import main

if __name__ == "__main__":
    sys.exit(main())
