"""``python -m remat``: the same as the ``remat`` command."""

import sys

from remat.cli import main

if __name__ == "__main__":
    sys.exit(main())
