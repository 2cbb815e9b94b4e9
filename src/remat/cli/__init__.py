"""The ``remat`` command."""

import sys
from collections.abc import Sequence

_INTERRUPTED = 130  # ExitCode.INTERRUPTED, whose import may be what was interrupted.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``remat`` command and return its exit code.

    Parameters
    ----------
    argv
        The words after ``remat``; by default those of this process. Words after
        ``--`` are for the user's own script.
    """
    try:
        from remat.cli.entry import run  # noqa: PLC0415 - Ctrl-C while it loads

        return run(argv)
    except KeyboardInterrupt:
        print("remat: interrupted", file=sys.stderr)
        return _INTERRUPTED
